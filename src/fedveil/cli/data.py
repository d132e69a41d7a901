"""`fedveil data`: list the datasets, fetch one, look at one and at how it would be dealt out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from fedveil.errors import UserError

_DATA = typer.Option(None, "--data", help="Folder with data files (default: FEDVEIL_DATA).")
_JSON = typer.Option(False, "--json", help="Print one JSON document.")


def register(app: typer.Typer) -> None:
    """Add the command group to the application."""
    group = typer.Typer(no_args_is_help=True, help="List, fetch and look at datasets and partitions.")
    group.command("list")(list_datasets)
    group.command("get")(get_dataset)
    group.command("show")(show_dataset)
    group.command("check")(check_table)
    group.command("sample")(sample)
    app.add_typer(group, name="data")


def list_datasets(data: Path | None = _DATA, as_json: bool = _JSON) -> None:
    """List the built-in datasets: whether they are at hand, size, task, source, licence.

    Example:  fedveil data list --data ~/data
    """
    from fedveil.data.datasets import available
    from fedveil.data.sources import CATALOGUE

    rows = [
        {
            "name": name,
            "available": available(name, data),
            "size": source.size,
            "task": source.task,
            "source": source.origin,
            "licence": source.licence,
            "files": list(source.files),
            "fetchable": bool(source.fetch),
        }
        for name, source in CATALOGUE.items()
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        state = "yes" if row["available"] else ("get" if row["fetchable"] else "no")
        print(f"{row['name']:<15}{state:<5}{row['task']:<16}{row['size']}")
        print(f"{'':<20}{row['source']}. Licence: {row['licence']}")
    print(
        "\nyes: at hand; get: `fedveil data get NAME --data DIR` fetches it; no: docs/data.md has the format."
    )


def get_dataset(
    name: str = typer.Argument(..., help="A dataset's name, see `fedveil data list`."),
    data: Path | None = _DATA,
    as_json: bool = _JSON,
) -> None:
    """Fetch a dataset (mnist, fashion_mnist, cifar10, adult, lfw) into the data folder, and check it.

    Example:  fedveil data get mnist --data ~/data
    """
    import os

    from fedveil.data.datasets import data_root
    from fedveil.data.fetch import fetch
    from fedveil.data.sources import CATALOGUE

    embedded = name in CATALOGUE and not CATALOGUE[name].files
    if embedded:
        folder = Path()
    elif data is not None or os.environ.get("FEDVEIL_DATA"):
        folder = Path(data or os.environ["FEDVEIL_DATA"]).expanduser()
    else:
        folder = data_root(None)  # raises, and says what to do
    written = fetch(name, folder)
    said = "is built in" if embedded else ("was fetched" if written else "is there already")
    if as_json:
        print(json.dumps({"name": name, "state": said, "files": [str(path) for path in written]}))
    else:
        print(f"{name} {said}{': ' if written else '.'}{', '.join(map(str, written))}")


def sample(
    file: Path = typer.Argument(..., metavar="FILE", help="A new .csv, .csv.gz or .npz file."),
    kind: str | None = typer.Option(None, help="table, study (one site's numbers), images or texts (else by the name's end)."),
    rows: int | None = typer.Option(None, help="How many rows (default: 4,000 of a table, 350 of a study, 2,000 of others)."),
    seed: int = typer.Option(0, help="Another seed draws other rows."),
    as_json: bool = _JSON,
) -> None:
    """Write made-up data to try commands on: patients of three hospitals, pictures of four kinds, or letters.

    A program draws it: nobody's data is in it.

    Examples:

      fedveil data sample patients.csv

      fedveil data sample images.npz

      fedveil data sample letters.csv --kind texts
    """
    from fedveil.cli.common import one_of
    from fedveil.data.sample import ROWS, write

    if kind is not None:
        one_of("--kind", kind, tuple(ROWS))
    made = write(file, kind, rows, seed)  # type: ignore[arg-type]
    facts = {"file": str(file), "kind": made, "rows": ROWS[made] if rows is None else rows, "seed": seed}
    if as_json:
        print(json.dumps(facts))
        return
    columns = {"table": "--target outcome --group hospital", "study": "--target outcome", "images": "",
               "texts": "--text letter --target urgent"}[made]  # fmt: skip
    follow = " ".join(filter(None, ["fedveil fit", str(file), columns, "--epsilon 2"]))
    print(f"{file}: {facts['rows']:,} made-up rows ({made}). Next: {follow}")


def show_dataset(
    name: str = typer.Argument(
        ..., help="A dataset's name, a .npz or .csv file, or package.module:function."
    ),
    data: Path | None = _DATA,
    target: str | None = typer.Option(None, help="The column to predict (.csv)."),
    partition: str | None = typer.Option(
        None, help="shards, iid, dirichlet, groups, sizes, copies or overlap: how it would be dealt out."
    ),
    clients: int | None = typer.Option(None, help="Number of clients."),
    seed: int = typer.Option(0, help="Seed of split and partition."),
    validation: float = typer.Option(0.0, help="Fraction of the training rows to hold out as public."),
    setting: list[str] = typer.Option(
        [],
        "--set",
        help="Further options as key=value: of the partition (alpha=0.1) or of the dataset (split=original).",
    ),
    plot: Path | None = typer.Option(None, help="Draw the partition into this file (.png, .svg, .pdf)."),
    as_json: bool = _JSON,
) -> None:
    """Show a dataset, and how a partition would deal it out. Label counts are private: for the owner's eyes.

    Examples:

      fedveil data show cancer

      fedveil data show mnist --partition shards --clients 100 --plot out.png

      fedveil data show patients.csv --target outcome --partition dirichlet --clients 20 --set alpha=0.1
    """
    import inspect

    import numpy as np

    from fedveil.data import partition as parts
    from fedveil.data.datasets import load
    from fedveil.models.nets import default_model

    options = dict(_setting(text) for text in setting)
    kind = partition or ("shards" if plot or clients else None)
    of_partition: set[str] = {"min_size", "min_classes"} if kind else set()
    if kind in parts.KINDS:
        of_partition |= set(list(inspect.signature(parts.KINDS[str(kind)]).parameters)[3:])
    dealt = {key: value for key, value in options.items() if key in of_partition}
    rest = {key: value for key, value in options.items() if key not in of_partition}
    dataset = load(name, root=data, seed=seed, validation=validation, target=target, **rest)
    facts: dict[str, Any] = {
        "name": dataset.name,
        "task": dataset.task,
        "train": len(dataset),
        "validation": 0 if dataset.x_validation is None else len(dataset.x_validation),
        "test": len(dataset.x_test),
        "shape": list(dataset.shape),
        "classes": dataset.classes,
        "default_model": default_model(dataset),
        "notes": list(dataset.notes),
    }
    if kind:
        made = parts.partition(dataset, kind, clients, seed, **dealt)
        sizes = np.array([made.size(i) for i in range(min(made.clients, 100_000))])
        facts["partition"] = {
            "kind": made.kind,
            "clients": made.clients,
            "copies": made.copies,
            "smallest": int(sizes.min()),
            "median": float(np.median(sizes)),
            "largest": int(sizes.max()),
            "note": made.note,
        }
        if plot:
            from fedveil.data.plot import plot_partition

            facts["plot"] = str(plot_partition(dataset, made, plot))
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        if key == "partition":
            print("partition")
            for word, number in value.items():
                print(f"  {word:<14}{number}")
        elif key == "notes":
            print("\n".join(f"{'note':<16}{note}" for note in value))
        else:
            print(f"{key:<16}{value}")


def check_table(
    file: str = typer.Argument(..., metavar="FILE", help="A .csv, .csv.gz or .parquet file."),
    target: str | None = typer.Option(None, help="The column to predict."),
    group: str | None = typer.Option(None, help="The column that names the site of each row."),
    drop: list[str] = typer.Option([], help="Columns to leave out: a,b (repeatable)."),
    keep: list[str] = typer.Option([], help="Columns to learn from although named like identifiers: a,b."),
    ranges: list[str] = typer.Option([], help="Public ranges, as in `fedveil fit`: column=low:high, or a file of them."),
    categories: list[str] = typer.Option([], help="Public words, as in `fedveil fit`: 'column=a|b|c'."),
    classes: str | None = typer.Option(None, help="Public classes of the target: a,b,c."),
    epsilon: float = typer.Option(2.0, help="The budget of the run that is written."),
    observer: str = typer.Option("sum", help="sum or server, as in `fedveil fit`."),
    task: str | None = typer.Option(None, help="classification or regression."),
    write: Path | None = typer.Option(None, help="Write a .toml for `fedveil fit` and `fedveil run` (needs --target)."),
    as_json: bool = _JSON,
) -> None:
    """Look at a table before training: what each column holds, and what is private about using it.

    What is seen is exact and private: for the owner's eyes. The file that --write makes holds none of it.

    Example:  fedveil data check patients.csv --target outcome --group hospital --write patients.toml
    """
    from fedveil.cli.fit import declared
    from fedveil.data.columns import check_names, columns_of
    from fedveil.data.describe import describe
    from fedveil.data.frames import Table, read

    table = read(file)
    if not isinstance(table, Table):
        raise UserError(f"{file}: holds images or arrays, which need no check; `fedveil fit {file} --epsilon 4` takes them.")
    options = declared(group, drop, keep, ranges, categories, classes, [], task, None, None, None)
    if target is None and (ranges or categories or classes):
        raise UserError("--ranges, --categories and --classes need --target: which column is to be predicted.")
    columns = columns_of(options, target, None, file) if target else None
    if columns is not None:
        check_names(table, columns)
    if write is not None and (columns is None or write.suffix != ".toml"):
        raise UserError(f"--write {write}: the name must end in .toml, and --target must say which column to predict.")
    found = describe(table, columns)
    if write is not None:
        _write_plan(write, file, str(target), options, epsilon, observer)
    if as_json:
        facts = {"file": file, "rows": len(table), "columns": found, "written": str(write) if write else None}
        print(json.dumps(facts, indent=2))
        return
    print(f"{file}: {len(table):,} rows, {len(found)} columns. What is seen here is exact and private: keep it on this screen.")
    for row in found:
        print(f"\n{row['column']}  ({row['role']})\n  seen:     {row['seen']}\n  privacy:  {row['private']}")
        if row["suggestion"]:
            print(f"  suggest:  {row['suggestion']}")
    if write is not None:
        print(f"\nWritten to {write}: fedveil fit {write} --epsilon {epsilon:g}, or fedveil run {write}")
    elif columns is None:
        print("\nNext: add --target COLUMN (and --group COLUMN), then --write plan.toml.")


def _write_plan(path: Path, file: str, target: str, options: dict[str, Any], epsilon: float, observer: str) -> None:
    """The planned run as a .toml; suggestions that were read off the rows stay on the screen."""
    from fedveil.federation.fit import as_toml, choose

    chosen = choose(file, epsilon=epsilon, target=target, observer=observer, table=options)
    try:
        path.write_text(as_toml(chosen), "utf-8")
    except OSError as wrong:
        raise UserError(f"--write {path}: cannot be written: {wrong.strerror}.") from None


def _setting(text: str) -> tuple[str, Any]:
    """key=value; the value is read as JSON where it is JSON, else as text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UserError(f"--set {text}: give key=value, for example --set alpha=0.1.")
    try:
        return key.strip(), json.loads(value)
    except json.JSONDecodeError:
        return key.strip(), value
