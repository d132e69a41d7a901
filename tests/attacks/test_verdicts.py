"""One table over all seats: complete, by the schema, never mixing seats or calling tables images."""

import json

import pytest

from fedveil.attacks import campaign, verdicts

ROWS = [
    {"observer": "server", "unit": "example", "epsilon": 1.5, "verdict": "sound"},
    {"observer": "public", "unit": "example", "epsilon": 1.5, "verdict": "sound"},
    {"observer": "client-process", "unit": "example", "epsilon": None, "verdict": "none"},
]
IMAGES = {
    "kind": "gradient",
    "method": "veil",
    "tap": "type2",
    "success_rate": 1.0,
    "victims": 4,
    "pixel_range": [0, 1],
}


def entry(result, made="2026-01-02T03:04:05+00:00"):
    return {"schema": verdicts.ENTRY, "made": made, "settings": {}, "result": result}


def row_of(summary, seat):
    return next(row for row in summary["rows"] if row["seat"] == seat)


def test_a_seat_that_was_promised_nothing_is_said_to_need_trust_and_others_are_not_mixed_in():
    table = verdicts.summary(ROWS, [entry(IMAGES)])
    inside = row_of(table, "client-process")
    assert inside["got"].startswith("100% of 4 images") and "trusted hands" in inside["means"]
    assert row_of(table, "server")["attack"] is None and row_of(table, "public")["attack"] is None


def test_tables_are_records_not_images():
    table = verdicts.summary(ROWS, [entry({**IMAGES, "pixel_range": None})])
    assert "images" not in json.dumps(table) and "4 records" in row_of(table, "client-process")["got"]
    said = verdicts.summary(ROWS, [entry({**IMAGES, "pixel_range": [-1, 1], "images": False})])
    assert "images" not in json.dumps(said) and "4 records" in row_of(said, "client-process")["got"]


def test_the_best_of_several_attacks_is_shown_with_its_date():
    weak, strong = {**IMAGES, "success_rate": 0.25}, {**IMAGES, "method": "cpl", "success_rate": 0.75}
    table = verdicts.summary(ROWS, [entry(strong, "2026-01-01T00:00:00+00:00"), entry(weak)])
    best = row_of(table, "client-process")
    assert best["attack"] == "gradient cpl" and best["made"].startswith("2026-01-01") and best["attacks"] == 2


def test_what_a_models_answers_tell_is_not_called_bounded_by_the_promise():
    """A decoder redraws any record that is put in, whether it was trained on or not."""
    decoder = entry({"kind": "decoder", "mse": 0.1, "control_mse": 1.0, "images": True})
    alone = row_of(verdicts.summary(ROWS, [decoder]), "public")
    assert alone["attack"] == "decoder" and alone["means"].startswith("No promise about training covers this")
    guess = entry({"kind": "membership", "methods": {"lira-online": {"auc": 0.51, "auc_interval_all": [0.45, 0.57]}}})
    both = row_of(verdicts.summary(ROWS, [decoder, guess]), "public")
    assert both["attack"] == "membership" and both["means"].startswith("Nothing found") and both["attacks"] == 2


def test_the_next_step_names_seats_that_nothing_was_tried_from_and_no_others():
    client = {"observer": "server", "unit": "client", "epsilon": 3.0, "verdict": "sound"}
    audit = {"kind": "audit", "observer": "server", "unit": "client", "epsilon_lower": 0.0, "epsilon_promised": 3.0,
             "verdict": "promise holds"}  # fmt: skip
    said = verdicts.next_step(verdicts.summary([*ROWS, client], [entry(audit)])["rows"], "RUN")
    assert "whoever gets the model" in said and "the server" not in said
    after_all = [entry(audit), entry({"kind": "membership", "methods": {"rmia": {"auc": 0.5, "auc_interval_all": [0.4, 0.6]}}})]
    others = {"observer": "participants", "unit": "example", "epsilon": 3.0, "verdict": "sound"}
    assert verdicts.next_step(verdicts.summary([*ROWS, client, others], after_all)["rows"], "RUN") == ""


def test_participants_stand_beside_whoever_gets_the_model_where_both_were_promised_the_same():
    member = entry({"kind": "membership", "methods": {"rmia": {"auc": 0.5, "auc_interval_all": [0.4, 0.6]}}})
    others = {"observer": "participants", "unit": "example", "epsilon": 1.5, "verdict": "sound"}
    row = row_of(verdicts.summary([*ROWS, others], [member]), "participants")
    assert row["attack"] is None and row["got"] == "see whoever gets the model" and "same promise" in row["means"]
    for promised, tried in ((others, entry(IMAGES)), ({**others, "epsilon": 3.0}, member)):
        assert row_of(verdicts.summary([*ROWS, promised], [tried]), "participants")["got"] == "not attacked"


def test_a_broken_sound_promise_is_a_warning_not_to_use_the_run():
    broken = {"kind": "audit", "observer": "server", "unit": "example", "epsilon_lower": 4.0, "epsilon_promised": 1.5,
              "verdict": "promise broken"}  # fmt: skip
    row = row_of(verdicts.summary(ROWS, [entry(broken)]), "server")
    assert "do not use this run" in row["means"]


def test_short_evidence_names_the_next_step():
    short = {"kind": "audit", "observer": "server", "unit": "example", "epsilon_lower": 0.1, "epsilon_promised": 1.5,
             "verdict": "not enough evidence"}  # fmt: skip
    assert "next: fedveil audit RUN --plan" in row_of(verdicts.summary(ROWS, [entry(short)]), "server")["means"]


def test_membership_within_its_interval_is_nothing_found():
    rates = {"auc": 0.53, "auc_interval": [0.48, 0.58]}
    row = row_of(
        verdicts.summary(ROWS, [entry({"kind": "membership", "methods": {"rmia": rates}})]), "public"
    )
    assert row["got"] == "no better than guessing" and row["means"].startswith("Nothing found")


def test_the_summary_follows_its_schema():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(verdicts.summary(ROWS, [entry(IMAGES)]), verdicts.SCHEMA)


def test_results_are_kept_side_by_side_with_dates_and_settings(tmp_path):
    for rate in (0.0, 1.0):
        campaign.save(tmp_path, "gradient", {**IMAGES, "success_rate": rate}, {"victims": 4})
    kept = verdicts.read_history(tmp_path / "history")
    assert [k["result"]["success_rate"] for k in kept] == [0.0, 1.0] and kept[0]["settings"] == {"victims": 4}
    assert json.loads((tmp_path / "gradient.json").read_text())["success_rate"] == 1.0


def test_odd_files_in_the_history_are_left_out(tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("[1]")
    (tmp_path / "c.json").write_text(json.dumps({"schema": verdicts.ENTRY, "result": 3}))
    assert verdicts.read_history(tmp_path) == []


def test_labels_that_are_read_count_beyond_what_guesses_for_others_get():
    upload = {**IMAGES, "tap": "type0", "success_rate": 0.0, "label_accuracy": 0.62}
    chance = row_of(verdicts.summary(ROWS, [entry({**upload, "label_control": 0.6, "label_chance": 0.4})]), "server")
    assert "no finding with 4 victims" in chance["got"] and chance["means"].startswith("Nothing found")
    read = row_of(verdicts.summary(ROWS, [entry({**upload, "label_control": 0.1, "label_chance": 0.002})]), "server")
    assert "(10% by guesses for others)" in read["got"] and read["means"].startswith("Something was found")


def test_a_little_more_of_the_labels_of_five_victims_is_no_finding():
    """81% of the labels, 79% by guesses for others: five victims can be dealt in 120 ways only."""
    upload = {**IMAGES, "tap": "type0", "victims": 5, "success_rate": 0.0, "label_accuracy": 0.81, "label_control": 0.79,
              "label_chance": 0.012}  # fmt: skip
    row = row_of(verdicts.summary(ROWS, [entry(upload)]), "server")
    assert "no finding with 5 victims" in row["got"] and row["means"].startswith("Nothing found")


def test_many_attacks_from_one_seat_share_the_chance_of_a_false_alarm():
    upload = {**IMAGES, "tap": "type0", "victims": 16, "success_rate": 0.0, "label_accuracy": 0.5, "label_control": 0.3}
    lucky, plain = entry({**upload, "label_chance": 0.004}), entry({**upload, "label_chance": 0.5})
    assert row_of(verdicts.summary(ROWS, [lucky]), "server")["means"].startswith("Something")
    assert row_of(verdicts.summary(ROWS, [lucky, plain, plain]), "server")["means"].startswith("Nothing found")


def test_pictures_that_a_blind_guess_rebuilds_as_well_are_no_finding():
    blind = {"black": {"success_rate": 0.0}, "mean": {"success_rate": 0.5}}
    row = row_of(verdicts.summary(ROWS, [entry({**IMAGES, "tap": "type0", "success_rate": 0.75, "controls": blind})]), "server")
    assert "50% by a blind guess" in row["got"] and row["means"].startswith("Nothing found")
    many = {**IMAGES, "tap": "type0", "victims": 64, "success_rate": 0.9, "controls": blind}
    assert row_of(verdicts.summary(ROWS, [entry(many)]), "server")["means"].startswith("Something was found")


def test_an_attribute_within_its_interval_is_nothing():
    read = {"kind": "attribute", "accuracy": 0.52, "accuracy_interval": [0.45, 0.59], "control_accuracy": 0.5}
    assert verdicts.strength(read)[0] == 0 and verdicts.strength({**read, "accuracy_interval": [0.51, 0.53]})[0] > 0
