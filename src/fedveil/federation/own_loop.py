"""Your own training loop, made private: Poisson batches, clipped per-example gradients, exact noise, a ledger.

    private = fv.make_private(model, optimizer, loader, epsilon=2.0, epochs=3, out="runs/mine")
    for x, y in private.loader:
        private.backward(x, y)   # instead of criterion(model(x), y).backward()
        optimizer.step()

It is a federation of one client whose sum gets its noise once per step, played by the same parts as every other run. The
optimiser, its schedule and everything else in the loop only see noised gradients.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fedveil.errors import UserError
from fedveil.federation import folder as run_folder
from fedveil.federation.config import make_config
from fedveil.federation.harmonize import sigma_for
from fedveil.federation.round import Task, blank, moment_of, noised_of, plan_of
from fedveil.keys import derive, entropy
from fedveil.models.layout import flatten, layout_of, unflatten
from fedveil.privacy.events import Release
from fedveil.privacy.ledger import Budget, Header, Ledger
from fedveil.privacy.ledger.entries import Row
from fedveil.privacy.ledger.journal import Anchor, check_anchors, read
from fedveil.protect import bounded
from fedveil.protect.clip import Given, constant
from fedveil.protect.noised import Noised
from fedveil.protect.place import InSum
from fedveil.protect.promise import release
from fedveil.protect.recipe import Recipe, digest
from fedveil.protect.setting import Moment, Setting
from fedveil.training import pool
from fedveil.training.contract import ClientWork
from fedveil.training.torch import functional

Batch = TypeVar("Batch")
Loss = Callable[[nn.Module, Any], torch.Tensor]  # (module, a batch of one example) -> its loss
Marks = tuple[tuple[int, int], ...]
ONE_BY_ONE: dict[str, Loss] = {
    "cross-entropy": lambda module, batch: nn.functional.cross_entropy(module(batch[0]), batch[1].reshape(-1)),
    "squared": lambda module, batch: nn.functional.mse_loss(module(batch[0]).reshape(-1), batch[1].reshape(-1).float()),
}
NAMED: dict[type, str] = {nn.CrossEntropyLoss: "cross-entropy", nn.MSELoss: "squared"}


@dataclass(frozen=True)
class Terms:
    """What was agreed before the first step. steps None: the end is chosen later, so that nothing sound can be said of it."""

    recipe: Recipe
    epsilon: float | None
    delta: float
    batch: float
    examples: int
    steps: int | None
    seed: int | None


def playable(recipe: Recipe) -> Recipe:
    """The recipe as one holder plays it: noise once on the sum of its clipped gradients.

    Refuses what needs more than that sum: then `fv.run` has to play it.
    """
    why = ""
    if not recipe.private or not recipe.place.of_gradients:
        why = "it does not noise sums of per-example gradients; choose one that does, such as 'fed-cdp-sound'"
    elif type(recipe.clip.rule) is not Given or recipe.scale.batch or recipe.clip.of_weights:
        why = "its clip bound or noise follows the data; choose clip.rule = given and sensitivity = bound"
    elif recipe.noise_on.for_each:
        why = "it noises every example; choose noise_on = sum"
    elif not recipe.fineness:
        why = "its noise is float noise, which promises nothing; leave grid out"
    elif recipe.law is None or not recipe.law.adds_up:
        why = "its noise is not Gaussian; choose mechanism = gaussian"
    if why:
        raise UserError(f"make_private: recipe '{recipe.name}' cannot be played in a loop of your own: {why}.")
    return replace(recipe, place=InSum(), counted=())


def task_of(module: nn.Module, terms: Terms, root: int | bytes) -> Task:
    """One client, one step per round: what the noise and the promise of every step are read from."""
    layout = layout_of(module)
    if not layout.size:
        raise UserError("make_private: the module has no trainable parameters.")
    odd = [name for name, p in module.named_parameters() if p.requires_grad and p.dtype != torch.float32]
    if odd:
        raise UserError(f"make_private: parameter '{odd[0]}' is not float32; gradients are bounded in float32 only.")
    device = next(p for p in module.parameters() if p.requires_grad).device.type
    setting = Setting(
        clients=1, cohort=1.0, rounds=terms.steps or 1, steps=1, batch=terms.batch, examples=terms.examples,
        layers=layout.layers, dimension=layout.size, engine="reference" if device == "cpu" else device,
    )  # fmt: skip
    nobody = np.zeros((1, 1), np.float32)
    return Task(terms.recipe, setting, module, layout, nobody, np.zeros(1), None, root)


class PrivateLoader:
    """Draws every step's batch as the recipe says; a pass has as many steps as the loader it replaces.

    Formal guarantee: each batch is drawn from the given root alone (the system's entropy unless seeded), independently of
    data and model.
    """

    def __init__(self, private: Private, dataset: Any, collate: Callable[[list[object]], object]) -> None:
        self.private, self.dataset, self.collate = private, dataset, collate

    def __len__(self) -> int:
        return max(1, math.ceil(self.private.terms.examples / self.private.terms.batch))

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            if self.private.stopped:
                return
            rows = self.private.drawn()
            yield self.private.offer(self._batch(rows), len(rows))

    def _batch(self, rows: np.ndarray) -> object:
        if len(rows):
            return self.collate([self.dataset[int(row)] for row in rows])
        alike = self.collate([self.dataset[0]])  # nobody was drawn: noise alone, in the shape of a batch
        return tree_map(lambda leaf: leaf[:0], alike)


class Private:
    """A module, its optimiser and its batches under one ledger. Made by `fv.make_private`."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, terms: Terms, loss: Loss | str,
        out: Path, resume: bool,
    ) -> None:  # fmt: skip
        self.module, self.optimizer, self.terms, self.path = module, optimizer, terms, out
        self._root: int | bytes = entropy() if terms.seed is None else terms.seed
        self._task = task_of(module, terms, self._root)
        self._loss = self._proven(loss)
        self._stack = ExitStack()
        self._ledger = self._open(resume)
        self.loader = PrivateLoader(self, loader.dataset, loader.collate_fn or default_collate)
        self._draws = self.step
        # What the loader gave and nobody used yet, kept so that no other tensor can pass for it. Frameworks fetch ahead.
        self._offered: deque[tuple[object, Marks, int]] = deque(maxlen=8)
        self._ours: dict[int, torch.Tensor] = {}  # parameter -> its gradient as it was made
        self._hooks = [optimizer.register_step_pre_hook(self._guard), optimizer.register_step_post_hook(self._used)]

    # -- the loop

    @property
    def step(self) -> int:
        """Steps that were charged so far."""
        return self._ledger.rounds

    @property
    def stopped(self) -> str:
        """Why no further step may be made, or ""."""
        if self.terms.steps is not None and self.step >= self.terms.steps:
            return f"all {self.terms.steps} planned steps are done"
        return ""

    def backward(self, *batch: object) -> float:
        """Put clipped, noised gradients into `.grad`, having charged them; returns the batch's mean loss.

        batch: what `private.loader` gave last, unchanged. The returned loss was computed from private rows without noise: it
        is for you alone, and a decision that follows it is not covered by the ledger.

        Formal guarantee: `.grad` is a function of sum + noise, where the sum moves by at most `Noised.bound` with one
        example and the noise is that of `Noised.add`; the release is in the ledger, on disk, before this returns.
        """
        count = self._take(batch)
        now = self._now()
        if self._ours:
            raise UserError("make_private: backward was called twice; call optimizer.step() after each backward.")
        if self.terms.steps is not None and self.step >= self.terms.steps:
            raise UserError(f"make_private: all {self.terms.steps} planned steps are done.")
        total, loss = self._clipped(batch, now, count)
        noised = self.noised(now)
        released = noised.add(total, derive(self._root, "step-noise", now.number)[:16])
        made = hashlib.sha256(released.tobytes()).hexdigest()
        self._ledger.spend(self._release(now), made=made)
        place = self._task.recipe.place
        assert isinstance(place, InSum)
        self._write(released / place.everyone(self._task.recipe, self._task.setting))
        return loss

    def noised(self, now: Moment | None = None) -> Noised:
        """The noise of the coming step."""
        return noised_of(self._task, now or self._now(), 0, self.terms.examples)[0]

    def drawn(self) -> np.ndarray:
        """The rows of the coming step. Each call draws anew."""
        batches, size = self._task.recipe.batches, self.terms.examples
        self._draws += 1
        # Numbered by draws, not by steps: a batch that was skipped is never drawn again for another step.
        rows = batches.draw(np.arange(size), self.terms.batch, 1, self._root, self._draws, 0)[0]
        return rows[rows >= 0].astype(np.int64)

    def offer(self, batch: Batch, count: int) -> Batch:
        """Remember what the loader hands out: `backward` takes this and nothing else, once."""
        self._offered.append((batch, _marks(batch), count))
        return batch

    # -- the books

    @property
    def ledger(self) -> list[Row]:
        """Who may learn what from the steps so far."""
        return self._ledger.table()

    def epsilon(self, observer: str = "public", unit: str = "example") -> float | None:
        """What was spent so far; None where nothing finite is promised."""
        return self._ledger.epsilon(observer, unit)

    def state_dict(self) -> dict[str, object]:
        """Module, optimiser, and the ledger's head at this point."""
        return {
            "module": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
            "ledger": list(self._ledger.head),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. What was spent since then stays spent: the ledger never goes back."""
        number, head = state["ledger"]
        path = self.path / "ledger.jsonl"
        check_anchors(read(path).records, [Anchor(int(number), str(head), "the saved state")], path)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Give the optimiser and the ledger's lock back."""
        for hook in self._hooks:
            hook.remove()
        self._ledger.close()
        self._stack.close()

    def __enter__(self) -> Private:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        spent = self.epsilon()
        told = "no finite promise" if spent is None else f"epsilon {spent:.3g} at delta {self.terms.delta:g}"
        return f"<Private: {self.terms.recipe.name}, {self.step} steps, {told} per example, ledger in {self.path}>"

    # -- inside

    def _open(self, resume: bool) -> Ledger:
        terms, path = self.terms, self.path / "ledger.jsonl"
        if path.exists() and not resume:
            raise UserError(f"{self.path} already holds a ledger: pass resume=True to continue it, or another out.")
        if resume and not path.exists():
            raise UserError(f"resume=True: {path} does not exist; leave resume out to begin.")
        budgets = () if terms.epsilon is None else (Budget(terms.epsilon, "public", "example"),)
        header = Header(
            delta=terms.delta, clients=1, sizes=(terms.examples,), budgets=budgets, simulated=terms.seed is not None,
            planned_rounds=terms.steps, stopping="data" if terms.steps is None else "fixed", config=digest(terms.recipe),
        )  # fmt: skip
        self._stack.enter_context(run_folder.hold(self.path))
        try:
            ledger = run_folder.open_ledger(self.path, lambda: header)
            same = ("delta", "sizes", "budgets", "simulated", "planned_rounds", "config")
            before = ledger.header
            changed = [name for name in same if getattr(before, name) != getattr(header, name)]
            if changed:
                ledger.close()
                raise UserError(f"resume=True: {', '.join(changed)} differ from the ledger in {self.path}.")
        except BaseException:
            self._stack.close()
            raise
        return ledger

    def _now(self) -> Moment:
        empty = blank(self._task.recipe, 1, self._task.setting.rounds)
        return moment_of(self._task, replace(empty, round=self.step))

    def _release(self, now: Moment) -> Release:
        return release(self._task.recipe, self._task.setting, now, {0: self.terms.examples})

    def _take(self, batch: tuple[Any, ...]) -> int:
        """How many rows this batch has, if the loader gave it and it was neither used nor changed."""
        marks = _marks(batch)
        for at, (_, known, count) in enumerate(self._offered):
            if known == marks:
                del self._offered[at]
                return count
        raise UserError(
            "make_private: backward takes a batch of private.loader, as it is and each one once: the promise counts on its "
            "random draw. This one was used, changed, or comes from elsewhere (move batches to a device inside the loss)."
        )

    def _proven(self, loss: Loss | str) -> Loss | str:
        """The loss for an engine whose sums keep the bound in floating point, else for one example at a time, which does."""
        if not isinstance(loss, str):
            return loss
        plan = plan_of(replace(self._task, loss=loss), moment_of(self._task, blank(self._task.recipe, 1, 1)), 0, 1)  # type: ignore[arg-type]
        return loss if pool.choose(self.module, plan)[0] in bounded.COVERED else ONE_BY_ONE[loss]

    def _clipped(self, batch: tuple[Any, ...], now: Moment, count: int) -> tuple[np.ndarray, float]:
        if not count:
            return np.zeros(self._task.layout.size), math.nan
        if isinstance(self._loss, str):
            return self._by_engine(self._loss, batch, now, count)
        return one_by_one(self._task, self._loss, batch if len(batch) > 1 else batch[0], now, count)

    def _by_engine(self, loss: str, batch: tuple[Any, ...], now: Moment, count: int) -> tuple[np.ndarray, float]:
        """The sum of clipped gradients by the fastest engine that can: minus the result of an `only_sum` plan."""
        x, y = (np.asarray(part) for part in (batch if len(batch) == 2 else batch[0]))
        if len(x) != count:
            raise UserError(f"make_private: {count} rows were drawn but the batch has {len(x)}: the collate function may not "
                            "add or drop rows.")  # fmt: skip
        task = replace(self._task, loss=loss)  # type: ignore[arg-type]
        work = ClientWork(0, np.arange(count, dtype=np.int32)[None], b"\0" * 16)
        plan = plan_of(task, now, 0, self.terms.examples)
        found = pool.train(self.module, flatten(self.module), x, y, [work], plan, norms=False)
        if not found.finite[0]:
            return np.zeros(task.layout.size), math.nan
        return -found.delta[0].astype(np.float64), float(found.loss[0])

    def _write(self, gradient: np.ndarray) -> None:
        named = unflatten(torch.as_tensor(gradient.astype(np.float32)), self._task.layout)
        for name, value in named.items():
            parameter = self.module.get_parameter(name)
            parameter.grad = value.to(parameter.device).clone()
            self._ours[id(parameter)] = parameter.grad.clone()

    def _guard(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the optimiser's step: its gradients must be ours, as they were made."""
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            raise UserError("make_private: a closure computes gradients without noise; call optimizer.step() without one.")
        moved = {id(p): p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        same = self._ours.keys() == moved.keys() and all(torch.equal(moved[at], made) for at, made in self._ours.items())
        if not self._ours or not same:
            raise UserError(
                "make_private: optimizer.step() without noised gradients: call private.backward(batch) right before it, and "
                "neither loss.backward() nor anything that changes .grad in between."
            )

    def _used(self, *_: object) -> None:
        self._ours = {}


def one_by_one(task: Task, loss: Loss, batch: Any, now: Moment, count: int) -> tuple[np.ndarray, float]:
    """The sum of clipped gradients of any loss, one example after the other, in float64; and the mean loss.

    Formal guarantee: each example's part is computed from the weights and that example alone and keeps the bound
    (`bounded.clip_vector`); random masks are drawn afresh for each. A loss that changes a buffer of the module is refused.
    """
    module, clip = task.module, task.recipe.clip
    wanted = [module.get_parameter(name) for name in task.layout.names]
    pieces = clip.pieces(task.layout.layer_slices())
    limit = clip.piece(now.bounds[0], len(pieces))
    total, losses = np.zeros(task.layout.size), []
    before = [(b, b._version) for b in module.buffers()]
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        for row in range(count):
            torch.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
            value = loss(module, tree_map(lambda leaf, at=row: leaf[at : at + 1], batch))
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise UserError("make_private: the loss of one example must be one number.")
            found = torch.autograd.grad(value.sum(), wanted, allow_unused=True, materialize_grads=True)
            flat = torch.cat([g.detach().reshape(-1) for g in found]).cpu().numpy()
            if np.isfinite(flat).all():  # one that is not adds nothing, which keeps every bound
                total += bounded.clip_vector(flat, limit, pieces, clip.norm)
                losses.append(float(value.detach()))
    if any(b._version != version for b, version in before):
        raise UserError(
            "make_private: the forward pass changes a buffer of the module (running statistics, counters) from private rows; "
            "such values would leave without noise. Use layers without them, or freeze them."
        )
    return total, float(np.mean(losses)) if losses else math.nan


def _marks(batch: Any) -> Marks:
    """Identity and version of every tensor in a batch."""
    return tuple((id(leaf), getattr(leaf, "_version", 0)) for leaf in tree_flatten(batch)[0])


def loss_of(loss: Any) -> Loss | str:
    """A name that the engines know, or a function of (module, batch of one example)."""
    if isinstance(loss, str):
        if loss not in NAMED.values():
            raise UserError(f"make_private: loss = '{loss}': use cross-entropy, squared, or a function.")
        return loss
    if loss is nn.functional.cross_entropy:
        return "cross-entropy"
    if loss is nn.functional.mse_loss:
        return "squared"
    if type(loss) in NAMED and vars(loss).items() >= {"reduction": "mean"}.items() and not list(loss.buffers()):
        plain = getattr(loss, "label_smoothing", 0.0) == 0.0 and getattr(loss, "ignore_index", -100) == -100
        if plain and getattr(loss, "weight", None) is None:
            return NAMED[type(loss)]
    if isinstance(loss, nn.Module) or getattr(loss, "__module__", "").startswith("torch."):
        return lambda module, batch: loss(module(batch[0]), batch[1])
    if callable(loss):
        return loss
    raise UserError("make_private: loss must be a name, a torch loss, or a function of (module, batch of one example).")


def make_private(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    *,
    recipe: Recipe,
    loss: Any = "cross-entropy",
    epsilon: float | None = None,
    delta: float = 1e-5,
    epochs: int | None = None,
    steps: int | None = None,
    out: str | Path,
    resume: bool = False,
    seed: int | None = None,
) -> Private:
    """See `fedveil.api.make_private`."""
    recipe = playable(recipe)
    examples, batch = _sizes(loader)
    if steps is None and epochs is not None:
        steps = epochs * max(1, math.ceil(examples / batch))
    why = functional.why_not(module)
    if why:
        raise UserError(f"make_private: {why}.")
    _check_parameters(module, optimizer)
    for name, value in (("epsilon", epsilon), ("steps", steps)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"make_private: {name} = {value} must be above 0.")
    fixed = all(schedule.kind == "constant" for schedule in (recipe.sigma, recipe.clip.bound))
    if steps is None and (epsilon is not None or not fixed):
        raise UserError("make_private: say how long you train, with epochs=… or steps=…: the noise follows from it.")
    terms = Terms(recipe, epsilon, delta, batch, examples, steps, seed)
    if epsilon is not None:
        goal = make_config({"recipe": "sum-cdp", "delta": delta, "observer": "public"})
        task = task_of(module, terms, 0)
        sigma = sigma_for(task, goal, epsilon, steps or 1, examples)
        terms = replace(terms, recipe=replace(recipe, sigma=constant(sigma)))
    return Private(module, optimizer, loader, terms, loss_of(loss), Path(out), resume)


def _sizes(loader: DataLoader) -> tuple[int, float]:
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise UserError("make_private: the loader's dataset must have rows that can be drawn (len and [i]); a stream has none.")
    if loader.batch_size is None:
        raise UserError("make_private: the loader needs a batch_size: the expected number of rows in a step.")
    examples = len(loader.dataset)  # type: ignore[arg-type]
    if examples < 1:
        raise UserError("make_private: the loader's dataset is empty.")
    return examples, float(min(loader.batch_size, examples))


def _check_parameters(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ours = {id(p) for p in module.parameters() if p.requires_grad}
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if theirs - ours:
        raise UserError("make_private: the optimizer moves parameters that are not the module's: they would get no noise.")
    if ours - theirs:
        raise UserError(
            "make_private: the optimizer leaves out trainable parameters of the module; set requires_grad = False on those "
            "that are not to be trained."
        )
