"""One folder of real runs for the dashboard's tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedveil.federation.config import load_config
from fedveil.federation.loop import run as simulate

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, made once."""
    root = tmp_path_factory.mktemp("made")
    small = ["rounds=4", "local_steps=2", "clients=4", "report=false"]
    simulate(load_config("fed-cdp", small), root / "sound")
    simulate(load_config("fed-alpha-cdp", small), root / "nominal")
    return root


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """A folder with good, nested, broken and badly named runs, and a secret beside it."""
    root = tmp_path / "runs"
    root.mkdir()
    for name in ("sound", "nominal"):
        shutil.copytree(made / name, root / name)
    shutil.copytree(made / "sound", root / "deep" / "er" / "nested")
    shutil.copytree(made / "sound", root / EVIL)
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text('{"config": ')
    (root / "odd").mkdir()
    (root / "odd" / "run.json").write_text(json.dumps({"config": {"recipe": EVIL, "rounds": "many"}}))
    shutil.copytree(made / "sound", tmp_path / "secret")
    return root
