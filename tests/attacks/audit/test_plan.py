"""Power is stated before an audit, and the audit keeps it; the last model is audited."""

import numpy as np
import pytest

from fedveil.attacks import campaign
from fedveil.attacks.audit import canaries, plan
from fedveil.attacks.audit.bounds import Scores, gaussian_delta, gaussian_epsilon, judge
from fedveil.attacks.audit.final import audit_final
from fedveil.federation.config import make_config
from fedveil.federation.loop import run as simulate
from fedveil.privacy.ledger import Ledger


def curve_of(mu):
    return lambda epsilon: gaussian_delta(epsilon, mu)


@pytest.mark.parametrize("signal", [0.5, 1.0, 3.0])
def test_a_planned_audit_finds_half_the_noise_and_leaves_correct_runs_alone(signal):
    """99% is stated: of 60 broken runs more than 4 escape with probability 0.04%; of 60 correct ones, accused with at most 5%
    each, more than 9 with probability 0.1%."""
    promised = gaussian_epsilon(signal, 1e-5)
    needed = plan.plan(signal, promised, 1, curve=curve_of(signal))
    assert needed.canaries is not None and needed.power >= 0.97
    rng = np.random.default_rng(0)
    half = needed.canaries // 2

    def accused(factor):
        scores = Scores(signal + rng.normal(size=half) / factor, rng.normal(size=half) / factor)
        found = judge(
            scores,
            epsilon_promised=promised,
            delta=1e-5,
            threshold=signal / 2,
            curve=curve_of(signal),
            independent=True,
        )
        return found.verdict == "promise broken"

    assert sum(accused(2.0) for _ in range(60)) >= 56
    assert sum(accused(1.0) for _ in range(60)) <= 9


def test_a_weaker_signal_needs_more_canaries_and_a_hopeless_one_says_so():
    needed = [plan.plan(s, gaussian_epsilon(s, 1e-5), 1, curve=curve_of(s)).canaries for s in (2.0, 0.5, 0.2)]
    assert needed[0] < needed[1] < needed[2]
    hopeless = plan.plan(0.001, gaussian_epsilon(0.001, 1e-9) or 0.01, 1)
    assert hopeless.canaries is None and "more rounds" in hopeless.sentence


def test_sampling_spreads_included_canaries_and_so_costs_more_of_them_and_a_wrong_rate_is_planned_too():
    promised = gaussian_epsilon(1.0, 1e-5)
    settings = {"curve": curve_of(1.0), "significance": 0.001}
    plain, spread = (plan.plan(1.0, promised, 1, spread=s, **settings).canaries for s in (0.0, 0.4))
    assert plain < spread
    wrong_rate = plan.plan(1.0, promised, 1, of="contribution", **settings)
    assert (
        wrong_rate.canaries is not None and "contribution" in wrong_rate.sentence and wrong_rate.power >= 0.97
    )


def config_of(sigma=1.0, **changes):
    values = {
        "dataset": "digits", "recipe": "fed-cdp-sound", "clients": 4, "partition": "iid", "rounds": 3, "local_steps": 1,
        "batch_size": 1000, "model": "papers-mlp", "protect": {"sigma": sigma}, "report": False,
    }  # fmt: skip
    return make_config({**values, **changes})


def test_the_signal_of_a_run_is_known_in_advance():
    """One look at sigma 4, all rows, 16 rounds: 1 / 4 * sqrt(16)."""
    assert canaries.planned_score(config_of(4.0, rounds=16), 16).signal == pytest.approx(1.0, rel=0.02)


def test_a_plan_says_how_many_canaries_have_room_and_how_many_rounds_are_enough(tmp_path):
    simulate(config_of(2.0, rounds=16), tmp_path / "run")
    found = campaign.plan_audit(tmp_path / "run", canaries_count=500)
    assert found["room"] == sum(n // 2 for n in (359, 359, 359, 360)) and found["canaries_at_hand"] == 500
    assert (
        found["rounds_enough"] in (4, 8, 16)
        and f"{found['rounds_enough']} rounds are enough" in found["sentence"]
    )


def test_the_final_model_alone_betrays_too_little_noise_and_a_correct_run_is_not_accused(tmp_path):
    """Four clients' noises average: half the signal of an upload. A tenth of the noise leaves 5 sqrt(3) deviations."""
    simulate(config_of(), tmp_path / "run")
    ledger = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    right = audit_final(config_of(), ledger, canaries=400)
    wrong = audit_final(config_of(), ledger, canaries=400, practice=config_of(0.1))
    assert right.verdict != "promise broken" and wrong.verdict == "promise broken"


def accusations(count, level, seed=0):
    found = []
    for number in range(count):
        config = config_of(1.0, rounds=1, seed=seed + number)
        found.append(canaries.audit(config, canaries=200, seed=seed + number, significance=level)[0].verdict)
    return found.count("promise broken")


def test_correct_runs_are_hardly_ever_accused_at_a_strict_level():
    """20 correct runs at level 0.1%: more than 1 accusation has probability 0.02%."""
    assert accusations(20, 0.001) <= 1


@pytest.mark.slow
def test_at_most_3_of_300_correct_runs_are_accused_at_level_one_in_a_thousand():
    """More than 3 have probability 0.03% if the level is kept."""
    assert accusations(300, 0.001, seed=1000) <= 3
