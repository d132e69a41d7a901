"""Models by name.

`build(name, shape, classes, seed)` gives the same weights for the same arguments, always, and leaves torch's
global generator alone. All nets give [batch, classes] logits, or [batch, 1] for regression, and treat each
example on its own, which per-example clipping needs; `check_model` refuses modules that do not.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fedveil.data.functions import call, import_function, is_function
from fedveil.errors import UserError, did_you_mean
from fedveil.keys import derive
from fedveil.models.state import try_module, unchanged
from fedveil.models.statistics import statistics

if TYPE_CHECKING:
    from fedveil.data.rows import Dataset

Shape = tuple[int, ...]


def _with_head(features: list[nn.Module], shape: Shape, *sizes: int, bias: bool = True) -> nn.Sequential:
    """Features, flattened, then dense layers of these sizes with ReLU between them."""
    with torch.no_grad():
        width = nn.Sequential(*features)(torch.zeros(1, *shape)).numel()
    head: list[nn.Module] = []
    for size in sizes:
        head += [nn.Linear(width, size, bias=bias), nn.ReLU()]
        width = size
    return nn.Sequential(*features, nn.Flatten(), *head[:-1])


def papers_cnn(shape: Shape, outputs: int) -> nn.Sequential:
    """The papers' image model, without biases: 34,720 weights on 28x28 with 10 classes."""
    features = [
        nn.Conv2d(shape[0], 32, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2),
    ]  # fmt: skip
    return _with_head(features, shape, outputs, bias=False)


def papers_mlp(shape: Shape, outputs: int, hidden: Sequence[int] = (64, 32)) -> nn.Sequential:
    """The papers' attribute model: dense hidden layers with ReLU."""
    if not all(isinstance(size, int) and size > 0 for size in hidden):
        raise UserError(
            f"papers-mlp: hidden = {hidden!r} must be a list of whole numbers above 0, as [64, 32]."
        )
    layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
    width = math.prod(shape)
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def small_vgg(shape: Shape, outputs: int) -> nn.Sequential:
    """Two pairs of 3x3 convolutions (32 and 64 channels), a pool after each pair, two dense layers."""
    features = [
        nn.Conv2d(shape[0], 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    ]  # fmt: skip
    return _with_head(features, shape, 128, outputs)


def udp_mnist_cnn(shape: Shape, outputs: int) -> nn.Sequential:
    """Two 5x5 convolutions (16 and 32 channels) with pools, two dense layers."""
    features = [
        nn.Conv2d(shape[0], 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
    ]  # fmt: skip
    return _with_head(features, shape, 64, outputs)


def medical_cnn(shape: Shape, outputs: int) -> nn.Sequential:
    """Four 3x3 convolutions (16, 32, 64, 64 channels), a pool after each, two dense layers."""
    features: list[nn.Module] = []
    before = shape[0]
    for channels in (16, 32, 64, 64):
        features += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        before = channels
    return _with_head(features, shape, 64, outputs)


def tanh_cnn(shape: Shape, outputs: int) -> nn.Sequential:
    """Two strided convolutions and two dense layers with tanh, which suit clipped gradients."""
    features = [
        nn.Conv2d(shape[0], 16, 8, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
    ]  # fmt: skip
    net = _with_head(features, shape, 32, outputs)
    return nn.Sequential(*(nn.Tanh() if isinstance(layer, nn.ReLU) else layer for layer in net))


def cpl_lenet(shape: Shape, outputs: int) -> nn.Sequential:
    """The victim of gradient inversion: four sigmoid convolutions, one dense layer, weights uniform ±0.5."""
    features: list[nn.Module] = []
    before = shape[0]
    for stride in (2, 2, 1, 1):
        features += [nn.Conv2d(before, 12, 5, stride=stride, padding=2), nn.Sigmoid()]
        before = 12
    net = _with_head(features, shape, outputs)
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return net


def wind_cnn(shape: Shape, outputs: int) -> nn.Sequential:
    """Two convolutions along the hours of a forecast window, two dense layers."""
    features = [
        nn.Conv2d(shape[0], 16, (1, 3), padding=(0, 1)), nn.ReLU(),
        nn.Conv2d(16, 16, (1, 3), padding=(0, 1)), nn.ReLU(),
    ]  # fmt: skip
    return _with_head(features, shape, 32, outputs)


def linear(shape: Shape, outputs: int, bias: bool = True, zero: bool = False) -> nn.Sequential:
    """One dense layer: linear regression with the squared loss, logistic regression with cross-entropy.

    zero: start at zero, so that no random start has to be unlearnt under noise.
    """
    dense = nn.Linear(math.prod(shape), outputs, bias=bias)
    if zero:
        for parameter in dense.parameters():
            nn.init.zeros_(parameter)
    return nn.Sequential(*([nn.Flatten()] if len(shape) > 1 else []), dense)


class Residual(nn.Module):
    """Two 3x3 convolutions with GroupNorm beside a shortcut."""

    def __init__(self, before: int, channels: int, stride: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, padding=1, bias=False), nn.GroupNorm(groups, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(groups, channels),
        )  # fmt: skip
        same = stride == 1 and before == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18_gn(shape: Shape, outputs: int, width: int = 64, groups: int = 16, stem: str = "small") -> nn.Sequential:
    """ResNet-18 with GroupNorm not BatchNorm; `width` channels in the first stage.

    stem: small (one 3x3 convolution, for small images) or printed (7x7 in strides of 2 and a pool, as its authors have it for
    large ones: on 32x32 pixels a twelfth of the work)."""
    if width < 1 or width % groups:
        raise UserError(f"resnet18-gn: width = {width} must be a multiple of groups = {groups}.")
    if stem not in ("small", "printed"):
        raise UserError(f"resnet18-gn: stem = {stem} is neither small nor printed.")
    blocks: list[nn.Module] = []
    before = width
    for stage in range(4):
        channels = width * 2**stage
        blocks += [
            Residual(before, channels, 2 if stage else 1, groups),
            Residual(channels, channels, 1, groups),
        ]
        before = channels
    first = nn.Conv2d(shape[0], width, 3, padding=1, bias=False)
    pool: list[nn.Module] = []
    if stem == "printed":
        first, pool = nn.Conv2d(shape[0], width, 7, 2, padding=3, bias=False), [nn.MaxPool2d(3, 2, padding=1)]
    return nn.Sequential(
        first, nn.GroupNorm(groups, width), nn.ReLU(), *pool,
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, outputs),
    )  # fmt: skip


NETS: dict[str, Callable[..., nn.Module]] = {
    "papers-cnn": papers_cnn,
    "papers-mlp": papers_mlp,
    "small-vgg": small_vgg,
    "udp-mnist-cnn": udp_mnist_cnn,
    "medical-cnn": medical_cnn,
    "tanh-cnn": tanh_cnn,
    "resnet18-gn": resnet18_gn,
    "cpl-lenet": cpl_lenet,
    "wind-cnn": wind_cnn,
    "logistic": linear,
    "linear": linear,
    "adassp": statistics,
}
_TABLES = (
    "papers-mlp",
    "logistic",
    "linear",
    "adassp",
)  # these take any shape; the others take [channels, height, width]


def model_names() -> tuple[str, ...]:
    """The built-in names."""
    return tuple(NETS)


def default_model(dataset: Dataset) -> str:
    """The model used for a dataset when none is asked for."""
    by_name = {"medical_mnist": "medical-cnn", "wind": "wind-cnn"}
    if dataset.name in by_name:
        return by_name[dataset.name]
    if len(dataset.shape) == 3 and dataset.task == "classification" and min(dataset.shape[1:]) >= 16:
        return "papers-cnn"
    return "papers-mlp" if dataset.task == "classification" else "linear"


def build(
    name: str, shape: Sequence[int], classes: int | None, seed: int | bytes = 0, **options: object
) -> nn.Module:
    """Build a model for examples of `shape`; `classes` None means regression (one output).

    name: one of `model_names()`, or "package.module:function" returning an nn.Module (it is given `shape`,
    `classes` and the options, as far as it names them). The weights depend only on the arguments; torch's
    global generator is left as it was.
    """
    size, outputs = tuple(int(n) for n in shape), 1 if classes is None else int(classes)
    if name in NETS:
        if name == "logistic" and classes is None:
            raise UserError("Model 'logistic' is for classification; use 'linear' for regression.")
        if name == "linear" and classes is not None:
            raise UserError("Model 'linear' is for regression; use 'logistic' for classification.")
        if name not in _TABLES and len(size) != 3:
            raise UserError(
                f"Model '{name}' needs images [channels, height, width], but examples have shape "
                f"{list(size)}; "
                "use 'papers-mlp' for tables."
            )
        _check_options(name, NETS[name], options, given=2)
        make, arguments = NETS[name], {"shape": size, "outputs": outputs, **options}
        if make is statistics:
            arguments["classes"] = classes is not None
    elif is_function(name):
        make = import_function(name)
        arguments = _named_arguments(name, make, {"shape": size, "classes": classes}, options)
    else:
        raise UserError(
            f"Unknown model '{name}' (known: {', '.join(NETS)}; or "
            f"package.module:function).{did_you_mean(name, NETS)}"
        )
    # Layer constructors draw from torch's global generator: seed it for them, then put it back as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(derive(seed, "model")[:7], "little"))
        try:
            module = make(**arguments) if name in NETS else call(name, make, **arguments)
        except (RuntimeError, ZeroDivisionError) as wrong:
            raise UserError(
                f"Model '{name}' does not fit examples of shape {list(size)}: {wrong}."
            ) from wrong
    if name not in NETS:
        if not isinstance(module, nn.Module):
            raise UserError(f"'{name}' returned a {type(module).__name__}; it must return a torch.nn.Module.")
        check_model(module, size, classes, name=name)
    return module


def _check_options(name: str, make: Callable[..., object], options: dict[str, object], given: int) -> None:
    known = list(inspect.signature(make).parameters)[given:]
    for option in options:
        if option not in known:
            has = ", ".join(known) or "none"
            raise UserError(
                f"Model '{name}' has no option '{option}' (it has: {has}).{did_you_mean(option, known)}"
            )


def _named_arguments(
    name: str, make: Callable[..., object], offered: dict[str, object], options: dict[str, object]
) -> dict[str, object]:
    """What to call the user's function with: shape and classes if it names them, and every option."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return options
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not anything:
        for option in options:
            if option not in parameters:
                raise UserError(f"'{name}' has no parameter '{option}'.{did_you_mean(option, parameters)}")
    return {**{word: value for word, value in offered.items() if anything or word in parameters}, **options}


def check_model(
    module: nn.Module,
    shape: Sequence[int] | None = None,
    classes: int | None = None,
    *,
    name: str = "the model",
) -> None:
    """Refuse modules for which per-example clipping or the flat weight vector is undefined.

    With a shape, the module is also tried on random examples: the output must be [batch, classes] ([batch, 1]
    for regression), and an example's output must depend neither on the other examples of its batch nor on those that passed
    before it, of whatever size their numbers are.

    Formal guarantee: what passes has no layer known to mix examples, and no state outside its parameters. The
    trial on random examples is a test, not a proof, for modules with code of their own.
    """
    for where, layer in module.named_modules():
        reason = _refusal(layer)
        if reason:
            raise UserError(
                f"{name}: layer '{where or type(layer).__name__}' ({type(layer).__name__}) {reason}"
            )
    parameters = dict(module.named_parameters())
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(f"{name} has no parameters that train (requires_grad), so there is nothing to train.")
    for where, parameter in parameters.items():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise UserError(
                f"{name}: '{where}' is {parameter.dtype}; weights must be float32 (module.float())."
            )
    if shape is not None:
        _try_out(module, tuple(shape), 1 if classes is None else classes, name)


def _refusal(layer: nn.Module) -> str:
    """Why this layer cannot be used and what to do instead, or an empty string."""
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        return "has no weights yet; use the layer with its sizes written out."
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        trains = any(p.requires_grad for p in layer.parameters()) or layer.training or not layer.track_running_stats
        return (
            "mixes the examples of a batch and keeps running statistics of private data, so no per-example bound "
            "holds; fv.replace_batch_norm(model) puts nn.GroupNorm in its place (frozen and in eval mode it may stay)."
            if trains
            else ""
        )
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
        return "keeps running statistics of private data; set track_running_stats=False or use nn.GroupNorm."
    if isinstance(layer, nn.modules.dropout._DropoutNd) and type(layer) not in (nn.Dropout, nn.Dropout2d) and layer.p > 0:
        return "draws hidden randomness, so runs would not repeat; use nn.Dropout, whose masks come from keys."
    if isinstance(layer, nn.RNNBase):
        if type(layer) not in (nn.LSTM, nn.GRU):
            return "has no per-example gradients here; use nn.LSTM or nn.GRU."
        if not layer.batch_first or layer.proj_size or layer.dropout:
            return "must have batch_first=True, no proj_size and no dropout of its own (put nn.Dropout between layers)."
    return ""


def _try_out(module: nn.Module, shape: Shape, outputs: int, name: str) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.rand(3, *shape, generator=random)
    module = copy.deepcopy(module)
    for weight in (p.data for p in module.parameters() if p.requires_grad and not p.any()):  # zeros would hide what goes in
        weight.add_(0.1 * torch.randn(weight.shape, generator=random).to(weight))
    for layer in module.modules():
        if isinstance(layer, nn.Dropout | nn.Dropout2d):
            layer.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), unchanged(module, name):
            together = module(x)
            alone = torch.cat([module(one[None]) for one in x])
    except (RuntimeError, ValueError, IndexError, TypeError) as wrong:
        raise UserError(f"{name} does not accept a batch of shape {[3, *shape]}: {wrong}.") from wrong
    if not isinstance(together, torch.Tensor) or tuple(together.shape) != (3, outputs):
        got = list(together.shape) if isinstance(together, torch.Tensor) else type(together).__name__
        raise UserError(f"{name} gives {got} for a batch of 3 examples; [3, {outputs}] is needed.")
    if not torch.allclose(together, alone, rtol=1e-3, atol=1e-4):
        raise UserError(
            f"{name}: the output for an example depends on the rest of its batch (or on chance), so a "
            "clip per "
            "example bounds nothing; treat each example on its own."
        )
    try_module(module, x, name)
