"""Does a training loop keep its promise? Canaries in a loop that somebody else wrote.

The loop is given a small model and rows of which each canary owns one input feature that no other row uses; a fair coin
decides whether the feature is there. Whoever forgets the noise, clips too late or trains beside the private gradients leaves
the canaries' weights for everybody to see.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedveil.attacks.audit.bounds import Audit, Scores, ceiling, lower_bound, one_run_bound
from fedveil.attacks.audit.canaries import LOUD
from fedveil.errors import UserError
from fedveil.keys import generator

Loop = Callable[[nn.Module, TensorDataset], float | None]


def audit_loop(
    loop: Loop, *, canaries: int = 1000, delta: float = 1e-5, seed: int = 0, significance: float = 0.05
) -> Audit:
    """Hold a loop to the epsilon that it states.

    loop(module, dataset) trains the module in place on rows (features, class 0 or 1) the way you train, and returns the epsilon
    per example that it promises for the trained weights at `delta` (None: nothing). The model is nn.Linear, so the loss must
    be cross-entropy on its two outputs.

    Formal guarantee: for a loop that keeps its promise (zero-out neighbours) the verdict is "promise broken" with probability at
    most `significance`; canaries may influence each other in any way. It is never "promise holds": how much a loop of your own
    would show is not known.
    """
    coins = generator(seed, "loop-canaries").random(canaries) < 0.5
    features = np.zeros((canaries, canaries), np.float32)
    features[np.diag_indices(canaries)] = LOUD * coins
    labels = np.arange(canaries) % 2
    module = nn.Linear(canaries, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    before = module.weight.detach().clone()
    epsilon = loop(module, TensorDataset(torch.as_tensor(features), torch.as_tensor(labels)))
    moved = (module.weight.detach() - before).numpy()
    if not moved.any():
        raise UserError("audit: the loop did not train the module that it was given.")
    scores = _scores(moved, labels, coins)
    choose, use = scores.split(seed)  # the threshold is chosen on one half and used on the other
    threshold = float(choose.included.mean() + choose.excluded.mean()) / 2
    lower = lower_bound(use, one_run_bound(delta), significance, "fixed", threshold=threshold)
    reason = f"lower bound {lower:.3g} at {100 * (1 - significance):g}% confidence"
    broken = epsilon is not None and lower > epsilon
    told = "nothing finite is promised" if epsilon is None else f"promised {epsilon:.3g}"
    return Audit(
        lower, epsilon, delta, ceiling(canaries // 2, delta, significance), "promise broken" if broken else
        "not enough evidence", "none" if epsilon is None else "sound", {"one_run": lower}, canaries, significance, threshold,
        f"{reason}, {told}",
    )  # fmt: skip


def _scores(moved: np.ndarray, labels: np.ndarray, coins: np.ndarray) -> Scores:
    """How far each canary's own column moved towards its label."""
    columns = np.arange(len(coins))
    score = moved[labels, columns] - moved[1 - labels, columns]
    return Scores(score[coins], score[~coins])
