"""Further figures of a model's quality on public rows, by name or as the user's own function.

A figure is a function of the outputs [n, classes] (or [n] for regression) and the truth [n]; it returns a number, or None where
it says nothing (one class only, say). Formal guarantee: none is needed on public rows; figures of private rows carry no noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedveil.data.functions import call, import_function, is_function
from fedveil.errors import UserError, did_you_mean

Metric = Callable[[np.ndarray, np.ndarray], float | None]


def auc(outputs: np.ndarray, truth: np.ndarray) -> float | None:
    """Area under the ROC curve, ties counted half; of several classes the mean of each against all others that occur."""
    if outputs.shape[1] == 2:
        return _area(outputs[:, 1] - outputs[:, 0], truth == 1)
    shifted = np.exp(outputs - outputs.max(1, keepdims=True))
    shares = shifted / shifted.sum(1, keepdims=True)
    found = [_area(shares[:, c], truth == c) for c in range(outputs.shape[1])]
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if known else None


def _area(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Mann and Whitney's statistic: how often a positive row is above a negative one."""
    ones, zeros = scores[positive], np.sort(scores[~positive])
    if not len(ones) or not len(zeros):
        return None
    below, up_to = np.searchsorted(zeros, ones, "left"), np.searchsorted(zeros, ones, "right")
    return float((below + up_to).mean() / (2 * len(zeros)))


def f1(outputs: np.ndarray, truth: np.ndarray) -> float | None:
    """F1 of class 1; of several classes the mean over those that occur or are guessed."""
    guess = outputs.argmax(1)
    classes = [1] if outputs.shape[1] == 2 else sorted({*map(int, truth), *map(int, guess)})
    found = []
    for c in classes:
        hits, wrong = int(((guess == c) & (truth == c)).sum()), int(((guess == c) ^ (truth == c)).sum())
        found.append(2 * hits / (2 * hits + wrong) if hits + wrong else None)
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if known else None


def balanced_accuracy(outputs: np.ndarray, truth: np.ndarray) -> float | None:
    """Mean over the classes that occur of the share of their rows that is right."""
    right = outputs.argmax(1) == truth
    found = [float(right[truth == c].mean()) for c in np.unique(truth)]
    return float(np.mean(found)) if found else None


def rmse(outputs: np.ndarray, truth: np.ndarray) -> float | None:
    """Root of the mean squared error."""
    return float(np.sqrt(np.mean((outputs - truth) ** 2)))


def mae(outputs: np.ndarray, truth: np.ndarray) -> float | None:
    """Mean absolute error."""
    return float(np.abs(outputs - truth).mean())


CLASSES: Mapping[str, Metric] = {"auc": auc, "f1": f1, "balanced_accuracy": balanced_accuracy}
VALUES: Mapping[str, Metric] = {"rmse": rmse, "mae": mae}


def check(wanted: Sequence[str | Metric], regression: bool) -> None:
    """Refuse names that nothing stands for. Imports nothing: a node reads what a server wrote."""
    known = VALUES if regression else CLASSES
    for one in wanted:
        name = one.rpartition(":")[2] if isinstance(one, str) else getattr(one, "__name__", "metric")
        if isinstance(one, str) and one not in known and not is_function(one):
            task = "regression" if regression else "classes"
            raise UserError(
                f"metrics: '{one}' is not known for {task}: use {', '.join(known)}, or package.module:function."
                f"{did_you_mean(one, known)}"
            )
        if name in ("accuracy", "loss", "r2"):
            raise UserError(f"metrics: '{name}' is measured anyway: give your function another name.")


def chosen(wanted: Sequence[str | Metric], regression: bool) -> dict[str, Metric]:
    """The functions behind names; "package.module:function" and callables are the user's own."""
    check(wanted, regression)
    known, found = VALUES if regression else CLASSES, {}
    for one in wanted:
        if not isinstance(one, str):
            found[getattr(one, "__name__", "metric")] = one
        elif one in known:
            found[one] = known[one]
        else:
            found[one.rpartition(":")[2]] = import_function(one)
    return found


def figures(wanted: Mapping[str, Metric], outputs: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
    """Each figure; what is not finite becomes None."""
    found: dict[str, float | None] = {}
    for name, metric in wanted.items():
        value = call(name, metric, outputs=outputs, truth=truth)
        if value is not None and not isinstance(value, int | float | np.number):
            raise UserError(f"metrics: '{name}' returned {type(value).__name__}; return a number or None.")
        found[name] = None if value is None or not np.isfinite(value) else float(value)
    return found
