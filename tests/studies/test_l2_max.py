"""Why P2's two l2-max rows miss their print in the text's reading and reach it in the algorithm's: the noise that each draws."""

import numpy as np
import pytest
from engine_cases import plan

from fedveil.data.datasets import available, load
from fedveil.models import nets
from fedveil.models.layout import flatten
from fedveil.training import pool
from fedveil.training.contract import ClientWork

STEPS, BATCH, BOUND, SIGMA = 20, 600, 4.0, 6.0


@pytest.mark.parametrize(("reading", "least", "most"), [("l2-max", 1.0, 1.0), ("l2-max-mean", 0.0, 0.25)])
def test_one_of_600_examples_always_exceeds_the_bound_and_their_mean_is_far_below_it(reading, least, most):
    """By single examples S = C in every step, so that it is DP-baseline; the mean's norm shrinks the noise."""
    if not available("mnist"):
        pytest.skip("mnist is not in FEDVEIL_DATA")
    data, module = load("mnist", limit=6000), nets.build("papers-cnn", (1, 28, 28), 10, 0)
    draw = np.random.default_rng(0)
    rows = np.stack([draw.choice(6000, BATCH, replace=False) for _ in range(STEPS)]).astype(np.int32)
    what = plan(
        steps=STEPS, learning_rate=0.05, expected_batch=float(BATCH), clip="layer", bounds=(BOUND,) * STEPS, noise="gaussian",
        multipliers=(SIGMA,) * STEPS, sensitivity=reading,
    )  # fmt: skip
    result = pool.train(module, flatten(module), data.x, data.y, [ClientWork(0, rows, bytes(16))], what)
    share = float(result.noise_scale[0]) / (SIGMA * BOUND)
    assert least * (1 - 1e-6) <= share <= most * (1 + 1e-6)
