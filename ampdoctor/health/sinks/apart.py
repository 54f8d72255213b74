"""A sink in a process of its own, which lives by a pipe: lines of the log go in, as text, and nothing comes back.

A library that asks a server imports for seconds, starts threads, patches what it finds and waits at exit as long as it
likes: none of that belongs into a training. What is done here with lines that come is what `export` does with a log.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from queue import Empty, Queue
from typing import IO

from ampdoctor.errors import OutputError
from ampdoctor.evidence.log_records import DetailLine, Stamped
from ampdoctor.evidence.log_text import line_of, text_of
from ampdoctor.health.sinks.exporting import Exporter, sentence_of
from ampdoctor.health.sinks.table import Export, export_of
from ampdoctor.package import beside

ORPHAN_S = 60.0
"""How long a sink may finish what it has begun after the training's process has gone without a goodbye."""
_NAP_S = 0.2
_LINES = 20_000
"""Lines that wait in the sink's process, while a library is imported or a server asked; more wait in the pipe, and then
in the training's process."""
_POLITE = 10
"""Added to its niceness: the cores are the training's."""


class Apart:
    """The near end: what a listener of a log gives to a sink that lives elsewhere.

    A method may wait as long as the sink does: it is for a thread that nobody waits for. A forked process of the
    training may hold the pipe open; `close` says the end nevertheless.

    Args:
        what: The sink; its environment is that of this process when its first line comes.
    """

    def __init__(self, what: Export) -> None:
        self._what = what
        self._process: subprocess.Popen[bytes] | None = None

    def hear(self, whole: Stamped) -> None:
        """Hands a line on.

        Raises:
            OutputError: The sink has ended, for the reason that it gave.
        """
        line = whole.line
        if isinstance(line, DetailLine):  # no sink shows histograms, and they are most of a line
            tensors = tuple(replace(tensor, histogram=None) for tensor in line.tensors)
            whole = replace(whole, line=replace(line, tensors=tensors))
        self._send(text_of(whole).encode("ascii"))

    def close(self) -> None:
        """Has the sink finish, and waits until it has.

        Raises:
            OutputError: It has failed.
        """
        process = self._process
        if process is not None:
            self._send(b"\n")
            if process.wait() != 0:
                raise OutputError(self._reason(process))
            self._forget(process)

    def abandon(self) -> None:
        """Ends its process where it still runs; what it has not sent is in the log."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            self._forget(process)

    def _send(self, text: bytes) -> None:
        process = self._process = self._process or _started(self._what)
        try:
            _pipe(process.stdin).write(text)
            _pipe(process.stdin).flush()
        except BrokenPipeError:
            process.wait()
            raise OutputError(self._reason(process)) from None

    def _reason(self, process: subprocess.Popen[bytes]) -> str:
        said = _pipe(process.stdout).read().decode("utf-8", "replace").strip()
        self._forget(process)
        return said or f"its process has ended with code {process.returncode}"

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError, ValueError):
                _pipe(pipe).close()


def main() -> None:
    """The far end: reads lines until an empty one or the end, and hands them on to the sink.

    Where that fails, the reason is all that it writes, and it ends with 1; whatever a library prints goes nowhere.
    """
    os.nice(_POLITE)
    answer = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    lines: Queue[bytes] = Queue(_LINES)
    parent = int(sys.argv[2])
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    threading.Thread(target=_outlive, args=(parent,), daemon=True).start()
    try:
        _serve(export_of(sys.argv[1]), lines, parent)
    except BaseException as error:  # noqa: BLE001 - it is said, and this process is nobody else's
        with suppress(OSError):
            os.write(answer, sentence_of(error).encode()[:4000])
        os._exit(1)
    os._exit(0)  # what a library would still do at exit has no bound


def _serve(what: Export, lines: Queue[bytes], parent: int) -> None:
    exporter = Exporter(what.begin, often=what.kind.often)
    while True:
        try:
            text = lines.get(timeout=_NAP_S)
        except Empty:
            exporter.idle()
            if os.getppid() != parent:  # gone without a goodbye, and a child of its holds the pipe
                break
            continue
        if not text.strip():
            break
        whole = line_of(text)
        if whole is not None:
            exporter.hear(whole)
    exporter.close()


def _read(lines: Queue[bytes]) -> None:
    for text in sys.stdin.buffer:
        lines.put(text)
    lines.put(b"")


def _outlive(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(ORPHAN_S)
    os._exit(1)


def _started(what: Export) -> subprocess.Popen[bytes]:
    """Start the process, in a session of its own: Ctrl-C is for the training.

    Raises:
        OutputError: There is no interpreter to start.
    """
    command = beside("ampdoctor.health.sinks.apart", str(what), str(os.getpid()))
    if not command:
        raise OutputError("there is no Python that could be started beside this one")
    return subprocess.Popen(  # noqa: S603 - our own, with what the user has named as arguments
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # noqa: S101 for the type checker
    return pipe
