"""The command line: parses, calls, prints. Every command group lives in fedveil.cli."""

from __future__ import annotations

import codecs
import importlib
import io
import os
import stat
import sys
from types import ModuleType
from typing import Annotated, Any, NoReturn, TextIO

import typer

from fedveil.errors import UserError
from fedveil.privacy.ledger.entries import BudgetExceeded

# Typer's own copy of click where it has one, else the package: what its parser raises comes from there.
errors: ModuleType = sys.modules[typer.BadParameter.__module__]
GROUPS = ("fit", "privacy", "data", "run", "demo", "plan", "attack", "report", "reproduce", "flower")


def build() -> typer.Typer:
    """The whole application, one command group after the other."""
    app = typer.Typer(
        name="fedveil",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    for group in GROUPS:
        importlib.import_module(f"fedveil.cli.{group}").register(app)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        from fedveil import __version__

        print(f"fedveil {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train across private data, state what each observer can learn, attack the run to prove it.

    New here?  fedveil run digits-start   ·   fedveil configs   ·   fedveil recipes
    """


class _Pipe(io.FileIO):
    """Output whose reader may go (`fedveil run … | head`): the work goes on, what is said from then on is lost."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(memoryview(data).cast("B"))


SPELT = {
    "ε": "epsilon", "δ": "delta", "σ": "sigma", "α": "alpha", "μ": "mu", "≤": "<=", "≥": ">=", "≈": "~", "→": "->", "±": "+-",
    "·": "-", "–": "-", "—": "-", "−": "-", "…": "...", "×": "x", "√": "sqrt ", "²": "^2", "ℓ": "l", "₁": "1", "₂": "2", "’": "'",
    "✓": "ok", "✕": "no", "─": "-", "│": "|", "“": '"', "”": '"',
}  # fmt: skip


def _spelt(wrong: UnicodeError) -> tuple[str, int]:
    """What a terminal of few letters shows for the others: ε <= 2 as epsilon <= 2, and ? for what has no spelling."""
    if not isinstance(wrong, UnicodeEncodeError):
        raise wrong
    return "".join(SPELT.get(letter, "?") for letter in wrong.object[wrong.start : wrong.end]), wrong.end


def _patient(stream: TextIO) -> TextIO:
    """The stream, which spells out what its terminal cannot show and outlives its reader."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    codecs.register_error("spelt", _spelt)
    stream.reconfigure(errors="spelt")
    try:
        number = stream.fileno()
    except io.UnsupportedOperation:  # kept in memory by whoever calls this from Python
        return stream
    if stat.S_ISREG(os.fstat(number).st_mode) or stream.isatty():
        return stream
    stream.flush()
    raw = io.BufferedWriter(_Pipe(number, "w", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, "spelt", line_buffering=stream.line_buffering)


def main() -> None:
    """Entry point: wrong input, a full disk or a forbidden folder end with one clear line and exit code 2."""
    sys.stdout, sys.stderr = _patient(sys.stdout), _patient(sys.stderr)
    try:
        code = typer.main.get_command(build()).main(prog_name="fedveil", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except errors.NoSuchOption as wrong:
        _end(_key_instead(wrong.option_name) or wrong.format_message())
    except errors.ClickException as wrong:
        context = getattr(wrong, "ctx", None)
        if type(wrong).__name__ == "NoArgsIsHelpError":  # nothing was asked for: the help is the answer
            wrong.show()
            sys.exit(wrong.exit_code)
        said = " ".join(wrong.format_message().split()).rstrip(".")
        said += "" if said.endswith("?") else "."
        _end(said + (f" `{context.command_path} -h` shows how." if context is not None else ""))
    except typer.Abort:
        sys.exit(1)
    except (UserError, BudgetExceeded) as wrong:
        _end(str(wrong))
    except OSError as wrong:
        _end(f"{wrong.filename or 'a file'}: {wrong.strerror or wrong}. Check the path, free space and permissions")
    except RecursionError:
        _end("the input is nested too deeply")
    except MemoryError:
        _end("the input needs more memory than there is: choose fewer clients, rows or steps")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def _key_instead(option: str) -> str:
    """What to write where a key of the configuration was given as an option."""
    from fedveil.federation.config import RunConfig
    from fedveil.protect.recipe import KEYS

    key = option.lstrip("-").replace("-", "_")
    if key not in RunConfig.model_fields and key not in KEYS:
        return ""
    return f"{option} is no option: it is a key of the configuration, so write --set {key}=VALUE"


def _end(message: str) -> NoReturn:
    sys.stdout.flush()  # in one log of both streams, explanations stand before the error that they lead to
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
