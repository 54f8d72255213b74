"""Logs whose numbers are none: a loss scale that no scaler has, a column of texts, of nothing."""

from __future__ import annotations

import json
import math

import pytest

from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import StepLine
from ampdoctor.health.reading.opening import find_log
from ampdoctor.workflows.health import health
from tests.health.logs import HEADER, write


def rows(count=200, **changed):
    made = []
    for at in range(count):
        row = {"step": at, "loss": 2 + 4 / (1 + at / 30), "grad_norm": 1 + 0.1 * math.sin(5 * at), "loss_scale": 1024.0}
        made.append(row | {name: of(at) if callable(of) else of for name, of in changed.items()})
    return made


def judged(tmp_path, rows):
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = health([tmp_path / "log.jsonl"])
    return report, {check.name: check.result for check in report.checks}


def errors(report):
    return [(one.code, one.where.step) for one in report.findings if one.severity == "error"]


@pytest.mark.parametrize(("scale", "since"), [(math.inf, 0), (math.nan, 100), (0.0, 100), (-5.0, 0)])
def test_a_scale_that_no_scaler_has(tmp_path, scale, since):
    report, checks = judged(tmp_path, rows(loss_scale=lambda at: scale if at >= since else 1024.0))
    assert (report.verdict, errors(report), checks["loss scale"]) == ("sick", [("AMP742", since)], "found")


@pytest.mark.parametrize(
    "scale", [None, 1.0, lambda at: math.nan if at % 10 else 1024.0, lambda at: None if at % 10 else 1024.0]
)
def test_scales_of_healthy_logs(tmp_path, scale):
    report, _ = judged(tmp_path, rows(loss_scale=scale))
    assert (report.verdict, report.findings, report.complete) == ("healthy", (), True)


@pytest.mark.parametrize("value", [True, "n/a", [], None])
def test_a_column_without_a_number_is_not_judged_and_without_a_loss_nothing_is_healthy(tmp_path, value):
    none = "not judged: none of 200 values is a number"
    report, checks = judged(tmp_path, rows(loss=value))
    assert (report.verdict, report.complete, checks["loss"]) == ("inconclusive", False, none)
    assert report.errors[0].message == "The loss is no number in 200 of 200 rows of log.jsonl."
    if value is None:  # a norm and a scale may be missing
        return
    _, checks = judged(tmp_path, rows(grad_norm=value, loss_scale=value))
    assert (checks["loss"], checks["gradient norm"], checks["loss scale"]) == ("ok", none, none)
    with pytest.raises(CheckpointError, match="no log that is read here"):
        judged(tmp_path, [{"step": at, "loss": value} for at in range(200)])


def written(folder, name, rows):
    """The rows as a log of this name; `log.jsonl` is ampdoctor's own, which leaves out what is missing."""
    if name == "log.jsonl":
        return write(
            folder / name, [HEADER, *(StepLine(step=r["step"], loss=r["loss"], gradient_norm=1.0) for r in rows)]
        )
    lines = ["step,loss,lr", *(f"{r['step']},{'' if r['loss'] is None else r['loss']},0.1" for r in rows)]
    texts = lines if name.endswith("csv") else [json.dumps({**r, "lr": 0.1}) for r in rows]
    (folder / name).write_text("\n".join(texts) + "\n")
    return folder / name


@pytest.mark.parametrize("name", ["log.jsonl", "t.csv", "t.jsonl"])
@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        (lambda at: at >= 150, "150 to 799"),
        (lambda at: 80 <= at < 120, "80 to 119"),
        (lambda at: at in range(40, 60) or at >= 790, "40 to 59, 790 to 799"),
        (lambda at: at % 20, None),  # logged now and then
        (lambda at: at > 100 and at % 20, None),  # more rarely from then on
        (lambda at: 80 <= at < 87, None),
    ],
)
def test_a_loss_that_is_missing_for_a_while_may_be_a_nan(tmp_path, name, lacks, said):
    """orjson, pandas and browsers write null, or nothing, for NaN."""
    path = written(
        tmp_path, name, [{"step": at, "loss": None if lacks(at) else 2 + 4 / (1 + at / 30)} for at in range(800)]
    )
    report = health([path])
    loss = next(check.result for check in report.checks if check.name == "loss")
    assert (report.verdict, report.complete) == (("healthy", True) if said is None else ("inconclusive", False))
    if said is not None:
        assert loss == f"not judged: it is missing in steps {said}"
        assert report.errors[0].message.startswith(f"The loss is missing in steps {said} of ")


@pytest.mark.parametrize("name", ["log.jsonl", "t.csv", "t.jsonl"])
@pytest.mark.parametrize("hidden", ["before", "after"])
def test_a_name_that_stands_twice_hides_no_nan(tmp_path, name, hidden):
    path = written(tmp_path, name, [{"step": at, "loss": 2 + 4 / (1 + at / 30)} for at in range(200)])
    lines = path.read_text().splitlines()
    if name == "t.csv":
        lines = ["step,loss,loss,lr", *(line.replace(",", f",{line.split(',')[1]},", 1) for line in lines[1:])]
        cells = lines[100].split(",")
        cells[1 if hidden == "before" else 2] = "nan"
        lines[100] = ",".join(cells)
    else:
        nan = '"loss": "NaN"'
        twice = (f"{nan}, ", "") if hidden == "before" else ("", f", {nan}")
        at = lines[100].index('"loss"')
        end = lines[100].index(",", at)
        lines[100] = f"{lines[100][:at]}{twice[0]}{lines[100][at:end]}{twice[1]}{lines[100][end:]}"
    path.write_text("\n".join(lines) + "\n")
    report = health([path])
    assert (report.verdict, report.complete) == ("inconclusive", False)
    assert [one.message for one in report.errors] == [
        f"In a line of {name} a name has two values, and readers disagree which of them counts."
    ]
    not_finite = [curve.nonfinite for curve in report.health.runs[0].curves if curve.name == "loss"]
    assert (not_finite != [None]) == (name != "log.jsonl")  # a line of ours is left out as a whole


def test_the_trainers_log_with_losses_that_are_none(tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows(loss=None)}))
    assert health([tmp_path]).verdict == "inconclusive"
    empty = [{"step": at, "loss": None} for at in range(50)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": empty}))
    with pytest.raises(CheckpointError, match="The loss is no number in 50 of 50 rows"):
        health([tmp_path])


@pytest.mark.parametrize("step", ["abc", True, lambda at: at + 0.5, lambda at: -at - 1])
def test_steps_that_are_none(tmp_path, step):
    with pytest.raises(CheckpointError, match="are no whole numbers from 0 on"):
        judged(tmp_path, rows(step=step))
    half = rows(step=lambda at: at if at % 2 else (step(at) if callable(step) else step))
    report, _ = judged(tmp_path, half)
    assert (report.verdict, report.complete) == ("inconclusive", False)
    few = rows(step=lambda at: at if at % 40 else (step(at) if callable(step) else step))
    report, _ = judged(tmp_path, few)
    assert (report.verdict, [one.what for one in report.skipped]) == ("healthy", ["5 values of the number of the step"])


def test_a_column_of_lightnings_that_comes_with_the_end_of_the_epoch(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "epoch,step,train_loss_step,train_loss_epoch,lr-AdamW,grad_norm\n"
        + "".join(f"0,{at},{2 + 4 / (1 + at / 30)},,,1.{at % 7}\n,{at},,,0.001,\n" for at in range(200))
    )
    report = health([tmp_path])
    assert (report.verdict, report.skipped, find_log(tmp_path).kind.format) == ("healthy", (), "lightning")
