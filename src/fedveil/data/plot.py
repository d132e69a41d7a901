"""A picture of a partition: who holds how much of which class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedveil.data.partition import Partition, class_counts
from fedveil.data.rows import Dataset
from fedveil.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN = 100  # clients drawn; of more, an even choice


def plot_partition(dataset: Dataset, made: Partition, path: str | Path) -> Path:
    """Draw the partition into a picture file (png, svg or pdf): one bar per client, one colour per class.

    The picture shows private label counts: it is for the people who own the data.
    """
    from matplotlib.figure import Figure

    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path}: the name must end in .png, .svg or .pdf.")
    shown = np.unique(np.linspace(0, made.clients - 1, min(made.clients, _SHOWN)).astype(int))
    counts = class_counts(dataset, made, [int(i) for i in shown])
    classes = counts.shape[1]
    figure = Figure(figsize=(10, 4.8), layout="constrained", dpi=150)
    axes = figure.subplots()
    highest = _bars(axes, counts, dataset.class_names or tuple(str(i) for i in range(classes)))
    step = max(1, -(-len(shown) // 20))
    axes.set_xticks(np.arange(len(shown))[::step], [f"{i:,}" for i in shown[::step]])
    axes.tick_params(axis="x", labelrotation=45 if made.clients > 9999 else 0, length=0)
    axes.set_xlim(-0.7, len(shown) - 0.3)
    axes.set_ylim(0, max(1.0, highest * 1.05))
    few = f"client ({len(shown)} of {made.clients:,} shown)" if len(shown) < made.clients else "client"
    axes.set_xlabel(few)
    axes.set_ylabel("training rows")
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    title = f"{dataset.name}: {made.kind}, {made.clients:,} clients"
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=22)
    axes.text(0, 1.02, made.note, transform=axes.transAxes, fontsize=9, color="#555555", va="bottom")
    _name_classes(axes, classes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as failed:
        raise UserError(f"--plot {path} could not be written: {failed}.") from failed
    return path


def _bars(axes: Axes, counts: np.ndarray, names: tuple[str, ...]) -> float:
    """One stacked bar for each row of `counts`; returns the highest."""
    from matplotlib import colormaps

    clients, classes = counts.shape
    if classes <= 10:
        colours = [colormaps["tab10"](i) for i in range(classes)]
    else:
        colours = [colormaps["turbo"](v) for v in np.linspace(0.03, 0.97, classes)]
    bottom = np.zeros(clients)
    for label in range(classes):
        axes.bar(
            np.arange(clients), counts[:, label], bottom=bottom, width=0.86, color=colours[label], linewidth=0,
            label=names[label] if classes > 1 else "rows",
        )  # fmt: skip
        bottom += counts[:, label]
    return float(bottom.max())


def _name_classes(axes: Axes, classes: int) -> None:
    """A legend, or their number where there are too many."""
    if 1 < classes <= 12:
        axes.legend(
            loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False, fontsize=9, title="class", reverse=True
        )
    elif classes > 12:
        axes.text(
            1.01, 0.5, f"{classes} classes", transform=axes.transAxes, rotation=90, va="center", color="#555555"
        )
