"""The owner's file as the contract describes it: always the same columns, classes and number of records.

A record that cannot be read (a missing number, an unknown label) becomes a constant one; it adds what any constant adds.
So nothing about a file, not even that it is broken, changes the form of what a node does. The owner is told by
`fedveil flower check` and by the trainer at its start.
"""

from __future__ import annotations

import csv
import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedveil.data.rows import Dataset, to_unit
from fedveil.errors import UserError
from fedveil.flower.contract import Data


@dataclass(frozen=True)
class Found:
    """What is in a file: records, and which of them could not be read."""

    x: np.ndarray
    y: np.ndarray
    broken: np.ndarray  # [n] true where a record is constant because it could not be read


def read_rows(path: str | Path, data: Data) -> Found:
    """All records of the file, in its order. `UserError` if it is no such file or lacks a column."""
    where = Path(path)
    if not where.is_file():
        raise UserError(f"{where} does not exist or is not a file")
    if where.suffix == ".npz":
        if not data.shape:
            raise UserError(f"{where}: the contract describes columns of a .csv file")
        return _arrays(where, data)
    if not data.columns:
        raise UserError(f"{where}: the contract describes arrays of an .npz file")
    return _table(where, data)


def exactly(found: Found, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """The contract's number of records: further ones are left out, missing ones are constant.

    Formal guarantee: each record of the file decides one row at most, and no other.
    """
    count = min(len(found.x), data.examples)
    x = np.zeros((data.examples, *data.example_shape), np.float32)
    y = np.zeros(data.examples, np.int64 if data.classes else np.float32)
    x[:count], y[:count] = found.x[:count], found.y[:count]
    return x, y


def dataset_of(found: Found, data: Data, name: str, test: bool) -> Dataset:
    """As test rows of a server (unreadable ones left out), or as a node's training rows."""
    nothing = (np.zeros((0, *data.example_shape), np.float32), found.y[:0])
    good = (found.x[~found.broken], found.y[~found.broken])
    (x, y), (x_test, y_test) = (nothing, good) if test else (exactly(found, data), nothing)
    return Dataset(name, x, y, x_test, y_test, len(data.classes) or None, data.task, class_names=data.classes)


def empty_dataset(data: Data) -> Dataset:
    """The form of the data without any of it: one constant record."""
    x = np.zeros((1, *data.example_shape), np.float32)
    y = np.zeros(1, np.int64 if data.classes else np.float32)
    return Dataset("contract", x, y, x, y, len(data.classes) or None, data.task, class_names=data.classes)


def complaints(found: Found, data: Data) -> list[str]:
    """What the owner should know about the file; private."""
    said = []
    if len(found.x) != data.examples:
        more = (
            "the last ones are left out"
            if len(found.x) > data.examples
            else "constant records take their place"
        )
        said.append(f"the file has {len(found.x)} records, the contract {data.examples}: {more}")
    if found.broken.any():
        first = int(np.flatnonzero(found.broken)[0])
        said.append(
            f"{int(found.broken.sum())} records cannot be read and count as constant (first: record {first})"
        )
    if data.classes:
        seen = np.bincount(found.y[~found.broken], minlength=len(data.classes))
        said += [
            f"no record has the class '{name}'" for name, n in zip(data.classes, seen, strict=True) if n == 0
        ]
    return said


def _table(path: Path, data: Data) -> Found:
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            header = [name.strip() for name in next(lines, [])]
            names = [*(name for name, _, _ in data.columns), data.target]
            for name in names:
                if header.count(name) != 1:
                    raise UserError(f"{path}: the header has no column '{name}', or has it twice")
            places = [header.index(name) for name in names]
            rows = [[line[at] if at < len(line) else "" for at in places] for line in lines if line]
    except (OSError, UnicodeDecodeError, csv.Error, EOFError) as wrong:
        raise UserError(f"{path}: not a readable table ({wrong})") from None
    numbers = np.array([[_number(cell) for cell in row[:-1]] for row in rows]).reshape(
        len(rows), len(data.columns)
    )
    labels = np.array([_label(row[-1], data) for row in rows], np.float64)
    return _clean(to_unit(np.nan_to_num(numbers), [(low, high) for _, low, high in data.columns]), labels,
                  np.asarray(~np.isfinite(numbers).all(axis=1)), data)  # fmt: skip


def _arrays(path: Path, data: Data) -> Found:
    try:
        with np.load(path, allow_pickle=False) as archive:
            x, y = np.asarray(archive["x"]), np.asarray(archive["y"], np.float64).reshape(-1)
    except (OSError, ValueError, KeyError, EOFError, TypeError) as wrong:
        raise UserError(f"{path}: not an .npz with numeric arrays x and y ({wrong})") from None
    if x.shape[1:] != data.shape or len(x) != len(y) or x.dtype.kind not in "iuf":
        raise UserError(
            f"{path}: x has shape {list(x.shape)} and y {list(y.shape)}, the contract says {list(data.shape)} each"
        )
    wide = x.astype(np.float64) / (255.0 if x.dtype == np.uint8 else 1.0)
    broken = np.asarray(~np.isfinite(wide).reshape(len(wide), -1).all(axis=1))
    kept = np.clip(np.nan_to_num(wide), *data.range).astype(np.float32)
    return _clean(kept, y, broken, data)


def _clean(x: np.ndarray, labels: np.ndarray, broken: np.ndarray, data: Data) -> Found:
    broken = broken | ~np.isfinite(labels)
    if data.classes:
        broken |= (labels < 0) | (labels >= len(data.classes)) | (labels != np.round(labels))
        y = np.where(broken, 0, labels).astype(np.int64)
    else:
        y = np.clip(np.where(broken, 0.0, labels), *data.target_range).astype(np.float32)
    x = x.copy()
    x[broken] = 0.0
    return Found(x, y, broken)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _label(cell: str, data: Data) -> float:
    """The class number of a name (1 and 1.0 are the same name), or the target itself."""
    text = cell.strip()
    if not data.classes:
        return _number(text)
    if text in data.classes:
        return float(data.classes.index(text))
    value = _number(text)
    if math.isfinite(value) and value == round(value) and str(int(value)) in data.classes:
        return float(data.classes.index(str(int(value))))
    return math.nan
