"""Figures of quality agree with scikit-learn's and say nothing where there is nothing to say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as oracle

import fedveil as fv
from fedveil.errors import UserError
from fedveil.federation.config import load_config
from fedveil.federation.store import refuse_named_code
from fedveil.training import metrics


def softmax(x: np.ndarray) -> np.ndarray:
    shifted = np.exp(x - x.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 5), st.integers(20, 60), st.integers(0, 10_000), st.booleans())
def test_figures_of_classes_are_those_of_scikit_learn(classes, rows, seed, coarse):
    draw = np.random.default_rng(seed)
    outputs = draw.normal(size=(rows, classes))
    outputs = np.round(outputs) if coarse else outputs  # ties
    truth = np.concatenate([np.arange(classes), draw.integers(0, classes, rows - classes)])
    guess = outputs.argmax(1)
    averaged = {"average": "binary"} if classes == 2 else {"average": "macro"}
    scores = outputs[:, 1] - outputs[:, 0] if classes == 2 else softmax(outputs)
    more = {} if classes == 2 else {"multi_class": "ovr"}
    assert metrics.auc(outputs, truth) == pytest.approx(oracle.roc_auc_score(truth, scores, **more))
    assert metrics.f1(outputs, truth) == pytest.approx(oracle.f1_score(truth, guess, zero_division=0, **averaged))
    assert metrics.balanced_accuracy(outputs, truth) == pytest.approx(oracle.balanced_accuracy_score(truth, guess))


def test_figures_of_values_are_those_of_scikit_learn():
    draw = np.random.default_rng(0)
    outputs, truth = draw.normal(size=50), draw.normal(size=50)
    assert metrics.rmse(outputs, truth) == pytest.approx(oracle.root_mean_squared_error(truth, outputs))
    assert metrics.mae(outputs, truth) == pytest.approx(oracle.mean_absolute_error(truth, outputs))


def test_one_class_has_no_curve():
    assert metrics.auc(np.zeros((3, 2)), np.ones(3, int)) is None


def half(outputs, truth):
    return 0.5


def names(outputs, truth):
    return "half"


def infinite(outputs, truth):
    return float("inf")


def test_own_functions_are_called_with_outputs_and_truth_and_must_return_a_number():
    outputs, truth = np.zeros((3, 2)), np.zeros(3, int)
    assert metrics.figures(metrics.chosen([half, infinite], False), outputs, truth) == {"half": 0.5, "infinite": None}
    with pytest.raises(UserError, match="'names' returned str"):
        metrics.figures(metrics.chosen([names], False), outputs, truth)


@pytest.mark.parametrize("wanted", ["auk", "rmse", "package.module:accuracy"])
def test_a_name_that_nothing_stands_for_is_refused_before_training(wanted, tmp_path):
    with pytest.raises(UserError, match="metrics: "):
        fv.run("non-private", dataset="digits", rounds=1, metrics=[wanted], out=tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()


def test_checking_names_imports_nothing():
    metrics.check(["no_such_package.module:function"], False)


def test_a_run_measures_what_it_is_asked_to_in_every_round_and_at_its_end(tmp_path):
    result = fv.run(
        "non-private", dataset="cancer", rounds=2, metrics=["auc", "f1", f"{__name__}:half"], out=tmp_path / "run"
    )
    assert result.facts["test_auc"] > 0.9 and result.facts["test_half"] == 0.5
    lines = fv.open_run(tmp_path / "run").metrics
    assert [set(line) >= {"test_auc", "test_f1", "test_half"} for line in lines] == [True, True]


def test_a_configuration_that_names_a_function_needs_the_users_word():
    config = load_config("digits-start", [f"metrics=['{__name__}:half']"])
    with pytest.raises(UserError, match="--trust-code"):
        refuse_named_code(config, trust=False)
    refuse_named_code(config, trust=True)


def share_of_zeros(outputs: np.ndarray, truth: np.ndarray) -> float:
    return float((outputs.argmax(1) == 0).mean())


def test_a_run_takes_functions_that_its_folder_can_name(tmp_path):
    result = fv.run("non-private", data="cancer", rounds=1, clients=2, metrics=[share_of_zeros, "auc"], out=tmp_path / "run")
    assert 0 <= result.facts["test_share_of_zeros"] <= 1 and "test_auc" in result.facts
    with pytest.raises(UserError, match=r"metrics: give a name.*top of a module.*result.evaluate"):
        fv.run("non-private", data="cancer", rounds=1, clients=2, metrics=[lambda outputs, truth: 0.0], out=tmp_path / "other")
