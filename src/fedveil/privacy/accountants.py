"""From events to (epsilon, delta) with a verdict; what cannot be judged is refused, never guessed.

`answer` judges a list of events once. `Composition` is the running form a ledger keeps: adding is cheap and
asking again reuses what was solved. Which formula holds when is explained in docs/accountants.md.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from fedveil.errors import UserError
from fedveil.privacy import checks, formulas, pld, renyi
from fedveil.privacy.events import Event, Noise, Sampling, Unit, Verdict
from fedveil.privacy.mechanisms import Array, check_noise
from fedveil.privacy.vectors import vector_guarantee

ACCOUNTANTS: dict[str, str] = {
    "basic": "sum of the steps' epsilons",
    "advanced": "advanced composition (Dwork-Rothblum-Vadhan form)",
    "advanced-tanh": "advanced composition (tanh form)",
    "optimal": "optimal composition (Kairouz-Oh-Viswanath)",
    "zcdp": "zero-concentrated DP",
    "moments": "Rényi DP with the first conversion (moments accountant)",
    "rdp": "Rényi DP with today's conversion",
    "pld": "privacy-loss distributions",
}
MOST_MULTIPLIERS = 200  # beyond this many, multipliers are rounded down onto a grid of GRID values
GRID = 128


class Refused(Exception):
    """An accountant cannot judge an event; the message says why and what to use instead."""


@dataclass(frozen=True)
class Answer:
    """Epsilon at the delta really paid, and what it is worth.

    verdict "sound": (epsilon, delta) holds. "nominal": a published formula that is no guarantee here, with the
    reason. "none": epsilon is None, the accountant refused.
    """

    accountant: str
    epsilon: float | None
    delta: float
    verdict: Verdict
    reason: str = ""


class Kind(NamedTuple):
    """What matters about an event for accounting; equal kinds are merged by adding their steps."""

    noise: Noise
    rate: float
    batch: tuple[int, int] | None  # (batch, population) for sampling of fixed size
    replace: bool
    unit: Unit


def check_event(event: Event) -> None:
    """Refuse impossible numbers with the option's name and the allowed range."""
    check_noise(event.noise)
    checks.count("steps", event.steps, most=checks.MOST_STEPS)
    checks.one_of("neighbouring relation", event.relation, ("zero-out", "add-remove", "replace-one"))
    checks.one_of("unit", event.unit, ("example", "client", "reported-weight"))
    sampling = event.sampling
    checks.one_of("sampling", sampling.kind, ("none", "poisson", "fixed", "partition"))
    if sampling.kind == "poisson":
        checks.fraction("sampling-rate", sampling.rate)
    if sampling.kind == "fixed":
        if sampling.batch is None or sampling.population is None:
            raise UserError("sampling 'fixed' needs both batch and population (whole numbers).")
        batch = checks.count("batch", sampling.batch, 1)
        checks.count("population (at least the batch)", sampling.population, batch)


@lru_cache(maxsize=65536)
def _kind(noise: Noise, sampling: Sampling, relation: str, unit: Unit) -> Kind:
    check_event(Event(noise, sampling, relation, unit))  # type: ignore[arg-type]
    if noise.mechanism == "gaussian":
        noise = Noise("gaussian", float(noise.multiplier))
    rate, batch = 1.0, None
    if sampling.kind == "poisson":
        rate = float(sampling.rate)
    elif sampling.kind == "fixed" and sampling.batch != sampling.population:
        assert sampling.batch is not None and sampling.population is not None
        rate, batch = sampling.batch / sampling.population, (sampling.batch, sampling.population)
    return Kind(noise, rate, batch, relation == "replace-one", unit)


def _refuse_odd(kind: Kind) -> None:
    """Combinations that no accountant can judge."""
    if kind.batch is not None and not kind.replace:
        raise Refused(
            "batches of fixed size are judged for replace-one neighbours only: state the multiplier relative to the "
            "replace-one sensitivity (twice the clip bound) and the relation replace-one"
        )
    if kind.rate < 1 and kind.noise.mechanism == "two-valued":
        raise Refused("a two-valued report is not amplified by sampling: account each report that is sent")


@lru_cache(maxsize=16384)
def _loss(kind: Kind) -> tuple[pld.Sampled, int]:
    """A dominating pair with its sampling, and how many copies make one step."""
    guarantee = vector_guarantee(kind.noise)
    if guarantee.pair is None:
        raise Refused(guarantee.refusal)
    if kind.rate < 1 and guarantee.copies > 1:
        raise Refused(
            "sampling before several independent copies has no privacy-loss distribution here: use rdp"
        )
    return pld.Sampled(guarantee.pair, kind.rate, one_sided=not kind.replace), guarantee.copies


def _divergences(kind: Kind, orders: tuple[float, ...]) -> Array:
    """Rényi divergences of one step."""
    if kind.rate == 1:
        return renyi.plain(kind.noise, orders)
    if kind.batch is not None:
        if kind.noise.mechanism != "gaussian":
            raise Refused(
                "the Rényi bound for batches of fixed size is known here for Gaussian noise only: use pld"
            )
        return renyi.fixed_size(kind.noise.multiplier, *kind.batch, orders)
    if kind.replace:
        raise Refused("the Rényi bound for Poisson sampling needs zero-out or add-remove neighbours: use pld")
    return renyi.poisson(kind.noise, kind.rate, orders)


@lru_cache(maxsize=65536)
def _pure(kind: Kind) -> float:
    """Pure epsilon of one step after amplification by sampling (infinity for Gaussian noise)."""
    return float(formulas.amplified(vector_guarantee(kind.noise).pure, kind.rate))


# --- many different multipliers -------------------------------------------------------------------------------


def _round_down(kind: Kind, ratio: float | None) -> Kind:
    """Less noise is never more private: the multiplier moves down to a power of `ratio`."""
    if ratio is None or kind.noise.mechanism not in ("gaussian", "laplace"):
        return kind
    exponent = math.floor(math.log(kind.noise.multiplier) / math.log(ratio))
    lower = ratio**exponent
    if lower > kind.noise.multiplier:
        lower = ratio ** (exponent - 1)
    return kind._replace(noise=replace(kind.noise, multiplier=lower))


def _ratio(kinds: Mapping[Kind, int], least: float | None) -> float:
    """The finest grid ratio that leaves at most GRID kinds (more only if there are many other noises)."""
    ratio, others = least or 1.0005, 0
    groups: dict[tuple[object, ...], list[float]] = {}
    for kind in kinds:
        if kind.noise.mechanism in ("gaussian", "laplace"):
            family = (kind.noise.mechanism, kind.noise.norm, kind.noise.dimension, kind.rate, kind.batch)
            groups.setdefault(family, []).append(math.log(kind.noise.multiplier))
        else:
            others += 1
    room = max(GRID - others, len(groups))
    logs = [np.array(values) for values in groups.values()]
    while sum(len(np.unique(np.floor(values / math.log(ratio)))) for values in logs) > room and ratio < 64:
        ratio = 1 + 1.25 * (ratio - 1)
    return ratio


def _rounded(counts: Mapping[Kind, int], ratio: float | None) -> dict[Kind, int]:
    merged: dict[Kind, int] = {}
    for kind, n in counts.items():
        low = _round_down(kind, ratio)
        merged[low] = merged.get(low, 0) + n
    return merged


# --- compositions -----------------------------------------------------------------------------------------------


_Pending: TypeAlias = "tuple[_Pending | None, tuple[tuple[Kind, int], ...]]"  # what came before, what was added


@dataclass(frozen=True)
class _Memo:
    """What was solved so far: all kinds with their steps, the rounding in force, and one solution."""

    counts: dict[Kind, int] = field(default_factory=dict)
    ratio: float | None = None
    kinds: frozenset[Kind] = frozenset()
    losses: pld.Solved | None = None  # pld
    divergences: Array | None = None  # rdp and moments, by order


@dataclass(frozen=True, eq=False)
class Composition:
    """An immutable running composition. `add` costs nothing; `answer` solves only what was added since."""

    accountant: str = "pld"
    honest: bool = False
    _pending: _Pending | None = field(default=None, repr=False, compare=False)
    _memo: _Memo = field(default_factory=_Memo, repr=False, compare=False)

    @staticmethod
    def start(accountant: str = "pld", *, honest: bool = False) -> Composition:
        """An empty composition. honest: basic, advanced and optimal split delta so that all of it is paid."""
        checks.one_of("accountant", accountant, tuple(ACCOUNTANTS))
        return Composition(accountant, honest)

    def add(self, events: Sequence[Event]) -> Composition:
        """This composition followed by `events` (checked here)."""
        kinds = []
        for event in events:
            steps = checks.count("steps", event.steps, most=checks.MOST_STEPS)
            if steps:
                kinds.append((_kind(event.noise, event.sampling, event.relation, event.unit), steps))
        if not kinds:
            return self
        return Composition(self.accountant, self.honest, (self._pending, tuple(kinds)), self._memo)

    def answer(self, delta: float) -> Answer:
        """Epsilon at `delta`, with a verdict. Refusals come back as verdict "none" with the reason.

        Formal guarantee: with verdict "sound" the composition of all added events, each step chosen in advance
        or by data-independent coins, is (epsilon, delta)-DP for the events' unit and neighbouring relation.
        """
        delta = checks.delta(delta)
        try:
            memo = self._solved()
            return _judge(self.accountant, self.honest, memo, delta)
        except Refused as why:
            return Answer(self.accountant, None, delta, "none", str(why))

    def counts(self) -> dict[Kind, int]:
        """All kinds of events with their steps."""
        return _merge(self._memo.counts, _flatten(self._pending))

    def _solved(self) -> _Memo:
        if self._pending is None:
            return self._memo
        extra = _merge({}, _flatten(self._pending))
        memo = _extend(self.accountant, self._memo, extra)
        # The value of a frozen composition does not change: this only remembers what was computed.
        object.__setattr__(self, "_memo", memo)
        object.__setattr__(self, "_pending", None)
        return memo


def _flatten(pending: _Pending | None) -> list[tuple[Kind, int]]:
    found: list[tuple[Kind, int]] = []
    while pending is not None:
        pending, kinds = pending
        found.extend(kinds)
    return found


def _merge(counts: Mapping[Kind, int], extra: Sequence[tuple[Kind, int]]) -> dict[Kind, int]:
    merged = dict(counts)
    for kind, n in extra:
        merged[kind] = merged.get(kind, 0) + n
    return merged


def _extend(accountant: str, memo: _Memo, extra: dict[Kind, int]) -> _Memo:
    """Solve the composition of what `memo` holds and `extra`."""
    counts = _merge(memo.counts, list(extra.items()))
    for kind in extra:
        _refuse_odd(kind)
    some = next(iter(counts))
    if any(kind.replace != some.replace or kind.unit != some.unit for kind in extra):
        raise Refused(
            "events about different units or neighbouring relations do not compose into one epsilon"
        )
    if accountant not in ("pld", "rdp", "moments"):
        return _Memo(counts)
    ratio: float | None = memo.ratio
    kinds = memo.kinds | {_round_down(kind, ratio) for kind in extra}
    fresh = memo.losses is None and memo.divergences is None
    if len(kinds) > MOST_MULTIPLIERS:
        wider = _ratio(counts, ratio)
        fresh, ratio = fresh or wider != ratio, wider
        kinds = frozenset(_round_down(kind, ratio) for kind in counts)
    todo = _rounded(counts if fresh else extra, ratio)
    if accountant == "pld":
        losses: dict[pld.Sampled, int] = {}
        for kind, n in todo.items():
            release, copies = _loss(kind)
            losses[release] = losses.get(release, 0) + n * copies
        with _grid_fits():
            solved = pld.solve(losses, growth=1.5) if fresh or memo.losses is None else memo.losses.more(losses)
        return _Memo(counts, ratio, kinds, losses=solved)
    orders = renyi.MOMENTS if accountant == "moments" else renyi.TODAY
    divergences = np.zeros(len(orders)) if fresh or memo.divergences is None else memo.divergences
    for kind, n in todo.items():
        divergences = divergences + n * _divergences(kind, orders)
    return _Memo(counts, ratio, kinds, divergences=divergences)


@contextlib.contextmanager
def _grid_fits() -> Iterator[None]:
    try:
        yield
    except (ArithmeticError, ValueError) as wrong:
        raise Refused("the privacy loss is too large for a grid in floating point: use rdp") from wrong


def _judge(accountant: str, honest: bool, memo: _Memo, delta: float) -> Answer:
    if not memo.counts:
        return Answer(accountant, 0.0, 0.0, "sound", "nothing was released")
    pure = math.inf
    if not any(kind.noise.mechanism == "gaussian" for kind in memo.counts):
        pure = sum(n * _pure(kind) for kind, n in memo.counts.items())
    if delta == 0:
        if math.isinf(pure):
            raise Refused("delta = 0 needs pure mechanisms (Laplace, Staircase, two-valued) throughout")
        return Answer(accountant, pure, 0.0, "sound", "pure epsilons add up")
    note = _note(memo)
    if memo.losses is not None:
        with _grid_fits():
            value = min(memo.losses.epsilon(delta), pure)
        if math.isinf(value):
            raise Refused(
                f"delta = {delta:g} is below the numerical floor of privacy-loss distributions: use rdp"
            )
        return Answer("pld", value, delta, "sound", note)
    if memo.divergences is not None:
        if accountant == "rdp":
            value = min(renyi.to_epsilon(renyi.TODAY, memo.divergences, delta), pure)
        else:
            value = max(0.0, formulas.old_conversion(renyi.MOMENTS, memo.divergences, delta))
        return Answer(accountant, value, delta, "sound", note)
    if accountant == "zcdp":
        return _judge_zcdp(memo.counts, delta, note)
    return _judge_steps(accountant, honest, memo.counts, delta, note)


def _note(memo: _Memo) -> str:
    some = next(iter(memo.counts))
    words = [f"{'replace-one' if some.replace else 'zero-out or add-remove'} neighbours"]
    words += sorted(
        {vector_guarantee(k.noise).reason for k in memo.counts if k.noise.mechanism != "gaussian"}
    )
    if memo.ratio is not None:
        words.append(f"multipliers rounded down by at most {100 * (memo.ratio - 1):.2g}%")
    return "; ".join(words)


def _judge_zcdp(counts: Mapping[Kind, int], delta: float, note: str) -> Answer:
    rho, sampled = 0.0, False
    for kind, n in counts.items():
        if kind.rate == 1:
            rho += n * vector_guarantee(kind.noise).rho
        elif kind.noise.mechanism == "gaussian":
            rho, sampled = rho + n * (kind.rate / kind.noise.multiplier) ** 2, True
        else:
            raise Refused("zCDP has no amplification by sampling for this noise: use rdp or pld")
    value = formulas.concentrated(rho, delta)
    if not sampled:
        return Answer("zcdp", value, delta, "sound", note)
    return Answer(
        "zcdp", value, delta, "nominal", "rho = q^2/sigma^2 is not a valid bound for sampled steps: use pld"
    )


def _judge_steps(
    accountant: str, honest: bool, counts: Mapping[Kind, int], delta: float, note: str
) -> Answer:
    """basic, advanced, optimal: every Gaussian step is (eps0, delta0)-DP, amplified to (eA, q delta0)."""
    kinds, n = list(counts), np.array(list(counts.values()), float)
    rates = np.array([kind.rate for kind in kinds])
    gauss = np.array([kind.noise.mechanism == "gaussian" for kind in kinds])
    weight = float(rates[gauss] @ n[gauss])
    splits = accountant != "basic"
    slack = (delta / 2 if honest and weight else delta) if splits else 0.0
    step_delta = min((delta - slack) / weight, 0.5) if honest and weight else delta
    plain = np.array([vector_guarantee(kind.noise).pure for kind in kinds])
    sigmas = np.array([kind.noise.multiplier for kind in kinds])
    broken = False
    if weight:
        plain[gauss] = formulas.classic_epsilon(sigmas[gauss], step_delta)
        over = gauss & (plain >= 1)
        if honest:  # beyond the range of the classic formula the exact one is used
            plain[over] = [formulas.gaussian_epsilon(s, step_delta) for s in sigmas[over]]
        else:
            broken = bool(over.any())
    steps = formulas.amplified(plain, rates)
    paid = weight * step_delta + slack
    if accountant == "basic":
        value = formulas.basic(steps, n)
    elif accountant == "advanced":
        value = formulas.advanced(steps, n, slack)
    elif accountant == "advanced-tanh":
        value = formulas.advanced_tanh(steps, n, slack)
    else:
        value = formulas.optimal(steps, n, slack)
    if not math.isfinite(value):
        raise Refused("the formula overflows for epsilons this large: use pld")
    faults = []
    if paid > delta * (1 + 1e-9):
        faults.append(
            f"the steps' own deltas add up: {paid:.3g} is paid, not {delta:g} (ask for the honest split)"
        )
    if broken:
        faults.append("the classic Gaussian formula holds only for step epsilons below 1")
    if paid >= 1:
        faults.append("a delta of 1 or more promises nothing")
    if faults:
        return Answer(accountant, value, paid, "nominal", "; ".join(faults))
    return Answer(accountant, value, paid, "sound", note)


def answer(events: Sequence[Event], delta: float, accountant: str = "pld", *, honest: bool = False) -> Answer:
    """Judge the composition of `events` at `delta`; see `Composition.answer` for the guarantee.

    honest: lets basic, advanced and optimal split delta over the steps so that all of it is paid.
    """
    composition = Composition.start(accountant, honest=honest).add(events)
    return with_samplers(composition, [(event, event.steps) for event in events], delta)


SLACK = 1e-6  # a share of delta that pays for the samplers' factors


def lost_to_tails(tail: float | Array, epsilon: float | Array) -> float | Array:
    """The delta that samplers' tails of mass `tail` may cost where exact laws give `epsilon`, with room: a smaller delta
    makes epsilon larger."""
    made: float | np.ndarray = 2 * tail * (np.exp(np.minimum(np.asarray(epsilon) + 1, 700.0)) + 1)
    return made


def left_by_samplers(delta: float, lost: float | Array) -> Array:
    """The delta for exact laws where samplers' tails cost `lost`; not positive where too little is left.

    Their share is rounded up to a power of two: from round to round it stays the same, and what was composed for the delta
    that it leaves is extended, not made anew.
    """
    needed = (SLACK + np.asarray(lost) / delta) / (1 + SLACK)
    return delta * (1 - 2.0 ** np.ceil(np.log2(needed)))


def with_samplers(composition: Composition, uses: Iterable[tuple[Event, int]], delta: float) -> Answer:
    """The composition's answer, raised by what the samplers' distance from their laws costs.

    Formal guarantee: with exact laws (e, d)-DP means (e + 2 r, (1 + SLACK) d + t (e^(e + r) + 1))-DP with samplers whose
    probabilities are right up to a factor e^±r in all, r <= SLACK, but for a mass of t (see `protect.exact.extra`). Here d is
    chosen so that the whole stays within `delta`.
    """
    ratio = tail = 0.0
    for event, times in uses:
        ratio, tail = ratio + times * event.noise.ratio, tail + times * event.noise.tail
    if ratio == 0 and tail == 0:
        return composition.answer(delta)
    first = composition.answer(delta)
    if first.epsilon is None:
        return first
    if ratio > SLACK:
        return replace(first, epsilon=None, verdict="none", reason="too many sampled values for the samplers' error bound")
    short = replace(first, epsilon=None, verdict="none", reason="delta is too small for the samplers' error bound")
    if delta == 0:
        return replace(first, epsilon=first.epsilon + 2 * ratio) if tail == 0 else short
    left = float(left_by_samplers(delta, lost_to_tails(tail, first.epsilon)))
    if left < delta / 2:
        return short
    answer = composition.answer(left)
    if answer.epsilon is None:
        return answer
    if tail * (math.exp(min(answer.epsilon + ratio, 700.0)) + 1) > delta - (1 + SLACK) * left:  # epsilon rose too much
        return short
    return replace(answer, epsilon=answer.epsilon + 2 * ratio, delta=first.delta)


def participation_epsilon(event: Event, rounds: int, rate: float, delta: float) -> Answer:
    """Epsilon when each of `rounds` is joined by a visible, data-independent coin of `rate`; joining costs `event`.

    Formal guarantee: (epsilon, delta)-DP for every observer, including one who sees who takes part.
    """
    rounds, rate, delta = checks.count("rounds", rounds), checks.fraction("rate", rate), checks.delta(delta)
    kind = _kind(event.noise, event.sampling, event.relation, event.unit)
    if rounds == 0 or event.steps == 0:
        return Answer("pld", 0.0, 0.0, "sound", "nothing was released")
    try:
        _refuse_odd(kind)
        release, copies = _loss(kind)
        with _grid_fits():
            value = pld.visible_rounds(release, checks.count("steps", event.steps) * copies, rounds, rate, delta)
        if math.isinf(value):
            raise Refused(f"delta = {delta:g} is below the numerical floor of privacy-loss distributions")
    except Refused as why:
        return Answer("pld", None, delta, "none", str(why))
    return Answer("pld", value, delta, "sound", f"averaged over visible participation with rate {rate:g}")
