"""Will this run learn? A cheap forecast before the first round, from public facts alone: noise against the largest signal.

The ratio is the expected length of all noise together over the largest possible length of all bounded contributions
together. It counts noise in every direction, also in those that no class needs, so it is a rough guide. For nets of several
layers and many classes it says most: sigma = 6 with small batches gives 0.56 on the ten digits, where accuracy stays near
chance (0.2), and 1.0 on cancer, whose two classes are still told apart (0.87, where 0.97 is possible).

A single layer on fixed features bears more. There the noise of one class's weights counts against that class's examples,
which is the ratio times the root of the number of classes. How much is kept then also depends on how far apart the
features put the classes, which nobody knows before: the forecast gives the range that was measured (docs/defaults.md; Medical
MNIST also with 30 and 100 clients, the easiest of them: it still keeps 0.94 at a ratio of 1.6, where digits keep 0.76 and
location30 0.24).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedveil.federation.round import moment_of, start
from fedveil.protect.place import InSum

if TYPE_CHECKING:
    from fedveil.federation.loop import Prepared

WEAK, DROWNED = 0.12, 0.3  # of nets with several layers
MANY = 10  # classes
# Of one layer: from which noise to a class's signal on, (least, most) that measured runs kept of the score without privacy.
HOPELESS = 3.0  # noise of one layer to a class's signal: a class that all examples push the same way is still lost in it
KEPT = ((1.0, (0.24, 0.94)), (0.5, (0.61, 0.99)))


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


def kept(ratio: float, classes: int) -> tuple[float, float] | None:
    """The least and the most that a single layer keeps of the score without privacy; None where nothing speaks against learning.

    Formal guarantee: none, in either direction; a record of what was measured."""
    own = ratio * math.sqrt(max(1, classes))
    return next((share for least, share in KEPT if own >= least), None)


def expect(ratio: float, classes: int) -> str:
    """The same as words; "" where nothing speaks against learning."""
    share, own = kept(ratio, classes), ratio * math.sqrt(max(1, classes))
    if share is None:
        return ""
    if own >= HOPELESS:
        return (
            f"this cannot work: the noise on a class's weights is {own:.0f} times as long as all its examples together could "
            f"push them; {math.ceil(own)} times as many examples, or as much more budget, are where learning begins"
        )
    return (
        f"expect less than this data allows: measured runs with so much noise kept {share[0]:.0%} to {share[1]:.0%} of the score "
        "without privacy, most where the classes lie far apart"
    )


def forecast(prepared: Prepared) -> str:
    """What to expect, in one sentence, where that is little; "" where nothing speaks against learning."""
    ratio, config, classes = noise_to_signal(prepared), prepared.config, prepared.dataset.classes or 1
    deep = prepared.task.setting.layers > 1
    if ratio is None or (ratio < WEAK if deep else not kept(ratio, classes)):
        return ""
    head = f"noise to largest possible signal over the whole run is {ratio:.2g}: "
    if not deep:
        return (
            f"{head}{expect(ratio, classes)}. What helps: one noise on the sum instead of at every client (sum-cdp; `fedveil "
            "fit` with --observer sum), a larger epsilon, more rows for each client, fewer weights"
        )
    about = prepared.task.recipe.about.paper
    whose = f"this is the setting of its paper ({about}); " if about and about != "fedveil" else ""
    chance = ratio >= DROWNED and classes >= MANY
    likely = "expect about chance accuracy" if chance else "expect clearly less than this data allows"
    return (
        f"{head}{whose}{likely}. Try `fedveil fit {config.dataset} --epsilon 4`, larger batches, fewer weights, or a recipe "
        "whose noise is on the sum (sum-cdp)"
    )
