"""Configurations are typed, complete and forgiving in their error messages."""

import subprocess
import sys

import pytest

from fedveil.data.partition import partition
from fedveil.errors import UserError
from fedveil.federation.config import TRAINING_ROWS, RunConfig, load_config, make_config, shipped
from fedveil.federation.loop import raw_data
from fedveil.training import pool


def test_a_recipes_name_is_a_configuration_on_cancer():
    config = load_config("fed-cdp")
    assert config.recipe == "fed-cdp" and config.dataset == "cancer"


def test_set_reaches_configuration_recipe_and_options():
    config = load_config(
        "fed-cdp",
        ["rounds=7", "sigma=2.5", "clip.bound=linear:4:2", "dataset=digits", "partition_options.alpha=0.5"],
    )
    assert config.rounds == 7 and config.dataset == "digits"
    assert config.protect == {"sigma": 2.5, "clip.bound": "linear:4:2"}
    assert config.built_recipe().sigma.value(0, 7) == 2.5
    assert config.partition_options == {"alpha": 0.5}


def test_toml_files_are_read_and_checked(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text('recipe = "fed-cdp"\nrounds = 4\n[protect]\nsigma = 3\n')
    config = load_config(str(path), ["seed=9"])
    assert (config.rounds, config.seed, config.protect["sigma"]) == (4, 9, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["round=3"], "rounds"),
        (["rounds=0"], "rounds"),
        (["rounds=many"], "rounds"),
        (["delta=1.5"], "delta"),
        (["sigma"], "key=value"),
        (["recipe=fed-cpd"], "fed-cdp"),
        (["clients=5", "cohort_size=9"], "cohort_size"),
        (["target_accuracy=0.9"], "validation"),
        (["calibrate=true"], "target_epsilon"),
        (["engine=gpu"], "engine"),
        (["observer=nobody"], "observer"),
    ],
)
def test_wrong_values_name_the_key(changes, words):
    with pytest.raises(UserError, match=words):
        load_config("fed-cdp", changes)


def test_unknown_names_and_broken_files_are_explained(tmp_path):
    with pytest.raises(UserError, match="neither"):
        load_config("nothing-like-it")
    with pytest.raises(UserError, match="does not exist"):
        load_config(str(tmp_path / "absent.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = = 3")
    with pytest.raises(UserError, match=r"broken\.toml"):
        load_config(str(broken))


def test_a_sum_allows_one_local_step_only():
    assert load_config("sum-cdp").local_steps == 1
    with pytest.raises(UserError, match="local_steps"):
        load_config("sum-cdp", ["local_steps=5"])


def test_a_written_configuration_reads_back_equal():
    config = load_config("fed-alpha-cdp-sound", ["rounds=3"])
    assert RunConfig(**config.model_dump()) == config
    assert make_config(config.model_dump()) == config


@pytest.mark.parametrize("name", list(shipped()))
def test_every_shipped_configuration_loads(name):
    assert load_config(name).built_recipe()


def test_reading_a_configuration_loads_no_torch():
    """Commands that only read or plan answer at once."""
    code = "from fedveil.federation.config import load_config; load_config('cancer-headline-b')"
    code += "; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("engine", pool.ENGINES)
def test_every_engine_can_be_named(engine):
    assert load_config("fed-cdp-sound", [f"engine={engine}"]).engine == engine


@pytest.mark.parametrize("rule", ["adam", "adamw"])
def test_adaclip_is_refused_with_local_steps_that_hide_their_gradients(rule):
    with pytest.raises(UserError, match=r"clip\.rule = adaclip"):
        load_config("adaclip", ["dataset=cancer", f"local_optimiser={rule}"])


UDP_ROWS = {"mnist": 60000, "medical_mnist": 6000, "cifar10": 40000, "utkface": 4000, "wind": 126700}


@pytest.mark.parametrize("dataset", UDP_ROWS)
@pytest.mark.parametrize("recipe", ["udp-fl-gaussian", "udp-fl-staircase", "nbafl"])
def test_a_recipe_of_udp_fl_takes_two_steps_on_a_twentieth_of_a_clients_rows(recipe, dataset):
    for more in ([], ["clients=20"]):
        config = load_config(recipe, [f"dataset={dataset}", *more])
        assert config.local_steps == 2
        assert config.batch_size / (UDP_ROWS[dataset] / config.clients) == pytest.approx(0.05, rel=0.01)
    given = load_config(recipe, [f"dataset={dataset}", "batch_size=7", "local_steps=9"])
    assert (given.batch_size, given.local_steps) == (7, 9)


@pytest.mark.parametrize("dataset", ["cancer", "digits", "mnist", "medical_mnist", "utkface", "wind"])
def test_the_rate_of_udp_fl_is_what_its_clients_really_sample_at(dataset):
    config = load_config("udp-fl-gaussian", [f"dataset={dataset}"])
    try:
        data = raw_data(config)
    except UserError:
        pytest.skip(f"{dataset} is not in FEDVEIL_DATA")
    sizes = partition(data, config.partition, config.clients, config.seed, **config.partition_options).sizes
    assert len(data) == TRAINING_ROWS[dataset]
    assert config.batch_size / sizes == pytest.approx(0.05, abs=0.51 / sizes.min())  # a batch is a whole number


def test_the_rate_of_udp_fl_follows_fewer_rows_and_copies_and_leaves_unknown_files_alone():
    def batch(*changes):
        return load_config("udp-fl-gaussian", ["dataset=mnist", "clients=10", *changes]).batch_size

    assert batch() == 300 and batch("limit=6000") == 30
    assert batch("partition=iid", "partition_options.examples_per_client=500") == 25
    assert batch("partition=copies", "limit=2000") == 100
    own = load_config("udp-fl-gaussian", ["dataset=my.csv", "target=y"])
    assert (own.batch_size, own.local_steps) == (5, 2)


def test_other_recipes_keep_the_datasets_batch_and_steps():
    for recipe in ("fed-cdp", "fed-sdp", "ldp-fl", "non-private"):
        config = load_config(recipe, ["dataset=medical_mnist"])
        assert (config.batch_size, config.local_steps) == (5, 100)


def test_both_shipped_configurations_of_wind_standardise_its_inputs_by_the_same_public_constants():
    one, two = (load_config(name).features for name in ("wind-scaffold", "udp-fl-wind"))
    assert one == two and one.startswith("standard:")
