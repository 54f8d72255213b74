"""Process-wide setup: stdout for the report only, safe exit codes, memory, the import of torch, progress."""

from __future__ import annotations

import gc
import io
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from ampdoctor.cli import interrupt
from ampdoctor.errors import EXIT_ERROR, OutputError, UsageError
from ampdoctor.reports.escape import sanitise, sanitise_lines

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from ampdoctor.workflows.requests import Progress

# -- streams: only the report goes to stdout, everything else to stderr; no stream error crashes the tool --

_STDOUT, _STDERR = 1, 2

STDOUT = "-"
NAMES_OF_STDOUT = frozenset({STDOUT, "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"})
"""Opened by name, these would lead to the current descriptor 1, which may be stderr by then."""


class StdoutClosedError(Exception):
    """The reader of stdout has gone (`| head`)."""


class _Claim:
    process: int | None = None
    code: int | None = None
    stdout: bool = False  # whether the report has a stream of its own, `stream`
    stream: TextIO | None = None


def harden() -> None:
    """Escape characters that a stream cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def claim_stdout() -> None:
    """Keep the process's stdout for the report: descriptor 1 and `sys.stdout` become stderr until the process ends.

    Nothing is changed where `sys.stdout` has been replaced already.
    """
    out = sys.stdout
    if _Claim.stdout or out is not sys.__stdout__:
        return
    try:
        if out is not None:
            out.flush()
            private = os.dup(out.fileno())
            _Claim.stream = os.fdopen(private, "w", encoding=out.encoding, errors="backslashreplace")
        os.dup2(_STDERR, _STDOUT)
    except (OSError, ValueError):  # the descriptor was closed without Python: there is nothing to keep
        return
    _Claim.stdout = True
    sys.stdout = sys.stderr


@contextmanager
def report_on_stderr() -> Iterator[None]:
    """Send the report's stream to stderr inside the block: stdout belongs to the user's script."""
    before = _Claim.stdout, _Claim.stream
    _Claim.stdout, _Claim.stream = True, sys.stderr
    try:
        yield
    finally:
        _Claim.stdout, _Claim.stream = before


def report_stream() -> TextIO | None:
    """Return the report's stream; None where the process was started without a stdout."""
    return _Claim.stream if _Claim.stdout else sys.stdout


def write_stdout(text: str) -> None:
    """Write to the report's stream and flush; raises StdoutClosedError if its reader has gone, else OutputError."""
    stream = report_stream()
    if stream is None:
        raise OutputError("standard output is closed, and no --output was given")
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        discard(stream)
        raise StdoutClosedError from None
    except (OSError, ValueError) as error:  # ValueError: the examined code has closed it
        discard(stream)
        raise OutputError(f"cannot write to standard output: {getattr(error, 'strerror', None) or error}") from error


def note(text: str) -> None:
    """Write a line to stderr, if possible: a failure here must not change the outcome."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(sanitise_lines(text) + "\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)
    except Exception:  # noqa: BLE001 - the examined code has closed or replaced it
        return


def discard(stream: TextIO) -> None:
    """Redirect the stream to the null device, so that the interpreter's last flush cannot change the exit code."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # it is not a real file, and needs no flush
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}  # set how OpenMP's threads wait
_KEEP = {-3: 1 << 30, -1: (1 << 31) - 1}  # glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD (malloc.h), in bytes


def claim_process() -> None:
    """Note each Ctrl-C, and let `os._exit` end the process only with an exit code of ours.

    OpenMP's waiting threads are set to sleep, unless the user has set something: where another process uses a core, two
    that spin take longer than one.
    """
    if not _WAITING & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read when torch is imported, which happens later
    interrupt.claim()
    interrupt.state.answering = True
    _Claim.process = os.getpid()
    _replace_exit()


@contextmanager
def loading() -> Iterator[None]:
    """Imports modules that stay until a process of ours ends, without searching them for garbage cycles.

    torch makes hundreds of thousands of objects: their search takes a tenth of the import, and a quarter at the end.
    """
    if _Claim.process != os.getpid() or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory, unless it is configured: its page faults take a fifth of a diagnosis."""
    if os.name != "posix" or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        for option, value in _KEEP.items():
            library.mallopt(option, value)


def settle(code: int) -> int:
    """Protect the exit code from exit handlers, threads and Ctrl-C, which from now on ends the process at once."""
    # A child that the examined code forked ends here: handlers and buffers belong to the claimed process
    if _Claim.process not in {None, os.getpid()}:
        os._exit(code)
    # Python notes an interrupt inside an `exec` of a text, as dataclasses do it, and ends by the signal after its last
    # line; the next `exec` of a text clears the note (`run_eval_code_obj` of CPython's pythonrun.c).
    exec("")  # noqa: S102
    _Claim.code = code
    interrupt.state.code, interrupt.state.deaf = code, False
    return code


def _replace_exit() -> None:
    """Make `os._exit` use our exit code: 2 before there is a result, then the result's code."""
    leave = os._exit

    def end(status: int) -> NoReturn:
        if os.getpid() != _Claim.process:  # a forked worker keeps its own code
            leave(status)
        if _Claim.code is None:
            sys.stderr = sys.__stderr__  # that of user code may drop what is written
            note(f"ampdoctor: error: the code under examination ended the process with os._exit({status!r})")
        leave(EXIT_ERROR if _Claim.code is None else _Claim.code)

    os._exit = end


# -- text files of the user: a configuration, a baseline, a report --


def read_text(file: str, *, limit: int, what: str, lenient: bool = False) -> str:
    """Return the text of a regular file of at most `limit` bytes, without a byte order mark.

    `what` names it in errors ("the baseline"). `lenient` replaces bytes that are not UTF-8. Raises UsageError where the
    file is missing, unreadable, not regular, not UTF-8, or too large.
    """
    try:
        regular = stat.S_ISREG(os.stat(file).st_mode)  # noqa: PTH116 - opening a named pipe would block
        data = b""
        if regular:
            with Path(file).open("rb") as stream:
                data = stream.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise UsageError(f"cannot read {what} {file}: {getattr(error, 'strerror', None) or error}") from None
    if not regular:
        raise UsageError(f"cannot read {what} {file}: it is no regular file")
    if len(data) > limit:
        raise UsageError(f"cannot read {what} {file}: it is larger than {limit // 1024} KiB")
    try:
        return data.decode("utf-8-sig", "replace" if lenient else "strict")
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {what} {file}: it is not UTF-8 text") from None


# -- progress on stderr, drawn by Rich: only on a terminal, only for long work, and cleared afterwards --
#
# It refreshes at the calls alone: Rich's thread would draw beside user code, which may fork or hold the interpreter.

_DELAY = 1.0  # seconds: shorter work needs no progress
_INTERVAL = 0.1  # seconds between two updates


class ProgressLine:
    """One line that is rewritten in place; a `Progress`."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._last = -_INTERVAL
        self._phase: tuple[str, int | None] = ("", None)  # work of one kind, with a speed of its own
        self._bar: Bar | None = None

    def __call__(self, what: str, done: int, total: int | None, *, unit: str = "") -> None:
        """Show the progress of `what`, at most ten times a second."""
        now = self._clock() - self._start
        if now < _DELAY or now - self._last < _INTERVAL:
            return
        self._last = now
        phase = ("" if unit else what, total)
        with suppress(OSError):  # a lost terminal must not end the work
            if self._bar is None or phase != self._phase or done < self._bar.tasks[0].completed:
                self.clear()
                self._phase, self._bar = phase, self._begun(total, unit)
            self._bar.update(self._bar.task_ids[0], completed=done, description=sanitise(what), refresh=True)

    def clear(self) -> None:
        """Remove the line."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError):
                bar.stop()

    def _begun(self, total: int | None, unit: str) -> Bar:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        columns: list[progress.ProgressColumn] = [progress.TimeElapsedColumn()]
        if total:
            whole = Column(no_wrap=True)
            sizes = (progress.DownloadColumn(table_column=whole), progress.TransferSpeedColumn(table_column=whole))
            counted = sizes if unit == "B" else (progress.MofNCompleteColumn(),)
            columns = [progress.BarColumn(20), *counted, progress.TimeRemainingColumn()]
        bar = progress.Progress(
            *columns,
            progress.TextColumn("{task.description}", markup=False),
            console=Console(file=self._stream, force_terminal=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            get_time=self._clock,
        )
        bar.add_task("", total=total)
        bar.start()
        return bar


@contextmanager
def progress_line(*, wanted: bool) -> Iterator[Progress | None]:
    """Yield a progress line where one is wanted and stderr is a terminal that can rewrite a line, else None."""
    stream = sys.stderr
    if not wanted or stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    line = ProgressLine(stream)
    try:
        yield line
    finally:
        line.clear()
