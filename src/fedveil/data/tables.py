"""The user's own data: .npz, .csv or a function. Every complaint names the file, the column and the row.

Nothing here reads a pickle, so a stranger's file cannot run code. Features are used as given unless public
`ranges` (or the private `fit_scaler` of `load`) are asked for.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import inspect
import itertools
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedveil.data.functions import call, import_function, is_function
from fedveil.data.identifiers import is_identifier, learnt_from
from fedveil.data.rows import Dataset, Task, split_rows, to_unit
from fedveil.data.text import encode, is_text
from fedveil.errors import UserError, did_you_mean

__all__ = ["from_arrays", "from_csv", "from_file", "from_function", "from_npz", "is_function"]

Ranges = Mapping[str, Sequence[float]] | Sequence[float]
MISSING = {"", "?", "na", "n/a", "nan", "null", "none"}


def from_file(path: Path, *, seed: int = 0, target: str | None = None, **options: Any) -> Dataset:
    """Read a .npz or .csv(.gz) file."""
    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file; correct the path.")
    reader = from_npz if path.suffix == ".npz" else from_csv
    known = [name for name in inspect.signature(reader).parameters if name not in ("path", "seed")]
    for option in options:
        if option not in known:
            raise UserError(
                f"{path}: there is no option '{option}' for this kind of file (there are: "
                f"{', '.join(known)})."
                f"{did_you_mean(option, known)}"
            )
    if reader is from_npz:
        if target is not None:
            raise UserError(
                f"{path}: --target names a column of a .csv; an .npz has its targets in the array 'y'."
            )
        return from_npz(path, seed=seed, **options)
    return from_csv(path, seed=seed, target=target, **options)


def from_npz(
    path: Path, *, seed: int = 0, test: float = 0.25, task: Task | None = None, ranges: Ranges | None = None
) -> Dataset:
    """Arrays x and y; perhaps x_test and y_test (else a seeded fraction `test` of the rows); groups."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except ValueError as wrong:
        raise UserError(
            f"{path}: {wrong}. Arrays of Python objects (pickles) are not read; save plain numbers."
        ) from wrong
    except (NotImplementedError, OSError, EOFError, zipfile.BadZipFile, AttributeError) as wrong:
        raise UserError(f"{path} is not a readable .npz archive ({wrong}).") from wrong
    known = ("x", "y", "x_test", "y_test", "groups")
    for key in ("x", "y"):
        if key not in arrays:
            raise UserError(
                f"{path} has no array '{key}' (it has: {', '.join(arrays) or 'none'}); needed: x and y."
            )
    for key in arrays:
        if key not in known:
            raise UserError(
                f"{path}: unknown array '{key}' (known: {', '.join(known)}).{did_you_mean(key, known)}"
            )
    return from_arrays(path.name, **arrays, seed=seed, test=test, task=task, ranges=ranges, where=str(path))


def from_function(spec: str, *, seed: int = 0, target: str | None = None, **options: Any) -> Dataset:
    """Call package.module:function(**options); it returns a Dataset, (x, y) or (x, y, x_test, y_test).

    It is given `seed` if it names that parameter.
    """
    function = import_function(spec)
    if target is not None:
        options = {**options, "target": target}
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    if "seed" in parameters:
        options = {"seed": seed, **options}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for option in options:
            if option not in parameters:
                raise UserError(f"'{spec}' has no parameter '{option}'.{did_you_mean(option, parameters)}")
    made = call(spec, function, **options)
    if isinstance(made, Dataset):
        _check(made, spec)
        return made
    if isinstance(made, tuple) and len(made) in (2, 4):
        return from_arrays(spec, *made, seed=seed, where=spec)
    raise UserError(
        f"'{spec}' returned a {type(made).__name__}; it must return a fedveil Dataset, (x, y) or "
        "(x, y, x_test, y_test)."
    )


COUNTED = (
    "private: the number of classes was counted in the training labels, unpaid; give it (classes = N), or let the test rows, "
    "which are public, show every class"
)


def from_arrays(
    name: str,
    x: Any,
    y: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    groups: object = None,
    seed: int = 0,
    test: float = 0.25,
    task: Task | None = None,
    ranges: Ranges | None = None,
    where: str | None = None,
    classes: int | None = None,
    class_names: tuple[str, ...] = (),
) -> Dataset:
    """A checked Dataset from plain arrays.

    Images are [n, channels, h, w]; images of type uint8 are divided by 255. Without test arrays a seeded
    fraction `test` of the rows is held out. Where the labels of the (public) test rows are whole numbers the task is
    classification, unless `task` says otherwise; no training label has a say in it. classes: how many there are,
    a public number; without it the labels are counted, and unless the test rows show as many, a note says that private rows
    decided.
    """
    where = where or name
    x, y = _numbers(x, "x", where), _numbers(y, "y", where)
    pixels = x.ndim == 4 and x.dtype == np.uint8
    notes = [f"features from {Path(where).name} " + ("divided by 255" if pixels else "used as given")]
    x_test, y_test = _test_arrays(x_test, y_test, x, where)
    _same_length(where, x=x, y=y)
    if groups is not None:
        groups = np.asarray(groups)
        _same_length(where, x=x, groups=groups)
    task = task or ("classification" if _whole(_public_labels(y, y_test, test, seed)) else "regression")
    if task not in ("classification", "regression"):
        raise UserError(f"{where}: task = '{task}' is unknown; use 'classification' or 'regression'.")
    given, classes = classes, None
    if task == "classification":
        classes = _classes(y, where) if given is None else given
        _labels_within(y, classes, where, "y")
        if y_test is not None:
            _labels_within(y_test, classes, where, "y_test")
    if x_test is None:
        train, held = _held_out(len(x), test, seed, where)
        x_test, y_test, x, y = x[held], y[held], x[train], y[train]
        groups = None if groups is None else groups[train]
        notes.append(f"{len(held)} of {len(held) + len(train)} rows held out for testing by seed")
    if classes is not None and given is None and y_test.max(initial=-1) + 1 < classes:
        notes.append(COUNTED)
    scale = (lambda a: a.astype(np.float32) / np.float32(255)) if pixels else (lambda a: a.astype(np.float32))
    x, x_test = scale(x), scale(x_test)
    if ranges is not None:
        pair = _range_pair(ranges, where)
        flat = [pair] * int(np.prod(x.shape[1:]))
        x, x_test = (to_unit(a.reshape(len(a), -1), flat).reshape(a.shape) for a in (x, x_test))
        notes[0] = f"features scaled to [-1, 1] by the public range {pair[0]:g} to {pair[1]:g}"
    numbers, names = _group_numbers(groups)
    kind = np.int64 if task == "classification" else np.float32
    dataset = Dataset(
        name=Path(name).name, x=x, y=y.astype(kind), x_test=x_test, y_test=y_test.astype(kind),
        classes=classes, task=task, pixel_range=(0.0, 1.0) if pixels else None, groups=numbers,
        group_names=names, notes=tuple(notes), class_names=class_names,
    )  # fmt: skip
    _check(dataset, where)
    return dataset


def _test_arrays(x_test: object, y_test: object, x: np.ndarray, where: str) -> tuple[object, object]:
    """Given test rows as numbers, like the training rows; (None, None) if there are none."""
    if (x_test is None) != (y_test is None):
        raise UserError(f"{where}: x_test and y_test belong together; one of them is missing.")
    if x_test is None or y_test is None:
        return None, None
    x_test, y_test = _numbers(x_test, "x_test", where), _numbers(y_test, "y_test", where)
    _same_length(where, x_test=x_test, y_test=y_test)
    if x_test.shape[1:] != x.shape[1:]:
        raise UserError(
            f"{where}: an example of x_test has shape {list(x_test.shape[1:])}, of x {list(x.shape[1:])}."
        )
    return x_test, y_test


def from_csv(
    path: Path,
    *,
    seed: int = 0,
    target: str | None = None,
    drop: str | Sequence[str] = (),
    group: str | None = None,
    split: str | None = None,
    test: float = 0.25,
    task: Task | None = None,
    ranges: Ranges | None = None,
    text: str | None = None,
) -> Dataset:
    """A table with a header line. All columns but target, group, split and dropped ones are numeric features.

    target: the column to predict (numbers, or words, which become classes in alphabetical order). group: a
    column that names the holder of each row. split: a column of "train"/"test"; without it a seeded fraction
    `test` is held out. ranges: public (low, high) for all columns, or per column. text: the column whose texts are the
    examples (for `features`), instead of numeric columns.
    """
    header, rows, lines = read_csv(path)
    if target is None:
        raise UserError(f"{path}: say which column to predict with --target (columns: {', '.join(header)}).")
    dropped = [drop] if isinstance(drop, str) else list(drop)
    named = [("target", target), ("group", group), ("split", split), ("text", text), *(("drop", d) for d in dropped)]
    _check_columns(named, header, path)
    special = {target, group, split, *dropped}
    features = [text] if text else [column for column in header if column not in special]
    if not features:
        raise UserError(f"{path}: no feature columns are left.")
    table = np.array(rows, dtype=str)
    cells = {column: table[:, i] for i, column in enumerate(header)}
    x = encode(cells[text].tolist()) if text else np.stack([_numeric(cells[c], c, path, lines) for c in features], axis=1)
    y, names = _target(cells[target], target, path, lines, task)
    groups = None if group is None else cells[group]
    if groups is not None:
        _refuse_missing(groups, cast(str, group), path, lines)
    scaled = None
    if ranges is not None:
        x, scaled = to_unit(x, _column_ranges(ranges, features, path)), "features scaled to [-1, 1] by public ranges"
    held: dict[str, Any] = {}
    if split is not None:
        train = _training_rows(cells[split], split, path, lines)
        held = {"x_test": x[~train], "y_test": y[~train]}
        x, y, groups = x[train], y[train], None if groups is None else groups[train]
    if names and task == "regression":
        raise UserError(f"{path}, column '{target}': words cannot be predicted by regression.")
    made = from_arrays(
        path.name, x, y, **held, groups=groups, seed=seed, test=test, task=task, where=str(path)
    )
    notes = (scaled or made.notes[0], *made.notes[1:])
    if text:
        made = dataclasses.replace(made, x=made.x.astype(np.uint8), x_test=made.x_test.astype(np.uint8))
        notes = (f"texts of column '{text}' as bytes; `features` turns each alone into numbers", *made.notes[1:])
    else:
        notes = (*notes, *(learnt_from(column) for column in features if is_identifier(column)))
    if names:
        notes = (*notes, f"classes from the words in '{target}': {', '.join(names)}")
        if len(np.unique(made.y_test)) < len(names) and COUNTED not in notes:
            notes = (*notes, COUNTED)  # another set of words numbers all of them otherwise
    return dataclasses.replace(made, notes=notes, class_names=names)


def _check_columns(named: Sequence[tuple[str, str | None]], header: Sequence[str], path: Path) -> None:
    """Refuse options that name a column which the table does not have."""
    for option, column in named:
        if column is not None and column not in header:
            raise UserError(
                f"{path}: {option} column '{column}' is not in the header ({', '.join(header)})."
                f"{did_you_mean(column, header)}"
            )


def _column_ranges(ranges: Ranges, features: Sequence[str], path: Path) -> list[tuple[float, float]]:
    """The public range of each feature column."""
    pairs = [_column_range(ranges, c, path) for c in features]
    if isinstance(ranges, Mapping):
        for column in ranges:
            if column not in features:
                raise UserError(f"{path}: ranges names '{column}', which is no feature column."
                                f"{did_you_mean(column, features)}")  # fmt: skip
    return pairs


def _training_rows(cells: np.ndarray, split: str, path: Path, lines: Sequence[int]) -> np.ndarray:
    """Which rows the column `split` calls train; the others it calls test."""
    words = np.char.lower(np.char.strip(cells))
    wrong = np.flatnonzero(~np.isin(words, ["train", "test"]))
    if len(wrong):
        raise UserError(
            f"{path}, column '{split}', row {lines[wrong[0]]}: '{cells[wrong[0]]}' is neither "
            "train nor test."
        )
    if len(set(words)) < 2:
        raise UserError(
            f"{path}, column '{split}': all rows are '{words[0]}'; both train and test are needed."
        )
    return np.asarray(words == "train")


def separator_of(header: str) -> str:
    """What separates the cells: a comma, or, where that makes one column only, a semicolon or tab as many spreadsheets write it.

    Only the header line is looked at, which is public.
    """
    counts = {mark: len(next(csv.reader([header], delimiter=mark), [])) for mark in ",;\t"}
    return "," if counts[","] > 1 else max(counts, key=lambda mark: counts[mark])


def read_csv(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """Header, rows, and the line number of each row in the file."""
    opener = gzip.open if path.name.endswith(".gz") else open
    rows, lines = [], []
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            reader = csv.reader(itertools.chain([first], file), delimiter=separator_of(first))
            header = [word.strip() for word in next(reader, [])]
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise UserError(
                        f"{path}, row {reader.line_num}: {len(row)} cells, but the header has "
                        f"{len(header)} columns."
                    )
                rows.append(row)
                lines.append(reader.line_num)
    except UnicodeDecodeError as wrong:
        raise UserError(
            f"{path} cannot be read: its letters are not UTF-8 (older Excel files are in Latin-1). Save it as 'CSV UTF-8', or "
            f"convert it: iconv -f latin1 -t utf-8 {path.name} > new.csv"
        ) from wrong
    except (OSError, EOFError, csv.Error) as wrong:
        raise UserError(f"{path} cannot be read as a UTF-8 CSV file: {wrong}.") from wrong
    if not header:
        raise UserError(f"{path} is empty; the first line must name the columns.")
    if not rows:
        raise UserError(f"{path} has a header but no rows.")
    doubled = sorted({c for c in header if header.count(c) > 1 or not c})
    if doubled:
        raise UserError(
            f"{path}: column name '{doubled[0]}' is empty or used twice; every column needs its own name."
        )
    return header, rows, lines


def _refuse_missing(cells: np.ndarray, column: str, path: Path, lines: list[int]) -> None:
    words = np.char.lower(np.char.strip(cells))
    missing = np.flatnonzero(np.isin(words, list(MISSING)))
    if len(missing):
        first = missing[0]
        raise UserError(
            f"{path}, column '{column}', row {lines[first]}: missing value '{cells[first]}' "
            f"({len(missing)} in this "
            "column). Fill them with a public constant, or remove the rows or the column (drop)."
        )


def _numeric(cells: np.ndarray, column: str, path: Path, lines: list[int]) -> np.ndarray:
    _refuse_missing(cells, column, path, lines)
    try:
        values = cells.astype(np.float64)
    except ValueError:
        bad = next(i for i, cell in enumerate(cells) if not _is_number(cell))
        raise UserError(
            f"{path}, column '{column}', row {lines[bad]}: '{cells[bad]}' is not a number. Encode the "
            "column with "
            f"public categories, or leave it out (drop={column})."
        ) from None
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise UserError(
            f"{path}, column '{column}', row {lines[wrong[0]]}: '{cells[wrong[0]]}' is not finite."
        )
    return values


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _target(
    cells: np.ndarray, column: str, path: Path, lines: list[int], task: Task | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Numbers as they are; words as class numbers in alphabetical order, with their names."""
    _refuse_missing(cells, column, path, lines)
    words = np.char.strip(cells)
    if any(_is_number(word) for word in np.unique(words)) or task == "regression":
        return _numeric(cells, column, path, lines), ()
    names, y = np.unique(words, return_inverse=True)
    if len(names) > max(100, len(words) // 10):
        raise UserError(
            f"{path}, column '{column}': {len(names)} different words; is this really the target?"
        )
    return y.astype(np.int64), tuple(map(str, names))


def _range_pair(ranges: Any, where: object) -> tuple[float, float]:
    try:
        low, high = (float(v) for v in ranges)
    except (TypeError, ValueError):
        raise UserError(f"{where}: ranges = {ranges!r} is not a pair (low, high).") from None
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise UserError(f"{where}: range {low:g} to {high:g} is empty or not finite; low must be below high.")
    return low, high


def _column_range(ranges: Ranges, column: str, path: Path) -> tuple[float, float]:
    if not isinstance(ranges, Mapping):
        return _range_pair(ranges, path)
    if column not in ranges:
        raise UserError(f"{path}: ranges has no entry for column '{column}'; every feature column needs one.")
    return _range_pair(ranges[column], f"{path}, column '{column}'")


def _numbers(array: Any, key: str, where: str) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype == bool:
        array = array.astype(np.uint8)
    if array.dtype.kind not in "iuf":
        raise UserError(f"{where}, array '{key}': type {array.dtype} is not numeric.")
    if array.ndim < 1 or array.size == 0:
        raise UserError(f"{where}, array '{key}': empty (shape {list(array.shape)}).")
    if key.startswith("y") and array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if key.startswith("y") and array.ndim != 1:
        raise UserError(
            f"{where}, array '{key}': shape {list(array.shape)}; targets must be [n], one per row."
        )
    if key.startswith("x") and array.ndim not in (2, 3, 4):
        raise UserError(
            f"{where}, array '{key}': shape {list(array.shape)}; give [n, features] or [n, channels, "
            "height, width]."
        )
    if key.startswith("x") and array.ndim == 3:
        array = array[:, None]  # grey images
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        at = np.argwhere(~np.isfinite(array))[0]
        place = f"row {at[0]}" + (f", column {', '.join(map(str, at[1:]))}" if len(at) > 1 else "")
        raise UserError(
            f"{where}, array '{key}', {place}: {array[tuple(at)]} is missing or not finite. Fill it with "
            "a public "
            "constant or remove the row."
        )
    return array


def _same_length(where: str, **arrays: np.ndarray) -> None:
    (a, first), (b, second) = arrays.items()
    if len(first) != len(second):
        raise UserError(f"{where}: '{a}' has {len(first)} rows but '{b}' has {len(second)}.")


def _public_labels(y: np.ndarray, y_test: np.ndarray | None, test: float, seed: int) -> np.ndarray:
    """The labels of the test rows, given or still to be held out: they alone may decide what every run would show."""
    if y_test is not None:
        return y_test
    held = round(test * len(y))
    return y[split_rows(len(y), len(y) - held, seed)[1]] if 0 < held < len(y) else y  # `_held_out` refuses such a split


def _whole(y: np.ndarray) -> bool:
    return y.dtype.kind in "iu" or bool(np.all(y == np.round(y)))


def _classes(y: np.ndarray, where: str) -> int:
    """The number of classes; labels must be 0..k-1 without holes."""
    if not _whole(y):
        row = int(np.flatnonzero(y != np.round(y))[0])
        raise UserError(
            f"{where}: label {y[row]} in row {row} is no whole number; use task = 'regression' for these (the labels of the test "
            "rows alone decide where no task is given)."
        )
    present = np.unique(y)
    if present[0] < 0:
        row = int(np.argmin(y))
        raise UserError(f"{where}: label {y[row]:g} in row {row} is negative; labels must be 0, 1, 2, ...")
    if len(present) == 1:
        raise UserError(f"{where}: every row has the label {present[0]:g}; at least two classes are needed.")
    if len(present) != int(present[-1]) + 1:
        hole = int(np.flatnonzero(present != np.arange(len(present)))[0])
        raise UserError(
            f"{where}: labels go up to {present[-1]:g} but no row has the label {hole}; labels must be "
            "0..k-1 without "
            "holes (renumber them), or use task = 'regression'."
        )
    return len(present)


def _labels_within(y: np.ndarray, classes: int, where: str, key: str) -> None:
    wrong = np.flatnonzero((y < 0) | (y >= classes) | (y != np.round(y)))
    if len(wrong):
        raise UserError(
            f"{where}, array '{key}', row {wrong[0]}: label {y[wrong[0]]:g} does not occur in training "
            f"(0..{classes - 1})."
        )


def _held_out(count: int, fraction: float, seed: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    held = round(fraction * count)
    if not (0.0 < fraction < 1.0 and 0 < held < count):
        raise UserError(
            f"{where}: test = {fraction} of {count} rows leaves {held} for testing and {count - held} "
            "for training; "
            "both need at least one row. Give a fraction between 0 and 1, or x_test and y_test."
        )
    return split_rows(count, count - held, seed)


def _group_numbers(groups: np.ndarray | None) -> tuple[np.ndarray | None, tuple[str, ...]]:
    if groups is None:
        return None, ()
    names, numbers = np.unique(np.asarray(groups), return_inverse=True)
    return numbers.astype(np.int64), tuple(map(str, names))


def _check(dataset: Dataset, where: str) -> None:
    """The contract of `Dataset`, for datasets made by the user's code."""
    for key in ("x", "y", "x_test", "y_test"):
        _numbers(getattr(dataset, key), key, where)
    _same_length(where, x=dataset.x, y=dataset.y)
    _same_length(where, x_test=dataset.x_test, y_test=dataset.y_test)
    for key in ("x", "x_test"):
        if getattr(dataset, key).dtype != np.float32 and not is_text(getattr(dataset, key)):
            raise UserError(
                f"{where}, array '{key}': type {getattr(dataset, key).dtype}; features must be float32."
            )
    if dataset.task == "classification":
        if dataset.classes is None or dataset.y.dtype != np.int64:
            raise UserError(f"{where}: classification needs `classes` and int64 labels.")
        for key in ("y", "y_test"):
            _labels_within(getattr(dataset, key), dataset.classes, where, key)
    elif dataset.classes is not None or dataset.y.dtype != np.float32:
        raise UserError(f"{where}: regression needs classes=None and float32 targets.")
    if dataset.groups is not None:
        _same_length(where, x=dataset.x, groups=dataset.groups)
