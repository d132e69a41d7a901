"""Draws docs/images/measure.png: reconstructions from single gradients under three recipes.

FEDVEIL_DATA=... python bench/leakage_picture.py docs/images/measure.png
"""

from __future__ import annotations

import sys

import matplotlib
import numpy as np
import torch

from fedveil.attacks import campaign
from fedveil.attacks.leakage import measure
from fedveil.federation.loop import prepare

ROWS = (
    ("non-private", "no protection"),
    ("fed-cdp", "Fed-CDP, σ=6,\nnoise on the sum"),
    ("fed-cdp-example", "Fed-CDP, σ=6,\nnoise per example"),
)


def main(path: str, victims: int = 8, seed: int = 7) -> None:
    torch.set_num_threads(1)
    strips: list[tuple[str, np.ndarray]] = []
    for recipe, title in ROWS:
        config = campaign.gradient_config(recipe, "mnist", "cpl-lenet", victims=victims, seed=seed, tap="type2")
        prepared = prepare(config)
        outcome = measure.measure(prepared, campaign.initial(prepared), tap="type2", victims=victims, seed=seed)
        if not strips:
            strips.append(("private images", outcome.truth[:, 0, 0]))
        strips.append((title, np.clip(outcome.guess[:, 0, 0], 0, 1)))
        print(recipe, "success rate", outcome.figures["success_rate"])
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(strips), victims, figsize=(8.6, 4.1), layout="constrained")
    for row, (title, images) in enumerate(strips):
        for column in range(victims):
            axes[row, column].imshow(images[column], cmap="gray", vmin=0, vmax=1)
            axes[row, column].set(xticks=[], yticks=[])
        axes[row, 0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9)
    figure.suptitle("What reading single gradients in a client's memory gives away", fontsize=10)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1])
