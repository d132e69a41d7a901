"""Claims follow from the recipe's own parts."""

import math
from dataclasses import replace

import pytest

from fedveil.privacy.accountants import answer
from fedveil.protect import noise
from fedveil.protect.catalogue import catalogue, get
from fedveil.protect.promise import claims, release, unpaid
from fedveil.protect.recipe import spacing, with_changes
from fedveil.protect.setting import Moment, Setting

SETTING = Setting(
    clients=1000, cohort=100, rounds=100, steps=100, batch=5, examples=50_000, layers=3, dimension=21_840
)


def multiplier(recipe, setting, bound, sigma, size):
    """Noise over the joint bound of one contribution, for zero-out neighbours, of the value that the engines draw with."""
    plain = recipe if recipe.grid is not None else with_changes(recipe, {"grid": 0})  # without the cost of rounding
    noised = plain.place.noised(plain, setting, Moment(1, (bound,), (sigma,)), size)[0]
    return noised.multiplier * (2 if noised.relation == "replace-one" else 1)


def moment(bound=4.0, sigma=6.0, steps=100, epsilon=None, arrived=100):
    return Moment(1, (bound,) * steps, (sigma,) * steps, epsilon, arrived)


def pick(found, observer, unit, verdict):
    return [c for c in found if (c.observer, c.unit, c.verdict) == (observer, unit, verdict)]


def epsilon(events, rounds, accountant="pld"):
    return answer([replace(e, steps=e.steps * rounds) for e in events], 1e-5, accountant).epsilon


def test_server_view_uses_the_clients_own_rate_and_no_client_amplification():
    flat = with_changes(get("fed-cdp"), {"clip.kind": "flat"})
    (claim,) = pick(claims(flat, SETTING, moment(), 500), "server", "example", "sound")
    assert claim.event.sampling.rate == 0.01 and claim.event.steps == 100 and claim.scope == "holder"
    # PRIVACY table: sigma=6, B=5, N_i=500, L=100; 10 participations 0.172, 100 participations 0.601.
    assert epsilon([claim.event], 10) == pytest.approx(0.172, abs=0.002)
    assert epsilon([claim.event], 100) == pytest.approx(0.601, abs=0.003)


def test_per_layer_clipping_divides_the_multiplier_by_the_root_of_the_layers():
    assert multiplier(get("fed-cdp"), SETTING, 4, 6, 500) == pytest.approx(6 / math.sqrt(3))
    split = with_changes(get("fed-cdp"), {"clip.split": True})
    assert multiplier(split, SETTING, 4, 6, 500) == pytest.approx(6)


@pytest.mark.parametrize(
    "name", ["fed-cdp", "fed-cdp-sound", "fed-sdp-client", "dp-fedavg", "sum-cdp", "adaclip"]
)
def test_a_coarser_grid_promises_less(name):
    recipe = get(name)
    plain = multiplier(recipe, SETTING, 1, 6, 500)
    grids = [1e-9, 1e-6, 1e-4, 1e-3]
    found = [multiplier(with_changes(recipe, {"grid": g}), SETTING, 1, 6, 500) for g in grids]
    assert plain > found[0] and found == sorted(found, reverse=True)
    layers = math.sqrt(3) if recipe.clip.kind == "layer" else 1.0
    exact = [math.sqrt(36 - (1.5 * g) ** 2) / (layers + g * math.sqrt(SETTING.dimension)) for g in grids]
    assert found == pytest.approx(exact, rel=6e-4)  # the slack of float sums is counted too


def test_the_reason_names_the_grid_and_epsilon_grows_with_it():
    spent = []
    for grid in (0.0, 1e-6, 1e-3):
        recipe = with_changes(get("fed-cdp-sound"), {"grid": grid})
        verdict = "sound" if grid else "nominal"
        (claim,) = pick(claims(recipe, SETTING, moment(1.0), 500), "server", "example", verdict)
        assert ("on a grid" in claim.reason) == (grid > 0)
        spent.append(epsilon([claim.event], 10))
    assert spent[0] < spent[1] < spent[0] * 1.001 < spent[2]


def test_a_grid_under_a_moving_bound_is_counted_at_least_as_coarse_as_it_is():
    recipe = with_changes(get("fed-cdp-sound"), {"grid": 1e-3})
    bounds, sigmas = (4.0, 3.0, 2.0), (6.0, 6.0, 6.0)
    used = spacing(recipe, bounds, sigmas)
    assert used == pytest.approx(2e-3)
    for bound in bounds:
        real = noise.snapped_multiplier(6 * bound, bound, used, SETTING.dimension)
        assert multiplier(recipe, SETTING, bound, 6, 500) <= real * (1 + 1e-12)


@pytest.mark.parametrize(("noise_on", "expected"), [("sum", 3.464), ("example", 7.746), ("mean", 17.32)])
def test_the_three_noises_of_the_papers_have_their_own_multiplier(noise_on, expected):
    recipe = with_changes(get("fed-cdp"), {"noise_on": noise_on, "sampling": "fixed"})
    assert multiplier(recipe, SETTING, 4, 6, 500) == pytest.approx(expected, rel=1e-3)


def test_the_papers_number_is_nominal_and_reproduced():
    (claim,) = pick(claims(get("fed-cdp"), SETTING, moment(), 500), "server", "example", "nominal")
    assert claim.event.sampling.rate == 0.01 and claim.accountant == "moments"
    assert epsilon([claim.event], 100, "moments") == pytest.approx(0.8227, abs=1e-4)


def test_fed_sdp_nominal_is_the_papers_with_one_extra_round():
    (claim,) = pick(claims(get("fed-sdp"), SETTING, moment(steps=1), 500), "server", "client", "nominal")
    assert epsilon([claim.event], 101, "moments") == pytest.approx(0.8536, abs=1e-4)


def test_fed_sdp_at_the_server_promises_nothing_to_the_server():
    found = claims(get("fed-sdp"), SETTING, moment(), 500)
    assert pick(found, "server", "client", "none") and not pick(found, "server", "client", "sound")
    flat = claims(with_changes(get("fed-sdp"), {"clip.kind": "flat"}), SETTING, moment(), 500)
    (public,) = pick(flat, "public", "client", "sound")
    assert public.scope == "everyone" and public.event.sampling.kind == "poisson"
    assert epsilon([public.event], 100) == pytest.approx(0.616, abs=0.003)  # SGM(q=.1, 100 rounds)


def test_fed_sdp_at_the_client_gets_no_amplification():
    flat = with_changes(get("fed-sdp-client"), {"clip.kind": "flat"})
    (server,) = pick(claims(flat, SETTING, moment(), 500), "server", "client", "sound")
    assert server.event.sampling.kind == "none" and server.scope == "holder"
    assert epsilon([server.event], 10) == pytest.approx(2.114, abs=0.01)
    (example,) = pick(claims(flat, SETTING, moment(), 500), "server", "example", "sound")
    assert example.event.noise.multiplier == pytest.approx(server.event.noise.multiplier / 2, rel=1e-3)


def test_partition_batches_are_not_amplified():
    flat = with_changes(get("fed-cdp"), {"clip.kind": "flat", "sampling": "partition"})
    (claim,) = pick(claims(flat, SETTING, moment(), 500), "server", "example", "sound")
    assert claim.event.sampling.kind == "partition" and claim.event.steps == 1
    assert epsilon([claim.event], 10) == pytest.approx(2.11, abs=0.01)


def test_fixed_batches_are_replace_one_with_twice_the_bound():
    flat = with_changes(get("fed-cdp"), {"clip.kind": "flat", "sampling": "fixed"})
    (claim,) = pick(claims(flat, SETTING, moment(), 500), "server", "example", "sound")
    assert claim.event.relation == "replace-one" and claim.event.noise.multiplier == pytest.approx(3, rel=1e-3)
    assert (claim.event.sampling.batch, claim.event.sampling.population) == (5, 500)


@pytest.mark.parametrize("name", ["fed-alpha-cdp", "dp-dyns-l2max", "median-clip"])
def test_noise_that_follows_the_batch_has_no_sound_promise(name):
    found = claims(get(name), SETTING, moment(), 500)
    assert not [c for c in found if c.verdict == "sound"]
    assert pick(found, "server", "example", "none") and pick(found, "server", "example", "nominal")


def test_noise_per_example_is_sound_only_with_a_fixed_batch():
    poisson = with_changes(get("fed-cdp"), {"noise_on": "example"})
    assert pick(claims(poisson, SETTING, moment(), 500), "server", "example", "none")
    fixed = claims(get("fed-cdp-example"), SETTING, moment(), 500)
    assert pick(fixed, "server", "example", "sound")
    (memory,) = pick(fixed, "client-process", "example", "nominal")
    # Replace-one on per-layer clipped gradients: sigma * C / (2 C sqrt(3)).
    assert memory.event.noise.multiplier == pytest.approx(6 / (2 * math.sqrt(3)))
    assert memory.event.sampling.kind == "none"


def test_noise_on_the_sum_leaves_memory_unprotected():
    assert pick(claims(get("fed-cdp"), SETTING, moment(), 500), "client-process", "example", "none")


def test_the_quantile_count_is_paid():
    plain = with_changes(get("fed-cdp"), {"clip.kind": "flat"})
    counted = with_changes(get("quantile-clip"), {"clip.kind": "flat"})
    z, paid = multiplier(plain, SETTING, 4, 6, 500), multiplier(counted, SETTING, 4, 6, 500)
    assert paid == pytest.approx((6**-2 + 10**-2) ** -0.5) and paid < z


def test_example_level_is_never_client_level():
    found = claims(get("fed-cdp-sound"), SETTING, moment(), 500)
    (claim,) = [c for c in found if (c.observer, c.unit) == ("server", "client")]
    assert claim.accountant == "group" and claim.event is None  # the ledger derives it, or says none


def test_ldp_fl_states_the_weight_and_the_client_together():
    found = claims(get("ldp-fl"), SETTING, moment(epsilon=1.0), 500)
    (client,) = pick(found, "server", "client", "sound")
    assert client.event.noise.dimension == SETTING.dimension
    assert pick(found, "server", "reported-weight", "sound")
    assert pick(found, "server", "client", "nominal")


@pytest.mark.parametrize("name", list(catalogue()))
def test_every_recipe_answers_every_observer(name):
    recipe = get(name)
    setting = replace(SETTING, steps=1) if recipe.place.name == "sum" else SETTING
    now = moment(steps=setting.steps, epsilon=recipe.epsilon)
    for observer in ("server", "client-process", "participants", "public"):
        found = [c for c in claims(recipe, setting, now, 500) if c.observer == observer]
        assert found
        assert all((c.event is None) == (c.verdict == "none" or c.accountant == "group") for c in found)
        assert all(c.reason for c in found)


def test_a_release_groups_clients_of_equal_size():
    found = release(get("fed-cdp"), SETTING, moment(), {1: 500, 2: 400, 7: 500})
    assert {clients for clients, _ in found.groups} == {(1, 7), (2,)}


def test_a_client_smaller_than_the_batch_gets_the_noise_of_its_own_size():
    mean = get("fed-cdp-mean")
    assert multiplier(mean, replace(SETTING, batch=50), 4, 6, 3) == pytest.approx(6 * 3 / math.sqrt(3))
    assert multiplier(mean, replace(SETTING, batch=50), 4, 6, 500) == pytest.approx(6 * 50 / math.sqrt(3))


@pytest.mark.parametrize("name", ["sum-cdp", "dp-fedavg", "fed-sdp"])
def test_one_noise_over_shared_examples_promises_nothing_per_example(name):
    recipe = get(name)
    setting = replace(SETTING, copies=4, steps=1)
    found = claims(recipe, setting, moment(steps=1), 500)
    assert not pick(found, "public", "example", "sound") and pick(found, "public", "example", "none")


def test_a_partition_charges_every_pass_that_holds_a_step_of_that_noise():
    recipe = with_changes(get("fed-cdp"), {"clip.kind": "flat", "sampling": "partition"})
    sigmas = tuple(1.0 if 20 <= step < 53 else 6.0 for step in range(100))
    now = Moment(1, (4.0,) * 100, sigmas)
    found = pick(claims(recipe, SETTING, now, 170), "server", "example", "sound")
    uses = {round(c.event.noise.multiplier, 2): c.event.steps for c in found}
    assert uses[1.0] == 2  # 34 steps make a pass: steps 20 to 52 lie in two of them


def test_a_participant_knows_its_own_coin_and_colluders_theirs():
    """Two clients, one drawn each round: whoever was not drawn knows that the other one was."""
    for clients, drawn, colluders, rate in ((2, 1, 1, 1.0), (10, 3, 1, 3 / 9), (10, 3, 7, 1.0)):
        setting = replace(SETTING, clients=clients, cohort=drawn, colluders=colluders)
        recipe = with_changes(get("dp-fedavg"), {"cohort": "fixed"})
        said = claims(recipe, setting, moment(steps=1), 500)
        (public,) = {c.event.sampling for c in said if (c.observer, c.unit, c.verdict) == ("public", "client", "sound")}
        (mine,) = {c.event.sampling for c in said if (c.observer, c.unit, c.verdict) == ("participants", "client", "sound")}
        found = [1.0 if s.kind == "none" else s.batch / s.population if s.kind == "fixed" else s.rate for s in (public, mine)]
        assert found == pytest.approx([drawn / clients, rate])


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_a_secret_cohort_is_counted_at_its_rate(kind):
    recipe = with_changes(get("dp-fedavg"), {"cohort": kind})
    (claim,) = pick(claims(recipe, SETTING, moment(steps=1), 500), "public", "client", "sound")
    assert claim.event.sampling.kind == kind and claim.event.sampling.rate == 0.1


@pytest.mark.parametrize("name", ["fed-cdp-sound", "sum-cdp", "dp-fedavg"])
def test_rounding_of_the_sums_is_in_the_bound(name):
    recipe = get(name)
    (noised, *_) = recipe.place.noised(recipe, SETTING, moment(steps=1), 500)
    joint = recipe.clip.joint(4.0, SETTING.layers) * (2 if noised.relation == "replace-one" else 1)
    assert joint < noised.bound < 1.01 * joint


def test_what_was_computed_from_private_rows_without_noise_is_charged_to_every_client():
    assert unpaid(3, ()) is None
    entry = unpaid(3, ["private: a scaler fitted on the rows"])
    ((members, ended),) = entry.groups
    assert members == (0, 1, 2) and {claim.verdict for claim in ended} == {"none"}
    assert all("a scaler fitted" in claim.reason for claim in ended)
