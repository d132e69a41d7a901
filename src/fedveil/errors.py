"""The one exception that means: the input was wrong, here is what to change."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Wrong input. The message says what was wrong, where, and what to do; the CLI exits with 2."""


def extra(name: str) -> str:
    """How to install an extra. The package is on no index, so that its name alone would find nothing, or somebody else's."""
    return f"pip install '.[{name}]' in fedveil's folder"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ' Did you mean 'x'?' for the nearest known word, or an empty string."""
    near = get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""
