"""torch.func: the same results for modules that cannot be stacked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_cases import build, everything, largest_difference, mlp, plan, same_bits, train, works
from torch import nn

from fedveil.errors import UserError
from fedveil.models.layout import layout_of
from fedveil.training import reference
from fedveil.training.torch import functional, stacked


class Residual(nn.Module):
    """A block with a shortcut, GroupNorm and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.short = nn.Conv2d(2, 4, 1, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.scale * torch.relu(self.norm(self.conv(x))) + self.short(x)
        return self.head(hidden.mean((2, 3)))


OPTIONS = [
    {},
    {"clip": "layer"},
    {"clip": "flat", "momentum": 0.5, "proximal": 0.1},
    {"clip": "flat", "clip_norm": "l1"},
    {"clip": "layer", "bound_rule": "median", "noise": "gaussian"},
    {"clip": "layer", "sensitivity": "l2-max", "noise": "gaussian", "noise_on": "example"},
    {"clip": "layer", "noise": "laplace", "noise_on": "mean"},
    {"clip": "none", "noise": "gaussian"},
    {"clip": "layer", "measure_mean": True, "noise": "gaussian"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("vectors", [(), ("control", "anchor", "shift", "scale")], ids=["plain", "vectors"])
def test_equals_the_reference_for_a_module_with_code_of_its_own(options, vectors):
    case = build(Residual, (2, 5, 5), 3)
    work, what = works(case, clients=3, poisson=True, vectors=vectors), plan(penalty=0.3, **options)
    one = train(reference, case, work, what, dtype=torch.float64)
    assert largest_difference(one, train(functional, case, work, what, dtype=torch.float64)) < 1e-11


@pytest.mark.parametrize("options", [{"clip": "layer", "noise": "gaussian"}, {"clip": "flat"}])
def test_equals_the_stacked_engine(options):
    case = everything()
    work, what = works(case, poisson=True), plan(**options)
    one = train(stacked, case, work, what, dtype=torch.float64)
    assert largest_difference(one, train(functional, case, work, what, dtype=torch.float64)) < 1e-11


def test_regression_equals_the_reference():
    case = mlp(classes=None)
    work, what = works(case), plan(clip="flat", loss="squared")
    one = train(reference, case, work, what, dtype=torch.float64)
    assert largest_difference(one, train(functional, case, work, what, dtype=torch.float64)) < 1e-11


def test_bits_do_not_depend_on_the_chunk():
    case = build(Residual, (2, 5, 5), 3)
    work, what = works(case, poisson=True), plan(clip="layer", noise="gaussian")
    whole = train(functional, case, work, what, chunk=5)
    for chunk in (1, 2, 3):
        assert same_bits(whole, train(functional, case, work, what, chunk=chunk))


def test_nan_stays_with_its_client_and_padding_is_never_evaluated_on_made_up_inputs():
    class Unit(nn.Module):
        """Divides by the norm of the input: an all-zero input would give NaN."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(7, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x / torch.linalg.vector_norm(x, dim=1, keepdim=True))

    case = build(Unit, (7,), 3)
    case.x[39] = 0
    work = works(case, clients=3, batch=6, poisson=True)
    for one in work:
        one.rows[one.rows == 39] = 1
    work[1].rows[0, 0] = 39
    assert train(functional, case, work, plan(), chunk=3).finite.tolist() == [True, False, True]
    clipped = train(functional, case, work, plan(clip="layer"), chunk=3)
    assert clipped.finite.all() and clipped.skipped.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("layer", "fix"), [(nn.BatchNorm2d(2), "GroupNorm"), (nn.Dropout(0.1), "remove it or set p = 0")]
)
def test_layers_without_an_honest_per_example_gradient_are_refused_with_the_fix(layer, fix):
    case = build(lambda: nn.Sequential(layer, nn.Flatten(), nn.Linear(18, 3)), (2, 3, 3), 3)
    with pytest.raises(UserError, match=fix):
        train(functional, case, works(case), plan())


def test_a_model_with_the_wrong_output_is_refused():
    case = build(lambda: nn.Sequential(nn.Conv2d(2, 3, 3)), (2, 5, 5), 3)
    with pytest.raises(UserError, match="shape"):
        train(functional, case, works(case), plan())
    assert np.isfinite(case.start).all()


def test_an_examples_gradient_does_not_depend_on_where_weights_and_example_lie_in_memory():
    """Weights of the second of three clients, examples in the middle of a batch: the same bits as alone."""
    case = everything()
    net = functional.Net(case.module, layout_of(case.module), 10)
    x, y = torch.as_tensor(case.x), torch.as_tensor(case.y)
    for seed in range(12):
        draw = torch.Generator().manual_seed(seed)
        weights = torch.as_tensor(case.start) + 0.01 * torch.randn(len(case.start), generator=draw)
        among = torch.stack([weights] * 3)[1]
        found, _ = net.gradients(among, x, y, "cross-entropy", True)
        for row in range(0, len(x), 7):
            alone, _ = net.gradients(weights, x[row : row + 1].clone(), y[row : row + 1], "cross-entropy", True)
            assert torch.equal(found[row], alone[0])
