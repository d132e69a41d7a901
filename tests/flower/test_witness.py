"""Another host signs the heads of a node's ledger: nothing on the node alone can roll it back unnoticed."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_contract as node_test  # of this folder

pytest.importorskip("flwr")

from fedveil.errors import UserError
from fedveil.flower import books, identity, witness
from fedveil.flower.owner import Owner

SECRET, NODE = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    where = f"unix:{tmp_path / 'w.sock'}"
    with witness.serving(where, tmp_path / "witness", SECRET, frozenset({identity.public_of(NODE)})) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield where
        server.shutdown()


def an_owner(tmp_path: Path, address: str) -> Owner:
    (tmp_path / "identity").write_text(NODE.hex())
    (tmp_path / "identity").chmod(0o600)
    return node_test.an_owner(
        tmp_path, identity=str(tmp_path / "identity"), witness=address, witness_key=identity.public_of(SECRET).hex()
    )


def test_heads_only_grow(address: str) -> None:
    public = identity.public_of(SECRET)
    assert witness.ask(address, public, NODE) is None
    for head in ((1, "a" * 64), (3, "b" * 64), (3, "b" * 64)):
        assert witness.ask(address, public, NODE, head) == head
    for head in ((3, "c" * 64), (2, "a" * 64)):
        with pytest.raises(UserError, match="signed already"):
            witness.ask(address, public, NODE, head)
    assert witness.ask(address, public, NODE) == (3, "b" * 64)


def test_only_the_named_witness_counts_and_only_known_nodes_are_served(address: str) -> None:
    with pytest.raises(UserError, match="signature"):
        witness.ask(address, identity.public_of(NODE), NODE)
    with pytest.raises(UserError, match="does not answer"):
        witness.ask(address, identity.public_of(SECRET), identity.new_identity())


def test_a_node_that_was_rolled_back_as_a_whole_is_noticed(tmp_path: Path, address: str) -> None:
    owner = an_owner(tmp_path, address)
    assert node_test.ask(owner, node_test.a_config(), run="1")[0]["status"] == "ok"
    anchor = books.anchor_path(owner)
    shutil.copytree(owner.home, tmp_path / "copy")
    shutil.copy(anchor, tmp_path / "anchor copy")
    assert node_test.ask(owner, node_test.a_config(), run="2")[0]["status"] == "ok"
    shutil.rmtree(owner.home)
    (tmp_path / "copy").rename(owner.home)
    shutil.copy(tmp_path / "anchor copy", anchor)
    said, sent = node_test.ask(owner, node_test.a_config(), run="3")
    assert said["reason"] == books.NEEDS_OWNER and not sent and node_test.charged(owner) == 1
    shutil.rmtree(owner.home)
    anchor.unlink()
    assert node_test.ask(owner, node_test.a_config(), run="4")[0]["status"] == "refused"
    assert "witness knows of record" in (owner.home / "node.log").read_text()


def test_without_its_witness_a_node_trains_nothing(tmp_path: Path) -> None:
    owner = an_owner(tmp_path, f"unix:{tmp_path / 'nobody'}")
    said, sent = node_test.ask(owner, node_test.a_config())
    assert said["reason"] == books.NEEDS_OWNER and not sent and node_test.charged(owner) == 0
    assert "witness" in (owner.home / "node.log").read_text()


def test_garbage_does_not_end_the_witness_and_gets_no_answer(tmp_path: Path, address: str) -> None:
    """300 fuzzed lines."""
    asked = {"node": identity.public_of(NODE).hex(), "nonce": "0" * 32}
    draw, good = random.Random(3), witness._signed(asked, witness.ASKED, NODE)
    for _ in range(300):
        data = bytearray(good if draw.random() < 0.7 else draw.randbytes(draw.randint(0, 6000)))
        for _ in range(draw.randint(1, 4)):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        with socket.socket(socket.AF_UNIX) as line, contextlib.suppress(ConnectionResetError, BrokenPipeError):
            line.settimeout(60)
            line.connect(address.removeprefix("unix:"))
            line.sendall(bytes(data))
            line.shutdown(socket.SHUT_WR)
            assert line.recv(4096) == b""
    assert witness.ask(address, identity.public_of(SECRET), NODE) is None
