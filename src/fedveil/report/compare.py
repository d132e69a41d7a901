"""Several configurations side by side, over seeds."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.errors import UserError
from fedveil.federation.config import load_config
from fedveil.federation.forecast import forecast
from fedveil.federation.loop import Prepared, run
from fedveil.federation.store import open_run, refuse_named_code
from fedveil.jsons import Document, JsonObject


def compare_all(
    names: Sequence[str], changes: Sequence[str], seeds: int, out: Path, quiet: bool = True, trust: bool = False
) -> list[JsonObject]:
    """One row per name: runs are read where a directory is given, made (or resumed) otherwise.

    trust: code that a configuration names may be imported.
    """
    from rich.console import Console
    from rich.progress import track

    jobs: list[tuple[str, JsonObject | None, int]] = []
    for name in names:
        folder = Path(name)
        if (folder / "run.json").is_file():
            found = open_run(folder).result
            if found is None:
                raise UserError(
                    f"run {folder} is not finished: `fedveil run … --out {folder} --resume` finishes it"
                )
            jobs.append((name, found, 0))
        else:
            jobs += [(name, None, seed) for seed in range(seeds)]
    results: dict[str, list[JsonObject]] = {}
    console = Console(stderr=True, quiet=quiet)
    for name, found, seed in track(
        jobs, "comparing", console=console, disable=quiet or not console.is_terminal
    ):
        if found is None:
            config = load_config(name, [*changes, f"seed={seed}", "report=false"])
            refuse_named_code(config, trust)
            folder = out / f"{Path(name).stem}-{seed}"
            found = run(config, folder, resume=(folder / "run.json").exists(), on_start=None if quiet else _tell)
        results.setdefault(name, []).append(found)
    return [_row(name, found) for name, found in results.items()]


def _tell(prepared: Prepared) -> None:
    said = forecast(prepared)
    if said:
        print(f"forecast for {prepared.task.recipe.name}: {said}", file=sys.stderr, flush=True)


def _row(name: str, results: list[Document]) -> JsonObject:
    quality = [r["test_accuracy"] if r["test_accuracy"] is not None else r.get("test_rmse") for r in results]
    values = [q for q in quality if q is not None]
    first = open_run(results[0]["run"])
    steps = first.config.local_steps * sum(m.get("clients", 0) for m in first.metrics) or 1
    return {
        "name": name,
        "recipe": results[0]["recipe"],
        "dataset": results[0]["dataset"],
        "runs": len(results),
        "metric": "test_accuracy" if results[0]["test_accuracy"] is not None else "test_rmse",
        "mean": statistics.fmean(values) if values else None,
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
        "epsilon_nominal": _largest(results, "nominal"),
        "epsilon_sound": _largest(results, "sound"),
        "observer": first.config.observer,
        "milliseconds_per_local_iteration": 1000 * sum(m["seconds"] for m in first.metrics) / steps,
        "seconds": statistics.fmean(r["seconds"] for r in results),
    }


def _largest(results: list[Document], verdict: str) -> float | None:
    """The observer's example-level epsilon (client-level where there is no other), worst over the seeds."""
    for unit in ("example", "client"):
        found = []
        for result in results:
            observer = open_run(result["run"]).config.observer
            rows = [
                r
                for r in result["ledger"]
                if (r["observer"], r["unit"], r["verdict"]) == (observer, unit, verdict)
            ]
            found += [r["epsilon"] for r in rows if r["epsilon"] is not None]
        if found:
            return max(found)
    return None


def table_of(rows: list[Document]) -> Any:
    """A rich table."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("configuration", "dataset", "result", "ε nominal", "ε sound", "ms/iteration", "seconds"):
        table.add_column(column, justify="left" if column in ("configuration", "dataset") else "right")

    def number(value: float | None, digits: int = 3) -> str:
        return "none" if value is None else f"{value:.{digits}f}"

    for row in rows:
        spread = "" if row["deviation"] is None else f" ± {row['deviation']:.4f}"
        table.add_row(
            row["name"],
            row["dataset"],
            number(row["mean"], 4) + spread,
            number(row["epsilon_nominal"]),
            number(row["epsilon_sound"]),
            number(row["milliseconds_per_local_iteration"]),
            number(row["seconds"], 1),
        )
    return table


def plot_pareto(rows: list[Document], path: Path) -> None:
    """Result against sound epsilon; configurations without a sound promise stand at the right edge, hollow."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if path.suffix not in (".png", ".svg"):
        raise UserError(f"--plot {path}: the name must end in .png or .svg")
    known = [r["epsilon_sound"] for r in rows if r["epsilon_sound"]]
    edge = 3 * max(known, default=1.0)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for row in (r for r in rows if r["mean"] is not None):
        sound = row["epsilon_sound"]
        axes.errorbar(
            sound or edge,
            row["mean"],
            yerr=row["deviation"] or 0,
            fmt="o",
            capsize=3,
            color="tab:green" if sound else "tab:red",
            markerfacecolor="tab:green" if sound else "none",
        )
        axes.annotate(
            row["name"], (sound or edge, row["mean"]), textcoords="offset points", xytext=(6, 4), fontsize=8
        )
    axes.axvline(edge, color="tab:red", lw=0.6, ls=":")
    axes.annotate(
        "no sound promise",
        (edge, axes.get_ylim()[0]),
        rotation=90,
        fontsize=7,
        va="bottom",
        ha="right",
        color="tab:red",
    )
    axes.set(
        xscale="log",
        xlabel=f"sound ε for the {rows[0]['observer']}",
        ylabel=rows[0]["metric"].replace("_", " "),
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
