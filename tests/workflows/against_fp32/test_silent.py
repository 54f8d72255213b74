"""Sickness that stays finite, each with a healthy twin: updates, averages, flushed gradients, absorbed overflows."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from ampdoctor.workflows.trials import NO_SCALER

FILE = Path(__file__).with_name("silent_runs.py")


def replay(function, *, steps=3, **arguments):
    return bisect_nan(ReplayRequest(factory=f"{FILE}:{function}", arguments=arguments, steps=steps))


@pytest.mark.parametrize(("optimizer", "precision"), [("sgd", "fp16"), ("adamw", "bf16"), ("adafactor", "bf16")])
def test_updates_that_round_away(optimizer, precision):
    report = replay("pure_half", optimizer=optimizer, lr=1e-7, precision=precision)
    finding = report.findings[0]
    assert (finding.code, finding.cause, finding.severity) == ("AMP501", "optimizer_precision", "error")
    assert finding.evidence["stalled_fraction"] > 0.75
    assert (finding.prescription.kind, finding.prescription.status) == ("dtype", "verified")


@pytest.mark.parametrize(("optimizer", "lr", "precision"), [("sgd", 0.1, "fp16"), ("adafactor", 1e-2, "bf16")])
def test_updates_that_arrive(optimizer, lr, precision):
    report = replay("pure_half", optimizer=optimizer, lr=lr, precision=precision)
    assert (report.verdict, report.findings) == ("healthy", ())


@pytest.mark.parametrize(("precision", "lr"), [("bf16", 1e-5), ("fp16", 1e-7)])
def test_half_copies_that_stay_while_their_fp32_masters_move(lr, precision):
    report = replay("pure_half", optimizer="adamw", lr=lr, precision=precision, master_weights=True)
    assert (report.verdict, report.findings) == ("healthy", ())


@pytest.mark.parametrize(("precision", "master_weights"), [("bf16", False), ("fp16", True)])
def test_a_frozen_average(precision, master_weights):
    report = replay("averaged", steps=6, decay=0.9999, precision=precision, master_weights=master_weights)
    finding = report.findings[0]
    assert (finding.code, finding.where.op) == ("AMP508", "aten.lerp_")
    assert finding.where.module.startswith("ema.module")
    cure = finding.prescription
    assert (cure.kind, cure.value, cure.status) == ("dtype", "float32", "verified")
    assert cure.alternatives[0].kind == "fp32_modules"
    assert "cannot run" in cure.alternatives[0].reason, "the user's own lerp refuses two formats"


@pytest.mark.parametrize(("decay", "precision"), [(0.5, "bf16"), (0.9999, "fp32")])
def test_an_average_that_moves(decay, precision):
    report = replay("averaged", steps=6, decay=decay, precision=precision)
    assert (report.verdict, report.findings) == ("healthy", ())


def test_flushed_gradients():
    report = replay("small_loss", factor=1e-6, scale=None)
    finding = report.findings[0]
    assert (finding.code, finding.where.op, finding.where.phase) == ("AMP301", "aten._to_copy", "backward")
    assert finding.evidence["zeroed_grad_fraction"] > 0.9
    assert (finding.prescription.kind, finding.prescription.status) == ("scaler", "verified")


UNSCALED = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters())
def run(steps):
    for _ in range(steps):
        x, y = torch.randn(64, 32), torch.randint(4, (64,))
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = 1e-5 * nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
"""
ITS_LOOP = """
run(8)
"""
ITS_FACTORY = """
def make():
    import ampdoctor
    step = lambda model, batch, optimizer, scaler: run(1)
    return ampdoctor.TrainingRun(model=model, batches=range(8), optimizer=optimizer, step=step, precision="fp16")
"""


@pytest.mark.parametrize(("end", "target"), [(ITS_LOOP, "train.py"), (ITS_FACTORY, "train.py:make")])
def test_a_scaler_that_the_step_does_not_use_was_not_tried(tmp_path, monkeypatch, end, target):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(UNSCALED + end)
    report = bisect_nan(ReplayRequest(factory=target, steps=3))
    cure = report.findings[0].prescription
    assert (cure.kind, cure.value, cure.status) == ("dtype", "bfloat16", "verified")
    (scaler,) = cure.alternatives
    assert (scaler.kind, scaler.status) == ("scaler", "not_run")
    assert scaler.reason == NO_SCALER
    assert scaler.proof.changed == (), "what was not tried has no steps"


def test_no_scaler_is_tried_where_it_would_refuse_the_gradients():
    report = replay("small_loss", factor=1e-6, scale=None, half=True)
    (finding,) = (one for one in report.findings if one.code == "AMP301")
    assert (finding.prescription.kind, finding.prescription.value) == ("dtype", "bfloat16")
    assert [one.kind for one in finding.prescription.alternatives if one.kind == "scaler"] == []


@pytest.mark.parametrize(("factor", "scale"), [(1e-6, 2.0**20), (1.0, 1024.0)])
def test_gradients_that_are_scaled(factor, scale):
    report = replay("small_loss", factor=factor, scale=scale)
    assert (report.verdict, report.findings) == ("healthy", ())


def test_a_run_with_state_that_no_snapshot_holds_is_not_compared():
    report = replay("small_loss", factor=1e-6, scale=None, hidden=True)
    assert (report.verdict, [one.code for one in report.findings]) == ("healthy", ["AMP901"])
    assert report.checks[-1].result == "not_run"
    (left_out,) = (one for one in report.skipped if one.what == "comparison with fp32")
    assert left_out.reason.endswith("the run keeps state that no snapshot holds")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_chaos_is_no_sickness(precision):
    report = replay("chaotic", precision=precision)
    assert (report.verdict, report.findings) == ("healthy", ())
    check = report.checks[-1]
    assert check.headroom["largest_gradient_error"] > 0.1
    assert check.headroom["steps_as_far_by_rounding_alone"] == 3


def test_chaos_is_looked_at_once():
    report = replay("few_pictures")
    assert (report.verdict, report.findings) == ("healthy", ())
    assert report.checks[-1].headroom["steps_as_far_by_rounding_alone"] == 3
    # each step and its twin, the first once more to see that it comes back, and what looks closely at the first
    assert report.run["replays"] - report.run["steps"] * 2 <= 10
