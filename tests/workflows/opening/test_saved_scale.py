"""A checkpoint's loss scale that the run does not go on with, because its factory makes a scaler of its own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.opening.request import ReplayRequest

FACTORY = "tests.workflows.opening.test_saved_scale:own_scaler"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def own_scaler():
    model = net()
    return TrainingRun(
        model=model,
        batches=[torch.randn(6, 4) for _ in range(2)],
        loss=lambda m, x: m(x).float().square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        scaler=lambda: torch.amp.GradScaler("cpu", init_scale=1024.0),
    )


@pytest.mark.parametrize(
    ("scale", "code"),
    [(math.inf, "AMP401"), (math.nan, "AMP401"), (2.0**-140, "AMP401"), (32.0, "AMP407"), (1024.0, None)],
)
def test_only_a_living_scale_is_to_be_loaded(scale, code, tmp_path):
    path = tmp_path / "checkpoint.pt"
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    torch.save(
        {"model": net().state_dict(), "scaler": scaler.state_dict() | {"scale": scale, "_growth_tracker": 3}}, path
    )
    report = bisect_nan(ReplayRequest(factory=FACTORY, checkpoint=str(path)))
    assert report.verdict == "healthy"
    assert [finding.code for finding in report.findings] == ([code] if code else [])
    if code == "AMP401":
        (finding,) = report.findings
        assert (finding.severity, finding.where.phase, finding.where.op) == ("warning", "checkpoint", "scaler_state")
        assert "the replay starts at 1024 instead" in finding.message
        assert "load_state_dict" not in finding.help
