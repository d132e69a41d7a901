"""A node as a process of its own: frames in, frames out, the journal synced in between."""

import struct
import sys
from pathlib import Path

import numpy as np
from sums import identities, session

from fedveil.secure_sum import journal, party


def main(path: Path, count: int, threshold: int, me: int) -> None:
    secrets = identities(count, 77)
    here = session(secrets, threshold, 0)
    records = journal.read(path)
    if records:
        state = party.resume(here, me, secrets[me - 1], records)
    else:
        import os

        move = party.begin(here, me, secrets[me - 1], os.urandom(32))
        journal.append(path, move.record)
        state = move.party
    answer(state.sent[0])
    while head := sys.stdin.buffer.read(4):
        data = sys.stdin.buffer.read(struct.unpack("<I", head)[0])
        move = party.receive(state, data)
        if move.ready:
            move = party.upload(move.party, np.random.default_rng().integers(0, 1000, 4))
        journal.append(path, move.record)
        state = move.party
        for message in move.messages or (b"",):
            answer(message)


def answer(data: bytes) -> None:
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
