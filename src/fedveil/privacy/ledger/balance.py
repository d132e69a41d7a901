"""Everything a ledger has charged, in memory: which clients met which claims, and how often."""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array, csr_array

from fedveil.privacy.events import Claim, Event, Release

GROUP = "group"  # Claim.accountant of a client claim to be derived from the example row (group privacy)
Pair = tuple[str, str]  # observer, unit


class End(NamedTuple):
    """A claim set that leaves no sound promise: its number, whether it speaks about everyone, and why."""

    part: int
    everyone: bool
    reason: str


def ends_of(claims: tuple[Claim, ...], part: int = -1) -> dict[Pair, End]:
    """The observers and units for which a claim set has no sound claim although it says something.

    A client claim by group privacy counts as sound: it stands and falls with the example row.
    """
    said: dict[Pair, dict[str, Claim]] = {}
    for claim in claims:
        kept = claim.verdict == "sound" or claim.accountant == GROUP
        said.setdefault((claim.observer, claim.unit), {})["sound" if kept else claim.verdict] = claim
    ends = {}
    for pair, by_verdict in said.items():
        last = by_verdict.get("none") or (by_verdict.get("nominal") if "sound" not in by_verdict else None)
        if last is not None:
            shared = any(c.scope == "everyone" for c in claims if (c.observer, c.unit) == pair)
            ends[pair] = End(part, shared, last.reason or "no finite promise")
    return ends


@dataclass
class Book:
    """Everything charged: distinct claim sets, who had which how often, and claims about everyone."""

    clients: int
    parts: dict[tuple[Claim, ...], int] = field(default_factory=dict)
    sets: list[tuple[Claim, ...]] = field(default_factory=list)
    kinds: dict[Event, int] = field(default_factory=dict)  # events with steps=1
    kind_list: list[Event] = field(default_factory=list)
    by_pair: dict[Pair, list[tuple[int, Claim, int]]] = field(default_factory=dict)  # part, claim, kind
    entries: list[tuple[int, np.ndarray]] = field(default_factory=list)
    everyone: Counter[Claim] = field(default_factory=Counter)
    ends: dict[Pair, list[End]] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)  # parts that were charged in a round, not by a look before the first
    counted: tuple[int, csr_array] | None = None  # `met` of the first so many entries

    def add(self, release: Release) -> None:
        """Charge one release. A claim with scope "everyone" counts once per release, however many groups
        carry it: it speaks about any unit of the run, and each group repeats it."""
        shared: set[Claim] = set()
        for clients, claims in release.groups:
            if claims not in self.parts:
                self.define(claims)
            part = self.parts[claims]
            self.entries.append((part, np.asarray(clients, dtype=np.int64)))
            if release.round > 0:
                self.trained.add(part)
            shared.update(claim for claim in claims if claim.scope == "everyone")
        self.everyone.update(shared)

    def define(self, claims: tuple[Claim, ...]) -> None:
        """Number a claim set that was not met before."""
        if claims in self.parts:
            raise ValueError("a set of claims is written out twice")
        number = len(self.parts)
        self.parts[claims] = number
        self.sets.append(claims)
        for pair, end in ends_of(claims, number).items():
            self.ends.setdefault(pair, []).append(end)
        for claim in claims:
            kind = self.intern(claim.event)
            self.by_pair.setdefault((claim.observer, claim.unit), []).append((number, claim, kind))

    def intern(self, event: Event | None) -> int:
        """The number of a kind of event, however many steps; -1 for none."""
        if event is None:
            return -1
        single = once(event)
        kind = self.kinds.setdefault(single, len(self.kinds))
        if kind == len(self.kind_list):
            self.kind_list.append(single)
        return kind

    def plus(self, release: Release) -> Book:
        """What the book would be after `release`."""
        after = copy(self)
        after.parts, after.sets, after.entries = dict(self.parts), list(self.sets), list(self.entries)
        after.kinds, after.kind_list, after.everyone = (
            dict(self.kinds),
            list(self.kind_list),
            self.everyone.copy(),
        )
        after.trained = set(self.trained)
        after.ends = {pair: list(ends) for pair, ends in self.ends.items()}
        after.by_pair = {pair: list(claims) for pair, claims in self.by_pair.items()}
        after.add(release)
        return after

    def alone(self, client: int) -> Book:
        """The book of one client, who becomes client 0, with what is claimed about everyone."""
        one = Book(1, kinds=self.kinds, kind_list=self.kind_list, everyone=self.everyone.copy())
        met = self.met()
        for at in range(met.indptr[client], met.indptr[client + 1]):
            claims = self.sets[met.indices[at]]
            one.define(claims)
            one.entries.extend([(one.parts[claims], np.zeros(1, dtype=np.int64))] * int(met.data[at]))
        for pair, ends in self.ends.items():
            one.ends.setdefault(pair, []).extend(end for end in ends if end.everyone)
        return one

    def claims(self, pair: Pair) -> list[Claim]:
        """All claims about `pair` (some more than once)."""
        shared = [claim for claim in self.everyone if (claim.observer, claim.unit) == pair]
        return shared + [claim for _, claim, _ in self.by_pair.get(pair, ())]

    def met(self) -> csr_array:
        """How often each client [row] met each part [column]."""
        shape = (self.clients, len(self.parts))
        done, known = self.counted or (0, csr_array(shape, dtype=np.int64))
        known = csr_array((known.data, known.indices, known.indptr), shape=shape)
        if done < len(self.entries):
            fresh = self.entries[done:]
            rows = np.concatenate([clients for _, clients in fresh])
            columns = np.repeat([part for part, _ in fresh], [len(clients) for _, clients in fresh])
            known = known + coo_array((np.ones(len(rows), np.int64), (rows, columns)), shape=shape).tocsr()
        self.counted = (len(self.entries), known)
        return known

    def who_met(self, parts: set[int]) -> np.ndarray:
        """Which clients met one of `parts`."""
        chosen = np.zeros(len(self.parts), dtype=np.int64)
        chosen[list(parts)] = 1
        found: np.ndarray = (self.met() @ chosen) > 0
        return found


@dataclass(frozen=True)
class Pieces:
    """A release taken apart: each client's claims, and what is said about everyone."""

    own: dict[int, tuple[Claim, ...]]
    everyone: frozenset[Claim]
    ends: dict[Pair, End]

    def join(self, book: Book, client: int) -> None:
        """Add to the book of one client what this release says about it."""
        if client in self.own:
            book.add(Release(0, (((0,), self.own[client]),)))
        own = frozenset(c for c in self.own.get(client, ()) if c.scope == "everyone")
        book.everyone.update(self.everyone - own)
        for claim in self.everyone:
            book.intern(claim.event)
        for pair, end in self.ends.items():
            book.ends.setdefault(pair, []).append(end)


def pieces_of(release: Release) -> Pieces:
    ends: dict[Pair, End] = {}
    for _, claims in release.groups:
        if any(claim.scope == "everyone" for claim in claims):
            ends.update((pair, end) for pair, end in ends_of(claims).items() if end.everyone)
    own = {client: claims for clients, claims in release.groups for client in clients}
    everyone = frozenset(c for _, claims in release.groups for c in claims if c.scope == "everyone")
    return Pieces(own, everyone, ends)


def once(event: Event) -> Event:
    """The event with a single step."""
    return event if event.steps == 1 else replace(event, steps=1)
