"""Integer noise: one right answer for every decision, the laws to their stated error, and what rounding costs.

Statistical tests use a fixed key; with a fresh one each p-value below 1e-4 is a false alarm of that probability.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.errors import UserError
from fedveil.protect import exact, noise

KEY = bytes(range(16))
MANY = 200_000
DEVIATIONS = [0.25, 1.0, 4.0, 5.1, 37.5, 6.1e6, 2.0**26 + 1, 5.2e9, 2.0**46]
SHAPES = [(1.0, 0.3, 10), (0.02, None, 90), (4.0, None, 13), (1.0, 0.9, 5)]

needs_native = pytest.mark.skipif(noise._native is None, reason="compiled module not built")

GOLDEN = {
    "gaussian": [
        [2, 1, -1, 0],
        [21, -7, 25, 21],
        [-10222765, 3224030, -1159757, 3800531],
        [-1873341621974, 590809895891, -212527734939, 696454726786],
    ],
    "laplace": [
        [-2, 1, 0, 2],
        [-51, -6, -4, 19],
        [-8134269, -995647, -572733, 2996411],
        [-1490620377043, -182454164035, -104954358526, 549098105237],
    ],
    "staircase": [1485, -212, -131, 5814],
    "joint": [-2820, -889, -4196, -475],
}


def assert_counts(values: np.ndarray, mass: np.ndarray, low: int) -> None:
    """Chi-square of integers against the probabilities of low, low + 1, …; rare ones and the rest in one cell."""
    inside = (values >= low) & (values < low + len(mass))
    counts = np.bincount((values[inside] - low).astype(np.int64), minlength=len(mass))
    n, few = len(values), mass * len(values) < 10
    counts = np.append(counts[~few], n - counts[~few].sum())
    expected = np.append(mass[~few], 1 - mass[~few].sum()) * n
    if expected[-1] < 5:
        counts, expected = (np.append(x[:-2], x[-2:].sum()) for x in (counts, expected))
    assert stats.chisquare(counts, expected * (n / expected.sum())).pvalue > 1e-4


def gaussian_mass(s: float, reach: int) -> np.ndarray:
    y = np.arange(-reach, reach + 1.0)
    mass = np.exp(-(y**2) / (2 * s * s))
    return mass / mass.sum()


def laplace_mass(b: float, reach: int) -> np.ndarray:
    y = np.abs(np.arange(-reach, reach + 1))
    return np.where(y == 0, -math.expm1(-0.5 / b), np.sinh(0.5 / b) * np.exp(-y / b))


def staircase_mass(shape: exact.Stairs, reach: int) -> np.ndarray:
    """The continuous density, constant on half-steps because its jumps are at integers, summed over unit cells."""
    z = np.arange(2 * reach + 1)
    r = z // 2
    half = np.exp(-shape.lam * (r // shape.period + (r % shape.period >= shape.inner)))
    one_side = np.array([half[0], *(half[1::2] + half[2::2])])
    mass = np.concatenate([one_side[:0:-1], [2 * half[0]], one_side[1:]])
    ratio = math.exp(-shape.lam)
    total = 2 * 2 * (shape.inner + ratio * (shape.period - shape.inner)) / (1 - ratio)
    return mass / total


# Exact decisions


@given(st.integers(0, 256 * 2**64))
@settings(max_examples=200, deadline=None)
def test_the_integer_exponential_is_right_to_8_units(t):
    e, n = exact.exp_minus(t)
    with mpmath.workdps(60):
        true = mpmath.exp(-mpmath.mpf(t) / 2**64)
        assert abs(mpmath.mpf(e) / mpmath.mpf(2) ** (64 + n) / true - 1) < 8 * mpmath.mpf(2) ** -64


@given(st.floats(0.25, 2.0**46), st.floats(0, 12))
@settings(max_examples=200, deadline=None)
def test_the_integer_exponent_is_right_to_its_bound(s, h):
    y = int(h * s)
    with mpmath.workdps(60):
        true = (mpmath.mpf(y) / mpmath.mpf(s)) ** 2 / 2 * 2**64
        off = true - exact.half_square(y, s)
        assert 0 <= off < y / s + 2


def test_the_bins_add_up_and_no_probability_exceeds_one():
    """n_j >= LEVEL e^(-j^2/32) for every bin there is, and the widest a bin can be is s / 4 or more."""
    assert sum(exact.UNITS) + 2**22 == 2**31
    assert int(exact._BELOW[12]) == 2**22 and int(exact._BELOW[-1]) == 1
    with mpmath.workdps(60):
        for j in range(300):
            units = mpmath.mpf(exact.UNITS[j]) if j < 13 else mpmath.mpf(2) ** (34 - j)
            assert units >= exact.LEVEL * mpmath.exp(-mpmath.mpf(j * j) / 32)
    for s in DEVIATIONS:
        places = exact._places(s / 4)
        assert places.k >= s / 4 and places.k1 <= 2**24
        assert places.k == 1 or (places.k1 - 1) << places.shift < s / 4


@pytest.mark.parametrize("s", [0.25, 1.0, 4.0, 4.01, 7.3, 30.0])
def test_the_law_that_the_integers_decide_is_the_discrete_gaussian_to_the_stated_ratio(s):
    """Not a sample: the probability of every integer up to 10 deviations, from the thresholds themselves."""
    k = exact._places(s / 4).k
    reach = math.floor(10 * s)
    with mpmath.workdps(70):
        got, true = [], []
        for y in range(reach + 1):
            j = y // k
            units = exact.UNITS[j] if j < 13 else 2 ** max(34 - j, 0)
            zeros = max(j - 34, 0)
            threshold = -(-exact.gaussian_level(y, s, zeros) // units)  # coins below
            got.append(mpmath.mpf(threshold) * units / 2**zeros)
            true.append(mpmath.exp(-(mpmath.mpf(y) ** 2) / (2 * mpmath.mpf(s) ** 2)))
        ratio = [a / b for a, b in zip(got, true, strict=True)]
        assert mpmath.log(max(ratio) / min(ratio)) < exact.gaussian_error(s).ratio


@pytest.mark.parametrize("k", [1, 7, 1000, 2**44])
def test_the_powers_that_the_integers_decide_are_right_to_the_stated_ratio(k):
    with mpmath.workdps(70):
        for q in [*range(min(k, 300)), k - 1, k // 2, 3 * k + k // 3]:
            true = mpmath.mpf(2) ** (160 - mpmath.mpf(q) / k)
            assert abs(mpmath.log(exact.power_level(q, k) / true)) < exact.laplace_error().ratio / 2


def test_a_coarse_float_margin_gives_the_same_integers(monkeypatch):
    """Whatever is too close to call is decided by integers: floats never decide what they cannot know."""
    made = [exact.numpy_gaussian(KEY, 3, 3000, s) for s in (1.0, 37.5, 6e6, 2.0**40)]
    made += [exact.numpy_laplace(KEY, 3, 3000, s) for s in (1.0, 37.5, 6e6, 2.0**40)]
    monkeypatch.setattr(exact, "_MARGIN", 0.05)
    again = [exact.numpy_gaussian(KEY, 3, 3000, s) for s in (1.0, 37.5, 6e6, 2.0**40)]
    again += [exact.numpy_laplace(KEY, 3, 3000, s) for s in (1.0, 37.5, 6e6, 2.0**40)]
    assert all(np.array_equal(a, b) for a, b in zip(made, again, strict=True))


def test_the_integers_do_not_change():
    """Golden integers, from the NumPy definition."""
    got = {
        "gaussian": [exact.numpy_gaussian(KEY, 3, 4, s).tolist() for s in (1.0, 37.5, 6.0e6, 2.0**40)],
        "laplace": [exact.numpy_laplace(KEY, 3, 4, s).tolist() for s in (1.0, 37.5, 6.0e6, 2.0**40)],
        "staircase": exact.numpy_staircase(KEY, 3, 4, exact.stairs(0.5, 1000)).tolist(),
        "joint": exact.numpy_joint_staircase(KEY, 3, 4, exact.stairs(0.5, 1000, joint=True)).tolist(),
    }
    assert got == GOLDEN


@needs_native
@pytest.mark.parametrize("isa", noise._native.instruction_sets() if noise._native else ["none"])
@pytest.mark.parametrize("s", DEVIATIONS)
def test_compiled_integers_are_those_of_the_definition(s, isa):
    """Compiled code asks integers about one candidate in 4,000, NumPy about one in 2**32: both must decide alike."""
    native = noise._native
    for step, example, count in ((0, 0, 20_000), (7, 5, 257), (1, 0, 1), (2, 0, 0)):
        got, wide = (
            native.exact_gaussian(KEY, step, count, s, example, isa),
            exact.numpy_gaussian(KEY, step, count, s, example),
        )
        assert np.array_equal(got, wide)
        got, wide = (
            native.exact_laplace(KEY, step, count, s, example, isa),
            exact.numpy_laplace(KEY, step, count, s, example),
        )
        assert np.array_equal(got, wide)


@needs_native
@pytest.mark.parametrize("isa", noise._native.instruction_sets() if noise._native else ["none"])
@pytest.mark.parametrize(("lam", "nu", "period"), [*SHAPES, (0.5, None, 10**6), (10.0, None, 2**45)])
def test_compiled_staircases_are_those_of_the_definition(lam, nu, period, isa):
    shape = exact.stairs(lam, period, nu)
    got = noise._native.exact_staircase(KEY, 5, 3000, exact.stairs_fields(shape), 2, False, isa)
    assert np.array_equal(got, exact.numpy_staircase(KEY, 5, 3000, shape, 2))
    shape = exact.stairs(min(lam, 4.0), min(period, 2**30), nu, joint=True)
    got = noise._native.exact_staircase(KEY, 5, 50, exact.stairs_fields(shape), 2, True, isa)
    assert np.array_equal(got, exact.numpy_joint_staircase(KEY, 5, 50, shape, 2))


def test_a_stream_is_the_start_of_a_longer_one_and_differs_by_key_step_and_example():
    y = exact.numpy_gaussian(KEY, 1, 70_000, 1e6)
    assert np.array_equal(exact.numpy_gaussian(KEY, 1, 33, 1e6), y[:33])
    for other in (
        exact.gaussian(bytes(16), 1, 64, 1e6),
        exact.gaussian(KEY, 2, 64, 1e6),
        exact.gaussian(KEY, 1, 64, 1e6, 1),
        exact.laplace(KEY, 1, 64, 1e6),
    ):
        assert not np.any(other == y[:64])


# The laws


@pytest.mark.parametrize("s", [0.25, 1.0, 4.0, 5.1, 37.5])
def test_gaussian_integers_have_their_law(s):
    reach = math.ceil(12 * s)
    y = exact.gaussian(KEY, 11, MANY, s)
    assert_counts(y, gaussian_mass(s, reach), -reach)


@pytest.mark.parametrize("s", [6.1e6, 5.2e9, 2.0**46])
def test_wide_gaussian_integers_are_normal_with_even_low_bits(s):
    y = exact.gaussian(KEY, 12, MANY, s)
    assert stats.kstest(y / s, "norm").pvalue > 1e-4
    assert_counts(y & 63, np.full(64, 1 / 64), 0)
    v = y / s
    for power, mean, square in (
        (1, 0, 1),
        (2, 1, 3),
        (3, 0, 15),
        (4, 3, 105),
    ):  # 4.5 standard errors: 7e-6 each
        assert abs((v**power).mean() - mean) < 4.5 * math.sqrt((square - mean**2) / MANY)
    tail = int((np.abs(v) > 4).sum())
    assert stats.binomtest(tail, MANY, 2 * stats.norm.sf(4)).pvalue > 1e-4


@pytest.mark.parametrize("scale", [0.4, 4.0, 30.3])
def test_laplace_integers_are_rounded_laplace_variables(scale):
    b = exact.laplace_scale(scale)
    assert scale <= b <= scale + 0.7214
    reach = math.ceil(25 * b)
    assert_counts(exact.laplace(KEY, 14, MANY, scale), laplace_mass(b, reach), -reach)


@pytest.mark.parametrize("scale", [1e6, 2.0**40])
def test_wide_laplace_integers_are_laplace_with_even_low_bits(scale):
    y = exact.laplace(KEY, 15, MANY, scale)
    assert stats.kstest(y / exact.laplace_scale(scale), "laplace").pvalue > 1e-4
    assert_counts(y & 63, np.full(64, 1 / 64), 0)
    assert exact.laplace_scale(scale) < scale * (1 + 1e-6)


@pytest.mark.parametrize(("lam", "nu", "period"), SHAPES)
def test_staircase_integers_are_rounded_staircase_variables(lam, nu, period):
    shape = exact.stairs(lam, period, nu)
    assert lam * (1 - 1e-6) < shape.lam <= lam
    reach = math.ceil((30 / lam + 1) * period)
    mass = staircase_mass(shape, reach)
    assert abs(mass.sum() - 1) < 1e-9
    assert_counts(exact.staircase(KEY, 16, MANY, shape), mass, -reach)


@pytest.mark.parametrize("count", [1, 3])
def test_the_joint_staircase_has_its_radial_law(count):
    shape, draws = exact.stairs(1.5, 12, 0.35, joint=True), 4000
    r = np.array([np.abs(exact.joint_staircase(KEY, i, count, shape)).sum() for i in range(draws)])
    radii = np.arange(600)
    spheres = np.where(
        radii == 0, 1, 2 if count == 1 else 4 * radii**2 + 2
    )  # integer points of the l1 sphere
    mass = spheres * np.exp(-shape.lam * (radii // 12 + (radii % 12 >= shape.inner)))
    assert_counts(r, mass / mass.sum(), 0)


# Privacy of the exact laws themselves


@pytest.mark.parametrize(("lam", "nu", "period"), SHAPES)
def test_staircase_integers_keep_lambda_for_every_change_up_to_the_period(lam, nu, period):
    shape = exact.stairs(lam, period, nu)
    mass = staircase_mass(shape, 20 * period)
    for change in range(1, period + 1):
        assert np.max(np.abs(np.log(mass[change:] / mass[:-change]))) <= lam * (1 + 1e-9)
    further = (
        period + shape.inner
    )  # one step further two steps can be crossed: why the period must be the snapped bound
    assert np.max(np.log(mass[:-further] / mass[further:])) > 1.5 * shape.lam


@pytest.mark.parametrize("scale", [0.4, 4.0, 30.3])
def test_laplace_integers_keep_change_over_scale(scale):
    mass = laplace_mass(exact.laplace_scale(scale), math.ceil(30 * scale))
    for change in (1, 2, 7):
        assert np.max(np.abs(np.log(mass[change:] / mass[:-change]))) <= change / scale * (1 + 1e-9)


# What must be counted


def test_a_long_training_pays_less_than_a_millionth():
    for error in (
        exact.gaussian_error(4.0),
        exact.laplace_error(),
        exact.staircase_error(exact.stairs(1.0, 1000)),
        exact.staircase_error(exact.stairs(10.0, 10**6)),
    ):
        epsilon, delta = exact.extra(error, 10**5, 10**5, epsilon=5.0)
        assert 0 < epsilon <= 1e-6 and delta < 1e-9
    assert exact.extra(exact.laplace_error(), 10**5, 10**5)[1] == 0


def test_too_many_values_for_the_error_bound_are_refused():
    with pytest.raises(UserError, match="too many"):
        exact.extra(exact.Error(1e-10), 10**6, 10)


@pytest.mark.parametrize(("s", "shares"), [(1.0, 2), (1.0, 5), (1.2, 8), (4.0, 3)])
def test_sums_of_shares_are_discrete_gaussian_to_the_stated_ratio(s, shares):
    """Exact convolution against the discrete Gaussian of the sum's variance, in 40 digits."""
    with mpmath.workdps(60):
        reach = math.ceil(11 * s)
        one = [mpmath.exp(-mpmath.mpf(y * y) / (2 * mpmath.mpf(s) ** 2)) for y in range(-reach, reach + 1)]
        total = [mpmath.mpf(1)]
        for _ in range(shares):
            total = [
                mpmath.fsum(
                    total[i] * one[y - i] for i in range(max(0, y - len(one) + 1), min(y + 1, len(total)))
                )
                for y in range(len(total) + len(one) - 1)
            ]
        middle, wide = len(total) // 2, mpmath.mpf(s) * mpmath.sqrt(shares)
        far = math.floor(5 * s)  # further out the cut at 11 deviations shows
        ideal = [mpmath.exp(-mpmath.mpf(y * y) / (2 * wide**2)) for y in range(-far, far + 1)]
        logs = [mpmath.log(a / b) for a, b in zip(total[middle - far : middle + far + 1], ideal, strict=True)]
        bound = exact.shares_error(s, shares).ratio
        assert max(logs) - min(logs) <= bound
        assert bound < 1e-2 and (s < 4 or bound < 1e-16)


@given(
    bound=st.floats(0.01, 10),
    count=st.integers(1, 200),
    power=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=100, deadline=None)
def test_snapped_neighbours_stay_within_the_snapped_l1_bound(bound, count, power, seed):
    draw = np.random.default_rng(seed)
    a, step, grid = draw.normal(size=count), draw.laplace(size=count), 2.0**-power
    b = a + step * bound / np.abs(step).sum()
    change = np.abs(noise.snap(a, grid) - noise.snap(b, grid)).sum()
    assert change * grid <= exact.snapped_l1_bound(bound, grid, count) * (1 + 1e-12)
    assert change <= exact.snapped_period(bound, grid, count)
    c = a + step * bound / np.linalg.norm(step)
    far = np.linalg.norm(noise.snap(a, grid) - noise.snap(c, grid))
    assert far <= exact.snapped_period(bound, grid, count, "l2")
    assert 0.3 * far <= exact.snapped_period(bound, grid, count, "l2", width=0.3)


def test_multipliers_count_the_rounding():
    assert exact.snapped_laplace_multiplier(2.0, 1.0, 1e-3, 1000) == 1.0
    assert exact.snapped_laplace_multiplier(1.01, 1.0, 1e-3, 100, "l2") == pytest.approx(1.0)
    whole = exact.shares_multiplier(1.0, 4, 1.0, 1e-3, 100)
    assert whole == noise.snapped_multiplier(2.0, 1.0, 1e-3, 100)


@pytest.mark.parametrize(
    "call",
    [
        lambda: exact.gaussian(KEY, 0, 4, 0.1),
        lambda: exact.gaussian(KEY, 0, 4, math.nan),
        lambda: exact.laplace(KEY, 0, 4, 2.0**47),
        lambda: exact.stairs(0.0, 10),
        lambda: exact.stairs(1.0, 1),
        lambda: exact.stairs(1.0, 10, 1.0),
        lambda: exact.shares_error(0.5, 3),
    ],
)
def test_impossible_shapes_are_refused(call):
    with pytest.raises(UserError, match="grid"):
        call()
