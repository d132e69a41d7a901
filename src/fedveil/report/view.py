"""One run as the report's template shows it: figures with their explanations, tables and charts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from fedveil.attacks import verdicts
from fedveil.jsons import Document, JsonObject
from fedveil.privacy.schedules import PAPERS_SIGMA
from fedveil.protect.clip import Given
from fedveil.report import plots, words
from fedveil.report.attacks import attack_card, percent
from fedveil.report.facts import Facts, number
from fedveil.report.plots import Series, short

if TYPE_CHECKING:
    from fedveil.federation.config import RunConfig
    from fedveil.protect.recipe import Recipe


def view(facts: Facts, private: bool) -> dict[str, object]:
    """Everything the template shows about one run."""
    config = facts.run.config
    upload = words.upload_at_server(facts.recipe, config.secure_sum)
    return {
        "id": "run-" + hashlib.sha256(str(facts.run.path).encode()).hexdigest()[:8],
        "name": facts.name,
        "config": config,
        "facts": facts.run.facts,
        "recipe": facts.recipe,
        "finished": facts.finished,
        "simulated": facts.promise.simulated,
        "stopped": facts.result.get("stopped") or "not finished",
        "tiles": tiles(facts),
        "training": training(facts),
        "quality": quality(facts),
        "confusion": Markup("") if not facts.confusion else plots.confusion(facts.confusion),
        "confused": [] if not facts.confusion else confused(facts.confusion),
        "spread": spread(facts),
        "promise": facts.promise,
        "table": promise_table(facts),
        "sentence": sentence(facts),
        "epsilons": epsilon_chart(facts),
        "settings": settings_charts(facts),
        "steady": steady(facts),
        "resilience": resilience(facts),
        "attacks": [attack_card(card, facts.promise.rows, upload) for card in facts.attacks],
        "seats": seat_table(facts, private),
        "public_data": facts.public_data,
        "costs": costs(facts),
        "reproduce": reproduce(facts, private),
    }


def seat_table(facts: Facts, private: bool) -> list[list[str]]:
    """One row per seat: promised, best attack, what it got and means. Attacks on private records only with `private`."""
    kept = verdicts.read_history(facts.run.path / "attacks" / "history")
    if not (private or facts.public_data):
        kept = [entry for entry in kept if entry["result"].get("kind") == "audit"]
    rows = verdicts.summary(facts.promise.rows, kept)["rows"] if kept else []
    return [verdicts.cells(row) for row in verdicts.worth_showing(rows)]


def observer(facts: Facts) -> str:
    """The observer of the promise, and of a server what it sees: that depends on where noise is added."""
    name = facts.run.config.observer
    return name if name != "server" else f"{name}, which sees {words.server_sees(facts.recipe, facts.run.config.secure_sum)},"


def result_of(facts: Facts) -> tuple[str, float | None, str]:
    """(name, value, text) of the figure a run is judged by."""
    accuracy = facts.last("test_accuracy")
    if accuracy is not None or facts.last("test_rmse") is None:
        return "test accuracy", accuracy, percent(accuracy)
    rmse = facts.last("test_rmse")
    return "test RMSE", rmse, short(rmse, 4)


def tiles(facts: Facts) -> list[dict[str, str]]:
    """The three figures at the top: how good, what is promised, what attacks got."""
    name, _, text = result_of(facts)
    explain = (
        "share of test records that the model gets right"
        if name == "test accuracy"
        else "typical size of the error on test records"
    )
    judged = str(facts.result.get("judgement") or "")[:300]
    first = {
        "title": name.capitalize(),
        "value": text,
        "kind": "none" if facts.result.get("learned") is False else "",  # a model that learned nothing looks like it
        "text": f"{explain}, after {facts.rounds} rounds" + (f"; {judged}" if judged else ""),
    }
    if facts.result.get("rounds") == 0:
        first |= {"kind": "none", "text": f"{explain}; no round was played: this is the untrained first model"}
    row = facts.main()
    config = facts.run.config
    whom = f"Promise to the {config.observer}"
    if row is None or row["verdict"] != "sound":
        said = "no guarantee for this observer"
        if row and row["verdict"] == "nominal":
            said = (
                f"a paper's way of counting gives ε = {short(row['epsilon'])}, which guarantees nothing here"
            )
        second = {"title": whom, "value": "none", "kind": "none", "text": said}
    else:
        size = words.strength(row["epsilon"], "sound")
        said = f"{size}, per {row['unit']}: {words.meaning(row['epsilon'], row['delta'], 'sound')}"
        second = {"title": whom, "value": f"ε ≤ {short(row['epsilon'])}", "kind": "sound", "text": said}
        if facts.promise.simulated:
            second |= {"kind": "sound pending", "text": f"{said}; {words.SECRET}"}
        if size == words.HARDLY:
            second["kind"] += " weak"  # true, but no reason for a reassuring colour
    if config.observer == "server":
        second["text"] += f"; the server sees {words.server_sees(facts.recipe, config.secure_sum)}"
    audits = [c["data"] for c in facts.attacks if c["kind"] == "audit" and "data" in c]
    lower = number(audits[0].get("epsilon_lower")) if audits else None
    if lower is not None:
        third = {
            "value": f"ε ≥ {short(lower)}",
            "text": "what planted canaries showed: the true ε cannot be below this",
        }
    elif facts.attacks:
        third = tried(facts)
    else:
        third = {"value": "not yet", "text": "nobody has attacked this run so far"}
    return [first, second, {"title": "Attacks", "kind": "", **third}]


def tried(facts: Facts) -> dict[str, str]:
    """Attacks in one figure: how many seats were tried, and what the best attack got at each. Of private records:
    the kinds of attacks alone."""
    kinds = ", ".join(dict.fromkeys(str(card["kind"]) for card in facts.attacks))
    shown = [card["data"] for card in facts.attacks if "data" in card]
    if not shown and any(card.get("hidden") for card in facts.attacks):
        told = "what they got is about training records, so it is in a private report alone"
        return {"value": _many(len(facts.attacks), "attack"), "text": f"{kinds}: {told}"}
    try:
        rows = verdicts.summary(facts.promise.rows, [{"result": data, "made": None} for data in shown])["rows"]
        got = [f"{verdicts.SEATS[row['seat']]}: {row['got']}" for row in rows if row["attack"] is not None]
    except (TypeError, ValueError, KeyError, IndexError, AttributeError):  # files that somebody else has written
        got = []
    if not got:
        return {"value": _many(len(facts.attacks), "attack"), "text": f"{kinds}: the report shows what they got"}
    return {"value": f"{_many(len(got), 'seat')} tried", "text": "; ".join(got)[:400]}


def training(facts: Facts) -> list[tuple[str, str, str]]:
    """(what, value, explanation) of data, model, recipe."""
    config, recipe, known = facts.run.config, facts.recipe, facts.run.facts
    drawn = "all of them" if config.cohort_size is None else f"{config.cohort_size:g} on average"
    rows = [
        ("Data", config.dataset, f"{known.get('examples', '?')} training records, {_dealt(config)}"),
        *([("Target", config.target, "the column that the model predicts")] if config.target else []),
        ("Clients", str(config.clients), f"each keeps its own records; {drawn} take part in a round"),
        *_paid_looks(facts),
        ("Model", config.model if config.model != "auto" else "chosen for the data",
         f"{known.get('parameters', '?')} numbers in {_many(len(known.get('layers', [])), 'layer')} are learned"),
        ("Training", f"{facts.rounds} of {config.rounds} rounds",
         f"in each, a client makes {_many(config.local_steps, 'local step')} on about {config.batch_size:g} records, "
         f"learning rate {config.learning_rate:g}"),
        ("Recipe", recipe.name, recipe.about.summary or "how contributions are bounded and noised"),
    ]  # fmt: skip
    if recipe.private:
        law = "two-valued" if recipe.law is None else recipe.law.name
        rows.append(("Noise", law, f"added {recipe.place.words}; σ is {_sigma(facts)}"))
        rows.append(("Clipping", _clip_words(recipe), "the most a single contribution can weigh"))
    else:
        rows.append(("Noise", "none", "nothing hides a single contribution"))
    rows.append(
        (
            "Tuning",
            config.tuning,
            "how settings were chosen; choosing them on private data would cost privacy too",
        )
    )
    return rows


def _dealt(config: RunConfig) -> str:
    """How records came to their clients. Names and numbers of sites are public, as a run's first lines say."""
    group = config.table.get("group")
    if group:
        return f"grouped by the column '{group}': each of its values is a site, and one client"
    return f"dealt out by '{config.partition}'"


def _paid_looks(facts: Facts) -> list[tuple[str, str, str]]:
    """What `fit` read from the rows before training, and what of the budget that took."""
    promise, share = facts.promise, number(facts.run.config.table.get("share"))
    if not promise.looks:
        return []
    price = "" if promise.looks_epsilon is None else f"; by themselves they cost ε ≤ {short(promise.looks_epsilon)}"
    part = "" if not share else f", {percent(share).replace('.0%', '%')} of the budget's square"
    words_of = f"noised counts of undeclared columns (kinds, ranges, words, classes) before training{price}{part}"
    return [("Looks", _many(promise.looks, "paid look"), f"{words_of}; the promise below counts them")]


def _many(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def _sigma(facts: Facts) -> str:
    known = [v for v in facts.column("sigma") if v is not None]
    if not known:
        return "not recorded"
    return (
        short(known[0])
        if min(known) == max(known)
        else f"{short(known[0])} at first, {short(known[-1])} at last"
    )


def _clip_words(recipe: Recipe) -> str:
    clip = recipe.clip
    if not clip.bounded:
        return "none"
    rule = "" if clip.rule == Given() else f", {clip.rule.name} rule"
    return ("each layer on its own" if clip.by_layer else "the whole vector") + rule


def quality(facts: Facts) -> list[Markup]:
    """Curves on public test (and validation) data."""
    name, _, _ = result_of(facts)
    key = name.split()[-1].lower()
    curves = [Series("test", facts.x, facts.column(f"test_{key}"), 1)]
    curves.append(Series("validation", facts.x, facts.column(f"validation_{key}"), 2, True))
    is_share = key == "accuracy"
    out = [
        plots.lines(
            curves,
            title=f"{name.capitalize()} over rounds",
            y_label=key,
            percent=is_share,
            top=1.0 if is_share else None,
        )
    ]
    losses = [Series("test", facts.x, facts.column("test_loss"), 1)]
    losses.append(Series("validation", facts.x, facts.column("validation_loss"), 2, True))
    out.append(plots.lines(losses, title="Test loss over rounds (smaller is better)", y_label="loss"))
    return [c for c in out if c]


def confused(matrix: Sequence[Sequence[int]]) -> list[tuple[int, int, int, float]]:
    """The three commonest mistakes: (true, said, count, share of the true class)."""
    found = [
        (i, j, count, count / sum(row))
        for i, row in enumerate(matrix)
        for j, count in enumerate(row)
        if i != j and count
    ]
    return sorted(found, key=lambda item: -item[2])[:3]


def spread(facts: Facts) -> Markup:
    """Private: the last round's loss of each client."""
    for line in reversed(facts.private):
        losses = line.get("client_loss")
        if isinstance(losses, Mapping):
            known = [(str(c), v) for c, raw in losses.items() if (v := number(raw)) is not None]
            return plots.bars(
                known, title=f"Loss of each client in round {line.get('round')}", label="training loss"
            )
    return Markup("")


def promise_table(facts: Facts) -> dict[str, object]:
    """Observers by units; reasons are numbered notes below."""
    rows = facts.promise.rows
    units = [u for u in words.UNITS if any(r["unit"] == u for r in rows)]
    notes: dict[str, int] = {}
    lines = []
    for observer, who in words.who_looks(facts.recipe, facts.run.config.secure_sum).items():
        cells = []
        for unit in units:
            own = [r for r in rows if (r["observer"], r["unit"]) == (observer, unit)]
            cells.append(
                [
                    {
                        **row,
                        "meaning": words.meaning(row["epsilon"], row["delta"], row["verdict"]),
                        "pending": row["verdict"] == "sound" and row["simulated"],
                        "weak": words.strength(row["epsilon"], row["verdict"]) == words.HARDLY,
                        "strength": words.strength(row["epsilon"], row["verdict"]),
                        "plain": words.in_plain_words(row["reason"]),
                        "note": notes.setdefault(row["reason"], len(notes) + 1) if row["reason"] else 0,
                    }
                    for row in own
                ]
            )
        lines.append({"observer": observer, "who": who, "cells": cells})
    return {
        "units": [(u, words.UNITS[u]) for u in units],
        "lines": lines,
        "notes": [(reason, words.in_plain_words(reason)) for reason in notes],
        "secret": words.SECRET,
    }


def sentence(facts: Facts) -> str:
    """The promise of the main observer in one sentence."""
    if facts.promise.problem:
        return f"Nothing can be promised: {facts.promise.problem}."
    row, whom = facts.main(), observer(facts)
    if row is None:
        return f"Nothing was released to the {facts.run.config.observer} yet."
    unit = words.UNITS.get(row["unit"], row["unit"])
    if row["verdict"] == "sound":
        held = f"; it {words.SECRET}" if facts.promise.simulated else ""
        return (
            f"The {whom} {words.meaning(row['epsilon'], row['delta'], 'sound', unit)}. "
            f"This is a proven limit{held}. It may fail with probability δ = {short(row['delta'])}."
        )
    if row["verdict"] == "nominal":
        return (
            f"Nothing is guaranteed towards the {whom.rstrip(',')}. The method's own paper would state "
            f"ε = {short(row['epsilon'])}; the table says why that number does not hold here."
        )
    return f"Nothing is promised towards the {whom} about {unit}."


def epsilon_chart(facts: Facts) -> Markup:
    """Epsilon of the main row over rounds, one curve per accountant."""
    course = dict(facts.promise.course or {})
    series = [
        Series(f"{words.ACCOUNTANTS.get(name, name)}{', nominal' if verdict == 'nominal' else ''}", xs, ys, tone,
               verdict == "nominal")
        for tone, ((name, verdict), (xs, ys)) in enumerate(course.items(), 1)
    ]  # fmt: skip
    row = facts.main() or {}
    budget = facts.promise.budget
    return plots.lines(
        series,
        title=f"ε spent over rounds, {row.get('observer')} about one {row.get('unit')}",
        y_label="epsilon",
        floor=0.0,
        hline=None if budget is None else (budget, f"budget {short(budget)}"),
    )


SETTINGS = (
    ("sigma", "σ: noise compared with the clip bound", "noise multiplier σ"),
    ("bound", "Clip bound: the most one contribution weighs", "clip bound"),
)


def settings_charts(facts: Facts) -> list[tuple[Markup, bool]]:
    """(chart, private) of sigma, clip bound and noise against gradient."""
    out: list[tuple[Markup, bool]] = []
    if not facts.recipe.private:
        return out
    for key, title, label in SETTINGS:
        if len(set(facts.column(key))) > 1:
            chart = plots.lines([Series(label, facts.x, facts.column(key), 1)], title=title, y_label=label)
            out.append((chart, False))
    ratios = [noise_to_gradient(facts, line) for line in facts.private]
    rounds = [number(line.get("round")) or 0.0 for line in facts.private]
    out.append(
        (
            plots.lines(
                [Series("noise / gradient", rounds, ratios, 4)],
                title="Noise compared with the clipped gradients of a batch (above 1: mostly noise)",
                y_label="ratio",
            ),
            True,
        )
    )
    measured = [number(line.get("measured_l1")) for line in facts.private]
    told = [
        Series("expected", facts.x, facts.column("expected_l1"), 1),
        Series("measured, one client", rounds, measured, 4),
        Series("the paper's bound", facts.x, facts.column("expected_l1_bound"), 2),
    ]
    if any(value is not None for value in measured):
        title = "ℓ1 error that a round's noise puts into one client's update"
        out.append((plots.lines(told, title=title, y_label="ℓ1 error"), True))
    out.append((path_chart(facts), False))
    return [(chart, hidden) for chart, hidden in out if chart]


def path_chart(facts: Facts) -> Markup:
    """Public loss along the paths of the last round that merged by mode connectivity, averaged per level."""
    paths: Sequence[Document] = next(
        (m["paths"] for m in reversed(facts.metrics) if m.get("paths")), ()
    )
    series = []
    for level in sorted({int(path["level"]) for path in paths}):
        for index, kind in enumerate(("straight", "trained")):
            curves = [path[kind] for path in paths if path["level"] == level]
            mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
            at = [k / (len(mean) - 1) for k in range(len(mean))]
            series.append(Series(f"level {level + 1}, {kind}", at, mean, 1 + level % 6, dashed=index == 0))
    title = "Public loss between merged models: straight line and trained path (last round)"
    return (
        plots.lines(series, title=title, x_label="place on the path", y_label="public loss")
        if series
        else Markup("")
    )


def steady(facts: Facts) -> list[str]:
    """The settings that stayed the same in all rounds, as sentences."""
    if not facts.recipe.private:
        return []
    if facts.recipe.law is None:
        where = "from the server's average" if facts.recipe.ranges.adaptive else "fixed"
        return [f"ε {short(facts.recipe.epsilon)} for each reported weight", f"ranges {where}"]
    known = {label: set(facts.column(key)) for key, _, label in SETTINGS}
    said = []
    if (kept := facts.last("parameter_distortion")) is not None:
        printed, within = facts.last("parameter_distortion_printed"), facts.last("input_distortion")
        said.append(
            f"half of the rightly classified test rows keep their label under every change of all parameters shorter than "
            f"{short(kept)} (Proposition 2 as printed, a first-order estimate: {short(printed)}), and under every change of "
            f"the input shorter than {short(within)}"
        )
    error, bound = (set(facts.column(key)) for key in ("expected_l1", "expected_l1_bound"))
    if len(error) == len(bound) == 1 and None not in error | bound:
        said.append(
            f"a round's noise puts an expected ℓ1 error of {short(error.pop())} into a client's update "
            f"(the paper's formula, which lets noises not cancel, says {short(bound.pop())})"
        )
    orders = set(facts.column("extra_rounds_order")) - {None}
    if len(orders) == 1:
        said.append(
            f"Staircase noise costs of the order of {short(orders.pop())} additional rounds (UDP-FL's Theorem 4: nominal, "
            "an order without its constant)"
        )
    return said + [
        f"the {label} was {short(next(iter(v)))} in all rounds"
        for label, v in known.items()
        if len(v) == 1 and None not in v
    ]


def resilience(facts: Facts) -> str:
    """P3's rule for a resilient start, from private figures of the first round; "" in a report without them."""
    line = next((one for one in facts.private if one.get("resilient_start") is not None), None)
    if line is None:
        return ""
    asked, met = number(line["resilient_start"]), bool(line.get("resilient_start_met"))
    used = next(iter(facts.column("sigma")), None)
    return (
        f"resilient start (P3: σ₀ ≥ C·σ/S, with the fixed σ = {short(PAPERS_SIGMA)} of the papers): S was "
        f"{short(number(line.get('dynamic_sensitivity')))} in the first round, so the rule asks for σ₀ = {short(asked)} or more; "
        f"it was {short(used)}: {'met' if met else 'not met'}"
    )


def noise_to_gradient(facts: Facts, line: Document) -> float | None:
    """Length of one step's noise over the largest length that a batch's clipped gradients can add up to."""
    deviation, norms = number(line.get("noise_deviation")), line.get("norm_mean")
    if not deviation or not isinstance(norms, list):
        return None
    same = [m for m in facts.metrics if m.get("round") == line.get("round")]
    bound = (number(same[0].get("bound")) if same else None) or math.inf
    each = math.sqrt(sum(min(n, bound) ** 2 for raw in norms if (n := number(raw)) is not None))
    size = number(facts.run.facts.get("parameters"))
    return (
        None if not each or not size else deviation * math.sqrt(size) / (facts.run.config.batch_size * each)
    )


def costs(facts: Facts) -> list[tuple[str, str, str]]:
    """(what, value, explanation) of time and traffic."""
    seconds = [v for v in facts.column("seconds") if v is not None]
    size = number(facts.run.facts.get("parameters")) or 0
    down = sum(4 * size * (number(m.get("clients")) or 0) for m in facts.metrics)
    measured = [v for v in facts.column("bytes_up") if v is not None]
    up = sum(measured) if measured else sum(4 * size * (number(m.get("uploads")) or 0) for m in facts.metrics)
    rows = [
        ("Time", words.time_of(number(facts.result.get("seconds")) or sum(seconds)), "of this computer, from start to end"),
        ("Per round", words.time_of(sum(seconds) / len(seconds) if seconds else None), "training and merging, on average"),
        ("Sent up", words.size_of(up), "all clients to the server" + ("" if measured else ", as 4-byte numbers, uncompressed")),
        ("Sent down", words.size_of(down), "the model to the clients of each round, as 4-byte numbers"),
    ]  # fmt: skip
    sat_out = sum(v or 0 for v in facts.column("sat_out"))
    if sat_out:
        rows.append(
            (
                "Sat out",
                f"{sat_out:.0f} times",
                "a drawn client had no privacy budget left and did not take part",
            )
        )
    reason = facts.run.facts.get("engine_reason")
    return [
        *rows,
        ("Engine", str(facts.run.facts.get("engine", "?")), str(reason or "what computed the local steps")),
    ]


def reproduce(facts: Facts, private: bool) -> JsonObject:
    """Command, seed, versions, and the configuration as TOML (local folders only in a private report)."""
    known = facts.run.facts
    values = {k: v for k, v in facts.run.config.model_dump().items() if v is not None and v != {}}
    command = str(known.get("command") or "")
    if not private:
        values.pop("data", None)
        command = " ".join(
            word for word in command.replace("--set data=", "\0").split(" ") if not word.startswith("\0")
        )
    plain = {k: v for k, v in values.items() if not isinstance(v, dict)}
    tables = {k: v for k, v in values.items() if isinstance(v, dict)}
    text = "\n".join(f"{k} = {_toml(v)}" for k, v in plain.items())
    for name, table in tables.items():
        text += f"\n\n[{name}]\n" + "\n".join(f'"{k}" = {_toml(v)}' for k, v in table.items())
    return {
        "command": command,
        "toml": text + "\n",
        "versions": sorted((known.get("versions") or {}).items()),
        "seed": known.get("seed"),
        "created": known.get("created", ""),
        "head": facts.promise.head,
        "releases": facts.promise.releases,
        "notes": [str(note) for note in known.get("notes") or []],
        "folder": facts.run.path.resolve().name,
    }


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False)
