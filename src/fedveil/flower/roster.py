"""The roster: which number is which node, and the key that proves it.

    roster = read_roster(path, pinned=digest)          # or owner=public key of the one who signs rosters
    roster.member(3).identity                          # Ed25519 public key of node 3

A roster is a frozen value with one canonical form; its digest names it everywhere (messages, ledgers, protocols).
A change (a node added, removed, with a new key) is a new version, signed again. A number that was removed is not
given to another node: ledgers and anchors know nodes by number.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from fedveil.errors import UserError
from fedveil.flower import identity, limits
from fedveil.jsons import JsonObject

FORMAT = "fedveil roster 1"
MOST = 10_000  # members
SIGNED_AS = "roster"


@dataclass(frozen=True)
class Member:
    """One node: its number in every run, its name, its identity key, and the SuperNode key it connects with."""

    number: int
    name: str
    identity: bytes  # Ed25519 public key, 32 bytes
    supernode: str = ""  # OpenSSH public key of the SuperNode, "" if none is bound


@dataclass(frozen=True)
class Roster:
    """All nodes of a study. version grows with every change; retired numbers are never given out again."""

    study: str
    version: int
    members: tuple[Member, ...] = ()
    retired: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers = [m.number for m in self.members]
        keys = [m.identity for m in self.members]
        nodes = [m.supernode for m in self.members if m.supernode]
        for what, values in (("number", numbers), ("identity key", keys), ("SuperNode key", nodes),
                             ("name", [m.name for m in self.members])):  # fmt: skip
            if len(set(values)) != len(values):
                raise limits.Malformed(f"roster: two nodes have the same {what}")
        if set(numbers) & set(self.retired):
            raise limits.Malformed("roster: a retired number is in use")
        if any(len(key) != 32 for key in keys):
            raise limits.Malformed("roster: an identity key is not 32 bytes long")
        if any(key in identity.WEAK for key in keys):
            raise limits.Malformed("roster: an identity key is one under which anybody can sign")
        if numbers != sorted(numbers):
            object.__setattr__(self, "members", tuple(sorted(self.members, key=lambda m: m.number)))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form: the roster's name."""
        return hashlib.sha256(to_bytes(self)).hexdigest()

    def member(self, number: int) -> Member:
        """The node with this number; `UserError` if there is none."""
        for found in self.members:
            if found.number == number:
                return found
        raise UserError(f"the roster of '{self.study}' (version {self.version}) has no node {number}")

def to_json(roster: Roster) -> JsonObject:
    """Plain values; `from_json` is the inverse."""
    return {
        "format": FORMAT,
        "study": roster.study,
        "version": roster.version,
        "members": [
            {"number": m.number, "name": m.name, "identity": m.identity.hex(), "supernode": m.supernode}
            for m in roster.members
        ],
        "retired": sorted(roster.retired),
    }


def to_bytes(roster: Roster) -> bytes:
    """The canonical form, which is hashed and signed."""
    return limits.canonical(to_json(roster))


_TOP: dict[str, limits.Check] = {
    "format": limits.is_one_of([FORMAT]),
    "study": limits.is_text(200, 1),
    "version": limits.is_int(1, 2**31),
    "members": limits.is_list(lambda v: isinstance(v, dict), MOST),
    "retired": limits.is_list(limits.is_int(0, 2**31), MOST),
}
_MEMBER: dict[str, limits.Check] = {
    "number": limits.is_int(0, 2**31),
    "name": limits.is_text(100, 1),
    "identity": limits.is_hex(32),
    "supernode": limits.is_text(1000),
}


def from_json(value: object) -> Roster:
    """A roster from plain values; `Malformed` says what is wrong."""
    top = limits.fields(value, "roster", _TOP)
    members = []
    for item in top["members"]:
        one = limits.fields(item, "roster member", _MEMBER)
        members.append(Member(one["number"], one["name"], bytes.fromhex(one["identity"]), one["supernode"]))
    return Roster(top["study"], top["version"], tuple(members), tuple(top["retired"]))


def write_roster(path: Path, roster: Roster, secret: bytes | None = None) -> None:
    """Write the roster (and its signature by the study's owner) in one step."""
    document: JsonObject = {"roster": to_json(roster)}
    if secret is not None:
        document["owner"] = identity.public_of(secret).hex()
        document["signature"] = identity.sign(secret, SIGNED_AS, to_bytes(roster)).hex()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    os.replace(temporary, path)


def read_roster(path: Path | str, *, pinned: str = "", owner: bytes | None = None) -> Roster:
    """The roster in `path`.

    pinned: its digest must be this. owner: it must carry a signature of this public key. With neither, the file is
    taken as it is (its own writer's view).
    """
    document = limits.json_file(path, "roster")
    try:
        top = limits.fields(
            document, "roster file", {"roster": lambda v: isinstance(v, dict)},
            {"owner": limits.is_hex(32), "signature": limits.is_hex(64)},
        )  # fmt: skip
        roster = from_json(top["roster"])
    except limits.Malformed as wrong:
        raise UserError(f"roster {path}: {wrong}") from None
    if pinned and roster.digest != pinned:
        raise UserError(f"roster {path}: its digest is {roster.digest}, but {pinned} is pinned here")
    if owner is not None:
        signature = bytes.fromhex(top.get("signature", ""))
        if not identity.verify(owner, SIGNED_AS, to_bytes(roster), signature):
            raise UserError(f"roster {path}: not signed by the study's owner ({identity.fingerprint(owner)})")
    return roster


# --- changes: each gives the next version ---


def add(roster: Roster, member: Member) -> Roster:
    """With one more node."""
    if member.number in roster.retired:
        raise UserError(
            f"number {member.number} was retired from this study; take a number that was never used"
        )
    for name, mine, others in (
        ("number", member.number, {m.number for m in roster.members}),
        ("name", member.name, {m.name for m in roster.members}),
        ("identity key", member.identity, {m.identity for m in roster.members}),
    ):
        if mine in others:
            raise UserError(f"the roster already has a node with this {name}")
    return replace(roster, version=roster.version + 1, members=(*roster.members, member))


def remove(roster: Roster, number: int) -> Roster:
    """Without a node; its number is retired."""
    gone = roster.member(number)
    kept = tuple(m for m in roster.members if m != gone)
    return replace(roster, version=roster.version + 1, members=kept, retired=(*roster.retired, number))


def rotate(roster: Roster, number: int, public: bytes, supernode: str = "") -> Roster:
    """With a new identity key (and SuperNode key, if given) for a node."""
    old = roster.member(number)
    new = replace(old, identity=public, supernode=supernode or old.supernode)
    kept = tuple(new if m == old else m for m in roster.members)
    return replace(roster, version=roster.version + 1, members=kept)


def changes(old: Roster, new: Roster) -> list[str]:
    """What the new version changes, a sentence each."""
    before, after = {m.number: m for m in old.members}, {m.number: m for m in new.members}
    said = [f"node {n} ({before[n].name}) is removed" for n in sorted(before.keys() - after.keys())]
    said += [f"node {n} ({after[n].name}) joins" for n in sorted(after.keys() - before.keys())]
    for number in sorted(before.keys() & after.keys()):
        was, now = before[number], after[number]
        if was.identity != now.identity:
            said.append(
                f"node {number} ({now.name}) has a new identity key {identity.fingerprint(now.identity)}"
            )
        if was.supernode != now.supernode:
            said.append(f"node {number} ({now.name}) has a new SuperNode key")
        if was.name != now.name:
            said.append(f"node {number} is called {now.name}, not {was.name}")
    return said
