"""No engine sums gradients of a module that carries something from one example to the next.

What `check_model` cannot see (it tries a model on made-up examples) is held here at the sum itself: either one example moves
it by no more than the bound, or the engine refuses.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.errors import UserError
from fedveil.models.layout import flatten
from fedveil.training import pool
from fedveil.training.contract import ClientWork, LocalPlan

ROWS, BOUND = 32, 0.5


class Running(nn.Module):
    """Subtracts a running mean of all that it has seen, kept where `kind` says."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.dense = kind, nn.Linear(4, 2)
        if kind == "attribute":
            self.mean = 0.0
        else:
            self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        now = 0.5 * self.mean + 0.5 * x.detach().mean()
        if self.kind == "attribute":
            self.mean = float(now)
        elif self.kind == "other":
            self.mean = now.reshape(1)
        elif self.kind == "data":
            self.mean.data.copy_(now.reshape(1))
        else:
            with torch.no_grad():
                self.mean.copy_(now.reshape(1))
        return self.dense(x - self.mean)


class Forced(nn.Module):
    """Every look-up shrinks the row of the table that it finds, which the examples after it see."""

    def __init__(self):
        super().__init__()
        self.table, self.dense = nn.Embedding(4, 8, max_norm=0.1), nn.Linear(8, 2)

    def forward(self, x):
        return self.dense(self.table((x.abs() * 3).long().clamp(max=3)).mean(1))


def summed(module, x, y, rows, engine):
    plan = LocalPlan(1, 0.1, float(ROWS), clip="flat", bounds=(BOUND,), only_sum=True)
    work = ClientWork(0, np.array([rows], np.int32), b"\0" * 16)
    return pool.train(module, flatten(module), x, y, [work], plan, engine=engine).delta[0].astype(np.float64)


class Peak(nn.Module):
    """Divides by the largest value seen so far: it shows in the examples before the largest, or in all that are not it."""

    def __init__(self):
        super().__init__()
        self.dense, self.peak = nn.Linear(4, 2), 1.0

    def forward(self, x):
        self.peak = max(self.peak, float(x.detach().abs().max()))
        return self.dense(x / self.peak)


@pytest.mark.parametrize("engine", ["auto", "functional", "reference"])
@pytest.mark.parametrize("loud", [0, 5, ROWS - 1])
@pytest.mark.filterwarnings("ignore:Engine")
def test_a_hidden_memory_is_found_wherever_the_example_stands_that_fills_it(loud, engine):
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(ROWS, 4)).astype(np.float32), draw.integers(0, 2, ROWS)
    x[loud] = 1e4
    with pytest.raises(UserError, match="after others have passed"):
        summed(Peak(), x, y, range(ROWS), engine)


@pytest.mark.parametrize("engine", ["auto", "graph", "functional", "reference"])
@pytest.mark.parametrize("kind", ["buffer", "other", "data", "attribute", "weights"])
@pytest.mark.filterwarnings("ignore:Engine")
def test_one_example_moves_the_sum_by_no_more_than_the_bound_or_the_engine_refuses(kind, engine):
    torch.manual_seed(0)
    module = Forced() if kind == "weights" else Running(kind)
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(ROWS, 4)).astype(np.float32), draw.integers(0, 2, ROWS)
    x[0] = 1e4
    try:
        whole = summed(module, x, y, range(ROWS), engine)
        without = summed(module, x, y, range(1, ROWS), engine)
    except UserError as refused:
        assert "changes a" in str(refused) or "after others have passed" in str(refused)
        return
    assert np.linalg.norm(whole - without) <= BOUND * (1 + 1e-6)
