"""Keys instead of random streams.

Every random choice gets its own key, derived from (seed, purpose, numbers). Results therefore do not
depend on chunk size, worker count, order of execution or resume.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np


def derive(seed: int | bytes, purpose: str, *parts: int) -> bytes:
    """Derive a 32-byte key; distinct (seed, purpose, parts) give independent keys."""
    root = seed if isinstance(seed, bytes) else int(seed).to_bytes(16, "little", signed=True)
    message = b"\x00".join([root.hex().encode(), purpose.encode(), *(str(int(p)).encode() for p in parts)])
    return hashlib.blake2b(message, digest_size=32, person=b"fedveil").digest()


def generator(seed: int | bytes, purpose: str, *parts: int) -> np.random.Generator:
    """A NumPy generator for one purpose (never for noise that protects data: see protect.noise)."""
    return np.random.Generator(
        np.random.Philox(key=int.from_bytes(derive(seed, purpose, *parts)[:16], "little"))
    )


def entropy() -> bytes:
    """32 bytes from the operating system: the root key of a deployment. Never stored."""
    return os.urandom(32)
