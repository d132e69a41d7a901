"""A small read-only web server for run directories.

It listens on this computer only unless told otherwise, and then every visitor needs a token. Requests with a foreign
Host header are refused, so a web site elsewhere cannot reach the server through a name that it points here. Pages
come with a strict content security policy; reports are rendered afresh, never served from a run's own files.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from markupsafe import Markup

from fedveil.errors import UserError
from fedveil.jsons import Document, plain
from fedveil.report import page as report
from fedveil.report import plots as report_plots
from fedveil.report.facts import Facts, gather
from fedveil.report.view import epsilon_chart, promise_table, quality, sentence, settings_charts, tiles
from fedveil.ui import calculator, folder
from fedveil.ui.folder import Missing

STATIC = resources.files("fedveil.ui") / "static"
ASSETS = {
    "base.css": "text/css",
    "style.css": "text/css",
    "chart.js": "text/javascript",
    "app.js": "text/javascript",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
OPEN = ("/login", "/static/base.css", "/static/style.css", "/favicon.ico")  # what the login page itself needs
COOKIE = "fedveil_session"
SHORTEST_TOKEN = 16
MOST_COMPARED = 12
MOST_LOGIN = 4096  # bytes
Value = TypeVar("Value")


def is_loopback(host: str) -> bool:
    """Whether only this computer can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_allowed(header: str, bound: str) -> bool:
    """Whether a Host header names this server: its own address or this computer; any address if bound to all."""
    name = header.strip().lower()
    name = (
        name[1 : name.find("]")] if name.startswith("[") else name.rsplit(":", 1)[0] if ":" in name else name
    )
    if is_loopback(name) or name == bound.lower():
        return True
    if bound in ("0.0.0.0", "::"):
        if name == socket.gethostname().lower():
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
    return False


def session_of(token: str) -> str:
    """What the cookie holds instead of the token itself."""
    return hmac.new(token.encode(), b"fedveil dashboard session", "sha256").hexdigest()


class Cache:
    """Remembers the last few answers until the run's files change; one computation at a time."""

    def __init__(self, size: int = 16) -> None:
        self._kept: OrderedDict[Hashable, tuple[object, Any]] = OrderedDict()
        self._size = size
        self._lock = threading.Lock()

    def get(self, key: Hashable, stamp: object, make: Callable[[], Value]) -> Value:
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept[0] != stamp:
                kept = (stamp, make())
                self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
            return kept[1]


def create_app(runs: Path, host: str = "127.0.0.1", token: str | None = None) -> FastAPI:
    """The application for the folder `runs`. Without a token it answers everybody who can reach it."""
    app = FastAPI(title="fedveil", docs_url=None, redoc_url=None, openapi_url=None)
    root, cache = runs.resolve(), Cache()
    _guard(app, host, token)
    _say_what_is_wrong(app)
    _pages(app, token)
    _single_runs(app, root, cache)
    _several_runs(app, root, cache)
    _calculator(app, cache)
    return app


def _authorised(request: Request, token: str | None) -> bool:
    if token is None:
        return True
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    session = request.cookies.get(COOKIE, "")
    return hmac.compare_digest(given.encode(), token.encode()) or hmac.compare_digest(
        session.encode(), session_of(token).encode()
    )


def _guard(app: FastAPI, host: str, token: str | None) -> None:
    """Every request: a name of this server, a method that only reads, a token; every answer: headers that shut the rest out."""

    @app.middleware("http")
    async def guard(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        if not host_allowed(request.headers.get("host", ""), host):
            answer: Response = JSONResponse({"error": "this server does not go by that name"}, 421)
        elif request.method not in ("GET", "HEAD") and (request.method, request.url.path) != (
            "POST",
            "/login",
        ):
            answer = JSONResponse({"error": "read-only"}, 405)
        elif not _authorised(request, token) and request.url.path not in OPEN:
            if request.url.path == "/":
                answer = RedirectResponse("/login", 303)
            else:
                answer = JSONResponse({"error": "a token is needed"}, 401)
        else:
            answer = await call(request)
        for name, value in HEADERS.items():
            answer.headers.setdefault(name, value)
        answer.headers.setdefault("Content-Security-Policy", POLICY)
        return answer


def _say_what_is_wrong(app: FastAPI) -> None:
    @app.exception_handler(UserError)
    async def wrong(_: Request, error: UserError) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(Missing)
    async def missing(_: Request, error: Missing) -> Response:
        return JSONResponse({"error": str(error)}, 404)


def _pages(app: FastAPI, token: str | None) -> None:
    """The page, its files, and the login."""

    @app.get("/")
    def index() -> Response:
        return HTMLResponse(_static("index.html"))

    @app.get("/login")
    def ask() -> Response:
        return HTMLResponse(_static("login.html"))

    @app.post("/login")
    async def login(request: Request) -> Response:
        body = await _short_body(request)
        if body is None:
            return JSONResponse({"error": "that is too long for a token"}, 413)
        given = parse_qs(body).get("token", [""])[0]
        if token is None or not hmac.compare_digest(given.encode(), token.encode()):
            await asyncio.sleep(0.5)
            return HTMLResponse(
                _static("login.html").replace("<!--wrong-->", "That token is not right."), 403
            )
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, session_of(token), httponly=True, samesite="strict", path="/")
        return answer

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in ASSETS:
            raise Missing("there is no such file")
        shared = name in ("base.css", "chart.js")
        return Response(report.asset(name) if shared else _static(name), media_type=ASSETS[name])

    @app.get("/favicon.ico")
    def icon() -> Response:
        return Response(status_code=204)


def _single_runs(app: FastAPI, root: Path, cache: Cache) -> None:
    @app.get("/api/runs")
    def list_runs() -> Response:
        rows = [_summary(item, root) for item in folder.find(root)]
        rows.sort(
            key=lambda row: (
                row["status"] not in ("live", "waiting"),
                row["status"] == "broken",
                _reversed(row.get("created", "")),
            )
        )
        return JSONResponse(plain({"folder": root.name, "runs": rows, "most": folder.MOST_RUNS}))

    @app.get("/api/run")
    def one_run(id: str) -> Response:
        place = folder.resolve(root, id)
        folder.check(place, root)
        row = folder.summary(place, root)
        if "joined" in row:
            return JSONResponse(plain(row))
        live = row["status"] == "live"
        made = cache.get(
            ("run", id), (folder.stamp(place), live), lambda: detail(_facts(place, live, clients=True))
        )
        return JSONResponse(plain({**row, **made, "nodes": folder.nodes_of(place, root, live)}))


def _several_runs(app: FastAPI, root: Path, cache: Cache) -> None:
    def chosen(names: list[str], private: bool = False) -> list[Facts]:
        if len(names) > MOST_COMPARED:
            raise UserError(f"at most {MOST_COMPARED} runs at once")
        out = []
        for name in names:
            place = folder.resolve(root, name)
            folder.check(place, root)
            key = ("facts", name, private)
            out.append(cache.get(key, folder.stamp(place), lambda p=place: _facts(p, False, private)))  # type: ignore[misc]
        return out

    @app.get("/api/compare")
    def compare(id: list[str] = Query()) -> Response:
        facts = chosen(id)
        found = report.comparison(facts)
        for one, name in zip(found["rows"], id, strict=True):
            one["id"] = name
        return JSONResponse(plain(found))

    @app.get("/report")
    def show(id: list[str] = Query(), private: bool = False) -> Response:
        facts = chosen(id, private)
        style, script = report.asset("base.css") + report.asset("report.css"), report.asset("chart.js")
        policy = report.policy(style, script) + "; frame-ancestors 'none'"
        return HTMLResponse(report.render(facts, private), headers={"Content-Security-Policy": policy})


def _calculator(app: FastAPI, cache: Cache) -> None:
    @app.get("/api/epsilon")
    def epsilon(
        mechanism: str = "gaussian", sigma: float = 1.0, rate: float = 1.0, steps: int = 1, delta: float = 1e-5,
        layers: int = 1, norm: str = "l2", dimension: int = 1, honest: bool = False,
    ) -> Response:  # fmt: skip
        key = (mechanism, sigma, rate, steps, delta, layers, norm, dimension, honest)
        rows = cache.get(("epsilon", key), None, lambda: calculator.calculate(*key))
        return JSONResponse(plain(rows))

    @app.get("/api/sigma")
    def sigma(
        epsilon: float, mechanism: str = "gaussian", rate: float = 1.0, steps: int = 1, delta: float = 1e-5,
        layers: int = 1, norm: str = "l2", dimension: int = 1,
    ) -> Response:  # fmt: skip
        key = (epsilon, mechanism, rate, steps, delta, layers, norm, dimension)
        return JSONResponse(plain(cache.get(("sigma", key), None, lambda: calculator.find_sigma(*key))))


async def _short_body(request: Request) -> str | None:
    """The body of a login, or None as soon as it is longer than any: nobody may fill memory before authentication."""
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or len(announced) > 9 or int(announced) > MOST_LOGIN:
        return None
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_LOGIN:
            return None
    return body.decode("utf-8", "replace")


def _summary(item: Path, root: Path) -> Document:
    """A run's line in the list; one that cannot be read is listed as broken and empties nobody's list."""
    try:
        return folder.summary(item, root)
    except Exception as wrong:
        name = item.relative_to(root).as_posix()
        return {"id": name, "name": name, "problem": f"its files are damaged ({type(wrong).__name__})", "status": "broken"}


def _reversed(text: str) -> tuple[int, ...]:
    return tuple(-ord(letter) for letter in text)


def _static(name: str) -> str:
    return (STATIC / name).read_text("utf-8")


def _facts(place: Path, live: bool, private: bool = False, clients: bool = False) -> Facts:
    """A run's facts; whatever is wrong with its files becomes a message."""
    try:
        return gather(place, private, compute=False, quick=live, clients=clients)
    except UserError as wrong:
        said = str(wrong).replace(str(place), place.name)  # the page need not know where the folder lies
        raise UserError(f"run '{place.name}' cannot be shown: {said}") from wrong
    except Exception as wrong:
        raise UserError(
            f"run '{place.name}' cannot be shown: its files are damaged ({type(wrong).__name__})"
        ) from wrong


def detail(facts: Facts) -> dict[str, object]:
    """Everything the page about one run shows; charts are finished SVG whose texts are escaped."""
    charts = [*quality(facts), epsilon_chart(facts) or live_epsilon(facts)]
    charts += [chart for chart, hidden in settings_charts(facts) if not hidden]
    table = promise_table(facts)
    return {
        "charts": [str(chart) for chart in charts if chart],
        "tiles": tiles(facts),
        "sentence": sentence(facts),
        "table": table,
        "promise_problem": facts.promise.problem,
        "clients": facts.promise.clients,
        "client_count": facts.promise.client_count,
        "unit": facts.unit,
        "delta": facts.promise.delta,
        "attacks": [card["kind"] for card in facts.attacks],
        "stopped": str(facts.result.get("stopped") or ""),
        "notes": [str(note) for note in facts.run.facts.get("notes") or []],
        "command": str(facts.run.facts.get("command") or ""),
    }


def live_epsilon(facts: Facts) -> Markup:
    """The sound epsilon that a run wrote after each round."""
    line = report_plots.Series("epsilon", facts.x, facts.column("epsilon"), 1)
    title = f"ε spent over rounds, {facts.run.config.observer} about one {facts.unit}"
    return report_plots.lines([line], title=title, y_label="epsilon", floor=0.0)


def serve(runs: Path, host: str, port: int, token: str | None) -> None:
    """Run the dashboard until it is interrupted."""
    if not runs.is_dir():
        raise UserError(f"the folder of runs '{runs}' does not exist: give one, or start a run first")
    if not is_loopback(host) and not token:
        raise UserError(
            f"--host {host}: others could reach the dashboard, so it needs a token: --token SECRET or the variable "
            "FEDVEIL_UI_TOKEN (16 characters or more)"
        )
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise UserError(f"--token: {len(token)} characters are too few, use at least {SHORTEST_TOKEN}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as wrong:
        listener.close()
        raise UserError(
            f"cannot listen on {host} port {port}: {wrong.strerror}. Choose another --port"
        ) from None
    real = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    print(f"Dashboard of {runs}: http://{shown}:{real}/  (stop with Ctrl+C)", flush=True)
    config = uvicorn.Config(
        create_app(runs, host, token),
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
    )
    uvicorn.Server(config).run(sockets=[listener])
