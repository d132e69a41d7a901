"""The contract: what the owner of a node's data agreed to, as one frozen value. The owner decides, the server asks.

    contract = read_contract(path, pinned=digest)        # or owner=public key that signed it
    decide(contract, request, now)                       # Admitted, or Refused with the reason

A decision looks at the request and the contract alone, never at data: a refusal therefore tells nothing, costs nothing
and may be explained. Whatever is admitted is charged to the node's ledger before any data is opened.

A contract is a TOML file. Its digest is that of its values, so comments and order do not matter. `fedveil flower
contract` writes one; docs/contract.md describes every key.
"""

from __future__ import annotations

import calendar
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedveil.data.functions import is_function
from fedveil.errors import UserError
from fedveil.flower import identity, limits
from fedveil.jsons import Document
from fedveil.privacy.events import Observer, Unit

if TYPE_CHECKING:
    from fedveil.federation.config import RunConfig
    from fedveil.flower.request import Request
    from fedveil.protect.recipe import Recipe

FORMAT = "fedveil contract 1"
SIGNED_AS = "contract"
SMALLEST_CLIP = 1e-6  # below, float32 noise beside float32 weights is no noise any more
FREE = ("sigma", "clip.bound", "epsilon")  # numbers of a recipe that the contract bounds instead of fixing


class Refused(Exception):
    """The owner does not allow this. The text is told to the server: it must not depend on private data."""


@dataclass(frozen=True)
class Data:
    """What the owner says about the data, all of it public.

    columns: feature columns of a .csv in their order, each with its public range; values are mapped to [-1, 1] and
    cut off there. Without columns the file is an .npz with examples of `shape`, cut off at `range`.
    classes: names in order, class 0 first (a file may hold names or numbers); empty for regression, whose targets
    are cut off at `target_range`. examples: the number of records that take part, always exactly so many: missing
    or unreadable ones count as constant records, further ones are left out.
    """

    target: str
    classes: tuple[str, ...]
    examples: int
    columns: tuple[tuple[str, float, float], ...] = ()
    shape: tuple[int, ...] = ()
    range: tuple[float, float] = (0.0, 1.0)
    target_range: tuple[float, float] = (-1.0, 1.0)

    @property
    def task(self) -> Literal["classification", "regression"]:
        return "classification" if self.classes else "regression"

    @property
    def example_shape(self) -> tuple[int, ...]:
        return (len(self.columns),) if self.columns else self.shape

    @property
    def digest(self) -> str:
        """Names columns, ranges, target and classes (not how many records a node has): equal at all parties."""
        return hashlib.sha256(limits.canonical(asdict(replace(self, examples=1)))).hexdigest()


@dataclass(frozen=True)
class Bounds:
    """What a run may choose, from–to (both ends allowed) or at most."""

    sigma: tuple[float, float] = (0.0, 1e6)
    clip: tuple[float, float] = (1e-3, 1e4)
    learning_rate: tuple[float, float] = (0.0, 10.0)
    batch: tuple[float, float] = (0.0, 1e5)
    local_steps: int = 10_000
    rounds: int = 100_000
    momentum: float = 0.999
    report_epsilon: float = math.inf  # two-valued reports: of one weight
    parameters: int = 20_000_000  # weights of the model
    weight: float = 1e4  # largest absolute value of a weight that the server sends


@dataclass(frozen=True)
class Allowed:
    """A recipe by name and by the digest of its values (`recipe_digest`).

    Own code: the name is "package.module:recipe", the digest counts the files of all packages that its parts come from, and
    `code` is that of the package which is imported for it, compared before anything of it runs.
    """

    name: str
    digest: str = ""
    code: str = ""


@dataclass(frozen=True)
class Model:
    """A model by name with its options; own code ("package.module:function") by the digest of its package too.

    architecture: digest of the net itself, layer by layer (`federation.checks.architecture_digest`); "" is not compared.
    """

    name: str
    options: str = "{}"  # canonical JSON
    code: str = ""
    architecture: str = ""


@dataclass(frozen=True)
class Checks:
    """What the node looks at before it trains a model that it was sent (`flower.modelcheck`). The first model is always
    compared with the one of the configuration's seed.

    structure: weights that training does not lead to. change: a move since the last round that averaging cannot make.
    """

    structure: bool = False
    change: bool = False


@dataclass(frozen=True)
class SumTerms:
    """Under which terms a vector of this node goes into a secure sum, and whose keys its masks are for.

    threshold: nodes that must survive, at least. colluders: nodes that may collude with the server, at least. The roster is
    named by its digest (roster) or by the public key of the one who signs it (owner); it never comes from the server.
    """

    threshold: int
    colluders: int
    roster: str = ""
    owner: str = ""


@dataclass(frozen=True)
class Contract:
    """All that the owner agreed to.

    epsilon: for the life of the node's ledger, all runs together; None is no limit and no promise, which an owner
    has to write out ("unlimited"). submitters: public keys of which one must have signed a request; empty: anybody
    whom the SuperLink lets in. data None: only built-in public datasets (for trying out). features: fixed features that a
    run may put in front, letter by letter. checks: of the models that the server sends. sum: terms of secure sums; None: this
    node takes part in none. legacy: read from an old policy file, which names recipes without digests and the parts of them
    that a run may change.
    """

    study: str
    version: int
    recipes: tuple[Allowed, ...]
    epsilon: float | None
    data: Data | None = None
    valid_until: str = ""
    observer: Observer = "server"
    unit: Unit = "example"
    delta: float = 1e-5
    models: tuple[Model, ...] = ()
    bounds: Bounds = Bounds()
    submitters: tuple[str, ...] = ()
    secure_noise: bool = True
    legacy: bool = False
    changes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    sum: SumTerms | None = None
    checks: Checks = Checks()

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form: the contract's name."""
        return hashlib.sha256(limits.canonical(to_json(self))).hexdigest()


@dataclass(frozen=True)
class Admitted:
    """A request that the contract allows: the recipe of this node with the run's changes, and who asked."""

    recipe: Recipe
    submitter: str


# --- digests of what is allowed ---


def recipe_digest(recipe: Recipe) -> str:
    """Digest of a recipe's values without those that a contract bounds by number (sigma, clip.bound, epsilon), and of the files
    of all packages outside this one that its parts come from."""
    from fedveil.protect.recipe import files_digest, foreign_packages

    values = _lean(recipe)
    for name in ("about", "sigma", "epsilon"):
        values.pop(name, None)
    if isinstance(values.get("clip"), dict):
        values["clip"].pop("bound", None)
    own = {name: files_digest(name) for name in foreign_packages(recipe)}
    if not all(own.values()):
        raise UserError(f"recipe '{recipe.name}': a part of it has no file to compare; put it in a package")
    values |= {"packages": own} if own else {}
    return hashlib.sha256(limits.canonical(values)).hexdigest()


def _lean(value: object) -> Any:
    """A dataclass as plain values, without fields that have their default."""
    if isinstance(value, (list, tuple)):
        return [_lean(item) for item in value]
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    module, kind = type(value).__module__, type(value).__qualname__
    if not is_dataclass(value):
        return str(value) if module.partition(".")[0] == "fedveil" or not hasattr(value, "__dict__") else {
            "kind": f"{module}.{kind}", **{name: _lean(own) for name, own in sorted(vars(value).items())}
        }  # fmt: skip
    changed = {
        f.name: _lean(getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != f.default
    }
    return {"kind": kind if module.partition(".")[0] == "fedveil" else f"{module}.{kind}", **changed}


def package_digest(function: str) -> str:
    """Digest of all files of the package that holds "package.module:function", without importing it."""
    from fedveil.protect.recipe import files_digest

    top = function.partition(":")[0].partition(".")[0]
    found = files_digest(top)
    if not found:
        raise UserError(f"'{function}': there is no package '{top}' here")
    return found


IMPORTED = "__fedveil_files__"  # digest of an own package's files when it was imported for a recipe


def own_recipe(contract: Contract, name: str) -> Recipe:
    """The recipe of own code that `name` stands for, imported only if the owner allowed its package as it lies here.

    Formal guarantee: nothing of a package runs unless its files have a digest that the contract lists beside this name.
    """
    from fedveil.protect.catalogue import own

    codes = {item.code for item in contract.recipes if item.name == name and item.code}
    if not codes:
        raise Refused(f"contract: recipe '{limits.plain(name, 100)}' is code that would be imported here; the owner has to list "
                      "it with the digest of its package (docs/contract.md)")  # fmt: skip
    lies_here = package_digest(name)
    if lies_here not in codes:
        raise Refused(f"contract: the package of recipe '{name}' is not the one the owner allowed (its files have digest "
                      f"{lies_here[:16]}…)")  # fmt: skip
    recipe = own(name)
    package = sys.modules[name.partition(":")[0].partition(".")[0]]
    if vars(package).setdefault(IMPORTED, lies_here) != lies_here:
        raise Refused(f"the package of recipe '{name}' has changed since it was imported here: the node has to be started anew")
    return recipe


# --- the decision ---


def decide(contract: Contract, request: Request, now: float | None = None) -> Admitted | Refused:
    """Whether the owner agreed to this. Uses the request and the contract alone; see `decide_round` for its numbers.

    Formal guarantee: a function of public values, so its answer tells nothing about data.
    """
    try:
        return _admit(contract, request, time.time() if now is None else now)
    except Refused as why:
        return why


def _admit(contract: Contract, request: Request, now: float) -> Admitted:
    config = request.config
    if contract.valid_until and now > _seconds(contract.valid_until):
        raise Refused(f"contract: it ended at {contract.valid_until}; the owner has to renew it")
    submitter = _submitter(contract, request)
    recipe = _recipe(contract, request)
    _within(contract.bounds, config, takes_steps=not recipe.place.sum_only)
    _model(contract, request)
    _data(contract, request)
    _features(contract, config.features)
    _loss(request)
    if config.secure_sum:
        decide_sum(contract.sum, config)
    return Admitted(recipe, submitter)


def decide_sum(terms: SumTerms | None, config: RunConfig) -> None:
    """Raise `Refused` unless the run's secure sum is at least as safe as the owner asks for."""
    from fedveil.federation.sums import Terms

    if terms is None:
        raise Refused("contract: it has no [sum] terms, so this node takes part in no secure sum (docs/contract.md)")
    asked = Terms.of(config.clients, config.sum_threshold, config.sum_colluders)
    if asked.threshold < terms.threshold:
        raise Refused(
            f"contract: a sum of {asked.threshold} nodes would be opened, at least {terms.threshold} are asked for"
        )
    if asked.colluders < terms.colluders:
        raise Refused(
            f"contract: {asked.colluders} colluding nodes are assumed, at least {terms.colluders} are asked for"
        )
    if 2 * asked.threshold <= config.clients + asked.colluders or asked.threshold > config.clients:
        raise Refused(
            f"secure sum: 2 × threshold {asked.threshold} must exceed {config.clients} nodes + {asked.colluders} colluders, "
            "and the threshold cannot exceed the nodes"
        )


_OF_A_NAME = re.compile(r"(standard|scattering|unit|words|tokens)(:[^:/]*)?|backbone:[a-z0-9-]+(,(size|centre)=[a-z0-9-]+)*")


def _features(contract: Contract, wanted: str | None) -> None:
    """Fixed features that the owner listed; with built-in public data any that is no code or file of the server's choice."""
    if not wanted or wanted in contract.features:
        return
    if contract.legacy and _OF_A_NAME.fullmatch(wanted):
        return
    listed = ", ".join(contract.features) or "none"
    raise Refused(f"contract: features {limits.plain(wanted, 100)} are not allowed here ({listed} are)")


def _loss(request: Request) -> None:
    """Built-in losses only: no promise depends on them, but code of the server's choice does not run here."""
    from fedveil.training.loss_names import chosen

    wanted = request.config.loss
    if is_function(wanted):
        raise Refused(f"contract: the loss {limits.plain(wanted, 100)} is a function of the server's choice that would be "
                      "imported here; nodes train with built-in losses (docs/models.md)")  # fmt: skip
    if request.shape is not None:
        try:
            chosen(wanted, request.classes is None)
        except UserError as wrong:
            raise Refused(f"the run's configuration: {limits.plain(wrong)}") from None


def _submitter(contract: Contract, request: Request) -> str:
    if contract.submitters and (
        request.submitter is None or request.submitter.hex() not in contract.submitters
    ):
        raise Refused("contract: the request is not signed by a submitter whom the owner listed")
    return "" if request.submitter is None else identity.fingerprint(request.submitter)


def _recipe(contract: Contract, request: Request) -> Recipe:
    """The node's own recipe (its mechanism may be the client's own), which must be an allowed one."""
    config, recipe = request.config, request.recipe
    name = allowed_name(config, recipe)
    allowed = [item for item in contract.recipes if item.name == name]
    if not allowed:
        known = ", ".join(item.name for item in contract.recipes) or "none"
        raise Refused(f"contract: recipe '{name}' is not allowed here ({known} is)")
    if not contract.legacy:
        if recipe_digest(recipe) not in {item.digest for item in allowed}:
            raise Refused(
                f"contract: recipe '{recipe.name}' has other values than the owner allowed (its digest is "
                f"{recipe_digest(recipe)[:16]}…): a run may choose sigma, clip.bound and epsilon, nothing else. "
                "Another version of fedveil may also define it differently"
            )
        return recipe
    for key in _flat(config.protect):
        if key not in contract.changes:
            allows = ", ".join(contract.changes)
            raise Refused(f"policy: a run may not change '{key}' of a recipe here ({allows} it may)")
    if config.client_mechanisms and recipe.law != request.base.law and "mechanism" not in contract.changes:
        raise Refused("policy: a run may not change 'mechanism' of a recipe here, not even for one client "
                      "(client_mechanisms)")  # fmt: skip
    return recipe


def allowed_name(config: RunConfig, recipe: Recipe) -> str:
    """The name by which a contract lists a recipe: its own, or the one that own code is imported by."""
    from fedveil.protect.catalogue import named_code

    return config.recipe if named_code(config.recipe) else recipe.name


def _flat(changes: Document) -> list[str]:
    """Dotted names of changed recipe parts."""
    out = []
    for key, value in changes.items():
        out += [f"{key}.{inner}" for inner in value] if isinstance(value, Mapping) else [key]
    return out


def _within(bounds: Bounds, config: RunConfig, takes_steps: bool = True) -> None:
    """takes_steps: a node that sends a sum of gradients takes none, so the learning rate is the server's own matter."""
    ends = [config.learning_rate, config.learning_rate_end] if takes_steps else []
    rates = [rate for rate in ends if rate is not None]
    for name, value, (low, high) in (
        *(("learning_rate", rate, bounds.learning_rate) for rate in rates),
        ("batch_size", config.batch_size, bounds.batch),
        ("local_steps", config.local_steps, (1, bounds.local_steps)),
        ("rounds", config.rounds, (1, bounds.rounds)),
        ("momentum", config.momentum, (0.0, bounds.momentum)),
    ):
        if not low <= value <= high:
            raise Refused(f"contract: {name} = {value:g} is not within {low:g} to {high:g}")


def _model(contract: Contract, request: Request) -> None:
    name, options = request.model, limits.canonical(request.config.model_options).decode()
    if contract.models:
        for item in contract.models:
            if item.name == name and (contract.legacy or item.options == options):
                if ":" in name and item.code and package_digest(name) != item.code:
                    raise Refused("contract: the code of the model is not the one the owner allowed")
                return
        if contract.legacy and ":" not in name:  # an old policy lists own code only
            return _small(request)
        listed = ", ".join(f"{item.name} {item.options}" for item in contract.models)
        raise Refused(
            f"contract: model {limits.plain(name, 60)} {limits.plain(options, 100)} is not allowed here ({listed} is)"
        )
    if ":" in name:
        raise Refused("contract: the model is a function of the server's choice that would be imported here; "
                      "list it in `models` to allow it")  # fmt: skip
    _small(request)
    return None


_OPTION_LIMITS = {"hidden": 2048, "width": 128, "groups": 64}


def _small(request: Request) -> None:
    """Without a list of models: built-in ones whose options cannot fill the memory."""
    for key, value in request.config.model_options.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        most = _OPTION_LIMITS.get(str(key), 0)
        if len(values) > 4 or not all(
            isinstance(v, bool) or (isinstance(v, int) and 0 < v <= most) for v in values
        ):
            raise Refused(
                f"contract: model_options.{limits.plain(key, 40)} is not allowed here; the owner may list the model with its "
                "options in `models`"
            )


def _data(contract: Contract, request: Request) -> None:
    config, data = request.config, contract.data
    if data is None:
        return
    if config.target not in (None, data.target):
        raise Refused(f"contract: the target here is '{data.target}'; a run cannot choose another")
    classes = len(data.classes) or None
    seen = request.shape is None or bool(config.features)  # of features: compared where they are computed
    if request.shape is not None and (
        request.classes != classes or not (seen or tuple(request.shape) == data.example_shape)
    ):
        raise Refused(
            f"contract: examples have shape {list(data.example_shape)} and {classes} classes here, the run expects "
            f"{list(request.shape)} and {request.classes}"
        )
    if request.data != data.digest:
        raise Refused(
            "contract: columns, ranges, target or classes (names and order) are not those of the run; server and nodes "
            "need contracts with the same [data] (docs/contract.md)"
        )


def decide_round(
    contract: Contract,
    recipe: Recipe,
    bounds: tuple[float, ...],
    sigmas: tuple[float, ...],
    epsilon: float | None,
) -> None:
    """Raise `Refused` for clip bounds, noise or reports outside the contract, in any step of the round."""
    allowed = contract.bounds
    if recipe.clip.bounded:
        low, high = allowed.clip
        if not (min(bounds) >= low and max(bounds) <= high):
            raise Refused(
                f"contract: clip bound {min(bounds):g} to {max(bounds):g} is not within {low:g} to {high:g}"
            )
    if recipe.private and recipe.law is None:
        if epsilon is None or not epsilon <= allowed.report_epsilon:
            raise Refused(
                f"contract: epsilon {epsilon} per reported weight, at most {allowed.report_epsilon:g} is allowed"
            )
        return
    low, high = allowed.sigma
    if not recipe.private:
        if low > 0:
            raise Refused(f"contract: sigma 0 is below {low:g}, the least the owner allows")
        return
    if not (min(sigmas) >= low and max(sigmas) <= high):
        raise Refused(f"contract: sigma {min(sigmas):g} is not within {low:g} to {high:g}")


def decide_claims(contract: Contract, claims: Any) -> None:
    """Raise `Refused` unless the release promises something about the owner's unit to the owner's observer.

    A unit that a recipe does not speak of would never be counted, so nothing would ever stop it.
    """
    if contract.epsilon is None:
        return
    mine = [c for c in claims if (c.observer, c.unit) == (contract.observer, contract.unit)]
    if any(c.verdict == "none" for c in mine) or not any(c.verdict == "sound" for c in mine):
        why = next((f": {c.reason}" for c in mine if c.verdict == "none"), "")
        raise Refused(
            f"contract: the recipe leaves '{contract.observer}' without a finite promise about one {contract.unit}{why}"
        )


# --- files ---


def to_json(contract: Contract) -> Document:
    """Plain values; `from_json` is the inverse."""
    document: Document = {
        "format": FORMAT,
        "study": contract.study,
        "version": contract.version,
        "valid_until": contract.valid_until,
        "observer": contract.observer,
        "unit": contract.unit,
        "epsilon": "unlimited" if contract.epsilon is None else contract.epsilon,
        "delta": contract.delta,
        "secure_noise": contract.secure_noise,
        "submitters": list(contract.submitters),
        "recipes": [
            {"name": item.name, "digest": item.digest} | ({"code": item.code} if item.code else {}) for item in contract.recipes
        ],
        "models": [
            {"name": item.name, "options": json.loads(item.options), "code": item.code}
            | ({"architecture": item.architecture} if item.architecture else {})
            for item in contract.models
        ],
        "bounds": {
            k: (list(v) if isinstance(v, tuple) else "unlimited" if v == math.inf else v)
            for k, v in asdict(contract.bounds).items()
        },
    }
    if contract.features:
        document["features"] = list(contract.features)
    if contract.sum is not None:
        document["sum"] = {k: v for k, v in asdict(contract.sum).items() if v != ""}
    if contract.checks != Checks():  # left out where there are none: digests of older contracts stay
        document["checks"] = asdict(contract.checks)
    if contract.data is not None:
        data = asdict(contract.data)
        data["columns"] = {name: [low, high] for name, low, high in contract.data.columns}
        document["data"] = {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}
        document["data"]["order"] = [name for name, _, _ in contract.data.columns]
    return document


_PAIR = limits.is_list(limits.is_number(-1e12, 1e12), 2)
_is_name = limits.is_text(200, 1)
_DATA_MUST: dict[str, limits.Check] = {
    "target": limits.is_text(200),
    "classes": limits.is_list(limits.is_text(200, 1), 10_000),
    "examples": limits.is_int(1, 10**9),
}
_DATA_MAY: dict[str, limits.Check] = {
    "columns": lambda v: (
        isinstance(v, dict) and len(v) <= 100_000 and all(_is_name(k) and _is_range(p) for k, p in v.items())
    ),
    "order": limits.is_list(limits.is_text(200, 1), 100_000),
    "shape": limits.is_list(limits.is_int(1, 10**6), 4),
    "range": lambda v: _is_range(v),
    "target_range": lambda v: _is_range(v),
}


def _is_range(value: Any) -> bool:
    return _PAIR(value) and len(value) == 2 and value[0] < value[1]


def _from_to(low: float, high: float) -> limits.Check:
    number = limits.is_number(low, high)
    return lambda v: isinstance(v, list) and len(v) == 2 and number(v[0]) and number(v[1]) and v[0] <= v[1]


_BOUNDS: dict[str, limits.Check] = {
    "sigma": _from_to(0, 1e9),
    "clip": _from_to(SMALLEST_CLIP, 1e9),
    "learning_rate": _from_to(0, 1e3),
    "batch": _from_to(0, 1e9),
    "local_steps": limits.is_int(1, 10**6),
    "rounds": limits.is_int(1, 10**7),
    "momentum": limits.is_number(0, 0.999999),
    "report_epsilon": lambda v: v == "unlimited" or limits.is_number(0, 1e6)(v),
    "parameters": limits.is_int(1, 2**33),
    "weight": limits.is_number(0, 1e6),
}
_TOP_MUST: dict[str, limits.Check] = {
    "format": limits.is_one_of([FORMAT]),
    "study": limits.is_text(200, 1),
    "version": limits.is_int(1, 2**31),
    "recipes": limits.is_list(lambda v: isinstance(v, dict), 1000),
    "epsilon": lambda v: v == "unlimited" or limits.is_number(0, 1e6)(v),
}
_TOP_MAY: dict[str, limits.Check] = {
    "valid_until": lambda v: v == "" or (isinstance(v, str) and _is_time(v)),
    "observer": limits.is_one_of(get_args(Observer)),
    "unit": limits.is_one_of(get_args(Unit)),
    "delta": lambda v: limits.is_number(0, 1)(v) and 0 < v < 1,
    "secure_noise": limits.is_bool,
    "submitters": limits.is_list(limits.is_hex(32), 1000),
    "models": limits.is_list(lambda v: isinstance(v, dict), 100),
    "bounds": lambda v: isinstance(v, dict),
    "data": lambda v: isinstance(v, dict),
    "features": limits.is_list(limits.is_text(500, 1), 100),
    "sum": lambda v: isinstance(v, dict),
    "checks": lambda v: isinstance(v, dict),
}


_MODEL_MAY: dict[str, limits.Check] = {
    "options": lambda v: isinstance(v, dict),
    "code": lambda v: v == "" or limits.is_hex(32)(v),
    "architecture": lambda v: v == "" or limits.is_hex(32)(v),
}


def from_json(value: Any) -> Contract:
    """A contract from plain values; `Malformed` says what is wrong. A misspelt limit would limit nothing."""
    top = limits.fields(value, "contract", _TOP_MUST, _TOP_MAY)
    recipes = []
    for item in top["recipes"]:
        must = {"name": limits.is_text(200, 1), "digest": limits.is_hex(32)}
        one = limits.fields(item, "contract recipe", must, {"code": limits.is_hex(32)})
        if ":" in one["name"] and not one.get("code"):
            raise limits.Malformed(f"contract recipe {one['name']}: own code needs the digest of its package ('code')")
        recipes.append(Allowed(one["name"], one["digest"], one.get("code", "")))
    models = []
    for item in top.get("models", []):
        one = limits.fields(item, "contract model", {"name": limits.is_text(200, 1)}, _MODEL_MAY)
        if ":" in one["name"] and not one.get("code"):
            raise limits.Malformed(f"contract model {one['name']}: own code needs its digest ('code')")
        options = limits.canonical(one.get("options", {})).decode()
        models.append(Model(one["name"], options, one.get("code", ""), one.get("architecture", "")))
    found = limits.fields(top.get("bounds", {}), "contract bounds", {}, _BOUNDS)
    numbers: Document = {
        k: tuple(map(float, v)) if isinstance(v, list) else v for k, v in found.items()
    }
    for key in ("report_epsilon", "momentum", "weight"):
        if key in numbers:
            numbers[key] = math.inf if numbers[key] == "unlimited" else float(numbers[key])
    rest: Document = {
        k: top[k] for k in ("valid_until", "observer", "unit", "secure_noise") if k in top
    }
    if "delta" in top:
        rest["delta"] = float(top["delta"])
    data = _data_from(top["data"]) if "data" in top else None
    if data is not None and rest.get("delta", Contract.delta) * data.examples >= 1:
        raise limits.Malformed(
            f"contract: delta is not below 1/{data.examples}: publishing one record would pass"
        )
    return Contract(
        study=top["study"],
        version=top["version"],
        recipes=tuple(recipes),
        epsilon=None if top["epsilon"] == "unlimited" else float(top["epsilon"]),
        data=data,
        models=tuple(models),
        bounds=Bounds(**numbers),
        submitters=tuple(top.get("submitters", ())),
        features=tuple(top.get("features", ())),
        sum=_sum_from(top["sum"]) if "sum" in top else None,
        checks=Checks(
            **limits.fields(
                top.get("checks", {}), "contract checks", {}, dict.fromkeys(("structure", "change"), limits.is_bool)
            )
        ),
        **rest,
    )


def _sum_from(value: Any) -> SumTerms:
    one = limits.fields(
        value, "contract sum", {"threshold": limits.is_int(1, 4096), "colluders": limits.is_int(0, 4096)},
        {"roster": limits.is_hex(32), "owner": limits.is_hex(32)},
    )  # fmt: skip
    if ("roster" in one) == ("owner" in one):
        raise limits.Malformed("contract sum: give 'roster' (its digest) or 'owner' (who signs it), one of the two")
    return SumTerms(**one)


def _data_from(value: Any) -> Data:
    one = limits.fields(value, "contract data", _DATA_MUST, _DATA_MAY)
    columns, shape = one.get("columns", {}), tuple(one.get("shape", ()))
    order = one.get("order", list(columns))
    if sorted(order) != sorted(columns):
        raise limits.Malformed("contract data: 'order' does not name exactly the columns")
    if bool(columns) == bool(shape):
        raise limits.Malformed("contract data: give 'columns' (a table) or 'shape' (arrays), one of the two")
    if one["target"] in columns:
        raise limits.Malformed(f"contract data: the target '{one['target']}' is also a feature column")
    if len(set(one["classes"])) != len(one["classes"]) or len(one["classes"]) == 1:
        raise limits.Malformed(
            "contract data: classes must be two or more different names, or none (regression)"
        )
    pairs: Document = {
        k: (float(one[k][0]), float(one[k][1])) for k in ("range", "target_range") if k in one
    }
    named = tuple((name, float(columns[name][0]), float(columns[name][1])) for name in order)
    return Data(one["target"], tuple(one["classes"]), one["examples"], named, shape, **pairs)


def _is_time(text: str) -> bool:
    try:
        return _seconds(text) > 0
    except ValueError:
        return False


def _seconds(text: str) -> float:
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))


def read_contract(path: Path | str, *, pinned: str = "", owner: bytes | None = None) -> Contract:
    """The contract in `path` (TOML). pinned: its digest must be this. owner: PATH.sig must hold this key's signature."""
    values = limits.read_toml(path, "contract")
    try:
        contract = from_json(values)
    except limits.Malformed as wrong:
        raise UserError(f"contract {path}: {wrong}") from None
    if pinned and contract.digest != pinned:
        raise UserError(
            f"contract {path}: its digest is {contract.digest}, but {pinned} is pinned here. If the owner agrees to the "
            "new version (`fedveil flower contract --diff OLD NEW`), pin its digest"
        )
    if owner is not None and not verify_file(path, contract, owner):
        raise UserError(
            f"contract {path}: {path}.sig is no signature of its owner ({identity.fingerprint(owner)})"
        )
    return contract


def verify_file(path: Path | str, contract: Contract, owner: bytes) -> bool:
    """Whether PATH.sig is the owner's signature of this contract."""
    try:
        signature = bytes.fromhex(limits.read_file(f"{path}.sig", "signature", 400).decode("ascii").strip())
    except (UserError, ValueError):
        return False
    return identity.verify(owner, SIGNED_AS, limits.canonical(to_json(contract)), signature)


def sign_file(path: Path, secret: bytes) -> None:
    """Write PATH.sig: the owner's signature of the contract in `path`."""
    contract = read_contract(path)
    made = identity.sign(secret, SIGNED_AS, limits.canonical(to_json(contract)))
    Path(f"{path}.sig").write_text(made.hex() + "\n", "ascii")


def write_contract(path: Path, contract: Contract) -> None:
    """Write a new contract file in one step; refuses to overwrite one."""
    if path.exists():
        raise UserError(
            f"{path} exists; an agreed contract is not overwritten, write the next version beside it"
        )
    from_json(json.loads(limits.canonical(to_json(contract))))  # what is written can be read
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(to_toml(contract), "utf-8")
    os.replace(temporary, path)


def to_toml(contract: Contract) -> str:
    """The contract for people; `read_contract` reads it back to an equal value."""
    from fedveil.flower.project import toml_value

    whole = to_json(contract)
    lines = [f"{key} = {toml_value(value)}" for key, value in whole.items() if not isinstance(value, dict)
             and key not in ("recipes", "models") and value not in ([], "")]  # fmt: skip
    for name in ("recipes", "models"):
        for item in whole[name]:
            lines += ["", f"[[{name}]]"]
            lines += [f"{key} = {toml_value(value)}" for key, value in item.items() if value not in ("", {})]
    for name in ("bounds", "sum", "checks", "data"):
        table = dict(whole.get(name, {}))
        columns = table.pop("columns", {})
        if table:
            table = {k: v for k, v in table.items() if v != [] or k == "classes"}
            lines += ["", f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in table.items())]
        if columns:
            lines += [
                "",
                "[data.columns]",
                *(f"{toml_value(key)} = {toml_value(v)}" for key, v in columns.items()),
            ]
    return "\n".join(lines) + "\n"


def differences(old: Contract, new: Contract) -> list[str]:
    """What a new version changes, a line each: "bounds.clip: [0.5, 4.0] -> [0.1, 4.0]"."""
    before, after = _paths(to_json(old)), _paths(to_json(new))
    said = []
    for key in [*before, *(k for k in after if k not in before)]:
        if before.get(key) != after.get(key):
            said.append(f"{key}: {before.get(key, 'nothing')} -> {after.get(key, 'nothing')}")
    return said


def _paths(value: Any, at: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        return {
            k: v for key, item in value.items() for k, v in _paths(item, f"{at}.{key}" if at else key).items()
        }
    if isinstance(value, list) and value and isinstance(value[0], dict):
        named = [(str(item.get("name", n)), item) for n, item in enumerate(value)]
        return {k: v for name, item in named for k, v in _paths(item, f"{at}.{name}").items()}
    return {at: json.dumps(value, ensure_ascii=False)}
