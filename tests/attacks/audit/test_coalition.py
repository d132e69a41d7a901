"""A server with colluding nodes against a sum under masks: what it is left with has the promised noise, and less is found."""

import numpy as np
import pytest

from fedveil.attacks import campaign
from fedveil.attacks.audit import canaries, lowbits
from fedveil.attacks.audit.coalition import audit_coalition, coalition_scores, worst_case
from fedveil.errors import UserError
from fedveil.federation.config import make_config
from fedveil.federation.loop import prepare
from fedveil.federation.loop import run as simulate

THRESHOLD, COLLUDERS, CLIENTS = 5, 2, 7


def config_of(sigma=1.0, **changes):
    values = {
        "dataset": "digits", "recipe": "sum-cdp", "model": "logistic", "clients": CLIENTS, "partition": "iid", "rounds": 2,
        "local_steps": 1, "batch_size": 1000, "secure_sum": True, "sum_threshold": THRESHOLD, "sum_colluders": COLLUDERS,
        "protect": {"sigma": sigma}, "report": False,
    }  # fmt: skip
    return make_config({**values, **changes})


def test_a_coalition_is_left_with_the_noise_of_the_honest_survivors():
    """Mean and deviation of 300 scores within 4 of their standard errors: a false alarm in 1 of 8,000 seeds."""
    prepared = prepare(config_of())
    parts = worst_case(prepared, 3)
    assert len(parts.honest) == THRESHOLD - COLLUDERS and len(parts.colluders) == COLLUDERS
    assert not set(parts.honest) & set(parts.colluders)
    staged = canaries.stage(prepared, 300, 3, rounds=2, among=parts.honest)
    assert set(staged.host.tolist()) <= set(parts.honest)
    scores, cut = coalition_scores(staged, prepared, parts, 2)
    both = np.concatenate([scores.included - 2 * cut, scores.excluded])
    assert both.std() == pytest.approx(1.0, abs=4 / np.sqrt(2 * len(both)))
    assert scores.included.mean() == pytest.approx(2 * cut, abs=4 / np.sqrt(len(scores.included)))


def test_shares_that_are_too_small_are_found_and_right_ones_are_not_accused():
    """Two kinds of mistake: half the noise, and shares that count on all nodes to survive (sigma^2 / n instead of / h).

    A correct run is accused with at most 0.1%."""
    right = config_of(0.7)
    ledger = canaries.as_planned(prepare(right), 2)
    settings = {"canaries": 600, "seed": 1, "significance": 0.001}
    assert audit_coalition(right, ledger, **settings)[0].verdict != "promise broken"
    for share in (0.5, np.sqrt((THRESHOLD - COLLUDERS) / CLIENTS)):
        wrong = config_of(0.7 * float(share))
        assert audit_coalition(right, ledger, practice=wrong, **settings)[0].verdict == "promise broken", (
            share
        )


def test_a_run_with_a_secure_sum_is_audited_as_the_server_with_its_colluders(tmp_path):
    simulate(config_of(), tmp_path / "run")
    figures, code = campaign.audit_run(tmp_path / "run", canaries_count=60)
    assert (
        code == 0 and figures["observer"] == "server" and len(figures["coalition"]["colluders"]) == COLLUDERS
    )
    assert "integers" in figures["low_bits"]["reason"]


def test_without_masks_there_is_no_coalition_to_audit():
    with pytest.raises(UserError, match="not under masks"):
        worst_case(prepare(config_of(secure_sum=False)), 0)
    assert "integers" in lowbits.why_not(prepare(config_of()))
