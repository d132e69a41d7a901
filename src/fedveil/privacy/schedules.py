"""How sigma or the clip bound moves over a run (bodies follow)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["constant", "linear", "staircase", "exponential", "cosine-cyclic", "triangular-cyclic"]


@dataclass(frozen=True)
class Schedule:
    """A data-independent sequence of positive numbers. `value(t, total)` with t = 0, ..., total-1."""

    kind: ScheduleKind
    first: float
    last: float | None = None
    rate: float | None = None
    every: int | None = None
    cycles: int = 5
    floor: float | None = None
    by: Literal["round", "iteration"] = "round"

    def value(self, t: int, total: int) -> float:
        raise NotImplementedError


def parse(text: str) -> Schedule:
    """Read e.g. "6", "constant:6", "linear:15:4.85", "exponential:15:4.85:iteration"."""
    raise NotImplementedError
