"""Optimizer state that training in fp32 never leaves behind, with the replay of its repair; healthy look-alikes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest


class Tagger(nn.Module):
    """Tokens 8 to 31 of its vocabulary never come."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(32, 8), nn.Linear(8, 4)

    def forward(self, ids):
        return self.head(torch.tanh(self.tokens(ids)))


def batches(seed, count):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(0, 8, (16,), generator=generator)
        yield ids, ids % 4


def loss(model, batch):
    ids, tags = batch
    return 0.02 * functional.cross_entropy(model(ids).float(), tags)


def fresh(kind, **settings):
    torch.manual_seed(0)
    model = Tagger()
    return model, kind(model.parameters(), lr=1e-3, **settings)


def found(folder, kind, spoil=lambda state: None, steps=3, **settings):
    """What is found in a checkpoint after 30 steps in fp32, with each parameter's state spoiled."""
    model, optimizer = fresh(kind, **settings)
    for batch in batches(1, 30):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    state = optimizer.state_dict()
    for one in state["state"].values():
        spoil(one)
    path = folder / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": state}, path)

    def factory():
        model, optimizer = fresh(kind, **settings)
        return TrainingRun(
            model=model,
            batches=list(batches(2, steps)),
            loss=loss,
            optimizer=optimizer,
            precision="bf16",
            autocast=True,
        )

    return bisect_nan(ReplayRequest(factory=factory, checkpoint=str(path)))


def through_half(state):
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = state[key].half().float()


def counted(steps, dtype):
    def spoil(state):
        state["step"] = torch.tensor(float(steps)).to(dtype)

    return spoil


def test_second_moments_that_went_through_fp16_are_begun_anew(tmp_path):
    (finding,) = found(tmp_path, torch.optim.Adam, through_half).findings
    assert (finding.code, finding.severity, finding.cause) == ("AMP502", "error", "bad_checkpoint")
    assert (finding.where.step, finding.prescription.status) == (0, "intervention")


@pytest.mark.parametrize(
    ("dtype", "steps", "severity"), [(torch.bfloat16, 256, "error"), (torch.float16, 2048, "warning")]
)
def test_a_half_counter_that_cannot_go_on_is_counted_in_fp32(dtype, steps, severity, tmp_path):
    (finding,) = found(tmp_path, torch.optim.AdamW, counted(steps, dtype)).findings
    assert (finding.code, finding.severity, finding.where.op) == ("AMP504", severity, "optimizer_state:step")
    assert finding.prescription.status == "intervention"


def test_a_half_counter_that_will_stop_is_a_note(tmp_path):
    report = found(tmp_path, torch.optim.AdamW, counted(30, torch.bfloat16))
    assert [(f.code, f.severity) for f in report.findings] == [("AMP504", "note")]
    assert report.verdict == "healthy"


def test_a_counter_that_stops_during_the_steps_is_told_by_them(tmp_path):
    (finding,) = found(tmp_path, torch.optim.AdamW, counted(255, torch.bfloat16), steps=4).findings
    assert (finding.code, finding.severity, finding.where.step) == ("AMP508", "error", 1)


HEALTHY = {
    "absent tokens have no moments": (torch.optim.Adam, lambda state: None, {}),
    "a maximum divides": (torch.optim.Adam, lambda state: state["exp_avg_sq"].zero_(), {"amsgrad": True}),
    "the second moment forgets first": (torch.optim.Adam, lambda state: None, {"betas": (0.9, 0.1)}),
    "an epsilon that is large": (torch.optim.Adam, through_half, {"eps": 1e-3}),
    "a counter that is widened as it is loaded": (torch.optim.AdamW, counted(256, torch.bfloat16), {"fused": True}),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_state_that_only_looks_odd_is_left_alone(case, tmp_path):
    kind, spoil, settings = HEALTHY[case]
    report = found(tmp_path, kind, spoil, **settings)
    assert [f.message for f in report.findings] == []
    assert report.verdict == "healthy"
