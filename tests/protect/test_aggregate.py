"""Aggregation rules against plain references on a quadratic problem, and independence of chunking."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil.errors import UserError
from fedveil.models.layout import Layout
from fedveil.protect import aggregate as agg

DRAW = np.random.default_rng(8)
CLIENTS, SIZE, STEPS, RATE = 5, 6, 4, 0.05
CURVATURE = DRAW.uniform(0.5, 2.0, (CLIENTS, SIZE))  # client i: 1/2 sum curvature * (w - centre)^2
CENTRE = DRAW.normal(0, 3.0, (CLIENTS, SIZE))
OPTIMUM = (CURVATURE * CENTRE).sum(0) / CURVATURE.sum(0)


def local_update(
    client: int, start: np.ndarray, control: np.ndarray | float = 0.0, proximal: float = 0.0
) -> np.ndarray:
    w = start.astype(np.float64).copy()
    for _ in range(STEPS):
        w -= RATE * (CURVATURE[client] * (w - CENTRE[client]) + control + proximal * (w - start))
    return w - start


def chunked(updates: np.ndarray, size: int) -> list[np.ndarray]:
    return [updates[i : i + size] for i in range(0, len(updates), size)]


@pytest.mark.parametrize("kind", agg.KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_results_do_not_depend_on_chunk_size_to_the_last_bit(kind: str, chunk: int) -> None:
    draw = np.random.default_rng(1)
    updates, start = draw.normal(size=(17, 30)).astype(np.float32), draw.normal(size=30).astype(np.float32)
    layout = Layout(("a", "b"), ((10,), (20,)), ("x", "y"), (0, 1))
    more = dict(clients=list(range(17)), population=40, steps=5, learning_rate=0.1, layout=layout)
    whole, state = agg.aggregate(kind, agg.EMPTY, start, updates, **more)
    parts, other = agg.aggregate(kind, agg.EMPTY, start, chunked(updates, chunk), **more)
    assert whole.dtype == np.float32 and (whole == parts).all()
    assert state.keys() == other.keys() and all((state[k] == other[k]).all() for k in state)


def test_the_weighted_mean_is_the_weighted_mean_and_zero_leaves_out() -> None:
    updates = np.array([[1.0, 2.0], [3.0, 4.0], [np.nan, np.nan]])
    new, _ = agg.aggregate("mean", {}, np.zeros(2), updates, weights=[1, 3, 0])
    assert new == pytest.approx([2.5, 3.5])
    assert agg.mean(updates[:2], denominator=10) == pytest.approx([0.4, 0.6])
    with pytest.raises(ValueError, match="sum to 0"):
        agg.mean(updates, [0, 0, 0])
    with pytest.raises(ValueError, match="no updates"):
        agg.mean(iter([]))


def test_an_unknown_rule_is_named_with_a_suggestion() -> None:
    with pytest.raises(UserError, match="Did you mean 'scaffold'"):
        agg.aggregate("scafold", {}, np.zeros(2), np.zeros((1, 2)))


def reference_scaffold(rounds: int, cohorts: list[list[int]]) -> np.ndarray:
    """Written from the algorithm's definition with explicit local models y_i, no shared code."""
    x, c, own = np.zeros(SIZE), np.zeros(SIZE), np.zeros((CLIENTS, SIZE))
    for r in range(rounds):
        moves, changes = [], []
        for i in cohorts[r]:
            y = x.copy()
            for _ in range(STEPS):
                y = y - RATE * (CURVATURE[i] * (y - CENTRE[i]) - own[i] + c)
            fresh = own[i] - c + (x - y) / (STEPS * RATE)
            moves.append(y - x)
            changes.append(fresh - own[i])
            own[i] = fresh
        x = x + np.mean(moves, axis=0)
        c = c + len(cohorts[r]) / CLIENTS * np.mean(changes, axis=0)
    return x


def run_scaffold(rounds: int, cohorts: list[list[int]]) -> np.ndarray:
    w, state = np.zeros(SIZE, dtype=np.float32), agg.EMPTY
    for r in range(rounds):
        updates = np.array([local_update(i, w, agg.scaffold_control(state, i, SIZE)) for i in cohorts[r]])
        w, state = agg.aggregate(
            "scaffold",
            state,
            w,
            updates,
            clients=cohorts[r],
            population=CLIENTS,
            steps=STEPS,
            learning_rate=RATE,
        )
    return w


def test_scaffold_matches_a_plain_reference_with_partial_participation() -> None:
    draw = np.random.default_rng(2)
    cohorts = [sorted(draw.choice(CLIENTS, 3, replace=False).tolist()) for _ in range(40)]
    assert run_scaffold(40, cohorts) == pytest.approx(reference_scaffold(40, cohorts), abs=1e-4)


def test_scaffold_reaches_the_optimum_where_fedavg_stops_short() -> None:
    everyone = [list(range(CLIENTS))] * 300
    assert run_scaffold(300, everyone) == pytest.approx(OPTIMUM, abs=1e-4)
    w = np.zeros(SIZE)
    for _ in range(300):
        w, _ = agg.aggregate("mean", {}, w, np.array([local_update(i, w) for i in range(CLIENTS)]))
    assert np.abs(w - OPTIMUM).max() > 1e-2


def test_scaffold_stores_variates_only_of_clients_that_took_part() -> None:
    new, state = agg.aggregate(
        "scaffold", {}, np.zeros(2), np.array([[1.0, 0.0], [5.0, 5.0]]),
        clients=[7, 9], population=10, steps=2, learning_rate=0.5, weights=[1, 0],
    )  # fmt: skip
    assert set(state) == {"control", "control/7"}
    assert state["control/7"] == pytest.approx([-1.0, 0.0]) and state["control"] == pytest.approx([-0.1, 0.0])
    assert new == pytest.approx([1.0, 0.0])


def test_fedprox_matches_a_plain_reference() -> None:
    mu, rounds = 0.7, 25
    w = np.zeros(SIZE)
    x = np.zeros(SIZE)
    for _ in range(rounds):
        w, _ = agg.aggregate(
            "fedprox", {}, w, np.array([local_update(i, w, proximal=mu) for i in range(CLIENTS)])
        )
        ends = []
        for i in range(CLIENTS):  # reference: gradient steps on f_i(y) + mu/2 |y - x|^2
            y = x.copy()
            for _ in range(STEPS):
                y = y - RATE * (CURVATURE[i] * (y - CENTRE[i]) + mu * (y - x))
            ends.append(y)
        x = np.mean(ends, axis=0)
    assert w == pytest.approx(x, abs=1e-5)


def test_server_momentum_and_adam_follow_their_recurrences() -> None:
    draw = np.random.default_rng(3)
    steps = draw.normal(size=(4, 3))
    w, state, v, x = np.zeros(3), agg.EMPTY, np.zeros(3), np.zeros(3)
    for d in steps:
        w, state = agg.aggregate("momentum", state, w, np.array([d]), server_rate=0.5, beta1=0.8)
        v = 0.8 * v + d
        x = x + 0.5 * v
    assert w == pytest.approx(x, abs=1e-6)
    w, state, m, s, x = np.zeros(3), agg.EMPTY, np.zeros(3), np.zeros(3), np.zeros(3)
    for d in steps:
        w, state = agg.aggregate(
            "adam", state, w, np.array([d]), server_rate=0.1, beta1=0.9, beta2=0.99, floor=1e-2
        )
        m, s = 0.9 * m + 0.1 * d, 0.99 * s + 0.01 * d * d
        x = x + 0.1 * m / (np.sqrt(s) + 1e-2)
    assert w == pytest.approx(x, abs=1e-6)


LAYOUT = Layout(("a", "b"), ((40,), (60,)), ("x", "y"), (0, 1))


def test_fedmed_counts_a_noisier_client_less_and_equal_clients_equally() -> None:
    draw = np.random.default_rng(4)
    start, signal = draw.normal(0, 0.1, 100), draw.normal(0, 0.05, 100)
    equal = np.tile(signal, (3, 1))
    assert agg.fedmed_mean(start, equal, LAYOUT) == pytest.approx(signal)
    updates = np.concatenate(
        [signal + draw.normal(0, 0.01, (4, 100)), signal + draw.normal(0, 1.0, (1, 100))]
    )
    adaptive, plain = agg.fedmed_mean(start, updates, LAYOUT), agg.mean(updates)
    assert np.abs(adaptive - signal).mean() < 0.3 * np.abs(plain - signal).mean()


def test_fedmed_weighs_each_layer_on_its_own() -> None:
    updates = np.zeros((2, 100))
    updates[0, :40], updates[1, 40:] = np.linspace(-3, 3, 40), np.linspace(-3, 3, 60)
    mean = agg.fedmed_mean(np.zeros(100), updates, LAYOUT)
    # In each layer the client that moved has D = 2 mean D, the other D = 0: shares e^-2 and 1, normalised.
    assert mean == pytest.approx(updates.sum(0) * np.exp(-2) / (1 + np.exp(-2)), abs=1e-12)


def test_fedmed_without_movement_and_with_generators() -> None:
    assert (agg.fedmed_mean(np.ones(100), np.zeros((3, 100)), LAYOUT) == 0).all()
    with pytest.raises(ValueError, match="twice"):
        agg.fedmed_mean(np.zeros(100), (u for u in np.zeros((2, 1, 100))), LAYOUT)


def test_mediation_falls_back_to_the_mean_after_the_public_loss_rose() -> None:
    assert agg.mediate([]) and agg.mediate([1.0]) and agg.mediate([2.0, 1.0]) and not agg.mediate([1.0, 2.0])
    updates = np.random.default_rng(0).normal(size=(3, 100))
    new, _ = agg.aggregate("fedmed", {}, np.zeros(100), updates, layout=LAYOUT, adaptive=False)
    assert new == pytest.approx(updates.mean(0), abs=1e-6)


def test_the_start_and_the_state_given_are_not_changed() -> None:
    start, state = np.zeros(3, dtype=np.float32), {"momentum": np.ones(3)}
    agg.aggregate("momentum", state, start, np.ones((2, 3)))
    assert (start == 0).all() and (state["momentum"] == 1).all()
