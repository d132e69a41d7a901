"""Fuzz every byte that comes from outside: configurations, command lines, ledgers, run folders, data files, the dashboard,
and what reaches a federation (fuzz_flower.py): papers, requests, replies, sockets.

    python tests/tools/fuzz.py --count 100000 --state fuzz.json

Each input has a number, and the number decides it: a run that was interrupted goes on where it was, and a failure
is repeated with --only NUMBER. What may happen: the input is accepted, or refused with `UserError` (exit code 2).
Anything else is a failure: another exception, a traceback, more than the time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

SECONDS = 20  # of processor time for one input
ODD_TEXT = ["", "x", "nan", "inf", "-inf", "1e400", "-1", "0", "1e300", "1e-300", "9" * 5000, "true", "[]", "{}",
            '"', "'", "\0", "\ud7ff", "../..", "a=b=c", "linear:15:4", "linear:::", "constant:inf", "[" * 3000,
            "18446744073709551616", "0x10", "1_000", "0.1.2", "None", "fed-cdp", "mnist", "trap:spring", "\n", "%s"]  # fmt: skip
ODD_VALUE: list[Any] = [None, True, False, -1, 0, 1, 2**63, 10**30, 1e308, -1e308, 1e-320, 0.5, "", "x", "9" * 400,
                        [], [[]], {}, {"a": {"b": []}}, "linear:15:4.85", [1, "a"], -0.0]  # fmt: skip
ODD_BYTES = [b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"[", b"{", b'"', b"9" * 5000, b"1e999", b"NaN", b"=",
             b"[" * 5000, b"# \r", b"\x1a", b"'''", b"-"]  # fmt: skip


class TooSlow(Exception):
    """The input took more than its share of time."""


@functools.lru_cache
def ledger_bodies() -> str:
    """A small ledger that has everything, as JSON."""
    from fedveil.privacy.events import Claim, Event, Noise, Release, Sampling
    from fedveil.privacy.ledger import Budget, Header, Ledger, journal

    def sound(noise: Noise, rate: float, observer: str = "server") -> Claim:
        sampling = Sampling("poisson", rate) if rate < 1 else Sampling()
        return Claim(observer, "example", "sound", "", Event(noise, sampling, steps=3))  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "ledger.jsonl"
        header = Header(1e-3, 4, sizes=(9, 9, 9, 9), copies=2, holders=((0, 1),), budgets=(Budget(50.0),),
                        planned_rounds=3)  # fmt: skip
        with Ledger.create(path, header) as ledger:
            ledger.spend(Release(1, (((0, 1), (sound(Noise("gaussian", 6.0), 0.02),)),)), fingerprint="a")
            ledger.spend(Release(2, (((2,), (sound(Noise("laplace", 3.0, "l1"), 1.0, "public"),)),)), fingerprint="b")
            ledger.spend(Release(3, (((3,), (Claim("server", "client", "none", "no noise"),)),)), fingerprint="c")
        return json.dumps([record.body for record in journal.read(path).records])


def chained(bodies: list[Any]) -> bytes:
    """A ledger file with these bodies and a right chain, whatever they are."""
    import hashlib

    from fedveil.privacy.ledger.journal import GENESIS

    previous, lines = GENESIS, []
    for body in bodies:
        payload = json.dumps(body, separators=(",", ":")).encode()
        previous = hashlib.sha256(previous.encode() + payload).hexdigest()
        lines.append(b'{"hash":"' + previous.encode() + b'","record":' + payload + b"}\n")
    return b"".join(lines)


def spoil(value: Any, rng: random.Random) -> Any:
    """One place of a JSON value exchanged, removed or doubled."""
    spots: list[tuple[Any, Any]] = []

    def walk(inner: Any) -> None:
        for key, item in list(inner.items()) if isinstance(inner, dict) else list(enumerate(inner)):
            spots.append((inner, key))
            if isinstance(item, dict | list):
                walk(item)

    walk(value)
    where, key = rng.choice(spots)
    how = rng.random()
    if how < 0.8:
        where[key] = deepcopy(rng.choice(ODD_VALUE))  # a later change in it must not change the list
    elif how < 0.9:
        del where[key]
    elif isinstance(where, list):
        where.append(deepcopy(where[key]))
    else:
        where[rng.choice(ODD_TEXT)[:50]] = deepcopy(where[key])
    return value


def spoil_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut out, doubled, or foreign ones put in."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice([1, 1, 4, 40]))
        change = rng.random()
        if change < 0.35:
            data = data[:at] + rng.choice(ODD_BYTES) + data[end:]
        elif change < 0.6:
            data = data[:at] + bytes(rng.randrange(256) for _ in range(end - at)) + data[end:]
        elif change < 0.8:
            data = data[:at] + data[end:]
        else:
            data = data[:end] + data[at:end] + data[end:]
    return data


# --- what is fuzzed: each takes a generator of randomness and an empty folder ---------------------------------------


def configuration(rng: random.Random, place: Path) -> None:
    """A .toml file: bytes spoilt, or values exchanged."""
    from fedveil.federation.config import RunConfig, load_config, shipped
    from fedveil.protect.recipe import KEYS

    path = place / "study.toml"
    if rng.random() < 0.4:
        path.write_bytes(spoil_bytes(rng.choice(list(shipped().values())).encode(), rng))
    else:
        keys = [*RunConfig.model_fields, *KEYS, "clip.bound", "clip.kind", "protect.sigma"]
        lines = {"recipe": '"fed-cdp-sound"'}
        for key in rng.sample(keys, rng.randint(1, 4)):
            odd = rng.choice(ODD_TEXT[:-4]) if rng.random() < 0.5 else json.dumps(rng.choice(ODD_VALUE[1:]))
            lines[f'"{key}"' if "." in key and rng.random() < 0.5 else key] = odd
        path.write_text("\n".join(f"{key} = {value}" for key, value in lines.items()), "utf-8", errors="replace")
    load_config(str(path))


def change(rng: random.Random, place: Path) -> None:
    """--set key=value on the command line."""
    from fedveil.federation.config import RunConfig, load_config
    from fedveil.protect.recipe import KEYS

    keys = [*RunConfig.model_fields, *KEYS, "clip.bound", "protect", "clip", "model_options.x"]
    pairs = [f"{rng.choice(keys)}={rng.choice(ODD_TEXT)}" for _ in range(rng.randint(1, 3))]
    load_config(rng.choice(["fed-cdp", "fed-sdp", "ldp-fl", "udp-fl", "adaclip", "sum-cdp"]), pairs)


OPTIONS = {
    "epsilon": ["--noise-multiplier", "--sampling-rate", "--steps", "--delta", "--schedule", "--mechanism", "--batch",
                "--population", "--accountant", "--dimension", "--nu", "--layers", "--relation", "--clip-norm"],
    "calibrate": ["--epsilon", "--delta", "--steps", "--sampling-rate", "--mechanism", "--accountant", "--dimension"],
    "ledger": ["--delta", "--accountant", "--verify", "--json"],
    "recipes": ["--json"],
    "plan": ["--set", "--epsilon", "--json"],
    "data check": ["--target", "--json"],
    "flower contract": ["--diff", "--check", "--epsilon", "--range", "--target", "--public", "--config", "--examples"],
    "flower status": ["--home", "--json"],
    "flower metrics": ["--run", "--node-config", "--listen"],
    "flower anchor": ["--node-config"],
    "flower remove": ["--roster", "--identity"],
    "report": ["--json"],
    "share": ["--out"],
}  # fmt: skip
WITH_A_FILE = ("ledger", "data check", "flower contract", "flower remove", "report", "share")
FAIR = {"--noise-multiplier": "2", "--sampling-rate": "0.01", "--steps": "100", "--delta": "1e-5", "--epsilon": "2",
        "--batch": "5", "--population": "500", "--accountant": "pld", "--mechanism": "gaussian"}  # fmt: skip


def command_line(rng: random.Random, place: Path) -> None:
    """Words after `fedveil`."""
    command = rng.choice(list(OPTIONS))
    file = place / "file"
    file.write_bytes(spoil_bytes(rng.choice([b"a,b\n1,2\n", b"{}", b"x = 1\n"]), rng))
    words = command.split()
    if command in WITH_A_FILE:
        words.append(str(place / rng.choice(["absent", ".", "x" * 300, "file"])))
    for option in rng.sample(OPTIONS[command], min(rng.randint(1, 4), len(OPTIONS[command]))):
        words += [option, rng.choice([*ODD_TEXT, str(file)]) if rng.random() < 0.6 else FAIR.get(option, "1")]
    run_words([word.replace("\0", "") for word in words])


@functools.lru_cache
def commands() -> Any:
    """All commands, built once: that takes longer than most of them."""
    import typer

    from fedveil.cli import build

    return typer.main.get_command(build())


@contextlib.contextmanager
def built_once() -> Iterator[None]:
    """`fedveil.cli.main` with the commands that are built already."""
    from unittest import mock

    whole = commands()
    with mock.patch("fedveil.cli.build", lambda: None), mock.patch("typer.main.get_command", lambda _: whole):
        yield


def run_words(words: list[str]) -> None:
    """The command line inside this process; wrong words end with exit code 2."""
    from fedveil.cli import main as entry

    before, sys.argv = sys.argv, ["fedveil", *words]
    with built_once(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            entry()
        except SystemExit as end:
            assert end.code in (0, 1, 2, None), f"exit code {end.code}"
        finally:
            sys.argv = before


def ledger(rng: random.Random, place: Path) -> None:
    """A ledger with a right chain and odd contents, or with spoilt bytes."""
    from fedveil.privacy.ledger import Ledger

    path = place / "ledger.jsonl"
    bodies = json.loads(ledger_bodies())
    if rng.random() < 0.7:
        for _ in range(rng.randint(1, 2)):
            bodies = spoil(bodies, rng)
        path.write_bytes(chained(bodies))
    else:
        path.write_bytes(spoil_bytes(chained(bodies), rng))
    Ledger.read(path).table()
    Ledger.open(path).close()


@functools.lru_cache
def finished_run() -> dict[str, bytes]:
    """The files of a small run."""
    from fedveil.federation.config import load_config
    from fedveil.federation.loop import run

    changes = ["dataset=cancer", "clients=3", "rounds=2", "local_steps=2", "report=false", "checkpoint_every=1"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        run(load_config("fed-cdp-sound", changes), folder)
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def run_folder(rng: random.Random, place: Path) -> None:
    """A run's folder with one damaged file, as the command line, the dashboard and a resume read it."""
    from fedveil.errors import UserError
    from fedveil.federation import folder as folders
    from fedveil.federation import store
    from fedveil.report.facts import gather
    from fedveil.ui import folder as dashboard

    files = dict(finished_run())
    name = rng.choice([n for n in files if n != ".lock"])
    if name.endswith(".json") and rng.random() < 0.6:
        files[name] = json.dumps(spoil(json.loads(files[name]), rng)).encode()
    elif rng.random() < 0.1:
        del files[name]
    else:
        files[name] = spoil_bytes(files[name], rng)
    for path, data in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(data)
    list_of = dashboard.summary(place, place.parent)
    json.dumps(list_of, allow_nan=False)
    works = [lambda: folders.verify(place), lambda: store.open_run(place).state(), lambda: folders.check(place)]
    if rng.random() < 0.1:
        works.append(lambda: gather(place, False, compute=False))
    for work in works:
        with contextlib.suppress(UserError):
            work()


@functools.lru_cache
def tables() -> tuple[bytes, bytes]:
    """A small .csv and .npz file."""
    import numpy as np

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)), rng.integers(0, 2, 30)
    text = "a,b,c,y\n" + "".join(f"{r[0]:.3f},{r[1]:.3f},{r[2]:.2f},{int(t)}\n" for r, t in zip(x, y, strict=True))
    held = io.BytesIO()
    np.savez(held, x=x.astype(np.float32), y=y)
    return text.encode(), held.getvalue()


def data_file(rng: random.Random, place: Path) -> None:
    """A .csv or .npz file of a user."""
    import warnings

    from fedveil.data.datasets import load

    which = rng.randrange(2)
    path = place / ("table.csv", "table.npz")[which]
    path.write_bytes(spoil_bytes(tables()[which], rng))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(str(path), target="y" if which == 0 and rng.random() < 0.9 else None)


@functools.lru_cache
def pages() -> Any:
    """The dashboard of a folder that holds one run, behind a token."""
    import atexit
    import shutil

    from fastapi.testclient import TestClient

    from fedveil.ui.server import create_app

    place = Path(tempfile.mkdtemp(prefix="pages"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    for path, data in finished_run().items():
        (place / "run" / path).parent.mkdir(parents=True, exist_ok=True)
        (place / "run" / path).write_bytes(data)
    return TestClient(create_app(place, "127.0.0.1", "secret"), base_url="http://127.0.0.1:8765", follow_redirects=False)


def page(rng: random.Random, place: Path) -> None:
    """A request to the dashboard: any path, any words, any body; never an error of the server."""
    from urllib.parse import quote

    paths = ["/", "/login", "/api/runs", "/api/runs/run", "/api/runs/run/metrics", "/api/compare", "/files/run/run.json"]
    path = rng.choice(paths)
    if rng.random() < 0.5:
        path += quote(rng.choice(ODD_TEXT)[:2000])
    query = {rng.choice(["token", "run", "runs", "round", "x"]): rng.choice(ODD_TEXT)[:2000]}
    headers = {"authorization": "Bearer secret"} if rng.random() < 0.7 else {}
    body = spoil_bytes(b"token=secret", rng) if rng.random() < 0.5 else b""
    found = pages().request(rng.choice(["GET", "GET", "POST", "PUT"]), path, params=query, headers=headers, content=body)
    assert found.status_code < 500, f"{path[:100]}: {found.status_code}"


HERE = (configuration, change, command_line, ledger, data_file)  # twice as many as the others
FEDERATION = ("contract", "policy", "papers", "request", "request", "reply", "packed", "sum_message", "trainer_bytes",
              "shuffler_bytes")  # fmt: skip


@functools.lru_cache
def targets() -> tuple[Any, ...]:
    """What input `number` fuzzes: targets()[number % len(targets())]."""
    here = (*HERE, run_folder, page, *HERE)
    if importlib.util.find_spec("flwr") is None:
        return here
    sys.path.insert(0, str(Path(__file__).parent))
    import fuzz_flower

    return (*here, *(getattr(fuzz_flower, name) for name in FEDERATION))


def one(number: int, seconds: int = SECONDS) -> tuple[str, str]:
    """Try input `number`: (what was fuzzed, "accepted" | "refused" | what went wrong)."""
    from fedveil.errors import UserError

    rng = random.Random(number)
    target = targets()[number % len(targets())]

    def late(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        with tempfile.TemporaryDirectory(prefix="fuzz") as place, contextlib.redirect_stderr(io.StringIO()):
            target(rng, Path(place))
        return target.__name__, "accepted"
    except UserError as wrong:
        assert str(wrong).strip() and len(str(wrong)) < 20_000, "an error without a bearable message"
        return target.__name__, "refused"
    except TooSlow:
        return target.__name__, f"took more than {seconds} s"
    except BaseException as wrong:
        if isinstance(wrong, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(wrong.__traceback__)[-1]
        return target.__name__, f"{type(wrong).__name__}: {str(wrong)[:300]} ({Path(where.filename).name}:{where.lineno})"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def main() -> int:
    """Fuzz on from where the state file ends; exit code 1 if anything went wrong."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--count", type=int, default=1000)
    parse.add_argument("--state", type=Path)
    parse.add_argument("--first", type=int, default=0, help="number of the first input, where several share the work")
    parse.add_argument("--only", type=int, help="repeat one input, with its traceback")
    given = parse.parse_args()
    if given.only is not None:
        with tempfile.TemporaryDirectory() as place:
            targets()[given.only % len(targets())](random.Random(given.only), Path(place))
        return 0
    state: dict[str, Any] = {"next": given.first, "counts": {}, "failures": []}
    if given.state and given.state.exists():
        state = json.loads(given.state.read_text())
    counts, failures, begun = Counter(state["counts"]), list(state["failures"]), time.monotonic()
    for number in range(state["next"], given.first + given.count):
        target, outcome = one(number)
        kind = outcome if outcome in ("accepted", "refused") else "failed"
        counts[f"{target} {kind}"] += 1
        if kind == "failed":
            failures.append([number, target, outcome])
            print(number, target, outcome, flush=True)
        if given.state and (number % 200 == 199 or number + 1 == given.first + given.count):
            held = {"next": number + 1, "counts": dict(sorted(counts.items())), "failures": failures}
            temporary = given.state.with_suffix(".tmp")
            temporary.write_text(json.dumps(held, indent=1))
            os.replace(temporary, given.state)
    print(json.dumps({"inputs": given.count, "failures": len(failures), "seconds": round(time.monotonic() - begun),
                      "counts": dict(sorted(counts.items()))}, indent=1))  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
