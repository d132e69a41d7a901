"""Rounds: clips bound, noise has the stated scale, the sum recipe is plain gradient descent on all data."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import UserError
from fedveil.federation.config import load_config
from fedveil.federation.loop import play_round, prepare
from fedveil.federation.round import (
    Upload,
    clip_update,
    merge,
    model_weights,
    moment_of,
    plan_of,
    sanitise_update,
    shuffled,
    start,
    uploads_of,
)
from fedveil.federation.view import result_of
from fedveil.models.layout import Layout
from fedveil.protect.catalogue import get
from fedveil.protect.memory import NOTHING
from fedveil.protect.recipe import with_changes
from fedveil.protect.upload import drop_smallest, share_some

LAYOUT = Layout(("a.w", "b.w"), ((40,), (60,)), ("a", "b"), (0, 1))
SMALL = ["dataset=cancer", "clients=4", "rounds=4", "local_steps=3", "batch_size=8"]


def prepared(name, *changes):
    return prepare(load_config(name, [*SMALL, *changes]))


@given(st.integers(0, 2**31), st.floats(1e-3, 1e3), st.floats(1e-3, 10))
def test_a_clipped_update_never_exceeds_its_joint_bound(seed, scale, bound):
    update = (np.random.default_rng(seed).normal(size=100) * scale).astype(np.float32)
    flat = clip_update(update, bound, with_changes(get("dp-fedavg"), {}), LAYOUT)
    assert np.linalg.norm(flat.astype(np.float64)) <= bound * (1 + 1e-6)
    layers = clip_update(update, bound, get("fed-sdp"), LAYOUT)
    for part in LAYOUT.layer_slices():
        assert np.linalg.norm(layers[part].astype(np.float64)) <= bound * (1 + 1e-6)
    split = clip_update(update, bound, with_changes(get("fed-sdp"), {"clip.split": True}), LAYOUT)
    assert np.linalg.norm(split.astype(np.float64)) <= bound * (1 + 1e-6)


def test_pruning_drops_exactly_the_smallest():
    update = np.array([3.0, -1.0, 0.5, -4.0, 2.0], np.float32)
    assert drop_smallest(update, 0.4).tolist() == [3.0, 0.0, 0.0, -4.0, 2.0]


def test_dssgd_shares_only_large_coordinates():
    recipe = with_changes(get("dssgd"), {"share": 0.3, "share_threshold": 1.0})
    update = np.linspace(-3, 3, 100).astype(np.float32)
    shared = share_some(update, recipe.thin, np.random.default_rng(0))
    assert (shared != 0).sum() == 30
    assert (np.abs(shared[shared != 0]) > 1).all()


def test_client_noise_has_the_stated_scale():
    run = prepared("fed-sdp-client", "sigma=3", "clip.bound=2")
    state = start(run.task, run.initial)
    now = moment_of(run.task, state)
    zero = np.zeros(run.task.layout.size, np.float32)
    drawn = np.concatenate(
        [sanitise_update(run.task, now, zero, client) for client in range(8)]
    )
    # 33,040 draws of N(0, 6): the deviation is within 2 % (5 sigma) but for 6e-7 of seeds.
    assert drawn.std() == pytest.approx(6, rel=0.02)
    assert abs(drawn.mean()) < 5 * 6 / math.sqrt(len(drawn))


def test_server_noise_is_once_on_the_sum_whatever_arrives():
    run = prepared("dp-fedavg", "sigma=2", "clip.bound=3", "cohort=fixed")
    state = start(run.task, run.initial)
    now = moment_of(run.task, state)
    for uploads in ([], list(uploads_of(run.task, now, state, [0], _zero_result(run)))):
        following, _ = merge(run.task, state, now, uploads)
        moved = following.weights - state.weights
        # sigma * bound / cohort = 1.5 on 4,130 weights; 5.5 % is 5 sigma of the estimated deviation.
        assert moved.std() == pytest.approx(2 * 3 / run.task.setting.cohort, rel=0.055)


def _zero_result(run):
    from fedveil.training.contract import LocalResult

    one = np.zeros(1)
    return LocalResult(
        np.zeros((1, run.task.layout.size), np.float32), np.array([True]), one, one, one, one, one, one
    )


def test_the_sum_recipe_without_noise_is_a_gradient_step_on_everybodys_data():
    run = prepared(
        "sum-cdp",
        "local_steps=1",
        "sampling=full",
        "sigma=1e-9",
        "clip.bound=1e6",
        "model=logistic",
        "learning_rate=0.3",
    )
    state = start(run.task, run.initial)
    following, _, _ = play_round(run, state, np.arange(4))
    from fedveil.models.layout import load

    module = load(run.task.module, state.weights)
    rows = np.concatenate([run.task.rows(c) for c in range(4)])
    loss = torch.nn.functional.cross_entropy(
        module(torch.as_tensor(run.task.x[rows])), torch.as_tensor(run.task.y[rows])
    )
    gradient = torch.cat(
        [g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))]
    ).numpy()
    assert np.allclose(following.weights, state.weights - 0.3 * gradient, atol=1e-5)


def test_the_quantile_bound_moves_towards_the_norms_and_uses_noised_counts_only():
    still = ("learning_rate=1e-9", "sampling=full", "batch_size=106")
    run = prepared("fed-alpha-cdp-sound", "clip.bound=1000", "clip.count_noise=0.01", *still)
    state = start(run.task, run.initial)
    bounds = []
    for _ in range(4):
        state, _, _ = play_round(run, state, np.arange(4))
        bounds.append(state.clip.bound)
    assert bounds == sorted(bounds, reverse=True)  # everything lies below 1000, so the bound falls
    noisy = prepared("fed-alpha-cdp-sound", "clip.bound=1000", "clip.count_noise=1000", *still)
    other, _, _ = play_round(noisy, start(noisy.task, noisy.initial), np.arange(4))
    assert other.clip.bound != bounds[0]


def test_split_layers_keep_the_joint_noise():
    run = prepared("fed-cdp", "clip.split=true")
    now = moment_of(run.task, start(run.task, run.initial))
    plan = plan_of(run.task, now, 0, 100)
    layers = run.task.layout.layers
    assert plan.bounds[0] == pytest.approx(4 / math.sqrt(layers))
    assert plan.noised[0].scale == pytest.approx(4 * 6)


def test_averaging_uses_the_last_share_of_the_rounds():
    run = prepared("non-private", "average=0.5")
    state = start(run.task, run.initial)
    seen = []
    for _ in range(4):
        state, _, _ = play_round(run, state, np.arange(4))
        seen.append(state.weights)
    assert np.allclose(model_weights(state), (seen[2] + seen[3]) / 2, atol=1e-6)


def test_fixed_variance_holds_the_noise_deviation():
    run = prepared("fed-cdp-decay", "fixed_variance=12")
    for index in range(4):
        now = moment_of(run.task, replace(start(run.task, run.initial), round=index))
        assert now.bounds[0] * now.sigmas[0] == pytest.approx(12)


def test_shuffled_updates_lose_their_names_and_order_but_not_their_sum():
    run = prepared("udp-fl-gaussian", "channel=shuffle-models", "sigma=1")
    now = moment_of(run.task, start(run.task, run.initial))
    sent = [Upload(client, np.full(3, float(client), np.float32)) for client in range(40)]
    got = list(shuffled(run.task, now, iter(sent)))
    values = [int(upload.update[0]) for upload in got]
    assert {upload.client for upload in got} == {-1}
    assert sorted(values) == list(range(40))
    assert values != list(range(40))  # one order of 40!
    plain = prepared("udp-fl-gaussian", "sigma=1")
    assert list(shuffled(plain.task, now, iter(sent))) == sent
    state = start(run.task, run.initial)
    mixed, straight = (play_round(r, state, np.arange(4))[0].weights for r in (run, plain))
    np.testing.assert_allclose(mixed, straight, atol=1e-6)


@pytest.mark.parametrize("changes", [{"aggregate": "scaffold"}, {"heterogeneity": True}])
def test_shuffled_updates_exclude_what_must_know_the_sender(changes):
    with pytest.raises(UserError, match="who sent"):
        with_changes(get("udp-fl-gaussian"), {"channel": "shuffle-models", **changes})


def test_fedmed_weighs_adaptively_until_the_public_loss_rises():
    run = prepared("udp-fl-gaussian", "aggregate=fedmed", "sigma=0.1", "validation=0.2", "model=logistic")
    state, facts, _ = play_round(run, start(run.task, run.initial), np.arange(4))
    assert facts["adaptive"] and len(state.aggregate.losses) == 1
    fell = replace(state, aggregate=replace(state.aggregate, losses=np.array([np.inf])))
    rose = replace(state, aggregate=replace(state.aggregate, losses=np.array([0.0])))
    assert play_round(run, fell, np.arange(4))[1]["adaptive"]
    plain, facts, _ = play_round(run, rose, np.arange(4))
    assert not facts["adaptive"]
    mean = prepared("udp-fl-gaussian", "sigma=0.1", "validation=0.2", "model=logistic")
    expected = play_round(mean, replace(state, aggregate=NOTHING), np.arange(4))[0].weights
    np.testing.assert_array_equal(plain.weights, expected)
    without = prepared("udp-fl-gaussian", "aggregate=fedmed", "sigma=0.1")
    assert play_round(without, start(without.task, without.initial), np.arange(4))[1]["adaptive"]


def test_an_l1_clip_of_an_update_bounds_its_l1_norm():
    recipe = with_changes(get("udp-fl-laplace"), {"clip.norm": "l1"})
    clipped = clip_update(np.full(100, 0.5, np.float32), 1.0, recipe, LAYOUT)
    assert np.abs(clipped.astype(np.float64)).sum() <= 1.0


CLOCK = ("delay_proposals=[2, 4, 4, 60]", "compute_seconds=[1, 5, 2, 3]", "network_seconds=[0.5]")


def test_a_run_of_reports_records_its_agreed_delay_and_what_came_late():
    run = prepared("ldp-fl", "channel=shuffle-parameters", *CLOCK, "overrun_seconds=[0, 0, 1, 0]")
    _, facts, _ = play_round(run, start(run.task, run.initial), np.arange(4))
    size = run.task.layout.size
    assert facts["delay_seconds"] == 4.0 and facts["slowest_seconds"] == 5.5
    assert facts["messages"] == 4 * size and facts["dropped"] == 0
    # A client that is a quarter of T behind has a quarter of its messages after the end; 5 deviations of that count.
    assert abs(facts["late"] - size / 4) < 5 * math.sqrt(size * 3 / 16)
    assert facts["last_message_seconds"] <= 9.5 * (1 + 1e-8)


@pytest.mark.parametrize("kind", ["none", "shuffle-models", "shuffle-parameters"])
def test_a_client_that_is_late_throughout_is_not_used_and_the_others_reports_are(kind):
    clock = CLOCK[1:] if kind == "none" else CLOCK
    run = prepared("ldp-fl", f"channel={kind}", *clock, "overrun_seconds=[0, 0, 100, 0]")
    state = start(run.task, run.initial)
    with_late, facts, _ = play_round(run, state, np.arange(4))
    without, _, _ = play_round(run, state, np.array([0, 1, 3]))
    np.testing.assert_array_equal(with_late.weights, without.weights)
    assert facts["late"] == (run.task.layout.size if kind == "shuffle-parameters" else 1)


def test_delays_hide_nobody_and_reports_that_may_be_late_do_not_count_as_a_crowd():
    plain = moment_of(*(lambda r: (r.task, start(r.task, r.initial)))(prepared("ldp-fl", "channel=shuffle-parameters")))
    for more, crowd in ((CLOCK, 4), ((*CLOCK, "overrun_seconds=[0.1]"), 1)):
        run = prepared("ldp-fl", "channel=shuffle-parameters", *more)
        assert moment_of(run.task, start(run.task, run.initial)) == replace(plain, arrived=crowd)


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("ldp-fl", ["delay_proposals=[]"], "at least one"),
        ("ldp-fl", ["delay_proposals=[0.0]"], "above 0"),
        ("ldp-fl", ["compute_seconds=[-1.0]"], "0 or more"),
        ("ldp-fl", ["channel=none", "delay_proposals=[1.0]"], "nothing is delayed"),
        ("fed-cdp", ["compute_seconds=[1.0]"], "two-valued"),
    ],
)
def test_times_that_mean_nothing_are_refused(name, changes, word):
    with pytest.raises(UserError, match=word):
        load_config(name, [*SMALL, *changes])


OWN_RADII = ("channel=none", "client_radii=[0.02, 0.1, 0.5]")


def test_each_client_reports_two_values_of_its_own_radius():
    run = prepared("ldp-fl", *OWN_RADII)
    state, factor = start(run.task, run.initial), 1 / math.tanh(run.task.recipe.epsilon / 2)
    for client, radius in enumerate((0.02, 0.1, 0.5, 0.02)):
        alone, facts, _ = play_round(run, state, np.array([client]))
        np.testing.assert_allclose(np.unique(alone.weights), [-radius * factor, radius * factor], rtol=1e-6)
        assert facts["radius"] == [0.02, 0.1, 0.5]


@pytest.mark.parametrize("kind", ["none", "shuffle-models"])
def test_the_average_over_clients_with_radii_of_their_own_is_unbiased_for_their_clipped_weights(kind):
    run = prepared("ldp-fl", *OWN_RADII, f"channel={kind}")
    state, size, repeats = start(run.task, run.initial), run.task.layout.size, 300
    weights = np.random.default_rng(5).normal(0, 0.2, (3, size))
    result = result_of(weights - state.weights)
    total = np.zeros(size)
    for number in range(repeats):
        now = replace(moment_of(run.task, state), number=number + 1)
        total += merge(run.task, state, now, uploads_of(run.task, now, state, [0, 1, 2], result))[0].weights
    radii, factor = np.array([[0.02], [0.1], [0.5]]), 1 / math.tanh(run.task.recipe.epsilon / 2)
    clipped = np.clip(weights, -radii, radii)
    deviation = np.sqrt(((radii * factor) ** 2 - clipped**2).sum(0) / 9 / repeats)
    z = (total / repeats - clipped.mean(0)) / deviation  # `size` of them: each within 5.5 but for one seed in 1e4
    assert np.abs(z).max() < 5.5 and abs(z.mean()) < 5 / math.sqrt(size)


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("ldp-fl", ["channel=none", "client_radii=[]"], "at least one"),
        ("ldp-fl", ["channel=none", "client_radii=[0.1, 0.0]"], "above 0"),
        ("ldp-fl", ["channel=none", "client_radii=[0.1]", "ranges=adaptive"], "ranges = fixed"),
        ("ldp-fl", ["client_radii=[0.1]"], "channel = none"),
        ("fed-cdp", ["client_radii=[0.1]"], "two-valued"),
    ],
)
def test_radii_of_single_clients_are_refused_where_they_tell_or_mean_nothing(name, changes, word):
    with pytest.raises(UserError, match=word):
        load_config(name, [*SMALL, *changes])
