"""All attacks one after the other: an interrupted campaign goes on where it stopped; exact inversion ends with noise."""

import json

import pytest

from fedveil.attacks import campaign
from fedveil.attacks.on_run import on_run
from fedveil.errors import UserError
from fedveil.federation.config import make_config
from fedveil.federation.loop import prepare
from fedveil.federation.loop import run as simulate


def prepared_of(recipe, model="logistic", **changes):
    values = {
        "dataset": "digits",
        "recipe": recipe,
        "model": model,
        "clients": 4,
        "partition": "iid",
        "rounds": 2,
    }
    return prepare(make_config({**values, "local_steps": 1, "batch_size": 30}, changes))


def test_an_interrupted_campaign_goes_on_where_it_stopped_and_a_finished_one_starts_anew(tmp_path):
    made, said = [], []

    def attack(name, stops=False):
        def run():
            made.append(name)
            if stops and made.count(name) == 1:
                raise KeyboardInterrupt
            return {"kind": name, "value": len(made)}

        return run

    def hopeless():
        raise UserError("this model has none.")

    attacks = {"first": attack("first"), "not": hopeless, "second": attack("second", stops=True)}
    with pytest.raises(KeyboardInterrupt):
        campaign.one_after_the_other(tmp_path, attacks, {"seed": 0}, say=said.append)
    again = campaign.one_after_the_other(tmp_path, attacks, {"seed": 0}, say=said.append)
    assert made == ["first", "second", "second"] and "[1/3] first: done before" in said
    assert again["first"]["value"] == 1 and again["not"]["not_done"] == "this model has none."
    campaign.one_after_the_other(tmp_path, attacks, {"seed": 0}, say=said.append)
    assert made.count("first") == 2


def test_other_settings_do_not_take_over_what_was_done(tmp_path):
    made = []

    def run():
        made.append(1)
        return {"kind": "one"}

    def stop():
        raise KeyboardInterrupt

    for seed in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            campaign.one_after_the_other(
                tmp_path, {"one": run, "two": stop}, {"seed": seed}, say=lambda _: None
            )
    assert len(made) == 2


@pytest.mark.parametrize(("model", "method"), [("logistic", "quotient"), ("papers-mlp", "spear")])
def test_exact_inversion_takes_everything_without_noise_and_nothing_with_it(model, method):
    bare = campaign.attack_exact(prepared_of("non-private", model), batches=2)
    noised = campaign.attack_exact(prepared_of("fed-cdp-sound", model, sigma=1.0), batches=2)
    assert bare["method"] == method and bare["share"] >= 0.5 and bare["control"] == 0
    assert noised["share"] == 0


def test_a_model_without_a_dense_first_layer_is_not_solved():
    with pytest.raises(UserError, match="dense layer"):
        campaign.attack_exact(prepared_of("non-private", "cpl-lenet"))


def test_every_tap_is_attacked_also_with_fewer_clients_than_victims():
    prepared = prepared_of("non-private")
    rows = campaign.attack_every_tap(
        {"run": (prepared.config, campaign.initial)},
        prepared,
        out=None,
        victims=6,
        method="idlg",
        iterations=3,
    )
    assert [(row["tap"], row["victims"]) for row in rows] == [("type2", 6), ("type1", 4), ("type0", 4)]


def too_dear(folder):
    """A run whose budget did not pay for its first round."""
    few = {"dataset": "digits", "recipe": "fed-cdp-sound", "model": "logistic", "clients": 4, "partition": "iid", "rounds": 2}
    config = make_config({**few, "local_steps": 5, "target_epsilon": 0.01, "report": False})
    assert simulate(config, folder)["rounds"] == 0
    return folder


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_of_no_rounds_is_not_accused_but_said_to_have_released_nothing(finished, tmp_path):
    folder = too_dear(tmp_path / "run")
    if not finished:
        (folder / "result.json").unlink()
    calls = [campaign.audit_run, campaign.plan_audit, campaign.audit_final_model]
    calls += [
        lambda path, kind=kind: on_run(path, kind, "", path / "attacks", {}, 2, 20, None, 2, 0, None)
        for kind in ("gradient", "membership", "all")
    ]
    for call in calls:
        with pytest.raises(UserError, match="released: there is nothing to audit or attack"):
            call(folder)
    assert not (folder / "attacks").exists()


CALIBRATED = {
    "dataset": "digits", "recipe": "fed-cdp-sound", "model": "logistic", "clients": 4, "cohort_size": 2, "partition": "iid",
    "rounds": 2, "local_steps": 1, "batch_size": 30, "calibrate": True, "report": False,
}  # fmt: skip


def test_a_run_that_was_calibrated_otherwise_is_not_attacked_with_noise_that_it_did_not_have(tmp_path):
    folder = tmp_path / "run"
    simulate(make_config({**CALIBRATED, "target_epsilon": 4.0}), folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    own = lines[0]["sigma"]
    for factor, refused in ((1.0, False), (1.0005, False), (0.998, True), (2.0, True)):
        earlier = [{**line, "sigma": own * factor} for line in lines]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in earlier))
        if not refused:
            assert campaign.opened(folder).path == folder
            continue
        with pytest.raises(UserError, match=f"sigma {own * factor:.6g}.*{own:.6g}.*run it again"):
            campaign.opened(folder)


def test_clients_that_were_calibrated_otherwise_are_not_attacked_with_noise_that_they_did_not_have(tmp_path):
    folder = tmp_path / "run"
    simulate(make_config({**CALIBRATED, "client_epsilons": [2.0, 4.0, float("inf")]}), folder)
    assert campaign.opened(folder).path == folder
    facts = json.loads((folder / "run.json").read_text())
    at = next(n for n, note in enumerate(facts["notes"]) if note.startswith("epsilon 4,"))
    head, _, sigma = facts["notes"][at].rpartition(" ")
    facts["notes"][at] = f"{head} {float(sigma) * 1.25:.4g}"
    (folder / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"epsilon 4, .* examples.*run it again"):
        campaign.opened(folder)


def test_another_place_of_the_data_is_kept_for_all_that_follows(tmp_path):
    simulate(make_config({**CALIBRATED, "target_epsilon": 4.0}), tmp_path / "run")
    assert campaign.opened(tmp_path / "run", data=str(tmp_path)).config.data == str(tmp_path)
