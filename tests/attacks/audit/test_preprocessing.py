"""A preparation that was fitted on private rows is found, by the audit of a run itself; public ones are left alone."""

import numpy as np
import pytest

from fedveil.attacks import campaign
from fedveil.attacks.audit.preprocessing import fitted, look, moved_by_a_stranger
from fedveil.data.datasets import load
from fedveil.data.rows import fit_scale
from fedveil.data.tables import from_arrays
from fedveil.federation.config import make_config
from fedveil.federation.loop import run as simulate

HOWS = {
    "standardised": lambda x: (x - x.mean(0)) / x.std(0),
    "centred": lambda x: x - x.mean(0),
    "least and largest": lambda x: (x - x.min(0)) / (x.max(0) - x.min(0)),
    "whitened": lambda x: (x - x.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(x.T))).T,
}


def table(how=None, rows=400, seed=0):
    """A skewed table whose rows were prepared together before the test rows were taken away."""
    rng = np.random.default_rng(seed)
    x = rng.gamma(2.0, 10.0, (rows, 5)) + rng.normal(size=(rows, 1))
    y = (x[:, 0] > 20).astype(int)
    return (x / 50 - 0.5 if how is None else HOWS[how](x)), y


def test_a_scaler_fitted_on_private_rows_moves_others_and_a_public_one_does_not():
    rows = np.random.default_rng(0).normal(size=(50, 4))
    assert moved_by_a_stranger(HOWS["standardised"], rows) > 0.5
    assert moved_by_a_stranger(lambda x: (x - 1.0) / 3.0, rows) == 0
    assert moved_by_a_stranger(lambda x: np.argsort(np.argsort(x, 0), 0) / len(x), rows) > 0


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("whole", [True, False])
def test_rows_carry_the_mark_of_what_was_fitted_on_them(how, whole):
    """whole: fitted on all rows, of which some were then held out; else on the training rows alone."""
    x, y = table(how)
    made = from_arrays("own", x, y) if whole else from_arrays("own", x, y, x[:50] + 1, y[:50])
    assert fitted(made)


def test_no_table_without_a_fitted_step_is_accused():
    """200 tables; a continuous column has a mean this near to 0 with probability below 1e-3, three of five with 1e-8."""
    normal = [np.random.default_rng(s).normal(size=(400, 5)) for s in range(100)]
    skewed = [table(seed=s)[0] for s in range(100)]
    assert not [
        n for n, x in enumerate([*normal, *skewed]) if fitted(from_arrays("own", x, np.arange(400) % 2))
    ]
    balanced = np.sign(np.random.default_rng(0).permuted(np.tile([[-1.0], [1.0]], (200, 6)), axis=0))
    assert not fitted(from_arrays("own", balanced, np.arange(400) % 2, balanced[:20], np.arange(20) % 2))


@pytest.mark.parametrize("name", ["cancer", "digits"])
def test_a_shipped_dataset_and_its_features_are_clean_and_the_fitted_scaler_is_not(name):
    raw = load(name)
    assert not look(raw, lambda rows: rows).leaks
    if raw.pixel_range is None:
        assert look(fit_scale(raw), lambda rows: rows).leaks and look(raw, fit_scale).moved > 0.5


@pytest.mark.parametrize("how", [None, "standardised"])
def test_the_audit_of_a_run_accuses_a_table_that_was_standardised_on_its_own_rows(tmp_path, how):
    """The ledger cannot know: the file came like that. Its promise is sound by what was told, and does not hold."""
    x, y = table(how)
    np.savez(
        tmp_path / "own.npz", x=x.astype(np.float32), y=y, x_test=x[:40].astype(np.float32), y_test=y[:40]
    )
    config = make_config({
        "dataset": str(tmp_path / "own.npz"), "recipe": "fed-cdp-sound", "clients": 2, "partition": "iid", "rounds": 1,
        "local_steps": 1, "batch_size": 1000, "model": "logistic", "report": False, "protect": {"sigma": 1.0},
    })  # fmt: skip
    simulate(config, tmp_path / "run")
    figures, code = campaign.audit_run(tmp_path / "run", canaries_count=60)
    assert (figures["verdict"] == "promise broken", code) == (how is not None, int(how is not None)), figures
    assert figures["preparation"]["leaks"] == (how is not None)
    assert how is None or "private rows" in figures["reason"]
