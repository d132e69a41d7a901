"""The low-bit attack on every headline configuration and every recipe, with exact noise and, as a control, float noise.

    FEDVEIL_DATA=... FEDVEIL_CACHE=... python -m bench.lowbits --results lowbits.jsonl [--only mnist-headline-b ...]
    python -m bench.lowbits --results lowbits.jsonl --show          prints docs/attacks.md's table

What is tested: the first round's release as its observer sees it (one upload, or the step of the model), made 20,000 times
with the unit (one example, or one client) and 20,000 times without it, by the code that runs use: the same engine,
aggregation and sampler, with fresh noise keys. The noiseless totals of the neighbours are known to the attacker, who asks
which of them can have left the released float32 values and, knowing nothing of the arithmetic, whether the last bytes of the
values are distributed otherwise (learned from half of the releases, tried on the other half). All weights get noise; the
attacker looks at the WATCHED of them in which the totals differ most. Recipes are run with one full-batch local step, so
that the attacker knows the batch; whatever cannot be looked at so is in the table with its reason.

Bounds are exact (Clopper-Pearson) at 5% over the number of cases: all of them hold together with 95%. Each line of the
results is one case; an interrupted bench goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADLINES = (
    "mnist-headline-b", "mnist-headline-a", "mnist-headline-a-1000", "fashion-mnist-headline-b", "fashion-mnist-headline-a",
    "adult-headline-b", "adult-headline-a", "cancer-headline-b", "cancer-headline-a", "cifar10-headline-b",
    "cifar10-headline-a", "lfw-headline-b", "lfw-headline-a",
)  # fmt: skip
RECIPES_ON: dict[str, Any] = {
    "dataset": "digits", "clients": 14, "partition": "iid", "rounds": 1, "local_steps": 1, "model": "logistic",
    "model_options": {"bias": False, "zero": True}, "sampling": "full", "epsilon": None,
}  # fmt: skip
WATCHED = 2_000
RELEASES = {"exact": 20_000, "float": 4_000}
LEVEL = 0.05


def cases() -> list[tuple[str, str]]:
    """(configuration or recipe, noise), all that one level is shared by."""
    from fedveil.protect.catalogue import catalogue

    names = [*HEADLINES, *(name for name, recipe in catalogue().items() if recipe.private)]
    return [(name, kind) for kind in RELEASES for name in names]


def changes_of(name: str, kind: str) -> dict[str, Any]:
    """What is set in a case beside what the configuration says."""
    from bench.headline import sigma_of
    from fedveil.federation.config import load_config
    from fedveil.protect.catalogue import catalogue
    from fedveil.protect.recipe import OPTIONAL

    out: dict[str, Any] = {}
    if name not in HEADLINES:
        recipe = catalogue()[name]
        out = {**RECIPES_ON, "sigma": 4.0}
        central = recipe.about.family == "central"
        out |= {"clients": 1, "limit": 100} if central else {}
        if recipe.place.target == "update":
            out.pop("sampling")
        out = {k: v for k, v in out.items() if v is not None or k not in OPTIONAL}
    if kind == "float":
        # Float noise promises nothing that sigma could be calibrated to: the exact noise's sigma is taken.
        out |= {"grid": 0.0}
        if name in HEADLINES:
            out |= {"sigma": sigma_of(load_config(name)), "calibrate": False, "target_epsilon": None}
    return out


def promised(prepared: Any) -> tuple[float | None, str]:
    """Epsilon and verdict of the first round alone, for the unit and observer that the recipe protects."""
    import numpy as np

    from fedveil.attacks.audit.canaries import unit_of
    from fedveil.federation.loop import release_of
    from fedveil.federation.round import moment_of, start
    from fedveil.privacy.accountants import answer
    from fedveil.privacy.shuffle import shuffled_noise

    unit, observer = unit_of(prepared)
    now = moment_of(prepared.task, start(prepared.task, prepared.initial))
    groups = release_of(prepared, now, np.arange(prepared.partition.clients)).groups
    about = [c for _, claims in groups for c in claims if (c.observer, c.unit) == (observer, unit)]
    best = min(about, key=lambda c: ("sound", "nominal", "none").index(c.verdict))
    if best.event is None:
        return None, best.verdict
    if best.accountant == "shuffle":
        crowd = best.event.sampling.population or 1
        return shuffled_noise(best.event.noise, crowd, prepared.config.delta).epsilon, best.verdict
    told = (answer([best.event], prepared.config.delta, name).epsilon for name in (best.accountant or "pld", "rdp"))
    return next((epsilon for epsilon in told if epsilon is not None), None), best.verdict


def run_one(name: str, kind: str) -> dict[str, Any]:
    """One case: what was made and seen, as one line."""
    from fedveil.attacks.audit import lowbits
    from fedveil.errors import UserError
    from fedveil.federation.config import load_config
    from fedveil.federation.loop import prepare

    began, line = time.process_time(), {"name": name, "noise": kind}
    try:
        prepared = prepare(load_config(name, changes_of(name, kind)))
    except UserError as wrong:
        if name in HEADLINES:
            raise
        return {**line, "reason": f"refused: {wrong}"}
    level = LEVEL / len(cases())
    found = lowbits.neighbours(prepared, releases=RELEASES[kind], significance=level, coordinates=WATCHED)
    epsilon, verdict = promised(prepared)
    return {
        **line,
        "weights": prepared.task.layout.size,
        "watched": found.coordinates,
        "releases": found.releases,
        "excluded": [found.with_excludes_without, found.without_excludes_with],
        "false": [found.without_excludes_without, found.with_excludes_with],
        "epsilon_lower": found.epsilon_lower,
        "epsilon_learned": found.learned,
        "epsilon_of_one_round": epsilon,
        "verdict": verdict,
        "machine": found.machine,
        "unit": found.unit,
        "engine": prepared.engine,
        "reason": found.reason,
        "seconds": round(time.process_time() - began, 1),
    }


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Finished cases by name and noise."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {(row["name"], row["noise"]): row for row in map(json.loads, lines)}


def rows(done: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    """The table in Markdown."""
    counts = " | ".join(f"{kind}: excluded of {n:,} | ε shown" for kind, n in RELEASES.items())
    yield f"| run or recipe | weights | unit | ε of one round | {counts} |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, kind in cases():
        if kind != "exact" or (name, kind) not in done:
            continue
        cells = []
        for one in (done[name, "exact"], done.get((name, "float"), {"reason": "not run"})):
            if one["reason"]:
                cells += [one["reason"], ""]
            else:
                cells += ["{} / {}".format(*one["excluded"]), f"{one['epsilon_lower']:.2f}"]
        exact = done[name, "exact"]
        epsilon = exact.get("epsilon_of_one_round")
        said = "none" if epsilon is None else f"{epsilon:.3f}{'' if exact['verdict'] == 'sound' else ' (nominal)'}"
        yield f"| {name} | {exact.get('weights', '')} | {exact.get('unit', '')} | {said} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations or recipes")
    parser.add_argument("--noise", choices=list(RELEASES), help="only with this noise")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    if given.show:
        print("\n".join(rows(read(given.results))))
        return
    for name, kind in cases():
        skipped = (given.only and name not in given.only) or (given.noise and kind != given.noise)
        if skipped or (name, kind) in read(given.results):
            continue
        line = run_one(name, kind)
        with given.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
