"""What the owner of a node decides, on the node: where its data and books are, and what it allows.

What is allowed stands in a contract (`flower.contract`). The older policy files are still read, for nodes that play a
part of a built-in dataset; every key is optional except `recipes` and `maximum_epsilon`:

    recipes = ["fed-cdp", "fed-cdp-sound"]   # nothing else is trained
    minimum_sigma = 6.0                      # noise multiplier, of every step
    maximum_epsilon = 8.0                    # over the life of this node's ledger; "unlimited" promises nothing
    observer = "server"                      # against whom: server, participants, public, client-process
    unit = "example"                         # example, client or reported-weight
    delta = 1e-5
    maximum_report_epsilon = 1.0             # two-valued reports: epsilon of one weight
    changes = ["sigma", "clip.bound"]        # parts of a recipe that a run may change
    models = ["clinic.nets:small"]           # own model functions that may be imported here
    secure_noise = true                      # refuse noise that someone could repeat
    sum_threshold = 6                        # secure sums: nodes that must survive,
    sum_colluders = 1                        # nodes that may collude with the server, and
    sum_roster = "3f…"                       # the digest of the roster
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fedveil.errors import UserError, did_you_mean
from fedveil.flower import limits
from fedveil.flower.contract import Allowed, Bounds, Contract, Model, Refused, SumTerms, read_contract
from fedveil.jsons import Document
from fedveil.privacy.events import Observer, Unit

if TYPE_CHECKING:
    from fedveil.protect.recipe import Recipe

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

__all__ = ["Owner", "Policy", "Refused", "contract_of", "deployable", "owner_of", "read_policy", "tomllib"]

NODE_KEYS = (
    "home", "policy", "contract", "contract-digest", "contract-owner", "identity", "anchor", "data", "datasets",
    "partition-id", "num-partitions", "trainer", "shuffler", "roster", "witness", "witness-key",
)  # fmt: skip
HINT = (
    "a policy file says nothing about columns, classes and target, so the server would choose them. Write a contract: "
    "`fedveil flower contract` (docs/contract.md)"
)


@dataclass(frozen=True)
class Owner:
    """One node as its owner set it up (SuperNode --node-config).

    home: folder of ledger and logs. contract: the contract's file, with contract_digest (pinned) or contract_owner
    (public key that signed it); or policy: an old policy file. client: this node's number. data: the owner's own
    file; without it the node plays part `client` of a built-in dataset (for trying out). datasets: folder of the
    built-in datasets. identity: file of the key that signs replies. anchor: second place where the head of the ledger
    is kept. trainer: socket of the persistent trainer. shuffler: address of the shuffler. roster: file of all nodes' keys,
    for secure sums. witness, witness_key: address and public key of the host that signs the ledger's head.
    """

    home: Path
    client: int
    policy: str = ""
    contract: str = ""
    contract_digest: str = ""
    contract_owner: str = ""
    identity: str = ""
    anchor: str = ""
    data: str = ""
    datasets: str = ""
    trainer: str = ""
    shuffler: str = ""
    roster: str = ""
    witness: str = ""
    witness_key: str = ""


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
    sum_threshold: int = 0
    sum_colluders: int = 1
    sum_roster: str = ""


def owner_of(node_config: Mapping[str, object]) -> Owner:
    """Read a SuperNode's --node-config; a wrong or missing key names itself."""
    for key in node_config:
        if key not in NODE_KEYS:
            raise UserError(f"--node-config: unknown key '{key}'.{did_you_mean(key, NODE_KEYS)}")
    for key in ("home", "contract", "partition-id"):
        if key not in node_config and not (key == "contract" and "policy" in node_config):
            raise UserError(
                f"--node-config: '{key}' is missing. Nothing is trained without a folder for the ledger (home), a "
                "contract (contract, with contract-digest or contract-owner) and this node's number (partition-id); "
                "see docs/deploy.md"
            )
    if "contract" in node_config and "policy" in node_config:
        raise UserError("--node-config: give a contract or an old policy file, not both")
    number = node_config["partition-id"]
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**31:
        raise UserError(f"--node-config: partition-id = {number!r} is no number of a client (0, 1, 2, …)")
    text = {key.replace("-", "_"): str(node_config.get(key, "")) for key in NODE_KEYS}
    home = Path(text.pop("home"))
    rest = {item.name: text[item.name] for item in fields(Owner) if item.name in text}
    return Owner(home=home, client=number, **rest)


def contract_of(owner: Owner) -> Contract:
    """The contract in force at this node, read and checked anew for every message; an old policy as a contract."""
    if not owner.contract:
        if owner.data:
            raise UserError(f"--node-config: data needs a contract: {HINT}")
        return from_policy(read_policy(Path(owner.policy)))
    if not owner.contract_digest and not owner.contract_owner:
        raise UserError(
            "--node-config: a contract is pinned (contract-digest) or signed (contract-owner, the public key); "
            "`fedveil flower contract --show FILE` prints the digest"
        )
    key = None
    if owner.contract_owner:
        if not limits.is_hex(32)(owner.contract_owner):
            raise UserError("--node-config: contract-owner is a public key of 64 hexadecimal digits")
        key = bytes.fromhex(owner.contract_owner)
    return read_contract(owner.contract, pinned=owner.contract_digest, owner=key)


def from_policy(policy: Policy) -> Contract:
    """An old policy as a contract, with the built-in bounds for what a policy cannot say."""
    return Contract(
        study="policy file",
        version=1,
        recipes=tuple(Allowed(name) for name in policy.recipes),
        epsilon=policy.maximum_epsilon,
        observer=policy.observer,
        unit=policy.unit,
        delta=policy.delta,
        models=tuple(Model(name) for name in policy.models),
        bounds=Bounds(sigma=(policy.minimum_sigma, 1e6), report_epsilon=policy.maximum_report_epsilon),
        secure_noise=policy.secure_noise,
        legacy=True,
        changes=policy.changes,
        sum=SumTerms(policy.sum_threshold, policy.sum_colluders, policy.sum_roster) if policy.sum_roster else None,
    )


def read_policy(path: Path) -> Policy:
    """Read a policy file; every wrong key or value is an error, because a misspelt limit would limit nothing."""
    values = limits.read_toml(path, "policy file")
    known = {item.name: item for item in fields(Policy)}
    for key in values:
        if key not in known:
            raise UserError(f"policy file {path}: unknown key '{key}'.{did_you_mean(key, known)}")
    if "recipes" not in values:
        raise UserError(f"policy file {path}: 'recipes' is missing: list the recipes that may be trained")
    for key, value in values.items():
        _check_value(path, key, value)
    if "maximum_epsilon" not in values:
        raise UserError(
            f"policy file {path}: 'maximum_epsilon' is missing: without it nothing would ever stop a run. Give a number, or "
            '"unlimited" if nothing is to be promised'
        )
    if values["maximum_epsilon"] == "unlimited":
        values["maximum_epsilon"] = None
    found: Document = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    return Policy(**found)


def _check_value(path: Path, key: str, value: Any) -> None:
    def need(good: bool, what: str) -> None:
        if not good:
            raise UserError(f"policy file {path}: {key} = {value!r}: {what}")

    if key in ("recipes", "changes", "models"):
        need(isinstance(value, list) and all(isinstance(v, str) for v in value), "expected a list of names")
    elif key == "maximum_epsilon" and value == "unlimited":
        pass
    elif key == "sum_roster":
        need(limits.is_hex(32)(value), "expected the digest of a roster, 64 hexadecimal digits")
    elif key in ("sum_threshold", "sum_colluders"):
        need(limits.is_int(0, 4096)(value), "expected a number of nodes")
    elif key == "secure_noise":
        need(isinstance(value, bool), "expected true or false")
    elif key in ("observer", "unit"):
        allowed = get_args(Observer if key == "observer" else Unit)
        need(value in allowed, f"expected one of {', '.join(allowed)}.{did_you_mean(str(value), allowed)}")
    else:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        need(number and value >= 0, "expected a number that is not negative")
        need(key != "delta" or 0 < value < 1, "expected a number between 0 and 1")


def deployable(recipe: Recipe, shuffler: bool = False, secure_sum: bool = False) -> None:
    """UserError where Flower cannot keep what the recipe promises: the SuperLink sees each upload and its sender."""
    if recipe.noise_on.for_each:
        raise UserError(
            "noise_on = example adds noise by how many examples there are: a training that fails would be told by its absence. "
            "Use noise_on = sum"
        )
    if recipe.place.sum_only and not secure_sum:
        raise UserError(
            f"recipe '{recipe.name}' promises that nobody sees a part of the sum (where = sum); over Flower the server "
            "sees each upload, so the promise would be none. Add --secure-sum (secure_sum = true), or use a recipe with noise at "
            "the client (where = step or client)"
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
