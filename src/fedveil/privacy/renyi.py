"""Rényi divergences of one sampled release, as upper bounds at each order."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy import special

from fedveil.privacy.events import Noise
from fedveil.privacy.mechanisms import Array
from fedveil.privacy.vectors import vector_guarantee

_LARGE = (*range(11, 64), *range(64, 129, 8), *range(160, 257, 32), *range(320, 513, 64), 640, 768, 1024)
TODAY = (*(1 + x / 10 for x in range(1, 100)), *map(float, _LARGE))
_WITHOUT_REPLACEMENT = (*range(2, 21), *range(22, 63, 2), 80, 128, 512, 1024)
_QUARTERS = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5)
NARROW = 1e-2  # multipliers of Gaussian noise up to which broken orders are interpolated: a grid as fine as that has no end
MOMENTS = (*_QUARTERS, *map(float, range(5, 64)), 128.0, 256.0, 512.0)  # TensorFlow Privacy's grid


@lru_cache(maxsize=8192)
def plain(noise: Noise, orders: tuple[float, ...]) -> Array:
    """Without sampling: see `vectors.vector_guarantee`."""
    return vector_guarantee(noise).renyi(np.array(orders))


@lru_cache(maxsize=8192)
def poisson(noise: Noise, rate: float, orders: tuple[float, ...]) -> Array:
    """Presence decided by an independent coin of `rate` (zero-out or add-remove neighbours).

    Formal guarantee: at integer orders the moment of ((1-q)Q + qP, Q) is a binomial sum of moments of (P, Q).
    The other direction is never larger, because a reflection swaps P and Q (docs/accountants.md). Between
    integers Gaussian noise is integrated; other noises use the convexity of the log moment in the order.
    """
    wanted = np.array(orders)
    whole = np.unique(np.concatenate([np.floor(wanted), np.ceil(wanted)])).astype(int)
    logs = _integer_log_moments(noise, rate, [int(a) for a in whole])
    result = np.array([np.interp(a, whole, logs) for a in wanted])
    if noise.mechanism == "gaussian" and noise.multiplier > NARROW:
        broken = wanted != np.floor(wanted)
        result[broken] = [_gaussian_log_moment(noise.multiplier, rate, a) for a in wanted[broken]]
    found: np.ndarray = result / (wanted - 1)
    return found


def _integer_log_moments(noise: Noise, rate: float, orders: list[int]) -> Array:
    """log E_Q[((1-q) + q P/Q)^a]; the terms l = 0, 1 cancel against 1, which keeps tiny rates exact."""
    top = max(orders)
    if top < 2:
        return np.zeros(len(orders))
    powers = np.arange(2, top + 1)
    rise = (powers - 1) * vector_guarantee(noise).renyi(powers.astype(float))
    gain = np.where(
        rise > 30, rise + np.log1p(-np.exp(-np.maximum(rise, 30))), np.log(np.expm1(np.minimum(rise, 30)))
    )
    factorials = special.gammaln(np.arange(top + 1) + 1)
    weight = gain + powers * (math.log(rate) - math.log1p(-rate)) - factorials[2:]
    result = np.zeros(len(orders))
    for i, a in enumerate(orders):
        if a >= 2:
            terms = factorials[a] + a * math.log1p(-rate) + weight[: a - 1] - factorials[a - 2 :: -1][: a - 1]
            most = float(np.max(terms))
            result[i] = np.logaddexp(0.0, most + math.log(np.exp(terms - most).sum()))
    return result


def _gaussian_log_moment(sigma: float, rate: float, order: float) -> float:
    """The same moment at a broken order, by the trapezoid rule (spectrally accurate for this integrand)."""
    spacing = sigma / 24
    z = np.arange(-10 * sigma, order + 10 * sigma + spacing, spacing)
    unit = spacing / (sigma * math.sqrt(2 * math.pi))
    weight = np.exp(-0.5 * (z / sigma) ** 2) * unit
    loss = (2 * z - 1) / (2 * sigma**2)
    near = np.minimum(loss, 500)
    change = np.where(loss < 500, np.log1p(rate * np.expm1(near)), loss + math.log(rate))
    with np.errstate(over="ignore", invalid="ignore"):
        excess = weight @ (np.expm1(order * change) - order * rate * np.expm1(loss))
    if np.isfinite(excess) and excess < 1:
        return math.log1p(max(float(excess), 0.0))
    return float(special.logsumexp(-0.5 * (z / sigma) ** 2 + order * change) + math.log(unit))


@lru_cache(maxsize=512)
def fixed_size(multiplier: float, batch: int, population: int, orders: tuple[float, ...]) -> Array:
    """Gaussian noise on a batch of fixed size drawn without replacement; replace-one neighbours, whose change
    of the sum is the unit of `multiplier`. The bound of Wang, Balle and Kasiviswanathan as in dp-accounting, at
    some orders (it is slow); in between the log moment is convex in the order, so a chord bounds it."""
    import dp_accounting  # slow to load
    from dp_accounting.rdp import rdp_privacy_accountant

    knots = [1, *_WITHOUT_REPLACEMENT]
    judge = rdp_privacy_accountant.RdpAccountant(
        list(_WITHOUT_REPLACEMENT), dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    step = dp_accounting.GaussianDpEvent(multiplier)
    judge.compose(dp_accounting.SampledWithoutReplacementDpEvent(population, batch, step))
    logs = np.append(0.0, np.array(judge.rdp) * (np.array(_WITHOUT_REPLACEMENT) - 1))
    wanted = np.array(orders)
    found: np.ndarray = np.interp(wanted, knots, logs) / (wanted - 1)
    return found


def to_epsilon(orders: tuple[float, ...], divergences: Array, delta: float) -> float:
    """Today's conversion (Canonne-Kamath-Steinke), as in dp-accounting."""
    from dp_accounting.rdp import rdp_privacy_accountant  # slow to load

    return float(rdp_privacy_accountant.compute_epsilon(list(orders), list(divergences), delta)[0])
