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


RECIPE_FIELDS = {
    "target", "where", "clip", "kind", "norm", "of", "clip_norm", "bound_rule", "sensitivity", "mechanism", "noise_on",
    "sampling", "channel", "aggregate", "ranges", "prior", "adapt", "family", "paper", "law", "rule", "name",
}  # fmt: skip
RECIPE_NAMES = {"target", "where", "clip", "norm", "mechanism", "noise_on", "channel", "aggregate", "law", "family", "recipe"}
COMPARE = {
    "protect/recipe.py": "the parser: it alone turns words into parts",
    "protect/batches.py": "the batches' own words",
    "protect/channel.py": "the channel's own words",
    "protect/udp.py": "formulas of a paper, one for each law",
    "training/optimisers.py": "the local optimiser's own words",
    "cli/privacy.py": "the calculator's parser: words of the command line, no recipe",
    "attacks/audit/lowbits.py": "the law of float32 numbers, not of a recipe",
    "studies": "cells of the papers' tables are named by recipe",
    "privacy": "events have words of their own; no recipe is known there",
}


def constants(node: ast.AST) -> set[str]:
    nodes = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def of_a_recipe(node: ast.AST) -> bool:
    """Does an expression name a value of a recipe? What a part asks of itself is its own affair."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.slice.value in RECIPE_FIELDS - {"kind", "name"}
    if isinstance(node, ast.Attribute):
        return node.attr in RECIPE_FIELDS and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    return isinstance(node, ast.Name) and node.id in RECIPE_NAMES


def test_no_recipe_word_is_compared_outside_its_parts() -> None:
    from fedveil.protect.catalogue import catalogue
    from fedveil.protect.recipe import WORDS

    known = {word for group in WORDS.values() for word in group} | set(catalogue())
    found = [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path, tree in trees()
        if not {path, path.split("/")[0]} & set(COMPARE)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        if set().union(*map(constants, [node.left, *node.comparators])) & known
        if any(map(of_a_recipe, [node.left, *node.comparators]))
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


LONGEST = 60  # lines of a function without its docstring
LONG: dict[str, str] = {}  # path:function -> why it is longer; empty, and better so


def length(path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring; of a command without its options, which are declarations."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    inner = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
    return inner if path.startswith("cli/") else inner + node.body[0].lineno - node.lineno


def test_functions_stay_short() -> None:
    found = [
        f"{path}:{node.name} has {length(path, node)} lines"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and length(path, node) > LONGEST
        if f"{path}:{node.name}" not in LONG
    ]
    assert not found, found


MOST_ANY = 275  # how often the package says Any: a number that may only go down


def test_any_becomes_rarer() -> None:
    found = sum(len(re.findall(r"\bAny\b", path.read_text("utf-8"))) for path in ROOT.rglob("*.py"))
    assert found <= MOST_ANY, f"{found} times Any: say what is passed, or object where nothing is known"
