"""Keep the processes of one host running: restart with back-off, a status file, and figures for Prometheus.

    fedveil flower node --home /etc/fedveil          # trainer and SuperNode of one node
    fedveil flower link --home /var/lib/fedveil …    # SuperLink and SuperExec of the server

Nothing here knows data. Figures are what the audit log, the ledger and a run's metrics already say: counts, rounds and
epsilons. Whether training failed is private and is not among them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import UserError
from fedveil.flower import books, limits
from fedveil.jsons import Document

if TYPE_CHECKING:
    from fedveil.flower.owner import Owner

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a restart
STEADY = 60.0  # a process that ran so long begins with a short pause again


@dataclass(frozen=True)
class Part:
    """A process to keep running; its words go to `log`."""

    name: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Running:
    part: Part
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    failures: int = 0
    restarts: int = -1
    due: float = 0.0
    last_exit: int | None = None


def pause_after(failures: int) -> float:
    """Seconds to wait before the next start: 1, 2, 4, … up to a minute."""
    return min(FIRST_PAUSE * 2.0 ** max(failures - 1, 0), LONGEST_PAUSE)


@dataclass
class Pauses:
    """When each of several processes is started again: after a pause of its own, which the others' failures do not lengthen."""

    _failures: dict[str, int] = field(default_factory=dict)
    _began: dict[str, float] = field(default_factory=dict)
    _next: dict[str, float] = field(default_factory=dict)

    def noticed(self, gone: Sequence[str], now: float) -> list[str]:
        """Take note of who is gone; returns those that ran when last looked at."""
        new = [name for name in gone if name not in self._next]
        for name in new:
            steady = now - self._began.get(name, -STEADY) >= STEADY
            self._failures[name] = 1 if steady else self._failures.get(name, 0) + 1
            self._next[name] = now + pause_after(self._failures[name])
        return new

    def due(self, now: float) -> list[str]:
        """Who is to be started now."""
        return [name for name, at in self._next.items() if at <= now]

    def started(self, names: Sequence[str], now: float) -> None:
        """Take note of who was started."""
        for name in names:
            self._began[name] = now
            del self._next[name]


def supervise(
    parts: Sequence[Part],
    status: Path,
    stop: threading.Event,
    say: Callable[[str], None] = print,
    poll: float = 0.5,
) -> None:
    """Run all parts until `stop` is set, then end them. A part that ends is started again after a growing pause."""
    running = [_Running(part) for part in parts]
    try:
        while not stop.is_set():
            changed = False
            for one in running:
                changed |= _look(one, say)
            if changed or not status.exists():
                write_status(status, running)
            stop.wait(poll)
    finally:
        _end([one.process for one in running if one.process is not None])
        write_status(status, running)


def _look(one: _Running, say: Callable[[str], None]) -> bool:
    now = time.monotonic()
    if one.process is not None:
        code = one.process.poll()
        if code is None:
            return False
        one.failures = 1 if now - one.began > STEADY else one.failures + 1
        one.last_exit, one.process = code, None
        one.due = now + pause_after(one.failures)
        how = f"signal {-code}" if code < 0 else f"code {code}"
        say(
            f"{one.part.name} ended ({how}); next start in {pause_after(one.failures):.0f} s; log: {one.part.log}"
        )
        return True
    if now < one.due:
        return False
    one.part.log.parent.mkdir(parents=True, exist_ok=True)
    with open(one.part.log, "ab") as out:
        one.process = subprocess.Popen(
            one.part.command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=dict(one.part.env) or None, start_new_session=True,
        )  # fmt: skip
    one.began, one.restarts = now, one.restarts + 1
    return True


def _end(processes: Sequence[subprocess.Popen[bytes]], patience: float = 10.0) -> None:
    for kind, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, kind)
        until = time.monotonic() + wait
        while any(p.poll() is None for p in processes) and time.monotonic() < until:
            time.sleep(0.05)
    for process in processes:  # what outlived its leader
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def write_status(path: Path, running: Sequence[_Running]) -> None:
    """Who runs, since when, how often it was started again. Never raises."""
    facts = {
        one.part.name: {
            "pid": None if one.process is None else one.process.pid,
            "seconds": None if one.process is None else round(time.monotonic() - one.began, 1),
            "restarts": max(one.restarts, 0),
            "last_exit": one.last_exit,
        }
        for one in running
    }
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps({"time": books.stamp(), "parts": facts}, indent=2), "utf-8")
        os.replace(temporary, path)


def read_status(path: Path) -> Document:
    """What `supervise` wrote last; `UserError` if nothing did."""
    if not path.exists():
        raise UserError(f"{path}: nothing is supervised from here")
    found = limits.json_file(path, "status")
    return found if isinstance(found, dict) else {}


# --- parts ---


def node_parts(home: Path, *, light: bool = True) -> list[Part]:
    """Trainer and SuperNode of the node that `fedveil flower accept` laid out in `home`."""
    import sys

    from fedveil.flower import stack

    home = home.absolute()
    try:
        settings = (home / "node-config").read_text("utf-8").strip()
        link = (home / "superlink").read_text("utf-8").strip()
    except OSError as wrong:
        raise UserError(
            f"{home}: no node was laid out here ({wrong.strerror}); `fedveil flower accept` does"
        ) from None
    if not link:
        raise UserError(f"{home}/superlink is empty: write the SuperLink's address, HOST:PORT, into it")
    if not (home / "ca.crt").exists():
        raise UserError(f"{home}/ca.crt is missing: put the certificate of the SuperLink's authority there")
    env = stack.environment(home / "flwr")
    (home / "flwr").mkdir(exist_ok=True)
    socket = str(home / "trainer.sock")
    trainer = (sys.executable, "-m", "fedveil", "flower", "trainer", socket, "--node-config", settings)
    node = (
        *stack.supernode_command(light), "--root-certificates", str(home / "ca.crt"), "--superlink", link,
        "--auth-supernode-private-key", str(home / "supernode"), "--port", str(stack.free_port()),
        "--node-config", f"{settings} trainer={json.dumps(socket)}",
    )  # fmt: skip
    return [
        Part("trainer", trainer, home / "trainer.log", env),
        Part("supernode", node, home / "supernode.log", env),
    ]


def link_parts(home: Path, tls: Path, host: str, port: int) -> list[Part]:
    """SuperLink and SuperExec of the server, with TLS and node keys."""
    import secrets

    from fedveil.flower import stack

    home = home.absolute()
    for name in ("server.crt", "server.key", "ca.crt"):
        if not (tls / name).exists():
            raise UserError(f"{tls / name} is missing; `fedveil flower keys {tls} --name {host}` makes it")
    home.mkdir(parents=True, exist_ok=True)
    (home / "flwr").mkdir(exist_ok=True)
    secret = home / "superexec.secret"
    if not secret.exists():
        stack.write_secret(secret, secrets.token_hex(32).encode())
    env, tls = stack.environment(home / "flwr"), tls.absolute()
    link = (
        stack.program("flower-superlink"), "--ssl-certfile", str(tls / "server.crt"), "--ssl-keyfile", str(tls / "server.key"),
        "--ssl-ca-certfile", str(tls / "ca.crt"), "--enable-supernode-auth", "--isolation", "process",
        "--superexec-auth-secret-file", str(secret), "--host", host, "--port", str(port),
        "--database", stack.database(home / "state.db"), "--disable-runtime-dependency-installation",
    )  # fmt: skip
    executor = (
        stack.program("flower-superexec"), "--runtime-api-address", f"{host}:{port}", "--root-certificates", str(tls / "ca.crt"),
        "--superexec-auth-secret-file", str(secret),
    )  # fmt: skip
    return [
        Part("superlink", link, home / "superlink.log", env),
        Part("superexec", executor, home / "superexec.log", env),
    ]


UNIT = """\
# /etc/systemd/system/fedveil-{kind}.service, made by `fedveil flower unit {kind}`
[Unit]
Description=fedveil {kind}
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={command}
User={user}
Restart=always
RestartSec=5
KillMode=control-group
TimeoutStopSec=30
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=strict
ProtectHome=true
ReadWritePaths={home}
Environment=FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 OMP_NUM_THREADS=1

[Install]
WantedBy=multi-user.target
"""


def unit(kind: str, command: str, home: Path, user: str) -> str:
    """A systemd unit that starts `command` and starts it again whatever ends it."""
    return UNIT.format(kind=kind, command=command, home=home.absolute(), user=user)


# --- figures ---


def _line(name: str, value: float, **labels: str) -> str:
    inside = ",".join(f'{k}="{limits.plain(v, 60)}"'.replace("\\", "") for k, v in labels.items())
    return f"{name}{{{inside}}} {value:g}" if inside else f"{name} {value:g}"


def node_figures(owner: Owner, epsilon: bool = True) -> str:
    """A node's figures in Prometheus' text format, from its audit log and its ledger."""
    counts: Counter[tuple[str, str]] = Counter()
    path = owner.home / "audit.jsonl"
    lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
    for text in lines:
        with contextlib.suppress(ValueError, AttributeError):
            facts = json.loads(text)
            counts[str(facts.get("asked"))[:20], "ok" if facts.get("answer") == "ok" else "refused"] += 1
    out = ["# TYPE fedveil_node_requests_total counter"]
    out += [
        _line("fedveil_node_requests_total", n, asked=asked, answer=a)
        for (asked, a), n in sorted(counts.items())
    ]
    ledger = books.ledger_path(owner.home)
    if ledger.exists():
        out += ["# TYPE fedveil_node_rounds_charged_total counter",
                _line("fedveil_node_rounds_charged_total", len(books.history(ledger)))]  # fmt: skip
        if epsilon:
            out += _epsilons("fedveil_node_epsilon", ledger)
    return "\n".join(out) + "\n"


def run_figures(folder: Path) -> str:
    """A run's figures: rounds, replies, time of the last round, epsilon per observer and unit."""
    from fedveil.federation.store import read_lines

    lines = read_lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    out = ["# TYPE fedveil_run_rounds_total counter", _line("fedveil_run_rounds_total", len(lines)),
           "# TYPE fedveil_run_replies_total counter"]  # fmt: skip
    for kind in ("arrived", "missing", "offline", "refused", "rejected", "error", "duplicate", "stray"):
        out.append(
            _line("fedveil_run_replies_total", sum(int(x.get(kind, 0) or 0) for x in lines), kind=kind)
        )
    out.append(_line("fedveil_run_rounds_skipped_total", sum(bool(x.get("skipped")) for x in lines)))
    if lines:
        out += [
            "# TYPE fedveil_run_round_seconds gauge",
            _line("fedveil_run_round_seconds", float(lines[-1].get("seconds", 0))),
        ]
    out.append(_line("fedveil_run_finished", float((folder / "result.json").exists())))
    if (folder / "ledger.jsonl").exists():
        out += _epsilons("fedveil_run_epsilon", folder / "ledger.jsonl")
    return "\n".join(out) + "\n"


def _epsilons(name: str, ledger: Path) -> list[str]:
    from fedveil.privacy.ledger import Ledger

    out, book = [f"# TYPE {name} gauge"], Ledger.read(ledger)
    for row in book.table(accountant="rdp"):
        filtered = row.accountant == "filter"  # the row is the promise; what is spent of it is the figure
        epsilon = book.spent(0, row.observer, row.unit, row.delta) if filtered else row.epsilon
        if (filtered or row.verdict == "sound") and epsilon is not None:
            out.append(_line(name, epsilon, observer=row.observer, unit=row.unit, delta=f"{row.delta:g}"))
    return out


def serve_figures(
    listen: str, figures: Callable[[], str], ready: Callable[[int], None] | None = None
) -> None:
    """Answer GET /metrics (figures) and /healthz on HOST:PORT until interrupted."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--listen {listen!r}: write HOST:PORT, as 127.0.0.1:9464")

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path not in ("/metrics", "/healthz"):
                self.send_error(404)
                return
            try:
                body = (figures() if self.path == "/metrics" else "ok\n").encode()
            except Exception:  # a ledger that is being written, a folder that went away
                self.send_error(503)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer((host, int(port)), Handler) as server:
        server.daemon_threads = True
        if ready is not None:
            ready(server.server_address[1])
        server.serve_forever()
