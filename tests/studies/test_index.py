"""Every table and figure of the papers is listed, and what is listed can be planned."""

import pytest

from fedveil.errors import UserError
from fedveil.federation.config import make_config
from fedveil.protect.catalogue import get
from fedveil.studies import cells, settings
from fedveil.studies.index import catalogue, find
from fedveil.studies.reasons import REASONS
from fedveil.studies.runner import SMALL_BUDGET, plan

# Written from the papers by hand: paper -> (tables, figures); those in brackets are not experiments.
BY_HAND = {
    "p1": ("[1] 2 3 4 5 6 7", "[1a] 1b [2] 3 4 5"),
    "p2": ("[1] [2] 3 4 5 6 7 8 9 10 11", "[1] 2 3 4 5"),
    "p3": ("1 [2] 3 4 5 6 7 8 9 10 11", "[1] 2 3 4"),
    "p4": ("1", "[1] [2] 3 4 5"),
    "p5": ("[1] [2] [3] 4 5 6 7 8 9", "1 2 3 4 5 6"),
}


def by_hand():
    found = {}
    for paper, (tables, figures) in BY_HAND.items():
        for kind, names in (("table", tables), ("fig", figures)):
            for name in names.split():
                found[f"{paper}-{kind}{name.strip('[]')}"] = not name.startswith("[")
    return found


def test_the_list_is_complete_and_names_what_is_no_experiment():
    assert {name: bool(entry.cells) for name, entry in catalogue().items()} == by_hand()
    assert all(entry.note for entry in catalogue().values() if not entry.cells)


def test_figures_without_numbers_state_what_the_paper_says():
    for entry in catalogue().values():
        if entry.cells and entry.is_figure:
            assert entry.statement


# Cells counted by hand in the papers (accuracy and epsilon entries; notation left out); tables of times have ratios beside.
# P5's Table 4 has each of its 13 with two
# kinds of features, and two with the paper's network.
@pytest.mark.parametrize(
    ("name", "count"),
    [("p1-table2", 48), ("p1-table3", 20 + 15), ("p1-table4", 30), ("p1-table5", 30), ("p2-table10", 30 + 25),
     ("p3-table5", 125), ("p3-table9", 25 + 20), ("p4-table1", 16), ("p5-table4", 2 * 13 + 2), ("p5-table5", 24)],
)  # fmt: skip
def test_a_table_has_all_its_cells(name, count):
    assert len(catalogue()[name].cells) == count


def test_p2s_counts_of_a_fixed_variance_stand_there_in_both_readings_of_l2_max():
    """The same prints and the same run, counted with another S; recipes that do not follow the batch are counted by the bound."""
    counted = [cell for cell in catalogue()["p2-table7"].cells if cell.measure.startswith("fixed_variance:")]
    means = [cell for cell in counted if cell.row.endswith(", norm of the mean")]
    text = {(cell.row, cell.column): cell for cell in counted}

    def recipe(cell):
        return cell.row.split(", ")[1]

    assert {recipe(cell) for cell in means} == {"dp-dyns-l2max", "dp-dyns"}
    assert len(means) == sum(recipe(cell) in ("dp-dyns-l2max", "dp-dyns") for cell in counted) / 2
    for cell in counted:
        bound = dict(cell.job.settings).get("clip.bound", "linear:4:2" if cell.job.recipe == "dp-dyns" else 4.0)
        assert isinstance(bound, str) is (recipe(cell) in ("dp-dyns", "dp-dyns-c-decay"))
        assert dict(cell.job.settings)["fixed_variance"] == 6 * int(cell.row.partition("C=")[2].split()[0])
        assert (":bound:" in cell.measure) is (recipe(cell) in ("dp-baseline", "dp-dyns-c-decay"))
    for cell in means:
        other = text[cell.row.removesuffix(", norm of the mean"), cell.column]
        assert (cell.paper, cell.job) == (other.paper, other.job) and "l2max-mean" in cell.why
        assert cell.measure.replace(":mean:", ":single:") == other.measure
    assert len({cell.job for cell in counted if cell.job.dataset == "mnist"}) == 4


def test_every_reason_is_known_and_no_cell_appears_twice():
    for entry in catalogue().values():
        names = [(c.row, c.column) for c in entry.cells]
        assert len(set(names)) == len(names), entry.id
        assert all(key in REASONS for c in entry.cells for key in c.why)


def runs():
    for entry in catalogue().values():
        for job in entry.jobs():
            for level in (0, settings.LEVELS):
                small, _ = settings.shrink(job, level)
                yield small.train if isinstance(small, cells.Inference) else small


def test_every_run_is_a_valid_configuration_at_both_ends_of_the_ladder():
    seen = set()
    for job in runs():
        if isinstance(job, cells.Train | cells.Time) and job not in seen:
            seen.add(job)
            make_config({"recipe": job.recipe, "dataset": job.dataset, **dict(job.settings)})
        elif isinstance(job, cells.Attack):
            get(job.recipe)
    assert len(seen) > 500


def test_small_tables_fit_their_time_and_say_what_was_shrunk():
    for entry in catalogue().values():
        if not entry.cells:
            continue
        chosen = plan(entry, "small")
        assert chosen.seconds() <= SMALL_BUDGET, entry.id
        for planned in chosen.jobs:
            assert (planned.job == planned.printed and not planned.shrunk) or planned.shrunk, planned


def test_paper_scale_changes_nothing():
    chosen = plan(catalogue()["p3-table6"], "paper")
    assert all(p.job == p.printed and not p.shrunk and not p.skipped for p in chosen.jobs)


def test_shrinking_keeps_the_share_of_clients_per_round():
    job = next(j for j in catalogue()["p1-table2"].jobs() if dict(j.settings)["clients"] == 10000)
    before, after = dict(job.settings), dict(settings.shrink(job, 1)[0].settings)
    assert before["cohort_size"] / before["clients"] == after["cohort_size"] / after["clients"]
    assert after["cohort_size"] < before["cohort_size"]


@pytest.mark.parametrize(
    ("name", "column", "recipes"),
    [("p1-table4", "C=4", ["fed-cdp"]), ("p1-table5", "sigma=6", ["fed-cdp"]),
     ("p3-table5", "C=4", ["fed-sdp", "fed-cdp", "fed-alpha-cdp"])],
)  # fmt: skip
def test_a_sweep_shares_its_default_with_the_tables_that_do_not_vary_it(name, column, recipes):
    shared = {job for job in catalogue()["p3-table6"].jobs() if isinstance(job, cells.Train)}
    found = [cell.job for cell in catalogue()[name].cells if cell.column == column]
    assert set(found) <= shared and sorted({job.recipe for job in found}) == sorted(recipes)
    for recipe in map(get, recipes):
        assert set(recipe.clip.bound.values(10)) == {4.0} and set(recipe.sigma.values(10)) == {6.0}


def test_a_wrong_id_names_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'p1-table6'"):
        find("p1-tabel6")


def test_a_table_that_is_no_experiment_is_refused_with_the_reason():
    with pytest.raises(UserError, match="not an experiment"):
        find("p5-table2")


def test_equal_settings_have_equal_keys_and_a_seed_changes_only_seeded_ones():
    a = cells.Train("fed-cdp", "mnist", cells.changes({"rounds": 3, "clients": 2}))
    b = cells.Train("fed-cdp", "mnist", cells.changes({"clients": 2}, rounds=3))
    assert cells.key_of(a, 0) == cells.key_of(b, 0) != cells.key_of(a, 1)
    e = cells.Epsilon("moments", 10)
    assert cells.key_of(e, 0) == cells.key_of(e, 1)


def test_the_settings_of_p5s_cifar10_are_the_planners():
    from fedveil.federation import planner

    for features, known in (("own", planner.KNOWN), ("public", planner.PUBLIC)):
        for epsilon in settings.PLANNED_STEPS:
            proposal = planner.plan(known["cifar10"], epsilon=float(epsilon), clients=10, observer="server")
            ours = settings.planned(epsilon, features)
            theirs = planner.config_of(proposal, known["cifar10"], "cifar10")
            assert {k: ours[k] for k in ("rounds", "learning_rate", "features", "average", "batch_size", "local_steps")} == {
                k: theirs[k] for k in ("rounds", "learning_rate", "features", "average", "batch_size", "local_steps")
            }
            assert {k: ours[k] for k in theirs["protect"]} == theirs["protect"]


def test_p5s_runs_by_clients_and_rate_have_the_same_runs_without_noise():
    cells = catalogue()["p5-fig3"].cells
    plain = {(cell.row, cell.column): cell.job for cell in cells if "without noise" in cell.row}
    noised = [cell for cell in cells if "without noise" not in cell.row]
    assert len(plain) == len(noised) == 16
    for cell in noised:
        control = plain[cell.row.replace(", by", ", without noise, by"), cell.column]
        assert control.recipe == "non-private"
        same = ("clients", "batch_size", "rounds", "local_steps", "cohort_size", "model")
        one, two = dict(cell.job.settings), dict(control.settings)
        assert [one.get(name) for name in same] == [two.get(name) for name in same]
