"""CPU per victim: our batched attack against one-by-one torch.optim.LBFGS, in one interleaved run.

    FEDVEIL_DATA=... python bench/attack_bench.py [--victims 32] [--rounds 2] [--wolfe]

Both attack the same untrained CPL LeNet with the same victims and inferred labels on one thread. The one-by-one
attack is the published one: patterned start, squared distance, torch's L-BFGS (learning rate 1, up to 300 steps of
20 inner iterations), stopped as soon as its relative loss is 1e-7 (at which images are solved), with and without
torch's strong-Wolfe line search. Ours is `veil` and our own `cpl`, each at its default budget. Success is the
strict threshold (MSE < 0.01 and SSIM > 0.8) after clamping.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from fedveil.attacks import metrics
from fedveil.attacks.leakage.objective import Leak, infer_labels, predictor
from fedveil.attacks.leakage.search import _tiles, attack
from fedveil.data.datasets import load
from fedveil.models.layout import flatten, layout_of
from fedveil.models.nets import build


def one_by_one(net, target, label, start, line_search):
    """The published attack on one victim with torch's own optimiser."""
    image = start.clone().requires_grad_()
    size = float(target.square().sum())
    optimiser = torch.optim.LBFGS([image], lr=1, line_search_fn=line_search)
    parameters = list(net.parameters())
    best = [float("inf"), start]

    def closure():
        optimiser.zero_grad()
        found = torch.autograd.grad(cross_entropy(net(image), label), parameters, create_graph=True)
        loss = sum(
            (g.reshape(-1) - t).square().sum()
            for g, t in zip(found, target.split([p.numel() for p in parameters]), strict=True)
        )
        loss.backward()
        if float(loss.detach()) < best[0]:
            best[:] = [float(loss.detach()), image.detach().clone()]
        return loss

    for _ in range(300):
        loss = float(optimiser.step(closure).detach())
        if best[0] <= 1e-7 * size or not np.isfinite(loss):
            break
    return best[1]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--victims", type=int, default=32)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--wolfe", action="store_true", help="also race torch's strong-Wolfe line search")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    data = load("mnist")
    net = build("cpl-lenet", data.shape, data.classes, chosen.seed)
    weights, layout = torch.as_tensor(flatten(net)), layout_of(net)
    rows = np.random.default_rng(chosen.seed).choice(len(data.x), chosen.victims, replace=False)
    x, y = torch.as_tensor(data.x[rows]), torch.as_tensor(data.y[rows])
    predict = predictor(net, weights, Leak(torch.zeros(1, layout.size), layout))
    leak = Leak(predict(x[:, None], torch.nn.functional.one_hot(y, 10).float()[:, None]).detach(), layout)
    labels = infer_labels(net, weights, leak, torch.as_tensor(data.x_test[:8]), 1, 10)
    start = _tiles(torch.Generator().manual_seed(chosen.seed), chosen.victims, 1, data.shape, (0.0, 1.0))[
        :, 0
    ]

    seconds: dict[str, float] = {}
    success: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}

    def note(name: str, began: float, truth: torch.Tensor, guess: torch.Tensor) -> None:
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - began
        scores = metrics.score(truth.numpy(), guess.numpy())
        success.setdefault(name, []).extend(scores.success().tolist())
        errors.setdefault(name, []).extend(scores.mse.tolist())

    share = np.array_split(np.arange(chosen.victims), chosen.rounds)
    for part in share:
        searches = {"torch one by one": None} | (
            {"torch one by one, strong Wolfe": "strong_wolfe"} if chosen.wolfe else {}
        )
        for name, search in searches.items():
            for v in part:
                began = time.process_time()
                guess = one_by_one(net, leak.values[v], labels[v], start[v : v + 1], search)
                note(name, began, x[v : v + 1], guess)
        for method in ("veil", "cpl"):
            began = time.process_time()
            found = attack(method, net, weights, leak, shape=data.shape, classes=10, seed=chosen.seed)
            note(f"fedveil {method}", began, x, found.images[:, 0])
    table = {
        name: {
            "cpu_seconds_per_victim": seconds[name] / len(hits),
            "success_rate": float(np.mean(hits)),
            "median_mse": float(np.median(errors[name])),
            "attacks": len(hits),
        }
        for name, hits in success.items()
    }
    base = table["torch one by one"]["cpu_seconds_per_victim"]
    for row in table.values():
        row["times_less_cpu"] = base / row["cpu_seconds_per_victim"]
    print(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
