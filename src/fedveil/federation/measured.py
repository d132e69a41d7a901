"""What planned runs reached on the built-in datasets, and what follows for a plan beside them.

Accuracy on the test set, mean over seeds, δ = 1e-5 (docs/headline.md, docs/models.md). A plan is placed among them by its
strength, how many examples' worth of travel is left beside the noise: it holds budget, examples, clients and observer together.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fedveil.federation.planner import Plan, Shape, strength_of
from fedveil.privacy.calibrate import calibrate

# (dataset, with a public backbone): (observer, clients, examples, {epsilon: accuracy})
MEASURED: dict[tuple[str, bool], tuple[tuple[str, int, int, dict[float, float]], ...]] = {
    ("mnist", False): (
        ("sum", 100, 60_000, {0.3: 0.9800, 0.823: 0.9859, 2: 0.9882, 8: 0.9907}),
        ("server", 100, 60_000, {0.3: 0.9470, 0.823: 0.9698, 2: 0.9764, 8: 0.9840}),
        ("server", 1000, 60_000, {0.3: 0.8487, 0.823: 0.9398, 2: 0.9635, 8: 0.9771}),
    ),
    ("fashion_mnist", False): (
        ("sum", 100, 60_000, {0.3: 0.8735, 0.823: 0.8903, 2: 0.8988, 8: 0.9052}),
        ("server", 100, 60_000, {0.3: 0.7987, 0.823: 0.8367, 2: 0.8610, 8: 0.8852}),
    ),
    ("adult", False): (
        ("sum", 100, 36_631, {0.3: 0.8431, 0.823: 0.8491, 2: 0.8521, 8: 0.8523}),
        ("server", 100, 36_631, {0.3: 0.8300, 0.823: 0.8374, 2: 0.8321, 8: 0.8468}),
    ),
    ("cancer", False): (("sum", 10, 426, {0.823: 0.9679}), ("server", 10, 426, {0.823: 0.9563})),
    ("cifar10", False): (
        ("sum", 100, 20_000, {0.3: 0.4615, 0.823: 0.5397, 2: 0.5858, 8: 0.6205}),
        ("server", 100, 20_000, {0.3: 0.1898, 0.823: 0.2847, 2: 0.3965, 8: 0.5185}),
        ("sum", 100, 40_000, {0.823: 0.5831}),
        ("server", 100, 40_000, {0.823: 0.3788}),
    ),
    ("lfw", False): (
        ("sum", 10, 2_267, {0.3: 0.1944, 0.823: 0.2653, 2: 0.3347, 8: 0.5228}),
        ("server", 10, 2_267, {0.3: 0.1225, 0.823: 0.1857, 2: 0.2384, 8: 0.3463}),
    ),
    ("cifar10", True): (("sum", 100, 40_000, {0.823: 0.8406}), ("server", 100, 40_000, {0.823: 0.7762})),
    ("lfw", True): (("sum", 10, 2_267, {0.823: 0.5757}), ("server", 10, 2_267, {0.823: 0.3542})),
    ("utkface", True): (("sum", 10, 4_000, {0.823: 0.9016}), ("server", 10, 4_000, {0.823: 0.8918})),
    ("medical_mnist", True): (("sum", 10, 6_000, {0.823: 0.9943}), ("server", 10, 6_000, {0.823: 0.9890})),
    ("sst2", True): (("sum", 10, 6_920, {2: 0.8089}), ("server", 10, 6_920, {2: 0.7989})),
}  # fmt: skip


def points(dataset: str | None, shape: Shape) -> list[tuple[float, float]]:
    """(strength, accuracy) of what was measured on a dataset with such features, weakest first."""
    found = []
    for observer, clients, examples, reached in MEASURED.get((dataset or "", bool(shape.backbone)), ()):
        for epsilon, accuracy in reached.items():
            alone = strength_of(_of(shape, examples), calibrate(epsilon, 1e-5).noise_multiplier, clients, observer == "server")
            found.append((alone, accuracy))
    return sorted(found)


def _of(shape: Shape, examples: int) -> Shape:
    return replace(shape, examples=examples, sizes=())


def predict(dataset: str | None, shape: Shape, plan: Plan) -> tuple[float, float] | None:
    """Between which accuracies a plan lies, by the measured ones next to its strength; None without any, or far from all.

    Formal guarantee: none; a look into a table of measured runs."""
    known = points(dataset, shape)
    near = [(abs(math.log(plan.strength / strength)), accuracy) for strength, accuracy in known]
    below = [accuracy for strength, accuracy in known if strength <= plan.strength * 1.02]
    above = [accuracy for strength, accuracy in known if strength >= plan.strength / 1.02]
    if not near or min(near)[0] > math.log(3):
        return None
    closest = min(near)[1]
    ends = (below[-1] if below else closest, above[0] if above else closest)
    return min(ends), max(ends)
