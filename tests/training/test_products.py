"""The compiled products, norms and sums of the graph engine: right, and the same bits for a row in any company."""

import numpy as np
import pytest

from fedveil.protect import noise

native = noise._native
pytestmark = pytest.mark.skipif(not hasattr(native, "products"), reason="the compiled extension is not installed")
SETS = native.instruction_sets() if hasattr(native, "products") else ["none"]


def draw_case(draw: np.random.Generator, number: int):
    n, rows, columns = draw.integers(1, 5), draw.integers(1, 70), draw.integers(1, 140)
    terms = draw.integers(500, 1100) if number % 10 == 0 else draw.integers(0, 70)
    shared = 1 if number % 3 == 0 else n
    a = draw.normal(size=(n, terms, rows)).astype(np.float32).transpose(0, 2, 1)
    a = a if number % 2 else np.ascontiguousarray(a)
    b = draw.normal(size=(shared, columns, terms)).astype(np.float32).transpose(0, 2, 1)
    b = b if number % 5 else np.ascontiguousarray(b)
    return a, b, draw.normal(size=columns).astype(np.float32) if number % 2 else None


@pytest.mark.parametrize("isa", SETS)
def test_products_are_right_and_a_row_alone_has_the_same_bits(isa):
    draw = np.random.default_rng(0)
    for number in range(60):
        a, b, bias = draw_case(draw, number)
        room = np.full((len(a), a.shape[1], b.shape[2] + 3), 7, np.float32)
        out = room[:, :, :-3]
        native.products(a, b, out, bias, isa)
        wanted = np.matmul(a.astype(float), b.astype(float)) + (0 if bias is None else bias)
        assert np.abs(out - wanted).max() < 1e-5 * np.sqrt(a.shape[2] + 1) + 1e-6
        assert (room[:, :, -3:] == 7).all()
        alone = np.empty((1, 1, b.shape[2]), np.float32)
        native.products(a[-1:, -1:], b[-1:], alone, bias, isa)
        assert np.array_equal(alone[0, 0], out[-1, -1])


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("size", [1e-42, 1e-20, 1.0, 1e38])
def test_sizes_neither_vanish_nor_overflow_and_sums_are_in_double(isa, size):
    values = (np.random.default_rng(1).normal(size=(3, 77)) * size).clip(-3e38, 3e38).astype(np.float32)
    for l1 in (False, True):
        out = np.ones(3) * 0
        native.add_sizes(values, out, l1, isa)
        wide = values.astype(np.float64)
        assert np.allclose(out, np.abs(wide).sum(1) if l1 else np.square(wide).sum(1), rtol=1e-12, atol=0)
    total, factors = np.ones(77), np.array([0.5, 2.0, 1e-3])
    native.add_rows(total, values, factors, isa)
    assert np.allclose(total, 1 + factors @ values.astype(np.float64), rtol=1e-12)


@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 5, 6)), ((3, 3, 4), (2, 4, 6)), ((2, 2, 4), (2, 4, 6))])
def test_matrices_that_do_not_fit_are_refused(shapes):
    a, b = (np.zeros(shape, np.float32) for shape in shapes)
    with pytest.raises(ValueError, match="cannot be multiplied"):
        native.products(a, b, np.zeros((2, 3, 6), np.float32))
