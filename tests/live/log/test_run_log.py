"""The writer of a run's log."""

from __future__ import annotations

import json
import os
import threading

from ampdoctor.evidence.log_records import DetailLine, EndLine, LostLine, RunLine, StepLine, TensorDetail
from ampdoctor.evidence.log_text import line_of
from ampdoctor.live.log.thread import AT_ONCE, Limits
from tests.live.log.logs import lines, read, steps


def detail(step, *tensors, **more):
    return DetailLine(step=step, tensors=tuple(TensorDetail(tensor=i, role="gradient") for i in tensors), **more)


def test_a_new_name_stands_in_the_log_before_the_line_that_speaks_of_it(begin, tmp_path):
    log = begin(RunLine(name="test", tensors=("a",)))
    assert [log.index_of(name) for name in ("a", "b", "b")] == [0, 1, 1]
    log.write(detail(0, 0, 1))
    assert log.flush()
    log.write(detail(1, log.index_of("c")))
    log.head(precision="fp16")
    assert log.close()
    table = ()
    for whole in read(tmp_path):
        if isinstance(whole.line, RunLine):
            assert whole.line.tensors[: len(table)] == table
            table = whole.line.tensors
        else:
            assert all(tensor.tensor < len(table) for tensor in whole.line.tensors)
    assert table == ("a", "b", "c")
    assert lines(tmp_path, RunLine)[-1].precision == "fp16"


def test_a_line_is_made_on_the_writers_thread(begin, tmp_path):
    log = begin()
    made_by = []

    def make():
        made_by.append(threading.current_thread())
        return detail(3, log.index_of("made"))

    log.write(make)
    log.write(lambda: None)
    assert log.close()
    assert made_by != [threading.current_thread()]
    assert [line.step for line in lines(tmp_path, DetailLine)] == [3]
    assert lines(tmp_path, RunLine)[-1].tensors == ("made",)


def test_a_line_that_cannot_be_made_is_counted_and_costs_no_other(begin, tmp_path, said):
    log = begin()
    log.write(lambda: 1 / 0)
    log.write(StepLine(step=0, loss=object()))
    log.write(StepLine(step=1))
    assert log.close()
    assert (steps(tmp_path), lines(tmp_path, LostLine), said) == ([1], [LostLine(unmade=2)], [])


def test_a_long_detail_is_several_lines(begin, tmp_path):
    log = begin()
    log.write(detail(0, *range(2 * AT_ONCE + 1)))
    assert log.close()
    assert [len(line.tensors) for line in lines(tmp_path, DetailLine)] == [AT_ONCE, AT_ONCE, 1]


def test_where_lines_come_too_fast_the_oldest_details_go_first_and_are_counted(begin, tmp_path):
    log = begin(limits=Limits(lines=10, details=2))
    running, go = threading.Event(), threading.Event()

    def hold():
        running.set()
        go.wait(10)

    log.write(hold)
    assert running.wait(10)
    for step in range(10):
        log.write(detail(step, 0))
        log.write(StepLine(step=step))
    log.write(StepLine(step=10))
    go.set()
    assert log.close()
    assert [line.step for line in lines(tmp_path, DetailLine)] == [8, 9]
    assert steps(tmp_path) == list(range(1, 11))
    assert lines(tmp_path, LostLine) == [LostLine(details=8, steps=1)]


def test_files_are_rotated_and_each_begins_with_the_names(begin, tmp_path):
    log = begin(RunLine(name="test", tensors=("a.weight",)), limits=Limits(file_bytes=2000))
    for step in range(100):
        log.write(StepLine(step=step, loss=1.0))
    assert log.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) > 4
    assert names[:3] == ["log.1.jsonl", "log.2.jsonl", "log.3.jsonl"]
    assert steps(tmp_path) == list(range(100))
    for name in names:
        first = line_of((tmp_path / name).read_text().splitlines()[0]).line
        assert (first.tensors, (tmp_path / name).stat().st_size < 2300) == (("a.weight",), True)
    assert [line.segment for line in lines(tmp_path, RunLine)] == list(range(1, len(names) + 1))


def test_where_the_running_file_is_deleted_another_begins(begin, tmp_path):
    log = begin()
    log.write(StepLine(step=0))
    assert log.flush()
    (tmp_path / "log.jsonl").unlink()
    log.write(StepLine(step=1))
    assert log.flush()
    log.write(StepLine(step=2))
    assert log.close()
    assert 2 in steps(tmp_path)


def test_the_oldest_details_go_and_steps_and_the_newest_stay(begin, tmp_path):
    log = begin(limits=Limits(file_bytes=4000, detail_bytes=20_000))
    for step in range(400):
        log.write(StepLine(step=step))
        log.write(detail(step, *range(5)))
        if step % 10 == 9:
            assert log.flush(5)
    assert log.close()
    assert steps(tmp_path) == list(range(400))
    kept = [line.step for line in lines(tmp_path, DetailLine)]
    assert kept == list(range(400))[-len(kept) :]
    assert 400 - len(kept) == lines(tmp_path, LostLine)[-1].thinned > 100


def test_what_a_killed_process_has_left_is_set_aside(begin, tmp_path):
    first = begin(run_id="one")
    first.write(StepLine(step=0))
    first.describe(model="first")
    assert first.close()
    with (tmp_path / "log.jsonl").open("a") as torn:
        torn.write('{"kind":"st')
    torn_file = (tmp_path / "log.jsonl").read_text()
    second = begin(run_id="two")
    second.write(StepLine(step=1))
    second.describe(model="second")
    assert second.close()
    assert (tmp_path / "log.1.jsonl").read_text() == torn_file
    assert [line_of(text).stamp.run_id for text in (tmp_path / "log.jsonl").read_text().splitlines()] == ["two", "two"]
    assert json.loads((tmp_path / "run.1.json").read_text())["model"] == "first"
    assert json.loads((tmp_path / "run.json").read_text()) == {"run_id": "two", "model": "second"}


def test_the_end_is_the_last_line_and_nothing_is_taken_after_it(begin, tmp_path):
    log = begin()
    log.write(detail(0, 0))
    log.write(EndLine(exit_code=0, steps=1))
    assert log.close()
    assert log.close()
    log.write(StepLine(step=1))
    assert log.flush()
    assert isinstance(read(tmp_path)[-1].line, EndLine)


def test_facts_are_added_up(begin, tmp_path):
    log = begin(run_id="r")
    log.describe(command=["train.py"])
    log.describe(model={"parameters": 12}, loss=float("inf"))
    assert log.close()
    assert json.loads((tmp_path / "run.json").read_text()) == {
        "run_id": "r",
        "command": ["train.py"],
        "model": {"parameters": 12},
        "loss": "Infinity",
    }
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_link_that_lay_in_the_folder_leads_no_facts_out_of_it(begin, tmp_path):
    """A repository comes with a folder for the log, and with links of every process's number in it."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    log = begin()
    (tmp_path / f".run.json.{os.getpid()}.tmp").symlink_to(precious)
    log.describe(seed=7)
    log.close()
    assert precious.read_text() == "mine"
    assert json.loads((tmp_path / "run.json").read_text())["seed"] == 7
