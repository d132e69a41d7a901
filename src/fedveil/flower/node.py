"""What a node does with a message: check the owner's policy, charge its own ledger, train, hand over.

The functions that plan, train and sanitise are the simulator's. The node derives everything that protects
its data from the recipe itself; of the server's numbers it takes the model, the round, and public state.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from fedveil.errors import UserError
from fedveil.federation.config import RunConfig
from fedveil.flower.owner import (
    Owner,
    Policy,
    Refused,
    allow_config,
    allow_round,
    deployable,
    read_policy,
)
from fedveil.flower.wire import Facts

RootOf = Callable[[RunConfig, int], "int | bytes"]
Reply = tuple[Facts, dict[str, np.ndarray]]
LOCK_PATIENCE = 60.0  # seconds to wait for another message of this node that holds the ledger


def answer(
    kind: str,
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    owner: Owner,
    *,
    root_of: RootOf | None = None,
    cache: dict[str, Any] | None = None,
) -> Reply:
    """The reply to one message; whatever goes wrong becomes a reply without private content.

    cache: kept between messages by a persistent trainer (data and model of the last configuration).
    """
    try:
        if kind == "hello":
            return hello(facts, owner, root_of, {} if cache is None else cache)
        return play(facts, arrays, owner, root_of, {} if cache is None else cache)
    except Refused as why:
        _log(owner, str(why))
        return {"status": "refused", "reason": str(why)}, {}
    except Exception:
        # The text may quote private rows: it stays on the node.
        _log(owner, traceback.format_exc())
        return {"status": "failed", "reason": "the node failed; its log (home/node.log) says why"}, {}


def _log(owner: Owner, text: str) -> None:
    owner.home.mkdir(parents=True, exist_ok=True)
    with open(owner.home / "node.log", "a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text.rstrip()}\n")


def hello(facts: Mapping[str, Any], owner: Owner, root_of: RootOf | None, cache: dict[str, Any]) -> Reply:
    """Say which client this is and how many examples it holds (public), or refuse the run at once."""
    config, _ = _agreed(facts, owner, secure=root_of is None)
    _, rows = _own_data(config, owner, cache)
    return {"status": "ok", "client": owner.client, "examples": len(rows)}, {}


def _agreed(facts: Mapping[str, Any], owner: Owner, secure: bool) -> tuple[RunConfig, Policy]:
    policy = read_policy(owner.policy)
    try:
        config = RunConfig(**facts["config"])
        recipe = config.built_recipe()
        deployable(recipe, shuffler=bool(owner.shuffler))
    except (KeyError, TypeError, ValidationError, UserError) as wrong:
        raise Refused(f"the run's configuration: {wrong}") from None
    allow_config(policy, config, recipe, secure)
    if not 0 <= owner.client < config.clients:
        raise Refused(f"this is client {owner.client}, but the run has clients 0 to {config.clients - 1}")
    return config, policy


def _own_data(config: RunConfig, owner: Owner, cache: dict[str, Any]) -> tuple[Any, np.ndarray]:
    """(dataset, this node's row numbers). Only the owner names files; a server names built-in datasets at most."""
    key = (
        f"{owner}{config.dataset}{config.limit}{config.partition}{config.partition_options}{config.features}"
    )
    key += f"{config.seed}{config.split_seed}{config.validation}{config.target}{config.clients}"
    if cache.get("data key") != key:
        from fedveil.data.datasets import dataset_names, load
        from fedveil.data.partition import partition

        if owner.data:
            dataset = load(owner.data, seed=config.split_seed, target=config.target)
            rows = np.arange(len(dataset))
        elif config.dataset not in dataset_names():
            raise Refused(
                f"dataset '{config.dataset}' is no built-in name and this node has no data of its own "
                '(--node-config data="FILE")'
            )
        else:
            dataset = load(
                config.dataset,
                root=owner.datasets or None,
                seed=config.split_seed,
                validation=config.validation,
                target=config.target,
                limit=config.limit,
            )
            dealt = partition(
                dataset, config.partition, config.clients, config.seed, **config.partition_options
            )
            rows = np.asarray(dealt.rows(owner.client))
        from fedveil.models import features

        front = config.features or features.default(dataset)
        if front:
            dataset = features.apply(dataset, front)
        cache.clear()
        cache.update({"data key": key, "data": (dataset, rows)})
    return cache["data"]


def play(
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    owner: Owner,
    root_of: RootOf | None,
    cache: dict[str, Any],
) -> Reply:
    """One round.

    Formal guarantee: the upload is what `federation.round.uploads_of` lets out for this recipe, with noise and
    batches keyed by fresh operating-system entropy (unless a test gives the root), and the release is on
    disk in this node's ledger, within the owner's budget, before training starts.
    """
    from fedveil.federation.loop import train_cohort
    from fedveil.federation.round import moment_of, recipe_of, uploads_of
    from fedveil.keys import entropy
    from fedveil.protect.promise import divergence

    config, policy = _agreed(facts, owner, secure=root_of is None)
    prepared = _prepared(config, facts, owner, cache)
    root = entropy() if root_of is None else root_of(config, owner.client)
    prepared = replace(prepared, task=replace(prepared.task, root=root))
    task = prepared.task
    number = facts.get("round")
    if not isinstance(number, int) or not 0 <= number < config.rounds:
        raise Refused(f"round {number!r} is not one of the {config.rounds} rounds of this run")
    state = _state(arrays, prepared, number)
    now = moment_of(task, state)
    recipe = recipe_of(task, owner.client)
    if owner.client in task.own:
        now = replace(now, sigmas=(task.own[owner.client][1],) * len(now.sigmas))
    if recipe.channel.hides_reports:
        now = replace(now, arrived=_crowd(owner))
    allow_round(policy, recipe, now.sigmas, now.epsilon)
    charge(
        owner,
        policy,
        own_release(prepared, now, owner.client, str(facts.get("run", ""))),
        secure=root_of is None,
    )
    for chunk, result in train_cohort(prepared, state, now, np.array([owner.client])):
        for upload in uploads_of(task, now, state, chunk, result):
            said: Facts = {
                "status": "ok",
                "round": number,
                "client": owner.client,
                "ticket": facts.get("ticket"),
            }
            if upload.bits is None:
                more = {} if upload.below is None else {"below": upload.below}
                return said | more, {"update": upload.update.astype(np.float32)}
            if not recipe.channel.hides_reports:
                return said, {"bits": upload.bits}
            _to_shuffler(owner, facts, upload.bits, task.layout.size)
            return said | {"status": "shuffled"}, {}
    # That training met numbers that are not finite depends on the data: telling so ends the promise.
    lost = divergence(recipe, now.number, (0,))
    if lost is not None:
        charge(owner, policy, lost, secure=root_of is None, within_budget=False)
    return {"status": "diverged", "round": number, "client": owner.client, "ticket": facts.get("ticket")}, {}


def _prepared(config: RunConfig, facts: Mapping[str, Any], owner: Owner, cache: dict[str, Any]) -> Any:
    """The simulator's `Prepared` with one client that has data: this one."""
    key = repr(sorted((k, v) for k, v in facts.items() if k not in ("round", "ticket")))
    dataset, rows = _own_data(config, owner, cache)
    if cache.get("task key") == key:
        return cache["task"]
    from fedveil.data.partition import Partition
    from fedveil.federation.harmonize import clip_for
    from fedveil.federation.loop import prepare
    from fedveil.models import nets
    from fedveil.protect.recipe import with_changes

    def mine(client: int) -> np.ndarray:
        if client != owner.client:
            raise IndexError(f"client {client} is not on this node")
        return rows

    shape, classes = tuple(facts["shape"]), facts["classes"]
    if tuple(dataset.shape) != shape or (classes is None) != (dataset.task == "regression"):
        raise UserError(
            f"examples have shape {dataset.shape} here and {shape} in the run, or the task differs"
        )
    if (
        classes is not None
        and len(rows)
        and not 0 <= dataset.y[rows].min() <= dataset.y[rows].max() < classes
    ):
        raise UserError(f"a label here is not one of the run's {classes} classes")
    dealt = Partition("node", config.clients, 1, int(facts["examples"]), mine, lambda _: len(rows))
    name = str(facts["model"])
    if name != config.model and name not in nets.model_names():
        raise Refused(f"model '{name}' is not the configuration's")
    module = nets.build(name, shape, classes, config.seed, **config.model_options)
    plain = config.model_copy(update={"client_epsilons": None, "client_mechanisms": None, "calibrate": False})
    prepared = prepare(plain, dataset, module, dealt=dealt)
    if facts.get("sigma") is not None:
        # A client with its own budget: the server worked the noise out; policy and ledger judge it here.
        law = prepared.task.recipe.law
        kinds = config.client_mechanisms or ["none" if law is None else law.name]
        kind = kinds[owner.client % len(kinds)]
        own = with_changes(prepared.task.recipe, {"mechanism": kind, **clip_for(kind)})
        task = replace(
            prepared.task,
            own={owner.client: (own, float(facts["sigma"]))},
            own_epsilon={c: _budget(config, c) for c in range(config.clients)},
        )
        prepared = replace(prepared, task=task)
    cache.update({"task key": key, "task": prepared})
    return prepared


def _budget(config: RunConfig, client: int) -> float:
    assert config.client_epsilons
    return config.client_epsilons[client % len(config.client_epsilons)]


def _vector(arrays: Mapping[str, np.ndarray], name: str, size: int) -> np.ndarray:
    value = arrays.get(name)
    if value is None or value.shape != (size,) or value.dtype != np.float32 or not np.isfinite(value).all():
        raise Refused(f"'{name}' from the server is not {size} finite float32 numbers")
    return value


def _state(arrays: Mapping[str, np.ndarray], prepared: Any, number: int) -> Any:
    """The server's weights and public memories as a state: only what the recipe broadcasts, and only if it fits."""
    from fedveil.federation.round import start

    task = prepared.task
    first = start(task, _vector(arrays, "weights", task.layout.size))
    like = first.broadcast(-1)
    sent: dict[str, np.ndarray] = {}
    for name, value in arrays.items():
        own = name.removeprefix("server.")
        if own == name:
            continue
        table = own.partition("/")[0] in {k.partition("/")[0] for k in like} or own.startswith("aggregate.own/")
        known = like.get(own)
        if known is None and not (table or own == "anchor.weights"):
            raise Refused(f"'{own}' from the server is nothing that this recipe broadcasts")
        if known is not None and known.ndim == 0:
            if value.size != 1 or not (np.isfinite(value).all() and float(value.reshape(-1)[0]) > 0):
                raise Refused(f"'{own}' from the server is not a positive number")
            sent[own] = np.asarray(value).reshape(-1)[0]
            continue
        size = task.layout.size if known is None else known.size
        if value.shape != (size,) or not np.isfinite(value).all():
            raise Refused(f"'{own}' from the server is not {size} finite numbers")
        sent[own] = value
    return replace(first.restored(sent), round=number)


def own_release(prepared: Any, now: Any, client: int, run: str) -> Any:
    """This node's ledger entry for taking part in one round.

    A node knows when it takes part and cannot check how others are drawn, so it counts every participation
    without amplification by client sampling; batches it draws itself, so those count as drawn.
    """
    from fedveil.federation.round import recipe_of
    from fedveil.privacy.events import Release
    from fedveil.protect.promise import claims
    from fedveil.protect.sampling import Everybody

    recipe = replace(recipe_of(prepared.task, client), cohort=Everybody())
    found = claims(recipe, prepared.task.setting, now, prepared.partition.size(client))
    return Release(now.number, (((0,), tuple(found)),), note=run)


def charge(owner: Owner, policy: Policy, release: Any, secure: bool, within_budget: bool = True) -> None:
    """Write the release to the node's ledger, synced, or refuse it if it is over the owner's budget.

    The server chooses each round's noise, possibly after what it saw, so the budget is a Rényi filter.
    """
    from fedveil.privacy.ledger import Budget, Header, Ledger, Locked

    path = owner.home / "ledger.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    waited = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            ledger = (
                Ledger.open(path)
                if path.exists()
                else Ledger.create(path, Header(delta=policy.delta, clients=1, simulated=not secure))
            )
            break
        except Locked:
            if time.monotonic() > waited:
                raise Refused("the node is busy with another round") from None
            time.sleep(0.2)
    with ledger:
        if not secure and not ledger.header.simulated:
            raise Refused("this ledger is for secure noise; use another home for repeatable noise")
        if policy.maximum_epsilon is not None and within_budget:
            # The policy of today is the budget: an owner may lower or raise it. A refusal is not recorded, or
            # anybody could end a node's work by asking for too much once.
            allowed = Budget(
                policy.maximum_epsilon, policy.observer, policy.unit, delta=policy.delta, accountant="rdp"
            )
            over = ledger.would_exceed(release, (allowed,))
            if over:
                raise Refused(f"budget: {over[0]}")
        ledger.spend(release)


def _crowd(owner: Owner) -> int:
    """The fewest senders among which the owner's shuffler ever hides a report."""
    import asyncio

    from fedveil.flower.shuffler import facts_of

    return int(asyncio.run(facts_of(owner.shuffler))["minimum"])


def _to_shuffler(owner: Owner, facts: Mapping[str, Any], bits: np.ndarray, size: int) -> None:
    """Seal every report to the server's key and hand it to the owner's shuffler: the SuperLink never sees it."""
    import asyncio

    from fedveil.flower.shuffler import seal_reports, send_round

    ticket, group = int(facts["ticket"]), int(facts.get("group", 1))
    frames = seal_reports(bytes.fromhex(facts["shuffler key"]), bits, size, ticket, group)
    asyncio.run(send_round(owner.shuffler, ticket, str(owner.client), frames))


def ledger_of(home: Path) -> Any:
    """A node's ledger, for reading."""
    from fedveil.privacy.ledger import Ledger

    return Ledger.read(home / "ledger.jsonl")
