"""What owners write down, projects, keys, the trainer and the commands: without a federation."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

from fedveil.cli import build
from fedveil.cli.flower import parse_node_config
from fedveil.errors import UserError
from fedveil.federation.config import load_config, make_config
from fedveil.federation.store import open_run
from fedveil.flower import LOST_LINK, client_app, server_app, stack, trainer, wire
from fedveil.flower.grid import LocalGrid
from fedveil.flower.owner import Policy, contract_of, owner_of, read_policy
from fedveil.flower.project import to_toml, write_project
from fedveil.flower.server import Options, serve

WRONG = [
    ("", "'recipes' is missing"),
    ('recipes = "fed-cdp"', "list of names"),
    ("recipes = []\nminimum_sigm = 3", "Did you mean 'minimum_sigma'"),
    ("recipes = []\nminimum_sigma = -1", "not negative"),
    ("recipes = []\nminimum_sigma = nan", "not negative"),
    ("recipes = []\nmaximum_epsilon = true", "not negative"),
    ("recipes = []\nmaximum_epsilon = inf", "not negative"),
    ('recipes = []\nobserver = "sever"', "Did you mean 'server'"),
    ('recipes = []\nsecure_noise = "no"', "true or false"),
    ("recipes = []\ndelta = 1.5", "between 0 and 1"),
    ("recipes = [", "not valid TOML"),
    ('recipes = ["fed-cdp"]', "'maximum_epsilon' is missing"),
    ("a = " + "[" * 100_000, "nested too deep|not valid TOML"),
    ("recipes = []\nmaximum_epsilon = " + "9" * 5000, "more than 40 digits"),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_a_misspelt_policy_is_an_error_not_a_hole(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(UserError, match=said):
        read_policy(tmp_path / "policy.toml")


def test_a_policy_reads_back_and_is_strict_by_default(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text('recipes = ["fed-cdp"]\nmaximum_epsilon = 8\nunit = "client"\n')
    assert read_policy(tmp_path / "p.toml") == Policy(("fed-cdp",), maximum_epsilon=8, unit="client")
    assert (
        Policy(()).secure_noise and Policy(()).changes == ("sigma", "clip.bound") and Policy(()).models == ()
    )
    with pytest.raises(UserError, match="No such file"):
        read_policy(tmp_path / "none.toml")


def test_a_node_without_ledger_folder_or_policy_does_not_train() -> None:
    whole = {"home": "h", "contract": "p", "partition-id": 1}
    assert owner_of(whole).client == 1
    for key in whole:
        with pytest.raises(UserError, match=f"'{key}' is missing"):
            owner_of({k: v for k, v in whole.items() if k != key})
    with pytest.raises(UserError, match="Did you mean 'policy'"):
        owner_of({**whole, "polcy": "x"})
    with pytest.raises(UserError, match="not both"):
        owner_of({**whole, "policy": "x"})
    with pytest.raises(UserError, match="pinned"):
        contract_of(owner_of(whole))
    with pytest.raises(UserError, match="no number of a client"):
        owner_of({**whole, "partition-id": "1"})


def test_node_config_reads_as_flower_reads_it() -> None:
    from flwr.common.config import parse_config_args

    text = 'home="/var/lib/a b" partition-id=3 policy="/p.toml"'
    assert parse_node_config(text) == parse_config_args([text])
    with pytest.raises(UserError, match="key=value"):
        parse_node_config("home")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fed-cdp", ["clients=4", "sigma=2.5", "clip.bound=1"]),
        ("udp-fl", ["client_epsilons=[1.0, 2.0]", 'client_mechanisms=["gaussian"]', "clients=4"]),
        ("ldp-fl", ["channel=none", "dataset=digits", "model_options.hidden=8"]),
    ],
)
def test_a_projects_configuration_reads_back_equal(tmp_path: Path, name: str, changes: list[str]) -> None:
    config = load_config(name, changes)
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert load_config(str(tmp_path / "run.toml")) == config
    assert "secure_noise" not in to_toml(config)


def test_init_writes_a_project_that_flower_accepts(tmp_path: Path) -> None:
    from flwr.common.config import validate_config

    from fedveil.flower.owner import tomllib

    found = CliRunner().invoke(
        build(), ["flower", "init", str(tmp_path / "p"), "fed-cdp", "--set", "clients=4", "--json"]
    )
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)["clients"] == 4
    values = tomllib.loads((tmp_path / "p/pyproject.toml").read_text())
    good, errors, _ = validate_config(values, check_module=True, project_dir=tmp_path / "p")
    assert good, errors
    # The package carries only the thin apps and the configuration.
    package = tmp_path / "p/fedveil_run"
    assert sorted(item.name for item in package.iterdir()) == [
        "__init__.py",
        "client_app.py",
        "run.toml",
        "server_app.py",
    ]
    assert "root" not in (package / "client_app.py").read_text() + (package / "server_app.py").read_text()


@pytest.mark.parametrize(("name", "said"), [("sum-cdp", "sees each upload"), ("ldp-fl", "needs a shuffler")])
def test_init_refuses_what_flower_cannot_keep(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        write_project(tmp_path / "p", make_config({"recipe": name}), {"out": "x"})
    assert not (tmp_path / "p").exists()


def test_secret_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    make = [
        "flower",
        "keys",
        str(tmp_path / "k"),
        "--name",
        "fl.example.org",
        "--name",
        "10.0.0.5",
        "--nodes",
        "1",
    ]
    assert CliRunner().invoke(build(), make).exit_code == 0
    for name in ("ca.key", "server.key", "node-0"):
        assert stat.S_IMODE((tmp_path / "k" / name).stat().st_mode) == 0o600
    assert (tmp_path / "k/node-0.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
    again = CliRunner().invoke(build(), make)
    assert isinstance(again.exception, UserError) and "never overwritten" in str(again.exception)

    from cryptography import x509

    server = x509.load_pem_x509_certificate((tmp_path / "k/server.crt").read_bytes())
    authority = x509.load_pem_x509_certificate((tmp_path / "k/ca.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org"]


def test_a_process_is_only_stopped_if_it_still_is_that_process() -> None:
    started = stack.start(
        [sys.executable, "-c", "import time; time.sleep(60)"], Path(os.devnull), dict(os.environ)
    )
    assert stack.alive(started)
    stack.stop([stack.Started(started.pid, "another start time")])
    assert stack.alive(started)
    stack.stop([started])
    assert not stack.alive(started)


def test_stopping_wakes_a_frozen_process_and_takes_its_children() -> None:
    wait = "import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{wait}']); {wait}"
    started = stack.start([sys.executable, "-c", code], Path(os.devnull), dict(os.environ))
    os.kill(started.pid, 19)
    stack.stop([started])
    assert not stack.alive(started)
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.killpg(started.pid, 0)
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("gone", "begun"),
    [
        (["trainer-1"], ["trainer-1"]),
        (["node-0"], ["node-0"]),
        (["superexec"], ["superexec"]),
        (["superlink"], ["superlink"]),
        (["superlink", "superexec", "node-1"], ["superlink", "superexec", "node-1"]),
    ],
)
def test_what_was_lost_is_started_again_and_nothing_else_is_touched(
    gone: list[str], begun: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that was killed does not cost its SuperNode's session, nor a SuperExec the SuperLink."""
    names = ("superlink", "superexec", "trainer-0", "node-0", "trainer-1", "node-1")
    pids = {name: 100 + number for number, name in enumerate(names)}
    facts = {"port": 1, "insecure": True, "nodes": 2, "processes": {n: [p, "then"] for n, p in pids.items()}}
    (tmp_path / "stack.json").write_text(json.dumps(facts))
    dead = {pids[name] for name in gone}
    started: list[int] = []

    def start(*_: Any) -> stack.Started:
        started.append(200 + len(started))
        return stack.Started(started[-1], "now")

    monkeypatch.setattr(stack, "alive", lambda process: process.pid not in dead)
    monkeypatch.setattr(stack, "start", start)
    monkeypatch.setattr(stack, "wait_port", lambda *_: None)
    monkeypatch.setattr(stack, "stop", lambda *_: pytest.fail("something was stopped"))
    after = stack.revive(tmp_path, stack.lost(stack.read(tmp_path)))
    assert sorted(n for n, p in after.processes.items() if p.began == "now") == sorted(begun)
    assert len(started) == len(begun)


def test_what_down_stops_is_not_started_again_by_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` sees processes end while `down` is still stopping others."""
    from fedveil.cli import flower

    sleeper = stack.start([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", os.environ)
    facts = {"port": 1, "insecure": True, "nodes": 1, "processes": {"node-0": [sleeper.pid, sleeper.began]}}
    (tmp_path / "stack.json").write_text(json.dumps(facts))
    monkeypatch.setattr(stack, "revive", lambda *_, **__: pytest.fail("it was started again"))
    monkeypatch.setattr("signal.signal", lambda *_: None)  # only a program's first thread may set one
    stop, begun = stack.stop, threading.Event()

    def slowly(processes: Any, *more: Any) -> None:
        stop(processes, *more)
        begun.set()
        time.sleep(1.5)

    monkeypatch.setattr(stack, "stop", slowly)
    watching = threading.Thread(target=lambda: flower._watch(tmp_path, {}, True, announce=lambda: None, quiet=True))
    watching.start()
    assert stack.down(tmp_path) == 1
    watching.join(10)
    assert not watching.is_alive() and begun.is_set() and not (tmp_path / stack.STOPPING).exists()


def test_down_without_up_says_so(tmp_path: Path) -> None:
    found = CliRunner().invoke(build(), ["flower", "down", "--home", str(tmp_path)])
    assert isinstance(found.exception, UserError) and "no federation was started" in str(found.exception)


# --- the trainer ---


def seeded(config: Any, client: int) -> int:
    return int(config.seed)


def node_config(folder: Path, client: int) -> dict[str, Any]:
    (folder / "policy.toml").write_text(
        'recipes = ["fed-cdp"]\nsecure_noise = false\nmaximum_epsilon = 1e6\n'
    )
    return {"home": str(folder / f"n{client}"), "policy": str(folder / "policy.toml"), "partition-id": client}


def test_a_trainer_gives_the_same_model_and_keeps_the_ledger(tmp_path: Path) -> None:
    config = make_config({"recipe": "fed-cdp", "clients": 2, "rounds": 2, "local_steps": 3, "delta": 1e-4})
    options = {"join": 1.0, "deadline": 30.0, "poll": 0.01}
    nodes = {c: node_config(tmp_path, c) for c in range(2)}
    serve(
        LocalGrid(client_app(seeded), nodes), config, Options(out=str(tmp_path / "plain"), **options), root=0
    )
    with_trainer = {}
    for c in range(2):
        home = {**nodes[c], "home": str(tmp_path / f"t{c}")}
        with_trainer[c] = {**home, "trainer": str(tmp_path / f"{c}.sock")}
        arguments = (with_trainer[c]["trainer"], owner_of(home))
        threading.Thread(
            target=trainer.serve, args=arguments, kwargs={"root_of": seeded, "requests": 3}, daemon=True
        ).start()
    while not all((tmp_path / f"{c}.sock").exists() for c in range(2)):
        time.sleep(0.01)
    assert stat.S_IMODE((tmp_path / "0.sock").stat().st_mode) == 0o660
    serve(
        LocalGrid(client_app(), with_trainer), config, Options(out=str(tmp_path / "kept"), **options), root=0
    )
    one, two = (open_run(tmp_path / name).state().weights for name in ("plain", "kept"))
    assert np.array_equal(one, two)
    assert (tmp_path / "t0/ledger.jsonl").exists()


def test_a_missing_trainer_is_a_failed_reply(tmp_path: Path) -> None:
    facts, arrays = trainer.ask(str(tmp_path / "none.sock"), "hello", {}, {}, patience=0.1)
    assert facts["status"] == "refused" and not arrays


def test_nonsense_does_not_end_the_trainer(tmp_path: Path) -> None:
    import socket

    path = str(tmp_path / "t.sock")
    owner = owner_of(node_config(tmp_path, 0))
    worker = threading.Thread(target=trainer.serve, args=(path, owner), kwargs={"requests": 4}, daemon=True)
    worker.start()
    while not os.path.exists(path):
        time.sleep(0.01)
    for data in (b"", b"\x01", (8).to_bytes(8, "little") + b"nonsense"):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(path)
            line.sendall(data)
    facts, _ = trainer.ask(path, "hello", {"config": {"recipe": "no-such"}}, {})
    assert facts["status"] == "refused" and "no-such" in facts["reason"]


def test_facts_and_arrays_survive_packing() -> None:
    arrays = {"a": np.arange(5, dtype=np.float32), "b": np.array([1, 2], np.uint8)}
    facts, back = wire.unpack(wire.pack({"x": [1, "ü"], "y": None}, arrays))
    assert facts == {"x": [1, "ü"], "y": None}
    assert all(np.array_equal(back[k], v) and back[k].dtype == v.dtype for k, v in arrays.items())


def test_a_thin_client_imports_neither_torch_nor_sklearn() -> None:
    code = (
        "import sys; import fedveil.flower as f; f.client_app(); import fedveil.flower.trainer, "
        "fedveil.flower.owner; print([m for m in ('torch', 'sklearn', 'scipy', 'pydantic') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["FEDVEIL_SEED", "FEDVEIL_DETERMINISTIC", "PYTHONHASHSEED"])
def test_no_environment_variable_makes_noise_repeatable(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "0")
    config = make_config(
        {"recipe": "fed-cdp", "clients": 1, "rounds": 1, "local_steps": 1, "seed": 0, "secure_noise": False}
    )
    found = []
    for trial in ("a", "b"):
        (tmp_path / trial).mkdir()
        nodes = {1: node_config(tmp_path / trial, 0)}
        options = Options(out=str(tmp_path / trial / "run"), join=1.0, deadline=30.0, poll=0.01)
        serve(LocalGrid(client_app(), nodes), config, options)
        found.append(open_run(tmp_path / trial / "run").state().weights)
    assert not np.array_equal(*found)


def _ended(details: str, log: str) -> Any:
    """Flower's command line for a run that failed with these details, and this log."""
    listed = json.dumps({"success": True, "runs": [{"status": "finished:failed", "status-details": details}]})

    def flwr(_: Any, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, listed if words[0] == "ls" else log, "")

    return flwr


@pytest.mark.parametrize(
    ("state", "code"), [("finished:completed", 0), ("finished:failed", 1), ("finished:stopped", 1)]
)
def test_run_ends_with_the_runs_true_status(
    tmp_path: Path, state: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_project(tmp_path / "p", make_config({"recipe": "fed-cdp"}), {"out": str(tmp_path / "out")})
    states = iter(["pending", "unknown", "running", state])
    monkeypatch.setattr(stack, "submit", lambda *_: 7)
    monkeypatch.setattr(stack, "status", lambda *_: next(states))
    details = f"{stack.RAISED}the reason" if state == "finished:failed" else "N/A"
    log = "Traceback (most recent call last):\n  File x, line 1\n    f()\n\nUserError: the reason\n"
    monkeypatch.setattr(stack, "flwr", _ended(details, log))
    command = ["flower", "run", str(tmp_path / "p"), "--superlink", "there", "--poll", "0.01"]
    found = CliRunner().invoke(build(), command)
    assert found.exit_code == code
    assert ("the reason" in found.output) == (state == "finished:failed" or code == 1)
    assert "Traceback" not in found.output


def test_from_another_host_rounds_are_shown_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_project(tmp_path / "p", make_config({"recipe": "fed-cdp"}), {"out": "/nowhere/on/this/host"})
    states, logs = iter(["running", "running", "finished:completed"]), ["", "round 1/2: a\n", "round 1/2: a\nround 2/2: b\n"]
    asked: list[str] = []

    def flwr(_: Any, *words: str) -> subprocess.CompletedProcess[str]:
        asked.append(words[0])
        return subprocess.CompletedProcess([], 0, logs[min(len(asked), 3) - 1], "")

    monkeypatch.setattr(stack, "submit", lambda *_: 7)
    monkeypatch.setattr(stack, "status", lambda *_: next(states))
    monkeypatch.setattr(stack, "flwr", flwr)
    found = CliRunner().invoke(build(), ["flower", "run", str(tmp_path / "p"), "--superlink", "there", "--poll", "0.01"])
    assert found.exit_code == 0 and found.output.count("round 1/2") == found.output.count("round 2/2") == 1


def test_flower_is_asked_only_where_the_runs_own_files_say_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question is a process of Flower's: none while rounds are written, fewer and fewer in silence, one at the end."""
    from fedveil.cli import flower

    now, asked = 0.0, []
    monkeypatch.setattr(flower.time, "monotonic", lambda: now)
    monkeypatch.setattr(stack, "status", lambda *_: asked.append(now) or "running")
    course = flower._Course({}, tmp_path, "there", tmp_path, 9, None, quiet=True, number=1)
    for second in range(100):  # a round every eight seconds
        now = float(second)
        if second % 8 == 0:
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write('{"round": 1}\n')
        course.look(10.0)
    assert asked == []
    for second in range(100, 400):
        now = float(second)
        course.look(10.0)
    assert 8 <= len(asked) <= 13 and max(b - a for a, b in pairwise(asked)) <= 30
    (tmp_path / "result.json").write_text("{}")
    now = 402.0
    course.look(10.0)
    assert asked[-1] == 402.0


def test_a_killed_server_process_is_continued_and_a_run_under_way_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the ServerApp, then of the command itself: exit code 0 in the end, no second run beside the first."""
    write_project(tmp_path / "p", make_config({"recipe": "fed-cdp"}), {"out": str(tmp_path / "out")})
    states = {7: iter(["running", "finished:failed"]), 8: iter(["running", "running", "finished:completed"])}
    submitted: list[int] = []

    def submit(*_: Any) -> int:
        submitted.append(7 + len(submitted))
        return submitted[-1]

    last = dict.fromkeys((7, 8), "pending")

    def status(_: Any, number: int, __: Any) -> str:
        last[number] = next(states[number], last[number])
        return last[number]

    monkeypatch.setattr(stack, "submit", submit)
    monkeypatch.setattr(stack, "status", status)
    monkeypatch.setattr(stack, "flwr", lambda *_: subprocess.CompletedProcess([], 0, "round 1\n", ""))
    command = ["flower", "run", str(tmp_path / "p"), "--superlink", "there", "--poll", "0.01"]
    found = CliRunner().invoke(build(), command)
    assert found.exit_code == 0 and submitted == [7, 8] and "killed?" in found.output
    (tmp_path / "p/.run").write_text("8")
    states[8] = iter(["running", "finished:completed"])
    assert CliRunner().invoke(build(), command).exit_code == 0
    assert submitted == [7, 8]


@pytest.mark.parametrize(
    ("details", "again"),
    [
        ("No heartbeat received from the task", True),
        ("ServerApp failed with exception: lost the SuperLink: ConnectError: refused", True),
        ("N/A", True),
        ("ServerApp failed with exception: fewer than 2 nodes for 3 rounds in a row", False),
    ],
)
def test_only_the_end_that_flower_kept_says_whether_a_run_stopped_itself_and_no_word_in_its_log(
    details: str, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log holds errors that were survived ("ConnectError, trying again") and words that a node chose."""
    write_project(tmp_path / "p", make_config({"recipe": "fed-cdp"}), {"out": str(tmp_path / "out")})
    submitted: list[int] = []

    def submit(*_: Any) -> int:
        submitted.append(7 + len(submitted))
        return submitted[-1]

    log = "WARNING: ConnectError, trying again\nclient 0 refused: fedveil stopped: by a node\nthe last line\n"
    monkeypatch.setattr(stack, "submit", submit)
    monkeypatch.setattr(stack, "flwr", _ended(details, log))
    found = CliRunner().invoke(build(), ["flower", "run", str(tmp_path / "p"), "--superlink", "there", "--poll", "0.01"])
    assert found.exit_code == 1 and len(submitted) == (3 if again else 1)
    assert ("the last line" in found.output) is again
    assert ("fewer than 2 nodes" in found.output) is not again


def test_an_error_of_the_line_to_the_superlink_is_told_from_one_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    httpx = pytest.importorskip("httpx")
    app = server_app("fed-cdp")
    for wrong, kept in [
        (httpx.ConnectError("refused"), ConnectionError),
        (ConnectionResetError("gone"), ConnectionError),
        (UserError("too few nodes"), UserError),
        (ZeroDivisionError("a mistake"), ZeroDivisionError),
    ]:

        def serve(*_: Any, wrong: Exception = wrong, **__: Any) -> None:
            raise wrong

        monkeypatch.setattr("fedveil.flower.server.serve", serve)
        monkeypatch.setattr("fedveil.flower.server.options_of", lambda _: None)
        with pytest.raises(kept) as raised:
            app(None, SimpleNamespace(run_config={}))
        assert str(raised.value).startswith(LOST_LINK) is (kept is ConnectionError)


def test_a_run_that_flower_does_not_accept_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = subprocess.CompletedProcess([], 0, '{"success": false, "error-message": "no such app"}', "")
    monkeypatch.setattr(stack, "flwr", lambda *_: said)
    with pytest.raises(UserError, match="no such app"):
        stack.submit({}, tmp_path, "there")


def test_settings_of_a_node_that_are_nested_too_deep_are_refused() -> None:
    with pytest.raises(UserError, match="--node-config"):
        parse_node_config("a=" + "[" * 100_000)
