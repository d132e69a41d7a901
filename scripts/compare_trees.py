#!/usr/bin/env python
"""Play every recipe with every engine in two source trees on this machine and compare what comes out.

    python scripts/compare_trees.py OLD/src NEW/src [--set key=value …]

Compared: a digest of the trained weights, every row of the ledger, and the text of refusals. Bits depend on the machine, so
this is a tool for a change that is meant to leave them alone, never a test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PLAY = r"""
import hashlib, json, sys, tempfile, warnings
warnings.filterwarnings("ignore")
import numpy as np
import fedveil as fv
extra = dict(pair.split("=", 1) for pair in json.loads(sys.argv[1]))
extra = {k: json.loads(v) if v[:1] in "0123456789.tf[{-" else v for k, v in extra.items()}
base = {"dataset": "cancer", "clients": 4, "rounds": 3, "local_steps": 4, "batch_size": 8, "sigma": 2.0, "seed": 3}
variants = {"": {}, "mean": {"noise_on": "mean"}, "fixed": {"sampling": "fixed"}, "partition": {"sampling": "partition"},
            "split": {"clip.split": True}, "cohort": {"cohort_size": 2, "cohort": "poisson"}}
out = {}
for name in fv.recipes():
    for engine in ("native", "stacked", "functional", "reference"):
        for label, change in variants.items():
            if label and engine != "native":
                continue
            values = {**base, "engine": engine, **change, **extra}
            if name == "sum-cdp":
                values["local_steps"] = 1
            if "sigma" in name or "dyn" in name or name == "nbafl":
                values.pop("sigma")
            try:
                result = fv.run(name, out=tempfile.mkdtemp() + "/r", **values)
            except Exception as refused:
                out[f"{name} {engine} {label}"] = {"refused": f"{type(refused).__name__}: {refused}"}
                continue
            weights = np.concatenate([v.numpy().reshape(-1) for v in result.state_dict().values()])
            rows = [[r["observer"], r["unit"], r["verdict"], r["epsilon"], r["relation"]] for r in result.ledger]
            out[f"{name} {engine} {label}"] = {
                "weights": hashlib.sha256(weights.tobytes()).hexdigest()[:16], "norm": float(np.linalg.norm(weights)),
                "ledger": sorted(rows, key=str),
            }
print(json.dumps(out))
"""


def play(tree: Path, changes: list[str]) -> dict[str, dict[str, object]]:
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", PLAY, json.dumps(changes)],
            env=environment, cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode:
        sys.exit(f"{tree}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="changes", help="key=value for both trees")
    parser.add_argument("--cache", type=Path, help="keep the old tree's answers in this file")
    given = parser.parse_args()
    if given.cache and given.cache.exists():
        before = json.loads(given.cache.read_text())
    else:
        before = play(given.old, given.changes)
        if given.cache:
            given.cache.write_text(json.dumps(before))
    after = play(given.new, given.changes)
    different = 0
    for case in sorted(before.keys() | after.keys()):
        old, new = before.get(case, {}), after.get(case, {})
        said = [f"  {key}: {old.get(key)} -> {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]
        if said:
            different += 1
            print(case, *said, sep="\n")
    print(f"{len(after)} cases, {different} differ")


if __name__ == "__main__":
    main()
