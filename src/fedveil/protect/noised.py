"""The one value that adds the noise and states the event.

Whatever noises a sum of bounded contributions holds a `Noised`: engines and servers add with it, claims are read from it.
There is no other holder of a noise scale, so what is promised cannot drift from what is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from fedveil.privacy.events import Event, Noise, Relation, Sampling, Unit
from fedveil.protect import noise
from fedveil.protect.law import FLOAT_NOISE, Law, Norm


@dataclass(frozen=True)
class Noised:
    """Noise of `law` on a sum that one unit moves by at most `bound` between neighbours.

    scale, shape: what the law draws with (`Law.scale`), on the sum. bound: in `norm`, over all `dimension` coordinates,
    for the neighbours in `relation` (so twice a contribution's bound where one unit replaces another).
    grid: spacing of the exact form, 0 for float noise; the spacing that is used may be finer than the one counted here.
    beside: multiplier of a further Gaussian release about the same unit in each step (a noised count), 0 if none.
    follows: why the scale that is used depends on the data, or "". Then `scale` is per unit of what it follows.
    unproven: why the sums that are noised are not known to keep the bound in floating point, or "".
    """

    law: Law
    scale: float
    bound: float
    dimension: int
    shape: float = 0.0
    norm: Norm = "l2"
    grid: float = 0.0
    sampling: Sampling = Sampling()
    relation: Relation = "zero-out"
    unit: Unit = "example"
    steps: int = 1
    beside: float = 0.0
    follows: str = ""
    unproven: str = ""

    def add(self, total: np.ndarray, key: bytes, step: int = 0, times: float = 1.0) -> np.ndarray:
        """`total` with noise of `times` the scale, float64; on the grid if there is one.

        Formal guarantee: for totals as described above and times >= 1 this is the mechanism of `event`, up to the sampling
        that happened before.
        """
        scale = self.scale * times
        if self.grid <= 0:
            return np.asarray(total, np.float64) + self.law.draw(key, step, np.size(total), scale, self.shape)
        if not np.all(np.abs(total) < 2.0**62 * self.grid):
            return np.full(np.shape(total), np.nan)
        units = noise.snap(total, self.grid)
        if scale > 0:
            units = units + self.law.units(key, step, np.size(total), scale / self.grid, self.shape, self.norm)
        return units * self.grid

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on one coordinate of the sum."""
        return self.law.deviation(self.scale, self.shape, self.dimension) if self.scale > 0 else 0.0

    @property
    def multiplier(self) -> float:
        """Noise over bound, as far as the law says; 0 where it states nothing."""
        worth = self._worth()
        return 0.0 if worth is None else worth.multiplier

    def event(self) -> Event | None:
        """What happened, for the accountants; None where the law states nothing."""
        worth = self._worth()
        return None if worth is None else Event(worth, self.sampling, self.relation, self.unit, self.steps)

    def gap(self) -> str:
        """Why the event is no guarantee about what is computed, or ""."""
        if self.follows or self.unproven:
            return self.follows or self.unproven
        return FLOAT_NOISE if self.grid <= 0 else ""

    def _worth(self) -> Noise | None:
        if not self.scale > 0:
            return None
        worth = self.law.worth(self.scale, self.shape, self.bound, self.norm, self.grid, self.dimension)
        if worth is None or not self.beside:
            return worth
        # One joint Gaussian mechanism (Andrew et al.): the count is released in the same step.
        return replace(worth, multiplier=(worth.multiplier**-2 + self.beside**-2) ** -0.5)


def runs(values: Iterable[Noised]) -> dict[Noised, list[int]]:
    """Equal values and the steps at which they occur."""
    found: dict[Noised, list[int]] = {}
    for step, value in enumerate(values):
        found.setdefault(value, []).append(step)
    return found
