"""The pages of results: each is linked, says how it was made, and every experiment is in the index."""

import json
import re
from functools import lru_cache
from pathlib import Path

import pytest
from bench import pages

from fedveil.studies import render, runner
from fedveil.studies.cells import settings_of
from fedveil.studies.index import catalogue

FOLDER = Path(__file__).parents[2] / "docs" / "reproduction"
PAGES = sorted(page for page in FOLDER.glob("p[1-5]-*.md"))


def test_the_index_has_every_experiment_and_links_every_page():
    index = (FOLDER / "README.md").read_text("utf-8")
    listed = set(re.findall(r"^\| (p[1-5]-\w+) \|", index, re.MULTILINE))
    assert listed == {entry.id for entry in catalogue().values() if entry.cells}
    assert {page.name for page in PAGES} <= set(re.findall(r"\]\(([\w-]+\.md)\)", index))


def test_the_index_says_what_the_pages_and_the_kept_results_say():
    """`python -m bench.pages` without a folder writes it anew."""
    assert pages.index() == (FOLDER / "README.md").read_text("utf-8")


def test_the_table_of_claims_is_one_table():
    """An empty line ends a table, and what follows is shown as raw text."""
    text = (FOLDER / "README.md").read_text("utf-8")
    claims = text[text.index("| claim |") :].split("\n\n", 1)
    assert claims[0].count("\n") > 20 and "\n| P" not in claims[1].split("## ", 1)[0]


def test_what_is_within_a_hundredth_is_counted_among_what_is_compared_alone():
    """Means of several seeds count; times of other hardware, and what is not judged, do not."""
    rows = ("| none | x | 0.954 | 0.980 | +0.026 |", "| one | x | 0.960 | 0.962 ± 0.001 | +0.002 |",
            "| two | x | 0.960 | 0.960 | match |", "| s | x | 0.007 | 0.002 | - | ",
            "| three | x | 0.960 | 0.961 | not judged |")  # fmt: skip
    assert pages._near("\n".join(("# P9 Table 1: Accuracy", *rows))) == 2


def test_a_page_of_small_scale_is_judged_by_its_own_rows():
    """P5 VII's attacks are not kept: its page has them."""
    text = (FOLDER / "p5-table7.md").read_text("utf-8")
    rows = {(row.row, row.column): row for row in pages.rows_of(text)}
    assert set(rows) == {(cell.row, cell.column) for cell in catalogue()["p5-table7"].cells}
    assert all(row.paper == cell.paper for cell in catalogue()["p5-table7"].cells for row in [rows[cell.row, cell.column]])
    lines = render.verdict_lines(catalogue()["p5-table7"], list(rows.values()))
    assert any(line.startswith("Here: **does not hold** (noise: holds; Staircase most: ") for line in lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_command_scale_seeds_and_settings_and_its_pictures_exist(page):
    text = page.read_text("utf-8")
    assert re.search(r"^    fedveil reproduce p[1-5]-", text, re.MULTILINE)
    assert re.search(r"Scale: (small|paper)\. Seeds: \d", text)
    assert '"kind": ' in text and re.search(r"^\| row \| column \| (paper \| ours \| difference|ours) \| why \|", text, re.M)
    assert "Scale: small" in text or re.search(r"^\d+ jobs?, \d+:\d\d h of one core\.$", text, re.M)
    assert all((FOLDER / picture).is_file() for picture in re.findall(r"\]\(([\w-]+\.png)\)", text))


@lru_cache
def planned(name, scale):
    """Today's rows of an experiment, and the settings of its jobs as a page prints them."""
    entry = catalogue()[name]
    jobs = {json.dumps(settings_of(one.job, 0), sort_keys=True) for one in runner.plan(entry, scale).jobs}
    return {(cell.row, cell.column) for cell in entry.cells}, jobs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_what_todays_experiment_would_run(page):
    """No numbers of an experiment that was since mended: each row and the settings of each job are those of today."""
    text = page.read_text("utf-8")
    name = re.match(r"p[1-5]-[a-z]+\d+[a-z]?", page.stem)[0]
    rows, jobs = planned(name, re.search(r"Scale: (small|paper)", text)[1])
    shown = [tuple(field.strip() for field in line.split("|")[1:3]) for line in text.splitlines() if line.startswith("| ")]
    assert set(shown[1:]) <= rows
    ran = {json.dumps(json.loads(line), sort_keys=True) for line in text.splitlines() if line.startswith('{"')}
    assert ran <= jobs


def test_kept_results_of_a_kind_have_the_same_figures():
    """Else some were measured by code that has since changed what it measures."""
    found = {}
    for line in map(json.loads, (FOLDER / "cells.jsonl").read_text("utf-8").splitlines()):
        figures = set(line["result"]) - {"largest_single"}  # only with a fixed deviation of the noise
        kind = line["settings"]["kind"]
        figures -= {"time": {"load", "cores"}, "attack": {"noise_law"}}.get(kind, set())  # older ones do not say so
        assert figures == found.setdefault(kind, figures), line["key"]
