"""The run directory: plain JSON, JSON lines and safetensors; written atomically, read without running code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedveil.errors import UserError
from fedveil.federation.config import RunConfig
from fedveil.federation.look import looked_from_json
from fedveil.federation.round import State, blank
from fedveil.jsons import Document, JsonObject
from fedveil.protect.aggregate import Mean, Momentum
from fedveil.protect.catalogue import named_code
from fedveil.protect.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn
    
    from fedveil.privacy.ledger import Ledger

PACKAGES = ("fedveil", "torch", "numpy", "scipy", "dp-accounting", "scikit-learn")
TABLE = "table.json"  # constants of a table's columns, with what they cost
MOST_BYTES = 1 << 28  # of a JSON file that is read whole
MOST_LINES_BYTES = 1 << 30  # of a file of JSON lines
NO_CHECKSUM = "was written by an earlier version, without a checksum: a flipped bit in it would go unnoticed"
_FACTS = {"round", "bytes", "scalars", "ledger", "sha256", "check"}
_NAME = re.compile(r"round-(\d{6,9})\.json")


def write_atomic(path: Path, content: bytes) -> None:
    """Write, sync, rename: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as wrong:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(
            f"cannot write {path}: {wrong.strerror}. Free space or choose another --out; the last "
            "checkpoint is intact and --resume continues from it"
        ) from wrong


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: object) -> None:
    write_atomic(path, (json.dumps(_finite(value), indent=2, allow_nan=False) + "\n").encode())


def _finite(value: object) -> object:
    """JSON has no infinity and no NaN: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """A whole file of at most `most` bytes; whatever else it is, is a clear error."""
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: not a run directory, or the run never started") from None
    except OSError as wrong:
        raise UserError(f"cannot read {path}: {wrong.strerror}") from None
    if len(data) > most:
        raise UserError(f"{path} is larger than {most >> 20} MB, the most that is read")
    return data


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path).decode("utf-8"))
    except (ValueError, RecursionError) as wrong:
        raise UserError(f"{path} is damaged: {wrong or 'nested too deeply'}") from None


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def append_line(path: Path, value: Mapping[str, object]) -> None:
    """Append one JSON line."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(value), allow_nan=False) + "\n")
    except OSError as wrong:
        raise UserError(f"cannot write {path}: {wrong.strerror}") from wrong


def read_lines(path: Path) -> list[Document]:
    """All whole lines; a torn last line is skipped, and so is whatever is no JSON object."""
    out = []
    if path.exists():
        for text in read_bytes(path, MOST_LINES_BYTES).decode("utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                line = json.loads(text)
                if isinstance(line, dict):
                    out.append(line)
    return out


def round_of(line: Mapping[str, Any]) -> int:
    """The round that a line of metrics.jsonl or private.jsonl speaks about; 0 if it says none."""
    number = line.get("round", 0)
    return number if isinstance(number, int) else 0


def keep_rounds(path: Path, last: int) -> None:
    """Drop lines of rounds after `last` (they will be played again). Only for whoever holds the folder's lock."""
    kept = [line for line in read_lines(path) if round_of(line) <= last]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept).encode())


def save_checkpoint(folder: Path, state: State, head: tuple[int, str] | None = None) -> None:
    """One State as safetensors plus JSON. The JSON is written last and holds the data's size and checksum (and
    its own): it commits.

    head: number and hash of the ledger's last record, so that a ledger that was cut or exchanged is found.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise UserError(f"cannot create {folder}: {wrong.strerror}") from None
    memory = state.memory()
    arrays = {"weights": state.weights, **{name: np.atleast_1d(value) for name, value in memory.items()}}
    scalars = [name for name, value in memory.items() if np.ndim(value) == 0]
    stem = folder / f"round-{state.round:06d}"
    blob = save({name: np.ascontiguousarray(value) for name, value in arrays.items()})
    write_atomic(stem.with_suffix(".safetensors"), blob)
    facts = {"round": state.round, "bytes": len(blob), "scalars": scalars, "ledger": head,
             "sha256": hashlib.sha256(blob).hexdigest()}  # fmt: skip
    write_atomic(stem.with_suffix(".json"), json.dumps({**facts, "check": _check(facts)}).encode())


def _check(facts: Document) -> str:
    """Checksum of a checkpoint's own facts."""
    rest = {name: value for name, value in facts.items() if name != "check"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


def checkpoints(folder: Path) -> list[int]:
    """Rounds that have a committed checkpoint, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(m.group(1)) for item in folder.iterdir() if (m := _NAME.fullmatch(item.name)))


def checkpoint_facts(folder: Path, round_number: int) -> Document:
    """What a checkpoint says about itself, checked; without "sha256" it was written by an earlier version."""
    path = folder / f"round-{round_number:06d}.json"
    facts = read_json(path)
    try:
        if not set(facts) <= _FACTS or ("check" in facts) != ("sha256" in facts):
            raise ValueError("it holds something else than a checkpoint's facts")
        if "check" in facts and facts["check"] != _check(facts):
            raise ValueError("its checksum does not fit")
        head = facts["ledger"] if facts.get("ledger") is not None else (0, "")
        if int(facts["round"]) != round_number or not isinstance(facts["bytes"], int):
            raise ValueError("it belongs to another round")
        facts["ledger"] = None if facts.get("ledger") is None else (int(head[0]), str(head[1]))
        facts["scalars"] = [str(name) for name in facts["scalars"]]
    except (AttributeError, LookupError, TypeError, ValueError) as wrong:
        raise UserError(
            f"checkpoint {path} is damaged ({wrong}). Delete this round's two files to resume from the one before"
        ) from None
    return facts


def load_checkpoint(folder: Path, round_number: int, like: State) -> State:
    """Read one checkpoint back into a state `like` the run's first one; a damaged one is a clear error."""
    arrays = check_checkpoint(folder, round_number)
    weights = arrays.pop("weights")
    try:
        return replace(like.restored(arrays), weights=weights, round=round_number)
    except UserError as wrong:
        raise UserError(
            f"the checkpoint of round {round_number} in {folder} is not one of this recipe in this version: {wrong}"
        ) from None


def check_checkpoint(folder: Path, round_number: int) -> dict[str, np.ndarray]:
    """The arrays of one checkpoint by today's names, checked against its size and checksum."""
    path = (folder / f"round-{round_number:06d}").with_suffix(".safetensors")
    facts = checkpoint_facts(folder, round_number)
    try:
        if path.stat().st_size != facts["bytes"]:
            raise ValueError("its size differs from what was written")
        blob = path.read_bytes()
        if "sha256" in facts and hashlib.sha256(blob).hexdigest() != facts["sha256"]:
            raise ValueError("its checksum does not fit")
        arrays = load(blob)
        if "weights" not in arrays:
            raise ValueError("it has no weights")
        return {_today(name): value[0] if name in facts["scalars"] else value for name, value in arrays.items()}
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as wrong:
        raise UserError(
            f"checkpoint {path} is damaged ({wrong}). Delete this round's two files to resume from the one before"
        ) from None


# What version 0.1 called the memories.
_BEFORE = {
    "bound": "clip.bound", "adaclip_mean": "clip.mean", "adaclip_variance": "clip.square", "momentum": "mover.momentum",
    "first": "aggregate.first", "second": "aggregate.second", "control": "aggregate.control",
    "public_losses": "aggregate.losses", "range_centre": "reports.centre", "range_radius": "reports.radius",
    "anchor": "anchor.weights", "average_sum": "average.total", "average_count": "average.count",
}  # fmt: skip


def _today(name: str) -> str:
    """The name of a memory, also where a checkpoint of version 0.1 calls it otherwise."""
    if not name.startswith("server."):
        return name
    own = name.removeprefix("server.")
    if own.startswith("control/"):
        return f"aggregate.own/{own.removeprefix('control/')}"
    return _BEFORE.get(own, own)


@dataclass(frozen=True)
class Run:
    """A run directory, read-only."""

    path: Path
    config: RunConfig
    facts: Document

    @property
    def metrics(self) -> list[Document]:
        return read_lines(self.path / "metrics.jsonl")

    @property
    def private(self) -> list[JsonObject]:
        return read_lines(self.path / "private.jsonl")

    @property
    def result(self) -> Document | None:
        path = self.path / "result.json"
        return read_json(path) if path.exists() else None

    @property
    def module(self) -> nn.Module:
        """The trained model: built anew, with the weights of model.safetensors."""
        from fedveil.federation.loop import trained

        refuse_foreign_code(self, False)
        return trained(self.path, self.config)

    def __repr__(self) -> str:
        done = self.result
        told = "not finished" if done is None else f"{done['rounds']} rounds, {done['stopped']}"
        return f"<Run {self.config.recipe} on {self.config.dataset}: {told}, {self.path}>"

    def ledger(self, rounds: int | None = None) -> Ledger:
        """The run's ledger, opened for reading, as it was after that many rounds if given."""
        from fedveil.privacy.ledger import Ledger

        return Ledger.read(self.path / "ledger.jsonl", rounds=rounds)

    def rounds(self) -> list[int]:
        """Rounds with a checkpoint."""
        return checkpoints(self.path / "checkpoints")

    def state(self, round_number: int | None = None) -> State:
        """The state at a checkpoint (the last one unless given)."""
        known = self.rounds()
        if not known:
            raise UserError(f"{self.path} has no checkpoint yet")
        wanted = known[-1] if round_number is None else round_number
        if wanted not in known:
            raise UserError(
                f"{self.path} has no checkpoint of round {wanted}; there are {', '.join(map(str, known))}"
            )
        recipe, config = self.config.built_recipe(), self.config
        mover = Momentum(beta=config.server_momentum) if config.server_momentum else Mean()
        like = blank(recipe, 1, config.rounds, mover)
        return load_checkpoint(self.path / "checkpoints", wanted, like)


def open_run(path: str | Path | Run, recipe: Recipe | None = None) -> Run:
    """Read a run directory; nothing in it is executed. An opened run is returned as it is.

    recipe: the value that the run was made with, where its directory cannot name it.
    """
    if isinstance(path, Run):
        return path if recipe is None else replace(path, config=path.config.given(recipe))
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"run directory '{folder}' does not exist")
    facts = read_json(folder / "run.json")
    try:
        config = RunConfig(**facts["config"])
    except (KeyError, TypeError, ValueError) as wrong:
        raise UserError(f"{folder / 'run.json'}: not a configuration of this version: {wrong}") from None
    if (folder / TABLE).exists():
        config = config.with_look(looked_from_json(read_json(folder / TABLE)))
    return Run(folder, config if recipe is None else config.given(recipe), facts)


def names_code(config: RunConfig) -> str:
    """The module:function that a configuration would import and call, or ''. A stored one may be a stranger's."""
    found = [name for name in (config.dataset, config.model) if ":" in name and not Path(name).is_file()]
    found += re.findall(r"(?:^backbone:|\bmodule=)([\w.]+:\w+)", config.features or "")
    found += [config.recipe] if named_code(config.recipe) else []
    found += [name for name in config.metrics if ":" in name]
    found += [config.loss] if named_code(config.loss) else []
    return found[0] if found else ""


def refuse_named_code(config: RunConfig, trust: bool) -> None:
    """A configuration may come from anyone: importing what it names (dataset, model, features, recipe, loss) needs the
    user's word."""
    name = names_code(config)
    if name and not trust:
        raise UserError(f"the configuration names code to import and call: '{name}'. If you trust it, add --trust-code")


def refuse_foreign_code(run: Run, trust: bool) -> None:
    """A run directory must not run code by being opened: importing what it names needs the user's word."""
    name = names_code(run.config)
    if name and not trust:
        raise UserError(
            f"{run.path} names code to import and call: '{name}'. If you wrote it and trust this directory, add --trust-code"
        )
