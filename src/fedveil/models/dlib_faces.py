"""dlib's face network (ResNet, 29 convolutions, 128 outputs) from its own file format, without dlib.

The file is a stream of layers, inner ones first: a tag such as "con_4" (a length, then letters), the layer's tensor
(version, four sizes, little-endian floats), then numbers that the published architecture fixes anyway. Numbers are written
as one control byte (sign and count of bytes) and that many bytes. Everything is checked against the architecture
before it is used; a file that does not fit is refused.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.errors import UserError

_LEVELS = ((32, 3, False), (64, 4, True), (128, 3, True), (256, 3, True), (256, 1, True))  # channels, blocks, halves
_TAGS = re.compile(rb"\x01[\x04-\x20](con_[0-9]|affine_|fc_[0-9])")
_MOST = 64 << 20  # bytes of a file that is read at all


class _Block(nn.Module):
    """Two convolutions beside a shortcut, which is pooled and filled up with zeros where the sizes differ."""

    def __init__(self, before: int, channels: int, halves: bool) -> None:
        super().__init__()
        stride, padding = (2, 0) if halves else (1, 1)
        self.first = nn.Conv2d(before, channels, 3, stride, padding)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1)
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        main = self.second(self.first(x).relu())
        side = F.avg_pool2d(x, 2) if self.halves else x
        height, width = (max(a, b) for a, b in zip(main.shape[2:], side.shape[2:], strict=True))
        return (_grown(main, main.shape[1], height, width) + _grown(side, main.shape[1], height, width)).relu()


def _grown(x: Tensor, channels: int, height: int, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[3], 0, height - x.shape[2], 0, channels - x.shape[1]))


class FaceNet(nn.Module):
    """RGB [n, 3, 150, 150] in [0, 1] to 128 numbers; faces of one person lie within about 0.6 of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 7, 2)
        blocks, before = [], 32
        for channels, count, halves in _LEVELS:
            for at in range(count):
                blocks.append(_Block(before, channels, halves and at == 0))
                before = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(256, 128, bias=False)
        self.average = torch.tensor([122.782, 117.001, 104.298]).view(1, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem((x * 255 - self.average) / 256).relu()
        return self.head(self.blocks(F.max_pool2d(x, 3, 2)).mean((2, 3)))


def read(path: Path) -> FaceNet:
    """The network with the weights of a dlib file."""
    data = path.read_bytes() if path.stat().st_size <= _MOST else b""
    try:
        return _filled(FaceNet(), [_layer(data, found) for found in _TAGS.finditer(data)])
    except (ValueError, IndexError, StopIteration, RuntimeError) as wrong:
        raise UserError(f"{path} is not dlib's face network ({wrong}); install the package again.") from wrong


def _layer(data: bytes, found: re.Match[bytes]) -> tuple[bytes, np.ndarray]:
    """A layer's kind and its numbers; a dense layer states its two sizes first."""
    kind, at = found.group(1)[:3], found.end()
    for _ in range(2 if kind == b"fc_" else 0):
        _, at = _number(data, at)
    return kind, _tensor(data, at)


def _filled(net: FaceNet, found: list[tuple[bytes, np.ndarray]]) -> FaceNet:
    """Convolution, affine, convolution, affine, …, dense: an affine layer is folded into the convolution before it."""
    convolutions = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]  # in the order of the file
    parts = iter(found)
    with torch.no_grad():
        for conv in convolutions:
            (tag, values), (after, affine) = next(parts), next(parts)
            count, channels = conv.weight.numel(), conv.out_channels
            if (tag, after, values.size, affine.size) != (b"con", b"aff", count + channels, 2 * channels):
                raise ValueError("another order or size of layers")
            scale, offset = torch.from_numpy(affine).view(2, channels)
            kernel, bias = torch.from_numpy(values[:count]), torch.from_numpy(values[count:])
            conv.weight.copy_(kernel.view_as(conv.weight) * scale.view(-1, 1, 1, 1))
            conv.bias.copy_(bias * scale + offset)  # type: ignore[union-attr]
        tag, values = next(parts)
        if tag != b"fc_" or values.size != 256 * 128 or next(parts, None) is not None:
            raise ValueError("another head")
        net.head.weight.copy_(torch.from_numpy(values).view(256, 128).T)
    return net.eval()


def _number(data: bytes, at: int) -> tuple[int, int]:
    control = data[at]
    size = control & 0x0F
    if size > 8 or at + 1 + size > len(data):
        raise ValueError("a number is cut off")
    value = int.from_bytes(data[at + 1 : at + 1 + size], "little")
    return (-value if control & 0x80 else value), at + 1 + size


def _tensor(data: bytes, at: int) -> np.ndarray:
    version, at = _number(data, at)
    if version != 2:
        raise ValueError(f"tensor version {version}")
    sizes = []
    for _ in range(4):
        size, at = _number(data, at)
        sizes.append(size)
    count = int(np.prod(sizes, dtype=np.int64))
    if min(sizes) < 0 or count * 4 > len(data) - at:
        raise ValueError("a tensor is cut off")
    return np.frombuffer(data, "<f4", count, at).copy()
