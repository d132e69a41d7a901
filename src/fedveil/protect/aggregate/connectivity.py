"""Mode-connectivity aggregation: merge client models pairwise along low-loss curves found with public data.

In each level disjoint pairs of models are joined by a curve with one free bend theta; theta starts at their
average and is trained so that the expected loss on the curve, over p ~ U(0, 1), falls. The pair is replaced
by the curve's middle; an odd model is carried to the next level; the last model left is the aggregate. All
pairs of a level train together as one stacked computation.

Formal guarantee: post-processing of the models given (they must already carry their noise), provided that the
data used here is public. With private data this would be training on it, without protection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedveil import keys
from fedveil.errors import UserError
from fedveil.jsons import Document
from fedveil.models.layout import Layout, unflatten

Curve = Literal["polygon", "bezier"]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # stacked weights [M, P], x, y -> losses [M]


@dataclass(frozen=True)
class Search:
    """How bends are trained. SGD on batches of public data, p drawn per pair and step; every `check_every`
    steps the expected loss is estimated on a fixed grid of p; a pair stops when it fell by less than
    `tolerance` (relative) at `patience` checks in a row, or after `steps`. The best bend seen is kept (the
    start included).

    reach: the bend stays within reach * |w1 - w2| of the average (None: anywhere). Without a limit the
    "merge" may wander off to a model trained on the public data alone; with it, equal models merge to
    themselves.
    """

    curve: Curve = "polygon"
    steps: int = 200
    learning_rate: float = 0.05
    batch: int = 128
    check_every: int = 20
    patience: int = 2
    tolerance: float = 1e-3
    points: int = 11
    reach: float | None = 1.0
    pairs_at_once: int = 16

    def __post_init__(self) -> None:
        if self.curve not in ("polygon", "bezier"):
            raise UserError(f"connectivity.curve = {self.curve!r}: use 'polygon' or 'bezier'.")
        if self.points < 3 or self.steps < 0 or self.check_every < 1 or self.batch < 1:
            raise UserError(
                "connectivity: points >= 3, steps >= 0, check_every >= 1 and batch >= 1 are needed."
            )


@dataclass(frozen=True)
class Route:
    """One merged pair: public losses at `p` on the straight line and on the trained curve, steps taken."""

    level: int
    pair: tuple[int, int]
    p: np.ndarray
    straight: np.ndarray
    trained: np.ndarray
    steps: int


@dataclass(frozen=True)
class Merged:
    """The aggregate (float32 [P]) and every path on the way to it."""

    weights: np.ndarray
    paths: tuple[Route, ...]


def merge(
    models: np.ndarray,
    module: nn.Module,
    layout: Layout,
    x: np.ndarray,
    y: np.ndarray,
    key: bytes,
    search: Search = Search(),
    *,
    loss: Literal["cross-entropy", "squared"] = "cross-entropy",
) -> Merged:
    """Merge client models [K, P] (start + noised update) into one, with public data (x, y) at the server."""
    xs, ys = torch.as_tensor(x), torch.as_tensor(y)
    return merge_on(models, module_loss(module, layout, loss), xs, ys, key, search)


def merge_on(
    models: np.ndarray, loss: Loss, x: Tensor, y: Tensor, key: bytes, search: Search = Search()
) -> Merged:
    """`merge` for any loss of stacked weights. Pairs are neighbours in a keyed random order of the models."""
    if len(models) == 0:
        raise ValueError("no models to merge")
    if len(x) == 0:
        raise UserError("aggregate = connectivity needs public data at the server: give a public dataset.")
    left = torch.as_tensor(np.asarray(models)[keys.generator(key, "pairs").permutation(len(models))])
    paths: list[Route] = []
    level = 0
    while len(left) > 1:
        count = len(left) // 2
        merged = []
        for first in range(0, count, search.pairs_at_once):
            numbers = range(first, min(first + search.pairs_at_once, count))
            ends = left[2 * first : 2 * (numbers[-1] + 1)]
            middle, found = _bend(ends[0::2], ends[1::2], loss, x, y, key, search, level, numbers)
            merged.append(middle)
            paths.extend(found)
        left = torch.cat([*merged, left[2 * count :]])
        level += 1
    return Merged(left[0].numpy().astype(np.float32), tuple(paths))


def module_loss(module: nn.Module, layout: Layout, kind: Literal["cross-entropy", "squared"]) -> Loss:
    """Mean loss of one model per row of the stacked weights."""

    def one(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(module, unflatten(weights, layout), (x,))
        if kind == "squared":
            return nn.functional.mse_loss(out.reshape(y.shape), y)
        return nn.functional.cross_entropy(out, y)

    return vmap(one, in_dims=(0, None, None), randomness="error")


def point(curve: Curve, w1: Tensor, w2: Tensor, theta: Tensor, p: Tensor) -> Tensor:
    """The curve at p, rows stacked: two straight segments through theta, or the quadratic Bezier curve."""
    p = p.reshape(-1, 1)
    if curve == "bezier":
        return (1 - p) ** 2 * w1 + 2 * p * (1 - p) * theta + p**2 * w2
    return torch.where(p <= 0.5, 2 * (p * theta + (0.5 - p) * w1), 2 * ((p - 0.5) * w2 + (1 - p) * theta))


def _bend(
    w1: Tensor, w2: Tensor, loss: Loss, x: Tensor, y: Tensor, key: bytes, search: Search, level: int, numbers: range
) -> tuple[Tensor, list[Route]]:
    """Train the bends of some pairs together; returns their middles and path records."""
    curve, pairs = search.curve, len(w1)
    average = (w1 + w2) / 2
    distance = (w1 - w2).norm(dim=1, keepdim=True)
    radius = torch.full_like(distance, torch.inf) if search.reach is None else search.reach * distance
    radius = torch.where(distance == 0, torch.zeros_like(radius), radius)  # a curve of no length is its point
    grid = torch.linspace(0, 1, search.points, dtype=w1.dtype)

    def losses_along(theta: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack(
                [loss(point(curve, w1, w2, theta, p.expand(pairs)), x, y) for p in grid], dim=1
            )

    theta = average.clone()
    straight = best_along = losses_along(theta)
    best, best_theta = _expected(straight), theta.clone()
    last, quiet = best.clone(), torch.zeros(pairs, dtype=torch.int64)
    running = distance.reshape(-1) > 0
    taken = torch.zeros(pairs, dtype=torch.int64)
    p_draws = [keys.generator(key, "p", level, n) for n in numbers]
    rows = keys.generator(key, "rows", level)
    for step in range(1, search.steps + 1):
        if not running.any():
            break
        p = torch.tensor([draw.random() for draw in p_draws], dtype=w1.dtype)
        chosen = torch.as_tensor(rows.choice(len(x), min(search.batch, len(x)), replace=False))
        theta.requires_grad_(True)
        (gradient,) = torch.autograd.grad(
            loss(point(curve, w1, w2, theta, p), x[chosen], y[chosen]).sum(), theta
        )
        with torch.no_grad():
            theta, running = _moved(theta, gradient, average, radius, running, search.learning_rate)
            taken += running
        if step % search.check_every == 0 or step == search.steps:
            along = losses_along(theta)
            now = _expected(along)
            better = now < best
            best_along = torch.where(better.reshape(-1, 1), along, best_along)
            best_theta = torch.where(better.reshape(-1, 1), theta, best_theta)
            best = torch.minimum(best, now.nan_to_num(nan=torch.inf))
            quiet = torch.where(last - now < search.tolerance * last.abs(), quiet + 1, 0)
            last = now
            running = running & (quiet < search.patience)
    middle = point(curve, w1, w2, best_theta, torch.full((pairs,), 0.5, dtype=w1.dtype))
    middle = torch.where(distance == 0, w1, middle)  # free of rounding
    paths = [
        Route(
            level, (2 * n, 2 * n + 1), grid.numpy(), straight[i].numpy(), best_along[i].numpy(), int(taken[i])
        )
        for i, n in enumerate(numbers)
    ]
    return middle, paths


def _moved(
    theta: Tensor, gradient: Tensor, average: Tensor, radius: Tensor, running: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    """One step of the bends that still run, kept within their radius; a diverged pair stops and keeps its best bend."""
    moved = theta - rate * gradient - average
    moved *= (radius / moved.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0)
    usable = running & moved.isfinite().all(dim=1)
    return torch.where(usable.reshape(-1, 1), average + moved, theta.detach()), usable


def _expected(along: Tensor) -> Tensor:
    """Mean over p ~ U(0, 1) by the trapezoid rule on the equally spaced grid."""
    return (along[:, 1:] + along[:, :-1]).mean(dim=1) / 2


def recorded(paths: Sequence[Document]) -> tuple[Route, ...]:
    """The routes of a round as `metrics.jsonl` keeps them under "paths", e.g. for `plot_paths`."""
    return tuple(
        Route(
            int(path["level"]),
            (int(path["pair"][0]), int(path["pair"][1])),
            np.linspace(0, 1, len(path["trained"])),
            np.asarray(path["straight"], dtype=np.float64),
            np.asarray(path["trained"], dtype=np.float64),
            int(path["steps"]),
        )
        for path in paths
    )


def plot_paths(paths: Sequence[Route], file: str | Path) -> None:
    """Loss along every path, straight (dashed) and trained (solid), one panel per level."""
    from matplotlib.figure import Figure

    levels = sorted({path.level for path in paths})
    if not levels:
        raise ValueError("no paths to plot: fewer than two models were merged")
    figure = Figure(figsize=(4 * len(levels), 3.2), layout="constrained")
    for axes, level in zip(np.atleast_1d(figure.subplots(1, len(levels), sharey=True)), levels, strict=True):
        for number, path in enumerate(p for p in paths if p.level == level):
            colour = f"C{number % 10}"
            axes.plot(path.p, path.straight, "--", color=colour, linewidth=1)
            axes.plot(path.p, path.trained, "-", color=colour, linewidth=1.5)
        axes.set_title(f"level {level + 1}")
        axes.set_xlabel("p")
    figure.axes[0].set_ylabel("public loss (dashed: straight line)")
    figure.savefig(file)
