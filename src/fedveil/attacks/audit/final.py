"""What an observer of the final model alone can show: canaries in the last iterate.

Canaries in slots have the same gradient in every step, whatever the weights. Crafted gradients of this kind make the last
model as telling as the sum of all releases with everybody's noise in it (Annamalai 2024; Cebere et al. 2024). So "nobody sees
the intermediate models" is worth nothing against them where noise is added once, and the other clients' noise where each adds
its own.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fedveil.attacks.audit.bounds import Audit, Scores, judge
from fedveil.attacks.audit.canaries import Staged, _slots, _units, promised, stage, unit_of
from fedveil.errors import UserError
from fedveil.federation.config import RunConfig
from fedveil.federation.loop import cohort_of, prepare, train_cohort
from fedveil.federation.round import learning_rate_of, merge, moment_of, start, uploads_of
from fedveil.privacy.ledger import Ledger
from fedveil.protect.law import Gaussian


def final_scores(staged: Staged, rounds: int, *, promise: object | None = None) -> tuple[Scores, float]:
    """Scores of all canaries from the last model alone, in units of the promised noise, and the threshold.

    promise: the prepared run whose noise is promised (default: the staged one)."""
    prepared = staged.prepared
    task = prepared.task
    said = task if promise is None else promise.task  # type: ignore[attr-defined]
    state = start(task, prepared.initial)
    hosts = staged.host.tolist()
    expected, variance = np.zeros(len(hosts)), 0.0
    for _ in range(rounds):
        now, told = moment_of(task, state), moment_of(said, state)
        clients = cohort_of(prepared, now.number)
        uploads = [
            upload
            for chunk, result in train_cohort(prepared, state, now, clients)
            for upload in uploads_of(task, now, state, chunk, result)
        ]
        rate = learning_rate_of(task, state.round)
        per, noises = {}, 0.0
        for client in clients.tolist():
            noise, signal, batch = _units(staged, said, told, client, prepared.partition.size(client))
            factor = rate / batch if task.recipe.place.in_steps else 1.0
            per[client], noises = (
                signal * factor / len(clients),
                noises + (noise * factor / len(clients)) ** 2,
            )
        expected += np.array([per.get(client, 0.0) for client in hosts])
        variance += noises
        state, _ = merge(task, state, now, uploads)
    if not expected.any() or not variance > 0:
        raise UserError("no canary reached the final model: replay more rounds.")
    moved = _slots(staged, state.weights - prepared.initial) / task.server_learning_rate
    values, reached = moved / math.sqrt(variance), expected > 0
    cut = float(np.median(expected[reached]) / math.sqrt(variance)) / 2
    return Scores(values[staged.included & reached], values[~staged.included & reached]), cut


def audit_final(
    config: RunConfig, ledger: Ledger, *, canaries: int = 1000, rounds: int | None = None, seed: int = 0,
    significance: float = 0.05, practice: RunConfig | None = None,
) -> Audit:  # fmt: skip
    """Judge the promise to whoever gets only the final model. Clients add their own noise (where = step or client)."""
    base = prepare(config)
    recipe = base.task.recipe
    if not isinstance(recipe.law, Gaussian) or not recipe.place.own_noise:
        raise UserError(
            "the final model alone is audited where clients add Gaussian noise; elsewhere the usual audit sees no more."
        )
    unit, _ = unit_of(base)
    rounds = min(rounds or config.rounds, config.rounds)
    executed = prepare(practice) if practice else base
    staged = stage(executed, canaries, seed, rounds=rounds)
    staged = replace(staged, included=staged.included.astype(bool))
    scores, cut = final_scores(staged, rounds, promise=base)
    epsilon, status, curve = promised(ledger, "public", unit, config.delta)
    return judge(
        scores, epsilon_promised=epsilon, delta=config.delta, threshold=cut, status=status,
        curve=curve if status == "sound" else None, independent=True, gaussian=True, significance=significance,
    )  # fmt: skip
