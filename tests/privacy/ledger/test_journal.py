"""The record file: what was accepted is there after any crash; what was changed is found and named."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import UserError
from fedveil.privacy.ledger import journal
from fedveil.privacy.ledger.journal import (
    GENESIS,
    Damaged,
    Locked,
    Log,
    encode,
    head_path,
    kept_head,
    read,
    scan,
)


def written(path: Path, count: int) -> bytes:
    with Log.create(path, {"kind": "header"}) as log:
        for value in range(count):
            log.append({"kind": "release", "value": value, "text": "ε per round"})
    return path.read_bytes()


def values(path: Path) -> list[int]:
    return [r.body["value"] for r in read(path).records if r.body["kind"] == "release"]


def test_every_line_is_json_and_the_chain_can_be_recomputed_by_hand(tmp_path: Path) -> None:
    import hashlib

    data = written(tmp_path / "l", 3)
    previous = GENESIS
    for number, line in enumerate(data.decode().splitlines()):
        stored = json.loads(line)
        payload = line[line.index('"record":') + 9 : -1]
        assert stored["record"]["number"] == number
        assert stored["hash"] == hashlib.sha256((previous + payload).encode()).hexdigest()
        previous = stored["hash"]


def test_reopening_continues_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "l"
    written(path, 2)
    log, records = Log.open(path)
    with log:
        assert [r.number for r in records] == [0, 1, 2]
        log.append({"kind": "release", "value": 2})
    assert values(path) == [0, 1, 2]


def test_a_write_torn_at_any_byte_loses_at_most_the_record_that_was_never_accepted(tmp_path: Path) -> None:
    path = tmp_path / "l"
    data = written(path, 3)
    last = data.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(last, len(data) + 1):
        path.write_bytes(data[:cut])
        head_path(path).unlink(missing_ok=True)
        seen = read(path)
        whole = cut >= len(data) - 1  # only the newline is missing: the record counts
        assert len(seen.records) == (4 if whole else 3)
        assert bool(seen.torn) == (last < cut < len(data) - 1)
        log, records = Log.open(path)
        with log:
            log.append({"kind": "release", "value": 9})
        assert values(path) == ([0, 1, 2, 9] if whole else [0, 1, 9])
        repairs = [r.body for r in records if r.body["kind"] == "repair"]
        assert [r["dropped_bytes"] for r in repairs] == ([cut - last] if seen.torn else [])


def test_a_torn_end_filled_with_zeros_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "l"
    data = written(path, 2)
    path.write_bytes(data + b'{"hash":"ab' + b"\0" * 100)
    log, _ = Log.open(path)
    log.close()
    assert values(path) == [0, 1]


def test_any_flipped_bit_is_found_and_the_record_named(tmp_path: Path) -> None:
    data = written(tmp_path / "l", 3)
    starts = [0] + [i + 1 for i, byte in enumerate(data) if byte == 10]
    for at in range(len(data)):
        number = max(i for i, start in enumerate(starts) if start <= at)
        for bit in range(8):
            broken = bytearray(data)
            broken[at] ^= 1 << bit
            with pytest.raises(Damaged) as caught:
                scan(bytes(broken))
            assert caught.value.record == number, (at, bit)
            assert f"record {number}" in str(caught.value)


def test_removed_repeated_and_reordered_records_are_found(tmp_path: Path) -> None:
    lines = written(tmp_path / "l", 4).splitlines(keepends=True)
    for broken, number in (
        (lines[:2] + lines[3:], 2),
        ([*lines[:3], lines[2], *lines[3:]], 3),
        ([lines[0], lines[2], lines[1], *lines[3:]], 1),
    ):
        with pytest.raises(Damaged) as caught:
            scan(b"".join(broken))
        assert caught.value.record == number


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_foreign_bytes_after_the_records_are_never_dropped_unless_a_torn_write_can_leave_them(
    tail: bytes,
) -> None:
    first, _ = encode({"kind": "header"}, 0, GENESIS)
    try:
        contents = scan(first + tail)
    except Damaged as damaged:
        assert damaged.record >= 1
    else:
        assert b'{"hash":"'.startswith(contents.torn.rstrip(b"\0")[:9])


def test_create_refuses_an_existing_ledger_and_foreign_files_but_restarts_a_torn_first_record(
    tmp_path: Path,
) -> None:
    path = tmp_path / "l"
    data = written(path, 1)
    with pytest.raises(UserError, match="already exists"):
        Log.create(path, {"kind": "header"})
    path.write_text("my notes")
    with pytest.raises(Damaged):
        Log.create(path, {"kind": "header"})
    assert path.read_text() == "my notes"
    path.write_bytes(data[:30])
    with pytest.raises(UserError, match="there was a ledger here"):  # its head is still known beside it
        Log.create(path, {"kind": "header"})
    head_path(path).unlink()
    Log.create(path, {"kind": "header"}).close()
    assert len(read(path).records) == 1


def test_messages_for_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such ledger"):
        read(tmp_path / "absent")
    with pytest.raises(UserError, match="no such ledger"):
        Log.open(tmp_path / "absent")
    with pytest.raises(UserError, match="folder"):
        read(tmp_path)
    with pytest.raises(UserError, match="folder"):
        Log.open(tmp_path)


def test_two_writers_cannot_hold_one_file(tmp_path: Path) -> None:
    path = tmp_path / "l"
    written(path, 1)
    log, _ = Log.open(path)
    with log:
        with pytest.raises(Locked):
            Log.open(path)
        code = "import sys; from fedveil.privacy.ledger.journal import Log, Locked\n"
        code += "try: Log.open(sys.argv[1])\nexcept Locked: sys.exit(7)"
        assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 7
        assert len(read(path).records) == 2  # readers are welcome
    Log.open(path)[0].close()


def test_a_foreign_write_while_locked_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with Log.create(path, {"kind": "header"}) as log:
        with path.open("ab") as other:
            other.write(b"x")
        with pytest.raises(Damaged):
            log.append({"kind": "release", "value": 0})


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_after_a_disk_error_nothing_more_is_accepted_until_reopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "l"
    written(path, 1)
    log, _ = Log.open(path)

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, call, fail)
        with pytest.raises(UserError, match="No space left"):
            log.append({"kind": "release", "value": 1})
    with pytest.raises(UserError, match="closed"):
        log.append({"kind": "release", "value": 2})
    log, _ = Log.open(path)
    with log:
        log.append({"kind": "release", "value": 3})
    assert values(path) in (
        [0, 3],
        [0, 1, 3],
    )  # whether the unaccepted record counts: both are on the safe side


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(journal.os, "pwrite", lambda handle, data, at: real(handle, data[:7], at))
    written(tmp_path / "l", 3)
    assert values(tmp_path / "l") == [0, 1, 2]


def test_every_append_is_synced_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_write, real_sync = os.pwrite, os.fsync
    monkeypatch.setattr(journal.os, "pwrite", lambda *a: (calls.append("write"), real_write(*a))[1])
    monkeypatch.setattr(journal.os, "fsync", lambda *a: (calls.append("sync"), real_sync(*a))[1])
    written(tmp_path / "l", 2)
    assert calls == ["write", "sync", "write", "sync", *["write", "sync", "write"] * 2]
    # each record is written and synced before its head is written beside it; the sync in between: the new folder entry


def test_what_a_killed_process_was_told_is_on_disk(tmp_path: Path) -> None:
    """The child reports each accepted record on a pipe; it is killed at an arbitrary moment."""
    path = tmp_path / "l"
    child = textwrap.dedent("""
        import sys
        from fedveil.privacy.ledger.journal import Log
        try:
            log, records = Log.open(sys.argv[1])
        except Exception:
            log, records = Log.create(sys.argv[1], {"kind": "header"}), ()
        value = sum(r.body["kind"] == "release" for r in records)
        while True:
            log.append({"kind": "release", "value": value, "padding": "x" * 5000})
            print(value, flush=True)
            value += 1
    """)
    accepted = -1
    for attempt in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", child, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(3 + 7 * attempt):
            accepted = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split("\n")
        process.wait()
        accepted = max([accepted, *(int(line) for line in rest[:-1])])
        found = values(path)
        assert found == list(range(len(found)))
        assert len(found) >= accepted + 1


def test_a_file_cut_between_records_rolled_back_or_lost_is_noticed_by_the_head_beside_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.jsonl"
    data = written(path, 4)
    lines = data.splitlines(keepends=True)
    for keep in range(len(lines)):
        path.write_bytes(b"".join(lines[:keep]))
        with pytest.raises(Damaged, match=r"ledger\.head"):
            Log.open(path)
    path.unlink()
    with pytest.raises(UserError, match="forgets what was released"):
        Log.create(path, {"kind": "header"})
    path.write_bytes(data)
    Log.open(path)[0].close()


def test_another_ledger_in_its_place_is_noticed(tmp_path: Path) -> None:
    path, other = tmp_path / "ledger.jsonl", tmp_path / "other.jsonl"
    written(path, 2)
    with Log.create(other, {"kind": "header", "who": "else"}) as log:
        for value in range(9):
            log.append({"kind": "release", "value": value})
    path.write_bytes(other.read_bytes())
    with pytest.raises(Damaged, match="another record there"):
        Log.open(path)


def test_the_head_beside_lags_after_a_crash_and_never_runs_ahead(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    written(path, 2)
    behind = head_path(path).read_bytes()
    with Log.open(path)[0] as log:
        log.append({"kind": "release", "value": 2})
    head_path(path).write_bytes(behind)  # as if killed between the record and its head
    log, records = Log.open(path)
    log.close()
    assert len(records) == 4 and kept_head(path)[0].number == 3
    head_path(path).write_bytes(b"")  # a power cut
    Log.open(path)[0].close()
    head_path(path).write_bytes(b"what is this")
    with pytest.raises(UserError, match="delete this file"):
        Log.open(path)


@pytest.mark.parametrize(
    "payload",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"number":0,"kind":"header","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"7", b'"text"', b"null", b"[]", b'{"number":0}', b'{"number":0,"kind":7}',
        b'{"number":0,"kind":"header","x":NaN}', b'{"number":0,"kind":"header","x":' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_a_record_with_a_right_hash_and_odd_contents_is_damage_and_no_crash(payload: bytes) -> None:
    digest = hashlib.sha256(GENESIS.encode() + payload).hexdigest().encode()
    with pytest.raises(Damaged) as caught:
        scan(b'{"hash":"' + digest + b'","record":' + payload + b"}\n")
    assert caught.value.record == 0


def test_files_that_may_not_be_read_or_written_are_clear_errors(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "ledger.jsonl"
    written(path, 1)

    def forbidden(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "open", forbidden)
        with pytest.raises(UserError, match="Permission denied"):
            Log.open(path)
        with pytest.raises(UserError, match="Permission denied"):
            Log.create(tmp_path / "new.jsonl", {"kind": "header"})
    monkeypatch.setattr(journal, "MOST_BYTES", 100)
    for call in (read, Log.open):
        with pytest.raises(UserError, match="larger than"):
            call(path)
