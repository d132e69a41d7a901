"""The rows of a step in a loop of the user's own: each one collated alone, and the sum of their clipped gradients.

Formal guarantee: what an example adds to the sum is computed from the weights and from what the collate function makes of that
example alone. A batch that was collated together (padded to its longest row, say) is what the user's loop gets to see and
nothing more. An engine takes many examples at once only where torch's own collate function stacks them.
"""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import Subset, TensorDataset, default_collate

from fedveil.errors import UserError
from fedveil.federation.round import Task
from fedveil.models.state import COMPANY, REMEMBERS, alike, order, remembers, try_module, unchanged
from fedveil.protect import bounded
from fedveil.protect.setting import Moment

Collate = Callable[[list[object]], object]
Loss = Callable[[nn.Module, object], Tensor]  # (module, a batch of one example) -> its loss
Marks = tuple[tuple[int, int], ...]
WHO = "make_private"
ONE_NUMBER = "the loss of one example must be one number"


@dataclass(frozen=True)
class Rows:
    """The examples of a step. whole: they are exactly the rows of this batch; else each stands in `alone`."""

    count: int
    whole: object = None
    alone: tuple[object, ...] = ()

    def one(self, row: int) -> object:
        """A batch of this example alone."""
        return self.alone[row] if self.alone else tree_map(lambda leaf: leaf[row : row + 1], self.whole)

    def stacks(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets for an engine, rows of one form together; usually all have the same."""
        if not self.alone:
            return [_pair(self.whole)]
        forms: dict[object, list[tuple[Tensor, Tensor]]] = {}
        for one in self.alone:
            x, y = _pair(one)
            forms.setdefault((x.shape, x.dtype, y.shape, y.dtype), []).append((x, y))
        return [(torch.cat([x for x, _ in same]), torch.cat([y for _, y in same])) for same in forms.values()]


def _pair(batch: object) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UserError(f"{WHO}: a loss by name takes batches of (inputs, targets); else give a function of (module, batch).")
    return torch.as_tensor(batch[0]), torch.as_tensor(batch[1])


@dataclass(frozen=True)
class Drawn:
    """What the loader hands out for a step, and what its gradients are computed from."""

    batch: object
    rows: Rows

    @property
    def marks(self) -> Marks:
        """How the batch is known again."""
        return marks(self.batch)

    def passed_as(self, given: tuple[object, ...]) -> Rows:
        """The rows in the form in which the user passes the batch: whole, taken apart, or its tensors in another form."""
        own = given[0] if len(given) == 1 else given
        if not self.rows.alone:
            return Rows(self.rows.count, own)
        return Rows(self.rows.count, None, tuple(self._like(given, own, one) for one in self.rows.alone))

    def _like(self, given: tuple[object, ...], own: object, one: object) -> object:
        if own is self.batch:
            return one
        parts = isinstance(self.batch, tuple | list) and len(self.batch) == len(given)
        if parts and isinstance(one, tuple | list) and all(a is b for a, b in zip(self.batch, given, strict=True)):  # type: ignore[call-overload]
            return tuple(one)
        form, leaves = tree_flatten(own)[1], tree_flatten(one)[0]
        if form.num_leaves != len(leaves):
            raise UserError(f"{WHO}: a row alone has another structure than the batch; pass the batch as the loader gave it.")
        return tree_unflatten(leaves, form)


def marks(batch: object) -> Marks:
    """Identity and version of every tensor in a batch."""
    return tuple((id(leaf), getattr(leaf, "_version", 0)) for leaf in tree_flatten(batch)[0])


def drawn(dataset: object, collate: Collate, rows: np.ndarray) -> Drawn:
    """The step with these rows of the dataset."""
    if not len(rows):  # nobody was drawn: noise alone, in the shape of a batch
        batch = collate([dataset[0]])  # type: ignore[index]
        return Drawn(tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor | list | tuple) else leaf, batch), Rows(0))
    items = [dataset[int(row)] for row in rows]  # type: ignore[index]
    if collate is default_collate and _of_tensors(dataset):
        batch = collate(items)
        return Drawn(batch, Rows(len(items), batch))
    alone = tuple(collate([copy.copy(item)]) for item in items)
    if collate is not default_collate:
        with suppress(Exception):  # it may write to what it is given, and a dataset may give the same object again
            items = copy.deepcopy(items)
    return Drawn(collate(items), Rows(len(items), None, alone))


def _of_tensors(dataset: object) -> bool:
    """Whether rows are rows of tensors, so that torch's collate function only stacks them."""
    return _of_tensors(dataset.dataset) if type(dataset) is Subset else type(dataset) is TensorDataset


def one_by_one(task: Task, loss: Loss, rows: Rows, now: Moment) -> tuple[np.ndarray, float]:
    """The sum of clipped gradients of any loss, one example after the other, in float64; and the mean loss.

    Formal guarantee: each example's part keeps the bound (`bounded.clip_vector`); random masks are drawn afresh for each. A pass
    that changes a buffer or a weight of the module is refused, and so is a loss that gives an example another gradient after all
    others: what it is seen to keep is refused, what it hides is its author's.
    """
    clip = task.recipe.clip
    pieces = clip.pieces(task.layout.layer_slices())
    limit = clip.piece(now.bounds[0], len(pieces))
    total, losses = np.zeros(task.layout.size), []
    first: np.ndarray | None = None
    seed, before = _seed(), _elsewhere()
    with torch.random.fork_rng(devices=[]), unchanged(task.module, WHO):
        places = order(rows.count)
        for place in places:
            value, flat = _gradient(task, loss, rows.one(place), seed if first is None else _seed())
            first = flat if first is None else first
            if np.isfinite(flat).all():  # one that is not adds nothing, which keeps every bound
                total += bounded.clip_vector(flat, limit, pieces, clip.norm)
                losses.append(value)
        if rows.count > 1 and first is not None:
            after = _elsewhere()
            _put_back(before)
            again = _gradient(task, loss, rows.one(places[0]), seed)[1]
            _put_back(after)
            if not alike(torch.from_numpy(first), torch.from_numpy(again)):
                raise UserError(f"{WHO}: {REMEMBERS}.")
    return total, float(np.mean(losses)) if losses else math.nan


def _gradient(task: Task, loss: Loss, one: object, seed: int) -> tuple[float, np.ndarray]:
    torch.manual_seed(seed)
    wanted = [task.module.get_parameter(name) for name in task.layout.names]
    with torch.enable_grad():
        value = loss(task.module, one)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UserError(f"{WHO}: {ONE_NUMBER}.")
        found = torch.autograd.grad(value.sum(), wanted, allow_unused=True, materialize_grads=True)
    return float(value.detach()), torch.cat([g.detach().reshape(-1) for g in found]).cpu().numpy()


def _seed() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1


def _elsewhere() -> tuple[object, object]:
    """Where the other generators of the process stand: a loss that draws from them must be able to draw the same again."""
    return random.getstate(), np.random.get_state()


def _put_back(states: tuple[object, object]) -> None:
    random.setstate(states[0])  # type: ignore[arg-type]
    np.random.set_state(states[1])  # type: ignore[arg-type]


def first_form(dataset: object, collate: Collate) -> object:
    """The first row alone with made-up numbers: what a trial of the user's code is made of. None where it cannot be had."""
    with suppress(Exception):
        row = collate([copy.copy(dataset[0])])  # type: ignore[index]
        if all(isinstance(leaf, Tensor) for leaf in tree_flatten(row)[0]):
            return made_up(row, 0)
    return None


def made_up(like: object, seed: int) -> object:
    """Numbers of nobody in this form: in [0, 1), and 0 or 1 where they may be words or classes."""
    draw = torch.Generator().manual_seed(seed)

    def one(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            return torch.rand(leaf.shape, generator=draw).to(leaf)
        return torch.randint(0, 2, leaf.shape, generator=draw).to(leaf)

    return tree_map(one, like)


def try_loss(module: nn.Module, loss: Loss | str, form: object) -> None:
    """Refuse a module or loss that is seen, on made-up examples, to keep something of them; what cannot take those is not tried.

    It depends on the code alone and on the form of a row, so nothing is charged for it.
    """
    rows = [made_up(form, seed) for seed in range(3)]
    if isinstance(loss, str):
        with suppress(RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            try_module(module, torch.cat([_pair(row)[0] for row in rows]).float(), WHO)
        return
    company = [tree_map(lambda leaf, by=size: leaf * by if leaf.is_floating_point() else leaf, rows[1]) for size in COMPANY]
    try:
        copied = copy.deepcopy(module)
    except Exception:  # whatever a module of the user's own raises: its steps are watched all the same
        return

    states, found, odd = _elsewhere(), False, False

    def one(row: object) -> Tensor:
        nonlocal odd
        torch.manual_seed(0)
        _put_back(states)
        value = loss(copied, row)
        odd = odd or not isinstance(value, Tensor) or value.numel() != 1
        return value.reshape(-1)

    with torch.no_grad(), torch.random.fork_rng(devices=[]), unchanged(copied, WHO), suppress(Exception):
        found = remembers(one, rows, company)
    _put_back(states)
    if odd:
        raise UserError(f"{WHO}: {ONE_NUMBER}.")
    if found:
        raise UserError(f"{WHO}: {REMEMBERS}.")
