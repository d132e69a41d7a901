import numpy as np
import pytest
import torch
from scipy.optimize import minimize as scipy_minimize

from fedveil.attacks.leakage import lbfgs
from fedveil.attacks.leakage.lbfgs import Settings, minimise


def with_gradient(function):
    def objective(points, rows):
        points = points.detach().requires_grad_()
        values = function(points, rows)
        return values.detach(), torch.autograd.grad(values.sum(), points)[0]

    return objective


def rosenbrock(x, _rows):
    return (100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2).sum(1)


@pytest.fixture
def start():
    return torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_each_row_ends_in_a_stationary_point(start):
    objective = with_gradient(rosenbrock)
    found = minimise(objective, start, Settings(iterations=400, stall=0.0))
    _, gradient = objective(found.point, torch.arange(12))
    assert gradient.norm(dim=1).max() < 1e-4
    assert (found.value < 1e-8).float().mean() > 0.5


def test_rows_do_not_influence_each_other(start):
    """Alone or in company: the same path, to rounding."""
    objective = with_gradient(rosenbrock)
    settings = Settings(iterations=15)
    together = minimise(objective, start, settings)
    for row in (0, 5, 11):
        alone = minimise(objective, start[row : row + 1], settings)
        torch.testing.assert_close(alone.point[0], together.point[row], rtol=1e-6, atol=1e-9)
        assert alone.evaluations[0] == together.evaluations[row]


def test_progress_towards_the_floor_counts_although_the_value_hardly_moves(start):
    """Rosenbrock's function below -1 by a thousandth of its size: patience is about what is left, not about the -1."""
    objective = with_gradient(lambda x, rows: 1e-3 * rosenbrock(x, rows) - 1)
    endless = -float("inf")
    early, late = (
        minimise(objective, start, Settings(400, tolerance=endless, stall=1e-2, patience=10, floor=floor))
        for floor in (endless, -1.0)
    )
    assert (late.iterations >= early.iterations).all() and (late.iterations > early.iterations).any()
    assert late.value.mean() < early.value.mean()


def two_loops(pairs, gradient):
    """The textbook recursion, newest pair last."""
    q, kept = gradient.clone(), []
    for s, y in reversed(pairs):
        a = (s @ q) / (s @ y)
        kept.append(a)
        q = q - a * y
    s, y = pairs[-1]
    q = q * (s @ y) / (y @ y)
    for (s, y), a in zip(pairs, reversed(kept), strict=True):
        q = q + (a - (y @ q) / (s @ y)) * s
    return -q


def test_directions_are_those_of_the_textbook_recursion(monkeypatch):
    """Also after the ring of 5 pairs has been overwritten."""
    pairs, checked = [], []
    remember, aim = lbfgs.History.remember, lbfgs._aim

    def spy_remember(self, rows, moved, change):
        remember(self, rows, moved, change)
        pairs.append((moved[0].clone(), change[0].clone()))

    def spy_aim(state, rows, history):
        aim(state, rows, history)
        if pairs and rows[0]:
            expected = two_loops(pairs[-5:], state["gradient"][0])
            torch.testing.assert_close(state["direction"][0], expected, rtol=1e-8, atol=1e-12)
            checked.append(True)

    monkeypatch.setattr(lbfgs.History, "remember", spy_remember)
    monkeypatch.setattr(lbfgs, "_aim", spy_aim)
    scale = torch.logspace(0, 3, 9, dtype=torch.float64)
    objective = with_gradient(lambda x, _rows: (scale * x**2).sum(1))
    minimise(objective, torch.ones(1, 9, dtype=torch.float64), Settings(iterations=12, memory=5))
    assert len(checked) >= 10


def test_needs_about_as_many_steps_as_scipy():
    scale = np.logspace(0, 4, 8)
    theirs = scipy_minimize(
        lambda x: ((scale * x * x).sum(), 2 * scale * x), np.ones(8), jac=True, method="L-BFGS-B",
        options={"maxcor": 20, "ftol": 0, "gtol": 1e-7, "maxiter": 500},
    )  # fmt: skip
    objective = with_gradient(lambda x, _rows: (torch.as_tensor(scale) * x**2).sum(1))
    ours = minimise(
        objective, torch.ones(1, 8, dtype=torch.float64), Settings(iterations=500, tolerance=1e-12)
    )
    assert ours.value[0] <= 1e-12 and ours.iterations[0] <= 1.5 * theirs.nit


def test_solved_rows_leave_the_batch():
    sizes = []

    def objective(points, rows):
        sizes.append(len(rows))
        difficulty = torch.where(rows == 0, 1.0, 1000.0).to(points.dtype)
        points = points.detach().requires_grad_()
        value = points[:, 0] ** 2 + difficulty * (points[:, 1] - points[:, 0] ** 2) ** 2
        return value.detach(), torch.autograd.grad(value.sum(), points)[0]

    minimise(
        objective, torch.tensor([[1.0, 1.0], [-1.0, 2.0]], dtype=torch.float64), Settings(tolerance=1e-9)
    )
    assert sizes[0] == 2 and sizes[-1] == 1


def test_a_row_that_starts_non_finite_has_no_result_and_harms_nobody():
    def objective(points, rows):
        value = (points**2).sum(1)
        return torch.where(rows == 1, float("nan"), value), 2 * points

    found = minimise(objective, torch.ones(3, 2, dtype=torch.float64), Settings(tolerance=1e-12))
    assert torch.isinf(found.value[1]) and found.value[[0, 2]].max() <= 1e-12


def test_non_finite_trials_are_stepped_back_from():
    """log(x) is undefined for the first, too long steps."""
    objective = with_gradient(lambda x, _rows: (x - 1e-3 * torch.log(x)).sum(1))
    found = minimise(objective, torch.full((2, 3), 5.0, dtype=torch.float64), Settings(iterations=100))
    torch.testing.assert_close(found.point, torch.full((2, 3), 1e-3, dtype=torch.float64), rtol=1e-3, atol=0)
