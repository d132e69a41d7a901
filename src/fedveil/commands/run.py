"""`fedveil run`, `fedveil recipes`, `fedveil compare`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fedveil.errors import UserError


def register(app: typer.Typer) -> None:
    app.command()(run)
    app.command()(recipes)
    app.command()(compare)


SetOption = Annotated[
    list[str], typer.Option("--set", help="Change a key: rounds=20, dataset=mnist, sigma=2, clip.bound=1.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def run(
    name: Annotated[
        str, typer.Argument(metavar="NAME_OR_TOML", help="A recipe, a shipped configuration or a .toml file.")
    ],
    change: SetOption = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Run directory (default: runs/NAME-TIME).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False,
    data: Annotated[str | None, typer.Option(help="Folder of the datasets (else FEDVEIL_DATA).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a recipe across clients and state what each observer may learn.

    Examples:

      fedveil run fed-cdp

      fedveil run fed-alpha-cdp-sound --set dataset=digits --set rounds=20 --out runs/first

      fedveil run my-study.toml --resume --out runs/study
    """
    from fedveil.engines.simulate import run as simulate
    from fedveil.runs.config import load_config
    from fedveil.runs.store import open_run

    changes = [*change, *([f'data="{data}"'] if data else [])]
    if resume and out is None:
        raise UserError("--resume needs --out DIR: the run to continue")
    config = load_config(name, changes)
    if resume and out is not None and (out / "run.json").exists() and not change:
        config = open_run(out).config
    folder = out or Path("runs") / f"{config.name or config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = "fedveil run " + " ".join([name, *(f"--set {text}" for text in changes)])
    result = _with_progress(
        config, lambda hook: simulate(config, folder, resume=resume, on_round=hook, command=command), as_json
    )
    if config.report:
        _write_report(folder)
    if as_json:
        print(json.dumps(result))
        return
    _show(result, config)


def _with_progress(config: Any, work: Any, quiet: bool) -> dict[str, Any]:
    """Run `work(callback)` behind a progress bar on a terminal; silently otherwise."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return work(None)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=config.rounds, shown="")

        def hook(facts: Any) -> None:
            accuracy = facts.metrics.get("test_accuracy")
            rmse = facts.metrics.get("test_rmse")
            shown = (
                f"accuracy {accuracy:.3f}"
                if accuracy is not None
                else f"rmse {rmse:.3f}"
                if rmse is not None
                else ""
            )
            epsilon = facts.metrics.get("epsilon")
            shown += f"  epsilon({config.observer}) {epsilon:.3f}" if epsilon is not None else ""
            progress.update(bar, completed=facts.round, shown=shown)

        return work(hook)


def _write_report(folder: Path) -> None:
    try:
        from fedveil.runs.report import write_report
    except ModuleNotFoundError as missing:
        if missing.name != "fedveil.runs.report":
            raise
        return
    write_report([folder], folder / "report.html")


def _show(result: dict[str, Any], config: Any) -> None:
    from rich.console import Console

    from fedveil.commands.common import ledger_table

    console = Console()
    accuracy, rmse = result["test_accuracy"], result.get("test_rmse")
    quality = (
        f"test accuracy {accuracy:.4f}"
        if accuracy is not None
        else f"test RMSE {rmse:.4f}"
        if rmse is not None
        else "no finite result"
    )
    console.print(
        f"[bold]{result['recipe']}[/bold] on {result['dataset']}: {quality} after {result['rounds']} rounds "
        f"({result['seconds']:.1f} s, engine {result['engine']}); stopped: {result['stopped']}"
    )
    console.print(ledger_table(result["ledger"]))
    if result["simulated"]:
        console.print(
            "Noise was seeded: these promises hold when deployed with secret noise (secure_noise = true)."
        )
    console.print(
        f"Run directory: {result['run']}"
        + ("  (open report.html)" if (Path(result["run"]) / "report.html").exists() else "")
    )


def recipes(as_json: JsonOption = False) -> None:
    """List every recipe: clip, sensitivity, sigma, place of the noise, and the verdict for each observer.

    Example:  fedveil recipes --json
    """
    from fedveil.learning.describe import describe_all

    rows = describe_all()
    if as_json:
        print(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("recipe", "clip", "S", "sigma", "noise", "server", "client-process", "public"):
        table.add_column(column, overflow="fold")
    colours = {"sound": "green", "nominal": "yellow", "none": "red"}
    for row in rows:
        marks = [
            f"[{colours[row['verdicts'][o]]}]{row['verdicts'][o]}[/]"
            for o in ("server", "client-process", "public")
        ]
        table.add_row(row["name"], row["clip"], row["sensitivity"], row["sigma"], row["where"], *marks)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def compare(
    names: Annotated[
        list[str],
        typer.Argument(metavar="A B …", help="Recipes, configurations, .toml files or run directories."),
    ],
    change: SetOption = [],  # noqa: B006
    seeds: Annotated[int, typer.Option(min=1, help="Runs per configuration, seeds 0, 1, …")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the runs that are made.")] = Path("runs/compare"),
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture (.png or .svg): accuracy against sound epsilon.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run or read several configurations and put them side by side: accuracy, epsilon nominal and sound, time.

    Example:  fedveil compare fed-cdp fed-alpha-cdp-sound --set dataset=digits --seeds 3 --plot pareto.png
    """
    from fedveil.runs.compare import compare_all, plot_pareto, table_of

    rows = compare_all(names, change, seeds, out, quiet=as_json)
    if plot is not None:
        plot_pareto(rows, plot)
    if as_json:
        print(json.dumps(rows))
        return
    from rich.console import Console

    Console().print(table_of(rows))
