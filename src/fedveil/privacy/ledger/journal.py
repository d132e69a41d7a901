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
exactly between two records looks like a shorter file. Keep (number, hash) of a record elsewhere, as
checkpoints do, and pass it as `expect` to find out.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import UserError

GENESIS = hashlib.sha256(b"fedveil ledger, version 1").hexdigest()
_OPEN, _MIDDLE, _CLOSE = b'{"hash":"', b'","record":', b"}"
_PREFIX = len(_OPEN) + 64 + len(_MIDDLE)


class Damaged(UserError):
    """A record is not what was written; `record` is its number."""

    def __init__(self, path: Path | str, record: int, why: str) -> None:
        super().__init__(f"{path}: record {record} is damaged: {why}. Restore the file from a copy.")
        self.record = record


class Locked(UserError):
    """Another process (or another handle) writes this file."""


@dataclass(frozen=True)
class Record:
    """One accepted record: its place, its chained hash, and what was said."""

    number: int
    hash: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Contents:
    """All whole records, the bytes they take, and what a torn write left after them (normally nothing)."""

    records: tuple[Record, ...]
    size: int
    torn: bytes
    newline_missing: bool


def encode(body: dict[str, Any], number: int, previous: str) -> tuple[bytes, str]:
    """The line (with newline) and hash of a record that follows the one with hash `previous`."""
    payload = json.dumps({"number": number, **body}, separators=(",", ":"), allow_nan=False).encode()
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
        return scan(Path(path).read_bytes(), path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such ledger file.") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not a ledger file.") from None


class Log:
    """The one writer of a record file. Use `Log.create` or `Log.open`; close it or use it in `with`."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle = path, handle
        self._size, self._count, self._head = 0, 0, GENESIS

    @classmethod
    def create(cls, path: Path | str, body: dict[str, Any]) -> Log:
        """Start a new file with `body` as record 0. A file that never got a whole record is started anew."""
        log = cls(Path(path), _locked(Path(path), os.O_RDWR | os.O_CREAT))
        try:
            if scan(_all(log._handle), path).records:
                raise UserError(
                    f"{path}: a ledger already exists here; open it to continue, or choose another path."
                )
            os.ftruncate(log._handle, 0)
            log.append(body)
            _sync_folder(log._path.parent)
        except BaseException:
            log.close()
            raise
        return log

    @classmethod
    def open(cls, path: Path | str) -> tuple[Log, tuple[Record, ...]]:
        """Continue an existing file: check it, repair a torn end, return the writer and all records."""
        log = cls(Path(path), _locked(Path(path), os.O_RDWR))
        try:
            contents = scan(_all(log._handle), path)
            if not contents.records:
                raise UserError(f"{path}: holds no complete record; delete it and create the ledger again.")
            records = contents.records
            log._size, log._count, log._head = contents.size, len(records), records[-1].hash
            if contents.newline_missing:
                log._write(b"\n")
            if contents.torn:
                os.ftruncate(log._handle, contents.size)
                note = {"kind": "repair", "dropped_bytes": len(contents.torn),
                        "sha256": hashlib.sha256(contents.torn).hexdigest()}  # fmt: skip
                records = (*records, log.append(note))
        except BaseException:
            log.close()
            raise
        return log, records

    def append(self, body: dict[str, Any]) -> Record:
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
        return record

    def close(self) -> None:
        """Release the lock. Closing twice is harmless."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._handle, data[written:], self._size + written)
            os.fsync(self._handle)
        except BaseException:
            self.close()
            raise
        self._size += len(data)


def _digest(previous: str, payload: bytes) -> str:
    return hashlib.sha256(previous.encode() + payload).hexdigest()


def _decode(line: bytes, previous: str, number: int) -> Record | None:
    """The record of one line (without newline), or None if it is not exactly what was written."""
    digest, payload = line[len(_OPEN) : len(_OPEN) + 64], line[_PREFIX:-1]
    if line != _OPEN + digest + _MIDDLE + payload + _CLOSE or digest != _digest(previous, payload).encode():
        return None
    try:
        body = json.loads(payload)
    except ValueError:
        return None
    return Record(number, digest.decode(), body) if body.get("number") == number else None


def _could_be_torn(tail: bytes) -> bool:
    """Whether an interrupted write can leave `tail`: the start of a line, and less than a whole record.

    Bytes after a whole record (a changed line end) or foreign text are damage, which is never dropped.
    """
    text = tail.rstrip(b"\0")  # some file systems fill a torn end with zeros
    if text[: len(_OPEN)] != _OPEN[: len(text)]:
        return False
    try:
        json.JSONDecoder().raw_decode(text.decode("utf-8", "replace"))
    except ValueError:
        return True
    return False


def _locked(path: Path, flags: int) -> int:
    """Open `path` and take the writer's lock, which lasts until the handle is closed or the process ends."""
    try:
        handle = os.open(path, flags, 0o644)
    except FileNotFoundError:
        raise UserError(f"{path}: no such ledger file or folder.") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not a ledger file.") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_ino != os.stat(path).st_ino:
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        os.close(handle)
        raise Locked(f"{path}: another process is writing this ledger; stop it first.") from None
    return handle


def _all(handle: int) -> bytes:
    size, parts, at = os.fstat(handle).st_size, [], 0
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
