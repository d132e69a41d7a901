"""A Trainer of Hugging Face `transformers` that trains privately.

    from fedveil.huggingface import PrivateTrainer
    trainer = PrivateTrainer(model, args, train_dataset=rows, privacy={"epsilon": 4.0, "out": "runs/mine"})
    trainer.train()
    print(trainer.private.epsilon())

Needs the packages transformers and accelerate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from fedveil.api import make_private
from fedveil.errors import UserError
from fedveil.federation.own_loop import Private, PrivateLoader

try:
    import accelerate  # noqa: F401  (a Trainer cannot be built without it)
    from transformers import Trainer
except ModuleNotFoundError as missing:
    raise UserError(f"fedveil.huggingface needs the package '{missing.name}': pip install transformers accelerate") from None


class PrivateTrainer(Trainer):
    """A Trainer whose gradients come from `fedveil.make_private`. privacy: its options (epsilon, delta, recipe, sigma, out, …).

    The number of steps is `args.max_steps`, or epochs of the Trainer's batch size. Gradients are never clipped or accumulated
    afterwards: that is the noised sum's business. The data collator is called with one row at a time for their gradients, so that
    padding couples none. The losses in the Trainer's log are computed from private rows: keep them.

    Formal guarantee: that of `Private.backward`, per example of the training set.
    """

    def __init__(self, *args: object, privacy: dict[str, object], **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        if self.args.gradient_accumulation_steps != 1 or self.args.n_gpu > 1:
            raise UserError("PrivateTrainer: set gradient_accumulation_steps = 1 and one device; raise the batch size instead.")
        self.args.max_grad_norm = 0.0
        self.privacy = privacy
        self.private: Private | None = None

    def get_train_dataloader(self) -> PrivateLoader:  # type: ignore[override]
        if self.private is None:
            loader: DataLoader = DataLoader(
                self.train_dataset,  # type: ignore[arg-type]
                batch_size=self.args.train_batch_size, collate_fn=self.data_collator
            )
            self.create_optimizer()
            assert self.model is not None and self.optimizer is not None
            length = {"steps": self.args.max_steps} if self.args.max_steps > 0 else {"epochs": int(self.args.num_train_epochs)}
            settings = {"loss": _loss, **length, **self.privacy}
            self.private = make_private(self.model, self.optimizer, loader, **settings)  # type: ignore[arg-type]
        return self.private.loader

    def training_step(self, model: torch.nn.Module, inputs: object, num_items_in_batch: object = None) -> torch.Tensor:
        model.train()
        assert self.private is not None
        return torch.tensor(self.private.backward(inputs))


def _loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    device = next(model.parameters()).device
    return model(**{name: value.to(device) for name, value in batch.items()}).loss
