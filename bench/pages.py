"""python -m bench.pages OUT …: results of `fedveil reproduce --out OUT` into docs/reproduction.

Takes over the full-scale cells of OUT and writes the page of all such cells of every table or figure anew (a gallery is drawn
where OUT has the images of all its rows); copies pages of small scale with their pictures where there is no full one; writes the
index anew from all pages there, with what is left, and the tables of resilience.md from the attacks kept in OUT/cells.jsonl.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fedveil.cli.reproduce import _duration
from fedveil.federation.store import append_line
from fedveil.studies import render, runner
from fedveil.studies.cells import Entry, Epsilon, Job, Row, Spend, Stop, key_of
from fedveil.studies.index import catalogue, find
from fedveil.studies.render import name_of, shown

DOCS = Path(__file__).parents[1] / "docs" / "reproduction"
SEEDS = 3  # at most; a page shows those that were run
LEAKS = ("p3-table3", "p1-table7", "p2-table3", "p3-table1")


def take(out: Path) -> None:
    """Take over the full-scale results of a folder, and write all pages: reasons and verdicts may have changed, too."""
    have, kept = runner.finished(out), runner.finished(DOCS)
    for entry in catalogue().values():
        runs = runner.plan(entry, "paper", SEEDS).runs if entry.cells else []
        keys = [key for key in (key_of(job, seed) for job, seed in runs) if "result" in have.get(key, {})]
        new = [key for key in keys if key not in kept]
        for key in new:
            append_line(DOCS / "cells.jsonl", have[key])
            kept[key] = have[key]
        if any("result" in kept.get(key_of(job, seed), {}) and not _formula(job) for job, seed in runs):
            chosen = runner.only_finished(runner.plan(entry, "paper", SEEDS), kept)
            command = f"fedveil reproduce {entry.id} --scale paper --seeds {chosen.seeds}"
            render.write(chosen, kept, command, DOCS, entry.id, out)
            print(f"{entry.id}: {len(new)} new")
        elif entry.cells and all(_formula(job) for job in entry.jobs()):
            _formulas(entry)


def _formulas(entry: Entry) -> None:
    """The page of a table of formulas alone, which take no time."""
    chosen = runner.plan(entry, "paper")
    with tempfile.TemporaryDirectory() as folder:
        done = runner.run(chosen, Path(folder))
    command = f"fedveil reproduce {entry.id} --scale paper --seeds 1 --only epsilon"
    render.write(chosen, done, command, DOCS, f"{entry.id}-epsilon")


def _formula(job: Job) -> bool:
    return isinstance(job, Epsilon | Stop | Spend)


def copy(out: Path) -> None:
    """Take over the pages of small scale of a folder."""
    for page in sorted(out.glob("p[1-5]-*.md")):
        text, there = page.read_text("utf-8"), DOCS / page.name
        if "Scale: small" not in text:
            continue
        if there.exists() and "Scale: paper" in there.read_text("utf-8"):
            print(f"{page.name}: kept the full one")
            continue
        for picture in re.findall(r"\]\(([\w-]+\.png)\)", text):
            shutil.copy(out / picture, DOCS / picture)
        there.write_text(text, "utf-8")


def judge_small() -> None:
    """Pages of small scale, whose cells are not kept, with the verdict that follows from their own rows today."""
    for page in DOCS.glob("p[1-5]-*.md"):
        text = page.read_text("utf-8")
        if "Scale: small" in text:
            entry = find(_entry(page))
            head, rest = text.split("<details>", 1)
            lines = render.verdict_lines(entry, rows_of(text))
            page.write_text("\n".join([head.split("## Verdict")[0].rstrip("\n"), "", *lines, f"<details>{rest}"]), "utf-8")


def rows_of(text: str) -> list[Row]:
    """The rows of a page of attacks with printed numbers, as far as a verdict looks at them."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")[1:-1]]
        if len(fields) == 7 and fields[0] not in ("row", "---"):
            numbers = [float(f.split(" ")[0]) if re.match(r"-?\d", f) else None for f in fields[2:4]]
            apart = None if None in numbers else numbers[1] - numbers[0]  # type: ignore[operator]
            matches = None if apart is None else fields[4] == "match"
            row = Row(fields[0], fields[1], *numbers, apart, matches, (), fields[6], settings={"kind": "attack"})
            found.append(row)
    return found


def between(text: str, begin: str, end: str, lines: Sequence[str]) -> str:
    """Replace what stands between two marks."""
    head, rest = text.split(f"<!-- {begin} -->\n", 1)
    tail = rest.split(f"<!-- {end} -->", 1)[1]
    return f"{head}<!-- {begin} -->\n" + "\n".join(lines) + f"\n<!-- {end} -->{tail}"


def index() -> str:
    """The README with every page, how much of it was run and what came out, and what is left with its estimated time."""
    order = {entry.id: number for number, entry in enumerate(catalogue().values())}
    pages = sorted(DOCS.glob("p[1-5]-*.md"), key=lambda page: (order[_entry(page)], page.stem))
    kept = runner.finished(DOCS)
    ran = ["| id | what | run | agree within the last digit | page |", "|---|---|---|---|---|"]
    for page in pages:
        text = page.read_text("utf-8")
        part = ", ".join(page.stem.split("-")[2:])
        what = text.split("\n", 1)[0].lstrip("# ") + (f" ({part})" if part else "")
        scale = "full" if "Scale: paper" in text else "small"
        some = re.search(r"^(\d+ of \d+) cells were run", text, re.M)
        scale += f", {some[1]} cells" if some and len(set(some[1].split(" of "))) > 1 else ""
        name = f"[{page.stem}]({page.name})"
        ran.append(f"| {_entry(page)} | {what} | {scale} | {_agreement(text)} | {name} |")
    small = {_entry(page) for page in pages if "Scale: small" in page.read_text("utf-8")}
    left = ["| id | what | cells not run at full scale | time for them |", "|---|---|---:|---:|"]
    for entry in catalogue().values():
        missing = {job for job in entry.jobs() if not _formula(job) and "result" not in kept.get(key_of(job, 0), {})}
        cells = sum(cell.job in missing for cell in entry.cells)
        if cells:
            hours = _duration(runner.plan(entry, "paper").seconds(kept))
            said = f"{entry.paper} {name_of(entry)}: {entry.title}" + (" (run at small scale)" if entry.id in small else "")
            left.append(f"| {entry.id} | {said} | {cells} of {len(entry.cells)} | {hours} |")
    text = between((DOCS / "README.md").read_text("utf-8"), "index", "end of index", ran)
    return between(text, "not run", "end of not run", left if len(left) > 2 else ["Nothing."])


def _entry(page: Path) -> str:
    return "-".join(page.stem.split("-")[:2])


def _agreement(text: str) -> str:
    """What came out, in the words of a page: its numbers, and its statement."""
    verdict = re.search(r"^Here: (\*\*.*?\*\*(?: \(.*?\))?)", text, re.M)
    stated = f"statement: {verdict[1]}" if verdict else ""
    if text.split("\n", 1)[0].split(":")[0].split(" ")[2] == "Figure":
        return stated
    return "; ".join(filter(None, (_numbers(text), stated)))


def _numbers(text: str) -> str:
    times = re.search(r"^Times of other hardware are not compared(?:, ratios are: (\d+ of \d+))?", text, re.M)
    if times:
        return f"times are not compared; {times[1]} ratios agree" if times[1] else "times are not compared"
    found = re.search(r"^(\d+ of \d+) compared .*?(?:; (\d+) of \d+ have no number of ours)?\.$", text, re.M)
    assert found is not None
    if found[1] == "0 of 0":
        return "no number can be judged"
    near, without = _near(text), f"; {found[2]} without a number" if found[2] else ""
    return f"{found[1]} agree" + (f"; {near} within 0.01" if near else "") + without


def _near(text: str) -> int:
    """How many numbers of a table of accuracies (nothing printed above 1) are within 0.01 of the print; 0 for other tables."""
    pairs = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        with contextlib.suppress(ValueError, IndexError):
            if fields[5] not in ("-", "not judged"):  # nor a time, nor a number without a print
                pairs.append((float(fields[3]), float(fields[4].split(" ")[0])))
    if "ccuracy" not in text.split("\n", 1)[0] or any(paper > 1 for paper, _ in pairs):
        return 0
    return sum(abs(paper - ours) <= 0.0105 for paper, ours in pairs)


def resilience(out: Path) -> None:
    """The four attack tables side by side with the papers'; silent where an attack is missing."""
    done = runner.finished(out)
    tables: dict[str, list[Row]] = {}
    for name in LEAKS:
        chosen = runner.plan(find(name), "paper")
        keys = {key_of(job, seed) for job, seed in chosen.runs}
        have = [done[key]["result"] for key in keys if "result" in done.get(key, {})]
        cpu = sum(one["cpu_seconds_per_victim"] * one["victims"] for one in have)
        print(f"{name}: {len(have)} of {len(keys)} attacks, {cpu / 60:.1f} min of CPU")
        tables[name] = runner.rows(chosen, done)
    two = [(f"{d} {c}", k) for d in ("MNIST", "LFW") for c, k in
           (("distance", 3), ("iterations", 0), ("succeeds", 2), ("labels", 2))]  # fmt: skip
    ours = [*two[:3], ("MNIST succeeds, our attack", 2), *two[3:]]
    four = [
        (f"{d} {c}", k)
        for d in ("MNIST", "Fashion-MNIST", "CIFAR-10", "LFW")
        for c, k in (("ASR", 2), ("MSE", 4))
    ]
    three = [(f"{d} {c}", k) for d in ("MNIST", "CIFAR-10", "LFW") for c, k in
             (("ASR", 3), ("distance", 3), ("iterations", 0))]  # fmt: skip
    lines: list[str] = []
    for name, title, columns in (
        ("p3-table3", "P3 Table 3: attack effectiveness by recipe and type", ours),
        ("p1-table7", "P1 Table VII: attack effectiveness", two),
        ("p2-table3", "P2 Table III: type 2, success rate (strict threshold) and MSE", four),
        ("p3-table1", "P3 Table 1: three attacks on plain gradients (type 2)", three),
    ):
        lines += [f"## {title}", "", *_side_by_side(tables[name], columns), ""]
    path = DOCS / "resilience.md"
    path.write_text(between(path.read_text("utf-8"), "tables", "end of tables", lines), "utf-8")


def _side_by_side(rows: list[Row], columns: list[tuple[str, int]]) -> list[str]:
    found = {(row.row, row.column): row for row in rows}
    lines = [f"| row | {' | '.join(name for name, _ in columns)} |", "|---|" + "---|" * len(columns)]
    for name in dict.fromkeys(row.row for row in rows):
        fields = []
        for column, digits in columns:
            row = found.get((name, column))
            ours = shown(row.ours if row else None, digits)
            fields.append(
                ours if row is None or row.paper is None else f"{shown(row.paper, digits)} → {ours}"
            )
        lines.append(f"| {name} | {' | '.join(fields)} |")
    return lines


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        take(folder)
        copy(folder)
        judge_small()
        keys = set(runner.finished(folder))
        plans = (runner.plan(find(name), "paper") for name in LEAKS)
        if any(key_of(job, seed) in keys for chosen in plans for job, seed in chosen.runs):
            resilience(folder)
    (DOCS / "README.md").write_text(index(), "utf-8")
