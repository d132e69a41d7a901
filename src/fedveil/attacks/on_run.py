"""All attacks of one kind, or of every kind, on a run directory: what the command line and Python call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.attacks import campaign
from fedveil.federation.loop import prepare
from fedveil.federation.store import Run


def on_run(
    path: Path | Run, kind: str, rounds: str, folder: Path, options: dict[str, Any], shadows: int, pool: int,
    attribute: str | None, victims: int, seed: int, data: str | None, say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """The attacks of `kind` on a run directory; each result is written as soon as it is there."""
    run = campaign.opened(path, data)
    config = run.config
    numbers = [int(r) for r in rounds.split(",") if r.strip()] or [run.rounds()[-1] if run.rounds() else 0]

    def gradients() -> object:
        jobs = {
            f"{config.recipe}|round {n}": (
                config,
                campaign.initial if n == 0 else lambda _p, n=n: run.state(n),
            )
            for n in numbers
        }
        if kind == "all":
            rows = campaign.attack_every_tap(jobs, prepare(config), out=folder, **options)
        else:
            rows = campaign.attack_gradients(jobs, out=folder, **options)
        return rows[0] if len(rows) == 1 else {"kind": "gradient", "results": rows}

    def memberships() -> object:
        known = [n for n in run.rounds() if n > 0]
        steps = known[:: max(1, len(known) // 8)] if len(known) > 1 else []
        return campaign.attack_membership(
            prepare(config), campaign.final_weights(run), shadows_count=shadows, pool_size=pool, seed=seed,
            path=np.stack([run.state(n).weights for n in steps]) if len(steps) > 1 else None,
        )  # fmt: skip

    def on_model(attack_on: Any, **more: Any) -> Any:
        return attack_on(prepare(config), campaign.final_weights(run), seed=seed, **more)

    attacks: dict[str, Any] = {
        "gradient": gradients,
        "malicious": lambda: campaign.attack_malicious(prepare(config), seed=seed),
        "exact": lambda: campaign.attack_exact(prepare(config), seed=seed),
        "membership": memberships,
        "attribute": lambda: on_model(campaign.attack_attribute, name=attribute),
        "decoder": lambda: on_model(campaign.attack_decoder, victims=victims, out=folder),
    }
    settings = {
        "victims": victims,
        "seed": seed,
        "shadows": shadows,
        "pool": pool,
        "rounds": rounds,
        **options,
    }
    if kind != "all":
        found = attacks[kind]()
        campaign.save(folder, kind, found, settings)
        return {kind: found}
    attacks["audit"] = lambda: campaign.audit_run(run, seed=seed)[0]
    return campaign.one_after_the_other(folder, attacks, settings, say=say)
