"""A trainer that stays: one process per node that holds torch, the data, the policy and the ledger.

Flower starts a fresh Python process for every message. With a trainer that process only forwards bytes over
a Unix socket, and it needs no access to the data: run the trainer under an account of its own, and code
that arrives with a run cannot read a row; it can only ask, and the owner's policy answers.

    fedveil flower trainer --node-config 'home="/var/lib/fedveil" policy="/etc/fedveil/policy.toml" …' SOCKET
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedveil.errors import UserError
from fedveil.flower.owner import Owner
from fedveil.flower.wire import Facts, pack, unpack

LARGEST = 2**32  # bytes of one request


def ask(
    path: str, kind: str, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[Facts, dict[str, np.ndarray]]:
    """Hand a message to the node's trainer and wait for its reply (the server's deadline ends a long wait)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            line.connect(path)
            _send(line, pack({"kind": kind, "facts": dict(facts)}, arrays))
            return unpack(_receive(line))
        except OSError as wrong:
            return {
                "status": "failed",
                "reason": f"the node's trainer does not answer ({type(wrong).__name__})",
            }, {}


def serve(path: str, owner: Owner, *, root_of: Any = None, requests: int | None = None) -> None:
    """Answer on the Unix socket `path`, one message at a time, until interrupted (or `requests` are done).

    root_of: see `client_app`; the shipped command never passes it.
    """
    from fedveil.flower.node import answer

    cache: dict[str, Any] = {}
    with _listen(path) as listener:
        done = 0
        while requests is None or done < requests:
            line, _ = listener.accept()
            done += 1
            # A caller that went away, or sent nonsense, must not end the trainer.
            with line, contextlib.suppress(OSError, ValueError, KeyError):
                asked, arrays = unpack(_receive(line))
                kind, facts = str(asked["kind"]), dict(asked["facts"])
                _send(line, pack(*answer(kind, facts, arrays, owner, root_of=root_of, cache=cache)))


def _listen(path: str) -> socket.socket:
    """A socket that only this user and its group may use."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise UserError(f"{path} exists and is no socket; choose another path for the trainer")
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117)
    try:
        listener.bind(path)
    except OSError as wrong:
        listener.close()
        raise UserError(
            f"cannot listen on {path}: {wrong.strerror}; socket paths are at most 107 characters long"
        ) from None
    finally:
        os.umask(before)
    listener.listen(16)
    return listener


def _send(line: socket.socket, data: bytes) -> None:
    line.sendall(len(data).to_bytes(8, "little") + data)


def _receive(line: socket.socket) -> bytes:
    size = int.from_bytes(_exactly(line, 8), "little")
    if size > LARGEST:
        raise OSError("message too large")
    return _exactly(line, size)


def _exactly(line: socket.socket, size: int) -> bytes:
    data, at = bytearray(size), 0
    while at < size:
        got = line.recv_into(memoryview(data)[at:])
        if got == 0:
            raise OSError("the line was cut")
        at += got
    return bytes(data)
