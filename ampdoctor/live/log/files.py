"""The files of a log and their size: one that grows, and finished ones, of which the oldest lose their details."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ampdoctor.evidence.log_text import kind_of
from ampdoctor.evidence.paths import log_name, logs_in, rank_and_number, run_name


def without_details(path: Path) -> int:
    """Removes the details of a finished file, and returns their number; after an OSError it is unchanged."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if kind_of(line) != "detail"]
    if len(kept) < len(lines):
        replace_whole(path, b"".join(kept))
    return len(lines) - len(kept)


def details_in(path: Path) -> int:
    """Returns the bytes of a file that are details."""
    return sum(len(line) for line in path.read_bytes().splitlines(keepends=True) if kind_of(line) == "detail")


def replace_whole(path: Path, data: bytes) -> None:
    """Writes a file completely, or leaves its earlier contents and raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.unlink(missing_ok=True)  # left by an earlier process with this number, or a link
        with beside.open("xb") as file:  # "x" follows no link
            file.write(data)
        beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a log."""

    file_bytes: int = 16 * 1024 * 1024  # then a new file begins; a file of this size is read in a second
    detail_bytes: int = 512 * 1024 * 1024  # of details; then the oldest go. Steps stay: a million take 150 MB
    lines: int = 20_000  # that wait, without details: 20 seconds of steps of 1 ms, some 10 MB
    details: int = 16  # that wait; each may hold a histogram of every tensor
    last: int = 256  # steps that are kept for a bundle
    listener_details: int = 64  # lines of details that wait for a listener, up to 100 kB each; for other lines, `lines`
    close_timeout: float = 10.0  # for all listeners together at the end: a metrics server needs the last lines


_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
_FLAGS |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


class Segments:
    """The files of one rank in a folder, made if missing; a file of another process is renamed. May raise OSError."""

    def __init__(self, folder: Path, rank: int, limits: Limits) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._rank, self._limits = folder, rank, limits
        self.path = folder / log_name(rank)  # the running file
        self.thinned = 0  # details removed from finished files
        self._file = -1
        self._finished: dict[Path, int | None] = {
            folder / name: None for name in self._names() if name != self.path.name
        }
        self._begin(left=True)

    @property
    def full(self) -> bool:
        """Whether a new file is due: the running one is large, or was deleted."""
        return self._size >= self._limits.file_bytes or not os.fstat(self._file).st_nlink

    def write(self, data: bytes) -> None:
        """Writes a whole line at once; after an error, the part that was written is removed where possible."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def next(self) -> None:
        """Finishes the running file and begins another."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._finished = {path: size for path, size in self._finished.items() if path.exists()}
        self._begin()
        self._thin()

    def describe(self, data: bytes) -> None:
        """Replaces `run.json`, completely or not at all."""
        replace_whole(self._folder / run_name(self._rank), data)

    def close(self) -> None:
        """Closes the running file."""
        if self._file >= 0:
            file, self._file = self._file, -1
            with suppress(OSError):  # the data is already written
                os.close(file)

    def _names(self) -> list[str]:
        """Returns the names of this rank's files, the oldest first; another process may have made some since."""
        return logs_in(os.listdir(self._folder)).get(self._rank, [])  # noqa: PTH208 - names are all that is wanted

    def _begin(self, *, left: bool = False) -> None:
        """Begins a file; one that is there gets the next number (`left`: another process's, perhaps still in use)."""
        self.number = 1 + max(
            (number or 0 for _, number in filter(None, map(rank_and_number, self._names()))), default=0
        )
        if self.path.exists():
            finished = self.path.rename(self.path.with_name(log_name(self._rank, self.number)))
            if left:  # it is never thinned
                facts = self._folder / run_name(self._rank)
                with suppress(FileNotFoundError):
                    facts.rename(facts.with_name(run_name(self._rank, self.number)))
            else:
                self._finished[finished] = None
            self.number += 1
        self._file = os.open(self.path, _FLAGS, 0o666)
        self._size = 0

    def _thin(self) -> None:
        """Removes the details of the oldest files until the bound is met."""
        sizes = self._finished
        sizes |= {path: details_in(path) for path, size in sizes.items() if size is None}
        for path, size in sizes.items():
            if sum(one or 0 for one in sizes.values()) <= self._limits.detail_bytes:
                return
            if size:
                self.thinned += without_details(path)
                sizes[path] = 0
