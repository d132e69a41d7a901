"""A published table or figure as data: cells that name a printed number and the job that makes ours.

Jobs are frozen values. Cells that need the same job share it, and a finished job is found again by the hash
of its settings, whichever table asks for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fedveil.jsons import JsonObject

Changes = tuple[tuple[str, Any], ...]
"""Sorted (key, value) pairs of a run configuration: hashable, and the same text whichever way it was written."""


def changes(*groups: Mapping[str, object], **more: object) -> Changes:
    """Merge groups of settings, later ones winning."""
    merged: dict[str, object] = {}
    for group in (*groups, more):
        merged.update(group)
    return tuple(sorted(merged.items()))


@dataclass(frozen=True)
class Epsilon:
    """A composition formula as the papers used it; `formula` is a name of privacy.papers.table_epsilon.

    steps: as stated; extra: how many more give the print. extra None: the nearest of -1, 0 and +1 to `near` is
    used, because the tables count one step more or less without a rule. The result also has the value as stated.
    """

    formula: str
    steps: int
    extra: int | None = 0
    near: float | None = None
    rate: float = 0.01
    sigma: float = 6.0
    delta: float = 1e-5


@dataclass(frozen=True)
class Stop:
    """The step at which a falling sigma has used up a budget, with the schedules of the authors' own code."""

    schedule: str
    formula: str
    budget: float
    rate: float = 0.01
    delta: float = 1e-5


@dataclass(frozen=True)
class Spend:
    """Epsilon after a run whose sigma falls per round as the text says."""

    schedule: str
    rounds: int
    steps: int
    rate: float = 0.01
    delta: float = 1e-5


@dataclass(frozen=True)
class Train:
    """One training run; results: accuracy, the curve over rounds, CPU milliseconds per client iteration."""

    recipe: str
    dataset: str
    settings: Changes = ()
    dataset_options: Changes = ()


@dataclass(frozen=True)
class Attack:
    """A gradient leakage attack on a recipe at the model's initialisation. aware: the attacker repeats the recipe's public
    clipping on its dummies."""

    recipe: str
    dataset: str
    tap: str = "type2"
    method: str = "cpl"
    victims: int = 100
    batch: int = 1
    iterations: int | None = 300
    settings: Changes = ()
    model: str = "cpl-lenet"
    aware: bool = True


@dataclass(frozen=True)
class Inference:
    """An attack on a trained model: membership, attribute, or a decoder of what enters its last layer or of its outputs."""

    kind: Literal["membership", "attribute", "decoder", "outputs"]
    train: Train
    shadows: int = 16
    pool: int = 1000
    victims: int = 100


@dataclass(frozen=True)
class Time:
    """CPU time of local iterations of one client."""

    recipe: str
    dataset: str
    settings: Changes = ()
    dataset_options: Changes = ()
    iterations: int = 100


Job = Epsilon | Stop | Spend | Train | Attack | Inference | Time


@dataclass(frozen=True)
class Cell:
    """A printed number (None: a figure without numbers), and where ours comes from.

    measure names an entry of the job's result; "accuracy@95" is the accuracy after round 95, "rounds_to:0.928"
    the first round with at least that accuracy. why: keys of reasons.REASONS.
    """

    row: str
    column: str
    paper: float | str | None
    job: Job
    measure: str
    why: tuple[str, ...] = ()
    digits: int = 3


@dataclass(frozen=True)
class Entry:
    """One table or figure of a paper; without cells it is not an experiment, and `note` says what it is."""

    id: str
    title: str
    cells: tuple[Cell, ...] = ()
    statement: str = ""
    note: str = ""
    x: str = ""  # figures of curves: what the columns count
    curve: str = ""  # figures of curves over rounds: which list of the job's result is drawn
    paired: bool = False  # rows are compared seed by seed: a page has those seeds only that all of its cells have

    @property
    def paper(self) -> str:
        return self.id.split("-")[0].upper()

    @property
    def is_figure(self) -> bool:
        return "-fig" in self.id

    def jobs(self) -> list[Job]:
        """Every job once, in the order of the cells."""
        return list(dict.fromkeys(cell.job for cell in self.cells))


def only(entry: Entry, words: tuple[str, ...]) -> Entry:
    """The entry with those cells that have every word in their kind, dataset, recipe, row or column."""

    def text(cell: Cell) -> str:
        job = cell.job.train if isinstance(cell.job, Inference) else cell.job
        names = (getattr(job, "recipe", ""), getattr(job, "dataset", ""), cell.row, cell.column)
        kind = "epsilon" if isinstance(job, Stop | Spend) else type(cell.job).__name__
        return " ".join((kind, *names)).lower()

    return replace(entry, cells=tuple(c for c in entry.cells if all(w.lower() in text(c) for w in words)))


def settings_of(job: Job, seed: int) -> JsonObject:
    """Everything that decides the job's result."""
    return {"kind": type(job).__name__.lower(), "seed": seed if seeded(job) else 0, **asdict(job)}


def seeded(job: Job) -> bool:
    """Whether the result depends on a seed."""
    return not isinstance(job, Epsilon | Stop | Spend)


def key_of(job: Job, seed: int) -> str:
    """The name under which a finished job is kept."""
    text = json.dumps(settings_of(job, seed), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_settings(job: Train, **more: object) -> Train:
    """The same run with some settings changed."""
    return replace(job, settings=changes(dict(job.settings), more))


@dataclass(frozen=True)
class Row:
    """A line of the comparison: paper | ours | difference | why."""

    row: str
    column: str
    paper: float | str | None
    ours: float | None
    difference: float | None
    matches: bool | None
    why: tuple[str, ...]
    shrunk: str
    deviation: float | None = None
    seeds: int = 1
    fitted: bool = False  # comes out only with a step more or less than stated
    settings: Mapping[str, object] = field(default_factory=dict)
    law: str = (
        ""  # of the noise that was drawn: float, or exact (discrete); no part of what a cell is found by
    )
    timed: bool = False  # a time, of other hardware than the paper's: beside the print, and not compared with it
    judged: bool = True  # False: the same run without noise stays far from the paper's, so that it says nothing about noise
