"""Opening a run's folder: the lock before anything is touched, and every anchor of its ledger.

One process writes into a run's folder, from before the first byte is changed until it ends (`hold`). Whatever
an interrupted write left behind is removed once the lock is held. What was released is remembered in more
places than the ledger: its head beside it, the checkpoints, the rounds in metrics.jsonl and result.json. A
ledger that says less than one of them was cut, rolled back or exchanged, and is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedveil.errors import UserError
from fedveil.federation import store
from fedveil.jsons import JsonObject
from fedveil.privacy.ledger import Damaged, Header, Ledger, Locked
from fedveil.privacy.ledger.journal import Anchor, Record, check_anchors, kept_head, read

LOCK = ".lock"
_UNFINISHED = re.compile(r"\..+\.\d+\.tmp")


@contextlib.contextmanager
def hold(folder: Path, create: bool = True) -> Iterator[None]:
    """Be the only writer of `folder` (made if `create`) until the end of the block or of the process.

    Raises `Locked` if another process is at work there. Nothing but the empty lock file is changed before the
    lock is held; then files of interrupted writes are removed.
    """
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as wrong:
        raise UserError(f"cannot write into {folder}: {wrong.strerror}. Choose another --out") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(
                f"{folder}: another process is at work on this run; wait for it, stop it, or choose another --out"
            ) from None
        remove_unfinished(folder)
        yield
    finally:
        os.close(handle)


def remove_unfinished(folder: Path) -> None:
    """Remove what writes that never ended left: temporary files, and checkpoint data that nothing commits to."""
    places = [folder, folder / "checkpoints"]
    left = [
        item
        for place in places
        if place.is_dir()
        for item in place.iterdir()
        if _UNFINISHED.fullmatch(item.name)
    ]
    kept = folder / "checkpoints"
    if kept.is_dir():
        left += [item for item in kept.glob("round-*.safetensors") if not item.with_suffix(".json").exists()]
    for item in left:
        with contextlib.suppress(OSError):
            item.unlink()


def anchors_of(folder: Path) -> list[Anchor]:
    """Every record of the folder's ledger that is known elsewhere. Read these before the ledger itself."""
    found = list(kept_head(folder / "ledger.jsonl"))
    for number in store.checkpoints(folder / "checkpoints"):
        head = store.checkpoint_facts(folder / "checkpoints", number)["ledger"]
        if head is not None:
            found.append(Anchor(head[0], head[1], f"the checkpoint of round {number}"))
    return found


def played(folder: Path) -> tuple[int, str]:
    """The last round whose result was written down, and where."""
    rounds = [store.round_of(line) for line in store.read_lines(folder / "metrics.jsonl")]
    found = [(max(rounds, default=0), "metrics.jsonl")]
    if (folder / "result.json").exists():
        result = store.read_json(folder / "result.json")
        number = result.get("rounds") if isinstance(result, dict) else None
        found.append((number if isinstance(number, int) else 0, "result.json"))
    return max(found, key=lambda one: one[0])


def check_ledger(folder: Path) -> Sequence[Record]:
    """The ledger's records, if they hold all that the folder knows; raises `Damaged` otherwise.

    Formal guarantee: every round that metrics.jsonl, result.json, a checkpoint or the head beside the ledger knows
    of is charged in it. Rounds that only the lost end of the ledger knew of cannot be found.
    """
    path = folder / "ledger.jsonl"
    anchors, (last, where) = anchors_of(folder), played(folder)
    records = read(path).records
    check_anchors(records, anchors, path)
    known = [store.round_of(r.body) for r in records if r.body["kind"] == "release"]
    if last > max(known, default=0):
        raise Damaged(
            path,
            len(records),
            f"the file ends with round {max(known, default=0)}, but {where} knows round {last}: it was cut or rolled "
            "back, and would count too little",
        )
    identity = _identity(folder)
    header = records[0].body.get("header") if records else None
    if identity and isinstance(header, dict) and header.get("config") not in ("", identity):
        raise Damaged(path, 0, "it belongs to another configuration than run.json")
    return records


def _identity(folder: Path) -> str:
    if not (folder / "run.json").exists():
        return ""
    facts = store.read_json(folder / "run.json")
    return str(facts.get("identity", "")) if isinstance(facts, dict) else ""


def check(folder: Path) -> None:
    """Raise unless the folder's ledger holds all that is known, or nothing was released yet. Call it before lines
    that know of rounds are cut."""
    path = folder / "ledger.jsonl"
    begun = bool(anchors_of(folder)) or played(folder)[0] > 0
    if path.exists() and (begun or read(path).records):
        check_ledger(folder)
    elif begun:
        raise UserError(
            f"{path} is gone, but the run has begun: what was released can no longer be counted. Put the ledger "
            "back, or start a new run"
        )


def open_ledger(folder: Path, header: Callable[[], Header]) -> Ledger:
    """Continue the run's ledger, which must hold what the folder knows; or start it, if nothing was released."""
    path = folder / "ledger.jsonl"
    check(folder)
    if path.exists() and read(path).records:
        return Ledger.open(path)
    return Ledger.create(path, header())  # also over an empty file: a kill while it was created leaves one


def notes_of(folder: Path) -> list[str]:
    """What somebody who continues or checks this run should know."""
    old = [
        number
        for number in store.checkpoints(folder / "checkpoints")
        if "sha256" not in store.checkpoint_facts(folder / "checkpoints", number)
    ]
    return [f"the checkpoint of round {old[-1]} {store.NO_CHECKSUM}"] if old else []


def verify(folder: Path) -> JsonObject:
    """Check the ledger against every anchor, and every checkpoint against its checksum; raises what is wrong."""
    records = check_ledger(folder)
    rounds = store.checkpoints(folder / "checkpoints")
    for number in rounds:
        store.check_checkpoint(folder / "checkpoints", number)
    return {
        "records": len(records),
        "anchors": [anchor.source for anchor in anchors_of(folder)],
        "checkpoints": len(rounds),
        "rounds": played(folder)[0],
        "notes": notes_of(folder),
    }
