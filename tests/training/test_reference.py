"""The oracle itself, against numbers that can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_cases import Case, build, everything, mlp, plan, planned, train, works
from torch import nn

from fedveil.models.layout import layout_of
from fedveil.protect.noise import normals
from fedveil.training import reference
from fedveil.training.contract import ClientWork, LocalPlan


def line(weights: list[float], x: list[list[float]], y: list[float]) -> Case:
    """Linear regression without bias: the gradient of example i is 2 (w.x_i - y_i) x_i."""
    case = build(lambda: nn.Sequential(nn.Linear(len(weights), 1, bias=False)), (len(weights),), None)
    return Case(case.module, np.array(weights, np.float32), np.array(x, np.float32), np.array(y, np.float32))


def client(rows: list[list[int]], **vectors: np.ndarray) -> list[ClientWork]:
    return [ClientWork(0, np.array(rows, np.int32), bytes(16), **vectors)]


def one_step(case: Case, **changes: object) -> LocalPlan:
    return planned(
        **{"steps": 1, "learning_rate": 1.0, "expected_batch": 2.0, "loss": "squared", **changes}
    )


# At w = (1, 0): x = (3, 4), y = 1 has gradient 4 (3, 4) of norm 20; x = (0, 1), y = -1 has gradient (0, 2) of norm 2.
HAND = ([1.0, 0.0], [[3.0, 4.0], [0.0, 1.0]], [1.0, -1.0])


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({}, (12, 18)),
        ({"clip": "layer", "bounds": (5.0,)}, (3, 4 + 2)),
        ({"clip": "flat", "bounds": (1.0,)}, (0.6, 0.8 + 1)),
        ({"clip": "layer", "clip_norm": "l1", "bounds": (7.0,)}, (3, 4 + 2)),
        (
            {"clip": "layer", "bound_rule": "median", "bounds": (0.0,)},
            (6.6, 8.8 + 2),
        ),  # median of 20 and 2: 11
    ],
)
def test_one_step_is_the_clipped_mean(changes, total):
    result = train(
        reference, case := line(*HAND), client([[0, 1]]), one_step(case, **changes), dtype=torch.float64
    )
    np.testing.assert_allclose(result.delta[0], -np.array(total) / 2, rtol=3e-7)  # the margin below the bound


def test_figures_of_a_hand_made_batch():
    case = line(*HAND)
    result = train(reference, case, client([[0, 1, -1]]), one_step(case, clip="layer", bounds=(5.0,)))
    assert result.loss[0] == pytest.approx((4 + 1) / 2)
    assert result.norm_mean[0, 0] == pytest.approx(11)
    assert result.norm_max[0, 0] == pytest.approx(20)
    assert (result.unclipped[0], result.below_count[0], result.examples[0]) == (0.5, 1, 2)


@pytest.mark.parametrize(
    ("changes", "sensitivity"),
    [
        ({"clip": "layer"}, 5.0),
        ({"clip": "layer", "sensitivity": "l2-max"}, 5.0),
        ({"clip": "layer", "bounds": (50.0,), "sensitivity": "l2-max"}, 20.0),
        ({"clip": "none"}, 5.0),
        ({"clip": "none", "sensitivity": "l2-max"}, 20.0),
        ({"clip": "layer", "bound_rule": "median"}, 11.0),
    ],
)
def test_noise_is_the_stream_times_the_sensitivity(changes, sensitivity):
    case, work = line(*HAND), client([[0, 1]])
    private = one_step(case, **{"bounds": (5.0,), "noise": "gaussian", "multipliers": (0.7,), **changes})
    quiet = one_step(case, **{"bounds": (5.0,), **changes})
    difference = train(reference, case, work, private, dtype=torch.float64).delta[0]
    difference = difference - train(reference, case, work, quiet, dtype=torch.float64).delta[0]
    noise = normals(work[0].noise_key, 0, 2).astype(float)
    np.testing.assert_allclose(difference, -0.7 * sensitivity * noise / 2, rtol=1e-6)
    result = train(reference, case, work, private)
    assert result.noise_scale[0] == pytest.approx(0.7 * sensitivity)


def test_l2_max_of_the_mean_is_the_norm_of_the_clipped_sum_over_the_batch():
    case, work = line(*HAND), client([[0, 1]])
    gradients = [2 * (case.x[row] @ np.array([1.0, 0.0]) - case.y[row]) * case.x[row] for row in (0, 1)]
    clipped = sum(g * min(1.0, 5 / np.linalg.norm(g)) for g in gradients)
    private = one_step(
        case, clip="layer", bounds=(5.0,), noise="gaussian", multipliers=(0.7,), sensitivity="l2-max-mean"
    )
    result = train(reference, case, work, private)
    assert result.noise_scale[0] == pytest.approx(0.7 * np.linalg.norm(clipped) / 2, rel=1e-6)


@pytest.mark.parametrize("asked", [{"sensitivity": "l2-max-mean"}, {"measure_mean": True}])
@pytest.mark.parametrize("clip", ["layer", "flat"])
def test_the_norm_of_each_steps_mean_gradient_is_that_of_autograd_and_numpy(clip, asked):
    """A batch of four, of one and of none; the noise, which follows it or does not, is no part of the figure."""
    case, noise = mlp(), {"noise": "gaussian", "multipliers": (0.7,)}
    work = [client([[0, 1, 2, 3]])[0], client([[5, -1, -1, -1]])[0], client([[-1] * 4])[0]]
    expected = []
    for one in work:
        sums = [0.0, 0.0, 0.0] if clip == "layer" else [0.0]
        for row in one.rows[0][one.rows[0] >= 0]:
            case.module.zero_grad()
            x, y = torch.tensor(case.x[row : row + 1]), torch.tensor(case.y[row : row + 1])
            torch.nn.functional.cross_entropy(case.module(x), y).backward()
            grads = [torch.cat([p.grad.flatten() for p in case.module[at].parameters()]).numpy() for at in (0, 2, 4)]
            parts = grads if clip == "layer" else [np.concatenate(grads)]
            sums = [s + g * min(1.0, 0.5 / np.linalg.norm(g)) for s, g in zip(sums, parts, strict=True)]
        expected.append(max(np.linalg.norm(s) for s in sums) / 2)
    what = planned(1, 0.1, 2.0, clip=clip, bounds=(0.5,), **noise, **asked)
    found = train(reference, case, work, what).mean_gradient_norms
    assert expected[0] > expected[1] > expected[2] == 0
    np.testing.assert_allclose(found, np.array(expected)[:, None], rtol=1e-5)
    quiet = planned(1, 0.1, 2.0, clip=clip, bounds=(0.5,), **noise)
    assert train(reference, case, work, quiet).mean_gradient_norms.shape == (3, 0)


@pytest.mark.parametrize(("sensitivity", "noised"), [("bound", True), ("l2-max", False), ("l2-max-mean", False)])
def test_an_empty_batch_gets_noise_only_if_its_scale_does_not_look_at_the_batch(sensitivity, noised):
    case = line(*HAND)
    private = one_step(
        case, clip="layer", bounds=(5.0,), noise="gaussian", multipliers=(1.0,), sensitivity=sensitivity
    )
    result = train(reference, case, client([[-1, -1]]), private)
    assert bool(np.any(result.delta)) == noised
    assert result.finite.all() and result.examples[0] == 0


def test_momentum_and_the_three_extra_terms_enter_as_written():
    case, start = line(*HAND), np.array([1.0, 0.0])
    anchor, control = np.array([0.5, 2.0], np.float32), np.array([0.1, -0.3], np.float32)
    what = LocalPlan(2, 0.1, 1.0, momentum=0.9, proximal=0.4, penalty=0.3, loss="squared")
    result = train(
        reference, case, client([[0], [1]], anchor=anchor, control=control), what, dtype=torch.float64
    )
    w, v = start.copy(), np.zeros(2)
    for row in (0, 1):
        gradient = 2 * (case.x[row] @ w - case.y[row]) * case.x[row]
        v = 0.9 * v + gradient + 0.4 * (w - start) + 0.3 * (w - anchor) + control
        w = w - 0.1 * v
    np.testing.assert_allclose(result.delta[0], w - start, rtol=1e-7)


def test_adaclip_clips_the_mapped_gradient_and_maps_the_mean_back():
    case = line(*HAND)
    shift, scale = np.array([2.0, 1.0], np.float32), np.array([2.0, 3.0], np.float32)
    what = one_step(case, clip="layer", bounds=(5.0,), expected_batch=4.0)
    result = train(reference, case, client([[0, 1]], shift=shift, scale=scale), what, dtype=torch.float64)
    mapped = (np.array([[12.0, 16.0], [0.0, 2.0]]) - shift) / scale
    clipped = mapped * np.minimum(1, 5 / np.linalg.norm(mapped, axis=1))[:, None]
    np.testing.assert_allclose(result.delta[0], -(scale * clipped.sum(0) / 4 + shift), rtol=3e-7)


def test_gradient_is_the_slope_of_the_loss():
    case = everything()
    layout = layout_of(case.module)
    weights = torch.as_tensor(case.start).double()
    _, gradient = reference.example_gradient(
        case.module, layout, weights, case.x[0], case.y[0], "cross-entropy"
    )
    draw = np.random.default_rng(0)
    for index in draw.integers(0, layout.size, 12):
        values = []
        for sign in (-1, 1):
            moved = weights.clone()
            moved[index] += sign * 1e-6
            values.append(
                reference.example_gradient(case.module, layout, moved, case.x[0], case.y[0], "cross-entropy")[
                    0
                ]
            )
        assert (values[1] - values[0]) / 2e-6 == pytest.approx(float(gradient[index]), abs=1e-7)


def test_a_client_that_meets_nan_is_reported_and_returns_nothing():
    case = everything()
    case.x[7, 0, 0, 0] = np.nan
    work = works(case, clients=2)
    work[0].rows[:] = 3
    work[1].rows[1, 2] = 7
    result = train(reference, case, work, plan())
    assert result.finite.tolist() == [True, False]
    assert np.any(result.delta[0]) and not np.any(result.delta[1])
    assert result.loss[1] == 0 and np.isfinite(result.norm_max).all()


def test_a_clipped_gradient_that_is_not_finite_adds_nothing_and_is_counted():
    """By hand: one step, one layer, two examples, one of them NaN."""
    case = build(lambda: torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)), (2,), 2)
    case.x[1] = np.nan
    (one,) = works(case, 1, steps=1, batch=2)
    one.rows[0] = [0, 1]
    result = train(
        reference, case, [one], plan(1, clip="flat", bounds=(0.01,), learning_rate=1.0, expected_batch=2.0)
    )
    assert result.finite[0] and result.skipped[0] == 1 and result.examples[0] == 2
    assert np.linalg.norm(result.delta[0]) == pytest.approx(0.01 / 2, rel=1e-5)
    assert np.isfinite(result.loss[0]) and result.unclipped[0] == 0
