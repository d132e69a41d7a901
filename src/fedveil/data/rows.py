"""The `Dataset` value, and what can be done to its rows: split, hold out, limit, scale, check."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedveil.errors import UserError
from fedveil.keys import generator

Task = Literal["classification", "regression"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows to train on, rows to test on, and what they mean.

    x: float32 [n, features] or [n, channels, height, width]; texts are uint8 [n, bytes] until `features` turns them
    into numbers (data.text). y: int64 class numbers 0..classes-1, or float32
    [n] for regression (classes is None). pixel_range: the range of image values (None for tables). groups:
    one whole number 0..g-1 per training row, or None. x_validation/y_validation: held out of the training
    rows, treated as *public*, never dealt to a client (None unless asked for). attributes: further columns of
    the training rows by name; attributes_test the same of the test rows. notes: what a reader must know,
    among it everything that was computed from private rows (those notes begin with "private:").
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int | None
    task: Task = "classification"
    pixel_range: tuple[float, float] | None = None
    groups: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    x_validation: np.ndarray | None = None
    y_validation: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()
    attributes: Mapping[str, np.ndarray] = field(default_factory=dict)
    attributes_test: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.x.shape[1:])

    def __len__(self) -> int:
        return len(self.x)


def images(pixels: np.ndarray) -> np.ndarray:
    """uint8 [n, h, w] or [n, h, w, 3] to float32 [n, channels, h, w] in [0, 1]."""
    stacked = pixels[:, None] if pixels.ndim == 3 else np.moveaxis(pixels, -1, 1)
    out = np.empty(stacked.shape, np.float32)
    np.divide(stacked, np.float32(255), out=out, casting="unsafe")
    return out


def to_unit(x: np.ndarray, ranges: Sequence[tuple[float, float]], limit: float = 1.0) -> np.ndarray:
    """Map each column's public range to [-1, 1]; what falls outside [-limit, limit] is clamped.

    Formal guarantee: the ranges do not depend on the rows, so this acts on each row alone: nothing is
    released.
    """
    low, high = np.asarray(ranges, np.float64).T
    return np.clip((x - low) * (2.0 / (high - low)) - 1.0, -limit, limit).astype(np.float32)


def split_rows(count: int, train: int, seed: int, purpose: str = "split") -> tuple[np.ndarray, np.ndarray]:
    """Seeded disjoint row numbers: `train` of them, and the rest."""
    order = generator(seed, purpose).permutation(count)
    return order[:train], order[train:]


def take(dataset: Dataset, rows: np.ndarray, **changes: object) -> Dataset:
    """The dataset with only these training rows, in this order."""
    return dataclasses.replace(
        dataset,
        x=dataset.x[rows],
        y=dataset.y[rows],
        groups=None if dataset.groups is None else dataset.groups[rows],
        attributes={name: values[rows] for name, values in dataset.attributes.items()},
        **changes,  # type: ignore[arg-type]
    )


def hold_out(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """Take a public validation set out of the training rows; the rest keeps its order."""
    if not 0.0 <= fraction < 1.0:
        raise UserError(f"validation = {fraction} is not a fraction; give a number from 0 to below 1.")
    count = round(fraction * len(dataset))
    if fraction == 0.0:
        return dataset
    if not 0 < count < len(dataset):
        raise UserError(
            f"validation = {fraction} of {len(dataset)} training rows leaves {count} for validation and "
            f"{len(dataset) - count} for training; both need at least one row."
        )
    kept, held = split_rows(len(dataset), len(dataset) - count, seed, "validation")
    return take(
        dataset,
        np.sort(kept),
        x_validation=dataset.x[np.sort(held)],
        y_validation=dataset.y[np.sort(held)],
        notes=(*dataset.notes, f"validation: {count} rows held out of training and treated as public"),
    )


def limit_rows(dataset: Dataset, train: int | None, test: int | None, seed: int) -> Dataset:
    """At most `train` training rows and `test` test rows, drawn by seed, order kept."""
    for option, value in (("limit", train), ("limit_test", test)):
        if value is not None and value < 1:
            raise UserError(f"{option} = {value} leaves no rows; give at least 1.")
    if train is not None and train < len(dataset):
        rows = np.sort(split_rows(len(dataset), train, seed, "limit")[0])
        dataset = take(dataset, rows, notes=(*dataset.notes, f"limited to {train} training rows"))
    if test is not None and test < len(dataset.x_test):
        rows = np.sort(split_rows(len(dataset.x_test), test, seed, "limit-test")[0])
        dataset = dataclasses.replace(
            dataset,
            x_test=dataset.x_test[rows],
            y_test=dataset.y_test[rows],
            attributes_test={name: values[rows] for name, values in dataset.attributes_test.items()},
            notes=(*dataset.notes, f"limited to {test} test rows"),
        )
    return dataset


def fit_scale(dataset: Dataset) -> Dataset:
    """Standardise each feature by mean and deviation *of the training rows*.

    Formal guarantee: none. Mean and deviation are computed from private rows and are not paid for; the note
    added here says so, and whoever shares the model shares them.
    """
    if dataset.pixel_range is not None:
        raise UserError(f"{dataset.name}: fit_scaler is for tables; images keep their public range [0, 1].")
    mean = dataset.x.mean(axis=0, dtype=np.float64)
    spread = dataset.x.std(axis=0, dtype=np.float64)
    spread[spread == 0] = 1.0

    def scale(x: np.ndarray) -> np.ndarray:
        return ((x - mean) / spread).astype(np.float32)

    return dataclasses.replace(
        dataset,
        x=scale(dataset.x),
        x_test=scale(dataset.x_test),
        x_validation=None if dataset.x_validation is None else scale(dataset.x_validation),
        notes=(
            *dataset.notes,
            "private: features scaled by mean and deviation fitted on the training rows, unpaid",
        ),
    )
