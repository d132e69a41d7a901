"""Where noise defeats exact inversion, an imprint and an attack with a prior: one step, the whole epsilon spent on it.

python -m bench.noise_curve run OUT.jsonl [--small]       one line per noise; called again it goes on
python -m bench.noise_curve table OUT.jsonl               the table of docs/attacks.md
python -m bench.noise_curve picture OUT.jsonl PNG         its picture

`fed-cdp-sound` on MNIST, bound 1, no amplification by sampling, delta 1e-5.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.proof import spear_once, staged
from fedveil.attacks.audit.bounds import gaussian_epsilon
from fedveil.attacks.exact import noisy
from fedveil.attacks.malicious import attack
from fedveil.data.datasets import load
from fedveil.federation.config import make_config
from fedveil.federation.loop import prepare
from fedveil.federation.round import start
from fedveil.federation.view import view

DELTA = 1e-5
SIGMAS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.25, 0.5, 1.0, 2.0)


def head(sigma: float, prior: noisy.Prior, images: int) -> tuple[list[float], list[bool]]:
    """Squared errors and label hits of single images behind a linear head; clipping hides lengths, so the truth sets them."""
    values = {"dataset": "mnist", "limit": 6000, "recipe": "fed-cdp-sound", "clients": 2, "partition": "iid", "rounds": 1,
              "local_steps": 1, "batch_size": 1, "learning_rate": 1.0, "model": "logistic",
              "model_options": {"bias": False, "zero": True}}  # fmt: skip
    made = prepare(make_config(values, {"sigma": sigma}))
    errors, labels = [], []
    for row in np.asarray(made.partition.rows(0))[:images]:
        seen = view(made.task, start(made.task, made.initial), "type0", 0, rows=np.array([row])).values
        guess, label = noisy.head_attack(-seen.reshape(1, 10, 784), np.zeros((10, 784)), prior, deviation=sigma, bound=1.0)
        truth = made.task.x[row].reshape(-1)
        scale = float(truth @ guess / max(guess @ guess, 1e-12))
        errors.append(float(np.mean((np.clip(scale * guess, 0, 1) - truth) ** 2)))
        labels.append(label == int(made.task.y[row]))
    return errors, labels


def measured(sigma: float, prior: noisy.Prior, small: bool) -> dict[str, Any]:
    """All three attacks at one noise."""
    tries = 2 if small else 6
    changes = {"sigma": sigma}
    spears = [spear_once(staged("fed-cdp-sound", 4, 200, seed, changes), 4, seed) for seed in range(tries)]
    stage = attack.stage("fed-cdp-sound", "mnist", bins=512, batch=32, changes={**changes, "limit": 6000})
    stolen = attack.steal(stage, "imprint", batch=32)
    errors, labels = head(sigma, prior, 8 * tries)
    return {"sigma": sigma, "epsilon": gaussian_epsilon(1 / sigma, DELTA) if sigma > 5e-3 else None,
            "exact": float(np.mean(spears)), "batches": tries, "imprint": stolen.share, "imprint_interval": stolen.interval,
            "control": stolen.control, "mse": float(np.mean(errors)), "label": float(np.mean(labels)),
            "images": len(errors)}  # fmt: skip


def run(out: Path, small: bool) -> None:
    done = {json.loads(line)["sigma"] for line in out.read_text().splitlines()} if out.exists() else set()
    data = load("mnist", limit=6000)
    prior = noisy.prior_of(data.x_test[:2000])
    blind = float(np.mean([np.mean((np.clip(prior.mean, 0, 1) - x.reshape(-1)) ** 2) for x in data.x[:200]]))
    with out.open("a") as file:
        for sigma in SIGMAS:
            if sigma not in done:
                file.write(json.dumps({**measured(sigma, prior, small), "blind": blind}) + "\n")
                file.flush()


def rows(out: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda row: row["sigma"])


def _short(epsilon: float) -> str:
    return f"{epsilon:,.0f}" if epsilon >= 100 else f"{epsilon:.3g}"


def table(out: Path) -> None:
    for row in rows(out):
        told = "–" if row["epsilon"] is None else _short(row["epsilon"])
        low, high = row["imprint_interval"]
        stolen = f"{row['imprint']:.2f} [{low:.2f}, {high:.2f}] ({row['control']:.2f})"
        print(f"| {row['sigma']:g} | {told} | {row['exact']:.2f} | {stolen} | {row['mse']:.4f} | {row['label']:.2f} |")
    print(f"prior alone: MSE {rows(out)[0]['blind']:.4f}")


def picture(out: Path, png: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = rows(out)
    sigma = [row["sigma"] for row in found]
    figure, axis = pyplot.subplots(figsize=(8.4, 4.2), layout="constrained")
    blind = found[0]["blind"]
    lines = {
        "exact inversion: images of a batch of 4": [row["exact"] for row in found],
        "imprint: images of a batch of 32": [row["imprint"] for row in found],
        "prior and likelihood: error removed from one image": [max(0.0, 1 - row["mse"] / blind) for row in found],
        "its label (chance: 0.1)": [row["label"] for row in found],
    }
    for (name, values), style in zip(lines.items(), ("o-", "s-", "^-", "x--"), strict=True):
        axis.plot(sigma, values, style, label=name)
    axis.set(xscale="log", xlabel="noise multiplier (one step, bound 1)", ylabel="share recovered", ylim=(-0.03, 1.05))
    known = [row for row in found if row["epsilon"] is not None]
    above = axis.twiny()
    above.set(xscale="log", xlim=axis.get_xlim(), xlabel="ε at δ = 1e-5")
    above.set_xticks([row["sigma"] for row in known], [_short(row["epsilon"]) for row in known], fontsize=8, rotation=40)
    above.minorticks_off()
    figure.legend(*axis.get_legend_handles_labels(), fontsize=9, loc="outside lower center", ncols=2)
    figure.savefig(png, dpi=110)


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[2])
    if sys.argv[1] == "run":
        run(place, "--small" in sys.argv)
    elif sys.argv[1] == "table":
        table(place)
    else:
        picture(place, sys.argv[3])
