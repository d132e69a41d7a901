"""From events to (epsilon, delta) with a verdict. See docs/accountants.md (bodies follow)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedveil.privacy.events import Event, Verdict

ACCOUNTANTS: dict[str, str] = {
    "basic": "sum of amplified step epsilons",
    "advanced": "advanced composition (Dwork-Rothblum-Vadhan)",
    "advanced-tanh": "advanced composition, tanh form",
    "optimal": "Kairouz-Oh-Viswanath",
    "zcdp": "zero-concentrated DP",
    "moments": "Renyi DP, old conversion",
    "rdp": "Renyi DP, today's conversion",
    "pld": "privacy loss distributions",
}


class Refused(Exception):
    """An accountant cannot judge an event; the message says why and what to use instead."""


@dataclass(frozen=True)
class Answer:
    """epsilon at the delta really paid. verdict "none" has epsilon None and a reason."""

    accountant: str
    epsilon: float | None
    delta: float
    verdict: Verdict
    reason: str = ""


def answer(events: Sequence[Event], delta: float, accountant: str = "pld", *, honest: bool = False) -> Answer:
    """Judge the composition of `events` at `delta`; refusals come back with verdict "none"."""
    return Composition.start(accountant, honest=honest).add(events).answer(delta)


@dataclass(frozen=True)
class Composition:
    """An immutable running composition: `add` is cheap, `answer` reuses what was already solved."""

    accountant: str = "pld"
    honest: bool = False
    _log: Any = None

    @staticmethod
    def start(accountant: str = "pld", *, honest: bool = False) -> Composition:
        return Composition(accountant, honest)

    def add(self, events: Sequence[Event]) -> Composition:
        raise NotImplementedError

    def answer(self, delta: float) -> Answer:
        raise NotImplementedError


def participation_epsilon(event: Event, rounds: int, rate: float, delta: float) -> Answer:
    """Epsilon when each of `rounds` is joined by a visible coin of `rate` and joining costs `event`."""
    raise NotImplementedError
