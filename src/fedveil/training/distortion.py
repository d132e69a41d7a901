"""How far a model may be moved before a label changes: by its input, or by its parameters.

P1's Proposition 2 is about the parameters: noise of smaller norm keeps the label. It takes the steepest gradient of
the margin *at the given weights* for a Lipschitz constant, which a network of several layers does not have. So there
are three numbers, each the median over the rightly classified rows (the printed one: of the first few, it is slow):

    input_distortion              no change of the input of smaller L2 norm changes the label
    parameter_distortion          no change of all parameters of smaller L2 norm changes the label
    parameter_distortion_printed  the proposition read literally: margin over the steepest gradient among the rows

The first two hold for every change of that size; the third is a first-order estimate (exact for one linear layer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.models.layout import load
from fedveil.training.evaluate import outputs

NAMES = ("input_distortion", "parameter_distortion", "parameter_distortion_printed")
_FLAT = (nn.ReLU, nn.Tanh, nn.Flatten, nn.Identity)
PRINTED_ROWS = 16  # gradients of every class for every row: a few rows tell enough
MOST_NUMBERS = 20_000_000  # kept of them at once


@dataclass(frozen=True)
class _Step:
    """One layer for the bounds: its own Lipschitz constant, how much a unit change of its weights (and biases) can move
    its result for inputs [n] of given length, and nothing of that for layers without weights."""

    slope: float
    weight: float = 0.0
    bias: float = 0.0


def distortions(
    module: nn.Module, weights: np.ndarray, x: np.ndarray, y: np.ndarray
) -> dict[str, float | None]:
    """The three bounds; None where no row is right, or for models whose layers have no known constant."""
    nothing: dict[str, float | None] = dict.fromkeys(NAMES)
    out = outputs(module, weights, x).double()
    labels = torch.as_tensor(np.asarray(y)).long()
    own = out.gather(1, labels[:, None])[:, 0]
    margins = own - out.scatter(1, labels[:, None], -torch.inf).max(1).values
    right = (margins > 0) & margins.isfinite()
    if not bool(right.any()):
        return nothing
    rows, margins = torch.as_tensor(np.asarray(x, np.float32))[right], margins[right]
    walked = _walk(load(module, weights), rows)
    if walked is None:
        return nothing
    steps, lengths = walked
    slope = math.prod(step.slope for step in steps)
    # Two outputs move apart by at most sqrt(2) times the length of the outputs' change.
    by_input = margins / (math.sqrt(2) * slope) if slope > 0 else margins * torch.inf
    by_weights = _radius(steps, lengths, margins / math.sqrt(2))
    few = max(1, min(PRINTED_ROWS, MOST_NUMBERS // (out.shape[1] * len(weights))))
    printed = _printed(module, rows[:few], labels[right][:few])
    return {name: _median(v) for name, v in zip(NAMES, (by_input, by_weights, printed), strict=True)}


def _median(values: Tensor) -> float | None:
    found = float(values.median())
    return found if math.isfinite(found) else None


def _walk(module: nn.Module, rows: Tensor) -> tuple[list[_Step], list[Tensor]] | None:
    """Each layer's constants and the lengths [n] of what enters it; None for a layer that is not known here."""
    if not isinstance(module, nn.Sequential):
        return None
    steps, lengths, here = [], [], rows
    with torch.no_grad():
        for layer in module:
            lengths.append(here.flatten(1).double().norm(dim=1))
            after = layer(here)
            step = _constants(layer, after)
            if step is None:
                return None
            steps.append(step)
            here = after
    return steps, lengths


def _constants(layer: nn.Module, after: Tensor) -> _Step | None:
    if isinstance(layer, nn.Linear):
        return _Step(_norm(layer.weight), 1.0, 1.0 if layer.bias is not None else 0.0)
    if isinstance(layer, nn.Conv2d):
        # An input pixel enters at most `positions` patches: the patches are at most sqrt(positions) times as long.
        spread = math.sqrt(layer.weight.shape[2] * layer.weight.shape[3])
        cells = math.sqrt(after.shape[2] * after.shape[3])  # a bias is added in every cell
        return _Step(
            spread * _norm(layer.weight.flatten(1)), spread, cells if layer.bias is not None else 0.0
        )
    if isinstance(layer, nn.Sigmoid):
        return _Step(0.25)
    if isinstance(layer, nn.MaxPool2d | nn.AvgPool2d) and layer.kernel_size == layer.stride:
        return _Step(1.0)  # windows do not overlap
    return _Step(1.0) if isinstance(layer, _FLAT) else None


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix.detach().double(), 2))


def _moved(layers: list[tuple[float, float, np.ndarray]], radius: np.ndarray) -> np.ndarray:
    """An upper bound [n] on the change of the outputs when the parameters move by `radius` [n] in all.

    With h the input of a layer, e the bound on its change and r the radius:
    |f'(h') - f(h)| <= |W'| e + |(W' - W) h + b' - b| <= (|W| + k r) e + r sqrt((k |h|)^2 + c^2).
    layers: (|W|, k, the square root) of each.
    """
    change = np.zeros_like(radius)
    for slope, weight, own in layers:
        change = (slope + weight * radius) * change + radius * own
    return change


def _radius(steps: list[_Step], lengths: list[Tensor], allowed: Tensor) -> Tensor:
    """The largest radius (from below, to a part in 2^40) at which the outputs move by at most `allowed`."""
    layers, limit = [], allowed.numpy()  # NumPy: so many small operations take torch three times as long
    for step, length in zip(steps, lengths, strict=True):
        if step != _Step(1.0):
            layers.append((step.slope, step.weight, np.sqrt((step.weight * length.numpy()) ** 2 + step.bias**2)))
    if not any(weight for _, weight, _ in layers):
        return torch.full_like(allowed, torch.inf)
    low, high = np.zeros_like(limit), np.ones_like(limit)
    with np.errstate(over="ignore", invalid="ignore"):
        while (fits := _moved(layers, high) <= limit).any():
            high = np.where(fits, 2 * high, high)
            if high.max() > 1e30:
                return torch.full_like(allowed, torch.inf)
        for _ in range(60):
            middle = (low + high) / 2
            fits = _moved(layers, middle) <= limit
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return torch.as_tensor(low)


def _printed(module: nn.Module, rows: Tensor, labels: Tensor) -> Tensor:
    """min over j of (g_y - g_j) / L, L = the largest gradient norm of any such difference among the rows."""
    parameters = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}
    wanted = tuple(parameters.values())
    tables = []
    for row in rows:  # not by torch.func: it is hardly faster, and first loads a compiler, which takes a second
        out = functional_call(module, parameters, (row[None],))[0]
        found = [torch.autograd.grad(one, wanted, retain_graph=True, materialize_grads=True) for one in out]
        tables.append(torch.stack([torch.cat([g.flatten() for g in grads]) for grads in found]).double())
    flat = torch.stack(tables)  # [n, classes, parameters]
    each = torch.arange(len(rows))
    with torch.no_grad():
        out = module(rows).double()
    gaps = out[each, labels][:, None] - out
    steep = (flat[each, labels][:, None] - flat).norm(dim=2).max()
    gaps[each, labels] = torch.inf
    return gaps.min(1).values / steep
