"""A recipe of the user's own over Flower: a node imports and plays it only if its owner's contract names it, with its digest."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

from fedveil.cli import build
from fedveil.errors import UserError
from fedveil.federation import loop
from fedveil.federation.config import RunConfig, make_config, trusting_code
from fedveil.federation.store import open_run
from fedveil.flower import books, client_app, contract, limits, server_app
from fedveil.flower import stack as stacks
from fedveil.flower.contract import Allowed, Contract, Data, from_json, package_digest, recipe_digest, to_json
from fedveil.flower.grid import LocalGrid
from fedveil.flower.onboard import contract_of_study
from fedveil.flower.project import write_project
from fedveil.flower.server import Options, serve
from fedveil.protect.catalogue import get

NAME = "clinic_parts.recipes:mine"
MARK = "imported.txt"  # written when the package is imported
PACKAGE = {
    "__init__.py": f"from pathlib import Path\nPath(__file__).with_name({MARK!r}).write_text('x')\n",
    "laws.py": """
from dataclasses import dataclass
import numpy as np
from fedveil.protect import exact
from fedveil.protect.law import Gaussian

@dataclass(frozen=True)
class TwoGaussians(Gaussian):
    name: str = "two-gaussians"
    kernel: str = ""

    def units(self, key, step, count, scale, shape, norm):
        half = scale / np.sqrt(2)
        return exact.gaussian(key, step, count, half) + exact.gaussian(key, step + 4096, count, half)
""",
    "recipes.py": """
from clinic_parts.laws import TwoGaussians
from fedveil.protect.clip import Clip
from fedveil.protect.place import InStep
from fedveil.protect.recipe import Recipe

mine = Recipe("mine", clip=Clip(kind="flat"), law=TwoGaussians(), place=InStep())
""",
}
COLUMNS = (("age", 0.0, 100.0), ("dose", 0.0, 10.0), ("weight", 20.0, 200.0))


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "clinic_parts"]:
        del sys.modules[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Somebody's package, installed on server and nodes alike, and not imported yet."""
    folder = tmp_path / "installed" / "clinic_parts"
    folder.mkdir(parents=True)
    for name, text in PACKAGE.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder.parent)
    yield folder
    forget()


def config_of(**more: Any) -> RunConfig:
    values = {
        "recipe": NAME, "clients": 2, "rounds": 2, "local_steps": 3, "batch_size": 4, "learning_rate": 0.1,
        "model": "papers-mlp", "model_options": {"hidden": [4]}, "delta": 1e-4,
    }  # fmt: skip
    with trusting_code():
        return make_config({**values, **more})


def table(path: Path, rows: int, seed: int) -> Path:
    draw = np.random.default_rng(seed)
    lines = [f"{draw.integers(18, 90)},{draw.random() * 10:.3f},{draw.integers(40, 120)},{draw.choice(['flu', 'healthy'])}"
             for _ in range(rows)]  # fmt: skip
    path.write_text("\n".join(["age,dose,weight,outcome", *lines]) + "\n")
    return path


def agreed_on(config: RunConfig) -> Contract:
    """What the study's owner writes down, as `fedveil flower contract` does."""
    data = Data("outcome", ("healthy", "flu"), 40, COLUMNS)
    with trusting_code():
        return contract_of_study(config, data, study="flu", epsilon=50.0, delta=1e-4)


def federate(folder: Path, config: RunConfig, agreed: Contract) -> dict[str, Any]:
    """Two nodes with tables of their own under the contract, and a server: Flower's apps over the in-process grid."""
    contract.write_contract(folder / "contract.toml", agreed)
    nodes = {
        100 + client: {
            "home": str(folder / f"n{client}"), "partition-id": client, "data": str(table(folder / f"{client}.csv", 40, client)),
            "contract": str(folder / "contract.toml"), "contract-digest": agreed.digest,
        }
        for client in range(2)
    }  # fmt: skip
    public = table(folder / "public.csv", 30, 9)
    options = Options(
        out=str(folder / "run"), join=0.2, deadline=0.2, poll=0.01, patience=1, public=str(public),
        contract=str(folder / "contract.toml"),
    )  # fmt: skip
    return serve(LocalGrid(client_app(), nodes, None), config.imported(), options)


def charged(folder: Path) -> int:
    paths = [books.ledger_path(folder / f"n{client}") for client in range(2)]
    return sum(len(books.history(path)) for path in paths if path.exists())


def test_nodes_play_an_own_recipe_that_their_contract_names_with_its_digest(tmp_path: Path, package: Path) -> None:
    config = config_of()
    result = federate(tmp_path, config, agreed_on(config))
    assert result["rounds"] == 2 and result["recipe"] == "mine" and charged(tmp_path) == 4
    sound = [row for row in result["ledger"] if row["verdict"] == "sound" and row["observer"] == "server"]
    with trusting_code():
        ours = loop.run(
            make_config({**config.model_dump(), "recipe": "fed-cdp-sound", "clients": 2, "partition": "iid", "dataset": "cancer",
                         "limit": 80, "model_options": {}, "report": False}),
            tmp_path / "ours",
        )  # fmt: skip
    wanted = [row for row in ours["ledger"] if row["verdict"] == "sound" and row["observer"] == "server"]
    # Noise of the same deviation under the same sampling: what is promised is what our own Gaussian promises.
    assert sound[0]["epsilon"] == pytest.approx(wanted[0]["epsilon"], rel=1e-3)
    assert open_run(tmp_path / "run").config.recipe == NAME


def refused(tmp_path: Path, config: RunConfig, agreed: Contract, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        federate(tmp_path, config, agreed)
    assert charged(tmp_path) == 0


def test_a_recipe_that_the_contract_does_not_name_is_refused_and_never_imported(tmp_path: Path, package: Path) -> None:
    config = config_of()
    agreed = agreed_on(config)
    other = replace(agreed, recipes=(Allowed("fed-cdp", recipe_digest(get("fed-cdp"))),))
    contract.write_contract(tmp_path / "contract.toml", other)
    from fedveil.flower.node import answer
    from fedveil.flower.owner import Owner

    forget()
    (package / MARK).unlink()
    owner = Owner(tmp_path / "n0", 0, contract=str(tmp_path / "contract.toml"), contract_digest=other.digest, data="none.csv")
    facts = json.loads(json.dumps({"config": config.model_dump(), "nonce": "0" * 32}))
    said, _ = answer("hello", facts, {}, owner)
    assert said["status"] == "refused" and "has to list it with the digest of its package" in said["reason"]
    assert not (package / MARK).exists()
    # Under its recipe's own name it is no more allowed: that name is for recipes that need no import.
    (tmp_path / "contract.toml").unlink()
    called = replace(agreed, recipes=(Allowed("mine", agreed.recipes[0].digest),))
    contract.write_contract(tmp_path / "contract.toml", called)
    said, _ = answer("hello", facts, {}, replace(owner, contract_digest=called.digest))
    assert said["status"] == "refused" and not (package / MARK).exists()


def test_a_package_with_one_changed_file_is_refused_before_it_is_imported(tmp_path: Path, package: Path) -> None:
    config = config_of()
    agreed = agreed_on(config)
    forget()
    (package / MARK).unlink()
    (package / "laws.py").write_text(PACKAGE["laws.py"].replace("np.sqrt(2)", "np.sqrt(3)"))
    contract.write_contract(tmp_path / "contract.toml", agreed)
    from fedveil.flower.node import answer
    from fedveil.flower.owner import Owner

    owner = Owner(tmp_path / "n0", 0, contract=str(tmp_path / "contract.toml"), contract_digest=agreed.digest, data="none.csv")
    said, _ = answer("hello", json.loads(json.dumps({"config": config.model_dump(), "nonce": "0" * 32})), {}, owner)
    assert said["status"] == "refused" and "not the one the owner allowed" in said["reason"]
    assert not (package / MARK).exists()
    (tmp_path / "contract.toml").unlink()
    refused(tmp_path, config_of(), agreed, "not the one the owner allowed")


def test_a_package_that_changed_after_its_import_needs_a_new_start(tmp_path: Path, package: Path) -> None:
    config = config_of()
    first = agreed_on(config)
    contract.own_recipe(first, NAME)
    (package / "laws.py").write_text(PACKAGE["laws.py"] + "# later\n")
    later = replace(first, recipes=(replace(first.recipes[0], code=package_digest(NAME)),))
    with pytest.raises(contract.Refused, match="started anew"):
        contract.own_recipe(later, NAME)


def test_other_values_than_the_allowed_ones_are_refused(tmp_path: Path, package: Path) -> None:
    refused(tmp_path, config_of(noise_on="mean"), agreed_on(config_of()), "has other values than the owner allowed")


def test_numbers_that_the_contract_bounds_may_be_chosen(package: Path) -> None:
    chosen, agreed = config_of(sigma=7.0), agreed_on(config_of())
    with trusting_code():
        assert recipe_digest(chosen.built_recipe()) == agreed.recipes[0].digest


def test_a_policy_file_without_digests_never_imports_code(tmp_path: Path, package: Path) -> None:
    config = config_of(dataset="cancer", partition="iid", model_options={})
    (tmp_path / "policy.toml").write_text(f'recipes = ["{NAME}", "mine"]\nmaximum_epsilon = "unlimited"\n')
    nodes = {1: {"home": str(tmp_path / "n0"), "policy": str(tmp_path / "policy.toml"), "partition-id": 0}}
    with pytest.raises(UserError, match="digest of its package"):
        serve(
            LocalGrid(client_app(), nodes, None), config.model_copy(update={"clients": 1}).imported(),
            Options(out=str(tmp_path / "run"), join=0.2, deadline=0.2, poll=0.01, patience=1),
        )  # fmt: skip


def test_a_server_imports_nothing_without_its_operators_word(tmp_path: Path, package: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text(f'recipe = "{NAME}"\nclients = 2\nrounds = 2\n')
    runner, app = CliRunner(), build()
    line = ["flower", "init", str(tmp_path / "project"), str(study)]
    said = runner.invoke(app, line)
    assert said.exit_code and "--trust-code" in str(said.exception or said.output)
    assert not (package / MARK).exists() and not (tmp_path / "project").exists()
    assert runner.invoke(app, [*line, "--trust-code"]).exit_code == 0
    assert "trust_code=True" in (tmp_path / "project" / "fedveil_run" / "server_app.py").read_text()
    assert server_app(tmp_path / "project" / "fedveil_run" / "run.toml", trust_code=True) is not None


def test_a_recipe_that_is_a_value_cannot_travel(tmp_path: Path, package: Path) -> None:
    with trusting_code():
        value = config_of().built_recipe()
    config = make_config({"recipe": "given:mine", "clients": 2}, recipe=value)
    with pytest.raises(UserError, match="cannot travel"):
        write_project(tmp_path / "project", config, {"out": "x"})


def test_a_contract_for_own_code_reads_back_and_needs_the_digest_of_its_package(package: Path) -> None:
    agreed = agreed_on(config_of())
    assert agreed.recipes[0].name == NAME and agreed.recipes[0].code == package_digest(NAME)
    document = json.loads(json.dumps(to_json(agreed)))
    assert from_json(document) == agreed
    del document["recipes"][0]["code"]
    with pytest.raises(limits.Malformed, match="digest of its package"):
        from_json(document)


def test_digests_of_our_own_recipes_name_no_files() -> None:
    same = to_json(replace(agreed_plain(), recipes=(Allowed("fed-cdp", recipe_digest(get("fed-cdp"))),)))
    assert same["recipes"] == [{"name": "fed-cdp", "digest": recipe_digest(get("fed-cdp"))}]


def agreed_plain() -> Contract:
    return Contract("flu", 1, (), 1.0)


def ended(stack: stacks.Stack, run: int, seconds: float = 300.0) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (state := stacks.status(stack.environment, run, stacks.NAME)).startswith("finished"):
            return state
        time.sleep(2)
    raise AssertionError(f"run {run} did not end within {seconds} s")


@pytest.mark.slow
@pytest.mark.flower
def test_a_real_superlink_plays_an_own_recipe_until_a_file_of_its_package_differs(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two SuperNodes with TLS and keys; the package is on the path of every process, as an installed one would be."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))
    config = config_of()
    agreed = agreed_on(config)
    rules = tmp_path / "contract.toml"
    contract.write_contract(rules, agreed)
    private, public = table(tmp_path / "private.csv", 40, 1), table(tmp_path / "public.csv", 30, 9)
    home = tmp_path / "f"
    stack = stacks.up(home, 2, node_config={"contract": str(rules), "contract-digest": agreed.digest, "data": str(private)})
    try:
        def play(name: str) -> tuple[str, str, Path]:
            options = {"out": str(tmp_path / name / "run"), "deadline": 120.0, "join": 60.0, "patience": 1,
                       "public": str(public), "contract": str(rules)}  # fmt: skip
            with trusting_code():
                write_project(tmp_path / name, config, options)
            number = stacks.submit(stack.environment, tmp_path / name, stacks.NAME)
            state = ended(stack, number)
            words = stacks.flwr(stack.environment, "log", str(number), stacks.NAME, "--show").stdout
            return state, " ".join(words.split()), tmp_path / name / "run"

        state, words, run = play("first")
        assert state == "finished:completed", words
        result = json.loads((run / "result.json").read_text())
        assert result["recipe"] == "mine" and result["rounds"] == 2 and result["simulated"] is False
        assert any(row["verdict"] == "sound" and row["observer"] == "server" for row in result["ledger"])
        ledgers = [books.ledger_path(home / f"nodes/{client}") for client in range(2)]
        assert [len(books.history(path)) for path in ledgers] == [2, 2]

        (package / "laws.py").write_text(PACKAGE["laws.py"].replace("np.sqrt(2)", "np.sqrt(3)"))
        state, words, run = play("second")
        assert state == "finished:failed" and not (run / "result.json").exists()
        assert [len(books.history(path)) for path in ledgers] == [2, 2]
        for client in range(2):
            said = (home / f"nodes/{client}/audit.jsonl").read_text()
            assert "not the one the owner allowed" in said.splitlines()[-1]
        assert "is not the one the owner allowed" in words
    finally:
        stacks.down(home)
