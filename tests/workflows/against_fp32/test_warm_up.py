"""Under a warm-up what stands still may be about to move: it is asked at the rate that the warm-up comes up to."""

from __future__ import annotations

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from tests.workflows.against_fp32.silent_runs import warming_up


def report_of(**settings):
    return bisect_nan(ReplayRequest(factory=lambda: warming_up(**settings)))


@pytest.mark.parametrize("by_hand", [False, True], ids=["a scheduler", "by hand"])
def test_what_moves_at_the_full_rate_is_healthy_in_a_warm_up(by_hand):
    report = report_of(rises_over=1000, by_hand=by_hand)
    assert (report.verdict, report.findings) == ("healthy", ())
    assert report.checks[-1].headroom["moves_at_the_full_learning_rate"] is True


def test_what_stands_still_at_the_full_rate_too_is_sick_in_a_warm_up():
    report = report_of(rises_over=1000, full=1e-6)
    assert [finding.code for finding in report.findings if finding.severity == "error"] == ["AMP501"]


def test_steps_at_a_learning_rate_of_0_are_said_to_show_nothing():
    report = report_of(steps_at_zero=10, rises_over=1)
    assert (report.verdict, report.run["steps"]) == ("healthy", 8)
    assert report.checks[-1].headroom["steps_at_rest_in_fp32"] == 8
    assert any("(learning rate 0?): --steps looks at more" in skipped.reason for skipped in report.skipped)
