"""One row per seat: what it was promised, the best attack made from it, what that got, and what it means in a sentence.

Seats are never mixed: an attack from a client's memory says nothing about what a server sees. Rows about tables speak of records,
rows about pictures of images. Everything comes from the ledger and from kept attack results; nothing is judged by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.jsons import Document, JsonObject

ENTRY = "fedveil/attack/1"
SUMMARY = "fedveil/attack-summary/1"
MOST_FILES = 500
MOST_BYTES = 1 << 24
TAPS = {
    "type2": "client-process",
    "type1": "client-process",
    "type0": "server",
    "type0-sanitised": "participants",
}
LEVEL = 0.01  # chance that correct runs show something at a seat, shared by all tests of labels made from it
OF_OUTPUTS = ("attribute", "decoder")  # they read a record off what the model answers when it is put in, trained on or not
SEATS = {
    "client-process": "inside a client",
    "server": "the server",
    "participants": "other participants",
    "public": "whoever gets the model",
}

SCHEMA: JsonObject = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": SUMMARY,
    "type": "object",
    "required": ["schema", "rows"],
    "additionalProperties": False,
    "properties": {
        "schema": {"const": SUMMARY},
        "rows": {
            "type": "array",
            "items": {
                "type": "object",
                "required": [
                    "seat",
                    "unit",
                    "promised",
                    "verdict",
                    "attack",
                    "made",
                    "got",
                    "means",
                    "attacks",
                ],
                "additionalProperties": False,
                "properties": {
                    "seat": {"enum": list(SEATS)},
                    "unit": {"type": "string"},
                    "promised": {"type": ["number", "null"]},
                    "verdict": {"enum": ["sound", "nominal", "none"]},
                    "attack": {"type": ["string", "null"]},
                    "made": {"type": ["string", "null"]},
                    "got": {"type": "string"},
                    "means": {"type": "string"},
                    "attacks": {"type": "integer", "minimum": 0},
                },
            },
        },
    },
}


def read_history(folder: Path) -> list[Document]:
    """All kept results, oldest first; files that are not results are left out."""
    found = []
    for path in sorted(folder.glob("*.json"))[-MOST_FILES:] if folder.is_dir() else []:
        try:
            if path.stat().st_size > MOST_BYTES:
                continue
            entry = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(entry, dict) and entry.get("schema") == ENTRY and isinstance(entry.get("result"), dict):
            result = entry["result"]
            several = result.get("results") if isinstance(result.get("results"), list) else [result]
            found += [{**entry, "result": one} for one in several if isinstance(one, dict)]
    return sorted(found, key=lambda entry: str(entry.get("made")))


def seat_of(result: Document) -> tuple[str, str] | None:
    """(observer, unit) that an attack speaks about."""
    kind = result.get("kind")
    if kind == "audit":
        return str(result.get("observer")), str(result.get("unit"))
    if kind in ("membership", "attribute", "decoder"):
        return "public", "example"
    if kind == "malicious":
        return "server", "example"
    if kind == "exact":
        return TAPS.get(str(result.get("tap")), "server"), "example"
    observer = TAPS.get(str(result.get("tap")))
    return None if observer is None else (observer, "example")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def things_of(result: Mapping[str, Any]) -> str:
    """What was attacked, in a word: images only where the dataset has pixels."""
    pictures = result.get("images", bool(result.get("pixel_range")))  # older results do not say
    return "images" if pictures is True else "records"


def strength(result: Mapping[str, Any], level: float = LEVEL) -> tuple[float, str]:
    """(how much more than a blind guess, between 0 and 1; what it got, in words). 0: nothing that chance would not give.

    level: how improbable labels must be by guesses to count."""
    kind = result.get("kind")
    things = things_of(result)
    if kind == "audit":
        lower, promised = _number(result.get("epsilon_lower")) or 0.0, _number(result.get("epsilon_promised"))
        share = min(1.0, lower / promised) if promised else float(lower > 0)
        return (
            1.0 if result.get("verdict") == "promise broken" else 0.5 * share
        ), f"ε of at least {lower:.3g} shown"
    if kind == "membership":
        return _membership(result)
    if kind in ("malicious", "exact"):
        share, control = _number(result.get("share")) or 0.0, _number(result.get("control")) or 0.0
        low = (result.get("share_interval") or [0.0])[0]
        return (
            share if low > control else 0.0
        ), f"{100 * share:.0f}% of a batch of {result.get('batch')} {things}"
    if kind == "attribute":
        got, control = _number(result.get("accuracy")) or 0.0, _number(result.get("control_accuracy")) or 0.0
        low = (result.get("accuracy_interval") or [got])[0]
        said = f"{100 * got:.1f}% of the attributes right, {100 * control:.1f}% without the model"
        return (got - control if low > control else 0.0), said
    if kind == "decoder":
        error, blind = _number(result.get("mse")), _number(result.get("control_mse"))
        gain = max(0.0, 1 - error / blind) if error is not None and blind else 0.0
        return 0.5 * gain, f"{things} redrawn with {100 * gain:.0f}% less error than the mean of all"
    return _rebuilt(result, things, level)


def _rebuilt(result: Mapping[str, Any], things: str, level: float) -> tuple[float, str]:
    """Images or records that were rebuilt, beside what the best blind guess gets, and labels that were read."""
    share, victims = _number(result.get("success_rate")) or 0.0, _number(result.get("victims"))
    read, told = _labels(result, level)
    controls = result.get("controls")
    rates = [_number(one.get("success_rate")) or 0.0 for one in controls.values()] if isinstance(controls, Mapping) else []
    blind = max(rates, default=0.0)
    beside = f", {100 * blind:.0f}% by a blind guess" if blind else ""
    words = f"{100 * share:.0f}% of {'?' if victims is None else f'{victims:g}'} {things} rebuilt{beside}{told}"
    beyond = not blind or _more(share, blind, int(victims or 0), level)
    return max(share if beyond else 0.0, read), words


def _more(share: float, blind: float, victims: int, level: float) -> bool:
    """Are `share` of the victims more than `blind` of them by chance? Fisher's exact test."""
    from scipy.stats import fisher_exact

    hits, blind_hits = round(share * victims), round(blind * victims)
    table = [[hits, victims - hits], [blind_hits, victims - blind_hits]]
    return bool(fisher_exact(table, alternative="greater").pvalue < level)


def _labels(result: Mapping[str, Any], level: float) -> tuple[float, str]:
    """(how far labels were read beyond what the same guesses get of other victims, at most a quarter of an image; words)."""
    labels, control, chance = (_number(result.get(f"label_{name}")) for name in ("accuracy", "control", "chance"))
    if labels is None:
        return 0.0, ""
    if control is None or chance is None:  # a result of an earlier version
        return 0.0, f", {100 * labels:.0f}% of the labels read (by guesses: not known)"
    victims = int(_number(result.get("victims")) or 2)
    whose = "at public frequencies" if victims == 1 else "for others"
    found = chance < level and labels > control
    word = "" if found else f": no finding with {victims} victim{'s' if victims != 1 else ''}"
    told = f", {100 * labels:.0f}% of the labels read ({100 * control:.0f}% by guesses {whose}{word})"
    return 0.25 * (labels - control) * found, told


def _membership(result: Mapping[str, Any]) -> tuple[float, str]:
    """The best of the methods tried, each interval widened to hold for all of them together where it says so."""
    methods = result.get("methods")
    tried = methods if isinstance(methods, Mapping) and methods else {str(result.get("method")): result}
    best, words = 0.0, "no better than guessing"
    for name, rates in tried.items():
        if not isinstance(rates, Mapping):
            continue
        auc = _number(rates.get("auc"))
        low = (rates.get("auc_interval_all") or rates.get("auc_interval") or [0.0])[0]
        if auc is not None and low > 0.5 and 2 * auc - 1 > best:
            best, words = 2 * auc - 1, f"members told from strangers with AUC {auc:.2f} ({name})"
    return best, words


def meaning(promised: float | None, verdict: str, got: float, result: Mapping[str, object]) -> str:
    """What a finding means for whoever answers for the data."""
    if result.get("kind") == "audit" and result.get("verdict") == "promise broken":
        return (
            "The promise does not hold: do not use this run."
            if verdict == "sound"
            else "The number printed here does not hold."
        )
    if result.get("kind") in OF_OUTPUTS:
        return (
            "No promise about training covers this: whoever sees what the model answers for a record learns about that record. "
            "Keep answers as private as records."
            if got > 0
            else "What the model answers for a record gives no more than guessing away."
        )
    if verdict == "sound":
        if result.get("kind") == "audit" and result.get("verdict") == "not enough evidence":
            return "Nothing contradicts the promise, but this is too little to tell; next: fedveil audit RUN --plan."
        if got == 0:
            return "Nothing found; the promise says that no attack can find much more."
        if result.get("kind") == "audit":
            return "Consistent with the promise."
        return "Something was found; the promise bounds how much more any attack can find."
    if got == 0:
        return "Nothing found, but nothing is promised either: a better attack may succeed."
    return "This seat learns about single records, and nothing was promised against it: keep it in trusted hands."


def summary(rows: Sequence[Mapping[str, object]], history: Iterable[Document]) -> Document:
    """The table: one row per seat and unit that the ledger knows or that was attacked."""
    seats: dict[tuple[str, str], dict[str, object]] = {}
    order = {"sound": 0, "nominal": 1, "none": 2}
    for row in sorted(rows, key=lambda r: order.get(str(r.get("verdict")), 3)):
        key = (str(row["observer"]), str(row["unit"]))
        seats.setdefault(key, {"promised": row.get("epsilon"), "verdict": row.get("verdict")})
    tried: dict[tuple[str, str], list[Mapping[str, object]]] = {}
    for entry in history:
        place = seat_of(entry["result"])
        if place is not None and place[0] in SEATS and "not_done" not in entry["result"]:
            tried.setdefault(place, []).append(entry)
    table = []
    for seat in SEATS:
        for key in [k for k in dict.fromkeys([*seats, *tried]) if k[0] == seat]:
            held = seats.get(key, {"promised": None, "verdict": "none"})
            told = _best(held, tried.get(key, []))
            beside = ("public", key[1])
            if seat == "participants" and key not in tried and beside in tried and held == seats.get(beside):
                told |= AS_PUBLIC
            table.append({"seat": key[0], "unit": key[1], **held, **told})
    return {"schema": SUMMARY, "rows": table}


AS_PUBLIC: JsonObject = {
    "got": "see whoever gets the model",
    "means": "This seat gets the models of all rounds and no upload, under the same promise: no attack of its own was made.",
}


def _best(held: Document, entries: Sequence[Mapping[str, Any]]) -> JsonObject:
    if not entries:
        return {
            "attack": None,
            "made": None,
            "got": "not attacked",
            "means": "Nothing was tried from this seat.",
            "attacks": 0,
        }
    tested = sum(entry["result"].get("label_chance") is not None for entry in entries)
    scored = [(*strength(entry["result"], LEVEL / max(tested, 1)), entry) for entry in entries]
    # What can be read off a model's answers is about no training row: it stands there only if nothing else was tried.
    got, words, entry = max(scored, key=lambda one: (one[2]["result"].get("kind") not in OF_OUTPUTS, one[0]))
    result = entry["result"]
    name = " ".join(str(result[k]) for k in ("kind", "method") if result.get(k))
    return {
        "attack": name, "made": entry.get("made"), "got": words, "attacks": len(entries),
        "means": meaning(held.get("promised"), str(held.get("verdict")), got, result),
    }  # fmt: skip


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row for people: seat, promised, best attack, what it got, what that means."""
    promised = row["promised"]
    told = (
        "nothing" if promised is None or row["verdict"] == "none" else f"{row['verdict']} ε ≤ {promised:.3g}"
    )
    attack = (
        "–"
        if row["attack"] is None
        else f"{row['attack']}, {str(row['made'])[:10]} (best of {row['attacks']})"
    )
    return [f"{SEATS[row['seat']]}, per {row['unit']}", told, attack, row["got"], row["means"]]


COLUMNS = ["seat", "promised", "best attack", "what it got", "what that means"]


def worth_showing(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Seats that were promised something or attacked; of the others there is nothing to say."""
    return [row for row in rows if row["attack"] is not None or row["verdict"] != "none"]


def next_step(rows: Iterable[Mapping[str, Any]], run: object) -> str:
    """What to try where a promise stands that nothing was tried against; "" if there is no such seat."""
    shown = worth_showing(rows)
    tried = {row["seat"] for row in shown if row["attack"] is not None}
    if "public" in tried:
        tried.add("participants")  # most runs hand nothing on to them but the model
    left = dict.fromkeys(SEATS[row["seat"]] for row in shown if row["seat"] not in tried)
    if not left:
        return ""
    return f"Nothing was tried yet from these seats: {', '.join(left)}. `fedveil attack {run} --kind all` tries every attack."
