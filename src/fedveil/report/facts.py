"""What a report says about one run, as plain values read from its directory.

Nothing from the directory is executed: models or datasets given as module:function are left alone. The promise
is recomputed from the ledger, never taken from another file.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import UserError
from fedveil.federation import store
from fedveil.federation.store import Run
from fedveil.jsons import Document, JsonObject

if TYPE_CHECKING:
    from fedveil.privacy.ledger import Header, Ledger, OwnRow
    from fedveil.privacy.ledger.journal import Record
    from fedveil.protect.recipe import Recipe

COURSE_ACCOUNTANTS = ("pld", "rdp", "moments", "zcdp")
MARKS = 12  # rounds at which epsilon is recomputed
MOST_CLIENTS = 200  # whose budgets are listed
MOST_CLASSES = 64
MOST_JOBS = 12  # of one kind of attack that are shown
MOST_IMAGE = 1_200_000  # bytes of one picture; larger ones are reduced
PATIENCE = 1.5  # seconds for the clients' budgets


@dataclass(frozen=True)
class Promise:
    """The ledger's answer. problem: why there is none. course: (accountant, verdict) -> (rounds, epsilons)."""

    rows: tuple[Document, ...] = ()
    course: Mapping[tuple[str, str], tuple[list[float], list[float | None]]] = ()  # type: ignore[assignment]
    problem: str = ""
    releases: int = 0
    head: str = ""
    delta: float | None = None
    simulated: bool = True
    budget: float | None = None
    own: tuple[OwnRow, ...] = ()  # of clients that have budgets of their own
    clients: tuple[JsonObject, ...] = ()
    client_count: int = 0
    looks: int = 0  # noised looks at a table's columns, paid before the first round
    looks_epsilon: float | None = None  # what they cost by themselves
    public: tuple[str, ...] = ()  # what was trained elsewhere, on public data


@dataclass(frozen=True)
class Facts:
    """One run, ready to be shown. Private figures are empty unless they were asked for."""

    run: Run
    name: str
    recipe: Recipe
    unit: str
    metrics: tuple[Document, ...]
    private: tuple[JsonObject, ...]
    result: JsonObject
    promise: Promise
    attacks: tuple[Document, ...]
    confusion: list[list[int]] | None
    public_data: bool

    @property
    def finished(self) -> bool:
        return bool(self.result)

    @property
    def rounds(self) -> int:
        return int(self.metrics[-1].get("round", 0)) if self.metrics else 0

    def last(self, key: str) -> float | None:
        """The latest known figure."""
        own = number(self.result.get(key))
        return own if own is not None else next(
            (v for line in reversed(self.metrics) if (v := number(line.get(key))) is not None), None
        )  # fmt: skip

    def column(self, key: str, lines: Sequence[Document] | None = None) -> list[float | None]:
        return [number(line.get(key)) for line in (self.metrics if lines is None else lines)]

    @property
    def x(self) -> list[float]:
        return [number(line.get("round")) or 0.0 for line in self.metrics]

    def main(self) -> dict[str, Any] | None:
        """The row that a single number stands for: the configured observer, the protected unit, sound first."""
        return main_row(self.promise.rows, self.run.config.observer, self.unit)


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # a whole number with hundreds of digits
        return None
    return found if math.isfinite(found) else None


def main_row(rows: Iterable[Mapping[str, Any]], observer: str, unit: str) -> Document | None:
    """Sound before nominal before none; within these, the wanted unit first."""
    order = {"sound": 0, "nominal": 1, "none": 2}
    own = [r for r in rows if r.get("observer") == observer and r.get("verdict") in order]
    own.sort(key=lambda r: (order[r["verdict"]], r.get("unit") != unit))
    wanted = [r for r in own if r.get("unit") == unit]
    return dict((wanted or own)[0]) if own else None


def sound_epsilon(facts: Facts) -> float | None:
    """The main row's epsilon if it is sound."""
    row = facts.main()
    return row["epsilon"] if row and row["verdict"] == "sound" else None


def gather(
    folder: Path | Run, private: bool = False, compute: bool = True, quick: bool = False, clients: bool = False
) -> Facts:
    """Read a run. compute=False writes nothing and loads no data (a confusion matrix only if it is stored).
    quick leaves out epsilon over rounds; clients adds what each client has spent."""
    run = store.open_run(folder)
    folder = run.path
    recipe = run.config.built_recipe()
    unit = recipe.place.unit
    metrics = tuple(
        line for line in run.metrics if isinstance(line, dict) and number(line.get("round")) is not None
    )
    public_data = run.facts.get("public_data") is True  # said by the run that read the rows; a name says nothing
    result = _result(run)
    return Facts(
        run=run,
        name=run.config.name or folder.resolve().name,
        recipe=recipe,
        unit=unit,
        metrics=metrics,
        private=tuple(line for line in run.private if isinstance(line, dict)) if private else (),
        result=result,
        promise=promise_of(run, unit, course=not quick, clients=clients, named=private),
        attacks=tuple(attacks_of(folder, show=private or public_data)),
        confusion=confusion_of(run, compute) if result else None,
        public_data=public_data,
    )


def _result(run: Run) -> JsonObject:
    try:
        found = run.result
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


# --- the promise -----------------------------------------------------------------------------------------------


def promise_of(run: Run, unit: str, course: bool = True, clients: bool = False, named: bool = False) -> Promise:
    """Rows, epsilon over rounds and budgets, recomputed from the ledger without locking or repairing it."""
    from fedveil.privacy.ledger import Ledger
    from fedveil.privacy.ledger.journal import read

    path = run.path / "ledger.jsonl"
    if not path.is_file():
        return Promise(problem="there is no ledger, so nothing is known about what was released")
    config = run.config
    try:
        ledger = Ledger.read(path)
        rows = tuple(asdict(row) for row in ledger.table(accountant=config.accountant, named=named))
        records = read(path).records
        made = _course(ledger.header, records, rows, config.observer, unit) if course else {}
        own = tuple(ledger.own_table(config.accountant))
        looks, price = _looks(ledger.header, records, config.observer, unit, config.accountant)
        budgets = _clients(ledger, config.observer, unit, config.accountant) if clients else ()
    except (UserError, OSError, KeyError, TypeError, ValueError, AttributeError) as wrong:
        return Promise(problem=f"the ledger cannot be read: {wrong}")
    header = ledger.header
    whole = [b.epsilon for b in header.budgets if b.client is None]
    return Promise(
        rows=rows,
        course=made,
        releases=ledger.head[0],
        head=ledger.head[1],
        delta=header.delta,
        simulated=header.simulated,
        budget=min(whole, default=None),
        own=own,
        clients=budgets,
        client_count=header.clients,
        public=header.public,
        looks=looks,
        looks_epsilon=price,
    )


def _looks(
    header: Header, records: Sequence[Record], observer: str, unit: str, accountant: str
) -> tuple[int, float | None]:
    """How many noised looks at a table's columns the ledger holds, and the epsilon of these alone."""
    from fedveil.privacy.ledger import Ledger

    looks = [record for record in records if record.body.get("note") == "look"]
    if not looks:
        return 0, None
    return len(looks), Ledger(header, [records[0], *looks], None).epsilon(observer, unit, accountant=accountant)


def _course(
    header: Header, records: Sequence[Record], rows: Sequence[Document], observer: str, unit: str
) -> dict[tuple[str, str], tuple[list[float], list[float | None]]]:
    """Epsilon of the main row after some of the rounds, by several accountants."""
    from fedveil.privacy.ledger import Ledger

    main = main_row(rows, observer, unit)
    ends = {int(r.body["round"]): i for i, r in enumerate(records) if r.body.get("kind") == "release"}
    played = sorted(ends)
    if main is None or main["verdict"] == "none" or not played:
        return {}
    chosen = sorted({played[round((len(played) - 1) * i / (MARKS - 1))] for i in range(MARKS)})
    found: dict[tuple[str, str], tuple[list[float], list[float | None]]] = {}
    names = COURSE_ACCOUNTANTS if main["verdict"] == "sound" else (main["accountant"],)
    for mark in chosen:
        book = Ledger(header, records[: ends[mark] + 1], None)
        for name in names:
            if main["verdict"] == "sound":
                value = book.epsilon(main["observer"], main["unit"], accountant=name)
            else:
                value = next(
                    (
                        row.epsilon
                        for row in book.table(accountant=name)
                        if (row.observer, row.unit, row.verdict)
                        == (main["observer"], main["unit"], "nominal")
                    ),
                    None,
                )
            if value is not None:
                xs, ys = found.setdefault((name, main["verdict"]), ([], []))
                xs.append(float(mark))
                ys.append(value)
    return found


def _clients(
    ledger: Ledger, observer: str, unit: str, accountant: str
) -> tuple[JsonObject, ...]:
    """What each of the first clients has spent, and what it may spend; as many as there is time for."""
    header = ledger.header
    many = range(min(header.clients, MOST_CLIENTS))
    often = ledger.participations()
    limits = {b.client: b for b in header.budgets if (b.observer, b.unit) == (observer, unit)}
    used: dict[object, float | None] = {}
    out: list[JsonObject] = []
    until = time.monotonic() + PATIENCE
    for client in many:
        if time.monotonic() > until:
            break
        limit = limits.get(client, limits.get(None))
        delta = header.delta if limit is None or limit.delta is None else limit.delta
        # clients with equal numbers of releases need not be equal, so only the untouched are skipped
        used[client] = ledger.spent(client, observer, unit, delta, accountant) if often[client] else 0.0
        out.append(
            {
                "client": client,
                "releases": int(often[client]),
                "epsilon": used[client],
                "budget": None if limit is None else limit.epsilon,
                "delta": delta,
            }
        )
    return tuple(out)


# --- attacks ------------------------------------------------------------------------------------------------------


def attacks_of(folder: Path, show: bool) -> Iterable[JsonObject]:
    """One card per attack result. Without `show` a card only tells that the attack was made: its figures and
    pictures describe training records. An audit counts planted canaries, and is always shown."""
    place = folder / "attacks"
    if not place.is_dir():
        return
    for path in sorted(place.glob("*.json"))[:24]:
        if path.stem == "summary":  # has a table of its own
            continue
        try:
            data = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            yield {"kind": path.stem, "damaged": True}
            continue
        found = data.get("results", data) if isinstance(data, dict) else data
        items = [item for item in (found if isinstance(found, list) else [found]) if isinstance(item, dict)]
        items = _every_job(path.with_suffix(".jsonl")) or items
        kind = str(items[0].get("kind") or path.stem.split("-")[0]) if items else ""
        if not show and kind != "audit":
            if items:
                yield {"kind": kind, "hidden": True}
            continue
        for item in items:
            image = _image_of(place, path, item, len(items)) if show else None
            yield {"kind": str(item.get("kind") or kind), "data": item, "image": image}


def _every_job(path: Path) -> list[JsonObject]:
    """All that was tried of a kind that keeps one line per job: other seats, methods and rounds, side by side."""
    try:
        lines = path.read_text("utf-8").splitlines()[-MOST_JOBS:]
        found = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return []
    return [line for line in found if isinstance(line, dict)]


def _image_of(place: Path, path: Path, item: JsonObject, beside: int) -> str | None:
    """The picture of this very job; the one of the whole kind stands for it only where there is no other job."""
    from fedveil.attacks.leakage.measure import mark_of

    own = _image(place / "pictures" / f"{mark_of(str(item.get('job', '')))}.png")
    return own or (_image(path.with_suffix(".png")) if beside == 1 else None)


def _image(path: Path) -> str | None:
    """A picture as a data address, reduced if it is large."""
    try:
        blob = path.read_bytes()
    except OSError:
        return None
    if not blob.startswith(b"\x89PNG\r\n"):
        return None
    if len(blob) > MOST_IMAGE:
        try:
            blob = _reduced(blob)
        except Exception:  # a picture that no decoder likes is left out
            return None
    return None if len(blob) > MOST_IMAGE else "data:image/png;base64," + base64.b64encode(blob).decode()


def _reduced(blob: bytes) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    with Image.open(io.BytesIO(blob)) as picture:
        for side in (1400, 900, 500):
            picture.thumbnail((side, side))
            out = io.BytesIO()
            picture.convert("RGB").quantize(64).save(out, "PNG")
            if out.tell() <= MOST_IMAGE:
                break
    return out.getvalue()


def roc_of(data: Mapping[str, object]) -> tuple[list[float], list[float]] | None:
    """False and true positive rates, from {"fpr", "tpr"} (also inside "roc") or a list of pairs."""
    found = data.get("roc", data)
    if isinstance(found, Mapping):
        xs, ys = found.get("fpr"), found.get("tpr")
    elif isinstance(found, list) and all(isinstance(p, list | tuple) and len(p) == 2 for p in found):
        xs, ys = [p[0] for p in found], [p[1] for p in found]
    else:
        return None
    if not isinstance(xs, list) or not isinstance(ys, list) or len(xs) != len(ys) or len(xs) < 2:
        return None
    pairs = [(number(x), number(y)) for x, y in zip(xs, ys, strict=True)]
    if any(x is None or y is None for x, y in pairs):
        return None
    return [float(x) for x, _ in pairs], [float(y) for _, y in pairs]  # type: ignore[arg-type]


# --- confusion ----------------------------------------------------------------------------------------------------


def confusion_of(run: Run, compute: bool) -> list[list[int]] | None:
    """Counts [true][said] on the test rows; kept as confusion.json beside the model that it belongs to."""
    model, kept = run.path / "model.safetensors", run.path / "confusion.json"
    try:
        mark = hashlib.sha256(model.read_bytes()).hexdigest()
    except OSError:
        return None
    try:
        stored = json.loads(kept.read_text("utf-8"))
        if stored["model"] == mark:
            return [[int(v) for v in row] for row in stored["matrix"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if not compute:
        return None
    try:
        matrix = _confusion(run, model)
    except Exception:  # data or model are not at hand: the report is made without it
        return None
    right = (
        None if not matrix else sum(row[i] for i, row in enumerate(matrix)) / max(1, sum(map(sum, matrix)))
    )
    if right is None or abs(right - (number((run.result or {}).get("test_accuracy")) or 0.0)) > 1e-6:
        return None  # the data at hand are not those the run was tested on
    if matrix is not None:
        store.write_atomic(kept, json.dumps({"model": mark, "matrix": matrix}).encode())
    return matrix


def _confusion(run: Run, model: Path) -> list[list[int]] | None:
    import numpy as np
    from safetensors.numpy import load_file

    from fedveil.data.datasets import load
    from fedveil.models import nets
    from fedveil.models.layout import layout_of
    from fedveil.training.evaluate import outputs

    config = run.config
    if ":" in config.dataset or ":" in config.model or config.features:
        return None
    data = load(
        config.dataset,
        root=config.data,
        seed=config.split_seed,
        validation=config.validation,
        target=config.target,
    )
    if data.task != "classification" or not data.classes or data.classes > MOST_CLASSES:
        return None
    name = nets.default_model(data) if config.model == "auto" else config.model
    module = nets.build(name, data.shape, data.classes, config.seed, **config.model_options)
    tensors = load_file(model)
    weights = np.concatenate([tensors[key].reshape(-1) for key in layout_of(module).names])
    said = outputs(module, weights, data.x_test).argmax(1).numpy()
    matrix = np.zeros((data.classes, data.classes), int)
    np.add.at(matrix, (data.y_test, said), 1)
    return matrix.tolist()
