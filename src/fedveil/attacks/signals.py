"""Membership attacks that need no shadows, or look at other signals than one confidence; scores as in `attacks.membership`.

quantile     how unusual is the target's confidence for a stranger like this one? The stranger's mean and spread are regressed
             from the inputs of non-members (Bertran et al. 2023); no shadow model
multi        logistic regression over several signals, trained on the shadows: each plays the target against the others
trajectory   confidence at several checkpoints of the target, each against what strangers get there
label-only   hard labels of noisy copies: members keep their label longer; against the same count of the OUT shadows
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy
from scipy.special import log_softmax, ndtri

NOISES = (0.0, 0.1, 0.2, 0.4, 0.8)  # deviations, in units of the inputs' own
COPIES = 3


def _features(x: np.ndarray, y: np.ndarray, basis: tuple[np.ndarray, np.ndarray], classes: int) -> np.ndarray:
    mean, directions = basis
    flat = np.asarray(x, np.float64).reshape(len(x), -1)
    parts = (flat - mean) @ directions.T
    return np.hstack([np.ones((len(x), 1)), parts, np.square(parts), np.eye(classes)[np.asarray(y, int)]])


def quantile(
    target: np.ndarray, x: np.ndarray, y: np.ndarray, outside: np.ndarray, outside_x: np.ndarray, outside_y: np.ndarray,
    *, components: int = 16, ridge: float = 10.0,
) -> np.ndarray:  # fmt: skip
    """(confidence - what a stranger like x has) / its spread; both regressed on non-members by ridge, the second on the
    residuals of the other half of them."""
    classes = int(max(np.max(y), np.max(outside_y))) + 1
    flat = np.asarray(outside_x, np.float64).reshape(len(outside_x), -1)
    mean = flat.mean(0)
    _, scale, directions = np.linalg.svd(flat - mean, full_matrices=False)
    kept = min(components, max(1, len(flat) // 20), len(directions))
    norm = scale[:kept] / np.sqrt(len(flat)) + 1e-12
    basis = mean, directions[:kept] / norm[:, None]

    def fit(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        penalty = ridge * np.eye(rows.shape[1])
        penalty[0, 0] = 1e-9
        return np.linalg.solve(rows.T @ rows + penalty, rows.T @ values)

    design = _features(outside_x, outside_y, basis, classes)
    first, second = design[::2], design[1::2]
    typical = fit(first, outside[::2])
    rest = np.abs(outside[1::2] - second @ typical)
    spread = fit(second, np.log(rest + 1e-3))
    ours = _features(x, y, basis, classes)
    limits = np.quantile(np.log(rest + 1e-3), [0.05, 0.95])
    return (target - ours @ typical) / np.exp(np.clip(ours @ spread, *limits))


def signals(outputs: np.ndarray, y: np.ndarray, confidence: np.ndarray) -> np.ndarray:
    """Signals [..., n, 4] of outputs [..., n, classes]: confidence, loss, entropy, whether it is right."""
    logs = log_softmax(np.asarray(outputs, np.float64), -1)
    own = np.take_along_axis(logs, np.broadcast_to(np.asarray(y)[..., None], (*logs.shape[:-1], 1)), -1)[
        ..., 0
    ]
    entropy = -(np.exp(logs) * logs).sum(-1)
    right = (logs.argmax(-1) == y).astype(float)
    return np.stack([confidence, -own, entropy, right], -1)


def multi(
    ours: np.ndarray, theirs: np.ndarray, inside: np.ndarray, *, most: int = 20_000, seed: int = 0
) -> np.ndarray:
    """ours [n, k], theirs [S, n, k] signals. Every signal is compared with the example's OUT mean and its IN mean among the other
    shadows; the weights are learnt on shadows in the target's place."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def against(one: np.ndarray, shadows: np.ndarray, mask: np.ndarray) -> np.ndarray:
        count_in, count_out = (np.maximum(m.sum(0), 1)[:, None] for m in (mask, ~mask))
        mean_in = np.where(mask[..., None], shadows, 0).sum(0) / count_in
        mean_out = np.where(~mask[..., None], shadows, 0).sum(0) / count_out
        return np.hstack(
            [one, one - mean_out, one - mean_in, np.square(one - mean_out) - np.square(one - mean_in)]
        )

    rows, labels = [], []
    for s in range(len(theirs)):
        others = np.arange(len(theirs)) != s
        rows.append(against(theirs[s], theirs[others], inside[others]))
        labels.append(inside[s])
    data, label = np.concatenate(rows), np.concatenate(labels)
    chosen = np.random.default_rng(seed).permutation(len(data))[:most]
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300, C=0.1)).fit(
        data[chosen], label[chosen]
    )
    return model.decision_function(against(ours, theirs, inside))


def trajectory(path: np.ndarray, outside: np.ndarray, shadows: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """path [T, n] and outside [T, m]: the target's confidences at T checkpoints on the pool and on strangers. Each is measured
    in the strangers' mean and deviation there, and averaged; an example's difficulty (OUT shadows) is taken off."""
    spread = np.maximum(outside.std(1, keepdims=True), 1e-12)
    course = ((path - outside.mean(1, keepdims=True)) / spread).mean(0)
    count = np.maximum((~inside).sum(0), 1)
    difficulty = np.where(~inside, shadows, 0).sum(0) / count
    centred = (difficulty - difficulty.mean()) / max(float(difficulty.std()), 1e-12)
    slope = float(np.cov(course, centred)[0, 1] / max(float(centred.var()), 1e-12))
    return course - slope * centred


def label_only(
    labels_of: Callable[[int, np.ndarray], np.ndarray],
    x: np.ndarray,
    y: np.ndarray,
    models: int,
    inside: np.ndarray,
    seed: int = 0,
) -> np.ndarray:
    """labels_of(model, inputs) gives hard labels; model 0 is the target, 1 … models the shadows. How many noisy copies keep the
    true label, minus what OUT shadows keep."""
    rng = np.random.default_rng(seed)
    scale = float(np.std(x))
    kept = np.zeros((models + 1, len(x)))
    for noise in NOISES:
        for _ in range(COPIES if noise else 1):
            moved = (x + noise * scale * rng.normal(size=x.shape)).astype(x.dtype)
            for model in range(models + 1):
                kept[model] += labels_of(model, moved) == y
    count = np.maximum((~inside).sum(0), 1)
    return kept[0] - np.where(~inside, kept[1:], 0).sum(0) / count


def auc_interval(scores: np.ndarray, member: np.ndarray, level: float) -> tuple[float, float]:
    """Interval of the AUC by its asymptotic variance (DeLong); with level 1 - 0.05 / M, M of them hold together at 95%."""
    ours, others = np.asarray(scores)[member], np.asarray(scores)[~member]
    both = scipy.stats.rankdata(np.concatenate([ours, others]))
    m, n = len(ours), len(others)
    beaten = (both[:m] - scipy.stats.rankdata(ours)) / n
    beating = 1 - (both[m:] - scipy.stats.rankdata(others)) / m
    centre = float(beaten.mean())
    spread = np.sqrt(beaten.var(ddof=1) / m + beating.var(ddof=1) / n)
    reach = float(-ndtri((1 - level) / 2) * spread)
    return max(0.0, centre - reach), min(1.0, centre + reach)
