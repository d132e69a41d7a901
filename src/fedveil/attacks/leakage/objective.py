"""What leaked, and what the attacker's own dummy data would have leaked in its place.

The attacker knows the protocol: model, recipe, batch size, learning rate. A `Leak` holds the observed tensors
and that public knowledge. `predict` maps dummy images through the same public steps (average, clip, local
steps), differentiably. Defences are never re-implemented here: what was seen comes from the recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import log_softmax, one_hot

from fedveil.attacks.leakage.kernels import Gradients, Matcher, compiled, matcher
from fedveil.models.layout import Layout, unflatten
from fedveil.protect.bounded import ORDERS

CHUNK = 64  # dummy examples per evaluation: larger batches fall out of the cache


@dataclass(frozen=True)
class Leak:
    """Observed vectors [victims, P] and the public facts about them.

    kind "gradient": the mean gradient of `batch` examples at the known weights. kind "update": final minus
    start weights after `steps` local SGD steps of `batch` examples each with `learning_rate`.
    clip: how the recipe clipped, to `bound` in the norm `clip_norm`; clip_on "example": each example before the
    mean, "whole": the observed vector once. noise: standard deviation of the noise on the observed vector, one number or one per
    layer. pruned: zero coordinates were dropped, not measured. shift, scale: the vector was mapped to (g - shift) /
    scale before clipping (public statistics).
    """

    values: Tensor
    layout: Layout
    kind: Literal["gradient", "update"] = "gradient"
    batch: int = 1
    clip: Literal["none", "layer", "flat"] = "none"
    bound: float = 0.0
    clip_norm: Literal["l1", "l2"] = "l2"
    clip_on: Literal["example", "whole"] = "example"
    noise: float | tuple[float, ...] = 0.0
    steps: int = 1
    learning_rate: float = 1.0
    pruned: bool = False
    shift: Tensor | None = None
    scale: Tensor | None = None

    @property
    def clips(self) -> bool:
        """Was anything clipped, as far as is known?"""
        return self.clip != "none"

    @property
    def flat(self) -> bool:
        """Was the whole vector clipped as one?"""
        return self.clip == "flat"

    @property
    def each(self) -> bool:
        """Was each example clipped, rather than the observed vector?"""
        return self.clip_on == "example"

    @property
    def is_update(self) -> bool:
        """Is it a difference of weights, rather than a gradient?"""
        return self.kind == "update"

    @property
    def per_gradient(self) -> float:
        """What the observed vector is divided by to be in units of a gradient."""
        return self.learning_rate * self.steps if self.is_update else 1.0

    @property
    def noisy(self) -> bool:
        return max(self.layer_noise) > 0

    @property
    def layer_noise(self) -> tuple[float, ...]:
        one = self.noise if isinstance(self.noise, tuple) else (self.noise,) * self.layout.layers
        return tuple(float(s) for s in one)

    def as_gradient(self) -> Leak:
        """An update divided by -(learning rate x steps): the mean of the gradients along the local path. With
        steps > 1 it is a gradient at the start weights only approximately."""
        if not self.is_update:
            return self
        scale = self.learning_rate * self.steps
        return replace(
            self,
            values=-self.values / scale,
            kind="gradient",
            bound=self.bound / scale if self.clip_on == "whole" else self.bound,
            noise=tuple(s / scale for s in self.layer_noise),
        )


Predict = Callable[[Tensor, Tensor], Tensor]
"""(images [R, n, ...], soft labels [R, n, classes]) -> predicted leak [R, P]"""


class Plain:
    """Each example's own gradient by the compiled kernels, made for the first input's shape; None where they do not
    know the net."""

    def __init__(self, module: nn.Module, weights: Tensor, layout: Layout) -> None:
        self._of = module, weights, layout
        self._made: dict[tuple[int, ...], Gradients | None] = {}

    def __call__(self, x: Tensor, t: Tensor) -> Tensor | None:
        gradients = self.for_shape(tuple(x.shape[1:]))
        return None if gradients is None else gradients(x, t)

    def for_shape(self, shape: tuple[int, ...]) -> Gradients | None:
        if shape not in self._made:
            self._made[shape] = compiled(*self._of, shape)
        return self._made[shape]


def predictor(
    module: nn.Module, weights: Tensor, leak: Leak, *, aware: bool = True, unroll: bool = False
) -> Predict:
    """The attacker's model of the leak (in gradient units, see `Leak.as_gradient`).

    aware: repeat the recipe's clipping on the dummy data (the DP-aware objective). unroll: follow the local
    steps, n = steps x batch images in order of use; otherwise all n images are averaged at the start weights.
    """
    layout, names = leak.layout, leak.layout.names
    slices = layout.layer_slices()
    clips = aware and leak.clips
    on_example = clips and leak.each

    fast = Plain(module, weights, layout)

    def loss(parameters: dict[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
        return -(t * log_softmax(functional_call(module, parameters, (x[None],))[0], 0)).sum()

    def example_gradient(vector: Tensor, x: Tensor, t: Tensor) -> Tensor:
        found = grad(loss)(unflatten(vector, layout), x, t)
        flat = torch.cat([found[name].reshape(-1) for name in names])
        return flat if leak.scale is None or leak.shift is None else (flat - leak.shift) / leak.scale

    def shrink(g: Tensor, bound: float) -> Tensor:
        parts = [g] if leak.flat else [g[..., s] for s in slices]
        return torch.cat([p * (bound / size(p)).clamp(max=1.0) for p in parts], -1)

    def size(p: Tensor) -> Tensor:
        if ORDERS[leak.clip_norm] == 1:
            return p.abs().sum(-1, keepdim=True).clamp(min=1e-30)
        return p.square().sum(-1, keepdim=True).clamp(min=1e-30).sqrt()

    def averaged(x: Tensor, t: Tensor) -> Tensor:
        each = fast(x.flatten(0, 1), t.flatten(0, 1))
        if each is None:
            each = vmap(example_gradient, in_dims=(None, 0, 0))(weights, x.flatten(0, 1), t.flatten(0, 1))
        elif leak.scale is not None and leak.shift is not None:
            each = (each - leak.shift) / leak.scale
        each = shrink(each, leak.bound) if on_example else each
        return each.view(*x.shape[:2], -1).mean(1)

    def unrolled(x: Tensor, t: Tensor) -> Tensor:
        at = weights.expand(len(x), -1)
        total = torch.zeros_like(at)
        for step in range(leak.steps):
            rows = slice(step * leak.batch, (step + 1) * leak.batch)
            each = vmap(vmap(example_gradient, in_dims=(None, 0, 0)))(at, x[:, rows], t[:, rows])
            step_gradient = (shrink(each, leak.bound) if on_example else each).mean(1)
            total = total + step_gradient
            if leak.scale is not None and leak.shift is not None:
                step_gradient = step_gradient * leak.scale + leak.shift
            at = at - leak.learning_rate * step_gradient
        return total / leak.steps

    inner = unrolled if unroll and leak.is_update else averaged
    if not clips or leak.each:
        return inner
    return lambda x, t: shrink(inner(x, t), leak.bound / leak.per_gradient)


def fast_matcher(
    module: nn.Module, weights: Tensor, leak: Leak, shape: tuple[int, ...], *, aware: bool
) -> Matcher | None:
    """The compiled form of comparing `predictor(...)` with the leak, where there is one (no unrolled steps, no L1 clip)."""
    if aware and leak.clips and ORDERS[leak.clip_norm] != 2:
        return None
    mapped = leak.scale is not None and leak.shift is not None
    return matcher(
        module, weights, leak.layout, shape,
        clip=leak.clip if aware else "none",
        clip_on=leak.clip_on,
        bound=leak.bound if leak.each else leak.bound / leak.per_gradient,
        shift=leak.shift.float().contiguous().numpy() if mapped and leak.shift is not None else None,
        scale=leak.scale.float().contiguous().numpy() if mapped and leak.scale is not None else None,
    )  # fmt: skip


def infer_labels(
    module: nn.Module, weights: Tensor, leak: Leak, images: Tensor, n: int, classes: int
) -> Tensor:
    """Labels [victims, n] from the last dense layer's gradient; nothing else is known about the victims.

    One example: the class whose row, projected on typical features, is most negative (softmax minus one-hot
    is negative only there). Several: the counts per class that best explain the projected rows, by
    non-negative least squares on templates measured with the attacker's own `images` (public or made up) for
    every class, then rounded to n by largest remainder.
    """
    seen = leak.as_gradient()
    layout = leak.layout
    head = max(i for i, shape in enumerate(layout.shapes) if len(shape) == 2)
    start, rows = layout.offsets[head], layout.shapes[head]
    has_bias = layout.layer_of.count(layout.layer_of[head]) == 2
    bias = start + layout.sizes[head] if has_bias else None

    with torch.no_grad():
        features = _head_inputs(module, weights, layout, head, images).mean(0)

    def rows_of(g: Tensor) -> Tensor:
        if leak.scale is not None and leak.shift is not None:
            g = g * leak.scale + leak.shift
        if bias is not None and not leak.noisy:
            return g[:, bias : bias + rows[0]]
        projected = g[:, start : start + layout.sizes[head]].view(-1, *rows) @ features
        return projected + (0 if bias is None else g[:, bias : bias + rows[0]])

    scores = rows_of(seen.values.to(weights.dtype))
    if n == 1:
        return scores.argmin(1)[:, None]
    predict = predictor(module, weights, leak)
    with torch.no_grad():
        each = [
            predict(images[:, None], one_hot(torch.full((len(images), 1), c), classes).to(weights.dtype))
            for c in range(classes)
        ]
        template = torch.stack([rows_of(g).mean(0) for g in each], 1)
    level = template.abs().mean()
    system = torch.cat([template, level * torch.ones(1, classes)]).double().numpy()
    labels = []
    for row in scores:
        counts = nnls(system, torch.cat([row, level[None]]).double().numpy())[0] * n
        whole = counts.astype(int)
        order = sorted(range(classes), key=lambda c: counts[c] - whole[c], reverse=True)
        for c in (order * (1 + n // classes))[: max(n - int(whole.sum()), 0)]:
            whole[c] += 1
        labels.append(torch.arange(classes).repeat_interleave(torch.as_tensor(whole))[:n])
    return torch.stack(labels)


def _head_inputs(module: nn.Module, weights: Tensor, layout: Layout, head: int, images: Tensor) -> Tensor:
    """What the last dense layer receives for the attacker's images."""
    seen: list[Tensor] = []
    layer = module.get_submodule(layout.layer_names[layout.layer_of[head]])
    handle = layer.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach()))
    try:
        functional_call(module, unflatten(weights, layout), (images,))
    finally:
        handle.remove()
    return seen[0].reshape(len(images), -1)
