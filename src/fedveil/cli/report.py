"""`fedveil report`, `fedveil ui`, `fedveil track` and `fedveil share`: what people see of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.common import JsonFlag, TrustFlag, emit, one_of
from fedveil.errors import UserError, extra
from fedveil.jsons import JsonObject


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(report)
    app.command()(ui)
    app.command()(track)
    app.command()(share)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="One or more run directories.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write (default: RUN/report.html, or report.html for several)."),
    ] = None,
    private: Annotated[
        bool,
        typer.Option(
            "--private", help="Add figures computed from private records, marked. Do not share that page."
        ),
    ] = False,
    trust_code: TrustFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Write one self-contained HTML page about a run, or about several side by side.

    Examples:

      fedveil report runs/first --out report.html

      fedveil report runs/a runs/b runs/c --out compared.html

      fedveil report runs/first --private --out for-me-only.html
    """
    from fedveil.federation.config import TRUSTED
    from fedveil.federation.store import write_atomic
    from fedveil.report.facts import gather, sound_epsilon
    from fedveil.report.page import comparison, render, result_of

    name = "report-private.html" if private else "report.html"
    path = out or (runs[0] / name if len(runs) == 1 else Path(name))
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {path}: the name must end in .html")
    if path.is_dir():
        raise UserError(f"--out {path}: is a folder; give a file name that ends in .html")
    TRUSTED.set(trust_code)
    facts = [gather(folder, private) for folder in runs]
    page = render(facts, private).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise UserError(f"--out {path}: cannot create its folder: {wrong.strerror}") from None
    write_atomic(path, page)
    rows: list[JsonObject] = []
    for one in facts:
        metric, value, _ = result_of(one)
        row = one.main()
        rows.append(
            {
                "run": str(one.run.path),
                "name": one.name,
                "metric": metric.replace(" ", "_").lower(),
                "result": value,
                "epsilon_sound": sound_epsilon(one),
                "verdict": row["verdict"] if row else "none",
                "attacks": [card["kind"] for card in one.attacks],
                "finished": one.finished,
            }
        )
    data: JsonObject = {"report": str(path), "bytes": len(page), "private": private, "runs": rows}
    if len(facts) > 1:
        data["comparable"] = comparison(facts)["alike"]
    emit(
        data,
        as_json,
        lambda: typer.echo(
            f"Saved {path} ({len(page) / 1000:.0f} kB)" + (", private: do not share." if private else ".")
        ),
    )


def ui(
    runs: Annotated[Path, typer.Argument(metavar="[RUNS_DIR]", help="Folder with run directories.")] = Path(
        "runs"
    ),
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this computer's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="FEDVEIL_UI_TOKEN", help="Secret that every visitor must give: 16 characters or more."
        ),
    ] = None,
) -> None:
    """Show a read-only dashboard: runs, live progress, reports, comparisons, and an epsilon calculator.

    Examples:

      fedveil ui

      fedveil ui experiments --port 9000

      FEDVEIL_UI_TOKEN=$(openssl rand -hex 16) fedveil ui --host 0.0.0.0
    """
    try:
        from fedveil.ui.server import serve
    except ModuleNotFoundError as missing:
        raise UserError(
            f"the dashboard needs the package '{missing.name}': {extra('ui')}"
        ) from None
    serve(runs, host, port, token)


def track(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="One or more run directories.")],
    to: Annotated[str, typer.Option("--to", help="tensorboard or mlflow.")] = "tensorboard",
    target: Annotated[
        str | None,
        typer.Option(help="Log folder or tracking address (default: RUN/tensorboard, or MLflow's own)."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Export finished or running runs to TensorBoard or MLflow. Private figures are never exported.

    Examples:

      fedveil track runs/first

      fedveil track runs/a runs/b --to mlflow --target http://localhost:5000
    """
    from fedveil.report.track import KINDS, export

    one_of("--to", to, KINDS)
    rows = [{"run": str(folder), "to": to, "target": export(folder, to, target)} for folder in runs]

    def show() -> None:
        for row in rows:
            typer.echo(f"{row['run']} → {row['to']} ({row['target']})")

    emit(rows, as_json, show)


def share(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    out: Annotated[Path, typer.Option(help="The folder to make; it must be new or empty.")],
    model: Annotated[
        bool, typer.Option("--with-model", help="Copy the model although nothing that holds is promised about it.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Make the copy of a run's folder that may be shown to anybody: no private figures, cohorts, seeds, paths or times.

    Example:

      fedveil share runs/first --out to-publish
    """
    from fedveil.federation.share import share as copy
    from fedveil.federation.store import open_run

    told = copy(open_run(run), out, model)

    def show() -> None:
        typer.echo(f"{out}: {', '.join(told['files'])}")
        for name, why in told["left_out"].items():
            typer.echo(f"left out, {name}: {why}")

    emit(told, as_json, show)
