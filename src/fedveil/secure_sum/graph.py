"""Who shares masks with whom: everyone with everyone, or each node with some that it draws itself.

In the sparse graph (above some hundred nodes) every node draws `degree` others at random, states them in its signed keys,
and gives shares of its secrets to them and to itself alone; `share_threshold` shares open one. Nobody can grind the
draw: what protects an honest node is its own choice. Who must collude is fixed before the draws; whom to drop may
be chosen after them.

`guaranteed` is the number of honest nodes in every sum that a lying server can open, but for a chance of 2**-40. Let
h = threshold - colluders, and take a set K of m honest nodes that are opened together.
 - Each node of K had its own seed opened, so share_threshold of its holders revealed: itself, at most a few
   colluders (`colluding_neighbours`), and at least q honest ones, which share a mask with it and must be in K.
 - The signed survivor set has at least h honest members, so at least w = h - m of them lie outside of K, and nobody
   in K may have drawn one of these: that mask would stay. (That one of these drew a node of K does not help: the
   server can hide this from it.)
The union bound runs over all K and all w of the others; each node's draw is a uniform subset. It leaves out a few
nodes at the top: who was drawn by few can be cut off by dropping those. In the complete graph the number is h.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy import special

COMPLETE_UP_TO = 100
SECURITY = -40.0  # log2 of the chance that `guaranteed` leaves


def _log_choose(n: np.ndarray | float, k: np.ndarray | float) -> np.ndarray:
    return (
        special.gammaln(np.add(n, 1)) - special.gammaln(np.add(k, 1)) - special.gammaln(np.subtract(n, k) + 1)
    )


def _log_at_least(least: int, population: np.ndarray, marked: np.ndarray, draws: int) -> np.ndarray:
    """Log of P(at least `least` marked ones among `draws` of a population, without replacement), elementwise."""
    terms = []
    for hit in range(least, draws + 1):
        possible = (hit <= marked) & (draws - hit <= population - marked)
        value = (
            _log_choose(marked, np.minimum(hit, marked))
            + _log_choose(population - marked, np.minimum(draws - hit, population - marked))
            - _log_choose(population, np.minimum(draws, population))
        )
        terms.append(np.where(possible, value, -np.inf))
    return special.logsumexp(np.stack(terms), axis=0) if terms else np.full(np.shape(marked), -np.inf)


def colluding_neighbours(nodes: int, colluders: int, degree: int) -> int:
    """The number of colluders among a node's draws that no honest node exceeds, but for a chance of 2**-42."""
    for most in range(min(colluders, degree) + 1):
        more = _log_at_least(most + 1, np.array(nodes - 1.0), np.array(float(colluders)), degree)
        if math.log(nodes) + float(more) <= (SECURITY - 2) * math.log(2):
            return most
    return min(colluders, degree)


@lru_cache(maxsize=256)
def guaranteed(nodes: int, threshold: int, colluders: int, degree: int, share_threshold: int) -> int:
    """Honest nodes in every sum that can be opened, but for a chance of 2**-40; 0 if none can be promised."""
    honest, least = nodes - colluders, threshold - colluders
    if not degree:
        return least
    inside = share_threshold - 1 - colluding_neighbours(nodes, colluders, degree)
    if inside < 1:
        return 0
    m = np.arange(inside + 1, least, dtype=np.float64)  # smaller sets cannot hold `inside` others
    opened = _log_opened(m, nodes, honest, least, degree, inside)
    chance = np.logaddexp.accumulate(np.append((SECURITY - 2) * math.log(2), opened))
    possible = np.flatnonzero(chance > SECURITY * math.log(2))
    return int(m[possible[0] - 1]) if possible.size else least


def _log_opened(m: np.ndarray, nodes: int, honest: int, least: int, degree: int, inside: int) -> np.ndarray:
    """Log of the union bound over all sets of m honest nodes, for each m."""
    w = least - m
    rest = nodes - 1 - w
    fits = rest >= degree
    none_outside = np.where(fits, _log_choose(rest, np.minimum(degree, rest)), -np.inf)
    draw = (
        none_outside
        - _log_choose(nodes - 1, degree)
        + np.where(fits, _log_at_least(inside, rest, m - 1, degree), -np.inf)
    )
    return _log_choose(honest, m) + _log_choose(honest - m, w) + m * np.minimum(draw, 0.0)


def shortfall(nodes: int, lost: int, degree: int, share_threshold: int) -> float:
    """Bound on P(a round fails because some secret has too few holders left), if `lost` nodes at random drop out.

    The owner's own share is not counted on."""
    gone = _log_at_least(
        degree - share_threshold + 1, np.array(nodes - 1.0), np.array(float(min(lost, nodes - 1))), degree
    )
    return min(1.0, nodes * math.exp(float(gone)))


@lru_cache(maxsize=64)
def choose(nodes: int, threshold: int, colluders: int, lost: int, failure: float = 1e-6) -> tuple[int, int]:
    """The smallest degree (in steps of 4) and its share threshold that lose a round with at most this probability, if
    `lost` nodes at random drop out, and guarantee 95% of threshold - colluders honest nodes.

    (0, 0) stands for the complete graph: up to `COMPLETE_UP_TO` nodes, or where no sparse one is good enough.
    """
    wanted = 0.95 * (threshold - colluders)
    for degree in range(16, nodes - 1, 4) if nodes > COMPLETE_UP_TO else ():
        for share_threshold in range(degree, degree // 2, -1):
            if shortfall(nodes, lost, degree, share_threshold) <= failure:
                if guaranteed(nodes, threshold, colluders, degree, share_threshold) >= wanted:
                    return degree, share_threshold
                break  # a lower share threshold opens smaller sets
    return 0, 0
