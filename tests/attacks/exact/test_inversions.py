"""Exact inversions: what one honest update gives back without any optimisation."""

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.attacks.exact import linear, spear
from fedveil.federation.config import make_config
from fedveil.federation.loop import prepare
from fedveil.federation.round import start
from fedveil.federation.view import view


def mlp_update(rows, sigma=None, seed=0):
    """(weight gradient, bias gradient) of the first layer as the server computes them from one upload."""
    values = {
        "dataset": "digits", "recipe": "non-private" if sigma is None else "fed-cdp-sound", "clients": 2, "partition": "iid",
        "local_steps": 1, "rounds": 1, "learning_rate": 1.0, "model": "papers-mlp",
        "model_options": {"hidden": [200, 32]}, "batch_size": len(rows), "seed": seed,
    }  # fmt: skip
    prepared = prepare(make_config(values, {} if sigma is None else {"sigma": sigma}))
    task = prepared.task
    seen = view(task, start(task, prepared.initial), "type0", 0, rows=np.asarray(rows)).values[0]
    shapes = dict(zip(task.layout.names, task.layout.shapes, strict=True))
    units, width = next(s for s in shapes.values() if len(s) == 2)
    weight = seen[: units * width].reshape(units, width)
    first = prepared.initial[: units * width].reshape(units, width), prepared.initial[units * width :][:units]
    return -weight, -seen[units * width :][:units], task.x[rows].reshape(len(rows), -1), first


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_a_batch_behind_a_relu_layer_is_recovered_exactly(batch):
    for seed in range(3):
        rows = np.random.default_rng(seed).choice(1000, batch, replace=False)
        weight, bias, truth, layer = mlp_update(rows, seed=seed)
        found = spear.invert(weight, bias, layer=layer, seed=seed)
        assert found.complete and len(found.inputs) == batch
        distance = np.abs(found.inputs[:, None] - truth[None]).max(-1)
        assert distance.min(0).max() < 1e-4, distance.min(0)


def test_noise_of_a_private_recipe_leaves_nothing_exact():
    rows = np.arange(4)
    weight, bias, truth, _ = mlp_update(rows, sigma=1.0)
    found = spear.invert(weight, bias, batch=4, draws=20_000)
    if found.complete:
        assert np.abs(found.inputs[:, None] - truth[None]).max(-1).min() > 0.1


def test_one_example_of_a_dense_layer_is_a_quotient():
    weight, bias, truth, _ = mlp_update([7])
    assert np.abs(linear.single(weight, bias) - truth[0]).max() < 1e-5


def test_a_head_that_starts_at_zero_gives_the_sum_of_every_class():
    rng = np.random.default_rng(0)
    x, y = rng.random((4, 30)), np.array([0, 3, 3, 7])
    delta = np.full((4, 10), 0.1) - np.eye(10)[y]
    sums, present = linear.class_sums((delta.T @ x).astype(np.float32), 4)
    assert present.nonzero()[0].tolist() == [0, 3, 7]
    assert np.allclose(sums[0], x[0], atol=1e-5) and np.allclose(sums[3], x[1] + x[2], atol=1e-5)


def test_a_trained_adapter_gives_its_input_back():
    torch.manual_seed(0)
    base, a, b = (
        nn.Linear(40, 6),
        torch.randn(4, 40, requires_grad=True),
        torch.randn(6, 4, requires_grad=True),
    )
    x = torch.rand(1, 40)
    loss = nn.functional.cross_entropy(base(x) + x @ a.T @ b.T, torch.tensor([2]))
    grad_a, grad_b, bias = torch.autograd.grad(loss, [a, b, base.bias])
    found = linear.adapter_single(grad_a.numpy(), grad_b.numpy(), a.detach().numpy(), bias.numpy())
    assert np.abs(found - x[0].numpy()).max() < 1e-4
    beside = np.vstack([x.numpy(), np.random.default_rng(1).random((50, 40))])
    distance = linear.in_span(beside, grad_a.numpy())
    assert distance[0] < 1e-4 and distance[1:].min() > 0.1


def test_many_noised_rounds_give_back_what_one_does_not_and_the_prior_is_the_floor():
    from fedveil.attacks.exact import noisy

    rng = np.random.default_rng(0)
    basis = rng.normal(size=(5, 40))
    public = 1 + rng.normal(size=(500, 5)) @ basis * 0.3
    x, label, bound = 1 + rng.normal(size=5) @ basis * 0.3, 3, 0.5
    delta = np.full(10, 0.1) - np.eye(10)[label]
    gradient = np.outer(delta, x)
    gradient *= min(1.0, bound / np.linalg.norm(gradient))
    prior = noisy.prior_of(public)
    errors = {}
    for rounds in (1, 10, 10_000):
        seen = gradient + bound * 2.0 / np.sqrt(rounds) * rng.normal(size=(1, 10, 40))
        guess, found = noisy.head_attack(
            seen, np.zeros((10, 40)), prior, deviation=bound * 2.0 / np.sqrt(rounds), bound=bound
        )
        errors[rounds] = float(np.mean((guess - x) ** 2))
    blind = float(np.mean((prior.mean - x) ** 2))
    assert found == label and errors[10_000] < 0.3 * blind
    assert errors[10_000] < errors[1] and errors[1] < 3 * blind
