"""Checks of numbers that people type: each failure names the option and the allowed range."""

from __future__ import annotations

import math

from fedveil.errors import UserError, did_you_mean

MOST = 10**15  # of any count: beyond it floating point no longer tells neighbours apart
MOST_STEPS = 10**12


def _short(value: object) -> str:
    """The value as shown in a message, which stays readable whatever was given."""
    try:
        text = repr(value)
    except ValueError:  # an integer with thousands of digits
        text = "a number with thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def _number(option: str, value: object, allowed: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # what has no number raises TypeError
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{option} must be {allowed}, got {_short(value)}.") from None
    if math.isnan(number) or isinstance(value, bool):
        raise UserError(f"{option} must be {allowed}, got {_short(value)}.")
    return number


def positive(option: str, value: object) -> float:
    """A finite number above 0."""
    allowed = "a finite number greater than 0"
    number = _number(option, value, allowed)
    if not 0 < number < math.inf:
        raise UserError(f"{option} must be {allowed}, got {_short(value)}.")
    return number


def fraction(option: str, value: object) -> float:
    """A sampling rate: greater than 0 and at most 1."""
    allowed = "greater than 0 and at most 1"
    number = _number(option, value, allowed)
    if not 0 < number <= 1:
        raise UserError(f"{option} must be {allowed}, got {_short(value)}.")
    return number


def delta(value: object, option: str = "delta") -> float:
    """A delta: at least 0 and less than 1."""
    allowed = "at least 0 and less than 1"
    number = _number(option, value, allowed)
    if not 0 <= number < 1:
        raise UserError(f"{option} must be {allowed}, got {_short(value)}.")
    return number


def unit_interval(option: str, value: object) -> float:
    """A number from 0 to 1, both included."""
    allowed = "from 0 to 1"
    number = _number(option, value, allowed)
    if not 0 <= number <= 1:
        raise UserError(f"{option} must be {allowed}, got {_short(value)}.")
    return number


def count(option: str, value: object, least: int = 0, most: int = MOST) -> int:
    """A whole number, at least `least` and at most `most`."""
    allowed = f"a whole number of at least {least}" + (f" and at most {most}" if most < MOST else "")
    number = _number(option, value, allowed)
    if not math.isfinite(number) or number != int(number) or not least <= number <= most:
        raise UserError(f"{option} must be {allowed}, got {_short(value)}.")
    return int(number)


def one_of(option: str, value: object, known: tuple[str, ...]) -> str:
    """One of the known names."""
    if value not in known:
        raise UserError(
            f"{option} must be one of {', '.join(known)}, got {_short(value)}.{did_you_mean(_short(value), known)}"
        )
    return str(value)
