"""What a kind of log is: it claims the files that are its own, and reads them as the lines of a run's log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.log_files import Left, lines_in
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import EndLine, RunLine, Stamped
from ampdoctor.evidence.report import ErrorNote, Skipped
from ampdoctor.health.reading.order import Order
from ampdoctor.health.reading.rows import Row, lines_of
from ampdoctor.health.reading.unread import Unread

LOOKED_THROUGH = 64 * 1024 * 1024
"""Bytes of texts that may be logs which are looked through until one is found: a folder may hold a thousand outputs."""


@dataclass(slots=True)
class Budget:
    """What may still be read in search of a log.

    Attributes:
        left: Bytes.
        passed_by: How many files were not looked at, because nothing was left.
    """

    left: int = LOOKED_THROUGH
    passed_by: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """A file that was named, or a folder with the names of its files.

    Attributes:
        folder: Where the files are.
        names: Theirs, in order; of a file that was named its own alone.
        named: Whether it is one file that was named: then it is read whatever it is called.
        refused: By name, why a file cannot be read that may be a log, as a sentence; it grows while kinds are asked.
        budget: What may be read in search of a log, here and in other places.
        known: What kinds have found out about files, so that each is looked through once.
    """

    folder: Path
    names: tuple[str, ...]
    named: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    known: dict[tuple[str, str], Any] = field(default_factory=dict)

    def head(self, name: str, count: int) -> bytes:
        """Returns how a file begins; b"" where it cannot be read, which is kept in `refused`."""
        try:
            with RegularFile(self.folder / name, name) as file:
                return file.head(count)
        except CheckpointError as error:
            self.refused[name] = str(error)
            return b""

    def latest(self, names: Iterable[str]) -> list[str]:
        """Returns files by the last change of their contents, the latest first; of equal ones the last by name."""

        def written(name: str) -> tuple[int, str]:
            try:
                return (self.folder / name).stat().st_mtime_ns, name
            except OSError:
                return 0, name

        return sorted(names, key=written, reverse=True)


@dataclass(slots=True)
class Noticed:
    """What is noticed while a log is read.

    Attributes:
        left: By file, which of its lines were left out.
        skipped: What else was left out, and why.
        order: In which order the rows of another's log have come.
        unplaced: Skipped steps of which the log does not say which they were.
        unread: The columns that have no number.
    """

    left: defaultdict[str, Left] = field(default_factory=lambda: defaultdict(Left))
    skipped: list[Skipped] = field(default_factory=list)
    order: Order = field(default_factory=Order)
    unplaced: int = 0
    unread: Unread = field(default_factory=Unread)

    def lines_lost(self) -> list[Skipped]:
        """Returns of each file that has lost lines, which."""
        return [Skipped(what=name, reason=said) for name, left in sorted(self.left.items()) if (said := left.said())]

    def unfinished(self) -> tuple[str, ...]:
        """Returns the names of the files whose last line was left out because nothing ends it."""
        return tuple(name for name, left in sorted(self.left.items()) if left.unfinished)


class LineRows(Protocol):
    """Makes rows of a file's lines, as they come."""

    def rows(self, lines: Iterator[bytes], left: Left) -> Iterator[Row]:
        """Yields what further lines say.

        Args:
            lines: Whole ones.
            left: Gets what is left out.
        """

    def rest(self, noticed: Noticed) -> Iterator[Row]:
        """Yields what waits for a line that has not come, and says what was noticed."""

    def end(self) -> EndLine | None:
        """Returns how the run has ended, by the lines so far; None where they do not say."""


Begin: TypeAlias = Callable[[RegularFile], LineRows]
Read: TypeAlias = Callable[[Path, Sequence[str], Noticed], Iterator[Stamped]]


def _nothing(place: Place) -> Iterator[ErrorNote | Skipped]:  # noqa: ARG001 - as every kind's
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogKind:
    """A kind of log.

    Attributes:
        format: Whose it is, in a word, as in `HealthRun.format`.
        claims: Returns the logs of this kind in a place, the latest first, each as its files in the order in which they
            are read.
        read: Yields what these files of a folder say as lines of a run's log, in the order of their arrival. Each file
            is read as far as it goes when it is opened.
        begin: Begins to read a log that is one file to which lines are added; None for any other. It looks at the
            file's beginning.
        lacks: Yields what belongs to the log of a place and is not read: as an error what should have been, so that
            there is no saying that all is well.
    """

    format: str
    claims: Callable[[Place], Sequence[Sequence[str]]]
    read: Read
    begin: Begin | None = None
    lacks: Callable[[Place], Iterator[ErrorNote | Skipped]] = _nothing


def kind_of_one_file(
    format: str,  # noqa: A002
    of_place: Callable[[Place], Iterable[str]],
    begin: Begin,
    matters: Callable[[bytes], bool] = lambda _: True,
) -> LogKind:
    """Returns a kind of which each file is a log.

    Args:
        format: As in `LogKind`.
        of_place: Returns those files of a place that are such a log, the latest first.
        begin: As in `LogKind`.
        matters: Whether a last line that nothing ends would have been a row.
    """
    return LogKind(
        format=format,
        claims=lambda place: [[name] for name in of_place(place)],
        read=reading(begin, matters),
        begin=begin,
    )


def reading(begin: Begin, matters: Callable[[bytes], bool] = lambda _: True) -> Read:
    """Returns how a log of one file is read as a whole, by what makes rows of its lines."""

    def read(folder: Path, names: Sequence[str], noticed: Noticed) -> Iterator[Stamped]:
        (name,) = names
        left = noticed.left[name]
        with RegularFile(folder / name, name) as file:
            made = begin(file)
            rows = chain(made.rows(lines_in(file, left=left), left), _rest(made, noticed))
            yield from lines_of(rows, run_of(folder, name), noticed.order, ended=made.end)
        if not matters(left.unfinished):
            left.unfinished = b""

    return read


def _rest(made: LineRows, noticed: Noticed) -> Iterator[Row]:
    yield from made.rest(noticed)  # asked for when the lines have come


def run_of(folder: Path, name: str) -> RunLine:
    """Returns what is known of the run whose log is this file."""
    return RunLine(name=folder.name if name == "metrics.csv" else Path(name).stem)
