"""The layers of the stacked engine: per-client weights, captured inputs and output gradients, clipped sums.

Every layer has forward(weights, x) -> (output, saved) and backward(weights, saved, gradient, wanted) -> (gradient of the
input if wanted, capture). weights is [K, P]; x is [K * B, ...], client after client, in the shape that torch's own
layer expects. Nothing here may let a client's numbers depend on the size of the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor


def bmm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Batched product (written to `out`) whose every matrix is the same whatever else is in the batch.

    Matrix times vector goes through one routine for a batch of one, another for more, a third when the output is not
    contiguous, and these round differently: such products are never alone and never written in place.
    """
    if 1 in (a.shape[1], a.shape[2], b.shape[2]):
        product = (
            torch.bmm(a, b) if a.shape[0] > 1 else torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
        )
        return product if out is None else out.copy_(product)
    return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)


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
            # In float64: the products of large inputs cancel, and a norm that comes out too small would not be clipped.
            a, d = capture.a.view(k * b, t, i).double(), capture.d.view(k * b, t, o).double()
            products = bmm(a, a.transpose(1, 2))
            products = (products + 1 if capture.bias else products) * bmm(d, d.transpose(1, 2))
            return products.view(k, b, t * t).sum(2).clamp_(min=0).sqrt_().to(capture.a.dtype), capture
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
        bmm(d.transpose(1, 2), capture.a.reshape(k, b * t, i), out[:, : o * i].view(k, o, i))
        if capture.bias:
            out[:, o * i :] = d.sum(1)
        return
    at = 0
    for part in capture.parts:
        end = at + part.shape[2]
        if factors is None:
            out[:, at:end] = part.sum(1)
        else:
            bmm(factors[:, None, :], part, out[:, None, at:end])
        at = end


@dataclass(frozen=True)
class Linear:
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

    def backward(
        self, weights: Tensor, saved: Any, gradient: Tensor, wanted: bool
    ) -> tuple[Tensor | None, Outer]:
        stack, shape = saved
        clients, examples = len(weights), shape[0] // len(weights)
        d = gradient.reshape(clients, -1, self.outputs)
        back = bmm(d, self._weight(weights)).view(shape) if wanted else None
        return back, Outer(
            stack.view(clients, examples, -1, self.inputs),
            d.view(clients, examples, -1, self.outputs),
            self.bias,
        )


@dataclass(frozen=True)
class Conv:
    layer: int
    part: slice
    inputs: int
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    bias: bool
    pool: tuple[tuple[int, int], tuple[int, int]] | None = (
        None  # kernel and stride of a pool that drops the rest
    )

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

    def backward(
        self, weights: Tensor, saved: Any, gradient: Tensor, wanted: bool
    ) -> tuple[Tensor | None, Outer]:
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
                    image[
                        :, top : top + sh * (height - 1) + 1 : sh, left : left + sw * (width - 1) + 1 : sw
                    ] += spread[:, :, :, row, column]
            back = image[:, ph : ph + shape[2], pw : pw + shape[3]].permute(0, 3, 1, 2)
        examples, positions = n // clients, height * width
        return back, Outer(
            patches.view(clients, examples, positions, self.patch),
            d.view(clients, examples, positions, self.outputs),
            self.bias,
        )


@dataclass(frozen=True)
class GroupNorm:
    layer: int
    part: slice
    channels: int
    groups: int
    eps: float

    def _affine(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and offset for each row of the batch, broadcasting over positions."""
        pair = weights[:, self.part].reshape(len(weights), 1, 2, self.channels)
        pair = pair.expand(-1, len(x) // len(weights), -1, -1).reshape(
            len(x), 2, self.channels, *[1] * (x.dim() - 2)
        )
        return pair[:, 0], pair[:, 1]

    def forward(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        scale, offset = self._affine(weights, x)
        leaf = x.detach().contiguous().requires_grad_()
        with torch.enable_grad():
            normal = torch.group_norm(leaf, self.groups, None, None, self.eps)
        return normal.detach() * scale + offset, (leaf, normal)

    def backward(
        self, weights: Tensor, saved: Any, gradient: Tensor, wanted: bool
    ) -> tuple[Tensor | None, Given]:
        leaf, normal = saved
        clients = len(weights)
        gradient = gradient.contiguous()
        shape = (clients, len(gradient) // clients, self.channels, -1)
        parts = ((normal.detach() * gradient).view(shape).sum(3), gradient.view(shape).sum(3))
        scale, _ = self._affine(weights, leaf)
        back = torch.autograd.grad(normal, leaf, gradient * scale)[0] if wanted else None
        return back, Given(parts)


@dataclass(frozen=True)
class Relu:
    layer: None = None

    def forward(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        out = x.relu()
        return out, out

    def backward(self, weights: Tensor, saved: Any, gradient: Tensor, wanted: bool) -> tuple[Tensor, None]:
        return torch.ops.aten.threshold_backward(gradient, saved, 0), None


@dataclass(frozen=True)
class MaxPool:
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
class Free:
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
class Elementwise:
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


Layer = Linear | Conv | GroupNorm | Relu | MaxPool | Free | Elementwise
