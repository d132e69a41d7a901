"""Empirical lower bounds on epsilon from canary scores, and the verdict on a promise.

Canaries are units (examples or clients) that enter training on fair coins. An attacker scores each one from
what the observer saw; scores of included and excluded canaries bound epsilon from below:

    clopper_pearson   exact binomial intervals at a threshold; canaries must be scored independently
    gaussian          the same intervals turned into a Gaussian trade-off curve (mu), then into epsilon
    one_run           Steinke, Nasr, Jagielski 2023: any dependence between canaries of one run is allowed
    one_run_fdp       Mahloujifar, Melis, Chaudhuri 2024: one run, against the Gaussian trade-off curve
    against_curve     tests the whole promised curve delta(epsilon), not one point of it

Thresholds are fixed before looking, chosen on one half of the canaries and used on the other ("split"), or
corrected for all that were tried ("bonferroni"); the best of many is never reported as it is.

Formal guarantee: for a mechanism that keeps its promise, each bound exceeds the true epsilon with probability
at most `significance` (for clopper_pearson and against_curve: if scores are independent given the coins; for
gaussian and one_run_fdp: if the mechanism's trade-off curve is no worse than a Gaussian one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy
from scipy.optimize import brentq
from scipy.special import expit, log_ndtr, ndtr, ndtri

from fedveil.errors import UserError

Strategy = Literal["fixed", "split", "bonferroni"]
Verdict = Literal["promise holds", "promise broken", "not enough evidence"]
LARGEST = 200.0  # no bound searches beyond this epsilon


# --- exact pieces ---------------------------------------------------------------------------------------------


def upper_rate(hits: np.ndarray | int, trials: np.ndarray | int, significance: float) -> np.ndarray:
    """Clopper-Pearson: the largest rate under which at most `hits` of `trials` still has this probability."""
    hits, trials = np.asarray(hits), np.asarray(trials)
    with np.errstate(invalid="ignore"):
        return np.where(
            hits < trials, scipy.stats.beta.ppf(1 - significance, hits + 1, np.maximum(trials - hits, 1)), 1.0
        )


def gaussian_delta(epsilon: float, mu: float) -> float:
    """delta(epsilon) of the Gaussian mechanism with signal-to-noise ratio mu, exact."""
    if mu <= 0:
        return 0.0
    first = log_ndtr(-epsilon / mu + mu / 2)
    second = epsilon + log_ndtr(-epsilon / mu - mu / 2)
    return float(math.exp(first) * -math.expm1(min(second - first, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon at which the Gaussian mechanism with ratio mu has this delta."""
    if mu <= 0 or gaussian_delta(0.0, mu) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(high, mu) > delta:
        high *= 2
        if high > 1e6:
            return high
    return float(brentq(lambda e: gaussian_delta(e, mu) - delta, 0.0, high, xtol=1e-10))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The signal-to-noise ratio at which the Gaussian mechanism is exactly (epsilon, delta)."""
    if gaussian_delta(epsilon, 1e3) <= delta:
        return 1e3
    return float(brentq(lambda m: gaussian_delta(epsilon, m) - delta, 1e-9, 1e3, xtol=1e-12))


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """How likely at least `correct` of `guesses` are for an (epsilon, delta) mechanism with fair coins."""
    rate = expit(epsilon)
    tail = scipy.stats.binom.sf(correct - 1, guesses, rate)
    if delta == 0 or correct == 0:
        return float(tail)
    steps = np.arange(1, correct + 1)
    worst = float(((scipy.stats.binom.sf(correct - 1 - steps, guesses, rate) - tail) / steps).max())
    return float(min(1.0, tail + 2 * canaries * delta * worst))


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, significance: float = 0.05, beat: float = 0.0
) -> float:
    """The largest epsilon refuted by `correct` right guesses (one-run bound); 0 if not above `beat`."""

    def margin(epsilon: float) -> float:
        return significance - one_run_p_value(canaries, guesses, correct, epsilon, delta)

    return _largest_refuted(margin, beat)


def one_run_fdp_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, significance: float = 0.05, beat: float = 0.0
) -> float:
    """The largest epsilon whose Gaussian trade-off curve is refuted by `correct` right guesses.

    The tail of the number of right guesses is bounded by a recursion over that number: `right` and `wrong`
    are the probability masses of being right and of being wrong (per canary) above the current count, and the
    trade-off curve limits how fast one can grow against the other. If at the end they cannot add up to the
    share of canaries guessed, the curve is impossible."""

    def margin(epsilon: float) -> float:
        mu = gaussian_mu(epsilon, delta)
        right = significance * correct / canaries
        wrong = significance * (guesses - correct) / canaries
        for count in range(correct - 1, -1, -1):
            least = float(ndtr(ndtri(min(right, 1.0)) - mu))
            if least <= wrong:
                break
            right = min(1.0, right + count / (guesses - count) * (least - wrong))
            wrong = least
        return right + wrong - guesses / canaries

    return _largest_refuted(margin, beat)


def _largest_refuted(margin: Callable[[float], float], beat: float) -> float:
    """The root of a margin that is positive while epsilon is refuted."""
    if margin(beat) <= 0:
        return 0.0
    low, high = beat, beat + 1.0
    while margin(high) > 0:
        low, high = high, 2 * high
        if high > LARGEST:
            return LARGEST
    return float(brentq(margin, low, high, xtol=1e-7))


# --- from scores to bounds ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Attack scores of included and excluded canaries; higher means "was included"."""

    included: np.ndarray
    excluded: np.ndarray

    def __post_init__(self) -> None:
        if not len(self.included) or not len(self.excluded):
            raise UserError("an audit needs at least one included and one excluded canary: raise --canaries.")
        if not (np.isfinite(self.included).all() and np.isfinite(self.excluded).all()):
            raise UserError(
                "canary scores are not finite: the run diverged, so the audit says nothing about it."
            )

    @property
    def canaries(self) -> int:
        return len(self.included) + len(self.excluded)

    def split(self, seed: int) -> tuple[Scores, Scores]:
        """Two random halves, for choosing a threshold and for using it."""
        rng = np.random.default_rng(seed)
        a, b = rng.permutation(self.included), rng.permutation(self.excluded)
        i, j = max(1, len(a) // 2), max(1, len(b) // 2)
        return Scores(a[:i], b[:j]), Scores(a[i:], b[j:])


def counts(scores: Scores, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Included and excluded canaries at or above each threshold."""
    inside, outside = np.sort(scores.included), np.sort(scores.excluded)
    return (
        len(inside) - np.searchsorted(inside, thresholds, side="left"),
        len(outside) - np.searchsorted(outside, thresholds, side="left"),
    )


def frontier(scores: Scores) -> np.ndarray:
    """Thresholds on the concave hull of the ROC curve: no other threshold can give a better bound."""
    thresholds = np.append(np.union1d(scores.included, scores.excluded), np.inf)
    inside, outside = counts(scores, thresholds)
    keep = np.arange(len(thresholds))
    while len(keep) > 2:
        right, up = (
            np.diff(len(scores.included) - inside[keep]),
            np.diff(len(scores.excluded) - outside[keep]),
        )
        bent = up[:-1] * right[1:] > up[1:] * right[:-1]
        if bent.all():
            break
        keep = keep[np.r_[True, bent, True]]
    return thresholds[keep]


Bound = Callable[[int, int, int, int, float, float], float]
"""(true positives, included, false positives, excluded, significance, epsilon to beat) -> epsilon; a bound may
return 0 early when it cannot beat that epsilon"""


def clopper_pearson_bound(delta: float) -> Bound:
    """epsilon >= log((TPR - delta) / FPR), or the mirrored one, with exact intervals for both rates."""

    def bound(
        tp: int, included: int, fp: int, excluded: int, significance: float, beat: float = 0.0
    ) -> float:
        false_positive = float(upper_rate(fp, excluded, significance / 2))
        false_negative = float(upper_rate(included - tp, included, significance / 2))
        best = 0.0
        for one, other in ((false_positive, false_negative), (false_negative, false_positive)):
            if one > 0 and 1 - other - delta > 0:
                best = max(best, math.log((1 - other - delta) / one))
        return best

    return bound


def gaussian_bound(delta: float) -> Bound:
    """The Gaussian curve through the interval's corner: mu = Phi^-1(1 - FPR) - Phi^-1(FNR)."""

    def bound(
        tp: int, included: int, fp: int, excluded: int, significance: float, beat: float = 0.0
    ) -> float:
        false_positive = float(upper_rate(fp, excluded, significance / 2))
        false_negative = float(upper_rate(included - tp, included, significance / 2))
        if max(false_positive, false_negative) >= 1:
            return 0.0
        return gaussian_epsilon(float(-ndtri(false_positive) - ndtri(false_negative)), delta)

    return bound


def one_run_bound(delta: float, fdp: bool = False) -> Bound:
    """Guess "included" for everything at or above the threshold, abstain on the rest."""
    epsilon_of = one_run_fdp_epsilon if fdp else one_run_epsilon

    def bound(
        tp: int, included: int, fp: int, excluded: int, significance: float, beat: float = 0.0
    ) -> float:
        if tp <= fp:
            return 0.0
        return epsilon_of(included + excluded, tp + fp, tp, delta, significance, beat)

    return bound


def lower_bound(
    scores: Scores,
    bound: Bound,
    significance: float = 0.05,
    strategy: Strategy = "bonferroni",
    *,
    threshold: float | None = None,
    seed: int = 0,
) -> float:
    """An epsilon lower bound at one threshold, chosen as `strategy` says.

    bonferroni: the best point of the ROC hull, at a level divided by the number of hull points. split: the
    best threshold of one half, applied to the other half at the full level. The hull itself is seen in the
    data, so bonferroni is the customary rather than the strict correction; verdicts use fixed thresholds."""

    def at(which: Scores, cut: float, level: float) -> float:
        tp, fp = counts(which, np.array([cut]))
        return bound(int(tp[0]), len(which.included), int(fp[0]), len(which.excluded), level, 0.0)

    if strategy == "fixed":
        if threshold is None:
            raise UserError(
                "strategy 'fixed' needs a threshold that was chosen before looking at the scores."
            )
        return at(scores, threshold, significance)
    if strategy == "split":
        choose, use = scores.split(seed)
        return at(use, _best(choose, bound, significance)[1], significance)
    hull = frontier(scores)
    return _best(scores, bound, significance / len(hull))[0]


def _best(scores: Scores, bound: Bound, significance: float) -> tuple[float, float]:
    """Best bound over the hull and its threshold, most promising points first."""
    hull = frontier(scores)
    tp, fp = counts(scores, hull)
    best, where = 0.0, float(hull[len(hull) // 2])
    precision = 1 - upper_rate(fp, np.maximum(tp + fp, 1), significance)
    for i in np.argsort(-precision):
        found = bound(int(tp[i]), len(scores.included), int(fp[i]), len(scores.excluded), significance, best)
        if found > best:
            best, where = found, float(hull[i])
    return best, where


def ceiling(canaries: int, delta: float, significance: float = 0.05) -> float:
    """The one-run bound if every guess were right: what this many canaries can show at most."""
    return one_run_epsilon(canaries, canaries, canaries, delta, significance)


Counts = tuple[int, int, int, int]
"""(true positives, included, false positives, excluded) at one threshold"""


def counts_at(scores: Scores, threshold: float) -> Counts:
    """How many canaries of each group lie at or above the threshold."""
    tp, fp = counts(scores, np.array([threshold]))
    return int(tp[0]), len(scores.included), int(fp[0]), len(scores.excluded)


def against_curve(
    seen: Counts,
    curve: Callable[[float], float],
    significance: float,
    epsilons: Sequence[float] = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
) -> float | None:
    """Where do exact intervals contradict the promise TPR <= e^eps FPR + delta(eps) most, if anywhere?

    curve gives the promised delta at any epsilon (infinite epsilon promises nothing). Both directions of the
    relation are tested. One interval per rate serves every epsilon, so no further correction is due."""
    tp, included, fp, excluded = seen
    false_positive = float(upper_rate(fp, excluded, significance / 2))
    false_negative = float(upper_rate(included - tp, included, significance / 2))
    worst, where = 0.0, None
    for epsilon in epsilons:
        promised = curve(epsilon)
        for one, other in ((false_positive, false_negative), (false_negative, false_positive)):
            excess = (1 - other) - (math.exp(epsilon) * one + promised)
            if excess > worst:
                worst, where = excess, epsilon
    return where


# "promise holds" is said only where a twofold violation would be called broken even if both groups of canaries came out
# less telling than one time in 20 each. Both together: it escapes with a probability of about 1% (normal approximation).
UNLUCKY = 0.05


def double_epsilon(canaries: int, epsilon: float) -> Counts:
    """Counts of randomised response with twice the epsilon, in an unlucky draw."""
    half = canaries // 2
    right = int(scipy.stats.binom.ppf(UNLUCKY, half, expit(2 * epsilon)))
    return right, half, half - right, half


def half_noise(scores: Scores, threshold: float) -> Counts:
    """Counts that these canaries would give under half the noise, in an unlucky draw.

    Scores are in units of the promised noise. The signal is taken from the scores themselves: the mean of the included
    ones, and what they vary more than the excluded ones. So a canary whose signal was lost on the way tells nothing,
    and a run that really has half the noise is compared with itself."""
    inside, outside = scores.included, scores.excluded
    noise, extra = float(outside.std()), max(0.0, float(inside.var() - outside.var()))
    quiet = 0.5 * (outside - outside.mean()) / (noise or 1.0)
    shrink = math.sqrt((extra + 0.25) / max(float(inside.var()), 1e-30))
    found = inside.mean() + (inside - inside.mean()) * shrink
    hits = scipy.stats.binom.ppf(UNLUCKY, len(inside), float((found >= threshold).mean()))
    alarms = scipy.stats.binom.ppf(1 - UNLUCKY, len(outside), float((quiet >= threshold).mean()))
    return int(hits), len(inside), int(alarms), len(outside)


# --- the verdict ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Audit:
    """What the canaries showed beside what was promised."""

    epsilon_lower: float
    epsilon_promised: float | None
    delta: float
    ceiling: float
    verdict: Verdict
    status: str  # of the promise: sound, nominal, none
    bounds: dict[str, float]
    canaries: int
    significance: float
    threshold: float
    reason: str

    @property
    def exit_code(self) -> int:
        """1 only when a sound promise is broken."""
        return int(self.verdict == "promise broken" and self.status == "sound")


def judge(
    scores: Scores,
    *,
    epsilon_promised: float | None,
    delta: float,
    threshold: float,
    status: str = "sound",
    curve: Callable[[float], float] | None = None,
    independent: bool = False,
    gaussian: bool = True,
    reports: bool = False,
    significance: float = 0.05,
) -> Audit:
    """Bounds at a threshold that was fixed in advance, and the verdict.

    independent: canaries cannot influence each other's scores (own coordinates, own noise); then the exact
    interval, the Gaussian route and the promised curve take part, otherwise only the one-run bounds. The level
    is split evenly between the tests that may accuse. gaussian: the mechanism's trade-off curve is no worse than a
    Gaussian one (false for Laplace, Staircase, randomised response), so that the bounds that assume it may accuse.
    reports: scores are bits of randomised response, not a signal in noise of promised deviation 1.

    "promise holds" is said only if a twofold violation (half the noise; twice the epsilon for reports) would have been
    called broken by the same tests (see UNLUCKY); if not, "not enough evidence".
    """
    tests: dict[str, Bound] = {"one_run": one_run_bound(delta)}
    if gaussian:
        tests["one_run_fdp"] = one_run_bound(delta, fdp=True)
    if independent:
        tests["clopper_pearson"] = clopper_pearson_bound(delta)
    if independent and gaussian:
        tests["gaussian"] = gaussian_bound(delta)
    tested = curve if independent else None
    level = significance / (len(tests) + (tested is not None))

    def bounds_of(seen: Counts) -> dict[str, float]:
        return {name: test(*seen, level, 0.0) for name, test in tests.items()}

    def refuted(seen: Counts, promised: float) -> bool:
        curved = tested is not None and against_curve(seen, tested, level) is not None
        return curved or max(bounds_of(seen).values()) > promised

    seen = counts_at(scores, threshold)
    bounds = bounds_of(seen)
    lower = max(bounds.values())
    most = ceiling(scores.canaries, delta, level)
    if independent:
        half = min(len(scores.included), len(scores.excluded))
        best = gaussian_bound(delta) if gaussian else clopper_pearson_bound(delta)
        most = max(most, best(half, half, 0, half, level, 0.0))
    reason = f"lower bound {lower:.3g} at {100 * (1 - significance):g}% confidence"
    if epsilon_promised is None or not math.isfinite(epsilon_promised):
        reason += "; nothing finite is promised here"
        return Audit(lower, None, delta, most, "not enough evidence", status, bounds, scores.canaries,
                     significance, threshold, reason)  # fmt: skip
    verdict: Verdict = "promise broken"
    worse = double_epsilon(scores.canaries, epsilon_promised) if reports else half_noise(scores, threshold)
    if refuted(seen, epsilon_promised):
        where = against_curve(seen, tested, level) if tested is not None else None
        reason += f"; the promised curve is contradicted at epsilon {where:g}" if where is not None else ""
    elif not reports and scores.excluded.std() > 1 + 6 / math.sqrt(len(scores.excluded)):
        verdict = "not enough evidence"
        reason += f", promised {epsilon_promised:.3g}: the scores vary more than the promised noise explains"
    elif refuted(worse, epsilon_promised):
        verdict = "promise holds"
        reason += f", promised {epsilon_promised:.3g}, {scores.canaries} canaries could show up to {most:.3g}"
    else:
        verdict = "not enough evidence"
        violation = "twice that" if reports else "half the noise"
        reason += f", promised {epsilon_promised:.3g}: {violation} could not be told from it by {scores.canaries} canaries"
    return Audit(lower, epsilon_promised, delta, most, verdict, status, bounds, scores.canaries, significance,
                 threshold, reason)  # fmt: skip
