import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.attacks import metrics


def naive_ssim(a, b, data_range, side):
    """One window at a time, straight from the definition."""
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    values = []
    for channel in range(a.shape[0]):
        for i in range(a.shape[1] - side + 1):
            for j in range(a.shape[2] - side + 1):
                p = a[channel, i : i + side, j : j + side].ravel()
                q = b[channel, i : i + side, j : j + side].ravel()
                cov = np.cov(p, q, ddof=1)
                values.append(
                    (2 * p.mean() * q.mean() + c1)
                    * (2 * cov[0, 1] + c2)
                    / ((p.mean() ** 2 + q.mean() ** 2 + c1) * (cov[0, 0] + cov[1, 1] + c2))
                )
    return np.mean(values)


@pytest.mark.parametrize(("shape", "side"), [((1, 12, 12), 7), ((3, 10, 9), 7), ((1, 6, 8), 5)])
@pytest.mark.parametrize("data_range", [1.0, 255.0])
def test_ssim_agrees_with_the_naive_loop(shape, side, data_range):
    rng = np.random.default_rng(3)
    a, b = rng.random((2, 2, *shape)) * data_range
    expected = [naive_ssim(p, q, data_range, side) for p, q in zip(a, b, strict=True)]
    np.testing.assert_allclose(metrics.ssim(a, b, data_range), expected, rtol=1e-9)


def test_a_perfect_copy_scores_perfectly():
    x = np.random.default_rng(0).random((3, 1, 8, 8))
    s = metrics.score(x, x)
    assert np.all(s.mse == 0) and np.allclose(s.ssim, 1) and s.success().all() and np.isinf(s.psnr()).all()


def test_a_diverged_image_is_clamped_before_it_is_measured():
    x = np.zeros((1, 1, 8, 8))
    wild = np.full_like(x, 8e7)
    wild[0, 0, 0, 0] = np.nan
    assert metrics.score(x, wild).mse[0] <= 1.0
    assert not metrics.score(x, wild).success()[0]


def test_pixel_range_is_part_of_the_measure():
    x = np.random.default_rng(1).random((4, 1, 8, 8))
    y = np.clip(x + 0.05, 0, 1)
    unit, wide = metrics.score(x, y), metrics.score(2 * x - 1, 2 * y - 1, (-1.0, 1.0))
    np.testing.assert_allclose(unit.mse, wide.mse)
    np.testing.assert_allclose(unit.ssim, wide.ssim)


def test_black_image_passes_the_papers_threshold_and_fails_ours():
    x = np.random.default_rng(2).random((5, 1, 28, 28)) * 0.6
    black = metrics.controls(x)["black"]
    assert black["success_rate_papers"] == 1.0 and black["success_rate"] == 0.0


def test_psnr_of_a_known_error():
    x = np.zeros((1, 1, 8, 8))
    assert metrics.score(x, x + 0.1).psnr()[0] == pytest.approx(20.0)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 7))
def test_matching_undoes_any_permutation(seed, n):
    rng = np.random.default_rng(seed)
    x = rng.random((n, 1, 4, 4))
    order = rng.permutation(n)
    found = metrics.match(x, x[order])
    np.testing.assert_array_equal(x[order][found], x)


def test_batch_labels_count_as_multisets():
    assert metrics.label_accuracy(np.array([[1, 1, 2]]), np.array([[2, 1, 3]])) == pytest.approx(2 / 3)
    assert metrics.label_accuracy(np.array([1, 2]), np.array([2, 2])) == 0.5


def test_the_control_of_labels_is_what_the_same_guesses_get_of_others():
    """Guesses that know their victim against guesses that always say the commonest label."""
    truth = np.arange(40) % 10
    control, chance = metrics.label_control(truth, truth)
    assert control == pytest.approx(0.1, abs=0.03) and chance < 0.01
    control, chance = metrics.label_control(truth, np.zeros(40, int))
    assert control == 0.1 and chance == 1.0
    assert metrics.label_control(truth[:1], truth[:1]) == (None, None)


def test_one_victim_is_held_against_public_frequencies():
    """Balanced labels are guessed nearly as well without looking: 62% of them is nothing, all but one of rare ones is much."""
    public, truth = np.arange(1000) % 10, np.arange(600)[None] % 10
    poor = np.where(np.arange(600) < 372, truth, (truth + 1) % 3)
    control, chance = metrics.label_control(truth, poor, public)
    assert control > 0.9 and chance > 0.9
    odd = np.array([[7] * 19 + [3]])
    control, chance = metrics.label_control(odd, np.full((1, 20), 7), public)
    assert control < 0.3 and chance < 0.001


def test_guesses_that_know_nothing_are_rarely_called_knowing():
    """1,000 games of five victims with eight labels each: p < 0.05 in at most 5% of them, up to chance (0.1% false alarms)."""
    draw = np.random.default_rng(5)
    games = [metrics.label_control(draw.integers(0, 10, (5, 8)), draw.integers(0, 10, (5, 8)), draws=400)[1] for _ in range(1000)]
    assert sum(p < 0.05 for p in games) <= 73 and min(games) > 0


def test_the_error_without_clamping_is_the_median_of_the_finite_images_in_units_of_the_pixel_range():
    truth = np.zeros((4, 1, 2, 2))
    guess = np.stack([np.full((1, 2, 2), value) for value in (1.0, -3.0, 5.0, np.nan)])
    assert metrics.rmse_unclamped(truth, guess, (-1.0, 1.0)) == pytest.approx(1.5)
    assert metrics.rmse_unclamped(truth[3:], guess[3:]) is None
