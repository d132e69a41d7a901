"""Your own ServerApp and ClientApp made private: a strategy around yours, and a mod around your training.

    strategy = Private(FedAvg(...), "dp-fedavg", clients=10, epsilon=4.0, out="runs/flower")       # server
    app = ClientApp(mods=[private_mod("dp-fedavg")])                                              # clients

What a ClientApp does with its examples is its own business, so only whole clients can be protected here: recipes that clip a
client's finished update and noise it on the client (`fed-sdp-client`) or at the server (`dp-fedavg`, `fed-sdp`). For single
examples the training itself has to be private: `fedveil.make_private` inside the ClientApp, or `fedveil flower init`.
"""

from __future__ import annotations

import hashlib
import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log
from torch import nn

from fedveil.errors import UserError
from fedveil.federation import folder as run_folder
from fedveil.federation import store
from fedveil.federation.config import make_config
from fedveil.federation.harmonize import sigma_for
from fedveil.federation.round import Task, Upload, clip_update, merge, moment_of, sanitise_update, start
from fedveil.keys import entropy
from fedveil.models.layout import Layout, layout_from
from fedveil.privacy.events import Observer, Release
from fedveil.privacy.ledger import Budget, Header, Ledger
from fedveil.privacy.ledger.entries import Row
from fedveil.protect.aggregate import Mean
from fedveil.protect.catalogue import get
from fedveil.protect.clip import Given, constant
from fedveil.protect.place import AFTER_UPLOAD, AtClient, AtServer
from fedveil.protect.promise import release
from fedveil.protect.recipe import Recipe, digest, with_changes
from fedveil.protect.sampling import Everybody
from fedveil.protect.setting import Moment, Setting
from fedveil.protect.upload import Channel, Thin

RECORD = "fedveil"
Mod = Callable[[Message, Any, Callable[[Message, Context], Message]], Message]


def playable(recipe: str | Recipe, changes: Mapping[str, Any] = {}) -> Recipe:
    """The recipe, if a client's finished update is all that it needs; else a `UserError` that says what is possible."""
    known = get(recipe) if isinstance(recipe, str) else recipe
    r = with_changes(known, {key.replace("clip_", "clip.", 1): value for key, value in changes.items()})
    why = ""
    if not isinstance(r.place, (AtServer, AtClient)) or not r.private:
        why = (
            "it protects single examples inside training, which is your own code here. Choose a recipe for whole clients "
            "(dp-fedavg, fed-sdp, fed-sdp-client), or train with fedveil.make_private inside your ClientApp"
        )
    elif type(r.clip.rule) is not Given or r.scale.batch or r.clip.of_weights or not r.clip.bounded:
        why = "its clip bound or noise follows the data"
    elif r.formula or r.downlink_sigma or r.heterogeneity or r.thin != Thin() or r.channel != Channel() or r.aggregate != Mean():
        why = "it changes uploads or their merging, which is your strategy's part here"
    elif not r.fineness:
        why = "its noise is float noise, which promises nothing; leave grid out"
    if why:
        raise UserError(f"fedveil.flower: recipe '{r.name}' cannot be played around your own apps: {why}.")
    return replace(r, counted=())


def agreed(recipe: Recipe) -> str:
    """What server and clients must have in common: all of the recipe, but what only the server does."""
    same = replace(recipe, cohort=Everybody())
    return digest(replace(same, sigma=constant(1.0)) if isinstance(recipe.place, AtServer) else same)


@dataclass(frozen=True)
class Shape:
    """Which arrays of a model are protected: those of floating numbers. Others (counters) never leave the server's copy."""

    names: tuple[str, ...]
    layout: Layout

    @classmethod
    def of(cls, arrays: ArrayRecord) -> Shape:
        known = {name: array.numpy() for name, array in arrays.items()}
        odd = [n for n, a in known.items() if np.issubdtype(a.dtype, np.floating) and a.dtype != np.float32]
        if odd:
            raise UserError(f"fedveil.flower: array '{odd[0]}' is {known[odd[0]].dtype}; weights must be float32.")
        names = tuple(n for n, a in known.items() if a.dtype == np.float32)
        if not names:
            raise UserError("fedveil.flower: the model has no float32 arrays.")
        return cls(names, layout_from({n: tuple(known[n].shape) for n in names}))

    def vector(self, arrays: ArrayRecord) -> np.ndarray:
        """The protected arrays as one vector; a `UserError` where names, shapes or kinds differ."""
        parts = []
        for name, shape in zip(self.names, self.layout.shapes, strict=True):
            array = arrays[name].numpy() if name in arrays else None
            if array is None or array.shape != shape or array.dtype != np.float32:
                raise UserError(f"array '{name}' is missing, or not float32 of shape {shape}")
            parts.append(array.reshape(-1))
        return np.concatenate(parts)

    def record(self, vector: np.ndarray, others: ArrayRecord | None = None) -> ArrayRecord:
        """The vector as named arrays, with the `others` that are not protected."""
        out: dict[str, Array] = {} if others is None else dict(others.items())
        flat = vector.astype(np.float32)
        for name, shape, at, size in zip(self.names, self.layout.shapes, self.layout.offsets, self.layout.sizes, strict=True):
            out[name] = Array(np.ascontiguousarray(flat[at : at + size].reshape(shape)))
        return ArrayRecord(out)


def _task(recipe: Recipe, shape: Shape, clients: int, cohort: float, rounds: int, copies: int, root: int | bytes) -> Task:
    setting = Setting(
        clients=clients, cohort=cohort, rounds=rounds, steps=1, batch=1.0, examples=clients, layers=shape.layout.layers,
        dimension=shape.layout.size, copies=copies, engine="clients",
    )  # fmt: skip
    nothing = np.zeros((1, 1), np.float32)
    return Task(recipe, setting, nn.Identity(), shape.layout, nothing, nothing, None, root)


def _moment(task: Task, index: int) -> Moment:
    state = start(task, np.zeros(task.layout.size, np.float32))
    return moment_of(task, replace(state, round=index))


# -- the client's side


def private_mod(
    recipe: str | Recipe, *, ledger: str | Path = "fedveil-node", epsilon: float | None = None, delta: float = 1e-5,
    **changes: Any,
) -> Mod:  # fmt: skip
    """A mod for `ClientApp(mods=[…])`: clips what your training made and, where the recipe says so, noises it.

    The reply holds the update and nothing else: metrics, examples counted and other records are computed from private rows
    and are dropped; training that fails uploads nothing but zeros (the node's own log says why), and evaluation on private rows
    is refused. Where the noise is the client's, each reply is charged in the node's own ledger first, below the folder
    `ledger`; with `epsilon` the node refuses to take part before that budget is exceeded. The server decides how many rounds
    there are, after what it saw: so the budget is what holds, and without one what was spent is nominal.

    Formal guarantee: the update has the recipe's bound; with noise on the client the reply is the mechanism that the node's
    ledger states, for the server and everybody after it. The noise comes from the operating system's entropy. Where noise or
    bound change over the rounds, the node plays each round once, in order, of the plan that it was asked for first: a
    server that could pick among them after seeing uploads would not be covered.
    """
    own = playable(recipe, changes)

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        order = _order(message, own)
        sent = next(iter(message.content.array_records.values()))
        shape = Shape.of(sent)
        before = shape.vector(sent)
        message.content = RecordDict({key: value for key, value in message.content.items() if key != RECORD})
        name, update = _trained(message, context, call_next, shape, before)
        rounds, index = int(order["rounds"]), int(order["round"]) - 1  # type: ignore[arg-type]
        task = _task(own, shape, 1, 1.0, rounds, 1, entropy())
        now = _moment(task, index)
        made = sanitise_update(task, now, update, 0, before)
        if own.place.own_noise:
            _charge_node(_node_folder(Path(ledger), context), task, now, made, epsilon, delta)
        content: dict[str, Any] = {name: shape.record(made), RECORD: ConfigRecord({"recipe": agreed(own), "round": index + 1})}
        return Message(RecordDict(content), reply_to=message)

    return mod


def _order(message: Message, own: Recipe) -> ConfigRecord:
    """What the server's `Private` asks for; refuses everything that is not that."""
    if message.metadata.message_type.split(".")[0] != "train":
        raise UserError("fedveil: this node answers training only; figures computed from its private rows do not leave it")
    order = message.content.config_records.get(RECORD)
    if order is None:
        raise UserError("fedveil: the server does not use fedveil.flower.Private; nothing was trained")
    if order["recipe"] != agreed(own):
        raise UserError("fedveil: server and node do not have the same recipe; nothing was trained")
    if not 1 <= int(order["round"]) <= int(order["rounds"]):  # type: ignore[arg-type]
        raise UserError("fedveil: a round that does not exist was asked for; nothing was trained")
    return order


def _trained(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message], shape: Shape, before: np.ndarray
) -> tuple[str, np.ndarray]:
    """Name of the arrays and the update of the user's own training; zeros if it failed: that it did may tell of its data."""
    name = next(iter(message.content.array_records))
    try:
        reply = call_next(message, context)
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        name, arrays = next(iter(reply.content.array_records.items()))
        return name, shape.vector(arrays).astype(np.float64) - before
    except (Exception, SystemExit):  # the user's own code may fail in any way
        log(ERROR, "fedveil: training failed on this node, an empty update is sent:\n%s", traceback.format_exc())
        return name, np.zeros(shape.layout.size)


def _node_folder(base: Path, context: Context) -> Path:
    """The node's own folder. Its number is the owner's word; never the node id, which the SuperLink gives anew at will."""
    own = context.node_config.get("partition-id")
    return base / ("node" if own is None else f"node-{own}")


def _charge_node(folder: Path, task: Task, now: Moment, made: np.ndarray, epsilon: float | None, delta: float) -> None:
    budgets = () if epsilon is None else (Budget(epsilon, "server", "client"),)
    promised = tuple(replace(budget, observer=observer) for budget in budgets for observer in AFTER_UPLOAD)
    ordered = any(schedule.kind != "constant" for schedule in (task.recipe.sigma, task.recipe.clip.bound))
    plan = task.setting.rounds if ordered else None
    header = Header(
        delta=delta, clients=1, budgets=budgets, simulated=False, config=digest(task.recipe), planned_rounds=plan,
        stopping="data", promised=promised,
    )  # fmt: skip
    with run_folder.hold(folder), run_folder.open_ledger(folder, lambda: header) as books:
        if (books.header.budgets, books.header.delta) != (header.budgets, header.delta):
            raise UserError(f"fedveil: the ledger in {folder} has another budget or delta; use another folder")
        if ordered and (now.number, plan) != (books.rounds + 1, books.header.planned_rounds):
            raise UserError(
                f"fedveil: noise changes over the rounds, so this node plays them in its own order: next is round "
                f"{books.rounds + 1} of {books.header.planned_rounds}; round {now.number} of {plan} was not sent"
            )
        entry = release(task.recipe, task.setting, now, {0: 1})
        books.spend(replace(entry, round=books.rounds + 1), made=hashlib.sha256(made.tobytes()).hexdigest())


# -- the server's side


@dataclass(frozen=True)
class _Round:
    now: Moment
    arrays: ArrayRecord
    drawn: tuple[int, ...]


class Private(Strategy):
    """A strategy around `inner`, which sees nothing but noised updates: their noised mean as one reply where the server adds the
    noise, the noised replies where clients do.

    clients: how many there are. cohort: how many are drawn in a round on average (default: the strategy's fraction_train of
    them). epsilon: with noise at the server it is calibrated for all rounds; with noise on the clients it only stops the run.
    copies: how many clients may hold the same example. A run that has spent its budget plays no further rounds.

    Formal guarantee: with noise at the server every update is clipped again here, the sum of a round moves by at most the
    bound with one client, gets the noise that the ledger states, and is charged before `inner` or anybody sees it. Evaluation
    on clients is switched off: its figures would carry no noise. Use `evaluate_fn` with public data.
    """

    def __init__(
        self, inner: Strategy, recipe: str | Recipe, *, clients: int, out: str | Path, cohort: float | None = None,
        epsilon: float | None = None, delta: float = 1e-5, copies: int = 1, resume: bool = False, seed: int | None = None,
        **changes: object,
    ) -> None:  # fmt: skip
        self.inner, self.recipe, self.clients, self.path = inner, playable(recipe, changes), clients, Path(out)
        self.cohort = float(cohort or max(1.0, clients * float(getattr(inner, "fraction_train", 1.0))))
        if not 0 < self.cohort <= clients:
            raise UserError(f"fedveil.flower: cohort = {self.cohort:g} must be above 0 and at most clients = {clients}.")
        if not isinstance(self.recipe.place, AtServer) and epsilon is not None and "sigma" not in changes:
            log(INFO, "fedveil: noise is added by the clients; epsilon = %g stops the run but does not choose sigma", epsilon)
        self.epsilon_budget, self.delta, self.copies, self.resume = epsilon, delta, copies, resume
        self._root: int | bytes = entropy() if seed is None else seed
        self._simulated = seed is not None
        self._roster: dict[int, int] = {}
        self._playing: _Round | None = None
        self.stopped = ""

    @property
    def observer(self) -> Observer:
        """The first observer who gets the noised release."""
        return "public" if isinstance(self.recipe.place, AtServer) else "server"

    def summary(self) -> None:
        """Log what is promised and by whom the noise is added."""
        place = self.recipe.place.words
        log(INFO, "\t├──> fedveil: recipe %s, noise %s, about %g of %d clients a round", self.recipe.name, place,
            self.cohort, self.clients)  # fmt: skip
        self.inner.summary()

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *args: Any, **options: Any) -> Result:
        """The strategy's own loop, under the ledger in `out`."""
        self._shape = Shape.of(initial_arrays)
        planned = self._planned(num_rounds)
        task = _task(self.recipe, self._shape, self.clients, self.cohort, planned, self.copies, self._root)
        if self.epsilon_budget is not None and isinstance(self.recipe.place, AtServer):
            goal = make_config({"recipe": "dp-fedavg", "delta": self.delta, "observer": self.observer})
            sigma = sigma_for(task, goal, self.epsilon_budget, planned, 1)
            log(INFO, "fedveil: sigma = %.4g gives epsilon %g at delta %g in %d rounds", sigma, self.epsilon_budget,
                self.delta, planned)  # fmt: skip
            task = replace(task, recipe=replace(self.recipe, sigma=constant(sigma)))
        self._task, self.stopped = task, ""
        with ExitStack() as stack:
            self._ledger = self._open(stack)
            result = super().start(grid, initial_arrays, num_rounds, *args, **options)
            for row in self.ledger:
                if row.verdict == "sound":
                    log(INFO, "fedveil: %s, per %s: epsilon %.4g at delta %g", row.observer, row.unit, row.epsilon, row.delta)
        return result

    def _planned(self, num_rounds: int) -> int:
        """The rounds of the whole run: those it began with, however many are asked for when it is continued."""
        path = self.path / "ledger.jsonl"
        if path.exists() != self.resume:
            told = "pass resume=True to continue it" if path.exists() else "leave resume out to begin"
            raise UserError(f"fedveil.flower: {path} {'exists' if path.exists() else 'does not exist'}; {told}.")
        return (Ledger.read(path).header.planned_rounds if self.resume else None) or num_rounds

    def _open(self, stack: ExitStack) -> Ledger:
        unit = self.recipe.place.unit
        budgets = () if self.epsilon_budget is None else (Budget(self.epsilon_budget, self.observer, unit),)
        header = Header(
            delta=self.delta, clients=self.clients, copies=self.copies, budgets=budgets, simulated=self._simulated,
            planned_rounds=self._task.setting.rounds, config=digest(self._task.recipe),
        )  # fmt: skip
        stack.enter_context(run_folder.hold(self.path))
        ledger = stack.enter_context(run_folder.open_ledger(self.path, lambda: header))
        for name in ("delta", "clients", "copies", "budgets", "simulated", "config"):
            if getattr(ledger.header, name) != getattr(header, name):
                raise UserError(f"fedveil.flower: resume: {name} differs from the ledger in {self.path}.")
        if (self.path / "nodes.json").exists():
            self._roster = {int(node): client for node, client in store.read_json(self.path / "nodes.json").items()}
        return ledger

    @property
    def ledger(self) -> list[Row]:
        """Who may learn what from the rounds so far."""
        return Ledger.read(self.path / "ledger.jsonl").table()

    def epsilon(self, observer: str | None = None, unit: str = "client") -> float | None:
        """What was spent so far; None where nothing finite is promised."""
        return Ledger.read(self.path / "ledger.jsonl").epsilon(observer or self.observer, unit)

    def _release(self, now: Moment, drawn: Iterable[int]) -> Release:
        everyone = self.recipe.place.scope == "everyone"
        return release(self._task.recipe, self._task.setting, now, dict.fromkeys(range(self.clients) if everyone else drawn, 1))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort as the ledger counts it; nobody is asked when the budget is spent."""
        self._playing = None
        number, planned = self._ledger.rounds + 1, self._task.setting.rounds
        if number > planned:  # rounds that are added after results were seen are in no promise
            self.stopped = self.stopped or f"all {planned} rounds that the run began with are played"
        drawn = tuple(self.recipe.cohort.draw(self.clients, self.cohort, self._root, number).tolist())
        now = _moment(self._task, min(number, planned) - 1)
        over = self._ledger.would_exceed(self._release(now, drawn))
        if over or self.stopped:
            self.stopped = self.stopped or f"the budget is spent: {over[0]}"
            log(WARNING, "fedveil stopped: %s", self.stopped)
            return []
        asked = list(self.inner.configure_train(server_round, arrays, config, grid))
        if not asked:
            raise UserError("fedveil.flower: the strategy asks nobody to train (fraction_train = 0?)")
        self._enlist(grid.get_node_ids())
        self._playing = _Round(now, arrays, drawn)
        if self.recipe.place.own_noise:  # noised uploads are seen as soon as they arrive: charged before anybody is asked
            self._ledger.spend(self._release(now, drawn))
        order = ConfigRecord({"recipe": agreed(self._task.recipe), "round": number, "rounds": planned})
        content = RecordDict({**dict(asked[0].content.items()), RECORD: order})
        return [
            Message(content, node, asked[0].metadata.message_type)
            for node, client in self._roster.items()
            if client in drawn
        ]

    def _enlist(self, nodes: Iterable[int]) -> None:
        """Number the nodes as they come, on disk: in a run that is continued, what a node has spent stays its own."""
        for node in sorted(nodes):
            self._roster.setdefault(node, len(self._roster))
        if len(self._roster) > self.clients:
            raise UserError(
                f"fedveil.flower: {len(self._roster)} nodes were seen but clients = {self.clients}: the promise counts "
                "clients. Raise clients, or give nodes keys so that they keep their identity over restarts."
            )
        store.write_json(self.path / "nodes.json", {str(node): client for node, client in self._roster.items()})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clip, sum, noise, charge; then let the wrapped strategy take its step."""
        if self._playing is None:
            return None, None
        now, arrays, drawn = self._playing.now, self._playing.arrays, self._playing.drawn
        self._playing = None
        updates = self._updates(replies, drawn, now)
        begun = self._shape.vector(arrays)
        if isinstance(self.recipe.place, AtServer):
            state = replace(start(self._task, begun), round=now.number - 1)
            uploads = [Upload(client, update) for client, update in sorted(updates.items())]
            moved = [merge(self._task, state, now, uploads)[0].weights]
        else:
            moved = [(begun + update).astype(np.float32) for _, update in sorted(updates.items())]
        if not self.recipe.place.own_noise:
            made = hashlib.sha256(b"".join(one.tobytes() for one in moved)).hexdigest()
            self._ledger.spend(self._release(now, drawn), made=made)
        spent = self._ledger.epsilon(self.observer, self.recipe.place.unit)
        store.append_line(self.path / "metrics.jsonl", {"round": now.number, "epsilon": spent})
        log(INFO, "fedveil: round %d charged, epsilon(%s, client) %s", now.number, self.observer,
            "none" if spent is None else f"{spent:.4g}")  # fmt: skip
        if not moved:
            return None, None
        weight = str(getattr(self.inner, "weighted_by_key", "num-examples"))
        seen = [self._as_reply(self._shape.record(one, arrays), weight) for one in moved]
        following = self.inner.aggregate_train(server_round, seen)[0]
        if following is None:
            return None, None
        flat = np.concatenate([following[name].numpy().astype(np.float32).reshape(-1) for name in self._shape.names])
        return self._shape.record(flat, arrays), None  # counters stay as they were: averaging turns them into fractions

    def _as_reply(self, arrays: ArrayRecord, weight: str) -> Message:
        key = str(getattr(self.inner, "arrayrecord_key", "arrays"))
        return Message(RecordDict({key: arrays, "metrics": MetricRecord({weight: 1.0})}), 1, "train")

    def _updates(self, replies: Iterable[Message], drawn: tuple[int, ...], now: Moment) -> dict[int, np.ndarray]:
        """The updates that arrived from drawn clients, one each, clipped again where the server adds the noise. Who is missing
        counts as zero: noise and divisor do not depend on who answers."""
        found: dict[int, np.ndarray] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            client = self._roster.get(node)
            try:
                if reply.has_error():
                    raise UserError(str(reply.error.reason))
                if client is None or client not in drawn or client in found:
                    raise UserError("it was not asked, or answered twice")
                update = self._read(reply)
            except (UserError, ValueError, KeyError, TypeError) as wrong:
                log(WARNING, "fedveil: node %s is left out of round %d: %s", node, now.number, wrong)
                continue
            found[client] = update
        if isinstance(self.recipe.place, AtServer):
            return {c: clip_update(u, now.bounds[0], self._task.recipe, self._task.layout) for c, u in found.items()}
        return {c: u for c, u in found.items() if np.isfinite(u).all()}

    def _read(self, reply: Message) -> np.ndarray:
        told = reply.content.config_records.get(RECORD)
        if told is None or told.get("recipe") != agreed(self._task.recipe):
            raise UserError("its ClientApp does not use private_mod with this recipe")
        return self._shape.vector(next(iter(reply.content.array_records.values()))).astype(np.float64)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody: figures of private rows would leave without noise."""
        if server_round == 1 and not math.isclose(float(getattr(self.inner, "fraction_evaluate", 0.0)), 0.0):
            log(WARNING, "fedveil: evaluation on clients is off, its figures carry no noise; use evaluate_fn with public data")
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing: nobody was asked."""
        return None
