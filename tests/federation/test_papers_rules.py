"""Rules of the papers that a run keeps: a fixed noise deviation, what type 2 reads, conditions that are said."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fedveil.data.rows import Dataset
from fedveil.errors import UserError
from fedveil.federation.config import load_config
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
from fedveil.federation.round import moment_of, noised_of, plan_of, start
from fedveil.federation.store import open_run
from fedveil.federation.view import view
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.papers import condition_words, table_epsilon
from fedveil.protect import udp
from fedveil.protect.catalogue import catalogue
from fedveil.protect.noise import joint_staircase
from fedveil.protect.promise import claims
from fedveil.studies.settings import FEDERATED

SMALL = ["dataset=cancer", "clients=2", "rounds=4", "local_steps=3", "batch_size=20"]


@pytest.mark.parametrize("recipe", ["dp-baseline", "dp-dyns-c-decay", "dp-dyns-l2max", "dp-dyns"])
def test_a_fixed_deviation_is_held_whatever_the_sensitivity(recipe):
    run = prepare(load_config(recipe, ["dataset=digits", "rounds=4", "local_steps=2", "fixed_variance=24"]))
    state = start(run.task, run.initial)
    for _ in range(4):
        state, _, private = play_round(run, state, np.array([0]))
        assert private["noise_deviation"] == pytest.approx(24.0, rel=1e-6)


@pytest.mark.parametrize(
    ("recipe", "more", "word"),
    [
        ("udp-fl-laplace", [], "deviation of laplace noise"),
        ("udp-fl-staircase", [], "deviation of staircase noise"),
        ("fed-cdp-example", [], "noise_on = example"),
        ("fed-cdp-mean", [], "noise_on = mean"),
        ("adaclip", [], "clip.rule = adaclip"),
        ("median-clip", [], "clip.rule = median"),
        ("quantile-clip", [], "clip.rule = quantile"),
        ("random-noise", [], "without a clip"),
        ("non-private", [], "adds none"),
        ("ldp-fl", [], "adds none"),
        ("fed-cdp-sound", ["calibrate=true", "target_epsilon=4"], "chosen by the budget"),
        ("udp-fl-gaussian", ["client_epsilons=[4.0]"], "chosen by the budget"),
        ("nbafl", ["epsilon=4"], "chosen by the budget"),
    ],
)
def test_a_fixed_deviation_is_refused_where_it_would_be_another_one(recipe, more, word):
    with pytest.raises(UserError, match=word):
        load_config(recipe, [*SMALL, "fixed_variance=24", *more])


@pytest.mark.parametrize("recipe", [*catalogue()])
def test_a_fixed_deviation_that_is_accepted_is_that_of_the_noise(recipe):
    try:
        run = prepare(load_config(recipe, [*SMALL, "fixed_variance=24"]))
    except UserError:
        return
    for index in (0, 3):
        now = moment_of(run.task, replace(start(run.task, run.initial), round=index))
        noises = noised_of(run.task, now, 0, run.partition.size(0))
        assert {round(one.deviation, 9) for one in noises} == {24.0}


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("udp-fl-staircase-joint", ["sigma=1e-6"]),
        *(
            (recipe, more)
            for recipe in ("udp-fl-staircase", "udp-fl-staircase-iid")
            for more in (["sigma=1e-6"], ["sigma=1e-6", "grid=0"], ["sigma=linear:3:1e-6", "grid=0"])
        ),
    ],
)
def test_noise_too_narrow_to_be_drawn_is_refused_before_anything_is_written(recipe, more, tmp_path):
    with pytest.raises(UserError, match="lambda"):
        simulate(load_config(recipe, [*SMALL, *more, "report=false"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_bound_that_follows_the_learning_rate_falls_with_it_in_a_run(tmp_path):
    rates = ["learning_rate=0.3", "learning_rate_end=0.1"]
    simulate(load_config("fed-cdp-sound", [*SMALL, *rates, "clip.bound=learning-rate:6", "report=false"]), tmp_path / "run")
    found = open_run(tmp_path / "run").metrics
    assert [line["bound"] for line in found] == pytest.approx([6.0, 6 - 4 / 3, 6 - 8 / 3, 2.0])
    assert [line["bound"] / line["learning_rate"] for line in found] == pytest.approx([20.0] * 4)


def test_only_a_bound_may_follow_the_learning_rate():
    with pytest.raises(UserError, match="only a clip bound can follow the learning rate"):
        load_config("fed-cdp", ["sigma=learning-rate:6"])


def test_joint_staircase_noise_that_cannot_be_drawn_by_rejection_says_so():
    with pytest.raises(UserError, match="set a larger sigma"):
        joint_staircase(bytes(16), 0, 50, 1e6)


def test_a_pruned_gradient_is_what_type_2_reads():
    plain, pruned = (prepare(load_config("non-private", [*SMALL, *more])) for more in ([], ["prune=0.5"]))
    state = start(plain.task, plain.initial)
    raw, seen = (view(run.task, state, "type2", 0).values for run in (plain, pruned))
    for before, after in zip(raw, seen, strict=True):
        order = np.argsort(np.abs(before))
        half = before.size // 2
        assert np.all(after[order[:half]] == 0) and np.array_equal(after[order[half:]], before[order[half:]])


def test_the_papers_condition_on_the_sampling_rate_is_said_where_it_fails():
    assert condition_words(0.01, 6.0) == ""  # 1/96 = 0.0104
    assert "1/(16 sigma) fails" in condition_words(0.1, 6.0)
    task = prepare(load_config("fed-sdp", SMALL)).task
    now = moment_of(task, start(task, np.zeros(task.layout.size, np.float32)))
    nominal = [c.reason for c in claims(task.recipe, task.setting, now, 100) if c.verdict == "nominal"]
    assert nominal and all("1/(16 sigma) fails" in reason for reason in nominal)


def test_the_papers_condition_is_said_of_local_steps_where_it_fails_and_only_there():
    for batch, fails in ((1, False), (20, True)):  # q = 4 and 80 of 455 rows, 1/(16 sigma) = 0.0104
        task = prepare(load_config("fed-cdp", [*SMALL, "clients=4", "cohort_size=4", f"batch_size={batch}"])).task
        now = moment_of(task, start(task, np.zeros(task.layout.size, np.float32)))
        said = [c.reason for c in claims(task.recipe, task.setting, now, 100) if (c.unit, c.accountant) == ("example", "moments")]
        assert len(said) == 1 and ("1/(16 sigma) fails" in said[0]) is fails


def test_theorem_4_is_the_square_of_the_mean_size_of_the_noise():
    for lam in (0.3, 1.0, 2.5):
        assert udp.extra_rounds(1 / lam, 2.0) == pytest.approx(udp.staircase_mean(lam, 2.0) ** 2)
    narrow = udp.extra_rounds(3.0, 1.0, 0.01)
    assert math.sqrt(narrow) == pytest.approx(3.0, rel=0.01)  # narrow steps are Laplace noise of scale 3


@pytest.mark.parametrize("variance", [0.01, 1e-4])
def test_random_noise_has_the_papers_variance(variance):
    """Of what is drawn: a client's update as it leaves less the same update before, over 1,400 weights or more. A variance of n
    normal draws varies by sqrt(2 / n); five times that is passed by chance once in two million."""
    run = prepare(load_config("random-noise", [*SMALL, *([] if variance == 0.01 else [f"sigma={variance**0.5}"])]))
    state = start(run.task, run.initial)
    sent, bare = (np.concatenate([part.ravel() for part in view(run.task, state, tap, 0).values]) for tap in ("type0", "type1"))
    drawn = sent.astype(float) - bare
    assert len(drawn) >= 1400
    assert abs(drawn.var() / variance - 1) < 5 * math.sqrt(2 / len(drawn))
    assert abs(drawn.mean()) < 5 * math.sqrt(variance / len(drawn))
    assert plan_of(run.task, moment_of(run.task, state), 0, 100).noised == ()  # and none in local training


def steps_until(name, sigma, rate, budget, steps=4):
    """Rounds of `steps` steps that a paper's formula allows, without any of the ledger's code."""
    before = [k for k in range(1, 40) if spent_after(name, sigma, rate, k * steps) <= budget]
    return max(before, default=0)


def spent_after(name, sigma, rate, count):
    delta = 1e-5
    one = math.log1p(rate * math.expm1(math.sqrt(2 * math.log(1.25 / delta)) / sigma))
    if name == "basic":
        return count * one
    if name == "advanced":
        return one * math.sqrt(2 * count * math.log(1 / delta)) + count * one * math.expm1(one)
    if name == "optimal":
        return count * one * math.tanh(one / 2) + math.sqrt(2 * count) * one * math.sqrt(
            math.log(math.e + math.sqrt(count) * one / delta)
        )
    rho = count * (rate / sigma) ** 2
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


@pytest.mark.parametrize(("name", "budget"), [("basic", 4.0), ("advanced", 3.0), ("optimal", 3.0), ("zcdp", 0.4)])
def test_a_nominal_budget_ends_a_run_where_the_papers_formula_ends_it_and_says_that_it_is_nominal(name, budget, tmp_path):
    few = ["dataset=cancer", "clients=4", "local_steps=4", "batch_size=8", "rounds=12", "sigma=6", "report=false"]
    limit = ["budget=nominal", f"budget_accountant={name}", f"target_epsilon={budget}"]
    config = load_config("fed-cdp", [*few, *limit])
    result = simulate(config, tmp_path / "run")
    prepared = prepare(config)
    rate = 8 * 4 / prepared.partition.examples
    assert 0 < result["rounds"] == steps_until(name, 6.0, rate, budget) < 12
    assert "nominal target_epsilon" in result["stopped"] and f"nominal epsilon by {name}" in result["stopped"]


@pytest.mark.parametrize(
    "name", ["non-private", "random-noise", "fed-cdp-sound", "sum-cdp", "ldp-fl", "nbafl", "udp-fl-laplace", "udp-fl-staircase"]
)
def test_a_nominal_budget_of_which_nothing_is_counted_is_refused_before_anything_is_written(name, tmp_path):
    config = load_config(name, ["dataset=cancer", "clients=4", "rounds=2", "budget=nominal", "target_epsilon=0.001"])
    with pytest.raises(UserError, match=f"recipe '{name}' has no nominal count for observer 'server'"):
        simulate(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_nominal_budget_for_an_observer_without_a_count_is_refused():
    given = [*SMALL, "budget=nominal", "target_epsilon=1", "observer=participants"]
    with pytest.raises(UserError, match="observer 'participants'"):
        prepare(load_config("fed-alpha-cdp", given))


def test_a_nominal_budget_that_is_counted_stops_before_the_first_round_if_it_is_too_small(tmp_path):
    given = [*SMALL, "budget=nominal", "target_epsilon=0.001", "report=false"]
    result = simulate(load_config("fed-alpha-cdp", given), tmp_path / "run")
    assert result["rounds"] == 0 and "nominal target_epsilon" in result["stopped"]
    assert (result["learned"], result["judgement"]) == (None, "")  # nobody tried to teach it anything


def test_the_papers_accountants_count_nominal_budgets_only():
    with pytest.raises(UserError, match="budget = nominal"):
        load_config("fed-cdp", ["dataset=cancer", "budget_accountant=zcdp", "target_epsilon=1"])


@pytest.mark.parametrize("sensitivity", ["l2-max", "l2-max-mean"])
def test_a_given_deviation_follows_no_batch_and_is_promised_like_noise_on_the_bound(sensitivity):
    given = ["fixed_variance=24", "clip.kind=flat", "clip.bound=4"]
    ours = prepare(load_config("fed-cdp", [*SMALL, *given, f"sensitivity={sensitivity}"]))
    plain = prepare(load_config("fed-cdp", [*SMALL, "clip.kind=flat", "clip.bound=4", "sigma=6"]))
    state = start(ours.task, ours.initial)
    one, two = (plan_of(r.task, moment_of(r.task, state), 0, 100) for r in (ours, plain))
    assert replace(one, measure_mean=False) == two and one.measure_mean is (sensitivity == "l2-max-mean")
    said, known = (claims(r.task.recipe, r.task.setting, moment_of(r.task, state), 100) for r in (ours, plain))
    assert said == known and "sound" in {one.verdict for one in said}
    # The noise that is drawn does not move with the data: twice the inputs, the same deviation.
    wide = replace(ours, task=replace(ours.task, x=2 * ours.task.x))
    one, two = (play_round(run, state, np.array([0]))[2] for run in (ours, wide))
    assert one["noise_deviation"] == two["noise_deviation"] and one["norm_max"] != two["norm_max"]


@pytest.mark.parametrize("engine", ["auto", "stacked", "functional", "graph", "reference"])
def test_under_a_given_deviation_the_norm_of_the_mean_is_measured_in_private_and_moves_no_weight(engine):
    changes = [*SMALL, "fixed_variance=24", f"engine={engine}"]
    runs = [prepare(load_config("dp-dyns", [*changes, f"sensitivity={s}"])) for s in ("l2-max-mean", "l2-max", "bound")]
    states = [start(one.task, one.initial) for one in runs]
    for _ in range(3):
        states, facts, private = zip(*(play_round(*pair, np.array([0])) for pair in zip(runs, states, strict=True)), strict=True)
        assert np.array_equal(states[0].weights, states[1].weights) and np.array_equal(states[0].weights, states[2].weights)
        assert 0 < private[0]["mean_gradient_norm"] <= private[0]["mean_gradient_norm_max"] <= max(private[0]["norm_max"])
        assert facts[0] == facts[1] == facts[2]
        assert not any("mean_gradient_norm" in name for said in (*facts, *private[1:]) for name in said)


def test_where_the_noise_follows_the_norm_of_the_mean_the_figure_is_what_it_follows():
    run = prepare(load_config("dp-dyns-l2max", [*SMALL, "local_steps=1", "sensitivity=l2-max-mean", "sigma=6"]))
    private = play_round(run, start(run.task, run.initial), np.array([0]))[2]
    assert private["noise_deviation"] == pytest.approx(6 * private["mean_gradient_norm_max"], rel=1e-6)



# dataset: distinct rows, classes, ε that P3's Table 6 prints for Fed-CDP (Cancer: P1's Table VI, whose number is recomputable)
FIVE = {"mnist": (50000, 10, 0.823), "cifar10": (40000, 10, 0.823), "lfw": (2267, 62, 0.636), "adult": (36631, 2, 0.276),
        "cancer": (426, 2, 0.147)}  # fmt: skip


def of_five(dataset, recipe, *more):
    """The papers' setting on rows that are made up: a count looks at numbers alone."""
    rows, classes, _ = FIVE[dataset]
    x, y = np.zeros((rows, 3), np.float32), np.arange(rows) % classes
    made = Dataset(dataset, x, y, x[:5], y[:5], classes)
    given = {**FEDERATED[dataset], "dataset": dataset, "model": "logistic", "report": False}
    return prepare(load_config(recipe, {**given, **dict(more)}), made)


def rounds_within(prepared, path):
    """The rounds that the budget lets through, charged without training."""
    state = start(prepared.task, prepared.initial)
    with Ledger.create(path, header_of(prepared)) as ledger:
        for index in range(prepared.config.rounds):
            now = moment_of(prepared.task, replace(state, round=index))
            clients, ended = affordable(prepared, ledger, now, cohort_of(prepared, now.number))
            if ended:
                return index, ledger.table()
            ledger.spend(release_of(prepared, now, clients))
        return prepared.config.rounds, ledger.table()


@pytest.mark.parametrize("dataset", FIVE)
def test_with_the_papers_rate_a_nominal_budget_lets_the_papers_rounds_through(dataset, tmp_path):
    epsilon = FIVE[dataset][2]
    limit = [("budget", "nominal"), ("target_epsilon", epsilon), ("nominal_rate", 0.01)]
    prepared = of_five(dataset, "fed-cdp", *limit)
    rounds = prepared.config.rounds
    theirs, one_more = (table_epsilon("moments", 6.0, 0.01, 100 * count, 1e-5) for count in (rounds, rounds + 1))
    assert theirs <= epsilon < one_more
    done, table = rounds_within(prepared, tmp_path / "ledger")
    assert done == rounds
    (row,) = [row for row in table if (row.observer, row.unit, row.verdict) == ("server", "example", "nominal")]
    assert row.epsilon == pytest.approx(theirs, abs=2e-4)
    own = prepared.config.batch_size * 100 / FIVE[dataset][0]
    assert f"q = 0.01 was given by hand, as the paper has it (B*K/|D| of this data is {own:.3g})" in row.reason


@pytest.mark.parametrize(("dataset", "rounds"), [("lfw", 0), ("cancer", 0)])
def test_without_it_the_datas_own_rate_ends_the_papers_runs_at_once(dataset, rounds, tmp_path):
    prepared = of_five(dataset, "fed-cdp", ("budget", "nominal"), ("target_epsilon", FIVE[dataset][2]))
    assert rounds_within(prepared, tmp_path / "ledger")[0] == rounds


@pytest.mark.parametrize("recipe", ["fed-cdp", "fed-alpha-cdp", "dp-baseline", "udp-fl-gaussian", "adaclip"])
def test_a_given_rate_moves_no_sound_row(recipe, tmp_path):
    def rows(*more):
        prepared = prepare(load_config(recipe, [*SMALL, "report=false", *more]))
        with Ledger.create(tmp_path / f"ledger{len(more)}", header_of(prepared)) as ledger:
            for entry in _planned(prepared):
                ledger.spend(entry)
            return ledger.table()

    plain, given = rows(), rows("nominal_rate=0.01")
    assert [row for row in plain if row.verdict != "nominal"] == [row for row in given if row.verdict != "nominal"]
    before, after = ([row.epsilon for row in found if row.accountant == "moments"] for found in (plain, given))
    assert before and len(before) == len(after) and before != after


@pytest.mark.parametrize("recipe", ["non-private", "fed-cdp-sound", "sum-cdp", "fed-sdp", "ldp-fl", "nbafl", "udp-fl-laplace"])
def test_a_rate_is_refused_where_no_count_takes_it(recipe):
    with pytest.raises(UserError, match=r"nominal_rate = 0\.01 is q of the papers' count of local steps"):
        load_config(recipe, ["nominal_rate=0.01"])


@pytest.mark.parametrize("rate", ["0", "-0.1", "1.5", "inf"])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(UserError, match="nominal_rate"):
        load_config("fed-cdp", [f"nominal_rate={rate}"])
