"""The Gaussian streams of `protect.noise` for a stack of clients: one call of the compiled module, or NumPy without it.

The same bits as `noise.normals`, several times faster than its plain NumPy form: no temporaries, blocks that stay
in the cache, and choices by bit masks instead of branches. Every operation rounds once, as the definition demands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedveil.protect import noise

_F, _I = np.float32, np.int32
_TILES = 1152  # tiles of 32 values per pass: arrays of 72 KiB
_MASK, _TWO, _SIGN = _I(0x7FFFFFFF), _I(2), _I(-(2**31))
_HALF, _SCALE = _F(0.5), _F(-(2.0**-31))
_BEFORE_NEAR = _I(int(noise._NEAR_ONE) - 1)
_LOG, _SIN, _COS = noise._LOG, noise._SIN, noise._COS


class Normals:
    """Standard normal streams of several clients, step by step."""

    def __init__(self, keys: Sequence[bytes], count: int) -> None:
        self.count, self.tiles, self._native = count, -(-count // 32), noise._native
        if self._native is not None:
            self._keys = b"".join(keys)
            return
        self._ciphers = [Cipher(algorithms.AES(key), modes.ECB()).encryptor() for key in keys]
        # Blocks with radii first, then those with angles; the definition alternates four of each.
        tile = np.arange(self.tiles, dtype=np.uint32)[:, None] * np.uint32(8)
        four = np.arange(4, dtype=np.uint32)
        self._counter = np.zeros((2, self.tiles * 4, 4), "<u4")
        self._counter[0, :, 0] = (tile + four).reshape(-1)
        self._counter[1, :, 0] = (tile + four + np.uint32(4)).reshape(-1)
        self._counter[:, :, 3] = noise.NORMAL
        self.together = max(1, _TILES // self.tiles)  # clients per pass: short streams share one
        # A cipher wants a block of room behind its output; the next client's output overwrites it.
        self._words = np.empty((2, self.together * self.tiles * 64 + 16), np.uint8)
        self._values = np.empty((self.together * self.tiles, 2, 16), _F)
        self._room = np.empty((6, min(_TILES, self.together * self.tiles) * 16), _F)

    def draw(self, step: int, factors: np.ndarray, out: np.ndarray) -> None:
        """Fill out [clients, count] with factors [clients] times the values 0 … count - 1 of the streams
        (key, step), all float32."""
        if self._native is not None:
            self._native.fill_normals(self._keys, step, factors, out)
            return
        self._counter[:, :, 2] = step
        counters = self._counter.view(np.uint8).reshape(2, -1)
        size = self.tiles * 64
        for first in range(0, len(self._ciphers), self.together):
            ciphers = self._ciphers[first : first + self.together]
            for i, cipher in enumerate(ciphers):
                for half in range(2):
                    room = self._words[half, i * size : (i + 1) * size + 16]
                    cipher.update_into(counters[half], room.data)
            tiles = len(ciphers) * self.tiles
            words = self._words[:, : tiles * 64].view("<i4").astype(_I, copy=False)
            values = self._values[:tiles]
            for at in range(0, tiles, _TILES):
                part = slice(at * 16, (at + _TILES) * 16)
                _normals(words[0, part], words[1, part], values[at : at + _TILES], self._room)
            here = slice(first, first + len(ciphers))
            np.multiply(values.reshape(len(ciphers), -1)[:, : self.count], factors[here, None], out=out[here])


def _normals(radial: np.ndarray, angular: np.ndarray, out: np.ndarray, room: np.ndarray) -> None:
    """Words [n] each -> out[:, 0] = radius * cosine, out[:, 1] = radius * sine. `angular` and `radial` are used up."""
    n = len(radial)
    radius, a, b, c, d, _ = (r[:n] for r in room)
    _exponential(radial, radius, room[1:, :n])
    np.sqrt(radius, out=radius)  # the missing sqrt(2) is in the direction
    x, z = a, b
    turn = np.left_shift(angular, 2, out=radial)
    np.bitwise_or(turn, _TWO, out=turn)
    np.multiply(turn, noise._ANGLE, out=x, dtype=_F, casting="unsafe")
    np.multiply(x, x, out=z)
    sine = _quadratic(_SIN, z, c)
    np.multiply(sine, z, out=sine)
    np.multiply(sine, x, out=sine)
    np.add(sine, x, out=sine)
    cosine = _quadratic(_COS, z, d)
    np.multiply(z, z, out=x)
    np.multiply(cosine, x, out=cosine)
    np.add(cosine, _F(1), out=cosine)
    np.multiply(z, _HALF, out=z)
    np.subtract(cosine, z, out=cosine)
    # pi/4 + x, in the quadrant that the two top bits choose.
    for place, combine in ((0, np.subtract), (1, np.add)):
        combine(cosine, sine, out=x)
        np.multiply(x, radius, out=x)
        flip = np.left_shift(angular, place, out=radial)
        np.bitwise_and(flip, _SIGN, out=flip)
        np.bitwise_xor(x.view(_I), flip, out=x.view(_I))
        out[:, place] = x.reshape(-1, 16)


def _linear(constant: np.float32, slope: np.float32, x: np.ndarray, out: np.ndarray) -> np.ndarray:
    np.multiply(x, slope, out=out)
    return np.add(out, constant, out=out)


def _quadratic(coefficients: Sequence[np.float32], z: np.ndarray, out: np.ndarray) -> np.ndarray:
    _linear(coefficients[1], coefficients[0], z, out)
    np.multiply(out, z, out=out)
    return np.add(out, coefficients[2], out=out)


def _exponential(word: np.ndarray, out: np.ndarray, room: np.ndarray) -> None:
    """-ln u as `noise.exponential_of_word`, into `out`; `word` is used up."""
    f, k, high, exponent, z = room
    h = np.right_shift(word, 1, out=word)
    np.bitwise_and(h, _MASK, out=h)
    np.add(h, _HALF, out=f, dtype=_F, casting="unsafe")
    bits, shifted = f.view(_I), exponent.view(_I)
    np.subtract(bits, noise._ROOT_HALF, out=shifted)
    np.right_shift(shifted, 23, out=shifted)
    np.subtract(_I(31), shifted, out=k, dtype=_F, casting="unsafe")
    np.left_shift(shifted, 23, out=shifted)
    np.subtract(bits, shifted, out=bits)
    np.subtract(f, _F(1), out=f)
    # Next to one: 1 - u instead, which is exact there. The exponent is 31, so that k is 0 already.
    left = np.subtract(_MASK, h, out=high.view(_I))
    np.add(left, _HALF, out=high, dtype=_F, casting="unsafe")
    np.multiply(high, _SCALE, out=high)
    near = np.subtract(_BEFORE_NEAR, h, out=h)
    np.right_shift(near, 31, out=near)
    np.bitwise_xor(high.view(_I), bits, out=high.view(_I))
    np.bitwise_and(high.view(_I), near, out=high.view(_I))
    np.bitwise_xor(bits, high.view(_I), out=bits)
    np.multiply(f, f, out=z)
    p, term = high, exponent
    _linear(_LOG[4], _LOG[5], f, p)
    np.multiply(z, _LOG[6], out=term)
    np.add(p, term, out=p)
    for constant, slope in ((_LOG[2], _LOG[3]), (_LOG[0], _LOG[1])):
        np.multiply(p, z, out=p)
        np.add(p, _linear(constant, slope, f, term), out=p)
    np.multiply(p, f, out=p)
    np.multiply(p, z, out=p)
    np.multiply(z, _HALF, out=z)
    np.subtract(p, z, out=p)
    np.add(f, p, out=p)
    np.multiply(k, noise._LN2, out=k)
    np.subtract(k, p, out=out)
