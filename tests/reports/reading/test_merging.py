from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Suppressed
from ampdoctor.evidence.report_health import HealthAxis, HealthRun, HealthSection
from ampdoctor.reports.json_report import render_json
from ampdoctor.reports.merge import merge_reports
from ampdoctor.reports.read_json import report_from_text
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


def test_a_finding_of_one_rank_is_not_lost_and_keeps_its_rank():
    merged = merge_reports([replace(SICK, findings=(UNDERFLOW,)), replace(SICK, findings=(of_rank(OVERFLOW, 1),))])
    assert [(finding.code, finding.where.rank) for finding in merged.findings] == [("AMP201", 1), ("AMP301", 0)]


def test_two_findings_of_one_fingerprint_in_one_report_stay_two():
    twice = replace(SICK, findings=(OVERFLOW, replace(OVERFLOW, message="again")))
    assert len(merge_reports([twice, twice]).findings) == 2


def test_the_verdict_is_the_worst_and_complete_is_what_all_are():
    merged = merge_reports([scan_of("a"), replace(INCOMPLETE, target=scan_of("b").target)])
    assert (merged.verdict, merged.complete) == ("inconclusive", False)
    assert merge_reports([scan_of("a", verdict="sick"), INCOMPLETE]).verdict == "sick"
    assert merge_reports([scan_of("a"), scan_of("b")]).verdict == "healthy"
    assert merge_reports([scan_of("a"), scan_of("b")]).complete


def test_findings_of_several_checkpoints_say_which_one_they_are_of():
    a, b = (scan_of(path, findings=(replace(UNDERFLOW, where=replace(UNDERFLOW.where, file=path)),)) for path in "ab")
    merged = merge_reports([a, b])
    assert [finding.where.file for finding in merged.findings] == ["runs/a", "runs/b"]
    assert merged.target["format"] == "safetensors"
    assert [one["target"]["path"] for one in merged.target["merged"]] == ["a", "b"]
    assert (merged.target["path"], merged.target["paths"]) == ("2 reports", ["runs/a", "runs/b"])
    again = json.loads(render_sarif(merged))["runs"][0]["results"]
    places = [result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in again]
    assert places == ["runs/a", "runs/b"]


def placed(report, folder, root="/repo"):
    return replace(report, target={**report.target, "repository": {"root": root, "folder": folder}})


def uris(report):
    results = json.loads(render_sarif(report))["runs"][0]["results"]
    return [result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in results]


def test_files_of_one_folder_are_named_from_it_and_annotated_from_the_root():
    finding = replace(UNDERFLOW, where=replace(UNDERFLOW.where, file=None))
    merged = merge_reports([placed(scan_of(name, findings=(finding,)), "training") for name in "ab"])
    assert merged.target["paths"] == [one.where.file for one in merged.findings] == ["runs/a", "runs/b"]
    assert uris(merged) == ["training/runs/a", "training/runs/b"]


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


def test_settings_that_differ_are_said_in_a_note():
    merged = merge_reports([SICK, replace(SICK, run={**SICK.run, "threads": 4, "notes": ["a note"]})])
    assert "threads" not in merged.run
    assert merged.run["notes"] == ["a note", "threads, by report: 2, 4"]
    assert merged.run["policy"] == "cuda"
    assert merge_reports([SICK, SICK]).run == SICK.run


def test_a_section_is_the_first_ones_and_a_note_says_where_another_differs():
    other = replace(SICK, scaler=replace(SICK.scaler, bound_by="another"))
    merged = merge_reports([replace(SICK, scaler=None), SICK, other])
    assert merged.scaler == SICK.scaler
    assert merged.run["notes"] == ["scaler: of the first report that has it; it differs in another"]
    assert "notes" not in merge_reports([SICK, replace(SICK, profile=None)]).run


def test_tensors_are_those_of_all():
    first, second = full("a"), full("b")
    assert [tensor.name for tensor in merge_reports([first, second, HEALTHY]).tensors] == ["a", "b"]
    assert merge_reports([HEALTHY, HEALTHY]).tensors is None


@pytest.mark.parametrize("form", ["json", "jsonl", "markdown", "github", "junit", "sarif"])
def test_a_merged_report_can_be_rendered_and_read_again(form, check_report):
    merged = merge_reports([full("a"), full("b"), scan_of("c")])
    check_report(renderer("json")(merged))
    assert renderer(form)(report_from_text(renderer("jsonl")(merged)))


def test_what_cannot_be_one_report_is_refused():
    with pytest.raises(UsageError, match="several commands \\(bisect-nan, scan\\)"):
        merge_reports([SICK, HEALTHY])
    with pytest.raises(UsageError, match="no report to merge"):
        merge_reports([])


def test_the_runs_of_several_health_reports_stand_side_by_side():
    first = HealthRun(name="a", source="a.jsonl", format="ampdoctor", steps=3, axis=HealthAxis(first=(0,), last=(2,)))
    other = replace(first, name="another")
    one = replace(HEALTHY, command="health", target={"path": "a.jsonl"}, health=HealthSection(runs=(first,)))
    two = replace(
        HEALTHY, command="health", target={"path": "b.jsonl"}, health=HealthSection(runs=(other,), detail_every=5)
    )
    merged = merge_reports([one, two, one])
    assert merged.health == HealthSection(runs=(first, other), detail_every=5)
    assert merge_reports([HEALTHY, replace(HEALTHY, target={"path": "c"})]).health is None
    assert report_from_text(render_json(merged)).health == merged.health
