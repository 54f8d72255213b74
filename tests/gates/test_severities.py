"""Severities that a project decides for itself, and the verdict that follows."""

from __future__ import annotations

from dataclasses import replace

from ampdoctor.evidence.report import Suppressed
from ampdoctor.gates.findings import RuleSettings, apply_severities
from tests.samples import OVERFLOW, SICK, UNDERFLOW, WARNED


def graded(report, **severities):
    return apply_severities(report, {code: RuleSettings(severity=s) for code, s in severities.items()})


def severities(report):
    return [(finding.code, finding.severity) for finding in report.findings]


def test_a_finding_gets_the_severity_of_its_rule():
    assert severities(graded(SICK, AMP201="note")) == [("AMP301", "warning"), ("AMP201", "note")]


def test_an_error_that_is_none_here_makes_the_report_healthy():
    assert graded(SICK, AMP201="warning").verdict == "healthy"
    assert graded(replace(SICK, complete=False), AMP201="warning").verdict == "inconclusive"
    undecided = replace(SICK, verdict="not_reproduced")  # its workflow decided it so despite an error
    assert graded(undecided, AMP201="warning").verdict == "not_reproduced"


def test_a_warning_that_is_an_error_here_makes_the_report_sick():
    healthy = replace(WARNED, verdict="healthy")
    assert graded(healthy, AMP301="error").verdict == "sick"
    assert severities(graded(healthy, AMP301="error")) == [("AMP301", "error")]


def test_a_finding_that_is_set_aside_leaves_the_report_sick():
    report = graded(SICK, AMP201="ignore")
    assert severities(report) == [("AMP301", "warning")]
    assert [(one.finding, one.by) for one in report.suppressed] == [(OVERFLOW, "ignore")]
    assert "AMP201" in report.suppressed[0].reason
    assert report.verdict == "sick"


def test_what_an_ignore_has_set_aside_is_graded_too():
    aside = (Suppressed(finding=OVERFLOW, by="ignore", reason="known"),)
    report = replace(SICK, findings=(UNDERFLOW,), suppressed=aside)
    assert graded(report, AMP201="note").verdict == "healthy"
    assert graded(report, AMP201="note").suppressed[0].finding.severity == "note"
    assert graded(report, AMP301="note").verdict == "sick"


def test_what_was_not_judged_stays_so():
    listed = replace(WARNED, verdict="not_judged")
    assert graded(listed, AMP301="error").verdict == "not_judged"
