"""A newcomer's walk: what README and tutorials print is run as printed, one block after the other in an empty folder.

Commands and blocks of Python alike. Every command that trains ends with a model that learned, except where the page itself
says that the paper's setting does not. What is not walked is named here, with the reason.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil.models.backbones import installed

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<kind>sh|python)\n(?P<body>.*?)^```", re.S | re.M)
PAGES = ["README.md", "docs/index.md", "docs/tutorial-tables.md", "docs/tutorial-images.md", "docs/tutorial-paper.md",
         "docs/tutorial-text.md"]  # fmt: skip
ELSEWHERE = {  # command -> why it is not run here
    "pip install .": "tests/test_packaging.py",
    "fedveil data get mnist --data data": "needs a network",
    "fedveil run mnist-headline-b --data data --out runs/mnist": "minutes; docs/headline.md",
    "fedveil reproduce p3-fig3 --scale small": "minutes; tests/studies",
    "fedveil reproduce p2-table4 --scale paper --resume": "hours; docs/reproduction",
}
TOO_NOISY = {"fedveil run fed-alpha-cdp --set dataset=cancer --out runs/paper"}  # the paper's own setting
TRAINING = ("run", "fit")


def blocks(page: str) -> list[tuple[str, str]]:
    """(kind, text) of what a page has its reader run, in order: single commands, and whole blocks of Python."""
    out: list[tuple[str, str]] = []
    for found in BLOCK.finditer((ROOT / page).read_text("utf-8")):
        if found["kind"] == "sh":
            lines = [line.partition(" #")[0].strip() for line in found["body"].splitlines()]
            out += [("sh", line) for line in lines if line]
        elif "--8<--" not in found["body"] and (found["reason"] or "alone").startswith("alone"):
            out.append(("python", found["body"]))
    return out


def test_what_is_not_walked_is_still_on_a_page() -> None:
    printed = {text for page in PAGES for _, text in blocks(page)}
    assert set(ELSEWHERE) | TOO_NOISY <= printed


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_as_printed_and_its_models_learn(page: str, tmp_path: Path) -> None:
    if page.endswith("text.md") and not (installed("minilm") and os.environ.get("FEDVEIL_DATA")):
        pytest.skip("needs the extra backbones, and sst2 in FEDVEIL_DATA")
    if os.environ.get("FEDVEIL_DATA"):
        (tmp_path / "data").symlink_to(os.environ["FEDVEIL_DATA"])  # the folder that the pages call data
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for kind, text in blocks(page):
        if text in ELSEWHERE:
            continue
        words = shlex.split(text) if kind == "sh" else []
        assert kind == "python" or words[0] == "fedveil", text
        command = ["-m", *words] if kind == "sh" else ["-c", text]
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, (text, done.stderr[-2000:])
        if kind == "sh" and words[1] in TRAINING:
            assert ("The model is better than" in done.stdout) is (text not in TOO_NOISY), (text, done.stdout[-2000:])
