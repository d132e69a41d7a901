"""Aggregation rules against plain references on a quadratic problem, through the same calls that a round makes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedveil.errors import UserError
from fedveil.models.layout import Layout
from fedveil.protect.aggregate import RULES, Adam, FedMed, Mean, Merged, Momentum, Scaffold
from fedveil.protect.aggregate.fedmed import adaptive_mean, falling
from fedveil.protect.catalogue import get
from fedveil.protect.memory import NOTHING, from_arrays, to_arrays
from fedveil.protect.recipe import with_changes

DRAW = np.random.default_rng(8)
CLIENTS, SIZE, STEPS, RATE = 5, 6, 4, 0.05
CURVATURE = DRAW.uniform(0.5, 2.0, (CLIENTS, SIZE))  # client i: 1/2 sum curvature * (w - centre)^2
CENTRE = DRAW.normal(0, 3.0, (CLIENTS, SIZE))
OPTIMUM = (CURVATURE * CENTRE).sum(0) / CURVATURE.sum(0)
FLAT = Layout(("a",), ((SIZE,),), ("x",), (0,))


def local_update(
    client: int, start: np.ndarray, control: np.ndarray | float = 0.0, proximal: float = 0.0
) -> np.ndarray:
    w = start.astype(np.float64).copy()
    for _ in range(STEPS):
        w -= RATE * (CURVATURE[client] * (w - CENTRE[client]) + control + proximal * (w - start))
    return w - start


def play(rule, memory, start, updates, clients=(), layout=FLAT, rate=1.0, **more):
    """One round of a rule: direction, then the server's move."""
    merged = Merged(
        start=start, mean=np.mean(updates, axis=0), layout=layout, population=CLIENTS, steps=STEPS, learning_rate=RATE,
        number=1, updates=list(updates), clients=list(clients), **more,
    )  # fmt: skip
    direction, memory, _ = rule.direction(memory, merged)
    return rule.move(memory, start, direction, rate)


def test_an_unknown_rule_is_named_with_a_suggestion() -> None:
    with pytest.raises(UserError, match="Did you mean 'scaffold'"):
        with_changes(get("fed-cdp"), {"aggregate": "scafold"})


@pytest.mark.parametrize("name", [n for n in RULES if n != "connectivity"])
def test_a_memory_survives_being_written_down(name: str) -> None:
    rule = RULES[name]
    draw = np.random.default_rng(1)
    updates = draw.normal(size=(3, SIZE)).astype(np.float32)
    _, memory = play(rule, rule.init(SIZE), np.zeros(SIZE, np.float32), updates, clients=[4, 7, 9])
    back = from_arrays(rule.init(SIZE), to_arrays(memory, "aggregate"), "aggregate")
    assert to_arrays(back, "aggregate").keys() == to_arrays(memory, "aggregate").keys()
    for key, value in to_arrays(memory, "aggregate").items():
        assert (to_arrays(back, "aggregate")[key] == value).all()


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
    rule = Scaffold()
    w, memory = np.zeros(SIZE, dtype=np.float32), rule.init(SIZE)
    for r in range(rounds):
        updates = np.array([local_update(i, w, rule.control(memory, i, SIZE)) for i in cohorts[r]])
        w, memory = play(rule, memory, w, updates, clients=cohorts[r])
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
        w, _ = play(Mean(), NOTHING, w, np.array([local_update(i, w) for i in range(CLIENTS)]))
    assert np.abs(w - OPTIMUM).max() > 1e-2


def test_scaffold_stores_variates_only_of_clients_that_took_part() -> None:
    rule = replace(Scaffold())
    merged = Merged(
        start=np.zeros(2), mean=np.array([1.0, 0.0]), layout=FLAT, population=10, steps=2, learning_rate=0.5, number=1,
        updates=[np.array([1.0, 0.0])], clients=[7],
    )  # fmt: skip
    direction, memory, _ = rule.direction(rule.init(2), merged)
    assert set(memory.own) == {7} and direction == pytest.approx([1.0, 0.0])
    assert memory.own[7] == pytest.approx([-1.0, 0.0]) and memory.control == pytest.approx([-0.1, 0.0])
    assert rule.control(memory, 8, 2) == pytest.approx([-0.1, 0.0])  # a client that never took part


def test_fedprox_matches_a_plain_reference() -> None:
    mu, rounds = 0.7, 25
    w = np.zeros(SIZE)
    x = np.zeros(SIZE)
    for _ in range(rounds):
        w, _ = play(Mean(), NOTHING, w, np.array([local_update(i, w, proximal=mu) for i in range(CLIENTS)]))
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
    rule = Momentum(beta=0.8)
    w, memory, v, x = np.zeros(3), rule.init(3), np.zeros(3), np.zeros(3)
    for d in steps:
        w, memory = play(rule, memory, w, np.array([d]), rate=0.5)
        v = 0.8 * v + d
        x = x + 0.5 * v
    assert w == pytest.approx(x, abs=1e-6)
    rule = Adam(floor=1e-2)
    w, memory, m, s, x = np.zeros(3), rule.init(3), np.zeros(3), np.zeros(3), np.zeros(3)
    for d in steps:
        w, memory = play(rule, memory, w, np.array([d]), rate=0.1)
        m, s = 0.9 * m + 0.1 * d, 0.99 * s + 0.01 * d * d
        x = x + 0.1 * m / (np.sqrt(s) + 1e-2)
    assert w == pytest.approx(x, abs=1e-6)


LAYOUT = Layout(("a", "b"), ((40,), (60,)), ("x", "y"), (0, 1))


def test_fedmed_counts_a_noisier_client_less_and_equal_clients_equally() -> None:
    draw = np.random.default_rng(4)
    start, signal = draw.normal(0, 0.1, 100), draw.normal(0, 0.05, 100)
    equal = np.tile(signal, (3, 1))
    assert adaptive_mean(start, equal, LAYOUT) == pytest.approx(signal)
    updates = np.concatenate(
        [signal + draw.normal(0, 0.01, (4, 100)), signal + draw.normal(0, 1.0, (1, 100))]
    )
    adaptive, plain = adaptive_mean(start, updates, LAYOUT), updates.mean(0)
    assert np.abs(adaptive - signal).mean() < 0.3 * np.abs(plain - signal).mean()


def test_fedmed_weighs_each_layer_on_its_own() -> None:
    updates = np.zeros((2, 100))
    updates[0, :40], updates[1, 40:] = np.linspace(-3, 3, 40), np.linspace(-3, 3, 60)
    mean = adaptive_mean(np.zeros(100), updates, LAYOUT)
    # In each layer the client that moved has D = 2 mean D, the other D = 0: shares e^-2 and 1, normalised.
    assert mean == pytest.approx(updates.sum(0) * np.exp(-2) / (1 + np.exp(-2)), abs=1e-12)


def test_fedmed_without_movement_stays() -> None:
    assert (adaptive_mean(np.ones(100), np.zeros((3, 100)), LAYOUT) == 0).all()


def test_mediation_falls_back_to_the_mean_after_the_public_loss_rose() -> None:
    assert falling([]) and falling([1.0]) and falling([2.0, 1.0]) and not falling([1.0, 2.0])
    updates = np.random.default_rng(0).normal(size=(3, 100))
    rule = FedMed()
    losses = iter([1.0, 2.0])
    more = dict(layout=LAYOUT, public_loss=lambda weights: next(losses))
    first, memory = play(rule, rule.init(100), np.zeros(100), updates, **more)
    assert first == pytest.approx(adaptive_mean(np.zeros(100), updates, LAYOUT), abs=1e-6)
    second, _ = play(rule, memory, np.zeros(100), updates, **more)
    assert second == pytest.approx(updates.mean(0), abs=1e-6)


def test_the_start_and_the_memory_given_are_not_changed() -> None:
    rule = Momentum()
    start, memory = np.zeros(3, dtype=np.float32), replace(rule.init(3), momentum=np.ones(3))
    play(rule, memory, start, np.ones((2, 3)))
    assert (start == 0).all() and (memory.momentum == 1).all()
