"""What a node checks about a model before it trains it, as its contract says, and what it remembers for that.

    before_training   raises `Refused`; nothing is charged and no data is opened
    remember          the model of a charged round and the size of the upload, for the next round's `change`

Formal guarantee: decisions use the request, the contract, and earlier requests and uploads of the same run, which the server
knows; never private rows. So a refusal tells nothing, and no check lowers an epsilon.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedveil.flower import books
from fedveil.flower.contract import Contract, Refused
from fedveil.flower.request import Request

if TYPE_CHECKING:
    from fedveil.federation.loop import Prepared
    from fedveil.federation.round import State

KEPT_RUNS = 8  # models of so many runs are remembered
FOLDER = "models"


@dataclass(frozen=True, eq=False)
class Remembered:
    """The model that this node trained last in a run, and the norm of the largest update that it sent there."""

    round: int
    weights: np.ndarray
    largest: float | None


def before_training(prepared: Prepared, state: State, request: Request, contract: Contract, home: Path) -> None:
    """Raise `Refused` for a model that the contract's checks do not let through."""
    from fedveil.federation import checks

    task = prepared.task
    allowed = [m for m in contract.models if m.name == request.model and m.architecture]
    if allowed and checks.architecture_digest(task.module, task.layout) not in {
        m.architecture for m in allowed
    }:
        raise Refused(
            "contract: the model is another net than the owner allowed (its layers or their shapes differ)"
        )
    wrong: list[str] = []
    if request.round == 0 and not contract.legacy:
        wrong = checks.first_model(state.weights, prepared.initial)
    if not wrong and contract.checks.structure:
        low, high = _range(contract, prepared)
        wrong = checks.structure(
            state.weights, task.module, task.layout, prepared.dataset.shape, low=low, high=high
        )
    if not wrong and contract.checks.change and request.round > 0:
        wrong = _moved(prepared, state, request, home)
    if wrong:
        raise Refused(f"contract: {wrong[0]}")


def _range(contract: Contract, prepared: Prepared) -> tuple[float, float]:
    """The public range of inputs; tables are mapped to [-1, 1]."""
    if contract.data is None:
        return prepared.dataset.pixel_range or (-1.0, 1.0)
    return (-1.0, 1.0) if contract.data.columns else contract.data.range


def _moved(prepared: Prepared, state: State, request: Request, home: Path) -> list[str]:
    """Did the model move further than the rounds since this node saw it last can have moved it? A node that sees the run for
    the first time, or an earlier round again (a server that was continued), counts from the agreed first model."""
    from fedveil.federation import checks

    kept = recall(home, request.run, prepared.task.layout.size)
    if kept is None or kept.round >= request.round:
        kept = Remembered(0, prepared.initial, None if kept is None else kept.largest)
    allowed = checks.path_limit(prepared.task, state, range(kept.round, request.round), kept.largest)
    return checks.change(kept.weights, state.weights, allowed)


def remember(home: Path, request: Request, weights: np.ndarray, update: np.ndarray | None = None) -> None:
    """Keep the model of a charged round, and the norm of an upload that the server has got. Never raises."""
    try:
        before = recall(home, request.run, weights.size)
        largest = [] if before is None or before.largest is None else [before.largest]
        if update is not None and np.isfinite(norm := float(np.linalg.norm(update.astype(np.float64)))):
            largest.append(norm)
        folder = home / FOLDER
        books.private_folder(folder)
        temporary = folder / f".{os.getpid()}.tmp"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb") as file:
            np.savez(file, round=request.round, weights=weights.astype(np.float32), largest=np.array(largest))
        os.replace(temporary, _path(home, request.run))
        for old in sorted(folder.glob("*.npz"), key=lambda p: p.stat().st_mtime)[:-KEPT_RUNS]:
            old.unlink(missing_ok=True)
    except (OSError, ValueError) as wrong:
        books.log(home, f"the model of round {request.round} is not remembered: {wrong}")


def recall(home: Path, run: str, size: int) -> Remembered | None:
    """What is remembered of a run; None if there is nothing, or nothing readable of this size."""
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError), np.load(_path(home, run)) as kept:
        weights, largest = kept["weights"], kept["largest"]
        if weights.shape == (size,) and weights.dtype == np.float32:
            return Remembered(int(kept["round"]), weights, float(largest.max()) if largest.size else None)
    return None


def _path(home: Path, run: str) -> Path:
    return home / FOLDER / f"{hashlib.sha256(run.encode()).hexdigest()[:32]}.npz"
