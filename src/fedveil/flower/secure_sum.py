"""The secure sum between a server and nodes that remember only what is on their disks.

A node answers each message from its journal (`answer`): no process has to live through an attempt, and a kill at any moment
costs at most that message. Secrets of an attempt lie in `home/secure-sum/RUN/ROUND-ATTEMPT/journal` (0600) until the node
begins a newer attempt of that run; an attempt that is not newer than the newest one begun is never begun again.

The server (`collect`) plays `secure_sum.coordinator` over anything that can ask nodes and yield replies; `over_grid` asks
over a Flower grid, `replied` is the other end in a ClientApp.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedveil import keys
from fedveil.errors import UserError
from fedveil.flower import wire
from fedveil.secure_sum import coordinator, journal, noise, party
from fedveil.secure_sum.coordinator import Failure, Sum
from fedveil.secure_sum.parameters import Policy
from fedveil.secure_sum.party import Session

Ask = Callable[[Mapping[int, bytes], float], Iterable[tuple[int, bytes]]]
OnStage = Callable[[str, tuple[int, ...], float], None]


@dataclass(frozen=True)
class Seat:
    """A node's place in an attempt. signing: the secret of the identity that the owner put on the roster."""

    home: Path
    session: Session
    me: int
    signing: bytes = field(repr=False)
    policy: Policy = field(default_factory=Policy)

    @property
    def run(self) -> Path:
        return self.home / "secure-sum" / self.session.run.hex()

    @property
    def folder(self) -> Path:
        return self.run / f"{self.session.round}-{self.session.attempt}"


def answer(
    seat: Seat,
    data: bytes,
    *,
    charge: Callable[[], None],
    values: Callable[[], np.ndarray],
    entropy: Callable[[], bytes] = keys.entropy,
) -> bytes:
    """The node's answer to one message; empty data asks for its keys. UserError: refused, with a public reason.

    charge: writes the attempt's release to the node's ledger, or raises UserError; called before `values`, and nothing is
    uploaded without it. values: the node's exact sum (clipped), which may fail: then zeros take its place.

    Formal guarantee: at most one vector per attempt leaves, charged, with this node's share of the noise in it; a resend is
    the same bytes from the disk. Whether `values` failed changes what is in the sum, never the form of the answer.
    """
    with _alone(seat):
        path = seat.folder / "journal"
        records = journal.read(path)
        if not records:
            if data:
                raise UserError("secure sum refused: this node has begun no such attempt")
            _newer(seat)
            move = party.begin(seat.session, seat.me, seat.signing, entropy(), seat.policy)
        else:
            state = party.resume(seat.session, seat.me, seat.signing, records)
            if not data:
                return state.sent[0]
            move = party.receive(state, data)
        if move.refused:
            raise UserError(f"secure sum refused: {move.refused}")
        if move.ready:
            charge()
            move = party.upload(move.party, _noised(seat, values, entropy))
        journal.append(path, move.record)
        return move.messages[0]


def _noised(seat: Seat, values: Callable[[], np.ndarray], entropy: Callable[[], bytes]) -> np.ndarray:
    """The node's vector in grid steps, with its share of noise; zeros plus noise if there is none."""
    parameters = seat.session.parameters
    try:
        exact = noise.on_grid(parameters, values())
        if exact.shape != (parameters.size,):
            exact = np.zeros(parameters.size, np.int64)
    except Exception:  # that training failed may depend on the data: nobody may see it
        exact = np.zeros(parameters.size, np.int64)
    return exact + noise.share(parameters, entropy()[:16])


@contextlib.contextmanager
def _alone(seat: Seat) -> Iterator[None]:
    """One message of a run at a time."""
    seat.run.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(seat.run / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _newer(seat: Seat) -> None:
    """Note that this attempt is the newest of its run, on the disk, and forget the secrets of older ones."""
    here = (seat.session.round, seat.session.attempt)
    path = seat.run / "newest"
    if path.exists():
        first, second = path.read_text().split()
        if here <= (int(first), int(second)):
            raise UserError(
                f"secure sum refused: round {here[0]}, attempt {here[1]} is not newer than round {first}, attempt {second}"
            )
    temporary = seat.run / ".newest"
    with open(temporary, "w") as file:
        file.write(f"{here[0]} {here[1]}")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(seat.run, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    for old in seat.run.iterdir():
        if old.is_dir() and old != seat.folder:
            shutil.rmtree(old, ignore_errors=True)
    seat.folder.mkdir(mode=0o700, exist_ok=True)


@dataclass(frozen=True)
class Collected:
    """How an attempt ended at the server, what it received, and why nodes' messages were not used."""

    result: Sum | Failure
    bytes_up: int
    reasons: tuple[str, ...]


def collect(session: Session, ask: Ask, deadline: float, on_stage: OnStage | None = None) -> Collected:
    """One attempt. ask(messages by node, seconds) sends and yields (node, reply) as replies come, until the time is up.

    A stage ends when everyone asked has answered, or after `deadline` seconds with those who have; who is missing then is
    out of this attempt. on_stage: told the stage, who is missing, and the seconds left, whenever one of these changes.
    """
    server = coordinator.begin(session)
    outgoing: dict[int, bytes] = dict.fromkeys(server.expected, b"")
    size, reasons = 0, []
    while server.result is None:
        stage, until = server.stage, time.monotonic() + deadline
        following: dict[int, bytes] = {}
        for node, data in ask(outgoing, deadline):
            size += len(data)
            step = coordinator.receive(server, data)
            server = step.coordinator
            if step.refused:
                reasons.append(f"node {node}: {step.refused}")
            following |= dict(step.outgoing)
            if on_stage:
                left = max(0.0, until - time.monotonic())
                on_stage(coordinator.STAGES[server.stage], server.missing, left)
            if server.stage != stage:
                break
        if server.stage == stage:
            step = coordinator.close(server)
            server, following = step.coordinator, dict(step.outgoing)
        outgoing = following
    return Collected(server.result, size, tuple(reasons))


def over_grid(
    grid: Any,
    nodes: Mapping[int, int],
    facts: Mapping[str, Any],
    *,
    largest: int,
    poll: float = 0.5,
    refusals: list[str] | None = None,
) -> Ask:
    """Ask nodes over a Flower grid. nodes: number on the roster -> node id. facts: told with every message.

    largest: bytes that a reply may have at most. Whoever is offline, errs or refuses has not answered; `refusals` gets
    the reasons that nodes gave.
    """
    from fedveil.flower.server import _replies

    told = [] if refusals is None else refusals

    def ask(wanted: Mapping[int, bytes], seconds: float) -> Iterator[tuple[int, bytes]]:
        online = set(grid.get_node_ids())
        sent = {
            node: (nodes[node], "train", {**facts, "secure sum": len(data)}, {"message": _as_array(data)})
            for node, data in wanted.items()
            if nodes[node] in online
        }
        for node, reply, first in _replies(grid, sent, seconds, poll, Counter()):
            if not first or reply.has_error():
                continue
            try:
                said, arrays = wire.read(reply, largest)
            except ValueError as wrong:
                told.append(f"node {node}: {wrong}")
                continue
            if said.get("status") == "ok" and set(arrays) == {"message"}:
                yield node, arrays["message"].tobytes()
            else:
                told.append(f"node {node}: {str(said.get('reason', 'no reason given'))[:500]}")

    return ask


def _as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(
        data or b"\0", np.uint8
    )  # an array has one byte at least; the facts say how many count


def replied(message: Any, answered: Callable[[dict[str, Any], bytes], bytes]) -> Any:
    """A ClientApp's reply to a message of `over_grid`: answered(facts, data) gives the bytes, or raises UserError."""
    facts, arrays = wire.read(message)
    try:
        data = arrays["message"].tobytes()[: int(facts["secure sum"])]
        found = answered(facts, data)
    except UserError as why:
        return wire.answer(message, {"status": "refused", "reason": str(why)}, {})
    return wire.answer(message, {"status": "ok"}, {"message": np.frombuffer(found, np.uint8)})
