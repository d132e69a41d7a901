"""Helpers of UDP-FL and its baselines: heterogeneity penalty, expected noise errors, NbAFL, DP-FedAvg."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.integrate import trapezoid
from scipy.special import gammaln, logsumexp

from fedveil.errors import UserError

Mechanism = Literal["gaussian", "laplace", "staircase", "joint-staircase"]


# --- clients with different budgets ---


def penalty(epsilon: float, weakest: float) -> float:
    """lambda_k = (epsilon_max - epsilon_k) / epsilon_max for `LocalPlan.penalty`.

    weakest: epsilon_max, the budget of the client whose model w_max is. Whoever has as weak a budget or a weaker one gets 0.
    An infinite budget (no privacy) is the weakest there is: everyone with a finite one then gets 1.
    """
    if not min(epsilon, weakest) > 0:
        raise UserError(f"a client has epsilon {min(epsilon, weakest)}; budgets must be above 0.")
    if epsilon >= weakest:
        return 0.0
    return 1.0 if math.isinf(weakest) else (weakest - epsilon) / weakest


# --- the closed form of a curve between a client's two models, as printed ---


def closed_form_bend(w: np.ndarray, v: np.ndarray, smoothness: float) -> np.ndarray:
    """theta* = 1.2 / L + 1.1 w - 0.1 v between a client's model w and its next iterate v. Nominal: as
    printed it adds the scalar 1.2 / L to every coordinate. By the paper's own argument (the mean step over
    r ~ U(0, 1) should be 1 / L) it would be 3 / L + 2 w - v; the printed one takes E r^n for 1 / n."""
    return 1.2 / smoothness + 1.1 * np.asarray(w) - 0.1 * np.asarray(v)


def closed_form_update(w: np.ndarray, v: np.ndarray, r: float, smoothness: float) -> np.ndarray:
    """The client-side Bezier update (1 - r)^2 v + 2 (r - r^2) theta* + r^2 w with r ~ U(0, 1) (Eq. 6 as printed).

    Formal guarantee: a function of w and v only, so where w is public and v already carries its noise nothing more is spent.
    """
    theta = closed_form_bend(w, v, smoothness)
    return (1 - r) ** 2 * np.asarray(v) + 2 * (r - r**2) * theta + r**2 * np.asarray(w)


# --- expected l1 error of the noise ---


@dataclass(frozen=True)
class L1Error:
    """Expected l1 distance that noise adds to `coordinates` numbers.

    once: one addition, coordinates * E|noise|. bound: `additions` times that (triangle inequality; what
    UDP-FL's Theorems 3, 8 and 9 count). sum: the exact value for a sum of independent additions, which grows
    with the square root of their number.
    """

    once: float
    bound: float
    sum: float


def expected_l1(
    mechanism: Mechanism,
    multiplier: float,
    bound: float,
    coordinates: int,
    additions: int = 1,
    nu: float | None = None,
) -> L1Error:
    """UDP-FL's Theorems 8 (Gaussian), 9 (Laplace) and 3 (Staircase), corrected.

    Noise scale as in `privacy.events.Noise`: Gaussian standard deviation multiplier * bound, Laplace scale
    multiplier * bound, Staircase lambda = 1 / multiplier with steps of width bound. Per coordinate
        Gaussian   E|X| = sigma * sqrt(2 / pi)        (Theorem 8 drops the factor T that its proof has)
        Laplace    E|X| = b
        Staircase  E|X| = (a D^2 (nu^2 + e^-lam (1 - nu^2)) + D e^-lam) / (1 - e^-lam),
                   a = (1 - e^-lam) / (2 D (nu + e^-lam (1 - nu)))       (Theorem 3 lacks the factor a)
    which at nu = 1 / (1 + e^(lam/2)) is D e^(lam/2) / (e^lam - 1). The joint l1 Staircase has
        E|X|_1 = D d/(d+1) * sum e^-k lam (k+nu)^(d+1) / sum e^-k lam (k+nu)^d;
    its exact sum is not known here, `sum` is then an upper bound by Cauchy-Schwarz.
    """
    if not (multiplier > 0 and bound > 0 and coordinates >= 1 and additions >= 1):
        raise ValueError("multiplier, bound, coordinates and additions must be positive")
    if mechanism == "gaussian":
        once = multiplier * bound * math.sqrt(2 / math.pi)
        total = once * math.sqrt(additions)
    elif mechanism == "laplace":
        once = multiplier * bound
        # A sum of T Laplace draws is the difference of two Gamma(T) ones.
        growth = math.exp(gammaln(additions + 0.5) - gammaln(additions))
        total = 2 * once * growth / math.sqrt(math.pi)
    elif mechanism == "staircase":
        lam = 1 / multiplier
        once = staircase_mean(lam, bound, nu)
        total = once if additions == 1 else _staircase_sum(lam, bound, _shape(lam, nu), additions)
    elif mechanism == "joint-staircase":
        first, second = _joint_moments(1 / multiplier, _shape(1 / multiplier, nu), coordinates)
        once = bound * first
        # |X|_1 <= sqrt(d) |X|_2; on the l1 sphere E|X|_2^2 = 2 r^2 / (d + 1); independent sums add variances.
        spread = bound * math.sqrt(coordinates * additions * 2 * second / (coordinates + 1))
        whole = once if additions == 1 else min(spread, additions * once)
        return L1Error(once, additions * once, whole)
    else:
        raise ValueError(f"unknown mechanism {mechanism!r}")
    return L1Error(coordinates * once, coordinates * additions * once, coordinates * total)


def extra_rounds(multiplier: float, bound: float, width: float = 1.0) -> float:
    """UDP-FL's Theorem 4: the order of the additional rounds under Staircase noise, D^2 e^lam / (e^lam - 1)^2 with D the
    step and lam its parameter: the square of E|X| at the best shape. Nominal: an order without its constant."""
    lam, step = width / multiplier, bound * width
    return (step * math.exp(lam / 2) / math.expm1(lam)) ** 2


def staircase_mean(lam: float, width: float, nu: float | None = None) -> float:
    """E|X| of scalar Staircase noise with steps of `width`; nu None is the optimal shape."""
    nu, b = _shape(lam, nu), math.exp(-lam)
    height = -math.expm1(-lam) / (2 * width * (nu + b * (1 - nu)))
    return (height * width**2 * (nu**2 + b * (1 - nu**2)) + width * b) / -math.expm1(-lam)


def _shape(lam: float, nu: float | None) -> float:
    return 1 / (1 + math.exp(min(lam / 2, 700.0))) if nu is None else nu


def _staircase_sum(lam: float, width: float, nu: float, additions: int) -> float:
    """E|X_1 + ... + X_T| = (2/pi) * integral of (1 - phi(t)^T) / t^2 over t > 0, phi the characteristic
    function."""
    b = math.exp(-lam)
    height = (1 - b) / (2 * (nu + b * (1 - nu)))
    # In units of `width`. phi is 1 - O(t^2) at 0 and O(1/t) far out; the tail of 1/t^2 is added exactly.
    scale = staircase_mean(lam, 1.0, nu) * math.sqrt(additions)
    t = np.geomspace(1e-4 / scale, 1e4 / min(1.0, staircase_mean(lam, 1.0, nu)), 400_000)
    step = np.exp(1j * t)
    inner = np.exp(1j * nu * t)
    phi = 2 * height * (((inner - 1) + b * (step - inner)) / (1j * t * (1 - b * step))).real
    integrand = (1 - np.sign(phi) ** additions * np.abs(phi) ** additions) / t**2
    body = float(trapezoid(integrand, t)) + float(integrand[0]) * t[0]  # flat below the first point
    found: float = width * 2 / math.pi * (body + 1 / t[-1])
    return found


def _joint_moments(lam: float, nu: float, dimension: int) -> tuple[float, float]:
    """E r and E r^2 of the radius r = |X|_1 / width: a mixture of uniform l1 balls of radius k + nu."""
    around = (40 + 20 * math.sqrt(dimension)) / lam + 50  # k concentrates around dimension / lam
    k = np.arange(max(0, int(dimension / lam - around)), int(dimension / lam + around))
    log_ball = -lam * k + dimension * np.log(k + nu)
    log_ball -= logsumexp(log_ball)
    first = dimension / (dimension + 1) * math.exp(logsumexp(log_ball + np.log(k + nu)))
    second = dimension / (dimension + 2) * math.exp(logsumexp(log_ball + 2 * np.log(k + nu)))
    return first, second


# --- baselines ---


def nbafl_scales(
    epsilon: float,
    delta: float,
    clip: float,
    examples: int,
    clients: int,
    rounds: int,
    exposures: int | None = None,
) -> tuple[float, float]:
    """NbAFL's noise standard deviations on each weight: (uplink, downlink).

        uplink   = c L (2 C / m) / epsilon,   c = sqrt(2 ln(1.25 / delta))
        downlink = 2 c C sqrt(T^2 - L^2 N) / (m N epsilon) if T > L sqrt(N), else 0

    clip C on the weights' norm, m = `examples` of the smallest client, N clients, T rounds, L = `exposures`:
    how often an upload of a client is seen (default: every round, so the downlink needs nothing).
    Multiplying by L instead of composing, and the classic Gaussian formula, are the paper's.

    Formal guarantee: none at example level: 2C/m is the sensitivity of a mean of clipped per-example models,
    not of SGD's result (nominal). examples = 1 gives sensitivity 2C, which is right for a whole client.
    """
    if not (0 < delta < 1 and epsilon > 0 and clip > 0 and min(examples, clients, rounds) >= 1):
        raise UserError(
            "nbafl: epsilon, clip > 0, 0 < delta < 1 and examples, clients, rounds >= 1 are needed."
        )
    seen = rounds if exposures is None else exposures
    factor = math.sqrt(2 * math.log(1.25 / delta)) * 2 * clip / (examples * epsilon)
    excess = rounds**2 - seen**2 * clients
    return factor * seen, factor * math.sqrt(excess) / clients if excess > 0 else 0.0
