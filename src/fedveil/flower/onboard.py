"""Papers of a study: a contract from a configuration, and nodes that join, leave and change their keys.

The study's owner invites (a signed file with address, certificate and contract), the node's owner accepts (keys are made
on the node and stay there) and sends the answer back, the study's owner admits it to the roster. Files may travel by
mail: an invitation holds no secret but a token that is good for one number until it expires, and the answer proves that
its sender holds the new keys.
"""

from __future__ import annotations

import csv
import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import UserError
from fedveil.flower import books, identity, limits
from fedveil.flower import roster as rosters
from fedveil.flower.contract import (
    SMALLEST_CLIP,
    Allowed,
    Bounds,
    Checks,
    Contract,
    Data,
    Model,
    SumTerms,
    allowed_name,
    from_json,
    package_digest,
    read_contract,
    recipe_digest,
    to_toml,
)
from fedveil.flower.roster import Member, Roster
from fedveil.jsons import Document, JsonObject

if TYPE_CHECKING:
    from fedveil.federation.config import RunConfig
    from fedveil.privacy.events import Observer, Unit

INVITE, JOINED, ROTATED = "fedveil invite 1", "fedveil joined 1", "fedveil rotated 1"


# --- a contract from a study ---


def bounds_of(config: RunConfig, parameters: int) -> Bounds:
    """Bounds that allow this configuration and nothing beside it, but smaller steps."""
    recipe = config.built_recipe()
    clips, sigmas = (
        [s.value(t, config.rounds) for t in range(config.rounds)] for s in (recipe.clip.bound, recipe.sigma)
    )
    tracked = bool(recipe.clip.rule.beside()) or recipe.clip.rule.rescales
    low, high = min(clips) / (1000 if tracked else 1), max(clips) * (1000 if tracked else 1)
    if config.fixed_variance is not None:
        sigmas = [config.fixed_variance / c for c in clips]
    open_noise = config.calibrate or config.client_epsilons or recipe.formula is not None
    rates = [config.learning_rate, config.learning_rate_end or config.learning_rate]
    return Bounds(
        sigma=(
            0.0 if recipe.law is None else 0.1 if open_noise else min(sigmas),
            1e6,
        ),
        clip=(max(low, SMALLEST_CLIP), high),
        learning_rate=(0.0, max(rates)),
        batch=(config.batch_size, config.batch_size),
        local_steps=config.local_steps,
        rounds=config.rounds,
        momentum=config.momentum,
        report_epsilon=recipe.epsilon
        if recipe.private and recipe.law is None and recipe.epsilon
        else math.inf,
        parameters=parameters,
    )


def contract_of_study(
    config: RunConfig,
    data: Data,
    *,
    study: str,
    epsilon: float | None,
    observer: Observer = "server",
    unit: Unit = "example",
    delta: float = 1e-5,
    valid_until: str = "",
    submitters: Sequence[str] = (),
    version: int = 1,
    roster_owner: str = "",
) -> Contract:
    """The contract under which exactly this study can run on such data. roster_owner: public key that signs the roster."""
    from fedveil.federation.checks import architecture_digest
    from fedveil.federation.loop import with_features
    from fedveil.flower.owndata import empty_dataset
    from fedveil.flower.owner import deployable
    from fedveil.models import nets
    from fedveil.models.layout import layout_of
    from fedveil.protect.law import clip_for
    from fedveil.protect.recipe import with_changes

    recipe = config.built_recipe()
    deployable(recipe, shuffler=True, secure_sum=config.secure_sum)
    form = with_features(empty_dataset(data), config)
    name = nets.default_model(form) if config.model == "auto" else config.model
    module = nets.build(name, form.shape, form.classes, config.seed, **config.model_options)
    digests = [recipe_digest(recipe)]
    for mechanism in config.client_mechanisms or ():
        own = with_changes(recipe, {"mechanism": mechanism, **clip_for(mechanism)})
        digests.append(recipe_digest(own))
    named = allowed_name(config, recipe)
    code = package_digest(named) if ":" in named else ""
    options = limits.canonical(config.model_options).decode()
    layout = layout_of(module)
    net = "" if config.features else architecture_digest(module, layout)  # features change the net's input
    made = Contract(
        study=study,
        version=version,
        recipes=tuple(Allowed(named, digest, code) for digest in dict.fromkeys(digests)),
        epsilon=epsilon,
        data=data,
        valid_until=valid_until,
        observer=observer,
        unit=unit,
        delta=delta,
        models=(Model(name, options, package_digest(name) if ":" in name else "", net),),
        bounds=bounds_of(config, layout.size),
        checks=Checks(structure=True, change=True),
        submitters=tuple(submitters),
        features=(config.features,) if config.features else (),
        sum=_sum_terms(config, roster_owner) if config.secure_sum else None,
    )
    try:
        from_json(json.loads(limits.canonical(_plain(made))))
    except limits.Malformed as wrong:
        raise UserError(str(wrong)) from None
    return made


def _sum_terms(config: RunConfig, roster_owner: str) -> SumTerms:
    """The study's own threshold and colluders, over a roster that this key signs."""
    from fedveil.federation.sums import Terms

    if not roster_owner:
        raise UserError(
            "a secure sum needs the public key of the one who signs the roster (--roster-owner): a node masks for the keys on it"
        )
    terms = Terms.of(config.clients, config.sum_threshold, config.sum_colluders)
    return SumTerms(terms.threshold, terms.colluders, owner=roster_owner)


def _plain(contract: Contract) -> JsonObject:
    from fedveil.flower.contract import to_json

    return to_json(contract)


def data_of_public(
    path: Path, target: str, examples: int, ranges: Mapping[str, tuple[float, float]], classes: Sequence[str]
) -> Data:
    """The [data] of a contract from a *public* file: its columns in order, their ranges there, its classes.

    ranges and classes given by hand go first. Never point this at private rows: their smallest and largest values would
    be published.
    """
    if path.suffix == ".npz":
        return _data_of_arrays(path, examples, classes)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = [[cell.strip() for cell in line] for line in csv.reader(file) if line]
    except (OSError, UnicodeDecodeError, csv.Error) as wrong:
        raise UserError(f"{path}: not a readable table ({wrong})") from None
    if len(rows) < 2 or target not in rows[0]:
        raise UserError(f"{path}: no rows, or no column '{target}' (--target) in its header")
    header, body = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    columns = []
    for at, name in enumerate(header):
        if name == target:
            continue
        columns.append((name, *(ranges.get(name) or _range_of([row[at] for row in body], name, path))))
    for name in ranges:
        if name not in header:
            raise UserError(f"--range {name}: {path} has no such column")
    labels = sorted({row[header.index(target)] for row in body}, key=_order)
    names = list(classes) or labels
    return Data(target, tuple(names), examples, tuple(columns))


def _data_of_arrays(path: Path, examples: int, classes: Sequence[str]) -> Data:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as archive:
            shape, y = archive["x"].shape[1:], archive["y"]
    except (OSError, ValueError, KeyError, EOFError) as wrong:
        raise UserError(f"{path}: not an .npz with arrays x and y ({wrong})") from None
    count = int(y.max()) + 1 if y.size else 0
    names = tuple(classes) or tuple(str(n) for n in range(count))
    return Data("", names, examples, shape=tuple(int(n) for n in shape))


def _range_of(cells: Sequence[str], name: str, path: Path) -> tuple[float, float]:
    try:
        values = [float(cell) for cell in cells]
    except ValueError:
        raise UserError(
            f"{path}: column '{name}' is not numeric; features of a contract are numbers"
        ) from None
    low, high = min(values), max(values)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(f"{path}: column '{name}' holds numbers that are not finite")
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _order(label: str) -> tuple[int, float, str]:
    """Numbers in their order, then words in theirs."""
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


# --- joining ---


@dataclass(frozen=True)
class Joined:
    """What `accept` made on a node: the answer to send back, and the node's settings."""

    answer: Path
    node_config: str
    contract: Contract | None


def _signed_document(kind: str, facts: dict[str, object], secret: bytes) -> str:
    body = {"format": kind, **facts}
    made = {"document": body, "signature": identity.sign(secret, kind, limits.canonical(body)).hex()}
    return json.dumps(made, indent=2) + "\n"


def _read_signed(path: Path, kind: str, must: Mapping[str, limits.Check], key: str) -> Document:
    """The document in `path`, signed by the public key that it names under `key`."""
    value = limits.json_file(path, kind)
    try:
        top = limits.fields(
            value, kind, {"document": lambda v: isinstance(v, dict), "signature": limits.is_hex(64)}
        )
        body = limits.fields(top["document"], kind, {"format": limits.is_one_of([kind]), **must})
    except limits.Malformed as wrong:
        raise UserError(f"{path}: {wrong}") from None
    if not identity.verify(
        bytes.fromhex(body[key]), kind, limits.canonical(body), bytes.fromhex(top["signature"])
    ):
        raise UserError(f"{path}: its signature is wrong; it was changed or is not from whom it says")
    return body


_INVITE: dict[str, limits.Check] = {
    "study": limits.is_text(200, 1),
    "owner": limits.is_hex(32),
    "number": limits.is_int(0, 2**31),
    "name": limits.is_text(100, 1),
    "superlink": limits.is_text(300),
    "ca": lambda v: isinstance(v, str) and len(v) < 100_000,
    "contract": lambda v: isinstance(v, str) and len(v) < limits.FILE,
    "digest": lambda v: v == "" or limits.is_hex(32)(v),
    "token": limits.is_hex(16),
    "expires": limits.is_int(0, 2**40),
}
_JOINED: dict[str, limits.Check] = {
    "study": limits.is_text(200, 1),
    "number": limits.is_int(0, 2**31),
    "name": limits.is_text(100, 1),
    "token": limits.is_hex(16),
    "identity": limits.is_hex(32),
    "supernode": limits.is_text(1000),
}
_ROTATED: dict[str, limits.Check] = {
    "study": limits.is_text(200, 1),
    "number": limits.is_int(0, 2**31),
    "identity": limits.is_hex(32),
    "supernode": limits.is_text(1000),
    "before": limits.is_hex(32),
    "proof": limits.is_hex(64),
}
_PENDING = {key: _INVITE[key] for key in ("number", "name", "expires")}
_STUDY = {key: _INVITE[key] for key in ("study", "owner", "number", "name")}


def open_roster(path: Path, study: str = "") -> Roster:
    """The roster in `path`, or a new one of this study."""
    if path.exists():
        return rosters.read_roster(path)
    if not study:
        raise UserError(f"{path} does not exist; name the study to begin a roster (--study)")
    return Roster(study, 1)


def invite(
    path: Path,
    roster: Path,
    secret: bytes,
    name: str,
    *,
    study: str = "",
    number: int | None = None,
    superlink: str = "",
    ca: Path | None = None,
    contract: Path | None = None,
    days: int = 14,
) -> int:
    """Write an invitation for a new node; returns its number."""
    known = open_roster(roster, study)
    pending = _pending(roster)
    taken = {m.number for m in known.members} | set(known.retired) | {p["number"] for p in pending.values()}
    mine = min(set(range(len(taken) + 1)) - taken) if number is None else number
    if mine in taken:
        raise UserError(f"number {mine} is taken, retired or promised in an open invitation")
    if path.exists():
        raise UserError(f"{path} exists; choose another file")
    agreed = read_contract(contract) if contract else None
    token = secrets.token_hex(16)
    expires = int(time.time()) + days * 86_400
    facts = {
        "study": known.study,
        "owner": identity.public_of(secret).hex(),
        "number": mine,
        "name": name,
        "superlink": superlink,
        "ca": "" if ca is None else limits.read_file(ca, "certificate", 100_000).decode("utf-8", "replace"),
        "contract": "" if agreed is None else to_toml(agreed),
        "digest": "" if agreed is None else agreed.digest,
        "token": token,
        "expires": expires,
    }
    if not roster.exists():
        rosters.write_roster(roster, known, secret)
    _write_pending(roster, {**pending, token: {"number": mine, "name": name, "expires": expires}})
    path.write_text(_signed_document(INVITE, facts, secret), "utf-8")
    return mine


def _pending_path(roster: Path) -> Path:
    return roster.with_name(roster.name + ".invited")


def _pending(roster: Path) -> dict[str, JsonObject]:
    path = _pending_path(roster)
    if not path.exists():
        return {}
    found, now = limits.json_file(path, "open invitations"), time.time()
    try:
        if not isinstance(found, dict):
            raise limits.Malformed("expected a table of invitations")
        read = {token: limits.fields(told, "open invitation", _PENDING) for token, told in found.items()}
    except limits.Malformed as wrong:
        raise UserError(f"{path}: {wrong}") from None
    return {token: told for token, told in read.items() if told["expires"] > now}


def _write_pending(roster: Path, values: JsonObject) -> None:
    from fedveil.flower.stack import write_secret

    write_secret(_pending_path(roster), json.dumps(values).encode())


def accept(path: Path, home: Path, data: str = "", answer: Path | None = None) -> Joined:
    """On the node: make keys, write contract, certificate and settings below `home`, and the answer to send back."""
    from fedveil.flower.stack import make_node_key

    told = _read_signed(path, INVITE, _INVITE, "owner")
    if told["expires"] < time.time():
        raise UserError(f"{path}: the invitation has expired; ask for a new one")
    if (home / "identity").exists():
        raise UserError(f"{home} already holds a node's identity; keys are never overwritten")
    books.private_folder(home)
    public = identity.write_identity(home / "identity")
    make_node_key(home / "supernode")
    agreed = None
    settings: JsonObject = {"home": str(home.absolute() / "books"), "partition-id": told["number"],
                                "identity": str(home.absolute() / "identity")}  # fmt: skip
    if told["contract"]:
        (home / "contract.toml").write_text(told["contract"], "utf-8")
        agreed = read_contract(home / "contract.toml", pinned=told["digest"])
        settings |= {"contract": str(home.absolute() / "contract.toml"), "contract-digest": agreed.digest}
        if agreed.sum is not None:  # the owner brings it once everybody has joined
            settings["roster"] = str(home.absolute() / "roster.json")
    if data:
        settings["data"] = str(Path(data).absolute())
    if told["ca"]:
        (home / "ca.crt").write_text(told["ca"], "utf-8")
    (home / "superlink").write_text(told["superlink"] + "\n", "utf-8")
    text = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    (home / "node-config").write_text(text + "\n", "utf-8")
    facts = {key: told[key] for key in ("study", "number", "name", "token")}
    facts |= {"identity": public.hex(), "supernode": (home / "supernode.pub").read_text("utf-8").strip()}
    back = answer or path.with_name(f"{told['name']}.joined.json")
    back.write_text(_signed_document(JOINED, facts, identity.read_identity(home / "identity")), "utf-8")
    (home / "study.json").write_text(
        json.dumps({k: told[k] for k in ("study", "owner", "number", "name")}), "utf-8"
    )
    return Joined(back, text, agreed)


def admit(path: Path, roster: Path, secret: bytes) -> tuple[Roster, list[str]]:
    """Take a node's answer (a joined or a rotated file) into the roster; (new roster, what changed)."""
    old = rosters.read_roster(roster, owner=identity.public_of(secret))
    value = limits.json_file(path, "answer")
    kind = (
        value.get("document", {}).get("format")
        if isinstance(value, dict) and isinstance(value.get("document"), dict)
        else None
    )
    if kind == ROTATED:
        new = _rotated(path, old)
    else:
        told = _read_signed(path, JOINED, _JOINED, "identity")
        pending = _pending(roster)
        promised = pending.get(told["token"])
        if promised is None or (promised["number"], promised["name"]) != (told["number"], told["name"]):
            raise UserError(
                f"{path}: no open invitation has this token and number; it expired or was used already"
            )
        if told["study"] != old.study:
            raise UserError(f"{path}: belongs to the study '{limits.plain(told['study'], 60)}'")
        new = rosters.add(
            old, Member(told["number"], told["name"], bytes.fromhex(told["identity"]), told["supernode"])
        )
        _write_pending(roster, {k: v for k, v in pending.items() if k != told["token"]})
    rosters.write_roster(roster, new, secret)
    return new, rosters.changes(old, new)


def _rotated(path: Path, old: Roster) -> Roster:
    told = _read_signed(path, ROTATED, _ROTATED, "identity")
    member = old.member(told["number"])
    body = limits.canonical({k: told[k] for k in ("study", "number", "identity", "supernode")})
    known = told["before"] == member.identity.hex() and told["study"] == old.study
    if not known or not identity.verify(member.identity, "rotate", body, bytes.fromhex(told["proof"])):
        raise UserError(f"{path}: not signed by the node's present key; remove the node and invite it anew")
    return rosters.rotate(old, member.number, bytes.fromhex(told["identity"]), told["supernode"])


def rotate(home: Path, answer: Path) -> Path:
    """On the node: new keys beside the old ones, and a statement signed by both; `finish_rotation` puts them to use."""
    from fedveil.flower.stack import make_node_key

    try:
        about = limits.fields(limits.json_file(home / "study.json", "study"), "study", _STUDY)
    except limits.Malformed as wrong:
        raise UserError(f"{home / 'study.json'}: {wrong}") from None
    secret = identity.read_identity(home / "identity")
    if (home / "identity.new").exists():
        raise UserError(f"{home}/identity.new exists: a rotation is under way")
    public = identity.write_identity(home / "identity.new")
    make_node_key(home / "supernode.new")
    facts = {"study": about["study"], "number": about["number"], "identity": public.hex(),
             "supernode": (home / "supernode.new.pub").read_text("utf-8").strip()}  # fmt: skip
    proof = identity.sign(secret, "rotate", limits.canonical(facts)).hex()
    document = {**facts, "before": identity.public_of(secret).hex(), "proof": proof}
    answer.write_text(
        _signed_document(ROTATED, document, identity.read_identity(home / "identity.new")), "utf-8"
    )
    return answer


def finish_rotation(home: Path) -> None:
    """On the node, once the roster knows the new keys: put them in the place of the old ones."""
    if not (home / "identity.new").exists():
        raise UserError(f"{home}: no rotation is under way")
    for name in ("supernode.pub", "supernode", "identity"):
        new = home / (name.replace("supernode", "supernode.new") if name != "identity" else "identity.new")
        if new.exists():
            new.replace(home / name)


def remove(roster: Path, number: int, secret: bytes) -> tuple[Roster, list[str]]:
    """Take a node out of the roster; its number is retired."""
    old = rosters.read_roster(roster, owner=identity.public_of(secret))
    new = rosters.remove(old, number)
    rosters.write_roster(roster, new, secret)
    return new, rosters.changes(old, new)


def summary(contract: Contract) -> list[str]:
    """The contract in sentences, for the owner who is asked to agree."""
    data, bounds = contract.data, contract.bounds
    budget = (
        "no limit and no promise"
        if contract.epsilon is None
        else f"epsilon {contract.epsilon:g} (delta {contract.delta:g})"
    )
    said = [
        f"study '{contract.study}', version {contract.version}"
        + (f", until {contract.valid_until}" if contract.valid_until else ""),
        f"{budget} about one {contract.unit} against '{contract.observer}', for the life of the ledger",
        "recipes: " + ", ".join(f"{item.name} ({item.digest[:12]}…)" for item in contract.recipes),
        f"noise multiplier {bounds.sigma[0]:g} or more, clip bound {bounds.clip[0]:g} to {bounds.clip[1]:g}, learning rate up to "
        f"{bounds.learning_rate[1]:g}, {bounds.local_steps} local steps and {bounds.rounds} rounds at most",
    ]
    if data is not None:
        what = f"{len(data.columns)} columns" if data.columns else f"arrays of shape {list(data.shape)}"
        kind = f"classes {', '.join(data.classes[:10])}" if data.classes else "a number"
        said.append(f"data: {data.examples} records, {what}, target '{data.target}' ({kind})")
    looks = [word for word in ("structure", "change") if getattr(contract.checks, word)]
    said.append("models are checked before training: the first one, bit by bit" + "".join(f", {word}" for word in looks))
    if contract.features:
        said.append("fixed features in front: " + ", ".join(contract.features))
    if contract.sum is not None:
        terms = contract.sum
        signer = identity.fingerprint(bytes.fromhex(terms.owner))
        whose = f"of digest {terms.roster[:16]}…" if terms.roster else f"signed by {signer}"
        said.append(
            f"secure sums: opened only with {terms.threshold} nodes or more of the roster {whose}; {terms.colluders} nodes or "
            "more are taken to collude with the server"
        )
    said.append("signed requests only, of " + ", ".join(identity.fingerprint(bytes.fromhex(k)) for k in contract.submitters)
                if contract.submitters else "requests of anybody whom the SuperLink lets in")  # fmt: skip
    return said
