"""A node's side of one attempt at a sum, as a function of its state and the next message.

    begin    -> Keys                            fresh keys, a seed of its own, its draws in a sparse graph
    receive  KeyBundle   -> Shares              shares of its mask key and its own seed, boxed for their holders
    receive  ShareBundle -> (ready)             then `upload(vector)` -> Header and masked vector
    receive  Request     -> Agreement           the one survivor set that it signs in this attempt
    receive  Proof       -> Reveal              one share per node, never of both kinds

A `Move` holds the next state, the `record` that must be appended to the journal and synced *before* any of the messages
leaves, and the messages. `resume` makes the state from the records again; what was sent once is then sent again byte
for byte, from the record, and never made anew. Refused messages leave the state as it was.

Formal guarantee (proof in docs/secure-sum.md): for a server with up to `colluders` nodes, all it receives from the
other nodes can be computed from the sum of at least `honest` of their vectors, if it opens one at all; up to the
strength of X25519, HKDF, ChaCha20-Poly1305, AES-256 and Ed25519, and a chance of 2**-40 in a sparse graph.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedveil.errors import UserError
from fedveil.secure_sum import masks, messages, shamir
from fedveil.secure_sum.messages import BadMessage, Context
from fedveil.secure_sum.parameters import Parameters, Policy, check, digest, roster_digest

KEYS, SHARED, UPLOADED, AGREED, REVEALED = 1, 2, 3, 4, 5  # what has been sent last
_CLOSED = b"fvend1"  # begins the one record of an attempt that is over for this node
STAGES = ("nothing", "keys", "shares", "vector", "survivors", "reveal")


@dataclass(frozen=True)
class Session:
    """What all parties of an attempt must agree on."""

    run: bytes
    round: int
    attempt: int
    roster: tuple[bytes, ...]  # Ed25519 identity keys; a node's number is its place, from 1
    parameters: Parameters

    @property
    def context(self) -> Context:
        return Context(
            self.run, self.round, self.attempt, roster_digest(self.roster), digest(self.parameters)
        )

    def check(self, policy: Policy = Policy()) -> None:
        """UserError if the numbers do not make a safe sum, or are weaker than the policy."""
        check(self.parameters, policy)
        if len(self.roster) != self.parameters.nodes or len(set(self.roster)) != len(self.roster):
            raise UserError(
                f"secure sum refused: the roster does not have {self.parameters.nodes} different keys"
            )
        if len(self.run) != 16 or not 0 <= self.round < 2**32 or not 0 <= self.attempt < 2**32:
            raise UserError("secure sum refused: a run has 16 bytes, round and attempt 32 bits")


@dataclass(frozen=True)
class Secrets:
    """A node's secrets of one attempt; all of them from `root`, which no other attempt has."""

    encrypt: bytes = field(repr=False)
    mask: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    polynomials: bytes = field(repr=False)
    draws: bytes = field(repr=False)


@dataclass(frozen=True)
class Party:
    """The state of one node in one attempt. `sent` has its messages so far, `took` the digests of what caused them."""

    session: Session
    me: int
    signing: bytes = field(repr=False)
    root: bytes = field(repr=False)
    context: Context
    sent: tuple[bytes, ...] = ()
    took: tuple[bytes, ...] = ()
    started: tuple[int, ...] = ()
    keys: Mapping[int, messages.Keys] = field(default_factory=dict)
    own: Mapping[int, tuple[int, int]] = field(default_factory=dict, repr=False)  # shares of the own secrets
    waiting: bytes = b""  # the ShareBundle that awaits a vector
    members: tuple[int, ...] = ()
    boxes: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    survivors: tuple[int, ...] = ()

    @property
    def stage(self) -> int:
        return len(self.sent)


@dataclass(frozen=True)
class Move:
    """What follows: sync `record` first, then send `messages`. ready: the node may now upload its vector."""

    party: Party
    cause: bytes = field(default=b"", repr=False)  # what is answered for the first time
    messages: tuple[bytes, ...] = ()
    refused: str = ""
    ready: bool = False

    @property
    def record(self) -> bytes:
        """For the journal; empty if nothing new is sent."""
        return _record(self.party.stage, self.cause, self.messages[0]) if self.cause else b""


def identity_of(signing: bytes) -> bytes:
    """The public identity key of 32 secret bytes, as rosters have it."""
    return Ed25519PrivateKey.from_private_bytes(signing).public_key().public_bytes_raw()


def begin(session: Session, me: int, signing: bytes, root: bytes, policy: Policy = Policy()) -> Move:
    """Start an attempt. `root` is 32 fresh bytes from the system's entropy, used for this attempt alone."""
    session.check(policy)
    identity = Ed25519PrivateKey.from_private_bytes(signing)
    if (
        not 1 <= me <= len(session.roster)
        or session.roster[me - 1] != identity.public_key().public_bytes_raw()
    ):
        raise UserError(f"secure sum refused: this node's identity is not number {me} on the roster")
    if len(root) != 32:
        raise ValueError("the root of an attempt has 32 bytes")
    party = Party(session, me, signing, root, session.context)
    secret = secrets_of(party)
    body = messages.Keys(
        masks.public_of(secret.encrypt),
        masks.public_of(secret.mask),
        commitment(party.context, me, secret.seed),
        draws(session.parameters, me, secret.draws),
    )
    return _send(party, root, messages.pack(party.context, me, body, identity))


def secrets_of(party: Party) -> Secrets:
    """Each secret from the root for its purpose, bound to the context."""
    bound = party.context.digest()
    return Secrets(
        *(
            masks.derive(party.root, name, bound)
            for name in ("encrypt", "mask", "seed", "polynomials", "draws")
        )
    )


def commitment(context: Context, node: int, seed: bytes) -> bytes:
    """What a node publishes of its own seed, so that a wrong reconstruction is noticed. Hides a uniform seed."""
    return hashlib.sha256(b"own seed" + context.digest() + struct.pack("<I", node) + seed).digest()


def draws(parameters: Parameters, me: int, seed: bytes) -> tuple[int, ...]:
    """The neighbours that a node draws itself: a uniform subset of the others; none in the complete graph."""
    if not parameters.degree:
        return ()
    others = [node for node in range(1, parameters.nodes + 1) if node != me]
    words = np.frombuffer(masks.stream(seed, 16 * len(others)), "<u8").reshape(-1, 2)
    rank = sorted(range(len(others)), key=lambda k: (int(words[k, 0]), int(words[k, 1])))  # 128 bits: no ties
    return tuple(sorted(others[k] for k in rank[: parameters.degree]))


def holders(
    parameters: Parameters, owner: int, keys: messages.Keys, members: Iterable[int]
) -> tuple[int, ...]:
    """The nodes among `members` that get shares of the owner's secrets: itself, and its draws (or everyone)."""
    chosen = set(keys.neighbours) | {owner}
    return tuple(node for node in members if not parameters.degree or node in chosen)


def neighbours(
    parameters: Parameters, node: int, keys: Mapping[int, messages.Keys], members: Iterable[int]
) -> tuple[int, ...]:
    """The members that `node` shares masks with: whom it drew, and who drew it (or everyone else)."""
    if not parameters.degree:
        return tuple(other for other in members if other != node)
    mine = set(keys[node].neighbours)
    return tuple(
        other for other in members if other != node and (other in mine or node in _drawn(keys, other))
    )


def _drawn(keys: Mapping[int, messages.Keys], node: int) -> tuple[int, ...]:
    return keys[node].neighbours if node in keys else ()


def pair_seed(
    context: Context, private: bytes | X25519PrivateKey, public: bytes, one: int, two: int
) -> bytes:
    """The seed of the mask that two nodes share."""
    low, high = min(one, two), max(one, two)
    return masks.agree(private, public, "mask", context.digest(), struct.pack("<II", low, high))


def own_seed(context: Context, node: int, seed: bytes) -> bytes:
    """The seed of a node's own mask."""
    return masks.derive(seed, "own mask", context.digest(), struct.pack("<I", node))


def _box_key(
    context: Context, private: bytes | X25519PrivateKey, public: bytes, owner: int, holder: int
) -> bytes:
    return masks.agree(private, public, "box", context.digest(), struct.pack("<II", owner, holder))


def _send(party: Party, cause: bytes, message: bytes, **changes) -> Move:
    """The move that sends `message` because of `cause`."""
    after = replace(
        party,
        sent=(*party.sent, message),
        took=(*party.took, hashlib.sha256(cause).digest()),
        **changes,
    )
    return Move(after, cause, (message,))


def _record(stage: int, cause: bytes, message: bytes) -> bytes:
    """The checksum covers a vector through the digest in its header."""
    head = struct.pack("<6sBII", b"fvjrn1", stage, len(cause), len(message))
    check = hashlib.sha256(head + cause + message[: messages.HEADER_SIZE]).digest()
    return b"".join((head, cause, message, check))


def read_record(data: bytes) -> tuple[int, bytes, bytes]:
    """(stage, cause, message) of a journal's record; UserError if it is torn or of another version."""
    try:
        magic, stage, first, second = struct.unpack_from("<6sBII", data)
    except struct.error:
        raise UserError("a record of the secure sum's journal is torn") from None
    if magic != b"fvjrn1" or len(data) != 15 + first + second + 32:
        raise UserError("a record of the secure sum's journal is torn or of another version")
    cause, message = data[15 : 15 + first], data[15 + first : -32]
    if hashlib.sha256(data[: 15 + first] + message[: messages.HEADER_SIZE]).digest() != data[-32:]:
        raise UserError("a record of the secure sum's journal is damaged")
    return stage, cause, message


def resume(session: Session, me: int, signing: bytes, records: Iterable[bytes]) -> Party:
    """The state after the given records: what was sent comes from them, nothing is made anew.

    A record that does not follow from those before it (or from this session) is a UserError.
    """
    party: Party | None = None
    for data in records:
        if data.startswith(_CLOSED):
            return _closed(session, me, signing, data)
        stage, cause, message = read_record(data)
        if party is None:
            move = begin(session, me, signing, cause)
            if stage != KEYS or move.messages != (message,):
                raise UserError("the secure sum's journal belongs to another attempt")
            party = move.party
            continue
        if stage == UPLOADED:
            _check_upload(party, message)
            party = replace(_take_boxes(party, cause), waiting=b"")
            party = _send(party, cause, message).party
        else:
            move = _receive(party, cause)
            if stage != party.stage + 1 or move.messages != (message,):
                raise UserError("the secure sum's journal does not fit together")
            party = move.party
    if party is None:
        raise UserError("the secure sum's journal is empty")
    return party


def closing(party: Party) -> bytes:
    """The record that takes the place of all others once the reveal is synced.

    Formal guarantee: it holds what this node sent and digests of what it received, so nothing that the server has not got;
    no seed, key or share of the attempt can be made from it. Resends are the same bytes as before.
    """
    if party.stage != REVEALED:
        raise ValueError("an attempt is closed after its reveal")
    took = (bytes(32), *party.took[1:])  # not even a digest of the root
    parts = (
        cause + struct.pack("<I", len(sent)) + sent for cause, sent in zip(took, party.sent, strict=True)
    )
    body = _CLOSED + b"".join(parts)
    return body + hashlib.sha256(body).digest()


def _closed(session: Session, me: int, signing: bytes, data: bytes) -> Party:
    """The state of a closed attempt: it can resend, and nothing else."""
    body, at = data[:-32], len(_CLOSED)
    if hashlib.sha256(body).digest() != data[-32:]:
        raise UserError("a record of the secure sum's journal is damaged")
    sent, took = [], []
    while at < len(body):
        size = struct.unpack_from("<I", body, at + 32)[0]
        took.append(body[at : at + 32])
        sent.append(body[at + 36 : at + 36 + size])
        at += 36 + size
    sender, keys = messages.unpack(session.context, sent[0], session.roster)
    if sender != me or not isinstance(keys, messages.Keys) or len(sent) != REVEALED:
        raise UserError("the secure sum's journal belongs to another attempt")
    return Party(session, me, signing, b"", session.context, tuple(sent), tuple(took))


def _check_upload(party: Party, message: bytes) -> None:
    """UserError unless this is a vector with the header that this node signed for it."""
    header, vector = message[: messages.HEADER_SIZE], message[messages.HEADER_SIZE :]
    sender, body = messages.unpack(party.context, header, party.session.roster)
    right = sender == party.me and isinstance(body, messages.Header)
    if not right or body.vector != hashlib.sha256(vector).digest():  # type: ignore[union-attr]
        raise UserError("the vector in the secure sum's journal is damaged")


def receive(party: Party, data: bytes) -> Move:
    """The node's answer to a message from the server.

    A message that it answered already gets the same answer again; any other for a stage that is past is refused.
    """
    found = hashlib.sha256(data).digest()
    if found in party.took[1:]:
        return Move(party, messages=(party.sent[party.took.index(found)],))
    if party.waiting and data == party.waiting:
        return Move(party, ready=True)
    try:
        return _receive(party, data)
    except BadMessage as error:
        return Move(party, refused=str(error))


def _receive(party: Party, data: bytes) -> Move:
    _, body = messages.unpack(party.context, data, party.session.roster)
    expected: dict[int, type] = {
        KEYS: messages.KeyBundle,
        SHARED: messages.ShareBundle,
        UPLOADED: messages.Request,
        AGREED: messages.Proof,
    }
    if not isinstance(body, expected.get(party.stage, ())):
        raise BadMessage(f"a {type(body).__name__} after this node sent its {STAGES[party.stage]}")
    if isinstance(body, messages.KeyBundle):
        return _share(party, data, body)
    if isinstance(body, messages.ShareBundle):
        if party.waiting:
            raise BadMessage("a second set of shares in one attempt")
        return Move(_take_boxes(party, data), ready=True)
    if isinstance(body, messages.Request):
        return _agree(party, data, body)
    assert isinstance(body, messages.Proof)
    return _reveal(party, data, body)


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BadMessage(otherwise)


def _many(party: Party, nodes: tuple[int, ...], what: str) -> None:
    """Enough nodes, all on the roster, this one among them."""
    least = party.session.parameters.threshold
    _demand(len(nodes) >= least, f"{len(nodes)} {what}; at least {least} are needed")
    _demand(nodes[-1] <= len(party.session.roster), f"{what} that are not on the roster")
    _demand(party.me in nodes, f"this node is not among the {what}")


def _share(party: Party, data: bytes, bundle: messages.KeyBundle) -> Move:
    """Check everyone's keys; box shares of the mask key and of the own seed for their holders."""
    parameters, me = party.session.parameters, party.me
    _many(party, bundle.members, "members")
    keys = dict(_signed_keys(party, bundle))
    _demand(dict(bundle.keys).get(me) == party.sent[0], "this node's keys were replaced")
    around = set(neighbours(parameters, me, keys, bundle.members)) | {me}
    _demand(around == set(keys), "keys are missing, or of nodes that are no neighbours")
    mine = holders(parameters, me, keys[me], bundle.members)
    _demand(
        len(mine) >= parameters.needed, f"{len(mine)} holders for this node's shares, not {parameters.needed}"
    )
    secret = secrets_of(party)
    own = _split(secret, parameters.needed, mine)
    private, boxes = masks.private_key(secret.encrypt), []
    for holder in mine:
        if holder == me:
            continue
        try:
            key = _box_key(party.context, private, keys[holder].encrypt, me, holder)
        except ValueError:
            raise BadMessage(f"node {holder} published a key that hides nothing") from None
        text = b"".join(share.to_bytes(shamir.WIDTH, "little") for share in own[holder])
        boxes.append((holder, masks.seal(key, text, _box_context(party.context, me, holder))))
    signing = Ed25519PrivateKey.from_private_bytes(party.signing)
    message = messages.pack(party.context, me, messages.Shares(tuple(boxes)), signing)
    return _send(party, data, message, keys=keys, started=bundle.members, own={me: own[me]})


def _signed_keys(party: Party, bundle: messages.KeyBundle) -> Iterable[tuple[int, messages.Keys]]:
    parameters = party.session.parameters
    for node, data in bundle.keys:
        sender, body = messages.unpack(party.context, data, party.session.roster)
        _demand(sender == node and isinstance(body, messages.Keys), f"these are not the keys of node {node}")
        assert isinstance(body, messages.Keys)
        _demand(node in bundle.members, f"keys of node {node}, which is no member")
        _demand(proper_draws(parameters, node, body), f"node {node} drew wrong neighbours")
        yield node, body


def proper_draws(parameters: Parameters, node: int, keys: messages.Keys) -> bool:
    """As many others on the roster as the graph's degree."""
    drawn = keys.neighbours
    return len(drawn) == parameters.degree and node not in drawn and all(d <= parameters.nodes for d in drawn)


def _split(secret: Secrets, needed: int, points: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """Shares of (mask key, own seed) at every point. 64 bytes per coefficient: uniform to 2**-250."""
    found = []
    for kind, value in ((messages.MASK_KEY, secret.mask), (messages.SELF_SEED, secret.seed)):
        stream = masks.stream(
            masks.derive(secret.polynomials, "polynomial", bytes([kind])), 64 * (needed - 1)
        )
        coefficients = [
            int.from_bytes(stream[k : k + 64], "little") % shamir.PRIME for k in range(0, len(stream), 64)
        ]
        found.append(shamir.split(int.from_bytes(value, "little"), coefficients, points))
    return {point: (found[0][point], found[1][point]) for point in points}


def _box_context(context: Context, owner: int, holder: int) -> bytes:
    return context.digest() + struct.pack("<II", owner, holder)


def _take_boxes(party: Party, data: bytes) -> Party:
    """Remember who shared, and the boxes for this node; all of them must be there, opened they are at the end."""
    _, bundle = messages.unpack(party.context, data, party.session.roster)
    if not isinstance(bundle, messages.ShareBundle):
        raise BadMessage("not a bundle of shares")
    parameters, me = party.session.parameters, party.me
    _many(party, bundle.members, "members with shares")
    _demand(set(bundle.members) <= set(party.started), "shares of nodes whose keys were not there")
    around = neighbours(parameters, me, party.keys, bundle.members)
    from_them = {node for node in around if me in holders(parameters, node, party.keys[node], (me,))}
    _demand(from_them == {node for node, _ in bundle.boxes}, "shares for this node are missing, or too many")
    return replace(party, waiting=data, members=bundle.members, boxes=dict(bundle.boxes))


def upload(party: Party, vector: np.ndarray) -> Move:
    """Mask a vector of integers, noise included, modulo 2**word. Once per attempt; the ledger is charged before.

    Formal guarantee: without the own seed, or without every mask that it shares with honest members, the upload is
    indistinguishable from uniform words.
    """
    parameters, me = party.session.parameters, party.me
    if party.stage != SHARED or not party.waiting:
        raise UserError("secure sum: a vector is masked once, after the shares of the others arrived")
    if vector.shape != (parameters.size,) or not np.issubdtype(vector.dtype, np.integer):
        raise UserError(f"secure sum: expected {parameters.size} integers, not {vector.dtype} {vector.shape}")
    words = vector.astype(np.int64, copy=False).view("<u8").astype(f"<u{parameters.word // 8}")
    secret = secrets_of(party)
    seeds = [(own_seed(party.context, me, secret.seed), 1)]
    private = masks.private_key(secret.mask)
    for other in neighbours(parameters, me, party.keys, party.members):
        try:
            seed = pair_seed(party.context, private, party.keys[other].mask, me, other)
        except ValueError:
            raise UserError(f"secure sum: node {other} published a key that hides nothing") from None
        seeds.append((seed, 1 if me < other else -1))
    masks.add_all(words, seeds)
    body = messages.Header(members_digest(party.context, party.members), hashlib.sha256(words.data).digest())
    header = messages.pack(party.context, me, body, Ed25519PrivateKey.from_private_bytes(party.signing))
    return _send(replace(party, waiting=b""), party.waiting, b"".join((header, words.data)))


def members_digest(context: Context, members: tuple[int, ...]) -> bytes:
    """Digest of the set that vectors are masked against."""
    return messages.ids_digest("members", context, members)


def survivors_digest(context: Context, members: tuple[int, ...], survivors: tuple[int, ...]) -> bytes:
    """What nodes sign: the survivors, and the members they survived from."""
    return messages.ids_digest("survivors", context, members, survivors)


def _agree(party: Party, data: bytes, request: messages.Request) -> Move:
    """Sign the survivor set if all vectors in it that concern this node were masked against the same members."""
    parameters, me = party.session.parameters, party.me
    _many(party, request.survivors, "survivors")
    _demand(set(request.survivors) <= set(party.members), "survivors that did not share")
    around = neighbours(parameters, me, party.keys, request.survivors)
    _demand(
        set(around) == {node for node, _ in request.headers}, "headers of survivors are missing, or too many"
    )
    for node, header in request.headers:
        sender, body = messages.unpack(party.context, header, party.session.roster)
        _demand(
            sender == node and isinstance(body, messages.Header), f"this is not the header of node {node}"
        )
        assert isinstance(body, messages.Header)
        _demand(
            body.members == members_digest(party.context, party.members),
            f"node {node} masked its vector against other members",
        )
    body = messages.Agreement(survivors_digest(party.context, party.members, request.survivors))
    message = messages.pack(party.context, me, body, Ed25519PrivateKey.from_private_bytes(party.signing))
    return _send(party, data, message, survivors=request.survivors)


def _reveal(party: Party, data: bytes, proof: messages.Proof) -> Move:
    """After enough survivors signed the same set: a share of each survivor's own seed, of each other's mask key."""
    parameters = party.session.parameters
    agreement = messages.Agreement(survivors_digest(party.context, party.members, party.survivors))
    survivors = set(party.survivors)
    signers = 0
    for node, signature in proof.signatures:
        _demand(node in survivors, f"node {node} signed, but is no survivor")
        text = messages.unsigned(party.context, node, agreement)
        _demand(
            messages.verify(party.session.roster[node - 1], text, signature),
            f"node {node} did not sign the survivors that this node signed",
        )
        signers += 1
    _demand(signers >= parameters.threshold, f"{signers} signatures; {parameters.threshold} are needed")
    shares = []
    private = masks.private_key(secrets_of(party).encrypt)
    for owner in sorted({*party.boxes, party.me}):
        pair = party.own[owner] if owner == party.me else _opened(party, private, owner)
        if pair is not None:  # a box that does not open is its owner's loss
            kind = messages.SELF_SEED if owner in survivors else messages.MASK_KEY
            shares.append((owner, kind, pair[0] if kind == messages.MASK_KEY else pair[1]))
    message = messages.pack(
        party.context,
        party.me,
        messages.Reveal(tuple(shares)),
        Ed25519PrivateKey.from_private_bytes(party.signing),
    )
    return _send(party, data, message)


def _opened(party: Party, private: X25519PrivateKey, owner: int) -> tuple[int, int] | None:
    """The shares that `owner` sent to this node, or None if the box is not right."""
    try:
        key = _box_key(party.context, private, party.keys[owner].encrypt, owner, party.me)
    except ValueError:
        return None
    text = masks.unseal(key, party.boxes[owner], _box_context(party.context, owner, party.me))
    if text is None or len(text) != 2 * shamir.WIDTH:
        return None
    pair = tuple(
        int.from_bytes(text[k : k + shamir.WIDTH], "little") for k in range(0, len(text), shamir.WIDTH)
    )
    return (pair[0], pair[1]) if max(pair) < shamir.PRIME else None
