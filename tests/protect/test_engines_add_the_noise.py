"""Practice equals promise without sampling: what every engine adds is, value for value, what the claimed `Noised` draws.

Contributions are clipped to less than half a step of the grid, so the sum rounds to nothing and what is left of the update is
the noise. No chance is involved: keys are fixed, and among two thousand values three percent of scale change many integers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import works
from torch import nn

from fedveil.errors import UserError
from fedveil.models.layout import flatten
from fedveil.protect.law import LAWS
from fedveil.protect.noised import Noised
from fedveil.training import native, pool
from fedveil.training.contract import LocalPlan

BOUND, GRID, BATCH = 2.0**-9, 2.0**-6, 4
SIGMA = {"gaussian": 300.0, "laplace": 300.0, "staircase": 3.0, "joint-staircase": 3.0}
ON = {"sum": 1.0, "mean": float(BATCH), "example": BATCH**0.5}


class Case:
    module: nn.Module
    start: np.ndarray
    x: np.ndarray
    y: np.ndarray


def case() -> Case:
    torch.manual_seed(0)
    found = Case()
    found.module = nn.Sequential(nn.Linear(7, 200), nn.Tanh(), nn.Linear(200, 3))
    found.start = flatten(found.module) * 0 + np.float32(0.5)
    draw = np.random.default_rng(0)
    found.x, found.y = draw.normal(size=(40, 7)).astype(np.float32) * 1000, draw.integers(0, 3, 40)
    return found


def claimed(law: str, noise_on: str, size: int) -> Noised:
    scale, shape = LAWS[law].scale(SIGMA[law], BOUND, size)
    norm = "l1" if law == "joint-staircase" else "l2"
    count = float(BATCH) if noise_on == "example" else 0.0
    return Noised(LAWS[law], scale * ON[noise_on], BOUND, size, shape, norm, GRID, at_count=count)


@pytest.mark.parametrize("engine", ["native", "stacked", "graph", "functional", "reference"])
@pytest.mark.parametrize("law", list(LAWS))
@pytest.mark.parametrize("noise_on", list(ON))
def test_an_update_of_nothing_is_the_claimed_noise_to_the_last_integer(engine, law, noise_on):
    if engine == "native" and not native.available():
        pytest.skip("the compiled extension is not installed")
    if (noise_on == "example" and not LAWS[law].adds_up) or (noise_on == "mean" and not LAWS[law].scales):
        return  # refused as a recipe
    one = case()
    noised = claimed(law, noise_on, len(one.start))
    plan = LocalPlan(
        1, 1.0, float(BATCH), clip="flat", clip_norm=noised.norm, bounds=(BOUND,), noised=(noised.drawing,)
    )
    work = works(one, 2, steps=1, batch=BATCH)
    found = pool.train(one.module, one.start, one.x, one.y, work, plan, engine=engine)
    for row, client in zip(found.delta.astype(np.float64), work, strict=True):
        assert np.array_equal(row, -noised.add(np.zeros(row.size), client.noise_key) / BATCH) and row.any()
    assert found.noise_scale == pytest.approx(noised.deviation, rel=1e-12)
    for factor in (0.97, 1.03):  # the check can fail, from both sides
        what = "shape" if noised.shape else "scale"
        other = replace(noised, **{what: getattr(noised, what) * factor})
        assert not np.array_equal(row, -other.add(np.zeros(row.size), client.noise_key) / BATCH)


def test_a_plan_whose_noise_is_not_one_law_on_one_grid_is_refused():
    one = case()
    first = claimed("gaussian", "sum", len(one.start)).drawing
    for other in (replace(first, grid=0.0), replace(first, law=LAWS["laplace"]), replace(first, at_norm=1.0)):
        plan = LocalPlan(2, 1.0, 4.0, clip="flat", bounds=(BOUND,) * 2, noised=(first, other))
        with pytest.raises(UserError, match="one law and one grid"):
            pool.train(one.module, one.start, one.x, one.y, works(one, 1, steps=2), plan)
