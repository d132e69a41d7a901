"""The built-in datasets: where they come from, and how their files become a `Dataset`."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from fedveil.data import constants
from fedveil.data.rows import Dataset, Task, images, split_rows, to_unit
from fedveil.data.text import encode
from fedveil.errors import UserError


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


def _labels(y: object) -> np.ndarray:
    return np.asarray(y, np.int64)


def _cancer(folder: Path, seed: int) -> Dataset:
    from sklearn.datasets import load_breast_cancer

    raw = load_breast_cancer()
    x, y = to_unit(raw.data, constants.CANCER_RANGES, constants.CANCER_LIMIT), _labels(raw.target)
    train, test = split_rows(len(x), 426, seed)
    return Dataset(
        "cancer", x[train], y[train], x[test], y[test], classes=2, class_names=("malignant", "benign"),
        notes=("features scaled by fixed ranges, rounded from the statistics of this public dataset",),
    )  # fmt: skip


def _cancer_raw(folder: Path, seed: int) -> Dataset:
    """The same rows and splits as measured, for features that bring their own public ranges."""
    from sklearn.datasets import load_breast_cancer

    raw = load_breast_cancer()
    x, y = raw.data.astype(np.float32), _labels(raw.target)
    train, test = split_rows(len(x), 426, seed)
    return Dataset(
        "cancer_raw", x[train], y[train], x[test], y[test], classes=2, class_names=("malignant", "benign"),
        notes=("features as measured, not scaled",),
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
_MEDICAL = ("AbdomenCT", "BreastMRI", "CXR", "ChestCT", "Hand", "HeadCT")
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
    """The training and test files, each with its second part where that lies beside it."""
    x, y = _with_more(folder, "cifar10_train", "x_train", "y_train")
    x_test, y_test = _with_more(folder, "cifar10_test", "x_test", "y_test")
    counts = f"{len(y)} of 50000 training and {len(y_test)} of 10000 test pictures"
    return Dataset(
        "cifar10", images(x), _labels(y), images(x_test), _labels(y_test), classes=10,
        pixel_range=(0.0, 1.0), class_names=_CIFAR, notes=(_PIXELS, counts),
    )  # fmt: skip


def _with_more(folder: Path, name: str, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows of NAME.npz, then those of NAME_more.npz if there is one."""
    paths = [folder / f"{name}.npz", folder / f"{name}_more.npz"]
    parts = [_arrays(path) for path in paths if path.is_file()]
    return np.concatenate([part[x] for part in parts]), np.concatenate([part[y] for part in parts])


def _lfw(folder: Path, seed: int) -> Dataset:
    z = _arrays(folder / "lfw32.npz")
    train, test = split_rows(len(z["y"]), round(len(z["y"]) * 2267 / 3023), seed)
    y = _labels(z["y"])
    return Dataset(
        "lfw", images(z["x"][train]), y[train], images(z["x"][test]), y[test], classes=len(z["names"]),
        pixel_range=(0.0, 1.0), class_names=tuple(map(str, z["names"])), notes=(_PIXELS,),
    )  # fmt: skip


def encode_adult(columns: dict[str, np.ndarray]) -> np.ndarray:
    """105 features: 6 numbers scaled to [-1, 1], 99 zero-one columns for the documented categories."""
    numeric = np.stack([np.asarray(columns[c], np.float64) for c in constants.ADULT_NUMERIC], axis=1)
    parts = [to_unit(numeric, list(constants.ADULT_NUMERIC.values()))]
    for column, categories in constants.ADULT_CATEGORIES.items():
        values = columns[column]
        unknown = set(np.unique(values)) - set(categories) - {"?"}
        if unknown:
            row = int(np.flatnonzero(np.isin(values, list(unknown)))[0])
            raise UserError(f"adult, column '{column}', row {row + 2}: unknown category '{values[row]}'.")
        parts.append((values[:, None] == np.asarray(categories)[None]).astype(np.float32))
    return np.concatenate(parts, axis=1)


def _adult(folder: Path, seed: int, split: str = "papers") -> Dataset:
    path = folder / "adult.csv.gz"
    if split not in ("papers", "original"):
        raise UserError(
            f"adult: split = '{split}' is unknown; use 'papers' (36631/12211) or 'original' (32561/16281)."
        )
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file))
        columns = dict(zip(header, np.array(rows).T, strict=True))
        x = encode_adult(columns)
    except (OSError, EOFError, KeyError, ValueError) as broken:
        raise UserError(
            f"{path} cannot be read ({type(broken).__name__}: {broken}); fetch it again."
        ) from broken
    y = _labels(columns["income"] == ">50K")
    if split == "original":
        train, test = np.flatnonzero(columns["split"] == "train"), np.flatnonzero(columns["split"] == "test")
    else:
        train, test = split_rows(len(y), 36631, seed)
    return Dataset(
        "adult", x[train], y[train], x[test], y[test], classes=2, class_names=("<=50K", ">50K"),
        notes=("numbers scaled to [-1, 1] by public ranges, categories as zero or one, unknown as zeros",),
    )  # fmt: skip


def _texts(name: str, names: tuple[str, ...]) -> Callable[..., Dataset]:
    """A table of the columns text, label (class number) and split (train, test; others are left out)."""

    def read(folder: Path, seed: int) -> Dataset:
        path = folder / f"{name}.csv.gz"
        try:
            with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            part, labels = np.array([row["split"] for row in rows]), _labels([int(row["label"]) for row in rows])
            (train, test), texts = (part == "train", part == "test"), encode([row["text"] for row in rows])
        except (OSError, EOFError, KeyError, ValueError, TypeError, csv.Error) as broken:
            raise UserError(
                f"{path} cannot be read ({type(broken).__name__}: {broken}); fetch it again."
            ) from broken
        return Dataset(
            name, texts[train], labels[train], texts[test], labels[test], classes=len(names), class_names=names,
            notes=("texts as bytes; `features` turns each text alone into numbers",),
        )  # fmt: skip

    return read


def _location30(folder: Path, seed: int, clusters: int | None = None) -> Dataset:
    z = _arrays(folder / "location30.npz")
    x = np.unpackbits(z["x_packed"], axis=1, count=int(z["n_features"][0])).astype(np.float32)
    y, classes = _labels(z["y"]), 30
    notes: tuple[str, ...] = ("zero-one features as given",)
    if clusters is not None:
        if not 2 <= clusters <= 100:
            raise UserError(f"location30: clusters = {clusters} is out of range; give 2 to 100.")
        from sklearn.cluster import KMeans

        y = _labels(KMeans(clusters, n_init=3, random_state=0).fit_predict(x))
        classes = clusters
        notes += (f"private: classes are {clusters} k-means clusters fitted on all rows, unpaid",)
    train, test = split_rows(len(y), 4008, seed)
    return Dataset("location30", x[train], y[train], x[test], y[test], classes=classes, notes=notes)


_AGES = (10, 20, 30, 40, 50, 60, 70)  # class k: below the k-th of these ages; class 7: the oldest


def _utkface(folder: Path, seed: int, target: str = "race") -> Dataset:
    z = _arrays(folder / "utkface32.npz")
    columns = {name: _labels(z[name]) for name in ("age", "gender", "race")}
    if target not in columns:
        raise UserError(f"utkface: target = '{target}' is unknown; use age, gender or race.")
    bounds = [0, *_AGES]
    names = {
        "age": (*(f"{a}-{b - 1}" for a, b in pairwise(bounds)), f"{bounds[-1]}+"),
        "gender": tuple(map(str, z["gender_names"])),
        "race": tuple(map(str, z["race_names"])),
    }[target]
    y = np.searchsorted(_AGES, columns["age"], side="right") if target == "age" else columns[target]
    train, test = split_rows(len(y), 4000, seed)
    return Dataset(
        "utkface", images(z["x"][train]), y[train], images(z["x"][test]), y[test], classes=len(names),
        pixel_range=(0.0, 1.0), class_names=names, notes=(_PIXELS, f"predicts {target}"),
        attributes={name: values[train] for name, values in columns.items()},
        attributes_test={name: values[test] for name, values in columns.items()},
    )  # fmt: skip


def _wind(folder: Path, seed: int) -> Dataset:
    """One example: one farm and one hour. Features: the forecast issued 37 to 48 hours before (u, v, speed; a
    window of 9 hours around the hour; hour of day as sine and cosine). Target: the hour's power, 0 to 1."""
    z = _arrays(folder / "wind_gefcom2012.npz")
    power, forecast = z["power"], z["forecast"][..., :3] / np.float32(constants.WIND_SPEED_LIMIT)
    hours = _hours(z["time"])
    issued = _hours(z["issue_time"])
    leads = np.arange(constants.WIND_LEADS.start, constants.WIND_LEADS.stop)
    when = issued[:, None] + leads[None]  # the hour each forecast is for
    at = np.clip(when - hours[0], 0, len(hours) - 1)
    usable = hours[at] == when
    half = constants.WIND_WINDOW // 2
    window = np.clip(leads[:, None] - 1 + np.arange(-half, half + 1)[None], 0, forecast.shape[2] - 1)
    clock = 2 * np.pi * (when % 24) / 24
    xs, ys, farms, evaluation = [], [], [], []
    for farm in range(power.shape[1]):
        seen = np.moveaxis(forecast[farm][:, window], -1, 2)  # [issue, lead, variable, window]
        good = usable & np.isfinite(seen).all(axis=(2, 3)) & np.isfinite(power[at, farm])
        angles = np.stack([np.sin(clock[good]), np.cos(clock[good])], axis=1)[:, :, None]
        wide = np.broadcast_to(angles, (*angles.shape[:2], constants.WIND_WINDOW))
        xs.append(np.concatenate([seen[good], wide], axis=1).astype(np.float32)[:, :, None])
        ys.append(power[at[good], farm].astype(np.float32))
        farms.append(np.full(int(good.sum()), farm))
        evaluation.append(z["is_eval"][at[good]] == 1)
    x, y, farm_of, test = map(np.concatenate, (xs, ys, farms, evaluation))
    return Dataset(
        "wind", x[~test], y[~test], x[test], y[test], classes=None, task="regression", groups=farm_of[~test],
        group_names=tuple(f"farm {k + 1}" for k in range(power.shape[1])),
        attributes_test={"farm": farm_of[test]},
        notes=(
            f"wind speeds divided by {constants.WIND_SPEED_LIMIT:g} m/s; power 0 to 1, 37 to 48 hours ahead",
            "test rows are the competition's evaluation hours; groups are the 7 farms",
        ),
    )  # fmt: skip


def _hours(stamp: np.ndarray) -> np.ndarray:
    """YYYYMMDDHH to hours since 1970."""
    text = [
        f"{s // 1000000:04d}-{s // 10000 % 100:02d}-{s // 100 % 100:02d}T{s % 100:02d}"
        for s in stamp.tolist()
    ]
    return np.array(text, "datetime64[h]").astype(np.int64)


CATALOGUE: dict[str, Source] = {
    "cancer": Source(
        _cancer, (), "classification", "426 + 143 rows, 30 features, 2 classes",
        "Wisconsin diagnostic breast cancer; in scikit-learn", "CC BY 4.0",
    ),
    "cancer_raw": Source(
        _cancer_raw, (), "classification", "426 + 143 rows, 30 features as measured, 2 classes",
        "the rows and splits of cancer, not scaled", "CC BY 4.0",
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
        "60000 + 10000 images 28x28, 10 classes", "Zalando Research; OpenML Fashion-MNIST", "MIT",
        fetch="openml",
    ),
    "cifar10": Source(
        _cifar10, ("cifar10_train.npz", "cifar10_test.npz"), "classification",
        "up to 50000 + 10000 images 3x32x32, 10 classes", "Krizhevsky, Nair, Hinton; OpenML CIFAR_10",
        "not stated (cite the 2009 report)", fetch="openml",
    ),
    "lfw": Source(
        _lfw, ("lfw32.npz",), "classification", "2267 + 756 images 3x32x32, 62 people",
        "Labeled Faces in the Wild (UMass Amherst), people with 20 images or more",
        "not stated; press photographs, research use", fetch="lfw",
    ),
    "adult": Source(
        _adult, ("adult.csv.gz",), "classification", "36631 + 12211 rows, 105 features, 2 classes",
        "UCI Adult (Becker, Kohavi); OpenML adult", "CC BY 4.0", fetch="openml", options=("split",),
    ),
    "sst2": Source(
        _texts("sst2", ("negative", "positive")), ("sst2.csv.gz",), "classification",
        "6920 + 1821 sentences, 2 classes", "Stanford Sentiment Treebank (Socher et al.), binary", "not stated",
    ),
    "ag_news": Source(
        _texts("ag_news", ("World", "Sports", "Business", "Sci/Tech")), ("ag_news.csv.gz",), "classification",
        "30000 + 7600 news leads, 4 classes", "AG News (Gulli; Zhang, Zhao, LeCun), a balanced sample",
        "research, non-commercial",
    ),
    "location30": Source(
        _location30, ("location30.npz",), "classification",
        "4008 + 1002 rows, 446 zero-one features, 30 classes",
        "Foursquare check-ins (Yang et al.), derived by Shokri et al.", "not stated", options=("clusters",),
    ),
    "medical_mnist": Source(
        _image_archive("medical_mnist", _MEDICAL), ("medical_mnist.npz",), "classification",
        "6000 + 1200 images 64x64, 6 classes", "MedNIST (B. J. Erickson, Mayo Clinic), a subset", 
        "CC BY-SA 4.0",
    ),
    "utkface": Source(
        _utkface, ("utkface32.npz",), "classification",
        "4000 + 1000 images 3x32x32, 5 classes (or gender, age)",
        "UTKFace (Zhang, Song, Qi), a subset at 32x32", "non-commercial research only", options=("target",),
    ),
    "wind": Source(
        _wind, ("wind_gefcom2012.npz",), "regression", "126700 + 52416 farm hours, 5x1x9 features, 7 farms",
        "GEFCom2012 wind track (Hong, Pinson, Fan)", "not stated",
    ),
}  # fmt: skip
