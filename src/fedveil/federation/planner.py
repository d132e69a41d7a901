"""Choose how to train for a budget: mechanism, clip, batch, local steps, rounds and noise, with the reasons.

The rule rests on one number, the *strength* s = examples * mu, where mu is the Gaussian-DP parameter of the budget
(the means of the two hypotheses in standard deviations). When each of N clients adds all its noise itself, independent
noises pile up and s is divided by sqrt(N). With full batches and one local step the whole run is a single Gaussian
mechanism cut into equal parts, so rounds cost nothing by themselves and s alone decides how far training can go.

How far (`travel`), how many directions (`components`) and the step size follow a `Rule`, fitted once on public data over
s = 170 … 100,000: on UCI digits redrawn at 28 x 28 and on Fashion-MNIST. Fashion-MNIST itself is planned by a second
rule, which redrawn digits alone gave, so that no dataset is planned by its own rows. The clip bound of tables, and the
rule of the small one that is planned here by name, were chosen on drawn ones.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from fedveil.errors import UserError, did_you_mean
from fedveil.jsons import JsonObject
from fedveil.privacy.accountants import answer
from fedveil.privacy.calibrate import calibrate
from fedveil.privacy.events import Event, Noise, Sampling
from fedveil.protect.clip import Clip

Observer = Literal["server", "sum"]
# Unit-length features bound the gradient of a linear head by sqrt(2); rows of tables may be shorter. These bounds clip
# nearly all examples, so that all count alike.
CLIP = {"images": 0.2, "table": 0.1}
STEP = 80  # how far one round may go: on redrawn digits twice that still works
AVERAGE = 0.3
# Linear regression on rows of length 1: targets lie in [-1, 1], so that hardly a gradient is above this bound; steps of the
# mean gradient below 2 cannot diverge; as many of them as the strength allows (chosen on drawn hospital tables).
REGRESSION_CLIP, REGRESSION_STEP, REGRESSION_ROUNDS = 1.0, 1.5, (30, 200)


@dataclass(frozen=True)
class Rule:
    """travel = factor * strength^power; components = directions * strength^directions_power, for images."""

    factor: float
    power: float
    directions: float
    directions_power: float
    ridge: float


RULE = Rule(4, 0.8, 25, 0.5, 3e-4)  # fitted on redrawn digits and Fashion-MNIST
DIGITS_RULE = Rule(1.7, 0.95, 280, 0.145, 1e-3)  # fitted on redrawn digits alone
SMALL_RULE = Rule(4.85, 1.0, 0, 0, 0)  # fitted on drawn tables of three columns and 426 rows (bench/drawn_tables.py)


@dataclass(frozen=True)
class Shape:
    """What the planner must know of the data; all of it is public."""

    kind: Literal["images", "table"]
    examples: int
    inputs: int  # columns of a table
    classes: int
    front: str = ""  # features of a table, if not the usual ones
    source: str = ""  # the dataset to load, if not the one named
    rule: Rule = RULE
    rounds: int = 20  # at least
    average: float = AVERAGE
    papers_weights: int = 34_720
    papers_layers: int = 3
    papers_batch: int = 5
    papers_rounds: int = 100
    backbone: str = ""  # a public network in front, with so many outputs
    width: int = 0
    target: str = ""
    task: Literal["classification", "regression"] = "classification"
    sizes: tuple[int, ...] = ()  # examples of each client, where they differ


KNOWN: dict[str, Shape] = {
    "mnist": Shape("images", 60_000, 784, 10),
    "fashion_mnist": Shape("images", 60_000, 784, 10, rule=DIGITS_RULE),
    "cifar10": Shape("images", 40_000, 3072, 10, papers_weights=42_336, papers_batch=4),
    "lfw": Shape("images", 2_267, 3072, 62, papers_weights=162_144, papers_batch=3, papers_rounds=60),
    "adult": Shape(
        "table", 36_631, 105, 2, papers_weights=8_930, papers_batch=3, papers_rounds=10,
    ),
    # Mean texture, worst area and worst smoothness, the three columns that the dataset's published description names,
    # on logarithmic scales between the extremes that it prints. Every further column would cost noise.
    "cancer": Shape(
        "table", 426, 3, 2,
        "unit:columns=1+23+24,low=9.71+185.2+0.071,high=39.28+4254+0.223,scale=log,constant=0.25,length=1",
        rule=SMALL_RULE, rounds=60, average=0.5, source="cancer_raw", papers_weights=4_130, papers_batch=4, papers_rounds=3,
    ),
}  # fmt: skip


# With public pre-training: the rule for images, as it was fitted before any backbone was tried; the centre of faces comes
# from the other face set.
PUBLIC: dict[str, Shape] = {
    "cifar10": replace(KNOWN["cifar10"], backbone="efficientnet-lite0", width=1280),
    "lfw": replace(KNOWN["lfw"], backbone="dlib-faces", width=128),
    "utkface": Shape("images", 4_000, 3072, 2, backbone="dlib-faces,centre=lfw", width=128, target="gender"),
    "medical_mnist": Shape("images", 6_000, 4096, 6, backbone="efficientnet-lite0", width=1280),
    "sst2": Shape("images", 6_920, 271, 2, backbone="minilm", width=384),
    "ag_news": Shape("images", 30_000, 995, 4, backbone="minilm", width=384),
}


@dataclass(frozen=True)
class Contrast:
    """The papers' own choice on the same data: what it really promises, and its noise against its signal."""

    sigma: float
    batch: int
    local_steps: int
    rounds: int
    weights: int
    epsilon: float | None
    noise_to_signal: float


@dataclass(frozen=True)
class Plan:
    """A proposal. epsilon is what the noise really reaches, never above the target.

    noise_to_signal: expected length of all noise together over the largest possible length of all clipped gradients
    together (1 means that a perfectly consistent gradient would drown); per_round: the same in a single round.
    """

    observer: Observer
    epsilon: float
    target_epsilon: float
    delta: float
    accountant: str
    verdict: str
    clients: int
    examples: int
    examples_per_client: int
    recipe: str
    mechanism: str
    clip: float
    batch: str
    local_steps: int
    rounds: int
    learning_rate: float
    average: float
    features: str
    model: str
    weights: int
    noise_multiplier: float
    strength: float
    noise_to_signal: float
    noise_to_signal_per_round: float
    why: tuple[str, ...]
    papers: Contrast

    def to_json(self) -> JsonObject:
        """Plain dictionary."""
        return asdict(self)


def describe(
    dataset: str | None, examples: int | None, kind: str, classes: int, columns: int, public: bool = False
) -> Shape:
    """The shape of a built-in dataset, or of the user's own from its public facts."""
    if public and dataset not in PUBLIC:
        raise UserError(f"--public: name a dataset for which a public backbone is known: {', '.join(PUBLIC)}.")
    if dataset is not None and (public or (dataset in PUBLIC and dataset not in KNOWN)):
        known = PUBLIC[dataset]
        return known if examples is None else replace(known, examples=examples)
    if dataset is None:
        if kind not in ("images", "table"):
            raise UserError(f"--kind {kind}: use images or table.{did_you_mean(kind, ('images', 'table'))}")
        if examples is None:
            raise UserError(
                "--examples is missing: give the number of training examples of all clients together"
            )
        if classes < 2 or columns < 1:
            raise UserError("--classes must be 2 or more and --columns 1 or more")
        return Shape("images" if kind == "images" else "table", examples, columns, classes)
    if dataset not in KNOWN:
        raise UserError(
            f"--dataset {dataset}: plans know {', '.join({**KNOWN, **PUBLIC})}; leave --dataset out and give --examples, --kind "
            f"and --classes for other data.{did_you_mean(dataset, {**KNOWN, **PUBLIC})}"
        )
    known = KNOWN[dataset]
    return known if examples is None else replace(known, examples=examples)


def strength_of(shape: Shape, multiplier: float, clients: int, alone: bool) -> float:
    """How many examples' worth of travel is left beside the noise. Alone, every client weighs the same in the mean, so that
    the noise of small ones counts most: N / sqrt(sum of 1 / size^2), which is n / sqrt(N) for equal sizes."""
    if not alone:
        return shape.examples / multiplier
    sizes = shape.sizes or (shape.examples / clients,) * clients
    return len(sizes) / math.sqrt(sum(1 / size**2 for size in sizes)) / multiplier


def plan(
    shape: Shape, *, epsilon: float, delta: float = 1e-5, clients: int = 100, observer: str = "server", spent: float = 0.0
) -> Plan:
    """Propose a run whose sound epsilon, for the observer named, stays within `epsilon`.

    spent: the share of the budget's square that something else costs before training.

    observer "server": it sees every client's update, and each client adds all the noise itself. "sum": only the sum
    over all clients leaves a trusted or secure aggregation, which adds the noise once.

    Formal guarantee: `noise_multiplier` is calibrated for `rounds` uses of the Gaussian mechanism on each example
    (full batches, no sampling), zero-out neighbours; nothing here looks at data.
    """
    if observer not in ("server", "sum"):
        raise UserError(
            f"--observer {observer}: use server (sees every update) or sum (sees only the sum)."
            f"{did_you_mean(observer, ('server', 'sum'))}"
        )
    if clients < 1 or shape.examples < clients:
        raise UserError(
            f"--clients {clients} with {shape.examples} examples: each client needs at least one example"
        )
    alone = observer == "server"
    whole = calibrate(epsilon, delta)  # the run as one release: multiplier 1/mu
    left = math.sqrt(1 - spent)
    strength = strength_of(shape, whole.noise_multiplier / left, clients, alone)
    rounds, clip, rate = _steps(shape, strength)
    found = calibrate(epsilon, delta, steps=rounds)
    front, width = _front(shape, strength)
    weights = width * (1 if shape.task == "regression" else shape.classes)
    per_round = math.sqrt(weights) / strength_of(shape, found.noise_multiplier / left, clients, alone)
    return Plan(
        observer="server" if alone else "sum",
        epsilon=found.epsilon,
        target_epsilon=epsilon,
        delta=delta,
        accountant=found.accountant,
        verdict=found.verdict,
        clients=clients,
        examples=shape.examples,
        examples_per_client=shape.examples // clients,
        recipe="fed-cdp-sound" if alone else "sum-cdp",
        mechanism="gaussian",
        clip=clip,
        batch="full",
        local_steps=1,
        rounds=rounds,
        learning_rate=rate,
        average=shape.average,
        features=front,
        model="linear" if shape.task == "regression" else "logistic",
        weights=weights,
        noise_multiplier=found.noise_multiplier,
        strength=strength,
        noise_to_signal=per_round / math.sqrt(rounds),
        noise_to_signal_per_round=per_round,
        why=_reasons(shape, clients, alone, strength, rounds, clip),
        papers=_papers(shape, clients, delta),
    )


def _steps(shape: Shape, strength: float) -> tuple[int, float, float]:
    """(rounds, clip bound, learning rate)."""
    if shape.task == "regression":
        least, most = REGRESSION_ROUNDS
        return int(min(max(strength / 6, least), most)), REGRESSION_CLIP, REGRESSION_STEP
    travel = shape.rule.factor * strength**shape.rule.power
    rounds, clip = min(max(math.ceil(travel / STEP), shape.rounds), 200), CLIP[shape.kind]
    return rounds, clip, _round(travel / rounds / clip)


def _front(shape: Shape, strength: float) -> tuple[str, int]:
    if shape.backbone:
        return f"backbone:{shape.backbone}", shape.width
    if shape.kind == "table":
        return shape.front or "unit:constant=1", shape.inputs + 1
    rule = shape.rule
    wanted = rule.directions * strength**rule.directions_power
    components = int(min(1500, max(100, 50 * round(wanted / 50))))
    return f"scattering:components={components},ridge={rule.ridge:g}", components


def _round(value: float) -> float:
    """Two significant digits: the rule is no more exact than that."""
    return float(f"{value:.2g}")


def _reasons(
    shape: Shape, clients: int, alone: bool, strength: float, rounds: int, clip: float
) -> tuple[str, ...]:
    times = strength_of(shape, 1.0, clients, False) / strength_of(shape, 1.0, clients, True)
    where = (
        f"every client must drown its own {shape.examples // clients} examples, and the {clients} noises add up: the "
        f"signal is worth {strength:,.0f} examples of noise-free travel, {times:.1f} times less than "
        "behind an aggregation"
        if alone
        else f"one noise protects all {shape.examples:,} examples at once: strength {strength:,.0f}"
    )
    front = (
        "a linear head on fixed features: the fewer weights, the less noise in total; whitening by drawn pictures "
        "costs no privacy"
        if shape.kind == "images" and not shape.backbone
        else f"a linear head on the outputs of a public network ({shape.backbone.partition(',')[0]}), each example alone: "
        "what was learnt from public data costs no privacy"
        if shape.backbone
        else "a linear model on rows of length 1: the fewer weights, the less noise in total"
    )
    return (
        where,
        "Gaussian noise: with this many coordinates and rounds no other mechanism is smaller",
        "full batches: small ones save noise by sampling, but lose more signal than that",
        "one local step: each further one would be noised on its own, and clients of two labels would drift apart",
        f"{rounds} rounds: with full batches the budget is one Gaussian release cut in {rounds} parts, so rounds are "
        "free; this many keep each step small",
        f"clip {clip:g}: with targets between -1 and 1 hardly a gradient is longer, so nothing is bent"
        if shape.task == "regression"
        else f"clip {clip:g}: on features of length 1 nearly every gradient is cut to the same length; noise shrinks with "
        "the bound, the learning rate grows with its inverse",
        f"the models of the last {shape.average:.0%} of the rounds are averaged: free, they are noised already",
        front,
    )


def _papers(shape: Shape, clients: int, delta: float) -> Contrast:
    """sigma 6, 100 local steps, a tenth of the clients per round, per-layer clipping."""
    own = max(shape.examples // clients, 1)
    batch = min(shape.papers_batch, own)
    cohort = max(clients // 10, 1)
    part = math.ceil(shape.papers_rounds * cohort / clients)
    root = Clip(kind="layer").joint(1.0, shape.papers_layers)
    event = Event(Noise("gaussian", 6 / root), Sampling("poisson", rate=batch / own), steps=100 * part)
    per_step = 6 * math.sqrt(shape.papers_weights) / (batch * root)
    total = per_step / math.sqrt(cohort * 100 * shape.papers_rounds)
    return Contrast(
        sigma=6.0,
        batch=batch,
        local_steps=100,
        rounds=shape.papers_rounds,
        weights=shape.papers_weights,
        epsilon=answer([event], delta).epsilon,
        noise_to_signal=total,
    )


def config_of(proposal: Plan, shape: Shape, dataset: str | None = None) -> dict[str, Any]:
    """The keys of a run configuration that carry the proposal out."""
    return {
        "recipe": proposal.recipe,
        **({"dataset": shape.source or dataset} if dataset else {}),
        **({"target": shape.target} if shape.target else {}),
        "partition": "shards" if shape.kind == "images" else "iid",
        "clients": proposal.clients,
        "features": proposal.features,
        "model": proposal.model,
        "model_options": {"bias": False, "zero": True},
        "rounds": proposal.rounds,
        "local_steps": proposal.local_steps,
        "batch_size": proposal.examples_per_client,
        "learning_rate": proposal.learning_rate,
        "average": proposal.average,
        "delta": proposal.delta,
        "target_epsilon": proposal.target_epsilon,
        "calibrate": True,
        "observer": "server",
        "protect": {"sampling": "full", "cohort": "all", "clip.bound": proposal.clip},
    }


def as_toml(proposal: Plan, shape: Shape, dataset: str | None = None) -> str:
    """A configuration file for `fedveil run`, with the reasons as comments."""
    values = config_of(proposal, shape, dataset)
    lines = [f"# {reason}" for reason in proposal.why]
    if dataset is None:
        lines.append('dataset = "your-file.csv"  # or a name of `fedveil data list`; add target = "column"')
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in tables]
    for key, table in tables.items():
        lines += [f"[{key}]", *(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"
