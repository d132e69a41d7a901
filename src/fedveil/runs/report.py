"""A first plain report: one self-contained HTML page per run, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedveil.runs.store import Run, open_run, write_atomic

_STYLE = "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}table{border-collapse:collapse}td,th{padding:.2rem .6rem;text-align:left;vertical-align:top}.sound{color:#0a7d32}.nominal{color:#9a6700}.none{color:#b3261e}"


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Write the page for one or more runs."""
    parts = [_section(open_run(folder)) for folder in folders]
    page = f"<!doctype html><meta charset=utf-8><title>fedveil report</title><style>{_STYLE}</style>" + "".join(parts)
    write_atomic(path, page.encode())


def _section(run: Run) -> str:
    result: dict[str, Any] = run.result or {}
    rows = "".join(
        f"<tr><td>{escape(r['observer'])}<td>{escape(r['unit'])}<td>{'none' if r['epsilon'] is None else format(r['epsilon'], '.4g')}"
        f"<td class={r['verdict']}>{r['verdict']}<td>{escape(r['reason'])}"
        for r in result.get("ledger", [])
    )
    accuracy = result.get("test_accuracy")
    quality = "not finished" if accuracy is None else f"test accuracy {accuracy:.4f}"
    return (
        f"<h1>{escape(run.config.recipe)} on {escape(run.config.dataset)}</h1><p>{quality}, "
        f"{result.get('rounds', 0)} rounds.</p><table><tr><th>observer<th>unit<th>epsilon<th>verdict<th>why{rows}</table>"
    )
