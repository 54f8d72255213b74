"""The process that `main()` owns: the examined code sets no exit code, torch is loaded and memory kept with care."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ampdoctor.cli.process import ctrl_c
from ampdoctor.cli.process.streams import note
from ampdoctor.errors import EXIT_ERROR

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
    ctrl_c.claim()
    ctrl_c.answer()
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
    ctrl_c.settle(code)
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
