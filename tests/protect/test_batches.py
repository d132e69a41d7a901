"""Samplers do what the ledger says they do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.protect.batches import batches, cohort, passes

ROWS = np.arange(100, 200)


def test_poisson_batches_have_distinct_rows_and_the_right_mean():
    drawn = batches("poisson", ROWS, 5, 2000, 0, 1, 0)
    sizes = (drawn >= 0).sum(1)
    for row in drawn[:200]:
        used = row[row >= 0]
        assert len(set(used.tolist())) == len(used)
    # Binomial(100, 0.05): mean 5, deviation 2.18; the mean of 2000 lies within 5 sigma but for 6e-7 of seeds.
    assert abs(sizes.mean() - 5) < 5 * 2.18 / np.sqrt(2000)
    assert abs(sizes.var() - 4.75) < 0.9
    assert set(drawn[drawn >= 0].tolist()) <= set(ROWS.tolist())


def test_poisson_inclusion_is_uniform_over_records():
    drawn = batches("poisson", ROWS, 5, 4000, 3, 1, 0)
    counts = np.bincount(drawn[drawn >= 0] - 100, minlength=100)
    # 100 Binomial(4000, 0.05): chi-square with 100 degrees; bound at false-alarm rate 1e-6 is about 185.
    assert ((counts - 200) ** 2 / 190).sum() < 185


def test_poisson_padding_comes_last():
    drawn = batches("poisson", ROWS, 5, 50, 0, 1, 0)
    assert all((row[np.argmax(row < 0) :] < 0).all() for row in drawn if (row < 0).any())


@given(st.integers(1, 30), st.integers(1, 20), st.integers(20, 90))
def test_partition_uses_a_record_at_most_passes_times_and_once_per_step(steps, batch, size):
    drawn = batches("partition", ROWS[:size], batch, steps, 1, 1, 1)
    assert drawn.shape == (steps, batch)
    assert all(len(set(row.tolist())) == batch for row in drawn)
    assert np.bincount(drawn.reshape(-1)).max() <= passes(steps, batch, size)


def test_fixed_batches_have_exactly_the_size_and_distinct_rows():
    drawn = batches("fixed", ROWS, 7, 300, 0, 2, 5)
    assert drawn.shape == (300, 7)
    assert all(len(set(row.tolist())) == 7 for row in drawn)


@pytest.mark.parametrize("kind", ["poisson", "fixed", "partition", "full"])
def test_a_batch_at_least_as_large_as_the_data_is_all_of_it(kind):
    drawn = batches(kind, ROWS[:4], 9, 3, 0, 1, 0)
    assert drawn.tolist() == [ROWS[:4].tolist()] * 3


def test_draws_depend_on_round_and_client_only_through_keys():
    same = batches("poisson", ROWS, 5, 10, 0, 1, 2)
    assert np.array_equal(same, batches("poisson", ROWS, 5, 10, 0, 1, 2))
    assert not np.array_equal(same, batches("poisson", ROWS, 5, 10, 0, 2, 2)[:, : same.shape[1]])


def test_cohorts():
    assert cohort("all", 5, 2, 0, 1).tolist() == [0, 1, 2, 3, 4]
    fixed = cohort("fixed", 1000, 100, 0, 1)
    assert len(fixed) == 100 and len(set(fixed.tolist())) == 100
    sizes = [len(cohort("poisson", 1000, 100, 0, r)) for r in range(300)]
    # Binomial(1000, 0.1): deviation 9.49; mean of 300 within 5 sigma but for 6e-7 of seeds.
    assert abs(np.mean(sizes) - 100) < 5 * 9.49 / np.sqrt(300)
    assert np.std(sizes) > 5
