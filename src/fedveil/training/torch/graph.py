"""Every module, one client at a time: the graph of what one example goes through (`trace`), run for many of them (`batched`).

Residuals, attention, recurrent cells, shared and frozen weights, keyed dropout: whatever the module's author wrote. An
example's gradient is written out, its norm is taken of those very numbers in float64, and they are added with their
factor in float64 (`protect.bounded`). Before it is trusted, a traced module must reproduce plain autograd's gradients on
a few examples; one that cannot be traced is left to `functional`, which is decided where engines are chosen (`untraced`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.errors import UserError
from fedveil.models.layout import Layout, layout_of, unflatten
from fedveil.protect.bounded import ORDERS
from fedveil.training import dropout
from fedveil.training import losses as losses_of
from fedveil.training.contract import ClientWork, Examples, LocalPlan, LocalResult
from fedveil.training.torch import descent, trace
from fedveil.training.torch.batched import compiled
from fedveil.training.torch.descent import Clipping, Pass
from fedveil.training.torch.layers import size_of

_NUMBERS = 1 << 27  # numbers that the activations of a pass may take (512 MiB of float32)
_GRADIENTS = 3 << 22  # numbers that the gradients of a block may take (48 MiB): many more would leave the cache


def why_not(module: nn.Module) -> str | None:
    """None if this engine can try the module, else the reason, naming the layer."""
    if not any(p.requires_grad for p in module.parameters()):
        return "the model has nothing to train"
    for name, layer in module.named_modules():
        where = f"layer '{name or 'model'}' ({type(layer).__name__})"
        if not any(p.requires_grad for p in layer.parameters(recurse=False)):
            continue
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            return f"{where} mixes the examples of a batch"
        if isinstance(layer, nn.RNNBase) and not layer.batch_first:
            return f"{where} takes time before examples; use batch_first=True"
        if isinstance(layer, nn.RNNBase) and layer.dropout and layer.training:
            return f"{where} draws random numbers that no key here controls; use nn.Dropout between layers"
    return None


class Place(TypedDict):
    """Key, step and first row of a pass, for dropout."""

    key: bytes
    step: int
    first: int


@dataclass(frozen=True)
class Net:
    """A traced module."""

    module: nn.Module
    layout: Layout
    program: trace.Program
    fixed: tuple[Tensor, ...]
    place: Place = field(default_factory=lambda: Place(key=bytes(16), step=0, first=0))

    @property
    def rows(self) -> int:
        """Examples whose activations fit into memory together."""
        return max(1, _NUMBERS // max(self.program.numbers, 1))

    def blocks(self, count: int, copies: int = 1) -> list[slice]:
        """The first `count` rows in blocks of like size whose gradients stay in the cache."""
        number = -(-count // max(1, min(self.rows, _GRADIENTS // max(self.layout.size, 1)) // copies))
        edges = [count * at // number for at in range(number + 1)] if number else [0]
        return [slice(a, b) for a, b in pairwise(edges)]

    def encode(self, flat: Tensor) -> Tensor:
        """This engine keeps weights in parameter order."""
        return flat

    def decode(self, own: Tensor) -> Tensor:
        return own

    def at(self, keys: Sequence[bytes], step: int, first: int) -> None:
        """Which client's examples the next pass gets (dropout's masks depend on it)."""
        self.place.update({"key": keys[0], "step": step, "first": first})

    def gradients(
        self, weights: Tensor, x: Tensor, y: Tensor, first: int = 0, copies: int = 1
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Losses [n] and every example's gradients, one [n, size] per parameter, of the examples from place `first` on."""
        key, step, start = self.place["key"], self.place["step"], self.place["first"] + first
        masks = [
            torch.as_tensor(
                np.stack([dropout.mask(key, step, start + at // copies, name, rate, shape) for at in range(len(x))])
            ).to(x)
            for name, rate, shape in self.program.masks
        ]
        trained = list(unflatten(weights, self.layout).values())
        losses, found = self.program.gradients(trained, self.fixed, masks, x, y)
        flat = [None if g is None else descent.mean_of_copies(g.reshape(len(x), -1), copies) for g in found]
        return descent.mean_of_copies(losses, copies), flat

    def clipped(
        self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, clipping: Clipping, loss: str
    ) -> Pass:
        """Losses, norms and the clipped sum of one client (see `descent.Network`)."""
        if not (clipping.bounded or clipping.norms or clipping.copies > 1):
            return self._plain(weights, x, y, mask, loss)
        total = torch.zeros_like(weights, dtype=torch.float64)
        examples = len(x) // clipping.copies
        real = examples if mask is None else int(mask.sum())  # padding is at the end
        blocks = self.blocks(real, clipping.copies)
        losses = weights.new_zeros(1, examples)
        norms = total.new_zeros(1, examples, 1 if clipping.flat else self.layout.layers)
        by_median = clipping.bounded and clipping.bound is None  # then all norms come before the first factor
        kept: list[list[Tensor | None]] = []
        for rows in blocks:
            found = self._measured(weights, x, y, rows, clipping, losses, norms)
            if by_median:
                kept.append(found)
                continue
            mask = _usable(losses, norms, mask, weights.dtype) if clipping.bounded else mask
            factors = clipping.factors(norms, mask)[0] if clipping.bounded else torch.ones_like(norms)
            self._add(found, rows, factors, mask, total)
        if not clipping.bounded:
            return Pass(total, losses, norms, None, mask)
        mask = _usable(losses, norms, mask, weights.dtype)
        factors, bound = clipping.factors(norms, mask)
        for rows, found in zip(blocks, kept, strict=False):
            self._add(found, rows, factors, mask, total)
        return Pass(total, losses, norms, bound, mask)

    def _measured(
        self, weights: Tensor, x: Tensor, y: Tensor, rows: slice, clipping: Clipping, losses: Tensor, norms: Tensor
    ) -> list[Tensor | None]:
        """The gradients of these rows; their losses and norms are written down."""
        copies = clipping.copies
        own = slice(rows.start * copies, rows.stop * copies)
        losses[0, rows], found = self.gradients(weights[0], x[own], y[own], rows.start, copies)
        if clipping.shift is not None and clipping.scale is not None:
            found = [
                ((0 if g is None else g) - clipping.shift[:, part]) / clipping.scale[:, part]
                for g, part in zip(found, _slices(self.layout), strict=True)
            ]
            found = [None if g is None else g.expand(rows.stop - rows.start, -1) for g in found]
        norms[0, rows] = _norms(found, self.layout, clipping, rows.stop - rows.start, norms)
        return found

    def _add(
        self, found: list[Tensor | None], rows: slice, factors: Tensor, used: Tensor | None, total: Tensor
    ) -> None:
        """Adds the gradients of these rows with their factors [1, B, L]."""
        keep = None if used is None or bool(used[0, rows].all()) else used[0, rows] != 0
        if keep is not None and not bool(keep.any()):
            return
        own = factors[0, rows] if keep is None else factors[0, rows][keep]
        for gradient, part, layer in zip(found, _slices(self.layout), self.layout.layer_of, strict=True):
            if gradient is not None:
                column = own[:, 0 if own.shape[1] == 1 else layer].contiguous()
                _add_rows(total[0, part], gradient if keep is None else gradient[keep], column)

    def _plain(self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, loss: str) -> Pass:
        """The sum of all gradients by one ordinary pass: nothing is clipped and no norms are wanted."""
        trained = {name: w.detach().requires_grad_() for name, w in unflatten(weights[0], self.layout).items()}
        with torch.enable_grad(), dropout.keyed(self.module, **self.place):
            image = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
            out = functional_call(self.module, {**trained, **dict(zip(self.program.fixed, self.fixed, strict=True))}, (image,))
            losses, gradient = losses_of.of_batch(out.detach(), y, mask, loss)
            found = torch.autograd.grad(out, list(trained.values()), gradient, allow_unused=True)
        parts = [torch.zeros_like(w) if g is None else g for w, g in zip(trained.values(), found, strict=True)]
        return Pass(torch.cat([g.reshape(-1) for g in parts])[None].double(), losses.view(1, -1), None, None, mask)


def _slices(layout: Layout) -> list[slice]:
    return [slice(at, at + size) for at, size in zip(layout.offsets, layout.sizes, strict=True)]


def _usable(losses: Tensor, norms: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The rows that count [1, B]; broken ones get loss and norm 0."""
    used = descent.usable(losses, norms, mask, dtype)
    if used is None:
        return mask
    losses.masked_fill_(used == 0, 0)
    norms.masked_fill_((used == 0)[:, :, None], 0)
    return used


def _norms(found: Sequence[Tensor | None], layout: Layout, clipping: Clipping, rows: int, like: Tensor) -> Tensor:
    """Norms [rows, layers or 1] in float64 of gradients [rows, size], without under- or overflow."""
    order = ORDERS[clipping.norm]
    sizes = like.new_zeros(1 if clipping.flat else layout.layers, rows)
    given = [(g, layer) for g, layer in zip(found, layout.layer_of, strict=True) if g is not None]
    native = compiled(like.device, given[0][0].dtype) if given else None
    if native is not None:  # sums of squares of float32 numbers are ordinary float64 numbers
        for gradient, layer in given:
            native.add_sizes(gradient.numpy(), sizes[0 if clipping.flat else layer].numpy(), order == 1)
        return (sizes if order == 1 else sizes.sqrt_()).T
    parts: list[list[Tensor]] = [[] for _ in sizes]
    for gradient, layer in given:
        parts[0 if clipping.flat else layer].append(size_of(gradient, clipping.norm))
    for row, own in zip(sizes, parts, strict=True):
        if own:
            row.copy_(size_of(torch.stack(own, 1), clipping.norm))
    return sizes.T


def _add_rows(total: Tensor, values: Tensor, factors: Tensor) -> None:
    """total [size] += the sum over rows of factors [rows] * values [rows, size], in float64, one row after the other.

    Formal guarantee: that of `layers.sum_up`: n examples err by at most (n + 2) 2**-53 times the sum of their sizes.
    """
    native = compiled(values.device, values.dtype)
    if native is not None:
        native.add_rows(total.numpy(), values.contiguous().numpy(), factors.numpy())
        return
    for value, factor in zip(values, factors, strict=True):
        total.add_(value.double() * factor)


def compile_net(module: nn.Module, x: Tensor, y: Tensor, loss: str) -> Net:
    """A traced module; x [n, …] and y are a few examples to try it on. `trace.Unfit` if it cannot be traced."""
    program = trace.program(module, x, y, loss)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return Net(module, layout_of(module), program, tuple(tensors[name].detach().to(x.device) for name in program.fixed))


def untraced(module: nn.Module, like: tuple[Examples, Examples], loss: str, device: str, dtype: torch.dtype) -> str | None:
    """Why the operations of this module cannot be written down for examples of the form of `like`, or None. No row is read."""
    try:
        x, y = like
        _compiled(module, _empty(x, device), _empty(y, device), loss, dtype)
    except trace.Unfit as unfit:
        return str(unfit)
    return None


def _empty(examples: Examples, device: str) -> Tensor:
    """No rows, of this form."""
    shape = (0, *examples.shape[1:])
    if isinstance(examples, torch.Tensor):
        return examples.new_zeros(shape).to(device)
    return torch.as_tensor(np.zeros(shape, examples.dtype), device=device)


def _compiled(module: nn.Module, data: Tensor, targets: Tensor, loss: str, dtype: torch.dtype) -> Net:
    return compile_net(module.to(dtype) if dtype != torch.float32 else module, *_made_up(data, targets, dtype), loss)


def _made_up(data: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Three examples of this shape that are nobody's: which engine trains is told to everyone, so no row may decide it.

    Values lie in [0, 2), so that a module which reads them as numbers of words or classes finds 0 and 1.
    """
    random = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(3, *data.shape[1:], generator=random)
    y = 2 * torch.rand(3, *targets.shape[1:], generator=random)
    return x.to(data.device, dtype), y.to(targets.device, targets.dtype)


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
    """Local training of every client in `work`, one after the other."""
    reason = why_not(module)
    if reason:
        raise UserError(f"The graph engine cannot train this model: {reason}. Use engine = auto.")
    descent.keep_pages()
    data, targets = torch.as_tensor(x, device=device), torch.as_tensor(y, device=device)
    try:
        net = _compiled(module, data, targets, plan.loss, dtype)
    except trace.Unfit as unfit:
        raise UserError(f"The graph engine cannot train this model: {unfit}. Use engine = auto.") from unfit
    losses_of.check_targets(net.program.outputs, targets, plan.loss)
    parts = [descent.run(net, start, data, targets, [one], plan, dtype=dtype, norms=norms) for one in work]
    return descent.join(parts, net.layout, plan)
