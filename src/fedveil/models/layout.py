"""Weights as one flat vector, with a layout that says where each parameter and each layer lies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Layout:
    """Order is that of `module.named_parameters()`. A *layer* is one module that owns parameters: its
    weight and bias belong together (and are clipped together)."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layer_names: tuple[str, ...]
    layer_of: tuple[int, ...]  # parameter index -> layer index

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(s) for s in self.shapes)

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def offsets(self) -> tuple[int, ...]:
        out, at = [], 0
        for n in self.sizes:
            out.append(at)
            at += n
        return tuple(out)

    @property
    def layers(self) -> int:
        return len(self.layer_names)

    def layer_slices(self) -> tuple[slice, ...]:
        """One contiguous slice of the flat vector per layer."""
        out = []
        for layer in range(self.layers):
            members = [i for i, owner in enumerate(self.layer_of) if owner == layer]
            first, last = members[0], members[-1]
            out.append(slice(self.offsets[first], self.offsets[last] + self.sizes[last]))
        return tuple(out)


def layout_of(module: nn.Module) -> Layout:
    """Describe a module's trainable parameters; frozen ones (requires_grad False) are no part of it."""
    return layout_from({name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad})


def layout_from(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Describe named arrays in their order; what stands before the last dot names the layer."""
    layer_names: list[str] = []
    layer_of = []
    for name in shapes:
        owner = name.rpartition(".")[0]
        if owner not in layer_names:
            layer_names.append(owner)
        layer_of.append(layer_names.index(owner))
    return Layout(tuple(shapes), tuple(shapes.values()), tuple(layer_names), tuple(layer_of))


def flatten(module: nn.Module) -> np.ndarray:
    """The module's trainable parameters as one float32 vector (a copy)."""
    parts = [p.detach().reshape(-1).float() for p in module.parameters() if p.requires_grad]
    return torch.cat(parts).cpu().numpy().copy()


def unflatten(vector: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """Views into the last axis of `vector`, by parameter name; leading axes are kept."""
    out = {}
    for name, shape, at, n in zip(layout.names, layout.shapes, layout.offsets, layout.sizes, strict=True):
        out[name] = vector[..., at : at + n].reshape(*vector.shape[:-1], *shape)
    return out


def load(module: nn.Module, vector: np.ndarray) -> nn.Module:
    """Write a flat vector into the module, in place; returns it."""
    with torch.no_grad():
        for name, tensor in unflatten(torch.as_tensor(vector), layout_of(module)).items():
            module.get_parameter(name).copy_(tensor)
    return module
