"""Two sweeps of gradient leakage on MNIST at the papers' untrained net: share pruned, and images per update.

    FEDVEIL_DATA=... python -m bench.leak_sweeps --out docs/reproduction [--seed 0] [--only pruning|batch]

Both look at one update of one local step as the server receives it (type 0). Finished points are kept in
OUT/leak-sweeps.jsonl and not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from fedveil.attacks import campaign
from fedveil.attacks.leakage import measure
from fedveil.federation.loop import prepare
from fedveil.federation.store import append_line, read_lines

PRUNED = (0.0, 0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
BATCHES = ((1, 16), (2, 8), (4, 8), (8, 4), (16, 2), (32, 2), (64, 1), (100, 1))  # images, updates
KEPT = (
    "victims",
    "batch",
    "method",
    "success_rate",
    "label_accuracy",
    "rmse",
    "ssim",
    "cpu_seconds_per_victim",
)


def point(
    name: str,
    recipe: str,
    method: str,
    victims: int,
    batch: int,
    seed: int,
    change: dict[str, Any],
    dataset: str = "mnist",
) -> dict[str, Any]:
    """One attacked setting as a line of results."""
    config = campaign.gradient_config(
        recipe, dataset, "cpl-lenet", victims=victims, seed=seed, tap="type0", batch=batch, changes=change
    )
    prepared = prepare(config)
    found = measure.measure(
        prepared,
        campaign.initial(prepared),
        method=method,
        tap="type0",
        victims=victims,
        seed=seed,  # type: ignore[arg-type]
    ).figures
    controls = {f"{c}_rmse": found["controls"][c]["rmse"] for c in ("black", "mean")}
    return {"name": name, "seed": seed, **{k: found[k] for k in KEPT}, **controls, **change}


def jobs(only: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments of `point`) of every point."""
    found: list[tuple[str, dict[str, Any]]] = []
    if only != "batch":
        found += [
            (f"pruning|{method}|{share}", {"recipe": "gradient-pruning", "method": method, "victims": 16, "batch": 1,
                                           "change": {"prune": share}})
            for method in ("cpl", "veil") for share in PRUNED
        ]  # fmt: skip
    if only != "pruning":
        found += [
            (
                f"batch|{size}",
                {"recipe": "non-private", "method": "veil", "victims": count, "batch": size, "change": {}},
            )
            for size, count in BATCHES
        ]
    return found


def page(lines: dict[str, dict[str, Any]], seed: int) -> str:
    """Both tables as Markdown."""
    out = ["# Leakage against pruning and batch size (MNIST)", "", "    python -m bench.leak_sweeps", ""]
    out += [f"Untrained CPL LeNet, one update of one local step as the server receives it, seed {seed}. Success: MSE < 0.01 and "
            "SSIM > 0.8. The picture kept is the one with the lowest matching loss.", "",
            "![Leakage against pruning and batch size](leak-sweeps.png)", ""]  # fmt: skip
    out += ["## Share of the update pruned (smallest coordinates first), one image per update, 16 victims", "",
            "| pruned | `cpl` success | RMSE | SSIM | `veil` success | RMSE | SSIM | labels |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for share in PRUNED:
        a, b = lines[f"pruning|cpl|{share}"], lines[f"pruning|veil|{share}"]
        out.append(f"| {share:.0%} | {a['success_rate']:.2f} | {a['rmse']:.3f} | {a['ssim']:.2f} | {b['success_rate']:.2f} | "
                   f"{b['rmse']:.3f} | {b['ssim']:.2f} | {b['label_accuracy']:.2f} |")  # fmt: skip
    most = {
        m: max((s for s in PRUNED if lines[f"pruning|{m}|{s}"]["success_rate"] >= 0.5), default=0.0)
        for m in ("cpl", "veil")
    }
    found = (
        f"`cpl` still rebuilds most victims with {most['cpl']:.0%} pruned, `veil` with {most['veil']:.0%} "
    )
    found += "(both leave the dropped coordinates out of the comparison); the paper says that pruning helps beyond 40% on "
    out += ["", found + "MNIST. Labels leak at every share."]
    blind = [
        size for size, _ in BATCHES if lines[f"batch|{size}"]["rmse"] >= lines[f"batch|{size}"]["mean_rmse"]
    ]
    out += ["", "## Images per update, `veil`, labels inferred, images paired by best match", "",
            "| images | updates | success per image | labels | RMSE | SSIM | mean image's RMSE | CPU s per update |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for size, _ in BATCHES:
        r = lines[f"batch|{size}"]
        out.append(f"| {size} | {r['victims']} | {r['success_rate']:.2f} | {r['label_accuracy']:.2f} | {r['rmse']:.3f} | "
                   f"{r['ssim']:.2f} | {r['mean_rmse']:.3f} | {r['cpu_seconds_per_victim']:.1f} |")  # fmt: skip
    if blind:
        nearer = f"From {blind[0]} images on the mean image of public data is nearer to the truth than what the attack finds"
        out += ["", nearer + "; the labels of the whole batch are still inferred."]
    return "\n".join([*out, ""])


def picture(lines: dict[str, dict[str, Any]], path: Path) -> None:
    """Success and SSIM over both sweeps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, mark in (("cpl", "o"), ("veil", "s")):
        rows = [lines[f"pruning|{method}|{share}"] for share in PRUNED]
        left.plot(
            [100 * s for s in PRUNED],
            [r["success_rate"] for r in rows],
            marker=mark,
            label=f"{method}, success",
        )
        left.plot(
            [100 * s for s in PRUNED], [r["ssim"] for r in rows], marker=mark, ls=":", label=f"{method}, SSIM"
        )
    left.set(xlabel="pruned, % of the update", ylim=(-0.05, 1.05), title="Pruning, one image")
    rows = [lines[f"batch|{size}"] for size, _ in BATCHES]
    sizes = [size for size, _ in BATCHES]
    for key, name in (("success_rate", "success per image"), ("ssim", "SSIM"), ("label_accuracy", "labels")):
        right.plot(sizes, [r[key] for r in rows], marker="o", label=name)
    right.set_xscale("log", base=2)
    right.set_xticks(sizes, [str(s) for s in sizes])
    right.set(xlabel="images per update", ylim=(-0.05, 1.05), title="Batch size, veil")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=("pruning", "batch", ""), default="")
    options.add_argument("--most", type=int, default=1000, help="stop after so many points")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    chosen.out.mkdir(parents=True, exist_ok=True)
    file = chosen.out / "leak-sweeps.jsonl"
    lines = {line["name"]: line for line in read_lines(file)} if file.exists() else {}
    left = [(name, job) for name, job in jobs(chosen.only) if name not in lines][: chosen.most]
    for name, job in left:
        lines[name] = point(name, seed=chosen.seed, **job)
        append_line(file, lines[name])
        print(json.dumps(lines[name]), flush=True)
    if all(name in lines for name, _ in jobs("")):
        (chosen.out / "leak-sweeps.md").write_text(page(lines, chosen.seed), "utf-8")
        picture(lines, chosen.out / "leak-sweeps.png")


if __name__ == "__main__":
    main()
