"""Read a text file of the user's: a configuration, a baseline, a report."""

from __future__ import annotations

import os
import stat

from ampdoctor.errors import UsageError


def read_text(file: str, *, limit: int, what: str, cut: bool = False) -> str:
    """Return the text of a regular file, without a byte order mark.

    Args:
        file: As the user knows it.
        limit: Bytes that are still read.
        what: What it is, for the sentence ("the baseline").
        cut: Of a larger file return the beginning, and of what is not UTF-8 what is.

    Raises:
        UsageError: It is not there, cannot be read, is no file, is not UTF-8, or is larger than the limit.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe of that name must not block
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {what} {file}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"cannot read {what} {file}: it is no regular file")
    with os.fdopen(descriptor, "rb") as stream:
        try:
            data = stream.read(limit + 1)
        except OSError as error:  # a file of /proc, a broken disk
            raise UsageError(f"cannot read {what} {file}: {error.strerror or error}") from None
    if cut:
        return data[:limit].decode("utf-8-sig", "replace")
    if len(data) > limit:
        raise UsageError(f"cannot read {what} {file}: it is larger than {limit // 1024} KiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {what} {file}: it is not UTF-8 text") from None
