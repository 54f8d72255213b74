"""The logs of public reports: each is called what its README calls it, and so are twins of the same kind."""

from __future__ import annotations

import csv
import json
import math
import random
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
    assert checks(report)["loss"] == "not judged: 97 of 128 steps"


def table(path, rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def run_of(count, *, skips=(), lost=math.inf, scale=None):
    """A training that skips some steps, or takes a NaN at one; rows as a logger of metrics writes them."""
    draw = random.Random(7)
    rows = []
    for step in range(count):
        ill = step in skips or step >= lost
        loss = math.nan if step > lost else 2 + 4 / (1 + step / 30) + draw.gauss(0, 0.02)
        row = {"step": step, "loss": loss, "grad_norm": math.nan if ill else draw.uniform(1, 1.2)}
        rows.append(row if scale is None else row | {"loss_scale": scale * 0.5 ** sum(step > one for one in skips)})
    return rows


def test_a_longer_one_whose_last_step_is_ill(tmp_path):
    skips = (*range(9), 120, 299)
    alone = health([table(tmp_path / "alone.csv", run_of(300, skips=skips))])
    assert grave(alone) == [("AMP722", "warning", 299)]
    assert "either a scaler has skipped it" in alone.findings[0].message
    followed = health([table(tmp_path / "followed.csv", run_of(301, skips=skips))])
    assert (grave(followed), followed.health.runs[0].skipped) == ([], 11)


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_weights_that_took_the_nan(tmp_path, scale):
    """Clipping to a NaN norm, and no scaler that skips: every loss behind it is NaN."""
    report = health([table(tmp_path / "lost.csv", run_of(200, lost=150, scale=scale))])
    assert (grave(report), report.verdict) == ([("AMP722", "error", 150)], "sick")
    assert report.findings[0].evidence["first"] == "gradient"


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
    assert "bisect-nan" in next_step(report).line
    assert checks(report)["loss scale"] == "found"


def test_a_log_is_read_the_same_by_every_name_of_its_columns(tmp_path):
    rows = [{"global_step": r["step"], "train/loss": r["loss"], "train/grad_norm": r["grad_norm"]}
            for r in run_of(200, skips=(3, 77))]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = health([tmp_path / "log.jsonl"])
    assert (grave(report), report.health.runs[0].skipped) == ([], 2)


def test_a_norm_that_grows_once_there_is_a_usual(tmp_path):
    """The loss falls for 120 steps and then climbs back for 80: what is usual, a median of 128, follows both."""
    rows = run_of(200)
    for row in rows:
        row["grad_norm"] = 1.1 * 1.08 ** max(0, row["step"] - 110)
    learns = health([table(tmp_path / "learns.csv", rows)])
    assert grave(learns) == []  # a norm that grows while the loss falls
    for row in rows[120:]:
        row["loss"] += 0.15 * (row["step"] - 120)
    report = health([table(tmp_path / "climbs.csv", rows)])
    assert ("AMP741", "warning") in [(code, severity) for code, severity, _ in grave(report)]
    assert checks(report)["gradient norm"] == "found"


def test_a_log_of_the_loss_scale_alone_says_so(tmp_path):
    path = table(tmp_path / "scale.csv", [{"step": step, "loss_scale": 65536.0} for step in range(200)])
    assert verdict(health([path])) == "healthy as to the loss scale alone: no loss and no gradient norm was judged"
    whole = table(tmp_path / "whole.csv", run_of(200, scale=65536.0))
    assert verdict(health([whole])) == "healthy"
    assert verdict(health([path, whole])).startswith("healthy; 1 of 2 logs without a loss or a gradient norm")
    lost = table(tmp_path / "lost.csv", [{"step": step, "loss_scale": 65536.0 / 2**step} for step in range(200)])
    assert verdict(health([lost])).startswith("sick")
