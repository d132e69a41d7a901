"""The example that makes a user's own apps private, on a real SuperLink with TLS, node keys and two SuperNodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedveil.flower import stack as stacks
from fedveil.flower.stack import Stack
from fedveil.privacy.ledger import Ledger

pytestmark = [pytest.mark.flower, pytest.mark.slow]
EXAMPLE = Path(__file__).parents[2] / "docs/examples/flower_quickstart.py"
PYPROJECT = """
[project]
name = "own-apps"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["flwr==1.41.0", "fedveil"]
[tool.flwr.app]
publisher = "me"
[tool.flwr.app.components]
serverapp = "own_apps.apps:server_app"
clientapp = "own_apps.apps:client_app"
[tool.flwr.app.config]
"""
AT_SERVER = '{"recipe": "dp-fedavg", "clip_bound": 0.5}'
ON_CLIENTS = '{"recipe": "fed-sdp-client", "clip_kind": "flat", "clip_bound": 0.5, "sigma": 4.0}'


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("f") / "f"
    yield stacks.up(home, 2, trainers=False)
    stacks.down(home)


def project(folder: Path, recipe: str) -> Path:
    """The documented example, for two nodes, two rounds and absolute folders."""
    text = EXAMPLE.read_text("utf-8")
    for old, new in {
        "CLIENTS = 10": "CLIENTS = 2",
        AT_SERVER: recipe,
        "private_mod(**RECIPE)": f'private_mod(**RECIPE, ledger="{folder / "nodes"}")',
        '"runs/flower-quickstart"': f'"{folder / "run"}"',
        "num_rounds=8": "num_rounds=2",
        "serverapp[8]": "serverapp[2]",
    }.items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "own_apps").mkdir(parents=True)
    (folder / "own_apps/__init__.py").write_text("")
    (folder / "own_apps/apps.py").write_text(text)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    return folder


def played(stack: Stack, folder: Path) -> Ledger:
    run = stacks.submit(stack.environment, folder, stacks.NAME)
    until, state = time.monotonic() + 900, ""
    while not state.startswith("finished") and time.monotonic() < until:
        time.sleep(2)
        state = stacks.status(stack.environment, run, stacks.NAME)
    assert state == "finished:completed", (state, stacks.tail(stack.folder / "logs/superexec.log", 60))
    return Ledger.read(folder / "run/ledger.jsonl")


def test_noise_at_the_server_is_charged_for_every_round_within_its_budget(stack: Stack, tmp_path: Path) -> None:
    books = played(stack, project(tmp_path / "a", AT_SERVER))
    assert books.rounds == 2 and 0 < (books.epsilon("public", "client") or 0) <= 8
    assert books.epsilon("server", "client") is None
    assert not (tmp_path / "a/nodes").exists()  # nodes that add no noise have nothing to charge


def test_nodes_that_add_noise_charge_their_own_ledgers_what_the_server_charges(stack: Stack, tmp_path: Path) -> None:
    books = played(stack, project(tmp_path / "b", ON_CLIENTS))
    assert books.rounds == 2
    for number in range(2):
        node = Ledger.read(tmp_path / f"b/nodes/node-{number}/ledger.jsonl")
        assert node.rounds == 2 and not node.header.simulated
        (spent,) = [r.epsilon for r in node.table() if (r.observer, r.unit, r.verdict) == ("server", "client", "nominal")]
        assert spent == pytest.approx(books.epsilon("server", "client"), rel=1e-6)
        assert node.epsilon("server", "client") is None  # this node set no budget, and the server chooses the end
