"""The named recipes: every system of the papers, our sound siblings, and the baselines. A few lines each."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from typing import Any

from fedveil.errors import UserError, did_you_mean
from fedveil.privacy.schedules import parse
from fedveil.protect.clip import SCALES, AdaClip, Clip, Median, Quantile, constant
from fedveil.protect.counts import LocalSteps, ReportedWeights, Rounds, WholeModel
from fedveil.protect.law import Gaussian, JointStaircase, Laplace, NoiseOn, Staircase
from fedveil.protect.nbafl import Nbafl
from fedveil.protect.place import AtClient, AtServer, InStep, InSum, Reports
from fedveil.protect.recipe import About, Recipe
from fedveil.protect.sampling import Everybody, FixedBatches, PoissonCohort
from fedveil.protect.upload import CHANNELS, Thin

L2_MAX = SCALES["l2-max"]


def _layer(bound: str | float = 4.0, **more: Any) -> Clip:
    return Clip(kind="layer", bound=parse(str(bound)), **more)


def _flat(bound: str | float = 1.0, **more: Any) -> Clip:
    return Clip(kind="flat", bound=parse(str(bound)), **more)


def _named(base: Recipe, name: str, summary: str, paper: str = "", family: str = "", **changes: Any) -> Recipe:
    about = About(summary, paper or base.about.paper, family or base.about.family)
    return replace(base, name=name, about=about, **changes)


def _client_updates() -> list[Recipe]:
    """Noise on whole updates (Fed-SDP), once or by every client."""
    fed_sdp = Recipe(
        "fed-sdp",
        clip=_layer(),
        law=Gaussian(),
        place=AtServer(),
        cohort=PoissonCohort(),
        counted=(Rounds(),),
        about=About("clipped client updates, noise once at the server", "P1, P3"),
    )
    at_client = Recipe(
        "fed-sdp-client",
        clip=_layer(),
        law=Gaussian(),
        place=AtClient(),
        counted=(Rounds(),),
        about=About("each client noises its clipped update before it leaves", "P1, P3"),
    )
    return [fed_sdp, at_client]


def _fed_cdp() -> Recipe:
    return Recipe(
        "fed-cdp",
        clip=_layer(),
        law=Gaussian(),
        place=InStep(),
        counted=(LocalSteps(),),
        about=About("noise on every local step, per example and layer", "P1, P3"),
    )


def _federated(fed_cdp: Recipe) -> list[Recipe]:
    """Noise in local training (Fed-CDP, Fed-alpha-CDP)."""
    decay = {
        "linear": "linear:15:4.85",
        "staircase": "staircase:15:4.85",
        "exponential": "exponential:15:4.85",
        "cyclic": "cosine-cyclic:15:4.85:floor=4.85",
    }
    alpha = _named(fed_cdp, "fed-alpha-cdp", "Fed-CDP with l2-max sensitivity", "P3", scale=L2_MAX)
    return [
        fed_cdp,
        _named(fed_cdp, "fed-cdp-decay", "Fed-CDP with a clip bound that decays", clip=_layer("linear:6:2")),
        alpha,
        *(
            _named(alpha, f"fed-alpha-cdp-sigma-{kind}", f"Fed-alpha-CDP with {kind} sigma decay", sigma=parse(text))
            for kind, text in decay.items()
        ),
    ]


def _central(fed_cdp: Recipe) -> list[Recipe]:
    """The same in one place (DP-dyn family)."""
    base = _named(
        fed_cdp, "dp-baseline", "central DP-SGD with per-layer clipping", "P2", "central", cohort=Everybody()
    )
    half, down = _layer("linear:4:2"), parse("linear:15:4.85")
    return [
        base,
        _named(base, "dp-dyns-c-decay", "central, decaying clip bound", clip=half),
        _named(base, "dp-dyns-l2max", "central, l2-max sensitivity", scale=L2_MAX),
        _named(base, "dp-dyns", "central, decaying bound and l2-max", clip=half, scale=L2_MAX),
        _named(base, "dp-dynsigma", "central, decaying sigma", sigma=down),
        _named(base, "dp-dyn-s-c-decay-sigma", "central, decaying bound and sigma", clip=half, sigma=down),
        _named(base, "dp-dyn-s-l2max-sigma", "central, l2-max and decaying sigma", scale=L2_MAX, sigma=down),
        _named(
            base, "dp-dyn-s-sigma", "central, decaying bound, l2-max, decaying sigma",
            clip=half, scale=L2_MAX, sigma=down,
        ),
    ]  # fmt: skip


def _adaptive(fed_cdp: Recipe) -> list[Recipe]:
    """Bounds that follow the gradients, and methods that are no differential privacy."""
    plain = Recipe("non-private", about=About("plain federated averaging", "P1", "baseline"))
    return [
        _named(
            fed_cdp, "quantile-clip", "bound tracks the median norm by noised counts (Andrew et al.)", "P2, P3",
            clip=_layer(4.0, rule=Quantile()),
        ),
        _named(
            fed_cdp, "adaclip", "per-coordinate shift and scale from noised gradients (Pichapati et al.)", "P2, P3",
            clip=_flat(4.0, rule=AdaClip()),
        ),
        _named(
            fed_cdp, "median-clip", "bound is the batch's own median norm", "P1", clip=_layer(4.0, rule=Median())
        ),
        Recipe(
            "random-noise", law=Gaussian(), place=AtClient(unbounded=True), sigma=constant(0.1),  # variance 0.01
            about=About("fixed-variance noise on each update, no clip", "P3", "baseline"),
        ),
        _named(
            plain, "gradient-pruning", "drop the smallest coordinates of each update", "P1, P3", thin=Thin(prune=0.3)
        ),
        _named(
            plain, "dssgd", "share a random subset of the large coordinates", "P3",
            thin=Thin(share=0.1, share_threshold=0.001),
        ),
    ]  # fmt: skip


def _readings(fed_cdp: Recipe) -> list[Recipe]:
    """What the papers' texts may also mean, and what is sound."""
    tracked = Quantile(quantile=0.9, quantile_rate=0.3, count_noise=5.0)
    return [
        _named(
            fed_cdp, "fed-cdp-pruned", "Fed-CDP, small coordinates dropped before upload", "P1", thin=Thin(prune=0.3)
        ),
        _named(
            fed_cdp, "fed-cdp-example", "Fed-CDP with noise on every example (P1 Alg. 2)",
            noise_on=NoiseOn("example"), batches=FixedBatches(),
        ),
        _named(
            fed_cdp, "fed-cdp-mean", "Fed-CDP with noise on the mean (P3 Alg. 1 as printed)", "P3",
            noise_on=NoiseOn("mean"),
        ),
        _named(
            fed_cdp, "fed-cdp-sound", "Fed-CDP with flat clipping and Poisson batches", "fedveil",
            clip=_flat(1.0), counted=(),
        ),
        _named(
            fed_cdp, "fed-alpha-cdp-sound",
            "noise follows the gradient norms, by a noised high quantile from earlier rounds", "fedveil",
            clip=_flat(4.0, rule=tracked), counted=(),
        ),
        Recipe(
            "sum-cdp", clip=_flat(1.0), law=Gaussian(), place=InSum(), cohort=Everybody(),
            about=About("clipped per-example gradients summed over all clients, noise once on the sum", "fedveil"),
        ),
    ]  # fmt: skip


def _others(fed_cdp: Recipe) -> list[Recipe]:
    """LDP-FL, UDP-FL and their baselines."""
    udp = _named(
        fed_cdp, "udp-fl-gaussian", "UDP-FL with Gaussian noise", "P5", clip=_flat(1.0), epsilon=4.0
    )
    ball = _flat(1.0, norm="l1")
    return [
        Recipe(
            "ldp-fl", place=Reports(), epsilon=1.0, channel=CHANNELS["shuffle-parameters"],
            counted=(ReportedWeights(),),
            about=About("two-valued reports of whole weights, parameters shuffled", "P4", "local"),
        ),
        udp,
        _named(
            udp, "udp-fl-laplace", "UDP-FL with Laplace noise (L2 clip; clip.norm = l1 gives a pure epsilon per step)",
            law=Laplace(),
        ),
        _named(
            udp, "udp-fl-staircase", "UDP-FL with i.i.d. Staircase noise in narrow steps", law=Staircase(width=0.0)
        ),
        _named(udp, "udp-fl-staircase-joint", "UDP-FL with the joint L1 Staircase", clip=ball, law=JointStaircase()),
        _named(
            udp, "udp-fl-staircase-iid",
            "UDP-FL with i.i.d. Staircase noise in steps as wide as the bound, as printed", law=Staircase(),
        ),
        Recipe(
            "nbafl", clip=_flat(10.0, of="weights"), law=Gaussian(), place=AtClient(), formula=Nbafl(),
            counted=(WholeModel(),),
            about=About("models clipped and noised on the uplink, broadcast noised on the downlink", "P5", "baseline"),
        ),
        Recipe(
            "dp-fedavg", clip=_flat(1.0), law=Gaussian(), place=AtServer(), cohort=PoissonCohort(),
            sigma=constant(1.0), counted=(Rounds(),),
            about=About("clipped client updates, noise once at the server, Poisson cohorts", "P5"),
        ),
    ]  # fmt: skip


ALIASES = {
    "fed-alpha-cdp-sigma": "fed-alpha-cdp-sigma-exponential",
    "udp-fl": "udp-fl-gaussian",
    "fed-sdp-server": "fed-sdp",
}


@cache
def catalogue() -> dict[str, Recipe]:
    """All named recipes, in the order in which they are listed."""
    fed_cdp = _fed_cdp()
    plain = Recipe("non-private", about=About("plain federated averaging", "P1", "baseline"))
    items = [
        plain,
        *_client_updates(),
        *_federated(fed_cdp),
        *_central(fed_cdp),
        *_adaptive(fed_cdp),
        *_readings(fed_cdp),
        *_others(fed_cdp),
    ]
    return {r.name: r for r in items}


def named_code(name: str) -> bool:
    """Does a name stand for a value of the user's own package (my_package.module:my_recipe)?"""
    module, sign, value = name.partition(":")
    return bool(sign) and value.isidentifier() and all(part.isidentifier() for part in module.split("."))


def own(name: str) -> Recipe:
    """The recipe that `my_package.module:my_recipe` names: imports that module, so only for names the user trusts."""
    module, _, value = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), value)
    except Exception as wrong:  # the user's own code may fail in any way
        raise UserError(
            f"recipe '{name}': {type(wrong).__name__}: {wrong}. Is the package installed, or its folder in PYTHONPATH?"
        ) from None
    if not isinstance(found, Recipe):
        raise UserError(f"recipe '{name}' is a {type(found).__name__}, not a fedveil.Recipe")
    return found


def get(name: str) -> Recipe:
    """A recipe by name (or alias)."""
    known = catalogue()
    found = known.get(ALIASES.get(name, name))
    if found is None:
        raise UserError(
            f"unknown recipe '{name}'.{did_you_mean(name, [*known, *ALIASES])} `fedveil recipes` lists them all."
        )
    return found
