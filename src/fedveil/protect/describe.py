"""The catalogue as plain rows: what each recipe does and what it promises to whom."""

from __future__ import annotations

from dataclasses import asdict
from typing import TypedDict

from fedveil.privacy.events import OBSERVERS
from fedveil.privacy.schedules import Schedule
from fedveil.protect.catalogue import catalogue
from fedveil.protect.clip import Given, values_of
from fedveil.protect.promise import claims
from fedveil.protect.recipe import Recipe, spell
from fedveil.protect.setting import Moment, Setting

# A typical setting, only to ask a recipe which kinds of claims it makes.
TYPICAL = Setting(
    clients=100, cohort=10, rounds=10, steps=5, batch=5, examples=50_000, layers=3, dimension=1000
)


def text_of(schedule: Schedule) -> str:
    """Short text: 6, or linear 15→4.85."""
    if schedule.kind == "constant":
        return f"{schedule.first:g}"
    end = "" if schedule.last is None else f"→{schedule.last:g}"
    return f"{schedule.kind} {schedule.first:g}{end}"


def verdicts(recipe: Recipe, setting: Setting = TYPICAL) -> dict[str, dict[str, str]]:
    """observer -> {"verdict", "unit", "reason"}: the best promise a recipe makes to it for any unit."""
    steps = 1 if recipe.place.sum_only else setting.steps
    setting = Setting(**{**asdict(setting), "steps": steps})
    now = Moment(
        1,
        values_of(recipe.clip.bound, 0, 10, steps),
        values_of(recipe.sigma, 0, 10, steps),
        recipe.epsilon,
        10,
    )
    order = {"sound": 0, "nominal": 1, "none": 2}
    out: dict[str, dict[str, str]] = {}
    for observer in OBSERVERS:
        own = sorted(
            (c for c in claims(recipe, setting, now, 500) if c.observer == observer),
            key=lambda c: order[c.verdict],
        )
        best = own[0]
        out[observer] = {"verdict": best.verdict, "unit": best.unit, "reason": best.reason}
    return out


class Described(TypedDict):
    """One recipe as a plain row."""

    name: str
    summary: str
    paper: str
    family: str
    target: str
    clip: str
    sensitivity: str
    sigma: str
    mechanism: str
    where: str
    noise_on: str
    sampling: str
    channel: str
    aggregate: str
    epsilon: float | None
    verdicts: dict[str, str]
    units: dict[str, str]
    reasons: dict[str, str]


def describe(recipe: Recipe) -> Described:
    """One recipe as a plain row."""
    clip = recipe.clip
    shown = f"{clip.kind} {text_of(clip.bound)}" if clip.bounded else clip.kind
    if clip.rule != Given():
        shown += f" ({clip.rule.name})"
    if clip.order == 1:
        shown += " L1"
    found, words = verdicts(recipe), spell(recipe)
    return {
        "name": recipe.name,
        "summary": recipe.about.summary,
        "paper": recipe.about.paper,
        "family": recipe.about.family,
        "target": words["target"],
        "clip": shown,
        "sensitivity": recipe.scale.name if recipe.private else "-",
        "sigma": text_of(recipe.sigma) if recipe.law is not None else "-",
        "mechanism": words["mechanism"],
        "where": recipe.place.name,
        "noise_on": recipe.noise_on.name,
        "sampling": recipe.batches.name,
        "channel": recipe.channel.name,
        "aggregate": recipe.aggregate.name,
        "epsilon": recipe.epsilon,
        "verdicts": {o: v["verdict"] for o, v in found.items()},
        "units": {o: v["unit"] for o, v in found.items()},
        "reasons": {o: v["reason"] for o, v in found.items()},
    }


def describe_all() -> list[Described]:
    """Every recipe of the catalogue."""
    return [describe(recipe) for recipe in catalogue().values()]
