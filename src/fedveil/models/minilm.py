"""A small BERT encoder with mean pooling: the architecture of MiniLM sentence embeddings, in plain torch.

Written without data-dependent control flow, so that it can be traced, frozen, given LoRA adapters and trained privately.
Input: token numbers [n, length] (any number type), 0 for padding. Output: [n, width], or [n, classes] with a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention; `keep` [n, 1, 1, length] is 1 for real tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            part(x).view(n, length, self.heads, self.size).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(self.size) + (keep - 1) * 1e9
        mixed = torch.softmax(scores, -1) @ v
        return self.out(mixed.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width, eps)
        self.inner, self.outer = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, keep))
        return self.norm(x + self.outer(nn.functional.gelu(self.inner(x))))


class MiniLM(nn.Module):
    """Sentence embeddings: the mean of the last layer over real tokens, at length 1; then `classes` outputs, if given."""

    def __init__(
        self,
        words: int = 30522,
        width: int = 384,
        layers: int = 6,
        heads: int = 12,
        inner: int = 1536,
        positions: int = 512,
        eps: float = 1e-12,
        classes: int | None = None,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.segment = nn.Parameter(torch.zeros(width))
        self.norm = nn.LayerNorm(width, eps)
        self.blocks = nn.ModuleList(Block(width, heads, inner, eps) for _ in range(layers))
        self.head = nn.Identity() if classes is None else nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.long()
        real = (tokens != 0).to(self.segment.dtype)
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.words(tokens) + self.places(places) + self.segment
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, real[:, None, None, :])
        pooled = (x * real[:, :, None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
        return self.head(nn.functional.normalize(pooled, dim=1))


def from_tensors(tensors: Mapping[str, Tensor], classes: int | None = None) -> MiniLM:
    """The network with the weights of a BERT checkpoint in the usual names (`encoder.layer.0.attention…`)."""
    words, width = tensors["embeddings.word_embeddings.weight"].shape
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("encoder.layer."))
    inner = tensors["encoder.layer.0.intermediate.dense.weight"].shape[0]
    positions = tensors["embeddings.position_embeddings.weight"].shape[0]
    net = MiniLM(words, width, layers, width // 32, inner, positions, classes=classes)
    short = {
        "attention.query": "attention.self.query", "attention.key": "attention.self.key",
        "attention.value": "attention.self.value", "attention.out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm", "inner": "intermediate.dense", "outer": "output.dense",
        "norm": "output.LayerNorm",
    }  # fmt: skip
    found = {
        "words.weight": tensors["embeddings.word_embeddings.weight"],
        "places.weight": tensors["embeddings.position_embeddings.weight"],
        "segment": tensors["embeddings.token_type_embeddings.weight"][0],
        "norm.weight": tensors["embeddings.LayerNorm.weight"],
        "norm.bias": tensors["embeddings.LayerNorm.bias"],
    }
    for layer in range(layers):
        for ours, theirs in short.items():
            for kind in ("weight", "bias"):
                found[f"blocks.{layer}.{ours}.{kind}"] = tensors[f"encoder.layer.{layer}.{theirs}.{kind}"]
    net.load_state_dict({**net.state_dict(), **{name: value.float() for name, value in found.items()}})
    return net
