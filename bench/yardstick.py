"""The field's own tools on the same scores: RMIA of privacy_meter, LiRA of LeakPro, the audit bounds of jax_privacy.

python -m bench.yardstick [--privacy-meter CHECKOUT] [--leakpro CHECKOUT]

One target and 16 shadows of location30 (446 yes/no features, 30 classes), 800 rows asked about, half of them members. Each tool
gets the very numbers that our attack gets. CHECKOUT: a folder with the tool's source (privacytrustlab/ml_privacy_meter and
aidotse/LeakPro on GitHub: their published packages lack these attacks); jax_privacy is imported where it is installed. What is
missing is skipped with a sentence.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from scipy.special import softmax
from scipy.stats import spearmanr

from fedveil.attacks import membership, shadows, signals
from fedveil.attacks.audit import bounds, canaries
from fedveil.federation.config import make_config
from fedveil.federation.loop import prepare

SHADOWS, ROWS, OFFLINE = 16, 800, 0.3


@dataclass(frozen=True)
class Signals:
    """Outputs of the target and the shadows on the pool and on strangers, and who was in."""

    member: np.ndarray  # [n]
    inside: np.ndarray  # [S, n]
    y: np.ndarray
    ours: np.ndarray  # [n, classes]
    theirs: np.ndarray  # [S, n, classes]
    strangers: tuple[np.ndarray, np.ndarray, np.ndarray]  # labels, target's outputs, shadows' outputs


def measure(seed: int = 1) -> Signals:
    values = {"dataset": "location30", "limit": ROWS, "recipe": "non-private", "clients": 1, "partition": "iid", "rounds": 8,
              "local_steps": 50, "batch_size": 50, "learning_rate": 0.2, "model": "papers-mlp", "seed": seed}  # fmt: skip
    prepared = prepare(make_config(values))
    pool = shadows.pool_of(prepared, ROWS, seed)
    task, inside = prepared.task, membership.halves(SHADOWS, len(pool.rows), seed)
    weights = shadows.trainer(prepared, pool, seed)(inside)
    target = shadows._federated(prepared)
    x, y = pool.x[pool.rows], pool.y[pool.rows]

    def outputs(models: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return membership.logits(task.module, task.layout, models, rows)

    zx, zy = pool.population
    strangers = zy, outputs(target, zx)[0], outputs(weights, zx)
    return Signals(pool.member, inside, y, outputs(target, x)[0], outputs(weights, x), strangers)


def own(outputs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Probability of the true label."""
    return np.take_along_axis(
        softmax(outputs, -1), np.broadcast_to(y[..., None], (*outputs.shape[:-1], 1)), -1
    )[..., 0]


def load_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def compare(what: str, ours: np.ndarray, theirs: np.ndarray, member: np.ndarray) -> None:
    """One row: AUC and TPR at 1% of both, and how alike they order the rows."""
    cells = []
    for scores in (ours, theirs):
        low, high = signals.auc_interval(scores, member, 0.95)
        cut = np.quantile(scores[~member], 0.99)
        area, found = membership.auc(scores[member], scores[~member]), (scores[member] > cut).mean()
        cells.append(f"{area:.4f} [{low:.3f}, {high:.3f}] | {found:.3f}")
    print(f"| {what} | {' | '.join(cells)} | {spearmanr(ours, theirs).statistic:.4f} |", flush=True)


def rmia(found: Signals, folder: Path) -> None:
    """Offline RMIA. Their p(z) is the mean over the half of the reference models with the larger values, ours over all; given one
    half of the models for z, both are the same formula (but for ties)."""
    other = load_file(folder / "modules" / "mia" / "attacks" / "rmia.py", "yardstick_rmia")
    zy, z_ours, z_theirs = found.strangers
    target, refs, z_target, z_refs = (
        own(found.ours, found.y),
        own(found.theirs, found.y),
        own(z_ours, zy),
        own(z_theirs, zy),
    )
    half = z_refs[: SHADOWS // 2]
    for what, few in (
        ("RMIA offline, all shadows for z", z_refs),
        ("RMIA offline, half of the shadows for z", half),
    ):
        theirs = other.run_rmia(target, refs.T, found.inside.T, z_target, few.T, OFFLINE, SHADOWS // 2)
        ours = membership.rmia(target, refs, found.inside, z_target, few, offline=True, slope=OFFLINE)
        compare(what, ours, theirs, found.member)


def lira(found: Signals, folder: Path) -> None:
    """LeakPro's `run_attack` on our scores. The modules that it imports but does not use here are left empty."""
    empty = {"abstract_mia": "leakpro.attacks.mia_attacks", "shadow_model_handler": "leakpro.attacks.utils",
             "mia_handler": "leakpro.input_handler", "mia_result": "leakpro.reporting",
             "import_helper": "leakpro.utils"}  # fmt: skip
    for name, package in empty.items():
        module = ModuleType(f"{package}.{name}")
        module.__dict__.update(
            AbstractMIA=object, ShadowModelHandler=object, MIAHandler=object, MIAResult=Kept, Self=Any
        )
        sys.modules[module.__name__] = module
    other = load_file(folder / "leakpro" / "attacks" / "mia_attacks" / "lira.py", "yardstick_lira")
    seen = membership.confidence(found.theirs, found.y)
    aim = membership.confidence(found.ours, found.y)
    for online in (True, False):
        for each in (True, False):
            attack = other.AttackLiRA.__new__(other.AttackLiRA)
            attack.configs = attack.AttackConfig(num_shadow_models=SHADOWS, online=online)
            attack.__dict__.update(
                online=online, num_shadow_models=SHADOWS, var_calculation="carlini", fix_var_threshold=1 if each else 32,
                shadow_models_logits=np.stack([attack.rescale_logits(one, found.y) for one in found.theirs]),
                target_logits=attack.rescale_logits(found.ours, found.y), out_indices=~found.inside,
                audit_dataset={"in_members": np.flatnonzero(found.member), "out_members": np.flatnonzero(~found.member)},
            )  # fmt: skip
            scores = np.empty(len(found.y))
            scores[np.r_[np.flatnonzero(found.member), np.flatnonzero(~found.member)]] = (
                attack.run_attack().signal_values[:, 0]
            )
            mine = membership.lira_online if online else membership.lira_offline
            deviation = "each example's deviation" if each else "one deviation for all"
            ours = mine(aim, seen, found.inside, shared=not each)
            compare(f"LiRA {'online' if online else 'offline'}, {deviation}", ours, scores, found.member)


@dataclass(frozen=True)
class Kept:
    """Stands for LeakPro's result: keeps the scores."""

    signal_values: np.ndarray

    @classmethod
    def from_full_scores(cls, *, signal_values: np.ndarray, **_: Any) -> Kept:
        return cls(signal_values)


def audit_bounds() -> None:
    """Bounds on the same 700 canary scores, at one threshold fixed in advance."""
    package = importlib.util.find_spec("jax_privacy")
    if package is None or package.origin is None:
        print("jax_privacy is not installed (pip install --no-deps jax-privacy): its bounds are skipped.")
        return
    other = load_file(Path(package.origin).with_name("auditing.py"), "yardstick_auditing")
    values = {"dataset": "digits", "recipe": "fed-cdp-sound", "clients": 4, "partition": "iid", "rounds": 4, "local_steps": 1,
              "batch_size": 1000, "model": "papers-mlp", "protect": {"sigma": 1.0}}  # fmt: skip
    prepared = prepare(make_config(values))
    scores, cut = canaries.score(canaries.stage(prepared, 700, 3, rounds=4), prepared, 4)
    theirs, fixed, delta = (
        other.CanaryScoreAuditor(scores.included, scores.excluded),
        other.Explicit(cut),
        1e-5,
    )
    pairs = {
        "Clopper-Pearson": (bounds.clopper_pearson_bound(delta),
                            theirs.epsilon_clopper_pearson(0.05, delta=delta, one_sided=False, threshold_strategy=fixed)),
        "one run": (bounds.one_run_bound(delta), theirs.epsilon_one_run(0.05, delta, threshold_strategy=fixed)),
        "one run, f-DP": (bounds.one_run_bound(delta, fdp=True),
                          theirs.epsilon_one_run_fdp(0.05, delta, threshold_strategy=fixed)),
    }  # fmt: skip
    for name, (bound, their) in pairs.items():
        print(
            f"| {name} | {bounds.lower_bound(scores, bound, 0.05, 'fixed', threshold=cut):.5f} | {their:.5f} |",
            flush=True,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--privacy-meter", type=Path)
    parser.add_argument("--leakpro", type=Path)
    asked = parser.parse_args()
    audit_bounds()
    measured = measure() if asked.privacy_meter or asked.leakpro else None
    for tool, folder in (("privacy_meter", asked.privacy_meter), ("LeakPro", asked.leakpro)):
        if measured is None or folder is None:
            print(f"no checkout of {tool} was given: its attack is skipped.")
        else:
            (rmia if tool == "privacy_meter" else lira)(measured, folder)
