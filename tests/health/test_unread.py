"""Logs whose numbers are none: a loss scale that no scaler has, a column of texts, of nothing."""

from __future__ import annotations

import json
import math

import pytest

from ampdoctor.errors import CheckpointError
from ampdoctor.health.reading.opening import find_log
from ampdoctor.workflows.health import health


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


@pytest.mark.parametrize("value", [True, "n/a", []])
def test_a_column_without_a_number_is_not_judged_and_without_a_loss_nothing_is_healthy(tmp_path, value):
    none = "not judged: none of 200 values is a number"
    report, checks = judged(tmp_path, rows(loss=value))
    assert (report.verdict, report.complete, checks["loss"]) == ("inconclusive", False, none)
    assert report.errors[0].message == "The loss is no number in 200 of 200 rows of log.jsonl."
    _, checks = judged(tmp_path, rows(grad_norm=value, loss_scale=value))
    assert (checks["loss"], checks["gradient norm"], checks["loss scale"]) == ("ok", none, none)
    with pytest.raises(CheckpointError, match="no log that is read here"):
        judged(tmp_path, [{"step": at, "loss": value} for at in range(200)])


def test_a_null_is_no_loss_and_may_be_a_nan(tmp_path):
    """orjson, pandas and browsers write null, or nothing, for NaN."""
    assert judged(tmp_path, rows(loss=None))[0].verdict == "inconclusive"
    late = rows(loss=lambda at: 2.0 + 0.01 * (at % 7) if at < 150 else None)
    report, _ = judged(tmp_path, late)
    assert (report.verdict, "in the last 50 rows" in report.errors[0].message) == ("inconclusive", True)
    (tmp_path / "t.csv").write_text(
        "step,loss,grad_norm\n"
        + "".join(f"{r['step']},{'' if r['loss'] is None else r['loss']},{r['grad_norm']}\n" for r in late)
    )
    assert health([tmp_path / "t.csv"]).verdict == "inconclusive"
    now_and_then = rows(loss=lambda at: None if at % 20 else 2 + 4 / (1 + at / 30), grad_norm=1.0)
    assert judged(tmp_path, now_and_then)[0].complete


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
