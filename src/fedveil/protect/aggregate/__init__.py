"""Aggregation rules, one file each. `RULES` are those that a configuration may name; any object like them will do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedveil.errors import UserError
from fedveil.jsons import JsonObject
from fedveil.keys import derive
from fedveil.protect.aggregate.base import Mean, Merged
from fedveil.protect.aggregate.fedmed import FedMed
from fedveil.protect.aggregate.optimisers import Adam, Momentum
from fedveil.protect.aggregate.scaffold import Scaffold
from fedveil.protect.memory import Memory

__all__ = ["RULES", "Adam", "Aggregator", "Connectivity", "FedMed", "Mean", "Merged", "Momentum", "Scaffold"]


class Aggregator(Protocol):
    """See `Mean`, whose methods say what each is for."""

    @property
    def name(self) -> str: ...
    @property
    def looks_inside(self) -> bool: ...
    @property
    def knows_senders(self) -> bool: ...
    @property
    def needs_public(self) -> bool: ...

    def init(self, size: int) -> Memory: ...
    def control(self, memory: Memory, client: int, size: int) -> np.ndarray | None: ...
    def direction(self, memory: Memory, merged: Merged) -> tuple[np.ndarray, Memory, JsonObject]: ...
    def move(
        self, memory: Memory, start: np.ndarray, direction: np.ndarray, rate: float
    ) -> tuple[np.ndarray, Memory]: ...


@dataclass(frozen=True)
class Connectivity(Mean):
    """Mode connectivity on the (already noised) client models, with the server's public data (`aggregate.connectivity`)."""

    name: str = "connectivity"
    looks_inside: bool = True
    needs_public: bool = True

    def direction(self, memory: Memory, merged: Merged) -> tuple[np.ndarray, Memory, JsonObject]:
        if len(merged.updates) < 2:
            return merged.mean, memory, {}
        if merged.public is None or merged.module is None:
            raise UserError("aggregate = connectivity needs public data at the server: set validation = 0.1 or more")
        from fedveil.protect.aggregate import connectivity  # torch is loaded only where it is used

        found = connectivity.merge(
            merged.start + np.stack(merged.updates),
            merged.module,
            merged.layout,
            *merged.public,
            derive(merged.seed, "connectivity", merged.number),
            connectivity.Search(curve=merged.curve),
            loss=merged.loss,
        )
        paths = [
            {
                "level": r.level,
                "pair": list(r.pair),
                "straight": r.straight.tolist(),
                "trained": r.trained.tolist(),
                "steps": r.steps,
            }
            for r in found.paths
        ]
        return found.weights.astype(np.float64) - merged.start, memory, {"paths": paths}


RULES: dict[str, Aggregator] = {
    rule.name: rule for rule in (Mean(), Scaffold(), FedMed(), Momentum(), Adam(), Connectivity())
}
