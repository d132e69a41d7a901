"""Agreed keys, one-time boxes and masks: X25519, HKDF-SHA256, ChaCha20-Poly1305 and AES-256 in counter mode.

Every key is derived for one purpose, one attempt and one pair (or one node): the information given to HKDF names them.
A key therefore encrypts one thing ever, and the constant nonces below are never used twice with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedveil.protect import noise

SEED = 32
_CHUNK = 1 << 18  # bytes per pass: a mask is made and added while it is in the cache
_ZEROS = bytes(_CHUNK)


def derive(secret: bytes, purpose: str, *parts: bytes) -> bytes:
    """32 bytes from a uniform secret, for one purpose; parts are length-prefixed, so no two lists run together."""
    information = b"".join(len(part).to_bytes(4, "little") + part for part in (purpose.encode(), *parts))
    return HKDF(hashes.SHA256(), SEED, salt=b"fedveil secure sum 1", info=information).derive(secret)


def public_of(private: bytes) -> bytes:
    """The X25519 public key of 32 private bytes."""
    return (
        X25519PrivateKey.from_private_bytes(private).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    )


def agree(private: bytes | X25519PrivateKey, public: bytes, purpose: str, *parts: bytes) -> bytes:
    """The key that two nodes share. ValueError for a public key of small order."""
    key = private_key(private) if isinstance(private, bytes) else private
    return derive(key.exchange(X25519PublicKey.from_public_bytes(public)), purpose, *parts)


def private_key(private: bytes) -> X25519PrivateKey:
    """A private key that is used many times, read once."""
    return X25519PrivateKey.from_private_bytes(private)


def usable(public: bytes) -> bool:
    """Whether an agreement with this public key depends on the other side's secret."""
    try:
        agree(b"\x40" + bytes(31), public, "probe")
    except ValueError:
        return False
    return True


def seal(key: bytes, text: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate the one text that `key` is for."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, context)


def unseal(key: bytes, box: bytes, context: bytes) -> bytes | None:
    """The text of a box, or None if it is not the one that was sealed."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), box, context)
    except InvalidTag:
        return None


def stream(key: bytes, count: int) -> bytes:
    """The first `count` bytes of the AES-256 counter stream of a key."""
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(count))


def add_all(total: np.ndarray, seeds: Iterable[tuple[bytes, int]]) -> None:
    """Add the mask of each (seed, sign) to words (uint32 or uint64, little-endian) in place; modulo 2**width.

    Formal guarantee: for a uniform seed that is used for nothing else, a mask is indistinguishable from uniform words
    as long as AES-256 is from a random permutation (counter mode; below 2**40 blocks per key).
    """
    chosen = list(seeds)
    native: Any = noise._native
    best = native.mask_ciphers()[:1] if hasattr(native, "mask_ciphers") else []
    if best and total.flags.c_contiguous and all(len(seed) == SEED for seed, _ in chosen):
        signs = bytes(sign > 0 for _, sign in chosen)
        native.add_masks(total, b"".join(seed for seed, _ in chosen), signs, best[0])
    else:
        _add_with_library(total, chosen)


def _add_with_library(total: np.ndarray, seeds: Iterable[tuple[bytes, int]]) -> None:
    """The definition of `add_all`, for processors without instructions for AES."""
    ciphers = [(Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor(), sign) for seed, sign in seeds]
    room = bytearray(_CHUNK + 15)
    step = _CHUNK // total.itemsize
    for start in range(0, total.size, step):
        part = total[start : start + step]
        mask = np.frombuffer(room, part.dtype, part.size)
        for cipher, sign in ciphers:
            cipher.update_into(_ZEROS if part.nbytes == _CHUNK else bytes(part.nbytes), room)
            if sign > 0:
                part += mask
            else:
                part -= mask
