"""Anything with columns becomes the same table; every cell alone."""

import datetime
import gzip
from decimal import Decimal

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


def spelled(values, name="a"):
    cells = from_columns({name: values}, "t").columns[name]
    return words(cells).tolist(), numbers(cells).tolist()


CELLS = [
    1.0, 0, 0.1 + 0.2, -0.0, True, "1.0", "1.50", " x ", "TRUE", "inf", np.float32(0.1), np.int64(7), np.bool_(False),
    Decimal("2.50"), 10**400, -(10**5000), "1234567890123456789", datetime.date(2020, 1, 2), np.datetime64("2020-01-02"),
    b"x", np.str_("3.0"), 1e300, "1e5",
]  # fmt: skip


@pytest.mark.parametrize("other", ["unknown", None, 0.5, 3, True, "0.50", "", float("nan"), datetime.date(1999, 1, 1)])
def test_what_a_cell_says_does_not_depend_on_the_other_cells_of_its_column(other):
    alone = [tuple(part[0] for part in spelled([cell])) for cell in CELLS]
    together = list(zip(*spelled([*CELLS, other]), strict=True))[: len(CELLS)]
    assert [str(cell) for cell in alone] == [str(cell) for cell in together]
    for cell, found in zip(CELLS, alone, strict=True):
        assert str(tuple(part[0] for part in spelled([cell, other]))) == str(found)


def test_a_number_is_one_word_whatever_its_type():
    ones = [1, 1.0, True, "1", "1.0", np.float32(1), np.int8(1), Decimal("1.00"), "true", "1e0"]
    assert set(spelled(ones)[0]) == {"1"} and set(spelled(ones)[1]) == {1.0}
    for typed in (np.array([0, 1]), np.array([0.0, 1.0]), np.array([False, True]), ["0.0", "1.0"], [0, 1.0], ["False", True]):
        assert spelled(typed)[0] == ["0", "1"]
    assert spelled(["1234567890123456789", "1234567890123456788"])[0] == ["1234567890123456789", "1234567890123456788"]


def test_moments_are_days_whether_typed_as_a_column_or_not():
    typed = np.array(["2020-01-02T06:00", "NaT"], "datetime64[ns]")
    zone = datetime.timezone(datetime.timedelta(hours=2))
    loose = [datetime.datetime(2020, 1, 2, 8, tzinfo=zone), None]
    assert spelled(typed)[0] == spelled(loose)[0] == ["18263.25", ""]


def test_one_word_among_pairs_or_items_does_not_respell_the_others():
    x, y = [[0.1, 1.0], [0.5, 2.0], [0.25, 3.0]], [1.0, 0.0, 1.0]
    for source in ((x, [*y[:2], "unknown"]), list(zip(x, [*y[:2], "unknown"], strict=True))):
        table = read(source)
        assert words(table.columns["y"]).tolist() == ["1", "0", "unknown"]
    for source in (([*x[:2], ["unknown", 3.0]], y), list(zip([*x[:2], ["unknown", 3.0]], y, strict=True))):
        table = read(source)
        assert words(table.columns["x0"]).tolist() == ["0.1", "0.5", "unknown"] and numbers(table.columns["x0"])[0] == 0.1


def test_a_frame_that_a_reader_typed_by_one_cell_says_the_same(tmp_path):
    pandas = pytest.importorskip("pandas", reason="needs the extra tables")
    polars = pytest.importorskip("polars", reason="needs the extra tables")
    pytest.importorskip("pyarrow", reason="needs the extra tables")
    for cells in (["1", "0", "1"], ["1.0", "0.50", "1.25"], ["True", "False", "True"]):
        seen = []
        for last in (cells[-1], "", "unknown"):
            path = tmp_path / "t.csv"
            path.write_text("a,b\n" + "".join(f"{cell},0\n" for cell in [*cells[:2], last]))
            frame = pandas.read_csv(path)
            frame.to_parquet(tmp_path / "t.parquet")
            sources = frame, frame.convert_dtypes(), polars.from_pandas(frame), tmp_path / "t.parquet"
            seen += [read(one).columns["a"][:2] for one in sources]
        assert len({str((words(one).tolist(), numbers(one).tolist())) for one in seen}) == 1
    gone = pandas.DataFrame({"a": pandas.array([1, None], dtype="Int64"), "b": pandas.Categorical(["x", None])})
    table = read(gone)
    assert words(table.columns["a"]).tolist() == ["1", ""] and words(table.columns["b"]).tolist() == ["x", ""]


def test_a_csv_keeps_its_spelling(tmp_path):
    (tmp_path / "t.csv").write_text("a\n1.0\n01\nTrue\n")
    assert words(read(tmp_path / "t.csv").columns["a"]).tolist() == ["1.0", "01", "True"]
