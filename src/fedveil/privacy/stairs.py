"""i.i.d. Staircase noise on a vector under an L2 bound, with steps of any width.

The usual Staircase has steps as wide as the bound C, made for one number. In d dimensions the worst change of a vector
is spread, every coordinate moves by C / sqrt(d), and steps that wide waste noise on it (the cost grows with sqrt(d)).
Steps of width w = C / sqrt(d) or less cost what Laplace noise costs, up to 1 + d w^2 / (4 C^2).

The bound. In units of the width, coordinates move by s_1, ..., s_d with sum of s_i^2 <= R^2 = (C / w)^2. Between two
neighbouring coincidences of jumps (whole numbers, and whole numbers plus 2 nu) the moment M(s) = E e^((a-1) loss) is
linear in s, because the densities are constant between jumps. So for every slope c >= 0
    sum D_a(s_i) <= d * max over s of [ln M(s) / (a - 1) - c s^2] + c R^2,
and on each piece the maximum is at an end or where a quadratic equation has its root. Beyond FAR steps the loss of at
most (s + 1) lambda is used instead. The smallest value found over the
slopes is returned: each of them is a valid bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy.special import logsumexp

from fedveil.privacy.mechanisms import Array, Staircase

FAR = 64.0  # widths up to which divergences are computed exactly
STEEP = 60.0  # from here on the middle step, of width 2 nu = 2 e^(-lam / 2), vanishes beside FAR in a double
LEAST, MOST, SECTIONS = 1e-3, 1e4, 16  # slopes, over that of Gaussian noise of the same scale
SAFETY = 1 + 1e-9  # sums of some hundred doubles


def renyi(orders: Array, lam: float, nu: float | None, width: float, dimension: int) -> Array:
    """Upper bounds on the Rényi divergences for any change of L2 norm at most 1; steps of `width`, lambda per step.

    Formal guarantee: for i.i.d. Staircase noise of parameter lam and steps of `width` on each of `dimension`
    coordinates, no two vectors at L2 distance at most 1 have a larger divergence of these orders.
    """
    most: Array = np.full(np.shape(orders), pure(lam, width, dimension))
    if lam > STEEP:
        return most
    wide = np.ascontiguousarray(orders, np.float64)
    found: Array = np.minimum(most, _renyi(wide.tobytes(), lam, nu, width, dimension))
    return found


@lru_cache(maxsize=512)  # a run asks for the same orders in every round
def _renyi(raw: bytes, lam: float, nu: float | None, width: float, dimension: int) -> Array:
    orders = np.frombuffer(raw)
    law = Staircase(lam, nu)
    reach = 1 / width  # the largest shift of one coordinate, in steps
    near = min(reach, FAR)
    ends = _ends(near, law.shape)
    moments = _log_moments(law, ends, orders)  # [ends, orders]
    if dimension == 1 and reach <= FAR:
        found: np.ndarray = moments.max(0) / (orders - 1) * SAFETY  # linear pieces: the largest moment is at an end of one
        return found
    quadratic = orders * lam**2 / 2

    def bound(shares: Array) -> Array:
        slope = shares * quadratic
        over = _largest_excess(ends, moments, orders, slope)
        if reach > FAR:
            over = np.maximum(over, _far_excess(orders, lam, slope, reach))
        return dimension * np.maximum(over, 0.0) + slope * reach**2

    return _lowest(bound, len(orders)) * SAFETY


def _lowest(bound: Callable[[Array], Array], count: int) -> Array:
    """The least value of `bound`, convex in each share, by golden sections of the shares' logarithms."""
    golden = (math.sqrt(5) - 1) / 2
    low, high = np.full(count, math.log(LEAST)), np.full(count, math.log(MOST))
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = bound(np.exp(left)), bound(np.exp(right))
    best = np.minimum(at_left, at_right)
    for _ in range(SECTIONS):
        lower = at_left < at_right
        low, high = np.where(lower, low, left), np.where(lower, right, high)
        new = np.where(lower, high - golden * (high - low), low + golden * (high - low))
        found = bound(np.exp(new))
        left, right, at_left, at_right = (
            np.where(lower, new, right),
            np.where(lower, left, new),
            np.where(lower, found, at_right),
            np.where(lower, at_left, found),
        )
        best = np.minimum(best, found)
    return best


def _ends(near: float, nu: float) -> Array:
    """Shifts at which jumps of the two densities coincide, 0 and the largest shift."""
    whole = np.arange(math.floor(near) + 1.0)
    points = np.concatenate([whole, whole + 2 * nu, [near]])
    return np.unique(points[points <= near])


def _log_moments(law: Staircase, ends: Array, orders: Array) -> Array:
    """ln E e^((order - 1) loss) at every end and order."""
    most = math.ceil(float(ends[-1]))
    masses = np.zeros((len(ends), 2 * most + 1))
    for row, shift in enumerate(ends):
        own = law.loss_law(float(shift)) if shift > 0 else np.ones(1)
        masses[row, most - len(own) // 2 : most + len(own) // 2 + 1] = own
    rise = law.lam * np.outer(np.arange(-most, most + 1), orders - 1)
    small = rise[-1] < 30.0
    out = np.empty((len(ends), len(orders)))
    out[:, small] = np.log1p(masses @ np.expm1(rise[:, small]))
    for row in range(len(ends) if not small.all() else 0):
        out[row, ~small] = logsumexp(rise[:, ~small], axis=0, b=masses[row][:, None])
    return out


def _largest_excess(ends: Array, moments: Array, orders: Array, slope: Array) -> Array:
    """max over the pieces of ln M(s) / (order - 1) - slope s^2, for every order."""
    low, high = ends[:-1, None], ends[1:, None]
    m = np.exp(np.minimum(moments, 600.0))
    rise = (m[1:] - m[:-1]) / (high - low)
    base = m[:-1] - rise * low  # M(s) = base + rise s
    # rise / ((order - 1) M(s)) = 2 slope s: a quadratic equation, of which the larger root is the maximum
    factor = 2 * slope * (orders - 1)
    with np.errstate(all="ignore"):
        root = (-base + np.sqrt(base**2 + 4 * rise**2 / factor)) / (2 * rise)
    inside = np.clip(np.where((rise > 0) & np.isfinite(root), root, low), low, high)
    at = np.log(np.maximum(base + rise * inside, 1e-300)) / (orders - 1) - slope * inside**2
    edges = moments / (orders - 1) - slope * ends[:, None] ** 2
    # Moments too large for a double: within a piece they are at most those of its ends.
    coarse = np.maximum(moments[1:], moments[:-1]) / (orders - 1) - slope * low**2
    at = np.where(np.maximum(moments[1:], moments[:-1]) > 500, coarse, at)
    found: np.ndarray = np.maximum(at.max(0), edges.max(0))
    return found


def _far_excess(orders: Array, lam: float, slope: Array, reach: float) -> Array:
    """The same beyond FAR steps, where a loss of at most (s + 1) lam has D <= order ((s + 1) lam)^2 / 2."""
    half = orders * lam**2 / 2
    with np.errstate(all="ignore"):
        top = np.where(slope > half, half / (slope - half), reach)
    found = [half * (s + 1) ** 2 - slope * s**2 for s in (FAR, reach, np.clip(top, FAR, reach))]
    largest: np.ndarray = np.max(found, axis=0)
    return largest


def pure(lam: float, width: float, dimension: int) -> float:
    """Pure epsilon: a coordinate that moves by s steps costs at most ceil(s) lambda."""
    if width >= 1:
        return dimension * lam
    return lam * (math.sqrt(dimension) / width + dimension)


def zcdp(lam: float, width: float, dimension: int) -> float:
    """rho: half the sum of squared losses, with ceil(s) <= s + 1."""
    if width >= 1:
        return dimension * min(lam**2 / 2, lam)
    return lam**2 / 2 * (1 / width + math.sqrt(dimension)) ** 2
