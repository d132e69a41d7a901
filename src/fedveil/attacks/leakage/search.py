"""Gradient leakage: rebuild training images from what an observer saw.

Five attacks share one objective machine; victims (and restarts) are rows of one batched problem:

    dlg      image and label logits together, normal start, squared distance, L-BFGS
    idlg     the same with the label inferred and fixed
    cpl      label inferred; start = a random tile of half the side, repeated; squared distance, L-BFGS
    gradinv  label inferred; cosine distance, total variation, Adam on the sign, clamped to the pixel range
    veil     ours: pixels live in their box, layers are balanced (or weighted by the noise the recipe adds);
             L-BFGS from a tile about as bright as public images; for victims it did not solve, boxed cosine
             Adam followed by L-BFGS

The image kept is the one with the lowest matching loss; the truth is never consulted. A try that broke down in
non-finite values is repeated from another start. A victim for which no finite loss was found is *failed*, which says
nothing about a defence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, softmax

from fedveil.attacks.leakage.kernels import Matcher
from fedveil.attacks.leakage.lbfgs import Settings, minimise
from fedveil.attacks.leakage.objective import CHUNK, Leak, Predict, fast_matcher, infer_labels, predictor
from fedveil.errors import UserError, did_you_mean
from fedveil.training.torch.descent import one_thread

Method = Literal["dlg", "idlg", "cpl", "gradinv", "veil"]
METHODS: tuple[Method, ...] = ("dlg", "idlg", "cpl", "gradinv", "veil")
ITERATIONS = {"dlg": 300, "idlg": 300, "cpl": 300, "gradinv": 2400, "veil": 300}
Distance = Literal["squared", "balanced", "cosine"]
Watch = Callable[[Tensor, Tensor, Tensor], None]
"""(victims, images, iteration of each): measurement only"""

SOLVED = 3e-7  # matching loss relative to the leak's own size below which a victim counts as solved
STALL = 2e-3  # a victim whose loss fell by less than this share in 20 steps has ended; solvable ones fall by 8% and more
STALL_NOISY = 1e-2  # the same against noise, where the rest is fitting the noise
NEAR = 2e-6  # below this another start would not help: the image is there, only not polished
RETRIES = 3  # further starts for a victim whose last try broke down, whatever `restarts` says
HISTORY_FLOATS = 60_000_000  # memory for L-BFGS histories of one group of rows


@dataclass(frozen=True)
class Reconstruction:
    """Images [V, n, ...] as the search left them, labels [V, n]; matching loss, iterations, failures [V]."""

    method: str
    images: Tensor
    labels: Tensor
    loss: Tensor
    iterations: Tensor
    failed: Tensor
    cpu_seconds: float
    update_as: str = "gradient"


@dataclass(frozen=True)
class _Problem:
    """One attack: everything needed to evaluate the matching loss of some victims' rows."""

    predict: Predict
    target: Tensor
    weight: Tensor  # [V, P] multiplies the squared difference
    scale: Tensor  # [V]
    labels: Tensor  # [V, n]
    shape: tuple[int, ...]
    classes: int
    box: tuple[float, float]
    smoothing: float = 0.0
    brightness: float = 0.5  # mean and deviation of public pixels, as shares of the box
    contrast: float = 0.25
    noisy: bool = False
    fast: Matcher | None = None  # the compiled loss, where there is one
    plain: bool = False  # all weights are 1

    @property
    def n(self) -> int:
        return self.labels.shape[1]

    @property
    def ease(self) -> float:
        """More unknowns need a smaller loss for the same error per pixel; 1 for a grey image of 28 x 28."""
        return min(1.0, 784 / (self.n * math.prod(self.shape)))

    def loss(self, images: Tensor, soft: Tensor, rows: Tensor, distance: Distance) -> Tensor:
        seen, made = self.target[rows], self.predict(images, soft)
        if distance == "cosine":
            mask = (self.weight[rows] > 0).to(seen.dtype)
            a, b = made * mask, seen * mask
            value = 1 - (a * b).sum(1) / (a.square().sum(1).sqrt() * b.square().sum(1).sqrt() + 1e-12)
        elif self.noisy:  # without the constant noise energy, which would swallow the signal's digits
            value = (self.weight[rows] * made * (made - 2 * seen)).sum(1) / self.scale[rows]
        else:
            value = (self.weight[rows] * (made - seen).square()).sum(1) / self.scale[rows]
        return value + self.roughness(images)

    def roughness(self, images: Tensor) -> Tensor | float:
        """Total variation, as far as it counts."""
        if not self.smoothing or len(self.shape) != 3:
            return 0.0
        vertical = (images[..., 1:, :] - images[..., :-1, :]).abs().flatten(1).mean(1)
        sideways = (images[..., 1:] - images[..., :-1]).abs().flatten(1).mean(1)
        return self.smoothing * (vertical + sideways)

    def soft(self, rows: Tensor) -> Tensor:
        return one_hot(self.labels[rows], self.classes).to(self.target.dtype)

    def objective(self, distance: Distance, form: Literal["pixels", "box", "logits"]):
        """A function for `minimise`: pixels as they are, squashed into their box, or pixels and labels."""
        low, high = self.box

        def images_of(points: Tensor) -> tuple[Tensor, Tensor | None]:
            if form == "box":
                points = low + (high - low) * torch.sigmoid(points)
            logits = None
            if form == "logits":
                points, logits = points.split([self.n * math.prod(self.shape), self.n * self.classes], 1)
            return points.view(-1, self.n, *self.shape), logits

        def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            values, gradients = [], []
            width = max(1, CHUNK // self.n)
            for at in range(0, len(rows), width):
                some = points[at : at + width].detach().requires_grad_()
                images, logits = images_of(some)
                part = rows[at : at + width]
                guessed = None if logits is None else softmax(logits.view(-1, self.n, self.classes), -1)
                soft = self.soft(part) if guessed is None else guessed
                value = self.loss(images, soft, part, distance)
                gradients.append(torch.autograd.grad(value.sum(), some)[0])
                values.append(value.detach())
            return torch.cat(values), torch.cat(gradients)

        def evaluate_fast(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            """The same by the compiled loss: only the way from points to images is left to autograd."""
            some = points.detach().requires_grad_()
            images, logits = images_of(some)
            soft = self.soft(rows) if logits is None else softmax(logits.view(-1, self.n, self.classes), -1)
            assert self.fast is not None
            value, by_image, by_label = self.fast(
                images, soft, self.target, None if self.plain else self.weight, self.scale, rows,
                cosine=distance == "cosine", noisy=self.noisy,
            )  # fmt: skip
            outer = (images * by_image).sum()
            if logits is not None:
                outer = outer + (soft * by_label).sum()
            rough = self.roughness(images)
            if isinstance(rough, Tensor):
                value, outer = value + rough.detach(), outer + rough.sum()
            return value, torch.autograd.grad(outer, some)[0]

        chosen = evaluate if self.fast is None else evaluate_fast
        chosen.images_of = images_of  # type: ignore[attr-defined]
        return chosen


@one_thread()
def attack(
    method: Method,
    module: nn.Module,
    weights: Tensor,
    leak: Leak,
    *,
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    iterations: int | None = None,
    restarts: int = 0,
    pixel_range: tuple[float, float] = (0.0, 1.0),
    public: Tensor | None = None,
    aware: bool | None = None,
    update_as: Literal["gradient", "unroll"] = "gradient",
    images_per_victim: int | None = None,
    watch: Watch | None = None,
) -> Reconstruction:
    """Attack every victim of `leak` with one method; `iterations` is the budget of one try.

    public: images the attacker has anyway (for batch label templates); made-up tiles otherwise. aware: repeat
    the recipe's public clipping on dummies (default: only `veil`, the published attacks did not).
    update_as: treat an L-step update as one gradient, or unroll the local steps. images_per_victim: how many
    images to look for (default: one batch; with "unroll": steps x batch).
    """
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise UserError(f"unknown attack {method!r}; choose one of {known}.{did_you_mean(method, METHODS)}")
    begin = time.process_time()
    unroll = update_as == "unroll" and leak.is_update and leak.steps > 1
    n = images_per_victim or (leak.batch * leak.steps if unroll else leak.batch)
    aware = method == "veil" if aware is None else aware
    budget = ITERATIONS[method] if iterations is None else iterations
    rng = torch.Generator().manual_seed(seed)
    module = module.eval()
    weights = weights.detach()
    seen = leak.as_gradient()
    values = seen.values.detach().to(weights.dtype)
    healthy = torch.isfinite(values).all(1)
    values = torch.where(healthy[:, None], values, 0.0)
    brightness, contrast = _light(public, shape, pixel_range)
    if public is None:
        public = _tiles(rng, 8, 1, shape, pixel_range)[:, 0]
    clean = replace(leak, values=torch.where(healthy[:, None], leak.values.to(weights.dtype), 0.0))
    labels = infer_labels(module, weights, clean, public, n, classes)
    weight, scale = _weights(seen, values, balanced=method == "veil")
    problem = _Problem(
        predictor(module, weights, leak, aware=aware, unroll=unroll),
        values, weight, scale, labels, shape, classes, pixel_range,
        smoothing=0.0 if method != "gradinv" else 1e-4 if shape[0] == 1 else 3e-3,
        brightness=brightness,
        contrast=contrast,
        noisy=leak.noisy,
        fast=None if unroll else fast_matcher(module, weights, leak, shape, aware=aware),
        plain=method != "veil" and not leak.pruned,
    )  # fmt: skip
    best, best_labels, best_loss, spent = _best_of(problem, _tries(method, restarts), budget, rng, watch, healthy, n)
    return Reconstruction(
        method, best, best_labels, best_loss, spent, ~torch.isfinite(best_loss),
        time.process_time() - begin, "unroll" if unroll else "gradient",
    )  # fmt: skip


def _light(known: Tensor | None, shape: tuple[int, ...], pixel_range: tuple[float, float]) -> tuple[float, float]:
    """Brightness and contrast of images that the attacker knows; without any, grey digits are mostly dark, photographs not."""
    if known is None:
        return (0.2, 0.3) if shape[0] == 1 else (0.5, 0.25)
    width = pixel_range[1] - pixel_range[0]
    return float((known.mean() - pixel_range[0]) / width), float(known.std() / width)


def _best_of(
    problem: _Problem, tries: Sequence[Stage], budget: int, rng: torch.Generator, watch: Watch | None, healthy: Tensor, n: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(images, labels, loss, iterations): the best of all tries for each victim; the solved ones sit out, and those that broke
    numerically get further chances."""
    victims, kind = len(problem.target), problem.target.dtype
    best = torch.full((victims, n, *problem.shape), sum(problem.box) / 2, dtype=kind)
    best_loss = torch.full((victims,), float("inf"), dtype=kind)
    best_labels, spent = problem.labels.clone(), torch.zeros(victims, dtype=torch.long)
    done = -1.0 + NEAR * problem.ease if problem.noisy else NEAR * problem.ease
    broken = torch.zeros(victims, dtype=torch.bool)
    for number in range(len(tries) + RETRIES):
        unsolved = healthy & ~(best_loss <= done)
        rows = (unsolved if number < len(tries) else unsolved & broken).nonzero()[:, 0]
        if not len(rows):
            break
        stage = tries[min(number, len(tries) - 1)]
        found, loss, used, guessed, broke = stage(problem, rows, budget, rng, _shifted(watch, rows, spent))
        spent[rows] += used
        broken[rows] = broke
        better = loss < best_loss[rows]
        best[rows[better]], best_loss[rows[better]] = found[better], loss[better]
        best_labels[rows[better]] = guessed[better]
    return best, best_labels, best_loss, spent


Found = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""images, loss, iterations, labels, and whether non-finite values ended it"""
Stage = Callable[[_Problem, Tensor, int, torch.Generator, "Watch | None"], Found]


def _tries(method: Method, restarts: int) -> list[Stage]:
    """The sequence of tries; each runs only on victims that are not solved yet."""
    stages: dict[Method, list[Stage]] = {
        "dlg": [_dlg],
        "idlg": [_idlg],
        "cpl": [_cpl],
        "gradinv": [_gradinv],
        "veil": [_veil_fast, _veil_patient],
    }
    return stages[method] + [stages[method][-1]] * restarts


def _dlg(problem: _Problem, rows: Tensor, budget: int, rng: torch.Generator, watch: Watch | None) -> Found:
    start = torch.randn(len(rows), problem.n * (math.prod(problem.shape) + problem.classes), generator=rng)
    return _descend(problem, rows, start, budget, "squared", "logits", watch)


def _idlg(problem: _Problem, rows: Tensor, budget: int, rng: torch.Generator, watch: Watch | None) -> Found:
    start = torch.randn(len(rows), problem.n * math.prod(problem.shape), generator=rng)
    return _descend(problem, rows, start, budget, "squared", "pixels", watch)


def _cpl(problem: _Problem, rows: Tensor, budget: int, rng: torch.Generator, watch: Watch | None) -> Found:
    start = _tiles(rng, len(rows), problem.n, problem.shape, problem.box)
    return _descend(problem, rows, start.flatten(1), budget, "squared", "pixels", watch)


def _gradinv(problem: _Problem, rows: Tensor, budget: int, rng: torch.Generator, watch: Watch | None) -> Found:
    """As published, in units of normalised pixels: both the start and the step are multiples of their deviation."""
    low, high = problem.box
    unit = problem.contrast * (high - low)
    noise = torch.randn(len(rows), problem.n, *problem.shape, generator=rng)
    start = (low + (high - low) * problem.brightness + unit * noise).clamp(low, high)
    step = [budget * k // 8 for k in (3, 5, 7)]

    def rate(k: int) -> float:
        return 0.1 * unit * 0.1 ** sum(k >= s for s in step)

    images, loss, used, broke = _boxed_adam(problem, rows, start, budget, rate, True, watch)
    return images, loss, used, problem.labels[rows], broke


def _veil_fast(problem: _Problem, rows: Tensor, budget: int, rng: torch.Generator, watch: Watch | None) -> Found:
    low = min(max(problem.brightness - 0.15, 0.05), 0.65)
    dim = _tiles(rng, len(rows), problem.n, problem.shape, (low, low + 0.3)).flatten(1)
    return _descend(problem, rows, torch.logit(dim), budget // 2, "balanced", "box", watch)


def _veil_patient(problem: _Problem, rows: Tensor, budget: int, rng: torch.Generator, watch: Watch | None) -> Found:
    low, high = problem.box
    start = low + (high - low) * _tiles(rng, len(rows), problem.n, problem.shape, (0.05, 0.95))
    warm = budget // 4

    def rate(k: int) -> float:
        return 0.1 * 0.5 * (1 + math.cos(math.pi * k / warm))

    images, _, used, _ = _boxed_adam(problem, rows, start, warm, rate, False, watch)
    inside = ((images - low) / (high - low)).clamp(0.01, 0.99).flatten(1)
    later = _shifted(watch, torch.arange(len(rows)), used)
    rest = budget - budget // 2 - warm
    found = _descend(problem, rows, torch.logit(inside), rest, "balanced", "box", later)
    return found[0], found[1], found[2] + used, *found[3:]


def _descend(
    problem: _Problem,
    rows: Tensor,
    start: Tensor,
    budget: int,
    distance: Distance,
    form: Literal["pixels", "box", "logits"],
    watch: Watch | None,
) -> Found:
    """Batched L-BFGS on the given victims, in groups whose histories fit in memory."""
    objective = problem.objective(distance, form)
    memory = int(min(100, max(5, HISTORY_FLOATS // (2 * start.shape[1]))))
    group = max(1, HISTORY_FLOATS // (2 * memory * start.shape[1]))
    images, losses, used, labels = [], [], [], []
    for at in range(0, len(rows), group):
        some = rows[at : at + group]

        def told(which: Tensor, points: Tensor, iteration: Tensor, at: int = at) -> None:
            if watch is not None:
                watch(which + at, objective.images_of(points)[0], iteration)  # type: ignore[attr-defined]

        def of_some(points: Tensor, which: Tensor, some: Tensor = some) -> tuple[Tensor, Tensor]:
            return objective(points, some[which])

        goal = -torch.inf if problem.noisy else SOLVED * problem.ease if form == "box" else 1e-10
        stall = STALL_NOISY if problem.noisy else STALL
        # A noisy loss lacks its constant: near -1 it hardly moves although most of what was left above -1 goes away.
        floor = -1.0 if problem.noisy else -torch.inf
        settings = Settings(iterations=budget, memory=memory, tolerance=goal, stall=stall, floor=floor)
        found = minimise(of_some, start[at : at + group], settings, watch=told if watch is not None else None)
        pictures, logits = objective.images_of(found.point)  # type: ignore[attr-defined]
        images.append(pictures)
        losses.append(found.value)
        used.append(found.iterations)
        guess = problem.labels[some]
        labels.append(guess if logits is None else logits.view(len(some), problem.n, -1).argmax(-1))
    loss = torch.cat(losses)
    return torch.cat(images), loss, torch.cat(used), torch.cat(labels), ~torch.isfinite(loss)


def _boxed_adam(
    problem: _Problem,
    rows: Tensor,
    images: Tensor,
    budget: int,
    rate: Callable[[int], float],
    sign: bool,
    watch: Watch | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Adam on the cosine distance, clamped to the box; keeps each row's best image. A row that meets a
    non-finite value stops there (the last tensor says which did)."""
    objective = problem.objective("cosine", "pixels")
    x = images.flatten(1).clone()
    mean, square = torch.zeros_like(x), torch.zeros_like(x)
    best, best_loss = x.clone(), torch.full((len(x),), float("inf"))
    used = torch.zeros(len(x), dtype=torch.long)
    alive = torch.arange(len(x))
    for k in range(budget):
        value, g = objective(x[alive], rows[alive])
        fine = torch.isfinite(value) & torch.isfinite(g).all(1)
        alive, value, g = alive[fine], value[fine], g[fine]
        if not len(alive):
            break
        better = value < best_loss[alive]
        best[alive[better]], best_loss[alive[better]] = x[alive[better]], value[better]
        g = g.sign() if sign else g
        mean[alive] = 0.9 * mean[alive] + 0.1 * g
        square[alive] = 0.999 * square[alive] + 0.001 * g * g
        direction = mean[alive] / (1 - 0.9 ** (k + 1))
        direction = direction / ((square[alive] / (1 - 0.999 ** (k + 1))).sqrt() + 1e-12)
        x[alive] = (x[alive] - rate(k) * direction).clamp(*problem.box)
        used[alive] += 1
        if watch is not None:
            watch(alive, x[alive].view(-1, problem.n, *problem.shape), used[alive])
    broke = torch.ones(len(x), dtype=torch.bool)
    broke[alive] = False
    return best.view_as(images), best_loss, used, broke


def _tiles(
    rng: torch.Generator, rows: int, n: int, shape: tuple[int, ...], span: tuple[float, float]
) -> Tensor:
    """Random tiles of half the side, repeated over the image (any channels); tables get uniform rows."""
    low, high = span
    if len(shape) != 3:
        return low + (high - low) * torch.rand(rows, n, *shape, generator=rng)
    c, h, w = shape
    tile = torch.rand(rows, n, c, (h + 1) // 2, (w + 1) // 2, generator=rng)
    return low + (high - low) * tile.repeat(1, 1, 1, 2, 2)[..., :h, :w]


def _weights(leak: Leak, values: Tensor, *, balanced: bool) -> tuple[Tensor, Tensor]:
    """Weight of each coordinate's squared error, and the scale that makes the loss relative.

    Plain: 1. Balanced, no noise: layers count by the inverse of their norm, so that no layer hides another.
    Balanced with noise: the inverse noise variance (least squares). Pruned coordinates count 0. A leak that is zero
    everywhere (a saturated net) has no size of its own: then both are 1, and the loss stays finite."""
    weight = torch.ones_like(values)
    if balanced:
        for where, noise in zip(leak.layout.layer_slices(), leak.layer_noise, strict=True):
            norm = values[:, where].norm(dim=1, keepdim=True)
            weight[:, where] = 1 / noise**2 if leak.noisy and noise else 1 / norm.clamp(min=1e-12)
    if leak.pruned:
        weight = torch.where(values == 0, 0.0, weight)
    silent = (values == 0).all(1)
    size = (weight * values.square()).sum(1).clamp(min=1e-30)
    return torch.where(silent[:, None], 1.0, weight), torch.where(silent, 1.0, size)


def _shifted(watch: Watch | None, rows: Tensor, spent: Tensor) -> Watch | None:
    """Report in the caller's victim numbers and cumulative iterations."""
    if watch is None:
        return None
    before = spent[rows].clone()
    return lambda which, images, iteration: watch(rows[which], images, before[which] + iteration)
