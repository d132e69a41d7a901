"""What an observer sees: the very tensors at a tap, by the plain reference path. Attacks call this and never
re-implement a defence; fast engines do not materialise these tensors and are tested against the same
reference.

Taps, by the papers' leakage types:
  type2            per-example gradients in the client's memory before the local step
  type1            the client's update after local training, before its own clip and noise
  type0            the upload as the server receives it
  type0-sanitised  the same upload after the server's own clip and noise, taken alone

LDP-FL's upload is one of two values per weight; it is shown as the change of the weights that it reports. Where
parameters are shuffled the server gets no client's upload, only how many ones each weight has: then the mean over the
round's clients is shown. Where the sum is opened under masks the server gets a masked upload (type0): its words, as
multiples of the grid. Where a trusted party opens only the sum (where = sum), type0 is this client's part with the sum's
noise: what is left to a server that knows all other parts. `view_sum` is the opened sum of several clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from fedveil.errors import UserError, did_you_mean
from fedveil.federation import sums
from fedveil.federation.round import (
    State,
    Task,
    moment_of,
    noised_of,
    own_ranges,
    plan_of,
    recipe_of,
    sanitise_update,
    uploads_of,
    work_of,
)
from fedveil.keys import derive
from fedveil.models.layout import Layout
from fedveil.protect import ldp
from fedveil.protect.place import AtServer, Reports
from fedveil.protect.setting import Moment
from fedveil.protect.upload import drop_smallest
from fedveil.training import augment
from fedveil.training.contract import LocalPlan, LocalResult
from fedveil.training.reference import example_gradient
from fedveil.training.reference import train as reference_train

Tap = Literal["type2", "type1", "type0", "type0-sanitised"]
TAPS: tuple[Tap, ...] = ("type2", "type1", "type0", "type0-sanitised")


@dataclass(frozen=True)
class Seen:
    """values: [V, P] gradients (type 2) or [1, P] updates. plan and moment tell what an informed adversary
    knows: bounds, multipliers, steps, learning rate. noise_scale: deviation of the noise in `values` (0: none)."""

    tap: Tap
    values: np.ndarray
    plan: LocalPlan
    moment: Moment
    noise_scale: float


def view(task: Task, state: State, tap: str, client: int, rows: np.ndarray | None = None) -> Seen:
    """The tensors at `tap` in the coming round of `state`.

    type2: `rows` are the victims (row numbers of the task's data), one gradient each. Other taps: the client's
    own batches of this round, or one step on exactly `rows` where rows are given and the task has one step.
    """
    if tap not in TAPS:
        raise UserError(f"unknown tap '{tap}'.{did_you_mean(tap, TAPS)} Known: {', '.join(TAPS)}")
    now = moment_of(task, state)
    recipe = recipe_of(task, client)
    own = np.asarray(task.rows(client))
    plan = plan_of(task, now, client, len(own))
    if tap == "type2":
        chosen = own if rows is None else np.asarray(rows)
        values, scale = _in_memory(task, state, now, plan, chosen, client)
        return Seen("type2", values, plan, now, scale)
    work = work_of(task, state, now, client)
    if rows is not None:
        if plan.steps != 1:
            raise UserError("given rows make one batch: this needs local_steps = 1")
        work = type(work)(**{**work.__dict__, "rows": np.asarray(rows, np.int32)[None, :]})
    result = reference_train(task.module, state.weights, task.x, task.y, [work], plan)
    update, scale = result.delta[0], 0.0
    if isinstance(recipe.place, Reports) and tap != "type1":
        others = _others(task, state, now, client) if recipe.channel.hides_reports else {}
        update, scale = _reported(task, state, now, {client: update, **others})
        return Seen(tap, update[None, :], plan, now, scale)  # type: ignore[arg-type]
    if plan.noised:
        scale = float(result.noise_scale[0]) * plan.learning_rate / plan.expected_batch * plan.steps**0.5
    if tap != "type1":
        update = sanitise_update(task, now, update, client, state.weights)
        if recipe.place.own_noise and not recipe.place.in_steps:
            scale = noised_of(task, now, client, len(own))[0].deviation
        if task.secure is not None:
            (noised,) = noised_of(task, now, -1, task.setting.examples)
            update, scale = sums.masked_upload(task, now, noised, state.weights, client, update)
        elif recipe.place.sum_only:
            update, scale = _with_the_sums_noise(task, now, update)
    if tap == "type0-sanitised" and isinstance(recipe.place, AtServer) and task.secure is None:
        alone = replace(task.setting, cohort=1.0)  # the server's own noise on this one upload
        (noised,) = noised_of(replace(task, setting=alone), now, client, len(own))
        update = noised.add(update, derive(task.root, "server-noise", now.number)[:16]).astype(np.float32)
        scale = noised.deviation
    return Seen(tap, update[None, :], plan, now, scale)  # type: ignore[arg-type]


def _with_the_sums_noise(task: Task, now: Moment, total: np.ndarray) -> tuple[np.ndarray, float]:
    """A total with the noise that is added once, where the sum is opened, and that noise's deviation."""
    (noised,) = noised_of(task, now, -1, task.setting.examples)
    key = derive(task.root, "server-noise", now.number)[:16]
    return noised.add(total, key).astype(np.float32), noised.scale


def view_sum(
    task: Task, state: State, rows: Mapping[int, np.ndarray], sent: Mapping[int, np.ndarray] = {}
) -> np.ndarray | None:
    """The sum that the server has in hand when each client takes one step on its `rows`; all other clients add nothing. Noise
    that the server adds itself is not in it; two-valued reports are read as a change of the weights.

    sent: weights that a malicious server sent to single clients instead of the state's. None: nothing is opened, because
    masks of nodes that were sent different models do not cancel out (the model is part of what nodes agree on)."""
    now = moment_of(task, state)
    updates: dict[int, np.ndarray] = {}
    for client, chosen in rows.items():
        weights = sent.get(client, state.weights)
        plan = plan_of(task, now, client, len(np.asarray(task.rows(client))))
        if plan.steps != 1:
            raise UserError("given rows make one batch: this needs local_steps = 1")
        work = replace(work_of(task, state, now, client), rows=np.asarray(chosen, np.int32)[None, :])
        result = reference_train(task.module, weights, task.x, task.y, [work], plan)
        updates[client] = sanitise_update(task, now, result.delta[0], client, weights)
    if isinstance(task.recipe.place, Reports):
        return _reported(task, state, now, updates)[0].astype(np.float64) * len(updates)
    total = np.sum([u.astype(np.float64) for u in updates.values()], axis=0)
    if task.secure is not None:
        if any(not np.array_equal(w, state.weights) for w in sent.values()):
            return None
        nothing = np.zeros(task.layout.size)
        (noised,) = noised_of(task, now, -1, task.setting.examples)
        everybody = {c: updates.get(c, nothing) for c in range(task.setting.clients)}
        return sums.opened(task, now, noised, state.weights, everybody)[0]
    if task.recipe.place.open_uploads or isinstance(task.recipe.place, AtServer):
        return total
    return _with_the_sums_noise(task, now, total)[0].astype(np.float64)


def _others(task: Task, state: State, now: Moment, client: int) -> dict[int, np.ndarray]:
    """The updates of all other clients that may report in the round (every client, if the cohort is not full)."""
    found = {}
    for other in range(task.setting.clients):
        if other != client:
            plan = plan_of(task, now, other, len(np.asarray(task.rows(other))))
            work = work_of(task, state, now, other)
            found[other] = reference_train(task.module, state.weights, task.x, task.y, [work], plan).delta[0]
    return found


def result_of(updates: np.ndarray) -> LocalResult:
    """Finished updates [K, P] as an engine would return them, without diagnostics."""
    none = np.zeros(len(updates))
    return LocalResult(
        updates.astype(np.float32), np.ones(len(updates), bool), none, none[:, None], none[:, None], none, none,
        none.astype(np.int64),
    )  # fmt: skip


def _reported(
    task: Task, state: State, now: Moment, updates: dict[int, np.ndarray]
) -> tuple[np.ndarray, float]:
    """The mean of the clients' two-valued reports as a change of the weights, and the deviation of its noise."""
    clients = list(updates)
    result = result_of(np.stack([updates[c] for c in clients]))
    ranges, epsilon = {c: own_ranges(task, state, c) for c in clients}, float(now.epsilon or 0)
    reports = [
        ldp.decode(upload.bits, ranges[upload.client], epsilon, task.layout)
        for upload in uploads_of(task, now, state, clients, result)
        if upload.bits is not None
    ]
    mean = np.mean(reports, axis=0)
    variances = [ldp.variance(state.weights, ranges[c], epsilon, task.layout).mean() for c in clients]
    spread = np.sqrt(np.mean(variances) / len(reports))
    return (mean - state.weights).astype(np.float32), float(spread)


def _in_memory(
    task: Task, state: State, now: Moment, plan: LocalPlan, rows: np.ndarray, client: int
) -> tuple[np.ndarray, float]:
    """Per-example gradients of one batch as the recipe leaves them: raw, clipped, or clipped and noised one by
    one. AdaClip's are seen in its scaled space."""
    weights = torch.as_tensor(state.weights)
    gradients = np.stack([_of_example(task, weights, plan, int(r), now, client, k) for k, r in enumerate(rows)])
    recipe = recipe_of(task, client)
    if recipe.thin.prune > 0:  # small gradients that are dropped to save traffic are dropped before anybody reads them
        gradients = np.stack([drop_smallest(row, recipe.thin.prune) for row in gradients])
    if not plan.clips:
        return gradients, 0.0
    if recipe.clip.rule.rescales:
        work = work_of(task, state, now, client)
        gradients = (gradients - work.shift) / work.scale
    clipped, largest = clip_gradients(gradients, task.layout, plan)
    if not recipe.noise_on.for_each:
        return clipped, 0.0
    drawing = plan.noised[0]
    times = float(drawing.times(largest if plan.follows else None, 1))
    keys = [derive(task.root, "example-noise", now.number, client, k)[:16] for k in range(len(rows))]
    noisy = [drawing.add(row, key, 0, times) for row, key in zip(clipped, keys, strict=True)]
    return np.stack(noisy).astype(np.float32), times * drawing.deviation(task.layout.size)


def _of_example(
    task: Task, weights: torch.Tensor, plan: LocalPlan, row: int, now: Moment, client: int, place: int
) -> np.ndarray:
    """The gradient that is clipped: of one example, or the mean of its augmented copies."""
    key = derive(task.root, "noise", now.number, client)[:16]
    copies = augment.shown(plan.augment, torch.as_tensor(task.x[row]), key, 0, place)
    found = [example_gradient(task.module, task.layout, weights, one, task.y[row], plan.loss)[1] for one in copies]
    return np.asarray(torch.stack(found).mean(0))


def clip_gradients(gradients: np.ndarray, layout: Layout, plan: LocalPlan) -> tuple[np.ndarray, float]:
    """A batch's gradients [B, P] clipped as in the plan's first step, and the norm that noise may follow (l2-max)."""
    clipped, largest = gradients.copy(), 0.0
    for part in layout.layer_slices() if plan.by_layer else (slice(None),):
        norms = np.linalg.norm(gradients[:, part].astype(np.float64), ord=plan.order, axis=1)
        bound = float(np.median(norms)) if plan.by_median else plan.bounds[0]
        clipped[:, part] *= np.minimum(1.0, bound / np.maximum(norms, 1e-30))[:, None].astype(np.float32)
        mean = float(np.linalg.norm(clipped[:, part].astype(np.float64).sum(0))) / plan.expected_batch
        largest = max(largest, mean if plan.by_mean else float(np.minimum(norms, bound).max(initial=0.0)))
    return clipped, largest
