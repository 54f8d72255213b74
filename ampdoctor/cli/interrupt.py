"""Ctrl-C ends the process with exit code 130 and one sentence, whenever it comes.

Code that is being imported may swallow a KeyboardInterrupt, or turn it into an error about the half that is missing;
that the key was pressed is therefore noted where the signal arrives. This module is imported before all others, and
imports next to nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from ampdoctor.errors import EXIT_INTERRUPTED

INTERRUPTED = "ampdoctor: interrupted"
"""What is said after Ctrl-C."""
_leave = os._exit
"""Python's own: `process.claim_process` puts another in its place."""


class _Claim:
    """What is known of the process; one, as the process is one."""

    answering: bool = False
    interrupted: bool = False
    deaf: bool = False
    code: int | None = None


def claim() -> None:
    """Note each Ctrl-C; until `main()` answers, the first one ends the process.

    Nothing is done about a Ctrl-C that is ignored already (`nohup`) or handled by somebody else.
    """
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
    """From now on a Ctrl-C is raised as a KeyboardInterrupt, which `main()` answers."""
    _Claim.answering = True


def interrupted() -> bool:
    """Whether Ctrl-C was pressed since the process was claimed."""
    return _Claim.interrupted


def ignore() -> None:
    """Let a further Ctrl-C change nothing: how the process ends is decided."""
    _Claim.deaf = True


def settle(code: int) -> None:
    """From now on a Ctrl-C ends all at once, with this exit code."""
    _Claim.code = code
    _Claim.deaf = False


def _on_ctrl_c(signum: int, frame: FrameType | None) -> None:
    if _Claim.deaf:
        return
    _Claim.interrupted = True
    if _Claim.code is not None:  # all is said, and what is waited for is an exit handler or a thread
        _leave(_Claim.code)
    if not _Claim.answering or _torch_is_loading():  # nothing has been written yet
        _end()
    signal.default_int_handler(signum, frame)


def _torch_is_loading() -> bool:
    """Its C++ runs Python and aborts where that raises."""
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
