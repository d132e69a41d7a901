"""Privacy-loss distributions on an adaptive grid: discretise, compose by FFT, read off epsilon.

Discretisation is pessimistic by construction. The losses of one release are cut into cells of a grid; the
mass of a cell (under both neighbours) is moved to its two ends so that both masses are kept, which dominates
any distribution inside the cell. The grid step is a power of two, between 1/48 and 1/24 of the standard deviation of one
release's loss, so epsilons of 1e-6 and of 1e6 have the same relative accuracy (a fixed grid has not).
Masses cut from the tails are counted as infinite loss, and so is an allowance for rounding in the FFT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import fft

from fedveil.privacy.mechanisms import Array, LossPair

TAIL = 1e-16  # probability cut from each end of a composition, counted as infinite loss
ROUNDING = 2e-16  # allowance per release for floating-point error, counted as infinite loss
FINENESS = 1 / 24
FINEST = 2.0**-27  # below this, rounding errors in a cell would be as large as the cell
MOST_CELLS = 1 << 21
MOST_CELLS_PER_RELEASE = 1 << 17
DOUBLINGS = 12  # Chernoff orders: 12 powers of two around each of two scales, both signs


@dataclass(frozen=True)
class Law:
    """Mass `probs[i]` at loss (first + i) * step, and `infinite` at infinity."""

    first: int
    probs: Array
    infinite: float


@dataclass(frozen=True)
class Discrete:
    """One release in both directions: `up` with the unit first, `down` with the unit second."""

    step: float
    up: Law
    down: Law

    @property
    def symmetric(self) -> bool:
        return self.up is self.down


@dataclass(frozen=True, eq=False)
class Sampled:
    """A dominating pair whose unit takes part with probability `rate`.

    one_sided: neighbours differ by presence (Poisson; zero-out, add-remove): pair ((1-q)Q + qP, Q). Otherwise
    the larger of both directions at every epsilon (replace-one; fixed size, or Poisson).
    """

    pair: LossPair
    rate: float = 1.0
    one_sided: bool = True


def _amplify(loss: Array, rate: float) -> Array:
    """log(1 - rate + rate e^loss)."""
    if rate == 1:
        return loss
    with np.errstate(over="ignore"):
        near = np.log1p(rate * np.expm1(np.minimum(loss, 30)))
    return np.where(loss < 30, near, np.logaddexp(math.log1p(-rate), math.log(rate) + loss))


def _unamplify(loss: Array, rate: float) -> Array:
    """The inverse of `_amplify`; -infinity below its range."""
    if rate == 1:
        return loss
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        near = np.log1p(np.maximum(np.expm1(np.minimum(loss, 30)) / rate, -1))
    far = loss - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-np.maximum(loss, 30)))
    return np.where(loss < 30, near, far)


def _range(release: Sampled) -> tuple[float, float]:
    losses = [loss for loss, _ in release.pair.atoms]
    ends = np.array([min([-release.pair.reach, *losses]), max([release.pair.reach, *losses])])
    low, high = _amplify(ends, release.rate)
    return float(low), float(high)


def _cells(release: Sampled, thresholds: Array) -> tuple[Array, Array]:
    """Masses of the continuous part between thresholds, with the unit present by `rate` and absent."""
    pair, rate = release.pair, release.rate
    if pair.below is None or pair.above is None:
        zero = np.zeros(len(thresholds) - 1)
        return zero, zero
    low, high = pair.below(thresholds), pair.above(thresholds)
    present = np.where(low[1:] < high[:-1], np.diff(low), -np.diff(high))
    low, high = pair.above(-thresholds), pair.below(-thresholds)  # mirror image: the law under Q
    absent = np.where(low[1:] < high[:-1], np.diff(low), -np.diff(high))
    present, absent = np.maximum(present, 0), np.maximum(absent, 0)
    return rate * present + (1 - rate) * absent, absent


def variance(release: Sampled) -> float:
    """Variance of the loss of one release (to choose the grid; not part of any bound)."""
    t = np.linspace(-release.pair.reach, release.pair.reach, 801)
    mass = _cells(release, t)[0]
    loss = _amplify(0.5 * (t[1:] + t[:-1]), release.rate)
    if release.pair.atoms:
        at, p = np.array(release.pair.atoms).T
        loss = np.append(loss, _amplify(at, release.rate))
        with np.errstate(over="ignore", invalid="ignore"):
            mass = np.append(mass, release.rate * p + (1 - release.rate) * p * np.exp(-at))
    mean = mass @ loss / mass.sum()
    return float(mass @ (loss - mean) ** 2)


def discretise(release: Sampled, step: float) -> Discrete:
    """Both directions of one release on the grid of `step`.

    Formal guarantee: for every epsilon the hockey-stick divergences of the result are at least those of the
    pair, and stay so under composition.
    """
    rate, pair = release.rate, release.pair
    low, high = _range(release)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    grid = np.arange(first, last + 1, dtype=np.float64) * step
    thresholds = np.clip(_unamplify(grid, rate), -pair.reach, pair.reach)
    thresholds[0], thresholds[-1] = -pair.reach, pair.reach
    mixed, plain = _cells(release, thresholds)
    # Ends of a cell: upper + lower = mixed and upper e^-l' + lower e^-l = plain.
    shrink = -math.expm1(-step)
    with np.errstate(over="ignore", invalid="ignore"):
        upper = (mixed - plain * np.exp(grid[:-1])) / shrink
    upper = np.where(np.isfinite(upper), np.clip(upper, 0, mixed), mixed)
    upper_plain = np.minimum(upper * np.exp(-np.minimum(np.maximum(grid[1:], -700), 1e4)), plain)
    up, down = np.zeros(len(grid)), np.zeros(len(grid))
    up[1:] += upper
    up[:-1] += mixed - upper
    down[1:] += upper_plain
    down[:-1] += plain - upper_plain
    for loss, mass in pair.atoms:
        q_mass = mass * math.exp(-loss)
        m_mass = rate * mass + (1 - rate) * q_mass
        at = float(_amplify(np.array(loss), rate))
        cell = min(max(math.floor(at / step) - first, 0), len(grid) - 2)
        share = min(max(math.expm1(grid[cell] - at) / -shrink, 0.0), 1.0)
        up[cell + 1] += m_mass * share
        up[cell] += m_mass * (1 - share)
        moved = min(m_mass * share * math.exp(-grid[cell + 1]), q_mass)
        down[cell + 1] += moved
        down[cell] += q_mass - moved
    up_tail = down_tail = 0.0
    if pair.below is not None and pair.above is not None:
        edge = np.array([-pair.reach, pair.reach])
        under, over = float(pair.below(edge)[0]), float(pair.above(edge)[1])
        up_tail, down_tail = rate * over + (1 - rate) * under, over
        up[0] += rate * under + (1 - rate) * over
        down[-1] += under
    ahead = Law(first, up, up_tail)
    back = Law(-last, down[::-1].copy(), down_tail)
    if not release.one_sided and rate < 1:
        both = _larger(ahead, back)
        return Discrete(step, both, both)
    if rate == 1:
        return Discrete(step, ahead, ahead)
    return Discrete(step, ahead, back)


def _larger(up: Law, down: Law) -> Law:
    """The law whose hockey-stick is `up` for epsilon >= 0 and `down` below: positive losses of the first,
    negative losses of the second, the rest at 0."""
    first, last = min(down.first, 0), max(up.first + len(up.probs) - 1, 0)
    probs = np.zeros(last - first + 1)
    over = np.arange(len(up.probs)) + up.first > 0
    probs[(np.arange(len(up.probs)) + up.first)[over] - first] = up.probs[over]
    under = np.arange(len(down.probs)) + down.first < 0
    probs[(np.arange(len(down.probs)) + down.first)[under] - first] = down.probs[under]
    infinite = up.infinite + down.infinite
    probs[-first] = max(0.0, 1 - probs.sum() - infinite)
    return Law(first, probs, infinite)


def choose_step(releases: Sequence[tuple[float, tuple[float, float], int]]) -> float:
    """Grid step, a power of two, for (variance, loss range, count) of each kind of release."""
    count = sum(n for *_, n in releases)
    total = sum(v * n for v, _, n in releases)
    widest = max(high - low for _, (low, high), _ in releases)
    width = min(sum((high - low) * n for _, (low, high), n in releases), 20 * math.sqrt(total) + 2 * widest)
    wanted = min(FINENESS * math.sqrt(total / count), widest * math.sqrt(count) / 768)  # few steps: finer
    step = max(wanted, width / MOST_CELLS, widest / MOST_CELLS_PER_RELEASE, FINEST)
    return 2.0 ** math.floor(math.log2(step))


def _chernoff_orders(scales: Sequence[float]) -> Array:
    """Rows of orders that double along the row, one row per sign and scale of the loss."""
    lowest = [sign * math.sqrt(-2 * math.log(TAIL)) / scale / 32 for scale in scales for sign in (1, -1)]
    return np.array(lowest)[:, None] * 2.0 ** np.arange(DOUBLINGS)


def _log_moments(law: Law, step: float, orders: Array) -> Array:
    """log E[exp(order * loss)] over finite losses, for rows of doubling orders; infinity where it overflows."""
    losses = (law.first + np.arange(len(law.probs))) * step
    centre = float(law.probs @ losses) / max(float(law.probs.sum()), 1e-300)
    result = np.empty_like(orders)
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        for i, row in enumerate(orders):
            power = np.exp(row[0] * (losses - centre))
            for j in range(len(row)):
                moment = law.probs @ power
                result[i, j] = np.log(moment) if np.isfinite(moment) else np.inf
                power *= power
    return result + orders * centre


def _spectrum(law: Law, size: int) -> np.ndarray:
    """Transform of the law wrapped onto `size` cells; loss index k sits at k mod size."""
    wrapped = np.bincount((law.first + np.arange(len(law.probs))) % size, weights=law.probs, minlength=size)
    return fft.rfft(wrapped)


@dataclass(frozen=True)
class Composed:
    """The composition of many releases in one direction, kept as a spectrum so that more can be added."""

    step: float
    orders: Array  # where Chernoff's bound is evaluated
    moments: Array  # log moments of the composition at these orders
    spectrum: np.ndarray
    size: int
    finite: float  # log of the probability that no infinite loss happened
    count: int
    reach: tuple[int, int] = (0, 0)  # loss indices that cannot be left

    def times(self, laws: Sequence[tuple[Law, int]], moments: Sequence[Array]) -> Composed:
        """Compose with more releases: laws with counts, and their log moments at `orders`."""
        alive = np.flatnonzero(np.abs(self.spectrum) > 1e-24)  # the other frequencies have died out
        product = self.spectrum[alive]
        finite, count, (low, high) = self.finite, self.count, self.reach
        for law, n in laws:
            product = product * _spectrum(law, self.size)[alive] ** n
            keep = np.abs(product) > 1e-24
            if keep.sum() < 0.5 * len(keep):
                alive, product = alive[keep], product[keep]
            finite += n * math.log1p(-min(law.infinite, 1 - 1e-12))
            count, low, high = count + n, low + n * law.first, high + n * (law.first + len(law.probs) - 1)
        spectrum = np.zeros_like(self.spectrum)
        spectrum[alive] = product
        total = self.moments + np.sum([n * m for (_, n), m in zip(laws, moments, strict=True)], axis=0)
        return Composed(self.step, self.orders, total, spectrum, self.size, finite, count, (low, high))

    def window(self) -> tuple[int, int]:
        """Loss indices outside which at most TAIL mass lies on each side."""
        return _window(self.orders, self.moments, self.step, self.reach)

    def law(self) -> Law:
        """The distribution itself, with everything cut or lost to rounding at infinity."""
        low, high = self.window()
        if high - low >= self.size:
            raise ValueError("the composition has outgrown its grid")
        probs = np.roll(fft.irfft(self.spectrum, self.size), -(low % self.size))[: high - low + 1]
        infinite = -math.expm1(self.finite) + 2 * TAIL + ROUNDING * (self.count + 32)
        return Law(low, np.maximum(probs, 0), infinite)


def _window(orders: Array, moments: Array, step: float, reach: tuple[int, int]) -> tuple[int, int]:
    with np.errstate(invalid="ignore"):
        bounds = (moments - math.log(TAIL)) / orders
    high = np.min(bounds[(orders > 0) & np.isfinite(bounds)], initial=reach[1] * step)
    low = np.max(bounds[(orders < 0) & np.isfinite(bounds)], initial=reach[0] * step)
    return max(reach[0], math.floor(low / step)), min(reach[1], math.ceil(high / step))


def begin(laws: Sequence[tuple[Law, int]], step: float, scale: float, growth: float = 1.0) -> Composed | None:
    """Compose `laws` (with counts) from nothing; None if the grid is too fine for the width of the result.

    scale: standard deviation of the total loss; growth >= 1 leaves room for later additions.
    """
    widest = max(len(law.probs) for law, _ in laws) * step
    orders = _chernoff_orders([scale, widest])
    moments = [_log_moments(law, step, orders) for law, _ in laws]
    total = np.sum([n * m for (_, n), m in zip(laws, moments, strict=True)], axis=0)
    reach = (
        sum(n * law.first for law, n in laws),
        sum(n * (law.first + len(law.probs) - 1) for law, n in laws),
    )
    low, high = _window(orders, total, step, reach)
    if high - low > 2 * MOST_CELLS:
        return None
    size = fft.next_fast_len(int((high - low + 2) * growth) + 1, real=True)
    nothing = Composed(step, orders, np.zeros_like(orders), np.ones(size // 2 + 1, complex), size, 0.0, 0)
    return nothing.times(laws, moments)


def epsilon(law: Law, step: float, delta: float) -> float:
    """The smallest epsilon >= 0 whose hockey-stick divergence is at most delta; infinity if there is none."""
    if law.infinite > delta:
        return math.inf
    start = max(0, -law.first)  # losses below 0 never matter for epsilon >= 0
    probs = law.probs[start:]
    if len(probs) == 0:
        return 0.0
    base = law.first + start
    # at grid point k: above[k] = mass of losses > k, faded[k] = sum over j > k of p_j e^-(l_j - l_k)
    above = np.append(np.cumsum(probs[::-1])[::-1][1:], 0.0)
    faded = _faded(probs, step)
    deltas = law.infinite + above - faded
    spent = np.flatnonzero(deltas > delta)
    if len(spent) == 0:
        if base == 0 or law.infinite + probs.sum() - (probs[0] + faded[0]) * math.exp(-base * step) <= delta:
            return 0.0
        k = 0
    else:
        k = int(spent[-1]) + 1
    # between grid points k-1 and k: delta(eps) = mass at or above k - e^(eps - l_k) (p_k + faded_k)
    reach, weight = law.infinite + above[k] + probs[k] - delta, probs[k] + faded[k]
    if reach <= 0 or weight <= 0:
        return max(0.0, (base + k) * step)
    return max(0.0, (base + k) * step + math.log(reach / weight))


def _faded(probs: Array, step: float) -> Array:
    """sum over j > k of p_j e^-((j - k) step), for every k: in blocks over which the factor falls to 1/e.

    A recursive filter of scipy.signal does the same, but that module takes a second to load."""
    out = np.empty_like(probs)
    width = math.ceil(1 / step)
    factors = np.exp(-step * np.arange(min(width, len(probs)) + 1))
    later = 0.0  # p + faded at the first place after the block
    for end in range(len(probs), 0, -width):
        begin = max(0, end - width)
        n = end - begin
        sums = np.append(np.cumsum((probs[begin:end] * factors[:n])[:0:-1])[::-1], 0.0)
        out[begin:end] = (sums + factors[n] * later) / factors[:n]
        later = probs[begin] + out[begin]
    return out


def delta_at(law: Law, step: float, eps: float) -> float:
    """Hockey-stick divergence of the law at `eps`."""
    losses = (law.first + np.arange(len(law.probs))) * step
    over = losses > eps
    return float(law.infinite - law.probs[over] @ np.expm1(eps - losses[over]))


@lru_cache(maxsize=2048)
def _discretised(release: Sampled, step: float) -> Discrete:
    return discretise(release, step)


@lru_cache(maxsize=8192)
def _shape(release: Sampled) -> tuple[float, tuple[float, float]]:
    return variance(release), _range(release)


def _extend(state: Composed, laws: Sequence[tuple[Law, int]]) -> Composed:
    return state.times(laws, [_log_moments(law, state.step, state.orders) for law, _ in laws])


@dataclass(frozen=True)
class Solved:
    """A composition of sampled releases in both directions; `more` extends it, `epsilon` reads it."""

    counts: Mapping[Sampled, int]
    step: float
    up: Composed
    down: Composed

    def more(self, extra: Mapping[Sampled, int]) -> Solved:
        """Compose further releases, reusing the spectrum when grid and window still fit."""
        counts = dict(self.counts)
        for release, n in extra.items():
            counts[release] = counts.get(release, 0) + n
        wanted = choose_step([(*_shape(r), n) for r, n in counts.items()])
        if wanted >= self.step / 2:
            laws = [(_discretised(release, self.step), n) for release, n in extra.items()]
            same = self.up is self.down and all(law.symmetric for law, _ in laws)
            up = _extend(self.up, [(law.up, n) for law, n in laws])
            down = up if same else _extend(self.down, [(law.down, n) for law, n in laws])
            if all(side.window()[1] - side.window()[0] < side.size for side in (up, down)):
                return Solved(counts, self.step, up, down)
        return solve(counts, growth=2.0)

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at delta, in the worse direction."""
        ahead = epsilon(self.up.law(), self.step, delta)
        return ahead if self.down is self.up else max(ahead, epsilon(self.down.law(), self.step, delta))

    def delta(self, eps: float) -> float:
        """Upper bound on delta at eps, in the worse direction."""
        return max(delta_at(side.law(), self.step, eps) for side in (self.up, self.down))


def solve(counts: Mapping[Sampled, int], growth: float = 1.0) -> Solved:
    """Compose releases with their counts from nothing."""
    shapes = [(*_shape(release), n) for release, n in counts.items()]
    step = choose_step(shapes)
    scale = math.sqrt(sum(v * n for v, _, n in shapes))
    while True:
        laws = [(_discretised(release, step), n) for release, n in counts.items()]
        up = begin([(law.up, n) for law, n in laws], step, scale, growth)
        if up is not None and all(law.symmetric for law, _ in laws):
            return Solved(dict(counts), step, up, up)
        down = begin([(law.down, n) for law, n in laws], step, scale, growth) if up is not None else None
        if up is not None and down is not None:
            return Solved(dict(counts), step, up, down)
        step *= 2  # coarser: still an upper bound


def visible_rounds(release: Sampled, count: int, rounds: int, rate: float, delta: float) -> float:
    """Epsilon when each round is joined by a visible coin of `rate` and a joined round costs `count` releases.

    Formal guarantee: the delta of a visible random number of releases is the average of the deltas, so a round
    has the loss 0 with probability 1 - rate and that of `count` releases otherwise; rounds compose.
    """
    v, span = _shape(release)
    step = choose_step([(v, span, max(1, round(count * rounds * rate)))])
    while True:
        laws = _discretised(release, step)
        sides = {id(side): side for side in (laws.up, laws.down)}.values()
        found = [_joined(side, step, v, count, rounds, rate) for side in sides]
        if all(law is not None for law in found):
            return max(epsilon(law, step, delta) for law in found if law is not None)
        step *= 2


def _joined(law: Law, step: float, v: float, count: int, rounds: int, rate: float) -> Law | None:
    state = begin([(law, count)], step, math.sqrt(v * count))
    if state is None:
        return None
    joined = state.law()
    first, last = min(joined.first, 0), max(joined.first + len(joined.probs) - 1, 0)
    probs = np.zeros(last - first + 1)
    probs[joined.first - first :][: len(joined.probs)] = rate * joined.probs
    probs[-first] += 1 - rate
    losses = (first + np.arange(len(probs))) * step
    spread = math.sqrt(rounds * max(float(probs @ losses**2), 1e-300))
    total = begin([(Law(first, probs, rate * joined.infinite), rounds)], step, spread)
    return None if total is None else total.law()
