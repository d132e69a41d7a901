"""python -m bench.scale [--json] [--plot FILE]: does the cost stay flat, and the memory with the chunk?

Each point is a process of its own: a lazy partition of a population, one cohort of it trained for a round, updates
added up as they come. CPU time per client-iteration includes finding the clients' rows and drawing batches; memory is the
process's peak above what it held before the round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from fedveil.data.partition import partition
from fedveil.data.rows import Dataset
from fedveil.keys import derive
from fedveil.models import nets
from fedveil.models.layout import flatten
from fedveil.protect.batches import batches, cohort
from fedveil.protect.law import Gaussian
from fedveil.protect.noised import Drawing
from fedveil.training import pool
from fedveil.training.contract import ClientWork, LocalPlan

STEPS, BATCH = 10, 5
POPULATIONS = (1_000, 10_000, 100_000, 1_000_000)
COHORTS = (10, 100, 1000)


def point(population: int, size: int, engine: str) -> dict[str, Any]:
    """One round of `size` clients out of `population`."""
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    shape, rows = (1, 28, 28), 10_000
    x, y = draw.random((rows, *shape), np.float32), draw.integers(0, 10, rows)
    dataset = Dataset("random", x, y, x[:10], y[:10], 10)
    dealt = partition(dataset, "overlap", population, examples_per_client=500)
    module = nets.build("papers-cnn", shape, 10, 0)
    start = flatten(module)
    plan = LocalPlan(
        STEPS,
        0.05,
        float(BATCH),
        clip="layer",
        bounds=(4.0,) * STEPS,
        noised=(Drawing(Gaussian(), 4.0),) * STEPS,
    )

    def work(clients: np.ndarray, round_number: int) -> Any:
        for client in clients.tolist():
            chosen = batches("fixed", dealt.rows(client), BATCH, STEPS, 0, round_number, client)
            yield ClientWork(client, chosen, derive(0, "noise", round_number, client)[:16])

    def play(clients: np.ndarray, round_number: int) -> np.ndarray:
        total = np.zeros(start.size)
        stream = pool.stream(module, start, x, y, work(clients, round_number), plan, engine=engine)
        for result in stream:
            total += result.delta.sum(0, dtype=np.float64)
        return total

    play(np.arange(4), 0)  # warm up
    before = _peak()
    costs = []
    for number in range(1, 4 if size <= 100 else 2):
        began = time.process_time()
        clients = cohort("fixed", population, size, 0, number)
        play(clients, number)
        costs.append((time.process_time() - began) / (len(clients) * STEPS) * 1e6)
    return {
        "population": population,
        "cohort": len(clients),
        "microseconds": float(np.median(costs)),
        "memory_mib": _peak() - before,
    }


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _apart(population: int, size: int, engine: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.scale", "--point", str(population), str(size), "--engine", engine]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def plot(points: list[dict[str, Any]], path: str) -> None:
    """Cost over population and memory over cohort."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for engine in sorted({p["engine"] for p in points}):
        mine = [p for p in points if p["engine"] == engine]
        across = [p for p in mine if p["cohort"] == 100]
        left.plot([p["population"] for p in across], [p["microseconds"] for p in across], "o-", label=engine)
        inside = sorted((p for p in mine if p["population"] == POPULATIONS[1]), key=lambda p: p["cohort"])
        right.plot([p["cohort"] for p in inside], [p["memory_mib"] for p in inside], "o-", label=engine)
    left.set(
        xscale="log", xlabel="clients in the population (100 per round)", ylabel="CPU µs per client-iteration"
    )
    right.set(
        xscale="log",
        xlabel=f"clients per round (of {POPULATIONS[1]:,})",
        ylabel="peak memory of a round, MiB",
    )
    left.set_ylim(bottom=0)
    right.set_ylim(0, max(64.0, right.get_ylim()[1]))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--plot", metavar="FILE", help="write the picture (bench/scale.png)")
    parser.add_argument("--engine", default="all", help="all, native or torch")
    parser.add_argument(
        "--point", nargs=2, type=int, metavar=("POPULATION", "COHORT"), help="one point, in this process"
    )
    options = parser.parse_args(arguments)
    if options.point:
        print(json.dumps(point(*options.point, engine=options.engine)))
        return
    engines = ["native", "torch"] if options.engine == "all" else [options.engine]
    points = []
    for engine in engines:
        pairs = dict.fromkeys([(p, 100) for p in POPULATIONS] + [(POPULATIONS[1], c) for c in COHORTS])
        for population, size in pairs:
            found = _apart(population, size, engine) | {"engine": engine}
            points.append(found)
            if not options.json:
                print("{engine:8} {population:>9,} clients, {cohort:>5} per round: {microseconds:8.0f} µs, "
                      "{memory_mib:6.1f} MiB".format(**found), flush=True)  # fmt: skip
    if options.plot:
        plot(points, options.plot)
    if options.json:
        print(json.dumps({"points": points}, indent=1))


if __name__ == "__main__":
    main()
