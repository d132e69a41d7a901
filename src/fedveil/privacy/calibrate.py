"""The smallest noise that keeps a budget, for every mechanism; also the most steps, and side-by-side answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from fedveil.errors import UserError
from fedveil.jsons import JsonObject
from fedveil.privacy import checks
from fedveil.privacy.accountants import ACCOUNTANTS, Answer, answer
from fedveil.privacy.events import Event, MechanismName, Noise, Relation, Sampling, Unit
from fedveil.privacy.mechanisms import MECHANISMS, JointStaircase, Staircase, least_multiplier, mechanism

CLOSE = 5e-4  # stop when the epsilon reached is within this share below the target


@dataclass(frozen=True)
class Calibration:
    """noise_multiplier: noise scale over clip bound (sigma/C, b/C, 1/lambda). noise_std: standard deviation of one
    coordinate's noise at clip bound 1. epsilon: what the noise really reaches, never above the target."""

    mechanism: MechanismName
    noise_multiplier: float
    noise_std: float
    epsilon: float
    delta: float
    accountant: str
    verdict: str
    reason: str = ""
    lam: float | None = None
    nu: float | None = None

    def to_json(self) -> JsonObject:
        """Plain dictionary, with `lam` under its full name."""
        data = asdict(self)
        data["lambda"] = data.pop("lam")
        return data


def _target(epsilon: float, delta: float) -> tuple[float, float]:
    return checks.positive("epsilon", epsilon), checks.delta(delta)


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
    width: float = 1.0,
    relation: Relation = "zero-out",
    unit: Unit = "example",
    accountant: str = "pld",
) -> Calibration:
    """The smallest multiplier whose epsilon does not exceed `epsilon`, within 0.1% of it. width: as in `events.Noise`.

    Formal guarantee: the returned epsilon is the accountant's answer for the returned multiplier, at most the
    target; its verdict is the accountant's.
    """
    epsilon, delta = _target(epsilon, delta)
    checks.count("steps", steps, 1)
    checks.one_of("mechanism", mechanism, MECHANISMS)
    checks.one_of("accountant", accountant, tuple(ACCOUNTANTS))

    def judge(multiplier: float) -> Answer:
        noise = Noise(mechanism, multiplier, norm, dimension, nu, width)
        return answer([Event(noise, sampling, relation, unit, steps)], delta, accountant)

    rate = sampling.rate if sampling.kind == "poisson" else 1.0
    if sampling.kind == "fixed" and sampling.batch and sampling.population:
        rate = sampling.batch / sampling.population
    least = max(1e-9, least_multiplier(mechanism, width))
    multiplier, found = _solve(judge, epsilon, max(_guess(epsilon, delta, steps, rate), least), accountant, least)
    return _calibration(Noise(mechanism, multiplier, norm, dimension, nu, width), found)


def _calibration(noise: Noise, found: Answer) -> Calibration:
    assert found.epsilon is not None
    law = mechanism(noise)
    lam = law.lam if isinstance(law, Staircase | JointStaircase) else None
    nu = law.shape if isinstance(law, Staircase | JointStaircase) else None
    return Calibration(noise.mechanism, noise.multiplier, math.sqrt(law.variance()), found.epsilon, found.delta,
                       found.accountant, found.verdict, found.reason, lam, nu)  # fmt: skip


MOST_NOISE = 1e12  # no multiplier above is looked at


def _guess(epsilon: float, delta: float, steps: int, rate: float) -> float:
    """A first multiplier, from zCDP as if sampling scaled the loss; only a starting point."""
    log = -math.log(max(delta, 1e-12))
    root = epsilon / (math.sqrt(log + epsilon) + math.sqrt(log))  # their difference, without cancelling
    return min(max(rate * math.sqrt(steps / 2) / root, 0.3 if rate < 1 else 1e-3), MOST_NOISE)


def _solve(
    judge: Callable[[float], Answer], target: float, start: float, accountant: str, least: float
) -> tuple[float, Answer]:
    """Root of a decreasing function, approached from the safe (noisier) side, in logarithms, and not below `least`."""

    def look(multiplier: float) -> Answer:
        found = judge(multiplier)
        if found.epsilon is None:
            other = "" if accountant == "rdp" else " (try the accountant rdp)"
            raise UserError(f"Cannot calibrate with accountant {accountant}: {found.reason}{other}.")
        return found

    def value(found: Answer) -> float:
        return math.log(max(found.epsilon or 0.0, 1e-300) / target)

    high, low = start, start
    safe = bold = look(start)
    factor = 1.3
    while value(safe) > 0:
        low, bold = high, safe
        high, factor = high * factor, factor * 1.5
        if high > MOST_NOISE:
            raise UserError(
                f"No noise reaches epsilon {target:g} at this delta with the accountant {accountant}."
            )
        safe = look(high)
    factor = 1.3
    while value(bold) <= 0:
        high, safe = low, bold
        if high <= least:
            return high, safe  # practically no noise is needed
        low, factor = max(low / factor, least), factor * 1.5
        bold = look(low)
    for turn in range(80):
        if value(safe) >= -CLOSE:
            break
        top, bottom = math.log(high), math.log(low)
        share = value(safe) / (value(safe) - value(bold))  # 0 at high, 1 at low
        aim = share - 0.3 * CLOSE / max(value(bold) - value(safe), 1e-12)
        if turn % 3 == 2 or value(safe) < -100:
            aim = 0.5
        middle = math.exp(top + (bottom - top) * min(max(aim, 0.01), 0.99))
        found = look(middle)
        if value(found) <= 0:
            high, safe = middle, found
        else:
            low, bold = middle, found
    return high, safe


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
    """One calibration per mechanism, least noise first; where `accountant` refuses, rdp answers and says so."""
    found = []
    for name in mechanisms:
        probe = Event(Noise(name, 1.0, norm, dimension), sampling, relation, steps=1)
        able = answer([probe], max(delta, 1e-12), accountant).verdict != "none"
        found.append(calibrate(epsilon, delta, steps=steps, sampling=sampling, mechanism=name, norm=norm, dimension=dimension,
                               relation=relation, accountant=accountant if able else "rdp"))  # fmt: skip
    return tuple(sorted(found, key=lambda one: one.noise_std))


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
    width: float = 1.0,
    relation: Relation = "zero-out",
    accountant: str = "pld",
) -> int:
    """The largest number of steps that stays within the budget (0 if one step already exceeds it)."""
    epsilon, delta = _target(epsilon, delta)
    noise = Noise(mechanism, multiplier, norm, dimension, nu, width)

    def fits(steps: int) -> bool:
        found = answer([Event(noise, sampling, relation, steps=steps)], delta, accountant)
        if found.epsilon is None:
            raise UserError(f"Cannot count steps with accountant {accountant}: {found.reason}.")
        return found.epsilon <= epsilon

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, high * 2
        if high > 10**9:
            raise UserError("The budget allows more than a billion steps: nothing to stop for.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
