"""Privacy-loss distributions on an adaptive grid: discretise, compose by FFT, read off epsilon.

Discretisation is pessimistic by construction. The losses of one release are cut into cells of a grid; the
mass of a cell (under both neighbours) is moved to its two ends so that both masses are kept, which dominates
any distribution inside the cell. The grid step is a power of two, between 1/48 and 1/24 of the standard deviation of one
release's loss, so epsilons of 1e-6 and of 1e6 have the same relative accuracy (a fixed grid has not).
Masses cut from the tails are counted as infinite loss. Transforms are made under an exponential tilt, so that
their rounding errors are small against delta and not against 1 (see `Composed`), and are added to every cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy import fft

from fedveil.privacy.mechanisms import Array, LossPair

TAIL = 1e-10  # share of the tilted mass that a window may leave out on each side
UNIT = 16 * 2.0**-53  # rounding of one stage of a fast Fourier transform, generously
DEAD = 1e-22  # frequencies below this are taken as 0
CUT = 4  # tails may be cut by 10^-CUT of delta or less
DISCRETE = 1e-13  # relative error of the masses of one release, discretised and tilted
FINENESS = 1 / 24
FINEST = 2.0**-27  # below this, rounding errors in a cell would be as large as the cell
MOST_CELLS = 1 << 21
MOST_CELLS_PER_RELEASE = 1 << 18  # shared by the kinds of releases, at least 2^17 each
FINER = 6  # orders between two that double, where the tilt is chosen
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
    share: float = 1.0  # of the pair's reach: the continuous part beyond it counts as infinite loss

    @property
    def reach(self) -> float:
        return self.share * self.pair.reach

    def beyond(self, share: float) -> float:
        """The mass that counts as infinite loss if only this share of the reach is kept."""
        if self.pair.below is None or self.pair.above is None:
            return 0.0
        edge = np.array([share * self.pair.reach])
        return self.rate * float(self.pair.above(edge)[0]) + (1 - self.rate) * float(self.pair.below(-edge)[0])


@lru_cache(maxsize=2048)
def _trimmed(release: Sampled, share: float) -> Sampled:
    return replace(release, share=share)


def trim(release: Sampled, mass: float) -> Sampled:
    """The release with as much of its tails cut (to infinite loss) as `mass` allows, in sixteenths of its reach.

    Far tails that no delta can notice would otherwise rule the moments, and with them the tilt.
    """
    shares = (k / 16 for k in range(4, 16))
    return next((_trimmed(release, s) for s in shares if release.beyond(s) <= mass), release)


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
    ends = np.array([min([-release.reach, *losses]), max([release.reach, *losses])])
    low, high = _amplify(ends, release.rate)
    return float(low if release.rate == 1 else math.log1p(-release.rate)), float(high)


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
    t = np.linspace(-release.reach, release.reach, 801)
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
    rate, pair, reach = release.rate, release.pair, release.reach
    low, high = _range(release)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    grid = np.arange(first, last + 1, dtype=np.float64) * step
    thresholds = np.clip(_unamplify(grid, rate), -reach, reach)
    thresholds[0], thresholds[-1] = -reach, reach
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
    up_tail = down_tail = 0.0  # seen backwards, an absent unit's loss is at most -log(1 - rate): the first cell
    if pair.below is not None and pair.above is not None:
        edge = np.array([-reach, reach])
        under, over = float(pair.below(edge)[0]), float(pair.above(edge)[1])
        up_tail = rate * over + (1 - rate) * under
        down_tail = over if rate == 1 else 0.0
        up[0] += rate * under + (1 - rate) * over
        down[0] += over - down_tail
        down[-1] += under
    ahead = Law(first, np.maximum(up, 0), up_tail)
    back = Law(-last, np.maximum(down[::-1], 0), down_tail)
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
    wanted = min(FINENESS * math.sqrt(total / count), widest * math.sqrt(count) / 3072)  # few steps: finer
    cells = max(MOST_CELLS_PER_RELEASE // len(releases), 1 << 17)
    step = max(wanted, width / MOST_CELLS, widest / cells, FINEST)
    return 2.0 ** math.floor(math.log2(step))


def _chernoff_orders(scales: Sequence[float]) -> Array:
    """Rows of orders that double along the row, one row per sign and scale of the loss."""
    lowest = [sign * math.sqrt(-2 * math.log(TAIL)) / scale / 32 for scale in scales for sign in (1, -1)]
    found: np.ndarray = (np.array(lowest)[:, None] * 2.0 ** np.arange(DOUBLINGS)).reshape(-1)
    return found


def _log_moments(law: Law, step: float, orders: Array) -> Array:
    """log E[exp(order * loss)] over finite losses, for rows of doubling orders; infinity where it overflows."""
    losses = (law.first + np.arange(len(law.probs))) * step
    centre = float(law.probs @ losses) / max(float(law.probs.sum()), 1e-300)
    rows = orders.reshape(-1, DOUBLINGS)
    result = np.empty_like(rows)
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        for i, row in enumerate(rows):
            power = np.exp(row[0] * (losses - centre))
            for j in range(len(row)):
                moment = law.probs @ power
                result[i, j] = np.log(moment) if np.isfinite(moment) else np.inf
                power *= power
    return (result + rows * centre).reshape(-1)


@dataclass(frozen=True)
class Tilted:
    """A law seen through exp(tilt * loss): `probs` add up to 1, mass at loss l is probs * exp(level - tilt * l)."""

    first: int
    probs: Array
    level: float
    infinite: float
    doubt: float = 0.0  # bound on the error of each of `probs`


def tilt_law(law: Law, step: float, tilt: float) -> Tilted:
    """The law under the weight exp(tilt * loss), normalised in logarithms, so that no tail is lost."""
    losses = (law.first + np.arange(len(law.probs))) * step
    with np.errstate(divide="ignore"):
        logs = np.log(law.probs) + tilt * losses
    most = float(logs.max())
    probs = np.exp(logs - most)
    total = float(probs.sum())
    return Tilted(law.first, probs / total, most + math.log(total), law.infinite)


def _spectrum(law: Tilted, size: int) -> np.ndarray:
    """Transform of the law wrapped onto `size` cells; loss index k sits at k mod size."""
    wrapped = np.bincount((law.first + np.arange(len(law.probs))) % size, weights=law.probs, minlength=size)
    found: np.ndarray = fft.rfft(wrapped)
    return found


@dataclass(frozen=True)
class Composed:
    """The composition of many releases in one direction under a tilt, kept as a spectrum so that more can be added.

    Why a tilt: a transform errs by some 1e-16 of the largest mass, and delta may be far below that. Under the weight
    exp(tilt * loss) the mass near epsilon *is* the largest, so the error is a small part of delta, whatever delta and
    the number of releases. What wraps around the window only ever adds mass. What lies above it is bounded by
    Chernoff, and each cell carries a bound on its rounding error: the laws read off stay upper bounds.
    """

    step: float
    tilt: float
    orders: Array  # where Chernoff's bound is evaluated
    moments: Array  # log moments of the composition at these orders, not tilted
    spectrum: np.ndarray
    size: int
    least: float  # log of the mass that may be cut above the window
    level: float = 0.0  # log moment at the tilt
    finite: float = 0.0  # log of the probability that no infinite loss happened
    count: int = 0
    reach: tuple[int, int] = (0, 0)  # loss indices that cannot be left
    doubt: float = 0.0  # bound on the error of a cell that came with the laws and their transforms
    begun: int = 0  # how many releases the tilt was chosen for

    def times(self, laws: Sequence[tuple[Tilted, int]], moments: Sequence[Array]) -> Composed:
        """Compose with more releases: tilted laws with counts, and their log moments at `orders`."""
        alive = np.flatnonzero(np.abs(self.spectrum) > DEAD)  # the other frequencies have died out
        product = self.spectrum[alive]
        level, finite, count, (low, high), doubt = self.level, self.finite, self.count, self.reach, self.doubt
        for law, n in laws:
            factor = _spectrum(law, self.size)[alive]
            doubt += n * self._doubt(law, factor, n)
            product = product * factor**n
            keep = np.abs(product) > DEAD
            if keep.sum() < 0.5 * len(keep):
                alive, product = alive[keep], product[keep]
            level += n * law.level
            finite += n * math.log1p(-min(law.infinite, 1 - 1e-12))
            count, low, high = count + n, low + n * law.first, high + n * (law.first + len(law.probs) - 1)
        spectrum = np.zeros_like(self.spectrum)
        spectrum[alive] = product
        total = self.moments + np.sum([n * m for (_, n), m in zip(laws, moments, strict=True)], axis=0)
        return Composed(self.step, self.tilt, self.orders, total, spectrum, self.size, self.least, level, finite,
                        count, (low, high), doubt, self.begun or count)  # fmt: skip

    def _doubt(self, law: Tilted, factor: np.ndarray, n: int) -> float:
        """How far the error of one law's transform may move a cell of the composition.

        A transform errs by UNIT log2(size) |p|_2 sqrt(size) in Euclidean norm at most (Higham); measured errors are
        a hundred times smaller and spread over all frequencies like noise, which is what this counts on. The n - 1 other
        factors of the same law damp it, those of other laws are not larger than 1.
        """
        own = UNIT * (math.log2(self.size) + 1) * math.sqrt(float(law.probs @ law.probs))
        power = float(np.sum(np.abs(factor) ** (2 * (n - 1)))) / (self.size // 2 + 1) if n > 1 else 1.0
        return own * math.sqrt(power / self.size) + law.doubt

    def window(self) -> tuple[int, int]:
        """Loss indices outside which at most TAIL of the tilted mass lies on each side, and above which at most
        exp(least) of the mass itself."""
        return _window(self.orders, self.moments, self.tilt, self.level, self.least, self.step, self.reach)

    def tilted(self) -> tuple[Tilted, float]:
        """The tilted distribution, every cell an upper bound, and the (not tilted) mass above the window."""
        low, high = self.window()
        if high - low >= self.size:
            raise ValueError("the composition has outgrown its grid")
        probs = np.roll(fft.irfft(self.spectrum, self.size), -(low % self.size))[: high - low + 1]
        own = math.sqrt(float(probs @ probs))
        doubt = self.doubt + UNIT * (math.log2(self.size) + 1) * own / math.sqrt(self.size) + DEAD
        above = 0.0
        if high < self.reach[1]:
            up = (self.orders > 0) & np.isfinite(self.moments)
            logs = self.moments[up] - self.orders[up] * high * self.step
            above = math.exp(min(float(np.min(logs, initial=0.0)) + self.count * 1e-12, 0.0))
        probs = np.maximum(probs, 0) + doubt
        return Tilted(low, probs, self.level + self.count * DISCRETE, -math.expm1(self.finite), doubt), above

    def law(self) -> Law:
        """The distribution itself at and above the window's low end; what lies above the window is at infinity."""
        found, above = self.tilted()
        losses = (found.first + np.arange(len(found.probs))) * self.step
        probs = found.probs * np.exp(np.minimum(found.level - self.tilt * losses, 700))
        return Law(found.first, np.minimum(probs, 1.0), found.infinite + above)


def _window(
    orders: Array,
    moments: Array,
    tilt: float,
    level: float,
    least: float,
    step: float,
    reach: tuple[int, int],
) -> tuple[int, int]:
    away = np.append(orders - tilt, -tilt)  # order 0 has the log moment 0, at most
    with np.errstate(invalid="ignore", divide="ignore"):
        bounds = (np.append(moments, 0.0) - level - math.log(TAIL)) / away
    fine = np.isfinite(bounds) & (np.abs(away) > 1e-3 * abs(tilt))
    high = np.min(bounds[fine & (away > 0)], initial=reach[1] * step)
    up = (orders > 0) & np.isfinite(moments)
    high = max(high, np.min((moments[up] - least) / orders[up], initial=reach[1] * step))
    low = np.max(bounds[fine & (away < 0)], initial=reach[0] * step)
    return max(reach[0], math.floor(low / step)), min(reach[1], math.ceil(high / step))


def begin(
    laws: Sequence[tuple[Tilted, int]],
    moments: Sequence[Array],
    orders: Array,
    step: float,
    tilt: float,
    least: float,
    growth: float = 1.0,
) -> Composed | None:
    """Compose tilted laws (with counts) from nothing; None if the grid is too fine for the width of the result.

    growth >= 1 leaves room for later additions.
    """
    total = np.sum([n * m for (_, n), m in zip(laws, moments, strict=True)], axis=0)
    reach = (
        sum(n * law.first for law, n in laws),
        sum(n * (law.first + len(law.probs) - 1) for law, n in laws),
    )
    low, high = _window(orders, total, tilt, sum(n * law.level for law, n in laws), least, step, reach)
    if high - low > 2 * MOST_CELLS:
        return None
    size = fft.next_fast_len(int((high - low + 2) * growth) + 1, real=True)
    nothing = Composed(step, tilt, orders, np.zeros_like(orders), np.ones(size // 2 + 1, complex), size, least)
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
    if len(spent) == 0 and base > 0:
        return base * step  # what lies below the window is not known
    if len(spent) == 0:
        return 0.0
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


@dataclass(frozen=True)
class Side:
    """One direction of a composition: laws with counts and log moments; solved under a tilt when it is asked."""

    step: float
    orders: Array
    laws: tuple[tuple[Law, int], ...]
    moments: tuple[Array, ...]
    growth: float
    solved: dict[float, Composed]  # by what was asked (a delta, or minus an epsilon)

    def solve(self, asked: float, bound: Callable[[Array, Array], Array], least: float) -> Composed | None:
        """The composition under the order at which `bound` (of orders and log moments) is smallest, first among the
        doubling orders, then between them; None if it does not fit the grid. least: see `Composed`."""
        if asked not in self.solved:
            total = np.sum([n * m for (_, n), m in zip(self.laws, self.moments, strict=True)], axis=0)
            rough = _smallest(self.orders, total, bound)
            fine = rough * 2.0 ** (np.arange(-FINER, FINER + 3) / FINER) if rough else np.zeros(1)
            near = [_levels(law, self.step, fine) for law, _ in self.laws]
            orders = np.append(self.orders, fine)
            close = np.sum([n * m for (_, n), m in zip(self.laws, near, strict=True)], axis=0)
            tilt = _choose(fine, close, orders, np.append(total, close), bound, least) if rough else 0.0
            moments = [np.append(a, b) for a, b in zip(self.moments, near, strict=True)]
            laws = [(tilt_law(law, self.step, tilt), n) for law, n in self.laws]
            found = begin(laws, moments, orders, self.step, tilt, least, self.growth)
            if found is None:
                return None
            self.solved[asked] = found
        return self.solved[asked]

    def plus(self, laws: Sequence[tuple[Law, int]]) -> Side:
        """With more releases; what was solved is extended where its tilt still suits and its window still fits."""
        rough = [_log_moments(law, self.step, self.orders) for law, _ in laws]
        solved = {}
        for asked, state in self.solved.items():
            fine = state.orders[self.orders.size :]
            near = [_levels(law, self.step, fine) for law, _ in laws]
            moments = [np.append(a, b) for a, b in zip(rough, near, strict=True)]
            more = state.times([(tilt_law(law, self.step, state.tilt), n) for law, n in laws], moments)
            low, high = more.window()
            if high - low < more.size and more.count < 2 * state.begun:
                solved[asked] = more
        held = {id(law): (law, n, moment) for (law, n), moment in zip(self.laws, self.moments, strict=True)}
        for (law, n), moment in zip(laws, rough, strict=True):  # one more round of the same is a larger count
            held[id(law)] = (law, n + held[id(law)][1] if id(law) in held else n, moment)
        counted = tuple((law, n) for law, n, _ in held.values())
        return Side(self.step, self.orders, counted, tuple(moment for *_, moment in held.values()), 2.0, solved)

    def epsilon(self, delta: float) -> float | None:
        """Upper bound on epsilon at delta in this direction; None if the grid is too fine."""

        def bound(order: Array, moment: Array) -> Array:
            # delta(eps) is at most exp(moment - order eps) times the largest (1 - e^-x) e^(-order x)
            return (moment + order * np.log(order) - (1 + order) * np.log1p(order) - math.log(delta)) / order

        for asked, best in ((delta, bound), (-math.inf, _never)):  # without a tilt the window holds everything
            state = self.solve(asked, best, math.log(delta) - 12)
            if state is None:
                return None
            law = state.law()
            found = epsilon(law, self.step, delta)
            if not 0 < found <= law.first * self.step:
                break
        return found

    def delta(self, eps: float) -> float | None:
        """Upper bound on delta at eps in this direction; None if the grid is too fine."""


        def bound(order: Array, moment: Array) -> Array:
            return moment - order * eps

        for asked, best in ((-eps, bound), (-math.inf, _never)):
            state = self.solve(asked, best, -60.0)
            if state is None:
                return None
            law = state.law()
            if law.first * self.step <= eps:
                break
        return min(delta_at(law, self.step, eps), 1.0)


def _never(order: Array, moment: Array) -> Array:
    return np.full(order.shape, np.inf)


def _smallest(orders: Array, moments: Array, bound: Callable[[Array, Array], Array]) -> float:
    """The positive order at which `bound` is smallest; 0 if it is finite nowhere."""
    order, moment = orders[orders > 0], moments[orders > 0]
    with np.errstate(invalid="ignore"):
        values = np.where(np.isfinite(moment), bound(order, moment), np.inf)
    return float(order[np.argmin(values)]) if np.isfinite(values).any() else 0.0


def _choose(
    fine: Array,
    close: Array,
    orders: Array,
    moments: Array,
    bound: Callable[[Array, Array], Array],
    least: float,
) -> float:
    """The tilt with the narrowest window among the best and smaller ones that are nearly as good: with heavy tails
    the window of the best is wide."""
    values = np.nan_to_num(bound(fine, close), nan=np.inf)
    best = int(np.argmin(values))
    if not math.isfinite(values[best]):
        return 0.0
    good = np.flatnonzero(values[: best + 1] <= values[best] + 0.4 * abs(values[best]))
    widths = []
    for i in good:
        low, high = _window(orders, moments, fine[i], close[i], least, 1e-9, (-(1 << 60), 1 << 60))
        widths.append(high - low)
    return float(fine[good[int(np.argmin(widths))]])


def _levels(law: Law, step: float, orders: Array) -> Array:
    """Log moments at any orders."""
    return np.array([tilt_law(law, step, float(order)).level for order in orders])


def _side(laws: Sequence[tuple[Law, int]], step: float, scale: float, growth: float) -> Side:
    widest = max(len(law.probs) for law, _ in laws) * step
    orders = _chernoff_orders([scale, widest])
    moments = tuple(_log_moments(law, step, orders) for law, _ in laws)
    return Side(step, orders, tuple(laws), moments, growth, {})


@dataclass(frozen=True)
class Grid:
    """Releases cut for a delta, on one grid, in both directions."""

    cut: Mapping[Sampled, Sampled]  # each release as it is used
    step: float
    up: Side
    down: Side

    def plus(self, counts: Mapping[Sampled, int], extra: Mapping[Sampled, int], cut: int | None) -> Grid | None:
        """With `extra` releases (`counts` in all), or None if another grid suits them better."""
        wanted = _cut(counts, cut)
        if any(wanted[release] is not before for release, before in self.cut.items()):
            return None
        if choose_step([(*_shape(wanted[release]), n) for release, n in counts.items()]) < self.step / 2:
            return None
        laws = [(_discretised(wanted[release], self.step), n) for release, n in extra.items()]
        same = self.up is self.down and all(law.symmetric for law, _ in laws)
        up = self.up.plus([(law.up, n) for law, n in laws])
        down = up if same else self.down.plus([(law.down, n) for law, n in laws])
        return Grid(wanted, self.step, up, down) if up.solved or down.solved else None


def _cut(counts: Mapping[Sampled, int], cut: int | None) -> dict[Sampled, Sampled]:
    """The releases with tails cut to a mass of 10^cut in all (the count is rounded up, to stay the same for long)."""
    if cut is None:
        return {release: release for release in counts}
    total = 4.0 ** math.ceil(math.log(sum(counts.values()), 4))
    return {release: trim(release, 10.0**cut / total) for release in counts}


def _grid(counts: Mapping[Sampled, int], cut: int | None, growth: float, step: float | None = None) -> Grid:
    """Releases with their counts on a grid of `step` (chosen unless given)."""
    used = _cut(counts, cut)
    shapes = [(*_shape(used[release]), n) for release, n in counts.items()]
    step = choose_step(shapes) if step is None else step
    scale = math.sqrt(sum(v * n for v, _, n in shapes))
    laws = [(_discretised(used[release], step), n) for release, n in counts.items()]
    up = _side([(law.up, n) for law, n in laws], step, scale, growth)
    if all(law.symmetric for law, _ in laws):
        return Grid(used, step, up, up)
    return Grid(used, step, up, _side([(law.down, n) for law, n in laws], step, scale, growth))


@dataclass(frozen=True)
class Solved:
    """A composition of sampled releases in both directions; `more` extends it, `epsilon` and `delta` read it."""

    counts: Mapping[Sampled, int]
    growth: float
    grids: dict[int | None, Grid]  # what was solved, by the power of ten that was cut from the tails

    def more(self, extra: Mapping[Sampled, int]) -> Solved:
        """Compose further releases, reusing the spectra where grid and window still fit."""
        counts = dict(self.counts)
        for release, n in extra.items():
            counts[release] = counts.get(release, 0) + n
        grids = {cut: grid.plus(counts, extra, cut) for cut, grid in self.grids.items()}
        return Solved(counts, 2.0, {cut: grid for cut, grid in grids.items() if grid is not None})

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at delta, in the worse direction."""
        return self._larger(math.floor(math.log10(delta)) - CUT, lambda side: side.epsilon(delta))

    def delta(self, eps: float) -> float:
        """Upper bound on delta at eps, in the worse direction."""
        return self._larger(None, lambda side: side.delta(eps))

    def _larger(self, cut: int | None, ask: Callable[[Side], float | None]) -> float:
        if cut not in self.grids:
            self.grids[cut] = _grid(self.counts, cut, self.growth)
        while True:
            grid = self.grids[cut]
            sides = (grid.up,) if grid.down is grid.up else (grid.up, grid.down)
            found = [value for value in map(ask, sides) if value is not None]
            if len(found) == len(sides):
                return max(found)
            self.grids[cut] = _grid(self.counts, cut, self.growth, 2 * grid.step)  # coarser: still an upper bound


def solve(counts: Mapping[Sampled, int], growth: float = 1.0) -> Solved:
    """Compose releases with their counts from nothing; growth > 1 leaves room for more."""
    return Solved(dict(counts), growth, {})


def visible_rounds(release: Sampled, count: int, rounds: int, rate: float, delta: float) -> float:
    """Epsilon when each round is joined by a visible coin of `rate` and a joined round costs `count` releases.

    Formal guarantee: the delta of a visible random number of releases is the average of the deltas, so a round
    has the loss 0 with probability 1 - rate and that of `count` releases otherwise; rounds compose.
    """
    cut = math.floor(math.log10(delta)) - CUT if delta > 0 else None
    release = _cut({release: count * rounds}, cut)[release]
    v, span = _shape(release)
    step = choose_step([(v, span, max(1, round(count * rounds * rate)))])
    while True:
        laws = _discretised(release, step)
        sides = {id(side): side for side in (laws.up, laws.down)}.values()
        found = [_joined(side, step, v, count, rounds, rate, delta) for side in sides]
        if all(value is not None for value in found):
            return max(value for value in found if value is not None)
        step *= 2


def _joined(
    law: Law, step: float, v: float, count: int, rounds: int, rate: float, delta: float
) -> float | None:
    side = _side([(law, 1)], step, math.sqrt(v * max(1.0, count * rounds * rate)), 1.0)

    def one_round(moment: Array) -> Array:
        idle = math.log1p(-rate) if rate < 1 else -math.inf
        return np.logaddexp(idle, math.log(rate) + count * moment)

    def bound(order: Array, moment: Array) -> Array:
        slack = order * np.log(order) - (1 + order) * np.log1p(order)
        return (rounds * one_round(moment) + slack - math.log(delta)) / order

    least = math.log(delta / rounds) - 12
    for best in (bound, _never):
        rough = _smallest(side.orders, side.moments[0], best)
        fine = rough * 2.0 ** (np.arange(-FINER, FINER + 3) / FINER) if rough else np.zeros(1)
        orders, moments = np.append(side.orders, fine), np.append(side.moments[0], _levels(law, step, fine))
        tilt = _smallest(fine, moments[side.orders.size :], best) if rough else 0.0
        inner = begin([(tilt_law(law, step, tilt), count)], [moments], orders, step, tilt, least)
        outer = None if inner is None else _mixed(inner, one_round(moments), rounds, rate)
        if outer is None:
            return None
        total = outer.law()
        value = epsilon(total, step, delta)
        if not 0 < value <= total.first * step:
            break
    return value


def _mixed(inner: Composed, moments: Array, rounds: int, rate: float) -> Composed | None:
    """`rounds` times: `inner` with probability `rate`, else the loss 0."""
    one, above = inner.tilted()
    first, last = min(one.first, 0), max(one.first + len(one.probs) - 1, 0)
    weight = math.exp(min(one.level + math.log(rate), 700))
    probs = np.zeros(last - first + 1)
    probs[one.first - first :][: len(one.probs)] = weight * one.probs
    probs[-first] += 1 - rate
    total = float(probs.sum())
    doubt = weight * one.doubt / total
    mixture = Tilted(first, probs / total, math.log(total), rate * (one.infinite + above), doubt)
    return begin([(mixture, rounds)], [moments], inner.orders, inner.step, inner.tilt, inner.least)
