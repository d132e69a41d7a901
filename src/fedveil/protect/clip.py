"""Clipping: how far one contribution may reach, and how the bound moves from round to round.

`Clip` says what is bounded; its `rule` says by how much: a schedule, a tracked quantile, AdaClip's scaled coordinates, or (not
sound) the batch's own median. A new way of choosing the bound is one more class like these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import numpy as np

from fedveil.jsons import JsonObject
from fedveil.privacy.schedules import Schedule
from fedveil.protect import adaclip
from fedveil.protect.bounded import ORDERS
from fedveil.protect.law import Gaussian, Norm
from fedveil.protect.memory import NOTHING, Memory
from fedveil.protect.noised import Noised


def constant(value: float) -> Schedule:
    """A schedule that never moves."""
    return Schedule("constant", float(value))


def values_of(schedule: Schedule, index: int, rounds: int, steps: int) -> tuple[float, ...]:
    """One value per local step of round `index` (0-based)."""
    if schedule.by == "iteration":
        return tuple(schedule.value(index * steps + step, rounds * steps) for step in range(steps))
    return (schedule.value(index, rounds),) * steps


@dataclass(frozen=True)
class Time:
    """Where a run stands: round `index` (0-based) of `rounds`, each of `steps` local steps."""

    index: int
    rounds: int
    steps: int


@dataclass(frozen=True)
class Seen:
    """What the server has of a finished round: the (noised) mean update, as a gradient, and the clients' noised counts.

    deviation: of the noise in `gradient`, in the units that the noise was added in, before any rescaling by the rule.
    """

    gradient: np.ndarray
    counts: Sequence[float] = ()
    deviation: float = 0.0


class Rule(Protocol):
    """How the bound is found.

    unsound: why noise that is scaled to this bound gives no guarantee, or "". batch: is it computed from the batch itself?
    in_steps: does it follow the gradients of local steps, so that noise must be there? rescales: are gradients mapped
    before they are clipped?
    """

    @property
    def name(self) -> str: ...
    @property
    def unsound(self) -> str: ...
    @property
    def batch(self) -> bool: ...
    @property
    def in_steps(self) -> bool: ...
    @property
    def rescales(self) -> bool: ...

    def refusal(self, clip: Clip) -> str: ...
    def start(self, clip: Clip, size: int, rounds: int) -> Memory: ...
    def bounds(self, clip: Clip, memory: Memory, time: Time) -> tuple[float, ...]: ...
    def vectors(self, memory: Memory) -> Mapping[str, np.ndarray]: ...
    def beside(self) -> float: ...
    def count(self, half: float, steps: int, layers: int, key: bytes, exact: bool) -> float | None: ...
    def next(self, memory: Memory, seen: Seen) -> tuple[Memory, JsonObject]: ...


@dataclass(frozen=True)
class Given:
    """The bound follows the clip's schedule."""

    name: str = "given"
    unsound: str = ""
    batch: bool = False
    in_steps: bool = False
    rescales: bool = False

    def refusal(self, clip: Clip) -> str:
        """Why a clip cannot use this rule, or ""."""
        return ""

    def start(self, clip: Clip, size: int, rounds: int) -> Memory:
        """What is remembered before the first round."""
        return NOTHING

    def bounds(self, clip: Clip, memory: Memory, time: Time) -> tuple[float, ...]:
        """The bound of every local step of a round."""
        return values_of(clip.bound, time.index, time.rounds, time.steps)

    def vectors(self, memory: Memory) -> Mapping[str, np.ndarray]:
        """What engines need to map gradients before they are clipped."""
        return {}

    def beside(self) -> float:
        """Multiplier of what a step releases beside the sum, 0 if nothing."""
        return 0.0

    def count(self, half: float, steps: int, layers: int, key: bytes, exact: bool) -> float | None:
        """The noised count that a client uploads, None if none. half: (share of unclipped - 1/2) * examples."""
        return None

    def next(self, memory: Memory, seen: Seen) -> tuple[Memory, JsonObject]:
        """The memory after a round, and public facts."""
        return memory, {}


@dataclass(frozen=True)
class Median(Given):
    """The batch's own median norm."""

    name: str = "median"
    unsound: str = "the bound is the batch's own median norm, so noise and sensitivity depend on the data"
    batch: bool = True
    in_steps: bool = True


@dataclass(frozen=True)
class TrackedBound(Memory):
    """The bound of the coming round."""

    bound: float = 1.0
    BROADCAST: ClassVar[tuple[str, ...]] = ("bound",)


SMALLEST_TRACKED, LARGEST_TRACKED = 1e-4, 1e4


@dataclass(frozen=True)
class Quantile(Given):
    """The bound tracks a quantile of the norms by noised counts (Andrew et al.).

    Formal guarantee: each step's count of unclipped examples moves by at most 1/2 (counted from the middle) and gets
    Gaussian noise of deviation `count_noise`; `beside` is its multiplier, which `Noised` counts together with the sum's.
    """

    name: str = "quantile"
    in_steps: bool = True
    quantile: float = 0.5
    quantile_rate: float = 0.2
    count_noise: float = 5.0

    def refusal(self, clip: Clip) -> str:
        if not (0 < self.quantile < 1 and self.count_noise > 0):
            return "quantile clipping needs 0 < clip.quantile < 1 and clip.count_noise > 0"
        return ""

    def start(self, clip: Clip, size: int, rounds: int) -> Memory:
        return TrackedBound(clip.bound.value(0, rounds))

    def bounds(self, clip: Clip, memory: Memory, time: Time) -> tuple[float, ...]:
        assert isinstance(memory, TrackedBound)
        return (memory.bound,) * time.steps

    def noised(self, grid: float = 0.0) -> Noised:
        """The noise on the count of one step, which an example moves by at most 1/2 (counted from the middle)."""
        return Noised(Gaussian(), self.count_noise, 0.5, 1, grid=grid)

    def beside(self) -> float:
        return self.noised().multiplier

    def count(self, half: float, steps: int, layers: int, key: bytes, exact: bool) -> float | None:
        # Counts are multiples of half a layer's share: on a grid that contains these nothing is rounded.
        grid = 2.0**-21 / layers if exact else 0.0
        return float(self.noised(grid).add(np.array([half]), key, times=math.sqrt(steps))[0])

    def next(self, memory: Memory, seen: Seen) -> tuple[Memory, JsonObject]:
        assert isinstance(memory, TrackedBound)
        if not len(seen.counts):
            return memory, {}
        share = float(np.clip(np.mean(seen.counts), 0, 1))
        bound = memory.bound * math.exp(-self.quantile_rate * (share - self.quantile))
        return TrackedBound(min(max(bound, SMALLEST_TRACKED), LARGEST_TRACKED)), {"below": share}


@dataclass(frozen=True)
class Moments(Memory):
    """AdaClip's running mean and squared deviation of the noised gradient, per coordinate."""

    mean: np.ndarray | None = None
    square: np.ndarray | None = None
    BROADCAST: ClassVar[tuple[str, ...]] = ("mean", "square")

    @property
    def now(self) -> adaclip.Memory:
        """For `protect.adaclip`."""
        assert self.mean is not None and self.square is not None
        return adaclip.Memory(self.mean, self.square)


@dataclass(frozen=True)
class AdaClip(Given):
    """Each coordinate is shifted and scaled by statistics of noised gradients, then the whole is clipped to 1.

    Formal guarantee: shift and scale are functions of earlier releases, so noise on the scaled sum, whose contributions
    have norm at most 1, is the Gaussian mechanism; mapping back is post-processing.
    """

    name: str = "adaclip"
    in_steps: bool = True
    rescales: bool = True

    def refusal(self, clip: Clip) -> str:
        return "" if clip.flat else "AdaClip clips the whole scaled gradient to 1: set clip.kind = flat"

    def start(self, clip: Clip, size: int, rounds: int) -> Memory:
        first = adaclip.first(clip.bound.value(0, rounds), size)
        return Moments(first.mean, first.square)

    def bounds(self, clip: Clip, memory: Memory, time: Time) -> tuple[float, ...]:
        return (1.0,) * time.steps

    def vectors(self, memory: Memory) -> Mapping[str, np.ndarray]:
        assert isinstance(memory, Moments)
        return {"shift": memory.now.mean, "scale": adaclip.scale(memory.now)}

    def next(self, memory: Memory, seen: Seen) -> tuple[Memory, JsonObject]:
        assert isinstance(memory, Moments)
        variance = (adaclip.scale(memory.now).astype(np.float64) * seen.deviation) ** 2
        after = adaclip.follow(memory.now, seen.gradient, variance)
        return Moments(after.mean, after.square), {}


RULES: dict[str, Rule] = {rule.name: rule for rule in (Given(), Median(), Quantile(), AdaClip())}


class Clipped:
    """What `kind` and `norm` mean, for whatever has both."""

    kind: str
    norm: str

    @property
    def bounded(self) -> bool:
        """Is anything clipped at all?"""
        return self.kind != "none"

    @property
    def flat(self) -> bool:
        """Is the whole vector clipped as one?"""
        return self.kind == "flat"

    @property
    def by_layer(self) -> bool:
        """Is each layer clipped on its own?"""
        return self.kind == "layer"

    @property
    def order(self) -> int:
        """1 or 2: the order of the norm."""
        return ORDERS[self.norm]


@dataclass(frozen=True)
class Clip(Clipped):
    """What is bounded, in which norm.

    kind: "layer" bounds each layer on its own, "flat" the whole vector. split: the bound is divided among the layers, so
    that together they reach it. of: what an upload's bound is about: the update, or the whole model (NbAFL).
    """

    kind: Literal["none", "layer", "flat"] = "none"
    bound: Schedule = field(default_factory=lambda: constant(4.0))
    norm: Norm = "l2"
    rule: Rule = Given()
    split: bool = False
    of: Literal["update", "weights"] = "update"

    @property
    def of_weights(self) -> bool:
        """Is an upload bounded as a whole model?"""
        return self.of == "weights"

    def pieces(self, layers: Sequence[slice]) -> Sequence[slice]:
        """What is clipped each on its own: the layers, or the whole vector."""
        return layers if self.by_layer else (slice(None),)

    def joint(self, bound: float, layers: int) -> float:
        """Largest norm of one clipped contribution over all layers together: the only root of layers."""
        if not self.by_layer or self.split:
            return bound
        return bound * (layers if self.order == 1 else math.sqrt(layers))

    def piece(self, bound: float, layers: int) -> float:
        """What each clipped piece (a layer, or the whole) is clipped to."""
        return bound / math.sqrt(layers) if self.split and self.by_layer else bound

    def refusal(self) -> str:
        """Why these parts cannot work together, or ""."""
        if self.split and self.order == 1:
            return "clip.split divides an L2 bound among the layers: set clip.norm = l2 or clip.kind = flat"
        return self.rule.refusal(self)


@dataclass(frozen=True)
class Scale:
    """What a noise scale is a multiple of: the clip bound, the batch's largest clipped norm (l2-max), or the largest layer norm
    of the batch's mean gradient (l2-max-mean), which a comment in the papers' algorithm names where all else names the former."""

    name: str = "bound"
    unsound: str = ""
    batch: bool = False

    @property
    def of_mean(self) -> bool:
        """Is it the norm of the batch's mean gradient?"""
        return self.name == "l2-max-mean"


SCALES: dict[str, Scale] = {
    "bound": Scale(),
    "l2-max": Scale(
        "l2-max", "the noise scale is the largest norm of the batch, so it depends on the data and is itself visible", True
    ),
    "l2-max-mean": Scale(
        "l2-max-mean", "the noise scale is the norm of the batch's mean gradient, far below what one example can change", True
    ),
}
