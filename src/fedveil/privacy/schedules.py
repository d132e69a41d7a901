"""How sigma or the clip bound moves over a run: data-independent, positive, known in advance.

A schedule given by end points has its last value in the last step, t = total - 1, whatever the total above 1 (a single step has
the first); the peaks of a triangular cycle fall to it, and the last step has it where the floor is no lower. So a run too short
for a second stair or cycle gets a shorter first one. One given by a rate loses that share of `first` per step (or per stair, or
per cycle). Steps are rounds or local iterations (`by`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from fedveil.errors import UserError
from fedveil.privacy import checks
from fedveil.privacy.mechanisms import Array

ScheduleKind = Literal[
    "constant", "linear", "staircase", "exponential", "cosine-cyclic", "triangular-cyclic", "learning-rate"
]
KINDS: tuple[str, ...] = get_args(ScheduleKind)


@dataclass(frozen=True)
class Schedule:
    """A sequence of positive numbers; `value(t, total)` with t = 0, ..., total - 1.

    linear       first (1 - rate t)
    staircase    first (1 - rate floor(t / every)); `every` defaults to a tenth of the run
    exponential  first exp(-rate t)
    cosine-cyclic      first/2 (1 + cos(pi t' / period)), restarting at first `cycles` times; never below `floor`; with a last
                       value, that one in the last step, wherever its cycle stands
    triangular-cyclic  from a peak down to `floor` and up again, half a cycle taking `every` steps; from cycle to
                       cycle the peak falls linearly, from first to last or by the share `rate` of first
    learning-rate      first times the learning rate of the round over that of the first round; the run's
                       configuration turns it into the linear schedule that this is (`following_rate`)
    """

    kind: ScheduleKind
    first: float
    last: float | None = None
    rate: float | None = None
    every: int | None = None
    cycles: int = 5
    floor: float | None = None
    by: Literal["round", "iteration"] = "round"

    def __post_init__(self) -> None:
        checks.one_of("schedule", self.kind, KINDS)
        checks.one_of("schedule's 'by'", self.by, ("round", "iteration"))
        checks.positive("schedule's first value", self.first)
        checks.count("schedule's cycles", self.cycles, 1)
        for name in ("last", "floor"):
            if getattr(self, name) is not None:
                checks.positive(f"schedule's {name}", getattr(self, name))
        if self.every is not None:
            checks.count("schedule's every", self.every, 1)
        if self.rate is not None:
            checks.positive("schedule's rate", self.rate)
            if self.last is not None:
                raise UserError(f"A {self.kind} schedule takes either a last value or a rate, not both.")
        cyclic = self.kind in ("cosine-cyclic", "triangular-cyclic")
        if cyclic and self.floor is None:
            raise UserError(
                f"A {self.kind} schedule falls towards 0 in every cycle, where epsilon explodes: give a floor, "
                f"e.g. {self.kind}:{self.first:g}:floor={self.first / 4:g}."
            )
        if cyclic and self.floor is not None and self.floor > self.first:
            raise UserError(
                f"schedule's floor must be at most the first value {self.first:g}, got {self.floor:g}."
            )
        if self.kind in ("linear", "staircase", "exponential") and self.last is None and self.rate is None:
            raise UserError(f"A {self.kind} schedule needs a last value ({self.kind}:15:4.85) or a rate=.")

    def value(self, t: int, total: int) -> float:
        """The value at step t of `total`."""
        total = checks.count("schedule's total", total, 1)
        if not 0 <= t < total:
            raise UserError(f"schedule step must be from 0 to {total - 1}, got {t}.")
        number = self._raw(t, total)
        if self.floor is not None:
            number = max(number, self.floor)
        if not number > 0:
            raise UserError(
                f"The {self.kind} schedule reaches {number:g} at step {t} of {total}: give a lower rate."
            )
        return number

    def _raw(self, t: int, total: int) -> float:
        last = self.first if self.last is None else self.last
        if self.kind == "constant":
            return self.first
        if self.kind == "learning-rate":
            raise UserError(
                "A schedule 'learning-rate' is for the clip bound of a run, whose learning rate it follows: it has no values of "
                "its own. Give them, e.g. linear:6:2."
            )
        steps = max(total - 1, 1)
        if self.kind == "linear":
            if self.rate is not None:
                return self.first * (1 - self.rate * t)
            return self.first + (last - self.first) * t / steps
        if self.kind == "staircase":
            every = self.every or max(1, math.ceil(total / 10))
            if self.rate is not None:
                return self.first * (1 - self.rate * (t // every))
            every = min(every, steps)  # no stair is as long as the run: its end would never come
            return self.first + (last - self.first) * (t // every) / (steps // every)
        if self.kind == "exponential":
            if self.rate is not None:
                return self.first * math.exp(-self.rate * t)
            found: float = self.first * (last / self.first) ** (t / steps)
            return found
        if self.kind == "cosine-cyclic":
            if self.last is not None and t == total - 1 > 0:
                return self.last
            period = math.ceil(total / self.cycles)
            return self.first / 2 * (math.cos(math.pi * (t % period) / period) + 1)
        half = self.every or max(1, math.ceil(total / (2 * self.cycles)))
        if self.last is not None:
            half = min(half, max(1, steps // 2))  # as with stairs: the last step begins a cycle of its own, or comes later
        cycle = t // (2 * half)
        peak = self.first + (last - self.first) * cycle / max(steps // (2 * half), 1)
        if self.rate is not None:
            peak = self.first * max(1 - self.rate * cycle, 0.0)
        bottom = min(self.floor or 0.0, peak)
        fallen = 1 - abs(1 - (t % (2 * half)) / half)
        return peak - (peak - bottom) * fallen  # a peak is met to the last bit

    def values(self, total: int) -> Array:
        """All values of a run of `total` steps."""
        return np.array([self.value(t, total) for t in range(total)])

    def per_iteration(self, rounds: int, iterations: int = 1) -> Array:
        """One value per local iteration of a run, whichever clock the schedule uses."""
        if self.by == "iteration":
            return self.values(rounds * iterations)
        return np.repeat(self.values(rounds), iterations)


def parse(text: str) -> Schedule:
    """Read "6", "constant:6", "linear:15:4.85", "staircase:15:4.85:every=10", "exponential:15:rate=0.01",
    "cosine-cyclic:15:floor=4:cycles=5"; add ":iteration" to move with local iterations."""
    kind, *rest = str(text).strip().split(":")
    if not rest:
        kind, rest = "constant", [kind]
    checks.one_of("schedule", kind, KINDS)
    numbers: list[float] = []
    named: dict[str, object] = {}
    for part in rest:
        name, equals, value = part.partition("=")
        if part in ("round", "iteration"):
            named["by"] = part
        elif not equals:
            numbers.append(_float(text, part))
        elif name in ("rate", "floor", "last"):
            named[name] = _float(text, value)
        elif name in ("every", "cycles"):
            named[name] = checks.count(f"schedule's {name}", value, 1)
        elif name == "by":
            named["by"] = value
        else:
            raise UserError(
                f"schedule {text!r}: unknown part {part!r}; known: rate=, floor=, every=, cycles=, by=."
            )
    if not 1 <= len(numbers) <= (1 if kind == "constant" else 2):
        raise UserError(f"schedule {text!r}: expected kind:first[:last], e.g. linear:15:4.85.")
    if len(numbers) == 2:
        named["last"] = numbers[1]
    return Schedule(kind, numbers[0], **named)  # type: ignore[arg-type]


def _float(text: str, part: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise UserError(f"schedule {text!r}: {part!r} is not a number.") from None


def following_rate(schedule: Schedule, learning_rate: float, learning_rate_end: float | None) -> Schedule:
    """A "learning-rate" schedule as what it is in a run whose learning rate moves linearly; others unchanged.

    Formal guarantee: data-independent, since the learning rates are."""
    if schedule.kind != "learning-rate":
        return schedule
    if learning_rate_end is None:
        return Schedule("constant", schedule.first)
    return Schedule("linear", schedule.first, schedule.first * learning_rate_end / learning_rate)


PAPERS_SIGMA = 6.0  # the fixed multiplier that the papers found to resist leakage


def resilient_start(bound: float, sigma: float, sensitivity: float) -> float:
    """P3's rule for a first noise multiplier that resists leakage: sigma_0 >= C sigma / S, so that with a smaller
    dynamic sensitivity S the first noise is as wide as that of the fixed bound C and multiplier sigma."""
    for name, value in (("bound", bound), ("sigma", sigma), ("sensitivity", sensitivity)):
        checks.positive(name, value)
    return bound * sigma / sensitivity


# What the published numbers were really computed from (papers.py reproduces them).

AUTHORS_STEP_EPSILON: dict[str, Callable[[Array], Array]] = {
    # epsilon of step t before amplification; sigma_t = sqrt(2 ln 125000) / epsilon_t
    "linear": lambda t: t / 10000 + 0.30747,
    "staircase": lambda t: 0.1 * np.floor(t / 1000) + 0.35747,
    "exponential": lambda t: np.exp(1.664 * t / 10000 - 1.1809),
}

AUTHORS_ROUND_SIGMA: dict[str, Callable[[Array], Array]] = {
    # sigma of round t = 0, ..., 99 in the released training code
    "linear": lambda t: 15 - 10.15 * t / 100,
    "exponential": lambda t: np.exp((100 - t) * 1.13 / 100 + 1.58),
    "cosine": lambda t: 15 * np.cos(1.24 * t / 100),
    # operator precedence floors the product, so this one steps through whole numbers and ends at 4
    "staircase": lambda t: np.floor(-1.015 * t / 10) + 15,
}
