"""Writes docs/reference from the code: every command, every key of a configuration, every recipe, the Python interface.

    python scripts/reference.py          # writes
    python scripts/reference.py --check  # exit code 1 if a page is not what the code says
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer

sys.path.insert(0, str(Path(__file__).parent))
from reference_words import API, MEANING, PROMISE, RECIPE

import fedveil
from fedveil.cli import build
from fedveil.federation import config as settings
from fedveil.privacy.schedules import Schedule
from fedveil.protect import recipe as parts
from fedveil.protect.catalogue import ALIASES, catalogue
from fedveil.protect.describe import describe_all, text_of

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
WIDE = "---\nhide: [toc]\n---\n\n"  # the page's tables need the room
MADE = "<!-- Made by scripts/reference.py: change the code (or scripts/reference_words.py), then run it again. -->\n\n"


def commands(command: click.Command, path: tuple[str, ...] = ("fedveil",)) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with its words."""
    if isinstance(command, click.Group):
        for name, own in command.commands.items():
            yield from commands(own, (*path, name))
    elif not command.hidden:
        yield path, command


def application() -> click.Command:
    return typer.main.get_command(build())


def cell(text: Any) -> str:
    """Text that stays in one cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def _help(command: click.Command) -> str:
    """The help's paragraphs; examples as a block of commands."""
    text: list[str] = []
    examples: list[str] = []
    for line in (command.help or "").replace("\f", "").splitlines():
        words = re.sub(r"\[/?bold\]", "", line).strip()
        words = words.removeprefix("Examples").removeprefix("Example").removeprefix(":").strip()
        goes_on = bool(examples) and examples[-1].endswith("\\")
        if goes_on or re.match(r"([A-Z_]+=\S*(\([^)]*\))? )*fedveil ", words):
            examples.append(("  " if goes_on else "") + words)
        elif words:
            text.append(words)
        elif text and text[-1]:
            text.append("")
    block = "\n\n```sh\n" + "\n".join(examples) + "\n```" if examples else ""
    return "\n".join(text).strip() + block


def _default(option: click.Parameter) -> str:
    value = option.default
    if option.required:
        return "required"
    if value is None or value in ("", [], ()) or value is False or callable(value):
        return ""
    return f"`{value}`"


def cli_page() -> str:
    """docs/reference/cli.md."""
    out = [MADE + "# Commands\n"]
    out.append(
        "`fedveil --help` and `fedveil COMMAND --help` say the same in the terminal. Commands with `--json` print one JSON "
        "document and nothing else. Wrong input ends with one sentence and exit code 2.\n"
    )
    found = list(commands(application()))
    out.append("| command | what it does |\n|---|---|")
    for path, command in found:
        first = cell((command.help or "").strip().split("\n\n")[0])
        out.append(f"| [`{' '.join(path)}`](#{'-'.join(path)}) | {first} |")
    for path, command in found:
        arguments = [p for p in command.params if isinstance(p, click.Argument)]
        options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden and p.name != "help"]
        shown = " ".join(str(p.make_metavar(click.Context(command))) for p in arguments)
        out.append(f"\n## {' '.join(path)}\n\n{_help(command)}\n")
        out.append(f"`{' '.join(path)}{' ' + shown if shown else ''}{' [OPTIONS]' if options else ''}`\n")
        if arguments or options:
            out.append("| | | default |\n|---|---|---|")
        for p in arguments:
            metavar = p.make_metavar(click.Context(command))
            out.append(f"| `{cell(metavar)}` | {cell(getattr(p, 'help', '') or '')} | {cell(_default(p))} |")
        for p in options:
            names = ", ".join(f"`{name}`" for name in [*p.opts, *p.secondary_opts])
            kind = "" if p.is_flag else f" {p.type.name.upper()}"
            out.append(f"| {names}{kind} | {cell(p.help or '')} | {cell(_default(p))} |")
    return "\n".join(out) + "\n"


def _type_of(schema: dict[str, Any]) -> str:
    """A type in words, from a JSON schema."""
    if "anyOf" in schema:
        return " or ".join(_type_of(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    kind = {"null": "none", "string": "text", "integer": "whole number", "boolean": "true or false", "object": "table"}
    if schema.get("type") == "array":
        return f"list of {_type_of(schema['items'])}s"
    words = kind.get(schema.get("type", ""), str(schema.get("type", "")))
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[name]:g}" for name, sign in limits.items() if name in schema]
    return " ".join([words, *([", ".join(bounds)] if bounds else [])])


def _value(value: Any) -> str:
    if isinstance(value, Schedule):
        return f"`{text_of(value)}`"
    if value is None:
        return "none"
    if value == "":
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else f'{value:g}' if isinstance(value, float) else value}`"


def _missing(known: dict[str, Any], keys: Any, what: str) -> None:
    lacking, extra = [k for k in keys if k not in known], [k for k in known if k not in keys]
    if lacking or extra:
        sys.exit(f"scripts/reference_words.py, {what}: say something about {lacking or 'nothing more'}; no longer there: {extra}")


def config_page() -> str:
    """docs/reference/config.md."""
    schema = settings.RunConfig.model_json_schema()["properties"]
    _missing(PROMISE, schema, "PROMISE")
    _missing(RECIPE, parts.KEYS, "RECIPE")
    out = [WIDE + MADE + "# Configuration\n"]
    out.append(
        "A configuration is a TOML file, a shipped name (`fedveil run digits-start`) or a recipe's name; `--set key=value` changes "
        "single keys, and in Python they are keyword arguments of `fv.run`. Keys of the recipe may stand beside the others "
        "(`sigma = 2`, `clip.bound = 1`) or in `[protect]`. Unknown keys are refused.\n\nThe last column says whether a key changes what "
        "is promised. A \"no\" is tested: the planned ledger stays the same.\n\n## Keys of a run\n"
    )
    out.append("| key | type | default | meaning | changes the promise? |\n|---|---|---|---|---|")
    for key, one in schema.items():
        meaning = MEANING.get(key) or one.get("description") or ""
        if not meaning:
            sys.exit(f"scripts/reference_words.py, MEANING: say what '{key}' means, or give the field a description")
        default = "required" if "default" not in one and key == "recipe" else _value(one.get("default", ""))
        out.append(f"| `{key}` | {cell(_type_of(one))} | {cell(default)} | {cell(meaning)} | {cell(PROMISE[key])} |")
    out.append("\n### Defaults by dataset\n\nWhere a configuration does not say otherwise (the papers' numbers on disjoint clients):\n")
    columns = sorted({key for own in settings.DATASET_DEFAULTS.values() for key in own})
    out.append("| dataset | " + " | ".join(f"`{c}`" for c in columns) + " |\n|---|" + "---|" * len(columns))
    for name, own in settings.DATASET_DEFAULTS.items():
        out.append(f"| {name} | " + " | ".join(_value(own[c]) if c in own else "" for c in columns) + " |")
    batches = ", ".join(f"{name} {size}" for name, size in settings.CENTRAL_BATCH.items())
    out.append(f"\nCentral recipes have one client; their batches: {batches}. `where = sum` has one local step.\n")
    out.append("## Keys of the recipe\n\nThe default is that of a bare recipe; each recipe of the [catalogue](recipes.md) has its own.\n")
    out.append("| key | type | default | meaning | changes the promise? |\n|---|---|---|---|---|")
    bare = parts.spell(parts.Recipe("bare"))
    for key in parts.KEYS:
        kind = (
            ", ".join(f"`{word}`" for word in parts.WORDS[key]) if key in parts.WORDS
            else "[schedule](#schedules)" if key in parts.SCHEDULES
            else "true or false" if key in parts.SWITCHES
            else "text" if key in parts.TEXTS
            else "number or none" if key in parts.OPTIONAL
            else "number"
        )  # fmt: skip
        default = "" if key == "name" else _value(bare[key])
        out.append(f"| `{key}` | {kind} | {default} | {cell(RECIPE[key][0])} | {cell(RECIPE[key][1])} |")
    out.append(_schedules())
    return "\n".join(out) + "\n"


def _schedules() -> str:
    examples = ("6", "linear:15:4.85", "staircase:15:rate=0.05:every=10", "exponential:15:rate=0.01", "cosine-cyclic:15:cycles=5:floor=3.75",
                "triangular-cyclic:6:4:every=10:floor=2", "learning-rate:4")  # fmt: skip
    rows = []
    for text in examples:
        schedule = parts.parse(text)
        if schedule.kind == "learning-rate":
            rows.append(f"| `{text}` | 4 in the first round, then in proportion to the learning rate |")
            continue
        values = ", ".join(f"{schedule.value(t, 100):.3g}" for t in (0, 25, 50, 99))
        rows.append(f"| `{text}` | {values} |")
    return (
        "\n## Schedules\n\n`sigma` and `clip.bound` may move over the run, in a way that is known in advance: a number, or a text "
        "`kind:first:last` with options; `:iteration` at the end moves with every local step instead of every round.\n\n"
        "| text | in rounds 1, 26, 51, 100 of 100 |\n|---|---|\n" + "\n".join(rows)
    )


def recipes_page() -> str:
    """docs/reference/recipes.md."""
    out = [WIDE + MADE + "# Recipes and shipped configurations\n"]
    out.append(
        "Verdicts are those of a typical setting (100 clients, 10 a round) with exact noise, or float noise where its scale follows the batch "
        "(l2-max, the median rule); a run's own [ledger](../ledger.md) says what holds for it. ([What the words mean](../concepts.md).)\n"
    )
    known = catalogue()
    rows = {row["name"]: row for row in describe_all()}
    out.append("| recipe | what it is | clip | sigma | noise | server | client-process | public |\n|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        about = known[name].about
        words = about.summary + (f" ({about.paper})" if about.paper else "")
        marks = " | ".join(row["verdicts"][o] for o in ("server", "client-process", "public"))
        out.append(f"| `{name}` | {cell(words)} | {row['clip']} | {row['sigma']} | {row['where']} | {marks} |")
    other = ", ".join(f"`{short}` = `{name}`" for short, name in sorted(ALIASES.items()))
    out.append(f"\nOther names: {other}.\n\n## Shipped configurations\n\n`fedveil run NAME`:\n")
    out.append("| name | recipe | dataset | clients | rounds | observer | budget |\n|---|---|---|---|---|---|---|")
    for name in settings.shipped():
        c = settings.load_config(name)
        budget = "" if c.target_epsilon is None else f"ε ≤ {c.target_epsilon:g}, δ = {c.delta:g}"
        out.append(f"| `{name}` | `{c.recipe}` | {c.dataset} | {c.clients} | {c.rounds} | {c.observer} | {budget} |")
    return "\n".join(out) + "\n"


def _signature(name: str, value: Any) -> str:
    """`fv.run(name, *, data=None)` with types, wrapped where it is long."""
    if name == "fv.RunConfig":
        return f"{name}(**keys)  # every key: see the page on configuration"
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    bare = [re.sub(r"<factory>|<object object at 0x[0-9a-f]+>", "…", str(p)) for p in parameters]
    texts = [re.sub(r": '([^']*)'", r": \1", text, count=1) for text in bare]
    if any(p.kind is p.KEYWORD_ONLY for p in parameters) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        texts.insert(next(i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), "*")
    back = signature.return_annotation
    said = back if isinstance(back, str) else getattr(back, "__name__", str(back))
    end = "" if back in (inspect.Signature.empty, None, "None") else f" -> {said}"
    line = f"{name}({', '.join(texts)}){end}"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(texts) + f",\n){end}"


def _words(value: Any) -> str:
    """A docstring as text: indented blocks (examples, lists) stay as they are."""
    found = inspect.getdoc(value) or ""
    return "\n".join(re.sub(r"([*_<>])", r"\\\1", line) if not line.startswith("    ") else line for line in found.splitlines())


def _members(value: type) -> Iterator[str]:
    """Public methods and properties that say what they are."""
    for name, own in vars(value).items():
        plain = own.__func__ if isinstance(own, (classmethod, staticmethod)) else own
        if name.startswith("_") or not inspect.getdoc(plain) or not (callable(plain) or isinstance(plain, property)):
            continue
        shown = f".{name}" if isinstance(plain, property) else _signature(f".{name}", plain)
        yield f"```py\n{shown}\n```\n{_words(plain)}\n"


def api_page() -> str:
    """docs/reference/api.md from signatures and docstrings."""
    named = [name for names in API.values() for name in names]
    chapters = {**API, "More": tuple(name for name in sorted(fedveil._PUBLIC) if name not in named)}
    out = [MADE + "# Python\n\n```python\nimport fedveil as fv\n```\n"]
    out.append("Everything public is a name of `fedveil`; errors in what you give are `fv.UserError`, with one sentence.\n")
    for title, names in chapters.items():
        here = [name for name in names if name in fedveil._PUBLIC]
        if here:
            out.append(f"## {title}\n")
        for name in here:
            value = getattr(importlib.import_module(fedveil._PUBLIC[name]), name)
            out.append(f"### fv.{name}\n\n```py\n{_signature(f'fv.{name}', value)}\n```\n{_words(value)}\n")
            if inspect.isclass(value) and name != "RunConfig":
                out += _members(value)
    return "\n".join(out)


def examples_page() -> str:
    """docs/examples.md: every example with the first line of its docstring as title."""
    out = [MADE + "# Examples\n"]
    out.append(
        "Each file runs as it is (`python docs/examples/NAME.py`), in seconds, and is run by the tests. One that needs an extra says so where it is not installed. They are short: a few rounds to show "
        "the way, not to reach a good model.\n"
    )
    for path in sorted((FOLDER.parent / "examples").glob("*.py")):
        title = path.read_text("utf-8").split("\n")[0].strip('"').rstrip(".")
        out.append(f'## {title}\n\n`docs/examples/{path.name}`\n\n```python\n--8<-- "docs/examples/{path.name}"\n```\n')
    return "\n".join(out)


def pages() -> dict[str, str]:
    """Every generated page by its path below docs/reference."""
    return {
        "cli.md": cli_page(), "config.md": config_page(), "recipes.md": recipes_page(), "api.md": api_page(),
        "../examples.md": examples_page(),
    }  # fmt: skip


def stale() -> list[str]:
    """Names of pages that are not what the code says."""
    made = pages()
    return [name for name, text in made.items() if not (FOLDER / name).is_file() or (FOLDER / name).read_text("utf-8") != text]


def main() -> None:
    if "--check" in sys.argv[1:]:
        old = stale()
        sys.exit(f"not up to date: {', '.join(old)}; run python scripts/reference.py" if old else 0)
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
