"""LoRA and its self-checks: what trains, what stays, and failures that would be silent elsewhere."""

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
