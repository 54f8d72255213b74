"""The files that a command will write in the end: none of them may be one that it reads.

Which files a checkpoint is made of is known only once it is open: an index names its shards, a pointer its folder, a
link leads elsewhere, a log lies beside. So each file is compared as it is opened, before anything is written.
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
    """While the body runs, `refuse_reading` refuses these files, by whatever name they are opened."""
    before = dict(_promised)
    _promised.update((place_of(file), file) for file in files)
    try:
        yield
    finally:
        _promised.clear()
        _promised.update(before)


def refuse_reading(path: str | os.PathLike[str]) -> None:
    """Refuse to read a file that will be written: what was read would be lost.

    One that is not there is refused as well; else the next run would read what this one has written.

    Raises:
        UsageError: It will be written.
    """
    if _promised and (file := _promised.get(place_of(path))) is not None:
        raise UsageError(f"cannot write {file}: it is what is to be read")


def place_of(path: str | os.PathLike[str]) -> Hashable:
    """What all names of one file have in common."""
    try:
        found = os.stat(path)  # noqa: PTH116 - what is named may be no path at all
    except (OSError, ValueError):  # not there yet
        return os.path.realpath(path)
    return found.st_dev, found.st_ino
