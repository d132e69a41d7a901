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


def trees() -> list[tuple[str, ast.Module]]:
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))) for path in sorted(ROOT.rglob("*.py"))]


def words(node: ast.AST) -> set[str]:
    """All names that occur in an expression."""
    return {n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))}


SAMPLERS = {
    "noise": ("normals", "laplaces", "staircases", "joint_staircase"),
    "exact": ("gaussian", "laplace", "staircase", "joint_staircase"),
    "_native": ("normals", "laplaces", "staircases", "exact_gaussian", "exact_laplace", "exact_staircase", "exact_joint"),
}
DRAW = {
    "protect/law.py": "the laws, asked by Drawing.add",
    "protect/noise.py": "the samplers",
    "protect/exact.py": "the samplers",
    "secure_sum/noise.py": "shares of a sum that nobody sees in parts",
}


def test_only_laws_draw_noise() -> None:
    """Whoever wants noise asks the value that is claimed."""
    found = [
        f"{path}:{node.lineno} {ast.unparse(node.func)}"
        for path, tree in trees()
        if path not in DRAW
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
        if node.func.attr in SAMPLERS.get(node.func.value.id, ())
    ]
    assert not found, found


SCALES = {
    "protect/law.py": "the laws",
    "protect/noised.py": "the value itself",
    "protect/recipe.py": "is the noise wide enough for its grid?",
    "protect/udp.py": "formulas of a paper, always nominal",
    "privacy/schedules.py": "the papers' count of a noise that follows the norms",
    "secure_sum/parameters.py": "an owner's least noise",
    "federation/harmonize.py": "a line for people",
}


def test_no_other_place_forms_a_noise_scale() -> None:
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if path in SCALES or not (isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div))):
                continue
            sides = [" ".join(words(side)) for side in (node.left, node.right)]
            for one, other in (sides, sides[::-1]):
                if re.search(r"sigma|multiplier", one) and re.search(r"bound|sensitivity", other):
                    found.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    assert not found, found


def test_the_root_of_layers_is_taken_in_the_clip_alone() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees()
        if path != "protect/clip.py"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Call) and "sqrt" in words(node.func) and any("layers" in w for a in node.args for w in words(a)))
        or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and any("layers" in w for w in words(node.left)))
    ]
    assert not found, found


def test_plans_carry_no_multiplier() -> None:
    from fedveil.training.contract import LocalPlan

    names = " ".join(LocalPlan.__dataclass_fields__)
    assert not re.search(r"sigma|multiplier|deviation|noise_on", names) and "noised" in names
