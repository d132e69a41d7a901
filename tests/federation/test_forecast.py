"""A run says before it starts that its noise will drown the signal, and stays silent where it will not."""

from fedveil.federation.config import load_config
from fedveil.federation.forecast import DROWNED, WEAK, forecast, noise_to_signal
from fedveil.federation.loop import prepare


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
