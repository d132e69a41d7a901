"""A whole federation on this machine, for trying out: SuperLink, SuperExec, SuperNodes and trainers.

Everything listens on 127.0.0.1 only. TLS and SuperNode keys are the default. Processes are started in groups
of their own and stopped by the ids that were written down, after checking that an id still is that process.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import UserError, extra
from fedveil.flower import LOST_LINK
from fedveil.flower.identity import public_of, read_identity, write_identity
from fedveil.flower.roster import Member, Roster, write_roster

HOST = "127.0.0.1"
NAME = "fedveil"  # of the connection in Flower's configuration file
READY = 120.0  # seconds for a process to come up on a busy machine
STOPPING = "stopping"  # a file: `down` is at work
RAISED = "ServerApp failed with exception: "  # so Flower begins the end of a run whose server raised an exception
TRAINER = (sys.executable, "-m", "fedveil", "flower", "trainer")


@dataclass(frozen=True)
class Started:
    """A process by id and start time: an id alone may be somebody else's by now."""

    pid: int
    began: str


@dataclass(frozen=True)
class Stack:
    """A running federation, as written to stack.json."""

    folder: Path
    port: int
    insecure: bool
    nodes: int
    processes: Mapping[str, Started]

    @property
    def environment(self) -> dict[str, str]:
        """Environment of `flwr` commands that talk to it."""
        return environment(self.folder / "flwr")


def environment(home: Path) -> dict[str, str]:
    """Quiet, offline Flower with its own home; one thread per process, as many processes share the machine."""
    own = {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONUNBUFFERED": "1",
        # Flower's processes start each other by name.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }
    return {"OMP_NUM_THREADS": "1", **os.environ, **own}


def supernode_command(light: bool = True) -> list[str]:
    """Flower's SuperNode, or the same with a fork instead of a Python start-up per message."""
    plain = program("flower-supernode")
    return [sys.executable, "-m", "fedveil.flower.lightnode", "supernode"] if light else [plain]


def program(name: str) -> str:
    """A Flower command of this very environment."""
    found = Path(sys.executable).with_name(name)
    if not found.exists():
        raise UserError(f"'{name}' is not installed beside this Python: {extra('flower')}")
    return str(found)


# --- certificates and keys ---


def make_certificates(folder: Path, names: Sequence[str] = ("localhost", HOST), days: int = 365) -> None:
    """ca.crt, ca.key, server.crt and server.key for a SuperLink with these names and addresses."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.timezone.utc)
    ca_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def begin(subject: str, issuer: str, key: Any) -> Any:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=days))
        )

    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    ca = (
        begin("fedveil-ca", "fedveil-ca", ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=False, key_cert_sign=True, crl_sign=True, **usage), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    server = (
        begin("fedveil-superlink", "fedveil-ca", server_key)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=False, crl_sign=False, **usage), critical=True
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for name, key in (("ca.key", ca_key), ("server.key", server_key)):
        write_secret(folder / name, key.private_bytes(*plain))
    for name, certificate in (("ca.crt", ca), ("server.crt", server)):
        (folder / name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _alternative(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def make_node_key(path: Path) -> None:
    """A SuperNode's key pair: `path` (secret) and `path`.pub, OpenSSH, NIST P-384."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    path.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(
        path,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(path.name + ".pub").write_bytes(public + b"\n")


def write_secret(path: Path, content: bytes) -> None:
    """A file that only its owner can read, from its first moment."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


# --- processes ---


def began(pid: int) -> str | None:
    """When a process started, as the system counts; None if there is none."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state == "Z" else rest[18]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return None
    found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
    return found.stdout.strip() or None


def start(command: Sequence[str], log: Path, env: Mapping[str, str]) -> Started:
    """Start a process in a group of its own, its words going to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(env),
            start_new_session=True,
        )
    return Started(process.pid, began(process.pid) or "")


def alive(process: Started) -> bool:
    """Whether this very process still runs."""
    with contextlib.suppress(ChildProcessError, OSError):
        os.waitpid(process.pid, os.WNOHANG)  # a child that ended is gone, not a zombie
    return began(process.pid) == process.began


def stop(processes: Sequence[Started], patience: float = 10.0) -> None:
    """Ask each process group to end, then insist."""
    groups = [p for p in processes if alive(p)]
    for kind, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        for process in groups:
            if alive(process):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGCONT)
                    os.killpg(process.pid, kind)
        until = time.monotonic() + wait
        while any(alive(p) for p in groups) and time.monotonic() < until:
            time.sleep(0.1)
    for process in groups:  # what outlived its leader (an app that was training)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    """A port nobody uses now."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def wait_port(port: int, process: Started, log: Path, name: str) -> None:
    """Until something listens; says what the log says if the process ends before."""
    until = time.monotonic() + READY
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return
        if not alive(process):
            break
        time.sleep(0.1)
    raise UserError(f"{name} did not start; its last words in {log}:\n{tail(log)}")


def tail(log: Path, lines: int = 12) -> str:
    """The end of a log."""
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-lines:]) if log.exists() else ""


# --- the federation ---


def up(
    folder: Path,
    nodes: int = 4,
    *,
    port: int = 0,
    insecure: bool = False,
    policy: str = "",
    node_config: Mapping[str, object] = {},
    trainers: bool = True,
    superlink_env: Mapping[str, str] = {},
    trainer_command: Sequence[str] = TRAINER,
) -> Stack:
    """Start everything and wait until the nodes are in. A failure stops what was started.

    policy: text of the policy file of every node (default: all recipes that promise something here).
    node_config: more keys for every node; a contract among them takes the policy's place. trainers: one persistent
    trainer per node.
    """
    folder = folder.absolute()
    if (folder / "stack.json").exists() and any(alive(p) for p in read(folder).processes.values()):
        raise UserError(
            f"a federation already runs from {folder}; `fedveil flower down --home {folder}` stops it"
        )
    port = port or free_port()
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=0.5):
        raise UserError(f"port {port} is in use; choose another with --port")
    _lay_out(folder, port, nodes, insecure)
    rules = with_sum(policy or default_policy(), make_roster(folder, nodes))
    stack = Stack(folder, port, insecure, nodes, {})
    try:
        stack = start_superlink(stack, superlink_env)
        if not insecure:
            register(stack, [folder / f"keys/node-{n}.pub" for n in range(nodes)])
        for number in range(nodes):
            (folder / f"nodes/{number}").mkdir(parents=True, exist_ok=True)
            (folder / f"nodes/{number}/policy.toml").write_text(rules, "utf-8")
            stack = start_node(stack, number, node_config, trainer=trainers, command=trainer_command)
        for number in range(nodes):
            wait_node(stack, number)
        return stack
    except BaseException:
        stop(list(stack.processes.values()))
        raise


def _lay_out(folder: Path, port: int, nodes: int, insecure: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STOPPING).unlink(missing_ok=True)  # of a `down` that was killed
    (folder / "flwr").mkdir(exist_ok=True)
    if not insecure and not (folder / "tls/ca.crt").exists():
        make_certificates(folder / "tls")
    for number in range(nodes):
        if not insecure and not (folder / f"keys/node-{number}").exists():
            make_node_key(folder / f"keys/node-{number}")
    if not (folder / "superexec.secret").exists():
        write_secret(folder / "superexec.secret", secrets.token_hex(32).encode())
    how = "insecure = true" if insecure else f"root-certificates = {json.dumps(str(folder / 'tls/ca.crt'))}"
    (folder / "flwr/config.toml").write_text(
        f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{HOST}:{port}"\n{how}\n', "utf-8"
    )


def make_roster(folder: Path, nodes: int) -> Roster:
    """Identity keys of the nodes, and the roster of them in roster.json; both stay if they are there."""
    members = []
    for number in range(nodes):
        path = folder / f"nodes/{number}/identity"
        if not path.exists():
            write_identity(path)
        members.append(Member(number, f"node-{number}", public_of(read_identity(path))))
    roster = Roster("trial", 1, tuple(members))
    write_roster(folder / "roster.json", roster)
    return roster


def with_sum(policy: str, roster: Roster) -> str:
    """The policy with terms for secure sums over this roster, unless it has some: the least safe threshold, one colluder."""
    nodes = len(roster.members)
    if nodes < 2 or "sum_roster" in policy:
        return policy
    terms = {"sum_threshold": (nodes + 1) // 2 + 1, "sum_colluders": 1, "sum_roster": roster.digest}
    return policy.rstrip() + "\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in terms.items())


def _with(stack: Stack, **processes: Started) -> Stack:
    """The stack with more processes, written down at once."""
    stack = Stack(stack.folder, stack.port, stack.insecure, stack.nodes, {**stack.processes, **processes})
    facts = {
        "port": stack.port,
        "insecure": stack.insecure,
        "nodes": stack.nodes,
        "processes": {name: [p.pid, p.began] for name, p in stack.processes.items()},
    }
    temporary = stack.folder / ".stack.json.tmp"
    temporary.write_text(json.dumps(facts, indent=2), "utf-8")
    os.replace(temporary, stack.folder / "stack.json")
    return stack


def read(folder: Path) -> Stack:
    """The federation that was started from `folder`."""
    try:
        facts = json.loads((folder / "stack.json").read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"no federation was started from {folder}; `fedveil flower up --home {folder}` does"
        ) from None
    processes = {name: Started(*value) for name, value in facts["processes"].items()}
    return Stack(folder.absolute(), facts["port"], facts["insecure"], facts["nodes"], processes)


def database(path: Path) -> str:
    """The SuperLink's database as its option takes it. On a busy machine it waits for a lock longer than SQLite's 5 s, after
    which Flower answers a node with an error, and the node ends."""
    return f"sqlite:///{path.absolute()}?timeout=120"


def start_superlink(stack: Stack, env: Mapping[str, str] = {}) -> Stack:
    """SuperLink and its SuperExec as separate processes: a run survives a restart of the SuperLink."""
    folder = stack.folder
    tls = ["--insecure"] if stack.insecure else [
        "--ssl-certfile", str(folder / "tls/server.crt"), "--ssl-keyfile", str(folder / "tls/server.key"),
        "--ssl-ca-certfile", str(folder / "tls/ca.crt"), "--enable-supernode-auth",
    ]  # fmt: skip
    link = start(
        [
            program("flower-superlink"), *tls, "--isolation", "process", *_secret(folder), "--host", HOST,
            "--port", str(stack.port), "--database", database(folder / "state.db"), "--disable-runtime-dependency-installation",
        ],
        folder / "logs/superlink.log",
        {**stack.environment, **env},
    )  # fmt: skip
    stack = _with(stack, superlink=link)
    wait_port(stack.port, link, folder / "logs/superlink.log", "the SuperLink")
    if "superexec" in stack.processes and alive(stack.processes["superexec"]):
        return stack
    return start_superexec(stack, env)


def start_superexec(stack: Stack, env: Mapping[str, str] = {}) -> Stack:
    """The process that starts ServerApps for the SuperLink."""
    folder = stack.folder
    trust = ["--insecure"] if stack.insecure else ["--root-certificates", str(folder / "tls/ca.crt")]
    executor = start(
        [program("flower-superexec"), "--runtime-api-address", f"{HOST}:{stack.port}", *trust, *_secret(folder)],
        folder / "logs/superexec.log",
        {**stack.environment, **env},
    )
    return _with(stack, superexec=executor)


def _secret(folder: Path) -> list[str]:
    return ["--superexec-auth-secret-file", str(folder / "superexec.secret")]


def register(stack: Stack, keys: Sequence[Path]) -> None:
    """Let the SuperLink know the nodes' public keys (those it knows already stay known)."""
    for path in keys:
        done = flwr(stack.environment, "supernode", "register", str(path), NAME)
        if done.returncode != 0 and "already" not in (done.stdout + done.stderr).lower():
            raise UserError(f"the SuperLink did not register {path}: {(done.stdout + done.stderr).strip()}")


def _settings(stack: Stack, number: int, more: Mapping[str, object]) -> dict[str, object]:
    """What a node's SuperNode and trainer are both told."""
    home = stack.folder / f"nodes/{number}"
    return {
        "home": str(home),
        **({} if "contract" in more else {"policy": str(home / "policy.toml")}),
        "partition-id": number,
        "identity": str(home / "identity"),
        "roster": str(stack.folder / "roster.json"),
        **more,
    }


def start_trainer(stack: Stack, number: int, more: Mapping[str, object] = {}, command: Sequence[str] = TRAINER) -> Stack:
    """A node's trainer, unless it runs; its SuperNode finds a new one by its socket."""
    home, known = stack.folder / f"nodes/{number}", stack.processes.get(f"trainer-{number}")
    if known is not None and alive(known):
        return stack
    (home / "flwr").mkdir(parents=True, exist_ok=True)
    words = [*command, _socket_path(home), "--node-config", _node_config(_settings(stack, number, more))]
    return _with(stack, **{f"trainer-{number}": start(words, home / "trainer.log", environment(home / "flwr"))})


def start_node(
    stack: Stack,
    number: int,
    more: Mapping[str, object] = {},
    *,
    trainer: bool = True,
    light: bool = True,
    command: Sequence[str] = TRAINER,
) -> Stack:
    """One SuperNode, with its trainer; also restarts one that was lost. light: see `flower.lightnode`."""
    home = stack.folder / f"nodes/{number}"
    (home / "flwr").mkdir(parents=True, exist_ok=True)
    settings = _settings(stack, number, more)
    if trainer:
        settings["trainer"] = _socket_path(home)
        stack = start_trainer(stack, number, more, command)
    secure = ["--insecure"] if stack.insecure else [
        "--root-certificates", str(stack.folder / "tls/ca.crt"),
        "--auth-supernode-private-key", str(stack.folder / f"keys/node-{number}"),
    ]  # fmt: skip
    port = free_port()
    node = start(
        [
            *supernode_command(light), *secure, "--superlink", f"{HOST}:{stack.port}", "--port", str(port),
            "--node-config", _node_config(settings),
        ],
        home / "supernode.log",
        environment(home / "flwr"),
    )  # fmt: skip
    (home / "port").write_text(str(port))
    return _with(stack, **{f"node-{number}": node})


def wait_node(stack: Stack, number: int) -> None:
    """Until a node's own services listen."""
    home = stack.folder / f"nodes/{number}"
    node = stack.processes[f"node-{number}"]
    wait_port(int((home / "port").read_text()), node, home / "supernode.log", f"SuperNode {number}")
    worker = stack.processes.get(f"trainer-{number}")
    until = time.monotonic() + READY
    while worker is not None and not os.path.exists(_socket_path(home)):
        if not alive(worker) or time.monotonic() > until:
            raise UserError(f"trainer {number} did not start; its last words:\n{tail(home / 'trainer.log')}")
        time.sleep(0.1)


def _socket_path(home: Path) -> str:
    """Socket paths are short by law; a deep folder gets one elsewhere, remembered beside the node."""
    path = str(home / "trainer.sock")
    if len(path.encode()) <= 100:
        return path
    note = home / "socket"
    if not note.exists():
        note.write_text(os.path.join(tempfile.mkdtemp(prefix="fedveil-"), "trainer.sock"))
    return note.read_text()


def _node_config(settings: Mapping[str, object]) -> str:
    return " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())


def default_policy() -> str:
    """For trying out: every recipe that adds noise; the budget is left open."""
    from fedveil.protect.catalogue import catalogue

    names = [r.name for r in catalogue().values() if r.private]
    changes = 'changes = ["sigma", "clip.bound", "channel", "epsilon", "mechanism", "sampling", "cohort"]'
    return f'recipes = {json.dumps(names)}\n{changes}\nmaximum_epsilon = "unlimited"\n'


def lost(stack: Stack) -> list[str]:
    """Names of processes that ended by themselves."""
    return [name for name, process in stack.processes.items() if not alive(process)]


def revive(folder: Path, names: Sequence[str], more: Mapping[str, object] = {}, *, trainers: bool = True) -> Stack:
    """Start these processes again, and no other: what still runs may be at work."""
    stack = read(folder)
    if "superlink" in names:
        stack = start_superlink(stack)
    if "superexec" in names and not alive(stack.processes["superexec"]):
        stack = start_superexec(stack)
    for number in range(stack.nodes):
        if f"trainer-{number}" in names:
            stack = start_trainer(stack, number, more)
        if f"node-{number}" in names:
            stack = start_node(stack, number, more, trainer=trainers)
    return stack


def down(folder: Path) -> int:
    """Stop everything that was started from `folder`; returns how many processes still ran."""
    stack, count = read(folder), 0
    (folder / STOPPING).touch()  # whoever starts again what ends leaves it from now on
    try:
        for _ in range(3):  # what was being started again meanwhile is in the file by the next look
            # Nodes first, so that the SuperLink hears them leave.
            running = {name: process for name, process in stack.processes.items() if alive(process)}
            stop([process for name, process in running.items() if name not in ("superlink", "superexec")])
            stop(list(running.values()))
            count += len(running)
            stack = read(folder)
        (folder / "stack.json").unlink()
    finally:
        (folder / STOPPING).unlink(missing_ok=True)
    return count


def flwr(env: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Flower's own command line."""
    return subprocess.run([program("flwr"), *arguments], env=dict(env), capture_output=True, text=True)


# --- runs ---


def submit(env: Mapping[str, str], project: Path, superlink: str, overrides: Mapping[str, object] = {}) -> int:
    """Hand a project to the SuperLink; returns the run's id."""
    changes = [
        part for key, value in overrides.items() for part in ("--run-config", f"{key}={json.dumps(value)}")
    ]
    done = flwr(env, "run", str(project), superlink, *changes, "--format", "json")
    try:
        answer = json.loads(done.stdout[done.stdout.index("{") :])
        if answer.get("success", True) and "run-id" in answer:
            return int(answer["run-id"])
        said = answer.get("error-message", done.stdout)
    except ValueError:
        said = done.stdout + done.stderr
    raise UserError(f"`flwr run` did not accept {project}: {said.strip()}")


def status(env: Mapping[str, str], run: int, superlink: str) -> str:
    """A run's true status, such as "running" or "finished:completed"; "unknown" if nobody answers."""
    return _listed(env, run, superlink, "status") or "unknown"


def raised(env: Mapping[str, str], run: int, superlink: str) -> str | None:
    """With what words a run's own server process ended itself; None if it was ended from outside, or lost its SuperLink.

    Only what Flower keeps as the run's end counts. A log also holds errors that were survived, and words of nodes.
    """
    told = _listed(env, run, superlink, "status-details")
    if not told.startswith(RAISED) or told.removeprefix(RAISED).startswith(LOST_LINK):
        return None
    return told.removeprefix(RAISED)


def _listed(env: Mapping[str, str], run: int, superlink: str, key: str) -> str:
    """One of the facts that Flower lists of a run; "" if nobody answers."""
    done = flwr(env, "ls", superlink, "--run-id", str(run), "--format", "json")
    try:
        answer = json.loads(done.stdout[done.stdout.index("{") :])
        return str(answer["runs"][0].get(key, ""))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return ""
