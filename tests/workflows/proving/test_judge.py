"""Which steps are sick: the scaler at work, a run that is not finite in fp32 either, state that is put right."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdoctor.reports.next_step import next_step
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

FILE = Path(__file__).with_name("judged_runs.py")


def replay(function, **changes):
    return bisect_nan(ReplayRequest(factory=f"{FILE}:{function}", **changes))


def checks(report):
    return {check.name: check for check in report.checks}


@pytest.mark.parametrize("function", ["plain", "without_optimizer"])
def test_a_scale_that_comes_down_is_health_with_an_optimizer_and_without(function):
    report = replay(function)
    assert (report.verdict, report.findings) == ("healthy", ())
    assert checks(report)["steps skipped by the scaler"].result == "1 of 8"


def test_without_an_optimizer_gradients_beyond_every_scale_are_sick():
    report = replay("without_optimizer_beyond_every_scale")
    assert (report.verdict, [finding.code for finding in report.findings]) == ("sick", ["AMP406"])


@pytest.mark.parametrize("rate", [20.0, 1e8])
def test_a_run_that_diverges_in_fp32_as_well_is_not_blamed_on_precision(rate):
    report = replay("diverging", arguments={"rate": rate})
    finding = report.findings[0]
    assert [f.code for f in report.findings] == ["AMP206"]
    assert (finding.cause, finding.where.step, finding.prescription.status) == (None, 2, "not_run")
    assert "learning rate" in finding.help
    losses = finding.evidence["fp32_losses"]
    assert losses[-2] > 1e10 * losses[0]


def test_a_repair_is_judged_at_the_scale_that_the_scaler_comes_down_to():
    cure = replay("broken_weight").findings[0].prescription
    assert (cure.status, cure.reason) == ("intervention", None)
    assert cure.detail.endswith("(shown at a loss scale of 16384, to which the scaler comes down)")


FINITE = "finite loss, gradients, parameters, buffers and optimizer state"
AGREES = "gradients and updates agree with fp32"


def test_a_run_whose_every_step_is_skipped_is_not_seen_to_be_healthy():
    report = replay("skipping_throughout")
    found = checks(report)
    assert (report.verdict, report.complete) == ("inconclusive", True)
    assert [(f.code, f.severity, f.prescription.status) for f in report.findings] == [("AMP405", "warning", "verified")]
    assert (found[FINITE].result, found[AGREES].result) == ("found", "not_run")
    assert found[AGREES].headroom == {"steps": 0}
    assert next_step(report).said.startswith("paste the lines")


def test_a_batch_is_not_left_out_for_what_no_batch_brought():
    finding = replay("updated_by_hand").findings[0]
    assert (finding.code, finding.where.step, finding.where.phase) == ("AMP202", 2, "optimizer")
    lines = FILE.read_text(encoding="utf-8").splitlines()
    assert lines[finding.where.source.line - 1].endswith("# BY HAND")
    cure = finding.prescription
    assert "skip_batch" not in {tried.kind for tried in (cure, *cure.alternatives)}


def test_what_fp32_does_not_hold_is_tried_with_fp32_that_can_run():
    finding = replay("gated").findings[0]
    assert (finding.code, finding.where.op, finding.where.step) == ("AMP201", "aten.exp", 2)
    cure = finding.prescription
    assert cure.status == "intervention"
    assert not any("cannot" in (tried.reason or "") for tried in (cure, *cure.alternatives))
