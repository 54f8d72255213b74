from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest

from ampdoctor.errors import CheckpointError, UsageError
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.log_records import AlertLine, EndLine, LookLine, StepLine
from ampdoctor.evidence.report import Finding
from ampdoctor.reports import text as words
from ampdoctor.reports.json_report import render_json
from ampdoctor.reports.next_step import next_step
from ampdoctor.workflows.health import health
from ampdoctor.workflows.scan import scan
from tests.health.logs import HEADER, detail, stamped, steps, write

BORN = Finding(
    code="AMP201",
    name="forward-overflow",
    severity="error",
    message="An op overflows.",
    where=Where(step=0, phase="forward", module="block.3"),
)


def nan_at(step, **stamp):
    line = StepLine(step=step, loss=math.nan, gradient_norm=math.nan, skipped=False)
    return stamped(line, **stamp) if stamp else line


def codes(report):
    return [(one.code, one.where.step) for one in report.findings]


def test_a_healthy_run(tmp_path, check_report, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run" / "log.jsonl", [HEADER, *steps(0, 50), detail(0, 1.0), EndLine(exit_code=0)])
    report = health(["run"])
    assert (report.command, report.verdict, report.findings, report.complete) == ("health", "healthy", (), True)
    assert {check.name: check.result for check in report.checks}["loss scale"] == "not in the log"
    written = check_report(render_json(report))
    assert written["target"]["global_step"] == 49
    assert written["health"]["runs"][0]["ending"] == "ended"


def test_a_log_that_is_too_short_to_say_what_is_usual_is_not_called_healthy(tmp_path):
    write(tmp_path / "log.jsonl", [HEADER, *steps(0, 25), detail(0, 1.0)])
    report = health([tmp_path])
    said = {check.name: check.result for check in report.checks}
    assert report.verdict == "not_judged"
    assert said["loss"] == "needs 128 steps, has 25"
    assert said["single tensors"] == "needs 7 looks, has 1"
    assert words.of_verdict(report) == "not judged: too few steps to say what is usual"
    assert next_step(report).said == "let it train on, and ask again"


def test_a_loss_that_is_not_finite_is_an_error_with_its_step_and_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run" / "log.jsonl", [HEADER, *steps(0, 40), nan_at(40)])
    report = health(["run"])
    assert (report.verdict, codes(report)) == ("sick", [("AMP722", 40)])
    assert report.findings[0].where.file == "run"


def test_what_was_found_at_steps_that_were_undone_stands_no_more(tmp_path):
    again = [stamped(step, attempt=1, branch=0) for step in steps(30, 60)]
    write(tmp_path / "log.jsonl", [HEADER, *steps(0, 40), nan_at(40), *again])
    report = health([tmp_path])
    assert (report.verdict, report.findings) == ("healthy", ())
    (check,) = [one for one in report.checks if one.name == "steps that were undone"]
    assert "AMP722 at step 40" in check.result


def test_looks_of_the_log_count_and_alerts_of_the_judge_are_found_anew(tmp_path):
    stale = Finding(code="AMP722", name="x", severity="error", message="Was.", where=Where(step=3, phase="loss"))
    other = Finding(code="AMP201", name="forward-overflow", severity="note", message="Is.", where=BORN.where)
    lines = [*steps(0, 5), AlertLine(step=3, finding=stale), AlertLine(step=4, finding=other)]
    write(
        tmp_path / "log.jsonl", [HEADER, *lines, LookLine(step=4, verdict="sick", findings=(BORN,), bundle="bundle-4")]
    )
    report = health([tmp_path])
    assert codes(report) == [("AMP201", 4), ("AMP201", 0)]
    assert report.health.runs[0].looks[0].says == "An op overflows."


def test_each_rank_is_judged_and_what_several_see_is_said_once(tmp_path):
    sick = [HEADER, *steps(0, 40), nan_at(40)]
    write(tmp_path / "log.jsonl", sick, world_size=3)
    write(tmp_path / "log.rank1.jsonl", sick, rank=1, world_size=3)
    write(tmp_path / "log.rank2.jsonl", [HEADER, *steps(0, 30), nan_at(30), *steps(31, 41)], rank=2, world_size=3)
    report = health([tmp_path])
    found = [(one.where.step, one.where.rank, one.evidence.get("ranks")) for one in report.findings]
    assert found == [(30, 2, None), (40, 0, 2)]
    assert report.health.runs[0].steps == 41


def test_optimizers_of_one_process_are_no_ranks_and_their_steps_are_the_runs(tmp_path):
    names = ("optimizer", "optimizer2")
    both = [replace(line, optimizer=at) for line in (*steps(0, 40), nan_at(40)) for at in range(2)]
    write(tmp_path / "log.jsonl", [replace(HEADER, optimizers=names), *both])
    report = health([tmp_path])
    found = [(one.code, one.evidence["optimizer"], one.evidence.get("ranks")) for one in report.findings]
    assert found == [("AMP722", "optimizer", None), ("AMP722", "optimizer2", None)]
    assert report.checks[0].headroom["steps"] == 41


def test_several_logs_stand_side_by_side_and_one_that_cannot_be_read_is_said(tmp_path, monkeypatch, check_report):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a" / "log.jsonl", [HEADER, *steps(0, 40), nan_at(40)])
    (tmp_path / "b.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    report = health(["a", "b.jsonl", "gone", "a"])
    assert [run.source for run in report.health.runs] == ["a", "b.jsonl"]
    assert [run.format for run in report.health.runs] == ["ampdoctor", "table"]
    assert [one.where.file for one in report.findings] == ["a"]
    assert [(one.what, one.kind) for one in report.errors] == [("gone", "unreadable")]
    assert not report.complete
    check_report(render_json(report))


def test_a_log_without_a_step_and_no_log_at_all_are_refused(tmp_path):
    write(tmp_path / "log.jsonl", [HEADER])
    with pytest.raises(CheckpointError, match="has no step"):
        health([tmp_path])
    with pytest.raises(UsageError):
        health([])


def test_a_run_without_a_last_line_runs_while_its_log_grows(tmp_path):
    path = write(tmp_path / "log.jsonl", [HEADER, *steps(0, 3)])
    assert health([tmp_path]).health.runs[0].ending == "running"
    os.utime(path, (1_700_000_000, 1_700_000_000))
    assert health([tmp_path]).health.runs[0].ending == "cut_off"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trainer_state.json", '{"log_history": [{"step": 1, "loss": 2.0}]}'),
        ("metrics.csv", "step,train_loss\n1,2.0\n"),
    ],
)
def test_scan_says_what_reads_a_training_log(tmp_path, monkeypatch, name, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / name).write_text(text)
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.*`ampdoctor health runs` reads them\."):
        scan("runs")
    with pytest.raises(CheckpointError, match=f"`ampdoctor health runs/a/{name}` reads it"):
        scan(f"runs/a/{name}")
    (tmp_path / "runs" / "a" / name).rename(tmp_path / "runs" / "weather.csv")
    (tmp_path / "runs" / "weather.csv").write_text("day,rain\n1,2.0\n")
    with pytest.raises(CheckpointError) as refused:
        scan("runs")
    assert "health" not in str(refused.value)
