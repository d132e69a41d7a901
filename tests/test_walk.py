"""A newcomer's walk: the commands of README and tutorials run as printed, one after the other in an empty folder.

What needs files of one's own gets drawn ones. Every command that trains ends with a model that learned, except where the
page itself says that the paper's setting does not.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.S | re.M)
PAGES = ["README.md", "docs/index.md", "docs/tutorial-tables.md", "docs/tutorial-images.md", "docs/tutorial-paper.md"]
ELSEWHERE = {  # command -> why it is not run here
    "pip install .": "tests/test_packaging.py",
    "fedveil data get mnist --data data": "needs a network",
    "fedveil run mnist-headline-b --data data --out runs/mnist": "needs MNIST, minutes; docs/headline.md",
    "fedveil reproduce p3-fig3 --scale small": "needs datasets, minutes; tests/studies",
    "fedveil reproduce p2-table4 --scale paper --resume": "hours; docs/reproduction",
}
TOO_NOISY = {"fedveil run fed-alpha-cdp --set dataset=cancer --out runs/paper"}  # the paper's own setting
TRAINING = ("run", "fit")


def commands(page: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    lines = [line.partition(" #")[0].strip() for block in BLOCK.findall(text) for line in block.splitlines()]
    return [line for line in lines if line]


def draw_files(folder: Path) -> None:
    """patients.csv and images.npz as the pages take them for granted: rows of made-up people, four kinds of pictures."""
    draw = np.random.default_rng(0)
    with (folder / "patients.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["patient_id", "hospital", "age", "sex", "crp", "outcome"])
        for number in range(4000):
            age, crp, sex = int(draw.integers(20, 95)), float(draw.exponential(40)), str(draw.choice(["F", "M"]))
            risk = (age - 57) / 15 + (crp - 40) / 40
            said = "died" if draw.random() < 1 / (1 + np.exp(-1.5 * risk)) else "alive"
            shown = "" if draw.random() < 0.1 else round(crp, 1)
            table.writerow([number, str(draw.choice(["north", "south", "east"])), age, sex, shown, said])
    labels = draw.integers(0, 4, 2000)
    pictures = draw.random((2000, 16, 16)) * 0.3
    for kind in range(4):
        pictures[labels == kind, 8 * (kind // 2) : 8 * (kind // 2) + 8, 8 * (kind % 2) : 8 * (kind % 2) + 8] += 0.6
    np.savez(folder / "images.npz", x=pictures.astype(np.float32), y=labels)


def test_what_is_not_walked_is_still_on_a_page() -> None:
    printed = {line for page in PAGES for line in commands(page)}
    assert set(ELSEWHERE) | TOO_NOISY <= printed


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_as_printed_and_its_models_learn(page: str, tmp_path: Path) -> None:
    draw_files(tmp_path)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for line in commands(page):
        if line in ELSEWHERE:
            continue
        words = shlex.split(line)
        assert words[0] == "fedveil", line
        done = subprocess.run(
            [sys.executable, "-m", "fedveil", *words[1:]], cwd=tmp_path, env=env, capture_output=True, text=True,
            timeout=900, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stderr[-2000:])
        if words[1] in TRAINING:
            assert ("The model is better than" in done.stdout) is (line not in TOO_NOISY), (line, done.stdout[-2000:])
