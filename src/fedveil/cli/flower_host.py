"""`fedveil flower`: what runs on a host. Supervised nodes and servers, their status and figures, systemd units."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedveil.cli.common import JsonFlag, emit
from fedveil.errors import UserError


def register(group: typer.Typer) -> None:
    for command in (node, link, witness, status, metrics, unit):
        group.command()(command)


def node(
    home: Annotated[Path, typer.Option(help="Folder that `fedveil flower accept` laid out.")] = Path("node"),
    plain: Annotated[
        bool, typer.Option("--plain", help="Flower's SuperNode as it is, a new Python per message.")
    ] = False,
) -> None:
    """Run a node: trainer and SuperNode, started again with growing pauses whenever one ends. Ctrl-C stops both.

    Example:  fedveil flower node --home /etc/fedveil
    """
    from fedveil.flower.supervise import node_parts

    _supervise(node_parts(home, light=not plain), home / "status.json")


def link(
    home: Annotated[Path, typer.Option(help="Folder of the SuperLink's state and logs.")],
    tls: Annotated[
        Path, typer.Option(help="Folder of server.crt, server.key and ca.crt (`fedveil flower keys`).")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on, a name of the certificate.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
) -> None:
    """Run the server's side: SuperLink and SuperExec, started again with growing pauses whenever one ends.

    Example:  fedveil flower link --home /var/lib/fedveil --tls /etc/fedveil/tls --host 10.0.0.5
    """
    from fedveil.flower.supervise import link_parts

    _supervise(link_parts(home, tls, host, port), home / "status.json")


def witness(
    home: Annotated[Path, typer.Option(help="Folder of the witness's key and of the heads it signed.")],
    roster: Annotated[Path, typer.Option(help="Roster of the nodes whose heads it signs.")],
    listen: Annotated[str, typer.Option(help="tcp:HOST:PORT or unix:PATH.")] = "tcp:127.0.0.1:9470",
) -> None:
    """Sign the heads of nodes' ledgers, on a host that is not theirs: one that was rolled back is noticed. Ctrl-C stops it.

    Example:  fedveil flower witness --home /var/lib/witness --roster roster.json --listen tcp:10.0.0.9:9470
    """
    from fedveil.flower import books, identity
    from fedveil.flower.roster import read_roster
    from fedveil.flower.witness import serving

    nodes = frozenset(member.identity for member in read_roster(roster).members)
    books.private_folder(home)
    if not (home / "identity").exists():
        identity.write_identity(home / "identity")
    secret = identity.read_identity(home / "identity")
    with serving(listen, home, secret, nodes) as server:
        print(f'nodes: --node-config witness="{listen}" witness-key="{identity.public_of(secret).hex()}"', flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


def _supervise(parts: Any, status: Path) -> None:
    import signal
    import threading

    from fedveil.flower.supervise import supervise

    stop = threading.Event()
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda *_: stop.set())

    def say(text: str) -> None:
        print(time.strftime("%Y-%m-%dT%H:%M:%SZ ", time.gmtime()) + text, flush=True)

    say("starting " + ", ".join(part.name for part in parts))
    supervise(parts, status, stop, say)


def status(
    home: Annotated[Path, typer.Option(help="Folder of a node, a link, or of `fedveil flower up`.")] = Path(
        ".fedveil-flower"
    ),
    run: Annotated[Path | None, typer.Option(help="Also look at this run directory.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say which processes run, how often they were started again, and how far a run is. Exit code 1 if one is down.

    Of a run with secure sums also the stage, the nodes it waits for, and the time left.

    Example:  fedveil flower status --home /etc/fedveil
    """
    from fedveil.flower import stack
    from fedveil.flower.supervise import read_status

    parts: dict[str, Any] = {}
    if (home / "stack.json").exists():
        begun = stack.read(home)
        parts = {n: {"pid": p.pid if stack.alive(p) else None} for n, p in begun.processes.items()}
    elif (home / "status.json").exists():
        parts = read_status(home / "status.json").get("parts", {})
        for facts in parts.values():
            if facts.get("pid") and stack.began(int(facts["pid"])) is None:
                facts["pid"] = None
    elif run is None:
        raise UserError(f"{home}: nothing is supervised from here")
    found: dict[str, Any] = {"parts": parts}
    if run is not None:
        from fedveil.federation.store import read_lines
        from fedveil.flower.live import stage_line

        lines = read_lines(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
        found["run"] = {
            "rounds": len(lines),
            "finished": (run / "result.json").exists(),
            "last": lines[-1] if lines else None,
            "stage": stage_line(run),
        }
    down = [name for name, facts in parts.items() if not facts.get("pid")]

    def show() -> None:
        for name, facts in parts.items():
            more = f", started again {facts['restarts']} times" if facts.get("restarts") else ""
            print(f"{name:14s} {'process ' + str(facts['pid']) if facts.get('pid') else 'DOWN'}{more}")
        if run is not None:
            print(
                f"run: {found['run']['rounds']} rounds" + (", finished" if found["run"]["finished"] else "")
            )
            if found["run"]["stage"]:
                print(f"secure sum: {found['run']['stage']}")

    emit(found, as_json, show)
    if down:
        raise typer.Exit(1)


def metrics(
    run: Annotated[Path | None, typer.Option(help="Figures of this run directory (server).")] = None,
    node_config: Annotated[
        str, typer.Option("--node-config", help="Figures of this node, as for the trainer.")
    ] = "",
    listen: Annotated[
        str, typer.Option(help="Answer /metrics and /healthz at HOST:PORT (default: print once).")
    ] = "",
) -> None:
    """Figures in Prometheus' text format: requests, refusals, rounds, replies, epsilon. Nothing private.

    Examples:

      fedveil flower metrics --run study/run

      fedveil flower metrics --node-config 'home="/var/lib/fedveil" …' --listen 127.0.0.1:9464
    """
    from fedveil.cli.flower import parse_node_config
    from fedveil.flower.owner import owner_of
    from fedveil.flower.supervise import node_figures, run_figures, serve_figures

    if (run is None) == (not node_config):
        raise UserError("give --run DIR or --node-config, one of the two")
    figures = partial(run_figures, run) if run is not None else partial(node_figures, owner_of(parse_node_config(node_config)))

    if not listen:
        print(figures(), end="")
        return
    try:
        serve_figures(listen, figures)
    except OSError as wrong:
        raise UserError(f"--listen {listen}: {wrong.strerror}") from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def unit(
    kind: Annotated[str, typer.Argument(metavar="node|link", help="Which side.")],
    home: Annotated[Path, typer.Option(help="Its folder.")],
    user: Annotated[str, typer.Option(help="Account to run under.")] = "fedveil",
    tls: Annotated[Path, typer.Option(help="Folder of the certificates (link).")] = Path("/etc/fedveil/tls"),
    host: Annotated[str, typer.Option(help="Address to listen on (link).")] = "127.0.0.1",
) -> None:
    """Print a systemd unit for a node or the server's side.

    Example:  fedveil flower unit node --home /etc/fedveil > /etc/systemd/system/fedveil-node.service
    """
    import sys

    from fedveil.flower.supervise import unit as text

    if kind not in ("node", "link"):
        raise UserError(f"'{kind}' is neither node nor link")
    command = f"{sys.executable} -m fedveil flower {kind} --home {home.absolute()}"
    if kind == "link":
        command += f" --tls {tls.absolute()} --host {host}"
    print(text(kind, command, home, user), end="")
