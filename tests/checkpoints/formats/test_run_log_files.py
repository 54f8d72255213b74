"""The log that ampdoctor writes of a run, read back: which of its lines stand, and what scan says of it."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints import log_files
from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.log_folders import opened
from ampdoctor.checkpoints.tensor_statistics import summarize
from ampdoctor.errors import CheckpointError, LimitExceededError, UsageError
from ampdoctor.evidence.log_records import DetailLine, LogRecord, RunLine, Stamp, StepLine, TensorDetail
from ampdoctor.evidence.log_text import text_of
from ampdoctor.health.reading.log_files import is_run_log, log_entry_of, read_details, read_steps
from ampdoctor.workflows.profile import ranges_of_log
from ampdoctor.workflows.scan import scan

SCALER = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}


def line(said, **stamp):
    return text_of(LogRecord(stamp=Stamp(**{"run_id": "r", "time_ms": 1, **stamp}), line=said))


def header(**more):
    return line(RunLine(name="test", **more))


def steps(*numbers, **stamp):
    return "".join(line(StepLine(step=step, loss=float(step)), **stamp) for step in numbers)


def written(folder, **files):
    """Write files, `log` for log.jsonl, `log_1` for log.1.jsonl; return their names, the oldest first."""
    names = []
    for key, text in files.items():
        names.append(f"{key.replace('_', '.')}.jsonl")
        (folder / names[-1]).write_text(text)
    return names


def read(folder, names, how=read_steps):
    with opened(folder, names) as files:
        return how(files)


def standing(folder, **files):
    found = read(folder, written(folder, **files))
    assert found.damaged == {}
    return [(entry.line.step, entry.stamp.attempt) for entry in found.standing]


def test_steps_are_read_from_all_files_by_step(tmp_path):
    found = standing(tmp_path, log_1=header() + steps(0, 2), log_2=header() + steps(1, 3), log=header() + steps(4))
    assert found == [(step, 0) for step in range(5)]


def test_what_a_rollback_has_undone_does_not_stand(tmp_path):
    text = header() + steps(0, 1, 2, 3, 4) + steps(2, 3, attempt=1) + steps(5) + steps(4, attempt=1)
    assert standing(tmp_path, log=text) == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1)]


def test_what_a_restart_or_a_later_run_has_undone_does_not_stand(tmp_path):
    first = header() + steps(0, 1, 2, 3)
    assert standing(tmp_path, log_1=first, log=header() + steps(2, restarts=1)) == [(0, 0), (1, 0), (2, 0)]
    assert standing(tmp_path, log_1=first, log=header() + steps(3, 4, run_id="a")) == [(s, 0) for s in range(5)]


@pytest.mark.parametrize("torn", ['{"kind":"step","run_id":"r","ti', "{", '{"kin', "\x00\x00"])
def test_a_last_line_that_was_cut_off_is_no_damage(tmp_path, torn):
    assert standing(tmp_path, log_1=header() + steps(0) + torn, log=header() + steps(1) + torn) == [(0, 0), (1, 0)]


def test_other_damage_is_counted_and_costs_no_other_line(tmp_path):
    text = header() + steps(0) + '{"kind":"step","step":"x"}\nhello\n' + line(StepLine(step=1)) + '{"kind":"weather"}\n'
    found = read(tmp_path, written(tmp_path, log=text))
    assert [entry.line.step for entry in found.standing] == [0, 1]
    assert found.damaged == {"log.jsonl": 2}
    assert [skipped.reason for skipped in scan(tmp_path).skipped] == ["it has 2 lines that are none of a run's log"]


def test_lines_of_a_later_version_are_passed_by(tmp_path):
    later = json.dumps({**json.loads(steps(7)), "schema_version": 2}).replace(": ", ":") + "\n"
    found = read(tmp_path, written(tmp_path, log=header() + steps(0) + later))
    assert [entry.line.step for entry in found.standing] == [0]


def test_details_come_with_the_names_that_their_own_file_gives(tmp_path):
    def detail(step, tensor):
        return line(DetailLine(step=step, tensors=(TensorDetail(tensor=tensor, role="gradient"),)))

    names = written(
        tmp_path,
        log_1=header(tensors=("a",)) + detail(0, 0) + header(tensors=("a", "b")) + detail(1, 1),
        log=header(tensors=("c",)) + detail(2, 0),
    )
    found = read(tmp_path, names, read_details).standing
    assert [entry.run.tensors[entry.line.tensors[0].tensor] for entry in found] == ["a", "b", "c"]


def test_a_long_log_is_thinned_and_a_longer_one_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "MAX_PARSED", 100)
    names = written(tmp_path, log=header() + steps(*range(1000)))
    kept = [entry.line.step for entry in read(tmp_path, names).standing]
    assert 50 <= len(kept) <= 101
    assert (kept[0], kept[-1], kept) == (0, 999, sorted(kept))
    monkeypatch.setattr(log_files, "MAX_LINES", 1000)
    with pytest.raises(LimitExceededError, match=r"log\.jsonl: lines of a log"):
        read(tmp_path, names)


@pytest.mark.parametrize(
    ("more", "norm"),
    [
        ({}, 6.0),
        ({"norm_scaled": True, "loss_scale": 4.0}, 1.5),
        ({"norm_scaled": True}, None),
        ({"norm_clipped": True}, None),
    ],
)
def test_a_norm_is_the_one_before_clipping_and_unscaled(more, norm):
    entry = log_entry_of(StepLine(step=3, loss=1.0, gradient_norm=6.0, learning_rates=(0.1, 0.2), skipped=True, **more))
    assert (entry.grad_norm, entry.learning_rate, entry.skipped) == (norm, 0.1, True)


@pytest.mark.parametrize(("text", "ours"), [(header(), True), ('{"step": 1, "loss": 2}\n', False), ("", False)])
def test_our_log_is_told_by_how_it_begins(tmp_path, text, ours):
    written(tmp_path, log=text)
    with RegularFile(tmp_path / "log.jsonl", "log.jsonl") as file:
        assert is_run_log(file) == ours


def test_a_folder_with_nothing_but_a_log_is_examined(tmp_path, check_report):
    sick = "".join(line(StepLine(step=s, loss=math.nan, loss_scale=512.0, growth_tracker=s)) for s in range(50, 60))
    written(tmp_path, log_1=header(scaler=SCALER) + steps(*range(50)), log=header(scaler=SCALER) + sick)
    (tmp_path / "run.json").write_text("{}")
    report = scan(tmp_path)
    assert (report.verdict, report.complete, [f.code for f in report.findings]) == ("sick", True, ["AMP701"])
    assert report.findings[0].where.global_step == 50
    assert [file["path"] for file in report.target["files"]] == ["log.1.jsonl", "log.jsonl"]
    assert (report.target["format"], report.target["global_step"]) == ("run-log", 59)
    assert (report.scaler.current["scale"], report.scaler.current["growth_tracker"]) == (512.0, 59)
    assert [check.name for check in report.checks] == ["loss scaler", "training log"]
    one = scan(tmp_path / "log.1.jsonl")
    assert (one.verdict, one.target["global_step"]) == ("healthy", 49)


def test_a_file_of_the_log_that_cannot_be_opened_makes_the_scan_incomplete(tmp_path):
    written(tmp_path, log_1=header() + steps(*range(50)), log=header() + steps(*range(100, 150)))
    os.mkfifo(tmp_path / "log.2.jsonl")
    report = scan(tmp_path)
    assert (report.verdict, report.complete, report.target["global_step"]) == ("inconclusive", False, 149)
    assert [one.message for one in report.errors] == ["log.2.jsonl is a FIFO, not a regular file."]
    with pytest.raises(UsageError, match=r"log\.2\.jsonl is a FIFO"):
        ranges_of_log(str(tmp_path))


@pytest.mark.parametrize(
    ("scaler", "known"),
    [(SCALER, 1), ({"cur_scale": 4.0, "cur_iter": 3}, 1), ({"scale": 4.0}, 0), ({"odd": [1]}, 0), ({}, 0)],
)
def test_a_scaler_of_an_unknown_form_is_none(tmp_path, scaler, known):
    written(tmp_path, log=header(scaler=scaler) + steps(0, 1))
    with open_checkpoint(tmp_path) as found:
        assert len(found.scalers) == known
    assert scan(tmp_path).verdict == "healthy"


def test_a_table_of_many_names_is_read(tmp_path):
    names = tuple(f"model.layers.{index}.experts.{index}.weight" for index in range(50_000))
    detail = line(DetailLine(step=0, tensors=(TensorDetail(tensor=49_999, role="gradient"),)))
    found = read(tmp_path, written(tmp_path, log=header(tensors=names) + detail), read_details)
    assert (found.standing[0].run.tensors[-1], found.damaged) == (names[-1], {})


def test_a_log_may_grow_while_it_is_examined(tmp_path):
    written(tmp_path, log=header() + steps(0, 1))
    with open_checkpoint(tmp_path) as found:
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write(steps(2))
        summary = summarize(found)
    assert [entry.step for entry in summary.log] == [0, 1]


def test_a_log_of_several_optimizers_is_judged_by_the_first(tmp_path):
    both = "".join(
        line(StepLine(step=step, optimizer=optimizer, loss=1.0 + optimizer))
        for step in range(5)
        for optimizer in (0, 1)
    )
    written(tmp_path, log=header() + both)
    with open_checkpoint(tmp_path) as found:
        assert [(entry.step, entry.loss) for entry in found.log] == [(step, 1.0) for step in range(5)]


def test_beside_a_checkpoint_it_is_its_training_log(tmp_path):
    save_file({"fc.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    written(tmp_path, log_1=header() + steps(0, 1), log=header() + steps(2))
    with open_checkpoint(tmp_path) as found:
        assert (found.format, [entry.step for entry in found.log], len(found)) == ("folder", [0, 1, 2], 1)


def test_skips_that_the_log_tells_count_where_the_scale_stays(tmp_path):
    def told(share):
        said = [StepLine(step=s, loss=1.0, loss_scale=4.0, skipped=s % 100 < share) for s in range(1000)]
        written(tmp_path, log=header(scaler=SCALER) + "".join(map(line, said)))
        return [(f.code, f.severity, f.evidence["skipped"]) for f in scan(tmp_path).findings if f.code == "AMP707"]

    assert told(20) == [("AMP707", "warning", 200)]
    assert told(5) == [("AMP707", "note", 50)]
    assert told(0) == []


def test_a_folder_with_another_s_log_alone_names_the_command_that_reads_it(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(CheckpointError, match=r"is a training log and no checkpoint; `ampdoctor health .*` reads it"):
        scan(tmp_path)


def test_a_folder_of_logs_names_the_last(tmp_path):
    for name in ("1-run", "2-run"):
        (tmp_path / name).mkdir()
        written(tmp_path / name, log=header() + steps(0))
    with pytest.raises(CheckpointError, match=r"but the logs of runs; name one of them, for example 2-run\."):
        scan(tmp_path)


def test_a_log_without_a_step_has_nothing_to_examine(tmp_path):
    written(tmp_path, log=header())
    with pytest.raises(CheckpointError, match="nothing to examine"):
        scan(tmp_path)
