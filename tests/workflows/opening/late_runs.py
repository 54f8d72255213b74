"""Trainings that fail late, by hand and as factories: what comes after their checkpoint is known from the loop."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ampdoctor import TrainingRun
from ampdoctor.hooks.nested import copy_batch
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.precision.fp16_matmul import half_products


class Numbered(Dataset):
    """Rows with their numbers, so that a batch says which rows it holds; counts how many it was asked for."""

    loaded = 0

    def __init__(self, rows, bad=None):
        self.values = torch.randn(rows, 8, generator=torch.Generator().manual_seed(11))
        if bad is not None:
            self.values[bad] = 1e5

    def __len__(self):
        return len(self.values)

    def __getitem__(self, row):
        Numbered.loaded += 1
        return row, self.values[row]


class Net(nn.Module):
    """Its gain grows by nearly the same in each step, until what it scales is beyond fp16."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop, self.outer = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4, bias=False)

    def forward(self, values):
        return self.outer(self.drop(torch.tanh(self.inner(values))))


def loss_of(model, batch):
    return -model(batch[1]).float().mean(dim=1).abs().mean()


@dataclass
class Parts:
    """What a training is made of.

    Attributes:
        rate: The learning rate, which decides when the gain is too large.
        rows: Rows of the data; with 60 an epoch has 15 batches.
        bad: A row that no fp16 holds; None: none.
    """

    rate: float
    rows: int = 60
    bad: int | None = None
    accumulation: int = 1
    workers: int = 0
    model: nn.Module = field(init=False)

    def __post_init__(self):
        torch.manual_seed(5)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate, momentum=0.5)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 50))
        order = torch.Generator().manual_seed(3)
        data = Numbered(self.rows, self.bad)
        self.loader = DataLoader(data, batch_size=4, shuffle=True, generator=order, num_workers=self.workers)


def make_run(**options):
    parts = Parts(**options)
    return TrainingRun(
        model=parts.model,
        batches=parts.loader,
        loss=loss_of,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        scaler={"init_scale": 2.0, "growth_interval": 100_000},
        accumulation_steps=parts.accumulation,
    )


@dataclass
class Trained:
    """What a loop by hand has gone through.

    Attributes:
        steps: The batches of each step.
        losses: The loss of each step.
        failed: The first step whose loss is not finite, or that is skipped; None if there was none.
    """

    steps: list = field(default_factory=list)
    losses: list = field(default_factory=list)
    failed: int | None = None


@contextmanager
def as_on_a_gpu():
    with autocast_policy("cuda"), half_products():
        yield


def train(steps, save_at, file, **options):
    """Train by hand, save the checkpoint after `save_at` steps, and stop at the first step that fails."""
    parts, trained = Parts(**options), Trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=100_000)
    batches, epochs = iter(parts.loader), 1
    with as_on_a_gpu():
        while len(trained.steps) < steps:
            taken, total = [], 0.0
            parts.optimizer.zero_grad(set_to_none=True)
            for _ in range(parts.accumulation):
                batch = next(batches, None)
                if batch is None:
                    batches, epochs = iter(parts.loader), epochs + 1
                    batch = next(batches)
                taken.append(copy_batch(batch))
                with torch.autocast("cpu", torch.float16):
                    loss = loss_of(parts.model, batch) / parts.accumulation
                scaler.scale(loss).backward()
                total += float(loss.detach())
            scaler.step(parts.optimizer)
            scaler.update()
            parts.scheduler.step()
            trained.steps.append(taken)
            trained.losses.append(total)
            if not torch.isfinite(torch.tensor(total)):
                trained.failed = len(trained.steps) - 1
                return trained
            if len(trained.steps) == save_at:
                torch.save(
                    {
                        "model": parts.model.state_dict(),
                        "optimizer": parts.optimizer.state_dict(),
                        "scheduler": parts.scheduler.state_dict(),
                        "scaler": scaler.state_dict(),
                        "step": save_at,
                        "rng_state": torch.get_rng_state(),
                    },
                    file,
                )
    return trained
