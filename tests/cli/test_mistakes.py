"""Typical mistakes (mistakes.toml) end with one clear message, exit code 2, no traceback, and nothing half-written."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from fedveil import cli
from fedveil.federation.config import tomllib

MISTAKES = tomllib.loads((Path(__file__).parent / "mistakes.toml").read_text("utf-8"))["mistakes"]
FILES = {
    "plain.csv": "a,y\n1,1\n2,2\n3,1\n4,2\n5,1\n", "word.csv": "a,y\n1,0\nx,1\n3,0\n4,1\n",
    "lonely.csv": "a,s,y\n1,A,0\n2,A,1\n3,B,0\n4,A,1\n", "notarget.csv": "a,y\n1,\n2,1\n", "empty.csv": "",
    "header.csv": "a,y\n", "ragged.csv": "a,y\n1,0,3\n", "twice.csv": "a,a,y\n1,2,0\n", "tiny.csv": "a,y\n1,0\n",
    "bad.toml": 'recipe = "fed-cdp"\nrounds = "many"\n', "broken.toml": "recipe = \n", 
    "bare.toml": 'dataset = "plain.csv"\ntarget = "y"\n',
    "typo.toml": 'recipe = "fed-cdp"\nroundz = 3\n',
    "theirs.py": "def fails(): raise RuntimeError('disk on fire')\ndef five(): return 5\nvalue = 3\n"
    "def fails_model(shape, classes): raise ValueError('bad layer')\ndef no_module(shape, classes): return 5\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (made / name).write_text(text)
    (made / "latin.csv").write_bytes("größe,y\n1,0\n2,1\n".encode("latin-1"))
    (made / "pictures").mkdir()
    np.savez(made / "shapes.npz", x=np.zeros((4, 3)), y=np.zeros(3))
    np.savez(made / "nan.npz", x=np.array([[1.0, np.nan], [1, 2]]), y=np.array([0, 1]))
    np.savez(made / "nox.npz", y=np.zeros(3))
    np.savez(made / "k.npz", x=np.zeros((6, 2)), y=np.array([1, 2, 3, 1, 2, 3]))
    np.savez(made / "one.npz", x=np.zeros((6, 2)), y=np.zeros(6, int))
    return made


def test_there_are_sixty():
    assert len(MISTAKES) >= 60 and len({words for words, _ in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_ends_with_one_message(words, message, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["fedveil", *words.split(" ")])
    before = set(folder.rglob("*"))
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and "Traceback" not in said
    assert re.fullmatch(r"error: [^\n]+\n", said), said
    assert message in said
    assert {path for path in set(folder.rglob("*")) - before if "__pycache__" not in path.parts} == set()
