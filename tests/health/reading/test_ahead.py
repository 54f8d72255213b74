"""A long log that is parsed by another process: the same lines, whatever becomes of that process."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import DetailLine, DetailTable, table_of
from ampdoctor.evidence.log_text import line_of_row, row_of, text_of
from ampdoctor.health.reading import opening
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import find_log, lines_ahead
from tests.evidence.run_log.samples import EVERY
from tests.health.logs import HEADER, detail, stamped, steps


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A log of two files: every kind of line, more steps than go at once, damaged lines, and one that nothing ends."""
    monkeypatch.setattr(opening, "LEAST_BYTES", 0)
    monkeypatch.setattr(opening, "_cores", lambda: 2)
    first = [stamped(HEADER), *EVERY.values(), *map(stamped, steps(0, 1500)), stamped(detail(1499, 0.5, 2.0))]
    (tmp_path / "log.1.jsonl").write_text("".join(map(text_of, first)) + "{damaged\n")
    (tmp_path / "log.jsonl").write_text("".join(text_of(stamped(one)) for one in steps(1500, 1600)) + '{"kind":"st')
    return find_log(tmp_path)


@pytest.fixture
def started(monkeypatch):
    """The processes that are started."""
    found = []
    really = opening._started

    def start(log):
        found.append(really(log))
        return found[-1]

    monkeypatch.setattr(opening, "_started", start)
    return found


def told(whole):
    """What a line says to be compared: a NaN is no other NaN, and of details what their table has."""
    line = whole.line
    return (whole.stamp, table_of(line)) if isinstance(line, DetailLine | DetailTable) else text_of(whole)


def read(lines, noticed):
    return list(map(told, lines)), noticed


def here(log):
    noticed = ReadIssues()
    return read(log.lines(noticed), noticed)


def test_it_yields_the_same_lines_and_notices_the_same(log, started):
    noticed = ReadIssues()
    assert read(lines_ahead(log, noticed), noticed) == here(log)
    assert noticed.left["log.1.jsonl"].damaged == 1
    assert started[0].returncode is not None


@pytest.mark.parametrize("name", EVERY)
def test_a_row_is_the_line(name):
    assert told(line_of_row(row_of(EVERY[name]))) == told(EVERY[name])


def test_what_a_process_that_dies_has_not_read_is_read_here(log, started, monkeypatch):
    monkeypatch.setattr(opening, "_LINES", 100)
    noticed, lines = ReadIssues(), []
    for line in lines_ahead(log, noticed):
        if not lines:
            os.kill(started[0].pid, signal.SIGKILL)
        lines.append(line)
    assert read(lines, noticed) == here(log)


@pytest.mark.parametrize("change", [("executable", ""), ("executable", "/no/such/python")])
def test_without_a_python_to_start_it_is_read_here(log, monkeypatch, change):
    monkeypatch.setattr(sys, *change)
    noticed = ReadIssues()
    assert read(lines_ahead(log, noticed), noticed) == here(log)


def test_a_short_log_or_a_single_core_needs_no_process(log, monkeypatch):
    monkeypatch.setattr(opening, "_cores", lambda: 1)
    assert opening._started(log) is None
    monkeypatch.setattr(opening, "_cores", lambda: 2)
    monkeypatch.setattr(opening, "LEAST_BYTES", 10**9)
    assert opening._started(log) is None


def test_whoever_stops_in_the_middle_leaves_no_process(log, started):
    lines = lines_ahead(log, ReadIssues())
    next(lines)
    lines.close()
    assert started[0].returncode is not None


def test_an_error_is_that_of_reading_here(log):
    (log.folder / "log.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"log\.jsonl"):
        list(lines_ahead(log, ReadIssues()))
