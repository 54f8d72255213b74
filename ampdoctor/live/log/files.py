"""The files of a log, and what they may take: one that grows, and those before it, thinned out in time.

A file is never appended to by another process than the one that began it: what a killed process has left, its torn last
line included, stays as it is under the next number.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ampdoctor.evidence.log_text import kind_of
from ampdoctor.evidence.paths import log_name, logs_in, rank_and_number, run_name

# Takes old details out of a finished file of the log; everything else in it stays, byte for byte.


_STEP = re.compile(rb',"step":([0-9]+)')
_FIRED = re.compile(rb',"reason":"')
_HEAD = 512
"""Bytes of a line in which its step and the reason stand: stamp and figures come before the tensors."""


def thinned(path: Path, *, also_fired: bool) -> int:
    """Takes the details of every other step out of a file, and returns how many lines that were.

    The file is replaced as a whole. Its last step's details stay, so that in the end none go.

    Args:
        path: A file that nobody writes.
        also_fired: Take out also those of steps at which something had fired; else only what was sampled.

    Raises:
        OSError: The file cannot be read or replaced; it is as it was.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    steps = {step for line in lines if (step := _step(line, also_fired=also_fired)) is not None}
    out = set(sorted(steps)[-2::-2])
    kept = [line for line in lines if _step(line, also_fired=also_fired) not in out]
    if len(kept) < len(lines):
        replace_whole(path, b"".join(kept))
    return len(lines) - len(kept)


def details_in(path: Path) -> int:
    """Returns the bytes of a file that are details.

    Raises:
        OSError: The file cannot be read.
    """
    return sum(len(line) for line in path.read_bytes().splitlines(keepends=True) if kind_of(line) == "detail")


def _step(line: bytes, *, also_fired: bool) -> int | None:
    """The step of a detail that may be taken out."""
    if kind_of(line) != "detail":
        return None
    head = line[:_HEAD].partition(b',"tensors":')[0]
    step = _STEP.search(head)
    return None if step is None or (_FIRED.search(head) and not also_fired) else int(step[1])


def replace_whole(path: Path, data: bytes) -> None:
    """Writes a file completely or not at all.

    Raises:
        OSError: It cannot be written; its earlier contents are still there.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.unlink(missing_ok=True)  # of a process that had this number, or a link that somebody has put there
        with beside.open("xb") as file:  # "x" follows no link
            file.write(data)
        beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


# What a log may take.


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a log.

    Attributes:
        file_bytes: From here on a new file is begun. A file of this size is read in a second.
        detail_bytes: Of details in finished files, from where on old ones are thinned. Steps are kept: a million have
            some 150 MB.
        lines: Lines that wait at most, but for details: of a step in 1 ms those of 20 seconds, in some 10 MB.
        details: Details that wait at most; each may hold a histogram of every tensor.
        last: Steps that are remembered for a bundle.
        hung_seconds: A sink that has not taken a line for so long is given up: a network's disk may pause for seconds.
        heard_details: Lines of details that wait at most for a listener, of up to 100 kB each; of others `lines`.
        farewell_seconds: How long listeners have at the end, all of them together: a server of metrics wants its rest.
    """

    file_bytes: int = 16 * 1024 * 1024
    detail_bytes: int = 512 * 1024 * 1024
    lines: int = 20_000
    details: int = 16
    last: int = 256
    hung_seconds: float = 30.0
    heard_details: int = 64
    farewell_seconds: float = 10.0


_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
_FLAGS |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_TARGET = 0.75
"""Share of the bound to which old details are thinned, so that not every new file brings it up again."""


class Segments:
    """Opens the folder, makes it where it is missing, and sets aside what another process has left.

    Args:
        folder: Of the log.
        rank: Of the process.
        limits: Bounds.

    Raises:
        OSError: The folder cannot be made, listed or written.

    Attributes:
        path: The running file.
        number: What the running file will be called once it is finished.
        thinned: Details that were taken out of finished files.
    """

    def __init__(self, folder: Path, rank: int, limits: Limits) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._rank, self._limits = folder, rank, limits
        self.path = folder / log_name(rank)
        self.thinned = 0
        self._file = -1
        self._finished: dict[Path, int | None] = {
            folder / name: None for name in self._names() if name != self.path.name
        }
        self._begin(left=True)

    @property
    def full(self) -> bool:
        """A new file is due: the running one is large, or somebody has removed it."""
        return self._size >= self._limits.file_bytes or not os.fstat(self._file).st_nlink

    def write(self, data: bytes) -> None:
        """Hands a whole line to the operating system, at once.

        Raises:
            OSError: It cannot be written; what was written of it is taken back where that is possible.
        """
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
        """Finishes the running file and begins another.

        Raises:
            OSError: One of both is not possible.
        """
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._finished = {path: size for path, size in self._finished.items() if path.exists()}
        self._begin()
        self._thin()

    def describe(self, data: bytes) -> None:
        """Writes the file that says what the run is, completely or not at all.

        Raises:
            OSError: It cannot be written; its earlier contents are still there.
        """
        replace_whole(self._folder / run_name(self._rank), data)

    def close(self) -> None:
        """Lets go of the running file."""
        if self._file >= 0:
            file, self._file = self._file, -1
            with suppress(OSError):  # what was written is written
                os.close(file)

    def _names(self) -> list[str]:
        """The names of this rank's files, the oldest first; another process may have made some since."""
        return logs_in(os.listdir(self._folder)).get(self._rank, [])  # noqa: PTH208 - names are all that is wanted

    def _begin(self, *, left: bool = False) -> None:
        names = self._names()
        self.number = 1 + max((number or 0 for _, number in filter(None, map(rank_and_number, names))), default=0)
        while True:  # another process may begin a file of the same name in between
            finished = self._set_aside()
            if finished is not None:
                if left:  # by another process, which may still live: its file is left alone
                    self._set_aside_run()
                else:
                    self._finished[finished] = None
                self.number += 1
            try:
                self._file = os.open(self.path, _FLAGS, 0o666)
            except FileExistsError:
                left = True
                continue
            self._size = 0
            return

    def _set_aside(self) -> Path | None:
        """Gives the running file a number that no other process has taken; None where there is none."""
        while self.path.exists():
            finished = self.path.with_name(log_name(self._rank, self.number))
            try:
                os.close(os.open(finished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            except FileExistsError:
                self.number += 1
                continue
            try:
                self.path.rename(finished)
            except FileNotFoundError:  # another process was faster
                finished.unlink()
                break
            return finished
        return None

    def _set_aside_run(self) -> None:
        """The description of another process's run goes with its log."""
        path = self._folder / run_name(self._rank)
        with suppress(FileNotFoundError):
            path.rename(path.with_name(run_name(self._rank, self.number)))

    def _thin(self) -> None:
        """Takes every other old detail out, oldest files first, until they are few enough or none can go."""
        sizes = self._finished
        sizes |= {path: details_in(path) for path, size in sizes.items() if size is None}
        if self._of_details() <= self._limits.detail_bytes:
            return
        for also_fired in (False, True):
            gone = 1
            while gone:
                gone = 0
                for path in sizes:
                    if self._of_details() <= self._limits.detail_bytes * _TARGET:
                        return
                    less = thinned(path, also_fired=also_fired)
                    if less:
                        sizes[path] = details_in(path)
                        self.thinned += less
                        gone += less

    def _of_details(self) -> int:
        return sum(size or 0 for size in self._finished.values())
