"""What of other people's logs is left out, and what is said of it."""

from __future__ import annotations

import json
import os

import pytest

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import StepLine
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import find_log
from ampdoctor.workflows.health import health
from tests.health.reading.test_kinds import DEEPSPEED, MEGATRON

TABLE = "step,loss,grad_norm\n" + "".join(f"{step},2.0,9.1e-05\n" for step in range(5))
LINES = "".join(json.dumps({"step": step, "loss": 2.0}) + "\n" for step in range(5))


def read(path):
    noticed = ReadIssues()
    return [one.line for one in find_log(path).lines(noticed) if isinstance(one.line, StepLine)], noticed


def lost(noticed):
    return [(one.what, one.reason) for one in noticed.lines_lost()]


@pytest.mark.parametrize(
    ("name", "whole", "cut"),
    [
        ("metrics.csv", TABLE, len("e-05\n")),
        ("log.jsonl", LINES, len(" 2.0}\n")),
        ("out.log", MEGATRON, MEGATRON[::-1].index("0") + 1),
        ("out.log", DEEPSPEED, len("9)]\n")),
    ],
)
def test_a_last_line_that_nothing_ends_is_no_row(tmp_path, monkeypatch, name, whole, cut):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(whole)
    before, noticed = read(tmp_path)
    assert noticed.unfinished() == ()
    (tmp_path / name).write_text(whole[:-cut])
    now, noticed = read(tmp_path)
    assert repr(now) == repr(before[:-1])
    assert (noticed.unfinished(), lost(noticed)) == ((name,), [])
    assert health([tmp_path]).skipped == (), "it is being written"
    os.utime(tmp_path / name, (1_700_000_000, 1_700_000_000))
    assert [one.what for one in health([tmp_path]).skipped] == [f"{name}: its last line"]


def test_an_object_is_whole_where_it_can_be_read_and_other_words_at_the_end_are_no_row(tmp_path):
    for end in ('{"step": 5, "loss": 2.0}', "done"):
        (tmp_path / "log.jsonl").write_text(LINES + end)
        steps, noticed = read(tmp_path)
        assert len(steps) == 5 + end.startswith("{")
        assert (noticed.unfinished(), lost(noticed)) == ((), [])


def test_a_comma_in_a_table_with_tabs_ends_no_cell(tmp_path):
    (tmp_path / "t.tsv").write_text('step\tgrad_norm\tnote\tloss\n1\t1,5\ta "b", c\t2.5\n')
    (step,), _ = read(tmp_path / "t.tsv")
    assert (step.step, step.loss, step.gradient_norm) == (1, 2.5, None)


@pytest.mark.parametrize("between", [",", "\t", ";"])
def test_a_table_may_have_any_name_where_it_was_named(tmp_path, between):
    (tmp_path / "job.txt").write_text(TABLE.replace(",", between))
    steps, _ = read(tmp_path / "job.txt")
    assert [(step.step, step.loss, step.gradient_norm) for step in steps] == [(at, 2.0, 9.1e-05) for at in range(5)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", TABLE + '"5,2.0,1.0\n5,"a,2.0\n', "it has 2 lines that are damaged"),
        ("a.csv", TABLE + '5,2.0,"' + "x" * 200_000 + '"\n', "it has a line that is damaged"),
        ("a.jsonl", LINES + '{"step": 5, "lo\nplain text\n{\'step\': 1}\n', "it has a line that is damaged"),
        ("a.jsonl", LINES + "x" * (1 << 21), "it has a line that is too long"),
    ],
)
def test_lines_that_are_lost_are_counted(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    steps, noticed = read(tmp_path / name)
    assert (len(steps), lost(noticed)) == (5, [(name, says)])


@pytest.mark.parametrize("digits", [17, 5000])
def test_a_number_that_is_no_steps_makes_no_row(tmp_path, digits):
    for name, text in (("a.log", MEGATRON), ("b.log", DEEPSPEED)):
        last = text.splitlines(keepends=True)[-1]
        for old in ("iteration       12/", "step=20,"):
            last = last.replace(old, old.replace("12", "9" * digits).replace("20", "9" * digits))
        (tmp_path / name).write_text(text)
        known = read(tmp_path / name)[0]
        (tmp_path / name).write_text(text + last)
        assert repr(read(tmp_path / name)[0]) == repr(known)


def test_a_log_that_may_not_be_read_is_said(tmp_path, monkeypatch):
    opened = RegularFile.__init__

    def refuse(self, path, name):
        if name == "log.jsonl":
            raise CheckpointError(f"{name} cannot be opened: permission denied.")
        opened(self, path, name)

    monkeypatch.setattr(RegularFile, "__init__", refuse)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "log.jsonl").write_text(LINES)
    why = "log.jsonl cannot be opened: permission denied."
    with pytest.raises(CheckpointError, match=f"holds no log that can be read: {why}"):
        find_log(tmp_path)
    (tmp_path / "metrics.csv").write_text(TABLE)
    found = [(one.what, one.reason) for one in find_log(tmp_path).skipped]
    assert found == [("a/log.jsonl", f"not read as a log: {why}")]
