import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import norm

from fedveil.attacks import membership, shadows
from fedveil.attacks.membership import METHODS
from fedveil.engines.simulate import prepare
from fedveil.errors import UserError
from fedveil.runs.config import make_config

torch.set_num_threads(1)


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
    member = np.arange(400) < 200
    perfect = membership.rates(member.astype(float), member)
    assert perfect.auc == perfect.balanced_accuracy == perfect.tpr_at_1pct == perfect.tpr_at_01pct == 1.0
    blind = membership.rates(np.random.default_rng(0).normal(size=400), member)
    assert blind.auc_interval[0] < 0.5 < blind.auc_interval[1]
    assert blind.balanced_accuracy_interval[0] < 0.5 < blind.balanced_accuracy_interval[1]
    assert blind.tpr_at_1pct_interval[0] < 0.01 < blind.tpr_at_1pct_interval[1]


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


def attacked(prepared, count=8, methods=METHODS):
    pool = shadows.pool_of(prepared, 140, seed=1)
    train = shadows.trainer(prepared, pool, seed=2)
    target = train(pool.member[None])[0]
    return membership.infer(
        prepared.task.module, prepared.task.layout, target, train, pool.x[pool.rows], pool.y[pool.rows], pool.member,
        shadows=count, methods=methods, seed=3, pixel_range=(0.0, 1.0),
    )  # fmt: skip


def test_every_attack_sees_an_overfitted_model_and_none_sees_a_private_one():
    """75 members of 150 rows: the interval of an AUC of 0.5 with 140 examples reaches about 0.6."""
    found = attacked(overfitted())
    assert {name: r.auc > 0.56 for name, r in found.items()} == dict.fromkeys(METHODS, True), found
    private = attacked(
        overfitted("fed-cdp-sound", {"sigma": 20.0}, learning_rate=0.05), methods=("lira-online", "rmia")
    )
    assert all(0.36 < r.auc < 0.64 for r in private.values()), private


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


def test_too_few_shadows_is_a_clear_error():
    prepared = overfitted(local_steps=1)
    with pytest.raises(UserError, match="2 shadow"):
        attacked(prepared, count=1)
