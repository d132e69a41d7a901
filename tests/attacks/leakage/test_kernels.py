"""The compiled matching loss against torch.func, which knows nothing of it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedveil.attacks.leakage import kernels as matching
from fedveil.attacks.leakage.lbfgs import History
from fedveil.attacks.leakage.objective import Leak, fast_matcher, predictor
from fedveil.attacks.leakage.search import _Problem, _weights
from fedveil.models.layout import flatten, layout_of
from fedveil.models.nets import build

needs = pytest.mark.skipif(matching._leak is None, reason="the compiled extension is not installed")


def small(act: type[nn.Module], bias: bool = True) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 5, (3, 5), stride=(2, 1), padding=(1, 2), bias=bias), act(),
        nn.Conv2d(5, 16, 3, padding=1), act(),
        nn.Conv2d(16, 3, 2), act(),
        nn.Flatten(), nn.Linear(3 * 4 * 8, 4, bias=bias),
    )  # fmt: skip


def nets() -> list[tuple[nn.Module, tuple[int, ...], int]]:
    return [
        (build("cpl-lenet", (1, 28, 28), 10, 3), (1, 28, 28), 10),
        (build("cpl-lenet", (3, 32, 32), 7, 3), (3, 32, 32), 7),
        (small(nn.Tanh), (2, 9, 9), 4),
        (small(nn.Sigmoid, bias=False), (2, 9, 9), 4),
    ]


@needs
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("isa", ["auto", "base"])
def test_gradients_and_their_pullback_are_those_of_torch(which: int, isa: str) -> None:
    module, shape, classes = nets()[which]
    weights, layout = torch.as_tensor(flatten(module)), layout_of(module)
    fast = matching.compiled(module, weights, layout, shape, isa)
    assert fast is not None
    double = module.double()
    slow = predictor(double, weights.double(), Leak(torch.zeros(1, layout.size), layout))
    x = torch.rand(3, *shape).requires_grad_()
    t = torch.softmax(torch.randn(3, classes), 1).requires_grad_()
    ours, theirs = fast(x, t), slow(x[:, None].double(), t[:, None].double())
    torch.testing.assert_close(ours, theirs.float(), rtol=2e-4, atol=2e-6)
    v = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad((ours * v).sum(), (x, t)),
        torch.autograd.grad((theirs * v.double()).sum(), (x, t)), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


@needs
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"clip": "layer", "bound": 0.3},
        {"clip": "flat", "bound": 0.5},
        {"clip": "flat", "bound": 0.4, "clip_on": "whole"},
        {"kind": "update", "learning_rate": 0.5, "clip": "layer", "bound": 0.2, "clip_on": "whole"},
        {"noise": 0.1},
        {"mapped": True, "clip": "flat", "bound": 0.5},
    ],
)
@pytest.mark.parametrize("distance", ["squared", "balanced", "cosine"])
@pytest.mark.parametrize("form", ["pixels", "box", "logits"])
def test_objective_is_the_same_compiled_and_not(how: dict, distance: str, form: str) -> None:
    module, shape, classes = nets()[2]
    weights, layout = torch.as_tensor(flatten(module)), layout_of(module)
    rng = torch.Generator().manual_seed(5)
    n, victims = 2, 4
    how = dict(how)
    if how.pop("mapped", False):
        how |= {
            "shift": 0.01 * torch.randn(layout.size, generator=rng),
            "scale": 0.5 + torch.rand(layout.size, generator=rng),
        }
    values = 0.3 * torch.randn(victims, layout.size, generator=rng)
    values[:, ::7] = 0
    leak = Leak(values, layout, batch=n, pruned=distance != "squared", **how)
    weight, scale = _weights(leak.as_gradient(), values, balanced=distance == "balanced")
    labels = torch.randint(classes, (victims, n), generator=rng)
    slow = _Problem(
        predictor(module, weights, leak), values, weight, scale, labels, shape, classes, (0.0, 1.0),
        smoothing=0.1 if distance == "cosine" else 0.0, noisy=leak.noisy,
    )  # fmt: skip
    fast = replace(
        slow, fast=fast_matcher(module, weights, leak, shape, aware=True), plain=distance == "squared"
    )
    width = n * 162 + (n * classes if form == "logits" else 0)
    points, rows = torch.rand(3, width, generator=rng), torch.tensor([2, 0, 3])
    (a, da), (b, db) = (p.objective(distance, form)(points, rows) for p in (fast, slow))  # type: ignore[arg-type]
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(da, db, rtol=1e-3, atol=2e-5 * float(db.abs().max()) + 1e-8)


def test_unknown_nets_are_left_to_torch() -> None:
    wide = nn.Sequential(nn.Conv2d(1, 17, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(17 * 36, 2))
    kinked = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    dense = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    for module in (wide, kinked, dense):
        assert matching.describe(module, (1, 8, 8), layout_of(module)) is None


@needs
def test_compiled_directions_are_those_of_the_plain_recursion() -> None:
    rng = torch.Generator().manual_seed(2)
    single, double = (History.empty(5, 4, 37, d) for d in (torch.float32, torch.float64))
    rows = torch.tensor([0, 2, 4])
    for _ in range(6):  # more pairs than the ring holds
        moved = torch.randn(3, 37, generator=rng)
        change = moved + 0.3 * torch.randn(3, 37, generator=rng)
        single.remember(rows, moved, change)
        double.remember(rows, moved.double(), change.double())
    for history in (single, double):
        history.remember(
            torch.tensor([1]), torch.ones(1, 37).to(history.s), 2 * torch.ones(1, 37).to(history.s)
        )
    g = torch.randn(5, 37, generator=rng)
    ours, plain = single.times(torch.arange(5), g), double.times(torch.arange(5), g.double())
    torch.testing.assert_close(ours, plain.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[3], g[3])  # a row without pairs
