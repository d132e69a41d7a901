"""Bounds on what keeps a label: worked out by hand for one layer, searched for by force for more."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.models.layout import flatten
from fedveil.training.distortion import distortions


def test_one_linear_layer_has_the_bounds_of_plain_geometry():
    """s(x) = (w_y - w_j) x: the input's gradient is w_y - w_j, the parameters' has length sqrt(2) |x|."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False))
    weights = np.array([3.0, 0.0, 0.0, 1.0], np.float32)  # outputs (3 a, b)
    x, y = np.array([[2.0, 1.0]], np.float32), np.array([0])
    found = distortions(net, weights, x, y)
    margin, length = 6.0 - 1.0, math.sqrt(5)
    assert found["parameter_distortion"] == pytest.approx(margin / (math.sqrt(2) * length))
    assert found["parameter_distortion_printed"] == pytest.approx(margin / (math.sqrt(2) * length))
    assert found["input_distortion"] == pytest.approx(
        margin / (math.sqrt(2) * 3.0)
    )  # largest singular value 3


def _steepest(net: nn.Sequential, x: torch.Tensor, label: int, wrt: str, radius: float, seed: int) -> bool:
    """Whether projected gradient ascent within the radius finds a change of label."""
    torch.manual_seed(seed)
    start = [p.detach().clone() for p in net.parameters()] if wrt == "parameters" else [x.clone()]
    moved = [s + 1e-3 * torch.randn_like(s) for s in start]
    for _ in range(60):
        leaves = [m.clone().requires_grad_() for m in moved]
        if wrt == "parameters":
            names = [name for name, _ in net.named_parameters()]
            out = torch.func.functional_call(net, dict(zip(names, leaves, strict=True)), (x,))[0]
        else:
            out = net(leaves[0])[0]
        others = out.clone()
        others[label] = -torch.inf
        if int(out.argmax()) != label:
            return True
        grads = torch.autograd.grad(others.max() - out[label], leaves)
        size = math.sqrt(sum(float(g.square().sum()) for g in grads)) or 1.0
        moved = [m.detach() + 0.2 * radius * g / size for m, g in zip(moved, grads, strict=True)]
        change = math.sqrt(sum(float((m - s).square().sum()) for m, s in zip(moved, start, strict=True)))
        if change > radius:
            moved = [s + (m - s) * radius / change for m, s in zip(moved, start, strict=True)]
    return False


@pytest.mark.parametrize("wrt", ["parameters", "input"])
def test_no_change_below_the_bound_turns_a_label_and_a_large_one_does(wrt):
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 6), nn.Tanh(),
        nn.Linear(6, 3),
    )  # fmt: skip
    x = torch.rand(1, 1, 6, 6)
    label = int(net(x)[0].argmax())
    found = distortions(net, flatten(net), x.numpy(), np.array([label]))
    bound = found["parameter_distortion" if wrt == "parameters" else "input_distortion"]
    assert bound is not None and bound > 0
    assert not any(_steepest(net, x, label, wrt, 0.999 * bound, seed) for seed in range(3))
    assert any(_steepest(net, x, label, wrt, 30.0, seed) for seed in range(3))


def test_the_printed_bound_is_the_margin_over_the_steepest_gradient():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3))
    x = torch.randn(3, 4)
    labels = net(x).argmax(1).detach()
    steep, margins = 0.0, []
    for row, label in zip(x, labels, strict=True):
        out = net(row[None])[0]
        for j in set(range(3)) - {int(label)}:
            grads = torch.autograd.grad(out[label] - out[j], list(net.parameters()), retain_graph=True)
            steep = max(steep, math.sqrt(sum(float(g.square().sum()) for g in grads)))
        margins.append(min(float((out[label] - out[j]).detach()) for j in set(range(3)) - {int(label)}))
    found = distortions(net, flatten(net), x.numpy(), labels.numpy())
    assert found["parameter_distortion_printed"] == pytest.approx(np.median(margins) / steep, rel=1e-4)


def test_nothing_is_claimed_without_a_right_row_or_for_unknown_layers():
    net = nn.Sequential(nn.Linear(2, 2, bias=False))
    weights, x = np.array([1.0, 0, 0, 0], np.float32), np.array([[1.0, 0.0]], np.float32)
    assert set(distortions(net, weights, x, np.array([1])).values()) == {None}
    odd = nn.Sequential(nn.Linear(2, 2), nn.Softplus())
    assert set(distortions(odd, flatten(odd), x, np.array([0])).values()) == {None}
