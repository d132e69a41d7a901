"""Every example in docs/examples, and every block of Python in README and CONTRIBUTING, runs as it is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "docs" / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path, tmp_path):
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


ROOT = Path(__file__).parents[1]
BLOCKS = [
    (name, number, block)
    for name in ("README.md", "CONTRIBUTING.md")
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text("utf-8"), re.S))
]


@pytest.mark.parametrize(("name", "number", "block"), BLOCKS, ids=lambda v: str(v)[:16])
def test_blocks_of_python_run_as_printed(name, number, block, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
