"""A server that changes the model: what it steals without a defence, and what a recipe and a node's checks leave it."""

import numpy as np
import pytest

from fedveil.attacks.exact import linear
from fedveil.attacks.malicious import attack, models
from fedveil.federation.checks import Limits, change, first_model, structure
from fedveil.federation.round import start
from fedveil.federation.view import view


@pytest.fixture(scope="module")
def plain():
    return attack.stage("non-private", "digits", bins=512, batch=32, clients=4)


def test_an_imprint_takes_most_of_a_batch_and_half_of_a_sum(plain):
    """512 bins: an example is alone in its bin with probability (1 - 1/512)^(n - 1): 0.94 of 32 and 0.78 of 128 expected."""
    one = attack.steal(plain, "imprint", batch=32)
    four = attack.steal(plain, "imprint", batch=32, clients=4)
    assert one.share > 0.8 and four.share > 0.5
    assert one.control < 0.1 and four.control < 0.25


def test_a_dead_model_for_everybody_else_turns_a_sum_into_one_upload(plain):
    found = attack.steal(plain, "isolate", batch=32, clients=4)
    assert found.images == 32 and found.share > 0.8


def test_trap_weights_give_back_inputs_that_are_alone_in_a_unit(plain):
    found = attack.steal(plain, "trap", batch=32)
    assert found.share > 0.3 and found.control < 0.1


def test_noise_on_the_steps_leaves_the_server_nothing():
    noised = attack.stage("fed-cdp-sound", "digits", bins=256, batch=32, changes={"sigma": 1.0})
    assert attack.steal(noised, "imprint", batch=32).found == 0


def test_a_fishing_head_leaves_one_class_of_a_large_batch(plain):
    task = plain.task
    rows = np.asarray(plain.partition.rows(0))
    target = 3
    alone = np.concatenate([rows[task.y[rows] != target][:40], rows[task.y[rows] == target][:1]])
    sent = models.fish(plain.initial, task.layout, target)
    state = start(task, sent)
    seen = view(task, state, "type0", 0, rows=alone).values[0]
    first = models.dense_layers(task.layout)[0]
    found = linear.single(seen[first.weight].reshape(first.units, first.width), seen[first.bias])
    assert np.abs(found - task.x[alone[-1]].reshape(-1)).max() < 1e-3


def malicious(prepared):
    public, layout, base = prepared.dataset.x_test, prepared.task.layout, prepared.initial
    return {
        "imprint": models.imprint(base, layout, public),
        "trap": models.trap(base, layout, public, active=1 / 64),
        "fish": models.fish(base, layout, 1),
        "dead": models.dead(base, layout),
    }


@pytest.mark.parametrize("name", ["imprint", "trap", "fish", "dead"])
def test_every_malicious_model_is_stopped_by_its_structure_and_as_a_first_model(name, plain):
    task, sent = plain.task, malicious(plain)[name]
    assert structure(sent, task.module, task.layout, plain.dataset.shape)
    assert first_model(sent, plain.initial)


@pytest.mark.parametrize("units", [32, 48])
def test_malicious_models_of_few_units_are_stopped_by_their_structure_too(units):
    small = attack.stage("non-private", "digits", bins=units, batch=32, clients=2, seed=1)
    for name, sent in malicious(small).items():
        assert structure(sent, small.task.module, small.task.layout, small.dataset.shape), name


def test_a_trap_of_fewer_units_than_noise_may_switch_off_gives_little_back_and_is_no_first_model():
    """Of 16 units all are off by chance once in 65,536 layers of noise: activity cannot tell a trap from that."""
    small = attack.stage("non-private", "digits", bins=16, batch=32, clients=2, seed=1)
    task, sent = small.task, malicious(small)["trap"]
    assert first_model(sent, small.initial)
    rows = np.asarray(small.partition.rows(0))[:32]
    seen = view(task, start(task, sent), "type0", 0, rows=rows).values[0]
    candidates = np.clip(models.read_units(seen, task.layout), 0, 1)
    assert (attack.nearest(candidates, task.x[rows].reshape(32, -1)) < 0.01).sum() <= 8


def test_the_honest_model_passes(plain):
    task = plain.task
    assert not structure(plain.initial, task.module, task.layout, plain.dataset.shape)
    assert not first_model(plain.initial.copy(), plain.initial)


def test_an_imprint_whose_rows_differ_enough_to_pass_gives_much_less_back(plain):
    """The attacker who knows the limit on copied rows adds just so much noise to them: then thresholds are out of order."""
    task = plain.task
    sent = models.imprint(plain.initial, task.layout, plain.dataset.x_test)
    rng = np.random.default_rng(0)
    for layer in models.dense_layers(task.layout):
        rows = sent[layer.weight].reshape(layer.units, layer.width).astype(np.float64)
        noise = rng.normal(size=rows.shape)
        noise *= np.linalg.norm(rows, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
        sent[layer.weight] = (rows + 0.15 * noise).reshape(-1)
    assert not any("copies" in why for why in structure(sent, task.module, task.layout, plain.dataset.shape))
    rows = np.asarray(plain.partition.rows(0))[:32]
    seen = view(task, start(task, sent), "type0", 0, rows=rows).values[0]
    candidates = np.clip(models.read_imprint(seen, task.layout), 0, 1)
    found = (attack.nearest(candidates, task.x[rows].reshape(32, -1)) < 0.01).mean()
    assert found < 0.5


def test_a_later_malicious_model_moves_further_than_honest_rounds_do(plain):
    own = view(plain.task, start(plain.task, plain.initial), "type0", 0).values[0]
    allowed = Limits().own_factor * float(np.linalg.norm(own))
    for name, sent in malicious(plain).items():
        if name != "fish":  # changes the head alone, by less than a round of this learning rate may
            assert change(plain.initial, sent, allowed), name
    assert not change(plain.initial, plain.initial + own, allowed)


def test_a_trap_that_looks_active_to_random_inputs_passes_its_structure_but_not_the_other_checks(plain):
    """The attacker who knows the check on activity puts positive weights where public images are always dark. Only the agreed
    first model and the limit on the change between rounds stop it: that is what they are for."""
    task, public = plain.task, plain.dataset.x_test.reshape(len(plain.dataset.x_test), -1)
    sent = models.trap(plain.initial, task.layout, public, active=1 / 64)
    first = models.dense_layers(task.layout)[0]
    rows = sent[first.weight].reshape(first.units, first.width)
    dark = public.max(0) < 1e-3
    size, draw = (
        np.linalg.norm(rows, axis=1, keepdims=True),
        np.random.default_rng(0).random((first.units, dark.sum())),
    )
    for scale in (0.1, 0.2, 0.4, 0.8, 1.6):  # as little as passes
        rows[:, dark] = scale * size * draw
        if not structure(sent, task.module, task.layout, plain.dataset.shape):
            break
    assert not structure(sent, task.module, task.layout, plain.dataset.shape)
    assert first_model(sent, plain.initial)
    own = view(task, start(task, plain.initial), "type0", 0).values[0]
    assert change(plain.initial, sent, Limits().own_factor * float(np.linalg.norm(own)))


MASKS = {
    "secure_sum": True, "sum_threshold": 4, "sum_colluders": 1, "clients": 4, "local_steps": 1, "sigma": 1.0, "batch_size": 1000,
}  # fmt: skip


def test_a_sum_under_masks_gives_an_imprint_nothing_and_isolating_one_client_opens_no_sum():
    """Candidates from noise alone hit a control image now and then: what counts is that no more images of the batch are hit."""
    staged = attack.stage("sum-cdp", "digits", bins=64, batch=32, clients=4, changes=MASKS)
    hidden = attack.steal(staged, "imprint", batch=32, clients=4)
    assert hidden.candidates > 0 and hidden.share <= hidden.control + 0.05 and hidden.refused == ""
    alone = attack.steal(staged, "isolate", batch=32, clients=4)
    assert alone.found == 0 and alone.candidates == 0 and "masks" in alone.refused


def test_where_only_the_sum_is_opened_its_noise_is_in_what_a_server_gets():
    open_sum = {k: v for k, v in MASKS.items() if not k.startswith("su") and k != "secure_sum"}
    staged = attack.stage("sum-cdp", "digits", bins=64, batch=32, clients=4, changes=open_sum)
    assert attack.steal(staged, "imprint", batch=32).share < 0.05
    seen = view(staged.task, start(staged.task, staged.initial), "type0", 0)
    assert seen.noise_scale > 0


def test_noise_that_the_server_adds_itself_hides_nothing_from_a_malicious_server():
    """Fed-SDP's server holds the uploads before its noise: as its seat is the server's, the attack sees them bare."""
    staged = attack.stage("fed-sdp", "digits", bins=256, batch=32, changes={"clip.bound": 1e6})
    assert attack.steal(staged, "imprint", batch=32).share > 0.5


def test_two_valued_reports_give_an_imprint_nothing():
    staged = attack.stage("ldp-fl", "digits", bins=64, batch=32, clients=4)
    found = attack.steal(staged, "imprint", batch=32, clients=4)
    assert found.candidates > 0 and found.share <= found.control + 0.05
