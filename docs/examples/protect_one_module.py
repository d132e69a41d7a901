"""No federation: protect one training loop with the DP-dyn family."""

import numpy as np
import torch

import fedveil as fv

data = fv.load("digits")
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
result = fv.protect(
    model,
    data.x,
    data.y,
    data.x_test,
    data.y_test,
    recipe="dp-dynsigma",
    steps=50,
    batch_size=200,
    learning_rate=0.5,
    out="runs/central",
    report=False,
)
print("accuracy", result.accuracy, "public epsilon", result.epsilon("public", "example"))
np.save("weights.npy", torch.cat([p.detach().reshape(-1) for p in result.module.parameters()]).numpy())
