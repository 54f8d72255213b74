"""What the tests of the writer have in common."""

from __future__ import annotations

import time

from ampdoctor.evidence.log_records import RunLine, StepLine
from ampdoctor.evidence.log_text import line_of
from ampdoctor.evidence.paths import logs_in

HEADER = RunLine(name="test")


def texts(folder, rank=0):
    """Every line of a rank's files, the oldest first."""
    names = logs_in(path.name for path in folder.iterdir()).get(rank, [])
    return [text for name in names for text in (folder / name).read_text().splitlines()]


def read(folder, rank=0):
    """The same as records."""
    return [line_of(text) for text in texts(folder, rank)]


def lines(folder, kind, rank=0):
    return [whole.line for whole in read(folder, rank) if isinstance(whole.line, kind)]


def steps(folder, rank=0):
    return [line.step for line in lines(folder, StepLine, rank)]


def until(happens, seconds=10.0):
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.005)
