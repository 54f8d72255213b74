"""Runs whose verdict hangs on more than one step: what the scaler makes of the first, what fp32 makes of the last."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ampdoctor import TrainingRun


def plain(**changes):
    """Two layers, fp16, and the default scale of 65536, which is one halving too high for the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    given = {
        "model": model,
        "batches": [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(8)],
        "loss": lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters()),
        "scaler": {},
    }
    return TrainingRun(**{**given, **changes})


def without_optimizer():
    return plain(optimizer=None)


def without_optimizer_beyond_every_scale():
    return plain(optimizer=None, loss=lambda model, batch: 1e6 * functional.mse_loss(model(batch[0]), batch[1]))


def diverging(rate=20.0):
    return plain(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=rate))


def broken_weight():
    run = plain()
    with torch.no_grad():
        run.model[2].weight[0, 3] = float("nan")
    return run


def skipping_throughout():
    return plain(scaler={"init_scale": 2.0**40})


def updated_by_hand():
    """After step 2 the user's own code divides a weight by zero; the batch has nothing to do with it."""

    def after(run, step):
        with torch.no_grad():
            weight = run.model[0].weight
            weight.div_(weight.norm() * 0 if step == 2 else 1.0)  # BY HAND

    return plain(precision="bf16", scaler=None, after_step=after)


class Gated(nn.Module):
    """A recurrent cell with an exponential gate beyond fp32 itself; what it gives meets weights again."""

    def __init__(self):
        super().__init__()
        self.forget, self.new, self.gate = (nn.Linear(24, 16) for _ in range(3))
        self.last = nn.Linear(16, 1)

    def forward(self, x, steepness):
        state = torch.zeros(len(x), 16)
        for _ in range(12):
            both = torch.cat([x, state], -1)
            gate = torch.exp(self.gate(both) * steepness)
            state = state * torch.sigmoid(self.forget(both)) + torch.tanh(self.new(both)) * gate / (1 + gate)
        return self.last(state)


def gated():
    torch.manual_seed(0)
    model = Gated()
    batches = [(*batch, 400.0 if step == 2 else 1.0) for step, batch in enumerate(plain().batches)]
    return plain(
        model=model,
        batches=batches,
        loss=lambda model, batch: functional.mse_loss(model(batch[0], batch[2]).float(), batch[1]),
        precision="bf16",
        scaler=None,
    )
