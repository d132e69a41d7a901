"""The server's round loop over a Flower grid: plan, charge, send, collect until the deadline, merge, record.

Order inside a round: the release of the whole planned cohort is in the ledger before the first message
leaves. Whoever answers late, twice, wrongly or not at all was already paid for, so the ledger can over-count,
never under-count. Noise that the server adds has the scale of the plan whatever arrives, and the noised sum
is divided by the planned cohort: fewer arrivals mean relatively more noise, never less.
"""

from __future__ import annotations

import contextlib
import math
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fedveil import __version__
from fedveil.data.datasets import Dataset, load
from fedveil.data.partition import Partition
from fedveil.errors import UserError, did_you_mean
from fedveil.federation import loop, store
from fedveil.federation.config import RunConfig, clock_of
from fedveil.federation.loop import OnRound, Prepared
from fedveil.federation.round import State, Task, Upload, learning_rate_of, merge, merge_tally, moment_of
from fedveil.flower import limits, live, summing, wire
from fedveil.flower.contract import Data, read_contract
from fedveil.flower.identity import read_identity
from fedveil.flower.owndata import dataset_of, read_rows
from fedveil.flower.owner import deployable
from fedveil.flower.replies import Unusable, greeting, round_reply
from fedveil.flower.request import signed
from fedveil.flower.roster import Roster, read_roster
from fedveil.jsons import JsonObject
from fedveil.models import nets
from fedveil.privacy.ledger import Ledger
from fedveil.protect.place import Reports
from fedveil.protect.setting import Moment
from fedveil.training.contract import LocalPlan

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

    from fedveil.protect.channel import Tally


@dataclass(frozen=True)
class Options:
    """How the server runs (keys of `[tool.flwr.app.config]`, with - for _).

    out: run directory on the server. deadline: seconds a round waits for replies. join: seconds to wait for
    nodes. minimum: with fewer usable replies the round is skipped (its release stays charged). patience: rounds
    that may be skipped in a row. public: file with the server's public test data, if not the
    configuration's dataset. contract: file of the study's contract, whose [data] describes public and private rows
    alike. roster: file of the nodes' numbers and keys; replies must then be signed. identity: file of the key that
    signs this server's requests. shuffler, shuffler_key: address, and file of the server's secret key. attempts: of a secure
    sum in one round, each charged; there `deadline` is that of each of the five stages.
    """

    out: str
    deadline: float = 600.0
    join: float = 300.0
    minimum: int = 1
    patience: int = 3
    poll: float = 0.5
    public: str = ""
    contract: str = ""
    roster: str = ""
    identity: str = ""
    shuffler: str = ""
    shuffler_key: str = ""
    group: int = 1
    attempts: int = 1


def options_of(values: Mapping[str, Any]) -> Options:
    """Options from a Flower run configuration; unknown keys are an error."""
    known = {item.name.replace("_", "-"): item.name for item in fields(Options)}
    for key in values:
        if key not in known:
            raise UserError(f"run configuration: unknown key '{key}'.{did_you_mean(key, known)}")
    if not values.get("out"):
        raise UserError("run configuration: 'out' is missing: the run directory on the server")
    for key, value in values.items():
        kind = {item.name: item.type for item in fields(Options)}[known[key]]
        right = isinstance(value, str) if kind == "str" else isinstance(value, (int, float)) and value >= 0
        if not right or isinstance(value, bool):
            raise UserError(
                f"run configuration: {key} = {value!r} is not a {'text' if kind == 'str' else 'number'}"
            )
    return Options(**{known[key]: value for key, value in values.items()})


@dataclass(frozen=True)
class Parties:
    """What the server knows of the study's papers: the data's form, the roster, and its own key."""

    data: Data | None = None
    roster: Roster | None = None
    secret: bytes | None = None


def parties_of(config: RunConfig, options: Options) -> Parties:
    """Read contract, roster and key; `UserError` where they do not fit the configuration."""
    data = read_contract(options.contract).data if options.contract else None
    roster = read_roster(options.roster) if options.roster else None
    if options.public and data is None:
        raise UserError(
            "public = … needs the study's contract (contract = FILE): its [data] says which columns, ranges and classes server "
            "and nodes share"
        )
    if roster is not None:
        missing = sorted(set(range(config.clients)) - {m.number for m in roster.members})
        if missing:
            raise UserError(
                f"the roster has no node {missing[0]}, but the run has clients 0 to {config.clients - 1}"
            )
    if clock_of(config) is not None:
        raise UserError(
            "delay_proposals, compute_seconds and their like set a simulation's clock; nodes take the time they take: leave them "
            "out"
        )
    if config.secure_sum:
        summing.check_roster(roster, config.clients)
    return Parties(data, roster, read_identity(options.identity) if options.identity else None)


@dataclass(frozen=True)
class Crowd:
    """Which node is which client, how many examples each client holds, and which nodes are nobody's (why)."""

    node: Mapping[int, int] = field(default_factory=dict)  # client -> node id
    examples: Mapping[int, int] = field(default_factory=dict)
    strangers: Mapping[int, str] = field(default_factory=dict)  # node id -> reason


@dataclass(frozen=True)
class Outcome:
    """What came back in a round: usable uploads by client, and why the others are missing."""

    uploads: dict[int, Upload]
    shuffled: int
    tally: Counter[str]
    reasons: tuple[str, ...]
    bytes_up: int = 0


def serve(
    grid: Grid,
    config: RunConfig,
    options: Options,
    *,
    root: int | bytes | None = None,
    on_round: OnRound | None = None,
) -> JsonObject:
    """Play a whole run over `grid` in the folder `options.out`; continues a run that is already there.

    Returns what result.json holds. root: only for tests of equality with the simulator.
    """
    begun = time.perf_counter()
    folder = Path(options.out)
    recipe = config.built_recipe()
    deployable(
        recipe, shuffler=bool(options.shuffler and options.shuffler_key), secure_sum=config.secure_sum
    )
    if config.target_accuracy is not None and config.validation <= 0:
        raise UserError("target_accuracy needs a public validation set")
    parties = parties_of(config, options)
    config = config.model_copy(
        update={"secure_noise": root is None, "diagnostics": False, "checkpoint_every": 1, "report": False}
    )
    dataset = _public_dataset(config, options, parties)
    crowd = gather(grid, config, options, folder, parties)
    prepared = prepare(config, dataset, crowd, root)
    task = prepared.task
    state = loop.open_folder(prepared, folder, (folder / "run.json").exists(), "fedveil flower run")
    store.write_json(folder / "nodes.json", {str(c): [n, crowd.examples[c]] for c, n in crowd.node.items()})
    skipped = 0

    def moment(task: Task, state: State) -> Moment:
        now = moment_of(task, state)
        return replace(now, arrived=_crowd_minimum(options)) if task.recipe.channel.hides_reports else now

    with loop.open_ledger(prepared, folder) as ledger:
        loop.charge_preprocessing(prepared, ledger)

        def turn(state: State, now: Moment, clients: np.ndarray) -> loop.Turn:
            nonlocal skipped, crowd
            crowd = ready(grid, prepared, crowd, now, clients, options, parties)
            play = _play if task.secure is None else _play_sum
            following, facts, reasons = play(
                grid, prepared, ledger, state, now, clients, crowd, options, parties
            )
            public, private = _kept_apart(task, facts, reasons)
            told = () if private else reasons  # the run's log is read on any host
            _say(f"round {following.round}/{config.rounds}: {public}" + "".join(f"\n  {r}" for r in told))
            skipped = skipped + 1 if facts.get("skipped") else 0
            if skipped >= options.patience:
                least = least_of(task, now, clients, options)
                _stop(folder, following.round, skipped, least, reasons, private)
            return following, public, private

        state, stop = loop.play(prepared, folder, ledger, state, turn, moment=moment, on_round=on_round)
        return loop.finish(prepared, folder, ledger, state, stop, time.perf_counter() - begun)


def _kept_apart(task: Task, facts: JsonObject, reasons: tuple[str, ...]) -> tuple[JsonObject, JsonObject]:
    """Public and private facts: where a promise counts on a secret cohort, nothing public may tell who or how many came."""
    if task.recipe.place.scope != "everyone":
        return facts, {}
    public = {"sigma", "bound", "learning_rate", "skipped"}
    secret = {k: v for k, v in facts.items() if k not in public}
    return {k: v for k, v in facts.items() if k in public}, {**secret, "reasons": list(reasons)}


def _stop(folder: Path, number: int, skipped: int, least: int, reasons: tuple[str, ...], private: JsonObject) -> NoReturn:
    """End a run whose nodes do not answer. The round before this one is in the last checkpoint; this one stays charged."""
    few, why = f"fewer than {least}", "; ".join(reasons) or "no node answered in time"
    if private:
        store.append_line(folder / "private.jsonl", {"round": number, "private": True, **private})
        few, why = "too few", "private.jsonl has the reasons"
    raise UserError(
        f"stopped after round {number}: {skipped} rounds in a row had {few} usable replies ({why}). The run is intact: run "
        "again to continue"
    )


def _play(
    grid: Grid,
    prepared: Prepared,
    ledger: Ledger,
    state: State,
    now: Moment,
    clients: np.ndarray,
    crowd: Crowd,
    options: Options,
    parties: Parties,
) -> tuple[State, JsonObject, tuple[str, ...]]:
    """One round: charge, exchange, merge or skip. (next state, public facts, why replies are missing)."""
    task = prepared.task
    mark = loop.fingerprint_of(prepared, state, clients)
    ledger.spend(loop.release_of(prepared, now, clients), fingerprint=mark, replay_of=ledger.find(mark))
    ticket = ledger.head[0]
    found = exchange(grid, prepared, state, now, clients, crowd, ticket, options, parties)
    arrived = found.shuffled if task.recipe.channel.hides_reports else len(found.uploads)
    if arrived >= least_of(task, now, clients, options) or (
        len(clients) == 0 and task.recipe.place.scope == "everyone"
    ):
        following, facts = _merged(prepared, state, now, clients, found, options, ticket)
    else:  # the model stays; what was asked for stays charged
        following, facts = replace(state, round=state.round + 1), {"skipped": True}
    facts |= {
        "clients": len(clients),
        "arrived": arrived,
        **{kind: count for kind, count in found.tally.items() if count},
        "bytes_up": found.bytes_up or facts.get("bytes_up", 0),
        "sigma": now.sigmas[0],
        "bound": now.bounds[0],
        "learning_rate": learning_rate_of(task, state.round),
    }
    return following, facts, found.reasons


def _play_sum(
    grid: Grid,
    prepared: Prepared,
    ledger: Ledger,
    state: State,
    now: Moment,
    clients: np.ndarray,
    crowd: Crowd,
    options: Options,
    parties: Parties,
) -> tuple[State, JsonObject, tuple[str, ...]]:
    """One round whose sum is opened under masks."""
    link = summing.Link(
        nodes=crowd.node,
        online=lambda: set(grid.get_node_ids()),
        replies=lambda sent, seconds: _replies(grid, sent, seconds, options.poll, Counter()),
        seal=lambda facts, arrays: _sealed(facts, arrays, parties),
        roster=summing.check_roster(parties.roster, prepared.config.clients),
    )
    return summing.play_sum(
        prepared, ledger, state, now, clients, link, _told(prepared, parties), Path(options.out),
        options.deadline, max(1, int(options.attempts)), _say,
    )  # fmt: skip


def least_of(task: Task, now: Moment, clients: np.ndarray, options: Options) -> int:
    """Usable replies that a round needs."""
    if task.secure is not None:
        return task.secure.threshold
    if task.recipe.channel.hides_reports:
        return max(options.minimum, now.arrived or 0)
    return min(options.minimum, max(1, len(clients)))


def _say(text: str) -> None:
    from logging import INFO

    from flwr.supercore import log

    log(INFO, text)


def _public_dataset(config: RunConfig, options: Options, parties: Parties) -> Dataset:
    """The server's public part: test (and validation) rows. Training rows are dropped where a demo loads them."""
    if parties.data is not None:
        if not options.public:
            raise UserError(
                "contract = … needs public = FILE: the server's own public rows, to test the model with"
            )
        rows = read_rows(options.public, parties.data)
        if rows.broken.all():
            raise UserError(f"{options.public}: no row can be read as the contract describes them")
        return dataset_of(rows, parties.data, Path(options.public).name, test=True)
    found = load(
        options.public or config.dataset,
        root=config.data,
        seed=config.split_seed,
        validation=config.validation,
        target=config.target,
        limit=config.limit,
    )
    groups = None if found.groups is None else found.groups[:0]
    return replace(found, x=found.x[:0], y=found.y[:0], groups=groups, attributes={})


def prepare(
    config: RunConfig, dataset: Dataset, crowd: Crowd, root: int | bytes | None = None
) -> Prepared:
    """The simulator's preparation with the sizes that the nodes told."""
    sizes = [crowd.examples[client] for client in range(config.clients)]

    def nobody(client: int) -> np.ndarray:
        raise RuntimeError(f"rows of client {client} are on its node")

    shared = config.partition in ("copies", "overlap") or "examples_per_client" in config.partition_options
    copies = config.clients if shared else 1  # nodes with data of their own are taken at their word: disjoint
    dealt = Partition("nodes", config.clients, copies, sum(sizes), nobody, lambda client: sizes[client])
    prepared = loop.prepare(config, dataset, dealt=dealt, root=root)
    loop.check_noise(prepared)
    return replace(
        prepared, engine="flower", engine_reason="Engine: Flower; each node trains its own client."
    )


def _told(prepared: Prepared, parties: Parties) -> wire.Facts:
    """What every node is told about the run. Calibrated noise is written out, so that nodes need no sizes."""
    task, config = prepared.task, prepared.config
    protect = dict(config.protect)
    if config.calibrate and not task.own:
        protect["sigma"] = task.recipe.sigma.value(0, config.rounds)
    told = config.model_copy(update={"data": None, "protect": protect, "calibrate": False})
    data = parties.data
    dataset = prepared.dataset
    return {
        "config": told.model_dump(),
        "run": loop.config_hash(config)[:16],
        "examples": prepared.partition.examples,
        "shape": list(dataset.shape),
        "classes": dataset.classes,
        "model": nets.default_model(dataset) if config.model == "auto" else config.model,
        "data": None if data is None else data.digest,
        "version": __version__,
    }


# --- nodes ---


def gather(
    grid: Grid, config: RunConfig, options: Options, folder: Path, parties: Parties = Parties()
) -> Crowd:
    """Wait until every client has a node, or say who is missing. A resumed run knows its clients: it waits for
    their nodes to be back, but goes on with those that are."""
    crowd = Crowd()
    if (folder / "nodes.json").exists():
        known = store.read_json(folder / "nodes.json")
        crowd = Crowd({int(c): v[0] for c, v in known.items()}, {int(c): v[1] for c, v in known.items()})
    until = time.monotonic() + options.join
    begun = (folder / "run.json").exists()
    shown: Crowd | None = None
    while True:
        if not begun and crowd != shown:
            live.waiting(folder, config, crowd.examples, max(0.0, until - time.monotonic()))
        shown = crowd
        crowd = greet(grid, config, crowd, max(1.0, until - time.monotonic()), options.poll, parties)
        missing = [c for c in range(config.clients) if c not in crowd.node]
        back = set(crowd.node.values()) <= set(grid.get_node_ids())
        if not missing and (back or time.monotonic() > until):
            live.complete(folder)
            return crowd
        said = "".join(f"; node {node}: {why}" for node, why in crowd.strangers.items())
        if missing and said and len(crowd.strangers) + len(crowd.node) >= config.clients:
            raise UserError(f"client {missing[0]} has no node that takes part{said}")
        if missing and time.monotonic() > until:
            raise UserError(
                f"{len(missing)} of {config.clients} clients have no node after {options.join:g} s (first missing: client "
                f"{missing[0]}){said}. Start their SuperNodes (partition-id = client number) or lower clients"
            )
        time.sleep(options.poll)


def greet(
    grid: Grid, config: RunConfig, crowd: Crowd, patience: float, poll: float, parties: Parties = Parties()
) -> Crowd:
    """Ask nodes that are not known yet who they are. Those that refuse, or are nobody's, are asked once."""
    online = set(grid.get_node_ids())
    fresh = sorted(online - set(crowd.node.values()) - set(crowd.strangers))
    if not fresh:
        return crowd
    told: wire.Facts = {
        "config": config.model_copy(update={"data": None}).model_dump(),
        "data": None if parties.data is None else parties.data.digest,
        "version": __version__,
    }
    node, examples, strangers = dict(crowd.node), dict(crowd.examples), dict(crowd.strangers)
    nonces = {number: secrets.token_hex(16) for number in fresh}
    asked: dict[int, tuple[str, wire.Facts, wire.Arrays]] = {
        n: ("query", _sealed({**told, "nonce": nonces[n]}, {}, parties), {}) for n in fresh
    }
    for number, reply in _ask(grid, asked, patience, poll):
        try:
            said = greeting(reply, nonces[number], parties.roster, config.clients)
        except Unusable as why:
            if why.kind == "error":  # may be a passing fault: ask again next time
                _say(f"node {number}: {why}")
            else:
                strangers[number] = str(why)
            continue
        client, count = said.client, said.examples
        if client in node and node[client] in online:
            strangers[number] = f"says it is client {client}, which is node {node[client]}"
        elif examples.get(client, count) != count:
            # The ledger's rates were worked out with the size told first.
            strangers[number] = (
                f"client {client} came back with {count} examples instead of {examples[client]}"
            )
        elif said.version != __version__:
            strangers[number] = (
                f"runs fedveil {said.version}, the server {__version__}: install the same on both"
            )
        elif parties.data is not None and said.data != parties.data.digest:
            strangers[number] = "its contract has other columns, ranges, target or classes than the server's"
        else:
            node[client], examples[client] = number, count
    for number in strangers.keys() - crowd.strangers.keys():
        _say(f"node {number} does not take part: {strangers[number]}")
    return Crowd(node, examples, strangers)


def _sealed(facts: wire.Facts, arrays: wire.Arrays, parties: Parties) -> wire.Facts:
    """The facts, signed where the server has a key."""
    return facts if parties.secret is None else signed(facts, arrays, parties.secret)


def ready(
    grid: Grid,
    prepared: Prepared,
    crowd: Crowd,
    now: Moment,
    clients: np.ndarray,
    options: Options,
    parties: Parties,
) -> Crowd:
    """Before anything is charged: wait until enough of the cohort's nodes are there, or stop with the reason.

    Lost clients are looked for under new node ids (a node with a key keeps its id and needs no greeting).
    """
    least = min(least_of(prepared.task, now, clients, options), len(clients))
    until = time.monotonic() + options.join
    while True:
        online = set(grid.get_node_ids())
        if not online >= set(crowd.node.values()):
            patience = min(20.0, options.deadline / 4)
            found = greet(grid, prepared.config, crowd, patience, options.poll, parties)
            silent = online - set(found.node.values()) - set(found.strangers)
            crowd = replace(
                found, strangers={**found.strangers, **dict.fromkeys(silent, "did not say who it is")}
            )
        there = sum(crowd.node[client] in online for client in clients.tolist())
        if there >= least:
            return crowd
        if time.monotonic() > until:
            secret = prepared.task.recipe.place.scope == "everyone"
            few = "too few" if secret else f"only {there} of {len(clients)}"
            needed = "" if secret else f", at least {least} are needed"
            raise UserError(
                f"round {now.number}: {few} nodes of the cohort are there after {options.join:g} s{needed}. Nothing was charged "
                "for this round; run again to continue"
            )
        time.sleep(options.poll)


def _ask(
    grid: Grid, wanted: Mapping[int, tuple[str, wire.Facts, wire.Arrays]], patience: float, poll: float
) -> list[tuple[int, Message]]:
    """Send one message per node id; (node id, reply) for each first reply in time. Replies are matched by the
    id of the message they answer: an error for a dead node comes from the SuperLink, not from the node."""
    out: list[tuple[int, Message]] = []
    for key, reply, first in _replies(
        grid, {n: (n, *rest) for n, rest in wanted.items()}, patience, poll, Counter()
    ):
        if first:
            out.append((key, reply))
    return out


def _replies(
    grid: Grid,
    wanted: Mapping[int, tuple[int, str, wire.Facts, wire.Arrays]],
    patience: float,
    poll: float,
    tally: Counter[str],
) -> Iterator[tuple[int, Message, bool]]:
    """Yield (key, reply, is it the first) until all have answered or patience ends; counts strays."""
    from flwr.app import Message

    keys = list(wanted)
    messages = []
    for key in keys:
        node, kind, facts, arrays = wanted[key]
        messages.append(Message(wire.content(facts, arrays), node, kind, ttl=max(patience, 1.0) + 60.0))
    numbers = grid.push_messages(messages)
    sent = {number: key for number, key in zip(numbers, keys, strict=False) if number is not None}
    del messages
    open_ids = set(sent)
    until = time.monotonic() + patience
    for reply in _pulled(grid, open_ids, until, poll):
        answered = reply.metadata.reply_to_message_id
        if answered not in sent:
            tally["stray"] += 1
            continue
        yield sent[answered], reply, answered in open_ids
        open_ids.discard(answered)


PULLERS = 16  # replies that are fetched side by side
GRACE = 2.0  # seconds after the deadline for what is being fetched already


def _pulled(grid: Grid, open_ids: set[str], until: float, poll: float) -> Iterator[Message]:
    """Replies as they come, until all `open_ids` are gone from the set or the time is up.

    Fetching a reply waits for all its parts, as long as its sender likes: so each is fetched in a thread of its own, and
    one that is not whole in time is left behind.
    """
    came: queue.SimpleQueue[tuple[str, list[Message] | Exception]] = queue.SimpleQueue()

    def fetch(name: str) -> None:
        try:
            came.put((name, list(grid.pull_messages([name]))))
        except Exception as wrong:  # a SuperLink that is being restarted; asked again at the next look
            came.put((name, wrong))

    busy: set[str] = set()
    looked: dict[str, float] = {}
    begun = time.monotonic()  # nobody has answered yet: the first look may wait as long as any other
    while open_ids:
        late = time.monotonic() >= until
        pause = max(poll, min((time.monotonic() - begun) / 8, 5 * poll))  # a long round need not be asked for so often
        if late and (time.monotonic() >= until + GRACE or (not busy and open_ids <= looked.keys())):
            break
        for name in sorted(open_ids - busy, key=lambda n: looked.get(n, 0.0)):
            if len(busy) >= PULLERS or (late and name in looked):
                break
            if not late and time.monotonic() < looked.get(name, begun) + pause:
                break
            busy.add(name)
            looked[name] = time.monotonic()
            threading.Thread(target=fetch, args=(name,), daemon=True).start()
        with contextlib.suppress(queue.Empty):
            name, found = came.get(timeout=max(0.001, min(poll / 4, 0.1)))
            busy.discard(name)
            if isinstance(found, Exception):
                _say(f"replies cannot be fetched now: {limits.plain(found, 200)}")
            else:
                yield from found


# --- one round ---


def exchange(
    grid: Grid,
    prepared: Prepared,
    state: State,
    now: Moment,
    clients: np.ndarray,
    crowd: Crowd,
    ticket: int,
    options: Options,
    parties: Parties = Parties(),
) -> Outcome:
    """Send the round to the cohort's nodes that are there and collect what is usable until the deadline."""
    task = prepared.task
    facts = {**_told(prepared, parties), "round": state.round, "ticket": ticket}
    shared = {"weights": state.weights}
    online = set(grid.get_node_ids())
    tally: Counter[str] = Counter()
    wanted: dict[int, tuple[int, str, wire.Facts, wire.Arrays]] = {}
    nonces: dict[int, str] = {}
    if options.shuffler:
        facts = {**facts, "shuffler key": _public_key(options).hex(), "group": options.group}
    for client in clients.tolist():
        node = crowd.node[client]
        if node not in online:
            tally["offline"] += 1
            continue
        arrays = shared | {f"server.{k}": np.atleast_1d(v) for k, v in state.broadcast(client).items()}
        told = facts | ({"sigma": task.own[client][1]} if client in task.own else {})
        nonces[client] = secrets.token_hex(16)
        told = _sealed({**told, "nonce": nonces[client]}, arrays, parties)
        wanted[client] = (node, "train", told, arrays)
    uploads: dict[int, Upload] = {}
    reasons: list[str] = []
    shuffled = size = answered = 0
    offline = [client for client in clients.tolist() if client not in wanted]
    secret = task.recipe.place.scope == "everyone"  # as in `_kept_apart`
    mark = live.training(Path(options.out), state.round + 1, wanted, offline, options.deadline, secret)
    for client, reply, first in _replies(grid, wanted, options.deadline, options.poll, tally):
        if not first:
            tally["duplicate"] += 1
            continue
        answered += 1
        try:
            upload, used = usable(reply, prepared, state, now, client, ticket, nonces[client], parties.roster)
        except Unusable as why:
            tally[why.kind] += 1
            reasons.append(f"client {client}: {why}")
            mark(client, why.kind)
            continue
        mark(client, live.ANSWERED)
        size += used
        if upload is None:
            shuffled += 1
        else:
            uploads[client] = upload
    mark(None, "")
    tally["missing"] += len(wanted) - answered
    return Outcome(uploads, shuffled, tally, tuple(reasons), size)


def usable(
    reply: Message,
    prepared: Prepared,
    state: State,
    now: Moment,
    client: int,
    ticket: int,
    nonce: str = "",
    roster: Roster | None = None,
) -> tuple[Upload | None, int]:
    """The upload of a reply (None: it went to the shuffler) and its bytes, or `Unusable`.

    Whatever is rejected was seen by the server anyway, so rejecting it tells nobody more.
    """
    task = prepared.task
    size = task.layout.size
    facts, arrays = round_reply(reply, 4 * size, nonce, roster, (state.round, client, ticket))
    status = facts["status"]
    if status == "shuffled" and task.recipe.channel.hides_reports:
        return None, 0
    if status != "ok" or task.recipe.channel.hides_reports:
        raise Unusable("rejected", f"status {status!r}")
    if isinstance(task.recipe.place, Reports):
        bits = _array(arrays, "bits", np.uint8, -(-size // 8))
        return Upload(client, np.empty(0, np.float32), bits=bits), bits.nbytes
    update = _array(arrays, "update", np.float32, size)
    norm = float(np.linalg.norm(update.astype(np.float64)))
    if not math.isfinite(norm):
        raise Unusable("rejected", "not finite")
    limit = largest_norm(task, now, _plan(prepared, now, client), state)
    if norm > limit:
        raise Unusable("rejected", f"norm {norm:.3g} is above what the recipe can produce ({limit:.3g})")
    below = facts.get("below")
    if task.recipe.clip.rule.beside():
        if below is None:
            raise Unusable("rejected", "the share of unclipped examples is missing")
        return Upload(client, update, float(below)), update.nbytes
    return Upload(client, update), update.nbytes


def _array(arrays: Mapping[str, np.ndarray], name: str, kind: type[np.generic], size: int) -> np.ndarray:
    if set(arrays) != {name}:
        raise Unusable("rejected", f"arrays {sorted(arrays)[:4]} instead of '{name}'")
    value = arrays[name]
    if value.dtype != kind or value.shape != (size,):
        raise Unusable("rejected", f"'{name}' is {value.dtype} {value.shape}, not {np.dtype(kind)} ({size},)")
    return value


def _plan(prepared: Prepared, now: Moment, client: int) -> LocalPlan:
    return loop.plan_of(prepared.task, now, client, prepared.partition.size(client))


def largest_norm(task: Task, now: Moment, plan: LocalPlan, state: State) -> float:
    """Above this an honest node's update practically never is (chance far below 1e-9 a round).

    Exact where updates are clipped before the server's noise; with noise in it: bound plus noise, with slack.
    Without a clip nothing is bounded, so only absurd sizes are turned away.
    """
    recipe, root = task.recipe, math.sqrt(task.layout.size)
    absurd = 1e3 * (root + float(np.linalg.norm(state.weights.astype(np.float64))))
    bound = recipe.clip.joint(now.bounds[0], task.layout.layers)
    if recipe.place.of_updates and recipe.clip.bounded:
        own = (
            recipe.place.noised(recipe, task.setting, now, 1)[0].deviation if recipe.place.own_noise else 0.0
        )
        noise = own * (root + 10) * 1.1
        start = (
            float(np.linalg.norm(state.weights.astype(np.float64))) if recipe.clip.of_weights else 0.0
        )
        return (bound + start) * (1 + 1e-4) + noise
    unclear = recipe.clip.rule.batch or recipe.clip.rule.rescales or recipe.aggregate.knows_senders
    if not recipe.place.in_steps or unclear or plan.proximal or plan.penalty:
        return absurd
    if plan.optimiser.rule != "sgd":
        return absurd
    size = max(1, round(plan.expected_batch))
    values = recipe.place.noised(recipe, replace(task.setting, batch=plan.expected_batch), now, size + 1)
    scale = max(one.deviation for one in values) * (4.0 if recipe.noise_on.for_each else 1.0)
    heavy = 1.0 if recipe.law is not None and recipe.law.adds_up else 4.0
    step = bound * (4 + 10 / plan.expected_batch) + scale * heavy * (root + 10) / plan.expected_batch
    return 2 * plan.steps * plan.learning_rate / (1 - plan.momentum) * step


def _merged(
    prepared: Prepared,
    state: State,
    now: Moment,
    clients: np.ndarray,
    found: Outcome,
    options: Options,
    ticket: int,
) -> tuple[State, JsonObject]:
    task = prepared.task
    if task.recipe.channel.hides_reports:
        return merge_tally(task, state, now, _from_shuffler(task, options, ticket))
    order = [c for members in loop.stacks_of(prepared, now, clients).values() for c in members]
    return merge(task, state, now, [found.uploads[c] for c in order if c in found.uploads])


# --- the shuffler beside Flower ---


def _public_key(options: Options) -> bytes:
    from fedveil.flower.shuffler import public_key, read_key

    return public_key(read_key(options.shuffler_key))


def _crowd_minimum(options: Options) -> int:
    """The shuffler never hands over fewer senders than this: what the ledger may count on."""
    import asyncio

    from fedveil.flower.shuffler import facts_of

    return int(asyncio.run(facts_of(options.shuffler))["minimum"])


def _from_shuffler(task: Task, options: Options, ticket: int) -> Tally:
    """Fetch the closed round; wait for it as long as for replies."""
    import asyncio

    from fedveil.flower.shuffler import open_reports, read_key, take_round

    private = read_key(options.shuffler_key)
    until = time.monotonic() + options.deadline
    while True:
        try:
            frames, facts = asyncio.run(take_round(options.shuffler, ticket, private))
            return open_reports(private, frames, task.layout.size, ticket, facts["senders"], options.group)
        except ConnectionError as wrong:
            if "not closed" not in str(wrong) or time.monotonic() > until:
                raise UserError(f"shuffler {options.shuffler}: {wrong}") from None
            time.sleep(options.poll)
