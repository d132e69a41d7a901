"""The noise of a secure sum: every node adds its own share, so that nobody ever holds a sum without noise.

A share is a vector of integers of the discrete Gaussian law with variance (deviation / grid)**2 / h, where h =
`parameters.honest` is the number of honest nodes in every sum that can be opened. More survivors mean more noise than
planned, never less; what colluding nodes know of their own shares is not counted.

Shares of the discrete Gaussian law do not add up to it exactly, and a sampler is exact up to a bound: `exact.shares_error`
has both. Claims carry it, so that accountants count it; above `LARGEST_EXTRA` a sum is refused.
"""

from __future__ import annotations

import math

import numpy as np

from fedveil.errors import UserError
from fedveil.privacy.events import Claim, Event, Noise, Observer, Relation, Sampling, Unit
from fedveil.protect import exact, noise
from fedveil.secure_sum import graph
from fedveil.secure_sum.parameters import Parameters

LARGEST_EXTRA = 1e-8
_PIECE = 1 << 14  # values that are rounded at a time


def share_deviation(parameters: Parameters) -> float:
    """Deviation of one node's share, in the unit of the values."""
    return parameters.deviation / math.sqrt(parameters.honest)


def share(parameters: Parameters, key: bytes) -> np.ndarray:
    """One node's share of the noise, in grid steps (int64). `key`: 16 fresh bytes from the system's entropy."""
    return exact.gaussian(key, 0, parameters.size, share_deviation(parameters) / parameters.grid)


def on_grid(parameters: Parameters, values: np.ndarray) -> np.ndarray:
    """A node's sum in grid steps (int64). What is not finite, or too far out, becomes zero as a whole vector.

    Formal guarantee: values that differ by at most `bound` in l2 give integers that differ by at most bound / grid +
    sqrt(size). The replacement by zeros is no part of that: clipped sums are finite, and it must stay so that no single
    record decides whether a node's training fails (engines give a broken example the contribution zero).
    """
    return _added(parameters, values, np.zeros(np.shape(values), np.int64))


def _added(parameters: Parameters, values: np.ndarray, units: np.ndarray) -> np.ndarray:
    """`units` with the values in grid steps added in place, unless they are not finite or too far out."""
    flat, out, far = np.asarray(values).reshape(-1), units.reshape(-1), 2.0**62 * parameters.grid
    if flat.size and not (float(flat.max()) < far and float(flat.min()) > -far):  # also false for NaN
        return units
    for start in range(0, flat.size, _PIECE):  # pieces stay in the cache
        out[start : start + _PIECE] += noise.snap(flat[start : start + _PIECE], parameters.grid)
    return units


def noised(parameters: Parameters, values: np.ndarray, key: bytes) -> np.ndarray:
    """A node's sum in grid steps with its share of the noise: what it masks. `key` as for `share`."""
    return _added(parameters, values, share(parameters, key))


def multiplier(parameters: Parameters, shares: int | None = None) -> float:
    """Noise multiplier of the Gaussian mechanism that the opened sum post-processes, rounding counted.

    shares: honest shares of noise in the sum that the observer does not know; `parameters.honest` by default.
    """
    count = parameters.honest if shares is None else shares
    own = share_deviation(parameters)
    error = exact.shares_error(own / parameters.grid, count)
    apart = 2 * parameters.size * error.ratio
    if apart > LARGEST_EXTRA:
        raise UserError(
            f"secure sum refused: shares of noise with deviation {own:g} on a grid of {parameters.grid:g} do not add up "
            f"closely enough (the loss may move by {apart:.1e}); use a finer grid"
        )
    return exact.shares_multiplier(own, count, parameters.bound, parameters.grid, parameters.size)


def drawn(parameters: Parameters, count: int) -> Noise:
    """The noise of `count` honest shares: its multiplier, and how far it may be from its law.

    Formal guarantee: the shares' samplers are within `ratio` of the law but for `tail`; the chance that a sparse graph leaves
    fewer honest shares is independent of the data and stands in `tail` too, where it costs more than its own size in delta.
    """
    error = exact.shares_error(share_deviation(parameters) / parameters.grid, count)
    tail = parameters.size * error.tail + (2.0**graph.SECURITY if parameters.degree else 0.0)
    return Noise("gaussian", multiplier(parameters, count), ratio=parameters.size * error.ratio, tail=tail)


def claims(
    parameters: Parameters,
    relation: Relation = "zero-out",
    steps: int = 1,
    sampling: Sampling | None = None,
) -> tuple[Claim, ...]:
    """What observers are promised about the protected unit by one opened sum, each computed from h.

    The server may hold up to `colluders` nodes. A participant knows its own share at least: with colluders = 0 one share
    less is counted against it. Sampling counts where the node itself draws in secret: `sampling`, by default Poisson with
    `parameters.rate`. The bound must be that of the neighbours in `relation`.
    """
    if sampling is None:
        sampling = Sampling("none") if parameters.rate == 1 else Sampling("poisson", rate=parameters.rate)
    unit: Unit = "client" if parameters.unit == "client" else "example"
    found = []
    with_nodes = parameters.honest
    others = with_nodes if parameters.colluders else with_nodes - 1
    seats: tuple[tuple[Observer, int, str], ...] = (
        ("server", with_nodes, f"the server with up to {parameters.colluders} nodes"),
        ("participants", others, f"up to {max(parameters.colluders, 1)} participants together"),
        ("public", with_nodes, "who sees the model only"),
    )
    for observer, count, who in seats:
        if count < 1:
            why = "the only honest share of noise that is guaranteed may be the observer's own"
            found.append(Claim(observer, unit, "none", why))
            continue
        why = (
            f"{who}: a sum under masks with the noise of {count} honest nodes at least (threshold {parameters.threshold} of "
            f"{parameters.nodes}); discrete shares on a grid of {parameters.grid:g}, rounding counted"
        )
        if parameters.degree:
            why += "; sparse neighbours: but for a chance of 2^-40 per sum, counted in delta"
        event = Event(drawn(parameters, count), sampling, relation, unit, steps)
        found.append(Claim(observer, unit, "sound", why, event))
    return tuple(found)


def wrap_chance(parameters: Parameters, largest: float) -> float:
    """Bound on P(some coordinate of the sum leaves the words), if exact sums are at most `largest` (before the grid).

    Wrapping around spoils the result, never the privacy. Every node may survive, each with its share of noise.
    """
    room = 2.0 ** (parameters.word - 1) - largest / parameters.grid - parameters.nodes
    spread = share_deviation(parameters) / parameters.grid * math.sqrt(parameters.nodes)
    if room <= 0:
        return 1.0
    return min(1.0, parameters.size * math.erfc(room / spread / math.sqrt(2)) * 1.001)
