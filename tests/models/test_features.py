"""Fixed features act on each row alone, from public constants only; the wavelets are checked against plain sums."""

from __future__ import annotations

import dataclasses
import math
import stat

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.data.rows import Dataset
from fedveil.errors import UserError
from fedveil.models import features
from fedveil.models.features import FrontEnd, apply, compute, drawn_directions, parse, pictures, scattering


@pytest.fixture(scope="module")
def few_pictures():
    """A small whitening, so that tests stay fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "PICTURES", 500)
        patch.delenv("FEDVEIL_CACHE", raising=False)
        drawn_directions.cache_clear()
        yield
    drawn_directions.cache_clear()


def some_images(count: int, shape: tuple[int, ...] = (1, 12, 12), seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).random((count, *shape)).astype(np.float32)


def dataset_of(x: np.ndarray, x_test: np.ndarray) -> Dataset:
    y, y_test = np.arange(len(x)) % 2, np.arange(len(x_test)) % 2
    return Dataset("made", x, y, x_test, y_test, classes=2, pixel_range=(0.0, 1.0) if x.ndim == 4 else None)


def wavelet_by_hand(size: int, scale: int, angle: float) -> np.ndarray:
    """A Morlet wavelet on a periodic grid, from its formula, for offsets -size/2 … size/2 - 1."""
    spread, pitch, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 0.5
    out = np.zeros((size, size), complex)
    envelope = np.zeros((size, size))
    for down in range(-size // 2, size // 2):
        for across in range(-size // 2, size // 2):
            along = across * math.cos(angle) + down * math.sin(angle)
            beside = down * math.cos(angle) - across * math.sin(angle)
            envelope[down, across] = math.exp(-(along**2 + (slant * beside) ** 2) / (2 * spread**2))
            out[down, across] = envelope[down, across] * complex(
                math.cos(pitch * along), math.sin(pitch * along)
            )
    out -= envelope * out.sum() / envelope.sum()
    return out * slant / (2 * math.pi * spread**2)


def convolve_by_hand(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    out = np.zeros(image.shape, complex)
    for down in range(len(image)):
        for across in range(len(image)):
            out += kernel[down, across] * np.roll(image, (down, across), (0, 1))
    return out


def average_by_hand(values: np.ndarray, step: int, cells: int) -> np.ndarray:
    """Gaussian averages (deviation 1.6 pixels) around the middles of 4 x 4 cells, 4 pixels of edge left out."""
    out = np.zeros((cells, cells))
    for i in range(cells):
        for j in range(cells):
            middle = 4 * np.array([i, j]) + 4 + 1.5
            places = np.arange(len(values)) * step
            down, across = (np.exp(-((places - m) ** 2) / (2 * 1.6**2)) for m in middle)
            weights = np.outer(down, across)
            out[i, j] = (weights * values).sum() / weights.sum()
    return out


def test_scattering_equals_convolution_sums_written_out():
    image = some_images(1)[0, 0]
    padded = np.pad(image, 4, mode="reflect").astype(float)
    found = scattering(torch.as_tensor(image)[None, None])[0].numpy()
    size = len(padded)
    np.testing.assert_allclose(found[0], average_by_hand(padded, 1, 3), atol=1e-5)
    fine = np.abs(convolve_by_hand(padded, wavelet_by_hand(size, 0, 3 * math.pi / 8)))
    np.testing.assert_allclose(found[1 + 3], average_by_hand(fine, 1, 3), atol=1e-5)
    coarse = np.abs(convolve_by_hand(padded, wavelet_by_hand(size, 1, math.pi / 8)))[::2, ::2]
    np.testing.assert_allclose(found[1 + 8 + 1], average_by_hand(coarse, 2, 3), atol=1e-5)
    twice = np.abs(convolve_by_hand(fine, wavelet_by_hand(size, 1, 5 * math.pi / 8)))[::2, ::2]
    np.testing.assert_allclose(found[17 + 3 * 8 + 5], average_by_hand(twice, 2, 3), atol=1e-5)


def test_scattering_has_81_maps_per_channel_and_rounds_sizes_up():
    assert scattering(torch.zeros(2, 3, 14, 9)).shape == (2, 243, 4, 3)


def test_a_flat_image_has_no_oriented_energy():
    found = scattering(torch.full((1, 1, 16, 16), 0.7))
    np.testing.assert_allclose(found[:, 0], 0.7, atol=1e-5)
    np.testing.assert_allclose(found[:, 1:], 0.0, atol=1e-5)


def test_turning_an_image_by_90_degrees_turns_the_maps_and_shifts_the_directions():
    image = torch.as_tensor(some_images(1, (1, 16, 16)))
    before, after = scattering(image)[0], scattering(torch.rot90(image, 1, (2, 3)))[0]
    # Full resolution only: thinning by two samples the even pixels, which a turn moves to the odd ones.
    turned = torch.rot90(before[1:9], 1, (1, 2)).roll(4, 0)
    np.testing.assert_allclose(after[1:9], turned, atol=1e-4)


def test_rows_do_not_see_each_other(few_pictures):
    x = some_images(7)
    front = FrontEnd("scattering", components=40)
    together = compute(x, front)
    alone = np.concatenate([compute(x[i : i + 1], front) for i in range(len(x))])
    np.testing.assert_allclose(together, alone, atol=2e-5)
    other = x.copy()
    other[3] = 1 - other[3]
    changed = np.abs(compute(other, front) - together).max(axis=1) > 1e-3
    assert changed.tolist() == [i == 3 for i in range(len(x))]


def test_every_row_has_length_one_even_if_black(few_pictures):
    x = np.concatenate([some_images(4), np.zeros((1, 1, 12, 12), np.float32)])
    out = compute(x, FrontEnd("scattering", components=30))
    assert out.dtype == np.float32 and out.shape == (5, 30)
    np.testing.assert_allclose(np.linalg.norm(out, axis=1), 1, atol=1e-5)


def test_directions_are_orthonormal_and_carry_the_variances_of_drawn_pictures(few_pictures):
    centre, directions, variance = drawn_directions((1, 12, 12))
    strong = directions[:, :100]
    np.testing.assert_allclose(strong.T @ strong, np.eye(100), atol=1e-3)
    rows = features.energies(pictures(500, (1, 12, 12))) - centre
    np.testing.assert_allclose((rows @ strong).square().mean(0), variance[:100], rtol=1e-2)
    assert (variance[:-1] >= variance[1:]).all()


def test_more_ridge_trusts_strong_directions_more(few_pictures):
    x = some_images(20)
    weak = compute(x, FrontEnd("scattering", components=60, ridge=1e-6))
    strong = compute(x, FrontEnd("scattering", components=60, ridge=1.0))
    assert (strong[:, :10] ** 2).sum() > (weak[:, :10] ** 2).sum()


def test_drawn_pictures_depend_on_their_seed_only():
    np.random.seed(1)
    one = pictures(5, (1, 16, 16))
    np.random.seed(2)
    torch.manual_seed(2)
    assert torch.equal(one, pictures(5, (1, 16, 16)))
    assert not torch.equal(one, pictures(5, (1, 16, 16), seed=1))
    assert one.min() >= 0 and one.max() <= 1 and (one.flatten(1).std(dim=1) > 0).all()
    assert pictures(3, (3, 16, 12)).shape == (3, 3, 16, 12)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 6).flatmap(
        lambda d: st.lists(st.lists(st.floats(-9, 9), min_size=d, max_size=d), min_size=1)
    )
)
def test_unit_rows_keep_their_direction(rows: list[list[float]]):
    x = np.array(rows, np.float32)
    out = compute(x, FrontEnd("unit", constant=2.0))
    np.testing.assert_allclose(np.linalg.norm(out, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(out[:, :-1] * 2, x * out[:, -1:], atol=1e-4)


def test_unit_keeps_the_named_columns():
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    out = compute(x, FrontEnd("unit", columns="0-1+4"))
    np.testing.assert_allclose(out[0], np.array([0, 1, 4, 1]) / math.sqrt(18), rtol=1e-6)


def test_a_given_length_keeps_short_rows_short_and_bounds_long_ones():
    x = np.array([[3.0, 4.0], [30.0, 40.0]], np.float32)
    out = compute(x, FrontEnd("unit", constant=0.0, length=10.0))
    np.testing.assert_allclose(np.linalg.norm(out, axis=1), [0.5, 1.0], rtol=1e-6)


def test_public_ranges_become_minus_one_to_one_and_bound_what_lies_outside():
    x = np.array([[1, 10], [100, 40], [10, 20], [0.001, 1e9]], np.float32)
    flat = FrontEnd("unit", constant=0.0, low="1+10", high="100+40", length=2.0)
    np.testing.assert_allclose(
        2 * compute(x, flat)[:, :2], [[-1, -1], [1, 1], [-9 / 11, -1 / 3], [-1, 1]], atol=1e-6
    )
    log = dataclasses.replace(flat, scale="log")
    np.testing.assert_allclose(2 * compute(x, log)[:, :2], [[-1, -1], [1, 1], [0, 0], [-1, 1]], atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), st.floats(0.01, 500), st.sampled_from(["", "log", "linear"]))
def test_a_tables_rows_do_not_see_each_other(which: int, value: float, scale: str):
    x = np.random.default_rng(4).uniform(1, 50, (10, 3)).astype(np.float32)
    ranges = {"low": "1+2+3", "high": "50+40+30", "scale": scale} if scale else {}
    front = FrontEnd("unit", constant=0.5, length=1.0, **ranges)
    before = compute(x, front)
    other = x.copy()
    other[which] = value
    rest = np.arange(10) != which
    np.testing.assert_array_equal(compute(other, front)[rest], before[rest])
    np.testing.assert_array_equal(compute(x[rest], front), before[rest])


@pytest.mark.parametrize("text", ["scattering:components=30", "unit:columns=0-2,constant=0.5,length=1"])
def test_leaving_out_one_training_example_changes_no_other_row_and_no_test_row(few_pictures, text: str):
    """Neighbouring datasets stay neighbours: nothing is fitted on the rows."""
    shape = (1, 12, 12) if text.startswith("scattering") else (4,)
    x, x_test = some_images(9, shape), some_images(5, shape, seed=6)
    whole = apply(dataset_of(x, x_test), text)
    kept = np.arange(9) != 4
    without = apply(dataset_of(x[kept], x_test), text)
    np.testing.assert_allclose(without.x, whole.x[kept], atol=2e-5)
    np.testing.assert_array_equal(without.x_test, whole.x_test)


def test_long_computations_say_how_far_they_are(few_pictures, monkeypatch, capsys):
    monkeypatch.setattr(features, "TELL_EVERY", -1.0)
    compute(some_images(70), FrontEnd("scattering", components=10))
    shown = capsys.readouterr()
    assert "features: 64 of 70 images" in shown.err and "FEDVEIL_CACHE" in shown.err and not shown.out


def test_kept_directions_are_the_same_and_are_read_again(few_pictures, tmp_path, monkeypatch):
    fresh = drawn_directions((1, 12, 12))
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path))
    drawn_directions.cache_clear()
    drawn_directions((1, 12, 12))
    assert [path.name for path in tmp_path.iterdir()] == ["directions-1-500-1x12x12.npz"]
    monkeypatch.setattr(features, "_directions", lambda *_: pytest.fail("computed again"))
    drawn_directions.cache_clear()
    for kept, new in zip(drawn_directions((1, 12, 12)), fresh, strict=True):
        assert torch.equal(kept, new)


def test_apply_replaces_features_and_keeps_the_rest(few_pictures):
    dataset = dataset_of(some_images(6), some_images(4, seed=5))
    out = apply(dataset, "scattering:components=25,ridge=0.01")
    assert out.x.shape == (6, 25) and out.x_test.shape == (4, 25) and out.pixel_range is None
    assert out.y is dataset.y and out.shape == (25,)
    assert out.notes[-1].startswith("features:") and not out.notes[-1].startswith("private")
    np.testing.assert_array_equal(out.x_test, apply(dataset, "scattering:components=25,ridge=0.01").x_test)


def test_kept_features_are_the_same_and_are_read_again(few_pictures, tmp_path, monkeypatch):
    x = some_images(6)
    front = FrontEnd("scattering", components=20)
    fresh = compute(x, front)
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "kept"))
    np.testing.assert_allclose(compute(x, front), fresh, atol=1e-5)
    (file,) = (tmp_path / "kept").glob("features-*")
    monkeypatch.setattr(features, "_projected", lambda *_: pytest.fail("computed again"))
    np.testing.assert_allclose(compute(x, dataclasses.replace(front, ridge=0.1))[:, 0] != 0, True)
    assert file.suffix == ".npy"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kept").iterdir()} == {0o600}  # as private as the images
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scatering", "Did you mean 'scattering'"),
        ("scattering:component=3", "Did you mean 'components'"),
        ("scattering:components=many", "not a number"),
        ("scattering:components=0", "components must be 1 to"),
        ("scattering:ridge=0", "ridge above 0"),
        ("unit:components=3", "constant, columns"),
        ("unit:length=-1", "length must be 0 or more"),
        ("unit:low=1+2,high=3", "as many low as high"),
        ("unit:low=-inf,high=3", "finite"),
        ("unit:low=1,high=1.00000001", "float32"),
        ("unit:low=1e-46,high=1,scale=log", "above 0"),
        ("unit:low=4,high=3", "each low below its high"),
        ("unit:low=a,high=3", "one number for each column"),
        ("unit:scale=log", "needs ranges above 0"),
        ("unit:low=0,high=3,scale=log", "needs ranges above 0"),
        ("unit:scale=lin", "Did you mean 'linear'"),
    ],
)
def test_wrong_specifications_say_what_to_write(text: str, message: str):
    with pytest.raises(UserError, match=message):
        parse(text)


def test_a_front_end_that_does_not_fit_the_data_is_refused():
    table = dataset_of(np.zeros((4, 3), np.float32), np.zeros((2, 3), np.float32))
    with pytest.raises(UserError, match="needs images"):
        apply(table, "scattering")
    with pytest.raises(UserError, match="is for tables"):
        apply(dataset_of(some_images(2), some_images(2)), "unit")
    with pytest.raises(UserError, match="columns 0 to 2"):
        apply(table, "unit:columns=0-3")
    with pytest.raises(UserError, match="0-9"):
        apply(table, "unit:columns=first")
    with pytest.raises(UserError, match="3 columns are kept"):
        apply(table, "unit:low=1+2,high=3+4")


def _pictures_of(name: str, channels: int) -> Dataset:
    x = np.random.default_rng(0).random((6, channels, 9, 9), dtype=np.float32)
    y = np.arange(6) % 2
    return Dataset(name, x, y, x[:2], y[:2], classes=2, pixel_range=(0.0, 1.0))


def test_standard_features_are_the_published_constants_by_channel_and_keep_the_shape():
    data = _pictures_of("cifar10", 3)
    out = apply(data, "standard")
    by_hand = np.stack(
        [
            (data.x[:, c] - m) / d
            for c, (m, d) in enumerate([(0.4914, 0.2470), (0.4822, 0.2435), (0.4465, 0.2616)])
        ],
        1,
    )
    np.testing.assert_allclose(out.x, by_hand, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out.x[:2], out.x_test)  # each row alone: the same row gives the same result
    assert out.x.dtype == np.float32 and out.shape == (3, 9, 9)


def test_standard_features_of_unknown_images_use_the_range_alone_and_given_numbers_win():
    data = _pictures_of("somebody's", 1)
    np.testing.assert_allclose(apply(data, "standard").x, 2 * data.x - 1, atol=1e-6)
    given = apply(data, "standard:mean=0.25,deviation=2").x
    np.testing.assert_allclose(given, (data.x - 0.25) / 2, atol=1e-6)


@pytest.mark.parametrize(
    "text", ["standard:mean=a", "standard:deviation=0", "standard:mean=0.1+0.2", "standard:deviation=nan"]
)
def test_standard_features_refuse_what_is_no_scale(text):
    with pytest.raises(UserError):
        apply(_pictures_of("somebody's", 3), text)


def test_no_rows_have_no_features_of_the_same_width():
    """A server without training rows and a node without test rows compute these."""
    front = parse("unit:constant=1")
    assert compute(np.zeros((0, 7), np.float32), front).shape == (0, 8)
    assert compute(np.zeros((3, 7), np.float32), front).shape == (3, 8)
