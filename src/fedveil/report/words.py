"""The plain words of reports and dashboard: what an observer, a unit, a verdict or an epsilon means."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedveil.protect.recipe import Recipe

OBSERVERS = {
    "server": "whoever runs the server",  # what it sees depends on where noise is added: `who_looks`
    "client-process": "whoever can look into a client's memory while it trains",
    "participants": "the other clients, who receive the shared model after each round",
    "public": "anybody who gets the final model",
}
UNITS = {
    "example": "one record (one picture, one patient's row)",
    "client": "everything that one client holds",
    "reported-weight": "one weight that a client reports",
}
VERDICTS = {
    "sound": "a guarantee that holds",
    "nominal": "counted as a paper counts it, but not a guarantee",
    "none": "no promise: this observer may learn everything",
}
MASKED = "only the noised sum over all clients (opened under masks by a secure aggregation), no single upload"
HARDLY = "very weak"
SECRET = "holds when deployed with secret noise"
ACCOUNTANTS = {
    "pld": "privacy-loss distributions (tightest)",
    "rdp": "Rényi DP",
    "moments": "moments accountant",
    "zcdp": "zero-concentrated DP",
    "optimal": "optimal composition",
    "advanced": "advanced composition",
    "advanced-tanh": "advanced composition (tanh form)",
    "basic": "plain sum",
    "group": "group privacy",
}
GLOSSARY = (
    ("ε (epsilon)", "How much a single record can change what an observer sees. 0: nothing can be learned about it. "
     "Each step up multiplies the odds of a right guess by e. Smaller is more private."),
    ("δ (delta)", "The small probability with which the promise may fail altogether."),
    ("sound", "The number is a proven guarantee for what this run did."),
    ("nominal", "The number is what a published method states; a gap in the argument means that it guarantees nothing here."),
    ("none", "There is no finite number: this observer may learn everything about the unit."),
    ("observer", "The person or machine that tries to learn something: the server, a client's own process, other clients, "
     "the public."),
    ("unit", "What is protected: a single record, or everything one client has. A promise for records is usually none "
     "for whole clients."),
    ("neighbours", "Two datasets that differ in one unit; the promise compares them. Zero-out and add-remove: the unit is there "
     "or not. Replace-one: it is exchanged for another one."),
    ("clip bound", "Each contribution is shortened to at most this length before noise is added, so none can stand out."),
    ("σ (sigma)", "Strength of the noise compared with the clip bound. Larger is more private and less accurate."),
    ("accountant", "A method that adds up the privacy cost of all steps. All of them are upper limits; tighter ones give smaller "
     "numbers for the same run."),
    ("secret noise", "Simulations draw noise from a seed so that results can be repeated. Whoever knows the seed could subtract "
     "the noise, so the promise holds only when deployed with noise from a secret source (secure_noise = true)."),
)  # fmt: skip

# Technical reasons of the ledger (as patterns), each with what it means to somebody who does not know the words.
PLAIN = (
    (r"group privacy over (\d+) gives a delta of 1 or more",
     "a client holds {0} records; a promise made for one record is used up long before it covers them all"),
    (r"group privacy over (\d+)", "the promise for one record, stretched over all {0} records of a client"),
    (r"largest norm of the batch", "the strength of the noise itself gives away how large the largest contribution was"),
    (r"batch's own median norm", "the strength of the noise itself gives away what is typical of the data"),
    (r"per-example gradients are in the client's memory",
     "while a client computes, its memory holds the bare contributions; whoever reads it there sees them"),
    (r"a promise for single examples is none for a whole client",
     "single records are hidden, but not what all records of a client have in common"),
    (r"joint DP", "the number was made for single records and does not carry over to all of a client's data"),
    (r"as the papers count it", "the paper adds up the cost for a way of training that differs from what really happened here"),
    (r"no noise is added", "everything that is sent can be read as it is"),
    (r"dropping coordinates is not noise", "leaving parts out hides nothing about the parts that are sent"),
    (r"noise without a clip", "noise hides a contribution only if its size is limited first"),
    (r"noise in every local step", "each contribution is shortened and drowned in noise before anybody else sees it"),
    (r"each upload is clipped and noised by its client", "a client limits and noises its own upload before it sends it"),
)  # fmt: skip


def server_sees(recipe: Recipe, secure: bool) -> str:
    """What whoever runs the server sees. secure: the sum is opened under masks."""
    return MASKED if secure else recipe.place.shows(recipe)


def upload_at_server(recipe: Recipe, secure: bool) -> str:
    """What an attack on one upload at the server has in hand."""
    if secure:
        return "a client's masked upload, as the server receives it"
    if recipe.place.sum_only:
        return "one client's part of the noised sum, as left to a server that knows all other parts"
    return "a client's upload, as the server receives it"


def who_looks(recipe: Recipe, secure: bool) -> dict[str, str]:
    """Who each observer is and what it sees. A promise towards a server that sees a sum is none towards one that sees uploads."""
    return {**OBSERVERS, "server": f"{OBSERVERS['server']} and sees {server_sees(recipe, secure)}"}


def in_plain_words(reason: str) -> str:
    """The meaning of a ledger's reason, or an empty text where it speaks for itself."""
    for pattern, text in PLAIN:
        found = re.search(pattern, reason)
        if found:
            return text.format(*found.groups())
    return ""


def guess_rate(epsilon: float, delta: float) -> float:
    """Largest share of right guesses in a fair game: was this unit used or not?

    Formal guarantee: under (epsilon, delta)-DP no test with even odds is right more often than
    (e^epsilon + delta) / (1 + e^epsilon).
    """
    if epsilon > 700:
        return 1.0
    grown = math.exp(epsilon)
    return min(1.0, (grown + delta) / (1 + grown))


def meaning(epsilon: float | None, delta: float, verdict: str, it: str = "it") -> str:
    """One line that says what an epsilon is worth to somebody who asks about `it`."""
    if verdict == "none" or epsilon is None:
        return "may learn everything"
    rate = 100 * guess_rate(epsilon, delta)
    if verdict == "nominal":
        return "says nothing certain about what can be learned"
    if rate > 99.9:
        return f"may tell whether {it} was used nearly every time: this protects hardly at all"
    return f"can tell whether {it} was used: right at most {rate:.0f}% of the time (a coin toss: 50%)"


def strength(epsilon: float | None, verdict: str) -> str:
    """A word for the size of a sound epsilon."""
    if verdict != "sound" or epsilon is None:
        return ""
    return (
        "strong" if epsilon <= 1 else "moderate" if epsilon <= 3 else "weak" if epsilon <= 10 else "very weak"
    )


def size_of(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def time_of(seconds: float | None) -> str:
    """A duration for people."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
