"""The headline table: planned runs on every dataset, observer and budget, over several seeds.

    FEDVEIL_DATA=... FEDVEIL_CACHE=... python -m bench.headline --results headline.jsonl [--only mnist:B:100:0.823] …
    python -m bench.headline --results headline.jsonl --show        prints docs/headline.md's table
    python -m bench.headline --results headline.jsonl --variant "float noise"   the same runs with float32 noise (nominal)
    python -m bench.headline --results headline.jsonl --pairs       exact against float noise, paired by seed
    python -m bench.headline --results path.jsonl --path            one choice changed at a time (MNIST, epsilon 0.823)

Each line of the results is one run, found again by its name: an interrupted bench goes on where it stopped. A run is
exactly `fedveil plan --dataset … --epsilon … --clients … --observer … --out plan.toml` followed by
`fedveil run plan.toml --set seed=S --set split_seed=S`. No run is chosen or left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUDGETS = (0.823, 0.3, 2.0, 8.0)
# dataset, observer's letter, clients, seeds
CASES = (
    ("mnist", "B", 100, 5),
    ("mnist", "A", 100, 5),
    ("mnist", "A", 1000, 5),
    ("fashion_mnist", "B", 100, 5),
    ("fashion_mnist", "A", 100, 5),
    ("adult", "B", 100, 5),
    ("adult", "A", 100, 5),
    ("cancer", "B", 10, 20),
    ("cancer", "A", 10, 20),
    ("cifar10", "B", 100, 5),
    ("cifar10", "A", 100, 5),
    ("lfw", "B", 10, 5),
    ("lfw", "A", 10, 5),
)
OBSERVER = {"A": "server", "B": "sum"}


# What one choice is worth: changes to the planned configuration of MNIST, travel (learning rate x bound x rounds) kept.
VARIANTS: dict[str, dict[str, Any]] = {
    "as planned": {},
    "no whitening (ridge = 1)": {"features": "scattering:components={components},ridge=1"},
    "100 directions": {"features": "scattering:components=100,ridge=0.0003"},
    "300 directions": {"features": "scattering:components=300,ridge=0.0003"},
    "1500 directions": {"features": "scattering:components=1500,ridge=0.0003"},
    "clip bound 1.4 (nothing clipped)": {"clip": 1.4},
    "clip bound 0.02": {"clip": 0.02},
    "5 rounds": {"rounds": 5},
    "20 rounds": {"rounds": 20},
    "200 rounds": {"rounds": 200},
    "no averaging": {"average": 0.0},
    "random start, with bias": {"model_options": {}},
    "Poisson batches of a tenth": {"batch": 0.1},
    "half the travel": {"travel": 0.5},
    "twice the travel": {"travel": 2.0},
}
FLOAT = {"float noise": {"grid": 0.0}}  # the same keys, float32 noise: what the exact noise is compared with


def vary(values: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The configuration with one choice changed."""
    out = {**values, "protect": dict(values["protect"])}
    for key, value in change.items():
        if key == "clip":
            out["learning_rate"] *= out["protect"]["clip.bound"] / value
            out["protect"]["clip.bound"] = value
        elif key == "rounds":
            out["learning_rate"] *= out["rounds"] / value
            out["rounds"] = value
        elif key == "travel":
            out["learning_rate"] *= value
        elif key == "batch":
            out["batch_size"] = value * out["batch_size"]
            out["protect"]["sampling"] = "poisson"
        elif key == "grid":
            out["protect"]["grid"] = value
        elif key == "features":
            out["features"] = value.format(components=out["features"].split("=")[1].split(",")[0])
        else:
            out[key] = value
    return out


def config_for(
    dataset: str, letter: str, clients: int, epsilon: float, seed: int, change: dict[str, Any]
) -> Any:
    """The planned configuration; epsilon 0 stands for the plan of epsilon 8 without noise."""
    from fedveil.federation import planner
    from fedveil.federation.config import make_config

    shape = planner.KNOWN[dataset]
    found = planner.plan(shape, epsilon=epsilon or 8.0, clients=clients, observer=OBSERVER[letter])
    values = vary(planner.config_of(found, shape, dataset), change)
    values |= {"seed": seed, "split_seed": seed, "report": False, "diagnostics": False}
    values |= {"evaluate_every": values["rounds"], "checkpoint_every": values["rounds"]}
    if change.get("grid") == 0:  # float noise promises nothing that sigma could be calibrated to: the exact noise's sigma
        values["protect"] = {**values["protect"], "sigma": sigma_of(make_config(without_grid(values)))}
        values |= {"calibrate": False, "target_epsilon": None}
    if epsilon == 0:
        values |= {"calibrate": False, "target_epsilon": None}
        values["protect"] = {**values["protect"], "sigma": 1e-9}
    return make_config(values)


def without_grid(values: dict[str, Any]) -> dict[str, Any]:
    """The same with the default noise."""
    return {**values, "protect": {k: v for k, v in values["protect"].items() if k != "grid"}}


def sigma_of(config: Any) -> float:
    """The noise multiplier that a configuration is calibrated to."""
    from fedveil.federation.loop import prepare
    from fedveil.federation.round import moment_of, start

    prepared = prepare(config)
    (sigma,) = set(moment_of(prepared.task, start(prepared.task, prepared.initial)).sigmas)
    return sigma


def run_one(
    dataset: str, letter: str, clients: int, epsilon: float, seed: int, variant: str = "as planned"
) -> dict[str, Any]:
    """One run in a folder that is thrown away; the lines the table needs."""
    from fedveil.federation.loop import run

    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        config = config_for(dataset, letter, clients, epsilon, seed, (VARIANTS | FLOAT)[variant])
        result = run(config, Path(folder) / "run")
    (row,) = (r for r in result["ledger"] if (r["observer"], r["unit"]) == ("server", "example"))
    return {
        "dataset": dataset,
        "observer": letter,
        "clients": clients,
        "target_epsilon": epsilon,
        "seed": seed,
        "variant": variant,
        "accuracy": result["test_accuracy"],
        "epsilon": row["epsilon"] if epsilon else None,
        "verdict": row["verdict"] if epsilon else "none",
        "rounds": result["rounds"],
        "features": config.features,
        "engine": result["engine"],
        "seconds": round(time.time() - began, 1),
    }


def read(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Finished runs by their name."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    names = ("dataset", "observer", "clients", "target_epsilon", "seed")
    found = {}
    for row in map(json.loads, lines):
        found[(*(row[name] for name in names), row.get("variant", "as planned"))] = row
    return found


def do(path: Path, *name: Any) -> None:
    """Run one case unless it is done, and note it."""
    if name in read(path):
        return
    line = run_one(*name)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def walk(path: Path, letters: Sequence[str]) -> None:
    """Every variant for these observers, three seeds each; then the table."""
    for letter in letters:
        for variant in VARIANTS:
            for seed in range(3):
                do(path, "mnist", letter, 100, 0.823, seed, variant)
    done = read(path)
    print("| one choice changed | B | A, 100 clients |\n|---|---|---|")
    for variant in VARIANTS:
        cells = []
        for letter in "BA":
            found = [r["accuracy"] for k, r in done.items() if k[1] == letter and k[5] == variant]
            few = f" ({len(found)})" if len(found) < 3 else ""
            cells.append(f"{statistics.mean(found):.4f}{few}" if found else "not run")
        print(f"| {variant} | {' | '.join(cells)} |")


def show(path: Path) -> None:
    """The table in Markdown: mean ± standard deviation over seeds; (n) where only n seeds were run."""
    done = read(path)
    budgets = (0.3, 0.823, 2.0, 8.0, 0.0)
    print("| dataset | observer | clients | ε ≤ 0.3 | ε ≤ 0.823 | ε ≤ 2 | ε ≤ 8 | no noise | seeds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for dataset, letter, clients, seeds in CASES:
        cells = []
        for budget in budgets:
            found = [r["accuracy"] for k, r in done.items() if (*k[:4], k[5]) == (dataset, letter, clients, budget, "as planned")]
            spread = f" ± {statistics.stdev(found):.4f}" if len(found) > 1 else ""
            spread += f" ({len(found)})" if len(found) < seeds else ""
            cells.append(f"{statistics.mean(found):.4f}{spread}" if found else "not run")
        print(f"| {dataset} | {letter} | {clients} | {' | '.join(cells)} | {seeds} |")


def pairs(path: Path) -> None:
    """Exact noise minus float noise, paired by seed, at every budget that has both: mean and standard error."""
    done = read(path)
    print("| dataset | observer | clients | ε | exact | float | difference | seeds |")
    print("|---|---|---|---|---|---|---|---|")
    for dataset, letter, clients, seeds in CASES:
        for budget in BUDGETS:
            names = [(dataset, letter, clients, budget, seed) for seed in range(seeds)]
            found = [[done.get((*n, kind)) for kind in ("as planned", "float noise")] for n in names]
            both = [(a["accuracy"], b["accuracy"]) for a, b in found if a and b]
            if len(both) < 2:
                continue
            exact, floats = (statistics.mean(side) for side in zip(*both, strict=True))
            error = statistics.stdev(a - b for a, b in both) / len(both) ** 0.5
            print(
                f"| {dataset} | {letter} | {clients} | {budget:g} | {exact:.4f} | {floats:.4f} "
                f"| {exact - floats:+.4f} ± {error:.4f} | {len(both)} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="dataset[:observer[:clients[:epsilon]]], several allowed; with --path: A or B",
    )
    parser.add_argument("--seeds", type=int, default=20, help="at most so many of each case")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--path", action="store_true")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--variant", default="as planned", choices=[*VARIANTS, *FLOAT])
    given = parser.parse_args()
    if given.path:
        walk(given.results, given.only or "BA")
        return
    if given.pairs:
        pairs(given.results)
        return
    if given.show:
        show(given.results)
        return
    for budget in (*BUDGETS, 0.0):
        for dataset, letter, clients, seeds in CASES:
            name = [dataset, letter, str(clients), f"{budget:g}"]
            if given.only and not any(name[: len(o.split(":"))] == o.split(":") for o in given.only):
                continue
            for seed in range(min(seeds, given.seeds)):
                do(given.results, dataset, letter, clients, budget, seed, given.variant)


if __name__ == "__main__":
    main()
