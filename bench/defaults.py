"""The default path on every shipped dataset: `fedveil fit NAME --epsilon E --observer O`, beside scikit-learn without privacy.

    FEDVEIL_DATA=... FEDVEIL_CACHE=... python -m bench.defaults --results defaults.jsonl [--only adult | adult:4:sum]
    python -m bench.defaults --results defaults.jsonl --show      prints the table of docs/defaults.md

Each line of the results is one run or one baseline, found again by its name: an interrupted bench goes on where it stopped.
Seed 0, nothing is tuned or chosen by its score. Scores are test accuracy, for wind R².
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.datasets import available, load
from fedveil.data.sources import CATALOGUE
from fedveil.data.text import decode, is_text
from fedveil.federation.fit import carry_out, choose

NAMES = (
    "cancer", "digits", "adult", "wind", "location30", "sst2", "utkface", "lfw", "medical_mnist", "ag_news", "mnist",
    "fashion_mnist", "cifar10",
)  # fmt: skip
TARGETS = {"utkface": "gender"}
BUDGETS = (4.0, 1.0)
WIDEST = 1000  # columns up to which plain pixels or numbers are tried without privacy


def main() -> None:
    """Run what is missing, or show what is there."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--results", type=Path, required=True)
    reader.add_argument("--only", default="", help="one dataset, or one cell of it such as adult:4:sum, adult:without")
    reader.add_argument("--show", action="store_true")
    given = reader.parse_args()
    if given.show:
        print(table(read(given.results)))
        return
    for name, work in cells():
        if f"{name}:".startswith(given.only and f"{given.only}:"):
            once(given.results, name, work)
    assert set(CATALOGUE) - set(NAMES) == {"cancer_raw"}, "a dataset is not in the table"


def cells() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every cell of the table whose data is here, with the work that fills it."""
    for name in filter(available, NAMES):
        for budget in BUDGETS:
            for observer in ("sum", "server"):
                yield f"{name}:{budget:g}:{observer}", partial(one, name, budget, observer)
        yield f"{name}:without", partial(baseline, name)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Results by name."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def once(path: Path, name: str, work: Callable[[], dict[str, Any]]) -> None:
    """Do and keep what is not kept yet."""
    if name not in read(path):
        line = {"name": name, **work()}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)


def one(name: str, epsilon: float, observer: str) -> dict[str, Any]:
    """One run of the default path."""
    chosen = choose(name, epsilon=epsilon, observer=observer, target=TARGETS.get(name))
    with tempfile.TemporaryDirectory() as folder:
        facts = carry_out(chosen, Path(folder) / "run")
    score = facts["r2"] if facts["test_accuracy"] is None else facts["test_accuracy"]
    asked = ("server", "example", "sound")
    sound = [row["epsilon"] for row in facts["ledger"] if (row["observer"], row["unit"], row["verdict"]) == asked]
    return {
        "score": score, "epsilon": sound[0] if sound else None, "learned": facts["learned"],
        "features": chosen.config.features, "clients": chosen.config.clients, "rounds": chosen.config.rounds,
        "forecast": facts.get("forecast"),
    }  # fmt: skip


def baseline(name: str) -> dict[str, Any]:
    """The best of scikit-learn's linear model and boosted trees on the plain columns, and of its linear model on the features
    that the default path takes, all without privacy."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from fedveil.models import features

    data = load(name, target=TARGETS.get(name))
    chosen = choose(name, epsilon=4.0, target=TARGETS.get(name)).config
    front = features.apply(load(chosen.dataset, target=TARGETS.get(name)), chosen.features) if chosen.features else data
    linear = (lambda: Ridge(1e-3)) if data.classes is None else (lambda: LogisticRegression(C=100, max_iter=200))
    tries = [(make_pipeline(StandardScaler(), linear()), front)]
    width = int(np.prod(data.shape))
    if not is_text(data.x) and width <= WIDEST:
        tries.append((make_pipeline(StandardScaler(), linear()), data))
        if data.pixel_range is None:
            trees = HistGradientBoostingRegressor if data.classes is None else HistGradientBoostingClassifier
            tries.append((trees(), data))
    found = [float(m.fit(flat(d.x), d.y).score(flat(d.x_test), d.y_test)) for m, d in tries]
    return {"score": max([*found, *([words(data)] if is_text(data.x) else [])])}


def words(data: Any) -> float:
    """Texts by tf-idf words and pairs, and a linear model."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), min_df=2), LogisticRegression(C=10, max_iter=200))
    return float(model.fit(decode(data.x), data.y).score(decode(data.x_test), data.y_test))


def flat(x: np.ndarray) -> np.ndarray:
    """Rows of numbers."""
    return x.reshape(len(x), -1)


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown; scores in brackets are shares of the score without privacy."""
    lines = [
        "| dataset | without privacy | ε = 4, sum | ε = 1, sum | ε = 4, server | ε = 1, server | features |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in NAMES:
        if not any(key.startswith(f"{name}:") for key in found):
            continue
        plain = found.get(f"{name}:without", {}).get("score")
        cells = []
        for observer in ("sum", "server"):
            for budget in BUDGETS:
                line = found.get(f"{name}:{budget:g}:{observer}")
                share = "" if line is None or plain is None else f" ({line['score'] / plain:.0%})"
                cells.append("" if line is None else f"{line['score']:.3f}{share}")
        some = found.get(f"{name}:4:sum", {}).get("features") or ""
        shown = name + (f" ({TARGETS[name]})" if name in TARGETS else "")
        shown += " (R²)" if CATALOGUE[name].task == "regression" else ""
        told = "not run" if plain is None else f"{plain:.3f}"
        lines.append(f"| {shown} | {told} | {' | '.join(cells)} | {str(some).partition(',')[0]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
