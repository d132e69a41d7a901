"""Your own training loop, with a promise: three lines differ from plain PyTorch."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import fedveil as fv

data = fv.load("digits")
rows = TensorDataset(torch.tensor(data.x), torch.tensor(data.y))
loader = DataLoader(rows, batch_size=128)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

private = fv.make_private(model, optimizer, loader, epsilon=4.0, epochs=4, out="runs/own-loop")  # new
for _ in range(4):
    for x, y in private.loader:  # was: loader
        private.backward(x, y)  # was: cross_entropy(model(x), y).backward()
        optimizer.step()

guess = model(torch.tensor(data.x_test)).argmax(1)
print("accuracy", (guess == torch.tensor(data.y_test)).float().mean().item())
print(private)
