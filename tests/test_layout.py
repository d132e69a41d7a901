"""Packages import only from those above them; privacy never loads torch; a recipe's words stay in its own parts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import fedveil

ROOT = Path(fedveil.__file__).parent
ORDER = [
    ("errors", "keys", "jsons"),
    ("data", "models"),
    ("privacy",),
    ("protect",),
    ("secure_sum",),
    ("training",),
    ("federation",),
    ("flower",),
    ("attacks",),
    ("report", "studies"),
    ("ui", "api"),
    ("lightning", "huggingface"),
    ("cli", "__main__", "__init__"),
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fedveil."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("fedveil.")}
    return found


def test_imports_point_one_way() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if own not in LEVEL:
            continue
        text = path.read_text("utf-8")
        guarded = set(re.findall(r"if TYPE_CHECKING:\n((?:    .*\n)+)", text))
        typed = {m for block in guarded for m in re.findall(r"fedveil\.(\w+)", block)}
        for other in imports(path) - typed:
            if LEVEL.get(other, -1) > LEVEL[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {other}")
    assert not wrong, wrong


def test_privacy_never_imports_torch() -> None:
    for path in (ROOT / "privacy").rglob("*.py"):
        assert not re.search(r"^\s*(import|from) torch", path.read_text("utf-8"), re.M), path


def test_no_recipe_word_is_compared_outside_its_parts() -> None:
    words = r"(recipe|task\.recipe)\.(place|law|batches|cohort|channel|aggregate)(\.name)? *(==|!=|in) *[(\"']"
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] != "protect"
        for line in path.read_text("utf-8").splitlines()
        if re.search(words, line) and "== Mean()" not in line
    ]
    assert not found, found
