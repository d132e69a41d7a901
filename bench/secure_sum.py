"""python -m bench.secure_sum [--json] [--quick]: the secure sum against a plain round, in one process with real messages.

A round: every node trains a network of a million weights (per-example clipping) and sends its update; the server adds up.
Plain: float32 updates, noise once at the server. Secure: updates on the grid with the node's share of noise, masked.
CPU time, one thread; the two kinds of round take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn

from fedveil.keys import derive
from fedveil.models.layout import flatten
from fedveil.protect import exact
from fedveil.secure_sum import graph, noise, simulate
from fedveil.secure_sum.parameters import Parameters
from fedveil.training import pool
from fedveil.training.contract import ClientWork, LocalPlan

DEALT, BATCH = 60_000, 60  # MNIST's size, dealt to the nodes: one pass per round, as in the headlines
BOUND, SIGMA, GRID = 1.0, 4.0, 3e-5


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1024), nn.Tanh(), nn.Linear(1024, 190), nn.Tanh(), nn.Linear(190, 10)
    )


def trainer(examples: int) -> tuple[Any, int]:
    """node -> its update after one pass with per-example clipping, and the number of weights."""
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    x, y = draw.random((examples, 1, 28, 28), np.float32), draw.integers(0, 10, examples)
    module = network()
    start = flatten(module)
    steps = examples // BATCH
    plan = LocalPlan(steps, 1.0, 1.0, clip="flat", bounds=(BOUND,) * steps)

    def train(node: int) -> np.ndarray:
        rows = np.arange(steps * BATCH, dtype=np.int32).reshape(steps, BATCH)
        work = ClientWork(node, rows, derive(0, "noise", 0, node)[:16])
        return next(iter(pool.stream(module, start, x, y, iter([work]), plan, engine="auto"))).delta[0]

    return train, start.size


def rounds(nodes: int, examples: int, repeats: int) -> dict[str, float]:
    """Both kinds of round in turn."""
    train, size = trainer(examples)
    threshold, colluders = math.ceil(0.8 * nodes), max(1, nodes // 16)
    parameters = Parameters(bytes(32), size, GRID, BOUND, SIGMA, nodes, threshold, colluders)
    train(0)
    plain, secure, own, ratios = [], [], [], []
    for number in range(repeats):
        before = time.process_time()
        total = np.zeros(size)
        for node in range(1, nodes + 1):
            total += np.frombuffer(train(node).astype("<f4").tobytes(), "<f4")
        exact.gaussian(derive(number, "server")[:16], 0, size, SIGMA / GRID)
        plain.append(time.process_time() - before)
        before = time.process_time()
        updates = {node: train(node) for node in range(1, nodes + 1)}
        middle = time.process_time()
        vectors = {
            node: noise.noised(parameters, update, derive(number, "share", node)[:16])
            for node, update in updates.items()
        }
        sharing = time.process_time() - middle
        played = simulate.sum_of(vectors, parameters, number)
        secure.append(time.process_time() - before)
        assert isinstance(played.result, simulate.Sum), played.result
        assert np.array_equal(played.result.total, sum(vectors.values()))
        own.append((sharing + played.node_seconds) / nodes)
        ratios.append(played.bytes_up / (nodes * 4 * size))
    return {
        "nodes": nodes,
        "examples_per_node": examples,
        "weights": size,
        "plain_cpu_seconds": statistics.median(plain),
        "secure_cpu_seconds": statistics.median(secure),
        "time_ratio": statistics.median(b / a for a, b in zip(plain, secure, strict=True)),
        "bytes_up_ratio": statistics.median(ratios),
        "node_cpu_seconds": statistics.median(own),
        "wrap_chance": noise.wrap_chance(parameters, nodes * examples * BOUND),
    }


def growth(nodes: int, size: int) -> dict[str, float]:
    """The protocol alone (no training): what one node and the server pay, with 5% lost after their shares."""
    threshold, colluders, lost = int(0.8 * nodes), int(0.05 * nodes), int(0.05 * nodes)
    degree, needed = graph.choose(nodes, threshold, colluders, lost)
    parameters = Parameters(
        bytes(32),
        size,
        GRID,
        BOUND,
        SIGMA,
        nodes,
        threshold,
        colluders,
        degree=degree,
        share_threshold=needed,
    )
    draw = np.random.default_rng(nodes)
    vectors = {node: draw.integers(-1000, 1000, size) for node in range(1, nodes + 1)}
    gone = {int(node): 2 for node in draw.choice(np.arange(1, nodes + 1), lost, replace=False)}
    played = simulate.sum_of(vectors, parameters, nodes, drops=gone)
    assert isinstance(played.result, simulate.Sum), played.result
    assert np.array_equal(played.result.total, sum(vectors[node] for node in played.result.survivors))
    return {
        "nodes": nodes,
        "weights": size,
        "degree": degree or nodes - 1,
        "share_threshold": parameters.needed,
        "guaranteed_honest": parameters.honest,
        "failure": graph.shortfall(nodes, lost, degree, needed) if degree else 0.0,
        "node_cpu_seconds": played.node_seconds / nodes,
        "server_cpu_seconds": played.server_seconds,
        "kilobytes_up_beside_the_vector": (played.bytes_up - (nodes - lost) * 4 * size) / nodes / 1e3,
        "kilobytes_down": played.bytes_down / nodes / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, up to 200 nodes")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    repeats = 1 if chosen.quick else 3
    found = {
        "rounds": [
            rounds(nodes, examples, repeats) for nodes in (8, 32) for examples in (DEALT // nodes, 600)
        ],
        "growth": [
            growth(nodes, 10_000) for nodes in ((32, 100, 200) if chosen.quick else (32, 100, 200, 500, 1000))
        ],
    }
    if chosen.json:
        print(json.dumps(found, indent=1))
        return
    for name, table in found.items():
        print(name)
        for row in table:
            print("  " + ", ".join(f"{k} {v:.4g}" for k, v in row.items()))


if __name__ == "__main__":
    main()
