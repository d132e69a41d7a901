"""AdaClip against the published rule written out in plain loops, and against what went wrong without it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedveil.errors import UserError
from fedveil.federation.config import load_config
from fedveil.federation.loop import play_round, prepare
from fedveil.federation.round import start
from fedveil.protect import adaclip


def test_one_step_is_the_published_rule_coordinate_by_coordinate():
    m, s2 = [0.1, -0.2, 0.0], [0.04, 0.01, 0.09]
    noised, sigma = [0.5, -0.25, 3.9], 0.7
    s = [math.sqrt(v) for v in s2]
    b = [math.sqrt(v) * math.sqrt(sum(s)) for v in s]
    memory = adaclip.Memory(np.array(m, np.float32), np.array(s2, np.float32))
    np.testing.assert_allclose(adaclip.scale(memory), b, rtol=1e-6)
    variance = [(b_i * sigma) ** 2 for b_i in b]
    new = adaclip.follow(memory, np.array(noised), np.array(variance))
    for i in range(3):
        v = min(max((noised[i] - m[i]) ** 2 - (b[i] * sigma) ** 2, 1e-12), 10.0)
        assert new.square[i] == pytest.approx(0.9 * s2[i] + 0.1 * v, rel=1e-5)
        assert new.mean[i] == pytest.approx(0.99 * m[i] + 0.01 * noised[i], rel=1e-5)


def test_the_first_clip_is_the_plain_one_at_the_given_bound():
    g = np.random.default_rng(0).normal(size=50) * 3
    b = adaclip.scale(adaclip.first(4.0, 50)).astype(float)
    mapped = g / b
    back = b * mapped / max(1.0, float(np.linalg.norm(mapped)))
    np.testing.assert_allclose(back, g * min(1.0, 4.0 / np.linalg.norm(g)), rtol=1e-5)


def test_the_scale_finds_the_gradients_own_spread_and_not_the_noises():
    """400 rounds of gradients of deviation 0.3 under noise of 1.5 times the scale. The estimate keeps a bias upwards,
    because a step's variance is cut at 0 from below; without the subtraction it would explode."""
    draw = np.random.default_rng(1)
    memory, size, sigma = adaclip.first(4.0, 200), 200, 0.05
    for _ in range(400):
        b = adaclip.scale(memory).astype(float)
        noised = draw.normal(0, 0.3, size) + b * sigma * draw.normal(size=size)
        memory = adaclip.follow(memory, noised, (b * sigma) ** 2)
    assert np.sqrt(memory.square.mean()) == pytest.approx(0.3, rel=0.25)


def test_without_any_gradient_the_scale_does_not_feed_on_its_own_noise():
    """Noise of 1.8 times the spread in every coordinate and no signal. Taking the noise's share away leaves its
    positive part, 0.48 of it, which shrinks from round to round; leaving it in multiplies the scale by thousands."""
    draw, size, sigma = np.random.default_rng(3), 400, math.sqrt(1.8 / 400)
    ends = []
    for subtract in (1.0, 0.0):
        memory = adaclip.first(4.0, size)
        for _ in range(150):
            b = adaclip.scale(memory).astype(float)
            noised = b * sigma * draw.normal(size=size)
            memory = adaclip.follow(memory, noised, subtract * (b * sigma) ** 2)
        ends.append(float(np.sqrt(np.square(adaclip.scale(memory), dtype=float).mean())))
    assert ends[0] < 4.0 and ends[1] > 40.0


def test_in_a_run_the_scale_starts_at_the_bound_and_follows_the_gradients_down():
    changes = ["dataset=digits", "clients=4", "local_steps=5", "rounds=20", "batch_size=200", "sigma=1"]
    prepared = prepare(load_config("adaclip", changes))
    state = start(prepared.task, prepared.initial)

    def length(state):
        return float(np.sqrt(np.square(adaclip.scale(state.clip.now), dtype=float).mean()))

    assert length(state) == pytest.approx(4.0, rel=1e-4)
    for _ in range(20):
        state, _, _ = play_round(prepared, state, np.arange(4))
    assert length(state) < 3.0


@pytest.mark.parametrize(
    ("noise_on", "sampling", "steps"),
    [("sum", "fixed", 1), ("example", "fixed", 1), ("sum", "fixed", 5), ("example", "fixed", 5), ("sum", "poisson", 5)],
)
def test_the_share_of_noise_that_a_run_takes_off_is_what_it_drew(monkeypatch, noise_on, sampling, steps):
    """The same round with and without noise: what the two gradients differ by, in units of the scale, has the stated deviation.

    A small learning rate: later steps of both see the same model, and differ by their noise alone.
    Fixed seed; 650 coordinates: a right deviation is off by more than 5 standard errors once in a million draws."""
    from fedveil.federation import round as rounds

    changes = ["dataset=digits", "clients=3", "cohort_size=3", "rounds=1", f"local_steps={steps}", "batch_size=40",
               "learning_rate=0.001", "model=logistic", f"sampling={sampling}", f"noise_on={noise_on}"]  # fmt: skip
    seen, original = [], rounds._seen
    monkeypatch.setattr(rounds, "_seen", lambda *given: seen.append(original(*given)) or seen[-1])
    for sigma in (1.0, 1e-9):
        prepared = prepare(load_config("adaclip", [*changes, f"sigma={sigma}"]))
        state = start(prepared.task, prepared.initial)
        scale = adaclip.scale(state.clip.now).astype(float)
        play_round(prepared, state, np.arange(3))
    noise = (seen[0].gradient - seen[1].gradient) / scale
    measured = float(np.sqrt(np.square(noise).mean()))
    assert seen[0].deviation == pytest.approx(measured, rel=5 / math.sqrt(2 * noise.size))
    assert seen[1].deviation < 1e-6 * seen[0].deviation


@pytest.mark.parametrize(
    "change", ["momentum=0.9", "smoothness=10", "local_optimiser=adam", "proximal=0.1", "heterogeneity=true"]
)
def test_what_changes_the_noises_share_in_an_update_is_refused(change):
    with pytest.raises(UserError, match=r"clip\.rule = adaclip reads gradients, and the noise's share in them, off the updates"):
        load_config("adaclip", ["dataset=digits", change])
