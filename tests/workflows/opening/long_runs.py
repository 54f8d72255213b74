"""Long runs that turn bad late, whose own code notices it, or whose log says that they fail."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from ampdoctor import TrainingRun

COUNTED = []
"""The step of each forward, over all replays."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.drop(self.first(x).relu()))


class Masked(nn.Module):
    """A leaf that writes a mask into its scores."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return x.masked_fill(torch.tensor([True, False]), self.value or torch.finfo(x.dtype).min)


def plain_loss(model, x):
    COUNTED.append(1)
    return model(x).float().square().mean()


def run(steps, *, bad=-1, loss=None, **changes):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(6, 4, generator=generator) for _ in range(steps)]
    if bad >= 0:
        batches[bad][:, 0] = -3.0e4  # times a weight or two beyond fp16

    given = {
        "model": Net(),
        "batches": batches,
        "loss": loss or plain_loss,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
        "scaler": {"init_scale": 16.0},
        **changes,
    }
    return TrainingRun(**given)


def large_at(bad: int, steps: int = 120):
    """One batch drives an activation out of fp16 at step `bad`; without a scaler the weights are lost."""

    def loss(model, x):
        COUNTED.append(1)
        wide = model(x) * (x[0, 0] < -1e4).to(torch.float16).mul(60.0).add(1.0)
        return wide.float().square().mean()

    return run(steps, bad=bad, loss=loss, scaler=None)


def healthy(steps: int = 8, *, mask: float | None = None, masked: bool = False, precision: str = "fp16"):
    made = run(steps, precision=precision)
    if masked:
        made.model = nn.Sequential(made.model, Masked(mask))
        made.loss = lambda model, x: functional.cross_entropy(
            model(x).float(), torch.ones(len(x), dtype=torch.long), label_smoothing=0.0
        )
    return made


def shuffled(steps: int = 40):
    """Large batches from a shuffling loader without a generator of its own."""
    made = run(1)
    generator = torch.Generator().manual_seed(2)
    data = torch.randn(steps * 6, 4, generator=generator)
    made.batches = DataLoader(data, batch_size=6, shuffle=True)
    return made


def skips(steps: int = 60):
    """A scaler that starts far too high."""
    return run(steps, scaler={"init_scale": 2.0**30})


def guarded(how: str, bad: int = 2, steps: int = 5):
    """The user's own step looks at its loss and ends the program."""

    def check(loss, model):
        if how == "assert":
            assert torch.isfinite(loss), f"the loss is {loss}"
        elif how == "weights" and not all(p.isfinite().all() for p in model.parameters()):
            raise RuntimeError("weights are gone")

    def step(model, batch, optimizer, autocast, step):
        optimizer.zero_grad()
        with autocast():
            gap = (batch[0, 0] + 3.0e4).abs().clamp(max=1.0)
            loss = model(batch).float().square().mean() + torch.log(gap)
        if how != "weights":
            check(loss, model)
        loss.backward()
        if how == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        check(loss, model)
        return loss

    return run(steps, bad=bad, loss=None, step=step, scaler=None, scheduler=None)


def mistaken(where: str):
    """A mistake of the user's own in a step that is well, though it reads infinities that were meant."""

    def loss(model, x):
        scores = model(x).float().masked_fill(torch.tensor([True, False]), -math.inf)
        if bool((scores == -math.inf).all()):
            return scores.sum()
        if where == "loss":
            raise LookupError("a mistake")
        return scores.softmax(-1).square().mean() + model(x).float().square().mean()

    def after_step(run, step):
        if where == "after_step":
            raise LookupError("a mistake")

    return run(4, loss=loss, after_step=after_step, scaler={"init_scale": 2.0**34})
