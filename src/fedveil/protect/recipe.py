"""A protection recipe: one frozen value built from parts that each know their own behaviour.

A recipe says what is clipped, which noise goes where, how batches and cohorts are drawn, and how uploads travel and are
merged. Engines and servers act through these parts; what each observer may conclude is read from the same parts in
`protect.promise`. Parts of your own are as good as ours: build a `Recipe` from them and run it.

Configurations spell a recipe as flat keys (`spell`, `with_changes`); only this file turns words into parts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fedveil.errors import UserError, did_you_mean
from fedveil.jsons import Json
from fedveil.privacy.schedules import Schedule, parse
from fedveil.protect import aggregate as rules
from fedveil.protect.clip import RULES, SCALES, Clip, Quantile, Rule, Scale, constant
from fedveil.protect.counts import PaperCount
from fedveil.protect.law import LAWS, NOISE_ON, Law, NoiseOn, Staircase
from fedveil.protect.nbafl import Formula, Nbafl
from fedveil.protect.place import PLACES, AtClient, Nowhere, Place, Reports
from fedveil.protect.sampling import BATCHES, COHORTS, Batches, Cohort, FixedCohort, PoissonBatches
from fedveil.protect.upload import CHANNELS, Channel, RangeRule, Thin


@dataclass(frozen=True)
class About:
    """Words for people; nothing is derived from them."""

    summary: str = ""
    paper: str = ""
    family: str = "federated"  # federated, central, local or baseline

    @property
    def central(self) -> bool:
        """Is it about one holder of all data? Its configuration then starts from other defaults."""
        return self.family == "central"


@dataclass(frozen=True)
class Recipe:
    """One protection system.

    sigma: noise multiplier over time; what it is a multiple of is said by `scale` (the clip bound, or l2-max), what it
    refers to by `noise_on`. Without a clip it is the absolute deviation. For Laplace b/C, for Staircase 1/lambda.
    grid: spacing of the exact noise as a fraction of the clip bound; None: the law's own where the scale is public.
    epsilon: of one reported weight (LDP-FL), or what a `formula` of the method's own turns into noise (NbAFL).
    counted: how the papers count it, beside what holds. heterogeneity: clients are pulled towards the model of the one
    with the weakest budget (UDP-FL). downlink_sigma: noise on the broadcast model, over the clip bound (NbAFL).
    """

    name: str
    clip: Clip = Clip()
    law: Law | None = None
    place: Place = Nowhere()
    sigma: Schedule = field(default_factory=lambda: constant(6.0))
    scale: Scale = Scale()
    noise_on: NoiseOn = NoiseOn()
    grid: float | None = None
    batches: Batches = PoissonBatches()
    cohort: Cohort = FixedCohort()
    channel: Channel = Channel()
    aggregate: rules.Aggregator = rules.Mean()
    thin: Thin = Thin()
    proximal: float = 0.0
    epsilon: float | None = None
    ranges: RangeRule = RangeRule()
    formula: Formula | None = None
    downlink_sigma: float = 0.0
    heterogeneity: bool = False
    counted: tuple[PaperCount, ...] = ()
    about: About = About()

    def __post_init__(self) -> None:
        reason = refusal(self)
        if reason:
            raise UserError(f"recipe '{self.name}': {reason}")

    @property
    def private(self) -> bool:
        """Whether any noise is added at all."""
        return self.place.private

    @property
    def fineness(self) -> float:
        """The grid that is used, as a fraction of the clip bound; 0 for float noise."""
        if self.grid is not None:
            return self.grid
        public = self.clip.bounded and not (self.scale.batch or self.clip.rule.batch)
        return self.law.grid if self.law is not None and public else 0.0

    def spacing_at(self, bound: float, sigma: float) -> float:
        """The grid's spacing for one bound and noise multiplier; the default one is finer for narrow noise."""
        step = self.fineness * bound
        if self.grid is None and 0 < sigma < COMFORTABLE * self.fineness:
            step *= 2.0 ** -math.ceil(math.log2(COMFORTABLE * self.fineness / sigma))
        return step


def refusal(recipe: Recipe) -> str:
    """Why parts cannot work together, or "": each part is asked in turn, then what concerns several."""
    r = recipe
    found = [
        _place_and_law(r),
        _clocks(r),
        r.place.refusal(r),
        r.clip.refusal(),
        r.noise_on.refusal(r.law),
        _reports(r),
        _single_uploads(r),
        _steps(r),
        "" if r.law is None else r.law.refusal(r),
        _grid(r),
        r.thin.refusal(),
    ]
    return next((reason for reason in found if reason), "")


def _place_and_law(r: Recipe) -> str:
    reports = isinstance(r.place, Reports)
    if r.private != (r.law is not None or reports):
        return "a mechanism needs a place (where = step, client, server or sum), and a place needs a mechanism"
    if r.clip.of_weights and not (isinstance(r.place, AtClient) and r.clip.flat):
        return "clip.of = weights bounds an upload as a whole model: target = update, where = client, clip.kind = flat"
    unbounded_is_the_method = isinstance(r.place, AtClient) and r.place.unbounded
    if r.law is not None and not r.clip.bounded and not unbounded_is_the_method:
        return "noise without a clip protects nothing: set clip.kind = flat or layer"
    return ""


def _clocks(r: Recipe) -> str:
    if r.sigma.kind == "learning-rate":
        return (
            f"sigma = {as_text(r.sigma)}: only a clip bound can follow the learning rate (clip.bound = learning-rate:…); give "
            "sigma's own values, e.g. linear:6:2"
        )
    return ""


def _reports(r: Recipe) -> str:
    if r.channel.hides_reports and not isinstance(r.place, Reports):
        return "parameter shuffling sends one bit per weight: it needs mechanism = two-valued"
    if r.channel.hides_senders and (r.aggregate.knows_senders or r.heterogeneity):
        return "channel = shuffle-models hides who sent an update, which SCAFFOLD and heterogeneity must know"
    return ""


def _single_uploads(r: Recipe) -> str:
    where = r.place.name
    if not r.place.open_uploads and r.aggregate.looks_inside:
        return f"aggregate = {r.aggregate.name} looks at single uploads, which carry no noise with where = {where}"
    if not r.place.open_uploads and r.heterogeneity:
        return f"heterogeneity broadcasts one client's model, which carries no noise with where = {where}"
    if r.place.sum_only and r.thin.anything:
        return (
            "which coordinates are dropped depends on the sum before noise: prune and share need where = step or client"
        )
    return ""


def _steps(r: Recipe) -> str:
    rule = r.clip.rule
    if rule.beside() and not (r.law is not None and r.law.adds_up):
        return "the noised count of the quantile rule is accounted jointly with Gaussian noise only"
    if r.scale.batch and not r.place.in_steps:
        return f"{r.scale.name} is the largest norm of a batch: it exists only for where = step"
    if rule.in_steps and not r.place.in_steps:
        return f"clip.rule = {rule.name} follows the gradients of local steps: where must be step"
    if rule.rescales and (r.proximal or r.heterogeneity):
        return (
            f"clip.rule = {rule.name} reads gradients, and the noise's share in them, off the updates, which plain steps only "
            "allow: set proximal = 0 and heterogeneity = false"
        )
    return ""


COARSEST = 1e-3
FINEST = 1e-12  # sums in steps of the grid stay far below 2**53, where float64 would round them again
NARROWEST = 10.0  # grid steps in one standard deviation
COMFORTABLE = 2.0**10  # as many or more where nobody chose the grid


def _grid(r: Recipe) -> str:
    if not r.grid:
        return ""
    if not FINEST <= r.grid <= COARSEST:
        return (
            f"grid = {r.grid:g} is the grid's spacing as a fraction of the clip bound: {FINEST:g} to {COARSEST:g}; "
            "1e-6 costs next to nothing"
        )
    if r.law is None or not r.law.grid:
        said = "none" if r.law is None else r.law.name
        return f"grid: there is no exact form of {said} noise here; leave grid out"
    if not r.clip.bounded:
        return "grid is a fraction of the clip bound: set clip.kind = flat or layer"
    if r.scale.batch or r.clip.rule.batch:
        return "grid needs a noise scale that does not come from the batch: set sensitivity = bound and another clip.rule"
    return ""


def spacing(recipe: Recipe, bounds: Sequence[float], sigmas: Sequence[float]) -> float:
    """The grid's spacing in a round with these bounds and noise multipliers (one per step); 0 without a grid.

    It follows the smallest bound, so that in every step it is at most `grid` times the step's bound.
    """
    if not recipe.fineness:
        return 0.0
    step = min(recipe.spacing_at(bound, sigma) for sigma, bound in zip(sigmas, bounds, strict=True))
    narrowest = min(sigma * bound for sigma, bound in zip(sigmas, bounds, strict=True))
    if narrowest < NARROWEST * step:
        raise UserError(
            f"grid = {recipe.fineness:g}: the noise has a deviation of only {narrowest / step:.3g} grid steps, at least "
            f"{NARROWEST:g} are needed; set grid = {narrowest / step * recipe.fineness / NARROWEST:.2g} or less, or more noise"
        )
    return step


# -- words

WORDS: dict[str, tuple[str, ...]] = {
    "family": ("federated", "central", "local", "baseline"),
    "target": ("gradient", "update", "weights"),
    "clip.kind": ("none", "layer", "flat"),
    "clip.norm": ("l1", "l2"),
    "clip.of": ("update", "weights"),
    "clip.rule": tuple(RULES),
    "sensitivity": tuple(SCALES),
    "mechanism": ("none", *LAWS, "two-valued"),
    "where": tuple(PLACES),
    "noise_on": tuple(NOISE_ON),
    "sampling": tuple(BATCHES),
    "cohort": tuple(COHORTS),
    "channel": tuple(CHANNELS),
    "aggregate": tuple(rules.RULES),
    "ranges": ("fixed", "adaptive", "client"),
    "prior": ("radius", "model"),
    "adapt": ("extremes", "spread"),
}
SCHEDULES = ("sigma", "clip.bound")
SWITCHES = ("clip.split", "heterogeneity", "unbounded")
NUMBERS = (
    "clip.quantile", "clip.quantile_rate", "clip.count_noise", "proximal", "prune", "share", "share_threshold", "radius",
    "exposures", "downlink_sigma",
)  # fmt: skip
OPTIONAL = ("epsilon", "grid", "nu", "width")
TEXTS = ("name", "summary", "paper")
KEYS: tuple[str, ...] = (*TEXTS, *WORDS, *SCHEDULES, *SWITCHES, *NUMBERS, *OPTIONAL)


Part = TypeVar("Part")


def spell(recipe: Recipe) -> dict[str, Any]:
    """The recipe as flat keys; a part that is not ours stands there as itself."""
    r, clip, rule = recipe, recipe.clip, recipe.clip.rule
    quantile = rule if isinstance(rule, Quantile) else Quantile()
    reports = isinstance(r.place, Reports)
    return {
        "name": r.name,
        "summary": r.about.summary,
        "paper": r.about.paper,
        "family": r.about.family,
        "target": r.place.target,
        "clip.kind": clip.kind,
        "clip.bound": clip.bound,
        "clip.norm": clip.norm,
        "clip.rule": _word(RULES, rule),
        "clip.split": clip.split,
        "clip.of": clip.of,
        "clip.quantile": quantile.quantile,
        "clip.quantile_rate": quantile.quantile_rate,
        "clip.count_noise": quantile.count_noise,
        "sensitivity": _word(SCALES, r.scale),
        "mechanism": "two-valued" if reports else "none" if r.law is None else _word(LAWS, r.law),
        "nu": getattr(r.law, "nu", None),
        "width": getattr(r.law, "width", None),
        "sigma": r.sigma,
        "where": "client" if reports else _word(PLACES, r.place),
        "unbounded": isinstance(r.place, AtClient) and r.place.unbounded,
        "noise_on": r.noise_on.name,
        "grid": r.grid,
        "sampling": _word(BATCHES, r.batches),
        "cohort": _word(COHORTS, r.cohort),
        "channel": _word(CHANNELS, r.channel),
        "aggregate": _word(rules.RULES, r.aggregate),
        "proximal": r.proximal,
        "prune": r.thin.prune,
        "share": r.thin.share,
        "share_threshold": r.thin.share_threshold,
        "epsilon": r.epsilon,
        "ranges": r.ranges.kind,
        "radius": r.ranges.radius,
        "prior": r.ranges.prior,
        "adapt": r.ranges.adapt,
        "exposures": 0.0 if r.formula is None else r.formula.exposures,
        "downlink_sigma": r.downlink_sigma,
        "heterogeneity": r.heterogeneity,
    }


def _word(known: Mapping[str, Part], part: Part) -> str | Part:
    """The word for a part of ours (its own numbers have keys of their own), else the part."""
    name = str(part.name)  # type: ignore[attr-defined]  # every part has one
    return name if type(known.get(name)) is type(part) else part


def with_changes(recipe: Recipe, changes: Mapping[str, object]) -> Recipe:
    """A copy with keys replaced: {"clip.bound": 1.0, "sigma": "linear:15:4.85", "where": my_place}.

    A schedule may be given as a number or as text, a part as its word or as itself. Unknown keys are an error with the
    nearest known one.
    """
    flat: dict[str, object] = {}
    for key, value in changes.items():
        if key == "clip" and isinstance(value, Mapping):
            flat.update({f"clip.{own}": given for own, given in value.items()})
        else:
            flat[key] = value
    given = {key: _typed(key, value) for key, value in flat.items()}
    return _built(recipe, {**spell(recipe), **given}, set(given))


def _typed(key: str, value: object) -> object:
    where = f"recipe.{key}"
    if key not in KEYS:
        head, _, tail = key.rpartition(".")
        near = [k.split(".", 1)[1] for k in KEYS if k.startswith("clip.")] if head == "clip" else KEYS
        raise UserError(f"unknown key '{where}'.{did_you_mean(tail if head == 'clip' else key, near)}")
    try:
        if key in SCHEDULES:
            return value if isinstance(value, Schedule) else parse(str(value))
        if key in SWITCHES and not isinstance(value, bool):
            raise ValueError("expected true or false")
        if key in NUMBERS or (key in OPTIONAL and value is not None):
            return float(value)  # type: ignore[arg-type]  # TypeError where it is none
        if key in WORDS and isinstance(value, str) and value not in WORDS[key]:
            raise ValueError(f"expected one of {', '.join(WORDS[key])}.{did_you_mean(value, WORDS[key])}")
        if key in WORDS and not isinstance(value, str) and not hasattr(value, "name"):
            raise ValueError(f"expected one of {', '.join(WORDS[key])}, or a part of your own")
    except UserError as wrong:
        raise UserError(f"{key} = {value}: {wrong}") from None
    except (TypeError, ValueError, OverflowError) as wrong:
        raise UserError(f"{where} = {value!r}: {wrong}") from None
    return value


def _part(known: Mapping[str, Part], value: str | Part) -> Part:
    return known[value] if isinstance(value, str) else value


def _built(base: Recipe, keys: Mapping[str, Any], given: set[str]) -> Recipe:
    """The recipe that the keys spell; what no key speaks of is the base's."""
    place = _place(base, keys)
    law = None if keys["mechanism"] in ("none", "two-valued") else _part(LAWS, keys["mechanism"])
    shape = {key: keys[key] for key in ("nu", "width") if keys[key] is not None}
    if isinstance(law, Staircase):
        law = replace(law, **{**shape, "nu": keys["nu"]})
    elif shape and shape != {"width": 1.0} and given & set(shape):
        raise UserError(f"recipe '{base.name}': nu and width are shapes of Staircase noise, not of {keys['mechanism']}")
    rule: Rule = _part(RULES, keys["clip.rule"])
    if isinstance(rule, Quantile):
        rule = replace(
            rule, quantile=keys["clip.quantile"], quantile_rate=keys["clip.quantile_rate"],
            count_noise=keys["clip.count_noise"],
        )  # fmt: skip
    formula = replace(base.formula, exposures=keys["exposures"]) if isinstance(base.formula, Nbafl) else base.formula
    return replace(
        base,
        name=str(keys["name"]),
        about=About(keys["summary"], keys["paper"], keys["family"]),
        clip=replace(
            base.clip, kind=keys["clip.kind"], bound=keys["clip.bound"], norm=keys["clip.norm"], rule=rule,
            split=keys["clip.split"], of=keys["clip.of"],
        ),
        law=law,
        place=place,
        sigma=keys["sigma"],
        scale=_part(SCALES, keys["sensitivity"]),
        noise_on=_part(NOISE_ON, keys["noise_on"]),
        grid=keys["grid"],
        batches=_part(BATCHES, keys["sampling"]),
        cohort=_part(COHORTS, keys["cohort"]),
        channel=_part(CHANNELS, keys["channel"]),
        aggregate=_part(rules.RULES, keys["aggregate"]),
        thin=Thin(keys["prune"], keys["share"], keys["share_threshold"]),
        proximal=keys["proximal"],
        epsilon=keys["epsilon"],
        ranges=RangeRule(keys["ranges"], keys["radius"], keys["prior"], keys["adapt"]),
        formula=formula,
        downlink_sigma=keys["downlink_sigma"],
        heterogeneity=keys["heterogeneity"],
    )  # fmt: skip


def _place(base: Recipe, keys: Mapping[str, Any]) -> Place:
    """The place that `where`, `mechanism` and `target` name together."""

    def refuse(reason: str) -> None:
        raise UserError(f"recipe '{base.name}': {reason}")

    where, target = keys["where"], keys["target"]
    if keys["mechanism"] == "two-valued":
        if (where, target) != ("client", "weights"):
            refuse("the two-valued randomiser reports weights at the client: target = weights, where = client")
        return Reports()
    place: Place = _part(PLACES, where)
    if isinstance(place, AtClient):
        place = replace(place, unbounded=keys["unbounded"])
    if target == "weights" and place.private:
        refuse("noise on whole weights has no bounded sensitivity here; protect gradients or updates")
    if place.private and target != place.target:
        units = "examples" if place.of_gradients else "updates"
        refuse(f"where = {place.name} protects {units}: target must be {place.target}")
    return place


def digest(recipe: Recipe) -> str:
    """Hash of every value of a recipe and, for parts from outside this package, of all files of their packages: two
    recipes with one digest do the same, as far as those files decide."""
    hashed = hashlib.sha256(json.dumps(_plain(recipe), sort_keys=True).encode())
    for name in sorted(foreign_packages(recipe)):
        hashed.update(f"{name} {files_digest(name)}".encode())
    return hashed.hexdigest()


def foreign_packages(value: object) -> set[str]:
    """The packages outside this one that a recipe's parts come from: those of their classes and of what these inherit."""
    found: set[str] = set()
    if not isinstance(value, (str, int, float, bool, tuple, list, type(None), Mapping)):
        known = value if _is_code(value) else type(value)
        line = getattr(known, "__mro__", (known,))
        found = {str(one.__module__).partition(".")[0] for one in line} - {"fedveil", "numpy", *sys.stdlib_module_names}
    return found.union(*(foreign_packages(part) for part in _values(value)))


def _values(part: object) -> list[object]:
    """What a part holds."""
    if isinstance(part, (tuple, list)):
        return list(part)
    if isinstance(part, Mapping):
        return list(part.values())
    return [] if _is_code(part) else list(getattr(part, "__dict__", {}).values())


def _is_code(value: object) -> bool:
    """A class or a function, not a part with values."""
    return isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__"))


CODE = (".py", ".so", ".pyd", ".pyc")  # what an import may run


def files_digest(package: str) -> str:
    """Hash of all files of a package (or of the one file of a module) that an import may run, without importing it; "" where
    there are none to read (a notebook)."""
    places, one = _places(package)
    files = [one] if one is not None else []
    for place in places:
        files += [file for file in place.rglob("*") if file.suffix in CODE and "__pycache__" not in file.parts]
    whole = hashlib.sha256()
    for file in sorted(files):
        base = next((place for place in places if file.is_relative_to(place)), file.parent)
        whole.update(f"{file.relative_to(base).as_posix()}\0".encode())
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest() if files else ""


def _places(package: str) -> tuple[list[Path], Path | None]:
    """The folders of a package, or the one file of a module."""
    loaded = sys.modules.get(package)
    try:
        spec = importlib.util.find_spec(package)
    except (ValueError, ImportError):  # a script has no specification
        spec = None
    if spec is not None and spec.submodule_search_locations:
        return [Path(place) for place in spec.submodule_search_locations], None
    origin = spec.origin if spec is not None else getattr(loaded, "__file__", None)
    return [], Path(origin) if origin and Path(origin).is_file() else None


def _plain(value: object) -> Json:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(own) for key, own in value.items()}
    if _is_code(value):
        return f"{value.__module__}.{value.__qualname__}"  # type: ignore[attr-defined]
    if is_dataclass(value):
        own = {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.name != "about"}
    else:
        own = {str(name): _plain(one) for name, one in sorted(getattr(value, "__dict__", {}).items())}
    return {"class": f"{type(value).__module__}.{type(value).__qualname__}", **own}


def as_text(schedule: Schedule) -> str:
    """The text that `parse` reads back to the same schedule."""
    parts = [schedule.kind, f"{schedule.first!r}"]
    if schedule.last is not None:
        parts.append(f"{schedule.last!r}")
    for name in ("rate", "every", "floor"):
        if getattr(schedule, name) is not None:
            parts.append(f"{name}={getattr(schedule, name)!r}")
    if schedule.kind.endswith("cyclic"):
        parts.append(f"cycles={schedule.cycles}")
    return ":".join(parts) + (":iteration" if schedule.by == "iteration" else "")
