"""The command line of the promise: numbers, JSON shapes, messages for wrong input, tables that fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedveil import cli
from fedveil.cli.common import figure
from fedveil.federation.config import load_config
from fedveil.federation.loop import prepare
from fedveil.federation.loop import run as simulate
from fedveil.jsons import plain
from fedveil.privacy.events import Claim, Event, Noise, Release, Sampling
from fedveil.privacy.ledger import Header, Ledger

ANSWER = {"accountant", "epsilon", "delta", "verdict", "reason", "papers_condition"}
MNIST = ["--noise-multiplier", "6", "--sampling-rate", "0.01", "--steps", "10000", "--delta", "1e-5"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Call the program as the shell would: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedveil", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
            raise SystemExit(0)
        code = ended.value.code
        shown = capsys.readouterr()
        return (code if isinstance(code, int) else int(code is not None)), shown.out, shown.err

    return call


def in_json(run: Any, *words: str | Path) -> Any:
    code, out, err = run(*words, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def ledger_file(tmp_path: Path) -> Path:
    """B = 5 of 500, 100 local steps, sigma = 6; client 0 takes part in 10 rounds: 0.172 for the server."""
    event = Event(Noise("gaussian", 6.0), Sampling("poisson", 0.01), steps=100)
    claims = (
        Claim("server", "example", "sound", event=event),
        Claim("server", "example", "nominal", "global q", event, "everyone", "moments"),
        Claim("server", "client", "none", "client level does not follow from example level"),
        Claim("client-process", "example", "none", "clipped gradients are not noised"),
    )
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    with Ledger.create(run_folder / "ledger.jsonl", Header(1e-5, 100, sizes=(500,) * 100)) as ledger:
        for r in range(10):
            ledger.spend(Release(r, (((0, r + 1), claims),)))
    return run_folder / "ledger.jsonl"


# -- epsilon


def test_all_accountants_print_the_published_numbers_and_what_they_are_worth(run: Any) -> None:
    rows = in_json(run, "epsilon", "--mechanism", "gaussian", *MNIST, "--accountant", "all")
    assert all(set(row) == ANSWER for row in rows)
    by = {row["accountant"]: row for row in rows}
    assert by["moments"]["epsilon"] == pytest.approx(0.8227, abs=1e-4)
    assert by["pld"]["epsilon"] == pytest.approx(0.6016, abs=2e-3)
    assert by["zcdp"]["epsilon"] == pytest.approx(1.1588, abs=1e-4)
    assert by["optimal"]["epsilon"] == pytest.approx(6.7402, abs=1e-3)
    assert by["basic"]["epsilon"] == pytest.approx(123.457, abs=1e-3)
    assert by["basic"]["delta"] == pytest.approx(1e-3)
    assert [by[name]["verdict"] for name in ("pld", "rdp", "zcdp", "basic")] == [
        "sound",
        "sound",
        "nominal",
        "nominal",
    ]
    assert by["zcdp"]["reason"] and by["basic"]["reason"]


def test_one_accountant_prints_one_object(run: Any) -> None:
    row = in_json(run, "epsilon", *MNIST, "--accountant", "rdp")
    assert set(row) == ANSWER
    assert row["epsilon"] == pytest.approx(0.6592, abs=1e-3)


def test_layers_cost_the_square_root(run: Any) -> None:
    row = in_json(run, "epsilon", *MNIST, "--layers", "3", "--accountant", "moments")
    assert row["epsilon"] == pytest.approx(1.468, abs=1e-3)


def test_fixed_batches_are_judged_for_replace_one_with_twice_the_sensitivity(run: Any) -> None:
    words = ["epsilon", "--noise-multiplier", "6", "--batch", "5", "--population", "500", "--steps", "1000"]
    row = in_json(run, *words, "--sampling", "fixed", "--accountant", "rdp")
    assert row["epsilon"] == pytest.approx(0.8868, abs=2e-3)
    assert in_json(run, *words, "--accountant", "rdp") == row  # a batch of a population means fixed size


def test_partition_and_none_do_not_amplify(run: Any) -> None:
    words = ["epsilon", "--noise-multiplier", "6", "--steps", "10"]
    for sampling in ("partition", "none"):
        assert in_json(run, *words, "--sampling", sampling)["epsilon"] == pytest.approx(2.11, abs=0.01)


def test_poisson_takes_a_batch_of_a_population_too(run: Any) -> None:
    words = ["epsilon", "--noise-multiplier", "6", "--steps", "100", "--sampling", "poisson"]
    by_rate = in_json(run, *words, "--sampling-rate", "0.01")
    assert in_json(run, *words, "--batch", "5", "--population", "500") == by_rate


def test_a_schedule_moves_the_multiplier(run: Any) -> None:
    words = ["epsilon", "--sampling-rate", "0.01", "--steps", "10000"]
    falling = in_json(run, *words, "--schedule", "linear:15:4.85")["epsilon"]
    low, high = (in_json(run, *words, "--noise-multiplier", str(s))["epsilon"] for s in (15, 4.85))
    assert low < falling < high
    assert falling == pytest.approx(0.409, rel=0.01)


def test_an_accountant_that_refuses_says_so_without_a_number(run: Any) -> None:
    words = ["epsilon", "--mechanism", "staircase", "--noise-multiplier", "2", "--dimension", "1000"]
    row = in_json(run, *words)
    assert (row["epsilon"], row["verdict"]) == (None, "none") and "rdp" in row["reason"]
    assert in_json(run, *words, "--accountant", "rdp")["verdict"] == "sound"


@pytest.mark.parametrize(
    ("accountant", "expected"), [("advanced-tanh", 9.395), ("optimal", 9.555), ("basic", 158.04)]
)
def test_an_honest_delta_is_paid_in_full_and_no_more(run: Any, accountant: str, expected: float) -> None:
    row = in_json(run, "epsilon", *MNIST, "--accountant", accountant, "--honest")
    assert row["verdict"] == "sound" and row["delta"] <= 1e-5 * (1 + 1e-9)
    assert row["epsilon"] == pytest.approx(expected, abs=0.005)


def test_no_steps_reveal_nothing(run: Any) -> None:
    assert in_json(run, "epsilon", "--noise-multiplier", "1", "--steps", "0")["epsilon"] == 0


# -- calibrate


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "staircase"])
def test_calibrated_noise_reaches_epsilon_from_below(run: Any, mechanism: str) -> None:
    shared = ["--delta", "1e-5", "--steps", "1000", "--sampling-rate", "0.05", "--mechanism", mechanism]
    found = in_json(run, "calibrate", "--epsilon", "2", *shared)
    assert 2 * 0.999 <= found["epsilon"] <= 2
    assert {"noise_multiplier", "noise_std", "epsilon"} <= set(found)
    if mechanism == "staircase":
        assert found["noise_multiplier"] == pytest.approx(1 / found["lambda"])
        assert 0 < found["nu"] < 1
    else:
        assert "lambda" not in found
    back = in_json(run, "epsilon", "--noise-multiplier", repr(found["noise_multiplier"]), *shared)
    assert back["epsilon"] == pytest.approx(found["epsilon"], rel=1e-3)


def test_calibrating_for_layers_gives_noise_that_layers_accept(run: Any) -> None:
    shared = ["--steps", "100", "--sampling-rate", "0.05", "--layers", "4", "--relation", "replace-one"]
    found = in_json(run, "calibrate", "--epsilon", "1", *shared)
    back = in_json(run, "epsilon", "--noise-multiplier", repr(found["noise_multiplier"]), *shared)
    assert 0.999 <= back["epsilon"] <= 1


def test_all_mechanisms_are_compared_by_noise(run: Any) -> None:
    rows = in_json(run, "calibrate", "--epsilon", "2", "--steps", "100", "--mechanism", "all")
    assert {"gaussian", "laplace", "staircase"} <= {row["mechanism"] for row in rows}
    assert all(row["epsilon"] <= 2 for row in rows)
    assert [row["noise_std"] for row in rows] == sorted(row["noise_std"] for row in rows)


def test_given_noise_solves_for_the_steps(run: Any) -> None:
    shared = ["--noise-multiplier", "1.1", "--sampling-rate", "0.01"]
    steps = in_json(run, "calibrate", "--epsilon", "2", *shared)["steps"]
    assert in_json(run, "epsilon", *shared, "--steps", str(steps))["epsilon"] <= 2
    assert in_json(run, "epsilon", *shared, "--steps", str(steps + 1))["epsilon"] > 2


def test_a_staircase_in_narrow_steps_is_priced_as_the_ledger_of_a_run_prices_it(run: Any, tmp_path: Path) -> None:
    small = ["clients=4", "partition=iid", "rounds=3", "local_steps=4", "batch_size=20", "sigma=2", "report=false"]
    config = load_config("udp-fl-staircase", ["dataset=cancer", *small])
    (row,) = (r for r in simulate(config, tmp_path / "run")["ledger"] if (r["observer"], r["unit"]) == ("server", "example"))
    prepared = prepare(config)
    dimension, size = prepared.task.setting.dimension, min(prepared.partition.sizes)
    shared = ["--mechanism", "staircase", "--width", "0", "--dimension", str(dimension), "--sampling-rate", str(20 / size),
              "--steps", "12", "--accountant", "rdp"]  # fmt: skip
    priced = in_json(run, "epsilon", "--noise-multiplier", "2", *shared)
    assert row["verdict"] == "sound" and priced["epsilon"] == pytest.approx(row["epsilon"], rel=1e-3)
    named = in_json(run, "epsilon", "--noise-multiplier", "2", *shared, "--width", str(dimension**-0.5))
    wide = in_json(run, "epsilon", "--noise-multiplier", "2", *shared, "--width", "1")
    assert named["epsilon"] == priced["epsilon"] < wide["epsilon"]
    found = in_json(run, "calibrate", "--epsilon", str(priced["epsilon"]), *shared)
    assert found["noise_multiplier"] == pytest.approx(2, rel=2e-3) and found["epsilon"] <= priced["epsilon"]
    counted = in_json(run, "calibrate", "--epsilon", str(priced["epsilon"]), "--noise-multiplier", "2", *shared)
    assert counted["steps"] == 12


# -- wrong input


@pytest.mark.parametrize(
    ("words", "option", "allowed"),
    [
        (["epsilon", "--noise-multiplier", "0"], "--noise-multiplier", "greater than 0"),
        (["epsilon", "--noise-multiplier", "-1"], "--noise-multiplier", "greater than 0"),
        (["epsilon", "--noise-multiplier", "nan"], "--noise-multiplier", "greater than 0"),
        (["epsilon", "--noise-multiplier", "inf"], "--noise-multiplier", "finite"),
        (["epsilon", "--noise-multiplier", "six"], "--noise-multiplier", "float"),
        (["epsilon"], "--noise-multiplier", "exactly one"),
        (["epsilon", "--noise-multiplier", "1", "--schedule", "linear:2:1"], "--schedule", "exactly one"),
        (["epsilon", *MNIST, "--sampling-rate", "1.5"], "--sampling-rate", "at most 1"),
        (["epsilon", *MNIST, "--sampling-rate", "0"], "--sampling-rate", "greater than 0"),
        (["epsilon", *MNIST, "--sampling-rate", "nan"], "--sampling-rate", "at most 1"),
        (["epsilon", *MNIST, "--delta", "1"], "--delta", "less than 1"),
        (["epsilon", *MNIST, "--delta", "-0.1"], "--delta", "less than 1"),
        (["epsilon", *MNIST, "--delta", "nan"], "--delta", "less than 1"),
        (["epsilon", *MNIST, "--steps", "-5"], "--steps", "at least 0"),
        (["epsilon", *MNIST, "--steps", "1.5"], "--steps", "integer"),
        (["epsilon", *MNIST, "--layers", "0"], "--layers", "at least 1"),
        (["epsilon", *MNIST, "--dimension", "0"], "--dimension", "at least 1"),
        (["epsilon", *MNIST, "--nu", "2"], "--nu", "from 0 to 1"),
        (["epsilon", *MNIST, "--width", "0"], "--width", "--mechanism staircase"),
        (["epsilon", *MNIST, "--mechanism", "staircase", "--width", "-1"], "--width", "greater than 0"),
        (["epsilon", *MNIST, "--mechanism", "staircase", "--width", "0", "--clip-norm", "l1"], "--width", "L2 clip"),
        (["epsilon", *MNIST, "--mechanism", "staircase", "--width", "0", "--layers", "3"], "--width", "--layers"),
        (["calibrate", "--epsilon", "1", "--mechanism", "all", "--width", "0"], "--width", "--mechanism staircase"),
        (["epsilon", *MNIST, "--mechanism", "gausian"], "--mechanism", "Did you mean 'gaussian'"),
        (["epsilon", *MNIST, "--accountant", "pdl"], "--accountant", "Did you mean 'pld'"),
        (["epsilon", *MNIST, "--sampling", "possion"], "--sampling", "Did you mean 'poisson'"),
        (["epsilon", *MNIST, "--clip-norm", "l3"], "--clip-norm", "l1, l2"),
        (["epsilon", *MNIST, "--relation", "swap-one"], "--relation", "replace-one"),
        (["epsilon", *MNIST, "--sampling", "fixed"], "--sampling-rate", "only --sampling poisson"),
        (["epsilon", *MNIST, "--batch", "5"], "--batch", "no meaning"),
        (["epsilon", "--noise-multiplier", "1", "--sampling", "fixed"], "--sampling fixed", "--population"),
        (["epsilon", "--noise-multiplier", "1", "--batch", "9", "--population", "5"], "--batch", "from 1 to"),
        (
            ["epsilon", "--noise-multiplier", "1", "--batch", "0", "--population", "5"],
            "--batch",
            "at least 1",
        ),
        (["epsilon", "--schedule", "liner:15:4.85"], "--schedule", "linear"),
        (["epsilon", "--schedule", "linear:15:-4"], "--schedule", "greater than 0"),
        (["epsilon", "--schedule", "cosine-cyclic:15"], "--schedule", "floor"),
        (["epsilon", *MNIST, "--plot", "e.pdf"], "--plot", ".png or .svg"),
        (["epsilon", *MNIST, "--plot", "/nowhere/e.png"], "--plot", "does not exist"),
        (["calibrate", "--epsilon", "0"], "--epsilon", "greater than 0"),
        (["calibrate", "--epsilon", "nan"], "--epsilon", "greater than 0"),
        (["calibrate"], "--epsilon", "Missing"),
        (["calibrate", "--epsilon", "1", "--steps", "0"], "--steps", "at least 1"),
        (["calibrate", "--epsilon", "1", "--delta", "2"], "--delta", "less than 1"),
        (["calibrate", "--epsilon", "1", "--mechanism", "laplase"], "--mechanism", "Did you mean 'laplace'"),
        (["ledger", "/nowhere"], "/nowhere", "no ledger"),
    ],
)
def test_wrong_input_ends_with_2_and_names_the_option_and_its_range(
    run: Any, words: list[str], option: str, allowed: str
) -> None:
    code, out, err = run(*words)
    message = " ".join(err.replace("│", " ").split())
    assert code == 2 and out == ""
    assert option in message and allowed in message, message
    assert "Traceback" not in err


# -- ledger


def test_the_table_of_observers_and_units(run: Any, ledger_file: Path) -> None:
    rows = in_json(run, "ledger", ledger_file.parent)
    assert in_json(run, "ledger", ledger_file) == rows
    assert all({"observer", "unit", *(ANSWER - {"papers_condition"})} <= set(row) for row in rows)
    by = {(row["observer"], row["unit"], row["verdict"]): row for row in rows}
    assert by["server", "example", "sound"]["epsilon"] == pytest.approx(0.172, abs=6e-4)
    assert by["server", "example", "sound"]["simulated"] is True
    assert by["server", "example", "nominal"]["accountant"] == "moments"
    assert by["client-process", "example", "none"]["epsilon"] is None
    assert by["client-process", "example", "none"]["reason"] == "clipped gradients are not noised"


def test_another_delta_and_accountant(run: Any, ledger_file: Path) -> None:
    by_pld = in_json(run, "ledger", ledger_file)[0]
    by_rdp = in_json(run, "ledger", ledger_file, "--accountant", "rdp")[0]
    stricter = in_json(run, "ledger", ledger_file, "--delta", "1e-8")[0]
    assert by_rdp["epsilon"] > by_pld["epsilon"] and by_rdp["accountant"] == "rdp"
    assert stricter["epsilon"] > by_pld["epsilon"] and stricter["delta"] == 1e-8


def test_verify_is_quiet_about_whole_ledgers_and_names_the_broken_record(run: Any, ledger_file: Path) -> None:
    code, out, _ = run("ledger", ledger_file, "--verify")
    assert code == 0 and "11 records, all intact" in " ".join(out.split())
    assert in_json(run, "ledger", ledger_file, "--verify") == {
        "intact": True,
        "records": 11,
        "anchors": ["ledger.head"],
    }
    good = ledger_file.read_bytes()
    ledger_file.write_bytes(good.replace(b'"round":6', b'"round":5'))
    for words in (["--verify"], []):
        code, out, err = run("ledger", ledger_file, *words)
        assert code == 1 and "record 7" in err
    code, out, _ = run("ledger", ledger_file, "--verify", "--json")
    assert code == 1 and json.loads(out)["record"] == 7
    ledger_file.write_bytes(good[:-20])
    assert run("ledger", ledger_file)[0] == 1  # the head beside it knows the last record: it was accepted
    ledger_file.with_suffix(".head").unlink()
    code, _, err = run("ledger", ledger_file, "--verify")
    assert code == 1 and "record 10 is torn" in err
    code, out, _ = run("ledger", ledger_file)  # reading goes on without the torn record
    assert code == 0 and "interrupted" in out


# -- what people see


def test_tables_fit_eighty_columns(run: Any, ledger_file: Path) -> None:
    for words in (
        ["epsilon", *MNIST, "--accountant", "all"],
        ["calibrate", "--epsilon", "2", "--steps", "100", "--mechanism", "all", "--dimension", "1000"],
        ["ledger", ledger_file.parent],
        ["epsilon", "--help"],
        ["ledger", "--help"],
    ):
        code, out, _ = run(*words)
        assert code == 0 and out
        path_line = [line for line in out.splitlines() if str(ledger_file) in line]
        assert max(len(line) for line in out.splitlines() if line not in path_line) <= 80
        assert "\x1b" not in out


def test_the_ledger_table_shows_what_is_promised_and_what_is_not(run: Any, ledger_file: Path) -> None:
    _, out, _ = run("ledger", ledger_file)
    flat = " ".join(out.split())
    assert "server example 0.172" in flat and "client-process example none" in flat
    assert "holds when deployed with secret noise" in flat
    assert "Neighbours: zero-out" in flat


@pytest.mark.parametrize("command", ["epsilon", "calibrate", "ledger"])
def test_help_shows_examples(run: Any, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0 and f"fedveil {command} " in out and "Examples" in out


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plots_are_drawn(run: Any, tmp_path: Path, ledger_file: Path, ending: str) -> None:
    words = ["epsilon", "--noise-multiplier", "6", "--sampling-rate", "0.01", "--steps", "50"]
    magic = {"png": b"\x89PNG", "svg": b"<?xml"}[ending]
    for name, command in (
        ("e", words),
        ("c", ["calibrate", "--epsilon", "1", "--steps", "5"]),
        ("l", ["ledger", ledger_file]),
    ):
        target = tmp_path / f"{name}.{ending}"
        code, _, err = run(*command, "--plot", target)
        assert code == 0, err
        assert target.read_bytes().startswith(magic) and target.stat().st_size > 5000


def test_json_stays_alone_on_stdout_with_a_plot(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("epsilon", "--noise-multiplier", "6", "--json", "--plot", tmp_path / "e.svg")
    assert code == 0 and json.loads(out)["verdict"] == "sound" and (tmp_path / "e.svg").exists()


def test_the_program_itself_exits_with_2_on_wrong_input() -> None:
    words = [sys.executable, "-m", "fedveil", "epsilon", "--noise-multiplier", "0"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and "--noise-multiplier" in done.stderr and done.stdout == ""


# -- helpers


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.82273, "0.8227"), (123.457, "123.5"), (1e-5, "1e-5"), (1.01e-3, "0.001010"), (0, "0"), (None, "-"),
     (float("inf"), "infinite"), (12345.6, "12346"), (2.5e7, "2.5e7"), (-0.5, "-0.5000")],
)  # fmt: skip
def test_figures_are_short_and_honest(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_plain_data_has_nothing_json_cannot_hold() -> None:
    import numpy as np

    data = {"a": np.float64(1.5), "b": [np.int64(2), float("nan")], 3: (Path("x"), np.array([1, 2]))}
    assert plain(data) == {"a": 1.5, "b": [2, None], "3": ["x", [1, 2]]}


def test_a_ledger_shows_what_was_trained_elsewhere_on_public_data(run, tmp_path):
    note = "public backbone tiny: drawn; licence MIT; sha256 0123456789abcdef; with public pre-training"
    Ledger.create(tmp_path / "ledger.jsonl", Header(1e-6, 2, public=(note,))).close()
    assert Ledger.read(tmp_path / "ledger.jsonl").header.public == (note,)
    code, shown, _ = run("ledger", tmp_path)
    assert code == 0 and note[1:] in " ".join(shown.split())


@pytest.mark.parametrize(("rate", "holds"), [("0.0104", True), ("0.0105", False)])  # 1/(16 * 6) = 0.010417
@pytest.mark.parametrize("accountant", ["pld", "rdp", "moments", "zcdp", "optimal", "advanced", "basic", "all"])
def test_the_papers_condition_on_the_rate_is_said_whoever_counts(run: Any, accountant: str, rate: str, holds: bool) -> None:
    words = ["epsilon", "--noise-multiplier", "6", "--sampling-rate", rate, "--steps", "10", "--accountant", accountant]
    code, out, _ = run(*words)
    assert code == 0
    assert f"condition q < 1/(16 sigma) {'holds' if holds else 'fails'};" in " ".join(out.split())
    found = in_json(run, *words)
    assert {row["papers_condition"] for row in (found if isinstance(found, list) else [found])} == {holds}


def test_the_papers_condition_is_not_said_of_what_it_is_not_about(run: Any) -> None:
    for words in (["--mechanism", "laplace", "--clip-norm", "l1"], ["--sampling", "none"]):
        code, out, _ = run("epsilon", "--noise-multiplier", "6", *words)
        assert code == 0 and "1/(16" not in out
        assert in_json(run, "epsilon", "--noise-multiplier", "6", *words)["papers_condition"] is None
