"""A module that is a chain of layers, whatever class it is written as.

`nn.Sequential` shows its layers; for any other class the forward pass is traced (torch.fx), and if every step feeds only the
next one, the module is that chain: it then trains in the same engine, at the same speed, as the Sequential of its layers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

_PLAIN: dict[Any, Callable[[], nn.Module]] = {
    F.relu: nn.ReLU, torch.relu: nn.ReLU, "relu": nn.ReLU, torch.tanh: nn.Tanh, F.tanh: nn.Tanh, "tanh": nn.Tanh,
    torch.sigmoid: nn.Sigmoid, F.sigmoid: nn.Sigmoid, "sigmoid": nn.Sigmoid, F.silu: nn.SiLU, F.hardswish: nn.Hardswish,
    F.elu: nn.ELU, F.leaky_relu: nn.LeakyReLU, F.softplus: nn.Softplus,
}  # fmt: skip


def traced(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers in order with their names (functions have none), or None if the module is no such chain."""
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules()):
        return None
    try:
        graph = fx.Tracer().trace(module)
    except Exception:  # whatever the author's code raises on a stand-in: it is not a chain that can be read
        return None
    layers: list[tuple[str, nn.Module]] = []
    before: fx.Node | None = None
    values: set[fx.Node] = set()  # x as it was after each step: all have the same number of rows
    sizes: set[fx.Node] = set()  # x.shape, x.size(0): only used to say how many rows there are
    for node in graph.nodes:
        if node.op == "placeholder":
            if before is not None:
                return None
            before = node
            values.add(node)
            continue
        if _is_size(node, values, sizes):
            sizes.add(node)
            continue
        if node.op == "output":
            return layers if node.args[0] is before and layers else None
        if not node.args or node.args[0] is not before:
            return None
        if any(other is not node and other not in sizes and not _is_size(other, values, sizes) for other in before.users):
            return None
        layer = _layer(module, node, sizes)
        if layer is None:
            return None
        layers.append((str(node.target) if node.op == "call_module" else "", layer))
        before = node
        values.add(node)
    return None


def _is_size(node: fx.Node, values: set[fx.Node], sizes: set[fx.Node]) -> bool:
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
    if node.target in _PLAIN and len(node.args) == 1 and not (set(node.kwargs) - {"inplace"}):
        return _PLAIN[node.target]()
    rest: tuple[Any, ...] = tuple(node.args[1:])
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
