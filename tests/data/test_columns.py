"""From a table to numbers: constants that no row decides, and each row alone."""

import numpy as np
import pytest

from fedveil.data.columns import Known, columns_of, declared, encode, sheet_of
from fedveil.data.frames import from_columns, read
from fedveil.errors import UserError

N = 20
Y = ["0", "1"] * (N // 2)


def sheet(b, y=Y, **options):
    return sheet_of(from_columns({"b": b, "y": y}, "t"), columns_of({"classes": ["0", "1"], **options}, "y", None, "t"), 0)


def encoded(own):
    scales = tuple(declared(own, c, 8) for c in own.columns.features(own.table))
    return scales, encode(own, Known(scales, "classification", own.columns.classes))


@pytest.mark.parametrize("other", ["unknown", None, True])
def test_under_free_scaling_one_cell_changes_its_own_row_alone(other):
    b = [round(0.05 * i, 2) for i in range(N)]
    own = sheet(b, scaling="free")
    row = int(own.train[3])
    scales, data = encoded(own)
    changed, broken = encoded(sheet([*b[:row], other, *b[row + 1 :]], scaling="free"))
    assert scales == changed and data.x.shape == broken.x.shape
    assert np.flatnonzero((data.x != broken.x).any(1)).tolist() == [3]
    assert np.array_equal(data.x_test, broken.x_test)
    assert np.allclose(data.x[:, 0], np.array(b)[own.train])  # numbers are used as they are
    assert broken.x[3].sum() == (other is not None)


def test_free_scaling_marks_missing_cells_where_that_is_declared():
    own = sheet([None, "x", 0.5, 7.0] * 5, scaling="free", missing=["b"])
    _, data = encoded(own)
    assert data.x.shape[1] == 10
    assert np.array_equal(data.x[:, -1], (own.train % 4 == 0))
    assert data.x[:, 0].tolist() == [[0, 0, 0.5, 1][i % 4] for i in own.train]


@pytest.mark.parametrize("y", [[0, 1], [0.0, 1.0], [False, True], ["0.0", "1.00"], ["0", 1.0]])
@pytest.mark.parametrize("classes", [["0", "1"], [0.0, 1.0], ["0.0", "1.0"]])
def test_declared_classes_and_categories_are_spelled_as_the_cells_are(y, classes):
    own = sheet(["2.0", 3] * (N // 2), y * (N // 2), classes=classes, categories={"b": ["2", "3.00"]})
    _, data = encoded(own)
    assert data.class_names == ("0", "1") and np.array_equal(data.y, own.train % 2)
    assert np.array_equal(data.x, np.eye(2)[own.train % 2])
    with pytest.raises(UserError, match="the same number"):
        sheet(["a", "b"] * (N // 2), classes=["1", "1.0"])


def test_test_rows_of_a_file_are_spelled_as_the_frame_is(tmp_path):
    (tmp_path / "test.csv").write_text("b,y\n0.5,1.0\n0.25,0.0\n")
    own = sheet([0.5, 0.25] * (N // 2), scaling="free", test=str(tmp_path / "test.csv"))
    assert encoded(own)[1].y_test.tolist() == [1, 0]
    assert read(tmp_path / "test.csv").columns["y"].tolist() == ["1.0", "0.0"]
