"""Membership inference: was this example in the training set?

All attacks score a pool of examples, half of them members, from the target model and from *shadow* models that were
trained the same way on other halves of the pool (`TrainMany`). Scores are higher for presumed members.

    shokri        one attack model per class on the shadows' prediction vectors (Shokri et al. 2017)
    lira online   likelihood ratio of the target's confidence under Gaussians of IN and OUT shadows (Carlini 2022)
    lira offline  upper tail of the OUT Gaussian only: how unusually confident is the target for a non-member?
    canary        lira on queries optimised so that IN shadows are confident and OUT shadows are not (Wen 2023)
    rmia          pairwise likelihood ratios against population examples (Zarifzadeh 2024)
    quantile, multi, label-only, trajectory: see `attacks.signals`

An attack whose scores are not finite has failed: it gets no figures and a reason, never an AUC of 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy
import torch
from scipy.special import log_ndtr, logsumexp, softmax
from torch import nn
from torch.func import functional_call, vmap

from fedveil.attacks import signals
from fedveil.errors import UserError
from fedveil.models.layout import Layout, unflatten

TrainMany = Callable[[np.ndarray], np.ndarray]
"""member masks [S, n] -> weights [S, P]: train one model per row on the pool examples that the row marks"""

METHODS = ("shokri", "lira-online", "lira-offline", "canary", "rmia", "quantile", "multi", "label-only")
TRAJECTORY = "trajectory"  # made besides where checkpoints of the target are given


# --- scores ---------------------------------------------------------------------------------------------------


def logits(
    module: nn.Module, layout: Layout, weights: np.ndarray, x: np.ndarray, chunk: int = 4096
) -> np.ndarray:
    """Outputs [S, n, classes] of every model on every example, in float64."""
    out = []
    with torch.no_grad():
        for vector in torch.as_tensor(np.atleast_2d(weights)):
            parameters = unflatten(vector, layout)
            parts = [
                functional_call(module, parameters, (torch.as_tensor(x[i : i + chunk]),))
                for i in range(0, len(x), chunk)
            ]
            out.append(torch.cat(parts).double().numpy())
    return np.stack(out)


def confidence(outputs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """log p_y - log sum of the other p_j, from logits [..., n, classes], in float64 (never through softmax)."""
    outputs = np.asarray(outputs, np.float64)
    index = np.broadcast_to(np.asarray(y)[..., None], (*outputs.shape[:-1], 1))
    own = np.take_along_axis(outputs, index, -1)[..., 0]
    others = outputs.copy()
    np.put_along_axis(others, index, -np.inf, -1)
    return own - logsumexp(others, axis=-1)


def _moments(scores: np.ndarray, mask: np.ndarray, shared: bool) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each column's scores where `mask`; the deviation may be shared by all columns."""
    count = mask.sum(0)
    if (count < 1).any():
        raise UserError("an example has no shadow model on one side: raise --shadows.")
    mean = np.where(mask, scores, 0).sum(0) / count
    square = np.where(mask, (scores - mean) ** 2, 0).sum(0)
    if shared:
        return mean, np.full_like(mean, np.sqrt(square.sum() / max(1, (count - 1).sum())))
    return mean, np.sqrt(square / np.maximum(count - 1, 1))


def lira_online(
    target: np.ndarray, shadows: np.ndarray, inside: np.ndarray, *, shared: bool | None = None
) -> np.ndarray:
    """Log likelihood ratio of the target's score under the example's IN and OUT Gaussians.

    target [n], shadows [S, n], inside [S, n] bool. Each side's deviation comes from its own scores; with fewer
    than 16 shadows per side it is shared over examples (`shared` decides otherwise)."""
    few = shared if shared is not None else min(inside.sum(0).min(), (~inside).sum(0).min()) < 16
    mean_in, deviation_in = _moments(shadows, inside, few)
    mean_out, deviation_out = _moments(shadows, ~inside, few)
    floor = 1e-12 + 1e-6 * max(deviation_in.max(), deviation_out.max())
    a, b = np.maximum(deviation_in, floor), np.maximum(deviation_out, floor)
    return -0.5 * ((target - mean_in) / a) ** 2 - np.log(a) + 0.5 * ((target - mean_out) / b) ** 2 + np.log(b)


def lira_offline(
    target: np.ndarray, shadows: np.ndarray, inside: np.ndarray, *, shared: bool | None = None
) -> np.ndarray:
    """Minus the log of the OUT Gaussian's upper tail beyond the target's score: members are more confident."""
    few = shared if shared is not None else (~inside).sum(0).min() < 16
    mean, deviation = _moments(shadows, ~inside, few)
    return -log_ndtr(-(target - mean) / np.maximum(deviation, 1e-12))


def rmia(
    target: np.ndarray, shadows: np.ndarray, inside: np.ndarray, population: np.ndarray,
    shadow_population: np.ndarray, *, offline: bool = False, gamma: float = 1.0, slope: float = 0.3,
) -> np.ndarray:  # fmt: skip
    """Share of population examples z that x beats: (p(x|t)/p(x)) / (p(z|t)/p(z)) >= gamma.

    Arguments are probabilities of the true label: target [n], shadows [S, n], population [m],
    shadow_population [S, m]. Population examples lie outside the pool: neither the target nor any shadow was
    trained on them, so p(z) is the shadows' plain mean. offline: p(x) is estimated from OUT shadows alone, and
    p(x) and p(z) are moved towards 1 by the published linear correction with `slope`."""
    p_x = np.where(~inside, shadows, 0).sum(0) / np.maximum((~inside).sum(0), 1)
    p_z = shadow_population.mean(0)
    if offline:
        p_x, p_z = (0.5 * ((1 + slope) * p + (1 - slope)) for p in (p_x, p_z))
    else:
        p_x = 0.5 * (p_x + np.where(inside, shadows, 0).sum(0) / np.maximum(inside.sum(0), 1))

    def log_ratio(p: np.ndarray, average: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(average, 1e-300))

    of_z = log_ratio(population, p_z)
    if not np.isfinite(of_z).all():
        return np.full(len(target), np.nan)  # a NaN among the z would pass for an example that nobody beats
    return np.searchsorted(np.sort(of_z), log_ratio(target, p_x) - np.log(gamma), side="right") / len(of_z)


def shokri(
    target: np.ndarray, y: np.ndarray, shadows: np.ndarray, inside: np.ndarray, seed: int = 0
) -> np.ndarray:
    """Membership probability by per-class attack models on prediction vectors: target [n, C], shadows [S, n, C]."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def features(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        p = softmax(outputs, -1)
        own = np.take_along_axis(p, labels[:, None], -1)
        return np.hstack([-np.sort(-p, -1), own, np.log(np.maximum(own, 1e-12))])

    found = np.full(len(y), 0.5)
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        data = np.concatenate([features(s[rows], y[rows]) for s in shadows])
        member = inside[:, rows].reshape(-1)
        if member.all() or not member.any():
            continue
        small = len(data) < 200
        model: object = (
            LogisticRegression(max_iter=500)
            if small
            else MLPClassifier((32,), max_iter=80, random_state=seed, early_stopping=True)
        )
        found[rows] = (
            make_pipeline(StandardScaler(), model)
            .fit(data, member)
            .predict_proba(features(target[rows], y[rows]))[:, 1]
        )
    return found


def canary_queries(
    module: nn.Module, layout: Layout, weights: np.ndarray, inside: np.ndarray, x: np.ndarray, y: np.ndarray,
    *, steps: int = 30, rate: float = 0.02, radius: float = 0.1, pixel_range: tuple[float, float] | None = (0.0, 1.0),
) -> np.ndarray:  # fmt: skip
    """Queries [n, ...] near the examples at which IN shadows are confident and OUT shadows are not.

    Projected Adam on mean OUT confidence minus mean IN confidence, over all shadows at once; only shadows are
    used, never the target."""
    parameters = unflatten(torch.as_tensor(weights), layout)
    origin = torch.as_tensor(x)
    label = torch.as_tensor(y)
    sign = torch.as_tensor(
        np.where(inside, -1.0 / np.maximum(inside.sum(0), 1), 1.0 / np.maximum((~inside).sum(0), 1))
    )
    query = origin.clone()
    mean, square = torch.zeros_like(query), torch.zeros_like(query)
    everyone = vmap(lambda p, q: functional_call(module, p, (q,)), in_dims=(0, None))
    for step in range(1, steps + 1):
        query.requires_grad_()
        outputs = everyone(parameters, query)
        own = outputs.gather(-1, label.expand(len(weights), -1)[..., None])[..., 0]
        others = outputs.scatter(-1, label.expand(len(weights), -1)[..., None], -torch.inf).logsumexp(-1)
        (g,) = torch.autograd.grad((sign * torch.tanh((own - others) / 4)).sum(), query)
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
        with torch.no_grad():
            query = query - rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-12)
            query = origin + (query - origin).clamp(-radius, radius)
            query = query if pixel_range is None else query.clamp(*pixel_range)
    return query.detach().numpy()


# --- how well it worked ---------------------------------------------------------------------------------------


Interval = tuple[float, float]


@dataclass(frozen=True)
class Rates:
    """Figures of one attack with 95% intervals; None where there is nothing to report, and `reason` says why."""

    auc: float | None = None
    auc_interval: Interval | None = None
    auc_interval_all: Interval | None = None  # of all attacks made together, at 95%
    balanced_accuracy: float | None = None
    balanced_accuracy_interval: Interval | None = None
    tpr_at_1pct: float | None = None
    tpr_at_1pct_interval: Interval | None = None
    tpr_at_01pct: float | None = None
    tpr_at_01pct_interval: Interval | None = None
    roc: tuple[tuple[float, float], ...] = ()  # (false, true) positive rates, thinned for a drawing
    failed_numerically: int = 0  # examples without a finite score: with any, the attack has failed
    reason: str = ""


def rates(scores: np.ndarray, member: np.ndarray, seed: int = 0, resamples: int = 300) -> Rates:
    """AUC (bootstrap interval); balanced accuracy at the threshold that was best on the other half (cross-fitted,
    exact interval); TPR at fixed FPR (`tpr_interval`).

    A rate of false alarms below one non-member cannot be measured: 1% needs 100 of them, 0.1% needs 1,000."""
    scores = np.asarray(scores, np.float64)
    broken = int((~np.isfinite(scores)).sum())
    if broken:
        return failed(f"{broken} of {len(scores)} scores are not finite", broken)
    inside, outside = scores[member], scores[~member]
    rng = np.random.default_rng(seed)
    boot = [auc(rng.choice(inside, len(inside)), rng.choice(outside, len(outside))) for _ in range(resamples)]
    low, high = np.quantile(boot, [0.025, 0.975])
    right, total = _crossfitted(inside, outside, rng)
    out: dict[str, Any] = {}
    missing = []
    for name, percent, needed in (("tpr_at_1pct", 1, 100), ("tpr_at_01pct", 0.1, 1000)):
        if len(outside) < needed:
            missing.append(f"TPR at {percent}% needs {needed:,} non-members, there are {len(outside)}.")
            continue
        cut = np.sort(outside)[::-1][len(outside) // needed]
        out[name] = float((inside > cut).mean())
        out[f"{name}_interval"] = tpr_interval(inside, outside, 1 / needed)
    cuts = np.quantile(scores, np.linspace(1, 0, 61))
    out["roc"] = ((0.0, 0.0), *((float((outside >= c).mean()), float((inside >= c).mean())) for c in cuts))
    return Rates(
        auc(inside, outside), (float(low), float(high)), None, right / total, exact_interval(right, total),
        reason=" ".join(missing), **out,
    )  # fmt: skip


def failed(why: str, examples: int) -> Rates:
    """The figures of an attack that broke down: none."""
    return Rates(
        failed_numerically=examples,
        reason=f"The attack failed numerically ({why}): this says nothing about the defence.",
    )


def tpr_interval(inside: np.ndarray, outside: np.ndarray, rate: float, level: float = 0.95) -> Interval:
    """Interval of the true positive rate at a false positive rate of `rate`; covers with at least `level`.

    The threshold is itself estimated: two order statistics of the non-members enclose it, and each end is the
    Clopper-Pearson bound of the members above one of them. Each of these four events may fail with a
    quarter of 1 - level (Bonferroni), whatever the distributions, with or without ties. The lower end is 0
    when the non-members cannot bound the threshold from above (fewer than 437 of them for 1%)."""
    tail = (1 - level) / 4
    ordered = np.concatenate([[np.inf], np.sort(outside)[::-1], [-np.inf]])  # [k]: the k-th largest
    strict = ordered[int(scipy.stats.binom.ppf(tail, len(outside), rate))]
    loose = ordered[int(scipy.stats.binom.ppf(1 - tail, len(outside), rate)) + 1]
    found = [int((inside > cut).sum()) for cut in (strict, loose)]
    low, high = (exact_interval(hits, len(inside), 1 - 2 * tail) for hits in found)
    return low[0], high[1]


def auc(inside: np.ndarray, outside: np.ndarray) -> float:
    """Probability that a random member scores above a random non-member (ties count half)."""
    ranks = scipy.stats.rankdata(np.concatenate([inside, outside]))
    return float(
        (ranks[: len(inside)].sum() - len(inside) * (len(inside) + 1) / 2) / (len(inside) * len(outside))
    )


def _crossfitted(inside: np.ndarray, outside: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    """Right guesses with thresholds chosen on the other half; sides are cut to equal size."""
    size = min(len(inside), len(outside)) // 2 * 2
    a, b = rng.permutation(inside)[:size], rng.permutation(outside)[:size]
    right = 0
    for here, there in (
        (slice(None, size // 2), slice(size // 2, None)),
        (slice(size // 2, None), slice(None, size // 2)),
    ):
        cuts = np.sort(np.concatenate([a[there], b[there]]))
        above = (
            len(a[there])
            - np.searchsorted(np.sort(a[there]), cuts)
            + np.searchsorted(np.sort(b[there]), cuts)
        )
        cut = cuts[int(np.argmax(above))]
        right += int((a[here] >= cut).sum() + (b[here] < cut).sum())
    return right, 2 * size


def exact_interval(hits: int, trials: int, level: float = 0.95) -> Interval:
    """Clopper-Pearson interval of a rate."""
    tail = (1 - level) / 2
    low = 0.0 if hits == 0 else float(scipy.stats.beta.ppf(tail, hits, trials - hits + 1))
    high = 1.0 if hits == trials else float(scipy.stats.beta.ppf(1 - tail, hits + 1, trials - hits))
    return low, high


# --- the whole attack -----------------------------------------------------------------------------------------


def halves(shadows: int, n: int, seed: int) -> np.ndarray:
    """Member masks [shadows, n]: random halves in complementary pairs, so every example is IN as often as OUT."""
    rng = np.random.default_rng(seed)
    masks = []
    for _ in range(-(-shadows // 2)):
        order = rng.permutation(n)
        mask = np.zeros(n, bool)
        mask[order[: n // 2]] = True
        masks += [mask, ~mask]
    return np.stack(masks[:shadows])


def infer(
    module: nn.Module, layout: Layout, target: np.ndarray, train_many: TrainMany, x: np.ndarray, y: np.ndarray,
    member: np.ndarray, *, shadows: int = 16, methods: tuple[str, ...] = METHODS, seed: int = 0,
    population: tuple[np.ndarray, np.ndarray] | None = None, pixel_range: tuple[float, float] | None = None,
    path: np.ndarray | None = None,
) -> dict[str, Rates]:  # fmt: skip
    """Attack `target` weights on the pool (x, y) with true membership `member`, by every method asked for.

    population: examples outside the pool that no model was trained on; rmia and quantile need them. path: weights [T, P] of
    the target at several checkpoints; without it there is no trajectory. All methods share the same shadows.
    If the target's weights or outputs are not finite, every method has failed. Shadows that are not finite are an error."""
    unknown = [m for m in methods if m not in METHODS]
    if unknown:
        raise UserError(f"unknown membership attack '{unknown[0]}'; choose from {', '.join(METHODS)}.")
    if shadows < 2:
        raise UserError("membership inference needs at least 2 shadow models (--shadows 2).")
    if {"rmia", "quantile"} & set(methods) and (population is None or not len(population[0])):
        raise UserError("rmia and quantile need population examples outside the pool.")
    if path is not None and len(path) > 1 and population is not None:
        methods = (*methods, TRAJECTORY)
    ours = logits(module, layout, target, x)[0]
    broken = len(y) if not np.isfinite(target).all() else int((~np.isfinite(ours).all(-1)).sum())
    if broken:
        return dict.fromkeys(
            methods, failed("the attacked model's weights or outputs are not finite", broken)
        )
    inside = halves(shadows, len(y), seed)
    weights = train_many(inside)
    theirs = logits(module, layout, weights, x)
    if not (np.isfinite(weights).all() and np.isfinite(theirs).all()):
        raise UserError(
            "a shadow model diverged; lower the learning rate. This says nothing about the defence."
        )
    aim, seen = confidence(ours, y), confidence(theirs, y)
    out: dict[str, np.ndarray] = {}
    if "shokri" in methods:
        out["shokri"] = shokri(ours, y, theirs, inside, seed)
    if "lira-online" in methods:
        out["lira-online"] = lira_online(aim, seen, inside)
    if "lira-offline" in methods:
        out["lira-offline"] = lira_offline(aim, seen, inside)
    if "canary" in methods:
        query = canary_queries(module, layout, weights, inside, x, y, pixel_range=pixel_range)
        aimed = confidence(logits(module, layout, target, query)[0], y)
        answered = confidence(logits(module, layout, weights, query), y)
        out["canary"] = lira_online(aim, seen, inside) + lira_online(aimed, answered, inside)
    if "rmia" in methods:
        assert population is not None
        zx, zy = population
        of_z = logits(module, layout, target, zx)[0]
        shadow_z = logits(module, layout, weights, zx)
        out["rmia"] = rmia(
            _own(ours, y), _own(theirs, y), inside, _own(of_z, zy), _own(shadow_z, zy)
        )  # fmt: skip
    models = np.concatenate([np.atleast_2d(target), weights])
    out |= _further(module, layout, models, (ours, theirs), (x, y), inside, methods, population, path, seed)
    level = 1 - 0.05 / max(1, len(out))
    return {
        name: replace(found, auc_interval_all=signals.auc_interval(scores, member, level))
        if found.auc is not None
        else found
        for name, scores in out.items()
        for found in (rates(scores, member, seed),)
    }


def _further(
    module: nn.Module, layout: Layout, models: np.ndarray, outputs: tuple[np.ndarray, np.ndarray],
    pool: tuple[np.ndarray, np.ndarray], inside: np.ndarray, methods: tuple[str, ...],
    population: tuple[np.ndarray, np.ndarray] | None, path: np.ndarray | None, seed: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Scores of the attacks in `signals`; models[0] is the target, the others the shadows."""
    (ours, theirs), (x, y) = outputs, pool
    aim, seen = confidence(ours, y), confidence(theirs, y)
    out: dict[str, np.ndarray] = {}
    if "quantile" in methods and population is not None:
        zx, zy = population
        strangers = confidence(logits(module, layout, models[:1], zx)[0], zy)
        out["quantile"] = signals.quantile(aim, x, y, strangers, zx, zy)
    if "multi" in methods and len(theirs) > 2:
        out["multi"] = signals.multi(
            signals.signals(ours, y, aim), signals.signals(theirs, y, seen), inside, seed=seed
        )
    if "label-only" in methods:

        def labels_of(model: int, rows: np.ndarray) -> np.ndarray:
            return logits(module, layout, models[model : model + 1], rows)[0].argmax(-1)

        out["label-only"] = signals.label_only(labels_of, x, y, len(theirs), inside, seed)
    if TRAJECTORY in methods and path is not None and population is not None:
        course = confidence(logits(module, layout, path, x), y)
        strangers = confidence(logits(module, layout, path, population[0]), population[1])
        out[TRAJECTORY] = signals.trajectory(course, strangers, seen, inside)
    return out


def _own(outputs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Probability of the true label."""
    index = np.broadcast_to(np.asarray(y)[..., None], (*outputs.shape[:-1], 1))
    return np.take_along_axis(softmax(outputs, -1), index, -1)[..., 0]
