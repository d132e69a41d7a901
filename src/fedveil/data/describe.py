"""What a table's owner sees in each column, and what is private about using it. For the owner's eyes only.

Nothing here goes into a run: a run takes what is declared, or pays for a noised look of its own (`federation.look`).
"""

from __future__ import annotations

import re

import numpy as np

from fedveil.data.columns import Columns, identifiers
from fedveil.data.frames import Table, numbers, words
from fedveil.data.identifiers import is_identifier
from fedveil.jsons import JsonObject

PAY = "range and gaps are private: declare what can be measured, not what is seen (--ranges), or the run pays for a noised look"
BY_NAME = "drop: it looks like an identifier by its name (`fedveil fit` leaves it out; --keep {name} keeps it)"
SAY = "which words occur is private: declare those that the schema allows (--categories), or the run pays for a noised look"

CONSTANT = "check: every row has the same value, so there is nothing to learn"
LOST = "are read as words, of which hardly any would be learnt from; write"
WRITTEN = {
    r"[-+]?(\d+|\d{1,3}(\.\d{3})+),\d+": f"check: numbers with a decimal comma {LOST} them with a point (12.5)",
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})([ T].*)?":
    f"check: dates {LOST} a number instead (a year, days since an event), or drop the column",
}


def describe(table: Table, columns: Columns | None) -> list[JsonObject]:
    """One dictionary per column: name, role, what is seen (private), what that means for privacy, a suggestion or ""."""
    named = set(identifiers(table, columns)) if columns is not None else {name for name in table.names if is_identifier(name)}
    return [_one(name, cells, _role(name, columns), columns, len(table), name in named) for name, cells in table.columns.items()]


def _role(name: str, columns: Columns | None) -> str:
    if columns is None:
        return "column"
    special = {columns.target: "target", columns.group: "group", columns.split: "split", columns.text: "text"}
    return "dropped" if name in columns.drop else special.get(name, "feature" if not columns.text else "not used")


def _one(name: str, cells: np.ndarray, role: str, columns: Columns | None, rows: int, named: bool) -> JsonObject:
    said, values = words(cells), numbers(cells)
    present = said != ""
    different = len(np.unique(said[present]))
    numeric = bool(present.any()) and not np.isnan(values[present]).any()
    seen = _seen(said, values, present, different, numeric)
    suggestion = ""
    if named:
        role, suggestion = "dropped" if role == "feature" else role, BY_NAME.format(name=name)
    elif role in ("feature", "column", "target"):
        suggestion = _against_declared(name, said, values, present, columns)
        if not suggestion and role == "target":
            suggestion = CONSTANT if different == 1 else ""
        elif not suggestion:
            suggestion = _written_otherwise(said[present]) or _suggestion(values, present, different, numeric)
    return {
        "column": name, "role": role, "kind": "numbers" if numeric else "words" if present.any() else "empty", "seen": seen,
        "missing": int(rows - present.sum()), "private": _private(name, role, columns, numeric), "suggestion": suggestion,
    }  # fmt: skip


def _seen(said: np.ndarray, values: np.ndarray, present: np.ndarray, different: int, numeric: bool) -> str:
    if not present.any():
        return "no value at all"
    gaps = f", {int((~present).sum())} missing" if not present.all() else ""
    if numeric:
        return f"numbers {values[present].min():.4g} to {values[present].max():.4g}, {different} different{gaps}"
    some = ", ".join(map(str, np.unique(said[present])[:4]))
    return f"{different} different words ({some}{', …' if different > 4 else ''}){gaps}"


def _against_declared(name: str, said: np.ndarray, values: np.ndarray, present: np.ndarray, columns: Columns | None) -> str:
    """Values that a declaration leaves out: a run cuts or forgets them without a word, since which they are is private."""
    if columns is None:
        return ""
    if name in columns.ranges:
        low, high = columns.ranges[name]
        outside = int((present & ~((values >= low) & (values <= high))).sum())
        return f"check: {outside} values are not in the declared range {low:g} to {high:g}; they would be cut" if outside else ""
    declared = columns.classes if name == columns.target else columns.categories.get(name, ())
    other = present & ~np.isin(said, declared) if declared else np.zeros(len(said), bool)
    if not other.any():
        return ""
    told = "`fedveil fit` refuses these rows" if name == columns.target else "they would say nothing"
    some = ", ".join(map(str, np.unique(said[other])[:4]))
    return f"check: {int(other.sum())} rows hold a word that is not declared ({some}): {told}; declare it, or correct them"


def _written_otherwise(said: np.ndarray) -> str:
    """What to do about numbers and dates that are read as words because of how they are written."""
    for pattern, advice in WRITTEN.items():
        if len(said) and sum(re.fullmatch(pattern, str(word)) is not None for word in said) > 0.5 * len(said):
            return advice
    return ""


def _suggestion(values: np.ndarray, present: np.ndarray, different: int, numeric: bool) -> str:
    if not present.any():
        return "drop: it is empty"
    if different == 1:
        return "drop: every row has the same value"
    if different > 0.9 * len(present) and not numeric:
        return "drop: nearly every row has a word of its own, as identifiers do (or name it as text)"
    if different == len(present) and (values == np.round(values)).all():
        return "drop: every row has a whole number of its own, as identifiers do"
    odd = np.isnan(values[present]).mean()
    if not numeric and 0 < odd < 0.1:
        return f"check: {odd:.1%} of the cells are no numbers; they would count as missing"
    if present.mean() < 0.5:
        return "check: more than half of the cells are missing"
    return ""


def _private(name: str, role: str, columns: Columns | None, numeric: bool) -> str:
    if role == "dropped" or role == "not used":
        return "not used"
    if role == "group":
        return "names and sizes of the sites count as public"
    if role == "split":
        return "which rows are for testing counts as public; test rows are not protected"
    if role == "text":
        return "each text alone becomes numbers by public rules: nothing is read off the rows"
    if columns is not None and (name in columns.ranges or name in columns.categories):
        return "declared: nothing is looked at"
    if role == "target":
        known = columns is not None and columns.target_known
        return "declared: nothing is looked at" if known else (
            "its values would be private: declare them (--classes, or --ranges for a quantity), or the run pays for a noised look"
        )
    return PAY if numeric else SAY
