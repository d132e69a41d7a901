"""Checks of a node: honest runs pass, whatever the recipe; private rows are never looked at."""

import inspect

import numpy as np
import pytest
import torch

from fedveil.federation import checks
from fedveil.federation.checks import allowed_change, architecture_digest, change, first_model, structure
from fedveil.federation.config import make_config
from fedveil.federation.loop import cohort_of, play_round, prepare
from fedveil.federation.round import learning_rate_of, moment_of, start
from fedveil.models import nets

torch.set_num_threads(1)

HONEST = [
    ("non-private", "papers-mlp", {}),
    ("fed-cdp-sound", "papers-mlp", {"sigma": 2.0}),
    ("fed-cdp", "papers-mlp", {"sigma": 6.0}),
    ("dp-fedavg", "logistic", {"sigma": 1.0}),
    ("fed-sdp-client", "papers-mlp", {"sigma": 1.0}),
    ("sum-cdp", "logistic", {"sigma": 3.0}),
    ("udp-fl-laplace", "logistic", {"sigma": 0.5}),
    ("fed-cdp-mean", "papers-mlp", {"sigma": 0.05}),
    ("fed-cdp-example", "papers-mlp", {"sigma": 2.0}),
    ("non-private", "cpl-lenet", {}),
]


def alarms(recipe, model, protect, seed, rounds=4):
    """Reasons to refuse any of an honest run's models."""
    values = {
        "dataset": "digits", "recipe": recipe, "model": model, "clients": 5, "partition": "iid", "rounds": rounds,
        "local_steps": 1 if recipe == "sum-cdp" else 5, "batch_size": 8, "learning_rate": 0.1, "seed": seed,
    }  # fmt: skip
    prepared = prepare(make_config(values, protect))
    task, setting = prepared.task, prepared.task.setting
    state = start(task, prepared.initial)
    found = first_model(state.weights, prepared.initial)
    own = None
    for _ in range(rounds):
        now = moment_of(task, state)
        following, _, _ = play_round(prepared, state, cohort_of(prepared, now.number))
        limit = allowed_change(
            task.recipe, bound=now.bounds[0], sigma=now.sigmas[0], learning_rate=learning_rate_of(task, state.round),
            steps=setting.steps, batch=setting.batch, dimension=task.layout.size, layers=task.layout.layers,
            cohort=setting.cohort, own_largest=own,
        )  # fmt: skip
        found += change(state.weights, following.weights, limit)
        found += structure(following.weights, task.module, task.layout, prepared.dataset.shape)
        own = max(own or 0.0, float(np.linalg.norm(following.weights - state.weights)))
        state = following
    return found


@pytest.mark.parametrize("case", range(len(HONEST)))
def test_an_honest_run_is_never_stopped(case):
    assert alarms(*HONEST[case], seed=case) == []


@pytest.mark.slow
def test_none_of_200_honest_runs_is_stopped():
    """0 of 200: the rate of false alarms is below 1.5% with 95% confidence."""
    stopped = {
        (name, model, seed): why
        for name, model, protect in HONEST
        for seed in range(20)
        if (why := alarms(name, model, protect, seed=100 + seed))
    }
    assert stopped == {}


def test_another_architecture_has_another_digest():
    from fedveil.models.layout import layout_of

    one, two = (nets.build("papers-mlp", (64,), 10, 0, hidden=h) for h in ([64, 32], [64, 33]))
    same = nets.build("papers-mlp", (64,), 10, 7)
    assert architecture_digest(one, layout_of(one)) == architecture_digest(same, layout_of(same))
    assert architecture_digest(one, layout_of(one)) != architecture_digest(two, layout_of(two))


def test_numbers_without_measure_are_refused():
    module = nets.build("papers-mlp", (64,), 10, 0)
    from fedveil.models.layout import flatten, layout_of

    layout, weights = layout_of(module), flatten(module)
    for bad in (np.nan, np.inf, 1e9):
        broken = weights.copy()
        broken[5] = bad
        assert structure(broken, module, layout, (64,))


def test_no_check_takes_private_rows():
    for function in (structure, change, first_model, allowed_change):
        assert not {"x", "y", "rows", "data"} & set(inspect.signature(function).parameters)
    assert "private rows" in checks.__doc__
