"""Kill simulated runs at random moments with signal 9, do the documented thing (--resume), and compare.

    python tests/tools/kills.py --count 1000 --state kills.json       # so many kills

Each run of the game has a number, and the number decides it: recipe, checkpoints, how often and when it is killed.
Interrupted, the game goes on where it was. After every run: exit code 0, the model of the run that was never killed
bit by bit, no row of the ledger below that run's, `verify` content, no traceback. Sometimes a second --resume is
started beside a living run: it must be turned away and change nothing. Only kills that met a living process count;
what a process left on disk is all that the next one has, although both are forks of this one (loading takes longer
than the run).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a fork of a process whose libraries have threads may wait for them for ever

import fuzz

RECIPES = ("fed-cdp", "fed-cdp-sound", "fed-sdp", "adaclip", "quantile-clip", "fed-alpha-cdp-sound")
SMALL = ("dataset=cancer", "clients=2", "rounds=4", "local_steps=2", "batch_size=4", "report=false")


def words(recipe: str, every: int, folder: Path, resume: bool) -> list[str]:
    """The command line of one run."""
    changes = [part for change in (*SMALL, f"checkpoint_every={every}") for part in ("--set", change)]
    return ["run", recipe, *changes, "--out", str(folder), "--json", *(["--resume"] if resume else [])]


def start(command: list[str], log: Path) -> int:
    """The command in a process of its own (a fork that has everything loaded); what it says goes to `log`."""
    child = os.fork()
    if child:
        return child
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    code = 70
    try:
        sys.argv = ["fedveil", *command]
        from fedveil.cli import main as entry

        with fuzz.built_once():
            entry()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def finish(command: list[str], log: Path) -> int:
    """Run to the end; the exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(start(command, log), 0)[1])


def outcome(folder: Path) -> tuple[str, list[Any]]:
    """A digest of the model, and the ledger's rows."""
    rows = json.loads((folder / "result.json").read_text())["ledger"]
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(), rows


def play(number: int, place: Path, references: dict[str, Any]) -> tuple[int, str]:
    """One run, killed up to five times and resumed to its end: (kills that met it alive, "" or what went wrong)."""
    rng = random.Random(number)
    recipe, every = rng.choice(RECIPES), rng.choice([1, 2, 5])
    if recipe not in references:
        clock = time.monotonic()
        code = finish(words(recipe, 5, place / f"reference-{recipe}", False), place / "log")
        if code:
            return 0, f"the reference ended with {code}: {(place / 'log').read_text()[-300:]}"
        references[recipe] = (*outcome(place / f"reference-{recipe}"), time.monotonic() - clock)
    model, rows, seconds = references[recipe]
    folder, log, kills = place / f"run-{number}", place / "log", 0
    for _ in range(rng.randint(1, 5)):
        child = start(words(recipe, every, folder, folder.exists()), log)
        time.sleep(rng.uniform(0, 0.7 * seconds))
        if rng.random() < 0.1:
            beside = finish(words(recipe, every, folder, folder.exists()), place / "beside")
            said = (place / "beside").read_text()
            if "Traceback" in said or beside not in (0, 2):
                return kills, f"a second writer ended with {beside}: {said[-300:]}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        kills += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        if "Traceback" in log.read_text():
            return kills, f"traceback: {log.read_text()[-300:]}"
    code = finish(words(recipe, every, folder, folder.exists()), log)
    if code or "Traceback" in log.read_text():
        return kills, f"the documented action ended with {code}: {log.read_text()[-300:]}"
    return kills, compare(folder, model, rows)


def compare(folder: Path, model: str, rows: list[Any]) -> str:
    """ "" if the run ended as its reference did, or what is different."""
    from fedveil.federation.folder import verify

    mine, found = outcome(folder)
    if mine != model:
        return "another model"
    for one, reference in zip(found, rows, strict=True):
        if reference["epsilon"] is not None and one["epsilon"] is not None:
            if one["epsilon"] < reference["epsilon"] * (1 - 1e-9):
                return f"the ledger under-counts: {one['epsilon']} instead of {reference['epsilon']}"
        elif one["epsilon"] != reference["epsilon"]:
            return f"{one['verdict']} instead of {reference['verdict']}"
    verify(folder)
    left = [p.name for p in folder.rglob("*.tmp")]
    return f"unfinished files are left: {left}" if left else ""


def load() -> None:
    """Everything that a run loads, once, before any fork."""
    from fedveil.federation.config import load_config
    from fedveil.federation.loop import run

    fuzz.commands()
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stderr(io.StringIO()):
        run(load_config("fed-cdp-sound", ["dataset=cancer", "clients=2", "rounds=1", "local_steps=1"]), Path(place) / "x")


def main() -> int:
    """Go on from where the state file ends; exit code 1 if anything went wrong."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--count", type=int, default=20, help="kills")
    parse.add_argument("--state", type=Path)
    given = parse.parse_args()
    load()
    state: dict[str, Any] = {"next": 0, "counts": {}, "failures": []}
    if given.state and given.state.exists():
        state = json.loads(given.state.read_text())
    counts, failures, number = Counter(state["counts"]), list(state["failures"]), state["next"]
    with tempfile.TemporaryDirectory(prefix="kills") as place:
        references: dict[str, Any] = {}
        while counts["kills"] < given.count:
            try:
                kills, wrong = play(number, Path(place), references)
            except Exception as error:
                kills, wrong = 0, f"{type(error).__name__}: {error}"
            counts["right" if not wrong else "wrong"] += 1
            counts["kills"] += kills
            if wrong:
                failures.append([number, wrong])
                print(number, wrong, flush=True)
            else:
                shutil.rmtree(Path(place) / f"run-{number}")
            number += 1
            if given.state:
                temporary = given.state.with_suffix(".tmp")
                temporary.write_text(json.dumps({"next": number, "counts": dict(counts), "failures": failures}))
                os.replace(temporary, given.state)
    print(json.dumps({"runs": number, **counts, "failures": failures}, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
