"""Two source trees raced on this machine at the same noise law (float noise): which one takes more CPU time?

    python -m bench.trees OLD_PYTHON OLD NEW_PYTHON NEW --out FILE [--pairs 5] [--rounds 5] [--case NAME …]

OLD and NEW are checkouts with a `bench` folder, each with a Python in which its own fedveil is installed. One worker per tree
waits for its turn; both take every race in every round, in shuffled order, one thread each. Where a process happens to lie in
memory moves its times by up to 15%, so there are several pairs of processes. A ratio is the median over the rounds of all pairs:
new over old CPU time within a round. FILE keeps every finished race of every pair: the command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENGINES = ("native", "stacked", "functional")
CASES = ("cnn", "adult", "cancer", "logistic", "lenet", "cifar", "central600")
PLANS = ("private, float noise", "non-private")
SLOW = {("central600", "functional")}  # minutes a turn in either tree: it takes its examples one by one

WORKER = r"""
import itertools, json, os, sys, tempfile, time, warnings
warnings.filterwarnings("ignore")
import torch
from torch import nn
torch.set_num_threads(1)
from bench import cases, rivals
cases.CASES["logistic"] = cases.Case("logistic", "", lambda: nn.Sequential(nn.Linear(105, 2)), (105,), 2, 16, 64, 20, 60)
made, told = {}, itertools.count()

def racer(case, engine, plan):
    if case == "run":
        import fedveil as fv
        more = {"grid": 0.0} if "Drawing" in dir(cases) else {}
        settings = {"dataset": "cancer", "clients": 10, "rounds": 10, "local_steps": 20, "batch_size": 8, "report": False}
        folder = tempfile.mkdtemp()
        def whole():
            fv.run("fed-cdp", out=f"{folder}/{next(told)}", engine=engine, **settings, **more)
            return 2000
        return whole
    m = cases.material(cases.CASES[case])
    known = cases.plans(m.case)
    return rivals.ours(m, engine, plan if plan in known else "private")

for line in sys.stdin:
    key = tuple(json.loads(line))
    try:
        if key not in made:
            made.clear()
            made[key] = racer(*key)
            made[key]()
        before = time.process_time()
        count = made[key]()
        while time.process_time() - before < 0.05:
            count += made[key]()
        said = {"seconds": (time.process_time() - before) / count}
    except Exception as wrong:
        said = {"refused": f"{type(wrong).__name__}: {wrong}"[:200]}
    print("said " + json.dumps(said), flush=True)
"""


class Worker:
    """A process of one tree that runs a race when asked."""

    def __init__(self, python: str, tree: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(tree.resolve())}
        self.process = subprocess.Popen(
            [python, "-c", WORKER], cwd=tree, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def turn(self, race: Sequence[str]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(race) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("said "):
                return json.loads(line.removeprefix("said "))
        sys.exit(f"the worker of {race} ended")


def race(workers: Sequence[Worker], what: Sequence[str], rounds: int, seed: int) -> dict[str, Any]:
    """CPU microseconds per client-iteration of old and new in every round, or why one of them does not run this."""
    shuffle, times = random.Random(seed), ([], [])  # type: tuple[random.Random, tuple[list[float], list[float]]]
    for _ in range(rounds):
        order = [0, 1]
        shuffle.shuffle(order)
        for number in order:
            said = workers[number].turn(what)
            if "refused" in said:
                return {"refused": f"{('old', 'new')[number]}: {said['refused']}"}
            times[number].append(round(1e6 * said["seconds"], 3))
    return {"old": times[0], "new": times[1]}


def summary(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and quartiles of new / old over all rounds, and the medians themselves."""
    each = [new / old for pair in pairs for old, new in zip(pair["old"], pair["new"], strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    medians = [round(statistics.median([t for pair in pairs for t in pair[tree]]), 2) for tree in ("old", "new")]
    return {"new_over_old": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)], "microseconds": medians}


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["| case | engine | plan | new / old CPU (quartiles) | µs old | µs new |", "|---|---|---|---|---|---|"]
    for name, pairs in results.items():
        refused = next((pair["refused"] for pair in pairs if "refused" in pair), None)
        if refused:
            lines.append(f"| {name.replace('|', ' | ')} | not raced: {refused} | | |")
            continue
        found = summary(pairs)
        low, high = found["quartiles"]
        old, new = found["microseconds"]
        lines.append(f"| {name.replace('|', ' | ')} | {found['new_over_old']:.2f} ({low:.2f}–{high:.2f}) | {old} | {new} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old_python")
    parser.add_argument("old", type=Path)
    parser.add_argument("new_python")
    parser.add_argument("new", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=5, help="of processes")
    parser.add_argument("--rounds", type=int, default=5, help="of each pair")
    parser.add_argument("--case", action="append", choices=(*CASES, "run"))
    parser.add_argument("--engine", action="append", choices=ENGINES)
    given = parser.parse_args()
    results = json.loads(given.out.read_text()) if given.out.exists() else {}
    races = [(c, e, p) for c in given.case or (*CASES, "run") for e in given.engine or ENGINES for p in PLANS]
    races = [r for r in races if (r[0], r[1]) not in SLOW and (r[0] != "run" or r[2] == PLANS[0])]
    for pair in range(given.pairs):
        missing = [what for what in races if len(results.get("|".join(what), [])) <= pair]
        if not missing:
            continue
        workers = [Worker(given.old_python, given.old), Worker(given.new_python, given.new)]
        for what in missing:
            found = results.setdefault("|".join(what), [])
            found.append(race(workers, what, given.rounds, pair))
            given.out.write_text(json.dumps(results) + "\n")
        for worker in workers:
            worker.process.terminate()
    print(table(results))


if __name__ == "__main__":
    main()
