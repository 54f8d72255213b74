"""A checkpoint's loss scale that the run does not go on with, because its factory makes a scaler of its own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

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
    ("scale", "code"), [(math.inf, "AMP401"), (2.0**-140, "AMP401"), (32.0, "AMP407"), (1024.0, None)]
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
        assert "The run starts at 1,024 instead" in finding.message
        assert "load_state_dict" not in finding.help


class Overflowing(nn.Module):
    """Only the product in the middle can be beyond fp16, whatever the loss scale."""

    def __init__(self, weight):
        super().__init__()
        self.inp, self.wide, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        with torch.no_grad():
            self.wide.weight.fill_(weight)

    def forward(self, x):
        return self.head(1e-5 * self.wide(torch.relu(self.inp(x)) + 1))


def collapsing(weight, factor=1e-3, init=65536.0, load=None, *, scaled=True):
    torch.manual_seed(0)
    model = Overflowing(weight)
    scaler = {"init_scale": init} if load is None else lambda: torch.amp.GradScaler("cpu", init_scale=init)
    return TrainingRun(
        model=model,
        batches=[torch.randn(6, 4) for _ in range(3)],
        loss=lambda m, x: factor * m(x).float().square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
        scaler=scaler if scaled else None,
        load=load,
    )


def loaded_by_hand(run, state):
    run.model.load_state_dict(state.model)
    run.scaler.load_state_dict(state.scaler)


def resumed_at(scale, tmp_path, weight=0.1, *, fresh=False, clean=0, **run):
    path = tmp_path / "checkpoint.pt"
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0).state_dict() | {"scale": scale, "_growth_tracker": clean}
    torch.manual_seed(0)
    torch.save({"model": Overflowing(weight).state_dict(), "scaler": scaler}, path)
    arguments = {"weight": weight, **run}
    request = ReplayRequest(factory=collapsing, arguments=arguments, checkpoint=str(path), fresh_scaler=fresh)
    return bisect_nan(request)


SICK = 1e4
"""Sums of eight such weights are beyond 65504."""


def test_from_a_collapsed_scale_the_one_sick_module_is_found_and_the_collapse_is_said(tmp_path):
    report = resumed_at(2.0**-9, tmp_path, SICK, load=loaded_by_hand)
    sick, collapsed = report.findings
    assert (sick.code, sick.where.module, sick.where.nonfinite) == ("AMP201", "wide", "inf")
    assert (sick.prescription.kind, sick.prescription.value) == ("fp32_modules", ["wide"])
    assert sick.prescription.verified
    assert "shown with a fresh scaler at 65536" in sick.prescription.detail
    assert (collapsed.code, collapsed.severity) == ("AMP402", "error")
    assert collapsed.prescription.value == {"init_scale": 65536.0}
    assert "collapsed to 2^-9" in collapsed.message


def made_here(run, state):
    run.model.load_state_dict(state.model)


@pytest.mark.parametrize(
    ("scaled", "said"), [(True, "The run starts at 65,536 instead."), (False, "The run has no scaler.")]
)
def test_a_collapsed_scale_that_is_not_continued_is_not_to_be_loaded(tmp_path, scaled, said):
    report = resumed_at(2.0**-9, tmp_path, clean=5, load=made_here, factor=1.0, scaled=scaled)
    (collapsed,) = report.findings
    assert (report.verdict, collapsed.code, collapsed.severity) == ("healthy", "AMP402", "warning")
    assert "collapsed to 2^-9" in collapsed.message
    assert collapsed.message.endswith(said)
    assert "Do not load" in collapsed.help


def test_a_scale_below_1_that_the_gradients_need_is_to_be_loaded(tmp_path):
    report = resumed_at(2.0**-6, tmp_path, clean=9, load=made_here, factor=1e7)
    (lost,) = report.findings
    assert (lost.code, lost.severity, lost.prescription.verified) == ("AMP407", "error", True)


@pytest.mark.parametrize("load", [None, loaded_by_hand])
def test_a_fresh_scaler_is_the_factorys(tmp_path, load):
    report = resumed_at(2.0**-9, tmp_path, SICK, load=load, fresh=True)
    (sick,) = report.findings
    assert (sick.code, sick.prescription.value, report.scaler.current["scale"]) == ("AMP201", ["wide"], 65536.0)
    assert report.target["options"]["--fresh-scaler"] == []
    assert any("0.00195312 is not loaded (--fresh-scaler)" in one.reason for one in report.skipped)


LOW = {
    "chosen": (1.0, {"init": 1.0}),
    "came down to 1": (1.0, {}),
    "as large as the gradients need": (2.0**-4, {"factor": 1e7}),
}


@pytest.mark.parametrize("case", LOW)
def test_a_low_scale_that_is_right_is_left_alone(tmp_path, case):
    scale, run = LOW[case]
    report = resumed_at(scale, tmp_path, clean=9, **({"factor": 64.0} | run))
    assert [f.message for f in report.findings] == []
    assert report.verdict == "healthy"
