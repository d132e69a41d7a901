"""Objective perturbation in a ledger: the solver against SciPy's, a nominal row with its reason, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import fedveil as fv
from fedveil.errors import UserError
from fedveil.federation.objective import bounded_rows, minimised, objective_perturbation
from fedveil.keys import derive
from fedveil.privacy.ledger import Ledger
from fedveil.protect.noise import normals


def rows(n: int = 600, columns: int = 3, classes: int = 2, seed: int = 0):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, columns)).astype(np.float32) / 2
    y = (x @ draw.normal(size=(columns, classes))).argmax(1)
    return fv.dataset(x[: n // 2], y[: n // 2], x[n // 2 :], y[n // 2 :], classes=classes)


def test_the_head_is_the_minimiser_of_the_objective_with_the_drawn_term(tmp_path):
    own = rows()
    found = objective_perturbation(own, epsilon=1.0, out=tmp_path / "r", seed=5)
    shift = found.deviation * normals(derive(5, "objective")[:16], 0, 4).astype(float)  # the streams of noise that protects data
    wide = np.concatenate([own.x, np.ones((len(own.x), 1))], 1).astype(np.float64)
    wide *= np.minimum(1, np.sqrt(2) / np.linalg.norm(wide, axis=1, keepdims=True))
    signs = 2.0 * own.y - 1

    def objective(theta):
        return np.logaddexp(0, -signs * (wide @ theta)).sum() + found.ridge / 2 * theta @ theta + shift @ theta

    wanted = minimize(objective, np.zeros(4), method="BFGS", options={"gtol": 1e-9})
    assert np.allclose(found.weights, wanted.x, atol=1e-5) and found.gradient_norm < 1e-5
    out = found.module(torch.as_tensor(own.x_test)).argmax(1).numpy()
    assert found.accuracy > 0.7 and (out == own.y_test).mean() == pytest.approx(found.accuracy, abs=0.01)


def test_rows_keep_the_length():
    found = bounded_rows(np.array([[1e30, -1e30], [0.0, 0.0], [3.0, 4.0]]), 0.8)
    assert (np.linalg.norm(found, axis=1) <= 0.8).all()


def test_the_row_is_nominal_says_why_and_is_charged_first(tmp_path):
    found = objective_perturbation(rows(), epsilon=0.823, out=tmp_path / "r")
    one = next(row for row in found.ledger if (row["observer"], row["unit"]) == ("server", "example"))
    assert one["verdict"] == "nominal" and one["epsilon"] == pytest.approx(0.823, rel=2e-3) and "exact minimiser" in one["reason"]
    assert not any(row["verdict"] == "sound" for row in found.ledger)
    assert "gradient" not in (tmp_path / "r" / "result.json").read_text("utf-8").partition('"ledger"')[0]  # it was not charged
    with Ledger.read(tmp_path / "r" / "ledger.jsonl") as ledger:
        assert any(row.verdict == "nominal" for row in ledger.table())
    with pytest.raises(UserError, match="already holds"):
        objective_perturbation(rows(), epsilon=0.823, out=tmp_path / "r")


def test_the_solver_says_where_it_did_not_settle():
    theta, left = minimised(np.ones((3, 1)), np.ones(3), 1e-6, np.zeros(1))
    assert np.isfinite(theta).all() and left < 1e-6


@pytest.mark.parametrize(
    ("data", "settings", "said"),
    [(rows(classes=3), {}, "two classes"), (rows(), {"model": "papers-mlp"}, "convex"), (rows(), {"loss": "huber"}, "curvature"),
     (rows(), {"clients": 3}, "one data holder"), (rows(), {"ridge": 1e-3}, "must be above"), (rows(), {"epsilon": 0}, "epsilon"),
     (rows(), {"length": -1}, "length"), (rows(), {"delta": 0}, "delta")],
)  # fmt: skip
def test_what_the_proof_does_not_cover_is_refused_and_nothing_is_written(data, settings, said, tmp_path):
    with pytest.raises(UserError, match=said):
        objective_perturbation(data, **{"epsilon": 1.0, "out": tmp_path / "r", **settings})
    assert not (tmp_path / "r").exists()


def test_a_solver_that_does_not_settle_is_charged_before_anybody_hears_of_it(tmp_path, monkeypatch):
    def never(*_):
        raise UserError("did not settle")

    monkeypatch.setattr("fedveil.federation.objective.minimised", never)
    with pytest.raises(UserError, match="settle"):
        objective_perturbation(rows(), epsilon=1.0, out=tmp_path / "run")
    assert len((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()) == 2  # header and release
