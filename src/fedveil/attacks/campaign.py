"""Attacks on a finished run (or on a recipe alone), each as one dictionary: the report format of `attacks/<kind>.json`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedveil.attacks import attribute, decoder, membership, shadows, verdicts
from fedveil.attacks.audit import canaries, lowbits, preprocessing
from fedveil.attacks.audit import plan as planning
from fedveil.attacks.audit.coalition import audit_coalition
from fedveil.attacks.audit.final import audit_final
from fedveil.attacks.exact import linear, spear
from fedveil.attacks.leakage import measure
from fedveil.attacks.malicious import attack as malicious
from fedveil.attacks.malicious.models import Dense, dense_layers
from fedveil.attacks.metrics import STRICT_MSE
from fedveil.errors import UserError, did_you_mean
from fedveil.federation import store
from fedveil.federation.config import RunConfig, config_of
from fedveil.federation.loop import Prepared, check_recipe, prepare, raw_data, with_features
from fedveil.federation.round import State, model_weights, moment_of, start
from fedveil.federation.view import view
from fedveil.jsons import Document, JsonObject, plain
from fedveil.protect.law import Gaussian
from fedveil.protect.place import AtServer, Reports
from fedveil.protect.recipe import Recipe

KINDS = ("gradient", "malicious", "exact", "membership", "attribute", "decoder")
BITS_SHARE = 0.2  # of an audit's level goes to low bits
SAME_SIGMA = 1e-3  # noise multipliers nearer than this are the same: a calibration stops within half of it
NOTED_SIGMA = 1e-3  # more where a multiplier is known from a note alone, with four digits
_OWN_SIGMA = re.compile(r"(epsilon .+ examples): sigma (\d+(?:\.\d+)?(?:e[+-]\d+)?)")


def gradient_config(
    recipe: str | Recipe, dataset: str, model: str, *, victims: int, seed: int, tap: str, batch: float | None = None,
    local_steps: int = 1, noise_on: str | None = None, data: str | None = None, changes: Mapping[str, object] | None = None,
) -> RunConfig:  # fmt: skip
    """A configuration for attacking a recipe at the model's initialisation, without a run."""
    values: JsonObject = {
        "dataset": dataset, "model": model, "seed": seed, "local_steps": local_steps,
        "partition": "iid", "rounds": 100, "data": data,
    }  # fmt: skip
    if batch is not None:
        values["batch_size"] = batch
    if tap != "type2":
        values |= {"clients": max(2, victims), "cohort_size": None}
    changed = {**({"noise_on": noise_on} if noise_on else {}), **(changes or {})}
    return config_of(recipe, {**values, **changed})


def attack_gradients(
    jobs: Mapping[str, tuple[RunConfig, Callable[[Prepared], State]]],
    *,
    out: Path | None = None,
    **options: Any,
) -> list[JsonObject]:
    """Measure each job; with `out`, one line per job is kept (finished ones are not run again) and a gallery drawn."""

    def run(name: str) -> measure.Outcome:
        config, state_of = jobs[name]
        prepared = prepare(config)
        return measure.measure(prepared, state_of(prepared), **options)

    if out is None:
        return [run(name).figures for name in jobs]
    marked = "|".join(f"{k}={v}" for k, v in sorted(options.items()))
    wanted = {f"{name}|{marked}": name for name in jobs}

    def run_and_keep(job: str) -> JsonObject:
        outcome = run(wanted[job])
        measure.keep(outcome, _pictures(out, job))
        return outcome.figures

    lines = measure.table(out / "gradient.jsonl", [(job, job) for job in wanted], run_and_keep)
    rows = {line["job"]: line for line in lines}
    drawn = {job: path for job in wanted if (path := _pictures(out, job)).exists()}
    if drawn:
        outcomes = {job: measure.kept(path, rows[job]) for job, path in drawn.items()}
        measure.gallery(outcomes, out / "gradient.png")
        for job, path in drawn.items():  # each beside its own figures in a report
            measure.gallery({job: outcomes[job]}, path.with_suffix(".png"))
    return [rows[job] for job in wanted]


def _pictures(out: Path, job: str) -> Path:
    """Where the images of a job wait for the gallery, so that a resumed campaign draws all of them."""
    return out / "pictures" / f"{measure.mark_of(job)}.npz"


def initial(prepared: Prepared) -> State:
    """The state before the first round."""
    return start(prepared.task, prepared.initial)


def attack_membership(
    prepared: Prepared, weights: np.ndarray, *, shadows_count: int = 16, pool_size: int = 1000, seed: int = 0,
    methods: Sequence[str] = membership.METHODS, path: np.ndarray | None = None,
) -> JsonObject:  # fmt: skip
    """All membership attacks on final weights; the headline figures are those of online LiRA (or the first asked).

    path: the run's weights at its checkpoints, for whoever saw them (trajectory)."""
    pool = shadows.pool_of(prepared, pool_size, seed)
    train = shadows.trainer(prepared, pool, seed)
    dataset, task = prepared.dataset, prepared.task
    found = membership.infer(
        task.module, task.layout, weights, train, pool.x[pool.rows], pool.y[pool.rows], pool.member,
        shadows=shadows_count, methods=tuple(methods), seed=seed, population=pool.population,
        pixel_range=dataset.pixel_range, path=path,
    )  # fmt: skip
    headline = "lira-online" if "lira-online" in found else next(iter(found))
    return {
        "kind": "membership",
        "method": headline,
        **asdict(found[headline]),
        "methods": {name: asdict(r) for name, r in found.items()},
        "shadows": shadows_count,
        "pool": len(pool.rows),
        "attacker": "knows the recipe and all training rows outside the pool; shadows use the same recipe",
        "together": "auc_interval_all: with 95% confidence these intervals hold for all attacks at once",
    }


def attack_attribute(
    prepared: Prepared, weights: np.ndarray, *, name: str | None = None, seed: int = 0
) -> JsonObject:
    """Read a sensitive attribute of the training rows off the model's embeddings."""
    known = dict(prepared.dataset.attributes)
    if not known:
        raise UserError(
            f"dataset '{prepared.dataset.name}' has no further attributes to infer (utkface has)."
        )
    name = name or next(iter(known))
    if name not in known:
        raise UserError(
            f"unknown attribute '{name}'; there are {', '.join(known)}.{did_you_mean(name, known)}"
        )
    found = attribute.infer(
        prepared.task.module,
        prepared.task.layout,
        weights,
        prepared.dataset.x,
        np.asarray(known[name]),
        seed=seed,
    )
    return {"kind": "attribute", "attribute": name, **asdict(found)}


def attack_decoder(
    prepared: Prepared, weights: np.ndarray, *, victims: int = 100, seed: int = 0, out: Path | None = None,
    rows: int = 4000, sources: Sequence[Literal["embeddings", "outputs"]] = ("embeddings", "outputs"),
) -> JsonObject:  # fmt: skip
    """Decode training inputs from the model's embeddings; the attacker's own data are the first `rows` test rows."""
    dataset = prepared.dataset
    chosen = np.random.default_rng(seed).choice(len(dataset.x), min(victims, len(dataset.x)), replace=False)
    figures: JsonObject = {"kind": "decoder", "victims": len(chosen), "images": dataset.pixel_range is not None}
    for source in sources:
        found = decoder.decode(
            prepared.task.module, prepared.task.layout, weights, dataset.x_test[:rows], dataset.x[chosen],
            source=source, pixel_range=dataset.pixel_range, seed=seed,
        )  # fmt: skip
        values = {k: v for k, v in asdict(found).items() if k not in ("images", "truth")}
        if source == "embeddings":
            figures |= {"source": source, **values}
            if out is not None and dataset.pixel_range:
                picture = measure.Outcome({}, found.truth[:8, None], found.images[:8, None], {})
                measure.gallery({"decoder": picture}, out / "decoder.png")
        else:
            figures["from_outputs"] = values
    return figures


def opened(path: Path | store.Run, data: str | None = None) -> store.Run:
    """The run to attack or audit; one that released nothing, or whose recipe or noise would be another now, is refused.

    data: where its datasets are, if not where they were."""
    run = store.open_run(path)
    check_recipe(run)
    nothing = nothing_released(run)
    if nothing:
        raise UserError(f"{run.path}: {nothing}")
    if data is not None:
        run = replace(run, config=run.config.model_copy(update={"data": data}))
    _check_calibration(run)
    return run


def nothing_released(run: store.Run) -> str:
    """Why there is nothing to audit or attack in a run, or "": a budget may not even pay for the first round."""
    if _played(run):
        return ""
    why = "no round was played" if run.result else "no round was finished yet"
    return f"{why}, so no update and no trained model was released: there is nothing to audit or attack"


def _played(run: store.Run) -> int:
    """Rounds that a run really played: a spent budget ends it early, or before the first."""
    return int(run.metrics[-1]["round"]) if run.metrics else int((run.result or {}).get("rounds", 0))


def _check_calibration(run: store.Run) -> None:
    """Refuse a run whose noise was calibrated otherwise than it would be now: it would be attacked, and its ledger judged, with
    noise that it did not have."""
    if not (run.config.calibrate or run.config.client_epsilons):
        return
    for whose, had, now, apart in _multipliers(run, prepare(run.config)):
        if abs(now - had) > apart * had:
            raise UserError(
                f"{run.path}: {whose} had sigma {had:.6g}, and calibrated by this version, on the data at hand, it would be "
                f"{now:.6g}: what an attack or audit plays would not be what was released. To attack or audit it, run it again"
            )


def _multipliers(run: store.Run, prepared: Prepared) -> Iterator[tuple[str, float, float, float]]:
    """Whose noise multiplier it is, what it was in the run, what it is as prepared now, and how far apart the same may be."""
    if run.config.client_epsilons:  # the rounds' own lines tell of none of these
        was, now = _noted(run.facts.get("notes") or ()), _noted(prepared.notes)
        for whose in (whose for whose in was if whose in now):
            yield f"clients with {whose}", was[whose], now[whose], SAME_SIGMA + NOTED_SIGMA
        return
    had = run.metrics[0].get("sigma") if run.metrics else None
    if isinstance(had, float):
        yield "the run", had, moment_of(prepared.task, initial(prepared)).sigmas[0], SAME_SIGMA


def _noted(notes: Sequence[object]) -> dict[str, float]:
    """The multipliers of clients with budgets of their own, as a calibration's notes tell them."""
    found = (_OWN_SIGMA.fullmatch(str(note)) for note in notes)
    return {m[1]: float(m[2]) for m in found if m}


def audit_run(
    path: Path | store.Run,
    *,
    canaries_count: int = 1000,
    rounds: int | None = None,
    seed: int = 0,
    significance: float = 0.05,
) -> tuple[JsonObject, int]:
    """Replay a run's recipe with canaries against the promise in its own ledger: (figures, exit code).

    rounds: replay only so many; they are held against what the ledger says after them."""
    run = opened(path)
    rounds = min(rounds or _played(run), _played(run))
    # A sum under masks is judged from the seat that its promise is about: the server with its colluders.
    judge = audit_coalition if run.config.secure_sum else canaries.audit
    found, facts = judge(
        run.config,
        ledger=run.ledger(rounds),
        canaries=canaries_count,
        rounds=rounds,
        seed=seed,
        significance=significance * (1 - BITS_SHARE),
    )
    bits = _bits(run, canaries_count, seed, significance * BITS_SHARE)
    figures = {"kind": "audit", **asdict(found), **facts, "significance": significance, "low_bits": bits}
    leak = _preparation(run.config, seed)
    figures["preparation"] = leak
    broken = (bits["broken"] or leak["leaks"]) and found.status == "sound"
    if bits["broken"] and found.verdict != "promise broken":
        figures |= {
            "verdict": "promise broken",
            "epsilon_lower": max(found.epsilon_lower, bits["epsilon_lower"]),
            "reason": f"low bits of one round show at least {bits['epsilon_lower']:.3g}, promised for it "
            f"{bits['epsilon_promised']:.3g}: {bits['with_excludes_without']} of {bits['releases']} releases cannot come "
            "from the neighbour",
        }
    if leak["leaks"] and found.epsilon_promised is not None:
        figures |= {"verdict": "promise broken", "reason": f"{leak['reason']}; no noise covers that, so no epsilon holds"}
    return figures, max(found.exit_code, int(broken))


def plan_audit(
    path: Path | store.Run, *, canaries_count: int = 1000, rounds: int | None = None, seed: int = 0, significance: float = 0.05,
    factor: float = 2.0, of: planning.Of = "noise",
) -> JsonObject:  # fmt: skip
    """How many canaries, or how many rounds, a run's audit needs to find a promise broken by `factor` with 99%.

    of: what is wrong by that factor, the noise or a record's contribution (sampling rate, clip). With `rounds` given only
    that many are planned for; else also the fewest rounds with which `canaries_count` of them (at most as many as have
    room) are enough."""
    run = opened(path)
    played = _played(run)
    prepared = prepare(run.config)
    if not isinstance(prepared.task.recipe.law, Gaussian):
        raise UserError(
            "audits are planned for Gaussian noise; other laws have no plan yet. Audit with --canaries 2000."
        )
    unit, observer = canaries.unit_of(prepared)
    seat = "server" if run.config.secure_sum else observer

    def planned(count: int) -> tuple[planning.Plan, int]:
        epsilon, status, curve = canaries.promised(run.ledger(count), seat, unit, run.config.delta)
        if epsilon is None:
            raise UserError("nothing finite is promised to this observer: there is no audit to plan.")
        score = canaries.planned_score(run.config, count, seed)
        found = planning.plan(
            score.signal, epsilon, count, curve=curve if status == "sound" else None, delta=run.config.delta, factor=factor,
            significance=significance * (1 - BITS_SHARE), of=of, spread=score.spread,
        )  # fmt: skip
        return found, score.room

    found, room = planned(min(rounds or played, played))
    facts: Document = {
        "kind": "audit-plan",
        "unit": unit,
        "observer": seat,
        "room": room,
        **asdict(found),
    }
    if found.canaries is None or found.canaries > room:
        facts["sentence"] += f" Only {room:,} have room here."
    if rounds is None:
        have = min(canaries_count, room)
        counts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048) if n < played] + [played]
        plans = ((n, planned(n)[0].canaries) for n in counts)
        enough = next((n for n, needed in plans if needed is not None and needed <= have), None)
        facts |= {"canaries_at_hand": have, "rounds_enough": enough}
        said = "no number of rounds that were played is" if enough is None else f"{enough} rounds are"
        facts["sentence"] += f" With {have:,} canaries {said} enough."
    return facts


def audit_final_model(
    path: Path | store.Run,
    *,
    canaries_count: int = 1000,
    rounds: int | None = None,
    seed: int = 0,
    significance: float = 0.05,
) -> tuple[JsonObject, int]:
    """The promise to whoever gets the final model alone: (figures, exit code)."""
    run = opened(path)
    rounds = min(rounds or _played(run), _played(run))
    found = audit_final(
        run.config,
        run.ledger(rounds),
        canaries=canaries_count,
        rounds=rounds,
        seed=seed,
        significance=significance,
    )
    unit, _ = canaries.unit_of(prepare(run.config))
    facts = {"unit": unit, "observer": "public", "rounds": rounds, "seen": "the final model alone"}
    return {"kind": "audit", **asdict(found), **facts}, found.exit_code


def _bits(run: store.Run, units: int, seed: int, significance: float) -> Document:
    """The low bits of a run's first round against what its ledger says after one round."""
    prepared = prepare(run.config)
    found = lowbits.look(prepared, units=units, significance=significance, seed=seed)
    promised, _, _ = canaries.promised(run.ledger(1), found.observer, found.unit, run.config.delta)  # type: ignore[arg-type]
    return {**asdict(found), "epsilon_promised": promised, "broken": found.broken(promised)}


def _preparation(config: RunConfig, seed: int) -> Document:
    """Was the data prepared with what private rows show, unpaid? What a table's look has learnt is paid for in the ledger."""
    if config.table:
        return {"leaks": False, "reason": "", "looked_at": "a table's constants are declared or paid for in the ledger"}
    found = preprocessing.look(raw_data(config), lambda rows: with_features(rows, config), seed)
    seen = "the rows as they come, and the run's features"
    return {**asdict(found), "leaks": found.leaks, "reason": found.reason, "looked_at": seen}


def attack_malicious(
    prepared: Prepared, *, kinds: Sequence[malicious.Kind] = malicious.KINDS, bins: int = 512, batch: int = 64, clients: int = 8,
    seed: int = 0,
) -> JsonObject:  # fmt: skip
    """A server that sends models of its own making, against the run's recipe with the run's noise: one step on `batch`
    records of each client, alone and as a sum."""
    config = prepared.config
    size = min(prepared.partition.size(c) for c in range(prepared.partition.clients))
    batch, clients = min(batch, size), min(clients, prepared.partition.clients)
    if prepared.dataset.classes is None or isinstance(prepared.task.recipe.place, Reports) or batch < 4:
        raise UserError(
            "malicious models are tried on classification with records to spare and additive noise."
        )
    net = {"model": "papers-mlp", "model_options": {"hidden": [bins]}}
    staged = prepare(config.model_copy(update={**_one_step(prepared, batch), **net}))
    rows = [
        asdict(malicious.steal(staged, kind, clients=count, batch=batch, seed=seed))
        for kind in kinds
        for count in dict.fromkeys((1, clients))
        if not (kind == "isolate" and count == 1)
    ]
    best = max(rows, key=lambda row: row["share"] - row["control"])
    words = {
        "attacker": "sends models of its own making; a node that checks them would refuse (docs/attacks.md)"
    }
    return {"kind": "malicious", "method": best["kind"], "images": bool(prepared.dataset.pixel_range), "share": best["share"],
            "share_interval": best["interval"], "control": best["control"], "batch": batch, "attacks": rows, **words}  # fmt: skip


def _one_step(prepared: Prepared, batch: int) -> JsonObject:
    """Changes of a configuration: the same recipe and noise, but one plain step on `batch` records of each client."""
    config = prepared.config
    protect = dict(config.protect)
    if config.recipe != "non-private":
        protect["sigma"] = float(moment_of(prepared.task, initial(prepared)).sigmas[0])
    return {
        "local_steps": 1, "batch_size": float(batch), "learning_rate": 1.0, "calibrate": False, "target_epsilon": None,
        "client_epsilons": None, "protect": protect, "engine": "auto", "server_momentum": 0.0, "momentum": 0.0,
        "learning_rate_end": None,
    }  # fmt: skip


def attack_exact(prepared: Prepared, *, batches: int = 8, seed: int = 0) -> JsonObject:
    """Solve for the records behind one step of the run's own model, as the server gets it, with the run's noise.

    A net that begins with a dense layer and ReLU: batches of 4 by `exact.spear`. One dense layer alone: one record,
    as a quotient."""
    layers = dense_layers(prepared.task.layout)
    if not layers or layers[0].weight.start != 0 or isinstance(prepared.task.recipe.place, Reports):
        raise UserError(
            "exact inversion needs a model that begins with a dense layer with bias, and additive noise."
        )
    batch = 1 if len(layers) == 1 else 4
    staged = prepare(prepared.config.model_copy(update=_one_step(prepared, batch)))
    task, rng = staged.task, np.random.default_rng(seed)
    tap = "type0-sanitised" if isinstance(task.recipe.place, AtServer) else "type0"
    span = 1.0 if not prepared.dataset.pixel_range else float(np.ptp(prepared.dataset.pixel_range))
    hits = false = 0
    for number in range(batches):
        client = number % staged.partition.clients
        rows = rng.choice(np.asarray(staged.partition.rows(client)), batch, replace=False)
        seen = view(task, initial(staged), tap, client, rows=rows).values[0].astype(np.float64)
        found = _solved(seen, layers[0], staged.initial, batch, seed + number)
        strangers = rng.choice(np.setdiff1d(np.arange(len(task.x)), rows), batch, replace=False)
        for picked, is_there in ((rows, True), (strangers, False)):
            near = malicious.nearest(found, task.x[picked].reshape(batch, -1).astype(np.float64))
            count = int((near < STRICT_MSE * span**2).sum())
            hits, false = (hits + count, false) if is_there else (hits, false + count)
    total = batches * batch
    return {"kind": "exact", "method": "quotient" if batch == 1 else "spear", "images": bool(prepared.dataset.pixel_range),
            "share": hits / total, "share_interval": membership.exact_interval(hits, total), "control": false / total,
            "batch": batch, "batches": batches, "tap": tap}  # fmt: skip


def _solved(seen: np.ndarray, first: Dense, initial: np.ndarray, batch: int, seed: int) -> np.ndarray:
    """Candidates [n, d] for the records behind one update."""
    weight, bias = -seen[first.weight].reshape(first.units, first.width), -seen[first.bias]
    if batch == 1:
        return linear.single(weight, bias)[None] if np.abs(bias).max() > 0 else np.zeros((0, first.width))
    layer = initial[first.weight].reshape(first.units, first.width), initial[first.bias]
    found = spear.invert(weight, bias, layer=layer, batch=batch, seed=seed, draws=5_000)
    return found.inputs if found.complete else np.zeros((0, first.width))


def final_weights(run: store.Run) -> np.ndarray:
    """The weights a run ended with."""
    return model_weights(run.state())


def save(folder: Path, kind: str, figures: object, settings: Mapping[str, object] | None = None) -> Path:
    """Write `attacks/<kind>.json` below a run, and keep it beside earlier ones as `attacks/history/<kind>-<time>.json`."""
    history = folder / "history"
    history.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.json"
    store.write_json(path, plain(figures))
    made = datetime.now(timezone.utc)
    entry = {
        "schema": verdicts.ENTRY,
        "made": made.isoformat(timespec="seconds"),
        "settings": dict(settings or {}),
    }
    store.write_json(history / f"{kind}-{made:%Y%m%dT%H%M%S%f}Z.json", plain({**entry, "result": figures}))
    return path


def taps_of(prepared: Prepared) -> list[str]:
    """Where gradients of a run can be read, from the inside out: one tap or two for every seat."""
    last = ["type0-sanitised"] if isinstance(prepared.task.recipe.place, AtServer) else []
    return ["type2", "type1", "type0", *last]


def attack_every_tap(
    jobs: Mapping[str, tuple[RunConfig, Callable[[Prepared], State]]], prepared: Prepared, *, out: Path | None, victims: int,
    **options: object,
) -> list[JsonObject]:  # fmt: skip
    """Gradients at every tap; updates of as many clients as there are. A tap that cannot be attacked does not stop the others."""
    rows: list[JsonObject] = []
    wrong: UserError | None = None
    for tap in taps_of(prepared):
        most = victims if tap == "type2" else min(victims, prepared.partition.clients)
        try:
            rows += attack_gradients(jobs, out=out, **{**options, "tap": tap, "victims": most})
        except UserError as why:
            wrong = why
    if not rows and wrong is not None:
        raise wrong
    return rows


def one_after_the_other(
    folder: Path, attacks: Mapping[str, Callable[[], object]], settings: Mapping[str, object], *, say: Callable[[str], None]
) -> JsonObject:  # fmt: skip
    """All attacks, each written as soon as it is done; those that an interrupted call with the same settings has done are not
    made again. What cannot be done on this run says why and does not stop the others."""
    notes, mark = folder / "under-way.json", json.loads(json.dumps(plain(dict(settings))))
    known = store.read_json(notes) if notes.exists() else {}
    done: list[str] = known["done"] if isinstance(known, dict) and known.get("settings") == mark else []
    results: Document = {}
    for number, (name, attack) in enumerate(attacks.items(), 1):
        head = f"[{number}/{len(attacks)}] {name}"
        if name in done and (folder / f"{name}.json").exists():
            results[name] = store.read_json(folder / f"{name}.json")
            say(f"{head}: done before")
            continue
        say(f"{head} …")
        began = time.monotonic()
        try:
            found = attack()
        except UserError as wrong:
            found = {"kind": name, "not_done": str(wrong)}
        save(folder, name, found, settings)
        results[name] = found
        done = [*done, name]
        store.write_json(notes, {"settings": mark, "done": done})
        say(f"{head}: {time.monotonic() - began:.0f} s")
    notes.unlink(missing_ok=True)
    return results


def summarise(path: Path | store.Run) -> JsonObject:
    """One row per seat: what it was promised, the best attack so far, what that got and means. Kept as
    `attacks/summary.json`."""
    run = store.open_run(path)
    rows = [asdict(row) for row in run.ledger(None).table(accountant=run.config.accountant)]
    summary = verdicts.summary(rows, verdicts.read_history(run.path / "attacks" / "history"))
    store.write_json(run.path / "attacks" / "summary.json", plain(summary))
    return summary
