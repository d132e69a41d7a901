"""`fedveil epsilon`, `fedveil calibrate` and `fedveil ledger`: the promise on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fedveil.cli.common import (
    DeltaOption,
    JsonFlag,
    Notes,
    PlotOption,
    emit,
    figure,
    one_of,
    plot_file,
    print_own_budgets,
    print_table,
    save_curves,
)
from fedveil.errors import UserError
from fedveil.jsons import Document, JsonObject

if TYPE_CHECKING:
    from fedveil.privacy.calibrate import Calibration
    from fedveil.privacy.events import Event, MechanismName, Sampling
    from fedveil.privacy.ledger import Row

MECHANISMS: tuple[MechanismName, ...] = ("gaussian", "laplace", "staircase", "joint-staircase", "two-valued")
CALIBRATED: tuple[MechanismName, ...] = ("gaussian", "laplace", "staircase", "joint-staircase")
SAMPLINGS = ("poisson", "fixed", "partition", "none")
RELATIONS = ("zero-out", "add-remove", "replace-one")
NORMS = ("l1", "l2")
POINTS = 24  # of a curve
MOST_SCHEDULED = 1_000_000  # steps with a multiplier of their own

Mechanism = Annotated[str, typer.Option("--mechanism", help=f"{', '.join(MECHANISMS)}.")]
Steps = Annotated[int, typer.Option("--steps", help="Number of noisy releases: 0 or more.")]
Rate = Annotated[
    float | None,
    typer.Option("--sampling-rate", help="Poisson rate q of a record in a step: above 0, at most 1."),
]
Kind = Annotated[
    str | None,
    typer.Option(
        "--sampling",
        help="poisson; fixed (size --batch of --population, without replacement); partition (each record once per "
        "pass: no amplification); none. Default: poisson with a rate, fixed with a batch, else none.",
    ),
]
Batch = Annotated[int | None, typer.Option("--batch", help="Records per step, for fixed sampling.")]
Population = Annotated[int | None, typer.Option("--population", help="Records to draw from.")]
Norm = Annotated[str, typer.Option("--clip-norm", help="Norm in which vectors are clipped: l1 or l2.")]
Dimension = Annotated[int, typer.Option("--dimension", help="Coordinates that get noise: 1 or more.")]
Layers = Annotated[
    int,
    typer.Option("--layers", help="Layers clipped one by one to the same bound (costs sqrt(M); with l1: M)."),
]
Nu = Annotated[
    float | None, typer.Option("--nu", help="Shape of the Staircase, 0 to 1. Default: the optimal one.")
]
Width = Annotated[
    float,
    typer.Option(
        "--width",
        help="Step of i.i.d. Staircase noise over the clip bound (--clip-norm l2); 0: 1/sqrt(dimension), as in the recipe "
        "udp-fl-staircase. Such steps need --accountant rdp.",
    ),
]
Relation = Annotated[
    str | None,
    typer.Option(
        "--relation",
        help="Neighbours: zero-out, add-remove or replace-one (twice the sensitivity). "
        "Default: zero-out; replace-one for fixed sampling.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the three commands to the application."""
    app.command("epsilon", rich_help_panel="Promise")(epsilon)
    app.command("calibrate", rich_help_panel="Promise")(calibrate)
    app.command("ledger", rich_help_panel="Promise")(ledger)


def epsilon(
    mechanism: Mechanism = "gaussian",
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            "--noise-multiplier", help="Noise scale over clip bound: sigma/C, b/C or 1/lambda. Above 0."
        ),
    ] = None,
    sampling_rate: Rate = None,
    steps: Steps = 1,
    delta: DeltaOption = 1e-5,
    accountant: Annotated[
        str,
        typer.Option(
            "--accountant", help="pld, rdp, moments, zcdp, optimal, advanced, advanced-tanh, basic or all."
        ),
    ] = "pld",
    sampling: Kind = None,
    batch: Batch = None,
    population: Population = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule", help="Changing multiplier instead of a constant one, e.g. linear:15:4.85."
        ),
    ] = None,
    layers: Layers = 1,
    clip_norm: Norm = "l2",
    dimension: Dimension = 1,
    nu: Nu = None,
    width: Width = 1.0,
    relation: Relation = None,
    honest: Annotated[
        bool,
        typer.Option("--honest", help="Let basic, advanced and optimal split delta so that no more is paid."),
    ] = False,
    as_json: JsonFlag = False,
    plot: PlotOption = None,
) -> None:
    """What do these noisy steps reveal? Epsilon by one accountant, or by all of them side by side.

    [bold]Examples[/bold]

    fedveil epsilon --noise-multiplier 6 --sampling-rate 0.01 --steps 10000

    fedveil epsilon --noise-multiplier 6 --sampling-rate 0.01 --steps 10000 --accountant all --json

    fedveil epsilon --schedule linear:15:4.85 --sampling-rate 0.01 --steps 10000 --plot epsilon.svg

    fedveil epsilon --mechanism laplace --noise-multiplier 2 --clip-norm l1 --dimension 1000

    fedveil epsilon --mechanism staircase --noise-multiplier 2 --width 0 --dimension 1000 --accountant rdp

    fedveil epsilon --noise-multiplier 6 --sampling fixed --batch 5 --population 500 --steps 1000
    """
    from fedveil.privacy import accountants, checks
    from fedveil.privacy.papers import condition_holds

    one_of("--accountant", accountant, (*accountants.ACCOUNTANTS, "all"))
    checks.delta(delta, "--delta")
    checks.count("--steps", steps)
    target = plot_file(plot)
    drawn = _sampling(sampling, sampling_rate, batch, population)
    neighbours, cost = _relation(relation, drawn), _cost(layers, clip_norm)
    cost *= 2 if neighbours == "replace-one" else 1
    step = _width(width, mechanism, clip_norm, dimension, cost)
    template = _event(mechanism, clip_norm, dimension, nu, drawn, neighbours, step)
    given = _multipliers(noise_multiplier, schedule, steps)
    events = _events(template, [(multiplier / cost, n) for multiplier, n in given])
    names = list(accountants.ACCOUNTANTS) if accountant == "all" else [accountant]
    answers = [accountants.answer(events, delta, name, honest=honest) for name in names]
    holds = None  # the condition is about sampled Gaussian steps
    if mechanism == "gaussian" and drawn.kind == "poisson" and given:
        holds = condition_holds(drawn.rate, max(m for m, _ in given))
    rows = [{**asdict(answer), "papers_condition": holds} for answer in answers]
    if target:
        curves = {name: _course(template, [(m / cost, n) for m, n in given], delta, name) for name in names}
        save_curves(target, curves, f"epsilon at delta {figure(delta)}", "steps", "epsilon")

    def show() -> None:
        notes = Notes()
        cells = [
            [row["accountant"], figure(row["epsilon"], missing="none"), figure(row["delta"]), row["verdict"],
             notes.mark(row["reason"])]
            for row in rows
        ]  # fmt: skip
        title = f"{mechanism}, {_steps(steps)}, {_describe(drawn)}, {neighbours} neighbours"
        extra = (
            [f"The joint bound is {cost:g} times the clip bound (layers, neighbours)."] if cost > 1 else []
        )
        if holds is not None:
            who = "no accountant here needs" if len(names) > 1 else "this accountant does not need"
            extra += [f"The papers' condition q < 1/(16 sigma) {'holds' if holds else 'fails'}; {who} it."]
        columns = ("accountant", "epsilon", "delta paid", "verdict", "note")
        print_table(title, columns, cells, right=("epsilon", "delta paid"), notes=notes.lines(*extra))
        _say_saved(target)

    emit(rows if accountant == "all" else rows[0], as_json, show)


def calibrate(
    target: Annotated[
        float, typer.Option("--epsilon", help="The epsilon that must not be exceeded. Above 0.")
    ],
    delta: DeltaOption = 1e-5,
    steps: Annotated[int, typer.Option("--steps", help="Number of noisy releases: 1 or more.")] = 1,
    sampling_rate: Rate = None,
    mechanism: Annotated[
        str, typer.Option("--mechanism", help=f"{', '.join(CALIBRATED)}, or all to compare them.")
    ] = "gaussian",
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            "--noise-multiplier", help="Given: solve for the largest number of steps instead of for noise."
        ),
    ] = None,
    accountant: Annotated[str, typer.Option("--accountant", help="pld, rdp, ...")] = "pld",
    sampling: Kind = None,
    batch: Batch = None,
    population: Population = None,
    layers: Layers = 1,
    clip_norm: Norm = "l2",
    dimension: Dimension = 1,
    nu: Nu = None,
    width: Width = 1.0,
    relation: Relation = None,
    as_json: JsonFlag = False,
    plot: PlotOption = None,
) -> None:
    """How much noise keeps a budget? The smallest noise multiplier that stays at or below epsilon.

    noise_multiplier is the noise scale over the clip bound (sigma/C, b/C, 1/lambda); noise_std is the standard
    deviation per coordinate at clip bound 1.

    [bold]Examples[/bold]

    fedveil calibrate --epsilon 2 --steps 1000 --sampling-rate 0.05

    fedveil calibrate --epsilon 2 --steps 1000 --sampling-rate 0.05 --mechanism all --json

    fedveil calibrate --epsilon 2 --noise-multiplier 1.1 --sampling-rate 0.01
    """
    from fedveil.privacy import accountants, checks
    from fedveil.privacy import calibrate as solver

    checks.positive("--epsilon", target)
    checks.delta(delta, "--delta")
    checks.count("--steps", steps, 1)
    one_of("--accountant", accountant, tuple(accountants.ACCOUNTANTS))
    one_of("--mechanism", mechanism, (*CALIBRATED, "all"))
    file = plot_file(plot)
    drawn = _sampling(sampling, sampling_rate, batch, population)
    neighbours, cost = _relation(relation, drawn), _cost(layers, clip_norm)
    cost *= 2 if neighbours == "replace-one" else 1
    step = _width(width, mechanism, clip_norm, dimension, cost)
    template = _event(
        "gaussian" if mechanism == "all" else mechanism, clip_norm, dimension, nu, drawn, neighbours, step
    )
    shared: dict[str, Any] = {
        "sampling": drawn, "norm": clip_norm, "dimension": dimension, "relation": neighbours, "accountant": accountant,
    }  # fmt: skip
    if noise_multiplier is not None:
        checks.positive("--noise-multiplier", noise_multiplier)
        if mechanism == "all":
            raise UserError("--mechanism all: name one mechanism when --noise-multiplier asks for the steps.")
        most = solver.steps_within(
            target, delta, multiplier=noise_multiplier / cost, mechanism=template.noise.mechanism, nu=nu, width=step, **shared
        )
        data = {"mechanism": mechanism, "steps": most, "noise_multiplier": noise_multiplier, "epsilon": target,
                "delta": delta, "accountant": accountant}  # fmt: skip
        said = f"{_steps(most)} stay within epsilon {figure(target)} at delta {figure(delta)}."
        emit(data, as_json, lambda: typer.echo(said))
        return
    if mechanism == "all":
        found = solver.compare_mechanisms(target, delta, mechanisms=CALIBRATED, steps=steps, **shared)
    else:
        named = template.noise.mechanism
        found = (solver.calibrate(target, delta, steps=steps, mechanism=named, nu=nu, width=step, **shared),)
    rows = [_calibration(result, cost) for result in found]
    if file:
        _plot_calibrations(file, found, template, steps, delta)
    title = f"epsilon {figure(target)}, delta {figure(delta)}, {_steps(steps)}, {_describe(drawn)}, {neighbours}"
    emit(rows if mechanism == "all" else rows[0], as_json, lambda: _show_calibrations(rows, title, file))


def _plot_calibrations(file: Path, found: Sequence[Calibration], template: Event, steps: int, delta: float) -> None:
    """Epsilon over the steps, one curve for each mechanism with the noise that was found."""
    curves: dict[str, tuple[list[float], list[float | None]]] = {}
    for result in found:
        event = replace(template, noise=replace(template.noise, mechanism=result.mechanism, nu=result.nu))
        curves[result.mechanism] = _course(event, [(result.noise_multiplier, steps)], delta, result.accountant)
    save_curves(file, curves, f"epsilon at delta {figure(delta)}", "steps", "epsilon")


def _show_calibrations(rows: Sequence[Document], title: str, file: Path | None) -> None:
    notes = Notes()
    cells = []
    for row in rows:
        shape = "" if "lambda" not in row else f"lambda {figure(row['lambda'])}, nu {figure(row['nu'])}"
        said = "; ".join(text for text in (shape, row["reason"]) if text)
        numbers = (
            figure(row["noise_multiplier"], 5),
            figure(row["noise_std"], 5),
            figure(row["epsilon"]),
        )
        cells.append([row["mechanism"], *numbers, row["accountant"], row["verdict"], notes.mark(said)])
    columns = ("mechanism", "multiplier", "noise std", "epsilon", "by", "verdict", "note")
    print_table(title, columns, cells, right=columns[1:4], notes=notes.lines())
    _say_saved(file)


def ledger(
    where: Annotated[Path, typer.Argument(metavar="RUN_OR_FILE", help="A run's folder, or a ledger file.")],
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Only check the chain; exit code 1 and the record's number if broken."),
    ] = False,
    history: Annotated[
        bool, typer.Option("--history", help="A node's releases instead: when, for which run, asked by whom.")
    ] = False,
    delta: Annotated[float | None, typer.Option("--delta", help="Another delta than the run's.")] = None,
    accountant: Annotated[str, typer.Option("--accountant", help="pld, rdp, ...")] = "pld",
    as_json: JsonFlag = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Also draw epsilon against releases into this .png or .svg file."),
    ] = None,
) -> None:
    """What can each observer learn from a run? Epsilon per observer and unit, read from the run's ledger.

    RUN_OR_FILE is a run's folder or its ledger.jsonl.

    sound: a guarantee. nominal: as a paper counts it, not a guarantee. none: no finite promise.

    [bold]Examples[/bold]

    fedveil ledger runs/mnist

    fedveil ledger runs/mnist/ledger.jsonl --json

    fedveil ledger runs/mnist --verify
    """
    from fedveil.privacy import accountants, checks
    from fedveil.privacy.ledger import Damaged, Ledger

    one_of("--accountant", accountant, tuple(accountants.ACCOUNTANTS))
    if delta is not None:
        checks.delta(delta, "--delta")
    target = plot_file(plot)
    path = where / "ledger.jsonl" if where.is_dir() else where
    if not path.is_file():
        raise UserError(f"{path}: no ledger there. Give a run's folder or its ledger.jsonl.")
    try:
        compared = _against_anchors(path, verify)
        book = Ledger.read(path)
    except Damaged as damaged:
        _broken(damaged.record, str(damaged), as_json)
    if verify:
        _verify(path, book.head[0], book.torn_bytes, compared, as_json)
        return
    if history:
        _history(path, as_json)
        return
    rows = book.table(delta, accountant)
    if target:
        save_curves(
            target,
            _ledger_course(path, rows, delta, accountant),
            "epsilon by observer",
            "releases",
            "epsilon",
        )

    def show() -> None:
        notes = Notes()
        cells = [
            [row.observer, row.unit, figure(row.epsilon, missing="none"), figure(row.delta), row.accountant,
             row.verdict, notes.mark(row.reason)]
            for row in rows
        ]  # fmt: skip
        relations = sorted({row.relation for row in rows if row.relation})
        title = f"{path} · {book.rounds} rounds" + (" · simulated" if book.header.simulated else "")
        extra = [f"Neighbours: {', '.join(relations)}."] if relations else []
        extra += [f"{note[:1].upper()}{note[1:]}." for note in (*book.header.public, *book.header.assumes)]
        if book.torn_bytes:
            extra.append(
                f"The last write was interrupted ({book.torn_bytes} bytes); nothing was released with it."
            )
        columns = ("observer", "unit", "epsilon", "delta", "by", "verdict", "note")
        print_table(title, columns, cells, right=("epsilon", "delta"), notes=notes.lines(*extra))
        print_own_budgets([asdict(row) for row in book.own_table(accountant)])
        _say_saved(target)

    emit([asdict(row) for row in rows], as_json, show)


def _history(path: Path, as_json: bool) -> None:
    """The releases of a node's ledger, one a line."""
    from fedveil.flower.books import history

    found = history(path)
    columns = ("record", "round", "time", "run", "submitter", "contract")

    def show() -> None:
        print_table(
            f"{path} · {len(found)} releases",
            columns,
            [[str(line[name]) for name in columns] for line in found],
        )

    emit(found, as_json, show)


def _broken(record: int, message: str, as_json: bool) -> NoReturn:
    data = {"intact": False, "record": record, "message": message}
    emit(data, as_json, lambda: typer.echo(f"error: {message}", err=True))
    raise typer.Exit(1)


def _against_anchors(path: Path, thorough: bool) -> JsonObject:
    """Compare a ledger with all that is known elsewhere: the head beside it and, in a run's folder, checkpoints,
    metrics and result. Raises `Damaged` for one that was cut, rolled back or exchanged."""
    from fedveil.federation import folder
    from fedveil.privacy.ledger import journal

    if path.name == "ledger.jsonl" and (path.parent / "run.json").exists():
        return folder.verify(path.parent) if thorough else {"records": len(folder.check_ledger(path.parent))}
    anchors = journal.kept_head(path)
    records = journal.read(path).records
    journal.check_anchors(records, anchors, path)
    return {"records": len(records), "anchors": [anchor.source for anchor in anchors]}


def _verify(path: Path, last: int, torn_bytes: int, compared: Document, as_json: bool) -> None:
    if torn_bytes:
        message = (
            f"{path}: record {last + 1} is torn ({torn_bytes} bytes): its writing was interrupted, so nothing was "
            "released with it. Continuing the run repairs the file."
        )
        _broken(last + 1, message, as_json)
    names = compared.get("anchors", [])
    beside = f"compared with {', '.join(names)}" if names else "nothing else knows how long it should be"
    beside += f" and the {compared['rounds']} rounds of its run" if compared.get("rounds") else ""
    notes = compared.get("notes", [])

    def show() -> None:
        typer.echo(f"{path}: {last + 1} records, all intact; {beside}.")
        for note in notes:
            typer.echo(f"note: {note}")

    emit({"intact": True, **compared}, as_json, show)


def _sampling(kind: str | None, rate: float | None, batch: int | None, population: int | None) -> Sampling:
    """How records get into a step, from the four options; whatever does not belong together is refused."""
    from fedveil.privacy import checks
    from fedveil.privacy.events import Sampling

    if kind is None:
        kind = (
            "poisson"
            if rate is not None
            else "fixed"
            if batch is not None or population is not None
            else "none"
        )
    one_of("--sampling", kind, SAMPLINGS)
    if rate is not None:
        checks.fraction("--sampling-rate", rate)
        if kind != "poisson" and not (kind in ("partition", "none") and rate == 1):
            raise UserError(f"--sampling-rate {rate:g}: only --sampling poisson has a rate, not '{kind}'.")
    if kind == "fixed" or (kind == "poisson" and rate is None):
        if batch is None or population is None:
            need = (
                "--batch and --population"
                if kind == "fixed"
                else "--sampling-rate (or --batch and --population)"
            )
            raise UserError(f"--sampling {kind}: give {need}.")
        checks.count("--population", population, 1)
        checks.count("--batch", batch, 1)
        if batch > population:
            raise UserError(f"--batch {batch}: must be from 1 to --population, which is {population}.")
    elif batch is not None or population is not None:
        raise UserError(f"--batch, --population: have no meaning with --sampling {kind}" + (
            " and --sampling-rate." if kind == "poisson" else "."))  # fmt: skip
    if kind == "fixed":
        return Sampling("fixed", 1.0, batch, population)
    if kind == "poisson":
        return Sampling("poisson", rate if rate is not None else batch / population)  # type: ignore[operator]
    return Sampling("partition" if kind == "partition" else "none")


def _relation(relation: str | None, sampling: Sampling) -> str:
    return one_of(
        "--relation", relation or ("replace-one" if sampling.kind == "fixed" else "zero-out"), RELATIONS
    )


def _cost(layers: int, norm: str) -> float:
    """What clipping layer by layer to one bound does to the joint bound."""
    from fedveil.privacy import checks
    from fedveil.protect.clip import Clip

    checks.count("--layers", layers, 1)
    one_of("--clip-norm", norm, NORMS)
    return Clip(kind="layer", norm=norm).joint(1.0, layers)  # type: ignore[arg-type]


def _width(width: float, mechanism: str, norm: str, dimension: int, cost: float) -> float:
    """The step of Staircase noise over the clip bound; 0 stands for 1 / sqrt(dimension)."""
    from fedveil.privacy import checks
    from fedveil.protect.law import Staircase

    if width == 1:
        return width
    if width:
        checks.positive("--width", width)
    if mechanism != "staircase" or norm != "l2" or cost != 1:
        raise UserError(
            f"--width {width:g}: only i.i.d. Staircase noise under one L2 clip has steps of its own. Leave it out, or give "
            "--mechanism staircase with --clip-norm l2, without --layers and replace-one neighbours."
        )
    return Staircase(width=width).width_of(checks.count("--dimension", dimension, 1))


def _event(
    mechanism: str, norm: str, dimension: int, nu: float | None, sampling: Sampling, relation: str, width: float
) -> Event:
    """One step of multiplier 1, to be scaled."""
    from fedveil.privacy import checks
    from fedveil.privacy.events import Event, Noise

    one_of("--mechanism", mechanism, MECHANISMS)
    checks.count("--dimension", dimension, 1)
    if nu is not None:
        checks.unit_interval("--nu", nu)
    noise = Noise(mechanism, 1.0, norm, dimension, nu, width)  # type: ignore[arg-type]
    return Event(noise, sampling, relation)  # type: ignore[arg-type]


def _multipliers(constant: float | None, schedule: str | None, steps: int) -> list[tuple[float, int]]:
    """The given multipliers as runs of (multiplier, steps), before layers and neighbours are taken into account."""
    from fedveil.privacy import checks, schedules

    if (constant is None) == (schedule is None):
        raise UserError("--noise-multiplier, --schedule: give exactly one of them.")
    if schedule is None:
        return [(checks.positive("--noise-multiplier", constant), steps)]
    if steps > MOST_SCHEDULED:
        raise UserError(f"--schedule {schedule}: at most {MOST_SCHEDULED} steps, got --steps {steps}.")
    try:
        plan = schedules.parse(schedule)
        return [(checks.positive("--schedule", plan.value(t, steps)), 1) for t in range(steps)]
    except UserError as wrong:
        text = str(wrong)
        raise UserError(text if "--schedule" in text else f"--schedule {schedule}: {text}") from None


def _events(template: Event, runs: Sequence[tuple[float, int]]) -> list[Event]:
    """Equal multipliers become one event with several steps."""
    uses: dict[float, int] = {}
    for multiplier, steps in runs:
        uses[multiplier] = uses.get(multiplier, 0) + steps
    return [replace(template, noise=replace(template.noise, multiplier=m), steps=n) for m, n in uses.items()]


def _course(
    template: Event, runs: Sequence[tuple[float, int]], delta: float, name: str
) -> tuple[list[float], list[float | None]]:
    """Epsilon after some of the first steps."""
    from fedveil.privacy.accountants import Composition

    total = sum(steps for _, steps in runs)
    marks = sorted({max(1, round(total * i / POINTS)) for i in range(1, POINTS + 1)}) if total else []
    composition, done, values = Composition.start(name), 0, []
    left = list(reversed(runs))
    for mark in marks:
        part = []
        while done < mark:
            multiplier, steps = left.pop()
            now = min(steps, mark - done)
            part.append((multiplier, now))
            done += now
            if steps > now:
                left.append((multiplier, steps - now))
        composition = composition.add(_events(template, part))
        values.append(composition.answer(delta).epsilon)
    return [float(mark) for mark in marks], values


def _ledger_course(
    path: Path, rows: Sequence[Row], delta: float | None, accountant: str
) -> dict[str, tuple[list[float], list[float | None]]]:
    """Epsilon of each finite row after some of the first releases."""
    from fedveil.privacy.ledger import Ledger

    last = Ledger.read(path).head[0]
    marks = sorted({max(1, round(last * i / POINTS)) for i in range(1, POINTS + 1)}) if last else []
    names = {f"{row.observer}, {row.unit} ({row.verdict})": row for row in rows if row.epsilon is not None}
    curves: dict[str, tuple[list[float], list[float | None]]] = {name: ([], []) for name in names}
    for mark in marks:
        then = Ledger.read(path, until=mark).table(delta, accountant)
        for name, row in names.items():
            same = [
                r for r in then if (r.observer, r.unit, r.verdict) == (row.observer, row.unit, row.verdict)
            ]
            curves[name][0].append(float(mark))
            curves[name][1].append(same[0].epsilon if same else None)
    return curves


def _calibration(result: Calibration, cost: float) -> JsonObject:
    row: JsonObject = {
        "mechanism": result.mechanism,
        "noise_multiplier": result.noise_multiplier * cost,
        "noise_std": result.noise_std * cost,
        "epsilon": result.epsilon,
        "delta": result.delta,
        "accountant": result.accountant,
        "verdict": result.verdict,
        "reason": result.reason,
    }
    if result.lam is not None:
        row["lambda"], row["nu"] = result.lam, result.nu  # of the law at the joint bound
    return row


def _describe(sampling: Sampling) -> str:
    if sampling.kind == "poisson":
        return f"Poisson q={sampling.rate:g}"
    if sampling.kind == "fixed":
        return f"{sampling.batch} of {sampling.population} without replacement"
    return "partition (no amplification)" if sampling.kind == "partition" else "no sampling"


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


def _say_saved(path: Path | None) -> None:
    if path is not None:
        typer.echo(f"Saved {path}.")
