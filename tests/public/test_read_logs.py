"""Logs of public reports are read wherever their frameworks put them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdoctor.workflows.health import health

PUBLIC = Path(__file__).parents[2] / "fixtures" / "public"


@pytest.mark.parametrize("path", ["", "vis_data", "vis_data/scalars.json"])
def test_json_lines_of_mmengine(path):
    """open-mmlab/mmdetection#10335: in its folder, one level up, and named, with no note about a file that was read."""
    report = health([PUBLIC / "scalars_json_note" / "20240518_063801" / path])
    (run,) = report.health.runs
    assert (report.verdict, report.complete, report.skipped) == ("healthy", True, ())
    assert (run.format, run.steps, run.first_step, run.last_step) == ("table", 60, 50, 3000)


def test_overflows_of_deepspeed_alone(tmp_path):
    """ymcui/Chinese-LLaMA-Alpaca#534, under Accelerate, which has DeepSpeed print no steps."""
    text = (PUBLIC / "deepspeed_dies_at_floor" / "run.log").read_text()
    (tmp_path / "run.log").write_text("".join(line for line in text.splitlines(True) if "step=" not in line))
    (run,) = health([tmp_path / "run.log"]).health.runs
    assert (run.format, run.steps, run.skipped) == ("deepspeed", 11, 11)
