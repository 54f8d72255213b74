"""Inputs of public bug reports (fixtures/public) whose failure stays finite."""

from __future__ import annotations

from pathlib import Path

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

PUBLIC = Path(__file__).parents[2] / "fixtures" / "public"


def test_reference_weights_that_are_swapped_in_inside_one_autocast_are_stale_casts():
    report = bisect_nan(ReplayRequest(factory=str(PUBLIC / "ref_swap_stale_cast" / "script.py")))
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.where.source.line) == ("AMP210", "error", 14)
    assert finding.evidence["weights"] == 4
    assert "cache_enabled=False" in finding.help
