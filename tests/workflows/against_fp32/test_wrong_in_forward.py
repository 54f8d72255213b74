"""Finite values that rounding makes wrong: named with the op that rounded, proved, and not confused with rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest


class Sinusoid(nn.Module):
    """A sinusoid of the step number, as diffusion models embed it."""

    def __init__(self, narrow):
        super().__init__()
        self.narrow = narrow
        self.register_buffer("rates", torch.exp(-math.log(50.0) * torch.arange(8) / 8), persistent=False)

    def forward(self, t):
        t = t.to(torch.bfloat16) if self.narrow else t
        return torch.sin(t[:, None] * self.rates)


class Gate(nn.Module):
    """A gate that its bias holds open; its logits come in the compute format."""

    def __init__(self, opened, width=16):
        super().__init__()
        self.value, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.normal_(self.gate.weight, std=0.05)
        nn.init.constant_(self.gate.bias, opened)

    def forward(self, x):
        return torch.sigmoid(self.gate(x)) * torch.tanh(self.value(x))


class Model(nn.Module):
    def __init__(self, middle, width):
        super().__init__()
        self.middle, self.out = middle, nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x):
        return self.out(self.middle(x))


def report_of(middle, batches, width):
    def make():
        torch.manual_seed(0)
        model = Model(middle(), width)
        return TrainingRun(
            model=model,
            loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1]),
            optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
            batches=batches,
            precision="bf16",
        )

    return bisect_nan(ReplayRequest(factory=make, steps=4))


def steps(largest):
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(largest // 2, largest, (16,), generator=generator).float()  # noqa: E731
    return [(draw(), torch.randint(0, 4, (16,), generator=generator)) for _ in range(4)]


def features():
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(32, 16, generator=generator), torch.randint(0, 4, (32,), generator=generator)) for _ in range(4)
    ]


def test_a_timestep_that_a_cast_rounds_is_named_by_the_cast():
    (finding,) = report_of(lambda: Sinusoid(narrow=True), steps(1000), 8).findings
    assert (finding.code, finding.severity, finding.cause) == ("AMP208", "error", "forward_precision")
    assert (finding.where.step, finding.where.phase, finding.where.module) == (0, "forward", "middle")
    assert finding.where.op == "aten._to_copy"
    assert finding.evidence["at_op"] == "aten.sin"
    assert finding.evidence["departs"] > 10 * finding.evidence["rounding"]
    assert finding.prescription.status == "intervention"


@pytest.mark.parametrize(("narrow", "largest"), [(False, 1000), (True, 250)])
def test_the_same_sinusoid_in_fp32_or_over_exact_numbers_is_healthy(narrow, largest):
    report = report_of(lambda: Sinusoid(narrow), steps(largest), 8)
    assert (report.verdict, report.findings) == ("healthy", ())


def test_a_gate_that_rounds_to_one_starves_and_no_scale_is_advised():
    (finding,) = report_of(lambda: Gate(8.0), features(), 16).findings
    assert (finding.code, finding.cause) == ("AMP304", "forward_precision")
    assert (finding.where.phase, finding.where.module, finding.where.op) == ("backward", "middle", "aten.sigmoid")
    assert finding.evidence["parameters"] == ["middle.gate.weight", "middle.gate.bias"]
    assert finding.prescription.verified
    assert "scale" not in finding.prescription.detail


def test_an_open_gate_that_does_not_round_is_healthy():
    report = report_of(lambda: Gate(2.0), features(), 16)
    assert (report.verdict, report.findings) == ("healthy", ())
