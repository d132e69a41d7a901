"""The catalogue is complete, and parts that cannot work together are refused with a reason."""

import pytest

from fedveil.errors import UserError
from fedveil.privacy.schedules import parse
from fedveil.protect.catalogue import catalogue, get
from fedveil.protect.describe import describe_all
from fedveil.protect.recipe import Recipe, as_text, spacing, with_changes

PAPERS = {
    "non-private",
    "fed-sdp",
    "fed-sdp-client",
    "fed-cdp",
    "fed-cdp-decay",
    "fed-alpha-cdp",
    "fed-alpha-cdp-sigma-linear",
    "fed-alpha-cdp-sigma-staircase",
    "fed-alpha-cdp-sigma-exponential",
    "fed-alpha-cdp-sigma-cyclic",
    "dp-baseline",
    "dp-dyns-c-decay",
    "dp-dyns-l2max",
    "dp-dyns",
    "dp-dynsigma",
    "dp-dyn-s-c-decay-sigma",
    "dp-dyn-s-l2max-sigma",
    "dp-dyn-s-sigma",
    "quantile-clip",
    "adaclip",
    "random-noise",
    "gradient-pruning",
    "dssgd",
    "ldp-fl",
    "udp-fl-gaussian",
    "udp-fl-laplace",
    "udp-fl-staircase",
    "nbafl",
    "dp-fedavg",
}


def test_every_system_of_the_papers_is_in_the_catalogue():
    assert set(catalogue()) >= PAPERS


def test_papers_defaults():
    recipe = get("fed-cdp")
    assert recipe.clip.bound.value(0, 100) == 4 and recipe.sigma.value(0, 100) == 6
    assert recipe.clip.kind == "layer" and recipe.noise_on.name == "sum"
    decay = get("fed-cdp-decay").clip.bound
    assert decay.value(0, 100) == pytest.approx(6) and decay.value(99, 100) == pytest.approx(2, abs=0.05)
    sigma = get("fed-alpha-cdp-sigma").sigma
    assert sigma.value(0, 100) == pytest.approx(15) and sigma.value(99, 100) == pytest.approx(4.85, abs=0.12)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"where": "nowhere"}, "place"),
        ({"clip.kind": "none"}, "clip"),
        ({"clip.norm": "l1"}, "L2"),
        ({"target": "update"}, "gradient"),
        ({"where": "server"}, "update"),
        ({"clip.rule": "adaclip"}, "flat"),
        ({"prune": 1.5}, "prune"),
        ({"channel": "shuffle-parameters"}, "two-valued"),
        ({"sigmo": 3}, "Did you mean 'sigma'"),
        ({"clip.bond": 3}, "Did you mean 'bound'"),
        ({"noise_on": "summ"}, "sum"),
        ({"sigma": "liner:3:2"}, "liner"),
        ({"where": "client"}, "update"),
        ({"noise_on": "example", "mechanism": "laplace", "clip.norm": "l1", "clip.kind": "flat"}, "Gaussian"),
        ({"noise_on": "mean", "mechanism": "staircase", "clip.kind": "flat"}, "scaled"),
        ({"clip.split": True, "mechanism": "laplace", "clip.norm": "l1"}, "split"),
        ({"clip.rule": "quantile", "mechanism": "laplace", "clip.norm": "l1"}, "Gaussian"),
    ],
)
def test_impossible_combinations_are_refused_with_a_reason(changes, word):
    with pytest.raises(UserError, match=word):
        with_changes(get("fed-cdp"), changes)


def test_a_range_from_the_clients_own_weights_is_refused_with_the_reason():
    with pytest.raises(UserError, match="own weights"):
        with_changes(get("ldp-fl"), {"ranges": "client"})


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UserError, match="fed-cdp"):
        get("fed-cdpp")


def test_changes_leave_the_catalogue_alone():
    changed = with_changes(get("fed-cdp"), {"sigma": 2, "clip.bound": "linear:4:2"})
    assert changed.sigma.value(0, 10) == 2 and get("fed-cdp").sigma.value(0, 10) == 6
    assert isinstance(changed, Recipe)


def test_descriptions_carry_a_verdict_for_each_observer():
    rows = {row["name"]: row for row in describe_all()}
    assert rows["fed-cdp"]["verdicts"]["server"] == "sound"
    assert rows["fed-alpha-cdp"]["verdicts"]["server"] == "nominal"
    assert rows["fed-sdp"]["verdicts"]["public"] == "sound"
    assert rows["non-private"]["verdicts"]["public"] == "none"
    assert rows["random-noise"]["verdicts"]["server"] == "none"


@pytest.mark.parametrize(
    "text",
    [
        "6",
        "linear:15:4.85",
        "staircase:15:4.85:every=10",
        "exponential:15:rate=0.01:iteration",
        "cosine-cyclic:15:floor=4:cycles=3",
        "triangular-cyclic:9:5:floor=1:every=7",
    ],
)
def test_schedules_survive_being_written_down(text):
    assert parse(as_text(parse(text))) == parse(text)


@pytest.mark.parametrize("name", ["dp-fedavg", "sum-cdp"])
@pytest.mark.parametrize(
    "change",
    [
        {"aggregate": "fedmed"},
        {"aggregate": "scaffold"},
        {"aggregate": "connectivity"},
        {"heterogeneity": True},
    ],
)
def test_what_looks_at_single_uploads_is_refused_where_they_carry_no_noise(name, change):
    with pytest.raises(UserError, match="no noise"):
        with_changes(get(name), change)


def test_dropping_coordinates_before_the_noise_of_a_sum_is_refused():
    with pytest.raises(UserError, match="before noise"):
        with_changes(get("sum-cdp"), {"prune": 0.3})


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("ldp-fl", {"grid": 1e-6}, "no exact form"),
        ("non-private", {"grid": 1e-6}, "no exact form"),
        ("random-noise", {"grid": 1e-6}, "clip.kind"),
        ("fed-alpha-cdp", {"grid": 1e-6}, "from the batch"),
        ("median-clip", {"grid": 1e-6}, "from the batch"),
        ("fed-cdp-sound", {"grid": 1e-14}, "fraction"),
        ("fed-cdp-sound", {"grid": 0.1}, "fraction"),
        ("fed-cdp-sound", {"grid": -1e-6}, "fraction"),
        ("fed-cdp-sound", {"grid": float("nan")}, "fraction"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_with_the_reason(name, changes, word):
    with pytest.raises(UserError, match=word):
        with_changes(get(name), changes)


def test_noise_narrower_than_ten_grid_steps_is_refused():
    recipe = with_changes(get("fed-cdp-sound"), {"grid": 1e-3})
    assert spacing(recipe, (2.0, 1.0), (0.02, 0.02)) == pytest.approx(1e-3)
    with pytest.raises(UserError, match="at least 10"):
        spacing(recipe, (2.0, 1.0), (0.02, 0.005))
    assert spacing(with_changes(get("fed-cdp-sound"), {"grid": 0}), (1.0,), (0.0,)) == 0


def test_exact_noise_is_the_default_wherever_the_scale_is_public():
    for name, recipe in catalogue().items():
        follows = recipe.scale.batch or recipe.clip.rule.batch
        exact = recipe.law is not None and recipe.clip.bounded and not follows
        assert (recipe.fineness > 0) == exact, name


def test_the_default_grid_is_fine_enough_for_any_noise():
    recipe = get("fed-cdp-sound")
    assert spacing(recipe, (2.0,), (1e-9,)) <= 2e-9 / 1024
