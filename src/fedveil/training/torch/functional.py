"""Every nn.Module: per-example gradients by torch.func. The same results as `stacked`, slower.

Norms, factors and sums are those of `stacked`, in float64. One client at a time: under a second vmap over clients,
torch may choose other kernels for other numbers of clients, and results would depend on the chunk.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from fedveil.errors import UserError
from fedveil.models.layout import Layout, layout_of, unflatten
from fedveil.models.state import REMEMBERS, alike, order, unchanged
from fedveil.protect.bounded import ORDERS
from fedveil.training import losses as losses_of
from fedveil.training.contract import ClientWork, Examples, LocalPlan, LocalResult
from fedveil.training.torch import descent
from fedveil.training.torch.descent import Clipping, Pass
from fedveil.training.torch.layers import size_of

Tensor = torch.Tensor
_NUMBERS = 1 << 27  # per-example gradients that may be in memory at once (512 MiB of float32)


def why_not(module: nn.Module) -> str | None:
    """None if per-example gradients of this module make sense, else the reason, naming the layer."""
    for name, layer in module.named_modules():
        where = f"layer '{name}' ({type(layer).__name__})"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (
            layer.training or not layer.track_running_stats
        ):
            return (
                f"{where} mixes the examples of a batch, so that no example's influence can be bounded; "
                "fv.replace_batch_norm(model) puts GroupNorm in its place"
            )
    return None


def draws(module: nn.Module) -> str | None:
    """Active dropout: torch.func draws its masks from no key."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.training and layer.p > 0:
            where = f"layer '{name}' ({type(layer).__name__})"
            return f"{where} draws random numbers that no seed here controls; remove it or set p = 0"
    return None


@dataclass(frozen=True)
class Net:
    """A module whose per-example gradients come from autograd, or where nothing is clipped from vmap(grad)."""

    module: nn.Module  # a copy of this engine's own: its weights change
    layout: Layout
    rows: int

    def encode(self, flat: Tensor) -> Tensor:
        return flat

    def decode(self, own: Tensor) -> Tensor:
        return own

    def gradients(
        self, weights: Tensor, x: Tensor, y: Tensor, loss: str, apart: bool
    ) -> tuple[Tensor, Tensor]:
        """Per-example gradients [B, P] and losses [B] of one client. With `apart` one after the other: under vmap an
        example's rounding would depend on the rest of the batch, and its effect on a sum could not be bounded; and an own loss
        may branch on numbers. One passes once more after all others: it must give the same."""

        of_one = losses_of.of_one(loss)

        def value(output: Tensor, target: Tensor) -> Tensor:
            return of_one(output, target[None])

        def called(parameters: dict[str, Tensor], image: Tensor, target: Tensor) -> Tensor:
            return value(functional_call(self.module, parameters, (image[None],)), target)

        # Copies of their own: torch may round otherwise where numbers begin elsewhere in memory.
        parameters = unflatten(weights.clone(), self.layout)
        with torch.enable_grad():
            if not apart:
                by_name, losses = vmap(grad_and_value(called), in_dims=(None, 0, 0))(parameters, x, y)
                found = torch.cat([by_name[name].flatten(1) for name in self.layout.names], 1)
                return found.detach(), losses.detach()
            found = weights.new_empty(len(x), self.layout.size)
            losses = weights.new_empty(len(x))
            own = [self.module.get_parameter(name) for name in self.layout.names]
            for parameter, name in zip(own, self.layout.names, strict=True):
                parameter.data = parameters[name]

            def alone(row: int, out: Tensor) -> Tensor:  # plain autograd: for one example torch.func only takes longer
                loss_here = value(self.module(x[row][None].clone()), y[row])
                gradients = torch.autograd.grad(loss_here, own, materialize_grads=True)
                torch.cat([gradient.reshape(-1) for gradient in gradients], out=out)
                return loss_here.detach()

            with unchanged(self.module):
                rows = order(len(x))
                for row in rows:
                    losses[row] = alone(row, found[row])
                if len(x) > 1:
                    again = torch.empty_like(found[0])
                    alone(rows[0], again)
                    if not alike(found[rows[0]], again):
                        raise UserError(f"This model or its loss: {REMEMBERS}.")
        return found.detach(), losses.detach()

    def clipped(
        self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, clipping: Clipping, loss: str
    ) -> Pass:
        """See `descent.Network`."""
        results = [
            self._one(
                weights[k : k + 1], xs, ys, None if mask is None else mask[k : k + 1], clipping.of(k), loss
            )
            for k, (xs, ys) in enumerate(zip(x.chunk(len(weights)), y.chunk(len(weights)), strict=True))
        ]
        if len(results) == 1:
            return results[0]
        bounds = [r.bound for r in results if r.bound is not None]
        norms = [r.norms for r in results if r.norms is not None]
        return Pass(
            torch.cat([r.total for r in results]),
            torch.cat([r.loss for r in results]),
            torch.cat(norms) if norms else None,
            torch.cat(bounds) if bounds else None,
            None
            if all(r.used is None for r in results)
            else torch.cat([torch.ones_like(r.loss) if r.used is None else r.used for r in results]),
        )

    def _one(
        self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, clipping: Clipping, loss: str
    ) -> Pass:
        found, losses = self.gradients(weights[0], x, y, loss, clipping.bounded or losses_of.own(loss))
        found, losses = (descent.mean_of_copies(each, clipping.copies) for each in (found, losses))
        raw, losses = losses[None], losses[None] if mask is None else losses[None] * mask
        if clipping.shift is not None and clipping.scale is not None:
            found = (found - clipping.shift) / clipping.scale
        parts = (slice(0, self.layout.size),) if clipping.flat else self.layout.layer_slices()
        norms, wide = None, found.double() if clipping.bounded or clipping.norms else found
        if clipping.bounded or clipping.norms:
            sizes = _sizes if found.dtype == torch.float32 else size_of
            norms = torch.stack([sizes(wide[:, p], clipping.norm) for p in parts], 1)[None]
        if not clipping.bounded or norms is None:
            total = found.sum(0) if mask is None else mask[0] @ found
            return Pass(total[None].double(), losses, norms, None, mask)
        used = descent.usable(raw, norms, mask, weights.dtype)
        if used is not None:
            mask, out = used, used == 0
            wide, losses, norms = (
                wide.masked_fill(out[0, :, None], 0),
                losses.masked_fill(out, 0),
                norms.masked_fill(out[:, :, None], 0),
            )
        factors, bound = clipping.factors(norms, mask)
        total = torch.cat([factors[0, :, i] @ wide[:, part] for i, part in enumerate(parts)])
        return Pass(total[None], losses, norms, bound, mask)


def _sizes(values: Tensor, kind: str) -> Tensor:
    """Norms over the last axis of float32 numbers that were made float64: their squares neither under- nor overflow."""
    return torch.linalg.vector_norm(values, ORDERS[kind], dim=-1)


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
    """Local training of every client in `work`; the arguments are those of `stacked.train`."""
    reason = why_not(module) or draws(module)
    if reason:
        raise UserError(f"This model cannot be trained with per-example gradients: {reason}.")
    descent.keep_pages()
    data, targets = torch.as_tensor(x, device=device), torch.as_tensor(y, device=device)
    layout = layout_of(module)
    module = copy.deepcopy(module).to(device)
    net = Net(module, layout, max(plan.augment.copies, _NUMBERS // max(layout.size, 1)))
    with torch.no_grad():
        first = torch.as_tensor(np.array(start)).to(device, dtype)
        outputs = functional_call(
            module, unflatten(first, layout), (data.new_zeros(1, *data.shape[1:]).to(dtype),)
        )
    losses_of.check_targets(outputs.shape[1:], targets, plan.loss)
    size = chunk or 1
    parts = [
        descent.run(net, start, data, targets, work[at : at + size], plan, dtype=dtype, norms=norms)
        for at in range(0, len(work), size)
    ]
    return descent.join(parts, layout, plan)
