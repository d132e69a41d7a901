"""What a ledger is told and what it says, as frozen values, and how they look as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from fedveil.errors import UserError, did_you_mean
from fedveil.jsons import Document, Json, JsonObject
from fedveil.privacy.accountants import Answer, check_event
from fedveil.privacy.events import (
    OBSERVERS,
    UNITS,
    Claim,
    Event,
    Noise,
    Observer,
    Release,
    Sampling,
    Unit,
    Verdict,
)
from fedveil.privacy.ledger.balance import GROUP as GROUP
from fedveil.privacy.ledger.journal import Body

SECRET = "holds when deployed with secret noise"
MOST_CLIENTS = 20_000_000
MOST_STEPS = 10**12  # of one event
_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True)
class Budget:
    """At most `epsilon` for an observer and unit, for every client or (with `client`) for one.

    verdict "nominal" limits the nominal row instead, to stop where a paper would stop; it protects nobody. Then `accountant` is
    the papers' one that counts the steps.
    delta None: the ledger's.
    """

    epsilon: float
    observer: Observer = "server"
    unit: Unit = "example"
    client: int | None = None
    delta: float | None = None
    accountant: str = "pld"
    verdict: Literal["sound", "nominal"] = "sound"


@dataclass(frozen=True)
class Header:
    """What is fixed before the first release.

    clients: how many there are, numbered from 0; sizes: their public numbers of examples N_i.
    copies: the largest number of clients that hold one example; holders: the distinct sets of clients that
    hold a common example, if known (exact sums instead of the sum of the `copies` largest).
    stopping "data": the run may stop early because of what it saw (a target accuracy, a server that one does not trust).
    Then the sound rows are those of `committed`, one release that sums the whole run up to `planned_rounds` (see `commit`),
    or without one the budgets of `promised`.
    promised: budgets that were fixed in advance and that whoever spends keeps (a node's contract), for claims whose noise
    may be chosen after what was released before (`worst.FILTER`), or for noise that is fixed in releases whose number is
    chosen so: under such choices only they hold, not what was spent.
    simulated: the noise is seeded, so whoever knows the seed can subtract it.
    version: of the ledger's meaning. 1 was written by fedveil 0.1, whose noise was float32: what it calls sound is judged
    anew on reading (`rejudged`).
    public: what was trained elsewhere on public data and stands in front of this run's model, in words: no epsilon here is
    about that data.
    assumes: what the promises rest on besides the mathematics, in words: the user's own code.
    """

    delta: float
    clients: int
    sizes: tuple[int, ...] = ()
    copies: int = 1
    holders: tuple[tuple[int, ...], ...] = ()
    budgets: tuple[Budget, ...] = ()
    simulated: bool = True
    planned_rounds: int | None = None
    stopping: Literal["fixed", "data"] = "fixed"
    committed: Release | None = None
    config: str = ""
    allow_large_delta: bool = False
    version: int = 2
    promised: tuple[Budget, ...] = ()
    public: tuple[str, ...] = ()
    assumes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """What `observer` can learn about one `unit`. epsilon None: there is no finite promise."""

    observer: str
    unit: str
    epsilon: float | None
    delta: float
    accountant: str
    verdict: Verdict
    reason: str
    relation: str
    simulated: bool


@dataclass(frozen=True)
class OwnRow:
    """What `observer` can learn about the data of clients that have equal budgets of their own, at the delta that these name;
    of several clients the largest epsilon. budget None: no limit. epsilon None: there is no finite promise."""

    clients: tuple[int, ...]
    observer: str
    unit: str
    budget: float | None
    epsilon: float | None
    delta: float
    simulated: bool


@dataclass(frozen=True)
class Receipt:
    """The release is on disk and may be handed on. charged False: a replay of an earlier release."""

    number: int
    hash: str
    charged: bool


@dataclass(frozen=True)
class Exceeded:
    """A budget that a release would exceed. epsilon None: the release has no finite promise there, or
    (`spent`) the budget was exhausted before."""

    budget: Budget
    epsilon: float | None
    spent: bool = False

    def __str__(self) -> str:
        nominal = self.budget.verdict == "nominal"
        if self.spent:
            row = f"{self.budget.observer}/{self.budget.unit}"
            return f"the {'nominal ' if nominal else ''}budget of {self.budget.epsilon:.6g} for {row} is spent"
        whom = "" if self.budget.client is None else f" of client {self.budget.client}"
        reached = "without a finite promise" if self.epsilon is None else f"{self.epsilon:.6g}"
        limit = f"the budget is {self.budget.epsilon:.6g}"
        kind = f"nominal epsilon by {self.budget.accountant}" if nominal else "epsilon"
        return f"{kind}{whom} for {self.budget.observer}/{self.budget.unit} would be {reached}, {limit}"


class BudgetExceeded(Exception):
    """The release was not made and not charged; `exceeded` says which budgets stand in its way."""

    def __init__(self, exceeded: Sequence[Exceeded]) -> None:
        super().__init__("; ".join(map(str, exceeded)) + ".")
        self.exceeded = tuple(exceeded)


Promise = TypeVar("Promise", Row, Answer)


def group(promise: Promise, k: int) -> Promise:
    """The promise (a `Row`, or an accountant's `Answer`) about `k` units together.

    Formal guarantee: if it is (epsilon, delta)-DP for one unit, then for neighbours that differ in k units
    it is (k epsilon, k e^((k-1) epsilon) delta)-DP. With a delta of 1 or more nothing is promised.
    """
    if k < 1:
        raise UserError(f"group size {k}: must be at least 1.")
    if promise.epsilon is None or k == 1:
        return promise
    paid = math.log(promise.delta) if promise.delta > 0 else -math.inf
    paid += math.log(k) + (k - 1) * promise.epsilon
    why = f"group privacy over {k}"
    if paid >= 0:
        return replace(promise, epsilon=None, verdict="none", reason=f"{why} gives a delta of 1 or more")
    why += f"; {promise.reason}" if promise.reason else ""
    return replace(promise, epsilon=k * promise.epsilon, delta=math.exp(paid), reason=why)


def commit(releases: Iterable[Release], rounds: int) -> Release:
    """The whole plan as one release, for `Header.committed`: what each client meets in all `rounds`.

    Give the releases of every planned round with the cohorts that are drawn, or with all clients where the
    cohorts are not known in advance.
    """
    totals: dict[int, dict[Claim, int]] = {}
    everyone: dict[Claim, int] = {}
    for release in releases:
        shared: set[Claim] = set()
        for clients, claims in release.groups:
            for claim in claims:
                one = claim if claim.event is None else replace(claim, event=replace(claim.event, steps=1))
                steps = 1 if claim.event is None else claim.event.steps
                if claim.scope == "everyone":
                    if claim not in shared:
                        everyone[one] = everyone.get(one, 0) + steps
                    shared.add(claim)
                    continue
                for client in clients:
                    mine = totals.setdefault(client, {})
                    mine[one] = mine.get(one, 0) + steps
    alike: dict[tuple[Claim, ...], list[int]] = {}
    for client in sorted(totals):
        alike.setdefault(_total(totals[client]), []).append(client)
    groups = [(tuple(clients), claims) for claims, clients in alike.items()]
    if everyone:
        groups.append(((), _total(everyone)))
    return Release(rounds, tuple(groups), "committed in advance")


def _total(counts: dict[Claim, int]) -> tuple[Claim, ...]:
    def times(claim: Claim, steps: int) -> Claim:
        return claim if claim.event is None else replace(claim, event=replace(claim.event, steps=steps))

    return tuple(sorted((times(claim, steps) for claim, steps in counts.items()), key=repr))


def check_header(header: Header) -> None:
    """Raise `UserError` for anything a ledger cannot promise with."""

    def need(good: bool, what: str) -> None:
        if not good:
            raise UserError(f"ledger header: {what}")

    need(1 <= header.clients <= MOST_CLIENTS, f"clients is {header.clients}, must be 1 to {MOST_CLIENTS}.")
    need(0 <= header.delta < 1, f"delta is {header.delta}, must be at least 0 and below 1.")
    need(len(header.sizes) in (0, header.clients), f"{len(header.sizes)} sizes for {header.clients} clients.")
    need(all(size >= 0 for size in header.sizes), "sizes must not be negative.")
    need(1 <= header.copies <= header.clients, f"copies is {header.copies}, must be 1 to {header.clients}.")
    need(header.planned_rounds is None or header.planned_rounds >= 0, "planned_rounds must not be negative.")
    for holders in header.holders:
        need(
            len(set(holders)) == len(holders) and all(0 <= client < header.clients for client in holders),
            f"holder set {holders} must name distinct clients 0 to {header.clients - 1}.",
        )
    largest = max(map(len, header.holders), default=0)
    need(largest <= header.copies, f"a holder set has {largest} clients, but copies is {header.copies}.")
    for budget in (*header.budgets, *header.promised):
        need(
            0 <= budget.epsilon < math.inf,
            f"budget epsilon is {budget.epsilon}, must be 0 or more, and finite.",
        )
        need(
            budget.delta is None or 0 <= budget.delta < 1,
            f"budget delta is {budget.delta}, must be in [0, 1).",
        )
        need(budget.client is None or 0 <= budget.client < header.clients,
             f"budget for client {budget.client}: clients are 0 to {header.clients - 1}.")  # fmt: skip
        check_name("budget observer", budget.observer, OBSERVERS)
        check_name("budget unit", budget.unit, UNITS)
    if header.committed is not None:
        check_release(header.committed, header.clients)
    examples = -(-sum(header.sizes) // header.copies)
    for units, name in ((examples, "examples"), (header.clients, "clients")):
        if not header.allow_large_delta:
            check_delta(header.delta, units, name)


def check_delta(delta: float, units: int, name: str) -> None:
    """Raise `UserError` for a delta that would let one of so many units be published outright."""
    if units > 1 and delta * units >= 1:
        raise UserError(
            f"delta {delta:g} is not below 1/{units} (the number of {name}): a mechanism that publishes one of them outright "
            "would pass. Choose a smaller delta, or allow a large one explicitly (--set allow_large_delta=true)."
        )


def check_release(release: Release, clients: int) -> None:
    """Raise `UserError` for clients that do not exist or stand in two groups, and for half-made claims."""
    seen: set[int] = set()
    for members, claims in release.groups:
        wrong = [client for client in members if not 0 <= client < clients]
        if wrong:
            raise UserError(
                f"release of round {release.round}: no client {wrong[0]}; they are 0 to {clients - 1}."
            )
        before = len(seen)
        seen.update(members)
        if len(seen) != before + len(members):
            raise UserError(f"release of round {release.round}: a client stands in two groups.")
        for claim in claims:
            check_name("claim observer", claim.observer, OBSERVERS)
            check_name("claim unit", claim.unit, UNITS)
            if claim.event is None and claim.verdict != "none" and claim.accountant != GROUP:
                raise UserError(
                    f"claim {claim.observer}/{claim.unit}: verdict '{claim.verdict}' needs an event."
                )
            if claim.event is not None and not (
                0 <= claim.event.steps <= MOST_STEPS and 0 < claim.event.noise.multiplier < math.inf
            ):
                raise UserError(
                    f"claim {claim.observer}/{claim.unit}: steps must be 0 to {MOST_STEPS} and the noise "
                    "multiplier must be positive and finite."
                )


def check_name(what: str, name: str, known: Sequence[str]) -> None:
    """Raise `UserError` with the nearest known name."""
    if name not in known:
        raise UserError(
            f"{what} '{name}' is not known; use one of {', '.join(known)}.{did_you_mean(name, known)}"
        )


def pack_clients(clients: Sequence[int]) -> str:
    """Client numbers as text, runs joined: (0, 1, 2, 7) -> "0-2,7". The order is kept."""
    runs: list[list[int]] = []
    for client in map(int, clients):
        if runs and client == runs[-1][1] + 1:
            runs[-1][1] = client
        else:
            runs.append([client, client])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def unpack_clients(text: str, most: int = MOST_CLIENTS) -> tuple[int, ...]:
    """The inverse of `pack_clients`; more than `most` clients are refused before they take memory."""
    clients: list[int] = []
    for run in text.split(",") if text else ():
        found = _RUN.fullmatch(run)
        if found is None:
            raise ValueError(f"'{run[:40]}' is no client number and no range of them")
        first, last = int(found.group(1)), int(found.group(2) or found.group(1))
        if last < first or last >= most or len(clients) + last - first >= most:
            raise ValueError(f"clients '{run}' of {most}")
        clients.extend(range(first, last + 1))
    return tuple(clients)


def lean(value: object) -> Json:
    """A dataclass as a dictionary without the fields that have their default."""
    if not is_dataclass(value):
        return cast(Json, value.item() if hasattr(value, "item") else value)  # NumPy numbers
    items = ((f, getattr(value, f.name)) for f in fields(value))
    return {f.name: lean(item) for f, item in items if item != f.default}


def claim_from_lean(data: object) -> Claim:
    """The inverse of `lean` for claims; every value is checked, because a file can hold anything."""
    plain = dict(_fields(Claim, data))
    if plain.get("event") is not None:
        event = dict(_fields(Event, plain["event"]))
        event["noise"] = _typed(Noise, event["noise"])
        event["sampling"] = _typed(Sampling, event.get("sampling", {}))
        plain["event"] = _typed(Event, event)
        check_event(plain["event"])
    return _typed(Claim, plain)


Made = TypeVar("Made")


def _typed(kind: type[Made], data: object) -> Made:
    """A dataclass from a dictionary that has its fields only, each with a value of its type."""
    hints, values = _TYPES[kind], dict(_fields(kind, data))
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"{name} = {str(value)[:40]!r}")
        if hints[name] is float:
            values[name] = float(value)
    return kind(**values)


def _fields(kind: type, data: object) -> Document:
    if not isinstance(data, dict) or not set(data) <= set(_TYPES[kind]):
        raise ValueError(f"{str(data)[:40]!r} is no {kind.__name__.lower()}")
    return data


_KINDS: tuple[type, ...] = (Claim, Event, Noise, Sampling, Budget, Header)
_TYPES = {kind: get_type_hints(kind) for kind in _KINDS}


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62
    return isinstance(value, hint)


def check_body(body: Body, budgets: int) -> None:
    """Raise `ValueError` unless the body of a record has the shape of its kind (`claim_from_lean` reads on)."""

    def need(good: bool, what: str) -> None:
        if not good:
            raise ValueError(f"odd {what} in a record of kind '{body['kind'][:20]}'")

    kind = body["kind"]
    if kind == "spent":
        numbers = body.get("budgets")
        need(
            isinstance(numbers, list) and all(_fits(n, int) and 0 <= n < budgets for n in numbers), "budgets"
        )
    if kind != "release":
        return
    need(_fits(body.get("round"), int) and body["round"] >= 0, "round")
    need(isinstance(body.get("fingerprint"), str), "fingerprint")
    need(isinstance(body.get("charged"), bool), "charge")
    need(isinstance(body.get("note", ""), str), "note")
    need(isinstance(body.get("made", ""), str), "hash of what was made")
    parts, groups = body.get("parts"), body.get("groups")
    need(isinstance(parts, list) and all(isinstance(claims, list) for claims in parts), "parts")
    need(
        isinstance(groups, list)
        and all(isinstance(g, list) and len(g) == 2 and _fits(g[0], int) and g[0] >= 0 for g in groups)
        and all(isinstance(g[1], str) for g in groups),
        "groups",
    )


FLOAT = (
    "made by an earlier version with float32 noise, whose low bits can betray a record in one release: no guarantee on a real "
    "machine (docs/noise.md)"
)
ADDITIVE = ("gaussian", "laplace", "staircase", "joint-staircase")


def rejudged(claim: Claim, version: int) -> Claim:
    """A claim as it is judged today: additive noise of version 1 was drawn in float32, so its sound claims are nominal."""
    if version >= 2 or claim.verdict != "sound" or claim.event is None or claim.event.noise.mechanism not in ADDITIVE:
        return claim
    return replace(claim, verdict="nominal", reason=f"{claim.reason}; {FLOAT}" if claim.reason else FLOAT)


def header_to_json(header: Header) -> JsonObject:
    """Plain dictionary; `header_from_json` is the inverse."""
    data = asdict(replace(header, committed=None, holders=()))
    for name in ("promised", "public", "assumes"):  # absent where empty, as in ledgers of before
        if not data[name]:
            del data[name]
    data["sizes"] = [int(size) for size in header.sizes]
    data["holders"] = [pack_clients(group) for group in header.holders]
    if header.committed is not None:
        data["committed"] = [
            [pack_clients(clients), [lean(claim) for claim in claims]]
            for clients, claims in header.committed.groups
        ]
    return data


def header_from_json(data: object) -> Header:
    """The inverse of `header_to_json`; raises `ValueError` or `UserError` for anything else."""
    plain = {"version": 1, **_fields(Header, data)}
    most = min(plain["clients"], MOST_CLIENTS) if _fits(plain["clients"], int) else 0
    committed = plain.get("committed")
    if committed is not None:
        groups = tuple(
            (unpack_clients(clients, most), tuple(rejudged(claim_from_lean(x), plain["version"]) for x in claims))
            for clients, claims in committed
        )
        committed = Release(plain["planned_rounds"] or 0, groups, "committed in advance")
    plain["sizes"] = tuple(plain.get("sizes", ()))
    if not all(_fits(size, int) for size in plain["sizes"]):
        raise ValueError("odd sizes")
    for name in ("public", "assumes"):
        plain[name] = tuple(plain.get(name, ()))
        if not all(isinstance(note, str) for note in plain[name]):
            raise ValueError(f"odd notes ({name})")
    plain["holders"] = tuple(unpack_clients(text, most) for text in plain.get("holders", ()))
    for name in ("budgets", "promised"):
        plain[name] = tuple(_typed(Budget, budget) for budget in plain.get(name, ()))
    header = _typed(Header, {**plain, "committed": committed})
    check_header(header)
    return header
