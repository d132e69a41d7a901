"""The two-valued mechanism on weights (LDP-FL): one bit per weight, exactly epsilon-LDP per reported weight.

A weight w is clipped into [c - r, c + r] and reported as c + rK or c - rK with K = (e^eps + 1) / (e^eps - 1),
so that the report's mean is the clipped weight. Both possible values follow from public numbers (c, r,
eps), so one bit per weight travels. Ranges come from an agreement before training or from the server's
already private average; never from a client's own weights, because the two values reveal (c, r) exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal, localcontext
from typing import TYPE_CHECKING, Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedveil.errors import UserError

if TYPE_CHECKING:
    from fedveil.models.layout import Layout

GRAIN = 2**53  # probabilities are whole multiples of 1/GRAIN

_CLIENT_RANGE = (
    "a range computed from a client's own weights is not private: the two values a client may report are "
    "c - rK and c + rK, so its reports reveal its (c, r) exactly and no epsilon holds. "
    "Use ranges = 'fixed' (agreed before training) or ranges = 'adaptive' (computed by the server from its "
    "already private average)."
)


@dataclass(frozen=True)
class Ranges:
    """Per layer the centre and radius of the interval that weights are clipped into.

    source: "agreed" (fixed before training, data-independent) or "server-average" (post-processing of
    reports). "client" is refused.
    """

    centre: tuple[float, ...]
    radius: tuple[float, ...]
    source: str = "agreed"

    def __post_init__(self) -> None:
        if self.source == "client":
            raise UserError(f"ranges: {_CLIENT_RANGE}")
        if self.source not in ("agreed", "server-average"):
            raise UserError(f"ranges: unknown source {self.source!r}; use 'agreed' or 'server-average'.")
        if len(self.centre) != len(self.radius):
            raise UserError(
                f"ranges: {len(self.centre)} centres but {len(self.radius)} radii; give one per layer."
            )
        for layer, (c, r) in enumerate(zip(self.centre, self.radius, strict=True)):
            if not (math.isfinite(c) and math.isfinite(r) and r > 0):
                raise UserError(
                    f"ranges: layer {layer} has centre {c} and radius {r}; need a finite centre and a "
                    "finite radius above 0."
                )


def fixed_ranges(
    layout: Layout, radius: float | Sequence[float], centre: float | Sequence[float] = 0.0
) -> Ranges:
    """The same (or given) centre and radius for every layer, agreed before training."""

    def per_layer(value: float | Sequence[float], name: str) -> tuple[float, ...]:
        if isinstance(value, (int, float)):
            return (float(value),) * layout.layers
        if len(value) != layout.layers:
            raise UserError(
                f"ranges: {len(value)} values for {name}, but the model has {layout.layers} layers."
            )
        return tuple(float(v) for v in value)

    return Ranges(per_layer(centre, "centre"), per_layer(radius, "radius"))


def model_ranges(weights: np.ndarray, layout: Layout, smallest: float = 1e-4) -> Ranges:
    """Each layer's interval from its smallest to its largest weight in a public model, usually the first one:
    the prior that clients and server agree on when the weights are initialised.

    Formal guarantee: none is needed where the model does not depend on any client's data, as random weights do.
    """
    found = adaptive_ranges(weights, layout, smallest=smallest)
    return Ranges(found.centre, found.radius, source="agreed")


def adaptive_ranges(
    average: np.ndarray,
    layout: Layout,
    *,
    rule: Literal["extremes", "spread"] = "extremes",
    smallest: float = 1e-4,
    noise_variance: np.ndarray | None = None,
    width: float = 3.0,
) -> Ranges:
    """New ranges per layer from the server's average of private reports.

    extremes: the interval from the layer's smallest to its largest average weight (as published). The average
    carries noise of about rK/sqrt(n) per weight, so with few clients or small epsilon these ranges grow
    from round to round.  spread: centre = mean, radius = width * standard deviation after subtracting
    `noise_variance` [P] (see `average_variance`); it does not feed on its own noise.  No radius falls below
    `smallest`.

    Formal guarantee: post-processing of reports that were each epsilon-LDP given the previous (public)
    ranges; costs nothing. Pass only weights that were computed from reports.
    """
    centres, radii = [], []
    for part in layout.layer_slices():
        w = np.asarray(average[part], dtype=np.float64)
        if rule == "extremes":
            low, high = float(w.min()), float(w.max())
            centre, radius = (low + high) / 2, (high - low) / 2
        elif rule == "spread":
            noise = 0.0 if noise_variance is None else float(np.mean(noise_variance[part]))
            centre, radius = float(w.mean()), width * math.sqrt(max(0.0, float(w.var()) - noise))
        else:
            raise UserError(f"ranges: unknown adaptive rule {rule!r}; use 'extremes' or 'spread'.")
        centres.append(centre)
        radii.append(max(radius, smallest))
    return Ranges(tuple(centres), tuple(radii), source="server-average")


def amplitude(epsilon: float) -> float:
    """K = (e^eps + 1) / (e^eps - 1): how far beyond the range's end the reported values lie."""
    _check_epsilon(epsilon)
    return 1.0 / math.tanh(epsilon / 2)


def least_chance(epsilon: float) -> int:
    """The smallest probability of either report, in units of 1/GRAIN, rounded *up* so that the ratio
    (GRAIN - t) / t never exceeds e^eps."""
    _check_epsilon(epsilon)
    with localcontext() as context:
        context.prec = 80
        return max(1, int((GRAIN / (1 + Decimal(epsilon).exp())).to_integral_value(rounding=ROUND_CEILING)))


def thresholds(weights: np.ndarray, ranges: Ranges, epsilon: float, layout: Layout) -> np.ndarray:
    """P(bit = 1) of each weight in whole units of 1/GRAIN (uint64)."""
    centre, radius = per_weight(ranges, layout)
    w = np.asarray(weights, dtype=np.float64)
    if w.shape != (layout.size,):
        raise UserError(f"weights have shape {w.shape}, the layout has {layout.size} parameters.")
    offset = np.clip((w - centre) / radius, -1.0, 1.0)
    # A diverged (NaN) weight is reported like the centre: refusing aloud would itself tell something.
    np.nan_to_num(offset, copy=False, nan=0.0)
    chance = np.floor((0.5 + 0.5 * math.tanh(epsilon / 2) * offset) * GRAIN).astype(np.uint64)
    least = least_chance(epsilon)
    found: np.ndarray = np.clip(chance, np.uint64(least), np.uint64(GRAIN - least))
    return found


def encode(weights: np.ndarray, ranges: Ranges, epsilon: float, layout: Layout, key: bytes) -> np.ndarray:
    """One report bit per weight, packed: uint8 [ceil(P / 8)], first weight in the highest bit.

    `key` (32 bytes, secret, used for this client and round only, e.g. `keys.derive(root, "ldp", round,
    client)`) opens an AES-256 counter stream; each weight takes one 53-bit uniform integer from it.

    Formal guarantee: each bit is exactly epsilon-LDP as a function of its weight (pure, any two real values
    incl. NaN), if the key is uniformly random and the ranges do not depend on this client's data other than
    through
    earlier reports: integer probabilities are clamped to [t, 2^53 - t] with (2^53 - t)/t <= e^eps, so
    floating-point rounding cannot exceed epsilon. All P bits of a round together are P * epsilon-LDP for
    the client. The price of the grain is a bias below 2^-51 * r * K per weight.
    """
    draws = random_words(key, layout.size) >> np.uint64(11)
    return np.packbits(draws < thresholds(weights, ranges, epsilon, layout))


def decode(packed: np.ndarray, ranges: Ranges, epsilon: float, layout: Layout) -> np.ndarray:
    """The reported values c + rK or c - rK as float64 [P]; unbiased for the clipped weights."""
    centre, radius = per_weight(ranges, layout)
    bits = np.unpackbits(np.asarray(packed, dtype=np.uint8), count=layout.size)
    return centre + radius * amplitude(epsilon) * (2.0 * bits - 1.0)


def clip(weights: np.ndarray, ranges: Ranges, layout: Layout) -> np.ndarray:
    """Weights clipped into their layer's range (float64), the value that a report is unbiased for."""
    centre, radius = per_weight(ranges, layout)
    return np.clip(np.asarray(weights, dtype=np.float64), centre - radius, centre + radius)


def variance(weights: np.ndarray, ranges: Ranges, epsilon: float, layout: Layout) -> np.ndarray:
    """Variance of each report: r^2 K^2 - (w - c)^2 (w clipped). Between r^2 (K^2 - 1) and r^2 K^2."""
    centre, radius = per_weight(ranges, layout)
    found: np.ndarray = (radius * amplitude(epsilon)) ** 2 - (clip(weights, ranges, layout) - centre) ** 2
    return found


def average_variance(
    average: np.ndarray, ranges: Ranges, epsilon: float, layout: Layout, arrived: np.ndarray | int
) -> np.ndarray:
    """Upper estimate, from public numbers only, of the noise variance in the server's average per weight."""
    centre, radius = per_weight(ranges, layout)
    inside = np.minimum(np.abs(np.asarray(average, dtype=np.float64) - centre), radius)
    found: np.ndarray = ((radius * amplitude(epsilon)) ** 2 - inside**2) / np.maximum(1, arrived)
    return found


def random_words(key: bytes, count: int) -> np.ndarray:
    """`count` uniform 64-bit words: the AES-256 counter stream of `key`, starting at counter 0."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8")


def per_weight(ranges: Ranges, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Centre and radius of every single weight (float64 [P] each)."""
    if len(ranges.centre) != layout.layers:
        raise UserError(f"ranges are for {len(ranges.centre)} layers, the model has {layout.layers}.")
    centre, radius = np.empty(layout.size), np.empty(layout.size)
    for part, c, r in zip(layout.layer_slices(), ranges.centre, ranges.radius, strict=True):
        centre[part], radius[part] = c, r
    return centre, radius


def _check_epsilon(epsilon: float) -> None:
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise UserError(f"epsilon = {epsilon}: the two-valued mechanism needs a finite epsilon above 0.")
