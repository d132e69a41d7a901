"""Augmented copies of an image, whose gradients are averaged before the clip.

    flip       left and right exchanged, with probability one half
    crop:4     moved by up to so many pixels in each direction; what comes in from outside is 0

Copy c of the example at a place of a step's batch is drawn from (client's key, step, place): runs repeat, whatever the chunk, the
workers or the engine.

Formal guarantee: the copies of an example are functions of that example and of a draw. Their mean gradient is clipped as one
gradient is, so one example adds at most the bound, and the noise and the promise are those without augmentation. Without an
example those after it move up to other places: the draws of places are independent and alike, so whoever does not know the key
(which draws the noise, too) sees the same distribution as if each kept its own draw.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedveil.errors import UserError
from fedveil.keys import generator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Augment:
    """One copy without flip and crop: the images as they are."""

    flip: bool = False
    crop: int = 0
    copies: int = 1

    @property
    def active(self) -> bool:
        """Is an example anything but its one image?"""
        return self.flip or self.crop > 0 or self.copies > 1


NONE = Augment()


def parse(text: str, copies: int) -> Augment:
    """Read "flip", "crop:4" or "flip+crop:4"; "" is none."""
    if not text:
        return NONE
    found: dict[str, int] = {}
    for part in text.split("+"):
        name, sign, number = part.strip().partition(":")
        pixels = int(number) if re.fullmatch("[0-9]{1,3}", number) else 0
        right = not sign if name == "flip" else name == "crop" and pixels > 0
        if not right or name in found:
            raise UserError(f"augment = {text!r}: write flip, crop:4 (pixels) or flip+crop:4")
        found[name] = pixels
    return Augment("flip" in found, found.get("crop", 0), copies)


def shown(augment: Augment, image: Tensor, key: bytes, step: int, place: int) -> list[Tensor]:
    """What one example is to the model: its copies, or the image itself."""
    return list(copies_of(augment, image[None], [key], step, place)) if augment.active else [image]


def check(augment: Augment, shape: Sequence[int]) -> None:
    """Refuse examples that are no images, and crops beyond them."""
    if not augment.active:
        return
    if len(shape) != 3:
        raise UserError(f"augment: examples of shape {list(shape)} are no images [channels, height, width]; leave it out")
    if augment.crop >= min(shape[1:]):
        raise UserError(f"augment: crop:{augment.crop} moves images of {shape[1]} x {shape[2]} pixels out of sight; use less")


def copies_of(augment: Augment, images: Tensor, keys: Sequence[bytes], step: int, first: int) -> Tensor:
    """Images [clients * rows, C, H, W], client after client, rows at places first, first + 1, … of their batches: the copies
    [clients * rows * copies, C, H, W] of each, one after the other."""
    import torch  # configurations are read without it

    rows = len(images) // max(len(keys), 1)
    draws = np.concatenate([_drawn(augment, key, step, first + at) for key in keys for at in range(rows)])
    flips, down, right = (torch.as_tensor(column, device=images.device) for column in draws.T)
    height, width = images.shape[2:]
    wide = torch.nn.functional.pad(images, (augment.crop,) * 4)
    row = down[:, None] + torch.arange(height, device=images.device)
    column = torch.arange(width, device=images.device)
    column = right[:, None] + torch.where(flips[:, None] > 0, column.flip(0), column)
    which = torch.arange(len(images), device=images.device).repeat_interleave(augment.copies)
    channel = torch.arange(images.shape[1], device=images.device)
    return wide[which[:, None, None, None], channel[:, None, None], row[:, None, :, None], column[:, None, None, :]]


def _drawn(augment: Augment, key: bytes, step: int, place: int) -> np.ndarray:
    """[copies, 3]: flipped or not, rows and columns to leave out at the beginning of the padded image."""
    draw = generator(key, "augment", step, place)
    flips = draw.integers(0, 2, augment.copies) * augment.flip
    return np.stack([flips, *draw.integers(0, 2 * augment.crop + 1, (2, augment.copies))], 1)
