"""The dashboard's server: what it tells, what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the dashboard needs the ui extra")
from fastapi.testclient import TestClient

from fedveil.cli import build
from fedveil.errors import UserError
from fedveil.privacy.accountants import answer
from fedveil.privacy.events import Event, Noise, Sampling
from fedveil.ui import folder
from fedveil.ui.calculator import calculate
from fedveil.ui.server import create_app, host_allowed, is_loopback, serve

EVIL = "<img src=x onerror=alert(1)>"
TOKEN = "0123456789abcdef-secret"


def client(runs: Path, token: str | None = None, host: str = "127.0.0.1") -> TestClient:
    return TestClient(create_app(runs, host, token), base_url="http://127.0.0.1:8765", follow_redirects=False)


@pytest.fixture
def page(runs: Path) -> TestClient:
    return client(runs)


def listed(page: TestClient) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in page.get("/api/runs").json()["runs"]}


def test_all_runs_are_listed_with_accuracy_promise_and_status(page: TestClient, runs: Path) -> None:
    rows = listed(page)
    assert set(rows) == {"sound", "nominal", "deep/er/nested", EVIL, "broken", "odd"}
    stored = json.loads((runs / "sound" / "result.json").read_text())
    assert rows["sound"]["result"] == stored["test_accuracy"]
    assert rows["sound"]["verdict"] == "sound" and rows["sound"]["epsilon"] > 0
    assert rows["nominal"]["verdict"] == "nominal"
    assert rows["sound"]["status"] == "finished" and rows["sound"]["round"] == 4
    assert rows["broken"]["problem"] and rows["odd"]["rounds"] == 0


def test_an_unfinished_run_is_live_until_it_falls_silent(page: TestClient, runs: Path) -> None:
    (runs / "sound" / "result.json").unlink()
    os.utime(runs / "sound" / "metrics.jsonl")
    row = listed(page)["sound"]
    assert row["status"] == "live" and row["verdict"] == "sound"  # epsilon of the last round
    for name in ("run.json", "ledger.jsonl", "metrics.jsonl"):
        os.utime(runs / "sound" / name, (1, 1))
    assert listed(page)["sound"]["status"] == "stopped"


def test_a_live_run_shows_each_round_as_it_is_written(page: TestClient, runs: Path) -> None:
    (runs / "sound" / "result.json").unlink()
    path = runs / "sound" / "metrics.jsonl"
    lines = path.read_text().splitlines(True)
    path.write_text("".join(lines[:2]))
    assert page.get("/api/run", params={"id": "sound"}).json()["round"] == 2
    path.write_text("".join(lines[:3]) + lines[3][:10])  # the fourth is being written
    data = page.get("/api/run", params={"id": "sound"}).json()
    assert data["round"] == 3 and data["status"] == "live" and len(data["charts"]) >= 2
    assert [c["releases"] for c in data["clients"]] == [4] * 4


@pytest.mark.parametrize(
    "name", ["../secret", "/etc", "sound/../../secret", "..", "nowhere", "a\0b", "x" * 5000, "link"]
)
def test_paths_outside_the_folder_do_not_exist(page: TestClient, runs: Path, name: str) -> None:
    (runs / "link").symlink_to(runs.parent / "secret", target_is_directory=True)
    for path in ("/api/run", "/api/compare", "/report"):
        assert page.get(path, params={"id": name}).status_code == 404
    assert "link" not in listed(page)


def test_files_that_lead_elsewhere_or_are_no_files_are_refused(
    page: TestClient, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "passwords").write_text('{"round": 99, "test_accuracy": 0.5}\n')
    (runs / "sound" / "metrics.jsonl").unlink()
    (runs / "sound" / "metrics.jsonl").symlink_to(tmp_path / "passwords")
    assert listed(page)["sound"]["round"] == 0
    assert page.get("/api/run", params={"id": "sound"}).status_code == 404
    (runs / "nominal" / "private.jsonl").unlink()
    os.mkfifo(runs / "nominal" / "private.jsonl")  # reading it would wait for ever
    answer = page.get("/report", params={"id": "nominal", "private": True})
    assert answer.status_code == 404 and "plain file" in answer.json()["error"]


def test_a_huge_run_directory_is_bounded(
    page: TestClient, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(runs / "sound" / "metrics.jsonl", "r+b") as file:
        file.truncate(folder.MOST_BYTES + 1)  # sparse: costs nothing on disk
    answer = page.get("/api/run", params={"id": "sound"})
    assert answer.status_code == 404 and "larger than" in answer.json()["error"]
    for number in range(60):
        (runs / f"many-{number:03}").mkdir()
        (runs / f"many-{number:03}" / "run.json").write_text("{}")
    monkeypatch.setattr(folder, "MOST_RUNS", 20)
    assert len(page.get("/api/runs").json()["runs"]) == 20
    monkeypatch.setattr(folder, "MOST_ENTRIES", 10)
    assert page.get("/api/runs").status_code == 200


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", "[]"), ("run.json", '{"config": {"recipe": "no-such"}}'), ("run.json", "[" * 100_000),
        ("ledger.jsonl", "rubbish\n"), ("metrics.jsonl", '{"round": "x"}\n[1]\n"y"\n{"round": 1, "test_accuracy": "z"}\n'),
        ("result.json", '{"ledger": [1, {"verdict": 5}], "test_accuracy": []}'), ("confusion.json", '{"model": 1}'),
        ("private.jsonl", '{"client_loss": {"0": "x"}}\n'),
    ],
)  # fmt: skip
def test_damaged_files_never_break_the_server(page: TestClient, runs: Path, name: str, content: str) -> None:
    (runs / "sound" / name).write_text(content)
    assert page.get("/api/runs").status_code == 200
    for path in ("/api/run", "/report", "/report?private=true"):
        answer = page.get(path, params={"id": "sound", "private": "private" in path})
        assert answer.status_code in (200, 400), path
        assert answer.status_code == 200 or answer.json()["error"]


def test_reports_are_rendered_afresh_and_names_are_inert(page: TestClient, runs: Path) -> None:
    (runs / EVIL / "report.html").write_text("<script>alert('from the run')</script>")
    answer = page.get("/report", params={"id": [EVIL, "sound"]})
    assert answer.status_code == 200 and "from the run" not in answer.text
    assert "<img src=x" not in answer.text and "&lt;img src=x" in answer.text
    assert "sha256-" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert "Private, do not share" not in answer.text
    assert "Private, do not share" in page.get("/report", params={"id": "sound", "private": True}).text


def test_charts_of_a_comparison_escape_names(page: TestClient) -> None:
    data = page.get("/api/compare", params={"id": [EVIL, "nominal"]}).json()
    assert "<img" not in data["pareto"] and "<img" not in data["curves"]
    assert [row["verdict"] for row in data["rows"]] == ["sound", "none"]
    assert page.get("/api/compare", params={"id": ["sound"] * 13}).status_code == 400


def test_reading_writes_nothing(page: TestClient, runs: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in runs.rglob("*")}

    before = state()
    for path in ("/api/runs", "/api/run?id=sound", "/report?id=sound", "/api/compare?id=sound&id=nominal"):
        assert page.get(path).status_code == 200
    assert state() == before


def test_the_calculator_says_what_the_accountants_say(page: TestClient) -> None:
    rows = page.get("/api/epsilon", params={"sigma": 6, "rate": 0.01, "steps": 10_000, "delta": 1e-5}).json()
    event = Event(Noise("gaussian", 6.0), Sampling("poisson", 0.01), steps=10_000)
    for row in rows:
        expected = answer([event], 1e-5, row["accountant"])
        assert (row["epsilon"], row["verdict"]) == (pytest.approx(expected.epsilon), expected.verdict)
    assert len(rows) == 8 and rows[0]["accountant"] == "pld"
    assert [r["verdict"] for r in rows] == sorted(
        (r["verdict"] for r in rows), key=["sound", "nominal", "none"].index
    )


@pytest.mark.parametrize("numbers", [{"rate": 0.01, "steps": 10_000}, {"steps": 3, "layers": 4}, {"mechanism": "laplace"}])
def test_the_calculator_finds_the_noise_for_an_epsilon(page: TestClient, numbers: dict[str, Any]) -> None:
    found = page.get("/api/sigma", params={"epsilon": 1, **numbers}).json()
    assert 0.99 < found["epsilon"] <= 1 and found["verdict"] == "sound"
    rows = page.get("/api/epsilon", params={"sigma": found["sigma"], **numbers}).json()
    assert {r["accountant"]: r["epsilon"] for r in rows}["pld"] == pytest.approx(found["epsilon"])


@pytest.mark.parametrize("query", ["epsilon=0", "epsilon=-1", "epsilon=nan", "epsilon=1&steps=0", "epsilon=1&rate=2"])
def test_a_wanted_epsilon_that_cannot_be_is_explained(page: TestClient, query: str) -> None:
    answer = page.get(f"/api/sigma?{query}")
    assert answer.status_code == 400 and len(answer.json()["error"]) > 10


def test_layers_weaken_the_calculator_like_a_smaller_sigma() -> None:
    four = {r["accountant"]: r["epsilon"] for r in calculate(sigma=8, layers=4, rate=0.1, steps=100)}
    one = {r["accountant"]: r["epsilon"] for r in calculate(sigma=4, layers=1, rate=0.1, steps=100)}
    assert four == one


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "staircase", "joint-staircase"])
@pytest.mark.parametrize(
    "numbers", [{"sigma": 1e-3, "steps": 10**6}, {"sigma": 1e6, "rate": 1e-6, "steps": 10**7}, {"delta": 0}]
)
def test_extreme_numbers_are_answered(page: TestClient, mechanism: str, numbers: dict[str, float]) -> None:
    found = page.get("/api/epsilon", params={"mechanism": mechanism, **numbers})
    assert found.status_code == 200 and len(found.json()) == 8
    assert all((row["epsilon"] is None) == (row["verdict"] == "none") for row in found.json())


@pytest.mark.parametrize(
    "query",
    ["sigma=0", "sigma=-1", "sigma=nan", "sigma=inf", "rate=0", "rate=2", "delta=1", "steps=-1", "steps=99999999999",
     "mechanism=x", "norm=l3", "layers=0", "dimension=0"],
)  # fmt: skip
def test_wrong_numbers_get_an_explanation(page: TestClient, query: str) -> None:
    answer = page.get(f"/api/epsilon?{query}")
    assert answer.status_code == 400 and len(answer.json()["error"]) > 10


@pytest.mark.parametrize(
    "path", ["/", "/api/runs", "/static/app.js", "/report?id=sound", "/nowhere", "/static/..%2fserver.py"]
)
def test_every_answer_has_security_headers(page: TestClient, path: str) -> None:
    headers = page.get(path).headers
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store" and "access-control-allow-origin" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_server_is_read_only(page: TestClient, method: str) -> None:
    assert page.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "10.0.0.1", "[::2]:80"]
)
def test_foreign_host_names_are_refused(page: TestClient, name: str) -> None:
    assert page.get("/api/runs", headers={"host": name}).status_code == 421


@pytest.mark.parametrize("name", ["127.0.0.1:8765", "localhost", "LOCALHOST:1", "[::1]:8765", "127.0.0.1"])
def test_own_host_names_are_accepted(page: TestClient, name: str) -> None:
    assert page.get("/api/runs", headers={"host": name}).status_code == 200


def test_a_server_for_all_addresses_accepts_addresses_but_no_foreign_names() -> None:
    assert host_allowed("192.168.1.7:80", "0.0.0.0") and host_allowed("[fe80::1]:80", "::")
    assert not host_allowed("evil.example", "0.0.0.0")
    assert host_allowed("box.local", "box.local") and not host_allowed("other.local", "box.local")
    assert is_loopback("127.8.8.8") and is_loopback("::1") and not is_loopback("0.0.0.0")


def test_with_a_token_nothing_is_told_without_it(runs: Path) -> None:
    page = client(runs, TOKEN)
    assert page.get("/").status_code == 303
    for path in ("/api/runs", "/report?id=sound", "/static/app.js", "/api/epsilon"):
        assert page.get(path).status_code == 401
        assert page.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert page.get(path, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_a_token_typed_in_opens_a_session(runs: Path) -> None:
    page = client(runs, TOKEN)
    wrong = page.post("/login", data={"token": "no"})
    assert wrong.status_code == 403 and "not right" in wrong.text and not wrong.cookies
    right = page.post("/login", data={"token": TOKEN})
    cookie = right.headers["set-cookie"].lower()
    assert right.status_code == 303 and "httponly" in cookie and "samesite=strict" in cookie
    assert TOKEN not in right.headers["set-cookie"]
    assert page.get("/api/runs").status_code == 200


def test_others_are_let_in_only_with_a_long_token(runs: Path) -> None:
    with pytest.raises(UserError, match="needs a token"):
        serve(runs, "0.0.0.0", 0, None)
    with pytest.raises(UserError, match="too few"):
        serve(runs, "127.0.0.1", 0, "short")
    with pytest.raises(UserError, match="does not exist"):
        serve(runs / "nowhere", "127.0.0.1", 0, None)
    with pytest.raises(UserError, match="cannot listen"):
        serve(runs, "203.0.113.7", 0, TOKEN)


def test_wrong_use_of_the_commands_is_explained(tmp_path: Path) -> None:
    """`UserError` is what the command line turns into exit code 2."""

    def fedveil(*arguments: str) -> None:
        build()(list(arguments), standalone_mode=False)

    with pytest.raises(UserError, match="needs a token"):
        fedveil("ui", "--host", "0.0.0.0", str(tmp_path))
    with pytest.raises(UserError, match="does not exist"):
        fedveil("report", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="must end in"):
        fedveil("report", str(tmp_path), "--out", str(tmp_path / "page.pdf"))
    with pytest.raises(UserError, match="tensorboard"):
        fedveil("track", str(tmp_path), "--to", "tensorbord")


def test_the_folder_may_be_a_run_itself(made: Path) -> None:
    rows = listed(client(made / "sound"))
    assert set(rows) == {"."}
    assert client(made / "sound").get("/api/run", params={"id": "."}).status_code == 200


def test_an_empty_folder_is_fine(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "x", ignore_errors=True)
    assert listed(client(tmp_path)) == {}


@pytest.mark.parametrize("value", ["9" * 400, "[" * 3000, '{"a": 1}', "1e999", "null"])
def test_one_odd_run_does_not_empty_the_list(page: TestClient, runs: Path, value: str) -> None:
    before = set(listed(page))
    for name in ("result.json", "run.json"):
        text = (runs / "sound" / name).read_text()
        key = "test_accuracy" if name == "result.json" else "rounds"
        start = text.index(f'"{key}":') + len(key) + 3
        end = min(at for at in (text.find(",", start), text.find("\n", start)) if at > 0)
        (runs / "sound" / name).write_text(text[:start] + value + text[end:])
        answer = page.get("/api/runs")
        assert answer.status_code == 200 and {row["id"] for row in answer.json()["runs"]} == before


def test_login_reads_no_more_than_a_token_needs(runs: Path) -> None:
    outside = client(runs, TOKEN)
    assert outside.post("/login", content=b"token=" + b"x" * 100_000).status_code == 413
    read = []

    def endless():
        for _ in range(10_000):
            read.append(1)
            yield b"x" * 1024

    assert outside.post("/login", content=endless()).status_code == 413
    assert outside.post("/login", data={"token": TOKEN}).status_code == 303
