"""The layers of the stacked engine: per-client weights, captured inputs and output gradients, clipped sums.

Every layer has forward(weights, x, apart) -> (output, saved) and backward(weights, saved, gradient, wanted) -> (gradient
of the input if wanted, capture). weights is [K, P]; x is [K * B, ...], client after client, in the shape that torch's own
layer expects. Nothing here may let a client's numbers depend on the size of the stack; with `apart` nothing may let an
example's numbers depend on its batch (what one example adds to a sum could not be bounded otherwise: weights can be
such that the last bit of a product decides everything that follows).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from fedveil.protect.bounded import ORDERS
from fedveil.training.torch.batched import compiled
from fedveil.training.torch.batched import products as each_by_itself

Tensor = torch.Tensor
Saved: TypeAlias = Any  # what a layer's forward pass keeps: only its own backward pass looks inside


_ROOM = 1 << 17  # float64 numbers of a temporary
_FEW = 4  # outputs for which a matrix product takes longer than products that are written out
_SMALLEST_NORMAL = 2.0**-126
_LINE = 16  # numbers: rows of matrices begin at multiples of 64 bytes (or 128)


def padded(side: int) -> int:
    """The next multiple of a line."""
    return -(-side // _LINE) * _LINE


def widened(values: Tensor, ones: bool = False) -> Tensor:
    """A copy whose last axis is padded to whole lines with zeros; with `ones` a 1 comes before them. No copy where
    the rows are lines already."""
    side = values.shape[-1]
    if side % _LINE == 0 and not ones and values.is_contiguous() and values.data_ptr() % 64 == 0:
        return values
    out = values.new_empty(*values.shape[:-1], padded(side + ones))
    out[..., side:] = 0
    out[..., :side] = values
    if ones:
        out[..., side] = 1
    return out


def rows_of(outputs: int) -> int:
    """Rows of a matrix: whole lines too, but for few outputs, which are no matrix products (`few_products`)."""
    return outputs if outputs <= _FEW else padded(outputs)


def room_for(outputs: int, inputs: int) -> int:
    """Numbers of a matrix in whole lines; a multiple of a line's square, so that every layer of every client begins at the
    same place of its lines."""
    return -(-rows_of(outputs) * padded(inputs) // _LINE**2) * _LINE**2


def matrices_of(own: Tensor, outputs: int, inputs: int) -> Tensor:
    """The matrices [K, outputs, inputs (and bias)] of a layer in whole lines: a view into its weights [K, n]."""
    shape = rows_of(outputs), padded(inputs)
    return own[:, : shape[0] * shape[1]].unflatten(1, shape)


def matrix_views(
    own: Tensor, flat: Tensor, at: tuple[int, int], outputs: int, inputs: int, bias: bool
) -> list[tuple[Tensor, Tensor]]:
    """(own, flat) views of equal shape: the parameters of a layer in whole lines, with the bias as one more column, and as
    torch has them. at: where the layer begins in both."""
    (here, there), line = at, padded(inputs + bias)
    here, there = int(own.storage_offset()) + here, int(flat.storage_offset()) + there
    k, own_step, flat_step = len(own), own.stride(0), flat.stride(0)
    pairs = [
        (
            own.as_strided((k, outputs, inputs), (own_step, line, 1), here),
            flat.as_strided((k, outputs, inputs), (flat_step, inputs, 1), there),
        )
    ]
    if bias:
        last = flat.as_strided((k, outputs), (flat_step, 1), there + outputs * inputs)
        pairs.append((own.as_strided((k, outputs), (own_step, line), here + inputs), last))
    return pairs


def products(x: Tensor, matrices: Tensor) -> Tensor:
    """x [K, B, T, I] times its client's matrix [K, I, O]; sides in whole lines.

    The compiled module computes every number by the same chain over its terms, whatever else is in the call. Without it
    every x[k, b] is multiplied by a call of its own (of a batch of such calls) with the same shape and alignment: its
    bits depend on nothing else. BLAS rounds differently when the number of rows changes, when an operand lies elsewhere
    modulo a line, and when a batch has one member, so none of these varies.
    """
    k, b, t, i = x.shape
    if compiled(x.device, x.dtype) is not None:
        return each_by_itself(x.reshape(k, b * t, i), matrices).view(k, b, t, -1)
    if k == b == 1:
        return torch.bmm(x[0].expand(2, -1, -1), matrices.expand(2, -1, -1))[None, :1]
    if b <= k:
        found = [torch.bmm(x[:, j], matrices) for j in range(b)]
        return found[0][:, None] if b == 1 else torch.stack(found, 1)
    found = [torch.bmm(x[j], matrices[j].expand(b, -1, -1)) for j in range(k)]
    return found[0][None] if k == 1 else torch.stack(found)


def few_products(x: Tensor, matrices: Tensor, transposed: bool) -> Tensor:
    """x [K, B, 1, I] times its client's matrix [K, O, I] transposed, or x [K, B, 1, O] times the matrix: as sums of
    products that are written out, one after the other in torch's own order, which the sides alone decide."""
    if len(x) * x.shape[1] == 1:  # never a sum of one vector alone
        return few_products(x.expand(-1, 2, -1, -1), matrices, transposed)[:, :1]
    if transposed:
        return (x * matrices[:, None]).sum(3)[:, :, None]
    return (x.transpose(2, 3) * matrices[:, None]).sum(2)[:, :, None]


def together(x: Tensor, matrices: Tensor) -> Tensor:
    """The same with one product per client, where nothing is clipped and only speed counts."""
    k, b, t, i = x.shape
    if b * t == 1 or (min(matrices.shape[1:]) > _FEW and compiled(x.device, x.dtype) is not None):
        return products(x, matrices)
    return torch.bmm(x.view(k, b * t, i), matrices).view(k, b, t, -1)


@dataclass(frozen=True)
class Outer:
    """Per-example gradients as sums over t of outer products d[k, b, t] (x) a[k, b, t], both in whole lines: inputs
    (and a 1 for the bias) a [K, B, T, I], output gradients d [K, B, T, O]."""

    a: Tensor
    d: Tensor
    outputs: int  # how many of O are not padding
    room: int  # numbers of the layer, as the engine keeps it


@dataclass(frozen=True)
class Given:
    """Per-example gradients themselves, [K, B, n], in the order in which the engine keeps weights."""

    values: Tensor


def materialise(capture: Outer | Given) -> Given:
    """Write out every example's gradient."""
    if isinstance(capture, Given):
        return capture
    a, d = capture.a, capture.d
    k, b, t, i = a.shape
    o = d.shape[3]
    if t == 1:
        matrix = d.view(k, b, o, 1)[:, :, : capture.outputs] * a.view(k, b, 1, i)
    else:
        d, a = d.view(k * b, t, o).transpose(1, 2), a.view(k * b, t, i)
        if k * b == 1:
            d, a = d.expand(2, -1, -1), a.expand(2, -1, -1)
        matrix = torch.bmm(d, a)[: k * b].view(k, b, o, i)
        matrix = matrix if o * i <= capture.room else matrix[:, :, : capture.outputs]
    values = matrix.reshape(k, b, -1)
    return Given(values if values.shape[2] == capture.room else F.pad(values, (0, capture.room - values.shape[2])))


def size_of(values: Tensor, kind: str) -> Tensor:
    """Norms over the last axis in float64, without under- or overflow."""
    order = ORDERS[kind]
    if values.dtype != torch.float64:  # squares of float32 numbers are ordinary float64 numbers
        return torch.linalg.vector_norm(values.double(), order, dim=-1)
    peak = values.abs().amax(-1, keepdim=True)
    peak = torch.where((peak > 0) & peak.isfinite(), peak, 1.0)
    return torch.linalg.vector_norm(values / peak, order, dim=-1) * peak[..., 0]


def measure(capture: Outer | Given, kind: str) -> tuple[Tensor, Outer | Given]:
    """Per-example norms [K, B] (float64), and the capture in the form whose norm this is and which is to be summed:
    an outer product stays one, a sum of several is written out."""
    if isinstance(capture, Outer) and capture.a.shape[2] == 1:
        return size_of(capture.d[:, :, 0], kind) * size_of(capture.a[:, :, 0], kind), capture
    capture = materialise(capture)
    return size_of(capture.values, kind), capture


def sum_up(capture: Outer | Given, factors: Tensor, out: Tensor) -> None:
    """Write the sum over examples of factors [K, B] (float64) * gradient into out [K, n], in float64 or, for at most
    `BLOCK` examples, in float32: as wide as `out` is.

    Formal guarantee: in float64 the sum of n examples errs by at most (n + 2) 2**-53 times the sum of their absolute values,
    in float32 by at most (n + 3) / 2 * 2**-24 times that, whatever the order in which a product adds (see `_sum_in_halves`).
    """
    if out.dtype != torch.float64:
        _sum_in_halves(capture, factors, out)
        return
    if isinstance(capture, Outer) and capture.a.shape[2] == 1:
        d, a = capture.d[:, :, 0] * factors[:, :, None], capture.a[:, :, 0].double()
        d, to = d[:, :, : capture.outputs].transpose(1, 2), _matrices(out, capture)
        step = max(2, _ROOM // (d.shape[1] * a.shape[2]))  # clients whose products stay in the cache
        for k in range(0, len(d), step):
            one, other = d[k : k + step], a[k : k + step]
            to[k : k + step] = one * other if a.shape[1] == 1 else torch.bmm(one, other)
        return
    values = materialise(capture).values
    torch.mul(values[:, 0], factors[:, :1], out=out)
    for example in range(1, values.shape[1]):
        out.addcmul_(values[:, example], factors[:, example, None])


def _matrices(out: Tensor, capture: Outer) -> Tensor:
    """The part of out [K, n] that a layer's sums [K, outputs, inputs] are written to; the rest becomes 0."""
    end = capture.outputs * capture.a.shape[3]
    if end < out.shape[1]:
        out[:, end:] = 0
    return out[:, :end].unflatten(1, (capture.outputs, -1))


def _sum_in_halves(capture: Outer | Given, factors: Tensor, out: Tensor) -> None:
    """`sum_up` in float32.

    What an example adds is the exact product of two float32 vectors, the first of them scaled: rounding that is covered by
    the clip's margin, and where it could round up by more (below the smallest normal number) it is 0. A sum of m products in
    any order rounds each term at most m times. The two halves of a batch are summed apart, so that with their addition a term
    of n is rounded at most n / 2 + 3 / 2 times; up to three examples need no halves.
    """
    if isinstance(capture, Outer) and capture.a.shape[2] == 1:
        d, a, rows = (capture.d[:, :, 0] * factors[:, :, None]).to(out.dtype), capture.a[:, :, 0], capture.outputs
        to = _matrices(out, capture)
    else:
        d, a, rows = widened(factors.to(out.dtype)[:, :, None]), materialise(capture).values, 1
        to = out[:, None]
    d = F.hardshrink(d, _SMALLEST_NORMAL)[:, :, :rows]
    n = d.shape[1]
    if n <= 3:
        to.copy_(_summed(d, a))
        return
    half = -(-n // 2)
    torch.add(_summed(d[:, :half], a[:, :half]), _summed(d[:, half:], a[:, half:]), out=to)


def _summed(d: Tensor, a: Tensor) -> Tensor:
    """Sums over b of the outer products of d [K, b, o] and a [K, b, i]; never one client alone in a product."""
    if d.shape[1] == 1:
        return d.transpose(1, 2) * a
    if len(d) == 1:
        return torch.bmm(d.transpose(1, 2).expand(2, -1, -1), a.expand(2, -1, -1))[:1]
    return torch.bmm(d.transpose(1, 2), a)


def sum_plainly(capture: Outer | Given, out: Tensor) -> None:
    """Write the plain sum over examples into out [K, n]; nothing is promised about its rounding."""
    if isinstance(capture, Given):
        out.copy_(capture.values.sum(1))
        return
    k, b, t, i = capture.a.shape
    d, a = capture.d.reshape(k, b * t, -1)[:, :, : capture.outputs], capture.a.reshape(k, b * t, i)
    _matrices(out, capture).copy_(_summed(d, a))


@dataclass(frozen=True)
class Linear:
    layer: int
    part: slice  # of the weights as the engine keeps them
    flat: slice  # of the weights as torch has them
    inputs: int
    outputs: int
    bias: bool

    def views(self, own: Tensor, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        return matrix_views(own, flat, (self.part.start, self.flat.start), self.outputs, self.inputs, self.bias)

    def forward(self, weights: Tensor, x: Tensor, apart: bool) -> tuple[Tensor, Saved]:
        clients = len(weights)
        stack = widened(x.reshape(clients, len(x) // clients, -1, self.inputs), self.bias)
        matrices = matrices_of(weights[:, self.part], self.outputs, self.inputs + self.bias)
        out = self._times(stack, matrices, apart, True)
        return out[..., : self.outputs].reshape(*x.shape[:-1], self.outputs), (stack, matrices, x.shape, apart)

    def _times(self, x: Tensor, matrices: Tensor, apart: bool, transposed: bool) -> Tensor:
        if self.outputs <= _FEW and x.shape[2] == 1 and (apart or x.shape[1] == 1):
            return few_products(x if transposed else x[..., : self.outputs], matrices, transposed)
        if self.outputs <= _FEW and (apart or not transposed):  # as a product all sides are whole lines
            matrices = F.pad(matrices, (0, 0, 0, padded(self.outputs) - self.outputs))
        return (products if apart else together)(x, matrices.transpose(1, 2) if transposed else matrices)

    def backward(
        self, weights: Tensor, saved: Saved, gradient: Tensor, wanted: bool
    ) -> tuple[Tensor | None, Outer]:
        stack, matrices, shape, apart = saved
        d = widened(gradient.reshape(*stack.shape[:3], self.outputs))
        back = None
        if wanted:
            back = self._times(d, matrices, apart, False)[..., : self.inputs].reshape(shape)
        return back, Outer(stack, d, self.outputs, self.part.stop - self.part.start)


@dataclass(frozen=True)
class Conv:
    """Kernels are kept channels-last, so that a patch is a contiguous copy."""

    layer: int
    part: slice
    flat: slice
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

    def views(self, own: Tensor, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        at = self.part.start, self.flat.start
        (matrix, kernels), *bias = matrix_views(own, flat, at, self.outputs, self.patch, self.bias)
        taps = self.patch // self.inputs
        kernels = kernels.unflatten(2, (self.inputs, taps)).transpose(2, 3)
        return [(matrix.unflatten(2, (taps, self.inputs)), kernels), *bias]

    def _size(self, shape: Sequence[int], axis: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        size = (shape[2 + axis] + 2 * self.padding[axis] - reach) // self.stride[axis] + 1
        if self.pool is None:
            return size
        (kernel, stride) = self.pool[0][axis], self.pool[1][axis]
        return (size - kernel) // stride * stride + kernel if size >= kernel else size

    def _patches(self, x: Tensor, height: int, width: int) -> Tensor:
        """[N, height * width, patch] in whole lines, with a 1 for the bias."""
        image = x.permute(0, 2, 3, 1).contiguous()
        if any(self.padding):
            image = F.pad(image, (0, 0, self.padding[1], self.padding[1], self.padding[0], self.padding[0]))
        s, (dh, dw) = image.stride(), self.dilation
        patches = image.as_strided(
            (len(x), height, width, *self.kernel, self.inputs),
            (s[0], s[1] * self.stride[0], s[2] * self.stride[1], s[1] * dh, s[2] * dw, 1),
        )
        whole = padded(self.patch + self.bias)
        out = image.new_empty(len(x), height, width, whole)
        if whole > self.patch:
            out[..., self.patch :] = 0
        if self.bias:
            out[..., self.patch] = 1
        out[..., : self.patch].unflatten(3, (*self.kernel, self.inputs)).copy_(patches)
        return out.view(len(x), height * width, whole)

    def forward(self, weights: Tensor, x: Tensor, apart: bool) -> tuple[Tensor, Saved]:
        clients = len(weights)
        height, width = self._size(x.shape, 0), self._size(x.shape, 1)
        patches = self._patches(x, height, width).unflatten(0, (clients, -1))
        matrices = matrices_of(weights[:, self.part], self.outputs, self.patch + self.bias)
        if self.outputs <= _FEW:
            matrices = F.pad(matrices, (0, 0, 0, padded(self.outputs) - self.outputs))
        out = (products if apart else together)(patches, matrices.transpose(1, 2))
        out = out[..., : self.outputs].reshape(len(x), height, width, self.outputs)
        return out.permute(0, 3, 1, 2), (patches, matrices, x.shape, height, width, apart)

    def backward(
        self, weights: Tensor, saved: Saved, gradient: Tensor, wanted: bool
    ) -> tuple[Tensor | None, Outer]:
        patches, matrices, shape, height, width, apart = saved
        n = shape[0]
        d = widened(gradient.permute(0, 2, 3, 1).reshape(*patches.shape[:3], self.outputs))
        back = None
        if wanted:
            spread = (products if apart else together)(d, matrices)[..., : self.patch]
            spread = spread.reshape(n, height, width, *self.kernel, self.inputs)
            (ph, pw), (sh, sw), (dh, dw) = self.padding, self.stride, self.dilation
            image = spread.new_zeros(n, shape[2] + 2 * ph, shape[3] + 2 * pw, self.inputs)
            for row in range(self.kernel[0]):
                for column in range(self.kernel[1]):
                    top, left = row * dh, column * dw
                    image[
                        :, top : top + sh * (height - 1) + 1 : sh, left : left + sw * (width - 1) + 1 : sw
                    ] += spread[:, :, :, row, column]
            back = image[:, ph : ph + shape[2], pw : pw + shape[3]].permute(0, 3, 1, 2)
        return back, Outer(patches, d, self.outputs, self.part.stop - self.part.start)


@dataclass(frozen=True)
class GroupNorm:
    layer: int
    part: slice
    flat: slice
    channels: int
    groups: int
    eps: float

    def views(self, own: Tensor, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(own[:, self.part][:, : 2 * self.channels], flat[:, self.flat])]

    def _affine(self, weights: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Scale and offset [rows, channels, 1] of the batch."""
        pair = weights[:, self.part][:, : 2 * self.channels].reshape(len(weights), 1, 2, self.channels)
        pair = pair.expand(-1, rows // len(weights), -1, -1).reshape(rows, 2, self.channels, 1)
        return pair[:, 0], pair[:, 1]

    def forward(self, weights: Tensor, x: Tensor, apart: bool) -> tuple[Tensor, Saved]:
        # As [N, C, positions]: of an image torch guesses the memory order, and the guess depends on the number of rows.
        scale, offset = self._affine(weights, len(x))
        leaf = x.detach().reshape(len(x), self.channels, -1).contiguous().requires_grad_()
        with torch.enable_grad():
            normal = torch.group_norm(leaf, self.groups, None, None, self.eps)
        return (normal.detach() * scale + offset).view(x.shape), (leaf, normal, x.shape)

    def backward(
        self, weights: Tensor, saved: Saved, gradient: Tensor, wanted: bool
    ) -> tuple[Tensor | None, Given]:
        leaf, normal, shape = saved
        clients = len(weights)
        gradient = gradient.reshape(leaf.shape).contiguous()
        split = (clients, len(gradient) // clients, self.channels, -1)
        parts = ((normal.detach() * gradient).view(split).sum(3), gradient.view(split).sum(3))
        scale, _ = self._affine(weights, len(leaf))
        back = torch.autograd.grad(normal, leaf, gradient * scale)[0].view(shape) if wanted else None
        return back, Given(F.pad(torch.cat(parts, 2), (0, self.part.stop - self.part.start - 2 * self.channels)))


@dataclass(frozen=True)
class Relu:
    layer: None = None

    def forward(self, weights: Tensor, x: Tensor, apart: bool) -> tuple[Tensor, Saved]:
        out = x.relu()
        return out, out

    def backward(self, weights: Tensor, saved: Saved, gradient: Tensor, wanted: bool) -> tuple[Tensor, None]:
        return torch.ops.aten.threshold_backward(gradient, saved, 0), None


@dataclass(frozen=True)
class MaxPool:
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil: bool
    layer: None = None

    def _settings(self) -> tuple[object, ...]:
        return self.kernel, self.stride, self.padding, self.dilation, self.ceil

    def forward(self, weights: Tensor, x: Tensor, apart: bool) -> tuple[Tensor, Saved]:
        out, where = torch.ops.aten.max_pool2d_with_indices(x, *self._settings())
        return out, (x, where)

    def backward(self, weights: Tensor, saved: Saved, gradient: Tensor, wanted: bool) -> tuple[Tensor, None]:
        x, where = saved
        return torch.ops.aten.max_pool2d_with_indices_backward(gradient, x, *self._settings(), where), None


@dataclass(frozen=True)
class Free:
    """A layer without parameters that treats the rows of a batch separately; its gradient by autograd."""

    function: Callable[[Tensor], Tensor]
    layer: None = None

    def forward(self, weights: Tensor, x: Tensor, apart: bool) -> tuple[Tensor, Saved]:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            out = self.function(leaf)
        return out.detach(), (leaf, out)

    def backward(self, weights: Tensor, saved: Saved, gradient: Tensor, wanted: bool) -> tuple[Tensor, None]:
        leaf, out = saved
        return torch.autograd.grad(out, leaf, gradient)[0], None


@dataclass(frozen=True)
class Elementwise:
    """An activation. It runs on a flat vector of a round length: the few elements left over at the end would
    otherwise be computed by other code, and which elements these are depends on the size of the stack."""

    module: nn.Module
    layer: None = None

    def forward(self, weights: Tensor, x: Tensor, apart: bool) -> tuple[Tensor, Saved]:
        flat = _in_memory_order(x).reshape(-1)
        leaf = F.pad(flat, (0, -flat.numel() % 64)).detach().requires_grad_()
        with torch.enable_grad():
            out = self.module(leaf.clone() if getattr(self.module, "inplace", False) else leaf)
        return self._like(out.detach(), x), (leaf, out)

    def backward(self, weights: Tensor, saved: Saved, gradient: Tensor, wanted: bool) -> tuple[Tensor, None]:
        leaf, out = saved
        flat = _in_memory_order(gradient).reshape(-1)
        back = torch.autograd.grad(out, leaf, F.pad(flat, (0, leaf.numel() - flat.numel())))[0]
        return self._like(back, gradient), None

    @staticmethod
    def _like(flat: Tensor, x: Tensor) -> Tensor:
        shape = _in_memory_order(x).shape
        values = flat[: x.numel()].view(shape)
        return values.permute(0, 3, 1, 2) if x.dim() == 4 else values


def plain_group_norm(x: Tensor, groups: int, eps: float) -> Tensor:
    """GroupNorm without parameters; see `GroupNorm` for the reshaping."""
    flat = x.reshape(len(x), x.shape[1], -1).contiguous()
    return torch.group_norm(flat, groups, None, None, eps).view(x.shape)


def _in_memory_order(x: Tensor) -> Tensor:
    """Images as [N, H, W, C], the order in which this engine keeps them."""
    return x.permute(0, 2, 3, 1) if x.dim() == 4 else x


Layer = Linear | Conv | GroupNorm | Relu | MaxPool | Free | Elementwise
