"""Comparisons for people: terminal, Markdown, and a picture for figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedveil.jsons import Document, JsonObject
from fedveil.studies import runner
from fedveil.studies.cells import Attack, Entry, Row, Time, key_of
from fedveil.studies.runner import Plan
from fedveil.studies.tables import STATEMENTS, numbers
from fedveil.studies.verdicts import CHECKS, Verdict, judge


def shown(value: float | str | None, digits: int) -> str:
    """A number with the table's digits; "-" where there is none."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    small = value != 0 and abs(value) < 0.5 * 10.0**-digits
    return f"{value:.1e}" if small else f"{value:.{digits}f}"


def cells_of(entry: Entry, rows: Sequence[Row]) -> list[list[str]]:
    """paper | ours | difference as texts, in the order of the rows."""
    found = []
    for cell, row in zip(entry.cells, rows, strict=True):
        d = max(
            cell.digits, 4 if row.difference is not None and abs(row.difference) < 1e-3 and cell.digits else 0
        )
        spread = f" ± {shown(row.deviation, d)}" if row.deviation is not None else ""
        none = "-" if row.judged or row.paper is None else "not judged"
        mark = "match" if row.matches else (none if row.difference is None else f"{row.difference:+.{cell.digits}f}")
        found.append([shown(row.paper, cell.digits), shown(row.ours, cell.digits) + spread, mark])
    return found


def write(
    chosen: Plan, done: Mapping[str, JsonObject], command: str, folder: Path, name: str, source: Path | None = None
) -> tuple[list[Row], Path, Path | None]:
    """The page `name` of these results in a folder, and the picture of a figure; returns its rows and both paths. source: the
    folder with the images that attacks rebuilt, if it is another one."""
    import fedveil

    rows = runner.rows(chosen, done)
    page = folder / f"{name}.md"
    page.write_text(markdown(chosen, rows, command, {"fedveil": fedveil.__version__}, done), "utf-8")
    drawn = folder / f"{chosen.entry.id}.png"
    return rows, page, drawn if chosen.entry.is_figure and picture(chosen, rows, done, source or folder, drawn) else None


def markdown(
    chosen: Plan, rows: Sequence[Row], command: str, about: Mapping[str, object], done: Mapping[str, JsonObject] = {}
) -> str:
    """One page: the command, what it ran on, the comparison, notes, and every setting."""
    import json

    entry = chosen.entry
    notes: dict[str, int] = {}

    def mark(*texts: str) -> str:
        return " ".join(f"[{notes.setdefault(t, len(notes) + 1)}]" for t in texts if t)

    lines = [f"# {entry.paper} {name_of(entry)}: {entry.title}", "", f"    {command}", ""]
    made = ", ".join(f"{k} {v}" for k, v in about.items())
    lines += [f"Scale: {chosen.scale}. Seeds: {_seeds(chosen, rows)}. {made}.", ""]
    lines += _run_time(chosen, done)
    if entry.statement:
        lines += [f"The paper says: {entry.statement}", ""]
    lines += [summary(rows), ""]
    lines += [f"{entry.note}.", ""] if entry.note else []
    if entry.is_figure:
        lines += [f"![{entry.title}]({entry.id}.png)", ""]
    printed = any(row.paper is not None for row in rows)
    heads = ["row", "column", *(("paper", "ours", "difference") if printed else ("ours",)), "why", "shrunk"]
    sides = ["---", "---", *(["---:"] * (len(heads) - 4)), "---", "---"]
    lines += [f"| {' | '.join(heads)} |", f"|{'|'.join(sides)}|"]
    for row, cells in zip(rows, cells_of(entry, rows), strict=True):
        numbers = cells if printed else cells[1:2]
        lines.append(f"| {row.row} | {row.column} | {' | '.join(numbers)} | {mark(*row.why)} | {mark(row.shrunk)} |")
    lines += ["", *(f"{number}. {text}" for text, number in notes.items()), ""]
    lines += _noise(rows)
    lines += _load(chosen, done)
    lines += verdict_lines(entry, rows)
    unique = list(dict.fromkeys(json.dumps(dict(row.settings), sort_keys=True) for row in rows))
    lines += [
        "<details><summary>Settings of every job</summary>",
        "",
        "```",
        *unique,
        "```",
        "",
        "</details>",
        "",
    ]
    return "\n".join(lines)


def _noise(rows: Sequence[Row]) -> list[str]:
    """Which noise the page's runs drew; rows whose seeds drew different ones are named."""
    laws = sorted({row.law.removesuffix(runner.UNRECORDED) for row in rows if row.law and "(seed" not in row.law})
    unrecorded = any(row.law.endswith(runner.UNRECORDED) for row in rows)
    of_attacks = " (of attacks by their settings, not recorded)" if unrecorded else ""
    mixed = dict.fromkeys(f"{row.row}: {row.law}" for row in rows if "(seed" in row.law)
    said = [*([" and ".join(laws) + of_attacks] if laws else []), *mixed]
    return [f"Noise: {'; '.join(said)}.", ""] if said else []


def _load(chosen: Plan, done: Mapping[str, Document]) -> list[str]:
    """What is known of the machine's load while a page's times were taken."""
    keys = [key_of(job, seed) for job, seed in chosen.runs if isinstance(job, Time)]
    kept = [done[key]["result"] for key in keys if "result" in done.get(key, {})]
    loads = [load for one in kept for load in one.get("load", ()) if load is not None]
    without = sum(not one.get("load") for one in kept)
    said = []
    if loads:
        cores = "/".join(str(n) for n in sorted({one["cores"] for one in kept if one.get("load")}))
        said.append(f"{min(loads):g} to {max(loads):g} processes on {cores} cores, the timed one among them")
    if without:
        said.append(f"not recorded for {without} of {len(kept)} timings")
    return [f"Load of the machine while times were taken: {'; '.join(said)}.", ""] if said else []


def _run_time(chosen: Plan, done: Mapping[str, JsonObject]) -> list[str]:
    """How long the jobs of the page took, as far as they are there."""
    keys = {key_of(job, seed) for job, seed in chosen.runs}
    spent = [one for key, line in done.items() if key in keys and (one := _spent(line)) is not None]
    minutes = round(sum(spent) / 60)
    return [f"{len(spent)} job{'s' * (len(spent) != 1)}, {minutes // 60}:{minutes % 60:02d} h of one core.", ""] if spent else []


def _spent(line: Document) -> float | None:
    """Seconds of one core: those of the processor where the result has them, by the clock otherwise."""
    found = line.get("result", {})
    if "cpu_seconds_per_victim" in found:
        return float(found["cpu_seconds_per_victim"] * found["victims"])
    seconds = found.get("cpu_seconds", line.get("seconds"))
    return float(seconds) if "result" in line and isinstance(seconds, int | float) else None


def _seeds(chosen: Plan, rows: Sequence[Row]) -> str:
    """Which seeds the page has, and that some cells have fewer."""
    said = ", ".join(map(str, range(chosen.seeds)))
    if chosen.seeds == 1:
        return said
    fewer = any(row.ours is not None and row.seeds < chosen.seeds for row in rows)
    return f"{said} (± is their standard deviation{'; cells without it have seed 0 alone' if fewer else ''})"


EASY = (
    "Types 0 and 1 are judged on an update of one local step on one image (LFW: three), the easiest there is: after a "
    "whole round of the paper's training (100 steps on batches of 5) not even an unprotected update is rebuilt (P1 VII, P3 3)."
)
MOST_OPEN = 4  # comparisons of a table that are listed although they decide nothing


def verdict_lines(entry: Entry, rows: Sequence[Row]) -> list[str]:
    """The end of a page: what the paper states, and whether it comes out; of a table also how many numbers do."""
    if entry.is_figure:
        if entry.id not in CHECKS:
            return []
        found = judge(CHECKS[entry.id], rows)
        lines = ["## Verdict", "", f"The paper: {entry.statement}", "", f"Here: **{found.word}**{_parts(found)}.", ""]
        lines += [*(f"- {text}" for text in found.reasons), ""]
        return [*lines, EASY, ""] if any("one-step" in cell.why for cell in entry.cells) else lines
    lines, stated = [], STATEMENTS.get(entry.id)
    if stated is not None:
        found = judge(stated.checks, rows)
        out = f": {stated.why}" if stated.why else ""
        lines = [f"The paper: {stated.says}", "", f"Here: **{found.word}**{_parts(found)}{out}.", ""]
        came = len(stated.checks) - len(found.failed) - len(found.open)
        lines += [f"- {came} of {len(stated.checks)} comparisons come out"] if stated.checks else []
        lines += [f"- {text}" for text in found.failed]
        lines += [f"- open: {text}" for text in found.open[:MOST_OPEN]]
        lines += [f"- open: {len(found.open) - MOST_OPEN} more"] if len(found.open) > MOST_OPEN else []
        lines += [""] if stated.checks else []
    lines += [line for text in numbers(rows) for line in (text, "")]
    return ["## Verdict", "", *lines] if lines else []


def _parts(found: Verdict) -> str:
    return f" ({'; '.join(f'{name}: {word}' for name, word in found.parts)})" if found.parts else ""


def name_of(entry: Entry) -> str:
    """ "Table 6" or "Figure 4"."""
    kind = entry.id.split("-")[1]
    return ("Table " if kind.startswith("table") else "Figure ") + kind.removeprefix("table").removeprefix(
        "fig"
    )


def summary(rows: Sequence[Row]) -> str:
    """How many numbers come out."""
    compared = [row for row in rows if row.difference is not None]
    if all(row.paper is None for row in rows):
        have = sum(row.ours is not None for row in rows)
        return (
            f"The figure prints no numbers: its statement is compared. {have} of {len(rows)} values of ours."
        )
    matching = sum(bool(row.matches) for row in compared)
    missing = sum(row.ours is None for row in rows)
    fitted = sum(bool(row.matches and row.fitted) for row in compared)
    if all(row.settings.get("kind") == "time" for row in rows):
        return _of_times(len(compared), matching, missing, rows)
    text = f"{matching} of {len(compared)} compared numbers come out (to one unit of the last printed digit)"
    text += "; times of other hardware are not compared" if any(row.timed for row in rows) else ""
    text += f", {fitted} of them only with one step more or less than stated" if fitted else ""
    unjudged = sum(not row.judged and row.paper is not None for row in rows)
    text += f"; {unjudged} are not judged, for the run without noise does not come near the paper's" if unjudged else ""
    return text + (f"; {missing} of {len(rows)} have no number of ours." if missing else ".")


def _of_times(ratios: int, matching: int, missing: int, rows: Sequence[Row]) -> str:
    """Of a page of times: they are those of another machine, and only what one takes over another can be compared."""
    text = "Times of other hardware are not compared"
    if all(row.timed for row in rows):
        text += ", and the print has no ratios"
    else:
        text += f", ratios are: {matching} of {ratios} ratios come out (to one unit of the last printed digit)"
    return text + (f"; {missing} of {len(rows)} have no number of ours." if missing else ".")


def picture(
    chosen: Plan, rows: Sequence[Row], done: Mapping[str, JsonObject], folder: Path, path: Path
) -> bool:
    """Draw a figure: reconstructions for attacks, curves over rounds, or lines over the columns."""
    entry = chosen.entry
    if entry.cells and isinstance(entry.cells[0].job, Attack) and not entry.x:
        return _gallery(chosen, folder, path)
    return _lines(chosen, rows, done, path)


def _gallery(chosen: Plan, folder: Path, path: Path) -> bool:
    from matplotlib.figure import Figure

    shown_once: list[
        tuple[str, np.ndarray, list[tuple[str, np.ndarray]]]
    ] = []  # originals and what came of them
    planned = {p.printed: p for p in chosen.jobs}
    for cell in chosen.entry.cells:
        if cell.measure != "ssim":
            continue  # another number of an image that is there already
        file = folder / "pictures" / f"{key_of(planned[cell.job].job, 0)}.npz"
        if not file.exists() and isinstance(cell.job, Attack):
            return False  # a gallery of all its rows, or none
        if not file.exists():
            continue
        with np.load(file) as held:
            same = [g for g in shown_once if g[0] == cell.column and np.array_equal(g[1], held["truth"])]
            if not same:
                same = [(cell.column, held["truth"], [])]
                shown_once += same
            same[0][2].append((f"{cell.row}, {cell.column}", held["guess"]))
    strips = [
        strip for column, truth, found in shown_once for strip in ((f"original, {column}", truth), *found)
    ]
    if not strips:
        return False
    wide = min(max(len(images) for _, images in strips), 6 if len(strips) < 40 else 3)  # a long gallery stays small
    figure = Figure(figsize=(0.7 * wide + 2.6, 0.7 * len(strips)), layout="constrained")
    axes = figure.subplots(len(strips), wide, squeeze=False)
    for row, (title, images) in enumerate(strips):
        for column, axis in enumerate(axes[row]):
            axis.set_xticks([])
            axis.set_yticks([])
            if column >= len(images):
                axis.set_axis_off()
                continue
            image = np.clip(images[column], 0, 1)
            axis.imshow(image[0] if len(image) == 1 else image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=1)
        axes[row][0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=7)
    figure.savefig(path, dpi=90)
    from PIL import Image  # comes with matplotlib

    with Image.open(path) as drawn:  # 256 colours: images of noise do not compress
        drawn.convert("RGB").quantize(256).save(path, optimize=True)
    return True


_MEASURED = {"accuracy": "test accuracy", "rmse": "test RMSE", "norm": "mean L2 norm of gradients",
             "deviation": "deviation of the noise", "ssim": "SSIM of the attack"}  # fmt: skip
Line = tuple[list[object], list[float]]


def _lines(chosen: Plan, rows: Sequence[Row], done: Mapping[str, JsonObject], path: Path) -> bool:
    """Curves over rounds, or lines over the columns: a panel for each set of columns and, if crowded, each dataset."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    entry = chosen.entry
    series = {name: line for name, line in _series(chosen, rows, done).items() if line[0]}
    if not series:
        return False
    levels = {name: ys[0] for name, (xs, ys) in series.items() if len(xs) == 1 and len(series) > 1}
    crowded = len(series) > 6
    panels: dict[tuple[str, tuple[object, ...]], dict[str, Line]] = {}
    for name, (xs, ys) in series.items():
        if name not in levels:
            place = (_group(name) if crowded else "", () if entry.curve else tuple(xs))
            panels.setdefault(place, {})[name] = (xs, ys)
    if not panels:
        panels = {("", ()): {name: line for name, line in series.items()}}
        levels = {}
    wide = min(3, len(panels))
    tall = -(-len(panels) // wide)
    figure = Figure(figsize=(max(7.0, 4.6 * wide), 4.2 * tall), layout="constrained")
    figure.suptitle(f"{entry.title} ({chosen.scale} scale)")
    kinds = dict.fromkeys(_MEASURED.get(c.measure.partition("@")[0], c.measure) for c in entry.cells)
    names = [name.strip() for name in entry.x.split("|")]
    # Panels of one group of recipes are to be compared, those of several datasets are not.
    shared = len({columns for _, columns in panels}) == 1 and len(kinds) > 1
    axes = list(figure.subplots(tall, wide, squeeze=False, sharey=shared).flat)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for number, ((_, columns), lines) in enumerate(panels.items()):
        axis = axes[number]
        for name, (xs, ys) in lines.items():
            axis.plot(xs, ys, marker="o", markersize=3, linewidth=1.3, label=name)
        for name, level in levels.items():
            if any(_group(name) == _group(other) for other in lines):
                axis.axhline(level, color="0.4", linestyle="--", linewidth=1, label=name)
        wordy = columns and max(len(str(x)) for x in columns) > 6
        axis.tick_params(axis="x", rotation=30 if wordy else 0)
        axis.set(xlabel=names[min(number, len(names) - 1)], ylabel=" / ".join(kinds))
        if entry.curve:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=110)
    return True


def _group(name: str) -> str:
    return name.partition(",")[0]


def _series(chosen: Plan, rows: Sequence[Row], done: Mapping[str, Document]) -> dict[str, Line]:
    entry = chosen.entry
    series: dict[str, Line] = {}
    planned = {p.printed: p for p in chosen.jobs}
    if entry.curve:
        for cell in entry.cells:
            line = done.get(key_of(planned[cell.job].job, 0), {})
            name = "rmses" if cell.measure.startswith("rmse") else entry.curve
            points = [(r, v) for r, v in line.get("result", {}).get(name, ()) if v is not None]
            series[cell.row] = ([r for r, _ in points], [v for _, v in points])
        return series
    for cell, row in zip(entry.cells, rows, strict=True):
        if row.ours is not None and not cell.measure.startswith("rounds_to"):  # another axis
            xs, ys = series.setdefault(row.row, ([], []))
            xs.append(row.column)
            ys.append(row.ours)
    return series
