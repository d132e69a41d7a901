"""`fedveil fit` and `fedveil data check`: one JSON document, plain words, a file that both commands take."""

import json

import numpy as np
import pytest
import tomllib
from typer.testing import CliRunner

from fedveil.cli import build


def run(*words):
    return CliRunner().invoke(build(), list(words), catch_exceptions=False)


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("table") / "patients.csv"
    age = random.integers(20, 90, 900)
    sick = age + random.normal(0, 12, 900) > 55
    lines = ["id,site,age,outcome", *(f"P{i},{'AB'[i % 2]},{age[i]},{'died' if sick[i] else 'alive'}" for i in range(900))]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_check_says_what_is_private_and_writes_a_file_without_values_of_the_rows(patients, tmp_path):
    plan = tmp_path / "plan.toml"
    out = run("data", "check", str(patients), "--target", "outcome", "--group", "site", "--write", str(plan), "--json")
    facts = json.loads(out.stdout)
    by_name = {row["column"]: row for row in facts["columns"]}
    assert by_name["id"]["suggestion"].startswith("drop") and "pays for a noised look" in by_name["age"]["private"]
    text = plan.read_text()
    assert "died" not in text and "P1" not in text
    assert tomllib.loads(text)["table"]["ranges"] == {}


def test_fit_takes_the_file_that_check_wrote(patients, tmp_path):
    plan = tmp_path / "plan.toml"
    run("data", "check", str(patients), "--target", "outcome", "--group", "site", "--drop", "id", "--write", str(plan))
    out = run("fit", str(plan), "--epsilon", "4", "--classes", "alive,died", "--ranges", "age=0:110", "--out",
              str(tmp_path / "run"), "--json")  # fmt: skip
    facts = json.loads(out.stdout)
    assert facts["learned"] is True and facts["test_accuracy"] > 0.7
    assert facts["choices"]["scaling"].startswith("public")


def test_fit_in_words_ends_with_one_sentence(patients, tmp_path):
    out = run("fit", str(patients), "--target", "outcome", "--group", "site", "--drop", "id", "--epsilon", "4", "--out",
              str(tmp_path / "run"), "--set", "rounds=20")  # fmt: skip
    last = out.stdout.strip().splitlines()[-1]
    assert last.startswith("The model is") and "sound epsilon of 4" in last
    assert "found" in out.stdout and "keep" not in last
