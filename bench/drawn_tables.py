"""Which constant, travel and averaging suit a small table? Chosen on drawn ones, so that no real row is looked at.

    python -m bench.drawn_tables [--tables 400]

Draws tables of the size of the breast cancer data (426 rows, three columns, 37 % of class 1) whose columns have the means and
deviations that are published for it, with random class means, correlations and a distance between the classes at which a
linear rule is right in about 96 %. Trains each with full-batch noisy gradients (float noise, the same steps as `sum-cdp` on a
linear head from zero) and prints the mean accuracy on 2,000 fresh rows. The planner's SMALL_RULE and the constant and average
of its cancer entry were read from such output, before they met the real rows.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.linear_model import LogisticRegression

from fedveil.privacy.objective import gaussian_like

ROWS, FRESH, SHARE, CLIP, DELTA = 426, 2000, 0.373, 0.1, 1e-5
# Published means and deviations of mean texture, worst area and worst smoothness, on log scales between the published extremes.
CENTRE, SPREAD = np.array([-0.02, -0.05, 0.08]), np.array([0.31, 0.37, 0.30])


def table(draw: np.random.Generator) -> tuple[np.ndarray, ...]:
    """x, y of one table, and of fresh rows of the same kind."""
    while True:
        apart = draw.uniform(0.3, 2.0, 3) * SPREAD
        inner = SPREAD**2 - SHARE * (1 - SHARE) * apart**2
        mixed = draw.normal(size=(3, 3))
        mixed = mixed @ mixed.T + 0.5 * np.eye(3)
        sizes = np.sqrt(np.diag(mixed))
        within = mixed / np.outer(sizes, sizes) * np.sqrt(np.outer(inner, inner)) if (inner > 0.1 * SPREAD**2).all() else None
        if within is not None and 3.3 < np.sqrt(apart @ np.linalg.solve(within, apart)) < 4.2:
            break
    first = CENTRE + draw.normal(size=3) * 0.05 - SHARE * apart
    found: list[np.ndarray] = []
    for count in (ROWS, FRESH):
        y = (draw.random(count) < SHARE).astype(int)
        noise = (draw.normal(size=(count, 3)) @ np.linalg.cholesky(within).T) * np.where(y == 1, 1.2, 0.9)[:, None]
        found += [np.clip(first + np.outer(y, apart) + noise, -1, 1), y]
    return tuple(found)


def rows(x: np.ndarray, constant: float) -> np.ndarray:
    """With a constant column, cut to length 1."""
    wide = np.concatenate([x, np.full((*x.shape[:2], 1), constant)], 2)
    return wide / np.maximum(np.linalg.norm(wide, axis=2, keepdims=True), 1)


def accuracy(
    tables: list[np.ndarray], sigma: float, travel: float, *, rounds: int, constant: float, average: float, seed: int = 0
) -> float:
    """Mean accuracy over all tables of the averaged last models of noisy descent."""
    x, y, fresh, truth = rows(tables[0], constant), tables[1], rows(tables[2], constant), tables[3]
    draw, weights = np.random.default_rng(seed), np.zeros((len(x), 2, 4))
    hot, kept = np.eye(2)[y], []
    for number in range(rounds):
        scores = np.einsum("rnd,rkd->rnk", x, weights)
        error = np.exp(scores - scores.max(2, keepdims=True))
        error = error / error.sum(2, keepdims=True) - hot
        norms = np.linalg.norm(error, axis=2) * np.linalg.norm(x, axis=2)
        clipped = error * np.minimum(1, CLIP / np.maximum(norms, 1e-12))[:, :, None]
        total = np.einsum("rnk,rnd->rkd", clipped, x) + sigma * rounds**0.5 * CLIP * draw.normal(size=weights.shape)
        weights = weights - travel / (rounds * CLIP) * total / ROWS
        if number >= rounds * (1 - average):
            kept.append(weights)
    mean = np.mean(kept, 0)
    return float(((np.einsum("rnd,rd->rn", fresh, mean[:, 1] - mean[:, 0]) > 0) == truth).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=400)
    count = parser.parse_args().tables
    draw = np.random.default_rng(1)
    tables = [np.stack(part) for part in zip(*[table(draw) for _ in range(count)], strict=True)]
    plain = [LogisticRegression(C=1e3).fit(tables[0][i], tables[1][i]).score(tables[2][i], tables[3][i]) for i in range(count)]
    print(f"without noise, logistic regression: {np.mean(plain):.4f}")
    for epsilon, clients in ((0.823, 1), (0.823, 10), (0.3, 1), (2.0, 1), (8.0, 1)):
        sigma = gaussian_like(epsilon, DELTA) * clients**0.5
        before = accuracy(tables, sigma, 4 * (ROWS / sigma) ** 0.8, rounds=20, constant=0.5, average=0.3)
        view = "sum" if clients == 1 else "server"
        print(f"epsilon {epsilon}, {view}: strength {ROWS / sigma:.0f}, the rule of all tables {before:.4f}")
        for constant in (0.25, 0.5):
            ways = {"rounds": 60, "constant": constant, "average": 0.5}
            found = {t: accuracy(tables, sigma, t, **ways) for t in (60, 150, 300, 460, 1000, 2000)}
            print(f"  constant {constant}: " + ", ".join(f"travel {t} {score:.4f}" for t, score in found.items()))


if __name__ == "__main__":
    main()
