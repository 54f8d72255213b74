"""Lines of the user's code: where it runs an op, and where it makes parameters in float16."""

from __future__ import annotations

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
from types import FrameType
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
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _BOUNDARY:
        filename = frame.f_code.co_filename
        if _is_user(filename) and not _is_installed(filename):
            return filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return user_line()


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
