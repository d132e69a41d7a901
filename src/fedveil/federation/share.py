"""The shareable copy of a run's folder: what may be shown to anybody, and nothing else.

Everything is chosen by name from lists, so that what a later version adds to a run's folder stays at home until somebody puts
it on a list. Files of the copy are called `shareable-…`; the model keeps its name.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from fedveil.errors import UserError
from fedveil.federation import store
from fedveil.jsons import Document

SECRET_KEYS = (
    "seed", "split_seed", "data", "tuning", "partition_options", "client_epsilons", "client_deltas", "client_mechanisms",
    "client_radii", "delay_proposals", "compute_seconds", "network_seconds", "overrun_seconds", "slack_seconds",
)  # fmt: skip
FACTS = ("versions", "simulated", "engine", "engine_reason", "created", "python", "parameters", "layers")
METRICS = ("round", "epsilon", "sigma", "bound", "learning_rate", "expected_l1", "expected_l1_bound")
MEASURED = ("test_", "validation_")
RESULT = ("recipe", "dataset", "rounds", "stopped", "engine", "simulated", "ledger", "judgement")
HOME = "private.jsonl, ledger.jsonl (who took part), checkpoints, reports, keys, seeds, paths, times"


def shareable(run: store.Run) -> dict[str, bytes]:
    """The files of the copy by name, without the model.

    Formal guarantee: post-processing of the run's public rows: released models, their measures on public test rows, public
    settings and the ledger's table. No seed (it subtracts simulated noise), no client's number, size or budget, no time.
    (A promise to whole clients by group privacy says how many examples the largest of them holds, and not which one that is.)
    """
    config = {k: v for k, v in run.config.model_dump().items() if k not in SECRET_KEYS}
    config["dataset"] = _named(config["dataset"])
    config["features"] = _features(config["features"])
    facts = {"config": config, **{k: run.facts[k] for k in FACTS if k in run.facts}}
    lines = [{k: v for k, v in line.items() if k in METRICS or k.startswith(MEASURED)} for line in run.metrics]
    result = run.result or {}
    told = {k: v for k, v in result.items() if k in RESULT or k.startswith(MEASURED)}
    if "dataset" in told:
        told["dataset"] = _named(told["dataset"])
    book = run.ledger()
    rows = [asdict(row) for row in book.table(named=False)]
    if "ledger" in told:  # what the run wrote down for its owner names clients
        told["ledger"] = [asdict(row) for row in book.table(accountant=run.config.accountant, named=False)]
    table: Document = {"delta": book.header.delta, "rounds": book.rounds, "rows": rows}
    if book.header.public:
        table["public"] = list(book.header.public)
    if book.header.assumes:
        table["assumes"] = list(book.header.assumes)
    return {
        "shareable-run.json": _json(facts),
        "shareable-metrics.jsonl": b"".join(_json(line, None) for line in lines),
        "shareable-result.json": _json(told),
        "shareable-ledger.json": _json(table),
    }


def may_share_model(run: store.Run) -> str:
    """Why the model itself must stay at home, or "": the public must be promised something that holds, with secret noise."""
    book = run.ledger()
    if book.header.simulated:
        return "its noise is seeded, and whoever guesses the seed subtracts it"
    if not any(row.observer == "public" and row.verdict == "sound" for row in book.table()):
        return "nothing that holds is promised to the public"
    return ""


def share(run: store.Run, out: Path, model: bool = False) -> Document:
    """Write the copy into `out`, which must be new or empty; returns what was written and what was left out, and why.

    model: copy the model although nothing that holds is promised about it (a run on public data)."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: is there already and not empty; name a new folder")
    files = shareable(run)
    why = may_share_model(run)
    source = run.path / "model.safetensors"
    if source.exists() and (model or not why):
        files[source.name] = store.read_bytes(source)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise UserError(f"--out {out}: cannot create the folder: {wrong.strerror}") from None
    for name, content in files.items():
        store.write_atomic(out / name, content)
    kept = {} if source.name in files or not source.exists() else {source.name: why}
    told = {"files": {n: hashlib.sha256(c).hexdigest() for n, c in files.items()}, "left_out": {**kept, "always": HOME}}
    store.write_json(out / "shareable.json", told)
    return told


def _named(dataset: str) -> str:
    """A dataset's name without the folder that it lies in."""
    return Path(dataset).name


def _features(text: str | None) -> str | None:
    """Features without the folder that a backbone's file lies in."""
    if text is None or not text.startswith("backbone:"):
        return text
    name, comma, options = text.removeprefix("backbone:").partition(",")
    return f"backbone:{_named(name)}{comma}{options}"


def _json(value: object, indent: int | None = 2) -> bytes:
    return (json.dumps(value, indent=indent) + "\n").encode()
