"""What is raced: a model, a batch size, and how many clients a fair stack has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedveil.models import nets
from fedveil.models.layout import flatten
from fedveil.models.minilm import Block, MiniLM
from fedveil.models.surgery import lora
from fedveil.protect.law import Gaussian
from fedveil.protect.noised import Drawing
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
    words: int = 0  # inputs are token numbers below this


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


def wide_resnet() -> nn.Module:
    """WRN-16-4 with GroupNorm: three groups of two residual blocks, 64, 128 and 256 channels."""
    blocks: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    before = 16
    for stage, channels in enumerate((64, 128, 256)):
        blocks += [nets.Residual(before, channels, 2 if stage else 1, 16), nets.Residual(channels, channels, 1, 16)]
        before = channels
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def mobile_net() -> nn.Module:
    """Inverted residuals with depth-wise convolutions, as in MobileNet, with GroupNorm."""

    def block(before: int, after: int, stride: int) -> nn.Sequential:
        wide = 4 * before
        return nn.Sequential(
            nn.Conv2d(before, wide, 1, bias=False), nn.GroupNorm(8, wide), nn.Hardswish(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.GroupNorm(8, wide), nn.Hardswish(),
            nn.Conv2d(wide, after, 1, bias=False), nn.GroupNorm(8, after),
        )  # fmt: skip

    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16), nn.Hardswish(), block(16, 24, 2), block(24, 32, 2),
        block(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class Encoder(nn.Module):
    """Four transformer blocks of width 128 on 64 vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(128, 4, 512, 1e-5) for _ in range(4))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = torch.ones(len(x), 1, 1, x.shape[1])
        for block in self.blocks:
            x = block(x, keep)
        return self.head(x.mean(1))


def minilm_lora() -> nn.Module:
    """MiniLM's architecture (its weights do not change the arithmetic) with adapters of rank 8 on the attention."""
    net = MiniLM(classes=2)
    return lora(net, 8, layers="attention", also=("head",))


MNIST = (1, 28, 28)
COLOUR = (3, 32, 32)
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
        Case("resnet18", "ResNet-18, GroupNorm, B=12", _net("resnet18-gn", COLOUR, 10), COLOUR, 10, 12, 1, 1, 1),
        Case("wrn16", "WRN-16-4, GroupNorm, B=12", _seeded(wide_resnet), COLOUR, 10, 12, 1, 1, 1),
        Case("mobile", "MobileNet-like, GroupNorm, B=12", _seeded(mobile_net), COLOUR, 10, 12, 1, 2, 2),
        Case("transformer", "Transformer, 4 blocks, d=128, 64 tokens, B=12", _seeded(Encoder), (64, 128), 10, 12, 1, 2, 2),
        Case("lora", "MiniLM with LoRA, 64 tokens, B=8", _seeded(minilm_lora), (64,), 2, 8, 1, 1, 1, words=30522),
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
    pixels = draw.integers(1, case.words, (ROWS, *case.shape)) if case.words else draw.random((ROWS, *case.shape))
    x = torch.as_tensor(pixels.astype(np.float32))
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
    exact, floats = (Drawing(Gaussian(), SIGMA * BOUND, grid=grid) for grid in (1e-6 * BOUND, 0.0))
    return {
        "private": LocalPlan(**basis, **clip, noised=(exact,) * case.steps),  # type: ignore[arg-type]
        "private, float noise": LocalPlan(**basis, **clip, noised=(floats,) * case.steps),  # type: ignore[arg-type]
        "clip only": LocalPlan(**basis, **clip),  # type: ignore[arg-type]
        "non-private": LocalPlan(**basis),  # type: ignore[arg-type]
    }
