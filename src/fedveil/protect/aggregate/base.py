"""What an aggregation rule is: pure functions of memories, the start weights and the uploads of one round.

Every rule is post-processing of what it is given. It is free of privacy cost exactly when single uploads already carry their
noise (`looks_inside`), or when it only sees the mean after the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedveil.jsons import JsonObject
from fedveil.protect.memory import NOTHING, Memory

if TYPE_CHECKING:
    from torch import nn

    from fedveil.models.layout import Layout


@dataclass(frozen=True, eq=False)
class Merged:
    """One round as the server has it. mean: of the uploads, noised already where the noise is the server's.

    updates and clients are empty unless the rule asked for them (`looks_inside`). public_loss: of weights on the server's
    public data, None where it has none.
    """

    start: np.ndarray
    mean: np.ndarray
    layout: Layout
    population: int
    steps: int
    learning_rate: float
    number: int
    updates: Sequence[np.ndarray] = ()
    clients: Sequence[int] = ()
    public_loss: Callable[[np.ndarray], float | None] | None = None
    public: tuple[np.ndarray, np.ndarray] | None = None
    module: nn.Module | None = None
    loss: Literal["cross-entropy", "squared"] = "cross-entropy"
    curve: Literal["polygon", "bezier"] = "polygon"
    seed: int = 0


@dataclass(frozen=True)
class Mean:
    """The plain mean; also what other rules fall back to.

    looks_inside: does it look at single uploads? knows_senders: must it know whose they are? needs_public: does the server
    need public data for it?
    """

    name: str = "mean"
    looks_inside: bool = False
    knows_senders: bool = False
    needs_public: bool = False

    def init(self, size: int) -> Memory:
        """What is remembered before the first round."""
        return NOTHING

    def control(self, memory: Memory, client: int, size: int) -> np.ndarray | None:
        """A vector that the client adds to each of its gradients, None if the rule has none."""
        return None

    def direction(self, memory: Memory, merged: Merged) -> tuple[np.ndarray, Memory, JsonObject]:
        """Where to go: (direction, new memory, public facts)."""
        return merged.mean, memory, {}

    def move(
        self, memory: Memory, start: np.ndarray, direction: np.ndarray, rate: float
    ) -> tuple[np.ndarray, Memory]:
        """The server's step along a direction."""
        return stepped(start, direction, rate), memory


def stepped(start: np.ndarray, moved: np.ndarray, rate: float) -> np.ndarray:
    """start + rate * moved, in float64, as float32."""
    return (np.asarray(start, np.float64) + rate * np.asarray(moved, np.float64)).astype(np.float32)
