"""One typed configuration for every run; files are TOML, a name is a recipe or a shipped configuration."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_serializer,
    field_validator,
)

from fedveil.errors import UserError, did_you_mean
from fedveil.jsons import Document, JsonObject
from fedveil.privacy.events import Observer
from fedveil.privacy.ledger.entries import MOST_CLIENTS
from fedveil.privacy.schedules import Schedule, following_rate
from fedveil.protect.catalogue import ALIASES, catalogue, get, named_code, own
from fedveil.protect.channel import Clock
from fedveil.protect.clip import Scale
from fedveil.protect.counts import takes_rate
from fedveil.protect.place import Reports
from fedveil.protect.recipe import KEYS, Recipe, as_text, spell, with_changes
from fedveil.training import loss_names
from fedveil.training.augment import parse as parse_augment
from fedveil.training.optimisers import parse as parse_optimiser

if TYPE_CHECKING:
    from fedveil.federation.look import Looked

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib


TABLES = ("partition_options", "model_options", "table")  # keys that are tables themselves
TRUSTED: ContextVar[bool] = ContextVar("may code that a configuration names be imported?", default=False)
GIVEN = "given:"  # in front of the name of a recipe that is a value of the calling program
MOST_BYTES = 1 << 20  # of a configuration file
MOST_TEXT = 10_000
MOST_DEPTH = 60
LARGEST = 3.4e38  # of a bound, a multiplier, a rate, a count: beyond it nothing can be computed
SMALLEST = 1e-38


class RunConfig(BaseModel):
    """Everything that decides a run. `protect` changes parts of the recipe (sigma, clip.bound, …)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field("", description="free name of the run")
    recipe: str = Field(description="a recipe of `fedveil recipes`")
    protect: dict[str, Any] = Field(default_factory=dict, description="changed parts of the recipe")

    dataset: str = Field(
        "cancer", description="a name of `fedveil data list`, a .npz or .csv file, or module:function"
    )
    data: str | None = Field(None, description="folder of the datasets (else FEDVEIL_DATA)")
    target: str | None = Field(None, description="target column of a .csv file")
    text: str | None = Field(None, description="text column of a .csv file")
    table: dict[str, Any] = Field(
        default_factory=dict,
        description="what is declared about a table's columns: group, drop, ranges, … (docs/tutorial-tables.md)",
    )
    features: str | None = Field(
        None,
        description="fixed features in front of the model, e.g. scattering or backbone:efficientnet-lite0",
    )
    validation: float = Field(
        0.0, ge=0, lt=1, description="share of the training rows set aside as public validation"
    )
    limit: int | None = Field(None, ge=1, description="use only so many training rows")
    split_seed: int = Field(0, description="seed of the train/test split where the dataset has none")

    partition: str = Field("shards", description="shards, iid, dirichlet, groups, sizes, copies or overlap")
    partition_options: dict[str, Any] = Field(default_factory=dict)
    clients: int = Field(10, ge=1)
    cohort_size: float | None = Field(None, gt=0, description="expected clients per round; none means all")

    rounds: int = Field(10, ge=1)
    local_steps: int = Field(100, ge=1)
    batch_size: float = Field(5, gt=0, description="expected batch per client and step")
    learning_rate: float = Field(0.05, gt=0)
    learning_rate_end: float | None = Field(
        None, gt=0, description="linear decay to this value at the last round"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="in local training")
    local_optimiser: str = Field("sgd", description="sgd, adam or adamw, as adamw:decay=0.01,beta1=0.9")
    augment: str = Field(
        "", description="flip, crop:4 or flip+crop:4: gradients of augmented copies of an image are averaged before the clip"
    )
    augment_copies: int = Field(4, ge=1, le=64, description="copies of each image, with augment")
    loss: str = Field(
        "auto",
        description="cross-entropy, label-smoothing:share=0.1, binary-cross-entropy (classes), squared, huber:width=1 (values), "
        "or package.module:function",
    )
    model: str = Field("auto", description="a model name, module:function, or auto")
    model_options: dict[str, Any] = Field(default_factory=dict)

    server_learning_rate: float = Field(1.0, gt=0)
    server_momentum: float = Field(0.0, ge=0, lt=1)
    average: float = Field(
        0.0, ge=0, lt=1, description="share of the last rounds whose models are averaged for use"
    )
    curve: Literal["polygon", "bezier"] = Field("polygon", description="path of aggregate = connectivity")
    smoothness: float | None = Field(
        None, gt=0, description="L of UDP-FL's closed form (Eq. 6), which each client applies to its noised update; none: off"
    )
    message_loss: float = Field(0.0, ge=0, lt=1, description="share of reports lost on the way (LDP-FL)")

    client_radii: list[float] | None = Field(
        None, description="LDP-FL: own radius of each client's range, in every layer (repeated in turn); agreed before training"
    )
    delay_proposals: list[float] | None = Field(
        None,
        description="LDP-FL: each client's proposal of the longest random delay T in seconds (repeated in turn); T is the median",
    )
    compute_seconds: list[float] | None = Field(
        None, description="LDP-FL: time that each client announces for its training (repeated in turn)"
    )
    network_seconds: list[float] | None = Field(
        None, description="LDP-FL: time that each client announces for its connection (repeated in turn)"
    )
    overrun_seconds: list[float] | None = Field(
        None, description="LDP-FL: by how much each client takes longer than it announced (repeated in turn)"
    )
    slack_seconds: float = Field(0.0, ge=0, description="LDP-FL: how long the server listens after the last planned message")

    delta: float = Field(1e-5, gt=0, lt=1)
    accountant: str = "pld"
    observer: Observer = Field("server", description="whose epsilon is shown, targeted and calibrated")
    calibrate: bool = Field(
        False, description="choose sigma so that target_epsilon is met at the last round, for whoever is drawn most often too"
    )
    target_epsilon: float | None = Field(None, gt=0, description="stop before this epsilon is exceeded")
    target_accuracy: float | None = Field(
        None, gt=0, le=1, description="stop at this accuracy on the validation set"
    )
    fixed_variance: float | None = Field(
        None, gt=0, description="a deviation, although it is called a variance: that of Gaussian noise on a sum, held constant "
        "(sigma = this / bound)"
    )
    budget: Literal["sound", "nominal"] = Field(
        "sound",
        description="what target_epsilon limits; nominal: the papers' own count, which protects nobody",
    )
    budget_accountant: Literal["moments", "zcdp", "optimal", "advanced", "basic"] = Field(
        "moments", description="which of the papers' accountants counts, with budget = nominal"
    )
    nominal_rate: float | None = Field(
        None, gt=0, le=1, description="q of the papers' own count as they print it (0.01); none: batch_size x cohort_size over "
        "the distinct training rows. No sound row looks at it"
    )
    client_epsilons: list[Annotated[float, Field(allow_inf_nan=True)]] | None = Field(
        None, description="own budget of each client (repeated in turn); inf: no protection at all"
    )
    client_deltas: list[float] | None = Field(
        None, description="own delta of each client's budget (repeated in turn); none: delta"
    )
    client_mechanisms: list[str] | None = Field(
        None, description="own mechanism of each client (repeated in turn)"
    )
    minimum_clients: int = Field(1, ge=1, description="stop when fewer clients have budget left")
    allow_large_delta: bool = False
    tuning: str = Field("none stated", description="how hyper-parameters were chosen, and what that cost")

    secure_sum: bool = Field(
        False, description="where = sum: nodes mask their sums and add the noise in shares; nobody sees a part"
    )
    sum_threshold: int | None = Field(
        None, ge=1, description="nodes that must survive a secure sum (default: 80% of the clients)"
    )
    sum_colluders: int = Field(1, ge=0, description="nodes that may collude with the server of a secure sum")

    seed: int = 0
    engine: Literal["auto", "native", "torch", "stacked", "graph", "functional", "reference"] = "auto"
    workers: int = Field(1, ge=1)
    chunk: int | None = Field(None, ge=1)
    device: str = "cpu"
    secure_noise: bool = Field(False, description="noise and sampling from the operating system's entropy")
    evaluate_every: int = Field(1, ge=1)
    metrics: tuple[str, ...] = Field(
        (), description="further figures on the test rows: auc, f1, balanced_accuracy (classes), or package.module:function"
    )
    checkpoint_every: int = Field(10, ge=1)
    diagnostics: bool = Field(True, description="record private diagnostics (norms, losses)")
    report: bool = True

    _given: Recipe | None = PrivateAttr(default=None)
    _looked: Looked | None = PrivateAttr(default=None)

    @field_validator("recipe")
    @classmethod
    def _known_recipe(cls, name: str) -> str:
        return name if named_code(name) or name.startswith(GIVEN) else get(name).name

    @field_serializer("client_epsilons")
    def _infinite_as_a_word(self, epsilons: list[float] | None) -> list[float | str] | None:
        """JSON has no infinity; the word is read back as the number."""
        return None if epsilons is None else [e if math.isfinite(e) else "inf" for e in epsilons]

    def given(self, recipe: Recipe) -> RunConfig:
        """The same configuration with its recipe as a value."""
        copy = self.model_copy()
        copy._given = recipe
        return copy

    def imported(self) -> RunConfig:
        """The same with the recipe that it names imported, if that is code: only for configurations that somebody trusts."""
        return self.given(own(self.recipe)) if named_code(self.recipe) else self

    def with_look(self, looked: Looked) -> RunConfig:
        """The same configuration with what a look at its table found (and paid for) before."""
        copy = self.model_copy()
        copy._looked = looked
        return copy

    @property
    def looked(self) -> Looked | None:
        """What a look at the table found before, in a run that is continued or looked at."""
        return self._looked

    def _base(self) -> Recipe:
        if self._given is not None:
            return self._given
        if self.recipe.startswith(GIVEN):
            raise UserError(
                f"the recipe '{self.recipe.removeprefix(GIVEN)}' was given as a value: pass it again (recipe=…), or name it as "
                "my_package.module:my_recipe from the start"
            )
        if not named_code(self.recipe):
            return get(self.recipe)
        if not TRUSTED.get():
            raise UserError(
                f"the configuration names code to import: recipe '{self.recipe}'. If you wrote it and trust it, add --trust-code"
            )
        return own(self.recipe)

    def _changed(self) -> Recipe:
        return with_changes(self._base(), self.protect)

    @property
    def asked_scale(self) -> Scale:
        """What the recipe's noise is to follow. A fixed variance takes it out of the run, but not out of a paper's count."""
        return self._changed().scale

    def built_recipe(self) -> Recipe:
        """The recipe with this configuration's changes; a bound that follows the learning rate gets its values."""
        recipe = self._changed()
        if self.fixed_variance is not None and recipe.scale.batch:
            # The deviation is given, whatever the batch: nothing follows its largest norm any more, and sigma is this / bound.
            recipe = replace(recipe, scale=Scale())
        bound = following_rate(recipe.clip.bound, self.learning_rate, self.learning_rate_end)
        return (
            recipe if bound is recipe.clip.bound else replace(recipe, clip=replace(recipe.clip, bound=bound))
        )


# The papers' local steps, batch and rounds per dataset (P1, P3), on disjoint clients.
DATASET_DEFAULTS: dict[str, JsonObject] = {
    "cancer": {"clients": 10, "partition": "iid", "rounds": 3, "local_steps": 100, "batch_size": 4},
    "digits": {"clients": 10, "partition": "iid", "rounds": 10, "local_steps": 100, "batch_size": 5},
    "mnist": {"clients": 100, "cohort_size": 10, "rounds": 100, "batch_size": 5},
    "fashion_mnist": {"clients": 100, "cohort_size": 10, "rounds": 100, "batch_size": 5},
    "cifar10": {"clients": 50, "cohort_size": 5, "rounds": 100, "batch_size": 4},
    "lfw": {"clients": 10, "partition": "iid", "rounds": 60, "batch_size": 3},
    "adult": {"clients": 100, "cohort_size": 10, "partition": "iid", "rounds": 10, "batch_size": 3},
    "location30": {"clients": 10, "partition": "iid", "rounds": 50, "batch_size": 10},
    "medical_mnist": {
        "clients": 10,
        "partition": "iid",
        "rounds": 50,
        "batch_size": 5,
        "learning_rate": 0.01,
    },
    "utkface": {"clients": 10, "partition": "iid", "rounds": 50, "batch_size": 5, "learning_rate": 0.01},
    "wind": {"clients": 7, "partition": "groups", "rounds": 50, "batch_size": 16, "learning_rate": 0.01},
}
CENTRAL_DEFAULTS: JsonObject = {"clients": 1, "partition": "iid", "cohort_size": None}


# The central paper's batches (P2 Table II; Location-30 plays Purchase).
CENTRAL_BATCH = {"mnist": 600, "fashion_mnist": 600, "cifar10": 500, "lfw": 22, "location30": 100}


@contextmanager
def trusting_code() -> Iterator[None]:
    """Within this block a configuration may name a recipe of the user's own package, which is then imported."""
    before = TRUSTED.set(True)
    try:
        yield
    finally:
        TRUSTED.reset(before)


def shipped() -> dict[str, str]:
    """Names and TOML texts of the shipped configurations."""
    folder = resources.files("fedveil") / "configs"
    if not folder.is_dir():
        return {}
    found = [item for item in folder.iterdir() if item.name.endswith(".toml")]
    return {item.name[:-5]: item.read_text("utf-8") for item in sorted(found, key=lambda i: i.name)}


def summary_of(text: str) -> str:
    """The first sentence of the comment that a configuration begins with."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").strip())
    return re.split(r"\.(?:\s|$)", " ".join(lines))[0].rstrip(".:")


def load_config(name_or_path: str, changes: Mapping[str, object] | Sequence[str] = ()) -> RunConfig:
    """A configuration from a TOML file, a shipped name, or a recipe's name, with `key=value` changes.

    Keys are those of RunConfig; a recipe's part may be named directly (sigma=2, clip.bound=1).
    """
    values, where = _values_of(name_or_path)
    pairs = changes if isinstance(changes, Mapping) else dict(pair_of(text) for text in changes)
    return make_config(values, pairs, where)


def _values_of(name_or_path: str) -> tuple[JsonObject, str]:
    """What a file, a shipped configuration or a recipe's name itself says, and how to call it in a message."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        return read_toml_file(path), name_or_path
    if name_or_path.lower() in shipped():
        values = _read_toml(shipped()[name_or_path.lower()], name_or_path)
        return {"name": name_or_path.lower(), **values}, name_or_path
    if name_or_path in catalogue() or name_or_path in ALIASES or named_code(name_or_path):
        return {"recipe": name_or_path}, ""
    known = [*catalogue(), *ALIASES, *shipped()]
    raise UserError(
        f"'{name_or_path}' is neither a .toml file, a shipped configuration nor a recipe."
        f"{did_you_mean(name_or_path, known)} `fedveil configs` and `fedveil recipes` list what there is."
    )


def stated_keys(name_or_path: str) -> set[str]:
    """The keys of `RunConfig` that a file, a shipped configuration or a recipe's name sets itself."""
    values, where = _values_of(name_or_path)
    return set(_routed(values, where))


def changed_keys(changes: Sequence[str]) -> set[str]:
    """The keys of `RunConfig` that `key=value` changes set."""
    return set(_routed(dict(pair_of(text) for text in changes), "--set"))


def make_config(
    values: Mapping[str, object], changes: Mapping[str, object] = {}, where: str = "", recipe: Recipe | None = None
) -> RunConfig:
    """Check and complete plain values: dataset defaults, then `values`, then `changes`. recipe: given as a value."""
    merged = _routed(values, where)
    for key, value in _routed(changes, "--set").items():
        if key in ("protect", *TABLES):
            merged[key] = {**merged.get(key, {}), **value}
        else:
            merged[key] = value
    dataset = str(merged.get("dataset", "cancer"))
    base = dict(DATASET_DEFAULTS.get(dataset, {}))
    recipe_name = str(merged.get("recipe", ""))
    known = recipe or catalogue().get(ALIASES.get(recipe_name, recipe_name))
    if known is None and named_code(recipe_name) and TRUSTED.get():
        known = own(recipe_name)
    if known is not None and known.about.central:
        base.update(CENTRAL_DEFAULTS)
        base["batch_size"] = CENTRAL_BATCH.get(dataset, base.get("batch_size", 5))
    if known is not None and known.place.sum_only:
        base["local_steps"] = 1
    if merged.get("model") == "adassp":
        base |= {"rounds": 1, "local_steps": 1, "learning_rate": 1.0}
    if "clients" in merged and "cohort_size" not in merged:
        base.pop("cohort_size", None)
    try:
        config = RunConfig(**{**base, **merged})
    except ValidationError as wrong:
        raise UserError(_explain(wrong, where)) from None
    config = config if recipe is None else config.given(recipe)
    config.built_recipe()
    check_config(config)
    return config


def config_of(recipe: str | Recipe, settings: Mapping[str, object]) -> RunConfig:
    """A configuration of a recipe by its name, or given as a value.

    Where the catalogue's entry of that name differs only in keys, or all parts are ours, the keys spell a value and the run
    directory holds the whole recipe; else it must be given again to resume, attack or audit the run.
    """
    if isinstance(recipe, str):
        return make_config({"recipe": recipe}, settings)
    base = catalogue().get(recipe.name, Recipe(recipe.name))
    before, own = spell(base), spell(recipe)
    parts = {
        key: as_text(given) if isinstance(given, Schedule) else given
        for key, given in own.items()
        if given != before[key] and key not in ("summary", "paper")
    }
    spelled = all(isinstance(given, str | float | int | bool | None) for given in parts.values())
    if spelled and with_changes(base, parts) == replace(recipe, about=base.about):
        known = recipe.name in catalogue()
        keys = parts if known else {**parts, "name": recipe.name}
        named = recipe.name if known else "non-private"
        return make_config({"recipe": named}, {**{f"protect.{key}": given for key, given in keys.items()}, **settings})
    return make_config({"recipe": f"{GIVEN}{recipe.name}"}, settings, recipe=recipe)


def check_numbers(config: RunConfig, recipe: Recipe) -> None:
    """Refuse numbers and texts beyond all use, before they cost time or memory or overflow."""
    named = [(name, getattr(config, name)) for name in RunConfig.model_fields]
    for name, value in [*named, *_parts("protect", recipe)]:
        if isinstance(value, list) and len(value) > MOST_TEXT * 100:
            raise UserError(f"{name}: {len(value)} entries are too many")
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, str) and len(one) > MOST_TEXT:
                raise UserError(f"{name}: a text of {len(one)} letters is too long")
            if isinstance(one, bool) or not isinstance(one, int | float):
                continue
            if name == "client_epsilons" and one == math.inf:  # no protection at all, said by the client itself
                continue
            most = 2.0**63 if name in ("seed", "split_seed") else LARGEST
            tiny = isinstance(one, float) and 0 < abs(one) < SMALLEST
            if tiny or not abs(one) <= most:
                raise UserError(f"{name} = {_shown(one)}: must lie between {SMALLEST:g} and {most:g}")
    if config.clients > MOST_CLIENTS:
        raise UserError(f"clients = {config.clients}: at most {MOST_CLIENTS}")


def _parts(name: str, value: object) -> list[tuple[str, object]]:
    """The fields of a recipe and of its parts, with dotted names."""
    if not is_dataclass(value):
        return [(name, value)]
    return [part for item in fields(value) for part in _parts(f"{name}.{item.name}", getattr(value, item.name))]


def check_config(config: RunConfig) -> None:
    """Refuse settings that are fine alone but not together."""
    recipe = config.built_recipe()
    check_numbers(config, recipe)
    if config.cohort_size is not None and config.cohort_size > config.clients:
        raise UserError(f"cohort_size = {config.cohort_size} is above clients = {config.clients}")
    if recipe.place.sum_only and config.local_steps != 1:
        raise UserError(
            f"local_steps = {config.local_steps}: a noised sum of gradients (where = sum) allows exactly 1 local step per round"
        )
    _check_optimiser(config, recipe)
    _check_bend(config, recipe)
    _check_clock(config, recipe)
    _check_radii(config, recipe)
    if config.loss != "auto" and not loss_names.own(config.loss):
        loss_names.parse(config.loss)
    if parse_augment(config.augment, config.augment_copies).active and config.features:
        raise UserError("augment moves images, and features are computed once for each: use one of the two")
    if config.secure_sum:
        from fedveil.federation.sums import refusal

        why = refusal(recipe, config.clients, config.cohort_size)
        if why:
            raise UserError(why)
    if config.target_accuracy is not None and config.validation <= 0:
        raise UserError(
            "target_accuracy needs a public validation set: set validation = 0.1 (rows set aside and treated as public)"
        )
    if config.client_epsilons and recipe.law is not None and not recipe.place.own_noise:
        raise UserError(
            f"client_epsilons: with where = {recipe.place.name} there is one noise for all, not one per client"
        )
    if config.client_epsilons and recipe.private and recipe.law is None:
        raise UserError(
            "client_epsilons: the two-valued randomiser has one epsilon for all; set epsilon instead"
        )
    _check_deviation(config, recipe)
    _check_budgets(config, recipe)
    if config.calibrate and config.target_epsilon is None and not config.client_epsilons:
        raise UserError("calibrate = true needs target_epsilon (or client_epsilons)")
    if recipe.aggregate.needs_public and config.validation <= 0:
        raise UserError(
            f"aggregate = {recipe.aggregate.name} trains on public data at the server: set validation = 0.1 or more"
        )


def _check_deviation(config: RunConfig, recipe: Recipe) -> None:
    """A deviation is held where sigma times the bound is the noise's deviation, and nothing else chooses sigma."""
    law, rule = recipe.law, recipe.clip.rule
    if config.fixed_variance is None:
        return
    if law is None:
        raise UserError("fixed_variance is the deviation of a noise, and this recipe adds none: leave it out, or use another one")
    if law.deviation(*law.scale(1.0, 1.0, 1), 1) != 1.0:
        why = f"sigma is not the deviation of {law.name} noise: set mechanism = gaussian, or set sigma"
    elif not recipe.noise_on.once:
        why = f"noise_on = {recipe.noise_on.name} widens the noise on the sum: set noise_on = sum, or set sigma"
    elif not recipe.clip.bounded:
        why = "without a clip sigma is the deviation itself: set sigma"
    elif rule.beside():
        why = f"clip.rule = {rule.name} makes sigma depend on earlier releases, which no accountant composes: use one of the two"
    elif rule.rescales or rule.batch:
        why = f"clip.rule = {rule.name} stretches the noise as the gradients go: set clip.rule = given, or set sigma"
    elif config.calibrate or config.client_epsilons or (recipe.formula is not None and recipe.epsilon is not None):
        why = "sigma is chosen by the budget (calibrate, client_epsilons, epsilon): use one of the two"
    else:
        return
    raise UserError(f"fixed_variance holds the deviation of Gaussian noise on a sum. Here {why}")


def _check_budgets(config: RunConfig, recipe: Recipe) -> None:
    if config.budget == "nominal" and (config.calibrate or config.target_epsilon is None or config.client_epsilons):
        raise UserError(
            "budget = nominal stops a run where a paper would stop: it needs target_epsilon, and neither calibrate nor "
            "client_epsilons, which give promises"
        )
    if config.budget_accountant != RunConfig.model_fields["budget_accountant"].default and config.budget == "sound":
        raise UserError(
            f"budget_accountant = {config.budget_accountant} counts a nominal budget: set budget = nominal, or leave it out"
        )
    if config.nominal_rate is not None and not takes_rate(recipe):
        raise UserError(
            f"nominal_rate = {config.nominal_rate:g} is q of the papers' count of local steps, which recipe '{recipe.name}' does "
            "not have: leave it out, or use a recipe with that count (such as fed-cdp)"
        )
    if any(not epsilon > 0 for epsilon in config.client_epsilons or ()):
        raise UserError("client_epsilons: budgets must be above 0 (inf: no protection)")
    if config.client_deltas is not None:
        if not config.client_epsilons or not config.client_deltas:
            raise UserError("client_deltas belong to client_epsilons: give both, or neither")
        if any(not 0 < delta < 1 for delta in config.client_deltas):
            raise UserError("client_deltas: each must be between 0 and 1")


def _check_optimiser(config: RunConfig, recipe: Recipe) -> None:
    rule = parse_optimiser(config.local_optimiser).rule
    if recipe.clip.rule.rescales:
        _check_plain(config, recipe, rule)
    if rule == "sgd":
        return
    if recipe.place.sum_only:
        raise UserError(f"local_optimiser = {rule}: with where = sum clients send gradients, and none takes a local step")
    if recipe.aggregate.knows_senders:
        raise UserError(f"local_optimiser = {rule}: scaffold's control variates assume plain local steps; use sgd")
    if config.momentum:
        raise UserError(
            f"momentum = {config.momentum} is for local_optimiser = sgd; {rule} has its own (beta1)"
        )


def _check_plain(config: RunConfig, recipe: Recipe, optimiser: str) -> None:
    """A rule that follows the gradients under their noise takes the noise's own share away, which it knows for plain steps."""
    name = recipe.clip.rule.name
    why = f"clip.rule = {name} reads gradients, and the noise's share in them, off the updates, which plain steps"
    if optimiser != "sgd":
        raise UserError(f"local_optimiser = {optimiser}: {why} only allow; use sgd")
    if config.momentum:
        raise UserError(f"momentum = {config.momentum}: {why} only allow; set momentum = 0")
    if config.smoothness is not None:
        raise UserError(f"smoothness = {config.smoothness:g}: {why} only allow; leave it out")


CLOCK = ("delay_proposals", "compute_seconds", "network_seconds", "overrun_seconds")


def _check_bend(config: RunConfig, recipe: Recipe) -> None:
    if config.smoothness is None:
        return
    if recipe.private and not recipe.place.own_noise:
        raise UserError(
            "smoothness: the closed form is applied to a client's update after its noise; here an update has none of its own. "
            "Use where = step or client"
        )
    if recipe.aggregate.knows_senders:
        raise UserError("smoothness: scaffold's control variates assume plain local steps; use another aggregate")


def clock_of(config: RunConfig) -> Clock | None:
    """What clients say about time; None: nothing, and messages take none."""
    if not config.slack_seconds and all(getattr(config, name) is None for name in CLOCK):
        return None
    proposals, compute, network, overrun = (tuple(getattr(config, name) or ()) for name in CLOCK)
    return Clock(proposals, compute, network, overrun, config.slack_seconds)


def _check_clock(config: RunConfig, recipe: Recipe) -> None:
    if clock_of(config) is None:
        return
    for name in CLOCK:
        values = getattr(config, name)
        least = "above 0" if name == CLOCK[0] else "0 or more"
        if values is not None and not (values and all(v > 0 or (v == 0 and name != CLOCK[0]) for v in values)):
            raise UserError(f"{name} = {_shown(values)}: give at least one number of seconds, each {least}")
    if not isinstance(recipe.place, Reports):
        raise UserError(
            f"{', '.join((*CLOCK, 'slack_seconds'))} are about the messages of two-valued reports: use recipe = ldp-fl, or leave "
            "them out"
        )
    if config.delay_proposals and not recipe.channel.hides_senders:
        raise UserError(
            "delay_proposals: with channel = none nothing is delayed; set channel = shuffle-parameters or shuffle-models"
        )


def _check_radii(config: RunConfig, recipe: Recipe) -> None:
    if config.client_radii is None:
        return
    if not config.client_radii or any(not radius > 0 for radius in config.client_radii):
        raise UserError(f"client_radii = {_shown(config.client_radii)}: give at least one radius, each above 0")
    if not isinstance(recipe.place, Reports):
        raise UserError("client_radii are the ranges of two-valued reports: use recipe = ldp-fl, or leave them out")
    if recipe.ranges.adaptive:
        raise UserError("client_radii: adaptive ranges are the server's, one per layer for all clients; set ranges = fixed")
    if recipe.channel.hides_reports:
        raise UserError(
            "client_radii: a report of c ± r·K tells whose r it is, so single weights are not hidden among other clients'; "
            "set channel = none or shuffle-models"
        )


def pair_of(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign:
        raise UserError(f"--set {text[:80]!r}: write key=value, e.g. --set rounds=20")
    if len(value) > MOST_TEXT or _depth(value) > MOST_DEPTH:
        raise UserError(f"--set {key.strip()[:80]}=…: the value is too long or nested too deeply")
    try:
        return key.strip(), tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
    except ValueError as wrong:  # a whole number with thousands of digits
        raise UserError(f"--set {key.strip()[:80]}=…: {wrong}") from None


def read_toml_file(path: Path) -> Document:
    """The values of a configuration file, not yet checked."""
    if not path.is_file():
        raise UserError(f"configuration file '{path}' does not exist")
    return _read_toml(_text_of(path), str(path))


def _text_of(path: Path) -> str:
    """A configuration file's text; whatever else it is, is a clear error."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as wrong:
        raise UserError(f"cannot read {path}: {wrong.strerror}") from None
    if len(data) > MOST_BYTES:
        raise UserError(f"{path}: larger than {MOST_BYTES >> 10} kB, the most a configuration may have")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as wrong:
        raise UserError(f"{path}: not a UTF-8 text (byte {wrong.start}); TOML files are UTF-8") from None


def _depth(text: str) -> int:
    """How deep brackets may be nested in `text`: parsers call themselves for each."""
    depth = deepest = 0
    for letter in text:
        if letter in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in "]}":
            depth = max(0, depth - 1)
    return deepest


def _read_toml(text: str, where: str) -> JsonObject:
    if _depth(text) > MOST_DEPTH or text.count(".") > MOST_TEXT:
        raise UserError(f"{where}: nested too deeply for a configuration")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise UserError(f"{where}: not valid TOML: {wrong}") from None


def _routed(values: Mapping[str, object], where: str) -> Document:
    """Send recipe parts that were named directly into `protect`, dotted option keys into their table."""
    own = RunConfig.model_fields
    parts = {key.partition(".")[0] for key in KEYS} - {"summary", "paper"}
    out: Document = {}
    for key, value in values.items():
        head, _, tail = key.partition(".")
        if head == "table" and tail.startswith(("ranges.", "categories.")):
            kind, _, column = tail.partition(".")
            out.setdefault(head, {}).setdefault(kind, {})[column] = value
        elif head in TABLES and tail:
            out.setdefault(head, {})[tail] = value
        elif (head == "recipe" and tail) or (head == "protect" and tail):
            out.setdefault("protect", {})[tail] = value
        elif key in ("protect", *TABLES) and not isinstance(value, Mapping):
            raise UserError(f"{key} = {str(value)[:80]!r}: must be a table, e.g. {key} = {{ name = 1 }}")
        elif key == "protect":
            out.setdefault("protect", {}).update(value)
        elif key in own:
            out[key] = value
        elif head in parts:
            out.setdefault("protect", {})[key] = value
        else:
            prefix = f"{where}: " if where else ""
            raise UserError(
                f"{prefix}unknown key '{key}'.{did_you_mean(key, [*own, *parts, 'clip.bound', 'clip.kind'])}"
            )
    return out


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number with thousands of digits
        text = "a number with thousands of digits"
    return text if len(text) <= 120 else text[:117] + "..."


def _explain(wrong: ValidationError, where: str) -> str:
    lines = []
    for error in wrong.errors():
        key = ".".join(str(part) for part in error["loc"])
        message = str(error["msg"]).removeprefix("Value error, ")
        if (error["type"], key) == ("missing", "recipe"):
            message = f"is missing: name one, or let `fedveil fit {where or 'FILE'} --epsilon 2` choose it"
            lines.append(f"recipe {message}")
            continue
        shown = "" if error["type"] == "missing" else f" = {_shown(error['input'])}"
        lines.append(f"{key}{shown}: {message}")
    prefix = f"{where}: " if where else ""
    return prefix + "; ".join(lines)
