"""The process that `main()` owns: the examined code sets no exit code, torch is loaded and memory kept with care."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NoReturn, TextIO

from ampdoctor.cli import interrupt
from ampdoctor.errors import EXIT_ERROR, OutputError, UsageError
from ampdoctor.reports.escape import sanitise_lines

# The two streams: the report and nothing else on stdout, everything else on stderr, and neither can crash the tool.


_STDOUT, _STDERR = 1, 2

STDOUT = "-"
NAMES_OF_STDOUT = frozenset({STDOUT, "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"})
"""Opened by name they would lead to whatever descriptor 1 is by then."""


class StdoutClosedError(Exception):
    """Whoever read stdout has gone (`| head`); there is nobody to tell."""


class _StreamClaim:
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
    if _StreamClaim.made or out is not sys.__stdout__:
        return
    _open_missing_stderr()
    try:
        if out is not None:
            out.flush()
            private = os.dup(out.fileno())
            _StreamClaim.stream = os.fdopen(private, "w", encoding=out.encoding, errors="backslashreplace")
        os.dup2(_STDERR, _STDOUT)
    except (OSError, ValueError):  # closed behind Python's back: there is nothing to keep
        return
    _StreamClaim.made = True
    sys.stdout = sys.stderr


@contextmanager
def report_on_stderr() -> Iterator[None]:
    """While the block runs, what goes to the report's stream goes to stderr: stdout belongs to somebody's script."""
    before = _StreamClaim.made, _StreamClaim.stream
    _StreamClaim.made, _StreamClaim.stream = True, sys.stderr
    try:
        yield
    finally:
        _StreamClaim.made, _StreamClaim.stream = before


def report_stream() -> TextIO | None:
    """The stream that takes the report; None where the process was started without a stdout."""
    return _StreamClaim.stream if _StreamClaim.made else sys.stdout


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


_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
"""Variables with which a user says how OpenMP's threads wait."""
_KEEP = {-3: 1 << 30, -1: (1 << 31) - 1}
"""glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD (malloc.h), and their values here, in bytes."""


class _Claim:
    """What is known of the process; one, as the process is one."""

    process: int | None = None
    code: int | None = None


def claim_process() -> None:
    """Note each Ctrl-C, and let `os._exit` end the process with a code of ours only.

    OpenMP is told to let waiting threads sleep, unless it was told something: its default spins, and where another
    process holds a core, two threads then take longer than one (products and casts of a transformer's size beside one
    busy process, two cores: 6.2 to 18.5 s against 4.2 to 4.4 s on one thread; asleep 4.5 to 5.5 s, and alone as fast as
    with the default).
    """
    if not _WAITING & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read when torch is loaded, which is not yet
    interrupt.claim()
    interrupt.answer()
    _Claim.process = os.getpid()
    _replace_exit()


@contextmanager
def loading() -> Iterator[None]:
    """Imports what stays until the process ends, hidden from the collector of cycles.

    torch makes hundreds of thousands of objects. To look through them while they are made takes a tenth of its import,
    and to look through them once more at the process's end a quarter of it. In a process that is not ours nothing is
    hidden: its own objects would be with them.
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
    """Let what a step frees serve the next one: glibc hands large blocks back to the system, and each comes back empty.

    Each page of it is a fault then, a fifth of a diagnosis: four steps of a GPT-2 124M took 36.5 s instead of 44.7, and
    6.2 GB instead of 5.7. Nothing is done where the user has said how memory is handed out, or it is not glibc's.
    """
    if os.name != "posix" or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        for option, value in _KEEP.items():
            library.mallopt(option, value)


def settle(code: int) -> int:
    """Keep the exit code from what still runs: exit handlers, threads, Ctrl-C, which from now on ends all at once.

    A child that the examined code forked ends here: handlers and buffers are those of the process that was claimed.
    """
    if _Claim.process not in {None, os.getpid()}:
        os._exit(code)
    # An interrupt inside an `exec` of a text, as dataclasses do it, is noted by Python, which then dies of the signal
    # after its last line; the next `exec` of a text takes the note back (`run_eval_code_obj` of CPython's pythonrun.c).
    exec("")  # noqa: S102
    _Claim.code = code
    interrupt.settle(code)
    return code


def _replace_exit() -> None:
    """Give `os._exit` our exit code: 2 before there is an answer, afterwards that of the answer."""
    leave = os._exit

    def end(status: int) -> NoReturn:
        if os.getpid() != _Claim.process:  # a forked worker: its code is its own
            leave(status)
        if _Claim.code is None:
            note(f"ampdoctor: error: the code under examination ended the process with os._exit({status!r})")
        leave(EXIT_ERROR if _Claim.code is None else _Claim.code)

    os._exit = end


# Read a text file of the user's: a configuration, a baseline, a report.


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
