"""Every table ends with a verdict that follows from its numbers."""

from pathlib import Path

import numpy as np
import pytest

from fedveil.studies import render, runner
from fedveil.studies.cells import Row
from fedveil.studies.index import catalogue
from fedveil.studies.tables import FOLLOWS, STATEMENTS, numbers
from fedveil.studies.verdicts import Check, Each, judge, mean_of

TABLES = {e.id: e for e in catalogue().values() if e.cells and not e.is_figure}
KEPT = runner.finished(Path(__file__).parents[2] / "docs" / "reproduction")
FORMULAS_ALONE = {"p1-table6"}  # of which the paper states nothing but the numbers


def row(name, column, ours, paper=None, **more):
    difference = None if paper is None or ours is None else ours - paper
    matches = None if difference is None else abs(difference) < 1e-3
    fields = {"why": (), "shrunk": "", "settings": {"kind": "train"}, **more}
    return Row(name, column, paper, ours, difference, matches, **fields)


def test_the_paper_states_something_about_every_table_but_those_of_formulas_alone():
    assert set(STATEMENTS) == set(TABLES) - FORMULAS_ALONE
    for name, stated in STATEMENTS.items():
        assert stated.says.endswith(".") and bool(stated.checks) != bool(stated.why), name
        assert len(set(stated.checks)) == len(stated.checks), name


@pytest.mark.parametrize("name", STATEMENTS)
def test_every_comparison_of_a_table_is_of_cells_that_it_has(name):
    rows = [row(cell.row, cell.column, 1.0) for cell in TABLES[name].cells]

    def chain(check):
        return [] if check is None else [check, *chain(check.given)]

    for check in (one for each in STATEMENTS[name].checks for one in chain(each)):
        if isinstance(check, Check):
            assert all(mean_of(place, rows) is not None for place in check.places), check
        else:
            (said,) = judge([check], rows).reasons
            assert "no numbers" not in said, check


@pytest.mark.parametrize("name", [name for name in TABLES if name != "p5-table7"])  # which was run at small scale
def test_the_page_of_every_table_that_was_run_ends_with_a_verdict_in_the_fixed_words(name):
    chosen = runner.only_finished(runner.plan(TABLES[name], "paper", 3), KEPT)
    lines = render.verdict_lines(TABLES[name], runner.rows(chosen, KEPT))
    assert lines[0] == "## Verdict"
    words = [line.split("**")[1] for line in lines if "**" in line]
    assert words and set(words) <= {"holds", "holds as far as it was run", "holds in one of two readings", "does not hold",
                                    "holds in one of two readings, as far as it was run", "cannot be judged here",
                                    "reproduces", "does not reproduce"}  # fmt: skip
    assert sum(line.startswith("Here: ") for line in lines) == (name in STATEMENTS)


ONE, TWO = ("one", "two")


def said(check, *rows):
    found = judge([check], rows)
    return found.word, found.reasons[0]


def test_each_compares_rows_whose_names_are_alike_but_for_the_recipe():
    rows = [row(f"{d}, {recipe}{more}", c, v + (0.1 if d == "mnist" else 0)) for recipe, v in ((ONE, 0.5), (TWO, 0.4))
            for d in ("mnist", "lfw") for c in ("C=1", "C=4") for more in ("", ", of the mean")]  # fmt: skip
    assert said(Each("a", ONE, ">", TWO), *rows) == ("holds", "a: 4 of 4")
    assert said(Each("a", f"{ONE}, of the mean", ">", TWO), *rows) == ("holds", "a: 4 of 4")
    assert said(Each("a", ONE, "<", TWO, within="lfw"), *rows)[1].startswith("a: 0 of 2 (not lfw, C=1 0.500 against 0.400;")
    assert said(Each("a", "three", ">", TWO), *rows)[0] == "cannot be judged here"
    assert said(Each("a", ONE, ">", 0.45), *rows)[0] == "holds"


@pytest.mark.parametrize(
    ("one", "two", "more", "word"),
    [
        (0.520, 0.5, {}, "holds"),
        (0.509, 0.5, {}, "cannot be judged here"),  # of one seed
        (0.491, 0.5, {}, "cannot be judged here"),
        (0.480, 0.5, {}, "does not hold"),
        (0.509, 0.5, {"deviation": 0.001, "seeds": 3}, "holds"),  # twice the standard error is 0.0016
        (0.520, 0.5, {"deviation": 0.02, "seeds": 3}, "cannot be judged here"),  # twice the standard error is 0.033
        (0.520, 0.5, {"judged": False}, "cannot be judged here"),
    ],
)
def test_what_one_seed_may_be_off_by_decides_nothing(one, two, more, word):
    assert said(Each("a", ONE, ">", TWO), row(ONE, "x", one, **more), row(TWO, "x", two, **more))[0] == word
    if not more:
        assert judge([Check("a", f"={ONE}", ">", f"={TWO}", luck=0.01)], [row(ONE, "x", one), row(TWO, "x", two)]).word == word


def test_some_that_come_out_and_some_that_are_open_hold_as_far_as_they_were_run():
    rows = [row(ONE, "x", 0.6), row(ONE, "y", 0.5), row(TWO, "x", 0.5), row(TWO, "y", 0.5)]
    found = judge([Each("a", ONE, ">", TWO)], rows)
    assert found.word == "holds as far as it was run" and found.open == ("a: 1 of 2, 1 too near to tell",) and not found.failed


def test_a_target_that_was_never_reached_comes_after_every_other_and_iterations_to_it_after_the_runs_last():
    """By hand: never is later than 9.9 of a budget; after 10,000 iterations, it may be within 2,500 of 8,000."""
    never = {"why": ("never reached in 100 rounds",), "settings": {"settings": (("rounds", 100), ("local_steps", 100))}}
    less = Each("a", ONE, "<", TWO)
    assert said(less, row(ONE, "MA", 9.9), row(TWO, "MA", None, **never))[0] == "holds"
    word, text = said(less, row(ONE, "MA", None, **never), row(TWO, "MA", 9.9))
    assert (word, text) == ("does not hold", "a: 0 of 1 (not MA never against 9.900)")
    assert said(less, row(ONE, "MA", None, **never), row(TWO, "MA", None, **never))[0] == "cannot be judged here"
    late = Each("a", ONE, "<", TWO, luck=2500.0)
    for at, word in ((8000, "cannot be judged here"), (7000, "holds")):
        assert said(late, row(ONE, "iterations", at), row(TWO, "iterations", None, **never))[0] == word


def test_numbers_reproduce_within_a_hundredth_or_a_unit_of_their_last_digit_and_those_that_never_come_do_not():
    formula = {"settings": {"kind": "epsilon"}}
    rows = [row("a", "x", 0.96, 0.9696), row("b", "x", 0.96, 0.98), row("c", "x", 7.0, 7.01), row("d", "x", 0.5, None),
            row("e", "x", None, 0.9, why=("never reached in 9 rounds",)), row("f", "x", None, 0.9),
            row("g", "x", 1.0, 1.0, timed=True), row("h", "x", 0.9, 0.9, judged=False),
            row("i", "x", 0.823, 0.8232, **formula), row("j", "x", 0.823, 0.828, **formula),
            row("k", "x", None, 80, **formula)]  # fmt: skip
    assert numbers(rows) == ["Numbers of formulas: **does not reproduce** (1 of 3 of ours).",
                             "Numbers of runs: **does not reproduce** (1 of 4 of ours)."]  # fmt: skip
    assert numbers(rows[:1]) == ["Numbers of runs: **reproduces** (1 of 1 of ours)."]


def test_p2s_recipes_are_compared_in_both_readings_of_s():
    both = {check.reading for check in STATEMENTS["p2-table4"].checks}
    assert both == set(FOLLOWS) and np.isfinite([check.luck for check in STATEMENTS["p2-table4"].checks]).all()
