"""Schedules: end points, rates, clocks, and refusals."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedveil.errors import UserError
from fedveil.privacy.schedules import (
    AUTHORS_ROUND_SIGMA,
    AUTHORS_STEP_EPSILON,
    Schedule,
    following_rate,
    parse,
    resilient_start,
)
from fedveil.protect.catalogue import catalogue


@pytest.mark.parametrize("total", [2, 3, 60, 100, 101])
@pytest.mark.parametrize("kind", ["linear", "exponential", "staircase"])
def test_the_last_value_belongs_to_the_last_step_whatever_the_total(kind, total):
    values = parse(f"{kind}:15:4.85").values(total)
    assert values[0] == 15 and values[-1] == pytest.approx(4.85, rel=1e-12)
    assert np.all(np.diff(values) <= 1e-12)
    assert parse(f"{kind}:15:4.85").value(0, 1) == 15


@example("triangular-cyclic", 1.4470655623764284, 17.748608812664333, 2, None, 1)
@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["linear", "staircase", "exponential", "triangular-cyclic", "cosine-cyclic"]),
    st.floats(0.5, 50),
    st.floats(0.5, 50),
    st.integers(2, 60),
    st.none() | st.integers(1, 80),
    st.integers(1, 8),
)
def test_end_points_are_kept_whatever_the_total_the_stairs_and_the_cycles(kind, one, other, total, every, cycles):
    first, last = max(one, other), min(one, other)
    floor = last if kind.endswith("cyclic") else None
    values = Schedule(kind, first, last, every=every, cycles=cycles, floor=floor).values(total)
    assert values[0] == first and values[-1] == pytest.approx(last, rel=1e-12)


def test_a_stair_that_fits_into_the_run_keeps_its_length():
    assert list(parse("staircase:15:5:every=10").values(11)) == [15.0] * 10 + [5.0]
    assert list(parse("staircase:15:5:every=10").values(8)) == [15.0] * 7 + [5.0]


def test_rates_and_end_points_describe_the_same_schedule():
    assert np.allclose(
        parse("linear:6:2").values(50), Schedule("linear", 6, rate=(1 - 2 / 6) / 49).values(50)
    )
    exponential = Schedule("exponential", 6, rate=math.log(3) / 49)
    assert np.allclose(parse("exponential:6:2").values(50), exponential.values(50))
    assert np.allclose(parse("linear:6:2").values(50), np.linspace(6, 2, 50))
    assert np.allclose(parse("exponential:6:2").values(50), np.geomspace(6, 2, 50))


def test_staircase_holds_each_step():
    values = parse("staircase:15:6:every=10").values(100)
    assert np.allclose(values[:10], 15) and np.allclose(values[10:20], 14) and np.allclose(values[90:], 6)


def test_clip_bounds_may_rise():
    assert parse("linear:2:6").value(25, 51) == pytest.approx(4)


def test_triangles_fall_and_rise_and_their_peak_falls_linearly_from_one_to_the_next():
    """The published rule written out: V counts triangles, the peak of triangle V is C0 (1 - rate V), and within one the
    value falls and rises by equal amounts per step."""
    rate, floor, half = 0.2, 1.0, 5
    expected = []
    for t in range(40):
        peak = 16 * (1 - rate * (t // (2 * half)))
        place = t % (2 * half)
        slope = (peak - floor) / half
        expected.append(peak - slope * place if place <= half else floor + slope * (place - half))
    found = parse(f"triangular-cyclic:16:floor={floor}:every={half}:rate={rate}").values(40)
    assert np.allclose(found, expected)
    peaks = parse("triangular-cyclic:15:6:floor=4:every=10").values(80)[::20]
    assert np.allclose(peaks, [15, 12, 9, 6])


def test_a_bound_that_follows_the_learning_rate_is_proportional_to_it():
    found = following_rate(parse("learning-rate:4"), 0.1, 0.02)
    rates = [0.1 + (0.02 - 0.1) * t / 9 for t in range(10)]
    assert np.allclose(found.values(10), [4 * rate / 0.1 for rate in rates])
    assert following_rate(parse("learning-rate:4"), 0.1, None).values(3).tolist() == [4, 4, 4]
    assert following_rate(parse("linear:4:2"), 0.1, 0.02) == parse("linear:4:2")
    with pytest.raises(UserError, match="learning rate"):
        parse("learning-rate:4").value(0, 10)


def test_rounds_and_iterations_are_different_clocks():
    per_round = parse("linear:15:5").per_iteration(10, 3)
    assert np.allclose(per_round[:3], 15) and len(per_round) == 30
    per_step = parse("linear:15:5:iteration").per_iteration(10, 3)
    assert per_step[1] < 15 and per_step[-2] > 5 and per_step[-1] == pytest.approx(5)
    assert parse("linear:15:5:iteration").by == "iteration"


@pytest.mark.parametrize("total", range(3, 101))
def test_the_papers_cyclic_decay_ends_at_its_printed_last_value_whatever_the_total(total):
    sigma = catalogue()["fed-alpha-cdp-sigma-cyclic"].sigma
    values, period = sigma.values(total), math.ceil(total / 5)
    assert values[0] == 15 and values[-1] == 4.85
    printed = [max(4.85, 7.5 * (math.cos(math.pi * (t % period) / period) + 1)) for t in range(total - 1)]
    np.testing.assert_allclose(values[:-1], printed)


def test_cyclic_schedules_restart_and_respect_the_floor():
    values = parse("cosine-cyclic:15:floor=4:cycles=5").values(100)
    assert values[0] == values[20] == values[80] == 15
    assert values.min() == 4
    triangular = parse("triangular-cyclic:15:8:floor=4:every=10").values(100)
    assert triangular[10] == pytest.approx(4) and triangular[0] == 15
    assert triangular[20] == pytest.approx(15 - 7 / 4)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["linear", "staircase", "exponential", "triangular-cyclic", "cosine-cyclic"]),
    st.floats(0.1, 50),
    st.floats(0.1, 50),
    st.integers(1, 60),
)
def test_values_stay_positive_and_between_the_end_points(kind, first, last, total):
    floor = min(first, last)
    values = Schedule(kind, first, last, floor=floor).values(total)
    assert np.all(values >= floor * (1 - 1e-12))
    assert np.all(values <= max(first, last) * (1 + 1e-12))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("cosine-cyclic:15", "floor"),
        ("triangular-cyclic:15:5", "floor"),
        ("linear:15", "rate"),
        ("linear:15:-1", "last"),
        ("linear:0:5", "first"),
        ("linear:x:5", "not a number"),
        ("linar:15:5", "linear"),
        ("linear:15:5:wobble=3", "wobble"),
        ("linear:15:5:3", "expected"),
        ("linear:15:5:rate=0.1", "not both"),
        ("staircase:15:5:every=0", "every"),
        ("constant:nan", "first"),
        ("", "number"),
    ],
)
def test_bad_schedules_say_what_is_wrong(text, word):
    with pytest.raises(UserError, match=word):
        parse(text)


def test_a_rate_that_reaches_zero_is_refused_where_it_happens():
    with pytest.raises(UserError, match="step 10 of 20"):
        Schedule("linear", 1.0, rate=0.1).values(20)


def test_the_published_rows_used_other_sigmas_than_stated():
    at = np.array([0.0, 9999.0])
    linear = math.sqrt(2 * math.log(125000)) / AUTHORS_STEP_EPSILON["linear"](at)
    assert np.allclose(linear, [15.76, 3.71], atol=0.01)  # the text says 15 and 4.85
    assert AUTHORS_ROUND_SIGMA["staircase"](np.array([99.0]))[0] == 4  # floored by operator precedence


def test_a_resilient_start_makes_the_first_noise_as_wide_as_the_fixed_one():
    assert resilient_start(4, 6, 1.6) == pytest.approx(15)
    assert resilient_start(4, 6, 1.6) * 1.6 == pytest.approx(4 * 6)
    with pytest.raises(UserError):
        resilient_start(4, 6, 0)
