"""MiniLM with LoRA on SST-2 at epsilon 2: a few sentences, or with --full the run of docs/models.md."""

import argparse

import numpy as np
import torch
from torch import nn

import fedveil as fv
from fedveil.models import backbones, features, minilm

parser = argparse.ArgumentParser()
parser.add_argument("--full", action="store_true", help="all 6,920 training and 1,821 test texts")
parser.add_argument("--rounds", type=int, default=12, help="of the full run")
parser.add_argument("--no-noise", action="store_true", help="the control: the same steps and the same clip without noise")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", help="folder of the run (default: a temporary one)")
chosen = parser.parse_args()
try:
    folder = backbones.minilm_folder()
    from safetensors.torch import load_file

    texts = fv.load("sst2") if chosen.full else fv.load("sst2", limit=40, limit_test=16)
    data = features.apply(texts, "tokens:length=48")
except fv.UserError as missing:
    raise SystemExit(print(f"skipped: {missing}")) from None
public = minilm.from_tensors(load_file(folder / "model.safetensors"))


@torch.no_grad()
def before_adapters(rows: np.ndarray) -> np.ndarray:
    """The first four blocks are frozen: once for each text alone, [n, 48, 385]; the last column is 1 for real tokens."""
    found = []
    for tokens in torch.as_tensor(rows).long().split(32):
        real = (tokens != 0).float()
        x = public.norm(public.words(tokens) + public.places(torch.arange(tokens.shape[1])) + public.segment)
        for block in public.blocks[:4]:
            x = block(x, real[:, None, None, :])
        found.append(torch.cat([x, real[:, :, None]], 2).numpy())
    return np.concatenate(found)


class LastBlocks(nn.Module):
    """The rest of MiniLM, and a linear head that starts at zero on embeddings of length 30: one learning rate fits both."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = public.blocks[4:], nn.Linear(384, 2, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, real = x[:, :, :-1], (x[:, :, -1] > 0.5).to(x.dtype)
        for block in self.blocks:
            x = block(x, real[:, None, None, :])
        pooled = (x * real[:, :, None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
        return self.head(30 * nn.functional.normalize(pooled, dim=1))


net = fv.lora(LastBlocks(), rank=4, alpha=32, layers=("query", "value"), also=("head",), seed=chosen.seed)
start = {name: value.clone() for name, value in net.state_dict().items()}
data = fv.dataset(before_adapters(data.x), data.y, before_adapters(data.x_test), data.y_test, classes=2, name="sst2-blocks")
budget = {"sigma": 1e-9} if chosen.no_noise else {"target_epsilon": 2, "calibrate": True}
rounds = chosen.rounds if chosen.full else 2
result = fv.run(
    "sum-cdp", data=data, model=net, clients=10, partition="iid", sampling="full", cohort="all", rounds=rounds, local_steps=1,
    batch_size=len(data.y) / 10, learning_rate=0.1, clip_bound=6.0, average=0.3, evaluate_every=rounds, delta=1e-5,
    seed=chosen.seed, out=chosen.out, **budget,
)  # fmt: skip
fv.check_training(start, result.module)
print(sum(p.numel() for p in net.parameters() if p.requires_grad), "weights travel")
print("test accuracy", result.accuracy, "sound epsilon of an example before the server", result.epsilon())
