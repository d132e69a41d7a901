"""`fedveil fit`: from data and a budget to a trained model; everything else is chosen, and explained."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.cli.common import JsonFlag, TrustFlag, emit
from fedveil.errors import UserError
from fedveil.jsons import Document, JsonObject

if TYPE_CHECKING:
    from fedveil.federation.config import RunConfig
    from fedveil.federation.loop import OnRound


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("fit")(fit)


def fit(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A .csv(.gz), .parquet or .npz file, a picture folder, a dataset name, or a .toml of `fedveil data check`.",
        ),
    ],
    epsilon: Annotated[float | None, typer.Option(help="The budget, per row. Above 0.")] = None,
    target: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    group: Annotated[str | None, typer.Option(help="The column that names the site of each row: one client each.")] = None,
    drop: Annotated[list[str], typer.Option(help="Columns to leave out: a,b (repeatable).")] = [],
    keep: Annotated[list[str], typer.Option(help="Columns to learn from although named like identifiers: a,b.")] = [],
    ranges: Annotated[
        list[str], typer.Option(help="Public ranges: column=low:high (repeatable), or a .toml or .json file of them.")
    ] = [],
    categories: Annotated[list[str], typer.Option(help="Public words of a column, in quotes: 'column=a|b|c' (repeatable).")] = [],
    classes: Annotated[str | None, typer.Option(help="Public classes of the target: a,b,c.")] = None,
    missing: Annotated[list[str], typer.Option(help="Declared columns that may lack values and get a mark: a,b.")] = [],
    task: Annotated[str | None, typer.Option(help="classification or regression.")] = None,
    text: Annotated[str | None, typer.Option(help="The column whose texts are the examples.")] = None,
    test: Annotated[str | None, typer.Option(help="Fraction of rows to test on (0.2), or a file of them.")] = None,
    split: Annotated[str | None, typer.Option(help="A column with train or test in each row.")] = None,
    scaling: Annotated[
        str | None, typer.Option(help="Undeclared columns: paid (a noised look, part of the budget) or free (no look).")
    ] = None,
    observer: Annotated[
        str | None, typer.Option(help="sum: only the sum over all sites is seen. server: sees every site's update.")
    ] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Clients, where no column names sites.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="The delta of the promise (default: 1e-5, less for more than 10,000 rows).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of split and simulated noise.")] = 0,
    control: Annotated[bool, typer.Option("--control", help="Also fit without privacy, for comparison (not private).")] = False,
    change: Annotated[list[str], typer.Option("--set", help="Change a key of the run: rounds=40, secure_noise=true.")] = [],
    data: Annotated[str | None, typer.Option(help="Folder of the built-in datasets (else FEDVEIL_DATA).")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory (default: runs/NAME-TIME).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, begun by the same command.")] = False,
    trust_code: TrustFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Train well from data and a budget: scaling, model, recipe and noise are chosen, each with its reason.

    Nothing is read from private rows for free: what is not declared (ranges, categories, classes) is found by a noised look
    that the same budget pays for.

    [bold]Examples[/bold]

    fedveil fit patients.csv --target outcome --group hospital --epsilon 2 --out runs/patients

    fedveil fit patients.csv --target days --task regression --epsilon 2 --ranges age=0:110 --ranges sodium=120:160

    fedveil fit digits --epsilon 4

    fedveil fit patients.toml --epsilon 1 --control
    """
    from fedveil.cli.run import stopped_at, tell, with_progress
    from fedveil.federation.config import TRUSTED, pair_of
    from fedveil.federation.fit import carry_out, choose, going_on
    from fedveil.federation.store import refuse_named_code

    if resume and out is None:
        raise UserError("--resume needs --out DIR: the run to continue")
    TRUSTED.set(trust_code)
    values, table = _file(source)
    given = declared(group, drop, keep, ranges, categories, classes, missing, task, test, split, scaling)
    table |= given
    settings = dict(pair_of(word) for word in change)
    epsilon = epsilon if epsilon is not None else values.get("target_epsilon")
    if epsilon is None:
        raise UserError("--epsilon is missing: the budget per row. 1 is strong, 4 usual, 8 weak.")
    chosen = choose(
        values.get("dataset", source), epsilon=epsilon, delta=delta, target=target or values.get("target"),
        text=text or values.get("text"), observer=observer or values.get("view", "sum"), clients=clients, seed=seed,
        data=data, table=table, **settings,
    )  # fmt: skip
    refuse_named_code(chosen.config, trust_code)
    folder = out or Path("runs") / f"{_short(values.get('dataset', source))}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not as_json:
        _show_lines(chosen.lines)
    command = _command(source, epsilon, target, text, observer, clients, seed, delta, data, given, change)
    command += " --control" if control else ""
    chosen = going_on(chosen, folder) if resume else chosen

    def work(hook: OnRound | None) -> JsonObject:
        return carry_out(chosen, folder, control=control, command=command, resume=resume, on_round=hook, on_start=tell)

    try:
        facts = with_progress(chosen.config, work, as_json)
    except KeyboardInterrupt:
        print(stopped_at(folder, command), file=sys.stderr)
        raise typer.Exit(130) from None
    if chosen.config.report:
        from fedveil.report.page import write_report

        write_report([folder], folder / "report.html")
    emit(facts, as_json, lambda: _show(facts, chosen.config))


def _command(
    source: str, epsilon: float, target: str | None, text: str | None, observer: str | None, clients: int | None, seed: int,
    delta: float | None, data: str | None, table: JsonObject, change: Sequence[str],
) -> str:  # fmt: skip
    """The command that makes this run again; declared columns as `[table]` has them."""
    lists = {key: ",".join(map(str, value)) for key, value in table.items() if isinstance(value, list | tuple)}
    plain = {key: value for key, value in table.items() if isinstance(value, str | int | float)}
    given = {"target": target, "text": text, "epsilon": _exact(epsilon), "observer": observer, "clients": clients}
    given |= {"seed": seed or None, "delta": None if delta is None else _exact(delta), "data": data}
    words = [f"--{key} {value}" for key, value in (given | plain | lists).items() if value not in (None, "")]
    for key, pairs in ((k, v) for k, v in table.items() if isinstance(v, dict)):
        words += [f"--{key} '{c}={':'.join(map(str, v)) if key == 'ranges' else '|'.join(v)}'" for c, v in pairs.items()]
    return " ".join(["fedveil fit", source, *words, *(f"--set {one}" for one in change)])


def _exact(value: float) -> str:
    """The shortest digits that are read back as the same number."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _short(source: object) -> str:
    return Path(str(source)).name.partition(".")[0] or "fit"


def _file(source: str) -> tuple[Document, JsonObject]:
    """Values and columns of a .toml file; nothing for other sources."""
    if not source.endswith(".toml"):
        return {}, {}
    from fedveil.federation.config import read_toml_file
    from fedveil.protect.catalogue import catalogue

    values = read_toml_file(Path(source))
    table = values.get("table", {})
    if "dataset" not in values or not isinstance(table, dict):
        raise UserError(f"{source}: names no dataset; `fedveil data check FILE --write {source}` writes one that does.")
    recipe = catalogue().get(values.get("recipe", "sum-cdp"))
    planned = {key: value for key, value in table.items() if key != "share"}  # another budget, another share
    return {**values, "view": "sum" if recipe is not None and recipe.place.sum_only else "server"}, planned


def declared(
    group: str | None, drop: Sequence[str], keep: Sequence[str], ranges: Sequence[str], categories: Sequence[str],
    classes: str | None,
    missing: Sequence[str], task: str | None, test: str | None, split: str | None, scaling: str | None,
) -> JsonObject:  # fmt: skip
    """The options as keys of `[table]`."""
    given: JsonObject = {"group": group, "task": task, "split": split, "scaling": scaling}
    given["drop"] = [name for word in drop for name in word.split(",") if name]
    given["keep"] = [name for word in keep for name in word.split(",") if name]
    given["missing"] = [name for word in missing for name in word.split(",") if name]
    given["classes"] = classes.split(",") if classes else None
    given["ranges"] = {column: pair for word in ranges for column, pair in _range(word).items()}
    given["categories"] = dict(_category(word) for word in categories)
    if test is not None:
        try:
            given["test"] = float(test)
        except ValueError:
            given["test"] = test
    return {key: value for key, value in given.items() if value}


def _range(word: str) -> JsonObject:
    if word.endswith((".toml", ".json")):
        return _range_file(Path(word))
    column, sign, pair = word.partition("=")
    low, colon, high = pair.partition(":")
    try:
        if not (sign and colon):
            raise ValueError
        return {column.strip(): [float(low), float(high)]}
    except ValueError:
        raise UserError(f"--ranges {word}: write column=low:high, e.g. age=0:110, or name a .toml or .json file.") from None


def _range_file(path: Path) -> JsonObject:
    from fedveil.federation.config import read_toml_file

    if path.suffix == ".toml":
        found: object = read_toml_file(path)
    else:
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as wrong:
            raise UserError(f"--ranges {path}: cannot be read ({wrong}).") from None
    found = found.get("ranges", found) if isinstance(found, dict) else found
    if not isinstance(found, dict):
        raise UserError(f"--ranges {path}: must hold one entry [low, high] per column.")
    return found


def _category(word: str) -> tuple[str, list[str]]:
    column, sign, words = word.partition("=")
    found = [one for one in words.split("|") if one]
    if not sign or not found:
        raise UserError(f"--categories {word}: write 'column=a|b|c', e.g. 'sex=F|M'.")
    if len(found) < 2:
        raise UserError(
            f"--categories {word}: one word alone tells no rows apart; write all of them, in quotes, which keep the shell from "
            f"taking | for a pipe: '{column.strip()}={found[0]}|...'. To leave the column out: --drop {column.strip()}."
        )
    return column.strip(), found


def _show_lines(lines: Sequence[tuple[str, str]]) -> None:
    for what, why in lines:
        print(f"{what:<9}{why}")
    sys.stdout.flush()  # warnings and rounds go to the other stream


def _show(facts: Document, config: RunConfig) -> None:
    from fedveil.report.words import server_sees

    for line in facts["found"]:
        print(f"{'found':<9}{line}")
    for row in facts["ledger"]:
        if row["unit"] == "example" and row["observer"] in ("server", "public"):
            shown = "none" if row["epsilon"] is None else f"{row['epsilon']:.4g}"
            sees = f", which sees {server_sees(config.built_recipe(), config.secure_sum)}" if row["observer"] == "server" else ""
            print(f"{'promise':<9}{row['observer']}{sees}: epsilon {shown} per row, {row['verdict']}" + (
                f" ({row['reason']})" if row["verdict"] != "sound" else ""))  # fmt: skip
    if facts["simulated"]:
        print(f"{'noise':<9}seeded, for a simulation: promises hold when deployed with secret noise (--set secure_noise=true)")
    constants = ", table.json (constants of the columns)" if (Path(facts["run"]) / "table.json").exists() else ""
    page = "report.html, " if (Path(facts["run"]) / "report.html").exists() else ""
    print(f"{'kept':<9}{facts['run']}: {page}model.safetensors{constants}, ledger (explained by `fedveil ledger {facts['run']}`)")
    print(facts["verdict"])
