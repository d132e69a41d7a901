"""What happened, as frozen values. Accountants judge; events never guess.

An `Event` describes noise added to a bounded vector, how the protected unit was sampled into it, the
neighbouring relation the bound refers to, and how often it happened. A `Claim` says which observer sees
an event about which unit, with a verdict; a `Release` groups the claims of one hand-over (normally one
round) by the clients they concern. None of this imports torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

from fedveil.jsons import Document, JsonObject

Relation = Literal["zero-out", "add-remove", "replace-one"]
Unit = Literal["example", "client", "reported-weight"]
Observer = Literal["server", "client-process", "participants", "public"]
Verdict = Literal["sound", "nominal", "none"]
MechanismName = Literal["gaussian", "laplace", "staircase", "joint-staircase", "two-valued"]
SamplingKind = Literal["none", "poisson", "fixed", "partition"]

OBSERVERS: tuple[Observer, ...] = get_args(Observer)
UNITS: tuple[Unit, ...] = get_args(Unit)


@dataclass(frozen=True)
class Noise:
    """Noise on a vector whose change between neighbours is bounded by 1 in `norm` (after scaling).

    multiplier: noise scale over the joint bound: Gaussian sigma/C, Laplace b/C, Staircase 1/lambda,
    two-valued 1/epsilon. It is the *effective* multiplier: per-layer clipping, the place of the noise and
    the neighbouring relation are already inside (see protect.promise).
    dimension: coordinates that receive i.i.d. noise (matters for Laplace and Staircase only).
    width: Staircase's step over the bound; lambda is then width / multiplier, so that a narrow Staircase is Laplace
    noise of scale `multiplier`.
    ratio, tail: how far the sampler of a whole vector is from its law: probabilities are right up to a factor e^±ratio, but
    for a mass of `tail`. Accountants add what that costs.
    """

    mechanism: MechanismName
    multiplier: float
    norm: Literal["l1", "l2"] = "l2"
    dimension: int = 1
    nu: float | None = None
    width: float = 1.0
    ratio: float = 0.0
    tail: float = 0.0


@dataclass(frozen=True)
class Sampling:
    """How the unit gets into a step: Poisson with `rate`; fixed size `batch` of `population` without
    replacement; partition (each record exactly once per pass: no amplification); none (always in)."""

    kind: SamplingKind = "none"
    rate: float = 1.0
    batch: int | None = None
    population: int | None = None


@dataclass(frozen=True)
class Event:
    """`steps` independent uses of `noise` under `sampling`, for one unit and neighbouring relation."""

    noise: Noise
    sampling: Sampling = Sampling()
    relation: Relation = "zero-out"
    unit: Unit = "example"
    steps: int = 1


@dataclass(frozen=True)
class Claim:
    """What one observer is promised about one unit by one release.

    verdict "none": no finite promise, `event` is None. "nominal": as a paper counts it, with the reason
    why it is no guarantee. "sound": holds; `event` says why.
    scope "holder": composes only over the releases of clients that hold the unit's data.
    scope "everyone": composes over every release of the run (e.g. one coin per round decides for all).
    scope "single": every release is a unit of its own (one reported weight), or a paper counts it so; nothing adds up
    and the worst single release is the answer.
    accountant: fixed where the claim is about a particular formula (nominal rows); None lets the ledger choose.
    """

    observer: Observer
    unit: Unit
    verdict: Verdict
    reason: str = ""
    event: Event | None = None
    scope: Literal["holder", "everyone", "single"] = "holder"
    accountant: str | None = None


@dataclass(frozen=True)
class Release:
    """One hand-over: what leaves in `round`, for groups of clients that share the same claims."""

    round: int
    groups: tuple[tuple[tuple[int, ...], tuple[Claim, ...]], ...]
    note: str = ""


def to_json(value: Event | Claim | Noise | Sampling) -> JsonObject:
    """Plain dictionary; `event_from_json` is the inverse."""
    return asdict(value)


def event_from_json(data: Document) -> Event:
    return Event(
        noise=Noise(**data["noise"]),
        sampling=Sampling(**data["sampling"]),
        relation=data["relation"],
        unit=data["unit"],
        steps=int(data["steps"]),
    )
