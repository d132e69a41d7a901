"""Small networks, plans and works on which the engines must agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedveil.models.layout import flatten, layout_of
from fedveil.protect.law import LAWS, Staircase
from fedveil.protect.noised import Drawing
from fedveil.training.contract import ClientWork, LocalPlan, LocalResult

STEPS = 3
FIELDS = tuple(LocalResult.__dataclass_fields__)


@dataclass(frozen=True)
class Case:
    module: nn.Module
    start: np.ndarray
    x: np.ndarray
    y: np.ndarray


def build(make: Any, shape: tuple[int, ...], classes: int | None, seed: int = 0, rows: int = 40) -> Case:
    """A module from `make()` with fixed weights, and random data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make()
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, *shape)).astype(np.float32)
    y = draw.normal(size=rows).astype(np.float32) if classes is None else draw.integers(0, classes, rows)
    return Case(module, flatten(module), x, y)


def everything_net() -> nn.Sequential:
    """Every kind of stackable layer: padding, stride, biases and none, pools that drop a row, GroupNorm."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 5, 2, stride=1, bias=False), nn.Tanh()),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 3),
    )  # fmt: skip


def everything(seed: int = 0) -> Case:
    return build(everything_net, (2, 7, 7), 3, seed)


def mlp(classes: int | None = 3, seed: int = 0) -> Case:
    return build(
        lambda: nn.Sequential(
            nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, classes or 1)
        ),
        (7,),
        classes,
        seed,
    )


def plan(steps: int = STEPS, **changes: Any) -> LocalPlan:
    """A plan whose bounds bind for some examples and not for others."""
    basis: dict[str, Any] = {
        "steps": steps,
        "learning_rate": 0.1,
        "expected_batch": 4.0,
        "bounds": tuple(0.5 - 0.05 * (i % 5) for i in range(steps)),
        "multipliers": tuple(0.1 + 0.05 * (i % 3) for i in range(steps)),
    }
    return planned(**{**basis, **changes})


def planned(
    *args: Any, noise: str = "none", multipliers: tuple[float, ...] = (), noise_on: str = "sum", nu: float | None = None,
    width: float = 1.0, grid: float = 0.0, **rest: Any,
) -> LocalPlan:  # fmt: skip
    """A plan with noise of `multipliers` times its bounds, made here by hand and not by the code under test."""
    quiet = LocalPlan(*args, **rest)
    if noise == "none":
        return quiet
    law: Any = LAWS[noise]
    stairs = isinstance(law, Staircase)
    law = replace(law, nu=nu, width=width) if stairs else law
    on = {"sum": 1.0, "mean": quiet.expected_batch, "example": quiet.expected_batch**0.5}[noise_on]
    made = [
        Drawing(
            law,
            scale=(bound * width if stairs else bound * multiplier) * on * (multiplier > 0),
            shape=multiplier / width if stairs else 0.0,
            norm=quiet.clip_norm,
            grid=grid,
            at_norm=bound if quiet.follows else 0.0,
            at_count=quiet.expected_batch if noise_on == "example" else 0.0,
        )
        for bound, multiplier in zip(quiet.bounds, multipliers, strict=True)
    ]
    return replace(quiet, noised=tuple(made))


def works(
    case: Case,
    clients: int = 5,
    steps: int = STEPS,
    batch: int = 4,
    *,
    poisson: bool = False,
    vectors: tuple[str, ...] = (),
    seed: int = 0,
) -> list[ClientWork]:
    """Clients with random rows; with `poisson` batches vary and some are empty."""
    draw = np.random.default_rng(seed)
    size = layout_of(case.module).size
    out = []
    for k in range(clients):
        rows = draw.integers(0, len(case.x), (steps, batch)).astype(np.int32)
        if poisson:
            for step in range(steps):
                rows[step, draw.integers(0, batch + 1) :] = -1
        given = {name: draw.normal(scale=0.1, size=size).astype(np.float32) for name in vectors}
        if "scale" in given:
            given["scale"] = np.abs(given["scale"]) + np.float32(0.1)
        out.append(ClientWork(k, rows, draw.bytes(16), **given))
    return out


def train(module: Any, case: Case, work: list[ClientWork], what: LocalPlan, **options: Any) -> LocalResult:
    return module.train(case.module, case.start, case.x, case.y, work, what, **options)


def largest_difference(a: LocalResult, b: LocalResult) -> float:
    """Over all fields; relative for values above 1."""
    worst = 0.0
    for name in FIELDS:
        one, other = (np.asarray(getattr(r, name), float) for r in (a, b))
        assert one.shape == other.shape, name
        if one.size:
            worst = max(worst, float(np.max(np.abs(one - other) / np.maximum(1, np.abs(one)))))
    return worst


def same_bits(a: LocalResult, b: LocalResult) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in FIELDS)
