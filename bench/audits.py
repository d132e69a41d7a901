"""Does the audit keep what it says? Correct runs accused, broken ones caught with the power stated in advance.

python -m bench.audits run OUT.jsonl [--correct 300] [--broken 40] [--only KIND]    one line per audit; called again it goes on
python -m bench.audits table OUT.jsonl …                               the table of docs/attacks.md

Level 0.1% everywhere. Every setting is planned first: as many canaries as find half the noise in 99% of all audits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from fedveil.attacks import campaign
from fedveil.attacks.audit import canaries, coalition, lowbits, plan
from fedveil.attacks.campaign import BITS_SHARE
from fedveil.attacks.membership import exact_interval
from fedveil.federation.config import RunConfig, make_config
from fedveil.federation.loop import prepare
from fedveil.federation.loop import run as simulate
from fedveil.privacy.ledger import Ledger

LEVEL, FACTOR = 0.001, 2.0


@dataclass(frozen=True)
class Setting:
    """A kind of run that is audited: its configuration without noise and clip, and its noise."""

    values: dict[str, Any]
    sigma: float

    def config(
        self, *, noise: float = 1.0, clip: float = 1.0, rate: float = 1.0, grid: float | None = None
    ) -> RunConfig:
        """noise: times the promised noise. clip: a bound so many times too large, with the noise as it was. rate: times the
        promised sampling rate."""
        protect: dict[str, Any] = {"sigma": self.sigma * noise / clip, "clip.bound": clip}
        if grid is not None:
            protect["grid"] = grid
        batch = self.values["batch_size"] * rate
        return make_config({**COMMON, **self.values, "batch_size": batch}, protect)


COMMON: dict[str, Any] = {
    "dataset": "digits",
    "partition": "iid",
    "local_steps": 1,
    "learning_rate": 0.1,
    "report": False,
}
SETTINGS = {
    "uploads, all records": Setting(
        {"recipe": "fed-cdp-sound", "model": "papers-mlp", "clients": 4, "rounds": 4, "batch_size": 1000.0}, 1.7
    ),
    "uploads, sampled": Setting(
        {"recipe": "fed-cdp-sound", "model": "papers-mlp", "clients": 4, "rounds": 60, "batch_size": 120.0}, 2.0
    ),
    "sum, sampled": Setting(
        {"recipe": "sum-cdp", "model": "logistic", "clients": 6, "rounds": 60, "batch_size": 80.0}, 2.0
    ),
    "whole clients": Setting(
        {"recipe": "fed-sdp-client", "model": "logistic", "clients": 450, "rounds": 4, "batch_size": 3.0, "cohort_size": None},
        1.3,
    ),
    "sum under masks, coalition": Setting(
        {"recipe": "sum-cdp", "model": "logistic", "clients": 6, "rounds": 2, "batch_size": 1000.0, "secure_sum": True,
         "sum_threshold": 5, "sum_colluders": 1}, 1.1
    ),
}  # fmt: skip
BROKEN: dict[str, dict[str, float]] = {
    "half the noise": {"noise": 0.5},
    "no clipping": {"clip": 30.0},
    "twice the sampling rate": {"rate": 2.0},
}
PREPARED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "standardised": lambda x: (x - x.mean(0)) / x.std(0),
    "least and largest": lambda x: (x - x.min(0)) / (x.max(0) - x.min(0)),
    "public range": lambda x: np.clip(x / 50 - 1, -1, 1),
}


@cache
def ledger_of(name: str, rounds: int) -> Ledger:
    """What a setting promises after so many rounds; no seed changes it."""
    return canaries.as_planned(prepare(SETTINGS[name].config()), rounds)


def planned(name: str) -> plan.Plan:
    """How many canaries find half the noise in 99% of all audits of a setting."""
    config = SETTINGS[name].config()
    unit, observer = canaries.unit_of(prepare(config))
    seat = "server" if config.secure_sum else observer
    epsilon, _, curve = canaries.promised(ledger_of(name, config.rounds), seat, unit, config.delta)
    assert epsilon is not None
    score = canaries.planned_score(config, config.rounds)
    found = plan.plan(score.signal, epsilon, config.rounds, curve=curve, delta=config.delta, factor=FACTOR,
                      significance=LEVEL * (1 - BITS_SHARE), spread=score.spread)  # fmt: skip
    assert found.canaries is not None and found.canaries <= score.room, (name, found, score)
    return found


def audited(name: str, count: int, seed: int, how: dict[str, float]) -> dict[str, Any]:
    """One whole audit as `fedveil audit` makes it: canaries, then low bits, against the promise of the correct run."""
    setting = SETTINGS[name]
    config, practice = setting.config(), setting.config(**how) if how else None
    judge = coalition.audit_coalition if config.secure_sum else canaries.audit
    found, _ = judge(config, ledger=ledger_of(name, config.rounds), practice=practice, canaries=count, seed=seed,
                     significance=LEVEL * (1 - BITS_SHARE))  # fmt: skip
    executed = prepare((practice or config).model_copy(update={"seed": seed}))
    bits = lowbits.look(executed, units=200, significance=LEVEL * BITS_SHARE, seed=seed)
    once, _, _ = canaries.promised(ledger_of(name, 1), bits.observer, bits.unit, config.delta)  # type: ignore[arg-type]
    return {"accused": found.verdict == "promise broken" or bits.broken(once), "shown": found.epsilon_lower,
            "promised": found.epsilon_promised, "canaries": count}  # fmt: skip


def float_bits(name: str, releases: int, seed: int) -> dict[str, Any]:
    """Low bits of float noise where exact noise was promised."""
    setting = SETTINGS[name]
    config = setting.config()
    found = lowbits.look(
        prepare(setting.config(grid=0.0)), units=releases, significance=LEVEL * BITS_SHARE, seed=seed
    )
    once, _, _ = canaries.promised(ledger_of(name, 1), found.observer, found.unit, config.delta)  # type: ignore[arg-type]
    share = found.with_excludes_without / max(1, found.releases)
    return {"accused": found.broken(once), "shown": found.epsilon_lower, "promised": once, "share": share,
            "canaries": found.releases}  # fmt: skip


@cache
def float_releases(name: str) -> int:
    """How many releases it takes to show float noise, planned by a pilot that is not counted."""
    share, config = float_bits(name, 400, 999)["share"], SETTINGS[name].config()
    once, _, _ = canaries.promised(ledger_of(name, 1), "server", "example", config.delta)
    number = lowbits.releases_needed(
        share, float(once or 0), delta=config.delta, significance=LEVEL * BITS_SHARE / 2
    )
    print(
        f"float noise, {name}: {share:.2f} of the releases excluded in a pilot; {number} releases needed",
        flush=True,
    )
    return number or 4000


def leaking(how: str, seed: int) -> dict[str, Any]:
    """A run on a table that came prepared, and `fedveil audit` of that run: does it find a scaler that was fitted on the rows?"""
    rng = np.random.default_rng(seed)
    x = rng.gamma(2.0, 10.0, (600, 8)).astype(np.float32)
    labels = (x[:, 0] > 20).astype(int)
    ready = PREPARED[how](x)
    with TemporaryDirectory() as folder:
        np.savez(Path(folder) / "own.npz", x=ready, y=labels)
        values = {"dataset": str(Path(folder) / "own.npz"), "recipe": "fed-cdp-sound", "clients": 4, "rounds": 2,
                  "model": "logistic", "batch_size": 1000.0, "seed": seed}  # fmt: skip
        simulate(make_config({**COMMON, **values}, {"sigma": 1.0}), Path(folder) / "run")
        found, _ = campaign.audit_run(Path(folder) / "run", canaries_count=200, seed=seed, significance=LEVEL)
    return {"accused": found["verdict"] == "promise broken", "shown": found["epsilon_lower"],
            "promised": found["epsilon_promised"], "canaries": 200}  # fmt: skip


def jobs(correct: int, broken: int) -> Iterator[tuple[str, str, int, Callable[[], dict[str, Any]]]]:
    """(what, setting, seed, how to do it) of every audit."""
    needed: dict[str, int] = {}

    def count(name: str) -> int:
        if name not in needed:
            found = planned(name)
            print(f"{name}: {found.sentence}", flush=True)
            needed[name] = found.canaries or 10_000
        return needed[name]

    names = list(SETTINGS)
    for seed in range(correct):
        name = names[seed % len(names)]
        yield "correct", name, 1000 + seed, lambda n=name, s=1000 + seed: audited(n, count(n), s, {})
    for what, how in BROKEN.items():
        for name in names:
            if "rate" in how and "sampled" not in name:
                continue
            for seed in range(broken):
                yield what, name, seed, lambda n=name, s=seed, h=how: audited(n, count(n), s, h)
    name = "uploads, all records"
    for seed in range(broken):
        yield "float noise", name, seed, lambda s=seed: float_bits(name, float_releases(name), s)
    for how in PREPARED:
        for seed in range(broken):
            what = "correct preparation" if how == "public range" else "leaking preparation"
            yield what, how, seed, lambda h=how, s=seed: leaking(h, s)


def run(out: Path, correct: int, broken: int, only: str, part: str) -> None:
    done = (
        {tuple(json.loads(line)["job"]) for line in out.read_text().splitlines()} if out.exists() else set()
    )
    with out.open("a") as file:
        mine, parts = (int(n) for n in part.split("/"))
        for number, (what, name, seed, make) in enumerate(jobs(correct, broken)):
            if only in what and number % parts == mine - 1 and (what, name, seed) not in done:
                file.write(json.dumps({"job": [what, name, seed], **make()}, default=float) + "\n")
                file.flush()


def table(*files: Path) -> None:
    found = [json.loads(line) for out in files for line in out.read_text().splitlines()]
    lines = list({tuple(line["job"]): line for line in found}.values())
    for what in dict.fromkeys(line["job"][0] for line in lines):
        for name in dict.fromkeys(line["job"][1] for line in lines if line["job"][0] == what):
            mine = [line for line in lines if line["job"][:2] == [what, name]]
            hits = sum(line["accused"] for line in mine)
            low, high = exact_interval(hits, len(mine))
            print(
                f"| {what} | {name} | {mine[0]['canaries']} | {hits} of {len(mine)} [{low:.3f}, {high:.3f}] |"
            )
    right = [line for line in lines if line["job"][0] == "correct"]
    print(f"accused of {len(right)} correct runs: {sum(line['accused'] for line in right)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--correct", type=int, default=300)
    parser.add_argument("--broken", type=int, default=40)
    parser.add_argument("--only", default="", help="a part of a kind's name")
    parser.add_argument(
        "--part",
        default="1/1",
        help="K/N: every N-th audit from the K-th on, for N processes with a file each",
    )
    asked = parser.parse_args()
    canaries.promised = coalition.promised = cache(
        canaries.promised
    )  # half of an audit's time, whatever the seed
    run(
        asked.out[0], asked.correct, asked.broken, asked.only, asked.part
    ) if asked.command == "run" else table(*asked.out)
