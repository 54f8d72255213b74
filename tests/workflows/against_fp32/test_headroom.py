"""An output that heads for the end of fp16 is named before it gets there; a mask in a buffer hides none of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.reports.next_step import next_step
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest


class Net(nn.Module):
    """Its first layer's outputs are large, and a norm behind it makes them small again."""

    def __init__(self, *, mask):
        super().__init__()
        self.wide, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.mask = mask
        with torch.no_grad():
            self.wide.weight.copy_(torch.linspace(-5400.0, 5400.0, 8)[:, None].expand(8, 8))
        self.wide.requires_grad_(False)

    def forward(self, x):
        h = self.norm(self.wide(x))
        if self.mask:
            self.register_buffer("seen", torch.full((8, 8), -math.inf).triu(1), persistent=False)
            h = torch.softmax(h[:, None, :] * 0 + self.seen, -1).mean(1) + h
        return self.head(h)


def made(growth=1.0, *, mask=False, wobble=0.0):
    torch.manual_seed(0)
    model = Net(mask=mask)
    batches = [torch.ones(4, 8) * (1 + wobble * (-1) ** index) for index in range(8)]

    def after_step(run, step):
        with torch.no_grad():
            run.model.wide.weight.mul_(growth)

    return TrainingRun(
        model=model,
        batches=batches,
        optimizer=torch.optim.SGD(model.head.parameters(), lr=0.01),
        loss=lambda net, x: net(x).square().mean(),
        after_step=after_step,
    )


def replay(**arguments):
    return bisect_nan(ReplayRequest(factory=lambda: made(**arguments), compare_steps=1))


def test_a_growth_that_ends_in_an_overflow_is_a_warning():
    report = replay(growth=1.016)
    (finding,) = report.findings
    assert (report.verdict, finding.code, finding.severity) == ("healthy", "AMP307", "warning")
    assert finding.where.module == "wide"
    left = math.log(65504 / finding.evidence["amax"], 1.016)
    assert finding.evidence["passes_in_steps"] == pytest.approx(left, abs=1)
    assert next_step(report).line == "ampdoctor rule AMP307"


@pytest.mark.parametrize("arguments", [{"wobble": 0.05}, {"growth": 0.99}])
def test_outputs_that_are_large_and_stay_so_are_healthy(arguments):
    report = replay(**arguments)
    assert (report.verdict, report.findings) == ("healthy", ())


def test_a_mask_in_a_buffer_hides_no_headroom():
    report = replay(mask=True)
    check = next(check for check in report.checks if check.name == "tightest headroom")
    assert check.headroom["module"] == "wide"
    assert check.headroom["amax"] == pytest.approx(8 * 5400, rel=1e-2)
