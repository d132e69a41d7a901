"""A budget that holds although each release's noise is chosen after the ones before (by a server one does not trust).

Accountants of fixed compositions (pld, rdp with its best order) speak about noise that was fixed in advance. Under
adaptive choices the orders of a Rényi filter are paid for here: taking the best of k orders costs delta / k each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedveil.privacy import checks, renyi
from fedveil.privacy.accountants import SLACK, Answer, Kind, Refused, _divergences, _kind, _pure, _refuse_odd
from fedveil.privacy.events import Event

ORDERS = (2.0, 3.0, 5.0, 8.0, 14.0, 24.0, 48.0, 128.0)
TAILS = 1e-2  # the share of delta that is put aside for the samplers' tails


def adaptive(events: Sequence[Event], delta: float) -> Answer:
    """What a budget must be, at least, for these releases to pass the filter; releases go on while it stays below.

    Formal guarantee: fix epsilon and delta in advance, and make a release only if the answer including it is at most
    epsilon. Then everything released is (epsilon, delta)-DP, however events were chosen after what was seen before.
    Proof. Write L for the loss at the (random) stop and S_a for the sum of the divergences at order a there. For each
    order, exp((a-1)(L - S_a)) is a supermartingale stopped at that time, of mean at most 1 (Feldman and Zrnic 2021).
    The stop leaves at least one order a with S_a at most its share of the budget, the value that the conversion takes
    to (epsilon, delta/k). Which order that is may depend on the path; on the paths of order a the hockey-stick
    divergence at epsilon is at most delta/k by the conversion's proof, and the k orders add up to delta. Pure
    epsilons add up without a delta, so the smaller of both sums is a filter too.
    Samplers: let r be the sum of their ratios on the path. Call a draw bad if it lies where a sampler's probabilities are
    wrong for either neighbour. On paths without bad draws the real loss is at most L + 2r, so the proof holds with
    epsilon - 2r in place of epsilon and a factor e^r <= 1 + SLACK on delta. On the others the loss costs at most their
    probability, which `_bad` bounds step by step; its sum is kept below a share of delta that is fixed in advance.
    The answer is not an epsilon of its own: after an adaptive stop only the budget that was fixed in advance holds.
    """
    delta = checks.delta(delta)
    try:
        total, pure, ratio, bad = np.zeros(len(ORDERS)), 0.0, 0.0, 0.0
        for event in events:
            kind = _kind(event.noise, event.sampling, event.relation, event.unit)
            _refuse_odd(kind)
            steps = checks.count("steps", event.steps, most=checks.MOST_STEPS)
            total = total + steps * _divergences(kind, ORDERS)
            pure += steps * (_pure(kind) if kind.noise.mechanism != "gaussian" else np.inf)
            ratio, bad = ratio + steps * event.noise.ratio, bad + steps * _bad(kind, event.noise.tail)
    except Refused as why:
        return Answer("filter", None, delta, "none", str(why))
    orders, share = np.array(ORDERS), delta * (1 - TAILS) / (1 + SLACK) / len(ORDERS)
    with np.errstate(divide="ignore"):
        converted = np.min(total + np.log1p(-1 / orders) - np.log(share * orders) / (orders - 1))
    value = float(max(0.0, min(converted, pure))) + 2 * ratio
    if not np.isfinite(value):
        return Answer("filter", None, delta, "none", "delta = 0 needs pure mechanisms throughout")
    if ratio > SLACK or bad > TAILS * delta:
        return Answer("filter", None, delta, "none", "delta is too small for the samplers' error bound")
    return Answer("filter", value, delta, "sound", "within a budget fixed in advance; later noise may be chosen at will")


def _bad(kind: Kind, tail: float) -> float:
    """The probability that a step's draw lies in a sampler's tail of mass `tail`, or in that of the neighbour's.

    Proof for the neighbour's. Whoever sees everything but whether the unit took part sees noise around one of two points.
    An event of mass t around one has mass (e^D t)^((a-1)/a) at most around the other, D their divergence of order a (Hölder).
    """
    if tail <= 0:
        return 0.0
    orders = np.array(ORDERS)
    logs = (renyi.plain(kind.noise, ORDERS) + np.log(tail)) * (orders - 1) / orders
    return 2 * tail + float(np.exp(min(0.0, logs.min())))
