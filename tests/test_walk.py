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
PAGES: dict[str, tuple[str, ...]] = {  # page -> what its reader has done before
    "README.md": (), "docs/index.md": (), "docs/tutorial-tables.md": (), "docs/tutorial-images.md": (),
    "docs/tutorial-paper.md": (), "docs/tutorial-text.md": (), "docs/how-to.md": (), "docs/udp-fl.md": (), "docs/models.md": (),
    "docs/attacks.md": ("fedveil run digits-start --out runs/first",),
    "docs/report.md": ("fedveil run cancer-headline-b --out runs/first", "fedveil run cancer-headline-a --out runs/second"),
    "docs/contract.md": (
        "fedveil data sample public.csv --kind study --seed 1", "fedveil data sample patients.csv --kind study --seed 2",
        "fedveil plan --epsilon 6 --clients 3 --examples 1050 --kind table --columns 3 --classes 2 --out study.toml",
        "fedveil flower identity owner.key", "fedveil flower contract flu-2.toml --config study.toml --public public.csv "
        "--target outcome --examples 400 --epsilon 8 --study flu",
    ),
}  # fmt: skip
NEEDS_DATA = {"docs/tutorial-text.md", "docs/udp-fl.md"}
RUN_BY = {"docs/tutorial-deploy.md": "tests/flower/test_tutorial.py"}
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
        if found["kind"] == "sh" and not found["reason"]:
            body = re.sub(r"\\\n\s*", " ", found["body"])
            lines = [line.partition(" #")[0].strip() for line in body.splitlines()]
            out += [("sh", line) for line in lines if line]
        elif found["kind"] == "python" and "--8<--" not in found["body"] and (found["reason"] or "alone").startswith("alone"):
            out.append(("python", found["body"]))
    return out


def test_what_is_not_walked_is_still_on_a_page() -> None:
    printed = {text for page in PAGES for _, text in blocks(page)}
    assert set(ELSEWHERE) | TOO_NOISY <= printed


COMMAND = re.compile(r"^\s*(?:\w+\$ +|[A-Z_]+=\S* )*(?:fedveil|python|pip|bash|flwr|cmake) ", re.M)


def unexplained(page: str) -> list[str]:
    """Blocks with commands that no test runs and that do not say why."""
    text = (ROOT / page).read_text("utf-8")
    excused = "<!-- blocks not run: " in text
    walked = page in PAGES or page in RUN_BY or excused
    fenced = re.compile(r"(<!-- not run: [^>]+ -->\n)?^```(\w*)[^\n]*\n(.*?)^```\n?", re.S | re.M)
    found = [
        body for reason, kind, body in fenced.findall(text)
        if not reason and COMMAND.search(body) and (kind == "" or (kind in ("sh", "bash", "console") and not walked))
    ]  # fmt: skip
    indented = re.findall(r"(<!-- not run: [^>]+ -->\n\n)?((?:^    .*\n)+)", fenced.sub("", text), re.M)
    return found + [body for reason, body in indented if not (reason or excused) and COMMAND.search(body)]


WRITTEN = [
    page for page in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md",
                      *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))
    if not page.startswith(("docs/reproduction/", "docs/reference/"))  # made by commands, with the commands that made them
]  # fmt: skip


@pytest.mark.parametrize("page", WRITTEN)
def test_every_block_of_commands_is_run_by_a_test_or_says_why_not(page: str) -> None:
    assert unexplained(page) == []


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_as_printed_and_its_models_learn(page: str, tmp_path: Path) -> None:
    if page in NEEDS_DATA and not (installed("minilm") and os.environ.get("FEDVEIL_DATA")):
        pytest.skip("needs the extra backbones, and datasets in FEDVEIL_DATA")
    if os.environ.get("FEDVEIL_DATA"):
        (tmp_path / "data").symlink_to(os.environ["FEDVEIL_DATA"])  # the folder that the pages call data
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for kind, text in [*(("sh", line) for line in PAGES[page]), *blocks(page)]:
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
