from __future__ import annotations

import math
import os

import pytest

from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import EndLine, RunLine, StepLine
from ampdoctor.evidence.log_text import text_of
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import find_log
from ampdoctor.health.summary import look
from ampdoctor.workflows.health import health
from tests.health.logs import HEADER, stamped, steps, write


def read(path):
    noticed = ReadIssues()
    found = find_log(path)
    assert found.kind.format == "ampdoctor"
    return list(found.lines(noticed)), noticed


def numbers(lines):
    return [(one.stamp.rank, one.line.step) for one in lines if isinstance(one.line, StepLine)]


def test_files_of_a_rank_are_read_oldest_first_and_ranks_one_after_the_other(tmp_path):
    write(tmp_path / "log.jsonl", [HEADER, *steps(4, 6), EndLine(exit_code=0)])
    write(tmp_path / "log.1.jsonl", [HEADER, *steps(0, 2)])
    write(tmp_path / "log.2.jsonl", [HEADER, *steps(2, 4)])
    write(tmp_path / "log.rank1.jsonl", [HEADER, *steps(0, 1)], rank=1, world_size=2)
    lines, noticed = read(tmp_path)
    assert numbers(lines) == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 0)]
    assert not noticed.lines_lost()


def test_a_file_is_read_alone_and_whatever_its_name(tmp_path):
    write(tmp_path / "log.1.jsonl", [HEADER, *steps(0, 2)])
    write(tmp_path / "mine.txt", [HEADER, *steps(7, 8)])
    assert numbers(read(tmp_path / "mine.txt")[0]) == [(0, 7)]


def test_a_growing_log_is_read_as_far_as_it_went_when_it_was_opened(tmp_path):
    path = write(tmp_path / "log.jsonl", [HEADER, *steps(0, 2)])
    lines = find_log(tmp_path).lines(ReadIssues())
    seen = [next(lines), next(lines)]
    with path.open("a") as file:
        file.write(text_of(stamped(StepLine(step=2))))
    assert numbers([*seen, *lines]) == [(0, 0), (0, 1)]


def test_unknown_kinds_are_passed_by_and_damaged_lines_and_those_of_another_version_counted(tmp_path):
    path = write(tmp_path / "log.jsonl", [HEADER, *steps(0, 1)])
    with path.open("a") as file:
        file.write('{"kind":"weather","run_id":"7f","time_ms":0,"schema_version":2}\n')
        file.write('{"kind":"step","run_id":"7f","time_ms":0,"step":9,"schema_version":99}\n')
        file.write('{"kind":"step","run_id":"7f"\n')
        file.write(text_of(stamped(StepLine(step=1)))[:40])  # being written
    lines, noticed = read(tmp_path)
    assert [type(one.line) for one in lines] == [RunLine, StepLine]
    (lost,) = noticed.lines_lost()
    assert (lost.what, lost.reason) == (
        "log.jsonl",
        "it has a line that is damaged and a line that another version of ampdoctor reads",
    )


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ("2 lines that another version of ampdoctor reads", '{"kind":"step","step":1,"schema_version": 3}\n' * 2),
        ("a line that is damaged", '{"kind":"step","step":-1,"schema_version":2}\n'),
        ("a line that is too long", '{"kind":"step","x":"' + "x" * (8 << 20) + '"}\n'),
    ],
)
def test_a_log_whose_steps_are_all_lost_does_not_say_that_nothing_was_trained(tmp_path, says, text):
    path = write(tmp_path / "log.jsonl", [HEADER])
    path.write_text(path.read_text() + text)
    with pytest.raises(CheckpointError, match=f"no step that can be read: of log.jsonl, it has {says}"):
        look(find_log(tmp_path), DEFAULT_THRESHOLDS)


def segments(folder, *, last=4):
    """A log of files of ten steps each, the loss of the second not finite."""
    for number in range(1, last):
        lost = {"loss": math.nan} if number == 2 else {}
        write(folder / f"log.{number}.jsonl", [HEADER, *steps(10 * number, 10 * number + 10, **lost)])
    write(folder / "log.jsonl", [HEADER, *steps(10 * last, 10 * last + 10), EndLine(exit_code=0)])


def lack(path, how):
    path.unlink()
    if how == "FIFO":
        os.mkfifo(path)
    elif how == "link":
        path.symlink_to("nothing")
    elif how == "empty":
        path.touch()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("FIFO", "log.2.jsonl is not a regular file."),
        ("link", "log.2.jsonl is a link to nothing."),
        ("empty", "log.2.jsonl is empty: its lines are lost."),
        ("gone", "log.2.jsonl cannot be found, between log.1.jsonl and log.3.jsonl."),
    ],
)
def test_no_run_is_healthy_of_whose_log_a_file_is_not_read(tmp_path, how, says):
    segments(tmp_path)
    assert health([tmp_path]).verdict == "sick"
    lack(tmp_path / "log.2.jsonl", how)
    report = health([tmp_path])
    assert [(one.what, one.message) for one in report.errors] == [("log.2.jsonl", says)]
    assert (report.verdict, report.complete, report.health.runs[0].steps) == ("inconclusive", False, 30)


def test_several_files_that_are_gone_are_one_error_and_a_last_one_is_another(tmp_path):
    segments(tmp_path, last=7)
    for name in ("log.2.jsonl", "log.3.jsonl", "log.4.jsonl", "log.jsonl"):
        (tmp_path / name).unlink()
    write(tmp_path / "log.rank1.jsonl", [HEADER, *steps(0, 1)], rank=1, world_size=2)
    assert [one.what for one in find_log(tmp_path).errors] == ["log.2.jsonl to log.4.jsonl", "log.jsonl"]


def test_a_log_without_its_oldest_files_and_one_just_begun_are_whole(tmp_path):
    segments(tmp_path)
    (tmp_path / "log.1.jsonl").unlink()
    (tmp_path / "log.2.jsonl").unlink()
    (tmp_path / "log.jsonl").write_text("")
    report = health([tmp_path])
    assert (report.verdict, report.complete, report.errors) == ("not_judged", True, ())
    assert [(one.what, one.reason) for one in report.skipped] == [
        ("log.1.jsonl to log.2.jsonl", "it is no longer there: the log begins with log.3.jsonl")
    ]


@pytest.mark.parametrize(("every", "complete"), [(2, False), (50, True)])
def test_a_log_that_has_lost_a_quarter_of_its_lines_is_incomplete(tmp_path, every, complete):
    path = write(tmp_path / "log.jsonl", [HEADER, *steps(0, 400)])
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line[: 20 if at % every == 1 else None] for at, line in enumerate(lines)) + "\n")
    report = health([tmp_path])
    assert report.complete is complete
    assert (report.verdict == "healthy") is complete


def test_a_file_whose_first_line_is_damaged_is_read_with_the_others(tmp_path):
    segments(tmp_path)
    path = tmp_path / "log.3.jsonl"
    path.write_bytes(bytes(40) + path.read_bytes()[40:])
    assert [one.reason for one in health([tmp_path]).skipped] == ["it has a line that is damaged"]
    assert health([tmp_path]).health.runs[0].steps == 40


def test_two_runs_that_write_at_once_into_one_log_are_noticed(tmp_path):
    mine = [stamped(step) for step in steps(0, 3)]
    others = [stamped(step, run_id="8a") for step in steps(0, 3)]
    write(tmp_path / "one" / "log.jsonl", [HEADER, *mine, *others])
    write(tmp_path / "two" / "log.jsonl", [HEADER, *(line for pair in zip(mine, others, strict=True) for line in pair)])
    assert health([tmp_path / "one"]).skipped == ()
    assert ["take turns" in one.reason for one in health([tmp_path / "two"]).skipped] == [True]
