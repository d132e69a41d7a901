"""What a node does with a message: decide by the contract, charge its own ledger, train, hand over.

The functions that plan, train and sanitise are the simulator's. The node derives everything that protects
its data from the recipe itself; of the server's numbers it takes the model, the round, and public state, within the
bounds of the contract.

Order: (1) the request is read and judged by the contract alone; a refusal costs nothing and says why. (2) The release is
on disk in the ledger. (3) Only then data is opened, and from here on every reply has the same form, whatever happens.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from fedveil.errors import UserError
from fedveil.federation.config import RunConfig
from fedveil.flower import books, limits
from fedveil.flower.contract import Contract, Refused, decide, decide_claims, decide_round
from fedveil.flower.owner import Owner, contract_of, deployable
from fedveil.flower.request import Request, read_request, signed, state_of
from fedveil.flower.wire import Facts

if TYPE_CHECKING:
    from fedveil.data.datasets import Dataset
    from fedveil.federation.loop import Prepared
    from fedveil.federation.round import State, Upload
    from fedveil.flower.contract import Data
    from fedveil.privacy.events import Claim, Release
    from fedveil.privacy.ledger import Ledger
    from fedveil.protect.recipe import Recipe
    from fedveil.protect.setting import Moment

RootOf = Callable[[RunConfig, int], "int | bytes"]
class Cache(TypedDict, total=False):
    """What a persistent trainer keeps between messages, each with what it was made from."""

    data_key: str
    data: Dataset
    records_key: str
    records: tuple[np.ndarray, np.ndarray]
    task_key: str
    task: Prepared


Reply = tuple[Facts, dict[str, np.ndarray]]


def answer(
    kind: str,
    facts: Mapping[str, object],
    arrays: Mapping[str, np.ndarray],
    owner: Owner,
    *,
    root_of: RootOf | None = None,
    cache: Cache | None = None,
) -> Reply:
    """The reply to one message. Never raises.

    cache: kept between messages by a persistent trainer (data and model of the last configuration).

    Formal guarantee: what is said before the charge is a function of the request, the contract and the ledger; what is
    said after it is the release that was charged.
    """
    kept = {} if cache is None else cache
    no_arrays: dict[str, np.ndarray] = {}
    run = limits.plain(facts.get("run", ""), 64) if isinstance(facts, Mapping) else ""
    try:
        if kind not in ("hello", "round"):
            raise Refused(f"unknown request '{limits.plain(kind, 40)}'")
        contract = contract_of(owner)
        request = read_request(kind, facts, arrays, owner.client, contract)
        admitted = decide(contract, request)
        if isinstance(admitted, Refused):
            raise admitted
        if contract.secure_noise and root_of is not None:
            raise Refused(
                "contract: the noise of this app could be repeated; secure_noise = true does not allow that"
            )
        deployable(request.recipe, shuffler=bool(owner.shuffler), secure_sum=request.config.secure_sum)
        if kind == "hello":
            said, sent = hello(request, contract, owner, kept), no_arrays
        elif request.sum is not None:
            said, sent = play_sum(request, contract, facts, arrays, owner, admitted.submitter, root_of, kept)
        else:
            said, sent = play(request, contract, arrays, owner, admitted.submitter, root_of, kept)
        books.audit(
            owner.home,
            asked=kind,
            run=run,
            round=facts.get("round"),
            submitter=admitted.submitter,
            answer="ok",
        )
    except Exception as why:
        said, sent = {"status": "refused", "reason": _reason(owner, why)}, no_arrays
        books.audit(owner.home, asked=limits.plain(kind, 20), run=run, answer=said["reason"])
    if isinstance(facts, Mapping) and limits.is_hex(16)(facts.get("nonce")):
        said["nonce"] = facts["nonce"]
    return _signed(said, sent, owner), sent


def _reason(owner: Owner, why: Exception) -> str:
    """What the server is told. All of this happens before any data is opened; the log has the particulars."""
    if isinstance(why, (Refused, UserError)):
        books.log(owner.home, f"refused: {limits.plain(why, 1000)}")
        return limits.plain(why)
    books.log(owner.home, "".join(traceback.format_exception(why)))
    return "the node cannot take part now; its log (home/node.log) says why"


def _signed(said: Facts, sent: Mapping[str, np.ndarray], owner: Owner) -> Facts:
    """The reply with the node's signature, where it has an identity."""
    if not owner.identity:
        return said
    from fedveil.flower.identity import read_identity

    try:
        return signed(said, sent, read_identity(owner.identity), "reply")
    except UserError as wrong:
        books.log(owner.home, str(wrong))
        return said


def hello(request: Request, contract: Contract, owner: Owner, cache: Cache) -> Facts:
    """Say which client this is and how many records the contract states. No data is opened, unless it is public."""
    from fedveil import __version__

    examples = contract.data.examples if contract.data else len(_demo(request.config, owner, cache).x)
    return {
        "status": "ok",
        "client": owner.client,
        "examples": examples,
        "contract": contract.digest,
        "data": None if contract.data is None else contract.data.digest,
        "version": __version__,
    }


def _demo(config: RunConfig, owner: Owner, cache: Cache) -> Dataset:
    """This node's rows of a built-in, public dataset, for trying out."""
    key = (
        f"{owner}{config.dataset}{config.limit}{config.partition}{config.partition_options}"
        f"{config.seed}{config.split_seed}{config.validation}{config.target}{config.clients}"
    )
    if cache.get("data_key") != key:
        from fedveil.data.datasets import dataset_names, load
        from fedveil.data.partition import partition

        if config.dataset not in dataset_names():
            raise Refused(
                f"dataset '{limits.plain(config.dataset, 60)}' is no built-in name and this node has no data of its own "
                '(--node-config data="FILE", with a contract)'
            )
        dataset = load(
            config.dataset,
            root=owner.datasets or None,
            seed=config.split_seed,
            validation=config.validation,
            target=config.target,
            limit=config.limit,
        )
        dealt = partition(dataset, config.partition, config.clients, config.seed, **config.partition_options)
        rows = np.asarray(dealt.rows(owner.client))
        own = replace(
            dataset, x=dataset.x[rows], y=dataset.y[rows], x_test=dataset.x_test[:0], y_test=dataset.y_test[:0],
            x_validation=None, y_validation=None, groups=None, attributes={},
        )  # fmt: skip
        cache.pop("records_key", None), cache.pop("records", None), cache.pop("task_key", None), cache.pop("task", None)
        cache["data_key"], cache["data"] = key, own
    return cache["data"]


def play(
    request: Request,
    contract: Contract,
    arrays: Mapping[str, np.ndarray],
    owner: Owner,
    submitter: str,
    root_of: RootOf | None,
    cache: Cache,
) -> Reply:
    """One round.

    Formal guarantee: the upload is what `federation.round.uploads_of` lets out for this recipe, with noise and
    batches keyed by fresh operating-system entropy (unless a test gives the root), and the release is on
    disk in this node's ledger, within the owner's budget, before any data is opened. What goes wrong after that
    changes values only as the charged mechanism would on other data, never the form of the reply.
    """
    coming = _coming(request, contract, arrays, owner, root_of, cache)
    prepared, state, now = coming.prepared, coming.state, coming.now
    recipe = coming.recipe
    _charge(coming, request, contract, owner, submitter, root_of)
    # From here on nothing may raise.
    upload = _upload(prepared, state, now, request, contract, owner, cache)
    if contract.checks.change and upload.bits is None:
        from fedveil.flower.modelcheck import remember

        remember(owner.home, request, state.weights, upload.update)
    said: Facts = {"status": "ok", "round": request.round, "client": owner.client, "ticket": request.ticket}
    if upload.bits is None:
        more = {} if upload.below is None else {"below": upload.below}
        return said | more, {"update": upload.update.astype(np.float32)}
    if not recipe.channel.hides_reports:
        return said, {"bits": upload.bits}
    try:
        _to_shuffler(owner, request, upload.bits, prepared.task.layout.size)
    except Exception:
        books.log(owner.home, traceback.format_exc())
    return said | {"status": "shuffled"}, {}


@dataclass(frozen=True)
class _Coming:
    """A round that the contract allows, before it is charged."""

    prepared: Prepared
    state: State
    now: Moment
    recipe: Recipe
    release: Release


def _coming(
    request: Request,
    contract: Contract,
    arrays: Mapping[str, np.ndarray],
    owner: Owner,
    root_of: RootOf | None,
    cache: Cache,
    checked: bool = False,
) -> _Coming:
    """The round as this node would play it; `Refused` where the contract does not allow its numbers.

    checked: the model was looked at when the attempt began (a secure sum's later messages are bound to it).
    """
    from fedveil.federation.round import moment_of, recipe_of
    from fedveil.flower.modelcheck import before_training
    from fedveil.keys import entropy

    prepared = _prepared(request, contract, owner, cache)
    root = entropy() if root_of is None else root_of(request.config, owner.client)
    task = replace(prepared.task, root=root)
    prepared = replace(prepared, task=task)
    state = state_of(arrays, task, request.round, contract.bounds.weight)
    if not checked:
        before_training(prepared, state, request, contract, owner.home)
    recipe = recipe_of(task, owner.client)
    now = moment_of(task, state)
    if owner.client in task.own:
        now = replace(now, sigmas=(task.own[owner.client][1],) * len(now.sigmas))
    if recipe.channel.hides_reports:
        now = replace(now, arrived=_crowd(owner))
    clips = now.bounds
    if recipe.clip.rule.rescales:  # the clip to 1 of scaled gradients is one to this length of plain ones
        memory: Any = state.clip  # of AdaClip, or of a rule like it
        clips = (float(np.sqrt(np.sum(memory.square, dtype=np.float64))),)
    decide_round(contract, recipe, clips, now.sigmas, now.epsilon)
    release = own_release(prepared, now, owner.client)
    decide_claims(contract, [claim for _, claims in release.groups for claim in claims])
    return _Coming(prepared, state, now, recipe, release)


def _charge(
    coming: _Coming,
    request: Request,
    contract: Contract,
    owner: Owner,
    submitter: str,
    root_of: RootOf | None,
) -> None:
    """The round's release in this node's ledger, or `Refused`."""
    from fedveil.flower.modelcheck import remember

    origin = {"run": request.run, "submitter": submitter, "contract": contract.digest[:16]}
    books.charge(owner, contract, coming.release, secure=root_of is None, origin=origin)
    if contract.checks.change:
        remember(owner.home, request, coming.state.weights)


def play_sum(
    request: Request,
    contract: Contract,
    facts: Mapping[str, object],
    arrays: Mapping[str, np.ndarray],
    owner: Owner,
    submitter: str,
    root_of: RootOf | None,
    cache: Cache,
) -> Reply:
    """One message of a secure sum.

    Formal guarantee: that of `flower.secure_sum.answer`: one vector per attempt leaves, masked, with this node's share of
    the noise in it, after its release is on disk in this node's ledger. Number of nodes, threshold, colluders, grid and noise
    are worked out here from what the contract allows; the identity keys are those of the owner's roster.
    """
    from fedveil.federation.round import noised_of
    from fedveil.federation.sums import parameters_of, share_key
    from fedveil.flower import secure_sum
    from fedveil.flower.identity import read_identity
    from fedveil.secure_sum.parameters import Policy
    from fedveil.secure_sum.party import Session

    assert request.sum is not None and contract.sum is not None
    run, attempt, size = bytes.fromhex(request.sum["run"]), request.sum["attempt"], request.sum["size"]
    keys = _sum_keys(owner, contract, request.config.clients)
    if not owner.identity:
        raise Refused("this node has no identity key, which a secure sum needs (--node-config identity)")
    data = arrays["message"].tobytes()[:size] if "message" in arrays else b""
    if size != len(data) or (data and len(arrays) > 1):
        raise Refused("request: a message of a secure sum has 'message', of as many bytes as it says; the first has the model")
    if data:
        arrays = secure_sum.model_kept(owner.home, run, request.round, attempt)
    else:
        arrays = {name: value for name, value in arrays.items() if name != "message"}
    coming = _coming(request, contract, arrays, owner, root_of, cache, checked=bool(data))
    task, now = coming.prepared.task, coming.now
    (noised,) = noised_of(task, now, -1, task.setting.examples)
    parameters = parameters_of(task, noised, secure_sum.model_of(facts, arrays))
    session = Session(run, request.round, attempt, keys, parameters)
    policy = Policy(colluders=contract.sum.colluders)
    seat = secure_sum.Seat(owner.home, session, owner.client + 1, read_identity(owner.identity), policy)
    found = secure_sum.answer(
        seat,
        data,
        charge=lambda: _charge(coming, request, contract, owner, submitter, root_of),
        values=lambda: _upload(coming.prepared, coming.state, now, request, contract, owner, cache).update,
        noise_key=share_key(task, now, owner.client),
    )
    if not data:
        secure_sum.kept(seat, arrays)
    said: Facts = {"status": "ok", "round": request.round, "client": owner.client, "ticket": request.ticket}
    return said, {"message": np.frombuffer(found, np.uint8)}


def _sum_keys(owner: Owner, contract: Contract, clients: int) -> tuple[bytes, ...]:
    """The identity keys of all nodes, in their order, from the roster that the owner agreed to."""
    from fedveil.flower.roster import read_roster

    assert contract.sum is not None
    if not owner.roster:
        raise Refused('this node has no roster, which a secure sum needs (--node-config roster="FILE")')
    signer = bytes.fromhex(contract.sum.owner) if contract.sum.owner else None
    try:
        roster = read_roster(owner.roster, pinned=contract.sum.roster, owner=signer)
    except UserError as wrong:
        books.log(owner.home, str(wrong))
        raise Refused("the node's roster is not the one that its owner agreed to; its log says why") from None
    if [m.number for m in roster.members] != list(range(clients)):
        raise Refused(
            f"secure sum: the roster has {len(roster.members)} nodes and must have exactly 0 to {clients - 1}, for everyone on "
            "it takes part"
        )
    return tuple(member.identity for member in roster.members)


def _upload(
    prepared: Prepared,
    state: State,
    now: Moment,
    request: Request,
    contract: Contract,
    owner: Owner,
    cache: Cache,
) -> Upload:
    """The upload of training on the owner's data; of training on nothing, with the same noise, if that fails.

    Formal guarantee: never raises. Training that breaks is told to the private log only. That numbers left the range of
    floats is a function of noised steps, so replacing the upload is post-processing of what was charged.
    """
    from fedveil.federation.loop import train_cohort
    from fedveil.federation.round import uploads_of

    try:
        whole = _with_data(prepared, request, contract, owner, cache)
        for chunk, result in train_cohort(whole, state, now, np.array([owner.client])):
            for upload in uploads_of(whole.task, now, state, chunk, result):
                if _fits(upload, prepared):
                    return upload
        books.log(owner.home, f"round {now.number}: training left the range of numbers; noise alone was sent")
    except Exception:
        books.log(
            owner.home, f"round {now.number}: training failed; noise alone was sent: {traceback.format_exc()}"
        )
    return noise_alone(prepared, state, now, owner.client)


def _fits(upload: Upload, prepared: Prepared) -> bool:
    if upload.bits is not None:
        return True
    return upload.update.shape == (prepared.task.layout.size,) and bool(np.isfinite(upload.update).all())


def noise_alone(prepared: Prepared, state: State, now: Moment, client: int) -> Upload:
    """The upload of a client all of whose records add nothing: the recipe's noise and nothing else."""
    from fedveil.federation.round import plan_of, recipe_of, uploads_of, work_of
    from fedveil.training import pool
    from fedveil.training.contract import LocalResult

    task = prepared.task
    recipe, plan = recipe_of(task, client), plan_of(task, now, client, prepared.partition.size(client))
    zero, none = np.zeros((1, task.layout.size), np.float32), np.zeros(1)
    figures = np.zeros((1, task.layout.layers))
    result = LocalResult(zero, np.array([True]), none, figures, figures, none, none, none)
    if recipe.place.in_steps:
        work = replace(work_of(task, state, now, client), rows=np.full((task.setting.steps, 1), -1, np.int32))
        # Where every contribution carries noise of its own, that of as many as are planned for: not of none.
        plan = replace(plan, noised=tuple(replace(one, at_count=0.0) for one in plan.noised))
        trained = pool.train(task.module, state.weights, task.x, task.y, [work], plan)
        if bool(trained.finite[0]):
            result = replace(trained, examples=none, unclipped=none)
    return next(iter(uploads_of(task, now, state, [client], result)))


def _with_data(
    prepared: Prepared, request: Request, contract: Contract, owner: Owner, cache: Cache
) -> Prepared:
    """The same preparation with the owner's records in it, behind the run's fixed features."""
    told = cache["data_key"] if contract.data is None else f"{contract.data} {owner.data} {_changed(owner.data)}"
    key = f"{told} {request.config.features}"
    if cache.get("records_key") != key:
        from fedveil.federation.loop import with_features

        dataset = _demo(request.config, owner, cache) if contract.data is None else _records(contract.data, owner)
        found = with_features(dataset, request.config)
        cache["records"] = found.x, found.y
        cache["records_key"] = key
    x, y = cache["records"]
    return replace(prepared, task=replace(prepared.task, x=x, y=y))


def _records(data: Data, owner: Owner) -> Dataset:
    """The owner's file as the contract describes it."""
    from fedveil.flower.owndata import dataset_of, read_rows

    if not owner.data:
        raise UserError('this node has no data (--node-config data="FILE")')
    return dataset_of(read_rows(owner.data, data), data, "contract", test=False)


def _changed(path: str) -> str:
    try:
        found = Path(path).stat()
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"


def _prepared(request: Request, contract: Contract, owner: Owner, cache: Cache) -> Prepared:
    """The simulator's `Prepared` with one client, this one, and without data: its form comes from the contract."""
    from fedveil.data.partition import Partition
    from fedveil.federation.loop import engine_of, prepare
    from fedveil.flower.owndata import empty_dataset

    config = request.config
    if contract.data is None:
        dataset = _demo(config, owner, cache)
        count = len(dataset.x)
        dataset = replace(dataset, x=dataset.x[:1], y=dataset.y[:1])
    else:
        dataset, count = empty_dataset(contract.data), contract.data.examples
    key = repr((config, request.model, request.examples, request.sigma, contract, owner))
    if cache.get("task_key") == key:
        return cache["task"]

    def mine(client: int) -> np.ndarray:
        if client != owner.client:
            raise IndexError(f"client {client} is not on this node")
        return np.arange(count)

    dealt = Partition("node", config.clients, 1, request.examples, mine, lambda _: count)
    # What follows needs no data: schedules, promises and the form of updates.
    plain = config.model_copy(
        update={"client_epsilons": None, "client_mechanisms": None, "calibrate": False, "model": request.model}
    )
    prepared = prepare(plain, dataset, dealt=dealt)
    size, dataset = prepared.task.layout.size, prepared.dataset
    if tuple(dataset.shape) != request.shape or dataset.classes != request.classes:
        raise Refused("the run expects examples of another form than the node's data has, features included")
    if size > contract.bounds.parameters:
        raise Refused(
            f"contract: the model has {size} weights, at most {contract.bounds.parameters} are allowed"
        )
    if request.sigma is not None:
        # A client with its own budget: the server worked the noise out; contract and ledger judge it here.
        task = replace(
            prepared.task,
            own={owner.client: (request.recipe, float(request.sigma))},
            own_epsilon={c: _budget(config, c) for c in range(config.clients)},
        )
        engine, why = engine_of(task, prepared.initial, dealt, plain)  # its own mechanism may need another one
        setting = replace(task.setting, engine=engine)
        prepared = replace(prepared, task=replace(task, setting=setting), engine=engine, engine_reason=why)
    cache.update({"task_key": key, "task": prepared})
    return prepared


def _budget(config: RunConfig, client: int) -> float:
    assert config.client_epsilons
    return config.client_epsilons[client % len(config.client_epsilons)]


def own_release(prepared: Prepared, now: Moment, client: int) -> Release:
    """This node's ledger entry for taking part in one round.

    A node knows when it takes part and cannot check how others are drawn, so it counts every participation
    without amplification by client sampling; batches it draws itself, so those count as drawn. The server may choose a
    round's noise after what it saw, so sound claims are composed by a filter.
    """
    from fedveil.federation.round import recipe_of
    from fedveil.federation.sums import promised
    from fedveil.privacy.events import Release
    from fedveil.protect.promise import claims
    from fedveil.protect.sampling import Everybody

    task, size = prepared.task, prepared.partition.size(client)
    recipe = replace(recipe_of(task, client), cohort=Everybody())
    alone = Release(now.number, (((0,), tuple(claims(recipe, task.setting, now, size))),))
    found = alone if task.secure is None else promised(task, now, alone, {0: size})
    groups = tuple((members, tuple(map(_filtered, said))) for members, said in found.groups)
    return replace(found, groups=groups)


def _filtered(claim: Claim) -> Claim:
    """A sound claim that adds up, to be composed by a filter."""
    adds_up = claim.verdict == "sound" and claim.accountant is None and claim.scope != "single"
    return replace(claim, accountant=books.FILTER) if adds_up else claim


def _crowd(owner: Owner) -> int:
    """The fewest senders among which the owner's shuffler ever hides a report."""
    import asyncio

    from fedveil.flower.shuffler import facts_of

    try:
        return int(asyncio.run(facts_of(owner.shuffler))["minimum"])
    except (OSError, ValueError, KeyError, TypeError, EOFError) as wrong:
        books.log(owner.home, f"shuffler {owner.shuffler}: {wrong}")
        raise Refused("the node's shuffler does not answer") from None


def _to_shuffler(owner: Owner, request: Request, bits: np.ndarray, size: int) -> None:
    """Seal every report to the server's key and hand it to the owner's shuffler: the SuperLink never sees it."""
    import asyncio

    from fedveil.flower.identity import read_identity
    from fedveil.flower.shuffler import seal_reports, send_round

    frames = seal_reports(bytes.fromhex(request.shuffler_key), bits, size, request.ticket, request.group)
    secret = read_identity(owner.identity) if owner.identity else None
    asyncio.run(send_round(owner.shuffler, request.ticket, str(owner.client), frames, secret))


def ledger_of(home: Path) -> Ledger:
    """A node's ledger, for reading."""
    from fedveil.privacy.ledger import Ledger

    return Ledger.read(home / "ledger.jsonl")
