from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Suppressed
from ampdoctor.reports.read_json import merge_reports, report_from_text
from ampdoctor.reports.sarif import render_sarif
from tests.reports.full_sample import full
from tests.samples import HEALTHY, INCOMPLETE, OVERFLOW, SICK, UNDERFLOW, renderer


def of_rank(finding, rank, **where):
    return replace(finding, where=replace(finding.where, rank=rank, **where))


def scan_of(path, **changes):
    return replace(HEALTHY, target={"path": path, "location": f"runs/{path}", "format": "safetensors"}, **changes)


def test_a_finding_of_several_ranks_is_there_once_with_its_ranks():
    ranks = [replace(SICK, findings=(of_rank(OVERFLOW, rank, step=5 - rank), UNDERFLOW)) for rank in range(3)]
    merged = merge_reports(ranks)
    assert [finding.code for finding in merged.findings] == ["AMP201", "AMP301"]
    assert merged.findings[0].where.step == 3  # where it is earliest
    assert merged.findings[0].evidence["ranks"] == [0, 1, 2]
    assert "ranks" not in merged.findings[1].evidence  # all of rank 0
    assert merge_reports([merged, *ranks]).findings[0].evidence.get("ranks") == [0, 1, 2]


def test_two_findings_of_one_fingerprint_in_one_report_stay_two():
    twice = replace(SICK, findings=(OVERFLOW, replace(OVERFLOW, message="again")))
    assert len(merge_reports([twice, twice]).findings) == 2


def test_the_verdict_is_the_worst_and_complete_is_what_all_are():
    merged = merge_reports([replace(INCOMPLETE, target={"path": "a"}), scan_of("a")])  # where it failed, it knows less
    assert (merged.verdict, merged.complete, merged.target) == ("inconclusive", False, scan_of("a").target)
    assert merge_reports([scan_of("a", verdict="sick"), INCOMPLETE]).verdict == "sick"
    assert merge_reports([scan_of("a"), scan_of("a")]) == scan_of("a")


def placed(report, folder, root="/repo"):
    return replace(report, target={**report.target, "repository": {"root": root, "folder": folder}})


def uris(report):
    results = json.loads(render_sarif(report))["runs"][0]["results"]
    return [result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in results]


def test_a_finding_that_a_log_has_of_several_ranks_stays_as_it_is():
    counted = replace(OVERFLOW, evidence={**OVERFLOW.evidence, "ranks": 2})
    report = replace(SICK, findings=(counted,))
    assert merge_reports([report, report]).findings[0].evidence["ranks"] == 2


def test_ranks_are_of_one_job_whichever_clone_they_run_in():
    ranks = [replace(SICK, findings=(of_rank(OVERFLOW, rank),)) for rank in range(2)]
    merged = merge_reports([placed(report, "training", f"/node{rank}") for rank, report in enumerate(ranks)])
    assert merged.findings[0].evidence["ranks"] == [0, 1]
    assert uris(merged) == ["training/t5.py"]


def test_errors_and_skips_are_all_there_and_equal_ones_once():
    merged = merge_reports([replace(INCOMPLETE, skipped=SICK.skipped), INCOMPLETE, HEALTHY])
    assert merged.errors == INCOMPLETE.errors
    assert merged.skipped == SICK.skipped
    assert merged.checks == HEALTHY.checks


def test_suppressed_findings_are_merged_as_findings_are():
    ranks = [
        replace(
            SICK, findings=(), suppressed=(Suppressed(finding=of_rank(OVERFLOW, rank), by="ignore", reason="known"),)
        )
        for rank in (1, 4)
    ]
    (one,) = merge_reports(ranks).suppressed
    assert (one.finding.evidence["ranks"], one.reason) == ([1, 4], "known")


def test_a_section_is_the_first_ones_and_a_note_says_where_another_differs():
    other = replace(SICK, scaler=replace(SICK.scaler, bound_by="another"))
    merged = merge_reports([replace(SICK, scaler=None), SICK, other])
    assert merged.scaler == SICK.scaler
    assert merged.run["notes"] == ["scaler: of the first report that has it; it differs in another"]
    assert "notes" not in merge_reports([SICK, replace(SICK, profile=None)]).run


@pytest.mark.parametrize("form", ["json", "jsonl", "markdown", "github", "junit", "sarif"])
def test_a_merged_report_can_be_rendered_and_read_again(form, check_report):
    merged = merge_reports([full("a"), replace(full("b"), target=full("a").target)])
    check_report(renderer("json")(merged))
    assert renderer(form)(report_from_text(renderer("jsonl")(merged)))


def test_what_cannot_be_one_report_is_refused():
    with pytest.raises(UsageError, match="several commands \\(bisect-nan, scan\\)"):
        merge_reports([SICK, HEALTHY])
    with pytest.raises(UsageError, match="several targets"):
        merge_reports([scan_of("a"), scan_of("b")])
