"""Every protection recipe as one frozen value built from orthogonal parts; the catalogue is data.

A recipe says what is clipped, how sensitive the clipped thing is, which noise goes where, how batches and
cohorts are drawn, and how uploads travel and are merged. What each observer may conclude from a recipe is
derived from these same values in `protect.promise`; nothing is typed in a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from fedveil.errors import UserError, did_you_mean
from fedveil.privacy.schedules import Schedule, parse


def constant(value: float) -> Schedule:
    """A schedule that never moves."""
    return Schedule("constant", float(value))


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


ClipRule = Literal["given", "median", "quantile", "adaclip"]
Where = Literal["nowhere", "step", "client", "server", "sum"]
MechanismKind = Literal["none", "gaussian", "laplace", "staircase", "joint-staircase", "two-valued"]
Aggregation = Literal["mean", "scaffold", "fedmed", "momentum", "adam", "connectivity"]


@dataclass(frozen=True)
class Clip:
    """How the target is bounded.

    kind: "layer" bounds each layer on its own, so the joint bound is bound * sqrt(layers), unless
    `split` divides the bound among the layers first; "flat" bounds the whole vector.
    rule: "given" follows the schedule; "median" uses the batch's own median norm (not sound); "quantile"
    tracks a quantile of the norms from noised counts; "adaclip" shifts and scales each coordinate by
    statistics of noised gradients, then clips to 1.
    count_noise: standard deviation of the noise on each step's count of unclipped examples ("quantile").
    of: what an upload's bound is about: the update, or the whole model, start + update (NbAFL).
    """

    kind: Literal["none", "layer", "flat"] = "none"
    bound: Schedule = field(default_factory=lambda: constant(4.0))
    norm: Literal["l1", "l2"] = "l2"
    rule: ClipRule = "given"
    split: bool = False
    of: Literal["update", "weights"] = "update"
    quantile: float = 0.5
    quantile_rate: float = 0.2
    count_noise: float = 5.0


@dataclass(frozen=True)
class Recipe:
    """One protection system.

    target: what is protected: each example's gradient, the client's update, or its weights.
    where: "step" (in every local step), "client" (on the finished update), "server" (once, on the sum of
    clipped updates that the server received), "sum" (once, on a sum that nobody sees in parts: a trusted or
    secure aggregation), "nowhere".
    sigma: noise multiplier over time: noise scale = sigma * sensitivity. Without a clip (random noise
    addition) it is the absolute standard deviation. For Laplace b/C, for Staircase 1/lambda.
    noise_on: "sum" (usual), "example" (every example, or for where="server" every client, gets its own
    noise), "mean" (noise of that scale on the mean).
    width: step of i.i.d. Staircase noise over the clip bound; 0 is 1 / sqrt(dimension), where it costs about what Laplace does.
    sampling: how a client draws batches; cohort: how a round draws clients.
    grid: 0, or the spacing of the grid on which the Gaussian noise lives, as a fraction of the clip bound (1e-6): the
    sum is rounded to it and gets discrete Gaussian noise. The promise then covers the rounding of what is
    sent, at a slightly larger epsilon (`spacing`, `protect.noise.snapped_multiplier`).
    """

    name: str
    summary: str = ""
    paper: str = ""
    family: Literal["federated", "central", "local", "baseline"] = "federated"
    target: Literal["gradient", "update", "weights"] = "gradient"
    clip: Clip = Clip()
    sensitivity: Literal["bound", "l2-max"] = "bound"
    mechanism: MechanismKind = "none"
    sigma: Schedule = field(default_factory=lambda: constant(6.0))
    where: Where = "nowhere"
    noise_on: Literal["sum", "example", "mean"] = "sum"
    width: float = 1.0
    grid: float = 0.0
    sampling: Literal["poisson", "fixed", "partition", "full"] = "poisson"
    cohort: Literal["poisson", "fixed", "all"] = "fixed"
    channel: Literal["none", "shuffle-models", "shuffle-parameters"] = "none"
    aggregate: Aggregation = "mean"
    proximal: float = 0.0
    prune: float = 0.0  # fraction of an update's smallest coordinates that is dropped before upload
    share: float = 1.0  # DSSGD: fraction of the coordinates above `share_threshold` that is uploaded
    share_threshold: float = 0.0
    epsilon: float | None = None  # two-valued: per weight; NbAFL: sets its noise by its own formulas
    ranges: Literal["fixed", "adaptive", "client"] = "fixed"
    radius: float = 0.075
    # First ranges: `radius` in every layer, or each layer's interval in the (public) first model.
    prior: Literal["radius", "model"] = "radius"
    adapt: Literal["extremes", "spread"] = "extremes"  # how adaptive ranges follow the server's average
    exposures: float = 0.0  # NbAFL: how often a client's uploads are seen; 0: in every round it takes part
    downlink_sigma: float = 0.0  # NbAFL: noise on the broadcast model, over the clip bound
    heterogeneity: bool = False  # UDP-FL: pull towards the model of the client with the weakest budget

    def __post_init__(self) -> None:
        check(self)

    @property
    def private(self) -> bool:
        """Whether any noise is added at all."""
        return self.where != "nowhere"


def check(recipe: Recipe) -> None:
    """Refuse parts that cannot work together, with the reason."""

    def refuse(reason: str) -> None:
        raise UserError(f"recipe '{recipe.name}': {reason}")

    for item in fields(recipe):
        allowed = get_args(_HINTS(type(recipe))[item.name])
        value = getattr(recipe, item.name)
        if allowed and all(isinstance(a, str) for a in allowed) and value not in allowed:
            refuse(
                f"{item.name} = {value!r} is not one of {', '.join(allowed)}.{did_you_mean(value, allowed)}"
            )
    r, clip = recipe, recipe.clip
    if (r.where == "nowhere") != (r.mechanism == "none"):
        refuse(
            "a mechanism needs a place (where = step, client, server or sum), and a place needs a mechanism"
        )
    if r.target == "weights" and r.mechanism not in ("two-valued", "none"):
        refuse("noise on whole weights has no bounded sensitivity here; protect gradients or updates")
    if clip.of == "weights" and (r.target, r.where, clip.kind) != ("update", "client", "flat"):
        refuse(
            "clip.of = weights bounds an upload as a whole model: target = update, where = client, clip.kind = flat"
        )
    if r.mechanism == "two-valued":
        if r.target != "weights" or r.where != "client":
            refuse(
                "the two-valued randomiser reports weights at the client: target = weights, where = client"
            )
        if r.epsilon is None or not r.epsilon > 0:
            refuse("the two-valued randomiser needs epsilon > 0 (per weight)")
        if r.ranges == "client":
            refuse(
                "a range that a client computes from its own weights is visible in its reports exactly (the two "
                "output values are c ± r·K), so no epsilon holds; use ranges = fixed or adaptive"
            )
        if not r.radius > 0:
            refuse("radius must be above 0")
    elif r.channel == "shuffle-parameters":
        refuse("parameter shuffling sends one bit per weight: it needs mechanism = two-valued")
    elif r.channel == "shuffle-models" and (r.aggregate == "scaffold" or r.heterogeneity):
        refuse(
            "channel = shuffle-models hides who sent an update, which SCAFFOLD and heterogeneity must know"
        )
    if r.where in ("step", "sum") and r.target != "gradient":
        refuse(f"where = {r.where} protects examples: target must be gradient")
    if r.where in ("server", "client") and r.mechanism != "two-valued" and r.target != "update":
        refuse(f"where = {r.where} protects updates: target must be update")
    if r.where in ("server", "sum") and r.aggregate in ("fedmed", "scaffold", "connectivity"):
        refuse(
            f"aggregate = {r.aggregate} looks at single uploads, which carry no noise with where = {r.where}"
        )
    if r.where in ("server", "sum") and r.heterogeneity:
        refuse(f"heterogeneity broadcasts one client's model, which carries no noise with where = {r.where}")
    if r.where == "sum" and (r.prune > 0 or r.share < 1):
        refuse(
            "which coordinates are dropped depends on the sum before noise: prune and share need where = step or client"
        )
    if r.noise_on == "example" and r.mechanism not in ("gaussian", "none"):
        refuse("noise_on = example adds up independent draws: only Gaussian noise stays of its kind")
    if r.noise_on == "mean" and r.mechanism not in ("gaussian", "laplace", "none"):
        refuse(
            f"noise_on = mean scales the noise; {r.mechanism} noise keeps its epsilon when scaled: use noise_on = sum"
        )
    if clip.split and clip.norm == "l1":
        refuse("clip.split divides an L2 bound among the layers: set clip.norm = l2 or clip.kind = flat")
    if clip.rule == "quantile" and r.mechanism != "gaussian":
        refuse("the noised count of the quantile rule is accounted jointly with Gaussian noise only")
    if r.mechanism in ("gaussian", "laplace", "staircase", "joint-staircase"):
        unbounded_is_the_method = r.where == "client" and r.target == "update" and r.family == "baseline"
        if clip.kind == "none" and not unbounded_is_the_method:
            refuse("noise without a clip protects nothing: set clip.kind = flat or layer")
        if r.mechanism == "joint-staircase" and (clip.kind != "flat" or clip.norm != "l1"):
            refuse("the joint staircase needs clip.kind = flat and clip.norm = l1")
        if r.mechanism != "gaussian" and r.where not in ("step",):
            refuse(f"{r.mechanism} noise is offered in local training (where = step)")
    if clip.norm == "l1" and r.mechanism == "gaussian":
        refuse("Gaussian noise is calibrated to an L2 bound: set clip.norm = l2")
    if r.sensitivity == "l2-max" and r.where != "step":
        refuse("l2-max is the largest norm of a batch: it exists only for where = step")
    if clip.rule in ("adaclip", "quantile", "median") and r.where != "step":
        refuse(f"clip.rule = {clip.rule} follows the gradients of local steps: where must be step")
    if clip.rule == "adaclip" and clip.kind != "flat":
        refuse("AdaClip clips the whole scaled gradient to 1: set clip.kind = flat")
    if clip.rule == "quantile" and not (0 < clip.quantile < 1 and clip.count_noise > 0):
        refuse("quantile clipping needs 0 < clip.quantile < 1 and clip.count_noise > 0")
    if r.grid:
        _check_grid(r, refuse)
    narrow_allowed = (r.mechanism, clip.kind, clip.norm) == (
        "staircase",
        "flat",
        "l2",
    ) and r.sampling != "fixed"
    if r.width != 1 and not (narrow_allowed and 0 <= r.width < float("inf")):
        refuse(
            f"width = {r.width} is the step of i.i.d. Staircase noise under a flat L2 clip (not with sampling = fixed), 0 or "
            "more; leave it at 1 elsewhere"
        )
    if not 0 <= r.prune < 1:
        refuse(f"prune = {r.prune} must be in [0, 1)")
    if not 0 < r.share <= 1:
        refuse(f"share = {r.share} must be in (0, 1]")


COARSEST = 1e-3
FINEST = 1e-12  # sums in steps of the grid stay far below 2**53, where float64 would round them again
NARROWEST = 10.0  # grid steps in one standard deviation


def _check_grid(recipe: Recipe, refuse: Callable[[str], None]) -> None:
    if not FINEST <= recipe.grid <= COARSEST:
        refuse(
            f"grid = {recipe.grid:g} is the grid's spacing as a fraction of the clip bound: {FINEST:g} to {COARSEST:g}; "
            "1e-6 costs next to nothing"
        )
    if recipe.mechanism != "gaussian":
        refuse(f"grid: only Gaussian noise has a discrete form here, not {recipe.mechanism}; leave grid out")
    if recipe.clip.kind == "none":
        refuse("grid is a fraction of the clip bound: set clip.kind = flat or layer")
    if recipe.sensitivity == "l2-max" or recipe.clip.rule == "median":
        refuse(
            "grid needs a noise scale that does not come from the batch: set sensitivity = bound and another clip.rule"
        )


def step_width(recipe: Recipe, dimension: int) -> float:
    """The Staircase's step over the clip bound in a model of that many parameters."""
    return recipe.width or dimension**-0.5


def spacing(recipe: Recipe, bounds: Sequence[float], sigmas: Sequence[float]) -> float:
    """The grid's spacing in a round with these bounds and noise multipliers (one per step); 0 without a grid.

    It follows the smallest bound, so that in every step it is at most `grid` times the step's bound.
    """
    if not recipe.grid:
        return 0.0
    step = recipe.grid * min(bounds)
    narrowest = min(sigma * bound for sigma, bound in zip(sigmas, bounds, strict=True))
    if narrowest < NARROWEST * step:
        raise UserError(
            f"grid = {recipe.grid:g}: the noise has a deviation of only {narrowest / step:.3g} grid steps, at least "
            f"{NARROWEST:g} are needed; set grid = {narrowest / step * recipe.grid / NARROWEST:.2g} or less, or more noise"
        )
    return step


_CACHE: dict[type, dict[str, Any]] = {}


def _HINTS(kind: type) -> dict[str, Any]:
    if kind not in _CACHE:
        _CACHE[kind] = get_type_hints(kind)
    return _CACHE[kind]


def with_changes(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A copy with dotted keys replaced: {"clip.bound": 1.0, "sigma": "linear:15:4.85"}.

    A schedule may be given as a number or as text. Unknown keys are an error with the nearest known one.
    """
    own: dict[str, Any] = {}
    clip: dict[str, Any] = {}
    for key, value in changes.items():
        if isinstance(value, Mapping) and key == "clip":
            clip.update(value)
        elif key.startswith("clip."):
            clip[key[5:]] = value
        else:
            own[key] = value
    clip_value = replace(recipe.clip, **_typed(Clip, clip, "recipe.clip.")) if clip else recipe.clip
    return replace(recipe, clip=clip_value, **_typed(Recipe, own, "recipe."))


def _typed(kind: type, changes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    hints = _HINTS(kind)
    out = {}
    for key, value in changes.items():
        if key not in hints or key == "clip":
            raise UserError(f"unknown key '{prefix}{key}'.{did_you_mean(key, hints)}")
        hint = hints[key]
        try:
            if hint is Schedule:
                value = value if isinstance(value, Schedule) else parse(str(value))
            elif hint is bool:
                if not isinstance(value, bool):
                    raise ValueError("expected true or false")
            elif hint is float or (float in get_args(hint) and value is not None):
                value = float(value)
            elif get_args(hint) and value not in get_args(hint):
                allowed = ", ".join(map(str, get_args(hint)))
                raise ValueError(f"expected one of {allowed}.{did_you_mean(value, get_args(hint))}")
        except (TypeError, ValueError) as wrong:
            raise UserError(f"{prefix}{key} = {value!r}: {wrong}") from None
        out[key] = value
    return out


def _layer(bound: str | float = 4.0, **more: Any) -> Clip:
    return Clip(kind="layer", bound=parse(str(bound)), **more)


def _flat(bound: str | float = 1.0, **more: Any) -> Clip:
    return Clip(kind="flat", bound=parse(str(bound)), **more)


def _build() -> dict[str, Recipe]:
    step: dict[str, Any] = {"mechanism": "gaussian", "where": "step"}
    fed_cdp = Recipe(
        "fed-cdp", "noise on every local step, per example and layer", "P1, P3", clip=_layer(), **step
    )
    sigma_decay = {
        "linear": "linear:15:4.85",
        "staircase": "staircase:15:4.85",
        "exponential": "exponential:15:4.85",
        "cyclic": "cosine-cyclic:15:floor=4.85",
    }
    central = replace(fed_cdp, family="central", paper="P2", cohort="all")
    half, down = _layer("linear:4:2"), parse("linear:15:4.85")
    items = [
        Recipe("non-private", "plain federated averaging", "P1", family="baseline"),
        Recipe(
            "fed-sdp",
            "clipped client updates, noise once at the server",
            "P1, P3",
            target="update",
            clip=_layer(),
            mechanism="gaussian",
            where="server",
            cohort="poisson",
        ),
        Recipe(
            "fed-sdp-client",
            "each client noises its clipped update before it leaves",
            "P1, P3",
            target="update",
            clip=_layer(),
            mechanism="gaussian",
            where="client",
        ),
        fed_cdp,
        replace(
            fed_cdp,
            name="fed-cdp-decay",
            summary="Fed-CDP with a clip bound that decays",
            clip=_layer("linear:6:2"),
        ),
        replace(
            fed_cdp,
            name="fed-alpha-cdp",
            summary="Fed-CDP with l2-max sensitivity",
            paper="P3",
            sensitivity="l2-max",
        ),
        *(
            replace(
                fed_cdp,
                name=f"fed-alpha-cdp-sigma-{kind}",
                summary=f"Fed-alpha-CDP with {kind} sigma decay",
                paper="P3",
                sensitivity="l2-max",
                sigma=parse(text),
            )
            for kind, text in sigma_decay.items()
        ),
        replace(central, name="dp-baseline", summary="central DP-SGD with per-layer clipping"),
        replace(central, name="dp-dyns-c-decay", summary="central, decaying clip bound", clip=half),
        replace(central, name="dp-dyns-l2max", summary="central, l2-max sensitivity", sensitivity="l2-max"),
        replace(
            central,
            name="dp-dyns",
            summary="central, decaying bound and l2-max",
            clip=half,
            sensitivity="l2-max",
        ),
        replace(central, name="dp-dynsigma", summary="central, decaying sigma", sigma=down),
        replace(
            central,
            name="dp-dyn-s-c-decay-sigma",
            summary="central, decaying bound and sigma",
            clip=half,
            sigma=down,
        ),
        replace(
            central,
            name="dp-dyn-s-l2max-sigma",
            summary="central, l2-max and decaying sigma",
            sensitivity="l2-max",
            sigma=down,
        ),
        replace(
            central,
            name="dp-dyn-s-sigma",
            summary="central, decaying bound, l2-max, decaying sigma",
            clip=half,
            sensitivity="l2-max",
            sigma=down,
        ),
        replace(
            fed_cdp,
            name="quantile-clip",
            summary="bound tracks the median norm by noised counts (Andrew et al.)",
            paper="P2, P3",
            clip=_layer(4.0, rule="quantile"),
        ),
        replace(
            fed_cdp,
            name="adaclip",
            summary="per-coordinate shift and scale from noised gradients (Pichapati et al.)",
            paper="P2, P3",
            clip=_flat(4.0, rule="adaclip"),
        ),
        replace(
            fed_cdp,
            name="median-clip",
            summary="bound is the batch's own median norm",
            paper="P1",
            clip=_layer(4.0, rule="median"),
        ),
        Recipe(
            "random-noise",
            "fixed-variance noise on each update, no clip",
            "P3",
            family="baseline",
            target="update",
            mechanism="gaussian",
            where="client",
            sigma=constant(0.01),
        ),
        Recipe(
            "gradient-pruning",
            "drop the smallest coordinates of each update",
            "P1, P3",
            family="baseline",
            prune=0.3,
        ),
        Recipe(
            "dssgd",
            "share a random subset of the large coordinates",
            "P3",
            family="baseline",
            share=0.1,
            share_threshold=0.001,
        ),
        replace(
            fed_cdp,
            name="fed-cdp-pruned",
            summary="Fed-CDP, small coordinates dropped before upload",
            paper="P1",
            prune=0.3,
        ),
        replace(
            fed_cdp,
            name="fed-cdp-example",
            summary="Fed-CDP with noise on every example (P1 Alg. 2)",
            noise_on="example",
            sampling="fixed",
        ),
        replace(
            fed_cdp,
            name="fed-cdp-mean",
            summary="Fed-CDP with noise on the mean (P3 Alg. 1 as printed)",
            paper="P3",
            noise_on="mean",
        ),
        replace(
            fed_cdp,
            name="fed-cdp-sound",
            summary="Fed-CDP with flat clipping and Poisson batches",
            paper="fedveil",
            clip=_flat(1.0),
        ),
        replace(
            fed_cdp,
            name="fed-alpha-cdp-sound",
            summary="noise follows the gradient norms, by a noised high quantile from earlier rounds",
            paper="fedveil",
            clip=_flat(4.0, rule="quantile", quantile=0.9, quantile_rate=0.3, count_noise=5.0),
        ),
        Recipe(
            "sum-cdp",
            "clipped per-example gradients summed over all clients, noise once on the sum",
            "fedveil",
            clip=_flat(1.0),
            mechanism="gaussian",
            where="sum",
            cohort="all",
            aggregate="mean",
        ),
        Recipe(
            "ldp-fl",
            "two-valued reports of whole weights, parameters shuffled",
            "P4",
            family="local",
            target="weights",
            mechanism="two-valued",
            where="client",
            epsilon=1.0,
            channel="shuffle-parameters",
        ),
        replace(
            fed_cdp,
            name="udp-fl-gaussian",
            summary="UDP-FL with Gaussian noise",
            paper="P5",
            clip=_flat(1.0),
            epsilon=4.0,
        ),
        replace(
            fed_cdp,
            name="udp-fl-laplace",
            summary="UDP-FL with Laplace noise (L2 clip; clip.norm = l1 gives a pure epsilon per step)",
            paper="P5",
            clip=_flat(1.0),
            mechanism="laplace",
            epsilon=4.0,
        ),
        replace(
            fed_cdp,
            name="udp-fl-staircase",
            summary="UDP-FL with i.i.d. Staircase noise in narrow steps",
            paper="P5",
            clip=_flat(1.0),
            mechanism="staircase",
            width=0.0,
            epsilon=4.0,
        ),
        replace(
            fed_cdp,
            name="udp-fl-staircase-joint",
            summary="UDP-FL with the joint L1 Staircase",
            paper="P5",
            clip=_flat(1.0, norm="l1"),
            mechanism="joint-staircase",
            epsilon=4.0,
        ),
        replace(
            fed_cdp,
            name="udp-fl-staircase-iid",
            summary="UDP-FL with i.i.d. Staircase noise in steps as wide as the bound, as printed",
            paper="P5",
            clip=_flat(1.0),
            mechanism="staircase",
            epsilon=4.0,
        ),
        Recipe(
            "nbafl",
            "models clipped and noised on the uplink, broadcast noised on the downlink",
            "P5",
            family="baseline",
            target="update",
            clip=_flat(10.0, of="weights"),
            mechanism="gaussian",
            where="client",
        ),
        Recipe(
            "dp-fedavg",
            "clipped client updates, noise once at the server, Poisson cohorts",
            "P5",
            target="update",
            clip=_flat(1.0),
            mechanism="gaussian",
            where="server",
            cohort="poisson",
            sigma=constant(1.0),
        ),
    ]
    return {r.name: r for r in items}


ALIASES = {
    "fed-alpha-cdp-sigma": "fed-alpha-cdp-sigma-exponential",
    "udp-fl": "udp-fl-gaussian",
    "fed-sdp-server": "fed-sdp",
}


def catalogue() -> dict[str, Recipe]:
    """All named recipes, in the order in which they are listed."""
    return _build()


def get(name: str) -> Recipe:
    """A recipe by name (or alias)."""
    known = catalogue()
    found = known.get(ALIASES.get(name, name))
    if found is None:
        raise UserError(
            f"unknown recipe '{name}'.{did_you_mean(name, [*known, *ALIASES])} `fedveil recipes` lists them all."
        )
    return found
