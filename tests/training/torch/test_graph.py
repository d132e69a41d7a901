"""The graph engine: every kind of layer and of wiring against the reference, frozen parts, dropout, and its refusals."""

import numpy as np
import pytest
import torch
from engine_cases import planned
from torch import nn
from torch.nn import functional as F

from fedveil.errors import UserError
from fedveil.models.layout import flatten, layout_of, unflatten
from fedveil.models.minilm import MiniLM
from fedveil.models.nets import resnet18_gn
from fedveil.models.surgery import lora, replace_batch_norm
from fedveil.protect import noise
from fedveil.training import native, pool
from fedveil.training.contract import ClientWork, LocalPlan
from fedveil.training.torch import graph


class Wired(nn.Module):
    """A module from a dictionary of parts and a forward function."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def _shared(m, x):
    return m.out(torch.tanh(m.same(torch.tanh(m.same(x)))))


def tied() -> nn.Module:
    net = Wired(lambda m, x: m.out(m.table(x.long()).mean(1)), table=nn.Embedding(9, 4), out=nn.Linear(4, 9, bias=False))
    net.out.weight = net.table.weight
    return net


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 5, 8) * 0.1)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.places
        return self.out(self.block(x)[:, 0])


def frozen_norm() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    net[1].running_mean += 0.3
    for parameter in net[:2].parameters():
        parameter.requires_grad_(False)
    net[1].eval()
    return net


IMAGE, ROW, SERIES, TOKENS = (2, 6, 6), (7,), (4, 8), (5,)
CASES = {
    "residual": (IMAGE, lambda: Wired(
        lambda m, x: m.out((F.relu(m.a(x) + m.b(x))).mean((2, 3))), a=nn.Conv2d(2, 4, 3, padding=1),
        b=nn.Conv2d(2, 4, 1, bias=False), out=nn.Linear(4, 3))),
    "concatenation": (ROW, lambda: Wired(
        lambda m, x: m.out(torch.cat([m.a(x), torch.sin(m.b(x)), x], 1)), a=nn.Linear(7, 4), b=nn.Linear(7, 2),
        out=nn.Linear(13, 3))),
    "views": (IMAGE, lambda: Wired(
        lambda m, x: m.out(m.a(x.view(len(x), 2, 36)).transpose(1, 2).reshape(len(x), -1)), a=nn.Linear(36, 5),
        out=nn.Linear(10, 3))),
    "group norm": (IMAGE, lambda: Wired(
        lambda m, x: m.out(F.silu(m.n(m.a(x))).flatten(1)), a=nn.Conv2d(2, 4, 3), n=nn.GroupNorm(2, 4),
        out=nn.Linear(64, 3))),
    "layer norm on a series": (SERIES, lambda: Wired(
        lambda m, x: m.out(F.gelu(m.n(m.a(x)))).mean(1), a=nn.Linear(8, 6), n=nn.LayerNorm(6), out=nn.Linear(6, 3))),
    "rms norm": (SERIES, lambda: Wired(
        lambda m, x: m.out(m.n(m.a(x))).mean(1), a=nn.Linear(8, 6), n=nn.RMSNorm(6), out=nn.Linear(6, 3))),
    "embedding": (TOKENS, lambda: Wired(
        lambda m, x: m.out(m.e(x.long()).mean(1)), e=nn.Embedding(9, 4, padding_idx=0), out=nn.Linear(4, 3))),
    "tied embedding": (TOKENS, tied),
    "attention": (SERIES, Encoder),
    "cross attention": (SERIES, lambda: Wired(
        lambda m, x: m.out(m.a(x, x[:, :2], x[:, :2])[0].mean(1)), a=nn.MultiheadAttention(8, 2, batch_first=True),
        out=nn.Linear(8, 3))),
    "depth-wise": (IMAGE, lambda: Wired(
        lambda m, x: m.out(F.hardswish(m.p(m.d(x))).mean((2, 3))), d=nn.Conv2d(2, 4, 3, 2, 1, groups=2),
        p=nn.Conv2d(4, 6, 1), out=nn.Linear(6, 3))),
    "convolution in time": (SERIES, lambda: Wired(
        lambda m, x: m.out(m.c(x).mean(2)), c=nn.Conv1d(4, 6, 3, padding=1), out=nn.Linear(6, 3))),
    "odd padding": (IMAGE, lambda: Wired(
        lambda m, x: m.out(m.c(m.b(x)).mean((2, 3))), b=nn.Conv2d(2, 3, 2, padding="same"),
        c=nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect", dilation=1), out=nn.Linear(4, 3))),
    "adaptive pooling, in place": (IMAGE, lambda: nn.Sequential(
        Wired(lambda m, x: m.r(m.c(x)), c=nn.Conv2d(2, 4, 3), r=nn.ReLU(inplace=True)), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(16, 3))),
    "lstm": (SERIES, lambda: Wired(
        lambda m, x: m.out(m.r(x)[0][:, -1]), r=nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True),
        out=nn.Linear(10, 3))),
    "gru": (SERIES, lambda: Wired(
        lambda m, x: m.out(m.r(x)[1][-1]), r=nn.GRU(8, 5, batch_first=True), out=nn.Linear(5, 3))),
    "shared": (ROW, lambda: Wired(_shared, same=nn.Linear(7, 7), out=nn.Linear(7, 3))),
    "bare parameter": (SERIES, lambda: Wired(
        lambda m, x: m.out(x * m.scale).mean(1), scale=nn.Parameter(torch.ones(8)), out=nn.Linear(8, 3))),
    "frozen batch norm": (IMAGE, frozen_norm),
    "dropout": (ROW, lambda: Wired(
        lambda m, x: m.out(m.d(F.relu(m.a(x)))), a=nn.Linear(7, 9), d=nn.Dropout(0.5), out=nn.Linear(9, 3))),
    "lora": (SERIES, lambda: lora(Encoder(), 2, layers="linear", also=("out",))),
    "branch by data": (ROW, lambda: Wired(
        lambda m, x: m.out(m.a(x) if x.shape[0] > 0 else x), a=nn.Linear(7, 7), out=nn.Linear(7, 3))),
    "small bert": (TOKENS, lambda: MiniLM(12, 8, 2, 2, 16, 8, classes=3)),
}  # fmt: skip


def case(name: str):
    shape, make = CASES[name]
    torch.manual_seed(3)
    module = make()
    draw = np.random.default_rng(1)
    x = draw.integers(0, 9, (20, *shape)) if shape is TOKENS else draw.normal(size=(20, *shape))
    return module, x.astype(np.float32), draw.integers(0, 3, 20)


def works(steps: int = 1, clients: int = 2, batch: int = 6) -> list[ClientWork]:
    draw = np.random.default_rng(2)
    rows = [np.stack([draw.permutation(20)[:batch] for _ in range(steps)]).astype(np.int32) for _ in range(clients)]
    return [ClientWork(k, rows[k], bytes([k + 1]) * 16) for k in range(clients)]


def plan(steps: int = 1, **more) -> LocalPlan:
    basis = {"clip": "flat", "bounds": (0.3,) * steps, "noise": "gaussian", "multipliers": (0.5,) * steps}
    return planned(**{"steps": steps, "learning_rate": 0.1, "expected_batch": 6.0, **basis, **more})


@pytest.mark.parametrize("clip", ["flat", "layer", "none"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("error:Engine")  # a silent change to torch.func would be one
def test_one_step_agrees_with_the_reference(name, clip):
    module, x, y = case(name)
    if name == "branch by data":
        assert graph.why_not(module) is None
    found = {
        engine: pool.train(module, flatten(module), x, y, works(), plan(clip=clip), engine=engine)
        for engine in ("graph", "reference")
    }
    ours, theirs = found["graph"], found["reference"]
    assert np.abs(ours.delta - theirs.delta).max() < 1e-5 and np.abs(theirs.delta).max() > 1e-4
    assert np.allclose(ours.norm_mean, theirs.norm_mean, rtol=1e-4, atol=1e-6)
    assert np.allclose(ours.loss, theirs.loss, rtol=1e-5)


@pytest.mark.parametrize(
    "more",
    [{"clip_norm": "l1"}, {"bound_rule": "median"}, {"sensitivity": "l2-max"}, {"grid": 2.0**-10}, {"measure_mean": True}],
)
@pytest.mark.parametrize("name", ["embedding", "attention", "lstm", "residual"])
def test_other_clips_and_noises_agree_too(name, more):
    module, x, y = case(name)
    found = [
        pool.train(module, flatten(module), x, y, works(2), plan(2, **more), engine=engine).delta
        for engine in ("graph", "reference")
    ]
    assert np.abs(found[0] - found[1]).max() < 2e-5


def test_adaclip_agrees(name="attention"):
    module, x, y = case(name)
    size = layout_of(module).size
    draw = np.random.default_rng(5)
    shift, scale = draw.normal(size=size).astype(np.float32) * 0.01, draw.uniform(0.5, 2, size).astype(np.float32)
    work = [ClientWork(w.client, w.rows, w.noise_key, shift=shift, scale=scale) for w in works()]
    found = [
        pool.train(module, flatten(module), x, y, work, plan(), engine=engine).delta for engine in ("graph", "reference")
    ]
    assert np.abs(found[0] - found[1]).max() < 1e-5


def test_broken_examples_add_nothing_and_are_counted():
    module, x, y = case("residual")
    x[works()[0].rows[0, 0]] = np.nan
    found = [pool.train(module, flatten(module), x, y, works(), plan(), engine=e) for e in ("graph", "reference")]
    assert found[0].skipped.tolist() == found[1].skipped.tolist() and found[0].skipped[0] == 1
    assert np.abs(found[0].delta - found[1].delta).max() < 1e-5


def test_frozen_weights_are_neither_in_the_layout_nor_changed():
    module, x, y = case("frozen batch norm")
    assert layout_of(module).names == ("4.weight", "4.bias")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = pool.train(module, flatten(module), x, y, works(), plan())
    assert result.delta.shape == (2, 64 * 3 + 3)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_dropout_repeats_for_any_chunk_and_differs_between_steps_and_examples():
    module, x, y = case("dropout")
    work = works(3, 3)
    one = pool.train(module, flatten(module), x, y, work, plan(3), engine="graph").delta
    again = np.concatenate([pool.train(module, flatten(module), x, y, [w], plan(3), engine="graph").delta for w in work])
    assert np.array_equal(one, again)
    module.eval()
    assert not np.allclose(one, pool.train(module, flatten(module), x, y, work, plan(3), engine="graph").delta)


def test_a_subclass_that_is_a_chain_takes_the_engine_of_its_sequential():
    class Cnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(16, 3)  # registered before it is used
            self.a, self.b = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, bias=False)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.a(x)), 1)
            return self.out(torch.tanh(self.b(x)).view(x.size(0), -1))

    torch.manual_seed(0)
    net = Cnn()
    same = nn.Sequential(net.a, nn.ReLU(), nn.MaxPool2d(1), net.b, nn.Tanh(), nn.Flatten(), net.out)
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(20, 2, 6, 6)).astype(np.float32), draw.integers(0, 3, 20)
    assert pool.choose(net, plan())[0] == pool.choose(same, plan())[0] != "functional"
    for engine in ("auto", "stacked", "reference"):
        found = pool.train(net, flatten(net), x, y, works(), plan(noise="none"), engine=engine)
        theirs = pool.train(same, flatten(same), x, y, works(), plan(noise="none"), engine="reference")
        assert np.allclose(found.loss, theirs.loss, rtol=1e-5)
        assert np.allclose(np.sort(found.delta), np.sort(theirs.delta), atol=1e-6)


def by_its_value(m, x):
    return m.out(m.a(x) if float(x.detach().sum()) > 0 else -m.a(x))


def test_what_cannot_be_traced_is_trained_by_torch_func_with_the_reason():
    torch.manual_seed(0)
    net, (_, x, y) = Wired(by_its_value, a=nn.Linear(7, 5), out=nn.Linear(5, 3)), case("shared")
    x = np.abs(x)
    with pytest.warns(UserWarning, match=r"torch\.func.*because"):
        ours = pool.train(net, flatten(net), x, y, works(), plan(), engine="graph").delta
    assert np.abs(ours - pool.train(net, flatten(net), x, y, works(), plan(), engine="reference").delta).max() < 1e-5


def test_weights_used_behind_a_layers_back_are_found():
    net = Wired(lambda m, x: x @ m.a.weight.T * 2, a=nn.Linear(7, 3, bias=False))
    _, x, y = case("shared")
    ours = pool.train(net, flatten(net), x, y, works(), plan(), engine="graph").delta
    assert np.abs(ours - pool.train(net, flatten(net), x, y, works(), plan(), engine="reference").delta).max() < 1e-5


def test_hidden_randomness_is_refused():
    net = Wired(lambda m, x: m.a(F.dropout(x, 0.5, True)), a=nn.Linear(7, 3))
    _, x, y = case("shared")
    with pytest.warns(UserWarning, match="draws random numbers"), pytest.raises(RuntimeError):
        pool.train(net, flatten(net), x, y, works(), plan(clip="none"), engine="graph")


def test_an_attribute_that_changes_is_noticed():
    """Programs are kept; a module whose plain attributes differ is another module."""
    module, x, y = case("lora")
    first = pool.train(module, flatten(module), x, y, works(), plan(noise="none"), engine="graph").delta
    adapted = next(part for part in module.modules() if hasattr(part, "scale"))
    with torch.no_grad():
        adapted.up.weight += 0.1
    adapted.scale *= 3
    found = [
        pool.train(module, flatten(module), x, y, works(), plan(noise="none"), engine=e).delta for e in ("graph", "reference")
    ]
    assert np.abs(found[0] - found[1]).max() < 1e-5 < np.abs(found[0] - first).max()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_an_examples_bits_do_not_depend_on_the_batch(name, compiled, monkeypatch):
    """In any company, at any place: otherwise one example could turn all others around."""
    if not compiled:
        monkeypatch.setattr(noise, "_native", None)
    module, x, y = case(name)
    data, targets = torch.as_tensor(x), torch.as_tensor(y)
    net = graph.compile_net(module, data[:3], targets[:3], "cross-entropy")
    weights = torch.as_tensor(flatten(module))

    def gradients(rows):
        picked = torch.as_tensor(rows)
        drops = [torch.linspace(0, 1, int(np.prod(s))).view(1, *s).expand(len(rows), *s) for _, _, s in net.program.masks]
        trained = list(unflatten(weights, net.layout).values())
        losses, found = net.program.gradients(trained, net.fixed, drops, data[picked], targets[picked])
        return torch.cat([losses[:, None], *(g.reshape(len(rows), -1) for g in found if g is not None)], 1)

    alone = torch.cat([gradients([row]) for row in range(9)])
    for rows in ([0, 1], [1, 0], [8, 3, 3], [4, 5, 6, 7, 8], [2, 0, 1, 3, 4, 5, 6, 7, 8]):
        assert torch.equal(gradients(rows), alone[rows]), rows


def test_no_row_of_the_data_decides_which_engine_trains(monkeypatch):
    """The trial of a traced module, which may end in another engine, sees the same examples whatever the data are."""
    tried = []
    real = graph.compile_net
    monkeypatch.setattr(graph, "compile_net", lambda *a: tried.append(a[1:3]) or real(*a))
    module, x, y = case("residual")
    for data, targets in ((x, y), (1 - 3 * x, (y + 1) % 3)):
        pool.train(module, flatten(module), data, targets, works(), plan(noise="none"), engine="graph")
    first, label = tried[0]
    assert len(tried) > 1 and first.any()
    assert all(torch.equal(first, x) and torch.equal(label, y) for x, y in tried[1:])


def test_batch_norm_that_trains_is_refused_with_the_call_that_replaces_it():
    net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(96, 3))
    with pytest.raises(UserError, match=r"fv\.replace_batch_norm"):
        pool.choose(net, plan())
    replaced = replace_batch_norm(net)
    assert isinstance(replaced[1], nn.GroupNorm) and replaced[1].num_groups == 6
    pool.choose(replaced, plan())


def test_residual_networks_by_name_are_trained_without_torch_func():
    net = resnet18_gn((3, 8, 8), 3, width=8, groups=4)
    assert pool.choose(net, plan())[0] == ("native" if native.available() else "graph")
    assert pool.choose(net, plan(), "torch")[0] == "graph"


CONVOLUTIONS = {
    "one dimension": (nn.Conv1d(2, 4, 2, groups=2), (2, 6)),
    "grouped": (nn.Conv2d(2, 4, 2, groups=2, dilation=2), (2, 5, 5)),
    "around the edge": (nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "volumes": (nn.Conv3d(2, 4, 2, stride=2, padding=1), (2, 4, 4, 4)),
    "transposed": (nn.ConvTranspose2d(2, 4, 2, stride=2, output_padding=1), (2, 5, 5)),
    "transposed volumes": (nn.ConvTranspose3d(2, 4, 2), (2, 3, 3, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_convolution_takes_the_references_steps(name):
    layer, shape = CONVOLUTIONS[name]
    width = layer(torch.zeros(1, *shape)).numel()
    net = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(width, 3))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, *shape)).astype(np.float32), rng.integers(0, 3, 8)
    plan = planned(2, 0.05, 4.0, clip="flat", bounds=(0.5,) * 2, noise="gaussian", multipliers=(1.0,) * 2)
    work = [ClientWork(k, rng.integers(0, 8, (2, 4)).astype(np.int32), bytes([k]) * 16) for k in range(2)]
    found = [pool.train(net, flatten(net), x, y, work, plan, engine=e).delta for e in ("graph", "reference")]
    assert np.abs(found[0] - found[1]).max() < 1e-6 and np.abs(found[1]).max() > 1e-3
