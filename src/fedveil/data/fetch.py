"""Fetching built-in datasets through scikit-learn, into the file formats that `load` reads.

scikit-learn checks the servers' own checksums; what comes out is checked again here against figures that
belong to the dataset itself, before a file is put in place (whole, or not at all).
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import os
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data import constants
from fedveil.data.sources import CATALOGUE
from fedveil.errors import UserError, did_you_mean

# SHA-256 over the arrays (names, types, shapes, bytes) of the original sixty plus ten thousand images.
DIGESTS = {
    "mnist": "8fc8fc4f0343f34ece1fcfdfb65f0801fac48030ce7c70e62bbb62f64ee2e65b",
    "fashion_mnist": "37e5852d33933792bfddacf387e185c9c3d87fa20c45417517512181f092a44a",
}


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of named arrays: the same for the same content, however the file was compressed."""
    whole = hashlib.sha256()
    for key in sorted(arrays):
        array = np.ascontiguousarray(arrays[key])
        whole.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
        whole.update(array.tobytes())
    return whole.hexdigest()


def fetch(name: str, folder: Path, *, timeout: float = 15.0) -> list[Path]:
    """Fetch a dataset into the folder; returns the files written (none if they are there already)."""
    if name not in CATALOGUE:
        raise UserError(
            f"Unknown dataset '{name}' (known: {', '.join(CATALOGUE)}).{did_you_mean(name, CATALOGUE)}"
        )
    source = CATALOGUE[name]
    if not source.files or all((folder / file).is_file() for file in source.files):
        return []
    if not source.fetch:
        raise UserError(f"Dataset '{name}': {source.how} (files: {', '.join(source.files)}).")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as cache,
            _socket_timeout(timeout),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # scikit-learn announces its retries; the error below says it all
            contents = _FETCHERS[name](cache)
    except OSError as failed:  # URLError, timeouts and full disks are all OSErrors
        raise UserError(
            f"Dataset '{name}' could not be fetched ({type(failed).__name__}: {failed}). This needs a connection to "
            f"{'openml.org' if source.fetch == 'openml' else 'figshare.com'} and room in {folder}. Offline, put "
            f"{' and '.join(source.files)} there by hand (formats: docs/data.md), or use 'cancer' or 'digits', "
            "which need no files."
        ) from failed
    return [_put(folder / file, content) for file, content in contents.items()]


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """scikit-learn has no timeout of its own: without this an unreachable server means minutes of silence."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _put(path: Path, content: bytes) -> Path:
    """Write a file whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _openml(cache: str, **which: object) -> Any:
    from sklearn.datasets import fetch_openml

    return fetch_openml(data_home=cache, n_retries=1, **which)


def _require(name: str, right: bool, what: str) -> None:
    if not right:
        raise UserError(
            f"Dataset '{name}': what was fetched is not the known data ({what}); nothing was kept."
        )


def _idx_like(name: str, openml: str) -> Callable[[str], dict[str, bytes]]:
    def get(cache: str) -> dict[str, bytes]:
        raw = _openml(cache, name=openml, version=1, as_frame=False, parser="liac-arff")
        x = np.asarray(raw.data, np.float64).reshape(-1, 28, 28).astype(np.uint8)
        y = np.asarray(raw.target, np.float64).astype(np.uint8)
        arrays = {"x_train": x[:60000], "y_train": y[:60000], "x_test": x[60000:], "y_test": y[60000:]}
        _require(name, digest(arrays) == DIGESTS[name], "its checksum differs")
        return {f"{name}.npz": _npz(**arrays)}

    return get


def _cifar10(cache: str) -> dict[str, bytes]:
    raw = _openml(cache, name="CIFAR_10", version=1, as_frame=False, parser="liac-arff")
    x = np.moveaxis(np.asarray(raw.data, np.float64).astype(np.uint8).reshape(-1, 3, 32, 32), 1, -1)
    y = np.asarray(raw.target, np.float64).astype(np.uint8)
    _require("cifar10", x.shape == (60000, 32, 32, 3), f"shape {x.shape}")
    counts = np.bincount(y[:50000], minlength=10), np.bincount(y[50000:], minlength=10)
    _require("cifar10", bool((counts[0] == 5000).all() and (counts[1] == 1000).all()), "class counts")
    return {
        "cifar10_train.npz": _npz(x_train=x[:50000], y_train=y[:50000]),
        "cifar10_test.npz": _npz(x_test=x[50000:], y_test=y[50000:]),
    }


def _adult(cache: str) -> dict[str, bytes]:
    raw = _openml(cache, name="adult", version=2, as_frame=False, parser="liac-arff")
    columns = [*constants.ADULT_NUMERIC, *constants.ADULT_CATEGORIES]
    right = set(columns) <= set(raw.feature_names) and len(raw.data) == 48842
    _require("adult", right, "columns or number of rows")
    income = [str(word).strip() for word in raw.target]
    rich = np.array([word == ">50K" for word in income])
    _require("adult", int(rich.sum()) == 11687 and int(rich[:32561].sum()) == 7841, "number of rows >50K")
    cells = []
    for column in columns:
        values = raw.data[:, raw.feature_names.index(column)]
        names = (raw.categories or {}).get(column)  # categories come as numbers beside a list of names
        cells.append(
            ["?" if v != v else (str(names[int(v)]).strip() if names else str(int(v))) for v in values]
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, "income", "split"])
    split = ["train"] * 32561 + ["test"] * (len(income) - 32561)
    writer.writerows(zip(*cells, income, split, strict=True))
    return {"adult.csv.gz": gzip.compress(text.getvalue().encode(), mtime=0)}


def _lfw(cache: str) -> dict[str, bytes]:
    from sklearn.datasets import fetch_lfw_people

    raw = fetch_lfw_people(
        data_home=cache, min_faces_per_person=20, color=True, resize=32 / 125,
        slice_=(slice(70, 195), slice(62, 187)),
    )  # fmt: skip
    pixels = np.asarray(raw.images, np.float32)
    pixels = pixels * (255.0 if pixels.max() <= 1.0 else 1.0)
    x = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    _require("lfw", x.shape == (3023, 32, 32, 3) and len(raw.target_names) == 62, f"shape {x.shape}")
    return {
        "lfw32.npz": _npz(x=x, y=np.asarray(raw.target, np.uint8), names=np.asarray(raw.target_names, str))
    }


_FETCHERS: dict[str, Callable[[str], dict[str, bytes]]] = {
    "mnist": _idx_like("mnist", "mnist_784"),
    "fashion_mnist": _idx_like("fashion_mnist", "Fashion-MNIST"),
    "cifar10": _cifar10,
    "adult": _adult,
    "lfw": _lfw,
}
