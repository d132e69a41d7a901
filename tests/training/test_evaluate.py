"""Evaluation gives what the module itself gives, whatever its layers."""

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.models.layout import flatten
from fedveil.training.evaluate import evaluate, outputs


def volumes() -> tuple[nn.Module, np.ndarray, np.ndarray]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 27, 3))
    return net, np.random.default_rng(0).random((12, 1, 4, 4, 4), np.float32), np.arange(12) % 3


def test_volumes_are_evaluated_as_the_module_computes_them():
    net, x, y = volumes()
    wanted = net(torch.as_tensor(x)).detach()
    assert torch.allclose(outputs(net, flatten(net), x, batch=5), wanted, atol=1e-6)
    assert evaluate(net, flatten(net), x, y, "cross-entropy")["accuracy"] == pytest.approx(
        float((wanted.argmax(1).numpy() == y).mean())
    )


def test_a_run_on_volumes_ends(tmp_path):
    net, x, y = volumes()
    data = fv.dataset(x, y, x[:6], y[:6], classes=3)
    result = fv.run("fed-cdp-sound", data=data, model=net, rounds=1, clients=2, partition="iid", out=tmp_path / "run")
    assert result.accuracy is not None and len(result.ledger) > 0
