"""The journal of an attempt as a file: records are appended and synced before what they allow leaves the node.

A record that is cut off at the end of the file was never synced, so nothing left because of it: it is dropped. A record that
is complete but damaged may have let something leave: that attempt is over for this node (`party.resume` refuses).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from fedveil.errors import UserError

LARGEST_RECORD = 1 << 31


def append(path: Path, record: bytes) -> None:
    """Add a record and return when it is on the disk; nothing for an empty one."""
    if not record:
        return
    new = not path.exists()
    whole = 0 if new else sum(4 + len(found) for found in read(path))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, whole)  # a torn end goes first
        os.lseek(descriptor, whole, os.SEEK_SET)
        data = memoryview(struct.pack("<I", len(record)) + record)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        except OSError:  # what may not be on the disk must not be answered from either
            os.ftruncate(descriptor, whole)
            raise
    finally:
        os.close(descriptor)
    if new:
        sync_folder(path.parent)


def sync(path: Path) -> None:
    """Return when all that is in the file is on the disk: who wrote it may have been killed before its sync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def replace(path: Path, record: bytes) -> None:
    """Put one record in the place of all others; after a kill the file has either. What was there is no longer in any file."""
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    append(temporary, record)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path) -> list[bytes]:
    """All records that were written to the end; none if there is no file."""
    if not path.exists():
        return []
    data, at, found = path.read_bytes(), 0, []
    while at + 4 <= len(data):
        size = struct.unpack_from("<I", data, at)[0]
        if not 0 < size <= LARGEST_RECORD:
            raise UserError(f"{path}: a record of the secure sum's journal is damaged; this attempt is over")
        if at + 4 + size > len(data):
            break
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return found
