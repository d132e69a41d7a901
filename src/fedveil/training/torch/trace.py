"""A module as the graph of what one example goes through, forward and backward, and that graph for many examples at once.

The module runs once, on a batch of one, while torch writes down every operation, those of its gradient too. What comes out is a
function of weights and one example: an example's gradient cannot depend on other examples, whatever the module does,
for there are none. Frozen weights and buffers are inputs like the others; nothing is computed for their gradients.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedveil.data.functions import import_function
from fedveil.models.layout import layout_of
from fedveil.training import dropout
from fedveil.training import losses as losses_of
from fedveil.training.loss_names import PLAIN
from fedveil.training.torch import batched

_TOLERANCE = 2e-4  # of the trial, relative to the largest gradient; float32 rounding is about 1e-6
_KEPT = 16  # programs

Masks = tuple[tuple[str, float, tuple[int, ...]], ...]  # dropout layers: name, rate, shape of one example's mask


class Unfit(Exception):
    """This module cannot be traced; the text says why."""


@dataclass(frozen=True)
class Program:
    """A module's losses and gradients for stacked examples."""

    run: fx.GraphModule
    fixed: tuple[str, ...]  # frozen parameters and buffers, by name
    masks: Masks
    outputs: torch.Size
    numbers: int  # that one example's pass takes at once, at most

    def gradients(
        self, trained: Sequence[Tensor], fixed: Sequence[Tensor], masks: Sequence[Tensor], x: Tensor, y: Tensor
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Losses [n] and gradients [n, …] of n examples; None for a parameter that is not used.

        Formal guarantee: row i depends on the weights, on x[i], y[i] and its masks alone (`batched`).
        """
        with torch.no_grad():
            losses, *found = self.run(*trained, *fixed, *(m[:, None] for m in masks), x[:, None], y[:, None])
        return losses.view(-1), found


_programs: dict[tuple[object, ...], tuple[Program | str, object]] = {}  # by fingerprint, the last few


def program(module: nn.Module, x: Tensor, y: Tensor, loss: str) -> Program:
    """The module's program, tried on the examples x [n, …], y; kept for the next call. Unfit with the reason if there is none."""
    function = import_function(loss) if losses_of.own(loss) else None  # a notebook may give its name to another one
    key = (*_fingerprint(module), tuple(x.shape[1:]), x.dtype, tuple(y.shape[1:]), y.dtype, loss, function, str(x.device))
    if key not in _programs:
        while len(_programs) >= _KEPT:
            _programs.pop(next(iter(_programs)))
        try:
            found: Program | str = _made(module, x, y, loss)
        except Unfit as reason:
            found = str(reason)
        _programs[key] = found, _held(module)
    outcome = _programs[key][0]
    if isinstance(outcome, str):
        raise Unfit(outcome)
    return outcome


# ------------------------------------------------------------------------------------------------ what a program depends on

_TENSORS = ("_parameters", "_buffers", "_modules")
_HOOKS = frozenset(nn.Module().__dict__) - {"training"}  # torch's own; they count where they are not empty


def _fingerprint(module: nn.Module) -> tuple[object, ...]:
    """All that decides what a module computes besides the numbers in its tensors: classes, shapes, what trains, and the
    attributes of every part (objects that are no plain values by their identity)."""
    found: list[object] = []
    tied = _tied(module)
    for name, part in module.named_modules(remove_duplicate=False):
        own = tuple((k, _plain(v)) for k, v in part.__dict__.items() if k not in _HOOKS or (v and k not in _TENSORS))
        tensors = tuple(
            (k, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad, id(t) if tied else 0))
            for k, t in (*part._parameters.items(), *part._buffers.items())
        )
        found.append((name, type(part), own, tensors))
    return tuple(found)


def _tied(module: nn.Module) -> bool:
    everything = [p for part in module.modules() for p in part._parameters.values() if p is not None]
    return len({id(p) for p in everything}) < len(everything)


def _plain(value: object) -> object:
    if isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device | type(None)):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(_plain(v) for v in value)
    if isinstance(value, dict):
        return type(value), tuple((_plain(k), _plain(v)) for k, v in value.items())
    return type(value), id(value), getattr(value, "_version", 0)


def _held(module: nn.Module) -> object:
    """Keeps alive what a fingerprint knows by identity: another object cannot take its place."""
    tensors = list(module.parameters()) if _tied(module) else []
    return tensors, [v for part in module.modules() for k, v in part.__dict__.items() if k not in _TENSORS]


# ----------------------------------------------------------------------------------------------------------- tracing


def _made(module: nn.Module, x: Tensor, y: Tensor, loss: str) -> Program:
    copied = copy.deepcopy(module).to(x.device)
    for layer in copied.modules():
        if hasattr(layer, "inplace"):
            layer.inplace = False  # type: ignore[assignment]
    names = layout_of(copied).names
    tensors = {**dict(copied.named_parameters()), **dict(copied.named_buffers())}
    fixed = tuple(name for name in tensors if name not in names)
    masks, outputs = _masks(copied, x[:1])
    inputs = [tensors[n].detach() for n in names], [tensors[n].detach() for n in fixed], [x.new_ones(1, *s) for _, _, s in masks]
    joint = _joint(copied, names, fixed, masks, loss)
    try:
        with _plain_kernels():
            traced = make_fx(joint)(*inputs, x[:1], y[:1])
            if _mutates(traced):  # once more, now without changes in place
                with torch.no_grad():
                    traced = make_fx(functionalize(traced, remove="mutations"))(*inputs, x[:1], y[:1])
    except Exception as wrong:  # whatever the module's own code raises when its numbers are not known
        raise Unfit(f"its operations cannot be written down ({_said(wrong)})") from wrong
    _check(traced)
    traced.graph.eliminate_dead_code()
    shapes = _Shapes(traced)
    with torch.no_grad():
        shapes.run(*[t for group in inputs for t in group], x[:1], y[:1])
    stacks = [*[False] * (len(names) + len(fixed)), *[True] * (len(masks) + 2)]
    found = Program(batched.lower(traced, stacks), fixed, masks, outputs, shapes.numbers)
    _try(found, joint, inputs, x[:3], y[:3])
    if losses_of.own(loss):  # did it take a target for a constant?
        _try(found, joint, inputs, x[:3], (y[:3] + 1) % outputs[0] if not y.is_floating_point() else y[:3] + 1)
    return found


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Attention and recurrent cells as products and element-wise functions, not as closed kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
            yield


def _joint(
    module: nn.Module, names: Sequence[str], fixed: Sequence[str], masks: Masks, loss: str
) -> Callable[..., list[Tensor | None]]:
    """Loss and gradients of a batch of one, as a function of all tensors."""

    def joint(
        trained: Sequence[Tensor], constants: Sequence[Tensor], drops: Sequence[Tensor], x: Tensor, y: Tensor
    ) -> list[Tensor | None]:
        weights = [w.detach().requires_grad_() for w in trained]
        by_place = {(name, shape): drop for (name, _, shape), drop in zip(masks, drops, strict=True)}
        layers = dropout.layers(module)
        try:
            for name, layer in layers.items():
                layer.forward = _multiplied(name, layer, by_place)  # type: ignore[method-assign]
            everything = dict(zip((*names, *fixed), (*weights, *constants), strict=True))
            with torch.enable_grad():
                out = functional_call(module, everything, (x,))
                losses, gradient = _loss_and_gradient(out.detach(), y, loss)
                found: Sequence[Tensor | None] = [None] * len(weights)
                if out.requires_grad:
                    found = torch.autograd.grad(out, weights, gradient, allow_unused=True)
        finally:
            for layer in layers.values():
                layer.__dict__.pop("forward", None)
        return [losses, *found]

    return joint


def _loss_and_gradient(out: Tensor, y: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """As `losses.of_batch` of one example, without changes in place."""
    if kind not in PLAIN:
        leaf = out.requires_grad_()
        value = losses_of.of_one(kind)(leaf, y)
        return value.detach().reshape(1), torch.autograd.grad(value, leaf)[0]
    if kind == "cross-entropy":
        logs = torch.log_softmax(out, 1)
        labels = y.long()[:, None]
        losses = -logs.gather(1, labels)[:, 0]
        return losses, logs.exp().scatter_add(1, labels, torch.full_like(logs[:, :1], -1.0))
    difference = out - y.to(out.dtype).view_as(out)
    return difference.double().square().flatten(1).sum(1) / difference.numel(), difference * (2 / difference.numel())


def _multiplied(name: str, layer: nn.Module, masks: dict[tuple[str, tuple[int, ...]], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * masks[name, dropout.shape_of(layer, x)]


def _masks(module: nn.Module, row: Tensor) -> tuple[Masks, torch.Size]:
    """The dropout masks of one example, found by passing one through; and the shape of its output."""
    found: dict[tuple[str, float, tuple[int, ...]], None] = {}
    layers = dropout.layers(module)

    def noted(name: str, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            found[name, float(layer.p), dropout.shape_of(layer, x)] = None  # type: ignore[arg-type]
            return x

        return forward

    try:
        for name, layer in layers.items():
            layer.forward = noted(name, layer)  # type: ignore[method-assign]
        with torch.no_grad():
            out = module(row)
    except Exception as wrong:
        raise Unfit(f"it cannot take a single example ({_said(wrong)})") from wrong
    finally:
        for layer in layers.values():
            layer.__dict__.pop("forward", None)
    if not isinstance(out, Tensor):
        raise Unfit(f"it gives a {type(out).__name__}, not a tensor")
    if len(out) != 1:
        raise Unfit(f"it gives {len(out)} outputs for one example")
    return tuple(found), out.shape[1:]


def _said(wrong: Exception) -> str:
    """The first line of an error."""
    return f"{type(wrong).__name__}: {str(wrong).partition(chr(10))[0][:120]}"


def _operations(traced: fx.GraphModule) -> list[torch._ops.OpOverload]:
    return [node.target for node in traced.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def _mutates(traced: fx.GraphModule) -> bool:
    return any(op._schema.is_mutable for op in _operations(traced))


def _check(traced: fx.GraphModule) -> None:
    for op in _operations(traced):
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise Unfit(f"it draws random numbers that no key here controls ({op})")
        if op._schema.is_mutable:
            raise Unfit(f"it changes a tensor in place ({op})")


class _Shapes(fx.Interpreter):
    """Notes the shape and kind of every node, and how many numbers are alive at once."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.numbers = 0

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if isinstance(out, Tensor):
            n.meta["shape"], n.meta["dtype"] = tuple(out.shape), out.dtype
            if n.op == "call_function" and out._base is None:
                self.numbers += math.prod(out.shape)
        else:
            n.meta.pop("shape", None)
        return out


def _try(
    program: Program, joint: Callable[..., list[Tensor | None]], inputs: Sequence[list[Tensor]], x: Tensor, y: Tensor
) -> None:
    """The program must give plain autograd's gradients on these examples."""
    trained, fixed, masks = inputs
    losses, found = program.gradients(trained, fixed, [m.expand(len(x), *m.shape[1:]) for m in masks], x, y)
    for at in range(len(x)):
        loss, *wanted = joint(trained, fixed, masks, x[at : at + 1], y[at : at + 1])
        assert loss is not None
        largest = max((float(w.abs().max()) for w in wanted if w is not None and w.numel()), default=0.0)
        used = [(f[at], w) for f, w in zip(found, wanted, strict=True) if f is not None and w is not None]
        scale = max(largest, 1e-12, abs(float(loss[0])))
        if not math.isfinite(scale):
            continue  # a broken example tells nothing
        same = [f is None for f in found] == [w is None for w in wanted]
        gaps = [float((a - b).abs().max()) for a, b in [(losses[at], loss[0]), *used] if a.numel()]
        if not same or max(gaps) > _TOLERANCE * scale:
            raise Unfit("what was written down does not give plain autograd's gradients")
