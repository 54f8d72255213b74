"""Inputs of public bug reports (fixtures/public) whose calls on the scaler are wrong, or are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampdoctor.reports.fix_code import Code, code_of, setting_of
from ampdoctor.reports.next_step import next_step
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

PUBLIC = Path(__file__).parents[2] / "fixtures" / "public"


def run(script, folder):
    """What `ampdoctor run` says of a script and with which code it ends, and its log."""
    command = [sys.executable, "-m", "ampdoctor", "run", "--health", "kept", str(script)]
    environment = {**os.environ, "COLUMNS": "1000"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    (log,) = (folder / "kept").glob("log*.jsonl")
    return done, [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def test_a_second_step_is_named_and_no_island_is_a_cure():
    script = PUBLIC / "double_step" / "script.py"
    report = bisect_nan(ReplayRequest(factory=str(script), steps=16))
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.where.step, finding.where.source.line) == ("AMP407", "error", 0, 17)
    assert finding.prescription.status == "not_run"
    assert "proved" not in next_step(report).said


def test_a_second_step_is_named_by_run_and_is_no_step_of_its_own(tmp_path):
    done, lines = run(PUBLIC / "double_step" / "script.py", tmp_path)
    assert "the optimizer steps again" in done.stderr
    assert (
        "step 12: the optimizer steps again on the gradients with which scaler.step(optimizer) has skipped"
        in done.stderr
    )
    assert "AMP203" not in done.stderr
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(24))


def test_half_weights_are_named_by_run_with_their_line(tmp_path):
    done, _ = run(PUBLIC / "unscale_fp16_trainer" / "script.py", tmp_path)
    assert "4 trained parameters are in fp16, the first of them 0.weight, made so at" in done.stderr
    assert "script.py:5" in done.stderr
    assert "no optimizer of torch's was stepped" not in done.stderr
    assert "scaler.scale(loss).backward()" not in done.stderr


def test_a_checkpoint_in_half_is_named_where_the_trainer_was_given_it(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script = tmp_path / "finetune.py"
    script.write_text((PUBLIC / "unscale_fp16_trainer" / "finetune.py").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    report = bisect_nan(ReplayRequest(factory="finetune.py"))
    (finding,) = report.findings
    assert (finding.code, finding.where.source.file, finding.where.source.line) == ("AMP407", "finetune.py", 28)
    assert "28 trained parameters are in fp16" in finding.message
    assert "change the code at finetune.py:28" in next_step(report).said
    assert code_of(finding.prescription, setting_of(report, finding), finding.cause) == Code()


def test_a_training_that_has_taken_no_step_ends_with_an_error(tmp_path):
    done, lines = run(PUBLIC / "all_steps_skipped" / "script.py", tmp_path)
    assert done.returncode == 1
    assert "ampdoctor rule AMP740" in done.stderr
    (end,) = (line for line in lines if line["kind"] == "end")
    assert end["accepted"] == 0
