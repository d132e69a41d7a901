"""Runs: same seed same weights, whatever the chunk, engine restart or kill; the ledger never under-counts."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedveil.data.datasets import load
from fedveil.errors import UserError
from fedveil.federation import loop
from fedveil.federation.config import load_config
from fedveil.federation.loop import play_round, prepare, release_of, run
from fedveil.federation.round import moment_of, start
from fedveil.federation.store import checkpoints, open_run
from fedveil.privacy.ledger import Ledger
from fedveil.protect.catalogue import catalogue
from fedveil.training import pool

SMALL = [
    "dataset=cancer",
    "clients=4",
    "rounds=2",
    "local_steps=3",
    "batch_size=4",
    "report=false",
    "checkpoint_every=1",
]


def weights(folder):
    tensors = load_file(folder / "model.safetensors")
    return np.concatenate([tensors[name].reshape(-1) for name in sorted(tensors)])


@pytest.mark.parametrize("name", list(catalogue()))
def test_every_recipe_runs_and_keeps_a_ledger(name, tmp_path):
    extra = ["local_steps=1"] if name == "sum-cdp" else []
    if catalogue()[name].about.family == "central":
        extra = ["clients=1"]
    result = run(load_config(name, [*SMALL, *extra]), tmp_path / "run")
    assert result["rounds"] == 2
    assert 0 <= result["test_accuracy"] <= 1
    rows = result["ledger"]
    assert {row["observer"] for row in rows} == {"server", "client-process", "participants", "public"}
    for row in rows:
        assert (row["epsilon"] is None) == (row["verdict"] == "none")
        assert row["reason"]
        if row["verdict"] == "sound":
            assert row["simulated"] and "secret noise" in row["reason"]


def test_same_seed_same_weights_and_another_seed_others(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(load_config("fed-cdp", [*SMALL, f"seed={seed}"]), tmp_path / name)
    assert np.array_equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not np.array_equal(weights(tmp_path / "a"), weights(tmp_path / "c"))


@pytest.mark.parametrize("recipe", ["fed-cdp", "fed-alpha-cdp-sound", "adaclip", "fed-sdp"])
def test_the_chunk_size_changes_nothing(recipe, tmp_path):
    for chunk in (1, 3, 4):
        run(load_config(recipe, [*SMALL, f"chunk={chunk}"]), tmp_path / str(chunk))
    assert np.array_equal(weights(tmp_path / "1"), weights(tmp_path / "3"))
    assert np.array_equal(weights(tmp_path / "1"), weights(tmp_path / "4"))


@pytest.mark.parametrize("recipe", ["fed-cdp", "quantile-clip", "adaclip", "ldp-fl"])
def test_resume_from_every_checkpoint_gives_the_same_model_and_epsilon(recipe, tmp_path):
    changes = [*SMALL, "rounds=4"]
    whole = run(load_config(recipe, changes), tmp_path / "whole")
    for stop in (1, 3):
        folder = tmp_path / f"cut{stop}"

        class Cut(Exception):
            pass

        def cut(facts, stop=stop):
            if facts.round == stop + 1:
                raise Cut

        with pytest.raises(Cut):
            run(load_config(recipe, changes), folder, on_round=cut)
        again = run(load_config(recipe, changes), folder, resume=True)
        assert np.array_equal(weights(tmp_path / "whole"), weights(folder))
        assert _epsilons(again) == pytest.approx(_epsilons(whole), rel=1e-4)  # accountants round on the safe side
        assert [m["round"] for m in open_run(folder).metrics] == [1, 2, 3, 4]


def _epsilons(result):
    return [row["epsilon"] or 0.0 for row in result["ledger"]]


def test_kill_minus_nine_twice_loses_nothing_and_under_counts_nothing(tmp_path):
    changes = [
        "dataset=cancer",
        "clients=4",
        "rounds=40",
        "local_steps=20",
        "report=false",
        "checkpoint_every=1",
    ]
    whole = run(load_config("fed-cdp", changes), tmp_path / "whole")
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "fedveil", "run", "fed-cdp", "--out", str(folder), "--json"]
    command += [part for change in changes for part in ("--set", change)]
    for attempt, least in enumerate((3, 9)):
        process = subprocess.Popen([*command, *(["--resume"] if attempt else [])], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while max(checkpoints(folder / "checkpoints"), default=0) < least and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert process.poll() is None, "the run ended before it could be killed"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    finished = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=True)
    result = json.loads(finished.stdout)
    assert np.array_equal(weights(tmp_path / "whole"), weights(folder))
    for mine, theirs in zip(_epsilons(result), _epsilons(whole), strict=True):
        assert mine >= theirs - 1e-9


def test_a_target_epsilon_is_never_exceeded_and_stays_spent(tmp_path):
    changes = [*SMALL, "rounds=30", "target_epsilon=1.0", "sigma=1.5"]
    result = run(load_config("fed-cdp-sound", changes), tmp_path / "run")
    (row,) = [
        r
        for r in result["ledger"]
        if (r["observer"], r["unit"], r["verdict"]) == ("server", "example", "sound")
    ]
    assert result["rounds"] < 30 and row["epsilon"] <= 1.0 and "target_epsilon" in result["stopped"]
    again = run(load_config("fed-cdp-sound", changes), tmp_path / "run", resume=True)
    assert again["rounds"] == result["rounds"]


def test_calibration_meets_the_target_at_the_last_round(tmp_path):
    config = load_config("fed-cdp-sound", [*SMALL, "rounds=5", "target_epsilon=2.0", "calibrate=true"])
    result = run(config, tmp_path / "run")
    (row,) = [
        r
        for r in result["ledger"]
        if (r["observer"], r["unit"], r["verdict"]) == ("server", "example", "sound")
    ]
    assert result["rounds"] == 5 and 1.98 <= row["epsilon"] <= 2.0


def test_clients_with_their_own_budget_and_mechanism_sit_out_when_spent(tmp_path):
    config = load_config(
        "udp-fl-gaussian",
        [
            *SMALL,
            "rounds=6",
            "client_epsilons=[1.0, 4.0]",
            'client_mechanisms=["gaussian", "laplace"]',
            "cohort_size=3",
        ],
    )
    result = run(config, tmp_path / "run")
    ledger = open_run(tmp_path / "run").ledger()
    for client in range(4):
        assert all(left >= 0 for left in ledger.remaining(client).values())
    assert sum(m["sat_out"] for m in open_run(tmp_path / "run").metrics) > 0 or "budget" in result["stopped"]


def test_an_accuracy_stop_promises_only_what_was_committed(tmp_path):
    changes = [*SMALL, "rounds=8", "validation=0.2", "target_accuracy=0.01"]
    result = run(load_config("fed-cdp-sound", changes), tmp_path / "run")
    assert result["rounds"] == 1 and "target_accuracy" in result["stopped"]
    rows = [r for r in result["ledger"] if (r["observer"], r["unit"]) == ("server", "example")]
    sound = next(r for r in rows if r["verdict"] == "sound")
    stopped = next(r for r in rows if r["verdict"] == "nominal")
    assert sound["epsilon"] > stopped["epsilon"]
    whole = run(load_config("fed-cdp-sound", [*SMALL, "rounds=8", "validation=0.2"]), tmp_path / "whole")
    (full,) = [
        r
        for r in whole["ledger"]
        if (r["observer"], r["unit"], r["verdict"]) == ("server", "example", "sound")
    ]
    assert sound["epsilon"] == pytest.approx(full["epsilon"], rel=1e-4)


def test_secure_noise_differs_every_time_and_is_not_marked_simulated(tmp_path):
    changes = [*SMALL, "secure_noise=true"]
    for name in "ab":
        result = run(load_config("fed-cdp", changes), tmp_path / name)
    assert not np.array_equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not any(row["simulated"] for row in result["ledger"])
    text = "".join(p.read_text() for p in (tmp_path / "a").glob("*.json*"))
    assert "noise_key" not in text


def test_starting_over_an_existing_run_is_refused(tmp_path):
    run(load_config("fed-cdp", SMALL), tmp_path / "run")
    with pytest.raises(UserError, match="--resume"):
        run(load_config("fed-cdp", SMALL), tmp_path / "run")
    with pytest.raises(UserError, match="rounds"):
        run(load_config("fed-cdp", [*SMALL, "rounds=9"]), tmp_path / "run", resume=True)


def test_a_damaged_checkpoint_is_named_and_the_one_before_still_works(tmp_path):
    changes = [*SMALL, "rounds=3"]
    run(load_config("fed-cdp", changes), tmp_path / "run")
    good = weights(tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "round-000003.safetensors"
    last.write_bytes(last.read_bytes()[:-7])
    with pytest.raises(UserError, match="round-000003"):
        run(load_config("fed-cdp", changes), tmp_path / "run", resume=True)
    last.unlink()
    last.with_suffix(".json").unlink()
    run(load_config("fed-cdp", changes), tmp_path / "run", resume=True)
    assert np.array_equal(good, weights(tmp_path / "run"))


def test_an_unwritable_directory_is_a_clear_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="cannot write into"):
        run(load_config("fed-cdp", SMALL), blocked / "run")


def test_a_diverged_client_is_counted_and_left_out(tmp_path):
    result = run(load_config("non-private", [*SMALL, "learning_rate=1e30"]), tmp_path / "run")
    assert result["test_accuracy"] is not None
    private = open_run(tmp_path / "run").private
    assert private[0]["diverged"] == 4
    assert open_run(tmp_path / "run").metrics[0]["uploads"] == 0


def test_leaving_out_a_diverged_client_ends_the_promise(tmp_path):
    # Broken gradients add nothing, so it takes weights that overflow by the noise alone.
    result = run(load_config("fed-cdp-sound", [*SMALL, "learning_rate=3e38"]), tmp_path / "run")
    rows = [r for r in result["ledger"] if (r["observer"], r["unit"]) == ("server", "example")]
    assert [r["verdict"] for r in rows] == ["none"] and "diverged" in rows[0]["reason"]


def test_a_diverged_client_is_not_told_apart_where_noise_follows(tmp_path):
    result = run(load_config("dp-fedavg", [*SMALL, "learning_rate=1e30"]), tmp_path / "run")
    assert open_run(tmp_path / "run").private[0]["diverged"] > 0
    assert [r["verdict"] for r in result["ledger"] if (r["observer"], r["unit"]) == ("public", "client")] == [
        "sound"
    ]


def test_regression_reports_rmse(tmp_path):
    from fedveil.api import dataset
    from fedveil.api import run as api_run

    draw = np.random.default_rng(0)
    x = draw.normal(size=(300, 5)).astype(np.float32)
    y = (x @ np.arange(5, dtype=np.float32) / 10).astype(np.float32)
    result = api_run(
        "fed-cdp-sound",
        data=dataset(x[:200], y[:200], x[200:], y[200:]),
        model="linear",
        clients=4,
        partition="iid",
        rounds=3,
        local_steps=5,
        batch_size=8,
        out=tmp_path / "run",
        report=False,
        aggregate="scaffold",
    )
    assert result.accuracy is None and result.facts["test_rmse"] > 0


def test_a_full_disk_is_a_clear_error_and_the_run_goes_on_afterwards(tmp_path):
    changes = [*SMALL, "rounds=3"]
    whole = run(load_config("fed-cdp", changes), tmp_path / "whole")
    folder = tmp_path / "full"
    arguments = [part for change in changes for part in ("--set", change)]
    # A limit on file size stands in for a full disk: the first checkpoint (about 17 kB) cannot be written.
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000));"
        "from fedveil.cli import main; sys.argv = ['fedveil'] + sys.argv[1:]; main()"
    )
    command = [sys.executable, "-c", code, "run", "fed-cdp", "--out", str(folder), *arguments]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 2 and "cannot write" in failed.stderr and "Traceback" not in failed.stderr
    assert not list(folder.rglob("*.tmp"))
    again = run(load_config("fed-cdp", changes), folder, resume=True)
    assert np.array_equal(weights(tmp_path / "whole"), weights(folder))
    assert _epsilons(again) == pytest.approx(_epsilons(whole), rel=1e-4)  # accountants round on the safe side


def test_a_ledger_that_was_cut_or_taken_away_is_not_continued(tmp_path):
    changes = [*SMALL, "rounds=3"]
    run(load_config("fed-cdp", changes), tmp_path / "run")
    path = tmp_path / "run" / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))  # a whole record less: the chain alone cannot tell
    with pytest.raises(UserError, match="cut or rolled back"):
        run(load_config("fed-cdp", changes), tmp_path / "run", resume=True)
    path.unlink()
    with pytest.raises(UserError, match="gone"):
        run(load_config("fed-cdp", changes), tmp_path / "run", resume=True)


def test_the_ledger_cannot_be_used_to_test_guesses_of_data_or_cohort(tmp_path):
    """A fingerprint is keyed: with the system's entropy the same run leaves another one, whoever was drawn."""
    from fedveil.federation.loop import fingerprint_of, prepare
    from fedveil.federation.round import start

    config = load_config("dp-fedavg", [*SMALL, "secure_noise=true"])
    one, other = prepare(config), prepare(config)
    state = start(one.task, one.initial)
    assert fingerprint_of(one, state, np.arange(2)) != fingerprint_of(other, state, np.arange(2))
    seeded = [prepare(load_config("dp-fedavg", SMALL)) for _ in range(2)]
    first, again = (fingerprint_of(p, start(p.task, p.initial), np.arange(2)) for p in seeded)
    assert first == again  # a seeded run recognises its own replay


@pytest.mark.parametrize("name", ["cuda:7", "nonsense"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(name, tmp_path):
    with pytest.raises(UserError, match="device"):
        run(load_config("fed-cdp", [*SMALL, f'device="{name}"']), tmp_path / "run")
    assert not (tmp_path / "run").exists()


BLOWS_UP = [*SMALL, "rounds=5", "local_steps=1", "sigma=20", "evaluate_every=1"]


def test_rounds_that_a_stop_leaves_out_are_charged_before_anybody_hears_of_it(tmp_path):
    heard = []
    config = load_config("sum-cdp", [*BLOWS_UP, "learning_rate=1e38"])
    ledger = tmp_path / "run" / "ledger.jsonl"
    result = run(config, tmp_path / "run", on_round=lambda facts: heard.append((facts.round, Ledger.read(ledger).rounds)))
    assert "no longer finite" in result["stopped"]
    assert heard == [(1, 5)]
    assert open_run(tmp_path / "run").metrics[0]["epsilon"] == result["ledger"][0]["epsilon"]


def test_the_charge_of_rounds_left_out_ends_where_the_budget_would_have_ended_them(tmp_path):
    run(load_config("sum-cdp", BLOWS_UP), tmp_path / "whole")
    budget = open_run(tmp_path / "whole").metrics[2]["epsilon"] * 1.001  # three rounds of five
    config = load_config("sum-cdp", [*BLOWS_UP, "learning_rate=1e38", f"target_epsilon={budget}"])
    result = run(config, tmp_path / "stopped")
    assert result["rounds"] == 1 and "no longer finite" in result["stopped"]
    assert Ledger.read(tmp_path / "stopped" / "ledger.jsonl").rounds == 3


def test_a_round_that_fails_is_charged_before_anybody_hears_why(tmp_path, monkeypatch):
    """What goes wrong with the rows in hand may follow from them; the same failure once more tells nothing new."""
    real = loop.train_cohort

    def fails(prepared, state, *more):
        if state.round == 1:
            raise UserError("this record cannot be trained on")
        return real(prepared, state, *more)

    config = load_config("fed-cdp-sound", SMALL)
    run(config, tmp_path / "whole")
    monkeypatch.setattr(loop, "train_cohort", fails)
    for resume in (False, True):
        with pytest.raises(UserError, match="cannot be trained on"):
            run(config, tmp_path / "run", resume=resume)
        book = Ledger.read(tmp_path / "run" / "ledger.jsonl")
        assert book.rounds == 2
        assert book.epsilon("server", "example") == Ledger.read(tmp_path / "whole" / "ledger.jsonl").epsilon("server", "example")


@pytest.mark.parametrize("at", [0, 2, 4])
def test_rounds_that_a_failure_leaves_out_are_charged_as_if_they_had_been_played(at, tmp_path, monkeypatch):
    """Where the run ends then depends on the rows: what is promised must not."""
    real = loop.train_cohort

    def fails(prepared, state, *more):
        if state.round == at:
            raise UserError("this record cannot be trained on")
        return real(prepared, state, *more)

    config = load_config("fed-cdp-sound", [*SMALL, "rounds=5"])
    run(config, tmp_path / "whole")
    monkeypatch.setattr(loop, "train_cohort", fails)
    for resume in (False, True):
        with pytest.raises(UserError, match="cannot be trained on"):
            run(config, tmp_path / "run", resume=resume)
    book, whole = (Ledger.read(tmp_path / name / "ledger.jsonl") for name in ("run", "whole"))
    assert book.rounds == 5
    assert [(r.epsilon, r.verdict) for r in book.table()] == [(r.epsilon, r.verdict) for r in whole.table()]


def test_an_engine_without_a_proof_for_one_client_speaks_for_the_run(monkeypatch):
    """Client 0's noise runs on a proven engine, client 1's does not: nothing about the run is sound."""
    choose = pool.choose

    def unproven_for_laplace(module, plan, engine="auto", **more):
        return ("unproven", "") if plan.noised[0].law.name == "laplace" else choose(module, plan, engine, **more)

    monkeypatch.setattr(pool, "choose", unproven_for_laplace)
    told = ["clients=2", "client_epsilons=[4.0, 8.0]", "client_mechanisms=['gaussian', 'laplace']"]
    prepared = prepare(load_config("udp-fl", [*SMALL, *told]))
    assert prepared.engine == "unproven"
    now = moment_of(prepared.task, start(prepared.task, prepared.initial))
    said = [c for _, claims in release_of(prepared, now, np.arange(2)).groups for c in claims if c.event is not None]
    assert said and all(c.verdict == "nominal" for c in said)


def test_a_cohort_that_the_promise_keeps_secret_is_in_no_public_file(tmp_path):
    """Two seeds draw other cohorts; what the public files say about who took part is the same."""
    said = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        run(load_config("dp-fedavg", [*SMALL, "clients=12", "cohort_size=4", f"seed={seed}"]), folder)
        assert not {"clients", "uploads", "arrived", "bytes_up"} & {key for line in open_run(folder).metrics for key in line}
        records = [json.loads(line)["record"] for line in (folder / "ledger.jsonl").read_text().splitlines()]
        said.append([record["groups"] for record in records if record["kind"] == "release"])
    assert said[0] == said[1]


def test_a_round_is_in_the_ledger_on_disk_before_anybody_hears_of_it(tmp_path):
    small = load_config("fed-cdp", ["dataset=cancer", "clients=2", "rounds=3", "local_steps=1", "report=false"])
    heard = []
    run(small, tmp_path, on_round=lambda facts: heard.append(Ledger.read(tmp_path / "ledger.jsonl").rounds))
    assert heard == [1, 2, 3]


def test_a_preparation_fitted_on_private_rows_ends_every_promise_before_the_first_round(tmp_path):
    result = run(load_config("fed-cdp-sound", SMALL), tmp_path / "run", dataset=load("cancer", fit_scaler=True))
    after_upload = [row for row in result["ledger"] if row["observer"] != "client-process"]
    assert after_upload and all(row["verdict"] == "none" and "mean and deviation" in row["reason"] for row in after_upload)
    control = run(load_config("fed-cdp-sound", SMALL), tmp_path / "control")
    assert any(row["verdict"] == "sound" for row in control["ledger"])


@pytest.mark.parametrize(("sigma", "met"), [("linear:5.9:4.85", False), ("linear:1e6:4.85", True)])
def test_a_falling_sigma_under_l2_max_is_held_against_the_rule_of_a_resilient_start_in_private(sigma, met):
    changes = ["dataset=cancer", "clients=2", "rounds=3", "local_steps=2", "batch_size=8", f"sigma={sigma}"]
    run = prepare(load_config("fed-alpha-cdp-sigma-linear", changes))
    state = start(run.task, run.initial)
    after, facts, private = play_round(run, state, np.arange(2))
    largest = max(private["norm_max"])
    assert 0 < private["dynamic_sensitivity"] <= min(4.0, largest) * (1 + 1e-6)  # S is at most the clipped norms' largest
    assert private["resilient_start"] == pytest.approx(4 * 6 / private["dynamic_sensitivity"])
    assert private["resilient_start_met"] is met
    assert not set(facts) & {"dynamic_sensitivity", "resilient_start", "resilient_start_met"}
    assert "resilient_start" not in play_round(run, after, np.arange(2))[2]  # about the start only


@pytest.mark.parametrize("name", ["fed-cdp", "fed-alpha-cdp"])
def test_the_rule_of_a_resilient_start_says_nothing_of_a_fixed_bound_or_a_fixed_sigma(name):
    run = prepare(load_config(name, ["dataset=cancer", "clients=2", "rounds=3", "local_steps=2"]))
    assert "resilient_start" not in play_round(run, start(run.task, run.initial), np.arange(2))[2]
