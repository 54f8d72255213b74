"""Runs with a failure that somebody lives with, and with another one behind it."""

from __future__ import annotations

import torch
from torch import nn

from ampdoctor import TrainingRun

STEPS = 8


def _run(model, loss, *, known=STEPS, precision="fp16", lr=1e-3):
    """The batch of the step `known` has a share of -1, of which there is no logarithm: the scaler skips it."""
    generator = torch.Generator().manual_seed(3)
    shares = [torch.tensor(-1.0 if step == known else 1.0) for step in range(STEPS)]
    batches = [(torch.randn(8, 16, generator=generator), shares[step], step) for step in range(STEPS)]
    scaler = {"init_scale": 1024.0} if precision == "fp16" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return TrainingRun(
        model=model, batches=batches, loss=loss, optimizer=optimizer, precision=precision, scaler=scaler, autocast=True
    )


def _model():
    torch.manual_seed(0)
    return nn.Linear(16, 4)


def _loss(new):
    def loss(model, batch):
        values, share, step = batch
        result = model(values).float().pow(2).mean() * (1.0 + torch.log(share))
        if step >= new:
            result = result * torch.sqrt(result * 0.0 - 1.0)
        return result

    return loss


def known():
    """A NaN in step 1, nothing else."""
    return _run(_model(), _loss(STEPS), known=1)


def known_and_new():
    """The same, and another one from step 6 on."""
    return _run(_model(), _loss(6), known=1)


def new():
    """The other one alone."""
    return _run(_model(), _loss(6))


def deadly():
    """Without a scaler the first one ruins the weights."""
    return _run(_model(), _loss(6), known=1, precision="bf16")


def raising():
    """The loop itself raises at the first one."""
    inner = _loss(6)

    def loss(model, batch):
        result = inner(model, batch)
        if not result.isfinite():
            raise FloatingPointError("the loss is not finite")
        return result

    return _run(_model(), loss, known=1)


def impossible():
    """A running variance below zero, which only an evaluation would use, and a NaN in step 6."""
    model = nn.Sequential(_model(), nn.BatchNorm1d(4))
    model[1].running_var[0] = -0.5
    return _run(model, _loss(6))


def ruined():
    """Weights that are NaN before step 0."""
    model = _model()
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    return _run(model, _loss(STEPS), precision="bf16")


class _Counting(nn.Module):
    """Its count of calls is in no snapshot: the third step of a process is another than that of a replay."""

    def __init__(self):
        super().__init__()
        self.linear = _model()
        self.calls = iter(range(1000))

    def forward(self, values):
        return self.linear(values) * (float("nan") if next(self.calls) == 1 else 1.0)


def hidden():
    """A NaN in step 1 that no snapshot brings back."""
    return _run(_Counting(), _loss(6))
