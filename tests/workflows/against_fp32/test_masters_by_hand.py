"""fp32 masters that the user's own code keeps beside half weights: the half copies may stand still, nothing is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from ampdoctor import TrainingRun
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest


class MasterAdam(torch.optim.Optimizer):
    """Holds half weights in its groups, and their masters and another optimizer as attributes."""

    def __init__(self, parameters, lr):
        super().__init__(list(parameters), {"lr": lr})
        self.halves = [p for group in self.param_groups for p in group["params"]]
        self.master_weights = [p.detach().float().requires_grad_() for p in self.halves]
        self.inner = torch.optim.AdamW(self.master_weights, lr=lr)

    @torch.no_grad()
    def step(self, closure=None):
        for master, half in zip(self.master_weights, self.halves, strict=True):
            master.grad = half.grad.float()
        self.inner.step()
        for master, half in zip(self.master_weights, self.halves, strict=True):
            half.copy_(master)


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).bfloat16()
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(32, 16, generator=generator).bfloat16(), torch.randint(4, (32,), generator=generator))
        for _ in range(8)
    ]
    return model, batches


def wrapped(*, lr: float = 1e-5) -> TrainingRun:
    model, batches = parts()

    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]).float(), batch[1])

    optimizer = MasterAdam(model.parameters(), lr)
    return TrainingRun(
        model=model, batches=batches, loss=loss, optimizer=optimizer, precision="bf16", autocast=False, scaler=None
    )


def flat(*, lr: float = 1e-5) -> TrainingRun:
    """One flat master of all weights (Apex, Megatron)."""
    model, batches = parts()
    halves = list(model.parameters())
    master = torch.cat([p.detach().float().reshape(-1) for p in halves]).requires_grad_()
    optimizer = torch.optim.AdamW([master], lr=lr)

    def step(model, batch, optimizer, scaler):
        model.zero_grad()
        loss = functional.cross_entropy(model(batch[0]).float(), batch[1])
        loss.backward()
        master.grad = torch.cat([p.grad.float().reshape(-1) for p in halves])
        optimizer.step()
        with torch.no_grad():
            for half, part in zip(halves, master.split([p.numel() for p in halves]), strict=True):
                half.copy_(part.view_as(half))
        return loss

    return TrainingRun(
        model=model, batches=batches, step=step, optimizer=optimizer, precision="bf16", autocast=False, scaler=None
    )


def averaged(*, lr: float = 1e-5) -> TrainingRun:
    """Half weights without masters; an fp32 average begins with their values."""
    model, batches = parts()
    average = [p.detach().float() for p in model.parameters()]

    def step(model, batch, optimizer, scaler):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch[0]).float(), batch[1])
        loss.backward()
        optimizer.step()
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.lerp_(p.detach().float(), 1e-3)
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return TrainingRun(
        model=model, batches=batches, step=step, optimizer=optimizer, precision="bf16", autocast=False, scaler=None
    )


def replay(name):
    return bisect_nan(ReplayRequest(factory=f"{__file__}:{name}"))


@pytest.mark.parametrize("name", ["wrapped", "flat"])
def test_half_copies_of_masters_that_move_are_well(name):
    report = replay(name)
    assert (report.verdict, report.findings) == ("healthy", ())


def test_an_fp32_average_is_no_master():
    assert [(f.code, f.severity) for f in replay("averaged").findings] == [("AMP501", "error")]
