"""Runs user code with its own `sys.argv`, folders and output, and turns its exceptions into errors with advice."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from ampdoctor.errors import AmpdoctorError, CheckpointError, FactoryError, ForkedChildError, ReplayError, UserCodeError
from ampdoctor.hooks.interfaces import StepHalted, describe, is_out_of_memory
from ampdoctor.package import FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


# -- reasons and remedies for torch's refusals of half-precision tensors --
#
# Each row comes from training code, and a test reproduces it. torch's words differ by op; the reasons are few.


_HALF = "(Half|BFloat16)"
_TABLE = {
    rf"value cannot be converted to type \S*{_HALF} without overflow": (
        "a number in this call is beyond {largest}, and the tensor is half (autocast makes it so): write "
        "torch.finfo(x.dtype).min, with the tensor for x, or float('-inf') in place of a large constant"
    ),
    rf"(Index put requires|index_\w+\(\): self|masked_scatter: expected).*{_HALF}|scatter\(\): Expected self.dtype": (
        "what is written is half, by autocast, and the tensor that it is written into is not, or the other way "
        "round: make that one with source.new_zeros(...) or dtype=source.dtype, or write source.to(target.dtype)"
    ),
    rf"not implemented for '{_HALF}|Low precision dtypes not supported. Got {_HALF}|Unsupported dtype {_HALF}": (
        "the op has no kernel for half on this device: run it in float32, with x.float() inside "
        "torch.autocast(device_type, enabled=False)"
    ),
    r"Cannot access accelerator device when none is available|FSDP needs a non-CPU accelerator": (
        "FSDP shards over GPUs, and a replay on a CPU is one process, which shards nothing: leave it out here"
    ),
    r"Got unsupported ScalarType BFloat16": "NumPy has no bfloat16: write x.float().numpy()",
    rf"(?i)(same dtype|expected scalar type|should be the same|found dtype|must be the same).*{_HALF}"
    rf"|{_HALF}.*(should be the same|must be the same|found float|but got dtype float|!= float)"
    r"|RNN input dtype \(torch.b?float16\)": (
        "one operand is half and the other float32, and autocast does not bring them together here (it is off, or "
        "does not know the op): cast one, as in x.to(layer.weight.dtype), or run both in float32"
    ),
}
_LARGEST = {False: "65504, float16's largest number", True: "3.39e38, bfloat16's largest number"}
_OURS, _TORCH = f"{FOLDER}{os.sep}", str(Path("site-packages", "torch")) + os.sep


def explained(error: BaseException) -> str | None:
    """Returns line, reason and remedy of an error that comes from mixed precision; None for other errors."""
    if isinstance(error, ImportError):
        if "attempted relative import" in str(error):
            return "The file belongs to a package: name it as a module, from the folder above, as in `package.train`."
        from ampdoctor.precision.fake_gpu.missing_libraries import explain_missing  # brings torch

        return explain_missing(error)
    if not isinstance(error, RuntimeError | TypeError | ValueError):
        return None
    said = str(error)
    why = next((why for pattern, why in _TABLE.items() if re.search(pattern, said)), None)
    if why is None:
        return None
    return f"{_place(error)}{why.format(largest=_LARGEST['BFloat16' in said])}"


def _place(error: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, "<")) and _TORCH not in frame.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""


_HIDDEN_FILES = ("<frozen importlib.", "<frozen runpy", f"{os.sep}importlib{os.sep}", f"{os.sep}contextlib.py")


@contextlib.contextmanager
def user_code(
    argv0: str | None = None, *, what: str = "the factory", path: Sequence[str] = (), arguments: Sequence[str] = ()
) -> Iterator[None]:
    """Run the body as if in a process of its own (`python argv0 *arguments`), its output to stderr; may be nested.

    `path` holds folders for the start of `sys.path`, `what` is the subject of an error's sentence. Raises UserCodeError
    if the body raised anything but our own errors about the run, a stop by a probe or Ctrl-C; ReplayError if memory ran
    out, and ForkedChildError in a child process that the body forked.
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
        code = "" if error.code is None else str(error.code).strip().partition("\n")[0]
        said = f"{what} ended the program with sys.exit({code}) instead of returning"
        raise UserCodeError(said, trimmed_traceback(error), describe(error)) from error
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
    """Is the error about the run, and raised in our code? User code may raise our errors too."""
    frames = traceback.extract_tb(error.__traceback__)
    about_the_run = isinstance(error, CheckpointError | FactoryError | ReplayError) or not has_user_frames(error)
    return about_the_run and frames[-1].filename.startswith(_OURS)


def out_of_memory(what: str, error: BaseException) -> ReplayError:
    """Returns the error to raise, and frees what the frames of `error` hold, so that the run can be restored."""
    traceback.clear_frames(error.__traceback__)
    return ReplayError(f"{what} ran out of memory ({describe(error)}): replay with smaller batches or a smaller model")


class _Folder:
    """The working folder that user code last set; one per process."""

    theirs: str | None = None
    depth: int = 0


def forget_working_folder() -> None:
    """Let the next user code start in the process's working folder, because it belongs to another run."""
    _Folder.theirs = None


@contextlib.contextmanager
def working_folder() -> Iterator[None]:
    """Enter the folder to which the user's code last changed, and come back at exit."""
    ours = _current_folder() if _Folder.depth == 0 else None
    if ours is not None and _Folder.theirs is not None:
        with contextlib.suppress(OSError):  # it was removed
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
    except OSError:  # it was removed
        return None


@contextlib.contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Send what the body writes to `sys.stdout` and to file descriptor 1 to stderr."""
    with contextlib.ExitStack() as stack:
        stack.callback(_flush_stdout)
        _flush_stdout()
        with contextlib.suppress(OSError):  # no stdout, as in a daemon: nothing can be printed
            saved = os.dup(1)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, 1)
            os.dup2(2, 1)
        if sys.stderr is not None and sys.stderr is not _output:
            _output.stream = sys.stderr
            stack.enter_context(contextlib.redirect_stderr(cast("TextIO", _output)))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


class _UserOutput:
    """stdout and stderr of user code. A handler or bar that is made in one replay writes to it in the next as well."""

    stream: Any = None
    dropped: deque[str] | None = None  # the last of what is not shown, while nothing is

    def write(self, text: str) -> int:
        if self.dropped is None:
            self.stream.write(text)
        else:
            self.dropped.append(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_output = _UserOutput()


@contextlib.contextmanager
def prints_to_nobody(*, unless_it_raises: bool = False) -> Iterator[None]:
    """Drop what the body writes to stdout and stderr; show it after all if an error leaves the body, where asked."""
    before, dropped = _output.dropped, deque[str](maxlen=_MOST_DROPPED)
    _output.dropped = dropped
    try:
        yield
    except Exception:
        if unless_it_raises:
            _output.dropped = before
            _output.writelines(dropped)
        raise
    finally:
        _output.dropped = before


_MOST_DROPPED = 1000  # pieces of text that are kept of what is not shown


def shown_once(shown: set[object], part: object) -> contextlib.AbstractContextManager[None]:
    """Show what the body prints, unless `part` of the run is in `shown` already, which then holds it."""
    if part in shown:
        return prints_to_nobody()
    shown.add(part)
    return contextlib.nullcontext()


def _flush_stdout() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, broken or absent
        sys.stdout.flush()


@contextlib.contextmanager
def import_path(folders: Sequence[str]) -> Iterator[None]:
    """Put `folders` first on `sys.path`; at exit remove them, and leave entries of the body."""
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)


def trimmed_traceback(error: BaseException) -> str:
    """Returns the traceback as Python prints it, with causes, but without frames of ampdoctor and the import system."""
    rendered = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    todo: list[traceback.TracebackException | None] = [rendered]
    while todo:
        part = todo.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        shown = [frame for frame in part.stack if not _is_hidden(frame.filename)]
        below = part.__context__.stack if part.__context__ is not None else ()
        if shown and below and all(_is_hidden(frame.filename) for frame in below):  # all of it is ours
            part.__context__ = None
        # raised in our code without a user frame: only our frames show the mistake
        if shown or not part.stack or not part.stack[-1].filename.startswith(_OURS):
            part.stack = traceback.StackSummary.from_list(shown)
        todo += [part.__cause__, part.__context__, *(part.exceptions or ())]
    return "".join(rendered.format())


def has_user_frames(error: BaseException) -> bool:
    """Did any line of the user's run before `error` was raised?"""
    return any(not _is_hidden(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def _is_hidden(filename: str) -> bool:
    return filename.startswith(_OURS) or any(part in filename for part in _HIDDEN_FILES)
