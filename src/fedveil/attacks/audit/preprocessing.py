"""Does preparing the data leak? One row more must not change what becomes of any other row.

A scaler, a vocabulary or a whitening that is fitted on private rows lets every row move with every other, before any noise, so no
clip bounds one row's influence. `look` asks twice, and needs no statistics:

    moved_by_a_stranger   the run's own features are computed with and without one outlying row: no other row may move
    fitted                rows that come ready-made (a file, a function of one's own) carry the mark of what was fitted on them:
                          columns with a mean of 0 to the last digits, or one row alone at each end of the range
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedveil.data.rows import Dataset, take

ROWS = 64  # rows that are prepared twice
TOLERANCE = 1e-6  # relative; a preparation row by row moves nothing at all
EXACT = 1e-5  # of a column's deviation: a mean this near to 0 was subtracted
VALUES = (
    20  # a column with fewer different values says nothing (balanced yes/no columns have mean 0 by design)
)
LEAST = 3  # columns


@dataclass(frozen=True)
class Preparation:
    """What was found: how far a stranger moves other rows, and what was fitted on the rows themselves ("" for nothing)."""

    moved: float
    fitted: str

    @property
    def leaks(self) -> bool:
        return self.moved > TOLERANCE or bool(self.fitted)

    @property
    def reason(self) -> str:
        """Why no epsilon covers it, in a sentence; "" if nothing was found."""
        if self.fitted:
            return f"the rows were prepared with what private rows show: {self.fitted}"
        if self.moved > TOLERANCE:
            return "one outlying row moves what becomes of other rows: their preparation is fitted on private rows"
        return ""


def look(raw: Dataset, prepare_rows: Callable[[Dataset], Dataset], seed: int = 0) -> Preparation:
    """raw: rows before the run's own features; prepare_rows: those features."""
    chosen = np.random.default_rng(seed).choice(len(raw), min(ROWS, len(raw)), replace=False)
    few = take(raw, chosen)

    def features(x: np.ndarray) -> np.ndarray:
        y = np.concatenate([few.y, few.y[:1]])[: len(x)]
        return prepare_rows(replace(few, x=x, y=y, groups=None, attributes={})).x

    return Preparation(moved_by_a_stranger(features, few.x), fitted(raw))


def moved_by_a_stranger(
    prepare_rows: Callable[[np.ndarray], np.ndarray], rows: np.ndarray, *, size: float = 1e3
) -> float:
    """How far the other rows move when one outlying row joins, relative to their size; 0 for a preparation row by row."""
    rows = np.asarray(rows)
    if rows.dtype.kind == "f":
        outlier = np.full_like(rows[:1], size * max(1.0, float(np.abs(rows).max(initial=0.0))))
    else:
        outlier = np.full_like(rows[:1], ord("z"))  # a text of one long word
    alone = np.asarray(prepare_rows(np.concatenate([rows, rows[:1]])), np.float64)[: len(rows)]
    beside = np.asarray(prepare_rows(np.concatenate([rows, outlier])), np.float64)[: len(rows)]
    if alone.shape != beside.shape:
        return float("inf")
    return float(np.abs(beside - alone).max(initial=0.0) / max(float(np.abs(alone).max(initial=0.0)), 1e-30))


def fitted(raw: Dataset) -> str:
    """What was fitted on a table's rows before the run saw them, as far as the numbers show it; "" for nothing.

    Training rows alone and with the test rows. At least three columns of many values, and half of all such columns, must carry
    the mark: a continuous column that nothing was fitted on has a mean this near to 0 with probability EXACT * sqrt(rows)."""
    if raw.pixel_range is not None or raw.x.dtype.kind != "f":
        return ""
    own = raw.x.reshape(len(raw), -1)
    for rows, whose in (
        (own, "training"),
        (np.concatenate([own, raw.x_test.reshape(len(raw.x_test), -1)]), "all"),
    ):
        found = _marks(np.asarray(rows, np.float64))
        if found:
            return f"{found} of the {whose} rows"
    return ""


def _marks(rows: np.ndarray) -> str:
    many = np.array([len(np.unique(column[:2000])) >= VALUES for column in rows.T], bool)
    if len(rows) < 2 or many.sum() < LEAST:
        return ""
    rows = rows[:, many]
    deviation = rows.std(0)
    centred = (np.abs(rows.mean(0)) < EXACT * deviation).sum()
    low, high = rows.min(0), rows.max(0)
    ends = np.isclose(high, 1, atol=1e-6) & (np.isclose(low, 0, atol=1e-6) | np.isclose(low, -1, atol=1e-6))
    alone = ((rows == low).sum(0) == 1) & ((rows == high).sum(0) == 1)
    needed = max(LEAST, rows.shape[1] / 2)
    if centred >= needed:
        return f"{centred} of {rows.shape[1]} columns are centred to the last digits by the mean"
    if (ends & alone).sum() >= needed:
        return (
            f"{(ends & alone).sum()} of {rows.shape[1]} columns are scaled by the least and the largest value"
        )
    return ""
