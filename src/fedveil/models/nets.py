"""Models by name. `build(name, shape, classes, seed)` gives the same weights for the same seed, always."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fedveil.errors import UserError, did_you_mean
from fedveil.keys import derive


def _papers_cnn(shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """The papers' image model: 34,720 weights on 28x28 with 10 classes."""
    channels, height, width = shape
    area = ((height - 2) // 2 - 2) // 2 * (((width - 2) // 2 - 2) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * area, outputs, bias=False),
    )  # fmt: skip


def _papers_mlp(shape: tuple[int, ...], outputs: int, hidden: Sequence[int] = (64, 32)) -> nn.Sequential:
    """The papers' attribute model: hidden layers with ReLU, with biases."""
    layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
    width = math.prod(shape)
    for size in hidden:
        layers += [nn.Linear(width, int(size)), nn.ReLU()]
        width = int(size)
    return nn.Sequential(*layers, nn.Linear(width, outputs))


_NETS: dict[str, Callable[..., nn.Module]] = {"papers-cnn": _papers_cnn, "papers-mlp": _papers_mlp}


def model_names() -> tuple[str, ...]:
    """The built-in names."""
    return tuple(_NETS)


def build(
    name: str, shape: Sequence[int], classes: int | None, seed: int | bytes = 0, **options: Any
) -> nn.Module:
    """Build a model for examples of `shape`; `classes` None means regression (one output).

    The weights depend only on the arguments; torch's global generator is left as it was.
    """
    if name not in _NETS:
        raise UserError(f"Unknown model '{name}' (known: {', '.join(_NETS)}).{did_you_mean(name, _NETS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(derive(seed, "model")[:8], "little") >> 1)
        return _NETS[name](tuple(shape), 1 if classes is None else classes, **options)
