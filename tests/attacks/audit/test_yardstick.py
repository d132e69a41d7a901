"""The bounds of this audit beside those of jax_privacy (2.0), on the same canary scores of a real run.

Runs where that package is installed (`pip install --no-deps jax-privacy`: its auditing module needs neither JAX nor Flax).
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from fedveil.attacks.audit import bounds, canaries
from fedveil.federation.config import make_config
from fedveil.federation.loop import prepare


@pytest.fixture(scope="module")
def other():
    package = importlib.util.find_spec("jax_privacy")
    if package is None or package.origin is None:
        pytest.skip("jax_privacy is not installed")
    where = Path(package.origin).with_name("auditing.py")
    spec = importlib.util.spec_from_file_location("yardstick_auditing", where)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_bounds_agree_with_an_independent_implementation_on_the_same_scores(other):
    config = make_config({
        "dataset": "digits", "recipe": "fed-cdp-sound", "clients": 4, "partition": "iid", "rounds": 4, "local_steps": 1,
        "batch_size": 1000, "model": "papers-mlp", "protect": {"sigma": 1.0},
    })  # fmt: skip
    prepared = prepare(config)
    staged = canaries.stage(prepared, 700, 3, rounds=4)
    scores, cut = canaries.score(staged, prepared, 4)
    theirs, fixed, delta = (
        other.CanaryScoreAuditor(scores.included, scores.excluded),
        other.Explicit(cut),
        1e-5,
    )

    def ours(bound):
        return bounds.lower_bound(scores, bound, 0.05, "fixed", threshold=cut)

    assert ours(bounds.one_run_bound(delta)) == pytest.approx(
        theirs.epsilon_one_run(0.05, delta, threshold_strategy=fixed), abs=1e-4
    )
    assert ours(bounds.one_run_bound(delta, fdp=True)) == pytest.approx(
        theirs.epsilon_one_run_fdp(0.05, delta, threshold_strategy=fixed), abs=1e-3
    )
    assert ours(bounds.clopper_pearson_bound(delta)) == pytest.approx(
        theirs.epsilon_clopper_pearson(0.05, delta=delta, one_sided=False, threshold_strategy=fixed), abs=1e-4
    )
