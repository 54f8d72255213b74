"""Thresholds reach the rules through each workflow, and the report says that they were moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdoctor.diagnosis.catalogue import thresholds_from
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

FILE = Path(__file__).with_name("silent_runs.py")


def codes(report):
    return [(finding.code, finding.severity) for finding in report.findings]


def listed(report, check_report):
    """Of a report that follows the schema, what it says was moved."""
    return {f"{one['code']}.{one['name']}": one["value"] for one in check_report(render_json(report))["thresholds"]}


@pytest.mark.parametrize(
    ("function", "arguments", "code", "moves"),
    [
        ("pure_half", {"optimizer": "sgd", "lr": 1e-7, "precision": "bf16"}, "AMP501", {"AMP501": {"stalled": 1.0}}),
        (
            "small_loss",
            {"factor": 1e-6, "scale": None},
            "AMP301",
            {"AMP301": {"error_warning": 1.0, "error_bad": 1.0}, "AMP207": {"relative_error": 1.0}},
        ),
    ],
)
def test_of_a_replay(function, arguments, code, moves, check_report):
    request = {"factory": f"{FILE}:{function}", "arguments": arguments, "steps": 2}
    assert code in [found for found, _ in codes(bisect_nan(ReplayRequest(**request)))]
    report = bisect_nan(ReplayRequest(**request, thresholds=thresholds_from(moves)))
    assert code not in [found for found, _ in codes(report)]
    assert listed(report, check_report) == {f"{rule}.{name}": v for rule, of in moves.items() for name, v in of.items()}
