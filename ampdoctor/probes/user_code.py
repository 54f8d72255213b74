"""Lines of the user's code: where it runs an op, and where it makes parameters in float16."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
import sysconfig
import traceback
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ampdoctor.evidence.location import Source
from ampdoctor.hooks.program import recorded_line
from ampdoctor.hooks.torch_internals import replaced
from ampdoctor.package import FOLDER, working_folder

# -- the user's line: the innermost frame that belongs neither to torch nor to ampdoctor --

_OURS = f"{FOLDER}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_BOUNDARY = str(FOLDER / "replay" / "session.py")  # frames above the session belong to the caller of ampdoctor
_BASE: ContextVar[Path | None] = ContextVar("_BASE", default=None)
_ENGINE = str(Path(_TORCH) / "autograd" / "graph.py")  # user frames inside are hooks and custom functions of a backward
_CHECKPOINT = str(Path(_TORCH) / "utils" / "checkpoint.py")  # user frames inside belong to a recomputed forward
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_STANDARD = sysconfig.get_path("stdlib") + os.sep  # Python's own library, which may contain installed packages


@lru_cache(maxsize=4096)
def _is_user(filename: str) -> bool:
    """Whether the file is neither torch's, ours nor Python's (`copy.deepcopy`, `contextlib`): the caller counts."""
    ours = filename.startswith(("<", _TORCH, _OURS))
    return not ours and (not filename.startswith(_STANDARD) or _is_installed(filename))


@contextmanager
def shown_from(folder: Path) -> Iterator[None]:
    """Show files below `folder` relative to it, even if user code changes the working directory."""
    token = _BASE.set(folder)
    try:
        yield
    finally:
        _BASE.reset(token)


@lru_cache(maxsize=4096)
def _shown(filename: str, base: Path) -> str:
    path = Path(filename)
    parts = path.parts
    if "site-packages" in parts:
        return "/".join(parts[parts.index("site-packages") + 1 :])
    try:
        return (base / path).resolve().relative_to(base).as_posix()
    except (ValueError, OSError):
        return path.as_posix()


def user_line() -> tuple[str, int] | None:
    """File and line of the innermost user frame; None outside user code (C++ backward)."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename == _BOUNDARY:
            return recorded_line()
        if _is_user(filename):
            return filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def user_frames() -> Iterator[FrameType]:
    """The user's frames, and those of packages other than torch, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_user(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def own_line() -> tuple[str, int] | None:
    """The innermost user frame outside installed packages; if there is none, the innermost of all user frames."""
    frame = _own_frame()
    return user_line() if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def called_with() -> str:
    """The variable (`self.optimizer`) that the user's line gives to a scaler's `step` or `unscale_` now; else ""."""
    frame = next(user_frames(), None)
    if frame is None or _is_installed(frame.f_code.co_filename):
        return ""
    first, last, begin, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if first is None or last is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # before the first is cut: it may be the same
    lines[0] = lines[0][begin:]
    try:
        call = ast.parse(b"".join(lines), mode="eval").body
    except (SyntaxError, ValueError):  # the file has changed since
        return ""
    match call:
        case ast.Call(func=ast.Attribute(attr="step" | "unscale_"), args=[ast.Name() | ast.Attribute() as given, *_]):
            name = ast.unparse(given)
            return name if all(part.isidentifier() for part in name.split(".")) else ""
    return ""


def _own_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _BOUNDARY:
        filename = frame.f_code.co_filename
        if _is_user(filename) and not _is_installed(filename):
            return frame
        frame = frame.f_back
    return None


def hook_line() -> tuple[str, int] | None:
    """The user's line in a hook that a backward runs; None for the engine's own ops, and for a forward run again."""
    frame, line = sys._getframe(1), None
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename == _ENGINE:
            return line
        if filename in (_CHECKPOINT, _BOUNDARY):
            return None
        if line is None and _is_user(filename):
            line = filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return line  # in a thread of the engine's own


def applied_line() -> tuple[str, int] | None:
    """The line that called the custom autograd function whose forward is running; None outside of one."""
    frame = sys._getframe(1)
    inside = False
    while frame is not None and frame.f_code.co_filename != _BOUNDARY:
        if _is_forward_of_function(frame):
            inside = True
        elif inside and _is_user(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _is_forward_of_function(frame: FrameType) -> bool:
    """Whether it is the forward of a custom autograd function, or a decorator around one.

    `Function.apply` has no torch frame of its own from torch 2.14 on. A forward gets the context as its first argument;
    one that uses `setup_context` instead is recognised by its class.
    """
    code = frame.f_code
    if code.co_argcount or code.co_flags & inspect.CO_VARARGS:
        first = frame.f_locals.get(code.co_varnames[0 if code.co_argcount else code.co_kwonlyargcount])
        first = first[0] if isinstance(first, tuple) and first and not code.co_argcount else first
        if isinstance(first, torch.autograd.function.BackwardCFunction):
            return True
    return code.co_name == "forward" and any(
        inspect.unwrap(forward).__code__ is code for forward in _forwards(torch.autograd.Function)
    )


def _forwards(function: type[Any]) -> Iterator[FunctionType]:
    below: type[Any]
    for below in function.__subclasses__():
        forward = vars(below).get("forward")
        forward = getattr(forward, "__func__", forward)
        if isinstance(forward, FunctionType):
            yield forward
        yield from _forwards(below)


def raising_line(error: BaseException) -> tuple[str, int] | None:
    """The innermost user line through which an exception came, outside installed packages if possible."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(frame.filename, frame.lineno or 0) for frame in frames if _is_user(frame.filename)]
    found = [line for line in lines if not _is_installed(line[0])] or lines
    return found[-1] if found else None


def _is_installed(filename: str) -> bool:
    return not _PACKAGES.isdisjoint(Path(filename).parts)


def as_source(line: tuple[str, int] | None) -> Source | None:
    """The line for a report: relative to where the replay was started, or to site-packages."""
    if line is None:
        return None
    return Source(_shown(line[0], _BASE.get() or working_folder()), line[1], installed=_is_installed(line[0]))


# -- the line that makes parameters in float16: it casts, loads or builds the module --

_CASTS = ("half", "to")  # methods of a module that may turn its parameters into half


class HalfMade:
    """Notes for each float16 parameter the line that made it so; it keeps only weak references."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[weakref.ref[torch.Tensor], Source | None]] = {}

    def of(self, parameters: Iterable[torch.Tensor]) -> Source | None:
        for parameter in parameters:
            there, line = self._lines.get(id(parameter), (None, None))
            if there is not None and there() is parameter and line is not None:
                return line
        return None

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(register_module_parameter_registration_hook(self._registered).remove)
            for method in _CASTS:
                stack.enter_context(replaced(nn.Module, method, self._casting(getattr(nn.Module, method))))
            yield

    def _registered(self, _module: nn.Module, _name: str, parameter: Any) -> None:
        with suppress(Exception):  # an error here must not disturb the training
            if isinstance(parameter, torch.Tensor) and parameter.dtype is torch.float16:
                self._note(parameter)

    def _casting(self, original: Any) -> Any:
        def cast(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = original(module, *args, **kwargs)
            with suppress(Exception):
                for parameter in module.parameters():
                    if parameter.dtype is torch.float16 and self.of([parameter]) is None:
                        self._note(parameter)
            return result

        cast.__wrapped__ = original  # type: ignore[attr-defined]  # functions take attributes
        return cast

    def _note(self, parameter: torch.Tensor) -> None:
        self._lines[id(parameter)] = weakref.ref(parameter), as_source(own_line())
