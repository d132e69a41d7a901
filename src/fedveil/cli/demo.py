"""`fedveil demo`: the idea in one screen."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.common import JsonFlag, figure, print_table
from fedveil.errors import UserError
from fedveil.jsons import Document, JsonObject

CASES = {"no privacy": "demo-plain", "the paper's recipe": "demo-alpha", "the sound one": "demo-sound"}
VICTIMS = 2


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(demo)


def demo(
    out: Annotated[
        Path | None, typer.Option(help="New folder for runs, picture and report (default: runs/demo-TIME).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train without privacy, with a paper's recipe and with a sound one; attack and audit each; show the difference.

    One model, the same digits of the same clients. Earlier results are never touched: every call makes a new folder.

    Example:  fedveil demo
    """
    folder = out or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--out {folder}: is not empty; the demo never overwrites results. Give a new folder")
    from fedveil.report.page import write_report

    rows, pictures = [], {}
    for title, name in CASES.items():
        row, truth, guess = _case(title, name, folder / name, as_json)
        rows.append(row)
        pictures["what the attacker wants"], pictures[title] = truth, guess
    _draw(pictures, folder / "attack.png")
    for name in CASES.values():
        write_report([folder / name], folder / name / "report.html")
    write_report([folder / name for name in CASES.values()], folder / "report.html")
    if as_json:
        print(json.dumps({"rows": rows, "picture": str(folder / "attack.png"), "report": str(folder / "report.html")}))
        return
    _show(rows, folder)


def _case(title: str, name: str, folder: Path, quiet: bool) -> tuple[JsonObject, object, object]:
    """Train, attack and audit one configuration: its row, the true image and the attacker's."""
    from fedveil.attacks import campaign
    from fedveil.attacks.leakage import measure
    from fedveil.cli.run import train_and_show_progress
    from fedveil.federation.config import load_config
    from fedveil.federation.loop import prepare

    config = load_config(name)
    result = train_and_show_progress(config, folder, f"fedveil run {name}", quiet)
    # The run's own noise, on an update of one example: the worst case of what the server gets.
    same: JsonObject = {"sigma": prepare(config).task.recipe.sigma.first} if config.calibrate else {}
    alone = campaign.gradient_config(
        config.recipe, config.dataset, config.model, victims=VICTIMS, seed=0, tap="type0", batch=1,
        changes={"sampling": "fixed", **same},
    )  # fmt: skip
    prepared = prepare(alone)
    outcome = measure.measure(
        prepared, campaign.initial(prepared), method="veil", tap="type0", victims=VICTIMS, seed=0, iterations=None,
        restarts=0, oracle=False, update_as="gradient", aware=None,
    )  # fmt: skip
    campaign.save(folder / "attacks", "gradient", outcome.figures)
    audit: JsonObject = {}
    if config.built_recipe().private:
        audit, _ = campaign.audit_run(folder, canaries_count=300)
        campaign.save(folder / "attacks", "audit", audit)
    promised = [row for row in result["ledger"] if (row["observer"], row["unit"]) == ("server", "example")]
    best = min(promised, key=lambda row: ("sound", "nominal", "none").index(row["verdict"]))
    row = {
        "title": title, "run": str(folder), "recipe": result["recipe"], "accuracy": result["test_accuracy"],
        "epsilon": best["epsilon"], "verdict": best["verdict"], "reason": best["reason"],
        "images_rebuilt": outcome.figures["success_rate"], "ssim": outcome.figures["ssim"],
        "audit": audit.get("verdict", "nothing was promised"), "epsilon_shown": audit.get("epsilon_lower"),
    }  # fmt: skip
    return row, outcome.truth[0, 0], outcome.guess[0, 0]


def _draw(pictures: dict[str, object], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    shown, axes = pyplot.subplots(1, len(pictures), figsize=(2.1 * len(pictures), 2.5), layout="constrained")
    for axis, (title, image) in zip(axes, pictures.items(), strict=True):
        flat = np.clip(np.asarray(image), 0, 1)
        axis.imshow(flat[0] if flat.ndim == 3 else flat, cmap="gray_r", vmin=0, vmax=1)
        axis.set_title(title, fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])
    shown.suptitle("What the server rebuilds from one update of one example", fontsize=11)
    shown.savefig(path, dpi=150)
    pyplot.close(shown)


def _show(rows: list[Document], folder: Path) -> None:
    columns = ["", "accuracy", "epsilon to the server", "verdict", "images rebuilt", "audit"]
    print_table(
        "The same digits, the same model, three ways (epsilon per example; images rebuilt by the server)",
        columns,
        [
            [
                row["title"], figure(row["accuracy"], 3), figure(row["epsilon"], 3, missing="none"), row["verdict"],
                f"{row['images_rebuilt']:.0%}", row["audit"],
            ]
            for row in rows
        ],
        right=columns[1:3],
    )  # fmt: skip
    paper = rows[1]
    print(f"Why the paper's epsilon is {paper['verdict']}: {paper['reason']}.")
    print(f"Look: {folder / 'attack.png'} (four pictures side by side) and {folder / 'report.html'}")
    print(f"Next: fedveil ledger {rows[2]['run']} · fedveil attack {rows[2]['run']} --kind all")
