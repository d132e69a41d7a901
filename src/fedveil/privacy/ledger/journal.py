"""An append-only file of chained records that survives crashes.

One JSON line per record: `{"hash":"<sha256>","record":{"number":N,...}}`. The hash covers the previous
record's hash and the exact bytes of this record, so a changed byte anywhere before the end is found and
named. `append` returns only after the line is on disk (write, flush, fsync); a record that the caller has
seen accepted is therefore complete after any crash.

What a crash can leave behind, and what is done about it:
- a last line without its newline whose hash is right: the record is whole, it is kept (it counts);
- a last line that stops in the middle: `append` cannot have returned, so nobody was handed anything on the
  strength of it; it is dropped on the next opening for writing, and a `repair` record says so;
- anything else (a complete line with a wrong hash, bytes after a complete record) is damage, not a crash:
  `Damaged` names the record and nothing is dropped.

The chain is a checksum, not a signature: whoever can write the file can write a new chain, and a file cut
exactly between two records looks like a shorter file. (Number, hash) of a record kept elsewhere is an
`Anchor`: opening with anchors finds a file that was cut, rolled back or exchanged. The writer keeps one
itself, in a second file (`head_path`; ledger.jsonl has ledger.head), rewritten after each record is on disk:
it can lag behind the file after a crash, never run ahead. Checkpoints keep others.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, TypedDict

from fedveil.errors import UserError
from fedveil.jsons import Json, JsonObject

GENESIS = hashlib.sha256(b"fedveil ledger, version 1").hexdigest()
_OPEN, _MIDDLE, _CLOSE = b'{"hash":"', b'","record":', b"}"
_PREFIX = len(_OPEN) + 64 + len(_MIDDLE)
_HEAD = re.compile(rb"(\d{15}) ([0-9a-f]{64})\n")
MOST_BYTES = 1 << 30  # of a whole file; a run of 100,000 rounds takes some 50 MB
MOST_RECORD = 1 << 26  # of one line


class Damaged(UserError):
    """A record is not what was written; `record` is its number."""

    def __init__(self, path: Path | str, record: int, why: str) -> None:
        super().__init__(f"{path}: record {record} is damaged: {why}. Restore the file from a copy.")
        self.record = record


class Locked(UserError):
    """Another process (or another handle) writes this file."""


class Body(TypedDict, total=False):
    """What records say: each has a number and a kind, and the members of its kind (`entries.check_body`)."""

    number: int
    kind: str
    header: JsonObject
    round: int
    groups: list[tuple[int, str]]  # number of a set of claims, packed clients
    parts: list[list[Json]]  # sets of claims that appear for the first time
    note: str
    fingerprint: str
    charged: bool
    made: str
    replay_of: str
    budgets: list[int]
    dropped_bytes: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """One accepted record: its place, its chained hash, and what was said."""

    number: int
    hash: str
    body: Body


class Anchor(NamedTuple):
    """A record that must be there: its number, its hash, and who remembers it."""

    number: int
    hash: str
    source: str


@dataclass(frozen=True)
class Contents:
    """All whole records, the bytes they take, and what a torn write left after them (normally nothing)."""

    records: tuple[Record, ...]
    size: int
    torn: bytes
    newline_missing: bool


def encode(body: Body, number: int, previous: str) -> tuple[bytes, str]:
    """The line (with newline) and hash of a record that follows the one with hash `previous`."""
    payload = json.dumps({"number": number, **body}, separators=(",", ":"), allow_nan=False).encode()
    if len(payload) > MOST_RECORD:
        raise UserError(f"a ledger record of {len(payload)} bytes is above the limit of {MOST_RECORD}.")
    digest = _digest(previous, payload)
    return _OPEN + digest.encode() + _MIDDLE + payload + _CLOSE + b"\n", digest


def scan(data: bytes, path: Path | str = "ledger") -> Contents:
    """Check every record of `data`; raise `Damaged` unless all is whole but a torn end."""
    records: list[Record] = []
    start, previous = 0, GENESIS
    while (end := data.find(b"\n", start)) >= 0:
        record = _decode(data[start:end], previous, len(records))
        if record is None:
            raise Damaged(path, len(records), "its checksum does not fit")
        records.append(record)
        previous, start = record.hash, end + 1
    tail = data[start:]
    record = _decode(tail, previous, len(records)) if tail else None
    if record is not None:
        return Contents((*records, record), len(data), b"", True)
    if not _could_be_torn(tail):
        raise Damaged(path, len(records), "it has no line end, and no interrupted write leaves such bytes")
    return Contents(tuple(records), start, tail, False)


def read(path: Path | str) -> Contents:
    """Read and check without locking or repairing; safe while another process writes."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as wrong:
        _refuse(path, wrong)
    _bounded(len(data), path)
    return scan(data, path)


def head_path(path: Path | str) -> Path:
    """Where the writer of `path` keeps its last record's number and hash: ledger.jsonl -> ledger.head."""
    return Path(path).with_suffix(".head")


def kept_head(path: Path | str) -> tuple[Anchor, ...]:
    """The anchor in the file beside the ledger, if there is one. Read it before the ledger itself, which may
    grow in between. A file without content (a power cut can leave one) says nothing."""
    beside = head_path(path)
    try:
        with open(beside, "rb") as file:
            text = file.read(128)
    except FileNotFoundError:
        return ()
    except OSError as wrong:
        _refuse(beside, wrong)
    if not text.strip(b"\0"):
        return ()
    found = _HEAD.fullmatch(text)
    if found is None:
        raise UserError(
            f"{beside}: does not hold the number and hash of a record. If the ledger beside it is known to be "
            "whole, delete this file."
        )
    return (Anchor(int(found.group(1)), found.group(2).decode(), beside.name),)


def check_anchors(records: Sequence[Record], anchors: Sequence[Anchor], path: Path | str) -> None:
    """Raise `Damaged` unless every anchored record is there: the file was cut, rolled back or exchanged."""
    for anchor in anchors:
        if not records:
            raise Damaged(path, 0, f"the file is empty, but {anchor.source} knows record {anchor.number}")
        if anchor.number >= len(records):
            raise Damaged(
                path,
                len(records),
                f"the file ends with record {len(records) - 1}, but {anchor.source} knows record {anchor.number}: it was "
                "cut or rolled back, and would count too little",
            )
        if records[anchor.number].hash != anchor.hash:
            raise Damaged(path, anchor.number, f"{anchor.source} was made with another record there")


class Log:
    """The one writer of a record file. Use `Log.create` or `Log.open`; close it or use it in `with`."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle, self._beside = path, handle, -1
        self._size, self._count, self._head = 0, 0, GENESIS

    @classmethod
    def create(cls, path: Path | str, body: Body) -> Log:
        """Start a new file with `body` as record 0. A file that never got a whole record is started anew."""
        log = cls(Path(path), _locked(Path(path), os.O_RDWR | os.O_CREAT))
        try:
            if scan(_all(log._handle, path), path).records:
                raise UserError(
                    f"{path}: a ledger already exists here; open it to continue, or choose another path."
                )
            if anchors := kept_head(path):
                raise UserError(
                    f"{path}: there was a ledger here ({anchors[0].source} knows its record {anchors[0].number}) and it is "
                    f"gone. Put it back; deleting {anchors[0].source} forgets what was released."
                )
            os.ftruncate(log._handle, 0)
            log._open_head()
            log.append(body)
            _sync_folder(log._path.parent)
        except OSError as wrong:
            log.close()
            _refuse(path, wrong)
        except BaseException:
            log.close()
            raise
        return log

    @classmethod
    def open(cls, path: Path | str, anchors: Sequence[Anchor] = ()) -> tuple[Log, tuple[Record, ...]]:
        """Continue an existing file: check it against `anchors` and the head kept beside it, repair a torn end,
        return the writer and all records."""
        log = cls(Path(path), _locked(Path(path), os.O_RDWR))
        try:
            contents = scan(_all(log._handle, path), path)
            check_anchors(contents.records, [*kept_head(path), *anchors], path)
            if not contents.records:
                raise UserError(
                    f"{path}: holds no complete record, so nothing was released with it; delete it."
                )
            records = contents.records
            log._open_head()
            log._size, log._count, log._head = contents.size, len(records), records[-1].hash
            if contents.newline_missing:
                log._write(b"\n")
            if contents.torn:
                os.ftruncate(log._handle, contents.size)
                note: Body = {"kind": "repair", "dropped_bytes": len(contents.torn),
                        "sha256": hashlib.sha256(contents.torn).hexdigest()}  # fmt: skip
                records = (*records, log.append(note))
            log._keep_head()
        except OSError as wrong:
            log.close()
            _refuse(path, wrong)
        except BaseException:
            log.close()
            raise
        return log, records

    def append(self, body: Body) -> Record:
        """Write one record and return once it is on disk.

        After any failure of the disk the state of the file is unknown; the log closes itself and has to be
        opened again, which repairs a half-written end.
        """
        if self._handle < 0:
            raise UserError(f"{self._path}: the ledger is closed; open it again to go on.")
        if os.fstat(self._handle).st_size != self._size:
            raise Damaged(self._path, self._count, "something else wrote to the file while it was locked")
        line, digest = encode(body, self._count, self._head)
        self._write(line)
        record = Record(self._count, digest, {"number": self._count, **body})
        self._count, self._head = self._count + 1, digest
        self._keep_head()
        return record

    def close(self) -> None:
        """Release the lock. Closing twice is harmless."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        if self._beside >= 0:
            os.close(self._beside)
            self._beside = -1

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        try:
            _put(self._handle, data, self._size)
            os.fsync(self._handle)
        except OSError as wrong:
            self.close()
            _refuse(self._path, wrong)
        except BaseException:
            self.close()
            raise
        self._size += len(data)

    def _open_head(self) -> None:
        self._beside = os.open(head_path(self._path), os.O_RDWR | os.O_CREAT, 0o644)

    def _keep_head(self) -> None:
        """One small write in place. It is not synced: after a power cut it may lag, which only weakens it."""
        try:
            _put(self._beside, f"{self._count - 1:015d} {self._head}\n".encode(), 0)
        except OSError as wrong:
            self.close()
            _refuse(head_path(self._path), wrong)


def _put(handle: int, data: bytes, at: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(handle, data[written:], at + written)


def _digest(previous: str, payload: bytes) -> str:
    return hashlib.sha256(previous.encode() + payload).hexdigest()


def _decode(line: bytes, previous: str, number: int) -> Record | None:
    """The record of one line (without newline), or None if it is not exactly what was written."""
    digest, payload = line[len(_OPEN) : len(_OPEN) + 64], line[_PREFIX:-1]
    if line != _OPEN + digest + _MIDDLE + payload + _CLOSE or digest != _digest(previous, payload).encode():
        return None
    try:
        body: Body = json.loads(payload, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or body.get("number") != number or not isinstance(body.get("kind"), str):
        return None
    return Record(number, digest.decode(), body)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _could_be_torn(tail: bytes) -> bool:
    """Whether an interrupted write can leave `tail`: the start of a line, and less than a whole record.

    Bytes after a whole record (a changed line end) or foreign text are damage, which is never dropped.
    """
    text = tail.rstrip(b"\0")  # some file systems fill a torn end with zeros
    if text[: len(_OPEN)] != _OPEN[: len(text)]:
        return False
    try:
        json.JSONDecoder().raw_decode(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return True
    return False


def _locked(path: Path, flags: int) -> int:
    """Open `path` and take the writer's lock, which lasts until the handle is closed or the process ends."""
    try:
        handle = os.open(path, flags, 0o644)
    except OSError as wrong:
        _refuse(path, wrong)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_ino != os.stat(path).st_ino:
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        os.close(handle)
        raise Locked(f"{path}: another process is writing this ledger; stop it first.") from None
    except OSError as wrong:
        os.close(handle)
        _refuse(path, wrong)
    return handle


def _refuse(path: Path | str, wrong: OSError) -> NoReturn:
    """What the operating system said, as an error that says what to do."""
    if isinstance(wrong, FileNotFoundError):
        raise UserError(f"{path}: no such ledger file or folder.") from None
    if isinstance(wrong, IsADirectoryError):
        raise UserError(f"{path}: is a folder, not a ledger file.") from None
    raise UserError(
        f"{path}: {wrong.strerror or wrong}. Nothing is released without its record; free space or allow access, "
        "then continue."
    ) from wrong


def _bounded(size: int, path: Path | str) -> None:
    if size > MOST_BYTES:
        raise UserError(f"{path}: is larger than {MOST_BYTES >> 20} MB, the most a ledger may have.")


def _all(handle: int, path: Path | str) -> bytes:
    size, parts, at = os.fstat(handle).st_size, [], 0
    _bounded(size, path)
    while at < size:
        parts.append(os.pread(handle, size - at, at))
        if not parts[-1]:
            break
        at += len(parts[-1])
    return b"".join(parts)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
