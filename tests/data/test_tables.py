"""The user's own data: what is read, and that every complaint names file, column and row."""

import gzip

import numpy as np
import pytest

from fedveil.data.datasets import load
from fedveil.data.tables import from_arrays
from fedveil.errors import UserError


def csv_file(tmp_path, text, name="own.csv"):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


GOOD = "age,height,sick\n" + "".join(f"{i},{i / 2},{i % 2}\n" for i in range(20))


@pytest.mark.parametrize("name", ["own.csv", "own.csv.gz"])
def test_a_csv_becomes_a_dataset(tmp_path, name):
    data = load(csv_file(tmp_path, GOOD, name), target="sick")
    assert (len(data), len(data.x_test), data.shape, data.classes) == (15, 5, (2,), 2)
    assert data.x.dtype == np.float32 and data.y.dtype == np.int64
    assert np.array_equal(data.y, data.x[:, 0].astype(int) % 2)
    assert sorted([*data.x[:, 0], *data.x_test[:, 0]]) == list(range(20))
    assert any("used as given" in note for note in data.notes)


def test_words_as_target_become_classes_and_a_split_column_is_obeyed(tmp_path):
    text = "a,kind,part\n1,yes,train\n2,no,train\n3,yes,test\n4,no,train\n"
    data = load(csv_file(tmp_path, text), target="kind", split="part")
    assert data.class_names == ("no", "yes")
    assert data.x[:, 0].tolist() == [1, 2, 4] and data.y.tolist() == [1, 0, 0]
    assert data.x_test[:, 0].tolist() == [3] and data.y_test.tolist() == [1]


def test_group_and_dropped_columns_are_no_features(tmp_path):
    text = "a,clinic,id,y\n" + "".join(
        f"{i},{'north' if i < 6 else 'south'},x{i},{i % 2}\n" for i in range(12)
    )
    data = load(csv_file(tmp_path, text), target="y", group="clinic", drop="id")
    assert data.shape == (1,) and data.group_names == ("north", "south")
    assert np.array_equal(data.groups, (data.x[:, 0] >= 6).astype(int))


def test_public_ranges_scale_and_regression_is_recognised(tmp_path):
    text = "a,b,y\n" + "".join(f"{i},{10 * i},{i / 3}\n" for i in range(10))
    data = load(csv_file(tmp_path, text), target="y", ranges={"a": [0, 10], "b": [0, 100]})
    assert data.task == "regression" and data.classes is None and data.y.dtype == np.float32
    assert np.allclose(data.x[:, 0], data.x[:, 1]) and data.x.min() >= -1
    assert any("public ranges" in note for note in data.notes)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,y\n1,0\n,1\n", {}, r"own\.csv, column 'a', row 3: missing value '' \(1 in this column\)"),
        ("a,y\n1,0\n?,1\nNA,1\n", {}, r"column 'a', row 3: missing value '\?' \(2 in this column\)"),
        ("a,y\n1,0\n2,\n", {}, r"column 'y', row 3: missing value"),
        ("a,y\n1,0\nred,1\n", {}, r"column 'a', row 3: 'red' is not a number.*drop=a"),
        ("a,y\n1,0\ninf,1\n", {}, r"column 'a', row 3: 'inf' is not finite"),
        ("a,y\n1,0\n2,2\n", {}, r"no row has the label 1.*without holes"),
        ("a,y\n1,1\n2,2\n", {}, r"no row has the label 0"),
        ("a,y\n1,-1\n2,1\n", {}, r"label -1 in row 0 is negative"),
        ("a,y\n1,1\n2,1\n", {}, r"every row has the label 1"),
        ("a,y\n1,0\n2,red\n", {}, r"column 'y', row 3: 'red' is not a number"),
        ("a,y\n1,0.5\n2,1\n", {"task": "classification"}, r"label 0.5 in row 0 is no whole number"),
        ("a,y\n1,0\n2\n", {}, r"row 3: 1 cells, but the header has 2 columns"),
        ("", {}, r"is empty"),
        ("a,y\n", {}, r"no rows"),
        ("a,a,y\n1,2,0\n", {}, r"column name 'a' is empty or used twice"),
        ("y\n1\n", {}, r"no feature columns"),
        ("a,y\n1,0\n2,1\n", {"target": None}, r"say which column to predict with --target \(columns: a, y\)"),
        ("a,y\n1,0\n2,1\n", {"target": "Y"}, r"target column 'Y' is not in the header"),
        ("a,y\n1,0\n2,1\n", {"gruop": "a"}, r"Did you mean 'group'"),
        ("a,s,y\n1,x,0\n2,test,1\n", {"split": "s"}, r"column 's', row 2: 'x' is neither train nor test"),
        ("a,s,y\n1,train,0\n2,train,1\n", {"split": "s"}, r"all rows are 'train'"),
        ("a,y\n1,0\n2,1\n", {"ranges": {"b": [0, 1]}}, r"no entry for column 'a'"),
        ("a,y\n1,0\n2,1\n", {"ranges": {"a": [1, 1]}}, r"column 'a': range 1 to 1 is empty"),
        ("a,y\n1,0\n2,1\n", {"test": 0.0}, r"test = 0.0"),
        ("a,y\n1,red\n2,blue\n", {"task": "regression"}, r"'red' is not a number"),
    ],
)
def test_faults_of_a_csv_name_file_column_and_row(tmp_path, text, options, message):
    with pytest.raises(UserError, match=message):
        load(csv_file(tmp_path, text), **{"target": "y", **options})


def test_row_numbers_count_quoted_line_breaks_and_blank_lines(tmp_path):
    text = 'a,note,y\n1,"two\nlines",0\n\n?,x,1\n'
    with pytest.raises(UserError, match=r"column 'a', row 5: missing"):
        load(csv_file(tmp_path, text), target="y", drop="note")


def test_a_missing_or_binary_file_is_explained(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "absent.csv", target="y")
    path = tmp_path / "bad.csv"
    path.write_bytes(b"a,y\n\xff\xfe,1\n")
    with pytest.raises(UserError, match="UTF-8"):
        load(path, target="y")
    path = tmp_path / "bad.csv.gz"
    path.write_bytes(b"not gzip")
    with pytest.raises(UserError, match="cannot be read"):
        load(path, target="y")


def npz(tmp_path, **arrays):
    path = tmp_path / "own.npz"
    np.savez(path, **arrays)
    return path


X, Y = np.arange(40.0).reshape(20, 2), np.arange(20) % 3


def test_an_npz_with_and_without_test_arrays(tmp_path):
    data = load(npz(tmp_path, x=X, y=Y, groups=np.repeat(["a", "b"], 10)), test=0.2)
    assert (len(data), len(data.x_test), data.classes) == (16, 4, 3)
    assert np.array_equal(data.groups, (data.x[:, 0] >= 20).astype(int))
    given = load(npz(tmp_path, x=X, y=Y, x_test=X[:5], y_test=Y[:5]))
    assert len(given) == 20 and np.array_equal(given.x_test, X[:5].astype(np.float32))


def test_uint8_images_become_unit_floats(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    data = load(npz(tmp_path, x=pixels, y=Y))
    assert data.shape == (1, 8, 8) and data.pixel_range == (0.0, 1.0) and 0.9 < data.x.max() <= 1


HOLE = X.copy()
HOLE[4, 1] = np.nan


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, r"has no array 'y' \(it has: x\)"),
        ({"x": X, "y": Y, "xtest": X}, r"unknown array 'xtest'.*Did you mean 'x_test'"),
        ({"x": X, "y": Y[:19]}, r"'x' has 20 rows but 'y' has 19"),
        ({"x": HOLE, "y": Y}, r"array 'x', row 4, column 1: nan is missing or not finite"),
        ({"x": X, "y": np.where(Y == 1, 5, Y)}, r"no row has the label 1"),
        ({"x": X, "y": Y, "x_test": X}, r"x_test and y_test belong together"),
        ({"x": X, "y": Y, "x_test": X[:, :1], "y_test": Y}, r"an example of x_test has shape \[1\]"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y + 1}, r"array 'y_test', row 2: label 3 does not occur"),
        ({"x": X[:0], "y": Y[:0]}, r"array 'x': empty"),
        ({"x": np.array([["a", "b"]] * 20), "y": Y}, r"array 'x': type <U1 is not numeric"),
        ({"x": X, "y": np.stack([Y, Y], 1)}, r"targets must be \[n\]"),
        ({"x": X[:, 0], "y": Y}, r"give \[n, features\]"),
        ({"x": X, "y": Y, "groups": Y[:3]}, r"'groups' has 3"),
        ({"x": np.array([{}] * 20), "y": Y}, r"pickles.*not read"),
    ],
)
def test_faults_of_an_npz_name_the_array_and_row(tmp_path, arrays, message):
    with pytest.raises(UserError, match=message):
        load(npz(tmp_path, **arrays))


def test_a_broken_archive_is_a_user_error(tmp_path):
    path = tmp_path / "own.npz"
    path.write_bytes(b"PK\x03\x04 rubbish")
    with pytest.raises(UserError, match=r"own\.npz"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"own\.npz"):
        load(path)


def test_splits_by_seed_never_share_rows():
    for seed in range(5):
        data = from_arrays("a", X, Y, seed=seed)
        assert not set(data.x[:, 0].tolist()) & set(data.x_test[:, 0].tolist())


def test_functions_return_datasets_or_tuples(tmp_path, monkeypatch):
    (tmp_path / "own_data_one.py").write_text(
        "import numpy as np\nfrom fedveil.data.rows import Dataset\n"
        "X = np.arange(20.0).reshape(10, 2); Y = np.arange(10) % 2\n"
        "def pair(): return X, Y\n"
        "def four(): return X, Y, X[:2], Y[:2]\n"
        "def whole(seed, n=4):\n"
        "    x = np.full((n, 2), seed, np.float32); y = np.arange(n) % 2\n"
        "    return Dataset('mine', x, y, x, y, classes=2)\n"
        "def wrong(): return [1]\n"
        "def wide(): return Dataset('mine', X, Y, X, Y, classes=2)\n"
        "def label():\n"
        "    x = X.astype(np.float32)\n"
        "    return Dataset('mine', x, Y + 1, x, Y, classes=2)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert len(load("own_data_one:pair")) == 8  # a quarter of 10 is 2.5, rounded to even
    assert len(load("own_data_one:four")) == 10
    made = load("own_data_one:whole", seed=3, n=6)
    assert len(made) == 6 and made.x[0, 0] == 3
    for name, options, message in [
        ("wrong", {}, "returned a list"),
        ("wide", {}, "features must be float32"),
        ("label", {}, "label 2 does not occur"),
        ("whole", {"m": 1}, "no parameter 'm'"),
        ("parir", {}, "Did you mean 'pair'"),
    ]:
        with pytest.raises(UserError, match=message):
            load(f"own_data_one:{name}", **options)


def test_a_number_of_classes_is_public_given_or_ends_the_promise(tmp_path):
    """What only training labels show is private: one row with a new label would change the model that is released."""
    x, y = np.zeros((8, 2)), np.array([0, 1, 2, 0, 1, 2, 0, 1])
    shown = from_arrays("own", x, y, x[:3], np.array([0, 1, 2]))
    assert shown.classes == 3 and not any(note.startswith("private:") for note in shown.notes)
    hidden = from_arrays("own", x, y, x[:2], np.array([0, 1]))
    assert hidden.classes == 3 and any(note.startswith("private: the number of classes") for note in hidden.notes)
    given = from_arrays("own", x, y, x[:2], np.array([0, 1]), classes=5)
    assert given.classes == 5 and not any(note.startswith("private:") for note in given.notes)
    with pytest.raises(UserError, match="label 2"):
        from_arrays("own", x, y, x[:2], np.array([0, 1]), classes=2)
    path = tmp_path / "words.csv"
    path.write_text("a,label,part\n" + "".join(f"{k},{w},{p}\n" for k, (w, p) in enumerate(
        [("cat", "train"), ("dog", "train"), ("eel", "train"), ("cat", "test"), ("eel", "test")])))
    words = load(path, target="label", split="part")
    assert words.classes == 3 and any(note.startswith("private:") for note in words.notes)  # "dog" renumbers "eel"


@pytest.mark.parametrize("kind", ["npz", "csv", "npz with test rows"])
def test_no_training_label_decides_between_classification_and_regression(tmp_path, kind):
    """Of whole labels one training label becomes a fraction, and the other way round: the task stays, or the rows are refused."""

    def read(y):
        if kind == "csv":
            return load(csv_file(tmp_path, "a,y\n" + "".join(f"{i},{v:g}\n" for i, v in enumerate(y))), target="y")
        more = {"x_test": X[:4], "y_test": y[-4:]} if "test" in kind else {}
        return load(npz(tmp_path, x=X, y=y, **more))

    whole = Y.astype(float)
    held = np.arange(20) if "test" in kind else np.sort(read(whole / 2).x[:, 0].astype(int) // (1 if kind == "csv" else 2))
    first = held[0]
    assert read(whole).task == "classification"
    changed = whole.copy()
    changed[first] = 0.5
    with pytest.raises(UserError, match="labels of the test rows alone decide"):
        read(changed)
    broken = whole / 2 + 0.25
    changed = broken.copy()
    changed[first] = 1
    assert read(broken).task == read(changed).task == "regression"
