"""Practice equals promise: is the noise that a recipe really adds the noise that it claims?

For a recipe of anybody's making, on a small task: two runs with the same keys on neighbouring data differ by what one unit can
move; two runs with different keys on the same data differ by noise alone. What is drawn must be no less than what is claimed
(nothing is promised that is not there), and no more than a percent above it (nothing is wasted by a scale that drifted).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedveil.errors import UserError
from fedveil.federation.config import make_config
from fedveil.federation.loop import Prepared, play_round, prepare
from fedveil.federation.round import Task, moment_of, noised_of, plan_of, start
from fedveil.protect.place import InSum
from fedveil.protect.promise import claims
from fedveil.protect.recipe import Recipe
from fedveil.protect.sampling import Everybody, FullBatches
from fedveil.protect.setting import Moment

CLIENTS = 3


@dataclass(frozen=True)
class Check:
    """What a recipe adds and what it claims: standard deviations of the noise on one coordinate of the sum.

    verdict: "holds", "too little noise", "too much noise" or "states nothing". chance: how often a right recipe would not hold.
    """

    verdict: str
    claimed: float
    measured: float
    values: int
    chance: float = 1e-6

    def __bool__(self) -> bool:
        return self.verdict == "holds"


def check_practice(recipe: Recipe, *, rounds: int = 24, seed: int = 0, engine: str = "auto") -> Check:
    """Hold a recipe to what it states: draw its noise on the real path and compare with `Noised.deviation`.

    A recipe whose parts state no event is told so: its rows in a ledger are `none`. Formal guarantee: a recipe that adds the
    noise it states fails with probability below `chance` (the deviation of n independent values is right to 5.2 / sqrt(2n),
    heavier tails counted by their fourth moment).
    """
    values = _values(recipe, seed, engine)
    # All records and all clients in every round, so that keys decide about noise alone.
    recipe = replace(recipe, batches=FullBatches(), cohort=Everybody())
    run = prepare(make_config({"recipe": f"given:{recipe.name}", **values}, recipe=recipe))
    state = start(run.task, run.initial)
    now = moment_of(run.task, state)
    found = claims(recipe, run.task.setting, now, run.partition.size(0))
    stated = [claim for claim in found if claim.event is not None and claim.verdict == "sound"]
    noised = noised_of(run.task, now, 0, run.partition.size(0))
    if not noised or not stated:
        return Check("states nothing", 0.0, 0.0, 0)
    pieces = []
    for k in range(rounds // 2):
        one, two = (_sum_of(run, seed + 1 + 2 * k + j) for j in (0, 1))
        pieces.append((one - two) / np.sqrt(2))
    return compared(noised[0].deviation, np.concatenate(pieces))


def compared(claimed: float, drawn: np.ndarray) -> Check:
    """Independent noise values of one deviation beside the deviation that is claimed for them."""
    measured = float(np.sqrt(np.mean(drawn**2)))
    heavy = max(1.0, float(np.mean(drawn**4)) / 3 / measured**4) if measured else 1.0
    room = 5.2 * np.sqrt((3 * heavy - 1) / 2) / np.sqrt(2 * drawn.size)
    verdict = "holds"
    if measured < claimed * (1 - room):
        verdict = "too little noise"
    elif measured > claimed * (1.01 + room):
        verdict = "too much noise"
    return Check(verdict, claimed, measured, int(drawn.size))


def _values(recipe: Recipe, seed: int, engine: str) -> dict[str, object]:
    if not recipe.private:
        raise UserError(f"recipe '{recipe.name}' adds no noise: there is nothing to hold it to")
    return {
        "dataset": "cancer", "clients": CLIENTS, "partition": "iid", "rounds": 1, "local_steps": 1, "batch_size": 8.0,
        "learning_rate": 1.0, "model": "papers-mlp", "seed": seed, "engine": engine,
    }  # fmt: skip


def _sum_of(run: Prepared, root: int) -> np.ndarray:
    """The noised sum of one round with other noise on the same data: what moved, times what it was divided by."""
    fresh = prepare(run.config, run.dataset, run.task.module, dealt=run.partition, root=root)
    task = fresh.task
    clients = np.arange(1) if task.recipe.place.open_uploads else np.arange(CLIENTS)
    state = start(task, run.initial)
    moved = play_round(fresh, state, clients)[0].weights.astype(np.float64) - run.initial
    return moved * _divisor(task, moment_of(task, state), run.partition.size(0))


def _divisor(task: Task, now: Moment, size: int) -> float:
    """What stands between the noised sum and the change of the model."""
    place = task.recipe.place
    if place.in_steps:
        return plan_of(task, now, 0, size).expected_batch
    if place.open_uploads:
        return 1.0
    return place.everyone(task.recipe, task.setting) if isinstance(place, InSum) else task.setting.cohort
