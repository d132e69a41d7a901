"""Made-up data to try commands on: rows of patients, pictures of four kinds, letters. A program draws it from a seed."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedveil.errors import UserError

Kind = Literal["table", "study", "images", "texts"]
ROWS: dict[Kind, int] = {"table": 4000, "study": 350, "images": 2000, "texts": 2000}
SIDE = 16
CALM = ("thank you for the kind talk last week", "I would like to move my visit to next month", "the new pills work well",
        "please send me a copy of my letter", "my knee is much better since the walk", "greetings from the holidays")  # fmt: skip
URGENT = ("I cannot breathe well since this morning", "the pain in my chest is strong today", "I fainted twice last night",
          "the wound is bleeding again", "my fever is above forty and rising", "I took too many pills by mistake")  # fmt: skip


def write(path: Path, kind: Kind | None = None, rows: int | None = None, seed: int = 0) -> Kind:
    """Draw a sample into `path`, which must not exist; returns its kind (by default .npz: images, .csv: table)."""
    images = path.suffix == ".npz"
    if not images and not path.name.endswith((".csv", ".csv.gz")):
        raise UserError(f"{path}: give a name that ends in .csv, .csv.gz (a table or texts) or .npz (images).")
    chosen: Kind = kind or ("images" if images else "table")
    if images != (chosen == "images"):
        raise UserError(f"{path}: {chosen} are written to {'.npz' if chosen == 'images' else '.csv'} files.")
    count = ROWS[chosen] if rows is None else rows
    if count < 10:
        raise UserError(f"rows = {count}: give 10 or more.")
    draw = np.random.default_rng(seed)
    data = _images(draw, count) if images else _csv(_CELLS[chosen](draw, count), path.suffix == ".gz")
    try:
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError:
        raise UserError(f"{path} exists already and is left alone; give another name.") from None
    except OSError as wrong:
        raise UserError(f"{path} cannot be written: {wrong.strerror}.") from None
    return chosen


def _csv(rows: Sequence[Sequence[object]], packed: bool) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    data = text.getvalue().encode()
    return gzip.compress(data, mtime=0) if packed else data


def _patients(draw: np.random.Generator, count: int) -> list[list[object]]:
    """Risk grows with age and CRP and with sodium away from 140; a tenth of the CRP cells is empty."""
    rows: list[list[object]] = [["patient_id", "hospital", "age", "sex", "crp", "sodium", "days", "outcome"]]
    for number in range(count):
        age, crp, sodium = int(draw.integers(20, 95)), float(draw.exponential(40)), float(draw.normal(140, 4))
        risk = (age - 57) / 15 + (crp - 40) / 40 + (abs(sodium - 140) - 3.2) / 4
        outcome = "died" if draw.random() < 1 / (1 + np.exp(-1.5 * risk)) else "alive"
        days = float(np.exp(1.5 + 0.2 * risk + draw.normal(0, 0.3)))
        shown = "" if draw.random() < 0.1 else f"{crp:.1f}"
        site, sex = draw.choice(["north", "south", "east"]), draw.choice(["F", "M"])
        rows.append([f"P{number:05d}", site, age, sex, shown, f"{sodium:.1f}", f"{days:.1f}", outcome])
    return rows


def _numbers(draw: np.random.Generator, count: int) -> list[list[object]]:
    """The same patients as one site of a study brings them: numbers only, no cell empty."""
    rows = _patients(draw, 2 * count + 50)
    kept = [row for row in rows if row[4] != ""][: count + 1]
    return [[row[at] for at in (2, 4, 5, 7)] for row in kept]


def _letters(draw: np.random.Generator, count: int) -> list[list[object]]:
    """Three sentences each; urgent letters hold at least one that is."""
    rows: list[list[object]] = [["letter", "urgent"]]
    for _ in range(count):
        urgent = draw.random() < 0.5
        said = [str(s) for s in draw.choice(CALM, 3)]
        if urgent:
            said[int(draw.integers(3))] = str(draw.choice(URGENT))
        rows.append([". ".join(said) + ".", "yes" if urgent else "no"])
    return rows


def _images(draw: np.random.Generator, count: int) -> bytes:
    """Grey pictures with one of four quarters bright."""
    labels = draw.integers(0, 4, count)
    pictures = draw.random((count, SIDE, SIDE)) * 0.3
    half = SIDE // 2
    for kind in range(4):
        down, right = half * (kind // 2), half * (kind % 2)
        pictures[labels == kind, down : down + half, right : right + half] += 0.6
    file = io.BytesIO()
    np.savez_compressed(file, x=pictures.astype(np.float32), y=labels)
    return file.getvalue()


_CELLS = {"table": _patients, "study": _numbers, "texts": _letters}
