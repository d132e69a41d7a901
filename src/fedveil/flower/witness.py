"""A witness on another host: it signs the head of a node's ledger, and signs no other one at that place or before it.

    fedveil flower witness --home /var/lib/witness --listen tcp:10.0.0.9:9470 --roster roster.json

A node that names a witness (`--node-config witness="tcp:10.0.0.9:9470" witness-key="PUBLIC KEY"`) asks it for the last head
before it opens its ledger, and has each new head signed before any data is opened. Without an answer nothing is trained. So a
ledger is noticed that was lost, cut or rolled back together with everything else on the node. The witness learns how many
records a ledger has and their hashes, which are keyed by nothing private, and no contents.

One request per connection, a line of JSON each way, signed by the node's identity key and by the witness's; a nonce binds the
answer to its question, so the line needs no other protection.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import UserError
from fedveil.flower import books, identity, limits
from fedveil.flower.identity import read_identity
from fedveil.flower.shuffler import address_of
from fedveil.jsons import Document, JsonObject

if TYPE_CHECKING:
    from fedveil.flower.owner import Owner

LINE = 4096  # bytes of a question or an answer
SECONDS = 10.0  # for one exchange
ASKED, ANSWERED = "witness question", "witness answer"

Head = tuple[int, str]
_ALWAYS: dict[str, limits.Check] = {
    "node": limits.is_hex(32),
    "nonce": limits.is_hex(16),
    "signature": limits.is_hex(64),
}
_HEAD: dict[str, limits.Check] = {"number": limits.is_int(0, 2**40), "hash": limits.is_hex(32)}


def _signed(facts: JsonObject, purpose: str, secret: bytes) -> bytes:
    made = identity.sign(secret, purpose, limits.canonical(facts)).hex()
    return limits.canonical({**facts, "signature": made}) + b"\n"


def _checked(line: bytes, purpose: str, public: bytes, may: dict[str, limits.Check]) -> Document:
    """The facts of a line that this key signed for this purpose; `Malformed` otherwise."""
    facts = dict(limits.fields(limits.read_json(line, LINE), "line", _ALWAYS, may))
    made = bytes.fromhex(facts.pop("signature"))
    if not identity.verify(public, purpose, limits.canonical(facts), made):
        raise limits.Malformed("its signature is wrong")
    return facts


# --- on the node ---


def ask(address: str, witness: bytes, secret: bytes, head: Head | None = None) -> Head | None:
    """The last head that the witness signed for this node; with `head`, after it signed that one.

    `UserError` if it does not answer, is not the witness that was named, or knows another head at that place or a later one.
    """
    nonce, node = secrets.token_hex(16), identity.public_of(secret).hex()
    facts: JsonObject = {"node": node, "nonce": nonce}
    facts |= {} if head is None else {"number": head[0], "hash": head[1]}
    try:
        answer = _checked(_exchange(address, _signed(facts, ASKED, secret)), ANSWERED, witness,
                          {**_HEAD, "refused": limits.is_text(300)})  # fmt: skip
    except (OSError, limits.Malformed) as wrong:
        raise UserError(f"the witness at {address} does not answer as it should ({limits.plain(wrong, 100)})") from None
    if (answer["node"], answer["nonce"]) != (node, nonce):
        raise UserError(f"the witness at {address} answers another question")
    if "refused" in answer:
        raise UserError(f"the witness at {address} refuses: {answer['refused']}")
    found = (answer["number"], answer["hash"]) if "number" in answer else None
    if head is not None and found != head:
        raise UserError(f"the witness at {address} signed another head")
    return found


def _exchange(address: str, line: bytes) -> bytes:
    kind, where = address_of(address)
    with socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET) as held:
        held.settimeout(SECONDS)
        held.connect(where)
        held.sendall(line)
        with held.makefile("rb") as lines:
            return lines.readline(LINE + 1)


def of(owner: Owner) -> tuple[str, bytes, bytes] | None:
    """(address, key of the witness, key of the node) that an owner named; None if there is none."""
    if not owner.witness:
        return None
    if not limits.is_hex(32)(owner.witness_key) or not owner.identity:
        raise UserError("--node-config: a witness needs witness-key (64 hexadecimal digits) and this node's identity")
    return owner.witness, bytes.fromhex(owner.witness_key), read_identity(owner.identity)


# --- the witness ---


def answer(line: bytes, home: Path, secret: bytes, nodes: frozenset[bytes]) -> bytes:
    """The answer to one line; b"" where nobody is owed one. A head is on disk before it is signed."""
    try:
        raw = limits.read_json(line, LINE)
        node = raw.get("node") if isinstance(raw, dict) else None
        if not limits.is_hex(32)(node) or bytes.fromhex(str(node)) not in nodes:
            return b""
        facts = _checked(line, ASKED, bytes.fromhex(str(node)), _HEAD)
    except limits.Malformed:
        return b""
    said: JsonObject = {"node": node, "nonce": facts["nonce"]}
    path = home / f"{node}.json"
    last = books.read_anchor(path)
    if "number" in facts and "hash" in facts:
        head = (facts["number"], facts["hash"])
        if last is not None and head != last and head[0] <= last[0]:
            said["refused"] = f"record {last[0]} of this ledger was signed already, and this is record {head[0]}"
            return _signed(said, ANSWERED, secret)
        if head != last:
            books.write_anchor(path, head, Path(str(node)))
        last = head
    if last is not None:
        said |= {"number": last[0], "hash": last[1]}
    return _signed(said, ANSWERED, secret)


@contextlib.contextmanager
def serving(address: str, home: Path, secret: bytes, nodes: frozenset[bytes]) -> Iterator[socketserver.BaseServer]:
    """A witness that listens at `address` for these nodes (public keys)."""
    kind, where = address_of(address)
    books.private_folder(home)
    writing = threading.Lock()

    class Handler(socketserver.StreamRequestHandler):
        timeout = SECONDS

        def handle(self) -> None:
            with contextlib.suppress(OSError, UserError):
                line = self.rfile.readline(LINE + 1)
                with writing:
                    said = answer(line, home, secret, nodes)
                self.wfile.write(said)

    if kind == "unix":
        with contextlib.suppress(FileNotFoundError):
            os.unlink(where)

    class Server(socketserver.ThreadingUnixStreamServer if kind == "unix" else socketserver.ThreadingTCPServer):  # type: ignore[misc]
        allow_reuse_address, daemon_threads, request_queue_size = True, True, 64

    try:
        server = Server(where, Handler)
    except OSError as wrong:
        raise UserError(f"cannot listen at {address}: {wrong.strerror or wrong}") from None
    with server:
        yield server
