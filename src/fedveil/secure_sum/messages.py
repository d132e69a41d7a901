"""The messages as frozen values and canonical bytes.

Every message carries its context (run, round, attempt, roster digest, parameter digest), its kind and its sender; those of
nodes are signed with Ed25519 over all of it. Parsing has limits, and bytes that are not what `pack` would write for
the same value are refused: one value has one spelling.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedveil.errors import UserError
from fedveil.secure_sum.parameters import LARGEST_ROSTER
from fedveil.secure_sum.shamir import PRIME, WIDTH

MAGIC = b"fvsum1"
LARGEST_BLOB = 1 << 16
SERVER = 0
MASK_KEY, SELF_SEED = 1, 2  # the two kinds of shares
_HEAD = struct.Struct("<6sB16sII32s32sI")
_SIGNED = b"fedveil secure sum message"
HEADER_SIZE = _HEAD.size + 2 * 32 + 64  # of a signed `Header`, which the masked vector follows


class BadMessage(UserError):
    """Bytes that are no message of this sum."""


@dataclass(frozen=True)
class Context:
    """Which sum a message belongs to."""

    run: bytes
    round: int
    attempt: int
    roster: bytes
    parameters: bytes

    def digest(self) -> bytes:
        """32 bytes that bind derived keys to this attempt."""
        return hashlib.sha256(
            b"fedveil secure sum context"
            + self.run
            + struct.pack("<II", self.round, self.attempt)
            + self.roster
            + self.parameters
        ).digest()


# Field types of the bodies: digest (32 bytes), ids (ascending node numbers), blobs (node, bytes), shares (owner, kind, value),
# signatures (node, 64 bytes). Lists of pairs ascend by node, so that no node appears twice.


@dataclass(frozen=True)
class Keys:
    """A node's public keys of the attempt, the commitment to its own seed, and its draws in a sparse graph."""

    KIND: ClassVar[int] = 1
    encrypt: bytes
    mask: bytes
    commitment: bytes
    neighbours: tuple[int, ...] = ()
    FORMAT: ClassVar[str] = "digest digest digest ids"


@dataclass(frozen=True)
class Shares:
    """For each holder a box with a share of the mask key and one of the own seed."""

    KIND: ClassVar[int] = 2
    boxes: tuple[tuple[int, bytes], ...]
    FORMAT: ClassVar[str] = "blobs"


@dataclass(frozen=True)
class Header:
    """Goes ahead of a masked vector: the set it was masked against, and the vector's digest."""

    KIND: ClassVar[int] = 3
    members: bytes
    vector: bytes
    FORMAT: ClassVar[str] = "digest digest"


@dataclass(frozen=True)
class Agreement:
    """A node's one survivor set of this attempt."""

    KIND: ClassVar[int] = 4
    survivors: bytes
    FORMAT: ClassVar[str] = "digest"


@dataclass(frozen=True)
class Reveal:
    """One share per node: of the own seed of a survivor, or of the mask key of one that dropped out."""

    KIND: ClassVar[int] = 5
    shares: tuple[tuple[int, int, int], ...]
    FORMAT: ClassVar[str] = "shares"


@dataclass(frozen=True)
class KeyBundle:
    """Server: who takes part, and the signed keys that concern the receiver."""

    KIND: ClassVar[int] = 11
    members: tuple[int, ...]
    keys: tuple[tuple[int, bytes], ...]
    FORMAT: ClassVar[str] = "ids blobs"


@dataclass(frozen=True)
class ShareBundle:
    """Server: whose shares arrived, and the boxes for the receiver."""

    KIND: ClassVar[int] = 12
    members: tuple[int, ...]
    boxes: tuple[tuple[int, bytes], ...]
    FORMAT: ClassVar[str] = "ids blobs"


@dataclass(frozen=True)
class Request:
    """Server: whose vectors arrived, and the signed headers that concern the receiver."""

    KIND: ClassVar[int] = 13
    survivors: tuple[int, ...]
    headers: tuple[tuple[int, bytes], ...]
    FORMAT: ClassVar[str] = "ids blobs"


@dataclass(frozen=True)
class Proof:
    """Server: signatures under the survivor set."""

    KIND: ClassVar[int] = 14
    signatures: tuple[tuple[int, bytes], ...]
    FORMAT: ClassVar[str] = "signatures"


Body = Keys | Shares | Header | Agreement | Reveal | KeyBundle | ShareBundle | Request | Proof
_BODIES: dict[int, Any] = {
    body.KIND: body
    for body in (Keys, Shares, Header, Agreement, Reveal, KeyBundle, ShareBundle, Request, Proof)
}
SIGNED = (Keys, Shares, Header, Agreement, Reveal)


def ids_digest(purpose: str, context: Context, *sets: tuple[int, ...]) -> bytes:
    """Digest of sets of nodes, for one purpose and attempt."""
    parts = [_write("ids", ids) for ids in sets]
    return hashlib.sha256(purpose.encode() + b"\x00" + context.digest() + b"".join(parts)).digest()


def _write(kind: str, value: Any) -> bytes:
    if kind == "digest":
        return value
    count = struct.pack("<I", len(value))
    if kind == "ids":
        return count + struct.pack(f"<{len(value)}I", *value)
    if kind == "blobs":
        return count + b"".join(struct.pack("<II", node, len(blob)) + blob for node, blob in value)
    if kind == "signatures":
        return count + b"".join(struct.pack("<I", node) + signature for node, signature in value)
    return count + b"".join(
        struct.pack("<IB", owner, which) + share.to_bytes(WIDTH, "little") for owner, which, share in value
    )


class _Reader:
    """Takes bytes from the front; says where they end too early."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise BadMessage("a message of the secure sum ends too early")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def count(self) -> int:
        found = self.number()
        if found > LARGEST_ROSTER:
            raise BadMessage(f"a message of the secure sum lists {found} nodes; {LARGEST_ROSTER} are allowed")
        return found


def _read(kind: str, reader: _Reader) -> Any:
    if kind == "digest":
        return reader.take(32)
    count = reader.count()
    if kind == "ids":
        found: Any = struct.unpack(f"<{count}I", reader.take(4 * count))
        nodes = found
    elif kind == "blobs":
        found = tuple((reader.number(), _blob(reader)) for _ in range(count))
        nodes = tuple(node for node, _ in found)
    elif kind == "signatures":
        found = tuple((reader.number(), reader.take(64)) for _ in range(count))
        nodes = tuple(node for node, _ in found)
    else:
        found = tuple(
            (reader.number(), reader.take(1)[0], int.from_bytes(reader.take(WIDTH), "little"))
            for _ in range(count)
        )
        nodes = tuple(owner for owner, _, _ in found)
        if any(which not in (MASK_KEY, SELF_SEED) or share >= PRIME for _, which, share in found):
            raise BadMessage("a share is of no known kind, or outside its field")
    if any(a >= b for a, b in pairwise(nodes)) or (nodes and nodes[0] < 1):
        raise BadMessage("nodes in a message must ascend, from 1")
    return found


def _blob(reader: _Reader) -> bytes:
    size = reader.number()
    if size > LARGEST_BLOB:
        raise BadMessage(f"an entry of {size} bytes; {LARGEST_BLOB} are allowed")
    return reader.take(size)


def pack(context: Context, sender: int, body: Body, key: Ed25519PrivateKey | None = None) -> bytes:
    """The bytes of a message; signed with `key` if it is a node's."""
    data = unsigned(context, sender, body)
    if not isinstance(body, SIGNED):
        return data
    if key is None:
        raise ValueError("messages of nodes are signed")
    return data + key.sign(_SIGNED + data)


def unpack(context: Context, data: bytes, roster: tuple[bytes, ...]) -> tuple[int, Body]:
    """Sender and body of a message of exactly this context, its signature checked; BadMessage otherwise."""
    if len(data) < _HEAD.size:
        raise BadMessage("a message of the secure sum ends too early")
    magic, kind, *found, sender = _HEAD.unpack_from(data)
    if magic != MAGIC or kind not in _BODIES:
        raise BadMessage("not a message of the secure sum, or of another version")
    if Context(*found) != context:
        raise BadMessage(f"a message of another sum: {_difference(Context(*found), context)}")
    kind_of = _BODIES[kind]
    signed = kind_of in SIGNED
    if signed:
        if not 1 <= sender <= len(roster) or len(data) < _HEAD.size + 64:
            raise BadMessage(f"sender {sender} is not on the roster, or the signature is missing")
        if not verify(roster[sender - 1], data[:-64], data[-64:]):
            raise BadMessage(f"the signature of node {sender} is wrong")
        data = data[:-64]
    elif sender != SERVER:
        raise BadMessage("a node sent what only the server may send")
    reader = _Reader(data)
    reader.take(_HEAD.size)
    body = kind_of(*(_read(k, reader) for k in kind_of.FORMAT.split()))
    if reader.at != len(data):
        raise BadMessage("a message of the secure sum has bytes left over")
    return sender, body


def _difference(theirs: Context, ours: Context) -> str:
    return ", ".join(f.name for f in fields(ours) if getattr(theirs, f.name) != getattr(ours, f.name))


def verify(public: bytes, data: bytes, signature: bytes) -> bool:
    """Whether this is the identity's signature under a message's bytes."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _SIGNED + data)
    except InvalidSignature:
        return False
    return True


def unsigned(context: Context, sender: int, body: Body) -> bytes:
    """The bytes that a node signs: with these a signature can be checked that travelled alone."""
    head = _HEAD.pack(
        MAGIC,
        body.KIND,
        context.run,
        context.round,
        context.attempt,
        context.roster,
        context.parameters,
        sender,
    )
    return head + b"".join(
        _write(k, getattr(body, f.name)) for k, f in zip(body.FORMAT.split(), fields(body), strict=True)
    )
