"""The view shows what is really there, so that attacks never re-implement a defence."""

import numpy as np
import pytest

from fedveil.errors import UserError
from fedveil.federation.config import load_config
from fedveil.federation.loop import prepare
from fedveil.federation.round import plan_of, start, work_of
from fedveil.federation.view import view
from fedveil.training.reference import train as reference_train

SMALL = ["dataset=digits", "model=logistic", "clients=4", "rounds=2", "local_steps=1", "batch_size=8"]


def setup(name, *changes):
    run = prepare(load_config(name, [*SMALL, *changes]))
    return run.task, start(run.task, run.initial)


@pytest.mark.parametrize("changes", [(), ("clip.kind=flat",), ("clip.bound=0.1",), ("clip.rule=median",)])
def test_type_2_gradients_add_up_to_the_reference_step_without_noise(changes):
    task, state = setup("fed-cdp", "sigma=1e-9", "sampling=fixed", *changes)
    seen = view(
        task, state, "type2", 0, work_of(task, state, view(task, state, "type2", 0).moment, 0).rows[0]
    )
    plan = plan_of(task, seen.moment, 0, len(task.rows(0)))
    result = reference_train(
        task.module, state.weights, task.x, task.y, [work_of(task, state, seen.moment, 0)], plan
    )
    assert np.allclose(
        -seen.values.sum(0) * plan.learning_rate / plan.expected_batch, result.delta[0], atol=1e-6
    )


def test_noise_on_the_sum_leaves_single_gradients_clean_and_noise_on_examples_does_not():
    task, state = setup("fed-cdp")
    clean = view(task, state, "type2", 0)
    assert clean.noise_scale == 0 and np.abs(clean.values).max() <= 4
    task, state = setup("fed-cdp", "noise_on=example", "sampling=fixed")
    noisy = view(task, state, "type2", 0)
    assert noisy.noise_scale == pytest.approx(24)
    noise = noisy.values - clean.values
    # about 93,000 draws of N(0, 24): within 1.2 % (5 sigma) but for 6e-7 of seeds; rows are independent.
    assert noise.std() == pytest.approx(24, rel=0.012)
    assert abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 5 / np.sqrt(noise.shape[1])


def test_l2_max_noise_follows_the_batch():
    task, state = setup("fed-alpha-cdp", "noise_on=example", "sampling=fixed", "clip.bound=1e6")
    one = view(task, state, "type2", 0, np.asarray(task.rows(0))[:1])
    many = view(task, state, "type2", 0)
    assert one.noise_scale < many.noise_scale < 6e6


def test_each_tap_of_fed_sdp_shows_more_noise_than_the_one_before():
    task, state = setup("fed-sdp", "cohort=fixed")
    raw, received, sanitised = (view(task, state, tap, 0) for tap in ("type1", "type0", "type0-sanitised"))
    assert raw.noise_scale == received.noise_scale == 0
    assert np.allclose(raw.values, received.values)  # small updates are below the bound
    assert sanitised.noise_scale == 24
    assert np.std(sanitised.values - received.values) == pytest.approx(24, rel=0.15)


def test_a_client_that_noises_its_update_is_clean_before_and_noised_after():
    task, state = setup("fed-sdp-client")
    assert view(task, state, "type1", 0).noise_scale == 0
    assert view(task, state, "type0", 0).noise_scale == 24


def test_given_rows_make_one_batch():
    task, state = setup("non-private", "sampling=fixed")
    rows = np.asarray(task.rows(1))[:8]
    update = view(task, state, "type0", 1, rows)
    gradients = view(task, state, "type2", 1, rows)
    assert np.allclose(update.values[0], -0.05 * gradients.values.mean(0), atol=1e-6)


def test_unknown_taps_are_named():
    task, state = setup("non-private")
    with pytest.raises(UserError, match="type0"):
        view(task, state, "type9", 0)


def test_ldp_uploads_are_the_two_reported_values_and_a_shuffler_leaves_only_their_mean():
    from fedveil.federation.round import moment_of, ranges_of, uploads_of
    from fedveil.protect import ldp

    task, state = setup("ldp-fl", "channel=none", "radius=0.5", "epsilon=2.0")
    now, ranges = moment_of(task, state), ranges_of(start(task, state.weights))
    reports, raw = [], []
    for client in range(4):
        seen = view(task, state, "type0", client)
        plan = plan_of(task, now, client, len(task.rows(client)))
        result = reference_train(
            task.module, state.weights, task.x, task.y, [work_of(task, state, now, client)], plan
        )
        (sent,) = uploads_of(task, now, state, [client], result)
        expected = ldp.decode(sent.bits, ranges, 2.0, task.layout)
        assert np.allclose(seen.values[0] + state.weights, expected, atol=1e-6)
        assert len(np.unique(expected)) == 2 and seen.noise_scale > 0.4
        assert np.array_equal(view(task, state, "type1", client).values[0], result.delta[0])
        reports.append(expected)
        raw.append(result.delta[0])
    assert not np.allclose(reports[0] - state.weights, raw[0], atol=0.1)

    task, state = setup("ldp-fl", "channel=shuffle-parameters", "radius=0.5", "epsilon=2.0")
    mixed = view(task, state, "type0", 1)
    assert np.allclose(mixed.values[0] + state.weights, np.mean(reports, axis=0), atol=1e-5)
    assert np.isclose(mixed.noise_scale, seen.noise_scale / 2, rtol=0.1)  # four reports
