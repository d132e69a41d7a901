"""Integer noise whose law is proven: discrete Gaussian, and Laplace and Staircase noise rounded to a grid.

Every value comes from the AES streams of protect.noise by integer decisions that have one right answer. Compiled code
(src/native/exact.inc) decides most of them with a float approximation and its error bound, the few that are too close
to call with the integer arithmetic written here: any correct arithmetic gives the same integers, so NumPy, plain C++,
AVX2, AVX-512 and ARM agree. Deviations, scales and periods are in steps of the grid.

**Candidates.** A stream (key, step, example, purpose) is an endless list of candidates; its values are the accepted
ones, in order. Sixteen candidates take 12 cipher blocks = 48 words: candidate i of tile t has coin = word i, place =
word 16 + i, shape = word 32 + i of blocks 12 t … 12 t + 11. Its further bits, rarely needed, are the blocks 16 t + i
of purpose + 16 (for the coin) and + 80, + 144 … (for the shape); its low bits, for noise wider than 2**24 places per
bin, the word 16 t + i of purpose + 32. The lowest bit of `shape` is the sign, the other 31 choose a bin, `place` a
place within the bin (k places, k = k1 * 2**e, k1 <= 2**24): u = floor(place * k1 / 2**32) * 2**e + low, refused if
place * k1 mod 2**32 < 2**32 mod k1, which makes u exactly uniform. A candidate is accepted if its coin, as a number
between 0 and 1 with 32 bits and 128 further ones, lies below a probability p. Attempts are independent of each other
and of what is accepted in the end: the time tells nothing about the values (but for integers beyond 7 deviations,
1e-12 of them, which may take 0.3 microseconds more).

**gaussian** (purpose 6). Bin j is chosen with probability n_j / 2**31 (`UNITS`; from bin 13 on n_j = 2**(34 - j),
without end), y = j k + u with k = the least k >= s / 4 of the form above, and p = LEVEL * exp(-y^2 / (2 s^2)) / n_j.
Since n_j >= LEVEL * exp(-j^2 / 32) p never exceeds 1, and P(y) is proportional to n_j / k * p = exp(-y^2 / (2 s^2))
whatever the table: only p must be computed well. Minus zero is refused.

**laplace** (purpose 7). Half-steps: bin V has probability 2**-(V+1), z = V k + u, p = 2**-(u / k); so P(z) is
proportional to 2**-(z / k), an exponential variable of scale k / ln 2 rounded down, and ±floor((z + 1) / 2) is a
Laplace variable of scale k / (2 ln 2) rounded to the nearest integer. k is the least with k >= 2 ln 2 * scale: never
less noise than asked for.

**staircase** (purposes 8 and 56) and **joint_staircase** (9 and 57): see there.

Formal guarantee: for independent uniform bits (AES-128 is assumed to give them) each value's probability is that of
the stated law times a factor between e^-ratio and e^ratio, but for a part of total mass `tail`: see `Error`, the
functions that give it, and `extra`, which turns it into what an (epsilon, delta) must be raised by. The proofs are in
docs/noise.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedveil.errors import UserError
from fedveil.protect import noise
from fedveil.protect.bounded import ORDERS

GAUSSIAN, LAPLACE, STAIRCASE, JOINT = 6, 7, 8, 9
FURTHER, LOW, SECOND, NEXT = 16, 32, 48, 64  # added to a purpose

LEVEL = 389364290
UNITS = (
    389364293, 377384811, 343612780, 293907586, 236161380, 178263962, 126408078, 84205934, 52694727, 30977632,
    17107473, 8875241, 4325447,
)  # fmt: skip
_BINS = len(UNITS)
_TAIL = 22  # the remaining 2**22 of 2**31: 2**21 for the next bin, 2**20, … 1, and 1 for all further ones
_BELOW = np.array(
    [*(2**31 - np.cumsum(UNITS)), *(1 << i for i in range(_TAIL - 1, -1, -1))]
)  # bin > j: shape < this
_ALL_UNITS = np.array([*UNITS, *(1 << i for i in range(_TAIL - 1, -1, -1)), 1], np.int64)

NARROWEST, WIDEST = 0.25, 2.0**46
_MOST_PLACES = 1 << 24
_LN2 = 0.69314718056  # a little more than ln 2
_LN2_64 = 12786308645202655660  # ln 2 * 2**64, rounded up
_LN2_116 = 57584414849978831576646519229529903  # ln 2 * 2**116, rounded down
_MARGIN = 2.0**-40  # of the float64 probabilities used here; libraries' exp is good to 2**-50
_FINE = 1 << 24  # half-steps in which a Staircase's period loses half its weight, before scaling


@dataclass(frozen=True)
class Error:
    """How far a sampler is from its law: |log of the ratio of probabilities| <= ratio for every integer, but for
    integers of total mass at most `tail` under either law."""

    ratio: float
    tail: float = 0.0


def extra(error: Error, count: int, releases: int = 1, epsilon: float = 0.0) -> tuple[float, float]:
    """What (epsilon, delta) of the exact laws must be raised by for `releases` vectors of `count` sampled values.

    Formal guarantee: if the mechanism with exact laws is (epsilon, delta)-DP, the one with the sampler is
    (epsilon + a, (1 + 1e-6) delta + b)-DP for (a, b) = extra(...). For n = count * releases values and any set S,
    sampled(S) <= e^(n ratio) exact(S) + n tail and the other way round (the next value's law given the past, one value after
    the other); put the first into the second: sampled_D(S) <= e^(n ratio) (e^epsilon (e^(n ratio) sampled_D'(S) + n tail)
    + delta) + n tail.
    """
    n = count * releases
    if n * error.ratio > 1e-6:
        raise UserError(
            f"{n:.3g} sampled values are too many for the error bound {error.ratio:g} of each: "
            "use fewer releases or a smaller model"
        )
    grown = math.exp(n * error.ratio)
    return 2 * n * error.ratio, n * error.tail * (grown * math.exp(min(epsilon, 700.0)) + 1)


# ---- exact decisions


def exp_minus(t: int) -> tuple[int, int]:
    """(E, n) with E / 2**64 / 2**n = e^-(t / 2**64) to a relative 8 * 2**-64, for 0 <= t < 2**73."""
    n = t // _LN2_64
    r = t - (n * _LN2_116 >> 52)
    p = 1 << 64
    for i in range(20, 0, -1):
        p = (1 << 64) - (r * p >> 64) // i
    return p, n


def half_square(y: int, deviation: float) -> int:
    """(y / deviation)^2 / 2 in units of 2**-64, rounded down; off by less than (y / deviation + 2) of them."""
    fraction, exponent = math.frexp(deviation)
    h = (y << (64 + 53 - exponent)) // int(fraction * 2.0**53)
    whole, part = h >> 64, h & (2**64 - 1)
    return (whole * whole << 63) + whole * part + (part * part >> 65)


def gaussian_level(y: int, deviation: float, zeros: int = 0) -> int:
    """2**(160 + zeros) * LEVEL * exp(-y^2 / (2 deviation^2)), rounded down; accepted if coin * units is below."""
    t = half_square(y, deviation)
    if t >> 64 >= 256:
        return 0
    e, n = exp_minus(t)
    return (LEVEL * e << 96) >> (n - zeros)


def power_level(q: int, k: int) -> int:
    """2**160 * 2**-(q / k), rounded down; accepted if the coin is below."""
    shift, u = divmod(q, k)
    return exp_minus(u * _LN2_64 // k)[0] << 96 >> min(shift, 160)


# ---- candidates


@dataclass(frozen=True)
class _Places:
    """A bin of k = k1 * 2**shift places, 1 <= k1 <= 2**24."""

    k1: int
    shift: int

    @property
    def k(self) -> int:
        return self.k1 << self.shift


def _places(least: float) -> _Places:
    """The smallest bin of at least so many places."""
    shift = max(0, math.frexp(least)[1] - 25)
    k1 = max(1, math.ceil(math.ldexp(least, -shift)))
    if k1 > _MOST_PLACES:
        shift, k1 = shift + 1, math.ceil(math.ldexp(least, -shift - 1))
    return _Places(k1, shift)


@dataclass(frozen=True)
class _Stream:
    key: bytes
    step: int
    purpose: int
    example: int

    def further(self, candidate: int, part: int) -> int:
        """128 further bits of a candidate: part 0 belongs to its coin, parts 1, 2, … to its shape."""
        purpose, block = self.purpose + FURTHER + NEXT * part, np.array([candidate], np.uint32)
        w = noise.words(self.key, self.step, purpose, block, self.example)
        return int.from_bytes(w.astype(">u4").tobytes(), "big")

    def coin(self, candidate: int, first: int) -> int:
        """All 160 bits of a candidate's coin, given the first 32."""
        return first << 128 | self.further(candidate, 0)

    def zeros(self, candidate: int) -> int:
        """How many zeros lead the candidate's endless further bits of shape."""
        part = 1
        while not (bits := self.further(candidate, part)):
            part += 1
        return 128 * part - bits.bit_length()


def _tiles(stream: _Stream, places: _Places, first: int, tiles: int) -> tuple[np.ndarray, ...]:
    """Coins, places u, their validity, signs and 31 bits of shape of 16 * tiles candidates."""
    blocks = np.arange(12 * first, 12 * (first + tiles), dtype=np.uint32)
    w = noise.words(stream.key, stream.step, stream.purpose, blocks, stream.example).reshape(tiles, 3, 16)
    coin, place, shape = (np.ascontiguousarray(w[:, i]).reshape(-1) for i in range(3))
    product = place.astype(np.uint64) * np.uint64(places.k1)
    even = (product & np.uint64(2**32 - 1)) >= np.uint64(2**32 % places.k1)
    u = (product >> np.uint64(32)).astype(np.int64)
    if places.shift:
        blocks = np.arange(4 * first, 4 * (first + tiles), dtype=np.uint32)
        low = noise.words(stream.key, stream.step, stream.purpose + LOW, blocks, stream.example).reshape(-1)
        u = (u << places.shift) | (low.astype(np.int64) & ((1 << places.shift) - 1))
    return coin.astype(np.int64), u, even, (shape & 1).astype(bool), (shape >> np.uint32(1)).astype(np.int64)


def _filtered(count: int, rate: float, make: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """The first `count` values of make(first tile, tiles) -> accepted values, about `rate` of them."""
    if not 0 <= count < 2**31:
        raise ValueError(f"a noise stream has no {count} values")
    out, have, tile = [np.zeros(0, np.int64)], 0, 0
    while have < count:
        tiles = min(4096, math.ceil((count - have) / (16 * rate)) + 2)
        values = make(tile, tiles)
        out.append(values)
        have, tile = have + len(values), tile + tiles
    return np.concatenate(out)[:count]


def numpy_gaussian(key: bytes, step: int, count: int, deviation: float, example: int = 0) -> np.ndarray:
    """`gaussian` without the compiled module: the definition."""
    _check(deviation, "deviation")
    places, stream = _places(deviation / 4), _Stream(key, step, GAUSSIAN, example)
    falling = np.sort(_BELOW)

    def make(first: int, tiles: int) -> np.ndarray:
        coin, u, even, negative, shape = _tiles(stream, places, first, tiles)
        bins = len(_BELOW) - np.searchsorted(falling, shape, "right")
        y, units = bins * places.k + u, _ALL_UNITS[bins]
        level = LEVEL * 2.0**32 * np.exp(-0.5 * (y / deviation) ** 2)
        gap = coin * units - level
        accept = gap < 0
        for i in np.flatnonzero(even & ((np.abs(gap) <= _MARGIN * level + units) | (shape == 0))):
            candidate, halvings = 16 * first + int(i), 0
            if shape[i] == 0:
                zeros = stream.zeros(candidate)
                y[i] += zeros * places.k
                halvings = zeros + 1
            level_here = gaussian_level(int(y[i]), deviation, halvings)
            accept[i] = stream.coin(candidate, int(coin[i])) * int(units[i]) < level_here
        accept &= even & ~(negative & (y == 0))
        made: np.ndarray = np.where(negative, -y, y)[accept]
        return made

    return _filtered(count, 0.9 * min(1.0, deviation / 4 / places.k), make)


def _geometric(stream: _Stream, count: int, places: _Places, signed_zero: bool) -> np.ndarray:
    """Integers z with P(|z|) proportional to 2**-(|z| / k) and a random sign, as z or ~z (= -1 - z).

    Without `signed_zero` minus zero is refused: then (z or -z) is the two-sided geometric law.
    """

    def make(first: int, tiles: int) -> np.ndarray:
        coin, u, even, negative, shape = _tiles(stream, places, first, tiles)
        bins = 31 - np.frexp(shape.astype(np.float64))[1].astype(np.int64)
        z = bins * places.k + u
        level = 2.0**32 * np.exp2(-u / places.k)
        gap = coin - level
        accept = gap < 0
        for i in np.flatnonzero(even & ((np.abs(gap) <= _MARGIN * level + 1) | (shape == 0))):
            candidate = 16 * first + int(i)
            if shape[i] == 0:
                z[i] += stream.zeros(candidate) * places.k
            accept[i] = stream.coin(candidate, int(coin[i])) < power_level(int(u[i]), places.k)
        accept &= even
        if not signed_zero:
            accept &= ~(negative & (z == 0))
        made: np.ndarray = np.where(negative, ~z, z)[accept]
        return made

    return _filtered(count, 0.7, make)


def gaussian(key: bytes, step: int, count: int, deviation: float, example: int = 0) -> np.ndarray:
    """The first `count` integers (int64) of a discrete Gaussian stream: P(y) proportional to e^(-y^2 / (2 deviation^2)).

    Formal guarantee: that law up to `gaussian_error(deviation)`.
    """
    _check(deviation, "deviation")
    if noise._native is not None:
        made: np.ndarray = noise._native.exact_gaussian(key, step, count, deviation, example)
        return made
    return numpy_gaussian(key, step, count, deviation, example)


def gaussian_error(deviation: float) -> Error:
    """Distance of `gaussian` from its law: up to 10 deviations log p is off by -8 to 21 units of 2**-64."""
    _check(deviation, "deviation")
    # sum over |y| > 10 s of e^(-y^2/2s^2) <= 2 (e^-50 + s sqrt(2 pi) Q(10)), over at least max(1, s sqrt(2 pi))
    mass = max(1.0, deviation * math.sqrt(2 * math.pi))
    return Error(2.0**-59, 2 * (1.93e-22 / mass + 7.7e-24))


def numpy_laplace(key: bytes, step: int, count: int, scale: float, example: int = 0) -> np.ndarray:
    """`laplace` without the compiled module: the definition."""
    z = _geometric(_Stream(key, step, LAPLACE, example), count, _laplace_places(scale), True)
    return np.where(z < 0, -(-z >> 1), (z + 1) >> 1)


def laplace(key: bytes, step: int, count: int, scale: float, example: int = 0) -> np.ndarray:
    """The first `count` integers (int64) of a stream of Laplace variables, each rounded to the nearest integer.

    Their scale is `laplace_scale(scale)`, slightly more than asked for. (An integer beyond 63 bits, of probability
    below 2**-(2**17), would appear modulo 2**64.)

    Formal guarantee: that law up to `laplace_error()`, with all integers possible. x + round(N) = round(x + N) for
    integer x, so adding these to an integer vector is a post-processing of the Laplace mechanism on it.
    """
    _check(scale, "scale")
    if noise._native is not None:
        made: np.ndarray = noise._native.exact_laplace(key, step, count, scale, example)
        return made
    return numpy_laplace(key, step, count, scale, example)


def _laplace_places(scale: float) -> _Places:
    _check(scale, "scale")
    return _places(2 * scale * _LN2)


def laplace_scale(scale: float) -> float:
    """The scale of the variables that `laplace` rounds: the next k / (2 ln 2), at least `scale`.

    Laplace noise of a larger scale is a post-processing of that of a smaller one, so `scale` may be counted.
    """
    return _laplace_places(scale).k / (2 * math.log(2))


def laplace_error() -> Error:
    """Distance of `laplace` from its law: log p, p between 1/2 and 1, is off by -9 to 9 units of 2**-64."""
    return Error(2.0**-59)


# ---- Staircase


@dataclass(frozen=True)
class Stairs:
    """Staircase noise on the integers: density e^(-lam K(r)) at distance r, K(r) = floor(r / period) + [r mod period >=
    inner]. Weights halve every `half` half-steps of a geometric variable, `per` of which are one period; lam =
    ln 2 * per / half, at most what was asked for."""

    period: int
    inner: int
    half: int
    per: int

    @property
    def lam(self) -> float:
        return math.log(2) * self.per / self.half

    @property
    def nu(self) -> float:
        return self.inner / self.period


def stairs(lam: float, period: int, nu: float | None = None, joint: bool = False) -> Stairs:
    """The shape for steps of `period` (the bound on a change, in steps of the grid: see `snapped_period`).

    Formal guarantee: lam of the result <= the given one; any 0 < inner < period keeps the promise of `staircase`.
    """
    nu = noise.default_nu(lam) if nu is None else nu
    if not (2.0**-20 <= lam <= 60 and 0 < nu < 1 and 2 <= period <= 2**45):
        raise UserError(
            f"exact Staircase noise needs 2**-20 <= lambda <= 60, 0 < nu < 1 and a bound of 2 … 2**45 grid steps, "
            f"not lambda={lam:g}, nu={nu:g}, {period}; change the grid or the noise"
        )
    inner = min(max(round(nu * period), 1), period - 1)
    if joint:  # one step of the grid is one step of the geometric variable
        return Stairs(period, inner, _places(period / lam * _LN2).k, period)
    half = _FINE << max(0, math.ceil(-math.log2(lam)))
    return Stairs(period, inner, half, math.floor(lam / _LN2 * half))


def _inner_threshold(shape: Stairs) -> int:
    """2**64 times the probability of the inner part of a period, between 1 and 2**64 - 1."""
    whole, rest = divmod(shape.per, shape.half)
    e, n = exp_minus(rest * _LN2_64 // shape.half)
    weight = shape.inner << (64 + n + whole)
    return min(max((weight << 64) // (weight + (shape.period - shape.inner) * e), 1), 2**64 - 1)


def numpy_staircase(key: bytes, step: int, count: int, shape: Stairs, example: int = 0) -> np.ndarray:
    """`staircase` without the compiled module: the definition."""
    z = _geometric(_Stream(key, step, STAIRCASE, example), count, _places(float(shape.half)), True)
    negative = z < 0
    period = np.where(negative, ~z, z) // shape.per
    v = np.zeros(count, np.int64)
    inside = np.zeros(count, bool)
    waiting, attempt = np.arange(count), 0
    while waiting.size:
        w = noise.words(key, step, STAIRCASE + SECOND, waiting.astype(np.uint32), example | attempt << 16)
        w = w.astype(np.uint64)
        if attempt == 0:
            inside = (w[:, 0] << np.uint64(32) | w[:, 1]) < np.uint64(_inner_threshold(shape))
        size = np.where(inside[waiting], 2 * shape.inner, 2 * (shape.period - shape.inner))
        mask = np.where(inside[waiting], _mask(2 * shape.inner), _mask(2 * (shape.period - shape.inner)))
        v[waiting] = (w[:, 2] << np.uint64(32) | w[:, 3]).astype(np.int64) & mask
        waiting, attempt = waiting[v[waiting] >= size], attempt + 1
    half_steps = 2 * shape.period * period + np.where(inside, v, v + 2 * shape.inner)
    y = (half_steps + 1) >> 1
    return np.where(negative, -y, y)


def _mask(size: int) -> int:
    return (1 << (size - 1).bit_length()) - 1


def staircase(key: bytes, step: int, count: int, shape: Stairs, example: int = 0) -> np.ndarray:
    """The first `count` integers (int64) of a stream of Staircase variables, each rounded to the nearest integer.

    Period K = floor(z / per) with z from the geometric law of `laplace`, k = half, purpose 8; which part of the period: the first
    64 bits of block i of purpose 56 against `_inner_threshold`; where in it, in half-steps: the other 64 bits,
    masked to the next power of two, and those of example | attempt << 16 while they are too large.

    Formal guarantee: rounded continuous Staircase noise with (lam, nu, period) of `shape`, up to `staircase_error`. Added to an
    integer that changes by at most `period`, it is lam-DP; all integers are possible.
    """
    if noise._native is not None:
        made: np.ndarray = noise._native.exact_staircase(key, step, count, stairs_fields(shape), example)
        return made
    return numpy_staircase(key, step, count, shape, example)


def stairs_fields(shape: Stairs) -> tuple[int, int, int, int, int]:
    """The numbers that the compiled module takes."""
    return shape.period, shape.inner, shape.half, shape.per, _inner_threshold(shape)


def staircase_error(shape: Stairs) -> Error:
    """Distance of `staircase` from its law: the geometric part, and 64 bits to choose between inner and outer."""
    threshold = _inner_threshold(shape)
    return Error(2.0**-59 + 2.0 / min(threshold, 2**64 - threshold))


def numpy_joint_staircase(key: bytes, step: int, count: int, shape: Stairs, example: int = 0) -> np.ndarray:
    """`joint_staircase` without the compiled module: the definition."""
    places = _places(float(shape.half))
    for attempt in range(1 << 15):
        label = example | attempt << 16
        z = _geometric(_Stream(key, step, JOINT, label), count, places, False)
        y = np.where(z < 0, z + 1, z)
        r = int(np.abs(y).sum())
        steps = r // shape.period + (r % shape.period >= shape.inner)
        coin = _Stream(key, step, JOINT + SECOND - FURTHER, label).further(0, 0) << 32
        if coin < power_level(steps * shape.period - r + shape.inner, shape.half):
            return y
    raise UserError(_NONE_ACCEPTED)


_NONE_ACCEPTED = "joint staircase noise: no attempt was accepted; lambda is too large for rejection"


def joint_staircase(key: bytes, step: int, count: int, shape: Stairs, example: int = 0) -> np.ndarray:
    """One integer vector (int64) with P(y) proportional to e^(-lam K(r)), r = its l1 norm; see `Stairs`.

    By rejection: attempt a draws two-sided geometric integers (purpose 9, example | a << 16; the law of `laplace`'s z with k =
    half and a sign, without minus zero), P proportional to 2**-(r / half), and is accepted with probability 2**-(q / half), q =
    K(r) period - r + inner >= 1; its coin is the 128 bits of block 0 of purpose 57. Integers decide.

    Formal guarantee: lam-DP for integer vectors whose l1 norm moves by at most `period`, up to `joint_error(count)`.
    """
    if noise._native is None:
        return numpy_joint_staircase(key, step, count, shape, example)
    try:
        made: np.ndarray = noise._native.exact_staircase(key, step, count, stairs_fields(shape), example, True)
        return made
    except ValueError as problem:
        raise UserError(_NONE_ACCEPTED) from problem


def joint_error(shape: Stairs, count: int) -> Error:
    """Distance of one vector of `joint_staircase` from its law (count it once, not per coordinate)."""
    return Error((count + 1) * 2.0**-59 + 2.0 ** (shape.period / shape.half - 128))


# ---- what rounding to the grid costs; sums of shares


def snapped_l1_bound(bound: float, grid: float, count: int) -> float:
    """l1 bound on the change of a snapped sum of `count` values when the sum's l1 norm changes by at most `bound`.

    Formal guarantee: |snap(a) - snap(b)| <= |a - b| / grid + 1 in every coordinate.
    """
    return bound + grid * count


def snapped_laplace_multiplier(
    scale: float, bound: float, grid: float, count: int, norm: str = "l1"
) -> float:
    """Multiplier b / C of a continuous Laplace mechanism that a snapped sum plus `laplace` is a post-processing of.

    scale: what was asked of `laplace`, times the grid. norm: of the clip bound, "l1" or "l2" (rounding then adds sqrt(count)
    steps). Adding rounded noise to integers is rounding the sum of both.
    """
    return scale / (
        snapped_l1_bound(bound, grid, count) if ORDERS[norm] == 1 else noise.snapped_bound(bound, grid, count)
    )


def snapped_period(bound: float, grid: float, count: int, norm: str = "l1", width: float = 1.0) -> int:
    """Grid steps by which a snapped sum can change at most in this norm, times `width`: the period for Staircase noise on it.

    Staircase noise promises lam for changes up to its period and nothing smaller than 2 lam beyond: the noise must be made
    for the snapped bound. With it the multiplier 1 / lam is counted as without a grid.
    """
    wider = count if ORDERS[norm] == 1 else math.isqrt(count - 1) + 1
    if width == 1:
        return math.floor(bound / grid * (1 + 2.0**-50)) + wider
    return math.ceil(width * (bound / grid + wider) * (1 + 2.0**-50))


def shares_error(deviation: float, shares: int) -> Error:
    """Distance of the sum of `shares` independent `gaussian` values of this deviation (>= 1) from the discrete Gaussian
    of deviation * sqrt(shares).

    Formal guarantee: sum of k shares plus one more: sum over x of e^(-x^2/2ks^2 - (y-x)^2/2s^2) = e^(-y^2/2(k+1)s^2) times the
    sum of a Gaussian of variance s^2 k/(k+1) over the shifted integers, which is (1 ± e_k) times its mean, e_k <= 2.1
    exp(-2 pi^2 s^2 k/(k+1)) (Poisson summation); normalising at most doubles that. The samplers' own errors add up.
    """
    one = gaussian_error(deviation)
    if deviation < 1 or shares < 1:
        raise UserError(f"shares of noise need a deviation of at least one grid step, not {deviation:g}")
    first = [math.exp(-2 * (math.pi * deviation) ** 2 * k / (k + 1)) for k in range(1, min(shares, 64))]
    rest = max(0, shares - 64) * math.exp(-2 * (math.pi * deviation) ** 2 * 64 / 65)
    return Error(shares * one.ratio + 4.4 * (sum(first) + rest), shares * one.tail)


def shares_multiplier(deviation: float, honest: int, bound: float, grid: float, count: int) -> float:
    """Multiplier of the continuous Gaussian mechanism behind a sum to which `honest` nodes each add a share of noise.

    deviation: of one share, in the units of bound and grid. Formal guarantee: each node rounds its own vector, so that one unit
    of privacy moves the sum of snapped vectors by at most `noise.snapped_bound`; shares of others only post-process. Add
    `extra(shares_error(deviation / grid, honest), …)`.
    """
    return noise.snapped_multiplier(deviation * math.sqrt(honest), bound, grid, count)


# ---- the noise of a plan

ROOM = 2.0**-10  # by so much periods are wider than the clip bound: more than rounding can widen a sum (`bounded.rounding_slack`)


def _check(width: float, name: str) -> None:
    if not NARROWEST <= width <= WIDEST:
        raise UserError(
            f"exact noise: {name} / grid must be between {NARROWEST} and 2**46, not {width:g}; change the grid"
        )
