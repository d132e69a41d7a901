"""python -m bench.cores [--json]: the same cohort on one core and on two, wall time (needs a quiet machine).

native uses threads, torch uses processes with one thread each. Other work on the cores shows up here, so the best of several
interleaved rounds counts, and CPU time is printed beside it: it should hardly grow with the second core.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from bench import rivals
from bench.cases import CASES, Case, material, plans
from fedveil.training import pool


def measure(engine: str, rounds: int) -> dict[str, Any]:
    """Best wall seconds with one worker and with two, and their ratio."""
    native = engine == "native"
    case = Case(**{**CASES["cnn"].__dict__, "clients": 100 if native else 56, "steps": 50 if native else 20})
    chunk = None if native else 7
    m = material(case)
    x, y, plan = m.x.numpy(), m.y.numpy(), plans(case)["private"]
    wall: dict[int, list[float]] = {1: [], 2: []}
    cpu: dict[int, list[float]] = {1: [], 2: []}
    with pool.Workers(2) as processes:
        two = 2 if native else processes
        for turn in range(rounds + 1):
            for count, workers in ((1, 1), (2, two)):
                began, used = time.perf_counter(), _cpu(processes)
                pool.train(m.module, m.start, x, y, m.work, plan, engine=engine, workers=workers, chunk=chunk)
                if turn:  # the first round warms up and starts the processes
                    wall[count].append(time.perf_counter() - began)
                    cpu[count].append(_cpu(processes) - used)
    return {
        "engine": engine,
        "one": min(wall[1]),
        "two": min(wall[2]),
        "speedup": min(wall[1]) / min(wall[2]),
        "speedup_median": float(np.median(wall[1]) / np.median(wall[2])),
        "cpu_growth": float(np.median(cpu[2]) / np.median(cpu[1])),
    }


def _cpu(pool: pool.Workers) -> float:
    """CPU seconds of this process and of the living workers (Linux; elsewhere of this process only)."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime
    for pid in pool.processes():
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cores", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    m = material(CASES["cnn"])
    found = [measure(engine, options.rounds) for engine in rivals.engines(m.module, m)]
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "results": found}, indent=1))
        return
    for row in found:
        print(
            "{engine:7} one core {one:.2f} s, two {two:.2f} s: {speedup:.2f} times (medians {speedup_median:.2f}); "
            "CPU time x {cpu_growth:.2f}".format(**row)
        )


if __name__ == "__main__":
    main()
