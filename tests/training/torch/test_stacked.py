"""The stacked engine: equal to the oracle, and no client's bits depend on its neighbours."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from engine_cases import build, everything, largest_difference, mlp, plan, same_bits, train, works
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedveil.errors import UserError
from fedveil.training import native, reference
from fedveil.training.torch import functional, layers, stacked
from fedveil.training.torch.layers import Given, Outer, materialise, measure, products, sum_up, widened

VECTORS = ("control", "anchor", "shift", "scale")
OPTIONS = [
    {},
    {"clip": "layer"},
    {"clip": "flat"},
    {"clip": "layer", "clip_norm": "l1"},
    {"clip": "flat", "clip_norm": "l1"},
    {"clip": "layer", "bound_rule": "median"},
    {"clip": "flat", "bound_rule": "median"},
    {"clip": "layer", "bounds": (float("inf"), 0.3, 0.1)},
    {"momentum": 0.9, "proximal": 0.2, "clip": "flat"},
    {"loss": "cross-entropy", "clip": "layer", "momentum": 0.5, "penalty": 0.4, "proximal": 0.1},
]
NOISY = [
    {"clip": "layer", "sensitivity": "l2-max"},
    {"clip": "layer", "sensitivity": "l2-max-mean", "noise": "gaussian"},
    {"clip": "flat", "sensitivity": "l2-max-mean", "noise": "gaussian"},
    {"clip": "layer", "measure_mean": True},
    {"clip": "flat", "measure_mean": True},
    {"clip": "layer", "bound_rule": "median", "measure_mean": True},
    {"clip": "flat", "sensitivity": "l2-max"},
    {"clip": "layer", "bound_rule": "median"},
    {"clip": "layer", "bound_rule": "median", "sensitivity": "l2-max"},
    {"clip": "none", "sensitivity": "l2-max"},
    {"clip": "none"},
    {"clip": "layer", "noise_on": "example"},
    {"clip": "layer", "noise_on": "mean"},
    {"clip": "flat", "noise": "laplace", "clip_norm": "l1"},
    {"clip": "flat", "noise": "staircase", "clip_norm": "l1", "nu": 0.4},
    {"clip": "flat", "noise": "joint-staircase", "clip_norm": "l1", "noise_on": "example"},
    {"clip": "flat", "grid": 0.001},
]


@pytest.mark.parametrize("options", OPTIONS + [{"noise": "gaussian", **n} for n in NOISY], ids=str)
@pytest.mark.parametrize("vectors", [(), VECTORS], ids=["plain", "vectors"])
def test_equals_the_reference_in_float64(options, vectors):
    case = everything()
    work = works(case, poisson=True, vectors=vectors)
    one = train(reference, case, work, plan(**options), dtype=torch.float64)
    other = train(stacked, case, work, plan(**options), dtype=torch.float64)
    # With a grid the engines round sums that differ in the last bit; both round to the same multiple here.
    assert largest_difference(one, other) < (1e-6 if options.get("grid") else 1e-11)


def test_equals_the_reference_for_regression():
    case = mlp(classes=None)
    work, what = works(case, poisson=True), plan(clip="layer", loss="squared")
    one = train(reference, case, work, what, dtype=torch.float64)
    assert largest_difference(one, train(stacked, case, work, what, dtype=torch.float64)) < 1e-11


def test_stays_near_the_reference_in_float32_after_many_steps():
    case = everything()
    work, what = works(case, clients=2, steps=30), plan(steps=30, clip="layer", noise="gaussian")
    assert largest_difference(train(reference, case, work, what), train(stacked, case, work, what)) < 1e-5


NETS = st.sampled_from([
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(50, 4), nn.GELU(), nn.Linear(4, 3)),
    lambda: nn.Sequential(nn.Conv2d(2, 3, (2, 3), padding=(1, 0)), nn.Sigmoid(), nn.Flatten(), nn.Linear(54, 3)),
    lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, bias=False), nn.ELU(), nn.Flatten(), nn.Linear(12, 3)),
    lambda: nn.Sequential(nn.Conv2d(2, 6, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(54, 3)),
    lambda: nn.Sequential(nn.Conv2d(2, 4, 3, dilation=2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 3)),
    lambda: nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(2, 3, 1), nn.LeakyReLU(), nn.Flatten(), nn.Linear(12, 3)),
    lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(50, 3, bias=False)),
])  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    make=NETS,
    seed=st.integers(0, 10**6),
    clip=st.sampled_from(["none", "layer", "flat"]),
    norm=st.sampled_from(["l1", "l2"]),
    rule=st.sampled_from(["given", "median"]),
    bound=st.floats(1e-3, 10),
    momentum=st.sampled_from([0.0, 0.7]),
    vectors=st.lists(st.sampled_from(["control", "anchor", "adaclip"]), unique=True, max_size=2),
    batch=st.integers(1, 5),
)
def test_equals_the_reference_for_random_nets_and_plans(
    make, seed, clip, norm, rule, bound, momentum, vectors, batch
):
    case = build(make, (2, 5, 5), 3, seed, rows=12)
    names = tuple(n for v in vectors for n in (("shift", "scale") if v == "adaclip" else (v,)))
    work = works(case, clients=2, steps=2, batch=batch, poisson=True, vectors=names, seed=seed)
    what = plan(
        steps=2,
        clip=clip,
        clip_norm=norm,
        bound_rule=rule,
        bounds=(bound, bound),
        momentum=momentum,
        penalty=0.2,
    )
    one = train(reference, case, work, what, dtype=torch.float64)
    assert largest_difference(one, train(stacked, case, work, what, dtype=torch.float64)) < 1e-9
    together = train(stacked, case, work, what, chunk=2)
    assert same_bits(together, train(stacked, case, work, what, chunk=1))


PRIVATE = {"clip": "layer", "noise": "gaussian", "sensitivity": "l2-max"}
CASES = {
    "everything": everything,
    "mlp": mlp,
    "regression": lambda: mlp(classes=None),
    "wide": lambda: build(
        lambda: nn.Sequential(nn.Linear(300, 33), nn.Softplus(), nn.Linear(33, 3)), (300,), 3
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("poisson", [False, True], ids=["fixed", "poisson"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "blas"])
def test_bits_do_not_depend_on_the_chunk_the_order_or_the_padding(name, dtype, poisson, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(layers, "compiled", lambda *_: None)
    case = CASES[name]()
    loss = "squared" if name == "regression" else "cross-entropy"
    for options in (PRIVATE, {"clip": "flat", "clip_norm": "l1"}, {"momentum": 0.5}):
        work, what = works(case, clients=7, batch=9, poisson=poisson), plan(loss=loss, **options)
        whole = train(stacked, case, work, what, dtype=dtype, chunk=7)
        for chunk in (1, 2, 3, 6):
            assert same_bits(whole, train(stacked, case, work, what, dtype=dtype, chunk=chunk)), chunk
        backwards = train(stacked, case, work[::-1], what, dtype=dtype, chunk=4)
        assert np.array_equal(whole.delta, backwards.delta[::-1])
        wider = [replace(w, rows=np.pad(w.rows, ((0, 0), (0, 6)), constant_values=-1)) for w in work]
        assert same_bits(whole, train(stacked, case, wider, what, dtype=dtype, chunk=7))


def test_bits_do_not_depend_on_which_vectors_the_neighbours_have():
    case = mlp()
    plain, given_ = works(case, clients=3), works(case, clients=3, vectors=VECTORS)
    mixed = [plain[0], given_[1], plain[2], given_[0]]
    what = plan(clip="layer", penalty=0.1)
    together = train(stacked, case, mixed, what, chunk=4)
    alone = [train(stacked, case, [one], what) for one in mixed]
    assert np.array_equal(together.delta, np.concatenate([r.delta for r in alone]))


def test_large_batches_are_cut_into_passes_without_a_change_in_meaning(monkeypatch):
    case = everything()
    work, what = (
        works(case, clients=2, batch=11, poisson=True),
        plan(clip="flat", noise="gaussian", sensitivity="l2-max"),
    )
    expected = train(reference, case, work, what, dtype=torch.float64)
    monkeypatch.setattr(stacked, "_CACHE", 1)  # one row per pass
    assert largest_difference(expected, train(stacked, case, work, what, dtype=torch.float64)) < 1e-11


def test_rows_between_padding_count_and_a_batch_of_padding_is_empty():
    case = mlp()
    (work,) = works(case, clients=1)
    holes = replace(work, rows=np.array([[3, -1, 5], [-1, -1, -1], [-1, 2, -1]], np.int32))
    what = plan(clip="layer")
    result = train(stacked, case, [holes], what, dtype=torch.float64)
    assert result.examples[0] == 3
    assert largest_difference(train(reference, case, [holes], what, dtype=torch.float64), result) < 1e-11


@pytest.mark.parametrize("options", [{}, {"noise": "gaussian", "sensitivity": "l2-max"}])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_stay_with_their_client(options, bad):
    case = everything()
    case.x[39] = bad
    work = works(case, clients=4, poisson=True)
    for one in work:
        one.rows[one.rows == 39] = 1
    work[2].rows[1, 0] = 39
    result = train(stacked, case, work, plan(**options), chunk=4)
    assert result.finite.tolist() == [True, True, False, True]
    assert not np.any(result.delta[2]) and result.loss[2] == 0
    rest = [work[0], work[1], work[3]]
    alone = train(stacked, case, rest, plan(**options), chunk=1)
    assert np.array_equal(result.delta[[0, 1, 3]], alone.delta)
    assert all(
        np.isfinite(getattr(result, f)).all() for f in ("loss", "norm_mean", "norm_max", "noise_scale")
    )


def test_a_diverging_client_is_found_by_its_weights():
    case = mlp()
    result = train(stacked, case, works(case), plan(learning_rate=1e38))
    assert not result.finite.any() and not np.any(result.delta)


def test_an_activation_module_used_twice_acts_twice():
    """One object at two places of a Sequential: once before a pool, where the engine swaps the two, and once not."""
    relu, tanh = nn.ReLU(), nn.Tanh()

    def make() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), relu, nn.MaxPool2d(2), nn.Conv2d(4, 3, 2), relu, tanh, nn.Flatten(),
            nn.Linear(3, 6), tanh, nn.Linear(6, 3), relu,
        )  # fmt: skip

    case = build(make, (2, 6, 6), 3)
    assert len(stacked.leaves(case.module)) == 11
    work = works(case)
    for options in ({}, {"clip": "flat"}, {"clip": "layer", "noise": "gaussian"}):
        expected = train(reference, case, work, plan(**options), dtype=torch.float64)
        for engine in (stacked, functional):
            got = train(engine, case, work, plan(**options), dtype=torch.float64)
            assert largest_difference(got, expected) < 1e-11
        if native.available():
            assert native.why_not(case.module, plan(**options)) is None
            got = train(native, case, work, plan(**options))
            assert largest_difference(got, train(reference, case, work, plan(**options))) < 2e-5


def test_equal_maxima_and_dropped_rows_follow_torch():
    """A constant image makes every window tie, above and below zero; the pool drops the last row and column."""
    case = build(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
        (1, 6, 6),
        3,
    )
    case.x[:] = 0.5
    work = works(case)
    one = train(reference, case, work, plan(), dtype=torch.float64)
    assert largest_difference(one, train(stacked, case, work, plan(), dtype=torch.float64)) < 1e-12


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("positions", [1, 2, 50])
def test_norms_and_sums_of_outer_products_equal_the_materialised_ones(bias, positions):
    make = torch.Generator().manual_seed(0)
    a = torch.randn(2, 3, positions, 20, generator=make, dtype=torch.float64)
    d = torch.randn(2, 3, positions, 30, generator=make, dtype=torch.float64)
    outer = Outer(widened(a, bias), widened(d), 30, 32 * 32)
    whole = materialise(outer).values
    assert whole.shape == (2, 3, 32 * 32)
    matrix = whole[1, 2].view(32, 32)
    torch.testing.assert_close(matrix[:30, :20], d[1, 2].T @ a[1, 2])
    torch.testing.assert_close(matrix[:30, 20], d[1, 2].sum(0) * bias)
    assert not matrix[30:].any() and not matrix[:, 20 + bias :].any()
    for kind, order in (("l1", 1), ("l2", 2)):
        norms, kept = measure(outer, kind)
        torch.testing.assert_close(norms, torch.linalg.vector_norm(whole, order, dim=2))
    assert isinstance(kept, Given) == (positions > 1)
    factors = torch.rand(2, 3, generator=make, dtype=torch.float64)
    for capture in (outer, materialise(outer)):
        out = torch.empty(2, whole.shape[2], dtype=torch.float64)
        sum_up(capture, factors, out)
        torch.testing.assert_close(out, (factors[:, :, None] * whole).sum(1))


SIDES = st.sampled_from([1, 2, 3, 5, 8, 16, 25, 33, 64, 130, 300])


@settings(max_examples=100, deadline=None)
@given(
    clients=st.integers(1, 5),
    examples=st.integers(1, 6),
    sides=st.tuples(SIDES, SIDES, SIDES),
    double=st.booleans(),
    compiled=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_examples_product_has_the_bits_it_has_alone(clients, examples, sides, double, compiled, seed):
    """Whatever the other clients and the rest of the batch, for every CPU and BLAS: equal shapes, equal alignment."""
    with mock.patch.object(layers, "compiled", layers.compiled if compiled else lambda *_: None):
        _products_have_the_bits_they_have_alone(clients, examples, sides, double, seed)


def _products_have_the_bits_they_have_alone(clients, examples, sides, double, seed):
    (rows, inner, columns), dtype = sides, torch.float64 if double else torch.float32
    make = torch.Generator().manual_seed(seed)
    x = widened(torch.randn(clients, examples, rows, inner, generator=make, dtype=dtype))
    w = widened(widened(torch.randn(clients, inner, columns, generator=make, dtype=dtype)).transpose(1, 2))
    for matrices in (w.transpose(1, 2), w.transpose(1, 2).contiguous()):
        whole = products(x, matrices)
        for client, example in ((0, 0), (clients - 1, examples - 1)):
            here = slice(client, client + 1)
            alone = products(x[here, example : example + 1].clone(), matrices[here])
            assert torch.equal(whole[client, example], alone[0, 0])
        if examples > 1:
            assert torch.equal(whole[:, 1:], products(x[:, 1:].clone(), matrices))


@pytest.mark.parametrize(
    ("net", "word"),
    [
        (nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), "'1' \\(LayerNorm\\)"),
        (nn.Sequential(nn.Conv2d(2, 2, 3, groups=2)), "groups"),
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2))), "'1.0' \\(BatchNorm1d\\)"),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), "Dropout"),
        (nn.Sequential(nn.ReLU()), "no parameters"),
    ],
)
def test_what_cannot_be_stacked_is_refused_by_name(net, word):
    with pytest.raises(UserError, match=word):
        stacked.compile_net(net, (2, 5, 5))


def test_labels_that_the_model_cannot_have_are_refused():
    case = mlp()
    case.y[4] = 3
    with pytest.raises(UserError, match=r"between 0 and 3.*3 outputs"):
        train(stacked, case, works(case), plan())


def test_chunks_follow_the_cache_and_no_work_gives_no_rows():
    small = stacked.compile_net(mlp().module, (7,))
    image = stacked.compile_net(
        nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(21632, 10)), (1, 28, 28)
    )
    assert stacked.chunk_for(small, 3) == 64
    assert 1 <= stacked.chunk_for(image, 5) < 10
    empty = train(stacked, mlp(), [], plan())
    assert empty.delta.shape == (0, small.layout.size) and empty.norm_max.shape == (0, 3)


@pytest.mark.parametrize("noise", ["none", "gaussian"])
def test_a_client_without_data_is_a_client_with_empty_batches(noise):
    case, what = mlp(), plan(clip="layer", noise=noise)
    work = works(case, clients=3)
    work[1] = replace(work[1], rows=np.zeros((3, 0), np.int32))
    result = train(stacked, case, work, what, dtype=torch.float64)
    assert result.examples.tolist() == [12, 0, 12] and result.finite.all()
    assert np.any(result.delta[1]) == (noise == "gaussian")
    assert largest_difference(train(reference, case, work, what, dtype=torch.float64), result) < 1e-11


def test_no_steps_change_nothing_and_missing_steps_are_refused():
    case = mlp()
    work = works(case, clients=2, steps=2)
    with pytest.raises(UserError, match="rows for 2 steps, but the plan has 3"):
        train(stacked, case, work, plan())
    nothing = [replace(w, rows=w.rows[:0]) for w in work]
    assert not np.any(train(stacked, case, nothing, plan(steps=0)).delta)
