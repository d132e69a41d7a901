"""How records get into batches and clients into rounds: each way draws, and says what its draws are worth.

A way of drawing is one value with two faces: `draw` makes the choice, `counted` tells the accountants what was done. Nothing
else in the package knows how a batch came about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedveil.privacy.events import Relation, Sampling
from fedveil.protect import batches as draws


@dataclass(frozen=True)
class Counted:
    """What drawing is worth: the sampling, the neighbours it is about, and by how much those differ.

    reach: how many bounded contributions change between neighbours (2 where one record takes another's place).
    """

    sampling: Sampling
    relation: Relation
    reach: float = 1.0


class Batches(Protocol):
    """How a client draws the records of its local steps."""

    @property
    def name(self) -> str: ...
    @property
    def random_size(self) -> bool: ...  # does the number of records vary from step to step?

    @property
    def plain(self) -> Batches: ...  # what training without noise uses instead
    def draw(
        self, rows: np.ndarray, batch: float, steps: int, root: int | bytes, number: int, client: int
    ) -> np.ndarray: ...
    def counted(self, batch: float, size: int) -> Counted: ...
    def constant(self, batch: float, size: int) -> float: ...  # the batch that sums are divided by
    def uses(self, steps: int, batch: float, size: int) -> int: ...  # most steps that touch one record in a round
    def share(self, chosen: list[int], batch: float, size: int) -> int: ...  # of these steps, how many touch one record


@dataclass(frozen=True)
class _Drawn:
    """What the built-in ways share."""

    name: str = ""
    random_size: bool = False

    @property
    def plain(self) -> Batches:
        return self

    def draw(
        self, rows: np.ndarray, batch: float, steps: int, root: int | bytes, number: int, client: int
    ) -> np.ndarray:
        return draws.batches(self.name, rows, batch, steps, root, number, client)

    def counted(self, batch: float, size: int) -> Counted:
        return Counted(Sampling("none"), "zero-out")

    def constant(self, batch: float, size: int) -> float:
        return float(size) if batch >= size else batch

    def uses(self, steps: int, batch: float, size: int) -> int:
        return steps

    def share(self, chosen: list[int], batch: float, size: int) -> int:
        return len(chosen)


@dataclass(frozen=True)
class PoissonBatches(_Drawn):
    """Every record tosses its own coin in every step."""

    name: str = "poisson"
    random_size: bool = True

    @property
    def plain(self) -> Batches:
        return Partition()  # nobody needs random batch sizes where nothing is promised

    def counted(self, batch: float, size: int) -> Counted:
        whole = batch >= size
        return Counted(Sampling("none") if whole else Sampling("poisson", rate=batch / size), "zero-out")


@dataclass(frozen=True)
class FixedBatches(_Drawn):
    """Exactly so many distinct records in every step; one record's place is always taken by another."""

    name: str = "fixed"

    def counted(self, batch: float, size: int) -> Counted:
        if batch >= size:
            return Counted(Sampling("none"), "zero-out")
        drawn = Sampling("fixed", rate=batch / size, batch=int(batch), population=size)
        return Counted(drawn, "replace-one", 2.0)

    def constant(self, batch: float, size: int) -> float:
        return float(size) if batch >= size else float(int(batch))


@dataclass(frozen=True)
class Partition(_Drawn):
    """A fresh permutation per pass, cut into batches: every record once per pass, nothing is amplified."""

    name: str = "partition"

    def counted(self, batch: float, size: int) -> Counted:
        whole = batch >= size
        return Counted(Sampling("none") if whole else Sampling("partition", rate=batch / size), "zero-out")

    def constant(self, batch: float, size: int) -> float:
        return float(size) if batch >= size else float(int(batch))

    def uses(self, steps: int, batch: float, size: int) -> int:
        return steps if batch >= size else draws.passes(steps, batch, size)

    def share(self, chosen: list[int], batch: float, size: int) -> int:
        if batch >= size:
            return len(chosen)
        per_pass = size // int(batch)
        return len({step // per_pass for step in chosen})


@dataclass(frozen=True)
class FullBatches(_Drawn):
    """All records in every step."""

    name: str = "full"

    def constant(self, batch: float, size: int) -> float:
        return float(size)


class Cohort(Protocol):
    """How a round draws its clients."""

    @property
    def name(self) -> str: ...
    @property
    def random_size(self) -> bool: ...

    def draw(self, clients: int, expected: float, root: int | bytes, number: int) -> np.ndarray: ...
    def counted(self, clients: int, expected: float, known: int = 0) -> Counted: ...


@dataclass(frozen=True)
class _Cohort:
    name: str = ""
    random_size: bool = False

    def draw(self, clients: int, expected: float, root: int | bytes, number: int) -> np.ndarray:
        return draws.cohort(self.name, clients, expected, root, number)

    def counted(self, clients: int, expected: float, known: int = 0) -> Counted:
        """What the draw hides from an observer who knows the coins of `known` clients (its own and its friends')."""
        return Counted(Sampling("none"), "zero-out")


@dataclass(frozen=True)
class PoissonCohort(_Cohort):
    """Every client tosses its own coin: whoever knows some coins learns nothing about the others."""

    name: str = "poisson"
    random_size: bool = True

    def counted(self, clients: int, expected: float, known: int = 0) -> Counted:
        rate = min(1.0, expected / clients)
        return Counted(Sampling("none") if rate >= 1 else Sampling("poisson", rate=rate), "zero-out")


@dataclass(frozen=True)
class FixedCohort(_Cohort):
    """Exactly so many distinct clients.

    Formal guarantee of `counted`: whoever knows that `known` clients stayed out has to look for the drawn ones among
    clients - known others; that is the worst case of what it can know about them.
    """

    name: str = "fixed"

    def counted(self, clients: int, expected: float, known: int = 0) -> Counted:
        drawn, others = round(expected), clients - known
        if drawn >= others:
            return Counted(Sampling("none"), "replace-one" if drawn < clients else "zero-out", 2.0 if drawn < clients else 1.0)
        return Counted(
            Sampling("fixed", rate=drawn / others, batch=drawn, population=others), "replace-one", 2.0
        )


@dataclass(frozen=True)
class Everybody(_Cohort):
    """All clients in every round."""

    name: str = "all"


BATCHES: dict[str, Batches] = {b.name: b for b in (PoissonBatches(), FixedBatches(), Partition(), FullBatches())}
COHORTS: dict[str, Cohort] = {c.name: c for c in (PoissonCohort(), FixedCohort(), Everybody())}
