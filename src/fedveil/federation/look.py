"""One noised look at a table before training, for a share of the budget: kinds, ranges and words of undeclared columns.

First look: every undeclared column is counted in public places: powers of two of both signs, zero, "missing", and 256 hashed
places for words. The noised counts say whether the column holds numbers or words, roughly where, and which places of words are
in use; no word of a feature is ever shown. The target's values are counted as words; those that pass a threshold become
classes, and where hardly any row has such a value the task is regression. Second look: number columns are counted again in
64 places between the ends found, which gives ranges and quantiles.

Formal guarantee: all constants returned are post-processing of the two `Tally`s in `Looked.paid`, of declared values and of
public facts (number of rows, columns, clients). Each tally is a Gaussian mechanism for zero-out neighbours, stated by its event.
Where the server sees every client (observer "server"), each client adds the whole noise to its own counts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.data.columns import (
    MOST_CLASSES,
    PLACES,
    Known,
    Scale,
    Sheet,
    check_declared,
    columns_of,
    declared,
    encode,
    place_of,
    sheet_of,
    with_knots,
)
from fedveil.data.frames import Table, numbers, words
from fedveil.data.partition import partition
from fedveil.data.rows import Dataset, Task, hold_out, limit_rows
from fedveil.errors import UserError
from fedveil.jsons import Document, JsonObject
from fedveil.keys import derive
from fedveil.privacy.calibrate import calibrate
from fedveil.privacy.events import Event, event_from_json, to_json
from fedveil.privacy.ledger.entries import check_delta
from fedveil.protect.tally import Tally, tally

if TYPE_CHECKING:
    from fedveil.federation.config import RunConfig

OCTAVES = np.arange(-20, 44)  # values from 2**-20 to 2**44 in size; what is smaller is zero, what is larger is in the last
EDGES = np.concatenate([-(2.0 ** OCTAVES[::-1]), 2.0**OCTAVES])  # 2 * 64 ends, zero between the middle two
BINS = len(EDGES) + 1  # number places
MISSING = BINS  # the place of missing values; words follow
NOWHERE = -1
FINE = 64
STANDS_OUT = 4.0  # deviations of the noise by which a place must be above zero
SHARES = (0.02, 0.05, 0.1, 0.2)
FINE_ENOUGH = 0.01  # of the rows: noise on a place that does not blur what matters
TOO_COARSE = 0.06
MOST_PLACES_KEPT = 24
FEW_LABELS = 12  # number labels beyond so many are a quantity


@dataclass(frozen=True)
class Paid:
    """A look that was made: in words, as an event, and a hash of what it showed."""

    what: str
    event: Event
    made: str


class LookedInVain(UserError):
    """What was found cannot be used. `paid` has to be charged before anybody is told: the message follows from it.

    What went wrong first is the cause; it need not be a `UserError`."""

    def __init__(self, message: str, paid: tuple[Paid, ...]) -> None:
        super().__init__(message)
        self.paid = paid


@contextmanager
def after(paid: Sequence[Paid]) -> Iterator[None]:
    """Whatever fails in the block may follow from the looks that were `paid` for by then: it is raised as `LookedInVain`."""
    try:
        yield
    except LookedInVain:
        raise
    except Exception as wrong:
        if not paid:
            raise
        raise LookedInVain(str(wrong), tuple(paid)) from wrong


@dataclass(frozen=True)
class Looked:
    """Constants, and what they cost."""

    known: Known
    paid: tuple[Paid, ...] = ()

    def to_json(self) -> JsonObject:
        """Plain dictionary; `looked_from_json` is the inverse."""
        return {
            "known": asdict(self.known),
            "paid": [{"what": p.what, "event": to_json(p.event), "made": p.made} for p in self.paid],
        }


def looked_from_json(data: Any) -> Looked:
    """The inverse of `Looked.to_json`."""
    try:
        known = dict(data["known"])
        read: list[Document] = [
            {k: tuple(v) if isinstance(v, list) else v for k, v in scale.items()} for scale in known.pop("scales")
        ]
        scales = tuple(Scale(**values) for values in read)
        known["classes"] = tuple(known["classes"])
        paid = tuple(Paid(p["what"], event_from_json(p["event"]), p["made"]) for p in data["paid"])
        return Looked(Known(scales, **known), paid)
    except (KeyError, TypeError, ValueError, AttributeError) as wrong:
        raise UserError(f"table.json does not hold what a look found ({wrong}); the run cannot be continued.") from None


@dataclass(frozen=True)
class Price:
    """What the looks may cost. share: of the budget's square; multiplier: of each of the `looks`; noise: deviation on a place,
    all clients together; tail: see `Tally`."""

    share: float
    multiplier: float
    looks: int
    noise: float
    tail: float


def price(columns: int, rows: int, clients: int, observer: str, epsilon: float, delta: float, share: float = 0.0) -> Price:
    """The smallest share of the budget that gives counts fine enough for so many rows. Nothing here looks at data."""
    whole = calibrate(epsilon, delta).noise_multiplier
    pile = math.sqrt(clients) if observer == "server" else 1.0
    tail = delta * 1e-3 / (2 * (math.exp(min(epsilon + 1, 60.0)) + 1))
    found = None
    for part in (share,) if share else SHARES:
        multiplier = whole / math.sqrt(part / 2)
        found = Price(part, multiplier, 2, multiplier * math.sqrt(columns) * pile, tail)
        if found.noise <= FINE_ENOUGH * rows:
            break
    assert found is not None
    if found.noise > TOO_COARSE * rows:
        raise UserError(
            f"Paying for ranges would drown in noise: {columns} undeclared columns, {rows} rows, epsilon {epsilon:g}"
            f"{f', {clients} sites that each add their own noise' if pile > 1 else ''}. What would help: public ranges "
            "(--ranges column=low:high, which cost nothing), fewer columns (--drop), a larger epsilon"
            f"{', or --observer sum' if pile > 1 else ''}."
        )
    return found


def open_table(
    config: RunConfig, given: Table | None, root: int | bytes, deployed: bool, pays: bool
) -> tuple[Dataset, Looked]:
    """The configuration's table as numbers, with what had to be looked at and paid for.

    pays: the caller charges `Looked.paid`, or that of a `LookedInVain`, before anybody hears of it. Nobody else gets a look.

    Formal guarantee: nothing about the training rows is in the result's constants but what `Looked.paid` states. Nothing may
    be shown before that is charged; whatever goes wrong after a look, of any kind, may follow from it and is `LookedInVain`.
    """
    where = given.name if given is not None else config.dataset
    columns = columns_of(config.table, config.target, config.text, where)
    sheet = sheet_of(given if given is not None else config.dataset, columns, config.split_seed)
    knots = columns.knots or 1
    found = config.looked
    if found is None and needs_look(sheet):
        if deployed or config.secure_sum:
            raise UserError(
                f"{where}: a look at undeclared columns is made in one process, not among nodes: declare their ranges and "
                "categories from what can be measured, not from the rows (what `fedveil data check` shows is private), or set "
                "table.scaling = \"free\""
            )
        if not pays:
            raise UserError(
                f"{where}: undeclared columns need a look, which only a run can pay for: `fedveil run` or `fedveil fit` makes "
                "and charges it. Or declare their ranges and categories"
            )
        found = _bought(sheet, config, root, knots)
    looked = constants(sheet, knots, found)
    with after(looked.paid):
        rows = limit_rows(encode(sheet, looked.known, where.rpartition("/")[2]), config.limit, None, config.split_seed)
        return hold_out(rows, config.validation, config.split_seed), looked


def _bought(sheet: Sheet, config: RunConfig, root: int | bytes, knots: int) -> Looked:
    if config.target_epsilon is None:
        raise UserError(
            f"{sheet.table.name}: columns without ranges are paid for from a budget: set target_epsilon (and calibrate = true), "
            "declare ranges and categories, or set table.scaling = \"free\""
        )
    if config.partition not in ("groups", "iid"):
        raise UserError(f"{sheet.table.name}: paid scaling needs partition = groups or iid, not {config.partition}")
    observer = "sum" if config.built_recipe().place.sum_only else "server"
    blank = np.zeros(len(sheet.train), np.int64)
    rows = Dataset(sheet.table.name, blank[:, None].astype(np.float32), blank, blank[:0, None], blank[:0], classes=1,
                   groups=sheet.groups, group_names=sheet.group_names)  # fmt: skip
    dealt = partition(rows, config.partition, config.clients, config.seed, **config.partition_options)
    check_declared(sheet)
    if not config.allow_large_delta:
        check_delta(config.delta, len(sheet.train), "training rows")
    cost = price(
        len(needs_look(sheet)), len(sheet.train), dealt.clients, observer, config.target_epsilon, config.delta,
        sheet.columns.share,
    )  # fmt: skip
    bought = look(sheet, [dealt.rows(c) for c in range(dealt.clients)], cost, observer, root, knots)
    return Looked(with_knots(bought.known, knots), bought.paid)


def constants(sheet: Sheet, knots: int, found: Looked | None) -> Looked:
    """What was found, now or when the run was made: it stays as it was then. Else declared constants, with so many knots."""
    if found is not None:
        return found
    columns = sheet.columns
    scales = tuple(declared(sheet, c, knots) for c in columns.features(sheet.table)) if not columns.text else ()
    if columns.classes:
        return Looked(Known(scales, "classification", columns.classes))
    if columns.target in columns.ranges and columns.task != "classification":
        low, high = columns.ranges[columns.target]
        return Looked(Known(scales, "regression", low=low, high=high))
    raise UserError(
        f"{sheet.table.name}: with scaling = free the target must be declared: --classes A,B,… or --ranges "
        f"{columns.target}=low:high. Values found in the rows are private."
    )


def needs_look(sheet: Sheet) -> list[str]:
    """The columns that a look would have to count; empty if everything is declared or nobody pays."""
    if sheet.columns.scaling == "free":
        return []
    found = sheet.columns.undeclared(sheet.table)
    return found if sheet.columns.target_known else [*found, sheet.columns.target]


def look(sheet: Sheet, holders: Sequence[np.ndarray], cost: Price, observer: str, root: int | bytes, knots: int) -> Looked:
    """Find the constants of the undeclared columns. holders: the training rows of each client (numbers into sheet.train)."""
    asked = needs_look(sheet)
    parts = [sheet.train[rows] for rows in holders] if observer == "server" else [sheet.train]
    # A row is in one place of every column asked for, and once more among the target's words.
    lists = len(asked) + (sheet.columns.target in asked)
    first = tally(lists, len(asked) * (MISSING + 1 + PLACES) + len(sheet.train), cost.multiplier, cost.tail)
    spread = first.deviation * math.sqrt(len(parts))
    seen = _count(sheet, asked, parts, first, derive(root, "look", 1), _coarse, MISSING + 1 + PLACES)
    labels = _labels(sheet, parts, first, derive(root, "look", 1)) if sheet.columns.target in asked else {}
    paid = [Paid("a noised look at kinds, magnitudes and classes", first.event(), _hash([seen, labels]))]
    with after(paid):
        rough = {column: _rough(sheet, column, counts, spread, len(sheet.train)) for column, counts in seen.items()}
        target = rough.pop(sheet.columns.target, None)
        task, classes, usual = _task(sheet, labels, target)
        again = [c for c, scale in rough.items() if scale.kind == "number"]
        again += [sheet.columns.target] if task == "regression" and target is not None else []
        fine: dict[str, np.ndarray] = {}
        if again:
            second = tally(len(again), len(again) * FINE, cost.multiplier)
            ends = rough if target is None else {**rough, sheet.columns.target: target}
            key = derive(root, "look", 2)
            fine = _count(sheet, again, parts, second, key, lambda cells, c: _finely(cells, ends[c]), FINE)
            spread = second.deviation * math.sqrt(len(parts))
            paid.append(Paid("a noised look at ranges", second.event(), _hash([fine])))
        scales = []
        for column in [] if sheet.columns.text else sheet.columns.features(sheet.table):  # texts need no constants
            scale = rough.get(column) or declared(sheet, column, knots)
            scales.append(_sharp(scale, fine[column], spread, knots) if column in fine else scale)
        low, high = sheet.columns.ranges.get(sheet.columns.target, (-1.0, 1.0))
        if target is not None and sheet.columns.target in fine:
            sharp = _sharp(target, fine[sheet.columns.target], spread, 1)
            low, high = sharp.low, sharp.high
        return Looked(Known(tuple(scales), task, classes, low, high, usual), tuple(paid))


def _count(
    sheet: Sheet, asked: Sequence[str], parts: Sequence[np.ndarray], noise: Tally, key: bytes,
    place: Callable[[np.ndarray, str], np.ndarray], places: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Noised counts of every column's places, summed over the parts that each got noise of their own."""
    placed = {column: place(sheet.table.columns[column], column) for column in asked}
    total = np.zeros(len(asked) * places)
    for number, rows in enumerate(parts):
        own = np.concatenate([np.bincount(placed[c][rows] + 1, minlength=places + 1)[1:] for c in asked])
        total += noise.counts(own, derive(key, "counts", number))
    return dict(zip(asked, total.reshape(len(asked), places), strict=True))


def _labels(sheet: Sheet, parts: Sequence[np.ndarray], noise: Tally, key: bytes) -> dict[str, float]:
    """The target's values that may be shown, with noised counts."""
    cells = words(sheet.table.columns[sheet.columns.target])
    found: dict[str, float] = {}
    for number, rows in enumerate(parts):
        counts = dict(zip(*(v.tolist() for v in np.unique(cells[rows], return_counts=True)), strict=True))
        for word, noisy in noise.shown_words(counts, derive(key, "labels", number)).items():
            found[word] = found.get(word, 0.0) + noisy
    return found


def _coarse(cells: np.ndarray, _: str = "") -> np.ndarray:
    """The public place of each cell: a power of two, missing, or a hashed word."""
    values, said = numbers(cells), words(cells)
    out = np.searchsorted(EDGES, np.nan_to_num(values), side="right")
    out = np.where(np.isnan(values), MISSING + 1 + place_of(said), out)
    return np.where(said == "", MISSING, out).astype(np.int64)


def _rough(sheet: Sheet, column: str, counts: np.ndarray, noise: float, rows: int) -> Scale:
    """What the first look says about a column."""
    clear = max(STANDS_OUT * noise, 0.002 * rows)
    out = np.flatnonzero(counts > clear)
    heard = np.where(counts > clear, counts, 0.0)
    as_number, as_words = heard[:BINS].sum(), heard[MISSING + 1 :].sum()
    if as_number == 0 and as_words == 0:
        return Scale(column, "left out", how="paid: nothing stands out of the noise")
    if as_words > as_number:
        kept = sorted(np.argsort(-heard[MISSING + 1 :])[: min(MOST_PLACES_KEPT, int((heard[MISSING + 1 :] > 0).sum()))])
        return Scale(column, "words", places=tuple(int(p) for p in kept), how="paid: places of words in use")
    low, high = _ends(out[out < BINS])
    return Scale(column, "number", low, high, mark=bool(counts[MISSING] > clear), how="paid: range")


def _ends(places: np.ndarray) -> tuple[float, float]:
    edges = np.concatenate([[2 * EDGES[0]], EDGES, [2 * EDGES[-1]]])
    return float(edges[places.min()]), float(edges[places.max() + 1])


def _curved(scale: Scale) -> bool:
    """Positive columns over many powers of two are counted on a logarithmic scale."""
    return scale.low > 0 and scale.high / scale.low > 60


def _grid(scale: Scale) -> np.ndarray:
    """The ends of the second look's places."""
    if _curved(scale):
        return np.geomspace(scale.low, scale.high, FINE + 1)
    return np.linspace(scale.low, scale.high, FINE + 1)


def _finely(cells: np.ndarray, scale: Scale) -> np.ndarray:
    """The place of each value between the ends; NOWHERE for missing ones, which are not counted again."""
    values = numbers(cells)
    at = np.clip(np.searchsorted(_grid(scale), np.nan_to_num(values, nan=scale.low), side="right") - 1, 0, FINE - 1)
    return np.where(np.isnan(values), NOWHERE, at)


def _sharp(scale: Scale, counts: np.ndarray, noise: float, knots: int) -> Scale:
    """Ends where the counts stand out, and knots at their quantiles."""
    grid = _grid(scale)
    smooth = np.convolve(np.pad(counts, 1, mode="edge"), np.ones(3) / 3, mode="valid")
    heard = np.where(smooth > 3.3 * noise / math.sqrt(3), np.maximum(smooth, 0.0), 0.0)
    if heard.sum() <= 0:
        return scale
    total = np.concatenate([[0.0], np.cumsum(heard)]) / heard.sum()
    low, high = (float(np.interp(q, total, grid)) for q in (0.005, 0.995))
    if not low < high:
        return scale
    if knots < 2:
        return replace(scale, low=low, high=high)
    spots = np.unique(np.interp(np.linspace(0, 1, knots), total, grid))
    apart = (high - low) / (8 * knots)
    kept = [low]
    for spot in spots:
        if spot - kept[-1] > apart and high - spot > apart:
            kept.append(float(spot))
    return replace(scale, low=low, high=high, knots=(*kept, high))


def _task(sheet: Sheet, labels: dict[str, float], target: Scale | None) -> tuple[Task, tuple[str, ...], int]:
    """Classification if a few values cover nearly all rows, else regression; as declared where it is."""
    columns = sheet.columns
    if columns.classes:
        return "classification", columns.classes, 0
    if target is None:
        return "regression", (), 0
    few = len(labels) <= (FEW_LABELS if target.kind == "number" else MOST_CLASSES)
    covered = sum(labels.values()) > 0.8 * len(sheet.train)
    task: Task = columns.task or ("classification" if covered and few else "regression")
    if columns.task == "classification" and target.kind == "number" and not (covered and len(labels) <= MOST_CLASSES):
        raise UserError(
            f"{sheet.table.name}: hardly any value of the target '{columns.target}' is frequent enough to be a class. If it is a "
            "quantity, add --task regression; else declare its classes (--classes A,B,…)."
        )
    if task == "regression":
        if target.kind != "number":
            raise UserError(
                f"{sheet.table.name}: the target '{columns.target}' holds words of which too few are frequent enough to be shown "
                "under noise; declare them (--classes A,B,…), or take another target."
            )
        return task, (), 0
    if len(labels) < 2:
        raise UserError(
            f"{sheet.table.name}: under noise {len(labels) or 'no'} class of '{columns.target}' can be told from a rare value; "
            "at least two are needed. Declare them (--classes A,B,…), give a larger epsilon, or check the target."
        )
    names = sorted(labels, key=lambda w: (float(numbers(np.array([w]))[0]) if target.kind == "number" else 0.0, w))
    return task, tuple(names), names.index(max(names, key=lambda w: labels[w]))


def _hash(values: Sequence[Document]) -> str:
    plain = [{k: np.asarray(v).tolist() for k, v in value.items()} for value in values]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
