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
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fedveil.errors import UserError
from fedveil.federation import folder as run_folder
from fedveil.federation import own_code
from fedveil.federation.config import make_config
from fedveil.federation.harmonize import sigma_for
from fedveil.federation.own_rows import (
    Collate,
    Drawn,
    Loss,
    Marks,
    Rows,
    drawn,
    first_form,
    marks,
    one_by_one,
    try_loss,
)
from fedveil.federation.round import Task, blank, moment_of, noised_of, plan_of
from fedveil.keys import derive, entropy
from fedveil.models import nets
from fedveil.models.layout import flatten, layout_of, unflatten
from fedveil.privacy.events import Release
from fedveil.privacy.ledger import Budget, BudgetExceeded, Header, Ledger
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

ONE_BY_ONE: dict[str, Callable[[nn.Module, Any], torch.Tensor]] = {  # with inputs as the engines pass them
    "cross-entropy": lambda module, batch: nn.functional.cross_entropy(
        module(torch.as_tensor(batch[0]).float()), torch.as_tensor(batch[1]).reshape(-1).long()
    ),
    "squared": lambda module, batch: nn.functional.mse_loss(
        module(torch.as_tensor(batch[0]).float()).reshape(-1), torch.as_tensor(batch[1]).reshape(-1).float()
    ),
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

    def __init__(self, private: Private, dataset: object, collate: Collate) -> None:
        self.private, self.dataset, self.collate = private, dataset, collate

    def __len__(self) -> int:
        return max(1, math.ceil(self.private.terms.examples / self.private.terms.batch))

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            if self.private.stopped:
                return
            rows = self.private.drawn()
            with self.private.paid_if_it_fails():
                step = drawn(self.dataset, self.collate, rows)
            yield self.private.offer(step)


class Private:
    """A module, its optimiser and its batches under one ledger. Made by `fv.make_private`."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, terms: Terms, loss: Loss | str,
        out: Path, resume: bool,
    ) -> None:  # fmt: skip
        self.module, self.optimizer, self.terms, self.path = module, optimizer, terms, out
        self._root: int | bytes = entropy() if terms.seed is None else terms.seed
        self._task = task_of(module, terms, self._root)
        self.loader = PrivateLoader(self, loader.dataset, loader.collate_fn or default_collate)
        form = first_form(self.loader.dataset, self.loader.collate)
        if isinstance(loss, str):
            nets.check_model(module, name="make_private: the module")
        if form is not None:
            try_loss(module, loss, form)
        self._loss, self._assumes = self._proven(loss, form)
        self._stack = ExitStack()
        self._ledger = self._open(resume)
        self._draws = self.step
        # What the loader gave and nobody used yet, kept so that no other tensor can pass for it. Frameworks fetch ahead.
        self._offered: deque[tuple[Drawn, Marks]] = deque(maxlen=8)
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
        example and the noise is that of `Noised.add`; the release is in the ledger, on disk, before this returns or raises
        what may follow from the rows.
        """
        rows = self._take(batch)
        now = self._now()
        if self._ours:
            raise UserError("make_private: backward was called twice; call optimizer.step() after each backward.")
        if self.terms.steps is not None and self.step >= self.terms.steps:
            raise UserError(f"make_private: all {self.terms.steps} planned steps are done.")
        with self.paid_if_it_fails():
            total, loss = self._clipped(rows, now)
            released = self.noised(now).add(total, derive(self._root, "step-noise", now.number)[:16])
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

    def offer(self, step: Drawn) -> object:
        """Remember what the loader hands out: `backward` takes this and nothing else, once."""
        self._offered.append((step, step.marks))
        return step.batch

    @contextmanager
    def paid_if_it_fails(self) -> Iterator[None]:
        """That and how a step fails may follow from its rows: it is charged before anybody hears of it, and so are the planned
        steps that it leaves out, since where the loop ends then follows from the rows, too."""
        try:
            yield
        except Exception:
            end = self.step + 1 if self.terms.steps is None else self.terms.steps
            for number in range(self.step, end):
                note = "not played: an earlier step failed" if number > self.step else "failed"
                try:
                    self._ledger.spend(replace(self._release(self._now(number)), note=note))
                except BudgetExceeded:  # which would have ended the loop
                    break
            raise

    # -- the books

    @property
    def ledger(self) -> list[Row]:
        """Who may learn what from the steps so far."""
        return self._ledger.table()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the promises rest on besides the mathematics; in the ledger's header, too."""
        return self._ledger.header.assumes

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
            assumes=self._assumes,
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

    def _now(self, number: int | None = None) -> Moment:
        empty = blank(self._task.recipe, 1, self._task.setting.rounds)
        return moment_of(self._task, replace(empty, round=self.step if number is None else number))

    def _release(self, now: Moment) -> Release:
        return release(self._task.recipe, self._task.setting, now, {0: self.terms.examples})

    def _take(self, batch: tuple[object, ...]) -> Rows:
        """The rows of this batch, if the loader gave it and it was neither used nor changed."""
        found = marks(batch)
        for at, (step, known) in enumerate(self._offered):
            if known == found:
                del self._offered[at]
                return step.passed_as(batch)
        raise UserError(
            "make_private: backward takes a batch of private.loader, as it is and each one once: the promise counts on its "
            "random draw. This one was used, changed, or comes from elsewhere (move batches to a device inside the loss)."
        )

    def _proven(self, loss: Loss | str, form: object) -> tuple[Loss | str, tuple[str, ...]]:
        """The loss for an engine whose sums keep the bound in floating point, where torch alone stacks the rows, else for one
        example at a time, which does; and what that rests on."""
        collate, dataset = self.loader.collate, self.loader.dataset
        called = [*own_code.named("collate", collate), *own_code.named("dataset", type(dataset))]
        if not isinstance(loss, str):
            return loss, own_code.caveat([*own_code.named("loss", loss), *own_code.of_module(self.module), *called])
        plan = plan_of(replace(self._task, loss=loss), moment_of(self._task, blank(self._task.recipe, 1, 1)), 0, 1)  # type: ignore[arg-type]
        like = tuple(part.numpy() for part in Rows(1, form).stacks()[0]) if form is not None else None
        engine = pool.choose(self.module, plan, like=like)[0]  # type: ignore[arg-type]
        if engine not in bounded.COVERED or collate is not default_collate:
            return ONE_BY_ONE[loss], own_code.caveat([*own_code.of_module(self.module), *called])
        guess = engine == "graph" and form is None
        return loss, own_code.caveat([*(own_code.of_module(self.module) if guess or engine in own_code.CALLING else []), *called])

    def _clipped(self, rows: Rows, now: Moment) -> tuple[np.ndarray, float]:
        if not rows.count:
            return np.zeros(self._task.layout.size), math.nan
        if isinstance(self._loss, str):
            return self._by_engine(self._loss, rows, now)
        return one_by_one(self._task, self._loss, rows, now)

    def _by_engine(self, loss: str, rows: Rows, now: Moment) -> tuple[np.ndarray, float]:
        """The sum of clipped gradients by the fastest engine that can: minus the results of an `only_sum` plan."""
        task = replace(self._task, loss=loss)  # type: ignore[arg-type]
        plan = plan_of(task, now, 0, self.terms.examples)
        total, losses, seen = np.zeros(task.layout.size), 0.0, 0
        for at, (x, y) in enumerate(rows.stacks()):
            # Masks of dropout follow key and place: a key that nobody knows makes them chance, whoever else was drawn.
            key = derive(self._root, "masks", now.number, at)[:16]
            work = ClientWork(0, np.arange(len(x), dtype=np.int32)[None], key)
            found = pool.train(self.module, flatten(self.module), x.numpy(), y.numpy(), [work], plan, norms=False)
            seen += len(x)
            if found.finite[0]:
                total -= found.delta[0].astype(np.float64)
                losses += float(found.loss[0]) * len(x)
        return total, losses / seen

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
        return _applied(loss)
    if callable(loss):
        return loss
    raise UserError("make_private: loss must be a name, a torch loss, or a function of (module, batch of one example).")


def _applied(loss: Callable[[object, object], torch.Tensor]) -> Loss:
    """A loss of outputs and targets; it keeps the name of whose code it is."""

    def of_batch(module: nn.Module, batch: Any) -> torch.Tensor:
        return loss(module(batch[0]), batch[1])

    code = type(loss) if isinstance(loss, nn.Module) else loss
    of_batch.__module__, of_batch.__qualname__ = code.__module__, code.__qualname__
    return of_batch


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
