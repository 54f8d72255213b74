"""The files of a log: one that grows, and those before it.

A file is never appended to by another process than the one that began it: what a killed process has left, its torn last
line included, stays as it is under the next number.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ampdoctor.evidence.run_log.files import log_name, logs_in, place_of, run_name
from ampdoctor.live.log.limits import Limits
from ampdoctor.live.log.thinning import details_in, replace_whole, thinned

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
        self.number = 1 + max((number or 0 for _, number in filter(None, map(place_of, names))), default=0)
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
