"""The audit of a sum under masks, from the seat of a server that holds `colluders` nodes.

The worst case that the promise speaks of is played with the protocol itself: as many nodes drop out as may, so that exactly
`threshold` survive, and `colluders` of those tell the server their whole vectors, shares of noise included. What the coalition
does not know is then the sum of the h = threshold - colluders honest vectors with h shares of noise. Canaries sit in slots of
honest survivors; the score is the canary's part of that sum in units of the promised noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fedveil.attacks.audit.bounds import Audit, Scores, judge
from fedveil.attacks.audit.canaries import Staged, _slots, _units, promised, stage, unit_of
from fedveil.errors import UserError
from fedveil.federation import sums
from fedveil.federation.config import RunConfig
from fedveil.federation.loop import Prepared, prepare, train_cohort
from fedveil.federation.round import moment_of, noised_of, start, uploads_of
from fedveil.keys import generator
from fedveil.privacy.ledger import Ledger
from fedveil.secure_sum import simulate


@dataclass(frozen=True)
class Parts:
    """Who survives honestly and who colludes; all other nodes drop out."""

    honest: tuple[int, ...]
    colluders: tuple[int, ...]


def worst_case(prepared: Prepared, seed: int) -> Parts:
    """Exactly `threshold` survivors, drawn by seed, `colluders` of them the server's."""
    terms = prepared.task.secure
    if terms is None:
        raise UserError(
            "this run's sum is not under masks (secure_sum = true): there is no coalition to audit."
        )
    order = generator(seed, "coalition").permutation(prepared.partition.clients)[: terms.threshold].tolist()
    return Parts(tuple(order[terms.colluders :]), tuple(order[: terms.colluders]))


def left_over(staged: Staged, parts: Parts, rounds: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Round by round: (moment, what the coalition is left with after it has taken off all that it knows) [P]."""
    prepared = staged.prepared
    task = prepared.task
    hosts = np.intersect1d(staged.host, parts.honest)
    for index in range(rounds):
        state = replace(start(task, prepared.initial), round=index)
        now = moment_of(task, state)
        (noised,) = noised_of(task, now, -1, task.setting.examples)
        parameters = sums.parameters_of(task, noised, sums.model_digest(state.weights))
        updates = {client: np.zeros(task.layout.size) for client in (*parts.honest, *parts.colluders)}
        for chunk, result in train_cohort(prepared, state, now, hosts):
            for upload in uploads_of(task, now, state, chunk, result):
                updates[upload.client] = np.asarray(upload.update, np.float64)
        vectors = {c + 1: sums.vector_of(task, now, parameters, c, update) for c, update in updates.items()}
        played = simulate.sum_of(vectors, parameters, task.root, round=now.number)
        if not isinstance(played.result, simulate.Sum):
            raise UserError(f"round {now.number}: no sum: {played.result.reason}")
        known = np.sum([vectors[c + 1] for c in parts.colluders], axis=0) if parts.colluders else 0
        yield now, (played.result.total - known) * parameters.grid


def coalition_scores(staged: Staged, promise: Prepared, parts: Parts, rounds: int) -> tuple[Scores, float]:
    """Scores of all canaries in units of the promised noise, and the threshold, fixed by the promise alone."""
    task, hosts = promise.task, staged.host.tolist()
    total, expected = np.zeros(len(hosts)), np.zeros(len(hosts))
    for now, left in left_over(staged, parts, rounds):
        told = moment_of(task, replace(start(task, promise.initial), round=now.number - 1))
        units = {c: _units(staged, task, told, c, promise.partition.size(c)) for c in set(hosts)}
        noise, signal, _ = np.array([units[client] for client in hosts]).T
        total += _slots(staged, left) / noise
        expected += signal / noise
    scores = total / np.sqrt(rounds)
    cut = float(np.median(expected)) / np.sqrt(rounds) / 2
    return Scores(scores[staged.included], scores[~staged.included]), float(cut)


def audit_coalition(
    config: RunConfig, ledger: Ledger, *, canaries: int = 1000, rounds: int | None = None, seed: int = 0,
    significance: float = 0.05, practice: RunConfig | None = None,
) -> tuple[Audit, dict[str, Any]]:  # fmt: skip
    """Judge what a ledger promises the server with its colluders by the coalition's own view: (audit, facts).

    practice: what is really executed, if that is not `config` (for testing the audit itself)."""
    base = prepare(config)
    rounds = min(rounds or config.rounds, config.rounds)
    executed = prepare(practice) if practice else base
    parts = worst_case(base, seed)
    staged = stage(executed, canaries, seed, rounds=rounds, among=parts.honest)
    unit, _ = unit_of(base)
    epsilon, status, curve = promised(ledger, "server", unit, config.delta)
    scores, cut = coalition_scores(staged, base, parts, rounds)
    found = judge(
        scores, epsilon_promised=epsilon, delta=config.delta, threshold=cut, status=status,
        curve=curve if status == "sound" else None, independent=True, gaussian=True, significance=significance,
    )  # fmt: skip
    facts = {
        "unit": unit, "observer": "server", "rounds": rounds, "engine": staged.prepared.engine, "seed": seed,
        "coins": "".join(map(str, staged.included.astype(int))), "seen": "a sum under masks, with all that colluding nodes know",
        "coalition": asdict(parts),
    }  # fmt: skip
    return found, facts
