"""State that is wrong before step 0: a replay says of a checkpoint what a scan says of the same file."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.profile import profile
from ampdoctor.workflows.requests import ReplayRequest
from ampdoctor.workflows.scan import scan

SETTINGS = {"init_scale": 1024.0}


def made(loaded=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    run = TrainingRun(
        model=model,
        batches=[torch.randn(6, 4) for _ in range(2)],
        loss=lambda m, x: m(x).float().square().mean(),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        scaler=SETTINGS,
    )
    if loaded is not None:  # as a script that resumes by itself
        run.model.load_state_dict(torch.load(loaded)["model"])
        run.optimizer.load_state_dict(torch.load(loaded)["optimizer"])
    return run


def saved(path, spoil):
    """A checkpoint after two clean steps; `spoil` changes what is saved."""
    run = made()
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    for batch in run.batches:
        run.optimizer.zero_grad()
        run.loss(run.model, batch).backward()
        run.optimizer.step()
    state = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaler": scaler.state_dict() | {"_growth_tracker": 2},
    }
    spoil(state)
    torch.save(state, path)
    return str(path)


def element(section, *keys, value):
    def spoil(state):
        tensor = state[section]
        for key in keys:
            tensor = tensor[key]
        tensor.view(-1)[0] = value

    return spoil


def moments_through_half(state):
    for one in state["optimizer"]["state"].values():
        one["exp_avg_sq"].mul_(0.0)


def counters_in_bf16(state):
    for one in state["optimizer"]["state"].values():
        one["step"] = torch.tensor(256.0, dtype=torch.bfloat16)


def scaler(**values):
    return lambda state: state["scaler"].update(values)


DEFECTS = {
    "healthy": (lambda state: None, []),
    "a weight": (element("model", "0.weight", value=math.nan), [("AMP101", "error")]),
    "a buffer": (element("model", "1.running_mean", value=math.inf), [("AMP102", "error")]),
    "a moment": (element("optimizer", "state", 0, "exp_avg", value=math.nan), [("AMP103", "error")]),
    "a variance": (element("model", "1.running_var", value=-0.5), [("AMP106", "error")]),
    "a variance that epsilon lifts": (element("model", "1.running_var", value=-5e-6), [("AMP106", "warning")]),
    "a square": (element("optimizer", "state", 0, "exp_avg_sq", value=-1e-9), [("AMP106", "error")]),
    "clamped": (element("model", "0.weight", value=65504.0), [("AMP107", "warning")]),
    "flushed": (moments_through_half, [("AMP502", "error")]),
    "counters": (counters_in_bf16, [("AMP504", "error")]),
    "dead": (scaler(scale=0.0), [("AMP401", "error")]),
    "collapsed": (scaler(scale=2.0**-9, _growth_tracker=5), [("AMP402", "error")]),
    "frozen": (scaler(_growth_tracker=2500), [("AMP403", "warning")]),
    "settings": (scaler(backoff_factor=2.0), [("AMP404", "warning")]),
}


def graded(report, only=None):
    return sorted({(f.code, f.severity) for f in report.findings if only is None or f.code in only})


@pytest.mark.parametrize("case", DEFECTS)
def test_a_replay_says_of_a_checkpoint_what_a_scan_says(case, tmp_path):
    spoil, expected = DEFECTS[case]
    path = saved(tmp_path / "checkpoint.pt", spoil)
    scanned, replayed = scan(path), bisect_nan(ReplayRequest(factory=made, checkpoint=path))
    assert graded(scanned) == expected
    assert graded(replayed, {code for code, _ in DEFECT_CODES}) == expected
    assert replayed.verdict == "sick" or all(severity != "error" for _, severity in expected)


DEFECT_CODES = {pair for _, expected in DEFECTS.values() for pair in expected}


def test_a_profile_says_it_too(tmp_path):
    spoil, expected = DEFECTS["a square"]
    path = saved(tmp_path / "checkpoint.pt", spoil)
    report = profile(ReplayRequest(factory=made, checkpoint=path))
    assert graded(report, {code for code, _ in DEFECT_CODES}) == expected


@pytest.mark.parametrize("case", ["a weight", "flushed"])
def test_what_a_factory_loads_by_itself_is_judged_too(case, tmp_path):
    spoil, expected = DEFECTS[case]
    report = bisect_nan(ReplayRequest(factory=made, arguments={"loaded": saved(tmp_path / "checkpoint.pt", spoil)}))
    assert graded(report, {code for code, _ in DEFECT_CODES}) == expected
    assert [(f.where.phase, f.where.step, f.cause) for f in report.findings] == [("checkpoint", 0, "bad_checkpoint")]
