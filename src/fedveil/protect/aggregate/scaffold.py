"""SCAFFOLD: control variates that undo the drift of local training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from fedveil.jsons import JsonObject
from fedveil.protect.aggregate.base import Mean, Merged
from fedveil.protect.memory import Memory


@dataclass(frozen=True)
class Controls(Memory):
    """The server's control variate and those of the clients that took part so far."""

    control: np.ndarray | None = None
    own: Mapping[int, np.ndarray] = field(default_factory=dict)
    BROADCAST: ClassVar[tuple[str, ...]] = ("control", "own")


@dataclass(frozen=True)
class Scaffold(Mean):
    """c_i' = c_i - c - update_i / (steps * learning_rate);   c' = c + sum(c_i' - c_i) / population

    The rule assumes local SGD without momentum. Formal guarantee: the variates are functions of the updates given here and
    of earlier ones, so with updates that already carry their noise they are post-processing.
    """

    name: str = "scaffold"
    looks_inside: bool = True
    knows_senders: bool = True

    def init(self, size: int) -> Memory:
        return Controls(np.zeros(size, np.float32), {})

    def control(self, memory: Memory, client: int, size: int) -> np.ndarray | None:
        assert isinstance(memory, Controls) and memory.control is not None
        return (memory.control - memory.own.get(client, np.float32(0))).astype(np.float32)

    def direction(self, memory: Memory, merged: Merged) -> tuple[np.ndarray, Memory, JsonObject]:
        assert isinstance(memory, Controls) and memory.control is not None
        server = memory.control.astype(np.float64)
        fresh: dict[int, np.ndarray] = {}
        change = np.zeros_like(server)
        for client, update in zip(merged.clients, merged.updates, strict=True):
            old = np.asarray(memory.own.get(client, 0.0), np.float64)
            moved = np.asarray(update, np.float64) / (merged.steps * merged.learning_rate)
            fresh[client] = (old - server - moved).astype(np.float32)
            change = change + (fresh[client] - old)
        control = (server + change / merged.population).astype(np.float32)
        return merged.mean, Controls(control, {**memory.own, **fresh}), {}
