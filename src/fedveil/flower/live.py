"""What a run over Flower is doing at this moment, in one small file beside it, for whoever watches (`fedveil ui`).

Formal guarantee: the file tells no more than who was asked and has answered, which the server's log tells, too. Where a
promise counts on a cohort that stays secret, `training` names no node. The file decides nothing: if it cannot be written, the
run goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fedveil.federation.config import RunConfig
from fedveil.jsons import Document
from fedveil.secure_sum.coordinator import STAGES

FILE = "stage.json"
WAITING = "waiting.json"  # before the run begins: which nodes have joined
TRAINING, DONE = "training", STAGES[-1]
ASKED, ANSWERED, SILENT = "asked", "answered", "no answer"


def write(folder: Path, round: int, attempt: int, stage: str, nodes: Mapping[int, str], left: float) -> None:
    """Replace the file. nodes: the word for each client's node; left: seconds until the stage is closed."""
    _replace(folder / FILE, {
        "round": round, "attempt": attempt, "stage": stage, "until": time.time() + left,
        "missing": [client for client, word in nodes.items() if word == ASKED],
        "nodes": {str(client): word for client, word in nodes.items()},
    })  # fmt: skip


def _replace(path: Path, facts: Document) -> None:
    temporary = path.parent / f".{path.name}"
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(facts), "utf-8")
        os.replace(temporary, path)


def waiting(folder: Path, config: RunConfig, joined: Mapping[int, int], left: float) -> None:
    """Say that a run waits for its nodes. joined: rows of each client whose node is there; left: seconds it will wait."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / WAITING, {
        **{key: getattr(config, key) for key in ("name", "recipe", "dataset", "rounds", "clients")},
        "joined": {str(client): rows for client, rows in joined.items()}, "until": time.time() + left,
    })  # fmt: skip


def complete(folder: Path) -> None:
    """Every node is there: the run's own files tell the rest."""
    with contextlib.suppress(OSError):
        (folder / WAITING).unlink(missing_ok=True)


def training(
    folder: Path, round: int, asked: Iterable[int], offline: Iterable[int], deadline: float, secret: bool
) -> Callable[[int | None, str], None]:
    """Watch a round of plain uploads: call the result with (client, its word) for each reply, with (None, "") at the end."""
    words = {} if secret else dict.fromkeys(asked, ASKED) | dict.fromkeys(offline, "offline")
    until = time.monotonic() + deadline
    write(folder, round, 1, TRAINING, words, deadline)

    def mark(client: int | None, word: str) -> None:
        if client is None:
            ended = {known: SILENT if said == ASKED else said for known, said in words.items()}
            write(folder, round, 1, DONE, ended, 0.0)
        elif not secret:
            words[client] = word
            write(folder, round, 1, TRAINING, words, max(0.0, until - time.monotonic()))

    return mark


def summing(
    folder: Path, round: int, attempt: int, say: Callable[[str], None]
) -> Callable[[str, tuple[int, ...], float], None]:
    """Watch a secure sum as `flower.secure_sum.collect` tells it, and say when a stage begins."""
    last = ""
    words: dict[int, str] = {}

    def view(stage: str, missing: tuple[int, ...], left: float) -> None:
        nonlocal last, words
        waiting = [node - 1 for node in missing]
        if stage != last:
            words = {client: f"lost at {last}" if word == ASKED else word for client, word in words.items()}
            say(f"round {round}, attempt {attempt}: {stage}, {len(waiting)} nodes asked")
        here = {client for client, word in words.items() if not word.startswith("lost")} | set(waiting)
        words |= {client: ASKED if client in waiting else ANSWERED for client in sorted(here)}
        write(folder, round, attempt, stage, words, left)
        last = stage

    return view


def stage_line(folder: Path, now: float | None = None) -> str:
    """The stage of a secure sum under way in a run's folder, for people; "" if there is none."""
    try:
        facts = json.loads((folder / FILE).read_text("utf-8"))
        stage, left = str(facts["stage"]), max(0.0, facts["until"] - (time.time() if now is None else now))
        missing = [int(node) for node in facts["missing"]]
        head = f"round {int(facts['round'])}, attempt {int(facts['attempt'])}: stage {STAGES.index(stage) + 1} of 5, {stage}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if stage == DONE:
        return ""
    names = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
    return f"{head}; waiting for {'nodes ' + names if missing else 'nobody'}, {left:.0f} s left"
