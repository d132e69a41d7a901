"""Comparison: runs are made or read, means and deviations are right, a picture is drawn."""

import statistics

import pytest

from fedveil.errors import UserError
from fedveil.federation.store import open_run
from fedveil.report.compare import compare_all, plot_pareto

SMALL = ["dataset=cancer", "clients=3", "rounds=2", "local_steps=2"]


def test_rows_have_mean_deviation_epsilons_and_time(tmp_path):
    rows = compare_all(["fed-cdp", "fed-alpha-cdp"], SMALL, 2, tmp_path)
    runs = [open_run(tmp_path / f"fed-cdp-{seed}").result["test_accuracy"] for seed in (0, 1)]
    assert rows[0]["mean"] == pytest.approx(statistics.fmean(runs))
    assert rows[0]["deviation"] == pytest.approx(statistics.stdev(runs))
    assert rows[0]["epsilon_sound"] > 0 and rows[0]["epsilon_nominal"] > 0
    assert rows[1]["epsilon_sound"] is None and rows[1]["epsilon_nominal"] > 0
    assert rows[0]["milliseconds_per_local_iteration"] > 0
    plot_pareto(rows, tmp_path / "pareto.png")
    assert (tmp_path / "pareto.png").stat().st_size > 5000
    with pytest.raises(UserError, match="png"):
        plot_pareto(rows, tmp_path / "pareto.gif")


def test_finished_runs_are_read_not_made_again(tmp_path):
    compare_all(["non-private"], SMALL, 1, tmp_path)
    before = (tmp_path / "non-private-0" / "result.json").stat().st_mtime_ns
    rows = compare_all([str(tmp_path / "non-private-0")], [], 3, tmp_path)
    assert rows[0]["runs"] == 1
    assert (tmp_path / "non-private-0" / "result.json").stat().st_mtime_ns == before
