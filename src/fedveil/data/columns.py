"""From a table to numbers: what is declared about its columns, the public constants, and the encoding of each row alone.

`Columns` is what the user declares. `Scale` holds the constants of one column: declared, or found by a noised look that was
paid for (`federation.look`), or a public hash that needs no look at all. `encode` applies them.

Formal guarantee: given the scales, row i of the result is a function of row i of the table. Neighbouring tables stay
neighbours; whatever is learnt about the rows before training is in the scales, and in nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedveil.data.frames import Table, numbers, read, respelled, retyped, words
from fedveil.data.identifiers import is_identifier, learnt_from
from fedveil.data.rows import Dataset, Task, split_rows
from fedveil.data.text import encode as encode_texts
from fedveil.errors import UserError, did_you_mean

PLACES = 256  # words of a column fall into so many public places
FREE_PLACES = 8  # where nobody pays to see which of them are in use
MOST_CLASSES = 100
Kind = Literal["number", "words", "free", "left out"]


@dataclass(frozen=True)
class Columns:
    """What is declared about a table; every value is public.

    target, group, drop, text, split: columns by their role. keep: columns to learn from although their names are those of
    identifiers (`identifiers`). test: a fraction of the rows that is held out by seed, or another
    file. task: classification or regression. classes: the target's values. ranges: (low, high) of number columns, also of the
    target. categories: the words of word columns. missing: declared columns that may lack values and get a mark for it.
    scaling: what to do about columns without ranges or categories: "paid" looks at all rows once, under noise, for a share of
    the budget; "free" takes each cell as it is, whatever the others of its column are: a number, or a hashed word. share: of
    the budget's square, 0 for a share that fits. knots: hat functions per number column (1: the number itself; 0: the planner's
    choice).
    """

    target: str
    group: str = ""
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    text: str = ""
    split: str = ""
    test: float | str = 0.2
    task: Literal["", "classification", "regression"] = ""
    classes: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    scaling: Literal["paid", "free"] = "paid"
    share: float = 0.0
    knots: int = 0

    def features(self, table: Table) -> list[str]:
        """The feature columns, in order."""
        special = {self.target, self.group, self.split, *self.drop}
        return [self.text] if self.text else [name for name in table.names if name not in special]

    def undeclared(self, table: Table) -> list[str]:
        """Feature columns whose constants are not declared."""
        return [] if self.text else [c for c in self.features(table) if c not in self.ranges and c not in self.categories]

    @property
    def target_known(self) -> bool:
        """Is everything about the target declared?"""
        return bool(self.classes) or (self.task != "classification" and self.target in self.ranges)


@dataclass(frozen=True)
class Scale:
    """The constants of one column. knots: the places of its hat functions, low and high among them."""

    column: str
    kind: Kind
    low: float = -1.0
    high: float = 1.0
    knots: tuple[float, ...] = ()
    words: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    mark: bool = False  # a column that says "missing"
    how: str = "public"

    @property
    def width(self) -> int:
        """Numbers that this column becomes."""
        words = len(self.words) or len(self.places)
        own = {"number": len(self.knots) or 1, "words": words, "free": 1 + FREE_PLACES, "left out": 0}[self.kind]
        return own + (self.mark and self.kind in ("number", "free"))


@dataclass(frozen=True)
class Known:
    """All constants of a table: of its features and of its target."""

    scales: tuple[Scale, ...]
    task: Task
    classes: tuple[str, ...] = ()
    low: float = -1.0  # of the target, for regression
    high: float = 1.0
    usual: int = 0  # the class that rows of an unknown label count as

    @property
    def width(self) -> int:
        """Numbers per row."""
        return sum(scale.width for scale in self.scales)


@dataclass(frozen=True, eq=False)
class Sheet:
    """A table with roles: which rows train, which test (perhaps of another table), and who holds each training row."""

    table: Table
    columns: Columns
    train: np.ndarray
    tested: Table
    test: np.ndarray
    groups: np.ndarray | None
    group_names: tuple[str, ...]


def columns_of(options: Mapping[str, object], target: str | None, text: str | None, where: str) -> Columns:
    """The declared columns from plain values (a TOML table), checked."""
    known = [f.name for f in fields(Columns) if f.name not in ("target", "text")]
    for key in options:
        if key not in known:
            raise UserError(f"{where}: table has no key '{key}' (it has: {', '.join(known)}).{did_you_mean(key, known)}")
    if not target:
        raise UserError(f"{where}: say which column to predict: --target COLUMN, or target = \"COLUMN\".")
    values: dict[str, Any] = dict(options)
    for key in ("drop", "keep", "classes", "missing"):
        if key in values:
            values[key] = _names(values[key], f"{where}: {key}")
    for key in ("ranges", "categories"):
        if key in values and not isinstance(values[key], Mapping):
            raise UserError(f"{where}: {key} must be a table with one entry per column.")
    if "ranges" in values:
        values["ranges"] = {str(c): pair(r, f"{where}, column '{c}'") for c, r in values["ranges"].items()}
    if "categories" in values:
        values["categories"] = {str(c): _names(w, f"{where}: categories of '{c}'") for c, w in values["categories"].items()}
    made = Columns(target=target, text=text or "", **values)
    _check_values(made, where)
    return made


def _names(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence):
        raise UserError(f"{where} must be a list of names.")
    names = tuple(f"{v:.15g}" if isinstance(v, float) else str(int(v)) if isinstance(v, bool) else str(v) for v in value)
    if len(set(names)) != len(names):
        raise UserError(f"{where}: a name stands there twice.")
    return names


def pair(value: Any, where: str) -> tuple[float, float]:
    """A checked public range."""
    try:
        low, high = (float(v) for v in value)
    except (TypeError, ValueError):
        raise UserError(f"{where}: range {value!r} is not a pair (low, high).") from None
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise UserError(f"{where}: range {low:g} to {high:g} is empty or not finite; low must be below high.")
    return low, high


def _check_values(made: Columns, where: str) -> None:
    for key, allowed in (("task", ("", "classification", "regression")), ("scaling", ("paid", "free"))):
        value = getattr(made, key)
        if value not in allowed:
            raise UserError(f"{where}: {key} = '{value}' is unknown; use {' or '.join(filter(None, allowed))}.")
    if isinstance(made.test, bool) or not isinstance(made.test, int | float | str):
        raise UserError(f"{where}: test = {made.test!r} must be a fraction of the rows, or a file.")
    if not isinstance(made.test, str) and not 0 < made.test < 1:
        raise UserError(f"{where}: test = {made.test:g} must be between 0 and 1 (0.2 holds out a fifth of the rows), or a file.")
    if isinstance(made.share, bool) or not isinstance(made.share, int | float) or not 0 <= made.share <= 0.5:
        raise UserError(f"{where}: share = {made.share!r} must be between 0 and 0.5.")
    if isinstance(made.knots, bool) or not isinstance(made.knots, int) or not 0 <= made.knots <= 64:
        raise UserError(f"{where}: knots = {made.knots!r} must be a whole number from 0 to 64.")
    if made.classes and (made.task == "regression" or len(made.classes) < 2):
        raise UserError(f"{where}: classes = {list(made.classes)}: name at least two, and only for classification.")
    if len(made.classes) > MOST_CLASSES:
        raise UserError(f"{where}: {len(made.classes)} classes; at most {MOST_CLASSES}.")
    both = set(made.ranges) & set(made.categories)
    if both:
        raise UserError(f"{where}: column '{min(both)}' has both a range and categories; it is one or the other.")


def sheet_of(source: Any, columns: Columns, seed: int) -> Sheet:
    """The table with its roles; every mistake that can be seen before anything is learnt is an error here."""
    table = source if isinstance(source, Table) else read(source)
    if not isinstance(table, Table):
        raise UserError(f"{table.name}: these are images or arrays, not a table with named columns.")
    check_names(table, columns)
    columns = columns if table.written else _respelled(columns, table.name)
    features = columns.features(table)
    if not features:
        raise UserError(f"{table.name}: no feature columns are left beside the target (dropped: "
                        f"{', '.join(columns.drop) or 'none'}).")  # fmt: skip
    _needed(table, columns.target, "target")
    if columns.group:
        _needed(table, columns.group, "group")
    tested, train, test = _parts(table, columns, seed)
    groups: np.ndarray | None = None
    names: tuple[str, ...] = ()
    if columns.group:
        found, numbered, counts = np.unique(words(table.columns[columns.group]), return_inverse=True, return_counts=True)
        if (counts < 2).any():
            raise UserError(
                f"{table.name}, column '{columns.group}': group '{found[counts.argmin()]}' has one row; a site needs at least "
                "two. Join it to another site, or remove the row. Or is this not the column that says who holds a row?"
            )
        present, groups = np.unique(numbered[train], return_inverse=True)
        names = tuple(str(found[p]) for p in present)
    return Sheet(table, columns, train, tested, test, groups, names)


def _respelled(columns: Columns, where: str) -> Columns:
    """Declared words as the cells of a frame are spelled: 1.0 is 1 there."""
    categories = {c: respelled(w, f"{where}: categories of '{c}'") for c, w in columns.categories.items()}
    return replace(columns, classes=respelled(columns.classes, f"{where}: classes"), categories=categories)


def check_names(table: Table, columns: Columns) -> None:
    """Every column that is named is there, and none has two roles."""
    named = [
        ("target", columns.target), ("group", columns.group), ("split", columns.split), ("text", columns.text),
        *(("drop", c) for c in columns.drop), *(("keep", c) for c in columns.keep), *(("ranges", c) for c in columns.ranges),
        *(("categories", c) for c in columns.categories), *(("missing", c) for c in columns.missing),
    ]  # fmt: skip
    for role, column in named:
        if column and column not in table.columns:
            raise UserError(
                f"{table.name}: {role} column '{column}' is not there (columns: {', '.join(table.names)})."
                f"{did_you_mean(column, table.names)}"
            )
    if columns.target in (columns.group, columns.split, columns.text, *columns.drop):
        raise UserError(f"{table.name}: '{columns.target}' is the target and cannot have another role.")
    for column in set(columns.keep) & set(columns.drop):
        raise UserError(f"{table.name}: column '{column}' is both dropped and kept; it is one or the other.")


def identifiers(table: Table, columns: Columns) -> list[str]:
    """Feature columns that look like identifiers by their names, and about which nothing is declared."""
    declared = {*columns.ranges, *columns.categories, *columns.missing, *columns.keep, columns.text}
    return [name for name in columns.features(table) if name not in declared and is_identifier(name)]


def _needed(table: Table, column: str, role: str) -> None:
    gone = np.flatnonzero(words(table.columns[column]) == "")
    if len(gone):
        raise UserError(
            f"{table.name}, {role} column '{column}', row {table.lines[gone[0]]}: missing value ({len(gone)} in this column). "
            f"Remove these rows: a row without {role} cannot be used."
        )


def _parts(table: Table, columns: Columns, seed: int) -> tuple[Table, np.ndarray, np.ndarray]:
    """(table of the test rows, numbers of the training rows, numbers of the test rows)."""
    if columns.split:
        said = np.char.lower(words(table.columns[columns.split]))
        wrong = np.flatnonzero(~np.isin(said, ["train", "test"]))
        if len(wrong):
            raise UserError(
                f"{table.name}, column '{columns.split}', row {table.lines[wrong[0]]}: '{said[wrong[0]]}' is neither train nor "
                "test."
            )
        train, test = np.flatnonzero(said == "train"), np.flatnonzero(said == "test")
        if not len(train) or not len(test):
            raise UserError(f"{table.name}, column '{columns.split}': both train and test rows are needed.")
        return table, train, test
    if isinstance(columns.test, str):
        other = read(Path(columns.test))
        if not isinstance(other, Table):
            raise UserError(f"{columns.test}: not a table.")
        lacking = [c for c in (columns.target, *columns.features(table)) if c not in other.columns]
        if lacking:
            raise UserError(f"{columns.test}: the test rows have no column '{lacking[0]}'.")
        other = retyped(other) if other.written and not table.written else other
        return other, np.arange(len(table)), np.arange(len(other))
    held = round(columns.test * len(table))
    if not 0 < held < len(table):
        raise UserError(
            f"{table.name}: test = {columns.test:g} of {len(table)} rows leaves {held} for testing; both parts need rows."
        )
    train, test = split_rows(len(table), len(table) - held, seed)
    return table, np.sort(train), np.sort(test)


# --- constants that need no look


def declared(sheet: Sheet, column: str, knots: int) -> Scale:
    """The constants of a column as declared, or of the public hash where nothing is."""
    columns = sheet.columns
    if column in columns.ranges:
        low, high = columns.ranges[column]
        return Scale(column, "number", low, high, even_knots(low, high, knots), mark=column in columns.missing)
    if column in columns.categories:
        return Scale(column, "words", words=columns.categories[column])
    # Not by what the column holds: one row would decide for all of them, and for the model's width.
    how = f"as given: numbers outside -1 to 1 are cut, words hashed to {FREE_PLACES} public places"
    return Scale(column, "free", mark=column in columns.missing, how=how)


def even_knots(low: float, high: float, knots: int) -> tuple[float, ...]:
    """So many places between the ends, evenly; none where the number itself is meant."""
    return () if knots < 2 else tuple(float(v) for v in np.linspace(low, high, knots))


def place_of(cells: np.ndarray, places: int = PLACES) -> np.ndarray:
    """The public place of each word, every word alone."""
    found, back = np.unique(cells, return_inverse=True)
    marks = [int.from_bytes(hashlib.blake2b(str(w).encode(), digest_size=8).digest(), "little") % places for w in found]
    return np.array(marks, np.int64)[back.reshape(-1)]


# --- rows


def encode(sheet: Sheet, known: Known, name: str = "") -> Dataset:
    """Training and test rows as numbers between -1 and 1, each row alone."""
    x, x_test = (_features(table, rows, known, sheet.columns) for table, rows in _both(sheet))
    if not sheet.columns.text:
        _readable(sheet)
    y = _targets(sheet.table, sheet.train, sheet.columns, known, training=True)
    y_test = _targets(sheet.tested, sheet.test, sheet.columns, known, training=False)
    kept = y_test >= 0 if known.task == "classification" else np.isfinite(y_test)
    if not kept.any():
        raise UserError(f"{sheet.table.name}: no test row has a known class; hold out more rows (test).")
    kind = np.int64 if known.task == "classification" else np.float32
    return Dataset(
        name or sheet.table.name, x, y.astype(kind), x_test[kept], y_test[kept].astype(kind),
        classes=len(known.classes) or None, task=known.task, groups=sheet.groups, group_names=sheet.group_names,
        class_names=known.classes, notes=_notes(sheet, known, int((~kept).sum())),
    )  # fmt: skip


def _both(sheet: Sheet) -> tuple[tuple[Table, np.ndarray], tuple[Table, np.ndarray]]:
    return (sheet.table, sheet.train), (sheet.tested, sheet.test)


def _readable(sheet: Sheet) -> None:
    """A declared number column that holds a word is a mistake in the declaration."""
    for column in sheet.columns.ranges:
        cells = words(sheet.table.columns[column])
        wrong = np.flatnonzero((cells != "") & np.isnan(numbers(sheet.table.columns[column])))
        if len(wrong):
            raise UserError(
                f"{sheet.table.name}, column '{column}', row {sheet.table.lines[wrong[0]]}: '{cells[wrong[0]]}' is not a number, "
                "but the column has a range. Declare its categories instead, or correct the row."
            )


def _check_target(table: Table, rows: np.ndarray, columns: Columns, task: Task) -> None:
    """A target that is no number in a regression, or none of the declared classes, is a mistake in the declaration."""
    cells = table.columns[columns.target][rows]
    said = words(cells)
    if task == "regression":
        wrong = np.flatnonzero(np.isnan(numbers(cells)))
        told = "is not a number, but this is a regression. To predict words drop --task regression (task = classification)."
    else:
        wrong = np.flatnonzero(~np.isin(said, columns.classes)) if columns.classes else np.zeros(0, np.int64)
        told = f"is not among the classes {', '.join(columns.classes)}."
    if len(wrong):
        row, word = table.lines[rows[wrong[0]]], str(said[wrong[0]])
        near = did_you_mean(word, columns.classes)
        raise UserError(f"{table.name}, target column '{columns.target}', row {row}: '{word}' {told}{near}")


def check_declared(sheet: Sheet) -> None:
    """Refuse rows that contradict what is declared: before a look at the other columns is made and charged in vain."""
    columns = sheet.columns
    quantity = not columns.classes and columns.target in columns.ranges and columns.task != "classification"
    if not columns.text:
        _readable(sheet)
    for table, rows in _both(sheet):
        _check_target(table, rows, columns, "regression" if quantity or columns.task == "regression" else "classification")


def _features(table: Table, rows: np.ndarray, known: Known, columns: Columns) -> np.ndarray:
    if columns.text:
        return encode_texts(words(table.columns[columns.text])[rows].tolist(), 1024)
    parts = [_column(table.columns[scale.column][rows], scale) for scale in known.scales if scale.width]
    if not parts:
        raise UserError(f"{table.name}: no column is left to learn from.")
    return np.concatenate(parts, axis=1).astype(np.float32)


def _column(cells: np.ndarray, scale: Scale) -> np.ndarray:
    """One column as `scale.width` numbers per row."""
    if scale.kind == "words":
        if scale.words:
            return (words(cells)[:, None] == np.array(scale.words)[None]).astype(np.float64)
        count = FREE_PLACES if scale.how.startswith("hashed") else PLACES
        present = words(cells) != ""
        return (place_of(words(cells), count)[:, None] == np.array(scale.places)[None]) & present[:, None]
    if scale.kind == "free":
        return _free(cells, scale.mark)
    values = numbers(cells)
    gone = np.isnan(values)
    cut = np.clip(np.where(gone, scale.low, values), scale.low, scale.high)
    if scale.knots:
        out = _hats(cut, np.array(scale.knots))
    else:
        out = ((cut - scale.low) * (2.0 / (scale.high - scale.low)) - 1.0)[:, None]
    out = np.where(gone[:, None], 0.0, out)  # a missing value says nothing
    return np.concatenate([out, gone[:, None]], axis=1) if scale.mark else out


def _free(cells: np.ndarray, mark: bool) -> np.ndarray:
    """Each cell as a number of its own, and as a hashed word where it is none."""
    values, said = numbers(cells), words(cells)
    number = np.nan_to_num(np.clip(values, -1.0, 1.0))
    word = np.isnan(values) & (said != "")
    places = (place_of(said, FREE_PLACES)[:, None] == np.arange(FREE_PLACES)) & word[:, None]
    return np.concatenate([number[:, None], places, *([(said == "")[:, None]] if mark else [])], axis=1)


def _hats(values: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """Piecewise linear weights of each value on its two neighbouring knots."""
    at = np.clip(np.searchsorted(knots, values, side="right") - 1, 0, len(knots) - 2)
    part = (values - knots[at]) / (knots[at + 1] - knots[at])
    out = np.zeros((len(values), len(knots)))
    rows = np.arange(len(values))
    out[rows, at], out[rows, at + 1] = 1 - part, part
    return out


def _targets(table: Table, rows: np.ndarray, columns: Columns, known: Known, training: bool) -> np.ndarray:
    _check_target(table, rows, columns, known.task)
    cells = table.columns[columns.target][rows]
    if known.task == "regression":
        scaled = (numbers(cells) - known.low) * (2.0 / (known.high - known.low)) - 1.0
        return np.clip(scaled, -1.0, 1.0) if training else scaled
    said = words(cells)
    order = np.argsort(np.array(known.classes))
    at = order[np.clip(np.searchsorted(np.array(known.classes), said, sorter=order), 0, len(order) - 1)]
    right = np.array(known.classes)[at] == said
    return np.where(right, at, known.usual if training else -1)


def _notes(sheet: Sheet, known: Known, unknown: int) -> tuple[str, ...]:
    told = [f"{len(sheet.test)} test rows are kept out of training; they are not protected, and scores are computed from them"]
    if unknown:
        told.append(f"{unknown} test rows of other classes are left out")
    told += map(learnt_from, identifiers(sheet.table, sheet.columns))
    if known.task == "regression":
        told.append(f"target {known.low:g} to {known.high:g} is learnt as -1 to 1")
    return tuple(told)


def with_knots(known: Known, knots: int) -> Known:
    """The same constants with so many hat functions on every number column that has none of its own."""
    scales = tuple(
        replace(s, knots=even_knots(s.low, s.high, knots)) if s.kind == "number" and not s.knots else s for s in known.scales
    )
    return replace(known, scales=scales)
