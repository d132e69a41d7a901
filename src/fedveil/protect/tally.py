"""Counting rows in places under noise: what a look at a table before training costs, and what it may show.

A row adds 1 to one place of each of `columns` lists (a missing value has its own place), so that two tables that differ in
one row differ by at most sqrt(columns) in l2, over all lists together. One Gaussian noise on all places makes the look a
Gaussian mechanism of the multiplier asked for.

Words that nobody declared (`shown_words`): only words that occur can be shown, so a word that occurs in one row alone could
betray that row. It is shown only if its noised count exceeds a threshold that a single row passes with probability `tail` at
most; `tail` is in the event, and accountants pay for it (Korolova et al.'s argument, with Gaussian noise).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from fedveil.keys import derive
from fedveil.privacy.events import Claim, Event, Release
from fedveil.protect.law import Gaussian
from fedveil.protect.noised import Noised
from fedveil.protect.place import AFTER_UPLOAD, by_group, none

FINE = 2.0**-20  # spacing of the noise's grid over the bound


@dataclass(frozen=True)
class Tally:
    """One noised look. noised: the noise on all places. tail: what showing words that nobody declared adds, or 0."""

    noised: Noised
    tail: float = 0.0

    @property
    def deviation(self) -> float:
        """Of the noise on one place."""
        return self.noised.deviation

    def counts(self, places: np.ndarray, key: bytes) -> np.ndarray:
        """Whole counts [places] with their noise."""
        return self.noised.add(np.asarray(places, np.float64), key[:16])

    def shown_words(self, counts: dict[str, int], key: bytes) -> dict[str, float]:
        """The words whose noised count exceeds the threshold, with that count.

        Formal guarantee: together with `counts` the mechanism of `event`: each word has noise of its own, and a word that
        only one row holds is shown with probability `tail` at most.
        """
        if not self.tail:
            raise ValueError("this look shows no words")
        limit = 1 + self.deviation * math.sqrt(2 * math.log(1 / self.tail))  # P(N > t) <= exp(-t^2 / 2)
        found = {}
        for word in sorted(counts):
            noisy = float(self.noised.add(np.array([float(counts[word])]), derive(key, f"word {word}")[:16])[0])
            if noisy > limit:
                found[word] = noisy
        return found

    def event(self) -> Event:
        """What happened, for the accountants."""
        found = self.noised.event()
        assert found is not None
        return replace(found, noise=replace(found.noise, tail=found.noise.tail + self.tail))


def tally(columns: int, places: int, multiplier: float, tail: float = 0.0) -> Tally:
    """A look at `columns` columns in `places` places altogether (words that may be shown among them)."""
    bound = math.sqrt(columns)
    # A little more noise than asked for: the grid and the sampler take a share of about 1e-3 at most.
    law, more = Gaussian(), 1 + FINE * math.sqrt(places) + 1e-6
    scale, shape = law.scale(multiplier * more, bound, places)
    return Tally(Noised(law, scale, bound, places, shape, grid=bound * FINE), tail)


def paid_release(clients: int, event: Event, what: str) -> Release:
    """What a look before the first round is charged as: everybody after it sees what it showed.

    Formal guarantee: `event` is the Gaussian mechanism of a `Tally` of which all later use of the look is a post-processing.
    """
    claims: list[Claim] = []
    for observer in AFTER_UPLOAD:
        claims += [Claim(observer, "example", "sound", what, event), by_group(observer)]
    claims += [none("client-process", unit, "rows are counted in the client's memory") for unit in ("example", "client")]
    return Release(0, ((tuple(range(clients)), tuple(claims)),), "look")
