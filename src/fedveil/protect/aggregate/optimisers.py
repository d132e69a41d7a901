"""Server optimisers: the mean update taken as a gradient step by momentum or Adam."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedveil.protect.aggregate.base import Mean, stepped
from fedveil.protect.memory import Memory


@dataclass(frozen=True)
class Velocity(Memory):
    """The running sum of momentum."""

    momentum: np.ndarray | None = None


@dataclass(frozen=True)
class Momentum(Mean):
    """v = beta * v + direction; start + rate * v."""

    name: str = "momentum"
    beta: float = 0.9

    def init(self, size: int) -> Memory:
        return Velocity(np.zeros(size))

    def move(
        self, memory: Memory, start: np.ndarray, direction: np.ndarray, rate: float
    ) -> tuple[np.ndarray, Memory]:
        assert isinstance(memory, Velocity) and memory.momentum is not None
        moved = self.beta * memory.momentum + np.asarray(direction, np.float64)
        return stepped(start, moved, rate), Velocity(moved)


@dataclass(frozen=True)
class FirstAndSecond(Memory):
    """Adam's two running means."""

    first: np.ndarray | None = None
    second: np.ndarray | None = None


@dataclass(frozen=True)
class Adam(Mean):
    """Adam on the direction without bias correction, `floor` added to the root (FedAdam)."""

    name: str = "adam"
    beta1: float = 0.9
    beta2: float = 0.99
    floor: float = 1e-3

    def init(self, size: int) -> Memory:
        return FirstAndSecond(np.zeros(size), np.zeros(size))

    def move(
        self, memory: Memory, start: np.ndarray, direction: np.ndarray, rate: float
    ) -> tuple[np.ndarray, Memory]:
        assert isinstance(memory, FirstAndSecond) and memory.first is not None and memory.second is not None
        direction = np.asarray(direction, np.float64)
        first = self.beta1 * memory.first + (1 - self.beta1) * direction
        second = self.beta2 * memory.second + (1 - self.beta2) * direction**2
        return stepped(start, first / (np.sqrt(second) + self.floor), rate), FirstAndSecond(first, second)
