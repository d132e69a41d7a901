"""What a model is trained to make small: losses by name, or the user's own function of one example.

    cross-entropy | label-smoothing:share=0.1 | binary-cross-entropy      integer labels, outputs [classes]
    squared | huber:width=1                                               one target per output
    statistics                                                            of models.statistics, which sets it
    package.module:function                                               your own, of (outputs, targets)

An own function is called with one example at a time, outputs [1, …] and targets [1, …], and returns its one value. Targets
are long for classes, else of the outputs' type.

Formal guarantee: the gradient of an example's loss is computed from that example's outputs and target alone: a function
that would mix the examples of a batch never gets more than one, and `check_own` refuses one that is seen to remember others.
So a clip per example bounds every loss alike, and no promise depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fedveil.data.functions import call, import_function
from fedveil.errors import UserError
from fedveil.training.loss_names import CLASSES, STATISTICS, VALUES, own, parse

OfOne = Callable[[Tensor, Tensor], Tensor]  # (outputs [1, …], target [1, …]) -> one number


def of_one(text: str) -> OfOne:
    """The loss of one example, to be differentiated."""
    if own(text):
        return partial(_own, text, import_function(text))
    if text == STATISTICS:
        return _statistics
    name, option = parse(text)
    if name in VALUES:
        rule = nn.functional.mse_loss if name == "squared" else partial(nn.functional.huber_loss, delta=option)
        return lambda out, target: rule(out.reshape(-1), target.to(out.dtype).reshape(-1))
    if name == "binary-cross-entropy":
        return _one_against_all
    return lambda out, target: nn.functional.cross_entropy(out, target.long().reshape(1), label_smoothing=option)


def _statistics(out: Tensor, target: Tensor) -> Tensor:
    """Minus the output for x xᵀ and those for x, each times its target: the value, ±1 for two classes, else 1 for the class."""
    if target.is_floating_point():
        return -(out[:, :1].sum() + (out[:, 1:] * target.to(out.dtype).reshape(1, -1)).sum())
    label = target.long().reshape(-1, 1)
    linear = out[:, 1:] * (2 * label - 1) if out.shape[1] == 2 else out.gather(1, label + 1)
    return -(out[:, :1].sum() + linear.sum())


def _one_against_all(out: Tensor, target: Tensor) -> Tensor:
    """Each class against all others, averaged over the classes."""
    return nn.functional.binary_cross_entropy_with_logits(out, _hot(out, target))


def _hot(out: Tensor, labels: Tensor) -> Tensor:
    return torch.zeros_like(out).scatter(1, labels.long().reshape(-1, 1), 1.0)


def _own(text: str, function: Callable[..., object], out: Tensor, target: Tensor) -> Tensor:
    target = target if out.dtype == target.dtype else target.to(out.dtype if target.is_floating_point() else torch.long)
    found = call(text, partial(function, out, target))
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        told = f"a tensor of {found.numel()} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise UserError(f"loss '{text}' returned {told} for one example; return one floating-point number.")
    found = found.reshape(())
    return found if found.requires_grad else found + 0.0 * out.sum()  # an example that counts for nothing


def check_own(text: str, outputs: int, classes: int | None) -> None:
    """Call an own loss with random, public examples: its value must be finite somewhere, move with the outputs, and be the same
    whichever examples it saw before (a test, not a proof: a function that hides its memory is its author's)."""
    value = of_one(text)
    draw = torch.Generator().manual_seed(0)
    shown = [torch.randn(1, outputs, generator=draw) for _ in range(6)]
    truth = [torch.tensor([i % classes]) if classes else torch.randn(1, generator=draw) for i in range(6)]

    def told(order: list[int]) -> dict[int, tuple[float, list[float]]]:
        found = {}
        for i in order:
            leaf = shown[i].clone().requires_grad_()
            with torch.enable_grad():
                loss = value(leaf, truth[i].clone())
                (slope,) = torch.autograd.grad(loss, leaf)
            found[i] = loss.item(), slope.flatten().tolist()
        return found

    first, again = told([0, 1, 2, 3, 4, 5]), told([5, 2, 0, 4, 3, 1])
    if repr([first[i] for i in range(6)]) != repr([again[i] for i in range(6)]):
        raise UserError(
            f"loss '{text}' gives one example another value the second time: it draws random numbers or remembers other "
            "examples, and no clip would bound what one example does"
        )
    if not any(math.isfinite(loss) and any(slope) for loss, slope in first.values()):
        raise UserError(f"loss '{text}' does not move with the outputs: compute it with torch operations on them.")


def of_batch(outputs: Tensor, y: Tensor, mask: Tensor | None, text: str) -> tuple[Tensor, Tensor]:
    """Per-example losses [N] and their gradients with respect to `outputs`; both 0 for padded rows (mask)."""
    if text == "cross-entropy":  # small nets would notice the search for a name
        losses, gradient = _cross_entropy(outputs, y, 0.0)
    elif own(text) or text == STATISTICS:
        losses, gradient = _one_by_one(outputs, y, of_one(text))
    else:
        name, option = parse(text)
        rule = {"squared": _squared, "huber": _huber, "binary-cross-entropy": _binary}.get(name, _cross_entropy)
        losses, gradient = rule(outputs, y, option)
    if mask is not None:
        column = mask.reshape(-1, *[1] * (gradient.dim() - 1))
        losses = losses * mask.reshape(-1)
        gradient = gradient.mul_(column)
    return losses, gradient


def _one_by_one(outputs: Tensor, y: Tensor, value: OfOne) -> tuple[Tensor, Tensor]:
    losses, gradient = outputs.new_empty(len(outputs)), torch.empty_like(outputs)
    for row in range(len(outputs)):
        leaf = outputs[row : row + 1].detach().clone().requires_grad_()
        with torch.enable_grad():
            loss = value(leaf, y[row : row + 1].clone())
            gradient[row] = torch.autograd.grad(loss, leaf)[0][0]
        losses[row] = loss.detach()
    return losses, gradient


def _in_whole_vectors(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """What is left over at the end of a batch would be computed by other code."""
    padded = nn.functional.pad(values.reshape(-1), (0, -values.numel() % 64))
    return function(padded)[: values.numel()].view_as(values)


def _cross_entropy(outputs: Tensor, y: Tensor, share: float) -> tuple[Tensor, Tensor]:
    logs = torch.log_softmax(outputs, 1)
    labels = y.long()[:, None]
    losses = logs.gather(1, labels)[:, 0].neg_()
    gradient = _in_whole_vectors(torch.exp_, logs)
    gradient.scatter_add_(1, labels, torch.full_like(losses, share - 1)[:, None])
    if share:
        losses = losses.mul_(1 - share).sub_(logs.mean(1), alpha=share)
        gradient.sub_(share / logs.shape[1])
    return losses, gradient


def _binary(outputs: Tensor, y: Tensor, _: float) -> tuple[Tensor, Tensor]:
    hot = _hot(outputs, y)
    wide = nn.functional.binary_cross_entropy_with_logits(outputs.double(), hot.double(), reduction="none")
    return wide.mean(1), _in_whole_vectors(torch.sigmoid_, outputs).sub_(hot).div_(outputs.shape[1])


def _squared(outputs: Tensor, y: Tensor, _: float) -> tuple[Tensor, Tensor]:
    difference = outputs - y.to(outputs.dtype).view_as(outputs)
    size = difference[0].numel()
    losses = difference.double().square().flatten(1).sum(1).div_(size)  # finite whatever the order of the sum
    return losses, difference.mul_(2 / size)


def _huber(outputs: Tensor, y: Tensor, width: float) -> tuple[Tensor, Tensor]:
    difference = outputs - y.to(outputs.dtype).view_as(outputs)
    size, far = difference[0].numel(), difference.double().abs()
    values = torch.where(far < width, far.square() / 2, width * (far - width / 2))
    return values.flatten(1).sum(1).div_(size), difference.clamp_(-width, width).div_(size)


def check_targets(outputs: torch.Size, y: Tensor, text: str) -> None:
    """Refuse targets that the model's outputs cannot have, before any training. `outputs`: shape for one example."""
    if own(text) or text == STATISTICS:
        return
    if parse(text)[0] in CLASSES:
        if len(outputs) != 1:
            raise UserError(
                f"The model gives an output of shape {tuple(outputs)} per example; classification needs [classes]."
            )
        if y.numel() and (int(y.min()) < 0 or int(y.max()) >= outputs[0]):
            raise UserError(
                f"Labels lie between {int(y.min())} and {int(y.max())}, but the model has {outputs[0]} outputs "
                f"(labels 0 to {outputs[0] - 1}). Change the model's outputs or renumber the labels."
            )
    elif y.numel() and y[0].numel() != outputs.numel():
        raise UserError(
            f"A target has {y[0].numel()} values, but the model gives {outputs.numel()}; regression needs equal numbers."
        )
