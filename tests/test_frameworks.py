"""Lightning and Hugging Face loops under `make_private`, with the real packages where they are installed."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedveil.errors import UserError


def test_lightning_trains_under_the_ledger(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
    from fedveil.lightning import PrivateModule

    class Small(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows = TensorDataset(torch.randn(20, 5), torch.randint(0, 2, (20,)))
    model = PrivateModule(Small(), DataLoader(rows, batch_size=5), sigma=1.0, epochs=2, out=tmp_path / "a")
    before = model.inner.layer.weight.detach().clone()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model)
    assert model.private.step == 8 and model.private.epsilon() > 0
    assert not torch.equal(before, model.inner.layer.weight)


def test_a_trainer_trains_under_the_ledger(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from fedveil.huggingface import PrivateTrainer

    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2
    )
    model = transformers.BertForSequenceClassification(config)
    rows = [{"input_ids": torch.randint(0, 20, (6,)), "labels": torch.tensor(i % 2)} for i in range(12)]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"), max_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    privacy = {"sigma": 1.0, "out": tmp_path / "a"}
    trainer = PrivateTrainer(model, args, train_dataset=rows, privacy=privacy)
    before = model.classifier.weight.detach().clone()
    trainer.train()
    assert trainer.private.step == 4 and trainer.private.epsilon() > 0
    assert not torch.equal(before, model.classifier.weight)
    accumulate = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"), gradient_accumulation_steps=2, use_cpu=True, report_to=[]
    )
    with pytest.raises(UserError, match="gradient_accumulation_steps"):
        PrivateTrainer(model, accumulate, train_dataset=rows, privacy=privacy)
