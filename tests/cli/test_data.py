"""`fedveil data`: one JSON document, plain text, and errors that say what to do."""

import json

import pytest
from typer.testing import CliRunner

from fedveil.cli import build
from fedveil.data.sources import CATALOGUE
from fedveil.errors import UserError


def run(*words):
    return CliRunner().invoke(build(), ["data", *words], catch_exceptions=True)


def test_list_as_json_names_every_dataset(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    rows = json.loads(run("list", "--json").stdout)
    assert [row["name"] for row in rows] == list(CATALOGUE)
    assert {row["name"] for row in rows if row["available"]} == {"cancer", "cancer_raw", "digits"}
    for row in rows:
        assert row["size"] and row["source"] and row["licence"]
        assert row["task"] in ("classification", "regression")


def test_list_as_text_shows_what_can_be_fetched(monkeypatch):
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    text = run("list").stdout
    assert "cancer" in text and "Licence: MIT" in text and "fedveil data get NAME" in text


def test_show_partitions_and_draws(tmp_path):
    picture = tmp_path / "out.png"
    words = (
        "--partition",
        "dirichlet",
        "--clients",
        "5",
        "--set",
        "alpha=2.0",
        "--plot",
        str(picture),
        "--json",
    )
    facts = json.loads(run("show", "cancer", *words).stdout)
    assert (facts["train"], facts["test"], facts["default_model"]) == (426, 143, "papers-mlp")
    assert facts["partition"]["clients"] == 5 and facts["partition"]["copies"] == 1
    assert picture.stat().st_size > 5000


def test_show_takes_the_users_own_table(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(12)))
    out = run("show", str(path), "--target", "y", "--set", "test=0.5")
    assert out.exit_code == 0 and "train           6" in out.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "cancre"), "Did you mean 'cancer'"),
        (("show", "cancer", "--set", "alpha"), "key=value"),
        (("show", "cancer", "--set", "alpha=1"), "no option 'alpha'"),
        (("show", "cancer", "--partition", "shard"), "Did you mean 'shards'"),
        (("get", "wind", "--data", "."), "cannot be fetched"),
    ],
)
def test_wrong_words_are_user_errors(words, message):
    out = run(*words)
    assert isinstance(out.exception, UserError) and message in str(out.exception)


def test_get_of_an_embedded_dataset_has_nothing_to_do():
    assert run("get", "cancer").stdout.strip() == "cancer is built in."


def test_get_without_a_folder_says_what_to_set(monkeypatch):
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    assert "FEDVEIL_DATA" in str(run("get", "mnist").exception)


@pytest.mark.parametrize(("name", "words"), [("patients.csv", ()), ("images.npz", ()), ("letters.csv", ("--kind", "texts")),
                                             ("patients.csv.gz", ("--rows", "50", "--seed", "3"))])  # fmt: skip
def test_a_sample_is_drawn_anew_by_its_seed_and_never_over_a_file(name, words, tmp_path):
    path = tmp_path / name
    facts = json.loads(run("sample", str(path), *words, "--json").stdout)
    made = path.read_bytes()
    assert facts["rows"] >= 50 and len(made) > 500
    assert isinstance(run("sample", str(path), *words).exception, UserError) and path.read_bytes() == made
    path.unlink()
    run("sample", str(path), *words)
    if path.suffix != ".npz":  # archives hold the time of day
        assert path.read_bytes() == made


@pytest.mark.parametrize("words", [("a.txt",), ("a.npz", "--kind", "texts"), ("a.csv", "--kind", "images"),
                                   ("a.csv", "--rows", "3"), ("a.csv", "--kind", "text"), ("no/such/folder/a.csv",)])  # fmt: skip
def test_wrong_samples_are_user_errors_and_write_nothing(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert isinstance(run("sample", *words).exception, UserError)
    assert not list(tmp_path.iterdir())
