"""Runs whose scaler has settings that GradScaler's constructor accepts."""

from __future__ import annotations

import math

import torch
from torch import nn

from ampdoctor import TrainingRun


class OwnScaler(torch.amp.GradScaler):
    """A subclass, as frameworks have theirs."""


def without_device():
    """On a machine without CUDA, a scaler that warns and switches itself off; a replay is as if there were one."""
    return torch.amp.GradScaler()


SCALERS = {
    "negative": {"init_scale": -1.0},
    "never grows": {"growth_interval": 0},
    "kills": {"backoff_factor": 0.0},
    "infinite": {"init_scale": math.inf},
    "zero": {"init_scale": 0.0},
    "fraction": {"growth_interval": 2.5},
    "bool interval": {"growth_interval": True},
    "explodes": {"growth_factor": math.inf},
    "text": {"init_scale": "65536"},
    "grows back": {"backoff_factor": 2.0},
    "tensor": lambda: torch.amp.GradScaler("cpu", init_scale=torch.tensor(1024.0)),
    "cuda": without_device,
    "disabled": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "subclass": lambda: OwnScaler("cpu"),
    "settled": {"init_scale": 1024.0},
    "other settings": {"growth_interval": 500, "backoff_factor": 0.25},
    "own object": lambda: torch.amp.GradScaler("cpu", growth_interval=500),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def make(name, factor=1.0):
    """A net that hardly moves, whose loss is multiplied by `factor`: 1e5 overflows under a scale of 512 and more."""
    model = net()
    torch.manual_seed(1)
    return TrainingRun(
        model=model,
        batches=[torch.randn(6, 4) for _ in range(8)],
        loss=lambda m, x: m(x).float().square().mean() * factor,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
        scaler=SCALERS[name],
    )
