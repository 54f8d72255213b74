"""A training of several processes by a framework: `several.py KIND OUT`, KIND "trainer" or "lightning".

With "+bad" a NaN is in one sample of the data, and so in one rank's batch. Weights, and the number of collectives that
the process group has run, go to `OUT/RANK.pt`.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

kind, out = sys.argv[1].split("+"), Path(sys.argv[2])
torch.manual_seed(0)
inputs, targets = torch.randn(64, 8), torch.randn(64, 4)
if "bad" in kind:
    inputs[37, 2] = float("nan")


def layers():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))


def by_trainer():
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers()

        def forward(self, x, labels):
            return {"loss": nn.functional.mse_loss(self.layers(x), labels)}

    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=3,
        save_strategy="no",
        report_to="none",
    )
    data = [{"x": x, "labels": y} for x, y in zip(inputs, targets, strict=True)]
    model = Model()
    Trainer(model=model, args=arguments, train_dataset=data).train()
    return model


def by_lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = layers()

        def training_step(self, batch, _):
            loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    data = torch.utils.data.TensorDataset(inputs, targets)
    module = Module()
    lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_steps=12,
        gradient_clip_val=1.0,
        log_every_n_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    return module


model = by_trainer() if "trainer" in kind else by_lightning()
count = dist.group.WORLD._get_sequence_number_for_group()
weights = [p.detach().clone() for p in model.parameters()]
torch.save({"weights": weights, "collectives": count}, out / f"{dist.get_rank()}.pt")
