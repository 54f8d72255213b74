"""What a kind of log is: it claims the files that are its own, and reads them as the lines of a run's log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.report import Skipped
from ampdoctor.evidence.run_log.lines import Stamped


@dataclass(frozen=True, slots=True)
class Place:
    """A file that was named, or a folder with the names of its files.

    Attributes:
        folder: Where the files are.
        names: Theirs, in order; of a file that was named its own alone.
        named: Whether it is one file that was named: then it is read whatever it is called.
    """

    folder: Path
    names: tuple[str, ...]
    named: bool = False

    def head(self, name: str, count: int) -> bytes:
        """Returns how a file begins; b"" where it cannot be read."""
        try:
            with RegularFile(self.folder / name, name) as file:
                return file.head(count)
        except CheckpointError:
            return b""


@dataclass(slots=True)
class Noticed:
    """What is noticed while a log is read.

    Attributes:
        damaged: By file, how many of its lines cannot be read, but for a last one that was cut off.
        skipped: What was left out, and why.
    """

    damaged: Counter[str] = field(default_factory=Counter)
    skipped: list[Skipped] = field(default_factory=list)


Read: TypeAlias = Callable[[Path, Sequence[str], Noticed], Iterator[Stamped]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogKind:
    """A kind of log.

    Attributes:
        format: Whose it is, in a word, as in `HealthRun.format`.
        claims: Returns those of a place's files that are a log of this kind, in the order in which they are read; none
            where there is no such log.
        read: Yields what these files of a folder say as lines of a run's log, in the order of their arrival. Each file
            is read as far as it goes when it is opened.
    """

    format: str
    claims: Callable[[Place], Sequence[str]]
    read: Read
