"""The smallest noise that keeps a budget (bodies follow)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedveil.privacy.events import MechanismName, Relation, Sampling, Unit


@dataclass(frozen=True)
class Calibration:
    """noise_multiplier: noise scale over clip bound (sigma/C, b/C, 1/lambda). noise_std at clip bound 1."""

    mechanism: MechanismName
    noise_multiplier: float
    noise_std: float
    epsilon: float
    delta: float
    accountant: str
    verdict: str
    reason: str = ""
    lam: float | None = None  # Staircase lambda (printed as "lambda")
    nu: float | None = None


def calibrate(
    epsilon: float,
    delta: float,
    *,
    steps: int = 1,
    sampling: Sampling = Sampling(),
    mechanism: MechanismName = "gaussian",
    norm: Literal["l1", "l2"] = "l2",
    dimension: int = 1,
    nu: float | None = None,
    relation: Relation = "zero-out",
    unit: Unit = "example",
    accountant: str = "pld",
) -> Calibration:
    """Smallest multiplier whose epsilon does not exceed `epsilon` (and is within 0.1% of it)."""
    raise NotImplementedError


def compare_mechanisms(
    epsilon: float,
    delta: float,
    *,
    mechanisms: Sequence[MechanismName] = ("gaussian", "laplace", "staircase", "joint-staircase"),
    accountant: str = "pld",
    steps: int = 1,
    sampling: Sampling = Sampling(),
    norm: Literal["l1", "l2"] = "l2",
    dimension: int = 1,
    relation: Relation = "zero-out",
) -> tuple[Calibration, ...]:
    """One calibration per mechanism, least noise first; refused ones use "rdp" and say so."""
    raise NotImplementedError


def steps_within(
    epsilon: float,
    delta: float,
    *,
    multiplier: float,
    sampling: Sampling = Sampling(),
    mechanism: MechanismName = "gaussian",
    norm: Literal["l1", "l2"] = "l2",
    dimension: int = 1,
    nu: float | None = None,
    relation: Relation = "zero-out",
    accountant: str = "pld",
) -> int:
    """Largest number of steps that stays within the budget."""
    raise NotImplementedError


@dataclass(frozen=True)
class Budget:
    """One client's own budget and mechanism."""

    epsilon: float
    delta: float
    mechanism: MechanismName = "gaussian"


def calibrate_clients(budgets: Sequence[Budget], **shared: object) -> tuple[Calibration, ...]:
    """One calibration per client; equal budgets are solved once. `shared` as in `calibrate`."""
    raise NotImplementedError
