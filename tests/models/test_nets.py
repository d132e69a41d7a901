"""Models: the sizes of the papers, the same weights for the same seed, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.data.rows import Dataset
from fedveil.errors import UserError
from fedveil.models.layout import flatten, layout_of
from fedveil.models.nets import build, check_model, default_model, model_names

IMAGE, COLOUR = (1, 28, 28), (3, 32, 32)
# Parameter counts worked out by hand from the layer sizes.
GOLDEN = [
    ("papers-cnn", IMAGE, 10, 32 * 9 + 64 * 32 * 9 + 64 * 5 * 5 * 10),
    ("papers-cnn", COLOUR, 62, 32 * 27 + 64 * 32 * 9 + 64 * 6 * 6 * 62),
    ("papers-mlp", (105,), 2, 105 * 64 + 64 + 64 * 32 + 32 + 32 * 2 + 2),
    ("small-vgg", COLOUR, 10, 896 + 9248 + 18496 + 36928 + 4096 * 128 + 128 + 1290),
    ("udp-mnist-cnn", IMAGE, 10, 416 + 12832 + 512 * 64 + 64 + 650),
    ("medical-cnn", (1, 64, 64), 6, 160 + 4640 + 18496 + 36928 + 1024 * 64 + 64 + 390),
    ("tanh-cnn", IMAGE, 10, 26010),
    ("cpl-lenet", IMAGE, 10, 312 + 3 * 3612 + 588 * 10 + 10),
    ("cpl-lenet", COLOUR, 62, 912 + 3 * 3612 + 768 * 62 + 62),
    ("wind-cnn", (5, 1, 9), None, 256 + 784 + 144 * 32 + 32 + 33),
    ("logistic", (30,), 2, 62),
    ("linear", (30,), None, 31),
    ("adassp", (30,), 2, 31 * 32 // 2 + 31),
    ("adassp", (30,), 5, 31 * 32 // 2 + 5 * 31),
    ("adassp", (30,), None, 31 * 32 // 2 + 31),
    ("resnet18-gn", COLOUR, 10, 11_172_170),
]


@pytest.mark.parametrize(("name", "shape", "classes", "size"), GOLDEN)
def test_models_have_the_stated_size_pass_the_check_and_give_logits(name, shape, classes, size):
    module = build(name, shape, classes, seed=1)
    assert layout_of(module).size == size
    check_model(module.eval() if name == "adassp" else module, shape, classes)  # it trains on sums, and predicts with the head


def test_resnet18_with_the_printed_stem_is_the_published_network_but_for_its_norms():
    """11,689,512 weights are known for 1,000 classes; BatchNorm has as many as GroupNorm; shortcuts of ours have no norm."""
    net = build("resnet18-gn", (3, 224, 224), 1000, stem="printed")
    assert layout_of(net).size == 11_689_512 - 2 * (128 + 256 + 512)
    seen = []
    net[3].register_forward_hook(lambda *run: seen.append(tuple(run[2].shape[1:])))
    net(torch.zeros(1, 3, 224, 224))
    assert isinstance(net[3], nn.MaxPool2d) and seen == [(64, 56, 56)]


def test_every_name_has_a_golden_size():
    assert {row[0] for row in GOLDEN} == set(model_names())


def test_same_seed_same_weights_whatever_the_global_generator_says():
    torch.manual_seed(1)
    first = flatten(build("papers-cnn", IMAGE, 10, seed=5))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = flatten(build("papers-cnn", IMAGE, 10, seed=5))
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(first, second)
    assert not np.array_equal(first, flatten(build("papers-cnn", IMAGE, 10, seed=6)))
    assert np.array_equal(
        flatten(build("logistic", (3,), 2, seed=b"key")), flatten(build("logistic", (3,), 2, seed=b"key"))
    )


def test_the_papers_cnn_has_no_biases_and_three_layers():
    layout = layout_of(build("papers-cnn", IMAGE, 10))
    assert layout.layers == 3
    assert all(name.endswith("weight") for name in layout.names)


def test_the_victim_net_is_uniform_half_everywhere():
    """17,038 uniform draws: the extremes miss ±0.5 by more than 0.002 with probability below 1e-14."""
    weights = flatten(build("cpl-lenet", IMAGE, 10))
    assert -0.5 <= weights.min() < -0.498 and 0.498 < weights.max() <= 0.5
    assert sum(isinstance(layer, nn.Sigmoid) for layer in build("cpl-lenet", IMAGE, 10)) == 4


def test_built_in_models_are_flat_sequences():
    for name, shape, classes, _ in GOLDEN:
        assert name == "adassp" or isinstance(build(name, shape, classes), nn.Sequential), name


def test_hidden_sizes_are_an_option():
    assert layout_of(build("papers-mlp", (10,), 2, hidden=[7])).size == 77 + 16
    assert layout_of(build("papers-mlp", (1, 8, 8), 10, hidden=())).size == 650
    for wrong in ([0], ["a"], [2.5]):
        with pytest.raises(UserError, match="hidden"):
            build("papers-mlp", (10,), 2, hidden=wrong)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("papers-cn", IMAGE, 10), {}, "Did you mean 'papers-cnn'"),
        (("papers-cnn", (30,), 2), {}, "needs images.*papers-mlp"),
        (("papers-cnn", (1, 8, 8), 10), {}, "does not fit examples of shape"),
        (("papers-mlp", (3,), 2), {"hiden": [3]}, "Did you mean 'hidden'"),
        (("logistic", (3,), None), {}, "use 'linear'"),
        (("linear", (3,), 2), {}, "use 'logistic'"),
        (("resnet18-gn", COLOUR, 10), {"width": 10}, "multiple of groups"),
        (("resnet18-gn", COLOUR, 10), {"stem": "7x7"}, "neither small nor printed"),
    ],
)
def test_wrong_requests_are_explained(arguments, options, message):
    with pytest.raises(UserError, match=message):
        build(*arguments, **options)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


class Mixer(nn.Module):
    """Looks harmless, but subtracts the batch mean."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(3, 2)

    def forward(self, x):
        return self.dense(x - x.mean(dim=0))


class Remembers(nn.Module):
    """Subtracts what it saw last, before a head that begins at zero and so hides it."""

    def __init__(self):
        super().__init__()
        self.dense, self.last = nn.Linear(3, 2), 0.0
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, x):
        before, self.last = self.last, x.detach().mean(0)
        return self.dense(x - before)


class Buffered(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += len(x)
        return super().forward(x)


class Peak(nn.Linear):
    """Divides by the largest value seen so far, which begins at 1; kept where `kind` says."""

    def __init__(self, kind):
        super().__init__(3, 2)
        self.kind = kind
        if kind == "attribute":
            self.peak = 1.0
        else:
            self.register_buffer("peak", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            largest = max(float(self.peak), float(x.abs().max()))
            if self.kind == "attribute":
                self.peak = largest
            elif self.kind == "data":  # torch counts no version of what goes this way
                self.peak.data.fill_(largest)
            else:
                self.peak.fill_(largest)
        return super().forward(x / self.peak)


def forced():
    """Every look-up shrinks a row of the weights, which the examples after it see."""
    table = nn.Embedding(3, 2, max_norm=0.1)
    return nn.Sequential(Words(), table, nn.Flatten(), nn.Linear(6, 2))


class Words(nn.Module):
    def forward(self, x):
        return (x.abs() > 0.5).long()


def frozen():
    return nn.Linear(3, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), "layer '1'.*BatchNorm1d.*replace_batch_norm"),
        (
            nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, track_running_stats=False)),
            "mixes the examples",
        ),
        (nn.SyncBatchNorm(2), "mixes the examples"),
        (nn.InstanceNorm1d(2, affine=True, track_running_stats=True), "track_running_stats=False"),
        (nn.Sequential(nn.Linear(3, 2), nn.AlphaDropout(0.1)), "hidden randomness.*nn.Dropout"),
        (nn.LSTM(3, 2), "batch_first=True"),
        (nn.RNN(3, 2), "use nn.LSTM or nn.GRU"),
        (nn.Sequential(nn.LazyLinear(2)), "has no weights yet"),
        (Buffered(), "changes a buffer of the module, 'count'"),
        (Peak("buffer"), "changes a buffer of the module, 'peak'"),
        (Peak("attribute"), "something else after others have passed"),
        (forced(), "changes a weight of the module, '1.weight'"),
        (frozen(), "nothing to train"),
        (nn.Linear(3, 2).double(), "must be float32"),
        (nn.Sequential(nn.ReLU()), "no parameters"),
        (Mixer(), "depends on the rest of its batch"),
        (Remembers(), "depends on the rest of its batch"),
        (nn.Linear(3, 5), r"\[3, 2\] is needed"),
        (nn.Linear(4, 2), "does not accept a batch"),
    ],
)
def test_modules_that_break_the_promise_are_refused_with_reason_and_fix(module, message):
    with pytest.raises(UserError, match=message):
        check_model(module, (3,), 2, name="mine")


def test_a_buffer_that_only_large_examples_change_is_found_by_company_of_all_sizes():
    """Written to behind torch's counter, and only by what no example of usual size reaches."""
    with pytest.raises(UserError, match="changes a buffer of the module, 'peak'"):
        check_model(Peak("data"), (3,), 2)


def test_switched_off_dropout_and_plain_modules_pass():
    check_model(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0)), (3,), 2)
    check_model(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), (3,), 2)  # masks come from keys
    check_model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2).requires_grad_(False)), (3,), 2)
    check_model(Tied(), (3,), 3)
    check_model(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)), (3,), None)
    zeros = nn.Linear(3, 2)
    nn.init.zeros_(zeros.weight)
    check_model(zeros, (3,), 2)
    assert not zeros.weight.any()  # the trial is a copy's


def own_module(tmp_path, monkeypatch, name, text):
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)


def test_the_users_function_is_given_what_it_names_and_is_seeded(tmp_path, monkeypatch):
    own_module(
        tmp_path, monkeypatch, "own_net_one",
        "from torch import nn\n"
        "def make(shape, classes, wide=4):\n"
        "    return nn.Sequential(nn.Linear(shape[0], wide), nn.Tanh(), nn.Linear(wide, classes))\n"
        "def plain():\n    return nn.Linear(3, 2)\n"
        "def bad():\n    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))\n"
        "def nothing():\n    return 3\nvalue = 3\n",
    )  # fmt: skip
    a, b = (flatten(build("own_net_one:make", (3,), 2, 7, wide=5)) for _ in range(2))
    assert len(a) == 20 + 12 and np.array_equal(a, b)
    assert layout_of(build("own_net_one:plain", (3,), 2)).size == 8
    for spec, message in [
        ("own_net_one:bad", "own_net_one:bad.*BatchNorm1d"),
        ("own_net_one:nothing", "must return a torch.nn.Module"),
        ("own_net_one:mkae", "Did you mean 'make'"),
        ("own_net_one:value", "not a function"),
        ("own_net_two:make", "no module 'own_net_two'"),
    ]:
        with pytest.raises(UserError, match=message):
            build(spec, (3,), 2)
    with pytest.raises(UserError, match=r"no parameter 'wdie'.*'wide'"):
        build("own_net_one:make", (3,), 2, wdie=3)


def test_a_module_that_fails_to_import_says_why(tmp_path, monkeypatch):
    own_module(tmp_path, monkeypatch, "own_net_three", "import no_such_thing_here\n")
    with pytest.raises(UserError, match="needs 'no_such_thing_here'"):
        build("own_net_three:make", (3,), 2)
    own_module(tmp_path, monkeypatch, "own_net_four", "1 / 0\n")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        build("own_net_four:make", (3,), 2)


def test_default_models_fit_their_data():
    def data(name, shape, classes):
        x = np.zeros((2, *shape), np.float32)
        y = np.zeros(2, np.int64 if classes else np.float32)
        return Dataset(name, x, y, x, y, classes, task="classification" if classes else "regression")

    for name, shape, classes, model in [
        ("mnist", IMAGE, 10, "papers-cnn"),
        ("cifar10", COLOUR, 10, "papers-cnn"),
        ("digits", (1, 8, 8), 10, "papers-mlp"),
        ("cancer", (30,), 2, "papers-mlp"),
        ("medical_mnist", (1, 64, 64), 6, "medical-cnn"),
        ("wind", (5, 1, 9), None, "wind-cnn"),
        ("own", (4,), None, "linear"),
    ]:
        dataset = data(name, shape, classes)
        assert default_model(dataset) == model
        check_model(build(model, shape, classes), shape, classes)


def test_a_linear_model_can_start_at_zero_and_without_bias():
    net = build("logistic", (5,), 3, bias=False, zero=True)
    assert flatten(net).tolist() == [0.0] * 15
    assert flatten(build("logistic", (5,), 3)).any()
