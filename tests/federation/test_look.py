"""What a look finds is paid for, depends on noised counts alone, and declared columns need none."""

import dataclasses
import json

import numpy as np
import pytest

from fedveil.data.columns import columns_of, encode, sheet_of
from fedveil.data.frames import from_columns
from fedveil.errors import UserError
from fedveil.federation import look as looks
from fedveil.federation.config import make_config
from fedveil.privacy.accountants import answer


def patients(rows=3000, seed=0):
    random = np.random.default_rng(seed)
    sodium = random.normal(139, 4, rows).round(1)
    income = np.exp(random.normal(10, 1, rows)).round()
    ward = random.choice(["ICU", "surgery", "medicine"], rows)
    outcome = np.where(sodium + 4 * (ward == "ICU") + random.normal(0, 2, rows) > 140, "died", "alive")
    sodium[random.random(rows) < 0.2] = np.nan
    return from_columns({"sodium": sodium, "income": income, "ward": ward, "outcome": outcome}, "patients")


def looked(table, epsilon=4.0, observer="sum", sites=3, knots=4, seed=0, **options):
    sheet = sheet_of(table, columns_of(options, "outcome", None, "t"), 0)
    asked = looks.needs_look(sheet)
    cost = looks.price(len(asked), len(sheet.train), sites, observer, epsilon, 1e-5)
    holders = np.array_split(np.arange(len(sheet.train)), sites)
    return sheet, looks.look(sheet, holders, cost, observer, seed, knots), cost


@pytest.mark.parametrize("observer", ["sum", "server"])
def test_kinds_ranges_words_and_classes_are_found(observer):
    sheet, found, _ = looked(patients(), observer=observer)
    scales = {scale.column: scale for scale in found.known.scales}
    assert scales["sodium"].kind == "number" and scales["sodium"].mark
    assert 120 < scales["sodium"].low < 135 and 143 < scales["sodium"].high < 160
    assert scales["income"].kind == "number" and not scales["income"].mark
    assert scales["ward"].kind == "words" and len(scales["ward"].places) == 3
    assert found.known.classes == ("alive", "died") and found.known.task == "classification"
    data = encode(sheet, found.known)
    assert data.x.shape[1] == found.known.width and np.abs(data.x).max() <= 1
    assert not any(note.startswith("private:") for note in data.notes)


def test_the_looks_cost_their_share_of_the_budget_and_not_more():
    _, found, cost = looked(patients())
    events = [paid.event for paid in found.paid]
    assert len(events) == 2
    whole = looks.calibrate(4.0, 1e-5).noise_multiplier
    together = sum(event.noise.multiplier**-2 for event in events)
    assert together <= cost.share * whole**-2
    assert answer(events, 1e-5).verdict == "sound"


def test_a_look_depends_on_seed_and_noised_counts_only():
    table = patients()
    _, first, _ = looked(table)
    assert looked(table)[1] == first
    assert looked(table, seed=1)[1] != first


def test_constants_are_the_same_for_tables_whose_noised_counts_are_the_same():
    """Rows in another order have the same counts: whatever else a look used would show."""
    table = patients()
    options = {"split": "part", "group": ""}
    part = np.where(np.arange(len(table)) < 2500, "train", "test")
    order = np.concatenate([np.random.default_rng(5).permutation(2500), np.arange(2500, len(table))])
    turned = {name: cells[order] for name, cells in table.columns.items()}
    one = from_columns({**table.columns, "part": part}, "t")
    two = from_columns({**turned, "part": part}, "t")
    del options["group"]
    assert looked(one, **options)[1] == looked(two, **options)[1]


def test_declared_columns_are_not_looked_at():
    declared = {
        "ranges": {"sodium": [120, 160], "income": [0, 100000]},
        "categories": {"ward": ["ICU", "surgery", "medicine"]},
        "classes": ["alive", "died"],
    }
    sheet = sheet_of(patients(), columns_of(declared, "outcome", None, "t"), 0)
    assert looks.needs_look(sheet) == []
    made = looks.constants(sheet, 1, None)
    assert made.paid == () and made.known.width == 5


def test_free_scaling_needs_a_declared_target():
    sheet = sheet_of(patients(), columns_of({"scaling": "free"}, "outcome", None, "t"), 0)
    with pytest.raises(UserError, match="must be declared"):
        looks.constants(sheet, 1, None)


def test_a_look_that_would_drown_is_refused_before_it_is_made():
    with pytest.raises(UserError, match=r"drown.*--ranges.*--observer sum"):
        looks.price(columns=40, rows=300, clients=20, observer="server", epsilon=0.5, delta=1e-5)


def test_a_quantity_is_told_from_classes():
    table = patients()
    columns = {**table.columns, "outcome": np.random.default_rng(1).normal(50, 10, len(table))}
    _, found, _ = looked(from_columns(columns, "t"))
    assert found.known.task == "regression" and 0 < found.known.low < 50 < found.known.high < 110
    with pytest.raises(UserError, match="--task regression"):
        looked(from_columns(columns, "t"), task="classification")


def test_what_was_found_survives_json():
    _, found, _ = looked(patients())
    assert looks.looked_from_json(json.loads(json.dumps(found.to_json()))) == found
    with pytest.raises(UserError, match=r"table\.json"):
        looks.looked_from_json({"known": {}})


def test_rows_of_rare_labels_count_as_the_usual_class():
    table = patients()
    labels = np.where(np.arange(len(table)) == 7, "only-one", table.columns["outcome"])
    _, found, _ = looked(from_columns({**table.columns, "outcome": labels}, "t"))
    assert "only-one" not in found.known.classes
    sheet, _, _ = looked(table)
    assert set(np.unique(encode(sheet, dataclasses.replace(found.known)).y)) <= {0, 1}


@pytest.mark.parametrize("undeclared", ["everything", "the target alone"])
def test_one_row_adds_no_more_to_a_look_than_its_bound(monkeypatch, undeclared):
    """All counts before noise, of a table with and without one row: their distance is within the bound that the noise has."""
    sheet = sheet_of(patients(200), columns_of({}, "outcome", None, "t"), 0)
    if undeclared == "the target alone":
        monkeypatch.setattr(looks, "needs_look", lambda sheet: [sheet.columns.target])

    def recorded(train):
        seen = {}

        def counts(self, places, key):
            seen.setdefault(id(self), (self, []))[1].append(np.asarray(places, float))
            return self.noised.add(np.asarray(places, float), key[:16])

        def shown(self, words, key):
            seen.setdefault(id(self), (self, []))[1].append(dict(words))
            return {w: float(c) for w, c in words.items()}

        monkeypatch.setattr(looks.Tally, "counts", counts)
        monkeypatch.setattr(looks.Tally, "shown_words", shown)
        cost = looks.Price(0.1, 5.0, 2, 1.0, 1e-9)
        own = dataclasses.replace(sheet, train=train)
        looks.look(own, [np.arange(len(train))], cost, "sum", 0, 1)
        return next(iter(seen.values()))

    (noise, with_row), (_, without) = recorded(sheet.train), recorded(sheet.train[1:])
    moved = float(np.sum((with_row[0] - without[0]) ** 2))
    moved += sum((with_row[1].get(w, 0) - without[1].get(w, 0)) ** 2 for w in {*with_row[1], *without[1]})
    assert 0 < np.sqrt(moved) <= noise.noised.bound + 1e-12


@pytest.mark.parametrize("cell", ["unknown", "0.50", 3])
def test_one_cell_of_another_type_moves_a_look_by_its_own_row_alone(monkeypatch, cell):
    """Labels as a list of floats: with one word among them all were spelled otherwise, and all counts moved."""
    y = [float(i % 2) for i in range(200)]
    seen = []
    monkeypatch.setattr(looks.Tally, "shown_words", lambda self, words, key: seen.append(words) or {"0": 99.0, "1": 99.0})
    for labels in (y, [cell, *y[1:]]):
        sheet = sheet_of(from_columns({"a": y, "y": labels}, "t"), columns_of({}, "y", None, "t"), 0)
        rows = np.arange(200)
        looks.look(dataclasses.replace(sheet, train=rows), [rows], looks.Price(0.1, 5.0, 2, 1.0, 1e-9), "sum", 0, 1)
    assert seen[0] == {"0": 100, "1": 100} and sum(seen[1].values()) == 200
    assert (seen[1]["0"], seen[1]["1"]) == (99, 100)


def test_who_may_not_look_is_told_to_declare_public_ranges_and_not_to_copy_what_the_rows_hold():
    config = make_config({"recipe": "fed-cdp-sound", "dataset": "t.csv", "target": "outcome", "table": {"scaling": "paid"}})
    with pytest.raises(UserError, match="from what can be measured, not from the rows") as told:
        looks.open_table(config, patients(100), 0, deployed=True, pays=True)
    assert "writes" not in str(told.value)
