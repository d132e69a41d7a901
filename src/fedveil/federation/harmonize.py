"""The Harmonizer: noise multipliers that spend one budget, for the run or for each client and mechanism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.special import bdtrc

from fedveil.data.partition import Partition
from fedveil.errors import UserError
from fedveil.federation.config import RunConfig
from fedveil.federation.round import Task, moment_of, start
from fedveil.privacy.accountants import answer
from fedveil.privacy.events import Event
from fedveil.protect.catalogue import get
from fedveil.protect.clip import constant
from fedveil.protect.law import clip_for
from fedveil.protect.promise import claims
from fedveil.protect.recipe import Recipe, with_changes
from fedveil.protect.sampling import Everybody
from fedveil.protect.setting import Moment

RARE = 1e-3  # chance that a run with secret coins draws some client more often than it was calibrated for


def harmonize(
    task: Task, config: RunConfig, dealt: Partition, before: Sequence[Event] = ()
) -> tuple[Task, tuple[str, ...]]:
    """Give the task (or each client) the smallest sigma that keeps its sound epsilon within the budget.

    before: what was released about the same units before training, and comes out of the same budget.

    A budget of all is kept to the last round: the noise is that of whoever is drawn most often (`most_participations`). Clients
    with budgets of their own are calibrated for the participations they can expect, ceil(rounds * cohort / clients), and sit
    out where chance picks them more often: the ledger stops each before it would exceed its budget.

    Formal guarantee: none is needed of this choice. Sigma is a function of public numbers and of coins that no row decides, and
    the ledger judges what is really released, whatever was foreseen.
    """
    if config.client_epsilons:
        rounds = expected_participations(task)
        mechanisms = config.client_mechanisms or [task.recipe.law.name if task.recipe.law else "none"]
        own: dict[int, tuple[Recipe, float]] = {}
        budgets: dict[int, float] = {}
        cache: dict[tuple[float, float, str, int], tuple[Recipe, float]] = {}
        for client in range(dealt.clients):
            epsilon = config.client_epsilons[client % len(config.client_epsilons)]
            mechanism = mechanisms[client % len(mechanisms)]
            delta = delta_of(config, client)
            key = (epsilon, delta, mechanism, dealt.size(client))
            if key not in cache and math.isinf(epsilon):
                same = {name: getattr(task.recipe, name) for name in ("cohort", "aggregate", "proximal", "heterogeneity")}
                cache[key] = (replace(get("non-private"), **same), 0.0)
            elif key not in cache:
                recipe = with_changes(task.recipe, {"mechanism": mechanism, **clip_for(mechanism)})
                own_config = config.model_copy(update={"delta": delta})
                cache[key] = (
                    recipe,
                    sigma_for(replace(task, recipe=recipe), own_config, epsilon, rounds, key[3], before),
                )
            own[client], budgets[client] = cache[key], epsilon
        notes = tuple(
            f"epsilon {epsilon:g}, delta {delta:g}, {mechanism}, {size} examples: sigma {found[1]:.4g}"
            for (epsilon, delta, mechanism, size), found in cache.items()
        )
        return replace(task, own=own, own_epsilon=budgets), notes
    sizes = {dealt.size(c) for c in range(min(dealt.clients, 100_000))}
    assert config.target_epsilon is not None
    rounds = most_participations(task, config)
    sigma = sigma_for(task, config, config.target_epsilon, rounds, min(sizes), before, largest=max(sizes))
    recipe = replace(task.recipe, sigma=constant(sigma))
    note = f"calibrated sigma {sigma:.6g} for epsilon {config.target_epsilon:g}"
    if rounds != task.setting.rounds:
        note += f", for one {recipe.place.unit} about which up to {rounds} uploads in {task.setting.rounds} rounds tell"
    if not _draws_known(task, config) and rounds < _most_of_all(task):
        note += f"; if more do, by chance (below {RARE:g}), the run ends before its last round"
    return replace(task, recipe=recipe), (note,)


def delta_of(config: RunConfig, client: int) -> float:
    """The delta of a client's own budget."""
    deltas = config.client_deltas or [config.delta]
    return deltas[client % len(deltas)]


def by_formula(task: Task, config: RunConfig, dealt: Partition) -> tuple[Task, tuple[str, ...]]:
    """Give a recipe the noise of its method's own formula for recipe.epsilon and delta.

    Formal guarantee: none by itself; the ledger states what this noise is worth, as for any other.
    """
    recipe = task.recipe
    assert recipe.epsilon is not None and recipe.formula is not None
    smallest = min((dealt.size(c) for c in range(min(dealt.clients, 10_000))), default=1)
    clip = recipe.clip.bound.value(0, task.setting.rounds)
    seen = expected_participations(task)
    sigma, down = recipe.formula.noise(
        recipe.epsilon, config.delta, clip, smallest, dealt.clients, task.setting.rounds, seen
    )
    noised = replace(recipe, sigma=constant(sigma), downlink_sigma=down)
    said = (
        f"{recipe.name}'s own scales for epsilon {recipe.epsilon:g}: uplink deviation {sigma * clip:.4g}, "
        f"downlink {down * clip:.4g}"
    )
    return replace(task, recipe=noised), (said,)


def expected_participations(task: Task) -> int:
    """Rounds in which a client takes part, on average, rounded up (all of them where everybody always does)."""
    setting = task.setting
    if task.recipe.place.scope == "everyone":
        return setting.rounds
    return max(1, math.ceil(setting.rounds * min(1.0, setting.cohort / setting.clients)))


def _draws_known(task: Task, config: RunConfig) -> bool:
    """Is it known before the first round how often each client is drawn? Coins of the system's entropy fall anew when a run is
    continued, so nothing is built on those of one start."""
    setting, recipe = task.setting, task.recipe
    everybody = isinstance(recipe.cohort, Everybody) or setting.cohort >= setting.clients
    return everybody or recipe.place.scope == "everyone" or not config.secure_noise


def _most_of_all(task: Task) -> int:
    """The uploads of one run that can be about one unit at all: of the clients that hold it, all that a round has."""
    setting, recipe = task.setting, task.recipe
    copies = min(setting.copies, setting.clients) if recipe.place.unit == "example" else 1
    drawn = setting.clients if recipe.cohort.random_size else max(1, round(setting.cohort))
    return setting.rounds * min(copies, drawn)


def most_participations(task: Task, config: RunConfig) -> int:
    """The most uploads of one run that are about one unit: what the ledger's worst row will count at the last round.

    Formal guarantee: for seeded runs exact, because cohorts are drawn from keys that no data enters (`Cohort.draw`); an example
    that `copies` clients may hold is counted with the `copies` that are drawn most often, as the ledger counts it. For runs with
    secret coins an upper bound but for a probability of RARE: by the binomial law of each client's draws (rounds are
    independent), and a union bound over all clients. Whatever happens, the ledger counts what was really drawn.
    """
    setting, recipe = task.setting, task.recipe
    if recipe.place.scope == "everyone":
        return setting.rounds
    copies = min(setting.copies, setting.clients) if recipe.place.unit == "example" else 1
    if not _draws_known(task, config):
        if config.target_accuracy is not None:  # the committed plan counts everybody in every round
            return copies * setting.rounds
        rate = min(1.0, max(setting.cohort, round(setting.cohort)) / setting.clients)
        exceeded = bdtrc(np.arange(setting.rounds + 1), setting.rounds, rate)  # probability of more draws than so many
        most = int(np.flatnonzero(exceeded <= RARE / setting.clients)[0])
        return min(_most_of_all(task), copies * max(1, most))
    counts = np.zeros(setting.clients, np.int64)
    for number in range(1, setting.rounds + 1):
        counts[recipe.cohort.draw(setting.clients, setting.cohort, task.root, number)] += 1
    return max(1, int(np.sort(counts)[-copies:].sum()))


def events_of(task: Task, config: RunConfig, sigma: float, rounds: int, size: int, largest: int | None = None) -> list[Event]:
    """The observer's sound events over `rounds` rounds at constant sigma, for a client of `size` examples; with `largest` events
    that are at least as strong as those of any client between the two sizes: few examples are drawn more often, and the sums
    over many are rounded more."""
    if largest is not None and largest != size:
        few, many = (events_of(task, config, sigma, rounds, one) for one in (size, largest))
        return [
            replace(one, noise=replace(one.noise, multiplier=min(one.noise.multiplier, two.noise.multiplier)))
            for one, two in zip(few, many, strict=True)
        ]
    now = moment_of(task, start(task, _zeros(task)))
    at = Moment(now.number, now.bounds, (sigma,) * len(now.sigmas), now.epsilon, now.arrived)
    unit = task.recipe.place.unit
    found = [
        c
        for c in claims(task.recipe, task.setting, at, size)
        if (c.observer, c.unit, c.verdict) == (config.observer, unit, "sound")
    ]
    if not found:
        raise UserError(
            f"calibrate = true: recipe '{task.recipe.name}' gives no sound promise to observer '{config.observer}' per {unit}, "
            "so no sigma reaches an epsilon; choose another observer or recipe"
        )
    return [replace(c.event, steps=c.event.steps * rounds) for c in found if c.event is not None]


def _zeros(task: Task) -> np.ndarray:
    return np.zeros(task.layout.size, np.float32)


def sigma_for(
    task: Task, config: RunConfig, epsilon: float, rounds: int, size: int, before: Sequence[Event] = (),
    largest: int | None = None,
) -> float:  # fmt: skip
    """Smallest sigma (within 0.1 %, never above the budget) by bisection on the recipe's own events; largest as there."""
    accountant = config.accountant

    def spent(sigma: float) -> float:
        events = [*before, *events_of(task, config, sigma, rounds, size, largest)]
        found = answer(events, config.delta, accountant)
        if found.epsilon is None and accountant == "pld":
            found = answer(events, config.delta, "rdp")
        return math.inf if found.epsilon is None else found.epsilon

    low, high = 1e-3, 1.0
    while spent(high) > epsilon:
        low, high = high, high * 4
        if high > 1e9:
            raise UserError(
                f"no noise reaches epsilon = {epsilon:g} in {rounds} rounds at delta = {config.delta:g}"
            )
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return high
