"""What one example adds to a sum stays within its bound, whatever the weights, the features and the bound.

Measured as it counts: the sum before noise of a batch, minus that of the batch without one example (`only_sum`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from engine_cases import Case, build, everything, mlp, plan, train, works
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedveil.errors import UserError
from fedveil.models.layout import layout_of
from fedveil.protect import bounded
from fedveil.training import native, pool, reference
from fedveil.training.contract import ClientWork, LocalPlan
from fedveil.training.torch import functional, graph, layers, stacked
from fedveil.training.torch.layers import Given, Outer, materialise, sum_up

ENGINES: list[Any] = [("stacked", "auto"), ("stacked", "blas"), ("graph", "auto"), ("functional", "auto"), ("reference", "auto")]
ENGINES += [("native", isa) for isa in native.instruction_sets()]
_OF = {"stacked": stacked, "graph": graph, "functional": functional, "reference": reference, "native": native}
every_engine = pytest.mark.parametrize(("engine", "isa"), ENGINES)


@contextmanager
def products_of(isa: str) -> Iterator[None]:
    """With "blas" the stacked engine multiplies as it does where there is no compiled module."""
    with ExitStack() as stack:
        if isa == "blas":
            stack.enter_context(mock.patch.object(layers, "compiled", lambda *_: None))
        yield


def sums(
    engine: str, isa: str, case: Case, batches: list[np.ndarray], clip: str, norm: str, bound: float
) -> np.ndarray:
    """The sum of clipped gradients of each batch, float64 [len(batches), P]."""
    what = LocalPlan(1, 1.0, 1.0, clip=clip, clip_norm=norm, bounds=(bound,), only_sum=True)  # type: ignore[arg-type]
    if case.y.dtype == np.float32:
        what = replace(what, loss="squared")
    width = max(map(len, batches))
    rows = [np.pad(b, (0, width - len(b)), constant_values=-1)[None].astype(np.int32) for b in batches]
    work = [ClientWork(k, r, bytes(16)) for k, r in enumerate(rows)]
    options = {"isa": isa} if engine == "native" else {}
    with products_of(isa):
        result = train(_OF[engine], case, work, what, **options)
    assert result.finite.all()
    return -result.delta.astype(np.float64)


def excess(engine: str, isa: str, case: Case, rows: np.ndarray, clip: str, norm: str, bound: float) -> float:
    """Largest contribution of any row of the batch, over the bound plus what rounding may add."""
    without = [np.delete(rows, i) for i in range(len(rows))]
    found = sums(engine, isa, case, [rows, *without], clip, norm, bound)
    layout = layout_of(case.module)
    parts = layout.layer_slices() if clip == "layer" else (slice(None),)
    order = 1 if norm == "l1" else 2
    slack = bounded.rounding_slack(
        engine, len(rows), size=layout.size, bound=bound, kind=norm, narrowed=True
    )
    gaps = found[0] - found[1:]
    return max(float(np.linalg.norm(gaps[:, part], order, axis=1).max()) for part in parts) / (
        bound * (1 + slack)
    )


def linear(inputs: int, outputs: int, seed: int = 0, **changes: Any) -> Case:
    return replace(build(lambda: nn.Sequential(nn.Linear(inputs, outputs)), (inputs,), outputs, seed), **changes)


def conv(seed: int = 0) -> Case:
    """Few positions and many channels: the shape for which norms once came from Gram matrices."""
    return build(
        lambda: nn.Sequential(nn.Conv2d(8, 24, 2), nn.Tanh(), nn.Flatten(), nn.Linear(96, 3)), (8, 3, 3), 3, seed
    )


@every_engine
@pytest.mark.parametrize("bound", [1e-4, 1e-6])
def test_tiny_output_gradients_beside_huge_features_are_clipped(engine, isa, bound):
    """Sums of squares in float32 lose what is below 2.6e-23: a gradient of norm 1e-23 * 1e18 would pass unclipped."""
    case = build(lambda: nn.Sequential(nn.Linear(4, 3)), (4,), None)
    x = np.full_like(case.x, 1e18)
    start = np.zeros_like(case.start)
    y = np.linspace(1, 2, 3 * len(case.x)).astype(np.float32).reshape(-1, 3) * np.float32(1e-23)
    case = replace(case, x=x, start=start, y=y)
    assert excess(engine, isa, case, np.arange(5), "flat", "l2", bound) <= 1


def cancelling(size: float) -> Case:
    """Equal patches of the given size, and weights behind them that cancel over the positions: an example's gradient is a sum
    of huge terms near 0, so that rounding decides its norm."""
    case = build(lambda: nn.Sequential(nn.Conv2d(8, 24, 2), nn.Flatten(), nn.Linear(96, 3)), (8, 3, 3), 3)
    draw = np.random.default_rng(1)
    start = case.start.copy()
    head = layout_of(case.module).layer_slices()[1].start
    weight = np.round(draw.normal(size=(3, 24, 4)) * 1024) / 1024
    weight[:, :, 3] = -weight[:, :, :3].sum(2)
    start[head : head + weight.size] = weight.ravel()
    start[:head] *= np.float32(1 / size)
    x = np.broadcast_to(draw.uniform(1, 2, (len(case.x), 8, 1, 1)) * size, case.x.shape).astype(np.float32)
    return replace(case, start=start, x=x)


@every_engine
@pytest.mark.parametrize("size", [1e7, 1e9, 1e11])
def test_positions_that_cancel_are_measured_as_they_are_summed(engine, isa, size):
    for clip in ("layer", "flat"):
        assert excess(engine, isa, cancelling(size), np.arange(4), clip, "l2", 1e-3) <= 1


@every_engine
def test_the_rest_of_a_batch_keeps_its_bits_when_an_example_leaves(engine, isa):
    """Weights with huge opposite entries: the last bit of a product decides which units are on. If it depended on the
    number of rows in the batch, one example could turn all others around."""
    draw = np.random.default_rng(3)
    make = build(lambda: nn.Sequential(nn.Linear(67, 9), nn.ReLU(), nn.Linear(9, 3)), (67,), 3)
    w = draw.normal(size=(9, 67)) * 1e7
    w[:, 33:66] = -w[:, :33]
    x = draw.normal(size=make.x.shape).astype(np.float32)
    x[:, 33:66] = x[:, :33] * (1 + np.float32(2**-23))
    start = make.start.copy()
    start[: w.size] = w.astype(np.float32).ravel()
    case = replace(make, x=x, start=start)
    for count in range(2, 12):
        assert excess(engine, isa, case, np.arange(count), "flat", "l2", 1.0) <= 1, count


def hostile(case: Case, draw: np.random.Generator, low: float = -38, high: float = 38) -> Case:
    """Weights and features over the whole range of float32, by coordinate, by block or all alike; some zeros, copies
    and opposites; some of them denormal."""

    def values(shape: tuple[int, ...]) -> np.ndarray:
        base = draw.normal(size=shape)
        kind = draw.integers(4)
        exponent = draw.uniform(low, high, shape if kind == 0 else (shape[0],) + (1,) * (len(shape) - 1))
        if kind == 2:
            exponent = draw.uniform(low, high)
        if kind == 3:
            exponent = draw.choice([low, -1.0, 0.0, high / 2], shape)
        with np.errstate(over="ignore"):
            out = (base * 10.0**exponent).astype(np.float32)
        out = np.where(np.isfinite(out), out, np.float32(3e38))
        flat = out.reshape(-1)
        flat[draw.random(flat.size) < 0.1] = 0
        if draw.random() < 0.3:
            half = flat.size // 2
            flat[half : 2 * half] = -flat[:half] * np.float32(draw.choice([1.0, 1 + 2**-23]))
        return out

    calm = draw.integers(3)  # weights, features or both are hostile
    start = case.start if calm == 0 else values(case.start.shape)
    x = case.x if calm == 1 else values(case.x.shape)
    return replace(case, start=start.astype(np.float32), x=x.astype(np.float32))


NETS = {
    "linear": lambda seed: linear(5, 4, seed),
    "regression": lambda seed: mlp(classes=None, seed=seed),
    "mlp": lambda seed: mlp(seed=seed),
    "conv": conv,
    "everything": everything,
}


class Series(nn.Module):
    """A recurrent cell, attention, layer norm and a linear layer on five positions of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.wide, self.out = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cell(x)[0]
        x = self.norm(x + self.attention(x, x, x)[0])
        return self.out(nn.functional.gelu(self.wide(x)).mean(1))


class Positions(nn.Module):
    """Linear layers on positions: few positions beside many weights, then the other way around."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(20, 40, bias=False), nn.Linear(40, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.b(self.a(x))).sum(1))


SEQUENCES = {  # for the engine of any module
    "series": lambda seed: build(Series, (5, 4), 3, seed),
    "positions": lambda seed: build(Positions, (4, 20), 3, seed),
}


def opposed(size: float) -> Case:
    """Positions that cancel: an example's gradient is a sum of huge terms near 0."""
    case = build(Positions, (4, 20), 3)
    draw = np.random.default_rng(1)
    x = np.broadcast_to(draw.uniform(1, 2, (len(case.x), 1, 20)) * size, case.x.shape) * np.array([1, -1, 1, -1])[:, None]
    x = x * (1 + np.array([0, 1, 2, 3])[:, None] * 2.0**-22)
    start = case.start.copy()
    start[:800] *= np.float32(1e-3 / size)
    return replace(case, x=x.astype(np.float32), start=start)


@pytest.mark.parametrize("size", [1e4, 1e7, 1e11])
def test_positions_of_a_linear_layer_that_cancel_are_measured_as_they_are_summed(size):
    for clip in ("layer", "flat"):
        for norm in ("l2", "l1"):
            assert excess("graph", "auto", opposed(size), np.arange(4), clip, norm, 1e-3) <= 1


def sweep(engine: str, isa: str, cases: int, seed: int) -> tuple[float, int]:
    """The largest excess over random hostile cases, and how many contributions came within 1% of the bound."""
    draw = np.random.default_rng(seed)
    worst, near = 0.0, 0
    nets = {**NETS, **SEQUENCES} if engine == "graph" else NETS
    names = list(nets)
    for number in range(cases):
        case = hostile(nets[names[number % len(names)]](number % 7), draw)
        bound = float(10 ** draw.uniform(-20, 20)) if draw.random() < 0.5 else float(10 ** draw.uniform(-7, 2))
        clip, norm = draw.choice(["flat", "layer"]), draw.choice(["l2", "l1"])
        rows = draw.choice(len(case.x), draw.integers(1, 7), replace=False)
        got = excess(engine, isa, case, rows, str(clip), str(norm), bound)
        worst, near = max(worst, got), near + (got > 0.99)
    return worst, near


@every_engine
def test_hostile_cases_stay_within_the_bound(engine, isa):
    worst, near = sweep(engine, isa, 60 if engine in ("stacked", "graph", "native") else 20, seed=1)
    assert worst <= 1
    assert near > 2  # the clip was reached, not avoided by dropping everything


@pytest.mark.slow
@every_engine
def test_ten_thousand_hostile_contributions_stay_within_the_bound(engine, isa):
    worst, near = sweep(engine, isa, 2500, seed=2)  # four examples each, about
    assert worst <= 1 and near > 100


@every_engine
def test_a_sum_of_many_examples_moves_by_no_more_than_one(engine, isa):
    """300 examples at the bound, all alike: rounding of the sum is within the stated slack, and an example counts."""
    case = build(lambda: nn.Sequential(nn.Linear(20, 3)), (20,), 3, rows=300)
    rows = np.arange(300)
    found = sums(engine, isa, case, [rows, rows[:-1], rows[1:]], "flat", "l2", 1e-3)
    for gap in found[0] - found[1:]:
        assert 0.99e-3 <= np.linalg.norm(gap) <= 1e-3 * (
            1 + bounded.rounding_slack(engine, 300, size=gap.size, bound=1e-3, narrowed=True)
        )


@every_engine
def test_only_sum_is_what_a_step_takes(engine, isa):
    case = everything()
    work = works(case, clients=3, steps=1, poisson=True)
    options = {"isa": isa} if engine == "native" else {}
    what = plan(steps=1, clip="layer", learning_rate=1.0, expected_batch=1.0)
    with products_of(isa):
        step = train(_OF[engine], case, work, what, **options)
        alone = train(_OF[engine], case, work, replace(what, only_sum=True), **options)
    np.testing.assert_allclose(step.delta, alone.delta, atol=3e-7)
    oracle = train(reference, case, work, what, dtype=torch.float64)
    np.testing.assert_allclose(alone.delta, oracle.delta, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 17, 32])
@pytest.mark.parametrize("outer", [True, False])
def test_float32_sums_err_by_no_more_than_their_stated_share(count, outer):
    """The stacked engine's short sums against exact ones: terms of mixed signs, as outer products and written out."""
    draw = torch.Generator().manual_seed(count)
    d, a = (torch.randn(2, count, 1, 16, generator=draw) for _ in range(2))
    factors = torch.rand(2, count, generator=draw, dtype=torch.float64)
    scaled = (d[:, :, 0] * factors[:, :, None]).float().double()
    capture: Outer | Given = Outer(a, d, 16, 256)
    terms = scaled[..., None] * a.double()
    if not outer:
        capture = materialise(capture)
        terms = (capture.values * factors.float()[:, :, None].double()).unflatten(2, (16, 16))
    found = torch.empty(2, 256)
    sum_up(capture, factors, found)
    error = (found.double().view(2, 16, 16) - terms.sum(1)).abs()
    assert (error <= (count + 3) / 2 * 2.0**-24 * terms.abs().sum(1)).all()


# clip_vector: what a client does to its update.

SIZES = st.one_of(st.floats(1e-38, 1e38), st.floats(1e-45, 1e-37), st.sampled_from([0.0, 1e-45, 3.4e38]))


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.tuples(SIZES, st.sampled_from([1, -1])), min_size=1, max_size=12),
    bound=st.floats(1e-20, 1e20),
    kind=st.sampled_from(["l1", "l2"]),
    double=st.booleans(),
)
def test_a_clipped_vector_is_exactly_within_its_bound(values, bound, kind, double):
    vector = np.array([v * s for v, s in values], np.float64 if double else np.float32)
    out = bounded.clip_vector(vector, bound, kind=kind)
    assert out.dtype == vector.dtype
    exact = [Fraction(float(v)) for v in out]
    if kind == "l1":
        assert sum(map(abs, exact)) <= Fraction(bound)
    else:
        assert sum(v * v for v in exact) <= Fraction(bound) ** 2
    assert np.all(np.sign(out) * np.sign(vector) >= 0)
    if bounded.norm_of(vector, kind) <= bound * (1 - bounded.MARGIN):
        assert np.array_equal(out, vector)


def test_a_denormal_factor_does_not_round_up():
    """1e38 down to 1e-7: the factor 1e-45 has one bit in float32; rounded to it, an update came out at 1.92 bounds."""
    for scale in np.linspace(1e37, 3e38, 50):
        out = bounded.clip_vector(np.full(3, scale, np.float32), 2e-7)
        assert 0 < np.linalg.norm(out.astype(np.float64)) <= 2e-7


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_adds_nothing(bad):
    out = bounded.clip_vector(np.array([1.0, bad, 2.0, 3.0], np.float32), 1.0, (slice(0, 2), slice(2, 4)))
    assert np.array_equal(out[:2], [0, 0]) and 0.99 < np.linalg.norm(out[2:]) <= 1


@pytest.mark.parametrize("bound", [0.0, -1.0, 1e-30, 1e30, math.nan])
def test_bounds_that_arithmetic_cannot_keep_are_refused(bound):
    case = mlp()
    with pytest.raises(UserError, match="between 1e-20 and 1e\\+20"):
        train(pool, case, works(case), plan(clip="flat", bounds=(bound,) * 3))


def test_the_slack_is_small_and_grows_as_stated():
    for engine, limit in (("native", 1e-3), ("stacked", 1e-4), ("functional", 1e-9)):
        values = [bounded.rounding_slack(engine, n, size=1_000_000) for n in (1, 5, 32, 256, 1000)]
        assert values == sorted(values) and values[-1] < limit
    assert bounded.rounding_slack("native", 60_000) < 6e-4
    assert bounded.rounding_slack("functional", 60_000) < 1e-6
    for n in (1, 3, 5, 32, 300):  # promises count the loosest engine's
        assert bounded.rounding_slack("stacked", n) <= bounded.rounding_slack("native", n)
