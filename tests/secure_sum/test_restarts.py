"""A node that is killed at any moment never signs two survivor sets, reveals twice, or uses a mask twice."""

import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sums import Node, identities, session
from test_refusals import Stage

from fedveil.secure_sum import messages, party

STAGES = ["shares", "vector", "survivors", "reveal"]


def _other(at: Stage, stage: str, i: int) -> bytes:
    """Another message for the same stage that a fresh node would accept."""
    body = at.body(stage, i)
    keep = tuple(j for j in range(1, 7))
    if stage == "shares":
        made = messages.KeyBundle(keep, tuple(p for p in body.keys if p[0] in keep))
    elif stage == "vector":
        made = messages.ShareBundle(keep, tuple(p for p in body.boxes if p[0] in keep))
    elif stage == "survivors":
        made = messages.Request(keep, tuple(p for p in body.headers if p[0] in keep))
    else:
        made = messages.Proof(body.signatures[:5])
    return messages.pack(at.context, 0, made)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("moment", ["before the sync", "after the sync", "after the sending"])
def test_a_kill_at_every_stage_leaves_one_answer_for_good(stage, moment):
    at = Stage(until=stage)
    node = at.nodes[1]
    first, second = at.told[stage, 1], _other(at, stage, 1)
    synced = list(node.journal)
    move = party.receive(node.state, first)
    if move.ready:
        move = party.upload(move.party, node.vector)
    if moment != "before the sync":
        synced.append(move.record)
    left = set(move.messages) if moment == "after the sending" else set()
    again = Node(
        at.session, 1, node.secret, node.vector + 5, node.root, synced
    )  # would now send another vector
    again.crash()
    for data in (second, first, second, first):
        left |= set(again.receive(data))
    assert len(left) == 1
    if moment != "before the sync":
        assert left == set(move.messages)


def test_a_resumed_node_is_the_one_that_was_killed():
    at = Stage(until="done")
    for i, node in at.nodes.items():
        assert party.resume(at.session, i, node.secret, node.journal) == node.state


class Child:
    def __init__(self, path: Path, count: int, threshold: int, me: int):
        self.command = [sys.executable, str(Path(__file__).with_name("journal_child.py")), str(path)]
        self.command += [str(count), str(threshold), str(me)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.keys = self.read()

    def read(self) -> bytes:
        head = self.process.stdout.read(4)
        if len(head) < 4:
            return b""
        size = struct.unpack("<I", head)[0]
        data = self.process.stdout.read(size)
        return data if len(data) == size else b""

    def send(self, data: bytes) -> None:
        self.process.stdin.write(struct.pack("<I", len(data)) + data)
        self.process.stdin.flush()

    def kill(self) -> bytes:
        """SIGKILL, then what had still left before it."""
        self.process.kill()
        rest = self.read()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        return rest


def test_kill_9_of_a_process_never_lets_two_different_answers_leave(tmp_path):
    """The server offers two versions of every message and kills the process at a random moment in between."""
    draw = random.Random("kill")
    secrets = identities(4, 77)
    here = session(secrets, 3, 0)
    context = here.context
    others = {i: Node(here, i, secrets[i - 1], np.ones(4, np.int64), bytes([i] * 32)) for i in (2, 3, 4)}
    child = Child(tmp_path / "journal", 4, 3, 1)
    keys = {1: child.keys, **{i: node.begin()[0] for i, node in others.items()}}

    def bundle(members):
        return messages.pack(context, 0, messages.KeyBundle(members, tuple((j, keys[j]) for j in members)))

    def killed(versions: list[bytes]) -> bytes:
        left: set[bytes] = set()
        for _ in range(3):
            child.send(draw.choice(versions))
            time.sleep(draw.random() * 0.004)
            left.add(child.kill())
            child.start()
            assert child.keys == keys[1]
        for data in versions * 2:
            child.send(data)
            left.add(child.read())
        left.discard(b"")
        assert len(left) == 1, "two different answers left"
        return left.pop()

    everyone, fewer = (1, 2, 3, 4), (1, 2, 3)
    mine = killed([bundle(everyone), bundle(fewer)])
    _, shares = messages.unpack(context, mine, here.roster)
    members = everyone if len(shares.boxes) == 3 else fewer
    boxes = {}
    for i in members[1:]:
        _, body = messages.unpack(context, others[i].receive(bundle(members))[0], here.roster)
        boxes[i] = dict(body.boxes)
    offers = [members] if members == fewer else [members, fewer]
    upload = killed(
        [
            messages.pack(context, 0, messages.ShareBundle(m, tuple((j, boxes[j][1]) for j in m[1:])))
            for m in offers
        ]
    )
    _, header = messages.unpack(context, upload[: messages.HEADER_SIZE], here.roster)
    shared = next(m for m in offers if header.members == party.members_digest(context, m))

    def request(survivors):
        made = messages.Header(header.members, bytes(32))
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey as Key

        signed = {
            j: messages.pack(context, j, made, Key.from_private_bytes(secrets[j - 1])) for j in survivors[1:]
        }
        return messages.pack(context, 0, messages.Request(survivors, tuple(signed.items())))

    killed([request(s) for s in ([shared] if shared == fewer else [shared, fewer, (1, 2, 4)])])
    child.kill()
