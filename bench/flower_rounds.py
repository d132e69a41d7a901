"""Where the time of a round goes: a federation on this machine (TLS, keys, trainers), a small model, one local step.

    python bench/flower_rounds.py [--nodes 8] [--rounds 12] [--plain]

Seconds are those by the clock, CPU seconds those of each kind of process, per round and without the first two rounds. What
the SuperLink takes is Flower's alone; SuperNodes and ServerApp are Flower's code with ours in it; trainers are ours.
--plain starts Flower's own SuperNodes (a Python per message).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from fedveil.federation.config import make_config
from fedveil.federation.store import read_lines
from fedveil.flower import stack as stacks
from fedveil.flower.project import write_project

TICK = os.sysconf("SC_CLK_TCK")
WARM = 2  # rounds that are not counted


def processor(root: int) -> float:
    """CPU seconds of a process, of those that it waited for, and of its living descendants."""
    children: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            times[int(entry.name)] = sum(map(int, fields[11:15])) / TICK
    total, open_ids = 0.0, [root]
    while open_ids:
        one = open_ids.pop()
        total += times.get(one, 0.0)
        open_ids += children.get(one, [])
    return total


def by_kind(stack: stacks.Stack) -> dict[str, float]:
    """CPU seconds until now of SuperLink, ServerApp, SuperNodes and trainers."""
    kinds = {"superexec": "ServerApp", "superlink": "SuperLink", "node": "SuperNodes", "trainer": "trainers"}
    found = dict.fromkeys(kinds.values(), 0.0)
    for name, process in stack.processes.items():
        found[kinds[name.partition("-")[0]]] += processor(process.pid)
    return found


def measure(nodes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """One federation, one run."""
    config = make_config({
        "recipe": "fed-cdp", "dataset": "cancer", "clients": nodes, "partition": "iid", "rounds": rounds, "local_steps": 1,
        "batch_size": 4, "model": "papers-mlp", "model_options": {"hidden": [16]}, "evaluate_every": rounds,
    })  # fmt: skip
    stack = stacks.up(folder / "federation", nodes)
    try:
        write_project(folder / "project", config, {"out": str(folder / "run"), "deadline": 300.0, "join": 300.0})
        stacks.submit(stack.environment, folder / "project", stacks.NAME)
        marks: list[tuple[float, dict[str, float]]] = []
        until = time.monotonic() + 60 * rounds
        while len(marks) < rounds and time.monotonic() < until:
            if (done := len(read_lines(folder / "run/metrics.jsonl"))) > len(marks):
                marks += [(time.monotonic(), by_kind(stack))] * (done - len(marks))
            time.sleep(0.05)
        lines = read_lines(folder / "run/metrics.jsonl")
        (first, before), (last, after) = marks[WARM - 1], marks[-1]
        count = len(marks) - WARM
        cpu = {kind: round((after[kind] - before[kind]) / count, 3) for kind in after}
        return {
            "arrived": [line["arrived"] for line in lines],
            "seconds a round, median": round(statistics.median(line["seconds"] for line in lines[WARM:]), 2),
            "seconds from round to round": round((last - first) / count, 2),
            "CPU seconds a round": {**cpu, "all": round(sum(cpu.values()), 3)},
        }
    finally:
        stacks.down(folder / "federation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    if options.plain:
        usual = stacks.supernode_command
        stacks.supernode_command = lambda light=True: usual(False)
    for nodes in options.nodes:
        with tempfile.TemporaryDirectory(prefix="fvr-") as folder:
            found = measure(nodes, options.rounds, Path(folder))
        print(json.dumps({"nodes": nodes, "plain": options.plain, "load": round(os.getloadavg()[0], 1), **found}), flush=True)


if __name__ == "__main__":
    main()
