"""Tables share an attack only where the attacker would see the very same tensors."""

import numpy as np
import pytest
import torch

from fedveil.attacks import campaign
from fedveil.attacks.leakage import measure
from fedveil.federation.loop import prepare
from fedveil.federation.round import moment_of, plan_of
from fedveil.studies.build import EXAMPLE, attack, exposed

PAIRS = [
    *[(recipe, "type2", {}) for recipe in ("fed-sdp", "fed-sdp-client", "dssgd")],
    *[(recipe, "type2", {}) for recipe in ("quantile-clip", "fed-alpha-cdp", "fed-alpha-cdp-sigma")],
    ("quantile-clip", "type2", EXAMPLE),
    *[(recipe, "type1", {}) for recipe in ("non-private", "fed-sdp", "fed-sdp-client")],
    *[(recipe, "type1", {}) for recipe in ("quantile-clip", "adaclip", "fed-alpha-cdp-sigma", "fed-cdp")],
]


def prepared_for(recipe, tap, change):
    config = campaign.gradient_config(
        recipe, "digits", "cpl-lenet", victims=4, seed=3, tap=tap, batch=1, changes=change
    )
    return prepare(config)


@pytest.mark.parametrize(("recipe", "tap", "change"), PAIRS)
def test_a_shared_job_sees_the_same_tensors(recipe, tap, change):
    same, same_tap = exposed(recipe, tap, change)
    assert (same, same_tap) != (recipe, tap)
    (a, shown), (b, shown_too) = (
        (found.leak, found.images)
        for r, t in ((recipe, tap), (same, same_tap))
        for p in [prepared_for(r, t, change)]
        for found in [measure.victims_of(p, campaign.initial(p), t, 4, 3)]
    )
    assert torch.equal(a.values, b.values) and np.array_equal(shown, shown_too)
    assert (a.clip, a.bound, a.clip_on, a.noise, a.pruned) == (b.clip, b.bound, b.clip_on, b.noise, b.pruned)


@pytest.mark.parametrize(
    ("central", "federated", "change"),
    [("dp-baseline", "fed-cdp", {}), ("dp-dyn-s-sigma", "fed-cdp", {}), ("dp-baseline", "fed-cdp", EXAMPLE),
     ("dp-dyn-s-sigma", "fed-alpha-cdp-sigma", EXAMPLE)],
)  # fmt: skip
def test_central_recipes_treat_an_example_like_their_federated_twins(central, federated, change):
    assert exposed(central, "type2", change) == (federated, "type2")
    plans = []
    for recipe in (central, federated):
        prepared = prepared_for(recipe, "type2", change)
        now = moment_of(prepared.task, campaign.initial(prepared))
        plan = plan_of(prepared.task, now, 0, 100)
        noise = (plan.noised[0], plan.sensitivity) if change else ()
        plans.append((plan.clip, plan.clip_norm, plan.bounds[0], plan.bound_rule, noise))
    assert plans[0] == plans[1]


def test_what_differs_is_not_shared():
    assert exposed("fed-cdp-decay", "type2", {}) == ("fed-cdp-decay", "type2")  # its first bound is 6
    assert exposed("fed-sdp", "type0", {}) == ("fed-sdp", "type0")
    assert exposed("fed-alpha-cdp-sigma", "type2", EXAMPLE) != exposed("fed-cdp", "type2", EXAMPLE)
    assert exposed("quantile-clip", "type2", {"prune": 0.3}) == ("quantile-clip", "type2")


def test_rows_with_the_same_exposure_are_one_job():
    assert attack("fed-sdp", "mnist") == attack("non-private", "mnist") == attack("fed-sdp-client", "mnist")
    assert attack("dp-baseline", "lfw", change=EXAMPLE) == attack("quantile-clip", "lfw", change=EXAMPLE)
