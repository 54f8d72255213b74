"""A training that is watched is judged while it goes on: alerts in its log, as sentences, to a function."""

from __future__ import annotations

import logging
import math
import runpy
import sys
import threading
from pathlib import Path

import pytest
import torch

import ampdoctor
from ampdoctor.evidence.log_records import AlertLine, DetailLine, RunLine, StepLine
from ampdoctor.evidence.log_text import line_of
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.workflows.health import health
from ampdoctor.workflows.log_listeners import Alerting
from tests.health.logs import stamped

SICK = 90


def train(folder, *, spoiled=True, steps=120, after=lambda step: None, **options):
    """Ninety quiet steps, and then a batch that is a thousand times too large."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ampdoctor.watch(folder=folder, every=50, **options):
        for step in range(steps):
            x = torch.randn(32, 8)
            y = x.sum(1, keepdim=True) * (1000 if spoiled and step == SICK else 1)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            after(step)
    return [one.line for text in (folder / "log.jsonl").read_text().splitlines() if (one := line_of(text)) is not None]


def test_an_alert_is_a_line_a_sentence_and_a_call(tmp_path, caplog):
    heard = []
    with caplog.at_level(logging.WARNING, "ampdoctor"):
        lines = train(tmp_path / "log", on_alert=heard.append)
    alert, *later = [line for line in lines if isinstance(line, AlertLine)]
    assert {line.finding.code for line in later} <= {"AMP724", "AMP741"}  # what the step has done to the training
    assert (alert.step, alert.finding.code, alert.finding.severity) == (SICK, "AMP720", "warning")
    assert alert.finding.evidence["first"] == "both"
    assert [f.code for f in heard] == [line.finding.code for line in (alert, *later)]
    said, *_ = [record.message for record in caplog.records]
    assert said.startswith(f"warning AMP720 at step {SICK}: ")


def test_of_several_optimizers_it_is_said_whose_step_it_was():
    said = []
    alerting = Alerting(lambda _: None, said.append, DEFAULT_THRESHOLDS)
    alerting.add(stamped(RunLine(name="gan", optimizers=("optimizer", "optimizer2"))))
    for step in range(40):
        for at in range(2):
            loss = math.nan if (step, at) == (39, 1) else 2.0
            alerting.add(stamped(StepLine(step=step, optimizer=at, loss=loss, gradient_norm=1.0, skipped=False)))
    assert [one.partition(":")[0] for one in said] == ["error AMP722 at step 39 of optimizer2"]


def test_a_healthy_training_hears_nothing(tmp_path, caplog):
    lines = train(tmp_path / "log", spoiled=False)
    assert [line for line in lines if isinstance(line, AlertLine)] == []
    assert caplog.records == []


def test_a_firing_raises_the_sampling(tmp_path):
    alerted = threading.Event()

    def after(step):
        if step == SICK + 20:  # by then its line has been heard, or will be soon
            assert alerted.wait(30)

    lines = train(tmp_path / "log", steps=130, after=after, on_alert=lambda finding: alerted.set())
    looked = {line.step: line.reason for line in lines if isinstance(line, DetailLine)}
    raised = [step for step, reason in looked.items() if reason in {"gradient-jump", "level-shifts", "climbs-at-first"}]
    assert 1 <= len(raised) <= 9  # three looks for each alert
    assert all(step > SICK for step in raised)
    assert len([line for line in lines if isinstance(line, StepLine)]) == 130


def test_a_function_that_raises_is_called_no_more_and_harms_nobody(tmp_path, caplog):
    calls = []

    def on_alert(finding):
        calls.append(finding)
        raise ValueError("no network")

    lines = train(tmp_path / "log", on_alert=on_alert)
    assert len(calls) == 1
    assert any("on_alert is called no more: ValueError: no network" in record.message for record in caplog.records)
    assert sum(isinstance(line, StepLine) for line in lines) == 120


def test_what_is_usual_survives_a_restart(tmp_path, monkeypatch):
    """A job that torchrun has started anew is judged from its first step on, and its log afterwards as well."""
    folder = tmp_path / "log"
    train(folder, spoiled=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr("tests.workflows.test_alerting.SICK", 5)
    lines = train(folder, steps=20)
    assert [(line.step, line.finding.code) for line in lines if isinstance(line, AlertLine)] == [(5, "AMP720")]
    assert [(f.code, f.where.step) for f in health([folder]).findings] == [("AMP720", 5)]


def test_a_training_that_begins_from_nothing_in_the_same_folder_is_another(tmp_path, monkeypatch):
    folder = tmp_path / "log"
    train(folder, spoiled=False)
    monkeypatch.setattr("tests.workflows.test_alerting.SICK", 5)
    lines = train(folder, steps=20)
    assert [line for line in lines if isinstance(line, AlertLine)] == []


PUBLIC = Path(__file__).parents[2] / "fixtures" / "public"


def watched(script, folder, monkeypatch, *arguments):
    """What is told while a script of a public report runs: loud alerts, as (code, severity)."""
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    heard = []
    with ampdoctor.watch(folder=folder, every=1000, look="off", on_alert=heard.append):
        runpy.run_path(str(script), run_name="__main__")
    return [(one.code, one.severity) for one in heard if one.severity != "note"]


def test_a_scaler_made_anew_for_each_epoch_is_told_while_it_runs(tmp_path, monkeypatch):
    script = PUBLIC / "all_steps_skipped" / "script.py"
    assert watched(script, tmp_path / "log", monkeypatch) == [("AMP740", "error")]
    report = health([tmp_path / "log"])
    assert report.verdict == "sick"
    assert {check.name: check.result for check in report.checks}["steps"] == "found"


def test_the_same_with_one_scaler_for_all_epochs_is_left_alone(tmp_path, monkeypatch):
    text = (PUBLIC / "all_steps_skipped" / "script.py").read_text()
    made = '    scaler = torch.amp.GradScaler("cpu")  # belongs before the epochs\n'
    assert made in text
    script = tmp_path / "script.py"
    script.write_text(text.replace(made, "").replace("def train_epoch", f"{made.strip()}\n\n\ndef train_epoch"))
    assert watched(script, tmp_path / "log", monkeypatch) == []


@pytest.mark.parametrize(("grow", "told"), [("1.08", {("AMP741", "error")}), ("1.0", set())])
def test_a_short_run_that_climbs_is_told_and_its_twin_is_not(tmp_path, monkeypatch, grow, told):
    script = PUBLIC / "short_run_climbs" / "script.py"
    heard = watched(script, tmp_path / "log", monkeypatch, "--grow", grow)
    assert told <= set(heard) <= told | {("AMP741", "warning")}  # of the norm, until the loss has doubled
    report = health([tmp_path / "log"])
    assert report.verdict == ("sick" if told else "healthy")
    said = {check.name: check.result for check in report.checks}
    assert said["loss"] == ("found" if told else "needs 128 steps, has 120")
