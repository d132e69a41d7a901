"""The compiled engine on networks that are no chains: residuals, depth-wise convolutions, and nets so large that layers are
computed for a whole group of examples at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import Case, build, plan, same_bits, train, works
from test_native import assert_agrees
from torch import nn
from torch.nn import functional as F

from fedveil.models import chain, compile, nets
from fedveil.models.layout import layout_of
from fedveil.protect import bounded
from fedveil.training import native, pool, reference
from fedveil.training.contract import ClientWork, LocalPlan

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled extension is not installed")
every_set = pytest.mark.parametrize("isa", native.instruction_sets())
OPTIONS = [
    {}, {"clip": "layer"}, {"clip": "flat"}, {"clip": "layer", "clip_norm": "l1"}, {"clip": "flat", "bound_rule": "median"},
    {"clip": "layer", "noise": "gaussian", "momentum": 0.5},
]  # fmt: skip


class Small(nn.Module):
    """Strided and plain residual blocks, the activations of image nets, a sum of three."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.one, self.two = nets.Residual(6, 6, 1, 3), nets.Residual(6, 12, 2, 3)
        self.deep = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.norm = nn.GroupNorm(4, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.first(x))
        x = self.two(self.one(x))
        y = F.hardswish(self.norm(self.deep(x)))
        x = x + y + torch.tanh(x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def small(seed: int = 0) -> Case:
    return build(Small, (2, 7, 6), 3, seed, rows=24)


def large(seed: int = 0) -> Case:
    """A layer with more than 2**18 weights and 16 positions, so that its norms come from Gram matrices; one with a pool."""

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 112, 3, padding=1, bias=False),
            nn.GroupNorm(8, 112), nn.ReLU(), nets.Residual(112, 272, 2, 8), nn.Conv2d(272, 112, 3, padding=1), nn.Hardswish(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(112, 3),
        )  # fmt: skip

    return build(make, (3, 16, 16), 3, seed, rows=12)


@every_set
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_residual_nets_agree_with_the_reference(isa, options):
    case = small()
    work = works(case, 2, 1)
    what = plan(1, **options)
    assert_agrees(case, train(native, case, work, what, isa=isa), train(reference, case, work, what), 1e-5)


@every_set
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_large_nets_agree_with_the_reference(isa, options):
    if isa != native.instruction_sets()[0] and options != {"clip": "layer"}:
        pytest.skip("slow, and no code of its own for this instruction set")
    case = large()
    work = works(case, 1, 1)
    what = plan(1, **options)
    assert_agrees(case, train(native, case, work, what, isa=isa), train(reference, case, work, what), 1e-5)


def test_vectors_of_a_client_reach_residual_nets():
    for case in (small(), large()):
        work = works(case, 1, 1, vectors=("shift", "scale", "control", "anchor"))
        what = plan(1, clip="flat", proximal=0.1, penalty=0.1)
        assert_agrees(case, train(native, case, work, what), train(reference, case, work, what), 1e-5)


@pytest.mark.parametrize("clip", ["layer", "flat"])
def test_a_broken_example_of_a_large_net_adds_nothing(clip):
    """A missing value, and one whose products overflow."""
    case = large()
    x = case.x.copy()
    x[3] = np.nan
    x[5] = np.sign(x[5]) * np.float32(3e38)
    case = replace(case, x=x)
    what = LocalPlan(1, 0.1, 4.0, clip=clip, bounds=(0.5,))
    rows = np.array([[1, 3, 2, 5]], np.int32)
    got = train(native, case, [ClientWork(0, rows, bytes(16))], what)
    expected = train(reference, case, [ClientWork(0, rows, bytes(16))], what)
    assert got.skipped[0] == expected.skipped[0] >= 1 and got.finite.all()
    assert_agrees(case, got, expected, 1e-5)


def test_a_batch_of_broken_examples_leaves_the_weights_alone():
    case = large()
    case = replace(case, x=np.full_like(case.x, np.nan))
    rows = np.array([[1, 3]], np.int32)
    got = train(native, case, [ClientWork(0, rows, bytes(16))], LocalPlan(1, 0.1, 4.0, clip="layer", bounds=(0.5,)))
    assert got.skipped[0] == 2 and not got.delta.any() and got.finite.all()


def _sums(case: Case, isa: str, batches: list[np.ndarray], clip: str, bound: float) -> np.ndarray:
    what = LocalPlan(1, 1.0, 1.0, clip=clip, bounds=(bound,), only_sum=True)  # type: ignore[arg-type]
    width = max(map(len, batches))
    rows = [np.pad(b, (0, width - len(b)), constant_values=-1)[None].astype(np.int32) for b in batches]
    result = train(native, case, [ClientWork(k, r, bytes(16)) for k, r in enumerate(rows)], what, isa=isa)
    return -result.delta.astype(np.float64)


@every_set
@pytest.mark.parametrize("clip", ["layer", "flat"])
@pytest.mark.parametrize(("scale", "bound"), [(1.0, 1e-3), (1e12, 1.0), (1e-12, 1e-9)])
def test_what_an_example_adds_to_a_large_net_is_within_the_bound(isa, clip, scale, bound):
    """As tests/training/test_contributions.py measures it: the sum minus the sum without one example. Features and weights
    of very different sizes; equal patches, whose gradients cancel over the positions."""
    if isa != native.instruction_sets()[0] and scale != 1.0:
        pytest.skip("slow, and no code of its own for this instruction set")
    case = large()
    draw = np.random.default_rng(4)
    x = case.x * np.float32(scale) * (10.0 ** draw.uniform(-3, 3, (len(case.x), 1, 1, 1))).astype(np.float32)
    x[::2] = x[::2, :, :1, :1]
    case = replace(case, x=x)
    rows = np.arange(5)
    found = _sums(case, isa, [rows, *(np.delete(rows, i) for i in range(5))], clip, bound)
    layout = layout_of(case.module)
    slack = bounded.rounding_slack("native", 5, size=layout.size, bound=bound, narrowed=True)
    parts = layout.layer_slices() if clip == "layer" else (slice(None),)
    gaps = found[0] - found[1:]
    most = max(float(np.linalg.norm(gaps[:, part], axis=1).max()) for part in parts)
    assert 0.5 * bound < most <= bound * (1 + slack)


def test_an_example_of_a_large_net_has_the_same_bits_in_any_company():
    """The clipped sums of one example alone, and its part of a batch whose others have factor 0 (they are broken)."""
    case = large()
    x = case.x.copy()
    x[6:] = np.nan
    case = replace(case, x=x)
    for clip in ("layer", "flat"):
        alone, company = _sums(case, "auto", [np.array([2]), np.array([6, 7, 2, 8, 9])], clip, 1e-2)
        assert np.array_equal(alone, company)


def test_threads_do_not_change_a_bit_of_large_nets():
    case = large()
    work = works(case, 3, 1)
    what = plan(1, clip="layer", noise="gaussian")
    assert same_bits(train(native, case, work, what), train(native, case, work, what, threads=2))


# What counts as a chain, and what is refused


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1))


def test_a_subclass_and_the_sequential_of_its_layers_give_the_same_bits():
    case = build(Chain, (1, 6, 6), 2)
    net = case.module
    same = nn.Sequential(net.conv, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), net.head)
    what = plan(clip="layer", noise="gaussian")
    assert pool.choose(net, what)[0] == pool.choose(same, what)[0] == "native"
    assert same_bits(train(native, case, works(case), what), train(native, replace(case, module=same), works(case), what))


@pytest.mark.parametrize("stem", ["small", "printed"])
def test_the_shipped_resnet_is_compiled(stem):
    net = nets.build("resnet18-gn", (3, 32, 32), 10, 0, stem=stem)
    assert compile.why_not(net) is None
    assert sum(layer.kind == "add" for layer in compile.compile_layers(net, (3, 32, 32))) == 8


class InPlace(nn.Module):
    """The activation overwrites what the shortcut reads: adding the two is not what the picture of the net says."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(48, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return self.head(torch.flatten(F.relu(x, inplace=True) + x, 1))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other, self.head = nn.Conv2d(1, 3, 3), nn.Conv2d(1, 3, 3), nn.Linear(48, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.other(x)
        return self.head(torch.flatten(self.conv(x), 1))


class FlatSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.one(x))


@pytest.mark.parametrize("make", [InPlace, Unused, FlatSum])
def test_what_the_steps_cannot_say_is_left_to_torch(make):
    net = make()
    assert native.why_not(net, plan()) is not None
    assert pool.choose(net, plan())[0] == "graph"
    if make is not FlatSum:
        assert chain.steps(net) is None
