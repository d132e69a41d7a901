"""Kill parts of real federations at random moments with signal 9, do what the runbook says, and look at what is left.

    python tests/tools/federation_kills.py --count 100 --state federation.json --minutes 600

A game is one federation of three nodes (TLS, keys, trainers; every third game with a shuffler) under `fedveil flower up`, and
one run followed by `fedveil flower run`. Its number decides which parts are killed, one or two at a time, and when: SuperLink,
SuperExec, ServerApp, SuperNode, trainer, shuffler. docs/runbook.md says what to do afterwards: nothing for what `up` starts
again; the shuffler is started again; a run that failed is run again. After every game: the last `run` ended with 0, every
round is there, no ledger counts less than what was asked or arrived, all ledgers and anchors are intact, and nothing that the
operator was shown holds a traceback. --count counts kills (two at a time are two); interrupted, it goes on with the next game.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NODES, ROUNDS = 3, 16  # a federation takes longer to start than to be killed: many kills in each
PARTS = ("superlink", "superexec", "serverapp", "node", "trainer")
PATIENCE = 420.0  # seconds until a game must have ended after its last kill
RUNS = 6  # how often an operator starts `run` before giving up; each continues a killed ServerApp twice by itself
WEIGHTS = 30 * 4 + 4 + 4 * 2 + 2


@dataclass
class Game:
    """One federation, its processes and what it showed."""

    place: Path
    shuffled: bool
    up: subprocess.Popen[bytes]
    mixer: subprocess.Popen[bytes] | None = None
    run: subprocess.Popen[bytes] | None = None
    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)

    @property
    def project(self) -> Path:
        return self.place / "project"


def fedveil(place: Path, log: str, *words: str) -> subprocess.Popen[bytes]:
    """A command of fedveil, in a session of its own; what it shows goes to `log`."""
    with open(place / log, "ab") as out:
        command = [sys.executable, "-m", *words]
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)


def start_shuffler(place: Path) -> subprocess.Popen[bytes]:
    """The shuffler, with the roster of the federation."""
    return fedveil(place, "shuffler.log", "fedveil.flower.shuffler", "--listen", f"unix:{place / 's'}", "--server-key",
                   str(place / "server.pub"), "--weights", str(WEIGHTS), "--minimum", "2", "--expected", str(NODES),
                   "--deadline", "20", "--roster", str(place / "home/roster.json"))  # fmt: skip


def start_run(game: Game) -> None:
    """`fedveil flower run`: submits, or follows the run that is under way."""
    words = ("fedveil", "flower", "run", str(game.project), "--home", str(game.place / "home"), "--poll", "3")
    game.run, game.runs = fedveil(game.place, "run.log", *words), game.runs + 1


def begin(place: Path, shuffled: bool) -> Game:
    """Lay out and start a federation."""
    from fedveil.federation.config import make_config
    from fedveil.flower import shuffler
    from fedveil.flower.project import write_project

    secret = shuffler.new_private_key()
    (place / "server.key").write_text(secret.hex())
    (place / "server.pub").write_text(shuffler.public_key(secret).hex())
    also = ["--shuffler", f"unix:{place / 's'}"] if shuffled else []
    game = Game(place, shuffled, fedveil(place, "up.log", "fedveil", "flower", "up", "--nodes", str(NODES), "--home",
                                         str(place / "home"), *also))  # fmt: skip
    config = make_config({
        "recipe": "ldp-fl" if shuffled else "fed-cdp", "dataset": "cancer", "clients": NODES, "partition": "iid",
        "rounds": ROUNDS, "local_steps": 1, "batch_size": 4, "model": "papers-mlp", "model_options": {"hidden": [4]},
        "delta": 1e-3,
    })  # fmt: skip
    options: dict[str, Any] = {"out": str(place / "run"), "deadline": 30.0, "join": 240.0}
    if shuffled:
        options |= {"shuffler": f"unix:{place / 's'}", "shuffler_key": str(place / "server.key")}
    write_project(game.project, config, options)
    wait(lambda: "SuperLink on" in (place / "up.log").read_text() or game.up.poll() is not None, 240)
    if game.up.poll() is not None:
        raise AssertionError(f"`fedveil flower up` ended: {(place / 'up.log').read_text()[-500:]}")
    if shuffled:
        game.mixer = start_shuffler(place)
    return game


def wait(found: Any, seconds: float) -> bool:
    """Whether `found` became true in time."""
    until = time.monotonic() + seconds
    while not found():
        if time.monotonic() > until:
            return False
        time.sleep(0.3)
    return True


def rounds_done(game: Game) -> int:
    """Rounds in the run's folder."""
    from fedveil.federation.store import read_lines

    return len(read_lines(game.place / "run/metrics.jsonl"))


def process_of(game: Game, part: str, number: int) -> int | None:
    """The process id of a part, if it runs now."""
    from fedveil.flower import stack

    if part == "shuffler":
        return game.mixer.pid if game.mixer is not None and game.mixer.poll() is None else None
    try:
        known = stack.read(game.place / "home").processes
    except Exception:  # `up` writes the file at this moment
        return None
    name = "superexec" if part == "serverapp" else part if part.startswith("super") else f"{part}-{number}"
    found = known.get(name)
    if found is None or not stack.alive(found):
        return None
    if part != "serverapp":
        return found.pid
    done = subprocess.run(["pgrep", "-P", str(found.pid), "-f", "flwr-serverapp"], capture_output=True, text=True)
    return int(done.stdout.split()[0]) if done.stdout.split() else None


def kill(game: Game, parts: list[str], rng: random.Random) -> None:
    """Signal 9 to these parts at once; the shuffler is started again, as the runbook says."""
    for part in parts:
        pid = process_of(game, part, rng.randrange(NODES))
        if pid is None:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            game.kills[part] += 1
    if "shuffler" in parts and game.mixer is not None:
        game.mixer.wait(20)
        game.mixer = start_shuffler(game.place)


def play(number: int, place: Path) -> tuple[Counter[str], int, str]:
    """One game: (kills by part, how often `run` was started, "" or what went wrong)."""
    rng = random.Random(number)
    game = begin(place, number % 3 == 2)
    try:
        start_run(game)
        if rng.random() < 0.8:
            wait(lambda: rounds_done(game) >= 1 or game.run.poll() is not None, 240)
        for _ in range(rng.randint(6, 9)):
            time.sleep(rng.uniform(0.0, 6.0))
            if game.run.poll() is not None:
                break
            choice = (*PARTS, *["shuffler"] * 2 * game.shuffled)
            kill(game, rng.sample(choice, rng.choice([1, 1, 2])), rng)
            at = rounds_done(game)  # most kills meet another round; some come while all is still being mended
            if rng.random() < 0.7:
                wait(lambda at=at: rounds_done(game) > at or game.run.poll() is not None, 90)
        until = time.monotonic() + PATIENCE
        while True:
            if not wait(lambda: game.run.poll() is not None, until - time.monotonic()):
                return game.kills, game.runs, f"not ended {PATIENCE:.0f} s after the last kill, {rounds_done(game)} rounds done"
            if game.run.poll() == 0:
                break
            if game.runs == RUNS:
                return game.kills, game.runs, f"`run` ended with {game.run.poll()} for the {RUNS}th time"
            start_run(game)
        return game.kills, game.runs, judge(game)
    finally:
        end(game)


def end(game: Game) -> None:
    """Stop everything that this game started, by its own ids."""
    for process in (game.run, game.mixer):
        if process is not None and process.poll() is None:
            process.kill()
            process.wait(20)
    if game.up.poll() is None:
        game.up.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            game.up.wait(60)
    if (game.place / "home/stack.json").exists():
        from fedveil.flower import stack

        stack.down(game.place / "home")


def judge(game: Game) -> str:
    """What is wrong with what a game left, or ""."""
    from fedveil.federation import folder as folders
    from fedveil.federation.store import open_run
    from fedveil.flower import books
    from fedveil.flower.node import ledger_of
    from fedveil.flower.owner import Owner

    shown = "".join((game.place / name).read_text("utf-8", "replace") for name in ("up.log", "run.log"))
    if "Traceback" in shown:
        return f"a traceback was shown: {shown[shown.index('Traceback'):][-600:]}"
    run = open_run(game.place / "run")
    folders.verify(game.place / "run")
    if [line["round"] for line in run.metrics] != list(range(1, ROUNDS + 1)):
        return f"rounds {[line['round'] for line in run.metrics]}"
    asked, arrived = run.ledger().participations(), sum(line["arrived"] for line in run.metrics)
    if min(asked) < ROUNDS:
        return f"the server's ledger counts {list(asked)} of {ROUNDS} rounds"
    own = []
    for number in range(NODES):
        home = game.place / f"home/nodes/{number}"
        own.append(int(ledger_of(home).participations()[0]) if (home / "ledger.jsonl").exists() else 0)
        if own[-1] > asked[number]:
            return f"node {number} was asked {own[-1]} times, the server's ledger counts {asked[number]}"
        expected = books.read_anchor(books.anchor_path(Owner(home, number)))
        last = len(books.history(home / "ledger.jsonl"))
        if expected is not None and expected[0] < last:
            return f"node {number}: the anchor knows record {expected[0]} of {last}"
    whole = sum(line["arrived"] == NODES for line in run.metrics)
    if min(own) < whole or sum(own) < arrived:
        return f"nodes charged {own}; {arrived} uploads arrived, {whole} rounds were complete"
    return ""


def main() -> int:
    """Play on from where the state file ends; exit code 1 if anything went wrong."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--count", type=int, default=3, help="kills")
    parse.add_argument("--minutes", type=float, default=60.0, help="begin no game after so many minutes")
    parse.add_argument("--state", type=Path)
    parse.add_argument("--first", type=int, default=0, help="number of the first game, where several share the work")
    parse.add_argument("--keep", type=Path, help="keep the folder of a game that went wrong below this one")
    given = parse.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the game's processes first
    state: dict[str, Any] = {"next": given.first, "counts": {}, "failures": []}
    if given.state and given.state.exists():
        state = json.loads(given.state.read_text())
    counts, failures, number = Counter(state["counts"]), list(state["failures"]), int(state["next"])
    until = time.monotonic() + 60 * given.minutes
    while counts["kills"] < given.count and time.monotonic() < until:
        with tempfile.TemporaryDirectory(prefix="fk", ignore_cleanup_errors=True) as place:
            try:
                kills, runs, wrong = play(number, Path(place))
            except Exception as error:
                kills, runs, wrong = Counter(), 0, f"{type(error).__name__}: {error}"
            if wrong and given.keep:
                subprocess.run(["cp", "-a", place, str(given.keep / f"game-{number}")], check=False)
        counts.update(kills)
        counts.update({"kills": sum(kills.values()), "games": 1, "right": not wrong, "run again": max(runs - 1, 0)})
        print(number, dict(kills), f"{runs} runs", wrong or "right", flush=True)
        if wrong:
            failures.append([number, wrong])
        number += 1
        if given.state:
            temporary = given.state.with_suffix(".tmp")
            temporary.write_text(json.dumps({"next": number, "counts": dict(counts), "failures": failures}, indent=1))
            os.replace(temporary, given.state)
    print(json.dumps({**counts, "failures": failures}, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
