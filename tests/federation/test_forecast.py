"""A run says before it starts that its noise will drown the signal, and stays silent where it will not."""

import json
from pathlib import Path

import pytest

from fedveil.federation.config import load_config
from fedveil.federation.forecast import DROWNED, WEAK, forecast, kept, noise_to_signal
from fedveil.federation.loop import prepare
from fedveil.federation.planner import KNOWN, PUBLIC, Shape, plan

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "defaults.jsonl"
SHAPES = {
    **KNOWN, **PUBLIC, "digits": Shape("images", 1437, 64, 10), "location30": Shape("table", 4008, 446, 30),
    "wind": Shape("table", 126_700, 45, 1, task="regression"),
}  # fmt: skip


def test_the_papers_setting_is_told_to_stay_at_chance():
    run = prepare(load_config("fed-cdp", ["dataset=digits"]))
    assert noise_to_signal(run) > DROWNED
    said = forecast(run)
    assert "setting of its paper" in said and "expect about chance accuracy" in said and "fedveil fit digits --epsilon 4" in said


def test_two_classes_are_not_said_to_stay_at_chance():
    """Fed-CDP as printed still tells cancer's two classes apart: no forecast may deny what happens."""
    said = forecast(prepare(load_config("fed-cdp", ["dataset=cancer"])))
    assert "less than this data allows" in said and "chance" not in said


def test_a_layer_on_fixed_features_is_not_said_to_stay_at_chance():
    """`fedveil fit digits --epsilon 1 --observer server` reaches 0.74: less than possible, but no guess."""
    run = prepare(load_config("fed-cdp-sound", ["dataset=digits", "model=logistic"]))
    assert noise_to_signal(run) > DROWNED and "less than this data allows" in forecast(run) and "chance" not in forecast(run)


def test_the_first_runs_are_not_warned_of():
    for name in ("digits-start", "digits-start-server"):
        run = prepare(load_config(name))
        assert noise_to_signal(run) < WEAK and forecast(run) == ""


def test_runs_without_noise_have_no_forecast():
    run = prepare(load_config("non-private", ["dataset=cancer"]))
    assert noise_to_signal(run) is None and forecast(run) == ""


def test_twice_the_noise_is_twice_the_ratio():
    once, twice = (noise_to_signal(prepare(load_config("sum-cdp", ["dataset=cancer", f"sigma={s}"]))) for s in (3, 6))
    assert abs(twice / once - 2) < 1e-6


def cells():
    """(name, noise to signal, classes, share kept) of every measured run; Medical MNIST also with more clients."""
    lines = {line["name"]: line for line in map(json.loads, MEASURED.read_text("utf-8").splitlines())}
    for name, line in lines.items():
        dataset, budget, observer = (*name.split(":"), "")[:3]
        plain = lines.get(f"{dataset}:without")
        if budget != "without" and plain is not None:
            shape = SHAPES[dataset]
            ratio = plan(shape, epsilon=float(budget), clients=line["clients"], observer=observer).noise_to_signal
            yield name, ratio, shape.classes, line["score"] / plain["score"]
    for clients, epsilon, score in ((100, 0.823, 0.94), (100, 4.0, 0.99), (30, 1.0, 0.9775)):
        found = plan(PUBLIC["medical_mnist"], epsilon=epsilon, clients=clients, observer="server")
        yield f"medical {clients} {epsilon}", found.noise_to_signal, 6, score / 0.9992


@pytest.mark.parametrize(("name", "ratio", "classes", "share"), list(cells()), ids=lambda v: v if isinstance(v, str) else "")
def test_no_measured_run_contradicts_its_forecast(name, ratio, classes, share):
    """Silence means that at least 85 % is kept; otherwise what was kept lies within the range that is said."""
    said = kept(ratio, classes)
    assert share >= 0.85 if said is None else said[0] - 0.005 <= share <= said[1] + 0.005
