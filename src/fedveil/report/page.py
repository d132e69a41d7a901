"""One self-contained HTML page per run, or several runs side by side: results, promise, proof, cost, how to repeat.

The page loads nothing from anywhere: style and script are inline and a content security policy inside the page
allows exactly these two by their hash. Names and reasons are escaped by the template engine.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fedveil.federation.store import Run, write_atomic
from fedveil.report import plots, words
from fedveil.report.attacks import percent
from fedveil.report.facts import Facts, gather, number, sound_epsilon
from fedveil.report.plots import Point, Series, short
from fedveil.report.view import result_of, view

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = resources.files("fedveil.report") / "templates"


def write_report(folders: Sequence[Path | Run], path: Path, private: bool = False) -> None:
    """Write the page for one or more runs. private=True adds figures computed from private records, marked so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, render([gather(folder, private) for folder in folders], private).encode())


def render(runs: Sequence[Facts], private: bool = False) -> str:
    """The page as text."""
    style, script = asset("base.css") + asset("report.css"), asset("chart.js")
    return _environment().get_template("report.html").render(
        views=[view(facts, private) for facts in runs],
        comparison=comparison(runs) if len(runs) > 1 else None,
        private=private,
        style=Markup(style),
        script=Markup(script),
        policy=policy(style, script),
        glossary=words.GLOSSARY,
        verdicts=words.VERDICTS,
    )  # fmt: skip


def policy(style: str, script: str) -> str:
    """A content security policy for a page with exactly this style and script, and pictures inside the page."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@lru_cache(maxsize=16)
def asset(name: str) -> str:
    """A style sheet or script that reports and dashboard share."""
    return (TEMPLATES / name).read_text("utf-8")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    found = Environment(
        loader=FunctionLoader(asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "short": short,
        "duration": words.time_of,
        "bytesize": words.size_of,
        "percent": percent,
    }
    return found


def comparison(runs: Sequence[Facts]) -> dict[str, Any]:
    """A table, the plane of result against sound epsilon, and the curves together."""
    rows, points, curves = [], [], []
    for tone, facts in enumerate(runs):
        name, value, text = result_of(facts)
        row = facts.main()
        nominal = [
            r["epsilon"]
            for r in facts.promise.rows
            if (r["observer"], r["unit"], r["verdict"]) == (facts.run.config.observer, facts.unit, "nominal")
            and r["epsilon"] is not None
        ]
        rows.append(
            {
                "name": facts.name,
                "recipe": facts.recipe.name,
                "dataset": facts.run.config.dataset,
                "metric": name,
                "result": text,
                "sound": sound_epsilon(facts),
                "nominal": max(nominal, default=None),
                "verdict": "none" if row is None else "sound" if row["verdict"] == "sound" else "none",
                "observer": facts.run.config.observer,
                "unit": facts.unit,
                "seconds": number(facts.result.get("seconds")),
                "rounds": facts.rounds,
                "pending": facts.promise.simulated,
            }
        )
        if value is not None:
            points.append(Point(facts.name, sound_epsilon(facts), value))
        key = "test_accuracy" if name == "test accuracy" else "test_rmse"
        curves.append(Series(facts.name, facts.x, facts.column(key), tone % 6 + 1))
    share = all(row["metric"] == "test accuracy" for row in rows)
    label = "test accuracy" if share else "test result"
    return {
        "rows": rows,
        "pareto": plots.pareto(points, value=label, observer=str(rows[0]["observer"]), percent=share),
        "curves": plots.lines(
            curves, title=f"{label.capitalize()} over rounds", y_label=label, percent=share, top=1.0 if share else None
        ),
        "alike": len({(r["dataset"], r["metric"]) for r in rows}) == 1,
    }  # fmt: skip
