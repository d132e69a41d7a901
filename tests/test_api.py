"""The public API: bring data, pick a recipe, run, read the ledger, continue, export; protect a central loop."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.errors import UserError


def blobs(seed=0, n=240):
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 2, n)
    x = (draw.normal(size=(n, 6)) + 2 * y[:, None]).astype(np.float32)
    return x[:160], y[:160], x[160:], y[160:]


def net():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def test_importing_the_package_does_not_load_torch():
    code = "import sys, fedveil, fedveil.privacy.accountants; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_run_waits_for_no_module_that_it_does_not_need(tmp_path):
    """Each of them takes half a second or more, of every run and every command."""
    slow = ["torch._dynamo", "sympy", "scipy.stats", "scipy.signal", "matplotlib.pyplot", "sklearn"]
    code = (
        "import sys, numpy as np, fedveil as fv; x = np.random.default_rng(0).normal(size=(300, 6)); "
        "y = (x[:, 0] > 0).astype(int); data = fv.dataset(x[:200], y[:200], x[200:], y[200:]); "
        "fv.run('sum-cdp', out=sys.argv[1], data=data, clients=4, rounds=1, local_steps=1, report=False); "
        f"print([name for name in {slow!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr


def test_run_own_data_and_model_with_a_callback(tmp_path):
    seen = []
    result = fv.run(
        "fed-cdp-sound",
        data=fv.dataset(*blobs()),
        model=net(),
        clients=4,
        partition="iid",
        rounds=3,
        local_steps=4,
        batch_size=10,
        sigma=0.5,
        clip_bound=1.0,
        learning_rate=0.5,
        out=tmp_path / "run",
        on_round=lambda f: seen.append(f.round),
    )
    assert seen == [1, 2, 3]
    assert result.epsilon("server", "example") > 0
    assert result.epsilon("server", "example", "nominal") is None
    x_test, y_test = blobs()[2:]
    predicted = result.module(torch.as_tensor(x_test)).argmax(1).numpy()
    assert (predicted == y_test).mean() == pytest.approx(result.accuracy)
    assert set(result.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_recipe_value_is_run_as_it_is(tmp_path):
    recipe = fv.recipe("fed-cdp", sigma="linear:3:2", **{"clip.kind": "flat"})
    result = fv.run(
        recipe,
        data=fv.dataset(*blobs()),
        model=net(),
        clients=2,
        partition="iid",
        rounds=2,
        local_steps=2,
        out=tmp_path / "r",
    )
    config = fv.open_run(tmp_path / "r").config
    assert config.built_recipe() == recipe
    assert result.facts["rounds"] == 2


def test_resume_continues_with_own_data(tmp_path):
    class Stop(Exception):
        pass

    def stop(facts):
        if facts.round == 2:
            raise Stop

    settings = {"clients": 2, "partition": "iid", "rounds": 4, "local_steps": 2, "checkpoint_every": 1}
    whole = fv.run("fed-cdp", data=fv.dataset(*blobs()), model=_seeded(), out=tmp_path / "whole", **settings)
    with pytest.raises(Stop):
        fv.run(
            "fed-cdp",
            data=fv.dataset(*blobs()),
            model=_seeded(),
            out=tmp_path / "cut",
            on_round=stop,
            **settings,
        )
    again = fv.resume(tmp_path / "cut", data=fv.dataset(*blobs()), model=_seeded())
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


def _seeded():
    torch.manual_seed(0)
    return net()


def test_protect_still_trains_one_module_and_names_its_successor(tmp_path):
    with pytest.warns(DeprecationWarning, match="make_private"):
        result = fv.protect(
            net(), *blobs(), recipe="dp-dynsigma", steps=20, batch_size=32, learning_rate=0.5, out=tmp_path / "run"
        )
    assert result.facts["rounds"] == 10
    assert result.epsilon("public", "example") > 0


def test_own_arrays_are_checked():
    x, y, x_test, y_test = blobs()
    with pytest.raises(fv.UserError, match="labels"):
        fv.dataset(x, y[:-1], x_test, y_test)
    x = x.copy()
    x[7, 0] = np.nan
    with pytest.raises(fv.UserError, match="7"):
        fv.dataset(x, y, x_test, y_test)


def test_the_type_of_public_labels_alone_decides_the_task_of_own_arrays():
    x, y = np.zeros((12, 3), np.float32), [0, 1] * 6
    assert fv.dataset(x, y, x, y).task == "classification"
    with pytest.raises(UserError, match="y_test holds whole numbers"):
        fv.dataset(x, [0.5, *y[1:]], x, y)
    assert fv.dataset(x, y, x[:2], [0.5, 1]).task == fv.dataset(x, [0.5, *y[1:]], x[:2], [0.5, 1]).task == "regression"


def test_classes_of_own_arrays_are_given_or_shown_by_public_rows_or_nothing_is_promised(tmp_path):
    x, y, few = np.zeros((12, 3), np.float32), np.arange(12) % 3, np.array([0, 1])
    assert fv.dataset(x, y, x[:2], few, classes=4).notes == () and fv.dataset(x, y, x, y).notes == ()
    with pytest.raises(UserError, match="classes = 2"):
        fv.dataset(x, y, x[:2], few, classes=2)
    counted = fv.dataset(x, y, x[:2], few)
    assert counted.classes == 3 and counted.notes[0].startswith("private:")
    told = fv.run("fed-cdp-sound", data=counted, clients=2, rounds=1, local_steps=1, batch_size=2, out=tmp_path / "run",
                  report=False)  # fmt: skip
    server = [row for row in told.ledger if row["observer"] == "server"]
    assert server and all(row["verdict"] == "none" and "number of classes" in row["reason"] for row in server)


def test_a_result_predicts_evaluates_reports_and_shows_itself_shortly(tmp_path):
    x, y, x_test, y_test = blobs()
    data = fv.dataset(x, y, x_test, y_test)
    small = {"clients": 2, "rounds": 2, "local_steps": 2, "batch_size": 8, "report": False}
    result = fv.run("fed-cdp-sound", data=data, out=tmp_path / "a", **small)
    guess = result.predict(x_test)
    assert guess.shape == y_test.shape
    assert result.evaluate(x_test, y_test)["accuracy"] == pytest.approx(np.mean(guess == y_test)) == result.accuracy
    assert len(repr(result)) < 250 and "fed-cdp-sound" in repr(result) and "<table>" in result._repr_html_()
    assert result.report(tmp_path / "page.html").read_text("utf-8").startswith("<!doctype html")
    with pytest.raises(fv.UserError, match="resume=True") as wrong:
        fv.run("fed-cdp-sound", data=data, clients=2, rounds=2, out=tmp_path / "a")
    assert "--" not in str(wrong.value)


def test_runs_are_opened_planned_attacked_and_audited_from_python(tmp_path, capsys):
    small = {"clients": 2, "rounds": 2, "local_steps": 1, "batch_size": 16, "report": False, "out": tmp_path / "a"}
    result = fv.run("fed-cdp-sound", data="cancer", model="papers-mlp", progress=True, **small)
    assert "round 2/2" in capsys.readouterr().err
    run = fv.open_run(tmp_path / "a")
    for one, other in zip(run.module.state_dict().values(), result.module.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert "2 rounds" in repr(run)
    found = fv.attack(result, "malicious")
    assert found["kind"] == "malicious" and (tmp_path / "a" / "attacks" / "malicious.json").exists()
    assert fv.audit(result, canaries=60)["kind"] == "audit"
    with pytest.raises(fv.UserError, match="victims"):
        fv.attack(result, victim=3)
    assert fv.plan(2.0, clients=20, examples=20000, kind="table").epsilon <= 2.0
