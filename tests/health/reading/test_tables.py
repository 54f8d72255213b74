"""Tables and JSON lines: the names of columns, what is no line of a log, and what is made to harm."""

from __future__ import annotations

import csv
import itertools
import json
import math

import pytest

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.log_records import StepLine
from ampdoctor.health.reading.log_files import MAX_LINE, SkippedLines, lines_in, thinned
from ampdoctor.health.reading.log_kind import ReadIssues, lines_of, run_of
from ampdoctor.health.reading.opening import find_log
from ampdoctor.health.reading.other_logs import TableRows
from ampdoctor.workflows.health import health


def read(tmp_path, name, text):
    """The steps of a log, each as `entry` makes it."""
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    noticed, left = ReadIssues(), SkippedLines()
    with RegularFile(tmp_path / name, name) as file:
        made = TableRows(file)
        noticed.left[name] = left
        rows = [*made.rows(lines_in(file, left=left), left), *made.rest(noticed)]
        lines = [whole.line for whole in lines_of(rows, run_of(tmp_path, name), noticed.order)]
    steps = {one.step: one for one in lines if isinstance(one, StepLine)}
    rate = lambda one: one.learning_rates[0] if one.learning_rates else None  # noqa: E731
    return [entry(at, one.loss, one.gradient_norm, one.loss_scale, rate(one)) for at, one in sorted(steps.items())]


def entry(step, loss=None, norm=None, scale=None, rate=None):
    return (step, loss, norm, scale, rate)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("step,train_loss_epoch,train_loss_step", [entry(8, 0.25), entry(9, 0.125)]),
        ("step,train_loss_epoch,other", [entry(9, 0.5)]),
    ],
)
def test_the_mean_of_an_epoch_stands_in_for_no_step_of_which_there_is_a_loss(tmp_path, columns, expected):
    assert read(tmp_path, "metrics.csv", f"{columns}\n8,,0.25\n9,,0.125\n9,0.5,\n") == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"step": 3, "loss": 1.5, "grad_norm": "nan", "lr": 0.1}, entry(3, 1.5, math.nan, rate=0.1)),
        ({"global_step": 3, "train/loss": 1.5, "train/loss_scale": 1024}, entry(3, 1.5, scale=1024.0)),
        ({"iteration": 3, "lm loss": 1.5, "grad-norm": 2, "loss_scale": 8}, entry(3, 1.5, 2.0, 8.0)),
        ({"num_updates": "3", "loss": "1.5", "gnorm": "0.5", "train_loss": 9}, entry(3, 1.5, 0.5)),
        ({"step": 3.0, "loss": 1e400}, entry(3, math.inf)),
        ({"step": 3, "Loss": "nan", "loss": 2.0}, entry(3, math.nan)),
        ({"step": 3, "loss": 2.0, "train/loss": math.inf}, entry(3, math.inf)),
    ],
)
def test_columns_have_the_names_that_trainers_give_them(tmp_path, row, expected):
    assert repr(read(tmp_path, "log.jsonl", json.dumps(row))) == repr([expected])


@pytest.mark.parametrize(
    "row",
    [
        {"step": 3, "eval/loss": 1.5, "val_loss": 2},
        {"loss": 1.5},
        {"step": -1, "loss": 1.5},
        {"step": 2.5, "loss": 1.5},
        {"step": 9, "train_loss": 0.3, "train_runtime": 12.0},  # the Trainer's summary of the run
        [{"step": 3, "loss": 1.5}],
        {"step": [3], "loss": {"a": 1}},
    ],
)
def test_what_is_no_line_of_a_training_log_is_passed_over(tmp_path, row):
    assert read(tmp_path, "log.jsonl", json.dumps(row)) == []


HOSTILE = {
    "deep.jsonl": "[" * 100_000 + "\n" + '{"a":' * 100_000 + "\n",
    "line.jsonl": '{"step": 1, "loss": "' + "9" * (MAX_LINE + 9) + '"}\n',
    "digits.jsonl": '{"step": 1, "loss": ' + "9" * 5000 + "}\n",
    "bytes.jsonl": bytes(range(256)) * 50,
    "wide.csv": "",
    "half.jsonl": '{"step": 7, "loss": 1.0}\n{"step": 8, "lo',
}


@pytest.mark.parametrize("name", [name for name in HOSTILE if name.endswith("jsonl")])
def test_hostile_and_broken_lines_give_nothing(tmp_path, name):
    assert read(tmp_path, name, HOSTILE[name]) == ([entry(7, 1.0)] if name == "half.jsonl" else [])


def test_a_hostile_table_gives_nothing(tmp_path):
    with pytest.raises(LimitExceededError, match="columns of a table"):
        read(tmp_path, "metrics.csv", ",".join(["step"] * 20_000) + "\n1\n")
    assert read(tmp_path, "metrics.csv", 'step,loss\n1,"' + "9" * 200_000 + '"\n') == []
    assert read(tmp_path, "metrics.csv", "\0,step\n") == []


def test_the_last_row_of_a_table_counts_once_its_line_has_an_end(tmp_path):
    text = "step,grad_norm\n1,9.1e-05\n2,9.1e-0"
    assert read(tmp_path, "metrics.csv", text) == [entry(1, norm=9.1e-05)]
    assert read(tmp_path, "metrics.csv", text + "5\n") == [entry(1, norm=9.1e-05), entry(2, norm=9.1e-05)]


def test_a_stray_quote_and_a_huge_cell_cost_no_more_than_the_lines_that_they_take(tmp_path):
    rows = "".join(f"{step},1.0\n" for step in range(500))
    quoted = read(tmp_path, "metrics.csv", 'step,loss\n"0,1.0\n' + rows)
    assert [one[0] for one in quoted] == list(range(500))
    huge = read(tmp_path, "metrics.csv", 'step,loss\n1,"' + "x" * 200_000 + '"\n' + rows)
    assert [one[0] for one in huge] == list(range(500))


@pytest.mark.parametrize(
    ("name", "text"), [("metrics.csv", "step,loss\n1,2.0\n"), ("log.jsonl", '{"step": 1, "loss": 2.0}\n')]
)
def test_a_byte_order_mark_is_no_part_of_a_log(tmp_path, name, text):
    assert read(tmp_path, name, b"\xef\xbb\xbf" + text.encode()) == [entry(1, 2.0)]


def test_a_very_long_log_is_thinned_evenly_with_both_ends():
    kept = thinned(range(20_000), 1000)
    assert 500 <= len(kept) <= 1001
    assert (kept[0], kept[-1]) == (0, 19_999)
    assert max(after - before for before, after in itertools.pairwise(kept)) < 120


def test_a_text_of_several_lines_in_quotes_is_one_cell(tmp_path):
    text = 'step,sample,loss\n1,"a ""first"",\nand a second, line",2.0\n2,short,1.0\n'
    assert read(tmp_path, "metrics.csv", text) == [entry(1, 2.0), entry(2, 1.0)]
    damaged = 'step,sample,loss\n0,"never closed,2.0\n' + "".join(f"{step},x,1.0\n" for step in range(1, 200))
    assert read(tmp_path, "metrics.csv", damaged) == [entry(step, 1.0) for step in range(1, 200)]


# -- a chart that W&B exports as CSV: a column for each run and metric, with its ranges beside it --


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
