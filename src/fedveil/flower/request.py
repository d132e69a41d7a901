"""What a server may ask of a node, read strictly: every key, type, size and count is checked before it is used."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.errors import UserError
from fedveil.flower import identity, limits
from fedveil.flower.contract import Contract, Refused, own_recipe
from fedveil.jsons import Document, JsonObject

if TYPE_CHECKING:
    from fedveil.federation.config import RunConfig
    from fedveil.federation.round import State, Task
    from fedveil.protect.recipe import Recipe

SIGNED_AS = "request"
MOST_CLIENTS = 100_000

_HELLO: dict[str, limits.Check] = {"config": lambda v: isinstance(v, dict)}
_ALWAYS: dict[str, limits.Check] = {
    "format": limits.is_int(1, 1),
    "data": lambda v: v is None or limits.is_hex(32)(v),
    "nonce": limits.is_hex(16),
    "submitter": limits.is_hex(32),
    "signature": limits.is_hex(64),
    "roster": limits.is_hex(32),
    "version": limits.is_text(40),
    "witness": lambda v: isinstance(v, dict),
}
_ROUND: dict[str, limits.Check] = {
    **_HELLO,
    "run": limits.is_text(64),
    "examples": limits.is_int(1, 2**40),
    "shape": limits.is_list(limits.is_int(1, 10**6), 4),
    "classes": lambda v: v is None or limits.is_int(2, 10_000)(v),
    "model": limits.is_text(200, 1),
    "round": limits.is_int(0, 10**7),
    "ticket": limits.is_int(0, 2**62),
}
_SUM: dict[str, limits.Check] = {
    "run": limits.is_hex(16),
    "attempt": limits.is_int(0, 2**32 - 1),
    "size": limits.is_int(0, 2**30),
}


def _is_sum(value: object) -> bool:
    try:
        return bool(limits.fields(value, "sum", _SUM))
    except limits.Malformed:
        return False


_ROUND_MAY: dict[str, limits.Check] = {
    **_ALWAYS,
    "sigma": lambda v: v is None or limits.is_number(1e-6, 1e9)(v),
    "shuffler key": limits.is_hex(32),
    "group": limits.is_int(1, 65535),
    "sum": _is_sum,
}


@dataclass(frozen=True)
class Request:
    """A well-formed request. base: the run's recipe; recipe: this client's own. shape None: a greeting."""

    config: RunConfig
    base: Recipe
    recipe: Recipe
    model: str
    run: str = ""
    examples: int = 1
    shape: tuple[int, ...] | None = None
    classes: int | None = None
    round: int = 0
    ticket: int = 0
    sigma: float | None = None
    data: str | None = None
    nonce: str = ""
    submitter: bytes | None = None
    roster: str = ""
    version: str = ""
    group: int = 1
    shuffler_key: str = ""
    witness: Mapping[str, object] | None = None
    sum: Document | None = None  # which attempt of a secure sum a message belongs to, and its size


def read_request(
    kind: str, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], client: int, contract: Contract
) -> Request:
    """The request that these facts make; `Refused` names the first thing that is wrong with them.

    contract: decides whether a recipe that is code of the owner's own may be imported at all."""
    try:
        forms = (_HELLO, {**_ROUND, **_ROUND_MAY}) if kind == "hello" else (_ROUND, _ROUND_MAY)
        found = limits.fields(dict(facts), "request", *forms)
    except limits.Malformed as wrong:
        raise Refused(str(wrong)) from None
    config, base, recipe = _configured(found["config"], client, contract)
    if found.get("sigma") is not None and not config.client_epsilons:
        raise Refused("request: a noise multiplier of its own for a client needs client_epsilons")
    if kind == "round" and config.secure_sum != ("sum" in found):
        raise Refused("request: 'sum' says which message of a secure sum this is; it comes with secure_sum = true, and only then")
    number = found.get("round", 0)
    if number >= config.rounds:
        raise Refused(f"request: round {number} is not one of the {config.rounds} rounds of this run")
    model = found.get("model", config.model)
    if config.model not in ("auto", model):
        raise Refused(f"request: model '{limits.plain(model, 60)}' is not the configuration's")
    return Request(
        config=config,
        base=base,
        recipe=recipe,
        model=model,
        run=found.get("run", ""),
        examples=found.get("examples", 1),
        shape=tuple(found["shape"]) if "shape" in found else None,
        classes=found.get("classes"),
        round=number,
        ticket=found.get("ticket", 0),
        sigma=found.get("sigma"),
        data=found.get("data"),
        nonce=found.get("nonce", ""),
        submitter=_signer(found, arrays),
        roster=found.get("roster", ""),
        version=found.get("version", ""),
        group=found.get("group", 1),
        shuffler_key=found.get("shuffler key", ""),
        witness=found.get("witness"),
        sum=found.get("sum"),
    )


def _configured(values: Document, client: int, contract: Contract) -> tuple[RunConfig, Recipe, Recipe]:
    """(configuration, recipe of the run, recipe of this client); what the server may not choose is set aside."""
    from pydantic import ValidationError

    from fedveil.federation.config import RunConfig, check_config
    from fedveil.protect.catalogue import named_code
    from fedveil.protect.law import clip_for
    from fedveil.protect.recipe import with_changes

    try:
        config = RunConfig(**values)
        if named_code(config.recipe):
            config = config.given(own_recipe(contract, config.recipe))
        base = config.built_recipe()
        check_config(config)
        recipe = base
        if config.client_epsilons and config.client_mechanisms:
            mechanism = config.client_mechanisms[client % len(config.client_mechanisms)]
            recipe = with_changes(base, {"mechanism": mechanism, **clip_for(mechanism)})
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(
            f"the run's configuration: {limits.plain(where, 60)}: {limits.plain(first['msg'], 120)}"
        ) from None
    except (UserError, TypeError, ValueError, ArithmeticError, AttributeError, KeyError) as wrong:
        raise Refused(f"the run's configuration: {limits.plain(wrong)}") from None
    if not 0 <= client < config.clients <= MOST_CLIENTS:
        raise Refused(f"this is client {client}, but the run has clients 0 to {config.clients - 1}")
    # Engine, device, workers and folders are the node's own matter.
    own = {"engine": "auto", "device": "cpu", "workers": 1, "chunk": None, "data": None, "diagnostics": False}
    return config.model_copy(update=own), base, recipe


# --- arrays ---


def vector(arrays: Mapping[str, np.ndarray], name: str, size: int, largest: float) -> np.ndarray:
    """`size` finite float32 numbers of at most this absolute value."""
    value = arrays.get(name)
    if value is None or value.shape != (size,) or value.dtype != np.float32 or not np.isfinite(value).all():
        raise Refused(f"'{limits.plain(name, 40)}' from the server is not {size} finite float32 numbers")
    if float(np.abs(value).max(initial=0.0)) > largest:
        raise Refused(f"contract: '{limits.plain(name, 40)}' from the server has values above {largest:g}")
    return value


def state_of(arrays: Mapping[str, np.ndarray], task: Task, number: int, largest: float) -> State:
    """The server's weights and public memories as a state: only what the recipe broadcasts, if it fits and is sane."""
    from fedveil.federation.round import start

    first = start(task, vector(arrays, "weights", task.layout.size, largest))
    like = first.broadcast(-1)
    tables = {name.partition("/")[0] for name in like} | {"aggregate.own"}
    sent: dict[str, np.ndarray] = {}
    for name, value in arrays.items():
        own = name.removeprefix("server.")
        if name == "weights":
            continue
        known = like.get(own)
        # There is no anchor in a first state, but later ones may have it.
        anchored = own in ("anchor.weights", "anchor.inverse")
        if own == name or (known is None and own.partition("/")[0] not in tables and not anchored):
            raise Refused(f"'{limits.plain(own, 40)}' from the server is nothing that this recipe broadcasts")
        wide = np.asarray(value, np.float64) if value.dtype.kind == "f" else np.full(1, np.nan)
        if not np.isfinite(wide).all() or np.abs(wide).max(initial=0) > largest:
            raise Refused(
                f"'{limits.plain(own, 40)}' from the server is not finite, or has values above {largest:g}"
            )
        if known is not None and known.ndim == 0:
            if value.size != 1 or not wide.reshape(-1)[0] > 0:
                raise Refused(f"'{own}' (a bound) from the server is not a positive number")
            sent[own] = np.asarray(value).reshape(-1)[0]
            continue
        size = known.size if known is not None else 1 if own == "anchor.inverse" else task.layout.size
        if value.shape != (size,):
            raise Refused(f"'{limits.plain(own, 40)}' from the server is not {size} finite numbers")
        if own == "anchor.inverse" and wide.min() < 0:
            raise Refused(f"'{own}' from the server is below 0")
        if own.endswith((".radius", ".square")) and wide.min(initial=1.0) < 0.5e-12:
            raise Refused(f"'{own}' from the server is not above 1e-12 everywhere")
        sent[own] = value
    return replace(first.restored(sent), round=number)


# --- signatures of requests ---


def payload(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """What is signed: all facts but the signature, and the bytes, types and shapes of all arrays."""
    whole = hashlib.sha256(
        limits.canonical({k: v for k, v in facts.items() if k not in ("signature", "format")})
    )
    for name in sorted(arrays):
        value = np.ascontiguousarray(arrays[name])
        whole.update(
            f"{name}\0{value.dtype.str}\0{value.shape}\0".encode() + hashlib.sha256(value.tobytes()).digest()
        )
    return whole.digest()


def signed(
    facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], secret: bytes, purpose: str = SIGNED_AS
) -> JsonObject:
    """The facts with the signer's public key and signature."""
    whole = {**facts, "submitter": identity.public_of(secret).hex()}
    return {**whole, "signature": identity.sign(secret, purpose, payload(whole, arrays)).hex()}


def _signer(found: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes | None:
    if "submitter" not in found and "signature" not in found:
        return None
    public = bytes.fromhex(found.get("submitter", ""))
    made = bytes.fromhex(found.get("signature", ""))
    if not identity.verify(public, SIGNED_AS, payload(found, arrays), made):
        raise Refused("request: its signature is not right")
    return public
