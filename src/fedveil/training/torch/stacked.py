"""All clients of a chunk as one stack: the fast engine in plain torch.

Clients are folded into the batch axis (client after client), weights are a matrix [K, P], and every layer with
parameters multiplies by its own client's weights through batched matrix products. One forward and
one backward pass capture each layer's input and the gradient of its output; from these come the per-example norms, the
clip factors and the clipped sums, without a second backward pass:

- the gradient of example b in a Linear or Conv2d layer is a sum of outer products  sum_t d[b,t] (x) a[b,t];
  with one position (Linear) its norm is |d| |a|, else the gradient is written out: what is summed is what was measured;
- norms, factors and sums are float64 (see `protect.bounded` for what that proves).

Images are kept channels-last in memory. Weights are kept as the products need them, every layer a matrix in whole cache
lines with its bias as one more column and zeros behind (convolutions: out x (row, column, in)); `encode` and `decode`
translate at the beginning and at the end. A chunk's memory is bounded by `chunk_for`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from fedveil.errors import UserError
from fedveil.models import chain
from fedveil.models.layout import Layout, layout_of
from fedveil.training import losses as losses_of
from fedveil.training.contract import ClientWork, Examples, LocalPlan, LocalResult
from fedveil.training.torch import descent
from fedveil.training.torch.descent import Clipping, Pass
from fedveil.training.torch.layers import (
    Conv,
    Elementwise,
    Free,
    Given,
    GroupNorm,
    Layer,
    Linear,
    MaxPool,
    Outer,
    Relu,
    materialise,
    measure,
    plain_group_norm,
    room_for,
    size_of,
    sum_plainly,
    sum_up,
)

Tensor = torch.Tensor

_ELEMENTWISE = (
    nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus,
    nn.Softsign, nn.Hardtanh, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink,
    nn.Softshrink, nn.Hardshrink, nn.Threshold,
)  # fmt: skip
_POOLING = (nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d, nn.Unflatten)
_CACHE = 1 << 22  # numbers that a chunk may keep busy (16 MiB of float32): 7 clients of the papers' CNN
_MOST_CLIENTS = 64


def leaves(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The layers of a (nested) Sequential in order, with their names."""
    if type(module) is not nn.Sequential:
        own = not prefix and type(module).__module__.partition(".")[0] != "torch"
        return (chain.traced(module) if own else None) or [(prefix, module)]
    out = []
    for name, child in module._modules.items():  # named_children() leaves out a layer that is used again
        if child is not None:
            out += leaves(child, f"{prefix}.{name}" if prefix else name)
    return out


def why_not(module: nn.Module) -> str | None:
    """None if this engine can train the module, else the reason, naming the layer."""
    if not any(True for _ in module.parameters()):
        return "the model has no parameters"
    if any(not parameter.requires_grad for parameter in module.parameters()):
        return "some of its weights are frozen"
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
        return "is active" if leaf.training and leaf.p != 0 else None
    if kind is nn.MaxPool2d:
        return "returns indices" if leaf.return_indices else None
    if kind is nn.Flatten:
        return "flattens the batch axis" if leaf.start_dim == 0 else None
    if kind is nn.Unflatten and leaf.dim == 0:
        return "changes the batch axis"
    known = (nn.Linear, nn.ReLU, nn.Identity, *_ELEMENTWISE, *_POOLING)
    return None if kind in known else "is not one that can be stacked"


def _pair(value: int | str | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _layers(module: nn.Module, layout: Layout) -> list[Layer]:
    """The module as a list of stackable layers."""
    slices = layout.layer_slices()
    found: list[Layer] = []
    end = 0
    for name, leaf in leaves(module):
        room = _room(leaf)
        if room:
            layer = layout.layer_names.index(name)
            flat, part, end = slices[layer], slice(end, end + room), end + room
        if isinstance(leaf, nn.Linear):
            found.append(Linear(layer, part, flat, leaf.in_features, leaf.out_features, leaf.bias is not None))
        elif isinstance(leaf, nn.Conv2d):
            found.append(
                Conv(
                    layer,
                    part,
                    flat,
                    leaf.in_channels,
                    leaf.out_channels,
                    _pair(leaf.kernel_size),
                    _pair(leaf.stride),
                    _pair(leaf.padding),
                    _pair(leaf.dilation),
                    leaf.bias is not None,
                )
            )
        elif isinstance(leaf, nn.GroupNorm) and leaf.affine:
            found.append(GroupNorm(layer, part, flat, leaf.num_channels, leaf.num_groups, leaf.eps))
        elif isinstance(leaf, nn.GroupNorm):
            found.append(Free(partial(plain_group_norm, groups=leaf.num_groups, eps=leaf.eps)))
        elif isinstance(leaf, nn.ReLU):
            found.append(Relu())
        elif isinstance(leaf, nn.MaxPool2d):
            stride = leaf.kernel_size if leaf.stride is None else leaf.stride
            sides = _pair(leaf.kernel_size), _pair(stride), _pair(leaf.padding), _pair(leaf.dilation)
            found.append(MaxPool(*sides, leaf.ceil_mode))
        elif isinstance(leaf, _ELEMENTWISE):
            found.append(Elementwise(leaf))
        elif not isinstance(leaf, nn.Identity | nn.Dropout):
            found.append(Free(leaf))
    return _sharpen(found)


def _room(leaf: nn.Module) -> int:
    """Numbers that the layer's weights take in whole lines; 0 for a layer without weights."""
    if isinstance(leaf, nn.Linear):
        return room_for(leaf.out_features, leaf.in_features + (leaf.bias is not None))
    if isinstance(leaf, nn.Conv2d):
        return room_for(leaf.out_channels, leaf.weight[0].numel() + (leaf.bias is not None))
    return room_for(1, 2 * leaf.num_channels) if isinstance(leaf, nn.GroupNorm) and leaf.affine else 0


def _sharpen(layers: list[Layer]) -> list[Layer]:
    """Two exact rewrites: pool before ReLU (a maximum is the same either way, and so is its gradient), and no
    convolution outputs that the next pool drops."""
    out = list(layers)
    for i in range(len(out) - 1):
        if isinstance(out[i], Relu) and isinstance(out[i + 1], MaxPool):
            out[i], out[i + 1] = out[i + 1], out[i]
    for i, layer in enumerate(out):
        if isinstance(layer, Conv):
            after = next((other for other in out[i + 1 :] if not isinstance(other, Relu | Elementwise)), None)
            if (
                isinstance(after, MaxPool)
                and after.padding == (0, 0)
                and after.dilation == (1, 1)
                and not after.ceil
            ):
                out[i] = replace(layer, pool=(after.kernel, after.stride))
    return out


@dataclass(frozen=True)
class Net:
    """A module compiled for stacks of clients."""

    layout: Layout
    layers: tuple[Layer, ...]
    rows: int  # most rows per client and pass
    row_cost: int  # numbers that one example keeps busy
    outputs: torch.Size = field(default_factory=lambda: torch.Size([1]))

    @property
    def size(self) -> int:
        """Numbers that a client's weights take here."""
        return max(layer.part.stop for layer in self._trained)

    @property
    def _trained(self) -> list[Linear | Conv | GroupNorm]:
        return [layer for layer in self.layers if isinstance(layer, Linear | Conv | GroupNorm)]

    def encode(self, flat: Tensor) -> Tensor:
        """From parameter order to this engine's order."""
        return self.add(flat.new_zeros(len(flat), self.size), flat)

    def decode(self, own: Tensor) -> Tensor:
        """Back to parameter order."""
        flat = own.new_empty(len(own), self.layout.size)
        for layer in self._trained:
            for here, there in layer.views(own, flat):
                there.copy_(here)
        return flat

    def padding(self, like: Tensor) -> Tensor:
        """[1, P] with a 1 in each place that is no parameter."""
        return 1 - self.encode(like.new_ones(1, self.layout.size))

    def add(self, own: Tensor, flat: Tensor) -> Tensor:
        """Add numbers in parameter order to `own`."""
        for layer in self._trained:
            for here, there in layer.views(own, flat):
                here.add_(there)
        return own

    def clipped(
        self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, clipping: Clipping, loss: str
    ) -> Pass:
        """Losses, norms and the clipped sum of a group of clients (see `descent.Network`)."""
        return descent.passed(self._pass, weights, x, y, mask, clipping, loss)

    def _pass(
        self,
        weights: Tensor,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        clipping: Clipping,
        loss: str,
        without: Tensor | None = None,
    ) -> Pass:
        """One pass; the captured gradients of the rows in `without` [K, B] are taken for 0 whatever they are."""
        clients = len(weights)
        tape = []
        out = x
        for layer in self.layers:
            out, saved = layer.forward(weights, out, clipping.bounded)
            tape.append(saved)
        losses, gradient = losses_of.of_batch(out, y, descent.by_row(mask, clipping.copies), loss)
        losses = descent.mean_of_copies(losses, clipping.copies).view(clients, -1)
        gradient = gradient.div_(clipping.copies) if clipping.copies > 1 else gradient
        if without is not None:
            losses = losses.masked_fill(without, 0)
        total = torch.empty_like(weights, dtype=torch.float64 if clipping.bounded and clipping.wide else None)
        first = next(i for i, layer in enumerate(self.layers) if layer.layer is not None)
        norms = [losses] * self.layout.layers
        waiting: list[tuple[int, slice, Outer | Given]] = []
        for i in range(len(self.layers) - 1, first - 1, -1):
            layer = self.layers[i]
            back, capture = layer.backward(weights, tape.pop(), gradient, i > first)
            gradient = gradient if back is None else back
            if layer.layer is None or capture is None:
                continue
            if clipping.copies > 1:
                capture = _folded(capture, clipping.copies)
            if clipping.shift is not None and clipping.scale is not None:
                scale = (clipping.scale + self.padding(clipping.scale))[:, layer.part]
                capture = _mapped(capture, clipping.shift[:, layer.part], scale, mask)
            if without is not None:
                capture = _cleared(capture, without)
            if clipping.bounded or clipping.norms:
                norms[layer.layer], capture = measure(capture, clipping.norm)
            if not clipping.bounded:
                sum_plainly(capture, total[:, layer.part])
                continue
            if clipping.flat or isinstance(capture, Outer):  # flat: the factor needs every layer's norm; else to save calls
                waiting.append((layer.layer, layer.part, capture))
                continue
            wide, _ = clipping.factors(norms[layer.layer][:, :, None], mask)
            sum_up(capture, wide[:, :, 0], total[:, layer.part])
        if not clipping.bounded and not clipping.norms:
            return Pass(total, losses, None, None, mask)
        every = torch.stack(norms, 2)
        if not clipping.bounded:
            return Pass(total, losses, every, None, mask)
        if clipping.flat:
            every = size_of(every, clipping.norm)[:, :, None]
        wide, bound = clipping.factors(every, mask)
        for number, part, capture in waiting:
            sum_up(capture, wide[:, :, 0 if clipping.flat else number], total[:, part])
        return Pass(total, losses, every, bound, mask)


def _folded(capture: Outer | Given, copies: int) -> Outer | Given:
    """Copies of an example as one: their outer products are more positions of it, their gradients are added."""
    if isinstance(capture, Outer):
        k, rows, t, _ = capture.a.shape
        shape = k, rows // copies, copies * t, -1
        return replace(capture, a=capture.a.reshape(shape), d=capture.d.reshape(shape))
    apart = capture.values.unflatten(1, (-1, copies))
    total = apart[:, :, 0].clone()
    for copy in range(1, copies):
        total += apart[:, :, copy]
    return Given(total)


def _mapped(capture: Outer | Given, shift: Tensor, scale: Tensor, mask: Tensor | None) -> Given:
    """AdaClip: every example's gradient as (g - shift) / scale, 0 for padding."""
    values = (materialise(capture).values - shift[:, None]) / scale[:, None]
    return Given(values if mask is None else values * mask[:, :, None])


def _cleared(capture: Outer | Given, rows: Tensor) -> Outer | Given:
    """The same with zeros for these rows [K, B] (a factor 0 would leave NaN as it is)."""
    if isinstance(capture, Given):
        return Given(capture.values.masked_fill(rows[:, :, None], 0))
    wide = rows[:, :, None, None]
    return replace(capture, a=capture.a.masked_fill(wide, 0), d=capture.d.masked_fill(wide, 0))


def compile_net(module: nn.Module, shape: Sequence[int]) -> Net:
    """Compile a module for examples of `shape`; UserError if `why_not` has a reason."""
    reason = why_not(module)
    if reason:
        raise UserError(f"The stacked engine cannot train this model: {reason}. Use engine = auto.")
    layout = layout_of(module)
    layers = tuple(_layers(module, layout))
    net = Net(layout, layers, 1, 1)
    weights, out, cost = torch.zeros(1, net.size), torch.zeros(1, *shape), 0
    with torch.no_grad():
        for layer in layers:
            out, saved = layer.forward(weights, out, False)
            cost += out.numel()
            if isinstance(layer, Conv):
                cost += saved[0].numel() + layer.patch * layer.outputs
            elif isinstance(layer, Linear) and out.dim() > 2:
                cost += layer.inputs * layer.outputs
    return replace(net, rows=max(1, _CACHE // max(cost, 1)), row_cost=cost, outputs=out.shape[1:])


def typical_width(work: ClientWork) -> int:
    """A client's mean batch, rounded up; at least 1."""
    return max(1, math.ceil((work.rows >= 0).sum() / max(len(work.rows), 1)))


def chunk_for(net: Net, width: int) -> int:
    """How many clients with batches of `width` rows share a stack: as many as the cache holds, at most 64."""
    per_client = net.row_cost * min(max(width, 1), net.rows) + 3 * net.layout.size
    return int(min(_MOST_CLIENTS, max(1, _CACHE // per_client)))


@descent.one_thread()
def train(
    module: nn.Module,
    start: np.ndarray,
    x: Examples,
    y: Examples,
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
    needs them. `threads` is ignored: one thread of torch; `training.pool` runs processes instead.
    """
    descent.keep_pages()
    data, targets = torch.as_tensor(x, device=device), torch.as_tensor(y, device=device)
    net = compile_net(module, data.shape[1:])
    losses_of.check_targets(net.outputs, targets, plan.loss)
    size = chunk or chunk_for(net, max(map(typical_width, work), default=1) * plan.augment.copies)
    parts = [
        descent.run(net, start, data, targets, work[at : at + size], plan, dtype=dtype, norms=norms)
        for at in range(0, len(work), size)
    ]
    return descent.join(parts, net.layout, plan)
