"""Does preparing the data leak? One row more must not change what becomes of any other row.

A scaler, a vocabulary or a whitening that is fitted on private rows lets every row move with every other, before any noise, so no
clip bounds one row's influence. This needs no statistics: the preparation is run with and without one outlying row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def moved_by_a_stranger(
    prepare_rows: Callable[[np.ndarray], np.ndarray], rows: np.ndarray, *, size: float = 1e3
) -> float:
    """How far the other rows move when one outlying row joins, relative to their size; 0 for a preparation row by row."""
    rows = np.asarray(rows)
    outlier = np.full_like(rows[:1], size * max(1.0, float(np.abs(rows).max(initial=0.0))))
    alone = np.asarray(prepare_rows(rows), np.float64)
    beside = np.asarray(prepare_rows(np.concatenate([rows, outlier])), np.float64)[: len(rows)]
    if alone.shape != beside.shape:
        return float("inf")
    return float(np.abs(beside - alone).max(initial=0.0) / max(float(np.abs(alone).max(initial=0.0)), 1e-30))
