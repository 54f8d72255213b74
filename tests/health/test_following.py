"""A log that grows is read on, each line once, whatever becomes of its files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import EndLine, LogRecord, RunLine, Stamp, StepLine
from ampdoctor.evidence.log_text import text_of
from ampdoctor.health import following
from ampdoctor.health.following import Follower
from ampdoctor.live.log.run_log import RunLog
from ampdoctor.live.log.thread import Limits


class Writer:
    """Writes a log by hand, line by line."""

    def __init__(self, folder, run_id="r", first=0):
        self.folder, self.stamp, self.segment, self.next = folder, Stamp(run_id=run_id, time_ms=0), 0, first
        folder.mkdir(exist_ok=True)
        self.begin()

    @property
    def path(self):
        return self.folder / "log.jsonl"

    def begin(self):
        """Begins a file, with the one before it under its number."""
        if self.path.exists():
            self.path.rename(self.folder / f"log.{self.segment}.jsonl")
        self.segment += 1
        self.put(RunLine(name="test", segment=self.segment))

    def put(self, line, *, cut=None):
        text = text_of(LogRecord(self.stamp, line))
        with self.path.open("a") as file:
            file.write(text[:cut])

    def steps(self, count):
        for _ in range(count):
            self.put(StepLine(step=self.next, loss=1.0))
            self.next += 1


def steps(follower):
    return [whole.line.step for whole in follower.new() if isinstance(whole.line, StepLine)]


def test_each_line_once(tmp_path):
    log, follower = Writer(tmp_path), Follower(tmp_path)
    log.steps(3)
    assert steps(follower) == [0, 1, 2]
    assert steps(follower) == []
    log.steps(1)
    log.put(StepLine(step=4), cut=40)
    assert steps(follower) == [3]
    with log.path.open("a") as file:
        file.write(text_of(LogRecord(log.stamp, StepLine(step=4)))[40:])
    assert steps(follower) == [4]


def test_files_that_were_finished_meanwhile(tmp_path):
    log, follower = Writer(tmp_path), Follower(tmp_path / "log.jsonl")
    log.steps(2)
    assert steps(follower) == [0, 1]
    for _ in range(3):
        log.steps(2)
        log.begin()
    log.steps(1)
    assert steps(follower) == list(range(2, 9))


def test_a_rotation_between_two_openings_is_not_read_out_of_order(tmp_path, monkeypatch):
    log, follower = Writer(tmp_path), Follower(tmp_path)
    log.steps(1)
    assert steps(follower) == [0]
    log.steps(1)
    listed, calls = following._Ours._listed, []

    def rotating(self):
        found = listed(self)
        calls.append(found)
        if len(calls) == 1:  # the list is made, and the file has another name when it is opened
            log.begin()
            log.steps(1)
        return found

    monkeypatch.setattr(following._Ours, "_listed", rotating)
    assert steps(follower) == [1, 2]
    assert len(calls) > 2


def test_details_that_are_thinned_out_of_a_finished_file_do_not_bring_it_back(tmp_path):
    log, follower = Writer(tmp_path), Follower(tmp_path)
    log.steps(4)
    assert steps(follower) == [0, 1, 2, 3]
    log.begin()
    log.steps(1)
    assert steps(follower) == [4]
    old = tmp_path / "log.1.jsonl"
    whole = old.read_bytes().splitlines(keepends=True)
    new = tmp_path / ".new"
    new.write_bytes(b"".join(whole[:2]))
    new.replace(old)
    log.steps(1)
    assert steps(follower) == [5]


def test_a_line_that_is_taken_back_and_a_file_begun_anew(tmp_path):
    log, follower = Writer(tmp_path), Follower(tmp_path)
    log.steps(3)
    assert steps(follower) == [0, 1, 2]
    size = log.path.stat().st_size
    log.put(StepLine(step=3), cut=30)  # a full disk: what was written of it is taken back
    assert steps(follower) == []
    os.truncate(log.path, size)
    log.steps(1)
    assert steps(follower) == [3]
    with log.path.open("a") as file:
        file.write('{"kind":"step","half a li\n{"kind":"of tomorrow","schema_version":2}\n')
    log.steps(1)
    assert steps(follower) == [4]
    log.path.unlink()
    assert steps(follower) == []
    Writer(tmp_path, run_id="another").steps(2)
    assert steps(follower) == [0, 1]


def test_what_is_not_there_yet(tmp_path):
    follower = Follower(tmp_path / "later")
    assert steps(follower) == []
    (tmp_path / "later").mkdir()
    assert steps(follower) == []
    (tmp_path / "later" / "log.jsonl").write_text("")
    assert steps(follower) == []
    assert follower.found is None
    (tmp_path / "later" / "log.jsonl").unlink()
    Writer(tmp_path / "later").steps(1)
    assert steps(follower) == [0]


def test_the_output_of_a_job_that_has_no_step_yet_is_waited_for(tmp_path):
    path, follower = tmp_path / "job.out", Follower(tmp_path / "job.out")
    path.write_text("world size 8\ncompiling\n")
    assert [steps(follower), steps(follower)] == [[], []]
    path.write_text(path.read_text() + "step 0: loss 2.0\nstep 1: loss 1.9\n")
    assert steps(follower) == [0, 1]
    path.write_text("world size 8\ncompiling\n")
    os.utime(path, (1_700_000_000, 1_700_000_000))
    with pytest.raises(CheckpointError, match="is no log that is read here"):
        list(Follower(path).new())


def test_a_fifo_or_a_link_to_nothing_among_its_files_holds_nothing_up(tmp_path):
    log, follower = Writer(tmp_path), Follower(tmp_path)
    os.mkfifo(tmp_path / "log.1.jsonl")
    (tmp_path / "log.2.jsonl").symlink_to("nothing")
    log.steps(2)
    assert steps(follower) == [0, 1]


def test_another_rank_s_lines_are_not_mixed_in(tmp_path):
    log = Writer(tmp_path)
    log.steps(1)
    other = replace(log.stamp, rank=3)
    (tmp_path / "log.rank3.jsonl").write_text(
        text_of(LogRecord(other, RunLine(name="x"))) + text_of(LogRecord(other, StepLine(step=77)))
    )
    assert steps(Follower(tmp_path)) == [0]
    assert steps(Follower(tmp_path / "log.rank3.jsonl")) == [77]


def test_a_log_of_another_kind_is_read_anew_where_it_has_changed(tmp_path):
    path = tmp_path / "trainer_state.json"

    def saved(count):
        entries = [{"step": 10 * at, "loss": 1.0, "epoch": 0.1} for at in range(1, count + 1)]
        path.write_text(json.dumps({"global_step": 10 * count, "log_history": entries, "max_steps": 100}))

    saved(2)
    follower = Follower(tmp_path)
    assert steps(follower) == [10, 20]
    assert steps(follower) == []
    saved(4)
    assert steps(follower) == [30, 40]
    path.write_text('{"global_step": 50, "log_hist')  # it is being written
    assert steps(follower) == []
    saved(5)
    assert steps(follower) == [50]


def test_a_step_that_gets_a_number_later_is_given_with_it_and_one_that_does_not_after_a_while(tmp_path, monkeypatch):
    path, follower = tmp_path / "a.csv", Follower(tmp_path)
    monkeypatch.setattr(following, "_LONG_S", 1e9)
    head = "step,loss,grad_norm\n"
    path.write_text(f"{head}0,2.0,0.5\n1,2.0,\n")
    assert steps(follower) == [0]
    path.write_text(f"{head}0,2.0,0.5\n1,2.0,0.25\n")
    assert [one.line.gradient_norm for one in follower.new()] == [0.25]
    monkeypatch.setattr(following, "_QUIET_S", 0.0)
    path.write_text(f"{head}0,2.0,0.5\n1,2.0,0.25\n2,2.0,\n")
    assert [steps(follower) for _ in range(3)] == [[], [2], []]
    monkeypatch.setattr(following, "_LONG_S", 0.0)
    monkeypatch.setattr(following, "_RESTS", 1e9)
    for step in (3, 4):  # a log that takes long to read anew is left alone for a while
        with path.open("a") as file:
            file.write(f"{step},2.0,0.5\n")
        assert steps(follower) == ([3] if step == 3 else [])


def test_the_real_writer_through_many_files(tmp_path):
    """A training writes on its own thread, in small files; nothing is lost, and the end is seen."""
    log = RunLog(tmp_path, RunLine(name="test"), limits=Limits(file_bytes=2000))
    follower, heard, ends = Follower(tmp_path), [], []
    for step in range(300):
        log.write(StepLine(step=step, loss=1.0))
        if step % 7 == 0:
            log.flush()
            heard += steps(follower)
    log.write(EndLine(exit_code=0, steps=300))
    assert log.close()
    for whole in follower.new():
        heard += [whole.line.step] if isinstance(whole.line, StepLine) else []
        ends += [whole.line] if isinstance(whole.line, EndLine) else []
    assert len(list(Path(tmp_path).glob("log.*.jsonl"))) > 10
    assert heard == list(range(300))
    assert [end.steps for end in ends] == [300]
