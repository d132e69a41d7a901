"""The one value that adds the noise and states the event.

Whatever noises a sum of bounded contributions holds a `Noised`, or the `Drawing` that it hands to engines: noise is added with
it, claims are read from it. There is no other holder of a noise scale, so what is promised cannot drift from what is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from fedveil.errors import UserError
from fedveil.privacy.events import Event, Noise, Relation, Sampling, Unit
from fedveil.protect import noise
from fedveil.protect.law import FLOAT_NOISE, Law, Norm

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Drawing:
    """Noise as it is drawn: all that whoever adds it has to know. Engines get one of these per step.

    scale, shape, norm, grid: as in `Noised`. Papers let the scale follow the batch, and then nothing is promised:
    at_norm: the norm (the batch's largest, or its median) that `scale` is meant for; 0 where it follows no norm.
    at_count: how many contributions `scale` is meant for where each carries noise of its own; 0 where none does.
    """

    law: Law
    scale: float
    shape: float = 0.0
    norm: Norm = "l2"
    grid: float = 0.0
    at_norm: float = 0.0
    at_count: float = 0.0

    def times(self, norm: np.ndarray | float | None = None, count: np.ndarray | float | None = None) -> np.ndarray:
        """How much wider than `scale` the noise of a batch is with this norm (one, or one for each layer) and this count."""
        by_norm = 1.0 if norm is None or not self.at_norm else np.asarray(norm, np.float64) / self.at_norm
        by_count = 1.0 if count is None or not self.at_count else np.sqrt(np.asarray(count, np.float64) / self.at_count)
        return np.asarray(by_norm * by_count, np.float64)

    @property
    def per_unit(self) -> float:
        """The scale for a norm of 1 where it follows a norm, and for one contribution where each has its own."""
        return self.scale / (self.at_norm or 1.0) / math.sqrt(self.at_count or 1.0)

    def deviation(self, dimension: int) -> float:
        """Standard deviation of the noise on one of so many coordinates."""
        return self.law.deviation(self.scale, self.shape, dimension) if self.scale > 0 else 0.0

    def draw(self, key: bytes, step: int, count: int) -> np.ndarray:
        """Float noise of `scale` on so many coordinates, float32."""
        if not self.scale > 0:
            return np.zeros(count, np.float32)
        return self.law.draw(key, step, count, self.scale, self.shape)

    def add(self, total: np.ndarray, key: bytes, step: int = 0, times: np.ndarray | float = 1.0) -> np.ndarray:
        """`total` with noise of `times` the scale (for each coordinate, where there is no grid), float64; on the grid if there
        is one. NaN where the total does not fit the grid."""
        if self.grid <= 0:
            drawn = self.draw(key, step, np.size(total)) * np.asarray(times, np.float64)
            return np.asarray(np.asarray(total, np.float64) + drawn)
        if np.ndim(times):
            raise UserError("noise on a grid has one scale for all coordinates: set grid = 0 or another rule of the scale")
        if not np.all(np.abs(total) < 2.0**62 * self.grid):
            return np.full(np.shape(total), np.nan)
        units, scale = noise.snap(total, self.grid), self.scale * float(times)
        if scale > 0:
            units = units + self.law.units(key, step, np.size(total), scale / self.grid, self.shape, self.norm)
        return units * self.grid


@dataclass(frozen=True)
class Noised:
    """Noise of `law` on a sum that one unit moves by at most `bound` between neighbours.

    scale, shape: what the law draws with (`Law.scale`), on the sum. bound: in `norm`, over all `dimension` coordinates,
    for the neighbours in `relation` (so twice a contribution's bound where one unit replaces another).
    grid: spacing of the exact form, 0 for float noise; the spacing that is used may be finer than the one counted here.
    beside: multiplier of a further Gaussian release about the same unit in each step (a noised count), 0 if none.
    follows: why the scale that is used depends on the data, or "". at_norm, at_count: as in `Drawing`.
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
    at_norm: float = 0.0
    at_count: float = 0.0

    @property
    def drawing(self) -> Drawing:
        """What is drawn with, without what is claimed."""
        return Drawing(self.law, self.scale, self.shape, self.norm, self.grid, self.at_norm, self.at_count)

    def add(self, total: np.ndarray, key: bytes, step: int = 0, times: float = 1.0) -> np.ndarray:
        """`total` with noise of `times` the scale, float64; on the grid if there is one.

        Formal guarantee: for totals as described above and times >= 1 this is the mechanism of `event`, up to the sampling
        that happened before.
        """
        return self.drawing.add(total, key, step, times)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on one coordinate of the sum."""
        return self.drawing.deviation(self.dimension)

    @property
    def multiplier(self) -> float:
        """Noise over bound, as far as the law says; 0 where it states nothing."""
        worth = self._worth()
        return 0.0 if worth is None else worth.multiplier

    def event(self) -> Event | None:
        """What happened, for the accountants; None where the law states nothing."""
        worth = self._worth()
        return None if worth is None else Event(worth, self.sampling, self.relation, self.unit, self.steps)

    def on_grid(self, grid: float) -> float:
        """Deviation of Gaussian noise on a coarser grid that is worth what this noise is worth.

        The inverse of `noise.snapped_multiplier`: rounding is paid for with a little more noise, not with a weaker promise.
        """
        wide = self.multiplier * noise.snapped_bound(self.bound, grid, self.dimension)
        return math.hypot(wide, noise.SMOOTHING * grid) * (1 + 1e-12)

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
    last, steps = None, []  # type: tuple[Noised | None, list[int]]
    for step, value in enumerate(values):
        if value is not last:  # hashing a value takes longer than anything else here, and steps mostly share one
            last, steps = value, found.setdefault(value, [])
        steps.append(step)
    return found


def each(make: Callable[[T], U], values: Sequence[T]) -> tuple[U, ...]:
    """`make` of every value, made once where the same object stands several times: the steps of a round are mostly alike."""
    made = {id(value): value for value in values}
    done = {key: make(value) for key, value in made.items()}
    return tuple(done[id(value)] for value in values)
