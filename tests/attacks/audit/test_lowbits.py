"""The low bits of float noise tell neighbours apart; those of grid noise do not.

Bounds are at 95% (exact, both events together): a correct run exceeds its promise with probability at most 5% per case.
With grid noise the observed count is 0 in every case, since every output is possible for every neighbour, so these tests
have no false alarms at all.
"""

import numpy as np
import pytest

from fedveil.attacks.audit import lowbits
from fedveil.attacks.audit.lowbits import Arithmetic, fused_sum, impossible, neighbours_of, reachable
from fedveil.federation.config import load_config
from fedveil.federation.loop import prepare
from fedveil.protect import noise

KEY = b"0123456789abcdef"
LINEAR = {"model": "logistic", "model_options": {"bias": False, "zero": True}}
FULL = {
    "dataset": "digits",
    "clients": 4,
    "partition": "iid",
    "rounds": 1,
    "local_steps": 1,
    "sampling": "full",
    **LINEAR,
}
SAMPLED = {
    "dataset": "digits",
    "clients": 4,
    "partition": "iid",
    "rounds": 1,
    "local_steps": 1,
    "batch_size": 60,
}
CLIENTS = {
    "dataset": "digits",
    "clients": 200,
    "partition": "iid",
    "rounds": 1,
    "local_steps": 2,
    "batch_size": 2,
}


def prepared(recipe, changes, grid):
    return prepare(load_config(recipe, {**changes, "grid": grid}))


def test_every_value_that_the_sampler_draws_is_reachable():
    normals, laplaces = noise.normals(KEY, 0, 20_000), noise.laplaces(KEY, 0, 20_000)
    assert reachable(normals * np.float32(1.7), "normal", (1.7,)).all()
    assert reachable(normals * np.float32(1.7) * np.float32(0.3), "normal", (1.7, 0.3)).all()
    assert reachable(laplaces * np.float32(0.7), "laplace", (0.7,)).all()


def test_a_scale_thins_the_float_values_and_the_laplace_tail_has_gaps():
    values = np.linspace(1.5, 1.999, 10_001).astype(np.float32)
    assert 0.5 < reachable(values, "normal", (1.5,)).mean() < 0.9
    tail = np.linspace(15.0, 16.0, 10_001).astype(np.float32)
    assert reachable(tail, "laplace", ()).mean() < 0.1


def test_neighbouring_floats_are_in_order_across_zero():
    around = neighbours_of(np.array([0.0], np.float32), 3)[0]
    assert (np.diff(around) >= 0).all() and around[0] < 0 < around[-1]


def test_a_fused_sum_is_rounded_once():
    """Against exact rational arithmetic on values that round twice differently."""
    from fractions import Fraction

    rng = np.random.default_rng(0)
    total = rng.normal(size=300).astype(np.float32)
    drawn = (rng.normal(size=300) * 2.0 ** rng.integers(-30, 5, 300)).astype(np.float32)
    found = fused_sum(total, drawn, 1.3)
    for t, d, value in zip(total, drawn, found, strict=True):
        exact = Fraction(float(t)) + Fraction(float(d)) * Fraction(float(np.float32(1.3)))
        beside = neighbours_of(np.array([value]), 1)[0]
        errors = [abs(Fraction(float(b)) - exact) for b in beside]
        assert errors[1] == min(errors)


def test_the_true_neighbour_is_never_excluded_by_any_arithmetic():
    total = np.random.default_rng(1).normal(size=5000).astype(np.float32)
    for machine in (
        Arithmetic("a", "normal", (1.3,), (("*", 0.01), ("*", -430.0))),
        Arithmetic("b", "normal", (1.3,), (("/", 367.0), ("*", -0.1)), fused=True),
        Arithmetic("c", "normal", (1.3, 0.7), ()),
        Arithmetic("d", "normal", (2.0,), (("/", 1e4), ("*", 800.0)), wide=True),
        Arithmetic("e", "laplace", (0.6,), (("/", 7.0),)),
    ):
        draw = noise.laplaces(KEY, 0, 5000) if machine.law == "laplace" else noise.normals(KEY, 0, 5000)
        for factor in machine.factors[: len(machine.factors) - machine.fused]:
            draw = draw * np.float32(factor)
        assert not impossible(machine.release(total, draw), total, machine).any(), machine


def test_a_last_byte_that_leans_is_learned_and_a_fair_one_is_not():
    """False-alarm rate 5% for the fair bytes, at a fixed seed."""
    rng = np.random.default_rng(2)
    fair = [rng.integers(0, 256, (4000, 8)).astype(np.uint8) for _ in range(2)]
    assert lowbits.learn(*fair, 1e-5, 0.05) == 0
    leaning = fair[0].copy()
    leaning[:, 3] &= 0xFE  # one coordinate whose last bit is always 0
    leaning[:, 5] &= 0xFC
    assert lowbits.learn(leaning, fair[1], 1e-5, 0.05) > 1.0


def test_some_coordinates_are_those_that_the_unit_moves_most():
    one = prepared("sum-cdp", {**FULL, "clip.bound": 0.1, "sigma": 20.0}, 0.0)
    few = lowbits.neighbours(one, releases=200, coordinates=50)
    assert few.coordinates == 50 and few.epsilon_lower > 1.0


# (recipe, changes, releases on each side): what each observer sees of one round
REAL = {
    "the sum": ("sum-cdp", {**FULL, "clip.bound": 0.1, "sigma": 20.0}, 300),
    "an upload": ("fed-cdp-sound", {**FULL, "clip.bound": 0.1, "sigma": 20.0}, 300),
    "a client's upload": ("fed-sdp-client", {**CLIENTS, "clients": 4, "clip.kind": "flat"}, 200),
}


@pytest.mark.parametrize("name", REAL)
def test_float_noise_lets_low_bits_tell_real_neighbours_apart_and_grid_noise_does_not(name):
    recipe, changes, releases = REAL[name]
    broken = lowbits.neighbours(prepared(recipe, changes, 0.0), releases=releases)
    assert broken.epsilon_lower > 2.0 and broken.without_excludes_without == broken.with_excludes_with == 0, (
        broken
    )
    sound = lowbits.neighbours(prepared(recipe, changes, 1e-6), releases=releases)
    assert sound.machine == "lattice" and not sound.reason
    assert sound.epsilon_lower == 0 and sound.with_excludes_without == sound.without_excludes_with == 0, sound


def test_laplace_noise_in_floats_leaves_values_that_the_neighbour_cannot():
    found = lowbits.neighbours(prepare(load_config("udp-fl-laplace", {**FULL, "sigma": 1.0, "grid": 0.0})), releases=200)
    assert found.epsilon_lower > 3.0 and found.without_excludes_without == 0, found


SLOTS = {
    "poisson batches, uploads": ("fed-cdp-sound", {**SAMPLED, "sigma": 2.3}),
    "secret cohort, the sum": ("dp-fedavg", {**CLIENTS, "cohort_size": 100}),
    "clients' uploads": ("fed-sdp-client", {**CLIENTS, "clip.kind": "flat", "cohort_size": 200}),
    "all rows, the sum": ("sum-cdp", {**FULL, "sigma": 5.0}),
}


@pytest.mark.parametrize("name", SLOTS)
def test_float_noise_lets_low_bits_find_canaries_under_any_sampling_and_grid_noise_does_not(name):
    recipe, changes = SLOTS[name]
    broken = lowbits.slots(prepared(recipe, changes, 0.0), canaries=500, seed=1)
    assert broken.epsilon_lower > 1.5 and broken.without_excludes_without == 0, broken
    sound = lowbits.slots(prepared(recipe, changes, 1e-6), canaries=500, seed=1)
    assert sound.machine == "lattice" and sound.epsilon_lower == 0 and sound.with_excludes_without == 0, sound


def test_noise_on_a_grid_around_a_sum_that_was_not_rounded_is_caught():
    """What the lattice test is there for: totals between the grid's points show through integer noise."""
    rng = np.random.default_rng(2)
    noise_units = np.rint(rng.normal(scale=1e4, size=(400, 5)))
    machine = Arithmetic("lattice", "lattice", (2.0**-10,), (("*", 0.5),))
    total = np.full(5, 0.3 * 2.0**-10)
    assert not impossible(machine.release(0.0, noise_units * 2.0**-10), 0.0, machine).any()
    small = np.abs(noise_units) < 4000  # float32 still shows a part of a grid step there
    leaked = impossible(machine.release(total, noise_units * 2.0**-10), 0.0, machine)
    assert leaked[small].all()


@pytest.mark.parametrize(
    ("recipe", "changes", "word"),
    [
        ("fed-cdp-sound", {**SAMPLED, "local_steps": 5}, "steps add up"),
        ("median-clip", SAMPLED, "comes from the data"),
        ("ldp-fl", {**SAMPLED, **LINEAR}, "no additive noise"),
    ],
)
def test_what_cannot_be_looked_at_says_why(recipe, changes, word):
    found = lowbits.look(prepare(load_config(recipe, changes)), units=50)
    assert word in found.reason and found.releases == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "changes", "releases", "least"),
    [
        ("adult-headline-b", {}, 20_000, 6.0),
        ("adult-headline-a", {}, 20_000, 6.0),
        ("mnist-headline-b", {"limit": 6000}, 300, 4.0),
    ],
)
def test_shipped_headlines_with_float_noise_are_refuted(config, changes, releases, least):
    """With the system's entropy in place of a seed the counts move by a few percent, the bounds by a tenth at most."""
    found = lowbits.neighbours(prepare(load_config(config, {**changes, "grid": 0.0})), releases=releases)
    assert found.epsilon_lower > max(least, 0.823), found
