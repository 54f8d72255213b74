"""Runs whose callbacks raise at a given call: for a look at what a replay leaves behind."""

from __future__ import annotations

from queue import SimpleQueue

import torch
from torch import nn

from ampdoctor import TrainingRun

LAST = []
"""The runs that the factory made."""
CALLBACKS = (
    "loss",
    "forward",
    "optimizer",
    "after_step",
    "move",
    "batches",
    "next batch",
    "factory",
    "make_optimizer",
    "scheduler",
    "scaler",
)
CALLS = {callback: SimpleQueue() for callback in CALLBACKS}
"""As many items as each callback has had calls, over all runs: of a kind that no snapshot puts back."""
PLAN = {"callback": None, "at": -1, "error": None}
"""Which callback raises what, at which of its calls."""


def reset(callback=None, at=-1, error=None):
    LAST.clear()
    for calls in CALLS.values():
        while not calls.empty():
            calls.get_nowait()
    PLAN.update(callback=callback, at=at, error=error)


def called(callback):
    CALLS[callback].put(None)
    count = CALLS[callback].qsize() - 1
    if callback == PLAN["callback"] and count == PLAN["at"]:
        raise PLAN["error"]


class Model(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.factor = factor

    def forward(self, x):
        called("forward")
        return self.outer(self.norm(self.inner(x)) * self.factor)


def loss(model, x):
    value = model(x).float().square().mean()
    called("loss")
    return value


class Watched(torch.optim.Adam):
    def step(self, closure=None):
        super().step(closure)
        called("optimizer")


def make_run(factor: float = 1.0, steps: int = 3, **options):
    called("factory")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    data = [torch.randn(4, 3, generator=generator) for _ in range(steps)]
    model = Model(factor)
    optimizer = Watched(model.parameters(), lr=1e-3)

    def batches():
        called("batches")
        for batch in data:
            called("next batch")
            yield batch

    def move(batch, device):
        called("move")
        return batch.to(device)

    def after_step(run, step):
        called("after_step")

    def make_scheduler(optimizer):
        called("scheduler")
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def make_scaler():
        called("scaler")
        return torch.amp.GradScaler("cpu", init_scale=16.0)

    def make_optimizer(_):
        called("make_optimizer")
        return optimizer

    given = {
        "model": model,
        "batches": batches,
        "loss": loss,
        "optimizer": make_optimizer,
        "scheduler": make_scheduler,
        "scaler": make_scaler,
        "move": move,
        "after_step": after_step,
        **options,
    }
    LAST.append((TrainingRun(**given), optimizer))
    return LAST[-1][0]


def without_trainable_parameters():
    run = make_run()
    return TrainingRun(
        model=run.model.requires_grad_(requires_grad=False),
        batches=run.batches,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        scaler={},
    )


def frozen_and_overflowing():
    run = make_run(factor=1e39)
    return TrainingRun(model=run.model.requires_grad_(requires_grad=False), batches=run.batches, loss=loss)


def detached_loss():
    return make_run(loss=lambda model, x: loss(model, x).detach())


def half_of_its_own():
    """Pure half: another precision casts the model."""
    return make_run(autocast=False, scaler=None)
