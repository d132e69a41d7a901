"""The compiled engine against the naive reference: every layer, loss and plan option, on every instruction set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import FIELDS, Case, build, everything, mlp, plan, planned, same_bits, train, works
from torch import nn

from fedveil.errors import UserError
from fedveil.models import compile, nets
from fedveil.protect import noise
from fedveil.training import native, reference
from fedveil.training.contract import ClientWork, LocalResult

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled extension is not installed")
SETS = native.instruction_sets() or ("none",)


def papers_like() -> nn.Sequential:
    """The papers' net on a small image: no biases, pools that drop a row and a column."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 3, bias=False),
    )  # fmt: skip


def padded() -> nn.Sequential:
    """Padding, biases, odd channel counts, ReLU after the pool."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 17, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(17 * 3 * 3, 20), nn.ReLU(), nn.Linear(20, 3),
    )  # fmt: skip


def strided() -> nn.Sequential:
    """Strides, overlapping pools, smooth activations before and after a pool, a 1x1 convolution."""
    return nn.Sequential(
        nn.Conv2d(2, 5, 4, stride=2, padding=1), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(5, 7, 3, stride=2), nn.Sigmoid(), nn.Conv2d(7, 4, 1), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def normed() -> nn.Sequential:
    """GroupNorm with and without parameters, pools with padding."""
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding="same"), nn.GroupNorm(4, 8), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(8, 6, 3), nn.ReLU(), nn.AvgPool2d(2, padding=1), nn.GroupNorm(3, 6, affine=False),
        nn.Flatten(), nn.Linear(6 * 2 * 2, 3),
    )  # fmt: skip


def unusual() -> nn.Sequential:
    """Starts with a pool and a norm, ends in Flatten, nested, with an Identity."""
    return nn.Sequential(
        nn.AvgPool2d(2), nn.GroupNorm(1, 2), nn.Identity(),
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.Sigmoid(), nn.Conv2d(3, 3, 3, padding=1)), nn.Flatten(),
    )  # fmt: skip


def deep_run() -> nn.Sequential:
    """Long rows in one direction, kernels wider than a vector load."""
    return nn.Sequential(
        nn.Conv2d(3, 16, (1, 9), padding=(0, 4)), nn.ReLU(), nn.Conv2d(16, 24, (1, 3), padding=(0, 1)), nn.ReLU(),
        nn.Flatten(), nn.Linear(24 * 12, 3),
    )  # fmt: skip


def large_kernels() -> nn.Sequential:
    """A sparse backward pass over more rows and vectors than one kernel takes; pools of other shapes."""
    return nn.Sequential(
        nn.Conv2d(2, 40, (3, 1), padding=(1, 0)), nn.ReLU(), nn.Conv2d(40, 18, 7, padding=3), nn.ReLU(), nn.MaxPool2d((3, 2)),
        nn.Conv2d(18, 70, 3, padding=1), nn.MaxPool2d((1, 3)), nn.Flatten(), nn.Linear(70 * 3 * 1, 3),
    )  # fmt: skip


def dense() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 40, bias=False),
        nn.Sigmoid(),
        nn.Linear(40, 9),
        nn.Tanh(),
        nn.Linear(9, 3),
    )


def beside() -> compile.Beside:
    """Seven numbers behind the image go past the convolutions."""
    body = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 6, 2), nn.Tanh())
    head = nn.Sequential(nn.Linear(6 * 2 * 3 + 7, 9), nn.ReLU(), nn.Linear(9, 3))
    return compile.Beside(body, head, (2, 8, 10))


NETS = {
    "beside": (beside, (2 * 8 * 10 + 7,)),
    "papers": (papers_like, (1, 12, 11)),
    "padded": (padded, (3, 12, 13)),
    "strided": (strided, (2, 14, 15)),
    "normed": (normed, (2, 8, 8)),
    "unusual": (unusual, (2, 4, 4)),
    "rows": (deep_run, (3, 1, 12)),
    "large": (large_kernels, (2, 9, 7)),
    "dense": (dense, (1, 4, 4)),
}

GAUSS = {"noise": "gaussian"}
PLANS = {
    "plain": {},
    "layer": {"clip": "layer"},
    "flat": {"clip": "flat"},
    "l1": {"clip": "layer", "clip_norm": "l1"},
    "l1 flat": {"clip": "flat", "clip_norm": "l1"},
    "median": {"clip": "layer", "bound_rule": "median", **GAUSS},
    "median flat": {"clip": "flat", "bound_rule": "median", **GAUSS},
    "l2-max": {"clip": "layer", "sensitivity": "l2-max", **GAUSS},
    "l2-max of the mean": {"clip": "layer", "sensitivity": "l2-max-mean", **GAUSS},
    "l2-max of the mean, flat": {"clip": "flat", "sensitivity": "l2-max-mean", **GAUSS},
    "mean measured": {"clip": "layer", "measure_mean": True, **GAUSS},
    "mean measured, flat": {"clip": "flat", "measure_mean": True},
    "mean measured, no clip": {"measure_mean": True, **GAUSS},
    "l2-max flat example": {"clip": "flat", "sensitivity": "l2-max", "noise_on": "example", **GAUSS},
    "mean": {"clip": "layer", "noise_on": "mean", **GAUSS},
    "noise only": dict(GAUSS),
    "laplace": {"clip": "layer", "noise": "laplace"},
    "staircase": {"clip": "flat", "noise": "staircase", "noise_on": "mean"},
    "staircase shape": {"clip": "flat", "noise": "staircase", "nu": 0.2},
    "narrow staircase": {"clip": "flat", "noise": "staircase", "width": 0.05},
    "joint": {"clip": "flat", "clip_norm": "l1", "noise": "joint-staircase"},
    "momentum": {"clip": "layer", "momentum": 0.9, **GAUSS},
    "proximal": {"proximal": 0.3, "clip": "flat"},
    "squared": {"loss": "squared", "clip": "layer"},
}


def assert_agrees(case: Case, got: LocalResult, expected: LocalResult, tolerance: float) -> None:
    """Updates to `tolerance` of the largest update, beyond the rounding of the weights themselves; figures to 1e-5."""
    rounding = 2e-7 * np.abs(case.start).max()
    size = np.abs(expected.delta).max()
    assert np.abs(got.delta - expected.delta).max() <= tolerance * size + rounding
    for name in FIELDS:
        if name != "delta":
            assert np.allclose(getattr(got, name), getattr(expected, name), rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("net", NETS)
def test_one_step_agrees_with_the_reference_to_1e_5(net, isa):
    make, shape = NETS[net]
    case = build(make, shape, 3, rows=20)
    if isa != SETS[0] and net in ("normed", "unusual"):
        pytest.skip("no code of its own for this instruction set")
    for name, options in PLANS.items():
        what = plan(1, **options)
        vectors = ("control",) if name == "momentum" else ()
        work = works(case, clients=1, steps=1, batch=5, vectors=vectors)
        if what.loss == "squared":
            case = Case(case.module, case.start, case.x, np.random.default_rng(1).normal(size=(20, 3)))
        expected = train(reference, case, work, what)
        assert_agrees(case, train(native, case, work, what, isa=isa), expected, 1e-5)


def random_case(seed: int) -> Case:
    """A random stack of known layers that fits its random image."""
    draw = np.random.default_rng(seed)
    channels, rows, columns = int(draw.integers(1, 5)), int(draw.integers(5, 15)), int(draw.integers(5, 15))
    shape, layers, size = (channels, rows, columns), [], [channels, rows, columns]
    for _ in range(draw.integers(2, 7)):
        kind = draw.integers(0, 6)
        kernel = tuple(int(draw.integers(1, min(n, 5) + 1)) for n in size[1:])
        stride = tuple(int(draw.integers(1, 3)) for _ in range(2))
        pad = tuple(int(draw.integers(0, k // 2 + 1)) for k in kernel)
        if kind <= 1:
            after = int(draw.integers(1, 40))
            layers.append(nn.Conv2d(size[0], after, kernel, stride, pad, bias=bool(draw.integers(0, 2))))
            size[0] = after
        elif kind <= 3:
            pool = nn.MaxPool2d if kind == 2 else nn.AvgPool2d
            layers.append(pool(kernel, stride, pad if draw.integers(0, 2) else 0))
        elif kind == 4:
            groups = int(draw.choice([g for g in range(1, size[0] + 1) if size[0] % g == 0]))
            layers.append(nn.GroupNorm(groups, size[0]))
        if draw.integers(0, 2):
            layers.append([nn.ReLU(), nn.Tanh(), nn.Sigmoid()][draw.integers(0, 3)])
        with torch.no_grad():
            size = list(nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1:])
    return build(
        lambda: nn.Sequential(*layers, nn.Flatten(), nn.Linear(int(np.prod(size)), 3)), shape, 3, seed, 12
    )


@pytest.mark.parametrize("seed", range(30))
def test_random_nets_agree_with_the_reference(seed):
    case, isa = random_case(seed), SETS[seed % len(SETS)]
    work = works(case, 2, 1, batch=3, seed=seed)
    for options in ({"clip": "layer", **GAUSS}, {"clip": "flat"}):
        # GroupNorm of two or three almost equal numbers magnifies rounding
        expected = train(reference, case, work, plan(1, **options), dtype=torch.float64)
        got = train(native, case, work, plan(1, **options), isa=isa)
        torch32 = train(reference, case, work, plan(1, **options))
        size = np.abs(expected.delta).max()
        allowed = (
            1e-5 * size + 2e-7 * np.abs(case.start).max() + 4 * np.abs(torch32.delta - expected.delta).max()
        )
        assert np.abs(got.delta - expected.delta).max() <= allowed


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS.keys())
def test_poisson_batches_with_every_vector_agree(options, isa):
    """Batches of 0 to 4 examples, SCAFFOLD, anchor and AdaClip vectors at once, 3 steps, 3 clients."""
    case = everything()
    if options.get("loss") == "squared":
        case = Case(case.module, case.start, case.x, np.random.default_rng(1).normal(size=(len(case.x), 3)))
    work = works(case, 3, poisson=True, vectors=("control", "anchor", "shift", "scale"))
    what = plan(penalty=0.2, **options)
    assert_agrees(case, train(native, case, work, what, isa=isa), train(reference, case, work, what), 3e-5)


def test_an_empty_batch_still_gets_noise_and_none_at_all_is_no_example():
    case = mlp()
    (one,) = works(case, 1)
    empty = [replace(one, rows=np.full((3, 4), -1, np.int32)), replace(one, rows=np.zeros((3, 0), np.int32))]
    for options in ({"clip": "layer", **GAUSS}, {"clip": "layer", "sensitivity": "l2-max", **GAUSS}):
        got, expected = (train(engine, case, empty, plan(**options)) for engine in (native, reference))
        assert_agrees(case, got, expected, 1e-5)
        assert np.array_equal(got.examples, [0, 0])
    assert not got.delta.any()


@pytest.mark.parametrize("name", ["mlp", "papers"])
def test_noise_is_bit_for_bit_that_of_the_definition(name):
    """With gradients clipped to (almost) nothing the update is the noise alone."""
    case = mlp() if name == "mlp" else build(papers_like, (1, 12, 11), 3)
    what = planned(1, 1.0, 1.0, clip="layer", bounds=(1e-30,), noise="gaussian", multipliers=(2.0**90,))
    work = works(case, 2, steps=1)
    zero = Case(case.module, np.zeros_like(case.start), case.x, case.y)
    got = train(native, zero, work, what).delta
    scale = np.float32(1e-30 * 2.0**90)
    for row, client in zip(got, work, strict=True):
        assert np.array_equal(row, -(noise.numpy_normals(client.noise_key, 0, len(row)) * scale))


MEASURED = [
    {"clip": "layer", **GAUSS},
    {"clip": "flat", **GAUSS},
    {"clip": "flat", "grid": 2.0**-10, **GAUSS},
    {"clip": "layer", "bound_rule": "median", **GAUSS},
    {"clip": "flat", "noise": "laplace", "momentum": 0.5},
    {"clip": "layer", "sensitivity": "l2-max", **GAUSS},
]


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("options", MEASURED, ids=str)
def test_measuring_the_mean_changes_no_bit_of_anything_else(options, isa):
    """Batches of one group, of several, and Poisson ones with empty steps; dense layers alone and behind convolutions."""
    for case in (mlp(), build(papers_like, (1, 12, 11), 3)):
        for work in (works(case, 2), works(case, 1, batch=77), works(case, 3, poisson=True)):
            plain, measured = (train(native, case, work, plan(measure_mean=m, **options), isa=isa) for m in (False, True))
            assert measured.mean_gradient_norms.shape == (len(work), 3) and measured.mean_gradient_norms.max() > 0
            assert plain.mean_gradient_norms.shape == (len(work), 0)
            assert same_bits(plain, replace(measured, mean_gradient_norms=plain.mean_gradient_norms))


@pytest.mark.parametrize(
    ("options", "limit"), [({}, 2e-4), ({"clip": "layer", **GAUSS}, 2e-4), ({"clip": "flat"}, 2e-4)]
)
def test_rounding_drifts_slowly_over_100_steps(options, limit):
    """After 100 steps the engines differ by less than `limit` of the update (float32 rounding; observed 1e-6 to 5e-5)."""
    for case in (mlp(), build(papers_like, (1, 12, 11), 3)):
        what = plan(100, **options)
        work = works(case, 1, 100)
        got, expected = (train(engine, case, work, what).delta for engine in (native, reference))
        assert np.linalg.norm(got - expected) < limit * np.linalg.norm(expected)


def test_threads_do_not_change_a_bit():
    case = build(padded, (3, 12, 13), 3)
    work = works(case, 7, poisson=True)
    what = plan(clip="flat", momentum=0.5, **GAUSS)
    results = [train(native, case, work, what, threads=n) for n in (1, 2, 4, 16)]
    assert all(same_bits(results[0], other) for other in results[1:])


def test_a_client_is_the_same_alone_and_in_company():
    case = mlp()
    work = works(case, 4, poisson=True)
    together = train(native, case, work, plan(clip="layer", **GAUSS))
    for k, one in enumerate(work):
        alone = train(native, case, [one], plan(clip="layer", **GAUSS))
        assert np.array_equal(alone.delta[0], together.delta[k])


def test_a_batch_is_the_same_however_far_its_row_is_padded():
    """Images so large that only four fit a group: batches of up to eight are one group, whatever the width."""
    case = build(
        lambda: nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(1176, 9)),
        (1, 28, 28), 9,
    )  # fmt: skip
    for count in (4, 5, 8, 9, 11):
        found = [
            train(native, case, [ClientWork(0, rows, bytes(16))], plan(steps=1, clip="flat", noise="gaussian")).delta
            for width in (count, count + 1, 20)
            for rows in [np.where(np.arange(width) < count, np.arange(width), -1)[None].astype(np.int32)]
        ]
        assert all(np.array_equal(found[0], other) for other in found[1:]), count


def test_groups_of_a_large_batch_add_up():
    """A batch far larger than the engine keeps at once, and with a remainder."""
    case = build(padded, (3, 12, 13), 3)
    for clip in ("layer", "flat"):
        work, what = works(case, 1, 1, batch=77), plan(1, clip=clip, expected_batch=77.0)
        assert_agrees(case, train(native, case, work, what), train(reference, case, work, what), 1e-5)


def test_weights_that_overflow_are_noticed():
    case = mlp()
    got = train(native, case, works(case, 1), plan(learning_rate=1e38))
    assert not got.finite[0] and not got.delta.any()


def test_pooling_keeps_a_nan_in_any_place_of_its_window():
    for place in range(4):
        case = build(papers_like, (1, 12, 11), 3)
        x = np.zeros_like(case.x)
        x[:, 0, place // 2, place % 2] = np.nan
        got = train(native, Case(case.module, case.start, x, case.y), works(case, 1), plan())
        assert not got.finite[0]


# What it refuses


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(), nn.Linear(3, 2)), "layer '1' (LeakyReLU)"),
        (nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.Flatten()), "layer '0' (Conv2d) has groups"),
        (nn.Sequential(nn.Conv2d(2, 2, 3, dilation=2), nn.Flatten()), "layer '0' (Conv2d) is dilated"),
        (
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), nn.Flatten()),
            "pads with reflect",
        ),
        (
            nn.Sequential(nn.Conv2d(2, 2, 1), nn.MaxPool2d(2, ceil_mode=True), nn.Flatten()),
            "layer '1' (MaxPool2d)",
        ),
        (nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))), "layer '0.1' (Dropout)"),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 2)), "does not follow a Flatten"),
        (nn.Sequential(nn.Linear(4, 4), nn.Conv2d(1, 2, 3), nn.Flatten()), "follows a flat layer"),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), "does not end in a flat output"),
        (nn.Sequential(nn.ReLU(), nn.Flatten()), "no parameters"),
        (nn.Bilinear(2, 2, 2), "the model (Bilinear)"),
    ],
)
def test_reasons_name_the_layer(module, reason):
    why = native.why_not(module, plan())
    assert why is not None and reason in why
    with pytest.raises(UserError, match="native engine"):
        native.train(module, np.zeros(1), np.zeros((1, 3)), np.zeros(1), [], plan())


def test_shared_parameters_are_refused():
    layer = nn.Linear(3, 3)
    assert "shares its parameters" in str(native.why_not(nn.Sequential(layer, nn.ReLU(), layer), plan()))


def test_an_activation_used_twice_acts_twice():
    act = nn.Tanh()
    case = build(lambda: nn.Sequential(nn.Linear(7, 6), act, nn.Linear(6, 5), act, nn.Linear(5, 3)), (7,), 3)
    work = works(case)
    assert_agrees(case, train(native, case, work, plan()), train(reference, case, work, plan()), 1e-5)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize(
    "options", [{}, {"noise_on": "mean"}, {"noise_on": "example"}, {"sensitivity": "l2-max"}, {"width": 8.0}], ids=str
)
@pytest.mark.parametrize("law", ["gaussian", "laplace", "staircase", "joint-staircase"])
@pytest.mark.parametrize("name", ["mlp", "papers", "normed", "padded"])
def test_grid_noise_has_the_integers_of_the_definition(name, law, options, isa, monkeypatch):
    """With gradients clipped to less than half a grid step the update is the noise alone, in whole steps."""
    nets = {
        "papers": (papers_like, (1, 12, 11)),
        "normed": (normed, (2, 9, 8)),
        "padded": (padded, (3, 12, 13)),
    }
    case = mlp() if name == "mlp" else build(*nets[name], 3)
    bound, sigma, grid = 2.0**-9, 300.0, 2.0**-6
    if "staircase" in law:
        if options.get("sensitivity") or (law == "joint-staircase" and options.get("width")):
            return
        sigma = 3.0
    elif options.get("width"):
        return
    if options.get("noise_on") == "example" and law != "gaussian":
        return  # no recipe adds up independent draws of these
    what = planned(
        1,
        1.0,
        4.0,
        clip="flat",
        bounds=(bound,),
        noise=law,
        multipliers=(sigma,),
        grid=grid,
        **options,
    )
    work = works(case, 2, steps=1)
    zero = Case(case.module, case.start * 0 + np.float32(0.5), case.x * 1000, case.y)
    got = train(native, zero, work, what, isa=isa).delta.astype(np.float64)
    monkeypatch.setattr(noise, "_native", None)  # the definitions, in NumPy
    for row, client in zip(got, work, strict=True):
        drawn = what.noised[0].add(np.zeros(len(row)), client.noise_key)
        assert np.array_equal(row, -drawn / 4.0) and drawn.any()


def test_grid_noise_that_has_no_discrete_form_is_refused():
    for options in ({"bound_rule": "median", **GAUSS}, {"noise": "staircase", "sensitivity": "l2-max"}):
        assert "grid" in str(native.why_not(mlp().module, plan(clip="flat", grid=0.1, **options)))


def test_a_sum_too_large_for_its_grid_ends_the_client():
    case = mlp()
    what = plan(clip="flat", bounds=(1.0, 1.0, 1.0), grid=1e-30, multipliers=(0.0, 0.0, 0.0), **GAUSS)
    for engine in (native, reference):
        got = train(engine, case, works(case, 1), what)
        assert not got.finite[0] and not got.delta.any()


def test_every_net_of_the_catalogue_is_known_or_refused_with_a_layer():
    refused = {}
    for name in (
        "papers-cnn",
        "papers-mlp",
        "small-vgg",
        "udp-mnist-cnn",
        "tanh-cnn",
        "cpl-lenet",
        "logistic",
        "resnet18-gn",
    ):
        reason = compile.why_not(nets.build(name, (1, 28, 28), 10, 0))
        if reason:
            refused[name] = reason
    assert not refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: Case(c.module, c.start, c.x, c.y + 3), "label is outside"),
        (lambda c: Case(c.module, c.start, c.x[:5], c.y[:5]), "row number is outside"),
        (lambda c: Case(c.module, c.start, c.x, c.y[:5]), "y does not fit"),
        (lambda c: Case(c.module, c.start[:-1], c.x, c.y), "start does not fit"),
        (lambda c: Case(c.module, c.start, c.x[:, :5], c.y), "expects 7 inputs but gets 5"),
    ],
)
def test_input_that_does_not_fit_is_an_error_not_a_crash(change, message):
    case = mlp()
    with pytest.raises(UserError, match=message):
        train(native, change(case), works(case), plan())


def test_an_example_shorter_than_its_image_is_an_error_not_a_crash():
    case = build(beside, (167,), 3)
    short = Case(case.module, case.start, case.x[:, :150], case.y)
    with pytest.raises(UserError, match="150 numbers"):
        train(native, short, works(case), plan())


def test_an_unknown_instruction_set_is_refused():
    case = mlp()
    with pytest.raises(UserError, match="instruction set 'mmx'"):
        train(native, case, works(case), plan(), isa="mmx")


def test_data_of_other_types_and_layouts_are_taken_as_they_are_meant():
    case = mlp()
    expected = train(native, case, works(case), plan())
    other = Case(
        case.module,
        case.start.astype(np.float64),
        np.asfortranarray(case.x.astype(np.float64)),
        case.y.astype(np.int32),
    )
    assert same_bits(expected, train(native, other, works(case), plan()))
    tensors = Case(case.module, case.start, torch.as_tensor(case.x), torch.as_tensor(case.y))
    assert same_bits(expected, train(native, tensors, works(case), plan()))
