"""Who holds which rows: a dataset's training rows dealt out to clients.

    partition(dataset, "shards", clients=100)                       two label shards each, disjoint
    partition(dataset, "overlap", clients=1000)                     the papers' overlapping shards of 500
    partition(dataset, "iid", 1_000_000, examples_per_client=50)    overlapping; memory does not grow

The privacy ledger asks one thing of a partition: `copies`, the largest number of clients that hold one row.
Where clients overlap, rows are computed when asked for, from keyed permutations of the row numbers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from fedveil.data.rows import Dataset
from fedveil.errors import UserError, did_you_mean
from fedveil.keys import derive, generator


@dataclass(frozen=True, eq=False)
class Partition:
    """Rows per client. `rows(i)` gives client i's row numbers (int64, distinct) into `dataset.x`.

    Formal guarantee: no training row is held by more than `copies` clients (1: disjoint). `note` says what a
    reader should know, such as how many clients hold one class only; it is computed from private labels.
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
        return self.rows_of(self._known(client))

    def size(self, client: int) -> int:
        """How many rows one client holds."""
        return self.size_of(self._known(client))

    @property
    def sizes(self) -> np.ndarray:
        """Rows per client, for all clients (built when asked for)."""
        return np.fromiter((self.size_of(i) for i in range(self.clients)), np.int64, self.clients)

    def __len__(self) -> int:
        return self.clients

    def _known(self, client: int) -> int:
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client} of {self.clients}")
        return int(client)


def partition(
    dataset: Dataset,
    kind: str = "shards",
    clients: int | None = None,
    seed: int = 0,
    *,
    min_size: int = 1,
    min_classes: int = 1,
    **options: object,
) -> Partition:
    """Deal the training rows out to clients; the same arguments give the same partition.

    kind (options): shards (shards_per_client=2), iid (examples_per_client), dirichlet (alpha=0.5), groups
    (column), sizes (sizes), copies (examples_per_client), overlap (examples_per_client=500,
    shards_per_client=2). clients: 100 unless the kind says (groups: one per group; sizes: one per size).
    min_size, min_classes: refuse a partition in which a client has fewer (min_size=0 allows clients without
    rows; classes are looked at in the first 10,000 clients, 1,000 where they overlap).
    """
    if kind not in KINDS:
        raise UserError(f"Unknown partition '{kind}' (known: {', '.join(KINDS)}).{did_you_mean(kind, KINDS)}")
    make = KINDS[kind]
    known = list(inspect.signature(make).parameters)[3:]
    for option in options:
        if option not in known:
            raise UserError(
                f"Partition '{kind}' has no option '{option}' (it has: {', '.join(known) or 'none'})."
                f"{did_you_mean(option, known)}"
            )
    if clients is None and kind not in ("groups", "sizes"):
        clients = 100
    if clients is not None and (isinstance(clients, bool) or int(clients) != clients or clients < 1):
        raise UserError(f"partition: clients = {clients} must be a whole number above 0.")
    made = make(dataset, None if clients is None else int(clients), seed, **options)
    return _checked(dataset, made, min_size, min_classes)


# --- the kinds ---


def _shards(dataset: Dataset, clients: int, seed: int, shards_per_client: int = 2) -> Partition:
    """Rows sorted by label (or target value), cut into equal shards; each client gets some at random."""
    _at_least_one("shards_per_client", shards_per_client)
    random = generator(seed, "partition-shards")
    order = random.permutation(len(dataset))
    order = order[np.argsort(dataset.y[order], kind="stable")]
    pieces = np.array_split(order, clients * shards_per_client)
    dealt = random.permutation(len(pieces)).reshape(clients, shards_per_client)
    return _disjoint("shards", dataset, [np.concatenate([pieces[p] for p in row]) for row in dealt])


def _iid(dataset: Dataset, clients: int, seed: int, examples_per_client: int | None = None) -> Partition:
    """All rows, evenly and disjoint; or examples_per_client each, with rows used again where they run out."""
    if examples_per_client is None:
        order = generator(seed, "partition-iid").permutation(len(dataset))
        return _disjoint("iid", dataset, np.array_split(order, clients))
    size = _size_within(examples_per_client, dataset)
    deck = len(dataset) // size
    rows_of = partial(_iid_rows, derive(seed, "partition-iid-deck"), len(dataset), size, deck)
    return Partition("iid", clients, -(-clients // deck), len(dataset), rows_of, partial(_constant, size))


def _dirichlet(dataset: Dataset, clients: int, seed: int, alpha: float = 0.5) -> Partition:
    """Each class is spread over the clients in Dirichlet(alpha) proportions (small alpha: unlike)."""
    if not alpha > 0 or not np.isfinite(alpha):
        raise UserError(f"partition dirichlet: alpha = {alpha} must be above 0.")
    if dataset.task != "classification":
        raise UserError("partition dirichlet needs classes; use shards, iid or groups for regression.")
    random = generator(seed, "partition-dirichlet")
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in range(dataset.classes or 0):
        rows = random.permutation(np.flatnonzero(dataset.y == label))
        # Dirichlet by gamma variates in logarithms: for a tiny alpha the variates themselves are all zero.
        logs = np.log(random.gamma(alpha + 1, size=clients)) + np.log1p(-random.random(clients)) / alpha
        weights = np.exp(logs - logs.max())
        cuts = np.round(np.cumsum(weights / weights.sum())[:-1] * len(rows)).astype(np.int64)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    return _disjoint("dirichlet", dataset, [np.concatenate(p) for p in parts])


def _groups(dataset: Dataset, clients: int | None, seed: int, column: int | None = None) -> Partition:
    """One client per group (or per value of a feature column). More clients: large groups are split evenly,
    never mixed. Fewer clients: whole groups are dealt out at random, as evenly in number as they go."""
    if column is not None:
        if dataset.x.ndim != 2 or not 0 <= column < dataset.x.shape[1]:
            raise UserError(
                f"partition groups: column = {column} is not a feature number of shape {dataset.shape}."
            )
        values = np.unique(dataset.x[:, column], return_inverse=True)[1]
    elif dataset.groups is not None:
        values = dataset.groups
    else:
        raise UserError(
            f"Dataset '{dataset.name}' has no groups; give column = N (a feature number), or for a .csv "
            "group = NAME."
        )
    random = generator(seed, "partition-groups")
    present = np.unique(values)
    members = [np.flatnonzero(values == g) for g in present]
    clients = clients or len(members)
    if clients < len(members):
        dealt = np.array_split(random.permutation(len(members)), clients)
        return _disjoint(
            "groups", dataset, [np.concatenate([members[g] for g in np.sort(some)]) for some in dealt]
        )
    pieces = np.ones(len(members), np.int64)
    for _ in range(clients - len(members)):
        pieces[np.argmax([len(m) / p for m, p in zip(members, pieces, strict=True)])] += 1
    parts: list[np.ndarray] = []
    for rows, count in zip(members, pieces, strict=True):
        parts += [rows] if count == 1 else np.array_split(random.permutation(rows), count)
    return _disjoint("groups", dataset, parts)


def _sizes(dataset: Dataset, clients: int | None, seed: int, sizes: Sequence[int] = ()) -> Partition:
    """Random disjoint rows, as many for each client as the list says."""
    wanted = [int(s) for s in sizes]
    if not wanted or min(wanted) < 0:
        raise UserError("partition sizes: give sizes = [n1, n2, ...], one number of rows per client.")
    if clients is not None and clients != len(wanted):
        raise UserError(f"partition sizes: {len(wanted)} sizes are given for {clients} clients.")
    if sum(wanted) > len(dataset):
        raise UserError(
            f"partition sizes: the sizes add up to {sum(wanted)}, but there are {len(dataset)} training rows."
        )
    order = generator(seed, "partition-sizes").permutation(len(dataset))
    return _disjoint("sizes", dataset, np.split(order[: sum(wanted)], np.cumsum(wanted)[:-1]))


def _copies(dataset: Dataset, clients: int, seed: int, examples_per_client: int | None = None) -> Partition:
    """Every client holds all rows, or its own random choice of that many."""
    size = len(dataset) if examples_per_client is None else _size_within(examples_per_client, dataset)
    rows_of = partial(_copy_rows, derive(seed, "partition-copies"), len(dataset), size)
    return Partition("copies", clients, clients, len(dataset), rows_of, partial(_constant, size))


def _overlap(
    dataset: Dataset, clients: int, seed: int, examples_per_client: int = 500, shards_per_client: int = 2
) -> Partition:
    """The papers' way to have more clients than disjoint shards: the rows are dealt out again and again.

    One deal sorts the rows by label, freshly shuffled within each label, cuts them into shards and
    gives each of n / examples_per_client clients `shards_per_client` of them at random. With 50,000 rows and
    500 examples, one deal serves 100 clients, so N clients need N/100 deals, and each row is held by at most
    that many clients.
    """
    if dataset.classes is None:
        raise UserError("partition overlap needs classes; use iid with examples_per_client for regression.")
    _at_least_one("shards_per_client", shards_per_client)
    size = _size_within(examples_per_client, dataset)
    if size % shards_per_client:
        raise UserError(
            f"partition overlap: examples_per_client = {size} is not a multiple of shards_per_client = "
            f"{shards_per_client}."
        )
    order = np.argsort(dataset.y, kind="stable")
    starts = np.searchsorted(dataset.y[order], np.arange(dataset.classes + 1))
    deck = len(dataset) // size
    rows_of = partial(
        _overlap_rows, derive(seed, "partition-overlap"), order, starts, size, shards_per_client, deck
    )
    return Partition("overlap", clients, -(-clients // deck), len(dataset), rows_of, partial(_constant, size))


KINDS: dict[str, Callable[..., Partition]] = {
    "shards": _shards,
    "iid": _iid,
    "dirichlet": _dirichlet,
    "groups": _groups,
    "sizes": _sizes,
    "copies": _copies,
    "overlap": _overlap,
}


# --- rows on demand ---


def permute(key: bytes, count: int, positions: np.ndarray) -> np.ndarray:
    """Values of a keyed random permutation of 0..count-1 at these positions, without building it.

    A Feistel network on a rectangle of a little more than `count` cells; values that fall outside walk on
    until they are inside. Good shuffling, not cryptography: nobody's privacy rests on it.
    """
    tall = np.uint64(max(1, math.isqrt(max(count - 1, 0)) + 1))
    wide = np.uint64(-(-count // int(tall)))
    round_keys = np.frombuffer(key + derive(key, "permute"), np.uint64)[:6]
    values = np.array(positions, np.uint64)
    moving = np.arange(len(values))
    while len(moving):
        left, right = np.divmod(values[moving], wide)
        for i in range(0, 6, 2):
            left = (left + _mix(right + round_keys[i])) % tall
            right = (right + _mix(left + round_keys[i + 1])) % wide
        values[moving] = left * wide + right
        moving = moving[values[moving] >= count]
    return values.astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """A 64-bit finaliser; the top 4 bits are dropped so that a small number can be added without overflow."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (values ^ (values >> np.uint64(31))) >> np.uint64(4)


def _constant(value: int, client: int) -> int:
    return value


def _iid_rows(key: bytes, count: int, size: int, deck: int, client: int) -> np.ndarray:
    deal, seat = divmod(client, deck)
    return permute(derive(key, "deal", deal), count, seat * size + np.arange(size))


def _copy_rows(key: bytes, count: int, size: int, client: int) -> np.ndarray:
    if size == count:
        return np.arange(count, dtype=np.int64)
    return permute(derive(key, "client", client), count, np.arange(size))


def _overlap_rows(
    key: bytes, order: np.ndarray, starts: np.ndarray, size: int, shards: int, deck: int, client: int
) -> np.ndarray:
    deal, seat = divmod(client, deck)
    length = size // shards
    dealt = permute(derive(key, "shards", deal), deck * shards, seat * shards + np.arange(shards))
    # A deal may leave a few rows over: a random start on the circle of sorted rows decides which.
    first = int.from_bytes(derive(key, "start", deal)[:8], "little") % len(order)
    places = (first + (dealt[:, None] * length + np.arange(length)[None]).reshape(-1)) % len(order)
    labels = np.searchsorted(starts, places, side="right") - 1
    shuffled = np.empty_like(places)
    for label in np.unique(labels):
        here = labels == label
        begin, end = int(starts[label]), int(starts[label + 1])
        shuffled[here] = begin + permute(
            derive(key, "label", deal, int(label)), end - begin, places[here] - begin
        )
    return order[shuffled]


# --- checks ---


def _slice_rows(order: np.ndarray, bounds: np.ndarray, client: int) -> np.ndarray:
    return order[bounds[client] : bounds[client + 1]]


def _slice_size(bounds: np.ndarray, client: int) -> int:
    return int(bounds[client + 1] - bounds[client])


def _disjoint(kind: str, dataset: Dataset, parts: list[np.ndarray]) -> Partition:
    bounds = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int64)
    order = np.concatenate(parts).astype(np.int64)
    rows_of, size_of = partial(_slice_rows, order, bounds), partial(_slice_size, bounds)
    return Partition(kind, len(parts), 1, len(dataset), rows_of, size_of)


def _at_least_one(option: str, value: int) -> None:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise UserError(f"partition: {option} = {value} must be a whole number above 0.")


def _size_within(size: int, dataset: Dataset) -> int:
    _at_least_one("examples_per_client", size)
    if size > len(dataset):
        raise UserError(
            f"partition: examples_per_client = {size}, but '{dataset.name}' has {len(dataset)} training rows."
        )
    return int(size)


def _checked(dataset: Dataset, made: Partition, min_size: int, min_classes: int) -> Partition:
    # Overlapping clients are all of one size, so one of them is enough: there may be millions.
    sizes = made.sizes if made.copies == 1 else np.array([made.size(0)])
    small = np.flatnonzero(sizes < min_size)
    if len(small):
        raise UserError(
            f"partition {made.kind}: {len(small)} of {made.clients} clients have fewer than {min_size} "
            "rows (first: "
            f"client {small[0]} with {sizes[small[0]]}). Use fewer clients or another partition, or "
            "allow it with "
            f"min_size = {int(sizes.min())}."
        )
    notes = [f"{made.copies} copies of each row at most" if made.copies > 1 else "disjoint"]
    if dataset.task == "classification":
        looked = min(made.clients, 1_000 if made.copies > 1 else 10_000)
        counts = np.array([len(np.unique(dataset.y[made.rows(i)])) for i in range(looked)])
        poor = np.flatnonzero((counts < min_classes) & (counts > 0))
        if len(poor):
            raise UserError(
                f"partition {made.kind}: {len(poor)} of {made.clients} clients hold fewer than "
                f"{min_classes} classes "
                f"(first: client {poor[0]}). Use more shards per client, a larger alpha, or a smaller "
                "min_classes."
            )
        first = "" if looked == made.clients else "the first "
        if (counts == 1).any():
            notes.append(f"{int((counts == 1).sum())} of {first}{looked} clients hold one class only")
    if (sizes == 0).any():
        notes.append(f"{int((sizes == 0).sum())} of {made.clients} clients hold no rows")
    return replace(made, note="; ".join(notes))


def check_disjoint(made: Partition) -> None:
    """Raise unless no row is held twice. Looks at every row, whatever `copies` says."""
    seen = np.full(made.examples, -1, np.int64)
    for client in range(made.clients):
        rows = made.rows(client)
        twice = np.flatnonzero(seen[rows] >= 0)
        if len(twice):
            row = int(rows[twice[0]])
            raise UserError(
                f"partition {made.kind}: row {row} is held by client {seen[row]} and by client {client}; "
                "a disjoint partition is needed here (shards, iid, dirichlet, groups or sizes)."
            )
        seen[rows] = client


def holders(made: Partition, row: int) -> np.ndarray:
    """The clients that hold a row. Looks at all clients, so it takes time in proportion to their number."""
    if not 0 <= row < made.examples:
        raise IndexError(f"row {row} of {made.examples}")
    return np.array([i for i in range(made.clients) if (made.rows(i) == row).any()], np.int64)


def class_counts(dataset: Dataset, made: Partition, clients: Sequence[int] | None = None) -> np.ndarray:
    """Rows per client and class, [clients, classes]; for regression per client, [clients, 1]. Private."""
    chosen = range(made.clients) if clients is None else clients
    if dataset.task != "classification":
        return np.array([[made.size(i)] for i in chosen])
    return np.stack([np.bincount(dataset.y[made.rows(i)], minlength=dataset.classes or 0) for i in chosen])
