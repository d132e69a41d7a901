"""Will this run learn? A cheap forecast before the first round, from public facts alone: noise against the largest signal.

The ratio is the expected length of all noise together over the largest possible length of all bounded contributions
together. It counts noise in every direction, also in those that no class needs, so it is a rough guide. For nets of several
layers and many classes it says most: sigma = 6 with small batches gives 0.56 on the ten digits, where accuracy stays near
chance (0.2), and 1.0 on cancer, whose two classes are still told apart (0.87, where 0.97 is possible). A single layer on fixed
features bears more: at 0.15 it reaches 0.91 on the digits, at 0.45 still 0.74, where 0.975 is possible.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedveil.federation.round import moment_of, start
from fedveil.protect.place import InSum

if TYPE_CHECKING:
    from fedveil.federation.loop import Prepared

WEAK, WEAK_LAYER, DROWNED = 0.12, 0.3, 0.3  # the second for models of one layer
MANY = 10  # classes


def noise_to_signal(prepared: Prepared) -> float | None:
    """The ratio of the module's text; None where noise or bound say nothing of the kind (no noise, no clip, reports)."""
    task = prepared.task
    recipe, setting = task.recipe, task.setting
    if recipe.law is None or not recipe.private or not recipe.clip.bounded:
        return None
    now = moment_of(task, start(task, prepared.initial))
    size = max(1, setting.examples // setting.clients)
    values = recipe.place.noised(recipe, setting, now, size)
    if not values:
        return None
    signal = recipe.clip.joint(now.bounds[0], setting.layers)
    times = float(setting.rounds)
    if recipe.place.in_steps:
        signal *= recipe.batches.constant(min(setting.batch, size), size)
        times *= max(1.0, setting.cohort) * setting.steps
    elif isinstance(recipe.place, InSum):
        signal *= recipe.place.everyone(recipe, setting)
    elif recipe.place.open_uploads:
        times *= max(1.0, setting.cohort)
    else:
        signal *= setting.cohort
    return values[0].deviation * math.sqrt(setting.dimension) / signal / math.sqrt(times)


def forecast(prepared: Prepared) -> str:
    """What to expect, in one sentence, where that is little; "" where nothing speaks against learning."""
    ratio = noise_to_signal(prepared)
    deep = prepared.task.setting.layers > 1
    if ratio is None or ratio < (WEAK if deep else WEAK_LAYER):
        return ""
    config = prepared.config
    about = prepared.task.recipe.about.paper
    whose = f"this is the setting of its paper ({about}); " if about and about != "fedveil" else ""
    chance = deep and ratio >= DROWNED and (prepared.dataset.classes or 0) >= MANY
    expect = "expect about chance accuracy" if chance else "expect clearly less than this data allows"
    return (
        f"noise to largest possible signal over the whole run is {ratio:.2g}: {whose}{expect}. Try `fedveil fit "
        f"{config.dataset} --epsilon 4`, larger batches, fewer weights, or a recipe whose noise is on the sum (sum-cdp)"
    )
