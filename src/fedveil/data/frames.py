"""Anything that has columns, as a `Table`: CSV (gz), Parquet, pandas, Polars, Arrow, HF datasets, dictionaries, arrays.

    read("patients.csv")      read(pandas_frame)      read({"age": ages, "outcome": outcomes})
    read((x, y))              read(torch_dataset)     read("folder/with/class/subfolders")

pandas, pyarrow and Polars are never imported for a CSV; a Parquet file needs pyarrow (the extra `tables`). Nothing here
computes anything across rows, so a Table says no more than the source does. No pickle is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timezone
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.rows import Dataset
from fedveil.data.tables import MISSING, read_csv
from fedveil.errors import UserError, extra

LONG = re.compile(r"[+-]?\d{16,}")
SIDE = 32  # pictures of a folder are brought to this size


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, all of one length: float64 with NaN for missing, words with "" for missing, or objects that are either.
    Which of the three may depend on any cell: only `numbers` and `words` of a column are functions of each cell alone.

    lines: what to call each row in a message (the line of a file, else the row's number). written: words are spelled as they
    stand in a file of text; else a word that says a number is that number (1, 1.0 and "1.0" are one).
    """

    name: str
    columns: Mapping[str, np.ndarray]
    lines: np.ndarray
    written: bool = False

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def names(self) -> list[str]:
        """The columns, in order."""
        return list(self.columns)


def read(source: object, name: str = "") -> Table | Dataset:
    """The columns of `source`; images come as a ready `Dataset`."""
    if isinstance(source, Table | Dataset):
        return source
    if isinstance(source, str | Path):
        return _read_path(Path(source))
    if isinstance(source, tuple) and len(source) == 2:
        return from_pair(source[0], source[1], name or "arrays")
    columns = _columns_of(source)
    if columns is not None:
        return from_columns(columns, name or "frame")
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return _from_items(source, name or type(source).__name__)
    raise UserError(
        f"fit: cannot read a {type(source).__name__}; give a path, a pandas or Polars frame, a dictionary of columns, "
        "(x, y) arrays, or a dataset of (x, y) items."
    )


def from_columns(columns: Mapping[str, object], name: str) -> Table:
    """A table from named columns of anything that NumPy can hold."""
    made = {str(key): _cells(value, f"{name}, column '{key}'") for key, value in columns.items()}
    lengths = {key: len(value) for key, value in made.items()}
    if not made:
        raise UserError(f"{name}: there are no columns.")
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"'{key}' {count}" for key, count in list(lengths.items())[:5])
        raise UserError(f"{name}: columns have different lengths ({shown}); every row needs all columns.")
    count = next(iter(lengths.values()))
    if not count:
        raise UserError(f"{name}: there are no rows.")
    return Table(name, made, np.arange(count))


def from_pair(x: object, y: object, name: str) -> Table | Dataset:
    """Arrays x [n, columns] and y [n] as the columns x0, x1, …, y; images [n, channels, h, w] as a Dataset."""
    x, y = _typed(x), _typed(y)
    if x.ndim in (3, 4):
        from fedveil.data.tables import from_arrays

        return from_arrays(name, x, y, where=name)
    if x.ndim != 2:
        raise UserError(f"{name}: x has shape {list(x.shape)}; give [rows, columns] or images [rows, channels, h, w].")
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1 or len(y) != len(x):
        raise UserError(f"{name}: x has {len(x)} rows but y has shape {list(y.shape)}; give one target per row.")
    return from_columns({**{f"x{i}": x[:, i] for i in range(x.shape[1])}, "y": y}, name)


def _typed(values: object) -> np.ndarray:
    """An array; values of lists stay as they are where one of them is a word, by which NumPy would make words of all."""
    array = np.asarray(values)
    return array if hasattr(values, "__array__") or array.dtype.kind not in "US" else np.asarray(values, dtype=object)


def _read_path(path: Path) -> Table | Dataset:
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; correct the path.")
    if path.suffix in (".parquet", ".pq"):
        return from_columns(_columns_of(_parquet(path)) or {}, path.name)
    if path.suffix == ".npz":
        from fedveil.data.tables import from_npz

        return from_npz(path)
    if not path.name.endswith((".csv", ".csv.gz")):
        raise UserError(f"{path}: give a .csv, .csv.gz, .parquet or .npz file, or a folder with one subfolder per class.")
    header, rows, lines = read_csv(path)
    cells = np.array(rows, dtype=str)
    columns = {column: _words(cells[:, i]) for i, column in enumerate(header)}
    return Table(path.name, columns, np.array(lines), written=True)


def _parquet(path: Path) -> object:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"{path}: Parquet files need pyarrow: {extra('tables')}.") from None
    try:
        return parquet.read_table(path)
    except (ArrowException, OSError) as wrong:
        raise UserError(f"{path} cannot be read as a Parquet file: {str(wrong).splitlines()[0]}") from wrong


def _columns_of(source: Any) -> dict[str, object] | None:
    """Named columns of a dictionary, a pandas or Polars frame, an Arrow table or a HF dataset; None for others."""
    if isinstance(source, Mapping):
        if any(hasattr(part, "column_names") or hasattr(part, "columns") for part in source.values()):  # HF's DatasetDict
            raise _several(source)
        return dict(source)
    names = getattr(source, "column_names", None)  # Arrow, HF datasets
    if names is None:
        names = getattr(source, "columns", None)  # pandas, Polars
    if names is None or callable(names):
        return None
    if isinstance(names, Mapping):
        raise _several(names)
    return {str(column): source[column] for column in names}


def _several(parts: Mapping[object, object]) -> UserError:
    first = next(iter(parts), "train")
    return UserError(f"fit: this has the parts {', '.join(map(str, parts))}; give one of them, e.g. dataset['{first}'].")


def _cells(values: object, where: str) -> np.ndarray:
    """float64 with NaN for missing, or words with "" for missing; columns of both hold Python floats and words.

    Formal guarantee: what a cell becomes does not depend on the other cells: `numbers` and `words` of the result are, cell by
    cell, those of each value alone. Only the type that a whole column was given with (numbers, moments, anything) is read.
    """
    array = _array(values)
    if array.ndim != 1:
        raise UserError(f"{where}: shape {list(array.shape)}; a column has one value per row.")
    if array.dtype.kind in "biuf":
        return array.astype(np.float64)
    if array.dtype.kind == "M":
        return _days(array)
    if array.dtype.kind not in "OUS":
        raise UserError(f"{where}: values of type {array.dtype} are neither numbers nor words.")
    made = [_cell(value, where) for value in array]
    if all(isinstance(cell, float) or not cell for cell in made):  # the same cells, kept in less room
        return np.array([cell if isinstance(cell, float) else np.nan for cell in made], np.float64)
    if all(isinstance(cell, str) for cell in made):
        return np.array(made, dtype=str)
    return _objects(made)


def _array(values: Any) -> np.ndarray:
    """The column as it was typed, else its values as they are: NumPy would give all of a list one type by any one of them."""
    for method in ("to_pandas", "to_numpy"):  # Arrow columns, then pandas and Polars ones
        if hasattr(values, method) and not isinstance(values, np.ndarray):
            try:
                values = getattr(values, method)()
            except (ImportError, ValueError, TypeError):
                continue
    return np.asarray(values) if hasattr(values, "__array__") else _objects(list(values))


def _objects(values: Sequence[object]) -> np.ndarray:
    out = np.empty(len(values), object)
    for at, value in enumerate(values):
        out[at] = value
    return out


def _cell(value: object, where: str) -> float | str:
    """One value as a number or a word, "" where it is missing. True is 1, moments are days since 1970."""
    if isinstance(value, list | tuple | dict) or getattr(value, "shape", ()) != ():
        raise UserError(f"{where}: a cell holds a {type(value).__name__}; a column has one value per row.")
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        return _read(value)
    if _missing(value):
        return ""
    if isinstance(value, datetime | date | np.datetime64):
        if isinstance(value, datetime) and value.tzinfo is not None:
            value = value.astimezone(timezone.utc).replace(tzinfo=None)
        return float(_days(np.array(value, "datetime64")))
    if hasattr(value, "item") and not isinstance(value, np.timedelta64):  # a scalar of NumPy or torch
        value = value.item()
    if isinstance(value, Real | Decimal):
        try:
            return float(value)
        except OverflowError:  # a whole number with hundreds of digits
            return -math.inf if value == -abs(value) else math.inf
    return _read(str(value))


def _missing(value: object) -> bool:
    try:
        return value is None or bool(value != value)
    except (TypeError, ArithmeticError):  # pandas' NA says of nothing what it is
        return True


def _days(array: np.ndarray) -> np.ndarray:
    return np.where(np.isnat(array), np.nan, array.astype("datetime64[s]").astype(np.int64) / 86400.0)


def _read(text: str) -> float | str:
    """Text that says a number is that number: readers of files type a whole column by its worst cell, and 1.50 is 1.5 either way.
    Long whole numbers stay as they are: they are names, which must not become one another by rounding."""
    word = text.strip()
    small = word.lower()
    if small in MISSING:
        return ""
    if small in ("true", "false"):
        return float(small == "true")
    if LONG.fullmatch(word):
        return word
    try:
        value = float(word)
    except ValueError:
        return word
    return "" if value != value else value


def respelled(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Declared words as `words` spells such cells of a frame."""
    found = tuple(_word(_read(name)) or name for name in names)
    if len(set(found)) != len(found):
        raise UserError(f"{where}: two of {', '.join(names)} are the same number.")
    return found


def retyped(table: Table) -> Table:
    """A table that was written as text, as if its cells had come in a frame."""
    return replace(table, columns={name: _cells(cells, name) for name, cells in table.columns.items()}, written=False)


def _words(cells: np.ndarray) -> np.ndarray:
    trimmed = np.char.strip(cells)
    return np.where(np.isin(np.char.lower(trimmed), list(MISSING)), "", trimmed)


def numbers(cells: np.ndarray) -> np.ndarray:
    """Each cell as a number, NaN where it is none; every cell alone."""
    if cells.dtype.kind == "f":
        return np.where(np.isfinite(cells), cells, np.nan)
    if cells.dtype.kind == "O":
        mixed = np.array([cell if isinstance(cell, float) else _number(cell) for cell in cells], np.float64)
        return np.where(np.isfinite(mixed), mixed, np.nan)
    try:
        out = np.where(cells == "", "nan", cells).astype(np.float64)
    except ValueError:
        out = np.array([_number(cell) for cell in cells])
    return np.where(np.isfinite(out), out, np.nan)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return np.nan


def words(cells: np.ndarray) -> np.ndarray:
    """Each cell as a word, "" where it is missing; whole numbers without a point."""
    if cells.dtype.kind not in "fO":
        return cells
    return np.array([_word(cell) for cell in cells], dtype=str)


def _word(cell: float | str) -> str:
    return cell if isinstance(cell, str) else "" if cell != cell else f"{cell + 0.0:.15g}"  # 0 and -0 are one word


def _from_items(source: Any, name: str) -> Table | Dataset:
    """A torch Dataset or list of (x, y) items, all of one shape."""
    if not len(source):
        raise UserError(f"{name}: there are no rows.")
    pairs = []
    for at in range(len(source)):
        item = source[at]
        if not (isinstance(item, tuple | list) and len(item) == 2):
            raise UserError(f"{name}: item {at} is a {type(item).__name__}, not a pair (x, y).")
        pairs.append((_typed(item[0]), _typed(item[1]).reshape(-1)))
    shapes = {x.shape for x, _ in pairs}
    if len(shapes) > 1 or any(len(y) != 1 for _, y in pairs):
        raise UserError(f"{name}: items differ in shape ({sorted(map(list, shapes))[:3]}) or have more than one target each.")
    return from_pair(_together([x for x, _ in pairs]), _together([y for _, y in pairs])[:, 0], name)


def _together(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of one shape as one; values keep their own types where some of the arrays hold words."""
    numeric = all(array.dtype.kind in "biuf" for array in arrays)
    return np.stack(arrays if numeric else [array.astype(object) for array in arrays])


def _folder(path: Path) -> Dataset:
    """Pictures in one subfolder per class, whose names are the classes; brought to 32 x 32, colours kept."""
    from PIL import Image, UnidentifiedImageError

    from fedveil.data.tables import from_arrays

    classes = sorted(item.name for item in path.iterdir() if item.is_dir())
    if len(classes) < 2:
        raise UserError(f"{path}: a folder of pictures needs one subfolder per class, at least two (there are {len(classes)}).")
    pixels, labels = [], []
    for label, folder in enumerate(classes):
        for file in sorted((path / folder).iterdir()):
            if file.suffix.lower() not in (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"):
                continue
            try:
                with Image.open(file) as picture:
                    pixels.append(np.asarray(picture.convert("RGB").resize((SIDE, SIDE))))
            except (OSError, UnidentifiedImageError) as wrong:
                raise UserError(f"{file} cannot be read as a picture: {wrong}.") from wrong
            labels.append(label)
        if label not in labels:
            raise UserError(f"{path / folder} holds no picture (.png, .jpg, .bmp, .gif, .webp).")
    x = np.moveaxis(np.stack(pixels), -1, 1)
    return from_arrays(path.name, x, np.array(labels), where=str(path), classes=len(classes), class_names=tuple(classes))
