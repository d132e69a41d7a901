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

Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(points [R, n], row numbers [R]) -> (values [R], gradients [R, n])"""


@dataclass(frozen=True)
class Settings:
    """Stopping: `iterations` accepted steps per row, or value <= `tolerance`, or no progress.

    A row makes no progress when its value fell by less than `stall` (relative) over `patience` steps, or when
    the line search fails twice in a row (the first time the history is dropped)."""

    iterations: int = 300
    memory: int = 20
    tolerance: float = 0.0
    stall: float = 1e-7
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
    memory = settings.memory
    best = start.detach().clone()
    best_value = torch.full((rows_total,), float("inf"), dtype=start.dtype)
    done_iterations = torch.zeros(rows_total, dtype=torch.long)
    evaluations = torch.zeros(rows_total, dtype=torch.long)

    # The state of the active rows; `keep` shrinks all of it together.
    rows = torch.arange(rows_total)
    point = start.detach().clone()
    value, gradient = objective(point, rows)
    evaluations += 1
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
        "trial": torch.zeros(rows_total, dtype=torch.long),
        "iteration": torch.zeros(rows_total, dtype=torch.long),
        "stored": torch.zeros(rows_total, dtype=torch.long),  # pairs since the last reset (a ring buffer)
        "failures": torch.zeros(rows_total, dtype=torch.long),
        "mark": value.clone(),  # value `patience` steps ago
        "s": torch.zeros(rows_total, memory, size, dtype=start.dtype),
        "y": torch.zeros(rows_total, memory, size, dtype=start.dtype),
        "sy": torch.zeros(rows_total, memory, memory, dtype=torch.float64),  # inner products of the pairs
        "yy": torch.zeros(rows_total, memory, memory, dtype=torch.float64),
    }
    finite = torch.isfinite(value) & torch.isfinite(gradient).all(1)
    best_value[finite] = value[finite]
    state = {k: v[finite] for k, v in state.items()}
    _aim(state, torch.ones(len(state["rows"]), dtype=torch.bool))

    while len(state["rows"]):
        trial_point = state["point"] + state["step"][:, None] * state["direction"]
        trial_value, trial_gradient = objective(trial_point, state["rows"])
        evaluations[state["rows"]] += 1
        state["trial"] += 1
        finite = torch.isfinite(trial_value) & torch.isfinite(trial_gradient).all(1)
        trial_slope = torch.where(finite, (trial_gradient * state["direction"]).sum(1), float("inf"))

        decrease = finite & (trial_value <= state["value"] + settings.armijo * state["step"] * state["slope"])
        curved = trial_slope >= settings.wolfe * state["slope"]
        worn_out = state["trial"] >= settings.trials
        accept = decrease & (curved | worn_out)
        fail = worn_out & ~accept

        # Rows still searching: shrink or grow the bracket, guided by interpolation where it is trustworthy.
        shrink, grow = ~accept & ~decrease, ~accept & decrease
        state["high"] = torch.where(shrink, state["step"], state["high"])
        state["low"] = torch.where(grow, state["step"], state["low"])
        width = state["high"] - state["low"]
        parabola = (
            -0.5
            * state["slope"]
            * state["step"] ** 2
            / (trial_value - state["value"] - state["slope"] * state["step"])
        )
        middle = state["low"] + 0.5 * width
        guided = torch.minimum(
            torch.maximum(parabola, state["low"] + 0.1 * width), state["low"] + 0.9 * width
        )
        inside = torch.where(torch.isfinite(guided) & finite & (state["low"] == 0), guided, middle)
        state["step"] = torch.where(
            accept, state["step"], torch.where(torch.isinf(state["high"]), 2 * state["step"], inside)
        )

        if accept.any():
            moved = trial_point[accept] - state["point"][accept]
            change = trial_gradient[accept] - state["gradient"][accept]
            _remember(state, accept, moved, change)
            state["point"][accept] = trial_point[accept]
            state["value"][accept] = trial_value[accept]
            state["gradient"][accept] = trial_gradient[accept]
            state["iteration"] += accept
            state["failures"] *= ~accept
            better = accept & (state["value"] < best_value[state["rows"]])
            best[state["rows"][better]] = state["point"][better]
            best_value[state["rows"][better]] = state["value"][better]
            if watch is not None:
                watch(state["rows"][accept], state["point"][accept], state["iteration"][accept])

        state["stored"] = torch.where(fail, 0, state["stored"])
        state["failures"] += fail
        checkpoint = accept & (state["iteration"] % settings.patience == 0)
        stalled = checkpoint & (state["mark"] - state["value"] <= settings.stall * state["mark"].abs())
        state["mark"] = torch.where(checkpoint, state["value"], state["mark"])
        finished = (
            (state["iteration"] >= settings.iterations)
            | (state["value"] <= settings.tolerance)
            | (state["failures"] >= 2)
            | stalled
        )
        _aim(state, accept | fail)
        if finished.any():
            done_iterations[state["rows"][finished]] = state["iteration"][finished]
            state = {k: v[~finished] for k, v in state.items()}

    return Minimum(best, best_value, done_iterations, evaluations)


def _remember(state: dict[str, Tensor], rows: Tensor, moved: Tensor, change: Tensor) -> None:
    """Store a curvature pair, and its inner products with the others, where it is safely positive."""
    inner = (moved * change).sum(1)
    good = inner > 1e-10 * (moved.norm(dim=1) * change.norm(dim=1))
    where, moved, change = rows.nonzero()[:, 0][good], moved[good], change[good]
    if not len(where):
        return
    memory = state["s"].shape[1]
    slot = state["stored"][where] % memory
    state["s"][where, slot], state["y"][where, slot] = moved, change
    everyone = len(where) == len(rows)
    s, y = (state["s"], state["y"]) if everyone else (state["s"][where], state["y"][where])
    both = torch.stack([moved, change], 2)
    y_with = torch.bmm(y, both).double()
    state["sy"][where, slot] = y_with[:, :, 0]
    state["yy"][where, slot] = y_with[:, :, 1]
    state["yy"][where, :, slot] = y_with[:, :, 1]
    state["sy"][where, :, slot] = torch.bmm(s, change[:, :, None])[:, :, 0].double()
    state["stored"][where] += 1


def _aim(state: dict[str, Tensor], rows: Tensor) -> None:
    """New search directions and a fresh line search for the given rows.

    The compact form of the L-BFGS inverse: two passes over each row's history, everything else on the small
    matrices of inner products, in float64."""
    if not rows.any():
        return
    where = rows.nonzero()[:, 0]
    few = 2 * len(where) < len(rows)  # copying their history is cheaper than computing for everybody
    pick = where if few else slice(None)
    g, s, y = state["gradient"][pick], state["s"][pick], state["y"][pick]
    stored = state["stored"][pick]
    memory = s.shape[1]
    first = 1.0 / g.abs().sum(1).clamp(min=1.0)
    direction = -g * first[:, None]
    if int(stored.max()):
        # Oldest first: slot of the i-th oldest pair; unused slots come last and are masked out. Until the ring
        # wraps, that is simply the order of the slots, and only the filled ones are touched.
        wrapped = int(stored.max()) > memory
        filled = memory if wrapped else int(stored.max())
        s, y = s[:, :filled], y[:, :filled]
        sy, yy = state["sy"][pick][:, :filled, :filled], state["yy"][pick][:, :filled, :filled]
        used = stored.clamp(max=memory)
        oldest = torch.where(stored > memory, stored % memory, 0)
        order = (torch.arange(filled)[None] + oldest[:, None]) % filled
        live = torch.arange(filled)[None] < used[:, None]
        if wrapped:
            index, row, column = torch.arange(len(g))[:, None, None], order[:, :, None], order[:, None, :]
            sy, yy = sy[index, row, column], yy[index, row, column]
        if not bool(live.all()):
            pair = live[:, :, None] & live[:, None, :]
            sy, yy = torch.where(pair, sy, 0.0), torch.where(pair, yy, 0.0)
        diagonal = torch.where(live, sy.diagonal(dim1=1, dim2=2), 1.0)
        upper = torch.triu(sy, 1) + torch.diag_embed(diagonal)
        newest = (used - 1).clamp(min=0)[:, None]
        gamma = sy.diagonal(dim1=1, dim2=2).gather(1, newest) / yy.diagonal(dim1=1, dim2=2).gather(1, newest)
        s_g = torch.where(live, torch.bmm(s, g[:, :, None])[:, :, 0].double().gather(1, order), 0.0)
        y_g = torch.where(live, torch.bmm(y, g[:, :, None])[:, :, 0].double().gather(1, order), 0.0)
        alpha = torch.linalg.solve_triangular(upper, s_g[:, :, None], upper=True)[:, :, 0]
        inner = diagonal * alpha + gamma * ((yy @ alpha[:, :, None])[:, :, 0] - y_g)
        beta = torch.linalg.solve_triangular(upper.mT, inner[:, :, None], upper=False)[:, :, 0]
        on_s = torch.zeros_like(beta).scatter(1, order, torch.where(live, beta, 0.0)).to(g.dtype)
        on_y = torch.zeros_like(beta).scatter(1, order, torch.where(live, -gamma * alpha, 0.0)).to(g.dtype)
        bent = gamma.to(g.dtype) * g
        bent += torch.bmm(on_s[:, None], s)[:, 0] + torch.bmm(on_y[:, None], y)[:, 0]
        direction = torch.where((stored > 0)[:, None], -bent, direction)
    slope = (direction * g).sum(1)
    uphill = ~(slope < 0)  # also catches NaN
    direction = torch.where(uphill[:, None], -g * first[:, None], direction)
    slope = torch.where(uphill, -(g * g).sum(1) * first, slope)
    own = slice(None) if few else where
    state["stored"][where] = torch.where(uphill, 0, stored)[own]
    state["direction"][where], state["slope"][where] = direction[own], slope[own]
    state["step"][where], state["trial"][where] = 1.0, 0
    state["low"][where], state["high"][where] = 0.0, float("inf")
