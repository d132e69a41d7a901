"""LoRA and its self-checks: what trains, what stays, and failures that would be silent elsewhere."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.errors import UserError
from fedveil.models.layout import layout_of


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 3))


def test_adapters_start_without_effect_and_are_all_that_trains():
    plain, x = net(), torch.rand(2, 1, 8, 8)
    before = plain(x)
    adapted = fv.lora(plain, 2, layers=("0", "3"), also=("5",))
    assert torch.allclose(adapted(x), before, atol=1e-6)
    assert layout_of(adapted).names == ("0.down.weight", "0.up.weight", "3.down.weight", "3.up.weight", "5.weight", "5.bias")


def test_the_same_seed_gives_the_same_adapters_and_leaves_torchs_generator_alone():
    plain = [nn.Sequential(nn.Linear(3, 3)) for _ in range(3)]
    state = torch.get_rng_state()
    first, again, other = (fv.lora(net, 2, seed=seed) for net, seed in zip(plain, (7, 7, 8), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first[0].down.weight, again[0].down.weight)
    assert not torch.equal(first[0].down.weight, other[0].down.weight)


@pytest.mark.parametrize("more", [{"rank": 0}, {"layers": "nowhere"}, {"also": ("nowhere",)}])
def test_what_would_train_nothing_is_refused(more):
    with pytest.raises(UserError, match="lora"):
        fv.lora(net(), **{"rank": 2, **more})


def test_a_frozen_weight_that_moved_or_an_adapter_that_did_not_is_an_error():
    adapted = fv.lora(net(), 2, layers="3")
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    with pytest.raises(UserError, match="did not move"):
        fv.check_training(before, adapted)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1
    fv.check_training(before, adapted)
    with torch.no_grad():
        adapted[0].weight += 1
    with pytest.raises(UserError, match="frozen"):
        fv.check_training(before, adapted)


def test_an_adapter_that_no_gradient_reaches_is_found_even_if_noise_moved_it():
    adapted = fv.lora(net(), 2, layers="3")
    x, y = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    with pytest.raises(UserError, match=r"down.weight.*zero gradient"):
        fv.check_gradients(adapted, x, y)  # up is still zero
    with torch.no_grad():
        adapted[3].up.weight += 0.1
    fv.check_gradients(adapted, x, y)


class Encoder(nn.Module):
    """One layer of torch's encoder: in eval mode without gradients torch takes its fast path, past the layers' forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x).mean(1))


def moved(module: nn.Module) -> nn.Module:
    """With adapters that have left zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
    return module


def test_attention_gets_adapters_on_its_projections():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    adapted = fv.lora(nn.ModuleDict({"attention": attention}), 2)["attention"]
    x = torch.rand(3, 4, 8)
    plain = attention(x, x, x)[0]
    assert torch.allclose(adapted(x, x, x)[0], plain, atol=1e-6)
    moved(adapted)
    by_hand = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        by_hand.in_proj_weight.copy_(attention.in_proj_weight + adapted.scale * adapted.up.weight @ adapted.down.weight)
        by_hand.in_proj_bias.copy_(attention.in_proj_bias)
        out = adapted.out_proj
        by_hand.out_proj.weight.copy_(attention.out_proj.weight + out.scale * out.up.weight @ out.down.weight)
        by_hand.out_proj.bias.copy_(attention.out_proj.bias)
    wanted = by_hand(x, x, x)[0]
    assert not torch.allclose(wanted, plain, atol=1e-2)
    assert torch.allclose(adapted(x, x, x)[0], wanted, atol=1e-6)
    with torch.no_grad():  # the fast path
        assert torch.allclose(adapted.eval()(x, x, x, need_weights=False)[0], wanted, atol=1e-6)
    names = ("down.weight", "up.weight", "out_proj.down.weight", "out_proj.up.weight")
    assert layout_of(adapted).names == names


def test_an_encoder_with_adapters_everywhere_gets_a_gradient_everywhere():
    adapted = moved(fv.lora(Encoder(), 2))
    fv.check_gradients(adapted, torch.rand(6, 4, 8), torch.arange(6) % 3)
    assert sum("self_attn" in name for name in layout_of(adapted).names) == 4
    twin = copy.deepcopy(adapted)
    assert torch.equal(twin(torch.ones(1, 4, 8)), adapted(torch.ones(1, 4, 8)))


def test_what_was_asked_for_and_gets_no_adapter_is_said():
    def odd() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(2), nn.Conv1d(4, 2, 1), nn.Flatten(), nn.Linear(8, 3))

    with pytest.warns(UserWarning, match=r"'0': a Conv2d with groups = 2.*'2': a Conv1d"):
        assert layout_of(fv.lora(odd(), 2)).names == ("4.down.weight", "4.up.weight")
    with pytest.raises(UserError, match=r"names '2', which can have no adapter: a Conv1d"):
        fv.lora(odd(), 2, layers=("2", "4"))
    with pytest.raises(UserError, match=r"'7'"):
        fv.lora(odd(), 2, layers=("4", "7"))
    with pytest.raises(UserError, match="name the attention itself"):
        fv.lora(Encoder(), 2, layers="out_proj")
    own = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2, kdim=3)})
    with pytest.raises(UserError, match="kdim"):
        fv.lora(own, 2, layers="a")


def test_a_layer_that_is_used_twice_stays_one():
    shared = nn.Linear(4, 4)
    adapted = fv.lora(nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(4, 2)), 2, layers="2", also=("3",))
    assert adapted[0] is adapted[2] and layout_of(adapted).names[:2] == ("0.down.weight", "0.up.weight")


def test_adapters_on_adapters_are_refused():
    with pytest.raises(UserError, match="adapters already"):
        fv.lora(fv.lora(net(), 2, layers="3"), 2, layers="5")


def test_torchs_fast_path_of_an_encoder_computes_with_the_adapters():
    torch.manual_seed(0)
    adapted = moved(fv.lora(Encoder(), 2, layers="linear"))
    x = torch.rand(5, 4, 8)
    slow = adapted.train()(x).detach()  # dropout is 0: training mode only turns the fast path off
    with torch.no_grad():
        fast = adapted.eval()(x)
    assert torch.allclose(fast, slow, atol=1e-5)
    layer = adapted.layer
    plain = nn.functional.linear(x, layer.linear1.weight, layer.linear1.bias)
    assert torch.allclose(plain, layer.linear1(x), atol=1e-5)


def test_what_an_adapter_shows_of_its_weight_is_no_parameter():
    adapted = fv.lora(Encoder(), 2, layers="linear")
    wanted = ("layer.linear1.down.weight", "layer.linear1.up.weight", "layer.linear2.down.weight", "layer.linear2.up.weight")
    assert layout_of(adapted).names == wanted
    assert not {"layer.linear1.weight", "layer.linear1.bias"} & set(adapted.state_dict())


@pytest.mark.parametrize("layers", ["linear", "layer"])
def test_an_encoder_with_adapters_runs_to_its_end(layers, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 4, 8)).astype(np.float32), np.arange(24) % 3
    data = fv.dataset(x, y, x[:9], y[:9], classes=3)
    result = fv.run("fed-cdp-sound", data=data, model=fv.lora(Encoder(), 2, layers=layers, also=("head",)), rounds=1, clients=2,
                    partition="iid", out=tmp_path / "run")  # fmt: skip
    with torch.no_grad():
        truth = (result.module.train()(torch.as_tensor(x[:9])).argmax(1).numpy() == y[:9]).mean()
    assert result.accuracy == pytest.approx(truth)
