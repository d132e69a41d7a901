"""Short ways to write the cells of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedveil.studies import settings
from fedveil.studies.cells import Attack, Cell, Job, Time, Train, changes

FIVE = ("mnist", "cifar10", "lfw", "adult", "cancer")
SHOWN = {
    "mnist": "MNIST", "cifar10": "CIFAR-10", "lfw": "LFW", "adult": "Adult", "cancer": "Cancer",
    "fashion_mnist": "Fashion-MNIST", "medical_mnist": "Medical MNIST", "utkface": "UTKFace", "wind": "Wind",
}  # fmt: skip
ACCOUNTANTS = {"BaseC": "base", "AdvC": "advanced", "OptC": "optimal", "zCDP": "zcdp", "MA": "moments"}
ACCOUNTING_WHY: dict[str, tuple[str, ...]] = {
    "BaseC": ("base-rounded", "delta-paid"),
    "AdvC": ("advc-drv", "delta-paid"),
    "OptC": ("delta-paid",),
    "zCDP": ("zcdp",),
    "MA": ("old-conversion",),
}


DECAYING = ("dp-dyns-c-decay", "dp-dyns", "dp-dyn-s-c-decay-sigma", "dp-dyn-s-sigma")
DEFAULTS = {"clip.bound": 4.0, "sigma": 6.0}


def federated(recipe: str, dataset: str, **more: object) -> Train:
    """A run with the federated papers' settings. C = 4 and sigma = 6 are every recipe's own: left unsaid, so that a
    sweep shares this run with the tables that do not vary them."""
    said = {key: value for key, value in more.items() if DEFAULTS.get(key) != value}
    return Train(recipe, dataset, changes(settings.FEDERATED[dataset], said))


def central(recipe: str, dataset: str, **more: object) -> Train:
    """A run with the central paper's settings; purchase-10 and purchase-50 are played by Location-30. A recipe's own
    bound is left unsaid, so that a sweep shares the run with the tables that do not vary it."""
    name, options = _stand_in(dataset)
    own = {"clip.bound": ("linear:4:2" if recipe in DECAYING else 4.0), "sigma": 6.0}
    said = {key: value for key, value in more.items() if own.get(key) != value}
    return Train(recipe, name, changes(settings.CENTRAL[name], said), options)


def _stand_in(dataset: str) -> tuple[str, tuple[tuple[str, object], ...]]:
    if dataset.startswith("purchase-"):
        return "location30", (("clusters", int(dataset.split("-")[1])),)
    return dataset, ()


def central_time(recipe: str, dataset: str) -> Time:
    name, options = _stand_in(dataset)
    return Time(recipe, name, changes(settings.CENTRAL[name]), options, iterations=10)


def timed(
    table: Mapping[str, Sequence[float]], columns: Sequence[str], jobs: Callable[[str], Sequence[Time]], measure: str, digits: int
) -> list[Cell]:  # fmt: skip
    """Rows of times, and below them how much longer each recipe takes than no protection: that can be compared."""
    cells = []
    for recipe, printed in table.items():
        cells += line(recipe, columns, printed, jobs(recipe), measure, ("other-machine",), digits)
    for recipe, printed in table.items():
        ratios = [own / plain for own, plain in zip(printed, table["non-private"], strict=True)]
        if recipe != "non-private":
            cells += line(f"{recipe} over non-private", columns, ratios, jobs(recipe), "over_plain", ("in-turns",), 2)
    return cells


def federated_time(recipe: str, dataset: str) -> Time:
    return Time(recipe, dataset, changes(settings.FEDERATED[dataset]))


ON_SUM = ("literal-noise", "mildest")
_OWN_Q = ("cancer", "lfw")


def own_q(recipe: str, dataset: str) -> tuple[str, ...]:
    """Where a printed epsilon stands beside our accuracy: the federated datasets whose clients share so few rows that a step
    takes far more of them than the paper's q."""
    spends = recipe != "non-private" and not recipe.startswith("fed-sdp")
    return (f"own-q-{dataset}",) if spends and dataset in _OWN_Q else ()


def noise_why(recipe: str) -> tuple[str, ...]:
    """Why the accuracy of a recipe differs."""
    if recipe == "non-private":
        return ("our-split",)
    if recipe.startswith("fed-sdp"):
        return ("sdp-noise",)
    if recipe == "adaclip":
        return (*ON_SUM, "adaclip-scale")
    return (*ON_SUM, "l2max") if "alpha" in recipe or "l2max" in recipe else ON_SUM


def line(row: str, columns: Sequence[str], printed: Sequence[float | str | None], jobs: Sequence[Job], measure: str,
         why: tuple[str, ...] = (), digits: int = 3) -> list[Cell]:  # fmt: skip
    """One row of a table."""
    short = (*why, "cifar-control")
    return [
        Cell(row, column, paper, job, measure, short if _cifar_control(job) and measure == "accuracy" else why, digits)
        for column, paper, job in zip(columns, printed, jobs, strict=True)
    ]


def _cifar_control(job: Job) -> bool:
    return isinstance(job, Train) and (job.recipe, job.dataset) == ("non-private", "cifar10")


EXAMPLE = {"noise_on": "example", "sampling": "fixed"}  # the other reading of where the noise of Fed-CDP goes
_BARE = ("fed-sdp", "fed-sdp-client", "dssgd", "gradient-pruning", "random-noise")
_ONLY_CLIPPED = ("quantile-clip", "fed-alpha-cdp", "fed-alpha-cdp-sigma", "dp-baseline", "dp-dyn-s-sigma")


def exposed(recipe: str, tap: str, change: Mapping[str, object]) -> tuple[str, str]:
    """The recipe and tap under which the same tensors are seen in the first round, so that tables share the job.

    Type 2: recipes that act on updates leave each example's gradient as it is; those with noise on the sum leave it clipped
    to the first bound of 4. Type 1 of a recipe whose client does nothing to its finished update is type 0."""
    if tap == "type2" and not change:
        recipe = "non-private" if recipe in _BARE else "fed-cdp" if recipe in _ONLY_CLIPPED else recipe
    if tap == "type2" and change == EXAMPLE:
        same = {"quantile-clip": "fed-cdp", "dp-baseline": "fed-cdp", "dp-dyn-s-sigma": "fed-alpha-cdp-sigma"}
        recipe = same.get(recipe, recipe)
    if tap == "type1" and not change:
        recipe, tap = "non-private" if recipe in _BARE else recipe, "type0"
    return recipe, tap


def attack(recipe: str, dataset: str, tap: str = "type2", **more: Any) -> Attack:
    """The papers' attack: patterned start, L-BFGS; batched updates have B = 3 on LFW, 1 on MNIST. Colour images have four
    times the unknowns and get 1,000 steps, natural scenes 2,500."""
    given: Mapping[str, Any] = more.pop("change", {})
    recipe, tap = exposed(recipe, tap, given)
    if steps := more.pop("local_steps", None):
        given = {**given, "local_steps": steps}
    batch = more.pop("batch", 1 if tap == "type2" else {"lfw": 3}.get(dataset, 1))
    more.setdefault("iterations", {"lfw": 1000, "cifar10": 2500}.get(dataset, 300))
    return Attack(recipe, dataset, tap, batch=batch, settings=changes(given), **more)
