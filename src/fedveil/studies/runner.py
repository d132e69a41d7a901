"""Run the jobs of a table, keep each as a line of JSON, and set ours beside the paper's."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fedveil.errors import UserError
from fedveil.jsons import Document, JsonObject
from fedveil.studies import jobs, settings
from fedveil.studies.cells import (
    Attack,
    Cell,
    Entry,
    Inference,
    Job,
    Row,
    Train,
    key_of,
    seeded,
    settings_of,
)
from fedveil.studies.reasons import explain

Scale = Literal["small", "paper"]
TIMES = ("seconds", "milliseconds", "total_seconds")  # measures of other hardware than the paper's
SMALL_BUDGET = 300.0  # estimated seconds on one quiet core: a busy or slower machine still keeps ten minutes
Progress = Callable[[int, int, float, str], None]
"""(finished jobs, all jobs, seconds left, what runs now)"""


@dataclass(frozen=True)
class Planned:
    """A job as it will run: possibly shrunk, possibly left out."""

    printed: Job
    job: Job
    shrunk: str
    skipped: bool = False


@dataclass(frozen=True)
class Plan:
    """The jobs of an entry at a scale."""

    entry: Entry
    scale: Scale
    seeds: int
    jobs: tuple[Planned, ...]
    controls: Mapping[Job, Train] = field(default_factory=dict)
    """Shrunk jobs of training, and the same run without noise that must learn before they count."""

    @property
    def runs(self) -> list[tuple[Job, int]]:
        """Each job with each seed, once."""
        found: list[tuple[Job, int]] = [(job, 0) for job in self.controls.values()]
        found += [
            (p.job, seed)
            for p in self.jobs
            if not p.skipped
            for seed in range(self.seeds if seeded(p.job) else 1)
        ]
        return list(dict.fromkeys(found))

    def seconds(self, done: Mapping[str, object] = {}) -> float:
        """Estimated seconds for what is not done."""
        return sum(settings.seconds(job) for job, seed in self.runs if key_of(job, seed) not in done)


def plan(
    entry: Entry, scale: Scale = "small", seeds: int = 1, victims: Mapping[str, int] | None = None
) -> Plan:
    """Shrink all jobs of the entry by the same level, the first at which the table fits the small budget.

    victims: at paper scale, how many victims attacks on a dataset have at most ("" is for all others)."""
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: give 1 or more")
    wanted = entry.jobs()
    curves = {cell.job for cell in entry.cells if entry.curve or cell.measure not in ("accuracy", "rmse")}
    if scale == "paper":
        return Plan(entry, scale, seeds, tuple(_fewer_victims(job, victims or {}) for job in wanted))
    level = 1
    while level < settings.LEVELS and _total(wanted, level, curves) > SMALL_BUDGET:
        level += 1
    small = {job: settings.shrink(job, level, 5 if job in curves else 1) for job in wanted}
    kept: set[Job] = set()
    counted: set[Job] = set()
    controls: dict[Job, Train] = {}
    for job in sorted(
        wanted, key=lambda job: settings.seconds(small[job][0])
    ):  # the cheapest make most cells
        check = _control(job, small[job][0], entry)
        with_it = counted | {small[job][0]} | ({check} if check is not None else set())
        if sum(map(settings.seconds, with_it)) <= SMALL_BUDGET:
            kept.add(job)
            counted = with_it
            controls |= {} if check is None else {small[job][0]: check}
    left_out = "left out at small scale: run with --scale paper"
    planned = [
        Planned(job, small[job][0], small[job][1] if job in kept else left_out, job not in kept)
        for job in wanted
    ]
    return Plan(entry, scale, seeds, tuple(planned), controls)


def _trained(job: Job) -> Train | None:
    inner = job.train if isinstance(job, Inference) else job
    return inner if isinstance(inner, Train) else None


def _control(printed: Job, shrunk: Job, entry: Entry) -> Train | None:
    """The run without noise that a run needs beside it if it was shrunk and the paper says what it should reach."""
    inner = _trained(shrunk)
    if inner is None or inner == _trained(printed) or _goal(printed, entry) is None:
        return None
    return settings.control(inner)


def _goal(printed: Job, entry: Entry) -> float | None:
    """What the paper reaches without noise: in this very setting, if the table has it, else on the dataset."""
    inner = _trained(printed)
    if inner is None:
        return None
    plain = settings.control(inner)
    own = (cell.paper for cell in entry.cells if cell.job == plain and cell.measure == "accuracy")
    goal = next((paper for paper in own if isinstance(paper, float)), None)
    return settings.expected(inner, entry.paper) if goal is None else goal


def _fewer_victims(job: Job, most: Mapping[str, int]) -> Planned:
    if not isinstance(job, Attack):
        return Planned(job, job, "")
    count = min(job.victims, most.get(job.dataset, most.get("", job.victims)))
    note = f"victims {job.victims} → {count}" if count < job.victims else ""
    return Planned(job, replace(job, victims=count), note)


def _total(wanted: list[Job], level: int, curves: set[Job]) -> float:
    small = {settings.shrink(job, level, 5 if job in curves else 1)[0] for job in wanted}
    return sum(settings.seconds(job) for job in small)


def finished(folder: Path) -> dict[str, JsonObject]:
    """All results kept in the folder, by key; a job run again counts with its last line."""
    from fedveil.federation.store import read_lines

    path = folder / "cells.jsonl"
    return {line["key"]: line for line in read_lines(path)} if path.exists() else {}


def only_finished(chosen: Plan, done: Mapping[str, JsonObject]) -> Plan:
    """The plan with those cells that have a result with seed 0; others of its seeds count where they are there, and what is
    left out is said on the page."""
    planned = {p.printed: p for p in chosen.jobs}

    def seeds_of(job: Job) -> int:
        one = planned[job]
        seeds = range(chosen.seeds if seeded(one.job) and not one.skipped else int(not one.skipped))
        return next((seed for seed in seeds if "result" not in done.get(key_of(one.job, seed), {})), len(seeds))

    kept = tuple(cell for cell in chosen.entry.cells if seeds_of(cell.job))
    if not kept:
        raise UserError(f"--finished: no cell of {chosen.entry.id} is finished in this folder at this scale.")
    all_of_it = len(chosen.entry.cells)
    left_out = "; the others are not shown" if len(kept) < all_of_it else ""
    entry = replace(chosen.entry, cells=kept, note=f"{len(kept)} of {all_of_it} cells were run{left_out}")
    jobs_kept = {cell.job for cell in kept}
    most = (min if chosen.entry.paired else max)(map(seeds_of, filter(seeded, jobs_kept)), default=1)
    return replace(chosen, entry=entry, seeds=most, jobs=tuple(p for p in chosen.jobs if p.printed in jobs_kept))


def run(
    chosen: Plan, folder: Path, *, resume: bool = False, progress: Progress | None = None, workers: int = 1
) -> dict[str, JsonObject]:
    """Run what is not done yet; returns all results by key.

    A job that the data at hand do not allow is kept as failed with its reason, and tried again next time.
    Training and attacks run in `workers` processes, the longest first; then the other jobs one by one (timings need
    a quiet machine, and membership, attribute and decoder attacks read the runs).
    """
    from fedveil.federation.store import append_line

    folder.mkdir(parents=True, exist_ok=True)
    done = {k: v for k, v in finished(folder).items() if "failed" not in v} if resume else {}
    if not resume:
        _forget_runs(chosen, folder)
    left = [(job, seed) for job, seed in chosen.runs if key_of(job, seed) not in done]
    at_once = [one for one in left if workers > 1 and isinstance(one[0], Attack | Train)]
    at_once.sort(key=lambda one: -settings.seconds(one[0]))
    left = at_once + [one for one in left if one not in at_once]
    estimates = {key_of(job, seed): settings.seconds(job) for job, seed in left}
    begin, ended = time.perf_counter(), 0.0

    def tell(number: int) -> None:
        if progress and number < len(left):
            pace = (time.perf_counter() - begin) / ended if ended > 5 else 1 / (workers if at_once else 1)
            progress(number, len(left), pace * (sum(estimates.values()) - ended), describe(left[number][0]))

    def lines() -> Iterator[Document]:
        tell(0)
        if at_once:
            from fedveil.training.pool import processes

            with processes(min(workers, len(at_once))) as pool:
                running = [pool.submit(_line, job, seed, folder) for job, seed in at_once]
                try:
                    for future in as_completed(running):
                        yield future.result()
                except BrokenProcessPool as problem:
                    raise UserError(
                        "a worker process died, perhaps for lack of memory. Finished cells are kept: "
                        "continue with --resume --workers 1."
                    ) from problem
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    for process in list((pool._processes or {}).values()):
                        process.terminate()
                    raise
        for job, seed in left[len(at_once) :]:
            yield _line(job, seed, folder)

    for number, line in enumerate(lines()):
        append_line(folder / "cells.jsonl", line)
        done[line["key"]] = line
        ended += estimates[line["key"]]
        tell(number + 1)
    if progress:
        progress(len(left), len(left), 0.0, "")
    return done


def _line(job: Job, seed: int, folder: Path) -> JsonObject:
    clock = time.perf_counter()
    line: JsonObject = {"key": key_of(job, seed), "settings": settings_of(job, seed)}
    try:
        line["result"] = jobs.execute(job, seed, folder)
    except UserError as wrong:
        line["failed"] = str(wrong)
    line["seconds"] = round(time.perf_counter() - clock, 3)
    return line


def _forget_runs(chosen: Plan, folder: Path) -> None:
    """Without --resume a run starts anew; only run directories that this command made are removed."""
    import shutil

    for job, seed in chosen.runs:
        for one in (job, getattr(job, "train", None)):
            place = folder / "runs" / key_of(one, seed) if one is not None else None
            if place is not None and (place / "run.json").exists():
                shutil.rmtree(place)


def not_run(chosen: Plan, done: Mapping[str, JsonObject]) -> Counter[str]:
    """How many of the plan's jobs could not be run, by reason."""
    lines = (done.get(key_of(job, seed), {}) for job, seed in chosen.runs)
    return Counter(str(line["failed"]) for line in lines if "failed" in line)


def describe(job: Job) -> str:
    """A few words for the progress bar."""
    words = [
        type(job).__name__.lower(),
        getattr(job, "recipe", getattr(job, "formula", "")),
        getattr(job, "dataset", ""),
    ]
    return " ".join(word for word in words if word)


def rows(chosen: Plan, done: Mapping[str, JsonObject]) -> list[Row]:
    """Paper, ours, difference and why for every cell."""
    planned = {p.printed: p for p in chosen.jobs}
    return [
        _with_control(_row(cell, planned[cell.job], chosen.seeds, done), planned[cell.job], chosen, done)
        for cell in chosen.entry.cells
    ]


def _with_control(row: Row, planned: Planned, chosen: Plan, done: Mapping[str, Document]) -> Row:
    """The row, or, if the same shrunk run without noise does not come near the paper's, the reason why it shows nothing. A run
    that was not shrunk keeps its number then, and is not judged."""
    check, goal = chosen.controls.get(planned.job), _goal(planned.printed, chosen.entry)
    if goal is None or row.ours is None:
        return row
    if check is None:
        return _judged(row, planned.job, goal, chosen.entry, done)
    reached = done.get(key_of(check, 0), {}).get("result", {}).get("accuracy")
    if reached is not None and reached >= settings.needed(goal, check.dataset):
        return row
    said = "is not finished" if reached is None else f"reaches {reached:.3f}, the paper's {goal:.3f}"
    why = (f"shrunk too far to say anything: the same run without noise {said}",)
    return replace(row, ours=None, difference=None, matches=None, deviation=None, why=why)


def _judged(row: Row, job: Job, goal: float, entry: Entry, done: Mapping[str, Document]) -> Row:
    """The row without a difference where the same run without noise is there and did not come near the paper's. That run's own
    row stays compared with the print, which it misses; so do controls that have none."""
    inner = _trained(job)
    if inner is None or (inner.recipe == "non-private" and (inner is job or row.paper is None)):
        return row
    reached = _without_noise(inner, entry, done)
    if reached is None or reached >= settings.needed(goal, inner.dataset):
        return row
    why = (f"not judged: the run without noise reaches {reached:.3f}, the paper's {goal:.3f}", *row.why)
    return replace(row, difference=None, matches=None, judged=False, why=why)


_OF_LENGTH = ("rounds", "learning_rate", "local_optimiser", "evaluate_every")


def _without_noise(job: Train, entry: Entry, done: Mapping[str, Document]) -> float | None:
    """What the same run without noise reached, or that of the same table which differs from it in length and rate alone."""
    plain = settings.control(job)

    def same(other: Job) -> bool:
        if not isinstance(other, Train) or (other.recipe, other.dataset) != ("non-private", job.dataset):
            return False
        return not any(name not in _OF_LENGTH for name, _ in set(other.settings) ^ set(plain.settings))

    for one in (plain, *filter(same, entry.jobs())):
        reached: float | None = done.get(key_of(one, 0), {}).get("result", {}).get("accuracy")
        if reached is not None:
            return reached
    return None


def _row(cell: Cell, planned: Planned, seeds: int, done: Mapping[str, Document]) -> Row:
    keys = [key_of(planned.job, seed) for seed in range(seeds if seeded(planned.job) else 1)]
    lines = [done[key] for key in keys if key in done and not planned.skipped]
    values: list[float] = []
    fitted = False
    why = explain(cell.why, planned.job)
    for line in lines:
        if "failed" in line:
            why = (f"not run: {line['failed']}",)
            continue
        value = jobs.measure(cell.measure, line["result"], planned.job, planned.printed)
        if value is not None:
            values.append(value)
        elif cell.measure.startswith(("rounds_to:", "iterations_to:", "spent_to:", "fixed_variance:")):
            why = (f"never reached in {line['result']['rounds']} rounds", *why)
        extra = line["result"].get("extra_steps")
        fitted = bool(extra)
        if extra:
            why = (
                *why,
                f"with {extra:+d} step; as stated it is {line['result']['as_stated']:.{cell.digits}f}",
            )
    ours = statistics.fmean(values) if values else None
    if not lines and not planned.skipped:
        why = ("not finished", *why)
    why = (*_ended_early(planned.job, seeds, done), *why)
    timed = cell.measure.partition(":")[0] in TIMES
    difference = ours - cell.paper if ours is not None and isinstance(cell.paper, int | float) and not timed else None
    # One unit of the last printed digit: the tables round now up, now down.
    matches = (
        None if difference is None else abs(difference) < 10.0**-cell.digits * (1 if cell.digits else 0.5)
    )
    return Row(
        cell.row,
        cell.column,
        cell.paper,
        ours,
        difference,
        matches,
        why,
        planned.shrunk,
        statistics.stdev(values) if len(values) > 1 else None,
        len(values),
        fitted,
        settings_of(planned.job, 0),
        _law(planned.job, lines, done),
        timed,
    )


def _ended_early(job: Job, seeds: int, done: Mapping[str, Document]) -> tuple[str, ...]:
    """That a run, or the one that is attacked, stopped before its planned rounds, and why."""
    inner = _trained(job)
    if inner is None:
        return ()
    wanted = dict(inner.settings).get("rounds")
    found = [done.get(key_of(inner, seed), {}).get("result", {}) for seed in range(seeds)]
    early = [one for one in found if wanted is not None and one.get("rounds", wanted) < wanted]
    return tuple(dict.fromkeys(f"ended at round {one['rounds']} of {wanted}: {one.get('stopped', '')}" for one in early))


UNRECORDED = " (by its settings)"  # an attack's noise, kept before attacks named theirs


def _law(job: Job, lines: Sequence[Document], done: Mapping[str, Document]) -> str:
    """Which noise a cell's runs drew, by seed where they differ; of an attack, that of the attacked run or recipe. Attacks that
    were kept without it have what their settings say."""
    inner = _trained(job)
    played = [line for line in lines if "result" in line]
    if isinstance(job, Inference) and inner is not None and played:
        kept = done.get(key_of(inner, 0), {}).get("result", {}).get("noise_law")
        return kept or jobs.law_in(inner)
    seeds: dict[str, list[int]] = {}
    for line in played:
        law = line["result"].get("noise_law") or ""
        if not law and isinstance(job, Attack):
            law = jobs.law_in(job)
            law += UNRECORDED if law != "none" else ""
        seeds.setdefault(law, []).append(line.get("settings", {}).get("seed", 0))
    if len(seeds) < 2:
        return next(iter(seeds), "")
    return ", ".join(f"{law} (seed{'s' * (len(of) > 1)} {', '.join(map(str, of))})" for law, of in seeds.items())
