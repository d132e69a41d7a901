"""Every table and figure of the papers is listed, and what is listed can be planned."""

from pathlib import Path

import pytest

from fedveil.errors import UserError
from fedveil.federation.config import load_config, make_config
from fedveil.protect.catalogue import get
from fedveil.studies import cells, runner, settings
from fedveil.studies.index import catalogue, find
from fedveil.studies.reasons import REASONS
from fedveil.studies.runner import SMALL_BUDGET, plan

KEPT = runner.finished(Path(__file__).parents[2] / "docs" / "reproduction")

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


def test_a_run_is_shrunk_by_its_rounds_alone_and_never_below_those_that_its_control_needs():
    changed = set()
    for entry in catalogue().values():
        for job in (one for one in entry.jobs() if isinstance(one, cells.Train)):
            for level in range(1, settings.LEVELS + 1):
                small = settings.shrink(job, level)[0]
                before, after = ({k: v for k, v in one.settings if k not in ("rounds", "evaluate_every")} for one in (job, small))
                assert before == after
                if small != job:
                    changed.add(settings.per_round(job))
                    assert dict(small.settings)["rounds"] >= settings.LEARNS[settings.per_round(job)]
    assert changed <= set(settings.LEARNS) and len(changed) > 5


def test_the_fewest_rounds_of_a_shrunk_run_are_those_after_which_a_kept_run_without_noise_has_learned():
    """Of all kept runs without noise with that batch and so many clients a round, from that round on."""
    held = set()
    for entry in catalogue().values():
        for job in (one for one in entry.jobs() if isinstance(one, cells.Train) and settings.per_round(one) in settings.LEARNS):
            line = KEPT.get(cells.key_of(settings.control(job), 0))
            goal = runner._goal(job, entry)
            if line is None or goal is None or "resnet18-gn" in str(job.settings):
                continue
            fewest = settings.LEARNS[settings.per_round(job)]
            late = [accuracy for r, accuracy in line["result"]["accuracies"] if r >= fewest]
            assert min(late) >= settings.needed(goal, job.dataset), (entry.id, job)
            held.add(settings.per_round(job))
    assert held == set(settings.LEARNS)


def test_guessing_the_larger_class_is_not_enough_for_a_control():
    assert settings.needed(0.843, "adult") > 0.7602 and settings.needed(0.98, "mnist") == pytest.approx(0.88)
    (row,) = [cell for cell in catalogue()["p2-table5"].cells if cell.row == "purchase-10, dp-baseline" and cell.column == "acc"]
    assert runner._goal(row.job, catalogue()["p2-table5"]) == 0.825  # not Purchase-50's
    cell = next(c for c in catalogue()["p1-table2"].cells if c.row == "fed-cdp" and c.column == "N=100, 10%")
    assert runner._goal(cell.job, catalogue()["p1-table2"]) == 0.954  # as that table prints it


def test_a_papers_own_rate_is_kept_without_noise_where_the_clip_did_not_set_it():
    job = next(c.job for c in catalogue()["p3-table5"].cells if c.column == "C=0.1")
    assert dict(settings.control(job).settings)["learning_rate"] == 0.05


def test_central_batches_and_p5s_sampling_rate_are_the_papers():
    """P2: B of a dataset; P5, 5.1: a twentieth of a client's rows in every step (UTKFace 4,000 rows, wind 126,700 hours)."""
    assert {d: s["batch_size"] for d, s in settings.CENTRAL.items()} == {
        "mnist": 600, "fashion_mnist": 600, "cifar10": 500, "lfw": 22, "location30": 100}  # fmt: skip
    rows = {"mnist": 60000, "medical_mnist": 6000, "cifar10": 40000, "utkface": 4000, "wind": 126700}
    for dataset, s in settings.UDP.items():
        assert s["batch_size"] * s["clients"] / rows[dataset] == pytest.approx(0.05, rel=0.01), dataset


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


def test_p5s_runs_by_clients_have_the_rates_that_were_chosen_for_so_many_on_set_aside_rows():
    """With two hundred clients batches are a twentieth of ten clients', and their rate would end in noise. The
    rates by sampling rate stay as they are."""
    rates = {}
    for cell in catalogue()["p5-fig3"].cells:
        one = dict(cell.job.settings)
        if "by clients" in cell.row:
            noised = cell.job.recipe == "udp-fl-staircase"
            rates.setdefault((cell.job.dataset, one["clients"]), {})[noised] = one["learning_rate"]
        else:
            assert one["learning_rate"] in (settings.UDP_RATE, settings.PLAIN_MOST)
    assert {which: (found[True], found[False]) for which, found in rates.items()} == settings.RATES_BY_CLIENTS
    longest = {d: max(r for (of, _), (r, _) in settings.RATES_BY_CLIENTS.items() if of == d) for d in ("mnist", "medical_mnist")}
    assert all(rate < settings.UDP[d]["learning_rate"] for d, rate in longest.items())
    assert all(plain <= settings.PLAIN_MOST for _, plain in settings.RATES_BY_CLIENTS.values())


def test_p5s_row_with_the_authors_optimiser_is_none_of_the_mechanisms_rows():
    """Its verdict takes the mean of all rows that begin with a dataset and a mechanism."""
    (row,) = [cell for cell in catalogue()["p5-fig4"].cells if "adam" in cell.row.lower()]
    (beside,) = [c for c in catalogue()["p5-fig4"].cells if c.row == "MNIST, Gaussian" and c.column == "ε=4"]
    assert not row.row.startswith(("MNIST, Gaussian", "MNIST, Laplace", "MNIST, Staircase", "MNIST, none"))
    differs = set(row.job.settings) ^ set(beside.job.settings)
    assert {name for name, _ in differs} == {"local_optimiser", "learning_rate"}
    assert dict(row.job.settings)["learning_rate"] == 0.01 and dict(row.job.settings)["local_optimiser"] == "adam"


PLUMBING = ("name", "report", "checkpoint_every", "evaluate_every")  # of a study's runner, not of a setting


@pytest.mark.parametrize(
    ("name", "dataset", "more"),
    [
        ("udp-fl-mnist-gaussian", "mnist", {}),
        ("udp-fl-medical-mnist", "medical_mnist", {}),
        ("udp-fl-cifar10", "cifar10", settings.RESNET),
        ("udp-fl-utkface", "utkface", {}),
        ("udp-fl-wind", "wind", {"aggregate": "scaffold"}),
    ],
)
def test_the_shipped_configurations_of_p5_are_the_settings_of_its_study(name, dataset, more):
    def decisive(config):
        return {key: value for key, value in config.model_dump().items() if key not in PLUMBING}

    shipped = load_config(name)
    given = {"recipe": "udp-fl-gaussian", "dataset": dataset, "target_epsilon": shipped.target_epsilon}
    studied = make_config(given, {**settings.UDP[dataset], **more})
    found, wanted = decisive(shipped), decisive(studied)
    recipes = [one.built_recipe() for one in (shipped, studied)]
    assert {**found, "protect": None} == {**wanted, "protect": None} and recipes[0] == recipes[1]


@pytest.mark.parametrize(("dataset", "batch"), [("cifar10", 500), ("lfw", 22), ("location30", 100), ("mnist", 600)])
def test_a_central_recipe_has_p2s_batch_and_one_client_for_whoever_names_the_dataset(dataset, batch):
    config = load_config("dp-baseline", [f"dataset={dataset}"])
    assert (config.batch_size, config.clients, config.cohort_size) == (batch, 1, None)
    assert config.batch_size == settings.CENTRAL[dataset]["batch_size"]


def test_the_reason_about_the_authors_scripts_names_what_anybody_can_check():
    text = REASONS["literal-noise"]
    for fact in ("multiplies its noise by 0", "has its clipping commented out", "the multiplier in both is 0.5"):
        assert fact in text
    assert "github.com/git-disl/Fed-CDP" in text and "learning rate" not in text


def test_no_reason_blames_the_learning_rate():
    """A rate is told where it is the authors' own, or a choice of ours that is told with what it was chosen on."""
    told = {key for key, text in REASONS.items() if "learning rate" in text}
    assert told == {"central-noise"} and "is that of the authors' published code" in REASONS["central-noise"]
