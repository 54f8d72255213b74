"""Steps that a scaler skips in a row, in the middle of a run: because of their size, or at every scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

TINY = 2.0**-24


def run(odd=(), factor=1.0, init=1024.0, steps=7, *, divided=False):
    """In its odd batches the loss is larger, or a quotient has a derivative of 1 / TINY, beyond fp16 at every scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    generator = torch.Generator().manual_seed(1)

    def loss(model, batch):
        number, x = batch
        y = model(x)
        if number in odd and divided:
            y = y * (TINY / (y * 0 + TINY))
        return (factor if number in odd else 1.0) * y.float().square().mean()

    return TrainingRun(
        model=model,
        batches=[(number, torch.randn(8, 8, generator=generator)) for number in range(steps)],
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp16",
        autocast=True,
        scaler={"init_scale": init},
    )


@pytest.mark.parametrize("arguments", [{"odd": (2, 3, 4)}, {"odd": (0, 1, 2)}])
def test_three_steps_that_no_scale_would_have_taken_are_sick_though_others_follow(arguments):
    report = bisect_nan(ReplayRequest(factory=run, arguments={**arguments, "divided": True}))
    assert report.verdict == "sick"
    (finding,) = report.findings
    assert (finding.severity, finding.where.phase, finding.where.step) == ("error", "backward", arguments["odd"][0])
    assert finding.prescription.verified


@pytest.mark.parametrize("arguments", [{"odd": (2, 3, 4), "factor": 1e5}, {"odd": (2, 3), "divided": True}])
def test_steps_that_a_lower_scale_would_have_taken_and_one_or_two_are_a_scaler_at_work(arguments):
    report = bisect_nan(ReplayRequest(factory=run, arguments=arguments))
    assert [finding.message for finding in report.findings] == []
    assert report.verdict == "healthy"
