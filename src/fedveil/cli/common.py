"""What all command groups share: one way to print, to read names and to save plots."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedveil.errors import UserError, did_you_mean
from fedveil.jsons import plain

TrustFlag = Annotated[
    bool, typer.Option("--trust-code", help="Import code named as package.module:name (dataset, model, features, recipe, loss).")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
DeltaOption = Annotated[float, typer.Option("--delta", help="The delta of the promise: 0 to below 1.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", help="Also draw epsilon against steps into this .png or .svg file.")
]


def emit(data: object, as_json: bool, show: Callable[[], None]) -> None:
    """Print `data` as the one JSON document on stdout, or call `show` to print it for people."""
    if as_json:
        sys.stdout.write(json.dumps(plain(data), indent=2, allow_nan=False) + "\n")
    else:
        show()


def figure(value: float | None, digits: int = 4, missing: str = "-") -> str:
    """A number for people: four significant digits, no trailing zeros lost, `missing` for None."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return missing
    if math.isinf(value):
        return "infinite"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.{max(digits - 1 - math.floor(math.log10(abs(value))), 0)}f}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    notes: Sequence[tuple[str, str]] = (),
) -> None:
    """A plain table that fits 80 columns if its cells do, and (number, text) notes below for the long words.

    Colour marks the verdicts sound, nominal and none, where the terminal has colours.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"sound": "green", "nominal": "yellow", "none": "red"}
    console = Console(highlight=False)
    console.print(Text(title, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=colours.get(cell, "")) for cell in row))
    console.print(table)
    if notes:
        below = Table.grid(padding=(0, 2))
        for mark, text in notes:
            below.add_row(mark, Text(text))
        console.print(below)


def print_own_budgets(rows: Sequence[Mapping[str, object]]) -> None:
    """What clients with budgets of their own were promised and have spent; nothing where there are none."""
    body = []
    for row in rows:
        clients, budget, epsilon, delta = (row[name] for name in ("clients", "budget", "epsilon", "delta"))
        assert isinstance(clients, list | tuple)
        who = ", ".join(map(str, clients)) if len(clients) <= 8 else f"{len(clients)} clients"
        limit = "no limit" if budget is None else figure(float(str(budget)))
        spent = None if epsilon is None else float(str(epsilon))
        body.append([who, limit, figure(float(str(delta))), figure(spent, missing="none"), "none" if spent is None else "sound"])
    if body:
        about = " and ".join(dict.fromkeys(f"{row['observer']}, {row['unit']}" for row in rows))
        columns = ["clients", "budget", "delta", "epsilon spent", "verdict"]
        print_table(f"Budgets of their own ({about})", columns, body, right=columns[1:4])


class Notes:
    """Collects long explanations; equal ones share a number."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}

    def mark(self, text: str) -> str:
        """The number to print in a cell, or nothing for an empty text."""
        return str(self._texts.setdefault(text, len(self._texts) + 1)) if text else ""

    def lines(self, *more: str) -> list[tuple[str, str]]:
        """The notes with their numbers, then `more` without."""
        return [(str(number), text) for text, number in self._texts.items()] + [("", text) for text in more]


def one_of(option: str, value: str, known: Sequence[str]) -> str:
    """`value` if it is known; otherwise a `UserError` that names the option, the choices and the nearest."""
    if value in known:
        return value
    raise UserError(f"{option} '{value}': use one of {', '.join(known)}.{did_you_mean(value, known)}")


def plot_file(path: Path | None) -> Path | None:
    """Check the ending and the folder before any work is done."""
    if path is None:
        return None
    if path.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"--plot {path}: the name must end in .png or .svg.")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: the folder {path.absolute().parent} does not exist.")
    return path


def save_curves(
    path: Path,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float | None]]],
    title: str,
    x_label: str,
    y_label: str,
) -> None:
    """Draw named curves (x values, y values; None leaves a gap) and save them as PNG or SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    shown, axes = pyplot.subplots(figsize=(7.6, 4.0), layout="constrained")
    alike: dict[tuple, list[str]] = {}
    for name, (x, y) in curves.items():
        alike.setdefault((tuple(x), tuple(math.nan if value is None else value for value in y)), []).append(
            name
        )
    for (x, y), names in alike.items():  # one line, one label where several curves are the same
        axes.plot(x, y, label="\n".join(names), marker="o", markersize=3, linewidth=1.4)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    if any(value for _, ys in curves.values() for value in ys if value is not None and value > 0):
        positive = [value for _, ys in curves.values() for value in ys if value]
        if max(positive) > 100 * min(positive):
            axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    shown.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    pyplot.close(shown)
