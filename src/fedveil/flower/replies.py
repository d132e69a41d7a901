"""What a node may answer, read strictly by the server: every reply is judged before anything of it is used.

A node can send what it likes; here it becomes a value of the right form or `Unusable` with a short reason, and never
anything else. With a roster each reply must be signed by the key of the node whose number it bears.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedveil.flower import identity, limits, wire
from fedveil.flower.request import payload
from fedveil.flower.roster import Roster
from fedveil.jsons import Document, JsonObject

if TYPE_CHECKING:
    from flwr.app import Message

SIGNED_AS = "reply"
MOST_EXAMPLES = 2**31

_ALWAYS: dict[str, limits.Check] = {"format": limits.is_int(1, 1), "status": limits.is_text(20)}
_SIGNED: dict[str, limits.Check] = {
    "nonce": limits.is_hex(16),
    "submitter": limits.is_hex(32),
    "signature": limits.is_hex(64),
}
_REFUSED: dict[str, limits.Check] = {**_ALWAYS, "reason": lambda v: isinstance(v, str)}
_HELLO: dict[str, limits.Check] = {
    **_ALWAYS,
    "client": limits.is_int(0, 2**31),
    "examples": limits.is_int(1, MOST_EXAMPLES),
    "contract": limits.is_hex(32),
    "data": lambda v: v is None or limits.is_hex(32)(v),
    "version": limits.is_text(40),
}
_ROUND: dict[str, limits.Check] = {
    **_ALWAYS,
    "round": limits.is_int(0, 10**7),
    "client": limits.is_int(0, 2**31),
    "ticket": limits.is_int(0, 2**62),
}
_ROUND_MAY: dict[str, limits.Check] = {**_SIGNED, "below": limits.is_number(-1e3, 1e3)}


class Unusable(Exception):
    """A reply that is not used; kind counts it: error, refused or rejected."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(limits.plain(reason))
        self.kind = kind


@dataclass(frozen=True)
class Greeting:
    """Who a node says it is."""

    client: int
    examples: int
    contract: str
    data: str | None
    version: str


def read_reply(
    reply: Message, largest: int, nonce: str, roster: Roster | None
) -> tuple[JsonObject, dict[str, np.ndarray]]:
    """Facts and arrays of a reply that is well-formed, answers this very message and, with a roster, is signed."""
    try:
        if reply.has_error():
            raise Unusable("error", f"error {reply.error.code}: {reply.error.reason}")
        facts, arrays = wire.read(reply, largest)
        status = facts.get("status")
        if status == "refused":
            limits.fields(facts, "reply", _REFUSED, _SIGNED)
            raise Unusable("refused", str(facts["reason"]))
    except limits.Malformed as wrong:
        raise Unusable("rejected", str(wrong)) from None
    if roster is not None:
        _check_signature(facts, arrays, nonce, roster)
    return facts, arrays


def _check_signature(
    facts: Mapping[str, object], arrays: Mapping[str, np.ndarray], nonce: str, roster: Roster
) -> None:
    client = facts.get("client")
    member = (
        next((m for m in roster.members if m.number == client), None)
        if limits.is_int(0, 2**31)(client)
        else None
    )
    if member is None:
        raise Unusable("rejected", f"client {limits.plain(repr(client), 20)} is not in the roster")
    made, public = facts.get("signature"), facts.get("submitter")
    if not (limits.is_hex(64)(made) and public == member.identity.hex() and facts.get("nonce") == nonce):
        raise Unusable("rejected", f"not signed by the key of node {client} ({member.name}) for this message")
    if not identity.verify(member.identity, SIGNED_AS, payload(facts, arrays), bytes.fromhex(str(made))):
        raise Unusable("rejected", f"the signature of node {client} ({member.name}) is wrong")


def greeting(reply: Message, nonce: str, roster: Roster | None, clients: int) -> Greeting:
    """A node's answer to "who are you"."""
    facts, arrays = read_reply(reply, 0, nonce, roster)
    try:
        found = limits.fields(facts, "reply", _HELLO, _SIGNED)
    except limits.Malformed as wrong:
        raise Unusable("rejected", str(wrong)) from None
    if found["status"] != "ok" or arrays:
        raise Unusable("rejected", f"status {found['status']!r}")
    if found["client"] >= clients:
        raise Unusable("rejected", f"says it is client {found['client']}; they are 0 to {clients - 1}")
    return Greeting(found["client"], found["examples"], found["contract"], found["data"], found["version"])


def round_reply(
    reply: Message, largest: int, nonce: str, roster: Roster | None, expected: tuple[int, int, int]
) -> tuple[Document, dict[str, np.ndarray]]:
    """A node's answer to a round; expected: (round, client, ticket)."""
    facts, arrays = read_reply(reply, largest, nonce, roster)
    try:
        found = limits.fields(facts, "reply", _ROUND, _ROUND_MAY)
    except limits.Malformed as wrong:
        raise Unusable("rejected", str(wrong)) from None
    if (found["round"], found["client"], found["ticket"]) != expected:
        raise Unusable("rejected", "the reply belongs to another round or client")
    return found, arrays
