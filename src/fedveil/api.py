"""The small public API over the same functions that the command line uses."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from fedveil.data.datasets import Dataset
from fedveil.data.frames import Table
from fedveil.data.tables import COUNTED
from fedveil.errors import UserError
from fedveil.federation import loop, own_loop
from fedveil.federation.config import GIVEN, load_config, make_config, trusting_code
from fedveil.federation.loop import OnRound
from fedveil.federation.own_loop import Private
from fedveil.federation.store import open_run
from fedveil.models.layout import layout_of, load
from fedveil.privacy.schedules import Schedule
from fedveil.protect.catalogue import catalogue, get
from fedveil.protect.recipe import Recipe, as_text, spell, with_changes


@dataclass(frozen=True, eq=False)
class Result:
    """A finished (or stopped) run."""

    path: Path
    facts: Mapping[str, Any]  # what result.json holds
    module: nn.Module  # the trained model

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

    def state_dict(self) -> dict[str, Any]:
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
    """Your own arrays as a dataset: whole-number labels 0, 1, … mean classification, floats regression.

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
    if np.issubdtype(y.dtype, np.integer):
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
    **settings: Any,
) -> Result:
    """Train. `name` is a recipe (by name or value), a shipped configuration or a TOML file; `settings` are keys of the
    configuration or parts of the recipe (rounds=5, sigma=1.0, clip_bound=1.0).

    on_round(facts) is called after every round. resume=True continues the run in `out`.
    """
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
        config = _config_of(name, changes)
    else:
        with trusting_code():  # whoever calls this runs code already
            config = load_config(name, changes)
    folder = _folder(out)
    with trusting_code():
        facts = loop.run(config, folder, resume=resume, on_round=on_round, dataset=own, module=module)
        return _result(folder, facts, config, own, module)


def fit(
    data: Any,
    *,
    epsilon: float,
    target: str | None = None,
    group: str | None = None,
    delta: float = 1e-5,
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
    configuration: drop, ranges, categories, classes, missing, task, test, split, scaling, knots. settings: keys of the run.
    """
    from fedveil.federation.fit import carry_out, choose

    table = {**({"group": group} if group else {}), **columns}
    chosen = choose(
        data, epsilon=epsilon, delta=delta, target=target, text=text, observer=observer, clients=clients, seed=seed,
        table=table, **settings,
    )  # fmt: skip
    folder = Path(out) if out is not None else Path(tempfile.mkdtemp(prefix="fedveil-"))
    facts = carry_out(chosen, folder, control=control, on_round=on_round)
    return _result(folder, facts, open_run(folder).config, chosen.data, None)


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
    with trusting_code():
        facts = loop.run(config, path, resume=True, on_round=on_round, dataset=data, module=model)
        return _result(Path(path), facts, config, data, model)


def make_private(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    *,
    recipe: str | Recipe = "fed-cdp-sound",
    loss: Any = "cross-entropy",
    epsilon: float | None = None,
    delta: float = 1e-5,
    epochs: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    seed: int | None = None,
    **changes: Any,
) -> Private:
    """Make your own training loop private: batches from `private.loader`, gradients from `private.backward(batch)`, then
    `optimizer.step()` as ever, with any optimiser and schedule.

    recipe: one that noises sums of per-example gradients, changed by keywords (sigma=1.0, clip_bound=1.0). epsilon with epochs
    or steps: the noise is calibrated for them and the loop stops before the budget is exceeded. loss: "cross-entropy",
    "squared", a torch loss, or a function of (module, batch of one example); the first two use the fast engines.
    out: folder of the ledger, resume=True continues it. seed: repeatable noise for tests; the promise then needs it secret.

    Formal guarantee: see `Private.backward`. It covers what the optimiser does with `.grad`, the weights that follow, and
    everything computed from them; not the losses that `backward` returns, nor other looks at private rows in your loop.
    """
    value = get(recipe) if isinstance(recipe, str) else recipe
    return own_loop.make_private(
        module, optimizer, loader, recipe=with_changes(value, _dotted(changes)), loss=loss, epsilon=epsilon, delta=delta,
        epochs=epochs, steps=steps, out=_folder(out), resume=resume, seed=seed,
    )  # fmt: skip


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords as keys: clip_bound is clip.bound."""
    return {
        key.replace("clip_", "clip.", 1) if key.startswith("clip_") else key: value for key, value in settings.items()
    }


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


def _config_of(value: Recipe, changes: dict[str, Any]) -> Any:
    """A configuration of a recipe given as a value.

    Where the catalogue's entry of that name differs only in keys, or all parts are ours, the keys spell it and the run
    directory holds the whole recipe; else it must be given again to resume the run.
    """
    base = catalogue().get(value.name, Recipe(value.name))
    before, own = spell(base), spell(value)
    parts = {key: _text(given) for key, given in own.items() if given != before[key] and key not in ("summary", "paper")}
    spelled = all(isinstance(given, (str, float, int, bool, type(None))) for given in parts.values())
    if spelled and with_changes(base, parts) == replace(value, about=base.about):
        known = value.name in catalogue()
        keys = parts if known else {**parts, "name": value.name}
        named = value.name if known else "non-private"
        return make_config({"recipe": named}, {**{f"protect.{key}": given for key, given in keys.items()}, **changes})
    return make_config({"recipe": f"{GIVEN}{value.name}"}, changes, recipe=value)


def _text(value: Any) -> Any:
    return as_text(value) if isinstance(value, Schedule) else value


def _result(
    folder: Path, facts: dict[str, Any], config: Any, own: Dataset | Table | None, module: nn.Module | None
) -> Result:
    from safetensors.torch import load_file

    if module is None:
        prepared = loop.prepare(config, own)
        module = prepared.task.module
    names = layout_of(module).names
    tensors = load_file(folder / "model.safetensors")
    load(module, np.concatenate([tensors[name].numpy().reshape(-1) for name in names]))
    return Result(folder, facts, module)
