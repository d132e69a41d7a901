"""Who holds which rows: a dataset's training rows dealt out to clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fedveil.data.rows import Dataset
from fedveil.errors import UserError, did_you_mean
from fedveil.keys import generator


@dataclass(frozen=True, eq=False)
class Partition:
    """Rows per client. `rows(i)` gives client i's row numbers (int64) into `dataset.x`.

    copies: no training row is held by more than this many clients (1: disjoint). Row numbers are computed when
    asked for wherever clients overlap, so memory does not grow with the number of clients.
    """

    kind: str
    clients: int
    copies: int
    examples: int  # training rows of the dataset
    rows_of: Callable[[int], np.ndarray] = field(repr=False)
    size_of: Callable[[int], int] = field(repr=False)
    note: str = ""

    def rows(self, client: int) -> np.ndarray:
        """Row numbers of one client."""
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client} of {self.clients}")
        return self.rows_of(int(client))

    def size(self, client: int) -> int:
        """How many rows one client holds."""
        return self.size_of(int(client))

    @property
    def sizes(self) -> np.ndarray:
        """Rows per client, for all clients (built when asked for)."""
        return np.fromiter((self.size_of(i) for i in range(self.clients)), np.int64, self.clients)

    def __len__(self) -> int:
        return self.clients


def _slice_rows(order: np.ndarray, bounds: np.ndarray, client: int) -> np.ndarray:
    return order[bounds[client] : bounds[client + 1]]


def _slice_size(bounds: np.ndarray, client: int) -> int:
    return int(bounds[client + 1] - bounds[client])


def _explicit(kind: str, examples: int, parts: list[np.ndarray], note: str = "") -> Partition:
    """A disjoint partition given row by row."""
    bounds = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int64)
    order = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    return Partition(
        kind, len(parts), 1, examples, partial(_slice_rows, order, bounds), partial(_slice_size, bounds), note
    )


def _shards(dataset: Dataset, clients: int, seed: int, shards_per_client: int = 2) -> Partition:
    random = generator(seed, "partition-shards")
    order = random.permutation(len(dataset))
    order = order[np.argsort(dataset.y[order], kind="stable")]
    pieces = np.array_split(order, clients * shards_per_client)
    dealt = random.permutation(len(pieces)).reshape(clients, shards_per_client)
    return _explicit("shards", len(dataset), [np.concatenate([pieces[p] for p in row]) for row in dealt])


def _iid(dataset: Dataset, clients: int, seed: int) -> Partition:
    order = generator(seed, "partition-iid").permutation(len(dataset))
    return _explicit("iid", len(dataset), np.array_split(order, clients))


_KINDS: dict[str, Callable[..., Partition]] = {"shards": _shards, "iid": _iid}


def partition(
    dataset: Dataset, kind: str = "shards", clients: int = 100, seed: int = 0, **options: Any
) -> Partition:
    """Deal the training rows out to clients."""
    if kind not in _KINDS:
        raise UserError(
            f"Unknown partition '{kind}' (known: {', '.join(_KINDS)}).{did_you_mean(kind, _KINDS)}"
        )
    return _KINDS[kind](dataset, clients, seed, **options)
