"""Further membership attacks: each finds members of an overfitted model, none finds what is not there."""

import numpy as np
import pytest

from fedveil.attacks import signals


def made(effect, n=2000, shadows=8, seed=0):
    """Confidences of target and shadows: difficulty per example, plus `effect` for members."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 12))
    difficulty = x[:, :3].sum(1) + 0.5 * rng.normal(size=n)
    member = np.arange(n) < n // 2
    inside = rng.random((shadows, n)) < 0.5
    target = difficulty + effect * member + 0.5 * rng.normal(size=n)
    theirs = difficulty + effect * inside + 0.5 * rng.normal(size=(shadows, n))
    y = rng.integers(0, 3, n)
    zx = rng.normal(size=(3000, 12))
    outside = zx[:, :3].sum(1) + 0.7 * rng.normal(size=3000)
    return x, y, member, inside, target, theirs, zx, rng.integers(0, 3, 3000), outside


def low(scores, member, level=0.999):
    return signals.auc_interval(scores, member, level)


def test_the_regressed_stranger_finds_members_without_a_shadow_and_beats_the_bare_confidence():
    x, y, member, _, target, _, zx, zy, outside = made(1.0)
    found = signals.quantile(target, x, y, outside, zx, zy)
    assert low(found, member)[0] > 0.7 and low(found, member)[0] > low(target, member)[1]


def test_several_signals_learnt_on_shadows_find_members():
    _, _, member, inside, target, theirs, *_ = made(1.0)

    def four(confidence):
        return np.stack([confidence, -confidence, np.abs(confidence), (confidence > 0).astype(float)], -1)

    found = signals.multi(four(target), four(theirs), inside)
    assert low(found, member)[0] > 0.8


def test_a_trajectory_averages_the_noise_of_single_checkpoints():
    _, _, member, inside, target, theirs, _, _, outside = made(0.6)
    rng = np.random.default_rng(1)
    path = target + rng.normal(size=(8, len(target)))
    strangers = outside + rng.normal(size=(8, len(outside)))
    together = signals.trajectory(path, strangers, theirs, inside)
    alone = signals.trajectory(path[:2], strangers[:2], theirs, inside)
    assert low(together, member)[0] > 0.6
    assert signals.auc_interval(together, member, 0.5)[0] > signals.auc_interval(alone, member, 0.5)[0]


def test_hard_labels_alone_find_members_that_are_harder_to_move():
    rng = np.random.default_rng(0)
    n, shadows = 600, 6
    x, y = rng.normal(size=(n, 5)), np.zeros(n, int)
    inside = rng.random((shadows, n)) < 0.5
    member = np.arange(n) < n // 2
    reach = 0.6 + 1.0 * np.vstack([member, inside])

    def labels_of(model, rows):
        return (np.linalg.norm(rows - x, axis=1) > 2 * reach[model]).astype(int)

    assert low(signals.label_only(labels_of, x, y, shadows, inside), member)[0] > 0.6


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_where_members_are_not_special_nothing_is_found(seed):
    """Intervals at 99.9%: three attacks on three data sets exclude 0.5 by chance with probability 0.9%."""
    x, y, member, inside, target, theirs, zx, zy, outside = made(0.0, seed=seed)
    path = np.stack([target, target])
    for found in (
        signals.quantile(target, x, y, outside, zx, zy),
        signals.multi(target[:, None], theirs[..., None], inside),
        signals.trajectory(path, np.stack([outside, outside]), theirs, inside),
    ):
        bottom, top = low(found, member)
        assert bottom <= 0.5 <= top


def test_the_interval_covers_and_agrees_with_the_bootstrap():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        scores = np.concatenate([rng.normal(0.5, 1, 150), rng.normal(0, 1, 150)])
        bottom, top = signals.auc_interval(scores, np.arange(300) < 150, 0.95)
        covered += bottom <= 0.6382 <= top
    assert covered >= 180  # 95% expected; fewer than 180 of 200 has probability 0.2%
