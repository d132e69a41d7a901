"""How good a model is, on public data; and P1's bound on the distortion that keeps a label."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fedveil.models.layout import load


def outputs(module: nn.Module, weights: np.ndarray, x: np.ndarray, batch: int = 64) -> torch.Tensor:
    """Raw model outputs for all rows of x."""
    load(module, weights)
    module.eval()
    # Channels last and batches that stay in the cache: convolutions take less than half the time.
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        with torch.no_grad():
            parts = [
                module(_images_last(torch.as_tensor(x[at : at + batch]))) for at in range(0, len(x), batch)
            ]
    finally:
        module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return torch.cat(parts)


def _images_last(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous(memory_format=torch.channels_last) if rows.ndim == 4 else rows


def evaluate(
    module: nn.Module, weights: np.ndarray, x: np.ndarray, y: np.ndarray, loss: str
) -> dict[str, float | None]:
    """Accuracy and loss, or RMSE and MAE for regression (accuracy is then None). Non-finite becomes None."""
    out = outputs(module, weights, x).double()
    truth = torch.as_tensor(y)
    if loss == "squared":
        error = out.reshape(len(y)) - truth.double()
        found = {"rmse": error.square().mean().sqrt().item(), "mae": error.abs().mean().item()}
        return {
            "accuracy": None,
            "loss": _finite(found["rmse"] ** 2 / 2),
            **{k: _finite(v) for k, v in found.items()},
        }
    right = (out.argmax(1) == truth).double().mean().item()
    return {"accuracy": right, "loss": _finite(nn.functional.cross_entropy(out, truth).item())}


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def distortion_bound(module: nn.Module, weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> float | None:
    """Median over rightly classified rows of margin / (sqrt(2) * Lipschitz bound): no input change of smaller
    L2 norm can change the label (P1, Proposition 2). None for models whose layers have no known bound."""
    lipschitz = _lipschitz(load(module, weights))
    if lipschitz is None or not np.isfinite(lipschitz) or lipschitz == 0:
        return None
    out = outputs(module, weights, x).double()
    own = out.gather(1, torch.as_tensor(y)[:, None])[:, 0]
    others = out.scatter(1, torch.as_tensor(y)[:, None], -torch.inf).max(1).values
    margins = (own - others)[own > others]
    return None if len(margins) == 0 else _finite((margins.median() / (2**0.5 * lipschitz)).item())


def _lipschitz(module: nn.Module) -> float | None:
    """Product of layer bounds; a convolution is bounded by sqrt(kernel positions) times its matrix norm."""
    if not isinstance(module, nn.Sequential):
        return None
    product = 1.0
    for layer in module:
        if isinstance(layer, nn.Linear):
            product *= float(torch.linalg.matrix_norm(layer.weight.detach(), 2))
        elif isinstance(layer, nn.Conv2d):
            kernel = layer.weight.detach()
            positions = kernel.shape[2] * kernel.shape[3]
            product *= positions**0.5 * float(torch.linalg.matrix_norm(kernel.flatten(1), 2))
        elif isinstance(layer, nn.Sigmoid):
            product *= 0.25
        elif not isinstance(layer, (nn.ReLU, nn.Tanh, nn.Flatten, nn.MaxPool2d, nn.AvgPool2d, nn.Identity)):
            return None
    return product
