"""Cells are kept one by one, found again, and measured as stated."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
from typer.testing import CliRunner

from fedveil.cli import build
from fedveil.errors import UserError
from fedveil.federation.store import open_run
from fedveil.protect.catalogue import get
from fedveil.protect.recipe import with_changes
from fedveil.studies import jobs, render, runner, settings
from fedveil.studies.cells import Attack, Cell, Entry, Epsilon, Inference, Time, Train, changes, key_of, only
from fedveil.studies.index import find
from fedveil.training import pool

TINY = changes(clients=4, cohort_size=2, rounds=4, local_steps=3, batch_size=4, partition="iid", model="papers-mlp",
               report=False, learning_rate=0.05)  # fmt: skip


def entry():
    plain = Train("non-private", "cancer", TINY)
    return Entry(
        "p9-table1",
        "Test",
        (
            Cell("ε", "a", 0.823, Epsilon("moments", 10000), "epsilon"),
            Cell("ε", "b", 1.159, Epsilon("zcdp", 10000), "epsilon"),
            Cell("accuracy", "end", 0.9, plain, "accuracy"),
            Cell("accuracy", "half", None, plain, "accuracy@2"),
        ),
    )


@pytest.fixture
def counted(monkeypatch):
    seen = []
    real = jobs.execute
    monkeypatch.setattr(
        jobs, "execute", lambda job, seed, folder: seen.append(job) or real(job, seed, folder)
    )
    return seen


def test_finished_cells_are_not_run_again_and_new_ones_are(tmp_path, counted):
    chosen = runner.plan(entry(), "paper")
    first = runner.run(chosen, tmp_path)
    assert len(counted) == 3  # two cells share the run
    again = runner.run(chosen, tmp_path, resume=True)
    assert len(counted) == 3
    assert runner.rows(chosen, first) == runner.rows(chosen, again)


def test_an_interrupted_table_continues_with_the_missing_cells(tmp_path, counted, monkeypatch):
    chosen = runner.plan(entry(), "paper")

    def broken(job, seed, folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        runner.run(runner.plan(only(entry(), ("epsilon",)), "paper"), tmp_path)
        patch.setattr(jobs, "_train", broken)
        with pytest.raises(KeyboardInterrupt):
            runner.run(chosen, tmp_path, resume=True)
    before = len(counted)
    done = runner.run(chosen, tmp_path, resume=True)
    assert [type(job) for job in counted[before:]] == [Train]
    assert all(row.ours is not None for row in runner.rows(chosen, done))


def test_a_killed_table_continues_and_gives_the_same_numbers(tmp_path):
    """kill -9 in the middle of a long run, through the real command."""
    import signal
    import subprocess
    import sys
    import time

    words = ["p3-table6", "--scale", "paper", "--only", "cancer,accuracy", "--json", "--resume"]
    command = [sys.executable, "-m", "fedveil", "reproduce", *words, "--out"]
    whole = subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, text=True, check=True)
    with subprocess.Popen(
        [*command, str(tmp_path / "cut")], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as cut:
        until = time.monotonic() + 60
        while not list((tmp_path / "cut").glob("runs/*/metrics.jsonl")) and time.monotonic() < until:
            time.sleep(0.002)
        cut.send_signal(signal.SIGKILL)
    assert cut.returncode == -signal.SIGKILL
    before = (
        (tmp_path / "cut" / "cells.jsonl").read_text() if (tmp_path / "cut" / "cells.jsonl").exists() else ""
    )
    again = subprocess.run([*command, str(tmp_path / "cut")], capture_output=True, text=True, check=True)
    assert (tmp_path / "cut" / "cells.jsonl").read_text().startswith(before)
    ours = [[row["ours"] for row in json.loads(done.stdout)["rows"]] for done in (whole, again)]
    assert ours[0] == ours[1] and None not in ours[0]
    assert "jobs, about" in again.stderr


def test_an_interrupt_says_how_to_continue(tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "_train", stopped)
    shown = call(
        "p3-table6", "--scale", "paper", "--only", "cancer", "--workers", "1", "--out", str(tmp_path)
    )
    assert shown.exit_code == 130 and f"--only cancer --resume --out {tmp_path}" in shown.stderr
    assert len(runner.finished(tmp_path)) == 0


def test_without_resume_everything_is_done_again(tmp_path, counted):
    chosen = runner.plan(entry(), "paper")
    runner.run(chosen, tmp_path)
    runner.run(chosen, tmp_path)
    assert len(counted) == 6


def test_a_half_written_line_is_ignored(tmp_path, counted):
    chosen = runner.plan(only(entry(), ("epsilon",)), "paper")
    runner.run(chosen, tmp_path)
    with (tmp_path / "cells.jsonl").open("a") as out:
        out.write('{"key": "cut')
    runner.run(chosen, tmp_path, resume=True)
    assert len(counted) == 2


def test_a_cell_that_cannot_run_says_why_and_is_tried_again(tmp_path, counted, monkeypatch):
    def missing(job, seed, folder):
        raise UserError("Dataset 'x' is not there")

    chosen = runner.plan(entry(), "paper")
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "_train", missing)
        rows = runner.rows(chosen, runner.run(chosen, tmp_path))
    assert rows[2].ours is None and "Dataset 'x' is not there" in rows[2].why[0]
    rows = runner.rows(chosen, runner.run(chosen, tmp_path, resume=True))
    assert rows[2].ours is not None


def test_seeds_give_a_mean_and_a_spread(tmp_path):
    chosen = runner.plan(only(entry(), ("train",)), "paper", seeds=2)
    done = runner.run(chosen, tmp_path)
    row = runner.rows(chosen, done)[0]
    values = [line["result"]["accuracy"] for line in done.values()]
    assert row.seeds == 2 and row.ours == pytest.approx(sum(values) / 2)
    assert row.deviation == pytest.approx(abs(values[0] - values[1]) / 2**0.5)


def test_progress_counts_down(tmp_path):
    told = []
    runner.run(runner.plan(entry(), "paper"), tmp_path, progress=lambda *facts: told.append(facts))
    assert [t[0] for t in told] == [0, 1, 2, 3] and told[-1][2] == 0 and told[0][2] > 0


def result():
    return {"accuracies": [[1, 0.5], [2, 0.8], [4, 0.9]], "local_steps": 100, "sigmas": [[r, 6.0] for r in range(1, 5)],
            "l2max": False}  # fmt: skip


def test_rounds_to_a_target_and_its_epsilon():
    job = Train("fed-cdp", "mnist", changes(rounds=4))
    assert jobs.measure("rounds_to:0.8", result(), job, job) == 2
    assert jobs.measure("iterations_to:0.85", result(), job, job) == 400
    assert jobs.measure("rounds_to:0.95", result(), job, job) is None
    spent = jobs.measure("spent_to:zcdp:0.8", result(), job, job)
    assert spent == pytest.approx(jobs.execute(Epsilon("zcdp", 200), 0, None)["epsilon"])


def test_the_standardised_error_of_an_attack_fits_the_prints_own_pair_of_error_and_signal_to_noise():
    """P5 VII prints MSE and PSNR of the same images: their range is that of 0 to 1 over CIFAR-10's deviation."""
    job = Attack("non-private", "cifar10")
    printed_mse, printed_psnr = 1.7104, 9.79
    result = {"dataset": "cifar10", "mse": 10 ** (-printed_psnr / 10), "controls": {"black": {"mse": 0.0628, "psnr": 12.0}}}
    assert jobs.measure("mse_standard", result, job, job) == pytest.approx(printed_mse, rel=0.03)
    assert jobs.measure("black_image_mse_standard", result, job, job) == pytest.approx(1.0, rel=0.01)
    assert jobs.measure("black_image_psnr", result, job, job) == 12.0


def test_a_timing_is_taken_in_turns_with_the_same_steps_without_protection(monkeypatch):
    """A clock that a protected round moves by 3 a step and a plain one by 1: the ratio is 3, whatever else happens once."""
    clock, turns = [0.0], []

    def play(prepared, state, clients):
        private = prepared.task.recipe.private
        turns.append(private)
        clock[0] += 7 + prepared.config.local_steps * (3 if private else 1)

    monkeypatch.setattr("fedveil.federation.loop.play_round", play)
    monkeypatch.setattr(jobs.time, "process_time", lambda: clock[0])
    found = jobs.execute(Time("fed-cdp", "cancer", TINY, iterations=4), 0, None)
    assert found["seconds"] == pytest.approx(3) and found["over_plain"] == pytest.approx(3)
    assert turns == [True, False] * 12
    assert len(found["load"]) == 2 and found["cores"] >= 1


def test_a_page_of_times_says_what_is_known_of_the_machines_load():
    times = [Time(recipe, "cancer", TINY) for recipe in ("fed-cdp", "fed-sdp")]
    cells = tuple(Cell(job.recipe, "x", 0.1, job, "seconds") for job in times)
    chosen = runner.plan(Entry("p9-table1", "Test", cells), "paper")

    def said(*loads):
        done = {key_of(job, 0): {"result": {"seconds": 0.1, **({"load": load, "cores": 2} if load else {})}}
                for job, load in zip(times, loads, strict=True)}  # fmt: skip
        (line,) = [one for one in render.markdown(chosen, runner.rows(chosen, done), "fedveil", {}, done).splitlines()
                   if one.startswith("Load of the machine")]  # fmt: skip
        return line.partition("taken: ")[2]

    assert said(None, None) == "not recorded for 2 of 2 timings."
    assert said([0.5, 1.2], [1.0, 3.0]) == "0.5 to 3 processes on 2 cores, the timed one among them."
    assert said([0.5, 1.2], None).endswith("; not recorded for 1 of 2 timings.")


def test_an_attack_names_the_noise_of_what_it_attacks_also_where_it_was_kept_without(tmp_path):
    example = {"noise_on": "example", "sampling": "fixed"}
    attacks = [Attack("non-private", "digits"), Attack("fed-cdp", "digits", settings=changes(example))]
    attacks.append(Attack("fed-sdp", "digits"))
    cells = tuple(Cell(str(n), "x", None, one, "ssim") for n, one in enumerate(attacks))
    chosen = runner.plan(Entry("p9-fig1", "Test", cells), "paper")
    old = {key_of(job, 0): {"result": {"ssim": 0.1}} for job in attacks}
    assert [row.law for row in runner.rows(chosen, old)] == ["none", *["exact (by its settings)"] * 2]
    page = render.markdown(chosen, runner.rows(chosen, old), "fedveil", {})
    assert "\nNoise: exact and none (of attacks by their settings, not recorded).\n" in page
    new = {key: {"result": {"ssim": 0.1, "noise_law": "float"}} for key in old}
    assert [row.law for row in runner.rows(chosen, new)] == ["float"] * 3
    leak = {"victims": 2, "batch": 1, "iterations": 3, "model": "cpl-lenet"}
    assert jobs.execute(Attack("fed-cdp", "digits", **leak), 0, tmp_path)["noise_law"] == "exact"


def test_seeds_that_drew_different_noise_are_told_apart():
    run = Train("dp-baseline", "cancer", TINY)
    chosen = runner.plan(Entry("p9-table1", "Test", (Cell("a", "x", 0.9, run, "accuracy"),)), "paper", seeds=3)
    done = {key_of(run, seed): {"settings": {"seed": seed}, "result": {"accuracy": 0.9, "noise_law": law, "rounds": 4}}
            for seed, law in enumerate(("float", "exact", "exact"))}  # fmt: skip
    page = render.markdown(chosen, runner.rows(chosen, done), "fedveil", {})
    assert "\nNoise: a: float (seed 0), exact (seeds 1, 2).\n" in page


def test_a_fixed_variance_over_the_largest_clipped_norm_is_what_each_step_is_counted_with():
    """zCDP adds up q²/sigma² by hand: S is the largest norm where that is below the bound, else the bound."""
    job = Train("dp-dyns-l2max", "mnist", changes(rounds=4))
    run = {**result(), "l2max": True, "variance": 24.0, "bounds": [[r, 4.0] for r in range(1, 5)]}
    run |= {"largest_single": [[1, 90.0], [2, 2.0]], "largest": [[1, 8.0], [2, 1.0]]}
    for reading, second in (("bound", 6), ("single", 12), ("mean", 24)):
        rho = 100 * 0.01**2 * (1 / 6**2 + 1 / second**2)
        spent = jobs.measure(f"fixed_variance:{reading}:zcdp:0.8", run, job, job)
        assert spent == pytest.approx(rho + 2 * (rho * np.log(1e5)) ** 0.5)


def test_a_run_of_fixed_variance_is_kept_as_one_whose_count_follows_the_batch(tmp_path):
    """Its noise does not follow the batch, but the paper's count of it does."""
    tiny = {name: value for name, value in TINY if name != "cohort_size"}
    job = Train("dp-dyns-l2max", "cancer", changes(tiny, clients=1, fixed_variance=24.0, rounds=2))
    found = jobs.execute(job, 0, tmp_path)
    assert found["l2max"] is True and found["variance"] == 24.0 and len(found["largest"]) == 2


def test_in_the_algorithms_reading_the_count_follows_the_largest_norm_of_a_rounds_mean_gradients(tmp_path):
    """The runs are the same: the noise is the given one, and one of them can be counted in both readings. zCDP adds up q²/sigma²
    by hand."""
    tiny = {name: value for name, value in TINY if name != "cohort_size"}
    both = [changes(tiny, clients=1, fixed_variance=24.0, rounds=2, **more) for more in ({}, {"sensitivity": "l2-max-mean"})]
    text, mean = (jobs.execute(Train("dp-dyns-l2max", "cancer", one), 0, tmp_path) for one in both)
    assert mean["l2max"] is True and mean["accuracies"] == text["accuracies"] and mean["norms"] == text["norms"]
    private = open_run(tmp_path / "runs" / key_of(Train("dp-dyns-l2max", "cancer", both[1]), 0)).private
    largest = [line["mean_gradient_norm_max"] for line in private]
    assert [value for _, value in mean["largest"]] == pytest.approx(largest, rel=1e-5)
    assert all(0 < norm < min(4.0, one) for norm, (_, one) in zip(largest, text["largest"], strict=True))
    job, mean["accuracies"] = Train("dp-dyns-l2max", "cancer", both[1]), [[2, 1.0]]
    rho = 3 * 0.01**2 * sum((norm / 24) ** 2 for norm in largest)
    spent = jobs.measure("fixed_variance:mean:zcdp:0.9", mean, job, job)
    assert spent == pytest.approx(rho + 2 * (rho * np.log(1e5)) ** 0.5, rel=1e-4)
    assert mean["largest_single"] == text["largest"] == text["largest_single"]


@pytest.mark.parametrize(("plain", "following"), [("dp-baseline", "dp-dyns-l2max"), ("dp-dyns-c-decay", "dp-dyns")])
def test_under_a_given_deviation_a_recipe_and_its_l2_max_twin_train_the_same_model(tmp_path, plain, following):
    """What lets P2's Table VII share its runs."""
    tiny = {name: value for name, value in TINY if name != "cohort_size"}
    same = changes(tiny, clients=1, fixed_variance=24.0, rounds=2)
    one, two = (jobs.execute(Train(recipe, "cancer", s), 0, tmp_path)
                for recipe, s in ((plain, same), (following, changes(dict(same), sensitivity="l2-max-mean"))))  # fmt: skip
    assert all(one[name] == two[name] for name in ("accuracies", "bounds", "norms", "deviations", "largest_single"))


def test_a_round_is_read_at_the_same_share_of_a_shorter_run():
    small, printed = (Train("fed-cdp", "mnist", changes(rounds=r)) for r in (4, 100))
    assert jobs.measure("accuracy@50", result(), small, printed) == 0.8


def test_the_page_has_the_command_the_settings_and_the_reasons(tmp_path):
    chosen = runner.plan(only(entry(), ("epsilon",)), "paper")
    rows = runner.rows(chosen, runner.run(chosen, tmp_path))
    page = render.markdown(chosen, rows, "fedveil reproduce p9-table1", {})
    assert "fedveil reproduce p9-table1" in page and '"formula": "moments"' in page and "| match |" in page


def call(*words):
    return CliRunner().invoke(build(), ["reproduce", *words])


def test_the_command_prints_one_json_document(tmp_path):
    shown = call("p1-table6", "--json", "--out", str(tmp_path))
    data = json.loads(shown.stdout)
    assert shown.exit_code == 0 and len(data["rows"]) == 30 and all(row["matches"] for row in data["rows"])


def test_the_command_ends_with_the_jobs_that_could_not_be_run(tmp_path, monkeypatch):
    def missing(job, seed, folder):
        raise UserError("Dataset 'x' is not there")

    monkeypatch.setattr("fedveil.studies.index.find", lambda table: entry())
    monkeypatch.setattr(jobs, "_train", missing)
    shown = call("p9-table1", "--scale", "paper", "--workers", "1", "--out", str(tmp_path))
    assert shown.exit_code == 0 and "1 of 3 jobs could not be run: Dataset 'x' is not there" in shown.stderr


def test_a_table_of_which_nothing_could_be_run_is_an_error_and_no_page(tmp_path, monkeypatch):
    def missing(job, seed, folder):
        raise UserError("Dataset 'x' is not there")

    monkeypatch.setattr("fedveil.studies.index.find", lambda table: entry())
    monkeypatch.setattr(jobs, "execute", missing)
    shown = CliRunner().invoke(build(), ["reproduce", "p9-table1", "--scale", "paper", "--workers", "1", "--out", str(tmp_path)])
    assert isinstance(shown.exception, UserError) and not shown.stdout
    assert "no page was written. 3 of 3 jobs: Dataset 'x' is not there" in str(shown.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["cells.jsonl"]


def test_the_list_as_json_has_times_for_both_scales():
    data = json.loads(call("--list", "--json").stdout)
    found = next(item for item in data if item["id"] == "p1-table2")
    assert found["seconds_small"] < 600 < found["seconds_paper"]


@pytest.mark.parametrize(
    ("words", "message"),
    [(("p1-tabel6",), "p1-table6"), (("p1-table6", "--scale", "tiny"), "small"), ((), "--list"),
     (("p1-table6", "--only", "nothing"), "no such cells")],
)  # fmt: skip
def test_wrong_input_is_refused_with_help(words, message, tmp_path):
    shown = call(*words, *(("--out", str(tmp_path)) if words else ()))
    assert isinstance(shown.exception, UserError) and message in str(shown.exception)


def test_a_wrong_id_ends_with_exit_code_two():
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "fedveil", "reproduce", "p3-tabel6"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "Did you mean 'p3-table6'" in done.stderr and not done.stdout


@pytest.mark.parametrize(("limit", "left"), [(None, 2000), (4000, 2000), (1000, 1000)])
def test_a_smaller_membership_attack_never_has_more_training_rows_and_keeps_the_sampling_rate(limit, left):
    train = Train("non-private", "cifar10", changes(batch_size=(limit or 40000) // 10, **({"limit": limit} if limit else {})))
    small, said = settings.shrink(Inference("membership", train), 1)
    chosen = dict(small.train.settings)
    assert (chosen["limit"], chosen["batch_size"], small.shadows) == (left, left // 10, 4)
    assert ("training rows" in said) == (limit != 1000)


def test_fewer_victims_on_request_and_said_so():
    entry = find("p3-table3")
    chosen = runner.plan(entry, "paper", 1, {"lfw": 7, "": 50})
    notes = {(p.job.dataset, p.job.victims, p.shrunk) for p in chosen.jobs}
    assert notes == {("lfw", 7, "victims 100 → 7"), ("mnist", 50, "victims 100 → 50"), ("mnist", 8, "")}
    assert all(not p.shrunk for p in runner.plan(entry, "paper").jobs)


def test_a_figure_has_a_panel_per_kind_of_column_and_names_its_axes(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    runs = {
        name: Train("non-private", "cancer", changes(rounds=rounds)) for rounds, name in enumerate("abcde", 1)
    }
    where = {"a": ("x, by clients", "50"), "b": ("x, by clients", "100"), "c": ("x, by rate", "0.1"),
             "d": ("x, by rate", "0.5"), "e": ("x, without noise", "-")}  # fmt: skip
    cells = tuple(Cell(*where[name], None, job, "accuracy") for name, job in runs.items())
    figure = Entry("p9-fig1", "Test", cells, "It rises.", x="clients | rate")
    chosen = runner.plan(figure, "paper")
    done = {key_of(job, 0): {"result": {"accuracy": 0.5}, "seconds": 1} for job in runs.values()}
    rows = runner.rows(chosen, done)
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.extend(self.axes))
    assert render.picture(chosen, rows, done, tmp_path, tmp_path / "f.png")
    assert [(a.get_xlabel(), a.get_ylabel()) for a in drawn] == [
        ("clients", "test accuracy"),
        ("rate", "test accuracy"),
    ]
    assert all(len(a.get_lines()) == 2 for a in drawn)  # the line, and the level without noise
    assert "prints no numbers" in render.summary(rows)


def test_jobs_at_once_give_the_same_numbers_as_one_by_one(tmp_path):
    leak = {"victims": 2, "batch": 1, "iterations": 5, "settings": (), "model": "cpl-lenet", "aware": True}
    several = Entry(
        "p9-table2",
        "Test",
        (
            Cell("ε", "a", 0.823, Epsilon("moments", 10000), "epsilon"),
            Cell("plain", "end", 0.9, Train("non-private", "cancer", TINY), "accuracy"),
            Cell("cdp", "end", 0.9, Train("fed-cdp", "cancer", TINY), "accuracy"),
            Cell(
                "leak",
                "rmse",
                0.1,
                Attack("non-private", "digits", tap="type2", method="cpl", **leak),
                "rmse",
            ),
            Cell("missing", "end", 0.9, Train("non-private", "no-such-data", TINY), "accuracy"),
        ),
    )
    chosen, seen = runner.plan(several, "paper"), []
    one = runner.run(chosen, tmp_path / "one")
    two = runner.run(chosen, tmp_path / "two", workers=2, progress=lambda *now: seen.append(now[:2]))
    assert runner.rows(chosen, one) == runner.rows(chosen, two)
    assert seen == [(k, 5) for k in range(5)] + [(5, 5)]
    assert set(runner.finished(tmp_path / "two")) == set(one)
    assert sum("failed" in line for line in two.values()) == 1


@pytest.mark.parametrize(("same", "strips"), [(True, 3), (False, 4)])
def test_a_gallery_shows_the_originals_of_every_attack_once(tmp_path, same, strips):
    from matplotlib.image import imread

    leak = {"victims": 2, "batch": 1, "iterations": 5, "settings": (), "model": "cpl-lenet", "aware": True}
    both = [Attack("non-private", "digits", tap=tap, method="cpl", **leak) for tap in ("type0", "type2")]
    cells = tuple(Cell(job.tap, "Digits", None, job, "ssim") for job in both)
    chosen = runner.plan(Entry("p9-fig1", "Test", cells), "paper")
    (tmp_path / "pictures").mkdir()
    for number, job in enumerate(both):
        truth = np.full((2, 1, 8, 8), 0.5 if same else number)
        np.savez(tmp_path / "pictures" / f"{key_of(job, 0)}.npz", truth=truth, guess=truth)
    assert render.picture(chosen, runner.rows(chosen, {}), {}, tmp_path, tmp_path / "shown.png")
    assert imread(tmp_path / "shown.png").shape[0] == pytest.approx(0.7 * 90 * strips, abs=2)
    distance = tuple(Cell(f"{c.row}, distance", c.column, None, c.job, "rmse") for c in cells)  # shows nothing new
    more = runner.plan(Entry("p9-fig1", "Test", (*cells, *distance)), "paper")
    assert render.picture(more, runner.rows(more, {}), {}, tmp_path, tmp_path / "shown.png")
    assert imread(tmp_path / "shown.png").shape[0] == pytest.approx(0.7 * 90 * strips, abs=2)


def test_a_worker_that_dies_is_an_error_that_says_how_to_go_on(tmp_path, monkeypatch):
    class Dying(ThreadPoolExecutor):
        def submit(self, *_, **__):
            future: Future = Future()
            future.set_exception(BrokenProcessPool())
            return future

    monkeypatch.setattr(pool, "processes", Dying)
    with pytest.raises(UserError, match="--resume --workers 1"):
        runner.run(runner.plan(entry(), "paper"), tmp_path, workers=2)


def shrunk_entry(monkeypatch, recipe="fed-cdp"):
    """A run of 20,000 rounds, of which 50 are enough for its control."""
    monkeypatch.setitem(settings.LEARNS, ("cancer", dict(TINY)["batch_size"], 20), 50)
    job = Train(
        recipe, "cancer", changes(dict(TINY), clients=40, cohort_size=20, rounds=200000, **{"clip.bound": 1.0})
    )
    return Entry("p1-table1", "Test", (Cell("accuracy", "end", 0.9, job, "accuracy"),))


def test_a_shrunk_run_brings_its_control_and_shows_nothing_if_that_does_not_learn(monkeypatch):
    chosen = runner.plan(shrunk_entry(monkeypatch), "small")
    (planned,) = chosen.jobs
    assert 50 <= dict(planned.job.settings)["rounds"] < 200000 and planned.shrunk
    check = chosen.controls[planned.job]
    assert check.recipe == "non-private" and "clip.bound" not in dict(check.settings)
    same = {k: v for k, v in planned.job.settings if k != "clip.bound"}
    assert dict(check.settings) == same and chosen.runs[0] == (check, 0)

    def done(accuracy):
        return {
            key_of(planned.job, 0): {"result": {"accuracy": 0.6, "noise_law": "float"}},
            key_of(check, 0): {"result": {"accuracy": accuracy}},
        }

    (learned,) = runner.rows(chosen, done(0.95))
    assert learned.ours == 0.6 and learned.law == "float"
    (lost,) = runner.rows(chosen, done(0.5))
    assert lost.ours is None and lost.difference is None
    assert lost.why == (
        "shrunk too far to say anything: the same run without noise reaches 0.500, the paper's 0.993",
    )
    (unknown,) = runner.rows(chosen, {key_of(planned.job, 0): {"result": {"accuracy": 0.6}}})
    assert unknown.ours is None and "not finished" in unknown.why[0]


def test_at_full_scale_too_nothing_is_judged_by_runs_whose_run_without_noise_does_not_learn():
    """The number stays, without a difference; the run without noise itself is compared with its print, which it misses."""
    plain = Train("non-private", "cancer", TINY)
    noised = Train("fed-cdp", "cancer", changes(dict(TINY), **{"clip.bound": 1.0}))
    shorter = Train("fed-cdp", "cancer", changes(dict(TINY), rounds=3, **{"clip.bound": 1.0}))
    attacked = Inference("outputs", plain)
    cells = (Cell("none", "x", 0.993, plain, "accuracy"), Cell("noised", "x", 0.9, noised, "accuracy"),
             Cell("shorter", "x", 0.9, shorter, "accuracy"), Cell("attacked", "x", 0.6, attacked, "mse"),
             Cell("control", "x", None, attacked, "mse"))  # fmt: skip
    chosen = runner.plan(Entry("p1-table1", "Test", cells), "paper")

    def rows(reached):
        done = {key_of(cell.job, 0): {"result": {"accuracy": 0.6, "mse": 0.6}} for cell in cells}
        return runner.rows(chosen, done | {key_of(plain, 0): {"result": {"accuracy": reached}}})

    lost = rows(0.7)
    assert [row.judged for row in lost] == [True, False, False, False, True] and all(row.ours for row in lost)
    assert lost[0].difference == pytest.approx(-0.293)
    for row in lost[1:4]:
        assert (row.difference, row.matches, row.ours) == (None, None, 0.6)
        assert row.why[0] == "not judged: the run without noise reaches 0.700, the paper's 0.993"
    page = render.markdown(chosen, lost, "fedveil", {})
    assert "| noised | x | 0.900 | 0.600 | not judged | [1] |" in page and "0 of 1 compared numbers come out" in page
    assert "; 3 are not judged, for the run without noise does not come near the paper's." in page
    assert all(row.judged for row in rows(0.95))


def test_the_page_of_what_is_finished_shows_just_that_and_runs_nothing(tmp_path, counted):
    runner.run(runner.plan(only(entry(), ("epsilon",)), "paper"), tmp_path)
    before = len(counted)
    chosen = runner.only_finished(runner.plan(entry(), "paper"), runner.finished(tmp_path))
    rows = runner.rows(chosen, runner.finished(tmp_path))
    assert [row.column for row in rows] == ["a", "b"] and len(counted) == before
    assert "2 of 4 cells were run" in render.markdown(chosen, rows, "fedveil reproduce p9-table1", {})
    with pytest.raises(UserError, match="no cell"):
        runner.only_finished(runner.plan(entry(), "paper"), {})


def test_the_page_of_what_is_finished_counts_the_seeds_that_each_cell_has():
    longer = Train("non-private", "cancer", changes(dict(TINY), rounds=5))
    cells = (Cell("r", "one", 0.9, longer, "accuracy"), Cell("r", "three", 0.9, Train("non-private", "cancer", TINY), "accuracy"))
    done = {key_of(longer, 0): {"result": {"accuracy": 0.7}}}
    done |= {key_of(cells[1].job, seed): {"result": {"accuracy": 0.8 + seed / 100}} for seed in range(3)}
    chosen = runner.only_finished(runner.plan(Entry("p9-table1", "Test", cells), "paper", seeds=5), done)
    one, three = runner.rows(chosen, done)
    assert (one.seeds, one.ours, one.deviation) == (1, 0.7, None)
    assert three.seeds == 3 and three.ours == pytest.approx(0.81) and three.deviation == pytest.approx(0.01)
    page = render.markdown(chosen, (one, three), "fedveil", {})
    assert "Seeds: 0, 1, 2 (± is their standard deviation; cells without it have seed 0 alone)." in page


def test_a_figure_that_compares_seed_by_seed_shows_only_seeds_that_all_its_cells_have():
    """Else a mean over three seeds would be held against a single one."""
    jobs_of = {row: Train("non-private", "cancer", changes(dict(TINY), rounds=r)) for r, row in enumerate("ab", 2)}
    done = {key_of(jobs_of["a"], seed): {"result": {"accuracy": 0.8 + seed / 100}} for seed in range(3)}
    done |= {key_of(jobs_of["b"], 0): {"result": {"accuracy": 0.8}}}
    cells = tuple(Cell(row, "x", None, job, "accuracy") for row, job in jobs_of.items())
    for paired, seeds, mean in ((False, 3, 0.81), (True, 1, 0.8)):
        chosen = runner.only_finished(runner.plan(Entry("p9-fig1", "Test", cells, paired=paired), "paper", seeds=3), done)
        assert chosen.seeds == seeds and runner.rows(chosen, done)[0].ours == pytest.approx(mean)


@pytest.mark.parametrize(
    ("recipe", "change", "law"),
    [
        ("dp-baseline", {}, "exact"),
        ("dp-baseline", {"grid": 0.0}, "float"),
        ("dp-dyns-l2max", {}, "float"),
        ("ldp-fl", {}, "reports of two values"),
        ("non-private", {}, "none"),
    ],
)
def test_a_cell_names_the_noise_that_its_run_drew(recipe, change, law):
    assert jobs.law_of(with_changes(get(recipe), change)) == law


def test_a_page_without_printed_numbers_has_no_columns_for_them(tmp_path):
    plain = Train("non-private", "cancer", TINY)
    done = {key_of(plain, 0): {"result": {"accuracy": 0.9, "rounds": 4}, "seconds": 1.0}}
    for paper, head in ((None, "| row | column | ours | why |"), (0.9, "| row | column | paper | ours | difference | why |")):
        chosen = runner.plan(Entry("p9-fig1", "Test", (Cell("a", "b", paper, plain, "accuracy"),), "It is."), "paper")
        page = render.markdown(chosen, runner.rows(chosen, done), "fedveil", {})
        assert head in page and ("difference" in page) is (paper is not None)
        table = [line for line in page.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in table}) == 1


def test_a_page_says_how_long_the_jobs_took_that_are_there():
    longer = Train("non-private", "cancer", changes(dict(TINY), rounds=5))
    both = {"a": Train("non-private", "cancer", TINY), "b": longer}
    cells = tuple(Cell(row, "x", 0.9, job, "accuracy") for row, job in both.items())
    chosen = runner.plan(Entry("p9-table1", "Test", cells), "paper", seeds=2)
    lines = {key_of(cells[0].job, seed): {"result": {"accuracy": 0.9}, "seconds": 3000.0} for seed in (0, 1)}
    lines |= {key_of(longer, 1): {"failed": "no data", "seconds": 9000.0}, "another": {"result": {}, "seconds": 9000.0}}
    assert "\n2 jobs, 1:40 h of one core.\n" in render.markdown(chosen, runner.rows(chosen, lines), "fedveil", {}, lines)


@pytest.mark.parametrize(
    ("name", "said"),
    [("p1-table3", "ratios are: 0 of 15 ratios"), ("p2-table10", "ratios are: 0 of 25 ratios"),
     ("p3-table9", "ratios are: 0 of 20 ratios"), ("p5-table5", "and the print has no ratios")],
)  # fmt: skip
def test_a_page_of_times_compares_ratios_alone(name, said):
    chosen = runner.plan(find(name), "paper")
    done = {key_of(job, 0): {"result": {"seconds": 7.0, "milliseconds": 7.0, "over_plain": 9.9}} for job, _ in chosen.runs}
    rows = runner.rows(chosen, done)
    text = render.summary(rows)
    assert text.startswith("Times of other hardware are not compared") and said in text and "compared numbers" not in text
    assert all((row.difference is None) == ("over non-private" not in row.row) for row in rows)
    mixed = runner.plan(find("p3-table10"), "paper")
    assert "times of other hardware are not compared" in render.summary(runner.rows(mixed, {}))


def test_a_run_that_ended_before_its_rounds_says_so_also_where_it_is_attacked():
    run = Train("udp-fl-staircase", "cancer", changes(dict(TINY), rounds=150))
    attacked = Inference("attribute", run)
    cells = (Cell("own", "x", None, run, "accuracy", ("no-numbers",)), Cell("of", "x", None, attacked, "accuracy"))
    chosen = runner.plan(Entry("p9-table1", "Test", cells), "paper", seeds=3)

    def said(*rounds):
        done = {key_of(run, seed): {"result": {"accuracy": 0.8, "rounds": r, "stopped": "the budget is used up"}}
                for seed, r in enumerate(rounds)}  # fmt: skip
        done |= {key_of(attacked, 0): {"result": {"accuracy": 0.7}}}
        return [row.why for row in runner.rows(chosen, done)]

    for why in said(76, 150, 78):
        assert why[:2] == tuple(f"ended at round {r} of 150: the budget is used up" for r in (76, 78))
    assert not any("ended" in text for why in said(150, 150) for text in why)


@pytest.mark.parametrize(("recipe", "law"), [("non-private", "none"), ("udp-fl-gaussian", "exact")])
def test_an_attack_on_a_run_names_the_noise_of_that_run_whether_or_not_the_run_is_kept(recipe, law):
    attacked = Inference("attribute", Train(recipe, "cancer", TINY))
    chosen = runner.plan(Entry("p9-table1", "Test", (Cell("of", "x", None, attacked, "accuracy"),)), "paper")
    done = {key_of(attacked, 0): {"result": {"accuracy": 0.7}}}
    assert [row.law for row in runner.rows(chosen, done)] == [law]
    kept = done | {key_of(attacked.train, 0): {"result": {"noise_law": "float"}}}
    assert [row.law for row in runner.rows(chosen, kept)] == ["float"]
    assert [row.law for row in runner.rows(chosen, {})] == [""]


def test_the_moments_of_a_run_are_counted_on_the_orders_of_the_rows_with_one_sigma():
    """Also where epsilon is so small that the best order is far above 63."""
    job = Train("fed-cdp", "mnist", changes(rounds=4))
    for sigma in (0.7, 6.0, 60.0):
        run = {**result(), "sigmas": [[r, sigma] for r in range(1, 5)]}
        spent = jobs.measure("spent_to:moments:0.8", run, job, job)
        assert spent == pytest.approx(jobs.execute(Epsilon("moments", 200, sigma=sigma), 0, None)["epsilon"], rel=1e-12)
    assert spent < np.log(1e5) / 62
