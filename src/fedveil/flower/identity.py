"""Identity keys (Ed25519): who signed what, for which purpose.

Every signature covers a purpose and the message, so that a signature made for one thing is worthless for another.
Secret keys are files of 64 hexadecimal digits that only their owner can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from fedveil.errors import UserError
from fedveil.flower import limits

# Points of small order, with either sign bit, canonical or not: under such a "key" anybody can make signatures.
_EIGHTH = "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"
_OTHER = "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"
_LOW = [
    "00" * 32,
    "01" + "00" * 31,
    _EIGHTH,
    _OTHER,
    *(first + "ff" * 30 + "7f" for first in ("ec", "ed", "ee")),
]
WEAK = frozenset(
    bytes((*point[:31], point[31] | sign)) for point in map(bytes.fromhex, _LOW) for sign in (0, 0x80)
)


def new_identity() -> bytes:
    """A secret key: 32 bytes from the operating system."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_of(secret: bytes) -> bytes:
    """The public key (32 bytes) of a secret key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def sign(secret: bytes, purpose: str, message: bytes) -> bytes:
    """A signature (64 bytes) of `message` for this purpose only."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret).sign(_bound(purpose, message))


def verify(public: bytes, purpose: str, message: bytes, signature: bytes) -> bool:
    """Whether the holder of the secret key signed `message` for this purpose. Never raises."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if public in WEAK:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _bound(purpose, message))
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _bound(purpose: str, message: bytes) -> bytes:
    return b"fedveil\0" + purpose.encode() + b"\0" + hashlib.sha256(message).digest()


def fingerprint(public: bytes) -> str:
    """A short name of a public key, for people and logs."""
    return hashlib.sha256(public).hexdigest()[:16]


def write_identity(path: Path) -> bytes:
    """Make an identity in the new file `path` (0600, never overwritten); returns the public key."""
    secret = new_identity()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(f"{path} already exists; keys are never overwritten") from None
    with os.fdopen(handle, "wb") as file:
        file.write(secret.hex().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return public_of(secret)


def read_identity(path: Path | str) -> bytes:
    """The secret key in `path`; refuses a file that others may read."""
    text = limits.read_file(path, "identity key", 200).strip()
    with contextlib.suppress(OSError):
        if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            raise UserError(
                f"identity key {path}: others may read it; chmod 600 it (and make a new one if they did)"
            )
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        raise UserError(f"identity key {path}: expected 64 hexadecimal digits") from None
    if len(secret) != 32:
        raise UserError(f"identity key {path}: expected 32 bytes, got {len(secret)}")
    return secret
