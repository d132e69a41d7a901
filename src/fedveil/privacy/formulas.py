"""Closed formulas of composition and conversion, one function each; the accountants decide what they are worth."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from fedveil.privacy.mechanisms import Array


def classic_epsilon(sigma: ArrayLike, delta: float) -> Array:
    """sqrt(2 ln(1.25/delta))/sigma. A theorem only where the result is below 1."""
    return math.sqrt(2 * math.log(1.25 / delta)) / np.asarray(sigma, float)


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """The exact delta of one Gaussian release of sensitivity 1."""
    a, b = 0.5 / sigma - epsilon * sigma, -0.5 / sigma - epsilon * sigma
    return float(special.ndtr(a) - np.exp(epsilon + special.log_ndtr(b)))


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """The exact epsilon of one Gaussian release of sensitivity 1."""
    if gaussian_delta(sigma, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(sigma, high) > delta:
        high *= 2
    from scipy import optimize  # slow to load, and most commands do not come here

    return float(
        optimize.brentq(lambda e: gaussian_delta(sigma, e) - delta, 0.0, high, xtol=1e-13, rtol=1e-13)
    )


def amplified(epsilon: ArrayLike, rate: ArrayLike) -> Array:
    """ln(1 + q(e^epsilon - 1)): a step that includes the unit with probability q (its delta becomes q delta)."""
    epsilon, rate = np.asarray(epsilon, float), np.asarray(rate, float)
    near = np.log1p(rate * np.expm1(np.minimum(epsilon, 500)))
    found: np.ndarray = np.where(epsilon < 500, near, epsilon + np.log(np.maximum(rate, 1e-300)))
    return found


def basic(epsilons: ArrayLike, counts: ArrayLike) -> float:
    """Sum of the epsilons."""
    return float(np.dot(epsilons, counts))


def advanced(epsilons: ArrayLike, counts: ArrayLike, slack: float) -> float:
    """Dwork-Rothblum-Vadhan: sqrt(2 ln(1/slack) sum e^2) + sum e(exp(e) - 1)."""
    e, n = np.asarray(epsilons, float), np.asarray(counts, float)
    with np.errstate(over="ignore"):
        return float(math.sqrt(-2 * math.log(slack) * np.dot(n, e * e)) + np.dot(n, e * np.expm1(e)))


def advanced_tanh(epsilons: ArrayLike, counts: ArrayLike, slack: float) -> float:
    """The sharper mean of advanced composition: sum e tanh(e/2) + sqrt(2 ln(1/slack) sum e^2)."""
    e, n = np.asarray(epsilons, float), np.asarray(counts, float)
    return float(np.dot(n, e * np.tanh(e / 2)) + math.sqrt(-2 * math.log(slack) * np.dot(n, e * e)))


def optimal(epsilons: ArrayLike, counts: ArrayLike, slack: float) -> float:
    """Kairouz-Oh-Viswanath: sum e tanh(e/2) + sqrt(2 S ln(exp(1) + sqrt(S)/slack)), S = sum e^2."""
    e, n = np.asarray(epsilons, float), np.asarray(counts, float)
    square = float(np.dot(n, e * e))
    tail = math.sqrt(2 * square * math.log(math.e + math.sqrt(square) / slack))
    return float(np.dot(n, e * np.tanh(e / 2)) + tail)


def concentrated(rho: float, delta: float) -> float:
    """From rho-zCDP to epsilon: rho + 2 sqrt(rho ln(1/delta))."""
    return rho + 2 * math.sqrt(-rho * math.log(delta))


def old_conversion(orders: ArrayLike, divergences: ArrayLike, delta: float) -> float:
    """Mironov's first conversion: min over orders of rdp + ln(1/delta)/(order - 1)."""
    return float(np.min(np.asarray(divergences) - math.log(delta) / (np.asarray(orders) - 1)))


def group(epsilon: float, delta: float, size: int) -> tuple[float, float]:
    """(epsilon, delta) of a group of `size` units; a delta of 1 or more promises nothing."""
    if delta == 0:
        return size * epsilon, 0.0
    log = math.log(size * delta) + (size - 1) * epsilon
    return size * epsilon, math.exp(log) if log < 700 else math.inf
