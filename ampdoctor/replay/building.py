"""Stops the user's code where it begins to train or to write, though it was called only to build a run."""

from __future__ import annotations

import builtins
import functools
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ampdoctor.errors import FactoryError
from ampdoctor.loop.halt import StepHalted
from ampdoctor.package import FOLDER

_FACTORY = (
    "a factory builds a fresh model with its batches, loss and optimizer and returns them as a TrainingRun; the "
    "training itself, and what it writes, stay out of it"
)
_SCRIPT = 'what trains at its top level goes below `if __name__ == "__main__":`'


class _Stopped(StepHalted):
    """Ends what the user's code has begun; their `except Exception` does not swallow it."""


@contextmanager
def building(
    what: str, folders: Iterable[str | Path], *, imports: bool = False, may_step: bool = False
) -> Iterator[None]:
    """Stop the body at the first step of an optimizer, or before a file below the folders is opened for writing.

    A step with a learning rate of 0 trains nothing: so torch itself makes an optimizer's state. What is appended to (a
    log) loses nothing, and folders may be made. Hidden files and folders, caches and temporary files are nobody's work.

    Args:
        what: What runs; the subject of the error's sentence.
        folders: The working folder, and that of the user's file.
        imports: A file is imported, and not a factory called.
        may_step: Steps are let be: the body says that it makes a run, and needs them for the run's state.

    Raises:
        FactoryError: The body was stopped; the sentence says what a factory is.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    roots = [Path(folder).resolve() for folder in folders]
    stopped: list[str] = []

    def stop(did: str) -> None:
        line = _line()
        advice = f"{_SCRIPT}; {_FACTORY}" if imports else _FACTORY
        stopped.append(f"{what} {did}{f' at {line}' if line else ''}, and was stopped there: {advice}")
        raise _Stopped

    def on_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if any(float(group.get("lr", 1.0)) for group in optimizer.param_groups):
            stop("steps an optimizer")

    def on_write(file: Any) -> None:
        if is_own_work(file, roots):
            stop(f"opens {os.fsdecode(file)} for writing")

    try:
        with ExitStack() as stack:
            if not may_step:
                stack.callback(register_optimizer_step_pre_hook(on_step).remove)
            for place, name, file_at in _writers():
                stack.callback(setattr, place, name, getattr(place, name))
                setattr(place, name, _told(getattr(place, name), file_at, on_write))
            yield
    except _Stopped:
        pass
    if stopped:
        raise FactoryError(stopped[0])


def is_own_work(file: Any, roots: Iterable[Path]) -> bool:
    """Is it a file that lies, or would lie, below one of the folders: no device, nothing hidden, nothing temporary?"""
    if not isinstance(file, str | bytes | os.PathLike):
        return False
    path = Path(os.fsdecode(file))
    if path.exists() and not path.is_file():
        return False
    path = path.resolve()
    temporary = Path(tempfile.gettempdir()).resolve()
    for root in roots:
        if path.is_relative_to(root) and not (path.is_relative_to(temporary) and not root.is_relative_to(temporary)):
            below = path.relative_to(root).parts
            return not any(part.startswith(".") or part in ("__pycache__", "site-packages") for part in below)
    return False


def _writers() -> Iterator[tuple[Any, str, int]]:
    """What opens a file for writing, and which of its arguments is the file: Python's, torch's and safetensors' own."""
    import torch

    yield builtins, "open", 0
    yield io, "open", 0
    yield torch._C, "PyTorchFileWriter", 0  # noqa: SLF001 torch.save opens a path with it, in C++
    safetensors = sys.modules.get("safetensors.torch")
    if safetensors is not None:
        yield safetensors, "serialize_file", 1


def _told(original: Any, file_at: int, on_write: Callable[[Any], None]) -> Any:
    """The function, told of each file that it opens for writing; one that takes a mode is Python's `open`."""

    @functools.wraps(original)
    def opening(*args: Any, **kwargs: Any) -> Any:
        mode = kwargs.get("mode", args[1] if len(args) > 1 else "r") if original is _OPEN else "w"
        if len(args) > file_at and isinstance(mode, str) and set(mode) & set("wx+") and "a" not in mode:
            on_write(args[file_at])
        return original(*args, **kwargs)

    return opening


_OPEN = builtins.open


def _line() -> str:
    """The innermost line of the user's own: "train.py:41"; "" where none is known."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 the one way up that makes no traceback
    base = sys.base_prefix + os.sep
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith(("<", str(FOLDER), base)) or "site-packages" in name):
            try:
                return f"{Path(name).resolve().relative_to(Path.cwd()).as_posix()}:{frame.f_lineno}"
            except (ValueError, OSError):
                return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
