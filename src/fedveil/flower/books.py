"""A node's books: its private log, its audit log, and its ledger with the head kept in a second place.

Everything here belongs to the account that holds the data: the folder is 0700, the files are 0600. What may quote data
goes to the log only. Text from outside is cut and its line ends written out, so that nobody can forge an entry or fill
the disk.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import UserError
from fedveil.flower import limits
from fedveil.flower.contract import Contract, Refused
from fedveil.flower.owner import Owner
from fedveil.jsons import Document

if TYPE_CHECKING:
    from fedveil.privacy.events import Release
    from fedveil.privacy.ledger import Ledger

FILTER = "filter"  # see privacy.ledger.worst
LOCK_PATIENCE = 60.0  # seconds to wait for another message of this node that holds the ledger
NEEDS_OWNER = "the node's ledger needs its owner; the node's log (home/node.log) says why"


def private_folder(path: Path) -> None:
    """Make `path` a folder that only this account can enter."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(PermissionError):
        if path.stat().st_mode & 0o077:
            path.chmod(0o700)


def stamp(now: float | None = None) -> str:
    """A moment as text, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))


def log(home: Path, text: str) -> None:
    """One entry of the private log. Never raises: a full disk must not change what a node answers."""
    _append(home, "node.log", f"{stamp()} {_escaped(text)}\n")


def audit(home: Path, **facts: object) -> None:
    """One line about a decision: what was asked, by whom, and the answer. Nothing about data. Never raises."""
    short = {key: limits.plain(v, 200) if isinstance(v, str) else v for key, v in facts.items()}
    _append(home, "audit.jsonl", json.dumps({"time": stamp(), **short}, default=str) + "\n")


def _escaped(text: str) -> str:
    tail = text[-limits.LOG_LINE :]
    tail = tail.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in tail)


def _append(home: Path, name: str, line: str) -> None:
    with contextlib.suppress(OSError):
        private_folder(home)
        path = home / name
        if path.exists() and path.stat().st_size > limits.LOG_FILE:
            os.replace(path, home / f"{name}.1")
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(handle).st_mode & 0o077:
                os.fchmod(handle, 0o600)
            os.write(handle, line.encode("utf-8", "replace"))
        finally:
            os.close(handle)


# --- the ledger and its anchor ---


def ledger_path(home: Path) -> Path:
    """Where a node's ledger is."""
    return home / "ledger.jsonl"


def anchor_path(owner: Owner) -> Path:
    """Where the head of the ledger is kept a second time: outside the node's folder, on another disk if told so."""
    home = owner.home.absolute()
    return Path(owner.anchor) if owner.anchor else home.with_name(f"{home.name}.anchor.json")


def read_anchor(path: Path) -> tuple[int, str] | None:
    """(number, hash) of the last record that was anchored; None if there is no anchor."""
    if not path.exists():
        return None
    value = limits.json_file(path, "ledger anchor")
    try:
        found = limits.fields(
            value, "ledger anchor", {"number": limits.is_int(0, 2**40), "hash": limits.is_hex(32)},
            {"ledger": limits.is_text(4096), "time": limits.is_text(40)},
        )  # fmt: skip
    except limits.Malformed as wrong:
        raise UserError(f"{path}: {wrong}") from None
    return found["number"], found["hash"]


def last_known(owner: Owner) -> tuple[int, str] | None:
    """The latest head that the anchor or the witness knows; `UserError` if they contradict each other."""
    from fedveil.flower import witness

    own, named = read_anchor(anchor_path(owner)), witness.of(owner)
    theirs = None if named is None else witness.ask(*named)
    if own is not None and theirs is not None and own[0] == theirs[0] and own != theirs:
        raise UserError(f"{anchor_path(owner)} and the witness know different records {own[0]} of this ledger")
    return max((head for head in (own, theirs) if head is not None), default=None)


def write_anchor(path: Path, head: tuple[int, str], ledger: Path) -> None:
    """Keep the head in the second place, in one step and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    facts = {"number": head[0], "hash": head[1], "ledger": str(ledger), "time": stamp()}
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def forget(owner: Owner) -> list[str]:
    """Forget what is known of a lost ledger; returns the anchors that were removed. Only ever an owner's own act."""
    from fedveil.privacy.ledger import journal

    gone = []
    for path in (anchor_path(owner), journal.head_path(ledger_path(owner.home))):
        if path.exists():
            audit(owner.home, asked="forget", answer=f"{path}: {path.read_text('utf-8', 'replace')}")
            path.unlink()
            gone.append(str(path))
    return gone


def open_ledger(owner: Owner, contract: Contract, secure: bool) -> Ledger:
    """The node's ledger, locked; started if there was none and none is expected.

    Raises `Refused` (told to the server, without particulars) and logs the reason for the owner if the ledger is lost,
    cut, rolled back or damaged.
    """
    from fedveil.privacy.ledger import Header, Ledger, Locked

    path, anchor = ledger_path(owner.home), anchor_path(owner)
    private_folder(owner.home)
    waited = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            expected = last_known(owner)
            if _begun(path):
                ledger = Ledger.open(path, expected)
                break
            if expected is not None:
                raise UserError(
                    f"{path} is gone or empty, but {anchor} or the witness knows of record {expected[0]}. Put it back. "
                    "If it is lost for good, what was spent is unknown: `fedveil flower anchor --forget` starts a new one, and a "
                    "contract with a smaller epsilon is due"
                )
            sizes = () if contract.data is None else (contract.data.examples,)
            # The promise is the budget of today, fixed before the first release; a budget raised later ends it.
            header = Header(delta=contract.delta, clients=1, sizes=sizes, simulated=not secure,
                            config=contract.digest, promised=budgets_of(contract))  # fmt: skip
            ledger = Ledger.create(path, header)
            break
        except Locked:
            if time.monotonic() > waited:
                raise Refused("the node is busy with another round") from None
            time.sleep(0.2)
        except (UserError, OSError, ValueError, KeyError, TypeError) as wrong:
            log(owner.home, f"LEDGER: {wrong}")
            raise Refused(NEEDS_OWNER) from None
    with contextlib.suppress(OSError):
        path.chmod(0o600)
    return ledger


def _begun(path: Path) -> bool:
    """Whether the file holds a whole record; a creation that a crash cut short left none."""
    from fedveil.privacy.ledger import journal

    return path.exists() and path.stat().st_size > 0 and bool(journal.read(path).records)


def budgets_of(contract: Contract) -> tuple[Any, ...]:
    """The contract's budget as the ledger's, kept by a filter; none where the contract sets no limit."""
    from fedveil.privacy.ledger import Budget

    if contract.epsilon is None or not math.isfinite(contract.epsilon):
        return ()
    return (Budget(contract.epsilon, contract.observer, contract.unit, delta=contract.delta, accountant=FILTER),)


def charge(
    owner: Owner, contract: Contract, release: Release, secure: bool, origin: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write the release to the node's ledger and anchor it, both synced, or refuse it if it is over the owner's budget.

    The server chooses each round's noise, possibly after what it saw, so the budget is a Rényi filter: sound claims ask for
    it (`privacy.filters.adaptive`). Returns the head.
    """
    from fedveil.flower import witness

    note = limits.canonical({"time": stamp(), **(origin or {})}).decode()
    release = replace(release, note=note)
    with open_ledger(owner, contract, secure) as ledger:
        if not secure and not ledger.header.simulated:
            raise Refused("this ledger is for secure noise; use another home for repeatable noise")
        # The contract of today is the budget: an owner may lower or raise it. A refusal is not recorded, or
        # anybody could end a node's work by asking for too much once.
        over = ledger.would_exceed(release, budgets_of(contract))
        if over:
            raise Refused(f"budget: {over[0]}")
        try:
            ledger.spend(release)
            write_anchor(anchor_path(owner), ledger.head, ledger_path(owner.home))
            named = witness.of(owner)
            if named is not None:
                witness.ask(*named, ledger.head)
        except (OSError, UserError) as wrong:
            log(owner.home, f"LEDGER: {wrong}")
            raise Refused(NEEDS_OWNER) from None
        return ledger.head


def history(path: Path) -> list[Document]:
    """The releases of a node's ledger: number, round, and the time, run, submitter and contract they were charged for."""
    from fedveil.privacy.ledger import journal

    out = []
    for record in journal.read(path).records:
        if record.body.get("kind") != "release":
            continue
        try:
            told = limits.read_json(record.body.get("note", "") or "{}")
        except limits.Malformed:
            told = {"run": record.body.get("note", "")}
        facts = told if isinstance(told, dict) else {}
        out.append({"record": record.number, "round": record.body.get("round"),
                    **{k: str(facts.get(k, "")) for k in ("time", "run", "submitter", "contract")}})  # fmt: skip
    return out
