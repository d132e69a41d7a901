"""Exact inversion of a batch from the gradient of one dense layer followed by ReLU.

The layer's weight gradient is D X^T with one column of D per example, D sparse because ReLU switches units off. The
gradient has rank b, so any factorisation L R of it differs from (D, X^T) by an invertible b x b matrix. A column of that
matrix is found where b - 1 rows of L that are zero in the same column of D are drawn together: then their null vector maps L
to a column of D, recognisable by its many zeros (Dimitrov et al. 2024). The bias gradient fixes the scales. Nothing is
optimised, no label and no prior is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ZERO = 1e-3  # a unit counts as switched off below this fraction of the largest entry


@dataclass(frozen=True)
class Recovered:
    """inputs [b, d] in no order; residual: how well they explain the gradient; draws: rows sampled."""

    inputs: np.ndarray
    residual: float
    draws: int
    complete: bool  # as many columns found as the gradient has rank


def rank_of(gradient: np.ndarray, noise: float = 1e-5) -> int:
    """Number of singular values that stand out of `noise` times the largest."""
    values = np.linalg.svd(gradient, compute_uv=False)
    return int((values > noise * values[0]).sum()) if len(values) and values[0] > 0 else 0


def invert(
    weight_gradient: np.ndarray, bias_gradient: np.ndarray, *, layer: tuple[np.ndarray, np.ndarray] | None = None,
    batch: int | None = None, draws: int = 60_000, seed: int = 0,
) -> Recovered:  # fmt: skip
    """The inputs behind a dense layer's gradient: weight [units, d], bias [units], of the batch's sum or mean.

    layer: the layer's own weights and biases, which whoever sent the model knows: units that the found inputs switch off
    must be those with a zero in D, which sorts out wrong columns. batch: known batch size (else the gradient's rank).
    The scale of the inputs does not depend on sum or mean."""
    gradient = np.asarray(weight_gradient, np.float64)
    count = rank_of(gradient) if batch is None else batch
    if count == 0:
        return Recovered(np.zeros((0, gradient.shape[1])), 1.0, 0, False)
    left, values, right = np.linalg.svd(gradient, full_matrices=False)
    sides = gradient.shape[0] ** 0.5 + gradient.shape[1] ** 0.5
    floor = max(float(values[count]) / sides if count < len(values) else 0.0, 1e-9 * float(values[0]))
    left, right = left[:, :count] * values[:count], right[:count]
    parts = left, right, np.asarray(bias_gradient, np.float64)
    found: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    used = 0
    for attempt in range(4):
        more, drawn = _sparse_columns(left, floor, count, draws, seed + attempt)
        found, used = found + more, used + drawn
        columns = _independent(found, count)
        if len(columns) < count:
            continue
        if layer is None:
            break
        columns, agreed = _consistent(columns, found, parts, layer, floor)
        if agreed > 0.995:
            break
    if len(columns) < count:
        return Recovered(np.zeros((0, gradient.shape[1])), 1.0, used, False)
    inputs, outer = _solve(columns, parts)
    rest = np.linalg.norm(outer @ inputs - gradient) / np.linalg.norm(gradient)
    return Recovered(inputs, float(rest), used, True)


Parts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""left and right factor of the gradient, bias gradient"""


def _solve(columns: list[np.ndarray], parts: Parts) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [b, d] and D [units, b] for these columns of the mixing matrix; the bias gradient gives their scales."""
    left, right, bias = parts
    mixing = np.stack(columns, 1)
    scales, *_ = np.linalg.lstsq(left @ mixing, bias, rcond=None)
    mixing = mixing * np.where(scales == 0, 1.0, scales)
    return np.linalg.solve(mixing, right), left @ mixing


def _consistent(
    columns: list[np.ndarray], candidates: list[np.ndarray], parts: Parts, layer: tuple[np.ndarray, np.ndarray], floor: float
) -> tuple[list[np.ndarray], float]:  # fmt: skip
    """Swap columns while more units are on exactly where the found inputs switch them on; the share that agrees."""
    weight, bias = (np.asarray(v, np.float64) for v in layer)
    live = np.linalg.norm(parts[0], axis=1) > 1e3 * floor

    def agreement(chosen: list[np.ndarray]) -> float:
        if np.linalg.svd(np.stack(chosen), compute_uv=False)[-1] < 1e-4:
            return 0.0
        inputs, outer = _solve(chosen, parts)
        on = weight @ inputs.T + bias[:, None] > 0
        seen = np.abs(outer) > 1e-4 * np.abs(outer).max(0)
        return float((on == seen)[live].mean())

    best = agreement(columns)
    improved = True
    while improved and best < 1:
        improved = False
        for place in range(len(columns)):
            for q in candidates:
                tried = [*columns[:place], q, *columns[place + 1 :]]
                score = agreement(tried)
                if score > best:
                    columns, best, improved = tried, score, True
    return columns, best


def _sparse_columns(
    left: np.ndarray, floor: float, count: int, draws: int, seed: int
) -> tuple[list[np.ndarray], int]:
    """Directions q with many zeros in left @ q, linearly independent, sparsest first. floor: rounding in one entry."""
    if count == 1:
        return [np.ones(1)], 0
    norms = np.linalg.norm(left, axis=1)
    live = left[norms > max(1e3 * floor, 1e-6 * norms.max())]
    scaled = live / np.linalg.norm(live, axis=1, keepdims=True)
    rng = np.random.default_rng(seed)
    found: list[tuple[int, np.ndarray]] = []
    used, settled = 0, 0
    while used < draws and settled < 4 and len(live) >= count:
        # count - 1 zeros come for free and ReLU switches off about half; be less choosy when that does not suffice
        needed = count + 1 + (0.1 * len(live) if used < draws / 4 else 0)
        chosen = rng.integers(0, len(live), (2000, count - 1))
        directions = np.linalg.svd(scaled[chosen], full_matrices=True)[2][:, -1]
        zeros = (np.abs(directions @ scaled.T) < ZERO).sum(1)
        used += len(chosen)
        before = _independent([q for _, q in found], count)
        for q in _distinct(directions[np.argsort(-zeros)][: int((zeros >= needed).sum())]):
            q = _polish(live, scaled, q)
            off = int((np.abs(live @ q) < 30 * floor).sum())
            if off >= needed and all(abs(q @ other) < 1 - 1e-5 for _, other in found):
                found.append((off, q))
        found = sorted(found, key=lambda one: -one[0])[: 40 * count]
        best = _independent([q for _, q in found], count)
        same = len(best) == len(before) == count and all(map(np.array_equal, best, before))
        settled = settled + 1 if same else 0
    return [q for _, q in found], used


def _distinct(directions: np.ndarray) -> np.ndarray:
    """One of each group of directions that agree to three digits, in the order given."""
    if not len(directions):
        return directions
    signs = np.sign(directions[np.arange(len(directions)), np.abs(directions).argmax(1)])
    _, first = np.unique(np.round(directions * signs[:, None], 3), axis=0, return_index=True)
    return directions[np.sort(first)[:100]]


def _independent(directions: list[np.ndarray], count: int) -> list[np.ndarray]:
    """The first `count` of them that are linearly independent."""
    basis: list[np.ndarray] = []
    kept: list[np.ndarray] = []
    for q in directions:
        rest = q - sum((b @ q) * b for b in basis) if basis else q
        if np.linalg.norm(rest) > 1e-4:
            basis.append(rest / np.linalg.norm(rest))
            kept.append(q)
        if len(kept) == count:
            break
    return kept


def _polish(live: np.ndarray, scaled: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """The null vector of all rows that the direction switches off, not only of those drawn: averages the rounding. Rows
    enter with their own size, so that small ones, which are mostly rounding, count little."""
    for bound in (ZERO, ZERO / 10):
        off = live[np.abs(scaled @ direction) < bound]
        if len(off) < live.shape[1] - 1:
            break
        direction = np.linalg.svd(off, full_matrices=True)[2][-1]
    return direction
