"""Ctrl-C ends the process with exit code 130 and one sentence, whenever it comes.

Code that is being imported may swallow a KeyboardInterrupt, or raise another error about the missing half. So the
signal handler notes that the key was pressed. This module is imported before all others, and imports almost nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from ampdoctor.errors import EXIT_INTERRUPTED

INTERRUPTED = "ampdoctor: interrupted"  # printed after Ctrl-C
_leave = os._exit  # Python's own, which `process.claim_process` replaces


class _Claim:
    answering: bool = False
    interrupted: bool = False
    deaf: bool = False
    code: int | None = None


def claim() -> None:
    """Note each Ctrl-C; until `main()` answers, the first one ends the process."""
    # A Ctrl-C that is already ignored (`nohup`) or handled by others is left alone
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:
            signal.signal(signal.SIGINT, _on_ctrl_c)
        except ValueError:  # not the main thread
            return


def release() -> None:
    """Leave Ctrl-C to the code that runs from now on, as Python does."""
    if signal.getsignal(signal.SIGINT) is _on_ctrl_c:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def answer() -> None:
    """From now on raise a KeyboardInterrupt on Ctrl-C, which `main()` answers."""
    _Claim.answering = True


def interrupted() -> bool:
    """Whether Ctrl-C was pressed since the process was claimed."""
    return _Claim.interrupted


def ignore() -> None:
    """Ignore further Ctrl-C: the end of the process is decided."""
    _Claim.deaf = True


def settle(code: int) -> None:
    """From now on end at once on Ctrl-C, with this exit code."""
    _Claim.code = code
    _Claim.deaf = False


def _on_ctrl_c(signum: int, frame: FrameType | None) -> None:
    if _Claim.deaf:
        return
    _Claim.interrupted = True
    if _Claim.code is not None:  # only exit handlers or threads still run
        _leave(_Claim.code)
    if not _Claim.answering or _torch_is_loading():  # nothing has been written yet
        _end()
    signal.default_int_handler(signum, frame)


def _torch_is_loading() -> bool:
    """Whether torch is being imported: its C++ code runs Python, and aborts where that raises."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _end() -> None:
    _Claim.deaf = True
    try:
        if sys.stderr is not None:
            sys.stderr.write(f"{INTERRUPTED}\n")
            sys.stderr.flush()
    finally:
        _leave(EXIT_INTERRUPTED)
