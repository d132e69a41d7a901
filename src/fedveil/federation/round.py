"""One federated round as functions of plain values. Simulation and deployment call the same ones.

    moment   = moment_of(task, state)             schedules and memories at this round
    plan     = plan_of(task, moment, client)      what a client does
    uploads  = uploads_of(task, moment, …)        what leaves after training, clipped and noised
    state    = merge(task, state, moment, uploads) at the server

State is one plain value; a checkpoint is that value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from torch import nn

from fedveil.errors import UserError
from fedveil.federation import sums
from fedveil.jsons import JsonObject
from fedveil.keys import derive, generator
from fedveil.models.layout import Layout
from fedveil.privacy.schedules import PAPERS_SIGMA, resilient_start
from fedveil.protect import bounded, channel, ldp, udp
from fedveil.protect.aggregate import Mean, Merged, Momentum
from fedveil.protect.clip import Seen, Time, values_of
from fedveil.protect.law import Gaussian, Staircase, kernel_of
from fedveil.protect.memory import NOTHING, Memory, broadcast, from_arrays, to_arrays
from fedveil.protect.noised import Noised, each
from fedveil.protect.place import InSum, Reports, downlink
from fedveil.protect.recipe import Recipe, spacing
from fedveil.protect.setting import Moment, Setting
from fedveil.training.augment import NONE, Augment
from fedveil.training.contract import ClientWork, LocalPlan, LocalResult
from fedveil.training.evaluate import evaluate
from fedveil.training.optimisers import SGD, Optimiser


@dataclass(frozen=True)
class Ranges(Memory):
    """The public ranges of two-valued reports, one per layer."""

    centre: np.ndarray | None = None
    radius: np.ndarray | None = None
    BROADCAST: ClassVar[tuple[str, ...]] = ("centre", "radius")


@dataclass(frozen=True)
class Anchor(Memory):
    """The model that clients are pulled towards (UDP-FL), and one over the budget of its client (0: an infinite one)."""

    weights: np.ndarray | None = None
    inverse: np.ndarray | None = None
    BROADCAST: ClassVar[tuple[str, ...]] = ("weights", "inverse")


@dataclass(frozen=True)
class Averaged(Memory):
    """The sum of the last rounds' models, and how many they are."""

    total: np.ndarray | None = None
    count: int = 0


MEMORIES = ("clip", "aggregate", "mover", "reports", "anchor", "average")


@dataclass(frozen=True)
class State:
    """Weights, rounds done, and what each part remembers between rounds. A checkpoint is this value."""

    weights: np.ndarray
    round: int = 0
    clip: Memory = NOTHING
    aggregate: Memory = NOTHING
    mover: Memory = NOTHING
    reports: Memory = NOTHING
    anchor: Memory = Anchor()
    average: Memory = Averaged()

    def memory(self) -> dict[str, np.ndarray]:
        """All memories as named arrays."""
        return {k: v for name in MEMORIES for k, v in to_arrays(getattr(self, name), name).items()}

    def restored(self, arrays: Mapping[str, np.ndarray]) -> State:
        """This state with the memories that `arrays` holds."""
        known = [name for name in arrays if name.partition(".")[0] not in MEMORIES]
        if known:
            raise UserError(f"'{known[0]}' is not a memory of a run ({', '.join(MEMORIES)})")
        return replace(self, **{name: from_arrays(getattr(self, name), arrays, name) for name in MEMORIES})

    def broadcast(self, client: int) -> dict[str, np.ndarray]:
        """What one client of the coming round gets beside the weights."""
        return {k: v for name in MEMORIES for k, v in broadcast(getattr(self, name), name, client).items()}


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
    loss: str = "cross-entropy"
    augment: Augment = NONE
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0
    average: float = 0.0
    fixed_variance: float | None = None
    measure_mean: bool = False  # a paper counts with the norm of the batch's mean gradient, whatever the noise follows
    own: Mapping[int, tuple[Recipe, float]] = field(default_factory=dict)  # clients with their own budget
    own_epsilon: Mapping[int, float] = field(default_factory=dict)
    public: tuple[np.ndarray, np.ndarray] | None = None
    message_loss: float = 0.0
    clock: channel.Clock | None = None  # what clients say about time (LDP-FL)
    radii: tuple[float, ...] = ()  # of the clients' own ranges, agreed before training, in turn (LDP-FL)
    curve: Literal["polygon", "bezier"] = "polygon"
    smoothness: float | None = None  # L of UDP-FL's closed form, where clients take it
    seed: int = 0  # public choices (connectivity, model shuffling) that need no secrecy
    secure: sums.Terms | None = None  # the sum is opened under masks

    @property
    def measured(self) -> Literal["cross-entropy", "squared"]:
        """The loss that is measured on public rows, whichever one is trained with."""
        return "squared" if np.issubdtype(self.y.dtype, np.floating) else "cross-entropy"

    @property
    def mover(self) -> Mean:
        """Who takes the server's step."""
        return Momentum(beta=self.server_momentum) if self.server_momentum else Mean()


def blank(recipe: Recipe, size: int, rounds: int, mover: Mean = Mean()) -> State:
    """A state without weights, with the kinds of memories that a recipe's parts keep."""
    reports = Ranges() if isinstance(recipe.place, Reports) else NOTHING
    return State(
        np.zeros(0, np.float32),
        clip=recipe.clip.rule.start(recipe.clip, size, rounds),
        aggregate=recipe.aggregate.init(size),
        mover=mover.init(size),
        reports=reports,
    )


def start(task: Task, weights: np.ndarray) -> State:
    """The state before the first round."""
    recipe = task.recipe
    state = blank(recipe, task.layout.size, task.setting.rounds, task.mover)
    if isinstance(recipe.place, Reports):
        from_model = recipe.ranges.from_model
        first = ldp.model_ranges(weights, task.layout) if from_model else ldp.fixed_ranges(task.layout, recipe.ranges.radius)
        state = replace(state, reports=Ranges(np.array(first.centre), np.array(first.radius)))
    return replace(state, weights=weights.astype(np.float32))


def moment_of(task: Task, state: State) -> Moment:
    """Bounds and noise multipliers of the coming round, one per local step."""
    recipe, setting, index = task.recipe, task.setting, state.round
    time = Time(index, setting.rounds, setting.steps)
    bounds = recipe.clip.rule.bounds(recipe.clip, state.clip, time)
    if task.fixed_variance is not None:
        sigmas = tuple(task.fixed_variance / bound for bound in bounds)
    else:
        sigmas = values_of(recipe.sigma, index, setting.rounds, setting.steps)
    # Only a number of reports that is sure to arrive hides one among them.
    all_arrive = task.message_loss == 0 and (task.clock is None or task.clock.punctual)
    sure = not recipe.cohort.random_size and all_arrive and not task.own_epsilon
    arrived = round(setting.cohort) if sure else 1
    return Moment(index + 1, bounds, sigmas, recipe.epsilon, arrived, _weakest(state.anchor))


def _weakest(anchor: Memory) -> float | None:
    """The budget of the client whose model w_max is; None: there is none yet."""
    if not isinstance(anchor, Anchor) or anchor.inverse is None:
        return None
    inverse = float(np.asarray(anchor.inverse).reshape(-1)[0])
    return 1 / inverse if inverse > 0 else math.inf


def learning_rate_of(task: Task, index: int) -> float:
    """Constant, or linear from the first round to the last."""
    if task.learning_rate_end is None or task.setting.rounds < 2:
        return task.learning_rate
    share = index / (task.setting.rounds - 1)
    return task.learning_rate * (1 - share) + task.learning_rate_end * share


def recipe_of(task: Task, client: int) -> Recipe:
    """The client's own recipe (its mechanism may differ), else the run's."""
    return task.own[client][0] if client in task.own else task.recipe


def own_moment(task: Task, now: Moment, client: int) -> Moment:
    """The round with the client's own noise multiplier, where it has one."""
    if client not in task.own:
        return now
    return replace(now, sigmas=(task.own[client][1],) * len(now.sigmas))


def noised_of(task: Task, now: Moment, client: int, size: int) -> tuple[Noised, ...]:
    """The noise of the client's round, on the spacing that the round really uses: one value per step, or one."""
    recipe, moment = recipe_of(task, client), own_moment(task, now, client)
    grid = spacing(recipe, moment.bounds, moment.sigmas)
    return each(lambda one: replace(one, grid=grid), recipe.place.noised(recipe, task.setting, moment, size))


def plan_of(task: Task, now: Moment, client: int, size: int) -> LocalPlan:
    """The local plan of one client: the recipe's parts with this round's values."""
    recipe, steps = recipe_of(task, client), task.setting.steps
    now = own_moment(task, now, client)
    clip, layers = recipe.clip, task.layout.layers
    common: dict[str, Any] = {
        "steps": steps,
        "learning_rate": learning_rate_of(task, now.number - 1),
        "expected_batch": recipe.batches.constant(min(task.setting.batch, size), size),
        "momentum": task.momentum,
        "optimiser": task.optimiser,
        "loss": task.loss,
        "augment": task.augment,
        "proximal": recipe.proximal,
    }
    if recipe.heterogeneity and client in task.own_epsilon and now.weakest is not None:
        common["penalty"] = udp.penalty(task.own_epsilon[client], now.weakest)
    if not recipe.place.of_gradients or not recipe.private:
        return LocalPlan(**common)
    # A fixed deviation is that of the bound whatever the batch: only the papers' count of it follows l2-max.
    follows_largest = recipe.scale.batch and task.fixed_variance is None
    common.update(
        clip=clip.kind,
        clip_norm=clip.norm,
        bounds=tuple(clip.piece(bound, layers) for bound in now.bounds),
        bound_rule="median" if clip.rule.batch else "given",
        sensitivity=recipe.scale.name if follows_largest else "bound",
    )
    if not recipe.place.in_steps:
        # The engine returns minus the plain sum of clipped gradients; noise and step size follow at the sum.
        whole = {"learning_rate": 1.0, "expected_batch": 1.0, "momentum": 0.0, "optimiser": SGD, "only_sum": True}
        return LocalPlan(**{**common, **whole})
    noised = each(lambda one: one.drawing, noised_of(task, now, client, size))
    if not (follows_largest or clip.rule.batch):
        noised = each(lambda one: replace(one, at_norm=0.0), noised)
    return LocalPlan(**common, noised=noised, measure_mean=task.measure_mean)


def work_of(task: Task, state: State, now: Moment, client: int) -> ClientWork:
    """The client's rows for every step, its noise key and its vectors."""
    recipe, rows = recipe_of(task, client), np.asarray(task.rows(client))
    batches = recipe.batches.plain if not recipe.private else recipe.batches
    vectors = dict(recipe.clip.rule.vectors(state.clip))
    control = recipe.aggregate.control(state.aggregate, client, task.layout.size)
    if control is not None:
        vectors["control"] = control
    anchor = state.anchor.weights if isinstance(state.anchor, Anchor) else None
    if recipe.heterogeneity and anchor is not None:
        vectors["anchor"] = anchor
    return ClientWork(
        client=client,
        rows=batches.draw(rows, task.setting.batch, task.setting.steps, task.root, now.number, client),
        noise_key=derive(task.root, "noise", now.number, client)[:16],
        **vectors,
    )


def noise_errors(task: Task, now: Moment, client: int, size: int, measure: bool = True) -> dict[str, float]:
    """The l1 error that a round's noise puts into one client's update: expected for the sum of its steps, the
    papers' bound (steps times one step), and with `measure` what this client's noise really was (private).

    Empty where the noise is not in the steps, differs from step to step, or is scaled by the data. Control
    variates, momentum and proximal terms are left out: this is the noise itself, times rate over batch. Where an update is no
    such multiple of its gradients (Adam, the closed form) only the order of the extra rounds is left (UDP-FL's Theorem 4).
    """
    recipe = recipe_of(task, client)
    plan = plan_of(task, now, client, size)
    values = noised_of(task, now, client, size) if recipe.place.in_steps else ()
    if len(set(values)) != 1 or not recipe.noise_on.once or recipe.clip.rule.rescales:
        return {}
    one = values[0]
    if one.follows or not (one.scale > 0 and math.isfinite(one.bound)) or not kernel_of(one.law):
        return {}
    # Of Staircase noise, but not of the joint one.
    errors = {"extra_rounds_order": udp.extra_rounds(one.shape, one.scale)} if type(one.law) is Staircase else {}
    if task.optimiser != SGD or task.smoothness is not None:
        return errors
    factor = plan.learning_rate / plan.expected_batch
    stairs = one.law if isinstance(one.law, Staircase) else None
    width = (one.shape, one.scale) if stairs else (1.0, one.scale)  # of `expected_l1`: only their product counts without stairs
    name: Any = kernel_of(one.law)
    told = udp.expected_l1(name, *width, task.layout.size, plan.steps, stairs.nu if stairs else None)
    errors |= {"expected_l1": factor * told.sum, "expected_l1_bound": factor * told.bound}
    if measure and plan.steps * task.layout.size <= 20_000_000:  # drawing it again must stay a trifle
        key = derive(task.root, "noise", now.number, client)[:16]
        total = np.zeros(task.layout.size)
        for step in range(plan.steps):
            total += one.add(np.zeros(total.size), key, step)
        errors["measured_l1"] = factor * float(np.abs(total).sum())
    return errors


def resilience(task: Task, now: Moment, deviation: object) -> dict[str, float | bool]:
    """P3's rule for a resilient start of a falling sigma under l2-max, from the first round's noise. Private, as norms are:
    S follows the gradients. Empty where the rule says nothing.

    deviation: of the noise on the clients' sums, the mean over steps and clients.
    """
    recipe, setting = task.recipe, task.setting
    follows = recipe.scale.batch and task.fixed_variance is None and isinstance(recipe.law, Gaussian) and recipe.noise_on.once
    last = values_of(recipe.sigma, setting.rounds - 1, setting.rounds, setting.steps)[-1]
    if now.number != 1 or not follows or not last < now.sigmas[0] or not isinstance(deviation, float) or not deviation > 0:
        return {}
    sensitivity = deviation / (sum(now.sigmas) / len(now.sigmas))
    asked = resilient_start(recipe.clip.piece(now.bounds[0], setting.layers), PAPERS_SIGMA, sensitivity)
    return {"dynamic_sensitivity": sensitivity, "resilient_start": asked, "resilient_start_met": now.sigmas[0] >= asked}


@dataclass(frozen=True)
class Upload:
    """What leaves one client: the sanitised update and, for some recipes, a noised count or packed bits."""

    client: int
    update: np.ndarray
    below: float | None = None  # noised share of unclipped examples
    bits: np.ndarray | None = None


def uploads_of(
    task: Task, now: Moment, state: State, clients: Sequence[int], result: LocalResult
) -> Iterator[Upload]:
    """Sanitise what the engine returned, one client after the other.

    A diverged client has a zero update. Where noise follows here or at the sum, it uploads that like any other, so
    nobody can tell; where the noise was in the steps it is left out (and the caller charges that).
    """
    for k, client in enumerate(clients):
        recipe = recipe_of(task, client)
        if not result.finite[k] and recipe.place.shows_divergence:
            continue
        if isinstance(recipe.place, Reports):
            key = derive(task.root, "two-valued", now.number, client)
            bits = ldp.encode(
                state.weights + result.delta[k], own_ranges(task, state, client), float(now.epsilon or 0), task.layout, key
            )
            yield Upload(client, np.empty(0, np.float32), bits=bits)
            continue
        update = sanitise_update(task, now, result.delta[k], client, state.weights)
        half = (float(result.unclipped[k]) - 0.5) * float(result.examples[k])
        key = derive(task.root, "count", now.number, client)[:16]
        steps, exact = task.setting.steps, bool(recipe.fineness)
        noised = recipe.clip.rule.count(half, steps, task.layout.layers, key, exact)
        below = None if noised is None else 0.5 + noised / (task.setting.batch * steps)
        yield Upload(client, update, below)


def sanitise_update(
    task: Task, now: Moment, update: np.ndarray, client: int, start: np.ndarray | None = None
) -> np.ndarray:
    """What a client does to its finished update before it leaves: clip, noise, prune, select.

    start: the weights that the client started from; needed where the bound is about the whole model.

    Formal guarantee: where updates are protected the result has the joint bound of `Clip.joint` before noise (clip.of =
    weights: start + result has it, so two results differ by at most twice the bound); where the noise is the client's it
    is that of `AtClient.noised`.
    """
    recipe = recipe_of(task, client)
    if recipe.clip.of_weights:
        if start is None:
            raise ValueError("clip.of = weights needs the start weights")
        # In float64: beside large weights float32 would round by more than the bound allows.
        bounded.check_start(start, now.bounds[0])
        wide = start.astype(np.float64)
        update = clip_update(wide + update, now.bounds[0], recipe, task.layout) - wide
    elif recipe.place.of_updates and recipe.clip.bounded:
        update = clip_update(update, now.bounds[0], recipe, task.layout)
    if recipe.place.own_noise and not recipe.place.in_steps:
        (noised,) = noised_of(task, now, client, 1)
        key = derive(task.root, "upload-noise", now.number, client)[:16]
        update = noised.add(update, key)
    if task.smoothness is not None:
        update = bent(task, now, update, client, start)
    draw = generator(task.root, "share", now.number, client) if recipe.thin.share < 1 else None
    return recipe.thin.of(np.asarray(update, np.float32), draw)


def bent(task: Task, now: Moment, update: np.ndarray, client: int, start: np.ndarray | None) -> np.ndarray:
    """The update moved along UDP-FL's closed-form curve from the public model to the client's own (its Eq. 6, as printed).

    Formal guarantee: post-processing. The update carries its noise already (configurations where it does not are refused), and
    the place on the curve is a coin of its own.
    """
    if start is None or task.smoothness is None:
        raise ValueError("the closed form needs the start weights and a smoothness")
    wide = start.astype(np.float64)
    place = float(generator(task.root, "bend", now.number, client).random())
    return udp.closed_form_update(wide, wide + update, place, task.smoothness) - wide


def clip_update(update: np.ndarray, bound: float, recipe: Recipe, layout: Layout) -> np.ndarray:
    """The update scaled into the bound, flat or layer by layer.

    Formal guarantee: that of `bounded.clip_vector`.
    """
    pieces = recipe.clip.pieces(layout.layer_slices())
    limit = recipe.clip.piece(bound, len(pieces))
    return bounded.clip_vector(update, limit, pieces, recipe.clip.norm)


def shuffled(task: Task, now: Moment, uploads: Iterator[Upload]) -> Iterator[Upload] | list[Upload]:
    """What the server gets of whole updates: where senders are hidden, in a random order and without names.

    Formal guarantee: none of its own. The order depends on the key only; updates with Gaussian or other noise that
    is not pure local privacy, or that can be recognised by their content, gain nothing that could be claimed.
    """
    if not task.recipe.channel.hides_senders or isinstance(task.recipe.place, Reports):
        return uploads
    everyone = list(uploads)
    order = channel.model_order(len(everyone), derive(task.root, "delays", now.number)) if everyone else []
    return [replace(everyone[k], client=-1) for k in order]


@dataclass
class _Collected:
    """The uploads of a round, summed in the order given, in float64."""

    total: np.ndarray
    count: int = 0
    kept: list[Upload] = field(default_factory=list)
    belows: list[float] = field(default_factory=list)
    anchor: Anchor | None = None


def _collect(task: Task, state: State, uploads: Iterator[Upload] | Sequence[Upload]) -> _Collected:
    recipe = task.recipe
    weakest: tuple[float, int] | None = None  # largest budget among the uploads, then the lowest number
    found = _Collected(np.zeros(task.layout.size))
    for upload in uploads:
        found.count += 1
        found.total += upload.update
        if upload.below is not None:
            found.belows.append(upload.below)
        if recipe.aggregate.looks_inside or task.secure:
            found.kept.append(upload)
        if recipe.heterogeneity and upload.client in task.own_epsilon:
            rank = (task.own_epsilon[upload.client], -upload.client)
            if weakest is None or rank > weakest:
                weakest = rank
                found.anchor = Anchor((state.weights + upload.update).astype(np.float32), np.array([1 / rank[0]]))
    return found


def merge(
    task: Task, state: State, now: Moment, uploads: Iterator[Upload] | Sequence[Upload]
) -> tuple[State, JsonObject]:
    """The server's side of a round: sum, noise if it is the server's, step, memories.

    Returns the next state and public facts (number of uploads and the like). Uploads are added in the order
    given, in float64, so that the result does not depend on how they were computed.
    """
    recipe = task.recipe
    if isinstance(recipe.place, Reports):
        return merge_reports(task, state, now, uploads)
    found = _collect(task, state, uploads)
    facts: JsonObject = {"uploads": found.count}
    if found.anchor is not None:
        state = replace(state, anchor=found.anchor)
    if found.count == 0 and recipe.place.open_uploads:
        return _finish(task, state, now, state.weights, facts)
    mean, more = _mean(task, state, now, found)
    return _moved(task, state, now, mean, found, facts | more)


def merge_opened(
    task: Task, state: State, now: Moment, total: np.ndarray, count: int
) -> tuple[State, JsonObject]:
    """The server's side of a round whose sum was opened under masks: `total` has the noise of its `count` nodes in it."""
    mean = _over_everyone(task, state, total)
    return _moved(task, state, now, mean, _Collected(total, count), {"uploads": count})


def _moved(
    task: Task, state: State, now: Moment, mean: np.ndarray, found: _Collected, facts: JsonObject
) -> tuple[State, JsonObject]:
    """The next state after a step along the mean; post-processing of what was released."""
    recipe = task.recipe
    merged = _merged(task, state, now, mean, found.kept)
    direction, memory, more = recipe.aggregate.direction(state.aggregate, merged)
    facts = facts | more
    if task.server_momentum:
        weights, mover = task.mover.move(state.mover, state.weights, direction, task.server_learning_rate)
        state = replace(state, aggregate=memory, mover=mover)
    else:
        weights, memory = recipe.aggregate.move(memory, state.weights, direction, task.server_learning_rate)
        state = replace(state, aggregate=memory)
    clip, more = recipe.clip.rule.next(state.clip, _seen(task, state, now, direction, found))
    return _finish(task, replace(state, clip=clip), now, weights, facts | more)


def _mean(
    task: Task, state: State, now: Moment, found: _Collected
) -> tuple[np.ndarray, JsonObject]:
    """The mean of the uploads and public facts; where the noise is the sum's, with that noise and over a constant number."""
    recipe, setting = task.recipe, task.setting
    if recipe.place.open_uploads:
        return found.total / found.count, {}
    (noised,) = noised_of(task, now, -1, setting.examples)
    facts: JsonObject = {}
    if task.secure is not None:
        updates = {upload.client: upload.update for upload in found.kept}
        total, facts = sums.opened(task, now, noised, state.weights, updates)
    else:
        total = noised.add(found.total, derive(task.root, "server-noise", now.number)[:16])
    return _over_everyone(task, state, total), facts


def _over_everyone(task: Task, state: State, total: np.ndarray) -> np.ndarray:
    """A noised sum over the number that was planned, whoever is in it; of gradients, times the learning rate."""
    recipe, setting = task.recipe, task.setting
    if isinstance(recipe.place, InSum):
        return total / recipe.place.everyone(recipe, setting) * learning_rate_of(task, state.round)
    return total / setting.cohort


def _merged(task: Task, state: State, now: Moment, mean: np.ndarray, kept: Sequence[Upload]) -> Merged:
    def public_loss(weights: np.ndarray) -> float | None:
        assert task.public is not None
        return evaluate(task.module, weights, *task.public, task.measured)["loss"]

    return Merged(
        start=state.weights,
        mean=mean,
        layout=task.layout,
        population=task.setting.clients,
        steps=task.setting.steps,
        learning_rate=learning_rate_of(task, state.round),
        number=now.number,
        updates=[upload.update for upload in kept],
        clients=[upload.client for upload in kept],
        public_loss=None if task.public is None else public_loss,
        public=task.public,
        module=task.module,
        loss=task.measured,
        curve=task.curve,
        seed=task.seed,
    )


def _seen(task: Task, state: State, now: Moment, mean: np.ndarray, found: _Collected) -> Seen:
    """A finished round as the clip's rule may see it."""
    rule, setting = task.recipe.clip.rule, task.setting
    deviation = 0.0
    if rule.rescales and found.count:
        size = max(int(setting.batch) + 1, setting.examples)
        batch = task.recipe.batches.constant(setting.batch, size)
        each = [one.deviation / batch for one in noised_of(task, now, -1, size)]
        deviation = math.sqrt(sum(s * s for s in each) / len(each) / (len(each) * found.count))
    gradient = -mean / (learning_rate_of(task, state.round) * setting.steps)
    return Seen(gradient, found.belows, deviation)


def merge_reports(
    task: Task, state: State, now: Moment, uploads: Iterator[Upload] | Sequence[Upload]
) -> tuple[State, JsonObject]:
    """LDP-FL: average the two-valued reports per weight over the channel that the recipe names; new ranges.

    Everything here is post-processing of the reports.
    """
    sent = [(upload.client, upload.bits) for upload in uploads if upload.bits is not None]
    facts: JsonObject = {"uploads": len(sent)}
    if not sent:
        return _finish(task, state, now, state.weights, facts)
    timing = None if task.clock is None else task.clock.timing([client for client, _ in sent])
    tally = channel.deliver(
        task.recipe.channel.name,
        np.stack([bits for _, bits in sent]),
        task.layout.size,
        derive(task.root, "delays", now.number),
        timing,
        loss=task.message_loss,
        radii=[task.radii[client % len(task.radii)] for client, _ in sent] if task.radii else None,
    )
    if timing is not None:
        facts |= {"slowest_seconds": timing.slowest(), "last_message_seconds": tally.seconds}
        facts |= {"delay_seconds": timing.spread} if task.recipe.channel.hides_senders else {}
    following, more = merge_tally(task, state, now, tally)
    return following, facts | more


def merge_tally(task: Task, state: State, now: Moment, tally: channel.Tally) -> tuple[State, JsonObject]:
    """LDP-FL: the server's side of a round whose reports were delivered, by our channel or by a shuffler of its own."""
    epsilon, ranges = float(now.epsilon or 0), ranges_of(state)
    average = channel.average(tally, ranges, epsilon, task.layout, state.weights)
    facts: JsonObject = {
        "bytes_up": tally.payload_bytes,
        "messages": tally.sent,
        "dropped": tally.dropped,
        "late": tally.late,
        "radius": sorted(set(task.radii)) if task.radii else [float(r) for r in ranges.radius],
    }
    if task.recipe.ranges.adaptive:
        spread = ldp.average_variance(average, ranges, epsilon, task.layout, tally.arrived)
        new = ldp.adaptive_ranges(average, task.layout, rule=task.recipe.ranges.adapt, noise_variance=spread)
        state = replace(state, reports=Ranges(np.array(new.centre), np.array(new.radius)))
    return _finish(task, state, now, average.astype(np.float32), facts)


def ranges_of(state: State) -> ldp.Ranges:
    """The public ranges of the coming round."""
    memory = state.reports
    assert isinstance(memory, Ranges) and memory.centre is not None and memory.radius is not None
    source = "server-average" if state.round else "agreed"
    return ldp.Ranges(tuple(memory.centre.tolist()), tuple(memory.radius.tolist()), source)


def own_ranges(task: Task, state: State, client: int) -> ldp.Ranges:
    """The ranges that one client reports in: the run's, with the radius that was agreed for it (LDP-FL's Corollary 1).

    Formal guarantee: none is lost, because the radius is in the configuration: it depends on nobody's data.
    """
    ranges = ranges_of(state)
    if not task.radii:
        return ranges
    return replace(ranges, radius=(task.radii[client % len(task.radii)],) * len(ranges.radius))


def _finish(
    task: Task, state: State, now: Moment, weights: np.ndarray, facts: JsonObject
) -> tuple[State, JsonObject]:
    done = state.round + 1
    down = downlink(task.recipe, task.setting, now)
    if down is not None:
        weights = down.add(weights, derive(task.root, "downlink", now.number)[:16])
    if task.average > 0 and done > math.floor(task.setting.rounds * (1 - task.average)):
        before = state.average if isinstance(state.average, Averaged) else Averaged()
        total = (0.0 if before.total is None else before.total) + weights.astype(np.float64)
        state = replace(state, average=Averaged(total, before.count + 1))
    return replace(state, weights=weights.astype(np.float32), round=done), facts


def model_weights(state: State) -> np.ndarray:
    """The weights to use: the running average where one is kept, else the last ones."""
    average = state.average
    if isinstance(average, Averaged) and average.total is not None:
        return (average.total / average.count).astype(np.float32)
    return state.weights
