"""Fetching, with the network replaced: what arrives is checked, kept whole or not at all."""

import socket
from types import SimpleNamespace
from urllib.error import URLError

import numpy as np
import pytest

from fedveil.data import constants, fetch
from fedveil.data.datasets import available, data_root, load
from fedveil.errors import UserError


def test_offline_is_one_clear_message_and_leaves_nothing(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        assert socket.getdefaulttimeout() == 15.0
        raise URLError("Name or service not known")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", unreachable)
    with pytest.raises(UserError, match=r"'mnist' could not be fetched.*openml.org.*by hand.*'cancer'"):
        fetch.fetch("mnist", tmp_path)
    assert list(tmp_path.iterdir()) == [] and socket.getdefaulttimeout() is None


def test_wrong_content_is_refused_and_not_kept(tmp_path, monkeypatch):
    raw = SimpleNamespace(data=np.zeros((70000, 784)), target=np.array(["0"] * 70000))
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda **_: raw)
    with pytest.raises(UserError, match=r"checksum differs.*nothing was kept"):
        fetch.fetch("mnist", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_right_content_is_kept_and_loads(tmp_path, monkeypatch):
    if not available("mnist"):
        pytest.skip("mnist is not in FEDVEIL_DATA")
    z = np.load(data_root() / "mnist.npz")
    x = np.concatenate([z["x_train"], z["x_test"]]).reshape(70000, 784)
    y = np.concatenate([z["y_train"], z["y_test"]]).astype(str)
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda **_: SimpleNamespace(data=x, target=y))
    assert fetch.fetch("mnist", tmp_path) == [tmp_path / "mnist.npz"]
    assert np.array_equal(load("mnist", root=tmp_path).y_test, z["y_test"])
    assert fetch.fetch("mnist", tmp_path) == []  # there already


def test_adult_is_written_back_as_the_columns_that_load_reads(tmp_path, monkeypatch):
    rows = 48842
    names = [*constants.ADULT_NUMERIC, *constants.ADULT_CATEGORIES]
    data = np.zeros((rows, len(names)))
    data[:, 0] = 30
    data[5, 6] = np.nan  # an unknown workclass
    income = np.array(["<=50K"] * rows, dtype=object)
    income[:7841] = income[32561 : 32561 + 3846] = ">50K"
    raw = SimpleNamespace(
        data=data, feature_names=names, target=income,
        categories={name: list(values) for name, values in constants.ADULT_CATEGORIES.items()},
    )  # fmt: skip
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda **_: raw)
    fetch.fetch("adult", tmp_path)
    made = load("adult", root=tmp_path, split="original")
    assert len(made) == 32561 and made.shape == (105,) and int(made.y.sum()) == 7841
    assert made.x[5, 6:14].sum() == 0 and made.x[4, 6:14].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


def test_an_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(fetch.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        fetch._put(tmp_path / "a.npz", b"content")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_fetched_says_so(tmp_path):
    with pytest.raises(UserError, match="cannot be fetched automatically"):
        fetch.fetch("wind", tmp_path)
    with pytest.raises(UserError, match="Did you mean 'mnist'"):
        fetch.fetch("mnits", tmp_path)
    assert fetch.fetch("cancer", tmp_path) == []


def test_the_digest_sees_names_types_shapes_and_bytes():
    a = {"x": np.arange(6, dtype=np.uint8)}
    seen = {
        fetch.digest(d)
        for d in (
            a,
            {"y": a["x"]},
            {"x": a["x"].reshape(2, 3)},
            {"x": a["x"].view(np.int8)},
            {"x": a["x"][::-1]},
        )
    }
    assert len(seen) == 5 and fetch.digest(a) == fetch.digest({"x": a["x"].copy()})
