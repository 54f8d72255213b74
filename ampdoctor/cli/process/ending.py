"""How a process ends that belongs to somebody's script: as Python itself ends it, word for word."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, ClassVar

from ampdoctor.errors import EXIT_INTERRUPTED, EXIT_OK

_RAISED = 1
"""Python's exit code after an error that nobody has caught."""


class _Ended:
    """What is known of the process; one, as the process is one."""

    interrupted: ClassVar[list[KeyboardInterrupt]] = []


def answer(error: BaseException | None) -> int:
    """Say what Python says of what a script has ended with, and return the exit code.

    Args:
        error: With the traceback as it is to be shown; None: the script has reached its end.
    """
    if error is None:
        return EXIT_OK
    if isinstance(error, SystemExit):
        return _asked(error)
    asked = _show(error)
    if asked is not None:
        return asked
    if isinstance(error, KeyboardInterrupt):
        _Ended.interrupted[:] = [error]
        return EXIT_INTERRUPTED
    return _RAISED


def flush() -> None:
    """Empty the streams' buffers, as Python does behind a file's last line; what cannot be written is told later."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(Exception):
            stream.flush()


def end_as_python(code: int) -> int:
    """Return the exit code of the process.

    Raises:
        KeyboardInterrupt: One has ended the script, and has been told. Python dies of the signal where it meets one
            that nobody has caught, after exit handlers and threads, which is how a shell's loop knows to stop.
    """
    if _Ended.interrupted and code == EXIT_INTERRUPTED:
        sys.excepthook = _say_nothing
        raise _Ended.interrupted.pop()
    return code


def _asked(error: SystemExit) -> int:
    if error.code is None:
        return EXIT_OK
    if isinstance(error.code, int):
        return error.code
    _write(error.code)
    _write("\n")
    return _RAISED


def _show(error: BaseException) -> int | None:
    """Call the script's `sys.excepthook`, or Python's; an exit code where it ends the process."""
    told = (type(error), error, error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = told
    if sys.version_info >= (3, 12):  # which forgets it at the process's end, as those before do not
        sys.last_exc = error
    hook = getattr(sys, "excepthook", None)
    sys.audit("sys.excepthook", hook, *told)
    if hook is None:
        _write("sys.excepthook is missing\n")
        sys.__excepthook__(*told)
        return None
    failed = _failed(hook, told)
    if isinstance(failed, SystemExit):
        return _asked(failed)
    if failed is not None:
        _write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(failed), failed, failed.__traceback__)
        _write("\nOriginal exception was:\n")
        sys.__excepthook__(*told)
    return None


def _failed(hook: Any, told: tuple[Any, ...]) -> BaseException | None:
    """Call it; what it raises is returned, without the frame of this function."""
    try:
        hook(*told)
    except BaseException as error:  # noqa: BLE001 - as Python takes it
        traceback = error.__traceback__
        return error.with_traceback(None if traceback is None else traceback.tb_next)
    return None


def _write(what: object) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(Exception):
            sys.stderr.write(str(what))


def _say_nothing(*_: object) -> None:
    """It has been told."""
