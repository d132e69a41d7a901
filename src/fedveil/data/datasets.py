"""Datasets: the built-in ones by name, the user's own by path or function.

    load("cancer")                                   embedded, no files needed
    load("mnist", validation=1 / 6)                  from FEDVEIL_DATA or root=
    load("patients.csv", target="outcome")           the user's own (see data.tables)

Features are float32; images are [n, channels, height, width] in [0, 1]. Scaling uses public constants
(data.constants); fitting it on the rows themselves is opt-in and leaves a note that says so. Training,
validation and test rows never overlap, and only training rows are ever dealt out to clients.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedveil.data import sources
from fedveil.data.rows import Dataset, Task, fit_scale, hold_out, limit_rows
from fedveil.errors import UserError, did_you_mean

__all__ = ["Dataset", "Task", "available", "data_root", "dataset_names", "load"]


def dataset_names() -> tuple[str, ...]:
    """The built-in names."""
    return tuple(sources.CATALOGUE)


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder with data files: `root` (the option --data), else the environment's FEDVEIL_DATA."""
    chosen = root or os.environ.get("FEDVEIL_DATA")
    if not chosen:
        raise UserError(
            "No data folder. Give --data DIR or set FEDVEIL_DATA; `fedveil data get NAME --data DIR` fetches "
            "a dataset into one. The datasets 'cancer' and 'digits' need no folder."
        )
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        where = "--data" if root else "FEDVEIL_DATA"
        raise UserError(
            f"The data folder {folder} (from {where}) does not exist; create it or correct the path."
        )
    return folder


def available(name: str, root: str | os.PathLike[str] | None = None) -> bool:
    """Whether `load(name)` would find its files."""
    source = sources.CATALOGUE[name]
    if not source.files:
        return True
    try:
        folder = data_root(root)
    except UserError:
        return False
    return all((folder / file).is_file() for file in source.files)


def load(
    name_or_path: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    seed: int = 0,
    validation: float = 0.0,
    target: str | None = None,
    limit: int | None = None,
    limit_test: int | None = None,
    fit_scaler: bool = False,
    **options: object,
) -> Dataset:
    """Load a dataset.

    name_or_path: a built-in name, a .npz or .csv(.gz) file, or "package.module:function".
    seed: which split, where the dataset has none of its own. validation: fraction of the training rows to
    hold out as a public validation set. target: the column (csv) or attribute (utkface) to predict.
    limit, limit_test: use at most that many rows. fit_scaler: standardise on private rows (noted as such).
    Further options belong to one kind of dataset: see docs/data.md.
    """
    text = os.fspath(name_or_path)
    if text in sources.CATALOGUE:
        dataset = _load_builtin(text, root, seed, target, options)
    else:
        dataset = _load_own(text, seed, target, options)
    dataset = hold_out(limit_rows(dataset, limit, limit_test, seed), validation, seed)
    return fit_scale(dataset) if fit_scaler else dataset


def _load_builtin(
    name: str, root: str | os.PathLike[str] | None, seed: int, target: str | None, options: dict[str, object]
) -> Dataset:
    source = sources.CATALOGUE[name]
    if target is not None:
        options = {**options, "target": target}
    for option in options:
        if option not in source.options:
            known = ", ".join(source.options) or "none"
            raise UserError(
                f"Dataset '{name}' has no option '{option}' (it has: "
                f"{known}).{did_you_mean(option, source.options)}"
            )
    folder = Path()
    if source.files:
        folder = data_root(root)
        missing = [file for file in source.files if not (folder / file).is_file()]
        if missing:
            how = f"`fedveil data get {name} --data {folder}` fetches it" if source.fetch else source.how
            raise UserError(f"Dataset '{name}' is not in {folder}: {', '.join(missing)} is missing; {how}.")
    return source.read(folder, seed, **options)


def _load_own(text: str, seed: int, target: str | None, options: dict[str, object]) -> Dataset:
    from fedveil.data import tables

    if tables.is_function(text):
        return tables.from_function(text, seed=seed, target=target, **options)
    if text.endswith((".npz", ".csv", ".csv.gz")):
        return tables.from_file(Path(text), seed=seed, target=target, **options)
    raise UserError(
        f"'{text}' is neither a dataset name ({', '.join(dataset_names())}), nor a .npz, .csv or .csv.gz "
        "file, nor "
        f"package.module:function.{did_you_mean(text, dataset_names())}"
    )
