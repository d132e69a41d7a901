"""Equal fingerprints mean equal outputs: weights, attributes, hidden buffers and code all count."""

import subprocess
import sys
from types import SimpleNamespace

import torch
from torch import nn

from fedveil.models.fingerprint import fingerprint


def of(forward, **attributes) -> tuple[str, bool]:
    """The fingerprint of a module with that forward pass; all of them have one name and one weight."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            for name, value in attributes.items():
                setattr(self, name, value)

    Net.forward = forward
    return fingerprint(Net())


def helper(x):
    return x * 2


def test_another_forward_pass_is_another_network():
    found = {of(f)[0] for f in (lambda self, x: x, lambda self, x: -x, lambda self, x: x.exp(), lambda self, x: x + 1)}
    assert len(found) == 4


def test_plain_attributes_and_hidden_buffers_count():
    def forward(self, x):
        return x * self.scale

    assert of(forward, scale=1.0) == of(forward, scale=1.0)
    assert len({of(forward, scale=s)[0] for s in (1.0, 2.0, "1.0", (1.0,), torch.ones(1), torch.zeros(1))}) == 6
    hidden = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    for at, net in enumerate(hidden):
        nn.init.ones_(net.weight)
        net.register_buffer("shift", torch.full((2,), float(at)), persistent=False)
    assert fingerprint(hidden[0])[0] != fingerprint(hidden[1])[0]


def test_what_the_code_reaches_counts(monkeypatch):
    def forward(self, x):
        return helper(x)

    before = of(forward)
    monkeypatch.setitem(globals(), "helper", lambda x: x * 3)
    assert before[1] and of(forward)[0] != before[0]

    def around(number):
        return lambda self, x: x * number

    assert of(around(1))[0] != of(around(2))[0]


def test_hooks_and_replaced_methods_count():
    plain, hooked, patched = (nn.Linear(2, 2) for _ in range(3))
    for net in (hooked, patched):
        net.load_state_dict(plain.state_dict())
    hooked.register_forward_hook(lambda module, inputs, out: -out)
    patched.forward = lambda x: x
    assert len({fingerprint(net)[0] for net in (plain, hooked, patched)}) == 3


def test_torchs_own_layers_are_read_whole():
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GELU(), nn.LSTM(3, 3), nn.TransformerEncoderLayer(4, 2), nn.Embedding(3, 2)
    )
    assert fingerprint(net)[1]


def test_what_cannot_be_looked_into_is_said():
    assert not of(lambda self, x: self.run(x), run=SimpleNamespace(a=1))[1]
    assert not fingerprint(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)))[1]
    assert not fingerprint(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))))[1]


def test_another_process_finds_the_same(tmp_path):
    (tmp_path / "my_net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def double(x): return x * 2\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(2, 2)\n"
        "        nn.init.ones_(self.layer.weight)\n        nn.init.ones_(self.layer.bias)\n"
        "    def forward(self, x):\n        return double(self.layer(x)) if x.ndim in {1, 2} else torch.relu(x)\n"
    )
    code = "import my_net\nfrom fedveil.models.fingerprint import fingerprint\nprint(*fingerprint(my_net.Net()))"
    found = {
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(found) == 1 and found.pop().endswith("True\n")
