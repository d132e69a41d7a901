"""Parties, servers and schedules for the tests of the secure sum."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedveil.secure_sum import coordinator, messages, party, shamir
from fedveil.secure_sum.parameters import Parameters
from fedveil.secure_sum.party import Session

MODEL = bytes(range(32))


def identities(count: int, seed: int) -> list[bytes]:
    draw = random.Random(f"identities {seed}")
    return [draw.randbytes(32) for _ in range(count)]


def public(secret: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def session(secrets: list[bytes], threshold: int, colluders: int, size: int = 4, **more) -> Session:
    place = {key: more.pop(key) for key in ("run", "round", "attempt") if key in more}
    parameters = Parameters(MODEL, size, 2.0**-10, 1.0, 4.0, len(secrets), threshold, colluders, **more)
    where = {"run": b"r" * 16, "round": 1, "attempt": 0, **place}
    return Session(roster=tuple(map(public, secrets)), parameters=parameters, **where)


def numbers(draw: random.Random, largest: int = 12) -> tuple[int, int, int]:
    """n, t, c that nodes accept."""
    while True:
        n = draw.randint(2, largest)
        c = draw.randint(0, max(0, n // 3))
        t = draw.randint((n + c) // 2 + 1, n) if (n + c) // 2 + 1 <= n else 0
        if t > c:
            return n, t, c


def vectors(count: int, size: int, seed: int) -> dict[int, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {node: draw.integers(-(2**20), 2**20, size) for node in range(1, count + 1)}


@dataclass
class Node:
    """One node with its journal; checks that nothing leaves twice in different form."""

    session: Session
    me: int
    secret: bytes
    vector: np.ndarray
    root: bytes
    journal: list[bytes] = field(default_factory=list)
    state: party.Party | None = None
    left: dict[int, set[bytes]] = field(default_factory=dict)  # kind of message -> what left

    def begin(self) -> list[bytes]:
        return self._after(party.begin(self.session, self.me, self.secret, self.root))

    def receive(self, data: bytes) -> list[bytes]:
        assert self.state is not None
        move = party.receive(self.state, data)
        if move.ready:
            self.state = move.party
            move = party.upload(move.party, self.vector)
        return self._after(move)

    def crash(self, synced: int | None = None) -> None:
        """Lose the memory, and records that were not synced."""
        self.journal = self.journal[:synced]
        if self.journal:
            self.state = party.resume(self.session, self.me, self.secret, self.journal)

    def _after(self, move: party.Move) -> list[bytes]:
        self.state = move.party
        if move.record:
            self.journal.append(move.record)
        for data in move.messages:
            self.left.setdefault(data[6], set()).add(data)
        self.check()
        return list(move.messages)

    def check(self) -> None:
        assert all(len(found) == 1 for found in self.left.values()), "two different messages of one kind left"


def kinds_revealed(session: Session, reveals: set[bytes]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for data in reveals:
        _, body = messages.unpack(session.context, data, session.roster)
        for owner, kind, _ in body.shares:
            found.setdefault(owner, set()).add(kind)
    return found


def forged(draw: random.Random, data: bytes, other: bytes | None) -> bytes:
    """Something near a message that nobody sent: flipped bits, a cut, another attempt's message, another sender."""
    way = draw.randrange(5) if data else 2
    if way == 0 and other:
        return other
    if way == 1:
        return data[: draw.randrange(len(data))]
    if way == 2:
        return data + draw.randbytes(draw.randint(1, 9))
    changed = bytearray(data)
    place = draw.randrange(len(data)) if way == 3 else draw.randrange(min(len(data), 110))
    changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def spoilt(draw: random.Random, session: Session, secret: bytes, data: bytes) -> bytes:
    """What a member that wants to harm sends instead of its message, signed all the same: wrong boxes, wrong shares."""
    if data[6] not in (messages.Shares.KIND, messages.Reveal.KIND):
        return data
    me, body = messages.unpack(session.context, data, session.roster)
    if isinstance(body, messages.Shares):
        boxes = tuple((i, draw.randbytes(len(box)) if draw.random() < 0.5 else box) for i, box in body.boxes)
        body = messages.Shares(boxes)
    else:
        shares = tuple(
            (i, kind, draw.randrange(shamir.PRIME) if draw.random() < 0.5 else share)
            for i, kind, share in body.shares
        )
        body = messages.Reveal(shares)
    return messages.pack(session.context, me, body, Ed25519PrivateKey.from_private_bytes(secret))


def attempt(
    draw: random.Random,
    n: int,
    t: int,
    c: int,
    size: int = 4,
    trouble: float = 1.0,
    dies=None,
    spoil=0.0,
    **more,
):
    """One attempt with an honest server on a bad network; returns (result, nodes, vectors).

    Nodes die for good, or die and come back from their journals; messages come in any order, twice, too late, forged, or
    from another attempt or another round with the same identities. spoil: the chance that up to c members do harm.
    """
    spoilers = set(draw.sample(range(1, n + 1), c)) if draw.random() < spoil else set()
    seed = draw.randrange(2**32)
    secrets = identities(n, seed)
    here = session(secrets, t, c, size, **more)
    there = (replace(here, attempt=1), replace(here, round=0))
    inputs = vectors(n, size, seed)
    nodes = {i: Node(here, i, secrets[i - 1], inputs[i], draw.randbytes(32)) for i in inputs}
    strange = {
        i: party.begin(draw.choice(there), i, secrets[i - 1], draw.randbytes(32)).messages[0] for i in inputs
    }  # of another attempt, or of another round
    if dies is None:
        dies = {i: draw.randint(0, 5) for i in inputs if draw.random() < trouble * 0.12}
    server = coordinator.begin(here)
    queue: list[tuple[int, bytes]] = []  # (receiver, message); 0 is the server
    past: list[tuple[int, bytes]] = []
    for i, node in nodes.items():
        if dies.get(i) != 0:
            queue += [(0, data) for data in node.begin()]
    for _ in range(200 * n):
        if server.result is not None and not queue:
            break
        if not queue or (draw.random() < trouble * 0.01):
            step = coordinator.close(server)
            server, queue = step.coordinator, queue + list(step.outgoing)
            continue
        receiver, data = queue.pop(draw.randrange(len(queue)))
        past.append((receiver, data))
        if draw.random() < trouble * 0.1:
            queue.append(draw.choice(past))
        if draw.random() < trouble * 0.1:
            queue.append((receiver, forged(draw, data, strange.get(draw.randint(1, n)))))
        if receiver == 0:
            step = coordinator.receive(server, data)
            server, queue = step.coordinator, queue + list(step.outgoing)
            continue
        node = nodes[receiver]
        if node.state is None or dies.get(receiver, 9) <= node.state.stage:
            continue
        if draw.random() < trouble * 0.05:
            node.crash()
        answers = node.receive(data)
        if receiver in spoilers:
            answers = [spoilt(draw, here, node.secret, answer) for answer in answers]
        queue += [(0, answer) for answer in answers]
    assert server.result is not None
    return server.result, nodes, inputs


def assert_exact(result, inputs) -> bool:
    """Whether there is a sum; if so it is exactly that of its survivors."""
    if isinstance(result, coordinator.Failure):
        assert result.reason
        return False
    expected = sum(inputs[i] for i in result.survivors)
    assert np.array_equal(result.total, expected)
    return True


def bad_network(draw: random.Random, n: int, t: int, c: int, trouble: float, spoil: float = 0.0) -> bool:
    """Play one attempt; whether there was a sum. It is exact, and no node gave away shares of both kinds."""
    result, nodes, inputs = attempt(draw, n, t, c, trouble=trouble, spoil=spoil)
    for node in nodes.values():
        kinds = kinds_revealed(node.session, node.left.get(messages.Reveal.KIND, set()))
        assert all(len(found) == 1 for found in kinds.values()), "shares of both kinds left a node"
    return assert_exact(result, inputs)
