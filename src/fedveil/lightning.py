"""A LightningModule made private: its optimiser takes noised gradients, its batches are drawn as the ledger says.

    from fedveil.lightning import PrivateModule
    model = PrivateModule(MyModule(), loader, epsilon=2.0, epochs=3, out="runs/mine")
    Trainer(max_epochs=3, accelerator="cpu").fit(model)

Needs the package pytorch-lightning (or lightning).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from fedveil.api import make_private
from fedveil.errors import UserError

try:
    from pytorch_lightning import LightningModule
except ModuleNotFoundError:
    try:
        from lightning.pytorch import LightningModule  # type: ignore[no-redef]
    except ModuleNotFoundError:
        raise UserError("fedveil.lightning needs PyTorch Lightning: pip install pytorch-lightning") from None


class PrivateModule(LightningModule):
    """`inner` trained with the options of `fedveil.make_private`. Its `training_step(batch, index)` is called with batches of one
    example and returns the loss; what it logs there is private and dropped. It has one optimiser.

    Formal guarantee: that of `Private.backward`.
    """

    def __init__(self, inner: LightningModule, loader: DataLoader, **options: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.inner = inner
        optimizer = inner.configure_optimizers()
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError("PrivateModule: configure_optimizers must return one optimiser, and nothing else.")
        self.private = make_private(inner, optimizer, loader, loss=_loss, **options)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.private.optimizer

    def train_dataloader(self) -> Any:
        return self.private.loader

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch  # it has to stay the batch that was drawn

    def training_step(self, batch: object, batch_idx: int) -> None:
        self.private.backward(batch)
        self.private.optimizer.step()  # not through Lightning, which passes a closure

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.inner(*args, **options)


def _loss(inner: Any, batch: Any) -> torch.Tensor:
    inner.log = inner.log_dict = lambda *_args, **_options: None
    found = inner.training_step(batch, 0)
    return found["loss"] if isinstance(found, dict) else found
