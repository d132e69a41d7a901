"""The noises: densities, moments, exact Rényi divergences and privacy-loss laws, for scalars and vectors.

Every mechanism here is symmetric: swapping the two neighbours mirrors the privacy loss. A `LossPair` is
therefore given by the law of the loss under the first neighbour alone. These are laws of one number (or one
whole vector, for the joint Staircase); what they promise for clipped vectors is in `vectors`. Proofs:
docs/mechanisms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from fedveil.errors import UserError
from fedveil.privacy import checks
from fedveil.privacy.events import MechanismName, Noise

Array = NDArray[np.float64]
Curve = Callable[[Array], Array]
MECHANISMS: tuple[MechanismName, ...] = ("gaussian", "laplace", "staircase", "joint-staircase", "two-valued")


@dataclass(frozen=True)
class LossPair:
    """Law of the privacy loss log(P/Q) under P, for a pair (P, Q) that a reflection swaps.

    atoms: (loss, P-mass). below(t), above(t): P-mass of the continuous part at most t, greater than t.
    reach: the continuous part lies in [-reach, reach] up to a mass of 1e-44 (infinite losses count there).
    The law of the loss under Q is the mirror image of this one.
    """

    atoms: tuple[tuple[float, float], ...] = ()
    below: Curve | None = None
    above: Curve | None = None
    reach: float = 0.0


def _order(order: float) -> float:
    if not order > 1:
        raise UserError(f"A Rényi order must be greater than 1, got {order!r}.")
    return float(order)


@dataclass(frozen=True)
class Gaussian:
    """Normal noise with standard deviation `sigma`."""

    sigma: float

    def density(self, x: ArrayLike) -> Array:
        z = np.asarray(x, float) / self.sigma
        return np.exp(-0.5 * z * z) / (self.sigma * math.sqrt(2 * math.pi))

    def cdf(self, x: ArrayLike) -> Array:
        found: np.ndarray = special.ndtr(np.asarray(x, float) / self.sigma)
        return found

    def renyi(self, order: float, shift: float = 1.0) -> float:
        """Exact divergence between the noise and itself moved by `shift`."""
        return _order(order) * shift**2 / (2 * self.sigma**2)

    def mean_abs(self) -> float:
        return self.sigma * math.sqrt(2 / math.pi)

    def variance(self) -> float:
        return self.sigma**2

    def pair(self, shift: float = 1.0) -> LossPair:
        sd = abs(shift) / self.sigma
        mean = 0.5 * sd * sd
        return LossPair(
            below=lambda t: special.ndtr((t - mean) / sd),
            above=lambda t: special.ndtr((mean - t) / sd),
            reach=mean + 14 * sd,
        )

    def sampler(self) -> dict[str, float | str]:
        return {"law": "normal", "scale": self.sigma}


@dataclass(frozen=True)
class Laplace:
    """Double-exponential noise with density exp(-|x|/scale) / (2 scale)."""

    scale: float

    def density(self, x: ArrayLike) -> Array:
        found: np.ndarray = np.exp(-np.abs(np.asarray(x, float)) / self.scale) / (2 * self.scale)
        return found

    def cdf(self, x: ArrayLike) -> Array:
        z = np.asarray(x, float) / self.scale
        return np.where(z < 0, 0.5 * np.exp(np.minimum(z, 0)), 1 - 0.5 * np.exp(-np.maximum(z, 0)))

    def renyi(self, order: float, shift: float = 1.0) -> float:
        """Exact divergence between the noise and itself moved by `shift`."""
        return float(laplace_renyi(np.array([_order(order)]), abs(shift) / self.scale)[0])

    def mean_abs(self) -> float:
        return self.scale

    def variance(self) -> float:
        return 2 * self.scale**2

    def pair(self, shift: float = 1.0) -> LossPair:
        top = abs(shift) / self.scale

        def below(t: Array) -> Array:
            return 0.5 * (np.exp(0.5 * (np.clip(t, -top, top) - top)) - math.exp(-top))

        def above(t: Array) -> Array:
            return -0.5 * np.expm1(0.5 * (np.clip(t, -top, top) - top))

        return LossPair(((top, 0.5), (-top, 0.5 * math.exp(-top))), below, above, top)

    def sampler(self) -> dict[str, float | str]:
        return {"law": "laplace", "scale": self.scale}


def laplace_renyi(orders: Array, shift: float) -> Array:
    """Rényi divergences of unit Laplace noise at `shift`; accurate for tiny shifts, finite for huge ones."""
    if shift == 0:
        return np.zeros_like(orders)
    rise, fall = (orders - 1) * shift, orders * shift
    small = np.log1p(
        (orders * np.expm1(np.minimum(rise, 1)) + (orders - 1) * np.expm1(-fall)) / (2 * orders - 1)
    )
    large = np.logaddexp(
        np.log(orders / (2 * orders - 1)) + rise, np.log((orders - 1) / (2 * orders - 1)) - fall
    )
    return np.where(rise < 1, small, large) / (orders - 1)


MOST_LAMBDA = 700.0  # of Staircase noise: beyond, e^-lambda and its inverse are no numbers any more


def best_nu(lam: float) -> float:
    """The shape that minimises the mean absolute value of scalar Staircase noise."""
    return float(special.expit(-lam / 2))


@dataclass(frozen=True)
class Staircase:
    """Geometric mixture of uniforms: density a*exp(-lam*level), constant between the jumps at nu+0, nu+1, ...

    lam: pure epsilon of one coordinate that moves by at most `bound`. nu in [0, 1]: width of the middle step.
    """

    lam: float
    nu: float | None = None
    bound: float = 1.0

    @property
    def shape(self) -> float:
        return best_nu(self.lam) if self.nu is None else self.nu

    @property
    def peak(self) -> float:
        """Density at 0 times `bound`."""
        if self.lam > MOST_LAMBDA * (1 + 1e-9):
            raise UserError(
                f"Staircase noise of lambda = {self.lam:g} is hardly any: lambda, a step's width over sigma, is the epsilon of "
                f"one coordinate in one step, and at most {MOST_LAMBDA:g} can be computed with. Give more noise (a larger sigma)."
            )
        b = math.exp(-self.lam)
        return -math.expm1(-self.lam) / (2 * (self.shape + b * (1 - self.shape)))

    def _level(self, x: ArrayLike) -> Array:
        """Number of jumps between 0 and |x|, x in units of `bound`."""
        found: np.ndarray = np.maximum(np.floor(np.abs(np.asarray(x, float)) - self.shape) + 1, 0)
        return found

    def density(self, x: ArrayLike) -> Array:
        return self.peak / self.bound * np.exp(-self.lam * self._level(np.asarray(x, float) / self.bound))

    def cdf(self, x: ArrayLike) -> Array:
        z = np.asarray(x, float) / self.bound
        level, r, b = self._level(z), np.abs(z), math.exp(-self.lam)
        full = self.shape + b * -np.expm1(-self.lam * np.maximum(level - 1, 0)) / -math.expm1(-self.lam)
        inside = self.peak * np.where(
            level == 0, r, full + np.exp(-self.lam * level) * (r - self.shape - np.maximum(level - 1, 0))
        )
        return 0.5 + np.sign(z) * inside

    def renyi(self, order: float, shift: float = 1.0) -> float:
        """Exact divergence between the noise and itself moved by `shift` (any size)."""
        order, shift = _order(order), abs(shift) / self.bound
        if shift <= 1:
            return float(three_point_renyi(np.array([order]), self.lam, self.top_mass(shift))[0])
        return float(self._renyi_far(np.array([order]), shift)[0])

    def top_mass(self, shift: float) -> float:
        """P(loss = lam) for a shift (in units of `bound`) of at most 1: concave and increasing in `shift`. Where it cannot be
        computed, that of randomised response, which no lam-DP mechanism exceeds."""
        if self.lam > MOST_LAMBDA:
            return float(special.expit(self.lam)) if shift > 0 else 0.0
        tail = shift * math.exp(-self.lam) / -math.expm1(-self.lam)
        return self.peak * (tail + min(shift, 2 * self.shape))

    def loss_law(self, shift: float) -> Array:
        """P(loss = k lam) for k = -n, ..., n at a shift in units of `bound`, n = ceil(shift)."""
        # Outside [-nu, shift+nu] everything repeats with factor exp(-lam): sum one period geometrically.
        nu, end = self.shape, shift + self.shape + 1
        jumps = nu + np.arange(math.ceil(end + 1))
        points = np.unique(np.concatenate([jumps, -jumps, shift + jumps, shift - jumps, [-nu - 1, end]]))
        points = points[(points >= -nu - 1) & (points <= end)]
        middle, width = 0.5 * (points[1:] + points[:-1]), np.diff(points)
        moved, still = self._level(middle - shift), self._level(middle)
        tail = (middle < -nu) | (middle > shift + nu)
        mass = np.where(tail, 1 / -math.expm1(-self.lam), 1.0) * width * self.peak * np.exp(-self.lam * moved)
        most = math.ceil(shift)
        # Slivers between jumps that coincide but for rounding may land one value too far: they have no mass to speak of.
        value = np.clip(still - moved, -most, most).astype(int)
        return np.bincount(value + most, mass, 2 * most + 1).astype(float)

    def _renyi_far(self, orders: Array, shift: float) -> Array:
        mass = self.loss_law(shift)
        values = np.arange(len(mass)) - len(mass) // 2
        rise = self.lam * np.outer(orders - 1, values)
        # The masses sum to 1. Small exponents: what exceeds 1 is summed on its own, without cancellation.
        small = np.log1p(np.expm1(np.minimum(rise, 30.0)) @ mass)
        large = special.logsumexp(rise, axis=1, b=mass)
        return np.where(rise.max(1) < 30.0, small, large) / (orders - 1)

    def mean_abs(self) -> float:
        nu, b, g = self.shape, math.exp(-self.lam), -math.expm1(-self.lam)
        return 2 * self.bound * self.peak * (nu**2 / 2 + b * (b / g**2 + (nu + 0.5) / g))

    def variance(self) -> float:
        nu, b, g = self.shape, math.exp(-self.lam), -math.expm1(-self.lam)
        squares = b * (1 + b) / g**3 + (2 * nu + 1) * b / g**2 + (nu**2 + nu + 1 / 3) / g
        return 2 * self.bound**2 * self.peak * (nu**3 / 3 + b * squares)

    def pair(self, shift: float = 1.0) -> LossPair:
        """Loss law for |shift| <= bound, where it has three values; it grows with |shift| up to bound."""
        if abs(shift) > self.bound:
            raise UserError(
                f"The three-value loss of Staircase needs a shift of at most {self.bound}, got {shift}."
            )
        high = self.top_mass(abs(shift) / self.bound)
        low = math.exp(-self.lam) * high
        return LossPair(((self.lam, high), (0.0, max(0.0, 1 - high - low)), (-self.lam, low)))

    def sampler(self) -> dict[str, float | str]:
        """sign * bound * (G + nu*U) or (G + nu + (1-nu)*U), the first with `inner` probability;
        G = 0, 1, 2, ... with P(G=k) = (1-e^-lam) e^(-lam k), U uniform on (0, 1)."""
        nu, b = self.shape, math.exp(-self.lam)
        inner = nu / (nu + (1 - nu) * b)
        return {"law": "staircase", "lambda": self.lam, "nu": nu, "inner": inner, "scale": self.bound}


def three_point_renyi(orders: Array, lam: float, high: float) -> Array:
    """Rényi divergences of a loss in {-lam, 0, lam} with P(loss = lam) = high."""
    if high == 0:
        return np.zeros_like(orders)
    rise = (orders - 1) * lam
    # moment - 1 = high (e^rise - 1)(1 - e^-(lam + rise)): no cancellation for small noise or small shifts
    small = np.log1p(high * np.expm1(np.minimum(rise, 600)) * -np.expm1(-lam - rise))
    rest = max(1 - high - high * math.exp(-lam), 1e-300)
    large = np.logaddexp(rise + math.log(high), math.log(rest))
    return np.where(rise < 500, small, large) / (orders - 1)


def response_renyi(orders: Array, epsilon: float) -> Array:
    """Rényi divergences of binary randomised response, the worst of all epsilon-DP mechanisms."""
    return three_point_renyi(orders, epsilon, float(special.expit(epsilon)))


def response_pair(epsilon: float) -> LossPair:
    return LossPair(((epsilon, float(special.expit(epsilon))), (-epsilon, float(special.expit(-epsilon)))))


@dataclass(frozen=True)
class JointStaircase:
    """Staircase density in the L1 norm of the whole vector: lam-DP for L1 changes of at most `bound`."""

    lam: float
    dimension: int = 1
    nu: float | None = None
    bound: float = 1.0

    @property
    def shape(self) -> float:
        return best_nu(self.lam) if self.nu is None else self.nu

    def ball_weights(self) -> tuple[Array, Array]:
        """(radii, probabilities): the noise is uniform in an L1 ball of a random radius (units of bound)."""
        return _ball_weights(self.lam, self.dimension, self.shape)

    def log_density(self, x: ArrayLike) -> float:
        radius = float(np.abs(np.asarray(x, float)).sum()) / self.bound
        level = max(math.floor(radius - self.shape) + 1, 0)
        return self._log_peak() - self.lam * level

    def density(self, x: ArrayLike) -> float:
        return math.exp(self.log_density(x))

    def _log_peak(self) -> float:
        return _log_ball_peak(self.lam, self.dimension, self.shape) - self.dimension * math.log(self.bound)

    def radius_cdf(self, r: float) -> float:
        """P(L1 norm <= r)."""
        radii, chance = self.ball_weights()
        inside = np.minimum(1.0, r / (radii * self.bound + (radii == 0)))
        return float(chance @ inside**self.dimension)

    def renyi(self, order: float) -> float:
        """Bound for every L1 change of at most `bound`: that of lam-DP."""
        return float(response_renyi(np.array([_order(order)]), self.lam)[0])

    def mean_abs(self) -> float:
        """Mean absolute value of one coordinate."""
        radii, chance = self.ball_weights()
        return float(chance @ radii) * self.bound / (self.dimension + 1)

    def variance(self) -> float:
        """Variance of one coordinate."""
        radii, chance = self.ball_weights()
        d = self.dimension
        return float(chance @ radii**2) * self.bound**2 * 2 / ((d + 1) * (d + 2))

    def pair(self) -> LossPair:
        return response_pair(self.lam)

    def sampler(self) -> dict[str, float | str]:
        """A ball radius R from `ball_weights`, then R * U^(1/d) times a uniform point of the L1 sphere."""
        return {"law": "joint-staircase", "lambda": self.lam, "nu": self.shape, "dimension": self.dimension,
                "scale": self.bound}  # fmt: skip


@lru_cache(maxsize=64)
def _ball_weights(lam: float, dimension: int, nu: float) -> tuple[Array, Array]:
    # weight of radius j+nu is exp(-lam j)(j+nu)^d, unimodal around d/lam: keep what matters to 1e-30.
    centre, spread = dimension / lam, (12 * math.sqrt(dimension) + 80) / lam
    first = max(0, math.floor(centre - spread))
    last = math.ceil(centre + spread) + 2
    if last - first > 20_000_000:
        raise UserError(
            f"Joint Staircase with lambda {lam} and dimension {dimension} has too many steps to tabulate."
        )
    radii = np.arange(first, last + 1, dtype=float) + nu
    with np.errstate(divide="ignore"):
        logs = -lam * (radii - nu) + dimension * np.log(radii)
    chance = np.exp(logs - special.logsumexp(logs))
    keep = chance > 0
    return radii[keep], chance[keep] / chance[keep].sum()


@lru_cache(maxsize=64)
def _log_ball_peak(lam: float, dimension: int, nu: float) -> float:
    """Log density at 0: every ball of radius r contributes d! / (2r)^d."""
    radii, chance = _ball_weights(lam, dimension, nu)
    usable = radii > 0
    log_volume = dimension * np.log(2 * radii[usable]) - special.gammaln(dimension + 1)
    return float(special.logsumexp(np.log(chance[usable]) - log_volume))


@dataclass(frozen=True)
class TwoValued:
    """LDP-FL's randomiser: a weight in [centre-radius, centre+radius] becomes one of two values.

    Formal guarantee: epsilon-LDP for the single reported weight, if the weight was clipped into the range
    before and the range does not depend on this client's data.
    """

    epsilon: float
    centre: float = 0.0
    radius: float = 1.0

    @property
    def reach(self) -> float:
        """Distance of the two reported values from the centre."""
        return self.radius / math.tanh(self.epsilon / 2)

    def probability(self, weight: ArrayLike) -> Array:
        """Chance of the upper value (the weight is clipped first)."""
        off = np.clip((np.asarray(weight, float) - self.centre) / self.radius, -1, 1)
        return 0.5 + 0.5 * off * math.tanh(self.epsilon / 2)

    def density(self, x: ArrayLike, weight: float = 0.0) -> Array:
        """Probability of reporting x (0 unless x is one of the two values)."""
        x, up = np.asarray(x, float), self.probability(weight)
        high, low = self.centre + self.reach, self.centre - self.reach
        return np.where(x == high, up, np.where(x == low, 1 - up, 0.0))

    def cdf(self, x: ArrayLike, weight: float = 0.0) -> Array:
        x = np.asarray(x, float)
        return np.where(
            x >= self.centre + self.reach,
            1.0,
            np.where(x >= self.centre - self.reach, 1 - self.probability(weight), 0.0),
        )

    def renyi(self, order: float) -> float:
        """Divergence between the two extreme weights: the worst pair."""
        return float(response_renyi(np.array([_order(order)]), self.epsilon)[0])

    def mean_abs(self) -> float:
        """Mean absolute error at the centre of the range (both values are equally far)."""
        return self.reach

    def variance(self, weight: float | None = None) -> float:
        """Of the report at `weight`; the largest one, at the centre, without it."""
        off = 0.0 if weight is None else min(max(weight - self.centre, -self.radius), self.radius)
        return self.reach**2 - off**2

    def pair(self) -> LossPair:
        return response_pair(self.epsilon)

    def sampler(self) -> dict[str, float | str]:
        return {"law": "two-valued", "epsilon": self.epsilon, "centre": self.centre, "radius": self.radius}


Mechanism = Gaussian | Laplace | Staircase | JointStaircase | TwoValued


SMALLEST_MULTIPLIER = 1e-100  # far below any use; its square and the square of its inverse are still numbers


def least_multiplier(name: MechanismName, width: float = 1.0) -> float:
    """The smallest multiplier whose noise can be described."""
    return width / MOST_LAMBDA if name == "staircase" else SMALLEST_MULTIPLIER


def check_noise(noise: Noise) -> None:
    """Refuse impossible numbers with the option's name and range."""
    checks.one_of("mechanism", noise.mechanism, MECHANISMS)
    checks.one_of("clip-norm", noise.norm, ("l1", "l2"))
    checks.positive("noise-multiplier", noise.multiplier)
    if noise.multiplier < SMALLEST_MULTIPLIER:
        raise UserError(
            f"noise-multiplier must be at least {SMALLEST_MULTIPLIER:g}: the square of {noise.multiplier} vanishes."
        )
    checks.count("dimension", noise.dimension, 1)
    checks.positive("width", noise.width)
    if noise.nu is not None:
        checks.unit_interval("nu", noise.nu)
    if noise.width != 1 and (noise.mechanism, noise.norm) != ("staircase", "l2"):
        raise UserError(
            "A step width is a part of i.i.d. Staircase noise under an L2 clip; leave width at 1 elsewhere."
        )


def mechanism(noise: Noise) -> Mechanism:
    """The law of one coordinate's noise (of the vector for the joint Staircase) at clip bound 1."""
    check_noise(noise)
    if noise.mechanism == "gaussian":
        return Gaussian(noise.multiplier)
    if noise.mechanism == "laplace":
        return Laplace(noise.multiplier)
    if noise.mechanism == "staircase":
        return Staircase(noise.width / noise.multiplier, noise.nu, noise.width)
    if noise.mechanism == "joint-staircase":
        return JointStaircase(1 / noise.multiplier, noise.dimension, noise.nu)
    return TwoValued(1 / noise.multiplier)
