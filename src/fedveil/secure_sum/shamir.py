"""Shamir's secret sharing over a prime field: any `threshold` shares give the secret, fewer say nothing.

The field is that of the smallest prime above 2**256, so every 32-byte secret is an element. A share is the value of a
polynomial of degree threshold - 1 with the secret as its constant term, at a point that is the holder's number (from 1).

Formal guarantee: with coefficients that are uniform in the field and unknown, threshold - 1 shares are uniform and
independent of the secret. Nothing here recognises a wrong share: who combines must check the secret against
something public (`coordinator` uses the public key, or the commitment).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PRIME = 2**256 + 297
WIDTH = 33  # bytes of a field element


def split(
    secret: int, coefficients: Sequence[int], points: Sequence[int], prime: int = PRIME
) -> dict[int, int]:
    """Shares of `secret` at `points`; as many are needed to combine as there are coefficients, plus one."""
    if not 0 <= secret < prime or any(not 0 < point < prime for point in points):
        raise ValueError("secret or point outside the field")
    found = {}
    for point in points:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value + coefficient) * point % prime
        found[point] = (value + secret) % prime
    return found


def weights(points: Sequence[int], prime: int = PRIME) -> list[int]:
    """Lagrange's weights at zero: the secret is the sum of weight times share over the points."""
    if len(set(points)) != len(points) or any(not 0 < point < prime for point in points):
        raise ValueError("points must be distinct and inside the field")
    found = []
    for point in points:
        above, below = 1, 1
        for other in points:
            if other != point:
                above = above * other % prime
                below = below * (other - point) % prime
        found.append(above * pow(below, -1, prime) % prime)
    return found


def combine(shares: Mapping[int, int], prime: int = PRIME) -> int:
    """The constant term of the polynomial through all the given shares."""
    points = list(shares)
    return sum(w * shares[p] for w, p in zip(weights(points, prime), points, strict=True)) % prime
