"""Everything that gives the integers of a sum their meaning, as one value with one digest, and what is refused.

The digest enters every signature and every derived key. A server that shows one node a finer grid or another model
thereby puts it into a sum of its own, whose signatures and masks fit nobody else's.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, fields

from fedveil.errors import UserError
from fedveil.secure_sum import graph

LARGEST_ROSTER = 4096
LARGEST_SIZE = 1 << 28


@dataclass(frozen=True)
class Parameters:
    """Lengths and deviations are in the unit of the values (before division by the grid).

    model: SHA-256 of what the nodes were sent to work on. bound: by how much (l2) one protected unit can move one
    node's exact sum. deviation: of the noise that the sum carries at least. rate: at which the unit is sampled.
    degree and share_threshold: of the sparse graph; 0 for the complete one.
    """

    model: bytes
    size: int
    grid: float
    bound: float
    deviation: float
    nodes: int
    threshold: int
    colluders: int
    word: int = 32
    rate: float = 1.0
    unit: str = "example"
    degree: int = 0
    share_threshold: int = 0

    @property
    def honest(self) -> int:
        """Honest nodes that every opened sum contains: h = t - c, a few less in a sparse graph (`graph.guaranteed`)."""
        return graph.guaranteed(self.nodes, self.threshold, self.colluders, self.degree, self.share_threshold)

    @property
    def needed(self) -> int:
        """Shares that open a secret."""
        return self.share_threshold if self.degree else self.threshold


@dataclass(frozen=True)
class Policy:
    """The least that a node's owner asks for."""

    honest: int = 1
    colluders: int = 0
    multiplier: float = 0.0  # deviation over bound
    bound: float = math.inf
    rate: float = 1.0


def encode(parameters: Parameters) -> bytes:
    """Canonical bytes: every field by name, numbers as 64 bits (floats by their bits), texts with their length."""
    parts = []
    for field in fields(parameters):
        value = getattr(parameters, field.name)
        if isinstance(value, float):
            data = b"f" + struct.pack("<d", value)
        elif isinstance(value, int):
            data = b"i" + struct.pack("<q", value)
        else:
            data = b"b" + (value if isinstance(value, bytes) else value.encode())
        parts.append(struct.pack("<II", len(field.name), len(data)) + field.name.encode() + data)
    return b"".join(parts)


def digest(parameters: Parameters) -> bytes:
    """SHA-256 of the canonical bytes."""
    return hashlib.sha256(b"fedveil secure sum parameters 1" + encode(parameters)).digest()


def roster_digest(keys: tuple[bytes, ...]) -> bytes:
    """SHA-256 of the identity keys in their order; a node's number is its place, from 1."""
    return hashlib.sha256(
        b"fedveil secure sum roster 1" + struct.pack("<I", len(keys)) + b"".join(keys)
    ).digest()


def check(p: Parameters, policy: Policy = Policy()) -> None:
    """UserError that names every reason why nobody (or nobody under this policy) may take part.

    2t > n + c is what keeps two survivor sets from both collecting t signatures; h >= 1 keeps one honest share of noise.
    """
    wrong = _malformed(p)
    if not wrong:
        wrong = _unsafe(p)
    if not wrong:
        wrong = _weaker(p, policy)
    if wrong:
        raise UserError("secure sum refused: " + "; ".join(wrong))


def _malformed(p: Parameters) -> list[str]:
    wrong = []
    if len(p.model) != 32:
        wrong.append("the model's digest has 32 bytes")
    if not 1 <= p.size <= LARGEST_SIZE:
        wrong.append(f"size {p.size} is not between 1 and {LARGEST_SIZE}")
    for name in ("grid", "bound", "deviation"):
        value = getattr(p, name)
        if not (math.isfinite(value) and value > 0):
            wrong.append(f"{name} must be positive, not {value}")
    if p.word not in (32, 64):
        wrong.append(f"word size must be 32 or 64 bits, not {p.word}")
    if not 0 < p.rate <= 1:
        wrong.append(f"sampling rate must be in (0, 1], not {p.rate}")
    if p.unit not in ("example", "client"):
        wrong.append(f"unit must be example or client, not {p.unit!r}")
    if not 2 <= p.nodes <= LARGEST_ROSTER:
        wrong.append(f"a roster has 2 to {LARGEST_ROSTER} nodes, not {p.nodes}")
    if not (p.colluders >= 0 and 1 <= p.threshold <= p.nodes):
        wrong.append(f"threshold {p.threshold} or colluders {p.colluders} do not fit {p.nodes} nodes")
    if p.degree and not (0 < p.degree < p.nodes and 0 < p.share_threshold <= p.degree + 1):
        wrong.append(
            f"degree {p.degree} with share threshold {p.share_threshold} is no graph of {p.nodes} nodes"
        )
    return wrong


def _unsafe(p: Parameters) -> list[str]:
    wrong = []
    if 2 * p.threshold <= p.nodes + p.colluders:
        wrong.append(
            f"2 × threshold {p.threshold} must exceed nodes {p.nodes} + colluders {p.colluders}, "
            "or two different survivor sets could both be signed"
        )
    if p.threshold - p.colluders < 1:
        wrong.append(f"threshold {p.threshold} minus colluders {p.colluders} leaves no honest node")
    if not wrong and p.honest < 1:
        wrong.append(
            f"with {p.degree} neighbours, {p.share_threshold} of which open a secret, a single vector could be opened: "
            "more neighbours, or a higher share threshold"
        )
    return wrong


def _weaker(p: Parameters, policy: Policy) -> list[str]:
    wrong = []
    if p.honest < policy.honest:
        wrong.append(f"{p.honest} honest nodes are guaranteed, this node asks for {policy.honest}")
    if p.colluders < policy.colluders:
        wrong.append(f"{p.colluders} colluders are assumed, this node assumes {policy.colluders}")
    if p.deviation / p.bound < policy.multiplier:
        wrong.append(f"noise of {p.deviation / p.bound:g} bounds, this node asks for {policy.multiplier:g}")
    if p.bound > policy.bound:
        wrong.append(f"the bound {p.bound:g} is above this node's {policy.bound:g}")
    if p.rate > policy.rate:
        wrong.append(f"the sampling rate {p.rate:g} is above this node's {policy.rate:g}")
    return wrong
