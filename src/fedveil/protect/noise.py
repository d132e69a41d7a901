"""Noise that protects data: counter-mode AES streams, the same bits in every engine.

A stream is named by (key, step, example, purpose). Its words are AES-128 encryptions of the counter blocks
(block, example | attempt << 16, step, purpose): four little-endian 32-bit words, block = 0, 1, 2, …; the
ciphertext is read as four little-endian words. The key of a client and round is 16 bytes, so noise does not
depend on threads, chunks, order or resume. Simulations derive keys from the seed (reproducible, and whoever
knows the seed can subtract the noise); deployments take them from the operating system.

Words to values (everything in float32, with +, -, *, sqrt and integer operations in a fixed order, no fused
multiply-add: NumPy here and C++ in src/native give identical bits on every machine):

    uniform      h = word >> 1 (31 bits); u = (h + 1/2) / 2**31: never 0, never 1, and 1 - u is exact near 1
    exponential  -ln u by a polynomial; between 2**-32 and 22.19
    normals      purpose 1; 32 values from 8 blocks: words 0..15 give radii sqrt(-2 ln u), words 16..31 give
                 angles (2 top bits: quadrant, 30 bits: angle within it); values 0..15 are radius * cosine,
                 16..31 radius * sine
    laplaces     purpose 2; one word each: exponential, sign = lowest bit
    staircases   purpose 3; 16 values from 8 blocks: words 0..15 give sign and period floor(exponential /
                 lambda), words 16..31 the place within the period by inversion
    joint        purpose 4; i.i.d. Laplace vector, accepted by its l1 norm (see `joint_staircase`)

Step l of a client is the stream (noise_key, l), in flat parameter order. How wide the noise is, is no matter of this module:
`protect.noised.Drawing` holds the scale, `protect.law` says what is drawn with it.

Formal guarantee, and where it ends. The accountants assume real-valued noise. These are float32 values: a
normal has at most 2**63 distinct values, |z| <= 6.67 (true mass beyond: 2.7e-11 per coordinate), |laplace|
<= 22.19 (mass 2.3e-10), and the low bits of a float sum can carry information about the addends. The
radius is never 0 (at least 2.1e-5); cosine and sine are right to 1e-7. The `grid` option closes that gap:
the sum is rounded to a grid and integer noise of the law is added (`Drawing.add`, counted by
`snapped_multiplier`); then every output is possible for every neighbour and the law holds up to a total
variation of some 1e-17 per coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedveil.errors import UserError

INTERFACE = 7  # of the compiled module; one of another version is not used
NOT_COMPILED = "the compiled module is not installed"

try:
    from fedveil import _native as _native

    if getattr(_native, "VERSION", None) != INTERFACE:
        _native = None
        NOT_COMPILED = "the compiled module was built from another version of fedveil; install fedveil again to build it anew"
except ImportError:  # pure Python installation: same bits, slower
    _native = None

NORMAL, LAPLACE, STAIRCASE, JOINT = 1, 2, 3, 4
LARGEST_NORMAL = 6.67
LARGEST_EXPONENTIAL = 22.19
_CHUNK = 1 << 13  # tiles per pass: temporaries stay in cache

_F = np.float32
_LN2 = _F(0.69314718)
# ln(1 + f) = f - f^2/2 + f^3 P(f) on [sqrt(1/2) - 1, sqrt(2) - 1]; relative error 3.2e-8
_LOG = tuple(map(_F, (0.3333391, -0.25001338, 0.19963063, -0.16577585, 0.14914769, -0.14267486, 0.08700435)))
_SIN = tuple(map(_F, (-0.00019517299, 0.008332178, -0.16666655)))  # sin x = x + x^3 P(x^2), |x| <= pi/4
_COS = tuple(map(_F, (2.4438452e-05, -0.0013887368, 0.041666646)))  # cos x = 1 - x^2/2 + x^4 P(x^2)
_ANGLE = _F(math.pi / 2**33)  # radians per unit: a signed 32-bit word covers a quadrant
_NEAR_ONE = np.int32(1518500250)  # h from which u >= sqrt(1/2) and 1 - u is used instead
_ROOT_HALF = np.int32(0x3F3504F3)  # bits of float32 sqrt(1/2)


def words(key: bytes, step: int, purpose: int, blocks: np.ndarray, example: int = 0) -> np.ndarray:
    """The cipher's words [len(blocks), 4] (uint32) at the given block numbers of one stream."""
    if len(key) != 16:
        raise ValueError(f"a noise key has 16 bytes, not {len(key)}")
    counter = np.empty((len(blocks), 4), "<u4")
    counter[:, 0] = blocks
    counter[:, 1] = example
    counter[:, 2] = step
    counter[:, 3] = purpose
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return np.frombuffer(cipher.update(counter.tobytes()), "<u4").reshape(-1, 4)


def exponential_of_word(word: np.ndarray) -> np.ndarray:
    """-ln u for u = ((word >> 1) + 1/2) / 2**31, with full relative precision at both ends."""
    h = (word >> np.uint32(1)).view(np.int32)
    near_one = h >= _NEAR_ONE
    t = h.astype(_F) + _F(0.5)
    bits = t.view(np.int32)
    exponent = (bits - _ROOT_HALF) >> np.int32(23)
    f_low = (bits - (exponent << np.int32(23))).view(_F) - _F(1)
    f_high = ((np.int32(2**31 - 1) - h).astype(_F) + _F(0.5)) * _F(-(2.0**-31))
    f = np.where(near_one, f_high, f_low)
    k = np.where(near_one, _F(0), (np.int32(31) - exponent).astype(_F))
    z = f * f
    low, middle = _LOG[0] + _LOG[1] * f, _LOG[2] + _LOG[3] * f
    high = (_LOG[4] + _LOG[5] * f) + _LOG[6] * z
    p = low + z * (middle + z * high)
    made: np.ndarray = k * _LN2 - (f + ((p * f) * z - _F(0.5) * z))
    return made


def _direction_of_word(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sqrt(2) times cosine and sine of an angle: pi/4 + x in a quadrant that the two top bits choose."""
    x = (word << np.uint32(2) | np.uint32(2)).view(np.int32).astype(_F) * _ANGLE
    z = x * x
    s = x + (((_SIN[0] * z + _SIN[1]) * z + _SIN[2]) * z) * x
    c = _F(1) + ((_COS[0] * z + _COS[1]) * z + _COS[2]) * (z * z) - _F(0.5) * z
    return _negate(c - s, word >> np.uint32(31)), _negate(c + s, word >> np.uint32(30))


def _negate(values: np.ndarray, bit: np.ndarray) -> np.ndarray:
    return np.where((bit & np.uint32(1)).astype(bool), -values, values)


def _tiles(
    values_per_tile: int, blocks_per_tile: int, key: bytes, step: int, purpose: int, count: int, first: int, example: int,
    make: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Run `make(words of n tiles) -> [n, values_per_tile]` over the tiles covering the values."""
    if count < 0 or first < 0 or (first + count) // values_per_tile >= 2**32 // blocks_per_tile:
        raise ValueError(f"a noise stream has no values {first} … {first + count}")
    out = np.empty(count, _F)
    tile, end = first // values_per_tile, -(-(first + count) // values_per_tile)
    while tile < end:
        n = min(_CHUNK, end - tile)
        blocks = np.arange(tile * blocks_per_tile, (tile + n) * blocks_per_tile, dtype=np.uint32)
        values = make(words(key, step, purpose, blocks, example).reshape(n, -1)).reshape(-1)
        at = tile * values_per_tile - first
        low, high = max(at, 0), min(at + values.size, count)
        out[low:high] = values[low - at : high - at]
        tile += n
    return out


def numpy_normals(key: bytes, step: int, count: int, first: int = 0, example: int = 0) -> np.ndarray:
    """`normals` without the compiled module: the definition."""

    def make(w: np.ndarray) -> np.ndarray:
        radius = np.sqrt(exponential_of_word(w[:, :16]))  # the missing sqrt(2) is in the direction
        cosine, sine = _direction_of_word(w[:, 16:])
        return np.concatenate([cosine * radius, sine * radius], axis=1)

    return _tiles(32, 8, key, step, NORMAL, count, first, example, make)


def numpy_laplaces(
    key: bytes, step: int, count: int, first: int = 0, example: int = 0, purpose: int = LAPLACE
) -> np.ndarray:
    """`laplaces` without the compiled module: the definition."""

    def make(w: np.ndarray) -> np.ndarray:
        return _negate(exponential_of_word(w), w)

    return _tiles(32, 8, key, step, purpose, count, first, example, make)


def _staircase_constants(lam: float, nu: float) -> tuple[np.float32, np.uint32, np.float32, np.float32]:
    """1/lambda, 2**32 * P(inner part), the two slopes of the inverse distribution within a period."""
    if not (lam > 0 and math.isfinite(lam) and 0 < nu < 1):
        raise UserError(f"staircase noise needs lambda > 0 and 0 < nu < 1, not lambda={lam}, nu={nu}")
    inner = nu / (nu + (1 - nu) * math.exp(-lam))
    threshold = min(max(round(inner * 2**32), 1), 2**32 - 1)
    p = threshold / 2**32  # the inversion uses the rounded probability, so it is continuous
    return _F(1 / lam), np.uint32(threshold), _F(nu / p), _F((1 - nu) / (1 - p))


def numpy_staircases(
    key: bytes, step: int, count: int, lam: float, nu: float, first: int = 0, example: int = 0
) -> np.ndarray:
    """`staircases` without the compiled module: the definition."""
    per_lam, threshold, slope_in, slope_out = _staircase_constants(lam, nu)

    def make(w: np.ndarray) -> np.ndarray:
        radial, place = w[:, :16], w[:, 16:]
        period = np.floor(exponential_of_word(radial) * per_lam)
        h = place >> np.uint32(1)
        below = (h.view(np.int32).astype(_F) + _F(0.5)) * _F(2.0**-31)
        above = ((np.uint32(2**31 - 1) - h).view(np.int32).astype(_F) + _F(0.5)) * _F(2.0**-31)
        inside = np.where(place < threshold, below * slope_in, _F(1) - above * slope_out)
        return _negate(period + inside, radial)

    return _tiles(16, 8, key, step, STAIRCASE, count, first, example, make)


def normals(key: bytes, step: int, count: int, first: int = 0, example: int = 0) -> np.ndarray:
    """Values first … first + count of the standard normal stream (key, step), float32."""
    if _native is not None:
        made: np.ndarray = _native.normals(key, step, count, first, example)
        return made
    return numpy_normals(key, step, count, first, example)


def laplaces(key: bytes, step: int, count: int, first: int = 0, example: int = 0) -> np.ndarray:
    """Values of the Laplace stream with scale b = 1 (variance 2), float32."""
    if _native is not None:
        made: np.ndarray = _native.laplaces(key, step, count, first, example, LAPLACE)
        return made
    return numpy_laplaces(key, step, count, first, example)


def staircases(
    key: bytes, step: int, count: int, lam: float, nu: float | None = None, first: int = 0, example: int = 0
) -> np.ndarray:
    """Values of the Staircase stream with Delta = 1, float32.

    Density a * e^(-k lam) on [k, k + nu) and a * e^(-(k+1) lam) on [k + nu, k + 1), symmetric, with
    a = (1 - e^-lam) / (2 (nu + e^-lam (1 - nu))). The period k is geometric from 0.

    Formal guarantee: one scalar that moves by at most 1 is lam-DP. It says nothing of the kind for
    vectors under an l1 bound (use `joint_staircase`); for an l2 bound see the accountant.
    """
    nu = default_nu(lam) if nu is None else nu
    if _native is not None:
        constants = _staircase_constants(lam, nu)
        made: np.ndarray = _native.staircases(key, step, count, first, example, *(c.item() for c in constants))
        return made
    return numpy_staircases(key, step, count, lam, nu, first, example)


def staircase_shape(multiplier: float, nu: float | None) -> tuple[float, float, float, int, float, float]:
    """lambda, nu and the constants of the sampler for a plan's multiplier (0: no noise, any shape)."""
    lam = 1 / multiplier if multiplier else 1.0
    nu = default_nu(lam) if nu is None else nu
    per_lam, threshold, slope_in, slope_out = _staircase_constants(lam, nu)
    return lam, nu, float(per_lam), int(threshold), float(slope_in), float(slope_out)


def default_nu(lam: float) -> float:
    """The variance-minimising shape 1 / (1 + e^(lam/2))."""
    return 1 / (1 + math.exp(min(lam / 2, 700.0)))


def joint_staircase(
    key: bytes, step: int, count: int, lam: float, nu: float | None = None, example: int = 0
) -> np.ndarray:
    """One draw of the l1-norm Staircase law in `count` dimensions with Delta = 1 (Geng et al.), float32.

    Density at x is proportional to e^(-lam K(r)), r = the l1 norm, K(r) = floor(r) + [r - floor(r) >= nu].
    Drawn exactly by rejection: X = Laplace vector / lam has density e^(-lam r); it is accepted with
    probability e^(-lam (K(r) - r + nu)), i.e. when an exponential variable is at least that exponent. The
    norm is summed in integers of 2**-24, so that every engine accepts the same attempt.

    Formal guarantee: lam-DP for a vector whose l1 norm moves by at most 1.
    """
    nu = default_nu(lam) if nu is None else nu
    _staircase_constants(lam, nu)
    for attempt in range(1 << 15):
        stream = example | attempt << 16
        if _native is not None:
            x = _native.laplaces(key, step, count + 1, 0, stream, JOINT)
        else:
            x = numpy_laplaces(key, step, count + 1, 0, stream, JOINT)
        norm = int(np.rint(np.abs(x[:count]).astype(np.float64) * 2.0**24).astype(np.int64).sum())
        r = norm * 2.0**-24 / lam
        period = math.floor(r)
        exponent = lam * (period + (1.0 if r - period >= nu else 0.0) - r + nu)
        if float(abs(x[count])) >= exponent:
            made: np.ndarray = x[:count] * _F(1 / lam)
            return made
    raise UserError(f"joint staircase noise: no attempt was accepted; lambda = {lam:g} is too large, set a larger sigma")


def snap(total: np.ndarray, grid: float) -> np.ndarray:
    """The nearest multiples of `grid`, as int64 counts of it (ties to even)."""
    return np.rint(np.asarray(total, np.float64) / grid).astype(np.int64)


def snapped_bound(bound: float, grid: float, count: int) -> float:
    """l2 bound on the change of a snapped sum when the sum itself changes by at most `bound`."""
    return bound + grid * math.sqrt(count)


SMOOTHING = 1.5


def snapped_multiplier(deviation: float, bound: float, grid: float, count: int) -> float:
    """Noise multiplier of a continuous Gaussian mechanism that a snapped sum with discrete noise is a post-processing of.

    Rounding widens the bound (`snapped_bound`). And the discrete Gaussian of variance s^2 + r^2 is what comes out when
    a continuous one of variance s^2 is rounded to the grid at random, with the discrete Gaussian of variance r^2
    around it; for r = 1.5 grid steps that holds to a relative 2 e^(-2 pi^2 r^2) < 2e-19 of each probability.
    """
    left = deviation**2 - (SMOOTHING * grid) ** 2
    if left <= 0:
        raise UserError(
            f"noise of deviation {deviation:g} is no wider than its grid of {grid:g}: use a finer grid"
        )
    return math.sqrt(left) / snapped_bound(bound, grid, count)
