"""Anything with columns becomes the same table; every cell alone."""

import gzip

import numpy as np
import pytest

from fedveil.data.frames import Table, from_columns, numbers, read, words
from fedveil.errors import UserError

COLUMNS = {"age": [30.0, None, 50.0], "ward": ["ICU", None, "surgery"], "y": [1, 0, 1]}


def check(table):
    assert isinstance(table, Table) and table.names == ["age", "ward", "y"] and len(table) == 3
    assert np.isnan(numbers(table.columns["age"])).tolist() == [False, True, False]
    assert words(table.columns["ward"]).tolist() == ["ICU", "", "surgery"]
    assert words(table.columns["y"]).tolist() == ["1", "0", "1"]


def test_csv_plain_and_compressed(tmp_path):
    text = "age,ward,y\n30,ICU,1\n?,NA,0\n50, surgery ,1\n"
    (tmp_path / "t.csv").write_text(text)
    with gzip.open(tmp_path / "t.csv.gz", "wt") as file:
        file.write(text)
    check(read(tmp_path / "t.csv"))
    check(read(str(tmp_path / "t.csv.gz")))


def test_dictionaries_and_datasets_with_column_names():
    class Rows:  # as Hugging Face's datasets look
        column_names = tuple(COLUMNS)

        def __getitem__(self, name):
            return COLUMNS[name]

        def __len__(self):
            return 3

    check(read(COLUMNS))
    check(read(Rows()))


def test_hugging_face_datasets():
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face's datasets", exc_type=ImportError)
    rows = datasets.Dataset.from_dict({name: list(values) for name, values in COLUMNS.items()})
    check(read(rows))
    with pytest.raises(UserError, match=r"parts train, test; give one of them, e.g. dataset\['train'\]"):
        read(datasets.DatasetDict({"train": rows, "test": rows}))


def test_a_dictionary_of_tables_is_no_table():
    """As a DatasetDict looks: its parts are tables, not columns."""
    part = type("Part", (), {"column_names": ("a",)})()
    with pytest.raises(UserError, match="parts train, test; give one of them"):
        read({"train": part, "test": part})


def test_pandas_polars_and_parquet(tmp_path):
    pandas = pytest.importorskip("pandas", reason="needs the extra tables")
    polars = pytest.importorskip("polars", reason="needs the extra tables")
    pytest.importorskip("pyarrow", reason="needs the extra tables")
    check(read(pandas.DataFrame(COLUMNS)))
    check(read(polars.DataFrame(COLUMNS)))
    pandas.DataFrame(COLUMNS).to_parquet(tmp_path / "t.parquet")
    check(read(tmp_path / "t.parquet"))


def test_arrays_and_torch_datasets():
    import torch

    x, y = np.arange(12.0).reshape(6, 2), np.arange(6) % 2
    one = read((x, y))
    two = read(torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(y)))
    assert one.names == two.names == ["x0", "x1", "y"]
    assert np.array_equal(one.columns["x1"], two.columns["x1"])


def test_folders_of_pictures(tmp_path):
    from PIL import Image

    for name, shade in (("dark", 20), ("light", 230)):
        (tmp_path / name).mkdir()
        for i in range(4):
            Image.new("RGB", (40, 30), (shade, shade, i)).save(tmp_path / name / f"{i}.png")
    data = read(tmp_path)
    assert data.class_names == ("dark", "light") and data.shape == (3, 32, 32) and len(data) + len(data.x_test) == 8


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"a": [1, 2], "b": [1]}, "different lengths"),
        ({}, "no columns"),
        ({"a": []}, "no rows"),
        ({"a": np.zeros((2, 2))}, "one value per row"),
        ((np.zeros(3), np.zeros(3)), "give .rows, columns."),
        (5, "cannot read a int"),
        ([1, 2], "not a pair"),
        ([(np.zeros(2), 0), (np.zeros(3), 1)], "differ in shape"),
    ],
)
def test_what_is_no_table_is_said(source, message):
    with pytest.raises(UserError, match=message):
        read(source)


def test_a_cell_is_read_alone():
    table = from_columns({"a": np.array(["1", "x", "inf", " 2 "])}, "t")
    assert np.array_equal(numbers(table.columns["a"]), [1, np.nan, np.nan, 2], equal_nan=True)
