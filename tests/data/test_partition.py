"""Partitions: every row where it should be, never in more hands than `copies` says."""

import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.data.partition import KINDS, check_disjoint, class_counts, holders, partition, permute
from fedveil.data.plot import plot_partition
from fedveil.data.rows import Dataset
from fedveil.errors import UserError
from fedveil.keys import derive


def table(rows: int, classes: int | None = 4, groups: int | None = None, seed: int = 0) -> Dataset:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 3)).astype(np.float32)
    y = random.integers(0, classes, rows) if classes else random.normal(size=rows).astype(np.float32)
    task = "classification" if classes else "regression"
    owner = None if groups is None else random.integers(0, groups, rows)
    return Dataset("table", x, y, x[:1], y[:1], classes, task=task, groups=owner)


def all_rows(made):
    return [made.rows(i) for i in range(made.clients)]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["shards", "iid", "dirichlet", "groups"]),
    rows=st.integers(1, 300),
    clients=st.integers(1, 40),
    seed=st.integers(0, 2**40),
)
def test_disjoint_kinds_deal_out_every_row_exactly_once(kind, rows, clients, seed):
    data = table(rows, groups=5)
    made = partition(data, kind, clients, seed, min_size=0)
    parts = all_rows(made)
    assert made.clients == clients and made.copies == 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(rows))
    assert [len(p) for p in parts] == made.sizes.tolist()
    check_disjoint(made)
    again = partition(data, kind, clients, seed, min_size=0)
    assert all(np.array_equal(a, b) for a, b in zip(parts, all_rows(again), strict=True))


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["overlap", "iid", "copies"]),
    rows=st.integers(4, 200),
    clients=st.integers(1, 60),
    half=st.integers(1, 30),
    seed=st.integers(0, 2**40),
)
def test_overlapping_kinds_never_exceed_the_copies_they_state(kind, rows, clients, half, seed):
    size = min(2 * half, rows // 2 * 2)
    data = table(rows)
    made = partition(data, kind, clients, seed, examples_per_client=size)
    held = np.zeros(rows, int)
    for part in all_rows(made):
        assert len(part) == size == len(np.unique(part))
        assert part.min() >= 0 and part.max() < rows
        held[part] += 1
    assert held.max() <= made.copies
    again = partition(data, kind, clients, seed, examples_per_client=size)
    assert np.array_equal(made.rows(clients - 1), again.rows(clients - 1))


def test_overlap_serves_as_many_clients_per_deal_as_fit_and_states_the_copies():
    """The papers' figures: 500 examples each of 50,000 rows: every row is in N/100 clients."""
    data = table(50_000, classes=10)
    made = partition(data, "overlap", 1000)
    assert made.copies == 10
    held = np.bincount(np.concatenate(all_rows(made)), minlength=len(data))
    assert held.min() == held.max() == 10
    assert partition(data, "overlap", 100).copies == 1
    assert partition(data, "overlap", 101).copies == 2
    check_disjoint(partition(data, "overlap", 100))
    with pytest.raises(UserError, match="is held by client"):
        check_disjoint(made)


@pytest.mark.parametrize("kind", ["shards", "overlap"])
def test_two_label_shards_hold_few_classes(kind):
    data = table(20_000, classes=10)
    options = {"examples_per_client": 400} if kind == "overlap" else {}
    counts = class_counts(data, partition(data, kind, 50, **options))
    assert ((counts > 0).sum(axis=1) <= 4).all()  # a shard may straddle one class border
    assert (counts.sum(axis=1) == 400).all()
    assert len({tuple(row) for row in (counts > 0).tolist()}) > 10  # clients differ


def test_deals_reshuffle_so_that_overlapping_clients_are_not_copies_of_each_other():
    data = table(1000, classes=2)
    made = partition(data, "overlap", 40, examples_per_client=100)
    parts = [set(p.tolist()) for p in all_rows(made)]
    same_seat = [len(parts[i] & parts[i + 10]) for i in range(10)]
    assert max(same_seat) < 60


def test_seeds_and_clients_change_the_rows():
    data = table(500)
    for kind in ("shards", "iid", "dirichlet", "overlap", "copies"):
        extra = {"examples_per_client": 50} if kind in ("overlap", "copies") else {}
        a, b = (partition(data, kind, 5, seed, **extra).rows(0) for seed in (1, 2))
        assert not np.array_equal(np.sort(a), np.sort(b)), kind


def test_full_copies_give_everybody_everything():
    made = partition(table(30), "copies", 7)
    assert made.copies == 7
    assert all(np.array_equal(np.sort(p), np.arange(30)) for p in all_rows(made))


def test_sizes_are_kept_and_rows_left_over_stay_out():
    made = partition(table(30), "sizes", sizes=[3, 10, 5])
    assert made.sizes.tolist() == [3, 10, 5]
    check_disjoint(made)
    with pytest.raises(UserError, match="add up to 40"):
        partition(table(30), "sizes", sizes=[20, 20])
    with pytest.raises(UserError, match="3 sizes are given for 4 clients"):
        partition(table(30), "sizes", 4, sizes=[1, 1, 1])


def test_groups_are_one_client_each_are_never_mixed_when_split_nor_split_when_joined():
    data = table(400, groups=5)
    assert partition(data, "groups").clients == 5
    for part in all_rows(partition(data, "groups")) + all_rows(partition(data, "groups", 9)):
        assert len(np.unique(data.groups[part])) == 1
    joined = partition(data, "groups", 2)
    homes = [set(np.unique(data.groups[p]).tolist()) for p in all_rows(joined)]
    assert not homes[0] & homes[1] and homes[0] | homes[1] == set(range(5))


def test_groups_by_a_feature_column():
    data = table(60)
    data.x[:, 1] = np.arange(60) % 3
    made = partition(data, "groups", column=1)
    assert made.sizes.tolist() == [20, 20, 20]
    with pytest.raises(UserError, match="has no groups"):
        partition(data, "groups")
    with pytest.raises(UserError, match="column = 3"):
        partition(data, "groups", column=3)


def test_dirichlet_is_even_for_large_alpha_and_uneven_for_small():
    data = table(10_000)

    def spread(alpha):
        counts = class_counts(data, partition(data, "dirichlet", 10, 3, alpha=alpha, min_size=0))
        return float((counts / counts.sum(axis=0)).std())

    assert spread(1000.0) < 0.01 < 0.1 < spread(0.1)


def test_tiny_alpha_does_not_lose_rows():
    data = table(100)
    made = partition(data, "dirichlet", 5, 0, alpha=1e-6, min_size=0)
    assert made.sizes.sum() == 100
    assert "hold no rows" in made.note


def test_regression_targets_can_be_sharded_but_not_overlapped():
    data = table(100, classes=None)
    made = partition(data, "shards", 5)
    check_disjoint(made)
    assert class_counts(data, made).tolist() == [[20]] * 5
    for kind in ("dirichlet", "overlap"):
        with pytest.raises(UserError, match="needs classes"):
            partition(data, kind, 5)


def test_one_class_clients_are_reported_and_refused_on_request():
    data = table(200, classes=2)
    made = partition(data, "shards", 10, shards_per_client=1)
    assert "hold one class only" in made.note
    with pytest.raises(UserError, match=r"fewer than 2 classes.*first: client"):
        partition(data, "shards", 10, shards_per_client=1, min_classes=2)


def test_empty_clients_are_refused_unless_allowed():
    data = table(5)
    with pytest.raises(UserError, match=r"fewer than 1 rows.*min_size = 0"):
        partition(data, "iid", 8)
    assert "3 of 8 clients hold no rows" in partition(data, "iid", 8, min_size=0).note


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("shard", {}, "Did you mean 'shards'"),
        ("dirichlet", {"alhpa": 1}, "Did you mean 'alpha'"),
        ("dirichlet", {"alpha": 0}, "must be above 0"),
        ("dirichlet", {"alpha": float("nan")}, "must be above 0"),
        ("shards", {"clients": 0}, "clients = 0"),
        ("shards", {"shards_per_client": 0}, "shards_per_client = 0"),
        ("overlap", {"examples_per_client": 501}, "has 100 training rows"),
        ("overlap", {"examples_per_client": 11}, "not a multiple"),
        ("sizes", {}, "give sizes"),
    ],
)
def test_wrong_options_are_explained(kind, options, message):
    with pytest.raises(UserError, match=message):
        partition(table(100), kind, **options)


def test_holders_are_the_clients_that_hold_a_row():
    data = table(100)
    made = partition(data, "overlap", 30, examples_per_client=10)
    for row in (0, 17, 99):
        found = holders(made, row)
        assert len(found) <= made.copies == 3
        assert found.tolist() == [i for i in range(30) if row in made.rows(i)]


def test_a_million_clients_take_no_more_memory_than_a_thousand():
    data = table(2000)

    def peak(clients, kind):
        tracemalloc.start()
        made = partition(data, kind, clients, examples_per_client=50)
        for client in range(0, clients, clients // 20):
            made.rows(client)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    for kind in ("iid", "overlap"):
        small, large = peak(1000, kind), peak(1_000_000, kind)
        assert large < 1.5 * small + 100_000
    assert partition(data, "iid", 1_000_000, examples_per_client=50).copies == 25_000


def test_partitions_travel_to_worker_processes():
    for kind in KINDS:
        options = {"sizes": [5, 5]} if kind == "sizes" else {}
        if kind == "overlap":
            options = {"examples_per_client": 10}
        data = table(60, groups=2)
        made = partition(data, kind, 2, **options)
        moved = pickle.loads(pickle.dumps(made))
        assert np.array_equal(moved.rows(1), made.rows(1))


def test_unknown_clients_are_index_errors():
    made = partition(table(10), "iid", 2)
    for client in (-1, 2):
        with pytest.raises(IndexError):
            made.rows(client)


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 3000), seed=st.integers(0, 2**60))
def test_permute_is_a_permutation_and_values_do_not_depend_on_what_else_is_asked(count, seed):
    key = derive(seed, "test")
    whole = permute(key, count, np.arange(count))
    assert np.array_equal(np.sort(whole), np.arange(count))
    some = np.arange(0, count, 7)
    assert np.array_equal(permute(key, count, some), whole[some])


@pytest.mark.parametrize("count", [5, 12, 40])
def test_permute_sends_every_position_everywhere_equally_often(count):
    """Counts of (position, value) over keys, scaled, are chi-squared with (count-1)^2 degrees of freedom.
    Fixed keys; for truly random permutations the bound of 4.5 deviations fails in less than 1 of 10,000 cases."""
    trials = 3000
    seen = np.zeros((count, count))
    for seed in range(trials):
        seen[np.arange(count), permute(derive(seed, "chi"), count, np.arange(count))] += 1
    expected = trials / count
    statistic = ((seen - expected) ** 2 / expected).sum() * (count - 1) / count
    degrees = (count - 1) ** 2
    assert abs(statistic - degrees) < 4.5 * np.sqrt(2 * degrees)


def test_the_picture_is_written_and_wrong_names_are_refused(tmp_path):
    data = table(200)
    made = partition(data, "shards", 12)
    path = plot_partition(data, made, tmp_path / "new" / "p.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    plot_partition(
        table(100, classes=None), partition(table(100, classes=None), "iid", 3), tmp_path / "r.svg"
    )
    with pytest.raises(UserError, match="must end in"):
        plot_partition(data, made, tmp_path / "p.txt")
