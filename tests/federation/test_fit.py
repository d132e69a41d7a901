"""From data and a budget to a run: everything is charged to one ledger, and the choices are said."""

import json

import numpy as np
import pytest

import fedveil as fv
from fedveil.data.identifiers import is_identifier
from fedveil.errors import UserError
from fedveil.federation import fit, loop
from fedveil.federation.fit import choose, usual_delta
from fedveil.privacy.ledger import Ledger


def columns(rows=1200, seed=0):
    random = np.random.default_rng(seed)
    age = random.normal(60, 12, rows).round()
    ward = random.choice(["ICU", "surgery"], rows)
    risk = (age - 60) / 12 + 1.5 * (ward == "ICU") - 0.7
    return {
        "site": random.choice(["A", "B", "C"], rows), "age": age, "ward": ward,
        "days": np.exp(1 + 0.4 * risk + random.normal(0, 0.2, rows)),
        "outcome": np.where(risk + random.normal(0, 0.7, rows) > 0, "died", "alive"),
    }  # fmt: skip


def write_csv(path, data):
    names = list(data)
    lines = [",".join(names), *(",".join(str(data[n][i]) for n in names) for i in range(len(data[names[0]])))]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    path = write_csv(folder / "patients.csv", columns())
    result = fv.fit(path, target="outcome", group="site", drop=["days"], epsilon=4, control=True, out=folder / "run")
    return folder, path, result


def test_a_plain_csv_trains_about_as_well_as_without_privacy(run):
    _, _, result = run
    assert result.facts["learned"] is True
    assert result.accuracy > 0.95 * result.facts["control"]
    assert "not private" in result.facts["verdict"]


def test_looks_and_training_share_one_ledger_within_the_budget(run):
    folder, _, result = run
    assert 3.9 < result.epsilon("server") <= 4
    ledger = Ledger.read(folder / "run" / "ledger.jsonl", rounds=0)
    before = ledger.epsilon("server", "example")
    assert 0 < before < 2  # what the looks alone cost stands there before the first round
    assert result.ledger[0]["reason"].startswith("a noised look")


def test_every_choice_is_said(run):
    _, _, result = run
    assert {"data", "sites", "scaling", "recipe", "model", "rounds"} <= set(result.facts["choices"])
    assert any(line.startswith("age: numbers") for line in result.facts["found"])


def test_the_model_fits_the_constants_that_were_kept(run):
    folder, _, _ = run
    again = loop.prepare(fv.open_run(folder / "run").config)
    assert again.looked is not None
    assert json.loads((folder / "run" / "table.json").read_text()) == json.loads(json.dumps(again.looked.to_json()))


def test_a_run_under_secret_noise_continues_with_the_look_that_it_paid_for(tmp_path):
    path = write_csv(tmp_path / "patients.csv", columns())
    chosen = choose(path, target="outcome", epsilon=4, table={"group": "site", "drop": ["days"]}, secure_noise=True, rounds=3)

    def stop(facts):
        if facts.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.run(chosen.config.model_copy(update={"checkpoint_every": 1}), tmp_path / "run", on_round=stop)
    first = (tmp_path / "run" / "table.json").read_bytes()
    loop.run(fv.open_run(tmp_path / "run").config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "table.json").read_bytes() == first
    text = (tmp_path / "run" / "ledger.jsonl").read_text()
    assert text.count('"note":"look"') == 2


def test_nothing_is_written_before_the_look_is_charged(tmp_path, monkeypatch):
    path = write_csv(tmp_path / "patients.csv", columns())
    chosen = choose(path, target="outcome", epsilon=4, table={"group": "site", "drop": ["days"]})

    def fail(*_, **__):
        raise RuntimeError("stopped")

    monkeypatch.setattr(loop, "charge_preprocessing", fail)
    with pytest.raises(RuntimeError, match="stopped"):
        loop.run(chosen.config, tmp_path / "run")
    assert {p.name for p in (tmp_path / "run").iterdir()} <= {".lock", "ledger.jsonl", "ledger.head"}


def test_regression_reports_its_error_in_the_targets_units(tmp_path):
    data = columns()
    data.pop("outcome")
    few = {"rounds": 50}
    result = fv.fit(data, target="days", group="site", task="regression", epsilon=4, settings=few, out=tmp_path / "run")
    assert result.facts["r2"] > 0.2 and result.facts["learned"] is True
    assert 0 < result.facts["rmse_in_units"] < 5


def test_noise_instead_of_data_is_not_called_learning(tmp_path):
    data = columns()
    data["outcome"] = np.random.default_rng(3).permutation(data["outcome"])
    result = fv.fit(
        data, target="outcome", group="site", drop=["days", "ward"], classes=["alive", "died"], ranges={"age": [0, 110]},
        epsilon=1, out=tmp_path / "run",
    )  # fmt: skip
    assert result.facts["learned"] is False and "NOT better" in result.facts["verdict"]


def test_a_model_of_no_rounds_is_called_untrained():
    facts = {"test_accuracy": 0.25, "r2": None, "ledger": [], "rounds": 0, "judgement": ""}
    said = fit.verdict(facts, choose(columns(), target="outcome", epsilon=4).config)
    assert said.startswith("The model is the untrained first one, because no round was played; accuracy 0.250")


def test_declared_columns_cost_nothing(tmp_path):
    result = fv.fit(
        columns(), target="outcome", group="site", drop=["days"], epsilon=2, ranges={"age": [0, 110]},
        categories={"ward": ["ICU", "surgery"]}, classes=["alive", "died"], observer="server", out=tmp_path / "run",
    )  # fmt: skip
    assert result.facts["found"] == [] and result.accuracy > 0.7
    assert "look" not in result.ledger[0]["reason"]


def test_arrays_and_pictures_are_taken(tmp_path):
    random = np.random.default_rng(0)
    y = np.arange(300) % 2
    x = random.normal(0, 1, (300, 4)) + y[:, None]
    assert fv.fit((x, y), epsilon=8, clients=3, out=tmp_path / "a").accuracy > 0.7  # the line between the classes gives 0.84
    with pytest.raises(UserError, match="for tables with named columns"):
        choose((np.zeros((20, 1, 8, 8)), np.arange(20) % 2), epsilon=8, table={"drop": ["a"]})
    with pytest.raises(UserError, match="one target per row"):
        choose((x, y[:-1]), epsilon=8)


def test_delta_shrinks_with_the_number_of_rows():
    assert [usual_delta(n) for n in (100, 10_000, 10_001, 126_700, 10**6)] == [1e-5, 1e-5, 1e-6, 1e-7, 1e-7]
    assert all(usual_delta(n) * n <= 0.1 + 1e-12 for n in (3, 9_999, 50_000, 10**7))


def test_clients_and_groups_must_agree():
    with pytest.raises(UserError, match="names 3 sites"):
        choose(columns(), target="outcome", epsilon=2, clients=5, table={"group": "site"})


def _fail(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    "fault", ["the look", "the rows behind it", "what follows it", "check_noise", "data_digest", "header_of"]
)
def test_what_a_look_showed_is_charged_before_an_error_tells_it(tmp_path, fault, monkeypatch):
    data = columns()
    more = {"drop": ["days"]}
    if fault == "the look":  # words of which none is frequent: that they are not is what the look found
        data["outcome"] = np.array([f"word{i}" for i in range(len(data["age"]))])
    elif fault == "the rows behind it":  # nothing but missing values stands out of the noise: no column is left
        data["age"] = data["ward"] = np.full(len(data["age"]), "")
    else:
        monkeypatch.setattr(loop, "engine_of" if fault == "what follows it" else fault, _fail(UserError("no engine")))
    path = write_csv(tmp_path / "patients.csv", data)
    with pytest.raises(UserError, match="charged in") as told:
        fv.fit(path, target="outcome", group="site", epsilon=4, out=tmp_path / "run", **more)
    said = {"the look": "declare them", "the rows behind it": "no column is left", "what follows it": "no engine"}
    assert said.get(fault, "no engine") in str(told.value).lower()
    ledger = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert 0 < ledger.epsilon("server", "example") < 2
    # The folder holds what was spent; a run that leaves it out may not begin there.
    with pytest.raises(UserError, match="choose another --out"):
        monkeypatch.undo()
        fv.fit(write_csv(tmp_path / "patients.csv", columns()), target="outcome", group="site", epsilon=4,
               out=tmp_path / "run", **more)  # fmt: skip


@pytest.mark.parametrize("where", ["look._rough", "look._sharp", "look.encode", "loop.engine_of", "loop.check_noise"])
def test_a_failure_of_any_kind_after_a_look_is_told_as_it_is_once_the_look_is_charged(tmp_path, where, monkeypatch):
    chosen = choose(columns(), target="outcome", epsilon=4, table={"group": "site", "drop": ["days"]})
    monkeypatch.setattr(f"fedveil.federation.{where}", _fail(RuntimeError("peak 117")))
    with pytest.raises(RuntimeError, match="peak 117"):
        loop.run(chosen.config, tmp_path / "run", dataset=chosen.data)
    assert 0 < Ledger.read(tmp_path / "run" / "ledger.jsonl").epsilon("server", "example") < 2


def test_a_failure_after_a_look_that_cannot_be_charged_is_not_told(tmp_path, monkeypatch):
    chosen = choose(columns(), target="outcome", epsilon=4, table={"group": "site", "drop": ["days"]})
    monkeypatch.setattr(loop, "check_noise", _fail(RuntimeError("peak 117")))
    monkeypatch.setattr(loop, "hold_folder", _fail(UserError("locked")))
    with pytest.raises(UserError, match="locked") as told:
        loop.run(chosen.config, tmp_path / "run", dataset=chosen.data)
    assert told.value.__context__ is None and told.value.__cause__ is None


def test_without_a_ledger_nobody_looks(tmp_path, monkeypatch):
    """Whether a look could be used, and what it found, is told by nothing but a run that charges it first."""
    monkeypatch.setattr("fedveil.federation.look.look", lambda *_: pytest.fail("rows were looked at"))
    chosen = choose(columns(), target="outcome", epsilon=4, table={"group": "site", "drop": ["days"]})
    with pytest.raises(UserError, match="only a run can pay for"):
        loop.prepare(chosen.config, chosen.data)


def test_a_finished_run_is_read_without_a_second_look(tmp_path, monkeypatch):
    path = write_csv(tmp_path / "patients.csv", columns())
    chosen = choose(path, target="outcome", epsilon=4, table={"group": "site", "drop": ["days"]}, secure_noise=True, rounds=2)
    toml = tmp_path / "run.toml"
    toml.write_text(fit.as_toml(chosen))
    looks = []
    real = loop.open_table
    monkeypatch.setattr(loop, "open_table", lambda *a, **k: looks.append(k["pays"] and a[0].looked is None) or real(*a, **k))
    assert fv.run(str(toml), out=tmp_path / "run").state_dict()
    assert looks == [True, False]


def reviews(rows=900):
    """Texts whose words tell the answer; few different ones, so that a network reads them quickly."""
    random = np.random.default_rng(0)
    liked = random.random(rows) < 0.5
    good, bad = (random.choice(words, (rows, 2)) for words in (["good", "lovely", "fine"], ["bad", "poor"]))
    words = np.where(liked[:, None], good, bad)
    return {
        "note": np.array([f'"the film was {a}, its end {b}"' for a, b in words]),
        "verdict": np.where(liked, "yes", "no"), "site": random.choice(["A", "B", "C"], rows),
    }  # fmt: skip


@pytest.mark.parametrize("reader", ["words", "minilm"])
def test_a_column_of_texts_trains_with_minilm_or_else_with_words_and_says_which(reader, tmp_path, monkeypatch):
    if reader == "minilm" and not fit.installed("minilm"):
        pytest.skip("the extra backbones is not installed")
    monkeypatch.setattr(fit, "installed", lambda name: reader == "minilm")
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "cache"))
    path = write_csv(tmp_path / "reviews.csv", reviews())
    result = fv.fit(path, target="verdict", text="note", group="site", epsilon=4, out=tmp_path / "run")
    assert result.accuracy > 0.9 and 3.9 < result.epsilon("server") <= 4
    said = {"minilm": "MiniLM, a public network", "words": "pip install '.[backbones]' in fedveil's folder"}[reader]
    assert said in result.facts["choices"]["texts"]
    assert result.facts["found"] == ["target: classes no, yes"]  # nothing is said of the texts


@pytest.mark.parametrize("name", ["id", "ID", "patient_id", "PatientID", "patientid", "record_no", "patient_nbr",
                                  "case number", "MRN", "ssn", "uuid", "e-mail", "last_name", "id_patient", "Unnamed: 0",
                                  "encounter_id"])  # fmt: skip
def test_names_of_identifiers_are_known(name):
    assert is_identifier(name)


@pytest.mark.parametrize("name", ["age", "covid", "humid", "acid", "number_of_visits", "visit_number",
                                  "admission_type_id", "sex",
                                  "body mass index", "product_category_id", "drug_name", "grid",
                                  "valid", "x0", "", "42"])  # fmt: skip
def test_names_of_features_are_not_taken_for_identifiers(name):
    assert not is_identifier(name)


def test_which_columns_are_left_out_does_not_depend_on_the_rows():
    """Names are public; two tables of the same names lose the same columns, whatever the rows hold."""
    data = columns(300)
    one = {**data, "chart": np.arange(300), "user_id": np.arange(300)}
    other = {**data, "chart": np.zeros(300), "user_id": data["age"]}
    drops = [choose(t, target="outcome", epsilon=2, table={"group": "site"}).config.table["drop"] for t in (one, other)]
    assert drops == [["user_id"], ["user_id"]]


def test_a_run_under_free_scaling_is_rebuilt_as_it_was_trained(tmp_path):
    data = columns() | {"age": (columns()["age"] - 60) / 60, "stay": np.ones(1200)}
    path = write_csv(tmp_path / "t.csv", data)
    free = {"target": "outcome", "drop": ["days"], "classes": ["alive", "died"], "scaling": "free", "missing": ["age"]}
    for source, knots in ((data, 8), (path, 1), (data, 0)):
        out = tmp_path / str(knots)
        result = fv.fit(source, epsilon=4, ranges={"stay": [0, 2]}, knots=knots, settings={"rounds": 5}, out=out, **free)
        shape = next(iter(result.state_dict().values())).shape
        again = loop.prepare(fv.open_run(out).config, result.data)
        assert result.accuracy > 0.5 and again.dataset.x.shape[1] == shape[1]
        assert json.loads((out / "table.json").read_text()) == json.loads(json.dumps(again.looked.to_json()))


def test_constants_of_a_run_are_not_made_anew_from_its_table(tmp_path):
    """What was written down is what the model was trained with: nothing, such as knots, is added to it later."""
    path = write_csv(tmp_path / "t.csv", columns())
    result = fv.fit(path, epsilon=4, target="outcome", drop=["days"], knots=6, settings={"rounds": 2}, out=tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "table.json").read_text())
    kept["known"]["scales"] = [scale | {"knots": []} for scale in kept["known"]["scales"]]
    (tmp_path / "run" / "table.json").write_text(json.dumps(kept))
    again = loop.prepare(fv.open_run(tmp_path / "run").config).looked
    assert again is not None and not any(scale.knots for scale in again.known.scales) and result.facts["rounds"] == 2
