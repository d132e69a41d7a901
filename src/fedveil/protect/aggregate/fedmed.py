"""Adaptive weighting in the spirit of FedMed (Wu, Liang, Wang 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedveil.jsons import JsonObject
from fedveil.protect.aggregate.base import Mean, Merged
from fedveil.protect.memory import Memory

if TYPE_CHECKING:
    from fedveil.models.layout import Layout


@dataclass(frozen=True)
class PublicLosses(Memory):
    """The last public losses of the global model."""

    losses: np.ndarray | None = None


@dataclass(frozen=True)
class FedMed(Mean):
    """Per layer, a client's share falls with the divergence between its layer and the server's; the plain mean after the
    public loss rose. Without public data there is no loss to look at, and the weighting is always adaptive."""

    name: str = "fedmed"
    looks_inside: bool = True
    sharpness: float = 1.0

    def init(self, size: int) -> Memory:
        return PublicLosses(np.zeros(0))

    def direction(self, memory: Memory, merged: Merged) -> tuple[np.ndarray, Memory, JsonObject]:
        assert isinstance(memory, PublicLosses) and memory.losses is not None
        losses = memory.losses
        if merged.public_loss is not None:
            loss = merged.public_loss(merged.start)
            losses = np.append(losses[-1:], math.inf if loss is None else loss)
        adaptive = merged.public_loss is None or falling(losses.tolist())
        found = adaptive_mean(merged.start, np.stack(merged.updates), merged.layout, self.sharpness) if adaptive else merged.mean
        return found, PublicLosses(losses), {"adaptive": adaptive}


def adaptive_mean(start: np.ndarray, updates: np.ndarray, layout: Layout, sharpness: float = 1.0) -> np.ndarray:
    """The mean of updates [K, P] with shares per layer: share_u ~ exp(-sharpness * D_u / mean D), D the Jensen-Shannon
    divergence between a client's layer and the server's, both read as softmax distributions.

    What is ours: the division by the mean divergence (raw divergences of weight layers are tiny, which would make the
    shares equal) and the direction (agreement counts more, so a client with more noise counts less). FedMed's top-k
    compression is not here.

    Use on noised updates only: the shares then cost nothing. They depend on the updates, so for noise that is added
    afterwards no sensitivity of "1/K per client" may be claimed.
    """
    parts = layout.layer_slices()
    server = [_softmax(start[p]) for p in parts]
    divergence = np.array(
        [[_jensen_shannon(s, _softmax(start[p] + row[p])) for p, s in zip(parts, server, strict=True)] for row in updates]
    )
    typical = divergence.mean(axis=0)
    shares = np.exp(-sharpness * divergence / np.where(typical > 0, typical, 1.0))
    shares /= shares.sum(axis=0)
    total = np.zeros(layout.size)
    for share, row in zip(shares, updates, strict=True):
        for s, p in zip(share, parts, strict=True):
            total[p] += s * row[p].astype(np.float64)
    return total


def falling(public_losses: Sequence[float]) -> bool:
    """FedMed's mediation: True (adaptive weighting) while the loss falls, False (plain mean) after it rose.
    Losses are the server's, on public data; a loss on private data would be a release of its own."""
    return len(public_losses) < 2 or public_losses[-1] <= public_losses[-2]


def _softmax(values: np.ndarray) -> np.ndarray:
    shifted = np.asarray(values, dtype=np.float64)
    weights = np.exp(shifted - shifted.max())
    found: np.ndarray = weights / weights.sum()
    return found


def _jensen_shannon(p: np.ndarray, q: np.ndarray) -> float:
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(p > 0, p * np.log(p / middle), 0.0).sum()
        right = np.where(q > 0, q * np.log(q / middle), 0.0).sum()
    return max(0.0, float(left + right) / 2)
