"""Shuffling: brute force for few clients, order of the bounds, refusals, and the pair of LDP-FL."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import UserError
from fedveil.privacy import shuffle
from fedveil.privacy.events import Noise


def brute_delta(epsilon0, others, epsilon):
    """Largest delta over directions for given probabilities of the others, by enumeration of the counts."""
    keep = 1 / (1 + math.exp(-epsilon0))

    def law(mine):
        counts = np.zeros(len(others) + 2)
        for bits in itertools.product((0, 1), repeat=len(others) + 1):
            chances = [p if b else 1 - p for b, p in zip(bits, (mine, *others), strict=True)]
            counts[sum(bits)] += math.prod(chances)
        return counts

    p, q = law(keep), law(1 - keep)
    return max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((p, q), (q, p)))


@settings(max_examples=25, deadline=None)
@given(st.floats(0.1, 4), st.lists(st.floats(0, 1), min_size=1, max_size=5), st.floats(1e-4, 0.05))
def test_no_inputs_of_the_others_break_the_exact_epsilon(epsilon0, inputs, delta):
    low = 1 / (1 + math.exp(epsilon0))
    others = [low + x * (1 - 2 * low) for x in inputs]  # any weight in the range, not only the ends
    epsilon = shuffle.binary_epsilon(epsilon0, len(others) + 1, delta)
    assert brute_delta(epsilon0, others, epsilon) <= delta * (1 + 1e-6)


def test_exact_epsilon_is_reached_by_some_number_of_ones():
    epsilon = shuffle.binary_epsilon(1.0, 6, 1e-3)
    keep = 1 / (1 + math.exp(-1.0))
    worst = max(brute_delta(1.0, [keep] * k + [1 - keep] * (5 - k), epsilon) for k in range(6))
    assert worst == pytest.approx(1e-3, rel=1e-5)


@pytest.mark.parametrize("n", [20, 100, 700])
@pytest.mark.parametrize("epsilon0", [0.3, 1.0, 3.0])
def test_exact_below_clones_below_no_shuffling(n, epsilon0):
    exact = shuffle.shuffled(epsilon0, n, 1e-5, binary=True)
    clones = shuffle.shuffled(epsilon0, n, 1e-5)
    assert exact.verdict == clones.verdict == "sound"
    assert 0 < exact.epsilon <= clones.epsilon + 1e-9 <= epsilon0 + 1e-9


def test_more_clients_or_delta_never_cost_more():
    values = [shuffle.shuffled(1.0, n, 1e-5, binary=True).epsilon for n in (10, 30, 100, 300, 350)]
    assert values == sorted(values, reverse=True)
    values = [shuffle.shuffled(1.0, 10_000, d).epsilon for d in (1e-9, 1e-7, 1e-5, 1e-3)]
    assert values == sorted(values, reverse=True)


def test_alone_or_without_delta_nothing_is_gained():
    assert shuffle.shuffled(2.0, 1, 1e-5).epsilon == 2.0
    assert shuffle.shuffled(2.0, 100, 0.0, binary=True).epsilon == 2.0


def test_only_pure_reports_are_amplified():
    refused = shuffle.shuffled_noise(Noise("gaussian", 2.0), 100, 1e-5)
    assert refused.verdict == "none" and refused.epsilon is None and "pure" in refused.reason
    assert shuffle.shuffled_noise(Noise("laplace", 1.0, "l1", 50), 500, 1e-5).epsilon < 1
    binary = shuffle.shuffled_noise(Noise("two-valued", 1.0), 100, 1e-5)
    assert binary.epsilon == pytest.approx(0.40782, abs=1e-4)


def test_ldp_fl_always_shows_both_units():
    both = shuffle.weight_reports(1.0, 20000, 10, clients=100, delta=1e-5)
    assert both.weight.epsilon == pytest.approx(0.40782, abs=1e-4)
    # mean loss 200000 tanh(1/2) = 92423, and 4.5 standard deviations of 397 above it
    assert both.client.epsilon == pytest.approx(200000 * math.tanh(0.5) + 4.26 * 397, rel=2e-3)
    assert both.printed == {"unshuffled": 200000, "model shuffling": 20000, "parameter shuffling": 1.0}
    pure = shuffle.weight_reports(1.0, 20000, 10)
    assert (pure.weight.epsilon, pure.client.epsilon, pure.client.delta) == (1.0, 200000, 0.0)


def test_at_the_published_settings_shuffling_adds_nothing():
    for epsilon0, n in ((4.0, 200), (10.0, 500)):
        found = shuffle.shuffled(epsilon0, n, 1e-5, binary=True)
        assert found.epsilon > 0.99 * epsilon0 and "next to nothing" in found.reason


@pytest.mark.parametrize(("arguments", "word"), [((0.0, 10, 1e-5), "epsilon"), ((1.0, 0, 1e-5), "clients"),
                                                 ((1.0, 10, 1.0), "delta"), ((math.nan, 10, 1e-5), "epsilon")])  # fmt: skip
def test_bad_values_name_the_option(arguments, word):
    with pytest.raises(UserError, match=word):
        shuffle.shuffled(*arguments)
