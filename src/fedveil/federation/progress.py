"""What whoever waits for a run is told while it goes on: how it stands, and that it has gone astray."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fedveil.federation.config import RunConfig
from fedveil.federation.loop import OnRound, RoundFacts

ASTRAY = 5.0  # a test loss so many times the smallest and the first one is no step back on the way


def standing(observer: str, metrics: Mapping[str, object]) -> str:
    """A round's result in a few words, for progress displays."""
    accuracy, rmse, epsilon = (metrics.get(name) for name in ("test_accuracy", "test_rmse", "epsilon"))
    shown = f"accuracy {accuracy:.3f}" if accuracy is not None else f"rmse {rmse:.3f}" if rmse is not None else ""
    return (shown + (f"  epsilon({observer}) {epsilon:.3f}" if epsilon is not None else "")).strip()


def tenths(config: RunConfig, write: Callable[[str], None]) -> OnRound:
    """A callback that writes a line for every tenth of the rounds, where there is no terminal to draw a bar on."""
    step = max(1, math.ceil(config.rounds / 10))
    warn = alarm(write)

    def hook(facts: RoundFacts) -> None:
        warn(facts)
        if facts.round % step == 0 or facts.round == config.rounds:
            write(f"round {facts.round}/{config.rounds}  {standing(config.observer, facts.metrics)}")

    return hook


def alarm(write: Callable[[str], None]) -> OnRound:
    """A callback that says once, as soon as it happens, that training runs away: nobody has to wait for its end."""
    seen: list[tuple[float, int]] = []  # test losses with their rounds, until it was said

    def hook(facts: RoundFacts) -> None:
        loss = facts.metrics.get("test_loss")
        if not isinstance(loss, float | int) or (seen and math.isnan(seen[0][0])):
            return
        least = min(seen, default=(math.inf, 0))
        if seen and not loss < ASTRAY * max(least[0], seen[0][0]):
            write(
                f"round {facts.round}: the test loss is {loss:.3g}, after {least[0]:.3g} in round {least[1]}: training runs "
                "away. A smaller learning_rate (or a tighter clip) keeps it in bounds; rounds played so far stay charged"
            )
            seen.insert(0, (math.nan, 0))
        else:
            seen.append((float(loss), facts.round))

    return hook
