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


def instructions(text: str) -> list[tuple[str, list[str]]]:
    """A container file's instructions with their words; lines that end with a backslash go on."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split()[1:]) for line in whole]


def test_the_container_file_copies_what_there_is_and_ends_without_rights_or_telemetry() -> None:
    """What a linter would say, as far as it matters here; nothing is built."""
    top = DEPLOY.parent
    found = instructions((DEPLOY / "Containerfile").read_text())
    known = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENV", "VOLUME", "ENTRYPOINT", "CMD"}
    assert found[0][0] == "FROM" and {name for name, _ in found} <= known
    stages = [words[2] for name, words in found if name == "FROM" and len(words) == 3]
    let_in = {line[1:] for line in (top / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name, words in found:
        if name == "COPY" and words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
        elif name == "COPY":
            assert all((top / source).exists() and source in let_in for source in words[:-1]), words
        if name == "RUN" and "apt-get" in words:
            assert "--no-install-recommends" in words and "/var/lib/apt/lists/*" in words
        if name == "FROM":
            assert ":" in words[0] and not words[0].endswith(":latest")
    assert {"pyproject.toml", "CMakeLists.txt", "src", "README.md", "LICENSE"} <= let_in  # what the build reads
    last = found[max(n for n, (name, _) in enumerate(found) if name == "FROM") :]
    assert [words for name, words in last if name == "USER"][-1] == ["fedveil"]
    settings = [word for name, words in last if name == "ENV" for word in words]
    assert {"FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_UPDATE_CHECK=1"} <= set(settings)
    assert [words for name, words in last if name == "ENTRYPOINT"] == [['["fedveil"]']]


def test_the_compose_files_parts_have_no_rights_and_wait_for_their_papers() -> None:
    yaml = pytest.importorskip("yaml")
    file = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in file["services"].items():
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert "ports" not in service and "privileged" not in service, name
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        assert all(volume.split(":")[0] in file["volumes"] for volume in service["volumes"])
        assert set(service.get("depends_on", {})) <= set(file["services"])
        assert name == "papers" or "papers" in service["depends_on"]


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
