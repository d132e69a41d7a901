"""The first things people type: version, help, lists, progress without a terminal, an interrupt, more rounds, ASCII terminals."""

import io
import json
import os
import subprocess
import sys

import pytest

from fedveil import cli
from fedveil.federation import loop
from fedveil.federation.config import shipped

SMALL = ["--set", "clients=2", "--set", "local_steps=1", "--set", "batch_size=8", "--set", "report=false"]


@pytest.fixture
def call(monkeypatch, capsys):
    """Call the program in this process: (exit code, stdout, stderr)."""

    def calling(*words):
        monkeypatch.setattr(sys, "argv", ["fedveil", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return calling


def test_version_help_and_completion_are_where_people_look(call):
    import fedveil

    assert call("--version")[1] == f"fedveil {fedveil.__version__}\n"
    assert "--install-completion" in call("-h")[1]
    assert "NAME_OR_TOML" in call("run", "-h")[1]


def test_every_shipped_configuration_is_listed_with_a_line(call):
    rows = json.loads(call("configs", "--json")[1])
    assert [row["name"] for row in rows] == list(shipped())
    assert all(10 < len(row["summary"]) < 250 for row in rows)
    said = call("configs")[1]
    assert said.index("digits-start ") < said.index("adult-headline-a")


def test_recipes_begin_with_where_to_start_and_lose_none(call):
    said = call("recipes")[1]
    names = [row["name"] for row in json.loads(call("recipes", "--json")[1])]
    assert said.index("Start here") < said.index("sum-cdp") < said.index("Across clients")
    words = said.split()
    assert all(words.count(name) == 1 for name in names)


def test_a_terminal_that_knows_ascii_only_is_no_reason_to_fail(call, monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    code, _, said = call("recipes")
    assert code == 0, said
    narrow.flush()
    assert b"linear 6->2" in narrow.buffer.getvalue() and b"?" not in narrow.buffer.getvalue()


def test_a_terminal_that_knows_ascii_only_spells_a_promise_out(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print("sound ε ≤ 8 – √2 σ, 🙂", file=cli._patient(narrow), flush=True)
    assert narrow.buffer.getvalue() == b"sound epsilon <= 8 - sqrt 2 sigma, ?\n"


def test_in_one_log_an_error_stands_after_what_led_to_it(tmp_path):
    table = tmp_path / "same.csv"
    table.write_text("age,y\n" + "".join(f"{i % 90},yes\n" for i in range(2000)))
    words = ("fit", str(table), "--target", "y", "--epsilon", "4", "--out", str(tmp_path / "a"))
    done = subprocess.run([sys.executable, "-m", "fedveil", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 2 and done.stdout.startswith("data ") and done.stdout.splitlines()[-1].startswith("error: ")


def test_without_a_terminal_rounds_are_told_in_lines(call, tmp_path):
    code, _, said = call("run", "fed-cdp-sound", *SMALL, "--set", "rounds=3", "--out", tmp_path / "a")
    assert code == 0 and "round 1/3" in said and "round 3/3" in said, said


def test_an_interrupt_says_where_it_stopped_and_how_to_go_on(call, tmp_path, monkeypatch):
    real, played = loop.record_round, []

    def interrupted(*args):
        played.append(real(*args))
        if len(played) == 2:
            raise KeyboardInterrupt
        return played[-1]

    monkeypatch.setattr(loop, "record_round", interrupted)
    words = ("run", "fed-cdp-sound", *SMALL, "--set", "rounds=4", "--set", "checkpoint_every=1", "--out", tmp_path / "a")
    code, _, said = call(*words)
    assert code == 130 and "rounds up to 1 are kept" in said
    assert f"fedveil run fed-cdp-sound --resume --out {tmp_path / 'a'}" in said.replace("\n", " ")
    monkeypatch.setattr(loop, "record_round", real)
    code, out, said = call("run", "fed-cdp-sound", "--resume", "--out", tmp_path / "a", "--json")
    assert code == 0 and json.loads(out)["rounds"] == 4, said


def test_more_rounds_only_where_nothing_is_promised(call, tmp_path):
    plain, private = tmp_path / "plain", tmp_path / "private"
    for name, folder in (("non-private", plain), ("fed-cdp-sound", private)):
        assert call("run", name, *SMALL, "--set", "rounds=2", "--out", folder)[0] == 0
    code, out, said = call("run", "non-private", "--set", "rounds=4", "--resume", "--out", plain, "--json")
    assert code == 0 and json.loads(out)["rounds"] == 4, said
    code, _, said = call("run", "fed-cdp-sound", "--set", "rounds=4", "--resume", "--out", private)
    assert code == 2 and "covered by its promise" in said


def test_another_configuration_does_not_go_on_with_the_run_in_a_folder(call, tmp_path):
    folder, file = tmp_path / "a", tmp_path / "mine.toml"
    file.write_text('recipe = "fed-cdp-sound"\ndataset = "digits"\nrounds = 5\n')
    words = ("--set", "rounds=2", "--set", "sigma=4", *SMALL)
    assert call("run", "digits-start", *words, "--out", folder)[0] == 0
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name in ("cancer-headline-b", "digits-start-server", "fed-cdp-sound", file):
        code, out, said = call("run", name, "--resume", "--out", folder)
        assert code == 2 and not out and "holds another run than" in said and "sum-cdp --resume" in said, said
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == kept
    for name in ("digits-start", "sum-cdp"):  # what it was begun with, or its recipe, is this run
        code, _, said = call("run", name, "--resume", "--out", folder)
        assert code == 0 and "is finished; nothing was done again" in said, said
        assert (folder / "result.json").read_bytes() == kept[folder / "result.json"]


def test_an_edited_file_is_another_run(call, tmp_path):
    file, folder = tmp_path / "mine.toml", tmp_path / "a"
    file.write_text('recipe = "fed-cdp-sound"\nrounds = 2\nclients = 2\nlocal_steps = 1\nreport = false\n')
    assert call("run", file, "--out", folder)[0] == 0
    assert call("run", file, "--resume", "--out", folder)[0] == 0
    file.write_text(file.read_text().replace("rounds = 2", "rounds = 3"))
    code, _, said = call("run", file, "--resume", "--out", folder)
    assert code == 2 and "rounds = 2, not 3" in said


def test_a_device_that_is_not_there_is_one_clear_line(call, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    code, _, said = call("run", "fed-cdp-sound", "--set", "device=cuda", "--out", tmp_path / "a")
    assert code == 2 and "device = cpu" in said and "Traceback" not in said
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("command", [["recipes"], ["--version"]])
@pytest.mark.parametrize("errors", [subprocess.PIPE, subprocess.STDOUT])
def test_a_reader_who_goes_does_not_change_the_exit_code(command, errors):
    """`fedveil … | head -1`: before the first word the reader is gone, so that every write fails."""
    with subprocess.Popen([sys.executable, "-m", "fedveil", *command], stdout=subprocess.PIPE, stderr=errors) as process:
        process.stdout.close()
        said = process.stderr.read() if process.stderr else b""
        assert process.wait() == 0 and not said, said


def test_work_goes_on_when_its_reader_goes():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        stream = cli._patient(gone)
        for word in ("first", "second"):
            print(word, file=stream, flush=True)  # a plain stream raises BrokenPipeError here
        stream.detach()


def test_mistakes_on_the_command_line_are_caught_whichever_click_typer_brings():
    import typer

    for words in (["rum"], ["run", "fed-cdp", "--rounds", "3"], ["run"], ["epsilon", "--steps", "x"], []):
        with pytest.raises(cli.errors.ClickException):
            typer.main.get_command(cli.build()).main(words, prog_name="fedveil", standalone_mode=False)


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        ("fed-cdp-sound", ["target_epsilon=0.001"], ["would be 0.58", "budget is 0.001. One round costs", "or calibrate = true"]),
        ("fed-alpha-cdp", ["target_epsilon=0.001", "budget=nominal"], ["nominal epsilon by moments", "nominal_rate = 0.01"]),
        ("fed-alpha-cdp", ["target_epsilon=1"], ["the budget is 1. No budget can hold where nothing finite is promised"]),
    ],
    ids=["sound", "nominal", "no promise"],
)
def test_a_budget_that_pays_for_no_round_is_told_in_sentences_and_not_in_an_empty_table(call, recipe, changes, words, tmp_path):
    given = [part for change in ["dataset=cancer", "rounds=2", "report=false", *changes] for part in ("--set", change)]
    code, out, _ = call("run", recipe, *given, "--out", tmp_path / "run")
    said = " ".join(out.split())
    assert code == 0
    assert all(word in said for word in [*words, "No round was played", "Nothing was released"])
    assert "delta 0" not in said and "accountant note" not in said and "NOT better" not in said


def test_a_recipe_with_noise_on_updates_is_not_told_to_take_fewer_steps(call, tmp_path):
    few = ["dataset=cancer", "rounds=2", "report=false", "target_epsilon=0.001"]
    given = [part for change in few for part in ("--set", change)]
    said = " ".join(call("run", "fed-sdp-client", *given, "--out", tmp_path / "run")[1].split())
    assert "One round costs more" in said and "local_steps" not in said
