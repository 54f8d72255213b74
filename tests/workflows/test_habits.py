"""What people's own steps do: no alarm where it is only unusual, the right cause where it is wrong."""

from __future__ import annotations

import pytest

from ampdoctor.diagnosis.replay.outcome import DIVERGES
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

FILE = "tests/workflows/habits.py"


def diagnose(name, **options):
    return bisect_nan(ReplayRequest(factory=f"{FILE}:{name}", **options))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fused", {"scale": 2.0**22}),
        ("guards_itself", {}),
        ("checks_the_norm", {}),
        ("counter_in_a_closure", {}),
        ("accumulates_by_a_counter", {}),
        ("own_generator", {}),
        ("shuffled_loader_and_dropout", {}),
        ("scaler_in_a_closure", {}),
    ],
)
def test_a_healthy_habit_raises_no_alarm(name, arguments):
    report = diagnose(name, arguments=arguments)
    assert [finding.message for finding in report.findings] == []
    assert (report.verdict, report.complete) == ("healthy", True)
    agreed = report.checks[-1]
    assert agreed.result == "ok"
    assert agreed.headroom["largest_gradient_error"] < 0.1


@pytest.mark.parametrize(("name", "op"), [("never_cleared", "zero_grad"), ("past_the_scaler", "optimizer.step")])
def test_misuse_is_called_misuse(name, op):
    finding = diagnose(name).findings[0]
    assert (finding.cause, finding.severity, finding.where.op) == ("scaler_misuse", "error", op)


def test_a_nan_loss_that_is_returned_as_a_number_is_found():
    finding = diagnose("nan_loss_as_a_number").findings[0]
    assert (finding.where.step, finding.where.phase, finding.where.op) == (0, "loss", "aten.log")


def test_a_run_in_which_nothing_happens_is_not_healthy():
    report = diagnose("nothing_happens")
    assert (report.verdict, report.complete) == ("inconclusive", False)


def test_divergence_is_not_blamed_on_precision():
    (finding,) = diagnose("diverges").findings
    assert (finding.code, finding.where.step, finding.help) == ("AMP201", 2, DIVERGES)
    assert finding.prescription.status == "not_run", "a clamp would keep it finite, at a loss of 1e27"


@pytest.mark.parametrize("arguments", [{"scale": 2.0**28, "halves": False}, {"scale": 2.0**40}])
def test_a_loop_that_leaves_out_every_step_is_no_health(arguments):
    report = diagnose("guards_itself", arguments=arguments)
    (finding,) = report.findings
    assert (finding.code, finding.cause, finding.where.step) == ("AMP405", "grad_overflow", 0)
    assert (finding.prescription.kind, finding.prescription.status) == ("init_scale", "verified")
    assert finding.evidence["steps_left_out"] == 8
