"""Models with code of their own through `run`: what they keep of an example is refused, and what rests on their word is said."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.errors import UserError
from fedveil.privacy.ledger import Ledger

ROWS = 200
NOTE = "promises assume that your own code"


class Peak(nn.Module):
    """Divides by the largest value seen so far."""

    def __init__(self, where):
        super().__init__()
        self.where, self.dense = where, nn.Linear(4, 2)
        if where == "attribute":
            self.peak = 1.0
        else:
            self.register_buffer("peak", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            if self.where == "attribute":
                self.peak = max(self.peak, float(x.detach().abs().max()))
            else:
                self.peak.copy_(torch.maximum(self.peak, x.abs().max()))
        return self.dense(x / self.peak)


class Branching(nn.Module):
    """Treats each example alone, but by Python that no trace can follow."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return torch.stack([self.a(row) if float(row.detach().sum()) > 2 else self.b(row) for row in x])


class Gated(nn.Module):
    """Code of its own that is read once and then runs as written down."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.a(x) * torch.sigmoid(self.b(x))


def played(module, folder, first=0.5, **more):
    draw = np.random.default_rng(0)
    x = draw.random((ROWS, 4)).astype(np.float32)
    y = (x[:, 0] > 0.5).astype(int)
    x[0] = first
    settings = {
        "rounds": 1, "clients": 1, "partition": "iid", "batch_size": ROWS, "sampling": "full", "progress": False, "report": False,
        "sigma": 5.0, "clip_bound": 1.0, "learning_rate": 1.0, "seed": 0, **more,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fv.run("sum-cdp", data=fv.dataset(x, y, x[:20], y[:20]), model=module, out=folder, **settings)


@pytest.mark.parametrize("where", ["buffer", "attribute"])
def test_a_model_that_only_an_unusual_example_makes_remember_is_refused_before_any_charge(where, tmp_path):
    with pytest.raises(UserError, match=r"changes a buffer|after others have passed"):
        played(Peak(where), tmp_path / "run", 1e4)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("make", [Gated, Branching])
def test_the_sum_of_a_model_of_ones_own_moves_by_no_more_than_one_example_may(make, tmp_path):
    """Seeded noise, once with an example and once with another in its place: two bounds at most."""
    found = []
    for first in (0.5, 1e4):
        torch.manual_seed(0)
        result = played(make(), tmp_path / str(first), first)
        found.append(np.concatenate([p.detach().numpy().ravel() for p in result.module.parameters()]).astype(np.float64))
    assert 0 < np.linalg.norm(found[0] - found[1]) * ROWS <= 2 * (1 + 1e-4)


@pytest.mark.parametrize(
    ("make", "engine", "told"),
    [(Gated, "graph", False), (Branching, "functional", True), (lambda: nn.Linear(4, 2), "native", False)],
)
def test_the_engine_that_is_named_is_the_one_that_ran_and_own_code_that_it_calls_is_in_notes_and_ledger(
    make, engine, told, tmp_path, monkeypatch
):
    from fedveil.training.torch import functional, graph

    ran = []
    for module, name in ((functional, "functional"), (graph, "graph")):
        monkeypatch.setattr(module, "train", lambda *a, _real=module.train, _name=name, **k: ran.append(_name) or _real(*a, **k))
    result = played(make(), tmp_path / "run")
    assert result.facts["engine"] in ((engine,) if ran else ("native", "stacked")) and set(ran) <= {engine}
    assert ("torch.func" in result.facts["engine_reason"]) == (engine == "functional")
    assert any(NOTE in note for note in Ledger.read(tmp_path / "run" / "ledger.jsonl").header.assumes) == told
    assert (NOTE in (tmp_path / "run" / "run.json").read_text()) == told
