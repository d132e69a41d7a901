"""LDP-FL with the parameter shuffler as a process of its own beside Flower: reports never pass the SuperLink."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Message

from fedveil.federation.config import RunConfig, make_config
from fedveil.federation.store import open_run
from fedveil.flower import client_app, shuffler, wire
from fedveil.flower.contract import Allowed, Contract, Data, Model, recipe_digest, write_contract
from fedveil.flower.grid import LocalGrid
from fedveil.flower.node import ledger_of
from fedveil.flower.server import Options, serve
from fedveil.protect.catalogue import get
from fedveil.protect.recipe import with_changes

CLIENTS = 4
WEIGHTS = 34720  # the papers' CNN for MNIST


def mnist_like(folder: Path) -> None:
    """Each node's own file, and the server's public one: images of MNIST's shape, made up."""
    for number in range(CLIENTS + 1):
        draw = np.random.default_rng(number)
        x = draw.integers(0, 256, (24, 1, 28, 28)).astype(np.float32) / 255
        np.savez(folder / f"own-{number}.npz", x=x, y=np.arange(24) % 10)


@contextmanager
def running_shuffler(folder: Path, secret: bytes, group: int, minimum: int) -> Iterator[str]:
    address = f"unix:{folder}/s"
    (folder / "server.pub").write_text(shuffler.public_key(secret).hex())
    (folder / "server.key").write_text(secret.hex())
    process = subprocess.Popen([
        sys.executable, "-m", "fedveil.flower.shuffler", "--listen", address, "--server-key", str(folder / "server.pub"),
        "--weights", str(WEIGHTS), "--group", str(group), "--minimum", str(minimum), "--expected", str(CLIENTS),
        "--deadline", "60",
    ])  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not (folder / "s").exists() and time.monotonic() < end:
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait(10)


def play(
    folder: Path, config: RunConfig, tamper: Any = None, shuffle: str = "", **options: Any
) -> np.ndarray:
    folder.mkdir()
    recipes = (with_changes(get("ldp-fl"), {"channel": kind}) for kind in ("none", "shuffle-parameters"))
    agreed = Contract(
        "shuffled", 1, tuple(Allowed("ldp-fl", recipe_digest(r)) for r in recipes), None, delta=1e-3, secure_noise=False,
        data=Data("", tuple("0123456789"), 24, shape=(1, 28, 28)), models=(Model("papers-cnn"),),
    )  # fmt: skip
    write_contract(folder / "contract.toml", agreed)
    nodes = {
        10 + c: {
            "home": str(folder / f"n{c}"), "contract": str(folder / "contract.toml"), "partition-id": c,
            "contract-digest": agreed.digest, "data": str(folder.parent / f"own-{c}.npz"), "shuffler": shuffle,
        }
        for c in range(CLIENTS)
    }  # fmt: skip
    grid = LocalGrid(client_app(lambda config, client: 5), nodes, tamper)
    settings = {
        "join": 1.0,
        "deadline": 60.0,
        "poll": 0.02,
        "public": str(folder.parent / "own-4.npz"),
        "contract": str(folder / "contract.toml"),
        **options,
    }
    serve(grid, config, Options(out=str(folder / "run"), shuffler=shuffle, **settings), root=5)
    return open_run(folder / "run").state().weights


def config_of(**more: Any) -> RunConfig:
    values = {
        "dataset": "mnist",
        "model": "papers-cnn",
        "clients": CLIENTS,
        "rounds": 1,
        "local_steps": 2,
        "batch_size": 4,
    }
    return make_config({"recipe": "ldp-fl", "delta": 1e-3, **values, **more})


@pytest.mark.parametrize("group", [64, pytest.param(1, marks=pytest.mark.slow)])
def test_shuffled_reports_give_the_same_model_and_never_pass_the_superlink(
    tmp_path: Path, group: int
) -> None:
    mnist_like(tmp_path)
    plain = play(tmp_path / "plain", config_of(protect={"channel": "none"}))
    assert plain.size == WEIGHTS
    carried: list[int] = []

    def look(node: int, message: Message, reply: Message) -> list[Message]:
        _, arrays = wire.read(reply)
        carried.append(len(arrays))
        return [reply]

    secret = shuffler.new_private_key()
    with running_shuffler(tmp_path, secret, group, minimum=3) as address:
        key = str(tmp_path / "server.key")
        mixed = play(tmp_path / "mixed", config_of(), look, address, shuffler_key=key, group=group)
    assert set(carried) == {0}
    assert np.array_equal(mixed, plain)
    line = open_run(tmp_path / "mixed/run").metrics[0]
    assert (line["arrived"], line["messages"], line["dropped"]) == (CLIENTS, CLIENTS * WEIGHTS, 0)
    # The ledger counts on the fewest senders the shuffler ever lets through, not on those that came.
    for ledger in ("mixed/run", "mixed/n0"):
        text = (tmp_path / ledger / "ledger.jsonl").read_text()
        claims = _shuffle_claims([json.loads(text_line) for text_line in text.splitlines()])
        # Participants know their own report, so theirs hides among one fewer.
        assert {claim["event"]["sampling"]["population"] for claim in claims} == {2, 3}
    assert ledger_of(tmp_path / "mixed/n0").participations().tolist() == [1]


def test_too_few_senders_skip_the_round(tmp_path: Path) -> None:
    mnist_like(tmp_path)

    def lose(node: int, message: Message, reply: Message) -> list[Message]:
        return [] if message.metadata.message_type == "train" and node < 12 else [reply]

    secret = shuffler.new_private_key()
    with running_shuffler(tmp_path, secret, 64, minimum=3) as address:
        key = str(tmp_path / "server.key")
        play(tmp_path / "few", config_of(), lose, address, shuffler_key=key, group=64, deadline=1.0)
    assert open_run(tmp_path / "few/run").metrics[0]["skipped"] is True


def _shuffle_claims(value: Any) -> list[dict[str, Any]]:
    """Every claim in a ledger's records that counts on the shuffler."""
    if isinstance(value, dict):
        own = [value] if value.get("accountant") == "shuffle" else []
        return own + [c for inner in value.values() for c in _shuffle_claims(inner)]
    return [c for inner in value for c in _shuffle_claims(inner)] if isinstance(value, list) else []
