"""Bring your own arrays and your own torch module."""

import numpy as np
import torch

import fedveil as fv

draw = np.random.default_rng(0)
y = draw.integers(0, 3, 600)
x = draw.normal(size=(600, 8)) + 1.5 * y[:, None]
data = fv.dataset(x[:500], y[:500], x[500:], y[500:])
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

result = fv.run(
    "fed-cdp-sound",
    data=data,
    model=model,
    clients=5,
    partition="iid",
    rounds=4,
    local_steps=5,
    batch_size=20,
    learning_rate=0.5,
    sigma=1.0,
    out="runs/own",
    report=False,
)
print(result.accuracy, result.epsilon("server", "example"))
