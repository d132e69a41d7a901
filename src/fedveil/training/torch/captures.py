"""Captured inputs and output gradients of the graph engine: norms from them, clipped sums of them, in the batch's own dtype.

Formal guarantee: none in floating point. Norms may come from Gram matrices while the sum is formed otherwise, and products
run over the whole batch; protect.bounded covers the other engines only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedveil.protect.bounded import ORDERS

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
    order = ORDERS[kind]

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
