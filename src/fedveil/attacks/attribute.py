"""Attribute inference: does the model's inner representation betray what it was not trained to say?

A two-layer network learns from auxiliary data to read a sensitive attribute off the penultimate embeddings; the same
network on the inputs alone (no model) is the control. What the control can do, the model did not leak.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.attacks.membership import exact_interval
from fedveil.errors import UserError
from fedveil.models.layout import Layout, unflatten


@dataclass(frozen=True)
class Read:
    """Accuracy and macro F1 of the attack, beside the control and the most frequent value."""

    accuracy: float
    accuracy_interval: tuple[float, float]
    f1: float
    control_accuracy: float
    control_f1: float
    majority_accuracy: float


def embeddings(
    module: nn.Module, layout: Layout, weights: np.ndarray, x: np.ndarray, chunk: int = 1024
) -> np.ndarray:
    """What the last dense layer receives, for every example."""
    dense = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not dense:
        raise UserError("the model has no dense layer, so it has no penultimate embedding to attack.")
    seen: list[Tensor] = []
    layer = module.get_submodule(dense[-1])
    handle = layer.register_forward_pre_hook(
        lambda _module, inputs: seen.append(inputs[0].detach().flatten(1))
    )
    try:
        with torch.no_grad():
            for i in range(0, len(x), chunk):
                functional_call(
                    module, unflatten(torch.as_tensor(weights), layout), (torch.as_tensor(x[i : i + chunk]),)
                )
    finally:
        handle.remove()
    return torch.cat(seen).numpy()


def infer(
    module: nn.Module, layout: Layout, weights: np.ndarray, x: np.ndarray, attribute: np.ndarray, *,
    auxiliary: float = 0.5, seed: int = 0,
) -> Read:  # fmt: skip
    """Train on a random `auxiliary` share of (x, attribute), measure on the rest, with and without the model."""
    values = np.unique(attribute)
    if len(values) < 2:
        raise UserError("the attribute has only one value, so there is nothing to infer.")
    order = np.random.default_rng(seed).permutation(len(x))
    cut = int(auxiliary * len(x))
    known, asked = order[:cut], order[cut:]
    truth = attribute[asked]
    guess = _read(embeddings(module, layout, weights, x), attribute, known, asked, seed)
    control = _read(x.reshape(len(x), -1), attribute, known, asked, seed)
    top = values[np.argmax([(attribute[known] == v).sum() for v in values])]
    hits = int((guess == truth).sum())
    return Read(
        hits / len(truth), exact_interval(hits, len(truth)), macro_f1(truth, guess),
        float((control == truth).mean()), macro_f1(truth, control), float((truth == top).mean()),
    )  # fmt: skip


def _read(
    features: np.ndarray, attribute: np.ndarray, known: np.ndarray, asked: np.ndarray, seed: int
) -> np.ndarray:
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    reader = MLPClassifier((64,), max_iter=60, random_state=seed, early_stopping=len(known) > 200)
    return (
        make_pipeline(StandardScaler(), reader)
        .fit(features[known], attribute[known])
        .predict(features[asked])
    )


def macro_f1(truth: np.ndarray, guess: np.ndarray) -> float:
    """Mean over the attribute's values of the harmonic mean of precision and recall."""
    out = []
    for value in np.unique(truth):
        both = ((truth == value) & (guess == value)).sum()
        out.append(2 * both / ((truth == value).sum() + (guess == value).sum()))
    return float(np.mean(out))
