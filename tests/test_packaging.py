"""The package installs from a wheel, also where there is no compiler, and its metadata say for which Pythons."""

import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def sdist(folder):
    """The source distribution, made by the build backend; nothing compiled is in it."""
    pytest.importorskip("scikit_build_core", reason="the build backend is not installed here")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True, cwd=ROOT, timeout=300)
    (made,) = folder.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = archive.getnames()
    assert any(name.endswith("src/native/module.cpp") for name in names) and not any(name.endswith(".so") for name in names)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "compiler"), [("tree", True), ("tree", False), ("sdist", False)])
def test_a_wheel_builds_installs_and_runs(kind, compiler, tmp_path):
    """Dependencies are those of this environment: what is tested is the wheel."""
    env = {**os.environ, **({} if compiler else {"CC": "/bin/false", "CXX": "/bin/false"})}
    source = sdist(tmp_path) if kind == "sdist" else ROOT
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert compiler or wheel.name.endswith("py3-none-any.whl"), wheel.name
    place = tmp_path / "venv"
    venv.create(place, with_pip=True, system_site_packages=False)
    python = place / "bin" / "python"
    paths = [p for p in sys.path if p.endswith("site-packages")]
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True, timeout=300)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True
    ).stdout.strip()
    clean = {**os.environ, "PYTHONPATH": os.pathsep.join([site, *paths])}
    there = {"capture_output": True, "text": True, "env": clean, "cwd": tmp_path, "timeout": 600}
    said = subprocess.run([python, "-m", "fedveil", "--version"], **there)
    assert said.stdout.startswith("fedveil "), said.stderr
    ran = subprocess.run(
        [python, "-m", "fedveil", "run", "fed-cdp-sound", "--set", "rounds=1", "--set", "local_steps=1", "--out", "a", "--json"],
        **there,
    )
    assert ran.returncode == 0, ran.stderr
    if not compiler:
        assert "native" not in ran.stdout.split('"engine":')[1].split(",")[0]


def test_metadata_name_the_pythons_that_the_workflow_tests():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text("utf-8")
    for minor in range(10, 14):
        assert f"Python :: 3.{minor}" in text and f'"3.{minor}"' in workflow
