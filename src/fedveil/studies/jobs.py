"""Run one job and return plain numbers; what a cell shows is read from them by `measure`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.data.constants import PIXEL_STATISTICS
from fedveil.errors import UserError
from fedveil.jsons import Document
from fedveil.privacy import formulas, papers, renyi, schedules
from fedveil.privacy.events import Noise
from fedveil.studies.cells import (
    Attack,
    Changes,
    Epsilon,
    Inference,
    Job,
    Spend,
    Stop,
    Time,
    Train,
    key_of,
)

if TYPE_CHECKING:
    from fedveil.data.datasets import Dataset
    from fedveil.federation.config import RunConfig
    from fedveil.protect.recipe import Recipe

Result = Document


def execute(job: Job, seed: int, folder: Path) -> Result:
    """The numbers of a job; long ones keep checkpoints under `folder` and continue from there."""
    if isinstance(job, Epsilon):
        return _epsilon(job)
    if isinstance(job, Stop):
        return _stop(job)
    if isinstance(job, Spend):
        return _spend(job)
    if isinstance(job, Train):
        return _train(job, seed, folder)
    if isinstance(job, Attack):
        return _attack(job, seed, folder)
    if isinstance(job, Inference):
        return _inference(job, seed, folder)
    return _time(job, seed)


# --- epsilon ---


def _epsilon(job: Epsilon) -> Result:
    def at(extra: int) -> float:
        return papers.table_epsilon(job.formula, job.sigma, job.rate, job.steps + extra, job.delta)

    stated = at(0)
    extra = job.extra
    if extra is None:
        near = stated if job.near is None else job.near
        fits = abs(stated - near) < 5.5e-4  # the tables print three digits
        extra = 0 if fits else min((-1, 0, 1), key=lambda e: abs(at(e) - near))
    return {"epsilon": at(extra), "as_stated": stated, "extra_steps": extra}


def _stop(job: Stop) -> Result:
    """First step over the budget under a schedule of the authors' code; "linear/60" is scaled to 60 rounds."""
    kind, _, rounds = job.schedule.partition("/")
    if kind not in schedules.AUTHORS_STEP_EPSILON:
        return {"iteration": None, "index": None, "rounds": None}
    total = 100 * int(rounds or 100)
    steps = np.arange(float(total)) * 10000 / total
    sigmas = float(formulas.classic_epsilon(1.0, job.delta)) / schedules.AUTHORS_STEP_EPSILON[kind](steps)
    first = papers.first_over(job.formula, sigmas, job.rate, job.delta, job.budget)
    if first is None:
        return {"iteration": None, "index": None, "rounds": None, "spent": total}
    return {"iteration": first, "index": first - 1, "rounds": math.ceil(first / 100)}


def _spend(job: Spend) -> Result:
    sigmas = schedules.parse(job.schedule).per_iteration(job.rounds, 1)
    return {"epsilon": _moments(sigmas, job.steps, job.rate, job.delta)}


def _moments(sigmas: Iterable[float], steps: int, rate: float, delta: float) -> float:
    """The moments accountant after so many steps with each sigma, on the orders of the rows with one sigma. (Where the orders of
    `papers.spent` end, at 63, an epsilon below ln(1/delta) / 62 = 0.19 cannot come out.)"""
    total = sum(steps * renyi.poisson(Noise("gaussian", float(s)), rate, renyi.MOMENTS) for s in sigmas)
    return formulas.old_conversion(renyi.MOMENTS, total, delta)


# --- training ---


@lru_cache(maxsize=4)
def _data(name: str, options: Changes, limit: int | None) -> Dataset:
    from fedveil.data.datasets import load

    return load(name, limit=limit, **dict(options))


def _config(job: Train | Time, seed: int, **more: Any) -> RunConfig:
    from fedveil.federation.config import make_config

    # `cohort` is a part of the recipe here, and cohort_size None must not meet a dataset's own default.
    return make_config(
        {"recipe": job.recipe, "dataset": job.dataset, "seed": seed, **dict(job.settings), **more}
    )


def _dataset(job: Train | Time) -> Dataset:
    return _data(job.dataset, job.dataset_options, dict(job.settings).get("limit"))


def _train(job: Train, seed: int, folder: Path) -> Result:
    from fedveil.federation.loop import run

    config = _config(job, seed)
    place = folder / "runs" / key_of(job, seed)
    clock = time.process_time()
    result = run(
        config, place, resume=(place / "run.json").exists(), dataset=_dataset(job), command="reproduce"
    )
    return _figures(place, config, result, time.process_time() - clock)


def _figures(place: Path, config: RunConfig, result: Result, cpu: float) -> Result:
    from fedveil.federation.store import open_run

    done, scale = open_run(place), config.asked_scale
    metrics = done.metrics
    private = {line["round"]: line for line in done.private}

    def brief(value: object) -> float | None:  # curves are kept with six digits, which all prints are far below
        return None if value is None else float(f"{value:.6g}")

    def listed(name: str) -> list[tuple[int, float | None]]:
        return [(m["round"], brief(m[name])) for m in metrics if m.get(name) is not None]

    def norm(line: Result) -> float | None:
        values = [v for v in line.get("norm_mean") or () if v is not None]
        return brief(float(np.mean(values))) if values else None

    def largest(line: Result, *, of_mean: bool) -> float | None:
        if of_mean:
            return brief(line.get("mean_gradient_norm_max"))
        values = [v for v in line.get("norm_max") or () if v is not None]
        return brief(max(values)) if values else None

    figures = {
        "accuracy": result["test_accuracy"],
        "rmse": result.get("test_rmse"),
        "accuracies": listed("test_accuracy"),
        "rmses": listed("test_rmse"),
        "sigmas": listed("sigma"),
        "bounds": listed("bound"),
        "norms": [(r, norm(p)) for r, p in private.items()],
        # norm of what S is about: one example, or the batch's mean
        "largest": [(r, largest(p, of_mean=scale.of_mean)) for r, p in private.items()],
        "deviations": [(r, brief(p.get("noise_deviation"))) for r, p in private.items()],
        "local_steps": config.local_steps,
        "rounds": result["rounds"],
        "stopped": result["stopped"],
        "engine": result["engine"],
        "noise_law": law_of(config.built_recipe()),
        "cpu_seconds": cpu,
        "l2max": scale.batch,
        "variance": config.fixed_variance,
        "ledger": [row for row in result["ledger"] if row["observer"] in ("server", "public")],
    }
    if config.fixed_variance is not None:  # its noise follows no norm: one run is counted in every reading of S
        figures["largest_single"] = [(r, largest(p, of_mean=False)) for r, p in private.items()]
    return figures


@lru_cache
def law_in(job: Train | Attack) -> str:
    """Which noise a run of this job, or the recipe that it attacks, draws: known before it is played."""
    return law_of((_attacked(job, 0)[0] if isinstance(job, Attack) else _config(job, 0)).built_recipe())


def law_of(recipe: Recipe) -> str:
    """Which noise a run draws: exact (on a grid), float, none, or random reports instead of noise."""
    if not recipe.private:
        return "none"
    if recipe.law is None:
        return "reports of two values"
    return "exact" if recipe.fineness > 0 else "float"


def _time(job: Time, seed: int) -> Result:
    """CPU time per local iteration of one client, and over that of the same iterations without protection, which are played
    in turns with it. Two lengths, so that what happens once falls out; of each the shortest of five, disturbed least."""
    from fedveil.federation.loop import play_round, prepare
    from fedveil.federation.round import start
    from fedveil.studies.settings import control

    load = [_load()]
    racers = {job.recipe: job, "non-private": job if job.recipe == "non-private" else control(job)}
    spent: dict[str, list[float]] = {name: [] for name in racers}
    engines = {}
    for steps in (job.iterations, 2 * job.iterations):
        ready = {}
        for name, one in racers.items():
            config = _config(one, seed, local_steps=steps, rounds=1, diagnostics=False)
            ready[name] = prepare(config, _dataset(one))
            engines[name] = ready[name].engine
        tries: dict[str, list[float]] = {name: [] for name in racers}
        for turn in range(6):
            for name, prepared in ready.items():
                clock = time.process_time()
                play_round(prepared, start(prepared.task, prepared.initial), np.array([0]))
                if turn:  # the first warms up
                    tries[name].append(time.process_time() - clock)
        for name, found in tries.items():
            spent[name].append(min(found))
    each = {name: _per_iteration(once, twice, job.iterations) for name, (once, twice) in spent.items()}
    own, plain = each[job.recipe], each["non-private"]
    return {"seconds": own, "milliseconds": 1000 * own, "engine": engines[job.recipe], "over_plain": own / plain,
            "load": [*load, _load()], "cores": os.cpu_count()}  # fmt: skip


def _load() -> float | None:
    """How many processes wanted a core over the last minute, on average; None where nobody counts them."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _per_iteration(once: float, twice: float, iterations: int) -> float:
    return (twice - once) / iterations if twice > once else twice / (2 * iterations)


# --- attacks ---


def _attack(job: Attack, seed: int, folder: Path) -> Result:
    from fedveil.attacks import campaign
    from fedveil.attacks.leakage import measure
    from fedveil.federation.loop import prepare

    config, tap = _attacked(job, seed)
    prepared = prepare(config, _data(job.dataset, (), None))
    found = measure.measure(
        prepared, campaign.initial(prepared), method=job.method,  # type: ignore[arg-type]
        tap=tap, victims=job.victims, seed=seed, iterations=job.iterations, aware=job.aware,
    )  # fmt: skip
    pictures = folder / "pictures" / f"{key_of(job, seed)}.npz"
    pictures.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(pictures, truth=found.truth[:6, 0], guess=found.guess[:6, 0])
    return json.loads(json.dumps({**found.figures, "noise_law": law_of(config.built_recipe())}))


def _attacked(job: Attack, seed: int) -> tuple[RunConfig, str]:
    """The configuration that is attacked, and where."""
    from fedveil.attacks import campaign
    from fedveil.attacks.leakage.measure import TYPES

    names = {"type0-sanitised": "0-sanitised", "type0": "0", "type1": "1"}
    tap = TYPES[names[job.tap]] if job.tap in names else "type2"
    config = campaign.gradient_config(
        job.recipe, job.dataset, job.model, victims=job.victims, seed=seed, tap=tap, batch=job.batch,
        changes=dict(job.settings),
    )  # fmt: skip
    return config, tap


def _inference(job: Inference, seed: int, folder: Path) -> Result:
    from fedveil.attacks import campaign
    from fedveil.federation.loop import prepare
    from fedveil.federation.store import open_run

    place = folder / "runs" / key_of(job.train, seed)
    if not (place / "result.json").exists():
        _train(job.train, seed, folder)
    prepared = prepare(_config(job.train, seed), _dataset(job.train))
    weights = campaign.final_weights(open_run(place))
    if job.kind == "membership":
        return campaign.attack_membership(
            prepared, weights, shadows_count=job.shadows, pool_size=job.pool, seed=seed,
            methods=("shokri", "lira-online", "canary"),
        )  # fmt: skip
    if job.kind == "attribute":
        return campaign.attack_attribute(prepared, weights, name="gender", seed=seed)
    found = campaign.attack_decoder(
        prepared, weights, victims=job.victims, seed=seed, rows=job.pool,
        sources=("outputs",) if job.kind == "outputs" else ("embeddings",),
    )  # fmt: skip
    outputs = found.get("from_outputs")
    return {**found, **(outputs if isinstance(outputs, dict) else {})}


# --- reading a result ---


def measure(name: str, result: Result, job: Job, printed: Job) -> float | None:
    """The number that a cell shows. `printed` is the job in the paper's setting: "accuracy@95" of 100 rounds is
    read at the same share of a shorter run."""
    kind, _, rest = name.partition("@")
    if rest:
        return _at_round(result, kind, int(rest), job, printed)
    kind, _, rest = name.partition(":")
    if kind == "last_ten":  # of the tests, one of which may be far off
        last: list[float] = [v for _, v in result["accuracies"] if v is not None][-10:]
        return {"mean": sum(last) / len(last), "lowest": min(last), "highest": max(last)}[rest]
    if kind in ("rounds_to", "iterations_to"):
        first = _first_round(result, float(rest))
        return None if first is None else first * (result["local_steps"] if kind == "iterations_to" else 1)
    if kind == "spent_to":
        formula, _, target = rest.partition(":")
        return _spent_to(result, formula, float(target))
    if kind == "fixed_variance":
        reading, formula, target = rest.split(":")
        return _spent_to(result, formula, float(target), reading)
    if kind == "total_seconds":
        clients, _, count = rest.partition(":")
        return result["seconds"] * int(clients) * int(count)
    if name.endswith("_inputs"):  # a decoder's error in units of the inputs, squared for the mean squared one
        low, high = result["value_range"]
        error: float = result[name.removesuffix("_inputs")]
        return error * (high - low) ** (2 if "mse" in name else 1)
    control, _, rest = name.partition("_image_")  # what the mean or the black image has, without any attack
    if rest:
        return measure(rest, {**result, **result["controls"][control]}, job, printed)
    if name.endswith("_standard"):  # squared error of pixels in [0, 1] in units of the dataset's published variances
        deviations = np.array(PIXEL_STATISTICS[result["dataset"]][1])
        return float(result[name.removesuffix("_standard")] / (deviations**2).mean())
    if name == "mse_unclamped":  # the median of squares is the square of the median
        return float(result["rmse_unclamped"]) ** 2
    if "." in name:  # membership: method.figure
        method, _, figure = name.partition(".")
        return (result.get("methods", {}).get(method) or {}).get(figure)
    value = result.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _at_round(result: Result, kind: str, wanted: int, job: Job, printed: Job) -> float | None:
    lists = {"accuracy": "accuracies", "rmse": "rmses", "norm": "norms", "deviation": "deviations"}
    if kind not in lists:
        raise UserError(f"unknown measure '{kind}'")
    if isinstance(job, Train) and isinstance(printed, Train):
        wanted = max(1, round(wanted * dict(job.settings)["rounds"] / dict(printed.settings)["rounds"]))
    seen = [(r, v) for r, v in result[lists[kind]] if v is not None and r >= wanted]
    return seen[0][1] if seen else None


def _first_round(result: Result, target: float) -> int | None:
    return next((r for r, accuracy in result["accuracies"] if accuracy >= target), None)


def _spent_to(result: Result, formula: str, target: float, reading: str = "") -> float | None:
    """Nominal epsilon when the target accuracy is reached: with the sigma of each round, or, with a reading of S, with the fixed
    deviation of the noise over S.

    S is the bound, or the largest norm in the round, clipped: of a "single" example's layer, or of a batch's "mean". The steps of
    a round share one sigma, and that of the step that spends most does not flatter epsilon."""
    last = _first_round(result, target)
    if last is None:
        return None
    sigmas = dict(map(tuple, result["sigmas"]))
    if reading:
        kept = {"bound": "", "single": "largest_single", "mean": "largest"}[reading]
        largest = dict(map(tuple, result[kept])) if kept else {}
        sigmas = {r: result["variance"] / max(min(bound, largest.get(r) or bound), 1e-6) for r, bound in result["bounds"]}
    per_round = [sigmas[r] for r in range(1, last + 1)]
    if formula == "moments":
        return _moments(per_round, result["local_steps"], 0.01, 1e-5)
    each = np.repeat(per_round, result["local_steps"])
    return float(papers.spent(formula, each, 0.01, 1e-5)[-1])
