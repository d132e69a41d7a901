"""The trial of several sites: its papers fit together, with and without processes and containers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedveil.cli.flower import parse_node_config
from fedveil.federation.config import load_config
from fedveil.federation.store import open_run
from fedveil.flower import client_app, stack, trial
from fedveil.flower.grid import LocalGrid
from fedveil.flower.owner import tomllib
from fedveil.flower.server import options_of, serve

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_papers_of_a_trial_fit_together(tmp_path: Path) -> None:
    trial.papers(tmp_path, sites=3, rounds=1)
    trial.papers(tmp_path, sites=3, rounds=1)  # again: nothing changes
    nodes = {n: parse_node_config((tmp_path / f"site-{n}/node-config").read_text().strip()) for n in range(3)}
    values = tomllib.loads((tmp_path / "project/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    options = options_of({**values, "join": 2.0, "deadline": 60.0, "poll": 0.02})
    result = serve(
        LocalGrid(client_app(), nodes), load_config(str(tmp_path / "project/fedveil_run/run.toml")), options
    )
    assert result["rounds"] == 1 and open_run(tmp_path / "project/run").metrics[0]["arrived"] == 3


def test_the_compose_file_starts_commands_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services) == {"papers", "link", "site-0", "site-1", "site-2", "run"}
    for name, service in services.items():
        words = [*service.get("entrypoint", ["fedveil"]), *service.get("command", [])]
        if words[0] == "fedveil":
            found = subprocess.run(
                [sys.executable, "-m", "fedveil", *words[1:3], "--help"], capture_output=True, text=True
            )
        else:
            found = subprocess.run([sys.executable, *words[1:3], "--help"], capture_output=True, text=True)
        assert found.returncode == 0, (name, found.stderr)


@pytest.mark.slow
@pytest.mark.flower
def test_the_trial_runs_as_supervised_processes_and_survives_a_kill(tmp_path: Path) -> None:
    port = stack.free_port()
    trial.papers(tmp_path, sites=3, host="127.0.0.1", port=port, rounds=4)
    me = [sys.executable, "-m", "fedveil", "flower"]
    link = [
        "link",
        "--home",
        str(tmp_path / "link"),
        "--tls",
        str(tmp_path / "tls"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    started = [stack.start([*me, *link], tmp_path / "link.log", stack.environment(tmp_path / "x"))]
    for n in range(3):
        command = [*me, "node", "--home", str(tmp_path / f"site-{n}")]
        started.append(stack.start(command, tmp_path / f"node-{n}.log", stack.environment(tmp_path / "x")))
    try:
        following = subprocess.Popen([sys.executable, "-m", "fedveil.flower.trial", "run", str(tmp_path)])
        end = time.monotonic() + 300
        while not (tmp_path / "project/run/metrics.jsonl").exists() and time.monotonic() < end:
            time.sleep(0.5)
        import os
        import signal

        from fedveil.flower.supervise import read_status

        os.kill(read_status(tmp_path / "site-1/status.json")["parts"]["supernode"]["pid"], signal.SIGKILL)
        assert following.wait(400) == 0
        assert open_run(tmp_path / "project/run").state().round == 4
    finally:
        stack.stop(started, 20.0)
