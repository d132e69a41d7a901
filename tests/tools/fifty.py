"""Fifty nodes in fifty processes play ten rounds while five of them, drawn anew each round, fail.

    python tests/tools/fifty.py --nodes 50 --rounds 10 --failing 5 --out fifty.json

Each node is a persistent trainer (`fedveil.flower.trainer`) in a process of its own behind a Unix socket, with its own folder,
ledger and anchor; they are forks of one loaded process, which makes them light. Messages go through a grid in memory, all
nodes at once, as real Flower messages. A failing node is killed before it is asked, killed or frozen while it works, or its
reply is lost or turned into rubbish. The seed decides who and how. Whoever was killed is started again for the next round, as
`fedveil flower node` does. Exit code 1 unless the run ends, every node that did not fail is in every round, and no ledger
counts less than what was answered or asked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

FAULTS = ("killed before", "killed while working", "frozen", "reply lost", "rubbish")
POLICY = 'recipes = ["fed-cdp"]\nmaximum_epsilon = 1e6\n'


class Sites:
    """The nodes' trainers, each in a process."""

    def __init__(self, place: Path, nodes: int) -> None:
        self.place, self.pids = place, dict[int, int]()
        (place / "policy.toml").write_text(POLICY)
        for number in range(nodes):
            self.start(number)

    def config(self, number: int) -> dict[str, Any]:
        """The node's --node-config."""
        return {"home": str(self.place / f"n{number}"), "policy": str(self.place / "policy.toml"), "partition-id": number}

    def socket(self, number: int) -> str:
        return str(self.place / f"{number}.sock")

    def start(self, number: int) -> None:
        """A trainer that serves until it is killed."""
        pid = os.fork()
        if pid == 0:
            from fedveil.flower import trainer
            from fedveil.flower.owner import owner_of

            code = 1
            try:
                trainer.serve(self.socket(number), owner_of(self.config(number)))
                code = 0
            finally:
                os._exit(code)
        self.pids[number] = pid

    def send(self, number: int, what: int) -> None:
        """A signal to a trainer; one that was killed is buried."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pids[number], what)
            if what == signal.SIGKILL:
                os.waitpid(self.pids[number], 0)

    def end(self) -> None:
        for number in self.pids:
            self.send(number, signal.SIGKILL)


def grid_of(sites: Sites, nodes: int, failing: int, draw: random.Random) -> Any:
    """A grid that asks all nodes at once, and lets some fail."""
    from flwr.app import Message

    from fedveil.flower import client_app, wire
    from fedveil.flower.grid import LocalGrid

    class Grid(LocalGrid):
        faults: dict[int, str]
        counts: Counter[str]
        answered: Counter[int]

        def begin(self) -> None:
            self.faults, self.counts, self.answered = {}, Counter(), Counter()
            self.pool, self.lock, self.number = ThreadPoolExecutor(nodes), threading.Lock(), -1
            self.late: dict[str, Future[Any]] = {}

        def new_round(self, number: int) -> None:
            """Mend what failed in the round before, and draw who fails in this one."""
            for node, fault in self.faults.items():
                if fault == "frozen":
                    sites.send(node, signal.SIGCONT)
                elif fault.startswith("killed"):
                    sites.start(node)
            self.number, self.faults = number, {n: draw.choice(FAULTS) for n in draw.sample(range(nodes), failing)}
            for node, fault in self.faults.items():
                self.counts[fault] += 1
                if fault == "killed before":
                    sites.send(node, signal.SIGKILL)
                elif fault != "reply lost" and fault != "rubbish":
                    what = signal.SIGSTOP if fault == "frozen" else signal.SIGKILL
                    threading.Timer(draw.uniform(0.0, 1.0), sites.send, (node, what)).start()

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            out = []
            for message in messages:
                facts = wire.read(message)[0]
                if message.metadata.message_type == "train" and facts["round"] != self.number:
                    self.new_round(facts["round"])
                name = f"m{len(self.sent)}"
                message.metadata.__dict__["_message_id"] = name
                self.sent.append(message)
                self.late[name] = self.pool.submit(self._answers, message)
                out.append(name)
            return out

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            done = [name for name in message_ids if name in self.late and self.late[name].done()]
            return [reply for name in done for reply in self.late.pop(name).result()]

    def tamper(node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        facts, arrays = ({}, {}) if reply.has_error() else wire.read(reply)
        with grid.lock:
            grid.answered[node] += facts.get("status") == "ok"
        fault = grid.faults.get(node)
        if fault == "reply lost":
            return []
        if fault == "rubbish":
            return [wire.answer(message, {**facts, "ticket": 0}, arrays)]
        return [reply]

    grid = Grid(client_app(), {n: {**sites.config(n), "trainer": sites.socket(n)} for n in range(nodes)}, tamper)
    grid.begin()
    return grid


def load(config: Any) -> None:
    """Everything that a trainer loads, once, before any fork."""
    from fedveil.federation import loop

    with tempfile.TemporaryDirectory() as place:
        loop.run(config.model_copy(update={"clients": 2, "rounds": 1}), Path(place) / "x")


def play(nodes: int, rounds: int, failing: int, seed: int, place: Path) -> dict[str, Any]:
    """The run, and what is wrong with it."""
    from fedveil.federation.config import make_config
    from fedveil.federation.store import open_run
    from fedveil.flower.node import ledger_of
    from fedveil.flower.server import Options, serve

    config = make_config({"recipe": "fed-cdp", "dataset": "cancer", "partition": "iid", "clients": nodes, "rounds": rounds,
                          "local_steps": 2, "batch_size": 2, "delta": 1e-4, "report": False})  # fmt: skip
    load(config)
    sites = Sites(place, nodes)
    begun = time.monotonic()
    try:
        grid = grid_of(sites, nodes, failing, random.Random(seed))
        result = serve(grid, config, Options(out=str(place / "run"), join=120.0, deadline=60.0, poll=0.05))
        used = time.monotonic() - begun
    finally:
        sites.end()
    run = open_run(place / "run")
    arrived = [line["arrived"] for line in run.metrics]
    own = [int(ledger_of(place / f"n{n}").participations()[0]) for n in range(nodes)]
    wrong = []
    if result["rounds"] != rounds or [line["round"] for line in run.metrics] != list(range(1, rounds + 1)):
        wrong.append("rounds are missing")
    if min(arrived) < nodes - failing:
        wrong.append(f"a node that did not fail was not heard: {arrived}")
    if run.ledger().participations().tolist() != [rounds] * nodes:
        wrong.append("the server's ledger under-counts")
    for node, answered in grid.answered.items():
        if own[node] < answered:
            wrong.append(f"node {node} answered {answered} times, its ledger counts {own[node]}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"nodes": nodes, "rounds": rounds, "arrived": arrived, "faults": dict(grid.counts), "charged at nodes": sum(own),
            "answered by nodes": sum(grid.answered.values()), "seconds": round(used, 1), "largest node, MB": peak // 1024,
            "wrong": wrong}  # fmt: skip


def main() -> int:
    """Play and judge."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("nodes", 50), ("rounds", 10), ("failing", 5), ("seed", 7)):
        parse.add_argument(f"--{name}", type=int, default=value)
    parse.add_argument("--out", type=Path)
    given = parse.parse_args()
    with tempfile.TemporaryDirectory(prefix="fifty") as place:
        found = play(given.nodes, given.rounds, given.failing, given.seed, Path(place))
    text = json.dumps(found, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads may still wait for nodes that were killed
