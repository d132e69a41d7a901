"""Mode connectivity: equal models, a known low-loss path, pairs in one computation, odd ones carried."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy.integrate import trapezoid
from torch import nn

from fedveil import keys
from fedveil.errors import UserError
from fedveil.federation.config import load_config
from fedveil.federation.loop import run as simulate
from fedveil.models.layout import flatten, layout_of
from fedveil.protect.aggregate import connectivity as con
from fedveil.protect.aggregate.connectivity import Search
from fedveil.report.page import write_report

KEY = keys.derive(5, "connectivity")
NOTHING = torch.zeros(4, 1), torch.zeros(4)


def ring(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Low exactly on the unit circle: the straight line between two points of it climbs, an arc does not."""
    return ((weights**2).sum(dim=1) - 1) ** 2


def ends(degrees: float) -> np.ndarray:
    angle = np.deg2rad(degrees)
    return np.array([[1.0, 0.0], [np.cos(angle), np.sin(angle)]])


@pytest.mark.parametrize(("curve", "mean_loss"), [("polygon", 0.012), ("bezier", 0.004)])
def test_it_finds_the_known_low_loss_path(curve: str, mean_loss: float) -> None:
    search = Search(curve, steps=2000, learning_rate=0.05, check_every=100, tolerance=1e-4, points=21)
    merged = con.merge_on(ends(100), ring, *NOTHING, KEY, search)
    (path,) = merged.paths
    assert path.straight.max() == pytest.approx(
        (1 - np.cos(np.deg2rad(50)) ** 2) ** 2, abs=1e-3
    )  # chord's middle
    assert path.trained.mean() < mean_loss < path.straight.mean() / 8
    assert np.linalg.norm(merged.weights) == pytest.approx(1.0, abs=0.12)
    assert merged.weights == pytest.approx(
        np.linalg.norm(merged.weights) * np.array([np.cos(np.deg2rad(50)), np.sin(np.deg2rad(50))]), abs=0.05
    )


def small_net() -> tuple[nn.Module, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 4)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), x, y


@pytest.mark.parametrize("curve", ["polygon", "bezier"])
@pytest.mark.parametrize("reach", [1.0, None])
@pytest.mark.parametrize("count", [2, 5])
def test_identical_models_merge_to_that_model_exactly(curve: str, reach: float | None, count: int) -> None:
    module, x, y = small_net()
    model = flatten(module)
    search = Search(curve, steps=30, reach=reach, learning_rate=0.5)
    merged = con.merge(np.tile(model, (count, 1)), module, layout_of(module), x, y, KEY, search)
    assert (merged.weights == model).all()


def models(count: int, module: nn.Module) -> np.ndarray:
    base = flatten(module)
    return (base + np.random.default_rng(3).normal(0, 0.5, (count, base.size))).astype(np.float32)


@pytest.mark.parametrize(("count", "pairs"), [(1, []), (2, [1]), (5, [2, 1, 1]), (8, [4, 2, 1])])
def test_pairs_are_disjoint_and_an_odd_model_is_carried(count: int, pairs: list[int]) -> None:
    module, x, y = small_net()
    merged = con.merge(models(count, module), module, layout_of(module), x, y, KEY, Search(steps=2))
    levels = [p.level for p in merged.paths]
    assert [levels.count(i) for i in range(len(pairs))] == pairs
    for level in set(levels):
        members = [m for p in merged.paths if p.level == level for m in p.pair]
        assert len(members) == len(set(members))


def test_the_expected_loss_on_the_path_never_ends_above_the_straight_line() -> None:
    module, x, y = small_net()
    search = Search(steps=60, learning_rate=5.0, check_every=5)  # a wild step size on purpose
    for path in con.merge(models(6, module), module, layout_of(module), x, y, KEY, search).paths:
        assert trapezoid(path.trained, path.p) <= trapezoid(path.straight, path.p) + 1e-6


def test_merging_lowers_the_public_loss_of_the_average() -> None:
    module, x, y = small_net()
    layout, clients = layout_of(module), models(4, module)
    search = Search(steps=200, learning_rate=0.1, batch=60)
    merged = con.merge(clients, module, layout, x, y, KEY, search)
    loss = con.module_loss(module, layout, "cross-entropy")
    both = torch.as_tensor(np.stack([merged.weights, clients.mean(0)]))
    ours, average = loss(both, torch.as_tensor(x), torch.as_tensor(y)).tolist()
    assert ours < 0.9 * average


def test_pairs_trained_together_equal_pairs_trained_alone() -> None:
    module, x, y = small_net()
    layout, clients = layout_of(module), models(6, module)
    one, many = (
        con.merge(clients, module, layout, x, y, KEY, Search(steps=25, pairs_at_once=n)).weights
        for n in (1, 16)
    )
    assert one == pytest.approx(many, abs=2e-5)


def test_the_bend_stays_within_reach() -> None:
    far = con.merge_on(ends(100), lambda w, x, y: w.sum(dim=1), *NOTHING, KEY, Search(steps=500, reach=0.25))
    assert (
        np.linalg.norm(far.weights - ends(100).mean(0))
        <= 0.25 * np.linalg.norm(np.diff(ends(100), axis=0)) + 1e-6
    )


def test_a_flat_loss_stops_early() -> None:
    search = Search(steps=500, check_every=10, patience=2)
    (path,) = con.merge_on(ends(100), lambda w, x, y: (0 * w).sum(dim=1) + 1, *NOTHING, KEY, search).paths
    assert path.steps <= 20


def test_regression_uses_the_squared_loss() -> None:
    module = nn.Sequential(nn.Linear(3, 1))
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    y = x.sum(axis=1)
    start = np.stack([flatten(module) + 0.3, flatten(module) - 0.3])
    merged = con.merge(start, module, layout_of(module), x, y, KEY, Search(steps=50), loss="squared")
    assert merged.paths[0].trained.mean() < merged.paths[0].straight.mean()


def test_public_data_is_required() -> None:
    with pytest.raises(UserError, match="public"):
        con.merge_on(ends(90), ring, torch.zeros(0, 1), torch.zeros(0), KEY)
    with pytest.raises(UserError, match="curve"):
        Search("spline")  # type: ignore[arg-type]


def test_paths_can_be_plotted(tmp_path) -> None:
    merged = con.merge_on(np.concatenate([ends(90), ends(45)]), ring, *NOTHING, KEY, Search(steps=5))
    con.plot_paths(merged.paths, tmp_path / "paths.png")
    assert (tmp_path / "paths.png").read_bytes()[:4] == b"\x89PNG"


def test_the_paths_of_a_run_are_recorded_and_stand_in_its_report(tmp_path) -> None:
    small = ["dataset=digits", "clients=4", "rounds=1", "local_steps=2", "batch_size=8", "report=false"]
    changes = [*small, "aggregate=connectivity", "validation=0.1", "model=logistic"]
    simulate(load_config("udp-fl-gaussian", changes), tmp_path / "run")
    (line,) = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    routes = con.recorded(line["paths"])
    assert [r.level for r in routes] == [0, 0, 1]
    assert all(r.trained.mean() <= r.straight.mean() + 1e-6 for r in routes)
    con.plot_paths(routes, tmp_path / "paths.png")
    write_report([tmp_path / "run"], tmp_path / "page.html")
    assert "Public loss between merged models" in (tmp_path / "page.html").read_text("utf-8")
