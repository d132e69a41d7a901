"""Privacy-loss distributions at any delta: monotone, between dp-accounting's bounds, and cheap for any number of steps."""

import math
import random
import resource
import time

import numpy as np
import pytest
from scipy import fft

from fedveil.privacy import formulas, pld
from fedveil.privacy.accountants import answer
from fedveil.privacy.events import Event, Noise, Sampling
from fedveil.privacy.mechanisms import Gaussian


def epsilon(sigma, rate, steps, delta):
    drawn = Sampling("poisson", rate) if rate < 1 else Sampling()
    found = answer([Event(Noise("gaussian", sigma), drawn, steps=steps)], delta)
    assert found.verdict == "sound", found
    return found.epsilon


def bounds(sigma, rate, steps, delta, interval):
    """dp-accounting's lower and upper estimate on its own grid."""
    from dp_accounting.pld import privacy_loss_distribution as theirs

    def one(pessimistic):
        law = theirs.from_gaussian_mechanism(
            sigma,
            value_discretization_interval=interval,
            sampling_prob=rate,
            pessimistic_estimate=pessimistic,
            use_connect_dots=pessimistic,
        )
        return law.self_compose(steps).get_epsilon_for_delta(delta)

    return one(False), one(True)


def settings(seed, count):
    """Random sigma, rate, steps, delta: delta down to 1e-12, a fixed seed."""
    rng = random.Random(seed)
    for _ in range(count):
        sigma = math.exp(rng.uniform(math.log(0.5), math.log(20)))
        rate = min(1.0, math.exp(rng.uniform(math.log(1e-5), math.log(2))))
        steps = int(math.exp(rng.uniform(0, math.log(3e5 if rate < 0.1 else 3e3))))
        yield sigma, rate, steps, 10 ** rng.uniform(-12, -4), 1 + 10 ** rng.uniform(-2.5, 0)


def test_the_setting_that_jumped_is_near_the_others_and_monotone():
    sigma, rate, steps, delta = 0.76262, 4.163e-5, 81_880, 2.54e-11
    around = [epsilon(sigma * f, rate, steps, delta) for f in (1.01, 1.0, 0.99)]
    assert around == sorted(around)
    assert around[1] == pytest.approx(0.3925, rel=0.02)  # dp-accounting on its usual grid of 1e-4
    later = [epsilon(sigma, rate, steps + extra, delta) for extra in (0, 500, 50_000)]
    assert later == sorted(later)


@pytest.mark.parametrize("seed", range(3))
def test_less_noise_more_steps_a_larger_rate_or_a_smaller_delta_never_cost_less(seed):
    for sigma, rate, steps, delta, factor in settings(seed, 8):
        base = epsilon(sigma, rate, steps, delta)
        assert epsilon(sigma / factor, rate, steps, delta) >= base
        assert epsilon(sigma, min(1.0, rate * factor), steps, delta) >= base * (1 - 1e-12)
        assert epsilon(sigma, rate, steps + max(1, int(steps * (factor - 1))), delta) >= base
        assert epsilon(sigma, rate, steps, delta / factor) >= base


SAME = [
    (1.0, 0.01, 1_000, 1e-12, 1e-4),
    (1.0, 0.01, 10_000, 1e-10, 1e-4),
    (0.7, 0.001, 3_000, 1e-11, 1e-4),
    (4.0, 0.3, 200, 1e-12, 1e-4),
    (2.0, 0.05, 500, 1e-9, 1e-4),
    (10.0, 1.0, 50, 1e-12, 1e-4),
    (20.0, 0.02, 300, 1e-8, 1e-6),
]


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta", "interval"), SAME)
def test_within_two_percent_of_dp_accounting_s_bounds(sigma, rate, steps, delta, interval):
    low, high = bounds(sigma, rate, steps, delta, interval)
    found = epsilon(sigma, rate, steps, delta)
    assert low * (1 - 1e-9) <= found <= high * 1.02


@pytest.mark.parametrize("delta", [1e-5, 1e-12, 1e-20])
@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (30.0, 1_000), (2.0, 50), (1000.0, 1_000_000)])
def test_gaussians_are_exact_from_above_at_any_delta(sigma, steps, delta):
    """The exact value is a certified lower bound."""
    exact = formulas.gaussian_epsilon(sigma / math.sqrt(steps), delta)
    found = epsilon(sigma, 1.0, steps, delta)
    assert exact * (1 - 1e-9) <= found <= exact * 1.002


@pytest.mark.parametrize("rate", [1.0, 0.01, 1e-4])
def test_a_hundred_million_steps_take_seconds_and_little_memory(rate):
    before, clock = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert epsilon(1.0, rate, 100_000_000, 1e-5) > 1
    assert time.process_time() - clock < 20  # 1 s on an idle core
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700_000  # kB


def test_rounding_of_the_transforms_stays_below_what_is_counted_for_it():
    """Against the same products in extended precision; where that is not more precise, nothing is compared."""
    if np.finfo(np.longdouble).eps > 1e-18:
        pytest.skip("no extended precision here")
    for sigma, rate, steps, delta, _ in settings(7, 25):
        solved = pld.solve({pld.Sampled(Gaussian(sigma).pair(), rate): steps})
        solved.epsilon(delta)
        for grid in solved.grids.values():
            for state in grid.up.solved.values():
                if state.size < 200_000:
                    error = _errors(grid.up.laws[0][0], state, steps)
                    found, _ = state.tilted()
                    mass = np.maximum(found.probs - found.doubt, 0)
                    assert (error <= found.doubt + steps * pld.DISCRETE * mass).all()
                    assert error.mean() <= 0.3 * found.doubt


def _errors(law, state, steps):
    one = pld.tilt_law(law, state.step, state.tilt)
    wide = np.zeros(state.size, np.longdouble)
    places = (one.first + np.arange(len(one.probs))) % state.size
    np.add.at(wide, places, one.probs.astype(np.longdouble))
    power, factor = np.ones(state.size // 2 + 1, np.clongdouble), fft.rfft(wide)
    while steps:
        if steps & 1:
            power = power * factor
        factor, steps = factor * factor, steps >> 1
    low, high = state.window()
    error = np.abs(fft.irfft(state.spectrum, state.size) - fft.irfft(power, state.size))
    return np.roll(error, -(low % state.size))[: high - low + 1].astype(float)


def test_adding_bit_by_bit_is_adding_at_once():
    pair = pld.Sampled(Gaussian(1.3).pair(), 0.02)
    other = pld.Sampled(Gaussian(2.0).pair(), 0.02)
    running = pld.solve({pair: 10})
    for _ in range(40):
        running.epsilon(1e-10)
        running = running.more({pair: 7, other: 3})
    whole = pld.solve({pair: 290, other: 120})
    assert running.epsilon(1e-10) == pytest.approx(whole.epsilon(1e-10), rel=2e-3)
