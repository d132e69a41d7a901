import os
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import norm

from fedveil.attacks import membership, shadows
from fedveil.attacks.membership import METHODS
from fedveil.data.datasets import load
from fedveil.errors import UserError
from fedveil.federation.config import make_config
from fedveil.federation.loop import prepare


def test_confidence_is_the_logit_of_the_true_class_and_survives_saturation():
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(5, 4)), np.array([0, 1, 2, 3, 0])
    p = softmax(z, -1)[np.arange(5), y]
    np.testing.assert_allclose(membership.confidence(z, y), np.log(p / (1 - p)), rtol=1e-10)
    assert membership.confidence(np.array([[900.0, 0.0]]), np.array([0]))[0] == 900.0


def synthetic(n=2000, models=64, gap=1.0, seed=0):
    """The published check: each example has its own OUT mean; members score `gap` deviations higher."""
    rng = np.random.default_rng(seed)
    centre = rng.normal(0, 3, n)
    inside = membership.halves(models, n, seed)
    scores = centre + rng.normal(size=(models, n)) + gap * inside
    member = rng.random(n) < 0.5
    return centre + rng.normal(size=n) + gap * member, scores, inside, member


def test_lira_reaches_what_the_gaussian_model_allows():
    """With known Gaussians the best AUC is Phi(gap / sqrt 2); the global threshold is far below it."""
    target, scores, inside, member = synthetic(gap=2.0)
    best = norm.cdf(2.0 / np.sqrt(2))
    online = membership.lira_online(target, scores, inside)
    offline = membership.lira_offline(target, scores, inside)
    assert membership.auc(online[member], online[~member]) == pytest.approx(best, abs=0.03)
    assert membership.auc(offline[member], offline[~member]) == pytest.approx(best, abs=0.04)
    assert membership.auc(target[member], target[~member]) < best - 0.15


def test_each_side_has_its_own_deviation():
    """OUT scores that spread ten times wider than IN scores: the ratio of two Gaussians, written out."""
    rng = np.random.default_rng(1)
    inside = membership.halves(400, 3, 0)
    scores = np.where(inside, rng.normal(1, 0.5, inside.shape), rng.normal(0, 5.0, inside.shape))
    target = np.array([1.0, 3.0, -4.0])
    expected = norm.logpdf(target, 1, 0.5) - norm.logpdf(target, 0, 5.0)
    np.testing.assert_allclose(
        membership.lira_online(target, scores, inside, shared=False), expected, rtol=0.35
    )


def test_shared_variance_helps_when_shadows_are_few():
    target, scores, inside, member = synthetic(models=4, gap=2.0, seed=3)
    shared = membership.lira_online(target, scores, inside, shared=True)
    own = membership.lira_online(target, scores, inside, shared=False)
    assert membership.auc(shared[member], shared[~member]) > membership.auc(own[member], own[~member])


def test_rates_of_known_scores():
    """Perfect separation, and none."""
    member = np.arange(2000) < 1000
    perfect = membership.rates(member.astype(float), member)
    assert perfect.auc == perfect.balanced_accuracy == perfect.tpr_at_1pct == perfect.tpr_at_01pct == 1.0
    assert perfect.reason == "" and perfect.failed_numerically == 0
    blind = membership.rates(np.random.default_rng(0).normal(size=2000), member)
    assert blind.auc_interval[0] < 0.5 < blind.auc_interval[1]
    assert blind.balanced_accuracy_interval[0] < 0.5 < blind.balanced_accuracy_interval[1]
    assert blind.tpr_at_1pct_interval[0] < 0.01 < blind.tpr_at_1pct_interval[1]
    assert blind.tpr_at_01pct_interval[0] < 0.001 < blind.tpr_at_01pct_interval[1]


def figures(rates):
    return {k: v for k, v in asdict(rates).items() if k not in ("roc", "failed_numerically", "reason")}


@pytest.mark.parametrize("broken", [slice(None), slice(3, 4)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_a_failed_attack_and_never_a_half(value, broken):
    scores, member = np.random.default_rng(0).normal(size=400), np.arange(400) < 200
    scores[broken] = value
    found = membership.rates(scores, member)
    assert set(figures(found).values()) == {None} and found.roc == ()
    assert found.failed_numerically == len(scores[broken])
    assert "failed numerically" in found.reason and "nothing about the defence" in found.reason


@pytest.mark.parametrize("weight", [np.nan, np.inf, 3e38])
def test_a_target_that_is_not_finite_fails_every_attack_before_shadows_are_trained(weight):
    """3e38 is a number, but the outputs overflow."""
    prepared = overfitted(local_steps=1)
    x, y = prepared.task.x[:100], prepared.task.y[:100]
    target = np.full_like(prepared.initial, weight)
    found = membership.infer(
        prepared.task.module, prepared.task.layout, target, lambda masks: pytest.fail("no shadows needed"), x, y,
        np.arange(100) < 50, population=(x, y),
    )  # fmt: skip
    assert set(found) == set(METHODS)
    for rates in found.values():
        assert set(figures(rates).values()) == {None} and "not finite" in rates.reason


def test_a_shadow_that_is_not_finite_is_an_error():
    prepared = overfitted(local_steps=1)
    x, y = prepared.task.x[:100], prepared.task.y[:100]
    for weight in (np.nan, 3e38):
        with pytest.raises(UserError, match="shadow model diverged"):
            membership.infer(
                prepared.task.module, prepared.task.layout, prepared.initial,
                lambda masks, w=weight: np.full((len(masks), len(prepared.initial)), w, np.float32), x, y,
                np.arange(100) < 50, population=(x, y),
            )  # fmt: skip


def test_a_population_that_is_not_finite_is_a_failed_attack():
    p = np.full(4, 0.5)
    scores = membership.rmia(
        p, np.tile(p, (2, 1)), membership.halves(2, 4, 0), np.array([0.5, np.nan]), np.ones((2, 2))
    )
    assert np.isnan(scores).all()


@pytest.mark.parametrize(("count", "missing"), [(99, {1, 0.1}), (100, {0.1}), (999, {0.1}), (1000, set())])
def test_false_alarm_rates_below_one_non_member_are_empty_with_a_reason(count, missing):
    member = np.arange(2 * count) < count
    found = membership.rates(np.random.default_rng(0).normal(size=2 * count), member)
    assert (found.tpr_at_1pct is None) == (found.tpr_at_1pct_interval is None) == (1 in missing)
    assert (found.tpr_at_01pct is None) == (found.tpr_at_01pct_interval is None) == (0.1 in missing)
    assert ("TPR at 1% needs 100 non-members" in found.reason) == (1 in missing)
    assert ("TPR at 0.1% needs 1,000 non-members" in found.reason) == (0.1 in missing)
    assert found.auc is not None and found.failed_numerically == 0


@pytest.mark.parametrize(("count", "gap", "rate", "step"), [
    (500, 1.0, 0.01, 0), (500, 0.0, 0.01, 0), (1000, 2.0, 0.001, 0), (500, 1.5, 0.01, 0.25),
])  # fmt: skip
def test_tpr_intervals_cover_although_the_threshold_is_estimated(count, gap, rate, step):
    """N(gap, 1) against N(0, 1), also rounded to multiples of `step` (ties). Of 1,000 intervals that cover with 95%
    more than 70 miss with probability 0.2% (an interval that takes the threshold as known misses 390)."""
    rng = np.random.default_rng(4)

    def draw(mean):
        scores = rng.normal(mean, 1, count)
        return np.round(scores / step) * step if step else scores

    cut = norm.isf(rate)
    if (
        step
    ):  # the first grid point with P(outside > cut) <= rate; scores above it were beyond the next half step
        cut = np.ceil((norm.isf(rate) - step / 2) / step) * step + step / 2
    truth = norm.sf(cut - gap)
    found = [membership.tpr_interval(draw(gap), draw(0.0), rate) for _ in range(1000)]
    assert sum(not low <= truth <= high for low, high in found) <= 70
    assert np.mean([high - low for low, high in found]) < 0.5


def test_tpr_intervals_shrink_and_show_a_strong_attack():
    rng = np.random.default_rng(0)
    width = []
    for count in (500, 5000):
        low, high = membership.tpr_interval(rng.normal(3, 1, count), rng.normal(0, 1, count), 0.01)
        assert low > 0.3
        width.append(high - low)
    assert width[1] < width[0] / 2


def test_auc_is_the_share_of_ordered_pairs():
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 5, 30), rng.integers(0, 4, 20)
    pairs = (a[:, None] > b[None]).mean() + 0.5 * (a[:, None] == b[None]).mean()
    assert membership.auc(a, b) == pytest.approx(pairs)


def test_halves_put_every_example_in_as_often_as_out():
    masks = membership.halves(8, 11, 0)
    np.testing.assert_array_equal(masks.sum(0), 4)


def overfitted(recipe="non-private", protect=None, **changes):
    values = {
        "dataset": "digits", "recipe": recipe, "clients": 1, "partition": "iid", "limit": 150, "rounds": 1,
        "local_steps": 600, "batch_size": 20, "learning_rate": 0.3, "model": "papers-mlp", "protect": protect or {},
    }  # fmt: skip
    return prepare(make_config({**values, **changes}))


def attacked(prepared, count=8, size=140):
    pool = shadows.pool_of(prepared, size, seed=1)
    train = shadows.trainer(prepared, pool, seed=2)
    target = train(pool.member[None])[0]
    return membership.infer(
        prepared.task.module, prepared.task.layout, target, train, pool.x[pool.rows], pool.y[pool.rows], pool.member,
        shadows=count, seed=3, population=pool.population, pixel_range=(0.0, 1.0),
    )  # fmt: skip


def memorised(recipe, protect):
    """400 digits, four in ten with a random label: who fits these has learnt them by heart."""
    rng = np.random.default_rng(0)
    data = load("digits", limit=400)

    def spoilt(y):
        return np.where(rng.random(len(y)) < 0.4, rng.integers(0, 10, len(y)), y).astype(y.dtype)

    config = {
        "dataset": "digits", "recipe": recipe, "clients": 1, "partition": "iid", "limit": 400, "rounds": 1,
        "local_steps": 1500, "batch_size": 40, "learning_rate": 0.3, "model": "papers-mlp", "protect": protect,
    }  # fmt: skip
    return prepare(make_config(config), replace(data, y=spoilt(data.y), y_test=spoilt(data.y_test)))


@pytest.mark.parametrize(("recipe", "protect", "seen"), [
    ("non-private", {}, True), ("fed-cdp-sound", {"sigma": 20.0, "clip.bound": 0.25}, False),
])  # fmt: skip
def test_every_attack_sees_an_overfitted_model_and_none_sees_it_under_differential_privacy(
    recipe, protect, seen
):
    """The AUC of guessing with 180 members and 180 non-members has deviation sqrt(361 / (12 * 180^2)) = 0.0305; beyond
    four of them, outside [0.378, 0.622], it lies with probability 6e-5 (five attacks: 3e-4)."""
    found = attacked(memorised(recipe, protect), count=16, size=400)
    assert set(found) == set(METHODS)
    areas = {name: r.auc for name, r in found.items()}
    if seen:
        assert min(areas.values()) > 0.7, areas
    else:
        assert all(0.378 < area < 0.622 for area in areas.values()), areas


def test_rmia_is_the_share_of_population_examples_beaten():
    """Written out pair by pair; p(z) is the mean of all shadows, as none was trained on z."""
    rng = np.random.default_rng(2)
    inside = membership.halves(6, 7, 0)
    target, models, z, models_z = (rng.random(n) for n in (7, (6, 7), 9, (6, 9)))
    for offline in (False, True):
        found = membership.rmia(target, models, inside, z, models_z, offline=offline, slope=0.2)
        for i in range(7):
            out, into = models[~inside[:, i], i].mean(), models[inside[:, i], i].mean()
            p_x, p_z = ((1.2 * out + 0.8) / 2, (1.2 * models_z.mean(0) + 0.8) / 2) if offline else (
                (out + into) / 2, models_z.mean(0))  # fmt: skip
            assert found[i] == np.mean(target[i] / p_x >= z / p_z)


def test_population_examples_are_in_no_model_and_not_in_the_pool():
    prepared = overfitted(local_steps=1)
    pool = shadows.pool_of(prepared, 140, seed=1)
    x, y = pool.population
    tests = {
        row.tobytes(): label
        for row, label in zip(prepared.dataset.x_test, prepared.dataset.y_test, strict=True)
    }
    assert all(tests[row.tobytes()] == label for row, label in zip(x, y, strict=True))
    asked = pool.x[pool.rows[~pool.member]]
    assert len(x) == len(prepared.dataset.x_test) - len(asked)
    assert not {row.tobytes() for row in x} & {row.tobytes() for row in asked}


def test_rmia_without_population_examples_is_a_clear_error():
    prepared = overfitted(local_steps=1)
    x, y = prepared.task.x[:20], prepared.task.y[:20]
    with pytest.raises(UserError, match="population"):
        membership.infer(
            prepared.task.module, prepared.task.layout, prepared.initial, lambda masks: pytest.fail("too late"), x, y,
            np.arange(20) < 10,
        )  # fmt: skip


def test_shadows_as_one_stack_agree_with_shadows_one_by_one():
    """Without noise and with full batches nothing is random: the stack must give the federated result."""
    prepared = overfitted(local_steps=5, rounds=2, batch_size=1000, protect={"sampling": "full"})
    pool = shadows.pool_of(prepared, 60, seed=1)
    masks = membership.halves(3, len(pool.rows), 0)
    stacked = shadows.trainer(prepared, pool, 2)(masks)
    single = []
    for mask in masks:
        members = prepared.partition.rows(0)
        dropped = set(pool.rows[~mask].tolist())
        rows = [r for r in members.tolist() if r not in dropped] + pool.rows[mask & ~pool.member].tolist()
        w = torch.as_tensor(prepared.initial).clone()
        for _ in range(10):
            v = w.clone().requires_grad_()
            out = torch.func.functional_call(
                prepared.task.module,
                shadows_unflatten(v, prepared.task.layout),
                (torch.as_tensor(pool.x[rows]),),
            )
            loss = torch.nn.functional.cross_entropy(out, torch.as_tensor(pool.y[rows]))
            w = w - 0.3 * torch.autograd.grad(loss, v)[0]
        single.append(w.numpy())
    np.testing.assert_allclose(stacked, np.stack(single), rtol=1e-3, atol=1e-4)


def shadows_unflatten(vector, layout):
    from fedveil.models.layout import unflatten

    return unflatten(vector, layout)


def test_federations_get_shadow_federations():
    prepared = overfitted(clients=3, rounds=2, local_steps=5)
    pool = shadows.pool_of(prepared, 40, seed=1)
    weights = shadows.trainer(prepared, pool, 2)(membership.halves(2, len(pool.rows), 0))
    assert weights.shape == (2, prepared.task.layout.size) and not np.allclose(weights[0], weights[1])


@pytest.mark.parametrize("engine", ["auto", "functional"])
def test_federations_played_side_by_side_give_the_same_numbers(engine, monkeypatch):
    prepared = overfitted("fed-cdp-sound", clients=3, rounds=2, local_steps=3, engine=engine)
    pool = shadows.pool_of(prepared, 40, seed=1)
    found = []
    for cores in (1, 3):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        found.append(shadows.trainer(prepared, pool, 2)(membership.halves(4, len(pool.rows), 0)))
    np.testing.assert_array_equal(*found)


def test_too_few_shadows_is_a_clear_error():
    prepared = overfitted(local_steps=1)
    with pytest.raises(UserError, match="2 shadow"):
        attacked(prepared, count=1)
