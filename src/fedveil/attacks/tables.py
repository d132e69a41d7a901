"""The papers' leakage tables on real data, ours beside theirs. One line per cell, kept as soon as it is measured:
an interrupted table continues where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.attacks import campaign, leakage
from fedveil.attacks.gradient import Method
from fedveil.engines.simulate import prepare
from fedveil.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Cell:
    """One attack of a table. paper: the published figure, named by `measure` (None where nothing was printed)."""

    table: str
    dataset: str
    recipe: str
    tap: str = "type2"
    method: Method = "veil"
    noise_on: str | None = None
    batch: float | None = None
    changes: tuple[tuple[str, float], ...] = ()
    measure: str = "success_rate"
    paper: float | None = None

    @property
    def name(self) -> str:
        more = "".join(f"|{k}={v}" for k, v in self.changes)
        return (
            "|".join(
                map(
                    str,
                    (self.table, self.dataset, self.recipe, self.tap, self.method, self.noise_on, self.batch),
                )
            )
            + more
        )


def _attacks() -> Iterator[Cell]:
    published: dict[Method, tuple[float | None, ...]] = {
        "dlg": (0.686, 0.754, 0.857),
        "gradinv": (1, 0.985, 0.994),
        "cpl": (1, 0.973, 1),
        "veil": (None, None, None),
    }
    for method, values in published.items():
        for dataset, value in zip(("mnist", "cifar10", "lfw"), values, strict=True):
            yield Cell("p3-table-1", dataset, "non-private", method=method, paper=value)


_DISTANCES = {  # RMSE: type 2 on MNIST and LFW, types 0 and 1 on MNIST and LFW
    "non-private": (0.0008, 0.0015, 0.155, 0.221),
    "fed-sdp": (None, None, 0.699, 0.735),
    "fed-cdp": (0.739, 0.663, 0.770, 0.804),
    "fed-cdp-decay": (None, None, None, None),
    "fed-alpha-cdp": (None, None, None, None),
    "fed-alpha-cdp-sigma-exponential": (0.94, 0.947, 0.937, 0.942),
    "quantile-clip": (None, None, 0.41, 0.40),
    "adaclip": (None, None, 0.46, 0.34),
}
_NOISE_IN_STEPS = tuple(name for name in _DISTANCES if name not in ("non-private", "fed-sdp"))


def _recipes() -> Iterator[Cell]:
    for at, dataset in enumerate(("mnist", "lfw")):
        for recipe, values in _DISTANCES.items():
            yield Cell("p3-table-3", dataset, recipe, measure="rmse", paper=values[at])
            if recipe in _NOISE_IN_STEPS:  # the other reading of the papers, and the one their figures need
                yield Cell(
                    "p3-table-3", dataset, recipe, noise_on="example", measure="rmse", paper=values[at]
                )
            for tap in ("type1", "type0", *(("type0-sanitised",) if recipe == "fed-sdp" else ())):
                batch = 3.0 if dataset == "lfw" else 1.0
                yield Cell(
                    "p3-table-3", dataset, recipe, tap, batch=batch, measure="rmse", paper=values[2 + at]
                )


def _central() -> Iterator[Cell]:
    published = {
        "non-private": (1, 1, 0.973, 1), "dp-baseline": (0.23, 0.25, 0.16, 0.13), "quantile-clip": (0.64, 0.67, 0.47, 0.49),
        "adaclip": (0.72, 0.76, 0.58, 0.61), "dp-dyn-s-sigma": (0, 0, 0, 0),
    }  # fmt: skip
    for recipe, values in published.items():
        for dataset, value in zip(("mnist", "fashion_mnist", "cifar10", "lfw"), values, strict=True):
            on = None if recipe == "non-private" else "example"
            yield Cell("p2-table-3", dataset, recipe, noise_on=on, paper=value)


def _sweeps() -> Iterator[Cell]:
    for dataset in ("mnist", "cifar10", "lfw"):
        for share in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
            yield Cell("pruning", dataset, "gradient-pruning", "type0", batch=1, changes=(("prune", share),))
    for batch in (1, 2, 4, 8, 16, 32, 100):
        yield Cell("batches", "mnist", "non-private", "type0", batch=batch)
    for bound, sigma in ((1.0, 1.0), (4.0, 6.0), (1.0, 0.1), (1.0, 0.01), (1.0, 0.001)):
        yield Cell(
            "noise", "mnist", "fed-cdp", noise_on="example", changes=(("clip.bound", bound), ("sigma", sigma))
        )


def cells(table: str | None = None) -> list[Cell]:
    """All cells, or those of one table."""
    every = [*_attacks(), *_recipes(), *_central(), *_sweeps()]
    names = list(dict.fromkeys(c.table for c in every))
    if table is not None and table not in names:
        raise UserError(f"unknown table '{table}'; there are {', '.join(names)}.{did_you_mean(table, names)}")
    return [c for c in every if table in (None, c.table)]


def fill(
    wanted: list[Cell],
    path: Path,
    *,
    victims: int = 100,
    seed: int = 11,
    data: str | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Measure the cells that `path` does not hold yet; returns all rows, each with the published figure."""

    def run(cell: Cell) -> dict[str, Any]:
        config = campaign.gradient_config(
            cell.recipe, cell.dataset, "cpl-lenet", victims=victims, seed=seed, tap=cell.tap, batch=cell.batch,
            noise_on=cell.noise_on, data=data, changes=dict(cell.changes),
        )  # fmt: skip
        prepared = prepare(config)
        found = leakage.measure(
            prepared, campaign.initial(prepared), method=cell.method, tap=cell.tap, victims=victims, seed=seed, **options
        )  # fmt: skip
        return {"table": cell.table, "measure": cell.measure, "paper": cell.paper, "ours": found.figures[cell.measure],
                "changes": dict(cell.changes), **found.figures}  # fmt: skip

    return leakage.table(path, [(f"{cell.name}|{victims}|{seed}", cell) for cell in wanted], run)
