"""What a report shows about attacks: figures with explanations, ROC curve, empirical under promised epsilon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from fedveil.jsons import Document, JsonObject
from fedveil.report import plots
from fedveil.report.facts import number, roc_of
from fedveil.report.plots import Series, short

ATTACKS = {
    "gradient": ("Rebuilding inputs from gradients",
                 "The attacker sees what the recipe exposes and tries to redraw the training records."),
    "membership": ("Was this record used?", "The attacker guesses for single records whether they were in the training data."),
    "attribute": ("Guessing a hidden attribute", "The attacker reads a property off the model that it was not trained for."),
    "malicious": ("A server that changes the model", "The attacker sends made-up models and reads records off the updates."),
    "exact": ("Solving for the records", "The attacker solves equations that an update fulfils; noise leaves none."),
    "decoder": ("Rebuilding inputs from outputs", "A network learns to draw records from what the model answers."),
    "audit": ("Audit with canaries", "Planted records or clients are searched for; what is found bounds ε from below."),
}  # fmt: skip
FIGURES: dict[str, tuple[str, str, str]] = {  # key -> (name, form, explanation)
    "share": ("Given back", "percent", "records of one batch that came back within the stated threshold, best model sent"),
    "control": ("By chance", "percent", "records outside the batch that the same candidates seem to hit: the fair comparison"),
    "success_rate": ("Rebuilt", "percent", "victims whose record was rebuilt within the stated threshold"),
    "label_accuracy": ("Labels read", "percent", "victims whose label was found"),
    "rmse": ("RMSE", "number", "mean error per pixel; 0 is a perfect copy"),
    "ssim": ("SSIM", "number", "likeness of structure; 1 is a perfect copy"),
    "psnr": ("PSNR", "number", "likeness in decibel; higher is a better copy"),
    "iterations": ("Iterations", "number", "effort until success, on average"),
    "victims": ("Victims", "count", "how many were attacked"),
    "auc": ("AUC", "number", "0.5 is guessing, 1 always finds members"),
    "balanced_accuracy": ("Balanced accuracy", "percent", "50% is guessing"),
    "tpr_at_1pct": ("Found at 1% false alarms", "percent", "members found when 1 in 100 strangers is accused; 1% is guessing"),
    "tpr_at_01pct": ("Found at 0.1% false alarms", "percent", "members found when 1 in 1000 strangers is accused"),
    "accuracy": ("Accuracy", "percent", "attributes guessed right"),
    "f1": ("F1", "number", "balance of found and right; 1 is perfect"),
    "control_accuracy": ("Without the model", "percent", "what a guess without the model gets right: the fair comparison"),
    "mse": ("MSE", "number", "mean squared error; 0 is a perfect copy"),
    "control_mse": ("MSE without the model", "number", "of the mean of all: the fair comparison"),
    "mae": ("MAE", "number", "mean error; 0 is a perfect copy"),
    "epsilon_lower": ("ε shown", "number", "the true ε cannot be below this (with the stated confidence)"),
    "epsilon_promised": ("ε promised", "number", "the ledger's number"),
    "ceiling": ("Ceiling", "number", "the largest ε that so many canaries could show"),
    "failed_numerically": ("Failed", "count", "attacks that broke down numerically; these say nothing about the defence"),
}  # fmt: skip

REPEATED = {("gradient", "mse"), ("gradient", "psnr")}  # said by RMSE already


def attack_card(card: Document, rows: Sequence[Mapping[str, object]] = (), upload: str = "") -> JsonObject:
    """What the template shows about one attack; `rows` of the ledger say what its seat was promised. upload: what an attack on
    one upload at the server has in hand."""
    kind = card["kind"]
    title, what = ATTACKS.get(kind, (kind, "An attack on this run."))
    out: JsonObject = {
        "kind": kind, "title": title, "what": what, "figures": [], "chart": Markup(""), "image": None,
        "hidden": card.get("hidden", False), "damaged": card.get("damaged", False), "setting": "", "verdict": "", "reason": "",
        "not_done": "", "methods": [], "empty": [], "seat": "",
    }  # fmt: skip
    data = card.get("data")
    if data is None:
        return out
    named = [str(data[k]) for k in ("method", "tap", "recipe", "round") if data.get(k) is not None]
    out |= {
        "figures": _figures(kind, data),
        "setting": " · ".join(f"round {v}" if v.isdigit() else v for v in named),
        "seat": seat_of(kind, str(data.get("tap", "")), rows, upload),
        "image": card.get("image"),
        "chart": _chart(data),
        **{key: str(data.get(key) or "") for key in ("verdict", "reason", "not_done")},
    }
    methods = data.get("methods")
    if isinstance(methods, Mapping):
        out["methods"] = [(str(name), _rates(r)) for name, r in methods.items() if isinstance(r, Mapping)]
        out["empty"] = empty_because(methods)
    return out


def _figures(kind: str, data: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """(name, value, explanation) of what was measured; attacks that are compared have a table of their own."""
    out = []
    for key, (name, form, explanation) in FIGURES.items():
        value = number(data.get(key))
        if value is not None and not isinstance(data.get("methods"), Mapping) and (kind, key) not in REPEATED:
            text = percent(value) if form == "percent" else f"{value:.0f}" if form == "count" else short(value, 3)
            out.append((name, text + interval(data, key, form), explanation))
    controls = data.get("controls")
    if kind == "gradient" and isinstance(controls, Mapping):
        out += [
            (f"Control: {name.replace('_', ' ')}", short(rmse), "RMSE of this guess without any attack")
            for name, inner in controls.items()
            if (rmse := number(inner.get("rmse") if isinstance(inner, Mapping) else inner)) is not None
        ]  # fmt: skip
    return out


def _chart(data: Mapping[str, object]) -> Markup:
    """An audit's evidence, a membership attack's ROC, or nothing."""
    lower = number(data.get("epsilon_lower"))
    if lower is not None:
        sound = data.get("status", "sound") == "sound"
        return plots.evidence(lower, number(data.get("epsilon_promised")), number(data.get("ceiling")), sound)
    curves = roc_curves(data)
    if not curves:
        return Markup("")
    return plots.lines(
        curves, title="ROC: members found against false alarms (dotted: guessing)", x_label="false alarms",
        y_label="found", diagonal=True, floor=0.0, top=1.0,
    )  # fmt: skip


def empty_because(methods: Mapping[str, object]) -> list[str]:
    """Why figures of these membership attacks are empty, each reason once, with the attacks that it holds for."""
    held: dict[str, list[str]] = {}
    for name, rates in methods.items():
        if isinstance(rates, Mapping) and rates.get("reason"):
            held.setdefault(str(rates["reason"]), []).append(str(name))
    return [
        f"Empty for {'all' if len(names) == len(methods) else ', '.join(names)}: {why}"
        for why, names in held.items()
    ]


SEATS = {
    "type2": ("client-process", "gradients of single records, in a client's memory while it trains"),
    "type1": ("client-process", "a client's update before the client protects it"),
    "type0": ("server", "a client's upload, as the server receives it"),
    "type0-sanitised": ("participants", "what is left after the server has noised it"),
}


def seat_of(kind: str, tap: str, rows: Sequence[Mapping[str, Any]], upload: str = "") -> str:
    """Where the attacker sat, and what that seat is promised: an attack elsewhere does not contradict a promise."""
    if kind in ("membership", "attribute", "decoder"):
        observer, saw = "public", "the final model"
    elif kind == "malicious":  # an exact attack names its tap
        observer, saw = "server", "uploads of a model that the server made up"
    elif tap in SEATS:
        observer, saw = SEATS[tap]
        saw = upload or saw if tap == "type0" else saw
    else:
        return ""
    held = [r for r in rows if (r["observer"], r["unit"], r["verdict"]) == (observer, "example", "sound")]
    promised = f"sound ε ≤ {short(held[0]['epsilon'])} per example" if held else "nothing sound, per example"
    return f"Seen: {saw}. This is the seat of “{observer}”; it was promised {promised}."


def roc_curves(data: Mapping[str, Any]) -> list[Series]:
    """The headline attack's curve, and those of compared attacks that have one."""
    methods = data.get("methods")
    named = {str(data.get("method") or "attack"): data, **(methods if isinstance(methods, Mapping) else {})}
    named |= {
        name: data for name in list(named)[:1]
    }  # the headline's own entry among the methods may lack the curve
    curves = []
    for tone, (name, rates) in enumerate(named.items()):
        roc = roc_of(rates) if isinstance(rates, Mapping) else None
        if roc:
            auc = number(rates.get("auc"))
            curves.append(
                Series(f"{name} (AUC {auc:.3f})" if auc is not None else str(name), *roc, tone=tone % 6 + 1)
            )
    return curves


def _rates(rates: Mapping[str, Any]) -> list[str]:
    """The four figures of a membership attack, with their intervals."""
    cells = []
    for key, form in (
        ("auc", "number"),
        ("balanced_accuracy", "percent"),
        ("tpr_at_1pct", "percent"),
        ("tpr_at_01pct", "percent"),
    ):
        value = number(rates.get(key))
        text = percent(value) if form == "percent" else short(value)
        cells.append(text + interval(rates, key, form))
    return cells


def interval(data: Mapping[str, Any], key: str, form: str) -> str:
    """' (low to high)' where the attack states a confidence interval."""
    found = data.get(f"{key}_interval") or data.get(f"{key}_ci") or (data.get("intervals") or {}).get(key)
    if not isinstance(found, list | tuple) or len(found) != 2:
        return ""
    low, high = number(found[0]), number(found[1])
    if low is None or high is None:
        return ""
    return (
        f" ({percent(low)} to {percent(high)})" if form == "percent" else f" ({short(low)} to {short(high)})"
    )


def percent(value: float | None) -> str:
    """A share for people."""
    return "–" if value is None else f"{100 * value:.1f}%"
