"""`fedveil flower …`: make a Flower project, try it out on this machine, submit and follow runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from fedveil.cli import flower_host, flower_study
from fedveil.cli.common import JsonFlag, TrustFlag, emit
from fedveil.errors import UserError
from fedveil.jsons import Document, JsonObject

HomeOption = Annotated[Path, typer.Option("--home", help="Folder of the local federation.")]
DEFAULT_HOME = Path(".fedveil-flower")


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        no_args_is_help=True,
        help="Run recipes on a Flower federation: init a project, up a local federation, run, down.",
    )
    for command in (init, up, run, down, trainer, keys):
        group.command()(command)
    flower_study.register(group)
    flower_host.register(group)
    app.add_typer(group, name="flower")


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder of the project.")],
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A recipe, a shipped configuration or a .toml file.")
    ],
    change: Annotated[
        list[str], typer.Option("--set", help="Change a key: rounds=20, clients=4, sigma=2.")
    ] = [],
    out: Annotated[Path | None, typer.Option(help="Run directory on the server (default: DIR/run).")] = None,
    deadline: Annotated[float, typer.Option(help="Seconds a round waits for replies.")] = 600.0,
    join: Annotated[float, typer.Option(help="Seconds to wait for the nodes at the start.")] = 300.0,
    minimum: Annotated[int, typer.Option(min=1, help="Skip a round that has fewer usable replies.")] = 1,
    public: Annotated[
        str, typer.Option(help="File with the server's public test data, if nodes bring their own data.")
    ] = "",
    contract: Annotated[
        str, typer.Option(help="The study's contract: columns and classes of public and private rows.")
    ] = "",
    roster: Annotated[
        str, typer.Option(help="The study's roster: replies must be signed by its nodes.")
    ] = "",
    identity: Annotated[str, typer.Option(help="Identity key that signs this server's requests.")] = "",
    shuffler: Annotated[
        str, typer.Option(help="Address of the parameter shuffler: tcp:HOST:PORT or unix:PATH.")
    ] = "",
    shuffler_key: Annotated[
        str, typer.Option(help="File with the server's secret key (64 hex digits) for the shuffler.")
    ] = "",
    secure_sum: Annotated[
        bool,
        typer.Option("--secure-sum", help="Nodes mask their sums and add the noise in shares (docs/secure-sum.md)."),
    ] = False,
    attempts: Annotated[int, typer.Option(min=1, help="Of a secure sum in one round; each is charged.")] = 1,
    home: HomeOption = DEFAULT_HOME,
    trust_code: TrustFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a project that `flwr run` and `fedveil flower run` accept.

    A secure sum needs the roster of all nodes: --roster, or else the one that `fedveil flower up` makes in its --home.

    Examples:

      fedveil flower init trial fed-cdp --set clients=4

      fedveil flower init trial adult-headline-b --secure-sum --set clients=8

      fedveil flower init study study.toml --deadline 1800 --public public.csv --contract flu.toml --roster roster.json
    """
    from fedveil.federation.config import TRUSTED, load_config
    from fedveil.federation.store import refuse_named_code
    from fedveil.flower.project import write_project

    TRUSTED.set(trust_code)
    read = load_config(config, [*change, *(["secure_sum=true"] if secure_sum else [])])
    refuse_named_code(read, trust_code)
    if read.secure_sum and not roster:
        roster = str(home / "roster.json")
    options: dict[str, Any] = {
        "out": str((out or folder / "run").absolute()),
        "deadline": float(deadline),
        "join": float(join),
        "minimum": minimum,
        "public": str(Path(public).absolute()) if public else "",
        **{
            name: str(Path(path).absolute()) if path else ""
            for name, path in (("contract", contract), ("roster", roster), ("identity", identity))
        },
        "shuffler": shuffler,
        "shuffler_key": str(Path(shuffler_key).absolute()) if shuffler_key else "",
        "attempts": attempts,
    }
    from fedveil.flower.server import Options, parties_of

    if not read.secure_sum or Path(roster).exists():  # `fedveil flower up` makes it later
        parties_of(read, Options(**options))
    write_project(folder, read, options)
    found = {"project": str(folder), "recipe": read.recipe, "clients": read.clients, "out": options["out"]}

    def show() -> None:
        print(f"{folder}: {read.recipe} on {read.dataset}, {read.clients} clients, {read.rounds} rounds.")
        print(f"Try it here:  fedveil flower up --nodes {read.clients}   then   fedveil flower run {folder}")
        if read.clients > FEW:
            print(f"              (each node takes half a gigabyte; fewer: the same command with --set clients={FEW})")
        print("Real hosts:   docs/deploy.md")

    emit(found, as_json, show)


def up(
    nodes: Annotated[int, typer.Option(min=1, help="SuperNodes; give a run as many clients.")] = 4,
    home: HomeOption = DEFAULT_HOME,
    port: Annotated[int, typer.Option(help="Port of the SuperLink (default: a free one).")] = 0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS and no node keys. Only ever on this machine.")
    ] = False,
    policy: Annotated[
        Path | None, typer.Option(help="Policy file for all nodes (default: every private recipe).")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder of the datasets (else FEDVEIL_DATA).")] = None,
    shuffler: Annotated[str | None, typer.Option(help="Address of a shuffler beside it: tcp:HOST:PORT or unix:PATH.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return at once; stop with `fedveil flower down`.")
    ] = False,
    no_trainer: Annotated[
        bool, typer.Option("--no-trainer", help="Train inside Flower's own short-lived processes.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Start a SuperLink, a SuperExec and SuperNodes on this machine, with TLS and keys, for trying out.

    Runs until Ctrl-C (or `fedveil flower down`), then stops all of them.

    Examples:

      fedveil flower up --nodes 4

      fedveil flower up --nodes 2 --detach --policy my-policy.toml
    """
    from fedveil.flower import stack
    from fedveil.flower.owner import read_policy

    text = ""
    if policy is not None:
        read_policy(policy)
        text = policy.read_text("utf-8")
    if insecure:
        typer.secho(
            "INSECURE: no encryption and no node keys. Everything listens on 127.0.0.1 only; use this to try "
            "things out, never with private data, never across hosts.",
            fg="red",
            bold=True,
            err=True,
        )
    more = {"datasets": str(Path(data).absolute())} if data else {}
    more |= {"shuffler": shuffler} if shuffler else {}
    begun = stack.up(
        home, nodes, port=port, insecure=insecure, policy=text, node_config=more, trainers=not no_trainer
    )
    found = {
        "home": str(home),
        "superlink": f"{stack.HOST}:{begun.port}",
        "tls": not insecure,
        "nodes": nodes,
        "pids": {name: p.pid for name, p in begun.processes.items()},
    }

    def show() -> None:
        kind = "WITHOUT TLS" if insecure else "TLS and node keys"
        print(f"SuperLink on {stack.HOST}:{begun.port} ({kind}), {nodes} nodes. Logs below {home}.")
        print(
            "Next:  fedveil flower run PROJECT"
            + ("" if detach else "   (in another terminal; Ctrl-C here stops all)")
        )

    if detach:
        emit(found, as_json, show)
        return
    _watch(home, more, not no_trainer, announce=lambda: emit(found, as_json, show), quiet=as_json)


def _watch(
    home: Path, more: Mapping[str, str], trainers: bool, *, announce: Callable[[], None], quiet: bool
) -> None:
    """Start again what ends, until Ctrl-C or `fedveil flower down`; then stop all of it."""
    import signal
    import sys

    from fedveil.flower import stack, supervise

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    try:  # nothing is announced before an interrupt would also stop it
        announce()
        print(end="", flush=True)
        pauses = supervise.Pauses()
        while (home / "stack.json").exists():
            time.sleep(1.0)
            if (home / stack.STOPPING).exists() or not (home / "stack.json").exists():
                break
            gone = stack.lost(stack.read(home))
            if new := pauses.noticed(gone, time.monotonic()):
                print(f"not running any more: {', '.join(new)}; starting again", file=sys.stderr, flush=True)
            if due := pauses.due(time.monotonic()):
                try:
                    stack.revive(home, due, more, trainers=trainers)
                except UserError as wrong:  # it ends, is noticed, and gets a longer pause
                    print(wrong, file=sys.stderr, flush=True)
                pauses.started(due, time.monotonic())
    except KeyboardInterrupt:
        if not quiet:
            print("Stopping …")
        if (home / "stack.json").exists():
            stack.down(home)


def down(home: HomeOption = DEFAULT_HOME, as_json: JsonFlag = False) -> None:
    """Stop what `fedveil flower up` started, by the ids it wrote down.

    Example:  fedveil flower down
    """
    from fedveil.flower import stack

    count = stack.down(home)
    emit({"stopped": count}, as_json, lambda: print(f"{count} processes stopped."))


def run(
    project: Annotated[Path, typer.Argument(metavar="DIR", help="A project of `fedveil flower init`.")],
    home: HomeOption = DEFAULT_HOME,
    superlink: Annotated[
        str | None, typer.Option(help="Connection of your own Flower configuration instead of --home.")
    ] = None,
    poll: Annotated[
        float, typer.Option(help="Seconds without news after which the status is asked for; longer each time, up to three times.")
    ] = 10.0,
    again: Annotated[
        int, typer.Option(min=0, help="Continue so often by itself if the server's process was killed.")
    ] = 2,
    as_json: JsonFlag = False,
) -> None:
    """Submit a project, follow its rounds, and end with the run's true status (0 only if it completed).

    A project whose run was interrupted continues from its last checkpoint. Ctrl-C stops following, not the run.

    Examples:

      fedveil flower run trial

      fedveil flower run study --superlink production
    """
    import json
    import os
    import sys

    from fedveil.flower import stack

    out, rounds = _run_of(project)
    if (out / "result.json").exists():
        raise UserError(
            f"{out} holds a finished run. Make a new project, or change `out` in {project / 'pyproject.toml'}"
        )
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    env: dict[str, str] = {**os.environ, **quiet} if superlink else stack.read(home).environment
    name = superlink or stack.NAME
    number = _begin(env, project, name)
    if not as_json:
        print(f"run {number}", file=sys.stderr)
    course = _Course(env, project, name, out, rounds, None if superlink else home, quiet=as_json, number=number)
    try:
        while not course.state.startswith("finished") or (course.state == FAILED and course.begun_again < again):
            if course.state == FAILED and not course.continued():
                break
            course.look(poll)
            time.sleep(min(poll, 0.5))
    except KeyboardInterrupt:
        print(f"\nThe run goes on. Stop it with: flwr stop {course.number} {name}", file=sys.stderr)
        raise typer.Exit(130) from None
    _follow(out, rounds, course.shown, quiet=as_json)
    result = json.loads((out / "result.json").read_text("utf-8")) if (out / "result.json").exists() else None
    number, state = course.number, course.state
    found = {"run_id": number, "status": state, "out": str(out), "result": result}
    emit(found, as_json, lambda: _show_end(env, name, number, state, out, result))
    if state != COMPLETED:
        raise typer.Exit(1)


FEW = 8  # nodes that any machine can try out
FAILED, COMPLETED = "finished:failed", "finished:completed"


@dataclass
class _Course:
    """A submitted run as it is followed: its number, its last known state, and what was already said about it."""

    env: dict[str, str]
    project: Path
    name: str
    out: Path
    rounds: int
    home: Path | None  # of `fedveil flower up`, where that made the stack
    quiet: bool
    number: int
    state: str = "submitted"
    begun_again: int = 0
    shown: int = 0
    told: int = 0  # rounds shown from the run's log
    stage: str = ""
    looked: float = 0.0
    pause: float = 0.0  # seconds until the state is asked for; grows while nothing happens
    missed: float = 0.0  # since when link or executor are gone
    gone: list[str] = field(default_factory=list)

    def continued(self) -> bool:
        """Submit again a run whose server was killed; False if it stopped by itself."""
        import sys

        from fedveil.flower import stack

        if stack.raised(self.env, self.number, self.name) is not None:
            return False  # starting it again would only repeat it
        self.begun_again += 1
        print(f"run {self.number}: the server's process ended without a word (killed?); continuing from its last "
              "checkpoint", file=sys.stderr)  # fmt: skip
        self.number, self.state, self.told = _begin(self.env, self.project, self.name), "submitted", 0
        self.looked = time.monotonic()
        return True

    def look(self, poll: float) -> None:
        """Show what is new; ask for the state when nothing is.

        Asking starts a process of Flower's (a second of processor time), and a run that writes rounds is known to go on."""
        from fedveil.flower import stack

        before = self.shown, self.stage
        self.shown = _follow(self.out, self.rounds, self.shown, quiet=self.quiet)
        self.stage = self.stage if self.quiet else _stage(self.out, self.stage)
        silent, ended = time.monotonic() - self.looked, (self.out / "result.json").exists()
        if (self.shown, self.stage) != before and not ended:
            self.looked, self.pause = time.monotonic(), poll
        elif silent >= max(self.pause, poll) or (ended and silent >= min(poll, 1.0)):
            self.pause = min(1.5 * max(self.pause, poll), 3 * poll)
            self.state, self.looked = stack.status(self.env, self.number, self.name), time.monotonic()
            if self.home is not None:
                self._mind_processes(self.home)
            elif not self.quiet and not self.out.exists():  # the folder is on another host: the run's log has the rounds
                self.told = _follow_log(self.env, self.number, self.name, self.told)

    def _mind_processes(self, home: Path) -> None:
        """Say which processes ended; give up when those that a run needs stay away."""
        import sys

        from fedveil.flower import stack

        if (now := stack.lost(stack.read(home))) != self.gone:
            self.gone = now
            print(
                f"not running any more: {', '.join(self.gone) or 'none'}; logs below {home}",
                file=sys.stderr,
            )
        down = "superlink" in self.gone or "superexec" in self.gone
        self.missed = (self.missed or time.monotonic()) if down else 0.0
        if down and time.monotonic() - self.missed > 60:  # `fedveil flower up` starts what ended again
            raise UserError(
                f"{' and '.join(self.gone)} ended and did not come back; logs below {home}. Start again and run again: the "
                "run goes on where it was"
            )


def _show_end(
    env: dict[str, str], name: str, number: int, state: str, out: Path, result: Document | None
) -> None:
    import sys

    from fedveil.flower import stack

    if state == COMPLETED and result:
        accuracy = result.get("test_accuracy")
        print(f"{result['recipe']}: {result['rounds']} rounds, " + (
            f"test accuracy {accuracy:.4f}" if accuracy is not None else f"test loss {result['test_loss']}"
        ))  # fmt: skip
        for row in result["ledger"]:
            if row["verdict"] == "sound":
                print(f"  {row['observer']:14s} {row['unit']:16s} epsilon {row['epsilon']:.4g}")
        print(f"Run directory: {out}")
    elif state == COMPLETED:
        print(f"run {number} completed; its directory {out} is on the server")
    else:
        reason = stack.raised(env, number, name) if state == FAILED else None
        if reason is None:
            reason = "\n".join(_told(stack.flwr(env, "log", str(number), name, "--show").stdout)[-15:])
        print(reason, file=sys.stderr)
        print(f"run {number}: {state}", file=sys.stderr)


def _told(log: str) -> list[str]:
    """The lines of a log without the frames of tracebacks; what was raised stays."""
    kept, inside = [], False
    for text in log.splitlines():
        inside = text.startswith("Traceback") or (inside and (text.startswith(" ") or not text.strip()))
        if text.strip() and not inside:
            kept.append(text)
    return kept


def _begin(env: dict[str, str], project: Path, name: str) -> int:
    """Submit the project, or go on following its run if that is still under way (two would fight for its folder)."""
    from fedveil.flower import stack

    note = project / ".run"
    try:
        before = int(note.read_text("ascii"))
    except (OSError, ValueError):
        before = None
    if before is not None and stack.status(env, before, name) in ("pending", "starting", "running"):
        return before
    number = stack.submit(env, project, name)
    note.write_text(str(number), "ascii")
    return number


def _run_of(project: Path) -> tuple[Path, int]:
    """Where a project's run goes, and its number of rounds."""
    from fedveil.federation.config import load_config, read_toml_file
    from fedveil.flower.owner import tomllib

    try:
        values = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))
        out = Path(values["tool"]["flwr"]["app"]["config"]["out"])
        package = values["tool"]["flwr"]["app"]["components"]["serverapp"].partition(".")[0]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        raise UserError(f"{project} is no project of `fedveil flower init`") from None
    path = project / package / "run.toml"
    rounds = read_toml_file(path).get("rounds")  # what is there needs no recipe, which may be code
    return out, load_config(str(path)).rounds if rounds is None else int(rounds)


def _follow(out: Path, rounds: int, shown: int, quiet: bool) -> int:
    """Print the rounds that are new; returns how many there are."""
    import sys

    from fedveil.federation.store import read_lines

    lines = read_lines(out / "metrics.jsonl")
    for line in [] if quiet else lines[shown:]:
        print(_line(line, rounds), file=sys.stderr, flush=True)
    return len(lines)


def _follow_log(env: dict[str, str], number: int, name: str, told: int) -> int:
    """Print the rounds of the run's log that are new; returns how many there are."""
    import re
    import sys

    from fedveil.flower import limits, stack

    found = re.findall(r"round \d+/\d+: .*", stack.flwr(env, "log", str(number), name, "--show").stdout)
    for text in found[told:]:
        print(limits.plain(text, 200), file=sys.stderr, flush=True)
    return max(told, len(found))


def _stage(out: Path, before: str) -> str:
    """Say stage, missing nodes and time left of a secure sum, when stage or nodes changed; returns what was said."""
    import sys

    from fedveil.flower.live import stage_line

    now = stage_line(out)
    if now and now.rpartition(",")[0] != before.rpartition(",")[0]:
        print(f"  {now}", file=sys.stderr, flush=True)
        return now
    return before


def _line(line: JsonObject, rounds: int) -> str:
    """One round for people."""
    accuracy = line.get("test_accuracy")
    text = f"round {line['round']}/{rounds}  {line['arrived']} of {line['clients']} replies"
    text += f"  accuracy {accuracy:.4f}" if accuracy is not None else ""
    lost = [
        f"{line[k]} {k}"
        for k in ("missing", "offline", "refused", "rejected", "error", "failed")
        if line.get(k)
    ]
    text += f"  ({', '.join(lost)})" if lost else ""
    return text + ("  SKIPPED" if line.get("skipped") else "") + f"  {line['seconds']:.1f} s"


def trainer(
    socket: Annotated[str, typer.Argument(metavar="SOCKET", help="Path of the Unix socket to answer on.")],
    node_config: Annotated[
        str, typer.Option("--node-config", help="As for flower-supernode: key=value pairs, TOML values.")
    ],
) -> None:
    """Keep data, policy, ledger and torch of one node in one process; its ClientApp only forwards messages.

    Run it under an account that alone can read the data. The SuperNode gets trainer="SOCKET" in its own
    --node-config.

    Example:

      fedveil flower trainer /run/fedveil.sock --node-config 'home="/var/lib/fedveil" \\
          policy="/etc/fedveil/policy.toml" partition-id=0 data="/srv/patients.csv"'
    """
    from fedveil.flower.owner import contract_of, owner_of
    from fedveil.flower.trainer import serve

    owner = owner_of(parse_node_config(node_config))
    contract_of(owner)
    try:
        serve(socket, owner)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def parse_node_config(text: str) -> JsonObject:
    """key=value pairs as flower-supernode reads them; values are TOML."""
    from fedveil.flower.owner import tomllib

    pairs = re.findall(r'[\w-]+=(?:"(?:[^"\\]|\\.)*"|[^\s"]+)', text)
    try:
        if " ".join(pairs) != text.strip():
            raise ValueError("not only key=value pairs")
        return tomllib.loads("\n".join(pairs))
    except (ValueError, RecursionError) as wrong:  # a TOMLDecodeError is a ValueError
        raise UserError(
            f"--node-config {text!r}: {wrong}; write key=value pairs with one space between, texts in double quotes"
        ) from None


def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write into.")],
    name: Annotated[
        list[str], typer.Option("--name", help="Names and addresses of the SuperLink, for its certificate.")
    ] = [],
    nodes: Annotated[int, typer.Option(min=0, help="Also make key pairs for so many SuperNodes.")] = 0,
    days: Annotated[int, typer.Option(min=1, help="Days the certificates are valid.")] = 365,
) -> None:
    """Make a certificate authority, the SuperLink's certificate, and SuperNode keys.

    Make each node's key on the node itself where you can (--nodes 1, no --name): a secret key should not travel.

    Examples:

      fedveil flower keys tls --name fl.example.org --name 10.0.0.5

      fedveil flower keys node --nodes 1
    """
    from fedveil.flower import stack

    if not name and not nodes:
        raise UserError("nothing to make: give --name (for the SuperLink's certificate) or --nodes")
    if (folder / "ca.key").exists() or (folder / "node-0").exists():
        raise UserError(f"{folder} already holds keys; choose another folder, keys are never overwritten")
    if name:
        stack.make_certificates(folder, name, days)
        print(
            f"{folder}/ca.crt (to every host), server.crt and server.key (SuperLink only), ca.key (lock it away)"
        )
    for number in range(nodes):
        stack.make_node_key(folder / f"node-{number}")
    if nodes:
        print(f"{folder}/node-* (stay on their nodes), node-*.pub (register at the SuperLink)")
