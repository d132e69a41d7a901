"""Decoder reconstruction: a network trained on auxiliary data maps model outputs back to inputs.

It shows what the outputs (or embeddings) say about an input; the mean image of the auxiliary data is the control.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from fedveil.attacks import metrics
from fedveil.attacks.attribute import embeddings
from fedveil.attacks.membership import logits
from fedveil.models.layout import Layout


@dataclass(frozen=True)
class Decoded:
    """Errors per value in units of `value_range`; control: the mean of the auxiliary data."""

    mse: float
    mae: float
    ssim: float
    control_mse: float
    control_mae: float
    control_ssim: float
    value_range: tuple[float, float]
    images: np.ndarray
    truth: np.ndarray


def decode(
    module: nn.Module, layout: Layout, weights: np.ndarray, auxiliary: np.ndarray, victims: np.ndarray, *,
    source: Literal["outputs", "embeddings"] = "embeddings", pixel_range: tuple[float, float] | None = None,
    epochs: int = 40, width: int = 256, seed: int = 0,
) -> Decoded:  # fmt: skip
    """Train the decoder on `auxiliary` inputs (never on victims), apply it to `victims`.

    What it draws lies in pixel_range; without one (tables, standardised images) in the range of the auxiliary inputs."""
    low, high = (float(v) for v in pixel_range or (auxiliary.min(), auxiliary.max()))
    span = high - low or 1.0

    def features(x: np.ndarray) -> torch.Tensor:
        seen = (
            embeddings(module, layout, weights, x)
            if source == "embeddings"
            else logits(module, layout, weights, x)[0]
        )
        return torch.as_tensor(seen, dtype=torch.float32)

    inputs, targets = features(auxiliary), torch.as_tensor((auxiliary - low) / span).flatten(1).float()
    centre, spread = inputs.mean(0), inputs.std(0) + 1e-6
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(inputs.shape[1], width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, targets.shape[1]), nn.Sigmoid(),
        )  # fmt: skip
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    scaled = (inputs - centre) / spread
    for _ in range(epochs):
        for batch in torch.randperm(len(scaled), generator=rng).split(64):
            optimiser.zero_grad()
            (net(scaled[batch]) - targets[batch]).square().mean().backward()
            optimiser.step()
    with torch.no_grad():
        made = net((features(victims) - centre) / spread).numpy().reshape(victims.shape)
    truth = (victims - low) / span
    control = np.broadcast_to(targets.mean(0).numpy().reshape(victims.shape[1:]), truth.shape)
    ours, blind = metrics.score(truth, made), metrics.score(truth, control)
    return Decoded(
        mse=float(ours.mse.mean()),
        mae=float(np.abs(truth - made).mean()),
        ssim=float(ours.ssim.mean()),
        control_mse=float(blind.mse.mean()),
        control_mae=float(np.abs(truth - control).mean()),
        control_ssim=float(blind.ssim.mean()),
        value_range=(low, high),
        images=made,
        truth=np.asarray(truth),
    )
