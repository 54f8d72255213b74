"""Reads a growing log on from where it was left, also in another process or on a copy on another machine.

A file is recognised by its first line, which names the run and the file's number in it. Its name changes when the next
file begins, and its inode changes when a copy is updated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import EndLine, LogRecord, StepLine
from ampdoctor.evidence.log_text import parse_lines
from ampdoctor.evidence.paths import logs_in, rank_and_number
from ampdoctor.health.reading.log_files import MAX_BYTES
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import AMPDOCTOR, FileState, FoundLog, find_log

_AT_ONCE = 1024 * 1024
_OUTPUTS = frozenset({".log", ".out", ".err"})
_BEGINS_S = 600.0  # seconds without a change after which an output is no starting job: the longest a start takes
_QUIET_S = 2.0  # seconds without a change after which the last step is given even if numbers are missing
_ENDS_S = 60.0  # seconds without a change after which an exception at the end of an output counts as uncaught
_LONG_S, _RESTS = 0.2, 5.0  # after a full read longer than `_LONG_S`, the next waits `_RESTS` times as long
_NUMBERS = ("loss", "gradient_norm", "loss_scale", "learning_rates")
_AGAIN = 8  # times that a folder is listed again if it changes meanwhile; the next call reads the rest


class Follower:
    """Reads on in a log at each call; the log may not exist yet, and `found` is None until it does."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._source: _Ours | _Others | None = None
        self._size = 0  # of a file without a step
        self.found: FoundLog | None = None

    def new(self) -> Iterator[LogRecord]:
        """Yields the lines since the last call, in order; raises CheckpointError if the file is no readable log."""
        if self._source is None:
            found = self._find()
            if found is None:
                return
            self.found = found
            self._source = _Ours(found) if found.kind is AMPDOCTOR else _Others(found)
        yield from self._source.new()

    def _find(self) -> FoundLog | None:
        """Returns the log; None for a missing path, an empty file, a folder without a log, or a job that starts."""
        is_file = self._path.is_file()
        size = self._path.stat().st_size if is_file else 0
        if size and size == self._size and _is_written(self._path):
            return None
        self._size = size
        try:
            return find_log(self._path)
        except CheckpointError:
            if size and not _has_no_line(self._path) and not _is_written(self._path):
                raise
            if not is_file and self._path.exists() and not self._path.is_dir():
                raise
            return None


def _is_written(path: Path) -> bool:
    """Whether a file is the output of a job that goes on."""
    return path.suffix in _OUTPUTS and time.time() - path.stat().st_mtime < _BEGINS_S


def _has_no_line(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\n" not in file.read(_AT_ONCE)


@dataclass(slots=True)
class _Place:
    """How far a file was read."""

    first: bytes  # its first line
    offset: int  # the end of the last whole line


class _Ours:
    """The files of ampdoctor's own log: all of its rank, where it was found under its usual name."""

    def __init__(self, found: FoundLog) -> None:
        self._folder = found.folder
        place = rank_and_number(found.names[0])
        self._rank = None if place is None else place[0]
        self._names: Sequence[str] = found.names
        self._finished: set[str] = set()
        self._place: _Place | None = None

    def new(self) -> Iterator[LogRecord]:
        with ExitStack() as stack:
            files = self._opened(stack)
            for at, (name, file) in enumerate(files):
                yield from self._read(file)
                if at < len(files) - 1:  # nobody writes there any more, so a torn last line stays torn
                    self._finished.add(name)
                    self._place = None

    def _opened(self, stack: ExitStack) -> list[tuple[str, BinaryIO]]:
        """Opens all unfinished files at once, since the current one may be renamed at any time."""
        for _ in range(_AGAIN):
            files: list[tuple[str, BinaryIO]] = []
            before = self._listed()
            for name in before:
                try:
                    files.append((name, stack.enter_context((self._folder / name).open("rb"))))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise CheckpointError(f"{name} cannot be read: {(error.strerror or str(error)).lower()}.") from None
            if self._listed() == before and len(files) == len(before):
                return files
            stack.close()
        return []

    def _listed(self) -> list[str]:
        if self._rank is None:
            return [name for name in self._names if (self._folder / name).exists()]
        try:
            names = logs_in(os.listdir(self._folder)).get(self._rank, [])  # noqa: PTH208 - only names are needed
        except OSError:  # it is being recreated, or its disk is temporarily unavailable
            return []
        # opening a FIFO would block, and a broken link would be listed again each time
        return [name for name in names if name not in self._finished and (self._folder / name).is_file()]

    def _read(self, file: BinaryIO) -> Iterator[LogRecord]:
        size = os.fstat(file.fileno()).st_size
        first = file.readline(MAX_BYTES)
        if not first.endswith(b"\n"):
            return
        place = self._place
        if place is None or place.first != first or size < place.offset:  # another file, or this one was restarted
            place = self._place = _Place(first, 0)
        file.seek(place.offset)
        while lines := file.readlines(_AT_ONCE):
            for text, whole in parse_lines(lines):
                if not text.endswith(b"\n"):
                    return
                place.offset += len(text)
                if isinstance(whole, LogRecord):
                    yield whole


class _Others:
    """A log of another tool, which is read anew after each change; lines given before are skipped.

    If a step has got a new number since, the steps from it on are given again. To make this rare, a last step with
    fewer numbers than the one before is held back.
    """

    def __init__(self, found: FoundLog) -> None:
        self._found = found
        self._state: list[FileState] = []
        self._given: list[LogRecord] = []
        self._held: LogRecord | None = None
        self._quiet_at = self._rests_until = 0.0

    def new(self) -> Iterator[LogRecord]:
        began = time.monotonic()
        if began < self._rests_until:
            return
        try:
            state = self._found.state()
            if state == self._state:
                yield from self._quiet(began)
                return
            lines = list(self._found.lines(ReadIssues()))
        except CheckpointError:
            if not self._state:
                raise
            return  # it is being written
        self._state = state
        yield from self._unseen(lines)
        ended = time.monotonic()
        ends = self._held is not None and isinstance(self._held.line, EndLine)
        self._quiet_at = ended + (_ENDS_S if ends else _QUIET_S)
        if ended - began > _LONG_S:
            self._rests_until = ended + _RESTS * (ended - began)

    def _unseen(self, lines: list[LogRecord]) -> Iterator[LogRecord]:
        before = self._given
        new = next((at for at, one in enumerate(lines) if at >= len(before) or not _are_alike(before[at], one)), None)
        self._held = lines.pop() if new is not None and _may_change(*lines[-2:]) else None
        self._given = lines
        if new is not None:
            yield from lines[new:]

    def _quiet(self, now: float) -> Iterator[LogRecord]:
        """Gives the held step if nothing has come for a while."""
        held = self._held
        if held is not None and now >= self._quiet_at:
            self._held = None
            self._given.append(held)
            yield held


def _may_change(*last: LogRecord) -> bool:
    if isinstance(last[-1].line, EndLine):
        return bool(last[-1].line.reason)  # an exception in an output, which may have been caught
    return len(last) > 1 and _says_less(last[1], last[0])


def _are_alike(one: LogRecord, other: LogRecord) -> bool:
    return one == other or repr(one) == repr(other)  # a NaN is not equal to itself


def _says_less(one: LogRecord, before: LogRecord) -> bool:
    """Whether a step lacks a number that the step before has."""
    if not isinstance(one.line, StepLine) or not isinstance(before.line, StepLine):
        return False
    return any(
        getattr(one.line, name) in {None, ()} and getattr(before.line, name) not in {None, ()} for name in _NUMBERS
    )
