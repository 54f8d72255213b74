"""The logs of public reports: each is called what its README calls it, and so are twins of the same kind."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from ampdoctor.reports.next_step import next_step
from ampdoctor.reports.text import verdict
from ampdoctor.workflows.health import health

PUBLIC = Path(__file__).parents[2] / "fixtures" / "public"


def grave(report):
    return [(one.code, one.severity, one.where.step) for one in report.findings if one.severity != "note"]


def checks(report):
    return {check.name: check.result for check in report.checks}


@pytest.mark.parametrize("name", ["trainer_state.json", "with_scale.csv", "without_scale.csv"])
def test_norms_of_steps_that_a_scaler_skipped(name):
    report = health([PUBLIC / "nan_norm_was_skipped" / name])
    assert (grave(report), report.verdict) == ([], "healthy")
    (run,) = report.health.runs
    assert (run.skipped, run.skip_share) == (3, pytest.approx(0.03))
    assert verdict(report) == ("healthy in what was judged: the loss and the gradient norm need 128 steps and have 97")
    assert checks(report)["loss"] == "needs 128 steps, has 97"


def table(path, rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_zero_that_the_trainer_writes_for_a_nan(tmp_path):
    report = health([PUBLIC / "trainer_zero_loss" / "trainer_state.json"])
    assert grave(report) == [("AMP722", "error", 54)]
    assert report.findings[0].evidence["first"] == "forward"
    (said,) = [part.reason for part in report.skipped if "not finite" in part.what]
    assert "the Trainer writes 0.0" in said
    assert "the loss of step 54 was not finite (the Trainer writes 0.0)" in report.findings[0].message
    (curve,) = [one for one in report.health.runs[0].curves if one.name == "loss"]
    assert sum(curve.nonfinite) == 47
    healthy = [{"step": step, "loss": 0.0 if step > 60 else 1.0, "grad_norm": 1.0 - step / 99} for step in range(99)]
    assert grave(health([table(tmp_path / "solved.csv", healthy)])) == []


def test_a_scale_that_has_fallen_to_its_floor():
    report = health([PUBLIC / "deepspeed_dies_at_floor" / "run.log"])
    assert ("AMP723", "error", 151) in grave(report)
    floor = next(one for one in report.findings if one.severity == "error")
    assert floor.message.endswith("gradients overflow even at this scale; the run has ended there.")
    assert floor.evidence["ended"].startswith("Exception: Current loss scale already at minimum")
    (run,) = report.health.runs
    assert (report.verdict, run.ending, run.exit_code) == ("sick", "ended", 1)
    assert next_step(report).line == "ampdoctor rule AMP723"
    assert checks(report)["loss scale"] == "found"


def test_a_log_of_the_loss_scale_alone_says_so(tmp_path):
    path = table(tmp_path / "scale.csv", [{"step": step, "loss_scale": 65536.0} for step in range(200)])
    assert verdict(health([path])) == "healthy as to the loss scale alone: no loss and no gradient norm was judged"
    rows = [{"step": step, "loss": 2 + 4 / (1 + step / 30), "loss_scale": 65536.0} for step in range(200)]
    whole = table(tmp_path / "whole.csv", rows)
    assert verdict(health([whole])) == "healthy"
    assert verdict(health([path, whole])).startswith("healthy; 1 of 2 logs without a loss or a gradient norm")
    short = table(tmp_path / "short.csv", rows[:60])
    assert verdict(health([short])) == "healthy in what was judged: the loss needs 128 steps and has 60"
    assert verdict(health([short, whole])) == "healthy; 1 of 2 logs with too few steps for all rules"
    lost = table(tmp_path / "lost.csv", [{"step": step, "loss_scale": 65536.0 / 2**step} for step in range(200)])
    assert verdict(health([lost])).startswith("sick")
