"""Closed forms: what the gradients of linear heads and of low-rank adapters say outright."""

from __future__ import annotations

import numpy as np


def single(weight_gradient: np.ndarray, bias_gradient: np.ndarray) -> np.ndarray:
    """The one input of a dense layer [out, d]: any row of the weight gradient over its bias gradient; the row with the
    largest bias gradient rounds least."""
    row = int(np.argmax(np.abs(bias_gradient)))
    return np.asarray(weight_gradient, np.float64)[row] / float(bias_gradient[row])


def class_sums(weight_gradient: np.ndarray, examples: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Sum of the inputs of every class, and which classes occur, from a softmax head that starts at zero.

    There every class has probability 1/K, so the gradient of class c (summed over the batch) is T/K minus the sum of the
    inputs of class c, T being the sum of all. A class that does not occur has exactly T/K. Inputs are non-negative with
    a common direction in most data, so absent classes are those whose rows agree; None if no two rows agree (then T is
    not determined). With at most one example of a class the sum is the example."""
    rows = np.asarray(weight_gradient, np.float64)
    classes = len(rows)
    scale = np.abs(rows).max() or 1.0
    same = np.abs(rows[:, None] - rows[None]).max(-1) < 1e-5 * scale
    group = same.sum(1)
    absent = same[int(np.argmax(group))] if group.max() > 1 else np.zeros(classes, bool)
    if not absent.any() or classes - int(absent.sum()) > examples:
        return None
    share = rows[absent].mean(0)
    return share - rows, ~absent


def adapter_single(
    grad_a: np.ndarray, grad_b: np.ndarray, a: np.ndarray, bias_gradient: np.ndarray | None
) -> np.ndarray:
    """The one input of a layer W + B A whose adapter A [r, d], B [out, r] is trained.

    grad_A = (B^T delta) x^T gives the direction of x, grad_B = delta (A x)^T the product of delta and the length of A x; a
    trained bias gives delta and with it the scale. Without a bias the direction is returned with length 1."""
    _, _, right = np.linalg.svd(np.asarray(grad_a, np.float64), full_matrices=False)
    direction = right[0]
    if bias_gradient is None:
        return direction
    image = np.asarray(a, np.float64) @ direction
    delta = np.asarray(bias_gradient, np.float64)
    scale = float(delta @ np.asarray(grad_b, np.float64) @ image / ((delta @ delta) * (image @ image)))
    return direction * scale


def in_span(
    candidates: np.ndarray, gradient: np.ndarray, rank: int | None = None, noise: float = 1e-5
) -> np.ndarray:
    """Relative distance of candidate inputs [n, d] to the row space of a gradient [out, d]: 0 for those in the batch.

    Holds for dense layers and for adapters (grad_A) while the batch has fewer inputs than the gradient has rows."""
    _, values, right = np.linalg.svd(np.asarray(gradient, np.float64), full_matrices=False)
    kept = int((values > noise * max(values[0], 1e-300)).sum()) if rank is None else rank
    basis = right[:kept]
    rows = np.asarray(candidates, np.float64)
    rest = rows - (rows @ basis.T) @ basis
    return np.linalg.norm(rest, axis=-1) / np.maximum(np.linalg.norm(rows, axis=-1), 1e-300)
