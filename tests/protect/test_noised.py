"""The value that adds the noise: what it draws is the stream times its scale, on the grid or not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedveil.errors import UserError
from fedveil.protect import exact, noise
from fedveil.protect.law import LAWS, Staircase, kernel_of
from fedveil.protect.noised import Drawing, Noised

KEY = bytes(range(16))
NOTHING = np.zeros(50)


def drawing(law: str = "gaussian", sigma: float = 0.5, **more) -> Drawing:
    scale, shape = LAWS[law].scale(sigma, 1.0, 50)
    return Drawing(**{"law": LAWS[law], "scale": scale, "shape": shape, **more})


def test_gaussian_noise_is_its_stream_times_the_scale():
    z = noise.normals(KEY, 1, 50)
    assert np.array_equal(drawing(sigma=2.0).add(NOTHING, KEY, 1), z * np.float32(2.0))
    assert np.array_equal(drawing(sigma=2.0).add(NOTHING, KEY, 1, 3.0), (z * np.float32(2.0)).astype(float) * 3.0)


def test_noise_that_follows_the_batch_is_as_much_wider_as_its_norm_and_the_root_of_its_count():
    assert float(drawing(at_norm=4.0).times(2.0, 9)) == 0.5
    assert float(drawing(at_count=4.0).times(2.0, 9)) == 1.5
    assert float(drawing(at_norm=4.0, at_count=4.0).times(2.0, 9)) == 0.75
    assert float(drawing().times(2.0, 9)) == 1.0
    assert drawing(at_norm=4.0).times([2.0, 8.0]).tolist() == [0.5, 2.0]


@pytest.mark.parametrize(("norm", "count"), [(2.0, 9), (0.5, 1)])
def test_the_scale_for_one_unit_is_the_one_that_engines_multiply(norm, count):
    for made in (drawing(), drawing(at_norm=4.0), drawing(at_count=16.0), drawing(at_norm=4.0, at_count=16.0)):
        one = made.per_unit * (norm if made.at_norm else 1) * (math.sqrt(count) if made.at_count else 1)
        assert one == pytest.approx(made.scale * float(made.times(norm, count)), rel=1e-14)


@pytest.mark.parametrize("grid", [0.0, 2.0**-20])
@pytest.mark.parametrize("law", list(LAWS))
def test_no_noise_for_sigma_zero_or_an_empty_batch_with_noise_on_examples(law, grid):
    assert not drawing(law, 0.0, grid=grid).add(NOTHING, KEY).any()
    assert not drawing(law, grid=grid).add(NOTHING, KEY, 0, 0.0).any()
    assert drawing(law, grid=grid).add(NOTHING, KEY).all()


def test_noise_on_a_grid_is_on_the_grid_and_has_its_scale():
    grid, n = 2.0**-10, 20_000
    total = np.random.default_rng(0).normal(size=n)
    out = drawing(sigma=1.5, grid=grid).add(total, KEY, 1)
    assert np.array_equal(out / grid, np.round(out / grid))
    assert stats.kstest((out - total) / 1.5, "norm").pvalue > 1e-4  # false alarm 1e-4; rounding adds at most grid / 2


@pytest.mark.parametrize("law", list(LAWS))
def test_noise_on_a_grid_has_one_scale_for_all_coordinates(law):
    with pytest.raises(UserError, match="grid"):
        drawing(law, grid=0.1).add(NOTHING, KEY, 0, np.ones(50))


@pytest.mark.parametrize("law", ["laplace", "staircase", "joint-staircase"])
def test_noise_on_a_grid_is_the_float_noise_to_its_scale(law):
    """Mean size of integer noise against that of the float law; 5 standard errors, false alarm 6e-7."""
    grid, n = 2.0**-20, 20_000 if law != "joint-staircase" else 60
    kinds = [drawing(law, grid=grid).add(np.zeros(n), KEY, s) for s in (0, 1)]
    floats = [drawing(law).add(np.zeros(n), KEY, s) for s in (2, 3)]
    sizes = [np.abs(np.concatenate(both)) for both in (kinds, floats)]
    spread = math.hypot(*(x.std() / math.sqrt(len(x)) for x in sizes))
    assert abs(sizes[0].mean() - sizes[1].mean()) < 5 * spread
    assert all(np.array_equal(x / grid, np.round(x / grid)) for x in kinds)


def test_a_narrow_staircase_has_steps_of_its_width_and_tends_to_laplace():
    """100,000 draws; the mean of |x| of Laplace noise of scale 2 is 2, found to 0.02 (3 deviations)."""
    law = Staircase(width=0.05)
    scale, shape = law.scale(2.0, 1.0, 100_000)
    drawn = Drawing(law, scale, shape).draw(KEY, 0, 100_000)
    np.testing.assert_array_equal(drawn, np.float32(0.05) * noise.staircases(KEY, 0, 100_000, 0.05 / 2.0))
    assert np.abs(drawn).mean() == pytest.approx(2.0, abs=0.02)


def test_what_is_handed_to_engines_draws_what_is_claimed():
    noised = Noised(LAWS["laplace"], 3.0, 2.0, 50, grid=2.0**-20)
    assert np.array_equal(noised.add(NOTHING, KEY, 4), noised.drawing.add(NOTHING, KEY, 4))
    assert noised.deviation == noised.drawing.deviation(50) == pytest.approx(3 * math.sqrt(2))


def test_noise_on_a_coarser_grid_is_worth_as_much():
    noised = Noised(LAWS["gaussian"], 3.0, 2.0, 50, grid=2.0**-20)
    coarse = replace(noised, scale=noised.on_grid(0.05), grid=0.05)
    assert noised.multiplier <= coarse.multiplier <= noised.multiplier * (1 + 1e-9)


def test_a_law_of_another_package_is_not_drawn_by_a_kernel_that_it_inherited():
    class Mine(type(LAWS["gaussian"])):
        pass

    assert kernel_of(LAWS["gaussian"]) == "gaussian" and kernel_of(Mine()) == ""


def test_the_event_counts_how_far_the_samplers_are_from_their_laws_in_every_coordinate():
    grid = 2.0**-20
    for law, error in (("gaussian", exact.gaussian_error(3.0 / grid)), ("laplace", exact.laplace_error())):
        stated = Noised(LAWS[law], 3.0, 2.0, 50, grid=grid).event().noise
        assert stated.ratio == 50 * error.ratio > 0 and stated.tail == 50 * error.tail
    assert Noised(LAWS["gaussian"], 3.0, 2.0, 50, grid=grid).event().noise.tail > 0


@pytest.mark.parametrize("grid", [0.0, 2.0**-20])
def test_every_step_has_noise_of_its_own(grid):
    steps = [drawing(grid=grid).add(NOTHING, KEY, step) for step in range(3)]
    assert not any(np.any(steps[i] == steps[j]) for i in range(3) for j in range(i))


def test_the_laws_draw_their_exact_samplers_at_their_own_scale():
    for law, sampler in (("gaussian", exact.gaussian), ("laplace", exact.laplace)):
        drawn = LAWS[law].units(KEY, 2, 50, 1e6, 0.0, "l2")
        assert np.array_equal(drawn, sampler(KEY, 2, 50, 1e6))
