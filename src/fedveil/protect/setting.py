"""Public facts of a run, and of one round, from which noise and promises follow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Public facts of a run that a promise needs.

    colluders: how many participants may put together what they know (each knows at least its own coins and reports).
    """

    clients: int
    cohort: float  # expected clients per round
    rounds: int
    steps: int  # local steps per round
    batch: float  # expected batch size per client and step
    examples: int  # |D|, distinct training examples
    layers: int
    dimension: int
    copies: int = 1  # clients that may hold the same example
    colluders: int = 1
    nominal_rate: float | None = None  # q as a paper prints it, for its own count alone; no sound claim looks at it
    engine: str = "native"  # whose sums are noised; the slack of rounding is that of the loosest proven one


@dataclass(frozen=True)
class Moment:
    """What a recipe's schedules and memories gave for one round: one value per local step (or one for all)."""

    number: int
    bounds: tuple[float, ...]
    sigmas: tuple[float, ...]
    epsilon: float | None = None
    arrived: int | None = None  # reports that are sure to reach the shuffler
    weakest: float | None = None  # budget of the client whose model the others are pulled to (UDP-FL)
