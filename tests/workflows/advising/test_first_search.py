"""A recommendation begins with the search of `bisect-nan`: both commands have one verdict, and one cause."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from ampdoctor import TrainingRun
from ampdoctor.evidence.json_records import to_plain
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.replay.session import Session
from ampdoctor.reports.text import outcome
from ampdoctor.workflows import scale_findings
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.measure import measure
from ampdoctor.workflows.recommend import SCALING, combined, recommend
from ampdoctor.workflows.replay_under_change import observe
from ampdoctor.workflows.requests import ReplayRequest
from tests.corpus.reports import diagnosed, of_case, recommended

SAMPLE = (
    "softmax_then_log",  # NaN in the forward
    "nan_pixel_in_batch",
    "scaler_state_zero_checkpoint",
    "grad_underflow_no_scaler",
    "static_loss_scale_overflow",
    "healthy_initial_scale_skips",
)
SLOW = ("diffusion_timestep_bf16", "no_valid_scale_collapse", "scaler_state_lost_on_resume", "clip_before_unscale")


def told(report):
    return to_plain([report.findings, report.proof, report.path])


@pytest.mark.parametrize("case", [*map(of_case, SAMPLE), *(of_case(case, slow=True) for case in SLOW)])
def test_both_commands_have_one_verdict_and_one_cause(case):
    searched, report = diagnosed(case), recommended(case)
    assert report.verdict == searched.verdict
    other = [finding for finding in searched.findings if finding.severity == "error" and finding.cause not in SCALING]
    if other:
        assert told(report) == told(searched)
    else:
        assert report.profile is not None
        assert {f.cause for f in report.findings if f.severity == "error"} <= SCALING


def squares(model, batch):
    return model(batch).float().square().mean()


def run(*, large=None, steps=3, clip=None):
    """A healthy run; the batch of step `large` makes an output that fp16 does not hold."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    return TrainingRun(
        model=model,
        batches=[torch.randn(6, 8) * (1e6 if step == large else 1.0) for step in range(steps)],
        loss=squares,
        max_grad_norm=clip,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-3),
        scaler={"init_scale": 1024.0, "growth_interval": 2000},
    )


def test_a_failure_after_the_searched_steps_is_searched_for_as_well():
    request = ReplayRequest(factory=lambda: run(large=9, steps=11), device="cpu")
    assert bisect_nan(request).verdict == "healthy"
    report, searched = recommend(request), bisect_nan(replace(request, steps=11))
    assert (report.command, report.verdict) == ("recommend", "sick")
    assert told(report) == told(searched)
    assert report.findings[0].where.step == 9


def test_fp32_is_clipped_where_the_run_is():
    session = Session(run(clip=1e-3), device=torch.device("cpu"))
    start = session.snapshot()
    with autocast_policy("cuda"):
        taken = measure(session, start, 3)
        seen = observe(session, start, 3, taken)
        assert observe(session, start, 3, taken, enough=0.0).steps == 1
    for row in (*seen.rows, *seen.references):
        assert row.gradient_norm == pytest.approx(1e-3, rel=1e-2)


def test_the_search_shows_what_a_replay_with_the_own_scaling_shows(monkeypatch):
    request = ReplayRequest(factory=run, steps=3, device="cpu")
    shared = recommend(request)
    monkeypatch.setattr(scale_findings, "observed_alongside", lambda *_: None)
    alone = recommend(request)
    assert (shared.run["replays"], alone.run["replays"]) == (3, 3 + 2 * 3)
    assert shared.profile["shadows"][0]["steps"] == [0, 1, 2]
    assert to_plain([shared.scaler, shared.profile]) == to_plain([alone.scaler, alone.profile])


# -- what a recommendation says, and what the search adds to it where the loss scale alone harms the run --


def said(code, severity="warning", cause=None, cure=None):
    change = None if cure is None else Prescription(kind="init_scale", value=cure, status="verified", detail="x")
    where = Where(step=0, phase="backward")
    return Finding(
        code=code, name="x", severity=severity, cause=cause, where=where, message="x", evidence={}, prescription=change
    )


DEPARTS = said("AMP207")
UNDERFLOW = said("AMP301", "error", "grad_underflow", cure=8.0)
UNPROVED = said("AMP301", "error", "grad_underflow")
TOO_HIGH = said("AMP405", "error", "grad_overflow")
STAGNANT = said("AMP501", cause="optimizer_precision")
OVERFLOW = said("AMP201", "error", "forward_overflow")
PAST = said("AMP706", cause="scaler_collapse")
NOTE = said("AMP405", "note", "grad_overflow")


@pytest.mark.parametrize(
    ("own", "found", "both"),
    [
        ([UNDERFLOW], [UNPROVED], [UNDERFLOW]),  # the settings are the recommendation's to derive
        ([], [TOO_HIGH], [TOO_HIGH]),
        ([], [NOTE], []),  # a scale that was still coming down in the few steps of the search
        ([UNDERFLOW], [DEPARTS], [UNDERFLOW]),  # the scale is why they depart
        ([said("AMP301", "note", "grad_underflow")], [DEPARTS], [DEPARTS, said("AMP301", "note", "grad_underflow")]),
        ([replace(DEPARTS, message="own")], [DEPARTS], [DEPARTS]),  # the search's names the op
        ([UNDERFLOW], [STAGNANT], [UNDERFLOW, STAGNANT]),
        ([UNDERFLOW], [PAST], [UNDERFLOW, PAST]),
        ([said("AMP207", "error")], [OVERFLOW], [OVERFLOW]),  # an overflow that the user has set aside
    ],
)
def test_of_the_scale_the_recommendation_is_told_and_of_all_else_the_search(own, found, both):
    assert list(combined(own, found)) == both


def test_a_run_that_is_not_compared_is_not_called_healthy_without_saying_so():
    def make_run():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(run, batch):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                drawn = torch.tensor(list(os.urandom(4)), dtype=torch.float32) / 255  # comes back from no snapshot
                loss = model(drawn[None]).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return TrainingRun(model=model, optimizer=optimizer, batches=[0] * 4, step=step, precision="bf16")

    for command in (bisect_nan, recommend):
        report = command(ReplayRequest(factory=make_run, steps=4))
        assert report.is_not_compared
        assert outcome(report) == "healthy in 4 replayed steps, not compared with fp32"
