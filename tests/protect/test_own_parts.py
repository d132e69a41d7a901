"""Parts of somebody else's package run end to end, are held to what they state, and get nothing where they state nothing."""

import json

import pytest
from own_parts import Boastful, Silent, TwoGaussians, my_recipe, recipe

import fedveil as fv
from fedveil.cli import main
from fedveil.federation.practice import check_practice
from fedveil.federation.store import open_run
from fedveil.protect.catalogue import get
from fedveil.protect.recipe import digest, with_changes

SMALL = {"data": "cancer", "clients": 3, "rounds": 3, "local_steps": 2, "batch_size": 8, "report": False}


def test_a_mechanism_a_clip_rule_and_an_aggregation_of_ones_own_train_and_promise(tmp_path):
    result = fv.run(my_recipe, out=tmp_path / "run", **SMALL)
    lines = open_run(tmp_path / "run").metrics
    assert [line["bound"] for line in lines] == [4.0, 2.0, 1.0] and [line["asked"] for line in lines] == [1, 2, 3]
    ours = fv.run(with_changes(get("fed-cdp-sound"), {"clip.bound": 4.0}), out=tmp_path / "ours", **SMALL)
    # The same multiplier whatever the bound: the promise is that of Gaussian noise of this size.
    assert result.epsilon() == pytest.approx(ours.epsilon(), rel=1e-6)


def test_a_run_with_own_parts_is_continued_with_the_same_recipe_only(tmp_path):
    whole = fv.run(my_recipe, out=tmp_path / "run", checkpoint_every=1, **SMALL).state_dict()
    for round_number in (2, 3):
        for path in (tmp_path / "run" / "checkpoints").glob(f"round-00000{round_number}.*"):
            path.unlink()
    again = fv.resume(tmp_path / "run", recipe=my_recipe)
    assert again.facts["rounds"] == 3
    assert all((again.state_dict()[name] == value).all() for name, value in whole.items())
    with pytest.raises(fv.UserError, match="given as a value"):
        fv.resume(tmp_path / "run")


def test_a_law_that_states_nothing_is_promised_nothing(tmp_path):
    result = fv.run(recipe(Silent()), out=tmp_path / "run", **SMALL)
    rows = {(r["observer"], r["unit"]): r for r in result.ledger}
    row = rows["server", "example"]
    assert row["verdict"] == "none" and "states nothing" in row["reason"]


def test_the_check_holds_for_honest_parts_and_catches_the_boastful():
    assert check_practice(recipe(TwoGaussians()))
    assert check_practice(recipe(Boastful())).verdict == "too little noise"
    assert check_practice(recipe(Silent())).verdict == "states nothing"


def test_the_digest_knows_the_code_behind_a_part():
    assert digest(recipe(TwoGaussians())) != digest(recipe(Silent()))
    assert digest(my_recipe) == digest(my_recipe) != digest(get("fed-cdp"))


def test_a_recipe_is_named_from_a_file_and_only_with_the_users_word(tmp_path, monkeypatch, capsys):
    file = tmp_path / "own.toml"
    small = 'dataset = "cancer"\nclients = 3\nrounds = 2\nlocal_steps = 2\nreport = false\n'
    file.write_text('recipe = "own_parts:my_recipe"\n' + small)
    monkeypatch.setattr("sys.argv", ["fedveil", "run", str(file), "--out", str(tmp_path / "a")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "--trust-code" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["fedveil", "run", str(file), "--out", str(tmp_path / "a"), "--trust-code", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert json.loads((tmp_path / "a" / "result.json").read_text())["recipe"] == "own"
