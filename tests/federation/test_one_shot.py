"""Least squares in one release: the same numbers as NumPy's, noise and event of the recipe, and every observer's row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.errors import UserError
from fedveil.federation import loop
from fedveil.federation.config import make_config
from fedveil.federation.round import moment_of, noised_of, start
from fedveil.models.layout import flatten
from fedveil.privacy.accountants import answer
from fedveil.protect.promise import claims

QUICK = {"model": "adassp", "partition": "iid", "report": False}
FULL = {"sampling": "full", "cohort": "all"}


def rows(n: int = 400, columns: int = 4, classes: int | None = 2, seed: int = 0):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, columns)).astype(np.float32) / 4
    score = x @ draw.normal(size=(columns, classes or 1)) + draw.normal(size=(n, classes or 1)) * 0.05
    y = score[:, 0].astype(np.float32) if classes is None else score.argmax(1)
    half = n // 2
    return fv.dataset(x[:half], y[:half], x[half:], y[half:], classes=classes)


def wide(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x.reshape(len(x), -1), np.ones((len(x), 1))], 1).astype(np.float64)


def targets(y: np.ndarray, classes: int | None) -> np.ndarray:
    if classes is None:
        return y[:, None].astype(np.float64)
    return (2.0 * y - 1)[:, None] if classes == 2 else np.eye(classes)[y]


@pytest.mark.parametrize("classes", [None, 2, 3])
def test_without_noise_it_is_least_squares(classes, tmp_path):
    own = rows(classes=classes)
    result = fv.run("non-private", data=own, clients=4, out=tmp_path / "r", sampling="full", batch_size=1000, **QUICK)
    wanted = np.linalg.lstsq(wide(own.x), targets(own.y, classes), rcond=None)[0]
    result.module.eval()
    with torch.no_grad():
        found = result.module(torch.as_tensor(own.x_test)).numpy()
        layer = result.module.head()(torch.as_tensor(own.x_test)).numpy()
    plain = wide(own.x_test) @ wanted
    expected = np.concatenate([-plain, plain], 1) if classes == 2 else plain
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.allclose(found, layer, atol=1e-5)


def direct(own, classes, bound: float) -> tuple[np.ndarray, np.ndarray]:
    """The two sums, each row's statistics clipped together: written out in NumPy."""
    x, y = wide(own.x), targets(own.y, classes)
    gram, cross = np.zeros((x.shape[1],) * 2), np.zeros((y.shape[1], x.shape[1]))
    for row, target in zip(x, y, strict=True):
        size = np.sqrt(np.sum(row**2) ** 2 + np.sum(row**2) * np.sum(target**2))
        gram += min(1.0, bound / size) * np.outer(row, row)
        cross += min(1.0, bound / size) * np.outer(target, row)
    return gram, cross


@pytest.mark.parametrize(("recipe", "clients"), [("sum-cdp", 4), ("fed-cdp-sound", 1)])
@pytest.mark.parametrize("classes", [None, 2, 3])
def test_the_release_is_the_clipped_sums_with_the_noise_that_the_event_states(recipe, clients, classes):
    own, bound = rows(columns=20, classes=classes), 1.2
    noise = {"sigma": 3.0, "clip.bound": bound, "clip.kind": "flat"}
    config = make_config({"recipe": recipe, **QUICK, **FULL}, {"dataset": "own", "clients": clients, "batch_size": 1000, **noise})
    run = loop.prepare(config, own)
    state = start(run.task, run.initial)
    after, _, _ = loop.play_round(run, state, np.arange(clients))
    now = moment_of(run.task, state)
    size = run.partition.size(0)
    (noised,) = noised_of(run.task, now, 0, size)
    gram, cross = direct(own, classes, bound)
    scale = np.where(np.eye(len(gram)) == 1, 1.0, np.sqrt(2))
    sums = np.concatenate([(gram * scale)[np.triu_indices(len(gram))], cross.reshape(-1)])
    gap = after.weights * len(own.x) - sums  # learning rate 1: weights are means
    n = len(gap)
    # The deviation of n normal values is right to 5.2 / sqrt(2 n) but with probability 2e-7; there are three cases of each.
    assert noised.deviation == pytest.approx(3.0 * bound, rel=1e-3)
    assert abs(gap.std() / noised.deviation - 1) < 5.2 / np.sqrt(2 * n) and abs(gap.mean()) < 5.2 * noised.deviation / np.sqrt(n)
    assert run.task.module.deviation == pytest.approx(noised.deviation / len(own.x), rel=1e-6)
    event = noised.event()
    assert event is not None and event.noise.mechanism == "gaussian" and event.noise.multiplier == pytest.approx(3.0, rel=1e-3)
    sound = [c for c in claims(run.task.recipe, run.task.setting, now, size) if (c.observer, c.unit) == ("server", "example")]
    assert [c.verdict for c in sound] == ["sound"] and sound[0].event == event


def test_a_hostile_row_moves_the_release_by_at_most_the_bound():
    own = rows()
    little = {"dataset": "own", "clients": 2, "sigma": 1e-3, "clip.bound": 0.7}
    config = make_config({"recipe": "sum-cdp", **QUICK, **FULL}, little)
    found = []
    for value in (own.x[0], np.full(4, 1e8, np.float32), np.zeros(4, np.float32)):
        changed = own.x.copy()
        changed[0] = value
        run = loop.prepare(config, fv.dataset(changed, own.y, own.x_test, own.y_test, classes=2))
        state, _, _ = loop.play_round(run, start(run.task, run.initial), np.arange(2))
        found.append(state.weights.astype(np.float64) * len(own.x))
    for other in found[1:]:  # replaced: twice the bound; the noise has the same keys
        assert np.linalg.norm(found[0] - other) <= 1.4 * (1 + 1e-3)


def test_the_promise_is_that_of_any_model_with_the_recipe(tmp_path):
    own = rows()
    ours, other = (
        fv.run("sum-cdp", data=own, clients=4, sigma=4.0, clip_bound=1.0, rounds=1, local_steps=1, out=tmp_path / model,
               **{**QUICK, "model": model}, **FULL)
        for model in ("adassp", "logistic")
    )  # fmt: skip
    assert ours.epsilon() == pytest.approx(other.epsilon(), rel=1e-3) and ours.epsilon() is not None
    one = next(row for row in ours.ledger if (row["observer"], row["unit"]) == ("server", "example"))
    assert one["verdict"] == "sound"


@pytest.mark.parametrize("classes", [None, 2, 3])
def test_with_a_budget_it_learns_what_gradient_descent_takes_many_rounds_for(classes, tmp_path):
    own = rows(4000, classes=classes)
    result = fv.run("sum-cdp", data=own, clients=5, target_epsilon=1.0, calibrate=True, clip_bound=1.5, out=tmp_path / "r",
                    **QUICK, **FULL)  # fmt: skip
    assert result.epsilon() <= 1.0
    if classes is None:
        assert result.facts["r2"] > 0.9
    else:
        assert result.accuracy > 0.9


def test_under_a_secure_sum(tmp_path):
    own = rows(classes=2)
    more = {"clients": 5, "secure_sum": True, "sigma": 4.0, "clip_bound": 1.0}
    result = fv.run("sum-cdp", data=own, out=tmp_path / "r", **more, **QUICK, **FULL)
    assert result.epsilon("server") is not None and result.accuracy > 0.8


def test_the_ridge_lifts_what_noise_may_have_sunk():
    own = rows(columns=30)
    config = make_config({"recipe": "sum-cdp", **QUICK, **FULL}, {"dataset": "own", "clients": 2, "sigma": 50.0})
    run = loop.prepare(config, own)
    state, _, _ = loop.play_round(run, start(run.task, run.initial), np.arange(2))
    module = run.task.module
    with torch.no_grad():
        module.gram.copy_(torch.as_tensor(state.weights[: module.gram.numel()]))
        module.cross.copy_(torch.as_tensor(state.weights[module.gram.numel() :]).view_as(module.cross))
    assert float(module.solved().norm()) <= float(module.cross.detach().norm()) / module.noise_norm() * (1 + 1e-6)
    assert flatten(module).shape == state.weights.shape


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"rounds": 2}, "one plain release"), ({"loss": "huber"}, "least squares"), ({"recipe": "fed-sdp"}, "finished updates"),
     ({"aggregate": "adam"}, "plain mean")],
)  # fmt: skip
def test_what_it_cannot_be_combined_with_is_refused(settings, said):
    recipe = settings.pop("recipe", "sum-cdp")
    with pytest.raises(UserError, match=said):
        loop.prepare(make_config({"recipe": recipe, **QUICK}, {"dataset": "cancer", "clients": 3, **settings}))


def test_too_many_columns_are_refused():
    with pytest.raises(UserError, match="use at most 1000"):
        few = fv.dataset(np.zeros((4, 1001)), np.arange(4) % 2, np.zeros((2, 1001)), np.arange(2))
        fv.run("sum-cdp", data=few, clients=2, **QUICK)


def test_epsilon_of_the_event_is_the_ledgers(tmp_path):
    own = rows()
    result = fv.run("sum-cdp", data=own, clients=2, sigma=4.0, clip_bound=1.0, out=tmp_path / "r", **QUICK, **FULL)
    run = loop.prepare(make_config({"recipe": "sum-cdp", **QUICK, **FULL}, {"dataset": "own", "clients": 2, "sigma": 4.0}), own)
    (noised,) = noised_of(run.task, moment_of(run.task, start(run.task, run.initial)), 0, run.partition.size(0))
    assert answer([noised.event()], 1e-5).epsilon == pytest.approx(result.epsilon(), rel=1e-6)
