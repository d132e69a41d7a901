"""A run over Flower in the dashboard while it goes on: its nodes, the stages of a secure sum, and the epsilon of each node."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("fastapi", reason="the dashboard needs the ui extra")
import test_flower as plain  # of tests/flower
import test_summing as masked
from fastapi.testclient import TestClient
from flwr.app import Message

from fedveil.errors import UserError
from fedveil.flower import live, wire
from fedveil.flower.grid import LocalGrid
from fedveil.flower.live import stage_line
from fedveil.ui.server import create_app


class Held:
    """A federation in a thread; replies of one client to chosen messages are held until `go`, another client leaves."""

    def __init__(self, nodes: dict[int, int], held: int, leaves: int, when: Callable[[dict[str, Any]], bool]) -> None:
        self.go = threading.Event()
        self.by_client = {client: node for node, client in nodes.items()}
        self.held, self.leaves, self.when = held, leaves, when
        self.thread: threading.Thread | None = None

    def change(self, grid: LocalGrid) -> None:
        push, pull = grid.push_messages, grid.pull_messages

        def pushed(messages: Iterable[Message]) -> Iterable[str]:
            sent = list(messages)
            numbers = push(sent)
            if any(m.metadata.message_type == "train" for m in sent):
                grid.offline.add(self.by_client[self.leaves])  # gone after its first answer
            return numbers

        def pulled(names: Iterable[str]) -> Iterable[Message]:
            names = list(names)
            for message in (grid.sent[int(name[1:])] for name in names):
                mine = message.metadata.dst_node_id == self.by_client[self.held]
                if mine and self.when(wire.read(message)[0]):
                    self.go.wait(60)
            return pull(names)

        grid.push_messages, grid.pull_messages = pushed, pulled  # type: ignore[method-assign]

    def start(self, work: Callable[[], object]) -> None:
        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.go.set()
        assert self.thread is not None
        self.thread.join(60)
        assert not self.thread.is_alive()


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


@pytest.fixture
def plain_run(tmp_path: Path) -> Iterator[Held]:
    """Round 2 of 2: client 3 trains, client 2 has gone, the others have answered."""
    held = Held(plain.NODES, 3, 2, lambda facts: facts.get("round") == 1)
    config = plain.config_of("fed-cdp")
    held.start(lambda: plain.federate(tmp_path, config, options={"deadline": 60.0}, change=held.change))
    until(lambda: seen(tmp_path).get("missing") == [3] and seen(tmp_path)["round"] == 2)
    yield held
    held.end()


@pytest.fixture
def masked_run(tmp_path: Path) -> Iterator[Held]:
    """Round 1 of 1, third stage: client 4 is awaited, client 2 was lost at the second."""
    sizes: list[object] = []

    def third(facts: dict[str, Any]) -> bool:
        sizes.append(facts.get("sum"))
        return "sum" in facts and sum(1 for one in sizes if one) >= 3

    held = Held(masked.NODES, 4, 2, third)
    config = masked.config_of(rounds=1)
    held.start(lambda: masked.federate(tmp_path, config, deadline=60.0, change=held.change))
    until(lambda: seen(tmp_path).get("missing") == [4] and seen(tmp_path)["stage"] == "vector")
    yield held
    held.end()


def seen(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "run" / live.FILE).read_text())
    except OSError:
        return {}


def run_of(folder: Path) -> dict[str, Any]:
    page = TestClient(create_app(folder, "127.0.0.1"), base_url="http://127.0.0.1:8765")
    answer = page.get("/api/run", params={"id": "run"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_round_tells_who_trains_who_answered_who_is_gone_and_what_each_has_spent(plain_run: Held, tmp_path: Path) -> None:
    found = run_of(tmp_path)
    assert found["status"] == "live" and found["round"] == 1
    now = found["nodes"]
    assert (now["round"], now["stage"], now["stages"]) == (2, "training", [])
    assert now["words"] == {"0": "answered", "1": "answered", "2": "offline", "3": "asked"}
    assert sum(now["rows"].values()) == 426 and now["until"] > time.time()
    assert [c["releases"] for c in found["clients"]] == [2] * 4  # charged before anyone was asked
    assert all(c["epsilon"] > 0 for c in found["clients"])
    plain_run.end()
    assert seen(tmp_path)["stage"] == "done"
    after = run_of(tmp_path)
    assert after["status"] == "finished" and "words" not in after["nodes"] and after["nodes"]["rows"]


def test_a_secure_sum_tells_its_stage_and_where_a_node_was_lost(masked_run: Held, tmp_path: Path) -> None:
    found = run_of(tmp_path)
    now = found["nodes"]
    assert found["status"] == "live" and now["stage"] == "vector"
    assert now["stages"] == ["keys", "shares", "vector", "survivors", "reveal"]
    assert now["words"] == {**dict.fromkeys("0135", "answered"), "2": "lost at shares", "4": "asked"}
    assert "stage 3 of 5, vector; waiting for nodes 4" in stage_line(tmp_path / "run")
    assert all(c["epsilon"] > 0 for c in found["clients"])
    masked_run.end()
    assert run_of(tmp_path)["status"] == "finished"


def test_where_the_cohort_is_secret_the_file_names_no_node(tmp_path: Path) -> None:
    mark = live.training(tmp_path, 1, [0, 1], [2], 5.0, secret=True)
    mark(1, live.ANSWERED)
    facts = json.loads((tmp_path / live.FILE).read_text())
    assert facts["nodes"] == {} and facts["missing"] == []


def test_a_view_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    live.training(tmp_path / "nowhere", 1, [0], [], 5.0, secret=False)(0, live.ANSWERED)


def test_a_run_that_waits_for_nodes_is_live_however_long_its_round(plain_run: Held, tmp_path: Path) -> None:
    import os

    for name in ("run.json", "ledger.jsonl", "metrics.jsonl", live.FILE):
        os.utime(tmp_path / "run" / name, (1, 1))
    assert run_of(tmp_path)["status"] == "live"


@pytest.mark.parametrize("odd", ["[]", '{"nodes": 3}', '{"until": 1e300, "nodes": {"0": {"a": 1}}}', "{", '{"until": "x"}'])
def test_an_odd_stage_file_breaks_no_page(runs: Path, odd: str) -> None:
    (runs / "sound" / live.FILE).write_text(odd)
    (runs / "sound" / "nodes.json").write_text('{"0": 5, "1": [1, "x"], "2": [3, 4]}')
    page = TestClient(create_app(runs, "127.0.0.1"), base_url="http://127.0.0.1:8765")
    assert page.get("/api/run", params={"id": "sound"}).status_code == 200


@pytest.fixture
def gathering(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """A run that waits for the node of client 2; call what is given to let it join, and wait for the end."""
    grids: list[LocalGrid] = []
    late = next(node for node, client in plain.NODES.items() if client == 2)

    def change(grid: LocalGrid) -> None:
        grid.offline.add(late)
        grids.append(grid)

    patient, config = {"join": 60.0, "deadline": 60.0}, plain.config_of("fed-cdp")
    work = threading.Thread(target=lambda: plain.federate(tmp_path, config, options=patient, change=change), daemon=True)
    work.start()
    until(lambda: len(waiting(tmp_path).get("joined", {})) == 3)

    def join() -> None:
        for grid in grids:
            grid.offline.clear()
        work.join(60)
        assert not work.is_alive()

    yield join
    join()


def waiting(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "run" / live.WAITING).read_text())
    except OSError:
        return {}


def test_a_run_is_shown_while_it_waits_for_its_nodes(gathering: Callable[[], None], tmp_path: Path) -> None:
    page = TestClient(create_app(tmp_path, "127.0.0.1"), base_url="http://127.0.0.1:8765")
    (row,) = page.get("/api/runs").json()["runs"]
    assert row["status"] == "waiting" and row["clients_wanted"] == 4 and sorted(row["joined"]) == ["0", "1", "3"]
    assert all(rows > 0 for rows in row["joined"].values()) and run_of(tmp_path)["until"] > time.time()
    gathering()
    assert waiting(tmp_path) == {} and run_of(tmp_path)["status"] == "finished"


def test_a_run_that_waited_in_vain_is_stopped_and_may_begin_again(tmp_path: Path) -> None:
    late = next(iter(plain.NODES))
    with pytest.raises(UserError, match="have no node"):
        plain.federate(tmp_path, plain.config_of("fed-cdp"), change=lambda grid: grid.offline.add(late))
    assert run_of(tmp_path)["status"] == "stopped" and len(run_of(tmp_path)["joined"]) == 3
    plain.federate(tmp_path, plain.config_of("fed-cdp"))
    assert run_of(tmp_path)["status"] == "finished"


@pytest.mark.parametrize(
    "odd", ["[]", "{", '{"joined": 3}', '{"joined": {"a": "b"}, "until": "x", "clients": 1e300}', '{"joined": {}}']
)
def test_an_odd_waiting_file_breaks_no_page(tmp_path: Path, odd: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / live.WAITING).write_text(odd)
    page = TestClient(create_app(tmp_path, "127.0.0.1"), base_url="http://127.0.0.1:8765")
    (row,) = page.get("/api/runs").json()["runs"]
    assert row["status"] in ("broken", "stopped")
    assert page.get("/api/run", params={"id": "run"}).status_code in (200, 422, 400, 404)
    assert page.get("/report", params={"id": "run"}).status_code < 500


# --- in a browser ---


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    pytest.importorskip("playwright", reason="browser tests need playwright")
    browsing = pytest.importorskip("test_browser")
    if browsing.CHROMIUM is None:
        pytest.skip("no Chromium here (set FEDVEIL_CHROMIUM or install one)")
    with browsing.sync_playwright() as play:
        found = browsing.launch(play)
        yield found
        found.close()


def looked_at(chromium: Any, folder: Path, width: int, name: str, awaited: str = "#now") -> Any:
    import test_browser as browsing

    page = chromium.new_page(viewport={"width": width, "height": 900})
    server, thread, url = browsing.start(folder)
    page.goto(url + "#/run?id=run")
    page.locator(awaited).wait_for(timeout=browsing.WAIT)
    page.screenshot(path=folder / f"{name}-{width}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert browsing.unread(page, width) == []
    return page, lambda: (page.close(), setattr(server, "should_exit", True), thread.join(10))


@pytest.mark.browser
@pytest.mark.parametrize("width", [1180, 390])
def test_a_live_round_is_seen_and_followed_to_its_end(chromium: Any, plain_run: Held, tmp_path: Path, width: int) -> None:
    page, close = looked_at(chromium, tmp_path, width, "plain")
    try:
        table = page.get_by_role("region", name="Nodes")
        assert "2 of 4 answered" in page.locator("#now").inner_text()
        words = [[cell.inner_text() for cell in row.locator("th, td").all()] for row in table.locator("tbody tr").all()]
        assert [w[2] for w in words] == ["answered", "answered", "offline", "working"]
        assert all(float(w[4]) > 0 for w in words)
        plain_run.go.set()
        page.locator("#status", has_text="finished").wait_for(timeout=20_000)
        assert page.locator("#now").count() == 0
    finally:
        close()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1180, 390])
def test_the_stages_of_a_secure_sum_are_seen(chromium: Any, masked_run: Held, tmp_path: Path, width: int) -> None:
    page, close = looked_at(chromium, tmp_path, width, "masked")
    try:
        assert page.locator(".stages [aria-current=step]").inner_text().split()[-1] == "vector"
        assert page.locator(".stages li").count() == 5
        assert "lost at shares" in page.locator("tr[data-client='2']").inner_text()
        assert "working" in page.locator("tr[data-client='4']").inner_text()
    finally:
        close()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1180, 390])
def test_nodes_are_seen_joining(chromium: Any, gathering: Callable[[], None], tmp_path: Path, width: int) -> None:
    page, close = looked_at(chromium, tmp_path, width, "waiting", "#joined")
    try:
        assert "3 of 4 nodes have joined" in page.locator("#joined").inner_text()
        assert "awaited" in page.locator("tr[data-client='2']").inner_text()
        gathering()
        page.locator("#status", has_text="finished").wait_for(timeout=20_000)
    finally:
        close()
