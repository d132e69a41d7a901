"""How good a model is, on public data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from fedveil.models.layout import load
from fedveil.training.metrics import Metric, chosen, figures


def outputs(module: nn.Module, weights: np.ndarray, x: np.ndarray, batch: int = 64) -> torch.Tensor:
    """Raw model outputs for all rows of x."""
    load(module, weights)
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    # Channels last and batches that stay in the cache: convolutions take less than half the time. Weights of three-dimensional
    # convolutions have no such order.
    images = all(tensor.dim() != 5 for tensor in (*module.parameters(), *module.buffers()))
    if images:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        with torch.no_grad():
            parts = [
                module(_images_last(torch.as_tensor(x[at : at + batch]))) for at in range(0, len(x), batch)
            ]
    finally:
        if images:
            module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        for layer, mode in modes:  # training goes on as it was: dropout may be on, a frozen part off
            layer.training = mode
    return torch.cat(parts)


def _images_last(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous(memory_format=torch.channels_last) if rows.ndim == 4 else rows


def evaluate(
    module: nn.Module, weights: np.ndarray, x: np.ndarray, y: np.ndarray, loss: str, more: Sequence[str | Metric] = ()
) -> dict[str, float | None]:
    """Accuracy and loss, or RMSE, MAE and R² for regression (accuracy is then None), and further `metrics`. Non-finite becomes
    None."""
    out = outputs(module, weights, x).double()
    values = out.reshape(len(y)) if loss == "squared" else out
    found = figures(chosen(more, loss == "squared"), values.numpy(), np.asarray(y)) if more else {}
    return {**_usual(out, torch.as_tensor(y), loss), **found}


def _usual(out: torch.Tensor, truth: torch.Tensor, loss: str) -> dict[str, float | None]:
    if loss == "squared":
        error = out.reshape(len(truth)) - truth.double()
        spread = (truth.double() - truth.double().mean()).square().mean().item()
        found = {"rmse": error.square().mean().sqrt().item(), "mae": error.abs().mean().item()}
        found["r2"] = 1 - found["rmse"] ** 2 / spread if spread > 0 else math.nan
        return {
            "accuracy": None,
            "loss": _finite(found["rmse"] ** 2 / 2),
            **{k: _finite(v) for k, v in found.items()},
        }
    right = (out.argmax(1) == truth).double().mean().item()
    return {"accuracy": right, "loss": _finite(nn.functional.cross_entropy(out, truth).item())}


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
