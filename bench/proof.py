"""The numbers of docs/attacks.md on low bits, exact inversion and malicious servers.

python -m bench.proof bits|exact|text|private|malicious [--small]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from fedveil.attacks.audit import lowbits
from fedveil.attacks.exact import spear, tokens
from fedveil.attacks.malicious import attack, models
from fedveil.attacks.membership import exact_interval
from fedveil.data.datasets import load
from fedveil.data.text import decode
from fedveil.federation.config import load_config, make_config
from fedveil.federation.loop import prepare
from fedveil.federation.round import start
from fedveil.federation.view import view, view_sum
from fedveil.models import backbones, minilm


def bits(small: bool) -> None:
    """Low bits of the shipped headlines' first round, with float noise and on a grid."""
    cases: list[tuple[str, dict[str, Any], int]] = [
        ("adult-headline-b", {}, 20_000), ("adult-headline-a", {}, 20_000), ("mnist-headline-b", {"limit": 6000}, 300),
        ("fed-sdp-client", {"dataset": "cancer", "clip.kind": "flat", "local_steps": 1, "rounds": 1}, 5_000),
    ]  # fmt: skip
    for name, changes, releases in cases:
        for grid in (0.0, 1e-6):
            count = releases // 20 if small else releases
            found = lowbits.neighbours(prepare(load_config(name, {**changes, "grid": grid})), releases=count)
            print(name, f"grid {grid:g}:", found, flush=True)


def staged(recipe: str, batch: int, hidden: int, seed: int, changes: dict[str, Any]) -> Any:
    values = {
        "dataset": "mnist", "limit": 6000, "recipe": recipe, "clients": 2, "partition": "iid", "local_steps": 1, "rounds": 1,
        "learning_rate": 1.0, "model": "papers-mlp", "model_options": {"hidden": [hidden, 32]}, "batch_size": batch, "seed": seed,
    }  # fmt: skip
    return prepare(make_config(values, changes))


def spear_once(prepared: Any, batch: int, seed: int) -> float:
    """Share of the batch recovered to 1e-4 in every pixel."""
    task = prepared.task
    rows = np.random.default_rng(seed).choice(np.asarray(prepared.partition.rows(0)), batch, replace=False)
    seen = view(task, start(task, prepared.initial), "type0", 0, rows=rows).values[0]
    return given_back(
        solved(prepared.initial, models.dense_layers(task.layout)[0], seen, batch, seed), task.x[rows]
    )


def solved(initial: np.ndarray, first: models.Dense, seen: np.ndarray, batch: int, seed: int) -> np.ndarray:
    """The inputs [batch, d] behind an update of a net that begins with this layer; none if they were not all found."""
    shape = first.units, first.width
    layer = initial[first.weight].reshape(shape), initial[first.bias]
    found = spear.invert(
        -seen[first.weight].reshape(shape),
        -seen[first.bias],
        layer=layer,
        batch=batch,
        seed=seed,
        draws=20_000,
    )
    return found.inputs if found.complete else np.zeros((0, first.width))


def given_back(found: np.ndarray, truth: np.ndarray) -> float:
    """Share of the true rows that were found to 1e-4 in every pixel."""
    if not len(found):
        return 0.0
    return float((np.abs(found[:, None] - truth.reshape(len(truth), -1)[None]).max(-1).min(0) < 1e-4).mean())


def sentences(seed: int, deviation: float) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = tokens.TinyText()
    ids = np.zeros((4, 16), np.int64)
    for row in ids:
        length = rng.integers(6, 15)
        row[:length] = rng.integers(1, 500, length)
    loss = nn.functional.cross_entropy(model(torch.as_tensor(ids)), torch.as_tensor(rng.integers(0, 2, 4)))
    names = ("first.value.weight", "second.value.weight")
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, [parameters[n] for n in names])
    noised = {
        n: g.numpy() + deviation * rng.normal(size=tuple(g.shape)) for n, g in zip(names, found, strict=True)
    }
    return tokens.recovered(ids, tokens.read(model, noised))


def exact(small: bool) -> None:
    """Exact inversion without noise: batches behind 200 ReLU units on MNIST, sentences of a small transformer."""
    tries = 3 if small else 20
    for batch in (1, 2, 4, 8):
        shares = [
            spear_once(staged("non-private", batch, 200, seed, {}), batch, seed) for seed in range(tries)
        ]
        print(
            f"ReLU layer, batch {batch}: {np.mean(shares):.3f} of the images, {np.mean(np.array(shares) == 1):.2f} of the batches"
        )
    read = np.array([sentences(seed, 0.0) for seed in range(tries)])
    print(
        f"4 sentences: {read[:, 0].mean():.3f} of the tokens, {read[:, 1].mean():.3f} of the sentences whole",
        flush=True,
    )


SIGMA_AT_TWO = 1.994  # one release, delta 1e-5, no sampling: epsilon 2


def sentence_gradients(
    model: minilm.MiniLM, ids: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of every sentence: the gradient of the first value projection [n, d, d], and the norm of its whole gradient."""
    value = model.blocks[0].attention.value.weight
    found, norms = [], []
    for row, label in zip(ids, labels, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(
            model(torch.as_tensor(row[None])), torch.as_tensor([int(label)])
        ).backward()
        found.append(value.grad.numpy().copy())
        norms.append(
            float(
                torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None])
                .sum()
                .sqrt()
            )
        )
    return np.stack(found), np.array(norms)


def text(small: bool) -> None:
    """Tokens of 4 sentences of SST-2 from one gradient of all-MiniLM-L6-v2, alone and in a sum of 8 clients with 4 each,
    without noise and at epsilon 2. Under masks a sum is opened with at least this noise (`docs/secure-sum.md`)."""
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = minilm.from_tensors(load_file(backbones.minilm_folder() / "model.safetensors"), classes=2).eval()
    data, length = load("sst2"), 32
    for seed in range(2 if small else 10):
        rng = np.random.default_rng(seed)
        rows = rng.choice(len(data.x), 32, replace=False)
        ids = backbones.tokens(decode(data.x[rows]), length)
        gradients, norms = sentence_gradients(model, ids, data.y[rows])
        clipped = gradients * np.minimum(1, 1 / norms)[:, None, None]
        noise = SIGMA_AT_TWO * rng.normal(size=gradients.shape[1:])
        for clients, count in (("one client", 4), ("sum of 8 clients", 32)):
            for what, seen in (("no noise", gradients[:count].mean(0)), ("epsilon 2", clipped[:count].sum(0) + noise)):
                found = tokens.encoder_candidates(model, seen, length, tolerance=0.001)
                there = [int(t) in found[p] for row in ids[:count] for p, t in enumerate(row) if t]
                places = {(p, int(t)) for row in ids[:count] for p, t in enumerate(row) if t}
                others = sum((p, t) not in places for p, fits in enumerate(found) for t in fits)
                told = f"{sum(there)} of {len(there)} tokens at their place, {others} others fit"
                print(f"{clients}, {what}, batch {seed}: {told}", flush=True)


def private(small: bool) -> None:
    """Exact inversion of batches of 4 at epsilon 2 in this one round: an upload of fed-cdp-sound, a sum under masks."""
    tries = 3 if small else 20
    two: dict[str, Any] = {"calibrate": True, "target_epsilon": 2.0}
    masks = {**two, "secure_sum": True, "sum_threshold": 2, "sum_colluders": 0, "batch_size": 10_000}
    for name, recipe, changes in (
        ("fed-cdp-sound", "fed-cdp-sound", two),
        ("sum under masks", "sum-cdp", masks),
    ):
        hits = false = 0
        for seed in range(tries):
            staged_run = staged(recipe, 4, 200, seed, changes)
            task, rng = staged_run.task, np.random.default_rng(seed)
            rows = rng.choice(np.asarray(staged_run.partition.rows(0)), 4, replace=False)
            seen = view_sum(task, start(task, staged_run.initial), {0: rows})
            assert seen is not None
            found = solved(staged_run.initial, models.dense_layers(task.layout)[0], seen, 4, seed)
            strangers = rng.choice(np.setdiff1d(np.arange(len(task.x)), rows), 4, replace=False)
            hits += round(4 * given_back(found, task.x[rows]))
            false += round(4 * given_back(found, task.x[strangers]))
        low, high = exact_interval(hits, 4 * tries)
        print(
            f"{name}, epsilon 2: {hits} of {4 * tries} images [{low:.3f}, {high:.3f}], control {false}",
            flush=True,
        )


def malicious(small: bool) -> None:
    """Malicious models against plain averaging and fed-cdp-sound at epsilon 2 in one round."""
    for dataset in ("mnist",) if small else ("mnist", "cifar10"):
        private = {"calibrate": True, "target_epsilon": 2.0}
        for row in attack.table(
            [("non-private", {}), ("fed-cdp-sound", private)], dataset, bins=1024, batch=64, seed=1
        ):
            print(row, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    commands = {
        "bits": bits,
        "exact": exact,
        "text": text,
        "private": private,
        "malicious": malicious,
    }
    commands[sys.argv[1]]("--small" in sys.argv)
