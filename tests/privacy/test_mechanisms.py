"""Closed forms against quadrature and simulation; vector rules against random and adversarial changes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from fedveil.errors import UserError
from fedveil.privacy.accountants import answer
from fedveil.privacy.calibrate import calibrate
from fedveil.privacy.events import Event, Noise, Sampling
from fedveil.privacy.mechanisms import Gaussian, JointStaircase, Laplace, Staircase, TwoValued, mechanism
from fedveil.privacy.vectors import vector_guarantee

SCALARS = [Gaussian(0.7), Gaussian(3.0), Laplace(0.5), Laplace(2.0), Staircase(0.3), Staircase(1.0, 0.5),
           Staircase(2.5, 0.1), Staircase(1.0, 0.9, bound=2.0)]  # fmt: skip
FEW = settings(max_examples=40, deadline=None)


def pieces(law, shift, reach):
    """Intervals on which both densities are smooth."""
    cuts = {-reach, reach, 0.0, shift}
    if isinstance(law, Staircase):
        jumps = law.bound * (law.shape + np.arange(math.ceil(reach / law.bound) + 1))
        cuts |= set(jumps) | set(-jumps) | set(shift + jumps) | set(shift - jumps)
    points = np.array(sorted(c for c in cuts if -reach <= c <= reach))
    return itertools.pairwise(points)


def integral(function, law, shift=0.0, reach=None):
    reach = reach or 45 * math.sqrt(law.variance())
    return sum(integrate.fixed_quad(function, a, b, n=160)[0] for a, b in pieces(law, shift, reach) if b > a)


@pytest.mark.parametrize("law", SCALARS, ids=repr)
def test_density_cdf_and_moments_agree_with_quadrature(law):
    assert integral(law.density, law) == pytest.approx(1, abs=1e-9)
    assert integral(lambda x: np.abs(x) * law.density(x), law) == pytest.approx(law.mean_abs(), rel=1e-8)
    assert integral(lambda x: x**2 * law.density(x), law) == pytest.approx(law.variance(), rel=1e-8)
    for x in (-1.7, -0.2, 0.0, 0.4, 1.0, 2.6):
        part = integral(lambda t, x=x: np.where(t <= x, law.density(t), 0.0), law, shift=x)
        assert float(law.cdf(x)) == pytest.approx(part, abs=1e-8)


@pytest.mark.parametrize("law", SCALARS, ids=repr)
@pytest.mark.parametrize("shift", [0.05, 0.37, 1.0, 1.6, 3.3])
@pytest.mark.parametrize("order", [1.3, 2.0, 6.5])
def test_renyi_divergence_agrees_with_quadrature(law, shift, order):
    def moment(x):
        p, q = law.density(x - shift), law.density(x)
        logs = order * np.log(np.maximum(p, 1e-300)) + (1 - order) * np.log(np.maximum(q, 1e-300))
        return np.where(p > 1e-280, np.exp(logs), 0.0)

    reach = 25 * math.sqrt(law.variance()) + order * shift
    expected = math.log(integral(moment, law, shift, reach)) / (order - 1)
    assert law.renyi(order, shift) == pytest.approx(expected, rel=2e-6, abs=1e-9)


@FEW
@given(st.floats(0.05, 5), st.floats(0, 1), st.floats(1.05, 40), st.floats(0.001, 1), st.floats(0.001, 1))
def test_staircase_divergence_grows_with_the_shift_and_is_concave(lam, nu, order, s, t):
    law = Staircase(lam, nu)
    low, high = sorted((s, t))
    assert law.renyi(order, low) <= law.renyi(order, high) + 1e-12
    middle = law.renyi(order, (low + high) / 2)
    assert middle >= (law.renyi(order, low) + law.renyi(order, high)) / 2 - 1e-12
    # the short formula (at most one jump crossed) and the general sum over pieces are the same number
    assert law._renyi_far(np.array([order]), high)[0] == pytest.approx(
        law.renyi(order, high), rel=1e-9, abs=1e-12
    )


@FEW
@given(st.floats(1.05, 60), st.floats(0.01, 20), st.floats(0.01, 20))
def test_laplace_divergence_is_convex_in_the_shift_and_concave_in_its_square(order, s, t):
    law = Laplace(1.0)
    assert law.renyi(order, s + t) >= law.renyi(order, s) + law.renyi(order, t) - 1e-9
    mean = law.renyi(order, math.sqrt((s**2 + t**2) / 2))
    assert mean >= (law.renyi(order, s) + law.renyi(order, t)) / 2 - 1e-9
    assert law.renyi(order, s) <= order * s**2 / 2 * (1 + 1e-9)


@FEW
@given(
    st.sampled_from(["laplace", "staircase"]),
    st.sampled_from(["l1", "l2"]),
    st.integers(1, 12),
    st.floats(0.2, 8),
    st.sampled_from([1.5, 2.0, 8.0, 32.0]),
    st.integers(0, 2**31),
)
def test_no_change_within_the_clip_exceeds_the_vector_guarantee(name, norm, d, scale, order, seed):
    change = np.random.default_rng(seed).standard_cauchy(d)
    change /= np.abs(change).sum() if norm == "l1" else np.linalg.norm(change)
    law = mechanism(Noise(name, scale))
    truth = sum(law.renyi(order, s) for s in np.abs(change) if s > 0)
    bound = vector_guarantee(Noise(name, scale, norm, d)).renyi(np.array([order]))[0]
    assert truth <= bound * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("d", [2, 7, 100])
def test_the_even_split_reaches_the_bound(d):
    for name, norm, share in (
        ("laplace", "l2", d**-0.5),
        ("staircase", "l2", d**-0.5),
        ("staircase", "l1", 1 / d),
    ):
        law = mechanism(Noise(name, 2.0))
        bound = vector_guarantee(Noise(name, 2.0, norm, d)).renyi(np.array([4.0]))[0]
        assert d * law.renyi(4.0, share) == pytest.approx(bound, rel=1e-9)


def test_laplace_under_l2_stays_below_gaussian_of_the_same_scale_and_pld_is_refused():
    for d in (1, 5, 1000):
        guarantee = vector_guarantee(Noise("laplace", 3.0, "l2", d))
        orders = np.array([1.5, 2, 10, 200])
        assert np.all(guarantee.renyi(orders) <= orders / (2 * 3.0**2) + 1e-12)
        assert (guarantee.pair is None) == (d > 1)
    assert "L1 clip" in guarantee.refusal
    assert vector_guarantee(Noise("laplace", 3.0, "l1", 1000)).pair is not None


def test_scalar_staircase_formula_is_refused_for_vectors():
    guarantee = vector_guarantee(Noise("staircase", 1.0, "l1", 16))
    assert guarantee.pair is None and "joint-staircase" in guarantee.refusal
    assert guarantee.pure == 16


@pytest.mark.parametrize("d", [1, 2, 5, 40])
def test_joint_staircase_is_normalised_and_keeps_its_ratio(d):
    law = JointStaircase(0.8, d)
    chance = law.ball_weights()[1]
    # mass by shells of the density must be 1: volume of an L1 ball of radius r is (2r)^d / d!
    edges = np.concatenate([[0.0], law.shape + np.arange(300)])
    logs = [law.log_density([*([0.0] * (d - 1)), (a + b) / 2]) for a, b in itertools.pairwise(edges)]
    log_volume = d * np.log(2 * np.maximum(edges, 1e-300)) - math.lgamma(d + 1)
    shells = log_volume[1:] + np.log1p(-np.exp(np.minimum(log_volume[:-1] - log_volume[1:], -1e-15)))
    assert np.exp(np.array(logs) + shells).sum() == pytest.approx(1, abs=1e-9)
    assert chance.sum() == pytest.approx(1)
    rng = np.random.default_rng(d)
    for _ in range(200):
        x = rng.standard_normal(d) * 3
        step = rng.standard_normal(d)
        step /= np.abs(step).sum()
        assert abs(law.log_density(x + step) - law.log_density(x)) <= 0.8 + 1e-9
    if d == 1:
        assert law.variance() == pytest.approx(Staircase(0.8).variance())
        assert law.mean_abs() == pytest.approx(Staircase(0.8).mean_abs())


def test_samplers_follow_their_law():
    # 200,000 draws each; bounds are 5 standard errors, a false alarm has a chance below 1e-5
    rng, n = np.random.default_rng(7), 200_000
    law = Staircase(0.9)
    spec = law.sampler()
    g = rng.geometric(-math.expm1(-spec["lambda"]), n) - 1  # starts at 0
    u, inner = rng.random(n), rng.random(n) < spec["inner"]
    size = np.where(inner, g + spec["nu"] * u, g + spec["nu"] + (1 - spec["nu"]) * u)
    x = size * rng.choice([-1, 1], n) * spec["scale"]
    assert np.abs(x).mean() == pytest.approx(law.mean_abs(), abs=5 * np.abs(x).std() / math.sqrt(n))
    for at in (-1.5, -0.1, 0.3, 1.1, 4.0):
        assert (x <= at).mean() == pytest.approx(float(law.cdf(at)), abs=5 * 0.5 / math.sqrt(n))
    joint = JointStaircase(0.9, 6)
    radii, chance = joint.ball_weights()
    r = radii[rng.choice(len(radii), n // 4, p=chance)] * rng.random(n // 4) ** (1 / 6)
    simplex = rng.dirichlet(np.ones(6), n // 4)
    assert (simplex[:, 0] * r).mean() == pytest.approx(joint.mean_abs(), rel=0.03)
    assert ((simplex[:, 0] * r) ** 2).mean() == pytest.approx(joint.variance(), rel=0.06)
    assert (r <= 5).mean() == pytest.approx(joint.radius_cdf(5.0), abs=5 * 0.5 / math.sqrt(n / 4))


@FEW
@given(st.floats(0.05, 12), st.floats(-2, 2), st.floats(-2, 2), st.floats(0.01, 2))
def test_two_valued_reports_are_unbiased_and_exactly_ldp(epsilon, v, w, radius):
    law = TwoValued(epsilon, 0.3, radius)
    p, q = float(law.probability(v)), float(law.probability(w))
    clipped = min(max(v, 0.3 - radius), 0.3 + radius)
    high, low = law.centre + law.reach, law.centre - law.reach
    assert p * high + (1 - p) * low == pytest.approx(clipped, abs=1e-9)
    assert p <= math.exp(epsilon) * q * (1 + 1e-9) and 1 - p <= math.exp(epsilon) * (1 - q) * (1 + 1e-6)
    assert p * (high - clipped) ** 2 + (1 - p) * (low - clipped) ** 2 == pytest.approx(
        law.variance(v), rel=1e-6
    )
    assert float(law.cdf(high, v)) == 1 and float(law.density(high, v)) == pytest.approx(p)


@pytest.mark.parametrize(
    ("noise", "word"),
    [
        (Noise("gaussian", 0.0), "noise-multiplier"),
        (Noise("gaussian", -1.0), "noise-multiplier"),
        (Noise("gaussian", math.nan), "noise-multiplier"),
        (Noise("gaussian", math.inf), "noise-multiplier"),
        (Noise("staircase", 1.0, nu=1.5), "nu"),
        (Noise("laplace", 1.0, dimension=0), "dimension"),
        (Noise("laplase", 1.0), "laplace"),
        (Noise("laplace", 1.0, norm="l3"), "clip-norm"),
    ],
)
def test_impossible_noise_names_the_option(noise, word):
    with pytest.raises(UserError, match=word):
        vector_guarantee(noise)


@pytest.mark.parametrize("name", ["gaussian", "laplace", "staircase", "joint-staircase"])
def test_noise_whose_square_vanishes_is_refused(name):
    with pytest.raises(UserError, match="noise-multiplier must be at least 1e-100"):
        vector_guarantee(Noise(name, 1e-320, "l1"))


@pytest.mark.parametrize("nu", [None, 0.0, 0.3])
@pytest.mark.parametrize(("width", "dimension"), [(1.0, 1), (1.0, 1000), (1000**-0.5, 1000)])
@pytest.mark.parametrize("multiplier", [1e-90, 1e-12, 1e-6, 1e-3, 5e-3, 0.03])
def test_staircase_noise_that_hardly_is_any_has_a_huge_epsilon_and_its_width_is_right_or_refused(
    multiplier, width, dimension, nu
):
    noise = Noise("staircase", multiplier, dimension=dimension, nu=nu, width=width)
    worth, law = vector_guarantee(noise), mechanism(noise)
    for value in (law.variance, law.mean_abs):
        if law.lam > 700:
            with pytest.raises(UserError, match="hardly any"):
                value()
        else:
            assert math.isfinite(value()) and value() > 0
    found = worth.renyi(np.array([1.1, 2.0, 64.0]))
    assert np.all(np.isfinite(found)) and np.all(np.diff(found) >= 0) and np.all(found <= worth.pure * (1 + 1e-9))


@pytest.mark.parametrize("epsilon", [1.0, 100.0, 650.0, 1e4])
def test_a_staircase_is_calibrated_also_where_hardly_any_noise_is_asked_for(epsilon):
    assert calibrate(epsilon, 1e-5, mechanism="staircase").epsilon <= epsilon


@pytest.mark.parametrize("multiplier", [1e-30, 1e-6, 1e-3])
def test_sampled_gaussian_noise_that_hardly_is_any_has_a_huge_epsilon(multiplier):
    event = Event(Noise("gaussian", multiplier), Sampling("poisson", 0.1))
    assert answer([event], 1e-5, "rdp").epsilon > 1e4
