"""From practice to promise: the claims that follow from a recipe's own parts.

Nothing here is typed in twice: the effective noise multiplier comes from the clip, the place of the noise
and the neighbouring relation; the sampling comes from the sampler that the engine really uses.

Formal guarantee: a claim with verdict "sound" describes a mechanism that the release post-processes. Where
that cannot be shown the claim is "none"; a paper's own count is added as "nominal" with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedveil.privacy.events import Claim, Event, Noise, Observer, Relation, Release, Sampling, Unit
from fedveil.privacy.ledger.entries import GROUP
from fedveil.protect.batches import passes
from fedveil.protect.noise import snapped_multiplier
from fedveil.protect.recipe import Recipe, step_width

Scope = Literal["holder", "everyone", "single"]

AFTER_UPLOAD: tuple[Observer, ...] = ("server", "participants", "public")
NO_CLIENT_LEVEL = "a promise for single examples is none for a whole client"
SHARED = "several clients may hold one example, and their parts move together under one noise"
RAW_GRADIENTS = "clipped or plain per-example gradients are in the client's memory without noise"


@dataclass(frozen=True)
class Setting:
    """Public facts of a run that a promise needs."""

    clients: int
    cohort: float  # expected clients per round
    rounds: int
    steps: int  # local steps per round
    batch: float  # expected batch size per client and step
    examples: int  # |D|, distinct training examples
    layers: int
    dimension: int
    copies: int = 1  # clients that may hold the same example


@dataclass(frozen=True)
class Round:
    """What a recipe's schedules gave for one round: one value per local step (or one for all)."""

    number: int
    bounds: tuple[float, ...]
    sigmas: tuple[float, ...]
    epsilon: float | None = None
    arrived: int | None = None  # uploads that reached the server (shuffling, per-client noise on the sum)


def release(
    recipe: Recipe,
    setting: Setting,
    now: Round,
    sizes: Mapping[int, int],
    budgets: Mapping[int, tuple[Recipe, float]] = {},
) -> Release:
    """All claims of one round, grouped by clients for which they are equal.

    sizes: client -> number of its examples, for the clients of this round's cohort.
    budgets: clients that use their own recipe and noise multiplier (UDP-FL): client -> (recipe, sigma).
    """
    groups: dict[tuple[Claim, ...], list[int]] = {}
    for client, size in sizes.items():
        own, moment = recipe, now
        if client in budgets:
            own, sigma = budgets[client]
            moment = Round(now.number, now.bounds, (sigma,) * len(now.sigmas), now.epsilon, now.arrived)
        groups.setdefault(tuple(claims(own, setting, moment, size)), []).append(client)
    if not sizes:
        # Nobody was drawn, but the noised model goes out all the same: that a coin fell so is part of what
        # amplification by sampling counts in every round.
        shared = tuple(claim for claim in claims(recipe, setting, now, 1) if claim.scope == "everyone")
        if shared and recipe.where == "server":
            groups[shared] = []
    return Release(now.number, tuple((tuple(members), key) for key, members in groups.items()))


def divergence(recipe: Recipe, number: int, clients: Sequence[int]) -> Release | None:
    """What is charged when clients of round `number` diverged and were left out: that they did depends on their data."""
    if recipe.where != "step" or not clients:
        return None
    reason = "a client whose training diverged was left out; that it diverged depends on its data"
    units: tuple[Unit, ...] = ("example", "client")
    return Release(
        number,
        ((tuple(clients), tuple(_none(o, u, reason) for o in AFTER_UPLOAD for u in units)),),
        "diverged",
    )


def claims(recipe: Recipe, setting: Setting, now: Round, size: int) -> list[Claim]:
    """The claims of one client of `size` examples about one round."""
    if recipe.where == "nowhere":
        return _nothing(recipe)
    return {"step": _step, "client": _client, "server": _server, "sum": _sum}[recipe.where](
        recipe, setting, now, size
    )


def _none(observer: Observer, unit: Unit, reason: str) -> Claim:
    return Claim(observer, unit, "none", reason)


def _nothing(recipe: Recipe) -> list[Claim]:
    reason = "no noise is added"
    if recipe.prune or recipe.share < 1:
        reason = "dropping coordinates is not noise: what is shared is exact"
    return [
        _none(o, u, reason)
        for o in ("server", "client-process", "participants", "public")
        for u in ("example", "client")
    ]


def joint_bound(recipe: Recipe, bound: float, layers: int) -> float:
    """Largest norm of one clipped contribution over all layers together."""
    if recipe.clip.rule == "adaclip":
        return 1.0
    if recipe.clip.kind != "layer" or recipe.clip.split:
        return bound
    return bound * (layers if recipe.clip.norm == "l1" else math.sqrt(layers))


def real_batch(recipe: Recipe, setting: Setting, size: int) -> float:
    """The batch that a client of `size` examples really uses as its constant."""
    if recipe.sampling == "full" or setting.batch >= size:
        return float(size)
    return float(int(setting.batch)) if recipe.sampling in ("fixed", "partition") else setting.batch


def _over_bound(recipe: Recipe, setting: Setting, scale: float, bound: float) -> float:
    """Noise of deviation `scale` over the joint bound; on a grid, what is left of that after rounding.

    A round's grid is at most `grid * bound` in each of its steps (`recipes.spacing`), and a finer one only helps.
    """
    joint = joint_bound(recipe, bound, setting.layers)
    if not recipe.grid:
        return scale / joint
    return snapped_multiplier(scale, joint, recipe.grid * bound, setting.dimension)


def _on_grid(recipe: Recipe) -> str:
    if not recipe.grid:
        return ""
    return f"; discrete noise on a grid of {recipe.grid:g} of the bound, rounding counted"


def multiplier(recipe: Recipe, setting: Setting, bound: float, sigma: float, size: int) -> float:
    """Noise scale on the sum over the joint bound (zero-out neighbours), for a client of `size` examples."""
    scale = sigma * (1.0 if recipe.clip.rule == "adaclip" else bound)
    if recipe.clip.split and recipe.clip.kind == "layer":
        scale = (
            sigma * bound
        )  # noise is scaled to the joint bound although each layer gets bound / sqrt(layers)
    if recipe.noise_on == "mean":
        scale *= real_batch(recipe, setting, size) if recipe.where in ("step", "sum") else setting.cohort
    elif recipe.noise_on == "example":
        scale *= math.sqrt(
            real_batch(recipe, setting, size) if recipe.where in ("step", "sum") else setting.cohort
        )
    z = _over_bound(recipe, setting, scale, bound)
    if recipe.clip.rule == "quantile":
        # The count of unclipped examples is released in the same step (each example counts ±1/2): one joint
        # Gaussian mechanism, Andrew et al.
        z = (z**-2 + (2 * recipe.clip.count_noise) ** -2) ** -0.5
    return z


def _batch_sampling(recipe: Recipe, setting: Setting, size: int) -> tuple[Sampling, Relation, float, int]:
    """(sampling, relation, divisor of the multiplier, uses of one record per round)."""
    steps, batch = setting.steps, setting.batch
    if recipe.sampling == "full" or batch >= size:
        return Sampling("none"), "zero-out", 1.0, steps
    if recipe.sampling == "poisson":
        return Sampling("poisson", rate=batch / size), "zero-out", 1.0, steps
    if recipe.sampling == "fixed":
        return (
            Sampling("fixed", rate=batch / size, batch=int(batch), population=size),
            "replace-one",
            2.0,
            steps,
        )
    return Sampling("partition", rate=batch / size), "zero-out", 1.0, passes(steps, batch, size)


def _noise(recipe: Recipe, z: float, dimension: int) -> Noise:
    name = recipe.mechanism
    assert name != "none"
    width = step_width(recipe, dimension) if name == "staircase" else 1.0
    return Noise(
        name, z, norm=recipe.clip.norm, dimension=1 if name == "gaussian" else dimension, width=width
    )


def _runs(values: tuple[float, ...]) -> dict[float, int]:
    counts: dict[float, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def _by_group(observer: Observer) -> Claim:
    """A whole client by group privacy over its examples; the ledger finds that this is rarely worth anything."""
    return Claim(observer, "client", "sound", "all examples of a client at once", accountant=GROUP)


def _step(recipe: Recipe, setting: Setting, now: Round, size: int) -> list[Claim]:
    sampling, relation, divide, uses = _batch_sampling(recipe, setting, size)
    zs = tuple(multiplier(recipe, setting, c, s, size) for c, s in zip(now.bounds, now.sigmas, strict=True))
    events = []
    for z, count in _runs(zs).items():
        share = count
        if sampling.kind == "partition":
            # A record is used once per pass: as often as there are passes that contain a step with this noise.
            per_pass = size // int(setting.batch)
            share = len({step // per_pass for step, value in enumerate(zs) if value == z})
        events.append(
            Event(_noise(recipe, z / divide, setting.dimension), sampling, relation, "example", share)
        )

    broken = ""
    if recipe.sensitivity == "l2-max":
        broken = "the noise scale is the largest norm of the batch, so it depends on the data and is itself visible"
    elif recipe.clip.rule == "median":
        broken = "the bound is the batch's own median norm, so noise and sensitivity depend on the data"
    elif recipe.noise_on == "example" and recipe.sampling == "poisson":
        broken = "noise per example with a random batch size: the total variance tells how many were drawn"

    out: list[Claim] = []
    for observer in AFTER_UPLOAD:
        if broken:
            out.append(_none(observer, "example", broken))
            out.append(_none(observer, "client", broken))
        else:
            why = (
                f"{recipe.mechanism} noise in every local step; batches: {recipe.sampling}{_on_grid(recipe)}"
            )
            out += [Claim(observer, "example", "sound", why, event) for event in events]
            out.append(_by_group(observer))
    out += _in_memory(recipe, setting, now, uses if not broken else setting.steps)
    out += _paper_step(recipe, setting, now)
    return out


def _in_memory(recipe: Recipe, setting: Setting, now: Round, uses: int) -> list[Claim]:
    """What someone who reads the client's memory during training (but not its data) may learn."""
    client = _none("client-process", "client", NO_CLIENT_LEVEL)
    per_example = (
        recipe.noise_on == "example"
        and recipe.mechanism == "gaussian"
        and recipe.sensitivity == "bound"
        and recipe.clip.rule == "given"
    )
    if not per_example:
        return [_none("client-process", "example", RAW_GRADIENTS), client]
    out = [client]
    for (bound, sigma), count in _runs_pairs(now).items():
        # Replace-one: two clipped gradients differ by at most twice the joint bound; each time an example is
        # touched is one event; who reads the memory sees which examples were drawn, so nothing is amplified.
        z = sigma * bound / (2 * joint_bound(recipe, bound, setting.layers))
        event = Event(Noise("gaussian", z), Sampling("none"), "replace-one", "example", min(uses, count))
        out.append(
            Claim(
                "client-process",
                "example",
                "nominal",
                "holds where each gradient is noised as it is made; the engines here draw the same noise on the sum",
                event,
            )
        )
    return out


def _runs_pairs(now: Round) -> dict[tuple[float, float], int]:
    counts: dict[tuple[float, float], int] = {}
    for pair in zip(now.bounds, now.sigmas, strict=True):
        counts[pair] = counts.get(pair, 0) + 1
    return counts


def _paper_step(recipe: Recipe, setting: Setting, now: Round) -> list[Claim]:
    """The papers' own count: moments accountant with the global rate B*K/|D| and the printed sigma."""
    if recipe.mechanism != "gaussian" or recipe.paper == "fedveil":
        return []
    rate = min(1.0, setting.batch * setting.cohort / setting.examples)
    reasons = (
        ["steps of one client are not Poisson samples of all clients' data"] if setting.clients > 1 else []
    )
    if recipe.clip.kind == "layer":
        reasons.append(f"sigma is not divided by the square root of the {setting.layers} layers")
    if recipe.sensitivity == "l2-max":
        reasons.append("the noise scale depends on the data")
    if recipe.sampling != "poisson":
        reasons.append("batches are not Poisson samples")
    reason = "as the papers count it; " + "; ".join(reasons) if reasons else "as the papers count it"
    out = []
    for sigma, count in _runs(now.sigmas).items():
        event = Event(
            Noise("gaussian", sigma), Sampling("poisson", rate=rate), "add-remove", "example", count
        )
        out.append(Claim("server", "example", "nominal", reason, event, "everyone", "moments"))
        if setting.clients > 1:
            same = "the papers give the example's epsilon to the whole client (joint DP); that changes who sees, not the unit"
            as_client = Event(event.noise, event.sampling, "add-remove", "client", count)
            out.append(Claim("server", "client", "nominal", same, as_client, "everyone", "moments"))
    return out


def _client(recipe: Recipe, setting: Setting, now: Round, size: int) -> list[Claim]:
    if recipe.mechanism == "two-valued":
        return _two_valued(recipe, setting, now)
    out = [_none("client-process", unit, RAW_GRADIENTS) for unit in ("example", "client")]
    if recipe.clip.kind == "none":
        return out + [
            _none(o, u, "noise without a clip: the update is unbounded")
            for o in AFTER_UPLOAD
            for u in ("example", "client")
        ]
    z = (
        multiplier(recipe, setting, now.bounds[0], now.sigmas[0], size)
        if recipe.noise_on == "sum"
        else _over_bound(recipe, setting, now.sigmas[0] * now.bounds[0], now.bounds[0])
    )
    whole = recipe.clip.of == "weights"  # two models in the ball may be twice the bound apart
    why = f"each upload is {'a model that is ' if whole else ''}clipped and noised by its client" + _on_grid(
        recipe
    )
    for observer in AFTER_UPLOAD:
        out += _both_units(
            observer, z, Sampling("none"), "replace-one" if whole else "zero-out", why, "holder"
        )
    if recipe.name == "nbafl":
        printed = now.sigmas[0] * size / 2  # over the printed sensitivity 2C/|D_i|
        paper = Event(Noise("gaussian", printed), Sampling("none"), "replace-one", "example", 1)
        out.append(
            Claim(
                "server",
                "example",
                "nominal",
                "as printed: 2C/|D_i| is not the sensitivity of several SGD steps",
                paper,
                "holder",
                "moments",
            )
        )
    else:
        out += _paper_rounds(recipe, setting, now)
    return out


def _both_units(
    observer: Observer, z: float, sampling: Sampling, relation: Relation, why: str, scope: Scope
) -> list[Claim]:
    """Client level with the bound; example level with twice the bound and replace-one neighbours: one example can
    move an update from anywhere in the ball to anywhere else."""
    divide = 2.0 if relation == "replace-one" else 1.0
    client = Event(Noise("gaussian", z / divide), sampling, relation, "client", 1)
    example = Event(Noise("gaussian", z / 2), sampling, "replace-one", "example", 1)
    turned = why + "; one example may turn the clipped update around"
    return [
        Claim(observer, "client", "sound", why, client, scope),
        Claim(observer, "example", "sound", turned, example, scope),
    ]


def _server(recipe: Recipe, setting: Setting, now: Round, size: int) -> list[Claim]:
    out = [_none("client-process", unit, RAW_GRADIENTS) for unit in ("example", "client")]
    out += [
        _none("server", unit, "the server receives each update before any noise")
        for unit in ("example", "client")
    ]
    z = multiplier(recipe, setting, now.bounds[0], now.sigmas[0], size)
    sampling, relation = _cohort_sampling(recipe, setting)
    if recipe.noise_on == "example" and recipe.cohort == "poisson":
        reason = "noise per client with a random cohort: the total variance tells how many took part"
        out += [_none(o, u, reason) for o in ("participants", "public") for u in ("example", "client")]
    else:
        why = "noise once on the sum of clipped updates; the cohort is secret" + _on_grid(recipe)
        for observer in ("participants", "public"):
            both = _both_units(observer, z, sampling, relation, why, "everyone")
            out += both if setting.copies == 1 else [both[0], _none(observer, "example", SHARED)]
    return out + _paper_rounds(recipe, setting, now)


def _cohort_sampling(recipe: Recipe, setting: Setting) -> tuple[Sampling, Relation]:
    rate = min(1.0, setting.cohort / setting.clients)
    if recipe.cohort == "all" or rate >= 1:
        return Sampling("none"), "zero-out"
    if recipe.cohort == "poisson":
        return Sampling("poisson", rate=rate), "zero-out"
    return Sampling(
        "fixed", rate=rate, batch=round(setting.cohort), population=setting.clients
    ), "replace-one"


def _paper_rounds(recipe: Recipe, setting: Setting, now: Round) -> list[Claim]:
    """Fed-SDP as printed: moments accountant, q = K/N, one step per round, the printed sigma."""
    if recipe.paper == "fedveil":
        return []
    rate = min(1.0, setting.cohort / setting.clients)
    event = Event(Noise("gaussian", now.sigmas[0]), Sampling("poisson", rate=rate), "add-remove", "client", 1)
    reason = "as the papers count it: whoever sees single updates gets no amplification by client sampling"
    if recipe.clip.kind == "layer":
        reason += f"; sigma is not divided by the square root of the {setting.layers} layers"
    return [Claim("server", "client", "nominal", reason, event, "everyone", "moments")]


def _sum(recipe: Recipe, setting: Setting, now: Round, size: int) -> list[Claim]:
    """Only the noised sum over all clients exists outside the clients. Setting.steps is 1."""
    sampling, relation, divide, uses = _batch_sampling(recipe, setting, size)
    z = multiplier(recipe, setting, now.bounds[0], now.sigmas[0], size)
    out = [_none("client-process", unit, RAW_GRADIENTS) for unit in ("example", "client")]
    for observer in AFTER_UPLOAD:
        if recipe.noise_on == "example" or setting.copies > 1:
            counted = "noise per example on a sum of random size: the variance tells the count"
            out.append(_none(observer, "example", counted if recipe.noise_on == "example" else SHARED))
            out.append(_none(observer, "client", NO_CLIENT_LEVEL))
        else:
            event = Event(_noise(recipe, z / divide, setting.dimension), sampling, relation, "example", uses)
            why = "noise once on the sum over all clients, of which nobody sees a part (trusted or secure aggregation)"
            out.append(Claim(observer, "example", "sound", why + _on_grid(recipe), event))
            out.append(_by_group(observer))
    return out


def _two_valued(recipe: Recipe, setting: Setting, now: Round) -> list[Claim]:
    """LDP-FL: each reported weight is epsilon-LDP; a client reports `dimension` weights every round."""
    epsilon = now.epsilon or recipe.epsilon or 0.0
    one = Noise("two-valued", 1 / epsilon, norm="l1")
    many = replace(one, dimension=setting.dimension)
    arrived = now.arrived or round(setting.cohort)
    hidden = recipe.channel == "shuffle-parameters"
    alone = "each single reported weight"
    if hidden:
        alone = f"one weight among the reports of {arrived} clients (exact binary shuffling; the shuffler must be honest)"
    mixed = Sampling("none", population=arrived) if hidden else Sampling("none")
    weight = Event(one, mixed, "replace-one", "reported-weight", 1)
    moved = f"all {setting.dimension} weights of a client move together, in every round it takes part in"
    units: tuple[Unit, ...] = ("client", "example")
    out = [_none("client-process", unit, RAW_GRADIENTS) for unit in units]
    for observer in AFTER_UPLOAD:
        by = "shuffle" if hidden else "basic"
        out.append(Claim(observer, "reported-weight", "sound", alone, weight, "single", by))
        for unit in units:
            event = Event(many, Sampling("none"), "replace-one", unit, 1)
            out.append(Claim(observer, unit, "sound", moved, event, accountant="basic"))
    linked = "; unlinkability does not stop composition"
    papers: dict[str, tuple[str, Noise, Scope]] = {
        "none": ("as the paper counts it without shuffling", many, "holder"),
        "shuffle-models": (
            "the paper lets rounds not add up when models are shuffled" + linked,
            many,
            "single",
        ),
        "shuffle-parameters": ("the paper lets neither weights nor rounds add up" + linked, one, "single"),
    }
    reason, noise, scope = papers[recipe.channel]
    paper = Event(noise, Sampling("none"), "replace-one", "client", 1)
    out.append(Claim("server", "client", "nominal", reason, paper, scope, "basic"))
    return out
