"""Papers of a study: contracts from configurations, invitations, admission, removal, rotation."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

from fedveil.cli import build
from fedveil.cli.flower import parse_node_config
from fedveil.errors import UserError
from fedveil.federation.config import load_config
from fedveil.federation.store import open_run
from fedveil.flower import client_app, contract, identity, onboard
from fedveil.flower import roster as rosters
from fedveil.flower.grid import LocalGrid
from fedveil.flower.server import Options, serve

CONFIG = """\
recipe = "fed-cdp"
clients = 2
rounds = 2
local_steps = 3
batch_size = 4
learning_rate = 0.1
model = "papers-mlp"
model_options.hidden = [4]
"""


def table(path: Path, rows: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    lines = ["age,dose,outcome"]
    lines += [
        f"{draw.integers(1, 99)},{draw.random() * 9:.2f},{draw.choice(['flu', 'healthy'])}"
        for _ in range(rows)
    ]
    path.write_text("\n".join(lines) + "\n")


def cli(*arguments: Any) -> str:
    found = CliRunner().invoke(build(), ["flower", *map(str, arguments)])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.output


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("study.toml").write_text(CONFIG)
    table(Path("public.csv"), 30, 1)
    cli("identity", "owner.key")
    cli("identity", "server.key")
    server = identity.public_of(identity.read_identity("server.key")).hex()
    cli("contract", "flu.toml", "--config", "study.toml", "--public", "public.csv", "--target", "outcome", "--examples", 40,
        "--epsilon", 20, "--range", "age=0:120", "--study", "flu", "--submitter", server)  # fmt: skip
    return tmp_path


def join(name: str, rows: int, seed: int) -> dict[str, Any]:
    more = ["--study", "flu"] if not Path("roster.json").exists() else []
    cli("invite", name, "--contract", "flu.toml", "--superlink", "fl:8000", *more)
    table(Path(f"{name}.csv"), rows, seed)
    assert "Nothing was written" in cli("accept", f"{name}.invite.json")
    cli("accept", f"{name}.invite.json", "--home", name, "--data", f"{name}.csv", "--agree")
    cli("admit", f"{name}.joined.json")
    return parse_node_config(Path(name, "node-config").read_text().strip())


def test_a_study_from_its_papers_to_a_trained_model(study: Path) -> None:
    nodes = {100 + n: join(name, 40, n) for n, name in enumerate(("a", "b"))}
    options = Options(out=str(study / "run"), join=1.0, deadline=60.0, poll=0.01, public="public.csv", contract="flu.toml",
                      roster="roster.json", identity="server.key")  # fmt: skip
    result = serve(LocalGrid(client_app(), nodes), load_config("study.toml"), options)
    assert result["rounds"] == 2 and result["simulated"] is False
    assert [line["arrived"] for line in open_run(study / "run").metrics] == [2, 2]


def test_a_stranger_that_takes_an_honest_number_is_turned_away(study: Path) -> None:
    nodes = {100 + n: join(name, 40, n) for n, name in enumerate(("a", "b"))}
    cli("identity", "mallory.key")
    impostor = {**nodes[100], "identity": str(study / "mallory.key"), "home": str(study / "mallory")}
    options = Options(out=str(study / "run"), join=1.0, deadline=60.0, poll=0.01, public="public.csv", contract="flu.toml",
                      roster="roster.json", identity="server.key")  # fmt: skip
    grid = LocalGrid(client_app(), {1: impostor, **nodes})  # it is asked first
    serve(grid, load_config("study.toml"), options)
    assert [line["arrived"] for line in open_run(study / "run").metrics] == [2, 2]
    assert json.loads((study / "run/nodes.json").read_text())["0"][0] == 100


def test_a_contract_allows_its_study_and_nothing_beside_it(study: Path) -> None:
    agreed = contract.read_contract("flu.toml")
    assert agreed.data is not None and agreed.data.columns[0] == ("age", 0.0, 120.0)
    assert agreed.data.classes == ("flu", "healthy") and agreed.bounds.clip == (4.0, 4.0)
    assert agreed.bounds.learning_rate == (0.0, 0.1) and agreed.epsilon == 20.0
    assert "digest " + agreed.digest in cli("contract", "flu.toml")
    later = replace(agreed, data=replace(agreed.data, examples=50))
    contract.write_contract(Path("flu-2.toml"), later)
    assert "data.examples: 40 -> 50" in cli("contract", "flu-2.toml", "--diff", "flu.toml")
    table(Path("mine.csv"), 39, 4)
    assert "39 records" in cli("contract", "flu.toml", "--check", "mine.csv")


def test_invitations_are_signed_good_for_one_number_and_used_once(study: Path) -> None:
    join("a", 40, 0)
    with pytest.raises(UserError, match="no open invitation"):
        cli("admit", "a.joined.json")
    cli("invite", "b", "--contract", "flu.toml")
    changed = json.loads(Path("b.invite.json").read_text())
    changed["document"]["superlink"] = "evil:8000"
    Path("c.invite.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match="signature is wrong"):
        cli("accept", "c.invite.json", "--home", "c", "--agree")
    assert not Path("c").exists()
    cli("accept", "b.invite.json", "--home", "b", "--agree")
    answer = json.loads(Path("b.joined.json").read_text())
    answer["document"]["number"] = 7
    Path("b2.json").write_text(json.dumps(answer))
    with pytest.raises(UserError, match="signature is wrong"):
        cli("admit", "b2.json")
    with pytest.raises(UserError, match="never overwritten"):
        cli("accept", "b.invite.json", "--home", "b", "--agree")
    assert os.stat("b/identity").st_mode & 0o077 == 0 and os.stat("b").st_mode & 0o077 == 0


def test_keys_rotate_with_the_old_keys_word_and_a_removed_number_stays_gone(study: Path) -> None:
    for n, name in enumerate(("a", "b")):
        join(name, 40, n)
    before = rosters.read_roster("roster.json")
    cli("rotate", "--home", "a", "--out", "a.rotated.json")
    assert "new identity key" in cli("admit", "a.rotated.json")
    cli("rotate", "--home", "a", "--finish")
    after = rosters.read_roster("roster.json")
    assert (
        after.member(0).identity
        == identity.public_of(identity.read_identity("a/identity"))
        != before.member(0).identity
    )
    with pytest.raises(UserError, match="present key"):
        cli("admit", "a.rotated.json")
    assert "removed" in cli("remove", 1)
    cli("invite", "c", "--contract", "flu.toml")
    assert json.loads(Path("c.invite.json").read_text())["document"]["number"] == 2


def test_only_the_studys_owner_changes_its_roster(study: Path) -> None:
    join("a", 40, 0)
    with pytest.raises(UserError, match="not signed by the study's owner"):
        cli("remove", 0, "--key", "server.key")


def test_a_run_with_fewer_members_than_clients_is_refused_before_nodes_join(study: Path) -> None:
    join("a", 40, 0)
    more = ["--public", "public.csv", "--contract", "flu.toml", "--roster", "roster.json"]
    with pytest.raises(UserError, match="roster has no node 1"):
        cli("init", "p", "study.toml", *more)
    with pytest.raises(UserError, match="needs the study's contract"):
        cli("init", "p", "study.toml", "--public", "public.csv")
    assert not Path("p").exists()


def test_an_anchor_that_disagrees_is_said(study: Path) -> None:
    settings = f'home="{study}/h" contract="x" partition-id=0'
    assert "they agree" in cli("anchor", "--node-config", settings)
    Path("h.anchor.json").write_text(json.dumps({"number": 4, "hash": "0" * 64}))
    found = CliRunner().invoke(build(), ["flower", "anchor", "--node-config", settings])
    assert found.exit_code == 1 and "DO NOT AGREE" in found.output
    assert "h.anchor.json" in cli("anchor", "--forget", "--node-config", settings)


SUMMED = """
recipe = "sum-cdp"
clients = 4
rounds = 3
local_steps = 1
batch_size = 40
learning_rate = 50.0
model = "logistic"
features = "unit:constant=1"
secure_sum = true
sum_threshold = 4
delta = 1e-3

[protect]
sampling = "full"
cohort = "all"
sigma = 8.0
"clip.bound" = 0.1
"""


def test_a_study_with_secure_sums_from_its_papers_to_a_trained_model(study: Path) -> None:
    """The contract names threshold, colluders and who signs the roster; the roster comes to the nodes by their owner."""
    Path("study.toml").write_text(SUMMED)
    Path("flu.toml").unlink()
    owner = identity.public_of(identity.read_identity("owner.key")).hex()
    asked = ("contract", "flu.toml", "--config", "study.toml", "--public", "public.csv", "--target", "outcome", "--examples", 40,
             "--epsilon", 20, "--delta", "1e-3", "--range", "age=0:120", "--study", "flu")  # fmt: skip
    with pytest.raises(UserError, match="--roster-owner"):
        cli(*asked)
    shown = cli(*asked, "--roster-owner", owner)
    assert "secure sums: opened only with 4 nodes or more" in shown and "unit:constant=1" in shown
    nodes = {100 + n: join(name, 40, n) for n, name in enumerate(("a", "b", "c", "d"))}
    options = Options(out=str(study / "run"), join=1.0, deadline=60.0, poll=0.01, public="public.csv", contract="flu.toml",
                      roster="roster.json", identity="server.key", patience=1)  # fmt: skip
    with pytest.raises(UserError, match="roster is not the one that its owner agreed to"):
        serve(LocalGrid(client_app(), nodes), load_config("study.toml"), replace(options, out=str(study / "first")))
    for name in "abcd":
        shutil.copy("roster.json", Path(name, "roster.json"))
    result = serve(LocalGrid(client_app(), nodes), load_config("study.toml"), options)
    assert result["rounds"] == 3 and result["simulated"] is False
    assert [line["arrived"] for line in open_run(study / "run").metrics] == [4, 4, 4]
    rows = {r["observer"]: r["verdict"] for r in result["ledger"] if r["unit"] == "example"}
    assert rows["server"] == rows["participants"] == rows["public"] == "sound"


@pytest.mark.parametrize(
    "text", ["[]", "3", '{"00": {"number": 0, "expires": 9e9}}', '{"00": {"number": 0, "name": "a", "expires": []}}']
)
def test_odd_notes_of_open_invitations_are_refused_with_a_sentence(tmp_path: Path, text: str) -> None:
    roster, secret = tmp_path / "roster.json", identity.new_identity()
    rosters.write_roster(roster, rosters.Roster("s", 1), secret)
    Path(f"{roster}.invited").write_text(text)
    with pytest.raises(UserError, match="invited"):
        onboard.invite(tmp_path / "a.json", roster, secret, "a")


@pytest.mark.parametrize("text", ["[]", "{}", '{"study": "s", "owner": "x", "number": 0, "name": "a"}'])
def test_a_rotation_with_an_odd_note_of_the_study_is_refused_before_keys_are_made(tmp_path: Path, text: str) -> None:
    identity.write_identity(tmp_path / "identity")
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(UserError, match="study"):
        onboard.rotate(tmp_path, tmp_path / "rotated.json")
    assert not (tmp_path / "identity.new").exists()
