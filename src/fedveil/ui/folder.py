"""Run directories as the dashboard may read them: only below one folder, only plain files of a bearable size.

Nothing is written, locked or executed. A path that leaves the folder (by "..", an absolute path or a symbolic link)
is treated as if it did not exist; a broken run is listed with the reason instead of its figures.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedveil.errors import UserError
from fedveil.jsons import JsonObject
from fedveil.report.facts import main_row, number
from fedveil.secure_sum.coordinator import STAGES

MOST_RUNS = 500
MOST_ENTRIES = 20_000  # folder entries looked at while searching
DEPTH = 3
MOST_BYTES = 48_000_000  # of one file
TAIL = 65_536  # enough for the last lines of metrics.jsonl
FRESH = 120.0  # seconds without a write after which an unfinished run counts as stopped
MOST_WAIT = 86_400.0  # seconds: a deadline further away is a damaged file
FILES = (
    "run.json",
    "metrics.jsonl",
    "private.jsonl",
    "result.json",
    "ledger.jsonl",
    "confusion.json",
    "model.safetensors",
    "nodes.json",
    "stage.json",
    "waiting.json",
)


class Missing(Exception):
    """There is no such run, or it may not be read; the message is for the user."""


def plain_file(path: Path, root: Path) -> bool:
    """Whether `path` is a regular file that lies below `root` also after following links."""
    try:
        real = path.resolve(strict=True)
        return real.is_relative_to(root) and stat.S_ISREG(real.stat().st_mode)
    except (OSError, RuntimeError, ValueError):
        return False


def _holds_run(folder: Path, root: Path) -> bool:
    """A run, or one over Flower that waits for its nodes before it begins."""
    return plain_file(folder / "run.json", root) or plain_file(folder / "waiting.json", root)


def resolve(root: Path, name: str) -> Path:
    """The run directory called `name` below `root`; everything else is `Missing`. `root` is a resolved path."""
    try:
        folder = (root / name).resolve(strict=True)
        fine = folder.is_relative_to(root) and _holds_run(folder, root)
    except (OSError, RuntimeError, ValueError):
        fine = False
    if not fine:
        raise Missing("there is no such run")
    return folder


def check(folder: Path, root: Path) -> None:
    """Refuse a run with files that lead elsewhere or are too large to read."""
    attacks = folder / "attacks"
    more = list(attacks.glob("*.*"))[:100] if attacks.is_dir() else []
    for path in [*(folder / name for name in FILES), *more]:
        if not os.path.lexists(path):
            continue
        if not plain_file(path, root):
            raise Missing(f"{path.name} is not a plain file inside the folder of runs")
        if path.stat().st_size > MOST_BYTES:
            raise Missing(
                f"{path.name} is larger than {MOST_BYTES // 1_000_000} MB; use the command line for this run"
            )


def find(root: Path) -> Iterator[Path]:
    """Run directories at and below `root`, at most DEPTH levels down, links not followed."""
    left, found = MOST_ENTRIES, 0
    level = [root]
    for _ in range(DEPTH + 1):
        following: list[Path] = []
        for folder in level:
            if _holds_run(folder, root):
                yield folder
                found += 1
                if found >= MOST_RUNS:
                    return
                continue
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        left -= 1
                        if left < 0:
                            return
                        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                            following.append(folder / entry.name)
            except OSError:
                continue
        level = following


def read_json(path: Path, root: Path) -> Any:
    """A JSON file, or None if it is not there or may not be read."""
    if not plain_file(path, root) or path.stat().st_size > MOST_BYTES:
        return None
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def last_line(path: Path, root: Path) -> JsonObject:
    """The last whole line of a JSON-lines file; only its end is read."""
    if not plain_file(path, root):
        return {}
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            texts = file.read(TAIL).splitlines()
    except OSError:
        return {}
    for text in reversed(texts):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def status_of(folder: Path, root: Path, seconds: float | None, now: float | None = None) -> str:
    """finished, live or stopped. A live run wrote something within two minutes or five typical rounds, or waits for nodes."""
    if plain_file(folder / "result.json", root):
        return "finished"
    times = []
    for name in ("run.json", "ledger.jsonl", "metrics.jsonl", "stage.json"):
        if plain_file(folder / name, root):
            times.append((folder / name).stat().st_mtime)
    patience, now = max(FRESH, 5 * (seconds or 0.0)), now or time.time()
    stage = read_json(folder / "stage.json", root)
    waits = isinstance(stage, dict) and now < min(number(stage.get("until")) or 0.0, now + MOST_WAIT)
    return "live" if waits or (times and now - max(times) < patience) else "stopped"


def nodes_of(folder: Path, root: Path, live: bool) -> JsonObject:
    """The nodes of a run over Flower: rows by client, and while it is live the round, its stage and each node's word."""
    known, stage = read_json(folder / "nodes.json", root), read_json(folder / "stage.json", root)
    if not isinstance(known, dict):
        return {}
    sizes = {client: number(told[1]) for client, told in known.items() if isinstance(told, list) and len(told) == 2}
    if not live or not isinstance(stage, dict) or not isinstance(stage.get("nodes"), dict):
        return {"rows": sizes}
    words = {str(client): str(word)[:40] for client, word in stage["nodes"].items()}
    return {
        "rows": sizes, "words": words, "stage": str(stage.get("stage", ""))[:40],
        "stages": list(STAGES[:-1]) if stage.get("stage") in STAGES[:-1] else [],
        "round": int(number(stage.get("round")) or 0), "attempt": int(number(stage.get("attempt")) or 1),
        "until": number(stage.get("until")),
    }  # fmt: skip


def waiting_of(folder: Path, root: Path) -> JsonObject:
    """A run over Flower that waits for its nodes: who is there, and whether it still waits."""
    facts = read_json(folder / "waiting.json", root)
    if not isinstance(facts, dict) or not isinstance(facts.get("joined"), dict):
        return {"problem": "waiting.json is damaged", "status": "broken"}
    now, until = time.time(), number(facts.get("until")) or 0.0
    return {
        "title": str(facts.get("name") or "")[:200], "recipe": str(facts.get("recipe", "?"))[:100],
        "dataset": str(facts.get("dataset", "?"))[:200], "created": "", "simulated": False,
        "status": "waiting" if now < min(until, now + MOST_WAIT) else "stopped", "until": until,
        "round": 0, "rounds": int(number(facts.get("rounds")) or 0), "metric": "accuracy", "result": None, "observer": "server",
        "epsilon": None, "verdict": "", "seconds": None, "clients_wanted": int(number(facts.get("clients")) or 0),
        "joined": {str(client)[:12]: number(rows) for client, rows in list(facts["joined"].items())[:MOST_RUNS]},
    }  # fmt: skip


def summary(folder: Path, root: Path) -> JsonObject:
    """One line of the list of runs: cheap, and never an exception."""
    name = folder.relative_to(root).as_posix()
    row: JsonObject = {"id": name, "name": name if name != "." else root.name, "problem": ""}
    if not os.path.lexists(folder / "run.json"):
        return row | waiting_of(folder, root)
    facts = read_json(folder / "run.json", root)
    config = facts.get("config") if isinstance(facts, dict) else None
    if not isinstance(config, dict):
        return row | {"problem": "run.json is damaged", "status": "broken"}
    last = last_line(folder / "metrics.jsonl", root)
    result = read_json(folder / "result.json", root)
    result = result if isinstance(result, dict) else {}
    ledger = result.get("ledger")
    rows = [r for r in ledger if isinstance(r, dict)] if isinstance(ledger, list) else []
    observer = str(config.get("observer", "server"))
    main = main_row(rows, observer, _unit(config))
    accuracy = number(result.get("test_accuracy", last.get("test_accuracy")))
    row |= {
        "title": str(config.get("name") or "")[:200],
        "recipe": str(config.get("recipe", "?"))[:100],
        "dataset": str(config.get("dataset", "?"))[:200],
        "created": str(facts.get("created", ""))[:40],
        "simulated": bool(facts.get("simulated", True)),
        "status": status_of(folder, root, number(last.get("seconds"))),
        "round": int(number(last.get("round")) or 0),
        "rounds": int(number(config.get("rounds")) or 0),
        "metric": "accuracy" if accuracy is not None or number(result.get("test_rmse")) is None else "rmse",
        "result": accuracy
        if accuracy is not None
        else number(result.get("test_rmse", last.get("test_rmse"))),
        "observer": observer,
        "epsilon": number(last.get("epsilon")) if main is None else number(main.get("epsilon")),
        "verdict": str(main["verdict"])
        if main
        else ("sound" if number(last.get("epsilon")) is not None else "none"),
        "seconds": number(result.get("seconds")),
    }
    if not rows and not last:
        row["verdict"] = ""
    return row


def _unit(config: JsonObject) -> str:
    from fedveil.protect.catalogue import get

    try:
        return get(str(config.get("recipe"))).place.unit
    except UserError:
        return "example"


def stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes whenever a file of the run changes."""
    found = []
    for path in [*(folder / name for name in FILES), *sorted((folder / "attacks").glob("*.json"))[:50]]:
        try:
            facts = path.stat()
        except OSError:
            continue
        found.append((path.name, facts.st_mtime_ns, facts.st_size))
    return tuple(found)
