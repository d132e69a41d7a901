"""Attacks on what the server of a secure sum receives of one client: they get what a guess gets, and work without masks.

Every trial has masks and noise of its own, as every attempt has. A server that lies about who survived is in
tests/secure_sum/test_coalition.py and test_refusals.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedveil.federation import loop
from fedveil.federation.config import make_config
from fedveil.federation.round import start
from fedveil.federation.view import view

TRIALS = 40


@pytest.fixture(scope="module")
def prepared():
    return loop.prepare(make_config({
        "recipe": "sum-cdp", "dataset": "cancer", "clients": 4, "partition": "iid", "rounds": 1, "local_steps": 1,
        "batch_size": 100, "features": "unit:constant=1", "model": "logistic", "model_options": {"bias": False},
        "secure_sum": True, "sum_threshold": 3, "protect": {"sampling": "full", "cohort": "all", "sigma": 4.0},
    }))  # fmt: skip


def _received(prepared, client: int, row: int, trial: int, masked: bool) -> np.ndarray:
    """What arrives of a client whose batch is this one row; without masks the update as the client made it, without noise."""
    task = replace(prepared.task, root=trial)
    state = start(task, prepared.initial)
    return view(task, state, "type0" if masked else "type1", client, np.array([row])).values[0].astype(np.float64)


def _leaked(prepared, masked: bool) -> float:
    """Mean |cosine| between a row and the leading direction of the linear layer's gradient, over trials."""
    task, found = prepared.task, []
    for trial in range(TRIALS):
        row = int(task.rows(0)[trial])
        gradient = _received(prepared, 0, row, trial, masked).reshape(2, -1)
        guess = np.linalg.svd(gradient, full_matrices=False)[2][0]
        found.append(abs(float(guess @ task.x[row])) / float(np.linalg.norm(task.x[row])))
    return float(np.mean(found))


def test_gradient_leakage_from_a_masked_upload_is_a_guess(prepared):
    """Random directions in 31 dimensions: |cosine| 0.14 in the mean, deviation 0.11 each; five of the mean's above: 0.23."""
    assert prepared.task.x.shape[1] == 31
    assert _leaked(prepared, masked=False) > 0.99
    assert _leaked(prepared, masked=True) < 0.23


def _area(members: list[float], others: list[float]) -> float:
    return float(np.mean([a > b for a in members for b in others]))


def _membership(prepared, masked: bool) -> float:
    """Area under the curve of "is this row in the batch", with the row's own gradient known to the attacker."""
    task = prepared.task
    target, scores = int(task.rows(0)[0]), {True: [], False: []}
    known = _received(prepared, 0, target, 0, False)
    for trial in range(TRIALS):
        for member in (True, False):
            row = target if member else int(task.rows(0)[1 + trial])
            seen = _received(prepared, 0, row, 2 * trial + member, masked)
            scores[member].append(float(seen @ known))
    return _area(scores[True], scores[False])


def test_membership_in_a_masked_upload_is_a_coin(prepared):
    """Two times 40 scores of equal law: the area is 0.5 with deviation 0.065; 0.17 to 0.83 but for a chance of 6e-7."""
    assert _membership(prepared, masked=False) > 0.9
    assert abs(_membership(prepared, masked=True) - 0.5) < 0.33
