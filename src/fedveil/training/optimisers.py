"""Local optimisers: what a client does with a step's (clipped, noised) gradient.

Pure functions on vectors or stacks of vectors [..., P], torch or NumPy: `begin` gives the state, `step` the next weights
and state. Every engine calls these from identical gradients, so that the rules exist once.

Formal guarantee: post-processing. The noise is in the gradient before it comes here, and nothing here looks at an
example; a promise about the noised gradients carries over to everything that is computed from them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from fedveil.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

RULES = ("sgd", "adam", "adamw")
Vector = TypeVar("Vector", "Tensor", "np.ndarray")


@dataclass(frozen=True)
class Optimiser:
    """rule sgd: v = momentum * v + g, w -= rate * v (momentum is the plan's). adam: Kingma and Ba with bias correction,
    decay * w added to the gradient. adamw: decay * rate * w taken from the weights instead. State starts at zero in every
    round."""

    rule: Literal["sgd", "adam", "adamw"] = "sgd"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decay: float = 0.0


SGD = Optimiser()


def parse(text: str) -> Optimiser:
    """Read "adam" or "adamw:decay=0.01,beta1=0.9"."""
    rule, _, rest = text.partition(":")
    if rule not in RULES:
        raise UserError(
            f"local_optimiser = {text!r}: '{rule}' is not one of {', '.join(RULES)}.{did_you_mean(rule, RULES)}"
        )
    made = Optimiser(rule)  # type: ignore[arg-type]
    known = [field.name for field in fields(Optimiser) if field.name != "rule"]
    for item in filter(None, rest.split(",")):
        key, sign, value = (part.strip() for part in item.partition("="))
        if not sign or key not in known:
            raise UserError(
                f"local_optimiser = {text!r}: write options as key=value with the keys {', '.join(known)}."
                f"{did_you_mean(key, known)}"
            )
        try:
            made = replace(made, **{key: float(value)})  # type: ignore[arg-type]
        except ValueError:
            raise UserError(f"local_optimiser = {text!r}: {key} = {value!r} is not a number") from None
    if not (0 <= made.beta1 < 1 and 0 <= made.beta2 < 1 and made.epsilon > 0 and 0 <= made.decay < float("inf")):
        raise UserError(
            f"local_optimiser = {text!r}: beta1 and beta2 must be from 0 to below 1, epsilon above 0, decay 0 or more"
        )
    return made


def begin(optimiser: Optimiser, weights: Vector) -> tuple[Vector, ...]:
    """The state before the first step: first and second moment."""
    return () if optimiser.rule == "sgd" else (weights * 0, weights * 0)


def step(
    optimiser: Optimiser,
    state: tuple[Vector, ...],
    weights: Vector,
    gradient: Vector,
    rate: float,
    count: int,
    momentum: float = 0.0,
) -> tuple[Vector, tuple[Vector, ...]]:
    """(weights after step `count` (1, 2, …), state). Nothing is changed in place."""
    if optimiser.rule == "sgd":
        velocity = momentum * state[0] + gradient if state else gradient
        return weights - rate * velocity, ((velocity,) if momentum else ())
    if optimiser.rule == "adam" and optimiser.decay:
        gradient = gradient + optimiser.decay * weights
    first = optimiser.beta1 * state[0] + (1 - optimiser.beta1) * gradient
    second = optimiser.beta2 * state[1] + (1 - optimiser.beta2) * gradient * gradient
    if optimiser.rule == "adamw" and optimiser.decay:
        weights = weights - rate * optimiser.decay * weights
    root = (second / (1 - optimiser.beta2**count)) ** 0.5
    return weights - (rate / (1 - optimiser.beta1**count)) * (first / (root + optimiser.epsilon)), (first, second)
