"""`fedveil plan`: how to train for a budget, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.cli.common import DeltaOption, JsonFlag, emit, figure, one_of, print_table
from fedveil.errors import UserError

if TYPE_CHECKING:
    from fedveil.federation.planner import Plan


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("plan", rich_help_panel="Promise")(plan)


def plan(
    epsilon: Annotated[float, typer.Option("--epsilon", help="The budget, per example. Above 0.")],
    delta: DeltaOption = 1e-5,
    clients: Annotated[int, typer.Option("--clients", help="Clients, each with its own examples.")] = 100,
    examples: Annotated[
        int | None, typer.Option("--examples", help="Training examples of all clients together.")
    ] = None,
    observer: Annotated[
        str,
        typer.Option(
            "--observer",
            help="server: sees every client's update. sum: sees only the sum (trusted or secure aggregation).",
        ),
    ] = "server",
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", help="A built-in dataset; else describe yours by the options below."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With a public pre-trained backbone in front (datasets that have one).")
    ] = False,
    kind: Annotated[str, typer.Option("--kind", help="images or table, without --dataset.")] = "images",
    classes: Annotated[int, typer.Option("--classes", help="Classes, without --dataset.")] = 10,
    columns: Annotated[int, typer.Option("--columns", help="Columns of a table, without --dataset.")] = 30,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write the proposal as a .toml file for `fedveil run`.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """How should I train for this budget? Mechanism, clip, batch, steps, rounds and noise, with the reasons.

    The papers' own choice (sigma 6, 100 small local steps) is shown beside it for contrast.

    [bold]Examples[/bold]

    fedveil plan --epsilon 0.823 --clients 100 --dataset mnist --observer server

    fedveil plan --epsilon 2 --clients 50 --examples 20000 --kind table --columns 40 --classes 2 --observer sum

    fedveil plan --epsilon 0.823 --clients 100 --dataset cifar10 --observer sum --public

    fedveil plan --epsilon 1 --clients 100 --dataset mnist --observer sum --out mine.toml
    """
    from fedveil.federation import measured, planner
    from fedveil.federation.forecast import expect
    from fedveil.privacy import checks

    checks.positive("--epsilon", epsilon)
    checks.delta(delta, "--delta")
    one_of("--observer", observer, ("server", "sum"))
    if out is not None and out.suffix != ".toml":
        raise UserError(f"--out {out}: the name must end in .toml.")
    shape = planner.describe(dataset, examples, kind, classes, columns, public)
    found = planner.plan(shape, epsilon=epsilon, delta=delta, clients=clients, observer=observer)
    if out is not None:
        try:
            out.write_text(planner.as_toml(found, shape, dataset), "utf-8")
        except OSError as wrong:
            raise UserError(f"--out {out}: cannot be written: {wrong.strerror}.") from None
    expected = expect(found.noise_to_signal, 1 if shape.task == "regression" else shape.classes)
    reached = measured.predict(dataset, shape, found)
    better = None
    if not shape.backbone and dataset in planner.PUBLIC:
        other = planner.describe(dataset, examples, kind, classes, columns, True)
        proposal = planner.plan(other, epsilon=epsilon, delta=delta, clients=clients, observer=observer)
        better = f"a public backbone fits this data ({other.backbone}): --public proposes it"
        better += _between(measured.predict(dataset, other, proposal), "; it reached {}")
    data = {
        **found.to_json(), "config": planner.config_of(found, shape, dataset), "forecast": expected,
        "accuracy": None if reached is None else list(reached), "public": better,
    }  # fmt: skip
    told = [f"accuracy{_between(reached, ' {} by measured runs of such strength')}"] if reached else []
    emit(data, as_json, lambda: _show(found, out, expected, told + ([better] if better else [])))


def _between(reached: tuple[float, float] | None, text: str) -> str:
    """Two accuracies as words, in a text; "" where nothing was measured."""
    if reached is None:
        return ""
    low, high = reached
    return text.format(f"{low:.3f}" if high - low < 0.002 else f"{low:.3f} to {high:.3f}")


def _show(found: Plan, out: Path | None, expected: str, told: list[str]) -> None:
    papers = found.papers
    sampled = f"{papers.batch} of {found.examples_per_client:,}"
    rows = [
        ("epsilon reached, sound", figure(found.epsilon), figure(papers.epsilon, missing="none")),
        ("mechanism", found.mechanism, "gaussian"),
        ("clip bound", f"{found.clip:g}, flat", "4, per layer"),
        ("batch per client", f"all {found.examples_per_client:,}", sampled),
        ("local steps", str(found.local_steps), str(papers.local_steps)),
        ("rounds", str(found.rounds), str(papers.rounds)),
        ("noise multiplier", figure(found.noise_multiplier), figure(papers.sigma)),
        ("learning rate", figure(found.learning_rate), "0.05"),
        ("features", found.features.replace(",", " "), "none"),
        ("model", f"{found.model}, {found.weights:,} weights", f"{papers.weights:,} weights"),
        ("noise to signal, whole run", figure(found.noise_to_signal, 2), figure(papers.noise_to_signal, 2)),
        ("noise to signal, one round", figure(found.noise_to_signal_per_round, 2), ""),
    ]
    alone = "sees every client's update (with --observer sum, which `fedveil fit` assumes, only their sum)"
    who = alone if found.observer == "server" else "sees only the sum"
    title = (
        f"epsilon {figure(found.target_epsilon)} at delta {figure(found.delta)} per example; {found.clients:,} clients, "
        f"{found.examples:,} examples; the server {who}"
    )
    notes = [("-", reason) for reason in (*found.why, *told)]
    if expected:
        notes.append(("!", f"{expected}; what helps: --observer sum, a larger epsilon, more examples, fewer classes"))
    if out is not None:
        notes.append(("", f"Written to {out}: fedveil run {out}"))
    print_table(title, ("", "proposed", "as in the papers"), rows, notes=notes)
