"""The compiled engine: one client per thread, its whole local run in C++ (src/native).

Optional: without the extension `available()` is False and the torch engines are used. Results are the same bits for
any number of threads; instruction sets (AVX-512, AVX2, plain) differ in rounding, never in noise.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from fedveil.errors import UserError
from fedveil.models import compile
from fedveil.models.layout import Layout, layout_of
from fedveil.protect import exact, noise
from fedveil.protect.law import Staircase, kernel_of
from fedveil.training.contract import ClientWork, Examples, LocalPlan, LocalResult
from fedveil.training.loss_names import PLAIN

_KINDS = (
    "linear", "conv", "relu", "tanh", "sigmoid", "maxpool", "avgpool", "flatten", "groupnorm", "silu", "hardswish", "add",
    "depthwise",
)  # fmt: skip
_CLIPS = ("none", "layer", "flat")
_LAWS = ("none", "gaussian", "laplace", "staircase", "joint-staircase")


def available() -> bool:
    """Whether the compiled extension is installed and fits this version."""
    return noise._native is not None


def instruction_sets() -> tuple[str, ...]:
    """What this CPU can run, best first; empty without the extension."""
    return tuple(noise._native.instruction_sets()) if noise._native is not None and available() else ()


def why_not(module: nn.Module, plan: LocalPlan) -> str | None:
    """None if this engine can train the module by this plan, else the reason, naming the layer."""
    return _why_not(plan) or compile.why_not(module)


def _why_not(plan: LocalPlan) -> str | None:
    if not available():
        return noise.NOT_COMPILED
    if plan.law is not None and not kernel_of(plan.law):
        return "this noise law has no compiled kernel"
    if plan.grid > 0 and plan.by_median:
        return "noise on a grid needs one bound"
    if plan.grid > 0 and isinstance(plan.law, Staircase) and plan.by_largest:
        return "Staircase noise on a grid needs sensitivity = bound"
    if plan.loss not in PLAIN:
        return f"it has cross-entropy and squared error, not loss = {plan.loss}"
    if plan.augment.active:
        return "it has no augmentation"
    if plan.optimiser.rule != "sgd":
        return f"it has no {plan.optimiser.rule}"
    return None


def train(
    module: nn.Module,
    start: np.ndarray,
    x: Examples,
    y: Examples,
    work: Sequence[ClientWork],
    plan: LocalPlan,
    *,
    threads: int = 1,
    isa: str = "auto",
) -> LocalResult:
    """Local training of every client in `work`; see `LocalPlan` and `LocalResult`.

    isa: one of `instruction_sets()`; "auto" takes the first, or what FEDVEIL_INSTRUCTIONS in the environment names.

    Formal guarantee: as training.pool.train; noise comes from the client's key alone, and on a grid it is that of
    `Drawing.add` to the integer.
    """
    isa = os.environ.get("FEDVEIL_INSTRUCTIONS", "auto") if isa == "auto" else isa
    reason = _why_not(plan)
    if reason:
        raise UserError(f"The native engine cannot be used: {reason}. Use engine = 'auto'.")
    features = np.ascontiguousarray(x, np.float32)
    layers = compile.compile_layers(module, features.shape[1:])
    layout = layout_of(module)
    fields, eps, unit_begin = _fields(layers, layout)
    outputs = layers[-1].after[0]
    squared = plan.loss == "squared"
    labels = None if squared else np.ascontiguousarray(y, np.int64).reshape(-1)
    targets = np.ascontiguousarray(y, np.float32).reshape(len(features), -1) if squared else None
    if targets is not None and targets.shape[1] != outputs:
        raise UserError(f"The model has {outputs} outputs but y has {targets.shape[1]} columns.")
    count = len(work)
    columns = 1 if plan.flat else layout.layers
    delta = np.empty((count, layout.size), np.float32)
    norms = np.empty((2, count * columns))
    facts = np.empty((count, 7))
    of_mean = np.zeros((count, plan.measured_means))
    clients = [
        (
            np.ascontiguousarray(w.rows, np.int32),
            bytes(w.noise_key),
            *map(_vector, (w.control, w.anchor, w.shift, w.scale)),
        )
        for w in work
    ]
    assert noise._native is not None
    try:
        noise._native.train(
            fields, eps, unit_begin, int(np.prod(features.shape[1:])), outputs, _settings(plan, layout.size),
            features, labels, targets, np.ascontiguousarray(start, np.float32), clients, delta, norms, facts,
            of_mean, threads, isa,
        )  # fmt: skip
    except ValueError as problem:
        raise UserError(f"The native engine cannot use this input: {problem}.") from problem
    return _result(delta, norms.reshape(2, count, columns), facts, of_mean)


def _result(delta: np.ndarray, norms: np.ndarray, facts: np.ndarray, of_mean: np.ndarray) -> LocalResult:
    mean, largest = norms
    finite, loss, unclipped, noise_scale, examples, below, skipped = facts.T
    return LocalResult(
        delta=delta,
        finite=finite.astype(bool),
        loss=loss,
        norm_mean=mean,
        norm_max=largest,
        unclipped=unclipped,
        noise_scale=noise_scale,
        examples=examples.astype(np.int64),
        below_count=below,
        skipped=skipped.astype(np.int64),
        mean_gradient_norms=of_mean,
    )


def _vector(values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None else np.ascontiguousarray(values, np.float32)


def _fields(
    layers: Sequence[compile.LayerDescription], layout: Layout
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The layers as numbers (order: struct Layer in engine.h), and where each clipped layer begins."""
    offset = dict(zip(layout.names, layout.offsets, strict=True))
    rows = []
    for layer in layers:
        prefix = f"{layer.name}." if layer.name else ""
        rows.append([
            _KINDS.index(layer.kind),
            layout.layer_names.index(layer.name) if layer.weight else -1,
            *layer.before, *layer.after, *layer.kernel, *layer.stride, *layer.padding, layer.groups,
            *(*layer.takes, -1)[:2],
            offset[prefix + "weight"] if layer.weight else -1,
            offset[prefix + "bias"] if layer.bias else -1,
        ])  # fmt: skip
    begin = [part.start for part in layout.layer_slices()] + [layout.size]
    return (
        np.array(rows, np.int64),
        np.array([layer.eps for layer in layers], np.float32),
        np.array(begin, np.int64),
    )


def _settings(plan: LocalPlan, size: int) -> dict[str, object]:
    steps: dict[str, np.ndarray | list[object] | None] = dict.fromkeys(
        (
            "bounds",
            "scales",
            "deviations",
            "lambdas",
            "nus",
            "per_lambda",
            "threshold",
            "slope_in",
            "slope_out",
            "stairs",
        )
    )
    if plan.bounds:
        steps["bounds"] = np.array(plan.bounds, np.float64)
    if plan.noised:
        units = {id(one): replace(one, scale=one.per_unit) for one in {id(one): one for one in plan.noised}.values()}
        deviations = {key: one.deviation(size) for key, one in units.items()}  # most plans repeat one drawing
        steps["scales"] = np.array([units[id(one)].scale for one in plan.noised], np.float64)
        steps["deviations"] = np.array([deviations[id(one)] for one in plan.noised], np.float64)
    if isinstance(plan.law, Staircase):
        if plan.grid > 0:
            steps["stairs"] = [
                exact.stairs_fields(plan.law.stairs(one.scale / one.grid, one.shape or 1.0, size, one.norm))
                for one in plan.noised
            ]
        shapes = [noise.staircase_shape(one.shape, plan.law.nu) for one in plan.noised]
        names = ("lambdas", "nus", "per_lambda", "threshold", "slope_in", "slope_out")
        for name, values in zip(names, zip(*shapes, strict=True), strict=True):
            steps[name] = np.array(values, np.float64)
    return {
        **steps,
        "steps": plan.steps,
        "learning_rate": float(plan.learning_rate),
        "expected_batch": float(plan.expected_batch),
        "momentum": float(plan.momentum),
        "proximal": float(plan.proximal),
        "penalty": float(plan.penalty),
        "grid": float(plan.grid),
        "clip": _CLIPS.index(plan.clip),
        "noise": _LAWS.index("none" if plan.law is None else kernel_of(plan.law)),
        "for_each": any(one.at_count > 0 for one in plan.noised),
        "l1": plan.order == 1,
        "median": plan.by_median,
        "l2_max": plan.by_largest,
        "of_mean": plan.by_mean,
        "squared": plan.loss == "squared",
        "only_sum": plan.only_sum,
    }
