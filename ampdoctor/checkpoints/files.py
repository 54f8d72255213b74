"""Regular files, opened so that nothing but their bytes can surprise: no device, no FIFO, no silent change."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from ampdoctor.errors import CheckpointError

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


class RegularFile:
    """Read-only access to one regular file by position.

    Opened with `O_NONBLOCK` after a `stat`, and checked again with `fstat`: opening a FIFO would hang, and a device has
    no end. Symbolic links are followed (the Hugging Face cache is made of them) as long as they end at a regular file.

    Args:
        path: Where it is.
        name: How reports name it (relative to what the user asked for).

    Attributes:
        size: Bytes at the time of opening.

    Raises:
        CheckpointError: It does not exist, may not be read, or is no regular file.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        try:
            _require_regular(os.stat(path).st_mode, name)  # noqa: PTH116 - the same call as fstat below
            flags = (
                os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
            )
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            reason = "is a link to nothing" if path.is_symlink() else "does not exist"
            raise CheckpointError(f"{name} {reason}.") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL inside the path
            raise CheckpointError(f"{name} cannot be opened: {_reason(error)}.") from None
        self._raw = io.FileIO(descriptor, "rb", closefd=True)
        opened = os.fstat(descriptor)
        try:
            _require_regular(opened.st_mode, name)
        except CheckpointError:
            self._raw.close()
            raise
        self.size = opened.st_size
        self._stamp = (opened.st_size, opened.st_mtime_ns)

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes from byte `offset`; the caller bounds `count`.

        Raises:
            CheckpointError: The file ends before that, or cannot be read.
        """
        data = bytearray(count)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` (writable bytes) from byte `offset`.

        Raises:
            CheckpointError: The file ends before that, or cannot be read.
        """
        done = 0
        try:
            self._raw.seek(offset)
            while done < len(target):
                got = self._raw.readinto(target[done:])
                if not got:
                    break
                done += got
        except OSError as error:
            raise CheckpointError(f"{self.name} cannot be read: {_reason(error)}.") from None
        if done < len(target):
            self.require_unchanged()
            raise CheckpointError(f"{self.name} is truncated: it ends {len(target) - done} bytes too early.")

    def head(self, count: int) -> bytes:
        """The first `count` bytes, fewer where the file is shorter."""
        return self.read(0, min(count, self.size))

    def duplicate(self) -> io.BufferedReader:
        """A second, buffered stream on the very same open file, for a library that wants a file object."""
        stream = os.fdopen(os.dup(self._raw.fileno()), "rb")
        stream.seek(0)
        return stream

    def require_unchanged(self) -> None:
        """Refuse a file whose size or modification time is no longer that of its opening.

        Raises:
            CheckpointError: It changed: what was read of it may be half old and half new.
        """
        now = os.fstat(self._raw.fileno())
        if (now.st_size, now.st_mtime_ns) != self._stamp:
            raise CheckpointError(f"{self.name} changed while it was being read.")

    def close(self) -> None:
        """Close it; harmless when repeated."""
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_folder(path: Path) -> bool:
    """Whether it is a folder, as far as may be seen; a path that may not be looked at is opened next and says why."""
    try:
        return path.is_dir()
    except OSError:
        return False


def plain_name(name: object, owner: str) -> str:
    """`name` if it names a file right beside its owner; the check is lexical.

    Resolving and comparing folders would refuse the Hugging Face cache, whose files are links out of their folder, and
    a comparison of strings with `startswith` lets `model-evil/` pass for `model`.

    Args:
        name: A file name found inside a checkpoint.
        owner: The file that it was found in.

    Raises:
        CheckpointError: It is no plain relative name.
    """
    if not isinstance(name, str):
        raise CheckpointError(f"{owner} names a shard that is not a string.")
    if not name or name in {".", ".."} or any(c in name for c in "/\\:\0") or not name.isprintable():
        raise CheckpointError(f"{owner} names the shard {name!r}, which is not a plain file name; refused.")
    return name


def _require_regular(mode: int, name: str) -> None:
    if not stat.S_ISREG(mode):
        kind = next((word for test, word in _KINDS if test(mode)), "not a regular file")
        raise CheckpointError(f"{name} is {kind}, not a regular file.")


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error)).lower()
