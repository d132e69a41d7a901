"""`fedveil run`, `fedveil recipes`, `fedveil compare`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.cli.common import TrustFlag
from fedveil.errors import UserError
from fedveil.jsons import JsonObject

if TYPE_CHECKING:
    from fedveil.federation.config import RunConfig
    from fedveil.federation.loop import OnRound, Prepared, RoundFacts
    from fedveil.federation.store import Run
    from fedveil.jsons import Document

    Work = Callable[[OnRound | None], JsonObject]


def register(app: typer.Typer) -> None:
    app.command()(run)
    app.command()(recipes)
    app.command()(configs)
    app.command()(compare)


SetOption = Annotated[
    list[str], typer.Option("--set", help="Change a key: rounds=20, dataset=mnist, sigma=2, clip.bound=1.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def run(
    name: Annotated[
        str, typer.Argument(metavar="NAME_OR_TOML", help="A recipe, a shipped configuration or a .toml file.")
    ],
    change: SetOption = [],
    out: Annotated[Path | None, typer.Option(help="Run directory (default: runs/NAME-TIME).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False,
    data: Annotated[str | None, typer.Option(help="Folder of the datasets (else FEDVEIL_DATA).")] = None,
    trust_code: TrustFlag = False,
    track: Annotated[
        str | None, typer.Option(help="Also send every round to: tensorboard or mlflow.")
    ] = None,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit",
            help="Test the promise with canaries right after training; exit code 1 if a sound one is broken.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a recipe across clients and state what each observer may learn.

    Examples:

      fedveil run fed-cdp

      fedveil run fed-alpha-cdp-sound --set dataset=digits --set rounds=20 --out runs/first

      fedveil run fed-cdp-sound --set rounds=20 --audit

      fedveil run my-study.toml --resume --out runs/study
    """
    from fedveil.federation.config import TRUSTED, load_config
    from fedveil.federation.loop import run as simulate
    from fedveil.federation.store import open_run, refuse_foreign_code, refuse_named_code

    changes = [*change, *([f'data="{data}"'] if data else [])]
    if resume and out is None:
        raise UserError("--resume needs --out DIR: the run to continue")
    TRUSTED.set(trust_code)
    config = load_config(name, changes)
    refuse_named_code(config, trust_code)
    if resume and out is not None and (out / "run.json").exists():
        before = open_run(out)
        refuse_foreign_code(before, trust_code)
        _refuse_another(name, changes, config, before)
        given = {text.partition("=")[0].strip() for text in change}
        if given <= type(config).model_fields.keys():  # the run's own settings, with what was given now
            config = before.config.model_copy(update={key: getattr(config, key) for key in given})
    if audit and not config.built_recipe().private:
        raise UserError(f"--audit: recipe '{config.recipe}' adds no noise, so there is no promise to test.")
    folder = out or Path("runs") / f"{config.name or config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = "fedveil run " + " ".join([name, *(f"--set {text}" for text in changes)])
    try:
        with _tracker(track, folder, config) as send:
            result = with_progress(config, _job(simulate, config, folder, command, resume, send), as_json)
    except KeyboardInterrupt:
        print(stopped_at(folder, f"fedveil run {name}"), file=sys.stderr)
        raise typer.Exit(130) from None
    found, code = _audit(folder) if audit else (None, 0)
    if config.report:
        _write_report([folder], folder / "report.html")
    if as_json:
        print(json.dumps(result | ({"audit": found} if audit else {})))
    else:
        _show(result)
        if found is not None:
            from fedveil.cli.attack import show_audit

            show_audit(found)
    if code:
        raise typer.Exit(code)


FREE = {"workers", "chunk", "engine", "report", "data", "checkpoint_every"}  # they decide nothing that is released


def _refuse_another(name: str, changes: Sequence[str], config: RunConfig, before: Run) -> None:
    """Refuse a name that says something else than the run in the folder: going on with that one would answer another question.

    What the run was begun with, or is given now, overrides what the name says and is no contradiction.
    """
    from fedveil.federation.config import changed_keys, stated_keys

    begun = str(before.facts.get("command", "")).split(" --set ")
    told = changed_keys(begun[1:]) if begun[0] == f"fedveil run {name}" else set()
    asked = stated_keys(name) - told - changed_keys(changes) - FREE
    other = sorted(key for key in asked if getattr(config, key) != getattr(before.config, key))
    if not other:
        return
    shown = ", ".join(f"{key} = {_short(before.config, key)}, not {_short(config, key)}" for key in other[:3])
    raise UserError(
        f"--resume: {before.path} holds another run than {name} ({shown}{', …' if len(other) > 3 else ''}). "
        f"fedveil run {before.config.recipe} --resume --out {before.path} goes on with it; {name} needs another --out"
    )


def _short(config: RunConfig, key: str) -> str:
    shown = str(getattr(config, key))
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def stopped_at(folder: Path, command: str) -> str:
    """Where an interrupted run stands and how to go on."""
    from fedveil.federation.store import checkpoints

    if not (folder / "run.json").exists():
        return "stopped before the first round; nothing was written"
    kept = max(checkpoints(folder / "checkpoints"), default=0)
    return (
        f"stopped; rounds up to {kept} are kept in {folder}, and what was released is in its ledger. Go on with:\n"
        f"  {command} --resume --out {folder}"
    )


def _audit(folder: Path) -> tuple[Document, int]:
    """Replay the finished run with canaries; the result goes below the run, where the report finds it. A run that released
    nothing is left alone, with the reason."""
    from fedveil.attacks import campaign
    from fedveil.federation.store import open_run
    from fedveil.jsons import plain

    nothing = campaign.nothing_released(open_run(folder))
    if nothing:
        return {"kind": "audit", "not_done": nothing}, 0
    figures, code = campaign.audit_run(folder)
    campaign.save(folder / "attacks", "audit", figures)
    return plain(figures), code


def with_progress(config: RunConfig, work: Work, quiet: bool) -> JsonObject:
    """Run `work(callback)` behind a progress bar on a terminal; elsewhere with a line for every tenth of the rounds."""
    from rich.console import Console

    from fedveil.federation.progress import alarm, standing, tenths

    console = Console(stderr=True)
    if quiet:
        return work(None)
    if not console.is_terminal:
        return work(tenths(config, lambda line: print(line, file=sys.stderr, flush=True)))
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
        warn = alarm(progress.console.print)

        def told(facts: RoundFacts) -> None:
            warn(facts)
            progress.update(bar, completed=facts.round, shown=standing(config.observer, facts.metrics))

        return work(told)


def train_and_show_progress(config: RunConfig, folder: Path, command: str, quiet: bool) -> Document:
    """A run of its own, with the progress that `fedveil run` shows; what result.json holds."""
    from fedveil.federation.loop import run as simulate

    return with_progress(config, _job(simulate, config, folder, command), quiet)


def _write_report(folders: list[Path], path: Path) -> None:
    from fedveil.report.page import write_report

    write_report(folders, path)


def _show(result: Document) -> None:
    from fedveil.cli.common import figure, print_own_budgets

    accuracy, rmse = result["test_accuracy"], result.get("test_rmse")
    quality = f"test accuracy {accuracy:.4f}" if accuracy is not None else f"test RMSE {figure(rmse)}"
    print(f"{result['recipe']} on {result['dataset']}: {quality} after {result['rounds']} rounds")
    known = ("test_accuracy", "test_loss", "test_rmse", "test_mae")
    more = [f"{k.removeprefix('test_')} {figure(v)}" for k, v in result.items() if k.startswith("test_") and k not in known]
    if more:
        print(", ".join(more))
    if result.get("judgement") and result["rounds"]:
        print(f"The model is {result['judgement']}.")
    print(f"{result['seconds']:.1f} s; {result['engine_reason']} Stopped: {result['stopped']}.")
    _show_rows(result["ledger"])
    print_own_budgets(result.get("own_budgets", ()))
    if result["rounds"] == 0:
        print("No round was played: the model in the run directory is the untrained first one.")
    elif result["simulated"]:
        print("Noise was seeded: sound promises hold when deployed with secret noise (secure_noise = true).")
    page = Path(result["run"]) / "report.html"
    print(f"Run directory: {result['run']}" + ("; open report.html there" if page.exists() else ""))


def _show_rows(ledger: list[Document]) -> None:
    from fedveil.cli.common import Notes, figure, print_table

    if not ledger:
        print("Nothing was released, so there is nothing that an observer may learn.")
        return
    notes = Notes()
    rows = [
        [
            row["observer"],
            row["unit"],
            figure(row["epsilon"], missing="none"),
            row["verdict"],
            row["accountant"] or "-",
            notes.mark(row["reason"]),
        ]
        for row in ledger
    ]
    columns = ["observer", "unit", "epsilon", "verdict", "accountant", "note"]
    print_table(
        f"What each observer may learn (delta {max(row['delta'] for row in ledger):g})",
        columns,
        rows,
        right=["epsilon"],
        notes=notes.lines(),
    )


def _tracker(kind: str | None, folder: Path, config: RunConfig) -> AbstractContextManager[Callable[[RoundFacts], None] | None]:
    """A context that gives a callback per round, or None where nothing is tracked."""
    if kind is None:
        return nullcontext()
    from fedveil.report.track import tracker

    return tracker(kind, folder, config)


def _job(
    simulate: Callable[..., JsonObject], config: RunConfig, folder: Path, command: str, resume: bool = False,
    send: OnRound | None = None,
) -> Work:  # fmt: skip
    """The run as a function of the progress display's callback; `send` is called after every round too."""

    def work(hook: OnRound | None) -> JsonObject:
        def both(facts: RoundFacts) -> None:
            for call in (hook, send):
                if call is not None:
                    call(facts)

        return simulate(config, folder, resume=resume, on_round=both, command=command, on_start=tell)

    return work


def tell(prepared: Prepared) -> None:
    """Say before the first round what to expect, where that is little, and what to check about the columns."""
    from fedveil.federation.forecast import forecast

    for note in prepared.notes:
        if note.startswith("check:"):
            print(note, file=sys.stderr, flush=True)
    said = forecast(prepared)
    if said:
        print(f"forecast: {said}", file=sys.stderr, flush=True)


START_HERE = ("sum-cdp", "fed-cdp-sound", "fed-alpha-cdp-sound", "dp-fedavg", "non-private")
FAMILIES = {
    "federated": "Across clients",
    "central": "In one place (the DP-dyn family)",
    "local": "Reports of single weights (LDP-FL)",
    "baseline": "To compare with",
}


def recipes(as_json: JsonOption = False) -> None:
    """List every recipe: clip, sensitivity, sigma, place of the noise, and the verdict for each observer.

    Example:  fedveil recipes --json
    """
    from fedveil.protect.describe import describe_all

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
    groups = {"Start here": [row for name in START_HERE for row in rows if row["name"] == name]}
    for family, title in FAMILIES.items():
        groups[title] = [row for row in rows if row["family"] == family and row["name"] not in START_HERE]
    for title, members in groups.items():
        table.add_row(f"[bold]{title}[/]")
        for row in members:
            marks = [
                f"[{colours[row['verdicts'][o]]}]{row['verdicts'][o]}[/]"
                for o in ("server", "client-process", "public")
            ]
            table.add_row("  " + row["name"], row["clip"], row["sensitivity"], row["sigma"], row["where"], *marks)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def configs(as_json: JsonOption = False) -> None:
    """List the shipped configurations, with one line each: `fedveil run NAME` trains one.

    Example:  fedveil configs
    """
    from fedveil.federation.config import shipped, summary_of

    rows = [{"name": name, "summary": summary_of(text)} for name, text in shipped().items()]
    if as_json:
        print(json.dumps(rows))
        return
    from fedveil.cli.common import print_table

    first = sorted((row for row in rows if "start" in row["name"]), key=lambda row: row["name"])
    ordered = [*first, *(row for row in rows if row not in first)]
    print_table("Shipped configurations", ["name", "what it is"], [[row["name"], row["summary"]] for row in ordered])
    print("Digits and cancer need no files; `fedveil data list` says which other datasets are at hand, and how to get them.")


def compare(
    names: Annotated[
        list[str],
        typer.Argument(metavar="A B …", help="Recipes, configurations, .toml files or run directories."),
    ],
    change: SetOption = [],
    seeds: Annotated[int, typer.Option(min=1, help="Runs per configuration, seeds 0, 1, …")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the runs that are made.")] = Path("report/compare"),
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture (.png or .svg): accuracy against sound epsilon.")
    ] = None,
    trust_code: TrustFlag = False,
    as_json: JsonOption = False,
) -> None:
    """Run or read several configurations and put them side by side: accuracy, epsilon nominal and sound, time.

    Example:  fedveil compare digits-start digits-start-server --seeds 3 --plot pareto.png
    """
    from fedveil.federation.config import TRUSTED
    from fedveil.report.compare import compare_all, plot_pareto, table_of

    TRUSTED.set(trust_code)
    rows = compare_all(names, change, seeds, out, quiet=as_json, trust=trust_code)
    if plot is not None:
        plot_pareto(rows, plot)
    if as_json:
        print(json.dumps(rows))
        return
    from rich.console import Console

    Console().print(table_of(rows))
    if len({(row["dataset"], row["metric"]) for row in rows}) > 1:
        print("These runs use different data or measures: their results cannot be ranked against each other.")
