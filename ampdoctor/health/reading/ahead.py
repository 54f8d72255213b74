"""Reads a long log in two processes: one parses its lines while this one does what is to be done with them."""

from __future__ import annotations

import gc
import marshal
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from ampdoctor.checkpoints.log_files import Left
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import Stamped
from ampdoctor.evidence.log_text import Row, line_of_row, row_of
from ampdoctor.evidence.report import Skipped
from ampdoctor.health.reading.log_kind import Noticed
from ampdoctor.health.reading.opening import FoundLog
from ampdoctor.health.reading.our_log import AMPDOCTOR
from ampdoctor.package import beside

LEAST_BYTES = 48 * 1024 * 1024
"""Of a log for which a process is started: a smaller one is read in the seconds that it saves."""
_Batch: TypeAlias = list[Row] | tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]
"""Lines, or what was noticed when the last was read: by file what is `Left` of it, and what is `Skipped`."""
_LINES = 512
"""Lines that go through the pipe at once."""
_MARSHAL, _SIZE = 2, 8
"""The version of the values' form: later ones look for what is shared. And the bytes of the size before each batch."""
_F_SETPIPE_SZ, _PIPE_BYTES = 1031, 1024 * 1024
"""Linux's fcntl for the size of a pipe: it holds some batches, so that neither process waits for the other."""


def lines_ahead(found: FoundLog, noticed: Noticed) -> Iterator[Stamped]:
    """Yields what `found.lines` yields, parsed by another process where the log is long and there is a core for it.

    Whatever becomes of that process, the rest is read here: it raises then what reading raises.

    Args:
        found: The log.
        noticed: Filled when the last line has been taken.

    Raises:
        CheckpointError: It cannot be read.
    """
    read = 0
    process = _started(found)
    if process is not None:
        try:
            for batch in _batches(process):
                if isinstance(batch, list):
                    read += len(batch)
                    yield from map(line_of_row, batch)
                else:
                    left, skipped = batch
                    noticed.left.update((name, Left(*values)) for name, *values in left)
                    noticed.skipped += [Skipped(what=what, reason=why, kind=kind) for what, why, kind in skipped]
                    return
        finally:
            process.kill()
            process.communicate()
    yield from islice(found.lines(noticed), read, None)


def _started(found: FoundLog) -> subprocess.Popen[bytes] | None:
    if found.kind is not AMPDOCTOR or _cores() < 2:
        return None
    with suppress(CheckpointError):
        command = beside("ampdoctor.health.reading.ahead", os.fspath(found.folder), *found.names)
        if command and sum(one.size for one in found.state()) >= LEAST_BYTES:
            with suppress(OSError):
                return subprocess.Popen(  # noqa: S603 - our own, with the names of the log's files
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for this process, which ends that one
                )  # fmt: skip
    return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _batches(process: subprocess.Popen[bytes]) -> Iterator[_Batch]:
    """Yields lists of rows, and at last what was noticed; it ends without that where the process has failed."""
    stream = process.stdout
    with suppress(EOFError, OSError, ValueError, TypeError):
        while stream is not None and (size := stream.read(_SIZE)):
            batch: _Batch = marshal.loads(stream.read(int.from_bytes(size)))  # noqa: S302 - plain values, and our own
            yield batch


def main() -> None:
    """The other process: writes the rows of a log's lines, by the batch, and what was noticed."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.fcntl(out.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)
    gc.disable()  # lines make no cycles
    folder, *names = sys.argv[1:]
    noticed = Noticed()
    lines = AMPDOCTOR.read(Path(folder), names, noticed)
    with suppress(BrokenPipeError), out:  # nobody listens any more
        while batch := [row_of(whole) for whole in islice(lines, _LINES)]:
            _send(out, batch)
        left = [(name, *astuple(one)) for name, one in noticed.left.items()]
        _send(out, (left, [(one.what, one.reason, one.kind) for one in noticed.skipped]))


def _send(out: BinaryIO, batch: _Batch) -> None:
    said = marshal.dumps(batch, _MARSHAL)
    out.write(len(said).to_bytes(_SIZE) + said)
