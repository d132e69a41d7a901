"""The question game: a server asks a node 1,000 paired questions and guesses which of two neighbouring tables it holds.

    python tests/tools/questions.py --pairs 1000 --out questions.json

Both tables are known to the server; they differ in one record (its label, an unknown label, a cell that is no number, a
record that is missing, one at the edge of every range). Each pair puts the same question to two nodes, one with each table, in
a random order; the number of the pair decides everything but the nodes' noise. Questions are greetings, honest rounds, rounds
at the edges of the contract, a model of the server's own, and requests for more than was agreed. The contract is the one that
`fedveil flower contract` writes, without the check of changes.

Three servers guess. `bytes` sees everything but the values of noised updates; where that is equal it can but toss a coin.
`values` compares the updates along the difference of the two tables' mean updates, which it finds by playing both nodes itself
with next to no noise. `time` takes the slower answer for the odd table (on a busy machine; reported, not judged). An advantage is
(right - wrong) / pairs, with its 95 % bounds (Clopper-Pearson). Exit code 1 if the bytes of any pair differ, if the lower bound
of `bytes` or `values` is above 0 (an honest node: 1 in 40 each), or if the saturating server gets a row.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = tuple((f"c{n}", 0.0, 1.0) for n in range(12))
ROWS, SMALL_NOISE = 60, 1e-3
NEIGHBOURS = ("label", "unknown label", "no number", "missing", "edge")
QUESTIONS = ("hello", "round", "round", "edges", "own model", "split", "target", "classes", "clip", "rate")
ANSWERED = ("round", "edges", "own model")


def table(seed: int = 3) -> list[list[str]]:
    """The rows that both tables share, and the one at the end that tells them apart."""
    draw = np.random.default_rng(seed)
    return [[*(f"{v:.4f}" for v in draw.random(12)), "flu" if draw.random() < 0.4 else "healthy"] for _ in range(ROWS)]


def write_table(path: Path, rows: list[list[str]]) -> None:
    """A node's file."""
    lines = [",".join([*(name for name, _, _ in COLUMNS), "outcome"]), *(",".join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")


def neighbour(rows: list[list[str]], kind: str) -> list[list[str]]:
    """The table with another last record."""
    last = rows[-1]
    other = {
        "label": [[*last[:-1], "flu" if last[-1] == "healthy" else "healthy"]],
        "unknown label": [[*last[:-1], "plague"]],
        "no number": [["forty-two", *last[1:]]],
        "missing": [],
        "edge": [[*["1.0"] * 12, last[-1]]],
    }[kind]
    return [*rows[:-1], *other]


def agreed(config: Any, epsilon: float | None = 1e6, **bounds: Any) -> Any:
    """The contract of a study with this configuration; the check of changes is left out, so that the server gets further."""
    from fedveil.flower.contract import Data
    from fedveil.flower.onboard import contract_of_study

    made = contract_of_study(config, Data("outcome", ("healthy", "flu"), ROWS, COLUMNS), study="game", epsilon=epsilon)
    return replace(made, checks=replace(made.checks, change=False), bounds=replace(made.bounds, **bounds))


def configured(**more: Any) -> Any:
    """The study's configuration, or what a server writes in its place."""
    from fedveil.errors import UserError
    from fedveil.federation.config import make_config

    values = {"recipe": "fed-cdp", "clients": 2, "rounds": 10, "local_steps": 3, "batch_size": 4, "learning_rate": 0.1,
              "model": "papers-mlp", "model_options": {"hidden": [4]}, "delta": 1e-5}  # fmt: skip
    try:
        return make_config({**values, **more})
    except UserError:
        return make_config(values).model_copy(update=more)


def question(kind: str) -> tuple[str, dict[str, Any], np.ndarray]:
    """(kind of message, facts without the contract's, weights)."""
    from fedveil.models import nets
    from fedveil.models.layout import flatten

    changes: dict[str, dict[str, Any]] = {
        "edges": {"protect": {"clip.bound": configured().built_recipe().clip.bound.value(0, 10)}},
        "split": {"split_seed": 5, "limit": 7}, "target": {"target": "c3"}, "clip": {"protect": {"clip.bound": 1e-36}},
        "rate": {"learning_rate": 1e38},
    }  # fmt: skip
    config = configured(**changes.get(kind, {}))
    weights = flatten(nets.build("papers-mlp", (12,), 2, 0, hidden=[4]))
    facts = {"config": config.model_dump(), "run": "r", "examples": 2 * ROWS, "shape": [12],
             "classes": 3 if kind == "classes" else 2, "model": "papers-mlp",
             "round": 1 if kind == "own model" else 0, "ticket": 1, "nonce": "0" * 32}  # fmt: skip
    if kind == "own model":
        weights = weights * np.float32(50)
    return "hello" if kind == "hello" else "round", json.loads(json.dumps(facts)), weights


class Node:
    """A node with a table of its own under a contract."""

    def __init__(self, place: Path, contract: Any, rows: list[list[str]]) -> None:
        from fedveil.flower.contract import write_contract
        from fedveil.flower.owner import Owner

        place.mkdir()
        write_contract(place / "contract.toml", contract)
        write_table(place / "own.csv", rows)
        self.contract, self.cache = contract, dict[str, Any]()
        self.owner = Owner(place / "home", 0, contract=str(place / "contract.toml"), contract_digest=contract.digest,
                           data=str(place / "own.csv"))  # fmt: skip

    def ask(self, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray], float]:
        """(facts, arrays, seconds) of the answer. A trainer keeps its cache; so does this node."""
        from fedveil.flower import node

        word, facts, weights = question(kind)
        begun = time.perf_counter()
        said, sent = node.answer(word, {**facts, "data": self.contract.data.digest}, {"weights": weights}, self.owner,
                                 cache=self.cache)  # fmt: skip
        return said, sent, time.perf_counter() - begun

    def charged(self) -> int:
        """Bytes of the ledger."""
        from fedveil.flower import books

        path = books.ledger_path(self.owner.home)
        return path.stat().st_size if path.exists() else 0

    def forget(self) -> None:
        """Begin with an empty ledger: a long one only takes time."""
        from fedveil.flower import books

        shutil.rmtree(self.owner.home, ignore_errors=True)
        books.anchor_path(self.owner).unlink(missing_ok=True)


def form(said: dict[str, Any], sent: dict[str, np.ndarray]) -> bytes:
    """The answer's bytes, with zeros for the values of what is noised."""
    from fedveil.flower import wire

    return wire.pack(said, {name: np.zeros_like(value) for name, value in sent.items()})


def directions(place: Path, repeats: int) -> dict[tuple[str, str], np.ndarray]:
    """For each neighbour and answered question the difference of mean updates, found with next to no noise."""
    contract = agreed(configured(protect={"sigma": SMALL_NOISE}), epsilon=None, sigma=(0.0, 1e6))
    rows, means = table(), dict[tuple[str, str], np.ndarray]()
    for name in ("same", *NEIGHBOURS):
        node = Node(place / f"own {name}", contract, rows if name == "same" else neighbour(rows, name))
        for kind in ANSWERED:
            seen = [update for _ in range(repeats) if (update := _quietly(node, kind)) is not None]
            if seen:
                means[name, kind] = np.mean(seen, axis=0)
    return {(name, kind): mean - means["same", kind] for (name, kind), mean in means.items() if name != "same"}


def _quietly(node: Node, kind: str) -> np.ndarray | None:
    """The update of the server's own copy of the node, asked with next to no noise; None if it refuses."""
    from fedveil.flower import node as nodes

    word, facts, weights = question(kind)
    facts["config"]["protect"] = {**(facts["config"].get("protect") or {}), "sigma": SMALL_NOISE}
    facts["data"] = node.contract.data.digest
    _, sent = nodes.answer(word, facts, {"weights": weights}, node.owner, cache=node.cache)
    return sent["update"].astype(np.float64) if "update" in sent else None


def interval(right: int, wrong: int) -> dict[str, Any]:
    """Advantage (right - wrong) / all, with its 95 % bounds."""
    from scipy.stats import beta

    count = right + wrong
    if count == 0:
        return {"guesses": 0, "advantage": 0.0, "bounds": [-1.0, 1.0]}
    low = beta.ppf(0.025, right, wrong + 1) if right else 0.0
    high = beta.ppf(0.975, right + 1, wrong) if wrong else 1.0
    bounds = [round(2 * low - 1, 4), round(2 * high - 1, 4)]
    return {"guesses": count, "advantage": round((right - wrong) / count, 4), "bounds": bounds}


def pairs(count: int, place: Path) -> Iterator[dict[str, Any]]:
    """Play; each pair as what the three servers saw of it."""
    contract, rows = agreed(configured()), table()
    tables = {"same": rows} | {name: neighbour(rows, name) for name in NEIGHBOURS}
    nodes = {name: Node(place / name, contract, held) for name, held in tables.items()}
    for number in range(count):
        rng = random.Random(number)
        for node in nodes.values() if number % 50 == 0 else ():
            node.forget()
        name, kind = rng.choice(NEIGHBOURS), rng.choice(QUESTIONS)
        order = ["same", name] if rng.random() < 0.5 else [name, "same"]
        before = {who: nodes[who].charged() for who in order}
        seen = {who: nodes[who].ask(kind) for who in order}
        forms = [form(*seen[who][:2]) for who in ("same", name)]
        costs = {nodes[who].charged() > before[who] for who in order}
        yield {"neighbour": name, "question": kind, "status": seen["same"][0]["status"], "equal": forms[0] == forms[1],
               "coin": rng.random() < 0.5,
               "charged": sorted(costs), "updates": [seen[who][1].get("update") for who in ("same", name)],
               "seconds": [seen[who][2] for who in ("same", name)]}  # fmt: skip


def ceiling(place: Path) -> float:
    """The largest advantage that the ledger's promise about one round allows: (e^epsilon - 1 + 2 delta) / (e^epsilon + 1)."""
    from fedveil.privacy.ledger import Ledger

    contract = agreed(configured())
    node = Node(place / "once", contract, table())
    assert node.ask("round")[0]["status"] == "ok"
    epsilon = Ledger.read(node.owner.home / "ledger.jsonl").spent(0, "server", "example", contract.delta)
    return (math.exp(epsilon) - 1 + 2 * contract.delta) / (math.exp(epsilon) + 1)


def rows_extracted(place: Path, rounds: int = 40) -> int:
    """Rows that a saturating server reads from first-layer updates: tiny clips, batches of one, a model of its own.

    A row counts if an update's line is parallel to it (cosine above 0.9999); in 12 dimensions chance makes none.
    """
    from fedveil.flower import node as nodes
    from fedveil.flower.owndata import read_rows

    contract = agreed(configured(), clip=(0.5, 4.0), batch=(1.0, 100.0), learning_rate=(0.0, 1.0))
    held = Node(place / "milked", contract, table())
    x = np.asarray(read_rows(held.owner.data, contract.data).x, np.float64)
    found: set[int] = set()
    for number in range(rounds):
        for bound in (1e-36, 1e-10, 0.5):
            _, facts, weights = question("own model")
            facts |= {"run": f"{number} {bound}", "config": configured(
                protect={"clip.bound": bound}, batch_size=1.0, learning_rate=1.0, local_steps=1).model_dump()}  # fmt: skip
            _, sent = nodes.answer("round", {**facts, "data": contract.data.digest}, {"weights": weights}, held.owner)
            if "update" not in sent:
                continue
            lines = sent["update"][:48].reshape(4, 12).astype(np.float64)
            cosines = np.abs(lines @ x.T) / (np.linalg.norm(lines, axis=1)[:, None] * np.linalg.norm(x, axis=1) + 1e-30)
            found |= set(np.nonzero((cosines > 0.9999).any(axis=0))[0].tolist())
    return len(found)


def play(count: int, repeats: int = 8) -> dict[str, Any]:
    """The whole game."""
    with tempfile.TemporaryDirectory(prefix="questions") as folder:
        place = Path(folder)
        along = directions(place, repeats)
        by_bytes, by_values, by_time, seconds = [0, 0], [0, 0], [0, 0], [0.0, 0.0]
        statuses: dict[str, int] = {}
        different, unequal_costs = 0, 0
        for pair in pairs(count, place):
            statuses[pair["status"]] = statuses.get(pair["status"], 0) + 1
            unequal_costs += len(pair["charged"]) > 1
            different += not pair["equal"]
            by_bytes[0 if not pair["equal"] or pair["coin"] else 1] += 1  # equal bytes: the server can but toss a coin
            one, two = pair["seconds"]
            by_time[0 if two > one else 1] += 1
            seconds = [seconds[0] + one, seconds[1] + two]
            first, second = pair["updates"]
            kind = (pair["neighbour"], "round" if pair["question"] == "split" else pair["question"])
            if first is not None and second is not None:
                score = float(along.get(kind, np.ones(first.size)) @ (second.astype(np.float64) - first))
                by_values[0 if score > 0 else 1] += 1
        upper = 1 - 0.05 ** (1 / count) if different == 0 else None
        return {
            "pairs": count, "answers": statuses, "pairs whose bytes differ": different,
            "pairs charged differently": unequal_costs,
            "chance of a difference, 95 % bound": upper and round(upper, 5), "bytes": interval(*by_bytes),
            "values": interval(*by_values), "values, at most by the promise": round(ceiling(place), 4),
            "time": interval(*by_time),
            "mean seconds (same, neighbour)": [round(s / count, 4) for s in seconds], "rows extracted": rows_extracted(place),
        }  # fmt: skip


def main() -> int:
    """Play and judge."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--pairs", type=int, default=1000)
    parse.add_argument("--out", type=Path)
    given = parse.parse_args()
    found = play(given.pairs)
    text = json.dumps(found, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)
    lost = found["pairs whose bytes differ"] or found["pairs charged differently"] or found["rows extracted"]
    return 1 if lost or any(found[kind]["bounds"][0] > 0 for kind in ("bytes", "values")) else 0


if __name__ == "__main__":
    sys.exit(main())
