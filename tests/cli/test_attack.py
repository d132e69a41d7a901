import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fedveil.attacks.leakage import measure
from fedveil.cli import attack, build
from fedveil.errors import UserError
from fedveil.federation.config import make_config
from fedveil.federation.loop import run as simulate


def call(*words):
    return CliRunner().invoke(build(), [str(w) for w in words])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small private run on the embedded digits."""
    folder = tmp_path_factory.mktemp("run") / "first"
    config = make_config({
        "recipe": "fed-cdp-sound", "dataset": "digits", "clients": 3, "rounds": 2, "local_steps": 3, "batch_size": 50,
        "protect": {"sigma": 1.0}, "model": "papers-mlp", "partition": "iid", "report": False, "checkpoint_every": 1,
    })  # fmt: skip
    simulate(config, folder)
    return folder


def test_gradient_attack_without_a_run_prints_the_promised_keys():
    result = call(
        "attack", "--kind", "gradient", "--type", "2", "--recipe", "non-private", "--dataset", "digits",
        "--model", "cpl-lenet", "--victims", 4, "--seed", 11, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    keys = {
        "success_rate",
        "label_accuracy",
        "rmse",
        "ssim",
        "iterations",
        "threshold",
        "cpu_seconds_per_victim",
        "controls",
    }
    assert keys <= set(found)
    assert found["success_rate"] == 1.0 and found["label_accuracy"] == 1.0
    assert found["controls"]["black"]["success_rate"] == 0.0


def test_recipes_are_compared_and_the_table_resumes(tmp_path):
    words = (
        "attack", "--recipe", "non-private,fed-cdp-example", "--dataset", "digits", "--victims", 3, "--iterations", 60,
        "--out", tmp_path, "--json",
    )  # fmt: skip
    first = json.loads(call(*words).stdout)
    assert [r["recipe"] for r in first["results"]] == ["non-private", "fed-cdp-example"]
    assert first["results"][0]["success_rate"] > first["results"][1]["success_rate"] == 0.0
    assert (tmp_path / "gradient.png").stat().st_size > 1000
    lines = (tmp_path / "gradient.jsonl").read_text().splitlines()
    again = json.loads(call(*words).stdout)
    assert again == first and (tmp_path / "gradient.jsonl").read_text().splitlines() == lines


def test_the_picture_of_a_resumed_campaign_has_all_recipes(tmp_path, monkeypatch):
    drawn, real = [], measure.gallery

    def gallery(outcomes, path, *more):
        if path.name == "gradient.png":
            drawn.append([o.figures["recipe"] for o in outcomes.values()])
        real(outcomes, path, *more)

    monkeypatch.setattr(measure, "gallery", gallery)
    for folder, campaigns in {
        "resumed": ["fed-cdp", "non-private,fed-cdp"],
        "whole": ["non-private,fed-cdp"],
    }.items():
        for recipes in campaigns:
            result = call(
                "attack", "--recipe", recipes, "--victims", 2, "--iterations", 20, "--out", tmp_path / folder, "--json"
            )  # fmt: skip
            assert result.exit_code == 0, result.output
    assert drawn == [["fed-cdp"], ["non-private", "fed-cdp"], ["non-private", "fed-cdp"]]
    resumed, whole = ((tmp_path / folder / "gradient.png").read_bytes() for folder in ("resumed", "whole"))
    assert resumed == whole


def test_each_tap_has_a_table_of_its_own_and_labels_stand_beside_guesses_for_others(capsys):
    """A table once called what a server sees by the name of the first tap, a client's memory."""
    row = json.loads(call("attack", "--recipe", "non-private", "--dataset", "digits", "--victims", 4, "--json").stdout)
    attack._show_gradients([row, {**row, "tap": "type0", "victims": 3, "label_accuracy": 0.625, "label_control": 0.5}])
    said = capsys.readouterr().out
    assert "on type2, digits, 4 victims" in said and "on type0, digits, 3 victims" in said
    assert "0.625" in said and "(0.50)" in said


def test_a_rate_that_blind_guesses_reach_and_the_noise_are_explained(capsys):
    blind = {name: {"success_rate": 0.0, "success_rate_papers": 1.0, "rmse": 0.3, "ssim": 0.1} for name in ("black", "mean")}
    row = {
        "recipe": "fed-cdp-sound", "round": 3, "success_rate": 0.0, "success_rate_papers": 1.0, "label_accuracy": 0.2,
        "rmse": 0.5, "ssim": 0.1, "controls": blind, "pixel_range": [0, 1], "images": True, "chosen_by": "matching loss",
        "noise_on": "sum", "noise_scale": 0.5, "failed_numerically": 0, "method": "veil", "tap": "type0", "dataset": "digits",
        "victims": 4, "batch": 5,
    }  # fmt: skip
    attack._show_gradients([row])
    said = capsys.readouterr().out
    assert "is no finding" in said and "judge by rebuilt" in said
    assert "carries noise of size 0.50; noise on: sum, that is once on the sum" in said and "in local steps" in said
    rarer = {name: {**one, "success_rate_papers": 0.5} for name, one in blind.items()}
    attack._show_gradients([{**row, "noise_scale": 0.0, "controls": rarer}])
    said = capsys.readouterr().out
    assert "is no finding" not in said and "what is seen here carries no noise" in said


def test_the_text_says_how_many_attacks_failed_numerically(monkeypatch):
    real = measure.victims_of

    def poisoned(*arguments):
        found = real(*arguments)
        found.leak.values[1:] = float("nan")
        return found

    monkeypatch.setattr(measure, "victims_of", poisoned)
    words = ("attack", "--recipe", "non-private", "--dataset", "digits", "--victims", 4)
    assert json.loads(call(*words, "--json").stdout)["success_rate"] == 1.0
    assert "non-private, round 0: 3 of 4 attacks failed numerically and are left out" in call(*words).stdout


@pytest.mark.parametrize("leak", ["1", "0", "0-sanitised"])
def test_updates_leak_too_unless_the_tap_lies_behind_the_noise(leak):
    result = call(
        "attack",
        "--type",
        leak,
        "--recipe",
        "fed-sdp",
        "--dataset",
        "digits",
        "--victims",
        3,
        "--batch",
        1,
        "--json",
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["update_as"] == "gradient"
    assert found["success_rate"] == (0.0 if leak == "0-sanitised" else 1.0)


def test_a_run_is_attacked_at_chosen_rounds(finished):
    result = call("attack", finished, "--round", "0,2", "--victims", 2, "--iterations", 20, "--json")
    assert result.exit_code == 0, result.output
    assert [r["round"] for r in json.loads(result.stdout)["results"]] == [0, 2]
    assert (finished / "attacks" / "gradient.json").exists() and (
        finished / "attacks" / "gradient.png"
    ).exists()


def test_updates_of_a_run_are_those_of_its_clients_and_its_report_shows_what_was_got(finished):
    page = finished / "report.html"
    page.write_text("as `fedveil run` left it")
    result = call("attack", finished, "--type", "0", "--iterations", 5)
    assert result.exit_code == 0, result.output  # no --victims: as many as there are clients
    assert "--kind all" in result.output and "report.html" in result.output
    assert "Rebuilding inputs from gradients" in page.read_text("utf-8")
    page.unlink()


def test_membership_and_decoder_of_a_run(finished):
    found = json.loads(
        call("attack", finished, "--kind", "membership", "--shadows", 2, "--pool", 80, "--json").stdout
    )
    for key in ("auc", "balanced_accuracy"):
        low, high = found[f"{key}_interval"]
        assert low <= found[key] <= high
    for key in ("tpr_at_1pct", "tpr_at_01pct"):  # 40 non-members cannot show them
        assert found[key] is None and found[f"{key}_interval"] is None
    assert "needs 100 non-members" in found["reason"]
    found = json.loads(call("attack", finished, "--kind", "decoder", "--victims", 10, "--json").stdout)
    assert {"mse", "mae", "ssim"} <= set(found)


def test_failed_membership_attacks_are_shown_empty_with_their_reason(capsys):
    """On the terminal and in the report: a dash and why, never a figure."""
    from dataclasses import asdict

    from fedveil.attacks.membership import failed, rates
    from fedveil.cli.attack import _show
    from fedveil.report.attacks import attack_card

    member = np.arange(400) < 200
    found = {
        "rmia": asdict(failed("3 of 400 scores are not finite", 3)),
        "canary": asdict(rates(member, member)),
    }
    data = json.loads(json.dumps({"kind": "membership", "method": "rmia", **found["rmia"], "methods": found}))
    _show({"membership": data})
    shown = capsys.readouterr().out
    assert "Empty for rmia: The attack failed numerically (3 of 400" in shown and "0.500" not in shown
    assert "Empty for canary: TPR at 0.1% needs 1,000 non-members" in shown
    card = attack_card({"kind": "membership", "data": data})
    assert dict(card["methods"])["rmia"] == ["–"] * 4
    assert dict(card["methods"])["canary"][0].startswith("1 (") and dict(card["methods"])["canary"][3] == "–"
    assert len(card["empty"]) == 2


def test_an_attribute_attack_needs_an_attribute(finished):
    result = call("attack", finished, "--kind", "attribute")
    assert isinstance(result.exception, UserError) and "no further attributes" in str(result.exception)


def test_audit_of_a_correct_run_exits_with_zero(finished):
    result = call("audit", finished, "--canaries", 200, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"epsilon_lower", "epsilon_promised", "ceiling", "verdict"} <= set(found)
    assert found["verdict"] != "promise broken"
    assert (finished / "attacks" / "audit.json").exists()


def test_audit_of_a_run_whose_ledger_promises_too_much_exits_with_one(finished, tmp_path):
    """The ledger of a run with 30 times the noise, beside a run that adds little."""
    careful, careless = tmp_path / "careful", tmp_path / "careless"
    for folder, sigma in ((careful, 3.0), (careless, 0.1)):
        simulate(make_config({
            "recipe": "fed-cdp-sound", "dataset": "digits", "clients": 3, "rounds": 1, "local_steps": 1,
            "batch_size": 1000, "protect": {"sigma": sigma}, "model": "papers-mlp", "partition": "iid", "report": False,
        }), folder)  # fmt: skip
    (careless / "ledger.jsonl").write_bytes((careful / "ledger.jsonl").read_bytes())
    result = call("audit", careless, "--canaries", 200)
    assert result.exit_code == 1 and "PROMISE BROKEN" in result.output


def test_audit_of_a_run_with_float_noise_sees_it_in_the_low_bits(tmp_path):
    """A ledger that promises what exact noise gives, over a run whose noise was float32."""
    exact, floats = tmp_path / "exact", tmp_path / "floats"
    for folder, more in ((exact, {}), (floats, {"grid": 0.0})):
        simulate(make_config({
            "recipe": "fed-cdp-sound", "dataset": "digits", "clients": 3, "rounds": 1, "local_steps": 1, "batch_size": 100,
            "protect": {"sigma": 3.0, **more}, "model": "papers-mlp", "partition": "iid", "report": False,
        }), folder)  # fmt: skip
    own = {r["verdict"] for r in json.loads((floats / "result.json").read_text())["ledger"] if r["observer"] == "server"}
    assert "sound" not in own  # the run itself says so
    (floats / "ledger.jsonl").write_bytes((exact / "ledger.jsonl").read_bytes())
    result = call("audit", floats, "--canaries", 400)
    assert result.exit_code == 1 and "cannot come from the neighbour" in " ".join(result.output.split())
    summary = json.loads((floats / "attacks" / "summary.json").read_text())
    assert any("do not use this run" in row["means"] for row in summary["rows"])


def test_an_audit_is_planned_and_the_final_model_is_judged_alone(finished):
    result = call("audit", finished, "--plan", "--json")
    planned = json.loads(result.stdout)
    assert planned["kind"] == "audit-plan" and (planned["canaries"] is None or planned["power"] >= 0.95)
    assert "factor of 2" in planned["sentence"]
    final = json.loads(call("audit", finished, "--final", "--canaries", 200, "--json").stdout)
    assert final["seen"] == "the final model alone" and final["verdict"] != "promise broken"


def test_a_malicious_server_is_tried_on_a_run(finished):
    found = json.loads(call("attack", finished, "--kind", "malicious", "--json").stdout)
    assert found["kind"] == "malicious" and {row["kind"] for row in found["attacks"]} == {"imprint", "trap", "isolate"}
    assert found["share"] < 0.5  # the run's recipe has noise


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--kind", "gradients"), "Did you mean 'gradient'"), (("--type", "3"), "--type 3"),
     (("--kind", "membership"), "give a run directory"), (("--method", "viel"), "Did you mean 'veil'")],
)  # fmt: skip
def test_wrong_words_are_explained(words, message):
    result = call("attack", *words)
    assert isinstance(result.exception, UserError) and message in str(result.exception)


def test_a_run_can_be_audited_at_once(tmp_path):
    words = ("run", "fed-cdp-sound", "--set", "dataset=digits", "--set", "clients=3", "--set", "rounds=1", "--set",
             "local_steps=1", "--set", "batch_size=100", "--set", "model=papers-mlp", "--set", "partition=iid", "--set",
             "grid=1e-6", "--audit", "--json")  # fmt: skip
    result = call(*words, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["audit"]
    assert found["verdict"] != "promise broken" and found["status"] == "sound"
    assert (
        json.loads((tmp_path / "run" / "attacks" / "audit.json").read_text())["verdict"] == found["verdict"]
    )
    assert "Audit with canaries" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("as_json", [True, False])
def test_an_audit_of_a_run_whose_budget_paid_for_no_round_is_left_out_with_a_sentence(as_json, tmp_path):
    given = ["dataset=digits", "rounds=2", "local_steps=5", "batch_size=30", "sigma=0.4", "target_epsilon=0.5"]
    words = [part for change in given for part in ("--set", change)]
    result = call("run", "fed-cdp-sound", *words, "--audit", *["--json"][: int(as_json)], "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)["audit"]["not_done"] if as_json else " ".join(result.stdout.split())
    assert "nothing to audit or attack" in said and "BROKEN" not in result.output
    assert not (tmp_path / "run" / "attacks").exists() and (tmp_path / "run" / "report.html").exists()


def test_nothing_is_trained_for_an_audit_of_no_promise(tmp_path):
    result = call("run", "non-private", "--set", "dataset=digits", "--audit", "--out", tmp_path / "run")
    assert isinstance(result.exception, UserError) or result.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_ldp_uploads_give_nothing_back_at_the_server():
    words = ("attack", "--recipe", "ldp-fl", "--dataset", "digits", "--type", 0, "--victims", 3, "--batch", 1, "--iterations",
             60, "--json")  # fmt: skip
    found = json.loads(call(*words).stdout)
    assert found["noise_scale"] > 0 and found["success_rate"] == 0.0
