"""For every nominal formula the counter-example that breaks it; for every sound one an attack that does not."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from fedveil.privacy import formulas, papers, pld, renyi, shuffle
from fedveil.privacy.accountants import answer, participation_epsilon
from fedveil.privacy.events import Event, Noise, Sampling
from fedveil.privacy.mechanisms import Gaussian, JointStaircase, Laplace, Staircase, TwoValued
from fedveil.privacy.vectors import vector_guarantee

HEADLINE = [Event(Noise("gaussian", 6.0), Sampling("poisson", 0.01), steps=10_000)]


def normal(x, mean, sigma):
    return np.exp(-0.5 * ((x - mean) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))


def hockey_stick(p, q, epsilon):
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


# --- nominal: shown to be broken --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["basic", "advanced", "advanced-tanh", "optimal"])
def test_step_deltas_that_are_not_summed(name):
    """Each step may reveal everything with probability q delta0 and still be (eA, q delta0)-DP."""
    nominal = answer(HEADLINE, 1e-5, name)
    assert nominal.verdict == "nominal"
    revealed = -math.expm1(10_000 * math.log1p(-0.01 * 1e-5))  # at every epsilon, also at the printed one
    assert revealed > 90 * 1e-5
    assert revealed <= nominal.delta  # the delta really paid covers it


def test_classic_gaussian_formula_beyond_one():
    nominal = answer([Event(Noise("gaussian", 0.3))], 1e-5, "basic")
    assert nominal.verdict == "nominal" and "below 1" in nominal.reason
    assert formulas.gaussian_delta(0.3, nominal.epsilon) > 10 * 1e-5


@pytest.mark.parametrize(("sigma", "steps"), [(0.5, 1), (0.7, 1)])
def test_zcdp_with_sampling(sigma, steps):
    nominal = answer([Event(Noise("gaussian", sigma), Sampling("poisson", 0.01), steps=steps)], 1e-5, "zcdp")
    assert nominal.verdict == "nominal" and 0.01 * 16 * sigma < 1
    inner = math.log1p(math.expm1(nominal.epsilon) / 0.01)
    assert 0.01 * formulas.gaussian_delta(sigma, inner) > 10 * 1e-5  # exact delta of one sampled step


@pytest.mark.parametrize(("n", "epsilon0", "order"), [(10, 1.0, 8), (100, 1.0, 32), (100, 4.0, 4)])
def test_shuffling_lemma_at_large_orders(n, epsilon0, order):
    lemma = shuffle.lemma_upper(epsilon0, n, order)
    assert lemma.verdict == "nominal"
    assert shuffle.binary_renyi(epsilon0, n, order) > 1.1 * lemma.epsilon
    assert shuffle.lemma_lower(epsilon0, n, order).verdict == "nominal"
    assert shuffle.lemma_upper(epsilon0, n, 10**6).epsilon < 1e-4  # tends to 0, the truth to epsilon0


def test_noise_scaled_by_the_largest_norm_in_the_batch():
    """One gradient 0.1 against {0.1, 4}: noise 0.6 against 24, told apart by its size alone."""
    quiet = stats.norm.sf(10, 0.1, 0.6) + stats.norm.cdf(-10, 0.1, 0.6)
    loud = stats.norm.sf(10, 2.05, 24) + stats.norm.cdf(-10, 2.05, 24)
    assert loud - math.exp(100) * quiet > 0.67
    # a 1% change of the scale is visible in 100,000 coordinates: simulate the likelihood-ratio test
    rng, d = np.random.default_rng(0), 100_000
    cut = d * math.log(1.01) / (0.5 * (1 - 1.01**-2))
    norms = np.array([rng.chisquare(d, 400), 1.01**2 * rng.chisquare(d, 400)])
    false, true = (norms > cut).mean(axis=1)
    assert true - math.exp(0.8227) * false > 0.9


def test_client_sampling_does_not_hide_records_of_a_visible_client():
    nominal = answer([Event(Noise("gaussian", 1.0), Sampling("poisson", 0.1))], 1e-5).epsilon
    assert 0.1 * formulas.gaussian_delta(1.0, nominal) > 20 * 1e-5
    honest = participation_epsilon(Event(Noise("gaussian", 1.0)), 1, 0.1, 1e-5).epsilon
    assert honest == pytest.approx(3.804, abs=2e-3)


def test_noise_with_a_count_that_depends_on_the_data():
    """Noise from every example: 5 against 6 of them are told apart by the variance of 21,840 coordinates."""
    d, r = 21_840, math.sqrt(6 / 5)
    cut = (0.823 + d * math.log(r)) / (0.5 * (1 - r**-2))
    assert stats.chi2.sf(cut / r**2, d) - math.exp(0.823) * stats.chi2.sf(cut, d) > 0.999


def test_scalar_staircase_formula_on_a_vector():
    """A change of total size 1 spread over 16 coordinates costs ten times the scalar formula."""
    scalar = Staircase(1.0).renyi(8, 1.0)
    spread = 16 * Staircase(1.0).renyi(8, 1 / 16)
    assert spread > 9 * scalar
    assert spread <= vector_guarantee(Noise("staircase", 1.0, "l1", 16)).renyi(np.array([8.0]))[0] * (
        1 + 1e-12
    )


def test_released_staircase_sampler():
    """The geometric variable that starts at -1: nominal lambda 1, observed ratio of frequencies e^3.1."""
    rng, n, b, nu = np.random.default_rng(3), 2_000_000, math.exp(-1.0), 0.5
    g = rng.geometric(1 - b, n) - 2
    inner = rng.random(n) < nu / (nu + (1 - nu) * b)
    u = rng.random(n)
    x = rng.choice([-1, 1], n) * np.where(inner, g + nu * u, g + nu + (1 - nu) * u)
    near = ((x > 0.5) & (x < 1)).mean()
    far = ((x > 1.5) & (x < 2)).mean()  # the same interval, moved by the sensitivity 1
    assert math.log(near / far) > 3.0  # standard error below 0.02
    assert papers.released_staircase_epsilon(1.0) == pytest.approx(3.127, abs=1e-3)


def test_printed_staircase_divergence_is_no_divergence():
    assert papers.staircase_theorem(1.0, 8) > 900  # lambda-DP bounds every divergence by lambda = 1


def test_parameter_shuffling_does_not_stop_losses_from_adding_up():
    """LDP-FL, epsilon 1 per weight: is this client's model in the averages? 200 trials per case."""
    rng, n, weights = np.random.default_rng(1), 100, 20_000
    keep = 1 / (1 + math.exp(-1.0))
    signs = rng.choice([-1, 1], weights)  # the target's weights, at the ends of the range

    def score(present, trials=200):
        mine = np.where(signs > 0, keep, 1 - keep) if present else np.full(weights, 0.5)
        scores = []
        for _ in range(trials):
            ones = rng.binomial(n - 1, 0.5, weights) + (rng.random(weights) < mine)
            scores.append(signs @ (ones - n / 2))
        return np.array(scores)

    inside, outside = score(True), score(False)
    cut = (inside.mean() + outside.mean()) / 2
    caught, false = (inside > cut).mean(), (outside > cut).mean()
    # one-sided 99.9% Clopper-Pearson bounds: a false alarm of this test has a chance below 0.2%
    low = stats.beta.ppf(0.001, 200 * caught, 201 - 200 * caught)
    high = stats.beta.ppf(0.999, 200 * false + 1, 200 - 200 * false)
    assert math.log(low / high) > 2.0  # the paper's client-level claim is 1
    both = shuffle.weight_reports(1.0, weights, 1)
    assert both.client.epsilon == weights


def test_a_range_from_the_clients_own_weights_reveals_itself():
    """Two clients with different own ranges report disjoint pairs of values: no epsilon covers that."""
    one, two = TwoValued(1.0, 0.0, 0.1), TwoValued(1.0, 0.0, 0.2)
    assert not {one.reach, -one.reach} & {two.reach, -two.reach}


def test_gaussian_losses_do_not_cover_laplace_under_an_l2_clip():
    laplace = pld.discretise(pld.Sampled(Laplace(1.0).pair()), 1e-3).up
    assert pld.delta_at(laplace, 1e-3, 0.0) == pytest.approx(0.3935, abs=1e-3)
    assert formulas.gaussian_delta(1.0, 0.0) == pytest.approx(0.3829, abs=1e-4)
    assert answer([Event(Noise("laplace", 1.0, "l2", 2))], 1e-5, "pld").verdict == "none"


# --- sound: attacked and not broken -------------------------------------------------------------------------------------


def subset_outputs(values, batch, x, sigma):
    """Exact output density of a sum over a random subset of fixed size, plus Gaussian noise."""
    subsets = list(itertools.combinations(values, batch))
    return sum(normal(x, sum(s), sigma) for s in subsets) / len(subsets)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 5), st.integers(1, 3), st.floats(0.5, 4), st.floats(0.02, 2), st.integers(0, 10**6))
def test_fixed_size_batches_replace_one(n, batch, sigma, epsilon, seed):
    """Records in [-1/2, 1/2], one replaced: the sum moves by at most 1. Exact one-step delta against the bound."""
    batch = min(batch, n)
    rng = np.random.default_rng(seed)
    others = rng.choice([-0.5, 0.5, 0.0, rng.uniform(-0.5, 0.5)], n - 1)
    x = np.linspace(-12 * sigma - 3, 12 * sigma + 3, 20_001)
    p = subset_outputs([0.5, *others], batch, x, sigma)
    q = subset_outputs([-0.5, *others], batch, x, sigma)
    truth = max(hockey_stick(a, b, epsilon) for a, b in ((p, q), (q, p))) * (x[1] - x[0])
    bound = pld.solve({pld.Sampled(Gaussian(sigma).pair(), batch / n, one_sided=False): 1}).delta(epsilon)
    assert truth <= bound * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_two_steps_of_replace_one_sampling(sampling):
    """Two adaptive releases at once, on a grid of both outputs."""
    sigma, others = 0.8, (0.5, -0.5)
    x = np.linspace(-7, 7, 1401)
    cell = (x[1] - x[0]) ** 2

    def one(mine):
        if sampling == "fixed":
            return subset_outputs([mine, *others], 1, x, sigma)
        total = np.zeros_like(x)
        for chosen in itertools.product((0, 1), repeat=3):
            mean = sum(c * v for c, v in zip(chosen, (mine, *others), strict=True))
            total += math.prod(1 / 3 if c else 2 / 3 for c in chosen) * normal(x, mean, sigma)
        return total

    p, q = np.outer(one(0.5), one(0.5)), np.outer(one(-0.5), one(-0.5))
    how = Sampling("fixed", batch=1, population=3) if sampling == "fixed" else Sampling("poisson", 1 / 3)
    events = [Event(Noise("gaussian", sigma), how, "replace-one", steps=2)]
    for delta in (1e-3, 1e-2, 0.1):
        epsilon = answer(events, delta).epsilon
        assert max(hockey_stick(p, q, epsilon), hockey_stick(q, p, epsilon)) * cell <= delta * (1 + 1e-3)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 0.9), st.floats(0.4, 4), st.integers(1, 3), st.sampled_from([1e-4, 1e-2]))
def test_poisson_sampled_steps_zero_out(rate, sigma, others, delta):
    """A present record among others that are sampled too, both directions."""
    x = np.linspace(-9 * sigma - 1, 9 * sigma + others + 2, 8001)
    background = np.zeros_like(x)
    with_record = np.zeros_like(x)
    for k in range(others + 1):
        chance = stats.binom.pmf(k, others, rate)
        background += chance * normal(x, k, sigma)
        with_record += chance * ((1 - rate) * normal(x, k, sigma) + rate * normal(x, k + 1, sigma))
    for name in ("pld", "rdp", "moments"):
        found = answer([Event(Noise("gaussian", sigma), Sampling("poisson", rate))], delta, name).epsilon
        for p, q in ((with_record, background), (background, with_record)):
            assert hockey_stick(p, q, found) * (x[1] - x[0]) <= delta * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("name", ["pld", "rdp", "moments"])
def test_membership_attack_on_many_sampled_steps(name):
    """The likelihood-ratio attack on 40 sampled steps, 200,000 runs: its epsilon stays below the promise."""
    rng, rate, sigma, steps, runs, delta = np.random.default_rng(5), 0.2, 1.0, 40, 200_000, 1e-2
    present = rng.random((runs, steps)) < rate
    noise = rng.standard_normal((runs, steps)) * sigma

    def loss(y):
        return np.log1p(rate * np.expm1((2 * y - 1) / (2 * sigma**2))).sum(axis=1)

    inside, outside = loss(noise + present), loss(noise)
    promise = answer(
        [Event(Noise("gaussian", sigma), Sampling("poisson", rate), steps=steps)], delta, name
    ).epsilon
    best = 0.0
    for cut in np.quantile(inside, [0.5, 0.7, 0.9, 0.97]):
        caught, false = (inside > cut).sum(), (outside > cut).sum()
        low = stats.beta.ppf(1e-4, caught, runs - caught + 1)
        high = stats.beta.ppf(1 - 1e-4, false + 1, runs - false)
        best = max(best, math.log(max((low - delta) / high, 1e-9)))
    assert best > 0.25 * promise  # the attack is not a straw man
    assert best <= promise  # false alarms below 8 * 1e-4


@settings(max_examples=15, deadline=None)
@given(st.floats(0.3, 3), st.floats(0.05, 0.95), st.integers(2, 6), st.floats(0, math.pi / 2))
def test_sampled_laplace_on_two_coordinates(scale, rate, order, angle):
    """Every direction of an L2 change, both directions of the sampled pair, by quadrature."""
    shifts = (math.cos(angle), math.sin(angle))
    bound = renyi.poisson(Noise("laplace", scale, "l2", 2), rate, (float(order),))[0]

    def axis(shift):
        cuts = np.unique([-30 * scale, 0.0, shift, shift + 30 * scale])
        nodes, weights = np.polynomial.legendre.leggauss(40)
        x = np.concatenate([(b - a) / 2 * nodes + (a + b) / 2 for a, b in itertools.pairwise(cuts)])
        w = np.concatenate([(b - a) / 2 * weights for a, b in itertools.pairwise(cuts)])
        law = Laplace(scale)
        return law.density(x), law.density(x - shift), w

    (q1, p1, w1), (q2, p2, w2) = axis(shifts[0]), axis(shifts[1])
    q, p, w = np.outer(q1, q2), np.outer(p1, p2), np.outer(w1, w2)
    mixed = rate * p + (1 - rate) * q
    for a, b in ((mixed, q), (q, mixed)):
        truth = math.log(float((w * a**order * b ** (1 - order)).sum())) / (order - 1)
        assert truth <= bound * (1 + 1e-6) + 1e-9


@settings(max_examples=100, deadline=None)
@given(st.floats(1.01, 60), st.floats(0.001, 0.999), st.floats(-6, 6))
def test_sampling_away_from_the_unit_is_never_worse(order, rate, loss):
    """The pointwise inequality behind using one direction only (docs/accountants.md)."""
    w = math.exp(loss)
    u, v = 1 - rate + rate * w, (1 - rate) * w + rate
    forward = u**order + v**order * w ** (1 - order)
    backward = u ** (1 - order) + w**order * v ** (1 - order)
    assert forward >= backward * (1 - 1e-9)


def test_partition_and_no_sampling_are_gaussian():
    for delta in (1e-6, 1e-3):
        found = answer([Event(Noise("gaussian", 2.0), Sampling("partition"), steps=9)], delta)
        assert found.verdict == "sound"
        assert formulas.gaussian_delta(2 / 3, found.epsilon) <= delta


def test_honest_splits_cover_the_steps_that_reveal_everything():
    for name in ("basic", "advanced", "advanced-tanh", "optimal"):
        found = answer(HEADLINE, 1e-5, name, honest=True)
        assert found.verdict == "sound" and found.delta <= 1e-5 * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.2, 3), st.integers(1, 4), st.integers(0, 10**6))
def test_joint_staircase_sampled_pair(lam, d, seed):
    """Exact moments under random L1 changes by importance sampling stay below those of lambda-DP."""
    law, rng = JointStaircase(lam, d), np.random.default_rng(seed)
    radii, chance = law.ball_weights()
    change = rng.standard_normal(d)
    change /= np.abs(change).sum()
    r = radii[rng.choice(len(radii), 400, p=chance)] * rng.random(400) ** (1 / d)
    x = rng.dirichlet(np.ones(d), 400) * r[:, None] * rng.choice([-1, 1], (400, d))
    losses = np.array([law.log_density(y) - law.log_density(y - change) for y in x])
    assert np.abs(losses).max() <= lam + 1e-9
    assert set(np.round(losses / lam).astype(int)) <= {-1, 0, 1}


def test_group_privacy():
    epsilon, delta = formulas.group(0.5, 1e-6, 3)
    assert (epsilon, delta) == (1.5, pytest.approx(3e-6 * math.exp(1.0)))
    assert formulas.group(5.0, 1e-6, 400)[1] == math.inf
    # a group of k moves a Gaussian by k: exact delta stays below the group bound
    single = formulas.gaussian_epsilon(4.0, 1e-6)
    grown, paid = formulas.group(single, 1e-6, 3)
    assert formulas.gaussian_delta(4.0 / 3, grown) <= paid


def test_visible_participation_bound_is_met_exactly():
    """Two rounds, a coin of 0.3 each: the mixture's delta by integration."""
    event = Event(Noise("gaussian", 1.0))
    epsilon = participation_epsilon(event, 2, 0.3, 1e-3).epsilon
    one = integrate.quad(
        lambda x: max(0, normal(x, 1, 1) - math.exp(epsilon) * normal(x, 0, 1)), -9, 12, limit=300
    )[0]
    two = formulas.gaussian_delta(1 / math.sqrt(2), epsilon)
    assert 2 * 0.3 * 0.7 * one + 0.09 * two == pytest.approx(1e-3, rel=5e-3)
