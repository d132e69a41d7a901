"""The whole protocol in one process: every party's state machine, every message as bytes, and what it costs.

Keys come from one given seed, so that a simulation can be repeated. Whoever knows the seed can take off masks and noise:
deployments draw every root from the system's entropy instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedveil.keys import derive
from fedveil.secure_sum import coordinator, messages, party
from fedveil.secure_sum.coordinator import Failure, Sum
from fedveil.secure_sum.parameters import Parameters
from fedveil.secure_sum.party import Session


@dataclass(frozen=True)
class Played:
    """How an attempt ended, and its price: bytes that nodes sent and got, CPU seconds of all nodes and of the server."""

    result: Sum | Failure
    bytes_up: int
    bytes_down: int
    node_seconds: float
    server_seconds: float


def sum_of(
    vectors: Mapping[int, np.ndarray],
    parameters: Parameters,
    seed: int | bytes,
    *,
    round: int = 0,
    attempt: int = 0,
    drops: Mapping[int, int] = {},
) -> Played:
    """Play one attempt over integer vectors, noise included; node numbers run from 1 to `parameters.nodes`.

    drops: node -> number of messages that it still sends (0: none, 2: keys and shares, 3: also its vector).
    A node without a vector has dropped out before its upload.
    """
    session, secrets = _session(parameters, seed, round, attempt)
    server = coordinator.begin(session)
    states: dict[int, party.Party] = {}
    spent = {"up": 0.0, "down": 0.0, "nodes": 0.0, "server": 0.0}
    arrived: list[bytes] = []
    for node, secret in secrets.items():
        if drops.get(node, 9) < 1:
            continue
        before = time.process_time()
        move = party.begin(session, node, secret, derive(seed, "secure-sum-root", round, attempt, node))
        spent["nodes"] += time.process_time() - before
        states[node] = move.party
        arrived += move.messages
    while server.result is None:
        before = time.process_time()
        server, outgoing = _serve(server, arrived)
        spent["server"] += time.process_time() - before
        spent["up"] += sum(map(len, arrived))
        spent["down"] += sum(len(data) for _, data in outgoing)
        before = time.process_time()
        arrived = []
        for node, data in outgoing:
            if drops.get(node, 9) > states[node].stage:
                states[node], answers = _answer(states[node], data, vectors.get(node))
                arrived += answers
        spent["nodes"] += time.process_time() - before
    return Played(server.result, int(spent["up"]), int(spent["down"]), spent["nodes"], spent["server"])


def _serve(
    server: coordinator.Coordinator, arrived: list[bytes]
) -> tuple[coordinator.Coordinator, list[tuple[int, bytes]]]:
    """All answers of a stage to the server; who has not answered by now is left behind."""
    stage = server.stage
    outgoing: list[tuple[int, bytes]] = []
    for data in arrived:
        step = coordinator.receive(server, data)
        server, outgoing = step.coordinator, outgoing + list(step.outgoing)
    if server.result is None and server.stage == stage:
        step = coordinator.close(server)
        server, outgoing = step.coordinator, list(step.outgoing)
    return server, outgoing


def _answer(
    state: party.Party, data: bytes, vector: np.ndarray | None
) -> tuple[party.Party, tuple[bytes, ...]]:
    move = party.receive(state, data)
    if move.refused:
        raise RuntimeError(f"the simulated node {state.me} refused: {move.refused}")
    if move.ready:
        if vector is None:
            return move.party, ()
        move = party.upload(move.party, vector)
    return move.party, move.messages


def masked_upload(
    vector: np.ndarray,
    parameters: Parameters,
    seed: int | bytes,
    node: int,
    *,
    round: int = 0,
    attempt: int = 0,
) -> np.ndarray:
    """What the server receives of one node's vector: its masked words, as signed integers."""
    session, secrets = _session(parameters, seed, round, attempt)
    server = coordinator.begin(session)
    states: dict[int, party.Party] = {}
    arrived: list[bytes] = []
    for other, secret in secrets.items():
        move = party.begin(session, other, secret, derive(seed, "secure-sum-root", round, attempt, other))
        states[other] = move.party
        arrived += move.messages
    for _ in range(2):  # keys, then shares
        server, outgoing = _serve(server, arrived)
        arrived = []
        for other, data in outgoing:
            states[other], answers = _answer(states[other], data, vector if other == node else None)
            arrived += answers
    words = np.frombuffer(arrived[0][messages.HEADER_SIZE :], f"<i{parameters.word // 8}")
    return words.astype(np.int64)


def _session(
    parameters: Parameters, seed: int | bytes, round: int, attempt: int
) -> tuple[Session, dict[int, bytes]]:
    secrets = {node: derive(seed, "secure-sum-identity", node) for node in range(1, parameters.nodes + 1)}
    roster = tuple(party.identity_of(secret) for secret in secrets.values())
    return Session(derive(seed, "secure-sum-run")[:16], round, attempt, roster, parameters), secrets
