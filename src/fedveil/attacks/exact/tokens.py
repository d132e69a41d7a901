"""Token sequences from a transformer's gradients, exactly (after Petrov et al. 2024).

The gradient of a value projection is (gradient of its outputs)^T times its inputs, so its row space is spanned by the
embeddings that went in, as long as a batch has fewer tokens than the embedding has dimensions. A vocabulary is finite: each
(token, position) is tested by its distance to that space. In a causal model the inputs of the second block depend on the
prefix only, so sequences are grown token by token by the same test there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.attacks.exact.linear import in_span
from fedveil.models.minilm import MiniLM

TOLERANCE = 1e-3


class Block(nn.Module):
    """One causal block: attention and a ReLU layer, both with residuals and normalisation before them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.before(x)
        scores = self.query(inner) @ self.key(inner).transpose(1, 2) / x.shape[-1] ** 0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        x = x + self.out(weights @ self.value(inner))
        return x + self.down(self.up(self.between(x)).relu())


class TinyText(nn.Module):
    """A small causal classifier of token sequences: embeddings, two blocks, mean, linear head. Token 0 is padding."""

    def __init__(self, vocabulary: int = 500, width: int = 96, longest: int = 16, classes: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.first, self.second = Block(width), Block(width)
        self.head = nn.Linear(width, classes)

    def embed(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.long()
        mask = (ids > 0).to(self.head.weight.dtype)[..., None]
        x = self.second(self.first(self.embed(ids)))
        return self.head((x * mask).sum(1) / mask.sum(1).clamp_min(1))


@dataclass(frozen=True)
class Sequences:
    """candidates: the tokens that fit at each position, whatever the sentence; sentences: whole sequences found."""

    candidates: list[list[int]]
    sentences: list[list[int]]
    rank: int


def fitting_tokens(
    gradient: np.ndarray, inputs: np.ndarray, *, tolerance: float = TOLERANCE, rank: int | None = None
) -> list[list[int]]:
    """For each position the tokens whose first-block input inputs[token, position] lies in the gradient's row space."""
    distance = in_span(inputs.reshape(-1, inputs.shape[-1]), gradient, rank).reshape(inputs.shape[:2])
    return [np.flatnonzero(distance[:, p] < tolerance).tolist() for p in range(inputs.shape[1])]


def grow(
    candidates: Sequence[Sequence[int]], second: np.ndarray, inputs_of: Callable[[np.ndarray], np.ndarray], *,
    tolerance: float = TOLERANCE, most: int = 4096, rank: int | None = None, ends: int = 0,
) -> list[list[int]]:  # fmt: skip
    """Whole sequences: prefixes are kept while the second block's input at their last place fits its gradient.

    inputs_of: token ids [n, length] -> inputs of the second block at the last place [n, width]. ends: the token that pads."""
    alive: list[list[int]] = [[]]
    done: list[list[int]] = []
    for fitting in candidates:
        tokens = [t for t in fitting if t != ends]
        tried = [[*prefix, token] for prefix in alive for token in tokens][:most]
        distance = in_span(inputs_of(np.array(tried)), second, rank) if tried else np.zeros(0)
        kept = [one for one, far in zip(tried, distance, strict=True) if far < tolerance]
        continued = {tuple(one[:-1]) for one in kept}
        done += [prefix for prefix in alive if prefix and tuple(prefix) not in continued]
        alive = kept
    return done + alive


def read(model: TinyText, gradients: dict[str, np.ndarray], *, tolerance: float = TOLERANCE) -> Sequences:
    """The sentences behind one update of a `TinyText`, from the gradients of its two value projections."""
    with torch.no_grad():
        places = model.place.weight.shape[0]
        every = model.token.weight[:, None] + model.place.weight[None, :places]
        inputs = model.first.before(every).numpy()

        def second_inputs(ids: np.ndarray) -> np.ndarray:
            return model.second.before(model.first(model.embed(torch.as_tensor(ids))))[:, -1].numpy()

        first, second = gradients["first.value.weight"], gradients["second.value.weight"]
        found = fitting_tokens(first, inputs, tolerance=tolerance)
        values = np.linalg.svd(np.asarray(first, np.float64), compute_uv=False)
        rank = int((values > 1e-5 * max(values[0], 1e-300)).sum())
        # full rank: everything fits and nothing is learnt
        sentences = grow(found, second, second_inputs, tolerance=tolerance) if rank < first.shape[1] else []
    return Sequences(found if rank < first.shape[1] else [[] for _ in found], sentences, rank)


def recovered(truth: np.ndarray, found: Sequences) -> tuple[float, float]:
    """Share of the tokens that were among the few candidates of their position, and of the sentences found whole."""
    there = [
        int(token) in set(found.candidates[place])
        for row in truth
        for place, token in enumerate(row)
        if token
    ]
    whole = {tuple(s) for s in found.sentences}
    sentences = [tuple(int(t) for t in row if t) in whole for row in truth]
    return float(np.mean(there)), float(np.mean(sentences))


def encoder_candidates(
    model: MiniLM, gradient: np.ndarray, length: int, *, tolerance: float = 0.002, noise: float = 1e-7
) -> list[list[int]]:
    """The tokens at every place behind one update of a `models.minilm.MiniLM`, from the gradient of its first value projection.

    An encoder looks both ways, so tokens come by place and not by sentence. Nothing (empty lists) when the gradient has full
    rank: as many tokens as dimensions, or noise."""
    _, values, right = np.linalg.svd(np.asarray(gradient, np.float64), full_matrices=False)
    rank = int((values > noise * max(values[0], 1e-300)).sum())
    if rank >= gradient.shape[1]:
        return [[] for _ in range(length)]
    basis = torch.as_tensor(right[:rank].T.astype(np.float32))
    found = []
    with torch.no_grad():
        for place in range(length):
            rows = model.norm(model.words.weight + model.places.weight[place] + model.segment)
            inside = (rows @ basis).square().sum(1)
            far = (1 - inside / rows.square().sum(1)).clamp_min(0).sqrt()
            found.append(torch.nonzero(far < tolerance).flatten().tolist())
    return found
