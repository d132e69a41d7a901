"""MiniLM with LoRA adapters on SST-2, split among clients (a few sentences, to show the way)."""

import fedveil as fv
from fedveil.models import backbones, features, minilm

try:
    weights = backbones.minilm_folder() / "model.safetensors"
    data = features.apply(fv.load("sst2", limit=48, limit_test=16), "tokens:length=24")
except fv.UserError as missing:
    raise SystemExit(print(f"skipped: {missing}")) from None
from safetensors.torch import load_file

net = fv.lora(minilm.from_tensors(load_file(weights), classes=2), rank=4, layers=("query", "value"), also=("head",))
result = fv.run("fed-cdp-sound", data=data, model=net, clients=2, rounds=1, local_steps=1, batch_size=4, partition="iid")
print(result.accuracy, result.epsilon(), sum(p.numel() for p in net.parameters() if p.requires_grad), "weights travel")
