"""A model of your own class: residual, GroupNorm, dropout. It needs no change to be trained privately."""

import torch
from torch import nn

import fedveil as fv


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.drop, self.out = nn.GroupNorm(4, 8), nn.Dropout(0.1), nn.Linear(8 * 64, 10)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.relu(x + self.norm(self.second(x)))
        return self.out(self.drop(x.flatten(1)))


data = fv.load("digits", limit=200, limit_test=100)
result = fv.run("fed-cdp-sound", data=data, model=Net(), clients=4, rounds=1, local_steps=3)
print(result.accuracy, result.epsilon())
