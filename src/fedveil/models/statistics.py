"""Least squares in one release: a model whose weights are the sums that decide a linear head.

For rows x (with a constant column) and targets y the head solves (sum x xᵀ + ridge) head = sum x yᵀ. While it trains, the
module's outputs are linear in its weights: with the loss "statistics" (`training.losses`) an example's gradient is minus (x
xᵀ, x yᵀ), so one full-batch step of any recipe that noises clipped gradients releases the two sums: clip, place, noise,
ledger, secure sum and deployment are those of every other model. A row whose statistics exceed the clip is scaled down as a
whole: it counts with a smaller weight. In evaluation mode the module solves for the head and predicts with it: post-
processing.

This is AdaSSP (Wang, 2018) with one joint release: the ridge is chosen from the released matrix and the public deviation of
its noise, not from a third release. Entries off the diagonal stand for two and are scaled by the root of 2, so that the norm
of x xᵀ is |x|².

Formal guarantee: none of its own. What is released is a noised sum of clipped per-example vectors, and the recipe states its
event; all that happens here after that looks at the released numbers and at public ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedveil.errors import UserError

MOST_COLUMNS = 1000  # 500,000 sums
FAILS = 0.05  # how often the matrix of the noise is larger than the ridge takes it to be


class Statistics(nn.Module):
    """gram: the upper triangle of the mean of x xᵀ, scaled; cross: the mean of y xᵀ, one row per target (one of ±1 for two
    classes). deviation: of the noise on a weight, a public number that whoever built the run fills in."""

    gram: nn.Parameter
    cross: nn.Parameter
    first: Tensor
    second: Tensor
    scale: Tensor

    def __init__(self, columns: int, outputs: int, bias: bool, classes: bool) -> None:
        super().__init__()
        self.width, self.bias, self.contrast = columns + bias, bias, classes and outputs == 2
        first, second = torch.triu_indices(self.width, self.width)
        self.register_buffer("first", first)
        self.register_buffer("second", second)
        self.register_buffer("scale", torch.where(first == second, 1.0, math.sqrt(2.0)))
        self.gram = nn.Parameter(torch.zeros(len(first)))
        self.cross = nn.Parameter(torch.zeros(1 if self.contrast else outputs, self.width))
        self.deviation = 0.0

    def _rows(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return torch.cat([x, torch.ones_like(x[:, :1])], 1) if self.bias else x

    def forward(self, x: Tensor) -> Tensor:
        rows = self._rows(x)
        if not self.training:
            found = rows @ self.solved().to(rows)
            return torch.cat([-found, found], 1) if self.contrast else found
        products = rows[:, self.first] * rows[:, self.second] * self.scale
        return torch.cat([products @ self.gram[:, None], rows @ self.cross.T], 1)

    def solved(self) -> Tensor:
        """The head [columns, targets] in float64: the smallest eigenvalue of the matrix is lifted to what noise alone reaches."""
        entries = (self.gram.detach() / self.scale).double()
        matrix = entries.new_zeros(self.width, self.width)
        matrix[self.first, self.second] = entries
        matrix[self.second, self.first] = entries
        values, vectors = torch.linalg.eigh(matrix)
        least = max(self.noise_norm(), 1e-9 * float(values.abs().max()), 1e-30)
        lifted = values + max(0.0, least - float(values[0]))
        return vectors @ ((vectors.T @ self.cross.detach().double().T) / lifted[:, None])

    def noise_norm(self) -> float:
        """What the spectral norm of the noise on the matrix stays below, but with probability FAILS."""
        return self.deviation * math.sqrt(self.width * math.log(2 * self.width**2 / FAILS))

    def head(self) -> nn.Linear:
        """The solved head as a plain layer."""
        found = self.solved().float().T
        found = torch.cat([-found, found]) if self.contrast else found
        columns = self.width - self.bias
        layer = nn.Linear(columns, len(found), bias=self.bias)
        with torch.no_grad():
            layer.weight.copy_(found[:, :columns])
            if self.bias:
                layer.bias.copy_(found[:, columns])
        return layer


def statistics(shape: Sequence[int], outputs: int, bias: bool = True, classes: bool = True) -> Statistics:
    """Least squares in one release (AdaSSP). bias: a constant column is added to every row."""
    columns = math.prod(shape)
    if columns > MOST_COLUMNS:
        raise UserError(f"model = adassp: {columns} columns make {columns * (columns + 1) // 2} sums; use at most {MOST_COLUMNS}")
    return Statistics(columns, outputs, bias, classes)
