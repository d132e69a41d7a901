"""Shadow models of a run: the same recipe, model and training, on other halves of a pool of examples.

The attacker knows everything but the membership of the pool: shadows train on all other rows of the run and on a
random half of the pool (the threat model of a privacy audit, the strongest for the attacker).
"""

from __future__ import annotations

import copy
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from fedveil.attacks.membership import TrainMany
from fedveil.errors import UserError
from fedveil.federation.loop import Prepared, cohort_of, play_round
from fedveil.federation.round import State, Task, model_weights, moment_of, plan_of, start, work_of
from fedveil.keys import derive, generator
from fedveil.protect.aggregate import Mean
from fedveil.protect.memory import NOTHING
from fedveil.training import pool
from fedveil.training.contract import ClientWork
from fedveil.training.torch import descent

POPULATION = 2500  # most population examples: more make rmia's scores finer, not better


@dataclass(frozen=True, eq=False)
class Pool:
    """Examples whose membership is asked for: the first half are rows of the run, the second its test rows."""

    x: np.ndarray  # the run's rows followed by the test rows of the pool
    y: np.ndarray
    rows: np.ndarray  # [n] row numbers of the pool in x
    member: np.ndarray  # [n]
    host: np.ndarray  # [n] client that holds the example when it is in
    population: tuple[np.ndarray, np.ndarray]  # x, y of test rows outside the pool, in no model


def pool_of(prepared: Prepared, size: int, seed: int) -> Pool:
    """Draw members among the rows that clients hold, and as many non-members from the test rows."""
    task, dealt, dataset = prepared.task, prepared.partition, prepared.dataset
    if dataset.classes is None:
        raise UserError("membership inference is offered for classification; this is a regression task.")
    draw = generator(seed, "pool")
    held = [(int(row), client) for client in range(dealt.clients) for row in dealt.rows(client)]
    half = min(size // 2, len(held) // 2, len(dataset.x_test) // 2)
    if half < 10:
        raise UserError(f"a pool of {2 * half} examples is too small: use more data or raise --pool.")
    chosen = [held[i] for i in draw.choice(len(held), half, replace=False)]
    tests = draw.choice(len(dataset.x_test), half, replace=False)
    others = np.setdiff1d(np.arange(len(dataset.x_test)), tests)
    others = generator(seed, "population").permutation(others)[:POPULATION]
    return Pool(
        x=np.concatenate([task.x, dataset.x_test[tests].astype(task.x.dtype)]),
        y=np.concatenate([task.y, dataset.y_test[tests].astype(task.y.dtype)]),
        rows=np.concatenate([[row for row, _ in chosen], len(task.x) + np.arange(half)]).astype(np.int64),
        member=np.arange(2 * half) < half,
        host=np.array([client for _, client in chosen] + draw.integers(0, dealt.clients, half).tolist()),
        population=(dataset.x_test[others].astype(task.x.dtype), dataset.y_test[others].astype(task.y.dtype)),
    )


def trainer(prepared: Prepared, asked: Pool, seed: int) -> TrainMany:
    """Train one model per member mask. With one client (central training) all shadows are one stack. Federations
    start each round from weights of their own, which no stack can: each trains its cohort as a stack, and one
    thread per core plays one federation after the other. Numbers do not depend on the number of threads."""

    def with_members(number: int, mask: np.ndarray) -> Prepared:
        dropped = set(asked.rows[~mask].tolist())
        extra = {
            c: asked.rows[(asked.host == c) & mask & ~asked.member] for c in range(prepared.partition.clients)
        }
        held = {
            c: np.concatenate(
                [[r for r in prepared.partition.rows(c).tolist() if r not in dropped], extra[c]]
            ).astype(np.int64)
            for c in range(prepared.partition.clients)
        }
        dealt = replace(prepared.partition, rows_of=held.__getitem__, size_of=lambda c: len(held[c]))
        root = derive(seed, "shadow", number)
        module = copy.deepcopy(prepared.task.module)  # torch swaps its weights in place: one per thread
        task = replace(prepared.task, module=module, x=asked.x, y=asked.y, rows=dealt.rows, root=root)
        return replace(prepared, partition=dealt, task=task)

    def train_many(masks: np.ndarray) -> np.ndarray:
        shadows = [with_members(number, mask) for number, mask in enumerate(masks)]
        if _one_stack(prepared):
            return _stacked(shadows)
        with descent.one_thread(), ThreadPoolExecutor(os.cpu_count()) as threads:
            return np.stack(list(threads.map(_federated, shadows)))

    return train_many


def state_free(task: Task) -> bool:
    """Does no part of the recipe remember anything between rounds?"""
    recipe = task.recipe
    remembers = recipe.clip.rule.start(recipe.clip, 1, task.setting.rounds) != NOTHING
    return not remembers and isinstance(recipe.aggregate, Mean) and recipe.aggregate == Mean()


def _one_stack(prepared: Prepared) -> bool:
    """Can a whole run be one local plan? One client, nothing remembered between rounds, plain averaging."""
    task = prepared.task
    return (
        prepared.partition.clients == 1
        and task.recipe.place.open_uploads
        and task.recipe.place.of_gradients
        and state_free(task)
        and task.learning_rate_end is None
        and task.momentum == 0
        and task.server_momentum == 0
        and task.server_learning_rate == 1
        and task.average == 0
        and not task.recipe.thin.anything
        and not task.own
    )


def _stacked(shadows: list[Prepared]) -> np.ndarray:
    first = shadows[0]
    rounds = first.task.setting.rounds
    states = [State(first.initial, index) for index in range(rounds)]
    plans = [plan_of(first.task, moment_of(first.task, s), 0, first.partition.size(0)) for s in states]
    plan = replace(
        plans[0],
        steps=sum(p.steps for p in plans),
        bounds=tuple(itertools.chain.from_iterable(p.bounds for p in plans)),
        noised=tuple(itertools.chain.from_iterable(p.noised for p in plans)),
    )
    work = []
    for number, shadow in enumerate(shadows):
        parts = [work_of(shadow.task, s, moment_of(shadow.task, s), 0).rows for s in states]
        width = max(p.shape[1] for p in parts)
        rows = np.concatenate(
            [np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=-1) for p in parts]
        )
        work.append(ClientWork(number, rows.astype(np.int32), derive(shadow.task.root, "noise", 0, 0)[:16]))
    result = pool.train(
        first.task.module, first.initial, first.task.x, first.task.y, work, plan, engine=first.config.engine
    )
    if not result.finite.all():
        raise UserError(
            "a shadow model diverged; lower the learning rate. This says nothing about the defence."
        )
    return first.initial + result.delta


def _federated(shadow: Prepared) -> np.ndarray:
    state = start(shadow.task, shadow.initial)
    for _ in range(shadow.task.setting.rounds):
        state, _, _ = play_round(shadow, state, cohort_of(shadow, state.round + 1))
    return model_weights(state)
