"""Spend before you show: what was released, and what each observer can learn from it.

A ledger is an append-only file (`privacy.log`). `spend` checks the budgets, writes the release, waits until
it is on disk and only then returns; the caller may hand the release on after that and not before. A crash
can therefore make the ledger count a release that nobody saw, never the other way round.

How rows are composed:
- a claim with scope "holder" is charged to the clients of its group; a client pays for its own releases
  (its realised participations), and the row is the largest over all clients;
- a claim with scope "everyone" is charged to every client, once per release;
- several claims about one observer and unit in one release add up;
- a claim with scope "single" never adds up: its row is the worst single release;
- where several clients hold one example, their costs add (`Header.holders`, else the `copies` largest);
- a release without a sound claim where it makes a nominal or `none` claim ends the sound promise of that
  row: the verdict is `none`, with the reason. Nominal rows stand beside it, one per accountant.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedveil.errors import UserError
from fedveil.privacy.accountants import ACCOUNTANTS, Answer
from fedveil.privacy.accountants import answer as judge
from fedveil.privacy.events import OBSERVERS, UNITS, Claim, Release
from fedveil.privacy.ledger.balance import GROUP, Book, Pair, ends_of, pieces_of
from fedveil.privacy.ledger.entries import (
    SECRET,
    Budget,
    BudgetExceeded,
    Exceeded,
    Header,
    OwnRow,
    Receipt,
    Row,
    check_body,
    check_header,
    check_name,
    check_release,
    claim_from_lean,
    commit,
    group,
    header_from_json,
    header_to_json,
    lean,
    pack_clients,
    rejudged,
    unpack_clients,
)
from fedveil.privacy.ledger.journal import Anchor, Body, Damaged, Locked, Log, Record, read
from fedveil.privacy.ledger.worst import (
    FILTER,
    Judge,
    most,
    of_clients,
    of_units,
    relations,
    worst,
    worst_of_each,
)
from fedveil.privacy.shuffle import shuffled_noise

__all__ = [
    "GROUP", "Budget", "BudgetExceeded", "Damaged", "Exceeded", "Header", "Ledger", "Locked", "OwnRow", "Receipt",
    "Row", "commit", "group",
]  # fmt: skip


UNREADABLE = (UserError, LookupError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)
ROUNDING = 1 + 1e-8  # composing round by round and all at once differ by less


class _Past(NamedTuple):
    """An accepted release, as far as a replay has to match it."""

    fingerprint: str
    content: str
    made: str


@dataclass(frozen=True)
class _View:
    """What a question is about: all clients (row None), or one of them, which stands in `row` of the books."""

    book: Book
    committed: Book
    client: int | None
    row: int | None

    def claims(self, pair: Pair) -> list[Claim]:
        return self.book.claims(pair) + self.committed.claims(pair)


class Ledger:
    """One run's ledger. Use `create`, `open` (both lock the file) or `read`; close it or use it in `with`."""

    def __init__(
        self, header: Header, records: Sequence[Record], log: Log | None, path: Path | str = "ledger"
    ) -> None:
        self.header = header
        self.torn_bytes = 0
        self._log = log
        self._judge = Judge()
        self._book = Book(header.clients)
        self._committed = Book(header.clients)
        if header.committed is not None and header.stopping == "data":
            self._committed.add(header.committed)
        self._past: dict[str, _Past] = {}
        self._spent: set[int] = set()
        self._rounds: set[int] = set()
        for record in records:
            self._head = record
            try:
                check_body(record.body, len(header.budgets))
                self._take(record)
            except UNREADABLE as wrong:
                raise Damaged(path, record.number, f"its contents are not a ledger's ({wrong})") from None

    @classmethod
    def create(cls, path: Path | str, header: Header) -> Ledger:
        """Start a ledger; refuses a delta that is no promise, and a committed plan over budget."""
        check_header(header)
        draft = cls(header, (), None)
        over = draft._over(header.budgets) if header.stopping == "data" else []
        if over:
            raise UserError(f"ledger header: the committed plan does not fit: {over[0]}.")
        log = Log.create(path, {"kind": "header", "header": header_to_json(header)})
        return cls(header, read(path).records, log)

    @classmethod
    def open(cls, path: Path | str, expect: tuple[int, str] | None = None) -> Ledger:
        """Continue a ledger: check the chain, repair a torn end, restore what was spent.

        expect: (number, hash) of a record that must be there, as kept in a checkpoint; with the head beside the
        file it finds a ledger that was cut short, rolled back or exchanged.
        """
        log, records = Log.open(path, [Anchor(*expect, "the checkpoint")] if expect else ())
        try:
            return cls(_header_of(path, records), records, log, path)
        except BaseException:
            log.close()
            raise

    @classmethod
    def read(cls, path: Path | str, until: int | None = None, *, rounds: int | None = None) -> Ledger:
        """Look at a ledger without locking or repairing it, as it was after record `until` or round `rounds` if given."""
        contents = read(path)
        records = contents.records if until is None else contents.records[: until + 1]
        if rounds is not None:
            later = (r.body["kind"] == "release" and _round(r) > rounds for r in records)
            records = records[: next((at for at, is_later in enumerate(later) if is_later), len(records))]
        ledger = cls(_header_of(path, records), records, None, path)
        ledger.torn_bytes = len(contents.torn)
        return ledger

    def close(self) -> None:
        """Give up the writer's lock."""
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing

    def spend(
        self, release: Release, *, fingerprint: str = "", replay_of: str | None = None, made: str = ""
    ) -> Receipt:
        """Charge a release; when this returns it is on disk and may be handed on.

        fingerprint: hash of checkpoint, cohort and configuration. made: hash of what will be handed on, noise included.
        replay_of: the hash of an earlier record that this release repeats after a crash. It is the same release, and not
        charged again, only if the noise is seeded (`simulated`), fingerprint, round, clients and claims agree, and the very
        same bits were `made`; otherwise it is a second release and charged as one.

        Raises `BudgetExceeded` before anything is charged. The refusal is recorded: from then on every
        release that touches this budget is refused, also after reopening.
        """
        if self._log is None:
            raise UserError("This ledger was opened for reading; use Ledger.open to spend.")
        check_release(release, self.header.clients)
        if replay_of is not None and replay_of not in self._past:
            raise UserError(f"replay_of {replay_of}: the ledger has no release with this hash.")
        body = self._encode(release)
        this = _Past(fingerprint, _content(body), made)
        known = bool(fingerprint and made and replay_of)
        charged = not (self.header.simulated and known and self._past[replay_of or ""] == this)
        if charged and (over := self.would_exceed(release)):
            numbers = {self.header.budgets.index(exceeded.budget) for exceeded in over}
            if not numbers <= self._spent:
                self._accept({"kind": "spent", "round": int(release.round), "budgets": sorted(numbers)})
            raise BudgetExceeded(over)
        body["fingerprint"], body["charged"] = fingerprint, charged
        if made:
            body["made"] = made
        if replay_of is not None:
            body["replay_of"] = replay_of
        record = self._accept(body, release)
        return Receipt(record.number, record.hash, charged)

    def would_exceed(self, release: Release, budgets: Sequence[Budget] | None = None) -> tuple[Exceeded, ...]:
        """The budgets that `release` would exceed, or that were refused once; empty if it may be made.

        budgets: other ones than the header's, e.g. what an owner allows today; nothing is recorded about them.
        """
        asked = self.header.budgets if budgets is None else tuple(budgets)
        if not asked:
            return ()
        check_release(release, self.header.clients)
        touched = self._touched(release, asked)
        refused = self._spent if budgets is None else set[int]()
        gone = [Exceeded(asked[i], None, spent=True) for i in touched if i in refused]
        fresh = [asked[i] for i in touched if i not in refused]
        return (*gone, *self._over(fresh, release))

    def spent(
        self, client: int, observer: str, unit: str, delta: float | None = None, accountant: str = "pld"
    ) -> float | None:
        """Epsilon that one client has spent with an observer so far; None if no finite promise is left."""
        check_name("observer", observer, OBSERVERS)
        check_name("unit", unit, UNITS)
        meter = Budget(math.inf, observer, unit, client, delta=delta, accountant=accountant)  # type: ignore[arg-type]
        view = self._view(client)
        return self._reached(view, meter, None) if view.claims((meter.observer, meter.unit)) else 0.0

    # -- reading

    @property
    def head(self) -> tuple[int, str]:
        """Number and hash of the last record; keep it in checkpoints for `open(expect=...)`."""
        return self._head.number, self._head.hash

    @property
    def rounds(self) -> int:
        """Number of different rounds with a charged release."""
        return len(self._rounds)

    def find(self, fingerprint: str) -> str | None:
        """Hash of the latest release with this fingerprint, to pass as `replay_of`."""
        return next((h for h, past in reversed(self._past.items()) if past.fingerprint == fingerprint), None)

    def participations(self) -> np.ndarray:
        """Charged releases of each client."""
        return np.asarray(self._book.met().sum(axis=1)).reshape(-1)

    def table(self, delta: float | None = None, accountant: str = "pld", *, named: bool = True) -> list[Row]:
        """What each observer can learn about each unit: a sound (or `none`) row, and nominal rows beside it.

        named: reasons may say which clients they are about; else only how many.

        Formal guarantee: a row with verdict "sound" holds for neighbours in `relation` if each claim holds
        for its release, participation does not depend on the data, and the noise is secret.
        """
        delta = self.header.delta if delta is None else delta
        check_name("accountant", accountant, tuple(ACCOUNTANTS))
        if not 0 <= delta < 1:
            raise UserError(f"delta is {delta}, must be at least 0 and below 1.")
        rows: list[Row] = []
        for observer in OBSERVERS:
            for unit in UNITS:
                claims = self._view().claims((observer, unit))
                if any(claim.verdict != "nominal" for claim in claims):
                    rows.extend(self._sound_rows((observer, unit), delta, accountant))
                names = dict.fromkeys(c.accountant or accountant for c in claims if c.verdict == "nominal")
                rows.extend(self._nominal_row((observer, unit), delta, name, accountant, named) for name in names)
        return rows

    def own_table(self, accountant: str = "pld") -> list[OwnRow]:
        """What each client with a budget of its own was promised and has spent of it, clients with equal budgets together; the
        others, if there are any, stand last.

        Formal guarantee: that of `spent`, about the data of the client in question, at the delta of its own budget.
        """
        own = [b for b in self.header.budgets if b.client is not None and b.verdict == "sound"]
        groups: dict[tuple[str, str, float | None, float], list[int]] = {}
        for budget in own:
            delta = self.header.delta if budget.delta is None else budget.delta
            groups.setdefault((budget.observer, budget.unit, budget.epsilon, delta), []).append(budget.client or 0)
        for observer, unit in dict.fromkeys((b.observer, b.unit) for b in own):
            limited = {b.client for b in own if (b.observer, b.unit) == (observer, unit)}
            if free := [c for c in range(self.header.clients) if c not in limited]:
                groups[observer, unit, None, self.header.delta] = free
        return [
            OwnRow(tuple(clients), observer, unit, limit, self._most_spent(clients, observer, unit, delta, accountant), delta,
                   self.header.simulated)
            for (observer, unit, limit, delta), clients in groups.items()
        ]  # fmt: skip

    def _most_spent(
        self, clients: Sequence[int], observer: str, unit: str, delta: float, accountant: str
    ) -> float | None:
        each = (self.spent(client, observer, unit, delta, accountant) for client in clients)
        most = 0.0
        for spent in each:
            if spent is None:
                return None
            most = max(most, spent)
        return most

    def epsilon(
        self, observer: str, unit: str, delta: float | None = None, accountant: str = "pld"
    ) -> float | None:
        """Epsilon of the sound row; 0 if nothing was released there, None if there is no finite promise."""
        check_name("observer", observer, OBSERVERS)
        check_name("unit", unit, UNITS)
        if not self._view().claims((observer, unit)):
            return 0.0
        delta = self.header.delta if delta is None else delta
        row = self._sound_rows((observer, unit), delta, accountant)[0]
        return row.epsilon if row.verdict == "sound" else None

    def remaining(self, client: int) -> dict[Pair, float]:
        """Epsilon left to a client under each (observer, unit) that has a budget for it or for all."""
        left: dict[Pair, float] = {}
        for i, budget in enumerate(self.header.budgets):
            if budget.client in (None, client):
                used = self._reached(self._view(client), budget, None)
                free = 0.0 if used is None or i in self._spent else max(budget.epsilon - used, 0.0)
                pair = (budget.observer, budget.unit)
                left[pair] = min(free, left.get(pair, free))
        return left

    # -- inside

    def _accept(self, body: Body, release: Release | None = None) -> Record:
        assert self._log is not None
        self._head = self._log.append(body)
        self._take(self._head, release)
        return self._head

    def _take(self, record: Record, release: Release | None = None) -> None:
        """Bring memory up to date with one record (`release` saves decoding what was just encoded)."""
        body = record.body
        if body["kind"] == "spent":
            self._spent.update(body["budgets"])
        elif body["kind"] == "release":
            self._past[record.hash] = _Past(body["fingerprint"], _content(body), body.get("made", ""))
            if body["charged"]:
                self._book.add(release or self._decode(body))
                self._rounds.add(body["round"])

    def _encode(self, release: Release) -> Body:
        """A claim set is written out once, at its first use, and referred to by number afterwards."""
        numbers, new = self._book.parts, dict[tuple[Claim, ...], int]()
        groups: list[tuple[int, str]] = []
        for clients, claims in release.groups:
            number = numbers[claims] if claims in numbers else new.setdefault(claims, len(numbers) + len(new))
            groups.append((number, pack_clients(clients)))
        body: Body = {"kind": "release", "round": int(release.round), "groups": groups}
        body["parts"] = [[lean(claim) for claim in claims] for claims in new]
        return {**body, "note": release.note} if release.note else body

    def _decode(self, body: Body) -> Release:
        for claims in body["parts"]:
            self._book.define(tuple(rejudged(claim_from_lean(claim), self.header.version) for claim in claims))
        most = self.header.clients
        groups = tuple(
            (unpack_clients(clients, most), self._book.sets[number]) for number, clients in body["groups"]
        )
        release = Release(body["round"], groups, body.get("note", ""))
        check_release(release, most)
        return release

    def _view(self, client: int | None = None) -> _View:
        """All clients, or the one client with what concerns it."""
        if client is None or self.header.copies > 1:
            return _View(self._book, self._committed, client, client)
        return _View(self._book.alone(client), self._committed.alone(client), client, 0)

    def _touched(self, release: Release, budgets: Sequence[Budget]) -> list[int]:
        """Numbers of the budgets that a release can move (a co-holder of an example moves them too)."""
        everyone: dict[str, set[Pair]] = {
            "sound": set(),
            "nominal": set(),
        }  # moved for all, by budget verdict
        own: dict[int, set[Pair]] = {}
        for clients, claims in release.groups:
            pairs: set[Pair] = {(claim.observer, claim.unit) for claim in claims}
            own.update((client, pairs) for client in clients)
            for claim in claims:
                if claim.scope == "everyone" and claim.verdict != "none":
                    everyone[claim.verdict].add((claim.observer, claim.unit))
            everyone["sound"] |= {pair for pair, end in ends_of(claims).items() if end.everyone}
        anybody = set().union(*everyone.values(), *own.values())
        touched = []
        for i, budget in enumerate(budgets):
            pair, client = (budget.observer, budget.unit), budget.client
            if client is None or (budget.unit == "example" and self.header.copies > 1):
                moved = pair in anybody
            else:
                moved = pair in everyone[budget.verdict] or pair in own.get(client, ())
            if moved:
                touched.append(i)
        return touched

    def _over(self, budgets: Sequence[Budget], release: Release | None = None) -> list[Exceeded]:
        """The budgets that are exceeded, after `release` if given."""
        together = self._view()  # one book for all; clients with a budget of their own are looked at alone
        if release is not None and any(b.client is None or self.header.copies > 1 for b in budgets):
            together = replace(together, book=self._book.plus(release))
        pieces = None if release is None else pieces_of(release)
        over = []
        for budget in budgets:
            if budget.client is None or self.header.copies > 1:
                view = replace(together, client=budget.client, row=budget.client)
            else:
                view = self._view(budget.client)
                if pieces is not None:
                    pieces.join(view.book, budget.client)
            reached = self._reached(view, budget, budget.epsilon)
            if reached is None or reached * ROUNDING > budget.epsilon:
                over.append(Exceeded(budget, reached))
        return over

    def _reached(self, view: _View, budget: Budget, limit: float | None) -> float | None:
        """Epsilon of a budgeted row; at or below `limit` it may be a quick upper bound."""
        pair, name = (budget.observer, budget.unit), budget.accountant
        delta = self.header.delta if budget.delta is None else budget.delta
        if budget.verdict == "sound":
            answer = self._sound(view, pair, delta, name, limit)[0]
            return answer.epsilon if answer.verdict == "sound" else None
        wanted = _nominal("moments", "moments")  # the steps as the papers count them, by whichever of their accountants
        return self._judged(view, pair, wanted, delta, name, limit, committed=False, counted=name)[0].epsilon

    def _sound(
        self, view: _View, pair: Pair, delta: float, name: str, limit: float | None = None
    ) -> tuple[Answer, str]:
        """What is promised about `pair`, and for which neighbours."""
        why = self._broken(view.book, pair, view.row) or self._broken(view.committed, pair, view.row)
        if self.header.stopping == "data" and self.header.committed is None and not self._promised(pair):
            why = why or "the stop depends on the data and no plan was committed"
        by_group = [claim.accountant == GROUP for claim in view.claims(pair) if claim.verdict != "nominal"]
        if not why and any(by_group):
            if all(by_group):
                return self._by_group(view, pair, delta, name)
            why = "a promise by group privacy does not compose with another one"
        if why:
            return Answer("", None, delta, "none", why), ""
        return self._judged(view, pair, _is_sound, delta, name, limit)

    def _by_group(self, view: _View, pair: Pair, delta: float, name: str) -> tuple[Answer, str]:
        """A client's promise from its examples': group privacy over all N_i of them."""
        sizes = self.header.sizes
        if not sizes:
            return Answer("", None, delta, "none", "group privacy needs the client sizes"), ""
        one, relation = self._sound(view, (pair[0], "example"), delta, name)
        return group(
            one, max(sizes if view.client is None else [sizes[view.client]], default=1) or 1
        ), relation

    def _broken(self, book: Book, pair: Pair, row: int | None) -> str:
        """Why a release ends the sound promise about `pair` (to the holder of that row's data, if given)."""
        ends = book.ends.get(pair, [])
        one_holder = self.header.copies == 1 or pair[1] != "example"
        if ends and row is not None and one_holder and not any(end.everyone for end in ends):
            ends = ends if book.who_met({end.part for end in ends})[row] else []
        return "; ".join(dict.fromkeys(end.reason for end in ends))

    def _judged(
        self,
        view: _View,
        pair: Pair,
        wanted: Callable[[Claim], bool],
        delta: float,
        name: str,
        limit: float | None = None,
        *,
        committed: bool = True,
        counted: str = "",
    ) -> tuple[Answer, str]:
        """The largest epsilon of the wanted claims, and the neighbouring relations it speaks about.

        counted: the accountant, whichever one the claims ask for.
        """
        chosen = [claim for claim in view.claims(pair) if wanted(claim)]
        if any(claim.scope == "single" for claim in chosen):
            return _worst_single(chosen, delta, name)
        own = of_clients(view.book, pair, wanted)
        if committed and self.header.stopping == "data":
            own = most(own, of_clients(view.committed, pair, wanted))
        copies = self.header.copies if pair[1] == "example" else 1
        units = of_units(own, copies, self.header.holders, view.row)
        relation = relations(units)
        if relation is None:
            why = "releases with different neighbouring relations do not compose"
            return Answer("", None, delta, "none", why), "mixed"
        fixed = sorted({claim.accountant for claim in chosen if claim.accountant})
        if len(fixed) > 1:
            why = f"claims that ask for different accountants ({', '.join(fixed)}) do not compose"
            return Answer("", None, delta, "none", why), relation
        answer = worst(self._judge, units, delta, counted or (fixed[0] if fixed else name), limit)
        if (
            answer.epsilon is None and not fixed and name != "rdp"
        ):  # e.g. pld refuses Laplace under an L2 clip
            answer = worst_of_each(self._judge, units, delta, name, limit)
        return answer, relation

    def _sound_rows(self, pair: Pair, delta: float, name: str) -> list[Row]:
        """The sound row (or its `none`); after a data-dependent stop also the nominal epsilon at the stop."""
        view = self._view()
        answer, relation = self._sound(view, pair, delta, name)
        claims = [claim for claim in view.claims(pair) if _is_sound(claim)]
        at_will = self.header.stopping == "data" and self.header.committed is None
        if answer.epsilon is not None and (answer.accountant == FILTER or (at_will and answer.verdict == "sound")):
            return [self._row(pair, self._fixed(view, pair, delta, name, answer), relation, _reasons(claims))]
        rows = [self._row(pair, answer, relation, _reasons(claims) if answer.epsilon is not None else [])]
        counted = any(claim.event for claim in claims) and not self._broken(self._book, pair, None)
        if self.header.stopping == "data" and counted:
            stop, relation = self._judged(view, pair, _is_sound, delta, name, committed=False)
            if stop.epsilon != answer.epsilon:
                why = "epsilon where the data stopped it; promised is only the maximum committed in advance"
                rows.append(self._row(pair, replace(stop, verdict="nominal", reason=why), relation, []))
        return rows

    def _fixed(self, view: _View, pair: Pair, delta: float, name: str, spent: Answer) -> Answer:
        """What holds where the noise, or the number of releases, was chosen after what was seen: the budget promised in
        advance, if it was kept. Otherwise what was spent, which is no epsilon of its own."""
        chosen = "noise" if spent.accountant == FILTER else "the end"
        for budget in self._promised(pair):
            paid = self.header.delta if budget.delta is None else budget.delta
            kept = self._sound(view, pair, paid, name, budget.epsilon)[0]
            if kept.epsilon is not None and kept.epsilon <= budget.epsilon and paid <= delta:
                why = f"the budget fixed in advance; {kept.epsilon:.4g} of it is spent, and later {chosen} may be chosen at will"
                return replace(kept, epsilon=budget.epsilon, reason=why)
        counted = "spent by a filter; noise that is" if spent.accountant == FILTER else "spent so far; an end that is"
        why = f"{counted} chosen after earlier releases is covered by a budget fixed in advance alone"
        return replace(spent, verdict="nominal", reason=why)

    def _promised(self, pair: Pair) -> list[Budget]:
        """The budgets of all clients about `pair` that were fixed in advance."""
        return [b for b in self.header.promised if (b.observer, b.unit, b.client) == (*pair, None)]

    def _nominal_row(self, pair: Pair, delta: float, name: str, default: str, named: bool) -> Row:
        view, chosen = self._view(), _nominal(name, default)
        reasons = _reasons(claim for claim in view.claims(pair) if chosen(claim))
        answer, relation = self._judged(view, pair, chosen, delta, name, committed=False)
        if answer.epsilon is not None:
            answer = replace(answer, verdict="nominal")
        return self._row(pair, answer, relation, [*self._only_some(pair, chosen, named), *reasons])

    def _only_some(self, pair: Pair, chosen: Callable[[Claim], bool], named: bool) -> list[str]:
        """For whom a row stands where it counts nothing of some clients that took part in a round: others' noise says nothing of
        them."""
        book = self._book
        parts = {part for part, claim, _ in book.by_pair.get(pair, ()) if chosen(claim)}
        counted = book.who_met(parts)
        left_out = book.who_met(book.trained) & ~counted
        if not left_out.any():
            return []
        met = book.trained & set(book.met()[np.flatnonzero(left_out)].indices.tolist())
        why = dict.fromkeys(end.reason for end in book.ends.get(pair, ()) if end.part in met)
        about = f" ({', '.join(why)})" if why else ""
        return [f"for {_named(counted, named)} alone, nothing is counted of {_named(left_out, named)}{about}"]

    def _row(self, pair: Pair, answer: Answer, relation: str, reasons: Sequence[str]) -> Row:
        said = [*reasons, answer.reason]
        if self.header.simulated and answer.verdict == "sound":
            said.append(SECRET)
        words = (text for sentence in said for text in sentence.split("; "))
        reason = "; ".join(dict.fromkeys(text for text in words if text and not text.endswith(" neighbours")))
        return Row(*pair, answer.epsilon, answer.delta, answer.accountant, answer.verdict, reason, relation,
                   self.header.simulated)  # fmt: skip


def _worst_single(claims: Sequence[Claim], delta: float, name: str) -> tuple[Answer, str]:
    """Claims that never add up: the largest epsilon of any one of them."""
    events = [(claim.event, claim.accountant or name) for claim in claims if claim.event is not None]
    if any(claim.scope != "single" for claim in claims) or not events:
        why = "claims that add up and claims that do not stand in one row"
        return Answer("", None, delta, "none", why), ""
    answers = []
    for event, accountant in dict.fromkeys(events):
        if accountant == "shuffle":
            answers.append(shuffled_noise(event.noise, event.sampling.population or 1, delta))
        else:
            answers.append(judge([event], delta, accountant))
    unbounded = [found for found in answers if found.epsilon is None]
    largest = unbounded[0] if unbounded else max(answers, key=lambda found: found.epsilon or 0.0)
    return largest, " or ".join(sorted({event.relation for event, _ in events}))


def _is_sound(claim: Claim) -> bool:
    return claim.verdict == "sound"


def _nominal(name: str, default: str) -> Callable[[Claim], bool]:
    """Chooses the nominal claims that are counted with accountant `name`."""
    return lambda claim: claim.verdict == "nominal" and (claim.accountant or default) == name


def _named(chosen: np.ndarray, named: bool) -> str:
    """Clients by their numbers, or how many they are."""
    numbers = np.flatnonzero(chosen).tolist()
    if len(numbers) > 8 or not named:
        return f"{len(numbers)} client{'' if len(numbers) == 1 else 's'}"
    return f"client{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def _reasons(claims: Iterable[Claim]) -> list[str]:
    return list(dict.fromkeys(claim.reason for claim in claims if claim.reason))


def _content(body: Body) -> str:
    return hashlib.sha256(json.dumps([body["round"], body["groups"]]).encode()).hexdigest()


def _header_of(path: Path | str, records: Sequence[Record]) -> Header:
    if not records or records[0].body.get("kind") != "header":
        raise UserError(f"{path}: does not begin with a ledger header; is this a ledger file?")
    try:
        return header_from_json(records[0].body["header"])
    except UNREADABLE as wrong:
        raise Damaged(path, 0, f"not a header of this version ({wrong})") from None


def _round(record: Record) -> int:
    number = record.body.get("round")
    return number if isinstance(number, int) else 0
