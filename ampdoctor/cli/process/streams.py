"""The two streams: the report and nothing else on stdout, everything else on stderr, and neither can crash the tool."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ampdoctor.errors import OutputError
from ampdoctor.reports.escape import sanitise_lines

_STDOUT, _STDERR = 1, 2

STDOUT = "-"
NAMES_OF_STDOUT = frozenset({STDOUT, "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"})
"""Opened by name they would lead to whatever descriptor 1 is by then."""


class StdoutClosedError(Exception):
    """Whoever read stdout has gone (`| head`); there is nobody to tell."""


class _Claim:
    """What `claim_stdout()` has set apart; one for the process, as its file descriptors are."""

    made: bool = False
    stream: TextIO | None = None


def harden() -> None:
    """Let no character crash a stream, whatever its encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def claim_stdout() -> None:
    """Keep the process's stdout for the report until the process ends.

    The report gets a descriptor of its own; descriptor 1 and `sys.stdout` become stderr. What the examined code prints
    late (a thread, a child, an exit handler) then cannot end up in the report. Nothing is done where `sys.stdout` has
    been replaced: whoever did that decides what goes there.
    """
    out = sys.stdout
    if _Claim.made or out is not sys.__stdout__:
        return
    _open_missing_stderr()
    try:
        if out is not None:
            out.flush()
            private = os.dup(out.fileno())
            _Claim.stream = os.fdopen(private, "w", encoding=out.encoding, errors="backslashreplace")
        os.dup2(_STDERR, _STDOUT)
    except (OSError, ValueError):  # closed behind Python's back: there is nothing to keep
        return
    _Claim.made = True
    sys.stdout = sys.stderr


@contextmanager
def report_on_stderr() -> Iterator[None]:
    """While the block runs, what goes to the report's stream goes to stderr: stdout belongs to somebody's script."""
    before = _Claim.made, _Claim.stream
    _Claim.made, _Claim.stream = True, sys.stderr
    try:
        yield
    finally:
        _Claim.made, _Claim.stream = before


def report_stream() -> TextIO | None:
    """The stream that takes the report; None where the process was started without a stdout."""
    return _Claim.stream if _Claim.made else sys.stdout


def write_stdout(text: str) -> None:
    """Write to the report's stream and flush.

    Raises:
        StdoutClosedError: The reader has gone.
        OutputError: stdout is closed or cannot take the text (disk full).
    """
    stream = report_stream()
    if stream is None:
        raise OutputError("standard output is closed, and no --output was given")
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        discard(stream)
        raise StdoutClosedError from None
    except (OSError, ValueError) as error:  # ValueError: the code that ran has closed it
        discard(stream)
        raise OutputError(f"cannot write to standard output: {getattr(error, 'strerror', None) or error}") from error


def note(text: str) -> None:
    """Write a line to stderr, or nowhere: a note that cannot be delivered must not change the outcome."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(sanitise_lines(text) + "\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)
    except Exception:  # noqa: BLE001 - the code that ran has closed it, or put an object of its own in its place
        return


def discard(stream: TextIO) -> None:
    """Point the stream at nothing, so that the interpreter's last flush cannot fail and change the exit code."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a real file: nothing will be flushed to one
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _open_missing_stderr() -> None:
    """Without a stderr the next file opened would get its number, and the examined code's prints."""
    try:
        os.fstat(_STDERR)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != _STDERR:
            os.dup2(nowhere, _STDERR)
            os.close(nowhere)
