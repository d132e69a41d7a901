"""P5: UDP-FL, the tables and figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedveil.studies import settings
from fedveil.studies.build import SHOWN
from fedveil.studies.cells import Attack, Cell, Entry, Inference, Time, Train, changes

EPSILONS = (2, 4, 6, 8)
MECHANISMS = {"Gaussian": "udp-fl-gaussian", "Laplace": "udp-fl-laplace", "Staircase": "udp-fl-staircase"}
TABLE_4 = {"Gaussian": (.704, .714, .719, .742), "Laplace": (.475, .461, .506, .638),
           "Staircase": (.633, .691, .733, .780)}  # fmt: skip
TABLE_5 = {  # seconds of 50, 100, 500, 1000 iterations
    ("mnist", 50): (1049.71, 2056.34, 10500.80, 20803.10), ("medical_mnist", 50): (644.97, 1328.23, 6482.50, 13177.98),
    ("cifar10", 50): (1808.67, 3515.08, 16443.23, 31956.76), ("mnist", 100): (1108.91, 2196.13, 10934.62, 21579.99),
    ("medical_mnist", 100): (714.02, 1445.75, 7064.78, 14353.64),
    ("cifar10", 100): (1873.93, 3653.36, 17215.17, 33562.24),
}  # fmt: skip
NON_PRIVATE_6 = {
    "shokri": (0.053, 0.710, 0.757),
    "lira": (0.126, 0.651, 0.716),
    "canary": (0.137, 0.649, 0.719),
}
SHOKRI_ROWS = 1000
TABLE_6 = {  # attack: per epsilon, per mechanism: TPR at 1% FPR, accuracy, AUC
    "shokri": (((.009, .502, .493), (.011, .509, .508), (.009, .506, .501)),
               ((.009, .505, .499), (.013, .512, .509), (.009, .505, .502)),
               ((.013, .510, .509), (.014, .505, .501), (.009, .504, .499)),
               ((.011, .503, .499), (.007, .505, .500), (.008, .504, .496))),
    "lira": (((.013, .506, .497), (.009, .506, .501), (.008, .504, .491)),
             ((.014, .513, .505), (.013, .505, .495), (.008, .510, .501)),
             ((.017, .514, .511), (.011, .505, .493), (.009, .510, .504)),
             ((.011, .504, .497), (.009, .513, .505), (.009, .507, .492))),
    "canary": (((.016, .519, .513), (.011, .504, .497), (.009, .506, .495)),
               ((.016, .510, .504), (.020, .512, .498), (.013, .512, .509)),
               ((.015, .523, .528), (.011, .510, .507), (.009, .507, .500)),
               ((.010, .521, .518), (.015, .516, .507), (.012, .511, .509))),
}  # fmt: skip
TABLE_7 = {  # MSE, PSNR, SSIM
    2: ((2.2646, 8.51, 0.0195), (2.2686, 8.63, 0.0573), (2.3399, 8.37, 0.0096)),
    4: ((2.2058, 8.69, 0.0414), (2.1840, 8.68, 0.0629), (2.2405, 8.39, 0.0204)),
    6: ((2.1532, 8.76, 0.0417), (2.1532, 8.83, 0.0692), (2.1910, 8.54, 0.0207)),
    8: ((2.1463, 8.78, 0.0519), (2.1290, 8.95, 0.0746), (2.1832, 8.73, 0.0225)),
}
TABLE_8 = {
    2: ((.8392, .8239), (.8297, .7987), (.8267, .8124)), 4: ((.8497, .8408), (.8285, .8248), (.8383, .8260)),
    6: ((.8519, .8439), (.8390, .8096), (.8322, .8131)), 8: ((.8615, .8544), (.8320, .8169), (.8317, .8174)),
}  # fmt: skip
TABLE_9 = {
    2: ((2.40, 1.26), (2.42, 1.27), (2.44, 1.28)), 4: ((2.35, 1.24), (2.38, 1.25), (2.40, 1.26)),
    6: ((2.30, 1.22), (2.33, 1.23), (2.35, 1.24)), 8: ((2.25, 1.20), (2.28, 1.21), (2.30, 1.22)),
}  # fmt: skip


def udp(recipe: str, dataset: str, epsilon: float | None, **more: object) -> Train:
    """A run calibrated to a sound epsilon for the server; None is plain averaging. NbAFL sets its own noise."""
    merged = {**settings.UDP[dataset], **more}
    if epsilon is None or recipe == "nbafl":
        merged["learning_rate"] = settings.plain_rate(merged)
        merged = {k: v for k, v in merged.items() if k not in ("calibrate", "clip.bound", "channel")}
        merged |= {} if epsilon is None else {"epsilon": epsilon}
        recipe = recipe if recipe == "nbafl" else "non-private"
    else:
        merged["target_epsilon"] = float(epsilon)
    return Train(recipe, dataset, changes(merged))


def planned(name: str, epsilon: int | None, features: str = "public", rows: int | None = None) -> Train:
    """CIFAR-10 with a mechanism and the planner's features; None is plain averaging. rows: training rows, if not all."""
    recipe = MECHANISMS[name] if epsilon else "non-private"
    few: dict[str, int] = {} if rows is None else {"limit": rows, "batch_size": rows // 10}
    return Train(recipe, "cifar10", changes(settings.planned(epsilon, features) | few))


def why(mechanism: str, dataset: str = "") -> tuple[str, ...]:
    """Why a result under a mechanism differs."""
    found: tuple[str, ...] = ("harmonizer",)
    if mechanism == "Staircase":
        found = (*found, "staircase-vector")
    return (*found, "resnet-gn") if dataset == "cifar10" else found


def set_up(dataset: str) -> tuple[str, ...]:
    """What every run of `udp` on a dataset has otherwise than the paper."""
    subset = {"medical_mnist": ("medical-subset",), "utkface": ("utkface-subset",)}
    return ("udp-optimiser", *subset.get(dataset, ()))


def _table4() -> list[Cell]:
    """The planner's features for every cell; ResNet-18 without noise and with Gaussian noise at the largest epsilon."""
    cells = []
    for features, said in (("own", "fixed features"), ("public", "public backbone")):
        for name, printed in TABLE_4.items():
            reasons = (*why(name), f"planned-{features}")
            cells += [
                Cell(f"{name}, {said}", f"ε={e}", paper, planned(name, e, features), "accuracy", reasons)
                for e, paper in zip(EPSILONS, printed, strict=True)
            ]
        cells.append(Cell(f"none, {said}", "ε=∞", 0.871, planned("", None, features), "accuracy", (f"planned-{features}",)))
    noised = udp(MECHANISMS["Gaussian"], "cifar10", 8, **settings.RESNET)
    return [
        *cells,
        Cell("Gaussian, ResNet-18", "ε=8", 0.742, noised, "accuracy", why("Gaussian", "cifar10")),
        Cell("none, ResNet-18", "ε=∞", 0.871, udp("non-private", "cifar10", None, **settings.RESNET), "accuracy", ("resnet-gn",)),
    ]  # fmt: skip


def _batch(dataset: str, clients: int) -> float:
    """A twentieth of what each of so many clients holds."""
    batch: float = settings.UDP[dataset]["batch_size"] * 10 / clients
    return batch if batch % 1 else int(batch)


def _table5() -> list[Cell]:
    cells = []
    for (dataset, clients), printed in TABLE_5.items():
        resnet = settings.RESNET if dataset == "cifar10" else {}
        batch = _batch(dataset, clients)
        merged = changes(settings.UDP[dataset], resnet, calibrate=False, clients=clients, batch_size=batch)
        job = Time("udp-fl-gaussian", dataset, merged, iterations=10 if resnet else 100)
        for count, paper in zip((50, 100, 500, 1000), printed, strict=True):
            cells.append(Cell(f"{SHOWN[dataset]} ({clients} clients)", f"{count} iterations", paper, job,
                              f"total_seconds:{clients}:{count}",
                              ("flower-time", *(("medical-subset",) if dataset == "medical_mnist" else ())), 1))  # fmt: skip
    return cells


def _table6() -> list[Cell]:
    cells = []
    headings = ("TPR at 1%", "accuracy", "AUC")
    measures = ("tpr_at_1pct", "balanced_accuracy", "auc")
    ours = {"shokri": "shokri", "lira": "lira-online", "canary": "canary"}
    models: list[tuple[str, int | None, str]] = [("", None, "non-private")]
    models += [(name, e, f"{name}, ε={e}") for e in EPSILONS for name in MECHANISMS]
    for attack, printed in TABLE_6.items():
        # Shokri's attack, which knows no example's difficulty, needs a model that overfits, as the paper's does.
        rows, said = (SHOKRI_ROWS, ("planned-public", "few-rows")) if attack == "shokri" else (None, ("planned-public",))
        numbers = [NON_PRIVATE_6[attack], *(one for row in printed for one in row)]
        for (name, e, label), papers in zip(models, numbers, strict=True):
            job = Inference("membership", planned(name, e, rows=rows))
            reasons = (*(why(name) if e else ()), *said)
            cells += [Cell(f"{attack}, {label}", heading, paper, job, f"{ours[attack]}.{measure}", reasons)
                      for heading, measure, paper in zip(headings, measures, papers, strict=True)]  # fmt: skip
    cells += [Cell(f"the model of {SHOKRI_ROWS} rows, {label}", "test accuracy", None, planned(name, e, rows=SHOKRI_ROWS),
                   "accuracy", ("few-rows",)) for name, e, label in models]  # fmt: skip
    cells += [Cell(f"the model of all rows (lira, canary), {label}", "test accuracy", None, planned(name, e), "accuracy",
                   (*(why(name) if e else ()), "planned-public")) for name, e, label in models]  # fmt: skip
    return cells


def _table7() -> list[Cell]:
    cells = []
    plain = Attack("non-private", "cifar10", "type0", "gradinv", 10, 100, 2500, (), "papers-cnn")
    rows: list[tuple[str, Any, tuple[float, float, float]]] = [("non-private", plain, (1.7104, 9.79, 0.0751))]
    for e, printed in TABLE_7.items():
        for (name, recipe), numbers in zip(MECHANISMS.items(), printed, strict=True):
            # 100 of a client's 2,000 rows are the paper's rate of 0.05; 300 steps in all
            job = Attack(recipe, "cifar10", "type0", "gradinv", 10, 100, 2500,
                         changes(calibrate=True, target_epsilon=float(e), clients=20, rounds=300, **{"clip.bound": 0.01}),
                         "papers-cnn")  # fmt: skip
            rows.append((f"{name}, ε={e}", job, numbers))
    heads, measures = ("MSE, standardised", "PSNR", "SSIM"), ("mse_standard", "psnr", "ssim")
    for row, job, numbers in rows:
        cells += [Cell(row, h, paper, job, m, ("standard-pixels",), 4)
                  for h, m, paper in zip(heads, measures, numbers, strict=True)]  # fmt: skip
    cells += [Cell(f"control: the {image} image", h, None, plain, f"{image}_image_{m}", ("no-attack",), 4)
              for image in ("mean", "black") for h, m in zip(heads, measures, strict=True)]  # fmt: skip
    return cells


def _inferences(kind: Any, dataset: str, table: dict[int, Any], plain: tuple[float | None, float | None], heads: tuple[str, str],
                measures: tuple[str, str], extra: tuple[str, ...], said: str = "") -> list[Cell]:  # fmt: skip
    """A table of attacks on trained models, and its controls: the attacker without any model, and with an untrained one."""
    pool = 1000 if kind == "attribute" else 4000
    more = {"model": "papers-cnn"} if dataset == "cifar10" else {}  # ResNet-18 takes hours for a table
    first = Inference(kind, udp("non-private", dataset, None, **more), pool=pool)
    untrained = replace(first, train=settings.with_settings(first.train, rounds=1, learning_rate=1e-12))
    extra = (*extra, *set_up(dataset))
    own = "the same network on raw pixels, no model" if kind == "attribute" else "the mean image of the attacker's own rows"
    cells = [
        Cell(f"non-private{said}", h, p, first, m, extra) for h, m, p in zip(heads, measures, plain, strict=True)
    ]
    cells += [Cell(f"control: {own}{said}", h, None, first, f"control_{m}", extra) for h, m in zip(heads, measures, strict=True)]
    cells += [Cell(f"control: an untrained model{said}", h, None, untrained, m, ("untrained",))
              for h, m in zip(heads, measures, strict=True)]  # fmt: skip
    if kind == "attribute":
        cells.append(Cell("control: always the commoner answer", heads[0], None, first, "majority_accuracy", ("commoner",)))
    attacked = {"non-private": first.train, "untrained": untrained.train}
    for e, printed in table.items():
        for (name, recipe), numbers in zip(MECHANISMS.items(), printed, strict=True):
            job = Inference(kind, udp(recipe, dataset, e, **more), pool=pool)
            attacked[f"{name}, ε={e}"] = job.train
            cells += [
                Cell(f"{name}, ε={e}{said}", h, None if plain[0] is None else p, job, m, (*extra, *why(name)))
                for h, m, p in zip(heads, measures, numbers, strict=True)
            ]
    own_task = [
        Cell(f"the attacked model, {name}", "own task, test accuracy", None, train, "accuracy", ("own-task", *set_up(dataset)))
        for name, train in attacked.items()
    ]
    return cells if said else cells + own_task


def _table9() -> list[Cell]:
    heads, measures = ("MSE", "MAE"), ("mse_inputs", "mae_inputs")
    return [
        *_inferences("outputs", "cifar10", TABLE_9, (1.23, .65), heads, measures, ("from-outputs", "standard-inputs")),
        *_inferences("decoder", "cifar10", TABLE_9, (None, None), heads, measures, ("from-embeddings", "standard-inputs"),
                     ", from embeddings"),
    ]  # fmt: skip


def _lines(dataset: str, epsilon: float, columns: tuple[int, ...], **more: object) -> list[Cell]:
    """Accuracy over rounds of the mechanisms, NbAFL and plain averaging."""
    runs = {f"{SHOWN[dataset]}, {name}, ε={epsilon:g}": (udp(recipe, dataset, epsilon, **more), why(name))
            for name, recipe in MECHANISMS.items()}  # fmt: skip
    runs[f"{SHOWN[dataset]}, none"] = (udp("non-private", dataset, None, **more), ())
    measure = "rmse" if dataset == "wind" else "accuracy"
    more_why = ("wind-delta",) if dataset == "wind" else ()
    return [
        Cell(
            row,
            f"round {r}",
            None,
            job,
            f"{measure}@{r}",
            ("no-numbers", *reasons, *(more_why if reasons else ()), *set_up(dataset)),
        )
        for row, (job, reasons) in runs.items()
        for r in columns
    ]


def _both(dataset: str, row: str, column: str, rates: tuple[float, float] | None = None, **more: object) -> list[Cell]:
    """Staircase at ε = 5, and the same run without noise. rates: of the one and the other, where they are not the dataset's."""
    noised, plain = (udp("udp-fl-staircase", dataset, epsilon, **more) for epsilon in (5.0, None))
    if rates is not None:
        noised, plain = (settings.with_settings(job, learning_rate=r) for job, r in zip((noised, plain), rates, strict=True))
    return [
        Cell(f"{SHOWN[dataset]}, {row}", column, None, noised, "accuracy", ("no-numbers", *why("Staircase"), *set_up(dataset))),
        Cell(f"{SHOWN[dataset]}, without noise, {row}", column, None, plain, "accuracy", ("no-numbers", *set_up(dataset))),
    ]


def _adam() -> Cell:
    """The optimiser and the rate of the authors' code behind the same clip and noise. Its row is not one of the mechanisms'."""
    job = udp("udp-fl-gaussian", "mnist", 4.0, channel="none", local_optimiser="adam", learning_rate=0.01)
    return Cell("MNIST, Adam at rate 0.01, Gaussian at ε=4", "ε=4", None, job, "accuracy", ("no-numbers", *why("Gaussian")))


def _sweeps() -> list[Cell]:
    """Figure 3: the number of clients and the sampling rate."""
    third: list[Cell] = []
    for d in ("mnist", "medical_mnist"):
        for n in (50, 100, 150, 200):
            batch = _batch(d, n)
            third += _both(d, "by clients", f"{n} clients", settings.RATES_BY_CLIENTS[d, n], clients=n, cohort_size=n // 10,
                           batch_size=batch)  # fmt: skip
        for q in (0.01, 0.05, 0.1, 0.5):
            batch = round(settings.UDP[d]["batch_size"] * q / 0.05)
            third += _both(d, "by sampling rate", f"rate {q}", batch_size=batch)
    # "Needs more epochs to converge": the first tested round with a share of the images that most of these runs get to.
    for cell in [c for c in third if "without noise" not in c.row]:
        share = 0.8 if cell.row.startswith("MNIST") else 0.5
        third.append(replace(cell, row=f"{cell.row}, first round with {share:.0%}", measure=f"rounds_to:{share}", digits=0,
                             why=(*cell.why, "every-five")))  # fmt: skip
    return third


def _early() -> list[Cell]:
    """Figure 4's learning curves: the first rounds of Staircase and of no noise."""
    return [
        Cell(f"early rounds, {name} on {SHOWN[d]}", f"round {r}", None, udp(recipe, d, epsilon, channel="none"),
             f"accuracy@{r}", ("no-numbers", *(why(name) if epsilon else ()), *set_up(d)))
        for d in ("mnist", "medical_mnist")
        for name, recipe, epsilon in (("Staircase at ε=4", "udp-fl-staircase", 4.0), ("none", "non-private", None))
        for r in (10, 25, 50)
    ]  # fmt: skip


def _figures() -> list[Entry]:
    first = [c for d in ("mnist", "medical_mnist") for c in _lines(d, 5.0, (10, 25, 50, 100, 150))]
    first += [
        Cell(f"{SHOWN[d]}, nbafl", f"round {r}", None, udp("nbafl", d, 5.0), f"accuracy@{r}",
             ("no-numbers", "nbafl-noise", *set_up(d)))
        for d in ("mnist", "medical_mnist")
        for r in (10, 25, 50, 100, 150)
    ]
    first += [Cell(f"MNIST, {name}, ε=5, first round with 90%", "round", None, udp(recipe, "mnist", 5.0), "rounds_to:0.9",
                   ("no-numbers", "every-five", *set_up("mnist")), 0) for name, recipe in MECHANISMS.items()]  # fmt: skip
    second = []
    for name, e in [(name, e) for e in (2, 8) for name in MECHANISMS] + [("none", None)]:
        job, row = planned(name, e), f"{name}, ε={e or '∞'}"
        for part, heading in ((1, "a third"), (2, "two thirds"), (3, "all rounds")):
            r = -(-part * dict(job.settings)["rounds"] // 3)
            second.append(Cell(row, heading, None, job, f"accuracy@{r}", ("no-numbers", "planned-public")))
    by_epsilon: list[Cell] = []
    shuffled: list[Cell] = []
    for d in ("mnist", "medical_mnist"):
        for channel, cells in (("none", by_epsilon), ("shuffle-models", shuffled)):
            for name, recipe in MECHANISMS.items():
                for e in EPSILONS:
                    job = udp(recipe, d, float(e), channel=channel)
                    cells.append(Cell(f"{SHOWN[d]}, {name}", f"ε={e}", None, job, "accuracy",
                                      ("no-numbers", *why(name), *set_up(d))))  # fmt: skip
            cells.append(Cell(f"{SHOWN[d]}, none", "ε=∞", None, udp("non-private", d, None), "accuracy",
                              ("no-numbers", *set_up(d))))  # fmt: skip
    shuffled += [replace(cell, row=f"{cell.row}, not shuffled") for cell in by_epsilon if cell.column != "ε=∞"]
    fifth = _lines("wind", 5.0, (10, 50, 150), aggregate="scaffold")
    beside = udp("nbafl", "wind", 5.0)
    fifth += [Cell("Wind, nbafl", f"round {r}", None, beside, f"rmse@{r}", ("no-numbers", "nbafl-wind", *set_up("wind")))
              for r in (10, 50, 150)]  # fmt: skip
    return [
        Entry("p5-fig1", "Accuracy and convergence against baselines", tuple(first),
              "Staircase is always best of the three, reaches 90% on MNIST in about 25 epochs (read as rounds) and nears FedAvg "
              "without noise; other methods struggle to reach 90% after 100 epochs.",
              x="round", curve="accuracies"),
        Entry("p5-fig2", "CIFAR-10 at ε = 2 and 8", tuple(second),
              "At ε = 2 Gaussian is better, at ε = 8 Staircase (with ResNet-18; here a head on public features).", x="round",
              curve="accuracies"),
        Entry("p5-fig3", "Number of clients and sampling rate", tuple(_sweeps()),
              "With more clients the accuracy falls slightly, not substantially, and more epochs are needed; with a higher "
              "sampling rate it rises, in fewer epochs.",
              x=" | ".join(2 * ("clients (10% per round)", "sampling rate"))),
        Entry("p5-fig4", "Accuracy by ε", (*by_epsilon, _adam(), *_early()),
              "Staircase is best and rises with ε; in early epochs it is above no noise on Medical MNIST.",
              x="ε | ε | round of training"),
        Entry("p5-fig5", "Wind power with SCAFFOLD", tuple(fifth), "Staircase is quicker on few epochs, and better than NbAFL.",
              x="round", curve="accuracies"),
        Entry("p5-fig6", "With the shuffler", tuple(shuffled),
              "The shuffler improves utility marginally, by amplifying the guarantee; Staircase is best.", x="ε", paired=True),
    ]  # fmt: skip


def entries() -> list[Entry]:
    """All tables and figures of P5."""
    return [
        Entry("p5-table1", "Comparison of methods", note="a list of literature"),
        Entry("p5-table2", "Notation", note="a list of symbols"),
        Entry("p5-table3", "Rényi DP of three mechanisms", note="a list of formulas (see docs/mechanisms)"),
        Entry("p5-table4", "CIFAR-10 accuracy by mechanism and ε", tuple(_table4())),
        Entry("p5-table5", "Run time", tuple(_table5())),
        Entry("p5-table6", "Membership inference on CIFAR-10", tuple(_table6())),
        Entry("p5-table7", "Reconstruction by inverting gradients (CIFAR-10)", tuple(_table7())),
        Entry("p5-table8", "Attribute inference (UTKFace, gender)", tuple(_inferences(
            "attribute", "utkface", TABLE_8, (.86, .85), ("accuracy", "F1"), ("accuracy", "f1"), ("pixels-alone",)))),
        Entry("p5-table9", "Reconstruction by a trained decoder (CIFAR-10)", tuple(_table9())),
        *_figures(),
    ]  # fmt: skip
