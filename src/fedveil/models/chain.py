"""A module as the steps of its forward pass, whatever class it is written as.

The forward pass is traced (torch.fx) into layers that take each other's outputs. If every step feeds only the next one, the
module is a chain: it then trains in the same engine, at the same speed, as the `nn.Sequential` of its layers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

_PLAIN: dict[object, Callable[[], nn.Module]] = {
    F.relu: nn.ReLU, torch.relu: nn.ReLU, "relu": nn.ReLU, torch.tanh: nn.Tanh, F.tanh: nn.Tanh, "tanh": nn.Tanh,
    torch.sigmoid: nn.Sigmoid, F.sigmoid: nn.Sigmoid, "sigmoid": nn.Sigmoid, F.silu: nn.SiLU, F.hardswish: nn.Hardswish,
    F.elu: nn.ELU, F.leaky_relu: nn.LeakyReLU, F.softplus: nn.Softplus,
}  # fmt: skip


_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")


class Add(nn.Module):
    """Two values added, as a residual connection does."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


@dataclass(frozen=True)
class Step:
    """A layer (functions have no name) and the steps whose outputs it takes; -1 is the example."""

    name: str
    layer: nn.Module
    takes: tuple[int, ...]


def is_chain(steps: list[Step]) -> bool:
    """Whether every step takes the one before it, and nothing else."""
    return all(step.takes == (at - 1,) for at, step in enumerate(steps))


def traced(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers in order with their names, or None if the module is no chain."""
    found = steps(module)
    return [(step.name, step.layer) for step in found] if found and is_chain(found) else None


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """A forward pass that sets attributes would leave the tracer's stand-ins in them."""
    kept = [(part.__dict__, dict(part.__dict__), part._buffers, dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for now, before, buffers, known in kept:
            buffers.clear()
            buffers.update(known)
            now.clear()
            now.update(before)


def steps(module: nn.Module) -> list[Step] | None:
    """The forward pass as steps, the last of which is the output; None if it does anything else than call layers."""
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules()):
        return None
    try:
        with _as_before(module):
            graph = fx.Tracer().trace(module)
    except Exception:  # whatever the author's code raises on a stand-in: it cannot be read
        return None
    out: list[Step] = []
    at: dict[fx.Node, int] = {}  # values that have a row for every example, and the step that made them
    sizes: set[fx.Node] = set()  # x.shape, x.size(0): only used to say how many rows there are
    for node in graph.nodes:
        if node.op == "placeholder":
            if at:
                return None
            at[node] = -1
            continue
        if _is_size(node, at, sizes):
            sizes.add(node)
            continue
        if node.op == "output":
            whole = isinstance(node.args[0], fx.Node) and at.get(node.args[0]) == len(out) - 1
            used = {number for step in out for number in step.takes}
            return out if out and whole and used >= set(range(len(out) - 1)) else None
        layer = _layer(module, node, sizes)
        takes = [given for given in node.args[: 2 if isinstance(layer, Add) else 1] if isinstance(given, fx.Node)]
        if layer is None or not takes or any(value not in at for value in takes):
            return None
        if _in_place(node, layer) and sum(user not in sizes for user in takes[0].users) > 1:
            return None  # others would see what it wrote
        if type(layer) is nn.Identity:
            at[node] = at[takes[0]]
            continue
        out.append(Step(str(node.target) if node.op == "call_module" else "", layer, tuple(at[value] for value in takes)))
        at[node] = len(out) - 1
    return None


def _in_place(node: fx.Node, layer: nn.Module) -> bool:
    return bool(getattr(layer, "inplace", False) or node.kwargs.get("inplace") or node.target in (operator.iadd, "add_"))


def _is_size(node: fx.Node, values: dict[fx.Node, int], sizes: set[fx.Node]) -> bool:
    """x.size(0) or x.shape[0] of a value so far."""
    if node.op == "call_method" and node.target == "size":
        return node.args[0] in values and tuple(node.args[1:]) in ((), (0,))
    if node.op == "call_function" and node.target is getattr:
        return node.args[0] in values and node.args[1] == "shape"
    if node.op == "call_function" and node.target is operator.getitem:
        return bool(node.args[0] in sizes and node.args[1] == 0)
    return False


def _layer(module: nn.Module, node: fx.Node, sizes: set[fx.Node]) -> nn.Module | None:
    if node.op == "call_module":
        return module.get_submodule(str(node.target)) if len(node.args) == 1 and not node.kwargs else None
    if node.target in _SUMS:
        return Add() if len(node.args) == 2 and all(isinstance(a, fx.Node) for a in node.args) and not node.kwargs else None
    if node.target in _PLAIN and len(node.args) == 1 and not (set(node.kwargs) - {"inplace"}):
        return _PLAIN[node.target]()
    rest: tuple[object, ...] = tuple(node.args[1:])
    more: dict[str, Any] = dict(node.kwargs)
    if node.target in (torch.flatten, "flatten"):
        return nn.Flatten() if (*rest, *more.values()) == (1,) else None
    if node.target in ("view", "reshape"):
        rest = tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest
        return nn.Flatten() if len(rest) == 2 and rest[0] in sizes and rest[1] == -1 else None
    if node.target in (F.max_pool2d, torch.max_pool2d):
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        given = {**dict(zip(names, rest, strict=False)), **more}
        given.pop("return_indices", None)
        return nn.MaxPool2d(**given) if not any(isinstance(v, fx.Node) for v in given.values()) else None
    if node.target is F.avg_pool2d and len(rest) <= 3:
        given = {**dict(zip(("kernel_size", "stride", "padding"), rest, strict=False)), **more}
        return nn.AvgPool2d(**given) if not any(isinstance(v, fx.Node) for v in given.values()) else None
    if node.target is F.adaptive_avg_pool2d and len(rest) == 1:
        return nn.AdaptiveAvgPool2d(rest[0])  # type: ignore[arg-type]
    return None
