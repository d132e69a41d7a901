"""What gradients of a headline run give away: a closed-form attack on its linear head, and images drawn back from features.

    FEDVEIL_DATA=... FEDVEIL_CACHE=... python -m bench.headline_leak RUN [--round 0] [--victims 8]

An example's gradient of a linear head without bias is an outer product, so whoever reads it has the features exactly; a
sum over many examples gives one direction per label. From features, the image is searched by gradient descent through
the fixed front end, from the public mean of its label. Every figure stands beside what that mean alone gives.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedveil.attacks import campaign, metrics
from fedveil.data.datasets import load
from fedveil.federation.loop import prepare
from fedveil.federation.round import State, Task
from fedveil.federation.store import open_run
from fedveil.federation.view import view
from fedveil.models import features
from fedveil.privacy.calibrate import calibrate

STEPS = 200


def from_one(gradient: np.ndarray) -> tuple[np.ndarray, int]:
    """Features and label of the only example behind a gradient [classes, features]."""
    left, _, right = np.linalg.svd(gradient, full_matrices=False)
    label = int(
        np.argmax(np.abs(left[:, 0]))
    )  # the label's row is the longest, and points away from the example
    return right[0] * -np.sign(left[label, 0]), label


def from_sum(gradient: np.ndarray, label: int) -> np.ndarray:
    """Direction of the label's examples: its row of the sum, turned round."""
    row = -gradient[label]
    return row / np.linalg.norm(row)


def clipped_sum(task: Task, weights: np.ndarray, bound: float) -> np.ndarray:
    """Sum of all clipped gradients of a linear head over all examples, [classes, features]."""
    classes = weights.size // task.x.shape[1]
    total = np.zeros((classes, task.x.shape[1]))
    for at in range(0, len(task.x), 10_000):
        x, y = task.x[at : at + 10_000].astype(np.float64), task.y[at : at + 10_000]
        logits = x @ weights.reshape(classes, -1).T
        error = np.exp(logits - logits.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(len(y)), y] -= 1
        norms = np.linalg.norm(error, axis=1) * np.linalg.norm(x, axis=1)
        total += (error * np.minimum(1, bound / np.maximum(norms, 1e-30))[:, None]).T @ x
    return total


def draw_back(wanted: np.ndarray, front: features.FrontEnd, start: np.ndarray) -> np.ndarray:
    """Images whose features point as wanted [n, features], found by descent from `start` (public means of the labels);
    dark images are preferred, for the features do not tell brightness."""
    centre, directions, variance = features.drawn_directions(start.shape[1:])
    directions = directions[:, : front.components]
    scale = 1 / torch.sqrt(variance[: front.components] + front.ridge)
    target = torch.as_tensor(wanted, dtype=torch.float32)
    coins = torch.Generator().manual_seed(0)
    begin = torch.logit(torch.as_tensor(start, dtype=torch.float32) * 0.9 + 0.03)
    pixels = (begin + 0.3 * torch.randn(start.shape, generator=coins)).requires_grad_()
    descent = torch.optim.Adam([pixels], lr=0.2)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(descent, STEPS)
    for _ in range(STEPS):
        image = torch.sigmoid(pixels)
        seen = (features.energies(image + 1e-4) - centre) @ directions
        unlike = (
            2 - torch.cosine_similarity(seen * scale, target) - torch.cosine_similarity(seen, target / scale)
        )
        loss = unlike.mean() / 2 + 0.5 * image.mean()
        descent.zero_grad()
        loss.backward()
        descent.step()
        slower.step()
    return torch.sigmoid(pixels).detach().numpy()


def nearest(guess: np.ndarray, own: np.ndarray) -> tuple[float, int]:
    """Largest cosine between a guess and the client's examples, and which one it is."""
    close = own @ guess / np.linalg.norm(guess)
    return float(close.max()), int(close.argmax())


def report(path: Path, at: int, victims: int) -> list[dict[str, Any]]:
    """One line per tap."""
    run = open_run(path)
    prepared = prepare(run.config)
    task, config = prepared.task, run.config
    state: State = campaign.initial(prepared) if at == 0 else run.state(at)
    front = features.parse(config.features or "")
    images = load(config.dataset, root=config.data, seed=config.split_seed)
    classes = int(images.classes or 0)
    own = np.asarray(task.rows(0))
    chosen = own[np.random.default_rng(0).permutation(len(own))[:victims]]
    public = prepared.dataset

    def mean_of(label: int) -> np.ndarray:
        mean = public.x_test[public.y_test == label].mean(0)
        return np.asarray(mean / np.linalg.norm(mean))

    def pictures(guesses: np.ndarray, truth: np.ndarray, labels: list[int]) -> dict[str, float]:
        start = np.stack([images.x_test[images.y_test == k].mean(0) for k in labels])
        back = draw_back(guesses, front, start)
        return {
            "mse": float(metrics.mse(truth, back).mean()),
            "ssim": float(metrics.ssim(truth, back).mean()),
            "mse_public_mean": float(metrics.mse(truth, start).mean()),
            "ssim_public_mean": float(metrics.ssim(truth, start).mean()),
        }

    rows = []
    seen = view(task, state, "type2", 0, chosen)
    found = [from_one(g.reshape(classes, -1)) for g in seen.values]
    guesses = np.stack([x for x, _ in found])
    cosines = [float(g @ task.x[r]) for g, r in zip(guesses, chosen, strict=True)]
    rows.append({
        "tap": "each example's clipped gradient (in the client's memory)", "cosine": float(np.mean(cosines)),
        "labels": float(np.mean([k == task.y[r] for (_, k), r in zip(found, chosen, strict=True)])),
        **pictures(guesses, images.x[chosen], [k for _, k in found]),
    })  # fmt: skip
    labels = sorted(set(task.y[own].tolist()))
    multiplier = calibrate(config.target_epsilon or 1.0, config.delta, steps=config.rounds).noise_multiplier
    bound = float(config.protect["clip.bound"])
    bare = clipped_sum(replace(task, x=task.x[own], y=task.y[own]), state.weights, bound)
    total = clipped_sum(task, state.weights, bound)
    at_once = calibrate(config.target_epsilon or 1.0, config.delta).noise_multiplier
    drawn = bound * np.random.default_rng(1).normal(0, 1, total.shape)
    seen_sum, who = (
        (total, "the sum over all clients") if config.recipe == "sum-cdp" else (bare, "the client's upload")
    )
    taps = {
        "the client's sum before noise": bare,
        f"{who}, one round: what the server sees": seen_sum + multiplier * drawn,
        # The worst case: every round repeats this sum, so that averaging them leaves the noise of a single release.
        f"{who}, all rounds averaged as if alike": seen_sum + at_once * drawn,
    }
    for tap, values in taps.items():
        guesses = np.stack([from_sum(values, k) for k in labels])
        hits = [nearest(g, task.x[own][task.y[own] == k]) for g, k in zip(guesses, labels, strict=True)]
        truth = np.stack([
            images.x[own][task.y[own] == k][i] for (_, i), k in zip(hits, labels, strict=True)
        ])  # fmt: skip
        rows.append(
            {"tap": tap, "cosine": float(np.mean([c for c, _ in hits])), **pictures(guesses, truth, labels)}
        )
    controls = np.stack([mean_of(k) for k in labels])
    hits = [nearest(g, task.x[own][task.y[own] == k]) for g, k in zip(controls, labels, strict=True)]
    truth = np.stack([images.x[own][task.y[own] == k][i] for (_, i), k in zip(hits, labels, strict=True)])
    rows.append({"tap": "control: the public mean of the label, no gradient",
                 "cosine": float(np.mean([c for c, _ in hits])), **pictures(controls, truth, labels)})  # fmt: skip
    extra = {"run": config.name, "round": at, "victims": len(chosen), "signal": float(np.linalg.norm(bare)),
             "noise": multiplier * bound * math.sqrt(bare.size)}  # fmt: skip
    return [{**extra, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--round", type=int, default=0)
    parser.add_argument("--victims", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for row in report(given.run, given.round, given.victims):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
