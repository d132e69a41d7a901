"""Server-side aggregation as pure functions: (state, start weights, updates) -> (new weights, new state).

`updates` are local updates delta = final - start, as one [K, P] array or as an iterable of [k, P] chunks in
client order. Sums run row by row in float64, so results do not depend on how the rows are chunked. State is
a plain
mapping of arrays: it goes into a checkpoint as it is.

Every rule here is post-processing of the updates it is given. It is free of privacy cost exactly when those
updates were already noised, or when the noise is added to the mean before the rule sees it (see `step`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedveil.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from fedveil.models.layout import Layout

Kind = Literal["mean", "fedprox", "scaffold", "fedmed", "momentum", "adam"]
KINDS: tuple[Kind, ...] = ("mean", "fedprox", "scaffold", "fedmed", "momentum", "adam")
State = Mapping[str, np.ndarray]
Updates = np.ndarray | Iterable[np.ndarray]

EMPTY: State = {}


def aggregate(
    kind: str,
    state: State,
    start: np.ndarray,
    updates: Updates,
    *,
    weights: Sequence[float] | np.ndarray | None = None,
    clients: Sequence[int] | None = None,
    population: int | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    server_rate: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    floor: float = 1e-3,
    layout: Layout | None = None,
    sharpness: float = 1.0,
    adaptive: bool = True,
) -> tuple[np.ndarray, State]:
    """One round of aggregation; returns (new weights float32 [P], new state).

    mean, fedprox   start + server_rate * mean(updates). FedProx differs on the client only
    (`LocalPlan.proximal`). momentum        v = beta1 * v + mean(updates);  start + server_rate * v adam
    the mean as pseudo-gradient in Adam without bias correction, `floor` added to the root scaffold
    needs `clients`, `population`, `steps`, `learning_rate` (see `scaffold_states`) fedmed          needs
    `layout` (see `fedmed_mean`); adaptive=False falls back to the mean for this round

    weights: one per row, any scale; None is equal. A row of weight 0 is left out (and its control variate
    kept). Recipes with a privacy promise use equal weights: sizes as weights would change the sensitivity.
    """
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise UserError(f"aggregate = {kind!r} is unknown; use one of {known}.{did_you_mean(kind, KINDS)}")
    if kind == "fedmed" and adaptive:
        if layout is None:
            raise ValueError("fedmed needs the layout: weights are found per layer")
        direction = fedmed_mean(start, updates, layout, weights=weights, sharpness=sharpness)
    elif kind == "scaffold":
        if clients is None or population is None or steps is None or learning_rate is None:
            raise ValueError("scaffold needs clients, population, steps and learning_rate")
        direction, state = scaffold_states(
            state,
            updates,
            clients,
            population=population,
            steps=steps,
            learning_rate=learning_rate,
            weights=weights,
        )
    else:
        direction = mean(updates, weights)
    return step(kind, state, start, direction, server_rate=server_rate, beta1=beta1, beta2=beta2, floor=floor)


def step(
    kind: str,
    state: State,
    start: np.ndarray,
    direction: np.ndarray,
    *,
    server_rate: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    floor: float = 1e-3,
) -> tuple[np.ndarray, State]:
    """The server's move along an already averaged (and, where noise is the server's task, already noised)
    direction. Use it directly when noise goes on the sum: direction = (sum + noise) / expected clients."""
    direction = np.asarray(direction, dtype=np.float64)
    if kind == "momentum":
        moved = beta1 * state.get("momentum", 0.0) + direction
        state = {**state, "momentum": moved}
    elif kind == "adam":
        first = beta1 * state.get("first", 0.0) + (1 - beta1) * direction
        second = beta2 * state.get("second", 0.0) + (1 - beta2) * direction**2
        moved = first / (np.sqrt(second) + floor)
        state = {**state, "first": first, "second": second}
    else:
        moved = direction
    return (np.asarray(start, dtype=np.float64) + server_rate * moved).astype(np.float32), state


def mean(
    updates: Updates, weights: Sequence[float] | np.ndarray | None = None, denominator: float | None = None
) -> np.ndarray:
    """Weighted mean of the rows in float64. `denominator` replaces the sum of weights: with a fixed, public
    one (expected number of clients) the sensitivity does not depend on who took part."""
    total: np.ndarray | None = None
    mass = 0.0
    for index, row in enumerate(rows(updates)):
        weight = _weight(weights, index)
        if total is None:
            total = np.zeros(row.shape[0])
        if weight:
            total += row if weight == 1.0 else weight * row
        mass += weight
    if total is None:
        raise ValueError("no updates to aggregate")
    share = mass if denominator is None else denominator
    if share <= 0:
        raise ValueError("the weights of the updates sum to 0")
    return total / share


def rows(updates: Updates) -> Iterator[np.ndarray]:
    """The updates one by one as float64, whether they come as [K, P] or as chunks."""
    chunks = [updates] if isinstance(updates, np.ndarray) else updates
    for chunk in chunks:
        for row in np.atleast_2d(chunk):
            yield np.asarray(row, dtype=np.float64)


def _need_two_passes(kind: str, updates: Updates) -> None:
    if not isinstance(updates, np.ndarray) and iter(updates) is updates:
        raise ValueError(f"{kind} passes over the updates twice: give an array or a list, not a generator")


def _weight(weights: Sequence[float] | np.ndarray | None, index: int) -> float:
    return 1.0 if weights is None else float(weights[index])


# --- SCAFFOLD ---


def scaffold_control(state: State, client: int, size: int) -> np.ndarray:
    """`ClientWork.control` (float32 [P]): server minus client control variate, added to each gradient."""
    none = np.zeros(size, dtype=np.float32)
    return (state.get("control", none) - state.get(f"control/{client}", none)).astype(np.float32)


def scaffold_controls(
    control: np.ndarray | None,
    own: Mapping[int, np.ndarray],
    updates: Updates,
    clients: Sequence[int],
    *,
    population: int,
    steps: int,
    learning_rate: float,
    weights: Sequence[float] | np.ndarray | None = None,
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """New control variates (float32): (the server's, those of the clients that took part).

        c_i' = c_i - c - update_i / (steps * learning_rate);   c' = c + sum(c_i' - c_i) / population

    control None and clients missing from `own` mean zero, so variates are stored from a client's first
    participation on. Rows of weight 0 change nothing. The rule assumes local SGD without momentum.

    Formal guarantee: the variates are functions of the updates given here and of earlier ones, so with
    updates that already carry their noise they are post-processing. Variates from raw gradients are not.
    """
    server = np.asarray(0.0 if control is None else control, dtype=np.float64)
    fresh: dict[int, np.ndarray] = {}
    change = np.asarray(0.0)
    for index, row in enumerate(rows(updates)):
        if not _weight(weights, index):
            continue
        old = np.asarray(own.get(clients[index], 0.0), dtype=np.float64)
        new = (old - server - row / (steps * learning_rate)).astype(np.float32)
        change = change + (new - old)
        fresh[clients[index]] = new
    if not fresh:
        raise ValueError("no updates to aggregate")
    return (server + change / population).astype(np.float32), fresh


def scaffold_states(
    state: State,
    updates: Updates,
    clients: Sequence[int],
    *,
    population: int,
    steps: int,
    learning_rate: float,
    weights: Sequence[float] | np.ndarray | None = None,
) -> tuple[np.ndarray, State]:
    """(mean update, new state): `scaffold_controls` with the variates kept in the state under "control" and
    "control/<client>". Two passes over the updates: give an array or a list of chunks, not a generator."""
    _need_two_passes("scaffold", updates)
    own = {c: state[f"control/{c}"] for c in clients if f"control/{c}" in state}
    control, fresh = scaffold_controls(
        state.get("control"),
        own,
        updates,
        clients,
        population=population,
        steps=steps,
        learning_rate=learning_rate,
        weights=weights,
    )
    stored = {f"control/{c}": variate for c, variate in fresh.items()}
    return mean(updates, weights), {**state, **stored, "control": control}


# --- FedMed ---


def fedmed_mean(
    start: np.ndarray,
    updates: Updates,
    layout: Layout,
    *,
    weights: Sequence[float] | np.ndarray | None = None,
    sharpness: float = 1.0,
) -> np.ndarray:
    """Adaptive weighting in the spirit of FedMed (Wu, Liang, Wang 2020): per layer, a client's share falls
    with the Jensen-Shannon divergence between its layer and the server's, both read as softmax distributions:
        share_u ~ weight_u * exp(-sharpness * D_u / mean D).

    What is ours: the division by the mean divergence (raw divergences of weight layers are tiny, which would
    make the shares equal) and the direction (agreement counts more, so a client with more noise counts
    less). FedMed's switch between this and the plain mean is `mediate`; its top-k compression is not here.

    Two passes over the updates: give an array or a list of chunks, not a generator. Use on noised updates
    only: the shares then cost nothing. They depend on the updates, so for noise that is added afterwards no
    sensitivity of "1/K per client" may be claimed.
    """
    _need_two_passes("fedmed", updates)
    parts = layout.layer_slices()
    server = [_softmax(start[p]) for p in parts]
    divergence = np.array(
        [
            [_jensen_shannon(s, _softmax(start[p] + row[p])) for p, s in zip(parts, server, strict=True)]
            for row in rows(updates)
        ]
    )
    given = np.array([_weight(weights, i) for i in range(len(divergence))])
    used = given > 0
    if not used.any():
        raise ValueError("no updates to aggregate")
    typical = divergence[used].mean(axis=0)
    shares = given[:, None] * np.exp(-sharpness * divergence / np.where(typical > 0, typical, 1.0))
    shares /= shares.sum(axis=0)
    total = np.zeros(layout.size)
    for share, row in zip(shares, rows(updates), strict=True):
        for s, p in zip(share, parts, strict=True):
            if s:
                total[p] += s * row[p]
    return total


def mediate(public_losses: Sequence[float]) -> bool:
    """FedMed's mediation: True (adaptive weighting) while the loss falls, False (plain mean) after it rose.
    Losses are the server's, on public data; a loss on private data would be a release of its own."""
    return len(public_losses) < 2 or public_losses[-1] <= public_losses[-2]


def _softmax(values: np.ndarray) -> np.ndarray:
    shifted = np.asarray(values, dtype=np.float64)
    weights = np.exp(shifted - shifted.max())
    return weights / weights.sum()


def _jensen_shannon(p: np.ndarray, q: np.ndarray) -> float:
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(p > 0, p * np.log(p / middle), 0.0).sum()
        right = np.where(q > 0, q * np.log(q / middle), 0.0).sum()
    return max(0.0, float(left + right) / 2)
