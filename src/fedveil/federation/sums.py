"""A round's sum under masks: its parameters from the round's own noise, the opened total, and what is promised.

The same functions serve the simulation of the whole protocol (`fedveil run … --set secure_sum=true`) and both ends of a
deployment. `Noised` stays the only holder of the scale: parameters take deviation and bound from it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.errors import UserError
from fedveil.keys import derive
from fedveil.privacy.events import Claim, Observer, Release, Unit
from fedveil.protect.law import Gaussian
from fedveil.protect.noised import Noised
from fedveil.protect.place import AtServer, InSum
from fedveil.protect.recipe import Recipe
from fedveil.protect.setting import Moment
from fedveil.secure_sum import graph, noise, simulate
from fedveil.secure_sum.parameters import Parameters, check

if TYPE_CHECKING:
    from fedveil.federation.round import Task

FINEST = 2.0**-15  # of the bound


@dataclass(frozen=True)
class Terms:
    """How many nodes must survive, how many may collude with the server, and how many drop-outs to plan for."""

    threshold: int
    colluders: int = 1

    @staticmethod
    def of(clients: int, threshold: int | None, colluders: int) -> Terms:
        """The terms of a configuration; by default 80% of the clients, but at least what two survivor sets exclude."""
        least = (clients + colluders) // 2 + 1
        return Terms(threshold or max(least, math.ceil(0.8 * clients)), colluders)


def refusal(recipe: Recipe, clients: int, cohort: float | None) -> str:
    """Why a recipe cannot have its sum under masks, or ""."""
    if not isinstance(recipe.place, InSum | AtServer):
        return "secure_sum needs noise once on a sum over all clients (where = sum or where = server)"
    if not isinstance(recipe.law, Gaussian):
        return "secure_sum adds discrete Gaussian shares: mechanism = gaussian"
    if recipe.noise_on.for_each or recipe.clip.rule.beside() or recipe.aggregate.looks_inside:
        return "secure_sum releases one sum: noise_on = sum or mean, no noised count beside it, no rule that needs single uploads"
    if not recipe.clip.bounded or recipe.clip.order != 2 or recipe.clip.of_weights:
        return "secure_sum needs updates or gradients that are clipped in l2"
    if recipe.cohort.random_size or (cohort is not None and cohort < clients):
        return "secure_sum plays with everyone on the roster: cohort = all, cohort_size unset"
    return ""


def model_digest(weights: np.ndarray, facts: Mapping[str, object] = {}) -> bytes:
    """Names what nodes work on: the weights, bit by bit, and public facts of the run."""
    head = json.dumps(facts, sort_keys=True, default=str).encode()
    return hashlib.sha256(len(head).to_bytes(8, "little") + head + weights.astype("<f4").tobytes()).digest()


def parameters_of(task: Task, noised: Noised, model: bytes) -> Parameters:
    """The parameters of a round's sum. UserError where they make no safe one.

    The grid is the recipe's, or coarser, so that all examples' gradients in one coordinate fill at most half of 32 bits.
    """
    terms, setting = task.secure, task.setting
    assert terms is not None
    grid = max(noised.grid, noised.bound * max(FINEST, setting.examples * 2.0**-30))
    lost = setting.clients // 20
    degree, needed = graph.choose(setting.clients, terms.threshold, terms.colluders, lost)
    parameters = Parameters(
        model=model,
        size=noised.dimension,
        grid=grid,
        bound=noised.bound,
        deviation=noised.on_grid(grid),
        nodes=setting.clients,
        threshold=terms.threshold,
        colluders=terms.colluders,
        unit=noised.unit,
        degree=degree,
        share_threshold=needed,
    )
    check(parameters)
    return parameters


def promised(task: Task, now: Moment, release: Release, sizes: Mapping[int, int]) -> Release:
    """The release of a round with its sum under masks: rows after the upload are computed from the honest shares.

    Replaced are rows that are sound with the noise in one piece, and those that are none only because the server would see
    single uploads. Rows of other observers and units, and rows that are none for other reasons (shared examples), stay.
    """
    groups: dict[tuple[Claim, ...], list[int]] = {}
    for members, claims in release.groups:
        for client in members:
            ours = _from_shares(task, now, sizes[client])
            groups.setdefault(tuple(_better(task, c, ours) for c in claims), []).append(client)
    return replace(release, groups=tuple((tuple(members), key) for key, members in groups.items()))


def _better(task: Task, claim: Claim, ours: Mapping[tuple[Observer, Unit], Claim]) -> Claim:
    raw = task.recipe.place.raw(claim.observer, task.recipe)
    replaced = claim.verdict == "sound" or (claim.verdict == "none" and raw and claim.reason == raw)
    return ours.get((claim.observer, claim.unit), claim) if replaced else claim


def _from_shares(task: Task, now: Moment, size: int) -> dict[tuple[Observer, Unit], Claim]:
    """What a sum under masks says to observers after the upload about a client of `size` examples, row by row.

    Only rows that the recipe's place would state soundly to someone who sees the noised sum and nothing else. The integers
    are played with the round's own parameters; bound and neighbours are those of the row.
    """
    from fedveil.federation.round import noised_of  # which calls this module

    recipe, setting, place = task.recipe, task.setting, task.recipe.place
    (shared,) = noised_of(task, now, -1, setting.examples)
    played = parameters_of(task, shared, bytes(32))
    (noised,) = place.noised(recipe, setting, now, size)
    uses = recipe.batches.uses(setting.steps, setting.batch, size) if noised.unit == "example" else 1
    rows = [noised]
    if noised.unit == "client":  # one example may turn the clipped update around
        rows.append(replace(noised, bound=2 * noised.bound, relation="replace-one", unit="example"))
    found: dict[tuple[Observer, Unit], Claim] = {}
    for row in rows:
        parameters = replace(played, bound=row.bound, unit=row.unit)
        for claim in noise.claims(parameters, row.relation, uses, row.sampling):
            (alone,) = place.says(claim.observer, claim.unit, recipe, setting, now, size)
            if alone.verdict == "sound":
                found[claim.observer, claim.unit] = replace(claim, scope=alone.scope)
    return found


def share_key(task: Task, now: Moment, client: int) -> bytes:
    """Keys one client's share of the noise."""
    return derive(task.root, "share-of-noise", now.number, client)[:16]


def vector_of(task: Task, now: Moment, parameters: Parameters, client: int, update: np.ndarray) -> np.ndarray:
    """What a client puts under its masks: its sum in grid steps with its share of the noise."""
    return noise.noised(parameters, update, share_key(task, now, client))


def opened(
    task: Task, now: Moment, noised: Noised, weights: np.ndarray, updates: Mapping[int, np.ndarray]
) -> tuple[np.ndarray, dict[str, Any]]:
    """Play the protocol with these updates (client -> its sum): the noised total, and public facts about the price."""
    parameters = parameters_of(task, noised, model_digest(weights))
    vectors = {
        client + 1: vector_of(task, now, parameters, client, update) for client, update in updates.items()
    }
    played = simulate.sum_of(vectors, parameters, task.root, round=now.number)
    if not isinstance(played.result, simulate.Sum):
        raise UserError(f"round {now.number}: no sum: {played.result.reason}")
    facts = {
        "bytes_up": played.bytes_up,
        "sum_survivors": len(played.result.survivors),
        "sum_node_seconds": played.node_seconds / parameters.nodes,
        "sum_server_seconds": played.server_seconds,
    }
    return played.result.total * parameters.grid, facts


def masked_upload(
    task: Task, now: Moment, noised: Noised, weights: np.ndarray, client: int, update: np.ndarray
) -> tuple[np.ndarray, float]:
    """What the server receives of one client in this round, float32, and the deviation of what hides it."""
    parameters = parameters_of(task, noised, model_digest(weights))
    vector = vector_of(task, now, parameters, client, update)
    words = simulate.masked_upload(vector, parameters, task.root, client + 1, round=now.number)
    spread = 2.0**parameters.word * parameters.grid / math.sqrt(12)
    return (words * parameters.grid).astype(np.float32), spread
