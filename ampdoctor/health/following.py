"""A log that grows, read on from where it was left: by another process, on another machine, over a copy of its files.

A file is known by its first line, which names the run and the file's number in it: not by its name, which changes when
the next one is begun, and not by its inode, which changes when a copy is brought up to date.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from ampdoctor.checkpoints.formats.run_log_files import MAX_BYTES
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.run_log.files import logs_in, place_of
from ampdoctor.evidence.run_log.lines import Stamped
from ampdoctor.evidence.run_log.quick import quick_line_of
from ampdoctor.evidence.run_log.text import kind_of
from ampdoctor.health.reading.log_kind import Noticed
from ampdoctor.health.reading.opening import FileState, FoundLog, find_log
from ampdoctor.health.reading.our_log import AMPDOCTOR

_ENOUGH = 2 * 1024 * 1024
"""Bytes, the last of a log, with which a reader begins who comes late: some ten thousand steps, judged in a second."""
_AT_ONCE = 1024 * 1024
_AGAIN = 8
"""Times that a folder is listed anew which changes meanwhile; the next look has the rest."""


class _Source(Protocol):
    """What grows; the seam is between files that are read on and files that are written anew each time."""

    def new(self) -> Iterator[Stamped]:
        """Yields what has come since the last time.

        Raises:
            CheckpointError: It cannot be read.
        """


class Follower:
    """Reads a log on, as often as it is asked; one that is not there yet may come.

    Args:
        path: As for `find_log`.

    Attributes:
        found: The log; None as long as there is none.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._source: _Source | None = None
        self.found: FoundLog | None = None

    def new(self) -> Iterator[Stamped]:
        """Yields the lines that have come since the last time, in the order of their arrival.

        Raises:
            CheckpointError: There is a file at the path and it is no log, or it cannot be read.
        """
        if self._source is None:
            found = self._find()
            if found is None:
                return
            self.found = found
            self._source = _Ours(found) if found.kind is AMPDOCTOR else _Rewritten(found)
        yield from self._source.new()

    def _find(self) -> FoundLog | None:
        """The log; None where none has begun: a path that is not there, an empty file, a folder without one."""
        try:
            return find_log(self._path)
        except CheckpointError:
            is_file = self._path.is_file()
            if is_file and self._path.stat().st_size and not _has_no_line(self._path):
                raise
            if not is_file and self._path.exists() and not self._path.is_dir():
                raise
            return None


def _has_no_line(path: Path) -> bool:
    """Whether a file has not come to the end of its first line."""
    with path.open("rb") as file:
        return b"\n" not in file.read(_AT_ONCE)


@dataclass(slots=True)
class _Place:
    """How far a file was read.

    Attributes:
        first: Its first line.
        offset: The end of the last whole line.
    """

    first: bytes
    offset: int


class _Ours:
    """The files of a log of ours; all of its rank, where one with its usual name was found."""

    def __init__(self, found: FoundLog) -> None:
        self._folder = found.folder
        place = place_of(found.names[0])
        self._rank = None if place is None else place[0]
        self._names: Sequence[str] = found.names
        self._finished: set[str] = set()
        self._place: _Place | None = None
        self._begun = False
        self._passed_by = 0  # bytes of the file with which is begun, of which the tables of names alone are read

    def new(self) -> Iterator[Stamped]:
        files = self._opened()
        try:
            if not self._begun:
                self._begin_late(files)
            for at, (name, file) in enumerate(files):
                yield from self._read(file)
                self._passed_by = 0
                if at < len(files) - 1:  # what is torn at its end stays so: nobody writes there any more
                    self._finished.add(name)
                    self._place = None
        finally:
            for _, file in files:
                file.close()

    def _opened(self) -> list[tuple[str, BinaryIO]]:
        """The files that are not finished, all open at one moment: the running one may be given a number any time."""
        for _ in range(_AGAIN):
            files: list[tuple[str, BinaryIO]] = []
            before = self._listed()
            for name in before:
                try:
                    files.append((name, (self._folder / name).open("rb")))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise CheckpointError(f"{name} cannot be read: {(error.strerror or str(error)).lower()}.") from None
            if self._listed() == before and len(files) == len(before):
                return files
            for _, file in files:
                file.close()
        return []

    def _listed(self) -> list[str]:
        if self._rank is None:
            return [name for name in self._names if (self._folder / name).exists()]
        try:
            names = logs_in(os.listdir(self._folder)).get(self._rank, [])  # noqa: PTH208 - names are all that is wanted
        except OSError:  # it is being made anew, or its disk is away for a moment
            return []
        # a FIFO under such a name would wait to be opened, and a link to nothing come again and again
        return [name for name in names if name not in self._finished and (self._folder / name).is_file()]

    def _begin_late(self, files: list[tuple[str, BinaryIO]]) -> None:
        """Passes by what is before the last bytes."""
        self._begun = bool(files)
        enough = 0
        for at in reversed(range(len(files))):
            enough += os.fstat(files[at][1].fileno()).st_size
            if enough >= _ENOUGH:
                self._passed_by = enough - _ENOUGH
                for name, file in files[:at]:
                    self._finished.add(name)
                    file.close()
                del files[:at]
                return

    def _read(self, file: BinaryIO) -> Iterator[Stamped]:
        size = os.fstat(file.fileno()).st_size
        first = file.readline(MAX_BYTES)
        if not first.endswith(b"\n"):
            return
        place = self._place
        if place is None or place.first != first or size < place.offset:  # another file, or this one begun anew
            place = self._place = _Place(first, 0)
        file.seek(place.offset)
        while lines := file.readlines(_AT_ONCE):
            for text in lines:
                if not text.endswith(b"\n"):
                    return
                place.offset += len(text)
                if place.offset <= self._passed_by and kind_of(text) != "run":
                    continue
                try:
                    whole = quick_line_of(text)
                except ValueError:
                    continue
                if whole is not None:
                    yield whole


class _Rewritten:
    """A log of another kind, which is read anew where it has changed; what was heard before is passed by."""

    def __init__(self, found: FoundLog) -> None:
        self._found = found
        self._state: list[FileState] = []
        self._heard = 0

    def new(self) -> Iterator[Stamped]:
        try:
            state = self._found.state()
            if state == self._state:
                return
            lines = list(self._found.lines(Noticed()))
        except CheckpointError:
            if not self._state:
                raise
            return  # it is being written
        self._state = state
        if len(lines) < self._heard:  # another run has begun in its place
            self._heard = 0
        heard, self._heard = self._heard, len(lines)
        yield from lines[heard:]
