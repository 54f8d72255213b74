"""Gradients as the optimizer gets them, also of parameters that it is given while a step runs."""

from __future__ import annotations

import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.probes.gradients import GradientProbe
from ampdoctor.replay.session import Session
from tests.probes.traced import stepped


def make_run():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    temperature = nn.Parameter(torch.ones(()))

    def step(batch):
        if len(optimizer.param_groups) == 1:  # a temperature that is no part of the model
            optimizer.add_param_group({"params": [temperature]})
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (temperature * model(batch).float()).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    batches = [torch.randn(3, 4) for _ in range(3)]
    return TrainingRun(model=model, batches=batches, optimizer=optimizer, step=step, precision="bf16")


def test_a_group_that_a_step_adds_has_names():
    session, probe = Session(make_run(), device=torch.device("cpu")), GradientProbe()
    stepped(session, probe)
    assert set(probe.gradients) > {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert len(probe.gradients) == 5
    session.close()
