"""Runs with a recipe of somebody's own are attacked, audited and reported like any other, and only with that very recipe."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from own_parts import Boastful, TwoGaussians, my_recipe, recipe

import fedveil as fv
from fedveil.cli import main
from fedveil.privacy.schedules import parse

LAWS = """
from dataclasses import dataclass
from own_parts import TwoGaussians, recipe

@dataclass(frozen=True)
class Mine(TwoGaussians):
    name: str = "mine"

mine = recipe(Mine())
"""
SMALL = {"data": "cancer", "clients": 3, "rounds": 2, "local_steps": 2, "batch_size": 8, "report": False}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> fv.Result:
    return fv.run(my_recipe, out=tmp_path_factory.mktemp("own") / "given", **SMALL)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> fv.Result:
    return fv.run("own_parts:my_recipe", out=tmp_path_factory.mktemp("own") / "named", **SMALL)


def fedveil(monkeypatch: pytest.MonkeyPatch, *words: Any) -> int:
    monkeypatch.setattr("sys.argv", ["fedveil", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("malicious", {}), ("exact", {}), ("membership", {"shadows": 2, "pool": 40}), ("gradient", {"victims": 1, "iterations": 5})],
)
def test_every_attack_takes_a_run_whose_recipe_is_a_value(given: fv.Result, kind: str, options: dict[str, Any]) -> None:
    assert fv.attack(given, kind, **options)["kind"] == kind
    assert (given.path / "attacks" / f"{kind}.json").exists()


def test_only_a_folder_at_hand_needs_the_recipe_again(given: fv.Result) -> None:
    with pytest.raises(fv.UserError, match="given as a value"):
        fv.attack(given.path, "exact")
    assert fv.attack(given.path, "exact", recipe=my_recipe)["kind"] == "exact"
    with pytest.raises(fv.UserError, match="given as a value"):
        fv.audit(given.path, canaries=20)
    assert fv.audit(given.path, recipe=my_recipe, canaries=20)["verdict"] != "promise broken"


@pytest.mark.parametrize("other", [recipe(), replace(my_recipe, sigma=parse("3"))])
def test_another_recipe_than_the_runs_is_refused(given: fv.Result, other: fv.Recipe) -> None:
    with pytest.raises(fv.UserError, match="not the one that this run was made with"):
        fv.audit(given.path, recipe=other)
    with pytest.raises(fv.UserError, match="not the one that this run was made with"):
        fv.attack(given.path, "exact", recipe=other)


def test_an_audit_of_own_parts_holds_the_honest_and_breaks_the_boastful(tmp_path: Path) -> None:
    """One seed; a correct run is accused with probability 0.05 at most over seeds (this one is not)."""
    settings = {**SMALL, "rounds": 8, "local_steps": 1, "clients": 2, "batch_size": 150, "sigma": 1.0}
    honest, boastful = (
        fv.run(recipe(law), out=tmp_path / law.name, **settings) for law in (TwoGaussians(), Boastful())
    )
    assert fv.audit(honest, canaries=200)["verdict"] != "promise broken"
    assert fv.audit(boastful, canaries=200)["verdict"] == "promise broken"


def test_a_report_is_written_with_the_recipe_at_hand(given: fv.Result, tmp_path: Path) -> None:
    assert "own" in given.report(tmp_path / "page.html").read_text()


def test_a_recipe_alone_is_attacked_as_a_value() -> None:
    found = fv.attack(recipe(), victims=1, iterations=3)
    assert found["recipe"] == "own" and found["kind"] == "gradient"
    with pytest.raises(fv.UserError, match="trained model"):
        fv.attack(recipe(), "membership")


@pytest.mark.parametrize(
    "words",
    [("attack", "--kind", "exact"), ("audit", "--canaries", 20), ("report",)],
    ids=["attack", "audit", "report"],
)
def test_commands_on_a_named_recipe_need_the_users_word(
    named: fv.Result, words: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (words[0], named.path, *words[1:])
    assert fedveil(monkeypatch, *line) == 2
    said = capsys.readouterr().err
    assert "--trust-code" in said and "Traceback" not in said
    assert fedveil(monkeypatch, *line, "--trust-code", "--json") == 0
    assert json.loads(capsys.readouterr().out)


def test_a_command_attacks_a_named_recipe_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("attack", "--recipe", "own_parts:my_recipe", "--victims", 1, "--iterations", 3)
    assert fedveil(monkeypatch, *line) == 2 and "--trust-code" in capsys.readouterr().err
    assert fedveil(monkeypatch, *line, "--trust-code", "--json") == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "gradient"


def test_a_package_that_changed_after_the_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "changing_parts"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "laws.py").write_text(LAWS)
    monkeypatch.syspath_prepend(tmp_path)
    made = fv.run("changing_parts.laws:mine", out=tmp_path / "run", **SMALL)
    assert fv.attack(made, "exact")["kind"] == "exact"
    (package / "laws.py").write_text(LAWS + "# another line\n")
    with pytest.raises(fv.UserError, match="not the one that this run was made with"):
        fv.audit(made, canaries=20)
    for name in ("changing_parts", "changing_parts.laws"):
        sys.modules.pop(name, None)
