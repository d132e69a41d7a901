"""Draws docs/images/leakage.png: what a server rebuilds from one client's update, without and with noise.

FEDVEIL_DATA=... python -m bench.leakage_picture docs/images/leakage.png
"""

from __future__ import annotations

import sys

import matplotlib
import numpy as np
import torch

from fedveil.attacks import campaign
from fedveil.attacks.leakage import measure
from fedveil.federation.loop import prepare
from fedveil.privacy.accountants import answer
from fedveil.privacy.events import Event, Noise

SIGMA = 2.0  # one release of a gradient clipped to 1, no amplification


def main(path: str, victims: int = 8, seed: int = 7) -> None:
    torch.set_num_threads(1)
    epsilon = answer([Event(Noise("gaussian", SIGMA))], 1e-5, "pld").epsilon
    rows = (
        ("non-private", {}, "without privacy\nthe server rebuilds"),
        ("fed-cdp-sound", {"sigma": SIGMA}, f"with ε = {epsilon:.1f}\nthe server rebuilds"),
    )
    strips: list[tuple[str, np.ndarray, str]] = []
    for recipe, changes, title in rows:
        config = campaign.gradient_config(
            recipe, "mnist", "cpl-lenet", victims=victims, seed=seed, tap="type0", batch=1, changes=changes
        )
        prepared = prepare(config)
        outcome = measure.measure(prepared, campaign.initial(prepared), tap="type0", victims=victims, seed=seed)
        if not strips:
            strips.append(("a client's\nprivate image", outcome.truth[:, 0, 0], ""))
        found = round(outcome.figures["success_rate"] * victims)
        strips.append((title, np.clip(outcome.guess[:, 0, 0], 0, 1), f"{found} of {victims}"))
        print(recipe, outcome.figures["success_rate"])
    draw(path, strips)


def draw(path: str, strips: list[tuple[str, np.ndarray, str]]) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(strips[0][1])
    figure, axes = pyplot.subplots(len(strips), count, figsize=(9.6, 3.7), layout="constrained")
    for row, (title, images, found) in enumerate(strips):
        for column in range(count):
            axes[row, column].imshow(images[column], cmap="gray", vmin=0, vmax=1)
            axes[row, column].set(xticks=[], yticks=[])
        axes[row, 0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=12)
        last = axes[row, -1]
        last.text(1.12, 0.5, found, transform=last.transAxes, va="center", fontsize=12, fontweight="bold")
    figure.suptitle("Gradients are not anonymous: one training step on one image, as it arrives at the server", fontsize=12)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1])
