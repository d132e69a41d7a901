"""NbAFL's own formulas: noise from an epsilon that the method itself states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedveil.protect.udp import nbafl_scales


class Formula(Protocol):
    """Turns a recipe's epsilon into (sigma, downlink sigma), both over the clip bound."""

    @property
    def exposures(self) -> float: ...  # how often a client's uploads are seen; 0: in every round it takes part in

    def noise(
        self, epsilon: float, delta: float, clip: float, smallest: int, clients: int, rounds: int, seen: int
    ) -> tuple[float, float]: ...


@dataclass(frozen=True)
class Nbafl:
    """Formal guarantee: none by itself; the ledger states what this noise is worth, as for any other."""

    exposures: float = 0.0

    def noise(
        self, epsilon: float, delta: float, clip: float, smallest: int, clients: int, rounds: int, seen: int
    ) -> tuple[float, float]:
        up, down = nbafl_scales(epsilon, delta, clip, smallest, clients, rounds, round(self.exposures) or seen)
        return up / clip, down / clip
