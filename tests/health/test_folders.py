"""A folder that holds several logs: each is judged, and of several that say the same of one run one."""

from __future__ import annotations

import json
import math
import os

import pytest

from ampdoctor.errors import CheckpointError, UsageError
from ampdoctor.health.sinks.export import export_of
from ampdoctor.workflows import health as workflow
from ampdoctor.workflows.health import health
from tests.health.logs import HEADER, steps, write


def rows(count, *, lost=10**9, every=1, seed=0):
    """A loss that falls, each run's with other digits; from one step on it is NaN."""
    falls = [2 + 4 / (1 + at / 30) + 0.01 * math.sin(17 * at + seed) for at in range(count)]
    return [
        {"step": at, "loss": math.nan if at >= lost else falls[at], "grad_norm": 1.0 + 0.1 * math.sin(5 * at + seed)}
        for at in range(0, count, every)
    ]


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ",".join(rows[0]) + "\n" + "".join(",".join(f"{value:.6g}" for value in row.values()) + "\n" for row in rows)
    path.write_text(text)


def printed(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"step {r['step']}: loss {r['loss']:.4f}, grad_norm {r['grad_norm']:.4f}\n" for r in rows))


def state(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"log_history": rows}))


def where(report):
    return [(one.code, one.where.file) for one in report.findings if one.severity == "error"]


@pytest.mark.parametrize(
    ("well", "sick"),
    [
        (("a.csv", table), ("b.jsonl", lines)),
        (("metrics.csv", table), ("job.out", printed)),
        (("run/metrics.csv", table), ("outputs/2026-11-02/10-00-01/lightning_logs/version_0/metrics.csv", table)),
        (("checkpoint-200/trainer_state.json", state), ("checkpoint-100/trainer_state.json", state)),
    ],
)
def test_no_log_of_a_folder_goes_unjudged(tmp_path, monkeypatch, well, sick):
    monkeypatch.chdir(tmp_path)
    for at, ((name, form), lost) in enumerate(((sick, 120), (well, 10**9))):  # the healthy one was written last
        form(tmp_path / "runs" / name, rows(200, lost=lost, seed=at))
        os.utime(tmp_path / "runs" / name, (1_700_000_000 + at, 1_700_000_000 + at))
    report = health(["runs"])
    assert report.verdict == "sick"
    ((code, file),) = where(report)
    assert (code, f"runs/{sick[0]}".startswith(file), len(report.health.runs)) == ("AMP722", True, 2)
    sick[1](tmp_path / "runs" / sick[0], rows(200, seed=3))
    assert health(["runs"]).verdict == "healthy"


def test_logs_of_one_run_in_several_forms_are_one_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = rows(200)
    table(tmp_path / "out" / "csv" / "metrics.csv", [row | {"step": row["step"] + 1} for row in whole])
    printed(tmp_path / "out" / "train.log", whole[::10])
    for step in (100, 200):
        state(tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json", whole[:step])
    report = health(["out"])
    (run,) = report.health.runs
    assert (report.verdict, report.complete, run.steps, run.format, run.source) == (
        "healthy", True, 200, "transformers", "out"
    )  # fmt: skip
    assert sorted(one.what for one in report.skipped if "the same run as" in one.reason) == [
        "out/checkpoint-100", "out/csv", "out/train.log"
    ]  # fmt: skip


def test_a_log_that_has_more_than_another_is_judged_as_well(tmp_path):
    """A scale that falls to its floor in the job's output, and is no column of the table."""
    whole = rows(100)
    table(tmp_path / "metrics.csv", whole)
    scale = [2.0 ** max(0, 14 - at) for at in range(100)]
    lines(
        tmp_path / "scaler.jsonl", [row | {"loss_scale": scale[at], "skipped": at > 0} for at, row in enumerate(whole)]
    )
    end = (
        'Traceback (most recent call last):\n  File "a.py", line 3\nException: Current loss scale already at minimum\n'
    )
    printed(tmp_path / "job.out", whole)
    (tmp_path / "job.out").write_text((tmp_path / "job.out").read_text() + end)
    report = health([tmp_path])
    assert {run.source.rpartition("/")[2] for run in report.health.runs} == {"scaler.jsonl", "job.out"}


def test_ranks_of_a_job_are_read_together(tmp_path):
    for rank in range(2):
        printed(tmp_path / f"rank{rank}.log", rows(200, seed=rank))
    assert len(health([tmp_path]).health.runs) == 2
    write(tmp_path / "ours" / "log.jsonl", [HEADER, *steps(0, 40)])
    write(tmp_path / "ours" / "log.rank1.jsonl", [HEADER, *steps(0, 40)], rank=1)
    assert len(health([tmp_path / "ours"]).health.runs) == 1


def test_a_log_without_a_step_in_a_folder_is_said_and_no_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "a" / "log.jsonl", [HEADER])
    with pytest.raises(CheckpointError, match="has no step"):
        health(["runs"])
    lines(tmp_path / "runs" / "b" / "train.jsonl", rows(200))
    report = health(["runs"])
    assert (report.verdict, report.complete) == ("healthy", True)
    assert ("runs/a", "it has no step") in {(one.what, one.reason) for one in report.skipped}
    assert report.target["location"] == "runs/b"


def test_more_logs_than_are_meant_are_refused_with_what_to_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workflow, "MOST_LOGS", 2)
    for at in range(3):
        lines(tmp_path / "sweep" / f"run {at}" / "train.jsonl", rows(50, seed=at))
    with pytest.raises(CheckpointError, match=r"sweep holds 3 logs.*Type: ampdoctor health .*'sweep/run 1'"):
        health(["sweep"])
    with pytest.raises(UsageError, match="--export takes one log, and there are 2"):
        health(["sweep/run 0", "sweep/run 1"], export=[export_of("csv=numbers")])


def test_a_folder_that_may_hold_a_log_and_cannot_be_listed_leaves_nothing_healthy(tmp_path, monkeypatch):
    from ampdoctor.health.reading import opening

    lines(tmp_path / "train.jsonl", rows(200))
    (tmp_path / "other").mkdir()
    list_folder = opening.list_folder

    def refuse(path):
        if path.name == "other":
            raise CheckpointError("other cannot be listed: permission denied.")
        return list_folder(path)

    monkeypatch.setattr(opening, "list_folder", refuse)
    report = health([tmp_path])
    assert (report.verdict, report.complete, [one.what for one in report.errors]) == ("inconclusive", False, ["other"])


def good_and(folder, name, text):
    """A folder with a good log, and another file below it."""
    table(folder / "runs" / "good" / "metrics.csv", rows(200))
    (folder / "runs" / name).parent.mkdir(exist_ok=True)
    (folder / "runs" / name).write_text(text)


LOST = rows(200, lost=120, seed=1)
AS_TABLE = "step,loss\n" + "".join(f"{row['step']},{row['loss']}\n" for row in LOST)
AS_LINES = "".join(json.dumps(row) + "\n" for row in LOST)
STATE = json.dumps({"global_step": 200, "log_history": LOST}, indent=2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("b/train.log", AS_TABLE),
        ("b/job.txt", AS_TABLE.replace(",", "\t")),
        ("b/train.log.1", AS_LINES),
        ("b/job.o123", "".join(f"step {row['step']} loss {row['loss']}\n" for row in LOST)),
        ("b/history", AS_TABLE),
        ("b/history.ndjson", AS_LINES),
        ("b/state.json", STATE),
    ],
)
def test_a_file_of_a_folder_is_read_that_is_read_by_its_own_name(tmp_path, monkeypatch, name, text):
    monkeypatch.chdir(tmp_path)
    good_and(tmp_path, name, text)
    assert where(health([f"runs/{name}"])) == [("AMP722", f"runs/{name}")]
    assert [(code, file) for code, file in where(health(["runs"]))] == [("AMP722", "runs/b")]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("b/metrics.csv", "", "metrics.csv is empty."),
        ("b/metrics.csv", "step,loss\n", "metrics.csv has no row."),
        ("b/log.jsonl", "", "log.jsonl is empty."),
        ("b/log.jsonl", "no line of a log\n", "log.jsonl has no row."),
        ("b/log.rank1.jsonl", "", "log.rank1.jsonl is empty."),
        ("b/run.json", '{"run_id": "a"}', "log.jsonl cannot be found beside run.json."),
        ("b/trainer_state.json", "", "trainer_state.json is not valid JSON."),
        ("b/run-x.wandb", "", "run-x.wandb does not begin as the file of a W&B run."),
    ],
)
def test_nothing_is_healthy_beside_a_log_without_content(tmp_path, monkeypatch, name, text, why):
    monkeypatch.chdir(tmp_path)
    good_and(tmp_path, name, text)
    report = health(["runs"])
    assert (report.verdict, report.complete, [one.message for one in report.errors]) == ("inconclusive", False, [why])
    with pytest.raises(CheckpointError, match=why):
        health(["runs/b"])


def test_the_empty_log_of_another_rank_leaves_nothing_healthy(tmp_path):
    write(tmp_path / "log.jsonl", [HEADER, *steps(0, 200)])
    assert health([tmp_path]).verdict == "healthy"
    (tmp_path / "log.rank1.jsonl").write_text("")
    report = health([tmp_path])
    assert (report.verdict, [one.what for one in report.errors]) == ("inconclusive", ["log.rank1.jsonl"])


def test_tables_of_other_things_are_left_out_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good_and(tmp_path, "b/metrics.csv", "step,test_accuracy\n10,0.9\n")
    for at in range(9):
        (tmp_path / "runs" / "good" / f"prices{at}.csv").write_text("day,price\n1,2\n")
    report = health(["runs"])
    assert (report.verdict, report.complete) == ("healthy", True)
    assert len(report.skipped) == 9
    assert {one.what for one in report.skipped} >= {"b/metrics.csv", "good/prices0.csv", "2 more files"}
