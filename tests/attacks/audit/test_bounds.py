import numpy as np
import pytest
from scipy.stats import binom, norm

from fedveil.attacks.audit import bounds
from fedveil.attacks.audit.bounds import Scores
from fedveil.errors import UserError


def quantiles(n, shift=0.0):
    """n scores spread exactly like a normal distribution."""
    return norm.ppf((np.arange(n) + 0.5) / n) + shift


@pytest.mark.parametrize(
    ("correct", "level", "expected"), [(100, 0.05, 3.4792), (100, 0.01, 3.0232), (60, 0.05, 0.0507)]
)
def test_one_run_bound_of_a_known_count(correct, level, expected):
    assert bounds.one_run_epsilon(500, 100, correct, 1e-5, level) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("canaries", "expected"), [(100, 3.49), (1000, 5.78), (5000, 7.28)])
def test_ceiling_of_the_sample_size(canaries, expected):
    assert bounds.ceiling(canaries, 1e-5) == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize(
    ("shift", "fdp", "expected"),
    [(1, False, 1.13346), (2, False, 2.311945), (4, False, 4.395568),
     (1, True, 2.164749), (2, True, 4.7218075), (4, True, 9.133752)],
)  # fmt: skip
def test_one_run_bounds_on_normal_quantiles(shift, fdp, expected):
    scores = Scores(quantiles(10_000, shift), quantiles(10_000))
    found = bounds.lower_bound(scores, bounds.one_run_bound(1e-6, fdp), 0.05, "bonferroni")
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mu", [1.0, 2.0])
def test_gaussian_route_is_within_five_percent_and_below(mu):
    rng = np.random.default_rng(7)
    scores = Scores(rng.normal(mu, 1, 500_000), rng.normal(0, 1, 500_000))
    exact = bounds.gaussian_epsilon(mu, 1e-5)
    found = bounds.lower_bound(scores, bounds.gaussian_bound(1e-5), 0.05, "fixed", threshold=mu / 2)
    assert 0.95 * exact < found < exact


def test_gaussian_curve_agrees_with_the_accounting_library():
    dp_accounting = pytest.importorskip("dp_accounting")
    for mu in (0.3, 1.0, 3.0):
        expected = dp_accounting.get_epsilon_gaussian(1 / mu, 1e-5)
        assert bounds.gaussian_epsilon(mu, 1e-5) == pytest.approx(expected, rel=1e-6)
        assert bounds.gaussian_mu(expected, 1e-5) == pytest.approx(mu, rel=1e-6)


def test_p_value_agrees_with_the_sum_written_out():
    for epsilon, delta, correct in ((0.5, 1e-3, 70), (1.0, 1e-2, 80), (0.0, 0.0, 55)):
        rate, worst, total = 1 / (1 + np.exp(-epsilon)), 0.0, 0.0
        for i in range(1, correct + 1):
            total += binom.pmf(correct - i, 100, rate)
            worst = max(worst, total / i)
        expected = min(1, binom.sf(correct - 1, 100, rate) + 2 * 200 * delta * worst)
        assert bounds.one_run_p_value(200, 100, correct, epsilon, delta) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("hits", "trials"), [(0, 50), (7, 50), (49, 50), (50, 50)])
def test_upper_rate_is_exact(hits, trials):
    rate = float(bounds.upper_rate(hits, trials, 0.03))
    assert rate == 1.0 if hits == trials else binom.cdf(hits, trials, rate) == pytest.approx(0.03)


def test_frontier_keeps_the_best_points_only():
    scores = Scores(np.array([0.5, 1.5, 2.5, 3.5]), np.array([0.0, 1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(bounds.frontier(scores), [0.0, 0.5, 3.5, np.inf])


def test_bounds_rarely_exceed_the_truth():
    """Each bound at 95%: 60 repetitions, more than 9 violations have probability < 0.2% for an honest bound."""
    rng = np.random.default_rng(11)
    exact = bounds.gaussian_epsilon(1.0, 1e-2)
    tests = {
        "cp": (bounds.clopper_pearson_bound(1e-2), "split"),
        "gaussian": (bounds.gaussian_bound(1e-2), "fixed"),
        "one_run": (bounds.one_run_bound(1e-2), "fixed"),
        "fdp": (bounds.one_run_bound(1e-2, True), "fixed"),
    }
    wrong = dict.fromkeys(tests, 0)
    for _ in range(60):
        scores = Scores(rng.normal(1, 1, 200), rng.normal(0, 1, 200))
        for name, (bound, strategy) in tests.items():
            wrong[name] += bounds.lower_bound(scores, bound, 0.05, strategy, threshold=0.5) > exact
    assert max(wrong.values()) <= 9, wrong


def curve(mu):
    return lambda epsilon: bounds.gaussian_delta(epsilon, mu)


def verdict(true_mu, promised_mu, canaries=400, seed=0, **more):
    rng = np.random.default_rng(seed)
    scores = Scores(rng.normal(true_mu, 1, canaries // 2), rng.normal(0, 1, canaries // 2))
    return bounds.judge(
        scores, epsilon_promised=bounds.gaussian_epsilon(promised_mu, 1e-5), delta=1e-5, threshold=promised_mu / 2,
        curve=curve(promised_mu), independent=True, **more,
    )  # fmt: skip


def test_half_the_noise_is_called_broken_and_the_right_noise_is_not():
    """At 400 canaries and mu = 1: power 1 - 1e-6 against half noise; false alarms at most 5% by construction,
    in 40 runs more than 6 have probability < 1%."""
    assert all(verdict(2.0, 1.0, seed=s).verdict == "promise broken" for s in range(40))
    assert sum(verdict(1.0, 1.0, seed=s).verdict == "promise broken" for s in range(40)) <= 6
    assert verdict(1.0, 1.0, canaries=1000, seed=1).verdict == "promise holds"


def test_a_correct_mechanism_is_accused_no_oftener_than_stated():
    """The level is 5% over all tests together: of 200 correct runs more than 19 have probability below 0.4%."""
    accused = [verdict(mu, mu, seed=s).verdict == "promise broken" for mu in (0.3, 1.0) for s in range(100)]
    assert sum(accused) <= 19


@pytest.mark.parametrize("mu", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("canaries", [100, 400, 1600])
def test_half_the_noise_is_never_said_to_hold(mu, canaries):
    """In units of the promised noise. Too few canaries may leave it open; "holds" would need luck of about 1%: 2 or
    more of 12 have probability below 1%."""
    rng = np.random.default_rng(8)
    said = []
    for _ in range(12):
        half = [rng.normal(mean, 0.5, canaries // 2) for mean in (mu, 0.0)]
        found = bounds.judge(
            Scores(*half), epsilon_promised=bounds.gaussian_epsilon(mu, 1e-5), delta=1e-5, threshold=mu / 2,
            curve=curve(mu), independent=True,
        )  # fmt: skip
        said.append(found.verdict)
    assert said.count("promise holds") <= 1


def test_scores_that_vary_more_than_the_noise_explains_are_no_evidence():
    rng = np.random.default_rng(3)
    found = bounds.judge(
        Scores(rng.normal(2, 2, 2000), rng.normal(0, 2, 2000)), epsilon_promised=bounds.gaussian_epsilon(2, 1e-5),
        delta=1e-5, threshold=1.0, curve=curve(2.0), independent=True,
    )  # fmt: skip
    assert found.verdict == "not enough evidence" and "vary more" in found.reason


def test_a_signal_that_never_arrives_is_no_evidence():
    """10,000 canaries could tell half the noise, but these were lost on the way."""
    assert verdict(0.0, 1.0, canaries=10_000).verdict == "not enough evidence"


def test_few_canaries_are_not_enough_evidence():
    assert verdict(0.05, 0.05, canaries=20).verdict == "not enough evidence"


def test_only_a_sound_promise_gives_exit_code_one():
    assert verdict(3.0, 1.0).exit_code == 1
    broken = verdict(3.0, 1.0, status="nominal")
    assert broken.verdict == "promise broken" and broken.exit_code == 0


def test_a_diverged_audit_is_an_error_not_a_pass():
    with pytest.raises(UserError, match="not finite"):
        Scores(np.array([np.nan, 1.0]), np.array([0.0]))


def test_fixed_strategy_needs_a_threshold():
    with pytest.raises(UserError, match="threshold"):
        bounds.lower_bound(Scores(np.ones(3), np.zeros(3)), bounds.gaussian_bound(1e-5), strategy="fixed")
