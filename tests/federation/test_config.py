"""Configurations are typed, complete and forgiving in their error messages."""

import subprocess
import sys

import pytest

from fedveil.errors import UserError
from fedveil.federation.config import RunConfig, load_config, make_config, shipped
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


def test_both_shipped_configurations_of_wind_standardise_its_inputs_by_the_same_public_constants():
    one, two = (load_config(name).features for name in ("wind-scaffold", "udp-fl-wind"))
    assert one == two and one.startswith("standard:")
