"""Objective perturbation: the privacy loss of a random linear term, against exact densities and direct integration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm

from fedveil.errors import UserError
from fedveil.privacy.accountants import answer
from fedveil.privacy.events import Event, Noise
from fedveil.privacy.objective import delta_of, deviation_for, gaussian_like, ridge_for


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(0, 12), st.floats(0.2, 20), st.floats(0.05, 5), st.floats(0.3, 3))
def test_the_log_ratio_of_the_densities_is_within_the_stated_loss(seed, columns, rows, deviation, ridge, length):
    """For any data, any further row and any minimiser, both directions, written out with determinants."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows + 1, columns))
    x *= length * np.minimum(1, draw.random(rows + 1) * 1.5)[:, None] / np.linalg.norm(x, axis=1, keepdims=True)
    y = draw.choice([-1.0, 1.0], rows + 1)
    theta = draw.normal(size=columns) * draw.choice([0.1, 1, 10])

    def log_density(count: int) -> tuple[float, np.ndarray]:
        share = expit(-y[:count] * (x[:count] @ theta))
        b = x[:count].T @ (y[:count] * share) - ridge * theta
        hessian = (x[:count] * (share * (1 - share))[:, None]).T @ x[:count] + ridge * np.eye(columns)
        return -float(b @ b) / (2 * deviation**2) + np.linalg.slogdet(hessian)[1], b

    (less, b_less), (more, b_more) = log_density(rows), log_density(rows + 1)
    a = length / deviation
    c = a * a / 2 + math.log1p(0.25 * length**2 / ridge)
    for gap, b in ((less - more, b_less), (more - less, b_more)):
        z = abs(float(b @ x[rows])) / (deviation * np.linalg.norm(x[rows]) + 1e-300)  # |Z|: standard normal where b is drawn
        assert gap <= a * z + c + 1e-9


@pytest.mark.parametrize(("epsilon", "deviation", "ridge"), [(0.823, 8, 3), (2, 2.5, 1), (0.1, 3, 1), (6, 1, 0.5)])
def test_delta_is_the_integral(epsilon, deviation, ridge):
    a = 1.2 / deviation
    c = a * a / 2 + math.log1p(0.25 * 1.44 / ridge)
    begins = max(0.0, (epsilon - c) / a)
    found = 2 * quad(lambda z: (1 - math.exp(epsilon - a * z - c)) * norm.pdf(z), begins, begins + 40, limit=500)[0]
    assert delta_of(epsilon, deviation, ridge, length=1.2) == pytest.approx(found, rel=1e-6, abs=1e-15)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.floats(0.05, 8), st.floats(1e-9, 1e-2), st.floats(0.5, 3))
def test_the_calibrated_deviation_keeps_the_budget_and_hardly_less_would(epsilon, delta, length):
    ridge = ridge_for(epsilon, length=length)
    deviation = deviation_for(epsilon, delta, ridge, length=length)
    assert delta_of(epsilon, deviation, ridge, length=length) <= delta
    assert delta_of(epsilon, deviation * 0.999, ridge, length=length) > delta


def test_a_ridge_that_spends_everything_is_refused():
    with pytest.raises(UserError, match="must be above"):
        deviation_for(0.1, 1e-5, 0.5, length=1.0)


@pytest.mark.parametrize("epsilon", [0.3, 0.823, 4.0])
def test_the_stated_event_has_this_epsilon_at_this_delta(epsilon):
    event = Event(Noise("gaussian", gaussian_like(epsilon, 1e-5)), relation="add-remove")
    found = answer([event], 1e-5, "pld").epsilon
    assert found == pytest.approx(epsilon, rel=2e-3) and found >= epsilon * (1 - 1e-6)
