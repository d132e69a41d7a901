"""The built-in datasets: where they come from, and how their files become a `Dataset`."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


import numpy as np

from fedveil.data import constants
from fedveil.data.rows import Dataset, Task, images, split_rows, to_unit
from fedveil.errors import UserError, did_you_mean
from fedveil.keys import generator


@dataclass(frozen=True)
class Source:
    """One built-in dataset. `fetch` names what `fedveil data get` can do: "openml", "lfw" or nothing."""

    read: Callable[..., Dataset]
    files: tuple[str, ...]
    task: Task
    size: str
    origin: str
    licence: str
    fetch: Literal["", "openml", "lfw"] = ""
    how: str = "it cannot be fetched automatically: see docs/data.md for the file's format and origin"
    options: tuple[str, ...] = ()


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz; object arrays (pickles) are refused."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError) as broken:
        raise UserError(f"{path} cannot be read ({broken}); fetch it again.") from broken
    except Exception as broken:  # zipfile and zlib raise their own kinds for damaged files
        raise UserError(f"{path} is damaged ({type(broken).__name__}: {broken}); fetch it again.") from broken


def _labels(y: np.ndarray) -> np.ndarray:
    return np.asarray(y, np.int64)


def _cancer(folder: Path, seed: int) -> Dataset:
    from sklearn.datasets import load_breast_cancer

    raw = load_breast_cancer()
    x, y = to_unit(raw.data, constants.CANCER_RANGES), _labels(raw.target)
    train, test = split_rows(len(x), 426, seed)
    return Dataset(
        "cancer", x[train], y[train], x[test], y[test], classes=2, class_names=("malignant", "benign"),
        notes=("features scaled to [-1, 1] by public ranges",),
    )  # fmt: skip


def _digits(folder: Path, seed: int) -> Dataset:
    from sklearn.datasets import load_digits

    raw = load_digits()
    x, y = (raw.images[:, None] / 16).astype(np.float32), _labels(raw.target)
    train, test = split_rows(len(x), 1437, seed)
    return Dataset(
        "digits", x[train], y[train], x[test], y[test], classes=10, pixel_range=(0.0, 1.0),
        class_names=tuple("0123456789"), notes=("pixels divided by 16",),
    )  # fmt: skip


_PIXELS = "pixels divided by 255"
_FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _image_archive(name: str, names: tuple[str, ...]) -> Callable[..., Dataset]:
    def read(folder: Path, seed: int) -> Dataset:
        z = _arrays(folder / f"{name}.npz")
        return Dataset(
            name, images(z["x_train"]), _labels(z["y_train"]), images(z["x_test"]), _labels(z["y_test"]),
            classes=len(names), pixel_range=(0.0, 1.0), class_names=names, notes=(_PIXELS,),
        )  # fmt: skip

    return read


def _cifar10(folder: Path, seed: int) -> Dataset:
    a, b = _arrays(folder / "cifar10_train.npz"), _arrays(folder / "cifar10_test.npz")
    counts = f"{len(a['y_train'])} of 50000 training and {len(b['y_test'])} of 10000 test pictures"
    return Dataset(
        "cifar10", images(a["x_train"]), _labels(a["y_train"]), images(b["x_test"]), _labels(b["y_test"]),
        classes=10, pixel_range=(0.0, 1.0), class_names=_CIFAR, notes=(_PIXELS, counts),
    )  # fmt: skip


CATALOGUE: dict[str, Source] = {
    "cancer": Source(
        _cancer, (), "classification", "426 + 143 rows, 30 features, 2 classes",
        "Wisconsin diagnostic breast cancer; in scikit-learn", "CC BY 4.0",
    ),
    "digits": Source(
        _digits, (), "classification", "1437 + 360 images 8x8, 10 classes",
        "UCI optical digits; in scikit-learn", "CC BY 4.0",
    ),
    "mnist": Source(
        _image_archive("mnist", tuple("0123456789")), ("mnist.npz",), "classification",
        "60000 + 10000 images 28x28, 10 classes", "LeCun, Cortes, Burges; OpenML mnist_784", "CC BY-SA 3.0",
        fetch="openml",
    ),
    "fashion_mnist": Source(
        _image_archive("fashion_mnist", _FASHION), ("fashion_mnist.npz",), "classification",
        "60000 + 10000 images 28x28, 10 classes", "Zalando Research; OpenML Fashion-MNIST", "MIT", fetch="openml",
    ),
    "cifar10": Source(
        _cifar10, ("cifar10_train.npz", "cifar10_test.npz"), "classification",
        "up to 50000 + 10000 images 3x32x32, 10 classes", "Krizhevsky, Nair, Hinton; OpenML CIFAR_10",
        "not stated (cite the 2009 report)", fetch="openml",
    ),
}  # fmt: skip
