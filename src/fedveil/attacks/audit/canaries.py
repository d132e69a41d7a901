"""Canaries: replay a run's recipe with inserted units whose presence an observer tries to detect.

Each canary owns a *slot*: one input feature that no other unit uses, feeding its own column of the model's first dense
layer, or of an extra one beside a model that the compiled engine does not know. Its gradient is far above any clip bound
and lies in that column, so after clipping it is a worst-case contribution, and no two canaries (and no real data) meet
in a coordinate. A fair coin of its own decides whether a canary is in or replaced by a row without a slot (zero-out
neighbours, so that client sizes, sampling rates and ledger stay those of the run). The observer's score is the inner
product of the canary's gradient direction with what was released, summed over the run.

What no promise is about is put aside, since it would only blur the scores: learning rates are chosen so that the slots
keep their gradient through the run (they scale contribution and noise alike), the server takes the plain mean, and
where whole clients are protected a client takes one step on all its rows (`_bare`). Everything else (clip, noise, engine
code, sampling, cohorts) is the run's.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.attacks.audit.bounds import Audit, Scores, judge
from fedveil.errors import UserError
from fedveil.federation.config import RunConfig
from fedveil.federation.loop import Prepared, cohort_of, header_of, prepare, release_of, train_cohort
from fedveil.federation.round import (
    State,
    Task,
    Upload,
    learning_rate_of,
    merge,
    moment_of,
    own_moment,
    plan_of,
    ranges_of,
    recipe_of,
    start,
    uploads_of,
    work_of,
)
from fedveil.federation.view import result_of
from fedveil.keys import generator
from fedveil.models import compile
from fedveil.models.chain import is_chain
from fedveil.models.compile import Beside
from fedveil.models.layout import flatten, layout_of
from fedveil.privacy.events import Observer, Unit
from fedveil.privacy.ledger import Ledger
from fedveil.protect import ldp
from fedveil.protect.aggregate import Mean
from fedveil.protect.law import Gaussian
from fedveil.protect.place import InSum, Reports
from fedveil.protect.recipe import Recipe
from fedveil.protect.sampling import FullBatches
from fedveil.protect.setting import Moment
from fedveil.training import pool
from fedveil.training.reference import example_gradient

LOUD = 1000.0  # size of a slot's feature: its gradient dwarfs the rest of the example's
REAL_ROWS = 500  # distinct rows of the run's data that keep the canaries company


class Slots(nn.Module):
    """The user's model plus a dense layer on the slots; examples without a slot see the model alone."""

    def __init__(self, inner: nn.Module, shape: tuple[int, ...], outputs: int, slots: int) -> None:
        super().__init__()
        self.inner, self.shape, self.width = inner, tuple(shape), math.prod(shape)
        self.slots = nn.Linear(slots, outputs, bias=False)
        nn.init.zeros_(self.slots.weight)

    def forward(self, x: Tensor) -> Tensor:
        plain, slots = x[:, : self.width], x[:, self.width :]
        return self.inner(plain.reshape(len(x), *self.shape)) + self.slots(slots)


@dataclass(frozen=True, eq=False)
class Staged:
    """A prepared run with canaries on stage."""

    prepared: Prepared
    included: np.ndarray  # [m] the coins
    host: np.ndarray  # [m] client of each canary
    direction: np.ndarray  # [height] of a canary's gradient in its slot's column
    columns: np.ndarray  # [height, m] places of each slot's weights in the flat vector


def unit_of(prepared: Prepared) -> tuple[Unit, Observer]:
    """Which unit the recipe protects, and the first observer who gets the noised release."""
    recipe = prepared.task.recipe
    if isinstance(recipe.place, Reports):
        return "reported-weight", "server"
    return recipe.place.unit, "server" if recipe.place.open_uploads else "public"


def _participations(prepared: Prepared, rounds: int, most: int | None) -> np.ndarray:
    """Clients by how often they are drawn, most often first: the ones whose promise is spent most. Nobody is taken
    who is drawn oftener than `most` times: a run's ledger says nothing about that."""
    counts = np.zeros(prepared.partition.clients, np.int64)
    for number in range(1, rounds + 1):
        counts[cohort_of(prepared, number)] += 1
    order = np.argsort(-counts, kind="stable")
    return order if most is None else order[counts[order] <= most]


def _widened(module: nn.Module, width: int, slots: int) -> tuple[nn.Sequential, str] | None:
    """The same net with slots as further inputs of its first layer, if that is dense: then any engine can train it.
    Returns the net and the name of the widened layer."""
    if not isinstance(module, nn.Sequential):
        return None
    parts = dict(module.named_children())
    name = next((n for n, layer in parts.items() if not isinstance(layer, nn.Flatten)), None)
    first = parts.get(name or "")
    if not isinstance(first, nn.Linear) or first.in_features != width:
        return None
    wide = _with_slots(first, slots)
    rest = [(n, layer) for n, layer in parts.items() if n != name and not isinstance(layer, nn.Flatten)]
    return nn.Sequential(OrderedDict([("first", wide), *((f"next{n}", layer) for n, layer in rest)])), "first"


def _with_slots(layer: nn.Linear, slots: int) -> nn.Linear:
    wide = nn.Linear(layer.in_features + slots, layer.out_features, bias=layer.bias is not None)
    with torch.no_grad():
        wide.weight.zero_()
        wide.weight[:, : layer.in_features] = layer.weight
        if layer.bias is not None:
            wide.bias.copy_(layer.bias)
    return wide


def _past_images(module: nn.Module, shape: tuple[int, ...], slots: int) -> tuple[Beside, str] | None:
    """The same net with slots as further inputs of the dense layer that follows its Flatten, if the compiled engine
    knows such a net."""
    if len(shape) != 3 or compile.why_not(module) is not None:
        return None
    steps = compile.steps_of(module)
    if not is_chain(steps):
        return None
    layers = [step.layer for step in steps]
    at = next((k for k, layer in enumerate(layers) if isinstance(layer, nn.Flatten)), 0)
    if at == 0 or at + 1 == len(layers) or not isinstance(layers[at + 1], nn.Linear):
        return None
    first = _with_slots(layers[at + 1], slots)  # type: ignore[arg-type]
    head = nn.Sequential(
        OrderedDict([("first", first), *((f"next{k}", m) for k, m in enumerate(layers[at + 2 :]))])
    )
    return Beside(nn.Sequential(*layers[:at]), head, shape), "head.first"


def _bare(recipe: Recipe, unit: Unit) -> Recipe:
    """The recipe without what no promise is about: it would only hide how much of a canary arrived. How clients come to
    an update is no part of a promise for whole clients, so one step on all rows will do there."""
    bare = replace(recipe, aggregate=Mean(), proximal=0.0, heterogeneity=False)
    return replace(bare, batches=FullBatches()) if unit == "client" else bare


def stage(
    prepared: Prepared, canaries: int, seed: int, *, rounds: int | None = None, most: int | None = None,
    among: Sequence[int] | None = None,
) -> Staged:  # fmt: skip
    """Build the probe: slots beside the model, canaries in place of some of the clients' rows.

    rounds: how many will be played. most: how often the promise says that a client takes part at most. among: the clients that
    may host canaries (default: all)."""
    task = prepared.task
    if isinstance(task.recipe.place, Reports):
        raise UserError(
            "canary slots need additive noise; LDP-FL's two-valued reports are not audited this way."
        )
    unit, _ = unit_of(prepared)
    draw = generator(seed, "canaries")
    hosts = _hosts(prepared, canaries, draw, rounds, most, among)
    included = draw.random(len(hosts)) < 0.5
    module, columns = _slotted(prepared, len(hosts))
    layout = layout_of(module)
    kept = draw.choice(len(task.x), min(REAL_ROWS, len(task.x)), replace=False)
    x, y = _inputs(prepared, kept, len(hosts))
    learning_rate, server_learning_rate = _rates(prepared, hosts)
    staged_task = replace(
        task, module=module, layout=layout, x=x, y=y, rows=_rows_of(prepared, hosts, included, len(kept), seed),
        setting=replace(task.setting, layers=layout.layers, dimension=layout.size,
                        steps=1 if unit == "client" else task.setting.steps),
        recipe=_bare(task.recipe, unit), own={c: (_bare(r, unit), sigma) for c, (r, sigma) in task.own.items()},
        learning_rate_end=None, momentum=0.0, average=0.0, server_momentum=0.0,
        learning_rate=learning_rate, server_learning_rate=server_learning_rate,
    )  # fmt: skip
    initial = flatten(module)
    _, gradient = example_gradient(
        module, layout, torch.as_tensor(initial), x[len(kept)], y[len(kept)], staged_task.loss
    )
    column = gradient.numpy()[columns[:, 0]]
    first = start(staged_task, initial)
    plan = plan_of(staged_task, moment_of(staged_task, first), 0, prepared.partition.size(0))
    engine, why = pool.choose(
        module, plan, prepared.config.engine if prepared.config.engine != "native" else "auto", like=(x, y)
    )
    config = prepared.config.model_copy(update={"engine": engine})
    return Staged(
        replace(prepared, config=config, task=staged_task, initial=initial, engine=engine, engine_reason=why),
        included, np.asarray(hosts), column / np.linalg.norm(column), columns,
    )  # fmt: skip


def _hosts(
    prepared: Prepared, canaries: int, draw: np.random.Generator, rounds: int | None, most: int | None,
    among: Sequence[int] | None,
) -> np.ndarray:  # fmt: skip
    """The client of each canary: a client is one, or has room for as many as half of its rows."""
    dealt = prepared.partition
    unit, observer = unit_of(prepared)
    # A promise to whoever sees only the release may count on a secret cohort, so hosts must not be chosen by looking at it.
    if observer == "public":
        taking_part = draw.permutation(dealt.clients)
    else:
        taking_part = _participations(prepared, rounds or prepared.task.setting.rounds, most)
    if among is not None:
        taking_part = taking_part[np.isin(taking_part, among)]
    if unit == "client":
        hosts = taking_part[:canaries]
    else:
        room = [dealt.size(int(c)) // 2 for c in taking_part]
        hosts = np.repeat(taking_part, room)[:canaries]
    if canaries < 2:
        raise UserError(f"--canaries {canaries}: an audit needs at least two.")
    if len(hosts) < 2:
        raise UserError(f"no room for canaries: {dealt.clients} clients; an audit needs at least two.")
    return hosts


def _slotted(prepared: Prepared, count: int) -> tuple[nn.Module, np.ndarray]:
    """The model with `count` slots beside it, and the flat numbers of each slot's weights [outputs, count]."""
    dataset, net = prepared.dataset, prepared.task.module
    outputs = 1 if dataset.classes is None else int(dataset.classes)
    wide = _widened(net, math.prod(dataset.shape), count) or _past_images(net, dataset.shape, count)
    module, layer = wide if wide else (Slots(net, dataset.shape, outputs, count), "slots")
    layout = layout_of(module)
    offset = layout.offsets[layout.names.index(f"{layer}.weight")]
    shape = module.get_parameter(f"{layer}.weight").shape
    return module, offset + (np.arange(shape[0] * shape[1]).reshape(shape)[:, -count:])


def _inputs(prepared: Prepared, kept: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the probe: the kept real ones, then one loud slot for each canary, then an empty row for those left out."""
    task, width = prepared.task, math.prod(prepared.dataset.shape)
    x = np.zeros((len(kept) + count + 1, width + count), np.float32)
    y = np.zeros(len(x), task.y.dtype)
    x[: len(kept), :width], y[: len(kept)] = task.x[kept].reshape(len(kept), -1), task.y[kept]
    x[len(kept) + np.arange(count), width + np.arange(count)] = LOUD
    if prepared.dataset.classes is None:
        y[len(kept) :] = 100.0  # far from any prediction
    return x, y


def _rows_of(
    prepared: Prepared, hosts: np.ndarray, included: np.ndarray, kept: int, seed: int
) -> Callable[[int], np.ndarray]:
    """Each client's rows of the probe: its canaries (or the empty row), in the company of real rows."""
    unit, _ = unit_of(prepared)
    empty = kept + len(hosts)
    mine: dict[int, list[int]] = {}
    for canary, client in enumerate(hosts.tolist()):
        mine.setdefault(client, []).append(kept + canary if included[canary] else empty)

    def rows(client: int) -> np.ndarray:
        own = np.array(mine.get(client, []), np.int64)
        size = prepared.partition.size(client)
        if unit == "client" and len(own):
            return np.full(size, own[0])
        filler = generator(seed, "company", client).integers(0, kept, size - len(own))
        return np.concatenate([own, filler])

    return rows


def _rates(prepared: Prepared, hosts: np.ndarray) -> tuple[float, float]:
    """Learning rates of clients and server at which a slot stays as loud as it began, whatever noise and canaries do to it."""
    task, dealt = prepared.task, prepared.partition
    unit, _ = unit_of(prepared)
    now = moment_of(task, start(task, prepared.initial))
    bound = max(now.bounds)
    if unit == "client":
        return 20 * bound / LOUD, 1e-6
    noised = task.recipe.place.noised(task.recipe, task.setting, now, dealt.size(0))
    noise = max(1e-3 * bound, *(one.deviation for one in noised))
    steps = task.setting.steps * task.setting.rounds
    size = min(dealt.size(int(c)) for c in np.unique(hosts))
    batch = min(task.setting.batch, size)
    # what noise and the canary's own gradient can move a slot's output in the whole run
    drift = LOUD * (noise * math.sqrt(steps) + bound * steps * batch / size) / batch
    return min(task.learning_rate, 0.02 / drift), 1.0


def releases(staged: Staged, rounds: int) -> Iterator[tuple[State, dict[int, np.ndarray], np.ndarray]]:
    """Play the rounds: (state before the round, uploads by client, mean update of the model).

    Only clients that host canaries train: nobody else's gradient reaches a slot, and noise is added all the same."""
    prepared = staged.prepared
    state = start(prepared.task, prepared.initial)
    for _ in range(rounds):
        now = moment_of(prepared.task, state)
        clients = np.intersect1d(cohort_of(prepared, now.number), staged.host)
        uploads: dict[int, np.ndarray] = {}

        def sent(
            now: Moment = now, state: State = state, clients: np.ndarray = clients,
            uploads: dict[int, np.ndarray] = uploads,
        ) -> Iterator[Upload]:  # fmt: skip
            for chunk, result in train_cohort(prepared, state, now, clients):
                if not result.finite.all():
                    raise UserError("the audited run diverged, so the audit says nothing about it.")
                for upload in uploads_of(prepared.task, now, state, chunk, result):
                    uploads[upload.client] = _slots(staged, _as_clipped(prepared, state, now, upload))
                    yield upload

        following, _ = merge(prepared.task, state, now, sent())
        yield state, uploads, _slots(staged, following.weights - state.weights)
        state = following


def _as_clipped(prepared: Prepared, state: State, now: Moment, upload: Upload) -> np.ndarray:
    """An upload in the space where it was clipped and noised: AdaClip maps back, NbAFL clips weights, not updates."""
    task = prepared.task
    if task.recipe.clip.rule.rescales:
        work = work_of(task, state, now, upload.client)
        assert work.shift is not None and work.scale is not None
        moved = learning_rate_of(task, state.round) * task.setting.steps * work.shift
        return (upload.update + moved) / work.scale
    return upload.update + state.weights if task.recipe.clip.of_weights else upload.update


def _slots(staged: Staged, vector: np.ndarray) -> np.ndarray:
    """Each canary's projection: minus the inner product of its direction with its column [m]."""
    return -staged.direction @ vector[staged.columns]


def score(staged: Staged, promise: Prepared, rounds: int) -> tuple[Scores, float]:
    """Scores of all canaries in units of the promised noise, and the threshold, fixed by the promise alone.

    The threshold is half the score that an included canary is expected to have."""
    prepared, task = staged.prepared, promise.task
    _, observer = unit_of(promise)
    hosts = staged.host.tolist()
    total, looks, expected = np.zeros(len(hosts)), np.zeros(len(hosts)), np.zeros(len(hosts))
    sizes = {client: prepared.partition.size(client) for client in set(hosts)}
    for state, uploads, mean in releases(staged, rounds):
        now = moment_of(task, state)
        rate = learning_rate_of(prepared.task, state.round)
        units = {client: _units(staged, task, now, client, size) for client, size in sizes.items()}
        noise, signal, batch = np.array([units[client] for client in hosts]).T
        if observer == "public":
            everybody = task.setting.cohort
            if isinstance(task.recipe.place, InSum):
                everybody = task.recipe.place.everyone(task.recipe, task.setting) / rate
            seen, present = mean / prepared.task.server_learning_rate * everybody, np.ones(len(hosts), bool)
        else:
            present = np.isin(staged.host, list(uploads))
            seen = np.array([uploads[c][k] if c in uploads else 0.0 for k, c in enumerate(hosts)])
            if task.recipe.place.in_steps:
                seen = seen * batch / rate
        total += np.where(present, seen / noise, 0.0)
        expected += np.where(present, signal / noise, 0.0)
        looks += present
    looked = looks > 0
    if not looked.any():
        raise UserError("no client with a canary takes part in these rounds: replay more (--rounds).")
    values = total[looked] / np.sqrt(looks[looked])
    threshold = float(np.median(expected[looked] / np.sqrt(looks[looked]))) / 2
    chosen = staged.included[looked]
    return Scores(values[chosen], values[~chosen]), threshold


def _units(staged: Staged, task: Task, now: Moment, client: int, size: int) -> tuple[float, float, float]:
    """What the promise says of one round of a client: deviation of the noise on the sum, what a canary adds to that sum
    on average, and the batch that the sum is divided by."""
    recipe, setting = recipe_of(task, client), task.setting
    batch = recipe.batches.constant(setting.batch, size)
    setting = replace(setting, dimension=staged.prepared.task.layout.size)
    noised = recipe.place.noised(recipe, setting, own_moment(task, now, client), size)
    bounds = now.bounds if recipe.place.in_steps else now.bounds[:1]
    reach = sum(recipe.clip.piece(bound, task.layout.layers) for bound in bounds)
    variance = sum(one.deviation**2 for one in noised)
    if recipe.clip.order == 1:  # the score measures in l2 what was clipped in l1
        reach /= float(np.abs(staged.direction).sum())
    return math.sqrt(variance) or 1.0, reach * _rate(task, client, size), batch


def _rate(task: Task, client: int, size: int) -> float:
    """How often a canary of a client that takes part is in what is summed up."""
    recipe, setting = recipe_of(task, client), task.setting
    if recipe.place.of_gradients:
        return recipe.batches.constant(setting.batch, size) / size
    return 1.0 if recipe.place.open_uploads else min(1.0, setting.cohort / setting.clients)


def report_scores(executed: Prepared, canaries: int, rounds: int, seed: int) -> Scores:
    """LDP-FL: weights that a coin puts far above or far below their range, and the bits reported for them.

    Each weight of a round is one canary of the first client in the cohort: its report is made by the client's own code with
    its own key, and independent of all others. Bits are read as they leave the client: a shuffler's amplification is a
    theorem about such reports, and what reaches the server, counts over the cohort, would hide a report without noise.
    """
    task, layout = executed.task, executed.task.layout
    draw = generator(seed, "canaries")
    high: list[np.ndarray] = []
    low: list[np.ndarray] = []
    state = start(task, executed.initial)
    for index in range(rounds):
        state = replace(state, round=index)
        now = moment_of(task, state)
        client = cohort_of(executed, now.number)[:1].tolist()
        if not client:
            continue
        centre, radius = ldp.per_weight(ranges_of(state), layout)
        up = draw.random(layout.size) < 0.5
        ends = np.where(up, centre + 10 * radius, centre - 10 * radius)[None]
        (upload,) = uploads_of(task, now, state, client, result_of(ends - state.weights))
        assert upload.bits is not None
        bits = np.unpackbits(upload.bits, count=layout.size).astype(float)
        high.append(bits[up])
        low.append(bits[~up])
        if len(high) * layout.size >= canaries:
            break
    if not high:
        raise UserError("no client reports in these rounds: nothing can be audited.")
    most = max(1, canaries // 2)
    return Scores(np.concatenate(high)[:most], np.concatenate(low)[:most])


@dataclass(frozen=True)
class Planned:
    """What the promise alone says of an included canary's score, in units of the promised noise: its mean, the deviation that
    sampling adds to it, and how many canaries have room."""

    signal: float
    spread: float
    room: int


def planned_score(config: RunConfig, rounds: int, seed: int = 0) -> Planned:
    """Mean and spread of the scores that an audit of so many rounds will have."""
    prepared = prepare(config)
    staged = stage(prepared, 32, seed, rounds=rounds)
    task, hosts = prepared.task, staged.host.tolist()
    unit, observer = unit_of(prepared)
    expected, looks, varies = np.zeros(len(hosts)), np.zeros(len(hosts)), np.zeros(len(hosts))
    state = start(task, prepared.initial)
    for index in range(rounds):
        now = moment_of(task, replace(state, round=index))
        there = set(cohort_of(prepared, now.number).tolist())
        for k, client in enumerate(hosts):
            if observer == "public" or client in there:
                size = prepared.partition.size(client)
                noise, signal, _ = _units(staged, task, now, client, size)
                rate, steps = _rate(task, client, size), task.setting.steps if unit == "example" else 1
                expected[k] += signal / noise
                varies[k] += (signal / noise) ** 2 * max(0.0, 1 / rate - 1) / steps
                looks[k] += 1
    looked = looks > 0
    if not looked.any():
        raise UserError("no client with a canary takes part in these rounds: plan for more (--rounds).")
    clients = range(prepared.partition.clients)
    room = len(clients) if unit == "client" else sum(prepared.partition.size(c) // 2 for c in clients)
    return Planned(
        float(np.median(expected[looked] / np.sqrt(looks[looked]))),
        float(np.sqrt(np.median(varies[looked] / looks[looked]))),
        room,
    )


def promised(
    ledger: Ledger, observer: Observer, unit: Unit, delta: float
) -> tuple[float | None, str, Callable[[float], float]]:
    """(epsilon, verdict, the whole curve delta(epsilon)) of one row of a ledger."""
    epsilon, status = ledger.epsilon(observer, unit, delta), "sound"
    if epsilon is None:
        status = "none"
        for row in ledger.table(delta=delta):
            if (row.observer, row.unit, row.verdict) == (observer, unit, "nominal"):
                epsilon, status = row.epsilon, "nominal"
    if status != "sound":
        return epsilon, status, lambda _epsilon: 1.0
    points = [
        (ledger.epsilon(observer, unit, d), d)
        for d in (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8)
    ]

    def curve(at: float) -> float:
        """The smallest of the computed deltas that is promised at this epsilon or below."""
        fitting = [d for e, d in points if e is not None and e <= at]
        return min(fitting, default=1.0)

    return epsilon, status, curve


def as_planned(prepared: Prepared, rounds: int) -> Ledger:
    """The ledger that so many rounds would write."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.create(Path(folder) / "ledger.jsonl", header_of(prepared))
        state = start(prepared.task, prepared.initial)
        for index in range(rounds):
            now = moment_of(prepared.task, replace(state, round=index))
            ledger.spend(release_of(prepared, now, cohort_of(prepared, now.number)))
        ledger.close()
        return ledger


def audit(
    config: RunConfig,
    *,
    ledger: Ledger | None = None,
    practice: RunConfig | None = None,
    canaries: int = 1000,
    rounds: int | None = None,
    seed: int = 0,
    significance: float = 0.05,
) -> tuple[Audit, dict[str, Any]]:
    """Replay `config` with canaries and judge the promise of `ledger` (default: the one this run would write).

    practice: what is really executed, if that is not `config` (for testing the audit itself).
    """
    began = time.process_time()
    base = prepare(config)
    if not base.task.recipe.private:
        raise UserError(f"recipe '{base.task.recipe.name}' adds no noise, so there is no promise to audit.")
    reports = isinstance(base.task.recipe.place, Reports)
    unit, observer = unit_of(base)
    rounds = min(rounds or config.rounds, config.rounds)
    ledger = as_planned(base, rounds) if ledger is None else ledger
    epsilon, status, curve = promised(ledger, observer, unit, config.delta)
    executed = prepare(practice) if practice else base
    if reports:
        scores, threshold, coins = report_scores(executed, canaries, rounds, seed), 0.5, None
        engine = "reports of the client's own code"
        if base.task.recipe.channel.hides_reports and status == "sound":
            epsilon = moment_of(base.task, start(base.task, base.initial)).epsilon
            engine += ", before the shuffler: what its theorem starts from"
    else:
        most = int(ledger.participations().max()) if config.secure_noise else None
        staged = stage(executed, canaries, seed, rounds=rounds, most=most)
        scores, threshold = score(staged, base, rounds)
        engine = staged.prepared.engine
        coins = "".join(map(str, staged.included.astype(int)))
    found = judge(
        scores,
        epsilon_promised=epsilon,
        delta=config.delta,
        threshold=threshold,
        status=status,
        curve=curve if status == "sound" and not reports else None,
        independent=True,
        gaussian=all(
            isinstance(recipe_of(base.task, c).law, Gaussian) for c in range(base.partition.clients)
        ),
        reports=reports,
        significance=significance,
    )
    facts = {
        "unit": unit,
        "observer": observer,
        "rounds": rounds,
        "engine": engine,
        "seed": seed,
        "coins": coins,
        "cpu_seconds": time.process_time() - began,
        "scores": {"included_mean": float(scores.included.mean()), "excluded_mean": float(scores.excluded.mean()),
                   "included_deviation": float(scores.included.std()), "excluded_deviation": float(scores.excluded.std())},
    }  # fmt: skip
    return found, facts
