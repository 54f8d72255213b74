"""A chart that W&B exports as CSV: a column for each run and metric, with its ranges beside it."""

from __future__ import annotations

import csv
import math

import pytest

from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import StepLine
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import find_log
from ampdoctor.workflows.health import health


def export(path, runs, metrics=("train/loss",), lost=math.inf, count=200):
    names = [f"{run} - {metric}" for run in runs for metric in metrics]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["Step", *(column for name in names for column in (name, f"{name}__MIN", f"{name}__MAX"))])
        for step in range(count):
            value = math.nan if step >= lost else 2 + 4 / (1 + step / 30)
            writer.writerow([10 * step, *(one for _ in names for one in (value, 0.5, 99.0))])
    return path


def test_an_export_of_one_run(tmp_path):
    path = export(tmp_path / "wandb_export.csv", ["a - b"], ("train/loss", "train/grad_norm"))
    lines = [one.line for one in find_log(path).lines(ReadIssues()) if isinstance(one.line, StepLine)]
    assert [(one.step, one.loss, one.gradient_norm) for one in lines[:2]] == [(0, 6.0, 6.0), (10, *[2 + 120 / 31] * 2)]
    assert health([path]).verdict == "healthy"
    report = health([export(tmp_path / "chart.csv", ["ruby-sun-12"], lost=180)])
    assert (report.verdict, report.findings[0].where.step) == ("sick", 1800)


def test_an_export_of_several_runs_is_none_of_one(tmp_path):
    with pytest.raises(CheckpointError, match="export of 2 runs, and a log is of one"):
        health([export(tmp_path / "chart.csv", ["ruby-sun-12", "red-moon-13"])])
