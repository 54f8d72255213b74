"""Read a text file of the user's: a configuration, a baseline, a report."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from ampdoctor.errors import UsageError

_PIECE = 1024 * 1024
"""Bytes of a file of any size that are in memory at a time."""


def read_text(file: str, *, limit: int, what: str, lenient: bool = False) -> str:
    """Return the text of a regular file, without a byte order mark.

    Args:
        file: As the user knows it.
        limit: Bytes that are still read.
        what: What it is, for the sentence ("the baseline").
        lenient: Of what is not UTF-8 return what is.

    Raises:
        UsageError: It is not there, cannot be read, is no file, is not UTF-8, or is larger than the limit.
    """
    with _opened(file, what) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise UsageError(f"cannot read {what} {file}: it is larger than {limit // 1024} KiB")
    try:
        return data.decode("utf-8-sig", "replace" if lenient else "strict")
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {what} {file}: it is not UTF-8 text") from None


def mentions(file: str, word: bytes, *, what: str) -> bool:
    """Return whether a word stands anywhere in a regular file, be it of any size.

    Raises:
        UsageError: It is not there, cannot be read, or is no file.
    """
    kept = b""
    with _opened(file, what) as stream:
        while piece := stream.read(_PIECE):
            if word in (kept := kept + piece):
                return True
            kept = kept[-len(word) :]  # the word may begin in this piece and end in the next
    return False


@contextlib.contextmanager
def _opened(file: str, what: str) -> Iterator[BinaryIO]:
    try:
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe of that name must not block
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {what} {file}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"cannot read {what} {file}: it is no regular file")
    with os.fdopen(descriptor, "rb") as stream:
        try:
            yield stream
        except OSError as error:  # a file of /proc, a broken disk
            raise UsageError(f"cannot read {what} {file}: {error.strerror or error}") from None
