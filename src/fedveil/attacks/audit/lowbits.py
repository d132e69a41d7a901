"""Low bits: which neighbour leaves a released value that the noise can produce?

Accountants speak of real numbers; what leaves a machine is a float. A float32 draw times a scale reaches only some of
the float32 values, and a sum with a fine-grained total reaches others. Who knows two neighbouring datasets subtracts
each one's noiseless sum from the release and asks whether the rest is a value of the sampler. If it is not, that
neighbour is excluded, with certainty and whatever epsilon was printed.

    Arithmetic   what the observer knows of the machine: the draw's law, float32 factors, the sum, what follows
    impossible   coordinates of a release that no draw explains around a given total
    neighbours   many releases of a run's own first round for D and for D without one unit, real data
    learn        the same releases without any idea of the arithmetic: is the last byte distributed otherwise?
    slots        canaries with coordinates of their own, where the total without the canary is exactly 0; any sampling

The observer's model of the machine only decides how much is found. What is found is counted on real releases of the
product's own code, and exact intervals turn the counts into a bound, so a wrong model can never accuse a correct run
(beyond `significance`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scipy

from fedveil.attacks.audit.bounds import clopper_pearson_bound
from fedveil.attacks.audit.canaries import Staged, stage, unit_of
from fedveil.federation.loop import Prepared, cohort_of, train_cohort
from fedveil.federation.round import (
    Upload,
    clip_update,
    learning_rate_of,
    merge,
    moment_of,
    noised_of,
    plan_of,
    recipe_of,
    sanitise_update,
    start,
    uploads_of,
    work_of,
)
from fedveil.keys import derive
from fedveil.protect import noise
from fedveil.protect.aggregate import Mean
from fedveil.protect.law import Gaussian, Laplace
from fedveil.protect.place import InSum
from fedveil.protect.sampling import FullBatches
from fedveil.training import pool
from fedveil.training.contract import ClientWork, LocalPlan

if TYPE_CHECKING:
    from fedveil.federation.round import State
    from fedveil.protect.setting import Moment

Law = Literal["normal", "laplace", "lattice", "unsnapped"]
REACH = 6  # neighbours of the estimated draw that are tried on either side
LARGEST_RELEASE = 200_000  # coordinates of a release that are looked at one by one
COORDINATES = 4_000_000  # at most so many in all releases of one side
WITNESSES = 32  # coordinates whose last bytes are learned from
PRACTICE = 64  # releases of the observer's own making, to find out which arithmetic the machine uses


@dataclass(frozen=True)
class Arithmetic:
    """One way in which a machine may compute a release from a noiseless total.

    The draw (a float32 of `law`) is multiplied by `factors`, one after the other, in float32, and added to the total in
    float32 (float64 if `wide`); `fused`: the last product and the sum are rounded once. A lattice's draw is an integer;
    the total is rounded to multiples of factors[0] first (`law` "lattice") or not ("unsnapped"). Then come the public
    operations `after` in the precision of the sum, and the result is rounded to float32.
    """

    name: str
    law: Law
    factors: tuple[float, ...]
    after: tuple[tuple[Literal["*", "/"], float], ...] = ()
    wide: bool = False
    fused: bool = False

    def scale(self) -> float:
        """How much a release moves when the noise moves by 1."""
        value = 1.0
        for operation, number in self.after:
            value = value * number if operation == "*" else value / number
        return value

    def release(self, total: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """The float32 release of a total and a noise value."""
        kind = np.float64 if self.wide else np.float32
        if self.fused:
            value = fused_sum(total, drawn, self.factors[-1])
        else:
            value = np.asarray(total).astype(kind) + np.asarray(drawn).astype(kind)
        for operation, number in self.after:
            value = value * kind(number) if operation == "*" else value / kind(number)
        return value.astype(np.float32)


def fused_sum(total: np.ndarray, drawn: np.ndarray, factor: float) -> np.ndarray:
    """total + factor * drawn of float32 values, rounded once to float32: the product is exact in float64, and the sum is
    rounded to odd there, so that rounding again is harmless."""
    product = np.asarray(drawn, np.float64) * np.float64(np.float32(factor))
    first = np.asarray(total, np.float64)
    value = first + product
    back = value - first
    error = (first - (value - back)) + (product - back)
    odd = (value.view(np.int64) & 1).astype(bool)
    towards = np.nextafter(value, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & ~odd, towards, value).astype(np.float32)


def neighbours_of(values: np.ndarray, reach: int) -> np.ndarray:
    """The float32 values from `reach` steps below to `reach` steps above each one, in a last axis."""
    bits = np.asarray(values, np.float32).view(np.int32).astype(np.int64)
    ordered = np.where(bits < 0, np.int64(-(2**31)) - bits, bits)  # monotone in the value
    moved = ordered[..., None] + np.arange(-reach, reach + 1)
    return np.where(moved < 0, np.int64(-(2**31)) - moved, moved).astype(np.int32).view(np.float32)


def reachable(values: np.ndarray, law: Law, factors: Sequence[float]) -> np.ndarray:
    """Which float32 values are a draw of `law` times the factors, each product rounded to float32?"""
    if factors:
        factor = np.float32(factors[-1])
        inner = neighbours_of(values / factor, 1)
        hit = inner * factor == values[..., None]
        return (hit & reachable(inner, law, factors[:-1])).any(-1)
    if law == "laplace":
        return _laplace_value(np.abs(values))
    return np.abs(values) <= noise.LARGEST_NORMAL


def _laplace_value(values: np.ndarray) -> np.ndarray:
    """Which float32 magnitudes does the sampler's -ln u give? Where four or more of its 2**31 words share a value, all
    values count as reachable; elsewhere (near 0 and in the tail) the words around exp(-value) are tried."""
    out = np.isfinite(values)
    wide = values.astype(np.float64)
    words = np.exp(-wide) * 2.0**31
    sparse = out & (words * np.spacing(values) < 4)
    if sparse.any():
        near = np.rint(words[sparse] - 0.5)[:, None] + np.arange(-8, 9)
        tried = np.clip(near, 0, 2**31 - 1).astype(np.uint32) << np.uint32(1)
        out[sparse] = (noise.exponential_of_word(tried) == values[sparse][:, None]).any(-1)
    return out


def impossible(released: np.ndarray, total: np.ndarray | float, machine: Arithmetic) -> np.ndarray:
    """Where is there no draw that leads from `total` to the released float32 value?

    Draws next to the estimated one are tried. A release grows (or falls) with its draw, so nothing is missed where the
    outermost draws tried enclose the released value; where they do not, the value counts as possible."""
    released = np.asarray(released, np.float32)
    total = np.broadcast_to(np.asarray(total, np.float64), released.shape)
    out = np.zeros(released.shape, bool)
    doubtful = np.arange(released.size)
    for reach in (1, REACH):  # nearly all values are explained by the nearest draws
        flat, around = released.reshape(-1)[doubtful], total.reshape(-1)[doubtful]
        doubtful = doubtful[~_explained(flat, around, machine, reach)]
    out.reshape(-1)[doubtful] = True
    return out


def _explained(released: np.ndarray, total: np.ndarray, machine: Arithmetic, reach: int) -> np.ndarray:
    """Does a draw within `reach` of the estimated one give the released value, or is the window too small to tell?"""
    estimate = released.astype(np.float64) / machine.scale() - total
    if machine.law in ("lattice", "unsnapped"):
        step = machine.factors[0]
        if machine.law == "lattice":
            estimate, total = estimate + total, np.zeros_like(total)
        tried = (np.rint(estimate / step)[..., None] + np.arange(-reach, reach + 1)) * step
        allowed = np.ones(tried.shape, bool)
    elif machine.fused:
        tried = neighbours_of((estimate / machine.factors[-1]).astype(np.float32), reach)
        allowed = reachable(tried, machine.law, machine.factors[:-1])
    else:
        tried = neighbours_of(estimate.astype(np.float32), reach)
        allowed = reachable(tried, machine.law, machine.factors)
    gives = machine.release(total[..., None], tried)
    found = ((gives == released[..., None]) & allowed).any(-1)
    if reach < REACH:
        return found
    low, high = np.minimum(gives[..., 0], gives[..., -1]), np.maximum(gives[..., 0], gives[..., -1])
    return found | (released <= low) | (released >= high)


# --- what the observer knows of a run -------------------------------------------------------------------------


def machines(prepared: Prepared, client: int = 0) -> list[Arithmetic]:
    """The ways in which this run's first round may compute its release; the observer finds out which one holds."""
    task = prepared.task
    now = moment_of(task, start(task, prepared.initial))
    recipe = recipe_of(task, client)
    law: Law = "laplace" if isinstance(recipe.law, Laplace) else "normal"
    noised = noised_of(task, now, client, prepared.partition.size(client))[0]
    fusing, grid = [False], noised.grid
    if recipe.place.in_steps:
        batch = recipe.batches.constant(task.setting.batch, prepared.partition.size(client))
        rate = learning_rate_of(task, 0)
        ends: list[tuple[tuple[Any, float], ...]] = [
            (("*", float(np.float32(1.0 / batch))), ("*", -rate)), (("/", batch), ("*", -rate)),
        ]  # fmt: skip
        scales, wide, fusing = [(noised.scale,)], False, [True, False]
    elif recipe.place.own_noise:
        ends, scales, wide = [()], [(noised.scale,)], False
    else:
        per = task.setting.cohort
        rates: tuple[tuple[Any, float], ...] = ()
        if isinstance(recipe.place, InSum):
            per, rates = recipe.place.everyone(recipe, task.setting), (("*", learning_rate_of(task, 0)),)
        ends = [(("/", per), *rates, ("*", task.server_learning_rate))]
        scales, wide = [(noised.scale,)], True
    if grid > 0:
        laws: tuple[Law, ...] = ("lattice", "unsnapped")
        return [Arithmetic(which, which, (grid,), end, wide) for which in laws for end in ends]
    return [
        Arithmetic(f"float32 {law}", law, scale, end, wide, fused)
        for scale in scales for end in ends for fused in fusing
    ]  # fmt: skip


def fitting(
    candidates: Sequence[Arithmetic], practice: np.ndarray, total: np.ndarray | float
) -> Arithmetic | None:
    """The first arithmetic under which no practice release (whose total the observer knows) is impossible."""
    for machine in candidates:
        if not impossible(practice, total, machine).any():
            return machine
    return None


# --- counts and the bound -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LowBits:
    """What low bits showed: of `releases` on each side, how many exclude the other neighbour."""

    epsilon_lower: float
    releases: int  # on each side
    with_excludes_without: int  # releases of D that are impossible under D'
    without_excludes_without: int  # the same event under D' itself: false alarms of the method
    without_excludes_with: int
    with_excludes_with: int
    delta: float
    significance: float
    machine: str  # the arithmetic that fits; empty: none of those known
    unit: str
    observer: str
    coordinates: int
    reason: str = ""
    learned: float = 0.0  # what the last byte alone showed, without any idea of the arithmetic

    def broken(self, promised: float | None) -> bool:
        """Is a finite promise contradicted?"""
        return promised is not None and math.isfinite(promised) and self.epsilon_lower > promised


def bound_of(seen: tuple[int, int, int, int], releases: int, delta: float, significance: float) -> float:
    """The larger of the two events' exact bounds, each at half the level: valid at `significance` together."""
    bound = clopper_pearson_bound(delta)
    hit, false, back, back_false = seen
    return max(
        bound(hit, releases, false, releases, significance / 2, 0.0),
        bound(back, releases, back_false, releases, significance / 2, 0.0),
    )


def releases_needed(
    share: float, promised: float, *, delta: float, significance: float, wanted: float = 0.99, most: int = 1_000_000
) -> int | None:  # fmt: skip
    """How many releases on each side betray float noise with probability `wanted`, if so large a share of them excludes the
    neighbour (and none does falsely); None: not even `most`. Low bits can show no epsilon above what their number allows."""
    bound = clopper_pearson_bound(delta)

    def enough(number: int) -> bool:
        return (
            bound(int(scipy.stats.binom.ppf(1 - wanted, number, share)), number, 0, number, significance, 0.0) > promised
        )

    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
        if high > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def count(
    releases_with: Iterator[np.ndarray], releases_without: Iterator[np.ndarray], total_with: np.ndarray,
    total_without: np.ndarray, machine: Arithmetic,
) -> tuple[int, int, int, int]:  # fmt: skip
    """How many releases of each side [n, d] exclude one neighbour and allow the other."""
    seen = []
    for batches in (releases_with, releases_without):
        no_without = no_with = 0
        for batch in batches:
            not_with = impossible(batch, total_with, machine).any(-1)
            not_without = impossible(batch, total_without, machine).any(-1)
            no_without += int((not_without & ~not_with).sum())
            no_with += int((not_with & ~not_without).sum())
        seen.append((no_without, no_with))
    (hit, back_false), (false, back) = seen
    return hit, false, back, back_false


# --- real neighbours ------------------------------------------------------------------------------------------


def why_not(prepared: Prepared) -> str:
    """Why low bits of this run are not looked at; empty if they are."""
    recipe, setting = prepared.task.recipe, prepared.task.setting
    if recipe.law is None:
        return "there is no additive noise"
    if not isinstance(recipe.law, (Gaussian, Laplace)) and not recipe.fineness:
        return f"the value set of {recipe.law.name} noise is not modelled"
    if prepared.task.secure is not None:
        return "a sum under masks is integers with discrete noise: there are no low bits"
    if recipe.place.in_steps and setting.steps > 1:
        return f"{setting.steps} noisy steps add up before anything leaves the client"
    if recipe.clip.rule.batch or recipe.scale.batch:
        return "the noise scale comes from the data"
    if recipe.clip.rule.rescales:
        return "what follows the noise has a scale of its own in each coordinate"
    if recipe.clip.of_weights or recipe.thin.anything or recipe.downlink_sigma:
        return "what follows the noise is not linear"
    if not recipe.place.open_uploads and (
        type(recipe.aggregate) is not Mean or prepared.task.server_momentum
    ):
        return "the server's step is not linear"
    return ""


Releases = Callable[[bool, bytes, int], np.ndarray]
"""(with the unit?, key, how many) -> float32 releases [n, d] with fresh noise"""


def neighbours(
    prepared: Prepared, *, releases: int = 1000, delta: float | None = None, significance: float = 0.05,
    seed: int | bytes = 0, client: int = 0, coordinates: int = LARGEST_RELEASE,
) -> LowBits:  # fmt: skip
    """Releases of the first round with one unit (an example of `client`, or the whole client) and without it.

    Needs batches that the observer knows (sampling = full) and one local step where examples are protected. seed keys the
    noise: give system entropy to attack a deployment's noise. coordinates: at most so many are looked at, those in which
    the neighbours' totals differ most.
    """
    why = why_not(prepared)
    recipe = prepared.task.recipe
    unit, observer = unit_of(prepared)
    if not why and unit == "example" and not isinstance(recipe.batches, FullBatches):
        why = "batches are drawn at random and secret: use slots"
    delta = prepared.config.delta if delta is None else delta
    if why:
        return LowBits(0.0, 0, 0, 0, 0, 0, delta, significance, "", unit, observer, 0, why)
    make, totals = _watched(*_released(prepared, unit, client), coordinates)
    practice = make(False, derive(seed, "practice"), PRACTICE)
    machine = fitting(machines(prepared, client), practice, totals[False])
    named = machine.name if machine else ""
    facts = (delta, significance, named, unit, observer, int(practice.shape[1]))
    if machine is None:
        return LowBits(0.0, 0, 0, 0, 0, 0, *facts, "no known arithmetic explains the releases")

    bytes_of: dict[bool, list[np.ndarray]] = {True: [], False: []}
    moved = np.argsort(-np.abs(totals[True] - totals[False]), kind="stable")[:WITNESSES]

    def batches(inside: bool) -> Iterator[np.ndarray]:
        size = max(1, min(500, 2_000_000 // practice.shape[1]))
        for begin in range(0, releases, size):
            key = derive(seed, "with" if inside else "without", begin)
            batch = make(inside, key, min(size, releases - begin))
            bytes_of[inside].append(last_bytes(batch[:, moved]))
            yield batch

    seen = count(batches(True), batches(False), totals[True], totals[False], machine)
    lower = bound_of(seen, releases, delta, significance / 2)
    inside, outside = np.concatenate(bytes_of[True]), np.concatenate(bytes_of[False])
    learned = learn(inside, outside, delta, significance / 2)
    return LowBits(max(lower, learned), releases, seen[0], seen[1], seen[2], seen[3], *facts, learned=learned)


def last_bytes(values: np.ndarray) -> np.ndarray:
    """The eight lowest bits of each float32."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & 0xFF).astype(np.uint8)


def learn(inside: np.ndarray, outside: np.ndarray, delta: float, significance: float) -> float:
    """A bound from the last bytes [n, k] of releases with and without the unit: how often each byte occurs in each
    coordinate is learned from the first half, and the likelihood ratio, above a threshold chosen there too, is tried on
    the second half. Formal guarantee: valid at `significance`, since the second half is used once."""
    half, place = len(inside) // 2, np.arange(inside.shape[1])

    def often(found: np.ndarray) -> np.ndarray:
        return np.log1p([np.bincount(column, minlength=256) for column in found[:half].T])

    ratio = often(inside) - often(outside)
    scores = [ratio[place, found].sum(axis=1) for found in (inside, outside)]
    bound = clopper_pearson_bound(delta)

    def tried(threshold: float, part: slice) -> float:
        hits, false = (int((score[part] > threshold).sum()) for score in scores)
        n = len(scores[0][part])
        return bound(hits, n, false, n, significance, 0.0)

    thresholds = np.quantile(scores[1][:half], (0.5, 0.9, 0.99, 0.999)).tolist()
    return tried(max(thresholds, key=lambda t: tried(t, slice(None, half))), slice(half, None))


def _watched(
    make: Releases, totals: dict[bool, np.ndarray], most: int
) -> tuple[Releases, dict[bool, np.ndarray]]:
    """The same releases and totals in the `most` coordinates that the unit moves most (releases are made in full)."""
    apart = np.abs(totals[True] - totals[False])
    chosen = np.sort(np.argsort(-apart, kind="stable")[:most])
    if len(chosen) == len(apart):
        return make, totals
    return (lambda inside, key, n: make(inside, key, n)[:, chosen]), {k: v[chosen] for k, v in totals.items()}


def _released(prepared: Prepared, unit: str, client: int) -> tuple[Releases, dict[bool, np.ndarray]]:
    """The maker of releases and the noiseless totals with and without the unit."""
    task, recipe = prepared.task, prepared.task.recipe
    state = start(task, prepared.initial)
    rows = np.asarray(prepared.partition.rows(client))
    kept = {True: rows, False: rows[1:] if unit == "example" else rows[:0]}
    sides = {
        inside: replace(
            prepared.task, rows=lambda c, own=own: own if c == client else prepared.partition.rows(c)
        )
        for inside, own in kept.items()
    }
    now = moment_of(prepared.task, state)
    if recipe.place.in_steps:
        plan = plan_of(prepared.task, now, client, len(rows))
        quiet = replace(plan, noised=(), learning_rate=1.0, expected_batch=1.0)

        def train(inside: bool, plan: LocalPlan, keys: list[bytes]) -> np.ndarray:
            task = sides[inside]
            picked = work_of(task, state, now, client).rows
            work = [ClientWork(client, picked, key) for key in keys]
            result = pool.train(
                task.module, state.weights, task.x, task.y, work, plan, engine=prepared.config.engine
            )
            return result.delta

        totals = {inside: -train(inside, quiet, [bytes(16)])[0] for inside in sides}
        return lambda inside, key, n: train(
            inside, plan, [derive(key, "one", k)[:16] for k in range(n)]
        ), totals
    if recipe.place.own_noise:
        return _client_releases(prepared, client, now, state)
    everybody = np.arange(prepared.partition.clients)
    uploads = {
        inside: _uploads(replace(prepared, task=side), everybody, state, now)
        for inside, side in sides.items()
    }
    if unit == "client":
        uploads[False] = [u for u in uploads[False] if u.client != client]
    totals = {inside: np.zeros(task.layout.size) for inside in uploads}
    for inside, sent in uploads.items():
        for upload in sent:  # as `merge` adds them, so that one upload of the sum gives the same bits
            totals[inside] += upload.update

    def merged(inside: bool, key: bytes, n: int) -> np.ndarray:
        tasks = (replace(prepared.task, root=derive(key, "one", k)) for k in range(n))
        whole = [Upload(-1, totals[inside])]
        return np.stack([merge(t, state, now, whole)[0].weights - state.weights for t in tasks])

    return merged, totals


def _uploads(prepared: Prepared, clients: np.ndarray, state: State, now: Moment) -> list[Upload]:
    return [
        upload
        for chunk, result in train_cohort(prepared, state, now, clients)
        for upload in uploads_of(prepared.task, now, state, chunk, result)
    ]


def _client_releases(
    prepared: Prepared, client: int, now: Moment, state: State
) -> tuple[Releases, dict[bool, np.ndarray]]:
    """One client's upload: its clipped update, or nothing, with the client's own noise."""
    task, recipe = prepared.task, recipe_of(prepared.task, client)
    ((_, result),) = train_cohort(prepared, state, now, np.array([client]))
    trained = {True: result.delta[0], False: np.zeros_like(result.delta[0])}
    totals = {k: clip_update(v, now.bounds[0], recipe, task.layout) for k, v in trained.items()}

    def made(inside: bool, key: bytes, n: int) -> np.ndarray:
        tasks = (replace(task, root=derive(key, "one", k)) for k in range(n))
        return np.stack([sanitise_update(t, now, trained[inside], client, state.weights) for t in tasks])

    return made, totals


# --- canaries in slots ----------------------------------------------------------------------------------------


def slots(
    prepared: Prepared, *, canaries: int = 4000, delta: float | None = None, significance: float = 0.05, seed: int = 0,
    practice: Prepared | None = None, most: int = 200,
) -> LowBits:  # fmt: skip
    """Canaries whose coordinates hold nothing but noise when they are out: does the release exclude that?

    object sampling and any cohort, since the total without the canary is 0 in every batch. The first round is played with fresh
    coins until `canaries` have been seen on the smaller side, or `most` times. practice: what is really executed, if not
    `prepared` (for testing)."""
    why = why_not(prepared)
    unit, observer = unit_of(prepared)
    delta = prepared.config.delta if delta is None else delta
    if why:
        return LowBits(0.0, 0, 0, 0, 0, 0, delta, significance, "", unit, observer, 0, why)
    variant: int | None = None  # which of the machines holds
    hits, seen, height, name = [0, 0], [0, 0], 0, ""
    for repeat in range(most):
        coins = int.from_bytes(derive(seed, "coins", repeat)[:4], "little")
        staged = stage(practice or prepared, min(canaries, 2000), coins, rounds=1)
        task = replace(staged.prepared.task, root=derive(seed, "lowbits", repeat))
        groups = _slot_releases(replace(staged, prepared=replace(staged.prepared, task=task)), observer)
        height = len(staged.direction)
        if variant is None:  # the first repeat chooses the arithmetic, so it is not counted
            known = [machines(staged.prepared, client) for client, _, _ in groups]
            empty = [values[~inside] for _, values, inside in groups]
            fits = [
                k for k in range(len(known[0]) if known else 0)
                if not any(impossible(e, 0.0, m[k]).any() for e, m in zip(empty, known, strict=True))
            ]  # fmt: skip
            if not fits:
                facts = (delta, significance, "", unit, observer, height)
                return LowBits(0.0, 0, 0, 0, 0, 0, *facts, "no known arithmetic explains the releases")
            variant, name = fits[0], known[0][fits[0]].name
            continue
        for client, values, inside in groups:
            excluded = impossible(values, 0.0, machines(staged.prepared, client)[variant]).any(-1)
            for side in (0, 1):
                hits[side] += int((excluded & (inside == side)).sum())
                seen[side] += int((inside == side).sum())
        if min(seen) >= canaries:
            break
    facts = (delta, significance, name, unit, observer, height)
    if not min(seen):
        return LowBits(0.0, 0, 0, 0, 0, 0, *facts, "no canary took part")
    lower = clopper_pearson_bound(delta)(hits[1], seen[1], hits[0], seen[0], significance, 0.0)
    return LowBits(lower, min(seen), hits[1], hits[0], 0, 0, *facts)


def _slot_releases(staged: Staged, observer: str) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """What the observer sees in the slots of one first round, by host: (a client, values [n, height], coins [n]).

    Where only the sum is seen there is one group; hosts with equally many rows compute alike and form one group."""
    prepared = staged.prepared
    state = start(prepared.task, prepared.initial)
    now = moment_of(prepared.task, state)
    clients = np.intersect1d(cohort_of(prepared, now.number), staged.host)
    sent = _uploads(prepared, clients, state, now)
    if observer == "public":
        change = merge(prepared.task, state, now, sent)[0].weights - state.weights
        return [(0, change[staged.columns].T, staged.included.astype(bool))]
    by = {u.client: u.update for u in sent}
    groups: dict[int, list[int]] = {}
    for k, client in enumerate(staged.host.tolist()):
        if client in by:
            groups.setdefault(prepared.partition.size(client), []).append(k)
    out = []
    for members in groups.values():
        hosts = staged.host[members].tolist()
        values = np.stack([by[c][staged.columns[:, k]] for k, c in zip(members, hosts, strict=True)])
        out.append((int(hosts[0]), values, staged.included[members].astype(bool)))
    return out


def look(
    prepared: Prepared,
    *,
    units: int = 4000,
    delta: float | None = None,
    significance: float = 0.05,
    seed: int = 0,
) -> LowBits:
    """Both ways of looking, each at half the level: canaries in slots, and real neighbours where batches are known.

    Returns the stronger finding (or the reason why neither could look)."""
    found = [slots(prepared, canaries=units, delta=delta, significance=significance / 2, seed=seed)]
    if prepared.task.layout.size <= LARGEST_RELEASE:
        most = max(100, min(units, COORDINATES // prepared.task.layout.size))
        found.append(
            neighbours(prepared, releases=most, delta=delta, significance=significance / 2, seed=seed)
        )
    best = max(found, key=lambda one: (one.epsilon_lower, one.releases))
    return replace(best, significance=significance)
