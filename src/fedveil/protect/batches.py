"""Drawing cohorts and batches, exactly as the ledger describes them."""

from __future__ import annotations

import numpy as np

from fedveil.keys import generator


def cohort(kind: str, clients: int, expected: float, seed: int | bytes, round_number: int) -> np.ndarray:
    """Client numbers of one round, ascending.

    "poisson": every client tosses its own coin of rate expected/clients (the cohort may be empty).
    "fixed": exactly round(expected) distinct clients. "all": everybody.
    """
    draw = generator(seed, "cohort", round_number)
    if kind == "all" or expected >= clients:
        return np.arange(clients)
    if kind == "poisson":
        count = draw.binomial(clients, expected / clients)
        return np.sort(_distinct(draw, clients, count))
    return np.sort(_distinct(draw, clients, round(expected)))


def batches(
    kind: str, rows: np.ndarray, batch: float, steps: int, seed: int | bytes, round_number: int, client: int
) -> np.ndarray:
    """Row numbers for each local step: int32 [steps, width], padded with -1.

    "poisson": each record enters each step on its own coin of rate batch/len(rows). "fixed": `batch`
    distinct records per step. "partition": a fresh permutation per pass, cut into whole batches, so each
    record is used at most `passes(...)` times and never twice in one step. "full": all records in every step.
    """
    size = len(rows)
    if kind == "full" or batch >= size:
        return np.broadcast_to(rows.astype(np.int32), (steps, size))
    draw = generator(seed, "batches", round_number, client)
    if kind == "poisson":
        counts = draw.binomial(size, batch / size, steps)
        out = np.full((steps, max(1, int(counts.max(initial=0)))), -1, np.int32)
        for step, count in enumerate(counts):
            out[step, :count] = rows[_distinct(draw, size, int(count))]
        return out
    width = int(batch)
    if kind == "fixed":
        out = np.empty((steps, width), np.int32)
        for step in range(steps):
            out[step] = rows[_distinct(draw, size, width)]
        return out
    if kind != "partition":
        raise ValueError(f"unknown sampling '{kind}'")
    whole = size // width * width
    order = np.concatenate([draw.permutation(size)[:whole] for _ in range(passes(steps, batch, size))])
    found: np.ndarray = rows[order[: steps * width].reshape(steps, width)].astype(np.int32)
    return found


def passes(steps: int, batch: float, size: int) -> int:
    """Passes over `size` records that `steps` batches of a partition need: the most one record is used."""
    return -(-steps // (size // int(batch)))


def _distinct(draw: np.random.Generator, size: int, count: int) -> np.ndarray:
    """`count` distinct numbers below `size`, uniformly; rejection for small counts keeps it linear in count."""
    if count * count > 4 * size or count > 64:
        return draw.choice(size, count, replace=False)
    while True:
        picked = draw.integers(0, size, count)
        if len(set(picked.tolist())) == count:
            return picked
