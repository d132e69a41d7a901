"""A mechanism, a clip rule and an aggregation of somebody else's package: one class each, nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedveil.privacy.events import Noise
from fedveil.protect import exact
from fedveil.protect.aggregate import Mean, Merged
from fedveil.protect.clip import Clip, Given, Time
from fedveil.protect.law import Gaussian, Norm
from fedveil.protect.memory import Memory
from fedveil.protect.place import InStep
from fedveil.protect.recipe import Recipe


@dataclass(frozen=True)
class TwoGaussians(Gaussian):
    """The sum of two independent discrete Gaussians: drawn by no compiled kernel, worth what their variances are."""

    name: str = "two-gaussians"
    kernel: str = ""

    def draw(self, key: bytes, step: int, count: int, scale: float, shape: float) -> np.ndarray:
        return super().draw(key, step, count, scale / np.sqrt(2), shape) + super().draw(
            key, step + 4096, count, scale / np.sqrt(2), shape
        )

    def units(self, key: bytes, step: int, count: int, scale: float, shape: float, norm: Norm) -> np.ndarray:
        half = scale / np.sqrt(2)
        return exact.gaussian(key, step, count, half) + exact.gaussian(key, step + 4096, count, half)


@dataclass(frozen=True)
class Silent(Gaussian):
    """A law whose author proves nothing."""

    name: str = "silent"
    kernel: str = ""

    def worth(self, scale: float, shape: float, bound: float, norm: Norm, grid: float, dimension: int) -> Noise | None:
        return None


@dataclass(frozen=True)
class Boastful(TwoGaussians):
    """A law that claims twice the noise it draws."""

    name: str = "boastful"

    def units(self, key: bytes, step: int, count: int, scale: float, shape: float, norm: Norm) -> np.ndarray:
        return super().units(key, step, count, scale / 2, shape, norm)


@dataclass(frozen=True)
class Halving(Given):
    """The bound halves every round, from the schedule's first value."""

    name: str = "halving"

    def bounds(self, clip: Clip, memory: Memory, time: Time) -> tuple[float, ...]:
        return (clip.bound.value(0, time.rounds) / 2**time.index,) * time.steps


@dataclass(frozen=True)
class Calls(Memory):
    """How often the rule was asked."""

    count: int = 0


@dataclass(frozen=True)
class Cautious(Mean):
    """Goes half of the way, and counts."""

    name: str = "cautious"

    def init(self, size: int) -> Memory:
        return Calls()

    def direction(self, memory: Memory, merged: Merged) -> tuple[np.ndarray, Memory, dict[str, Any]]:
        assert isinstance(memory, Calls)
        return merged.mean / 2, replace(memory, count=memory.count + 1), {"asked": memory.count + 1}


def recipe(law: Any = TwoGaussians(), **more: Any) -> Recipe:
    return Recipe("own", clip=Clip(kind="flat", **more), law=law, place=InStep())


my_recipe = replace(recipe(rule=Halving()), aggregate=Cautious())
