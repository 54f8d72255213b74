"""The log beside a checkpoint: `scan` and `health` say the same of it, and what a run came back from is a note."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch

from ampdoctor.checkpoints.files import list_folder
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import EndLine, LogRecord, RunLine, Stamp, StepLine
from ampdoctor.evidence.log_text import text_of
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.workflows import scan_log
from ampdoctor.workflows.health import health
from ampdoctor.workflows.scan import scan

FIXTURES = Path(__file__).parents[3] / "fixtures"
NAN, INF = math.nan, math.inf


def rows(steps=200, every=1, **last):
    """A healthy run; `last` are functions of the step for its values from half of it on."""
    rng = random.Random(0)
    made = []
    for step in range(every, steps * every + 1, every):
        row = {
            "step": step,
            "loss": 2.5 * math.exp(-step / 500 / every) + rng.gauss(0, 0.1),
            "grad_norm": math.exp(rng.gauss(0, 0.4)),
            "learning_rate": 1e-3,
        }
        made.append(row | ({name: of(step) for name, of in last.items()} if step > steps * every / 2 else {}))
    return made


def only(step, value, otherwise=1.0):
    return lambda at: value if at == step else otherwise


TRAINERS = {
    "healthy": rows(),
    "loss_nan_to_the_end": rows(loss=lambda _: NAN),
    "loss_nan_every_50_steps": rows(every=50, loss=lambda _: NAN),
    "norm_inf_to_the_end": rows(grad_norm=lambda _: INF, loss=lambda at: 2.3 + 0.01 * math.sin(at)),
    "one_norm_60_times": rows(grad_norm=only(150, 60.0)),
    "scale_halves_19_times": rows(loss_scale=lambda at: 65536.0 * 0.5 ** max(0, at - 181)),
    "norm_zero_to_the_end": rows(grad_norm=lambda _: 0.0, loss=lambda at: 2.3 + 0.01 * math.sin(at)),
    "loss_constant": rows(loss=lambda _: 2.302585092994046),
}


def weights(folder):
    torch.save({"weight": torch.ones(4, 4)}, folder / "pytorch_model.bin")
    return folder


def trainer(folder, log):
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": log[-1]["step"], "log_history": log}))
    return weights(folder)


def ours(folder, log):
    lines = [RunLine(name="r"), *(StepLine(step=r["step"], loss=r["loss"], gradient_norm=r["grad_norm"]) for r in log)]
    text = "".join(text_of(LogRecord(stamp=Stamp(run_id="r", time_ms=1), line=line)) for line in [*lines, EndLine()])
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text(text)
    return weights(folder)


def table(folder, log, name="metrics.csv", separator=","):
    folder.mkdir(exist_ok=True)
    lines = [separator.join(map(str, row.values())) for row in log]
    (folder / name).write_text("\n".join([separator.join(log[0]), *lines]) + "\n")
    return weights(folder)


def json_lines(folder, log):
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    return weights(folder)


def require_agreement(folder):
    """The same findings at the same steps; those of `scan` are notes where the run came back, and else as bad."""
    of_log = [f for f in scan(folder).findings if f.code.startswith("AMP7")]
    scanned = {(f.code, f.where.global_step, f.where.tensor): f for f in of_log}
    told = {(f.code, f.where.step, f.where.tensor): f for f in health([folder]).findings}
    assert scanned.keys() == told.keys()
    for key, finding in scanned.items():
        over = finding.message.endswith("The run has come back from it since.")
        explained = finding.cause is not None and finding.severity == "error"
        assert finding.severity == ("note" if over else told[key].severity) or explained
    return {f.code: f.severity for f in reversed(of_log)}  # the worst of each


SEVERITIES = {
    "healthy": {},
    "loss_nan_to_the_end": {"AMP722": "error"},
    "loss_nan_every_50_steps": {"AMP722": "error"},
    "norm_inf_to_the_end": {"AMP740": "error"},
    "one_norm_60_times": {"AMP720": "note"},
    "scale_halves_19_times": {"AMP723": "error"},
    "norm_zero_to_the_end": {"AMP702": "error"},
    "loss_constant": {"AMP705": "warning"},
}


@pytest.mark.parametrize("name", TRAINERS)
def test_what_scan_says_of_a_trainers_log(tmp_path, name):
    assert require_agreement(trainer(tmp_path / "run", TRAINERS[name])) == SEVERITIES[name]


LOGS = sorted(
    path
    for path in (FIXTURES / "public").glob("*/*")
    if path.suffix in {".csv", ".log", ".jsonl"} or path.name == "trainer_state.json"
)


@pytest.mark.parametrize(
    "log", [*LOGS, FIXTURES / "logs" / "tensorboard"], ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_scan_and_health_say_the_same_of_the_logs_of_public_reports(tmp_path, log):
    if log.is_dir():
        shutil.copytree(log, tmp_path / "run")
    else:
        (tmp_path / "run").mkdir()
        shutil.copy(log, tmp_path / "run" / log.name)
    require_agreement(weights(tmp_path / "run"))


def test_a_nan_that_the_run_came_back_from_is_a_note(tmp_path):
    log = rows(loss=lambda at: NAN if 120 <= at < 124 else 2.0 + at % 7 / 50)
    folder = trainer(tmp_path / "run", log)
    assert require_agreement(folder)["AMP722"] == "note"
    assert (scan(folder).verdict, health([folder]).verdict) == ("healthy", "sick")
    assert require_agreement(trainer(tmp_path / "run", log[:122]))["AMP722"] == "error"


def test_a_log_that_is_too_long_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(scan_log, "MOST_BYTES", 1000)
    report = scan(table(tmp_path / "run", TRAINERS["loss_nan_to_the_end"]))
    (skipped,) = report.skipped
    assert (report.verdict, skipped.what) == ("healthy", "metrics.csv")
    assert skipped.reason.endswith("0 MB are more than the 0 that a scan reads; `ampdoctor health` does")


def test_the_longest_log_of_a_folder_is_judged_and_the_trainers_own_before_all(tmp_path):
    folder = table(tmp_path / "run", TRAINERS["loss_nan_to_the_end"])
    json_lines(folder, TRAINERS["healthy"][:100])
    (folder / "data.jsonl").write_text('{"text": "a sentence", "label": 3}\n' * 9)
    (folder / "logs.jsonl").mkdir()

    def entries():
        beside, skipped = scan_log.log_beside([(list_folder(folder), "")], DEFAULT_THRESHOLDS)
        return beside and beside.run.steps, skipped

    assert entries() == (200, ())
    trainer(folder, TRAINERS["healthy"][:20])
    assert entries() == (20, ())


@pytest.mark.parametrize("written", [ours, json_lines, trainer])
def test_a_log_alone_is_no_checkpoint_and_the_command_that_reads_it_is_named(tmp_path, written):
    folder = written(tmp_path / "run", rows(20))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"is a training log and no checkpoint; `ampdoctor health .*` reads it"):
        scan(folder)
    (log,) = folder.iterdir()
    with pytest.raises(CheckpointError, match=r"is a training log and no checkpoint; `ampdoctor health .*` reads it"):
        scan(log)
