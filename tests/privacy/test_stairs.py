"""Staircase noise with steps of any width: against sums over plain grids, searches for worse changes, and its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedveil.errors import UserError
from fedveil.privacy import stairs
from fedveil.privacy.accountants import answer
from fedveil.privacy.events import Event, Noise, Sampling
from fedveil.privacy.mechanisms import Staircase
from fedveil.privacy.vectors import vector_guarantee

ORDERS = np.array([1.5, 2.0, 8.0, 32.0])


def by_grid(lam: float, nu: float, shift: float, order: float) -> float:
    """The divergence as a sum over a fine grid that contains every jump (nu and shift are multiples of 1/200)."""
    x = (np.arange(-150 * 200, 150 * 200) + 0.5) / 200

    def density(x):
        k = np.floor(np.abs(x))
        return np.exp(-lam * (k + (np.abs(x) - k >= nu)))

    p, q = density(x - shift), density(x)
    p, q = p / p.sum(), q / q.sum()
    return float(np.log(np.sum(p * (p / q) ** (order - 1))) / (order - 1))


@pytest.mark.parametrize("shift", [0.3, 1.0, 1.25, 2.8, 7.1])
def test_the_exact_divergence_of_any_shift_is_the_sum_over_a_grid(shift):
    law = Staircase(0.3, 0.45)
    found = np.array([law.renyi(a, shift) for a in ORDERS])
    np.testing.assert_allclose(found, [by_grid(0.3, 0.45, shift, a) for a in ORDERS], rtol=1e-6)


@pytest.mark.parametrize("width", [2.0, 0.5, 0.2, 0.02])
def test_no_change_of_the_vector_costs_more_than_the_bound(width):
    draw = np.random.default_rng(0)
    lam, dimension = 0.4, 6
    law, bound = Staircase(lam), stairs.renyi(ORDERS, lam, None, width, dimension)
    for trial in range(150):
        used = int(draw.integers(1, dimension + 1))
        change = np.abs(draw.normal(size=used)) if trial % 2 else np.ones(used)
        change /= np.linalg.norm(change) * width
        cost = sum(np.array([law.renyi(a, float(s)) for a in ORDERS]) for s in change)
        assert np.all(cost <= bound * (1 + 1e-9))


def test_steps_as_wide_as_the_bound_give_the_known_value():
    for d in (2, 30, 5000):
        usual = vector_guarantee(Noise("staircase", 3.0, dimension=d)).renyi(ORDERS)
        np.testing.assert_allclose(stairs.renyi(ORDERS, 1 / 3, None, 1.0, d), usual, rtol=0.02)
        assert np.all(stairs.renyi(ORDERS, 1 / 3, None, 1.0, d) >= usual * (1 - 1e-9))


@pytest.mark.parametrize("d", [100, 25_000, 1_000_000])
def test_narrow_steps_cost_what_gaussian_noise_of_half_the_variance_costs(d):
    """Laplace of scale m has variance 2 m^2 and at most Gaussian's cost at sigma = m; steps of 1/sqrt(d) add a quarter."""
    m = 3.0
    for times, more in ((1, 1.25), (4, 1.02)):
        width = 1 / (times * math.sqrt(d))
        found = vector_guarantee(Noise("staircase", m, dimension=d, width=width)).renyi(ORDERS)
        gaussian = ORDERS / (2 * m**2)
        assert np.all(found <= gaussian * (more + 0.06)) and np.all(found >= gaussian * 0.8)
        law = Staircase(width / m, None, width)
        assert law.variance() == pytest.approx(2 * m**2, rel=0.01)


def test_a_run_of_narrow_stairs_spends_nearly_what_laplace_spends():
    def spent(noise):
        return answer([Event(noise, Sampling("poisson", 0.05), steps=300)], 1e-5, "rdp").epsilon

    laplace = spent(Noise("laplace", 1.5, dimension=20_000))
    narrow = spent(Noise("staircase", 1.5, dimension=20_000, width=1 / math.sqrt(20_000) / 4))
    wide = spent(Noise("staircase", 1.5, dimension=20_000))
    assert narrow == pytest.approx(laplace, rel=0.06) and wide > 5 * laplace


def test_a_width_is_refused_where_it_means_nothing():
    for noise in (
        Noise("gaussian", 1.0, width=0.5),
        Noise("staircase", 1.0, norm="l1", dimension=3, width=0.5),
    ):
        with pytest.raises(UserError, match="width"):
            vector_guarantee(noise)
    with pytest.raises(UserError):
        vector_guarantee(Noise("staircase", 1.0, dimension=3, width=0.0))
