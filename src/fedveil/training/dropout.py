"""Dropout whose masks come from keys: the same client, step and example give the same mask, in every engine.

A mask depends on the client's key, the step, the example's place in the batch and the layer, never on a hidden stream: runs
repeat, whatever the chunk, the number of workers or the engine. An example's mask does not look at other examples, so
per-example clipping holds as without dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.keys import generator


def layers(module: nn.Module) -> dict[str, nn.Module]:
    """The active dropout layers by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) in (nn.Dropout, nn.Dropout2d) and layer.training and layer.p > 0  # type: ignore[operator]
    }


def mask(key: bytes, step: int, place: int, layer: str, rate: float, shape: Sequence[int]) -> np.ndarray:
    """Zeros with probability `rate`, else 1 / (1 - rate); float32 of `shape` (one example's)."""
    kept = generator(key, f"dropout {layer}", step, place).random(tuple(shape), np.float32) >= rate
    return kept.astype(np.float32) / np.float32(1 - rate) if rate < 1 else np.zeros(tuple(shape), np.float32)


def shape_of(layer: nn.Module, x: Tensor) -> tuple[int, ...]:
    """Of one example's mask, for a batch x."""
    whole = type(layer) is nn.Dropout2d and x.dim() == 4  # channels fall out as a whole
    return (x.shape[1], 1, 1) if whole else tuple(x.shape[1:])


def drop(x: Tensor, layer: nn.Module, name: str, key: bytes, step: int, first: int) -> Tensor:
    """x [B, ...] with the masks of the examples at places first, first + 1, …"""
    shape = shape_of(layer, x)
    rate = float(layer.p)  # type: ignore[arg-type]
    masks = np.stack([mask(key, step, first + at, name, rate, shape) for at in range(len(x))])
    return x * torch.as_tensor(masks).to(x)


@contextmanager
def keyed(module: nn.Module, key: bytes, step: int, first: int) -> Iterator[None]:
    """The module's dropout layers draw from this key meanwhile."""
    found = layers(module)
    try:
        for name, layer in found.items():
            layer.forward = partial(drop, layer=layer, name=name, key=key, step=step, first=first)  # type: ignore[method-assign]
        yield
    finally:
        for layer in found.values():
            del layer.forward
