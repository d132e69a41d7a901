"""The owner decides, the server asks: contracts, and servers that try to get more than was agreed."""

from __future__ import annotations

import json
import os
import random
import re
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

from fedveil.attacks.malicious import models
from fedveil.cli import build
from fedveil.errors import UserError
from fedveil.federation.checks import architecture_digest
from fedveil.federation.config import RunConfig, make_config
from fedveil.federation.loop import prepare
from fedveil.federation.round import moment_of, noised_of, plan_of, start
from fedveil.flower import books, contract, identity, limits, node, owndata, wire
from fedveil.flower.contract import Allowed, Bounds, Checks, Contract, Data, Model, Refused, recipe_digest
from fedveil.flower.owner import Owner, contract_of
from fedveil.flower.request import read_request
from fedveil.models import nets
from fedveil.models.layout import flatten, layout_of
from fedveil.privacy.ledger import Ledger
from fedveil.protect.catalogue import get

COLUMNS = (("age", 0.0, 100.0), ("dose", 0.0, 10.0), ("weight", 20.0, 200.0))
ROWS = 40


def a_contract(**more: Any) -> Contract:
    values: dict[str, Any] = {
        "study": "flu",
        "version": 1,
        "recipes": (Allowed("fed-cdp", recipe_digest(get("fed-cdp"))),),
        "epsilon": 50.0,
        "data": Data("outcome", ("healthy", "flu"), ROWS, COLUMNS),
        "models": (Model("papers-mlp", '{"hidden":[4]}'),),
        "bounds": Bounds(
            sigma=(1.0, 100.0), clip=(0.5, 4.0), learning_rate=(0.0, 0.5), local_steps=20, rounds=50
        ),
    }
    return Contract(**{**values, **more})


def a_table(
    path: Path, rows: int = ROWS, seed: int = 3, edit: Callable[[list[str]], None] | None = None
) -> None:
    draw = np.random.default_rng(seed)
    lines = ["id,age,dose,weight,outcome"]
    for n in range(rows):
        word = "flu" if draw.random() < 0.4 else "healthy"
        lines.append(f"{n},{draw.integers(18, 90)},{draw.random() * 10:.3f},{draw.integers(40, 120)},{word}")
    if edit:
        edit(lines)
    path.write_text("\n".join(lines) + "\n")


def an_owner(folder: Path, agreed: Contract | None = None, **more: Any) -> Owner:
    agreed = agreed or a_contract()
    path = folder / "contract.toml"
    path.unlink(missing_ok=True)
    contract.write_contract(path, agreed)
    if not (folder / "patients.csv").exists():
        a_table(folder / "patients.csv")
    return Owner(
        folder / "home",
        0,
        contract=str(path),
        contract_digest=agreed.digest,
        data=str(folder / "patients.csv"),
        **more,
    )


def a_config(**more: Any) -> RunConfig:
    values = {"recipe": "fed-cdp", "clients": 2, "rounds": 10, "local_steps": 3, "batch_size": 4, "learning_rate": 0.1,
              "model": "papers-mlp", "model_options": {"hidden": [4]}}  # fmt: skip
    return make_config({**values, **more})


def weights_of(config: RunConfig) -> np.ndarray:
    return flatten(nets.build("papers-mlp", (3,), 2, 0, **config.model_options))


def facts_of(config: RunConfig, agreed: Contract, **more: Any) -> dict[str, Any]:
    assert agreed.data is not None
    told = {"config": config.model_dump(), "run": "r", "examples": 80, "shape": [3], "classes": 2, "model": "papers-mlp",
            "round": 0, "ticket": 1, "data": agreed.data.digest, "nonce": "0" * 32}  # fmt: skip
    return {**told, **more}


def ask(owner: Owner, config: RunConfig, arrays: Mapping[str, np.ndarray] = {}, **more: Any) -> node.Reply:
    agreed = contract_of(owner)
    sent = {"weights": weights_of(config), **arrays}
    return node.answer("round", json.loads(json.dumps(facts_of(config, agreed, **more))), sent, owner)


def charged(owner: Owner) -> int:
    path = books.ledger_path(owner.home)
    return len(books.history(path)) if path.exists() else 0


# --- the file ---


def test_a_contract_reads_back_equal_and_comments_do_not_change_its_digest(tmp_path: Path) -> None:
    for agreed in (a_contract(), a_contract(valid_until="2030-01-01T00:00:00Z", submitters=("ab" * 32,), models=()),
                   a_contract(data=Data("y", (), 7, shape=(1, 8, 8)), epsilon=None)):  # fmt: skip
        path = tmp_path / "c.toml"
        path.unlink(missing_ok=True)
        contract.write_contract(path, agreed)
        path.write_text("# a comment\n" + path.read_text())
        assert contract.read_contract(path, pinned=agreed.digest) == agreed
    with pytest.raises(UserError, match="not overwritten"):
        contract.write_contract(path, agreed)


def test_a_contract_is_pinned_or_signed(tmp_path: Path) -> None:
    path, secret = tmp_path / "c.toml", identity.new_identity()
    contract.write_contract(path, a_contract())
    contract.sign_file(path, secret)
    assert contract.read_contract(path, owner=identity.public_of(secret)) == a_contract()
    with pytest.raises(UserError, match="no signature of its owner"):
        contract.read_contract(path, owner=identity.public_of(identity.new_identity()))
    path.write_text(path.read_text().replace("epsilon = 50.0", "epsilon = 5000.0"))
    with pytest.raises(UserError, match="no signature"):
        contract.read_contract(path, owner=identity.public_of(secret))
    with pytest.raises(UserError, match="is pinned here"):
        contract.read_contract(path, pinned=a_contract().digest)


def test_a_diff_names_every_change() -> None:
    new = a_contract(version=2, bounds=replace(a_contract().bounds, clip=(0.1, 4.0)), epsilon=60.0)
    assert contract.differences(a_contract(), new) == [
        "version: 1 -> 2", "epsilon: 50.0 -> 60.0", "bounds.clip: [0.5, 4.0] -> [0.1, 4.0]",
    ]  # fmt: skip


WRONG = [
    ("epsilon = 50.0", "epsilom = 50.0", "Did you mean 'epsilon'"),
    ("epsilon = 50.0", "", "'epsilon' is missing"),
    ("epsilon = 50.0", "epsilon = -1", "not allowed"),
    ("epsilon = 50.0", "epsilon = nan", "not allowed"),
    ("clip = [0.5, 4.0]", "clip = [1e-36, 4.0]", "clip"),
    ("clip = [0.5, 4.0]", "clip = [5, 4.0]", "clip"),
    ('classes = ["healthy", "flu"]', 'classes = ["flu", "flu"]', "different names"),
    ('target = "outcome"', 'target = "age"', "also a feature"),
    ("delta = 1e-05", "delta = 0.5", "not below 1"),
    ('"age"', '"\\u0000"', "columns|order"),
]


@pytest.mark.parametrize(("old", "new", "said"), WRONG)
def test_a_misspelt_contract_is_an_error_not_a_hole(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "c.toml"
    text = contract.to_toml(a_contract())
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=said):
        contract.read_contract(path)


def test_random_changes_of_a_contract_never_end_in_a_traceback(tmp_path: Path) -> None:
    """800 mutations: each is read as a contract or is a UserError."""
    path, draw = tmp_path / "c.toml", random.Random(11)
    good = contract.to_toml(a_contract()).encode()
    for _ in range(800):
        data = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(data))
            part = draw.choice(
                [b"[", b"{", b"1e999", b'"', b"-1", b"=", b"\n", bytes([draw.randrange(256)]), b"9" * 60]
            )
            data[at : at + draw.choice([0, 1, 20])] = part
        path.write_bytes(data)
        try:
            contract.read_contract(path)
        except UserError:
            continue


def test_own_code_is_allowed_by_the_digest_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clinicnets").mkdir()
    (tmp_path / "clinicnets/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "clinicnets/small.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = contract.package_digest("clinicnets.small:net")
    (tmp_path / "clinicnets/small.py").write_text("x = 2")
    assert contract.package_digest("clinicnets.small:net") != before


# --- decisions ---


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"protect": {"clip.bound": 1e-36}}, {}, "clip bound 1e-36"),
    ({"protect": {"clip.bound": 8.0}}, {}, "clip bound 8"),
    ({"protect": {"sigma": 0.1}}, {}, "sigma 0.1"),
    ({"protect": {"sigma": "linear:6:0.1"}}, {"round": 9}, "sigma 0\\."),
    ({"fixed_variance": 1e-3}, {}, "sigma"),
    ({"protect": {"clip.norm": "l1", "mechanism": "laplace"}}, {}, "other values than the owner allowed"),
    ({"protect": {"sampling": "full"}}, {}, "other values"),
    ({"client_epsilons": [1.0], "client_mechanisms": ["laplace"]}, {}, "other values"),
    ({"recipe": "fed-sdp"}, {}, "recipe 'fed-sdp' is not allowed"),
    ({"learning_rate": 1e38}, {}, "learning_rate"),
    ({"learning_rate_end": 3.0}, {}, "learning_rate"),
    ({"local_steps": 10_000_000}, {}, "local_steps"),
    ({"rounds": 51}, {}, "rounds"),
    ({"target": "age"}, {}, "target here is 'outcome'"),
    ({}, {"classes": 3}, "3"),
    ({}, {"shape": [4]}, "shape"),
    ({}, {"data": "0" * 64}, "classes \\(names and order\\)"),
    ({"model_options": {"hidden": [1_000_000]}}, {}, "model"),
    ({"model": "os:getcwd"}, {"model": "os:getcwd"}, "model"),
    ({"features": "scattering"}, {}, "features"),
    ({"loss": "os:getcwd"}, {}, "the loss os:getcwd is a function of the server's choice"),
    ({"loss": "hubris"}, {}, "loss = 'hubris' is not known"),
    ({"loss": "huber"}, {}, "this dataset has classes"),
    ({}, {"round": 10}, "round 10"),
    ({}, {"ticket": -1}, "ticket"),
    ({}, {"surprise": 1}, "unknown key"),
    ({}, {"examples": 0}, "examples"),
    ({}, {"sigma": 3.0}, "client_epsilons"),
    ({}, {"signature": "00" * 64, "submitter": "00" * 32}, "signature is not right"),
]


@pytest.mark.parametrize(("change", "more", "said"), REFUSED)
def test_what_was_not_agreed_is_refused_uncharged_explained_and_without_opening_data(
    tmp_path: Path, change: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    owner = an_owner(tmp_path)
    os.unlink(owner.data)  # the decision must not need it
    try:
        config = a_config(**change)
    except UserError:
        config = a_config().model_copy(update=change)
    sent = {} if "hidden" not in str(change) else {"weights": weights_of(a_config())}
    facts = json.loads(json.dumps(facts_of(config, contract_of(owner), **more)))
    said_back, arrays = node.answer("round", facts, sent or {"weights": weights_of(a_config())}, owner)
    assert said_back["status"] == "refused" and not arrays
    assert re.search(said, said_back["reason"]), said_back["reason"]
    assert charged(owner) == 0


def test_a_built_in_loss_needs_no_word_of_the_owner(tmp_path: Path) -> None:
    assert ask(an_owner(tmp_path), a_config(loss="label-smoothing:share=0.2"))[0]["status"] == "ok"


def test_an_admitted_round_is_charged_with_time_run_and_submitter(tmp_path: Path) -> None:
    owner = an_owner(tmp_path)
    said, arrays = ask(owner, a_config())
    assert said["status"] == "ok" and arrays["update"].shape == weights_of(a_config()).shape
    (record,) = books.history(books.ledger_path(owner.home))
    shown = CliRunner().invoke(build(), ["ledger", str(books.ledger_path(owner.home)), "--history", "--json"])
    assert json.loads(shown.output) == [record]
    assert (
        record["run"] == "r"
        and record["time"].endswith("Z")
        and record["contract"] == a_contract().digest[:16]
    )


def test_a_round_is_on_disk_in_the_ledger_before_the_nodes_data_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = an_owner(tmp_path)
    charged_then: list[int] = []
    opened = node._records

    def open_and_look(*given: Any) -> Any:
        charged_then.append(charged(owner))
        return opened(*given)

    monkeypatch.setattr(node, "_records", open_and_look)
    assert ask(owner, a_config())[0]["status"] == "ok"
    assert charged_then == [1]


def test_a_contract_ends_at_its_time(tmp_path: Path) -> None:
    ended = a_contract(valid_until="2020-01-01T00:00:00Z")
    assert "renew" in ask(an_owner(tmp_path, ended), a_config())[0]["reason"]
    request = read_request("round", facts_of(a_config(), ended), {}, 0, ended)
    assert isinstance(contract.decide(ended, request, now=1_500_000_000.0), contract.Admitted)


def test_only_listed_submitters_may_ask(tmp_path: Path) -> None:
    from fedveil.flower.request import signed

    secret, other = identity.new_identity(), identity.new_identity()
    agreed = a_contract(submitters=(identity.public_of(secret).hex(),))
    owner, config = an_owner(tmp_path, agreed), a_config()
    sent = {"weights": weights_of(config)}
    facts = json.loads(json.dumps(facts_of(config, agreed)))
    for told in (facts, signed(facts, sent, other)):
        assert "not signed by a submitter" in node.answer("round", told, sent, owner)[0]["reason"]
    good = signed(facts, sent, secret)
    assert node.answer("round", good, sent, owner)[0]["status"] == "ok"
    assert books.history(books.ledger_path(owner.home))[0]["submitter"] == identity.fingerprint(
        identity.public_of(secret)
    )
    # The signature covers the weights, too.
    moved = {"weights": sent["weights"] + np.float32(1)}
    assert "signature is not right" in node.answer("round", good, moved, owner)[0]["reason"]


def test_a_tracked_bound_from_the_server_stays_within_the_contract(tmp_path: Path) -> None:
    agreed = a_contract(recipes=(Allowed("quantile-clip", recipe_digest(get("quantile-clip"))),))
    owner, config = an_owner(tmp_path, agreed), a_config(recipe="quantile-clip")
    for bound in (1e-36, 0.4, 4.1, -1.0, float("nan"), float("inf")):
        said, _ = ask(owner, config, {"server.clip.bound": np.array([bound])})
        assert said["status"] == "refused" and "bound" in said["reason"]
    assert charged(owner) == 0
    assert ask(owner, config, {"server.clip.bound": np.array([1.0])})[0]["status"] == "ok"


def test_scales_from_the_server_stay_within_the_contract(tmp_path: Path) -> None:
    agreed = a_contract(recipes=(Allowed("adaclip", recipe_digest(get("adaclip"))),))
    owner, config = an_owner(tmp_path, agreed), a_config(recipe="adaclip")
    size = weights_of(config).size
    for bound, status in ((1e-6, "refused"), (0.4, "refused"), (1.0, "ok"), (4.1, "refused")):
        sent = {
            "server.clip.mean": np.zeros(size, np.float32),
            "server.clip.square": np.full(size, bound**2 / size, np.float32),
        }
        assert ask(owner, config, sent)[0]["status"] == status


def test_weights_from_the_server_are_bounded(tmp_path: Path) -> None:
    owner, config = an_owner(tmp_path), a_config()
    for value in (np.nan, np.inf, 1e9):
        sent = {"weights": np.full_like(weights_of(config), value)}
        assert node.answer("round", facts_of(config, a_contract()), sent, owner)[0]["status"] == "refused"
    assert charged(owner) == 0


def test_the_owners_unit_is_always_counted(tmp_path: Path) -> None:
    owner = an_owner(tmp_path, a_contract(unit="reported-weight"))
    assert "without a finite promise" in ask(owner, a_config())[0]["reason"]
    owner = an_owner(tmp_path, a_contract(observer="client-process"))
    assert "without a finite promise" in ask(owner, a_config())[0]["reason"]


def test_the_budget_ends_the_nodes_part_for_the_life_of_its_ledger(tmp_path: Path) -> None:
    owner = an_owner(tmp_path, a_contract(epsilon=4.0))
    answers = [ask(owner, a_config(protect={"sigma": 1.5}), run=f"run {n}")[0] for n in range(8)]
    statuses = [said["status"] for said in answers]
    assert "ok" in statuses and statuses[-1] == "refused" and "budget" in answers[-1]["reason"]
    assert charged(owner) == statuses.count("ok")
    # The server may have picked each round's noise after what it saw: what holds is the budget, not what was spent of it.
    told = Ledger.read(owner.home / "ledger.jsonl").table()
    sound = [(row.observer, row.unit, row.epsilon, row.accountant) for row in told if row.verdict == "sound"]
    assert sound == [("server", "example", 4.0, "filter")]


# --- one form of reply ---


def spoil(lines: list[str], how: str) -> None:
    if how == "unknown label":
        lines[5] = lines[5].rsplit(",", 1)[0] + ",plague"
    elif how == "no number":
        lines[7] = "7,forty-two,1,60,flu"
    elif how == "short":
        del lines[20:]
    elif how == "long":
        lines += [f"{n},50,1,60,flu" for n in range(100, 140)]
    elif how == "no column":
        lines[0] = "id,years,dose,weight,outcome"
    elif how == "one class":
        lines[1:] = [line.rsplit(",", 1)[0] + ",flu" for line in lines[1:]]


TROUBLES = ["unknown label", "no number", "short", "long", "no column", "one class", "gone", "folder", "binary", "out of memory",
            "diverges"]  # fmt: skip


@pytest.mark.parametrize("recipe", ["fed-cdp", "fed-sdp-client"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_with_the_data_changes_neither_the_form_of_a_reply_nor_the_charge(
    tmp_path: Path, trouble: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit: Any = "client" if recipe == "fed-sdp-client" else "example"
    agreed = a_contract(recipes=(Allowed(recipe, recipe_digest(get(recipe))),), unit=unit, epsilon=1e6)
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    good, bad = an_owner(tmp_path / "good", agreed), an_owner(tmp_path / "bad", agreed)
    config = a_config(recipe=recipe)
    path = Path(bad.data)
    a_table(path, edit=lambda lines: spoil(lines, trouble))
    if trouble in ("gone", "folder"):
        path.unlink()
    if trouble == "folder":
        path.mkdir()
    if trouble == "binary":
        path.write_bytes(os.urandom(500))
    one, first = ask(good, config)
    if trouble in ("out of memory", "diverges"):
        from fedveil.federation import loop

        def fail(*_: Any) -> Any:
            raise MemoryError
            yield

        whole = loop.train_cohort

        def diverge(*arguments: Any) -> Any:
            for chunk, result in whole(*arguments):
                yield (
                    chunk,
                    replace(result, finite=np.zeros(len(result.finite), bool), delta=result.delta * 0),
                )

        monkeypatch.setattr(loop, "train_cohort", fail if trouble == "out of memory" else diverge)
    two, second = ask(bad, config)
    assert one == two  # the facts, word for word
    assert {k: (v.dtype, v.shape) for k, v in first.items()} == {
        k: (v.dtype, v.shape) for k, v in second.items()
    }
    assert np.isfinite(second["update"]).all() and np.abs(second["update"]).min() > 0  # noise everywhere
    assert charged(good) == charged(bad) == 1
    rows = [node.ledger_of(owner.home).table() for owner in (good, bad)]
    assert rows[0] == rows[1] and any(row.verdict == "sound" for row in rows[1])


def test_a_question_about_one_record_gets_the_same_answer_either_way(tmp_path: Path) -> None:
    """The one positive row of 400, asked for in every way a server has: no answer differs, nothing free is learnt."""
    answers = []
    for positive in (False, True):
        folder = tmp_path / str(positive)
        folder.mkdir()
        agreed = a_contract(data=Data("outcome", ("healthy", "flu"), 400, COLUMNS), epsilon=1e6)
        word = "flu" if positive else "healthy"
        lines = [
            "age,dose,weight,outcome",
            *(f"{20 + n % 60},1,60,healthy" for n in range(399)),
            f"33,2,70,{word}",
        ]
        (folder / "patients.csv").write_text("\n".join(lines))
        owner = an_owner(folder, agreed)
        said: list[Any] = [node.answer("hello", facts_of(a_config(), agreed), {}, owner)]
        for change in (
            {},
            {"target": "age"},
            {"split_seed": 5},
            {"limit": 7},
            {"dataset": "cancer"},
            {"validation": 0.2},
        ):
            reply = ask(owner, a_config(**change))
            said.append((reply[0], {k: v.shape for k, v in reply[1].items()}))
        for classes in (2, 3, 10_000):
            said.append(ask(owner, a_config(), classes=classes)[0])
        answers.append((said, charged(owner)))
    assert answers[0] == answers[1]


def test_a_saturating_server_extracts_no_row(tmp_path: Path) -> None:
    """Tiny clip bounds are refused, and so is a first model of the server's own; later, at the contract's smallest bound and
    largest rate, updates point where the noise points.

    A row counts as found if a first-layer row of an update is parallel to it (cosine above 0.9999).
    """
    owner = an_owner(tmp_path, a_contract(epsilon=1e6))
    for bound in (1e-36, 1e-30, 1e-10, 1e-3, 0.49):
        assert ask(owner, a_config(protect={"clip.bound": bound}, batch_size=1.0))[0]["status"] == "refused"
    rows = owndata.read_rows(owner.data, a_contract().data or pytest.fail()).x
    found = 0
    for n in range(20):
        config = a_config(
            protect={"clip.bound": 0.5, "sigma": 1.0}, batch_size=1.0, learning_rate=0.5, local_steps=1
        )
        sent = {"weights": weights_of(config) * np.float32(100)}
        said, _ = node.answer("round", facts_of(config, a_contract(), run=str(n)), sent, owner)
        assert "first model" in said["reason"]
        said, arrays = node.answer("round", facts_of(config, a_contract(), run=str(n), round=1), sent, owner)
        assert said["status"] == "ok"
        first = arrays["update"][:12].reshape(4, 3).astype(np.float64)
        for line in first:
            cosine = rows @ line / (np.linalg.norm(rows, axis=1) * np.linalg.norm(line) + 1e-30)
            found += int((np.abs(cosine) > 0.9999).any())
    # A random direction in 3 dimensions is so near to a given one with probability 1e-4: 80 lines, 40 rows, 0.32 expected, more
    # than 5 with a chance of 1e-6.
    assert found <= 5


@pytest.mark.slow
def test_a_thousand_paired_tries_tell_nothing_by_form_or_size(tmp_path: Path) -> None:
    """A server guesses whether a node's data has trouble from everything but the values of the noised update: 1,000 pairs.

    With no difference in 1,000 pairs the chance of one is below 0.003 (95 %, rule of three). Times are printed, not judged.
    """
    draw, kinds = random.Random(1), [t for t in TROUBLES if t not in ("out of memory", "diverges", "folder")]
    agreed, config = a_contract(epsilon=None, recipes=a_contract().recipes), a_config()
    owners = {}
    for kind in ("none", *kinds):
        (tmp_path / kind).mkdir()
        owners[kind] = an_owner(tmp_path / kind, agreed)
        a_table(Path(owners[kind].data), edit=lambda lines, kind=kind: spoil(lines, kind))  # type: ignore[misc]
        if kind == "gone":
            os.unlink(owners[kind].data)
    different, times = 0, {"none": 0.0, "trouble": 0.0}
    for _ in range(1000):
        kind, seen = draw.choice(kinds), []
        for name in ("none", kind):
            begun = time.perf_counter()
            said, arrays = ask(owners[name], config)
            times["none" if name == "none" else "trouble"] += time.perf_counter() - begun
            seen.append(
                (
                    json.dumps(said),
                    len(wire.pack(said, arrays)),
                    [(k, v.dtype, v.shape) for k, v in arrays.items()],
                )
            )
        different += seen[0] != seen[1]
    print(f"different: {different} of 1000; seconds {times}")
    assert different == 0


def test_divergence_asked_for_by_the_server_costs_what_was_promised(tmp_path: Path) -> None:
    agreed = a_contract(
        bounds=Bounds(sigma=(1.0, 100.0), clip=(0.5, 4.0), learning_rate=(0.0, 1e3)), epsilon=1e6
    )
    owner = an_owner(tmp_path, agreed)
    for n in range(3):
        assert ask(owner, a_config(learning_rate=1e3, local_steps=20), run=str(n))[0]["status"] == "ok"
    assert all(
        row.verdict == "sound"
        for row in node.ledger_of(owner.home).table()
        if (row.observer, row.unit) == ("server", "example") and row.verdict != "nominal"
    )


# --- hello, log, anchor ---


def test_hello_says_what_the_contract_says_and_opens_nothing(tmp_path: Path) -> None:
    owner = an_owner(tmp_path)
    os.unlink(owner.data)
    said, arrays = node.answer("hello", facts_of(a_config(), a_contract()), {}, owner)
    assert not arrays and said["examples"] == ROWS
    assert set(said) == {"status", "client", "examples", "contract", "data", "version", "nonce"}


def test_the_log_is_private_limited_and_cannot_be_forged(tmp_path: Path) -> None:
    owner = an_owner(tmp_path)
    os.chmod(tmp_path, 0o755)
    evil = "x\n2026-01-01T00:00:00Z forged entry\x1b[2J"
    ask(owner, a_config(), run="r", **{evil: 1})
    ask(owner, a_config(), surprise="y" * 10**6)
    text = (owner.home / "node.log").read_text()
    assert len(text.splitlines()) == 2 and "\x1b" not in text and len(text) < 10_000
    assert stat.S_IMODE(owner.home.stat().st_mode) == 0o700
    for name in ("node.log", "audit.jsonl"):
        assert stat.S_IMODE((owner.home / name).stat().st_mode) == 0o600
    ask(owner, a_config())
    assert stat.S_IMODE((owner.home / "ledger.jsonl").stat().st_mode) == 0o600


def test_a_log_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOG_FILE", 10_000)
    for _ in range(100):
        books.log(tmp_path / "h", "z" * 5000)
    assert sum(item.stat().st_size for item in (tmp_path / "h").iterdir()) < 30_000


@pytest.mark.parametrize("loss", ["deleted", "emptied", "cut", "rolled back", "exchanged"])
def test_a_lost_or_rolled_back_ledger_is_noticed_and_nothing_is_trained(tmp_path: Path, loss: str) -> None:
    owner = an_owner(tmp_path)
    path = books.ledger_path(owner.home)
    ask(owner, a_config())
    old = path.read_bytes()
    ask(owner, a_config())
    if loss == "deleted":
        path.unlink()
    elif loss == "emptied":
        path.write_bytes(b"")
    elif loss == "cut":
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    elif loss == "rolled back":
        path.write_bytes(old)
    else:
        other = an_owner(tmp_path / "x") if (tmp_path / "x").mkdir() is None else owner
        for _ in range(3):
            ask(other, a_config(), run="another")
        path.write_bytes(books.ledger_path(other.home).read_bytes())
    before = path.read_bytes() if path.exists() else None
    said, arrays = ask(owner, a_config())
    assert said["status"] == "refused" and "needs its owner" in said["reason"] and not arrays
    assert str(path) in (owner.home / "node.log").read_text()
    assert (path.read_bytes() if path.exists() else None) == before  # nothing is started over
    assert len(books.forget(owner)) == 2  # the documented way on
    if loss != "exchanged":
        assert ask(owner, a_config())[0]["status"] == "ok"


def test_a_crash_between_ledger_and_anchor_is_no_loss(tmp_path: Path) -> None:
    owner = an_owner(tmp_path)
    ask(owner, a_config())
    anchor = books.anchor_path(owner).read_bytes()
    ask(owner, a_config())
    books.anchor_path(owner).write_bytes(anchor)
    assert ask(owner, a_config())[0]["status"] == "ok"
    assert charged(owner) == 3


def test_an_empty_file_left_by_a_crash_at_creation_is_started_anew(tmp_path: Path) -> None:
    owner = an_owner(tmp_path)
    owner.home.mkdir()
    books.ledger_path(owner.home).write_bytes(b"")
    assert ask(owner, a_config())[0]["status"] == "ok"


# --- rows ---


def test_labels_follow_the_contracts_names_not_the_files_order(tmp_path: Path) -> None:
    data = Data("outcome", ("flu", "healthy"), 2, (("age", 0.0, 100.0),))
    for name, text in (
        ("a.csv", "age,outcome\n10,healthy\n20,flu\n"),
        ("b.csv", "outcome,age,x\nhealthy,10,\nflu,20,\n"),
    ):
        (tmp_path / name).write_text(text)
        found = owndata.read_rows(tmp_path / name, data)
        assert found.y.tolist() == [1, 0] and not found.broken.any()
        assert np.allclose(found.x[:, 0], [-0.8, -0.6])


def test_a_node_that_lacks_a_class_takes_part(tmp_path: Path) -> None:
    owner = an_owner(tmp_path, a_contract(data=Data("outcome", ("healthy", "flu", "cold"), ROWS, COLUMNS)))
    said, _ = ask(owner, a_config(), classes=3, **{})
    assert said["status"] == "refused"  # these weights are for two classes
    weights = flatten(nets.build("papers-mlp", (3,), 3, 0, hidden=[4]))
    facts = facts_of(a_config(), contract_of(owner), classes=3)
    assert node.answer("round", facts, {"weights": weights}, owner)[0]["status"] == "ok"


def test_every_record_decides_one_row_at_most(tmp_path: Path) -> None:
    data = a_contract().data
    assert data is not None
    a_table(tmp_path / "a.csv")
    a_table(tmp_path / "b.csv", edit=lambda lines: spoil(lines, "no number"))
    one, two = (owndata.exactly(owndata.read_rows(tmp_path / n, data), data) for n in ("a.csv", "b.csv"))
    assert (one[0] != two[0]).any(axis=1).sum() <= 1 and (one[1] != two[1]).sum() <= 1
    assert any(
        "cannot be read" in text
        for text in owndata.complaints(owndata.read_rows(tmp_path / "b.csv", data), data)
    )


def test_arrays_are_cut_off_at_the_contracts_range(tmp_path: Path) -> None:
    data = Data("", ("0", "1"), 3, shape=(2, 2), range=(0.0, 1.0))
    x = np.array([[[0, 5], [1, np.nan]], [[-3, 0], [0, 0]], [[0.5, 0], [0, 0]]])
    np.savez(tmp_path / "a.npz", x=x, y=np.array([0, 1, 9]))
    found = owndata.read_rows(tmp_path / "a.npz", data)
    assert found.broken.tolist() == [True, False, True] and found.x.max() <= 1 and found.x.min() >= 0


def test_a_refusal_is_a_value(tmp_path: Path) -> None:
    config = a_config(learning_rate=0.6)
    request = read_request("round", facts_of(config, a_contract()), {}, 0, a_contract())
    assert isinstance(contract.decide(a_contract(), request), Refused)


# --- models that the server sends ---

WIDE = {"hidden": [64]}


def a_careful_contract(**more: Any) -> Contract:
    net = nets.build("papers-mlp", (3,), 2, 0, **WIDE)
    known = Model("papers-mlp", '{"hidden":[64]}', architecture=architecture_digest(net, layout_of(net)))
    return a_contract(models=(known,), checks=Checks(structure=True, change=True), **more)


def a_wide_config(**more: Any) -> RunConfig:
    return a_config(model_options=WIDE, protect={"sigma": 6.0, "clip.bound": 0.5}, **more)


def test_checks_are_read_back_and_contracts_without_them_keep_their_digest(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    contract.write_contract(path, a_careful_contract())
    assert contract.read_contract(path) == a_careful_contract()
    assert "checks" not in contract.to_json(a_contract()) and "architecture" not in json.dumps(
        contract.to_json(a_contract())
    )
    text = path.read_text().replace("structure = true", 'structure = "yes"')
    path.write_text(text)
    with pytest.raises(UserError, match="structure"):
        contract.read_contract(path)


def sent_by_a_malicious_server(name: str, weights: np.ndarray) -> np.ndarray:
    net = nets.build("papers-mlp", (3,), 2, 0, **WIDE)
    layout, public = layout_of(net), np.random.default_rng(0).uniform(-1, 1, (500, 3)).astype(np.float32)
    made = {
        "imprint": lambda: models.imprint(weights, layout, public),
        "dead": lambda: models.dead(weights, layout),
        "far away": lambda: weights + np.float32(50),
    }
    return made[name]().astype(np.float32)


@pytest.mark.parametrize("name", ["imprint", "dead", "far away"])
@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_malicious_model_is_refused_uncharged_whatever_round_it_comes_in(
    tmp_path: Path, name: str, number: int
) -> None:
    owner, config = an_owner(tmp_path, a_careful_contract()), a_wide_config()
    os.unlink(owner.data)  # the decision must not need it
    sent = sent_by_a_malicious_server(name, weights_of(config))
    said, arrays = ask(owner, config, {"weights": sent}, round=number)
    assert said["status"] == "refused" and not arrays and said["reason"].startswith("contract: ")
    assert charged(owner) == 0


def test_honest_rounds_pass_the_checks_and_a_later_jump_does_not(tmp_path: Path) -> None:
    owner, config = an_owner(tmp_path, a_careful_contract(epsilon=500.0)), a_wide_config()
    weights = weights_of(config)
    for number in range(4):
        said, arrays = ask(owner, config, {"weights": weights}, round=number)
        assert said["status"] == "ok", said
        honest, weights = weights, weights + arrays["update"]
    spent = charged(owner)
    jump = np.random.default_rng(1).normal(size=weights.size).astype(np.float32)
    said, _ = ask(owner, config, {"weights": weights + 5 * jump}, round=4)
    assert said["status"] == "refused" and "honest averaging" in said["reason"] and charged(owner) == spent
    # A server that was continued from an earlier round is no attacker.
    assert ask(owner, config, {"weights": honest}, round=3)[0]["status"] == "ok"
    files = list((owner.home / "models").glob("*.npz"))
    assert len(files) == 1 and stat.S_IMODE(files[0].stat().st_mode) == 0o600


def test_another_net_than_the_agreed_one_is_refused(tmp_path: Path) -> None:
    net = nets.build("papers-mlp", (3,), 2, 0, hidden=[65])
    other = Model("papers-mlp", '{"hidden":[64]}', architecture=architecture_digest(net, layout_of(net)))
    owner = an_owner(tmp_path, a_contract(models=(other,)))
    said, _ = ask(owner, a_wide_config())
    assert "another net" in said["reason"] and charged(owner) == 0


def test_checks_do_not_lower_what_a_round_costs(tmp_path: Path) -> None:
    spent = []
    for checks in (Checks(), Checks(structure=True, change=True)):
        folder = tmp_path / str(checks.change)
        folder.mkdir()
        owner = an_owner(folder, replace(a_careful_contract(), checks=checks))
        assert ask(owner, a_wide_config())[0]["status"] == "ok"
        spent.append(node.ledger_of(owner.home).epsilon("server", "example", 1e-5))
    assert spent[0] == spent[1] and spent[0] is not None


def test_a_run_that_is_remembered_wrongly_is_counted_from_the_agreed_first_model(tmp_path: Path) -> None:
    owner, config = an_owner(tmp_path, a_careful_contract()), a_wide_config()
    assert ask(owner, config)[0]["status"] == "ok"
    (kept,) = (owner.home / "models").glob("*.npz")
    kept.write_bytes(b"no model")
    assert ask(owner, config, round=1)[0]["status"] == "ok"


@pytest.mark.parametrize("recipe", ["fed-cdp-example", "fed-cdp-sound", "fed-cdp-mean"])
def test_noise_does_not_vanish_with_the_examples_when_training_fails(recipe):
    """False-alarm rate below 1e-9 at a fixed seed: the deviation of thousands of values, within 10%."""
    prepared = prepare(make_config({"recipe": recipe, "dataset": "digits", "clients": 4, "local_steps": 2, "batch_size": 8}))
    state = start(prepared.task, prepared.initial)
    now = moment_of(prepared.task, state)
    size = prepared.partition.size(0)
    plan, steps = plan_of(prepared.task, now, 0, size), noised_of(prepared.task, now, 0, size)
    expected = plan.learning_rate / plan.expected_batch * sum(one.deviation**2 for one in steps) ** 0.5
    assert node.noise_alone(prepared, state, now, 0).update.std() == pytest.approx(expected, rel=0.1)
