"""Shares a few descriptors among many files of a checkpoint: a thousand ranks write thousands, a process may open 1024.

A descriptor is closed only while nobody reads through it. Its number may belong to another file a moment later, and a
read would then return that file's bytes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.errors import CheckpointError

MAX_OPEN = 128
"""Descriptors of one pool; there are more only while more threads than that read at once."""


class FilePool:
    """The open descriptors of a checkpoint's files, the longest unused first.

    Args:
        limit: Number of descriptors that are kept open.
    """

    def __init__(self, limit: int = MAX_OPEN) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, PooledFile] = OrderedDict()
        self._busy = 0

    def enter(self, file: PooledFile) -> None:
        """Open a file, if it is not open, until `leave`."""
        with self._lock:
            self._idle.pop(id(file), None)
            file.users += 1
            if file.users > 1:
                return
            self._busy += 1
            try:
                if file.at_rest:
                    self._make_room()
                    file.wake()
            except BaseException:
                file.users -= 1
                self._busy -= 1
                raise

    def leave(self, file: PooledFile) -> None:
        """Release a file; it stays open until its descriptor is needed."""
        with self._lock:
            file.users -= 1
            if not file.users:
                self._busy -= 1
                self._idle[id(file)] = file
                self._make_room()

    def forget(self, file: PooledFile) -> None:
        """Drop a file that was closed for good."""
        with self._lock:
            self._idle.pop(id(file), None)

    def _make_room(self) -> None:
        while self._idle and len(self._idle) + self._busy > self._limit:
            self._idle.popitem(last=False)[1].rest()


class PooledFile(RegularFile):
    """A regular file that may be closed between reads; when it is opened again, it must be unchanged.

    Args:
        path: Path of the file.
        name: As in `ByteSource`.
        pool: The pool whose descriptors it uses.

    Attributes:
        users: Number of reads under way.
        at_rest: True while it has no descriptor.

    Raises:
        CheckpointError: As for `RegularFile`.
    """

    __slots__ = ("_closed", "_pool", "at_rest", "users")

    def __init__(self, path: Path, name: str, pool: FilePool) -> None:
        self._pool = pool
        self._closed = False
        self.users = 0
        self.at_rest = False
        super().__init__(path, name)
        pool.enter(self)
        pool.leave(self)

    def read_into(self, offset: int, target: memoryview) -> None:
        """As in `ByteSource`.

        Raises:
            CheckpointError: As there, or it changed while it was closed.
        """
        self._pool.enter(self)
        try:
            super().read_into(offset, target)
        finally:
            self._pool.leave(self)

    def will_need(self, offset: int, count: int) -> None:
        """As in `RegularFile`."""
        self._pool.enter(self)
        try:
            super().will_need(offset, count)
        finally:
            self._pool.leave(self)

    def require_unchanged(self) -> None:
        """As in `RegularFile`."""
        self._pool.enter(self)
        try:
            super().require_unchanged()
        finally:
            self._pool.leave(self)

    def close(self) -> None:
        """As in `RegularFile`."""
        self._closed = True
        self._pool.forget(self)
        super().close()

    def rest(self) -> None:
        """Give the descriptor back."""
        self.at_rest = True
        super().close()

    def wake(self) -> None:
        """Open it again.

        Raises:
            CheckpointError: It is gone, or has changed.
        """
        if self._closed:
            raise CheckpointError(f"{self.name} is closed.")
        before, origin = self._stamp, self.origin
        super().__init__(self.path, self.name)
        self.origin = origin
        if self._stamp != before:
            self._stamp = before
            super().close()
            raise CheckpointError(f"{self.name} changed while it was being read.")
        self.at_rest = False
