"""One budget for any mechanism, NbAFL's own scales, and the noise errors that a run shows."""

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedveil.data.rows import Dataset
from fedveil.errors import UserError
from fedveil.federation.config import load_config
from fedveil.federation.harmonize import events_of, expected_participations, most_participations
from fedveil.federation.loop import (
    _planned,
    affordable,
    cohort_of,
    header_of,
    play_round,
    prepare,
    release_of,
)
from fedveil.federation.loop import run as simulate
from fedveil.federation.round import moment_of, noise_errors, plan_of, sanitise_update, start
from fedveil.federation.store import open_run
from fedveil.privacy.accountants import answer
from fedveil.privacy.events import Event, Noise, Sampling
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.papers import table_epsilon
from fedveil.protect import noise, udp
from fedveil.protect.batches import cohort
from fedveil.studies.settings import UDP

SMALL = ["dataset=cancer", "clients=4", "rounds=5", "local_steps=4", "batch_size=20"]


def prepared(name, *changes):
    return prepare(load_config(name, [*SMALL, *changes]))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("udp-fl-gaussian", []),
        ("udp-fl-laplace", []),
        ("udp-fl-laplace", ["clip.norm=l1"]),
        ("udp-fl-staircase", []),
        ("udp-fl-staircase-joint", []),
        ("udp-fl-staircase-iid", []),
    ],
    ids=["gaussian", "laplace-l2", "laplace-l1", "narrow-staircase", "joint-staircase", "staircase"],
)
def test_all_mechanisms_are_calibrated_to_the_same_epsilon(name, changes):
    run = prepared(name, "calibrate=true", "target_epsilon=4", *changes)
    sigma = run.task.recipe.sigma.value(0, 5)
    size = min(run.partition.size(c) for c in range(4))
    events = events_of(run.task, run.config, sigma, expected_participations(run.task), size)
    found = answer(events, run.config.delta, "pld")
    if found.epsilon is None:
        found = answer(events, run.config.delta, "rdp")
    assert 3.99 < found.epsilon <= 4.0


COHORT = ["clients=20", "cohort_size=3", "rounds=12", "local_steps=2", "batch_size=4", "model=logistic", "calibrate=true",
          "target_epsilon=3", "report=false"]  # fmt: skip


def drawn(config, rounds=12):
    """How often each client of a seeded run takes part."""
    draws = [cohort("fixed", config.clients, config.cohort_size, config.seed, number) for number in range(1, rounds + 1)]
    return np.bincount(np.concatenate(draws), minlength=config.clients)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["udp-fl-gaussian", "udp-fl-staircase"])
def test_a_calibrated_run_with_a_cohort_plays_its_last_round_within_the_target(name, seed, tmp_path):
    config = load_config(name, ["dataset=cancer", "partition=iid", *COHORT, f"seed={seed}"])
    result = simulate(config, tmp_path / "run")
    assert (result["rounds"], result["stopped"]) == (12, "all rounds done")
    (row,) = (r for r in result["ledger"] if (r["observer"], r["unit"], r["verdict"]) == ("server", "example", "sound"))
    most = int(drawn(config).max())
    assert most > expected_participations(prepare(config).task) == 2
    # The same by the accountant alone: the client drawn most often, with as few rows as any.
    run = prepare(config)
    sigma, sizes = run.task.recipe.sigma.value(0, 12), run.partition.sizes
    by = "pld" if name == "udp-fl-gaussian" else "rdp"
    events = [events_of(run.task, run.config, sigma, rounds, int(sizes.min()), int(sizes.max())) for rounds in (most, most + 1)]
    paid = [answer(one, 1e-5, by).epsilon for one in events]
    assert row["epsilon"] <= paid[0] * (1 + 1e-8) and 2.99 < paid[0] <= 3.0 < paid[1]
    assert f"up to {most} uploads in 12 rounds" in " ".join(run.notes)


def test_a_calibrated_run_in_which_every_client_holds_every_row_plays_its_last_round_too(tmp_path):
    config = load_config("udp-fl-gaussian", ["dataset=cancer", "partition=copies", *COHORT])
    result = simulate(config, tmp_path / "run")
    assert (result["rounds"], result["stopped"]) == (12, "all rounds done")
    assert most_participations(prepare(config).task, config) == 36 == drawn(config).sum()  # each upload tells of each row


def test_secret_coins_are_calibrated_for_what_is_hardly_ever_exceeded(tmp_path):
    """0.001 of runs draw some client more often: in 2,000 of other keys at most 11 but once in a million."""
    config = load_config("udp-fl-gaussian", ["dataset=cancer", "partition=iid", *COHORT, "secure_noise=true"])
    runs = [prepare(config) for _ in range(2)]
    most = most_participations(runs[0].task, config)
    assert len({run.task.recipe.sigma.value(0, 12) for run in runs}) == 1  # a run that is continued keeps its noise
    seen = [drawn(config.model_copy(update={"seed": seed})).max() for seed in range(1, 2001)]
    assert sum(count > most for count in seen) <= 11 and max(seen) >= most - 1
    assert "by chance (below 0.001), the run ends before its last round" in " ".join(runs[0].notes)
    whole = ["partition=iid", "clients=4", *COHORT[2:], "secure_noise=true"]
    assert "by chance" not in " ".join(prepare(load_config("udp-fl-gaussian", ["dataset=cancer", *whole])).notes)


@pytest.mark.parametrize(("drawn_clients", "uploads"), [(1, 12), (3, 36)])
def test_secret_coins_tell_of_a_shared_row_no_more_often_than_uploads_are_sent(drawn_clients, uploads):
    """Ten clients hold every row; fixed cohorts send so many uploads a round, whoever is drawn."""
    changes = ["dataset=cancer", "partition=copies", *COHORT, f"cohort_size={drawn_clients}", "secure_noise=true"]
    config = load_config("udp-fl-gaussian", changes)
    run = prepare(config)
    assert most_participations(run.task, config) == uploads and "by chance" not in " ".join(run.notes)


def test_a_note_of_calibration_names_the_unit_that_it_is_about():
    few = ["dataset=cancer", "partition=iid", *COHORT]
    assert "for one client about which up to" in " ".join(prepare(load_config("fed-sdp-client", few)).notes)
    assert "for one example about which up to" in " ".join(prepare(load_config("udp-fl-gaussian", few)).notes)


def test_a_committed_plan_of_secret_coins_is_calibrated_for_everybody_in_every_round(tmp_path):
    few = ["dataset=cancer", "partition=iid", *COHORT, "rounds=4", "validation=0.2", "target_accuracy=1.0", "secure_noise=true"]
    config = load_config("fed-cdp-sound", few)
    assert most_participations(prepare(config).task, config) == 4
    assert simulate(config, tmp_path / "run")["rounds"] == 4


def test_the_setting_of_p5s_figure_3_lasts_for_all_of_its_rounds(tmp_path):
    """50 clients, 5 in each of 150 rounds, Staircase noise: charged as in a run, without training."""
    x, y = np.zeros((60000, 2), np.float32), np.arange(60000) % 10
    given = {**UDP["mnist"], "clients": 50, "cohort_size": 5, "batch_size": 60, "target_epsilon": 5.0}
    config = load_config("udp-fl-staircase", {**given, "dataset": "mnist", "model": "logistic", "features": None})
    run = prepare(config, Dataset("mnist", x, y, x[:10], y[:10], 10))
    most = int(drawn(config, 150).max())
    assert most > 15
    state = start(run.task, run.initial)
    with Ledger.create(tmp_path / "ledger", header_of(run)) as ledger:
        for index in range(150):
            now = moment_of(run.task, replace(state, round=index))
            clients, ended = affordable(run, ledger, now, cohort_of(run, now.number))
            assert not ended, (index, ended)
            ledger.spend(release_of(run, now, clients))
        assert 4.9 < ledger.epsilon("server", "example") <= 5.0
        assert ledger.participations().max() == most


@pytest.mark.parametrize(("lam", "nu"), [(0.5, None), (1.0, 0.3), (3.0, None)])
def test_the_staircase_histogram_is_its_density_with_the_true_lambda(lam, nu):
    draws = np.abs(noise.staircases(b"staircase-key-00", 0, 1_000_000, lam, nu).astype(np.float64))
    shape, b = (1 / (1 + math.exp(lam / 2)) if nu is None else nu), math.exp(-lam)
    height = -math.expm1(-lam) / (2 * (shape + b * (1 - shape)))
    periods = int(6 / lam) + 1
    edges = np.array([k + part for k in range(periods) for part in (0.0, shape)] + [float(periods)])
    density = np.array([height * math.exp(-lam * (k + part)) for k in range(periods) for part in (0, 1)])
    expected = 2 * density * np.diff(edges) * len(draws)
    counts = np.histogram(draws, edges)[0]
    # Each count is within 5.5 of its deviation but for one seed in 1e6.
    assert (np.abs(counts - expected) < 5.5 * np.sqrt(expected)).all()
    per_period = counts.reshape(periods, 2).sum(axis=1)
    fitted = math.log(per_period[0] / per_period[1])
    assert fitted == pytest.approx(lam, abs=5 * math.sqrt(1 / per_period[0] + 1 / per_period[1]))


@pytest.mark.parametrize(
    "name",
    [
        "udp-fl-gaussian",
        "udp-fl-laplace",
        "udp-fl-staircase",
        "udp-fl-staircase-joint",
        "udp-fl-staircase-iid",
    ],
)
def test_the_measured_error_is_the_distance_to_the_update_without_noise(name):
    """With one local step nothing follows from the noise but the noise itself."""
    noisy = prepared(name, "sigma=3", "local_steps=1", "sampling=full")
    still = prepared(name, "sigma=0.02", "local_steps=1", "sampling=full")
    state = start(noisy.task, noisy.initial)
    one = np.array([0])
    ends = [play_round(run, state, one)[0].weights.astype(np.float64) for run in (noisy, still)]
    distance = float(np.abs(ends[0] - ends[1]).sum())
    _, facts, private = play_round(noisy, state, one)
    assert private["measured_l1"] == pytest.approx(distance, rel=2e-2)
    assert facts["expected_l1"] == pytest.approx(facts["expected_l1_bound"])  # one addition
    assert "measured_l1" not in facts  # what the noise was stays private


@pytest.mark.parametrize(
    "name", ["udp-fl-gaussian", "udp-fl-laplace", "udp-fl-staircase", "udp-fl-staircase-iid"]
)
def test_expected_and_measured_errors_of_a_round_agree(name):
    run = prepared(name, "sigma=3", "model=papers-mlp", "local_steps=16")
    now = moment_of(run.task, start(run.task, run.initial))
    told = noise_errors(run.task, now, 0, run.partition.size(0))
    # Thousands of coordinates: the mean of their sizes is within 10 % but for far less than 1e-6 of seeds.
    assert told["measured_l1"] == pytest.approx(told["expected_l1"], rel=0.1)
    assert told["expected_l1"] < told["expected_l1_bound"] / 3  # sums grow by the root of the steps


@pytest.mark.parametrize(
    "changes", [["noise_on=mean"], ["sensitivity=l2-max"], ["sigma=linear:4:2:iteration"]]
)
def test_no_error_is_stated_where_the_formulas_do_not_apply(changes):
    run = prepared("fed-cdp", *changes)
    now = moment_of(run.task, start(run.task, run.initial))
    assert noise_errors(run.task, now, 0, run.partition.size(0)) == {}


@pytest.mark.parametrize("change", ["local_optimiser=adam", "smoothness=10"])
def test_no_error_is_stated_for_updates_that_are_no_multiple_of_their_gradients(change):
    for name, kept in (("udp-fl-gaussian", set()), ("udp-fl-staircase", {"extra_rounds_order"})):
        run = prepared(name, change)
        now = moment_of(run.task, start(run.task, run.initial))
        assert set(noise_errors(run.task, now, 0, run.partition.size(0))) == kept


def test_nbafl_uses_its_own_scales_for_its_epsilon():
    run = prepared("nbafl", "epsilon=8", "clip.bound=2", "exposures=1")
    smallest = min(run.partition.size(c) for c in range(4))
    up, down = udp.nbafl_scales(8.0, run.config.delta, 2.0, smallest, 4, 5, 1)
    assert run.task.recipe.sigma.value(0, 5) * 2 == pytest.approx(up)
    assert run.task.recipe.downlink_sigma * 2 == pytest.approx(down)
    assert down > 0  # 5 rounds are more than one exposure times sqrt(4)
    every = prepared("nbafl", "epsilon=8", "clip.bound=2")
    assert every.task.recipe.sigma.value(0, 5) * 2 == pytest.approx(5 * up)
    assert every.task.recipe.downlink_sigma == 0
    assert any("nbafl" in note for note in every.notes)


def test_nbafl_clips_the_whole_model_and_charges_twice_the_bound():
    run = prepared("nbafl", "sigma=1e-9", "clip.bound=0.5")
    state = start(run.task, run.initial)
    now = moment_of(run.task, state)
    update = np.full(run.task.layout.size, 0.3, np.float32)
    assert np.linalg.norm(state.weights + update) > 0.5
    sent = sanitise_update(run.task, now, update, 0, state.weights)
    whole = (state.weights + sent).astype(np.float64)
    assert np.linalg.norm(whole) == pytest.approx(0.5, rel=1e-5)
    direction = (state.weights + update) / np.linalg.norm(state.weights + update)
    np.testing.assert_allclose(whole, 0.5 * direction, atol=1e-6)
    events = events_of(run.task, run.config, 1.0, 1, 100)
    ((relation, z),) = {(e.relation, e.noise.multiplier) for e in events}
    assert relation == "replace-one" and z == pytest.approx(0.5, rel=1e-3)
    assert plan_of(run.task, now, 0, 100).clip == "none"  # nothing is clipped inside local training


def test_the_anchor_is_the_model_of_the_weakest_client_among_those_present():
    run = prepared("udp-fl-gaussian", "client_epsilons=[8, 2, 4, 6]", "heterogeneity=true")
    state = start(run.task, run.initial)
    after, _, _ = play_round(run, state, np.array([1, 2, 3]))  # client 0, the weakest of all, is not there
    alone, _, _ = play_round(run, state, np.array([3]))
    np.testing.assert_allclose(after.anchor.weights, alone.weights, atol=1e-6)


def test_the_pull_is_measured_from_the_weakest_client_present_and_its_own_is_none():
    run = prepared("udp-fl-gaussian", "client_epsilons=[8, 2, 4, 6]", "heterogeneity=true")
    after, _, _ = play_round(run, start(run.task, run.initial), np.array([1, 2, 3]))
    now = moment_of(run.task, after)
    pulls = [plan_of(run.task, now, client, 100).penalty for client in range(4)]
    assert pulls == pytest.approx([0, 4 / 6, 2 / 6, 0])  # client 3 is the weakest that was there; 0 is weaker still
    assert moment_of(run.task, start(run.task, run.initial).restored(after.memory())).weakest == pytest.approx(6)


def test_an_infinite_budget_is_no_protection_and_no_penalty_is_infinite():
    run = prepared("udp-fl-gaussian", "client_epsilons=[inf, 2]", "heterogeneity=true")
    after, _, _ = play_round(run, start(run.task, run.initial), np.arange(4))
    now = moment_of(run.task, after)
    plans = [plan_of(run.task, now, client, 100) for client in (0, 1)]
    assert (plans[0].noised, plans[0].clip, plans[0].penalty) == ((), "none", 0.0)
    assert plans[1].law.name == "gaussian" and plans[1].penalty == 1.0
    header = header_of(run)
    assert {budget.client for budget in header.budgets} == {1, 3}


@pytest.mark.parametrize("clip", ["flat", "layer"])
def test_a_round_of_clients_with_and_without_protection_is_played_and_its_norms_are_those_of_clipped_gradients(clip):
    run = prepared("udp-fl-gaussian", "client_epsilons=[inf, 2]", f"clip.kind={clip}")
    state = start(run.task, run.initial)
    _, facts, private = play_round(run, state, np.arange(4))
    assert facts["uploads"] == 4 and len(private["client_loss"]) == 4
    _, _, only = play_round(run, state, np.array([1, 3]))
    if clip == "flat":  # an unprotected client has norms per layer, which are no norms of the whole
        assert private["norm_max"] == only["norm_max"] and private["norm_mean"] == only["norm_mean"]
    else:
        assert len(private["norm_max"]) == run.task.layout.layers
        assert all(both >= own for both, own in zip(private["norm_max"], only["norm_max"], strict=True))


def test_a_run_with_an_infinite_budget_is_written_read_and_reported(tmp_path):
    config = load_config("udp-fl-gaussian", [*SMALL, "rounds=1", "client_epsilons=[inf, 2]"])
    simulate(config, tmp_path / "run")
    assert open_run(tmp_path / "run").config == config
    rows = simulate(config, tmp_path / "run", resume=True)["ledger"]
    found = [row for row in rows if (row["observer"], row["unit"]) == ("server", "example")]
    assert "none" in {row["verdict"] for row in found} and "sound" not in {row["verdict"] for row in found}


def test_a_nominal_row_says_whom_it_is_about_where_some_clients_have_no_noise(tmp_path):
    def nominal(budgets):
        changes = ["rounds=1", "report=false", f"client_epsilons={budgets}"]
        rows = simulate(load_config("udp-fl-gaussian", [*SMALL, *changes]), tmp_path / budgets)["ledger"]
        return {row["unit"]: row["reason"] for row in rows if row["observer"] == "server" and row["verdict"] == "nominal"}

    mixed = nominal("[inf, 2]")
    said = "for clients 1, 3 alone, nothing is counted of clients 0, 2 (no noise is added)"
    assert set(mixed) == {"example", "client"} and all(said in reason for reason in mixed.values())
    assert not any("alone" in reason for reason in nominal("[4, 2]").values())


def test_a_nominal_row_counts_nothing_of_clients_with_another_law(tmp_path):
    changes = ["rounds=1", "report=false", "client_epsilons=[2]", 'client_mechanisms=["gaussian", "laplace"]']
    rows = simulate(load_config("udp-fl-gaussian", [*SMALL, *changes]), tmp_path / "run")["ledger"]
    (shown,) = [row for row in rows if (row["observer"], row["unit"], row["verdict"]) == ("server", "example", "nominal")]
    assert "for clients 0, 2 alone, nothing is counted of clients 1, 3" in shown["reason"]
    assert "(" not in shown["reason"].split("clients 1, 3")[1].split(";")[0]  # theirs is a sound row of its own


def test_clients_of_different_mechanisms_share_a_budget_and_none_loosens_the_count_of_the_others(tmp_path):
    changes = ["client_epsilons=[8.0]", 'client_mechanisms=["gaussian", "staircase"]', "report=false"]
    rows = simulate(load_config("udp-fl-gaussian", [*SMALL, *changes]), tmp_path / "run")["ledger"]
    (shown,) = (row for row in rows if (row["observer"], row["unit"], row["verdict"]) == ("server", "example", "sound"))
    assert 7.9 < shown["epsilon"] <= 8.0


def test_a_client_with_a_smaller_delta_of_its_own_gets_more_noise_and_that_budget():
    run = prepared("udp-fl-gaussian", "client_epsilons=[4]", "client_deltas=[1e-5, 1e-8]")
    assert run.task.own[1][1] > 1.1 * run.task.own[0][1]
    events = events_of(run.task, run.config, run.task.own[1][1], 5, run.partition.size(1))
    assert answer(events, 1e-8, "pld").epsilon <= 4.0 < answer(events, 1e-9, "pld").epsilon
    assert [budget.delta for budget in header_of(run).budgets] == [1e-5, 1e-8, 1e-5, 1e-8]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (["client_deltas=[1e-5]"], "client_epsilons"),
        (["client_epsilons=[4]", "client_deltas=[2.0]"], "between 0 and 1"),
        (["client_epsilons=[0]"], "above 0"),
        (["budget=nominal"], "target_epsilon"),
        (["budget=nominal", "target_epsilon=1", "calibrate=true"], "promises"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(changes, word):
    with pytest.raises(UserError, match=word):
        load_config("udp-fl-gaussian", [*SMALL, *changes])


def test_a_nominal_budget_stops_an_l2max_run_where_the_paper_would():
    """The papers' count of a run without any sound promise: it stops before the round that would exceed the target."""
    task = prepared("fed-alpha-cdp").task
    rate = task.setting.batch * 4 / task.setting.examples
    third, fourth = (table_epsilon("moments", 6.0, rate, 4 * rounds, 1e-5) for rounds in (3, 4))
    changes = ["budget=nominal", f"target_epsilon={(third + fourth) / 2}", "report=false"]
    with tempfile.TemporaryDirectory() as folder:
        result = simulate(load_config("fed-alpha-cdp", [*SMALL, *changes]), Path(folder) / "run")
    assert result["rounds"] == 3
    assert not any(row["verdict"] == "sound" for row in result["ledger"])


@pytest.mark.parametrize("name", ["udp-fl-gaussian", "fed-sdp-client", "non-private"])
def test_the_closed_form_moves_a_noised_update_along_the_printed_curve_and_costs_nothing(name):
    plain, curved = prepared(name), prepared(name, "smoothness=50")
    state = start(plain.task, plain.initial)
    now = moment_of(plain.task, state)
    update = np.random.default_rng(0).normal(0, 1e-3, plain.task.layout.size)
    places = set()
    for client in range(4):
        noised = sanitise_update(plain.task, now, update, client, state.weights).astype(np.float64)
        sent = sanitise_update(curved.task, now, update, client, state.weights)
        # By hand: sent = ((1 - r)^2 - (r - r^2) / 5) * noised + 2.4 (r - r^2) / L in every coordinate.
        slope, offset = np.polyfit(noised, sent, 1)
        r = (1 - math.sqrt(max(0.0, 1 - 4 * offset * 50 / 2.4))) / 2
        fits = [abs((1 - p) ** 2 - (p - p * p) / 5 - slope) for p in (r, 1 - r)]
        assert min(fits) < 1e-3
        np.testing.assert_allclose(sent, slope * noised + offset, atol=1e-6)
        places.add(round(offset, 9))
    assert len(places) == 4  # a coin for each client
    assert list(_planned(plain)) == list(_planned(curved))


@pytest.mark.parametrize("name", ["fed-sdp", "sum-cdp", "ldp-fl", "wind-scaffold"])
def test_the_closed_form_is_refused_where_updates_carry_no_noise_of_their_own_or_control_variates_need_them(name):
    with pytest.raises(UserError, match="smoothness"):
        load_config(name, ["smoothness=10"])


def test_every_client_sees_its_own_budget_and_what_it_spent_at_its_own_delta(tmp_path):
    changes = ["client_epsilons=[2, 4, 8, inf]", "client_deltas=[1e-4, 1e-5, 1e-5, 1e-5]", "calibrate=true", "report=false"]
    result = simulate(load_config("udp-fl-gaussian", [*SMALL, *changes]), tmp_path / "run")
    with Ledger.open(tmp_path / "run" / "ledger.jsonl") as ledger:
        sizes, rows = ledger.header.sizes, ledger.own_table()
    task = prepare(load_config("udp-fl-gaussian", [*SMALL, *changes])).task
    assert [(r.clients, r.budget, r.delta) for r in rows] == [
        ((0,), 2.0, 1e-4), ((1,), 4.0, 1e-5), ((2,), 8.0, 1e-5), ((3,), None, 1e-5),
    ]  # fmt: skip
    for row, client in zip(rows[:3], range(3), strict=True):  # another way: all steps of the client at once, with its own sigma
        steps = Event(Noise("gaussian", task.own[client][1]), Sampling("poisson", 20 / sizes[client]), steps=5 * 4)
        assert row.epsilon == pytest.approx(answer([steps], row.delta, "pld").epsilon, rel=2e-3)  # but for the grid of its noise
        assert row.budget * 0.98 < row.epsilon <= row.budget  # at the common delta, client 0 would seem to overspend
    assert rows[3].epsilon is None
    assert [row["budget"] for row in result["own_budgets"]] == [2.0, 4.0, 8.0, None]


def test_without_budgets_of_their_own_nothing_is_said_of_single_clients(tmp_path):
    result = simulate(load_config("udp-fl-gaussian", [*SMALL, "report=false"]), tmp_path / "run")
    assert result["own_budgets"] == []
