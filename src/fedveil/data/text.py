"""Texts as rows: UTF-8 bytes of equal width, padded with zeros, so that they split and hold out like any other rows.

Rows of bytes are for `features = …`, which turns each text alone into numbers: hashed words, a public tokenizer's
numbers, or a public backbone's embedding (see models.features). A text is cut at `WIDTH` bytes, never inside a letter.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

WIDTH = 1024  # bytes kept of a text; a sentence has about 100
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


def encode(texts: Sequence[str], width: int | None = None) -> np.ndarray:
    """uint8 [n, bytes of the longest text, at most `width` (1024)]; a letter that would be cut is left out."""
    most = width or WIDTH
    rows = [_cut(text.replace("\0", " ").encode("utf-8", "replace"), most) for text in texts]
    out = np.zeros((len(rows), width or max(map(len, rows), default=0) or 1), np.uint8)
    for at, row in enumerate(rows):
        out[at, : len(row)] = np.frombuffer(row, np.uint8)
    return out


def _cut(row: bytes, most: int) -> bytes:
    return row if len(row) <= most else row[:most].decode("utf-8", "ignore").encode("utf-8")


def decode(rows: np.ndarray) -> list[str]:
    """The texts again."""
    return [bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in np.asarray(rows, np.uint8)]


def is_text(x: np.ndarray) -> bool:
    """Whether these rows are texts as `encode` gives them."""
    return x.dtype == np.uint8 and x.ndim == 2


def hashed_words(texts: Sequence[str], width: int) -> np.ndarray:
    """Words and pairs of neighbouring words, each added with a hashed sign at a hashed place; float32 [n, width].

    Counts enter as their square root and rows have length 1. The hash is fixed (no vocabulary is learnt from the texts).

    Formal guarantee: each row is a function of the same text and of constants: neighbouring datasets stay neighbours.
    """
    out = np.zeros((len(texts), width), np.float32)
    for row, text in zip(out, texts, strict=True):
        words = [word.lower() for word in _WORD.findall(text)]
        counts: dict[str, int] = {}
        for word in [*words, *(f"{a} {b}" for a, b in pairwise(words))]:
            counts[word] = counts.get(word, 0) + 1
        for word, count in counts.items():
            mark = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
            row[(mark >> 1) % width] += (1.0 if mark & 1 else -1.0) * count**0.5
        row /= max(float(np.linalg.norm(row)), 1e-6)
    return out
