"""The papers' federated MNIST setting without privacy learns as it should (real data, minutes)."""

import os

import pytest

from fedveil.federation.config import load_config
from fedveil.federation.loop import run
from fedveil.federation.store import open_run


@pytest.mark.slow
@pytest.mark.skipif("FEDVEIL_DATA" not in os.environ, reason="needs MNIST in FEDVEIL_DATA")
def test_plain_averaging_reaches_95_percent_in_20_rounds_and_96_in_30(tmp_path):
    changes = [
        "recipe=non-private",
        "rounds=30",
        "evaluate_every=10",
        "report=false",
        "diagnostics=false",
        "workers=2",
    ]
    result = run(load_config("papers-mnist", changes), tmp_path / "run")
    at = {line["round"]: line.get("test_accuracy") for line in open_run(tmp_path / "run").metrics}
    assert at[20] >= 0.95
    assert result["test_accuracy"] >= 0.96
