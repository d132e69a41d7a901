"""UDP-FL's helpers: penalties, expected noise errors against simulation and quadrature, baselines."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import UserError
from fedveil.protect import udp


def test_the_penalty_grows_with_the_distance_to_the_weakest_budget() -> None:
    assert [udp.penalty(epsilon, 8.0) for epsilon in (2.0, 8.0, 4.0)] == [0.75, 0.0, 0.5]
    assert [udp.penalty(epsilon, math.inf) for epsilon in (2.0, math.inf)] == [1.0, 0.0]
    assert udp.penalty(8.0, 2.0) == udp.penalty(math.inf, 2.0) == 0.0  # it has a better model than w_max itself
    with pytest.raises(UserError, match="above 0"):
        udp.penalty(0.0, 1.0)


def staircase_draws(lam: float, nu: float, n: int, seed: int) -> np.ndarray:
    """Straight from the definition of the density, width 1."""
    draw = np.random.default_rng(seed)
    b = math.exp(-lam)
    period = draw.geometric(1 - b, n) - 1
    outer = draw.random(n) >= nu / (nu + (1 - nu) * b)
    u = draw.random(n)
    return draw.choice([-1.0, 1.0], n) * (period + np.where(outer, nu + (1 - nu) * u, nu * u))


@given(lam=st.floats(0.05, 8.0), nu=st.floats(0.02, 0.98), width=st.floats(0.1, 10.0))
def test_the_staircase_mean_is_the_integral_over_its_density(lam: float, nu: float, width: float) -> None:
    b = math.exp(-lam)
    k = np.arange(int(40 / lam) + 2)
    height = (1 - b) / (2 * width * (nu + b * (1 - nu)))
    lower = ((k + nu) ** 2 - k**2) * width**2 / 2  # integral of x over the high part of a period
    upper = ((k + 1) ** 2 - (k + nu) ** 2) * width**2 / 2
    integral = 2 * height * float((np.exp(-lam * k) * (lower + b * upper)).sum())
    assert udp.staircase_mean(lam, width, nu) == pytest.approx(integral, rel=1e-9)


@given(lam=st.floats(0.01, 20.0))
def test_at_the_optimal_shape_the_staircase_mean_is_the_known_minimum(lam: float) -> None:
    best = udp.staircase_mean(lam, 2.0)
    assert best == pytest.approx(2.0 * math.exp(lam / 2) / math.expm1(lam), rel=1e-9)
    assert best <= min(udp.staircase_mean(lam, 2.0, nu) for nu in (0.05, 0.2, 0.35, 0.5, 0.9)) * (1 + 1e-12)
    assert best <= udp.expected_l1("laplace", 1 / lam, 2.0, 1).once * (1 + 1e-12)  # never worse than Laplace


@pytest.mark.parametrize("additions", [1, 3, 25])
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "staircase"])
def test_expected_errors_agree_with_measured_ones(mechanism: str, additions: int) -> None:
    # 40k sums per case; the relative standard error of a mean of |S| is below 0.5 %; 2.5 % is 5 of them.
    n, bound, multiplier = 40_000, 0.5, 0.8
    draw = np.random.default_rng(additions)
    if mechanism == "gaussian":
        noise = draw.normal(0, multiplier * bound, (additions, n))
    elif mechanism == "laplace":
        noise = draw.laplace(0, multiplier * bound, (additions, n))
    else:
        lam = 1 / multiplier
        nu = 1 / (1 + math.exp(lam / 2))
        noise = np.stack([bound * staircase_draws(lam, nu, n, 100 * additions + i) for i in range(additions)])
    expected = udp.expected_l1(mechanism, multiplier, bound, n, additions)
    assert np.abs(noise[0]).sum() == pytest.approx(expected.once, rel=0.025)
    assert np.abs(noise).sum() == pytest.approx(expected.bound, rel=0.025)
    assert np.abs(noise.sum(0)).sum() == pytest.approx(expected.sum, rel=0.025)


@pytest.mark.parametrize("lam", [0.05, 0.3, 1.0, 4.0])
def test_one_addition_and_many_meet_the_known_limits(lam: float) -> None:
    nu = 1 / (1 + math.exp(lam / 2))
    assert udp._staircase_sum(lam, 1.0, nu, 1) == pytest.approx(udp.staircase_mean(lam, 1.0), rel=2e-3)
    draws = staircase_draws(lam, nu, 400_000, 7)
    gaussian_limit = math.sqrt(2 * 2000 / math.pi) * draws.std()  # central limit theorem
    assert udp._staircase_sum(lam, 1.0, nu, 2000) == pytest.approx(gaussian_limit, rel=0.02)
    laplace = udp.expected_l1("laplace", 1.0, 1.0, 1, 2000).sum
    assert laplace == pytest.approx(math.sqrt(2 * 2000 / math.pi * 2), rel=1e-3)


def test_the_joint_staircase_reduces_to_the_scalar_one_and_matches_simulation() -> None:
    for lam, nu in ((1.0, 0.4), (0.2, 0.5), (3.0, 0.1)):
        assert udp.expected_l1("joint-staircase", 1 / lam, 2.0, 1, nu=nu).once == pytest.approx(
            udp.staircase_mean(lam, 2.0, nu), rel=1e-9
        )
    lam, d = 1.0, 5  # radius: a uniform l1 ball of radius k + nu with weight e^-k lam (k + nu)^d
    nu = 1 / (1 + math.exp(lam / 2))
    draw = np.random.default_rng(0)
    k = np.arange(200)
    chance = np.exp(-lam * k) * (k + nu) ** d
    radius = (draw.choice(k, 200_000, p=chance / chance.sum()) + nu) * draw.random(200_000) ** (1 / d)
    assert udp.expected_l1("joint-staircase", 1.0, 1.0, d).once == pytest.approx(radius.mean(), rel=0.01)
    large = udp.expected_l1("joint-staircase", 10.0, 1.0, 100_000, 4)
    assert large.once == pytest.approx(100_000 * 10.0, rel=1e-2)  # many dimensions: d / lambda
    assert large.once <= large.sum <= large.bound


def test_nbafl_noise_follows_the_published_scales() -> None:
    c = math.sqrt(2 * math.log(1.25 / 1e-2))
    up, down = udp.nbafl_scales(50.0, 1e-2, clip=20.0, examples=100, clients=50, rounds=25, exposures=1)
    assert up == pytest.approx(c * 2 * 20 / 100 / 50)
    assert down == pytest.approx(2 * c * 20 * math.sqrt(25**2 - 50) / (100 * 50 * 50))
    assert udp.nbafl_scales(50.0, 1e-2, 20.0, 100, 50, 7, 1)[1] == 0  # 7 < sqrt(50): no downlink noise
    assert udp.nbafl_scales(50.0, 1e-2, 20.0, 100, 50, 25)[1] == 0  # every upload seen: the uplink covers it
    client = udp.nbafl_scales(50.0, 1e-2, 20.0, 1, 50, 25, 1)[0]
    assert client == pytest.approx(100 * up)
    with pytest.raises(UserError):
        udp.nbafl_scales(0.0, 1e-2, 20.0, 100, 50, 25)


def test_the_closed_form_is_the_printed_one() -> None:
    w, v = np.array([1.0, -2.0]), np.array([0.5, 3.0])
    theta = udp.closed_form_bend(w, v, 10.0)
    assert theta == pytest.approx([0.12 + 1.1 - 0.05, 0.12 - 2.2 - 0.3])
    assert udp.closed_form_update(w, v, 0.0, 10.0) == pytest.approx(v)
    assert udp.closed_form_update(w, v, 1.0, 10.0) == pytest.approx(w)
    # It is meant to make the mean step over r ~ U(0, 1) equal 1/L. It does not; 3/L + 2w - v would.
    r = ((np.arange(2000) + 0.5) / 2000)[:, None]
    for bend, holds in ((theta, False), (3 / 10.0 + 2 * w - v, True)):
        step = ((1 - r) ** 2 * v + 2 * (r - r**2) * bend + r**2 * w - w).mean(axis=0)
        assert bool(np.abs(step - 0.1).max() < 1e-6) is holds
