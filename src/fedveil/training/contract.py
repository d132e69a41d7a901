"""The contract between recipes and engines: what one client does in one round.

`LocalPlan` is pure data. Every engine (stacked torch, torch.func, native, naive reference) turns
(start weights, data rows, plan, keys) into the same local updates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from fedveil.protect.bounded import ORDERS
from fedveil.protect.law import Law
from fedveil.protect.noised import Drawing
from fedveil.training.augment import NONE, Augment
from fedveil.training.optimisers import SGD, Optimiser

if TYPE_CHECKING:
    import torch

ClipKind = Literal["none", "layer", "flat"]
Examples: TypeAlias = "np.ndarray | torch.Tensor"  # all clients' examples, or their targets


@dataclass(frozen=True)
class LocalPlan:
    """Local SGD of one client for one round.

    Step l:  g = (sum over the batch of clip(grad_example, bounds[l]) + noise) / expected_batch
             v = momentum * v + g + proximal * (w - start) + penalty * (w - anchor) + control
             w = w - learning_rate * v
    With another `optimiser` than sgd, g with its further terms (momentum 0) goes through training.optimisers.step instead.
    noise is drawn with noised[l] and nothing else: an engine knows no multiplier and forms no scale. Where the scale follows the
    batch it is noised[l].times(S, batch size) times as wide, S being the largest clipped per-example layer norm of this batch
    (sensitivity "l2-max"; for flat clipping the largest flat norm), the largest layer norm of the batch's mean clipped gradient,
    sum / expected_batch ("l2-max-mean"), or the median that it is clipped to (bound_rule "median").
    An empty batch still gets noise when the scale does not depend on the batch (S = 0 then).
    clip "layer": each layer (weight and bias together) to bounds[l] on its own, norm `clip_norm`.
    clip "flat": the whole gradient to bounds[l].
    bound_rule "median": bounds[l] is replaced by the median over the batch of the per-example norms (per
    layer when clip is "layer"; flat otherwise).
    AdaClip: when `ClientWork.shift`/`scale` are given, each example's gradient is first mapped to
    (g - shift) / scale, clipped and noised there, and the noised *mean* (sum / expected_batch) is mapped back
    to scale * mean + shift. The realised batch size never enters: it would tell whether a record was drawn.

    Details that every engine follows:
    - loss "cross-entropy": softmax of the outputs against the integer label. "squared": the mean over the
      outputs of (output - y)^2; y is float [n] or [n, outputs]. Others, and own functions: training.losses, of one example each.
    - augment: an example's gradient (and loss) is the mean over its copies (training.augment), which is clipped as one.
    - clip factor min(1, bound / norm), less a margin for rounding (see protect.bounded); norm `clip_norm` also for
      the median, for l2-max and for the reported norms. The clipped norm that l2-max looks at is min(norm, bound); the
      norm itself when clip is "none".
    - "median" of an even count is the mean of the two middle norms; without clip nothing uses it. S is then
      the median (per layer: one S for each layer's coordinates); an empty batch has S = 0 and no noise.
    - bounds[l] may be infinite (no clipping in that step).
    - noised[l].add(sum, noise_key, l, times) is the definition of what is added. In step 0 the momentum buffer v is 0.
      AdaClip norms, bounds and S are those of the mapped gradients.
    - with a clip, an example whose loss or norm (of any layer) is not finite gets clip factor 0 in all layers: it adds
      nothing, which is within every bound. It counts in `skipped` and in `examples`, not in the median, in l2-max
      or in the means; the noise does not change.
    - only_sum (one step, no noise): delta is minus the sum of the clipped gradients itself, rounded once; taken from
      the weights it would carry their rounding too, which knows no bound.
    - measure_mean: the norms of the batches' mean gradients are reported although the noise does not follow them. It changes no
      noise and no update.
    - a client whose weights (without a clip: or loss or norms) are not finite at any step stops there: finite False,
      delta 0.
    """

    steps: int
    learning_rate: float
    expected_batch: float
    momentum: float = 0.0
    clip: ClipKind = "none"
    clip_norm: Literal["l1", "l2"] = "l2"
    bounds: tuple[float, ...] = ()  # length steps when clip != "none"
    bound_rule: Literal["given", "median"] = "given"
    sensitivity: Literal["bound", "l2-max", "l2-max-mean"] = "bound"
    noised: tuple[Drawing, ...] = ()  # one for each step, on one grid; none: no noise
    proximal: float = 0.0
    penalty: float = 0.0
    loss: str = "cross-entropy"
    optimiser: Optimiser = SGD
    augment: Augment = NONE
    only_sum: bool = False  # the sum instead of a step: noise and step size follow elsewhere
    measure_mean: bool = False

    @property
    def law(self) -> Law | None:
        """The law of the noise in the steps, if there is any."""
        return self.noised[0].law if self.noised else None

    @property
    def grid(self) -> float:
        """Spacing of exact noise; 0: float noise, or none."""
        return self.noised[0].grid if self.noised else 0.0

    @property
    def clips(self) -> bool:
        """Is anything clipped at all?"""
        return self.clip != "none"

    @property
    def flat(self) -> bool:
        """Is the whole gradient clipped as one?"""
        return self.clip == "flat"

    @property
    def by_layer(self) -> bool:
        """Is each layer clipped on its own?"""
        return self.clip == "layer"

    @property
    def order(self) -> int:
        """1 or 2: the order of the norm that is clipped."""
        return ORDERS[self.clip_norm]

    @property
    def by_median(self) -> bool:
        """Is the bound the batch's own median norm?"""
        return self.bound_rule == "median"

    @property
    def by_largest(self) -> bool:
        """Is the noise scaled to the batch's largest clipped norm, of single examples or of their mean?"""
        return self.sensitivity != "bound"

    @property
    def by_mean(self) -> bool:
        """Is it the norm of the batch's mean gradient?"""
        return self.sensitivity == "l2-max-mean"

    @property
    def measured_means(self) -> int:
        """For how many steps the norm of the batch's mean gradient is reported: all, or none."""
        return self.steps if self.by_mean or self.measure_mean else 0

    @property
    def follows(self) -> bool:
        """Does the noise follow a norm of the batch?"""
        return self.by_largest or (self.by_median and self.clips)


@dataclass(frozen=True)
class ClientWork:
    """One client's share: which rows in which step, and its own keys and vectors.

    rows: int32 [steps, width], row numbers into the shared x/y arrays, padded with -1 at the end of a row.
    noise_key: 16 bytes; the noise of step l is the stream (noise_key, l) of protect.noise, in flat
    parameter order.
    """

    client: int
    rows: np.ndarray
    noise_key: bytes
    control: np.ndarray | None = None  # SCAFFOLD: server minus client control variate, added to the gradient
    anchor: np.ndarray | None = None  # UDP-FL: w_max
    shift: np.ndarray | None = None  # AdaClip
    scale: np.ndarray | None = None


@dataclass(frozen=True)
class LocalResult:
    """Updates and diagnostics of the clients of one chunk, in the order of the work list.

    delta: [K, P] final minus start weights. finite: [K]; a client whose training ended in NaN or infinity is False
    and its delta row is all zeros. The rest is private to the client's side: mean loss, mean and max *unclipped*
    gradient norms [K, layers] ("layer" or "none") or [K, 1] ("flat"), the fraction of examples at or below
    the bound (flat norm when clip is "flat", else averaged over layers) [K], the deviation of the noise on
    a coordinate of the sum [K], and below_count [K]: the number of (example, step) pairs whose (flat) norm was at or below
    the bound (clip "layer": the average of that number over the layers; clip "none": all pairs), so unclipped =
    below_count / examples. skipped [K]: the pairs whose gradient was not finite and added nothing. Means are over
    the other pairs; over no example they are 0. noise_scale is averaged over steps (and layers); without
    noise it is 0. mean_gradient_norms [K, steps]: the largest layer norm (clip "flat": the norm) of each batch's mean
    clipped gradient before its noise; [K, 0] where the plan does not ask (`LocalPlan.measured_means`).
    A client that is not finite has zeros in all figures but examples.
    """

    delta: np.ndarray
    finite: np.ndarray
    loss: np.ndarray
    norm_mean: np.ndarray
    norm_max: np.ndarray
    unclipped: np.ndarray
    noise_scale: np.ndarray
    examples: np.ndarray  # [K] number of (example, step) pairs used
    below_count: np.ndarray = field(default_factory=lambda: np.zeros(0))
    skipped: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    mean_gradient_norms: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
