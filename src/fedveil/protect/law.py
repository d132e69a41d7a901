"""Noise laws: each draws its noise and states what a draw is worth to the accountants. A new law is one more value like these.

A law is asked for noise of a given `scale` on a sum (Gaussian: the deviation; Laplace: b; Staircase: the width of a period)
and a `shape` of its own (Staircase: 1 / lambda). Scales come from `protect.noised.Noised` and from nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from fedveil.privacy.events import Noise
from fedveil.privacy.mechanisms import mechanism
from fedveil.protect import exact, noise

if TYPE_CHECKING:
    from fedveil.protect.recipe import Recipe

Norm = Literal["l1", "l2"]
FLOAT_NOISE = (
    "float32 noise: the low bits of a single release can betray a record (docs/noise.md); leave out grid = 0 for exact noise"
)


class Law(Protocol):
    """One noise law.

    name: as in configurations, events and engines. kernel: the compiled engine's name for it, "" if it has none (then the
    torch engines run it). grid: the default spacing of its exact form as a fraction of the clip bound, 0 if it has none.
    adds_up: is the sum of independent draws again of this law (so that noise on every example can be drawn at once)?
    scales: does stretching the noise change what it is worth (so that noise on the mean is another multiplier)?
    """

    @property
    def name(self) -> str: ...
    @property
    def kernel(self) -> str: ...
    @property
    def grid(self) -> float: ...
    @property
    def adds_up(self) -> bool: ...
    @property
    def scales(self) -> bool: ...

    def refusal(self, recipe: Recipe) -> str: ...  # why this recipe cannot use it, or ""
    def width_of(self, dimension: int) -> float: ...  # a period over the bound, for laws that have periods; else 1
    def scale(self, sigma: float, bound: float, dimension: int) -> tuple[float, float]: ...  # (scale, shape) for a bound
    def draw(self, key: bytes, step: int, count: int, scale: float, shape: float) -> np.ndarray: ...
    def units(self, key: bytes, step: int, count: int, scale: float, shape: float, norm: Norm) -> np.ndarray: ...
    def deviation(self, scale: float, shape: float, dimension: int) -> float: ...  # of one coordinate
    def worth(
        self, scale: float, shape: float, bound: float, norm: Norm, grid: float, dimension: int
    ) -> Noise | None: ...


@dataclass(frozen=True)
class Gaussian:
    """Normal noise under an L2 bound; on a grid the discrete Gaussian.

    Formal guarantee: `worth` is the multiplier of a continuous Gaussian mechanism of which the noised sum is a
    post-processing (`noise.snapped_multiplier`), for sums that differ by at most `bound`. Without a grid it is the
    multiplier of real-valued noise, which float32 noise is not.
    """

    name: str = "gaussian"
    kernel: str = "gaussian"
    grid: float = 2.0**-20
    adds_up: bool = True
    scales: bool = True

    def refusal(self, recipe: Recipe) -> str:
        if recipe.clip.order == 1:
            return "Gaussian noise is calibrated to an L2 bound: set clip.norm = l2"
        return ""

    def width_of(self, dimension: int) -> float:
        return 1.0

    def scale(self, sigma: float, bound: float, dimension: int) -> tuple[float, float]:
        return sigma * bound, 0.0

    def draw(self, key: bytes, step: int, count: int, scale: float, shape: float) -> np.ndarray:
        made = noise.normals(key, step, count)
        made *= np.float32(scale)
        return made

    def units(self, key: bytes, step: int, count: int, scale: float, shape: float, norm: Norm) -> np.ndarray:
        return exact.gaussian(key, step, count, scale)

    def deviation(self, scale: float, shape: float, dimension: int) -> float:
        return scale

    def worth(
        self, scale: float, shape: float, bound: float, norm: Norm, grid: float, dimension: int
    ) -> Noise | None:
        if grid <= 0:
            return Noise("gaussian", scale / bound)
        z = noise.snapped_multiplier(scale, bound, grid, dimension)
        return _sampled(Noise("gaussian", z), exact.gaussian_error(scale / grid), dimension)


@dataclass(frozen=True)
class Laplace:
    """Independent Laplace noise of scale b on every coordinate."""

    name: str = "laplace"
    kernel: str = "laplace"
    grid: float = 2.0**-32  # rounding adds up to a step per coordinate to an L1 norm
    adds_up: bool = False
    scales: bool = True

    def refusal(self, recipe: Recipe) -> str:
        return _only_in_steps(self.name, recipe)

    def width_of(self, dimension: int) -> float:
        return 1.0

    def scale(self, sigma: float, bound: float, dimension: int) -> tuple[float, float]:
        return sigma * bound, 0.0

    def draw(self, key: bytes, step: int, count: int, scale: float, shape: float) -> np.ndarray:
        return noise.laplaces(key, step, count) * np.float32(scale)

    def units(self, key: bytes, step: int, count: int, scale: float, shape: float, norm: Norm) -> np.ndarray:
        return exact.laplace(key, step, count, scale)

    def deviation(self, scale: float, shape: float, dimension: int) -> float:
        return math.sqrt(2) * scale

    def worth(
        self, scale: float, shape: float, bound: float, norm: Norm, grid: float, dimension: int
    ) -> Noise | None:
        if grid <= 0:
            return Noise("laplace", scale / bound, norm=norm, dimension=dimension)
        z = exact.snapped_laplace_multiplier(scale, bound, grid, dimension, norm)
        return _sampled(Noise("laplace", z, norm=norm, dimension=dimension), exact.laplace_error(), dimension)


@dataclass(frozen=True)
class Staircase:
    """Independent Staircase noise on every coordinate: period `scale`, density falling by e^-lambda = e^(-1/shape).

    width: a period over the clip bound; 0 is 1 / sqrt(dimension), where it costs about what Laplace does. lambda is
    width / sigma, so that a narrow Staircase is Laplace noise of scale sigma.
    """

    name: str = "staircase"
    kernel: str = "staircase"
    grid: float = 2.0**-32
    adds_up: bool = False
    scales: bool = False
    nu: float | None = None
    width: float = 1.0

    def refusal(self, recipe: Recipe) -> str:
        flat = recipe.clip.flat and recipe.clip.order == 2
        if self.width != 1 and not (flat and 0 <= self.width < math.inf):
            return f"width = {self.width} is the step of i.i.d. Staircase noise under a flat L2 clip, 0 or more"
        return _only_in_steps(self.name, recipe)

    def width_of(self, dimension: int) -> float:
        return self.width or dimension**-0.5

    def scale(self, sigma: float, bound: float, dimension: int) -> tuple[float, float]:
        width = self.width_of(dimension)
        return (bound * width, sigma / width) if sigma > 0 else (0.0, 0.0)

    def draw(self, key: bytes, step: int, count: int, scale: float, shape: float) -> np.ndarray:
        return noise.staircases(key, step, count, 1 / shape, self.nu) * np.float32(scale)

    def units(self, key: bytes, step: int, count: int, scale: float, shape: float, norm: Norm) -> np.ndarray:
        return exact.staircase(key, step, count, self.stairs(scale, shape, count, norm))

    def stairs(self, scale: float, shape: float, count: int, norm: Norm) -> exact.Stairs:
        """The shape for a period of `scale` grid steps, widened as the bound is by rounding."""
        width = self.width_of(count)
        period = exact.snapped_period(scale * (1 + exact.ROOM) / width, 1.0, count, norm, width)
        return exact.stairs(1 / shape, max(2, period), self.nu)

    def deviation(self, scale: float, shape: float, dimension: int) -> float:
        named = Noise("joint-staircase", shape, norm="l1", dimension=dimension, nu=self.nu)
        if type(self) is Staircase:
            named = Noise("staircase", shape, dimension=dimension, nu=self.nu)
        return scale * math.sqrt(mechanism(named).variance())

    def worth(
        self, scale: float, shape: float, bound: float, norm: Norm, grid: float, dimension: int
    ) -> Noise | None:
        width = self.width_of(dimension)
        if not _made_for(scale, bound * width, grid):
            return None  # a bound that the period was not made for: nothing is proven about it here
        named = Noise("staircase", shape * width, norm=norm, dimension=dimension, nu=self.nu, width=width)
        if grid <= 0:
            return named
        return _sampled(named, exact.staircase_error(self.stairs(scale / grid, shape, dimension, norm)), dimension)


@dataclass(frozen=True)
class JointStaircase(Staircase):
    """One draw of the L1-norm Staircase law in all coordinates (Geng et al.)."""

    name: str = "joint-staircase"
    kernel: str = "joint-staircase"

    def refusal(self, recipe: Recipe) -> str:
        if self.width != 1:
            return f"width = {self.width}: only i.i.d. Staircase noise has steps of another width than the bound"
        if not recipe.clip.flat or recipe.clip.order != 1:
            return "the joint staircase needs clip.kind = flat and clip.norm = l1"
        return _only_in_steps(self.name, recipe)

    def draw(self, key: bytes, step: int, count: int, scale: float, shape: float) -> np.ndarray:
        return noise.joint_staircase(key, step, count, 1 / shape, self.nu) * np.float32(scale)

    def units(self, key: bytes, step: int, count: int, scale: float, shape: float, norm: Norm) -> np.ndarray:
        return exact.joint_staircase(key, step, count, self.stairs(scale, shape, count, norm))

    def stairs(self, scale: float, shape: float, count: int, norm: Norm) -> exact.Stairs:
        """The shape for a period of `scale` grid steps, widened as the bound is by rounding."""
        return exact.stairs(1 / shape, max(2, exact.snapped_period(scale * (1 + exact.ROOM), 1.0, count, "l1")), self.nu, True)

    def worth(
        self, scale: float, shape: float, bound: float, norm: Norm, grid: float, dimension: int
    ) -> Noise | None:
        if not _made_for(scale, bound, grid):
            return None
        named = Noise("joint-staircase", shape, norm=norm, dimension=dimension, nu=self.nu)
        if grid <= 0:
            return named
        return _sampled(named, exact.joint_error(self.stairs(scale / grid, shape, dimension, norm), dimension), 1)


def _made_for(scale: float, bound: float, grid: float) -> bool:
    """Is a period of `scale` (on a grid: with its room) made for moves up to `bound`, and no shorter ones?"""
    return scale * (1 - 1e-12) <= bound <= scale * (1 + (exact.ROOM if grid > 0 else 1e-12))


def _sampled(named: Noise, error: exact.Error, count: int) -> Noise:
    """The event of `count` sampled values."""
    return replace(named, ratio=count * error.ratio, tail=count * error.tail)


def _only_in_steps(name: str, recipe: Recipe) -> str:
    return "" if recipe.place.in_steps else f"{name} noise is offered in local training (where = step)"


LAWS: dict[str, Law] = {law.name: law for law in (Gaussian(), Laplace(), Staircase(), JointStaircase())}


SUITED: dict[str, dict[str, object]] = {  # the clip that a law is made for, where it is another than the plain one
    "staircase": {"clip.norm": "l2", "clip.kind": "flat", "width": 0.0},
    "joint-staircase": {"clip.norm": "l1", "clip.kind": "flat", "width": 1.0},
}


def clip_for(mechanism: str) -> dict[str, object]:
    """The changes of a recipe's clip that a mechanism asks for."""
    return SUITED.get(mechanism, {"clip.norm": "l2", "width": 1.0})


def kernel_of(law: Law) -> str:
    """The compiled engine's name for a law; "" for laws that are not ours, which draw in their own way."""
    ours = LAWS.get(law.name)
    return law.kernel if type(law) is type(ours) else ""


@dataclass(frozen=True)
class NoiseOn:
    """What a noise scale refers to: the sum of the contributions, every one of them, or their mean.

    factor(count): how much wider the noise on the sum of `count` contributions is than sigma times the bound.
    """

    name: Literal["sum", "example", "mean"] = "sum"

    @property
    def words(self) -> str:
        """For people: what gets noise of the stated scale."""
        return {
            "sum": "once on the sum of clipped contributions (of a batch, where noise is in local steps), none on a single one",
            "example": "on every clipped contribution by itself",
            "mean": "once on the mean of clipped contributions, as wide as for a single one",
        }[self.name]

    def factor(self, count: float) -> float:
        return {"sum": 1.0, "example": math.sqrt(count), "mean": count}[self.name]

    @property
    def once(self) -> bool:
        """Is the scale that of the sum itself?"""
        return self.name == "sum"

    @property
    def for_each(self) -> bool:
        """Does every contribution carry noise of its own?"""
        return self.name == "example"

    def refusal(self, law: Law | None) -> str:
        if law is None:
            return ""
        if self.name == "example" and not law.adds_up:
            return "noise_on = example adds up independent draws: only Gaussian noise stays of its kind"
        if self.name == "mean" and not law.scales:
            return f"noise_on = mean scales the noise; {law.name} noise keeps its epsilon when scaled: use noise_on = sum"
        return ""


NOISE_ON: dict[str, NoiseOn] = {name: NoiseOn(name) for name in ("sum", "example", "mean")}
