"""What noise promises for vectors: given the clip's norm and the dimension, and why.

Training adds noise to every coordinate of a clipped vector. Gaussian noise sees only the L2 distance. For Laplace
and Staircase noise the worst change of a vector is not the worst change of a number; the rules here are proved
in docs/mechanisms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from fedveil.privacy import stairs
from fedveil.privacy.events import Noise
from fedveil.privacy.mechanisms import (
    Array,
    Gaussian,
    Laplace,
    LossPair,
    Staircase,
    check_noise,
    laplace_renyi,
    response_pair,
    response_renyi,
    three_point_renyi,
)


@dataclass(frozen=True)
class VectorGuarantee:
    """What a noise promises for any two vectors within the clip bound of each other.

    pure: the pure epsilon (infinity if there is none). rho: zCDP. renyi(orders): Rényi divergences.
    pair, copies: a dominating pair and how many independent copies of it make one release; pair is None where
    privacy-loss distributions are refused, and `refusal` says why.
    """

    pure: float
    rho: float
    renyi: Callable[[Array], Array]
    pair: LossPair | None
    reason: str
    refusal: str = ""
    copies: int = 1


@lru_cache(maxsize=4096)
def vector_guarantee(noise: Noise) -> VectorGuarantee:
    """The unsampled guarantee of `noise` under its clip norm in its dimension.

    Formal guarantee: for every pair of vectors at distance at most 1 in `noise.norm`, the Rényi divergence of
    each order is at most `renyi`, the loss is at most `pure`, and (if given) `pair` with `copies` dominates
    every hockey-stick divergence. Proofs: docs/mechanisms.
    """
    check_noise(noise)
    d, scale = noise.dimension, noise.multiplier
    if noise.mechanism == "gaussian":
        return VectorGuarantee(
            math.inf,
            1 / (2 * scale**2),
            lambda orders: orders / (2 * scale**2),
            Gaussian(scale).pair(),
            "Gaussian noise: only the L2 distance matters (an L1 clip bounds it too)",
        )
    if noise.mechanism == "laplace":
        return _laplace_vector(scale, d, noise.norm)
    if noise.mechanism == "staircase" and noise.width != 1:
        return _stairs_vector(noise)
    if noise.mechanism == "staircase":
        return _staircase_vector(Staircase(1 / scale, noise.nu), d, noise.norm)
    if noise.mechanism == "joint-staircase":
        spread = 1 if noise.norm == "l1" else math.ceil(math.sqrt(d) - 1e-12)
        pure = spread / scale
        why = "joint L1 Staircase: pure epsilon lambda" + (
            "" if spread == 1 else f" times {spread}, since an L2 bound of 1 allows an L1 change of sqrt(d)"
        )
        return VectorGuarantee(pure, min(pure**2 / 2, pure), lambda orders: response_renyi(orders, pure),
                               response_pair(pure), why)  # fmt: skip
    pure = 1 / scale
    return VectorGuarantee(
        d * pure,
        d * min(pure**2 / 2, pure),
        lambda orders: d * response_renyi(orders, pure),
        response_pair(pure),
        "two-valued reports: each of the d weights is epsilon-LDP and all of them may change",
        copies=d,
    )


def _laplace_vector(scale: float, d: int, norm: str) -> VectorGuarantee:
    if norm == "l1" or d == 1:
        return VectorGuarantee(
            1 / scale,
            min(1 / (2 * scale**2), 1 / scale),
            lambda orders: laplace_renyi(orders, 1 / scale),
            Laplace(scale).pair(),
            "Laplace noise under an L1 bound: the worst change moves one coordinate",
        )
    shift = 1 / (scale * math.sqrt(d))
    return VectorGuarantee(
        math.sqrt(d) / scale,
        1 / (2 * scale**2),
        lambda orders: d * laplace_renyi(orders, shift),
        None,
        "Laplace noise under an L2 bound: the worst change is spread evenly; at most Gaussian noise of sigma = b",
        "i.i.d. Laplace noise under an L2 clip has no known dominating pair (Gaussian noise of sigma = b does not "
        "dominate it): use the rdp accountant, or an L1 clip",
    )


def _stairs_vector(noise: Noise) -> VectorGuarantee:
    width, d = noise.width, noise.dimension
    lam = width / noise.multiplier
    return VectorGuarantee(
        stairs.pure(lam, width, d),
        stairs.zcdp(lam, width, d),
        lambda orders: stairs.renyi(orders, lam, noise.nu, width, d),
        None,
        f"i.i.d. Staircase noise on {d} coordinates with steps of {width:.3g} times the bound",
        "i.i.d. Staircase noise with steps of their own has no known dominating pair: use the rdp accountant",
    )


def _staircase_vector(law: Staircase, d: int, norm: str) -> VectorGuarantee:
    if d == 1:
        mass = law.top_mass(1.0)
        return VectorGuarantee(
            law.lam,
            min(law.lam**2 / 2, law.lam),
            lambda orders: three_point_renyi(orders, law.lam, mass),
            law.pair(),
            "scalar Staircase noise: the worst change is the whole bound",
        )
    mass = law.top_mass(1 / d if norm == "l1" else 1 / math.sqrt(d))
    return VectorGuarantee(
        d * law.lam,
        d * min(law.lam**2 / 2, law.lam),
        lambda orders: d * three_point_renyi(orders, law.lam, mass),
        None,
        f"i.i.d. Staircase noise on {d} coordinates: the worst change is spread evenly, the scalar formula does not hold",
        "the scalar Staircase pair is refused for i.i.d. noise in more than one dimension (a change spread over m "
        "coordinates costs up to m lambda): use the rdp accountant, Laplace, or joint-staircase under an L1 clip",
    )
