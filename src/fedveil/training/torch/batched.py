"""A function of one example, run for many examples at once, so that no example's bits depend on the others.

`lower` takes the graph of aten operations that one example goes through (`trace`) and gives a function of stacked examples:
every value that depends on an example gets a leading axis for the examples. Each operation goes one of four ways:

- views, copies, gathers and arithmetic that IEEE 754 rounds correctly (sums, products, quotients of two numbers, comparisons,
  choices): on the whole stack, for a number's bits cannot depend on where it stands;
- other element-wise functions (exp, gelu, …): on the stack too, but every example begins at a multiple of 64 numbers: the
  vector code works in equal pieces and none of it meets the leftover code at the end;
- matrix products and sums over rows: one product per example (`products`): by the compiled module, where the order of
  every sum is its own source text's; without it by torch, with equal shapes for all;
- softmax and layer norm over the last axis: row by row in torch's own code.
- all the rest: one call per example, of equal shapes, strides and alignment.

Formal guarantee: row i of every result is a function of the shared values and of example i alone, not of the number of examples
or of i's place among them. For torch's own kernels this rests on how they are written (row by row, in equal pieces), and is
tested on the machine at hand.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fedveil.protect import noise

aten = torch.ops.aten
Value: TypeAlias = Any  # an argument of an operation: its own schema says which
_PIECE = 64  # numbers: a whole number of the steps of any vector loop
_LINE = 64  # bytes

# Correctly rounded whatever code computes them, or no rounding at all.
_EXACT = {
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "relu", "where", "maximum", "minimum", "clamp", "clamp_min", "clamp_max",
    "eq", "ne", "lt", "le", "gt", "ge", "threshold_backward", "masked_fill", "logical_not", "logical_and", "logical_or",
    "bitwise_not", "bitwise_and", "bitwise_or", "sign", "floor", "ceil", "zeros_like", "ones_like", "full_like", "fill",
    "_to_copy", "clone", "detach", "alias", "lift_fresh_copy", "sgn", "isnan", "isfinite", "hardtanh", "hardtanh_backward",
}  # fmt: skip
_RESHAPED = {"view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "flatten"}  # the order of numbers stays
_BY_DIMENSION = {"transpose": (1, 2), "select": (1,), "slice": (1,), "cat": (1,), "split": (2,), "split_with_sizes": (2,),
                 "unbind": (1,), "stack": (1,)}  # fmt: skip  # where their arguments name axes


def compiled(device: torch.device, dtype: torch.dtype) -> Value:
    """The compiled module, where it is installed and can take such numbers; else None."""
    native = noise._native
    return native if hasattr(native, "products") and dtype == torch.float32 and device.type == "cpu" else None


def products(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [n or 1, rows, terms] times b [n or 1, terms, columns] (+ bias [columns]): every matrix by itself."""
    native = compiled(a.device, a.dtype)
    count = max(a.shape[0], b.shape[0])
    if native is not None:
        out = a.new_empty(count, a.shape[1], b.shape[2])
        native.products(
            a.numpy(), b.numpy(), out.numpy(), None if bias is None else bias.contiguous().numpy()
        )
        return out
    # A batch of one, or another memory order, would go through other code.
    wide = max(count, 2)
    a, b = (v.expand(wide, -1, -1).contiguous() if v.shape[0] == 1 else v.contiguous() for v in (a, b))
    out = torch.bmm(a, b)[:count]
    return out if bias is None else out + bias


def _matrix(value: Tensor, each: bool) -> Tensor:
    return value if each else value[None]


def _mm(a_each: bool, b_each: bool, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return products(_matrix(a, a_each), _matrix(b, b_each), bias)


def _bmm(a_each: bool, b_each: bool, a: Tensor, b: Tensor) -> Tensor:
    """Stacks of stacks of matrices."""
    n = a.shape[0] if a_each else b.shape[0]
    a, b = a if a_each else a.expand(n, -1, -1, -1), b if b_each else b.expand(n, -1, -1, -1)
    return products(a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:])).view(n, -1, a.shape[2], b.shape[3])


def _summed(shape: Sequence[int], columns: int, x: Tensor) -> Tensor:
    """Sums over the leading axes of every example: [n, …] to [n, *shape], of `columns` numbers."""
    n = x.shape[0]
    wide = x.reshape(n, -1, columns)
    return products(wide.new_ones(1, 1, wide.shape[1]), wide).view(n, *shape)


def _layer_norm_backward(
    d: Tensor, x: Tensor, shape: list[int], mean: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of the input (row by row), and per example of the weight and the bias."""
    op = aten.native_layer_norm_backward
    back = op(d, x, shape, mean, scale, weight, bias, [True, False, False])[0] if wanted[0] else None
    of_weight = _summed(shape, shape[0], d * ((x - mean) * scale)) if wanted[1] else None
    return back, of_weight, _summed(shape, shape[0], d) if wanted[2] else None


def _reshaped(shape: Sequence[int], x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], *shape)


def _expanded(shape: Sequence[int], x: Tensor) -> Tensor:
    return _lifted(len(shape), x).expand(x.shape[0], *shape)


def _lifted(rank: int, x: Tensor) -> Tensor:
    """With axes of length 1 behind the first until an example has `rank` of them."""
    missing = rank - (x.dim() - 1)
    return x.reshape(x.shape[0], *[1] * missing, *x.shape[1:]) if missing > 0 else x


def _in_pieces(op: Callable[..., Tensor], shape: Sequence[int], each: Sequence[bool], *args: Value, **options: Value) -> Tensor:
    """An element-wise function of stacks, all of them spread to `shape` and padded so that examples begin at whole pieces."""
    count = math.prod(shape)
    n = next(a.shape[0] for a, own in zip(args, each, strict=True) if own)
    whole = (n, *shape)
    if count % _PIECE == 0 and all(
        own and a.shape == whole and a.is_contiguous() for a, own in zip(args, each, strict=True) if isinstance(a, Tensor)
    ):
        return op(*args, **options)

    def flat(value: Value, own: bool) -> Value:
        if not isinstance(value, Tensor):
            return value
        value = (_lifted(len(shape), value) if own else value).expand(whole).reshape(n, count)
        return torch.nn.functional.pad(value, (0, -count % _PIECE)).contiguous()

    out = op(*[flat(a, own) for a, own in zip(args, each, strict=True)], **options)
    return out[:, :count].reshape(whole)


def _row(value: Tensor, at: int) -> Tensor:
    """One example's value, at the beginning of a line."""
    row = value[at]
    return row.clone() if row.data_ptr() % _LINE else row


def _one_by_one(op: Callable[..., Value], each: Sequence[Value], *args: Value, **options: Value) -> Value:
    """The operation on every example by itself, its results stacked."""
    def pick(value: Value, own: Value, at: int) -> Value:
        if isinstance(own, list):
            return [pick(v, o, at) for v, o in zip(value, own, strict=True)]
        return _row(value, at) if own else value

    n = _stacks(args, each)[0].shape[0]
    found = [op(*[pick(a, o, at) for a, o in zip(args, each, strict=True)], **options) for at in range(n)]
    if isinstance(found[0], tuple | list):
        return tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*found, strict=True))
    return torch.stack(found)


def _stacks(args: Sequence[Value], each: Sequence[Value]) -> list[Tensor]:
    found: list[Tensor] = []
    for value, own in zip(args, each, strict=True):
        found += _stacks(value, own) if isinstance(own, list) else [value] if own else []
    return found


def lower(traced: fx.GraphModule, each_inputs: Sequence[bool]) -> fx.GraphModule:
    """The function of stacked examples; `each_inputs` says which inputs are stacks. Nodes of `traced` know their `shape`."""
    graph, values = fx.Graph(), {}  # type: ignore[var-annotated]
    each: dict[fx.Node, bool] = {}
    inputs = iter(each_inputs)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            each[node] = next(inputs)
        elif node.op == "call_function":
            each[node] = any(each[source] for source in node.all_input_nodes)
        else:
            each[node] = False
        same = _same(node)
        if same is not None:
            values[node] = values[same]
        elif node.op == "call_function" and each[node] and node.target is not operator.getitem:
            target, args, options = _rule(node, each)
            args, options = fx.node.map_arg((args, options), lambda source: values[source])
            if target is _reshaped:
                args = (args[0], _origin(args[1]))
            values[node] = graph.call_function(target, args, options)
        else:
            values[node] = graph.node_copy(node, lambda source: values[source])
    graph.eliminate_dead_code()
    return fx.GraphModule(traced, graph)


_KEPT = {"detach", "alias", "clone", "lift_fresh_copy", "contiguous"}  # copies: nothing here changes in place


def _name(node: object) -> str:
    """Of the operation, without its variant; empty for what is none."""
    target = node.target if isinstance(node, fx.Node) else None
    return target._schema.name.removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else ""


def _same(node: fx.Node) -> fx.Node | None:
    """The node whose value this one only repeats."""
    name, source = _name(node), node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name == "t" == _name(source) and isinstance(source.args[0], fx.Node):
        return source.args[0]
    unchanged = name in _RESHAPED | {"expand"} and node.meta.get("shape") == source.meta.get("shape") is not None
    return source if name in _KEPT or unchanged else None


def _origin(value: Value) -> Value:
    """What a chain of reshapes began with."""
    while isinstance(value, fx.Node) and value.op == "call_function" and value.target is _reshaped:
        value = value.args[1]
    return value


def _flags(value: Value, each: dict[fx.Node, bool]) -> Value:
    if isinstance(value, list | tuple):
        return [_flags(v, each) for v in value] if any(isinstance(v, fx.Node) for v in value) else False
    return isinstance(value, fx.Node) and each[value]


Rule = tuple[Callable[..., Value], tuple[Value, ...], dict[str, Value]]


def _rule(node: fx.Node, each: dict[fx.Node, bool]) -> Rule:
    """What computes this node for all examples."""
    op: Value = node.target
    args, options = node.args, dict(node.kwargs)
    own = [_flags(a, each) for a in args]
    name = _name(node)
    found = None
    if not any(isinstance(v, fx.Node) for v in options.values()):
        found = _shape_rule(name, node, own) or _row_rule(name, op, node, own) or _pointwise_rule(name, op, node, own)
    if found is not None:
        return found
    if any(isinstance(v, fx.Node) and each[v] for v in options.values()):  # named inputs become ordinary ones
        names = tuple(options)
        args, own = (*args, *options.values()), [*own, *(_flags(v, each) for v in options.values())]
        return _one_by_one, (_named(op, len(node.args), names), own, *args), {}
    return _one_by_one, (op, own, *args), options


def _named(op: Callable[..., Value], count: int, names: Sequence[str]) -> Callable[..., Value]:
    def call(*args: Value) -> Value:
        return op(*args[:count], **dict(zip(names, args[count:], strict=True)))

    return call


def _later(dimension: int) -> int:
    """An axis of one example as an axis of the stack."""
    return dimension + 1 if dimension >= 0 else dimension


def _shape_rule(name: str, node: fx.Node, own: Sequence[Value]) -> Rule | None:
    args: Value = node.args
    shape = node.meta.get("shape")
    if name in _RESHAPED and isinstance(shape, tuple):
        return _reshaped, (shape, args[0]), {}
    if name == "expand":
        return _expanded, (shape, args[0]), {}
    if name == "t":
        return (torch.transpose, (args[0], -2, -1), {}) if shape is not None and len(shape) == 2 else None
    if name == "permute":
        return torch.permute, (args[0], [0, *(d % len(args[1]) + 1 for d in args[1])]), {}
    places = _BY_DIMENSION.get(name)
    if places is None or (name in ("cat", "stack") and not all(own[0])):
        return None
    full = list(args) + [0] * (max(places) + 1 - len(args))
    for place in places:
        full[place] = _later(full[place])
    return node.target, tuple(full), dict(node.kwargs)  # type: ignore[return-value]


def _row_rule(name: str, op: Value, node: fx.Node, own: Sequence[Value]) -> Rule | None:
    """Products, sums over leading axes, and what works along the last axis."""
    args: Value = node.args
    shape = node.meta.get("shape")
    if name == "mm":
        return _mm, (own[0], own[1], *args), {}
    if name == "addmm" and not node.kwargs and not own[0] and len(_shape(args[0])) == 1:
        return _mm, (own[1], own[2], args[1], args[2], args[0]), {}
    if name == "bmm":
        return _bmm, (own[0], own[1], *args), {}
    before = _shape(args[0])
    if name == "sum" and len(args) > 1 and not node.kwargs and isinstance(shape, tuple):
        dims = sorted(d % len(before) for d in args[1]) if isinstance(args[1], list | tuple) else []
        if dims and dims == list(range(len(dims))) and node.meta.get("dtype") == torch.float32:
            return _summed, (shape, math.prod(before[len(dims) :]), args[0]), {}
    if name in ("_softmax", "_softmax_backward_data"):
        place = 1 if name == "_softmax" else 2  # of the axis
        if args[place] in (-1, len(before) - 1) and all(own[:place]):
            return op, (*args[:place], -1, *args[place + 1 :]), {}
    if name == "native_layer_norm" and own[0] and not any(own[1:]):
        return op, args, {}
    if name == "native_layer_norm_backward" and all(own[i] for i in (0, 1, 3, 4)) and not own[5] and len(args[2]) == 1:
        return _layer_norm_backward, args, {}
    if name == "embedding" and not own[0]:
        return op, args, dict(node.kwargs)
    return None


def _pointwise_rule(name: str, op: Value, node: fx.Node, own: Sequence[Value]) -> Rule | None:
    args, shape = node.args, node.meta.get("shape")
    pointwise = torch.Tag.pointwise in op.tags or name in _EXACT
    tensors = [a for a in args if isinstance(a, fx.Node)]
    if not pointwise or not isinstance(shape, tuple) or any(isinstance(flag, list) for flag in own):
        return None
    if any(flag and len(_shape(a)) == 0 for a, flag in zip(args, own, strict=True)):
        return None  # numbers without axes have rules of their own for the kind of the result
    if node.kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        return None
    if name not in _EXACT or "alpha" in node.kwargs or "rounding_mode" in node.kwargs:
        return _in_pieces, (op, shape, tuple(own), *args), dict(node.kwargs)
    if all(len(_shape(a)) == len(shape) or not flag for a, flag in zip(args, own, strict=True) if isinstance(a, fx.Node)):
        return op, args, dict(node.kwargs)
    assert tensors
    return _exact, (op, len(shape), tuple(own), *args), dict(node.kwargs)


def _exact(op: Callable[..., Tensor], rank: int, each: Sequence[bool], *args: Value, **options: Value) -> Tensor:
    return op(*[_lifted(rank, a) if own else a for a, own in zip(args, each, strict=True)], **options)


def _shape(value: Value) -> tuple[int, ...]:
    found = value.meta.get("shape") if isinstance(value, fx.Node) else ()
    return found if isinstance(found, tuple) else ()
