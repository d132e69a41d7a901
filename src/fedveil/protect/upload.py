"""Small parts around an upload: what of it is left out, how it travels, and the ranges of two-valued reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Thin:
    """Coordinates that are left out of an upload.

    prune: fraction of the smallest coordinates that is dropped. share: DSSGD, the fraction of all coordinates above
    `share_threshold` that is uploaded.
    """

    prune: float = 0.0
    share: float = 1.0
    share_threshold: float = 0.0

    @property
    def anything(self) -> bool:
        """Is anything left out?"""
        return self.prune > 0 or self.share < 1

    @property
    def not_noise(self) -> str:
        """Why leaving out coordinates promises nothing, "" where none are."""
        return "dropping coordinates is not noise: what is shared is exact" if self.anything else ""

    def refusal(self) -> str:
        """Why these numbers cannot be, or ""."""
        if not 0 <= self.prune < 1:
            return f"prune = {self.prune} must be in [0, 1)"
        if not 0 < self.share <= 1:
            return f"share = {self.share} must be in (0, 1]"
        return ""

    def of(self, update: np.ndarray, draw: np.random.Generator | None) -> np.ndarray:
        """What is left of an update. Post-processing where the update carries its noise already."""
        if self.prune > 0:
            update = drop_smallest(update, self.prune)
        if self.share < 1:
            assert draw is not None
            update = share_some(update, self, draw)
        return update


def drop_smallest(update: np.ndarray, fraction: float) -> np.ndarray:
    """Zero the given fraction of coordinates with the smallest magnitude."""
    count = int(fraction * update.size)
    if count == 0:
        return update
    out = update.copy()
    out[np.argpartition(np.abs(update), count - 1)[:count]] = 0
    return out


def share_some(update: np.ndarray, thin: Thin, draw: np.random.Generator) -> np.ndarray:
    """DSSGD: a random subset, `share` of all coordinates, of those above the threshold."""
    large = np.flatnonzero(np.abs(update) > thin.share_threshold)
    count = min(len(large), int(thin.share * update.size))
    out = np.zeros_like(update)
    kept = draw.choice(large, count, replace=False) if count else large[:0]
    out[kept] = update[kept]
    return out


@dataclass(frozen=True)
class Channel:
    """How uploads travel. hides_senders: the server does not learn who sent an upload. hides_reports: each weight travels
    alone, so the server does not learn either which reports belong together."""

    name: Literal["none", "shuffle-models", "shuffle-parameters"] = "none"

    @property
    def hides_senders(self) -> bool:
        return self.name != "none"

    @property
    def hides_reports(self) -> bool:
        return self.name == "shuffle-parameters"


CHANNELS: dict[str, Channel] = {
    name: Channel(name)
    for name in ("none", "shuffle-models", "shuffle-parameters")
}


@dataclass(frozen=True)
class RangeRule:
    """The public ranges that two-valued reports lie in.

    kind: fixed, or adaptive from the server's average. prior: the first ranges, `radius` in every layer or each layer's
    interval in the (public) first model. adapt: how adaptive ranges follow the average.
    """

    kind: Literal["fixed", "adaptive", "client"] = "fixed"
    radius: float = 0.075
    prior: Literal["radius", "model"] = "radius"
    adapt: Literal["extremes", "spread"] = "extremes"

    @property
    def from_model(self) -> bool:
        """Are the first ranges those of the first model?"""
        return self.prior == "model"

    @property
    def adaptive(self) -> bool:
        return self.kind == "adaptive"

    def refusal(self) -> str:
        """Why two-valued reports cannot use these ranges, or ""."""
        if self.kind == "client":
            return (
                "a range that a client computes from its own weights is visible in its reports exactly (the two "
                "output values are c ± r·K), so no epsilon holds; use ranges = fixed or adaptive"
            )
        return "" if self.radius > 0 else "radius must be above 0"
