"""P2: dynamic privacy parameters in one place, the tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedveil.studies.build import (
    ACCOUNTANTS,
    ACCOUNTING_WHY,
    DECAYING,
    EXAMPLE,
    SHOWN,
    attack,
    central,
    central_time,
    line,
    timed,
)
from fedveil.studies.cells import Cell, Entry, Epsilon, Stop

SIX = ("mnist", "fashion_mnist", "cifar10", "lfw", "purchase-10", "purchase-50")
STEPS = {"mnist": 10000, "fashion_mnist": 10000, "cifar10": 10000, "lfw": 6000, "purchase-10": 5000,
         "purchase-50": 5000}  # fmt: skip
FOUR = ("dp-baseline", "dp-dyns-c-decay", "dp-dyns-l2max", "dp-dyns")
# S is a norm of the batch: of its examples by the text, of their mean by Algorithm 2
OF_BATCH = ("dp-dyns-l2max", "dp-dyns", "dp-dyn-s-l2max-sigma", "dp-dyn-s-sigma")
NON_PRIVATE = {"mnist": .9892, "fashion_mnist": .875, "cifar10": .687, "lfw": .766, "purchase-10": .825,
               "purchase-50": .667}  # fmt: skip
BOUNDS = (1, 2, 4, 8, 16, 32)
TABLE_4 = {
    "mnist": ((.9450, .963, .960, .945, .915, .881), (.948, .966, .964, .951, .931, .919),
              (.959, .975, .977, .983, .975, .976), (.955, .975, .978, .980, .978, .977)),
    "fashion_mnist": ((.825, .832, .833, .831, .812, .765), (.824, .834, .839, .837, .829, .822),
                      (.830, .840, .845, .844, .840, .840), (.829, .841, .848, .845, .840, .840)),
    "cifar10": ((.576, .595, .608, .588, .538, .397), (.575, .596, .610, .592, .564, .507),
                (.583, .603, .616, .609, .591, .592), (.582, .604, .621, .612, .595, .595)),
    "lfw": ((.704, .709, .692, .647, .595, .406), (.692, .714, .703, .675, .643, .606),
            (.715, .722, .738, .71, .683, .645), (.711, .725, .749, .716, .685, .662)),
    "purchase-10": ((.731, .734, .744, .739, .716, .683), (.727, .738, .749, .744, .729, .721),
                    (.751, .766, .769, .763, .759, .761), (.752, .768, .773, .77, .765, .766)),
    "purchase-50": ((.549, .561, .571, .574, .556, .503), (.545, .569, .577, .581, .579, .562),
                    (.571, .573, .591, .595, .587, .58), (.573, .577, .596, .604, .591, .593)),
}  # fmt: skip
SPENT = {  # Table V: the four recipes share a row of epsilons
    10000: (123.354, 7.450, 6.740, 1.159, 0.823), 6000: (74.024, 5.503, 5.037, 0.893, 0.636),
    5000: (61.689, 4.952, 4.546, 0.814, 0.580),
}  # fmt: skip
TABLE_6 = {  # dataset: (target, three rows of iterations and epsilons for the dynamic recipes)
    "mnist": (.960, ((7996, 98.646, 6.518, 5.930, 1.034, .735), (5419, 66.858, 5.188, 4.756, .848, .604),
                     (5137, 63.379, 5.029, 4.615, .825, .588))),
    "fashion_mnist": (.833, ((8124, 100.200, 6.578, 5.983, 1.042, .741), (5826, 71.878, 5.411, 4.955, .880, .626),
                             (5532, 68.251, 5.250, 4.812, .857, .610))),
    "cifar10": (.608, ((8841, 109.044, 6.919, 6.280, 1.088, .773), (6550, 80.809, 5.794, 5.294, .934, .664),
                       (6336, 78.169, 5.682, 5.195, .918, .653))),
    "lfw": (.692, ((5059, 62.417, 4.985, 4.576, .819, .583), (3836, 47.331, 4.254, 3.919, .711, .508),
                   (3645, 44.975, 4.132, 3.809, .693, .495))),
    "purchase-10": (.744, ((4776, 58.926, 4.822, 4.430, .795, .567), (3778, 46.615, 4.217, 3.886, .706, .504),
                           (3690, 45.530, 4.161, 3.835, .697, .498))),
    "purchase-50": (.571, ((4807, 59.308, 4.840, 4.446, .798, .568), (4123, 50.871, 4.433, 4.080, .738, .526),
                           (3995, 49.292, 4.354, 4.009, .726, .518))),
}  # fmt: skip
TABLE_7 = {  # (dataset, C, accuracy): the four recipes
    ("mnist", 4, .9596): (SPENT[10000], (105.173, 5.889, 5.736, 1.119, .806), (34.412, 1.866, 1.787, .436, .314),
                          (32.529, 1.783, 1.694, .412, .307)),
    ("mnist", 8, .945): (SPENT[10000], (114.531, 6.552, 6.341, .994, .675), (28.828, 1.589, 1.511, .378, .283),
                         (28.015, 1.426, 1.412, .366, .269)),
    ("cifar10", 4, .608): (SPENT[10000], (120.119, 7.006, 6.662, 1.153, .812), (116.717, 6.292, 6.330, 1.114, .790),
                           (113.458, 5.557, 5.536, 1.044, .763)),
    ("cifar10", 8, .588): (SPENT[10000], (116.304, 6.316, 6.405, 1.137, .792), (109.405, 5.865, 5.886, 1.063, .754),
                           (105.256, 5.849, 5.834, 1.022, .748)),
    ("mnist", 4, .9773): ((523.375, 232.117, 258.635, 4.109, 21.174), (155.677, 8.575, 9.037, 1.370, .944),
                          SPENT[10000], (117.266, 7.036, 6.687, 1.149, .806)),
}  # fmt: skip
ITERATIONS = {
    "linear": (9646, 9481, 8908, 9494, 9450), "exponential": (9678, 9311, 8955, 9553, 9501),
    "cyclic": (8019, 7724, 7251, 7993, 7876),
}  # fmt: skip
DYNAMIC = ("dp-dynsigma", "dp-dyn-s-c-decay-sigma", "dp-dyn-s-l2max-sigma", "dp-dyn-s-sigma")
TABLE_8 = {
    "linear": ((.962, .9614, .9608, .9618, .9614), (.9673, .965, .9641, .9653, .9649),
               (.9788, .978, .9775, .9781, .9778), (.9791, .9783, .9779, .9783, .9782)),
    "exponential": ((.9616, .9604, .9597, .9608, .9603), (.9681, .9652, .9647, .9665, .9665),
                    (.979, .9775, .9775, .9786, .9781), (.9803, .9781, .9781, .9789, .9787)),
    "cyclic": ((.9601, .9599, .9596, .9599, .9599), (.9652, .9644, .9641, .9648, .9645),
               (.9784, .9779, .9776, .9781, .9779), (.9787, .9781, .9779, .9785, .9784)),
}  # fmt: skip
SIGMA = {  # "sigma = 6 is also used as the initial sigma value"; the cycle is a triangle whose peak falls linearly
    "linear": "linear:6:4.85",
    "exponential": "exponential:6:4.85",
    "cyclic": "triangular-cyclic:6:4.85:floor=4.85",
}
TABLE_9 = {"linear": (51.365, 4.538, 4.501, .561, .459, 5532), "exponential": (48.027, 4.017, 3.962, .537, .453, 5541),
           "cyclic": (56.776, 4.703, 4.667, .683, .572, 5493)}  # fmt: skip
TABLE_10 = {
    "non-private": (.138, .144, .504, .069, .024), "dp-baseline": (1.63, 1.68, 1.8, .149, .125),
    "dp-dyns-c-decay": (1.70, 1.72, 1.83, .152, .131), "dp-dyns-l2max": (1.71, 1.72, 1.83, .153, .131),
    "dp-dyns": (1.72, 1.74, 1.84, .155, .132), "dp-dyn-s-sigma": (1.72, 1.74, 1.85, .155, .132),
}  # fmt: skip
TABLE_11 = {
    "dp-baseline": ((.960, .833, .608, .692), (1.63, 1.68, 1.8, .149)),
    "quantile-clip": ((.971, .846, .614, .733), (2.66, 2.75, 2.92, .304)),
    "adaclip": ((.969, .843, .611, .725), (1.81, 1.84, 1.94, .185)),
    "dp-dyn-s-sigma": ((.978, .848, .621, .749), (1.72, 1.74, 1.85, .155)),
}  # fmt: skip
TABLE_3 = {
    "non-private": ((11.5, 1, 1.5e-5), (12.4, 1, 2.59e-5), (28.3, .973, 2.2e-4), (25, 1, 2.2e-4)),
    "dp-baseline": ((13.4, .23, .547), (14.1, .25, .588), (30.5, .16, .401), (26.3, .13, .352)),
    "quantile-clip": ((12.9, .64, .097), (14.3, .67, .121), (30.5, .47, .203), (27.1, .49, .229)),
    "adaclip": ((12.6, .72, .033), (14.1, .76, .041), (29.9, .58, .129), (26.4, .61, .144)),
    "dp-dyn-s-sigma": ((300, 0, .886), (300, 0, .904), (300, 0, .912), (300, 0, .897)),
}  # fmt: skip


ALMOST_NONE = 0.01  # a sigma that leaves an adaptive rule to itself
TANH: dict[str, tuple[str, ...]] = {"AdvC": ("advc-tanh",)}
CLIPPED_ONLY = ("mnist", "fashion_mnist", "cifar10", "purchase-10", "purchase-50")  # what the bound alone does, beside l2-max


def _why(recipe: str, dataset: str) -> tuple[str, ...]:
    base: tuple[str, ...] = ("our-split",) if recipe == "non-private" else ("central-noise",)
    if recipe in OF_BATCH:
        base = (*base, "l2max")
    base = (*base, "adaclip-cuts" if dataset == "mnist" else "adaclip-central") if recipe == "adaclip" else base
    base = (*base, "quantile-vanishes") if recipe == "quantile-clip" and dataset == "mnist" else base
    if dataset == "cifar10":
        base = (*base, "cifar-subset", "cifar-control" if recipe == "non-private" else "cifar-central")
    base = (*base, "small-batch") if dataset == "lfw" and recipe != "non-private" else base
    return (*base, "stand-in") if dataset.startswith("purchase") else base


def _own_q(dataset: str) -> tuple[str, ...]:
    """Where a printed epsilon stands beside our accuracy."""
    return ("own-q-purchase",) if dataset.startswith("purchase") else ()


def _without_noise(why: tuple[str, ...]) -> tuple[str, ...]:
    """The reasons that have nothing to do with how much noise there is."""
    return tuple(key for key in why if key not in ("central-noise", "l2max"))


def _readings(recipe: str, dataset: str) -> list[tuple[str, Mapping[str, object], tuple[str, ...]]]:
    """What a row's name adds, its settings and reasons: the text's S and, where it differs, that of a comment in Algorithm 2."""
    found: list[tuple[str, Mapping[str, object], tuple[str, ...]]] = [("", {}, _why(recipe, dataset))]
    if recipe in OF_BATCH:
        found.append((", norm of the mean", {"sensitivity": "l2-max-mean"}, (*_why(recipe, dataset), "l2max-mean")))
    return found


def _epsilons(row: str, steps: int, printed: tuple[float, ...]) -> list[Cell]:
    return [
        Cell(row, name, paper, Epsilon(formula, steps, None, paper), "epsilon", ACCOUNTING_WHY[name])
        for (name, formula), paper in zip(ACCOUNTANTS.items(), printed, strict=True)
    ]


def _table4() -> list[Cell]:
    cells = []
    for dataset, rows in TABLE_4.items():
        plain = central("non-private", dataset)
        cells.append(Cell(f"{dataset}, non-private", "any C", NON_PRIVATE[dataset], plain, "accuracy",
                          _why("non-private", dataset)))  # fmt: skip
        if dataset in CLIPPED_ONLY:
            clipped = central("dp-baseline", dataset, sigma=ALMOST_NONE)
            reasons = ("clip-alone", "cifar-subset") if dataset == "cifar10" else ("clip-alone",)
            cells.append(Cell(f"{dataset}, clipped with hardly any noise", "C=4", None, clipped, "accuracy", reasons))
        for recipe, printed in zip(FOUR, rows, strict=True):
            for said, more, why in _readings(recipe, dataset):
                jobs = [central(recipe, dataset, **more, **{"clip.bound": _bound(recipe, c)}) for c in BOUNDS]
                cells += line(f"{dataset}, {recipe}{said}", [f"C={c}" for c in BOUNDS], printed, jobs, "accuracy", why)
    # What the bound costs on CIFAR-10 is less than a single test moves: all rows of that comparison over their last ten.
    compared = [cell for cell in cells if cell.row.startswith("cifar10") and cell.column in ("any C", "C=4")]
    cells += [Cell(f"{cell.row}, last ten tests", f"{cell.column}, {part}", None, cell.job, f"last_ten:{part}",
                   ("last-ten", "cifar-subset"))
              for cell in compared for part in ("mean", "lowest", "highest")]  # fmt: skip
    return cells


def _bound(recipe: str, bound: float) -> float | str:
    return f"linear:{bound}:{bound / 2:g}" if recipe in DECAYING else float(bound)


def _table5() -> list[Cell]:
    cells = []
    for dataset in SIX:
        steps = STEPS[dataset]
        for recipe, row in zip(FOUR, TABLE_4[dataset], strict=True):
            name = f"{dataset}, {recipe}"
            cells += _epsilons(name, steps, SPENT[steps])
            cells += [Cell(f"{name}{said}", "acc", row[2], central(recipe, dataset, **more), "accuracy", (*why, *_own_q(dataset)))
                      for said, more, why in _readings(recipe, dataset)]  # fmt: skip
    return cells


def _table6() -> list[Cell]:
    cells = []
    for dataset, (target, rows) in TABLE_6.items():
        steps = STEPS[dataset]
        cells += _epsilons(f"{dataset}, dp-baseline", steps, SPENT[steps])
        cells.append(Cell(f"{dataset}, dp-baseline", "iterations", steps, central("dp-baseline", dataset),
                          f"iterations_to:{target}", ("first-crossing", *_why("dp-baseline", dataset), *_own_q(dataset)),
                          0))  # fmt: skip
        for recipe, (at, *printed) in zip(FOUR[1:], rows, strict=True):
            cells += _epsilons(f"{dataset}, {recipe}", int(at), tuple(printed))
            cells += [Cell(f"{dataset}, {recipe}{said}", "iterations", at, central(recipe, dataset, **more),
                           f"iterations_to:{target}", ("first-crossing", *why, *_own_q(dataset)), 0)
                      for said, more, why in _readings(recipe, dataset)]  # fmt: skip
    return cells


def _table7() -> list[Cell]:
    """With a given deviation the noise follows no norm, so that recipes with the same bounds train the same model: one run
    each for a constant and a falling bound, counted with every recipe's S."""
    cells = []
    for (dataset, bound, accuracy), rows in TABLE_7.items():
        for recipe, printed in zip(FOUR, rows, strict=True):
            row = f"{dataset} C={bound} at {accuracy}, {recipe}"
            if printed is SPENT[10000]:
                cells += _epsilons(row, 10000, printed)
                continue
            played = "dp-dyns" if recipe in DECAYING else "dp-dyns-l2max"
            job = central(played, dataset, fixed_variance=6.0 * bound, sensitivity="l2-max-mean",
                          **{"clip.bound": _bound(recipe, bound)})  # fmt: skip
            base = {"dp-baseline": "not-one-sigma", "dp-dyns-c-decay": "bound-decays"}.get(recipe, "data-dependent")
            for said, more, why in _readings(recipe, dataset):
                counted = "mean" if more else "single" if recipe in OF_BATCH else "bound"
                small = () if counted == "bound" else ("counted-small",)
                reasons = (base, *small, *_without_noise(why))
                cells += [Cell(f"{row}{said}", name, paper, job, f"fixed_variance:{counted}:{formula}:{accuracy}",
                               (*reasons, *TANH.get(name, ())))
                          for (name, formula), paper in zip(ACCOUNTANTS.items(), printed, strict=True)]  # fmt: skip
    return cells


def _table8() -> list[Cell]:
    cells = []
    budgets = dict(zip(ACCOUNTANTS, SPENT[10000], strict=True))
    for recipe, paper in zip(FOUR, (0.9596, 0.9639, 0.9773, 0.9778), strict=True):
        cells += [Cell(f"fixed, {recipe}{said}", "accuracy", paper, central(recipe, "mnist", **more), "accuracy", why, 4)
                  for said, more, why in _readings(recipe, "mnist")]  # fmt: skip
    for schedule, rows in TABLE_8.items():
        for at, (name, formula) in enumerate(ACCOUNTANTS.items()):
            printed = ITERATIONS[schedule][at]
            exact = {"BaseC": 123.354, "AdvC": 7.45, "OptC": 6.74, "zCDP": 1.1588, "MA": 0.8227}[name]
            why: tuple[str, ...] = ("cyclic",) if schedule == "cyclic" else ("authors-schedule",)
            why += (
                {"AdvC": ("advc-mixed",), "MA": ("zero-based",)}.get(name, ()) if schedule != "cyclic" else ()
            )
            job = Stop(schedule, formula, exact)
            measure = "index" if name == "MA" else "iteration"
            cells.append(
                Cell(f"{schedule}, iterations to ε={budgets[name]}", name, printed, job, measure, why, 0)
            )
        for recipe, numbers in zip(DYNAMIC, rows, strict=True):
            for said, more, whys in _readings(recipe, "mnist"):
                run = central(recipe, "mnist", sigma=SIGMA[schedule], **more)
                cells += [Cell(f"{schedule}, {recipe}{said}", name, paper, run, f"accuracy@{-(-stop // 100)}",
                               (*whys, "from-six"), 4)
                          for name, paper, stop in zip(ACCOUNTANTS, numbers, ITERATIONS[schedule], strict=True)]  # fmt: skip
    return cells


def _table9() -> list[Cell]:
    cells = _epsilons("dp-baseline", 10000, SPENT[10000])
    cells.append(Cell("dp-baseline", "iterations", 10000, central("dp-baseline", "mnist"), "iterations_to:0.9596",
                      ("first-crossing", *_why("dp-baseline", "mnist")), 0))  # fmt: skip
    for recipe, (at, *printed) in zip(FOUR[1:], TABLE_6["mnist"][1], strict=True):
        cells += _epsilons(recipe, int(at), tuple(printed))
    for schedule, numbers in TABLE_9.items():
        for said, more, why in _readings("dp-dyn-s-sigma", "mnist"):
            job, row = central("dp-dyn-s-sigma", "mnist", sigma=SIGMA[schedule], **more), f"{schedule}, dp-dyn-s-sigma{said}"
            cells += [Cell(row, name, paper, job, f"spent_to:{formula}:0.9596",
                           ("data-dependent", "six-falls", *_without_noise(why), *TANH.get(name, ())))
                      for (name, formula), paper in zip(ACCOUNTANTS.items(), numbers[:5], strict=True)]  # fmt: skip
            cells.append(Cell(row, "iterations", numbers[5], job, "iterations_to:0.9596",
                              ("first-crossing", "data-dependent", *_without_noise(why)), 0))  # fmt: skip
    return cells


def _on_example(recipe: str) -> Mapping[str, object]:
    """Noise on every example, with the sigma that the attacked first step has: 6, also where it falls from there."""
    return {**EXAMPLE, "sigma": SIGMA["linear"]} if recipe == "dp-dyn-s-sigma" else EXAMPLE


def _table3() -> list[Cell]:
    cells = []
    for recipe, rows in TABLE_3.items():
        ways: list[tuple[str, Mapping[str, object], tuple[str, ...]]] = [("", {}, ("same-exposure",))]
        if recipe != "non-private":
            ways = [(", noise on sum", {}, ("type2-sum", "clip-visible")),
                    (", noise on example", _on_example(recipe), ("type2-example", "noise-swamps"))]  # fmt: skip
        for said, change, why in ways:
            for dataset, (iterations, rate, error) in zip(
                ("mnist", "fashion_mnist", "cifar10", "lfw"), rows, strict=True
            ):
                job = attack(recipe, dataset, change=change)
                row, name = f"{recipe}{said}", SHOWN[dataset]
                cells += [
                    Cell(
                        row,
                        f"{name} iterations",
                        iterations,
                        job,
                        "iterations",
                        ("inner-steps", "failed-budget"),
                        1,
                    ),
                    Cell(row, f"{name} ASR", rate, job, "success_rate", ("threshold", *why)),
                    Cell(
                        row,
                        f"{name} ASR at MSE<0.70",
                        rate,
                        job,
                        "success_rate_papers",
                        ("black-passes", *why),
                    ),
                    Cell(row, f"{name} MSE", error, job, "mse", why, 4),
                    Cell(row, f"{name} MSE, not clamped", error, job, "mse_unclamped", ("not-clamped",), 4),
                ]
    return cells


def _figures() -> list[Entry]:
    shown = ("mnist", "fashion_mnist", "cifar10", "lfw")
    second = [
        Cell("non-private", d, None, attack("non-private", d, victims=8), "ssim", ("no-numbers", "similarity"))
        for d in shown
    ]
    third = [replace(cell, column=SHOWN[cell.column]) for cell in second]
    third += [
        Cell(f"C={c}, sigma={s}, noise on example", SHOWN[d], None,
             attack("fed-cdp-example", d, victims=8, change={"clip.bound": float(c), "sigma": float(s)}), "ssim",
             ("no-numbers", "similarity", "type2-example"))
        for d in shown
        for c, s in ((1, 1), (1, 6), (4, 1), (4, 6))
    ]  # fmt: skip
    third += [  # noise on the sum is not in what type 2 reads: the deviation does not matter, the bound does
        Cell(f"C={c}, sigma={s}, noise on sum", SHOWN[d], None, attack("fed-cdp", d, victims=8, change=change), "ssim",
             ("no-numbers", "similarity", "type2-sum"))
        for d in shown
        for c, s, change in ((1, 1, {"clip.bound": 1.0, "sigma": 1.0}), (4, 6, {}))
    ]  # fmt: skip
    fourth = [
        Cell(f"{name}{said}", f"round {r} (of 100 steps)", None, central(recipe, "mnist", **more), f"deviation@{r}",
             ("no-numbers",))
        for name, recipe in (("dp-baseline", "dp-baseline"), ("dp-dyns", "dp-dyns"),
                             ("dp-dyn-s-sigma, sigma0 = 15", "dp-dyn-s-sigma"))
        for said, more, _ in _readings(recipe, "mnist")
        for r in (1, 25, 50, 100)
    ]  # fmt: skip
    fifth = [
        Cell(f"{recipe}{said}", d, None, attack(recipe, d, victims=8, change=change), "ssim",
             ("no-numbers", "similarity", *(("type2-example",) if change else ("type2-sum",) if said else ())))
        for recipe in ("non-private", "dp-baseline", "quantile-clip", "adaclip", "dp-dyn-s-sigma")
        for said, change in ({"": {}} if recipe == "non-private" else
                             {", noise on sum": {}, ", noise on example": _on_example(recipe)}).items()
        for d in shown
    ]  # fmt: skip
    return [
        Entry("p2-fig1", "Attack schema", note="a drawing of the attack"),
        Entry("p2-fig2", "Attack visualisation", tuple(second), "All four datasets are rebuilt."),
        Entry("p2-fig3", "Leakage of DP-baseline by C and sigma", tuple(third),
              "C = sigma = 1 leaks, C = 4 with sigma = 6 does not."),
        Entry("p2-fig4", "Noise deviation over training (MNIST)", tuple(fourth),
              "Constant 24 for DP-baseline; falling with the gradients for DP-dynS; from high to low for "
              "DP-dyn[S, sigma].", x="round", curve="deviations"),
        Entry("p2-fig5", "Leakage under different recipes", tuple(fifth),
              "Quantile clipping and AdaClip improve on no protection only slightly; DP-baseline is more resilient, "
              "DP-dyn[S, sigma] most."),
    ]  # fmt: skip


def _cadence(recipe: str, more: Mapping[str, object]) -> list[Cell]:
    """An adaptive rule followed after every iteration, as published, beside our every 100: the first 300."""
    each = {"local_steps": 1, "rounds": 300, "evaluate_every": 100, "checkpoint_every": 100}
    ways = {"every iteration": (each, 1), "every 100": ({}, 100)}
    return [
        Cell(f"{recipe}, followed {said}, accuracy", f"mnist, iteration {at}", None, central(recipe, "mnist", **more, **change),
             f"accuracy@{at // steps}", ("cadence",))
        for said, (change, steps) in ways.items()
        for at in (100, 200, 300)
    ]  # fmt: skip


def entries() -> list[Entry]:
    """All tables and figures of P2."""
    five = ("mnist", "fashion_mnist", "cifar10", "lfw", "purchase-10")
    table10 = timed(TABLE_10, five, lambda recipe: [central_time(recipe, d) for d in five], "seconds", 3)
    table10 = [replace(cell, why=(*cell.why, "stand-in")) if cell.column == "purchase-10" else cell for cell in table10]
    table11 = []
    for recipe, (accuracy, cost) in TABLE_11.items():
        more = {"cohort": "all"} if recipe in ("quantile-clip", "adaclip") else {}
        more = {"sigma": SIGMA["linear"]} if recipe == "dp-dyn-s-sigma" else more
        table11 += [
            Cell(f"{recipe}{said}, accuracy", d, paper, central(recipe, d, **more, **reading), "accuracy", why)
            for d, paper in zip(five[:4], accuracy, strict=True)
            for said, reading, why in _readings(recipe, d)
        ]
        if recipe in ("quantile-clip", "adaclip"):
            silent = central(recipe, "mnist", sigma=ALMOST_NONE, **more)
            table11.append(Cell(f"{recipe}, hardly any noise, accuracy", "mnist", None, silent, "accuracy", ("hardly-any",)))
            table11 += _cadence(recipe, more)
        times = [central_time(recipe, d) for d in five[:4]]
        table11 += line(f"{recipe}, s/iteration", five[:4], cost, times, "seconds", ("other-machine-alone",))
    return [
        Entry("p2-table1", "Privacy parameters of the approaches", note="a list of recipes"),
        Entry("p2-table2", "Datasets and parameters", note="a list of datasets"),
        Entry("p2-table3", "Leakage: attack success, iterations, MSE", tuple(_table3())),
        Entry("p2-table4", "Accuracy by clip bound", tuple(_table4())),
        Entry("p2-table5", "Epsilon under five accountants, and accuracy", tuple(_table5())),
        Entry("p2-table6", "Epsilon at a target accuracy, fixed sigma", tuple(_table6())),
        Entry("p2-table7", "Epsilon at a target accuracy, fixed noise variance", tuple(_table7())),
        Entry("p2-table8", "Accuracy at a target epsilon, falling sigma (MNIST)", tuple(_table8())),
        Entry("p2-table9", "Epsilon at a target accuracy, falling sigma (MNIST)", tuple(_table9())),
        Entry("p2-table10", "Time per iteration (s)", tuple(table10)),
        Entry("p2-table11", "Accuracy and time against adaptive clipping", tuple(table11)),
        *_figures(),
    ]
