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


class state:  # noqa: N801 - one of a kind
    """Where the process stands."""

    answering: bool = False  # `main()` answers the KeyboardInterrupt
    interrupted: bool = False  # Ctrl-C was pressed since the process was claimed
    deaf: bool = False  # further ones are ignored: the end of the process is decided
    code: int | None = None  # the exit code with which each one ends the process at once, from now on


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


def _on_ctrl_c(signum: int, frame: FrameType | None) -> None:
    if state.deaf:
        return
    state.interrupted = True
    if state.code is not None:  # only exit handlers or threads still run
        _leave(state.code)
    # While torch is being imported its C++ code runs Python, and aborts where that raises
    loading = getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False)
    if not state.answering or loading:  # nothing has been written yet
        state.deaf = True
        try:
            if sys.__stderr__ is not None:  # user code's own may drop what is written
                sys.__stderr__.write(f"{INTERRUPTED}\n")
                sys.__stderr__.flush()
        finally:
            _leave(EXIT_INTERRUPTED)
    signal.default_int_handler(signum, frame)
