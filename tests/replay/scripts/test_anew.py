"""A replay that begins the training loop anew begins with what a round of it makes, as the training does."""

from __future__ import annotations

import contextlib
import io
import runpy

import pytest

from ampdoctor.workflows.opening.open_replay import open_replay
from ampdoctor.workflows.opening.request import ReplayRequest

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
{before}
data = [torch.randn(8, 4) for _ in range(9)]
losses = []


def epoch(number):
    {at_entry}
    for x in data:
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())


for number in range(3):
    epoch(number)
"""
OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)"
SCHEDULER = "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)"


@pytest.mark.parametrize(
    ("before", "at_entry"),
    [
        (f"{OPTIMIZER}; {SCHEDULER}", "pass"),
        (OPTIMIZER, SCHEDULER),
        ("", f"{OPTIMIZER}; {SCHEDULER}"),
    ],
    ids=["made once", "a scheduler in each epoch", "an optimizer in each epoch"],
)
def test_the_rounds_of_a_replay_train_as_the_script_does(tmp_path, before, at_entry):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(before=before, at_entry=at_entry), encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):
        expected = runpy.run_path(str(script))["losses"]
    with open_replay(ReplayRequest(factory=str(script), steps=20)) as replay:
        session = replay.session()
        start = session.snapshot()
        losses = [session.step(step).loss for step in range(20) if session.has_step(step)]
        start.restore()
        again = [session.step(step).loss for step in range(20) if session.has_step(step)]
    assert losses == pytest.approx(expected[:20], rel=1e-6)
    assert again == losses
