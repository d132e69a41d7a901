"""Changes to a module before private training: BatchNorm out, LoRA adapters in, and whether they really train."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedveil.errors import UserError
from fedveil.keys import derive

if TYPE_CHECKING:
    import numpy as np


def replace_batch_norm(module: nn.Module, groups: int = 32) -> nn.Module:
    """Every BatchNorm becomes a GroupNorm of the same channels (at most `groups` groups), in place; returns the module.

    Scale and offset are kept; running statistics are dropped, for they are averages over private examples.
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _group_norm(module, groups)
    for name, child in list(module.named_children()):
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            setattr(module, name, _group_norm(child, groups))
        else:
            replace_batch_norm(child, groups)
    return module


def _group_norm(old: Any, groups: int) -> nn.GroupNorm:
    count = max(g for g in range(1, min(groups, old.num_features) + 1) if old.num_features % g == 0)
    new = nn.GroupNorm(count, old.num_features, eps=old.eps, affine=old.affine)
    if old.affine:
        with torch.no_grad():
            new.weight.copy_(old.weight)
            new.bias.copy_(old.bias)
            for ours, theirs in ((new.weight, old.weight), (new.bias, old.bias)):
                ours.requires_grad_(theirs.requires_grad)
    return new


class LoRALinear(nn.Module):
    """A frozen Linear with a trained correction of low rank: out = frozen(x) + scale * up(down(x)); up starts at zero."""

    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.frozen, self.scale = frozen, alpha / rank
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    # torch's fast path for attention reads a layer's weight instead of calling it: what it reads must hold the correction.
    @property
    def weight(self) -> Tensor:
        """The matrix of the whole layer, computed anew; no parameter."""
        return self.frozen.weight + self.scale * (self.up.weight @ self.down.weight)

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias."""
        return self.frozen.bias

    @property
    def in_features(self) -> int:
        return self.frozen.in_features

    @property
    def out_features(self) -> int:
        return self.frozen.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.scale * self.up(self.down(x))


class LoRAConv2d(nn.Module):
    """The same for a convolution: a convolution to `rank` channels, then 1 x 1."""

    def __init__(self, frozen: nn.Conv2d, rank: int, alpha: float) -> None:
        super().__init__()
        self.frozen, self.scale = frozen, alpha / rank
        self.down = nn.Conv2d(
            frozen.in_channels, rank, frozen.kernel_size, frozen.stride, frozen.padding, frozen.dilation, bias=False,  # type: ignore[arg-type]
            padding_mode=frozen.padding_mode,
        )  # fmt: skip
        self.up = nn.Conv2d(rank, frozen.out_channels, 1, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.scale * self.up(self.down(x))


class LoRAAttention(nn.MultiheadAttention):
    """The same for attention: corrections of the stacked matrix of queries, keys and values, and of the projection behind it.

    torch's own forward pass runs; what it reads as weights are the corrected ones."""

    def __init__(self, frozen: nn.MultiheadAttention, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)
        torchs = nn.Module().__dict__
        self.__dict__.update({name: value for name, value in frozen.__dict__.items() if name not in torchs})  # sizes, no tensors
        self.training = frozen.training
        self.bias_k, self.bias_v = frozen.bias_k, frozen.bias_v
        self.frozen_weight, self.frozen_bias = frozen.in_proj_weight, frozen.in_proj_bias
        self.scale = alpha / rank
        self.down = nn.Linear(frozen.embed_dim, rank, bias=False)
        self.up = nn.Linear(rank, 3 * frozen.embed_dim, bias=False)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)
        self.out_proj = LoRALinear(frozen.out_proj, rank, alpha)  # type: ignore[assignment]

    @property
    def in_proj_weight(self) -> Tensor:  # type: ignore[override]
        """The stacked matrix, computed anew; no parameter."""
        return self.frozen_weight + self.scale * (self.up.weight @ self.down.weight)

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        """The frozen bias."""
        return self.frozen_bias


_ADAPTERS = (LoRALinear, LoRAConv2d, LoRAAttention)
# What has matrices of its own, so that whoever asks for adapters on all layers expects one.
_LIKE_THESE = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.Bilinear, nn.RNNBase)


def lora(
    module: nn.Module,
    rank: int = 4,
    *,
    alpha: float | None = None,
    layers: str | Sequence[str] | Callable[[str], bool] = "",
    also: Sequence[str] = (),
    seed: int | bytes = 0,
) -> nn.Module:
    """Freeze the module and put trained adapters of low rank on its Linear, Conv2d and MultiheadAttention layers, in place;
    returns it.

    layers: which layers get one: those whose name contains one of these texts (or for which a function says so); all if
    empty. also: parts that train as a whole beside the adapters (their names' beginnings, such as "head"). alpha: strength
    of the correction, `rank` if not given. Only adapters and `also` are clipped, noised, uploaded and charged. A layer that is
    named and cannot have an adapter is a UserError; others that get none are listed in a warning.
    """
    if rank < 1:
        raise UserError(f"lora: rank = {rank}; give at least 1")
    if any(isinstance(layer, _ADAPTERS) for layer in module.modules()):
        raise UserError("lora: the model has adapters already; call fv.lora once, on the model without them")
    missing = [name for name in also if not any(n == name or n.startswith(name + ".") for n, _ in module.named_modules())]
    if missing:
        raise UserError(f"lora: also = {missing[0]!r} is no part of the model")
    places = _places(module, layers, also)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(derive(seed, "lora")[:7], "little"))
        for names, layer in places:
            kind = next(adapter for plain, adapter in _KINDS.items() if type(layer) is plain)
            adapted = kind(layer, rank, float(rank if alpha is None else alpha))
            for name in names:  # a layer that is used in several places stays one
                owner, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(owner), attribute, adapted)
    for part in also:
        for parameter in module.get_submodule(part).parameters():
            parameter.requires_grad_()
    return module


_KINDS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Linear: LoRALinear, nn.Conv2d: LoRAConv2d, nn.MultiheadAttention: LoRAAttention,
}  # fmt: skip


def _places(
    module: nn.Module, layers: str | Sequence[str] | Callable[[str], bool], also: Sequence[str]
) -> list[tuple[list[str], nn.Module]]:
    """The layers that get an adapter, each with all its names. What was asked for and gets none is said."""
    words = [] if callable(layers) else [layers] if isinstance(layers, str) else list(layers)
    chosen = layers if callable(layers) else lambda name: any(word in name for word in words)
    found: dict[int, tuple[list[str], nn.Module]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if name and isinstance(layer, _LIKE_THESE):
            found.setdefault(id(layer), ([], layer))[0].append(name)
    wanted = [
        (names, layer)
        for names, layer in found.values()
        if any(map(chosen, names)) and not any(name == part or name.startswith(part + ".") for name in names for part in also)
    ]
    places = [(names, layer) for names, layer in wanted if not _unfit(layer)]
    skipped = {name: _unfit(layer) for names, layer in wanted if _unfit(layer) for name in names if chosen(name)}
    inside = [f"{name}." for names, layer in places if isinstance(layer, nn.MultiheadAttention) for name in names]
    skipped = {name: why for name, why in skipped.items() if not name.startswith(tuple(inside))}  # comes with its attention
    for name, why in skipped.items():
        if any(word and name.endswith(word) for word in words):
            raise UserError(f"lora: layers = {layers!r} names '{name}', which can have no adapter: {why}")
    if not places:
        told = "".join(f"; '{name}': {why}" for name, why in skipped.items())
        raise UserError(f"lora: no Linear, Conv2d or MultiheadAttention layer of the model matches layers = {layers!r}{told}")
    idle = [word for word in words if not any(word in name for names, _ in places for name in names)]
    if idle:
        raise UserError(f"lora: layers: no Linear, Conv2d or MultiheadAttention layer of the model has {idle[0]!r} in its name")
    if skipped:
        told = "; ".join(f"'{name}': {why}" for name, why in skipped.items())
        warnings.warn(f"fv.lora: layers without an adapter, which stay frozen: {told}", stacklevel=3)
    return places


def _unfit(layer: nn.Module) -> str:
    """Why a layer can have no adapter, or an empty string."""
    if type(layer) is nn.Linear or (type(layer) is nn.Conv2d and layer.groups == 1):
        return ""
    if isinstance(layer, nn.Conv2d) and layer.groups > 1:
        return f"a Conv2d with groups = {layer.groups}; train it as a whole with also=, or leave it frozen"
    if type(layer) is nn.MultiheadAttention:
        same = layer.in_proj_weight is not None
        return "" if same else "attention with kdim or vdim of its own; use nn.Linear for queries, keys and values"
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "a part of an attention; name the attention itself, whose adapter has a correction for it"
    return f"a {type(layer).__name__}; train it as a whole with also=, or leave it frozen"


def check_training(before: dict[str, Tensor], module: nn.Module) -> None:
    """Refuse silent failure: after training, every frozen weight is what it was, and every layer that trains has moved.

    before: a copy of `module.state_dict()` from before training. A layer that did not move at all had no gradient (a path
    that was cut, a zero that never leaves zero): UserError names it.
    """
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    still: list[str] = []
    for name, value in module.state_dict().items():
        moved = not torch.equal(value, before[name])
        if name not in trained and moved:
            raise UserError(f"'{name}' is frozen, but training changed it.")
        if name in trained:
            if not bool(value.isfinite().all()):
                raise UserError(f"'{name}' is not finite after training: lower the learning rate.")
            if not moved:
                still.append(name)
    if still:
        raise UserError(
            f"Training did not move {', '.join(repr(name) for name in still[:5])}"
            f"{' and others' if len(still) > 5 else ''}: no gradient reaches it. Freeze it, or check the forward pass."
        )


def check_gradients(module: nn.Module, x: np.ndarray | torch.Tensor, y: np.ndarray | torch.Tensor) -> None:
    """Refuse silent failure under noise, which moves every weight: on these examples the loss must reach each trained part
    with a finite gradient that is not zero, and nothing frozen. (An adapter's `down` has none before its `up` has moved.)

    Formal guarantee: none; it looks at the examples given. Use public ones, or your own on your own machine.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    labels = torch.as_tensor(y)
    with torch.enable_grad():
        out = module(torch.as_tensor(x))
        if labels.is_floating_point():
            loss = nn.functional.mse_loss(out.reshape(-1), labels.reshape(-1))
        else:
            loss = nn.functional.cross_entropy(out, labels)
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is None or not bool(gradient.isfinite().all()) or not bool(gradient.any()):
            what = "no" if gradient is None else "a zero" if bool(gradient.isfinite().all()) else "an infinite"
            raise UserError(f"'{name}' gets {what} gradient from these examples: check the path from it to the output.")
