"""Bounds over many histories: what covers them really covers them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from fedveil.privacy.accountants import answer
from fedveil.privacy.events import Event, Noise, Sampling
from fedveil.privacy.ledger.worst import GRID, Histories, Judge, _columns, covering, worst

DELTA = 1e-5
SAMPLED = [(sigma, rate) for sigma in (1.0, 2.0, 5.0) for rate in (0.02, 0.1)]
EVENTS = (
    *(Event(Noise("gaussian", sigma), Sampling("poisson", rate)) for sigma, rate in SAMPLED),
    Event(Noise("gaussian", 20.0)),
)


def histories(counts: list[list[int]], shared: list[int] | None = None) -> Histories:
    own = csr_array(np.array(counts, dtype=np.int64))
    return Histories(EVENTS, own, np.array(shared or [0] * len(EVENTS), dtype=np.int64))


def cost(uses: dict[Event, int]) -> float:
    """Epsilon by dp-accounting's RDP: an independent, monotone measure of a history."""
    oracle = RdpAccountant([2, 3, 4, 6, 8, 12, 16, 24, 32, 64])
    for event, times in uses.items():
        step = GaussianDpEvent(event.noise.multiplier)
        oracle.compose(
            step if event.sampling.kind == "none" else PoissonSampledDpEvent(event.sampling.rate, step), times
        )
    return oracle.get_epsilon(DELTA)


rows = st.lists(st.lists(st.integers(0, 6), min_size=7, max_size=7), min_size=2, max_size=4)


@settings(max_examples=25, deadline=None)
@given(rows, st.integers(1, 2))
def test_a_covering_history_costs_at_least_any_sum_of_copies(counts: list[list[int]], copies: int) -> None:
    cover = cost(covering(histories(counts), copies).uses(0))
    for chosen in combinations(counts, copies):
        total = np.sum(chosen, axis=0)
        assert cost({event: int(n) for event, n in zip(EVENTS, total, strict=True) if n}) <= cover * (
            1 + 1e-9
        )


@settings(max_examples=15, deadline=None)
@given(rows, st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_the_worst_is_never_below_a_single_history(counts: list[list[int]], shared: list[int]) -> None:
    many = histories(counts, shared)
    found = worst(Judge(), many, DELTA, "pld").epsilon
    assert found is not None
    each = []
    for row in range(len(counts)):
        events = [Event(e.noise, e.sampling, steps=n) for e, n in many.uses(row).items()]
        each.append(answer(events, DELTA).epsilon if events else 0.0)
    assert max(each) <= found * (1 + 1e-6) + 1e-9  # type: ignore[type-var]


def test_the_quick_bound_is_the_known_renyi_bound() -> None:
    """Integer orders of the Poisson-sampled Gaussian: dp-accounting computes them by another route."""
    one_each = np.eye(len(EVENTS), dtype=np.int64) * 100
    quick = Judge().quick(Histories(EVENTS, csr_array(one_each), np.zeros(len(EVENTS), np.int64)), DELTA)
    assert quick is not None
    for event, bound in zip(EVENTS, quick, strict=True):
        orders = [*range(2, 33), 36, 40, 48, 56, 64, 96, 128, 256]
        oracle = RdpAccountant(orders)
        step = GaussianDpEvent(event.noise.multiplier)
        oracle.compose(
            step if event.sampling.kind == "none" else PoissonSampledDpEvent(event.sampling.rate, step), 100
        )
        assert bound == pytest.approx(oracle.get_epsilon(DELTA), rel=1e-6)


def test_events_that_are_not_plain_gaussian_have_no_quick_bound() -> None:
    for event in (
        Event(Noise("laplace", 2.0)),
        Event(Noise("gaussian", 2.0), Sampling("poisson", 0.1), "replace-one"),
        Event(Noise("gaussian", 2.0), Sampling("fixed", batch=5, population=50), "replace-one"),
    ):
        one = Histories((event,), csr_array([[1]]), np.zeros(1, np.int64))
        assert Judge().quick(one, DELTA) is None


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 900), st.floats(0.3, 50), st.floats(1.0001, 30))
def test_rounding_never_raises_a_multiplier_and_keeps_few(count: int, low: float, ratio: float) -> None:
    sigmas = np.geomspace(low, low * ratio, count)
    events = [Event(Noise("gaussian", float(s)), Sampling("poisson", 0.01)) for s in sigmas]
    columns, place = _columns(events)
    rounded = np.array([columns[i].noise.multiplier for i in place])
    assert (rounded <= sigmas).all() and len(set(rounded)) <= max(GRID, 1)
    if count <= GRID:
        assert (rounded == sigmas).all()
    else:
        assert (rounded >= sigmas * (1 - 2.2 * np.log(ratio) / GRID) * (1 - 2e-4)).all()
    again, place_again = _columns([columns[i] for i in place])
    assert [again[i] for i in place_again] == [columns[i] for i in place]


def test_a_mechanism_without_a_known_order_is_never_rounded() -> None:
    events = [Event(Noise("staircase", 1 + i / 1000)) for i in range(GRID + 50)]
    columns, _ = _columns(events)
    assert columns == tuple(events)


def sampled(sigma: float, ratio: float, tail: float, rate: float = 0.02) -> Event:
    return Event(Noise("gaussian", sigma, ratio=ratio, tail=tail), Sampling("poisson", rate))


def test_the_quick_bound_counts_the_samplers_errors() -> None:
    exact, drawn = sampled(2.0, 0.0, 0.0), sampled(2.0, 1e-9, 1e-12)
    counts, none = csr_array(np.array([[100]])), np.zeros(1, np.int64)
    plain, raised = (Judge().quick(Histories((e,), counts, none), DELTA) for e in (exact, drawn))
    assert plain is not None and raised is not None
    assert raised[0] >= plain[0] + 2 * 100 * 1e-9
    assert raised[0] >= answer([replace(drawn, steps=100)], DELTA, "rdp").epsilon * (1 - 1e-9)
    lost = Judge().quick(Histories((sampled(2.0, 1e-7, 0.0),), counts, none), DELTA)
    assert lost is not None and np.isinf(lost[0])
    assert worst(Judge(), Histories((sampled(2.0, 1e-7, 0.0),), counts, none), DELTA, "pld", 1e9).epsilon is None


def test_events_that_are_merged_keep_the_largest_sampler_error() -> None:
    good, bad = sampled(2.0, 1e-12, 1e-20), sampled(2.5, 1e-9, 1e-15)
    both = Histories((good, bad), csr_array(np.array([[3, 0], [0, 3]])), np.zeros(2, np.int64))
    assert all(e.noise.ratio == 1e-9 and e.noise.tail == 1e-15 for e, n in covering(both).uses(0).items() if n)
    columns, place = _columns([good, replace(good, noise=replace(good.noise, ratio=1e-9, tail=1e-15))])
    assert len(columns) == 1 and place.tolist() == [0, 0]
    assert (columns[0].noise.ratio, columns[0].noise.tail) == (1e-9, 1e-15)
