"""Every lie that a node must refuse, one by one; and what would happen if it did not."""

import random
from dataclasses import replace

import numpy as np
import pytest
from closure import derive, opened, structure
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sums import Node, identities, kinds_revealed, session, vectors

from fedveil.errors import UserError
from fedveil.secure_sum import coordinator, masks, messages, party
from fedveil.secure_sum.parameters import Policy

N, T, C = 7, 5, 1


class Stage:
    """Seven honest nodes, brought to any stage by an honest server whose messages are kept."""

    def __init__(self, n=N, t=T, c=C, until="reveal", lost=(), **more):
        self.secrets = identities(n, 3)
        self.session = session(self.secrets, t, c, **more)
        self.context = self.session.context
        inputs = vectors(n, 4, 3)
        draw = random.Random("stage")
        self.nodes = {
            i: Node(self.session, i, self.secrets[i - 1], inputs[i], draw.randbytes(32)) for i in inputs
        }
        self.server = coordinator.begin(self.session)
        self.told: dict[tuple[str, int], bytes] = {}
        self.transcript: set[bytes] = set()
        out = [data for node in self.nodes.values() for data in node.begin()]
        while True:
            self.transcript |= set(out)
            outgoing: list[tuple[int, bytes]] = []
            for data in out:
                step = coordinator.receive(self.server, data)
                self.server, outgoing = step.coordinator, outgoing + list(step.outgoing)
            if not outgoing:
                step = coordinator.close(self.server)
                self.server, outgoing = step.coordinator, list(step.outgoing)
            here = coordinator.STAGES[self.server.stage]
            self.told |= {(here, i): data for i, data in outgoing}
            if here == until or self.server.result is not None:
                return
            out = [
                data for i, told in outgoing if (here, i) not in lost for data in self.nodes[i].receive(told)
            ]

    def refused(self, i: int, body: messages.Body | bytes) -> str:
        data = body if isinstance(body, bytes) else messages.pack(self.context, 0, body)
        move = party.receive(self.nodes[i].state, data)
        assert not move.messages and not move.record and move.party is self.nodes[i].state and not move.ready
        return move.refused

    def body(self, stage: str, i: int):
        return messages.unpack(self.context, self.told[stage, i], self.session.roster)[1]

    def sign(self, i: int, body: messages.Body) -> bytes:
        return messages.pack(self.context, i, body, Ed25519PrivateKey.from_private_bytes(self.secrets[i - 1]))


def test_keys_that_the_server_replaced_are_refused():
    stage = Stage(until="shares")
    bundle = stage.body("shares", 1)
    mine = bytearray(dict(bundle.keys)[2])
    mine[120] ^= 1
    keys = tuple((j, bytes(mine) if j == 2 else data) for j, data in bundle.keys)
    assert "signature" in stage.refused(1, messages.KeyBundle(bundle.members, keys))


def test_keys_under_another_nodes_name_are_refused():
    stage = Stage(until="shares")
    bundle = stage.body("shares", 1)
    keys = tuple((j, dict(bundle.keys)[3] if j == 2 else data) for j, data in bundle.keys)
    assert "not the keys of node 2" in stage.refused(1, messages.KeyBundle(bundle.members, keys))


def test_own_keys_that_came_back_changed_are_refused():
    stage = Stage(until="shares")
    bundle = stage.body("shares", 1)
    other = stage.sign(1, messages.Keys(bytes([9] * 32), bytes([9] * 32), bytes(32)))
    keys = tuple((j, other if j == 1 else data) for j, data in bundle.keys)
    assert "replaced" in stage.refused(1, messages.KeyBundle(bundle.members, keys))


@pytest.mark.parametrize("stage", ["shares", "vector", "survivors"])
def test_fewer_nodes_than_the_threshold_are_refused_at_every_stage(stage):
    at = Stage(until=stage)
    body = at.body(stage, 1)
    few = (1, 2, 3, 4)
    if stage == "shares":
        made = messages.KeyBundle(few, tuple(p for p in body.keys if p[0] in few))
    elif stage == "vector":
        made = messages.ShareBundle(few, tuple(p for p in body.boxes if p[0] in few))
    else:
        made = messages.Request(few, tuple(p for p in body.headers if p[0] in few))
    assert "at least 5 are needed" in at.refused(1, made)


@pytest.mark.parametrize("stage", ["shares", "vector", "survivors"])
def test_a_node_that_is_left_out_is_not_fooled(stage):
    at = Stage(until=stage)
    body = at.body(stage, 2)
    others = (2, 3, 4, 5, 6)
    made = {
        "shares": lambda: messages.KeyBundle(others, tuple(p for p in body.keys if p[0] in others)),
        "vector": lambda: messages.ShareBundle(others, tuple(p for p in body.boxes if p[0] in others)),
        "survivors": lambda: messages.Request(others, tuple(p for p in body.headers if p[0] in others)),
    }[stage]()
    assert "this node is not among" in at.refused(1, made)


def test_shares_of_nodes_without_keys_and_survivors_without_shares_are_refused():
    at = Stage(until="vector", lost={("shares", 7)})
    bundle = at.body("vector", 1)
    assert bundle.members == (1, 2, 3, 4, 5, 6)
    body = messages.ShareBundle((1, 2, 3, 4, 5, 6, 7), (*bundle.boxes, (7, bytes(82))))
    assert party.receive(
        at.nodes[1].state, messages.pack(at.context, 0, body)
    ).ready  # 7 has keys: may be told so
    later = Stage(until="survivors", lost={("shares", 7)})
    request = later.body("survivors", 1)
    header = later.sign(7, messages.Header(party.members_digest(later.context, request.survivors), bytes(32)))
    body = messages.Request((1, 2, 3, 4, 5, 6, 7), (*request.headers, (7, header)))
    assert "did not share" in later.refused(1, body)


def test_a_survivor_that_masked_against_other_members_is_refused():
    at = Stage(until="survivors")
    request = at.body("survivors", 1)
    lie = at.sign(2, messages.Header(party.members_digest(at.context, (1, 2, 3, 4, 5)), bytes(32)))
    headers = tuple((j, lie if j == 2 else data) for j, data in request.headers)
    assert "other members" in at.refused(1, messages.Request(request.survivors, headers))


def test_a_second_survivor_set_in_one_attempt_is_refused_and_the_first_answered_again():
    at = Stage(until="reveal")
    first = at.told["survivors", 1]
    body = at.body("survivors", 1)
    fewer = messages.Request(body.survivors[:-1], body.headers[:-1])
    assert "after this node sent its survivors" in at.refused(1, fewer)
    assert party.receive(at.nodes[1].state, first).messages == (at.nodes[1].state.sent[3],)


def test_too_few_signatures_or_signatures_under_another_set_open_nothing():
    at = Stage(until="reveal")
    proof = at.body("reveal", 1)
    assert "4 signatures; 5 are needed" in at.refused(1, messages.Proof(proof.signatures[:4]))
    other = messages.Agreement(party.survivors_digest(at.context, at.nodes[1].state.members, (1, 2, 3, 4, 5)))
    wrong = tuple((j, at.sign(j, other)[-64:]) for j, _ in proof.signatures)
    assert "did not sign" in at.refused(1, messages.Proof(wrong))


def test_a_signature_of_one_that_is_no_survivor_does_not_count():
    at = Stage(until="reveal", lost={("vector", 7)})
    proof = at.body("reveal", 1)
    agreement = messages.Agreement(
        party.survivors_digest(at.context, at.nodes[1].state.members, at.nodes[1].state.survivors)
    )
    more = (*proof.signatures[:4], (7, at.sign(7, agreement)[-64:]))
    assert "no survivor" in at.refused(1, messages.Proof(more))


def test_messages_out_of_turn_are_refused():
    at = Stage(until="reveal")
    early = Stage(until="shares")
    assert "after this node sent its keys" in early.refused(1, at.told["survivors", 1])
    assert "after this node sent its keys" in early.refused(1, at.told["reveal", 1])
    from_a_node = messages.unsigned(early.context, 3, messages.Proof(()))
    assert "only the server" in early.refused(1, from_a_node)


@pytest.mark.parametrize("change", [{"round": 2}, {"attempt": 1}, {"run": b"s" * 16}])
def test_messages_of_another_run_round_or_attempt_are_refused(change):
    here, there = Stage(until="shares"), Stage(until="shares", **change)
    assert next(iter(change)) in here.refused(1, there.told["shares", 1])


def test_vectors_that_arrive_late_change_nothing_and_their_own_seed_stays_hidden():
    at = Stage(until="done", lost={("vector", 7)})
    assert at.server.result.survivors == (1, 2, 3, 4, 5, 6)
    node = at.nodes[7]
    late = node.receive(at.told["vector", 7])
    assert coordinator.receive(at.server, late[0]).refused
    known = derive(at.session, at.transcript | set(late), {})
    assert 7 in known.mask_keys and 7 not in known.own
    shape = structure({i: n.state for i, n in at.nodes.items()}, known)
    assert shape.pinned[7] == ("own",)
    assert opened(shape) == [[1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("what", ["grid", "model", "bound", "deviation"])
def test_a_node_that_is_shown_another_grid_or_model_is_in_no_sum_with_the_others(what):
    """The server gives one victim parameters of its own: its keys and signatures fit nobody else's."""
    at = Stage(until="shares")
    changed = {"grid": 2.0**-13, "model": bytes(32), "bound": 2.0, "deviation": 0.5}[what]
    own = replace(at.session, parameters=replace(at.session.parameters, **{what: changed}))
    victim = party.begin(own, 1, at.secrets[0], bytes(32))
    bundle = at.body("shares", 2)
    keys = tuple((j, victim.messages[0] if j == 1 else data) for j, data in bundle.keys)
    assert "parameters" in at.refused(2, messages.KeyBundle(bundle.members, keys))
    there = messages.KeyBundle(bundle.members, keys)
    move = party.receive(victim.party, messages.pack(own.context, 0, there))
    assert "parameters" in move.refused and not move.messages


def test_masks_of_one_pair_differ_with_every_part_of_the_context():
    one, two = bytes(range(32)), bytes(range(1, 33))
    base = Stage(until="shares").session
    contexts = [
        replace(base, **change).context
        for change in ({}, {"round": 2}, {"attempt": 1}, {"run": b"x" * 16}, {"roster": base.roster[:-1]})
    ]
    contexts.append(replace(base, parameters=replace(base.parameters, grid=0.5)).context)
    seeds = {party.pair_seed(c, one, masks.public_of(two), 1, 2) for c in contexts}
    assert len(seeds) == len(contexts)


def test_a_policy_or_a_roster_that_does_not_fit_is_refused():
    secrets = identities(7, 3)
    here = session(secrets, 5, 1)
    for policy in (Policy(honest=5), Policy(colluders=2), Policy(multiplier=4.1), Policy(bound=0.5)):
        with pytest.raises(UserError, match="secure sum refused"):
            party.begin(here, 1, secrets[0], bytes(32), policy)
    with pytest.raises(UserError, match="not number 2"):
        party.begin(here, 2, secrets[0], bytes(32))
    with pytest.raises(UserError, match="different keys"):
        party.begin(replace(here, roster=(here.roster[0],) * 7), 1, secrets[0], bytes(32))


@pytest.mark.parametrize("n, t, c", [(7, 4, 1), (6, 4, 2), (4, 2, 0), (3, 1, 0), (9, 8, 8)])
def test_thresholds_under_which_two_survivor_sets_could_be_signed_are_refused(n, t, c):
    secrets = identities(n, 1)
    with pytest.raises(UserError, match=r"survivor sets could both be signed|no honest node"):
        party.begin(session(secrets, t, c), 1, secrets[0], bytes(32))


def test_with_a_threshold_that_is_refused_two_survivor_sets_open_every_single_vector(monkeypatch):
    """The reason for 2t > n + c, and the proof that the closure finds an open vector where there is one."""
    monkeypatch.setattr(party.Session, "check", lambda self, policy=None: None)
    at = Stage(6, 4, 2, until="survivors")
    halves = {(1, 2, 5, 6): (1, 2), (3, 4, 5, 6): (3, 4)}
    headers = {i: at.nodes[i].state.sent[2][: messages.HEADER_SIZE] for i in at.nodes}
    members = at.nodes[1].state.members
    for chosen, asked in halves.items():
        for i in asked:
            body = messages.Request(chosen, tuple((j, headers[j]) for j in chosen if j != i))
            assert at.nodes[i].receive(messages.pack(at.context, 0, body))
        agreement = messages.Agreement(party.survivors_digest(at.context, members, chosen))
        proof = messages.Proof(tuple((j, at.sign(j, agreement)[-64:]) for j in chosen))
        for i in asked:
            at.transcript |= set(at.nodes[i].receive(messages.pack(at.context, 0, proof)))
    known = derive(at.session, at.transcript, {i: at.nodes[i].state for i in (5, 6)})
    assert opened(structure({i: at.nodes[i].state for i in (1, 2, 3, 4)}, known)) == [[1], [2], [3], [4]]


def test_wrong_shares_of_a_colluder_are_noticed_and_other_shares_used():
    at = Stage(until="reveal")
    out = [data for i in at.nodes for data in at.nodes[i].receive(at.told["reveal", i])]
    _, body = messages.unpack(at.context, out[0], at.session.roster)
    lie = at.sign(1, messages.Reveal(tuple((o, k, (s + 1) % 2**256) for o, k, s in body.shares)))
    server = at.server
    for data in (lie, *out[1:]):
        server = coordinator.receive(server, data).coordinator
    assert isinstance(server.result, coordinator.Sum)
    total = sum(node.vector for node in at.nodes.values())
    assert np.array_equal(server.result.total, total)


def test_shares_that_give_no_secret_end_the_attempt_without_a_sum():
    at = Stage(until="reveal")
    server = at.server
    for i in at.nodes:
        _, body = messages.unpack(at.context, at.nodes[i].receive(at.told["reveal", i])[0], at.session.roster)
        shares = tuple((o, k, (s + o + i) % 2**256) for o, k, s in body.shares)
        server = coordinator.receive(server, at.sign(i, messages.Reveal(shares))).coordinator
    assert isinstance(server.result, coordinator.Failure) and "do not give" in server.result.reason


def test_a_reveal_has_own_seeds_of_survivors_and_mask_keys_of_the_others_only():
    at = Stage(until="done", lost={("vector", 7)})
    for i in range(1, 7):
        kinds = kinds_revealed(at.session, at.nodes[i].left[5])
        assert kinds == {**{j: {messages.SELF_SEED} for j in range(1, 7)}, 7: {messages.MASK_KEY}}


def test_public_keys_that_hide_nothing_are_refused_by_server_and_nodes():
    at = Stage(until="shares")
    weak = at.sign(2, messages.Keys(bytes(32), bytes(32), bytes(32)))
    server = coordinator.begin(at.session)
    assert "hides nothing" in coordinator.receive(server, weak).refused
    bundle = at.body("shares", 1)
    keys = tuple((j, weak if j == 2 else data) for j, data in bundle.keys)
    assert "hides nothing" in at.refused(1, messages.KeyBundle(bundle.members, keys))


def test_a_vector_is_masked_once():
    at = Stage(until="survivors")
    with pytest.raises(UserError, match="masked once"):
        party.upload(at.nodes[1].state, np.zeros(4, np.int64))
