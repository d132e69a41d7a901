"""What is raced: a model, a batch size, and how many clients a fair stack has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedveil.models import nets
from fedveil.models.layout import flatten
from fedveil.training.contract import ClientWork, LocalPlan

BOUND, SIGMA, LEARNING_RATE = 4.0, 1.0, 0.05
ROWS = 600


@dataclass(frozen=True)
class Case:
    """One race. `clients` x `steps` client-iterations make one run of a stacked engine; rivals that train one
    client at a time run `one_client_steps`."""

    name: str
    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int
    clients: int
    steps: int
    one_client_steps: int


def lenet() -> nn.Sequential:
    """LeNet-5 with padding, biases and tanh."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip


def cifar_cnn() -> nn.Sequential:
    """Two padded convolutions with biases on 32x32 colour images."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 10),
    )  # fmt: skip


def _net(name: str, shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
    return lambda: nets.build(name, shape, classes, 0)


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return build


MNIST = (1, 28, 28)
CASES = {
    case.name: case
    for case in (
        Case("cnn", "MNIST CNN, B=5", _net("papers-cnn", MNIST, 10), MNIST, 10, 5, 14, 5, 24),
        Case("adult", "MLP 105-64-32-2, B=3", _net("papers-mlp", (105,), 2), (105,), 2, 3, 64, 20, 60),
        Case("cancer", "MLP 30-64-32-2, B=4", _net("papers-mlp", (30,), 2), (30,), 2, 4, 64, 20, 60),
        Case(
            "central600", "MNIST CNN, central, B=600", _net("papers-cnn", MNIST, 10), MNIST, 10, 600, 1, 1, 1
        ),
        Case("lenet", "LeNet, padding and biases, B=5", _seeded(lenet), MNIST, 10, 5, 8, 8, 24),
        Case("cifar", "CIFAR CNN, padding and biases, B=4", _seeded(cifar_cnn), (3, 32, 32), 10, 4, 8, 4, 16),
    )
}


@dataclass(frozen=True)
class Material:
    """A case with its (random) data and everybody's rows."""

    case: Case
    module: nn.Module
    start: np.ndarray
    x: torch.Tensor
    y: torch.Tensor
    work: tuple[ClientWork, ...]


def material(case: Case) -> Material:
    """Random pixels: arithmetic does not depend on what they show."""
    draw = np.random.default_rng(0)
    x = torch.as_tensor(draw.random((ROWS, *case.shape), np.float32))
    y = torch.as_tensor(draw.integers(0, case.classes, ROWS))
    module = case.make()
    work = tuple(
        ClientWork(
            k,
            np.stack([draw.choice(ROWS, case.batch, replace=False) for _ in range(case.steps)]).astype(
                np.int32
            ),
            draw.bytes(16),
        )
        for k in range(case.clients)
    )
    return Material(case, module, flatten(module), x, y, work)


def plans(case: Case) -> dict[str, LocalPlan]:
    """Private (exact noise on a grid of a millionth of the bound), private with float noise, clipped only, and non-private."""
    basis = {"steps": case.steps, "learning_rate": LEARNING_RATE, "expected_batch": float(case.batch)}
    clip = {"clip": "layer", "bounds": (BOUND,) * case.steps}
    noise = {"noise": "gaussian", "multipliers": (SIGMA,) * case.steps}
    return {
        "private": LocalPlan(**basis, **clip, **noise, grid=1e-6 * BOUND),  # type: ignore[arg-type]
        "private, float noise": LocalPlan(**basis, **clip, **noise),  # type: ignore[arg-type]
        "clip only": LocalPlan(**basis, **clip),  # type: ignore[arg-type]
        "non-private": LocalPlan(**basis),  # type: ignore[arg-type]
    }
