"""From data and a budget to a run: everything else is chosen here, and every choice is a line of words.

    chosen = choose("patients.csv", target="outcome", group="hospital", epsilon=2)
    for line in chosen.lines: print(line)
    loop.run(chosen.config, "runs/patients", dataset=chosen.data)

Choices rest on public facts alone: the declared columns, the numbers of rows and sites, the budget. What must be read from
the rows is read by a noised look that the run's ledger pays for (`federation.look`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.columns import Sheet, check_names, columns_of, identifiers, sheet_of
from fedveil.data.datasets import load
from fedveil.data.frames import Table, read
from fedveil.data.rows import Dataset, Task
from fedveil.data.sources import CATALOGUE
from fedveil.data.text import is_text
from fedveil.errors import UserError, extra
from fedveil.federation import loop, planner, store
from fedveil.federation.config import RunConfig, make_config
from fedveil.federation.look import Looked, needs_look, price
from fedveil.jsons import Document, JsonObject
from fedveil.models.backbones import installed
from fedveil.privacy import checks

CLIENTS = 10  # where no column says who holds a row
KNOTS = ((20_000, 8), (700, 4), (0, 1))  # strength from which so many hat functions pay
WORDS = 1024
SMALLEST = 8  # side of images that scattering takes


TEXTS_AS = {
    True: "each alone through MiniLM, a public network that was not trained on them",
    False: f"as counts of {WORDS:,} hashed words; MiniLM ({extra('backbones')}) reads them and learns far more",
}


def counted(number: int, what: str) -> str:
    """1 column, 2 columns."""
    return f"{number} {what}{'s' if number != 1 else ''}"


@dataclass(frozen=True, eq=False)
class Chosen:
    """A run that is ready to start. lines: (what, the choice and its reason). data: rows that are not in a file."""

    config: RunConfig
    lines: tuple[tuple[str, str], ...]
    data: Table | Dataset | None
    noise_to_signal: float


def choose(
    source: Any, *, epsilon: float, delta: float | None = None, target: str | None = None, text: str | None = None,
    observer: str = "sum", clients: int | None = None, seed: int = 0, data: str | None = None, name: str = "",
    table: Document = {}, **settings: object,
) -> Chosen:  # fmt: skip
    """Choose features, model, recipe, noise and rounds for this data and budget.

    source: a file, a folder of pictures, a built-in name, or anything `data.frames.read` takes. table: as `[table]` in a
    configuration. delta: by default `usual_delta`. observer: "sum" (only the sum over the sites is seen) or "server" (sees
    every site's update). settings: further keys of the configuration, which win over what is chosen.
    """
    epsilon = checks.positive("epsilon", epsilon)
    if delta is not None:
        checks.delta(delta, "delta")
    if observer not in ("sum", "server"):
        raise UserError(f"observer = {observer}: use sum (sees only the sum over all sites) or server (sees every update).")
    built_in = isinstance(source, str) and source in CATALOGUE
    if built_in:
        own: Table | Dataset = load(source, root=data, seed=seed, target=target, **table)
        named = {"dataset": source, **({"data": data} if data else {}), **({"target": target} if target else {})}
    else:
        own = read(source, name)
        named = {"dataset": str(source)} if isinstance(source, str) or hasattr(source, "__fspath__") else {"dataset": own.name}
    if isinstance(own, Table):
        delta = usual_delta(len(own)) if delta is None else delta
        return _table(own, source, named, epsilon, delta, observer, clients, seed, target, text, table, settings)
    if table and not built_in:
        raise UserError(f"{own.name}: options of columns ({', '.join(table)}) are for tables with named columns.")
    delta = usual_delta(len(own)) if delta is None else delta
    return _arrays(own, built_in, named, epsilon, delta, observer, clients, seed, settings)


def usual_delta(rows: int) -> float:
    """1e-5, or the power of ten at or below a tenth of 1 / rows, where that is smaller. The number of rows is public."""
    return min(1e-5, 10.0 ** math.floor(-math.log10(10 * rows)))


def _table(
    own: Table, source: object, named: JsonObject, epsilon: float, delta: float, observer: str, clients: int | None,
    seed: int, target: str | None, text: str | None, table: Mapping[str, object], settings: Document,
) -> Chosen:  # fmt: skip
    if target is None and "y" in own.columns and isinstance(source, tuple):
        target = "y"
    columns = columns_of(table, target, text, own.name)
    task: Task = columns.task or ("regression" if not columns.classes and columns.target in columns.ranges else "classification")
    check_names(own, columns)
    likely = identifiers(own, columns)
    columns = replace(columns, task=task, drop=(*columns.drop, *likely))
    table = {**table, "task": task, **({"drop": columns.drop} if likely else {})}
    sheet = sheet_of(own, columns, int(settings.get("split_seed", 0)))
    sites = len(sheet.group_names) if columns.group else clients or CLIENTS
    if columns.group and clients not in (None, sites):
        raise UserError(f"clients = {clients}, but column '{columns.group}' names {sites} sites: leave one of the two out.")
    rows = len(sheet.train)
    if sites > rows:
        raise UserError(f"{own.name}: {sites} clients for {rows} training rows; each needs at least one. Give fewer --clients.")
    asked = needs_look(sheet)
    share = price(len(asked), rows, sites, observer, epsilon, delta, columns.share).share if asked else 0.0
    sizes = tuple(int(n) for n in np.bincount(sheet.groups)) if sheet.groups is not None else ()
    shape = _shape_of_table(sheet, sizes, task)
    front = "" if not columns.text else _text_front()
    proposal = planner.plan(shape, epsilon=epsilon, delta=delta, clients=sites, observer=observer, spent=share)
    knots = columns.knots or next(count for least, count in KNOTS if proposal.strength >= least)
    values = planner.config_of(proposal, shape, None) | named | {
        "target": columns.target, **({"text": columns.text} if columns.text else {}),
        "partition": "groups" if columns.group else "iid", "seed": seed,
        "table": {**_plain(table), "share": share, "knots": knots} if asked else {**_plain(table), "knots": knots},
        **({"features": front} if front else {}),
        "tuning": "none: chosen by rule from public facts",
    }  # fmt: skip
    dropped = [("dropped", dropped_words(name)) for name in likely]
    lines = [*dropped, *_table_lines(sheet, sites, share, asked, knots, epsilon), *_plan_lines(proposal, shape, front, sizes)]
    return _made(values, settings, lines, own if "dataset" not in named or not _is_path(source) else None, proposal)


def dropped_words(name: str) -> str:
    """What is said about a column that is left out for its name alone."""
    return f"'{name}' looks like an identifier by its name, so it is not learnt from; --keep {name} keeps it"


def _shape_of_table(sheet: Sheet, sizes: tuple[int, ...], task: Task) -> planner.Shape:
    """What the planner may know before anything is looked at."""
    columns, rows = sheet.columns, len(sheet.train)
    if columns.text:
        width = 384 if installed("minilm") else WORDS
        return planner.Shape("images", rows, width, max(len(columns.classes), 2), backbone="minilm", width=width, sizes=sizes)
    return planner.Shape(
        "table", rows, len(columns.features(sheet.table)), max(len(columns.classes), 2),
        task=task, sizes=sizes,
    )  # fmt: skip


def _text_front() -> str:
    return "backbone:minilm" if installed("minilm") else f"words:width={WORDS}"


def _is_path(source: object) -> bool:
    return isinstance(source, str) or hasattr(source, "__fspath__")


def _plain(table: Mapping[str, object]) -> JsonObject:
    """Values that JSON and TOML can hold."""

    def plain(value: object) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(one) for key, one in value.items()}
        return list(value) if isinstance(value, tuple | list) else value

    return {key: plain(value) for key, value in table.items()}


def _arrays(
    own: Dataset, built_in: bool, named: JsonObject, epsilon: float, delta: float, observer: str, clients: int | None, seed: int,
    settings: dict[str, object],
) -> Chosen:  # fmt: skip
    groups = len(np.unique(own.groups)) if own.groups is not None else 0
    sites = clients or groups or CLIENTS
    shape = _shape_of_arrays(own, built_in)
    proposal = planner.plan(shape, epsilon=epsilon, delta=delta, clients=sites, observer=observer)
    source = shape.source if built_in and shape.source else named["dataset"]
    values = planner.config_of(proposal, shape, None) | named | {
        "dataset": source, "partition": "groups" if groups and not clients else "iid", "seed": seed,
        "tuning": "none: chosen by rule from public facts",
        **({"features": _text_front()} if is_text(own.x) else {}),
    }  # fmt: skip
    lines = [
        (
            "data",
            f"{own.name}: {len(own):,} training and {len(own.x_test):,} test rows of shape {list(own.shape)}; test rows are not "
            "protected",
        ),
        ("sites", counted(sites, "client") + (", one for each group" if groups and not clients else ", rows dealt at random")),
        *_plan_lines(proposal, shape, values.get("features", ""), ()),
    ]
    return _made(values, settings, lines, None if built_in else own, proposal)


def _shape_of_arrays(own: Dataset, built_in: bool) -> planner.Shape:
    """A public backbone where one is known and installed; else fixed features; else the numbers themselves."""
    public = planner.PUBLIC.get(own.name) if built_in else None
    if is_text(own.x):
        width = 384 if installed("minilm") else WORDS
        return planner.Shape("images", len(own), width, own.classes or 2, backbone="minilm", width=width)
    if public is not None and installed(public.backbone.partition(",")[0]) and (own.classes or 2) == public.classes:
        return public
    if built_in and own.name in planner.KNOWN:
        return planner.KNOWN[own.name]
    if public is not None and installed(public.backbone.partition(",")[0]):
        return planner.Shape("images", len(own), public.inputs, own.classes or 2, backbone=public.backbone, width=public.width)
    pictures = own.pixel_range is not None and len(own.shape) == 3 and min(own.shape[1:]) >= SMALLEST
    if pictures and own.shape[0] == 3 and installed("efficientnet-lite0"):
        return planner.Shape("images", len(own), 0, own.classes or 2, backbone="efficientnet-lite0", width=1280)
    task = "regression" if own.classes is None else "classification"
    return planner.Shape("images" if pictures else "table", len(own), math.prod(own.shape), own.classes or 2, task=task)  # type: ignore[arg-type]


def _made(
    values: dict[str, object], settings: dict[str, object], lines: list[tuple[str, str]], data: Table | Dataset | None,
    proposal: planner.Plan,
) -> Chosen:  # fmt: skip
    quiet = {"diagnostics": False, "evaluate_every": max(1, proposal.rounds // 10)}
    config = make_config(values | quiet, settings)
    if settings:
        lines.append(("yours", ", ".join(f"{key} = {value}" for key, value in settings.items())))
    return Chosen(config, tuple(lines), data, proposal.noise_to_signal)


def _table_lines(
    sheet: Sheet, sites: int, share: float, asked: list[str], knots: int, epsilon: float
) -> list[tuple[str, str]]:
    columns, rows = sheet.columns, len(sheet.train)
    learnt = f"texts of '{columns.text}'" if columns.text else counted(len(columns.features(sheet.table)), "column")
    lines = [(
        "data",
        f"{sheet.table.name}: {rows:,} training and {len(sheet.test):,} test rows, "
        f"{learnt} to learn '{columns.target}' from; test rows are not protected",
    )]  # fmt: skip
    if columns.text:
        lines.append(("texts", TEXTS_AS[installed("minilm")]))
    if columns.group:
        named = f"{counted(sites, 'site')} by '{columns.group}', one client each"
        lines.append(("sites", f"{named}; their names and sizes count as public"))
    else:
        lines.append(("sites", f"{counted(sites, 'client')}, rows dealt at random (no group column was given)"))
    if asked:
        lines.append((
            "scaling",
            f"paid: {counted(len(asked), 'undeclared column')} (kinds, ranges, words, classes) cost two noised looks for "
            f"{share:.0%} of the budget's square; declared ranges, categories and classes would cost nothing",
        ))  # fmt: skip
    elif columns.scaling == "free":
        lines.append((
            "scaling",
            "free: each undeclared cell alone is a number as it is, or a word in one of 8 public places (declare what you can)",
        ))  # fmt: skip
    else:
        lines.append(("scaling", "public: every column is declared, nothing is looked at"))
    if not columns.text and knots > 1:
        lines.append(("numbers", f"each as {knots} hat functions, so that effects may bend; a missing value is none of them"))
    return lines


def _plan_lines(proposal: planner.Plan, shape: planner.Shape, front: str, sizes: tuple[int, ...]) -> list[tuple[str, str]]:
    alone, features = proposal.observer == "server", front or proposal.features
    seen = "every site adds all the noise itself" if alone else "one noise on the sum over all sites, of which nobody sees a part"
    small = ""
    if alone and sizes and min(sizes) * 3 < max(sizes):
        small = f"; sites count alike, so the noise of the smallest ({min(sizes)} rows) weighs most: --observer sum avoids that"
    why = proposal.why[4].partition(": ")[2]
    return [
        ("recipe", f"{proposal.recipe}, {proposal.mechanism} noise, full batches: {seen}{small}"),
        ("model", f"{proposal.model} on {features.partition(',')[0]}: the fewer weights, the less noise in total"),
        ("rounds", f"{proposal.rounds}, clip {proposal.clip:g}, learning rate {proposal.learning_rate:g}: {why}"),
    ]


def found_lines(looked: Looked | None) -> list[str]:
    """What a paid look found, one line per column; public once it is charged."""
    if looked is None or not looked.paid:
        return []
    out = []
    for scale in looked.known.scales:
        what = {
            "number": f"numbers, {scale.low:.4g} to {scale.high:.4g}" + (", some missing" if scale.mark else ""),
            "words": counted(len(scale.words) or len(scale.places), "word"),
            "left out": "left out; if it holds numbers or dates, `fedveil data check` may say why",
        }[scale.kind]
        out.append(f"{scale.column}: {what} ({scale.how})")
    known = looked.known
    classes = f"classes {', '.join(known.classes)}" if known.classes else f"a quantity, {known.low:.4g} to {known.high:.4g}"
    return [*out, f"target: {classes}"]


def control_score(dataset: Dataset) -> float:
    """What a linear model of scikit-learn reaches on the same features without any noise: accuracy, or R² for regression.

    Formal guarantee: none. The score is computed from the private rows; keep it to yourself.
    """
    from sklearn.linear_model import LogisticRegression, Ridge

    x, x_test = (a.reshape(len(a), -1) for a in (dataset.x, dataset.x_test))
    model = Ridge(1e-3) if dataset.classes is None else LogisticRegression(C=1e3, max_iter=300)
    return float(model.fit(x, dataset.y).score(x_test, dataset.y_test))


def as_toml(chosen: Chosen) -> str:
    """The run as a configuration file, its reasons as comments."""
    kept = {key: value for key, value in chosen.config.model_dump().items() if value != RunConfig.model_fields[key].get_default(
        call_default_factory=True)}  # fmt: skip
    kept["table"] = {"ranges": {}, "categories": {}, **kept.get("table", {})}
    lines = [f"# {what}: {why}" for what, why in chosen.lines]
    lines += [f"{key} = {json.dumps(value)}" for key, value in kept.items() if not isinstance(value, dict)]
    for key, values in kept.items():
        if isinstance(values, dict):
            lines += ["", f"[{key}]"]
            lines += [f"{json.dumps(k)} = {json.dumps(v)}" for k, v in values.items() if not isinstance(v, dict)]
            for name, inner in ((k, v) for k, v in values.items() if isinstance(v, dict)):
                example = {"ranges": "# age = [0, 110]", "categories": '# sex = ["F", "M"]'}.get(name, "")
                lines += [f"[{key}.{name}]", *([example] if example else [])]
                lines += [f"{json.dumps(k)} = {json.dumps(v)}" for k, v in inner.items()]
    return "\n".join(lines) + "\n"


def going_on(chosen: Chosen, out: str | Path) -> Chosen:
    """What was chosen, with what the run in `out` has looked at and paid for before: no second look is made."""
    if not (Path(out) / "run.json").exists():
        return chosen
    looked = store.open_run(out).config.looked
    return chosen if looked is None else replace(chosen, config=chosen.config.with_look(looked))


def carry_out(
    chosen: Chosen, out: str | Path, *, control: bool = False, command: str = "", resume: bool = False,
    on_round: loop.OnRound | None = None, on_start: Callable[[loop.Prepared], None] | None = None,
) -> JsonObject:  # fmt: skip
    """Train what was chosen in the directory `out`; returns what result.json holds, with choices and judgement.

    control: also fit scikit-learn's linear model without noise, whose score is not private.
    """
    started: list[loop.Prepared] = []

    def begin(prepared: loop.Prepared) -> None:
        started.append(prepared)
        if on_start is not None:
            on_start(prepared)

    facts = loop.run(
        chosen.config, out, dataset=chosen.data, command=command, resume=resume, on_round=on_round, on_start=begin
    )
    looked, dataset = started[0].looked, started[0].dataset
    facts |= {"choices": dict(chosen.lines), "found": found_lines(looked), "notes": list(dataset.notes)}
    if dataset.classes is None and looked is not None and facts.get("test_rmse") is not None:
        facts["rmse_in_units"] = facts["test_rmse"] * (looked.known.high - looked.known.low) / 2
    if control:
        facts["control"] = control_score(dataset)
    facts["verdict"] = verdict(facts, chosen.config)
    store.write_json(Path(out) / "result.json", facts)
    return facts


def verdict(facts: Document, config: RunConfig) -> str:
    """The run in one sentence."""
    score = facts["test_accuracy"] if facts["test_accuracy"] is not None else facts["r2"]
    name = "accuracy" if facts["test_accuracy"] is not None else "R²"
    rows = [
        row for row in facts["ledger"]
        if (row["observer"], row["unit"], row["verdict"]) == (config.observer, "example", "sound") and row["epsilon"] is not None
    ]  # fmt: skip
    promise = f"at a sound epsilon of {rows[0]['epsilon']:.3g} per row" if rows else "without a sound promise (see the ledger)"
    shown = "no finite score" if score is None else f"{name} {score:.3f}"
    judged = facts["judgement"] if facts["rounds"] else "the untrained first one, because no round was played"
    said = f"The model is {judged}; {shown} {promise}"
    if facts.get("control") is not None:
        said += f"; without privacy the same features reach {facts['control']:.3f} (that score is not private: keep it)"
    return said + "."
