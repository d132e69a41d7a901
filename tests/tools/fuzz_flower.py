"""What reaches a federation from outside, for fuzz.py: papers, requests, replies, and bytes on sockets.

A parser may answer with a value or with its own refusal. A node's answer never raises, is one of the known forms, and a
request that is refused costs nothing; a trainer and a shuffler go on serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import random
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

SECRET = bytes(range(32))
HERE = Path(__file__).parent


@functools.lru_cache
def module(path: str) -> ModuleType:
    """A file below tests/ as a module (tests hold the small federation that is fuzzed here)."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, HERE.parent / path)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def fuzz() -> Any:
    """The ways to spoil values and bytes."""
    return module("tools/fuzz.py")


# --- files ----------------------------------------------------------------------------------------------------------


def contract(rng: random.Random, place: Path) -> None:
    """A contract: bytes spoilt, or one value exchanged; what is read can be written, compared and explained."""
    from fedveil.errors import UserError
    from fedveil.flower import contract as contracts
    from fedveil.flower import limits, onboard

    good = module("flower/test_contract.py").a_contract()
    if rng.random() < 0.5:
        path = place / "contract.toml"
        path.write_bytes(fuzz().spoil_bytes(contracts.to_toml(good).encode(), rng))
        found = contracts.read_contract(path)
    else:
        try:
            found = contracts.from_json(fuzz().spoil(json.loads(limits.canonical(contracts.to_json(good))), rng))
        except limits.Malformed as wrong:
            raise UserError(str(wrong)) from None
    (place / "again.toml").write_text(contracts.to_toml(found), "utf-8")
    assert contracts.read_contract(place / "again.toml").digest == found.digest
    contracts.differences(good, found)
    onboard.summary(found)


POLICY = b'recipes = ["fed-cdp"]\nminimum_sigma = 6.0\nmaximum_epsilon = 8.0\nobserver = "server"\nunit = "example"\n' \
         b'delta = 1e-5\nmaximum_report_epsilon = 1.0\nchanges = ["sigma"]\nmodels = ["a.b:c"]\nsecure_noise = true\n' \
         b'sum_threshold = 6\nsum_colluders = 1\nsum_roster = "' + b"3f" * 32 + b'"\n'  # fmt: skip


def policy(rng: random.Random, place: Path) -> None:
    """An old policy file, and a node's settings."""
    from fedveil.cli.flower import parse_node_config
    from fedveil.flower.owner import from_policy, owner_of, read_policy

    if rng.random() < 0.3:
        text = 'home="/x" contract="/c" contract-digest="ab" partition-id=0 num-partitions=4'
        owner_of(parse_node_config(fuzz().spoil_bytes(text.encode(), rng).decode("utf-8", "replace")))
        return
    path = place / "policy.toml"
    path.write_bytes(fuzz().spoil_bytes(POLICY, rng))
    assert from_policy(read_policy(path)).digest


def papers(rng: random.Random, place: Path) -> None:
    """Rosters, invitations, answers, keys and anchors: rightly signed with odd contents, or with spoilt bytes."""
    which = rng.choice([_roster, _invitation, _answer, _rotation, _anchor, _key])
    which(rng, place)


def _spoilt(rng: random.Random, value: dict[str, Any], write: Any) -> bytes:
    """`write(value)` with an odd value inside, or its bytes spoilt."""
    if rng.random() < 0.6:
        return bytes(write(fuzz().spoil(json.loads(json.dumps(value)), rng)))
    return bytes(fuzz().spoil_bytes(write(value), rng))


def _signed_as(kind: str) -> Any:
    from fedveil.flower import onboard

    return lambda facts: onboard._signed_document(kind, facts, SECRET).encode()


def _roster(rng: random.Random, place: Path) -> None:
    from fedveil.flower import identity, limits
    from fedveil.flower import roster as rosters

    members = [rosters.Member(n, f"n{n}", identity.public_of(bytes([n + 1]) * 32), f"key {n}") for n in range(2)]
    value = rosters.to_json(rosters.Roster("s", 1, tuple(members), (5,)))

    def write(body: dict[str, Any]) -> bytes:
        made = identity.sign(SECRET, rosters.SIGNED_AS, limits.canonical(body)).hex()
        return json.dumps({"roster": body, "owner": identity.public_of(SECRET).hex(), "signature": made}).encode()

    path = place / "roster.json"
    rosters.write_roster(path, rosters.from_json(value), SECRET)
    whole = json.loads(path.read_text())
    path.write_bytes(_spoilt(rng, whole, lambda v: json.dumps(v).encode()) if rng.random() < 0.5 else _spoilt(rng, value, write))
    rosters.read_roster(path, owner=identity.public_of(SECRET))


def _invitation(rng: random.Random, place: Path) -> None:
    from fedveil.flower import contract as contracts
    from fedveil.flower import identity, onboard

    agreed = module("flower/test_contract.py").a_contract()
    facts = {"study": "s", "owner": identity.public_of(SECRET).hex(), "number": 0, "name": "a", "superlink": "h:1",
             "ca": "", "contract": contracts.to_toml(agreed), "digest": agreed.digest, "token": "0" * 32,
             "expires": 2**39}  # fmt: skip
    (place / "invite.json").write_bytes(_spoilt(rng, facts, _signed_as(onboard.INVITE)))
    onboard.accept(place / "invite.json", place / "home", answer=place / "answer.json")


def _answer(rng: random.Random, place: Path) -> None:
    from fedveil.flower import identity, onboard
    from fedveil.flower import roster as rosters

    path = place / "roster.json"
    rosters.write_roster(path, rosters.Roster("s", 1), SECRET)
    pending = {"0" * 32: {"number": 0, "name": "a", "expires": 2**39}}
    facts = {"study": "s", "number": 0, "name": "a", "token": "0" * 32, "identity": identity.public_of(SECRET).hex(),
             "supernode": "ecdsa x"}  # fmt: skip
    spoil_pending = rng.random() < 0.4
    text = _spoilt(rng, pending, lambda v: json.dumps(v).encode()) if spoil_pending else json.dumps(pending).encode()
    Path(f"{path}.invited").write_bytes(text)
    sign = _signed_as(onboard.JOINED)
    (place / "joined.json").write_bytes(sign(facts) if spoil_pending else _spoilt(rng, facts, sign))
    onboard.admit(place / "joined.json", path, SECRET)


def _rotation(rng: random.Random, place: Path) -> None:
    from fedveil.flower import identity, onboard

    identity.write_identity(place / "identity")
    about = {"study": "s", "owner": "ab" * 32, "number": 0, "name": "a"}
    (place / "study.json").write_bytes(_spoilt(rng, about, lambda v: json.dumps(v).encode()))
    onboard.rotate(place, place / "rotated.json")


def _anchor(rng: random.Random, place: Path) -> None:
    from fedveil.flower import books

    facts = {"number": 3, "hash": "ab" * 32, "ledger": "/x", "time": "2030-01-01T00:00:00Z"}
    (place / "anchor.json").write_bytes(_spoilt(rng, facts, lambda v: json.dumps(v).encode()))
    books.read_anchor(place / "anchor.json")


def _key(rng: random.Random, place: Path) -> None:
    from fedveil.flower import identity, shuffler

    path = place / "key"
    identity.write_identity(path)
    path.write_bytes(fuzz().spoil_bytes(path.read_bytes(), rng))
    if rng.random() < 0.5:
        shuffler.read_key(str(path))
    else:
        identity.read_identity(path)


# --- messages -------------------------------------------------------------------------------------------------------


@functools.lru_cache
def site() -> tuple[Path, Any]:
    """A node with a contract and a table, in a folder that lives as long as this process."""
    import atexit

    place = Path(tempfile.mkdtemp(prefix="site"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place, module("flower/test_contract.py").an_owner(place)


def odd_array(rng: random.Random, like: np.ndarray) -> np.ndarray:
    """An array that is almost, or not at all, like this one."""
    how = rng.randrange(6)
    if how == 0:
        return like.astype(rng.choice(["<f8", "u1", "<f4"]))
    if how == 1:
        return np.resize(like, rng.choice([0, 1, like.size + 1, 2 * like.size])).astype(like.dtype)
    if how == 2:
        return np.full_like(like, rng.choice([np.nan, np.inf, -np.inf, 3e38, 1e-45, 0.0, -1.0]))
    if how == 3:
        return like.reshape(1, -1)
    return like + np.float32(rng.choice([0.0, 1e-6, 50.0]))


def request(rng: random.Random, place: Path) -> None:
    """A server's request to a node, greeting or round, with odd facts and arrays."""
    from fedveil.errors import UserError
    from fedveil.flower import books, node

    test = module("flower/test_contract.py")
    _, owner = site()
    config = test.a_config()
    facts: Any = json.loads(json.dumps(test.facts_of(config, test.a_contract())))
    for _ in range(rng.randint(1, 2)):
        facts = fuzz().spoil(facts, rng)
    arrays = {"weights": test.weights_of(config)}
    if rng.random() < 0.4:
        arrays["weights"] = odd_array(rng, arrays["weights"])
    if rng.random() < 0.2:
        arrays[rng.choice(["server.bound", "message", "server.x", "", "server.anchor.weights"])] = arrays["weights"]
    kind = rng.choice(["round", "round", "hello", "", "x\n" * 30])
    ledger, log = books.ledger_path(owner.home), owner.home / "node.log"
    before = ledger.stat().st_size if ledger.exists() else 0
    log.unlink(missing_ok=True)
    said, sent = node.answer(kind, facts, arrays, owner)
    assert said["status"] in ("ok", "refused", "shuffled"), said
    json.dumps(said, allow_nan=False)
    text = log.read_text() if log.exists() else ""
    assert "Traceback" not in text, text[-400:]
    if said["status"] == "refused":
        assert not sent and before == (ledger.stat().st_size if ledger.exists() else 0), "a refusal was charged"
        raise UserError(said["reason"])
    if before > 2_000_000:
        shutil.rmtree(owner.home)
        books.anchor_path(owner).unlink(missing_ok=True)


def reply(rng: random.Random, place: Path) -> None:
    """A node's reply to the server: odd facts, odd records, odd bytes in arrays, rightly signed or not."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord

    from fedveil.errors import UserError
    from fedveil.flower import identity, replies, wire
    from fedveil.flower.request import signed
    from fedveil.flower.roster import Member, Roster

    test = module("flower/test_sockets.py")
    update = {"update": np.zeros(3, np.float32)}
    round_facts = {**test.GOOD, "nonce": "a" * 32}
    hello_facts = {"format": 1, "status": "ok", "client": 0, "examples": 5, "contract": "0" * 64, "data": None,
                   "version": "1", "nonce": "a" * 32}  # fmt: skip
    facts: Any = fuzz().spoil(dict(rng.choice([round_facts, hello_facts, {"status": "refused", "reason": "x"}])), rng)
    roster = Roster("s", 1, (Member(0, "n0", identity.public_of(SECRET)),)) if rng.random() < 0.5 else None
    if roster and rng.random() < 0.7:
        facts = signed(facts, update, SECRET, "reply")
    document: Any = json.dumps(facts)
    if rng.random() < 0.4:
        document = fuzz().spoil_bytes(document.encode(), rng)
        document = document if rng.random() < 0.2 else document.decode("utf-8", "replace")
    data = test.npy(update["update"])
    data = fuzz().spoil_bytes(data, rng) if rng.random() < 0.5 else data
    records: dict[str, Any] = {
        wire.FACTS: ConfigRecord({"json": document}),
        wire.ARRAYS: ArrayRecord({"update": Array("float32", (3,), "numpy.ndarray", data)}),
    }
    if rng.random() < 0.3:
        whole = wire.pack(facts if isinstance(facts, dict) else {}, update)
        records = {wire.PACKED: ConfigRecord({"bytes": fuzz().spoil_bytes(whole, rng) if rng.random() < 0.5 else whole})}
    if rng.random() < 0.15:
        other = rng.choice([MetricRecord({"a": 1}), ArrayRecord({}), ConfigRecord({})])
        records[rng.choice([wire.FACTS, wire.ARRAYS, wire.PACKED, "x"])] = other
    message = test.message(**records)
    try:
        if "examples" in facts:
            replies.greeting(message, "a" * 32, roster, 4)
        else:
            replies.round_reply(message, 1000, "a" * 32, roster, (0, 0, 1))
    except replies.Unusable as wrong:
        raise UserError(str(wrong) or wrong.kind) from None


def packed(rng: random.Random, place: Path) -> None:
    """The bytes between a node's app and its trainer."""
    from fedveil.errors import UserError
    from fedveil.flower import limits, wire

    arrays = {"a": np.zeros(9, np.float32), "b": np.zeros((2, 2))}
    good = wire.pack({"kind": "round", "facts": {"config": {"a": [1, 2.5]}}}, arrays)
    try:
        wire.unpack(fuzz().spoil_bytes(good, rng))
    except limits.Malformed as wrong:
        raise UserError(str(wrong)) from None


def sum_message(rng: random.Random, place: Path) -> None:
    """A message of a secure sum, rightly signed with odd contents, and a party's journal."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedveil.flower import identity
    from fedveil.secure_sum import journal, messages

    context = messages.Context(bytes(16), 1, 0, bytes(32), bytes(32))
    digest, blobs = bytes(range(32)), ((1, b"abc"), (2, b"d"))
    body = rng.choice([
        messages.Keys(digest, digest, digest, (1, 2)), messages.Shares(blobs), messages.Agreement(digest),
        messages.Reveal(((1, 1, 7), (2, 2, 9))), messages.KeyBundle((1, 2), blobs), messages.Proof(((1, bytes(64)),)),
    ])  # fmt: skip
    signed = isinstance(body, messages.SIGNED)
    data = messages.unsigned(context, 1 if signed else messages.SERVER, body)
    head = messages._HEAD.size if rng.random() < 0.8 else 0
    data = data[:head] + fuzz().spoil_bytes(data[head:], rng)
    data += Ed25519PrivateKey.from_private_bytes(SECRET).sign(messages._SIGNED + data) if signed else b""
    if rng.random() < 0.3:
        path = place / "journal"
        journal.append(path, b"record")
        path.write_bytes(fuzz().spoil_bytes(path.read_bytes(), rng))
        journal.read(path)
    messages.unpack(context, data, (identity.public_of(SECRET),))


# --- sockets --------------------------------------------------------------------------------------------------------


@functools.lru_cache
def trainer_socket() -> str:
    """A trainer that serves the fuzzed node as long as this process lives."""
    from fedveil.flower import trainer

    folder, owner = site()
    path = str(folder / "t.sock")
    threading.Thread(target=trainer.serve, args=(path, owner), daemon=True).start()
    while not os.path.exists(path):
        time.sleep(0.01)
    return path


def trainer_bytes(rng: random.Random, place: Path) -> None:
    """Bytes on the trainer's socket; afterwards it still answers."""
    from fedveil.flower import trainer, wire

    path = trainer_socket()
    body = wire.pack({"kind": "hello", "facts": {"config": {"recipe": "fed-cdp"}}}, {"a": np.zeros(9, np.float32)})
    if rng.random() < 0.6:
        body = fuzz().spoil_bytes(body, rng)
        data = len(body).to_bytes(8, "little") + body
    else:
        data = fuzz().spoil_bytes(len(body).to_bytes(8, "little") + body, rng)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        line.settimeout(60)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
            while line.recv(65536):
                pass
    if rng.random() < 0.05:
        said, _ = trainer.ask(path, "hello", {"config": {"recipe": "no-such"}}, {})
        assert said["status"] == "refused" and "no-such" in said["reason"], said


@functools.lru_cache
def shuffler_address() -> str:
    """A shuffler that mixes as long as this process lives."""
    from fedveil.flower import shuffler

    folder, _ = site()
    address = f"unix:{folder / 's.sock'}"
    mixer = shuffler.Mixer(shuffler.frame_bytes(8), 8, minimum=2, expected=2, deadline=0.2)
    serving = shuffler.serve(address, mixer, shuffler.public_key(SECRET))
    threading.Thread(target=asyncio.run, args=(serving,), daemon=True).start()
    while not (folder / "s.sock").exists():
        time.sleep(0.01)
    return address


def shuffler_bytes(rng: random.Random, place: Path) -> None:
    """Bytes to the shuffler, which afterwards still says who it is; and a shuffler's spoilt answer to a node."""
    from fedveil.flower import shuffler

    address, sockets = shuffler_address(), module("flower/test_sockets.py")
    line = {"do": rng.choice(["put", "put", "take", "info"]), "round": rng.randrange(2**40), "sender": "a", "count": 8}
    text = json.dumps(fuzz().spoil(line, rng) if rng.random() < 0.6 else line).encode() + b"\n"
    data = text + b"".join(sockets.frames())
    data = data if rng.random() < 0.3 else fuzz().spoil_bytes(data, rng)
    found = asyncio.run(sockets.send_raw(address, data))
    head = found.partition(b"\n")[0]
    assert not head or isinstance(json.loads(head)["ok"], bool), head[:100]
    if rng.random() < 0.05:
        assert asyncio.run(shuffler.facts_of(address))["minimum"] == 2
    if rng.random() < 0.3:
        frames = shuffler.seal_reports(shuffler.public_key(SECRET), np.zeros(1, np.uint8), 8, 1)
        shuffler.open_reports(SECRET, [fuzz().spoil_bytes(f, rng) for f in frames], 8, 1, senders=2)
