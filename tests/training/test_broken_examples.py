"""A gradient that is not finite adds nothing, in every engine; weights that are not finite end their client."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import Case, build, everything, largest_difference, mlp, plan, train, works
from torch import nn

from fedveil.training import native, reference
from fedveil.training.torch import functional, stacked

BAD = 39
NEEDS_NATIVE = pytest.mark.skipif(not native.available(), reason="no compiled extension")
ENGINES = [
    (stacked, {"dtype": torch.float64}, 1e-11),
    (functional, {"dtype": torch.float64}, 1e-11),
    pytest.param(native, {}, 2e-5, marks=NEEDS_NATIVE),
]
OPTIONS = [
    {"clip": "layer"},
    {"clip": "flat", "clip_norm": "l1"},
    {"clip": "layer", "noise": "gaussian"},
    {"clip": "flat", "noise": "gaussian", "sensitivity": "l2-max"},
    {"clip": "layer", "noise": "gaussian", "bound_rule": "median"},
    {"clip": "flat", "noise": "gaussian", "grid": 2.0**-12},
    {"clip": "flat", "noise": "gaussian", "vectors": ("shift", "scale")},
]


def with_bad_row(case: Case, value: float) -> Case:
    x = case.x.copy()
    x[BAD].reshape(-1)[3] = value
    return replace(case, x=x)


def works_with_bad_row(case: Case, **options) -> list:
    """Client 1 meets the bad row in its first place and in the middle; client 2 meets nothing else; 0 and 3 never."""
    work = works(case, clients=4, batch=5, poisson=True, **options)
    for one in work:
        one.rows[one.rows == BAD] = 1
    work[1].rows[0, :3] = [BAD, 4, 5]
    work[1].rows[1] = [7, 8, BAD, 9, BAD]
    work[2].rows[1] = BAD
    return work


@pytest.mark.parametrize(("engine", "how", "limit"), ENGINES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_engines_agree_on_broken_examples(engine, how, limit, options, value):
    vectors = options.get("vectors", ())
    what = plan(**{k: v for k, v in options.items() if k != "vectors"})
    for make in (everything, mlp):
        case = with_bad_row(make(), value)
        work = works_with_bad_row(case, vectors=vectors)
        got = train(engine, case, work, what, **how)
        expected = train(reference, case, work, what, **({"dtype": torch.float64} if how else {}))
        assert got.finite.all() and got.skipped.tolist() == expected.skipped.tolist() == [0, 3, 5, 0]
        assert got.delta.any(axis=1).all()
        assert largest_difference(got, expected) < limit + what.grid


@pytest.mark.parametrize("engine", [reference, stacked, functional, pytest.param(native, marks=NEEDS_NATIVE)])
def test_a_broken_example_is_as_good_as_absent(engine):
    case = with_bad_row(everything(), np.nan)
    work = works_with_bad_row(case)
    without = [
        replace(w, rows=np.array([[*r[r != BAD], *r[r == BAD]] for r in w.rows], np.int32)) for w in work
    ]
    without = [replace(w, rows=np.where(w.rows == BAD, -1, w.rows)) for w in without]
    for options in ({"clip": "layer"}, {"clip": "flat", "noise": "gaussian"}):
        one, other = (train(engine, case, w, plan(**options)) for w in (work, without))
        np.testing.assert_allclose(one.delta, other.delta, rtol=1e-4, atol=2e-6)
        np.testing.assert_allclose(one.loss, other.loss, rtol=1e-5)
        assert np.allclose(one.below_count, other.below_count)
        assert (one.examples - one.skipped).tolist() == other.examples.tolist()


@pytest.mark.parametrize(("engine", "how", "limit"), ENGINES)
def test_the_neighbours_of_a_broken_example_keep_their_bits(engine, how, limit):
    healthy = everything()
    case = with_bad_row(healthy, np.inf)
    work = works_with_bad_row(case)
    for options in ({"clip": "layer", "noise": "gaussian"}, {"clip": "flat"}):
        one, other = (train(engine, c, work, plan(**options)) for c in (case, healthy))
        assert np.array_equal(one.delta[[0, 3]], other.delta[[0, 3]])


@pytest.mark.parametrize(("engine", "how", "limit"), ENGINES)
def test_without_a_clip_a_broken_example_still_ends_its_client(engine, how, limit):
    case = with_bad_row(everything(), np.nan)
    got = train(engine, case, works_with_bad_row(case), plan(), **how)
    assert got.finite.tolist() == [True, False, False, True]
    assert not got.delta[1:3].any() and not got.skipped.any()


@pytest.mark.parametrize(("engine", "how", "limit"), ENGINES)
def test_weights_that_overflow_end_the_client_whatever_is_clipped(engine, how, limit):
    case = mlp()
    (one,) = works(case, 1)
    anchor = np.zeros_like(case.start)
    steep = [one, replace(one, anchor=np.full_like(anchor, np.float32(3e38)))]
    what = plan(clip="layer", noise="gaussian", penalty=5.0, learning_rate=1.0)
    got = train(engine, case, steep, what)
    assert got.finite.tolist() == [True, False]
    assert got.delta[0].any() and not got.delta[1].any() and got.skipped.tolist() == [0, 0]


def test_a_norm_beyond_float32_is_skipped_not_passed_on():
    """A finite input may have an infinite gradient: the squared error of a huge output."""
    case = build(lambda: nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 1)), (7,), None)
    x = case.x.copy()
    x[BAD] = 1e30
    case = replace(case, x=x)
    work = works_with_bad_row(case)
    what = plan(clip="flat", loss="squared")
    expected = train(reference, case, work, what)
    assert expected.skipped[2] == 5 and np.isfinite(expected.delta).all()
    for engine in (stacked, functional, *([native] if native.available() else [])):
        got = train(engine, case, work, what)
        assert got.skipped.tolist() == expected.skipped.tolist()
        np.testing.assert_allclose(got.delta, expected.delta, atol=1e-5)
