"""AdaClip (Pichapati et al.): each coordinate's own shift and scale, followed from noised gradients alone.

A gradient g is mapped to (g - m) / b, clipped to length 1, noised there, and mapped back. m is a running mean of the
noised gradients. s^2 is a running variance of them, from which the noise's own share has been taken: without that the
scale would feed on the noise that it causes, and run away. b = sqrt(s) * sqrt(sum of s) is the scale that minimises
the noise which the clip to 1 brings in.

What is left of the noise after the subtraction is cut at 0 from below, as published, and so has a mean of 0.48 of its
variance: where a coordinate's noise in the released gradient is above 1.4 times its spread (small batches, many
coordinates, large sigma), the scale still grows until the upper limit of the variance stops it.

Formal guarantee: m and b are functions of released (noised) gradients and of public constants: post-processing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MEAN_DECAY, SQUARE_DECAY = 0.99, 0.9
LEAST, MOST = 1e-12, 10.0  # between which a step's estimate of the variance is kept


@dataclass(frozen=True)
class Memory:
    """mean m and squared deviation s^2 of every coordinate, float32."""

    mean: np.ndarray
    square: np.ndarray


def first(bound: float, size: int) -> Memory:
    """The memory before the first round: no shift, and the scale at which the clip to 1 is a plain clip to `bound`."""
    if not (bound > 0 and size >= 1):
        raise ValueError("bound and size must be positive")
    return Memory(np.zeros(size, np.float32), np.full(size, bound**2 / size, np.float32))


def scale(memory: Memory) -> np.ndarray:
    """b = sqrt(s) * sqrt(sum of s), float32."""
    deviation = np.sqrt(np.maximum(memory.square.astype(np.float64), LEAST))
    found: np.ndarray = np.sqrt(deviation * deviation.sum()).astype(np.float32)
    return found


def follow(memory: Memory, noised: np.ndarray, noise_variance: np.ndarray) -> Memory:
    """The memory after a noised gradient whose coordinates carry noise of the given variances."""
    old = memory.mean.astype(np.float64)
    wide = np.asarray(noised, np.float64)
    own = np.clip((wide - old) ** 2 - noise_variance, LEAST, MOST)
    square = SQUARE_DECAY * memory.square.astype(np.float64) + (1 - SQUARE_DECAY) * own
    mean = MEAN_DECAY * old + (1 - MEAN_DECAY) * wide
    return Memory(mean.astype(np.float32), square.astype(np.float32))
