"""A stranger's run directory cannot run code."""

import json
import subprocess
import sys

import pytest

from fedveil.errors import UserError
from fedveil.federation.config import load_config
from fedveil.federation.loop import run
from fedveil.federation.store import open_run, refuse_foreign_code

SMALL = ["dataset=cancer", "clients=3", "rounds=2", "local_steps=2", "report=false"]


@pytest.mark.parametrize("key", ["dataset", "model"])
@pytest.mark.parametrize("command", ["attack", "audit", "resume"])
def test_code_named_by_a_run_directory_is_not_imported_unasked(tmp_path, key, command):
    folder = tmp_path / "run"
    run(load_config("fed-cdp-sound", SMALL), folder)
    facts = json.loads((folder / "run.json").read_text())
    facts["config"][key] = "trap:spring"
    (folder / "run.json").write_text(json.dumps(facts))
    (tmp_path / "trap.py").write_text(
        "open('sprung', 'w').close()\ndef spring(*a, **k): raise SystemExit(7)\n"
    )
    words = (
        ["run", "fed-cdp-sound", "--resume", "--out", str(folder)]
        if command == "resume"
        else [command, str(folder)]
    )
    done = subprocess.run(
        [sys.executable, "-m", "fedveil", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and "--trust-code" in done.stderr
    assert not (tmp_path / "sprung").exists()
    with pytest.raises(UserError):
        refuse_foreign_code(open_run(folder), False)
    refuse_foreign_code(open_run(folder), True)
