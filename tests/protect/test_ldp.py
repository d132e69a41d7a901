"""The two-valued mechanism: unbiased, known variance, never more than epsilon, one bit per weight."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil import keys
from fedveil.errors import UserError
from fedveil.models.layout import Layout
from fedveil.protect import ldp
from fedveil.protect.catalogue import get
from fedveil.protect.recipe import with_changes


def layout_with(*sizes: int) -> Layout:
    names = tuple(f"l{i}.weight" for i in range(len(sizes)))
    return Layout(
        names, tuple((n,) for n in sizes), tuple(f"l{i}" for i in range(len(sizes))), tuple(range(len(sizes)))
    )


def reports(weight: float, epsilon: float, n: int, centre: float = 0.3, radius: float = 0.2) -> np.ndarray:
    layout = layout_with(n)
    ranges = ldp.fixed_ranges(layout, radius, centre)
    packed = ldp.encode(
        np.full(n, weight), ranges, epsilon, layout, keys.derive(1, "test", int(weight * 1000))
    )
    return ldp.decode(packed, ranges, epsilon, layout)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("weight", [0.1, 0.25, 0.3, 0.5])
def test_reports_are_unbiased_with_the_stated_variance(epsilon: float, weight: float) -> None:
    # Fixed seed. Bounds are 5 standard errors: false alarm below 6e-7 per case for the mean.
    n = 200_000
    values = reports(weight, epsilon, n)
    layout = layout_with(1)
    variance = float(ldp.variance(np.array([weight]), ldp.fixed_ranges(layout, 0.2, 0.3), epsilon, layout)[0])
    assert variance == pytest.approx((0.2 / math.tanh(epsilon / 2)) ** 2 - (weight - 0.3) ** 2)
    assert abs(values.mean() - weight) < 5 * math.sqrt(variance / n)
    spread = np.var((values - weight) ** 2)
    assert abs(((values - weight) ** 2).mean() - variance) < 5 * math.sqrt(spread / n) + 1e-12


def test_weights_outside_the_range_are_reported_like_its_ends() -> None:
    layout = layout_with(4)
    ranges = ldp.fixed_ranges(layout, 0.1)
    t = ldp.thresholds(np.array([-5.0, -0.1, 0.1, np.inf]), ranges, 1.0, layout)
    assert t[0] == t[1] and t[2] == t[3]


@given(epsilon=st.floats(1e-6, 60.0))
def test_the_ratio_of_output_probabilities_never_exceeds_epsilon_in_exact_arithmetic(epsilon: float) -> None:
    layout = layout_with(3)
    ranges = ldp.fixed_ranges(layout, 0.075, 0.01)
    ones = [int(t) for t in ldp.thresholds(np.array([-9.0, np.nan, 9.0]), ranges, epsilon, layout)]
    with localcontext() as context:
        context.prec = 60
        limit = Decimal(epsilon).exp()
        for a in ones:
            for b in ones:
                assert a <= limit * b  # P(report high)
                assert ldp.GRAIN - a <= limit * (ldp.GRAIN - b)  # P(report low)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
def test_the_whole_epsilon_is_used_at_the_ends_of_the_range(epsilon: float) -> None:
    layout = layout_with(2)
    low, high = ldp.thresholds(np.array([-1.0, 1.0]), ldp.fixed_ranges(layout, 0.5), epsilon, layout)
    assert math.log(int(high) / int(low)) == pytest.approx(epsilon, rel=1e-9)


def test_the_measured_ratio_at_the_ends_agrees_with_epsilon() -> None:
    # 200k draws per end at epsilon 1; standard error of the log ratio is about 0.004; 5 of them.
    n, epsilon = 200_000, 1.0
    share_high = (reports(0.5, epsilon, n) > 0.3).mean()
    share_low = (reports(0.1, epsilon, n) > 0.3).mean()
    assert math.log(share_high / share_low) == pytest.approx(epsilon, abs=0.02)


def test_one_bit_per_weight_travels_and_decodes_to_two_values_per_layer() -> None:
    layout = layout_with(13, 8)
    ranges = ldp.Ranges((0.0, 1.0), (0.1, 0.5))
    weights = np.concatenate([np.zeros(13), np.ones(8)])
    packed = ldp.encode(weights, ranges, 2.0, layout, keys.derive(0, "k"))
    assert packed.dtype == np.uint8 and packed.nbytes == 3
    values = ldp.decode(packed, ranges, 2.0, layout)
    k = ldp.amplitude(2.0)
    assert set(np.round(values[:13], 9)) <= {round(0.1 * k, 9), round(-0.1 * k, 9)}
    assert set(np.round(values[13:], 9)) <= {round(1 + 0.5 * k, 9), round(1 - 0.5 * k, 9)}


def test_the_same_key_gives_the_same_report_and_another_key_another_one() -> None:
    layout = layout_with(500)
    ranges = ldp.fixed_ranges(layout, 0.1)
    one, again, other = (
        ldp.encode(np.zeros(500), ranges, 1.0, layout, keys.derive(s, "k")) for s in (1, 1, 2)
    )
    assert (one == again).all() and (one != other).any()


def test_a_range_from_the_clients_own_weights_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"reveal its \(c, r\) exactly"):
        ldp.Ranges((0.0,), (0.1,), source="client")
    with pytest.raises(UserError, match="own weights"):
        with_changes(get("ldp-fl"), {"ranges": "client"})
    with pytest.raises(UserError, match="Did you mean 'adaptive'"):
        with_changes(get("ldp-fl"), {"ranges": "adaptiv"})


def test_adaptive_ranges_follow_each_layer_of_the_average() -> None:
    layout = layout_with(3, 3)
    average = np.array([-0.1, 0.0, 0.3, 5.0, 5.0, 5.0])
    ranges = ldp.adaptive_ranges(average, layout, smallest=0.01)
    assert ranges.centre == pytest.approx((0.1, 5.0)) and ranges.radius == pytest.approx((0.2, 0.01))
    assert ranges.source == "server-average"


def test_the_spread_rule_does_not_feed_on_its_own_noise() -> None:
    # True weights have deviation 0.02; averaging 100 reports at epsilon 1, radius 0.075 adds 0.016.
    layout = layout_with(50_000)
    draw = np.random.default_rng(5)
    weights = draw.normal(0, 0.02, layout.size).clip(-0.075, 0.075)
    ranges = ldp.fixed_ranges(layout, 0.075)
    total = np.zeros(layout.size)
    for client in range(100):
        packed = ldp.encode(weights, ranges, 1.0, layout, keys.derive(3, "client", client))
        total += ldp.decode(packed, ranges, 1.0, layout)
    average = total / 100
    noise = ldp.average_variance(average, ranges, 1.0, layout, 100)
    clean = ldp.adaptive_ranges(average, layout, rule="spread", noise_variance=noise)
    naive = ldp.adaptive_ranges(average, layout, rule="spread")
    assert clean.radius[0] == pytest.approx(3 * weights.std(), rel=0.03)
    assert naive.radius[0] > 1.2 * clean.radius[0]


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_epsilon_is_refused(epsilon: float) -> None:
    with pytest.raises(UserError, match="epsilon"):
        ldp.amplitude(epsilon)


def test_ranges_must_be_finite_and_one_per_layer() -> None:
    with pytest.raises(UserError, match="radius"):
        ldp.Ranges((0.0,), (0.0,))
    with pytest.raises(UserError, match="2 layers"):
        ldp.fixed_ranges(layout_with(2, 2), [0.1, 0.1, 0.1])
    with pytest.raises(UserError, match="model has 2"):
        ldp.encode(np.zeros(4), ldp.Ranges((0.0,), (0.1,)), 1.0, layout_with(2, 2), keys.derive(0, "k"))


def test_the_prior_of_the_first_model_is_each_layers_own_interval() -> None:
    layout = layout_with(7, 5)
    weights = np.concatenate([np.linspace(-0.2, 0.4, 7), np.linspace(0.01, 0.03, 5)])
    found = ldp.model_ranges(weights, layout)
    for part, c, r in zip(layout.layer_slices(), found.centre, found.radius, strict=True):
        assert c - r == pytest.approx(weights[part].min())
        assert c + r == pytest.approx(weights[part].max())
    assert found.source == "agreed"


@pytest.mark.parametrize(("epsilon", "grows"), [(1.0, True), (10.0, False)])
def test_ranges_by_extremes_feed_on_their_noise_only_at_a_small_epsilon(epsilon: float, grows: bool) -> None:
    """Weights that nobody trains: 100 clients report them, ten rounds, ranges from the average's extremes.

    Near the ends of a range a report's variance is r^2 (K^2 - 1): 3.7 r^2 at epsilon 1, next to nothing at 10."""
    layout = layout_with(5000)
    weights = np.random.default_rng(0).uniform(-0.1, 0.1, 5000)
    ranges = ldp.model_ranges(weights, layout)
    for number in range(10):
        reports = [
            ldp.decode(
                ldp.encode(weights, ranges, epsilon, layout, bytes([number, k]) * 16), ranges, epsilon, layout
            )
            for k in range(100)
        ]
        weights = np.mean(reports, axis=0)
        ranges = ldp.adaptive_ranges(weights, layout)
    assert (ranges.radius[0] > 0.5) == grows
