"""A module as plain layer descriptions that take each other's outputs, for the compiled engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedveil.errors import UserError
from fedveil.models import chain
from fedveil.models.chain import Step

MOST_LAYERS = 128
_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.SiLU: "silu", nn.Hardswish: "hardswish",
}  # fmt: skip
Pair = tuple[int, int]
Image = tuple[int, int, int]


@dataclass(frozen=True)
class LayerDescription:
    """One layer: channels, rows, columns in and out (flat vectors are [n, 1, 1]) and its numbers."""

    kind: str  # linear conv depthwise relu tanh sigmoid silu hardswish maxpool avgpool flatten groupnorm add
    name: str
    before: Image
    after: Image
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    groups: int = 1
    eps: float = 0.0
    weight: bool = False
    bias: bool = False
    takes: tuple[int, ...] = (-1,)  # the layers whose outputs it takes; -1: the example


class Beside(nn.Module):
    """An image net with further inputs: what an example has beyond its image goes past `body` straight to `head`."""

    def __init__(self, body: nn.Sequential, head: nn.Sequential, shape: Sequence[int]) -> None:
        super().__init__()
        self.body, self.head, self.shape, self.width = body, head, tuple(shape), math.prod(shape)
        self.flatten = nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        image, more = x[:, : self.width], x[:, self.width :]
        features = self.flatten(self.body(image.reshape(len(x), *self.shape)))
        return self.head(torch.cat([features, more], 1))


def leaves(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The layers of a (nested) Sequential in order, with their names; `nn.Identity` is left out."""
    if type(module) is Beside and not prefix:
        return [*leaves(module.body, "body"), ("flatten", module.flatten), *leaves(module.head, "head")]
    if type(module) is nn.Sequential:
        out = []
        for name, child in module._modules.items():  # named_children() leaves out a layer that is used again
            if child is not None:
                out += leaves(child, f"{prefix}.{name}" if prefix else name)
        return out
    return [] if type(module) is nn.Identity else [(prefix, module)]


def _of_torch(layer: nn.Module) -> bool:
    return type(layer).__module__.partition(".")[0] == "torch"


def steps_of(module: nn.Module) -> list[Step]:
    """The layers with what each takes: a chain if nested Sequentials say so, else what the forward pass shows."""
    found = leaves(module)
    if not isinstance(module, Beside) and any(not _of_torch(layer) for _, layer in found):
        graph = chain.steps(module)
        if graph is not None:
            return graph
    return [Step(name, layer, (at - 1,)) for at, (name, layer) in enumerate(found)]


def why_not(module: nn.Module) -> str | None:
    """None if the module can be described, else the reason, with the layer's name."""
    return _frozen(module) or _why_not(module, steps_of(module))  # in this order: reading the steps takes time


def _frozen(module: nn.Module) -> str | None:
    return None if all(weight.requires_grad for weight in module.parameters()) else "some of its weights are frozen"


def _why_not(module: nn.Module, steps: list[Step]) -> str | None:
    seen: set[int] = set()
    flat: list[bool | None] = []  # of what each step gives; None: not known
    for step in steps:
        name, layer = step.name, step.layer
        kind = "addition" if isinstance(layer, chain.Add) else type(layer).__name__
        where = f"layer '{name}' ({kind})" if name else f"the model ({kind})"
        reason, needs_flat = _leaf_reason(layer)
        if reason:
            return f"{where} {reason}"
        parameters = [id(p) for p in layer.parameters()]
        if seen.intersection(parameters):
            return f"{where} shares its parameters with another layer"
        seen.update(parameters)
        before = [None if at < 0 else flat[at] for at in step.takes]
        if isinstance(layer, chain.Add) and before != [False, False]:
            return "it adds other things than outputs of image layers"
        if needs_flat is not None and before[0] is not None and needs_flat != before[0]:
            return (
                f"{where} does not follow a Flatten layer" if needs_flat else f"{where} follows a flat layer"
            )
        flat.append(True if isinstance(layer, nn.Flatten) else before[0] if needs_flat is None else needs_flat)
    if not seen:
        return "the model has no parameters"
    if not flat[-1]:
        return "the model does not end in a flat output (Flatten or Linear)"
    if len(steps) > MOST_LAYERS:
        return f"the model has {len(steps)} layers, more than {MOST_LAYERS}"
    return None


def compile_layers(module: nn.Module, shape: Sequence[int]) -> list[LayerDescription]:
    """Describe the layers for examples of `shape`; UserError, naming the layer, if that cannot be done."""
    steps = steps_of(module)
    reason = _frozen(module) or _why_not(module, steps)
    if reason:
        raise UserError(f"The native engine cannot train this model: {reason}. Use engine = 'auto'.")
    out: list[LayerDescription] = []
    if len(shape) not in (1, 3):
        if not isinstance(steps[0].layer, nn.Flatten):
            raise UserError(
                f"The native engine takes examples [n] or [channels, rows, columns], not {list(shape)}."
            )
        shape = (math.prod(shape),)
    more = 0
    if isinstance(module, Beside):
        shape, more = module.shape, math.prod(shape) - module.width
        if more < 0:
            raise UserError(f"An example has {module.width + more} numbers, its image needs {module.width}.")
    first: Image = (shape[0], 1, 1) if len(shape) == 1 else (shape[0], shape[1], shape[2])
    for step in steps:
        before = [first if at < 0 else out[at].after for at in step.takes]
        if len(set(before)) > 1:
            raise UserError(f"The native engine cannot add images of {before[0]} and {before[1]}. Use engine = 'torch'.")
        described = replace(_describe(step.name, step.layer, before[0]), takes=step.takes)
        if more and isinstance(step.layer, nn.Flatten):
            described = replace(described, after=(described.after[0] + more, 1, 1))
        if min(described.after) < 1:
            raise UserError(
                f"Layer '{step.name}' ({type(step.layer).__name__}) has no output for an input of {before[0]}."
            )
        out.append(described)
    return out


def _leaf_reason(layer: nn.Module) -> tuple[str | None, bool | None]:
    """(why this layer cannot be described, whether it needs flat data: None if it takes both)."""
    kind = type(layer)
    if kind in _ACTIVATIONS:
        return None, None
    if kind is chain.Add:
        return None, False
    if isinstance(layer, nn.Flatten) and kind is nn.Flatten:
        return (None if (layer.start_dim, layer.end_dim) == (1, -1) else "flattens only some axes"), None
    if isinstance(layer, nn.Linear) and kind is nn.Linear:
        return None, True
    if isinstance(layer, nn.Conv2d) and kind is nn.Conv2d:
        if layer.groups != 1 and not layer.groups == layer.in_channels == layer.out_channels:
            return "has groups of several channels", False
        if layer.dilation != (1, 1):
            return "is dilated", False
        if isinstance(layer.padding, str) and layer.padding == "same" and layer.stride != (1, 1):
            return "has padding 'same' with a stride", False
        if layer.padding_mode != "zeros":
            return f"pads with {layer.padding_mode}", False
        if (
            isinstance(layer.padding, str)
            and layer.padding == "same"
            and any(k % 2 == 0 for k in layer.kernel_size)
        ):
            return "has padding 'same' with an even kernel", False
        return None, False
    if isinstance(layer, nn.MaxPool2d) and kind is nn.MaxPool2d:
        wrong = layer.ceil_mode or layer.return_indices or _pair(layer.dilation) != (1, 1)
        return ("uses ceil_mode, return_indices or dilation" if wrong else None), False
    if isinstance(layer, nn.AvgPool2d) and kind is nn.AvgPool2d:
        padded = _pair(layer.padding) != (0, 0) and not layer.count_include_pad
        wrong = layer.ceil_mode or padded or layer.divisor_override is not None
        return ("uses ceil_mode, count_include_pad or divisor_override" if wrong else None), False
    if isinstance(layer, nn.AdaptiveAvgPool2d) and kind is nn.AdaptiveAvgPool2d:
        return (None if layer.output_size in (1, (1, 1), [1, 1]) else "pools to another size than 1"), False
    if isinstance(layer, nn.GroupNorm) and kind is nn.GroupNorm:
        return None, False
    return "is not a layer it knows", None


def _pair(value: int | Sequence[int]) -> Pair:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _describe(name: str, layer: nn.Module, before: Image) -> LayerDescription:
    if type(layer) in _ACTIVATIONS:
        return LayerDescription(_ACTIVATIONS[type(layer)], name, before, before)
    if isinstance(layer, nn.Flatten):
        return LayerDescription("flatten", name, before, (math.prod(before), 1, 1))
    if isinstance(layer, nn.Linear):
        _same(name, "inputs", layer.in_features, before[0] if before[1:] == (1, 1) else math.prod(before))
        after = (layer.out_features, 1, 1)
        return LayerDescription("linear", name, before, after, weight=True, bias=layer.bias is not None)
    if isinstance(layer, nn.GroupNorm):
        _same(name, "channels", layer.num_channels, before[0])
        affine = layer.affine
        return LayerDescription(
            "groupnorm",
            name,
            before,
            before,
            groups=layer.num_groups,
            eps=layer.eps,
            weight=affine,
            bias=affine,
        )
    if isinstance(layer, chain.Add):
        return LayerDescription("add", name, before, before)
    if isinstance(layer, nn.AdaptiveAvgPool2d):
        area = (before[1], before[2])
        return LayerDescription("avgpool", name, before, (before[0], 1, 1), area, area)
    assert isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d)
    kernel, stride = _pair(layer.kernel_size), _pair(layer.stride)  # type: ignore[arg-type]
    if isinstance(layer.padding, str):
        padding = (kernel[0] // 2, kernel[1] // 2) if layer.padding == "same" else (0, 0)
    else:
        padding = _pair(layer.padding)
    rows, columns = ((before[i + 1] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    if isinstance(layer, nn.Conv2d):
        _same(name, "channels", layer.in_channels, before[0])
        after = (layer.out_channels, rows, columns)
        return LayerDescription(
            "conv" if layer.groups == 1 else "depthwise",
            name,
            before,
            after,
            kernel,
            stride,
            padding,
            weight=True,
            bias=layer.bias is not None,
        )
    kind = "maxpool" if isinstance(layer, nn.MaxPool2d) else "avgpool"
    return LayerDescription(kind, name, before, (before[0], rows, columns), kernel, stride, padding)


def _same(name: str, what: str, expected: int, got: int) -> None:
    if expected != got:
        raise UserError(
            f"Layer '{name}' expects {expected} {what} but gets {got}: check the shape of the data."
        )
