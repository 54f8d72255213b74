"""Regular files of a checkpoint as bytes by position, which must not change meanwhile, and the listing of a folder."""

from __future__ import annotations

import io
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.paths import refuse_reading

_LONGEST_SHOWN = 200


class ByteSource(ABC):
    """Bytes that are read by position, from any thread.

    `name` is the name in reports, relative to the path that the user gave; `name` and `origin` (the position in the
    file) together identify a source.
    """

    __slots__ = ("name", "origin", "size")

    name: str
    size: int
    origin: int

    @abstractmethod
    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` (writable bytes) from byte `offset`; raises CheckpointError if the source ends before that."""

    def read(self, offset: int, count: int) -> bytes:
        """Returns exactly `count` bytes from byte `offset`; the caller bounds `count`."""
        data = bytearray(count)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def head(self, count: int) -> bytes:
        """Returns the first `count` bytes, or all if there are fewer."""
        return self.read(0, min(count, self.size))


class RegularFile(ByteSource):
    """Read-only access to one regular file by position; raises CheckpointError if there is no such file.

    It is opened with `O_NONBLOCK` after a `stat`, and checked again with `fstat`: opening a FIFO would hang, and a
    device has no end. Symbolic links are followed if they end at a regular file (the Hugging Face cache has them).
    Raises UsageError for a file that the command will write.
    """

    __slots__ = ("_lock", "_raw", "_stamp", "path")

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.origin = 0
        try:
            refuse_reading(path)
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
        self._lock = threading.Lock()
        self.size = opened.st_size
        self._stamp = (opened.st_size, opened.st_mtime_ns)

    def read_into(self, offset: int, target: memoryview) -> None:
        done = 0
        try:
            while done < len(target):
                got = self._read_once(offset + done, target[done:])
                if not got:
                    break
                done += got
        except OSError as error:
            raise CheckpointError(f"{self.name} cannot be read: {_reason(error)}.") from None
        if done < len(target):
            self.require_unchanged()
            raise CheckpointError(f"{self.name} is truncated: it ends {len(target) - done} bytes too early.")

    def _read_once(self, offset: int, target: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._raw.fileno(), [target], offset)
        with self._lock:  # without reading by position, threads share the file's own position
            self._raw.seek(offset)
            return self._raw.readinto(target) or 0

    def require_unchanged(self) -> None:
        """Raises CheckpointError if size or modification time changed: what was read may be half old, half new."""
        now = os.fstat(self._raw.fileno())
        if (now.st_size, now.st_mtime_ns) != self._stamp:
            raise CheckpointError(f"{self.name} changed while it was being read.")

    def close(self) -> None:
        """Close it; may be repeated."""
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Window(ByteSource):
    """A part of a file that is complete by itself; the caller has checked that it lies inside the file."""

    __slots__ = ("file",)

    def __init__(self, file: RegularFile, offset: int, size: int) -> None:
        self.name = file.name
        self.size = size
        self.file = file
        self.origin = offset

    def read_into(self, offset: int, target: memoryview) -> None:
        if offset + len(target) > self.size:
            raise CheckpointError(f"{self.name} is truncated: an entry of it ends too early.")
        self.file.read_into(self.origin + offset, target)


def shown(name: object) -> str:
    """Returns a name from inside a file for an error's sentence: quoted, escaped, of bounded length."""
    text = name if isinstance(name, str) else type(name).__name__
    return repr(text) if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]!r}..."


def is_folder(path: Path) -> bool:
    """Whether it is a folder; False without permission: opening it then reports the error."""
    try:
        return path.is_dir()
    except OSError:
        return False


def identity_of(path: Path) -> tuple[int, int] | None:
    """Returns a key of a file or folder that is equal for all links to it; None if it may not be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def plain_name(name: object, owner: str, what: str = "shard") -> str:
    """Returns `name` if it names a file right beside `owner`; the check is lexical (the Hub's cache links away)."""
    if not isinstance(name, str):
        raise CheckpointError(f"{owner} names a {what} that is not a string.")
    if not name or name in {".", ".."} or any(c in name for c in "/\\:\0") or not name.isprintable():
        raise CheckpointError(f"{owner} names the {what} {shown(name)}, which is not a plain file name; refused.")
    return name


def _require_regular(mode: int, name: str) -> None:
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{name} is not a regular file.")


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error)).lower()


# -- folders: listed once, then their names are passed on --

MAX_FOLDER_ENTRIES = 20_000
"""A checkpoint folder holds hundreds of files; a data set's folder given by mistake holds millions."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The sorted names in a folder; `folders` are those of folders and of links to folders."""

    path: Path
    names: tuple[str, ...]
    folders: frozenset[str]

    @property
    def files(self) -> list[str]:
        """The names that are no folders."""
        return [name for name in self.names if name not in self.folders]

    def only(self, names: Iterable[str]) -> Listing:
        """Returns the same folder with some of its names, in the given order."""
        kept = tuple(names)
        return Listing(self.path, kept, self.folders.intersection(kept))


def list_folder(folder: Path) -> Listing:
    """List a folder; raises LimitExceededError for more than `MAX_FOLDER_ENTRIES` entries."""
    there: dict[str, bool] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                there[entry.name] = is_folder(Path(entry.path))  # False for a link to itself
                if len(there) > MAX_FOLDER_ENTRIES:
                    raise LimitExceededError(f"{folder.name}: files in the folder", MAX_FOLDER_ENTRIES, len(there))
    except OSError as error:
        raise CheckpointError(f"{folder.name} cannot be listed: {(error.strerror or str(error)).lower()}.") from None
    return Listing(folder, tuple(sorted(there)), frozenset(name for name, inner in there.items() if inner))
