"""Losses: every engine agrees with the reference, an own loss sees one example, and no promise depends on which one it is."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import build, everything, mlp, plan, train, works
from torch import nn

import fedveil as fv
from fedveil.errors import UserError
from fedveil.federation.config import load_config, make_config
from fedveil.federation.loop import check_recipe, config_hash
from fedveil.federation.store import open_run, refuse_named_code
from fedveil.training import losses, pool, reference
from fedveil.training.torch import functional, graph, stacked, trace

HERE = __name__
CLASSES = ["label-smoothing:share=0.2", "binary-cross-entropy", f"{HERE}:focal", f"{HERE}:branching"]
VALUES = ["huber:width=0.3", f"{HERE}:pinball"]


def focal(outputs, targets):
    logs = torch.log_softmax(outputs, 1).gather(1, targets[:, None])
    return (-((1 - logs.exp()) ** 2) * logs).sum()


def branching(outputs, targets):
    """Python that looks at numbers: the graph engine cannot write it down."""
    value = nn.functional.cross_entropy(outputs, targets)
    return 3 * value if int(targets) == 1 else value


def pinball(outputs, targets):
    gap = targets - outputs[:, 0]
    return torch.maximum(0.9 * gap, -0.1 * gap)


def coupled(outputs, targets):
    """Pushes the examples of a batch apart, if it were given one."""
    return nn.functional.cross_entropy(outputs, targets) - 5 * (outputs - outputs.mean(0, keepdim=True)).square().sum()


SEEN: list[torch.Tensor] = []


def remembering(outputs, targets):
    SEEN.append(outputs.detach().clone())
    return nn.functional.cross_entropy(outputs, targets) + (outputs * SEEN[max(0, len(SEEN) - 2)]).sum()


def random(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets) * torch.rand(())


def constant(outputs, targets):
    return torch.ones(())


def two(outputs, targets):
    return torch.stack([outputs.sum(), outputs.sum()])


def broken(outputs, targets):
    raise ValueError("no")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.two(x + torch.tanh(self.one(x)))


def cases(loss: str):
    return mlp(3 if loss in CLASSES else None)


@pytest.mark.filterwarnings("ignore:Engine. torch.func")
@pytest.mark.parametrize("loss", [*CLASSES, *VALUES])
@pytest.mark.parametrize("engine", [stacked, graph, functional])
@pytest.mark.parametrize("clip", ["flat", "layer", "none"])
def test_one_step_of_every_engine_is_the_references(engine, loss, clip):
    case = cases(loss)
    what = plan(1, loss=loss, clip=clip, noise="none" if clip == "none" else "gaussian")
    work = works(case, 3, 1, poisson=True)
    if engine is graph and loss == CLASSES[3]:  # by the value of a number: no trace follows it
        with pytest.raises(UserError, match="cannot be written down"):
            train(engine, case, work, what)
        return
    found, wanted = (train(e, case, work, what) for e in (engine, reference))
    assert np.abs(found.delta - wanted.delta).max() < 1e-5 and np.abs(wanted.delta).max() > 1e-3
    assert np.allclose(found.loss, wanted.loss, atol=1e-5) and np.allclose(found.norm_mean, wanted.norm_mean, atol=1e-5)


def test_the_noise_does_not_depend_on_the_loss():
    case, work = everything(), works(everything(), 2, 1)
    without = {e: [train(e, case, work, plan(1, loss=loss, clip="flat")).delta for loss in (CLASSES[0], "cross-entropy")]
               for e in (stacked, reference)}  # fmt: skip
    noised = {e: [train(e, case, work, plan(1, loss=loss, clip="flat", noise="gaussian")).delta
                  for loss in (CLASSES[0], "cross-entropy")] for e in (stacked, reference)}  # fmt: skip
    for engine in without:
        one, other = (noised[engine][i] - without[engine][i] for i in range(2))
        assert np.abs(one).max() > 0.001 and np.allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("loss", CLASSES[:2])
def test_built_in_losses_are_torchs(loss):
    out, y = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 1, 2, 2])
    values = [losses.of_one(loss)(out[i : i + 1], y[i : i + 1]) for i in range(5)]
    theirs = (
        nn.functional.cross_entropy(out, y, label_smoothing=0.2, reduction="none")
        if loss.startswith("label")
        else nn.functional.binary_cross_entropy_with_logits(out, nn.functional.one_hot(y, 4).double(), reduction="none").mean(1)
    )
    (slope,) = torch.autograd.grad(theirs.sum(), out)
    found, gradient = losses.of_batch(out.detach(), y, None, loss)
    assert torch.allclose(torch.stack(values), theirs) and torch.allclose(found, theirs) and torch.allclose(gradient, slope)


@pytest.mark.filterwarnings("ignore:Engine. torch.func")
@pytest.mark.parametrize("engine", [stacked, graph, functional, reference])
def test_a_loss_that_would_couple_a_batch_cannot(engine):
    """Alone or among others, an example's clipped gradient is the same: bit for bit where the engine promises bits."""
    case = mlp()
    what = plan(1, loss=f"{HERE}:coupled", clip="flat", only_sum=True, learning_rate=1.0, expected_batch=1.0)
    (work,) = works(case, 1, 1, batch=3)
    alone = []
    for row in work.rows[0]:
        single = replace(work, rows=np.array([[row]], np.int32))
        alone.append(train(engine, case, [single], what).delta[0].astype(np.float64))
    together = train(engine, case, [work], what).delta[0]
    assert np.abs(together - np.sum(alone, 0)).max() < 1e-6 and np.abs(together).max() > 0.01


def scale_up(outputs, targets):
    return 1e6 * nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize("engine", [stacked, graph, functional, reference])
def test_an_example_adds_at_most_the_bound_whatever_the_loss(engine):
    case = mlp()
    what = replace(
        plan(1, loss=f"{HERE}:scale_up", clip="flat", learning_rate=1.0, expected_batch=1.0), only_sum=True, bounds=(0.5,)
    )
    (work,) = works(case, 1, 1, batch=1)
    assert np.linalg.norm(train(engine, case, [work], what).delta[0].astype(np.float64)) <= 0.5


def test_native_hands_over_with_the_reason():
    net = mlp().module
    for loss in (CLASSES[0], CLASSES[2]):
        name, told = pool.choose(net, plan(1, loss=loss))
        assert name == "stacked" and ("not loss = " in told or "not installed" in told)
        with pytest.raises(UserError, match="native"):
            pool.choose(net, plan(1, loss=loss), "native")


def test_a_residual_net_with_an_own_loss_is_traced():
    case = build(Residual, (7,), 3)
    what = plan(1, loss=f"{HERE}:focal", clip="flat")
    assert pool.choose(case.module, what)[0] == "graph"
    work = works(case, 2, 1)
    assert np.abs(train(graph, case, work, what).delta - train(reference, case, work, what).delta).max() < 1e-5


def test_workers_find_an_own_loss_by_its_name():
    case, what = mlp(), plan(1, loss="torch.nn.functional:cross_entropy", clip="flat")
    work = works(case, 4, 1)
    one, two_of = (pool.train(case.module, case.start, case.x, case.y, work, what, engine="stacked", workers=n, chunk=2)
                   for n in (1, 2))  # fmt: skip
    assert np.array_equal(one.delta, two_of.delta)


@pytest.mark.parametrize(
    ("name", "said"),
    [("remembering", "remembers"), ("random", "random"), ("constant", "does not move"), ("two", "one floating-point number"),
     ("broken", "ValueError: no"), ("nothing", "no 'nothing'")],
)  # fmt: skip
def test_an_own_loss_that_cannot_be_used_is_refused(name, said):
    SEEN.clear()
    with pytest.raises(UserError, match=said):
        losses.check_own(f"{HERE}:{name}", 3, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [("hubris", "huber"), ("huber:delta=1", "huber:width"), ("huber:width=-1", "above 0"), ("label-smoothing:share=1", "below 1"),
     ("squared", "classes"), ("cross-entropy:x=1", "alone")],
)  # fmt: skip
def test_wrong_names_are_refused_with_what_to_write(text, said):
    with pytest.raises(UserError, match=said):
        fv.run("fed-cdp-sound", data="digits", loss=text, rounds=1, local_steps=1, clients=2)


def test_a_run_takes_a_function_and_promises_the_same(tmp_path):
    quick = {"data": "digits", "rounds": 1, "local_steps": 2, "clients": 4, "report": False}
    plain = fv.run("fed-cdp-sound", out=tmp_path / "plain", **quick)
    own = fv.run("fed-cdp-sound", out=tmp_path / "own", loss=focal, **quick)
    (note,) = [note for note in json.loads((tmp_path / "own" / "run.json").read_text())["notes"] if "own code" in note]
    assert ":focal" in note and "no proof" in note
    assert "own code" not in (tmp_path / "plain" / "run.json").read_text()
    assert own.epsilon() == plain.epsilon() is not None
    assert any(not torch.equal(*pair) for pair in zip(own.state_dict().values(), plain.state_dict().values(), strict=True))
    assert open_run(tmp_path / "own").config.loss == f"{HERE}:focal"
    with pytest.raises(UserError, match="top of a module"):
        fv.run("fed-cdp-sound", loss=lambda outputs, targets: outputs.sum(), **quick)


def test_regression_with_huber_is_measured_as_before(tmp_path):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 3)).astype(np.float32)
    own = fv.dataset(x[:40], x[:40].sum(1), x[40:], x[40:].sum(1))
    few = {"rounds": 3, "clients": 2, "local_steps": 20, "partition": "iid"}
    result = fv.run("non-private", data=own, loss="huber", out=tmp_path / "r", **few)
    assert result.accuracy is None and result.facts["test_rmse"] < 1


def test_code_in_a_configuration_needs_trust():
    config = load_config("fed-cdp-sound", {"loss": "torch.nn.functional:cross_entropy"})
    with pytest.raises(UserError, match="trust-code"):
        refuse_named_code(config, False)
    refuse_named_code(config, True)
    refuse_named_code(load_config("fed-cdp-sound", {"loss": "huber:width=2"}), False)


def test_a_runs_identity_holds_the_files_of_its_loss(tmp_path, monkeypatch):
    package = tmp_path / "lossy_package.py"
    package.write_text("import torch\ndef loss(o, t):\n    return torch.nn.functional.cross_entropy(o, t)\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = make_config({"recipe": "fed-cdp-sound"}, {"dataset": "digits", "loss": "lossy_package:loss", "clients": 3,
                                                       "rounds": 2, "local_steps": 1})  # fmt: skip
    before = config_hash(config)
    assert before != config_hash(config.model_copy(update={"loss": "auto"}))
    quick = {"data": "digits", "rounds": 1, "local_steps": 1, "clients": 3, "report": False, "out": tmp_path / "run"}
    fv.run("fed-cdp-sound", loss="lossy_package:loss", **quick)
    fv.run("fed-cdp-sound", loss="lossy_package:loss", resume=True, **quick)
    check_recipe(open_run(tmp_path / "run"))
    package.write_text(package.read_text().replace("(o, t)\n", "(o, t) * 1e6\n"))
    assert config_hash(config) != before
    with pytest.raises(UserError, match="files of the loss"):
        fv.run("fed-cdp-sound", loss="lossy_package:loss", resume=True, **quick)
    with pytest.raises(UserError, match="the loss 'lossy_package:loss' is not the one"):
        check_recipe(open_run(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["loss"] == "lossy_package:loss"


def test_gradient_attacks_say_what_they_match(tmp_path):
    result = fv.run("non-private", data="digits", loss="label-smoothing", rounds=1, local_steps=1, clients=3, out=tmp_path / "r")
    with pytest.raises(UserError, match="cross-entropy"):
        fv.attack(result, kind="gradient")


def test_a_function_that_is_defined_anew_under_its_name_is_traced_anew(monkeypatch):
    """A notebook's next cell: the graph engine keeps programs, but not those of the function before."""
    module = types.ModuleType("some_cells")
    monkeypatch.setitem(sys.modules, "some_cells", module)
    x, y, net = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0]), torch.nn.Linear(4, 2)
    found = []
    for factor in (1.0, 3.0):
        module.of = lambda out, target, times=factor: times * torch.nn.functional.cross_entropy(out, target)
        program = trace.program(net, x, y, "some_cells:of")
        found.append(program.gradients([p.detach() for p in net.parameters()], [], [], x, y)[1][0])
    assert torch.allclose(3 * found[0], found[1])
