"""The two streams: the report and nothing else on stdout, everything else on stderr, and neither can crash the tool."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from ampdoctor.errors import AmpdoctorError
from ampdoctor.reports.sanitise import sanitise_lines


class StdoutClosedError(Exception):
    """Whoever read stdout has gone (`| head`); there is nobody to tell."""


class OutputError(AmpdoctorError):
    """The report cannot be written where it should go."""


def harden() -> None:
    """Let no character crash a stream, whatever its encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def write_stdout(text: str) -> None:
    """Write and flush.

    Raises:
        StdoutClosedError: The reader has gone.
        OutputError: stdout is closed or cannot take the text (disk full).
    """
    if sys.stdout is None:
        raise OutputError("standard output is closed, and no --output was given")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        raise StdoutClosedError from None
    except OSError as error:
        discard(sys.stdout)
        raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error


def note(text: str) -> None:
    """Write a line to stderr, or nowhere: a note that cannot be delivered must not change the outcome."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(sanitise_lines(text) + "\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Point the stream at nothing, so that the interpreter's last flush cannot fail and change the exit code."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a real file: nothing will be flushed to one
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
