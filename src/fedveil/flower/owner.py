"""What the owner of a node decides, on the node: where its data and books are, and what it allows.

Policy file (TOML); every key is optional except `recipes`:

    recipes = ["fed-cdp", "fed-cdp-sound"]   # nothing else is trained
    minimum_sigma = 6.0                      # noise multiplier, of every step
    maximum_epsilon = 8.0                    # over the life of this node's ledger, all runs together
    observer = "server"                      # against whom: server, participants, public, client-process
    unit = "example"                         # example, client or reported-weight
    delta = 1e-5
    maximum_report_epsilon = 1.0             # two-valued reports: epsilon of one weight
    changes = ["sigma", "clip.bound"]        # parts of a recipe that a run may change
    models = ["clinic.nets:small"]           # own model functions that may be imported here
    secure_noise = true                      # refuse noise that someone could repeat
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fedveil.errors import UserError, did_you_mean
from fedveil.privacy.events import Observer, Unit

if TYPE_CHECKING:
    from fedveil.federation.config import RunConfig
    from fedveil.protect.recipe import Recipe

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

NODE_KEYS = ("home", "policy", "data", "datasets", "partition-id", "num-partitions", "trainer", "shuffler")


class Refused(Exception):
    """The owner does not allow this. The text is told to the server: it must not depend on private data."""


@dataclass(frozen=True)
class Owner:
    """One node as its owner set it up (SuperNode --node-config).

    home: folder of ledger and logs. policy: the policy file. client: this node's number. data: the owner's own
    file; without it the node plays part `client` of a built-in dataset (for trying out). datasets: folder
    of the built-in datasets. trainer: socket of the persistent trainer. shuffler: address of the shuffler.
    """

    home: Path
    policy: Path
    client: int
    data: str = ""
    datasets: str = ""
    trainer: str = ""
    shuffler: str = ""


@dataclass(frozen=True)
class Policy:
    """What the owner allows; see the module's text."""

    recipes: tuple[str, ...]
    minimum_sigma: float = 0.0
    maximum_epsilon: float | None = None
    observer: Observer = "server"
    unit: Unit = "example"
    delta: float = 1e-5
    maximum_report_epsilon: float = math.inf
    changes: tuple[str, ...] = ("sigma", "clip.bound")
    models: tuple[str, ...] = ()
    secure_noise: bool = True


def owner_of(node_config: Mapping[str, Any]) -> Owner:
    """Read a SuperNode's --node-config; a wrong or missing key names itself."""
    for key in node_config:
        if key not in NODE_KEYS:
            raise UserError(f"--node-config: unknown key '{key}'.{did_you_mean(key, NODE_KEYS)}")
    for key in ("home", "policy", "partition-id"):
        if key not in node_config:
            raise UserError(
                f"--node-config: '{key}' is missing. Nothing is trained without a folder for the ledger (home), a "
                "policy file (policy) and this node's number (partition-id); see docs/deploy.md"
            )
    text = {key: str(node_config.get(key, "")) for key in NODE_KEYS}
    return Owner(
        home=Path(text["home"]),
        policy=Path(text["policy"]),
        client=int(node_config["partition-id"]),
        data=text["data"],
        datasets=text["datasets"],
        trainer=text["trainer"],
        shuffler=text["shuffler"],
    )


def read_policy(path: Path) -> Policy:
    """Read a policy file; every wrong key or value is an error, because a misspelt limit would limit nothing."""
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as wrong:
        raise UserError(f"policy file {path}: {wrong.strerror}; write one as in docs/deploy.md") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
        raise UserError(f"policy file {path}: not valid TOML: {wrong}") from None
    known = {item.name: item for item in fields(Policy)}
    for key in values:
        if key not in known:
            raise UserError(f"policy file {path}: unknown key '{key}'.{did_you_mean(key, known)}")
    if "recipes" not in values:
        raise UserError(f"policy file {path}: 'recipes' is missing: list the recipes that may be trained")
    for key, value in values.items():
        _check_value(path, key, value)
    found: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    return Policy(**found)


def _check_value(path: Path, key: str, value: Any) -> None:
    def need(good: bool, what: str) -> None:
        if not good:
            raise UserError(f"policy file {path}: {key} = {value!r}: {what}")

    if key in ("recipes", "changes", "models"):
        need(isinstance(value, list) and all(isinstance(v, str) for v in value), "expected a list of names")
    elif key == "secure_noise":
        need(isinstance(value, bool), "expected true or false")
    elif key in ("observer", "unit"):
        allowed = get_args(Observer if key == "observer" else Unit)
        need(value in allowed, f"expected one of {', '.join(allowed)}.{did_you_mean(str(value), allowed)}")
    else:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        need(number and value >= 0, "expected a number that is not negative")
        need(key != "delta" or 0 < value < 1, "expected a number between 0 and 1")


def deployable(recipe: Recipe, shuffler: bool = False) -> None:
    """UserError where Flower cannot keep what the recipe promises: the SuperLink sees each upload and its sender."""
    if recipe.place.sum_only:
        raise UserError(
            f"recipe '{recipe.name}' promises that nobody sees a part of the sum (where = sum); over Flower the server "
            "sees each upload, so the promise would be none. Use a recipe with noise at the client (where = step or client)"
        )
    if recipe.channel.hides_senders and not recipe.channel.hides_reports:
        raise UserError(
            "channel = shuffle-models: the SuperLink knows who sent each model, so nothing is shuffled. "
            "Set channel = none, or channel = shuffle-parameters with a shuffler of its own"
        )
    if recipe.channel.hides_reports and not shuffler:
        raise UserError(
            "channel = shuffle-parameters needs a shuffler beside Flower, because the SuperLink knows each sender: "
            'name it (shuffler = "tcp:HOST:PORT", on server and nodes), or set channel = none'
        )


def allow_config(policy: Policy, config: RunConfig, recipe: Recipe, secure: bool) -> None:
    """Refuse what the owner did not allow and what can be told before any round."""
    if policy.secure_noise and not secure:
        raise Refused(
            "policy: the noise of this app could be repeated; secure_noise = true does not allow that"
        )
    if recipe.name not in policy.recipes:
        raise Refused(
            f"policy: recipe '{recipe.name}' is not allowed here ({', '.join(policy.recipes) or 'none'} is)"
        )
    for key in _flat(config.protect):
        if key not in policy.changes:
            raise Refused(
                f"policy: a run may not change '{key}' of a recipe here ({', '.join(policy.changes)} it may)"
            )
    if ":" in config.model and config.model not in policy.models:
        raise Refused("policy: the model is a function of the server's choice that would be imported here; "
                      "list it in `models` to allow it")  # fmt: skip


def allow_round(
    policy: Policy, recipe: Recipe, sigmas: tuple[float, ...], report_epsilon: float | None
) -> None:
    """Refuse weaker noise than the owner allowed, in any step of this round."""
    if recipe.private and recipe.law is None:
        if report_epsilon is None or not report_epsilon <= policy.maximum_report_epsilon:
            raise Refused(
                f"policy: epsilon {report_epsilon} per reported weight, at most {policy.maximum_report_epsilon:g} is allowed"
            )
    elif policy.minimum_sigma > 0 and (not recipe.private or not min(sigmas) >= policy.minimum_sigma):
        least = min(sigmas) if recipe.private else 0.0
        raise Refused(
            f"policy: sigma {least:g} in this round, at least {policy.minimum_sigma:g} is asked for"
        )


def _flat(changes: Mapping[str, Any]) -> list[str]:
    """Dotted names of changed recipe parts."""
    out = []
    for key, value in changes.items():
        out += [f"{key}.{inner}" for inner in value] if isinstance(value, Mapping) else [key]
    return out
