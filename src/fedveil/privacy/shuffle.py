"""Amplification by shuffling, for reports that are purely LDP; refused for everything else.

`shuffled` is exact for binary randomised response (the worst case over every number of ones among the other
reports) and uses the clones bound of Feldman, McMillan and Talwar (2021) for other pure-LDP reports. The two
published Rényi lemmas are kept as nominal formulas: the upper one is false at large orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import special

from fedveil.privacy import checks
from fedveil.privacy.accountants import Answer, answer
from fedveil.privacy.events import Event, Noise
from fedveil.privacy.mechanisms import Array

MOST_EXACT = 4000  # beyond this many reports the exact scan is replaced by the clones bound


def _root(function: Callable[[float], float], low: float, high: float, xtol: float) -> float:
    from scipy import optimize  # slow to load, and most commands do not come here

    return float(optimize.brentq(function, low, high, xtol=xtol))


def _binomial(n: int, p: float) -> Array:
    k = np.arange(n + 1)
    logs = special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
    made: np.ndarray = np.exp(logs + special.xlogy(k, p) + special.xlog1py(n - k, -p))
    return made


def _counts(epsilon0: float, clients: int, ones: int) -> tuple[Array, Array]:
    """Law of the number of reported ones if the target's bit is 1 and if it is 0; `ones` others hold a 1."""
    keep = float(special.expit(epsilon0))
    truthful, lying = _binomial(ones, keep), _binomial(clients - 1 - ones, 1 - keep)
    if clients <= 300:
        others = np.convolve(truthful, lying)
    else:
        from scipy import signal  # slow to load

        others = np.maximum(signal.fftconvolve(truthful, lying), 0)
    with_one = np.append(0.0, others)
    without = np.append(others, 0.0)
    return keep * with_one + (1 - keep) * without, (1 - keep) * with_one + keep * without


def _hockey(p: Array, q: Array, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def binary_epsilon(epsilon0: float, clients: int, delta: float) -> float:
    """Exact epsilon of shuffled binary randomised response.

    Formal guarantee: holds for any inputs of the other clients. Values between the two extremes (as in LDP-FL)
    are mixtures of them, and hockey-stick divergences are jointly convex, so extremes are the worst case; all
    numbers of ones are scanned. Swapping 0 and 1 covers the other direction.
    """
    worst = 0.0
    for ones in range(clients):
        p, q = _counts(epsilon0, clients, ones)
        if _hockey(p, q, worst) > delta and worst < epsilon0:
            if _hockey(p, q, epsilon0) >= delta:
                return epsilon0
            excess = partial(_excess, p, q, delta)
            worst = float(_root(excess, worst, epsilon0, xtol=1e-12))
    return worst


def _excess(p: np.ndarray, q: np.ndarray, delta: float, epsilon: float) -> float:
    return _hockey(p, q, epsilon) - delta


def binary_renyi(epsilon0: float, clients: int, order: float) -> float:
    """Exact Rényi divergence of shuffled binary randomised response: worst number of ones, both directions."""
    worst = 0.0
    for ones in range(clients):
        p, q = _counts(epsilon0, clients, ones)
        usable = (p > 1e-290) & (q > 1e-290)
        log_p, log_q = np.log(p[usable]), np.log(q[usable])
        worst = max(worst, float(special.logsumexp(order * log_p + (1 - order) * log_q)) / (order - 1))
    return worst


def _clones_delta(epsilon0: float, clients: int, epsilon: float) -> float:
    """Hockey-stick divergence of the clones pair at `epsilon`."""
    keep = float(special.expit(epsilon0))
    chance = _binomial(clients - 1, math.exp(-epsilon0))
    used = np.flatnonzero(chance > 1e-30)
    c, chance = used.astype(float), chance[used]
    gain = keep - math.exp(epsilon) * (1 - keep)
    loss = math.exp(epsilon) * keep - (1 - keep)
    if gain <= 0:
        return 0.0
    first = np.floor((c + 1) * loss / (gain + loss)) + 1  # the outcomes that favour the first neighbour
    upper = _half_tail(first - 1, c)
    lower = _half_tail(first, c)
    return float(chance @ np.maximum(gain * upper - loss * lower, 0) + max(0.0, 1 - chance.sum()))


def _half_tail(k: Array, n: Array) -> Array:
    """P(Bin(n, 1/2) >= k)."""
    inside = special.betainc(np.maximum(k, 1), np.maximum(n - k + 1, 1e-9), 0.5)
    return np.where(k <= 0, 1.0, np.where(k > n, 0.0, inside))


def clones_epsilon(epsilon0: float, clients: int, delta: float) -> float:
    """Upper bound for any epsilon0-LDP report, shuffled among `clients` (Feldman-McMillan-Talwar 2021)."""
    if _clones_delta(epsilon0, clients, 0.0) <= delta:
        return 0.0
    if _clones_delta(epsilon0, clients, epsilon0 * (1 - 1e-12)) >= delta:
        return epsilon0
    return float(_root(lambda e: _clones_delta(epsilon0, clients, e) - delta, 0.0, epsilon0, xtol=1e-12))


def shuffled(epsilon0: float, clients: int, delta: float, *, binary: bool = False) -> Answer:
    """One report of each of `clients`, shuffled: epsilon at delta for one changed report.

    binary: the report is a binary randomised response (LDP-FL's two values).
    """
    epsilon0, delta = checks.positive("epsilon", epsilon0), checks.delta(delta)
    clients = checks.count("clients", clients, 1)
    if delta == 0 or clients == 1:
        return Answer("shuffle", epsilon0, 0.0, "sound", "without a delta, or alone, shuffling adds nothing")
    exact = binary and clients <= MOST_EXACT
    value = min((binary_epsilon if exact else clones_epsilon)(epsilon0, clients, delta), epsilon0)
    why = (
        "exact for binary reports, over all numbers of ones"
        if exact
        else "clones bound for any pure-LDP report"
    )
    if value > 0.99 * epsilon0:
        why += "; shuffling adds next to nothing here"
    return Answer("shuffle", value, delta, "sound", why + "; needs a trusted shuffler and unlinkable reports")


def shuffled_noise(noise: Noise, clients: int, delta: float) -> Answer:
    """Amplification for a client's noised report: only if the noise is purely LDP."""
    delta = checks.delta(delta)
    pure = answer([Event(noise)], 0.0, "basic").epsilon
    if pure is None:
        why = f"shuffling amplifies pure LDP reports only; {noise.mechanism} noise has no pure epsilon"
        return Answer("shuffle", None, delta, "none", why)
    return shuffled(pure, clients, delta, binary=noise.mechanism == "two-valued" and noise.dimension == 1)


def lemma_upper(epsilon0: float, clients: int, order: float) -> Answer:
    """UDP-FL's Lemma 2, a Rényi "upper bound" of the shuffled report. Nominal: it falls to 0 as the order grows,
    while the truth rises to epsilon0."""
    value = math.log1p(math.comb(int(order), 2) * 4 * math.expm1(epsilon0) ** 2 / clients) / (order - 1)
    return Answer("shuffle-lemma", value, 0.0, "nominal", "false for large orders; needs pure-LDP reports")


def lemma_lower(epsilon0: float, clients: int, order: float) -> Answer:
    """UDP-FL's Lemma 3, a Rényi lower bound of the shuffled report. Nominal: a lower bound promises nothing."""
    value = math.log1p(math.comb(int(order), 2) * math.expm1(epsilon0) ** 2 / (clients * math.exp(epsilon0)))
    return Answer("shuffle-lemma", value / (order - 1), 0.0, "nominal", "a lower bound is not a guarantee")


@dataclass(frozen=True)
class WeightReports:
    """LDP-FL's two numbers, always together: one reported weight, and everything a client reports."""

    weight: Answer
    client: Answer
    printed: dict[str, float]  # as the paper counts: unshuffled, model shuffling, parameter shuffling


def weight_reports(
    epsilon: float, weights: int, rounds: int, *, clients: int | None = None, delta: float = 0.0
) -> WeightReports:
    """What LDP-FL promises after `rounds` of reporting `weights` two-valued weights.

    Formal guarantee: each single reported weight is epsilon-LDP (amplified if `clients` reports of it are
    shuffled and delta > 0). A client changes all weights of all rounds: weights * rounds * epsilon, or less at
    a positive delta.
    """
    epsilon = checks.positive("epsilon", epsilon)
    weights, rounds = checks.count("weights", weights, 1), checks.count("rounds", rounds, 1)
    delta = checks.delta(delta)
    if clients is not None:
        weight = shuffled(epsilon, clients, delta, binary=True)
    else:
        weight = Answer("basic", epsilon, 0.0, "sound", "each single reported weight is epsilon-LDP")
    event = Event(Noise("two-valued", 1 / epsilon, dimension=weights), unit="client", steps=rounds)
    client = answer([event], delta, "pld" if weights * rounds < 10**8 else "rdp")
    pure = weights * rounds * epsilon
    if client.epsilon is None or client.epsilon > pure:
        client = Answer("basic", pure, 0.0, "sound", "all weights of all rounds may change")
    printed = {"unshuffled": pure, "model shuffling": weights * epsilon, "parameter shuffling": epsilon}
    return WeightReports(weight, client, printed)


def inner_product_snr(epsilon: float, weights: int, rounds: int, clients: int) -> float:
    """Signal-to-noise ratio of the attack that correlates the averaged reports with a client's own weights:
    parameter shuffling does not stop losses from adding up over weights and rounds."""
    return 2 * math.tanh(epsilon / 2) * math.sqrt(weights * rounds / clients)
