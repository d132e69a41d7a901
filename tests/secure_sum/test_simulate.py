"""The whole protocol in one process: same integers as a plain sum, drop-outs, failures, and its price."""

import numpy as np
import pytest
from sums import MODEL, vectors

from fedveil.secure_sum import noise, simulate
from fedveil.secure_sum.coordinator import Failure, Sum
from fedveil.secure_sum.parameters import Parameters


def _parameters(n=8, t=6, c=1, size=500):
    return Parameters(MODEL, size, 2.0**-10, 1.0, 4.0, n, t, c)


def test_the_opened_sum_is_bit_for_bit_the_plain_sum_of_the_same_noised_vectors():
    p = _parameters()
    values = np.random.default_rng(1).normal(size=(p.nodes, p.size))
    noised = {
        node: noise.on_grid(p, values[node - 1]) + noise.share(p, bytes([node] * 16))
        for node in range(1, p.nodes + 1)
    }
    played = simulate.sum_of(noised, p, 3)
    assert isinstance(played.result, Sum)
    assert np.array_equal(played.result.total, sum(noised.values()))


def test_with_the_noise_in_one_share_the_sum_is_that_of_noise_added_once_in_the_middle():
    """Values on the grid, so that rounding parts and rounding the total agree; noise injected by the test."""
    p = _parameters()
    values = np.random.default_rng(2).integers(-1000, 1000, (p.nodes, p.size)) * p.grid
    central = noise.share(p, b"n" * 16)
    once = noise.on_grid(p, values.sum(axis=0)) + central
    shared = {node: noise.on_grid(p, values[node - 1]) for node in range(1, p.nodes + 1)}
    shared[4] = shared[4] + central
    assert np.array_equal(simulate.sum_of(shared, p, 3).result.total, once)


def test_who_drops_out_is_left_out_and_too_many_leave_no_sum():
    p = _parameters()
    inputs = vectors(p.nodes, p.size, 1)
    played = simulate.sum_of(inputs, p, 3, drops={2: 0, 5: 2})
    assert isinstance(played.result, Sum) and played.result.survivors == (1, 3, 4, 6, 7, 8)
    assert np.array_equal(played.result.total, sum(inputs[node] for node in played.result.survivors))
    failed = simulate.sum_of(inputs, p, 3, drops={2: 0, 5: 2, 6: 3})
    assert isinstance(failed.result, Failure)
    assert failed.result.stage == "survivors" and failed.result.missing == (6,)
    assert "6 are needed" in failed.result.reason


def test_another_attempt_has_other_masks_and_the_same_sum():
    p = _parameters(4, 3, 0)
    inputs = vectors(p.nodes, p.size, 1)
    first, again, other = (
        simulate.masked_upload(inputs[2], p, 3, 2, attempt=attempt) for attempt in (0, 0, 1)
    )
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    totals = [simulate.sum_of(inputs, p, 3, attempt=attempt).result.total for attempt in (0, 1)]
    assert np.array_equal(*totals)


def test_a_masked_upload_says_nothing_about_its_vector():
    """Correlation of 20,000 uniform words with anything: below 5 / sqrt(20,000) but for a chance of 6e-7."""
    p = _parameters(4, 3, 0, 20_000)
    vector = np.random.default_rng(1).integers(-(2**28), 2**28, p.size)
    seen = simulate.masked_upload(vector, p, 3, 1)
    correlation = np.corrcoef(seen.astype(float), vector.astype(float))[0, 1]
    assert abs(correlation) < 5 / np.sqrt(p.size)
    assert seen.std() == pytest.approx(2**32 / np.sqrt(12), rel=0.05)


def test_the_price_is_one_word_per_weight_and_a_few_kilobytes():
    p = _parameters(size=100_000)
    played = simulate.sum_of(vectors(p.nodes, p.size, 1), p, 3)
    assert played.bytes_up / (4 * p.size * p.nodes) < 1.01
