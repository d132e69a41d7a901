"""Every module, one client at a time: its own forward pass, tapped at the layers that train.

The module runs as its author wrote it (branches, residuals, concatenations, views, attention), with weights as constants.
Each layer that owns trained weights leaves its input on a tape, and one backward pass leaves the gradient of its output
there too; that is all a per-example gradient needs, as in `stacked`:

- Linear (on any number of positions), convolutions, the gates of recurrent cells: sums of outer products. Norms come from
  Gram matrices ("ghost"), or the gradient is written out where that is cheaper; the clipped sum is one product.
- GroupNorm, LayerNorm, RMSNorm: a value per channel. Embedding: rows of the table that were looked up.
- a bare nn.Parameter: a copy per example, of which autograd takes the gradient.

A weight that is used twice has two entries, which are added before the norm is taken. Frozen weights are constants: nothing
is computed for them. Before it is trusted, a compiled module must reproduce plain autograd's gradients on a few
examples; one that does not is trained by torch.func, with a warning that says why.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.errors import UserError
from fedveil.models.layout import Layout, layout_of, unflatten
from fedveil.protect.bounded import ORDERS
from fedveil.training import dropout
from fedveil.training.contract import ClientWork, Examples, LocalPlan, LocalResult
from fedveil.training.torch import descent, functional
from fedveil.training.torch.captures import Given, Outer, materialise, measure, sum_up
from fedveil.training.torch.descent import Clipping, Pass
from fedveil.training.torch.recurrent import gates_of

_NUMBERS = 1 << 26  # numbers that the activations of a pass may take (256 MiB of float32)
_TOLERANCE = 2e-4  # of the trial, relative to the largest gradient; float32 rounding is about 1e-6
_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm) if hasattr(nn, "RMSNorm") else (nn.GroupNorm, nn.LayerNorm)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_RECURRENT = (nn.LSTM, nn.GRU)
_ATTENTION_OUTPUT = "NonDynamicallyQuantizableLinear"  # torch's name for the last layer of MultiheadAttention


class Unfit(Exception):
    """This module cannot be tapped; the text says why."""


@dataclass(frozen=True)
class Rows:
    """Per-example gradients of a table of which rows were looked up: index [B, T], d [B, T, width]."""

    index: Tensor
    d: Tensor
    count: int


@dataclass(frozen=True)
class Kernel:
    """Per-example gradients of a convolution's kernel in the order (out, row, column, in), in which patches are contiguous
    copies; sizes: outputs, positions of the kernel, inputs."""

    inner: Outer | Given
    sizes: tuple[int, int, int]

    def ordered(self, values: Tensor) -> Tensor:
        """[..., n] in the order of the parameter: (out, in, row, column)."""
        return values.reshape(*values.shape[:-1], *self.sizes).transpose(-1, -2).reshape(values.shape)


Capture = Outer | Given | Rows | Kernel
Uses = Callable[[Tensor], Iterator[tuple[str, Capture]]]


@dataclass
class _Record:
    """One tapped output."""

    uses: Uses
    gradient: Tensor | None = None

    def keep(self, gradient: Tensor) -> None:
        self.gradient = gradient


@dataclass
class Tape:
    """What one pass left: per tapped output how to use its gradient, and that gradient once it is known."""

    rows: int
    names: dict[int, str]  # id of a trained parameter -> its name
    records: list[_Record] = field(default_factory=list)
    starts: list[Tensor] = field(default_factory=list)

    def tap(self, out: Tensor, uses: Uses) -> Tensor:
        record = _Record(uses)
        self.records.append(record)
        if not out.requires_grad:  # nothing below trains: the backward pass ends here
            start = out.detach().requires_grad_()
            self.starts.append(start)
            out = start.clone()  # what follows may work in place
        out.register_hook(record.keep)
        return out

    def name(self, parameter: Tensor | None) -> str | None:
        return None if parameter is None else self.names.get(id(parameter))

    def captures(self) -> dict[str, list[Capture]]:
        """All uses of every trained parameter."""
        found: dict[str, list[Capture]] = {name: [] for name in self.names.values()}
        while self.records:
            record = self.records.pop()
            if record.gradient is not None:
                for name, capture in record.uses(record.gradient):
                    found[name].append(capture)
        return found


# ------------------------------------------------------------------------------------------------ tapped layers


def _positions(x: Tensor, rows: int, width: int) -> Tensor:
    """[1, rows, positions, width] of an input whose first axis is the batch (times positions, if it was folded in)."""
    if x.shape[0] % rows:
        raise Unfit(f"a layer gets {x.shape[0]} rows for a batch of {rows}")
    return x.reshape(1, rows, -1, width)


def _linear(tape: Tape, layer: nn.Linear, x: Tensor) -> Tensor:
    out = F.linear(x, layer.weight, layer.bias)
    inputs = x.detach()

    def uses(d: Tensor) -> Iterator[tuple[str, Capture]]:
        wide = _positions(d, tape.rows, layer.out_features)
        if name := tape.name(layer.weight):
            yield name, Outer(_positions(inputs, tape.rows, layer.in_features), wide, False)
        if name := tape.name(layer.bias):
            yield name, Given((wide.sum(2),))

    return tape.tap(out, uses)


def _conv(tape: Tape, layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    if x.shape[0] != tape.rows:
        raise Unfit(f"a convolution gets {x.shape[0]} rows for a batch of {tape.rows}")
    padding = layer._reversed_padding_repeated_twice
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, padding, mode=mode) if any(padding) else x
        padding, own = [0] * len(padding), (0,) * len(layer.kernel_size)
    else:
        own = layer.padding
    function = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv2d
    out = function(x, layer.weight, layer.bias, layer.stride, own, layer.dilation, layer.groups)
    inputs = x.detach()

    def uses(d: Tensor) -> Iterator[tuple[str, Capture]]:
        flat = len(layer.kernel_size) == 1
        image, gradient = (inputs[:, :, None], d[:, :, None]) if flat else (inputs, d)
        wide = gradient.permute(0, 2, 3, 1).reshape(1, tape.rows, -1, layer.out_channels)
        if name := tape.name(layer.weight):
            yield name, _kernel_use(layer, image, padding, wide, gradient.shape[2:])
        if name := tape.name(layer.bias):
            yield name, Given((wide.sum(2),))

    return tape.tap(out, uses)


def _kernel_use(
    layer: nn.Conv1d | nn.Conv2d, image: Tensor, padding: Sequence[int], d: Tensor, size: Sequence[int]
) -> Capture:
    """Patches of the image beside the output's gradient; the columns of a patch in the order of the kernel."""
    kernel, stride, dilation = ((1, *v) if len(v) == 1 else tuple(v) for v in (layer.kernel_size, layer.stride, layer.dilation))
    rows, channels = image.shape[:2]
    image = image.permute(0, 2, 3, 1)
    sides = [*padding, 0, 0][:4]
    image = F.pad(image, (0, 0, *sides)) if any(sides) else image.contiguous()
    s = image.stride()
    patches = image.as_strided(
        (rows, *size, *kernel, channels),
        (s[0], s[1] * stride[0], s[2] * stride[1], s[1] * dilation[0], s[2] * dilation[1], 1),
        image.storage_offset(),
    )
    if layer.groups == 1:
        sizes = (layer.out_channels, kernel[0] * kernel[1], channels)
        return Kernel(Outer(patches.reshape(1, rows, size[0] * size[1], -1), d, False), sizes)
    groups, positions = layer.groups, size[0] * size[1]
    a = patches.permute(0, 1, 2, 5, 3, 4).reshape(rows, positions, groups, -1).permute(0, 2, 1, 3)
    b = d.reshape(rows, positions, groups, -1).permute(0, 2, 3, 1)
    return Given(((b @ a).reshape(1, rows, -1),))


def _norm(tape: Tape, layer: nn.GroupNorm | nn.LayerNorm | nn.RMSNorm, x: Tensor) -> Tensor:
    if x.shape[0] % tape.rows:
        raise Unfit(f"a norm gets {x.shape[0]} rows for a batch of {tape.rows}")
    out = type(layer).forward(layer, x)  # type: ignore[arg-type]  # of its own class
    inputs = x.detach()

    def uses(d: Tensor) -> Iterator[tuple[str, Capture]]:
        if isinstance(layer, nn.GroupNorm):
            normal = F.group_norm(inputs, layer.num_groups, None, None, layer.eps)
            shape: tuple[int, ...] = (tape.rows, -1, layer.num_channels, d[0, 0].numel())
            parts, axes = ((normal * d), d), (1, 3)
        else:
            function = F.layer_norm if isinstance(layer, nn.LayerNorm) else F.rms_norm
            normal = function(inputs, layer.normalized_shape, None, eps=layer.eps)  # type: ignore[arg-type]
            shape = (tape.rows, -1, layer.weight.numel())
            parts, axes = ((normal * d), d), (1,)  # type: ignore[assignment]
        for parameter, part in zip((layer.weight, getattr(layer, "bias", None)), parts, strict=True):
            if name := tape.name(parameter):
                yield name, Given((part.reshape(shape).sum(axes).view(1, tape.rows, -1),))

    return tape.tap(out, uses)


def _embedding(tape: Tape, layer: nn.Embedding, x: Tensor) -> Tensor:
    out = F.embedding(x, layer.weight)
    index = x.detach()

    def uses(d: Tensor) -> Iterator[tuple[str, Capture]]:
        rows = index.reshape(tape.rows, -1)
        wide = d.reshape(tape.rows, -1, layer.embedding_dim)
        if layer.padding_idx is not None:
            wide = wide.masked_fill((rows == layer.padding_idx)[:, :, None], 0)
        if name := tape.name(layer.weight):
            yield name, Rows(rows, wide, layer.num_embeddings)

    return tape.tap(out, uses)


def _recurrent(
    tape: Tape, layer: nn.LSTM | nn.GRU, x: Tensor, state: object = None
) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
    """Cells unrolled in time; a gate's gradient is an outer product with the input, and with the state before it."""
    if x.dim() != 3 or x.shape[0] != tape.rows or state is not None:
        raise Unfit(f"a {type(layer).__name__} is used with a given state or without batch_first")

    def gate(out: Tensor, a: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        def uses(d: Tensor) -> Iterator[tuple[str, Capture]]:
            wide = d.reshape(1, tape.rows, -1, weight.shape[0])
            if name := tape.name(weight):
                yield name, Outer(a.detach().reshape(1, tape.rows, -1, weight.shape[1]), wide, False)
            if name := tape.name(bias):
                yield name, Given((wide.sum(2),))

        return tape.tap(out, uses)

    return gates_of(layer, x, gate)


def _attention(
    tape: Tape, layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, **more: Any
) -> tuple[Tensor, None]:
    """Self- or cross-attention with batch_first, written out so that its four products can be tapped."""
    unknown = [k for k, v in more.items() if k in ("attn_mask", "key_padding_mask") and v is not None]
    if not layer.batch_first or not layer._qkv_same_embed_dim or layer.bias_k is not None or more.get("is_causal"):
        raise Unfit("a MultiheadAttention without batch_first, or with other sizes of keys than of queries")
    masks = {k: more[k] for k in unknown}
    width, heads = layer.embed_dim, layer.num_heads
    parts = []
    for at, x in enumerate((query, key, value)):
        rows = slice(at * width, (at + 1) * width)
        bias = None if layer.in_proj_bias is None else layer.in_proj_bias[rows]
        out = F.linear(x, layer.in_proj_weight[rows], bias)
        parts.append(tape.tap(out, partial(_part_uses, tape, layer, x.detach(), rows)))
    n, length = query.shape[:2]
    q, k, v = (p.reshape(n, -1, heads, width // heads).transpose(1, 2) for p in parts)
    scores = q @ k.transpose(2, 3) / (width // heads) ** 0.5
    for kind, given in masks.items():
        wide = given[:, None, None, :] if kind == "key_padding_mask" else (
            given if given.dim() == 2 else given.view(n, heads, *given.shape[1:])
        )  # fmt: skip
        scores = scores.masked_fill(wide, -torch.inf) if wide.dtype == torch.bool else scores + wide
    mixed = torch.softmax(scores, -1) @ v
    out = _linear(tape, layer.out_proj, mixed.transpose(1, 2).reshape(n, length, width))
    return out, None


def _part_uses(tape: Tape, layer: nn.MultiheadAttention, x: Tensor, rows: slice, d: Tensor) -> Iterator[tuple[str, Capture]]:
    """Queries, keys and values share one matrix: each has its third of it."""
    width = layer.embed_dim
    a, wide = _positions(x, tape.rows, width), _positions(d, tape.rows, width)
    full = wide.new_zeros(*wide.shape[:3], 3 * width)
    full[..., rows] = wide
    if name := tape.name(layer.in_proj_weight):
        yield name, Outer(a, full, False)
    if name := tape.name(layer.in_proj_bias):
        yield name, Given((full.sum(2),))


_TAPPED: dict[type[nn.Module], Callable[..., object]] = {
    nn.Linear: _linear, nn.Conv1d: _conv, nn.Conv2d: _conv, nn.Embedding: _embedding, nn.LSTM: _recurrent,
    nn.GRU: _recurrent, nn.MultiheadAttention: _attention, **dict.fromkeys(_NORMS, _norm),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- the compiled module


def why_not(module: nn.Module) -> str | None:
    """None if this engine can try the module, else the reason, naming the layer."""
    if not any(p.requires_grad for p in module.parameters()):
        return "the model has nothing to train"
    for name, layer in module.named_modules():
        where = f"layer '{name or 'model'}' ({type(layer).__name__})"
        own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
        if not own:
            continue
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            return f"{where} mixes the examples of a batch"
        if isinstance(layer, nn.RNNBase) and (type(layer) not in _RECURRENT or not layer.batch_first or layer.proj_size):
            return f"{where} is a recurrent layer of another kind than nn.LSTM or nn.GRU with batch_first=True"
        if type(layer) is nn.Embedding and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
            return f"{where} changes its weights or gradients by frequency"
        if type(layer) in _TAPPED and (layer._forward_hooks or layer._forward_pre_hooks):
            return f"{where} has hooks"
        plain = isinstance(layer, nn.ParameterList | nn.ParameterDict) or type(layer).__name__ == _ATTENTION_OUTPUT
        if type(layer).__module__.startswith("torch.nn.") and type(layer) not in _TAPPED and not plain:
            return f"{where} is not one that can be tapped"
    return None


def _bare(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Trained parameters that no tapped layer owns: (name, owner, attribute)."""
    out = []
    for prefix, owner in module.named_modules():
        if type(owner) in _TAPPED or type(owner).__name__ == _ATTENTION_OUTPUT:
            continue
        for attribute, parameter in owner._parameters.items():
            if parameter is not None and parameter.requires_grad:
                out.append((f"{prefix}.{attribute}" if prefix else attribute, owner, attribute))
    return out


def _spread(parameter: Tensor, rows: int, ones: int) -> Tensor:
    """A copy per example: [rows, *shape] with `ones` axes between, or over a leading axis of 1 (ones = -1)."""
    values = parameter.detach()
    if ones < 0:
        return values.expand(rows, *values.shape[1:]).clone()
    return values.expand(rows, *values.shape).reshape(rows, *[1] * ones, *values.shape).clone()


class Place(TypedDict):
    """Key, step and first row of a pass, for dropout."""

    key: bytes
    step: int
    first: int


@dataclass(frozen=True)
class Net:
    """A copy of the module, tapped. `spread`: axes between the batch and each bare parameter's own, by name."""

    module: nn.Module
    layout: Layout
    rows: int
    spread: tuple[tuple[str, int], ...] = ()
    outputs: torch.Size = field(default_factory=lambda: torch.Size([1]))
    place: Place = field(default_factory=lambda: Place(key=bytes(16), step=0, first=0))

    def encode(self, flat: Tensor) -> Tensor:
        """This engine keeps weights in parameter order."""
        return flat

    def decode(self, own: Tensor) -> Tensor:
        return own

    def at(self, keys: Sequence[bytes], step: int, first: int) -> None:
        """Which client's examples the next pass gets (dropout's masks depend on it)."""
        self.place.update({"key": keys[0], "step": step, "first": first})

    def forward(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Tape]:
        """Outputs for a batch, and the tape."""
        parameters = dict(self.module.named_parameters())
        for name, value in unflatten(weights, self.layout).items():
            parameters[name].copy_(value)
        names = {id(parameters[name]): name for name in self.layout.names}
        tape = Tape(len(x), names)
        whole = [(layer, dict(layer._parameters)) for layer in self.module.modules()]
        spread = dict(self.spread)
        try:
            for name, owner, attribute in _bare(self.module):
                copied = _spread(parameters[name], len(x), spread[name])
                owner._parameters.pop(attribute)
                with torch.enable_grad():
                    object.__setattr__(owner, attribute, tape.tap(copied, partial(_given, name, len(x))))
            for layer in self.module.modules():
                run = _TAPPED.get(type(layer))
                if run and any(p.requires_grad for p in layer.parameters(recurse=type(layer) is nn.MultiheadAttention)):
                    layer.forward = partial(run, tape, layer)  # type: ignore[method-assign]
            for name, layer in dropout.layers(self.module).items():
                layer.forward = partial(dropout.drop, layer=layer, name=name, **self.place)  # type: ignore[method-assign]
            for parameter in self.module.parameters():
                parameter.requires_grad_(False)
            last = x.dim() == 4  # images with channels last: convolutions and patches take less time
            with torch.enable_grad():
                return self.module(x.contiguous(memory_format=torch.channels_last) if last else x), tape
        finally:
            for layer, own in whole:
                for attribute in own.keys() - layer._parameters.keys():
                    layer.__dict__.pop(attribute, None)
                layer._parameters.clear()
                layer._parameters.update(own)  # in their order
                layer.__dict__.pop("forward", None)
            for name in self.layout.names:
                parameters[name].requires_grad_()

    def clipped(
        self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, clipping: Clipping, loss: str
    ) -> Pass:
        """Losses, norms and the clipped sum of one client (see `descent.Network`)."""
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
        out, tape = self.forward(weights[0], x)
        losses, gradient = descent.loss_and_gradient(out.detach(), y, mask, loss)
        losses = losses.view(1, -1)
        losses = losses if without is None else losses.masked_fill(without, 0)
        if out.requires_grad:
            torch.autograd.grad(out, tape.starts, gradient, allow_unused=True)
        del out
        found = tape.captures()
        total = torch.zeros_like(weights)
        slices = dict(zip(self.layout.names, _slices(self.layout), strict=True))
        merged: dict[str, Capture] = {}
        wanted = clipping.bounded or clipping.norms
        squares: list[list[Tensor]] = [[] for _ in range(self.layout.layers)]
        for name, layer in zip(self.layout.names, self.layout.layer_of, strict=True):
            if not found[name]:
                if clipping.shift is not None:  # an example that does not touch a weight has gradient 0, mapped as any other
                    size = slices[name].stop - slices[name].start
                    found[name] = [Given((weights.new_zeros(1, len(x), size),))]
                else:
                    continue
            capture = _joined(found.pop(name), slices[name])
            if clipping.shift is not None and clipping.scale is not None:
                part = slices[name]
                capture = _mapped(capture, clipping.shift[:, part], clipping.scale[:, part])
            if without is not None:
                capture = _cleared(capture, without)
            if wanted:
                norm, capture = _measured(capture, clipping.norm)
                squares[layer].append(norm if clipping.order == 1 else norm.square())
            merged[name] = capture
        if not wanted:
            for name, capture in merged.items():
                _sum_up(capture, mask, total[:, slices[name]])
            return Pass(total, losses, None, None, mask)
        nothing = torch.zeros_like(losses)
        every = torch.stack([sum(parts, nothing) for parts in squares], 2)
        every = every if clipping.order == 1 else every.sqrt()
        norms = torch.linalg.vector_norm(every, clipping.order, dim=2, keepdim=True) if clipping.flat else every
        if not clipping.bounded:
            factors, bound = None, None
        else:
            factors, bound = clipping.factors(norms, mask)
        for name, layer in zip(self.layout.names, self.layout.layer_of, strict=True):
            if name in merged:
                own = mask if factors is None else factors[:, :, 0 if clipping.flat else layer]
                _sum_up(merged.pop(name), own, total[:, slices[name]])
        return Pass(total, losses, norms, bound, mask)


def _given(name: str, rows: int, d: Tensor) -> Iterator[tuple[str, Capture]]:
    yield name, Given((d.reshape(1, rows, -1),))


def _slices(layout: Layout) -> list[slice]:
    return [slice(at, at + size) for at, size in zip(layout.offsets, layout.sizes, strict=True)]


def _joined(uses: list[Capture], part: slice) -> Capture:
    """All uses of one parameter as one: positions are put side by side, gradients added."""
    if len(uses) == 1:
        return uses[0]
    if all(isinstance(use, Outer) for use in uses):
        return Outer(torch.cat([u.a for u in uses], 2), torch.cat([u.d for u in uses], 2), False)  # type: ignore[union-attr]
    if all(isinstance(use, Kernel) and isinstance(use.inner, Outer) for use in uses):
        first = uses[0]
        assert isinstance(first, Kernel)
        inner = _joined([use.inner for use in uses], part)  # type: ignore[union-attr]
        assert isinstance(inner, Outer)
        return replace(first, inner=inner)
    if all(isinstance(use, Rows) for use in uses):
        first = uses[0]
        assert isinstance(first, Rows)
        return Rows(torch.cat([u.index for u in uses], 1), torch.cat([u.d for u in uses], 1), first.count)  # type: ignore[union-attr]
    total = _written(uses[0])
    for use in uses[1:]:
        total = total + _written(use)
    return Given((total,))


def _written(capture: Capture) -> Tensor:
    """Every example's gradient of one parameter, [1, B, n]."""
    if isinstance(capture, Rows):
        rows, _, width = capture.d.shape
        out = capture.d.new_zeros(rows, capture.count, width)
        out.scatter_add_(1, capture.index[:, :, None].expand(-1, -1, width), capture.d)
        return out.view(1, rows, -1)
    if isinstance(capture, Kernel):
        return capture.ordered(materialise(capture.inner).parts[0])
    return materialise(capture).parts[0]


def _mapped(capture: Capture, shift: Tensor, scale: Tensor) -> Given:
    """AdaClip: every example's gradient as (g - shift) / scale."""
    return Given(((_written(capture) - shift[:, None]) / scale[:, None],))


def _cleared(capture: Capture, rows: Tensor) -> Capture:
    """The same with zeros for these rows [1, B]."""
    if isinstance(capture, Kernel):
        inner = _cleared(capture.inner, rows)
        assert isinstance(inner, Outer | Given)
        return replace(capture, inner=inner)
    if isinstance(capture, Rows):
        return replace(capture, d=capture.d.masked_fill(rows[0, :, None, None], 0))
    if isinstance(capture, Given):
        return Given(tuple(part.masked_fill(rows[:, :, None], 0) for part in capture.parts))
    wide = rows[:, :, None, None]
    return replace(capture, a=capture.a.masked_fill(wide, 0), d=capture.d.masked_fill(wide, 0))


def _measured(capture: Capture, kind: str) -> tuple[Tensor, Capture]:
    """Per-example norms [1, B] of one parameter, and the capture as it is cheapest to sum."""
    if isinstance(capture, Kernel):
        norm, inner = measure(capture.inner, kind)
        return norm, replace(capture, inner=inner)
    if not isinstance(capture, Rows):
        return measure(capture, kind)
    if ORDERS[kind] == 1:
        return torch.stack([_written(replace(capture, index=i[None], d=d[None])).abs().sum((0, 2))[0]
                            for i, d in zip(capture.index, capture.d, strict=True)])[None], capture  # fmt: skip
    d = capture.d.double()
    same = capture.index[:, :, None] == capture.index[:, None, :]
    squares = ((d @ d.transpose(1, 2)) * same).sum((1, 2)).clamp_(min=0)
    return squares.sqrt().to(capture.d.dtype)[None], capture


def _sum_up(capture: Capture, factors: Tensor | None, out: Tensor) -> None:
    if isinstance(capture, Kernel):
        total = torch.empty_like(out, memory_format=torch.contiguous_format)
        sum_up(capture.inner, factors, total)
        out.copy_(capture.ordered(total))
        return
    if not isinstance(capture, Rows):
        sum_up(capture, factors, out)
        return
    d = capture.d if factors is None else capture.d * factors[0, :, None, None]
    width = d.shape[2]
    table = out.view(capture.count, width)
    table.index_add_(0, capture.index.reshape(-1), d.reshape(-1, width))


# ----------------------------------------------------------------------------------------------------- compiling


def compile_net(module: nn.Module, sample: Tensor) -> Net:
    """Compile a module; `sample` [n, ...] are a few examples to try it on. Unfit if it does not give plain autograd's
    gradients on them."""
    copied = copy.deepcopy(module)
    for layer in copied.modules():
        if hasattr(layer, "inplace"):
            layer.inplace = False  # type: ignore[assignment]
    if sample.dim() == 4:
        copied.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layout = layout_of(copied)
    net = Net(copied, layout, 1)
    net = replace(net, spread=_trial(net, sample, _signature(module, sample)))
    with torch.no_grad():
        weights = torch.cat([p.detach().reshape(-1) for p in copied.parameters() if p.requires_grad])
        out, tape = net.forward(weights, sample[:1])
        cost = sum(_size(record.uses) for record in tape.records) + 1
    return replace(net, rows=max(1, _NUMBERS // max(cost * 4, 1)), outputs=out.shape[1:])


def _size(uses: Uses) -> int:
    cells = getattr(uses, "__closure__", None) or ()
    return sum(cell.cell_contents.numel() for cell in cells if isinstance(cell.cell_contents, Tensor))


def _signature(module: nn.Module, sample: Tensor) -> str:
    """What decides whether a module can be tapped: its structure, not its numbers."""
    flags = [(name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters()]
    return repr((type(module), repr(module), flags, tuple(sample.shape[1:])))


_tried: dict[str, tuple[tuple[str, int], ...] | str] = {}  # outcome of the trial by signature; the last few


def _trial(net: Net, sample: Tensor, signature: str) -> tuple[tuple[str, int], ...]:
    """How bare parameters spread over a batch so that taps give plain autograd's gradients on the sample."""
    if signature not in _tried:
        if len(_tried) >= 16:
            _tried.pop(next(iter(_tried)))
        try:
            _tried[signature] = _try(net, sample)
        except Unfit as reason:
            _tried[signature] = str(reason)
    outcome = _tried[signature]
    if isinstance(outcome, str):
        raise Unfit(outcome)
    return outcome


def _try(net: Net, sample: Tensor) -> tuple[tuple[str, int], ...]:
    bare = _bare(net.module)
    kinds = list(dict.fromkeys((type(owner), attribute) for _, owner, attribute in bare))
    if len(kinds) > 4:
        raise Unfit(f"it has {len(kinds)} kinds of bare parameters")
    weights = torch.cat([p.detach().reshape(-1) for p in net.module.parameters() if p.requires_grad])
    rows = sample[:3]
    wanted = _plain(net, weights, rows)
    largest = max(float(wanted.abs().max()), 1e-12)
    why = "its taps do not give plain autograd's gradients"
    for choice in product((-1, 0, 1, 2, 3), repeat=len(kinds)):
        by_kind = dict(zip(kinds, choice, strict=True))
        spread = tuple((name, by_kind[type(owner), attribute]) for name, owner, attribute in bare)
        try:
            with torch.no_grad():
                got = _tapped(replace(net, spread=spread), weights, rows)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, NotImplementedError) as wrong:
            why = f"{type(wrong).__name__}: {str(wrong)[:120]}"
            continue
        if got.shape == wanted.shape and float((got - wanted).abs().max()) <= _TOLERANCE * largest:
            return spread
    raise Unfit(why)


def _plain(net: Net, weights: Tensor, rows: Tensor) -> Tensor:
    """Gradients [n, P] of the sum of a fixed mix of the outputs, one example at a time, by autograd on the module itself."""
    out = []
    parameters = [net.module.get_parameter(name) for name in net.layout.names]
    for at, row in enumerate(rows):
        with torch.enable_grad(), dropout.keyed(net.module, bytes(16), 0, at):
            value = net.module(row[None])
            _check_output(value)
            gradients = torch.autograd.grad((value * _mix(value)).sum(), parameters, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        out.append(torch.cat([part.reshape(-1) for part in parts]))
    return torch.stack(out)


def _tapped(net: Net, weights: Tensor, rows: Tensor) -> Tensor:
    out, tape = net.forward(weights, rows)
    _check_output(out)
    if len(out) != len(rows):
        raise Unfit(f"it gives {len(out)} outputs for {len(rows)} examples")
    if out.requires_grad:
        torch.autograd.grad(out, tape.starts, _mix(out).expand_as(out), allow_unused=True)
    found = tape.captures()
    parts = [
        _written(_joined(found[name], part))[0] if found[name] else weights.new_zeros(len(rows), part.stop - part.start)
        for name, part in zip(net.layout.names, _slices(net.layout), strict=True)
    ]
    return torch.cat(parts, 1)


def _mix(out: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, out[0].numel()).reshape(1, *out.shape[1:])


def _check_output(out: object) -> None:
    if not isinstance(out, Tensor):
        raise Unfit(f"it gives a {type(out).__name__}, not a tensor")


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
    """Local training of every client in `work`, one after the other; by torch.func if the module cannot be tapped."""
    reason = why_not(module)
    if reason:
        raise UserError(f"The graph engine cannot train this model: {reason}. Use engine = auto.")
    data, targets = torch.as_tensor(x, device=device), torch.as_tensor(y, device=device)
    try:
        net = compile_net(module.to(dtype) if dtype != torch.float32 else module, data[:3].to(dtype))
    except Unfit as unfit:
        random = functional.draws(module)
        if random:
            raise UserError(f"This model cannot be trained with per-example gradients: {unfit}; and {random}.") from unfit
        warnings.warn(f"Engine: torch.func, slower, because {unfit}.", stacklevel=2)
        return functional.train(module, start, x, y, work, plan, dtype=dtype, device=device, norms=norms)
    descent.check_targets(net.outputs, targets, plan.loss)
    parts = [descent.run(net, start, data, targets, [one], plan, dtype=dtype, norms=norms) for one in work]
    return descent.join(parts, net.layout, plan)
