"""A module with embeddings, attention and a mask, as text models have them: token numbers in, classes out."""

import numpy as np

import fedveil as fv
from fedveil.models.minilm import MiniLM

draw = np.random.default_rng(0)
tokens = draw.integers(1, 50, (120, 12)).astype(np.float32)  # 0 would be padding
tokens[:, 9:] = 0
labels = (tokens[:, :9] < 25).sum(1) > 4
data = fv.dataset(tokens[:100], labels[:100].astype(int), tokens[100:], labels[100:].astype(int))
net = MiniLM(words=50, width=16, layers=1, heads=2, inner=32, positions=12, classes=2)
result = fv.run("fed-cdp-sound", data=data, model=net, clients=2, rounds=1, local_steps=3, partition="iid")
print(result.accuracy, result.epsilon())
