"""What was measured predicts plans beside it, and nothing else."""

import itertools
import math

import pytest

from fedveil.federation import measured
from fedveil.federation.forecast import HOPELESS, expect
from fedveil.federation.planner import KNOWN, PUBLIC, describe, plan


def shape_of(dataset, public):
    return (PUBLIC if public else KNOWN)[dataset]


@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist", "cifar10", "lfw"])
def test_strength_alone_orders_what_was_measured(dataset):
    """Whatever observer, clients, budget and number of examples: the claim that predictions rest on."""
    found = [accuracy for _, accuracy in measured.points(dataset, shape_of(dataset, False))]
    assert len(found) >= 8 and all(a <= b + 0.006 for a, b in itertools.pairwise(found))


def test_every_measured_run_is_predicted_as_measured():
    for (dataset, public), rows in measured.MEASURED.items():
        for observer, clients, examples, reached in rows:
            shape = describe(dataset, examples, "images", 10, 1, public)
            for epsilon, accuracy in reached.items():
                low, high = measured.predict(dataset, shape, plan(shape, epsilon=epsilon, clients=clients, observer=observer))
                assert low - 1e-9 <= accuracy <= high + 1e-9, (dataset, public, observer, epsilon)


def test_a_run_that_is_not_in_the_table_lies_where_it_says():
    """CIFAR-10 behind a public backbone, ten clients, server view, epsilon 2: 0.835 (docs/reproduction/p5-table4.md)."""
    shape = PUBLIC["cifar10"]
    low, high = measured.predict("cifar10", shape, plan(shape, epsilon=2.0, clients=10))
    assert low <= 0.835 <= high


def test_far_from_everything_measured_nothing_is_predicted():
    shape = KNOWN["lfw"]
    assert measured.predict("lfw", shape, plan(shape, epsilon=0.05, clients=10)) is None
    assert measured.predict(None, shape, plan(shape, epsilon=0.823, clients=10)) is None


def test_a_budget_that_cannot_work_is_told_so_with_what_it_would_take():
    shape = describe(None, 100, "images", 10, 1)
    tiny = plan(shape, epsilon=0.01, clients=10)
    said = expect(tiny.noise_to_signal, 10)
    times = math.ceil(tiny.noise_to_signal * math.sqrt(10))
    assert times > HOPELESS and "cannot work" in said and f"{times} times as many examples" in said
    enough = plan(KNOWN["mnist"], epsilon=0.823, clients=100, observer="sum")
    assert expect(enough.noise_to_signal, 10) == ""
