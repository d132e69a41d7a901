"""A small part of the games of tests/tools that are played against nodes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("flwr")

TOOLS = Path(__file__).parents[1] / "tools"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_twelve_paired_questions_have_equal_bytes_and_charges_and_no_row_is_read(tmp_path: Path) -> None:
    """python tests/tools/questions.py asks a thousand."""
    questions = tool("questions")
    found = list(questions.pairs(12, tmp_path))
    assert {pair["status"] for pair in found} == {"ok", "refused"}
    assert all(pair["equal"] and len(pair["charged"]) == 1 for pair in found)
    assert questions.rows_extracted(tmp_path, rounds=3) == 0


def test_the_game_sees_a_reply_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedveil.flower import node

    honest = node.answer

    def leaky(kind, facts, arrays, owner, **more):  # type: ignore[no-untyped-def]
        said, sent = honest(kind, facts, arrays, owner, **more)
        return {**said, "rows": len(Path(owner.data).read_text())}, sent

    monkeypatch.setattr(node, "answer", leaky)
    assert not all(pair["equal"] for pair in tool("questions").pairs(4, tmp_path))


def test_an_advantage_has_bounds_that_hold_it() -> None:
    interval = tool("questions").interval
    assert interval(500, 500) == {"guesses": 1000, "advantage": 0.0, "bounds": [-0.0629, 0.0629]}
    assert interval(10, 0)["bounds"][0] > 0.3 and interval(0, 0)["bounds"] == [-1.0, 1.0]


@pytest.mark.slow
def test_six_nodes_in_processes_play_on_while_two_fail() -> None:
    """python tests/tools/fifty.py does it with fifty."""
    command = [sys.executable, TOOLS / "fifty.py", "--nodes", "6", "--rounds", "2", "--failing", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
