"""The sweeps over pruning and batch size, on the embedded digits."""

from pathlib import Path

import pytest

sweeps = pytest.importorskip(
    "bench.leak_sweeps", reason="the benchmarks are not part of an installed package"
)

def test_pruning_nearly_everything_hides_the_image_and_pruning_a_little_does_not():
    found = {
        share: sweeps.point("x", "gradient-pruning", "veil", 4, 1, 0, {"prune": share}, dataset="digits")
        for share in (0.1, 0.99)
    }
    assert found[0.1]["success_rate"] == 1.0 and found[0.99]["success_rate"] == 0.0
    assert found[0.1]["prune"] == 0.1 and found[0.1]["batch"] == 1


def test_page_and_picture_have_every_point(tmp_path: Path):
    names = [name for name, _ in sweeps.jobs("")]
    assert len(set(names)) == len(names) == 2 * len(sweeps.PRUNED) + len(sweeps.BATCHES)
    assert [n for n, _ in sweeps.jobs("batch")] + [n for n, _ in sweeps.jobs("pruning")] != names
    line = {
        **dict.fromkeys(
            ("success_rate", "label_accuracy", "rmse", "ssim", "mean_rmse", "cpu_seconds_per_victim"), 0.25
        ),
        "victims": 3,
    }
    text = sweeps.page({name: line for name in names}, seed=7)
    assert (
        all(f"| {share:.0%} |" in text for share in sweeps.PRUNED)
        and "| 100 | 3 |" in text
        and "seed 7" in text
    )
    sweeps.picture({name: line for name in names}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000
