"""Whatever comes from outside is accepted or refused with a sentence and exit code 2; a small part of tests/tools."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil.errors import UserError
from fedveil.federation.config import load_config, make_config


def tool(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_hundred_fuzzed_inputs_are_accepted_or_refused():
    """python tests/tools/fuzz.py --count 100000 does it at length."""
    fuzz = tool("fuzz")
    wrong = [(n, *found) for n in range(132) if (found := fuzz.one(n))[1] not in ("accepted", "refused")]
    assert not wrong


def test_a_few_killed_runs_end_with_the_same_model_and_no_smaller_ledger():
    """python tests/tools/kills.py --count 1000 does it at length."""
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "tools" / "kills.py", "--count", "2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"recipe = 'fed-cdp'\nrounds = " + b"9" * 5000, b"a = " + b"[" * 100_000, b"x" * 2_000_000,
     b"recipe = 'fed-cdp'\nprotect = 1", b"recipe = 'fed-cdp'\ntarget_epsilon = inf",
     b"recipe = 'fed-cdp'\n'clip.bound' = 1e300", b"recipe = 'fed-cdp'\ndelta = nan", b"recipe = 'fed-cdp'\nrounds = 1e30",
     b"recipe = 'fed-cdp'\nclients = 99999999999", b"recipe = 'fed-cdp'\nsigma = 1e-200"],
)  # fmt: skip
def test_odd_configurations_are_refused_with_a_short_sentence(tmp_path, content):
    path = tmp_path / "study.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_config(str(path))
    assert len(str(caught.value)) < 1000


def test_odd_values_from_python_are_refused_too():
    for change in ({"protect": 1}, {"model_options": []}, {"target_epsilon": float("inf")}, {"seed": 10**30}):
        with pytest.raises(UserError):
            make_config({"recipe": "fed-cdp", **change})


def test_a_forbidden_or_full_place_ends_with_exit_code_two(tmp_path):
    (tmp_path / "file").write_text("")
    small = ["dataset=cancer", "clients=3", "rounds=1", "local_steps=1"]
    words = ["run", "fed-cdp", *(w for s in small for w in ("--set", s)), "--out", str(tmp_path / "file" / "run")]
    for command in (words, ["ledger", str(tmp_path / ("x" * 300))], ["run", str(tmp_path / "absent.toml")]):
        done = subprocess.run([sys.executable, "-m", "fedveil", *command], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
