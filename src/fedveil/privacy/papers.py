"""Published numbers as they were computed, errors included. Nothing here is a guarantee."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from fedveil.privacy import formulas, renyi
from fedveil.privacy.events import Noise
from fedveil.privacy.mechanisms import Array, best_nu


def condition_holds(rate: float, sigma: float) -> bool:
    """The papers' own condition for their moments accountant, q < 1/(16 sigma)."""
    return rate < 1 / (16 * sigma)


def condition_words(rate: float, sigma: float) -> str:
    """What to say where the papers' own condition fails; else ""."""
    if condition_holds(rate, sigma):
        return ""
    return "the papers' own condition q < 1/(16 sigma) fails (the accountant does not need it)"


def step_epsilon(sigma: float, rate: float, delta: float, digits: int | None = None) -> float:
    """Amplified epsilon of one step; the tables round the unamplified one to `digits` = 3."""
    plain = float(formulas.classic_epsilon(sigma, delta))
    return float(formulas.amplified(plain if digits is None else round(plain, digits), rate))


def table_epsilon(name: str, sigma: float, rate: float, steps: int, delta: float) -> float:
    """A table's entry: BaseC and AdvC with the rounded step epsilon, OptC, zCDP and MA without rounding."""
    if name == "base":
        return steps * step_epsilon(sigma, rate, delta, 3)
    if name == "advanced":
        return formulas.advanced([step_epsilon(sigma, rate, delta, 3)], [steps], delta)
    if name == "advanced-printed":
        return formulas.advanced_tanh([step_epsilon(sigma, rate, delta)], [steps], delta)
    if name == "optimal":
        return formulas.optimal([step_epsilon(sigma, rate, delta)], [steps], delta)
    if name == "zcdp":
        return formulas.concentrated(steps * (rate / sigma) ** 2, delta)
    divergences = steps * renyi.poisson(Noise("gaussian", sigma), rate, renyi.MOMENTS)
    return formulas.old_conversion(renyi.MOMENTS, divergences, delta)


def spent(name: str, sigmas: Array, rate: float, delta: float) -> Array:
    """Epsilon after each of the steps with noise `sigmas`, by a table's formula (advanced: the tanh form)."""
    steps = formulas.amplified(formulas.classic_epsilon(sigmas, delta), rate)
    square = np.cumsum(steps**2)
    drift = np.cumsum(steps * np.tanh(steps / 2))
    if name == "base":
        return np.cumsum(steps)
    if name == "advanced":
        return drift + np.sqrt(-2 * math.log(delta) * square)
    if name == "optimal":
        return drift + np.sqrt(2 * square * np.log(math.e + np.sqrt(square) / delta))
    if name == "zcdp":
        rho = np.cumsum((rate / sigmas) ** 2)
        made: np.ndarray = rho + 2 * np.sqrt(-rho * math.log(delta))
        return made
    orders = np.arange(2, 64)
    totals = [np.cumsum(_moment(sigmas, rate, int(a))) - math.log(delta) for a in orders]
    made = (np.array(totals) / (orders - 1)[:, None]).min(axis=0)
    return made


def _moment(sigmas: Array, rate: float, order: int) -> Array:
    """Log moment of one sampled Gaussian step at an integer order, for many sigmas at once."""
    k = np.arange(2, order + 1)
    chance = special.binom(order, k) * rate**k * (1 - rate) ** (order - k)
    made: np.ndarray = np.log1p(np.expm1(k * (k - 1) / (2 * np.asarray(sigmas)[:, None] ** 2)) @ chance)
    return made


def first_over(name: str, sigmas: Array, rate: float, delta: float, budget: float) -> int | None:
    """The first step (counted from 1) whose total exceeds `budget`."""
    over = np.flatnonzero(spent(name, sigmas, rate, delta) > budget)
    return int(over[0]) + 1 if len(over) else None


def staircase_theorem(lam: float, order: float, nu: float | None = None) -> float:
    """The Rényi divergence of Staircase noise as printed for UDP-FL: a moment with a swapped case, without
    logarithm and 1/(order - 1)."""
    nu = best_nu(lam) if nu is None else nu
    b = math.exp(-lam)
    peak = (1 - math.exp(-1)) / (2 * (nu + b * (1 - nu)))
    ends = math.exp((order - 1) * lam) + math.exp(-order * lam)
    return ends / 2 + peak * ((1 - nu) * ends + abs(2 * nu - 1) * (1.0 if nu < 0.5 else b))


def released_staircase_epsilon(lam: float, nu: float = 0.5) -> float:
    """True pure epsilon of the released Staircase sampler, whose geometric variable starts at -1: magnitudes
    then fold over 0 and the steps no longer fall evenly."""
    b = math.exp(-lam)
    inner = nu / (nu + (1 - nu) * b)
    x = np.linspace(0, 4, 8001)[:-1] + 2.5e-4
    density = np.zeros_like(x)
    for g in range(-1, 60):
        weight = (1 - b) * b ** (g + 1)
        for sign in (1, -1):
            y = sign * x - g
            density += weight * np.where((y >= 0) & (y < nu), inner / nu, 0.0)
            density += weight * np.where((y >= nu) & (y < 1), (1 - inner) / (1 - nu), 0.0)
    levels = [float(np.log(density[np.searchsorted(x, at)])) for at in np.arange(0.25, 3.5, 0.5)]
    return max(abs(u - v) for i, u in enumerate(levels) for v in levels[i : i + 3])
