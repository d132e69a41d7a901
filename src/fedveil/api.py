"""The small public API over the same functions that the command line uses."""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from fedveil.attacks import campaign
from fedveil.attacks.audit.loop import Loop, audit_loop
from fedveil.attacks.leakage.measure import TYPES
from fedveil.attacks.on_run import on_run
from fedveil.data.datasets import Dataset
from fedveil.data.frames import Table
from fedveil.data.tables import COUNTED
from fedveil.errors import UserError, did_you_mean
from fedveil.federation import loop, own_loop, planner
from fedveil.federation.config import RunConfig, config_of, load_config, trusting_code
from fedveil.federation.loop import OnRound
from fedveil.federation.own_loop import Private
from fedveil.federation.progress import tenths
from fedveil.federation.store import Run, open_run
from fedveil.jsons import Document, plain
from fedveil.models.layout import flatten
from fedveil.privacy import checks
from fedveil.protect.catalogue import catalogue, get
from fedveil.protect.recipe import Recipe, with_changes
from fedveil.training import loss_names
from fedveil.training.evaluate import evaluate, outputs
from fedveil.training.metrics import Metric


@contextmanager
def _in_python() -> Iterator[None]:
    """Errors name keywords instead of options of the command line."""
    try:
        yield
    except UserError as wrong:
        words = str(wrong).replace("--resume", "resume=True")
        words = re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_") + "=…", words)
        raise UserError(words) from None


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """A finished (or stopped) run."""

    path: Path
    facts: Mapping[str, Any]  # what result.json holds
    module: nn.Module  # the trained model
    data: Dataset | Table | None = None  # what was given to `run`; a run directory holds none
    recipe: Recipe | None = None  # given as a value; a run directory may not be able to name it

    def __repr__(self) -> str:
        quality = f"accuracy {self.accuracy:.3f}" if self.accuracy is not None else f"RMSE {self.facts['test_rmse']:.4g}"
        sound = [row for row in self.ledger if row["verdict"] == "sound" and row["unit"] == "example"]
        first = f"epsilon {sound[0]['epsilon']:.3g} ({sound[0]['observer']}, example)" if sound else ""
        told = first or "no sound promise per example"
        return f"<Result {self.facts['recipe']} on {self.facts['dataset']}: {quality}, {told}, {self.path}>"

    def _repr_html_(self) -> str:
        names = ("observer", "unit", "epsilon", "verdict", "reason")
        rows = [
            ["none" if row[n] is None else f"{row[n]:.4g}" if n == "epsilon" else row[n] for n in names]
            for row in self.ledger
        ]
        head = "".join(f"<th>{name}</th>" for name in names)
        body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
        said = escape(str(self.facts.get("judgement") or ""))
        return f"<p>{escape(repr(self)[1:-1])}<br>{said}</p><table><tr>{head}</tr>{body}</table>"

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Classes (or values, for regression) of new rows, given as the dataset's own rows were."""
        with trusting_code():
            found = outputs(self.module, flatten(self.module), self._inputs(np.asarray(x))).numpy()
        return found.reshape(len(found)) if self.accuracy is None else found.argmax(1)

    def evaluate(
        self, x: np.ndarray, y: np.ndarray, metrics: Sequence[str | Metric] = ()
    ) -> dict[str, float | None]:
        """Accuracy and loss, or RMSE and MAE, on new rows, and further `metrics`: "auc", "f1", "balanced_accuracy", or functions
        of (outputs, truth). From private rows these figures carry no noise: keep them."""
        loss = "squared" if self.accuracy is None else "cross-entropy"
        with trusting_code():
            return evaluate(self.module, flatten(self.module), self._inputs(np.asarray(x)), np.asarray(y), loss, metrics)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the run's HTML page (default: report.html in its folder) and return where it is."""
        from fedveil.report.page import write_report

        target = Path(path) if path is not None else self.path / "report.html"
        with trusting_code():
            write_report([open_run(self.path, self.recipe)], target)
        return target

    def _inputs(self, x: np.ndarray) -> np.ndarray:
        """New rows behind the run's fixed features."""
        config = open_run(self.path).config
        if isinstance(self.data, Table) or config.table:
            raise UserError("rows of a table are prepared with its columns: give prepared features to result.module instead")
        raw = self.data if self.data is not None else loop.raw_data(config)
        new = replace(raw, x_test=x.astype(raw.x.dtype), y_test=np.zeros(len(x), raw.y.dtype))
        return loop.with_features(new, config).x_test

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the test set (None for regression: see facts["test_rmse"])."""
        return self.facts["test_accuracy"]

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """Rows of observer, unit, epsilon, delta, accountant, verdict, reason."""
        return self.facts["ledger"]

    def epsilon(
        self, observer: str = "server", unit: str = "example", verdict: str = "sound"
    ) -> float | None:
        """One number of the ledger; None where nothing of that verdict is promised."""
        found = [
            row["epsilon"]
            for row in self.ledger
            if (row["observer"], row["unit"], row["verdict"]) == (observer, unit, verdict)
            and row["epsilon"] is not None
        ]
        return max(found) if found else None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The trained weights as a plain state_dict."""
        return dict(self.module.state_dict())


def dataset(
    x: np.ndarray,
    y: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
    *,
    name: str = "own",
    groups: np.ndarray | None = None,
    x_validation: np.ndarray | None = None,
    y_validation: np.ndarray | None = None,
    classes: int | None = None,
) -> Dataset:
    """Your own arrays as a dataset: whole-number labels 0, 1, … mean classification, floats regression. The type of y_test, which
    is public, decides; one private label in y cannot.

    classes: how many there are, a public number. Without it they are counted; where only (private) training rows show the
    largest label, nothing finite is promised about runs on this dataset, and its notes say why.
    """
    x, x_test = np.asarray(x, np.float32), np.asarray(x_test, np.float32)
    y, y_test = np.asarray(y), np.asarray(y_test)
    if len(x) != len(y) or len(x_test) != len(y_test):
        raise UserError(
            f"dataset: {len(x)} rows but {len(y)} labels, {len(x_test)} test rows but {len(y_test)} test labels"
        )
    if not (np.isfinite(x).all() and np.isfinite(x_test).all()):
        bad = (
            int(np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))[0])
            if not np.isfinite(x).all()
            else -1
        )
        raise UserError(
            f"dataset: x has a value that is not finite (first bad row: {bad if bad >= 0 else 'in x_test'})"
        )
    if np.issubdtype(y_test.dtype, np.integer):
        if (y != np.round(y)).any():
            raise UserError(
                "dataset: y_test holds whole numbers, which mean classification, but y has fractions; for a regression give "
                "y_test as floats"
            )
        shown = y_test if y_validation is None else np.concatenate([y_test, y_validation])
        public = int(shown.max(initial=-1))
        largest = max(int(y.max(initial=0)), public)
        if y.min(initial=0) < 0:
            raise UserError("dataset: labels must be 0, 1, …; found a negative one")
        if classes is not None and largest >= classes:
            raise UserError(f"dataset: classes = {classes}, but a label is {largest}; labels are 0 to {classes - 1}")
        counted = classes is None and largest > public
        more: dict[str, Any] = {"classes": classes or largest + 1, "task": "classification"}
        more["notes"] = (COUNTED,) if counted else ()
        y, y_test = y.astype(np.int64), y_test.astype(np.int64)
    else:
        more = {"classes": None, "task": "regression"}
        y, y_test = y.astype(np.float32), y_test.astype(np.float32)
    return Dataset(
        name=name,
        x=x,
        y=y,
        x_test=x_test,
        y_test=y_test,
        groups=groups,
        x_validation=x_validation,
        y_validation=y_validation,
        **more,
    )


def recipe(name: str, **changes: Any) -> Recipe:
    """A recipe of the catalogue with changed parts: recipe("fed-cdp", sigma=2, **{"clip.bound": 1})."""
    return with_changes(get(name), changes)


def recipes() -> list[str]:
    """Names of all recipes."""
    return list(catalogue())


def run(
    name: str | Recipe,
    *,
    data: Dataset | str | None = None,
    model: nn.Module | str | None = None,
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    resume: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Train. `name` is a recipe (by name or value), a shipped configuration or a TOML file; `settings` are keys of the
    configuration or parts of the recipe (rounds=5, sigma=1.0, clip_bound=1.0).

    on_round(facts) is called after every round. resume=True continues the run in `out`. progress: a line on stderr for every
    tenth of the rounds (default: in notebooks and terminals).
    """
    with _in_python():
        return _run(name, data, model, out, on_round, resume, progress, settings)


def _run(
    name: str | Recipe, data: Dataset | str | None, model: nn.Module | str | None, out: str | Path | None,
    on_round: OnRound | None, resume: bool, progress: bool | None, settings: Mapping[str, object],
) -> Result:  # fmt: skip
    changes = _dotted(settings)
    own = data if isinstance(data, Dataset) else None
    if own is None and data is not None:
        changes["dataset"] = str(data)
    elif own is not None:
        changes.setdefault("dataset", own.name)
    module = model if isinstance(model, nn.Module) else None
    if isinstance(model, str):
        changes["model"] = model
    if isinstance(name, Recipe):
        config = config_of(name, changes)
    else:
        with trusting_code():  # whoever calls this runs code already
            config = load_config(name, changes)
    folder = _folder(out)
    with trusting_code():
        told = _told(config, on_round, progress)
        facts = loop.run(config, folder, resume=resume, on_round=told, dataset=own, module=module)
        given = name if isinstance(name, Recipe) else None
        return Result(folder, facts, loop.trained(folder, config, own, module), own, given)


def _told(config: RunConfig, on_round: OnRound | None, progress: bool | None) -> OnRound | None:
    """The caller's own hook, and lines of progress where somebody reads them."""
    if progress is None:
        progress = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not progress:
        return on_round
    line = tenths(config, lambda text: print(text, file=sys.stderr, flush=True))

    def both(facts: loop.RoundFacts) -> None:
        line(facts)
        if on_round is not None:
            on_round(facts)

    return both


def fit(
    data: object,
    *,
    epsilon: float,
    target: str | None = None,
    group: str | None = None,
    delta: float | None = None,
    observer: str = "sum",
    clients: int | None = None,
    text: str | None = None,
    control: bool = False,
    seed: int = 0,
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    settings: Mapping[str, Any] = {},
    **columns: Any,
) -> Result:
    """Train well from data and a budget; scaling, model, recipe and noise are chosen (`result.facts["choices"]` says why).

    data: a path (.csv, .parquet, .npz, a folder of pictures), a built-in name, a pandas or Polars frame, a dictionary of
    columns, (x, y) arrays, a torch Dataset or a HF dataset. columns: what is declared about them, as `[table]` in a
    configuration: drop, keep, ranges, categories, classes, missing, task, test, split, scaling, knots. settings: keys of the run.
    """
    from fedveil.federation.fit import carry_out, choose

    table = {**({"group": group} if group else {}), **columns}
    chosen = choose(
        data, epsilon=epsilon, delta=delta, target=target, text=text, observer=observer, clients=clients, seed=seed,
        table=table, **_dotted(settings),
    )  # fmt: skip
    folder = _folder(out)
    facts = carry_out(chosen, folder, control=control, on_round=on_round)
    config = open_run(folder).config
    return Result(folder, facts, loop.trained(folder, config, chosen.data), chosen.data)


def resume(
    path: str | Path,
    *,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    recipe: Recipe | None = None,
    on_round: OnRound | None = None,
) -> Result:
    """Continue the run in a directory (own data, modules or recipes are passed again: a run directory holds none)."""
    config = open_run(path).config
    config = config if recipe is None else config.given(recipe)
    with trusting_code(), _in_python():
        facts = loop.run(config, path, resume=True, on_round=on_round, dataset=data, module=model)
        return Result(Path(path), facts, loop.trained(Path(path), config, data, model), data, recipe)


def plan(
    epsilon: float, *, dataset: str | None = None, examples: int | None = None, clients: int = 100, observer: str = "server",
    delta: float = 1e-5, kind: str = "images", classes: int = 10, columns: int = 30, public: bool = False,
) -> planner.Plan:  # fmt: skip
    """How to train for a budget, and why; the arguments are those of `fedveil plan`. `plan.to_json()` holds every
    number, `plan.why` the reasons."""
    with _in_python():
        checks.positive("epsilon", epsilon)
        shape = planner.describe(dataset, examples, kind, classes, columns, public)
        return planner.plan(shape, epsilon=epsilon, delta=delta, clients=clients, observer=observer)


ATTACK_OPTIONS: Mapping[str, Any] = {
    "victims": 16, "seed": 0, "shadows": 16, "pool": 1000, "attribute": None, "rounds": "", "data": None,
}  # fmt: skip
GRADIENT_OPTIONS: Mapping[str, Any] = {
    "method": "veil", "leak": "2", "iterations": None, "restarts": 0, "oracle": False, "update_as": "gradient",
}  # fmt: skip
ALONE_OPTIONS: Mapping[str, Any] = {
    "dataset": "digits", "model": "cpl-lenet", "batch": None, "local_steps": 1, "noise_on": None,
}  # fmt: skip


def attack(
    run: Result | str | Path | Recipe, kind: str = "gradient", *, recipe: Recipe | None = None, **options: object
) -> Document:
    """Attack a run (gradient, malicious, exact, membership, attribute, decoder or all) and keep the results below it; or a
    recipe alone, at a model's initialisation (gradient).

    recipe: the value that the run was made with, where only its directory is at hand. options: victims, seed, shadows, pool,
    attribute, rounds, and those of gradient attacks (method, leak = "2", "1", "0", …); of a recipe alone dataset, model, batch,
    local_steps and noise_on too. Returns what the adversary got; with kind="all" one entry per attack.
    """
    alone = isinstance(run, Recipe)
    defaults = {**ATTACK_OPTIONS, **GRADIENT_OPTIONS, **(ALONE_OPTIONS if alone else {})}
    wrong = [key for key in options if key not in defaults]
    if wrong or kind not in (*campaign.KINDS, "all"):
        named = wrong[0] if wrong else kind
        near = did_you_mean(named, [*defaults, "all", *campaign.KINDS])
        raise UserError(f"attack: unknown {'option' if wrong else 'kind'} '{named}'.{near}")
    if alone and kind != "gradient":
        raise UserError(f"attack: kind = {kind!r} attacks a trained model: give a run, or its folder")
    chosen = {**defaults, **options}
    if chosen["leak"] not in TYPES:
        raise UserError(f"attack: leak = {chosen['leak']!r}: choose one of {', '.join(TYPES)}.")
    settings = {key: chosen[key] for key in GRADIENT_OPTIONS if key != "leak"}
    settings |= {"tap": TYPES[chosen["leak"]], "victims": chosen["victims"], "seed": chosen["seed"], "aware": None}
    with _in_python(), trusting_code():
        if isinstance(run, Recipe):
            return _attack_alone(run, chosen, settings)
        opened = _opened(run, recipe)
        found = on_run(
            opened, kind, str(chosen["rounds"]), opened.path / "attacks", settings, chosen["shadows"], chosen["pool"],
            chosen["attribute"], chosen["victims"], chosen["seed"], chosen["data"],
        )  # fmt: skip
        campaign.summarise(opened)
    return found if kind == "all" else found[kind]


def _attack_alone(recipe: Recipe, chosen: Mapping[str, Any], settings: Mapping[str, Any]) -> Document:
    config = campaign.gradient_config(
        recipe, chosen["dataset"], chosen["model"], victims=chosen["victims"], seed=chosen["seed"], tap=settings["tap"],
        batch=chosen["batch"], local_steps=chosen["local_steps"], noise_on=chosen["noise_on"], data=chosen["data"],
    )  # fmt: skip
    return campaign.attack_gradients({recipe.name: (config, campaign.initial)}, **settings)[0]


def audit(
    what: Result | str | Path | Loop, *, canaries: int = 1000, seed: int = 0, significance: float = 0.05,
    recipe: Recipe | None = None, **more: Any,
) -> Any:  # fmt: skip
    """Test a promise with canaries: of a run (figures as `fedveil audit --json` prints them), or of a training loop of your own
    (`attacks.audit.loop.audit_loop`: a function of (module, dataset) that trains and returns the epsilon it promises).

    recipe: the value that the run was made with, where only its directory is at hand."""
    with _in_python(), trusting_code():
        if callable(what):
            return audit_loop(what, canaries=canaries, seed=seed, significance=significance, **more)
        run = _opened(what, recipe)
        figures, _ = campaign.audit_run(run, canaries_count=canaries, seed=seed, significance=significance, **more)
        settings = {"canaries": canaries, "significance": significance, "seed": seed}
        campaign.save(run.path / "attacks", "audit", figures, settings)
        return plain(figures)


def _opened(run: Result | str | Path, recipe: Recipe | None) -> Run:
    """A run with the recipe that it was made with, where that was a value."""
    return open_run(run.path, recipe or run.recipe) if isinstance(run, Result) else open_run(run, recipe)


def make_private(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    *,
    recipe: str | Recipe = "fed-cdp-sound",
    loss: object = "cross-entropy",
    epsilon: float | None = None,
    delta: float = 1e-5,
    epochs: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    seed: int | None = None,
    **changes: object,
) -> Private:
    """Make your own training loop private: batches from `private.loader`, gradients from `private.backward(batch)`, then
    `optimizer.step()` as ever, with any optimiser and schedule.

    recipe: one that noises sums of per-example gradients, changed by keywords (sigma=1.0, clip_bound=1.0). epsilon with epochs
    or steps: the noise is calibrated for them and the loop stops before the budget is exceeded. loss: "cross-entropy",
    "squared", a torch loss, or a function of (module, batch of one example); the first two use the fast engines where torch's own
    collate function stacks the rows. Each row is collated alone for its gradient, whatever the loader's function does with many.
    out: folder of the ledger, resume=True continues it. seed: repeatable noise for tests; the promise then needs it secret.

    Formal guarantee: see `Private.backward`. It covers what the optimiser does with `.grad`, the weights that follow, and
    everything computed from them; not the losses that `backward` returns, nor other looks at private rows in your loop.
    """
    value = get(recipe) if isinstance(recipe, str) else recipe
    return own_loop.make_private(
        module, optimizer, loader, recipe=with_changes(value, _dotted(changes)), loss=loss, epsilon=epsilon, delta=delta,
        epochs=epochs, steps=steps, out=_folder(out), resume=resume, seed=seed,
    )  # fmt: skip


def _dotted(settings: Mapping[str, object]) -> Document:
    """Keywords as keys: clip_bound is clip.bound; a loss and metrics that are functions by their names."""
    found = {key.replace("clip_", "clip.", 1) if key.startswith("clip_") else key: value for key, value in settings.items()}
    if "loss" in found:
        found["loss"] = loss_names.named(found["loss"])
    if "metrics" in found:
        given = found["metrics"]
        other = "; result.evaluate(x, y, metrics=[…]) takes any function"
        wanted = list(given) if isinstance(given, list | tuple) else [given]
        found["metrics"] = [loss_names.named(one, "metrics", other) for one in wanted]
    return found


def _folder(out: str | Path | None) -> Path:
    return Path(out) if out is not None else Path(tempfile.mkdtemp(prefix="fedveil-"))


def protect(
    model: nn.Module,
    x: np.ndarray,
    y: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
    *,
    recipe: str | Recipe = "dp-baseline",
    steps: int = 100,
    batch_size: float = 64,
    learning_rate: float = 0.05,
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    **settings: Any,
) -> Result:
    """Deprecated: use `make_private` in your own loop, or `run(recipe, data=…, model=…, clients=1)` in one call.

    `steps` SGD steps in total; every tenth of them is evaluated. The module is trained in place.
    """
    warnings.warn(
        "fv.protect is deprecated: use fv.make_private(module, optimizer, loader) in your own loop, or "
        "fv.run(recipe, data=…, model=module, clients=1) in one call",
        DeprecationWarning,
        stacklevel=3,
    )
    rounds = next(r for r in (10, 5, 4, 3, 2, 1) if steps % r == 0)
    return run(
        recipe,
        data=dataset(x, y, x_test, y_test),
        model=model,
        out=out,
        on_round=on_round,
        clients=1,
        partition="iid",
        rounds=rounds,
        local_steps=steps // rounds,
        batch_size=batch_size,
        learning_rate=learning_rate,
        **settings,
    )
