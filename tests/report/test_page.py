"""The report: what it says, what it leaves out, and that nothing in a run's files can harm a reader."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup
from torch import nn

import fedveil as fv
from fedveil.errors import UserError
from fedveil.federation.config import load_config
from fedveil.federation.loop import run as simulate
from fedveil.report import plots, view, words
from fedveil.report.attacks import attack_card
from fedveil.report.facts import gather, main_row, roc_of
from fedveil.report.page import write_report
from fedveil.report.plots import short
from fedveil.report.view import tiles

PICTURE = bytes.fromhex(  # a PNG of one grey pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c63680000008200817 7cd72b60000000049454e44ae426082".replace(" ", "")
)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound run, a nominal one and one on a user's own file; shared by the tests, which copy before they change."""
    root = tmp_path_factory.mktemp("runs")
    small = ["rounds=4", "local_steps=2", "clients=4", "report=false"]
    simulate(load_config("fed-cdp", small), root / "sound", command="fedveil run fed-cdp")
    simulate(load_config("fed-alpha-cdp", small), root / "nominal")
    rng = np.random.default_rng(0)
    x = rng.random((120, 6), dtype=np.float32)
    np.savez(root / "own.npz", x=x, y=(x.sum(1) > 3).astype(np.int64))
    simulate(load_config("fed-cdp", [*small, f'dataset="{root / "own.npz"}"']), root / "own")
    return {name: root / name for name in ("sound", "nominal", "own")}


def page(folders: list[Path], tmp_path: Path, private: bool = False) -> str:
    write_report(folders, tmp_path / "page.html", private)
    return (tmp_path / "page.html").read_text("utf-8")


def copy(folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    shutil.copytree(folder, target)
    return target


def test_a_public_backbone_is_named_beside_what_is_promised(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "kept"))
    rng = np.random.default_rng(0)
    x, y = rng.random((24, 4), np.float32), np.arange(24) % 2
    net = fv.backbone(nn.Linear(4, 3), name="tiny", licence="MIT", origin="made <here>")
    data = net.apply(fv.dataset(x, y, x, y, classes=2))
    fv.run("fed-cdp-sound", data=data, rounds=1, clients=2, partition="iid", report=False, out=tmp_path / "run")
    shown = text_of(page([tmp_path / "run"], tmp_path))
    promised = shown[shown.index("What is promised to whom") : shown.index("What attacks got")]
    assert f"Not covered by any ε: public backbone tiny: made <here>; licence MIT; sha256 {net.digest[:16]};" in promised
    assert "with public pre-training" in promised


def text_of(html: str) -> str:
    bare = re.sub(r"<(style|script)>.*?</\1>", "", html, flags=re.S)
    return re.sub(r"\s+", " ", Markup(bare).striptags())


class Links(HTMLParser):
    """Collects everything a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("src", "href", "srcset", "action", "style") or name.startswith("on"):
                self.found.append((tag, name, value or ""))


def test_a_report_answers_its_questions_in_order(made: dict[str, Path], tmp_path: Path) -> None:
    text = text_of(page([made["sound"]], tmp_path))
    wanted = ["What was trained", "How good is it", "What is promised to whom", "What attacks got", "What it cost",
              "How to reproduce it"]  # fmt: skip
    places = [text.index(title) for title in wanted]
    assert places == sorted(places)
    assert "Not attacked yet: run fedveil attack" in text
    assert "fedveil run fed-cdp" in text and "Seed 0" in text


def test_a_report_loads_nothing_and_runs_only_its_own_script(made: dict[str, Path], tmp_path: Path) -> None:
    html = page([made["sound"], made["nominal"]], tmp_path)
    parser = Links()
    parser.feed(html)
    assert all(value.startswith("#") for _, name, value in parser.found if name == "href")
    assert not [item for item in parser.found if item[1] != "href"]
    assert "default-src &#39;none&#39;" in html and html.count("<script>") == 1


def test_markup_in_names_is_inert(made: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(made["sound"], tmp_path)
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'"
    facts = json.loads((folder / "run.json").read_text())
    facts["config"] |= {"name": evil, "tuning": evil}
    facts |= {"command": evil, "notes": [evil], "versions": {evil: evil}}
    (folder / "run.json").write_text(json.dumps(facts))
    html = page([folder, made["nominal"]], tmp_path)
    assert html.count("<script>") == 1 and "<img" not in html
    assert "&lt;/script&gt;" in html


def test_the_promise_is_recomputed_and_equals_the_result(made: dict[str, Path]) -> None:
    facts = gather(made["sound"], compute=False)
    stored = json.loads((made["sound"] / "result.json").read_text())["ledger"]
    assert [(r["observer"], r["unit"], r["verdict"]) for r in facts.promise.rows] == [
        (r["observer"], r["unit"], r["verdict"]) for r in stored
    ]
    ends = {name: ys[-1] for (name, _), (_, ys) in facts.promise.course.items()}
    main = facts.main()
    assert main is not None and main["verdict"] == "sound"
    assert ends["pld"] == pytest.approx(main["epsilon"], rel=1e-6)
    assert ends["pld"] < ends["rdp"] < ends["moments"]  # each is a looser bound of the same steps


def test_every_client_has_spent_at_most_the_row(made: dict[str, Path]) -> None:
    facts = gather(made["sound"], compute=False, clients=True)
    main = facts.main()
    assert main is not None
    spent = [c["epsilon"] for c in facts.promise.clients]
    assert len(spent) == 4 and max(spent) == pytest.approx(main["epsilon"], rel=1e-6)


def test_nothing_is_green_in_a_run_without_a_sound_promise(made: dict[str, Path], tmp_path: Path) -> None:
    html = page([made["nominal"]], tmp_path)
    body = html[html.index("<body>") :]
    key = re.search(r'<div class="key">.*?</div>', body, re.S)  # the legend that explains the three verdicts
    assert key is not None
    body = body.replace(key.group(), "")
    assert not re.search(r'class="[^"]*\bsound\b', body)
    assert "Nothing is guaranteed towards the server" in text_of(html)


def test_seeded_runs_say_that_noise_must_be_secret(made: dict[str, Path], tmp_path: Path) -> None:
    html = page([made["sound"]], tmp_path)
    assert "holds when deployed with secret noise" in text_of(html)
    body = html[html.index("<body>") :].replace(
        re.search(r'<div class="key">.*?</div>', html, re.S).group(), ""
    )  # type: ignore[union-attr]
    assert all("pending" in kind for kind in re.findall(r'class="badge (sound[^"]*)"', body))


def test_without_a_readable_ledger_nothing_is_promised(made: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(made["sound"], tmp_path)
    path = folder / "ledger.jsonl"
    path.write_text(path.read_text().replace('"round":2', '"round":3'))
    text = text_of(page([folder], tmp_path))
    assert "No promise can be checked" in text and "ε ≤" not in text
    path.unlink()
    assert "there is no ledger" in text_of(page([folder], tmp_path))


def test_private_figures_appear_only_when_asked_for(made: dict[str, Path], tmp_path: Path) -> None:
    shared, secret = page([made["sound"]], tmp_path), page([made["sound"]], tmp_path, private=True)
    assert "Loss of each client" not in shared and "Noise compared with" not in shared
    assert "Loss of each client" in secret and "Noise compared with" in secret
    assert "Private, do not share" in secret and "PRIVATE" in secret
    lines = [json.loads(line) for line in (made["sound"] / "private.jsonl").read_text().splitlines()]
    values = [v for line in lines for v in line["client_loss"].values()]
    assert values and not any(plots.short(v, 4) in shared for v in values)


def attack(folder: Path) -> None:
    (folder / "attacks").mkdir()
    save = {
        "gradient": {"kind": "gradient", "success_rate": 0.4321, "label_accuracy": 1.0, "rmse": 0.1, "victims": 6},
        "membership": {"kind": "membership", "method": "rmia", "auc": 0.61, "roc": [[0, 0], [0.5, 0.6], [1, 1]],
                       "methods": {"rmia": {"auc": 0.61, "auc_interval": [0.58, 0.64]}, "lira": {"auc": 0.55}}},
        "audit": {"kind": "audit", "epsilon_lower": 0.31, "epsilon_promised": 1.2, "ceiling": 5.8,
                  "verdict": "promise holds", "status": "sound"},
    }  # fmt: skip
    for kind, figures in save.items():
        (folder / "attacks" / f"{kind}.json").write_text(json.dumps(figures))
    (folder / "attacks" / "gradient.png").write_bytes(PICTURE)


def test_attacks_on_public_benchmarks_are_shown_with_gallery_roc_and_audit(
    made: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy(made["sound"], tmp_path)
    attack(folder)
    html = page([folder], tmp_path)
    assert "43.2%" in html and "data:image/png;base64," in html
    assert "ROC" in html and "rmia (AUC 0.610)" in html and "0.61 (0.58 to 0.64)" in html
    assert "shown by the audit: at least 0.31" in html and "promised: at most 1.2" in html


def test_attacks_from_several_seats_stand_side_by_side_each_with_its_own_picture(
    made: dict[str, Path], tmp_path: Path
) -> None:
    from fedveil.attacks.leakage.measure import mark_of

    folder = copy(made["sound"], tmp_path)
    attack(folder)
    rates = (("type2", 0.975), ("type0", 0.025))
    jobs = [{"kind": "gradient", "job": tap, "tap": tap, "success_rate": rate} for tap, rate in rates]
    (folder / "attacks" / "gradient.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    (folder / "attacks" / "pictures").mkdir()
    (folder / "attacks" / "pictures" / f"{mark_of('type2')}.png").write_bytes(PICTURE)
    html = page([folder], tmp_path)
    assert "97.5%" in html and "2.5%" in html
    assert html.count("data:image/png;base64,") == 1  # the picture of one seat never stands for another


def test_a_model_that_learned_nothing_looks_like_it(made: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(made["sound"], tmp_path)
    result = json.loads((folder / "result.json").read_text())
    for learned, kind in ((False, "none"), (True, "")):
        (folder / "result.json").write_text(json.dumps({**result, "learned": learned, "judgement": "as good as a guess"}))
        first = tiles(gather(folder))[0]
        assert first["kind"] == kind and "as good as a guess" in first["text"]


def test_attacks_on_own_data_are_left_out_unless_asked_for(made: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(made["own"], tmp_path)
    attack(folder)
    html = page([folder], tmp_path)
    assert "43.2%" not in html and "data:image" not in html and "ROC:" not in html
    assert "shown by the audit" in html  # canaries are planted, not somebody's records
    html = page([folder], tmp_path, private=True)
    assert "43.2%" in html and "data:image/png;base64," in html
    for path in (folder / "attacks").glob("audit*"):
        path.unlink()
    said = tiles(gather(folder))[2]
    assert said["value"].endswith("attacks") and "private report alone" in said["text"] and "%" not in said["text"]


def test_the_card_about_attacks_says_what_each_seat_got(made: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(made["sound"], tmp_path)
    (folder / "attacks").mkdir()
    job = {"kind": "gradient", "tap": "type0", "success_rate": 0.0, "victims": 4, "images": True}
    (folder / "attacks" / "gradient.json").write_text(json.dumps(job))
    assert tiles(gather(folder))[2] == {
        "title": "Attacks", "kind": "", "value": "1 seat tried", "text": "the server: 0% of 4 images rebuilt",
    }  # fmt: skip
    (folder / "attacks" / "gradient.json").write_text(json.dumps({**job, "success_rate": [], "controls": {"black": 3}}))
    assert tiles(gather(folder))[2]["value"]  # what somebody else has written breaks nothing


def test_broken_attack_files_are_said_to_be_broken(made: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(made["sound"], tmp_path)
    (folder / "attacks").mkdir()
    (folder / "attacks" / "gradient.json").write_text('{"kind": ')
    (folder / "attacks" / "decoder.json").write_text(
        '[1, "x", {"kind": "decoder", "mse": NaN, "controls": 3}]'
    )
    (folder / "attacks" / "attribute.json").write_text(
        '{"kind": "attribute", "not_done": "no attribute <b>here</b>"}'
    )
    html = page([folder], tmp_path)
    assert "result file is damaged" in html and "no attribute &lt;b&gt;here" in html


def test_a_confusion_matrix_agrees_with_the_accuracy(made: dict[str, Path]) -> None:
    facts = gather(made["sound"])
    assert facts.confusion is not None
    matrix = np.array(facts.confusion)
    assert matrix.trace() / matrix.sum() == pytest.approx(facts.last("test_accuracy"))


def test_an_unfinished_run_has_a_report(made: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(made["sound"], tmp_path)
    (folder / "result.json").unlink()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"round": 5, "test_acc')  # torn while writing
    text = text_of(page([folder], tmp_path))
    assert "unfinished" in text and "4 of 4 rounds" in text


def test_a_run_that_wrote_no_round_has_a_report(made: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(made["sound"], tmp_path)
    for name in ("result.json", "metrics.jsonl", "private.jsonl", "model.safetensors"):
        (folder / name).unlink()
    records = (folder / "ledger.jsonl").read_text().splitlines(True)
    (folder / "ledger.jsonl").write_text(records[0])
    assert "No round has been evaluated yet" in page([folder], tmp_path)


def test_a_run_that_ended_before_its_first_round_is_not_said_to_have_learned_nothing(tmp_path: Path) -> None:
    few = ["dataset=cancer", "clients=4", "rounds=2", "target_epsilon=0.001", "report=false"]
    simulate(load_config("fed-cdp-sound", few), tmp_path / "run")
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    accused = "NOT better than guessing: this model learned nothing. Try more data"  # as runs of earlier versions say
    for result in (told, {**told, "learned": False, "judgement": accused}):
        (tmp_path / "run" / "result.json").write_text(json.dumps(result))
        text = text_of(page([tmp_path / "run"], tmp_path))
        assert "no round was played" in text and "learned nothing" not in text


def test_several_runs_stand_in_one_plane_and_unlike_ones_are_not_ranked(
    made: dict[str, Path], tmp_path: Path
) -> None:
    html = page([made["sound"], made["nominal"]], tmp_path)
    assert html.count('class="run sound"') >= 1 and html.count('class="run none"') >= 1
    assert "cannot be ranked" not in html
    assert "cannot be ranked" in page([made["sound"], made["own"]], tmp_path)


def test_a_long_run_with_a_large_gallery_stays_small(made: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(made["sound"], tmp_path)
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    with open(folder / "metrics.jsonl", "w") as file:
        for number in range(1, 5_001):
            file.write(json.dumps({**line, "round": number, "test_accuracy": math.sin(number) ** 2}) + "\n")
    from PIL import Image

    (folder / "attacks").mkdir()
    (folder / "attacks" / "gradient.json").write_text('{"kind": "gradient", "success_rate": 0.5}')
    noise = np.random.default_rng(0).integers(0, 255, (1100, 900, 3), np.uint8)
    Image.fromarray(noise).save(folder / "attacks" / "gradient.png")
    html = page([folder], tmp_path)
    assert len(html.encode()) < 5_000_000
    assert "data:image/png;base64," in html


def test_what_is_no_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        write_report([tmp_path / "nowhere"], tmp_path / "page.html")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        write_report([tmp_path], tmp_path / "page.html")


def test_the_main_row_prefers_what_holds() -> None:
    rows = [
        {"observer": "server", "unit": "example", "verdict": "nominal", "epsilon": 0.1},
        {"observer": "server", "unit": "example", "verdict": "sound", "epsilon": 2.0},
        {"observer": "server", "unit": "client", "verdict": "none", "epsilon": None},
        {"observer": "public", "unit": "example", "verdict": "sound", "epsilon": 1.0},
    ]
    assert main_row(rows, "server", "example") == rows[1]
    assert main_row(rows, "server", "client") == rows[2]
    assert main_row(rows, "participants", "example") is None


@given(st.floats(0, 50), st.floats(0, 0.1))
def test_the_guessing_rate_is_the_best_test_against_epsilon_delta(epsilon: float, delta: float) -> None:
    """Independent oracle: among tests with TPR <= e^eps FPR + delta and the same for the complement, the best
    balanced accuracy lies where both lines meet."""
    grown = math.exp(epsilon)
    fpr = (1 - delta) / (1 + grown)
    tpr = grown * fpr + delta
    assert words.guess_rate(epsilon, delta) == pytest.approx(min(1.0, (tpr + 1 - fpr) / 2))


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), min_size=1, max_size=30),
    st.booleans(),
    st.text(max_size=20),
)
def test_any_curve_can_be_drawn_and_any_name_is_escaped(
    values: list[float | None], percent: bool, name: str
) -> None:
    drawn = plots.lines(
        [plots.Series(name, [float(i) for i in range(len(values))], values)],
        title=name,
        y_label=name,
        percent=percent,
    )
    if drawn:
        parser = Links()
        parser.feed(str(drawn))
        assert not parser.found
        places = re.findall(r' (?:x|y|x1|x2|y1|y2|cx|cy|points)="([^"]*)"', str(drawn))
        assert places and not any("nan" in p or "inf" in p for p in places)


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_ticks_are_few_and_inside(low: float, width: float) -> None:
    high = low + width
    found = plots.ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high), width)
    assert len(found) <= 12 and all(low - slack <= t <= high + slack for t in found)


def test_roc_is_read_in_either_form_and_refused_otherwise() -> None:
    assert roc_of({"roc": [[0, 0], [0.5, 0.7], [1, 1]]}) == ([0, 0.5, 1], [0, 0.7, 1])
    assert roc_of({"fpr": [0, 1], "tpr": [0, 1]}) == ([0, 1], [0, 1])
    for wrong in ({"roc": "x"}, {"roc": [[0, None], [1, 1]]}, {"roc": {"fpr": [0], "tpr": [0]}}, {}):
        assert roc_of(wrong) is None


def test_a_broken_promise_is_not_drawn_green() -> None:
    card = attack_card(
        {"kind": "audit", "data": {"epsilon_lower": 3.0, "epsilon_promised": 1.0, "status": "sound"}}
    )
    assert 'class="mark none"' in card["chart"] and "mark sound" not in card["chart"]
    card = attack_card(
        {"kind": "audit", "data": {"epsilon_lower": 0.1, "epsilon_promised": 1.0, "status": "nominal"}}
    )
    assert 'class="mark nominal"' in card["chart"]


def test_a_sound_but_useless_epsilon_is_not_reassuring() -> None:
    assert words.strength(8260.0, "sound") == words.HARDLY == words.strength(10.1, "sound")
    assert words.strength(0.5, "sound") == "strong" and words.strength(0.5, "nominal") == ""
    assert "hardly at all" in words.meaning(8260.0, 1e-5, "sound")


def test_expected_noise_errors_stand_in_the_report_and_measured_ones_only_in_a_private_one(
    made: dict[str, Path], tmp_path: Path
) -> None:
    shared, private = page([made["sound"]], tmp_path), page([made["sound"]], tmp_path, private=True)
    assert "expected ℓ1 error of" in shared
    assert "error that a round&#39;s noise" in private or "error that a round's noise" in private
    assert "measured, one client" in private
    assert "measured, one client" not in shared


def test_the_report_names_both_distortion_bounds_for_what_they_bound(made: dict[str, Path]) -> None:
    from fedveil.report.view import steady

    said = " ".join(steady(gather(made["sound"])))
    assert (
        "every change of all parameters shorter than" in said and "change of the input shorter than" in said
    )


def test_the_order_of_extra_rounds_under_staircase_noise_stands_in_the_report_as_nominal(tmp_path: Path) -> None:
    small = ["rounds=2", "local_steps=2", "clients=2", "report=false", "sigma=3"]
    simulate(load_config("udp-fl-staircase", small), tmp_path / "stairs")
    order = json.loads((tmp_path / "stairs" / "metrics.jsonl").read_text().splitlines()[0])["extra_rounds_order"]
    said = text_of(page([tmp_path / "stairs"], tmp_path))
    assert f"of the order of {short(order)} additional rounds (UDP-FL's Theorem 4: nominal" in said


def test_the_rule_of_a_resilient_start_stands_in_a_private_report_only(tmp_path: Path) -> None:
    small = ["dataset=cancer", "rounds=2", "local_steps=2", "clients=2", "report=false", "sigma=linear:5:4.85"]
    simulate(load_config("fed-alpha-cdp-sigma-linear", small), tmp_path / "run")
    private = text_of(page([tmp_path / "run"], tmp_path, private=True))
    assert "the rule asks for σ₀" in private and "it was 5: not met" in private
    assert "resilient start" not in text_of(page([tmp_path / "run"], tmp_path))


def test_rows_of_ones_own_are_not_public_whatever_they_are_called(made: dict[str, Path], tmp_path: Path) -> None:
    """A run that reads a built-in dataset says that attacks on its rows may be shown; what rows are called says nothing."""
    assert gather(made["sound"]).public_data and not gather(made["own"]).public_data
    rng = np.random.default_rng(0)
    x, y = rng.random((60, 4), np.float32), np.arange(60) % 2
    own = fv.dataset(x, y, x[:20], y[:20], name="cancer")
    settings = {"clients": 2, "partition": "iid", "local_steps": 2, "report": False}
    fv.run("fed-cdp", data=own, out=tmp_path / "own", rounds=1, **settings)
    fit = fv.fit(own, epsilon=8, clients=2, out=tmp_path / "fit", settings={"rounds": 1})
    assert not gather(tmp_path / "own").public_data and not gather(tmp_path / "fit").public_data
    assert next(iter(fit.state_dict().values())).shape[1] <= 5  # trained on the rows that were given
    facts = json.loads((tmp_path / "own" / "run.json").read_text())
    del facts["public_data"]  # as older runs are
    (tmp_path / "own" / "run.json").write_text(json.dumps(facts))
    assert not gather(tmp_path / "own").public_data


def test_a_run_on_public_rows_that_is_continued_on_given_ones_is_public_no_more(tmp_path: Path) -> None:
    def stop(facts: object) -> None:
        raise KeyboardInterrupt

    small = ["dataset=cancer", "rounds=2", "local_steps=1", "clients=2", "checkpoint_every=1", "report=false"]
    config = load_config("fed-cdp", small)
    with pytest.raises(KeyboardInterrupt):
        simulate(config, tmp_path / "run", on_round=stop)
    assert gather(tmp_path / "run").public_data
    fv.resume(tmp_path / "run", data=fv.load("cancer"))
    assert not gather(tmp_path / "run").public_data


def test_a_report_says_of_how_many_clients_a_row_speaks_and_only_a_private_one_of_which(tmp_path: Path) -> None:
    small = ["dataset=digits", "rounds=1", "local_steps=2", "clients=4", "report=false", "client_epsilons=[1.0, inf]"]
    simulate(load_config("udp-fl", small), tmp_path / "run")
    shown, private = (text_of(page([tmp_path / "run"], tmp_path, private)) for private in (False, True))
    assert "for 2 clients alone, nothing is counted of 2 clients" in shown and "for clients 0, 2 alone" not in shown
    assert "for clients 0, 2 alone, nothing is counted of clients 1, 3" in private


SEEN = {  # a recipe of each place -> what whoever runs the server sees, and what must not be said
    "non-private": ("every upload as it is, without noise", "sum"),
    "fed-cdp-sound": ("every upload, made of steps that the client has noised", "sum"),
    "fed-sdp-client": ("every upload, noised by its client", "sum"),
    "dp-fedavg": ("every upload, before any noise", "sum"),
    "sum-cdp": ("only the noised sum over all clients", "every upload"),
    "ldp-fl": ("in random order (by an honest shuffler)", "every upload"),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_the_server_sees_is_said_by_the_place_of_the_noise(name: str, tmp_path: Path) -> None:
    steps = ["local_steps=1"] if name == "sum-cdp" else []
    chosen = load_config(name, ["rounds=1", "clients=4", "dataset=cancer", "report=false", *steps])
    simulate(chosen, tmp_path / "run")
    facts = gather(tmp_path / "run")
    said, wrong = SEEN[name]
    row = next(line for line in view.promise_table(facts)["lines"] if line["observer"] == "server")
    for text in (row["who"], tiles(facts)[1]["text"], view.sentence(facts)):
        assert said in text and wrong not in text, text


def test_a_sum_under_masks_is_all_that_the_server_sees() -> None:
    for name in ("sum-cdp", "dp-fedavg"):
        recipe = fv.recipe(name)
        assert "only the noised sum" in words.who_looks(recipe, True)["server"]
        assert "masked" in words.upload_at_server(recipe, True)
