"""The secure sum between a server and nodes that remember only what is on their disks.

A node answers each message from its journal (`answer`): no process has to live through an attempt, and a kill at any moment
costs at most that message. Secrets of an attempt lie in `home/secure-sum/RUN/ROUND-ATTEMPT/journal` (0600) until the node has
revealed its shares; of one that ended before, until the node begins a newer attempt of that run, or of another run a day
later. An attempt that is not newer than the newest one begun is never begun again.

The server (`collect`) plays `secure_sum.coordinator` over anything that can ask nodes and yield replies. `summing` asks over
Flower and `node` answers there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedveil import keys
from fedveil.errors import UserError
from fedveil.flower import wire
from fedveil.flower.request import payload
from fedveil.secure_sum import coordinator, journal, noise, party
from fedveil.secure_sum.coordinator import Failure, Sum
from fedveil.secure_sum.parameters import Policy
from fedveil.secure_sum.party import Session

MEANING = ("config", "examples", "shape", "classes", "model", "data", "version", "round")
FORGOTTEN = (
    86_400.0  # seconds after its last message an attempt of another run has no more use for its secrets
)
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
    noise_key: bytes | None = None,
) -> bytes:
    """The node's answer to one message; empty data asks for its keys. UserError: refused, with a public reason.

    charge: writes the attempt's release to the node's ledger, or raises UserError; called before `values`, and nothing is
    uploaded without it. values: the node's exact sum (clipped), which may fail: then zeros take its place. noise_key: 16
    bytes that nobody else has and that are used for nothing else; from `entropy` unless given.

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
            _forget_others(seat)
            move = party.begin(seat.session, seat.me, seat.signing, entropy(), seat.policy)
        else:
            journal.sync(path)  # nothing leaves because of a record that a loss of power could take back
            state = party.resume(seat.session, seat.me, seat.signing, records)
            if not data:
                return state.sent[0]
            move = party.receive(state, data)
        if move.refused:
            raise UserError(f"secure sum refused: {move.refused}")
        if move.ready:
            charge()
            move = party.upload(move.party, _noised(seat, values, noise_key or entropy()[:16]))
        journal.append(path, move.record)
        if move.party.stage == party.REVEALED and move.party.root:
            journal.replace(path, party.closing(move.party))
        return move.messages[0]


def _noised(seat: Seat, values: Callable[[], np.ndarray], key: bytes) -> np.ndarray:
    """The node's vector in grid steps, with its share of noise; zeros plus noise if there is none."""
    parameters = seat.session.parameters
    try:
        exact = noise.on_grid(parameters, values())
        if exact.shape != (parameters.size,):
            exact = np.zeros(parameters.size, np.int64)
    except Exception:  # that training failed may depend on the data: nobody may see it
        exact = np.zeros(parameters.size, np.int64)
    return exact + noise.share(parameters, key)


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


def model_of(facts: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Names all that gives the integers of a round their meaning: what the nodes are told about the run, and the model."""
    return payload(
        {key: facts.get(key) for key in MEANING}, {k: v for k, v in arrays.items() if k != "message"}
    )


def kept(seat: Seat, arrays: Mapping[str, np.ndarray]) -> None:
    """Keep the model of an attempt that has begun for the messages that come without it."""
    path = seat.folder / "model"
    if not path.exists():
        temporary = seat.folder / ".model"
        temporary.write_bytes(wire.pack({}, arrays))
        os.replace(temporary, path)


def model_kept(home: Path, run: bytes, round: int, attempt: int) -> dict[str, np.ndarray]:
    """The model of an attempt; UserError if this node has begun no such attempt."""
    path = home / "secure-sum" / run.hex() / f"{round}-{attempt}" / "model"
    try:
        return wire.unpack(path.read_bytes())[1]
    except OSError:
        raise UserError("secure sum refused: this node has begun no such attempt") from None


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
    # The whole way to that file: without it the same attempt could be begun, and signed, a second time.
    for folder in (seat.run, seat.run.parent, seat.home):
        journal.sync_folder(folder)
    for old in seat.run.iterdir():
        if old.is_dir() and old != seat.folder:
            shutil.rmtree(old, ignore_errors=True)
    seat.folder.mkdir(mode=0o700, exist_ok=True)


def _forget_others(seat: Seat) -> None:
    """Remove the secrets of other runs' attempts that nobody has asked for since a day. Their numbers stay used."""
    for run in (seat.home / "secure-sum").iterdir():
        for attempt in run.iterdir() if run != seat.run else ():
            with contextlib.suppress(OSError):
                if attempt.is_dir() and (attempt / "journal").stat().st_mtime < time.time() - FORGOTTEN:
                    shutil.rmtree(attempt)


@dataclass(frozen=True)
class Collected:
    """How an attempt ended at the server, what it received, why messages were not used, and who was lost in which stage."""

    result: Sum | Failure
    bytes_up: int
    reasons: tuple[str, ...]
    lost: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def collect(session: Session, ask: Ask, deadline: float, on_stage: OnStage | None = None) -> Collected:
    """One attempt. ask(messages by node, seconds) sends and yields (node, reply) as replies come, until the time is up.

    A stage ends when everyone asked has answered, or after `deadline` seconds with those who have; who is missing then is
    out of this attempt. on_stage: told the stage, who is missing, and the seconds left, whenever one of these changes.
    """
    server = coordinator.begin(session)
    outgoing: dict[int, bytes] = dict.fromkeys(server.expected, b"")
    size = 0
    reasons: list[str] = []
    lost: dict[str, tuple[int, ...]] = {}
    while server.result is None:
        stage, until = server.stage, time.monotonic() + deadline
        if on_stage:
            on_stage(coordinator.STAGES[stage], server.missing, deadline)
        following: dict[int, bytes] = {}
        for node, data in ask(outgoing, deadline):
            size += len(data)
            step = coordinator.receive(server, data)
            server = step.coordinator
            if step.refused:
                reasons.append(f"node {node}: {step.refused}")
            following |= dict(step.outgoing)
            if on_stage and server.stage == stage:
                left = max(0.0, until - time.monotonic())
                on_stage(coordinator.STAGES[server.stage], server.missing, left)
            if server.stage != stage:
                break
        if server.stage == stage:
            lost[coordinator.STAGES[stage]] = server.missing
            step = coordinator.close(server)
            server, following = step.coordinator, dict(step.outgoing)
        outgoing = following
    if on_stage:
        on_stage(coordinator.STAGES[server.stage], (), 0.0)
    return Collected(server.result, size, tuple(reasons), lost)
