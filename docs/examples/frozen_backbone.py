"""A frozen public network in front, a small head that trains: only the head is clipped, noised, uploaded and charged."""

import torch
from torch import nn

import fedveil as fv

torch.manual_seed(0)
public = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten())  # yours: trained elsewhere
data = fv.load("digits", limit=400, limit_test=100)
features = fv.backbone(public, name="my-net", licence="MIT", origin="trained on public drawings").apply(data)
result = fv.run("fed-cdp-sound", data=features, model="logistic", clients=4, rounds=2, local_steps=3)
print(features.notes[-1])

whole = nn.Sequential(public.requires_grad_(False), nn.Linear(288, 10))  # or as one module, with augmentation in mind
second = fv.run("fed-cdp-sound", data=data, model=whole, clients=4, rounds=2, local_steps=3)
print(result.accuracy, second.accuracy, second.epsilon())
