"""Fixed features in front of a model: computed for each example alone, from public constants only.

    features = "scattering"                          images: 81 channels of oriented energies, whitened
    features = "scattering:components=300,ridge=0.001"
    features = "standard"                            images: published mean and deviation of the pixels
    features = "standard:mean=0.1307,deviation=0.3081"   or given ones, one for all channels or "0.49+0.48+0.45"
    features = "unit:constant=1"                     tables: a constant column, every row at length 1
    features = "unit:columns=0-9+20-29,length=5"     only these columns; rows shorter than 5 stay shorter than 1
    features = "words:width=1024"                    texts: hashed words and pairs of words, every row at length 1
    features = "tokens:length=64"                    texts: numbers of MiniLM's public tokenizer, for models with embeddings
    features = "backbone:efficientnet-lite0"         a public frozen network in front (see models.backbones)
    features = "unit:columns=1+23,low=9.71+185.2,high=39.28+4254,scale=log"   public ranges become [-1, 1] first

Why they pay under noise: a linear head on unit-length features has gradients of almost equal length, so a small clip
bound loses nothing, and the few directions in which all images look alike no longer eat the signal. The whitening
comes from *pictures drawn by a program* (strokes and blobs), not from any dataset, so it costs no privacy.

Formal guarantee: row i of the result is a function of row i of the input and of constants in this file. Neighbouring
datasets stay neighbours, and every promise about the examples carries over unchanged.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from fedveil.data.constants import PIXEL_STATISTICS
from fedveil.data.rows import Dataset
from fedveil.data.text import decode, hashed_words, is_text
from fedveil.errors import UserError, did_you_mean
from fedveil.models.backbones import NOT_STATED, backbone, tokens

SCALES, ANGLES = 2, 8  # wavelets of two sizes in eight directions; one output cell per 4 x 4 pixels
PICTURES = 4000  # drawn for the whitening; more change little
MOST = 1500  # directions kept at most
ROWS_AT_ONCE = 64
TELL_EVERY = 10.0  # seconds
VERSION = 1  # of the computation, for kept features


@dataclass(frozen=True)
class FrontEnd:
    """components: directions kept, the strongest among the drawn pictures. ridge: added to the drawn pictures'
    variances before their square root is divided out; larger values trust strong directions more, which more noise
    needs. constant: value of an added column. columns: which columns of a table to keep ("0-9+20"). low, high: their
    public ranges ("9.71+185.2"), which become [-1, 1]; values outside are clamped. scale: linear, or log for positive
    columns. length: rows are divided by their own length or by this, whichever is more; of tokens: how many are kept.
    width: columns of hashed words. name, size, module, centre, licence, origin: of a backbone (models.backbones). mean,
    deviation: public pixel statistics by channel; empty takes the published ones of the dataset, else the middle and
    half of the range."""

    kind: str
    components: int = 700
    ridge: float = 3e-4
    constant: float = 1.0
    columns: str = ""
    low: str = ""
    high: str = ""
    scale: str = "linear"
    length: float = 0.0
    mean: str = ""
    deviation: str = ""
    width: int = 1024
    name: str = ""
    size: int = 0
    module: str = ""
    centre: str = ""
    licence: str = NOT_STATED
    origin: str = ""


OPTIONS = {
    "standard": ("mean", "deviation"),
    "scattering": ("components", "ridge"),
    "unit": ("constant", "columns", "low", "high", "scale", "length"),
    "words": ("width",),
    "tokens": ("length",),
    "backbone": ("size", "module", "centre", "licence", "origin"),
}


def parse(text: str) -> FrontEnd:
    """Read "kind:key=value,key=value"."""
    kind, _, rest = text.partition(":")
    if kind not in OPTIONS:
        known = ", ".join(OPTIONS)
        raise UserError(f"features = {text!r}: '{kind}' is not one of {known}.{did_you_mean(kind, OPTIONS)}")
    front = FrontEnd(kind)
    if kind == "backbone":
        name, _, rest = rest.partition(",")
        front = replace(front, name=name.strip())
    types = {field.name: str(field.type) for field in fields(FrontEnd)}
    for item in filter(None, rest.split(",")):
        key, sign, value = (part.strip() for part in item.partition("="))
        if not sign or key not in OPTIONS[kind]:
            raise UserError(
                f"features = {text!r}: write options of '{kind}' as key=value with the keys "
                f"{', '.join(OPTIONS[kind])}.{did_you_mean(key, OPTIONS[kind])}"
            )
        try:
            front = replace(front, **{key: {"int": int, "float": float, "str": str}[types[key]](value)})
        except ValueError:
            raise UserError(f"features = {text!r}: {key} = {value!r} is not a number") from None
    if front.scale not in ("linear", "log"):
        raise UserError(
            f"features = {text!r}: scale = {front.scale!r}: use linear or log."
            f"{did_you_mean(front.scale, ('linear', 'log'))}"
        )
    _ranges(front)
    if not (front.length >= 0 and math.isfinite(front.length) and math.isfinite(front.constant)):
        raise UserError(f"features = {text!r}: length must be 0 or more, constant and length finite")
    if not (1 <= front.width <= 1 << 16 and 0 <= front.size <= 4096 and (kind != "tokens" or front.length <= 512)):
        raise UserError(f"features = {text!r}: width must be 1 to 65536, size 0 to 4096, length of tokens at most 512")
    if not (1 <= front.components <= MOST and front.ridge > 0 and math.isfinite(front.ridge)):
        raise UserError(
            f"features = {text!r}: components must be 1 to {MOST} and ridge above 0 (0.0003 is usual)"
        )
    return front


def default(dataset: Dataset) -> str | None:
    """What is put in front when a configuration names no features: hashed words for texts, else nothing."""
    return "words" if is_text(dataset.x) else None


def apply(dataset: Dataset, text: str) -> Dataset:
    """The dataset with fixed features instead of its own (see the module's text and its guarantee).

    With the environment's FEDVEIL_CACHE naming a folder, features are kept there and found again.
    """
    front = parse(text)
    if front.kind == "backbone":
        options = {key: getattr(front, key) for key in OPTIONS["backbone"]}
        return backbone(front.name, **options).apply(dataset)
    if front.kind == "standard":
        return _standardised(dataset, front)
    if is_text(dataset.x) != (front.kind in ("words", "tokens")):
        fits = '"words", "tokens" or "backbone:minilm"' if is_text(dataset.x) else '"scattering" or "unit"'
        raise UserError(f"features = {text!r} does not fit the examples of '{dataset.name}'; use features = {fits}.")
    if front.kind == "scattering" and (len(dataset.shape) != 3 or min(dataset.shape[1:]) < 8):
        raise UserError(
            f"features = {text!r} needs images of at least 8 x 8 pixels, but examples of '{dataset.name}' have "
            f'shape {list(dataset.shape)}; use features = "unit" for tables.'
        )
    if front.kind == "unit" and len(dataset.shape) != 1 and dataset.pixel_range is not None:
        raise UserError(f'features = {text!r} is for tables; use features = "scattering" for images.')
    note = "features: " + {
        "scattering": f"oriented energies, whitened by {PICTURES} drawn pictures ({front.components} directions, ridge "
        f"{front.ridge:g}); public constants, each row alone",
        "unit": "rows scaled to length 1 or less, each row alone",
        "words": f"words and pairs of words, hashed to {front.width} columns, length 1, each row alone",
        "tokens": "numbers of the public tokenizer of all-MiniLM-L6-v2, each row alone",
    }[front.kind]
    return replace(
        dataset,
        x=compute(dataset.x, front),
        x_test=compute(dataset.x_test, front),
        x_validation=None if dataset.x_validation is None else compute(dataset.x_validation, front),
        pixel_range=None,
        notes=(*dataset.notes, note),
    )


def _standardised(dataset: Dataset, front: FrontEnd) -> Dataset:
    """Images with (pixel - mean) / deviation by public constants, in their own shape: each row alone."""
    if len(dataset.shape) != 3:
        raise UserError(
            f"features = 'standard' is for images, but examples of '{dataset.name}' have shape {list(dataset.shape)}; "
            'use features = "unit" for tables.'
        )
    means, deviations = PIXEL_STATISTICS.get(dataset.name, PIXEL_STATISTICS["unit"])
    means = _numbers("mean", front.mean) or means
    deviations = _numbers("deviation", front.deviation) or deviations
    channels = dataset.shape[0]
    if {len(means), len(deviations)} - {1, channels}:
        raise UserError(
            f"features = 'standard': give one mean and deviation, or {channels} joined by +, one for each channel"
        )
    if not (np.isfinite([*means, *deviations]).all() and min(deviations) > 0):
        raise UserError("features = 'standard': means must be finite and deviations above 0")
    centre, scale = (np.reshape(np.array(v, np.float32), (-1, 1, 1)) for v in (means, deviations))

    def moved(x: np.ndarray) -> np.ndarray:
        return ((np.asarray(x, np.float32) - centre) / scale).astype(np.float32)

    said = f"features: pixels minus {'+'.join(map(str, means))}, over {'+'.join(map(str, deviations))} (public constants)"
    validation = None if dataset.x_validation is None else moved(dataset.x_validation)
    return replace(
        dataset,
        x=moved(dataset.x),
        x_test=moved(dataset.x_test),
        x_validation=validation,
        pixel_range=None,
        notes=(*dataset.notes, said),
    )


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split("+")) if text else ()
    except ValueError:
        raise UserError(
            f"features: {name} = {text!r}: write numbers joined by +, as 0.49+0.48+0.45"
        ) from None


def compute(x: np.ndarray, front: FrontEnd) -> np.ndarray:
    """Features of rows, float32 [n, directions]; every row has length 1 (at most 1, where `length` is given).

    Formal guarantee: each row of the result depends on the same row of x and on nothing else that is private.
    """
    if front.kind == "words":
        return hashed_words(decode(x), front.width)
    if front.kind == "tokens":
        return tokens(decode(x), int(front.length) or 64).astype(np.float32)
    if front.kind == "unit":
        flat = np.asarray(x, np.float32).reshape(len(x), math.prod(x.shape[1:]))  # also of no rows
        kept = flat[:, _columns(front.columns, flat.shape[1])]
        wide = torch.as_tensor(_between(kept, front))
        added = torch.full((len(wide), 1), front.constant)
        return _unit(torch.cat([wide, added], 1), front.length).numpy()
    shape = tuple(int(n) for n in x.shape[1:])
    scale = 1 / torch.sqrt(drawn_directions(shape)[2][: front.components] + front.ridge)
    found = _kept(x) if os.environ.get("FEDVEIL_CACHE") else _projected(x, front.components)
    out = np.empty((len(x), len(scale)), np.float32)
    for at in range(0, len(x), ROWS_AT_ONCE):
        rows = torch.as_tensor(np.array(found[at : at + ROWS_AT_ONCE, : front.components]))
        out[at : at + ROWS_AT_ONCE] = _unit(rows * scale).numpy()
    return out


def _projected(x: np.ndarray, components: int) -> np.ndarray:
    """Energies along the drawn directions, before scaling."""
    centre, directions, _ = drawn_directions(tuple(int(n) for n in x.shape[1:]))
    directions = directions[:, :components].contiguous()
    out = np.empty((len(x), directions.shape[1]), np.float32)
    began = told = time.monotonic()
    for at in range(0, len(x), ROWS_AT_ONCE):
        rows = torch.as_tensor(np.asarray(x[at : at + ROWS_AT_ONCE], np.float32))
        out[at : at + ROWS_AT_ONCE] = ((energies(rows) - centre) @ directions).numpy()
        now = time.monotonic()
        if now - told > TELL_EVERY:
            told, done = now, at + len(rows)
            left = (now - began) * (len(x) / done - 1)
            keep = "" if os.environ.get("FEDVEIL_CACHE") else "; FEDVEIL_CACHE=folder keeps them"
            print(
                f"features: {done:,} of {len(x):,} images, {left:.0f} s left{keep}",
                file=sys.stderr,
                flush=True,
            )
    return out


def _kept(x: np.ndarray) -> np.ndarray:
    """All projections, from the folder FEDVEIL_CACHE if they are there, else computed and put there."""
    mark = hashlib.sha256(f"{VERSION} {x.dtype} {x.shape}".encode() + np.ascontiguousarray(x).tobytes())
    path = _keep(f"features-{mark.hexdigest()[:32]}.npy", lambda file: np.save(file, _projected(x, MOST)))
    return np.load(path, mmap_mode="r")


def _keep(name: str, write: Callable[[BinaryIO], None]) -> Path:
    """The file of that name in the folder FEDVEIL_CACHE, for this user alone, written completely or not at all."""
    path = Path(os.environ["FEDVEIL_CACHE"]) / name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_suffix(f".{os.getpid()}.tmp")
        # As private as the images; a file that an interrupted process of the same number left keeps its rights, so it goes first.
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            write(file)
        os.replace(part, path)
    return path


def _columns(text: str, width: int) -> list[int]:
    if not text:
        return list(range(width))
    try:
        spans = [part.partition("-") for part in text.split("+")]
        kept = [n for first, _, last in spans for n in range(int(first), int(last or first) + 1)]
    except ValueError:
        raise UserError(f"features: columns = {text!r}: write column numbers as 0-9+20-29") from None
    if not kept or min(kept) < 0 or max(kept) >= width:
        raise UserError(f"features: columns = {text!r}: the table has the columns 0 to {width - 1}")
    return kept


def _ranges(front: FrontEnd) -> tuple[list[float], list[float]]:
    """The public ranges, checked; both empty if there are none."""
    where = f"features: low = {front.low!r}, high = {front.high!r}"
    try:
        low, high = ([float(v) for v in text.split("+") if text] for text in (front.low, front.high))
    except ValueError:
        raise UserError(f"{where}: write one number for each column, as 9.71+185.2") from None
    # As float32, in which rows are scaled: ends that fall together or overflow there would make every row NaN.
    ends = np.array([low, high], np.float32) if len(low) == len(high) else np.array([[0], [0]], np.float32)
    if not (np.isfinite(ends).all() and (ends[0] < ends[1]).all()):
        raise UserError(
            f"{where}: give as many low as high values, finite, each low below its high (in float32)"
        )
    if front.scale == "log" and not (low and ends[0].min() > 0):
        raise UserError(f"{where}: scale = log needs ranges above 0")
    return low, high


def _between(rows: np.ndarray, front: FrontEnd) -> np.ndarray:
    """Columns mapped from their public ranges to [-1, 1], each value alone."""
    low, high = (np.array(v, np.float32) for v in _ranges(front))
    if not len(low):
        return rows
    if len(low) != rows.shape[1]:
        raise UserError(
            f"features: low and high have {len(low)} values, but {rows.shape[1]} columns are kept; give one each"
        )
    rows = np.clip(rows, low, high)
    if front.scale == "log":
        rows, low, high = np.log(rows), np.log(low), np.log(high)
    return np.asarray(2 * (rows - low) / (high - low) - 1, np.float32)


def _unit(rows: torch.Tensor, least: float = 0.0) -> torch.Tensor:
    return rows / torch.clamp(rows.norm(dim=1, keepdim=True), min=max(least, 1e-6))


# ---------------------------------------------------------------------------------------------- scattering


def energies(images: torch.Tensor) -> torch.Tensor:
    """Square roots of the scattering of [n, channels, height, width], standardised within each example and each
    family of directions, at length 1: [n, features]."""
    root = scattering(images).clamp(min=0).sqrt()
    count, _, height, width = root.shape
    families = root.reshape(count, images.shape[1], -1, height * width)
    parts = [families[:, :, :1], *families[:, :, 1:].split(ANGLES, dim=2)]
    flat = [part.reshape(count, images.shape[1], -1) for part in parts]
    return _unit(torch.cat([_standard(part) for part in flat], 2).reshape(count, -1))


def _standard(part: torch.Tensor) -> torch.Tensor:
    centred = part - part.mean(-1, keepdim=True)
    # The small constant keeps empty families (black images) at zero instead of blowing up rounding errors.
    return centred / (centred.square().mean(-1, keepdim=True).sqrt() + 3e-3)


def scattering(images: torch.Tensor) -> torch.Tensor:
    """Local averages of the image, of |image * wavelet|, and of ||image * wavelet| * coarser wavelet|.

    [n, c, h, w] to [n, c * 81, ceil(h / 4), ceil(w / 4)]; per input channel 1 + 16 + 64 outputs. Edges are reflected.
    """
    count, _, height, width = images.shape
    cell = 2**SCALES
    more_height, more_width = -height % cell, -width % cell
    padding = (cell, cell + more_width, cell, cell + more_height)
    wide = torch.nn.functional.pad(images, padding, mode="reflect").flatten(0, 1)
    full = tuple(wide.shape[-2:])
    cells = ((height + more_height) // cell, (width + more_width) // cell)
    banks = _wavelets(*full)

    def average(values: torch.Tensor, step: int) -> torch.Tensor:
        rows, columns = (_averager(n // step, k, step) for n, k in zip(full, cells, strict=True))
        return rows @ values @ columns.T

    spectrum = torch.fft.fft2(wide)[:, None]
    first, second = [], []
    for fine in range(SCALES):
        inner = torch.fft.ifft2(_filtered(spectrum, banks[fine], 2**fine)).abs()
        first.append(average(inner, 2**fine))
        if fine + 1 == SCALES:
            break
        inner_spectrum = torch.fft.fft2(inner)[:, :, None]
        for coarse in range(fine + 1, SCALES):
            # The filter on the thinned grid is the full one, folded in frequency (one sample in 4^fine is kept).
            bank = _filtered(banks[coarse], torch.ones(()), 2**fine) * 4**fine
            outer = torch.fft.ifft2(_filtered(inner_spectrum, bank, 2 ** (coarse - fine))).abs()
            second.append(average(outer.flatten(1, 2), 2**coarse))
    return torch.cat([average(wide[:, None], 1), *first, *second], 1).reshape(count, -1, *cells)


def _filtered(spectrum: torch.Tensor, bank: torch.Tensor, step: int) -> torch.Tensor:
    """Spectrum of every `step`-th sample, in both directions, of what `bank` lets through."""
    height, width = (n // step for n in spectrum.shape[-2:])
    total: torch.Tensor | None = None
    for down in range(step):
        for across in range(step):
            rows, columns = (
                slice(down * height, (down + 1) * height),
                slice(across * width, (across + 1) * width),
            )
            part = bank[..., rows, columns] if bank.ndim else bank
            product = spectrum[..., rows, columns] * part
            total = product if total is None else total.add_(product)
    assert total is not None
    return total / step**2


@lru_cache(maxsize=8)
def _wavelets(height: int, width: int) -> tuple[torch.Tensor, ...]:
    """Per scale the spectra of Morlet wavelets in all directions: an oriented Gaussian times a wave, mean removed."""
    down, across = (np.fft.fftfreq(n, 1 / n) for n in (height, width))
    y, x = np.meshgrid(down, across, indexing="ij")
    out = []
    for scale in range(SCALES):
        spread, pitch, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 / ANGLES
        bank = []
        for angle in np.arange(ANGLES) * math.pi / ANGLES:
            along = x * math.cos(angle) + y * math.sin(angle)
            beside = y * math.cos(angle) - x * math.sin(angle)
            envelope = np.exp(-(along**2 + (slant * beside) ** 2) / (2 * spread**2))
            wave = envelope * np.exp(1j * pitch * along)
            wave -= envelope * (wave.sum() / envelope.sum())
            bank.append(np.fft.fft2(wave) * slant / (2 * math.pi * spread**2))
        out.append(torch.as_tensor(np.stack(bank), dtype=torch.complex64))
    return tuple(out)


@lru_cache(maxsize=32)
def _averager(samples: int, cells: int, step: int) -> torch.Tensor:
    """[cells, samples]: Gaussian weights around the middle of each 4-pixel cell; a sample lies every `step` pixels."""
    middle = 2**SCALES * (np.arange(cells) + 1.5) - 0.5
    away = np.arange(samples) * step - middle[:, None]
    weights = np.exp(-(away**2) / (2 * (0.8 * 2 ** (SCALES - 1)) ** 2))
    return torch.as_tensor(weights / weights.sum(1, keepdims=True), dtype=torch.float32)


# ------------------------------------------------------------------------------------------------- whitening


@lru_cache(maxsize=2)
def drawn_directions(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, leading directions [features, at most 1500] and their variances, over what `pictures` draws."""
    if not os.environ.get("FEDVEIL_CACHE"):
        return _directions(shape)
    name = f"directions-{VERSION}-{PICTURES}-{'x'.join(map(str, shape))}.npz"
    path = _keep(name, lambda file: np.savez(file, *(part.numpy() for part in _directions(shape))))
    with np.load(path) as kept:
        centre, directions, variance = (torch.as_tensor(kept[f"arr_{n}"]) for n in range(3))
    return centre, directions, variance


def _directions(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    drawn = pictures(PICTURES, shape)
    rows = torch.cat([energies(drawn[at : at + ROWS_AT_ONCE]) for at in range(0, PICTURES, ROWS_AT_ONCE)])
    centre = rows.mean(0)
    rows -= centre
    # Fewer pictures than features: the eigenvectors of the small Gram matrix give those of the covariance.
    variance, vectors = torch.linalg.eigh(rows @ rows.T / PICTURES)
    kept = min(MOST, rows.shape[1])
    variance = variance.flip(0)[:kept].clamp(min=1e-9)
    directions = rows.T @ (vectors.flip(1)[:, :kept] / (variance * PICTURES).sqrt())
    return centre, directions, variance


def pictures(count: int, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Drawn images [count, channels, height, width] in [0, 1]: half of them one to three thick curves, half one to
    four shaded, striped or grainy blobs; on black, or in colour on colour with more than one channel."""
    random = np.random.default_rng(seed)
    done = [_draw(random, min(200, count - at), *shape) for at in range(0, count, 200)]
    return torch.as_tensor(np.concatenate(done))


def _draw(random: np.random.Generator, count: int, channels: int, height: int, width: int) -> np.ndarray:
    y, x = np.meshgrid((np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width, indexing="ij")
    colour = channels > 1
    images = np.zeros((count, channels, height, width))
    if colour:
        images += random.random((count, channels, 1, 1))
    curved = (random.random(count) < 0.5)[:, None, None]
    objects = random.integers(1, 5, count)[:, None, None]
    for slot in range(4):
        line = _curve(random, count, y, x)
        blob, shade = _blob(random, count, y, x)
        mask = np.where(curved, line, blob) * (slot < np.where(curved, np.minimum(objects, 3), objects))
        value = np.where(curved, 1.0, shade)[:, None]
        if colour:
            value = value * random.random((count, channels, 1, 1))
        images = images * (1 - mask[:, None]) + mask[:, None] * value
    return np.clip(images, 0, 1).astype(np.float32)


def _curve(random: np.random.Generator, count: int, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Masks of thick cubic Bezier curves."""
    t = np.linspace(0, 1, 24)[:, None]
    weights = np.concatenate([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3], 1)
    points = weights @ random.uniform(0.15, 0.85, (count, 4, 2))
    nearest = np.full((count, *y.shape), np.inf)
    for down, across in np.moveaxis(points, (1, 2), (0, 1)):
        np.minimum(nearest, (y - down[:, None, None]) ** 2 + (x - across[:, None, None]) ** 2, out=nearest)
    thick = random.uniform(0.03, 0.07, (count, 1, 1))
    return np.clip((thick - np.sqrt(nearest)) * min(y.shape) + 0.5, 0, 1)


def _blob(
    random: np.random.Generator, count: int, y: np.ndarray, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Masks of turned superellipses, and their shading."""
    one = (count, 1, 1)
    side = min(y.shape)
    angle = random.uniform(0, np.pi, one)
    across, down = random.uniform(0.3, 0.7, (2, *one))
    half = random.uniform(0.06, 0.45, (2, *one))
    power = random.choice([2.0, 4.0, 10.0], one)
    u = ((x - across) * np.cos(angle) + (y - down) * np.sin(angle)) / half[0]
    v = ((y - down) * np.cos(angle) - (x - across) * np.sin(angle)) / half[1]
    distance = (np.abs(u) ** power + np.abs(v) ** power) ** (1 / power)
    mask = np.clip((1 - distance) * half.min(0) * side + 0.5, 0, 1)
    shade = random.uniform(0.2, 1, one) * (1 + random.normal(0, 0.15, one) * u)
    wave = np.sin(u * half[0] * side * random.uniform(0.4, 2, one) + random.uniform(0, 6, one))
    shade = np.where(random.random(one) < 0.3, shade * (1 + 0.5 * np.sign(wave)), shade)
    return mask, shade + _smooth(random.normal(0, 1, (count, *y.shape))) * random.uniform(0, 0.3, one)


def _smooth(grain: np.ndarray) -> np.ndarray:
    for axis in (1, 2, 1, 2):
        grain = (np.roll(grain, 1, axis) + 2 * grain + np.roll(grain, -1, axis)) / 4
    return grain
