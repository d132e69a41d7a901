"""Any schedule: the sum is exact or the attempt ends without one, and no node gives away two of anything."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from sums import assert_exact, attempt, bad_network, numbers

from fedveil.secure_sum import graph


def _plays(first: int, count: int, largest: int = 12, trouble: float = 1.0) -> int:
    sums = 0
    for seed in range(first, first + count):
        draw = random.Random(f"schedule {seed}")
        n, t, c = numbers(draw, largest)
        sums += bad_network(draw, n, t, c, draw.choice([0.3, 1.0, 2.0]) * trouble, spoil=0.3 * trouble)
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


def test_the_long_run_of_random_schedules_goes_on_where_it_was(tmp_path):
    """tests/tools/schedules.py plays 10,000 of up to 12 nodes, 2,000 lying servers, 200 of sixty nodes; here a few."""
    tool, state = Path(__file__).parents[1] / "tools/schedules.py", tmp_path / "state.json"
    for share in ("0.0005", "0.001"):
        subprocess.run(
            [sys.executable, tool, "--share", share, "--kinds", "network", "liar", "--state", state],
            check=True,
        )
    found = json.loads(state.read_text())
    assert found["next"] == {"network": 10, "liar": 2} and found["failures"] == []
