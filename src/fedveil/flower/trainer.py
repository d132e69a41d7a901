"""A trainer that stays: one process per node that holds torch, the data, the contract and the ledger.

Flower starts a fresh Python process for every message. With a trainer that process only forwards bytes over
a Unix socket, and it needs no access to the data: run the trainer under an account of its own, and code
that arrives with a run cannot read a row; it can only ask, and the owner's contract answers.

    fedveil flower trainer --node-config 'home="/var/lib/fedveil" contract="/etc/fedveil/contract.toml" …' SOCKET

A message is its length (8 bytes) and its bytes (`wire.pack`). Whoever is silent, slow, too long or talks nonsense is cut
off; others are served meanwhile, and nothing is allocated on the strength of an announcement.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fedveil.errors import UserError
from fedveil.flower import limits
from fedveil.flower.owner import Owner
from fedveil.flower.wire import Facts, pack, unpack

if TYPE_CHECKING:
    from fedveil.flower.node import Cache, RootOf

LARGEST = 2**30  # bytes of one message
CALLERS = 32  # connections at once
FIRST = 5.0  # seconds until a caller has said how much it will send
WHOLE = 120.0  # seconds until it has sent it
PATIENCE = 30.0  # seconds that a caller waits for a trainer that is being restarted


def ask(
    path: str,
    kind: str,
    facts: Mapping[str, object],
    arrays: Mapping[str, np.ndarray],
    patience: float = PATIENCE,
) -> tuple[Facts, dict[str, np.ndarray]]:
    """Hand a message to the node's trainer and wait for its reply (the server's deadline ends a long wait)."""
    until = time.monotonic() + patience
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            try:
                line.connect(path)
                _send(line, pack({"kind": kind, "facts": dict(facts)}, arrays))
                return unpack(_receive(line, None, None))
            except (ConnectionRefusedError, FileNotFoundError) as wrong:  # nothing was handed over: try again
                if time.monotonic() > until:
                    return _silent(wrong)
            except (OSError, ValueError) as wrong:
                return _silent(wrong)
        time.sleep(0.5)


def _silent(wrong: Exception) -> tuple[Facts, dict[str, np.ndarray]]:
    return {"status": "refused", "reason": f"the node's trainer does not answer ({type(wrong).__name__})"}, {}


def serve(path: str, owner: Owner, *, root_of: RootOf | None = None, requests: int | None = None) -> None:
    """Answer on the Unix socket `path`, one round at a time, until interrupted (or `requests` callers are done).

    root_of: see `client_app`; the shipped command never passes it.
    """
    cache: Cache = {}
    working, places = threading.Lock(), threading.BoundedSemaphore(CALLERS)

    def one(line: socket.socket) -> None:
        # A caller that went away, or sent nonsense, must not end the trainer.
        try:
            with line, contextlib.suppress(OSError, MemoryError):
                _answer(line, owner, root_of, cache, working)
        finally:
            places.release()

    threads: list[threading.Thread] = []
    with _listen(path) as listener:
        done = 0
        while requests is None or done < requests:
            line, _ = listener.accept()
            done += 1
            if not places.acquire(blocking=False):
                line.close()
                continue
            threads = [t for t in threads if t.is_alive()]
            threads.append(threading.Thread(target=one, args=(line,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()


def _answer(
    line: socket.socket, owner: Owner, root_of: RootOf | None, cache: Cache, working: threading.Lock
) -> None:
    from fedveil.flower.node import answer

    try:
        asked, arrays = unpack(_receive(line, FIRST, WHOLE))
        top = limits.fields(
            asked, "message", {"kind": limits.is_text(20, 1), "facts": lambda v: isinstance(v, dict)}
        )
    except limits.Malformed as wrong:
        _send(line, pack({"status": "refused", "reason": f"the trainer cannot read this: {wrong}"}, {}))
        return
    with working:
        said, sent = answer(top["kind"], top["facts"], arrays, owner, root_of=root_of, cache=cache)
    line.settimeout(WHOLE)
    _send(line, pack(said, sent))


def _listen(path: str) -> socket.socket:
    """A socket that only this user and its group may use. It gets its name when it has its rights and listens.

    (A umask would set rights, too, but it is the whole process's: two threads that begin at once can leave it changed for ever.)
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise UserError(f"{path} exists and is no socket; choose another path for the trainer")
    made = f"{path}~"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
        listener.bind(made)
        os.chmod(made, 0o660)  # nobody can connect before it listens
        listener.listen(64)
        os.replace(made, path)
    except OSError as wrong:
        listener.close()
        raise UserError(
            f"cannot listen on {path}: {wrong.strerror or wrong}; socket paths are at most 106 characters long"
        ) from None
    return listener


def _send(line: socket.socket, data: bytes) -> None:
    line.sendall(len(data).to_bytes(8, "little") + data)


def _receive(line: socket.socket, first: float | None, whole: float | None) -> bytes:
    """One message; `Malformed` if it is too long, OSError if it does not come in time."""
    size = int.from_bytes(_exactly(line, 8, first), "little")
    if size > LARGEST:
        raise limits.Malformed(f"{size} bytes were announced, at most {LARGEST} are taken")
    return _exactly(line, size, whole)


def _exactly(line: socket.socket, size: int, seconds: float | None) -> bytes:
    """`size` bytes within so many seconds in all; memory grows with what came, not with what was announced."""
    until = None if seconds is None else time.monotonic() + seconds
    data = bytearray()
    while len(data) < size:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("the message took too long")
            line.settimeout(left)
        part = line.recv(min(size - len(data), 2**20))
        if not part:
            raise ConnectionError("the line was cut")
        data += part
    return bytes(data)
