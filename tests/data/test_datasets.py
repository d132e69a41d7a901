"""Built-in datasets: shapes of the papers, public scaling, splits that never overlap."""

import gzip

import numpy as np
import pytest

from fedveil.data import constants, datasets, sources
from fedveil.data.datasets import available, data_root, dataset_names, load
from fedveil.data.rows import to_unit
from fedveil.data.text import decode, encode, hashed_words
from fedveil.errors import UserError


def real(name: str):
    if not available(name):
        pytest.skip(f"{name} is not in FEDVEIL_DATA")
    return name


def row_set(x: np.ndarray) -> set[bytes]:
    return {row.tobytes() for row in x}


# name: (train, test, shape, classes)
GOLDEN = {
    "cancer": (426, 143, (30,), 2),
    "cancer_raw": (426, 143, (30,), 2),
    "digits": (1437, 360, (1, 8, 8), 10),
    "mnist": (60000, 10000, (1, 28, 28), 10),
    "fashion_mnist": (60000, 10000, (1, 28, 28), 10),
    "lfw": (2267, 756, (3, 32, 32), 62),
    "adult": (36631, 12211, (105,), 2),
    "location30": (4008, 1002, (446,), 30),
    "medical_mnist": (6000, 1200, (1, 64, 64), 6),
    "utkface": (4000, 1000, (3, 32, 32), 5),
    "wind": (126700, 52416, (5, 1, 9), None),
    "sst2": (6920, 1821, (271,), 2),
    "ag_news": (30000, 7600, (995,), 4),
}


TEXTS = ("sst2", "ag_news")


@pytest.mark.parametrize("name", GOLDEN)
def test_sizes_types_and_ranges(name):
    data = load(real(name))
    train, test, shape, classes = GOLDEN[name]
    assert (len(data), len(data.x_test), data.shape, data.classes) == (train, test, shape, classes)
    kind = np.uint8 if name in TEXTS else np.float32
    assert data.x.dtype == data.x_test.dtype == kind
    assert np.isfinite(data.x).all() and np.isfinite(data.x_test).all()
    assert data.y.shape == (train,) and data.y_test.shape == (test,)
    if classes is None:
        assert data.y.dtype == np.float32 and data.task == "regression"
    else:
        assert data.y.dtype == data.y_test.dtype == np.int64
        assert set(np.unique(data.y)) == set(range(classes)) >= set(np.unique(data.y_test))
        assert not data.class_names or len(data.class_names) == classes
    if data.pixel_range:
        assert data.pixel_range == (0.0, 1.0) and data.x.min() >= 0 and 0.9 < data.x.max() <= 1
    assert not any(note.startswith("private:") for note in data.notes)


def test_cifar10_is_colour_in_channel_order():
    data = load(real("cifar10"))
    raw = np.load(data_root() / "cifar10_train.npz")["x_train"]
    assert data.shape == (3, 32, 32) and data.classes == 10
    assert np.array_equal(np.rint(data.x[7, 2] * 255).astype(np.uint8), raw[7, :, :, 2])


def test_cifar10_takes_the_second_parts_of_its_files_where_they_lie_beside_the_first(tmp_path):
    def put(name, rows, **arrays):
        np.savez(tmp_path / name, **{k: np.zeros((rows, *shape), np.uint8) for k, shape in arrays.items()})

    put("cifar10_train.npz", 3, x_train=(32, 32, 3), y_train=())
    put("cifar10_test.npz", 2, x_test=(32, 32, 3), y_test=())
    assert len(load("cifar10", root=tmp_path)) == 3
    put("cifar10_train_more.npz", 4, x_train=(32, 32, 3), y_train=())
    put("cifar10_test_more.npz", 1, x_test=(32, 32, 3), y_test=())
    data = load("cifar10", root=tmp_path)
    assert (len(data), len(data.x_test)) == (7, 3) and any("7 of 50000" in note for note in data.notes)


def test_texts_survive_as_rows_of_bytes_and_are_cut_between_letters():
    texts = ["", "plain", "Grüße aus Tromsø", "日本語" * 500]
    rows = encode(texts)
    assert rows.dtype == np.uint8 and rows.shape[1] <= 1024
    back = decode(rows)
    assert back[:3] == texts[:3] and back[3] == texts[3][: len(back[3])] and len(back[3]) == 341


def test_a_text_column_of_an_own_table_becomes_rows_of_bytes(tmp_path):
    file = tmp_path / "own.csv"
    lines = [f'"note {i}, kept whole",{i % 2}' for i in range(20)]
    file.write_text("note,label\n" + "\n".join(lines), "utf-8")
    data = load(file, target="label", text="note")
    assert data.x.dtype == np.uint8 and "note" in decode(data.x_test)[0] and data.classes == 2


def test_hashed_words_have_length_one_and_depend_on_their_own_text_alone():
    texts = ["A good film", "a GOOD film!", "", "something else"]
    rows = hashed_words(texts, 64)
    assert np.array_equal(rows[0], rows[1]) and not rows[2].any() and np.linalg.norm(rows[3]) == pytest.approx(1)
    assert np.array_equal(rows[3:], hashed_words(texts[3:], 64))


def test_every_dataset_has_a_test_here():
    assert set(dataset_names()) == set(GOLDEN) | {"cifar10"}


def test_splits_are_seeded_disjoint_and_complete():
    first, again, other = load("cancer", seed=1), load("cancer", seed=1), load("cancer", seed=2)
    assert np.array_equal(first.x, again.x) and not np.array_equal(first.x, other.x)
    assert len(row_set(first.x) | row_set(first.x_test)) == 569  # no two rows are alike in this data
    assert row_set(first.x) | row_set(first.x_test) == row_set(other.x) | row_set(other.x_test)


def test_validation_rows_leave_the_training_rows_and_the_test_set_stays():
    plain, held = load("cancer"), load("cancer", validation=0.25)
    assert (
        len(held.x_validation) == len(held.y_validation) == 106 and len(held) == 320
    )  # 426 * 0.25 = 106.5, to even
    assert row_set(held.x) | row_set(held.x_validation) == row_set(plain.x)
    assert not row_set(held.x) & row_set(held.x_validation)
    assert not row_set(held.x_test) & (row_set(held.x) | row_set(held.x_validation))
    assert np.array_equal(held.x_test, plain.x_test)
    assert any("validation" in note for note in held.notes)


def test_a_sixth_of_mnist_held_out_leaves_the_papers_fifty_thousand():
    data = load(real("mnist"), validation=1 / 6)
    assert len(data) == 50_000 and len(data.x_validation) == 10_000


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1e-9, 0.9999])
def test_validation_fractions_that_leave_nothing_are_refused(fraction):
    with pytest.raises(UserError, match="validation"):
        load("cancer", validation=fraction)


def test_limits_take_seeded_rows_and_keep_x_and_y_together():
    whole, few = load("digits"), load("digits", limit=50, limit_test=20)
    assert len(few) == len(few.y) == 50 and len(few.x_test) == len(few.y_test) == 20
    label_of = {row.tobytes(): label for row, label in zip(whole.x, whole.y, strict=True)}
    assert [label_of[row.tobytes()] for row in few.x] == few.y.tolist()
    assert len(load("digits", limit=10**9)) == len(whole)
    with pytest.raises(UserError, match="limit = 0"):
        load("digits", limit=0)


def test_public_scaling_acts_on_each_row_alone():
    x = np.random.default_rng(0).normal(size=(5, 2)) * 10
    ranges = [(-1.0, 3.0), (0.0, 5.0)]
    assert np.array_equal(to_unit(x, ranges)[2:3], to_unit(x[2:3], ranges))
    assert to_unit(np.array([[-1.0, 5.0], [1.0, 99.0]]), ranges).tolist() == [[-1, 1], [0, 1]]
    assert to_unit(np.array([[3.0, 99.0]]), ranges, limit=3.0).tolist() == [[1, 3]]


def test_the_fitted_scaler_is_opt_in_fits_training_rows_only_and_says_it_is_private():
    data = load("cancer", fit_scaler=True)
    assert np.allclose(data.x.mean(axis=0), 0, atol=1e-5) and np.allclose(data.x.std(axis=0), 1, atol=1e-4)
    assert not np.allclose(data.x_test.mean(axis=0), 0, atol=1e-3)
    assert data.notes[-1].startswith("private:")
    with pytest.raises(UserError, match="for tables"):
        load("digits", fit_scaler=True)


def test_cancer_names_thirty_ranges_in_the_order_of_the_columns():
    """Each range must hold its column's middle half: a swapped pair of columns would fail."""
    from sklearn.datasets import load_breast_cancer

    quartiles = np.quantile(load_breast_cancer().data, [0.25, 0.75], axis=0)
    low, high = np.array(constants.CANCER_RANGES).T
    assert len(low) == 30 and (low <= quartiles[0]).all() and (high >= quartiles[1]).all()


def test_adult_has_six_numbers_and_ninety_nine_categories():
    columns = {name: np.array(["20", "90"]) for name in constants.ADULT_NUMERIC}
    columns |= {name: np.array([values[0], "?"]) for name, values in constants.ADULT_CATEGORIES.items()}
    x = sources.encode_adult(columns)
    assert x.shape == (2, 105)
    assert x[0, 6:].sum() == len(constants.ADULT_CATEGORIES) and x[1, 6:].sum() == 0  # "?" is all zeros
    columns["sex"] = np.array(["Female", "Martian"])
    with pytest.raises(UserError, match="column 'sex', row 3: unknown category 'Martian'"):
        sources.encode_adult(columns)


def test_adult_original_split():
    data = load(real("adult"), split="original")
    assert (len(data), len(data.x_test)) == (32561, 16281)
    assert int(data.y.sum() + data.y_test.sum()) == 11687 and int(data.y.sum()) == 7841
    with pytest.raises(UserError, match="split = 'half'"):
        load("adult", split="half")


def test_utkface_targets_and_attributes():
    data = load(real("utkface"), target="gender", limit=100)
    assert data.classes == 2 and np.array_equal(data.y, data.attributes["gender"])
    assert len(data.attributes["race"]) == 100 and len(data.attributes_test["race"]) == 1000
    ages = load("utkface", target="age")
    assert ages.classes == 8 == len(ages.class_names)
    assert ages.class_names[ages.y[0]].startswith(str(ages.attributes["age"][0] // 10 * 10)[:1])
    with pytest.raises(UserError, match="age, gender or race"):
        load("utkface", target="height")


def test_location_clusters_are_marked_private():
    data = load(real("location30"), clusters=10)
    assert data.classes == 10 and set(np.unique(data.y)) == set(range(10))
    assert data.notes[-1].startswith("private:")


def test_wind_predicts_an_hour_from_a_forecast_issued_37_to_48_hours_before():
    """Rebuilt here one example at a time from the raw arrays, by calendar arithmetic."""
    from datetime import datetime, timedelta

    data = load(real("wind"))
    z = np.load(data_root() / "wind_gefcom2012.npz")
    power = {int(t): row for t, row in zip(z["time"], z["power"], strict=True)}
    assert len(np.unique(data.groups)) == 7 == len(data.group_names)
    assert data.y.min() >= 0 and data.y.max() <= 1
    farm, issue, lead = 2, 5, 40
    when = datetime.strptime(str(z["issue_time"][issue]), "%Y%m%d%H") + timedelta(hours=lead)
    speed = z["forecast"][farm, issue, lead - 5 : lead + 4, 2] / np.float32(20)
    matches = np.flatnonzero(
        (data.groups == farm) & np.isclose(data.x[:, 2, 0], speed, atol=1e-6).all(axis=1)
    )
    assert len(matches) == 1
    assert data.y[matches[0]] == power[int(when.strftime("%Y%m%d%H"))][farm]
    assert np.isclose(data.x[matches[0], 3, 0, 0], np.sin(2 * np.pi * when.hour / 24), atol=1e-6)


def test_a_missing_folder_or_file_says_how_to_get_the_data(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    with pytest.raises(UserError, match="fedveil data get NAME"):
        load("mnist")
    with pytest.raises(UserError, match=r"mnist.npz is missing; `fedveil data get mnist"):
        load("mnist", root=tmp_path)
    with pytest.raises(UserError, match=r"wind_gefcom2012.npz is missing; it cannot be fetched"):
        load("wind", root=tmp_path)
    with pytest.raises(UserError, match=r"from --data\) does not exist"):
        data_root(tmp_path / "absent")
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert not available("mnist") and available("cancer")


def test_damaged_files_are_user_errors(tmp_path):
    (tmp_path / "mnist.npz").write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(UserError, match=r"mnist.npz"):
        load("mnist", root=tmp_path)
    (tmp_path / "adult.csv.gz").write_bytes(gzip.compress(b"age,workclass\n1,2\n"))
    with pytest.raises(UserError, match=r"adult.csv.gz"):
        load("adult", root=tmp_path)


def test_pickled_arrays_are_never_opened(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_train=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UserError, match=r"mnist.npz"):
        load("mnist", root=tmp_path)


def test_unknown_names_and_options_are_explained():
    with pytest.raises(UserError, match="Did you mean 'mnist'"):
        load("minst")
    with pytest.raises(UserError, match=r"no option 'split' \(it has: none\)"):
        load("cancer", split="original")
    assert datasets.available("digits")
