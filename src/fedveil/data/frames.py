"""Anything that has columns, as a `Table`: CSV (gz), Parquet, pandas, Polars, Arrow, HF datasets, dictionaries, arrays.

    read("patients.csv")      read(pandas_frame)      read({"age": ages, "outcome": outcomes})
    read((x, y))              read(torch_dataset)     read("folder/with/class/subfolders")

pandas, pyarrow and Polars are never imported for a CSV; a Parquet file needs pyarrow (the extra `tables`). Nothing here
computes anything across rows, so a Table says no more than the source does. No pickle is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.rows import Dataset
from fedveil.data.tables import MISSING, read_csv
from fedveil.errors import UserError, extra

SIDE = 32  # pictures of a folder are brought to this size


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, all of one length: float64 with NaN for missing, or words with "" for missing.

    lines: what to call each row in a message (the line of a file, else the row's number).
    """

    name: str
    columns: Mapping[str, np.ndarray]
    lines: np.ndarray

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
    x, y = np.asarray(x), np.asarray(y)
    if x.ndim in (3, 4):
        from fedveil.data.tables import from_arrays

        return from_arrays(name, x, y, where=name)
    if x.ndim != 2:
        raise UserError(f"{name}: x has shape {list(x.shape)}; give [rows, columns] or images [rows, channels, h, w].")
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1 or len(y) != len(x):
        raise UserError(f"{name}: x has {len(x)} rows but y has shape {list(y.shape)}; give one target per row.")
    return from_columns({**{f"x{i}": x[:, i] for i in range(x.shape[1])}, "y": y}, name)


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
    return Table(path.name, columns, np.array(lines))


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


def _cells(values: Any, where: str) -> np.ndarray:
    """float64 or words, missing as NaN or ""."""
    for method in ("to_pandas", "to_numpy"):  # Arrow columns, then pandas and Polars ones
        if hasattr(values, method) and not isinstance(values, np.ndarray):
            try:
                values = getattr(values, method)()
            except (ImportError, ValueError, TypeError):
                continue
    array = values if isinstance(values, np.ndarray) else np.asarray(list(values))
    if array.ndim != 1:
        raise UserError(f"{where}: shape {list(array.shape)}; a column has one value per row.")
    if array.dtype.kind in "biuf":
        return array.astype(np.float64)
    if array.dtype.kind == "M":
        return np.where(np.isnat(array), np.nan, array.astype("datetime64[s]").astype(np.int64) / 86400.0)
    if array.dtype.kind == "O":
        return _objects(array)
    if array.dtype.kind not in "US":
        raise UserError(f"{where}: values of type {array.dtype} are neither numbers nor words.")
    return _words(array.astype(str))


def _objects(array: np.ndarray) -> np.ndarray:
    """Columns of Python objects: numbers with None, or words with None."""
    empty = np.array([value is None or value != value for value in array], bool)
    filled = array[~empty]
    if all(isinstance(value, int | float | np.number | np.bool_) for value in filled):
        out = np.full(len(array), np.nan)
        out[~empty] = filled.astype(np.float64)
        return out
    return _words(np.array(["" if gone else str(value) for value, gone in zip(array, empty, strict=True)], dtype=str))


def _words(cells: np.ndarray) -> np.ndarray:
    trimmed = np.char.strip(cells)
    return np.where(np.isin(np.char.lower(trimmed), list(MISSING)), "", trimmed)


def numbers(cells: np.ndarray) -> np.ndarray:
    """Each cell as a number, NaN where it is none; every cell alone."""
    if cells.dtype.kind == "f":
        return np.where(np.isfinite(cells), cells, np.nan)
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
    if cells.dtype.kind != "f":
        return cells
    return np.array(["" if value != value else f"{value:.15g}" for value in cells], dtype=str)


def _from_items(source: Any, name: str) -> Table | Dataset:
    """A torch Dataset or list of (x, y) items, all of one shape."""
    if not len(source):
        raise UserError(f"{name}: there are no rows.")
    pairs = []
    for at in range(len(source)):
        item = source[at]
        if not (isinstance(item, tuple | list) and len(item) == 2):
            raise UserError(f"{name}: item {at} is a {type(item).__name__}, not a pair (x, y).")
        pairs.append((np.asarray(item[0]), np.asarray(item[1]).reshape(-1)))
    shapes = {x.shape for x, _ in pairs}
    if len(shapes) > 1 or any(len(y) != 1 for _, y in pairs):
        raise UserError(f"{name}: items differ in shape ({sorted(map(list, shapes))[:3]}) or have more than one target each.")
    return from_pair(np.stack([x for x, _ in pairs]), np.concatenate([y for _, y in pairs]), name)


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
