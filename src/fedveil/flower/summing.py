"""A round whose sum is opened under masks, as the server plays it over Flower: charge, ask stage by stage, step.

Every attempt is charged before its first message leaves. An attempt that ends without a sum stays charged; a retry is a new
attempt with a number that no earlier one had, so that nodes key it afresh, and it is charged again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.errors import UserError
from fedveil.federation import loop, store, sums
from fedveil.federation.loop import Prepared
from fedveil.federation.round import State, learning_rate_of, merge_opened, noised_of
from fedveil.flower import live, wire
from fedveil.flower.replies import Unusable, round_reply
from fedveil.flower.roster import Roster
from fedveil.flower.secure_sum import Ask, Collected, collect, model_of
from fedveil.jsons import JsonObject
from fedveil.privacy.ledger import Ledger
from fedveil.protect.setting import Moment
from fedveil.secure_sum.coordinator import Failure
from fedveil.secure_sum.party import Session

if TYPE_CHECKING:
    from flwr.app import Message

_BESIDE = 1 << 16  # bytes of a reply beside the words of a vector; shares grow with the nodes

Sealed = Callable[[wire.Facts, wire.Arrays], wire.Facts]
Replies = Callable[[Mapping[int, tuple[int, str, wire.Facts, wire.Arrays]], float], Iterator[tuple[int, "Message", bool]]]


@dataclass(frozen=True)
class Link:
    """How messages travel: node ids by client, the seal of the server's key, and an exchange with a deadline."""

    nodes: Mapping[int, int]
    online: Callable[[], set[int]]
    replies: Replies
    seal: Sealed
    roster: Roster


def check_roster(roster: Roster | None, clients: int) -> Roster:
    """The roster, if everyone on it is a client of the run and the other way round."""
    if roster is None:
        raise UserError(
            "a secure sum needs the study's roster (--roster FILE): nodes mask for the identity keys on it (docs/deploy.md)"
        )
    if [m.number for m in roster.members] != list(range(clients)):
        raise UserError(
            f"a secure sum plays with everyone on the roster: it has {len(roster.members)} nodes, the run has clients 0 to "
            f"{clients - 1}; set clients, or make a roster of exactly these"
        )
    return roster


def run_number(folder: Path) -> bytes:
    """16 bytes that name this run in all of its sums; drawn once, and on disk before the first is begun."""
    path = folder / "sum.json"
    if not path.exists():
        store.write_json(path, {"run": secrets.token_hex(16)})
    return bytes.fromhex(store.read_json(path)["run"])


def play_sum(
    prepared: Prepared,
    ledger: Ledger,
    state: State,
    now: Moment,
    clients: np.ndarray,
    link: Link,
    told: wire.Facts,
    folder: Path,
    deadline: float,
    attempts: int,
    say: Callable[[str], None],
) -> tuple[State, JsonObject, tuple[str, ...]]:
    """One round: (next state, facts, why replies are missing). Without a sum the model stays and the facts say `skipped`."""
    task = prepared.task
    reasons: list[str] = []
    size = number = 0
    lost: dict[str, list[int]] = {}
    following: State = replace(state, round=state.round + 1)
    facts: dict[str, Any] = {"skipped": True, "survivors": []}
    for number in range(1, attempts + 1):
        if number > 1 and loop.affordable(prepared, ledger, now, clients)[1]:
            reasons.append("no budget is left for another attempt")
            break
        ledger.spend(loop.release_of(prepared, now, clients), fingerprint=secrets.token_hex(16))
        ticket = ledger.head[0]
        view = live.summing(folder, state.round + 1, number, say)
        session, found = _attempt(prepared, state, now, link, told, folder, ticket, deadline, view, reasons)
        size += found.bytes_up
        reasons += found.reasons
        lost = {stage: [node - 1 for node in nodes] for stage, nodes in found.lost.items()}
        if not isinstance(found.result, Failure):
            total = found.result.total * session.parameters.grid
            following, facts = merge_opened(task, state, now, total, len(found.result.survivors))
            facts["survivors"] = [node - 1 for node in found.result.survivors]
            break
        reasons.append(f"no sum: {found.result.reason} ({found.result.stage})")
    facts |= {
        "clients": len(clients),
        "arrived": len(facts["survivors"]),
        "missing": len(clients) - len(facts["survivors"]),
        "attempts": number,
        "lost": lost,  # of the last attempt, by stage
        "bytes_up": size,
        "sigma": now.sigmas[0],
        "bound": now.bounds[0],
        "learning_rate": learning_rate_of(task, state.round),
    }
    return following, facts, tuple(reasons)


def _attempt(
    prepared: Prepared,
    state: State,
    now: Moment,
    link: Link,
    told: wire.Facts,
    folder: Path,
    ticket: int,
    deadline: float,
    view: Callable[[str, tuple[int, ...], float], None],
    refusals: list[str],
) -> tuple[Session, Collected]:
    task = prepared.task
    facts = {**told, "round": state.round, "ticket": ticket}
    shared = {f"server.{k}": np.atleast_1d(v) for k, v in state.broadcast(-1).items()}
    arrays = {"weights": state.weights, **shared}
    (noised,) = noised_of(task, now, -1, task.setting.examples)
    parameters = sums.parameters_of(task, noised, model_of(facts, arrays))
    keys = tuple(member.identity for member in link.roster.members)
    session = Session(run_number(folder), state.round, ticket, keys, parameters)
    ask = over_flower(link, session, facts, arrays, refusals)
    return session, collect(session, ask, deadline, view)


def over_flower(
    link: Link, session: Session, facts: wire.Facts, arrays: wire.Arrays, refusals: list[str]
) -> Ask:
    """Ask nodes over Flower; the model goes with the first message only. Whoever is offline, errs or refuses has not answered."""
    parameters = session.parameters
    largest = parameters.size * parameters.word // 8 + _BESIDE + 400 * parameters.nodes

    def ask(wanted: Mapping[int, bytes], seconds: float) -> Iterator[tuple[int, bytes]]:
        online = link.online()
        sent: dict[int, tuple[int, str, wire.Facts, wire.Arrays]] = {}
        nonces: dict[int, str] = {}
        for number, data in wanted.items():
            client = number - 1
            if link.nodes[client] not in online:
                continue
            nonces[client] = secrets.token_hex(16)
            which = {"run": session.run.hex(), "attempt": session.attempt, "size": len(data)}
            body = {"message": np.frombuffer(data, np.uint8)} if data else dict(arrays)
            sealed = link.seal({**facts, "sum": which, "nonce": nonces[client]}, body)
            sent[client] = (link.nodes[client], "train", sealed, body)
        for client, reply, first in link.replies(sent, seconds):
            if not first:
                continue
            try:
                expected = (session.round, client, facts["ticket"])
                _, found = round_reply(reply, largest, nonces[client], link.roster, expected)
                if set(found) != {"message"} or found["message"].dtype != np.uint8:
                    raise Unusable("rejected", "not a message of a secure sum")
            except Unusable as why:
                refusals.append(f"client {client}: {why}")
                continue
            yield client + 1, found["message"].tobytes()

    return ask
