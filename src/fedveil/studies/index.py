"""Every table and figure of the five papers."""

from __future__ import annotations

from fedveil.errors import UserError, did_you_mean
from fedveil.studies import p1, p2, p3, p4, p5
from fedveil.studies.cells import Entry

PAPERS = {
    "P1": "Fed-CDP: gradient-leakage resilient federated learning (2021)",
    "P2": "Gradient leakage resilient deep learning with dynamic privacy parameters",
    "P3": "Fed-alpha-CDP (2023)",
    "P4": "LDP-FL (2021)",
    "P5": "UDP-FL",
}


def catalogue() -> dict[str, Entry]:
    """All entries by id, in the order of the papers."""
    return {entry.id: entry for paper in (p1, p2, p3, p4, p5) for entry in paper.entries()}


def find(name: str) -> Entry:
    """The entry with this id."""
    known = catalogue()
    wanted = name.strip().lower()
    if wanted not in known:
        raise UserError(
            f"'{name}' is no table or figure.{did_you_mean(wanted, known)} `fedveil reproduce --list` shows them all."
        )
    entry = known[wanted]
    if not entry.cells:
        raise UserError(
            f"{entry.id} ({entry.title}) is not an experiment: it is {entry.note}. There is nothing to run."
        )
    return entry
