"""Play the secure sum's state machines over random schedules and against lying servers.

    python tests/tools/schedules.py --state schedules.json

Each run has a number, and the number decides it: an interrupted series goes on where it was, and a failure is repeated with
--only KIND NUMBER. The kinds:

    network  10,000  up to 12 nodes: drops, any order, duplicates, forgeries, messages of other attempts and rounds, restarts
                     from journals, members that give wrong shares; the sum is exact or there is none
    liar      2,000  a server that shows nodes different members and survivors, with c colluding nodes that sign everything:
                     the closure of what they can derive is at most one sum of enough honest nodes
    twin      2,000  the same, and seeds are written down that give it the identical transcript for other inputs with this sum
    sixty       180  `network` with 60 nodes
    sixty-liar   20  `liar` with 60 nodes

In all of them no honest node gives away shares of both kinds, or two different messages of one stage.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "secure_sum"))

import test_coalition
from sums import bad_network, numbers

from fedveil.secure_sum import masks, messages

COUNTS = {"network": 10_000, "liar": 2_000, "twin": 2_000, "sixty": 180, "sixty-liar": 20}


def one(kind: str, number: int) -> str:
    """Play one run: "sum" or "none"; AssertionError if something is wrong."""
    draw = random.Random(f"{kind} {number}")
    if kind == "network":
        n, t, c = numbers(draw, 12)
        found = bad_network(draw, n, t, c, draw.choice([0.3, 1.0, 2.0]), spoil=0.3)
    elif kind == "sixty":
        found = bad_network(draw, 60, draw.randint(36, 48), 8, draw.choice([0.1, 0.5, 1.0]), spoil=0.3)
    elif kind == "liar":
        found = bool(test_coalition.lie(number, 12))
    elif kind == "sixty-liar":
        liar = test_coalition.Liar(draw, 60, draw.randint(36, 48), 8)
        liar.play()
        found = bool(test_coalition.check(liar))
    else:
        usual, masks.add_all = masks.add_all, test_coalition._seed_is_mask
        try:
            found = test_coalition.twin(number, 12)
        finally:
            masks.add_all = usual
    return "sum" if found else "none"


def main() -> int:
    """Play on from where the state file ends; exit code 1 if anything went wrong."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--kinds", nargs="+", choices=COUNTS, default=list(COUNTS))
    parse.add_argument("--share", type=float, default=1.0, help="of the runs of each kind")
    parse.add_argument("--state", type=Path)
    parse.add_argument(
        "--only", nargs=2, metavar=("KIND", "NUMBER"), help="repeat one run, with its traceback"
    )
    given = parse.parse_args()
    # Whether a signature is right is a function of its bytes: many nodes in one process ask once.
    messages.verify = lru_cache(1 << 16)(messages.verify)
    if given.only:
        print(one(given.only[0], int(given.only[1])))
        return 0
    state = {"next": {}, "counts": {}, "failures": [], "seconds": 0.0}
    if given.state and given.state.exists():
        state = json.loads(given.state.read_text())
    counts = Counter(state["counts"])
    for kind in given.kinds:
        last, saved = round(COUNTS[kind] * given.share), time.process_time()
        for number in range(state["next"].get(kind, 0), last):
            try:
                outcome = one(kind, number)
            except Exception:
                outcome = "failed"
                state["failures"].append([kind, number, traceback.format_exc(limit=-1)])
                print(kind, number, traceback.format_exc(limit=-1), flush=True)
            counts[f"{kind} {outcome}"] += 1
            state["next"][kind] = number + 1
            if time.process_time() - saved > 5 or number + 1 == last:
                state["seconds"] += time.process_time() - saved
                saved = time.process_time()
                _keep(given.state, {**state, "counts": dict(sorted(counts.items()))})
    print(json.dumps({**state, "counts": dict(sorted(counts.items()))}, indent=1))
    return 1 if state["failures"] else 0


def _keep(path: Path | None, state: dict[str, object]) -> None:
    if path:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state, indent=1))
        os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
