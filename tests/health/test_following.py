"""A log that grows is read on, each line once, whatever becomes of its files."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import EndLine, LogRecord, RunLine, Stamp, StepLine
from ampdoctor.evidence.log_text import text_of
from ampdoctor.health import following
from ampdoctor.health.following import Follower
from ampdoctor.health.reading.opening import find_log
from ampdoctor.live.log.files import Limits
from ampdoctor.live.log.run_log import RunLog


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


@pytest.mark.parametrize("rotations", [1, 3])
def test_files_that_were_finished_meanwhile(rotations, tmp_path):
    log, follower = Writer(tmp_path), Follower(tmp_path / "log.jsonl")
    log.steps(2)
    assert steps(follower) == [0, 1]
    for _ in range(rotations):
        log.steps(2)
        log.begin()
    log.steps(1)
    assert steps(follower) == list(range(2, 3 + 2 * rotations))
    log.begin()
    log.steps(1)
    assert steps(follower) == [3 + 2 * rotations]


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


def test_a_copy_that_is_replaced_as_a_whole_goes_on_where_it_was(tmp_path):
    """As rsync does it: another inode with the same beginning."""
    log, copy = Writer(tmp_path / "there"), tmp_path / "here"
    copy.mkdir()
    follower = Follower(copy)
    heard = []
    for _ in range(3):
        log.steps(2)
        shutil.copy(log.path, copy / ".part")
        (copy / ".part").replace(copy / "log.jsonl")
        heard.append(steps(follower))
    assert heard == [[0, 1], [2, 3], [4, 5]]


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
    log.path.unlink()
    assert steps(follower) == []
    Writer(tmp_path, run_id="another").steps(2)
    assert steps(follower) == [0, 1]


def test_a_file_that_is_truncated_is_read_anew(tmp_path):
    log, follower = Writer(tmp_path), Follower(tmp_path)
    head = log.path.stat().st_size
    log.steps(5)
    assert steps(follower) == [0, 1, 2, 3, 4]
    os.truncate(log.path, head)
    log.next = 0
    log.steps(2)
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


def test_what_is_no_log_is_said(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("buy milk\nand bread\n")
    with pytest.raises(CheckpointError, match="is no log that is read here"):
        list(Follower(path).new())


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


def test_a_damaged_line_costs_no_other(tmp_path):
    log, follower = Writer(tmp_path), Follower(tmp_path)
    log.steps(1)
    with log.path.open("a") as file:
        file.write('{"kind":"step","half a li\n{"kind":"of tomorrow","schema_version":2}\n')
    log.steps(1)
    assert steps(follower) == [0, 1]


def test_of_a_long_log_only_the_end_is_read_with_the_names_that_it_speaks_of(tmp_path, monkeypatch):
    log = Writer(tmp_path)
    for _ in range(4):
        log.steps(3)
        log.begin()
    log.put(RunLine(name="test", segment=5, tensors=("w",)))
    log.steps(50)
    line = len(text_of(LogRecord(log.stamp, StepLine(step=50, loss=1.0))))
    monkeypatch.setattr(following, "_ENOUGH", 10 * line)
    follower = Follower(tmp_path)
    whole = list(follower.new())
    assert [one.line.tensors for one in whole if isinstance(one.line, RunLine)] == [(), ("w",)]
    assert [one.line.step for one in whole if isinstance(one.line, StepLine)] == list(range(52, 62))
    log.steps(1)
    assert steps(follower) == [62]


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


def row_of_a_table(step):
    return f"{step},{'nan' if step % 500 == 7 else 2.0},0.5,{'x' * 20}\n"


def row_of_json(step):
    return (
        json.dumps({"step": step, "loss": 2.0 if step % 500 != 7 else "nan", "grad_norm": 0.5, "note": "x" * 20}) + "\n"
    )


def line_of_a_job(step):
    return f"[rank0]: INFO step {step}: loss {'nan' if step % 500 == 7 else 2.0}, grad_norm 0.5, {'x' * 20}\n"


@pytest.mark.parametrize(
    ("name", "header", "row"),
    [
        ("a.csv", "step,loss,grad_norm,note\n", row_of_a_table),
        ("a.jsonl", "", row_of_json),
        ("a.log", "the job begins\n", line_of_a_job),
    ],
)
def test_a_long_log_of_another_kind_is_read_on_and_not_anew(name, header, row, tmp_path, monkeypatch):
    path, read = tmp_path / name, []
    whole = RegularFile.read_into

    def counted(self, offset, target):
        read.append(len(target))
        whole(self, offset, target)

    path.write_text(header + "".join(map(row, range(5))))
    follower = Follower(tmp_path)
    assert steps(follower) == list(range(5))
    with path.open("a") as file:
        file.writelines(map(row, range(5, 20_000)))
    assert steps(follower) == list(range(5, 20_000))
    monkeypatch.setattr(RegularFile, "read_into", counted)
    for step in range(20_000, 20_050):
        with path.open("a") as file:
            file.write(row(step)[:9])
        assert steps(follower) == []
        with path.open("a") as file:
            file.write(row(step)[9:])
        assert steps(follower) == [step]
    assert sum(read) < 100 * 1024
    path.write_text(header + "".join(map(row, range(3))))  # begun anew
    assert steps(follower) == [0, 1, 2]


def test_a_step_that_gets_a_number_later_is_given_with_it(tmp_path):
    path, follower = tmp_path / "a.jsonl", Follower(tmp_path)

    def put(*rows):
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def given():
        lines = [one.line for one in follower.new() if isinstance(one.line, StepLine)]
        return [(line.step, line.loss, line.gradient_norm) for line in lines]

    for first in (0, 4000):  # a file that is read anew each time, and one that is read on
        put(*({"step": at, name: value} for at in range(first, first + 3000) for name, value in BOTH))
        assert given()[-1] == (first + 2999, 2.0, 0.5)
        put({"step": first + 3000, "loss": 2.0})
        assert given() == []
        put({"step": first + 3000, "grad_norm": 0.5})
        assert given() == [(first + 3000, 2.0, 0.5)]


BOTH = (("loss", 2.0), ("grad_norm", 0.5))


def test_a_last_step_that_lacks_a_number_is_given_where_no_more_comes(tmp_path, monkeypatch):
    path, follower = tmp_path / "a.csv", Follower(tmp_path)
    path.write_text("step,loss,grad_norm\n0,2.0,0.5\n1,2.0,\n")
    assert steps(follower) == [0]
    monkeypatch.setattr(following, "_QUIET_S", 0.0)
    path.write_text("step,loss,grad_norm\n0,2.0,0.5\n1,2.0,\n\n")
    assert steps(follower) == []
    assert steps(follower) == [1]
    assert steps(follower) == []


def test_what_was_learnt_from_a_job_that_has_hardly_begun_is_learnt_anew(tmp_path):
    path, follower = tmp_path / "job.out", Follower(tmp_path)
    first = "step 0: train loss 4.5, val loss 4.6\n"
    path.write_text(first)
    assert steps(follower) == []
    path.write_text(first + "step 100: train loss 4.5, val loss 4.6\n")
    assert steps(follower) == [0, 100]
    path.write_text(first + "".join(f"iter {at}: loss 4.0\n" for at in range(5)))
    assert steps(follower) == list(range(5))


def test_a_log_that_takes_long_to_read_anew_is_left_alone_for_a_while(tmp_path, monkeypatch):
    path = tmp_path / "trainer_state.json"
    monkeypatch.setattr(following, "_LONG_S", 0.0)
    monkeypatch.setattr(following, "_RESTS", 1e9)
    follower = Follower(tmp_path)
    for count in (1, 2):
        path.write_text(json.dumps({"log_history": [{"step": at, "loss": 1.0} for at in range(count)]}))
        assert steps(follower) == ([0] if count == 1 else [])


def test_a_file_that_cannot_be_opened_leaves_none_open(tmp_path, monkeypatch):
    log = Writer(tmp_path)
    log.steps(1)
    log.begin()
    opened, there = [], Path.open
    source = following._Ours(find_log(tmp_path))

    def refuse(self, *how, **named):
        if self.name == "log.jsonl":
            raise PermissionError(13, "Permission denied")
        opened.append(there(self, *how, **named))
        return opened[-1]

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"log\.jsonl cannot be read: permission denied"):
        list(source.new())
    assert [file.closed for file in opened] == [True]


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
