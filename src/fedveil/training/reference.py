"""The oracle: one client, one step, one example at a time, written to be read.

Every engine is tested against this one. It follows the text of `training.contract` line by line and makes no
attempt to be fast. Figures of a client that used no example, or that ended in NaN or infinity, are zeros; clip "none"
has no bound, so that every example counts as below it; with one S per layer the recorded noise scale is
the mean over layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from fedveil.errors import UserError
from fedveil.models.layout import Layout, layout_of, unflatten
from fedveil.models.state import REMEMBERS, alike, order, unchanged
from fedveil.protect.bounded import factor, norm_of
from fedveil.training import augment, dropout, losses, optimisers
from fedveil.training.contract import ClientWork, Examples, LocalPlan, LocalResult


def train(
    module: nn.Module,
    start: np.ndarray,
    x: Examples,
    y: Examples,
    work: Sequence[ClientWork],
    plan: LocalPlan,
    *,
    threads: int = 1,
    dtype: torch.dtype = torch.float32,
) -> LocalResult:
    """Local training of every client in `work`; see `LocalPlan` and `LocalResult`. `threads` is ignored."""
    layout = layout_of(module)
    with unchanged(module):
        clients = [_client(module, layout, start, x, y, one, plan, dtype) for one in work]
    figures = {name: np.array([c[name] for c in clients]) for name in _nothing(layout, plan)}
    return LocalResult(**figures)


def _client(
    module: nn.Module,
    layout: Layout,
    start: np.ndarray,
    x: Examples,
    y: Examples,
    work: ClientWork,
    plan: LocalPlan,
    dtype: torch.dtype,
) -> _Told:
    first = torch.as_tensor(np.asarray(start), dtype=dtype)
    weights, state = first.clone(), optimisers.begin(plan.optimiser, first)
    parts = (slice(0, layout.size),) if plan.flat else layout.layer_slices()  # what one norm is taken of
    figures = _Figures()
    for step in range(plan.steps):
        rows = [int(r) for r in work.rows[step] if r >= 0]
        gradients, sizes = _gradients(module, layout, weights, x, y, rows, step, work, plan, parts, figures)
        bounds = _bounds(plan, step, sizes, len(parts))
        total, largest = _clipped_sum(first, gradients, sizes, bounds, plan, parts, figures)
        if plan.measured_means:
            figures.of_mean.append(max(float(torch.linalg.vector_norm(total[part])) for part in parts) / plan.expected_batch)
        if plan.by_mean:
            largest = figures.of_mean[-1]
        if plan.noised:
            followed = np.array([largest] if plan.by_largest else bounds)
            times = plan.noised[step].times(followed if plan.follows else None, len(rows))
            spread = np.repeat(times, [part.stop - part.start for part in parts]) if times.size > 1 else float(times.mean())
            total = torch.as_tensor(plan.noised[step].add(total.numpy(), work.noise_key, step, spread))
            figures.scales.append(plan.noised[step].deviation(layout.size) * float(times.mean()))
        if plan.only_sum:
            first, weights = torch.zeros_like(first), -total.to(dtype)
            break
        gradient = _direction(total.to(dtype) / plan.expected_batch, weights, first, work, plan)
        weights, state = optimisers.step(
            plan.optimiser, state, weights, gradient, plan.learning_rate, step + 1, plan.momentum
        )
    return _told(figures, weights, first, _nothing(layout, plan))


_Told: TypeAlias = "dict[str, np.ndarray | float]"  # one row of a LocalResult, by its names


@dataclass
class _Figures:
    """What a client has seen so far, of examples that count."""

    losses: list[float] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    of_mean: list[float] = field(default_factory=list)
    below: float = 0.0
    skipped: int = 0
    drawn: int = 0


def _gradients(
    module: nn.Module, layout: Layout, weights: torch.Tensor, x: Examples, y: Examples, rows: list[int], step: int,
    work: ClientWork, plan: LocalPlan, parts: Sequence[slice], figures: _Figures,
) -> tuple[list[torch.Tensor], list[list[float]]]:  # fmt: skip
    """Each example's gradient (mapped, for AdaClip) and the norms of its parts; broken ones are left out where clipped."""

    def alone(place: int) -> tuple[float, torch.Tensor]:
        with dropout.keyed(module, work.noise_key, step, place):
            copies = augment.shown(plan.augment, torch.as_tensor(np.asarray(x[rows[place]])), work.noise_key, step, place)
            found = [example_gradient(module, layout, weights, one, y[rows[place]], plan.loss) for one in copies]
            return sum(value for value, _ in found) / len(found), torch.stack([each for _, each in found]).mean(0)

    gradients, sizes = [], []
    figures.drawn += len(rows)
    places = order(len(rows))
    made = {place: alone(place) for place in places}
    if plan.clips and len(rows) > 1 and not alike(made[places[0]][1], alone(places[0])[1]):
        raise UserError(f"This model or its loss: {REMEMBERS}.")
    for loss, gradient in (made[place] for place in range(len(rows))):
        if work.shift is not None:
            gradient = (gradient - _vector(work.shift, weights.dtype)) / _vector(work.scale, weights.dtype)
        size = [_norm(gradient[part], plan.clip_norm) for part in parts]
        if plan.clips and not all(map(math.isfinite, [loss, *size])):
            figures.skipped += 1
            continue
        figures.losses.append(loss)
        gradients.append(gradient)
        sizes.append(size)
    figures.norms += sizes
    return gradients, sizes


def _clipped_sum(
    first: torch.Tensor, gradients: list[torch.Tensor], sizes: list[list[float]], bounds: list[float], plan: LocalPlan,
    parts: Sequence[slice], figures: _Figures,
) -> tuple[torch.Tensor, float]:  # fmt: skip
    """The sum in float64, and the largest clipped norm."""
    total = torch.zeros_like(first, dtype=torch.float64)
    largest = 0.0
    for gradient, size in zip(gradients, sizes, strict=True):
        clipped = gradient.double()
        for part, norm, bound in zip(parts, size, bounds, strict=True):
            if plan.clips:
                clipped[part] *= factor(norm, bound)
            largest = max(largest, min(norm, bound))
            figures.below += (norm <= bound) / len(parts)
        total += clipped
    return total, largest


def _direction(
    gradient: torch.Tensor, weights: torch.Tensor, first: torch.Tensor, work: ClientWork, plan: LocalPlan
) -> torch.Tensor:
    """The noised mean, mapped back, with the terms that pull it towards other models."""
    dtype = weights.dtype
    if work.shift is not None:
        gradient = _vector(work.scale, dtype) * gradient + _vector(work.shift, dtype)
    gradient = gradient + plan.proximal * (weights - first)
    if work.anchor is not None:
        gradient += plan.penalty * (weights - _vector(work.anchor, dtype))
    if work.control is not None:
        gradient += _vector(work.control, dtype)
    return gradient


def _told(
    figures: _Figures, weights: torch.Tensor, first: torch.Tensor, nothing: _Told
) -> _Told:
    """The client's result; zeros where it met NaN or infinity."""
    losses, norms, drawn, used = figures.losses, figures.norms, figures.drawn, len(figures.losses)
    healthy = (
        all(map(math.isfinite, losses)) and bool(np.isfinite(norms).all()) and bool(weights.isfinite().all())
    )
    if not healthy:
        return {**nothing, "finite": False, "examples": drawn}
    return {
        **nothing,
        "delta": (weights - first).numpy(),
        "loss": float(np.mean(losses)) if used else 0.0,
        "norm_mean": np.mean(norms, axis=0) if used else nothing["norm_mean"],
        "norm_max": np.max(norms, axis=0) if used else nothing["norm_max"],
        "unclipped": figures.below / drawn if drawn else 0.0,
        "noise_scale": float(np.mean(figures.scales)) if figures.scales else 0.0,
        "examples": drawn,
        "below_count": figures.below,
        "skipped": figures.skipped,
        "mean_gradient_norms": np.array(figures.of_mean),
    }


def example_gradient(
    module: nn.Module, layout: Layout, weights: torch.Tensor, x: Examples, y: Examples, loss: str
) -> tuple[float, torch.Tensor]:
    """Loss and flat gradient of one example at `weights`, by plain autograd."""
    parameters = {name: p.detach().clone().requires_grad_() for name, p in unflatten(weights, layout).items()}
    image = torch.as_tensor(np.asarray(x)).to(weights.dtype)[None]
    with torch.enable_grad():
        output = functional_call(module, parameters, (image,))
        value = losses.of_one(loss)(output, torch.as_tensor(np.asarray(y))[None])
        wanted = [parameters[name] for name in layout.names]
        gradients = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
    gradient = torch.cat([g.reshape(-1) for g in gradients])
    return value.item(), gradient


def _bounds(plan: LocalPlan, step: int, sizes: list[list[float]], parts: int) -> list[float]:
    if not plan.clips:
        return [math.inf] * parts
    if plan.by_median:
        return list(np.median(sizes, axis=0)) if sizes else [0.0] * parts
    return [plan.bounds[step]] * parts


def _norm(vector: torch.Tensor, kind: str) -> float:
    return norm_of(vector.numpy(), kind)


def _vector(values: np.ndarray | torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values)).to(dtype)


def _nothing(layout: Layout, plan: LocalPlan) -> _Told:
    """The figures of a client that used no example."""
    columns = 1 if plan.flat else layout.layers
    return {
        "delta": np.zeros(layout.size, np.float32),
        "finite": True,
        "loss": 0.0,
        "norm_mean": np.zeros(columns),
        "norm_max": np.zeros(columns),
        "unclipped": 0.0,
        "noise_scale": 0.0,
        "examples": 0,
        "below_count": 0.0,
        "skipped": 0,
        "mean_gradient_norms": np.zeros(plan.measured_means),
    }
