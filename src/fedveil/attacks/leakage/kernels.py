"""Per-example gradients of small convolutional nets for gradient matching, compiled (src/native/leak.inc).

The papers' attacked net and its like: convolutions of at most 16 channels, each followed by a sigmoid or tanh, then one
dense layer. Other nets, or no compiler: `compiled` returns None and torch.func does the same more slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.models import compile
from fedveil.models.layout import Layout

try:
    from fedveil import _leak as _module  # type: ignore[attr-defined]
except ImportError:  # pragma: no cover - the package also works without a compiler
    _module = None
_leak: Any = _module if getattr(_module, "VERSION", None) == 1 else None

LANES = 16
Gradients = Callable[[Tensor, Tensor], Tensor]
"""(inputs [R, ...], soft labels [R, classes]) -> gradients [R, P], once differentiable in both"""


def describe(
    module: nn.Module, shape: tuple[int, ...], layout: Layout
) -> tuple[np.ndarray, np.ndarray] | None:
    """The net as numbers (struct Conv and LeakNet of leak.h), or None if the kernels do not know it."""
    if len(shape) != 3 or compile.why_not(module) is not None:
        return None
    layers = compile.compile_layers(module, shape)
    if len(layers) < 4 or len(layers) % 2 or (layers[-2].kind, layers[-1].kind) != ("flatten", "linear"):
        return None
    inner, dense = layers[:-2], layers[-1]
    offset = dict(zip(layout.names, layout.offsets, strict=True))
    rows = []
    for number, (conv, act) in enumerate(zip(inner[::2], inner[1::2], strict=True)):
        if conv.kind != "conv" or conv.groups != 1 or act.kind not in ("sigmoid", "tanh"):
            return None
        wide = conv.before[0] * (conv.kernel[1] if number == 0 else 1)
        if max(wide, conv.after[0]) > LANES:
            return None
        bias = offset[f"{conv.name}.bias"] if conv.bias else -1
        rows.append([
            *conv.before, *conv.after, *conv.kernel, *conv.stride, *conv.padding, act.kind == "tanh",
            offset[f"{conv.name}.weight"], bias,
        ])  # fmt: skip
    if not rows or len(rows) > 8:
        return None
    bias = offset[f"{dense.name}.bias"] if dense.bias else -1
    head = [dense.before[0], dense.after[0], offset[f"{dense.name}.weight"], bias, layout.size]
    return np.array(rows, np.int64), np.array(head, np.int64)


def compiled(
    module: nn.Module, weights: Tensor, layout: Layout, shape: tuple[int, ...], isa: str = "auto"
) -> Gradients | None:
    """The gradient of the cross-entropy by all weights for each input on its own, or None (see `describe`)."""
    found = describe(module, shape, layout) if _leak is not None and weights.dtype == torch.float32 else None
    if found is None:
        return None
    convs, dense = found
    flat = np.ascontiguousarray(weights.detach().numpy())
    width, classes = _leak.kept(convs, dense), int(dense[1])

    class Matching(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor, t: Tensor) -> Tensor:
            x, t = x.detach().contiguous(), t.detach().float().contiguous()
            made = np.empty((len(x), layout.size), np.float32)
            state = np.zeros((len(x), width), np.float32)
            _leak.gradients(convs, dense, flat, x.numpy(), t.numpy(), made, state, isa)
            context.kept, context.shape = (state, t), x.shape
            return torch.from_numpy(made)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(context: Any, v: Tensor) -> tuple[Tensor, Tensor]:
            state, t = context.kept
            dx = np.empty((len(t), int(np.prod(shape))), np.float32)
            dt = np.empty((len(t), classes), np.float32)
            _leak.pullback(convs, dense, flat, state, t.numpy(), v.contiguous().numpy(), dx, dt, isa)
            return torch.from_numpy(dx).view(context.shape), torch.from_numpy(dt)

    return Matching.apply


@dataclass(frozen=True)
class Matcher:
    """The matching loss of many rows with its derivatives, one row after the other in the cache.

    What the dummies of a row leak: the mean over n inputs of gradients, each mapped by (g - shift) / scale and clipped
    ("layer" or "flat", on "example" or on the "whole" mean) where the recipe does that."""

    net: tuple[np.ndarray, np.ndarray]
    weights: np.ndarray
    begin: np.ndarray
    clip: str = "none"
    clip_on: str = "example"
    bound: float = 0.0
    shift: np.ndarray | None = None
    scale: np.ndarray | None = None
    isa: str = "auto"

    def __call__(
        self, x: Tensor, t: Tensor, seen: Tensor, weight: Tensor | None, size: Tensor, rows: Tensor,
        *, cosine: bool = False, noisy: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """x [R, n, ...], t [R, n, classes]; seen, weight [V, P] and size [V] are read at `rows`.

        Returns values [R] and their derivatives by x and t. Squared: sum of weight (made - seen)^2 / size, without the
        constant term where `noisy`. Cosine: 1 - cosine over coordinates of positive weight."""
        x, t = x.detach().contiguous(), t.detach().contiguous()
        clips = ("none", "layer", "flat").index(self.clip)
        options = np.array([x.shape[1], clips, self.clip_on == "example", cosine, noisy], np.int64)
        value = np.empty((len(x), 1), np.float32)
        dx, dt = np.empty((len(x), x[0].numel()), np.float32), np.empty((len(x), t[0].numel()), np.float32)
        _leak.match(
            *self.net, self.weights, options, self.bound, self.begin, self.shift, self.scale, x.numpy(), t.numpy(),
            seen.contiguous().numpy(), None if weight is None else weight.contiguous().numpy(),
            size.contiguous().numpy(), rows.contiguous().numpy(), value, dx, dt, self.isa,
        )  # fmt: skip
        return (
            torch.from_numpy(value[:, 0]),
            torch.from_numpy(dx).view(x.shape),
            torch.from_numpy(dt).view(t.shape),
        )


def matcher(
    module: nn.Module, weights: Tensor, layout: Layout, shape: tuple[int, ...], **how: Any
) -> Matcher | None:
    """A `Matcher` for this net, or None where the kernels do not know it."""
    found = describe(module, shape, layout) if _leak is not None and weights.dtype == torch.float32 else None
    if found is None:
        return None
    begin = np.array([part.start for part in layout.layer_slices()] + [layout.size], np.int64)
    return Matcher(found, np.ascontiguousarray(weights.detach().numpy()), begin, **how)


def _two_loops(
    s: Tensor,
    y: Tensor,
    rho: Tensor,
    gamma: Tensor,
    stored: Tensor,
    rows: Tensor,
    vectors: Tensor,
    isa: str = "auto",
) -> Tensor:
    """L-BFGS directions of some rows of a history (see lbfgs.History), row by row in the cache."""
    q = np.array(vectors.detach().numpy(), order="C")
    _leak.two_loops(
        s.numpy(), y.numpy(), rho.numpy(), gamma.numpy(), stored.numpy(), rows.contiguous().numpy(), q, isa
    )
    return torch.from_numpy(q)


two_loops = _two_loops if _leak is not None else None
