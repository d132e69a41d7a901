"""Models that a malicious server sends so that updates give their inputs away.

    imprint   a dense layer whose units differ only in their threshold: neighbouring gradients differ by the examples whose
              brightness lies between two thresholds (Fowl et al. 2022). Bins of one example give it back exactly.
    trap      rows that few inputs switch on (Boenisch et al. 2023): a unit that one example alone switches on gives it back
    fish      a head that lets only one class, and of that class only inputs below a cut, reach the layers before it
              (Wen et al. 2022)
    dead      a layer that no input switches on: sent to all but one client, a sum holds that client's update alone
              (Pasquini et al. 2022)

All take a flat weight vector of a net `Flatten, Linear, ReLU, …, Linear` and return another one of the same shape; an honest
architecture is enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedveil.errors import UserError
from fedveil.models.layout import Layout


@dataclass(frozen=True)
class Dense:
    """Where a dense layer lies in the flat vector."""

    weight: slice
    bias: slice
    units: int
    width: int


def dense_layers(layout: Layout) -> list[Dense]:
    """All dense layers with a bias, first to last."""
    found = []
    places = dict(zip(layout.names, zip(layout.offsets, layout.shapes, strict=True), strict=True))
    for name, (at, shape) in places.items():
        bias = places.get(name.removesuffix("weight") + "bias")
        if len(shape) == 2 and name.endswith("weight") and bias is not None:
            units, width = shape
            found.append(Dense(slice(at, at + units * width), slice(bias[0], bias[0] + units), units, width))
    return found


def _ends(layout: Layout) -> tuple[Dense, Dense]:
    layers = dense_layers(layout)
    if len(layers) < 2 or layers[0].weight.start != 0:
        raise UserError(
            "this attack needs a model that begins with a dense layer and has another one (papers-mlp)."
        )
    return layers[0], layers[1]


def imprint(
    weights: np.ndarray, layout: Layout, public: np.ndarray, *, scale: float = 1e-3, seed: int = 0
) -> np.ndarray:
    """First layer: one measurement (brightness with a little random texture), as many thresholds as units, at the quantiles
    of public rows. Next layer: the same small weight for every unit, so that all units pass the same signal back."""
    first, second = _ends(layout)
    rows = np.asarray(public, np.float64).reshape(len(public), -1)
    rng = np.random.default_rng(seed)
    direction = 1 + 0.5 * rng.normal(size=first.width)
    direction /= np.std(rows @ direction) or 1.0
    measured = rows @ direction
    cuts = np.quantile(measured, (np.arange(first.units) + 0.5) / first.units)
    out = np.array(weights, np.float32)
    out[first.weight] = (scale * np.tile(direction, (first.units, 1))).reshape(-1)
    out[first.bias] = -scale * cuts
    pattern = rng.normal(size=second.units)
    out[second.weight] = np.repeat(pattern / (scale * first.units), second.width)
    out[second.bias] = 0
    return out


def read_imprint(update: np.ndarray, layout: Layout, *, smallest: float = 1e-6) -> np.ndarray:
    """Candidates [n, d]: quotient of the differences between neighbouring units. Sign and step size cancel."""
    first, _ = _ends(layout)
    weight = np.asarray(update[first.weight], np.float64).reshape(first.units, first.width)
    bias = np.asarray(update[first.bias], np.float64)
    rows = np.vstack([weight[:-1] - weight[1:], weight[-1:]])
    steps = np.append(bias[:-1] - bias[1:], bias[-1])
    kept = np.abs(steps) > smallest * np.abs(bias).max(initial=0.0)
    return rows[kept] / steps[kept][:, None]


def trap(
    weights: np.ndarray, layout: Layout, public: np.ndarray, *, active: float, seed: int = 0
) -> np.ndarray:
    """Random rows whose negative half is enlarged until only a share `active` of public rows switches a unit on."""
    first, _ = _ends(layout)
    rows = np.asarray(public, np.float64).reshape(len(public), -1)
    rng = np.random.default_rng(seed)
    draw = np.abs(rng.normal(size=(first.units, first.width))) / np.sqrt(first.width)
    negative = rng.random((first.units, first.width)) < 0.5
    plus, minus = rows @ np.where(negative, 0, draw).T, rows @ np.where(negative, draw, 0).T
    factor = np.quantile(plus / np.maximum(minus, 1e-12), 1 - active, axis=0)
    out = np.array(weights, np.float32)
    out[first.weight] = np.where(negative, -factor[:, None] * draw, draw).reshape(-1)
    out[first.bias] = 0
    return out


def read_units(update: np.ndarray, layout: Layout, *, smallest: float = 1e-6) -> np.ndarray:
    """Candidates [n, d]: each unit's weight update over its bias update: the input, where one alone switched it on."""
    first, _ = _ends(layout)
    weight = np.asarray(update[first.weight], np.float64).reshape(first.units, first.width)
    bias = np.asarray(update[first.bias], np.float64)
    kept = np.abs(bias) > smallest * np.abs(bias).max(initial=0.0)
    return weight[kept] / bias[kept][:, None]


def fish(
    weights: np.ndarray, layout: Layout, target: int, *, cut: float | None = None, sharp: float = 1e3
) -> np.ndarray:
    """A head through which only examples of class `target` reach the layers before it.

    Other rows are zero, so only the target's error passes back, and its bias is so low that other classes have none. cut:
    of the target's own examples, only those whose logit (of the present weights) lies below the cut have an error."""
    last = dense_layers(layout)[-1]
    out = np.array(weights, np.float32)
    head = out[last.weight].reshape(last.units, last.width)
    own, offset = head[target].copy(), float(out[last.bias][target])
    head[:] = 0
    out[last.bias] = 0
    if cut is None:
        head[target], out[last.bias.start + target] = own, -100.0
    else:
        # Far above the cut the target is certain, far below it is impossible. Other classes above the cut do pass, so a
        # cut is for batches in which the class is known to be there.
        head[target], out[last.bias.start + target] = sharp * own, sharp * (offset - cut)
    return out


def dead(weights: np.ndarray, layout: Layout) -> np.ndarray:
    """No unit of the first layer is ever on: the update of all layers but the last bias is zero."""
    first, _ = _ends(layout)
    out = np.array(weights, np.float32)
    out[first.bias] = -1e6
    return out
