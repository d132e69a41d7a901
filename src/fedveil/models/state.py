"""What a module keeps from one example to the next beside its weights: no clip bounds it and no ledger counts it.

What torch knows of (buffers, weights that a pass changes) is seen at every pass. What it does not know of, such as a plain
attribute, is found by its effect: the same example must give the same after others have passed. That is a test, not a proof.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedveil.errors import UserError

One = TypeVar("One")
COMPANY = (1e-6, -1.0, 1e4, -1e4)  # made-up examples of these sizes pass between two looks at the others
REMEMBERS = (
    "the same example gives something else after others have passed: your code remembers examples or draws random numbers of "
    "its own, so that a clip per example bounds nothing; keep nothing between examples, and leave chance to nn.Dropout"
)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    found = {f"buffer '{name}'": buffer for name, buffer in module.named_buffers(remove_duplicate=False)}
    return found | {f"weight '{name}'": weight for name, weight in module.named_parameters(remove_duplicate=False)}


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal, where broken numbers equal themselves."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


@contextmanager
def unchanged(module: nn.Module, who: str = "This model") -> Iterator[None]:
    """Refuses what happens inside if it writes to a buffer or a weight, be it the same number.

    Buffers are compared by value, too: what goes through `.data` has no version.
    """
    weights = {id(weight) for weight in module.parameters()}  # may be many, and a copy of them would fill the memory
    before = {
        name: (tensor, _version(tensor), None if id(tensor) in weights else tensor.detach().clone())
        for name, tensor in _tensors(module).items()
    }
    yield
    after = _tensors(module)
    changed = [name for name in after if name not in before]
    for name, (tensor, version, value) in before.items():
        now = after.get(name)
        if now is not tensor or _version(tensor) != version or not (value is None or _same(tensor.detach(), value)):
            changed.append(name)
    if changed:
        kind, _, name = changed[0].partition(" ")
        raise UserError(
            f"{who}: the forward pass changes a {kind} of the module, {name}, which the examples after it see: no clip bounds "
            "that. Constants may stay; drop running statistics and norms that are forced on weights, or freeze those layers."
        )


def order(count: int) -> list[int]:
    """In which order so many examples pass: the one that passes once more after all others begins, and stands in the middle, so
    that it is hardly ever the unusual one whose trace is looked for."""
    middle = count // 2
    return [middle, *(at for at in range(count) if at != middle)] if count else []


def alike(first: Tensor, again: Tensor) -> bool:
    """Whether two passes of one example agree, but for the rounding of kernels that add in any order."""
    first, again = first.detach().double().flatten(), again.detach().double().flatten()
    largest = float(first.nan_to_num(0.0, 0.0, 0.0).abs().max()) if first.numel() else 0.0
    return first.shape == again.shape and torch.allclose(first, again, rtol=0.0, atol=1e-4 * largest, equal_nan=True)


def remembers(one: Callable[[One], Tensor], rows: Sequence[One], company: Sequence[One]) -> bool:
    """Whether what `one` gives for a row depends on which others passed before it. Company that it cannot take is left out."""
    first = [one(row) for row in rows]
    for other in company:
        with suppress(Exception):  # a word's number may not be negative, for example
            one(other)
    again = [one(row) for row in reversed(rows)]
    return not all(alike(a, b) for a, b in zip(first, reversed(again), strict=True))


def try_module(module: nn.Module, x: Tensor, who: str) -> None:
    """Refuse a module that is seen to keep something of the examples x [n, …], made up, and of their like in other sizes.

    The module is left as it is: a copy is tried, without dropout. What it raises for x is raised.
    """
    copied = copy.deepcopy(module)
    for layer in copied.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.eval()
    company = [size * other[None] for size in COMPANY for other in x.flip(0)]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), unchanged(copied, who):
        found = remembers(copied, [row[None] for row in x], company)
    if found:
        raise UserError(f"{who}: {REMEMBERS}.")
