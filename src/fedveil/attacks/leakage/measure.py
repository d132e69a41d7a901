"""Gradient leakage measured: take what a recipe exposes at a tap, attack it, score it against the truth.

What is attacked comes from `federation.view`; the attack adds only public knowledge (the recipe's clip and noise
scale, batch size, learning rate). The truth is used for scoring alone, unless the oracle is asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedveil.attacks import metrics
from fedveil.attacks.leakage.objective import Leak
from fedveil.attacks.leakage.search import ITERATIONS, Method, Reconstruction, attack
from fedveil.errors import UserError
from fedveil.federation import store
from fedveil.federation.loop import Prepared
from fedveil.federation.round import State, recipe_of, work_of
from fedveil.federation.view import Seen, view
from fedveil.jsons import JsonObject, plain
from fedveil.keys import generator

if TYPE_CHECKING:
    from fedveil.protect.setting import Moment

TYPES = {"2": "type2", "1": "type1", "0": "type0", "0-sanitised": "type0-sanitised"}
COLOUR_FACTOR = (
    5  # colour images have four times the unknowns: quasi-Newton attacks get so many times the steps
)


@dataclass(frozen=True)
class Victims:
    """What leaked about which images: truth [V, n, ...] and labels [V, n]."""

    leak: Leak
    images: np.ndarray
    labels: np.ndarray
    tap: str


def victims_of(prepared: Prepared, state: State, tap: str, count: int, seed: int) -> Victims:
    """Draw victims and look through the tap.

    type2: `count` examples, each with its own gradient; they are looked at in batches of the run's size, since
    some recipes let a batch decide the noise. Other taps: `count` clients with one update each. With one local
    step every update is the mean gradient of one random batch; with more, of the client's own batches."""
    task, dealt = prepared.task, prepared.partition
    if prepared.dataset.task != "classification":
        raise UserError("gradient attacks rebuild classification inputs; this dataset is a regression task.")
    if task.loss != "cross-entropy":
        raise UserError(f"gradient attacks match gradients of cross-entropy; this run has loss = {task.loss}.")
    if task.augment.active:
        raise UserError("gradient attacks match the gradient of one image; this run averages those of augmented copies.")
    draw = generator(seed, "victims")
    batch = max(1, round(task.setting.batch))
    if tap == "type2":
        clients = draw.permutation(dealt.clients)
        seen, rows = [], []
        for group in range(-(-count // batch)):
            client = int(clients[group % len(clients)])
            own = np.asarray(dealt.rows(client))
            chosen = own[draw.choice(len(own), min(batch, len(own), count - group * batch), replace=False)]
            seen.append(view(task, state, tap, client, chosen))
            rows.append(chosen)
        order = np.concatenate(rows)[:, None]
        client = int(clients[0])
        return Victims(_leak(prepared, state, seen, 1, client), task.x[order], task.y[order], tap)
    clients = draw.permutation(dealt.clients)[:count]
    if len(clients) < count:
        raise UserError(
            f"--victims {count}: an update needs one client each, and this run has {dealt.clients}. "
            "Lower --victims or raise clients."
        )
    seen, rows = [], []
    for client in clients.tolist():
        own = np.asarray(dealt.rows(client))
        if task.setting.steps == 1:
            chosen = own[draw.choice(len(own), min(batch, len(own)), replace=False)]
            seen.append(view(task, state, tap, client, chosen))
        else:
            used = work_of(task, state, seen[0].moment if seen else _moment(prepared, state), client).rows
            chosen = used[used >= 0]
            seen.append(view(task, state, tap, client))
        rows.append(chosen)
    width = min(map(len, rows))
    order = np.stack([r[:width] for r in rows])
    return Victims(_leak(prepared, state, seen, batch, int(clients[0])), task.x[order], task.y[order], tap)


def _moment(prepared: Prepared, state: State) -> Moment:
    from fedveil.federation.round import moment_of

    return moment_of(prepared.task, state)


def _leak(prepared: Prepared, state: State, seen: list[Seen], batch: int, client: int) -> Leak:
    """The observed vectors with what an informed adversary knows about them."""
    task, first = prepared.task, seen[0]
    plan, recipe = first.plan, recipe_of(task, client)
    values = torch.as_tensor(np.concatenate([s.values for s in seen]))
    noise = float(np.mean([s.noise_scale for s in seen]))
    known: dict[str, Any] = {"noise": noise}
    if plan.clips and not plan.by_median:
        known |= {"clip": plan.clip, "bound": plan.bounds[0], "clip_norm": plan.clip_norm}
    if recipe.clip.rule.rescales:
        work = work_of(task, state, first.moment, client)
        known |= {"shift": torch.as_tensor(work.shift), "scale": torch.as_tensor(work.scale)}
        if (
            first.tap != "type2"
        ):  # an update was mapped back by the recipe: return to where it was clipped and noised
            values = (values + plan.learning_rate * plan.steps * known["shift"]) / known["scale"]
    if first.tap == "type2":
        return Leak(values, task.layout, **known)
    about_update = recipe.place.of_updates and not recipe.clip.of_weights
    if about_update and first.tap != "type1" and recipe.clip.bounded:
        known |= {
            "clip": recipe.clip.kind, "bound": first.moment.bounds[0], "clip_norm": recipe.clip.norm,
            "clip_on": "whole",
        }  # fmt: skip
    return Leak(
        values,
        task.layout,
        kind="update",
        batch=batch,
        steps=plan.steps,
        learning_rate=plan.learning_rate * batch / plan.expected_batch,
        pruned=first.tap != "type1" and recipe.thin.anything,
        **known,
    )


@dataclass
class Watcher:
    """Follows the attack against the truth: when each victim (every image of its batch) first succeeded, and
    pictures on the way. An attack that looks for fewer images than there were never rebuilds all of them. With
    `oracle` it also keeps the image nearest to the truth, which no attacker could choose."""

    truth: np.ndarray
    pixel_range: tuple[float, float]
    marks: tuple[int, ...] = ()
    show: int = 8
    oracle: bool = False
    first: dict[int, int] = field(default_factory=dict)
    pictures: dict[int, np.ndarray] = field(default_factory=dict)
    nearest: dict[int, tuple[float, np.ndarray]] = field(default_factory=dict)

    def __call__(self, rows: Tensor, images: Tensor, iteration: Tensor) -> None:
        low, high = self.pixel_range
        guess = images.detach().numpy()
        which, when = rows.numpy(), iteration.numpy()
        n = guess.shape[1] if guess.ndim == 5 and guess.shape[1] == self.truth.shape[1] else 0
        if n == 1:
            error = metrics.mse(self.truth[which, 0], np.clip(guess[:, 0], low, high)) / (high - low) ** 2
            near = [k for k in np.flatnonzero(error < metrics.STRICT_MSE) if int(which[k]) not in self.first]
            if near:
                good = metrics.score(self.truth[which[near], 0], guess[near, 0], self.pixel_range).success()
                self.first |= {int(which[k]): int(when[k]) for k, ok in zip(near, good, strict=True) if ok}
        elif 0 < n <= 8:  # batches are paired again, so only every tenth step
            for k in np.flatnonzero(when % 10 == 0).tolist():
                row = int(which[k])
                if row not in self.first:
                    order = metrics.match(self.truth[row], guess[k], self.pixel_range)
                    if metrics.score(self.truth[row], guess[k][order], self.pixel_range).success().all():
                        self.first[row] = int(when[k])
        if self.oracle and n == 1:
            for k, row in enumerate(which.tolist()):
                if error[k] < self.nearest.get(row, (np.inf, None))[0]:
                    self.nearest[row] = (float(error[k]), guess[k].copy())
        for mark in self.marks:
            for k in np.flatnonzero((which < self.show) & (when == mark)).tolist():
                board = self.pictures.setdefault(
                    mark, np.full((self.show, *guess.shape[1:]), np.nan, np.float32)
                )
                board[which[k]] = guess[k]


@dataclass(frozen=True)
class Outcome:
    """One attacked recipe: figures for the report, and images (in the pixel range) for the gallery."""

    figures: JsonObject
    truth: np.ndarray
    guess: np.ndarray
    pictures: Mapping[int, np.ndarray]


def measure(
    prepared: Prepared,
    state: State,
    *,
    method: Method = "veil",
    tap: str = "type2",
    victims: int = 16,
    seed: int = 0,
    iterations: int | None = None,
    restarts: int = 0,
    oracle: bool = False,
    aware: bool | None = None,
    update_as: Literal["gradient", "unroll"] = "gradient",
    marks: tuple[int, ...] = (1, 10, 30, 100, 300),
) -> Outcome:
    """Attack `victims` of a prepared run at `state` and score the result."""
    dataset, task = prepared.dataset, prepared.task
    # The last model is looked at as the last round would have trained it: there is no later schedule.
    coming = replace(state, round=min(state.round, task.setting.rounds - 1))
    found = victims_of(prepared, coming, tap, victims, seed)
    pixel_range = dataset.pixel_range or (float(dataset.x_test.min()), float(dataset.x_test.max()))
    colour = len(dataset.shape) == 3 and dataset.shape[0] > 1
    if iterations is None:
        iterations = ITERATIONS[method] * (COLOUR_FACTOR if colour and method != "gradinv" else 1)
    watcher = Watcher(found.images, pixel_range, marks, oracle=oracle)
    public = torch.as_tensor(dataset.x_test[:8])  # what the attacker has anyway; scoring never uses it
    n = found.images.shape[1]
    unroll = update_as == "unroll" and found.leak.steps > 1
    result = attack(
        method, task.module, torch.as_tensor(state.weights), found.leak, shape=dataset.shape,
        classes=int(dataset.classes or 0), seed=seed, iterations=iterations, restarts=restarts, pixel_range=pixel_range,
        public=public, aware=aware, update_as=update_as, images_per_victim=n if unroll else min(n, found.leak.batch),
        watch=watcher,
    )  # fmt: skip
    guess, labels = _matched(found, result, watcher, pixel_range)
    figures = {
        "kind": "gradient",
        "recipe": task.recipe.name,
        "noise_on": task.recipe.noise_on.name,
        "tap": tap,
        "method": method,
        "dataset": dataset.name,
        "model": prepared.config.model,
        "round": state.round,
        "seed": seed,
        "images": dataset.pixel_range is not None,
        **_figures(found, guess, labels, result, watcher, pixel_range, iterations, dataset.y_test),
        "controls": metrics.controls(
            found.images.reshape(-1, *dataset.shape), dataset.x_test.mean(0), pixel_range
        ),
        "chosen_by": "oracle (nearest to the truth; no attacker can)" if oracle else "matching loss",
        "update_as": None if tap == "type2" else result.update_as,
        "local_steps": None if tap == "type2" else task.setting.steps,
        "noise_scale": found.leak.layer_noise[0],
    }
    shown = metrics.clamp(guess, pixel_range).astype(guess.dtype)
    return Outcome(figures, found.images, shown, watcher.pictures)


def _matched(
    found: Victims, result: Reconstruction, watcher: Watcher, pixel_range: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Reconstructions in the order of the truth; with fewer images than the truth, the best pairing counts."""
    guess, labels = result.images.numpy().copy(), result.labels.numpy()
    for victim, (_, image) in watcher.nearest.items():
        guess[victim] = image
    n = found.images.shape[1]
    if n == 1:
        return guess, labels
    if guess.shape[1] < n:  # one image set stands for all local steps: repeat it, pairing decides
        repeat = -(-n // guess.shape[1])
        guess = np.concatenate([guess] * repeat, 1)[:, :n]
        labels = np.concatenate([labels] * repeat, 1)[:, :n]
    for v in range(len(guess)):
        order = metrics.match(found.images[v], guess[v], pixel_range)
        guess[v], labels[v] = guess[v][order], labels[v][order]
    return guess, labels


def _figures(
    found: Victims,
    guess: np.ndarray,
    labels: np.ndarray,
    result: Reconstruction,
    watcher: Watcher,
    pixel_range: tuple[float, float],
    budget: int,
    public: np.ndarray,
) -> JsonObject:
    """Figures of the victims that were attacked: where the numbers failed nothing was learnt about the defence."""
    shape, failed = found.images.shape, result.failed.numpy()
    return {
        "victims": shape[0],
        "batch": shape[1],
        **_success(found, guess, labels, result, watcher, pixel_range, budget, public),
        "iteration_budget": budget,
        "threshold": {"mse_below": metrics.STRICT_MSE, "ssim_above": metrics.STRICT_SSIM},
        "threshold_papers": {"mse_below": metrics.PAPERS_MSE},
        "pixel_range": list(pixel_range),
        "failed_numerically": int(failed.sum()),
        "matching_loss": float(result.loss[~result.failed].median()) if not failed.all() else None,
        "cpu_seconds_per_victim": result.cpu_seconds / shape[0],
    }


def _success(
    found: Victims,
    guess: np.ndarray,
    labels: np.ndarray,
    result: Reconstruction,
    watcher: Watcher,
    pixel_range: tuple[float, float],
    budget: int,
    public: np.ndarray,
) -> dict[str, float | None]:
    """Means over the victims whose attack did not fail numerically; empty if there is none."""
    kept = np.flatnonzero(~result.failed.numpy())
    none = not len(kept)
    if none:
        kept = np.arange(len(guess))  # only for the names of the figures
    truth, classes = found.images[kept], found.labels[kept]
    flat, first = (-1, *truth.shape[2:]), 0 if truth.shape[1] == 1 else slice(None)
    run = float(result.iterations[kept].float().mean())
    followed = truth.shape[1] <= 8 and truth.ndim == 5
    control, chance = metrics.label_control(classes[:, first], labels[kept][:, first], public)
    figures: dict[str, float | None] = {
        **metrics.summary(metrics.score(truth.reshape(flat), guess[kept].reshape(flat), pixel_range)),
        "rmse_unclamped": metrics.rmse_unclamped(truth.reshape(flat), guess[kept].reshape(flat), pixel_range),
        "label_accuracy": metrics.label_accuracy(classes[:, first], labels[kept][:, first]),
        "label_control": control,
        "label_chance": chance,
        # a victim that was not rebuilt counts with the budget
        "iterations": float(np.mean([watcher.first.get(int(v), budget) for v in kept])) if followed else run,
        "iterations_run": run,
    }
    return dict.fromkeys(figures, None) if none else figures


def table(path: Path, jobs: Iterable[tuple[str, object]], run: Any) -> list[JsonObject]:
    """Run jobs one by one and keep each result as one line of `path`; finished ones are not run again."""
    done = {row["job"]: row for row in store.read_lines(path)} if path.exists() else {}
    for name, job in jobs:
        if name not in done:
            done[name] = {"job": name, **run(job)}
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as out:
                out.write(json.dumps(plain(done[name]), allow_nan=False) + "\n")
    return list(done.values())


def mark_of(job: str) -> str:
    """The name of a job's files."""
    return hashlib.sha256(job.encode()).hexdigest()[:16]


def keep(outcome: Outcome, path: Path, show: int = 8) -> None:
    """Save what the gallery needs of an outcome: the first image of the first victims."""
    path.parent.mkdir(parents=True, exist_ok=True)
    steps = {f"step {k}": at[:show, :1] for k, at in outcome.pictures.items()}
    np.savez_compressed(path, truth=outcome.truth[:show, :1], guess=outcome.guess[:show, :1], **steps)  # type: ignore[arg-type]


def kept(path: Path, figures: JsonObject) -> Outcome:
    """An outcome as far as `keep` saved it."""
    with np.load(path) as saved:
        steps = {int(k.removeprefix("step ")): saved[k] for k in saved.files if k.startswith("step ")}
        return Outcome(figures, saved["truth"], saved["guess"], steps)


def _title(outcome: Outcome) -> str:
    figures = outcome.figures
    title = str(figures.get("recipe", "reconstruction"))
    if figures.get("noise_on") == "example":
        title += ", noise per example"
    return title + (f", round {figures['round']}" if figures.get("round") else "")


def gallery(outcomes: Mapping[str, Outcome], path: Path, show: int = 6) -> None:
    """One picture: originals on top, then each recipe's final reconstructions and those on the way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = next(iter(outcomes.values()))
    show = min(show, len(first.truth))
    drawn = first.truth[:show, 0]
    strips: list[tuple[str, np.ndarray]] = [("original", drawn)]
    for outcome in outcomes.values():
        name = _title(outcome)
        if not np.array_equal(outcome.truth[:show, 0], drawn):  # other rounds may use other batches
            drawn = outcome.truth[:show, 0]
            strips.append(("original", drawn))
        for k in sorted(outcome.pictures):
            at = outcome.pictures[k][:show, 0]
            ended = np.isnan(at)  # victims that were done before this step keep their image
            strips.append((f"{name}, step {k}", np.where(ended, outcome.guess[:show, 0], at)))
        strips.append((f"{name}, kept", outcome.guess[:show, 0]))
    figure, axes = pyplot.subplots(
        len(strips), show, figsize=(1.0 * show + 1.6, 1.0 * len(strips)), squeeze=False, layout="constrained"
    )
    for row, (title, images) in enumerate(strips):
        for column in range(show):
            axis = axes[row, column]
            axis.set_xticks([])
            axis.set_yticks([])
            image = np.clip(images[column], 0, 1)
            if image.ndim == 3:
                axis.imshow(
                    image[0] if len(image) == 1 else image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=1
                )
            else:
                axis.bar(range(image.size), image.ravel())
        axes[row, 0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
