"""Whose history of releases costs most?

The ledger keeps, per charged release, which clients had which claims. Everything it answers is linear in
that: a client's *history* is how often it met each kind of event. This module counts histories, adds them
up where several clients hold one example, and finds the largest epsilon over all of them with few calls of
an accountant.

Formal guarantee: `worst` returns an epsilon that is at least the accountant's epsilon of every history
(for `pld`: at least a valid epsilon of every history), because a history that is not composed on its own is
covered by a bound that is proved for it: its own Rényi curve, or the curve of a history that dominates it.
Domination used here: more uses of an event; a smaller Gaussian, Laplace or two-valued scale (the larger one
is a post-processing of the smaller); a larger Poisson rate (a mixture with "not sampled").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.special import gammaln

from fedveil.privacy.accountants import (
    SLACK,
    Answer,
    Composition,
    left_by_samplers,
    lost_to_tails,
    with_samplers,
)
from fedveil.privacy.events import Claim, Event, Noise
from fedveil.privacy.filters import adaptive
from fedveil.privacy.ledger.balance import Book, Pair, once

FILTER = "filter"  # the accountant of claims whose noise may be chosen after what was released before
GRID = 128  # distinct noise multipliers of one family that are composed one by one
_EXACT = 300  # events composed for single histories before the rest is bounded together
_CLOSE = 1.001  # a common bound this near to the largest single epsilon is reported instead of searching on
_REMEMBERED = 500  # answers kept in memory
_NESTED = 1e-4  # finest relative step of the rounding grid; coarser grids are unions of its cells
_MONOTONE = ("gaussian", "laplace", "two-valued")
_ORDERS = np.array([*range(2, 33), 36, 40, 48, 56, 64, 96, 128, 256])
# Terms k = 0, ..., n of the binomial sums of all orders n, side by side.
_N = np.repeat(_ORDERS, _ORDERS + 1)
_K = np.concatenate([np.arange(order + 1) for order in _ORDERS])
_STARTS = np.concatenate([[0], np.cumsum(_ORDERS + 1)[:-1]])
_LOG_BINOMIAL = gammaln(_N + 1) - gammaln(_K + 1) - gammaln(_N - _K + 1)


@dataclass(frozen=True)
class Histories:
    """Uses of each event (columns, each with steps=1) in each history (rows), and uses that all rows share."""

    events: tuple[Event, ...]
    counts: csr_array
    shared: np.ndarray

    def uses(self, row: int) -> dict[Event, int]:
        """One whole history."""
        first, last = self.counts.indptr[row], self.counts.indptr[row + 1]
        total = self.shared.copy()
        np.add.at(total, self.counts.indices[first:last], self.counts.data[first:last])
        return {self.events[i]: int(total[i]) for i in np.flatnonzero(total)}

    def only(self, rows: Sequence[int] | np.ndarray) -> Histories:
        """Some of the rows."""
        return Histories(self.events, self.counts[np.asarray(rows, dtype=np.int64)], self.shared)

    def busy(self) -> Histories:
        """Without the rows that have nothing of their own (but for one, if that is all there is)."""
        rows = np.flatnonzero(np.diff(self.counts.indptr))
        return self if len(rows) == self.counts.shape[0] else self.only(rows if len(rows) else [0])

    def on(self, events: tuple[Event, ...]) -> Histories:
        """The same histories with other columns, a superset of these."""
        place = {event: i for i, event in enumerate(events)}
        columns = np.array([place[event] for event in self.events], dtype=np.int64)
        old = self.counts.tocoo()
        moved = coo_array((old.data, (old.row, columns[old.col])), shape=(self.counts.shape[0], len(events)))
        shared = np.zeros(len(events), dtype=np.int64)
        shared[columns] = self.shared
        return Histories(events, moved.tocsr(), shared)


def of_clients(book: Book, pair: Pair, wanted: Callable[[Claim], bool]) -> Histories:
    """One history per client from the `wanted` claims about `pair`; claims about everyone are shared.

    Multipliers are rounded down to a grid where a family has more than `GRID` of them.
    """
    claims = [(part, claim, kind) for part, claim, kind in book.by_pair.get(pair, ()) if wanted(claim)]
    held = [(part, kind, c.event.steps) for part, c, kind in claims if c.event and c.scope == "holder"]
    parts, kinds, steps = np.array(held, dtype=np.int64).reshape(-1, 3).T
    everyone = [
        (book.kinds[once(claim.event)], times * claim.event.steps)
        for claim, times in book.everyone.items()
        if claim.event and (claim.observer, claim.unit) == pair and wanted(claim)
    ]
    shared_kinds, shared_steps = np.array(everyone, dtype=np.int64).reshape(-1, 2).T
    used = np.unique(np.concatenate([kinds, shared_kinds]))
    columns, place = _columns([book.kind_list[kind] for kind in used])
    places = place[np.searchsorted(used, kinds)]
    per_part = coo_array((steps, (parts, places)), shape=(len(book.parts), len(columns))).tocsr()
    shared = np.zeros(len(columns), dtype=np.int64)
    np.add.at(shared, place[np.searchsorted(used, shared_kinds)], shared_steps)
    return Histories(columns, csr_array(book.met() @ per_part), shared)


def most(first: Histories, second: Histories) -> Histories:
    """The larger count of each event, row by row."""
    events = tuple(dict.fromkeys((*first.events, *second.events)))
    one, other = first.on(events), second.on(events)
    return Histories(
        events, csr_array(one.counts.maximum(other.counts)), np.maximum(one.shared, other.shared)
    )


def of_units(own: Histories, copies: int, holders: Sequence[Sequence[int]], client: int | None) -> Histories:
    """Histories of the units that up to `copies` clients hold together: all, or only those `client` holds.

    Exact with known `holders` (sets of clients with a common example); otherwise one history that dominates
    every possible sum.
    """
    clients = own.counts.shape[0]
    if copies == 1:
        return own if client is None else own.only([client])
    if holders:
        chosen = [tuple(group) for group in holders if client is None or client in group]
        unshared = set(range(clients)) if client is None else {client}
        chosen += [(c,) for c in sorted(unshared.difference(*chosen))]
        rows = np.repeat(np.arange(len(chosen)), [len(group) for group in chosen])
        members = np.concatenate([np.array(group, dtype=np.int64) for group in chosen])
        sums = coo_array(
            (np.ones(len(rows), np.int64), (rows, members)), shape=(len(chosen), clients)
        ).tocsr()
        return Histories(own.events, csr_array(sums @ own.counts), own.shared)
    if client is None:
        return covering(own, copies)
    others = covering(own.only(np.delete(np.arange(clients), client)), copies - 1)
    mine = own.only([client]).on(others.events)
    return Histories(others.events, csr_array(mine.counts + others.counts), mine.shared)


def relations(histories: Histories) -> str | None:
    """The neighbouring relations of the events that were used; None if one history mixes them."""
    names = sorted({event.relation for event in histories.events})
    used = np.zeros((histories.counts.shape[0], len(names)), dtype=bool)
    for i, name in enumerate(names):
        chosen = np.array([event.relation == name for event in histories.events])
        used[:, i] = (histories.counts @ chosen.astype(np.int64) + histories.shared[chosen].sum()) > 0
    if (used.sum(axis=1) > 1).any():
        return None
    return " or ".join(name for i, name in enumerate(names) if used[:, i].any())


def covering(histories: Histories, copies: int = 1) -> Histories:
    """One history that dominates the sum of any `copies` of the given ones (what they share stays shared).

    Events of one family are ordered by strength; the k-th strongest event of the answer is at least as
    strong as the k-th strongest of any such sum. Poisson rates are raised to the largest in the family.
    """
    histories = histories.busy()
    rows = histories.counts.shape[0]
    families: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i in np.unique(histories.counts.indices):
        families[_family(histories.events[i])].append(int(i))
    uses: dict[Event, int] = {}
    for members in families.values():
        rate = max(histories.events[i].sampling.rate for i in members)
        scales, scale = np.unique(
            [histories.events[i].noise.multiplier for i in members], return_inverse=True
        )
        ones = np.ones(len(members), np.int64)
        by_scale = coo_array((ones, (members, scale)), shape=(len(histories.events), len(scales))).tocsr()
        running = (histories.counts @ by_scale).toarray().cumsum(axis=1)
        kept = min(copies, rows)
        top = np.partition(running, rows - kept, axis=0)[rows - kept :].sum(axis=0)
        like = histories.events[members[0]]
        drawn = _worst_sampler([histories.events[i].noise for i in members])
        for value, times in zip(scales, np.diff(top, prepend=0), strict=True):
            noise, sampling = replace(drawn, multiplier=float(value)), replace(like.sampling, rate=rate)
            uses[replace(like, noise=noise, sampling=sampling)] = int(times)
    empty = Histories(
        histories.events, csr_array((1, len(histories.events)), dtype=np.int64), histories.shared
    )
    events = tuple(dict.fromkeys((*uses, *histories.events)))
    counts = csr_array([[uses.get(event, 0) for event in events]], dtype=np.int64)
    return Histories(events, counts, empty.on(events).shared)


class Judge:
    """Asks accountants about histories and remembers: one more round costs one more composition."""

    def __init__(self) -> None:
        self._answers: dict[tuple[object, ...], Answer] = {}
        self._recent: list[tuple[str, dict[Event, int], Composition]] = []
        self._curves: dict[Event, np.ndarray] = {}

    def answer(self, uses: dict[Event, int], delta: float, accountant: str) -> Answer:
        """The accountant's answer for one history."""
        key = (accountant, delta, frozenset(uses.items()))
        if key not in self._answers:
            if len(self._answers) >= _REMEMBERED:
                self._answers.clear()
            self._answers[key] = self._solved(uses, delta, accountant)
        return self._answers[key]

    def _solved(self, uses: dict[Event, int], delta: float, accountant: str) -> Answer:
        if accountant == FILTER:
            return adaptive([replace(event, steps=times) for event, times in uses.items()], delta)
        return with_samplers(self._compose(uses, accountant), uses.items(), delta)

    def _compose(self, uses: dict[Event, int], accountant: str) -> Composition:
        base: dict[Event, int] = {}
        composition = Composition.start(accountant)
        for name, known, known_composition in self._recent:
            inside = name == accountant and sum(known.values()) > sum(base.values())
            if inside and all(uses.get(event, 0) >= times for event, times in known.items()):
                base, composition = known, known_composition
        extra = [replace(event, steps=times - base.get(event, 0)) for event, times in uses.items()]
        extra = [event for event in extra if event.steps]
        if extra:
            composition = composition.add(extra)
            self._recent = [*self._recent[-11:], (accountant, uses, composition)]
        return composition

    def quick(self, histories: Histories, delta: float) -> np.ndarray | None:
        """A valid epsilon of each history from integer Rényi orders; None unless all events are Gaussian."""
        events = histories.events
        if delta <= 0 or not all(map(_is_plain_gaussian, events)):
            return None
        new = [event for event in events if event not in self._curves]
        self._curves.update(zip(new, _gaussian_curves(new), strict=True))
        curves = np.array([self._curves[event] for event in events]).reshape(len(events), len(_ORDERS))
        totals = histories.counts @ curves + histories.shared @ curves

        def epsilon(delta: float | np.ndarray) -> np.ndarray:
            paid = np.log(np.reshape(delta, (-1, 1)) * _ORDERS) / (_ORDERS - 1)
            made: np.ndarray = np.maximum((totals + np.log1p(-1 / _ORDERS) - paid).min(axis=1), 0.0)
            return made

        # The samplers' error, as `with_samplers` counts it: from delta / 2 on epsilon rises by less than 1, its room.
        errors = np.array([(event.noise.ratio, event.noise.tail) for event in events]).reshape(-1, 2)
        ratio, tail = (histories.counts @ errors + histories.shared @ errors).T
        left = left_by_samplers(delta, lost_to_tails(tail, epsilon(delta)))
        fits = (ratio <= SLACK) & (left >= delta / 2)
        found = np.where(fits, epsilon(np.where(fits, left, delta)) + 2 * ratio, np.inf)
        return np.where(totals[:, 0] > 0, found, 0.0)


def worst(
    judge: Judge, histories: Histories, delta: float, accountant: str, limit: float | None = None
) -> Answer:
    """The largest epsilon over all histories (see the module's guarantee).

    With `limit`, an epsilon at or below it may come from the quick Rényi bound alone: enough to know that a
    budget holds.
    """
    histories = histories.busy()
    quick = judge.quick(histories, delta) if accountant == "pld" else None
    if quick is not None and limit is not None and quick.max() <= limit:
        return Answer("rdp", float(quick.max()), delta, "sound", "")
    order = np.argsort(-(_strength(histories) if quick is None else quick), kind="stable")
    histories = histories.only(order)
    bounds = None if quick is None else quick[order]
    best = judge.answer(histories.uses(0), delta, accountant)
    done = [histories.uses(0)]
    most_exact = min(max(_EXACT // max(len(done[0]), 1), 3), 60)
    for i in range(1, len(order)):
        if best.epsilon is None or (bounds is not None and bounds[i] <= best.epsilon):
            break
        if (uses := histories.uses(i)) in done:
            continue
        if len(done) in (1, most_exact):  # perhaps one history that dominates all the others settles it
            open_end = len(order) if bounds is None else int((bounds > best.epsilon).sum())
            rest = judge.answer(covering(histories.only(range(i, open_end))).uses(0), delta, accountant)
            if bounds is not None and np.isfinite(bounds[i]) and (rest.epsilon is None or bounds[i] < rest.epsilon):
                rest = Answer("rdp", float(bounds[i]), delta, "sound", "")
            near = rest.epsilon is not None and rest.epsilon <= best.epsilon * _CLOSE
            if near or len(done) == most_exact:
                best = _larger(best, rest)
                break
        best = _larger(best, judge.answer(uses, delta, accountant))
        done.append(uses)
    if bounds is not None and best.epsilon is not None and bounds[0] < best.epsilon:
        return Answer("rdp", float(bounds[0]), delta, "sound", "")
    return best


def worst_of_each(
    judge: Judge, histories: Histories, delta: float, accountant: str, limit: float | None = None
) -> Answer:
    """`worst` where the accountant refuses some events: histories that met one of them are judged by Rényi divergences,
    the others stay with the accountant. One client's noise does not make the others' bounds looser."""
    histories = histories.busy()
    refused = np.array(
        [judge.answer({e: 1}, delta, accountant).epsilon is None for e in histories.events], np.int64
    )
    met = (histories.counts @ refused + histories.shared @ refused) > 0
    if met.all() or not met.any():
        return worst(judge, histories, delta, "rdp", limit)
    kept = worst(judge, histories.only(np.flatnonzero(~met)), delta, accountant, limit)
    if kept.epsilon is None:
        return worst(judge, histories, delta, "rdp", limit)
    return _larger(kept, worst(judge, histories.only(np.flatnonzero(met)), delta, "rdp", limit))


def _larger(one: Answer, other: Answer) -> Answer:
    """The larger epsilon; nominal if either is, since then the larger one bounds nothing."""
    if one.epsilon is None or (other.epsilon is not None and other.epsilon <= one.epsilon):
        larger, smaller = one, other
    else:
        larger, smaller = other, one
    if larger.verdict == "sound" and smaller.verdict == "nominal":
        return replace(larger, verdict="nominal", reason=smaller.reason)
    return larger


def _worst_sampler(noises: Sequence[Noise]) -> Noise:
    """The first noise with the largest sampler's errors of all."""
    return replace(noises[0], ratio=max(n.ratio for n in noises), tail=max(n.tail for n in noises))


def _family(event: Event) -> tuple[object, ...]:
    """Events that are ordered by (multiplier, rate) alone; others are a family of their own."""
    noise, sampling = event.noise, event.sampling
    if noise.mechanism not in _MONOTONE:
        return (event,)
    shape = (noise.mechanism, noise.norm, noise.dimension, noise.nu, noise.width, event.relation, event.unit)
    return (*shape, sampling.kind, sampling.batch, sampling.population)


def _columns(events: Sequence[Event]) -> tuple[tuple[Event, ...], np.ndarray]:
    """Distinct events to account for, and the place of each given event among them.

    A family with more than `GRID` multipliers is rounded down to at most so many. The grids are nested, so
    rounding twice is rounding once, and answers before and after one more round stay comparable.
    """
    families: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, event in enumerate(events):
        families[_family(event)].append(i)
    columns: dict[tuple[tuple[object, ...], float, float], tuple[int, Event]] = {}
    place = np.zeros(len(events), dtype=np.int64)
    for family, members in families.items():
        given = np.array([events[i].noise.multiplier for i in members])
        values, step = given, _NESTED
        while len(np.unique(values)) > GRID:
            values = np.exp(np.floor(np.log(given) / step) * step)
            values = np.where(values > given, values * np.exp(-step), values)
            step *= 2
        for i, value in zip(members, values.tolist(), strict=True):
            key = (family, value, events[i].sampling.rate)
            at, before = columns.get(key, (len(columns), events[i]))
            drawn = _worst_sampler([before.noise, events[i].noise])
            columns[key] = (at, replace(events[i], noise=replace(drawn, multiplier=value)))
            place[i] = at
    return tuple(event for _, event in columns.values()), place


def _strength(histories: Histories) -> np.ndarray:
    """A cheap score that orders histories roughly by epsilon; used to choose, never to promise."""
    weights = np.array([(event.sampling.rate / event.noise.multiplier) ** 2 for event in histories.events])
    made: np.ndarray = histories.counts @ weights.reshape(len(histories.events))
    return made


def _is_plain_gaussian(event: Event) -> bool:
    poisson = event.sampling.kind == "poisson" and event.relation != "replace-one"
    return event.noise.mechanism == "gaussian" and (poisson or event.sampling.kind in ("none", "partition"))


def _gaussian_curves(events: Sequence[Event]) -> np.ndarray:
    """Exact Rényi divergence of one step at `_ORDERS`: binomial sums, all orders of many events at once."""
    curves = np.empty((len(events), len(_ORDERS)))
    for first in range(0, len(events), 1000):
        some = events[first : first + 1000]
        sigma = np.array([event.noise.multiplier for event in some]).reshape(-1, 1)
        rate = np.array([e.sampling.rate if e.sampling.kind == "poisson" else 1.0 for e in some]).reshape(
            -1, 1
        )
        q = np.clip(rate, 1e-300, 1 - 1e-16)
        terms = _LOG_BINOMIAL + (_K * _K - _K) / (2 * sigma**2) + _K * np.log(q) + (_N - _K) * np.log1p(-q)
        peak = np.maximum.reduceat(terms, _STARTS, axis=1)
        total = np.add.reduceat(np.exp(terms - np.repeat(peak, _ORDERS + 1, axis=1)), _STARTS, axis=1)
        sampled = np.maximum(peak + np.log(total), 0) / (_ORDERS - 1)
        curves[first : first + 1000] = np.where(rate >= 1, _ORDERS / (2 * sigma**2), sampled)
    return curves
