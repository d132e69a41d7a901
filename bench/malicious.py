"""A malicious server against every recipe of the catalogue and against the sum under masks.

python -m bench.malicious run OUT.jsonl      one line per recipe; called again it goes on
python -m bench.malicious table OUT.jsonl    the table of docs/attacks.md

Every recipe with its own noise and clip, one step on 64 digits of each of 8 clients, 512 units; what the server gets comes from
`federation.view.view_sum`. Three recipes are also calibrated for epsilon 2 in this one round.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedveil.attacks.audit.canaries import as_planned, promised
from fedveil.attacks.malicious import attack
from fedveil.errors import UserError
from fedveil.protect.catalogue import catalogue

BATCH, CLIENTS, BINS, SEED = 64, 8, 512, 1
TWO = {"calibrate": True, "target_epsilon": 2.0}
MASKS = {"secure_sum": True, "sum_threshold": 7, "sum_colluders": 1, "batch_size": 1000}


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """name of the row -> (recipe, changes)."""
    found: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in catalogue()}
    found["fed-cdp-sound, epsilon 2"] = ("fed-cdp-sound", TWO)
    found["sum-cdp, epsilon 2"] = ("sum-cdp", {**TWO, "batch_size": 1000})
    found["sum-cdp under masks, epsilon 2"] = ("sum-cdp", {**MASKS, **TWO})
    return found


def attacked(recipe: str, changes: dict[str, Any]) -> dict[str, Any]:
    """All malicious models against one recipe, from one upload and from the sum, with what the server was promised."""
    try:
        staged = attack.stage(
            recipe, "digits", bins=BINS, batch=BATCH, clients=CLIENTS, seed=SEED, changes=changes
        )
    except UserError as wrong:
        return {"not_done": str(wrong)}
    epsilon, status, _ = promised(as_planned(staged, 1), "server", "example", staged.config.delta)
    rows = [
        asdict(attack.steal(staged, kind, clients=count, batch=BATCH, seed=SEED))
        for kind in attack.KINDS
        for count in (1, CLIENTS)
        if not (kind == "isolate" and count == 1) and not (count == 1 and staged.task.secure is not None)
    ]
    return {"epsilon": epsilon, "status": status, "attacks": rows}


def run(out: Path) -> None:
    done = {json.loads(line)["name"] for line in out.read_text().splitlines()} if out.exists() else set()
    with out.open("a") as file:
        for name, (recipe, changes) in cases().items():
            if name not in done:
                file.write(json.dumps({"name": name, **attacked(recipe, changes)}, default=float) + "\n")
                file.flush()


def cell(rows: list[dict[str, Any]], kind: str, clients: int) -> str:
    """found of images [interval], control."""
    for row in rows:
        if row["kind"] == kind and row["clients"] == clients:
            if row["refused"]:
                return "no sum is opened"
            low, high = row["interval"]
            chance = round(row["control"] * row["images"])
            return f"{row['found']} of {row['images']} [{low:.2f}, {high:.2f}] ({chance})"
    return ""


def table(out: Path) -> None:
    print(
        "| recipe | promised for this round | imprint, one upload | imprint, sum of 8 | trap, one | trap, sum | isolate |"
    )
    print("|---|---|---|---|---|---|---|")
    for line in map(json.loads, out.read_text().splitlines()):
        if "not_done" in line:
            print(f"| `{line['name']}` | not done: {line['not_done']} | | | | | |")
            continue
        told = "nothing" if line["epsilon"] is None else f"{line['status']} {line['epsilon']:.3g}"
        places = (("imprint", 1), ("imprint", CLIENTS), ("trap", 1), ("trap", CLIENTS), ("isolate", CLIENTS))
        print(
            f"| `{line['name']}` | {told} | {' | '.join(cell(line['attacks'], *place) for place in places)} |"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"run": run, "table": table}[sys.argv[1]](Path(sys.argv[2]))
