"""Private fine-tuning by LoRA: the network stays frozen, adapters of low rank travel; and a check that they do train."""

import torch
from torch import nn

import fedveil as fv

torch.manual_seed(0)
data = fv.load("digits", limit=300, limit_test=100)
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # yours: pre-trained
fv.lora(net, rank=4, layers="1", also=("3",))  # adapters on the first dense layer; the head trains as a whole
before = {name: value.clone() for name, value in net.state_dict().items()}
result = fv.run("fed-cdp-sound", data=data, model=net, clients=4, rounds=2, local_steps=3)
fv.check_training(before, result.module)  # frozen weights stayed, adapters moved
fv.check_gradients(result.module, data.x_test[:20], data.y_test[:20])  # and noise is not all that moved them
print(result.accuracy, result.epsilon(), [name for name, p in net.named_parameters() if p.requires_grad])
