"""Severities that a project decides for itself; ignores: what they set aside, and what is said of outlived ones."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest

from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.evidence.location import Source
from ampdoctor.evidence.report import Report, Suppressed
from ampdoctor.gates.findings import Ignore, RuleSettings, apply_ignores, apply_severities
from tests.samples import OVERFLOW, SICK, UNDERFLOW, WARNED

TODAY = date(2026, 11, 21)
FOUND = replace(UNDERFLOW, code="AMP101")
SCANNED = Report(
    command="scan",
    target={"path": "run", "files": [{"path": "model.safetensors", "bytes": 8}]},
    verdict="healthy",
    findings=(FOUND,),
)


def ignore(rule="AMP101", **fields):
    return Ignore(rule=rule, reason="we know", **fields)


def codes(report):
    return [finding.code for finding in report.findings]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tensor": "blocks.*.weight"},
        {"tensor": "blocks.0.fc.weight", "module": "", "file": "*.safetensors"},
        {"file": "run/model.safetensors", "expires": TODAY},
    ],
)
def test_what_fits_is_set_aside_with_its_reason(fields):
    report = apply_ignores(SCANNED, [ignore(**fields)], TODAY)
    assert report.findings == ()
    assert [(one.finding, one.by, one.reason) for one in report.suppressed] == [(FOUND, "ignore", "we know")]
    assert report.verdict == SCANNED.verdict


MANY = replace(FOUND, also=(replace(FOUND.where, tensor="head.weight"), replace(FOUND.where, tensor="tok.weight")))


def test_a_finding_about_many_is_set_aside_where_each_is_named():
    named = [replace(ignore(tensor=t), reason=t) for t in ("blocks.*", "head.*", "tok.*")]
    report = apply_ignores(replace(SCANNED, findings=(MANY,)), named, TODAY)
    assert report.findings == ()
    assert [one.reason for one in report.suppressed] == ["blocks.*; head.*; tok.*"]


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_finding_about_one_that_is_not_named_stays_and_the_ignores_of_the_others_are_not_unused(left_out):
    named = [ignore(tensor=t) for t in ("blocks.*", "head.*", "tok.*")]
    del named[left_out]
    report = apply_ignores(replace(SCANNED, findings=(MANY,)), named, TODAY)
    assert (report.findings, report.suppressed) == ((MANY,), ())


@pytest.mark.parametrize(
    "fields", [{"rule": "AMP102"}, {"tensor": "blocks.0.fc"}, {"module": "blocks.*"}, {"file": "model.safetensors"}]
)
def test_what_does_not_fit_stays(fields):
    report = apply_ignores(SCANNED, [ignore(**fields)], TODAY)
    assert FOUND in report.findings
    assert report.suppressed == ()


def test_an_ignore_without_use_is_a_finding_at_its_own_line():
    report = apply_ignores(SCANNED, [ignore(), ignore("AMP102", tensor="a*", written=Source("p.toml", 7))], TODAY)
    (unused,) = report.findings
    assert (unused.code, unused.severity, unused.name) == ("AMP911", "warning", rules()["AMP911"].name)
    assert unused.where.source == Source("p.toml", 7)
    assert "AMP102 in tensor a*" in unused.message
    assert unused.fingerprint != apply_ignores(SCANNED, [ignore("AMP102")], TODAY).findings[0].fingerprint


@pytest.mark.parametrize(
    ("report", "entry"),
    [
        pytest.param(SCANNED, ignore("AMP201"), id="a rule that only a replay can raise"),
        pytest.param(replace(SCANNED, command="bisect-nan"), ignore("AMP102"), id="a checkpoint's rule in a replay"),
        pytest.param(replace(SCANNED, complete=False), ignore("AMP102"), id="an incomplete report"),
        pytest.param(replace(SCANNED, verdict="not_judged"), ignore("AMP102"), id="a list of the content"),
        pytest.param(SCANNED, ignore("AMP102", file="other/*"), id="a file that was not examined"),
        pytest.param(SCANNED, ignore("AMP911"), id="a rule on the configuration"),
        pytest.param(replace(SCANNED, command="recommend"), ignore("AMP303"), id="ranges that were not measured"),
    ],
)
def test_nothing_is_said_of_an_ignore_that_this_run_could_not_use(report, entry):
    assert codes(apply_ignores(report, [entry], TODAY)) == ["AMP101"]


def test_an_unused_one_is_said_of_a_file_that_was_examined():
    assert codes(apply_ignores(SCANNED, [ignore("AMP102", file="run/model.*")], TODAY)) == ["AMP101", "AMP911"]
    assert codes(apply_ignores(replace(SCANNED, target={"path": "run"}), [ignore("AMP102", file="run")], TODAY)) == [
        "AMP101",
        "AMP911",
    ]


def test_an_expired_ignore_sets_nothing_aside_and_is_a_finding():
    entry = ignore(expires=date(2026, 11, 20))
    report = apply_ignores(SCANNED, [entry], TODAY)
    assert codes(report) == ["AMP101", "AMP912"]
    assert report.suppressed == ()
    assert "2026-11-20" in report.findings[1].message


def test_ignoring_twice_is_ignoring_once():
    entries = [ignore(tensor="x*"), ignore("AMP102"), ignore(expires=date(2020, 1, 1)), ignore()]
    once = apply_ignores(SCANNED, entries, TODAY)
    assert sorted(codes(once)) == ["AMP911", "AMP911", "AMP912"]
    assert apply_ignores(once, entries, TODAY) == once


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
