"""A budget under noise that is chosen after what was seen: the best order is paid for."""

import math

import numpy as np
import pytest

from fedveil.privacy import renyi
from fedveil.privacy.accountants import answer
from fedveil.privacy.events import Event, Noise, Sampling
from fedveil.privacy.filters import ORDERS, TAILS, adaptive


def gaussian(sigma, rate=1.0, steps=1):
    return Event(Noise("gaussian", sigma), Sampling("poisson", rate) if rate < 1 else Sampling(), steps=steps)


@pytest.mark.parametrize("event", [gaussian(5.0, 1.0, 20), gaussian(1.5, 0.02, 500), gaussian(40.0)])
def test_the_filter_costs_more_than_the_best_order_for_free_and_not_much_more(event):
    for delta in (1e-5, 1e-9):
        free, paid = answer([event], delta, "rdp").epsilon, adaptive([event], delta).epsilon
        assert free < paid < 1.35 * free


def test_each_order_gets_its_share_of_delta():
    event = gaussian(3.0, 0.1, 50)
    sums = 50 * renyi.poisson(event.noise, 0.1, ORDERS)
    share = 1e-6 * (1 - TAILS) / len(ORDERS)
    least = min(renyi.to_epsilon((a,), np.array([s]), share) for a, s in zip(ORDERS, sums, strict=True))
    assert adaptive([event], 1e-6).epsilon == pytest.approx(least)


def test_the_filter_counts_the_samplers_errors():
    exact, poisson = gaussian(3.0, 0.1, 50), Sampling("poisson", 0.1)
    sampled = Event(Noise("gaussian", 3.0, ratio=1e-9, tail=1e-18), poisson, steps=50)
    assert adaptive([sampled], 1e-6).epsilon == pytest.approx(adaptive([exact], 1e-6).epsilon + 2 * 50 * 1e-9, abs=1e-12)
    assert adaptive([sampled], 0.0).verdict == "none"
    many = Event(Noise("gaussian", 3.0, ratio=1e-7), poisson, steps=50)
    assert adaptive([many], 1e-6).verdict == "none"


def test_a_tail_is_counted_where_the_neighbour_puts_it():
    """Gaussian noise cut off at 10 deviations: what reaches beyond from one deviation nearer is below what is counted."""
    from scipy.stats import norm

    from fedveil.privacy.accountants import _kind
    from fedveil.privacy.filters import _bad

    for sigma in (0.5, 1.0, 3.0):
        event = gaussian(sigma)
        shifted = norm.sf(10) + norm.sf(10 - 1 / sigma)
        counted = _bad(_kind(event.noise, event.sampling, event.relation, event.unit), 2 * norm.sf(10))
        assert shifted <= counted < 1e5 * shifted


def test_more_releases_never_cost_less_and_pure_epsilons_add_up():
    values = [adaptive([gaussian(4.0, 0.1, 10)] * n, 1e-6).epsilon for n in (1, 2, 3, 5)]
    assert values == sorted(values)
    laplace = Event(Noise("laplace", 4.0, "l1"), steps=3)
    assert adaptive([laplace], 0.0).epsilon == pytest.approx(0.75)
    assert adaptive([gaussian(4.0)], 0.0).verdict == "none"


def test_an_adversary_who_picks_the_noise_after_each_release_stays_within_the_budget():
    """Simulated: noise is large while the loss falls and small while it rises; delta is estimated from 40,000 paths by
    E[(1 - e^(eps - L))+], whose standard error is below a tenth of the delta asked for (a fixed seed)."""
    rng, budget, delta = np.random.default_rng(5), 1.0, 1e-2
    paths = 40_000
    loss, total = np.zeros(paths), np.zeros((paths, len(ORDERS)))
    limits = np.array([_limit(a, budget, delta / len(ORDERS)) for a in ORDERS])
    for _ in range(60):
        sigma = np.where(loss > 0.1, 4.0, 12.0)
        cost = np.array(ORDERS) / (2 * sigma[:, None] ** 2)
        go = ((total + cost) <= limits).any(axis=1)
        draw = rng.normal(size=paths)
        loss = np.where(go, loss + 0.5 / sigma**2 + draw / sigma, loss)
        total = np.where(go[:, None], total + cost, total)
    over = loss > budget
    assert over.any() and np.where(over, -np.expm1(budget - loss), 0).mean() <= delta


def _limit(order, budget, delta):
    """The largest divergence that the conversion takes to the budget."""
    return budget - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)
