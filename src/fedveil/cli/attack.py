"""`fedveil attack` and `fedveil audit`: the red team."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.common import JsonFlag, TrustFlag, emit, figure, print_table
from fedveil.errors import UserError, did_you_mean
from fedveil.jsons import Document, JsonObject

KINDS = ("gradient", "malicious", "exact", "membership", "attribute", "decoder", "all")
RunArgument = Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A finished run directory.")]


def register(app: typer.Typer) -> None:
    app.command()(attack)
    app.command()(audit)


def attack(
    run: RunArgument = None,
    kind: Annotated[
        str, typer.Option(help="gradient, malicious, exact, membership, attribute, decoder or all.")
    ] = "gradient",
    leak: Annotated[
        str,
        typer.Option(
            "--type", help="Where the adversary reads: 2, 1, 0 or 0-sanitised (see docs/attacks.md)."
        ),
    ] = "2",
    recipe: Annotated[
        str, typer.Option(help="Recipes to attack without a run, separated by commas.")
    ] = "non-private",
    dataset: Annotated[str, typer.Option(help="Dataset to attack without a run.")] = "digits",
    model: Annotated[str, typer.Option(help="Model to attack without a run.")] = "cpl-lenet",
    method: Annotated[str, typer.Option(help="Gradient attack: dlg, idlg, cpl, gradinv or veil.")] = "veil",
    victims: Annotated[
        int | None,
        typer.Option(min=1, help="Images (type 2) or clients (types 1 and 0) to attack (default: 16, or all clients of a run)."),
    ] = None,
    batch: Annotated[float | None, typer.Option(help="Batch behind one update (types 1 and 0).")] = None,
    local_steps: Annotated[
        int, typer.Option(min=1, help="Local steps behind one update, without a run.")
    ] = 1,
    noise_on: Annotated[
        str | None, typer.Option(help="sum, example or mean: where Fed-CDP's noise goes.")
    ] = None,
    rounds: Annotated[
        str,
        typer.Option(
            "--round", help="Checkpoints of the run to attack, e.g. 0,10 (0: before training; default: last)."
        ),
    ] = "",
    iterations: Annotated[int | None, typer.Option(min=1, help="Iterations of one try.")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="Further tries for victims not solved.")] = 0,
    update_as: Annotated[
        str, typer.Option(help="Treat an update of several steps as one gradient, or unroll them.")
    ] = "gradient",
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Keep the image nearest to the truth: no attacker can.")
    ] = False,
    unaware: Annotated[
        bool, typer.Option("--unaware", help="Do not repeat the recipe's clipping in the attack.")
    ] = False,
    shadows: Annotated[int, typer.Option(min=2, help="Shadow models (membership).")] = 16,
    pool: Annotated[
        int, typer.Option(min=20, help="Examples asked about, half members (membership).")
    ] = 1000,
    attribute: Annotated[str | None, typer.Option(help="Sensitive attribute (attribute inference).")] = None,
    seed: Annotated[int, typer.Option(help="Chooses victims and starts.")] = 0,
    data: Annotated[str | None, typer.Option(help="Folder of the datasets (else FEDVEIL_DATA).")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results (default with a run: RUN/attacks).")
    ] = None,
    trust_code: TrustFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Attack a run, or a recipe alone, and measure what the adversary gets.

    Examples:

      fedveil attack --recipe non-private,fed-cdp --dataset digits --type 2 --victims 16

      fedveil attack runs/first --kind gradient --round 0,10

      fedveil attack runs/first --kind membership --shadows 32
    """
    from fedveil.attacks import campaign
    from fedveil.attacks.leakage.measure import TYPES
    from fedveil.federation.config import TRUSTED

    _check_attack(run, kind, leak, method, update_as)
    TRUSTED.set(trust_code)
    victims = victims or _usual_victims(run, leak if kind == "gradient" else "2")
    options: JsonObject = {
        "method": method, "tap": TYPES[leak], "victims": victims, "seed": seed, "iterations": iterations,
        "restarts": restarts, "oracle": oracle, "update_as": update_as, "aware": False if unaware else None,
    }  # fmt: skip
    if run is None:
        configs = [
            campaign.gradient_config(
                name.strip(), dataset, model, victims=victims, seed=seed, tap=TYPES[leak], batch=batch,
                local_steps=local_steps, noise_on=noise_on, data=data,
            )
            for name in recipe.split(",")
        ]  # fmt: skip
        jobs = {
            f"{config.recipe}|{dataset}|{model}|{noise_on or ''}|{batch}|{local_steps}": (config, campaign.initial)
            for config in configs
        }
        rows = campaign.attack_gradients(jobs, out=out, **options)
        if out is not None:
            campaign.save(out, "gradient", rows)
        result: object = rows[0] if len(rows) == 1 else {"kind": "gradient", "results": rows}
        emit(result, as_json, lambda: _show_gradients(rows))
        return
    from fedveil.attacks.on_run import on_run
    from fedveil.federation.store import open_run, refuse_foreign_code

    refuse_foreign_code(open_run(run), trust_code)
    results = on_run(
        run, kind, rounds, out or run / "attacks", options, shadows, pool, attribute, victims, seed, data,
        say=lambda text: typer.echo(text, err=True),
    )
    summary = campaign.summarise(run) if out is None else None
    if kind == "all" and summary is not None:
        results["summary"] = summary

    def show() -> None:
        _show({name: found for name, found in results.items() if name != "summary"})
        if summary is not None:
            _show_summary(summary, run)

    if out is None:
        _renew_report(run)
    emit(results if kind == "all" else results[kind], as_json, show)


def _usual_victims(run: Path | None, leak: str) -> int:
    """16, or as many as a run has clients where each victim is a client's update."""
    from fedveil.federation.store import open_run

    return 16 if run is None or leak == "2" else min(16, open_run(run).config.clients)


def _renew_report(run: Path) -> None:
    """A page that `fedveil run` wrote shows what was found since. Its figures are those of the ledger and of the attacks."""
    from fedveil.report.page import write_report

    if (run / "report.html").is_file():
        write_report([run], run / "report.html")


def _check_attack(run: Path | None, kind: str, leak: str, method: str, update_as: str) -> None:
    from fedveil.attacks.leakage.measure import TYPES
    from fedveil.attacks.leakage.search import METHODS

    if kind not in KINDS:
        raise UserError(f"--kind {kind}: choose one of {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
    if leak not in TYPES:
        raise UserError(f"--type {leak}: choose one of {', '.join(TYPES)}.")
    if method not in METHODS:
        raise UserError(
            f"--method {method}: choose one of {', '.join(METHODS)}.{did_you_mean(method, METHODS)}"
        )
    if update_as not in ("gradient", "unroll"):
        raise UserError(f"--update-as {update_as}: choose gradient or unroll.")
    if run is None and kind != "gradient":
        raise UserError(
            f"--kind {kind} attacks a trained model: give a run directory, e.g. fedveil attack runs/first."
        )


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    canaries: Annotated[
        int, typer.Option(min=2, help="Canary examples or clients, half of them included.")
    ] = 1000,
    rounds: Annotated[int | None, typer.Option(min=1, help="Replay only so many rounds.")] = None,
    significance: Annotated[
        float, typer.Option(min=1e-9, max=0.5, help="Probability of a false accusation.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Chooses canaries and their coins.")] = 0,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Only say how many canaries or rounds it takes to find a broken promise."
        ),
    ] = False,
    factor: Annotated[
        float, typer.Option(min=1.01, help="By how much a promise is broken that must be found (--plan).")
    ] = 2.0,
    violation: Annotated[
        str,
        typer.Option(help="What is wrong by that factor: noise, or one record's contribution (--plan)."),
    ] = "noise",
    final: Annotated[
        bool, typer.Option("--final", help="Judge by the final model alone, not by every release.")
    ] = False,
    trust_code: TrustFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Replay a run's recipe with canaries and test the promise in its ledger. Exit code 1: a sound promise is broken.

    Examples:

      fedveil audit runs/first

      fedveil audit runs/first --canaries 2000 --json

      fedveil audit runs/first --plan --factor 2
    """
    from fedveil.attacks import campaign
    from fedveil.federation.config import TRUSTED
    from fedveil.federation.store import open_run, refuse_foreign_code

    refuse_foreign_code(open_run(run), trust_code)
    TRUSTED.set(trust_code)
    if plan:
        if violation not in ("noise", "contribution"):
            raise UserError(f"--violation {violation}: choose noise or contribution.")
        needed = campaign.plan_audit(
            run, canaries_count=canaries, rounds=rounds, seed=seed, significance=significance, factor=factor,
            of="noise" if violation == "noise" else "contribution",
        )  # fmt: skip
        emit(needed, as_json, lambda: print(needed["sentence"]))
        return
    if final:
        figures, code = campaign.audit_final_model(
            run, canaries_count=canaries, rounds=rounds, seed=seed, significance=significance
        )
        campaign.save(
            run / "attacks", "audit-final", figures, {"canaries": canaries, "rounds": rounds, "seed": seed}
        )
        emit(figures, as_json, lambda: show_audit(figures))
        if code:
            raise typer.Exit(code)
        return
    figures, code = campaign.audit_run(
        run, canaries_count=canaries, rounds=rounds, seed=seed, significance=significance
    )
    settings = {"canaries": canaries, "rounds": rounds, "significance": significance, "seed": seed}
    campaign.save(run / "attacks", "audit", figures, settings)
    summary = campaign.summarise(run)
    _renew_report(run)

    def show() -> None:
        show_audit(figures)
        _show_summary(summary, run)

    emit(figures, as_json, show)
    if code:
        raise typer.Exit(code)


def _show_gradients(rows: list[Document]) -> None:
    """One table for each tap: what was seen there, how many victims and how large a batch differ."""
    for tap in dict.fromkeys(row["tap"] for row in rows):
        _show_tap([row for row in rows if row["tap"] == tap])


def _ssim(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _noise_words(row: Document) -> str:
    """What the recipe puts noise on, and how much of it is on what was seen here."""
    from fedveil.protect.law import NOISE_ON

    scale = row.get("noise_scale")
    if not scale:
        return f"{row['recipe']}: what is seen here carries no noise."
    on = row["noise_on"]
    size = f"what is seen here carries noise of size {figure(scale, 2)}"
    return f"{row['recipe']}: {size}; noise on: {on}, that is {NOISE_ON[on].words}."


def _labels_read(row: Document) -> str:
    """Labels read, and in parentheses what the same guesses read of other victims."""
    others = row.get("label_control")
    return figure(row["label_accuracy"], 3) + ("" if others is None else f" ({figure(others, 2)})")


def _show_tap(rows: list[Document]) -> None:
    from fedveil.attacks.verdicts import things_of

    first = rows[0]
    columns = ["recipe", "round", "rebuilt", "papers'", "labels", "RMSE", "SSIM"]
    body = [
        [
            row["recipe"], str(row["round"]), figure(row["success_rate"], 3), figure(row["success_rate_papers"], 3),
            _labels_read(row), figure(row["rmse"], 3), _ssim(row["ssim"]),
        ]
        for row in rows
    ]  # fmt: skip
    thing = things_of(first).removesuffix("s")
    for name in ("black", "mean"):
        control = first["controls"][name]
        called = "blank" if name == "black" and thing == "record" else name
        body.append([
            f"({called} {thing})", "", figure(control["success_rate"], 3), figure(control["success_rate_papers"], 3), "",
            figure(control["rmse"], 3), _ssim(control["ssim"]),
        ])  # fmt: skip
    alike = "MSE < 0.01 and SSIM > 0.8 on pixels" if thing == "image" else "MSE < 0.01 on values"
    notes = [
        f"rebuilt: share of {thing}s with {alike} in {tuple(first['pixel_range'])}; papers': with MSE < 0.70.",
        "labels: share that was read, in parentheses by the same guesses for other victims.",
        f"{thing}s kept by {first['chosen_by']}.",
        *dict.fromkeys(_noise_words(row) for row in rows),
    ]
    blind = max(_number(first["controls"][name]["success_rate_papers"]) for name in ("black", "mean"))
    if any(0 < _number(row["success_rate_papers"]) <= blind for row in rows):
        notes.insert(1, (
            f"papers' {figure(blind, 3)} is no finding: MSE < 0.70 is so wide that a blank or mean {thing} passes as often "
            "(the rows in parentheses); judge by rebuilt."
        ))  # fmt: skip
    for row in rows:
        if failed := row["failed_numerically"]:
            notes.append(
                f"{row['recipe']}, round {row['round']}: {failed} of {row['victims']} attacks failed numerically and are "
                "left out; that says nothing about the defence."
            )
    print_table(
        f"{first['method']} on {first['tap']}, {first['dataset']}, {first['victims']} victims, batch {first['batch']}",
        columns, body, right=columns[1:],
    )  # fmt: skip
    print("\n".join(notes))


def _membership_row(rates: Document) -> list[str]:
    """Four figures with their intervals; "-" where there is none."""
    return [
        "-" if rates[k] is None else "{:.3f} [{:.3f}, {:.3f}]".format(rates[k], *rates[f"{k}_interval"])
        for k in ("auc", "balanced_accuracy", "tpr_at_1pct", "tpr_at_01pct")
    ]


def _show_summary(summary: Document, run: Path) -> None:
    """One row per seat, for people, and what to try next."""
    from fedveil.attacks.verdicts import COLUMNS, cells, next_step, worth_showing

    print_table("What each seat can do", COLUMNS, [cells(row) for row in worth_showing(summary["rows"])])
    page = run / "report.html"
    print("\n".join(line for line in (next_step(summary["rows"], run), f"Report: {page}" if page.is_file() else "") if line))


def _show_malicious(found: Document) -> None:
    things = "images" if found["images"] else "records"
    columns = ["model sent", "clients in the sum", things, "given back", "control"]
    rows = [
        [r["kind"], str(r["clients"]), str(r["images"]), f"{r['share']:.3f} [{r['interval'][0]:.3f}, {r['interval'][1]:.3f}]",
         f"{r['control']:.3f}"]
        for r in found["attacks"]
    ]  # fmt: skip
    print_table(
        f"A malicious server, one step on {found['batch']} {things}, 95% intervals",
        columns,
        rows,
        right=columns[1:],
    )


def _show(results: Document) -> None:
    from fedveil.report.attacks import empty_because

    for kind, found in results.items():
        if "not_done" in found:
            print(f"{kind}: not done. {found['not_done']}")
        elif kind == "gradient":
            _show_gradients(found.get("results", [found]))
        elif kind == "membership":
            columns = ["attack", "AUC", "balanced acc.", "TPR at 1%", "TPR at 0.1%"]
            rows = [[name, *_membership_row(r)] for name, r in found["methods"].items()]
            print_table("Membership inference, 95% intervals", columns, rows, right=columns[1:])
            above = [
                n
                for n, r in found["methods"].items()
                if r.get("auc_interval_all") and r["auc_interval_all"][0] > 0.5
            ]
            print(
                f"With 95% confidence for all attacks together, above guessing: {', '.join(above) or 'none'}."
            )
            for why in empty_because(found["methods"]):
                print(why)
        elif kind == "malicious":
            _show_malicious(found)
        elif kind == "audit":
            show_audit(found)
        elif kind == "exact":
            low, high = found["share_interval"]
            print(f"exact inversion ({found['method']}, {found['batches']} batches of {found['batch']}): "
                  f"{found['share']:.3f} [{low:.3f}, {high:.3f}] given back; control {found['control']:.3f}")  # fmt: skip
        elif kind == "attribute":
            print(
                f"attribute '{found['attribute']}': accuracy {found['accuracy']:.3f}, F1 {found['f1']:.3f}; "
                f"without the model {found['control_accuracy']:.3f}; most frequent value {found['majority_accuracy']:.3f}"
            )
        else:
            print(
                f"decoder: MSE {found['mse']:.4f}, MAE {found['mae']:.4f}, SSIM {figure(found['ssim'], 3)}; "
                f"mean of all: {found['control_mse']:.4f}, {found['control_mae']:.4f}, {figure(found['control_ssim'], 3)}"
            )


MEANING = {
    "promise holds": "the {status} promise was tested, and half its noise would have been noticed.",
    "promise broken": "this run does not keep the {status} promise.",
    "not enough evidence": "nothing contradicts the {status} promise, but a broken one might look the same.",
}


def show_audit(found: Document) -> None:
    """What an audit found, for people: the seat, the promise, what was shown, one sentence, and the next step."""
    from fedveil.attacks.verdicts import SEATS

    if "not_done" in found:
        print(f"audit: not done. {found['not_done']}")
        return
    observer, lower = str(found["observer"]), figure(found["epsilon_lower"])
    seat = SEATS.get(observer, observer)
    promised = "nothing finite" if found["epsilon_promised"] is None else figure(found["epsilon_promised"])
    print(f"{found['verdict'].upper()}: {MEANING[found['verdict']].format(status=found['status'])}")
    print(f"Seat: {seat} ({observer}), about one {found['unit']}.")
    print(f"Promised there: epsilon {promised} at delta {found['delta']:g} ({found['status']}).")
    print(f"Shown by {found['canaries']} canaries: epsilon at least {lower}; they could show {figure(found['ceiling'])} at most.")
    if not found["reason"].startswith("lower bound"):  # the figures above, again
        print(found["reason"] + ".")
    if found["verdict"] == "not enough evidence" and found["epsilon_promised"] is not None:
        print("Next: fedveil audit RUN --plan says how many canaries it takes; then fedveil audit RUN --canaries N.")
    bits = found.get("low_bits")
    if bits:
        told = f"not looked at: {bits['reason']}" if bits["reason"] else (
            f"{bits['with_excludes_without']} of {bits['releases']} releases exclude the neighbour "
            f"({bits['without_excludes_without']} false), at least {figure(bits['epsilon_lower'])}"
        )  # fmt: skip
        print(f"low bits of one round: {told}")
    prepared = found.get("preparation")
    if prepared:
        print(f"preparation of the rows: {prepared['reason'] or 'nothing fitted on private rows was found'}")
