"""Every test that is named as the replacement of an earlier one exists, and none is left without one or a reason."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "tests-moved.md").read_text("utf-8")
ROWS = re.findall(r"^\| `(\S+::\S+)` \| (.+) \|$", PAGE, re.M)


def test_every_replacement_of_a_test_exists() -> None:
    assert ROWS
    for _, today in ROWS:
        for file, name in re.findall(r"`([^`]+)::([^`]+)`", today):
            assert re.search(rf"^\s*def {name}\(", (ROOT / file).read_text("utf-8"), re.M), f"{file}::{name}"


def test_every_earlier_test_has_a_replacement_or_a_reason() -> None:
    assert not [then for then, today in ROWS if "no replacement" in today]
