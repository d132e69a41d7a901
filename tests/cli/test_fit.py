"""`fedveil fit` and `fedveil data check`: one JSON document, plain words, a file that both commands take."""

import json
import shlex
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import fedveil as fv
from fedveil.cli import build, main
from fedveil.federation import loop
from fedveil.federation.config import tomllib
from fedveil.report import view
from fedveil.report.facts import gather


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
    assert "server, which sees only the noised sum over all clients" in out.stdout


def test_a_column_named_like_an_identifier_is_left_out_and_said_so(patients, tmp_path):
    words = ("fit", str(patients), "--target", "outcome", "--group", "site", "--epsilon", "4", "--set", "rounds=20")
    said = run(*words, "--out", str(tmp_path / "a"))
    assert "'id' looks like an identifier by its name" in said.stdout and "--keep id" in said.stdout
    facts = json.loads((tmp_path / "a" / "result.json").read_text())
    assert not any(line.startswith("id:") for line in facts["found"])
    assert fv.open_run(tmp_path / "a").config.table["drop"] == ["id"]
    kept = json.loads(run(*words, "--keep", "id", "--out", str(tmp_path / "b"), "--json").stdout)
    assert any(line.startswith("id:") for line in kept["found"]) and "dropped" not in kept["choices"]


def test_check_says_which_columns_are_left_out_for_their_names(patients, tmp_path):
    plan = tmp_path / "plan.toml"
    said = run("data", "check", str(patients), "--target", "outcome", "--group", "site", "--write", str(plan))
    assert "identifier by its name" in said.stdout and "--keep id" in said.stdout
    assert tomllib.loads(plan.read_text())["table"]["drop"] == ["id"]
    run("data", "check", str(patients), "--target", "outcome", "--group", "site", "--keep", "id", "--write", str(plan))
    assert tomllib.loads(plan.read_text())["table"]["keep"] == ["id"]


def test_a_configuration_that_learns_from_an_identifier_is_run_with_a_word_about_it(tmp_path):
    """A file written by hand is obeyed; what it asks for by mistake is said before the first round."""
    table = tmp_path / "rows.csv"
    table.write_text("user_id,age,y\n" + "".join(f"{i},{i % 90},{i % 2}\n" for i in range(200)))
    words = ("run", "fed-cdp-sound", "--set", f"dataset={table}", "--set", "target=y", "--set", "clients=2",
             "--set", "partition=iid", "--set", "rounds=1", "--set", "local_steps=1")  # fmt: skip
    said = run(*words, "--out", str(tmp_path / "run"))
    assert "check: column 'user_id' looks like an identifier by its name" in said.stderr


def test_fit_leaves_a_report_that_says_how_to_make_it_again(patients, tmp_path):
    words = ("fit", str(patients), "--target", "outcome", "--group", "site", "--ranges", "age=0:110", "--epsilon", "4", "--set",
             "rounds=20", "--classes", "alive,died")  # fmt: skip
    said = run(*words, "--out", str(tmp_path / "a")).stdout
    assert "report.html" in said and (tmp_path / "a" / "report.html").stat().st_size > 10_000
    command = json.loads((tmp_path / "a" / "run.json").read_text())["command"]
    again = run(*shlex.split(command)[1:], "--out", str(tmp_path / "b"), "--json")
    assert json.loads(again.stdout)["test_accuracy"] == json.loads((tmp_path / "a" / "result.json").read_text())["test_accuracy"]


def test_an_interrupted_fit_says_how_to_go_on_and_does(patients, tmp_path, monkeypatch):
    real, played = loop.record_round, []

    def interrupted(*args):
        played.append(real(*args))
        if len(played) == 12:
            raise KeyboardInterrupt
        return played[-1]

    monkeypatch.setattr(loop, "record_round", interrupted)
    out = run("fit", str(patients), "--target", "outcome", "--group", "site", "--epsilon", "4", "--out", str(tmp_path / "a"))
    assert out.exit_code == 130 and "Go on with" in out.stderr
    monkeypatch.setattr(loop, "record_round", real)
    again = run(*shlex.split(out.stderr.strip().splitlines()[-1])[1:], "--json")
    facts = json.loads(again.stdout)
    assert facts["rounds"] == 20 and facts["learned"] is True
    (row,) = [r for r in facts["ledger"] if (r["observer"], r["unit"]) == ("server", "example")]
    assert row["verdict"] == "sound" and row["epsilon"] <= 4


@pytest.mark.parametrize("secret", ["false", "true"])
def test_fit_goes_on_with_its_own_run_and_looks_once(patients, tmp_path, monkeypatch, secret):
    words = ("fit", str(patients), "--target", "outcome", "--group", "site", "--epsilon", "4.0000001", "--delta", "1e-6",
             "--set", f"secure_noise={secret}", "--set", "checkpoint_every=1", "--out", str(tmp_path / "a"))  # fmt: skip
    real, played = loop.record_round, []

    def interrupted(*args):
        played.append(real(*args))
        if len(played) == 3:
            raise KeyboardInterrupt
        return played[-1]

    monkeypatch.setattr(loop, "record_round", interrupted)
    out = run(*words)
    assert out.exit_code == 130 and "fedveil fit" in out.stderr
    monkeypatch.setattr(loop, "record_round", real)
    going = shlex.split(out.stderr.strip().splitlines()[-1])[1:]
    facts = json.loads(run(*going, "--json").stdout)
    # With secret noise the round that was cut short is another release: it is charged, and the budget ends one round earlier.
    assert facts["rounds"] == (20 if secret == "false" else 19) and facts["verdict"].startswith("The model is")
    ledger = (tmp_path / "a" / "ledger.jsonl").read_text().splitlines()
    assert sum("a noised look at" in line for line in ledger) == 2
    kept = (tmp_path / "a" / "result.json").read_bytes()
    again = run(*going, "--json")
    assert "is finished" in again.stderr and (tmp_path / "a" / "result.json").read_bytes() == kept


def test_a_delta_that_is_too_large_leaves_no_folder(patients, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fedveil", "fit", str(patients), "--target", "outcome", "--epsilon", "4", "--delta", "0.5",
                                      "--out", str(tmp_path / "a")])  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and "--set allow_large_delta=true" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


GERMAN = "Klinik;Alter;CRP;Aufnahme;Geschlecht;Ausgang\n" + "".join(
    f"{'AB'[i % 2]};{20 + i % 70};{i % 40},{i % 9};{1 + i % 28:02d}.{1 + i % 12:02d}.2023;{'wmd'[i % 3]};"
    f"{'ja' if i % 70 > 35 else 'nein'}\n"
    for i in range(800)
)


@pytest.mark.parametrize("mark", [";", "\t"])
def test_tables_of_spreadsheets_are_read_by_the_separator_of_their_header(mark, tmp_path):
    path = tmp_path / "klinik.csv"
    path.write_text(GERMAN.replace(";", mark), "utf-8-sig")
    out = run("fit", str(path), "--target", "Ausgang", "--group", "Klinik", "--epsilon", "4", "--set", "rounds=20", "--out",
              str(tmp_path / "run"))  # fmt: skip
    assert out.exit_code == 0 and "2 sites" in out.stdout
    assert "CRP: left out; if it holds numbers or dates, `fedveil data check` may say why" in out.stdout


def test_check_says_what_is_written_so_that_it_would_be_lost_and_writes_nothing_of_it(tmp_path):
    path, plan = tmp_path / "klinik.csv", tmp_path / "plan.toml"
    path.write_text(GERMAN)
    words = ("data", "check", str(path), "--target", "Ausgang", "--group", "Klinik", "--categories", "Geschlecht=w|m", "--ranges",
             "Alter=0:50", "--classes", "ja,nein")  # fmt: skip
    facts = json.loads(run(*words, "--write", str(plan), "--json").stdout)
    said = {row["column"]: row["suggestion"] for row in facts["columns"]}
    assert "decimal comma" in said["CRP"] and "dates" in said["Aufnahme"] and "0 to 50" in said["Alter"]
    assert "266 rows hold a word that is not declared (d)" in said["Geschlecht"] and said["Ausgang"] == ""
    text = plan.read_text()
    assert tomllib.loads(text)["table"]["categories"] == {"Geschlecht": ["w", "m"]}
    assert "comma" not in text and "266" not in text and "dates" not in text


def test_check_says_that_a_constant_target_teaches_nothing(tmp_path):
    path = tmp_path / "same.csv"
    path.write_text("age,y\n" + "".join(f"{i},1\n" for i in range(30)))
    facts = json.loads(run("data", "check", str(path), "--target", "y", "--json").stdout)
    assert "nothing to learn" in facts["columns"][1]["suggestion"]


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--classes", "dead,alive"], "not among the classes dead, alive"), (["--task", "regression"], "drop --task regression"),
     (["--ranges", "site=0:1", "--classes", "died,alive"], "not a number, but the column has a range")],
)  # fmt: skip
def test_what_contradicts_a_declaration_is_refused_before_a_look_is_charged(more, message, patients, tmp_path):
    with pytest.raises(fv.UserError, match=message):
        run("fit", str(patients), "--target", "outcome", "--epsilon", "4", *more, "--out", str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def test_no_look_is_made_for_a_folder_that_holds_a_run(patients, tmp_path, monkeypatch):
    words = ("fit", str(patients), "--target", "outcome", "--epsilon", "4", "--set", "rounds=20", "--out", str(tmp_path / "a"))
    assert run(*words).exit_code == 0
    monkeypatch.setattr("fedveil.federation.look.look", None)
    with pytest.raises(fv.UserError, match="add --resume to continue it"):
        run(*words)


def test_a_look_in_vain_keeps_its_folder_and_says_so(patients, tmp_path):
    path = tmp_path / "same.csv"
    path.write_text("age,y\n" + "".join(f"{i % 90},yes\n" for i in range(2000)))
    with pytest.raises(fv.UserError, match="keep that folder"):
        run("fit", str(path), "--target", "y", "--epsilon", "4", "--out", str(tmp_path / "a"))
    assert (tmp_path / "a" / "ledger.jsonl").exists()


def test_the_report_of_a_fit_names_the_target_the_sites_and_what_the_looks_took(patients, tmp_path):
    run("fit", str(patients), "--target", "outcome", "--group", "site", "--epsilon", "4", "--set", "rounds=20", "--out",
        str(tmp_path / "run"))  # fmt: skip
    facts = gather(tmp_path / "run")
    said = {name: (value, text) for name, value, text in view.training(facts)}
    assert said["Target"][0] == "outcome" and said["Clients"][0] == "2"
    assert "'site'" in said["Data"][1] and "groups" not in said["Data"][1]
    share = facts.run.config.table["share"]
    assert said["Looks"][0] == "2 paid looks" and f"{100 * share:g}% of the budget's square" in said["Looks"][1]
    assert 0 < facts.promise.looks_epsilon < facts.run.config.target_epsilon
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "2 paid looks" in page and "died" not in page and "P1" not in page
