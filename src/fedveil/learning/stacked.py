"""All clients of a chunk as one stack: the fast engine in plain torch.

Clients are folded into the batch axis (client after client), weights are a matrix [K, P], and every layer with
parameters multiplies by its own client's weights through batched matrix products. One forward and
one backward pass capture each layer's input and the gradient of its output; from these come the per-example norms, the
clip factors and the clipped sums, without a second backward pass:

- the gradient of example b in a Linear or Conv2d layer is a sum of outer products  sum_t d[b,t] (x) a[b,t];
  with one position (Linear) its norm is |d| |a|, with few it comes from two Gram matrices ("ghost norm"), else
  the gradient is materialised;
- the clipped sum is one batched product of the (scaled) d with a.

Images are kept channels-last in memory; convolution weights in the order (out, row, column, in), so that a patch
is a contiguous copy. A chunk's memory is bounded by `chunk_for`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.errors import UserError
from fedveil.learning import descent
from fedveil.learning.descent import Clipping, Pass
from fedveil.learning.plan import ClientWork, LocalPlan, LocalResult
from fedveil.models.layout import Layout, layout_of

Tensor = torch.Tensor

_ELEMENTWISE = (
    nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus,
    nn.Softsign, nn.Hardtanh, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink,
    nn.Softshrink, nn.Hardshrink, nn.Threshold,
)  # fmt: skip
_POOLING = (nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d, nn.Unflatten)
_CACHE = 1 << 20  # numbers that a chunk may keep busy; measured best around the size of an L2 cache
_MOST_CLIENTS = 64


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product whose every matrix is the same whatever else is in the batch.

    A batch of one goes through another routine, which rounds differently when it is a matrix times a vector.
    """
    if a.shape[0] == 1 and 1 in (a.shape[1], a.shape[2], b.shape[2]):
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)


@dataclass(frozen=True)
class Outer:
    """Per-example gradients as sums of outer products: inputs a [K, B, T, I], output gradients d [K, B, T, O]."""

    a: Tensor
    d: Tensor
    bias: bool


@dataclass(frozen=True)
class Given:
    """Per-example gradients themselves, one tensor [K, B, n] per parameter."""

    parts: tuple[Tensor, ...]


def materialise(capture: Outer | Given) -> Given:
    """Write out every example's gradient."""
    if isinstance(capture, Given):
        return capture
    a, d = capture.a, capture.d
    k, b, t, i = a.shape
    o = d.shape[3]
    if t == 1:
        weight = (d.view(k, b, o, 1) * a.view(k, b, 1, i)).view(k, b, o * i)
    else:
        weight = bmm(d.view(k * b, t, o).transpose(1, 2), a.view(k * b, t, i)).view(k, b, o * i)
    return Given((weight, d.sum(2)) if capture.bias else (weight,))


def measure(capture: Outer | Given, kind: str) -> tuple[Tensor, Outer | Given]:
    """Per-example norms [K, B], and the capture, materialised if that was the cheapest way."""
    order = 1 if kind == "l1" else 2

    def size(values: Tensor) -> Tensor:
        return torch.linalg.vector_norm(values, order, dim=-1)

    if isinstance(capture, Outer):
        k, b, t, i = capture.a.shape
        o = capture.d.shape[3]
        if t == 1:
            inputs = size(capture.a[:, :, 0])
            if capture.bias:
                inputs = inputs + 1 if order == 1 else (inputs.square() + 1).sqrt_()
            return size(capture.d[:, :, 0]) * inputs, capture
        if order == 2 and t * (i + o) < i * o // 2:
            a, d = capture.a.view(k * b, t, i), capture.d.view(k * b, t, o)
            products = bmm(a, a.transpose(1, 2))
            products = (products + 1 if capture.bias else products) * bmm(d, d.transpose(1, 2))
            return products.view(k, b, t * t).sum(2).clamp_(min=0).sqrt_(), capture
        capture = materialise(capture)
    sizes = [size(part) for part in capture.parts]
    if len(sizes) == 1:
        return sizes[0], capture
    if order == 1:
        return sum(sizes[1:], sizes[0]), capture
    return sum((s.square() for s in sizes[1:]), sizes[0].square()).sqrt(), capture


def sum_up(capture: Outer | Given, factors: Tensor | None, out: Tensor) -> None:
    """Write the sum over examples of factors [K, B] * gradient into out [K, n]."""
    if isinstance(capture, Outer):
        k, b, t, i = capture.a.shape
        o = capture.d.shape[3]
        d = capture.d if factors is None else capture.d * factors[:, :, None, None]
        d = d.reshape(k, b * t, o)
        out[:, : o * i].view(k, o, i).copy_(bmm(d.transpose(1, 2), capture.a.reshape(k, b * t, i)))
        if capture.bias:
            out[:, o * i :] = d.sum(1)
        return
    at = 0
    for part in capture.parts:
        end = at + part.shape[2]
        if factors is None:
            out[:, at:end] = part.sum(1)
        else:
            out[:, at:end] = bmm(factors[:, None, :].contiguous(), part)[:, 0]
        at = end


# Layers. Each has forward(weights, x) -> (output, saved) and backward(weights, saved, gradient, wanted) ->
# (gradient of the input if wanted, capture). x is [K * B, ...] in the shape that torch's own layer expects.


@dataclass(frozen=True)
class _Linear:
    layer: int
    part: slice
    inputs: int
    outputs: int
    bias: bool

    def _weight(self, weights: Tensor) -> Tensor:
        at = self.part.start
        return weights[:, at : at + self.inputs * self.outputs].view(-1, self.outputs, self.inputs)

    def forward(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        stack = x.reshape(len(weights), -1, self.inputs)
        out = bmm(stack, self._weight(weights).transpose(1, 2))
        if self.bias:
            out = out.add_(weights[:, None, self.part.stop - self.outputs : self.part.stop])
        return out.view(*x.shape[:-1], self.outputs), (stack, x.shape)

    def backward(self, weights: Tensor, saved: Any, gradient: Tensor, wanted: bool) -> tuple[Tensor | None, Outer]:
        stack, shape = saved
        clients, examples = len(weights), shape[0] // len(weights)
        d = gradient.reshape(clients, -1, self.outputs)
        back = bmm(d, self._weight(weights)).view(shape) if wanted else None
        return back, Outer(
            stack.view(clients, examples, -1, self.inputs), d.view(clients, examples, -1, self.outputs), self.bias
        )


@dataclass(frozen=True)
class _Conv:
    layer: int
    part: slice
    inputs: int
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    bias: bool
    pool: tuple[tuple[int, int], tuple[int, int]] | None = None  # kernel and stride of a pool that drops the rest

    @property
    def patch(self) -> int:
        return self.inputs * self.kernel[0] * self.kernel[1]

    def _weight(self, weights: Tensor) -> Tensor:
        at = self.part.start
        return weights[:, at : at + self.outputs * self.patch].view(-1, self.outputs, self.patch)

    def _size(self, shape: Sequence[int], axis: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        size = (shape[2 + axis] + 2 * self.padding[axis] - reach) // self.stride[axis] + 1
        if self.pool is None:
            return size
        (kernel, stride) = self.pool[0][axis], self.pool[1][axis]
        return (size - kernel) // stride * stride + kernel if size >= kernel else size

    def forward(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        n, clients = len(x), len(weights)
        height, width = self._size(x.shape, 0), self._size(x.shape, 1)
        image = x.permute(0, 2, 3, 1).contiguous()
        if any(self.padding):
            image = F.pad(image, (0, 0, self.padding[1], self.padding[1], self.padding[0], self.padding[0]))
        s, (dh, dw) = image.stride(), self.dilation
        patches = image.as_strided(
            (n, height, width, *self.kernel, self.inputs),
            (s[0], s[1] * self.stride[0], s[2] * self.stride[1], s[1] * dh, s[2] * dw, 1),
        ).reshape(clients, -1, self.patch)
        out = bmm(patches, self._weight(weights).transpose(1, 2))
        if self.bias:
            out = out.add_(weights[:, None, self.part.stop - self.outputs : self.part.stop])
        return out.view(n, height, width, self.outputs).permute(0, 3, 1, 2), (patches, x.shape, height, width)

    def backward(self, weights: Tensor, saved: Any, gradient: Tensor, wanted: bool) -> tuple[Tensor | None, Outer]:
        patches, shape, height, width = saved
        clients, n = len(weights), shape[0]
        d = gradient.permute(0, 2, 3, 1).reshape(clients, -1, self.outputs)
        back = None
        if wanted:
            spread = bmm(d, self._weight(weights)).view(n, height, width, *self.kernel, self.inputs)
            (ph, pw), (sh, sw), (dh, dw) = self.padding, self.stride, self.dilation
            image = spread.new_zeros(n, shape[2] + 2 * ph, shape[3] + 2 * pw, self.inputs)
            for row in range(self.kernel[0]):
                for column in range(self.kernel[1]):
                    top, left = row * dh, column * dw
                    image[:, top : top + sh * (height - 1) + 1 : sh, left : left + sw * (width - 1) + 1 : sw] += spread[
                        :, :, :, row, column
                    ]
            back = image[:, ph : ph + shape[2], pw : pw + shape[3]].permute(0, 3, 1, 2)
        examples, positions = n // clients, height * width
        return back, Outer(
            patches.view(clients, examples, positions, self.patch),
            d.view(clients, examples, positions, self.outputs),
            self.bias,
        )


@dataclass(frozen=True)
class _GroupNorm:
    layer: int
    part: slice
    channels: int
    groups: int
    eps: float

    def _affine(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and offset for each row of the batch, broadcasting over positions."""
        pair = weights[:, self.part].reshape(len(weights), 1, 2, self.channels)
        pair = pair.expand(-1, len(x) // len(weights), -1, -1).reshape(len(x), 2, self.channels, *[1] * (x.dim() - 2))
        return pair[:, 0], pair[:, 1]

    def forward(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        scale, offset = self._affine(weights, x)
        leaf = x.detach().contiguous().requires_grad_()
        with torch.enable_grad():
            normal = torch.group_norm(leaf, self.groups, None, None, self.eps)
        return normal.detach() * scale + offset, (leaf, normal)

    def backward(self, weights: Tensor, saved: Any, gradient: Tensor, wanted: bool) -> tuple[Tensor | None, Given]:
        leaf, normal = saved
        clients = len(weights)
        gradient = gradient.contiguous()
        shape = (clients, len(gradient) // clients, self.channels, -1)
        parts = ((normal.detach() * gradient).view(shape).sum(3), gradient.view(shape).sum(3))
        scale, _ = self._affine(weights, leaf)
        back = torch.autograd.grad(normal, leaf, gradient * scale)[0] if wanted else None
        return back, Given(parts)


@dataclass(frozen=True)
class _Relu:
    layer: None = None

    def forward(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        out = x.relu()
        return out, out

    def backward(self, weights: Tensor, saved: Any, gradient: Tensor, wanted: bool) -> tuple[Tensor, None]:
        return torch.ops.aten.threshold_backward(gradient, saved, 0), None


@dataclass(frozen=True)
class _MaxPool:
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil: bool
    layer: None = None

    def _settings(self) -> tuple[Any, ...]:
        return self.kernel, self.stride, self.padding, self.dilation, self.ceil

    def forward(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        out, where = torch.ops.aten.max_pool2d_with_indices(x, *self._settings())
        return out, (x, where)

    def backward(self, weights: Tensor, saved: Any, gradient: Tensor, wanted: bool) -> tuple[Tensor, None]:
        x, where = saved
        return torch.ops.aten.max_pool2d_with_indices_backward(gradient, x, *self._settings(), where), None


@dataclass(frozen=True)
class _Free:
    """Any layer without parameters that treats the rows of a batch separately; its gradient by autograd."""

    function: Callable[[Tensor], Tensor]
    layer: None = None

    def forward(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            out = self.function(leaf)
        return out.detach(), (leaf, out)

    def backward(self, weights: Tensor, saved: Any, gradient: Tensor, wanted: bool) -> tuple[Tensor, None]:
        leaf, out = saved
        return torch.autograd.grad(out, leaf, gradient)[0], None


@dataclass(frozen=True)
class _Elementwise:
    """An activation. It runs on a flat vector of a round length: the few elements left over at the end would
    otherwise be computed by other code, and which elements these are depends on the size of the stack."""

    module: nn.Module
    layer: None = None

    def forward(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        flat = _in_memory_order(x).reshape(-1)
        leaf = F.pad(flat, (0, -flat.numel() % 64)).detach().requires_grad_()
        with torch.enable_grad():
            out = self.module(leaf.clone() if getattr(self.module, "inplace", False) else leaf)
        return self._like(out.detach(), x), (leaf, out)

    def backward(self, weights: Tensor, saved: Any, gradient: Tensor, wanted: bool) -> tuple[Tensor, None]:
        leaf, out = saved
        flat = _in_memory_order(gradient).reshape(-1)
        back = torch.autograd.grad(out, leaf, F.pad(flat, (0, leaf.numel() - flat.numel())))[0]
        return self._like(back, gradient), None

    @staticmethod
    def _like(flat: Tensor, x: Tensor) -> Tensor:
        shape = _in_memory_order(x).shape
        values = flat[: x.numel()].view(shape)
        return values.permute(0, 3, 1, 2) if x.dim() == 4 else values


def _in_memory_order(x: Tensor) -> Tensor:
    """Images as [N, H, W, C], the order in which this engine keeps them."""
    return x.permute(0, 2, 3, 1) if x.dim() == 4 else x


_Layer = _Linear | _Conv | _GroupNorm | _Relu | _MaxPool | _Free | _Elementwise


def leaves(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The layers of a (nested) Sequential in order, with their names."""
    if type(module) is not nn.Sequential:
        return [(prefix, module)]
    out = []
    for name, child in module.named_children():
        out += leaves(child, f"{prefix}.{name}" if prefix else name)
    return out


def why_not(module: nn.Module) -> str | None:
    """None if this engine can train the module, else the reason, naming the layer."""
    seen: set[int] = set()
    for name, leaf in leaves(module):
        where = f"layer '{name}' ({type(leaf).__name__})" if name else f"the model ({type(leaf).__name__})"
        if id(leaf) in seen and any(True for _ in leaf.parameters()):
            return f"{where} is used twice"
        seen.add(id(leaf))
        reason = _leaf_reason(leaf)
        if reason:
            return f"{where} {reason}"
    return None


def _leaf_reason(leaf: nn.Module) -> str | None:
    if leaf._forward_hooks or leaf._forward_pre_hooks:
        return "has hooks"
    kind = type(leaf)
    if kind is nn.Conv2d:
        if leaf.groups != 1:
            return "has groups"
        if leaf.padding_mode != "zeros" or isinstance(leaf.padding, str):
            return "pads in an unusual way"
        return None
    if kind is nn.GroupNorm:
        return None
    if kind is nn.Dropout:
        return "is active" if leaf.training and leaf.p > 0 else None
    if kind is nn.MaxPool2d:
        return "returns indices" if leaf.return_indices else None
    if kind is nn.Flatten:
        return "flattens the batch axis" if leaf.start_dim == 0 else None
    if kind is nn.Unflatten and leaf.dim == 0:
        return "changes the batch axis"
    known = (nn.Linear, nn.ReLU, nn.Identity, *_ELEMENTWISE, *_POOLING)
    return None if kind in known else "is not one that can be stacked"


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _layers(module: nn.Module, layout: Layout) -> list[_Layer]:
    """The module as a list of stackable layers."""
    slices = layout.layer_slices()
    found: list[_Layer] = []
    for name, leaf in leaves(module):
        if isinstance(leaf, nn.Linear | nn.Conv2d) or (isinstance(leaf, nn.GroupNorm) and leaf.affine):
            layer = layout.layer_names.index(name)
            part = slices[layer]
        if isinstance(leaf, nn.Linear):
            found.append(_Linear(layer, part, leaf.in_features, leaf.out_features, leaf.bias is not None))
        elif isinstance(leaf, nn.Conv2d):
            settings = [_pair(v) for v in (leaf.kernel_size, leaf.stride, leaf.padding, leaf.dilation)]
            found.append(_Conv(layer, part, leaf.in_channels, leaf.out_channels, *settings, leaf.bias is not None))
        elif isinstance(leaf, nn.GroupNorm) and leaf.affine:
            found.append(_GroupNorm(layer, part, leaf.num_channels, leaf.num_groups, leaf.eps))
        elif isinstance(leaf, nn.GroupNorm):
            found.append(_Free(lambda x, n=leaf.num_groups, e=leaf.eps: torch.group_norm(x, n, None, None, e)))
        elif isinstance(leaf, nn.ReLU):
            found.append(_Relu())
        elif isinstance(leaf, nn.MaxPool2d):
            stride = leaf.kernel_size if leaf.stride is None else leaf.stride
            settings = [_pair(v) for v in (leaf.kernel_size, stride, leaf.padding, leaf.dilation)]
            found.append(_MaxPool(*settings, leaf.ceil_mode))
        elif isinstance(leaf, _ELEMENTWISE):
            found.append(_Elementwise(leaf))
        elif not isinstance(leaf, nn.Identity | nn.Dropout):
            found.append(_Free(leaf))
    return _sharpen(found)


def _sharpen(layers: list[_Layer]) -> list[_Layer]:
    """Two exact rewrites: pool before ReLU (a maximum is the same either way, and so is its gradient), and no
    convolution outputs that the next pool drops."""
    out = list(layers)
    for i in range(len(out) - 1):
        if isinstance(out[i], _Relu) and isinstance(out[i + 1], _MaxPool):
            out[i], out[i + 1] = out[i + 1], out[i]
    for i, layer in enumerate(out):
        if isinstance(layer, _Conv):
            after = next((l for l in out[i + 1 :] if not isinstance(l, _Relu | _Elementwise)), None)
            if isinstance(after, _MaxPool) and after.padding == (0, 0) and after.dilation == (1, 1) and not after.ceil:
                out[i] = _Conv(**{**layer.__dict__, "pool": (after.kernel, after.stride)})
    return out


@dataclass(frozen=True)
class Net:
    """A module compiled for stacks of clients."""

    layout: Layout
    layers: tuple[_Layer, ...]
    rows: int  # most rows per client and pass
    row_cost: int  # numbers that one example keeps busy
    outputs: torch.Size = field(default_factory=lambda: torch.Size([1]))

    def _convs(self) -> list[_Conv]:
        return [l for l in self.layers if isinstance(l, _Conv) and l.inputs > 1 and l.patch > l.inputs]

    def encode(self, flat: Tensor) -> Tensor:
        """From parameter order to this engine's order (convolution kernels channels-last)."""
        return self._permuted(flat, lambda conv: (conv.inputs, conv.patch // conv.inputs))

    def decode(self, own: Tensor) -> Tensor:
        """Back to parameter order."""
        return self._permuted(own, lambda conv: (conv.patch // conv.inputs, conv.inputs))

    def _permuted(self, matrix: Tensor, shape: Callable[[_Conv], tuple[int, int]]) -> Tensor:
        convs = self._convs()
        if not convs:
            return matrix
        out = matrix.clone()
        for conv in convs:
            part = slice(conv.part.start, conv.part.start + conv.outputs * conv.patch)
            old, new = shape(conv)
            view = (len(matrix), conv.outputs, new, old)
            out[:, part].view(view).copy_(matrix[:, part].view(len(matrix), conv.outputs, old, new).transpose(2, 3))
        return out

    def clipped(
        self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, clipping: Clipping, loss: str
    ) -> Pass:
        """One pass: losses, norms and the clipped sum of a group of clients (see `descent.Network`)."""
        clients = len(weights)
        tape = []
        out = x
        for layer in self.layers:
            out, saved = layer.forward(weights, out)
            tape.append(saved)
        losses, gradient = descent.loss_and_gradient(out, y, mask, loss)
        total = torch.empty_like(weights)
        first = next(i for i, layer in enumerate(self.layers) if layer.layer is not None)
        norms: list[Tensor] = [losses] * self.layout.layers
        bounds: list[Tensor | None] = [None] * self.layout.layers
        waiting: list[tuple[slice, Outer | Given]] = []
        for i in range(len(self.layers) - 1, first - 1, -1):
            layer = self.layers[i]
            gradient, capture = layer.backward(weights, tape[i], gradient, i > first)
            tape[i] = None
            if layer.layer is None:
                continue
            if clipping.shift is not None and clipping.scale is not None:
                capture = _mapped(capture, clipping.shift[:, layer.part], clipping.scale[:, layer.part])
            factors = mask
            if clipping.kind != "none" or clipping.norms:
                norms[layer.layer], capture = measure(capture, clipping.norm)
            if clipping.kind == "flat":
                waiting.append((layer.part, capture))
                continue
            if clipping.kind == "layer":
                wide, bounds[layer.layer] = clipping.factors(norms[layer.layer][:, :, None], mask)
                factors = wide[:, :, 0]
            sum_up(capture, factors, total[:, layer.part])
        losses = losses.view(clients, -1)
        if clipping.kind == "none" and not clipping.norms:
            return Pass(total, losses, None, None)
        every = torch.stack(norms, 2)
        if clipping.kind == "none":
            return Pass(total, losses, every, None)
        if clipping.kind == "layer":
            return Pass(total, losses, every, torch.cat(bounds, 2) if clipping.bound is None else bounds[0])
        flat = torch.linalg.vector_norm(every, 1 if clipping.norm == "l1" else 2, dim=2, keepdim=True)
        wide, bound = clipping.factors(flat, mask)
        for part, capture in waiting:
            sum_up(capture, wide[:, :, 0], total[:, part])
        return Pass(total, losses, flat, bound)


def _mapped(capture: Outer | Given, shift: Tensor, scale: Tensor) -> Given:
    """AdaClip: every example's gradient as (g - shift) / scale."""
    parts, at = [], 0
    for part in materialise(capture).parts:
        end = at + part.shape[2]
        parts.append((part - shift[:, None, at:end]) / scale[:, None, at:end])
        at = end
    return Given(tuple(parts))


def compile_net(module: nn.Module, shape: Sequence[int]) -> Net:
    """Compile a module for examples of `shape`; UserError if `why_not` has a reason."""
    reason = why_not(module)
    if reason:
        raise UserError(f"The stacked engine cannot train this model: {reason}. Use engine = auto.")
    layout = layout_of(module)
    layers = tuple(_layers(module, layout))
    weights, out, cost = torch.zeros(1, layout.size), torch.zeros(1, *shape), 0
    with torch.no_grad():
        for layer in layers:
            out, saved = layer.forward(weights, out)
            cost += out.numel()
            if isinstance(layer, _Conv):
                cost += saved[0].numel() + layer.patch * layer.outputs
    return Net(layout, layers, max(1, _CACHE // max(cost, 1)), cost, out.shape[1:])


def chunk_for(net: Net, width: int) -> int:
    """How many clients with batches of `width` rows share a stack: as many as the cache holds, at most 64."""
    per_client = net.row_cost * min(max(width, 1), net.rows) + 3 * net.layout.size
    return int(min(_MOST_CLIENTS, max(1, _CACHE // per_client)))


def train(
    module: nn.Module,
    start: np.ndarray,
    x: Any,
    y: Any,
    work: Sequence[ClientWork],
    plan: LocalPlan,
    *,
    threads: int = 1,
    dtype: torch.dtype = torch.float32,
    chunk: int | None = None,
    device: str = "cpu",
    norms: bool = True,
) -> LocalResult:
    """Local training of every client in `work`, `chunk` clients at a time.

    `norms` False leaves out the gradient norms (zeros in the result) where neither clipping nor noise
    needs them. `threads` is ignored: torch's own setting applies; `learning.local` runs processes instead.
    """
    data, targets = torch.as_tensor(x, device=device), torch.as_tensor(y, device=device)
    net = compile_net(module, data.shape[1:])
    descent.check_targets(net.outputs, targets, plan.loss)
    width = math.ceil(max((w.rows >= 0).sum(1).mean() for w in work)) if work else 1
    size = chunk or chunk_for(net, width)
    parts = [
        descent.run(net, start, data, targets, work[at : at + size], plan, dtype=dtype, norms=norms)
        for at in range(0, len(work), size)
    ]
    return descent.join(parts, net.layout, plan)
