"""Seconds and bytes per round of a real local federation: 1 million weights, 4 nodes, TLS and node keys.

    python bench/flower_bench.py [--rounds 3] [--out bench/flower.json]

Four cases: training inside Flower's short-lived processes or in a persistent trainer per node, and float32
updates or bit-packed reports. One local step each, so that what is measured is the carrying, not the learning.
loopback bytes are the machine's counters for `lo`: run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from fedveil.federation.config import make_config
from fedveil.federation.store import read_lines
from fedveil.flower import stack as stacks
from fedveil.flower.project import write_project

HIDDEN = 985  # 30 features -> 985 -> 985 -> 2: about 1.0 million weights
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "short-lived, float32": (False, {"recipe": "fed-cdp-sound"}),
    "trainer, float32": (True, {"recipe": "fed-cdp-sound"}),
    "short-lived, bit-packed": (False, {"recipe": "ldp-fl", "channel": "none"}),
    "trainer, bit-packed": (True, {"recipe": "ldp-fl", "channel": "none"}),
}


def loopback() -> int:
    """Bytes that `lo` has carried since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[0])
    return 0


def measure(trainers: bool, recipe: dict[str, Any], rounds: int, folder: Path) -> dict[str, Any]:
    """One federation, one run."""
    common = {
        "dataset": "cancer",
        "clients": 4,
        "partition": "iid",
        "rounds": rounds,
        "local_steps": 1,
        "batch_size": 4,
    }
    config = make_config(
        {**common, "model": "papers-mlp", "model_options": {"hidden": [HIDDEN, HIDDEN]}, **recipe}
    )
    stack = stacks.up(folder / "federation", 4, trainers=trainers)
    try:
        project = folder / "project"
        write_project(project, config, {"out": str(folder / "run"), "deadline": 300.0, "join": 300.0})
        before, at = loopback(), time.monotonic()
        run = stacks.submit(stack.environment, project, stacks.NAME)
        marks: list[tuple[float, int]] = []
        while len(marks) < rounds and time.monotonic() - at < 300 * (rounds + 1):
            if len(read_lines(folder / "run/metrics.jsonl")) > len(marks):
                marks.append((time.monotonic() - at, loopback()))
            time.sleep(0.1)
        lines = read_lines(folder / "run/metrics.jsonl")
        while (state := stacks.status(stack.environment, run, stacks.NAME)).startswith("running"):
            time.sleep(2)
        facts = json.loads((folder / "run/run.json").read_text())
        steady = [b - a for (_, a), (_, b) in zip([(0.0, before), *marks], marks, strict=False)][1:]
        return {
            "status": state,
            "weights": facts["parameters"],
            "arrived": [line["arrived"] for line in lines],
            "seconds_per_round": [round(line["seconds"], 2) for line in lines],
            "seconds_until_first_round_done": round(marks[0][0], 1),
            "upload_bytes_per_round": lines[-1]["bytes_up"],
            "loopback_bytes_per_round": steady,
        }
    finally:
        stacks.down(folder / "federation")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(CASES), action="append")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    }
    found["load before"] = round(os.getloadavg()[0], 1)
    for name in options.only or CASES:
        with tempfile.TemporaryDirectory(prefix="fvb-") as folder:
            found[name] = measure(*CASES[name], options.rounds, Path(folder))
        print(name, json.dumps(found[name]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
