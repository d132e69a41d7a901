"""Supervision of a host's processes, and the figures it shows."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

from fedveil.cli import build
from fedveil.errors import UserError
from fedveil.flower import books, supervise
from fedveil.flower.owner import Owner
from fedveil.flower.supervise import Part, pause_after, read_status

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def until(found: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError(what)


def test_what_ends_is_started_again_and_stopping_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "FIRST_PAUSE", 0.05)
    status, stop = tmp_path / "status.json", threading.Event()
    parts = [Part(name, SLEEP, tmp_path / f"{name}.log") for name in ("a", "b")]
    thread = threading.Thread(target=supervise.supervise, args=(parts, status, stop, lambda _: None, 0.02))
    thread.start()
    pid = until(lambda: status.exists() and read_status(status)["parts"]["a"]["pid"], "a runs")
    os.kill(pid, signal.SIGKILL)

    def back() -> Any:
        facts = read_status(status)["parts"]["a"]
        return facts if facts["restarts"] == 1 and facts["pid"] else None

    again = until(back, "a runs again")
    assert again["pid"] != pid and again["last_exit"] == -9
    assert read_status(status)["parts"]["b"]["restarts"] == 0
    stop.set()
    thread.join(20)
    with pytest.raises(ProcessLookupError):
        os.kill(again["pid"], 0)


def test_pauses_grow_to_a_minute_and_no_further() -> None:
    assert [pause_after(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_one_parts_failures_do_not_lengthen_the_pause_of_another() -> None:
    pauses, now, waited = supervise.Pauses(), 1000.0, []
    for _ in range(4):  # turned away again and again
        assert pauses.noticed(["node-0"], now) == ["node-0"] and pauses.noticed(["node-0"], now) == []
        began = now
        while not pauses.due(now):
            now += 0.5
        waited.append(now - began)
        pauses.started(["node-0"], now)
    assert waited == [1, 2, 4, 8]
    assert pauses.noticed(["superlink"], now) == ["superlink"]
    assert pauses.due(now + 1) == ["superlink"]
    pauses.started(["superlink"], now + 1)
    pauses.noticed(["node-0"], now + 61)  # it ran for a minute: the first pause again
    assert pauses.due(now + 62) == ["node-0"]


def test_status_says_who_is_down(tmp_path: Path) -> None:
    supervise.write_status(
        tmp_path / "status.json", [supervise._Running(Part("trainer", SLEEP, tmp_path / "l"))]
    )
    found = CliRunner().invoke(build(), ["flower", "status", "--home", str(tmp_path)])
    assert found.exit_code == 1 and "DOWN" in found.output
    nothing = CliRunner().invoke(build(), ["flower", "status", "--home", str(tmp_path / "x")])
    assert isinstance(nothing.exception, UserError)


def test_figures_of_a_node_count_answers_and_tell_no_text(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "h", 0)
    books.audit(owner.home, asked="round", answer="ok", run="r")
    books.audit(owner.home, asked="round", answer="refused because of \n secrets", run="r")
    books.audit(owner.home, asked="hello", answer="ok")
    text = supervise.node_figures(owner)
    assert 'fedveil_node_requests_total{asked="round",answer="ok"} 1' in text
    assert 'fedveil_node_requests_total{asked="round",answer="refused"} 1' in text
    assert "secrets" not in text


def test_figures_are_served_as_prometheus_reads_them(tmp_path: Path) -> None:
    ports: list[int] = []
    thread = threading.Thread(
        target=supervise.serve_figures,
        args=("127.0.0.1:0", lambda: supervise.run_figures(tmp_path), ports.append),
        daemon=True,
    )
    thread.start()
    until(lambda: ports, "listening")
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/metrics", timeout=10) as found:
        text = found.read().decode()
        assert found.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    for line in text.splitlines():
        assert line.startswith("# TYPE ") or (
            len(line.rsplit(" ", 1)) == 2 and float(line.rsplit(" ", 1)[1]) >= 0
        )
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/../etc/passwd", timeout=10)
    with socket.create_connection(("127.0.0.1", ports[0])) as line:
        line.sendall(b"\xff" * 1000 + b"\r\n\r\n")
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/healthz", timeout=10) as found:
        assert found.read() == b"ok\n"


def test_units_start_the_right_command_quietly(tmp_path: Path) -> None:
    found = CliRunner().invoke(build(), ["flower", "unit", "node", "--home", str(tmp_path)])
    assert found.exit_code == 0 and f"-m fedveil flower node --home {tmp_path}" in found.output
    assert "Restart=always" in found.output and "FLWR_TELEMETRY_ENABLED=0" in found.output
    with pytest.raises(UserError, match="no node was laid out"):
        supervise.node_parts(tmp_path)


def test_every_process_of_ours_runs_without_telemetry(tmp_path: Path) -> None:
    for name, text in (("node-config", 'home="h" partition-id=0'), ("superlink", "fl:8000"), ("ca.crt", "x")):
        (tmp_path / name).write_text(text)
    for part in supervise.node_parts(tmp_path):
        assert part.env["FLWR_TELEMETRY_ENABLED"] == "0"


def test_the_superlinks_database_waits_for_a_lock_instead_of_answering_with_an_error(tmp_path: Path) -> None:
    from sqlalchemy import create_engine, text

    from fedveil.flower import stack

    engine = create_engine(stack.database(tmp_path / "state.db"), connect_args={"check_same_thread": False})
    with engine.connect() as connection:
        assert connection.execute(text("PRAGMA busy_timeout")).scalar() == 120_000
    assert (tmp_path / "state.db").exists()


def test_a_node_asks_again_after_an_error_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's SuperNode ends with an answer 500 to any of its requests; ours does not."""
    import httpx
    from flwr.supercore.retry import http_retry
    from flwr.supernode import start_client_internal

    from fedveil.flower import lightnode

    if not lightnode.known():
        pytest.skip("another version of Flower runs as it is")
    for name in ("time", "subprocess", "_pull_and_store_message"):
        monkeypatch.setattr(start_client_internal, name, getattr(start_client_internal, name))  # set back after the test
    monkeypatch.setattr(http_retry, "_RETRYABLE_STATUS_CODES", http_retry._RETRYABLE_STATUS_CODES)
    answers = [500, 500, 200]

    def asked() -> int:
        code = answers.pop(0)
        response = httpx.Response(code, request=httpx.Request("POST", "https://127.0.0.1/v1/fleet/pull-messages"))
        response.raise_for_status()
        return code

    cli = importlib.import_module("flwr.supernode.cli.flower_supernode")  # the package has a function of this name
    monkeypatch.setattr(cli, "flower_supernode", lambda: None)
    lightnode.supernode()
    invoker = http_retry.make_simple_http_retry_invoker()
    invoker.wait_function = lambda seconds: None
    assert invoker.invoke(asked) == 200
