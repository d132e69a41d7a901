"""The server's side of one attempt: collect, hand on, and open the sum, as a function of its state and the next message.

The server is not trusted with anything but liveness: whatever it does, nodes give away no more than a sum (`party`). This
one is honest. It has no clock: `close` ends the stage with those who answered, `receive` does when everyone has.

    stage       collects       hands on
    keys        Keys           KeyBundle     to everyone who sent keys
    shares      Shares         ShareBundle   to everyone who shared
    vector      masked vector  Request       to everyone whose vector arrived: the survivors
    survivors   Agreement      Proof         to everyone who signed
    reveal      Reveal         the sum
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, islice

import numpy as np

from fedveil.secure_sum import masks, messages, shamir
from fedveil.secure_sum.messages import SERVER, BadMessage, Context
from fedveil.secure_sum.party import (
    Session,
    commitment,
    holders,
    members_digest,
    neighbours,
    own_seed,
    pair_seed,
    proper_draws,
    survivors_digest,
)

STAGES = ("keys", "shares", "vector", "survivors", "reveal", "done")
KEYS, SHARES, VECTOR, SURVIVORS, REVEAL, DONE = range(6)
TRIES = 256  # sets of shares that are tried for one secret, if some holders gave wrong ones


@dataclass(frozen=True)
class Sum:
    """The opened sum of the survivors' vectors: signed integers, modulo 2**word."""

    total: np.ndarray
    survivors: tuple[int, ...]
    members: tuple[int, ...]


@dataclass(frozen=True)
class Failure:
    """The attempt ended without a sum. What nodes uploaded stays charged."""

    stage: str
    reason: str
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Coordinator:
    session: Session
    context: Context
    stage: int = KEYS
    expected: tuple[int, ...] = ()  # who may answer in this stage
    answers: Mapping[int, bytes] = field(default_factory=dict)  # of this stage (a vector: its header)
    keys: Mapping[int, messages.Keys] = field(default_factory=dict)
    signed_keys: Mapping[int, bytes] = field(default_factory=dict)
    boxes: Mapping[int, Mapping[int, bytes]] = field(default_factory=dict)  # holder -> owner -> box
    started: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    survivors: tuple[int, ...] = ()
    total: np.ndarray | None = None
    # (owner, kind) -> holder -> share
    shares: Mapping[tuple[int, int], Mapping[int, int]] = field(default_factory=dict)
    result: Sum | Failure | None = None

    @property
    def missing(self) -> tuple[int, ...]:
        """Who has not answered in this stage."""
        return tuple(node for node in self.expected if node not in self.answers)


@dataclass(frozen=True)
class Step:
    """The next state, and what to send to whom."""

    coordinator: Coordinator
    outgoing: tuple[tuple[int, bytes], ...] = ()
    refused: str = ""


def begin(session: Session) -> Coordinator:
    """Await the keys of everyone on the roster."""
    session.check()
    return Coordinator(session, session.context, expected=tuple(range(1, session.parameters.nodes + 1)))


def receive(coordinator: Coordinator, data: bytes) -> Step:
    """Take a node's message. What is late, doubled, forged or out of turn is refused and changes nothing."""
    if coordinator.result is not None:
        return Step(coordinator, refused="this attempt has ended")
    try:
        after = _take(coordinator, data)
    except BadMessage as error:
        return Step(coordinator, refused=str(error))
    return close(after) if not after.missing else Step(after)


def close(coordinator: Coordinator) -> Step:
    """End the stage with those who answered; below the threshold the attempt fails."""
    if coordinator.result is not None:
        return Step(coordinator)
    here, least = tuple(sorted(coordinator.answers)), coordinator.session.parameters.threshold
    if len(here) < least:
        return Step(
            _failed(
                coordinator, f"{len(here)} of {len(coordinator.expected)} nodes answered, {least} are needed"
            )
        )
    return _CLOSE[coordinator.stage](coordinator, here)


def _failed(coordinator: Coordinator, reason: str) -> Coordinator:
    failure = Failure(STAGES[coordinator.stage], reason, coordinator.missing)
    return replace(coordinator, stage=DONE, result=failure, expected=())


def _take(c: Coordinator, data: bytes) -> Coordinator:
    """The state with this answer in it."""
    head, vector = data, memoryview(b"")
    if c.stage == VECTOR:
        head, vector = data[: messages.HEADER_SIZE], memoryview(data)[messages.HEADER_SIZE :]
    sender, body = messages.unpack(c.context, head, c.session.roster)
    kinds = (messages.Keys, messages.Shares, messages.Header, messages.Agreement, messages.Reveal)
    if not isinstance(body, kinds[c.stage]):
        raise BadMessage(f"a {type(body).__name__} of node {sender} while {STAGES[c.stage]} are collected")
    if sender not in c.expected:
        raise BadMessage(f"node {sender} is late or was not asked")
    if sender in c.answers:
        raise BadMessage(f"node {sender} answered already")
    after = replace(c, answers={**c.answers, sender: head})
    if isinstance(body, messages.Keys):
        return _take_keys(after, sender, body)
    if isinstance(body, messages.Shares):
        return _take_shares(after, sender, body)
    if isinstance(body, messages.Header):
        return _take_vector(after, sender, body, vector)
    if isinstance(body, messages.Agreement):
        if body.survivors != survivors_digest(c.context, c.members, c.survivors):
            raise BadMessage(f"node {sender} signed other survivors")
        return after
    assert isinstance(body, messages.Reveal)
    return _take_reveal(after, sender, body)


def _take_keys(c: Coordinator, sender: int, body: messages.Keys) -> Coordinator:
    if not (masks.usable(body.encrypt) and masks.usable(body.mask)):
        raise BadMessage(f"node {sender} published a key that hides nothing")
    if not proper_draws(c.session.parameters, sender, body):
        raise BadMessage(f"node {sender} drew wrong neighbours")
    return replace(c, keys={**c.keys, sender: body})


def _take_shares(c: Coordinator, sender: int, body: messages.Shares) -> Coordinator:
    wanted = set(holders(c.session.parameters, sender, c.keys[sender], c.started)) - {sender}
    if wanted != {holder for holder, _ in body.boxes}:
        raise BadMessage(f"node {sender} shared with others than its holders")
    boxes = dict(c.boxes)
    for holder, box in body.boxes:
        boxes[holder] = {**boxes.get(holder, {}), sender: box}
    return replace(c, boxes=boxes)


def _take_vector(c: Coordinator, sender: int, body: messages.Header, vector: memoryview) -> Coordinator:
    parameters = c.session.parameters
    if len(vector) != parameters.size * parameters.word // 8:
        raise BadMessage(f"node {sender} sent {len(vector)} bytes instead of {parameters.size} words")
    if hashlib.sha256(vector).digest() != body.vector:
        raise BadMessage(f"the vector of node {sender} is not the one that it signed")
    if body.members != members_digest(c.context, c.members):
        raise BadMessage(f"node {sender} masked its vector against other members")
    words = np.frombuffer(vector, f"<u{parameters.word // 8}")
    return replace(c, total=words.copy() if c.total is None else c.total + words)


def _take_reveal(c: Coordinator, sender: int, body: messages.Reveal) -> Coordinator:
    shares = dict(c.shares)
    for owner, kind, share in body.shares:
        right = messages.SELF_SEED if owner in c.survivors else messages.MASK_KEY
        held = owner in c.members and sender in holders(c.session.parameters, owner, c.keys[owner], c.members)
        if kind != right or not held:
            raise BadMessage(f"node {sender} revealed what it was not asked for")
        shares[owner, kind] = {**shares.get((owner, kind), {}), sender: share}
    return replace(c, shares=shares)


def _next(c: Coordinator, here: tuple[int, ...], make: Callable[[int], messages.Body], **changes) -> Step:
    """Go on with those who answered: one message for each of them."""
    after = replace(c, stage=c.stage + 1, expected=here, answers={}, **changes)
    outgoing = tuple((node, messages.pack(c.context, SERVER, make(node))) for node in here)
    return Step(after, outgoing)


def _close_keys(c: Coordinator, here: tuple[int, ...]) -> Step:
    def bundle(node: int) -> messages.Body:
        around = sorted((*neighbours(c.session.parameters, node, c.keys, here), node))
        return messages.KeyBundle(here, tuple((other, c.answers[other]) for other in around))

    return _next(c, here, bundle, started=here, signed_keys=c.answers)


def _close_shares(c: Coordinator, here: tuple[int, ...]) -> Step:
    def bundle(node: int) -> messages.Body:
        boxes = c.boxes.get(node, {})
        return messages.ShareBundle(here, tuple((owner, boxes[owner]) for owner in here if owner in boxes))

    return _next(c, here, bundle, members=here)


def _close_vectors(c: Coordinator, here: tuple[int, ...]) -> Step:
    def request(node: int) -> messages.Body:
        around = neighbours(c.session.parameters, node, c.keys, here)
        return messages.Request(here, tuple((other, c.answers[other]) for other in around))

    return _next(c, here, request, survivors=here)


def _close_survivors(c: Coordinator, here: tuple[int, ...]) -> Step:
    proof = messages.Proof(tuple((node, c.answers[node][-64:]) for node in here))
    return _next(c, here, lambda node: proof)


def _close_reveals(c: Coordinator, here: tuple[int, ...]) -> Step:
    """Take the own masks of the survivors and the shared masks of the others off the total."""
    assert c.total is not None
    parameters, total = c.session.parameters, c.total.copy()
    known: dict[tuple[int, ...], list[int]] = {}
    seeds: list[tuple[bytes, int]] = []
    for node in c.members:
        kind = messages.SELF_SEED if node in c.survivors else messages.MASK_KEY
        around = neighbours(parameters, node, c.keys, c.survivors)
        if kind == messages.MASK_KEY and not around:
            continue
        secret = _secret(c, node, kind, known)
        if secret is None:
            return Step(_failed(c, f"the shares of node {node} do not give its secret"))
        if kind == messages.SELF_SEED:
            seeds.append((own_seed(c.context, node, secret), -1))
            continue
        private = masks.private_key(secret)
        for other in around:
            seed = pair_seed(c.context, private, c.keys[other].mask, node, other)
            seeds.append((seed, -1 if other < node else 1))
    masks.add_all(total, seeds)
    signed = total.view(f"<i{parameters.word // 8}").astype(np.int64)
    return Step(replace(c, stage=DONE, expected=(), result=Sum(signed, c.survivors, c.members)))


def _secret(c: Coordinator, owner: int, kind: int, known: dict[tuple[int, ...], list[int]]) -> bytes | None:
    """The secret that the shares give, checked against what its owner published; None if no set of shares fits.

    With wrong shares among more than enough, other sets are tried, up to `TRIES`.
    """
    shares, needed = c.shares.get((owner, kind), {}), c.session.parameters.needed
    for points in islice(combinations(sorted(shares), needed), TRIES):
        if points not in known:
            known[points] = shamir.weights(points)
        value = sum(w * shares[p] for w, p in zip(known[points], points, strict=True)) % shamir.PRIME
        if value >= 2**256:
            continue
        secret = value.to_bytes(32, "little")
        if kind == messages.MASK_KEY and masks.public_of(secret) == c.keys[owner].mask:
            return secret
        if kind == messages.SELF_SEED and commitment(c.context, owner, secret) == c.keys[owner].commitment:
            return secret
    return None


_CLOSE: tuple[Callable[[Coordinator, tuple[int, ...]], Step], ...] = (
    _close_keys,
    _close_shares,
    _close_vectors,
    _close_survivors,
    _close_reveals,
)
