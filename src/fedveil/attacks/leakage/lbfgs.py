"""L-BFGS on many small problems at once: every row has its own history, line search and end.

All rows advance in one loop; each pass evaluates one trial point per active row. A row that accepts its
trial takes a new direction, a row that does not keeps bracketing: no row waits for another. Finished rows
leave the batch, so the cost falls as victims are solved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.attacks.leakage.kernels import two_loops as fast_two_loops

Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(points [R, n], row numbers [R]) -> (values [R], gradients [R, n])"""


@dataclass(frozen=True)
class Settings:
    """Stopping: `iterations` accepted steps per row, or value <= `tolerance`, or no progress.

    A row makes no progress when its value fell by less than `stall` (relative, also to what is left above `floor`) over
    `patience` steps, or when the line search fails twice in a row (the first time the history is dropped)."""

    iterations: int = 300
    memory: int = 20
    tolerance: float = 0.0
    stall: float = 1e-7
    floor: float = -float("inf")
    patience: int = 20
    armijo: float = 1e-4
    wolfe: float = 0.9
    trials: int = 20


@dataclass(frozen=True)
class Minimum:
    """Best point of each row by value; `value` is infinite where no finite value was ever seen."""

    point: Tensor
    value: Tensor
    iterations: Tensor
    evaluations: Tensor


def minimise(
    objective: Objective,
    start: Tensor,
    settings: Settings = Settings(),
    *,
    watch: Callable[[Tensor, Tensor, Tensor], None] | None = None,
) -> Minimum:
    """Minimise every row of `start` [R, n] on its own.

    watch(rows, points, iterations) is told about accepted steps; it measures, it cannot change anything.
    """
    rows_total, size = start.shape
    found = Minimum(
        start.detach().clone(),
        torch.full((rows_total,), float("inf"), dtype=start.dtype),
        torch.zeros(rows_total, dtype=torch.long),
        torch.zeros(rows_total, dtype=torch.long),
    )
    state = _begin(objective, start, found)
    history = History.empty(rows_total, settings.memory, size, start.dtype)
    _aim(state, torch.ones(len(state["rows"]), dtype=torch.bool), history)
    while len(state["rows"]):
        trial = _try(objective, state, settings)
        found.evaluations[state["rows"]] += 1
        _bracket(state, trial)
        if trial.accept.any():
            _take(state, trial, history, found)
            if watch is not None:
                here = trial.accept
                watch(state["rows"][here], state["point"][here], state["iteration"][here])
        if bool(trial.fail.any()):
            history.forget(state["rows"][trial.fail])
        finished = _finished(state, trial, settings)
        _aim(state, (trial.accept | trial.fail) & ~finished, history)
        if finished.any():
            found.iterations[state["rows"][finished]] = state["iteration"][finished]
            state = {k: v[~finished] for k, v in state.items()}
    return found


State = dict[str, Tensor]
"""What is known of every active row; rows that end leave all of it together."""


def _begin(objective: Objective, start: Tensor, found: Minimum) -> State:
    """The rows whose first value is finite."""
    point = start.detach().clone()
    rows = torch.arange(len(point))
    value, gradient = objective(point, rows)
    found.evaluations.add_(1)
    state = {
        "rows": rows,
        "point": point,
        "value": value,
        "gradient": gradient,
        "direction": torch.zeros_like(point),
        "slope": torch.zeros_like(value),
        "step": torch.ones_like(value),
        "low": torch.zeros_like(value),
        "high": torch.full_like(value, float("inf")),
        "trial": torch.zeros_like(rows),
        "iteration": torch.zeros_like(rows),
        "failures": torch.zeros_like(rows),
        "mark": value.clone(),  # value `patience` steps ago
    }
    finite = torch.isfinite(value) & torch.isfinite(gradient).all(1)
    found.value[finite] = value[finite]
    return state if bool(finite.all()) else {k: v[finite] for k, v in state.items()}


@dataclass(frozen=True)
class Trial:
    """One trial point per active row. decrease: low enough. accept: taken. fail: given up after too many."""

    point: Tensor
    value: Tensor
    gradient: Tensor
    finite: Tensor
    decrease: Tensor
    accept: Tensor
    fail: Tensor


def _try(objective: Objective, state: State, settings: Settings) -> Trial:
    point = state["point"] + state["step"][:, None] * state["direction"]
    value, gradient = objective(point, state["rows"])
    state["trial"] += 1
    finite = torch.isfinite(value) & torch.isfinite(gradient).all(1)
    slope = torch.where(finite, (gradient * state["direction"]).sum(1), float("inf"))
    decrease = finite & (value <= state["value"] + settings.armijo * state["step"] * state["slope"])
    curved = slope >= settings.wolfe * state["slope"]
    worn_out = state["trial"] >= settings.trials
    accept = decrease & (curved | worn_out)
    return Trial(point, value, gradient, finite, decrease, accept, worn_out & ~accept)


def _bracket(state: State, trial: Trial) -> None:
    """Rows still searching: shrink or grow the bracket, guided by interpolation where it is trustworthy."""
    step, slope = state["step"], state["slope"]
    state["high"] = torch.where(~trial.accept & ~trial.decrease, step, state["high"])
    state["low"] = torch.where(~trial.accept & trial.decrease, step, state["low"])
    low, width = state["low"], state["high"] - state["low"]
    parabola = -0.5 * slope * step**2 / (trial.value - state["value"] - slope * step)
    middle = low + 0.5 * width
    guided = torch.minimum(torch.maximum(parabola, low + 0.1 * width), low + 0.9 * width)
    inside = torch.where(torch.isfinite(guided) & trial.finite & (low == 0), guided, middle)
    state["step"] = torch.where(trial.accept, step, torch.where(torch.isinf(state["high"]), 2 * step, inside))


def _take(state: State, trial: Trial, history: History, found: Minimum) -> None:
    """Rows that accept their trial move there; what they saw is remembered."""
    accept = trial.accept
    on = slice(None) if bool(accept.all()) else accept.nonzero()[:, 0]  # views where all rows move
    moved = trial.point[on] - state["point"][on]
    change = trial.gradient[on] - state["gradient"][on]
    history.remember(state["rows"][on], moved, change)
    state["point"][on] = trial.point[on]
    state["value"][on] = trial.value[on]
    state["gradient"][on] = trial.gradient[on]
    state["iteration"] += accept
    state["failures"] *= ~accept
    better = accept & (state["value"] < found.value[state["rows"]])
    found.point[state["rows"][better]] = state["point"][better]
    found.value[state["rows"][better]] = state["value"][better]


def _finished(state: State, trial: Trial, settings: Settings) -> Tensor:
    """Which rows end: enough steps, low enough, no progress, or two failed searches."""
    state["failures"] += trial.fail
    checkpoint = trial.accept & (state["iteration"] % settings.patience == 0)
    left = torch.minimum(state["mark"].abs(), state["mark"] - settings.floor)
    stalled = checkpoint & (state["mark"] - state["value"] <= settings.stall * left)
    state["mark"] = torch.where(checkpoint, state["value"], state["mark"])
    return (
        (state["iteration"] >= settings.iterations)
        | (state["value"] <= settings.tolerance)
        | (state["failures"] >= 2)
        | stalled
    )


@dataclass
class History:
    """The curvature pairs of every row, newest `memory` of each, by row number; finished rows are left alone."""

    s: Tensor  # [R, memory, n]
    y: Tensor
    rho: Tensor  # [R, memory]: 1 / <s, y>
    gamma: Tensor  # [R]: <s, y> / <y, y> of the newest pair
    stored: Tensor  # [R]: pairs since the last reset (a ring)

    @staticmethod
    def empty(rows: int, memory: int, size: int, dtype: torch.dtype) -> History:
        s, y = (torch.zeros(rows, memory, size, dtype=dtype) for _ in range(2))
        return History(
            s, y, torch.zeros(rows, memory, dtype=dtype), torch.ones(rows, dtype=dtype),
            torch.zeros(rows, dtype=torch.long),
        )  # fmt: skip

    def remember(self, rows: Tensor, moved: Tensor, change: Tensor) -> None:
        """Store a pair for each of the rows where its curvature is safely positive."""
        inner = (moved * change).sum(1)
        good = inner > 1e-10 * (moved.norm(dim=1) * change.norm(dim=1))
        if not bool(good.all()):
            rows, moved, change, inner = rows[good], moved[good], change[good], inner[good]
        slot = self.stored[rows] % self.s.shape[1]
        self.s[rows, slot], self.y[rows, slot] = moved, change
        self.rho[rows, slot] = 1 / inner
        self.gamma[rows] = inner / change.square().sum(1)
        self.stored[rows] += 1

    def forget(self, rows: Tensor) -> None:
        self.stored[rows] = 0
        self.gamma[rows] = 1.0

    def times(self, rows: Tensor, g: Tensor) -> Tensor:
        """The inverse Hessian of each row times its vector (the two-loop recursion); g itself without pairs."""
        if fast_two_loops is not None and g.dtype == torch.float32:
            return fast_two_loops(self.s, self.y, self.rho, self.gamma, self.stored, rows, g)
        memory, stored = self.s.shape[1], self.stored[rows]
        used = stored.clamp(max=memory)
        most = int(used.max()) if len(used) else 0
        alphas = []
        q = g.clone()
        for i in range(1, most + 1):  # newest first; rows with fewer pairs sit out
            at = (stored - i) % memory
            alpha = torch.where(i <= used, self.rho[rows, at] * (self.s[rows, at] * q).sum(1), 0.0)
            q -= alpha[:, None] * self.y[rows, at]
            alphas.append(alpha)
        q *= self.gamma[rows][:, None]
        for i in range(most, 0, -1):
            at = (stored - i) % memory
            beta = self.rho[rows, at] * (self.y[rows, at] * q).sum(1)
            q += torch.where(i <= used, alphas[i - 1] - beta, 0.0)[:, None] * self.s[rows, at]
        return q


def _aim(state: State, rows: Tensor, history: History) -> None:
    """New search directions and a fresh line search for the given rows."""
    if not bool(rows.any()):
        return
    where = slice(None) if bool(rows.all()) else rows.nonzero()[:, 0]
    g, names = state["gradient"][where], state["rows"][where]
    first = 1.0 / g.abs().sum(1).clamp(min=1.0)
    fresh = history.stored[names] == 0
    direction = torch.where(fresh[:, None], -g * first[:, None], -history.times(names, g))
    slope = (direction * g).sum(1)
    uphill = ~(slope < 0)  # also catches NaN
    if bool(uphill.any()):
        direction = torch.where(uphill[:, None], -g * first[:, None], direction)
        slope = torch.where(uphill, -(g * g).sum(1) * first, slope)
        history.forget(names[uphill])
    state["direction"][where], state["slope"][where] = direction, slope
    state["step"][where], state["trial"][where] = 1.0, 0
    state["low"][where], state["high"][where] = 0.0, float("inf")
