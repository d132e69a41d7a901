"""The claims of docs/reproduction/README.md have the numbers of the kept cells: a claim that was not read again fails."""

import re
from functools import lru_cache
from pathlib import Path

import pytest

from fedveil.studies import jobs, render, runner
from fedveil.studies.cells import key_of, seeded
from fedveil.studies.index import catalogue

FOLDER = Path(__file__).parents[2] / "docs" / "reproduction"
KEPT = runner.finished(FOLDER)
NUMBER = re.compile(r"(?<![\w.])\d*\.\d{2,}(?![\w])")
# Numbers of ours that are no cell's: what they are, and who holds them.
ELSEWHERE = {
    "1.12": "what exact noise of P2's DP-baseline is worth, three layers clipped one by one", "1.43": "likewise on CIFAR-10",
    "1.03": "the papers' own count there",
    "0.8227": "an epsilon of P2 V with a digit more", "0.823": "an epsilon of P2 V",
    "3.999": "the ledger of a run calibrated to 4",
    "0.950": "DP-dynS's last accuracy with noise of a given size, which P2 VII lacks",
    "0.30": "the highest of Fed-CDP's curve, round 32", "0.88": "leak-sweeps.md", "0.517": "docs/ldp-fl.md, with one local epoch",
    ".574": "settings.needed", "0.954": "a print of P1 II", "0.875": "a print of P2 IV",
}  # fmt: skip
APART = re.compile(r"\bby 0\.\d+|0\.\d+( to 0\.\d+)? (above|below)|gaps [. \d]+|margin|\(\d\.\d+ below\)")


def claims():
    """Each claim with the pages that it, or the nearest claim above it, links to."""
    text = (FOLDER / "README.md").read_text("utf-8")
    lines = text[text.index("| claim |") :].split("</div>")[0].strip().splitlines()[2:]
    pages: tuple[str, ...] = ()
    for line in lines:
        claim, _printed, printed_way, soundly, verdict = (field.strip() for field in re.split(r"(?<!\\)\|", line)[1:-1])
        pages = tuple(dict.fromkeys(re.findall(r"\]\((p\d-[a-z]+\d+[a-z]?)[\w-]*\.md\)", line))) or pages
        yield claim, printed_way, soundly, verdict, pages


@lru_cache
def numbers_of(name):
    """All numbers that a page has: of each cell its mean, spread and seeds, and those of reasons and verdicts."""
    entry = catalogue()[name]
    chosen = runner.plan(entry, "paper", 3)
    if not any(key_of(job, 0) in KEPT for job in entry.jobs()):  # run at small scale: its page is the only place
        text = (FOLDER / f"{name}.md").read_text("utf-8")
        return {float(one) for one in re.findall(r"\d*\.\d+|\d+", text)}
    chosen = runner.only_finished(chosen, KEPT)
    rows = runner.rows(chosen, KEPT)
    found = {abs(value) for row in rows for value in (row.ours, row.deviation, row.paper) if isinstance(value, int | float)}
    for cell in chosen.entry.cells:
        for seed in range(chosen.seeds if seeded(cell.job) else 1):
            result = KEPT.get(key_of(cell.job, seed), {}).get("result")
            value = None if result is None else jobs.measure(cell.measure, result, cell.job, cell.job)
            found |= set() if value is None else {abs(value)}
    named = (f"{row.row} {row.column} {' '.join(row.why)}" for row in rows)
    text = "\n".join([*render.verdict_lines(entry, rows), *named])
    return found | {float(one) for one in re.findall(r"\d*\.\d+|\d+", text)}


def missing(own, pages):
    """The numbers of a claim that no cell of its pages has, rounded alike."""
    known = set().union(*(numbers_of(name) for name in pages))
    for token in dict.fromkeys(NUMBER.findall(APART.sub("", own))):
        half = 0.5 * 10.0 ** -len(token.partition(".")[2]) + 1e-9
        if not any(abs(value - float(token)) <= half for value in known):
            yield token


@pytest.mark.parametrize(("claim", "own", "pages"), [(c, f"{a} | {b} | {v}", p) for c, a, b, v, p in claims()])
def test_the_numbers_of_a_claim_are_those_of_the_kept_cells(claim, own, pages):
    assert pages, claim
    left = [token for token in missing(own, pages) if token not in ELSEWHERE]
    assert not left, f"{claim}: {left} are on none of {pages}"


def sequences():
    """Lists of four and more numbers, as those of a row over its columns."""
    for claim, one, two, _, pages in claims():
        for text in re.findall(r"(?:\.\d+ ){3,}\.\d+", re.sub(r"gaps [. \d]+", "", f"{one} | {two}").replace("*", "")):
            yield claim, text.split(), pages


@pytest.mark.parametrize(("claim", "wanted", "pages"), list(sequences()))
def test_a_list_of_numbers_is_a_row_of_a_page_in_the_order_of_its_columns(claim, wanted, pages):
    """Or, where a claim goes through recipes, comes down a column in the order of the rows."""
    across: dict[str, list[float]] = {}
    down: dict[str, list[float]] = {}
    for name in pages:
        chosen = runner.only_finished(runner.plan(catalogue()[name], "paper", 3), KEPT)
        for row in (one for one in runner.rows(chosen, KEPT) if one.ours is not None):
            across.setdefault(f"{name} {row.row}", []).append(row.ours)
            down.setdefault(f"{name} {row.column}", []).append(row.ours)

    def same(value, text):
        return abs(value - float(text)) <= 0.5 * 10.0 ** (1 - len(text)) + 1e-9

    def follows(values):
        left = iter(values)
        return all(any(same(value, text) for value in left) for text in wanted)

    windows = (values[at : at + len(wanted)] for values in across.values() for at in range(len(values) - len(wanted) + 1))
    row = any(all(map(same, window, wanted)) for window in windows)
    assert row or any(map(follows, down.values())), f"{claim}: {wanted} is no row of {pages}"


def test_nothing_is_said_to_be_elsewhere_that_no_claim_has():
    told = {token for _, one, two, verdict, _ in claims() for token in NUMBER.findall(f"{one} | {two} | {verdict}")}
    assert set(ELSEWHERE) <= told
