"""Every table and figure of the papers is listed, and what is listed can be planned."""

from pathlib import Path

import pytest

from fedveil.errors import UserError
from fedveil.federation.config import load_config, make_config
from fedveil.protect.catalogue import get
from fedveil.studies import cells, jobs, runner, settings
from fedveil.studies.build import exposed
from fedveil.studies.index import catalogue, find
from fedveil.studies.reasons import REASONS, explain
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


def test_p2s_falling_sigma_begins_where_the_text_of_each_figure_has_it():
    """Fig. 4 says 15; elsewhere "sigma = 6 is also used as the initial sigma value"."""
    fourth = {cell.row for cell in catalogue()["p2-fig4"].cells}
    assert "dp-dyn-s-sigma, sigma0 = 15" in fourth and "dp-dyn-s-sigma, sigma0 = 15, norm of the mean" in fourth
    assert get("dp-dyn-s-sigma").sigma.values(100)[0] == 15
    (table,) = {c.job.settings for c in catalogue()["p2-table3"].cells if c.row == "dp-dyn-s-sigma, noise on example"}
    (figure,) = {c.job.settings for c in catalogue()["p2-fig5"].cells if c.row == "dp-dyn-s-sigma, noise on example"}
    assert table == figure and dict(figure)["sigma"].startswith("linear:6:")


def test_p3s_table_of_resilience_shows_both_places_of_the_noise():
    found = [c for c in catalogue()["p3-table10"].cells if "success rate of type 2" in c.row]
    assert all(c.row.endswith((", noise on sum", ", noise on example")) or c.row.startswith("non-private") for c in found)
    assert len(found) == 7 and len({c.job for c in found if "on example" in c.row}) == 3


def test_random_noise_on_the_gradient_is_a_step_of_the_noise_on_the_update():
    """P3 Fig. 3: an attacked update is one step at its rate, so that the two names differ by that rate and nothing else."""
    jobs = {(c.row, c.column): dict(c.job.settings) for c in catalogue()["p3-fig3"].cells if isinstance(c.job, cells.Attack)}
    for dataset in ("MNIST", "LFW"):
        for tap in ("type0", "type1"):
            for variance in (1e-4, 1e-2):
                gradient, update = (jobs[f"random-noise on the {what}, variance {variance:g}, {tap}", dataset]
                                    for what in ("gradient", "update"))  # fmt: skip
                assert update["sigma"] == pytest.approx(variance**0.5) and "learning_rate" not in update
                assert gradient["sigma"] == pytest.approx(gradient["learning_rate"] * update["sigma"])
                rate = make_config({"recipe": "random-noise", "dataset": dataset.lower()}).learning_rate
                assert gradient["learning_rate"] == rate


def test_p4s_sweep_of_fractions_says_whose_number_of_clients_it_plays():
    swept = [c for c in catalogue()["p4-fig4"].cells if "fraction of clients" in c.row]
    assert len(swept) == 9 and all("caption-clients" in c.why for c in swept)


@pytest.mark.parametrize("name", ["p5-table8", "p5-table9"])
def test_every_attacked_model_has_its_own_accuracy_beside_what_was_read_from_it(name):
    entry = catalogue()[name]
    own = {c.row: c for c in entry.cells if c.column == "own task, test accuracy"}
    assert {c.job for c in own.values()} == {c.job.train for c in entry.cells if isinstance(c.job, cells.Inference)}
    assert len(own) == 14 and all(c.measure == "accuracy" and c.row.startswith("the attacked model, ") for c in own.values())
    rows = {c.row for c in entry.cells}
    assert any("untrained" in row for row in rows) and ("control: always the commoner answer" in rows) == (name == "p5-table8")


def test_every_model_whose_members_are_looked_for_has_its_accuracy():
    entry = catalogue()["p5-table6"]
    own = [c.job for c in entry.cells if c.column == "test accuracy"]
    assert len(own) == len(set(own)) == 26
    assert set(own) == {c.job.train for c in entry.cells if isinstance(c.job, cells.Inference)}
    assert {c.job for c in entry.cells if c.row.startswith("the model of all rows")} <= set(catalogue()["p5-table4"].jobs())


# What the figures of attacks show, and the rows of whole updates, from the papers by hand.
PLACES = (", noise on sum", ", noise on example")
FOUR_IMAGES = ("mnist", "fashion_mnist", "cifar10", "lfw")
PRUNED = [f"gradient-pruning {share}%" for share in (30, 40, 50, 80)]
NOISED = [f"random-noise on the update, variance {v}" for v in ("0.0001", "0.01")]
CDP = ["fed-cdp", "fed-cdp, noise on example", "fed-cdp, noise on example, C = σ = 1"]
OTHERS = ["non-private", "dssgd", "fed-sdp-client"]
WHOLE = ("distance", "distance, not clamped", "succeeds")


def places(names, columns):
    return {(name, column) for name in names for column in columns}


SHOWN_BY_HAND = {
    "p1-fig5": places(
        [f"{recipe}, {what}" for recipe in ("non-private", "fed-sdp-client") for what in ("SSIM of the attack", "accuracy")]
        + [f"{recipe}{place}, SSIM of the attack" for recipe in ("fed-cdp", "fed-cdp-decay") for place in PLACES]
        + [f"{recipe}, accuracy" for recipe in ("fed-cdp", "fed-cdp-decay")],
        [f"pruned {share}%" for share in (0, 10, 30, 50)],
    ),
    "p3-fig3": places([f"{row}, type{tap}" for row in PRUNED + NOISED + OTHERS + CDP for tap in (0, 1, 2)], ["MNIST", "LFW"])
    | places([f"random-noise on the gradient, variance {v}, type{tap}" for v in ("0.0001", "0.01") for tap in (0, 1)],
             ["MNIST", "LFW"])
    | {("gradient-pruning 90%, type0", "MNIST")}
    | places([f"{row}, accuracy" for row in PRUNED + NOISED + OTHERS + CDP], ["LFW"]),
    "p2-fig3": places(
        ["non-private", *(f"C={c}, sigma={s}, noise on example" for c in (1, 4) for s in (1, 6)),
         *(f"C={c}, sigma={s}, noise on sum" for c, s in ((1, 1), (4, 6)))],
        ["MNIST", "Fashion-MNIST", "CIFAR-10", "LFW"],
    ),
    "p2-fig5": places(
        ["non-private", *(f"{recipe}{place}" for recipe in ("dp-baseline", "quantile-clip", "adaclip", "dp-dyn-s-sigma")
                          for place in PLACES)],
        FOUR_IMAGES,
    ),
}  # fmt: skip
RECIPES = {  # what a row's name begins with, and the recipe that it is an attack on (one that leaves the same tensors)
    "gradient-pruning": "gradient-pruning", "random-noise": "random-noise", "dssgd": "dssgd", "fed-sdp-client": "fed-sdp-client",
    "fed-cdp-decay": "fed-cdp-decay", "fed-cdp": "fed-cdp", "non-private": "non-private", "C=": "fed-cdp",
    "dp-baseline": "fed-cdp", "quantile-clip": "fed-cdp", "adaclip": "adaclip", "dp-dyn-s-sigma": "dp-dyn-s-sigma",
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN_BY_HAND)
def test_a_figure_of_attacks_shows_what_the_paper_shows(name):
    entry = catalogue()[name]
    assert {(c.row, c.column) for c in entry.cells} == SHOWN_BY_HAND[name]
    shown = {"mnist": "mnist", "fashion-mnist": "fashion_mnist", "fashion_mnist": "fashion_mnist", "cifar-10": "cifar10"}
    for cell in (c for c in entry.cells if isinstance(c.job, cells.Attack)):
        column = cell.column.lower()
        assert cell.job.dataset == ("mnist" if name == "p1-fig5" else shown.get(column, column))
        tap = "type2" if name != "p3-fig3" else cell.row.rsplit(", ", 1)[1]
        wanted = RECIPES[next(known for known in RECIPES if cell.row.startswith(known))]
        if tap == "type2" and wanted in ("gradient-pruning", "random-noise", "dssgd", "fed-sdp-client") and name != "p1-fig5":
            wanted = "non-private"
        same = {exposed(wanted, tap, dict(cell.job.settings)), (wanted, tap)}
        same |= {("fed-cdp-example", tap)} if name == "p2-fig3" else set()
        same |= {("fed-cdp", tap)} if cell.row == "dp-dyn-s-sigma, noise on sum" else set()
        assert (cell.job.recipe, cell.job.tap) in same, cell
        on_example = dict(cell.job.settings).get("noise_on") == "example" or cell.job.recipe == "fed-cdp-example"
        assert on_example == ("noise on example" in cell.row), cell


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("p1-table7", [f"type0&1, {recipe}" for recipe in ("non-private", "fed-sdp-client", "fed-cdp", "fed-cdp-decay")]),
        ("p3-table3", [
            *(f"type0, {recipe}" for recipe in ("non-private", "fed-sdp, as received", "fed-sdp, sanitised", "fed-sdp-client",
                                                "quantile-clip", "adaclip", "fed-alpha-cdp-sigma")),
            *(f"type1, {recipe}" for recipe in ("non-private", "fed-sdp", "fed-sdp-client, before its noise",
                                                "fed-sdp-client, after its noise", "quantile-clip", "adaclip",
                                                "fed-alpha-cdp-sigma")),
        ]),
    ],
)  # fmt: skip
def test_every_attack_on_an_update_is_shown_on_a_whole_round_of_the_papers_training_too(name, rows):
    found = [c for c in catalogue()[name].cells if "L = 100, B = 5" in c.column]
    columns = ("MNIST distance, L = 100, B = 5", "MNIST distance, L = 100, B = 5, not clamped", "MNIST succeeds, L = 100, B = 5")
    assert {(c.row, c.column) for c in found} == places(rows, columns)
    for cell in found:
        assert (cell.job.dataset, cell.job.batch, dict(cell.job.settings)["local_steps"]) == ("mnist", 5, 100)
        assert cell.job.tap.startswith(("type0", "type1"))


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
    cells = [cell for cell in catalogue()["p5-fig3"].cells if cell.measure == "accuracy"]
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
            assert one["learning_rate"] in (settings.UDP_RATE, *settings.PLAIN_MOST.values())
    assert {which: (found[True], found[False]) for which, found in rates.items()} == settings.RATES_BY_CLIENTS
    longest = {d: max(r for (of, _), (r, _) in settings.RATES_BY_CLIENTS.items() if of == d) for d in ("mnist", "medical_mnist")}
    assert all(rate < settings.UDP[d]["learning_rate"] for d, rate in longest.items())
    assert all(plain <= max(settings.PLAIN_MOST.values()) for _, plain in settings.RATES_BY_CLIENTS.values())


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


@pytest.mark.parametrize(("name", "rows"), [("ldp-fl-mnist", 60000), ("ldp-fl-fashion-mnist", 60000), ("ldp-fl-cifar10", 40000)])
def test_the_shipped_configurations_of_p4_are_one_local_epoch_of_what_a_client_has(name, rows):
    config = load_config(name)
    assert config.local_steps * config.batch_size * config.clients == rows


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
    assert told == {"central-noise"} and "is that of P1's authors' published code" in REASONS["central-noise"]
    assert "github.com/git-disl/Fed-CDP" in REASONS["central-noise"] and "P2 gives none" in REASONS["central-noise"]


def used(table, words=""):
    """Reasons of the cells with a word in their row or column, those with none of them apart."""
    return [set(c.why) for c in catalogue()[table].cells if words in f"{c.row} ¦ {c.column}"]


def test_what_our_runs_have_otherwise_than_the_paper_is_said_where_it_applies():
    for table in ("p5-fig1", "p5-fig3", "p5-fig4", "p5-fig6"):
        assert all({"udp-optimiser", "medical-subset"} <= why for why in used(table, "Medical")), table
        others = [c for c in catalogue()[table].cells if "Medical" not in c.row and "Adam" not in c.row]
        assert all("udp-optimiser" in c.why and "medical-subset" not in c.why for c in others), table
    assert all("udp-optimiser" in why for why in used("p5-fig5"))
    assert all("utkface-subset" in why for why in used("p5-table8", "ε="))
    for table in ("p2-table4", "p2-table5", "p2-table6", "p2-table11"):
        ran = [c for c in catalogue()[table].cells if isinstance(c.job, cells.Train)]
        for cell in ran:
            assert ("cifar-subset" in cell.why) == (cell.job.dataset == "cifar10"), cell
    for table in (f"p{paper}-table{n}" for paper, numbers in ((1, (2, 4, 5)), (3, (4, 5, 6, 8, 10, 11))) for n in numbers):
        for cell in catalogue()[table].cells:
            if isinstance(cell.job, cells.Train):
                bare = cell.job.recipe.startswith(("non-private", "fed-sdp"))
                assert ("mildest" in cell.why) != bare, cell


def shown(cell):
    """The reasons of a cell as a page has them."""
    return " ".join(explain(cell.why, cell.job))


def test_a_reason_has_the_rate_and_the_epochs_of_the_run_that_it_is_printed_beside():
    """P5 Fig. 3 has a rate for each number of clients; P4 plays other local epochs than five, too."""
    for table in ("p5-fig1", "p5-fig3", "p5-fig5", "p5-table8", "p5-table9"):
        for cell in (c for c in catalogue()[table].cells if "udp-optimiser" in c.why):
            run = cell.job.train if isinstance(cell.job, cells.Inference) else cell.job
            assert f"here at a rate of {dict(run.settings)['learning_rate']:g}" in shown(cell), cell
            assert ("no clip" in shown(cell)) == (run.recipe == "non-private"), cell
    rates = {shown(c).partition("here at a rate of ")[2][:3] for c in catalogue()["p5-fig3"].cells if "by clients" in c.row}
    assert len(rates) > 2
    rows = {"mnist": 60000, "fashion_mnist": 60000, "cifar10": 40000}
    for cell in (c for table in ("p4-table1", "p4-fig3", "p4-fig4", "p4-fig5") for c in catalogue()[table].cells):
        s = dict(cell.job.settings)
        epochs = s["local_steps"] * s["batch_size"] * s["clients"] / rows[cell.job.dataset]
        assert epochs == (20 if "20 local epochs" in cell.row else 5), cell
        assert f"E = {epochs:g} local epochs" in shown(cell) or "ldp-model" not in cell.why, cell
        assert ("inputs are standardised" in shown(cell)) == (cell.job.dataset == "fashion_mnist"), cell
        assert ("first ranges are those" in shown(cell)) == (s.get("prior") == "model"), cell
    assert {c.why for c in catalogue()["p4-fig5"].cells if "without noise" in c.row} != {("no-numbers",)}


def test_what_is_known_of_adaclip_on_a_dataset_is_said_of_that_dataset():
    for table in ("p2-table11", "p3-table10"):
        for cell in (c for c in catalogue()[table].cells if c.row.startswith("adaclip, accuracy")):
            central = table == "p2-table11"
            assert ("Cancer" in shown(cell)) == (not central), cell
            assert ("row with hardly any noise" in shown(cell)) == (central and cell.column == "mnist"), cell


def test_an_accuracy_beside_a_printed_epsilon_says_where_the_runs_own_is_another_one():
    """By hand: rows of a step over the distinct rows that there are; the papers' own accountant at sigma = 6."""
    from fedveil.privacy.papers import table_epsilon

    for name, taken, rows, steps, printed in (
        ("cancer", 100 * 4, 426, 300, "0.147"), ("lfw", 100 * 3, 2267, 6000, "0.636"), ("purchase", 100, 4008, 5000, "0.580"),
    ):  # fmt: skip
        said = REASONS[f"own-q-{name}"]
        epsilon = table_epsilon("moments", 6.0, taken / rows, steps, 1e-5)
        assert f"q = {taken / rows:.2g} " in said and f"{epsilon:.3g}; at q = 0.01 it is {printed}" in said
    for table, columns in (("p3-table6", ("Cancer", "LFW")), ("p3-table7", ("Cancer", "LFW")), ("p3-table8", ("Cancer", "LFW"))):
        for cell in catalogue()[table].cells:
            if isinstance(cell.job, cells.Train) and cell.job.recipe not in ("non-private", "fed-sdp"):
                assert any(key.startswith("own-q-") for key in cell.why) == cell.column.startswith(columns), cell
    for table in ("p2-table5", "p2-table6"):
        for cell in catalogue()[table].cells:
            if isinstance(cell.job, cells.Train):
                assert ("own-q-purchase" in cell.why) == (cell.job.dataset == "location30"), cell


def test_the_row_of_what_a_bound_does_alone_clips_each_example_as_the_rows_below_it():
    """A recipe that sends plain updates takes `clip.kind` too, but for its updates: it trains the very model of the row above."""
    found = [cell for cell in catalogue()["p2-table4"].cells if "hardly any noise" in cell.row and cell.column == "C=4"]
    assert len(found) == 5
    for cell in found:
        dataset = cell.row.split(",")[0]
        noised = next(c for c in catalogue()["p2-table4"].cells if (c.row, c.column) == (f"{dataset}, dp-baseline", "C=4"))
        one, two = (jobs._config(each.job, 0).built_recipe() for each in (cell, noised))
        assert one.place.in_steps and one.clip == two.clip and one.clip.bounded
        assert one.sigma.value(0, 1) < 0.01 * two.sigma.value(0, 1)
