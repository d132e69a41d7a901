"""A model in the style of Hugging Face: token numbers and a mask go in, an object with logits comes out. A wrapper fits it."""

from types import SimpleNamespace

import numpy as np
from torch import nn

import fedveil as fv


class Classifier(nn.Module):  # stands for BertForSequenceClassification(config), with its dropout set to 0
    def __init__(self):
        super().__init__()
        self.embed, self.attend = nn.Embedding(50, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        x = x + self.attend(x, x, x, key_padding_mask=~attention_mask, need_weights=False)[0]
        return SimpleNamespace(logits=self.head((x * attention_mask[..., None]).sum(1) / 9))


class Fitted(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):  # examples are arrays of numbers; 0 is padding
        return self.model(tokens.long(), attention_mask=tokens > 0).logits


draw = np.random.default_rng(0)
tokens = np.pad(draw.integers(1, 50, (120, 9)), ((0, 0), (0, 3))).astype(np.float32)
labels = ((tokens[:, :9] < 25).sum(1) > 4).astype(int)
data = fv.dataset(tokens[:100], labels[:100], tokens[100:], labels[100:])
result = fv.run("fed-cdp-sound", data=data, model=Fitted(Classifier()), clients=2, rounds=1, local_steps=3, partition="iid")
print(result.accuracy, result.epsilon())
