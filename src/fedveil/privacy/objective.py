"""Objective perturbation of a generalised linear model: what a random linear term in the objective hides.

    minimise over θ:   Σ loss(xᵢ·θ, yᵢ) + ridge/2 |θ|² + b·θ,      b ~ N(0, deviation² I)

Let every |xᵢ| <= length, the loss be convex in its first argument with slope in [-1, 1] and second derivative in [0, smooth]. The
minimiser θ and b determine each other, b = -Σ∇lossᵢ(θ) - ridge θ. One row z = (x, y) more changes b by g = slope · x, and the
Jacobian by a matrix of rank one, whose effect on its determinant is a factor between 1 and 1 + smooth length² / ridge. With
b·x normal whatever θ is, the privacy loss is at most a |Z| + c in either direction, with Z standard normal,
a = length / deviation and c = a² / 2 + log(1 + smooth length² / ridge). Hence

    δ(ε) = E[(1 - exp(ε - a|Z| - c))₊] = 2 (Φ(-t) - exp(ε - c + a²/2) Φ(-t - a)),    t = (ε - c) / a >= 0.

Formal guarantee: (ε, δ(ε))-DP for adding or removing one row, for the exact minimiser and a continuous b. What a computer finds
is neither, so a release that counts on this is `nominal`.
"""

from __future__ import annotations

import math

from scipy.special import log_ndtr, ndtr

from fedveil.errors import UserError


def delta_of(epsilon: float, deviation: float, ridge: float, *, length: float, smooth: float = 0.25) -> float:
    """δ at `epsilon`; smooth: 1/4 for the logistic loss."""
    a = length / deviation
    c = a * a / 2 + math.log1p(smooth * length**2 / ridge)
    t = max(0.0, (epsilon - c) / a)
    within = math.exp(min(0.0, epsilon - c + a * a / 2 + float(log_ndtr(-t - a))))
    return min(1.0, max(0.0, 2 * (float(ndtr(-t)) - within)))


def ridge_for(epsilon: float, *, length: float, smooth: float = 0.25, share: float = 0.1) -> float:
    """The ridge whose part of the loss is this share of ε."""
    return smooth * length**2 / math.expm1(share * epsilon)


def deviation_for(epsilon: float, delta: float, ridge: float, *, length: float, smooth: float = 0.25) -> float:
    """The smallest deviation of b (to 1e-9 of it) that keeps (ε, δ); UserError where the ridge alone spends ε."""
    if not math.log1p(smooth * length**2 / ridge) < epsilon:
        least = smooth * length**2 / math.expm1(epsilon)
        raise UserError(f"ridge = {ridge:g} alone spends epsilon = {epsilon:g}: it must be above {least:.4g}")
    low, high = 0.0, length
    while delta_of(epsilon, high, ridge, length=length, smooth=smooth) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(epsilon, middle, ridge, length=length, smooth=smooth) <= delta else (middle, high)
    return high


def gaussian_like(epsilon: float, delta: float) -> float:
    """The multiplier of the Gaussian mechanism that has this ε at this δ (no less), to 1e-9 of it."""

    def at(multiplier: float) -> float:
        half = 1 / (2 * multiplier)
        return float(ndtr(half - epsilon * multiplier)) - math.exp(epsilon + float(log_ndtr(-half - epsilon * multiplier)))

    low, high = 1e-6, 1.0
    while at(high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle) <= delta else (middle, high)
    return low
