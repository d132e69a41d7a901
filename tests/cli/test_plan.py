"""`fedveil plan` as the shell calls it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from fedveil import cli
from fedveil.federation.config import load_config


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """(exit code, stdout, stderr) of the program."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedveil", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
            raise SystemExit(0)
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return call


def test_json_has_the_proposal_the_reasons_the_contrast_and_a_configuration(run: Any):
    code, out, err = run("plan", "--epsilon", 0.823, "--clients", 100, "--dataset", "mnist", "--json")
    assert code == 0, err
    data = json.loads(out)
    assert data["epsilon"] <= 0.823 and data["verdict"] == "sound" and data["observer"] == "server"
    assert data["local_steps"] == 1 and data["rounds"] >= 20 and data["clip"] > 0
    assert data["config"]["dataset"] == "mnist" and data["config"]["calibrate"] is True
    assert data["papers"]["sigma"] == 6 and data["papers"]["noise_to_signal"] > data["noise_to_signal"]
    assert len(data["why"]) > 4


@pytest.mark.parametrize("observer", ["server", "sum"])
@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist", "cifar10", "lfw", "adult", "cancer"])
def test_the_command_proposes_what_the_catalogue_ships(run: Any, dataset: str, observer: str):
    clients = 10 if dataset in ("lfw", "cancer") else 100
    code, out, err = run(
        "plan",
        "--epsilon",
        0.823,
        "--dataset",
        dataset,
        "--clients",
        clients,
        "--observer",
        observer,
        "--json",
    )
    assert code == 0, err
    config = json.loads(out)["config"]
    letter = {"server": "a", "sum": "b"}[observer]
    shipped = load_config(f"{dataset.replace('_', '-')}-headline-{letter}")
    assert config == {key: getattr(shipped, key) for key in config}


def test_the_users_own_data_needs_only_its_public_facts(run: Any):
    own = ("--examples", 20_000, "--kind", "table", "--columns", 40, "--classes", 2)
    code, out, err = run("plan", "--epsilon", 2, "--clients", 50, *own, "--json")
    assert code == 0, err
    data = json.loads(out)
    assert data["weights"] == 41 * 2 and data["examples_per_client"] == 400 and data["epsilon"] <= 2
    assert "dataset" not in data["config"] and data["config"]["features"] == "unit:constant=1"


def test_people_see_both_choices_side_by_side(run: Any):
    code, out, _ = run("plan", "--epsilon", 2, "--dataset", "adult", "--observer", "sum", "--clients", 50)
    assert code == 0 and "as in the papers" in out and "noise multiplier" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_plan_written_to_a_file_runs_within_its_budget(run: Any, tmp_path):
    file = tmp_path / "mine.toml"
    code, _, err = run(
        "plan", "--epsilon", 4, "--dataset", "cancer", "--clients", 5, "--observer", "sum", "--out", file
    )
    assert code == 0, err
    code, out, err = run("run", file, "--out", tmp_path / "run", "--set", "report=false", "--json")
    assert code == 0, err
    result = json.loads(out)
    (row,) = (r for r in result["ledger"] if (r["observer"], r["unit"]) == ("server", "example"))
    assert row["verdict"] == "sound" and row["epsilon"] <= 4
    # 143 test rows, seed fixed by default: any working run is far above the 0.63 of the larger class.
    assert result["test_accuracy"] > 0.85


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dataset", "mnits"), "Did you mean 'mnist'"),
        (("--dataset", "mnist", "--observer", "everyone"), "--observer"),
        ((), "--examples is missing"),
        (("--examples", "100", "--kind", "tabel"), "Did you mean 'table'"),
        (("--examples", "100", "--classes", "1"), "--classes must be 2 or more"),
        (("--examples", "100", "--kind", "table", "--columns", "0"), "--columns 1 or more"),
        (("--dataset", "mnist", "--clients", "0"), "at least one example"),
        (("--dataset", "mnist", "--examples", "50"), "at least one example"),
        (("--dataset", "mnist", "--out", "plan.json"), ".toml"),
        (("--dataset", "mnist", "--delta", "2"), "--delta"),
        (("--dataset", "mnist", "--out", "no/such/folder/plan.toml"), "cannot be written"),
    ],
)
def test_wrong_input_ends_with_code_2_and_says_what_to_do(run: Any, words: tuple[str, ...], message: str):
    code, out, err = run("plan", "--epsilon", "1", *words)
    assert code == 2 and not out and message in err


@pytest.mark.parametrize("epsilon", ["0", "-1", "nan", "inf"])
def test_a_budget_that_is_none_is_refused(run: Any, epsilon: str):
    code, out, err = run("plan", "--epsilon", epsilon, "--dataset", "mnist")
    assert code == 2 and not out and "--epsilon" in err
