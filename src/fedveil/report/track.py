"""Runs in TensorBoard or MLflow. Only a run's public figures go there: what metrics.jsonl and result.json hold.

with tracker("tensorboard", folder, config) as hook:
    simulate.run(config, folder, on_round=hook)     # each round appears while the run goes on

export(folder, "mlflow")                            # a run that exists already
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedveil.errors import UserError, did_you_mean
from fedveil.federation.config import RunConfig
from fedveil.federation.store import open_run

KINDS = ("tensorboard", "mlflow")
Log = Callable[[str, float, int], None]


@contextmanager
def tracker(
    kind: str, folder: Path, config: RunConfig, target: str | None = None
) -> Iterator[Callable[[Any], None]]:
    """An `on_round` callback that sends each round's public figures. `target`: log folder or tracking address."""
    with _writer(kind, Path(folder), config, target) as log:
        yield lambda facts: send(log, facts.metrics)


def export(folder: Path, kind: str, target: str | None = None) -> str:
    """Send all rounds of a run directory; returns where they went."""
    run = open_run(folder)
    with _writer(kind, Path(folder), run.config, target) as log:
        for line in run.metrics:
            send(log, line)
    return target or (str(Path(folder) / "tensorboard") if kind == "tensorboard" else "MLflow's default")


def send(log: Log, line: Mapping[str, object]) -> None:
    """One round: every finite number, under its own name."""
    step = line.get("round")
    if not isinstance(step, int):
        return
    for name, value in line.items():
        if name != "round" and isinstance(value, int | float) and not isinstance(value, bool):
            log(name, float(value), step)


@contextmanager
def _writer(kind: str, folder: Path, config: RunConfig, target: str | None) -> Iterator[Log]:
    if kind not in KINDS:
        raise UserError(f"--track {kind}: use one of {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
    settings = {k: str(v) for k, v in config.model_dump().items() if v is not None and k != "data"}
    name = config.name or folder.resolve().name
    if kind == "tensorboard":
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("--track tensorboard: the package is missing; pip install tensorboard") from None
        writer = SummaryWriter(log_dir=str(Path(target) / name if target else folder / "tensorboard"))
        try:
            writer.add_text("config", "\n".join(f"    {k} = {v}" for k, v in settings.items()))
            yield writer.add_scalar
        finally:
            writer.close()
        return
    try:
        import mlflow
    except ImportError:
        raise UserError("--track mlflow: the package is missing; pip install mlflow") from None
    if target:
        mlflow.set_tracking_uri(target)
    try:  # the first words with the store: a wrong address or kind of store shows here
        active = mlflow.start_run(run_name=name)
    except mlflow.exceptions.MlflowException as wrong:
        where = f"--target {target}" if target else "--track mlflow"
        raise UserError(f"{where}: MLflow refuses it: {wrong}") from None
    with active:
        mlflow.log_params({k: v[:500] for k, v in settings.items()})
        yield lambda key, value, step: mlflow.log_metric(key, value, step=step)
