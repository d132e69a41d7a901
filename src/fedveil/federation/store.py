"""The run directory: plain JSON, JSON lines and safetensors; written atomically, read without running code."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from fedveil.errors import UserError
from fedveil.federation.config import RunConfig
from fedveil.federation.round import State

PACKAGES = ("fedveil", "torch", "numpy", "scipy", "dp-accounting", "scikit-learn")
_NAME = re.compile(r"round-(\d{6})\.json$")


def write_atomic(path: Path, content: bytes) -> None:
    """Write, sync, rename: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as wrong:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(
            f"cannot write {path}: {wrong.strerror}. Free space or choose another --out; the last "
            "checkpoint is intact and --resume continues from it"
        ) from wrong
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: not a run directory, or the run never started") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as wrong:
        raise UserError(f"{path} is damaged: {wrong}") from None


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Append one JSON line."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(value, allow_nan=False) + "\n")
    except OSError as wrong:
        raise UserError(f"cannot write {path}: {wrong.strerror}") from wrong


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a torn last line is skipped."""
    out = []
    if path.exists():
        for text in path.read_text("utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                out.append(json.loads(text))
    return out


def keep_rounds(path: Path, last: int) -> None:
    """Drop lines of rounds after `last` (they will be played again)."""
    kept = [line for line in read_lines(path) if line.get("round", 0) <= last]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept).encode())


def save_checkpoint(folder: Path, state: State, head: tuple[int, str] | None = None) -> None:
    """One State as safetensors plus JSON. The JSON is written last and names the data's size: it commits.

    head: number and hash of the ledger's last record, so that a ledger that was cut or exchanged is found.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"weights": state.weights}
    arrays.update({f"server.{name}": np.atleast_1d(value) for name, value in state.server.items()})
    scalars = [f"server.{name}" for name, value in state.server.items() if np.ndim(value) == 0]
    stem = folder / f"round-{state.round:06d}"
    blob = save({name: np.ascontiguousarray(value) for name, value in arrays.items()})
    write_atomic(stem.with_suffix(".safetensors"), blob)
    write_atomic(
        stem.with_suffix(".json"),
        json.dumps({"round": state.round, "bytes": len(blob), "scalars": scalars, "ledger": head}).encode(),
    )


def checkpoints(folder: Path) -> list[int]:
    """Rounds that have a committed checkpoint, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(m.group(1)) for item in folder.iterdir() if (m := _NAME.search(item.name)))


def ledger_head(folder: Path) -> tuple[int, str] | None:
    """The ledger record that the newest checkpoint saw, if there is one."""
    known = checkpoints(folder)
    if not known:
        return None
    head = read_json(folder / f"round-{known[-1]:06d}.json").get("ledger")
    return None if head is None else (int(head[0]), str(head[1]))


def load_checkpoint(folder: Path, round_number: int) -> State:
    """Read one checkpoint back; a damaged one is a clear error."""
    stem = folder / f"round-{round_number:06d}"
    facts = read_json(stem.with_suffix(".json"))
    blob = stem.with_suffix(".safetensors")
    try:
        if blob.stat().st_size != facts["bytes"]:
            raise ValueError("its size differs from what was written")
        arrays = load_file(blob)
    except (OSError, ValueError, KeyError, SafetensorError) as wrong:
        raise UserError(
            f"checkpoint {blob} is damaged ({wrong}). Delete this round's two files to resume from the one before"
        ) from None
    server = {
        name.removeprefix("server."): value[0] if name in facts["scalars"] else value
        for name, value in arrays.items()
        if name.startswith("server.")
    }
    return State(arrays["weights"], int(facts["round"]), server)


@dataclass(frozen=True)
class Run:
    """A run directory, read-only."""

    path: Path
    config: RunConfig
    facts: dict[str, Any]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "metrics.jsonl")

    @property
    def private(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "private.jsonl")

    @property
    def result(self) -> dict[str, Any] | None:
        path = self.path / "result.json"
        return read_json(path) if path.exists() else None

    def ledger(self, rounds: int | None = None) -> Any:
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
        return load_checkpoint(self.path / "checkpoints", wanted)


def open_run(path: str | Path) -> Run:
    """Read a run directory; nothing in it is executed."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"run directory '{folder}' does not exist")
    facts = read_json(folder / "run.json")
    try:
        config = RunConfig(**facts["config"])
    except (KeyError, TypeError, ValueError) as wrong:
        raise UserError(f"{folder / 'run.json'}: not a configuration of this version: {wrong}") from None
    return Run(folder, config, facts)


def names_code(config: RunConfig) -> str:
    """The module:function that a configuration would import and call, or ''. A stored one may be a stranger's."""
    found = [name for name in (config.dataset, config.model) if ":" in name and not Path(name).is_file()]
    return found[0] if found else ""


def refuse_foreign_code(run: Run, trust: bool) -> None:
    """A run directory must not run code by being opened: importing what it names needs the user's word."""
    name = names_code(run.config)
    if name and not trust:
        raise UserError(
            f"{run.path} names code to import and call: '{name}'. If you wrote it and trust this directory, add --trust-code"
        )


def list_runs(folder: Path) -> Iterator[Run]:
    """Every readable run directly below `folder`, newest first."""
    found = [item for item in folder.iterdir() if (item / "run.json").is_file()] if folder.is_dir() else []
    for item in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True):
        with contextlib.suppress(UserError):
            yield open_run(item)
