"""A small Hugging Face Trainer, and what it trains on written down at each of its `training_step`s."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from tests.loops.recorder import checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A micro-batch: checksums of its tensors by name, and the loss, bit by bit."""

    batch: tuple[tuple[str, int], ...]
    loss: str


@contextlib.contextmanager
def recording() -> Iterator[list[Seen]]:
    """Write down every `training_step` of whatever Trainer, in whatever loop."""
    seen: list[Seen] = []
    original = transformers.Trainer.training_step

    def noted(trainer, model, inputs, *args, **kwargs):
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        batch = tuple((name, checksum(tensors[name])) for name in sorted(tensors))
        loss = original(trainer, model, inputs, *args, **kwargs)
        seen.append(Seen(batch=batch, loss=float(loss).hex()))
        return loss

    transformers.Trainer.training_step = noted
    try:
        yield seen
    finally:
        transformers.Trainer.training_step = original


class Sums(Dataset):
    """Samples of several lengths of labels, so that averages over tokens and over micro-batches differ."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, 16, (6,), generator=generator)
        labels = ids.clone()
        labels[: index % 5] = -100
        return {"input_ids": ids, "labels": labels}


class Small(nn.Module):
    """A model with dropout that takes the number of items, as those of transformers do."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(8, 16)

    def forward(self, input_ids, labels, num_items_in_batch=None, **_kwargs):
        logits = self.out(self.drop(self.embed(input_ids)))
        total = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        return {"loss": total / (num_items_in_batch or (labels != -100).sum()), "logits": logits}


def make_trainer(folder, *, callbacks=(), dropout=0.1, **arguments):
    """A Trainer on the CPU; the rest are TrainingArguments."""
    torch.manual_seed(0)
    usual = {
        "output_dir": str(folder),
        "max_steps": 12,
        "per_device_train_batch_size": 3,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return Trainer(
        model=Small(dropout),
        args=TrainingArguments(**(usual | arguments)),
        train_dataset=Sums(),
        callbacks=list(callbacks),
    )
