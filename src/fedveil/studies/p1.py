"""P1: Fed-CDP, the tables and figures."""

from __future__ import annotations

from collections.abc import Mapping

from fedveil.studies.build import (
    EXAMPLE,
    FIVE,
    ON_SUM,
    SHOWN,
    attack,
    federated,
    federated_time,
    line,
    noise_why,
    timed,
)
from fedveil.studies.cells import Attack, Cell, Entry, Epsilon

ROUNDS = {"mnist": 100, "cifar10": 100, "lfw": 60, "adult": 10, "cancer": 3}
NAMES = [SHOWN[d] for d in FIVE]
TWELVE = [(n, k) for n in (100, 1000, 10000) for k in (5, 10, 20, 50)]
TABLE_2 = {
    "non-private": (.924, .954, .959, .965, .977, .980, .978, .978, .979, .980, .980, .979),
    "fed-sdp": (.803, .823, .834, .872, .925, .928, .934, .937, .935, .939, .941, .944),
    "fed-cdp": (.815, .831, .858, .903, .951, .956, .960, .964, .966, .963, .968, .966),
    "fed-cdp-decay": (.833, .842, .866, .909, .968, .975, .977, .976, .974, .978, .979, .980),
}  # fmt: skip
TABLE_3 = {
    "non-private": (6.8, 32.5, 30.9, 5.1, 5.1), "fed-sdp": (6.9, 33.8, 31.3, 5.2, 5.1),
    "fed-cdp": (22.4, 131.5, 112.4, 11.8, 11.9), "fed-cdp-decay": (22.6, 132.1, 114.6, 12.1, 12.0),
}  # fmt: skip
TABLE_4 = {
    "mnist": (.914, .934, .943, .949, .933, .923), "cifar10": (.408, .568, .602, .633, .624, .611),
    "lfw": (.582, .594, .619, .649, .627, .601), "adult": (.81, .822, .825, .824, .807, .796),
    "cancer": (.965, .972, .979, .979, .972, .972),
}  # fmt: skip
TABLE_5 = {
    "mnist": (.956, .954, .952, .951, .949, .934), "cifar10": (.646, .641, .639, .634, .633, .612),
    "lfw": (.683, .678, .672, .667, .649, .646), "adult": (.838, .837, .836, .834, .824, .822),
    "cancer": (.993, .993, .993, .993, .979, .979),
}  # fmt: skip
FED_CDP_1 = (0.0845, 0.0845, 0.0689, 0.0494, 0.0467)
FED_CDP_100 = (0.8227, 0.8227, 0.6356, 0.2761, 0.1469)
FED_SDP = (0.8536, 0.8536, 0.6677, 0.3025, 0.2065)
TABLE_7 = {  # (tap, recipe): MNIST distance, iterations; LFW distance, iterations
    ("type0&1", "non-private"): (0.1549, 6, 0.2214, 24), ("type0&1", "fed-sdp-client"): (0.6991, 300, 0.7352, 300),
    ("type0&1", "fed-cdp"): (0.7695, 300, 0.8036, 300), ("type0&1", "fed-cdp-decay"): (0.937, 300, 0.941, 300),
    ("type2", "non-private"): (0.0008, 7, 0.0014, 25), ("type2", "fed-sdp-client"): (0.0008, 7, 0.0014, 25),
    ("type2", "fed-cdp"): (0.739, 300, 0.6626, 300), ("type2", "fed-cdp-decay"): (0.943, 300, 0.945, 300),
}  # fmt: skip


def twelve(recipe: str, printed: tuple[float, ...], why: tuple[str, ...]) -> list[Cell]:
    """Accuracy under twelve settings of clients and participation."""
    columns = [f"N={n}, {k}%" for n, k in TWELVE]
    jobs = [federated(recipe, "mnist", clients=n, cohort_size=max(1, n * k // 100)) for n, k in TWELVE]
    return line(recipe, columns, printed, jobs, "accuracy", why)


def _sweep(
    table: Mapping[str, tuple[float, ...]], key: str, letter: str, values: tuple[float, ...]
) -> list[Cell]:
    cells = []
    for dataset, printed in table.items():
        jobs = [federated("fed-cdp", dataset, **{key: float(v)}) for v in values]
        columns = [f"{letter}={v:g}" for v in values]
        cells += line(SHOWN[dataset], columns, printed, jobs, "accuracy", ON_SUM)
    return cells


def _table6() -> list[Cell]:
    plus = [Epsilon("moments", ROUNDS[d], 1) for d in FIVE]
    local = [Epsilon("moments", ROUNDS[d] * 100, int(d in ("adult", "cancer"))) for d in FIVE]
    server = [Epsilon("moments", ROUNDS[d], 1, rate=0.1) for d in FIVE]
    cells = []
    for unit, more in (("instance", ()), ("client", ("client-level",))):
        cells += line(
            f"{unit}, Fed-CDP L=1", NAMES, FED_CDP_1, plus, "epsilon", ("t-plus-one", "nominal-q", *more), 4
        )
        for name, paper, job in zip(FIVE, FED_CDP_100, local, strict=True):
            steps = "one-extra" if name in ("adult", "cancer") else "t-steps"
            why = ("old-conversion", steps, "nominal-q", *more)
            cells.append(Cell(f"{unit}, Fed-CDP L=100", SHOWN[name], paper, job, "epsilon", why, 4))
    for length in (1, 100):
        cells += line(
            f"client, Fed-SDP L={length}", NAMES, FED_SDP, server, "epsilon", ("t-plus-one", "condition-q"), 4
        )
    return cells


def leak_why(tap: str, recipe: str, change: Mapping[str, object] = {}) -> tuple[str, ...]:
    """Why a leakage number differs."""
    why = ["rmse-is-mse", "inner-steps"]
    noisy = recipe not in ("non-private", "fed-sdp", "fed-sdp-client", "dssgd")
    if tap == "type2" and change:
        why += ["type2-example", "noise-swamps"]
    elif tap == "type2":
        why += ["type2-sum", "clip-visible"] if noisy else ["same-exposure"]
    elif noisy:
        why += ["noise-swamps", *(["noise-literal-leak"] if recipe in ("quantile-clip", "adaclip") else [])]
    elif (tap, recipe) == ("type0-sanitised", "fed-sdp") or (recipe == "fed-sdp-client" and tap != "type1"):
        why += ["noise-swamps"]
    return tuple(why)


def leak_cells(
    row: str, dataset: str, numbers: tuple[float, float], job: Attack, why: tuple[str, ...]
) -> list[Cell]:
    """Distance, iterations, success and labels of one attacked recipe on one dataset."""
    name = SHOWN[dataset]
    more = ("batch-3",) if job.batch > 1 else ()
    return [
        Cell(row, f"{name} distance", numbers[0], job, "rmse", (*why, *more), 4),
        Cell(row, f"{name} distance, not clamped", numbers[0], job, "rmse_unclamped", ("not-clamped", *more), 4),
        Cell(row, f"{name} iterations", numbers[1], job, "iterations", ("inner-steps", "failed-budget"), 0),
        Cell(row, f"{name} succeeds", "N" if numbers[1] == 300 else "Y", job, "success_rate", ("threshold", *more)),
        Cell(row, f"{name} labels", None, job, "label_accuracy", ()),
    ]  # fmt: skip


def whole_update(row: str, number: float, recipe: str, tap: str) -> list[Cell]:
    """The same tap on MNIST with the paper's whole round behind an update: 100 local steps on batches of 5."""
    job = attack(recipe, "mnist", tap, victims=8, batch=5, local_steps=100)
    return [
        Cell(row, "MNIST distance, L = 100, B = 5", number, job, "rmse", ("whole-update",), 4),
        Cell(row, "MNIST distance, L = 100, B = 5, not clamped", number, job, "rmse_unclamped",
             ("whole-update", "not-clamped"), 4),
        Cell(row, "MNIST succeeds, L = 100, B = 5", None, job, "success_rate", ("whole-update", "threshold")),
    ]


def _table7() -> list[Cell]:
    cells = []
    for (tap, recipe), numbers in TABLE_7.items():
        at_tap = "type2" if tap == "type2" else "type0"
        ways: list[tuple[str, Mapping[str, object]]] = [("", {})]
        if tap == "type2" and recipe.startswith("fed-cdp"):  # the two readings of where the noise goes
            ways = [(", noise on sum", {}), (", noise on example", EXAMPLE)]
        for said, change in ways:
            for at, dataset in ((0, "mnist"), (2, "lfw")):
                job = attack(recipe, dataset, at_tap, change=change)
                why = leak_why(at_tap, recipe, change)
                cells += leak_cells(
                    f"{tap}, {recipe}{said}", dataset, (numbers[at], numbers[at + 1]), job, why
                )
            if at_tap != "type2":
                cells += whole_update(f"{tap}, {recipe}{said}", numbers[0], recipe, at_tap)
    return cells


def visualised(*where: tuple[str, str]) -> list[Cell]:
    """Plain gradients of these datasets and taps attacked, for a picture without numbers. A batch's update also with the
    distance, which the papers' tables print (.2214 for LFW), and with that of the mean image of the data."""
    cells = []
    for d, tap in where:
        job = attack("non-private", d, tap, victims=8)
        cells.append(Cell(f"non-private, {tap}", SHOWN[d], None, job, "ssim", ("no-numbers", "similarity")))
        if tap == "type0":
            cells.append(Cell(f"non-private, {tap}, distance", SHOWN[d], None, job, "rmse", ("no-numbers", "print-no-image")))
            cells.append(Cell("control: the mean image, distance", SHOWN[d], None, job, "mean_image_rmse",
                              ("no-numbers", "print-no-image")))  # fmt: skip
    return cells


def readings(recipe: str, tap: str) -> dict[str, Mapping[str, object]]:
    """Where the noise of a recipe with noise in local training goes, for the type that can tell: on the sum, which its epsilon
    assumes, or on every example, as the algorithms have it."""
    if tap != "type2" or not recipe.startswith(("fed-cdp", "fed-alpha")):
        return {"": {}}
    return {", noise on sum": {}, ", noise on example": EXAMPLE}


def _figures() -> list[Entry]:
    first = visualised(("mnist", "type2"), ("cifar10", "type2"), ("lfw", "type2"), ("lfw", "type0"))
    norms = [
        Cell(
            "mean gradient norm",
            f"round {r}",
            None,
            federated("non-private", "mnist"),
            f"norm@{r}",
            ("no-numbers",),
        )
        for r in (1, 10, 25, 50, 100)
    ]
    fourth = [
        Cell(f"{recipe}, {tap}{said}", "LFW", None, attack(recipe, "lfw", tap, victims=8, change=change), "ssim",
             ("no-numbers", "similarity", *leak_why(tap, recipe, change)[2:], *(("one-step",) if tap == "type0" else ())))
        for recipe in ("non-private", "dssgd", "fed-sdp-client", "fed-cdp", "fed-cdp-decay")
        for tap in ("type0", "type2")
        for said, change in readings(recipe, tap).items()
    ]  # fmt: skip
    fifth = []
    for share in (0.0, 0.1, 0.3, 0.5):
        column, pruned = f"pruned {share:.0%}", {"prune": share} if share else {}
        for recipe in ("non-private", "fed-sdp-client", "fed-cdp", "fed-cdp-decay"):
            for said, more in readings(recipe, "type2").items():
                job = attack(recipe, "mnist", "type2", victims=8, change={**pruned, **more})
                reasons = ("no-numbers", "similarity", *(("pruned-example",) if share else ()))
                fifth.append(Cell(f"{recipe}{said}, SSIM of the attack", column, None, job, "ssim", reasons))
            train = federated(recipe, "mnist", **pruned)
            fifth.append(Cell(f"{recipe}, accuracy", column, None, train, "accuracy", ("no-numbers", *noise_why(recipe))))
    return [
        Entry("p1-fig1a", "Attack schema", note="a drawing of the attack"),
        Entry("p1-fig1b", "Attack visualisation", tuple(first), "Type 2 and type 0&1 rebuild the images."),
        Entry("p1-fig2", "System schema of Fed-CDP", note="a drawing of the system"),
        Entry("p1-fig3", "L2 norm of gradients over rounds", tuple(norms), "The norm decays over rounds.",
              x="round", curve="norms"),
        Entry("p1-fig4", "Leakage under different recipes (LFW)", tuple(fourth),
              "Fed-CDP(decay) hides most, Fed-SDP leaks under type 2, DSSGD and non-private leak everywhere."),
        Entry("p1-fig5", "Accuracy and leakage with pruned updates (MNIST)", tuple(fifth),
              "Pruned by up to 30%, plain updates and those of Fed-SDP still leak; Fed-CDP is more resilient than Fed-SDP, "
              "Fed-CDP(decay) most in all settings.", x="pruned share"),
    ]  # fmt: skip


def entries() -> list[Entry]:
    """All tables and figures of P1."""
    table2 = [c for r, p in TABLE_2.items() for c in twelve(r, p, noise_why(r))]
    table3 = timed(TABLE_3, NAMES, lambda recipe: [federated_time(recipe, d) for d in FIVE], "milliseconds", 1)
    return [
        Entry("p1-table1", "Datasets and parameters", note="a list of datasets"),
        Entry("p1-table2", "Accuracy by clients and participation (MNIST)", tuple(table2)),
        Entry("p1-table3", "Time per local iteration (ms)", tuple(table3)),
        Entry("p1-table4", "Accuracy of Fed-CDP by clip bound",
              tuple(_sweep(TABLE_4, "clip.bound", "C", (0.5, 1, 2, 4, 6, 8)))),
        Entry("p1-table5", "Accuracy of Fed-CDP by sigma",
              tuple(_sweep(TABLE_5, "sigma", "sigma", (0.5, 1, 2, 4, 6, 8)))),
        Entry("p1-table6", "Epsilon of Fed-SDP and Fed-CDP (moments accountant)", tuple(_table6())),
        Entry("p1-table7", "Attack effectiveness", tuple(_table7())),
        *_figures(),
    ]  # fmt: skip
