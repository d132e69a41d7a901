"""Real federations: SuperLink, SuperExec and four SuperNodes as processes, with TLS and node keys."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

from fedveil.cli import build
from fedveil.federation import loop
from fedveil.federation.config import RunConfig, make_config
from fedveil.federation.store import open_run, read_lines
from fedveil.flower import stack as stacks
from fedveil.flower.node import ledger_of
from fedveil.flower.project import write_project
from fedveil.flower.stack import Stack, Started

pytestmark = pytest.mark.flower
APP = Path(__file__).parent.parent / "flower_app"
SEEDED = 'recipes = ["fed-cdp"]\nsecure_noise = false\nmaximum_epsilon = 1e6\n'


def config_of(rounds: int) -> RunConfig:
    return make_config(
        {
            "recipe": "fed-cdp",
            "dataset": "cancer",
            "clients": 4,
            "partition": "iid",
            "rounds": rounds,
            "local_steps": 20,
        }
    )


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "f"
    yield folder
    if (folder / "stack.json").exists():
        stacks.down(folder)


def project_in(folder: Path, config: RunConfig, seeded: bool = False, **options: Any) -> Path:
    write_project(folder, config, {"out": str(folder / "run"), "deadline": 120.0, "join": 200.0, **options})
    if seeded:
        for name in ("client_app.py", "server_app.py"):
            shutil.copy(APP / name, folder / "fedveil_run" / name)
    return folder


def until(found: Callable[[], Any], seconds: float, what: str) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds} s: {what}")


def rounds_done(project: Path) -> int:
    return len(read_lines(project / "run/metrics.jsonl"))


def finished(stack: Stack, run: int, seconds: float = 300.0) -> str:
    def look() -> str:
        state = stacks.status(stack.environment, run, stacks.NAME)
        return state if state.startswith("finished") else ""

    return until(look, seconds, f"run {run} ends")


def submit(stack: Stack, project: Path) -> int:
    return stacks.submit(stack.environment, project, stacks.NAME)


def children(process: Started) -> list[int]:
    """Ids of the processes that `process` started."""
    found = []
    for item in Path("/proc").iterdir():
        if item.name.isdigit():
            try:
                parent = int((item / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            if parent == process.pid:
                found.append(int(item.name))
    return found


def test_a_federation_with_tls_and_keys_trains_the_simulators_model_bit_for_bit(
    tmp_path: Path, home: Path
) -> None:
    config = config_of(rounds=3)
    loop.run(config, tmp_path / "sim")
    stack = stacks.up(home, 4, policy=SEEDED, trainers=False)
    assert not stack.insecure
    project = project_in(tmp_path / "p", config, seeded=True)
    found = CliRunner().invoke(build(), ["flower", "run", str(project), "--home", str(home), "--json"])
    assert found.exit_code == 0, found.output
    run = open_run(project / "run")
    assert [line["arrived"] for line in run.metrics] == [4, 4, 4]
    assert np.array_equal(run.state().weights, open_run(tmp_path / "sim").state().weights)
    model = (project / "run/model.safetensors").read_bytes()
    assert model == (tmp_path / "sim/model.safetensors").read_bytes()
    for number in range(4):
        assert ledger_of(home / f"nodes/{number}").participations().tolist() == [3]
    processes = list(stack.processes.values())
    stacks.down(home)
    assert not any(stacks.alive(p) for p in processes)


@pytest.mark.slow
def test_lost_frozen_and_unknown_nodes_do_not_end_a_run(tmp_path: Path, home: Path) -> None:
    """kill -9 of a node and its return, SIGSTOP of another, a node with an unregistered key."""
    stack = stacks.up(home, 4)
    project = project_in(tmp_path / "p", config_of(rounds=6), deadline=60.0)
    run = submit(stack, project)

    stacks.make_node_key(home / "keys/node-4")  # never registered
    shutil.copytree(home / "nodes/0", home / "nodes/4", ignore=shutil.ignore_patterns("*.sock", "flwr"))
    stranger = stacks.start_node(stack, 4, trainer=False).processes["node-4"]

    until(lambda: rounds_done(project) >= 1, 200, "first round")
    frozen = stack.processes["node-1"]
    os.killpg(frozen.pid, signal.SIGSTOP)
    until(lambda: rounds_done(project) >= 2, 200, "a round with a frozen node")
    os.killpg(frozen.pid, signal.SIGCONT)
    os.killpg(stack.processes["node-2"].pid, signal.SIGKILL)
    until(lambda: rounds_done(project) >= 4, 300, "rounds with a dead node")
    stack = stacks.start_node(stack, 2)
    assert finished(stack, run) == "finished:completed"

    lines = open_run(project / "run").metrics
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["arrived"] >= 2 for line in lines)
    assert any(line["arrived"] < 4 for line in lines[1:4])
    assert not stacks.alive(stranger)  # the SuperLink turned it away
    assert not (home / "nodes/4/ledger.jsonl").exists()  # it was never asked to train
    server = open_run(project / "run").ledger().participations()
    for number in range(4):
        own = ledger_of(home / f"nodes/{number}").participations()[0]
        arrived_at_most = server[number]
        assert own <= arrived_at_most == 6


@pytest.mark.slow
def test_a_killed_superlink_and_a_killed_server_app_lose_nothing(tmp_path: Path, home: Path) -> None:
    stack = stacks.up(home, 4)
    project = project_in(tmp_path / "p", config_of(rounds=5))
    run = submit(stack, project)
    until(lambda: rounds_done(project) >= 1, 200, "first round")
    os.killpg(stack.processes["superlink"].pid, signal.SIGKILL)
    time.sleep(3)
    stack = stacks.start_superlink(stack)
    until(lambda: rounds_done(project) >= 2, 300, "a round after the SuperLink's return")

    app = until(lambda: children(stack.processes["superexec"]), 60, "the ServerApp")
    for pid in app:
        os.kill(pid, signal.SIGKILL)
    assert finished(stack, run) == "finished:failed"
    done = rounds_done(project)
    assert 2 <= done < 5
    again = submit(stack, project)
    assert finished(stack, again) == "finished:completed"
    result = open_run(project / "run")
    assert [line["round"] for line in result.metrics] == [1, 2, 3, 4, 5]
    charged = result.ledger().participations().tolist()
    for number in range(4):
        own = ledger_of(home / f"nodes/{number}").participations()[0]
        assert 5 <= own <= charged[number] <= 6


@pytest.mark.slow
def test_up_is_loud_without_tls_and_ctrl_c_stops_everything(tmp_path: Path) -> None:
    home = tmp_path / "f"
    command = [sys.executable, "-m", "fedveil", "flower", "up", "--nodes", "1", "--insecure", "--json"]
    with subprocess.Popen(
        [*command, "--home", str(home)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        text = ""
        while not text.endswith("\n}\n"):
            text += process.stdout.readline()
        found = json.loads(text)
        stack = stacks.read(home)
        assert found["superlink"].startswith("127.0.0.1:") and found["tls"] is False
        assert all(stacks.alive(p) for p in stack.processes.values())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "INSECURE" in process.stderr.read()
    assert not any(stacks.alive(p) for p in stack.processes.values())
    assert not (home / "stack.json").exists()
