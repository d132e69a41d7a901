"""The tutorial "Deploy among three sites" as printed, on one machine: other paths, addresses and ports, the same words.

Commands that stay (`link`, `node`) are started and left running; those of clinic-a are given again for the other two sites.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedveil.flower import stack
from fedveil.privacy.ledger import Ledger

pytestmark = [pytest.mark.flower, pytest.mark.slow]
PAGE = (Path(__file__).parents[2] / "docs/tutorial-deploy.md").read_text("utf-8")
PARTS = re.split(r"^## \d\. ", PAGE, flags=re.M)[1:]
SITES = ("clinic-a", "clinic-b", "clinic-c")
STAY = ("link", "node")


def lines(part: str) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", part, re.S | re.M)
    return [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


class Host:
    """One machine in place of five: runs a printed line with its paths and addresses below `folder`."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.left = folder, port, list[subprocess.Popen[bytes]]()
        self.environment = stack.environment(folder / "flwr")

    def moved(self, line: str, site: str = SITES[0]) -> str:
        for old, new in {
            "--name fl.example.org --name 10.0.0.5": "--name localhost --name 127.0.0.1",
            "fl.example.org:8000": f"127.0.0.1:{self.port}",
            "10.0.0.5": f"127.0.0.1 --port {self.port}", "/etc/fedveil/tls": str(self.folder / "tls"),
            "/var/lib/fedveil": str(self.folder / "link"), "/etc/fedveil": str(self.folder / f"home-{site}"),
            "/srv/patients.csv": str(self.folder / f"{site}.csv"), SITES[0]: site,
        }.items():  # fmt: skip
            line = line.replace(old, new)
        return line.replace("--seed 2", f"--seed {2 + SITES.index(site)}")

    def do(self, line: str, site: str = SITES[0]) -> None:
        words = shlex.split(self.moved(line, site))
        command = [sys.executable, "-m", *words] if words[0] == "fedveil" else [stack.program(words[0]), *words[1:]]
        if words[:2] == ["fedveil", "flower"] and words[2] in STAY:
            log = self.folder / f"{words[2]}-{site}.log"
            with log.open("wb") as file:
                self.left.append(subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=file, stderr=file))
            if words[2] == "link":
                self.wait_for_server()
            return
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, (line, done.stdout[-1500:], done.stderr[-1500:])

    def wait_for_server(self) -> None:
        """As a person would, before going on."""
        end = time.monotonic() + 180
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.5)
        raise AssertionError((self.folder / f"link-{SITES[0]}.log").read_text())


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path, stack.free_port())
    yield made
    for process in reversed(made.left):
        process.terminate()
    for process in made.left:
        process.wait(30)


def test_the_rehearsal_runs_as_printed(host: Host) -> None:
    try:
        for line in lines(PARTS[0]):
            host.do(line)
    finally:
        down = [sys.executable, "-m", "fedveil", "flower", "down"]
        subprocess.run(down, cwd=host.folder, env=host.environment, capture_output=True)
    result = json.loads((host.folder / "trial/run/result.json").read_text())
    assert result["learned"] is True and not result["simulated"]


def test_three_sites_train_as_printed_and_each_charges_its_own_ledger(host: Host) -> None:
    papers, server, joining, training = (lines(part) for part in PARTS[1:])
    for line in papers:
        for site in SITES if "/srv/" in line else SITES[:1]:
            host.do(line, site)
    for line in server:
        host.do(line)
    (connection,) = re.findall(r"^```toml\n(.*?)^```", PARTS[2], re.S | re.M)
    (host.folder / "flwr").mkdir(exist_ok=True)
    (host.folder / "flwr/config.toml").write_text(host.moved(connection), "utf-8")
    for site in SITES:
        for line in joining:
            host.do(line, site)
    for line in training:
        for site in SITES if "/etc/" in line else SITES[:1]:
            host.do(line, site)
    result = json.loads((host.folder / "study/run/result.json").read_text())
    assert result["learned"] is True and result["rounds"] == 20 and not result["simulated"]
    assert any((r["observer"], r["unit"], r["verdict"]) == ("server", "example", "sound") for r in result["ledger"])
    for site in SITES:
        assert Ledger.read(host.folder / f"home-{site}/books/ledger.jsonl").rounds == 20
