"""How much an audit could find, said before it is made: power, and how many canaries or rounds it takes.

A violation by a factor f: the run adds 1/f of the promised noise, or (`of` = "contribution") lets a record add f times what was
promised, by a wrong sampling rate or a clip that does not hold. Scores are in units of the promised noise; an included canary's
signal follows from the promise (bound, sampling, rounds). With too little noise scores of both groups have deviation 1/f, with
too large a contribution the included ones lie f times as far out, so the counts at the threshold are binomial, and the
probability that the audit's own tests call such counts broken is computed, not hoped for. `spread` is the deviation that sampling
adds to included canaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy
from scipy.special import ndtr

from fedveil.attacks.audit.bounds import (
    Bound,
    against_curve,
    clopper_pearson_bound,
    gaussian_bound,
    one_run_bound,
)
from fedveil.errors import UserError

MOST = 200_000  # canaries that a plan goes up to
Of = Literal["noise", "contribution"]


@dataclass(frozen=True)
class Plan:
    """What is needed to find a violation by `factor` with probability `wanted`."""

    canaries: int | None  # None: not with any number up to MOST
    power: float
    wanted: float
    factor: float
    signal: float  # of an included canary, in units of the promised noise
    rounds: int
    epsilon_promised: float
    significance: float
    sentence: str
    of: Of = "noise"


def _rates(signal: float, factor: float, of: Of, spread: float) -> tuple[float, float]:
    """Chances that an included and an excluded canary lie above the threshold (half the promised signal)."""
    if of == "noise":
        return float(ndtr(signal / 2 / math.hypot(1 / factor, spread))), float(ndtr(-signal / 2 * factor))
    return float(ndtr((factor - 0.5) * signal / math.hypot(1, factor * spread))), float(ndtr(-signal / 2))


def accuse(
    tp: int, fp: int, half: int, promised: float, curve: Callable[[float], float] | None, delta: float, significance: float
) -> bool:  # fmt: skip
    """Would `bounds.judge` (independent Gaussian scores, fixed threshold) call these counts broken?"""
    tests: list[Bound] = [
        one_run_bound(delta), one_run_bound(delta, fdp=True), clopper_pearson_bound(delta), gaussian_bound(delta),
    ]  # fmt: skip
    level = significance / (len(tests) + (curve is not None))
    seen = (tp, half, fp, half)
    if curve is not None and against_curve(seen, curve, level) is not None:
        return True
    # The exact interval and the Gaussian route dominate when scores are independent; the one-run tests cost time.
    return max(tests[3](*seen, level, 0.0), tests[2](*seen, level, 0.0)) > promised


def power(
    canaries: int, signal: float, promised: float, *, curve: Callable[[float], float] | None = None, delta: float = 1e-5,
    factor: float = 2.0, significance: float = 0.05, of: Of = "noise", spread: float = 0.0, draws: int = 400,
    seed: int = 0,
) -> float:  # fmt: skip
    """Probability that canaries with this signal betray a promise that is broken by `factor`.

    By simulation of the two counts; the one-run tests are left out, so this is a lower bound (up to the error of `draws`: a
    standard deviation of at most 0.025)."""
    half = max(1, canaries // 2)
    found, alarm = _rates(signal, factor, of, spread)
    rng = np.random.default_rng(seed)
    pairs = np.stack([rng.binomial(half, found, draws), rng.binomial(half, alarm, draws)], 1)
    unique, counts = np.unique(pairs, axis=0, return_counts=True)
    called = [accuse(int(tp), int(fp), half, promised, curve, delta, significance) for tp, fp in unique]
    return float(counts[np.array(called)].sum() / draws) if any(called) else 0.0


def surely(
    canaries: int, signal: float, promised: float, *, curve: Callable[[float], float] | None = None, delta: float = 1e-5,
    factor: float = 2.0, significance: float = 0.05, wanted: float = 0.99, of: Of = "noise", spread: float = 0.0,
) -> bool:  # fmt: skip
    """Is the power at least `wanted`? Both counts at their unlucky quantiles (half of 1 - wanted each) must still accuse."""
    half, tail = max(1, canaries // 2), (1 - wanted) / 2
    found, alarm = _rates(signal, factor, of, spread)
    tp, fp = int(scipy.stats.binom.ppf(tail, half, found)), int(scipy.stats.binom.ppf(1 - tail, half, alarm))
    return accuse(tp, fp, half, promised, curve, delta, significance)


def plan(
    signal: float, promised: float, rounds: int, *, curve: Callable[[float], float] | None = None, delta: float = 1e-5,
    factor: float = 2.0, significance: float = 0.05, wanted: float = 0.99, of: Of = "noise", spread: float = 0.0,
) -> Plan:  # fmt: skip
    """The smallest number of canaries with which a violation by `factor` is found with probability `wanted`."""
    if not (promised > 0 and math.isfinite(promised)):
        raise UserError("an audit can only be planned for a finite promise.")
    settings = {
        "curve": curve,
        "delta": delta,
        "factor": factor,
        "significance": significance,
        "wanted": wanted,
        "of": of,
        "spread": spread,
    }
    low, high = 2, 64
    while high <= MOST and not surely(high, signal, promised, **settings):  # type: ignore[arg-type]
        low, high = high, 2 * high
    if high > MOST:
        words = (
            f"With one canary's signal of {signal:.3g} deviations no number of canaries up to {MOST:,} finds {_WRONG[of]} "
            f"by a factor of {factor:g} with {100 * wanted:g}%: replay more rounds."
        )
        return Plan(None, 0.0, wanted, factor, signal, rounds, promised, significance, words, of)
    while high - low > max(2, low // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if surely(middle, signal, promised, **settings) else (middle, high)  # type: ignore[arg-type]
    got = power(high, signal, promised, **{k: v for k, v in settings.items() if k != "wanted"})  # type: ignore[arg-type]
    words = (
        f"With {high:,} canaries and {rounds} rounds {_WRONG[of]} by a factor of {factor:g} would be found in at least "
        f"{100 * wanted:g}% of all audits, at {100 * significance:g}% false alarms."
    )
    return Plan(high, got, wanted, factor, signal, rounds, promised, significance, words, of)


_WRONG: dict[Of, str] = {
    "noise": "too little noise",
    "contribution": "too large a contribution of one record",
}
