"""Inversion that uses the noise law: a noised update of a linear head, a Gaussian prior of public data, several rounds.

A head's gradient of one example is delta x^T, clipped by a known rule. Given the label, delta is known while the weights are,
so every released update is a noisy copy of x: t = <delta, update> / |delta|^2 has noise sigma * bound / |delta|. Copies of
several rounds are averaged; the posterior mean under the prior N(m, S) of public rows is the best guess in mean squared error;
the label is the one of highest likelihood. This is the strongest linear attack on such a release, so where it stays at the prior,
noise has done its work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import softmax


@dataclass(frozen=True)
class Prior:
    """Mean and principal directions of public rows."""

    mean: np.ndarray
    directions: np.ndarray  # [k, d]
    variances: np.ndarray  # [k]


def prior_of(public: np.ndarray) -> Prior:
    """The Gaussian that fits public rows [n, d]."""
    rows = np.asarray(public, np.float64).reshape(len(public), -1)
    mean = rows.mean(0)
    _, values, directions = np.linalg.svd(rows - mean, full_matrices=False)
    return Prior(mean, directions, values**2 / max(1, len(rows) - 1))


def posterior_mean(seen: np.ndarray, variance: float, prior: Prior) -> np.ndarray:
    """The best guess of x from x + N(0, variance I)."""
    parts = prior.directions @ (seen - prior.mean)
    return prior.mean + (parts * prior.variances / (prior.variances + variance)) @ prior.directions


def head_attack(
    updates: np.ndarray, weights: np.ndarray, prior: Prior, *, deviation: float, bound: float
) -> tuple[np.ndarray, int]:
    """(guess of x, label) from released gradient sums of one example, [rounds, classes, d], at these head weights [classes, d].

    deviation: of the noise on each entry of the sum. bound: the clip bound. A clipped gradient has norm `bound` whatever |x|, so
    its direction is read and the length of x comes from the prior's mean."""
    mean = np.asarray(updates, np.float64).mean(0)
    spread = deviation**2 / len(updates)
    typical = prior.mean
    chance = softmax(np.asarray(weights, np.float64) @ typical)
    best: tuple[float, np.ndarray, int] = (-np.inf, typical, 0)
    for label in range(len(mean)):
        delta = chance - np.eye(len(mean))[label]
        size = float(delta @ delta)
        length = np.sqrt(typical @ typical + prior.variances.sum())
        factor = min(1.0, bound / (np.sqrt(size) * length))
        seen = delta @ mean / (size * factor)
        variance = spread / (size * factor**2)
        guess = posterior_mean(seen, variance, prior)
        explained = factor * np.outer(delta, guess)
        parts = prior.directions @ (guess - prior.mean)
        score = (
            -((mean - explained) ** 2).sum() / (2 * spread)
            if spread > 0
            else -((mean - explained) ** 2).sum()
        )
        score -= float((parts**2 / (2 * np.maximum(prior.variances, 1e-9))).sum())
        if score > best[0]:
            best = (score, guess, label)
    return best[1], best[2]
