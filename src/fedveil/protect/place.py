"""Where noise goes: in every local step, on a client's upload, at the server, or on a sum that nobody sees in parts.

A place knows three things: the `Noised` values that are used there, which observer sees what before the noise, and what the
noised thing says about an example and about a client. Claims are read from that; nothing is stated twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from fedveil.privacy.events import Claim, Event, Noise, Observer, Sampling, Unit
from fedveil.privacy.ledger.entries import GROUP
from fedveil.protect.bounded import COVERED, rounding_slack
from fedveil.protect.law import Gaussian
from fedveil.protect.noised import Noised, runs
from fedveil.protect.sampling import Counted
from fedveil.protect.setting import Moment, Setting

if TYPE_CHECKING:
    from fedveil.protect.recipe import Recipe

AFTER_UPLOAD: tuple[Observer, ...] = ("server", "participants", "public")
BOTH: tuple[Unit, ...] = ("example", "client")
NO_CLIENT_LEVEL = "a promise for single examples is none for a whole client"
SHARED = "several clients may hold one example, and their parts move together under one noise"
RAW_GRADIENTS = "clipped or plain per-example gradients are in the client's memory without noise"
UNPROVEN = "the {} engine's sums are not proven to keep the clip bound in floating point (docs/engines.md)"
NO_EVENT = "the noise law states nothing about this bound"
DOWN = Gaussian()
Scope = Literal["holder", "everyone", "single"]


class Place(Protocol):
    """A place for noise.

    target: what is clipped there. unit: what it is made to protect. private: is there any noise? in_steps: is it in local
    training? own_noise: is each client's noise its own, so that clients may have their own budgets? open_uploads: may a
    rule look at single uploads? sum_only: must nobody see a part of the sum? shows_divergence: can one see that a client
    was left out? scope: whom a round's claims are charged to.
    """

    @property
    def name(self) -> str: ...
    @property
    def words(self) -> str: ...  # for people: noise is added …
    @property
    def target(self) -> Literal["gradient", "update", "weights"]: ...
    @property
    def of_gradients(self) -> bool: ...
    @property
    def of_updates(self) -> bool: ...
    @property
    def unit(self) -> Unit: ...
    @property
    def private(self) -> bool: ...
    @property
    def in_steps(self) -> bool: ...
    @property
    def own_noise(self) -> bool: ...
    @property
    def open_uploads(self) -> bool: ...
    @property
    def sum_only(self) -> bool: ...
    @property
    def shows_divergence(self) -> bool: ...
    @property
    def scope(self) -> Scope: ...

    def refusal(self, recipe: Recipe) -> str: ...
    def shows(self, recipe: Recipe) -> str: ...
    def noised(self, recipe: Recipe, setting: Setting, now: Moment, size: int) -> tuple[Noised, ...]: ...
    def raw(self, observer: Observer, recipe: Recipe) -> str: ...
    def says(
        self, observer: Observer, unit: Unit, recipe: Recipe, setting: Setting, now: Moment, size: int
    ) -> list[Claim]: ...


def none(observer: Observer, unit: Unit, reason: str) -> Claim:
    """Nothing finite is promised."""
    return Claim(observer, unit, "none", reason)


def stated(observer: Observer, noised: Noised, why: str, scope: Scope = "holder") -> Claim:
    """The claim that follows from a noised release: sound, nominal with the reason, or none."""
    event, gap = noised.event(), noised.gap()
    if event is None:
        return none(observer, noised.unit, NO_EVENT)
    if gap:
        return Claim(observer, noised.unit, "nominal", f"{why}; {gap}", event, scope)
    return Claim(observer, noised.unit, "sound", why, event, scope)


def by_group(observer: Observer) -> Claim:
    """A whole client by group privacy over its examples; the ledger finds that this is rarely worth anything."""
    return Claim(observer, "client", "sound", "all examples of a client at once", accountant=GROUP)


def one(
    recipe: Recipe,
    setting: Setting,
    now: Moment,
    step: int,
    count: float,
    drawn: Counted,
    unit: Unit = "example",
    slack: float = 0.0,
) -> Noised:
    """The noise of one step (or of the one release of a round) on a sum of `count` contributions.

    slack: by how much rounding may widen the effect of one contribution on the sum (`bounded.rounding_slack`).

    Formal guarantee: the only place where a noise scale is made. `bound` is what one unit can move the sum by, over all
    layers together, rounding included, for the neighbours of `drawn`; `scale` is what is drawn with.
    """
    assert recipe.law is not None
    bound, sigma = now.bounds[step], now.sigmas[step]
    base = bound if recipe.clip.bounded else 1.0
    scale, shape = recipe.law.scale(sigma, base, setting.dimension)
    exact = recipe.fineness > 0  # float noise is not sound anyway: there the bound is the paper's
    return Noised(
        law=recipe.law,
        scale=scale * recipe.noise_on.factor(count),
        shape=shape,
        bound=recipe.clip.joint(base, setting.layers) * drawn.reach * (1 + slack if exact else 1.0),
        norm=recipe.clip.norm,
        dimension=setting.dimension,
        grid=recipe.spacing_at(bound, sigma),
        sampling=drawn.sampling,
        relation=drawn.relation,
        unit=unit,
        beside=recipe.clip.rule.beside() / drawn.reach,
        follows=recipe.scale.unsound or recipe.clip.rule.unsound,
        unproven="" if setting.engine in COVERED else UNPROVEN.format(setting.engine),
        at_norm=recipe.clip.piece(base, setting.layers) if recipe.scale.batch or recipe.clip.rule.batch else 0.0,
        at_count=count if recipe.noise_on.for_each else 0.0,
    )


def _each_step(now: Moment, make: Callable[[int], Noised]) -> tuple[Noised, ...]:
    """`make(step)` for every step; once for steps with equal bound and multiplier, of which a round may have thousands."""
    pairs = list(zip(now.bounds, now.sigmas, strict=True))
    made = {pair: make(step) for pair, step in dict(zip(pairs, range(len(pairs)), strict=True)).items()}
    return tuple(made[pair] for pair in pairs)


def downlink(recipe: Recipe, setting: Setting, now: Moment) -> Noised | None:
    """Noise on the model before it goes to the clients (NbAFL), or None. Nothing is claimed of it here."""
    if not recipe.downlink_sigma > 0:
        return None
    scale, shape = DOWN.scale(recipe.downlink_sigma, now.bounds[0], setting.dimension)
    return Noised(DOWN, scale, now.bounds[0], setting.dimension, shape, follows="the papers' noise on the downlink")


def _sum_slack(recipe: Recipe, setting: Setting, now: Moment, size: int, narrowed: bool = False) -> float:
    """The slack of a client's own sums over a batch: of the loosest engine, so that a promise does not depend on which ran."""
    batches = recipe.batches
    most = size if batches.random_size else math.ceil(batches.constant(setting.batch, size))
    bound = min(recipe.clip.piece(bound, setting.layers) for bound in now.bounds)
    return rounding_slack(
        "native", max(1, most), size=setting.dimension, bound=bound, kind=recipe.clip.norm, narrowed=narrowed
    )


def on_grid(recipe: Recipe) -> str:
    """What to add to a reason."""
    if not recipe.fineness:
        return ""
    return f"; discrete noise on a grid of {recipe.fineness:g} of the bound, rounding counted"


@dataclass(frozen=True)
class Nowhere:
    """No noise at all."""

    name: str = "nowhere"
    words: str = "nowhere"
    target: Literal["gradient", "update", "weights"] = "gradient"
    unit: Unit = "example"
    private: bool = False
    in_steps: bool = False
    own_noise: bool = False
    open_uploads: bool = True
    sum_only: bool = False
    shows_divergence: bool = True
    scope: Scope = "holder"

    @property
    def of_gradients(self) -> bool:
        """Is it gradients of examples that are clipped?"""
        return self.target == "gradient"

    @property
    def of_updates(self) -> bool:
        """Is it a client's finished update that is clipped?"""
        return self.target == "update"

    def refusal(self, recipe: Recipe) -> str:
        """Why this recipe cannot have its noise here, or ""."""
        return ""

    def shows(self, recipe: Recipe) -> str:
        """For people: what whoever runs the server sees of a round."""
        return "every upload as it is, without noise"

    def noised(self, recipe: Recipe, setting: Setting, now: Moment, size: int) -> tuple[Noised, ...]:
        """The noise of one round: one value per local step, or one for the one release."""
        return ()

    def raw(self, observer: Observer, recipe: Recipe) -> str:
        """Why an observer sees more than what is noised, or ""."""
        return RAW_GRADIENTS if observer == "client-process" else ""

    def says(
        self, observer: Observer, unit: Unit, recipe: Recipe, setting: Setting, now: Moment, size: int
    ) -> list[Claim]:
        """What a round's noised releases say about a unit to an observer who sees them and nothing else."""
        return [none(observer, unit, recipe.thin.not_noise or "no noise is added")]


@dataclass(frozen=True)
class InStep(Nowhere):
    """In every local step, on the sum of clipped per-example gradients."""

    name: str = "step"
    words: str = "to each local step, on the client"
    private: bool = True
    in_steps: bool = True
    own_noise: bool = True

    def shows(self, recipe: Recipe) -> str:
        return "every upload, made of steps that the client has noised"

    def noised(self, recipe: Recipe, setting: Setting, now: Moment, size: int) -> tuple[Noised, ...]:
        count = recipe.batches.constant(setting.batch, size)
        drawn = recipe.batches.counted(setting.batch, size)
        slack = _sum_slack(recipe, setting, now, size)
        return _each_step(now, lambda step: one(recipe, setting, now, step, count, drawn, slack=slack))

    def raw(self, observer: Observer, recipe: Recipe) -> str:
        return RAW_GRADIENTS if observer == "client-process" and not recipe.noise_on.for_each else ""

    def says(
        self, observer: Observer, unit: Unit, recipe: Recipe, setting: Setting, now: Moment, size: int
    ) -> list[Claim]:
        if observer == "client-process":
            return self._in_memory(unit, recipe, setting, now, size)
        values = self.noised(recipe, setting, now, size)
        broken = next((value.follows for value in values if value.follows), "")
        if recipe.noise_on.for_each and recipe.batches.random_size:
            broken = (
                broken or "noise per example with a random batch size: the total variance tells how many were drawn"
            )
        if broken:
            return [none(observer, unit, broken)]
        if unit == "client":
            return [by_group(observer)]
        assert recipe.law is not None
        why = f"{recipe.law.name} noise in every local step; batches: {recipe.batches.name}{on_grid(recipe)}"
        out = []
        for value, steps in runs(values).items():
            times = recipe.batches.share(steps, setting.batch, size)
            out.append(stated(observer, replace(value, steps=times), why))
        return out

    def _in_memory(self, unit: Unit, recipe: Recipe, setting: Setting, now: Moment, size: int) -> list[Claim]:
        """What someone who reads the client's memory during training (but not its data) may learn."""
        if unit == "client":
            return [none("client-process", unit, NO_CLIENT_LEVEL)]
        plain = replace(recipe, noise_on=replace(recipe.noise_on, name="sum"))
        # Replace-one: two clipped gradients differ by at most twice the joint bound; each time an example is
        # touched is one event; who reads the memory sees which examples were drawn, so nothing is amplified.
        alone = Counted(Sampling("none"), "replace-one", 2.0)
        values = _each_step(now, lambda step: replace(one(plain, setting, now, step, 1, alone), beside=0.0))
        if recipe.scale.unsound or recipe.clip.rule.unsound or recipe.clip.rule.in_steps:
            return [none("client-process", unit, RAW_GRADIENTS)]
        uses = recipe.batches.uses(setting.steps, setting.batch, size)
        why = "holds where each gradient is noised as it is made; the engines here draw the same noise on the sum"
        return [
            Claim(
                "client-process",
                "example",
                "nominal",
                why,
                replace(value, steps=min(uses, len(steps)), grid=0.0).event(),
            )
            for value, steps in runs(values).items()
        ]


def both_units(observer: Observer, noised: Noised, unit: Unit, why: str, scope: Scope) -> list[Claim]:
    """Client level with the bound; example level with twice the bound and replace-one neighbours: one example can
    move an update from anywhere in the ball to anywhere else."""
    if unit == "client":
        return [stated(observer, noised, why, scope)]
    turned = noised.bound if noised.relation == "replace-one" else 2 * noised.bound
    example = replace(noised, bound=turned, relation="replace-one", unit="example")
    return [stated(observer, example, why + "; one example may turn the clipped update around", scope)]


@dataclass(frozen=True)
class AtClient(Nowhere):
    """On each client's finished, clipped update, before it leaves.

    unbounded: noise on updates that are not clipped is the method itself (random noise addition); nothing is promised.
    """

    name: str = "client"
    words: str = "to the finished update, on the client"
    target: Literal["gradient", "update", "weights"] = "update"
    unit: Unit = "client"
    private: bool = True
    own_noise: bool = True
    shows_divergence: bool = False
    unbounded: bool = False

    def shows(self, recipe: Recipe) -> str:
        return "every upload, noised by its client"

    def noised(self, recipe: Recipe, setting: Setting, now: Moment, size: int) -> tuple[Noised, ...]:
        # Two models in a ball may be twice its radius apart; an update may be left out.
        whole = recipe.clip.of_weights
        alone = Counted(Sampling("none"), "replace-one", 2.0) if whole else Counted(Sampling("none"), "zero-out")
        return (one(recipe, replace(setting, engine="clients"), now, 0, 1.0, alone, "client"),)

    def says(
        self, observer: Observer, unit: Unit, recipe: Recipe, setting: Setting, now: Moment, size: int
    ) -> list[Claim]:
        if not recipe.clip.bounded:
            return [none(observer, unit, "noise without a clip: the update is unbounded")]
        (noised,) = self.noised(recipe, setting, now, size)
        what = "a model that is " if recipe.clip.of_weights else ""
        why = f"each upload is {what}clipped and noised by its client{on_grid(recipe)}"
        return both_units(observer, noised, unit, why, self.scope)


@dataclass(frozen=True)
class AtServer(Nowhere):
    """Once per round, at the server, on the sum of the clipped updates that it received."""

    name: str = "server"
    words: str = "by the server, after it received the updates"
    target: Literal["gradient", "update", "weights"] = "update"
    unit: Unit = "client"
    private: bool = True
    open_uploads: bool = False
    shows_divergence: bool = False
    scope: Scope = "everyone"

    def shows(self, recipe: Recipe) -> str:
        return "every upload, before any noise"

    def noised(self, recipe: Recipe, setting: Setting, now: Moment, size: int) -> tuple[Noised, ...]:
        return (self._one(recipe, setting, now, 0),)

    def _one(self, recipe: Recipe, setting: Setting, now: Moment, known: int) -> Noised:
        """The noise of a round for an observer who knows the coins of so many clients."""
        drawn = recipe.cohort.counted(setting.clients, setting.cohort, known)
        slack = rounding_slack("clients", setting.clients)
        return one(recipe, replace(setting, engine="clients"), now, 0, setting.cohort, drawn, "client", slack)

    def raw(self, observer: Observer, recipe: Recipe) -> str:
        seen: dict[Observer, str] = {
            "client-process": RAW_GRADIENTS,
            "server": "the server receives each update before any noise",
        }
        return seen.get(observer, "")

    def says(
        self, observer: Observer, unit: Unit, recipe: Recipe, setting: Setting, now: Moment, size: int
    ) -> list[Claim]:
        if recipe.noise_on.for_each and recipe.cohort.random_size:
            reason = "noise per client with a random cohort: the total variance tells how many took part"
            return [none(observer, unit, reason)]
        if unit == "example" and setting.copies > 1:
            return [none(observer, unit, SHARED)]
        known = setting.colluders if observer == "participants" else 0
        drawn = recipe.cohort.counted(setting.clients, setting.cohort, known)
        noised = self._one(recipe, setting, now, known)
        why = "noise once on the sum of clipped updates; the cohort is secret" + on_grid(recipe)
        if known and drawn != recipe.cohort.counted(setting.clients, setting.cohort):
            why += f"; {known} of the participants know their own coins"
        return both_units(observer, noised, unit, why, self.scope)


@dataclass(frozen=True)
class InSum(Nowhere):
    """Once per round, on the sum of all clients' clipped per-example gradients, of which nobody sees a part."""

    name: str = "sum"
    words: str = "once, to a sum that nobody sees in parts"
    private: bool = True
    open_uploads: bool = False
    sum_only: bool = True
    shows_divergence: bool = False

    def shows(self, recipe: Recipe) -> str:
        return "only the noised sum over all clients (through a trusted or secure aggregation), no single upload"

    def everyone(self, recipe: Recipe, setting: Setting) -> float:
        """The expected number of examples in the sum, which it is divided by."""
        full = recipe.batches.constant(setting.batch, setting.examples) >= setting.examples
        return float(setting.examples) if full else setting.batch * setting.clients

    def noised(self, recipe: Recipe, setting: Setting, now: Moment, size: int) -> tuple[Noised, ...]:
        drawn = recipe.batches.counted(setting.batch, size)
        slack = _sum_slack(recipe, setting, now, size, narrowed=True) + rounding_slack("clients", setting.examples)
        return (one(recipe, setting, now, 0, self.everyone(recipe, setting), drawn, slack=slack),)

    def says(
        self, observer: Observer, unit: Unit, recipe: Recipe, setting: Setting, now: Moment, size: int
    ) -> list[Claim]:
        broken = SHARED if setting.copies > 1 else ""
        if recipe.noise_on.for_each:
            broken = "noise per example on a sum of random size: the variance tells the count"
        if broken:
            return [none(observer, unit, broken if unit == "example" else NO_CLIENT_LEVEL)]
        if unit == "client":
            return [by_group(observer)]
        (noised,) = self.noised(recipe, setting, now, size)
        noised = replace(noised, steps=recipe.batches.uses(setting.steps, setting.batch, size))
        why = "noise once on the sum over all clients, of which nobody sees a part (trusted or secure aggregation)"
        return [stated(observer, noised, why + on_grid(recipe), self.scope)]


@dataclass(frozen=True)
class Reports(Nowhere):
    """Every weight of the finished local model as one of two values (LDP-FL).

    Formal guarantee: each reported weight is epsilon-LDP; a client reports `dimension` weights in every round it takes part
    in, and among the reports of n clients in random order one weight is hidden as `privacy.shuffle` computes.
    """

    name: str = "client"
    words: str = "to the finished update, on the client"
    target: Literal["gradient", "update", "weights"] = "weights"
    unit: Unit = "example"
    private: bool = True
    shows_divergence: bool = False

    def refusal(self, recipe: Recipe) -> str:
        if not recipe.noise_on.once:
            return "reports carry their own randomness: leave noise_on = sum"
        if recipe.epsilon is None or not recipe.epsilon > 0:
            return "the two-valued randomiser needs epsilon > 0 (per weight)"
        return recipe.ranges.refusal()

    def shows(self, recipe: Recipe) -> str:
        if recipe.channel.hides_reports:
            return "the reports of all clients in random order (by an honest shuffler), each weight one of two random values"
        return "every report, each weight one of two random values"

    def one(self, recipe: Recipe, now: Moment) -> Noise:
        """One reported weight."""
        return Noise("two-valued", 1 / (now.epsilon or recipe.epsilon or 0.0), norm="l1")

    def many(self, recipe: Recipe, setting: Setting, now: Moment) -> Noise:
        """All reported weights of a client."""
        return replace(self.one(recipe, now), dimension=setting.dimension)

    def says(
        self, observer: Observer, unit: Unit, recipe: Recipe, setting: Setting, now: Moment, size: int
    ) -> list[Claim]:
        if unit != "reported-weight":
            moved = f"all {setting.dimension} weights of a client move together, in every round it takes part in"
            event = Event(self.many(recipe, setting, now), Sampling("none"), "replace-one", unit, 1)
            return [Claim(observer, unit, "sound", moved, event, accountant="basic")]
        crowd = now.arrived or round(setting.cohort)
        if observer == "participants":
            crowd = max(1, crowd - setting.colluders)  # they know their own reports
        hidden = recipe.channel.hides_reports
        alone, by, mixed = "each single reported weight", "basic", Sampling("none")
        if hidden:
            alone = f"one weight among the reports of {crowd} clients (exact binary shuffling; the shuffler must be honest)"
            by, mixed = "shuffle", Sampling("none", population=crowd)
        weight = Event(self.one(recipe, now), mixed, "replace-one", "reported-weight", 1)
        return [Claim(observer, unit, "sound", alone, weight, "single", by)]


PLACES: dict[str, Place] = {p.name: p for p in (Nowhere(), InStep(), AtClient(), AtServer(), InSum())}


def units_of(place: Place) -> Sequence[Unit]:
    """The units that a place's releases speak about."""
    return ("reported-weight", *BOTH) if isinstance(place, Reports) else BOTH
