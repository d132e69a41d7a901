import subprocess
import sys

import click
import pytest
import typer
from typer.testing import CliRunner

from fedveil.cli import build


def commands():
    """Every command with its path of words, groups descended."""

    def walk(command, path):
        if isinstance(command, click.Group):
            for name, inner in command.commands.items():
                yield from walk(inner, (*path, name))
        else:
            yield path, command

    return list(walk(typer.main.get_command(build()), ()))


EVERY = [pytest.param(path, command, id=" ".join(path)) for path, command in commands() if not command.hidden]


@pytest.mark.parametrize(("path", "command"), EVERY)
def test_help_has_an_example_and_explains_every_parameter(path, command):
    shown = CliRunner().invoke(build(), [*path, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert f"fedveil {' '.join(path)}" in shown.output.split("Usage:")[1].split("\n", 1)[1], "no example"
    flat = " ".join(shown.output.replace("│", " ").split())
    for parameter in command.params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        text = getattr(parameter, "help", None)
        assert text, f"{parameter.name} has no help"
        assert " ".join(text.split())[:30] in flat, f"the help of {parameter.name} is not shown"


def test_no_command_shows_help():
    shown = CliRunner().invoke(build(), [])
    assert "fedveil" in shown.output and "run" in shown.output


@pytest.mark.parametrize(
    "words", [["no-such-command"], ["run"], ["run", "no-such-recipe"], ["epsilon", "--nonsense", "1"]]
)
def test_wrong_words_exit_with_2_and_leave_stdout_empty(words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fedveil", *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr
    assert not list(tmp_path.iterdir()), "something was half-written"
