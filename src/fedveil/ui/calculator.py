"""The epsilon calculator: one kind of noisy step, judged by every accountant; or the noise for an epsilon."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from fedveil.errors import UserError
from fedveil.jsons import JsonObject
from fedveil.privacy import checks
from fedveil.privacy.accountants import ACCOUNTANTS, Answer, answer
from fedveil.privacy.calibrate import calibrate
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
) -> list[JsonObject]:
    """Epsilon by all accountants, tightest sound one first; refusals and nominal numbers keep their reason.

    sigma: noise scale over clip bound. rate: Poisson sampling rate of a record. layers: clipped one by one to the
    same bound. honest: basic, advanced and optimal composition pay the whole delta.
    """
    checks.positive("sigma", sigma)
    _check(mechanism, rate, steps, delta, layers, norm, dimension)
    cost = Clip(kind="layer", norm=norm).joint(1.0, layers)  # type: ignore[arg-type]
    event = Event(Noise(mechanism, sigma / cost, norm, dimension), _sampling(rate), steps=steps)  # type: ignore[arg-type]
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


def find_sigma(
    epsilon: float, mechanism: str = "gaussian", rate: float = 1.0, steps: int = 1, delta: float = 1e-5, layers: int = 1,
    norm: str = "l2", dimension: int = 1,
) -> JsonObject:  # fmt: skip
    """The noise for an epsilon: a sigma of four digits whose epsilon (by pld) is at most that, and hardly less.

    Formal guarantee: the epsilon returned is the accountant's answer for the sigma that is returned; rounding only adds noise.
    """
    _check(mechanism, rate, steps, delta, layers, norm, dimension)
    checks.count("steps", steps, 1)
    cost = Clip(kind="layer", norm=norm).joint(1.0, layers)  # type: ignore[arg-type]
    more: dict[str, Any] = {"mechanism": mechanism, "norm": norm, "dimension": dimension}
    found = calibrate(epsilon, delta, steps=steps, sampling=_sampling(rate), **more)
    sigma = _up(found.noise_multiplier * cost)
    event = Event(Noise(mechanism, sigma / cost, norm, dimension), _sampling(rate), steps=steps)  # type: ignore[arg-type]
    reached = answer([event], delta, "pld")
    return {"sigma": sigma, "epsilon": reached.epsilon, "verdict": reached.verdict, "reason": reached.reason}


def _up(value: float) -> float:
    """The next number of four digits that is not below the value."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return float(f"{math.ceil(value / unit * (1 + 1e-12)) * unit:.6g}")


def _sampling(rate: float) -> Sampling:
    return Sampling("poisson", rate) if rate < 1 else Sampling()


def _check(mechanism: str, rate: float, steps: int, delta: float, layers: int, norm: str, dimension: int) -> None:
    checks.one_of("mechanism", mechanism, MECHANISMS)
    checks.one_of("norm", norm, ("l1", "l2"))
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
