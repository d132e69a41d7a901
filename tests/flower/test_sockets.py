"""Bytes from outside: the trainer's socket, the shuffler, the wire. Nothing ends them, blocks them or fills them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedveil.flower import identity, limits, replies, shuffler, trainer, wire
from fedveil.flower.owner import Owner
from fedveil.flower.roster import Member, Roster


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "t.sock")
    (tmp_path / "policy.toml").write_text('recipes = ["fed-cdp"]\nmaximum_epsilon = 1\n')
    owner = Owner(tmp_path / "home", 0, policy=str(tmp_path / "policy.toml"))
    threading.Thread(target=trainer.serve, args=(path, owner), daemon=True).start()
    while not os.path.exists(path):
        time.sleep(0.01)
    yield path


def call(path: str, data: bytes, close: bool = True) -> bytes:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        with contextlib.suppress(OSError):
            line.sendall(data)
            if close:
                line.shutdown(socket.SHUT_WR)
        line.settimeout(120)  # a busy machine: callers must not pile up behind the first import
        found = b""
        with contextlib.suppress(OSError):
            while part := line.recv(65536):
                found += part
        return found


def lives(path: str) -> bool:
    said, _ = trainer.ask(path, "hello", {"config": {"recipe": "no-such"}}, {})
    return said["status"] == "refused" and "no-such" in said["reason"]


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def nonsense() -> list[bytes]:
    good = wire.pack({"kind": "hello", "facts": {"config": {}}}, {"a": np.zeros(3, np.float32)})
    deep = b'{"facts":' + b"[" * 50_000
    out = [
        b"",
        b"\x01",
        b"\xff" * 8,
        framed(b""),
        framed(b"nonsense"),
        framed(good[:20]),
        framed(good + b"x"),
    ]
    out += [
        framed(len(text).to_bytes(8, "little") + text)
        for text in (deep, b"null", b"[]", b"NaN", b'{"facts":3}', b"\xff")
    ]
    out += [
        framed(wire.pack(facts, {}))
        for facts in ({}, {"kind": 3, "facts": {}}, {"kind": "round", "facts": {"config": []}})
    ]  # type: ignore[dict-item]
    out.append(framed(wire.pack({"kind": "round", "facts": {"config": {"recipe": "x" * 10**5}}}, {})))
    return out


def test_a_trainer_that_begins_changes_nothing_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A umask is the whole process's: two threads that changed it and put it back in turn left 0117 behind, and from then on
    nothing that this process made could be opened (a Chromium that it starts dies of a trap)."""
    path = tmp_path / "t.sock"
    before, seen = os.umask(0o022), []

    class Watched(socket.socket):
        def bind(self, address: Any) -> None:
            seen.append(os.umask(0o022))
            super().bind(address)

    monkeypatch.setattr(trainer.socket, "socket", Watched)
    try:
        trainer._listen(str(path)).close()
    finally:
        after = os.umask(before)
    assert seen == [0o022] and after == 0o022 and path.stat().st_mode & 0o777 == 0o660


def test_nobody_is_let_in_before_the_rights_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is not there yet, and behind the one it is made under nobody listens."""
    path, real, tried = str(tmp_path / "t.sock"), os.chmod, []

    def chmod(made: str, mode: int) -> None:
        assert not os.path.exists(path)
        with socket.socket(socket.AF_UNIX) as early, pytest.raises(ConnectionRefusedError):
            early.connect(made)
        tried.append(real(made, mode))

    monkeypatch.setattr(os, "chmod", chmod)
    trainer._listen(path).close()
    assert len(tried) == 1 and os.listdir(tmp_path) == ["t.sock"]




def test_no_garbage_ends_the_trainer(listening: str) -> None:
    for data in nonsense():
        call(listening, data)
    assert lives(listening)


def test_random_bytes_and_mutations_do_not_end_the_trainer(listening: str) -> None:
    """300 fuzzed messages."""
    draw = random.Random(2)
    good = framed(
        wire.pack(
            {"kind": "hello", "facts": {"config": {"recipe": "fed-cdp"}}}, {"a": np.zeros(9, np.float32)}
        )
    )
    for _ in range(300):
        data = bytearray(good) if draw.random() < 0.8 else bytearray(draw.randbytes(draw.randint(0, 300)))
        for _ in range(draw.randint(0, 4)):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        call(listening, bytes(data))
    assert lives(listening)


def test_silent_callers_do_not_block_others(listening: str) -> None:
    held = []
    for _ in range(10):
        line = socket.socket(socket.AF_UNIX)
        line.connect(listening)
        held.append(line)
    begun = time.monotonic()
    assert lives(listening) and time.monotonic() - begun < 20
    for line in held:
        line.close()


def test_an_announcement_takes_no_memory(listening: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for size in (2**32 - 1, 2**29, 2**63):
        call(listening, struct.pack("<Q", size) + b"x" * 1000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes
    assert lives(listening)


# --- the wire ---


def message(**records: Any) -> Message:
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    return Message(RecordDict(records), 7, "train")


def npy(value: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, value, allow_pickle=value.dtype == object)
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    return file.getvalue()


def raw(data: bytes) -> ArrayRecord:
    return ArrayRecord({"update": Array("float32", (3,), "numpy.ndarray", data)})


GOOD = {"format": 1, "status": "ok", "round": 0, "client": 0, "ticket": 1}
EMPTY = ArrayRecord({})
BAD_REPLIES: dict[str, dict[str, Any]] = {
    "facts as a number": {wire.FACTS: ConfigRecord({"json": 3}), wire.ARRAYS: EMPTY},
    "facts as bytes": {wire.FACTS: ConfigRecord({"json": b"{}"}), wire.ARRAYS: EMPTY},
    "deep JSON": {wire.FACTS: ConfigRecord({"json": "[" * 100_000}), wire.ARRAYS: EMPTY},
    "long number": {
        wire.FACTS: ConfigRecord({"json": '{"format":1,"examples":' + "9" * 6000 + "}"}),
        wire.ARRAYS: EMPTY,
    },
    "infinite": {wire.FACTS: ConfigRecord({"json": '{"format":1,"below":1e999}'}), wire.ARRAYS: EMPTY},
    "records as arrays": {wire.FACTS: EMPTY, wire.ARRAYS: EMPTY},
    "arrays as records": {
        wire.FACTS: ConfigRecord({"json": json.dumps(GOOD)}),
        wire.ARRAYS: ConfigRecord({}),
    },
    "metrics": {wire.FACTS: MetricRecord({"json": 1}), wire.ARRAYS: EMPTY},
    "nothing": {},
    "more": {wire.FACTS: ConfigRecord({"json": json.dumps(GOOD)}), wire.ARRAYS: EMPTY, "x": EMPTY},
    "npz": {wire.FACTS: ConfigRecord({"json": json.dumps(GOOD)}), wire.ARRAYS: raw(npz())},
    "pickle": {
        wire.FACTS: ConfigRecord({"json": json.dumps(GOOD)}),
        wire.ARRAYS: raw(npy(np.array([{}, 2], object))),
    },
    "cut": {
        wire.FACTS: ConfigRecord({"json": json.dumps(GOOD)}),
        wire.ARRAYS: raw(npy(np.zeros(3, np.float32))[:-1]),
    },
    "huge shape": {
        wire.FACTS: ConfigRecord({"json": json.dumps(GOOD)}),
        wire.ARRAYS: raw(
            npy(np.zeros(3, np.float32)).replace(b"(3,)", b"(1e9,)").replace(b"(1e9,) ", b"(3000000000000,)")
        ),
    },
    "complex": {
        wire.FACTS: ConfigRecord({"json": json.dumps(GOOD)}),
        wire.ARRAYS: raw(npy(np.zeros(3, complex))),
    },
    "no header": {wire.FACTS: ConfigRecord({"json": json.dumps(GOOD)}), wire.ARRAYS: raw(b"")},
    "twice": {
        wire.FACTS: ConfigRecord({"json": '{"format":1,"status":"ok","status":"ok"}'}),
        wire.ARRAYS: EMPTY,
    },
    "packed text": {wire.PACKED: ConfigRecord({"bytes": "x"})},
    "packed array": {wire.PACKED: EMPTY},
    "packed and more": {wire.PACKED: ConfigRecord({"bytes": wire.pack(GOOD, {}), "x": 1})},
    "packed beside facts": {wire.PACKED: ConfigRecord({"bytes": wire.pack(GOOD, {})}), wire.ARRAYS: EMPTY},
    "packed and cut": {wire.PACKED: ConfigRecord({"bytes": wire.pack(GOOD, {"update": np.zeros(3, np.float32)})[:-1]})},
    "packed in another format": {wire.PACKED: ConfigRecord({"bytes": wire.pack({**GOOD, "format": 2}, {})})},
    "packed and too large": {wire.PACKED: ConfigRecord({"bytes": wire.pack(GOOD, {"update": np.zeros(9_999, np.float32)})})},
    "packed and huge": {wire.PACKED: ConfigRecord({"bytes": bytes(2**20)})},
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_reply_of_any_form_is_unusable_and_nothing_worse(name: str) -> None:
    reply = message(**BAD_REPLIES[name])
    with pytest.raises(replies.Unusable):
        replies.round_reply(reply, 10_000, "", None, (0, 0, 1))
    with pytest.raises(replies.Unusable):
        replies.greeting(reply, "", None, 4)


@pytest.mark.parametrize("examples", [0, -1, 2**63, 1.5, "7", None, True, [1]])
def test_a_greeting_with_an_odd_number_of_examples_is_unusable(examples: Any) -> None:
    facts = {
        "format": 1,
        "status": "ok",
        "client": 0,
        "examples": examples,
        "contract": "0" * 64,
        "data": None,
        "version": "1",
    }
    reply = message(**{wire.FACTS: ConfigRecord({"json": json.dumps(facts)}), wire.ARRAYS: EMPTY})
    with pytest.raises(replies.Unusable):
        replies.greeting(reply, "", None, 4)


def test_small_messages_travel_in_one_record_and_large_ones_in_parts() -> None:
    for count, names in ((10, {wire.PACKED}), (100_000, {wire.FACTS, wire.ARRAYS})):
        arrays = {"update": np.arange(count, dtype=np.float32)}
        records = wire.content({"status": "ok"}, arrays)
        assert set(records) == names
        facts, back = wire.read(message(**dict(records)), arrays["update"].nbytes)
        assert facts == {"format": 1, "status": "ok"} and np.array_equal(back["update"], arrays["update"])


def test_array_bytes_at_random_are_malformed_or_an_array() -> None:
    """5,000 mutations of an array's bytes."""
    draw, good = random.Random(9), npy(np.arange(20, dtype=np.float32))
    for _ in range(5000):
        data = bytearray(good)
        for _ in range(draw.randint(1, 5)):
            data[draw.randrange(min(len(data), 140))] = draw.randrange(256)
        with contextlib.suppress(limits.Malformed):
            assert wire.read_array(bytes(data), "a").nbytes <= len(data)


def test_a_reply_counts_only_with_the_signature_of_the_number_it_bears() -> None:
    from fedveil.flower.request import signed

    secrets = [bytes([n + 1]) * 32 for n in range(2)]
    roster = Roster("s", 1, tuple(Member(n, f"n{n}", identity.public_of(s)) for n, s in enumerate(secrets)))
    update = {"update": np.zeros(3, np.float32)}

    def reply(facts: dict[str, Any], arrays: dict[str, np.ndarray] = update) -> Message:
        return message(**{wire.FACTS: ConfigRecord({"json": json.dumps(facts)}),
                          wire.ARRAYS: ArrayRecord({k: Array(v) for k, v in arrays.items()})})  # fmt: skip

    told = {**GOOD, "nonce": "a" * 32}
    honest = {**signed(told, update, secrets[0], "reply")}
    found, _ = replies.round_reply(reply(honest), 100, "a" * 32, roster, (0, 0, 1))
    assert found["client"] == 0
    for facts, nonce in (
        (signed(told, update, secrets[1], "reply"), "a" * 32),  # another node's key
        (signed({**told, "client": 1}, update, secrets[0], "reply"), "a" * 32),
        (honest, "b" * 32),  # an answer to another message
        (told, "a" * 32),
        ({**honest, "round": 1}, "a" * 32),
        (signed({**told, "client": 5}, update, secrets[0], "reply"), "a" * 32),
    ):
        with pytest.raises(replies.Unusable):
            replies.round_reply(reply(facts), 100, nonce, roster, (0, 0, 1))
    with pytest.raises(replies.Unusable, match="signature"):
        replies.round_reply(
            reply(honest, {"update": np.ones(3, np.float32)}), 100, "a" * 32, roster, (0, 0, 1)
        )


# --- the shuffler ---


def mixing(path: Path, use: Any, roster: Roster | None = None, **more: Any) -> None:
    """Run a shuffler beside the coroutine use(address)."""

    async def both() -> None:
        mixer = shuffler.Mixer(shuffler.frame_bytes(8), 8, **{"minimum": 2, "expected": 2, **more})
        started = asyncio.Event()
        key = shuffler.public_key(bytes(range(32)))
        task = asyncio.create_task(shuffler.serve(f"unix:{path}", mixer, key, started, roster=roster))
        await started.wait()
        try:
            await use(f"unix:{path}")
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(both())


async def send_raw(address: str, data: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        writer.write_eof()
        await writer.drain()
    found = b""
    with contextlib.suppress(ConnectionError):
        found = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return found


def frames() -> list[bytes]:
    return [bytes([n]) * shuffler.frame_bytes(8) for n in range(8)]


def test_garbage_does_not_end_the_shuffler(tmp_path: Path) -> None:
    draw = random.Random(4)
    lines = [b"", b"\n", b"{}\n", b"null\n", b"[]\n", b'"x"\n', b"[" * 60_000 + b"\n", b"x" * 200_000,
             b'{"do":"put"}\n', b'{"do":3}\n',
             b'{"do":"put","count":"x","round":1,"sender":"a"}\n', b'{"do":"take","round":1e9}\n', b'{"do":"take","round":[]}\n',
             b'{"do":"put","count":8,"round":' + b"9" * 5000 + b',"sender":"a"}\n', b"\xff\n"]  # fmt: skip
    lines += [draw.randbytes(draw.randint(1, 200)) + b"\n" for _ in range(200)]

    async def use(address: str) -> None:
        for data in lines:
            await send_raw(address, data)
        for name in ("a", "b"):
            await shuffler.send_round(address, 1, name, frames())
        assert (await shuffler.facts_of(address))["minimum"] == 2

    mixing(tmp_path / "s", use)


def test_only_nodes_of_the_roster_hand_in_and_only_under_their_own_number(tmp_path: Path) -> None:
    secrets = [bytes([n + 1]) * 32 for n in range(3)]
    roster = Roster(
        "s", 1, tuple(Member(n, f"n{n}", identity.public_of(s)) for n, s in enumerate(secrets[:2]))
    )

    async def use(address: str) -> None:
        for sender, secret in (("0", None), ("0", secrets[1]), ("2", secrets[2]), ("x", secrets[0])):
            with pytest.raises(ConnectionError, match=r"roster|signed"):
                await shuffler.send_round(address, 1, sender, frames(), secret)
        await shuffler.send_round(address, 1, "0", frames(), secrets[0])
        with pytest.raises(ConnectionError, match="not closed"):  # strangers did not fill the round
            await shuffler.take_round(address, 1, bytes(range(32)))
        await shuffler.send_round(address, 1, "1", frames(), secrets[1])
        found, facts = await shuffler.take_round(address, 1, bytes(range(32)))
        assert facts["senders"] == 2 and sorted(found) == sorted(frames() * 2)

    mixing(tmp_path / "s", use, roster)


def test_one_sender_cannot_open_rounds_without_end() -> None:
    mixer = shuffler.Mixer(shuffler.frame_bytes(8), 8)
    for number in range(shuffler.OPEN_ROUNDS):
        mixer.put(number, "a", frames(), 0.0)
    with pytest.raises(ValueError, match="open rounds"):
        mixer.put(99, "a", frames(), 0.0)
    mixer.put(0, "b", frames(), 0.0)
