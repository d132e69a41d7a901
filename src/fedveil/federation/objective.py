"""Logistic regression of one data holder by objective perturbation, charged in a ledger: one release, no rounds.

Central only: the objective is a sum over all rows, which one process sees. Federated, and with a promise that holds: the model
`adassp`, which releases sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.special import expit
from torch import nn

from fedveil.data.rows import Dataset
from fedveil.errors import UserError
from fedveil.federation import folder as run_folder
from fedveil.federation import store
from fedveil.jsons import JsonObject
from fedveil.keys import derive, entropy
from fedveil.models.backbones import named_in
from fedveil.privacy import checks
from fedveil.privacy.events import Claim, Event, Noise, Release
from fedveil.privacy.ledger import Header
from fedveil.privacy.objective import deviation_for, gaussian_like, ridge_for
from fedveil.protect.law import Gaussian
from fedveil.protect.place import AFTER_UPLOAD, none

NOT_EXACT = (
    "objective perturbation: its proof is about the exact minimiser of a continuous random objective; this one was found in "
    "floating point, with float noise (stated as the Gaussian mechanism of the same epsilon at this delta)"
)
SETTLED = 1e-9  # norm of the gradient, per row and unit of length


@dataclass(frozen=True, eq=False)
class Solved:
    """The released head (rows of two classes), what was drawn with, and the rows of the ledger."""

    module: nn.Linear
    weights: np.ndarray
    deviation: float
    ridge: float
    gradient_norm: float  # of the perturbed objective at `weights`; for whoever holds the rows, no part of the release
    accuracy: float
    ledger: Sequence[JsonObject]


def objective_perturbation(
    data: Dataset, *, epsilon: float, delta: float = 1e-5, length: float = 2**0.5, ridge: float | None = None, out: str | Path,
    model: str = "logistic", loss: str = "cross-entropy", clients: int = 1, seed: int = 0, secure_noise: bool = False,
) -> Solved:  # fmt: skip
    """Train a logistic head on all rows at once, with a random linear term in its objective, and charge it in `out`.

    Rows get a constant column and are cut to `length`. ridge: of the summed objective (default: its part of the privacy loss is a
    tenth of epsilon). Formal guarantee: that of `privacy.objective` for the exact minimiser; the row is `nominal`, because
    no solver in floating point finds it.
    """
    _check(data, model, loss, clients)
    checks.positive("epsilon", epsilon)
    checks.positive("delta", checks.delta(delta))
    checks.positive("length", length)
    ridge = ridge_for(epsilon, length=length) if ridge is None else checks.positive("ridge", ridge)
    deviation = deviation_for(epsilon, delta, ridge, length=length)
    rows, signs = bounded_rows(data.x, length), 2.0 * data.y - 1
    key = derive(entropy() if secure_noise else seed, "objective")[:16]
    shift = Gaussian().draw(key, 0, rows.shape[1], deviation, 0.0).astype(np.float64)
    event = Event(Noise("gaussian", gaussian_like(epsilon, delta)), relation="add-remove")
    claims = [Claim(observer, "example", "nominal", NOT_EXACT, event) for observer in AFTER_UPLOAD]
    claims += [none(observer, "client", "there is one data holder, and nothing hides it") for observer in AFTER_UPLOAD]
    claims += [none("client-process", unit, "rows are in the memory of whoever solves") for unit in ("example", "client")]  # type: ignore[arg-type]
    target = Path(out)
    with ExitStack() as stack:
        stack.enter_context(run_folder.hold(target))
        if (target / "ledger.jsonl").exists():
            raise UserError(f"{target} already holds a ledger; choose another folder")
        kept = {"sizes": (len(rows),), "planned_rounds": 1, "config": "objective perturbation", "public": named_in(data.notes)}
        header = Header(delta, 1, simulated=not secure_noise, **kept)  # type: ignore[arg-type]
        ledger = stack.enter_context(run_folder.open_ledger(target, lambda: header))
        # Before the solver runs: whether it settles depends on the rows.
        ledger.spend(Release(1, (((0,), tuple(claims)),)))
        weights, left = minimised(rows, signs, ridge, shift)
        told = [asdict(row) for row in ledger.table()]
    module = _layer(weights)
    right = float(((bounded_rows(data.x_test, length) @ weights > 0) == data.y_test).mean()) if len(data.y_test) else float("nan")
    facts = {"test_accuracy": right, "deviation": deviation, "ridge": ridge, "ledger": told}  # no noise is on the gradient
    store.write_json(target / "result.json", facts)
    return Solved(module, weights, deviation, ridge, left, right, told)


def _check(data: Dataset, model: str, loss: str, clients: int) -> None:
    """Refuse what the proof does not cover."""
    if clients != 1:
        raise UserError("objective perturbation is for one data holder; for several, model = adassp releases sums")
    if model != "logistic":
        raise UserError(f"objective perturbation needs a convex objective: model = logistic, not {model}")
    if loss != "cross-entropy":
        raise UserError(f"objective perturbation needs a slope and a curvature that are known: loss = cross-entropy, not {loss}")
    if data.task != "classification" or data.classes != 2:
        raise UserError("objective perturbation needs two classes; for more, and for numbers, use model = adassp")


def bounded_rows(x: np.ndarray, length: float) -> np.ndarray:
    """Rows with a constant column, cut to `length` (a little less, for rounding), float64."""
    rows = np.concatenate([np.reshape(x, (len(x), -1)), np.ones((len(x), 1))], 1).astype(np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    limit = length * (1 - 1e-9)
    return rows * np.minimum(1.0, limit / np.maximum(norms, 1e-300))


def minimised(rows: np.ndarray, signs: np.ndarray, ridge: float, shift: np.ndarray) -> tuple[np.ndarray, float]:
    """The minimiser of Σ log(1 + exp(-sign row·θ)) + ridge/2 |θ|² + shift·θ by Newton's method with halved steps, and the norm
    of the gradient there. UserError if it does not settle."""
    theta = np.zeros(rows.shape[1])

    def value(at: np.ndarray) -> float:
        return float(np.logaddexp(0.0, -signs * (rows @ at)).sum() + ridge / 2 * at @ at + shift @ at)

    def slope(at: np.ndarray) -> np.ndarray:
        return np.asarray(-rows.T @ (signs * expit(-signs * (rows @ at))) + ridge * at + shift)

    settled = SETTLED * max(1.0, float(np.abs(rows).sum()))
    for _ in range(200):
        gradient = slope(theta)
        if np.linalg.norm(gradient) <= settled:
            break
        share = expit(rows @ theta)
        hessian = (rows * (share * (1 - share))[:, None]).T @ rows + ridge * np.eye(len(theta))
        step, size = np.linalg.solve(hessian, gradient), 1.0
        while size > 1e-12 and value(theta - size * step) > value(theta) - 1e-4 * size * float(gradient @ step):
            size /= 2
        theta = theta - size * step
    left = float(np.linalg.norm(slope(theta)))
    if not left <= 100 * settled:
        raise UserError("objective perturbation: the solver did not settle; use a larger ridge")
    return theta, left


def _layer(weights: np.ndarray) -> nn.Linear:
    """The head for two classes: (-score, score) / 2, whose softmax is the fitted probability."""
    layer = nn.Linear(len(weights) - 1, 2)
    with torch.no_grad():
        both = torch.as_tensor(np.stack([-weights, weights]) / 2, dtype=torch.float32)
        layer.weight.copy_(both[:, :-1])
        layer.bias.copy_(both[:, -1])
    return layer


