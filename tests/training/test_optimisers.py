"""Local optimisers: torch's own rules from the same gradients, and every engine from the same plan."""

import numpy as np
import pytest
import torch
from engine_cases import planned
from torch import nn

import fedveil as fv
from fedveil.errors import UserError
from fedveil.models.layout import flatten
from fedveil.training import pool
from fedveil.training.contract import ClientWork, LocalPlan
from fedveil.training.optimisers import Optimiser, begin, parse, step


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Optimiser("adam"), lambda p: torch.optim.Adam(p, lr=0.1)),
        (Optimiser("adam", 0.8, 0.95, 1e-6, 0.02), lambda p: torch.optim.Adam(p, 0.1, (0.8, 0.95), 1e-6, 0.02)),
        (Optimiser("adamw", decay=0.05), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.05)),
        (Optimiser(), lambda p: torch.optim.SGD(p, 0.1, momentum=0.7)),
    ],
)
def test_ten_steps_equal_torchs(ours, theirs):
    torch.manual_seed(0)
    weights = torch.randn(20, dtype=torch.float64)
    parameter = nn.Parameter(weights.clone())
    rule, state = theirs([parameter]), begin(ours, weights)
    for count in range(1, 11):
        gradient = torch.randn(20, dtype=torch.float64)
        parameter.grad = gradient.clone()
        rule.step()
        weights, state = step(ours, state, weights, gradient, 0.1, count, 0.7)
    assert torch.allclose(weights, parameter.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", ["adam", "adamw:decay=0.1", "sgd"])
@pytest.mark.parametrize("engine", ["stacked", "graph", "functional", "auto"])
def test_every_engine_takes_the_same_steps_as_the_reference(rule, engine):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 6)).astype(np.float32), rng.integers(0, 3, 12)
    plan = planned(
        3, 0.05, 4.0, clip="flat", bounds=(0.5,) * 3, noise="gaussian", multipliers=(1.0,) * 3, momentum=0.5 * (rule == "sgd"),
        optimiser=parse(rule),
    )  # fmt: skip
    work = [ClientWork(k, rng.integers(0, 12, (3, 4)).astype(np.int32), bytes([k]) * 16) for k in range(3)]
    found = [pool.train(net, flatten(net), x, y, work, plan, engine=e).delta for e in (engine, "reference")]
    assert np.abs(found[0] - found[1]).max() < 1e-5 and np.abs(found[1]).max() > 1e-3


def test_native_gives_the_reason_and_auto_falls_back():
    net = nn.Sequential(nn.Linear(6, 3))
    plan = LocalPlan(1, 0.1, 4.0, optimiser=Optimiser("adam"))
    assert pool.choose(net, plan)[0] == "stacked"
    with pytest.raises(UserError, match="adam"):
        pool.choose(net, plan, "native")


def test_a_run_with_adam_promises_what_the_same_run_without_it_promises(tmp_path):
    results = [
        fv.run("fed-cdp-sound", data="digits", rounds=1, local_steps=2, clients=4, out=tmp_path / rule, local_optimiser=rule)
        for rule in ("sgd", "adam")
    ]
    assert results[0].epsilon() == results[1].epsilon()
    assert any(not torch.equal(*pair) for pair in zip(*(r.state_dict().values() for r in results), strict=True))


@pytest.mark.parametrize("text", ["adagrad", "adam:beta=1", "adam:beta1=x", "adam:beta1=1", "adam:epsilon=0"])
def test_wrong_settings_are_refused_with_what_to_write(text):
    with pytest.raises(UserError, match="local_optimiser"):
        parse(text)


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("sum-cdp", {"local_steps": 1}),
        ("fed-cdp-sound", {"aggregate": "scaffold"}),
        ("fed-cdp-sound", {"momentum": 0.9}),
    ],
)
def test_combinations_that_mean_nothing_are_refused(recipe, more, tmp_path):
    with pytest.raises(UserError, match="local_optimiser"):
        fv.run(recipe, data="digits", rounds=1, out=tmp_path / "run", local_optimiser="adam", **more)
