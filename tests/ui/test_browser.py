"""The dashboard and the report in a real browser, against the real server and real runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="browser tests need playwright")
pytest.importorskip("fastapi", reason="the dashboard needs the ui extra")
import uvicorn
from playwright.sync_api import Browser, Error, Page, Playwright, expect, sync_playwright

from fedveil.federation.config import load_config
from fedveil.federation.loop import run as simulate
from fedveil.report.page import write_report
from fedveil.ui.server import create_app

CHROMIUM = os.environ.get("FEDVEIL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = "<img src=x onerror=alert(1)>"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip
WAIT = 20_000  # milliseconds: machines that run tests may be busy

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (set FEDVEIL_CHROMIUM or install one)"),
]


def launch(play: Playwright) -> Browser:
    """Chromium, started again up to twice. It dies of a trap where the process that starts it has a umask without the owner's
    rights, as threads of ours once left behind; tests/conftest.py holds the umask. A Chromium that does not start is none, as on
    machines without one."""
    for _ in range(3):
        try:
            return play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        except Error as broken:
            said = str(broken).partition("\n")[0]
            time.sleep(2)
    pytest.skip(f"Chromium does not start here: {said}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as play:
        found = launch(play)
        yield found
        found.close()


def start(runs: Path, token: str | None = None) -> tuple[uvicorn.Server, threading.Thread, str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(runs, token=token), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    return server, thread, f"http://127.0.0.1:{listener.getsockname()[1]}/"


@pytest.fixture
def address(runs: Path) -> Iterator[str]:
    server, thread, url = start(runs)
    yield url
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def allowed() -> list[str]:
    """Parts of messages that a test expects in the browser's log."""
    return []


@pytest.fixture
def page(browser: Browser, allowed: list[str]) -> Iterator[Page]:
    """A page that fails its test when anything is logged as an error, a dialog opens or a request leaves."""
    context = browser.new_context(color_scheme="light", viewport={"width": 1180, "height": 860})
    context.set_default_timeout(WAIT)
    trouble: list[str] = []

    def watch(one: Page) -> None:
        one.on("console", lambda m: trouble.append(m.text) if m.type in ("error", "warning") else None)
        one.on("pageerror", lambda error: trouble.append(str(error)))
        one.on("dialog", lambda dialog: (trouble.append("dialog: " + dialog.message), dialog.dismiss()))
        one.on(
            "request",
            lambda r: (
                None if r.url.startswith(("http://127.0.0.1:", "file:", "data:")) else trouble.append(r.url)
            ),
        )

    context.on("page", watch)
    yield context.new_page()
    context.close()
    assert not [text for text in trouble if not any(part in text for part in allowed)]


def row(page: Page, name: str) -> Any:
    return page.locator("table.runs tbody tr").filter(has=page.get_by_role("link", name=name, exact=True))


def test_the_list_shows_runs_and_their_promises(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.get_by_role("heading", name="Runs")).to_be_visible(timeout=WAIT)
    expect(page.locator("table.runs tbody tr")).to_have_count(6, timeout=WAIT)
    expect(row(page, "sound")).to_contain_text("ε ≤")
    expect(row(page, "nominal")).to_contain_text("nominal")
    expect(row(page, EVIL)).to_contain_text("finished")  # the name is text, not markup
    assert page.locator("main img").count() == 0
    expect(page.locator("tr", has_text="run.json is damaged")).to_contain_text("broken")


def test_a_live_run_is_followed_to_its_end(page: Page, address: str, runs: Path) -> None:
    config = load_config("fed-cdp", ["rounds=5", "local_steps=1", "clients=3", "report=false"])
    go = threading.Event()

    def slowly(_: Any) -> None:
        go.wait(30)
        time.sleep(0.6)

    work = threading.Thread(
        target=simulate, args=(config, runs / "live"), kwargs={"on_round": slowly}, daemon=True
    )
    work.start()
    while not (runs / "live" / "metrics.jsonl").exists():
        time.sleep(0.05)
    page.goto(address)
    expect(row(page, "live")).to_contain_text("live", timeout=WAIT)
    row(page, "live").get_by_role("link").click()
    expect(page.locator("#status")).to_have_text("live", timeout=WAIT)
    seen = page.locator("#round").inner_text()
    go.set()
    expect(page.locator("#round")).not_to_have_text(seen, timeout=WAIT)
    expect(page.locator("#status")).to_have_text("finished", timeout=WAIT)
    expect(page.locator("#round")).to_have_text("round 5 of 5")
    expect(page.get_by_role("region", name="Per-client budgets").locator("tbody tr")).to_have_count(3)
    expect(page.locator("figure.chart").first).to_be_visible()
    work.join(30)


def test_a_report_opens_from_the_dashboard(page: Page, address: str) -> None:
    page.goto(address + "#/run?id=sound")
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="Open report").click()
    report = opened.value
    report.wait_for_load_state()
    expect(report.get_by_text("What is promised to whom")).to_be_visible(timeout=WAIT)
    assert report.evaluate("getComputedStyle(document.body).fontSize") == "15px"  # its own style is allowed
    report.get_by_role("button", name="Switch to dark colours").click()  # and its own script
    assert report.evaluate("document.documentElement.dataset.theme") == "dark"
    report.locator("figure[data-hover] svg").first.hover()
    expect(report.locator(".tip").first).to_contain_text("round")


def test_runs_are_compared_by_keyboard_alone(page: Page, address: str) -> None:
    page.goto(address)
    expect(row(page, "sound")).to_be_visible(timeout=WAIT)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox", name="Filter runs")).to_be_focused()
    page.keyboard.type("finished")
    expect(page.locator("table.runs tbody tr")).to_have_count(4)
    for _ in range(30):  # from the filter to the first check box
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.type") == "checkbox":
            break
    names = []
    for _ in range(2):
        names.append(
            page.evaluate("document.activeElement.getAttribute('aria-label')").removeprefix("Select ")
        )
        page.keyboard.press("Space")
        page.keyboard.press("ArrowDown")
    for _ in range(30):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.textContent") == "Compare 2":
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="2 runs compared")).to_be_focused(timeout=WAIT)
    expect(page.locator("figure.chart")).to_have_count(2)
    for name in names:
        expect(page.locator("main table")).to_contain_text(name.split("/")[-1])


def test_a_comparison_separates_sound_from_nominal(page: Page, address: str) -> None:
    page.goto(address + "#/compare?id=sound&id=nominal")
    expect(page.locator("circle.run.sound")).to_have_count(1, timeout=WAIT)
    expect(page.locator("circle.run.none")).to_have_count(1)
    expect(page.locator("figure.chart", has_text="no sound promise")).to_have_count(1)


def test_the_calculator_answers_and_explains_wrong_input(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_role("link", name="ε calculator").click()
    answers = page.locator("#answers tbody tr")
    expect(answers).to_have_count(8, timeout=WAIT)
    expect(answers.first).to_contain_text("0.6009")  # sigma 6, q 0.01, 10000 steps, delta 1e-5
    page.get_by_label("σ").fill("3")
    page.get_by_label("σ").press("Enter")
    expect(answers.first).not_to_contain_text("0.6009", timeout=WAIT)
    expect(answers.filter(has_text="nominal").first).to_be_visible()
    page.get_by_label("Wanted ε").fill("0.6009")
    page.get_by_role("button", name="Find σ").click()
    expect(page.get_by_label("σ")).to_have_value(re.compile(r"^(5\.99|6\.00)"), timeout=WAIT)
    expect(answers.first).to_contain_text("0.600", timeout=WAIT)


def test_wrong_input_is_explained(page: Page, address: str, allowed: list[str]) -> None:
    allowed.append("status of 400")  # the browser itself logs a refused request
    page.goto(address + "#/calculator")
    expect(page.locator("#answers tbody tr")).to_have_count(8, timeout=WAIT)
    page.get_by_label("Steps").fill("-5")
    page.get_by_label("Steps").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("steps must be a whole number", timeout=WAIT)


def test_every_control_has_a_name(page: Page, address: str) -> None:
    for place in ("#/", "#/calculator", "#/run?id=sound"):
        page.goto(address + place)
        page.locator("main table").first.wait_for()
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, a, input, select, progress, svg[role=img]')].filter((e) =>
            !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"""
        )
        assert nameless == []


VIEWS = {
    "runs": "#/",
    "calculator": "#/calculator",
    "run": "#/run?id=sound",
    "compare": "#/compare?id=sound&id=nominal&id=deep/er/nested",
}
HARD_TO_READ = """(phone) => [...document.querySelectorAll('main td, main tbody th')].filter((cell) => {
    const box = cell.getBoundingClientRect();
    return box.left < 0 || box.right > innerWidth || (phone && cell.textContent.trim() && box.width < 240);
}).map((cell) => cell.outerHTML)"""  # cut off, or too narrow for words on a phone


def unread(page: Page, width: int) -> list[str]:
    """Cells that somebody cannot read without scrolling sideways, or whose words break into pieces."""
    return list(page.evaluate(HARD_TO_READ, width < 720))


@pytest.mark.parametrize("width", [1180, 390])
def test_every_view_fits_a_desktop_and_a_phone(page: Page, address: str, width: int, tmp_path: Path) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    for name, place in VIEWS.items():
        page.goto(address + place)
        page.locator("main tbody tr").first.wait_for()
        page.screenshot(path=tmp_path / f"{name}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert unread(page, width) == [], name


NAMELESS = """[...document.querySelectorAll('main tbody td')].filter((cell) => !cell.matches('.pick, .name, .problem') &&
    !(cell.dataset.about && getComputedStyle(cell, '::before').content.includes(cell.dataset.about)))
    .map((cell) => cell.outerHTML)"""


def test_on_a_phone_every_figure_of_a_run_says_what_it_is(page: Page, address: str) -> None:
    """There the head of a table is gone, and rows are cards."""
    page.set_viewport_size({"width": 390, "height": 800})
    for name, place in VIEWS.items():
        page.goto(address + place)
        page.locator("main tbody tr").first.wait_for()
        assert page.evaluate(NAMELESS) == [], name


def test_a_token_is_asked_for_and_remembered(page: Page, runs: Path) -> None:
    server, thread, url = start(runs, "a-token-of-some-length")
    try:
        page.goto(url)
        page.get_by_label("Token").fill("a-token-of-some-length")
        page.keyboard.press("Enter")
        expect(page.locator("table.runs tbody tr")).to_have_count(6, timeout=WAIT)
        page.reload()
        expect(page.locator("table.runs tbody tr")).to_have_count(6, timeout=WAIT)
    finally:
        server.should_exit = True
        thread.join(10)


def test_a_report_of_a_hundred_rounds_opens_fast_offline_and_fits_its_page(
    page: Page, made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "long"
    shutil.copytree(made / "sound", folder)
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    lines = [json.dumps({**line, "round": n, "test_accuracy": 1 - 1 / (n + 1)}) for n in range(1, 101)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    from PIL import Image

    (folder / "attacks").mkdir()
    (folder / "attacks" / "gradient.json").write_text('{"kind": "gradient", "success_rate": 0.5}')
    Image.effect_noise((760, 640), 60).save(folder / "attacks" / "gradient.png")
    write_report([folder, made / "nominal"], tmp_path / "page.html")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.context.set_offline(True)
    page.goto((tmp_path / "page.html").as_uri())
    assert [url for url in asked if not url.startswith("data:")] == [(tmp_path / "page.html").as_uri()]
    spent = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert spent < 2000
    assert page.evaluate("document.querySelector('img.gallery').naturalWidth") > 0
    for width in (1180, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
