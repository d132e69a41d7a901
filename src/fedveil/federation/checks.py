"""What a node looks at before it trains a model that it was sent.

A promise holds for any model, so these checks never lower an epsilon. They keep a server that changes the model from getting more
than the promise of a recipe without noise leaves (nothing), and from spending a budget on it.

    architecture_digest   the run's net, layer by layer; a node compares it with the one it agreed to
    first_model           before the first round the weights are those that the configuration's seed gives, bit for bit
    structure             weights that training does not lead to: copied rows, rows of zeros, units that nothing
                          switches on, numbers without measure. Looked at with random inputs, never with the node's own
                          rows: a refusal is visible
    change                between two rounds the model moves no further than honest averaging can

Formal guarantee: none of these functions reads private rows, so refusing or training tells nothing about them. `change` never
refuses an honest server of a clipped recipe but with a probability below 1e-9 per round (the tail of the noise's norm).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from fedveil.federation import sums
from fedveil.federation.round import State, Task, learning_rate_of, moment_of, noised_of
from fedveil.models.layout import Layout, unflatten
from fedveil.protect.aggregate import Adam, Mean, Scaffold
from fedveil.protect.clip import Given
from fedveil.protect.place import InSum, Reports
from fedveil.protect.recipe import Recipe
from fedveil.protect.setting import Moment, Setting
from fedveil.secure_sum.noise import share_deviation
from fedveil.training.contract import SGD

PROBES = 256


FALSE_ALARM = 1e-6  # of one look at one layer of noise


@dataclass(frozen=True)
class Limits:
    """What a policy allows. The defaults stopped none of 200 honest runs (docs/attacks.md)."""

    largest: float = 1e4  # any weight
    alike: float = 0.995  # cosine from which two rows count as copies
    alike_share: float = 0.25  # of a layer's rows
    zero_share: float = 0.4  # rows of exact zeros beside others that are not
    least_active: float = 0.1  # mean share of uniformly random inputs that switch a layer's units on; less for few units
    bias_ratio: float = 30.0  # bias over what a random input of its row amounts to
    own_factor: float = (
        20.0  # without a clip: how much further than one's own largest update the model may move
    )


def architecture_digest(module: nn.Module, layout: Layout) -> str:
    """SHA-256 of the net's printed structure and of the names and shapes of its parameters."""
    parts = [str(module), *(f"{n}:{tuple(s)}" for n, s in zip(layout.names, layout.shapes, strict=True))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def first_model(weights: np.ndarray, agreed: np.ndarray) -> list[str]:
    """Is the model of the first round the agreed one?"""
    same = weights.shape == agreed.shape and np.array_equal(
        np.asarray(weights, np.float32), np.asarray(agreed, np.float32)
    )
    return [] if same else ["the first model is not the one that the configuration's seed gives"]


def structure(
    weights: np.ndarray, module: nn.Module, layout: Layout, shape: tuple[int, ...], limits: Limits = Limits(), *,
    low: float = 0.0, high: float = 1.0,
) -> list[str]:  # fmt: skip
    """Reasons to refuse these weights, whatever round they come from. low, high: the public range of inputs."""
    weights = np.asarray(weights, np.float32)
    if not np.isfinite(weights).all() or np.abs(weights).max(initial=0.0) > limits.largest:
        return [f"weights are not finite or above {limits.largest:g}"]
    reasons = []
    places = dict(zip(layout.names, zip(layout.offsets, layout.shapes, strict=True), strict=True))
    for name, (at, size) in places.items():
        if len(size) < 2 or size[0] < 8 or math.prod(size[1:]) < 8:
            continue
        rows = weights[at : at + math.prod(size)].reshape(size[0], -1).astype(np.float64)
        bias = places.get(name.removesuffix("weight") + "bias")
        offsets = None if bias is None else weights[bias[0] : bias[0] + size[0]].astype(np.float64)
        reasons += [f"{name}: {why}" for why in _rows(rows, offsets, limits, max(abs(low), abs(high)))]
    return reasons + _activity(weights, module, layout, shape, limits, low, high)


def _rows(rows: np.ndarray, bias: np.ndarray | None, limits: Limits, largest_input: float) -> list[str]:
    norms = np.linalg.norm(rows, axis=1)
    live = norms > 0
    reasons = []
    if live.any() and 1 - live.mean() > limits.zero_share:
        reasons.append(f"{(~live).sum()} of {len(rows)} rows are zero and others are not")
    unit = rows[live][:512] / norms[live][:512, None]
    if len(unit) >= 8:
        cosine = np.abs(unit @ unit.T) - np.eye(len(unit))
        share = float((cosine.max(1) > limits.alike).mean())
        if share > limits.alike_share:
            reasons.append(f"{100 * share:.0f}% of the rows are copies of another row")
    if bias is not None:
        expected = 1 + norms * math.sqrt(rows.shape[1]) * largest_input
        if (np.abs(bias) > limits.bias_ratio * expected).any():
            reasons.append("a bias is far beyond what its weights can amount to")
    return reasons


def _activity(
    weights: np.ndarray, module: nn.Module, layout: Layout, shape: tuple[int, ...], limits: Limits, low: float, high: float
) -> list[str]:  # fmt: skip
    """Layers with ReLU that hardly any random input switches on."""
    quiet: dict[str, float] = {}
    passed: set[str] = set()  # a layer that is used twice needs to be on once
    rng = np.random.default_rng(0)  # public and the same for everybody
    probe = torch.as_tensor(rng.uniform(low, high, (PROBES, *shape)).astype(np.float32))

    def look(name: str, out: torch.Tensor) -> None:
        share = float((out > 0).float().mean())
        units = min(out.shape[1:]) if out.dim() == 3 else out.shape[1]  # of three, either may count positions
        if share < least_active(units, limits):
            quiet[name] = share
        else:
            passed.add(name)

    handles = [
        layer.register_forward_hook(lambda _m, _i, out, name=name: look(name, out))
        for name, layer in module.named_modules()
        if isinstance(layer, nn.ReLU)
    ]
    try:
        with torch.no_grad():
            functional_call(module, unflatten(torch.as_tensor(weights), layout), (probe,))
    finally:
        for handle in handles:
            handle.remove()
    return [
        f"{name}: random inputs switch on {100 * share:.2g}% of the units"
        for name, share in quiet.items()
        if name not in passed
    ]


def least_active(units: int, limits: Limits = Limits()) -> float:
    """The share of units that must be on; 0 where all of them may be off by chance.

    Noise alone turns each of a layer's units off as often as on. By Bentkus (2004) the sum of n such shares is at most x with
    probability e P(Bin(n, 1/2) <= x), log-linear between integers: an honest layer of noise is refused once in a million
    looks at most. Layers of fewer than 22 units are never refused for this."""
    if units > 1000:
        return limits.least_active
    tails = np.cumsum([math.comb(units, k) / 2.0**units for k in range(units // 2 + 1)])
    rare = math.e * tails <= FALSE_ALARM
    if not rare.any():
        return 0.0
    k = int(np.flatnonzero(rare)[-1])
    part = math.log(FALSE_ALARM / (math.e * tails[k])) / math.log(tails[k + 1] / tails[k])
    return min(limits.least_active, (k + min(part, 1.0)) / units)


def allowed_change(
    recipe: Recipe, setting: Setting, *, bound: float, sigma: float, learning_rate: float, excess: float = 1.0,
    server_rate: float = 1.0, own_largest: float | None = None, limits: Limits = Limits(),
) -> float | None:  # fmt: skip
    """How far honest averaging can move the model in one round, in l2; None if nothing is known yet.

    With a clip this follows from the recipe: every example (client) adds at most the joint bound, and the norm of the noise is at
    most deviation * (sqrt(d) + 7) but with probability 1e-9. Batches are taken as up to twice their expected size plus 20;
    other clients have at least a batch of records.
    excess: how much wider the noise may be than the recipe's. Without a clip a node judges by its own updates."""
    place, clip = recipe.place, recipe.clip
    if not clip.bounded or type(clip.rule) is not Given or type(recipe.aggregate) not in (Mean, Scaffold):
        return None if own_largest is None else limits.own_factor * own_largest * max(1.0, server_rate)
    joint, tail = clip.joint(bound, setting.layers), excess * (math.sqrt(setting.dimension) + 7)
    if recipe.law is not None and not recipe.law.adds_up:
        tail *= 4  # heavier tails
    noised = place.noised(recipe, setting, Moment(1, (bound,), (sigma,)), max(1, setting.examples))
    deviation = max((one.deviation for one in noised), default=0.0)
    if place.of_gradients:
        most = 2 + 20 / setting.batch
        per = place.everyone(recipe, setting) if isinstance(place, InSum) else setting.batch
        spread = deviation * (math.sqrt(most) if recipe.noise_on.for_each else 1.0) * tail
        return server_rate * learning_rate * setting.steps * (most * joint + spread / per)
    if place.open_uploads:
        return server_rate * (joint + deviation * tail)
    return server_rate * ((2 + 20 / setting.cohort) * joint + deviation * tail / setting.cohort)


def _excess(task: Task, now: Moment) -> float:
    """How much wider the noise of a sum under masks is than planned if everyone survives, rounding of each vector included."""
    if task.secure is None:
        return 1.0
    (noised,) = noised_of(task, now, -1, task.setting.examples)
    parameters = sums.parameters_of(task, noised, bytes(32))
    widest = share_deviation(parameters) * math.sqrt(parameters.nodes) + parameters.nodes * parameters.grid / 2
    return widest / noised.deviation


def round_limit(
    task: Task, state: State, own_largest: float | None = None, limits: Limits = Limits()
) -> float | None:
    """How far the coming round of `state` can move the model of this task, in l2; None: nothing is known.

    Momentum moves further by 1 / (1 - momentum) at most; SCAFFOLD's variates are at most as large as a round's direction, and
    two of them are added. own_largest: norm of the largest update that this node has sent, for recipes without a fixed clip."""
    recipe, setting = task.recipe, task.setting
    if isinstance(recipe.place, Reports) or isinstance(recipe.aggregate, Adam):
        return None  # ranges and adaptive steps follow no bound that a node knows
    gain = 1 / ((1 - task.momentum) * (1 - task.server_momentum))
    if task.own or task.optimiser != SGD or recipe.clip.of_weights or recipe.downlink_sigma:
        known = None if own_largest is None else limits.own_factor * own_largest * max(1.0, task.server_learning_rate)
        return None if known is None else gain * known
    now = moment_of(task, state)
    found = allowed_change(
        recipe, setting, bound=max(now.bounds), sigma=max(now.sigmas, default=0.0), excess=_excess(task, now),
        learning_rate=learning_rate_of(task, state.round), server_rate=task.server_learning_rate, own_largest=own_largest,
        limits=limits,
    )  # fmt: skip
    if found is not None and task.smoothness is not None:  # the closed form adds at most 0.6 / L to every coordinate
        found += task.server_learning_rate * 0.6 / task.smoothness * math.sqrt(setting.dimension)
    return None if found is None else gain * found * (3 if isinstance(recipe.aggregate, Scaffold) else 1)


def path_limit(
    task: Task, state: State, rounds: range, own_largest: float | None = None, limits: Limits = Limits()
) -> float | None:
    """How far all these rounds together can move the model; None: nothing is known of one of them."""
    total = 0.0
    for index in rounds:
        one = round_limit(task, replace(state, round=index), own_largest, limits)
        if one is None:
            return None
        total += one
    return total


def change(before: np.ndarray, after: np.ndarray, allowed: float | None) -> list[str]:
    """Did the model move further than it can have?"""
    moved = float(np.linalg.norm(np.asarray(after, np.float64) - np.asarray(before, np.float64)))
    if allowed is None or moved <= allowed:
        return []
    return [
        f"the model moved by {moved:.3g} since the last round; honest averaging moves it by {allowed:.3g} at most"
    ]
