"""python -m bench.dying_units [ROUNDS]: why Fed-CDP with a thousand clients climbs and falls back on MNIST.

Plays the papers' default setting (N = 1000, 10 %, C = 4, sigma = 6) and prints after each round the test accuracy, how many of
the outputs of each ReLU are positive on 1,000 test images and how many of its channels never are. 3 s of a core a round.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn

from fedveil.federation.loop import cohort_of, play_round, prepare
from fedveil.federation.round import moment_of, start
from fedveil.models.layout import load
from fedveil.studies.build import federated
from fedveil.studies.jobs import _config, _dataset


def positive(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs, and those of each ReLU."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: seen.append(out))
        for layer in module.modules()
        if isinstance(layer, nn.ReLU)
    ]
    with torch.no_grad():
        out = module(x)
    for hook in hooks:
        hook.remove()
    return out, seen


def main(rounds: int) -> None:
    job = federated("fed-cdp", "mnist")
    prepared = prepare(_config(job, 0), _dataset(job))
    dataset, module = prepared.dataset, prepared.task.module
    x, y = torch.as_tensor(dataset.x_test[:1000]), np.asarray(dataset.y_test[:1000])
    state = start(prepared.task, prepared.initial)
    for number in range(1, rounds + 1):
        now = moment_of(prepared.task, state)
        state, _, private = play_round(prepared, state, cohort_of(prepared, now.number))
        load(module, state.weights)
        out, seen = positive(module, x)
        right = float((out.argmax(1).numpy() == y).mean())
        shares = ", ".join(f"{float((one > 0).float().mean()):.3f}" for one in seen)
        dead = ", ".join(f"{float((one.amax(dim=(0, 2, 3)) <= 0).float().mean()):.2f}" for one in seen)
        norm = float(np.mean(private["norm_mean"]))
        print(f"round {number}: accuracy {right:.3f}, positive {shares}, dead channels {dead}, norm {norm:.0f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
