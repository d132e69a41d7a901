"""Plans keep their budget, move the right way, and are what the shipped headline configurations say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import UserError
from fedveil.federation.config import load_config, make_config, shipped
from fedveil.federation.planner import KNOWN, PUBLIC, Shape, as_toml, config_of, describe, plan
from fedveil.models.features import parse
from fedveil.models.layout import flatten
from fedveil.models.nets import build
from fedveil.privacy.accountants import answer
from fedveil.privacy.events import Event, Noise

MNIST = KNOWN["mnist"]


def test_the_noise_of_a_plan_keeps_its_budget_and_no_less_noise_would():
    found = plan(MNIST, epsilon=0.823, clients=100, observer="server")
    assert found.verdict == "sound" and found.accountant == "pld"
    spent = answer([Event(Noise("gaussian", found.noise_multiplier), steps=found.rounds)], 1e-5)
    assert spent.epsilon is not None and 0.823 * 0.998 < spent.epsilon <= 0.823
    less = answer([Event(Noise("gaussian", 0.99 * found.noise_multiplier), steps=found.rounds)], 1e-5)
    assert less.epsilon is not None and less.epsilon > 0.823


def test_whole_run_is_one_gaussian_release_however_many_rounds():
    """mu of the budget 0.823 at 1e-5 is 0.2244: rounds divide it, nothing is lost."""
    found = plan(MNIST, epsilon=0.823, clients=100, observer="sum")
    assert math.sqrt(found.rounds) / found.noise_multiplier == pytest.approx(0.2244, rel=2e-3)
    assert found.strength == pytest.approx(60_000 * 0.2244, rel=2e-3)


def test_a_server_that_sees_every_update_costs_the_square_root_of_the_clients():
    behind = plan(MNIST, epsilon=0.823, clients=100, observer="sum")
    before = plan(MNIST, epsilon=0.823, clients=100, observer="server")
    assert behind.strength / before.strength == pytest.approx(10, rel=1e-6)
    assert before.recipe == "fed-cdp-sound" and behind.recipe == "sum-cdp"
    assert plan(MNIST, epsilon=0.823, clients=1000, observer="sum").strength == pytest.approx(behind.strength)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.1, 8), st.integers(1, 1000), st.sampled_from(["server", "sum"]))
def test_more_budget_never_means_a_weaker_signal(epsilon: float, clients: int, observer: str):
    little = plan(MNIST, epsilon=epsilon, clients=clients, observer=observer)
    more = plan(MNIST, epsilon=1.2 * epsilon, clients=clients, observer=observer)
    assert more.strength > little.strength and more.weights >= little.weights
    assert 20 <= little.rounds <= more.rounds <= 200
    assert little.noise_to_signal == pytest.approx(
        little.noise_to_signal_per_round / math.sqrt(little.rounds), rel=1e-9
    )


def test_noise_to_signal_is_the_length_of_the_noise_over_that_of_aligned_gradients():
    found = plan(MNIST, epsilon=0.823, clients=100, observer="sum")
    noise = found.noise_multiplier * found.clip * math.sqrt(found.weights)
    assert found.noise_to_signal_per_round == pytest.approx(noise / (60_000 * found.clip))


def test_the_papers_choice_is_accounted_as_the_server_sees_it():
    """sigma 6 on three layers clipped one by one: multiplier 3.46; B = 5 of 500, ten participations of 100 steps."""
    papers = plan(Shape("images", 50_000, 784, 10), epsilon=1, clients=100, observer="server").papers
    assert (papers.sigma, papers.batch, papers.local_steps, papers.rounds) == (6, 5, 100, 100)
    assert papers.epsilon == pytest.approx(0.313, abs=0.02)
    assert papers.noise_to_signal == pytest.approx(
        6 * math.sqrt(34_720) / (5 * math.sqrt(3) * math.sqrt(10 * 100 * 100))
    )


@pytest.mark.parametrize(
    ("dataset", "model", "shape"),
    [
        ("mnist", "papers-cnn", (1, 28, 28)),
        ("cifar10", "papers-cnn", (3, 32, 32)),
        ("lfw", "papers-cnn", (3, 32, 32)),
        ("adult", "papers-mlp", (105,)),
        ("cancer", "papers-mlp", (30,)),
    ],
)
def test_the_papers_weights_are_counted_on_the_papers_models(dataset: str, model: str, shape):
    known = KNOWN[dataset]
    assert flatten(build(model, shape, known.classes)).size == known.papers_weights


@pytest.mark.parametrize("dataset", KNOWN)
@pytest.mark.parametrize("observer", ["server", "sum"])
def test_every_plan_is_a_configuration_that_can_run(dataset: str, observer: str, tmp_path):
    shape = KNOWN[dataset]
    found = plan(shape, epsilon=0.823, clients=10, observer=observer)
    file = tmp_path / "plan.toml"
    file.write_text(as_toml(found, shape, dataset), "utf-8")
    read = load_config(str(file))
    assert read == make_config(config_of(found, shape, dataset))
    assert read.calibrate and read.target_epsilon == 0.823 and read.built_recipe().batches.name == "full"
    parse(read.features or "")


HEADLINES = {
    "mnist-headline-a": ("mnist", "server", 100),
    "mnist-headline-a-1000": ("mnist", "server", 1000),
    "mnist-headline-b": ("mnist", "sum", 100),
    "fashion-mnist-headline-a": ("fashion_mnist", "server", 100),
    "fashion-mnist-headline-b": ("fashion_mnist", "sum", 100),
    "cifar10-headline-a": ("cifar10", "server", 100),
    "cifar10-headline-b": ("cifar10", "sum", 100),
    "lfw-headline-a": ("lfw", "server", 10),
    "lfw-headline-b": ("lfw", "sum", 10),
    "adult-headline-a": ("adult", "server", 100),
    "adult-headline-b": ("adult", "sum", 100),
    "cancer-headline-a": ("cancer", "server", 10),
    "cancer-headline-b": ("cancer", "sum", 10),
}


@pytest.mark.parametrize("name", HEADLINES)
def test_shipped_headlines_are_what_the_planner_proposes(name: str):
    dataset, observer, clients = HEADLINES[name]
    assert name in shipped()
    ours = load_config(name.upper() if name.endswith("-a") else name)
    shape = KNOWN[dataset]
    proposed = config_of(plan(shape, epsilon=0.823, clients=clients, observer=observer), shape, dataset)
    wanted = make_config(proposed)
    for key in proposed:
        assert getattr(ours, key) == getattr(wanted, key), key
    assert ours.delta == 1e-5 and ours.built_recipe() == wanted.built_recipe()
    assert "fitted on" in ours.tuning or "chosen on" in ours.tuning


WITH_PUBLIC = {
    f"{short}-public-{letter}": (dataset, observer, clients, epsilon)
    for short, dataset, clients, epsilon in (
        ("cifar10", "cifar10", 100, 0.823), ("lfw", "lfw", 10, 0.823), ("utkface", "utkface", 10, 0.823),
        ("medical", "medical_mnist", 10, 0.823), ("sst2", "sst2", 10, 2.0),
    )
    for letter, observer in (("a", "server"), ("b", "sum"))
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_PUBLIC)
def test_shipped_configurations_with_a_backbone_are_what_the_planner_proposes(name: str):
    dataset, observer, clients, epsilon = WITH_PUBLIC[name]
    shape, ours = PUBLIC[dataset], load_config(name)
    proposed = config_of(plan(shape, epsilon=epsilon, clients=clients, observer=observer), shape, dataset)
    wanted = make_config(proposed)
    for key in proposed:
        assert getattr(ours, key) == getattr(wanted, key), key
    assert parse(ours.features or "").kind == "backbone" and "fitted on" in ours.tuning


def test_fashion_mnist_is_planned_by_the_rule_that_never_saw_it():
    """s = 13,461: travel 1.7 * s^0.95 = 14,223 in steps of at most 80; 280 * s^0.145 = 1,112 directions."""
    found = plan(KNOWN["fashion_mnist"], epsilon=0.823, clients=100, observer="sum")
    assert (found.rounds, found.features) == (178, "scattering:components=1100,ridge=0.001")
    assert found.learning_rate * found.clip * found.rounds == pytest.approx(14_223, rel=0.02)


def test_fewer_examples_of_a_known_dataset_keep_its_other_facts():
    fewer = describe("cancer", 300, "images", 10, 30)
    assert fewer.examples == 300 and fewer.front == KNOWN["cancer"].front and fewer.source == "cancer_raw"
    found = plan(fewer, epsilon=1, clients=5, observer="sum")
    assert config_of(found, fewer, "cancer")["dataset"] == "cancer_raw" and found.weights == 8


def test_wrong_wishes_say_what_to_change():
    with pytest.raises(UserError, match="use server"):
        plan(MNIST, epsilon=1, observer="severs")
    with pytest.raises(UserError, match="at least one example"):
        plan(MNIST, epsilon=1, clients=70_000)
    with pytest.raises(UserError, match="Did you mean 'mnist'"):
        describe("mnits", None, "images", 10, 30)
    with pytest.raises(UserError, match="--examples is missing"):
        describe(None, None, "images", 10, 30)
    with pytest.raises(UserError, match="--kind pictures"):
        describe(None, 100, "pictures", 10, 30)
