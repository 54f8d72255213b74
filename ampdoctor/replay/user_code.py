"""Runs the user's own code: handles its prints, `sys.argv`, folders and exceptions."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ampdoctor.errors import (
    AmpdoctorError,
    CheckpointError,
    FactoryError,
    ForkedChildError,
    ReplayError,
    UserCodeError,
)
from ampdoctor.hooks.interfaces import StepHalted, describe, is_out_of_memory
from ampdoctor.package import FOLDER
from ampdoctor.replay.refusals import explained

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_OWN_FOLDER = str(FOLDER) + os.sep
_HIDDEN_FILES = ("<frozen importlib.", "<frozen runpy", f"{os.sep}importlib{os.sep}", f"{os.sep}contextlib.py")


@contextlib.contextmanager
def user_code(
    argv0: str | None = None,
    *,
    what: str = "the factory",
    path: Sequence[str] = (),
    arguments: Sequence[str] = (),
) -> Iterator[None]:
    """Make the body believe that it runs in a process of its own: `python argv0`.

    What it prints, also from C++ and from child processes, goes to stderr: stdout carries the report and nothing else.
    All of it is undone afterwards, whatever the body does. Calls may be nested.

    Args:
        argv0: `sys.argv` begins with it inside; None leaves that alone.
        what: What runs; the subject of the error's sentence.
        path: Folders that are first on `sys.path` inside, in this order.
        arguments: What follows in `sys.argv`.

    Raises:
        UserCodeError: The body raised, be it `SystemExit` or another `BaseException`. Ampdoctor's own errors about the
            run, a halt that a probe asked for, and Ctrl-C pass.
        ReplayError: Memory ran out, which is not a mistake of the user's code.
        ForkedChildError: The process is a child that the body forked, not the one that entered.
    """
    argv, process = sys.argv, os.getpid()
    try:
        with prints_to_stderr(), import_path(path), working_folder():
            if argv0 is not None:
                sys.argv = [argv0, *arguments]
            yield
    except (KeyboardInterrupt, StepHalted):
        raise
    except SystemExit as error:
        raise UserCodeError(_exit_sentence(what, error), trimmed_traceback(error), describe(error)) from error
    except BaseException as error:
        if isinstance(error, GeneratorExit) and not has_user_frames(error):  # a generator of ours is being closed
            raise
        if isinstance(error, AmpdoctorError) and _is_ours(error):
            raise
        if is_out_of_memory(error):
            raise out_of_memory(what, error) from None
        said = describe(error)
        raise UserCodeError(f"{what} raised {said}", trimmed_traceback(error), said, explained(error)) from error
    finally:
        sys.argv = argv
        if os.getpid() != process:
            raise ForkedChildError(f"{what} forked, and the child did not end: it is ended here, and reports nothing")


def _is_ours(error: AmpdoctorError) -> bool:
    """Is the error about the run, and raised by a line of ours?

    User code may raise our errors too, and may itself call functions of ours that refuse its arguments.
    """
    frames = traceback.extract_tb(error.__traceback__)
    about_the_run = isinstance(error, CheckpointError | FactoryError | ReplayError) or not has_user_frames(error)
    return about_the_run and frames[-1].filename.startswith(_OWN_FOLDER)


def out_of_memory(what: str, error: BaseException) -> ReplayError:
    """Returns the error that says so, and releases what the frames of `error` hold, so that the run can be put back.

    Args:
        what: What ran; the subject of the sentence.
        error: What was raised.
    """
    traceback.clear_frames(error.__traceback__)
    return ReplayError(f"{what} ran out of memory ({describe(error)}): replay with smaller batches or a smaller model")


class _Folder:
    """The working folder as the user's code left it; there is one per process, as of the working folder itself."""

    theirs: str | None = None
    depth: int = 0


def forget_working_folder() -> None:
    """Let the next piece of user code start in the process's working folder, because it belongs to another run."""
    _Folder.theirs = None


@contextlib.contextmanager
def working_folder() -> Iterator[None]:
    """Enter the folder to which the user's code last changed, and come back afterwards.

    User code finds its own files as in a process of its own, and no path given to ampdoctor changes its meaning.
    """
    ours = _current_folder() if _Folder.depth == 0 else None
    if ours is not None and _Folder.theirs is not None:
        with contextlib.suppress(OSError):  # it has been removed meanwhile
            os.chdir(_Folder.theirs)
    _Folder.depth += 1
    try:
        yield
    finally:
        _Folder.depth -= 1
        if ours is not None:
            now = _current_folder()
            _Folder.theirs = None if now == ours else now
            if now != ours:
                with contextlib.suppress(OSError):
                    os.chdir(ours)


def _current_folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 os.chdir takes a string, and this runs at every step
    except OSError:  # it has been removed
        return None


@contextlib.contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Send what the body writes to `sys.stdout` and to file descriptor 1 to stderr."""
    with contextlib.ExitStack() as stack:
        stack.callback(_flush_stdout)
        saved = _redirect_descriptor()
        if saved is not None:
            stack.callback(_restore_descriptor, saved)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


@contextlib.contextmanager
def prints_to_nobody() -> Iterator[None]:
    """Drop what the body writes to `sys.stdout`: a step that is replayed says again what it has said."""
    with contextlib.redirect_stdout(_Nobody.stream()):
        yield


class _Nobody:
    """Where such prints go. It stays open: what the body makes may have taken hold of it."""

    _open: TextIO | None = None

    @classmethod
    def stream(cls) -> TextIO:
        if cls._open is None or cls._open.closed:
            cls._open = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 as said
        return cls._open


def _redirect_descriptor() -> int | None:
    _flush_stdout()
    try:
        saved = os.dup(1)
    except OSError:  # no stdout at all, as under a daemon: nothing can be printed there
        return None
    try:
        os.dup2(2, 1)
    except OSError:
        os.close(saved)
        return None
    return saved


def _restore_descriptor(saved: int) -> None:
    os.dup2(saved, 1)
    os.close(saved)


def _flush_stdout() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, broken or absent: not our concern here
        sys.stdout.flush()


@contextlib.contextmanager
def import_path(folders: Sequence[str]) -> Iterator[None]:
    """Put `folders` first on `sys.path`; afterwards remove them and leave what the body itself put there."""
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)


def _exit_sentence(what: str, error: SystemExit) -> str:
    code = "" if error.code is None else str(error.code).strip().partition("\n")[0]
    return f"{what} ended the program with sys.exit({code}) instead of returning"


def trimmed_traceback(error: BaseException) -> str:
    """Returns the traceback as Python prints it, causes included, without frames of ampdoctor and the import system.

    What ampdoctor itself was handling meanwhile is no part of the user's error. If no other frame is left and the last
    one is ampdoctor's, all frames stay: the error is then ours, or lies in how a callback was called.
    """
    rendered = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    todo: list[traceback.TracebackException | None] = [rendered]
    while todo:
        part = todo.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        shown = [frame for frame in part.stack if not _is_hidden(frame.filename)]
        if part.__context__ is not None and shown and _is_all_ours(part.__context__):
            part.__context__ = None
        # raised by a line of ours, with no user frame: our frames are then the only way to find the mistake
        if shown or not part.stack or not part.stack[-1].filename.startswith(_OWN_FOLDER):
            part.stack = traceback.StackSummary.from_list(shown)
        todo += [part.__cause__, part.__context__, *(part.exceptions or ())]
    return "".join(rendered.format())


def _is_all_ours(part: traceback.TracebackException) -> bool:
    return all(_is_hidden(frame.filename) for frame in part.stack) and part.stack[-1:] != []


def has_user_frames(error: BaseException) -> bool:
    """Did any of the user's own lines run before `error` was raised?"""
    return any(not _is_hidden(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def _is_hidden(filename: str) -> bool:
    return filename.startswith(_OWN_FOLDER) or any(part in filename for part in _HIDDEN_FILES)
