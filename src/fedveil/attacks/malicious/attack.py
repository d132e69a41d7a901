"""A malicious server against a recipe: its model goes in, `federation.view` says what comes back, candidates are counted.

A client follows the recipe whatever the model: defences are the product's own. Counted is how many of the batch's images are
among the candidates within the strict threshold, beside a control: the same count when the same candidates are compared
with images that were not in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np

from fedveil.attacks.malicious import models
from fedveil.attacks.membership import exact_interval
from fedveil.attacks.metrics import STRICT_MSE
from fedveil.errors import UserError
from fedveil.federation.config import make_config
from fedveil.federation.loop import Prepared, prepare
from fedveil.federation.round import State, start
from fedveil.federation.view import view_sum
from fedveil.jsons import JsonObject

Kind = Literal["imprint", "trap", "isolate"]
KINDS: tuple[Kind, ...] = ("imprint", "trap", "isolate")


@dataclass(frozen=True)
class Stolen:
    """What one round gave back."""

    kind: str
    recipe: str
    dataset: str
    clients: int
    images: int
    found: int
    share: float
    interval: tuple[float, float]
    control: float  # share of as many images outside the batch that the candidates also "find"
    candidates: int
    seat: str
    epsilon: float | None = None
    refused: str = ""  # why the server got nothing at all


def stage(
    recipe: str, dataset: str, *, bins: int = 1024, batch: int = 64, clients: int = 1, seed: int = 0,
    changes: dict[str, object] | None = None,
) -> Prepared:  # fmt: skip
    """A federation of `clients` in which each takes one step on `batch` examples of its own."""
    values = {
        "recipe": recipe, "dataset": dataset, "clients": max(2, clients), "cohort_size": None, "partition": "iid", "rounds": 1,
        "local_steps": 1, "batch_size": batch, "learning_rate": 1.0, "model": "papers-mlp", "seed": seed,
        "model_options": {"hidden": [bins]},
    }  # fmt: skip
    config = make_config(values, changes or {})
    return prepare(config)


def steal(prepared: Prepared, kind: Kind, *, clients: int = 1, batch: int = 64, seed: int = 0) -> Stolen:
    """One round of `clients` with the malicious model; the server sees their sum (one client: its upload)."""
    if kind not in KINDS:
        raise UserError(f"unknown malicious model '{kind}'; choose from {', '.join(KINDS)}.")
    task, dataset = prepared.task, prepared.dataset
    public = dataset.x_test
    base = np.array(prepared.initial)
    if kind == "trap":
        sent = models.trap(base, task.layout, public, active=1 / (batch * clients), seed=seed)
    else:
        sent = models.imprint(base, task.layout, public, seed=seed)
    rng = np.random.default_rng(seed)
    picked = [
        rng.choice(np.asarray(prepared.partition.rows(c)), batch, replace=False) for c in range(clients)
    ]
    others = range(1, clients) if kind == "isolate" else ()
    total = _seen(
        prepared, sent, dict(enumerate(picked)), {c: models.dead(sent, task.layout) for c in others}
    )
    victims = np.concatenate(picked if kind != "isolate" else picked[:1])
    read = models.read_units if kind == "trap" else models.read_imprint
    found_rows = np.zeros((0, len(task.x[0].reshape(-1)))) if total is None else read(total, task.layout)
    candidates = _clamped(found_rows, dataset.pixel_range)
    truth = task.x[victims].reshape(len(victims), -1)
    outside = np.setdiff1d(np.arange(len(task.x)), np.concatenate(picked))
    strangers = task.x[rng.choice(outside, len(victims), replace=False)].reshape(len(victims), -1)
    span = 1.0 if not dataset.pixel_range else dataset.pixel_range[1] - dataset.pixel_range[0]
    found = int((nearest(candidates, truth) < STRICT_MSE * span**2).sum())
    false = float((nearest(candidates, strangers) < STRICT_MSE * span**2).mean())
    return Stolen(
        kind, task.recipe.name, dataset.name, clients, len(victims), found, found / len(victims),
        exact_interval(found, len(victims)), false, len(candidates),
        "whoever sees the sum" if clients > 1 else "the server",
        refused="" if total is not None else "nodes that were sent different models: their masks do not cancel out, no sum",
    )  # fmt: skip


def _seen(
    prepared: Prepared, weights: np.ndarray, rows: dict[int, np.ndarray], dead: dict[int, np.ndarray]
) -> np.ndarray | None:
    """The sum of the clients' uploads as it is opened (of one client with its own noise: its upload)."""
    state: State = replace(start(prepared.task, prepared.initial), weights=weights)
    return view_sum(prepared.task, state, rows, dead)


def _clamped(candidates: np.ndarray, pixel_range: tuple[float, float] | None) -> np.ndarray:
    finite = candidates[np.isfinite(candidates).all(-1)]
    return finite if pixel_range is None else np.clip(finite, *pixel_range)


def nearest(candidates: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Mean squared error of each true row to its nearest candidate (infinite without candidates)."""
    if not len(candidates):
        return np.full(len(truth), np.inf)
    best = np.full(len(truth), np.inf)
    for begin in range(0, len(candidates), 256):
        part = candidates[begin : begin + 256]
        square = (truth**2).sum(1)[:, None] + (part**2).sum(1)[None] - 2 * truth @ part.T
        best = np.minimum(best, np.maximum(square, 0).min(1) / truth.shape[1])
    return best


def table(
    recipes: Sequence[tuple[str, dict[str, object]]], dataset: str, *, kinds: Sequence[Kind] = KINDS, bins: int = 1024,
    batch: int = 64, sums: Sequence[int] = (1, 8), seed: int = 0,
) -> list[JsonObject]:  # fmt: skip
    """Every malicious model against every recipe, alone and under a sum."""
    out = []
    for recipe, changes in recipes:
        prepared = stage(
            recipe, dataset, bins=bins, batch=batch, clients=max(sums), seed=seed, changes=changes
        )
        for kind in kinds:
            for clients in sums:
                if kind == "isolate" and clients == 1:
                    continue
                out.append(asdict(steal(prepared, kind, clients=clients, batch=batch, seed=seed)))
    return out


__all__ = ["KINDS", "Stolen", "nearest", "stage", "steal", "table"]
