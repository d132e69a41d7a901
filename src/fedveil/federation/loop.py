"""Whole federations in one process: prepare a task from a configuration, play rounds, keep the books.

The order inside a round is fixed: draw the cohort, write the release to the ledger and sync it, only then
let any update leave a client. A crash can over-count privacy, never under-count it.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedveil.data.datasets import Dataset, dataset_names, load
from fedveil.data.frames import Table
from fedveil.data.partition import Partition, partition
from fedveil.errors import UserError
from fedveil.federation import folder as run_folder
from fedveil.federation import one_shot, own_code, store, sums
from fedveil.federation.config import GIVEN, RunConfig, check_config, clock_of
from fedveil.federation.forecast import forecast
from fedveil.federation.harmonize import delta_of
from fedveil.federation.look import Looked, LookedInVain, Paid, after, looked_from_json, open_table
from fedveil.federation.round import (
    State,
    Task,
    Upload,
    learning_rate_of,
    merge,
    model_weights,
    moment_of,
    noise_errors,
    noised_of,
    plan_of,
    resilience,
    shuffled,
    start,
    uploads_of,
    work_of,
)
from fedveil.jsons import Document, JsonObject
from fedveil.keys import derive, entropy
from fedveil.models import features, nets
from fedveil.models.backbones import digests_in, named_in
from fedveil.models.layout import Layout, flatten, layout_of, unflatten
from fedveil.privacy.events import Release, Unit
from fedveil.privacy.ledger import Budget, Exceeded, Header, Ledger, commit
from fedveil.privacy.ledger.entries import check_header
from fedveil.protect import bounded
from fedveil.protect.catalogue import named_code
from fedveil.protect.counts import takes_rate
from fedveil.protect.promise import divergence, release, unpaid
from fedveil.protect.recipe import Recipe, digest
from fedveil.protect.setting import Moment, Setting
from fedveil.protect.tally import paid_release
from fedveil.training import loss_names, losses, metrics, pool
from fedveil.training.augment import check as check_augment
from fedveil.training.augment import parse as parse_augment
from fedveil.training.contract import LocalPlan, LocalResult
from fedveil.training.distortion import distortions
from fedveil.training.evaluate import evaluate, outputs
from fedveil.training.optimisers import parse as parse_optimiser


@dataclass(frozen=True, eq=False)
class Prepared:
    """A configuration with its data, partition, model and task."""

    config: RunConfig
    dataset: Dataset
    partition: Partition
    task: Task
    initial: np.ndarray
    engine: str
    engine_reason: str
    notes: tuple[str, ...] = ()
    data_digest: str = ""
    looked: Looked | None = None
    public_data: bool = False  # rows of a built-in dataset that was read here: what is called like one may be anybody's


@dataclass(frozen=True)
class RoundFacts:
    """What a callback gets after each round. `private` must not be shared."""

    round: int
    rounds: int
    metrics: Mapping[str, object]
    private: Mapping[str, object]
    state: State


ALL_DONE = "all rounds done"
OnRound = Callable[[RoundFacts], None]
Turn = tuple[State, JsonObject, JsonObject]  # next state, public facts, private facts


def prepare(
    config: RunConfig,
    dataset: Dataset | Table | None = None,
    module: nn.Module | None = None,
    *,
    dealt: Partition | None = None,
    root: int | bytes | None = None,
    pays: bool = False,
) -> Prepared:
    """Load data, deal it out, build the model, calibrate the noise if asked to.

    dealt: who holds how much, where that is not decided here (deployment). root: keys all randomness instead
    of the seed or, with secure_noise, the system's entropy. pays: the caller has a ledger and charges looks at a table's
    columns before anybody hears of them; nobody else gets one.
    """
    if root is None:
        root = entropy() if config.secure_noise else config.seed
    looked = None
    public_data = dataset is None and dealt is None and not config.table and config.dataset in dataset_names()
    if isinstance(dataset, Table) or (dataset is None and config.table):
        dataset, looked = open_table(config, dataset, root, deployed=dealt is not None, pays=pays)
    elif dataset is None:
        dataset = raw_data(config)
    with after(looked.paid if looked else ()):
        return replace(_prepared(config, dataset, module, dealt, root, looked), public_data=public_data)


def _prepared(
    config: RunConfig, dataset: Dataset, module: nn.Module | None, dealt: Partition | None, root: int | bytes,
    looked: Looked | None,
) -> Prepared:
    dataset = with_features(dataset, config)
    check_config(config)
    check_device(config.device)
    recipe = config.built_recipe()
    if dealt is None:
        dealt = partition(dataset, config.partition, config.clients, config.seed, **config.partition_options)
    module = _model(config, dataset, module)
    notes: tuple[str, ...] = dataset.notes
    task = _task(config, recipe, dataset, dealt, module, root)
    metrics.check(config.metrics, task.measured == "squared")
    check_augment(task.augment, dataset.shape)
    if loss_names.own(task.loss):
        losses.check_own(task.loss, dataset.classes or 1, dataset.classes)
    if config.client_epsilons or config.calibrate:
        from fedveil.federation.harmonize import harmonize

        task, more = harmonize(task, config, dealt, [paid.event for paid in looked.paid] if looked else ())
        notes += more
    elif recipe.formula is not None and recipe.epsilon is not None:
        from fedveil.federation.harmonize import by_formula

        task, more = by_formula(task, config, dealt)
        notes += more
    initial = flatten(module)
    engine, reason = engine_of(task, initial, dealt, config)
    task = replace(task, setting=replace(task.setting, engine=engine))
    notes += _own_code(module, task.loss, engine)
    one_shot.tell(task)
    prepared = Prepared(config, dataset, dealt, task, initial, engine, reason, notes, looked=looked)
    _check_counted(prepared)
    return prepared


def _check_counted(prepared: Prepared) -> None:
    """Refuse a nominal budget of which nothing is ever counted: it would stop no run."""
    config, task = prepared.config, prepared.task
    if config.budget != "nominal":
        return
    unit = unit_of(task.recipe)
    first = release_of(prepared, moment_of(task, start(task, prepared.initial)), np.array([0]))
    said = [(c.observer, c.unit, c.verdict) for _, group in first.groups for c in group]
    if (config.observer, unit, "nominal") not in said:
        raise UserError(
            f"budget = nominal: recipe '{task.recipe.name}' has no nominal count for observer '{config.observer}' per {unit}, so "
            f"target_epsilon = {config.target_epsilon:g} would never stop it; leave budget out, or use a recipe with a paper's "
            "own count (such as fed-cdp) and observer = server"
        )


def check_noise(prepared: Prepared) -> None:
    """Noise too narrow to be drawn or counted, at either end of a schedule, is refused before anything is charged or written."""
    task, size = prepared.task, prepared.partition.size(0)
    for index in sorted({0, prepared.config.rounds - 1}):
        now = moment_of(task, replace(start(task, prepared.initial), round=index))
        release_of(prepared, now, np.array([0]))
        for one in noised_of(task, now, 0, size) if task.recipe.private else ():
            _ = one.deviation


def _own_code(module: nn.Module, loss: str, engine: str) -> tuple[str, ...]:
    """What of the user's code runs during training, where no clip can see into it: the promises rest on its word."""
    called = [f"loss {loss}"] if loss_names.own(loss) else []
    if engine in own_code.CALLING:
        called += own_code.of_module(module)
    return own_code.caveat(called)


def _model(config: RunConfig, dataset: Dataset, module: nn.Module | None) -> nn.Module:
    """The given model, or the one that the configuration names; checked either way."""
    if module is None:
        name = nets.default_model(dataset) if config.model == "auto" else config.model
        module = nets.build(name, dataset.shape, dataset.classes, config.seed, **config.model_options)
    else:
        nets.check_model(module, dataset.shape, dataset.classes)
    nets.check_model(module)
    return module


def _task(
    config: RunConfig, recipe: Recipe, dataset: Dataset, dealt: Partition, module: nn.Module, root: int | bytes
) -> Task:
    """The configuration's numbers with data and model."""
    layout = layout_of(module)
    setting = Setting(
        clients=dealt.clients,
        cohort=float(config.cohort_size or dealt.clients),
        rounds=config.rounds,
        steps=config.local_steps,
        batch=config.batch_size,
        examples=dealt.examples,
        layers=layout.layers,
        dimension=layout.size,
        copies=dealt.copies,
        nominal_rate=config.nominal_rate,
    )
    return Task(
        recipe=recipe,
        setting=setting,
        module=module,
        layout=layout,
        x=dataset.x,
        y=dataset.y,
        rows=dealt.rows,
        root=root,
        learning_rate=config.learning_rate,
        learning_rate_end=config.learning_rate_end,
        momentum=config.momentum,
        optimiser=parse_optimiser(config.local_optimiser),
        augment=parse_augment(config.augment, config.augment_copies),
        loss=one_shot.loss_of(config, module, dataset),
        server_learning_rate=config.server_learning_rate,
        server_momentum=config.server_momentum,
        average=config.average,
        fixed_variance=config.fixed_variance,
        measure_mean=config.asked_scale.of_mean,
        seed=config.seed,
        message_loss=config.message_loss,
        smoothness=config.smoothness,
        clock=clock_of(config),
        radii=tuple(config.client_radii or ()),
        curve=config.curve,
        public=_public(dataset),
        secure=terms_of(config, dealt.clients),
    )


def raw_data(config: RunConfig) -> Dataset:
    """The configuration's dataset as it is read, before any features."""
    own_options: dict[str, Any] = {"text": config.text} if config.text else {}
    return load(
        config.dataset,
        root=config.data,
        seed=config.split_seed,
        validation=config.validation,
        target=config.target,
        limit=config.limit,
        **own_options,
    )


def with_features(dataset: Dataset, config: RunConfig) -> Dataset:
    """The dataset behind the configuration's fixed features, or those that its kind of rows needs."""
    front = config.features or features.default(dataset)
    return features.apply(dataset, front) if front else dataset


def engine_of(task: Task, initial: np.ndarray, dealt: Partition, config: RunConfig) -> tuple[str, str]:
    """The engine that speaks for the run, and why it runs: where clients have recipes of their own, one whose sums nothing
    is proven about if any of them needs it."""
    now = moment_of(task, start(task, initial))
    alike = {recipe: client for client, (recipe, _) in reversed(tuple(task.own.items()))}
    like = task.x, task.y
    found = [
        pool.choose(task.module, plan_of(task, now, client, dealt.size(client)), config.engine, device=config.device, like=like)
        for client in dict.fromkeys((0, *alike.values()))
    ]
    return next((one for one in found if one[0] not in bounded.COVERED), found[0])


def terms_of(config: RunConfig, clients: int) -> sums.Terms | None:
    """How the sum is opened under masks, if it is."""
    if not config.secure_sum:
        return None
    return sums.Terms.of(clients, config.sum_threshold, config.sum_colluders)


def check_device(name: str) -> None:
    """Refuse a device that this machine does not have, before anything is written."""
    import torch

    try:
        torch.zeros(1, device=name).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as wrong:
        why = str(wrong).splitlines()[0] if str(wrong) else type(wrong).__name__
        raise UserError(f"device = {name!r} cannot be used here ({why}); leave it out, or set device = cpu") from None


def _public(dataset: Dataset) -> tuple[np.ndarray, np.ndarray] | None:
    if dataset.x_validation is None or dataset.y_validation is None:
        return None
    return dataset.x_validation, dataset.y_validation


def release_of(prepared: Prepared, now: Moment, clients: np.ndarray) -> Release:
    """The ledger entry of one round, derived from the task itself."""
    if prepared.task.recipe.place.scope == "everyone":
        # Who was drawn is a secret that the promise counts on: the entry speaks of everybody, whoever took part.
        clients = np.arange(prepared.partition.clients)
    sizes = {int(c): prepared.partition.size(int(c)) for c in clients}
    found = release(prepared.task.recipe, prepared.task.setting, now, sizes, prepared.task.own)
    return found if prepared.task.secure is None else sums.promised(prepared.task, now, found, sizes)


def stacks_of(prepared: Prepared, now: Moment, clients: np.ndarray) -> dict[LocalPlan, list[int]]:
    """The cohort by equal plans; uploads are merged in this order, whoever trained them."""
    task, stacks = prepared.task, {}  # type: tuple[Task, dict[LocalPlan, list[int]]]
    alike: dict[tuple[int, int], list[int]] = {}  # clients of one size and no settings of their own have equal plans
    for client in clients.tolist():
        size = prepared.partition.size(client)
        kind = client if task.own or task.own_epsilon else -1, size
        if kind not in alike:
            alike[kind] = stacks.setdefault(plan_of(task, now, client, size), [])
        alike[kind].append(client)
    return stacks


def train_cohort(
    prepared: Prepared, state: State, now: Moment, clients: np.ndarray, workers: int | pool.Workers = 1
) -> Iterator[tuple[list[int], LocalResult]]:
    """Train the cohort, chunk by chunk; clients with equal plans share a stack."""
    task, config = prepared.task, prepared.config
    for plan, members in stacks_of(prepared, now, clients).items():
        work = (work_of(task, state, now, client) for client in members)
        at = 0
        for result in pool.stream(
            task.module,
            state.weights,
            task.x,
            task.y,
            work,
            plan,
            engine=config.engine,
            workers=workers,
            chunk=config.chunk,
            device=config.device,
        ):
            count = len(result.finite)
            yield members[at : at + count], result
            at += count


def play_round(
    prepared: Prepared, state: State, clients: np.ndarray, workers: int | pool.Workers = 1
) -> tuple[State, JsonObject, Document]:
    """One round, of which nothing may be shown before the caller has charged it: (state, public facts, private facts)."""
    task = prepared.task
    now = moment_of(task, state)
    seen: list[tuple[list[int], LocalResult]] = []
    made = hashlib.sha256()

    def uploads() -> Iterator[Upload]:
        for chunk, result in train_cohort(prepared, state, now, clients, workers):
            for upload in uploads_of(task, now, state, chunk, result):
                # Where uploads carry no noise, or nobody may link their parts, only what is merged may leave a trace.
                if task.recipe.place.open_uploads and not task.recipe.channel.hides_reports:
                    made.update(upload.update.tobytes() if upload.bits is None else upload.bits.tobytes())
                    made.update(repr(upload.below).encode())
                yield upload
            seen.append((chunk, replace(result, delta=np.empty(0))))

    following, facts = merge(task, state, now, shuffled(task, now, uploads()))
    made.update(following.weights.tobytes())
    for name, value in sorted(following.memory().items()):  # a tracked bound is released too
        made.update(name.encode() + value.tobytes())
    facts |= {
        "clients": len(clients),
        "sigma": now.sigmas[0],
        "bound": now.bounds[0],
        "learning_rate": learning_rate_of(task, state.round),
    }
    private = {**_diagnostics(seen), "made": made.hexdigest()}
    private |= resilience(task, now, private.get("noise_deviation"))
    if len(clients):
        first = int(clients[0])
        errors = noise_errors(task, now, first, prepared.partition.size(first), prepared.config.diagnostics)
        private |= {name: errors.pop(name) for name in ("measured_l1",) if name in errors}
        facts |= errors
    if task.recipe.place.scope == "everyone":
        # The amplification counts on a secret cohort, and its size tells something about it.
        private |= {name: facts.pop(name) for name in ("clients", "uploads")}
    return following, facts, private


def _diagnostics(seen: list[tuple[list[int], LocalResult]]) -> JsonObject:
    """Private figures of a round, over its clients."""
    if not seen:
        return {}
    finite = np.concatenate([r.finite for _, r in seen])
    # Clients that clip as a whole have one norm, those without protection one per layer: where both are there, the norms are
    # those of the clients that clip.
    columns = min(r.norm_max.shape[1] for _, r in seen)
    alike = [r for _, r in seen if r.norm_max.shape[1] == columns]

    def mean(name: str, among: Sequence[LocalResult]) -> Any:
        values = np.concatenate([getattr(r, name)[r.finite] for r in among])
        return None if len(values) == 0 else _plain(np.mean(values, axis=0, dtype=np.float64))

    largest = np.concatenate([r.norm_max[r.finite] for r in alike])
    everyone = [r for _, r in seen]
    return {
        "diverged": int((~finite).sum()),
        "skipped_examples": int(sum(r.skipped.sum() for _, r in seen)),
        "diverged_clients": [c for chunk, r in seen for k, c in enumerate(chunk) if not r.finite[k]],
        "loss": mean("loss", everyone),
        "norm_mean": mean("norm_mean", alike),
        "norm_max": None if len(largest) == 0 else _plain(largest.max(axis=0)),
        **_of_mean(everyone),
        "unclipped": mean("unclipped", everyone),
        "noise_deviation": mean("noise_scale", everyone),
        "client_loss": {str(c): _plain(r.loss[k]) for chunk, r in seen for k, c in enumerate(chunk)}
        if len(finite) <= 200
        else None,
    }


def _of_mean(results: Sequence[LocalResult]) -> JsonObject:
    """Norms of the batches' mean gradients, over steps and clients; nothing where neither the noise nor a count follows them."""
    found = [r.mean_gradient_norms[r.finite].ravel() for r in results if r.mean_gradient_norms.size]
    norms = np.concatenate(found) if found else np.zeros(0)
    return {"mean_gradient_norm": float(norms.mean()), "mean_gradient_norm_max": float(norms.max())} if norms.size else {}


def _plain(value: object) -> object:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 0:
        return float(array) if np.isfinite(array) else None
    return [float(v) if np.isfinite(v) else None for v in array]


def run(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
    dataset: Dataset | Table | None = None,
    module: nn.Module | None = None,
    command: str = "",
    on_start: Callable[[Prepared], None] | None = None,
) -> Document:
    """Run a configuration in the directory `out`; returns what result.json holds.

    resume: continue from the last checkpoint. Seeded runs end with the same weights as an uninterrupted run.
    on_start: called once before the first round, when everything that was looked at before is charged.
    """
    folder = Path(out)
    try:
        return _run(config, folder, resume, on_round, dataset, module, command, on_start)
    except LookedInVain as wrong:
        vain = wrong
    charge_in_vain(config, folder, vain)  # out of the block: if this fails, its traceback does not tell the other failure
    if isinstance(vain.__cause__, Exception) and not isinstance(vain.__cause__, UserError):
        raise vain.__cause__
    raise UserError(
        f"{vain} The look that showed this is charged in {folder / 'ledger.jsonl'}: keep that folder, which says what was spent, "
        "and take another --out next time."
    )


def _run(
    config: RunConfig, folder: Path, resume: bool, on_round: OnRound | None, dataset: Dataset | Table | None,
    module: nn.Module | None, command: str, on_start: Callable[[Prepared], None] | None,
) -> Document:  # fmt: skip
    begun = time.perf_counter()
    check_free(folder, resume)
    prepared = prepare(config, dataset, module, pays=True)
    check_delta(prepared)  # after a look it finds nothing: then it was checked before
    task, looks = prepared.task, prepared.looked.paid if prepared.looked else ()
    with after(looks):
        check_noise(prepared)
        prepared = replace(prepared, data_digest=data_digest(task))
    with ExitStack() as stack:
        hold_folder(stack, folder, resume)
        check_folder(prepared, folder, resume)
        with after(looks):
            ledger = stack.enter_context(open_ledger(prepared, folder))
            charge_preprocessing(prepared, ledger)
        # Only now: how large the model is, for one, may have been found by a look that is charged now.
        state = open_folder(prepared, folder, resume, command)
        if prepared.looked is not None:
            store.write_json(folder / store.TABLE, prepared.looked.to_json())
        if on_start is not None:
            on_start(prepared)
        done = finished(folder, state, config)
        if done is not None:
            print(f"note: the run in {folder} is finished; nothing was done again", file=sys.stderr)
            return done
        workers: int | pool.Workers = config.workers
        if config.workers > 1 and prepared.engine in ("stacked", "functional"):
            workers = stack.enter_context(pool.Workers(config.workers))

        def turn(state: State, now: Moment, clients: np.ndarray) -> Turn:
            mark = fingerprint_of(prepared, state, clients)
            # Nothing has left this process yet: what was made is charged, and synced, before anybody gets to see it.
            entry = release_of(prepared, now, clients)
            try:
                following, facts, private = play_round(prepared, state, clients, workers)
            except Exception:  # that and how it failed may follow from the rows: charged before anybody hears of it
                if ledger.find(mark + "failed") is None:
                    ledger.spend(replace(entry, note="failed"), fingerprint=mark + "failed")
                    charge_rest(prepared, ledger, replace(state, round=state.round + 1), "an earlier round failed")
                raise
            made = private.pop("made")
            charge(ledger, entry, mark, made)
            lost = divergence(task.recipe, now.number, private.get("diverged_clients", ()))
            if lost is not None:
                charge(ledger, lost, mark + "diverged", made)
            return following, facts, private if config.diagnostics else {}

        state, stop = play(prepared, folder, ledger, state, turn, on_round=on_round)
        return finish(prepared, folder, ledger, state, stop, time.perf_counter() - begun)


def play(
    prepared: Prepared,
    folder: Path,
    ledger: Ledger,
    state: State,
    turn: Callable[[State, Moment, np.ndarray], Turn],
    *,
    moment: Callable[[Task, State], Moment] = moment_of,
    on_round: OnRound | None = None,
) -> tuple[State, str]:
    """The round loop of simulation and deployment: (last state, why it stopped).

    turn: plays one round for a cohort and charges it before anything is shown. What differs between one process and a real
    federation is in there; drawing, budgets, evaluation, records, checkpoints and stops are here.
    """
    config, task = prepared.config, prepared.task
    while state.round < config.rounds:
        now = moment(task, state)
        drawn = cohort_of(prepared, now.number)
        clients, ended = affordable(prepared, ledger, now, drawn)
        if ended:
            return state, ended
        clock = time.perf_counter()
        state, facts, private = turn(state, now, clients)
        if task.own_epsilon:
            facts["sat_out"] = len(drawn) - len(clients)
        seconds = time.perf_counter() - clock
        if _evaluated(config, state) and not np.isfinite(model_weights(state)).all():
            charge_rest(prepared, ledger, state)  # before anybody is told that the run ends here
        done = record_round(prepared, folder, ledger, state, facts, private, seconds, on_round)
        if state.round % config.checkpoint_every == 0 or state.round == config.rounds or done:
            store.save_checkpoint(folder / "checkpoints", state, ledger.head)
        if done:
            return state, done
    return state, ALL_DONE


def _evaluated(config: RunConfig, state: State) -> bool:
    """Is the model looked at after this round?"""
    return state.round % config.evaluate_every == 0 or state.round == config.rounds


def charge_rest(prepared: Prepared, ledger: Ledger, state: State, why: str = "the stop depended on the model") -> None:
    """Charge the rounds that a stop leaves out where the stop depends on the data and no plan was committed for it: the
    promise is then about all planned rounds, as if they had been played."""
    if ledger.header.stopping == "data":
        return
    for index in range(state.round, prepared.config.rounds):
        now = moment_of(prepared.task, replace(state, round=index))
        # Clients without budget would not have taken part; a budget of all would have ended the run.
        clients, ended = affordable(prepared, ledger, now, cohort_of(prepared, index + 1))
        if ended:
            return
        entry = release_of(prepared, now, clients)
        ledger.spend(replace(entry, note=f"not played: {why}"), fingerprint=f"left out {index}")


def charge(ledger: Ledger, entry: Release, mark: str, made: str) -> None:
    """Spend a release; free where the very same bits were charged before and this is their replay after a crash."""
    ledger.spend(entry, fingerprint=mark, replay_of=ledger.find(mark), made=made)


def charge_preprocessing(prepared: Prepared, ledger: Ledger) -> None:
    """What was computed from private rows before training, without noise, ends the promise before it begins; once."""
    notes = [note for note in prepared.notes if note.startswith("private:")]
    entry = unpaid(prepared.partition.clients, notes)
    if entry is not None and prepared.task.recipe.private and ledger.find("preprocessing") is None:
        ledger.spend(entry, fingerprint="preprocessing")
    if prepared.looked and prepared.task.recipe.private:
        _charge_looks(ledger, prepared.partition.clients, prepared.looked.paid)


def _charge_looks(ledger: Ledger, clients: int, looks: Sequence[Paid]) -> None:
    for paid in looks:
        # The hash holds fresh noise: the same hash in the ledger is this very look, made and charged before.
        if ledger.find(f"look {paid.made}") is None:
            what = paid_release(clients, paid.event, paid.what)
            ledger.spend(what, fingerprint=f"look {paid.made}", made=paid.made)


def charge_in_vain(config: RunConfig, folder: Path, vain: LookedInVain) -> None:
    """Charge looks after which no run can begin, in a ledger that no other run continues."""
    header = Header(delta=config.delta, clients=config.clients, simulated=not config.secure_noise, config="looked in vain")
    with ExitStack() as stack:
        hold_folder(stack, folder, resume=False)
        ledger = stack.enter_context(run_folder.open_ledger(folder, lambda: header))
        _charge_looks(ledger, config.clients, vain.paid)


def hold_folder(stack: ExitStack, folder: Path, resume: bool) -> None:
    """Take the folder's lock, before anything in it is read or cut, for as long as the stack lives."""
    if resume and not folder.exists():
        raise UserError(f"--resume: {folder} does not exist; run without --resume first")
    stack.enter_context(run_folder.hold(folder, create=not resume))


def check_free(folder: Path, resume: bool) -> None:
    """Refuse to begin where a run is: also before a look is made that would be in vain."""
    if not resume and (folder / "run.json").exists():
        raise UserError(f"{folder} already holds a run: add --resume to continue it, or choose another --out")


def check_folder(prepared: Prepared, folder: Path, resume: bool) -> None:
    """Refuse a folder that holds another run, before anything is charged or written."""
    check_free(folder, resume)
    if not (folder / "run.json").exists():
        return
    before = store.open_run(folder).config
    free = {"workers", "chunk", "engine", "report", "data", "checkpoint_every", "name"}
    changed = [
        k for k in RunConfig.model_fields if k not in free and getattr(before, k) != getattr(prepared.config, k)
    ]
    config = prepared.config
    longer = changed == ["rounds"] and config.rounds > before.rounds
    if longer and prepared.task.recipe.private:
        raise UserError(
            f"--resume: {folder} was planned for {before.rounds} rounds. Adding rounds after its results were seen is not "
            "covered by its promise; start a new run with the rounds you want, or with target_epsilon as their limit"
        )
    facts = store.read_json(folder / "run.json")
    made_with = facts.get("identity")
    if digests_in(facts.get("notes") or ()) != digests_in(prepared.notes):
        told = "; ".join(named_in(prepared.notes)) or "none"
        raise UserError(
            f"--resume: the public backbone is not that of the run in {folder} (today: {told}): its file, its code, Python or "
            "torch changed. Put the former one back, or start a new run"
        )
    if loss_names.own(config.loss) and not changed and made_with != config_hash(config):
        raise UserError(f"--resume: the files of the loss '{config.loss}' are not those of the run in {folder}; start a new run")
    if changed and not (longer and config.learning_rate_end is None and not config.average):
        raise UserError(f"--resume: {', '.join(changed)} differ from the run in {folder}; start a new run instead")


def open_folder(prepared: Prepared, folder: Path, resume: bool, command: str) -> State:
    config = prepared.config
    known = store.checkpoints(folder / "checkpoints")
    state = start(prepared.task, prepared.initial)
    check_folder(prepared, folder, resume)
    if (folder / "run.json").exists():
        facts = store.read_json(folder / "run.json")
        if facts["config"]["rounds"] != config.rounds:  # more rounds without privacy; the identity stays: the ledger has it
            store.write_json(folder / "run.json", {**facts, "config": config.model_dump()})
        if facts.get("public_data") and not prepared.public_data:  # continued on rows that were given
            store.write_json(folder / "run.json", {**store.read_json(folder / "run.json"), "public_data": False})
        if known:
            state = store.load_checkpoint(folder / "checkpoints", known[-1], state)
            if state.weights.shape != prepared.initial.shape:
                raise UserError(f"--resume: the checkpoint of round {known[-1]} belongs to another model")
        run_folder.check(folder)  # before the lines that the ledger is compared with are cut
        for note in run_folder.notes_of(folder):
            print(f"note: {note}", file=sys.stderr)
        for name in ("metrics.jsonl", "private.jsonl"):
            if (folder / name).exists():
                store.keep_rounds(folder / name, state.round)
        return state
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise UserError(f"cannot create {folder}: {wrong.strerror}") from None
    store.write_json(
        folder / "run.json",
        {
            "config": config.model_dump(),
            "versions": store.versions(),
            "seed": config.seed,
            "command": command,
            "simulated": not config.secure_noise,
            "engine": prepared.engine,
            "engine_reason": prepared.engine_reason,
            "notes": list(prepared.notes),
            "public_data": prepared.public_data,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "python": sys.version.split()[0],
            "parameters": prepared.task.layout.size,
            "layers": list(prepared.task.layout.layer_names),
            "examples": prepared.partition.examples,
            "copies": prepared.partition.copies,
            "identity": config_hash(config),
        },
    )
    return state


def open_ledger(prepared: Prepared, folder: Path) -> Ledger:
    """Continue the run's ledger, which must hold all that the folder knows; or start it."""
    ledger = run_folder.open_ledger(folder, lambda: header_of(prepared))
    if not (folder / "run.json").exists() and ledger.header.config != config_hash(prepared.config):
        ledger.close()
        raise UserError(f"{folder} holds the ledger of another run, which was stopped before it began; choose another --out")
    return ledger


def header_of(prepared: Prepared) -> Header:
    """What is fixed before the first release: sizes, copies, budgets and, for an accuracy stop, the whole plan."""
    config, dealt, task = prepared.config, prepared.partition, prepared.task
    unit = unit_of(task.recipe)
    if task.own_epsilon:
        budgets = tuple(
            Budget(e, config.observer, unit, client, delta_of(config, client))
            for client, e in task.own_epsilon.items()
            if math.isfinite(e)
        )
    elif config.target_epsilon is not None and config.budget == "nominal":
        budgets = (
            Budget(config.target_epsilon, config.observer, unit, accountant=config.budget_accountant, verdict="nominal"),
        )
    elif config.target_epsilon is not None:
        budgets = (Budget(config.target_epsilon, config.observer, unit),)
    else:
        budgets = ()
    committed = None
    if config.target_accuracy is not None:
        committed = commit(_planned(prepared), config.rounds)
    many = dealt.clients > 100_000
    return Header(
        delta=config.delta,
        clients=dealt.clients,
        sizes=() if many else tuple(int(s) for s in dealt.sizes),
        copies=dealt.copies,
        budgets=budgets,
        simulated=not config.secure_noise,
        planned_rounds=config.rounds,
        stopping="fixed" if committed is None else "data",
        committed=committed,
        config=config_hash(config),
        allow_large_delta=config.allow_large_delta,
        public=named_in(prepared.notes),
        assumes=_own_code(task.module, task.loss, prepared.engine),
    )


def check_delta(prepared: Prepared) -> None:
    """Refuse a delta that no ledger could promise with before a folder is made. Sizes are public."""
    config, dealt = prepared.config, prepared.partition
    sizes = () if dealt.clients > 100_000 else tuple(int(size) for size in dealt.sizes)
    check_header(Header(config.delta, dealt.clients, sizes, dealt.copies, allow_large_delta=config.allow_large_delta))


def unit_of(recipe: Recipe) -> Unit:
    """The unit that a recipe is made to protect."""
    return recipe.place.unit


def _planned(prepared: Prepared) -> Iterator[Release]:
    """The releases of all planned rounds; cohorts are coins that do not depend on the data."""
    state = start(prepared.task, prepared.initial)
    for index in range(prepared.config.rounds):
        now = moment_of(prepared.task, replace(state, round=index))
        # Coins from the system's entropy fall anew when a run is continued: then everybody is counted in every round.
        again = prepared.config.secure_noise
        drawn = np.arange(prepared.partition.clients) if again else cohort_of(prepared, now.number)
        yield release_of(prepared, now, drawn)


def cohort_of(prepared: Prepared, number: int) -> np.ndarray:
    """The clients drawn for round `number`."""
    task = prepared.task
    return task.recipe.cohort.draw(prepared.partition.clients, task.setting.cohort, task.root, number)


def config_hash(config: RunConfig) -> str:
    """Changes whenever anything that decides the releases changes."""
    ignore = {"workers", "chunk", "engine", "report", "data", "checkpoint_every", "name"}
    later = {"table", "nominal_rate"}  # keys that older runs do not have: unset, they change nothing
    values = {k: v for k, v in config.model_dump().items() if k not in ignore and (k not in later or v)}
    if named_code(config.recipe) or config.recipe.startswith(GIVEN):
        values["recipe"] = digest(config.built_recipe())  # what the name stands for may change
    if loss_names.own(config.loss):
        values["loss"] = f"{config.loss} {loss_names.digest(config.loss)}"
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def check_recipe(run: store.Run) -> None:
    """Refuse to speak about a run with a recipe or loss of the user's own that is not the one it was made with any more."""
    recipe = run.config.recipe
    own = named_code(recipe) or recipe.startswith(GIVEN)
    told = f"the recipe '{recipe.removeprefix(GIVEN)}'" if own else f"the loss '{run.config.loss}'"
    if (own or loss_names.own(run.config.loss)) and config_hash(run.config) != run.facts.get("identity"):
        raise UserError(
            f"{run.path}: {told} is not the one that this run was made with: its "
            "values, the files of its package, or this version of fedveil are others. The run's ledger speaks of the old one"
        )


def data_digest(task: Task) -> str:
    """Hash of the training data: seeded noise on other data is another release."""
    parts = hashlib.sha256(np.ascontiguousarray(task.x).data)
    parts.update(np.ascontiguousarray(task.y).data)
    return parts.hexdigest()


def fingerprint_of(prepared: Prepared, state: State, clients: np.ndarray) -> str:
    """Equal only if a replayed round is the very same release: same start, cohort, configuration, seeded noise."""
    # Keyed: whoever reads the ledger must not be able to test guesses of data or cohort against it.
    parts = hashlib.sha256(derive(prepared.task.root, "fingerprint"))
    parts.update(f"{config_hash(prepared.config)} {prepared.engine} {prepared.data_digest}".encode())
    parts.update(
        state.round.to_bytes(8, "little") + np.asarray(clients, np.int64).tobytes() + state.weights.tobytes()
    )
    for name, value in sorted(state.memory().items()):
        parts.update(name.encode() + value.tobytes())
    return parts.hexdigest()


def affordable(prepared: Prepared, ledger: Ledger, now: Moment, drawn: np.ndarray) -> tuple[np.ndarray, str]:
    """The clients of the cohort that still have budget, and why to stop (if so)."""
    config, task = prepared.config, prepared.task
    clients = drawn
    if task.own_epsilon:
        clients = np.array(
            [c for c in drawn.tolist() if not ledger.would_exceed(release_of(prepared, now, np.array([c])))],
            int,
        )
        if len(clients) == 0 and len(drawn):
            left = [
                c
                for c in range(prepared.partition.clients)
                if not ledger.would_exceed(release_of(prepared, now, np.array([c])))
            ]
            if len(left) < config.minimum_clients:
                return (
                    clients,
                    f"only {len(left)} clients have budget left (minimum_clients = {config.minimum_clients})",
                )
    elif config.target_epsilon is not None:
        why = ledger.would_exceed(release_of(prepared, now, clients))
        if why:
            which = "the nominal target_epsilon" if config.budget == "nominal" else "target_epsilon"
            said = f"{which} = {config.target_epsilon} would be exceeded: {why[0]}"
            return clients, said + (_too_dear(prepared, why[0]) if now.number == 1 else "")
    return clients, ""


def _too_dear(prepared: Prepared, over: Exceeded) -> str:
    """What to change where the budget does not even pay for the first round."""
    if over.spent:
        return ""
    if over.epsilon is None:
        return ". No budget can hold where nothing finite is promised: leave target_epsilon out, or use another recipe"
    config, recipe = prepared.config, prepared.task.recipe
    ways = ["a larger target_epsilon or sigma", *(["fewer local_steps", "a smaller batch_size"] if recipe.place.in_steps else [])]
    if over.budget.verdict == "nominal":
        if config.nominal_rate is None and takes_rate(recipe):
            ways.append("the papers' own q instead of the data's (nominal_rate = 0.01)")
    elif not config.calibrate:
        ways.append("calibrate = true, which chooses sigma by the budget")
    said = f"{', '.join(ways[:-1])}, or {ways[-1]}" if len(ways) > 1 else ways[0]
    return f". One round costs more than the whole budget: set {said}"


def record_round(
    prepared: Prepared,
    folder: Path,
    ledger: Ledger,
    state: State,
    facts: JsonObject,
    private: JsonObject,
    seconds: float,
    on_round: OnRound | None,
) -> str:
    """Evaluate, write the round's lines, tell the callback; returns a reason to stop or ''."""
    config, task, data = prepared.config, prepared.task, prepared.dataset
    line: JsonObject = {"round": state.round, "seconds": seconds, **facts}
    line["epsilon"] = ledger.epsilon(config.observer, unit_of(task.recipe), accountant=config.accountant)
    stop = ""
    if _evaluated(config, state):
        weights = model_weights(state)
        found = evaluate(task.module, weights, data.x_test, data.y_test, task.measured, config.metrics)
        line |= {f"test_{name}": value for name, value in found.items()}
        if data.x_validation is not None and data.y_validation is not None:
            public = evaluate(task.module, weights, data.x_validation, data.y_validation, task.measured)
            line |= {f"validation_{name}": value for name, value in public.items()}
            reached = public["accuracy"]
            if (
                config.target_accuracy is not None
                and reached is not None
                and reached >= config.target_accuracy
            ):
                stop = f"target_accuracy = {config.target_accuracy} reached on the validation set"
        if config.diagnostics and task.measured == "cross-entropy":
            line |= distortions(task.module, weights, data.x_test[:256], data.y_test[:256])
        if not np.isfinite(weights).all():
            stop = "the global model is no longer finite: lower learning_rate"
    store.append_line(folder / "metrics.jsonl", line)
    if private:
        store.append_line(folder / "private.jsonl", {"round": state.round, "private": True, **private})
    if on_round:
        on_round(RoundFacts(state.round, config.rounds, line, private, state))
    return stop


def finish(
    prepared: Prepared, folder: Path, ledger: Ledger, state: State, stop: str, seconds: float
) -> Document:
    task, data, config = prepared.task, prepared.dataset, prepared.config
    weights = model_weights(state)
    if state.round and state.round not in store.checkpoints(folder / "checkpoints"):
        store.save_checkpoint(folder / "checkpoints", state, ledger.head)
    save_model(folder / "model.safetensors", weights, task.layout)
    found = evaluate(task.module, weights, data.x_test, data.y_test, task.measured, config.metrics)
    result = {
        "recipe": task.recipe.name,
        "dataset": config.dataset,
        "test_accuracy": found["accuracy"],
        "test_loss": found["loss"],
        "rounds": state.round,
        "seconds": seconds,
        "stopped": stop,
        "engine": prepared.engine,
        "engine_reason": prepared.engine_reason,
        "simulated": not config.secure_noise,
        "run": str(folder),
        "ledger": [asdict(row) for row in ledger.table(accountant=config.accountant)],
        "own_budgets": [asdict(row) for row in ledger.own_table(config.accountant)],
        "forecast": forecast(prepared),
    }
    result |= {f"test_{k}": v for k, v in found.items() if k not in ("accuracy", "loss", "r2")}
    result["r2"] = found.get("r2")
    result["learned"], result["judgement"] = judgement(task, weights, data) if state.round else (None, "")
    store.write_json(folder / "result.json", result)
    return result


def judgement(task: Task, weights: np.ndarray, data: Dataset) -> tuple[bool | None, str]:
    """Did the model learn anything? Judged on the test rows: three standard errors above guessing. (verdict, a sentence)"""
    if not len(data.y_test) or not np.isfinite(weights).all():
        return (False, "not finite: this model learned nothing. Lower learning_rate") if len(data.y_test) else (None, "")
    out = outputs(task.module, weights, data.x_test).numpy().astype(np.float64)
    if data.classes is None:
        better = (data.y_test - data.y_test.mean()) ** 2 - (out.reshape(-1) - data.y_test) ** 2
        learned = bool(better.mean() > 3 * better.std() / len(better) ** 0.5)
        share = better.mean() / max(float(np.var(data.y_test)), 1e-12)
        than = f"always guessing the mean (R² {share:.3f} of at most 1, where 0 is the mean)"
    else:
        guess = float(np.bincount(data.y_test.astype(np.int64)).max() / len(data.y_test))
        accuracy = float((out.argmax(1) == data.y_test).mean())
        learned = accuracy > guess + 3 * (guess * (1 - guess) / len(data.y_test)) ** 0.5
        than = f"always guessing the most frequent class ({guess:.3f})"
    if learned:
        return True, f"better than {than}"
    return False, (
        f"NOT better than {than}: this model learned nothing. Try more data per client, larger batches, fewer steps or a larger "
        "epsilon; `fedveil plan` proposes settings, `fedveil fit` chooses them"
    )


def finished(folder: Path, state: State, config: RunConfig) -> JsonObject | None:
    """What result.json holds, if the run ended where its checkpoints do and no more rounds are asked for."""
    if not ((folder / "result.json").exists() and (folder / "model.safetensors").exists()):
        return None
    result: JsonObject = store.read_json(folder / "result.json")
    stopped = state.round >= config.rounds or result.get("stopped") != ALL_DONE
    return result if stopped and result.get("rounds") == state.round else None


def save_model(path: Path, weights: np.ndarray, layout: Layout) -> None:
    """The final model as a plain state_dict in safetensors."""
    import torch
    from safetensors.numpy import save

    named = unflatten(torch.as_tensor(weights), layout)
    store.write_atomic(path, save({name: np.ascontiguousarray(t.numpy()) for name, t in named.items()}))


def trained(
    folder: Path, config: RunConfig, dataset: Dataset | Table | None = None, module: nn.Module | None = None
) -> nn.Module:
    """The module with the weights that a finished run saved."""
    from safetensors.numpy import load_file

    from fedveil.models.layout import load as load_weights

    path = folder / "model.safetensors"
    if not path.exists():
        raise UserError(f"{folder} has no model yet: the run is not finished; continue it with --resume")
    if config.looked is None and (folder / store.TABLE).exists():
        config = config.with_look(looked_from_json(store.read_json(folder / store.TABLE)))
    module = prepare(config, dataset).task.module if module is None else module
    tensors = load_file(path)
    return load_weights(module, np.concatenate([tensors[name].reshape(-1) for name in layout_of(module).names]))
