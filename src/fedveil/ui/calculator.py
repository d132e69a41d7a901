"""The epsilon calculator: one kind of noisy step, judged by every accountant."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from fedveil.errors import UserError
from fedveil.privacy import checks
from fedveil.privacy.accountants import ACCOUNTANTS, Answer, answer
from fedveil.privacy.events import Event, Noise, Sampling
from fedveil.protect.clip import Clip
from fedveil.report.words import meaning, strength

MECHANISMS = ("gaussian", "laplace", "staircase", "joint-staircase")
MOST_STEPS = 10_000_000
MOST_DIMENSION = 10_000_000


def calculate(
    mechanism: str = "gaussian",
    sigma: float = 1.0,
    rate: float = 1.0,
    steps: int = 1,
    delta: float = 1e-5,
    layers: int = 1,
    norm: str = "l2",
    dimension: int = 1,
    honest: bool = False,
) -> list[dict[str, Any]]:
    """Epsilon by all accountants, tightest sound one first; refusals and nominal numbers keep their reason.

    sigma: noise scale over clip bound. rate: Poisson sampling rate of a record. layers: clipped one by one to the
    same bound. honest: basic, advanced and optimal composition pay the whole delta.
    """
    checks.one_of("mechanism", mechanism, MECHANISMS)
    checks.one_of("norm", norm, ("l1", "l2"))
    checks.positive("sigma", sigma)
    checks.fraction("rate", rate)
    checks.delta(delta)
    for name, value, most in (
        ("steps", steps, MOST_STEPS),
        ("dimension", dimension, MOST_DIMENSION),
        ("layers", layers, 10_000),
    ):
        checks.count(name, value, 0 if name == "steps" else 1)
        if value > most:
            raise UserError(f"{name} {value}: at most {most} here; the command `fedveil epsilon` takes more.")
    cost = Clip(kind="layer", norm=norm).joint(1.0, layers)  # type: ignore[arg-type]
    sampling = Sampling("poisson", rate) if rate < 1 else Sampling()
    event = Event(Noise(mechanism, sigma / cost, norm, dimension), sampling, steps=steps)  # type: ignore[arg-type]
    rows = []
    for name, title in ACCOUNTANTS.items():
        try:
            found = answer([event], delta, name, honest=honest)
        except (ArithmeticError, ValueError):
            found = Answer(name, None, delta, "none", "the numbers are too extreme for this method")
        finite = found.epsilon if found.epsilon is not None and math.isfinite(found.epsilon) else None
        rows.append(
            {
                **asdict(found),
                "epsilon": finite,
                "title": title,
                "meaning": meaning(finite, found.delta, found.verdict),
                "strength": strength(finite, found.verdict),
            }
        )
    order = {"sound": 0, "nominal": 1, "none": 2}
    return sorted(
        rows, key=lambda r: (order[r["verdict"]], r["epsilon"] if r["epsilon"] is not None else math.inf)
    )
