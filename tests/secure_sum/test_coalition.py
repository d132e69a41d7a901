"""A lying server with colluding nodes: the closure of all that it can derive is one sum of enough honest nodes."""

import random

import numpy as np
from closure import derive, opened, other_seeds, structure
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sums import Node, identities, kinds_revealed, numbers, session, vectors

from fedveil.secure_sum import graph, masks, messages, party


class Liar:
    """A server that tells every node what it likes: other members, other survivors, late keys, dropped nodes.

    Its own nodes follow the protocol towards the honest ones, but sign everything and show it all their secrets.
    """

    def __init__(self, draw: random.Random, n: int, t: int, c: int, **more):
        self.draw = draw
        seed = draw.randrange(2**32)
        self.secrets = identities(n, seed)
        self.session = session(self.secrets, t, c, 4, **more)
        self.context, self.parameters = self.session.context, self.session.parameters
        self.inputs = vectors(n, 4, seed)
        self.bad = set(draw.sample(range(1, n + 1), c))
        self.nodes = {
            i: Node(self.session, i, self.secrets[i - 1], self.inputs[i], draw.randbytes(32))
            for i in self.inputs
        }
        self.transcript: set[bytes] = set()

    def _tell(self, i: int, body: messages.Body) -> list[bytes]:
        answers = self.nodes[i].receive(messages.pack(self.context, 0, body))
        self.transcript |= set(answers)
        return answers

    def _some(self, nodes, must: int) -> tuple[int, ...]:
        """All, or a random subset that a node may just accept."""
        others = [j for j in nodes if j != must]
        least = min(self.parameters.threshold - 1, len(others))
        count = self.draw.choice([len(others), least, self.draw.randint(least, len(others))])
        first = [j for j in others if j in self.bad] if self.draw.random() < 0.5 else []
        rest = [j for j in others if j not in first]
        chosen = (first + self.draw.sample(rest, len(rest)))[:count]
        return tuple(sorted({*chosen, must}))

    def play(self) -> None:
        for node in self.nodes.values():
            self.transcript |= set(node.begin())
        keys = {i: node.state.sent[0] for i, node in self.nodes.items()}
        read = {i: messages.unpack(self.context, data, self.session.roster)[1] for i, data in keys.items()}
        same = self.draw.random() < 0.5
        everyone = self._some(list(keys), self.draw.choice(list(keys)))
        boxes: dict[tuple[int, int], bytes] = {}
        for i in keys:
            members = everyone if same and i in everyone else self._some(list(keys), i)
            around = {*party.neighbours(self.parameters, i, read, members), i}
            answers = self._tell(i, messages.KeyBundle(members, tuple((j, keys[j]) for j in sorted(around))))
            for data in answers:
                _, body = messages.unpack(self.context, data, self.session.roster)
                boxes |= {(i, holder): box for holder, box in body.boxes}
        same = self.draw.random() < 0.5
        shared = tuple(i for i in keys if self.nodes[i].state.stage == party.SHARED)
        everyone = self._some(shared, self.draw.choice(shared)) if shared else ()
        for i in shared:
            state = self.nodes[i].state
            able = [
                j
                for j in {*shared, *self.bad}
                if j in state.started and (j == i or self._boxed(boxes, read, j, i, state))
            ]
            wanted = everyone if same and i in everyone else self._some(sorted(able), i)
            members = tuple(j for j in wanted if j in able)
            forged = {(j, i): self.draw.randbytes(82) for j in self.bad if (j, i) not in boxes}
            from_them = [j for j in members if j != i and j in state.keys and self._holds(read, j, i)]
            held = tuple((j, {**forged, **boxes}[j, i]) for j in from_them)
            self._tell(i, messages.ShareBundle(members, held))
        self._survivors(read)

    def _holds(self, read, owner: int, holder: int) -> bool:
        return holder in party.holders(self.parameters, owner, read[owner], (holder,))

    def _boxed(self, boxes, read, owner: int, holder: int, state) -> bool:
        wanted = owner in state.keys and self._holds(read, owner, holder)
        return not wanted or (owner, holder) in boxes or owner in self.bad

    def _header(self, i: int, uploads: dict[int, bytes], j: int) -> bytes:
        """The header of j as i would like to see it; colluders write any."""
        if j not in self.bad:
            return uploads[j][: messages.HEADER_SIZE]
        body = messages.Header(party.members_digest(self.context, self.nodes[i].state.members), bytes(32))
        return messages.pack(self.context, j, body, Ed25519PrivateKey.from_private_bytes(self.secrets[j - 1]))

    def _survivors(self, read) -> None:
        """Several survivor sets, shown to some each; colluders sign all of them; proofs for all that are signed."""
        uploads = {
            i: node.state.sent[2] for i, node in self.nodes.items() if node.state.stage == party.UPLOADED
        }
        if not uploads:
            return
        there = sorted({*uploads, *self.bad})
        sets = {self._some(there, self.draw.choice(list(uploads))) for _ in range(self.draw.randint(1, 4))}
        order = sorted(sets)
        asked: dict[tuple[int, ...], list[int]] = {}
        for i in uploads:
            for chosen in self.draw.sample(order, len(order)):
                if i not in chosen or i in self.bad:
                    continue
                around = party.neighbours(self.parameters, i, self.nodes[i].state.keys, chosen)
                headers = tuple((j, self._header(i, uploads, j)) for j in around)
                if self._tell(i, messages.Request(chosen, headers)):
                    asked.setdefault(chosen, []).append(i)
        for chosen, signers in asked.items():
            self._prove(chosen, signers)

    def _prove(self, chosen: tuple[int, ...], signers: list[int]) -> None:
        for members in {self.nodes[i].state.members for i in signers}:
            found = messages.Agreement(party.survivors_digest(self.context, members, chosen))
            signatures = {}
            for i in chosen:
                if i in self.bad:
                    key = Ed25519PrivateKey.from_private_bytes(self.secrets[i - 1])
                    signatures[i] = messages.pack(self.context, i, found, key)[-64:]
                elif i in signers and self.nodes[i].state.members == members:
                    signatures[i] = self.nodes[i].state.sent[3][-64:]
            proof = messages.Proof(tuple(sorted(signatures.items())))
            for i in signers:
                if self.draw.random() < 0.9:
                    self._tell(i, proof)

    def honest(self) -> dict[int, party.Party]:
        return {i: node.state for i, node in self.nodes.items() if i not in self.bad}

    def known(self):
        # Colluders give away every share that they hold, whatever was revealed.
        return derive(self.session, self.transcript, {i: self.nodes[i].state for i in self.bad})


def check(liar: Liar) -> int:
    """At most one sum is open, of enough honest nodes; no honest node gave both kinds of shares. How many are open."""
    groups = opened(structure(liar.honest(), liar.known()))
    assert len(groups) <= 1
    assert all(len(group) >= liar.parameters.honest for group in groups)
    for i, node in liar.nodes.items():
        if i not in liar.bad:
            assert all(len(k) == 1 for k in kinds_revealed(liar.session, node.left.get(5, set())).values())
    return len(groups)


def lie(seed: int, largest: int) -> int:
    """Play one lying server with colluders; how many sums it opened."""
    draw = random.Random(f"liar {seed}")
    liar = Liar(draw, *numbers(draw, largest))
    liar.play()
    return check(liar)


def test_a_lying_server_with_colluders_opens_at_most_one_sum_of_enough_honest_nodes():
    assert sum(lie(seed, 10) for seed in range(150)) > 20  # it does get a sum often enough


def test_a_lying_server_gets_no_small_sum_in_a_sparse_graph():
    draw = random.Random("sparse liar")
    n, t, c = 104, 84, 3
    degree, needed = graph.choose(n, t, c, 3)
    liar = Liar(draw, n, t, c, degree=degree, share_threshold=needed)
    liar.play()
    check(liar)


def _seed_is_mask(total: np.ndarray, seeds) -> None:
    for seed, sign in seeds:
        mask = np.frombuffer(seed, total.dtype, total.size)
        total += mask if sign > 0 else -mask


def twin(seed: int, largest: int) -> bool:
    """A lying server, and other inputs with the same sum: seeds that give it the identical transcript. False: no upload.

    Masks must be their seeds (`_seed_is_mask`): then seeds can be written down.
    """
    draw = random.Random(f"twin {seed}")
    liar = Liar(draw, *numbers(draw, largest))
    liar.play()
    known, states = liar.known(), liar.honest()
    shape = structure(states, known)
    if not shape.nodes:
        return False
    change = _same_sums(np.random.default_rng(seed), shape)
    own, pair = _true_masks(liar, states)
    new_own, new_pair = other_seeds(shape, change, own, pair)
    for node, value in own.items():  # known masks stay as they are
        assert node not in known.own or np.array_equal(value, new_own[node])
    for (i, j), value in pair.items():
        assert not known.knows_pair(i, j) or np.array_equal(value, new_pair[i, j])
    for i in shape.nodes:
        sent = np.frombuffer(states[i].sent[2][messages.HEADER_SIZE :], "<u4")
        words = liar.inputs[i].astype(np.int64).astype("<u4") + change[i]
        words = words + new_own[i]
        for j in party.neighbours(liar.parameters, i, states[i].keys, states[i].members):
            mask = new_pair[min(i, j), max(i, j)]
            words = words + mask if i < j else words - mask
        assert np.array_equal(words, sent)
    return True


def test_other_inputs_with_the_same_sum_have_seeds_that_give_the_identical_transcript(monkeypatch):
    """With masks that are their seeds (of 256 bits, for vectors this short) the seeds can be written down."""
    monkeypatch.setattr(masks, "add_all", _seed_is_mask)
    assert sum(twin(seed, 9) for seed in range(120)) > 60


def _same_sums(draw: np.random.Generator, shape) -> dict[int, np.ndarray]:
    """Changes of the inputs that add up to nothing over every opened set, and to anything elsewhere."""
    change = {i: draw.integers(0, 2**32, 4, np.uint32) for i in shape.nodes}
    for group in opened(shape):
        total = np.zeros(4, np.uint32)
        for i in group[1:]:
            total = total + change[i]
        change[group[0]] = np.uint32(0) - total
    return change


def _true_masks(liar: Liar, states) -> tuple[dict, dict]:
    own, pair = {}, {}
    for i, state in states.items():
        if state.stage < party.UPLOADED:
            continue
        secret = party.secrets_of(state)
        own[i] = np.frombuffer(party.own_seed(liar.context, i, secret.seed), "<u4", 4)
        for j in party.neighbours(liar.parameters, i, state.keys, state.members):
            seed = party.pair_seed(liar.context, secret.mask, state.keys[j].mask, i, j)
            pair[min(i, j), max(i, j)] = np.frombuffer(seed, "<u4", 4)
    return own, pair
