"""Any schedule: the sum is exact or the attempt ends without one, and no node gives away two of anything."""

import random

import pytest
from sums import assert_exact, attempt, kinds_revealed, numbers

from fedveil.secure_sum import graph


def _plays(first: int, count: int, largest: int = 12, trouble: float = 1.0) -> int:
    sums = 0
    for seed in range(first, first + count):
        draw = random.Random(f"schedule {seed}")
        n, t, c = numbers(draw, largest)
        result, nodes, inputs = attempt(draw, n, t, c, trouble=draw.choice([0.3, 1.0, 2.0]) * trouble)
        sums += assert_exact(result, inputs)
        for node in nodes.values():
            kinds = kinds_revealed(node.session, node.left.get(5, set()))
            assert all(len(found) == 1 for found in kinds.values())
    return sums


@pytest.mark.parametrize("part", range(4))
def test_the_sum_is_exact_or_there_is_none_under_drops_reordering_duplicates_forgeries_and_restarts(part):
    sums = _plays(250 * part, 250)
    assert 25 < sums < 225  # both ends occur


def test_without_trouble_there_is_always_a_sum():
    assert _plays(10_000, 20, trouble=0.0) == 20


def test_sixty_nodes_with_trouble():
    draw = random.Random("sixty")
    result, _, inputs = attempt(draw, 60, 40, 10, trouble=0.3)
    assert_exact(result, inputs)


def test_sparse_neighbours_lose_nodes_and_still_give_the_exact_sum():
    n, t, c = 110, 88, 5
    degree, needed = graph.choose(n, t, c, 5)
    assert 0 < degree < n - 1
    draw = random.Random("sparse")
    dies = {3: 1, 50: 2, 70: 2, 99: 3}
    result, _, inputs = attempt(draw, n, t, c, trouble=0, dies=dies, degree=degree, share_threshold=needed)
    assert assert_exact(result, inputs)
    assert sorted(set(result.members) - set(result.survivors)) == [50, 70]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_schedules(part):
    _plays(100_000 + 1000 * part, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_schedules_of_sixty_nodes(part):
    for seed in range(20):
        draw = random.Random(f"sixty {part} {seed}")
        result, nodes, inputs = attempt(
            draw, 60, draw.randint(36, 48), 8, trouble=draw.choice([0.1, 0.5, 1.0])
        )
        assert_exact(result, inputs)
        for node in nodes.values():
            assert all(len(k) == 1 for k in kinds_revealed(node.session, node.left.get(5, set())).values())
