"""The files that a command will write in the end: it must not read any of them.

Which files a checkpoint consists of is known only once it is open: an index names its shards, a pointer its folder, a
link leads elsewhere, a log lies beside it. So each file is checked when it is opened, before anything is written.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from ampdoctor.errors import UsageError

_promised: Final[dict[Hashable, str]] = {}


@contextmanager
def to_be_written(files: Iterable[str]) -> Iterator[None]:
    """Make `refuse_reading` refuse these files while the body runs, under whatever name they are opened."""
    before = dict(_promised)
    _promised.update((place_of(file), file) for file in files)
    try:
        yield
    finally:
        _promised.clear()
        _promised.update(before)


def refuse_reading(path: str | os.PathLike[str]) -> None:
    """Refuse to read a file that will be written, because its contents would be lost.

    A file that does not exist yet is refused as well; otherwise the next run would read what this one has written.

    Raises:
        UsageError: The file will be written.
    """
    if will_be_written(path):
        raise UsageError(f"cannot write {_promised[place_of(path)]}: it is what is to be read")


def will_be_written(path: str | os.PathLike[str]) -> bool:
    """Whether a file is one of those that will be written."""
    return bool(_promised) and place_of(path) in _promised


def place_of(path: str | os.PathLike[str]) -> Hashable:
    """Returns a key that all names of one file have in common."""
    try:
        found = os.stat(path)  # noqa: PTH116 - what is named may be no path at all
    except (OSError, ValueError):  # not there yet
        return os.path.realpath(path)
    return found.st_dev, found.st_ino
