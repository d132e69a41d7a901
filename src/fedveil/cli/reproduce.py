"""`fedveil reproduce`: every table and figure of the papers, done again and set beside the print."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.cli.common import JsonFlag, emit, one_of, print_table
from fedveil.errors import UserError
from fedveil.jsons import JsonObject

if TYPE_CHECKING:
    from fedveil.studies.runner import Plan


def register(app: typer.Typer) -> None:
    app.command()(reproduce)


def reproduce(
    table: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="An id of --list, e.g. p1-table6 or p3-fig4.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List every table and figure.")] = False,
    scale: Annotated[
        str, typer.Option(help="small: under 10 minutes on 2 cores; paper: the full setting.")
    ] = "small",
    seeds: Annotated[int, typer.Option(min=1, help="Runs per cell, seeds 0, 1, …")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for finished cells, runs, pages and pictures.")] = Path(
        "runs/reproduce"
    ),
    only: Annotated[
        str,
        typer.Option(help="Only cells with these words, e.g. epsilon or train,mnist (kind, dataset, row …)."),
    ] = "",
    victims: Annotated[
        str,
        typer.Option(
            help="Fewer victims for the attacks at paper scale, e.g. 32 or lfw=32,cifar10=16 (default: 100)."
        ),
    ] = "",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs and attacks at a time (default: one per core).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep finished cells; do only the rest.")] = False,
    finished: Annotated[
        bool, typer.Option("--finished", help="Run nothing: write the page of the cells finished so far.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Do a published table or figure again: paper, ours, difference, and why.

    Examples:

      fedveil reproduce --list

      fedveil reproduce p1-table6

      fedveil reproduce p3-table6 --scale paper --only mnist --seeds 3 --resume --out runs/p3
    """
    if listed or table is None:
        if table is None and not listed:
            raise UserError("Name a table or figure, e.g. fedveil reproduce p1-table6, or use --list.")
        _list(as_json)
        return
    from fedveil.studies import cells, render, runner
    from fedveil.studies.index import find

    one_of("--scale", scale, ("small", "paper"))
    entry = find(table)
    words = tuple(word.strip() for word in only.split(",") if word.strip())
    if words:
        entry = cells.only(entry, words)
        if not entry.cells:
            raise UserError(f"--only {only}: {entry.id} has no such cells.")
    chosen = runner.plan(entry, scale, seeds, _counts(victims))  # type: ignore[arg-type]
    if finished:
        chosen = runner.only_finished(chosen, runner.finished(out))
        entry, seeds = chosen.entry, chosen.seeds
    command = f"fedveil reproduce {entry.id} --scale {scale} --seeds {seeds}" + (
        f" --only {only}" if words else ""
    )
    command += f" --victims {victims}" if victims else ""
    try:
        at_once = workers or os.cpu_count() or 1
        done = runner.finished(out) if finished else _with_progress(chosen, out, resume, at_once)
    except KeyboardInterrupt:
        print(
            f"Stopped. Finished cells are kept; continue with\n  {command} --resume --out {out}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    failed = runner.not_run(chosen, done)
    if chosen.runs and failed.total() == len(chosen.runs):
        why = "; ".join(f"{count} of {len(chosen.runs)} jobs: {reason}" for reason, count in failed.items())
        raise UserError(f"{entry.id}: no job could be run, so no page was written. {why}")
    name = "-".join((entry.id, *(re.sub(r"[^A-Za-z0-9_-]", "", word) for word in words)))
    rows, page, picture = render.write(chosen, done, command, out, name)
    data: JsonObject = {
        "id": entry.id, "title": entry.title, "scale": scale, "seeds": seeds, "statement": entry.statement,
        "rows": [asdict(row) for row in rows], "page": str(page),
        "picture": None if picture is None else str(picture),
    }  # fmt: skip
    emit(data, as_json, lambda: _show(entry, rows, page))
    sys.stdout.flush()  # what follows is said last, also in one log of both streams
    for reason, count in failed.items():
        print(f"{count} of {len(chosen.runs)} jobs could not be run: {reason}", file=sys.stderr)


def _counts(text: str) -> dict[str, int]:
    """ "32" or "lfw=32,cifar10=16" as numbers by dataset; "" stands for all others."""
    found = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, number = part.rpartition("=")
        if not number.isdigit() or int(number) < 1:
            raise UserError(
                f"--victims {text}: '{part}' is not a number or dataset=number, e.g. 32 or lfw=32."
            )
        found[name.strip()] = int(number)
    return found


def _list(as_json: bool) -> None:
    from fedveil.studies import runner
    from fedveil.studies.index import PAPERS, catalogue

    data = []
    for entry in catalogue().values():
        item: dict[str, Any] = {"id": entry.id, "paper": entry.paper, "title": entry.title,
                                "experiment": bool(entry.cells), "note": entry.note, "cells": len(entry.cells)}  # fmt: skip
        if entry.cells:
            item |= {f"seconds_{s}": round(runner.plan(entry, s).seconds()) for s in ("small", "paper")}  # type: ignore[arg-type]
        data.append(item)

    def show() -> None:
        body = [
            [i["id"], i["title"] if i["experiment"] else f"not an experiment: {i['note']}", str(i["cells"] or "-"),
             _duration(i["seconds_small"]) if i["experiment"] else "-",
             _duration(i["seconds_paper"]) if i["experiment"] else "-"]
            for i in data
        ]  # fmt: skip
        columns = ["id", "what", "cells", "small", "paper"]
        print_table("Tables and figures", columns, body, right=columns[2:],
                    notes=[(paper, title) for paper, title in PAPERS.items()])  # fmt: skip
        print("small, paper: estimated time on one core.")

    emit(data, as_json, show)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def _with_progress(chosen: Plan, out: Path, resume: bool, workers: int) -> dict[str, JsonObject]:
    """Run behind a progress bar on a terminal, with a line per long job otherwise."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from fedveil.studies import runner

    console = Console(stderr=True)
    held = runner.finished(out) if resume else {}
    total = chosen.seconds(held)
    print(
        f"{chosen.entry.id}: {len(chosen.runs)} jobs, about {_duration(total)} on one core", file=sys.stderr
    )
    if not console.is_terminal:

        def tell(finished: int, all_jobs: int, left: float, now: str) -> None:
            if left > 60 and not now.startswith(("epsilon", "stop", "spend")):
                print(
                    f"{finished + 1} of {all_jobs}: {now}, {_duration(left)} left",
                    file=sys.stderr,
                    flush=True,
                )

        return runner.run(chosen, out, resume=resume, progress=tell, workers=workers)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(chosen.runs))

        def progress(finished: int, all_jobs: int, left: float, now: str) -> None:
            bar.update(task, completed=finished, total=max(all_jobs, 1),
                       description=f"{_duration(left)} left  {now}")  # fmt: skip

        return runner.run(chosen, out, resume=resume, progress=progress, workers=workers)


def _show(entry: Any, rows: Any, page: Path) -> None:
    from fedveil.cli.common import Notes
    from fedveil.studies import render

    notes = Notes()
    body = []
    for row, cells in zip(rows, render.cells_of(entry, rows), strict=True):
        marks = ",".join(filter(None, (*map(notes.mark, row.why), notes.mark(row.shrunk))))
        body.append([row.row, row.column, *cells, marks])
    columns = ["row", "column", "paper", "ours", "difference", "why"]
    print_table(
        f"{entry.id}: {entry.title}", columns, body, right=columns[2:5],
        notes=notes.lines(*([f"The paper says: {entry.statement}"] if entry.statement else []), render.summary(rows),
                          f"Written to {page}."),
    )  # fmt: skip
