"""The Flower engine over the in-process grid: equal to the simulator, and right whatever comes back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Error, Message

from fedveil.errors import UserError
from fedveil.federation import loop
from fedveil.federation.config import RunConfig, make_config
from fedveil.federation.store import open_run
from fedveil.flower import client_app, server, wire
from fedveil.flower import node as nodes
from fedveil.flower.grid import LocalGrid
from fedveil.flower.node import ledger_of
from fedveil.flower.server import Options, gather, options_of, parties_of, serve
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.ledger.journal import read
from fedveil.protect import bounded, place
from fedveil.training import pool

NODES = {100: 2, 101: 0, 102: 3, 103: 1}  # node id -> client: ids say nothing about numbers


def config_of(recipe: str, **more: Any) -> RunConfig:
    values = {
        "clients": 4,
        "rounds": 2,
        "local_steps": 5,
        "dataset": "cancer",
        "partition": "iid",
        "delta": 1e-4,
    }
    return make_config({"recipe": recipe, **values, **more})


def policy_text(recipe: str, **more: Any) -> str:
    values = {
        "recipes": [recipe],
        "secure_noise": False,
        "maximum_epsilon": "unlimited",
        "changes": ["sigma", "clip.bound", "channel", "epsilon", "mechanism"],
        **more,
    }
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def nodes_in(folder: Path, policy: str, **more: Any) -> dict[int, dict[str, Any]]:
    (folder / "policy.toml").write_text(policy)
    return {
        node: {
            "home": str(folder / f"n{client}"),
            "policy": str(folder / "policy.toml"),
            "partition-id": client,
            **more,
        }
        for node, client in NODES.items()
    }


def seeded(config: RunConfig, client: int) -> int:
    return config.seed


def federate(
    folder: Path,
    config: RunConfig,
    tamper: Any = None,
    *,
    policy: str | None = None,
    root: int | None = 0,
    options: dict[str, Any] | None = None,
    change: Callable[[LocalGrid], None] | None = None,
    **node: Any,
) -> tuple[dict[str, Any], LocalGrid]:
    app = client_app(None if root is None else seeded)
    grid = LocalGrid(app, nodes_in(folder, policy or policy_text(config.recipe), **node), tamper)
    if change:
        change(grid)
    settings = {"out": str(folder / "run"), "join": 0.2, "deadline": 0.2, "poll": 0.01, **(options or {})}
    return serve(grid, config, Options(**settings), root=root), grid


def weights(folder: Path) -> np.ndarray:
    return open_run(folder).state().weights


EQUAL = [
    ("fed-cdp", {}),
    ("fed-cdp-decay", {}),
    ("fed-sdp", {"cohort_size": 2}),
    ("fed-sdp-client", {}),
    ("quantile-clip", {}),
    ("adaclip", {}),
    ("ldp-fl", {"channel": "none"}),
    ("nbafl", {}),
    ("udp-fl", {"client_epsilons": [1.0, 2.0, 4.0, 8.0], "client_mechanisms": ["gaussian", "laplace"]}),
    ("non-private", {}),
]


@pytest.mark.parametrize(("recipe", "more"), EQUAL)
def test_same_seed_gives_the_simulators_model_bit_for_bit(
    tmp_path: Path, recipe: str, more: dict[str, Any]
) -> None:
    config = config_of(recipe, **more)
    loop.run(config, tmp_path / "sim")
    federate(tmp_path, config)
    assert np.array_equal(weights(tmp_path / "run"), weights(tmp_path / "sim"))


def test_server_and_simulator_ledgers_state_the_same_epsilons(tmp_path: Path) -> None:
    config = config_of("fed-cdp")
    simulated = loop.run(config, tmp_path / "sim")
    result, _ = federate(tmp_path, config)
    assert result["ledger"] == simulated["ledger"]


def test_noise_is_never_repeatable_unless_a_root_is_built_in(tmp_path: Path) -> None:
    config = config_of("fed-cdp", rounds=1)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        result, _ = federate(
            tmp_path / name, config, policy=policy_text("fed-cdp", secure_noise=True), root=None
        )
        assert result["simulated"] is False
    assert not np.array_equal(weights(tmp_path / "a/run"), weights(tmp_path / "b/run"))
    assert ledger_of(tmp_path / "a/n0").header.simulated is False


def test_a_policy_with_secure_noise_refuses_an_app_with_a_built_in_root(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="secure_noise"):
        federate(tmp_path, config_of("fed-cdp"), policy=policy_text("fed-cdp", secure_noise=True))


def test_a_node_speaks_of_the_engine_that_its_own_mechanism_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's noise goes through an engine with a proof, that of nodes 1 and 3 does not: those say so."""
    choose, prepared = pool.choose, nodes._prepared

    def at_the_node(*given: Any) -> Any:
        def graph_for_laplace(module: Any, plan: Any, engine: str = "auto", **more: Any) -> tuple[str, str]:
            return choose(module, plan, "graph" if plan.noised[0].law.name == "laplace" else engine, **more)

        with monkeypatch.context() as patch:  # a server's own word about it is none that a node relies on
            patch.setattr(pool, "choose", graph_for_laplace)
            return prepared(*given)

    monkeypatch.setattr(nodes, "_prepared", at_the_node)
    for module in (place, bounded):
        monkeypatch.setattr(module, "COVERED", ("native", "stacked"))
    own = {"client_epsilons": [4.0, 8.0], "client_mechanisms": ["gaussian", "laplace"]}
    federate(tmp_path, config_of("udp-fl", rounds=1, **own))
    for client in range(4):
        rows = ledger_of(tmp_path / f"n{client}").table()
        said = [r.reason for r in rows if (r.observer, r.unit) == ("server", "example")]
        assert any("not proven" in reason for reason in said) == (client % 2 == 1), said


def test_noise_too_narrow_to_be_drawn_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = config_of("udp-fl-staircase", protect={"sigma": "linear:3:1e-6"})
    with pytest.raises(UserError, match="lambda"):
        federate(tmp_path, config)
    assert not (tmp_path / "run" / "run.json").exists() and not list(tmp_path.glob("n*/ledger*"))


def test_each_node_pays_in_its_own_ledger_before_it_replies(tmp_path: Path) -> None:
    seen = []

    def look(node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train":
            seen.append(len(ledger_of(tmp_path / f"n{NODES[node]}").participations().nonzero()[0]))
        return [reply]

    result, _ = federate(tmp_path, config_of("fed-cdp"), look)
    assert seen == [1] * 8
    for client in range(4):
        own = ledger_of(tmp_path / f"n{client}")
        assert own.participations().tolist() == [2]
        stated = next(
            r
            for r in result["ledger"]
            if (r["observer"], r["unit"], r["verdict"]) == ("server", "example", "sound")
        )
        spent = own.spent(0, "server", "example", delta=1e-4)  # by a filter: the server may choose noise as it goes
        assert spent is not None and 0.8 * stated["epsilon"] <= spent <= 2 * stated["epsilon"]


@pytest.mark.parametrize(
    ("recipe", "policy", "more", "reason"),
    [
        ("fed-cdp", {"recipes": ["fed-cdp-sound"]}, {}, "recipe 'fed-cdp' is not allowed"),
        ("fed-cdp", {"changes": []}, {"protect": {"sigma": 1}}, "may not change 'sigma'"),
        ("fed-cdp", {}, {"protect": {"where": "nowhere", "mechanism": "none"}}, "may not change"),
        ("fed-cdp", {"maximum_epsilon": 0.01}, {}, "budget"),
        ("fed-cdp", {"minimum_sigma": 7.0}, {}, "sigma 6"),
        ("fed-alpha-cdp", {"maximum_epsilon": 100.0}, {}, "without a finite promise"),
        ("fed-cdp", {"maximum_epsilon": 1e6, "unit": "reported-weight"}, {}, "without a finite promise"),
        ("fed-sdp", {"maximum_epsilon": 1e6}, {"cohort_size": 4.0}, "without a finite promise"),
        (
            "udp-fl",
            {"recipes": ["udp-fl-gaussian"], "changes": ["sigma"]},
            {"client_epsilons": [1.0], "client_mechanisms": ["laplace"]},
            "not even for one client",
        ),
        ("fed-cdp", {}, {"learning_rate": 1e38}, "learning_rate = 1e"),
        ("fed-cdp", {}, {"local_steps": 20_000_000}, "local_steps"),
        ("fed-cdp", {}, {"protect": {"clip.bound": 1e-36}}, "clip bound 1e-36"),
        ("ldp-fl", {"maximum_report_epsilon": 0.5}, {"protect": {"channel": "none"}}, "per reported weight"),
        ("non-private", {"minimum_sigma": 0.1}, {}, "sigma 0"),
    ],
)
def test_a_node_refuses_what_its_owner_did_not_allow(
    tmp_path: Path, recipe: str, policy: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError) as stopped:
        federate(
            tmp_path, config_of(recipe, **more), policy=policy_text(recipe, **policy), options={"patience": 1}
        )
    said = str(stopped.value)
    if "private.jsonl has the reasons" in said:  # who refused is who was drawn, which this promise keeps secret
        said = (tmp_path / "run" / "private.jsonl").read_text()
    assert reason in said
    for client in range(4):
        path = tmp_path / f"n{client}/ledger.jsonl"
        assert not path.exists() or not Ledger.read(path).participations().any()


def test_a_node_stops_at_its_budget_and_the_others_go_on(tmp_path: Path) -> None:
    config = config_of("fed-cdp", rounds=3)
    (tmp_path / "first").mkdir()
    federate(tmp_path / "first", config)
    full = ledger_of(tmp_path / "first/n0").spent(0, "server", "example", delta=1e-5, accountant="filter")
    assert full is not None
    (tmp_path / "second").mkdir()
    # Enough for two rounds, not for three.
    tight = policy_text("fed-cdp", maximum_epsilon=full * 0.98)

    def one_is_tight(grid: LocalGrid) -> None:
        (tmp_path / "second/tight.toml").write_text(tight)
        grid.nodes[101]["policy"] = str(tmp_path / "second/tight.toml")

    federate(tmp_path / "second", config, change=one_is_tight)
    lines = open_run(tmp_path / "second/run").metrics
    assert [line["arrived"] for line in lines] == [4, 4, 3]
    assert lines[2]["refused"] == 1
    assert ledger_of(tmp_path / "second/n0").participations().tolist() == [2]


def test_sum_only_recipes_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sees each upload"):
        federate(tmp_path, config_of("sum-cdp", local_steps=1))
    with pytest.raises(UserError, match="needs a shuffler beside Flower"):
        federate(tmp_path, config_of("ldp-fl"))


# --- faults ---


def on_train(
    bad: Callable[[Message, Message], list[Message]], node: int = 101
) -> Callable[[int, Message, Message], list[Message]]:
    def tamper(at: int, message: Message, reply: Message) -> list[Message]:
        return bad(message, reply) if at == node and message.metadata.message_type == "train" else [reply]

    return tamper


def rewritten(
    message: Message, reply: Message, array: np.ndarray | None = None, **facts: Any
) -> list[Message]:
    old, arrays = wire.read(reply)
    return [wire.answer(message, {**old, **facts}, arrays if array is None else {"update": array})]


def update_of(reply: Message) -> np.ndarray:
    return wire.read(reply)[1]["update"].copy()


def spoiled(value: float) -> Callable[[Message, Message], list[Message]]:
    def bad(message: Message, reply: Message) -> list[Message]:
        update = update_of(reply)
        update[3] = value
        return rewritten(message, reply, update)

    return bad


FAULTS: dict[str, tuple[Callable[[Message, Message], list[Message]], str]] = {
    "not a number": (spoiled(float("nan")), "rejected"),
    "infinite": (spoiled(float("inf")), "rejected"),
    "huge": (spoiled(1e30), "rejected"),
    "wrong shape": (lambda m, r: rewritten(m, r, update_of(r)[:-1]), "rejected"),
    "two dimensions": (lambda m, r: rewritten(m, r, update_of(r)[None]), "rejected"),
    "wrong kind": (lambda m, r: rewritten(m, r, update_of(r).astype(np.float64)), "rejected"),
    "oversized": (lambda m, r: rewritten(m, r, np.zeros(10**6, np.float32)), "rejected"),
    "another round": (lambda m, r: rewritten(m, r, round=7), "rejected"),
    "another client": (lambda m, r: rewritten(m, r, client=3), "rejected"),
    "another ticket": (lambda m, r: rewritten(m, r, ticket=-1), "rejected"),
    "error": (lambda m, r: [Message(Error(0, "crashed"), reply_to=m)], "error"),
    "silent": (lambda m, r: [], "missing"),
}


def told(folder: Path) -> list[dict[str, Any]]:
    """Public and private facts of every round together."""
    run = open_run(folder)
    private = {line["round"]: line for line in run.private} if (folder / "private.jsonl").exists() else {}
    return [{**line, **private.get(line["round"], {})} for line in run.metrics]


@pytest.mark.parametrize(
    ("recipe", "fault"),
    [
        *(("fed-cdp", fault) for fault in FAULTS),
        *(
            (recipe, fault)
            for recipe in ("fed-sdp-client", "fed-sdp")
            for fault in ("not a number", "huge", "silent")
        ),
    ],
)
def test_a_bad_reply_is_counted_and_left_out(tmp_path: Path, recipe: str, fault: str) -> None:
    config = config_of(recipe, rounds=1, cohort_size=None)
    bad, kind = FAULTS[fault]
    federate(tmp_path, config, on_train(bad))
    line = told(tmp_path / "run")[0]
    assert (line["arrived"], line[kind]) == (3, 1)
    (tmp_path / "without").mkdir()
    federate(tmp_path / "without", config, on_train(lambda m, r: []))
    assert np.array_equal(weights(tmp_path / "run"), weights(tmp_path / "without/run"))


def test_a_replayed_reply_counts_once_and_a_foreign_one_not_at_all(tmp_path: Path) -> None:
    config = config_of("fed-cdp")
    (tmp_path / "plain").mkdir()
    federate(tmp_path / "plain", config)
    old: list[Message] = []

    def replay(message: Message, reply: Message) -> list[Message]:
        stray = wire.answer(message, *wire.read(reply))
        stray.metadata.__dict__["_reply_to_message_id"] = "m0"
        old.append(reply)
        return [reply, reply, old[0], stray]

    (tmp_path / "replay").mkdir()
    federate(tmp_path / "replay", config, on_train(replay))
    lines = open_run(tmp_path / "replay/run").metrics
    assert [line["duplicate"] for line in lines] == [2, 1]
    assert [line["stray"] for line in lines] == [1, 2]
    assert np.array_equal(weights(tmp_path / "replay/run"), weights(tmp_path / "plain/run"))


def test_server_noise_keeps_its_scale_when_few_arrive(tmp_path: Path) -> None:
    """fed-sdp with zero updates: the model moves by exactly the noise of deviation sigma * bound, over the planned cohort."""
    from fedveil.keys import derive
    from fedveil.protect import exact

    config = config_of("fed-sdp", rounds=1, cohort_size=4.0, protect={"sigma": 2.0, "clip.bound": 3.0})

    def zero(node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        return rewritten(message, reply, np.zeros_like(update_of(reply))) if NODES[node] == 0 else []

    federate(tmp_path, config, zero)
    before = loop.prepare(config).initial
    moved = weights(tmp_path / "run").astype(np.float64) - before
    grid = 3.0 * 2.0**-20
    drawn = exact.gaussian(derive(0, "server-noise", 1)[:16], 0, before.size, 2.0 * 3.0 / grid)
    assert np.allclose(moved, grid * drawn / 4, atol=1e-6)
    assert told(tmp_path / "run")[0]["arrived"] == 1
    charged = Ledger.read(tmp_path / "run/ledger.jsonl")
    assert charged.participations().tolist() == [1, 1, 1, 1]


def test_the_log_tells_neither_who_came_nor_how_many_where_the_promise_keeps_that_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's log is served by the SuperLink to whoever may ask for it."""
    said: list[str] = []
    monkeypatch.setattr(server, "_say", said.append)

    def breaks(node: int, message: Message, reply: Message) -> list[Message]:
        lost = message.metadata.message_type == "train" and node == 100
        return [Message(Error(code=1, reason="gone"), reply_to=message) if lost else reply]

    config = config_of("fed-sdp", rounds=2, cohort_size=4.0, protect={"sigma": 2.0})
    federate(tmp_path, config, breaks)
    rounds = [line for line in said if line.startswith("round ")]
    assert len(rounds) == 2 and not any(word in "".join(rounds) for word in ("clients", "arrived", "client 2", "error"))
    assert all(line["reasons"] for line in told(tmp_path / "run"))

    def nobody(node: int, message: Message, reply: Message) -> list[Message]:
        return [] if message.metadata.message_type == "train" else [reply]

    with pytest.raises(UserError, match="too few usable replies") as stopped:
        (tmp_path / "b").mkdir()
        federate(tmp_path / "b", config_of("fed-sdp", rounds=9, cohort_size=2.0), nobody)
    assert "client" not in str(stopped.value)


def test_a_round_with_an_empty_cohort_is_charged_like_any_other(tmp_path: Path) -> None:
    """Amplification by sampling counts every round, also those for which nobody was drawn."""
    config = config_of("fed-sdp", rounds=6, cohort_size=0.5, protect={"sigma": 2.0})
    result, _ = federate(tmp_path, config)
    assert 0 in [line["clients"] for line in told(tmp_path / "run")]
    # Who came, and how many, is a secret that the promise counts on: no public file tells.
    for line in open_run(tmp_path / "run").metrics:
        assert not {"clients", "arrived", "uploads", "bytes_up"} & set(line)
    groups = [
        record.body["groups"]
        for record in read(tmp_path / "run/ledger.jsonl").records
        if "groups" in record.body
    ]
    assert len({json.dumps(group) for group in groups}) == 1  # the ledger names everybody in every round
    row = next(
        r
        for r in result["ledger"]
        if (r["observer"], r["unit"], r["verdict"]) == ("public", "client", "sound")
    )
    ledger = Ledger.read(tmp_path / "run/ledger.jsonl")
    assert ledger.rounds == 6
    grown = [
        Ledger.read(tmp_path / "run/ledger.jsonl", until=k).epsilon("public", "client") for k in range(1, 7)
    ]
    assert all(a is not None and b is not None and a < b for a, b in pairwise(grown))
    assert row["epsilon"] == grown[-1]


def test_an_unclipped_update_is_rejected_where_the_server_adds_the_noise(tmp_path: Path) -> None:
    config = config_of("fed-sdp", rounds=1, cohort_size=4.0)

    def larger(message: Message, reply: Message) -> list[Message]:
        update = update_of(reply)
        return rewritten(message, reply, update * np.float32(100 / np.linalg.norm(update)))

    federate(tmp_path, config, on_train(larger))
    assert told(tmp_path / "run")[0]["rejected"] == 1


def test_too_few_replies_skip_the_round_stay_charged_and_end_the_run_with_a_reason(tmp_path: Path) -> None:
    config = config_of("fed-cdp", rounds=5)
    silent = {"minimum": 4, "patience": 2}
    with pytest.raises(UserError, match="2 rounds in a row had fewer than 4"):
        federate(tmp_path, config, on_train(lambda m, r: []), options=silent)
    run = open_run(tmp_path / "run")
    assert np.array_equal(run.state().weights, loop.prepare(config).initial)
    assert run.ledger().participations().tolist() == [2, 2, 2, 2]
    # The node came back: the same folder goes on where it stopped.
    federate(tmp_path, config, options=silent)
    assert open_run(tmp_path / "run").state().round == 5


def test_the_deadline_holds_when_a_reply_has_begun_and_does_not_end(tmp_path: Path) -> None:
    import threading

    class Slow(LocalGrid):
        """One node's reply to a round never becomes whole."""

        def pull_messages(self, message_ids: Any) -> Any:
            names = list(message_ids)
            for message in self.sent:
                held = message.metadata.dst_node_id == 101 and message.metadata.message_type == "train"
                if held and message.metadata.message_id in names:
                    threading.Event().wait(30)
            return super().pull_messages(names)

    config = config_of("fed-cdp", rounds=1)
    grid = Slow(client_app(seeded), nodes_in(tmp_path, policy_text("fed-cdp")))
    options = Options(out=str(tmp_path / "run"), join=5.0, deadline=1.0, poll=0.01)
    begun = time.monotonic()
    serve(grid, config, options, root=0)
    assert time.monotonic() - begun < 25
    line = open_run(tmp_path / "run").metrics[0]
    assert (line["arrived"], line["missing"]) == (3, 1)


def test_replies_that_take_long_are_asked_for_less_and_less_often() -> None:
    """Many nodes with long rounds must not keep a SuperLink busy with questions."""
    looks: list[float] = []

    def pull_messages(names: list[str]) -> list[Message]:
        looks.append(time.monotonic())
        return []

    begun = time.monotonic()
    assert list(server._pulled(SimpleNamespace(pull_messages=pull_messages), {"a"}, begun + 1.0, 0.01)) == []
    assert 3 <= len(looks) < 60 and time.monotonic() - begun < 5


def test_an_offline_node_is_not_waited_for(tmp_path: Path) -> None:
    config = config_of("fed-cdp")
    rounds = 0

    def leaves(node: int, message: Message, reply: Message) -> list[Message]:
        nonlocal rounds
        if message.metadata.message_type == "train" and node == 101:
            rounds += 1
            grids[0].offline.add(101)
        return [reply]

    grids: list[LocalGrid] = []
    federate(tmp_path, config, leaves, change=grids.append, options={"deadline": 60.0})
    lines = open_run(tmp_path / "run").metrics
    assert rounds == 1
    assert (lines[1]["offline"], lines[1]["arrived"]) == (1, 3)


def test_with_too_few_nodes_the_run_stops_before_anything_is_charged(tmp_path: Path) -> None:
    config = config_of("fed-cdp", rounds=3)

    def leave(node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train":
            grids[0].offline.update({101, 102, 103})
        return [reply]

    grids: list[LocalGrid] = []
    with pytest.raises(UserError, match=r"only 1 of 4 nodes .* Nothing was charged"):
        federate(tmp_path, config, leave, change=grids.append, options={"minimum": 2})
    assert Ledger.read(tmp_path / "run/ledger.jsonl").participations().tolist() == [1, 1, 1, 1]
    result, _ = federate(tmp_path, config, options={"minimum": 2})
    assert result["rounds"] == 3


def test_a_resumed_run_waits_for_its_nodes(tmp_path: Path) -> None:
    config = config_of("fed-cdp", rounds=1)
    federate(tmp_path, config)
    app, policy = client_app(seeded), policy_text("fed-cdp")
    looks = 0

    class Slow(LocalGrid):
        def get_node_ids(self) -> list[int]:
            nonlocal looks
            looks += 1
            return sorted(self.nodes) if looks > 4 else [100]

    grid = Slow(app, nodes_in(tmp_path, policy))
    found = gather(grid, config, Options(out=str(tmp_path / "run"), join=5.0, poll=0.01), tmp_path / "run")
    assert looks > 4 and found.node == {2: 100, 0: 101, 3: 102, 1: 103}


def test_a_missing_node_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="first missing: client 0"):
        federate(tmp_path, config_of("fed-cdp"), change=lambda grid: grid.offline.add(101))


def test_two_nodes_cannot_be_the_same_client(tmp_path: Path) -> None:
    def twice(grid: LocalGrid) -> None:
        grid.nodes[104] = dict(grid.nodes[101])

    (tmp_path / "b").mkdir()
    federate(tmp_path / "b", config_of("fed-cdp"), change=twice)
    (tmp_path / "a").mkdir()
    federate(tmp_path / "a", config_of("fed-cdp"))
    assert np.array_equal(weights(tmp_path / "a/run"), weights(tmp_path / "b/run"))


class Killed(BaseException):
    """Stands for kill -9 of the ServerApp: nothing of it may be caught."""


@pytest.mark.parametrize("root", [0, None])
def test_a_killed_server_resumes_and_no_ledger_under_counts(tmp_path: Path, root: int | None) -> None:
    config = config_of("fed-cdp", rounds=3)
    policy = policy_text("fed-cdp", secure_noise=root is None)
    count = 0

    def kill(message: Message, reply: Message) -> list[Message]:
        nonlocal count
        count += 1
        if count == 2:
            raise Killed
        return [reply]

    with pytest.raises(Killed):
        federate(tmp_path, config, on_train(kill), policy=policy, root=root)
    assert open_run(tmp_path / "run").state().round == 1
    result, _ = federate(tmp_path, config, policy=policy, root=root)
    assert result["rounds"] == 3
    assert len(open_run(tmp_path / "run").metrics) == 3
    # Round 2 went out twice: nobody can say that the very same bits left a node both times, so both are counted.
    assert Ledger.read(tmp_path / "run/ledger.jsonl").participations().max() == 4
    assert ledger_of(tmp_path / "n0").participations().tolist() == [4]
    if root is not None:
        loop.run(config, tmp_path / "sim")
        assert np.array_equal(weights(tmp_path / "run"), weights(tmp_path / "sim"))


def test_nothing_but_the_upload_and_public_facts_leaves_a_node(tmp_path: Path) -> None:
    facts: list[dict[str, Any]] = []

    def look(node: int, message: Message, reply: Message) -> list[Message]:
        said, arrays = wire.read(reply)
        facts.append(said | {"arrays": {k: v.shape for k, v in arrays.items()}})
        return [reply]

    federate(tmp_path, config_of("fed-cdp", rounds=1), look)
    size = loop.prepare(config_of("fed-cdp")).initial.size
    keys = {frozenset(said) for said in facts}
    assert keys == {
        frozenset(
            {"format", "status", "client", "examples", "contract", "data", "version", "nonce", "arrays"}
        ),
        frozenset({"format", "status", "client", "round", "ticket", "nonce", "arrays"}),
    }
    assert {tuple(said["arrays"].items()) for said in facts} == {(), (("update", (size,)),)}


def test_data_of_ones_own_needs_a_contract_not_a_policy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fedveil flower contract"):
        federate(tmp_path, config_of("fed-cdp"), data="patients.csv")


def test_reports_travel_as_one_bit_per_weight(tmp_path: Path) -> None:
    config = config_of("ldp-fl", channel="none", rounds=1)
    federate(tmp_path, config)
    size = loop.prepare(config).initial.size
    assert open_run(tmp_path / "run").metrics[0]["bytes_up"] == 4 * -(-size // 8)


def test_a_simulated_clock_is_refused_where_time_is_real() -> None:
    with pytest.raises(UserError, match="nodes take the time they take"):
        parties_of(config_of("ldp-fl", compute_seconds=[1.0]), options_of({"out": "x"}))


def test_a_wrong_option_names_itself() -> None:
    with pytest.raises(UserError, match="Did you mean 'deadline'"):
        options_of({"out": "x", "dedline": 3})
    with pytest.raises(UserError, match="'out' is missing"):
        options_of({})


@pytest.mark.slow
def test_fifty_nodes_play_ten_rounds_while_five_of_them_fail_at_random(tmp_path: Path) -> None:
    """Each round five nodes, drawn anew, are silent, crash, send rubbish or answer another message."""
    import random

    clients, draw = 50, random.Random(7)
    config = make_config({"recipe": "fed-cdp", "dataset": "cancer", "partition": "iid", "clients": clients, "rounds": 10,
                          "local_steps": 2, "batch_size": 2, "delta": 1e-4})  # fmt: skip
    kinds = [FAULTS[name][0] for name in ("silent", "error", "not a number", "another ticket", "wrong shape")]
    failing: dict[int, Callable[[Message, Message], list[Message]]] = {}
    rounds: set[int] = set()

    def tamper(node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        number = wire.read(message)[0]["round"]
        if number not in rounds:
            rounds.add(number)
            failing.clear()
            failing.update(zip(draw.sample(range(clients), 5), kinds, strict=True))
        return failing[node](message, reply) if node in failing else [reply]

    (tmp_path / "policy.toml").write_text(policy_text("fed-cdp"))
    nodes = {n: {"home": str(tmp_path / f"n{n}"), "policy": str(tmp_path / "policy.toml"), "partition-id": n}
             for n in range(clients)}  # fmt: skip
    options = Options(out=str(tmp_path / "run"), join=60.0, deadline=5.0, poll=0.02)
    result = serve(LocalGrid(client_app(seeded), nodes, tamper), config, options, root=0)
    assert result["rounds"] == 10
    assert [line["arrived"] for line in open_run(tmp_path / "run").metrics] == [45] * 10
    server = Ledger.read(tmp_path / "run/ledger.jsonl").participations()
    assert server.tolist() == [10] * clients
    assert all(ledger_of(tmp_path / f"n{n}").participations().tolist() == [10] for n in range(clients))
