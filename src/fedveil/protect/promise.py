"""From practice to promise: the claims of one round, read from the recipe's own parts.

One loop: for every observer and unit, what does the observer see before the noise, and what does the noised thing say? A
paper's own count stands beside as nominal.

Formal guarantee: a claim with verdict "sound" describes a mechanism that the release post-processes. Where that cannot be
shown the claim is "none" or, with the reason, "nominal".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedveil.privacy.events import OBSERVERS, Claim, Release
from fedveil.protect.place import AFTER_UPLOAD, BOTH, none, units_of
from fedveil.protect.recipe import Recipe
from fedveil.protect.setting import Moment, Setting

Budgets = Mapping[int, tuple[Recipe, float]]


def claims(recipe: Recipe, setting: Setting, now: Moment, size: int) -> list[Claim]:
    """The claims of one client of `size` examples about one round."""
    place = recipe.place
    out: list[Claim] = []
    for observer in OBSERVERS:
        raw = place.raw(observer, recipe)
        for unit in BOTH if raw else units_of(place):
            out += [none(observer, unit, raw)] if raw else place.says(observer, unit, recipe, setting, now, size)
    for count in recipe.counted:
        out += count.claims(recipe, setting, now, size)
    return out


def release(
    recipe: Recipe, setting: Setting, now: Moment, sizes: Mapping[int, int], budgets: Budgets = {}
) -> Release:
    """All claims of one round, grouped by clients for which they are equal.

    sizes: client -> number of its examples, for the clients of this round's cohort.
    budgets: clients that use their own recipe and noise multiplier (UDP-FL): client -> (recipe, sigma).
    """
    groups: dict[tuple[Claim, ...], list[int]] = {}
    alike: dict[tuple[int, int], list[int]] = {}  # clients of one size and no budget of their own have equal claims
    for client, size in sizes.items():
        kind = client if client in budgets else -1, size
        if kind not in alike:
            own, moment = recipe, now
            if client in budgets:
                own, sigma = budgets[client]
                moment = Moment(now.number, now.bounds, (sigma,) * len(now.sigmas), now.epsilon, now.arrived)
            alike[kind] = groups.setdefault(tuple(claims(own, setting, moment, size)), [])
        alike[kind].append(client)
    if not sizes and recipe.place.scope == "everyone":
        # Nobody was drawn, but the noised model goes out all the same: that a coin fell so is part of what
        # amplification by sampling counts in every round.
        shared = tuple(claim for claim in claims(recipe, setting, now, 1) if claim.scope == "everyone")
        if shared:
            groups[shared] = []
    return Release(now.number, tuple((tuple(members), key) for key, members in groups.items()))


def unpaid(clients: int, notes: Sequence[str]) -> Release | None:
    """What is charged before the first round where something was computed from private rows without noise (a fitted scaler,
    a count of classes): it is in every later release, so nothing finite is promised. notes: what that was."""
    if not notes:
        return None
    reason = "; ".join(note.removeprefix("private:").strip() for note in notes)
    ended = tuple(none(observer, unit, reason) for observer in AFTER_UPLOAD for unit in BOTH)
    return Release(0, ((tuple(range(clients)), ended),), "preprocessing")


def divergence(recipe: Recipe, number: int, clients: Sequence[int]) -> Release | None:
    """What is charged when clients of round `number` diverged and were left out: that they did depends on their data."""
    if not (recipe.private and recipe.place.shows_divergence) or not clients:
        return None
    reason = "a client whose training diverged was left out; that it diverged depends on its data"
    ended = tuple(none(observer, unit, reason) for observer in AFTER_UPLOAD for unit in BOTH)
    return Release(number, ((tuple(clients), ended),), "diverged")
