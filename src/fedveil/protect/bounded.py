"""Clips that hold in floating point: norms, factors, clipped vectors, and what rounding may add to a sum.

What is promised. Let c_i be what example (or client) i adds to the sum that gets noise, and |.| the norm of the clip (l2 or
l1, per layer where layers are clipped on their own). For any weights, features and bounds that are accepted:

    |c_i| <= bound                                                            (each contribution, `MARGIN`)
    |sum(D) - sum(D')| <= bound * (1 + rounding_slack(...))                   (D' = D without one example)

Why a contribution keeps its bound. The norm is taken in float64 of the float32 numbers that are then summed (of both
factors of an outer product in dense layers): squares of float32 numbers are exact in float64 and neither vanish nor
overflow, so a norm of n numbers is right to a relative (n + 4) 2**-53, below 2**-25 for n <= 2**27. The factor is
bound (1 - MARGIN) / norm if that is below 1, else 1. Engines that scale in float32 round twice, by at most 2**-24 each, and
put numbers below the smallest normal one to 0 rather than to a neighbour:
(1 - 2**-22) (1 + 2**-24)**2 (1 + 2**-25) < 1. A vector that is not finite contributes nothing.
Where the native engine sums a convolution's gradient without writing it out (large nets, at most 16 positions), the norm that
is clipped is an upper bound of that of the rounded gradient (backward.h: ghost_norm), and the factor is applied in float64.

Why the sum does. An example's contribution is computed from the weights and that example alone, never by code that
depends on how many others are in the batch or where it stands: the exact sums of D and D' differ by c_i. What remains
is the rounding of the sums themselves. Adding n terms in any order with unit roundoff u, each term rounded once more as a
product, errs by at most g = (n + 1) u / (1 - (n + 1) u) times the sum of the terms' sizes, coordinate by coordinate, hence
by at most g * n * bound in l2 and in l1. It happens once for D and once for D'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedveil.errors import UserError

MARGIN = 2.0**-22  # by so much a clipped vector stays below its bound: more than all rounding before the sum
ORDERS = {"l1": 1, "l2": 2}  # of the norms that a clip may have
COVERED = ("native", "stacked", "graph", "functional", "reference", "clients")
SMALLEST_BOUND, LARGEST_BOUND = 1e-20, 1e20
BLOCK = 32  # the native and the stacked engine add so many products in float32; the native one before they go to a float64 sum …
NATIVE_SLACK = 2.0**-11  # … or fewer, so that this holds for batches of any size
_UNIT32, _UNIT64, _TINY32 = 2.0**-24, 2.0**-53, 2.0**-126


def check_bound(bound: float, where: str) -> None:
    """Refuse a clip bound that arithmetic could not keep. Infinity means no clip and is accepted."""
    if bound == math.inf or SMALLEST_BOUND <= bound <= LARGEST_BOUND:
        return
    raise UserError(
        f"{where} = {bound:g}: a clip bound must be between {SMALLEST_BOUND:g} and {LARGEST_BOUND:g}, where it can be "
        "kept in floating point. Choose a bound near the usual gradient norms (0.1 to 10)."
    )


def factor(norm: float, bound: float) -> float:
    """What a vector of this norm is multiplied by; 0 where the norm is not finite."""
    if not math.isfinite(norm):
        return 0.0
    limit = bound * (1 - MARGIN)
    return 1.0 if norm <= limit else limit / norm


def norm_of(vector: np.ndarray, kind: str = "l2") -> float:
    """The norm in float64, of values scaled so that nothing vanishes or overflows; NaN and infinity stay."""
    wide = np.abs(np.asarray(vector, np.float64))
    peak = float(wide.max(initial=0.0))
    if peak == 0 or not math.isfinite(peak):
        return peak
    wide = np.ldexp(wide, -math.frexp(peak)[1])  # exact but for what is 2**-1022 of the largest
    size = float(wide.sum()) if ORDERS[kind] == 1 else math.sqrt(float(np.square(wide).sum()))
    return float(np.ldexp(size, math.frexp(peak)[1]))


def clip_vector(
    vector: np.ndarray, bound: float, pieces: Sequence[slice] = (slice(None),), kind: str = "l2"
) -> np.ndarray:
    """A copy with every piece scaled into the bound, in the vector's own dtype.

    Formal guarantee: the exact norm of each piece of the result is at most `bound`: products are rounded towards 0,
    so no coordinate ends above factor * coordinate. A piece that is not finite becomes 0.
    """
    out = np.array(vector)
    for piece in pieces:
        size = norm_of(out[piece], kind)
        by = factor(size, bound)
        if by == 1.0:
            continue
        if not math.isfinite(size):
            out[piece] = 0
            continue
        exact = out[piece].astype(np.float64) * by
        near = exact.astype(out.dtype)
        out[piece] = np.where(np.abs(near) > np.abs(exact), np.nextafter(near, near.dtype.type(0)), near)
    return out


def check_start(start: np.ndarray, bound: float) -> None:
    """Refuse start weights beside which a difference of models could not be told to a fraction of the bound.

    Formal guarantee: for accepted weights, float64 differences from them err by at most 2**-29 bound a coordinate.
    """
    largest = float(np.abs(start).max(initial=0.0))
    if not largest <= 2.0**24 * bound:
        raise UserError(
            f"clip.of = weights: the model's weights reach {largest:g}, far beyond the clip bound {bound:g}, so that their "
            "rounding could break it. Use a larger clip.bound or start from other weights."
        )


def rounding_slack(
    engine: str,
    examples: int,
    *,
    size: int = 1,
    bound: float = 1.0,
    kind: str = "l2",
    narrowed: bool = False,
) -> float:
    """By how much (relative to the bound) rounding may widen the effect of one example on a sum.

    engine: one of COVERED; "clients" is a float64 sum of clipped vectors.
    examples: the most examples (or clients) that a sum can have: a fixed batch size; for Poisson batches the size of the
    client, since every example may be drawn. size: coordinates of the sum. narrowed: the sum is rounded to float32
    before it gets its noise.

    Formal guarantee: |sum(D) - sum(D')| <= bound * (1 + rounding_slack) in the norm `kind` for every D and D' that differ
    by one example; see the module's text. In float64 it grows as 2 n^2 2**-53 (n = 1000: 2.2e-10, n = 60,000: 8e-7).
    The native engine adds blocks of m products in float32: term j of a block is rounded at most m - j + 2 times, so n terms
    err by (m + 3)/2 n 2**-24, twice. It takes m = 32 or as many as keep that below NATIVE_SLACK, and above n = 2048
    multiplies in float64 (n = 5: 3.3e-6, n = 32: 6.7e-5, n >= 234: 4.9e-4). Narrowing adds 2 n 2**-24.
    The stacked engine leaves the order of a sum to BLAS: of at most 32 rows, up to three of them padding, it adds two halves in
    float32, in which each of the n terms is rounded at most (n + 3 + 3)/2 times whatever the order; of more it adds in float64.
    Three rows more are counted for both engines: a promise does not depend on which of them runs.
    """
    if engine not in COVERED:
        raise ValueError(f"nothing is proven about the sums of engine {engine!r}; proven: {', '.join(COVERED)}")
    slack = 2.0 * examples * _accumulation(examples)
    if engine in ("native", "stacked"):
        narrow = (min(BLOCK, examples + 3) + 3) * min(examples, BLOCK if engine == "stacked" else examples) * _UNIT32
        slack += min(NATIVE_SLACK, narrow)
        slack += 2.0 * examples * (size if ORDERS[kind] == 1 else math.sqrt(size)) * _TINY32 / bound  # underflow
    return slack + (2.0 * examples * _UNIT32 if narrowed else 0.0)


def _accumulation(examples: int) -> float:
    """Relative error of a float64 sum of products in any order; two roundings more for the scaling of each term."""
    steps = (examples + 3) * _UNIT64
    return steps / (1 - steps)
