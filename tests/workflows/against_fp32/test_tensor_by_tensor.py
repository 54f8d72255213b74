"""What the total does not show is found by parameter, with a change that feeds it; noise is no hunger."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.requests import ReplayRequest
from ampdoctor.workflows.rerun_step import StepRerun


class Branched(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.body, self.norm = nn.Linear(8, 16, bias=bias), nn.BatchNorm1d(16)
        self.head, self.side = nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.body(x)))
        return self.head(hidden), self.side(hidden)


def make_run(factor, *, scale=None, bias=False):
    torch.manual_seed(0)
    model = Branched(bias)

    def loss(model, x):
        out, side = model(x)
        return out.float().square().mean() + factor * side.float().square().mean()

    return TrainingRun(
        model=model,
        loss=loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        batches=[torch.randn(16, 8) for _ in range(4)],
        precision="fp16",
        scaler=None if scale is None else {"init_scale": scale},
    )


def report_of(factor, **settings):
    return bisect_nan(ReplayRequest(factory=lambda: make_run(factor, **settings), steps=4))


def test_a_branch_behind_a_small_weight_starves_and_a_loss_scale_feeds_it():
    report = report_of(1e-7)
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.cause) == ("AMP304", "error", "grad_underflow")
    assert finding.evidence["parameters"] == ["side.weight", "side.bias"]
    assert finding.evidence["steps"] == [0, 1, 2, 3]
    assert (finding.prescription.kind, finding.prescription.status) == ("scaler", "verified")


@pytest.mark.parametrize(("factor", "scale"), [(1.0, None), (1e-7, 2.0**16), (0.0, None)])
def test_a_branch_that_is_fed_or_has_no_gradient_in_fp32_either_is_healthy(factor, scale):
    report = report_of(factor, scale=scale)
    assert (report.verdict, report.findings) == ("healthy", ())


def test_a_bias_before_a_batch_norm_gets_noise_and_does_not_hunger():
    """Its true gradient is zero; Adam makes full updates of what rounding leaves in fp32."""
    report = report_of(1.0, bias=True)
    assert (report.verdict, report.findings) == ("healthy", ())


class Attention(nn.Module):
    """Attention whose softmax is all but one-hot, as the gain makes it; its key bias has no gradient in theory."""

    def __init__(self, gain):
        super().__init__()
        self.inp, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        with torch.no_grad():
            self.q.weight.mul_(gain)
            self.k.weight.mul_(gain)

    def forward(self, x):
        h = self.inp(x)
        scores = self.q(h) @ self.k(h).transpose(1, 2)
        return self.head((torch.softmax(scores.float(), -1).to(h.dtype) @ self.v(h)).mean(1))


@pytest.mark.parametrize(("gain", "seed"), [(10, 0), (50, 2), (50, 7)])
def test_the_key_bias_of_a_saturated_attention_gets_fp32_s_rounding_and_the_other_parameters_do_not(gain, seed):
    """The weights' last bits alone leave that rounding much as it is with a gain of 50."""

    def make():
        torch.manual_seed(seed)
        model = Attention(gain)
        return TrainingRun(
            model=model,
            loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1]),
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
            batches=[(torch.randn(16, 6, 8), torch.randint(4, (16,)))],
            precision="bf16",
        )

    with open_replay(ReplayRequest(factory=make)) as replay, closing(replay.session()) as session:
        assert session.has_step(0)
        assert StepRerun(session, session.snapshot(), 0).noise() == {"k.bias"}
