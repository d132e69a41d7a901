"""What is told while a run goes on."""

import math

import pytest

from fedveil.federation.config import make_config
from fedveil.federation.loop import RoundFacts, run
from fedveil.federation.progress import alarm, tenths


def told(losses):
    lines = []
    hook = alarm(lines.append)
    for number, loss in enumerate(losses, 1):
        hook(RoundFacts(number, len(losses), {"test_loss": loss}, {}, None))
    return lines


@pytest.mark.parametrize(
    "losses",
    [
        [2.3, 1.0, 0.5, 0.7, 0.9, 0.6],  # a step back
        [2.3, 0.1, 0.3, 0.9],  # nine times the smallest, below the first
        [2.3, 4.0, 9.0, 3.0],  # noise in the first rounds
        [None, None, 2.0, 2.1],  # rounds without a look
        [],
    ],
)
def test_nothing_is_said_of_a_run_that_goes_its_way(losses):
    assert told(losses) == []


@pytest.mark.parametrize("losses", [[0.6, 0.5, 13.0, 200.0], [2.3, 1.0, math.inf], [2.3, 1.0, math.nan], [2.3, None, 40.0]])
def test_a_loss_that_runs_away_is_told_at_once_and_once(losses):
    (line,) = told([*losses, 1e6, math.nan])
    at = next(i for i, loss in enumerate(losses, 1) if loss is not None and not loss <= 11)
    assert line.startswith(f"round {at}: ") and "learning_rate" in line


def test_a_real_run_whose_steps_become_far_too_long_is_told(tmp_path):
    lines = []
    config = make_config({"recipe": "non-private", "dataset": "digits", "clients": 4, "rounds": 6, "local_steps": 5,
                          "learning_rate": 0.05, "learning_rate_end": 500.0, "report": False})  # fmt: skip
    run(config, tmp_path / "run", on_round=tenths(config, lines.append))
    assert sum("runs away" in line for line in lines) == 1
