"""The command line: parses, calls, prints. Every command group lives in fedveil.cli."""

from __future__ import annotations

import importlib
import sys

import typer

from fedveil.errors import UserError

GROUPS = ("privacy", "data", "run", "plan", "attack", "report", "reproduce", "flower")


def build() -> typer.Typer:
    """The whole application, one command group after the other."""
    app = typer.Typer(
        name="fedveil",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        help="Train across private data, state what each observer can learn, attack the run to prove it.",
    )
    for group in GROUPS:
        importlib.import_module(f"fedveil.cli.{group}").register(app)
    return app


def main() -> None:
    """Entry point: wrong input ends with one clear line and exit code 2."""
    try:
        build()()
    except UserError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(2)
