"""One federated round as functions of plain values. Simulation and deployment call the same ones.

    moment   = moment_of(task, state)             schedules at this round
    plan     = plan_of(task, moment, client)      what a client does
    uploads  = client_updates(task, state, …)     train, then sanitise at the client
    state    = merge(task, state, moment, uploads) at the server

State is one plain value; a checkpoint is that value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch import nn

from fedveil.errors import UserError
from fedveil.keys import derive, generator
from fedveil.models.layout import Layout
from fedveil.privacy.schedules import Schedule
from fedveil.protect import adaclip, aggregate, channel, connectivity, ldp, noise, udp
from fedveil.protect.batches import batches
from fedveil.protect.promise import Round, Setting
from fedveil.protect.recipe import Recipe, spacing, step_width
from fedveil.training.contract import ClientWork, LocalPlan, LocalResult, LossKind
from fedveil.training.evaluate import evaluate
from fedveil.training.optimisers import SGD, Optimiser

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class State:
    """Weights, rounds done, and what is remembered between rounds (per-client entries are stored lazily)."""

    weights: np.ndarray
    round: int = 0
    server: Arrays = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Task:
    """What stays the same during a run. `root` keys all randomness: the seed, or the system's entropy."""

    recipe: Recipe
    setting: Setting
    module: nn.Module
    layout: Layout
    x: np.ndarray
    y: np.ndarray
    rows: Any  # client -> row numbers
    root: int | bytes
    learning_rate: float = 0.05
    learning_rate_end: float | None = None
    momentum: float = 0.0
    optimiser: Optimiser = SGD
    loss: LossKind = "cross-entropy"
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0
    average: float = 0.0
    fixed_variance: float | None = None
    own: Mapping[int, tuple[Recipe, float]] = field(default_factory=dict)  # clients with their own budget
    own_epsilon: Mapping[int, float] = field(default_factory=dict)
    public: tuple[np.ndarray, np.ndarray] | None = None
    message_loss: float = 0.0
    curve: Literal["polygon", "bezier"] = "polygon"
    seed: int = 0  # public choices (connectivity, model shuffling) that need no secrecy


def start(task: Task, weights: np.ndarray) -> State:
    """The state before the first round."""
    server: dict[str, np.ndarray] = {}
    clip = task.recipe.clip
    if clip.rule == "quantile":
        server["bound"] = np.array(clip.bound.value(0, task.setting.rounds))
    if clip.rule == "adaclip":
        begun = adaclip.first(clip.bound.value(0, task.setting.rounds), task.layout.size)
        server["adaclip_mean"], server["adaclip_variance"] = begun.mean, begun.square
    if task.recipe.mechanism == "two-valued":
        first = (
            ldp.model_ranges(weights, task.layout)
            if task.recipe.prior == "model"
            else ldp.fixed_ranges(task.layout, task.recipe.radius)
        )
        server["range_centre"], server["range_radius"] = np.array(first.centre), np.array(first.radius)
    return State(weights.astype(np.float32), 0, server)


def values_of(schedule: Schedule, index: int, rounds: int, steps: int) -> tuple[float, ...]:
    """One value per local step of round `index` (0-based)."""
    if schedule.by == "iteration":
        return tuple(schedule.value(index * steps + step, rounds * steps) for step in range(steps))
    return (schedule.value(index, rounds),) * steps


def moment_of(task: Task, state: State) -> Round:
    """Bounds and noise multipliers of the coming round, one per local step."""
    recipe, steps, rounds = task.recipe, task.setting.steps, task.setting.rounds
    index = state.round
    if recipe.clip.rule == "quantile":
        bounds: tuple[float, ...] = (float(state.server["bound"]),) * steps
    elif recipe.clip.rule == "adaclip":
        bounds = (1.0,) * steps
    else:
        bounds = values_of(recipe.clip.bound, index, rounds, steps)
    if task.fixed_variance is not None:
        sigmas = tuple(task.fixed_variance / bound for bound in bounds)
    else:
        sigmas = values_of(recipe.sigma, index, rounds, steps)
    # Only a number of reports that is sure to arrive hides one among them.
    sure = recipe.cohort != "poisson" and task.message_loss == 0 and not task.own_epsilon
    return Round(index + 1, bounds, sigmas, recipe.epsilon, round(task.setting.cohort) if sure else 1)


def learning_rate_of(task: Task, index: int) -> float:
    """Constant, or linear from the first round to the last."""
    if task.learning_rate_end is None or task.setting.rounds < 2:
        return task.learning_rate
    share = index / (task.setting.rounds - 1)
    return task.learning_rate * (1 - share) + task.learning_rate_end * share


def recipe_of(task: Task, client: int) -> Recipe:
    """The client's own recipe (its mechanism may differ), else the run's."""
    return task.own[client][0] if client in task.own else task.recipe


def plan_of(task: Task, now: Round, client: int, size: int) -> LocalPlan:
    """The local plan of one client: the recipe's parts with this round's values."""
    recipe, steps = recipe_of(task, client), task.setting.steps
    batch = float(size if recipe.sampling == "full" else min(task.setting.batch, size))
    common: dict[str, Any] = {
        "steps": steps,
        "learning_rate": learning_rate_of(task, now.number - 1),
        "expected_batch": batch,
        "momentum": task.momentum,
        "optimiser": task.optimiser,
        "loss": task.loss,
        "proximal": recipe.proximal,
    }
    if recipe.heterogeneity and task.own_epsilon:
        largest = max(task.own_epsilon.values())
        common["penalty"] = (largest - task.own_epsilon.get(client, largest)) / largest
    sigmas = (task.own[client][1],) * steps if client in task.own else now.sigmas
    bounds = now.bounds
    grid = spacing(recipe, bounds, sigmas)
    if recipe.where not in ("step", "sum"):
        return LocalPlan(**common)
    if recipe.clip.kind == "layer" and recipe.clip.split:
        layers = math.sqrt(task.layout.layers)
        bounds, sigmas = tuple(b / layers for b in bounds), tuple(s * layers for s in sigmas)
    common.update(
        clip=recipe.clip.kind,
        clip_norm=recipe.clip.norm,
        bounds=bounds,
        bound_rule="median" if recipe.clip.rule == "median" else "given",
        sensitivity=recipe.sensitivity,
    )
    if recipe.where == "sum":
        # The engine returns minus the plain sum of clipped gradients; noise and step size follow at the sum.
        return LocalPlan(**{**common, "learning_rate": 1.0, "expected_batch": 1.0, "momentum": 0.0, "optimiser": SGD})
    common.update(noise=recipe.mechanism, multipliers=sigmas, noise_on=recipe.noise_on, grid=grid)
    if recipe.mechanism == "staircase":
        common["width"] = step_width(recipe, task.layout.size)
    return LocalPlan(**common)


def work_of(task: Task, state: State, now: Round, client: int) -> ClientWork:
    """The client's rows for every step, its noise key and its vectors."""
    recipe, rows = recipe_of(task, client), np.asarray(task.rows(client))
    kind = (
        recipe.sampling
        if recipe.private
        else ("partition" if recipe.sampling == "poisson" else recipe.sampling)
    )
    vectors: dict[str, np.ndarray] = {}
    if recipe.aggregate == "scaffold":
        vectors["control"] = aggregate.scaffold_control(state.server, client, task.layout.size)
    if recipe.heterogeneity and "anchor" in state.server:
        vectors["anchor"] = state.server["anchor"]
    if recipe.clip.rule == "adaclip":
        vectors["shift"] = state.server["adaclip_mean"]
        vectors["scale"] = adaclip.scale(adaclip_memory(state))
    return ClientWork(
        client=client,
        rows=batches(kind, rows, task.setting.batch, task.setting.steps, task.root, now.number, client),
        noise_key=derive(task.root, "noise", now.number, client)[:16],
        **vectors,
    )


def adaclip_memory(state: State) -> adaclip.Memory:
    """AdaClip's mean and squared deviation of the noised gradients so far."""
    return adaclip.Memory(state.server["adaclip_mean"], state.server["adaclip_variance"])


def noise_errors(task: Task, now: Round, client: int, size: int, measure: bool = True) -> dict[str, float]:
    """The l1 error that a round's noise puts into one client's update: expected for the sum of its steps, the
    papers' bound (steps times one step), and with `measure` what this client's noise really was (private).

    Empty where the noise is not in the steps, differs from step to step, or is scaled by the data. Control
    variates, momentum and proximal terms are left out: this is the noise itself, times rate over batch.
    """
    plan = plan_of(task, now, client, size)
    if plan.noise == "none":
        return {}
    plain = plan.sensitivity == "bound" and plan.bound_rule == "given"
    same = len(set(plan.multipliers)) == 1 and len(set(plan.bounds)) == 1
    if not (plain and same and plan.noise_on == "sum" and task.recipe.clip.rule != "adaclip"):
        return {}
    if not (plan.multipliers[0] > 0 and math.isfinite(plan.bounds[0])):
        return {}
    factor = plan.learning_rate / plan.expected_batch
    told = udp.expected_l1(
        plan.noise,
        plan.multipliers[0] / plan.width,
        plan.bounds[0] * plan.width,
        task.layout.size,
        plan.steps,
        plan.nu,
    )
    errors = {"expected_l1": factor * told.sum, "expected_l1_bound": factor * told.bound}
    if measure and plan.steps * task.layout.size <= 20_000_000:  # drawing it again must stay a trifle
        key = derive(task.root, "noise", now.number, client)[:16]
        work = ClientWork(client, np.zeros((plan.steps, 0), np.int32), key)
        total = np.zeros(task.layout.size)
        for step in range(plan.steps):
            one = noise.noised_sum(plan, work, step, 0, np.zeros(total.size, np.float32), plan.bounds[0])
            total += one.astype(np.float64) / plan.bounds[0]
        errors["measured_l1"] = factor * plan.bounds[0] * float(np.abs(total).sum())
    return errors


@dataclass(frozen=True)
class Upload:
    """What leaves one client: the sanitised update and, for some recipes, a noised count or packed bits."""

    client: int
    update: np.ndarray
    below: float | None = None  # noised share of unclipped examples
    bits: np.ndarray | None = None


def uploads_of(
    task: Task, now: Round, state: State, clients: Sequence[int], result: LocalResult
) -> Iterator[Upload]:
    """Sanitise what the engine returned, one client after the other.

    A diverged client has a zero update. Where noise follows here or at the sum, it uploads that like any other, so
    nobody can tell; where the noise was in the steps it is left out (and the caller charges that).
    """
    for k, client in enumerate(clients):
        recipe = recipe_of(task, client)
        if not result.finite[k] and recipe.where in ("nowhere", "step"):
            continue
        if recipe.mechanism == "two-valued":
            key = derive(task.root, "two-valued", now.number, client)
            bits = ldp.encode(
                state.weights + result.delta[k], ranges_of(state), float(now.epsilon or 0), task.layout, key
            )
            yield Upload(client, np.empty(0, np.float32), bits=bits)
            continue
        moment = _own_moment(task, now, client)
        update = sanitise_update(task, moment, recipe, result.delta[k], client, state.weights)
        below = None
        if recipe.clip.rule == "quantile":
            pairs = task.setting.batch * task.setting.steps
            half = (float(result.unclipped[k]) - 0.5) * float(result.examples[k])
            key = derive(task.root, "count", now.number, client)[:16]
            spread = recipe.clip.count_noise * math.sqrt(task.setting.steps)
            if recipe.grid:
                # Counts are multiples of half a layer's share: on a grid that contains these nothing is rounded.
                fine = 2.0**-21 / task.layout.layers
                noised = float(noise.snapped_sum(np.array([half]), fine, spread, key)[0])
            else:
                noised = half + spread * float(noise.normals(key, 0, 1)[0])
            below = 0.5 + noised / pairs
        yield Upload(client, update, below)


def _noised(total: np.ndarray, deviation: float, grid: float, key: bytes) -> np.ndarray:
    """`total` with Gaussian noise of this deviation, discrete if there is a grid."""
    if grid > 0:
        return noise.snapped_sum(total, grid, deviation, key)
    return total + deviation * noise.normals(key, 0, total.size)


def noised_update(recipe: Recipe, now: Round, update: np.ndarray, key: bytes) -> np.ndarray:
    """A clipped update (or, without a clip, any) with the recipe's noise of scale sigma * bound, float32."""
    scale = now.sigmas[0] * (now.bounds[0] if recipe.clip.kind != "none" else 1.0)
    if recipe.grid:
        return _noised(update, scale, spacing(recipe, now.bounds, now.sigmas), key).astype(np.float32)
    return update + np.float32(scale) * noise.normals(key, 0, update.size)


def _own_moment(task: Task, now: Round, client: int) -> Round:
    """The round with the client's own noise multiplier, where it has one."""
    if client not in task.own:
        return now
    return replace(now, sigmas=(task.own[client][1],) * len(now.sigmas))


def sanitise_update(
    task: Task,
    now: Round,
    recipe: Recipe,
    update: np.ndarray,
    client: int,
    start: np.ndarray | None = None,
) -> np.ndarray:
    """What a client does to its finished update before it leaves: clip, noise, prune, select.

    start: the weights that the client started from; needed where the bound is about the whole model.

    Formal guarantee: with target = update the result has the joint bound of `promise.joint_bound` before
    noise (clip.of = weights: start + result has it, so two results differ by at most twice the bound); with
    where = client it carries Gaussian noise of scale sigma * bound (discrete, on the recipe's grid).
    """
    if recipe.clip.of == "weights":
        if start is None:
            raise ValueError("clip.of = weights needs the start weights")
        # In float64: beside large weights float32 would round by more than the bound allows.
        wide = start.astype(np.float64)
        update = clip_update(wide + update, now.bounds[0], recipe, task.layout) - wide
    elif recipe.target == "update" and recipe.clip.kind != "none":
        update = clip_update(update, now.bounds[0], recipe, task.layout)
    if recipe.where == "client":
        update = noised_update(
            recipe, now, update, derive(task.root, "upload-noise", now.number, client)[:16]
        )
    if recipe.prune > 0:
        update = drop_smallest(update, recipe.prune)
    if recipe.share < 1:
        update = share_some(update, recipe, generator(task.root, "share", now.number, client))
    return update.astype(np.float32, copy=False)


def clip_update(update: np.ndarray, bound: float, recipe: Recipe, layout: Layout) -> np.ndarray:
    """The update scaled into the bound, flat or layer by layer."""
    update = update.copy()
    pieces = layout.layer_slices() if recipe.clip.kind == "layer" else (slice(None),)
    limit = bound / math.sqrt(len(pieces)) if recipe.clip.split else bound
    for piece in pieces:
        norm = float(np.linalg.norm(update[piece].astype(np.float64)))
        if norm > limit:
            # One rounding step below the bound, so that float32 never ends above it.
            update[piece] *= np.float32(limit / norm * (1 - 2**-22))
    return update


def drop_smallest(update: np.ndarray, fraction: float) -> np.ndarray:
    """Zero the given fraction of coordinates with the smallest magnitude."""
    count = int(fraction * update.size)
    if count == 0:
        return update
    out = update.copy()
    out[np.argpartition(np.abs(update), count - 1)[:count]] = 0
    return out


def share_some(update: np.ndarray, recipe: Recipe, draw: np.random.Generator) -> np.ndarray:
    """DSSGD: a random subset, `share` of all coordinates, of those above the threshold."""
    large = np.flatnonzero(np.abs(update) > recipe.share_threshold)
    count = min(len(large), int(recipe.share * update.size))
    out = np.zeros_like(update)
    kept = draw.choice(large, count, replace=False) if count else large[:0]
    out[kept] = update[kept]
    return out


def shuffled(task: Task, now: Round, uploads: Iterator[Upload]) -> Iterator[Upload] | list[Upload]:
    """What the server gets of whole updates: with channel = shuffle-models in a random order and without names.

    Formal guarantee: none of its own. The order depends on the key only; updates with Gaussian or other noise that
    is not pure local privacy, or that can be recognised by their content, gain nothing that could be claimed.
    """
    if task.recipe.channel != "shuffle-models" or task.recipe.mechanism == "two-valued":
        return uploads
    everyone = list(uploads)
    order = channel.model_order(len(everyone), derive(task.root, "delays", now.number)) if everyone else []
    return [replace(everyone[k], client=-1) for k in order]


def merge(
    task: Task, state: State, now: Round, uploads: Iterator[Upload] | Sequence[Upload]
) -> tuple[State, dict[str, Any]]:
    """The server's side of a round: sum, noise if it is the server's, step, memories.

    Returns the next state and public facts (number of uploads and the like). Uploads are added in the order
    given, in float64, so that the result does not depend on how they were computed.
    """
    recipe, setting = task.recipe, task.setting
    if recipe.mechanism == "two-valued":
        return _finish(task, state, now, *merge_bits(task, state, now, uploads))
    collect = recipe.aggregate in ("fedmed", "connectivity", "scaffold")
    total = np.zeros(task.layout.size)
    kept: list[Upload] = []
    belows: list[float] = []
    server: dict[str, np.ndarray] = {}
    count = 0
    weakest = max(task.own_epsilon, key=lambda c: task.own_epsilon[c]) if task.own_epsilon else None
    for upload in uploads:
        count += 1
        total += upload.update
        if upload.below is not None:
            belows.append(upload.below)
        if collect:
            kept.append(upload)
        if recipe.heterogeneity and upload.client == weakest:
            server["anchor"] = (state.weights + upload.update).astype(np.float32)
    facts: dict[str, Any] = {"uploads": count}
    if count == 0 and recipe.where not in ("server", "sum"):
        return _finish(task, state, now, state.weights, server, facts)
    key, grid = derive(task.root, "server-noise", now.number)[:16], spacing(recipe, now.bounds, now.sigmas)
    if recipe.where == "server":
        scale = (
            now.sigmas[0]
            * now.bounds[0]
            * {"sum": 1.0, "mean": setting.cohort, "example": math.sqrt(setting.cohort)}[recipe.noise_on]
        )
        mean = _noised(total, scale, grid, key) / setting.cohort
    elif recipe.where == "sum":
        everyone = setting.batch * setting.clients if recipe.sampling != "full" else float(setting.examples)
        scale = now.sigmas[0] * now.bounds[0] * (everyone if recipe.noise_on == "mean" else 1.0)
        mean = _noised(total, scale, grid, key) / everyone * learning_rate_of(task, state.round)
    else:
        mean = total / count
    memory: Arrays = {
        k: v
        for k, v in state.server.items()
        if k in ("momentum", "first", "second") or k.startswith("control")
    }
    if recipe.aggregate == "connectivity" and len(kept) > 1:
        mean, facts["paths"] = _connect(task, state, now, kept)
    elif recipe.aggregate == "fedmed":
        losses, facts["adaptive"] = _mediation(task, state)
        server["public_losses"] = losses
        if facts["adaptive"]:
            mean = aggregate.fedmed_mean(state.weights, np.stack([u.update for u in kept]), task.layout)
    elif recipe.aggregate == "scaffold":
        mean, memory = aggregate.scaffold_states(
            memory,
            np.stack([u.update for u in kept]),
            [u.client for u in kept],
            population=setting.clients,
            steps=setting.steps,
            learning_rate=learning_rate_of(task, state.round),
        )
    weights, memory = aggregate.step(
        "momentum" if task.server_momentum else recipe.aggregate,
        memory,
        state.weights,
        mean,
        server_rate=task.server_learning_rate,
        beta1=task.server_momentum or 0.9,
    )
    server.update(memory)
    if recipe.clip.rule == "quantile" and belows:
        rate, goal = recipe.clip.quantile_rate, recipe.clip.quantile
        share = float(np.clip(np.mean(belows), 0, 1))
        bound = float(state.server["bound"]) * math.exp(-rate * (share - goal))
        server["bound"] = np.array(min(max(bound, 1e-4), 1e4))
        facts["below"] = share
    if recipe.clip.rule == "adaclip":
        gradient = -mean / (learning_rate_of(task, state.round) * setting.steps)
        factor = {"sum": 1 / setting.batch, "mean": 1.0, "example": setting.batch**-0.5}[recipe.noise_on]
        old = adaclip_memory(state)
        new = adaclip.follow(old, gradient, adaclip.mean_noise(old, now.sigmas, factor, count))
        server["adaclip_mean"], server["adaclip_variance"] = new.mean, new.square
    return _finish(task, state, now, weights, server, facts)


def merge_bits(
    task: Task, state: State, now: Round, uploads: Iterator[Upload] | Sequence[Upload]
) -> tuple[np.ndarray, Arrays, dict[str, Any]]:
    """LDP-FL: average the two-valued reports per weight over the channel that the recipe names; new ranges.

    Everything here is post-processing of the reports.
    """
    packed = [upload.bits for upload in uploads if upload.bits is not None]
    facts: dict[str, Any] = {"uploads": len(packed)}
    if not packed:
        return state.weights, {}, facts
    tally = channel.deliver(
        task.recipe.channel,
        np.stack(packed),
        task.layout.size,
        derive(task.root, "delays", now.number),
        loss=task.message_loss,
    )
    weights, memory, more = _average_reports(task, state, now, tally)
    return weights, memory, facts | more


def merge_tally(task: Task, state: State, now: Round, tally: channel.Tally) -> tuple[State, dict[str, Any]]:
    """LDP-FL where a shuffler of its own delivered the reports: the server's side of the round."""
    weights, memory, facts = _average_reports(task, state, now, tally)
    return _finish(task, state, now, weights, memory, facts)


def _average_reports(
    task: Task, state: State, now: Round, tally: channel.Tally
) -> tuple[np.ndarray, Arrays, dict[str, Any]]:
    epsilon = float(now.epsilon or 0)
    average = channel.average(tally, ranges_of(state), epsilon, task.layout, state.weights)
    facts: dict[str, Any] = {
        "bytes_up": tally.payload_bytes,
        "messages": tally.sent,
        "dropped": tally.dropped,
        "late": tally.late,
    }
    memory: dict[str, np.ndarray] = {}
    facts["radius"] = [float(r) for r in state.server["range_radius"]]
    if task.recipe.ranges == "adaptive":
        spread = ldp.average_variance(average, ranges_of(state), epsilon, task.layout, tally.arrived)
        new = ldp.adaptive_ranges(average, task.layout, rule=task.recipe.adapt, noise_variance=spread)
        memory = {"range_centre": np.array(new.centre), "range_radius": np.array(new.radius)}
    return average.astype(np.float32), memory, facts


def ranges_of(state: State) -> ldp.Ranges:
    """The public ranges of the coming round."""
    source = "server-average" if state.round else "agreed"
    return ldp.Ranges(
        tuple(state.server["range_centre"].tolist()), tuple(state.server["range_radius"].tolist()), source
    )


def _mediation(task: Task, state: State) -> tuple[np.ndarray, bool]:
    """FedMed's switch: the last two public losses of the global model, and whether to weigh adaptively.

    Without public data there is no loss to look at, and the weighting is always adaptive."""
    before = state.server.get("public_losses", np.zeros(0))
    if task.public is None:
        return before, True
    loss = evaluate(task.module, state.weights, *task.public, task.loss)["loss"]
    losses = np.append(before[-1:], math.inf if loss is None else loss)
    return losses, aggregate.mediate(losses.tolist())


def _connect(task: Task, state: State, now: Round, kept: list[Upload]) -> tuple[np.ndarray, Any]:
    """Mode connectivity on the (already noised) client models, with the server's public data."""
    if task.public is None:
        raise UserError(
            "aggregate = connectivity needs public data at the server: set validation = 0.1 or more"
        )
    models = state.weights + np.stack([upload.update for upload in kept])
    found = connectivity.merge(
        models,
        task.module,
        task.layout,
        *task.public,
        derive(task.seed, "connectivity", now.number),
        connectivity.Search(curve=task.curve),
        loss=task.loss,
    )
    paths = [
        {
            "level": r.level,
            "pair": list(r.pair),
            "straight": r.straight.tolist(),
            "trained": r.trained.tolist(),
            "steps": r.steps,
        }
        for r in found.paths
    ]
    return found.weights.astype(np.float64) - state.weights, paths


def _finish(
    task: Task, state: State, now: Round, weights: np.ndarray, memory: Arrays, facts: dict[str, Any]
) -> tuple[State, dict[str, Any]]:
    server = {**state.server, **memory}
    done = state.round + 1
    if task.recipe.downlink_sigma > 0:
        key = derive(task.root, "downlink", now.number)[:16]
        spread = np.float32(task.recipe.downlink_sigma * now.bounds[0])
        weights = weights + spread * noise.normals(key, 0, weights.size)
    if task.average > 0 and done > math.floor(task.setting.rounds * (1 - task.average)):
        server["average_sum"] = state.server.get("average_sum", np.zeros(weights.size)) + weights
        server["average_count"] = state.server.get("average_count", np.zeros(1)) + 1
    return State(weights.astype(np.float32), done, server), facts


def model_weights(state: State) -> np.ndarray:
    """The weights to use: the running average where one is kept, else the last ones."""
    if "average_sum" in state.server:
        return (state.server["average_sum"] / state.server["average_count"][0]).astype(np.float32)
    return state.weights
