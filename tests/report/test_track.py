"""Export to trackers: public figures arrive, private ones never leave."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import UserError
from fedveil.federation.config import RunConfig, load_config
from fedveil.federation.loop import run as simulate
from fedveil.federation.store import open_run
from fedveil.report.track import export, tracker


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(
        "fed-cdp", ["rounds=3", "local_steps=1", "clients=3", "report=false", 'name="tracked"']
    )


class FakeMlflow(types.ModuleType):
    """The four calls of MLflow that are used, recorded."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.metrics: list[tuple[str, float, int]] = []
        self.params: dict[str, str] = {}
        self.name = ""

    def set_tracking_uri(self, target: str) -> None:
        self.target = target

    @contextmanager
    def start_run(self, run_name: str) -> Any:
        self.name = run_name
        yield

    def log_params(self, params: dict[str, str]) -> None:
        self.params |= params

    def log_metric(self, key: str, value: float, step: int) -> None:
        self.metrics.append((key, value, step))


def test_mlflow_gets_each_round_and_no_private_figure(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    with tracker("mlflow", tmp_path / "run", config, "http://localhost:1") as hook:
        simulate(config, tmp_path / "run", on_round=hook)
    lines = open_run(tmp_path / "run").metrics
    assert [v for k, v, _ in fake.metrics if k == "test_accuracy"] == [
        line["test_accuracy"] for line in lines
    ]
    assert {step for _, _, step in fake.metrics} == {1, 2, 3}
    private = {key for line in open_run(tmp_path / "run").private for key in line} - {"round"}
    assert private and not private & {key for key, _, _ in fake.metrics}
    assert (
        fake.name == "tracked" and fake.params["recipe"] == "fed-cdp" and fake.target == "http://localhost:1"
    )


def test_mlflow_itself_reads_back_what_was_exported(config: RunConfig, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="mlflow's database store is not installed")
    target = f"sqlite:///{tmp_path / 'tracked.db'}"
    simulate(config, tmp_path / "run")
    export(tmp_path / "run", "mlflow", target)
    client = mlflow.MlflowClient(target)
    (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    lines = open_run(tmp_path / "run").metrics
    history = client.get_metric_history(found.info.run_id, "test_accuracy")
    assert [(m.step, m.value) for m in history] == [(line["round"], line["test_accuracy"]) for line in lines]
    assert found.info.run_name == "tracked" and found.data.params["recipe"] == "fed-cdp"
    assert not {"loss", "norm_mean"} & set(found.data.metrics)


def test_a_store_that_mlflow_refuses_is_explained(config: RunConfig, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    with (
        pytest.raises(UserError, match=r"nowhere.*MLflow refuses"),
        tracker("mlflow", tmp_path, config, "nowhere://x"),
    ):
        pass


def test_tensorboard_reads_back_what_was_exported(config: RunConfig, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    simulate(config, tmp_path / "run")
    assert export(tmp_path / "run", "tensorboard") == str(tmp_path / "run" / "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = open_run(tmp_path / "run").metrics
    found = [(e.step, pytest.approx(e.value, rel=1e-6)) for e in events.Scalars("test_accuracy")]
    assert found == [(line["round"], line["test_accuracy"]) for line in lines]
    assert "loss" not in events.Tags()["scalars"]


def test_a_missing_or_unknown_tracker_is_explained(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match="pip install mlflow"), tracker("mlflow", tmp_path, config):
        pass
    with pytest.raises(UserError, match="Did you mean 'mlflow'"), tracker("mlfow", tmp_path, config):
        pass
