"""The pages of results: each is linked, says how it was made, and every experiment is in the index."""

import re
from pathlib import Path

import pytest

from fedveil.studies.index import catalogue

FOLDER = Path(__file__).parents[2] / "docs" / "reproduction"
PAGES = sorted(page for page in FOLDER.glob("p[1-5]-*.md"))


def test_the_index_has_every_experiment_and_links_every_page():
    index = (FOLDER / "README.md").read_text("utf-8")
    listed = set(re.findall(r"^\| (p[1-5]-\w+) \|", index, re.MULTILINE))
    assert listed == {entry.id for entry in catalogue().values() if entry.cells}
    assert {page.name for page in PAGES} <= set(re.findall(r"\]\(([\w-]+\.md)\)", index))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_command_scale_seeds_and_settings_and_its_pictures_exist(page):
    text = page.read_text("utf-8")
    assert re.search(r"^    fedveil reproduce p[1-5]-", text, re.MULTILINE)
    assert re.search(r"Scale: (small|paper)\. Seeds: \d", text)
    assert '"kind": ' in text and "| paper | ours | difference | why |" in text
    assert all((FOLDER / picture).is_file() for picture in re.findall(r"\]\(([\w-]+\.png)\)", text))
